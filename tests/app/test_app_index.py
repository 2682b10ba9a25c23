"""The index by itself: SQLite and FAISS never disagree, ids never come back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ragblend.errors import IngestError
from ragblend.kb.index import DocumentIndex, NewChunk

DIMENSIONS = 8


def chunk(text: str, seed: int, key: str | None = None) -> NewChunk:
    vector = np.random.default_rng(seed).standard_normal(DIMENSIONS).astype(np.float32)
    return NewChunk(text, {}, vector / np.linalg.norm(vector), key or f"key of {text}")


def put(index: DocumentIndex, document: str, chunks: Sequence[NewChunk]) -> list[str]:
    return index.replace(document, "digest", chunks, model="m", embedding_model="e")


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
        put(index, "a", [chunk("t", 1, "shared"), chunk("u", 2, "own")])
        put(index, "b", [chunk("t", 1, "shared")])
        assert put(index, "a", [chunk("v", 3)]) == ["own"]
        assert put(index, "b", []) == ["shared"]


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
        model[document] = [chunk(f"{step}-{i}", int(random.integers(10**6))) for i in range(random.integers(4))]
        put(index, document, model[document])
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


def test_vectors_of_another_kind_are_refused(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        put(index, "d", [chunk("t", 1)])
        with pytest.raises(IngestError, match="embedding model 'e'"):
            index.replace("x", "digest", [chunk("t", 1)], model="m", embedding_model="other")
        with pytest.raises(IngestError, match="dimensions"):
            put(index, "x", [NewChunk("t", {}, np.ones(3, np.float32), "k")])
        assert index.count_documents() == 1
