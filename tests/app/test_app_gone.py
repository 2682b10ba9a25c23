"""Documents that go: nothing of their text is found any more, and nothing of their KV is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from ragblend.errors import IngestError
from ragblend.kb import KnowledgeBase
from ragblend.kb import files as files_of_kb
from ragblend.kb.reports import IngestSummary

BRIDGE = "The Old Harbour Bridge was designed by Mira Solheim in 1931."
MOON = "The moon is 384400 kilometres away, and a rocket flies there in three days."


@pytest.fixture
def kb(tmp_path: Path, tiny_model: Path, tiny_embedding_model: Path) -> Iterator[KnowledgeBase]:
    with KnowledgeBase(tmp_path / "store", model=tiny_model, embedding_model=str(tiny_embedding_model)) as opened:
        yield opened


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "bridge.txt").write_text(BRIDGE)
    (folder / "moon.txt").write_text(MOON)
    return folder


def found(kb: KnowledgeBase) -> set[str]:
    return {hit.node.get_content() for hit in kb.as_retriever(99).retrieve("Which bridge?")}


def forgotten(kb: KnowledgeBase, done: IngestSummary) -> bool:
    """Whether one document was forgotten, with its text and its KV."""
    assert kb.index.loose_keys() == []
    assert kb.store.keys() == kb.index.kv_keys(kb.models.signature)
    return (done.pruned, found(kb), kb.engine.stored_variants(BRIDGE)) == (1, {MOON}, {})


def emptied(file: Path) -> None:
    file.write_text("")


def blank(file: Path) -> None:
    file.write_text(" \n\t\n")


def binary(file: Path) -> None:
    file.write_bytes(bytes(range(256)))


def of_another_encoding(file: Path) -> None:
    file.write_bytes("caf\xe9".encode("latin-1"))


def replaced_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_link_to_nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.with_name("nowhere"))


def replaced_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("overwritten", [emptied, blank, binary, of_another_encoding])
def test_a_document_without_text_any_more_is_forgotten(
    kb: KnowledgeBase, notes: Path, overwritten: Callable[[Path], None]
) -> None:
    kb.ingest([notes])
    overwritten(notes / "bridge.txt")
    done = kb.ingest([notes])
    assert (done.documents, done.unchanged) == (0, 1)
    assert forgotten(kb, done)
    ((path, reason),) = done.skipped
    assert path == str(notes / "bridge.txt")
    assert "forgotten" in reason
    again = kb.ingest([notes])
    assert (again.pruned, [skip.path for skip in again.skipped]) == (0, [path])
    assert "forgotten" not in again.skipped[0].reason
    (notes / "bridge.txt").write_text(BRIDGE)
    assert kb.ingest([notes]).documents == 1
    assert found(kb) == {BRIDGE, MOON}


def test_html_without_text_any_more_is_forgotten(kb: KnowledgeBase, notes: Path) -> None:
    (notes / "bridge.txt").unlink()
    (notes / "bridge.html").write_text(f"<p>{BRIDGE}</p>")
    kb.ingest([notes])
    (notes / "bridge.html").write_text("<script>no()</script>")
    assert forgotten(kb, kb.ingest([notes]))


def test_a_text_that_is_empty_now_is_forgotten(kb: KnowledgeBase) -> None:
    kb.ingest_texts({"bridge": BRIDGE, "moon": MOON})
    assert forgotten(kb, kb.ingest_texts({"bridge": ""}))


@pytest.mark.parametrize("replaced", [replaced_by_folder, replaced_by_link_to_nowhere, replaced_by_pipe])
def test_what_is_no_file_any_more_goes_with_prune(
    kb: KnowledgeBase, notes: Path, replaced: Callable[[Path], None]
) -> None:
    kb.ingest([notes])
    replaced(notes / "bridge.txt")
    assert kb.ingest([notes]).pruned == 0
    assert found(kb) == {BRIDGE, MOON}
    assert forgotten(kb, kb.ingest([notes], prune=True))
    assert kb.ingest([notes], prune=True).pruned == 0


def test_what_cannot_be_looked_at_is_kept(kb: KnowledgeBase, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kb.ingest([notes])
    (notes / "bridge.txt").write_text("")

    opened = Path.open

    def refusing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parent == notes:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refusing)
        done = kb.ingest([notes], prune=True)
    assert (done.pruned, {skip.reason for skip in done.skipped}) == (0, {"Permission denied"})
    assert found(kb) == {BRIDGE, MOON}


def test_what_cannot_be_read_as_before_is_kept_as_long_as_it_has_not_changed(
    kb: KnowledgeBase, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are read anew, such as with another chunk length, and this time there is no reader for one."""
    kb.ingest([notes])
    kb.chunk_tokens = 100

    def without_reader(path: Path) -> list[files_of_kb.Part]:
        raise files_of_kb.NoTextError("ImportError: no reader")

    monkeypatch.setattr("ragblend.kb.ingestion.read_file", without_reader)
    done = kb.ingest([notes])
    assert (done.pruned, len(done.skipped)) == (0, 2)
    assert found(kb) == {BRIDGE, MOON}


