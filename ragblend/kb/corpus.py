"""What a document's chunks have beside them: the closest other texts of the corpus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ragblend.blend.variants import NEIGHBOURS
from ragblend.kb.files import Part
from ragblend.kb.index import DocumentIndex

if TYPE_CHECKING:
    import numpy as np

_REMEMBERED = 1024  # texts


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
        self._first: dict[str, tuple[str, np.ndarray]] = {}  # of each new text, the first document that has it
        for split in sorted(new, key=lambda split: split.name):
            for piece, vector in zip(split.pieces, split.vectors, strict=True):
                self._first.setdefault(piece.text, (split.name, vector))
        # What every document of a corpus ends with is looked for once, not again among thousands of its copies.
        self._neighbours = lru_cache(_REMEMBERED)(self._find_neighbours)
        self._holder = lru_cache(_REMEMBERED)(self._find_holder)

    def neighbours(self, text: str) -> list[str]:
        """The closest other texts, closest first; and what stored KV of this text stands behind already.

        The same ones whichever documents are in the index and which are still to come: a run that goes on where
        another was killed makes the same variants. Documents with one text may have several vectors of it, with their
        names in them; it counts as the one whose name is the first has it.
        """
        return list(self._neighbours(text))

    def _find_neighbours(self, text: str) -> list[str]:
        closest: list[str] = []
        if (vector := self._vector(text)) is not None:
            reach, everything = NEIGHBOURS, False
            while len(closest) < NEIGHBOURS and not everything:
                reach *= 2  # equal texts, and those that are about to be replaced, take places
                closest, everything = self._closest(text, vector, reach)
        known = (other for other in self._index.behind(text) if other != text)
        stay = [other for other in known if other in self._first or self._holder(other)]
        return list(dict.fromkeys([*closest[:NEIGHBOURS], *stay]))

    def _vector(self, text: str) -> np.ndarray | None:
        """[dimensions] float32; None where another ingest has removed the text meanwhile."""
        name, vector = self._first.get(text, ("", None))
        holder = self._holder(text)
        return vector if name and not "" < holder < name else self._index.vector_of(text, holder)

    def _find_holder(self, text: str) -> str:
        """The first document of those that stay as they are that has a text; "" if none has."""
        return next((name for name in self._index.documents_with(text) if name not in self._replaced), "")

    def _closest(self, text: str, vector: np.ndarray, reach: int) -> tuple[list[str], bool]:
        """The closest that differ, closest first, of about the `reach` closest; and whether that is all of them."""
        hits = self._index.search(vector, reach)
        found = [(hit.similarity, hit.chunk.text) for hit in hits if hit.chunk.document not in self._replaced]
        # Farther away than the last hit there may be others in the index, closer than what is new there; or vice versa.
        horizons = [hits[-1].similarity] if len(hits) == reach else []
        if self._vectors is not None:
            similarities = self._vectors @ vector
            closest = similarities.argsort(kind="stable")[::-1][:reach]
            found += [(float(similarities[n]), self._texts[n]) for n in closest]
            horizons += [float(similarities[closest[-1]])] if len(closest) == reach else []
        # FAISS and NumPy differ in the last digits.
        horizon = max((round(similarity, 5) for similarity in horizons), default=-math.inf)
        ranked = sorted((-round(similarity, 5), other) for similarity, other in found)
        within = dict.fromkeys(other for distance, other in ranked if -distance > horizon)
        return [other for other in within if other != text], not horizons
