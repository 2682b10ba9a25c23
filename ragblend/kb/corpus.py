"""What a document's chunks have beside them: the closest other texts of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ragblend.blend.variants import NEIGHBOURS
from ragblend.kb.files import Part
from ragblend.kb.index import DocumentIndex

if TYPE_CHECKING:
    import numpy as np


class SplitDocument(NamedTuple):
    """A new document, ready to be prefilled. vectors: [pieces, dimensions] float32."""

    name: str
    digest: str
    pieces: list[Part]
    vectors: np.ndarray


class Corpus:
    """Where a chunk's neighbours are looked for: in the index, and among the documents that are about to enter it."""

    def __init__(self, index: DocumentIndex, new: Sequence[SplitDocument]) -> None:
        import numpy as np

        self._index = index
        self._replaced = {split.name for split in new}
        self._texts = [piece.text for split in new for piece in split.pieces]
        self._vectors = np.concatenate([split.vectors for split in new]) if new else None

    def neighbours(self, text: str, vector: np.ndarray) -> list[str]:
        """The closest other texts, closest first; and what stored KV of this text stands behind already.

        The same ones whichever documents are in the index and which are still to come: a run that goes on where
        another was killed makes the same variants.
        """
        reach, most = 2 * NEIGHBOURS, max(self._index.count_chunks(), len(self._texts))
        closest = self._closest(text, vector, reach)
        while len(closest) < NEIGHBOURS and reach < most:  # equal texts, and those that are about to be replaced
            reach *= 2
            closest = self._closest(text, vector, reach)
        known = [
            chunk.text
            for chunk in self._index.behind(text)
            if chunk.text != text and (chunk.document not in self._replaced or chunk.text in self._texts)
        ]
        return list(dict.fromkeys([*closest[:NEIGHBOURS], *known]))

    def _closest(self, text: str, vector: np.ndarray, reach: int) -> list[str]:
        """Of the `reach` closest in the index and of as many new ones, those that differ, closest first."""
        found = [
            (hit.similarity, hit.chunk.text)
            for hit in self._index.search(vector, reach)
            if hit.chunk.document not in self._replaced
        ]
        if self._vectors is not None:
            similarities = self._vectors @ vector
            closest = similarities.argsort(kind="stable")[::-1][:reach]
            found += [(float(similarities[n]), self._texts[n]) for n in closest]
        # FAISS and NumPy differ in the last digits.
        ranked = sorted(found, key=lambda hit: (-round(hit[0], 5), hit[1]))
        return [other for other in dict.fromkeys(other for _, other in ranked) if other != text]
