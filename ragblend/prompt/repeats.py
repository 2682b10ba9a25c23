"""Which tokens repeat text that stood earlier in a context.

A model treats text it has seen before differently: it recognises the copy and reads on in the original. So the KV of a
passage depends, more than on anything else that stands before it, on whether the same words stood there already. Two
contexts that agree on that give a chunk nearly the same KV.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

RUN_TOKENS = 8
"""Shorter runs are common phrases, and mean no copy."""

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by its powers loses nothing


def repeated(ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Mask]:
    """For each span start..stop of ids [tokens]: [stop - start] bool, tokens in a run that also stands before `start`.

    A run is RUN_TOKENS tokens in a row, inside the span, that occur as a whole in ids[:start].
    """
    hashes = _runs(ids)
    earliest = _first_occurrence(hashes)
    masks = []
    for start, stop in spans:
        mask = np.zeros(stop - start, dtype=np.bool_)
        runs = max(0, stop - start - RUN_TOKENS + 1)
        seen = np.flatnonzero(earliest[start : start + runs] + RUN_TOKENS <= start)
        for offset in range(RUN_TOKENS):
            mask[seen + offset] = True
        masks.append(mask)
    return masks


def repeated_behind(context: Ids, chunk: Ids) -> Mask:
    """[chunk tokens] bool: which tokens of a chunk repeat something in the context that it stands behind."""
    together = np.concatenate([context, chunk])
    return repeated(together, [(len(context), len(together))])[0]


def _runs(ids: Ids) -> npt.NDArray[np.uint64]:
    """[tokens - RUN_TOKENS + 1] uint64: a hash of the run that begins at each token."""
    n = max(0, len(ids) - RUN_TOKENS + 1)
    hashes = np.zeros(n, dtype=np.uint64)
    tokens = ids.astype(np.uint64) + np.uint64(1)
    for offset in range(RUN_TOKENS):
        hashes = hashes * _BASE + tokens[offset : offset + n]
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _first_occurrence(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """For each value the index of the first one that equals it."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first[inverse]
