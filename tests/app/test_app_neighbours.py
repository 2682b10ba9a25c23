"""Chunks are prefilled behind their neighbours, and nothing is served from behind a text that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli

from ragblend.blend import variants as variants_of_chunks
from ragblend.blend.variants import CONTEXT_TOKENS, Note, digest
from ragblend.evaluation.cases import two_hop
from ragblend.kb import KnowledgeBase
from ragblend.model import sources

pytestmark = pytest.mark.usefixtures("embedding_model")

BRIDGE = "The Old Harbour Bridge was designed by Mira Solheim in 1931."
GRANITE = "An engineer had stone shipped in for the crossing of the port."
MOON = "The moon is 384400 kilometres away, and a rocket flies there in three days."
CATS = "Cats sleep sixteen hours a day, most of them in the afternoon."
WINDOW = [
    "Sea kale grows on shingle beaches where hardly anything else can live.",
    "Its leaves are thick and blue, and the wax on them keeps the salt out.",
    "In spring the shoots push up through the stones, white as celery.",
    "People used to cover them with pots so that they stayed pale and tender.",
    "By June there are flowers that smell of honey from a long way off.",
]

Make = Callable[..., KnowledgeBase]


@pytest.fixture
def make(tmp_path: Path, tiny_model: Path) -> Iterator[Make]:
    """Open knowledge bases in folders of the test's own, and close them in the end."""
    opened: list[KnowledgeBase] = []

    def make(name: str = "store", *, model: Path = tiny_model, **settings: Any) -> KnowledgeBase:
        opened.append(KnowledgeBase(tmp_path / name, model=str(model), **settings))
        return opened[-1]

    yield make
    for kb in opened:
        kb.close()


