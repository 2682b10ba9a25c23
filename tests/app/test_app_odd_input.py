"""Input nobody means to give: every one is answered or explained, and costs no other document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import RUN, Cli

from ragblend.errors import ContextWindowError, IngestError, InvalidSettingError
from ragblend.kb import KnowledgeBase
from ragblend.kb.index import DocumentIndex, NewChunk
from ragblend.kb.ingestion import Ingestion

needs_embedding = pytest.mark.usefixtures("embedding_model")
LONG_QUESTION = "Who designed the bridge and why? " * 1500


@pytest.fixture
def kb(tmp_path: Path, tiny_model: Path) -> Iterator[KnowledgeBase]:
    with KnowledgeBase(tmp_path / "store", model=str(tiny_model)) as opened:
        yield opened


@needs_embedding
def test_a_long_answer_leaves_room_for_the_prompt(cli: Cli, documents: Path) -> None:
    cli("ingest", documents)
    asked = cli("query", "Who?", "--max-tokens", "100000", "--top-k", "1000000000", "--ratio", "0", "--json")
    assert asked.code == 0, asked.err
    assert len(asked.json["sources"]) == 4


@needs_embedding
def test_a_question_longer_than_the_window_is_refused_with_numbers(cli: Cli, documents: Path) -> None:
    cli("ingest", documents)
    asked = cli("query", LONG_QUESTION, "--json")
    assert asked.code == 1
    assert asked.json["error"]["type"] == "ContextWindowError"
    assert "4096" in asked.json["error"]["message"]


@needs_embedding
def test_no_room_for_chunks_is_a_typed_error(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    kb.ingest_texts({"a": "The Old Harbour Bridge was designed by Mira Solheim."})
    monkeypatch.setattr(kb, "_check_room", lambda *_: None)  # core counts otherwise, and may be the first to refuse
    with pytest.raises(ContextWindowError, match="4096"):
        kb.query(LONG_QUESTION, max_tokens=1)


def test_top_k_is_clipped_to_the_index(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        vector = np.ones(1, np.float32)
        index.replace("d", "x", [NewChunk("t", {}, vector, [])], model="m", embedding_model="e")
        assert len(index.search(vector, 10**18)) == 1


@needs_embedding
def test_names_and_texts_that_are_no_unicode(kb: KnowledgeBase, tmp_path: Path) -> None:
    done = kb.ingest_texts({"a": "good text", "b": "bad \ud800 text", "c\udcff": "text under a bad name"})
    assert (done.documents, done.skipped) == (3, ())
    reply = kb.query("what \ud800?", top_k=3, max_tokens=1)
    assert {s.node.metadata["document"] for s in reply.sources} == {"a", "b", "c\\udcff"}
    assert "bad \ufffd text" in {s.node.get_content() for s in reply.sources}


@needs_embedding
def test_a_file_name_that_is_no_utf8(cli: Cli, documents: Path) -> None:
    (documents / os.fsdecode(b"caf\xe9.txt")).write_text("Coffee is served at noon.")
    (documents / os.fsdecode(b"x.\xe9")).write_bytes(b"")
    done = cli("ingest", documents, "--json")
    assert (done.code, done.json["documents"]) == (3, 5)
    assert [Path(skip["path"]).name for skip in done.json["skipped"]] == ["x.\\udce9"]
    assert cli("ingest", documents).code == 3
    asked = cli("query", "When is coffee?", "--top-k", "9", "--max-tokens", "1")
    assert asked.code == 0
    assert "caf\\udce9.txt" in asked.out


@needs_embedding
def test_a_store_and_a_model_in_folders_whose_names_are_no_utf8(
    cli: Cli, documents: Path, tiny_model: Path, tmp_path: Path
) -> None:
    store, model = (tmp_path / os.fsdecode(name) for name in (b"store-\xe9", b"model-\xe9"))
    assert cli("ingest", documents, "--store", store, "--json").json["documents"] == 4
    assert cli("query", "Who?", "--store", store, "--max-tokens", "1", "--json").json["sources"]
    model.symlink_to(tiny_model)
    # Safetensors opens no such file; what matters is that it is said in one object.
    done = cli("ingest", documents, "--model", model, "--json")
    assert done.code == 1
    assert "UTF-8" in done.json["error"]["message"]


@needs_embedding
@pytest.mark.parametrize("given", [str, Path, lambda path: [str(path)], lambda path: iter([path])])
def test_one_path_is_as_good_as_a_list(
    kb: KnowledgeBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Callable[[Path], Any]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    done = kb.ingest(given(Path("notes")), prune=True)
    assert (done.documents, done.skipped) == (1, ())
    assert kb.index.digests().keys() == {str(tmp_path / "notes" / "a.txt")}


@pytest.mark.parametrize("given", [3, None, b"notes", [b"notes"], ["notes", None], [["notes"]]])
def test_what_is_no_path_is_refused(kb: KnowledgeBase, given: Any) -> None:
    with pytest.raises(IngestError, match="paths are"):
        kb.ingest(given)


@pytest.mark.parametrize("given", ["", ["notes", ""]])
def test_an_empty_path_is_not_the_current_folder(
    kb: KnowledgeBase, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IngestError, match="empty"):
        kb.ingest(given, prune=True)
    done = cli("ingest", *([given] if isinstance(given, str) else given), "--json")
    assert (done.code, done.json["error"]["type"]) == (1, "IngestError")


@pytest.mark.parametrize("given", [{"a": None}, {"a": b"text"}, {1: "text"}, ["text"], "text", None])
def test_texts_that_are_none_are_refused(kb: KnowledgeBase, given: Any) -> None:
    with pytest.raises(IngestError, match="name: text"):
        kb.ingest_texts(given)


def test_a_path_that_is_no_utf8_and_not_there(cli: Cli) -> None:
    name = os.fsdecode(b"\xff")
    assert cli("ingest", name, "--json").json["error"]["type"] == "IngestError"
    assert cli("ingest", name).err.startswith("error: ")


def test_an_unexpected_error_is_one_json_object(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KnowledgeBase(tmp_path / "store").close()
    monkeypatch.setattr(KnowledgeBase, "stats", lambda self: {}["b\ud800"])
    done = cli("stats", "--json")
    assert (done.code, done.json["error"]["type"]) == (1, "KeyError")
    assert "Traceback" not in done.err
    monkeypatch.setenv("RAGBLEND_DEBUG", "1")
    plain = cli("stats")
    assert (plain.code, plain.out) == (1, "")
    assert "Traceback" in plain.err


@pytest.mark.parametrize("limit", ["nan", "inf", "-inf", "-1", "0", "1e300", "1e-12"])
def test_a_size_limit_is_a_positive_number(cli: Cli, tmp_path: Path, limit: str) -> None:
    done = cli("ingest", tmp_path, f"--size-limit-gb={limit}", "--json")
    assert (done.code, done.json["error"]["type"]) == (1, "InvalidSettingError")
    assert not (tmp_path / "store").exists()


@needs_embedding
def test_verify_finds_kv_that_is_missing(cli: Cli, documents: Path, tmp_path: Path) -> None:
    from ragblend.store.kvstore import KVStore

    cli("ingest", documents)
    with KVStore(tmp_path / "store") as store:
        key = store.keys()[0]
        store.delete(key)
    found = cli("verify", "--json")
    assert (found.code, found.json["ok"], found.json["missing"]) == (1, False, [key])
    assert key[:16] in cli("verify").err
    assert cli("verify", "--repair", "--json").json["missing"] == [key]
    assert cli("verify").code == 0
    assert cli("ingest", documents, "--json").json["computed"] == 1
    assert cli("verify", "--json").json["missing"] == []


def test_a_reader_makes_no_index(cli: Cli, tmp_path: Path) -> None:
    from ragblend.store.kvstore import KVStore

    KVStore(tmp_path / "store").close()
    assert cli("verify").code == cli("stats").code == 0
    assert cli("query", "Who?").code == 1
    assert not (tmp_path / "store" / "index").exists()


@needs_embedding
def test_a_reader_that_ingests_makes_an_index(tmp_path: Path, tiny_model: Path) -> None:
    from ragblend.store.kvstore import KVStore

    KVStore(tmp_path / "store").close()
    with KnowledgeBase(tmp_path / "store", model=str(tiny_model), create=False) as kb:
        kb.ingest_texts({"a": "some text"})
    with KnowledgeBase(tmp_path / "store", create=False) as kb:
        assert kb.stats().documents == 1


@needs_embedding
def test_chunks_larger_than_the_model_are_refused_before_any_work(cli: Cli, documents: Path) -> None:
    done = cli("ingest", documents, "--chunk-tokens", "100000", "--json")
    assert (done.code, done.json["error"]["type"]) == (1, "InvalidSettingError")
    assert "4096" in done.json["error"]["message"]
    assert cli("stats", "--json").json["documents"] == 0


@needs_embedding
def test_a_document_that_does_not_fit_costs_no_other(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(self: Ingestion, text: str) -> None:
        if "long" in text:
            raise ContextWindowError(5000, 0, 4096)

    monkeypatch.setattr(Ingestion, "_check_fits", picky)
    done = kb.ingest_texts({"a": "first", "b": "too long", "c": "third"})
    assert done.documents == 2
    assert [skip.path for skip in done.skipped] == ["b"]


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (["Who?", "--ratio", "2"], "InvalidSettingError"),
        (["Who?", "--ratio", "nan"], "InvalidSettingError"),
        (["Who?", "--max-tokens", "0"], "InvalidSettingError"),
        (["Who?", "--top-k", "0"], "InvalidSettingError"),
        ([" \n"], "EmptyPromptError"),
    ],
)
def test_a_bad_query_is_refused_before_torch(args: list[str], kind: str, tmp_path: Path) -> None:
    KnowledgeBase(tmp_path / "store").close()
    probe = "import atexit, sys\n"
    probe += "atexit.register(lambda: 'torch' in sys.modules and print('torch was imported'))\n"
    run = [sys.executable, "-c", probe + RUN[-1], "query", *args, "--store", str(tmp_path / "store"), "--json"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == kind


@pytest.mark.parametrize(
    ("question", "settings"),
    [
        ("Who?", {"max_tokens": 0}),
        ("Who?", {"top_k": "3"}),
        ("Who?", {"top_k": 2.5}),
        ("Who?", {"streaming": True}),
        (None, {}),
        (["Who?"], {}),
    ],
)
def test_kb_query_refuses_what_is_wrong_before_a_model(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch, question: Any, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(KnowledgeBase, "engine", property(lambda self: pytest.fail("a model was loaded")))
    with pytest.raises(InvalidSettingError):
        kb.query(question, **settings)


@pytest.mark.parametrize("wrong", [{"chunk_tokens": "300"}, {"chunk_tokens": 99.5}, {"size_limit_bytes": "1GB"}])
def test_a_knowledge_base_with_a_wrong_setting_is_not_made(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match="is a whole number"):
        KnowledgeBase(tmp_path / "store", **wrong)
    assert not (tmp_path / "store").exists()