def test_a_path_that_was_named_itself_goes_with_prune(kb: KnowledgeBase, notes: Path) -> None:
    bridge, moon = notes / "bridge.txt", notes / "moon.txt"
    kb.ingest([bridge, moon])
    bridge.unlink()
    with pytest.raises(IngestError, match=r"bridge\.txt"):
        kb.ingest([bridge, moon])
    moon.write_text(MOON + " Or four.")
    with pytest.raises(IngestError, match=r"brigde\.txt"):
        kb.ingest([bridge, notes / "brigde.txt", moon], prune=True)
    assert found(kb) == {BRIDGE, MOON}, "nothing is done before the error"
    moon.write_text(MOON)
    assert forgotten(kb, kb.ingest([bridge, moon], prune=True))
    with pytest.raises(IngestError, match=r"bridge\.txt"):
        kb.ingest([bridge, moon], prune=True)


@pytest.mark.parametrize("name", [b"notes", b"n\xe9tes"])
def test_a_folder_that_is_gone_goes_with_prune(kb: KnowledgeBase, tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    (folder / "deeper").mkdir(parents=True)
    (folder / "deeper" / "bridge.txt").write_text(BRIDGE)
    kb.ingest(folder)
    kb.ingest_texts({"moon": MOON})
    shutil.rmtree(folder)
    with pytest.raises(IngestError, match="no file or folder"):
        kb.ingest(folder)
    assert forgotten(kb, kb.ingest(folder, prune=True))


def test_what_lies_in_a_folder_that_cannot_be_listed_is_kept(
    kb: KnowledgeBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "notes" / os.fsdecode(b"n\xe9")
    folder.mkdir(parents=True)
    (folder / "bridge.txt").write_text(BRIDGE)
    kb.ingest(tmp_path / "notes")
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if str(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    done = kb.ingest(tmp_path / "notes", prune=True)
    assert (done.pruned, len(done.skipped)) == (0, 1)
    assert found(kb) == {BRIDGE}


def test_the_command_line_says_what_is_forgotten(
    cli: Cli, notes: Path, tiny_embedding_model: Path, tmp_path: Path
) -> None:
    cli("ingest", notes, "--embedding-model", tiny_embedding_model)
    (notes / "bridge.txt").write_text("")
    done = cli("ingest", notes)
    assert done.code == 3
    assert "1 skipped, 1 forgotten" in done.out
    assert f"skipped {notes / 'bridge.txt'}: empty; what was read from it before is forgotten" in done.err
    (notes / "moon.txt").unlink()
    assert cli("ingest", notes / "moon.txt", "--json").json["error"]["type"] == "IngestError"
    done = cli("ingest", notes / "moon.txt", "--prune", "--json")
    assert (done.code, done.json["pruned"]) == (0, 1)
    assert cli("ingest", notes / "moon.txt", "--prune", "--json").code == 1