@pytest.fixture
def kb(make: Make) -> KnowledgeBase:
    return make()


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.embed_tokens.weight.data.mul_(1.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def stands_behind(kb: KnowledgeBase, text: str) -> list[str]:
    return kb.index.behind(text)


def variants(kb: KnowledgeBase, text: str) -> dict[str, str]:
    """Keys of the stored variants of a text but the one behind the head alone, which every text may have."""
    return {name: key for name, key in kb.engine.stored_variants(text).items() if name != "head"}


def payload(kb: KnowledgeBase, key: str) -> bytes:
    reader = kb.store.open(key)
    assert reader is not None
    with reader:
        return b"".join(reader.read_layer_kv(layer).key.float().numpy().tobytes() for layer in range(reader.n_layers))


def named_sources(kb: KnowledgeBase, note: Note, among: Iterable[str]) -> list[str]:
    """The texts that a note says its KV was prefilled behind, the closest first."""
    texts = {digest(kb.engine.prompts.encode_text(text)[:CONTEXT_TOKENS]): text for text in among}
    return [texts[source] for source in note.sources]


def agree(kb: KnowledgeBase) -> bool:
    """Whether store and index tell the same of every chunk: its keys, and what each is behind."""
    encode = kb.engine.prompts.encode_text
    for document in kb.index.digests():
        for chunk in kb.index.chunks_of(document, kb.models.signature):
            stored = kb.engine.stored_variants(chunk.text)
            assert set(stored.values()) == set(chunk.kv_keys)
            for name, key in stored.items():
                note = Note.from_bytes(kb.store.notes([key])[key])
                others = named_sources(kb, note, stands_behind(kb, chunk.text))
                assert bool(others) == (name not in ("head", "filler"))
                made = kb.engine.chunks.contexts(encode(chunk.text), [encode(other) for other in others])
                (context,) = [context for context in made if context.name == name]
                assert note.behind == digest((*kb.engine.preamble_ids, *context.ids))
    return kb.verify().ok and not kb.index.stale_chunks(kb.models.signature)


def test_a_chunk_stands_behind_the_closest_other_text(kb: KnowledgeBase) -> None:
    done = kb.ingest_texts({"a": BRIDGE, "b": GRANITE, "c": MOON})
    assert (done.computed, done.refreshed) == (3, 0)
    assert stands_behind(kb, BRIDGE) == [GRANITE, MOON]
    assert stands_behind(kb, GRANITE) == [BRIDGE, MOON]
    (key,) = variants(kb, BRIDGE).values()
    note = Note.from_bytes(kb.store.notes([key])[key])
    assert named_sources(kb, note, [MOON, GRANITE]) == [GRANITE, MOON], "the closest right before it"
    assert variants(kb, BRIDGE).keys() == {"neighbour"}
    assert agree(kb)


def test_a_corpus_of_one_chunk_stands_behind_the_filler(kb: KnowledgeBase) -> None:
    kb.ingest_texts({"a": BRIDGE})
    assert variants(kb, BRIDGE).keys() == {"filler"}
    assert stands_behind(kb, BRIDGE) == []
    before = kb.store.notes(kb.store.keys())

    added = kb.ingest_texts({"a": BRIDGE, "b": GRANITE})
    assert (added.unchanged, added.computed, added.refreshed) == (1, 1, 0), "what did not change is left alone"
    assert stands_behind(kb, GRANITE) == [BRIDGE]
    assert before.items() < kb.store.notes(kb.store.keys()).items()
    assert agree(kb)


def test_chunks_that_overlap_are_stored_behind_each_other_too(kb: KnowledgeBase) -> None:
    first, second = " ".join(WINDOW[:4]), " ".join(WINDOW[1:])
    kb.ingest_texts({"a": first, "b": second})
    assert variants(kb, first).keys() == {"filler", "copy"}
    assert stands_behind(kb, first) == [second]

    kb.ingest_texts({"c": CATS, "d": " ".join(WINDOW[2:])})
    assert variants(kb, " ".join(WINDOW[2:])).keys() == {"neighbour", "copy"}
    assert agree(kb)

    done = kb.ingest_texts({"b": MOON, "d": GRANITE})
    assert done.refreshed >= 1
    assert "copy" not in kb.engine.stored_variants(first)
    assert agree(kb)
    noted = kb.index.kv_keys(kb.models.signature)
    assert kb.store.keys() == noted, "the KV of variants that nobody has any more is freed"


def test_kv_behind_a_text_that_changed_is_prefilled_again(kb: KnowledgeBase) -> None:
    kb.ingest_texts({"a": BRIDGE, "b": GRANITE, "c": MOON})
    (key,) = variants(kb, BRIDGE).values()
    old, old_note = payload(kb, key), kb.store.notes([key])[key]
    behind = [text for text in (BRIDGE, MOON) if GRANITE in stands_behind(kb, text)]

    done = kb.ingest_texts({"b": CATS})
    assert (done.documents, done.computed, done.refreshed) == (1, 1, len(behind))
    assert GRANITE not in [other for text in (BRIDGE, MOON, CATS) for other in stands_behind(kb, text)]
    assert payload(kb, key) != old
    assert old_note not in kb.store.notes(kb.store.keys()).values()
    assert kb.engine.stored_variants(GRANITE) == {}
    assert agree(kb)

    again = kb.ingest_texts({"a": BRIDGE, "b": CATS, "c": MOON})
    assert (again.unchanged, again.computed, again.refreshed) == (3, 0, 0)


def test_equal_texts_share_their_kv_and_what_it_is_behind(kb: KnowledgeBase) -> None:
    done = kb.ingest_texts({"a": BRIDGE, "rockets and cats": BRIDGE, "b": GRANITE, "c": MOON})
    assert (done.computed, done.already_stored) == (3, 1)
    assert stands_behind(kb, BRIDGE) == [GRANITE, MOON]
    assert agree(kb)

    changed = kb.ingest_texts({"b": CATS})
    assert changed.refreshed >= 1
    assert agree(kb)
    kb.ingest_texts({"a": MOON})
    assert BRIDGE in [c.text for c in kb.index.chunks_of("rockets and cats", kb.models.signature)]
    assert agree(kb)


def test_the_kv_of_another_model_is_not_left_behind_what_is_gone(make: Make, other_model: Path) -> None:
    texts = {"a": BRIDGE, "b": GRANITE, "c": MOON}
    one = make()
    one.ingest_texts(texts)
    other = make(model=other_model)
    assert other.ingest_texts(texts).computed == 3
    (key,) = variants(other, BRIDGE).values()

    one.ingest_texts({"b": CATS})
    assert key not in one.store
    assert agree(one)

    # Another document brings it back: the index knows what is missing.
    done = other.ingest_texts({"d": "Gulls sleep on one leg."})
    assert done.refreshed >= 1
    assert GRANITE not in stands_behind(other, BRIDGE)
    other.ingest_texts({**texts, "b": CATS})
    assert agree(other)
    assert agree(one)


def test_a_store_too_small_for_everything_stays_valid(make: Make) -> None:
    with make("large") as large:
        large.ingest_texts({"a": BRIDGE, "b": GRANITE})
        size = large.stats().bytes
    kb = make(size_limit_bytes=size)
    texts = {"a": BRIDGE, "b": GRANITE, "c": MOON, "d": CATS}
    kb.ingest_texts(texts)
    assert kb.stats().evictions > 0
    assert kb.ingest_texts(texts).computed == 0, "what was evicted is not put back each time"
    kb.ingest_texts({"b": "Gulls sleep on one leg.", "c": "Ice is lighter than water."})
    assert kb.index.stale_keys() == []
    assert kb.stats().bytes <= size
    assert kb.verify(repair=True).ok
    assert kb.ingest_texts({"a": BRIDGE, "d": CATS}).computed == 0


def test_what_was_evicted_is_put_back_when_there_is_room_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    texts = {"a": BRIDGE, "b": GRANITE, "c": MOON, "d": CATS}
    with make("large") as large:
        large.ingest_texts({"a": BRIDGE, "b": GRANITE})
        size = large.stats().bytes
    assert not caplog.messages
    with make(size_limit_bytes=size) as small:
        small.ingest_texts(texts)
        evicted = small.stats().evictions
    foretold, told = caplog.messages
    assert "going to take about" in foretold, "while there is still time"
    assert f"{evicted} payloads were evicted" in told
    kb = make(size_limit_bytes=10 * size)
    assert kb.ingest_texts(texts).computed > 0
    assert agree(kb)
    assert kb.ingest_texts(texts).computed == 0
    assert kb.stats().evictions == evicted


def learned(kb: KnowledgeBase, text: str) -> list[str]:
    """Lose what was ingested of a text, have a question miss it; the keys of what is then learned."""
    for key in kb.engine.stored_variants(text).values():
        kb.store.delete(key)
    reply = kb.query("Which bridge?", top_k=9, max_tokens=1)
    assert reply.report is not None
    assert reply.report.misses
    kb.engine.drain()
    stored = kb.engine.stored_variants(text)
    assert stored.keys() == {"filler", "head"}
    assert stored["filler"] not in kb.index.kv_keys(kb.models.signature)
    return sorted(stored.values())


@pytest.mark.parametrize("change", [{"a": CATS}, {"a": ""}])
def test_what_a_question_had_stored_goes_with_its_document(kb: KnowledgeBase, change: dict[str, str]) -> None:
    kb.ingest_texts({"a": BRIDGE, "again": BRIDGE, "b": GRANITE, "c": MOON})
    keys = learned(kb, BRIDGE)
    kb.ingest_texts({"again": MOON})
    assert set(keys) <= set(kb.store.keys()), "another document has that text"
    kb.ingest_texts(change)
    assert not set(keys) & set(kb.store.keys())
    assert agree(kb)
    assert kb.store.keys() == kb.index.kv_keys(kb.models.signature)


def test_what_another_model_learned_goes_with_prune_and_loads_no_model(
    make: Make, other_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bridge.txt"
    file.write_text(BRIDGE)
    with make() as one:
        one.ingest(file)
    with make(model=other_model) as other:
        other.query(BRIDGE, max_tokens=1)
        other.engine.drain()
        assert len(other.engine.stored_variants(BRIDGE)) == 2
    file.unlink()
    with make() as one:
        assert one.ingest(file, prune=True).pruned == 1
        assert one.store.keys() == []
        assert not one.models.loaded


def test_what_was_learned_goes_with_an_ingest_that_is_killed_too(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb.ingest_texts({"a": BRIDGE, "b": GRANITE, "c": MOON})
    keys = learned(kb, BRIDGE)

    def stop() -> list[str]:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(kb.index, "stale_keys", stop)
        with pytest.raises(Stopped):
            kb.ingest_texts({"a": CATS})
    assert BRIDGE not in {chunk.text for chunk in kb.index.chunks_of("a", kb.models.signature)}
    kb.ingest_texts({"d": "Gulls sleep on one leg."})
    assert not set(keys) & set(kb.store.keys())
    assert agree(kb)


def test_each_dtype_has_kv_of_its_own(make: Make) -> None:
    texts = {"a": BRIDGE, "b": GRANITE}
    for dtype in ("float32", "bfloat16"):
        with make(dtype=dtype) as kb:
            assert kb.ingest_texts(texts).computed == 2
            assert agree(kb)
    for dtype in ("float32", "bfloat16"):
        with make(dtype=dtype) as kb:
            assert kb.ingest_texts(texts).computed == 0
            assert not kb.models.loaded
            assert len(kb.engine.stored_variants(BRIDGE)) == 2


def test_the_dtype_is_what_auto_comes_to(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a": BRIDGE, "b": GRANITE}
    monkeypatch.setattr(sources, "fastest_dtype", lambda device: torch.float32)
    with make() as kb:
        assert kb.ingest_texts(texts).computed == 2
        assert agree(kb)
    with make() as kb:
        assert (kb.ingest_texts(texts).computed, kb.models.loaded) == (0, False)
    with make(dtype="float32") as kb:
        assert (kb.ingest_texts(texts).computed, kb.models.loaded) == (0, False)

    monkeypatch.setattr(sources, "fastest_dtype", lambda device: torch.bfloat16)  # as on another machine
    with make() as kb:
        kb.query("Which bridge?", max_tokens=1)
        kb.engine.drain()
        kb.ingest_texts(texts)
        assert agree(kb)
    with make() as kb:
        assert (kb.ingest_texts(texts).computed, kb.models.loaded) == (0, False)
        assert len(kb.index.kv_keys(kb.models.signature)) == 4


class Stopped(BaseException):
    """As if the process had ended."""


def stopping_after(calls: int) -> Callable[[str, float, int], None]:
    left = iter(range(calls))

    def progress(*_: object) -> None:
        if next(left, None) is None:
            raise Stopped

    return progress


def test_runs_that_are_stopped_anywhere_end_as_if_they_had_not_been(make: Make) -> None:
    texts = {f"w{n}": " ".join(WINDOW[n : n + 3]) for n in range(3)}
    texts |= {"a": BRIDGE, "b": GRANITE, "c": MOON, "again": BRIDGE}
    changed = {"w1": CATS, "b": " ".join(WINDOW[1:4]), "c": GRANITE}
    stopped, undisturbed = make("stopped"), make("undisturbed")
    for given in (texts, changed):
        undisturbed.ingest_texts(given)
        for calls in range(0, 60, 3):
            try:
                stopped.ingest_texts(given, progress=stopping_after(calls))
                break
            except Stopped:
                continue
        else:
            pytest.fail("it never came to an end")
        assert stopped.store.keys() == undisturbed.store.keys()
        assert agree(stopped)
        assert agree(undisturbed)


def test_a_process_killed_before_it_refreshed_is_put_right_by_the_next(make: Make, tiny_model: Path) -> None:
    kb = make()
    kb.ingest_texts({"a": BRIDGE, "b": GRANITE, "c": MOON})
    (key,) = variants(kb, BRIDGE).values()
    old = kb.store.notes([key])[key]
    killed = f"""
import os, signal
from ragblend.evaluation.cases import two_hop
from ragblend.kb import KnowledgeBase
kb = KnowledgeBase({str(kb.store.directory)!r}, model={str(tiny_model)!r})
stale_keys = kb.index.stale_keys
kb.index.stale_keys = lambda: os.kill(os.getpid(), signal.SIGKILL) if stale_keys() else []
kb.ingest_texts({{"b": {CATS!r}}})
"""
    done = subprocess.run([sys.executable, "-c", killed], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert kb.store.notes([key])[key] == old

    assert kb.ingest_texts({"d": "Gulls sleep on one leg."}).refreshed >= 1
    assert kb.store.notes([key])[key] != old
    assert agree(kb)


def test_stopped_between_deleting_and_refreshing(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    kb.ingest_texts({"a": BRIDGE, "b": GRANITE, "c": MOON})

    def stop(model: str) -> dict[str, set[int]]:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(kb.index, "stale_chunks", stop)
        with pytest.raises(Stopped):
            kb.ingest_texts({"b": CATS})
    assert variants(kb, BRIDGE) == {}
    assert kb.ingest_texts({"d": "Gulls sleep on one leg."}).refreshed >= 1
    assert agree(kb)


def test_repairing_brings_back_one_lost_variant_of_two(kb: KnowledgeBase) -> None:
    texts = {"a": " ".join(WINDOW[:4]), "b": " ".join(WINDOW[1:]), "c": CATS}
    kb.ingest_texts(texts)
    before = kb.store.notes(kb.store.keys())
    lost = kb.engine.stored_variants(texts["a"])["neighbour"]
    kb.store.delete(lost)
    assert kb.verify(repair=True).missing == (lost,)
    assert kb.verify().ok
    assert kb.ingest_texts(texts).computed == 1
    assert kb.store.notes(kb.store.keys()) == before


def test_prune_forgets_what_is_gone_and_refreshes_what_stood_behind_it(
    cli: Cli, tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, text in {"a": BRIDGE, "b": GRANITE, "c": MOON}.items():
        (folder / f"{name}.txt").write_text(text)
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text(CATS)
    cli("ingest", folder)
    with KnowledgeBase(tmp_path / "store", model=str(tiny_model)) as kb:
        before = kb.store.keys()

    (folder / "b.txt").unlink()
    assert cli("ingest", folder, "--json").json["pruned"] == 0
    assert cli("stats", "--json").json["documents"] == 4
    (tmp_path / "elsewhere").mkdir()
    assert cli("ingest", tmp_path / "elsewhere", "--prune", "--json").json["pruned"] == 0, "it is under another path"

    done = cli("ingest", folder, "--prune", "--json").json
    assert (done["pruned"], done["documents"], done["unchanged"], done["computed"]) == (1, 0, 3, 0)
    assert done["refreshed"] >= 1
    counts = cli("stats", "--json").json
    assert counts["documents"] == counts["indexed_chunks"] == 3
    with KnowledgeBase(tmp_path / "store", model=str(tiny_model)) as kb:
        assert kb.index.stale_keys() == []
        assert kb.store.keys() == [key for key in before if key in kb.index.kv_keys(kb.models.signature)]
    assert cli("verify").code == 0
    found = cli("query", "Which bridge?", "--top-k", "9", "--max-tokens", "1", "--json").json["sources"]
    assert GRANITE not in {source["text"] for source in found}

    again = cli("ingest", folder, "--prune", "--json").json
    assert (again["pruned"], again["refreshed"], again["computed"], again["unchanged"]) == (0, 0, 0, 3)

    for file in folder.iterdir():
        file.unlink()
    assert cli("ingest", folder, "--prune", "--json").json["pruned"] == 3
    counts = cli("stats", "--json").json
    assert counts["documents"] == counts["indexed_chunks"] == counts["chunks"] == 0
    assert cli("verify").code == 0
    assert cli("query", "Who?", "--json").json["error"]["type"] == "IngestError"
    (folder / "a.txt").write_text(BRIDGE)
    assert cli("ingest", folder, "--json").json["computed"] == 1


@pytest.mark.parametrize("policy", ["document", "system", "none"])
def test_other_policies_have_kv_of_their_own(cli: Cli, tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "long.txt").write_text("\n\n".join(case.chunks[0] for case in two_hop(6, chunks=3)))
    args = ("ingest", folder, "--chunk-tokens", "40", "--json")
    first = cli(*args).json
    assert first["computed"] > 2
    other = cli(*args, "--policy", policy).json
    computed = 0 if policy == "system" else first["computed"]  # behind the head alone they are there already
    assert (other["documents"], other["unchanged"], other["computed"]) == (0, 1, computed)
    assert cli("stats", "--json").json["policy"] == policy
    reply = cli("query", "Who?", "--json").json["report"]  # asked as ingested last
    assert (reply["hits"], reply["misses"]) == (len(reply["chunks"]), 0)
    variants = {use["variant"] for use in reply["chunks"]}
    assert variants <= {"document": {"before", "head", "filler"}, "system": {"head"}, "none": {"alone"}}[policy]
    again = cli(*args).json
    assert again["computed"] == 0
    assert cli(*args, "--policy", "neighbours").json["computed"] == 0  # still there
    assert cli("query", "Who?", "--json").json["report"]["misses"] == 0
    assert cli("verify").code == 0


def test_a_text_twice_in_a_document_goes_with_what_its_first_copy_stands_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants_of_chunks, "NEIGHBOURS", 1)
    kb = make(policy="document", chunk_tokens=64)
    first, *others = WINDOW
    kb.ingest_texts({"b": "\n\n".join([CATS, MOON])})
    kb.ingest_texts({"a": "\n\n".join([first, MOON, *others, MOON])})
    assert first in stands_behind(kb, MOON)
    assert agree(kb)
    kb.ingest_texts({"a": CATS})
    assert stands_behind(kb, MOON) == [CATS]
    assert agree(kb)


def test_unknown_policies_are_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some text.")
    assert "the policy is one of" in cli("ingest", tmp_path / "a.txt", "--policy", "best").err
