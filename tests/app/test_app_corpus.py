"""Neighbours of a text: the same ones wherever its documents are, at the same cost however many have the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ragblend.blend.variants import NEIGHBOURS
from ragblend.kb.corpus import Corpus, SplitDocument
from ragblend.kb.files import Part
from ragblend.kb.index import DocumentIndex, KVEntry, NewChunk

SHARED = ("Confidential.", "All rights reserved.")


def documents(count: int) -> list[SplitDocument]:
    """Each with a text of its own, and with texts that all have, whose vectors are nearly equal."""
    rng = np.random.default_rng(0)
    about = rng.standard_normal((len(SHARED), 8))
    made = []
    for n in range(count):
        vectors = rng.standard_normal((1 + len(SHARED), 8))
        vectors[1:] = about + 0.01 * vectors[1:]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        pieces = [Part(text, {}) for text in (f"text {n}", *SHARED)]
        made.append(SplitDocument(f"document {n:04}", "digest", pieces, vectors.astype(np.float32)))
    return made


def commit(index: DocumentIndex, split: SplitDocument, behind: Sequence[Sequence[str]]) -> None:
    chunks = [
        NewChunk(piece.text, {}, vector, [KVEntry(f"key of {piece.text}", tuple(others))])
        for piece, vector, others in zip(split.pieces, split.vectors, behind, strict=True)
    ]
    index.replace(split.name, split.digest, chunks, model="m", embedding_model="e")


def test_a_text_of_every_document_costs_no_more_with_every_document(tmp_path: Path) -> None:
    def statements(count: int) -> int:
        done: list[str] = []
        with DocumentIndex(tmp_path / str(count)) as index:
            index._db.set_trace_callback(done.append)
            corpus = Corpus(index, splits := documents(count))
            for split in splits:
                commit(index, split, [corpus.neighbours(piece.text)[:2] for piece in split.pieces])
            corpus = Corpus(index, [])  # all of them lack KV, as those of another model would
            for split in splits:
                for piece in split.pieces:
                    corpus.neighbours(piece.text)
        return len(done)

    few, many = statements(100), statements(400)
    assert many < 5 * few


@pytest.mark.parametrize("committed", [[0], [3], [2, 3, 5], range(40)])
def test_neighbours_do_not_depend_on_what_is_committed(tmp_path: Path, committed: Sequence[int]) -> None:
    everything = documents(40)
    texts = ["text 7", *SHARED]
    with DocumentIndex(tmp_path / "empty") as index:
        corpus = Corpus(index, everything)
        expected = [corpus.neighbours(text) for text in texts]
    assert [len(found) for found in expected] == [NEIGHBOURS] * len(texts)
    with DocumentIndex(tmp_path / "begun") as index:
        for n in committed:
            commit(index, everything[n], [()] * len(everything[n].pieces))
        corpus = Corpus(index, [split for n, split in enumerate(everything) if n not in committed])
        assert [corpus.neighbours(text) for text in texts] == expected


def test_a_text_that_is_gone_meanwhile_has_no_neighbours(tmp_path: Path) -> None:
    with DocumentIndex(tmp_path) as index:
        first, second = documents(2)
        commit(index, first, [()] * 3)
        commit(index, second, [()] * 3)
        corpus = Corpus(index, [])
        assert "text 1" in corpus.neighbours("text 0")
        index.remove(second.name)
        assert corpus.neighbours("text 1") == []
