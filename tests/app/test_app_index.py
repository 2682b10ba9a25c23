"""The index by itself: SQLite and FAISS never disagree, ids never come back."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ragblend.errors import IngestError, StoreError, StoreFormatError
from ragblend.kb.index import DocumentIndex, KVEntry, NewChunk

DIMENSIONS = 8


def chunk(text: str, seed: int, *kv: KVEntry) -> NewChunk:
    vector = np.random.default_rng(seed).standard_normal(DIMENSIONS).astype(np.float32)
    return NewChunk(text, {}, vector / np.linalg.norm(vector), kv or [KVEntry(f"key of {text}")])


def put(index: DocumentIndex, document: str, chunks: Sequence[NewChunk]) -> list[str]:
    """Keys that are loose by it."""
    before = index.loose_keys()
    index.replace(document, "digest", chunks, model="m", embedding_model="e")
    return [key for key in index.loose_keys() if key not in before]


def remove(index: DocumentIndex, document: str) -> list[str]:
    before = index.loose_keys()
    index.remove(document)
    return [key for key in index.loose_keys() if key not in before]


def closest(index: DocumentIndex, vector: np.ndarray, top_k: int = 9) -> list[str]:
    return [found.chunk.text for found in index.search(vector, top_k)]


def test_search_is_cosine_closest_first(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        chunks = [chunk(f"t{seed}", seed) for seed in range(20)]
        put(index, "d", chunks)
        found = index.search(chunks[7].vector, 20)
        assert found[0].chunk.text == "t7"
        assert found[0].similarity == pytest.approx(1.0, abs=1e-6)
        expected = sorted((float(c.vector @ chunks[7].vector) for c in chunks), reverse=True)
        assert [f.similarity for f in found] == pytest.approx(expected, abs=1e-6)


def test_replaced_chunks_are_gone_and_ids_never_come_back(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "d", [chunk("old", 1)])
        put(index, "other", [chunk("stays", 2)])
        (old,) = index.chunks_of("d", "m")
        put(index, "d", [chunk("fresh", 3)])
        (fresh,) = index.chunks_of("d", "m")
        assert fresh.id > old.id
        assert sorted(closest(index, chunk("", 1).vector)) == ["fresh", "stays"]
    with DocumentIndex(tmp_path) as index:
        put(index, "d", [])
        put(index, "d", [chunk("third", 4)])
        assert index.chunks_of("d", "m")[0].id > fresh.id


def test_kv_is_free_only_when_nobody_refers_to_it(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        shared = [KVEntry("shared"), KVEntry("shared too", ("u",))]
        put(index, "a", [chunk("t", 1, *shared), chunk("u", 2, KVEntry("own"))])
        put(index, "b", [chunk("t", 1, *shared)])
        assert put(index, "a", [chunk("v", 3)]) == ["own"]
        assert put(index, "b", []) == ["shared", "shared too"]


def test_keys_are_loose_from_before_they_are_stored_until_a_chunk_has_them(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        index.loosen(["one", "two", "two"])
    with DocumentIndex(tmp_path) as index:
        assert index.loose_keys() == ["one", "two"]
        assert put(index, "a", [chunk("t", 1, KVEntry("one"))]) == []
        index.loosen(["one"])
        assert index.loose_keys() == ["two"]
        index.forget_loose(["two"])
        assert index.loose_keys() == []
        assert put(index, "b", [chunk("t", 1, KVEntry("one"))]) == remove(index, "a") == []
        assert remove(index, "b") == ["one"]
        put(index, "c", [chunk("t", 1, KVEntry("one"))])
        assert index.loose_keys() == []


def test_an_ingest_knows_whether_it_is_alone(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index, DocumentIndex(tmp_path) as other:
        with index.ingesting() as alone:
            with other.ingesting() as other_alone:
                assert not alone()
                assert other_alone()
            with other.ingesting() as other_alone:
                assert other_alone()
        with index.ingesting() as alone:
            assert alone()


@pytest.mark.parametrize("version", [2, 3])
def test_an_index_of_a_former_format_is_refused(tmp_path: Path, version: int) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "a", [chunk("t", 1, KVEntry("one"))])
    with closing(sqlite3.connect(tmp_path / "index.db")) as db:
        db.execute("DROP TABLE behind")
        db.execute("ALTER TABLE kv ADD COLUMN behind BLOB")
        if version == 2:
            db.execute("DROP TABLE loose")
        db.execute(f"PRAGMA user_version = {version}")
    for _ in range(2):
        with pytest.raises(StoreFormatError, match=f"has format {version}, .* delete the folder .* and ingest again"):
            DocumentIndex(tmp_path)


def test_a_document_that_is_removed_leaves_nothing(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "a", [chunk("t", 1, KVEntry("shared")), chunk("u", 2, KVEntry("own"))])
        put(index, "b", [chunk("t", 1, KVEntry("shared"))])
        index.save()
        assert remove(index, "a") == ["own"]
        assert index.digests().keys() == {"b"}
        assert closest(index, chunk("", 2).vector) == ["t"]
        assert remove(index, "never there") == []
        index.save()
        assert index.verify() == []
        assert remove(index, "b") == ["shared"]
        assert index.search(chunk("", 1).vector, 9) == []
        # It is not saved: as if the process had been killed here.
    with DocumentIndex(tmp_path) as index:
        assert index.verify() == []
        assert index.search(chunk("", 1).vector, 9) == []
        assert index.count_documents() == index.count_chunks() == 0
        put(index, "c", [chunk("again", 3)])
        assert closest(index, chunk("", 3).vector) == ["again"]


def test_a_document_that_another_process_removes_is_not_found(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as one, DocumentIndex(tmp_path) as two:
        put(one, "a", [chunk("goes", 1)])
        put(one, "b", [chunk("stays", 2)])
        assert len(closest(two, chunk("", 1).vector)) == 2
        one.remove("a")
        assert closest(two, chunk("", 1).vector) == ["stays"]
        two.save()
        assert one.verify() == []


def test_kv_behind_a_text_that_is_gone_is_stale(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "a", [chunk("t", 1, KVEntry("behind u", ("u",)), KVEntry("filler"))])
        put(index, "b", [chunk("u", 2, KVEntry("behind t", ("t",)))])
        assert index.stale_keys() == []
        put(index, "b", [chunk("other", 3)])
        assert index.stale_keys() == ["behind u"]
        (of_a,) = index.chunks_of("a", "m")
        assert index.stale_chunks("m") == {"a": {of_a.id}}
        assert index.stale_chunks("another") == {}
        index.note_kv({of_a.id: [KVEntry("behind u", ("other",))]}, model="m")
        assert "filler" in index.loose_keys()
        assert index.stale_keys() == []
        index.remove("b")
        assert index.stale_keys() == ["behind u"]


def test_kv_behind_several_texts_is_stale_when_one_of_them_is_gone(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "u", [chunk("u", 2)])
        put(index, "v", [chunk("v", 3)])
        put(index, "a", [chunk("t", 1, KVEntry("behind both", ("u", "v")), KVEntry("head"))])
        assert index.behind("t") == ["u", "v"]
        assert index.stale_keys() == []
        index.remove("v")
        assert index.stale_keys() == ["behind both"]
        index.remove("a")
        assert index.stale_keys() == []
        put(index, "a", [chunk("t", 1, KVEntry("behind both"))])  # whose past is forgotten
        assert index.stale_keys() == []


def test_text_that_is_still_in_another_document_is_not_gone(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "a", [chunk("t", 1, KVEntry("behind u", ("u",)))])
        put(index, "b", [chunk("u", 2)])
        put(index, "c", [chunk("u", 2)])
        index.remove("b")
        assert index.stale_keys() == []
        index.remove("c")
        assert index.stale_keys() == ["behind u"]


def test_equal_texts_agree_on_what_their_kv_is_behind(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "u", [chunk("u", 8)])
        put(index, "v", [chunk("v", 9)])
        put(index, "a", [chunk("t", 1, KVEntry("key", ("u",)))])
        put(index, "b", [chunk("t", 1, KVEntry("key", ("v",)))])  # it was prefilled again
        assert index.behind("t") == ["v"]
        index.remove("b")
        index.remove("u")
        assert index.stale_keys() == []
        index.remove("v")
        assert index.stale_keys() == ["key"]


def test_a_chunk_that_lost_one_variant_has_none(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "a", [chunk("t", 1, KVEntry("one"), KVEntry("two")), chunk("u", 2, KVEntry("three"))])
        index.forget_kv(["two"])
        assert [c.kv_keys for c in index.chunks_of("a", "m")] == [(), ("three",)]


def test_the_faiss_file_is_used_only_if_it_is_what_was_written(tmp_path: Path) -> None:
    chunks = [chunk(f"t{seed}", seed) for seed in range(5)]
    with DocumentIndex(tmp_path) as index:
        put(index, "d", chunks)
        index.save()
    file = tmp_path / "vectors.faiss"
    good = file.read_bytes()
    for damaged in (b"", good[:-5], good[:20] + bytes([good[20] ^ 255]) + good[21:], b"nonsense" * 50):
        file.write_bytes(damaged)
        with DocumentIndex(tmp_path) as index:
            assert index.verify() != []
            assert closest(index, chunks[3].vector)[0] == "t3"
    file.unlink()
    with DocumentIndex(tmp_path) as index:
        assert closest(index, chunks[3].vector)[0] == "t3"
        assert len(index.verify(repair=True)) == 1
        assert index.verify() == []
    assert file.read_bytes() == good


def test_a_commit_that_was_not_saved_is_found(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "d", [chunk("saved", 1)])
        index.save()
        put(index, "e", [chunk("not saved", 2)])
    with DocumentIndex(tmp_path) as index:
        assert closest(index, chunk("", 2).vector)[0] == "not saved"
        assert index.verify() == []


def test_two_open_indexes_see_each_others_commits(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as one, DocumentIndex(tmp_path) as two:
        put(one, "a", [chunk("from one", 1)])
        put(two, "b", [chunk("from two", 2)])
        put(one, "c", [chunk("one again", 3)])
        for index in (one, two):
            assert sorted(closest(index, chunk("", 1).vector)) == ["from one", "from two", "one again"]
        one.save()
        assert two.verify() == []


def test_random_changes_agree_with_a_plain_dictionary(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    model: dict[str, list[NewChunk]] = {}
    index = DocumentIndex(tmp_path)
    for step in range(120):
        document = f"d{random.integers(8)}"
        if random.integers(4):
            model[document] = [chunk(f"{step}-{i}", int(random.integers(10**6))) for i in range(random.integers(4))]
            put(index, document, model[document])
        else:
            model.pop(document, None)
            index.remove(document)
        if step % 7 == 0:
            index.save()
        if step % 11 == 0:
            index.close()
            index = DocumentIndex(tmp_path)
        vector = chunk("", step).vector
        alive = [c for chunks in model.values() for c in chunks]
        expected = sorted(alive, key=lambda c: -float(c.vector @ vector))
        assert closest(index, vector, 1000) == [c.text for c in expected]
    index.close()


def test_closing_waits_for_a_query_of_another_thread(tmp_path: Path) -> None:
    index, asked, go_on, found = DocumentIndex(tmp_path), threading.Event(), threading.Event(), []

    def ask() -> None:
        with index._typed_errors("read"):
            rows = index._db.execute("SELECT 1 UNION ALL SELECT 2")
            asked.set()
            go_on.wait(30)
            found.extend(rows.fetchall())

    asking, closing = threading.Thread(target=ask), threading.Thread(target=index.close)
    asking.start()
    assert asked.wait(30)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    asking.join(30)
    closing.join(30)
    assert found == [(1,), (2,)]
    with pytest.raises(StoreError, match="closed: open it again"):
        index.count_chunks()


def test_vectors_of_another_kind_are_refused(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "d", [chunk("t", 1)])
        with pytest.raises(IngestError, match="embedding model 'e'"):
            index.replace("x", "digest", [chunk("t", 1)], model="m", embedding_model="other")
        with pytest.raises(IngestError, match="dimensions"):
            put(index, "x", [NewChunk("t", {}, np.ones(3, np.float32), [])])
        assert index.count_documents() == 1


def test_kv_of_a_chunk_that_another_ingest_has_removed_is_loose(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index, DocumentIndex(tmp_path) as other:
        put(index, "d", [chunk("here", 1)])
        put(index, "stays", [chunk("there", 2)])
        (gone,), (stays,) = index.chunks_of("d", "m"), index.chunks_of("stays", "m")
        remove(other, "d")
        index.note_kv({gone.id: [KVEntry("made for nobody")], stays.id: [KVEntry("made anew")]}, model="m")
        assert index.kv_keys("m") == ["made anew"]
        assert set(index.loose_keys()) == {"key of here", "key of there", "made for nobody"}
