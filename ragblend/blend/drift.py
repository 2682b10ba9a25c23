"""Drift: what happens to the KV of every token alike when its chunk stands deeper than where it was prefilled.

A chunk is prefilled behind the head and a few hundred tokens, and then stands behind thousands. Most of what its keys
and values lack there differs from token to token, and is what recomputing is for. But a part of it is the same for all
of them: the more has been read, the less a single token draws attention to itself. Left as it is, reused text gets more
attention than it would in a full prefill, in early layers by a third, and every row of the question is pulled the same
way. That part is one vector for each layer and head. It is the model's and depends little on the text, so it is
measured once, on some of the chunks that are ingested, and added whenever their KV is loaded: to keys before they are
rotated, and to values.

How much of it a chunk needs depends on how much stands before it here that did not where it was prefilled: the vector
is scaled by 1 - there / here, both in tokens. What stands no deeper is left alone, and so is what is settled.

Means are of full prefills of chunks that stand one behind the other, as they do in prompts, minus what is stored of
them. They are least-squares fits: sums over tokens of scale x difference, over sums of scale squared. The latter begin
with a few hundred tokens that lack nothing, so that where little was measured little is done. (Chunks that are nearly
copies of others in a prompt are not measured: they lack something else. Where most are, it is measured again later.)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ragblend.blend.prefill import LayerSource, Plan, full_plan, prefill
from ragblend.blend.selectors import RecomputeNone
from ragblend.blend.variants import CONTEXT_TOKENS
from ragblend.kv import ChunkKV, LayerKV, LayerShape
from ragblend.model.decoder import Decoder

LEAST_TOKENS, MOST_TOKENS = 7200, 14400
"""Of the chunks that the drift is measured on: fewer are no sample, and more hardly change it."""
PROMPT_TOKENS = 2048
"""Of a prompt that is measured, at most; twice as many where two chunks need them. The window may be shorter."""

_VERSION = 1
_PRIOR_TOKENS = 400.0
_KINDS = 2  # chunks with a context behind the head (0) and without one (1)


class Drift:
    """The sums, and the vectors that come of them.

    shapes: of the model's layers. chunks: how many were measured.
    measured: whether it was. entries: of the store, when it was.
    """

    def __init__(self, shapes: Sequence[LayerShape]) -> None:
        self.chunks, self.entries, self.measured = 0, 0, False
        self._weights = [0.0] * _KINDS
        self._stacked: dict[tuple[tuple[int, ...], torch.device, torch.dtype], list[LayerKV]] = {}
        self._sums = [
            [
                LayerKV(*(torch.zeros(heads, dim, dtype=torch.float32) for dim in (key_dim, value_dim)))
                for heads, key_dim, value_dim in shapes
            ]
            for _ in range(_KINDS)
        ]

    def add(self, shallow: bool, scale: float, full: ChunkKV, stored: ChunkKV) -> None:
        """One more chunk. full, stored: its unrotated KV as it is where it stands, and as it was prefilled.

        One with numbers that have overflown is passed over: it would be the end of all that is corrected.
        """
        found = [
            LayerKV(*(scale * (now.cpu().float() - then.cpu().float()).sum(1) for now, then in zip(*both, strict=True)))
            for both in zip(full, stored, strict=True)
        ]
        if not all(bool(torch.isfinite(part).all()) for layer in found for part in layer):
            return
        for total, more in zip(self._sums[shallow], found, strict=True):
            for sums, part in zip(total, more, strict=True):
                sums += part
        self._weights[shallow] += scale**2 * full[0].key.shape[1]
        self.chunks += 1
        self._stacked.clear()

    @property
    def settled(self) -> bool:
        """Whether more was measured than is taken for granted. Where chunks are nearly copies of others, it is not."""
        return max(self._weights) > _PRIOR_TOKENS

    def knows(self, shallow: int) -> bool:
        """Whether chunks of that kind were measured."""
        return self._weights[shallow] > 0.0

    def vectors(self, shallow: int) -> list[LayerKV]:
        """[kv_heads, dim] each, fp32, of every layer; of a kind that it knows."""
        weight = self._weights[shallow] + _PRIOR_TOKENS
        return [LayerKV(*(part / weight for part in sums)) for sums in self._sums[shallow]]

    def stacked(self, kinds: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[LayerKV]:
        """[kv_heads, kinds, dim] of every layer: the same for one prompt after the other, so they are kept."""
        which = (kinds, device, dtype)
        if which not in self._stacked:
            self._stacked[which] = [
                LayerKV(*(torch.stack(parts, 1).to(device, dtype) for parts in zip(*layers, strict=True)))
                for layers in zip(*map(self.vectors, kinds), strict=True)
            ]
        return self._stacked[which]

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        sums = [part.flatten() for kind in self._sums for layer in kind for part in layer]
        data = torch.cat(sums).numpy().astype("<f4").tobytes()
        return {
            "version": _VERSION,
            "chunks": self.chunks,
            "entries": self.entries,
            "weights": self._weights,
            "sums": base64.b64encode(data).decode(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], shapes: Sequence[LayerShape]) -> Self:
        """What as_dict gave; nothing measured where it is something else, or another model's."""
        made = cls(shapes)
        try:
            if data["version"] != _VERSION:
                return made
            values = torch.from_numpy(np.frombuffer(base64.b64decode(data["sums"]), dtype="<f4").astype(np.float32))
            parts = [part for kind in made._sums for layer in kind for part in layer]
            read = values.split([part.numel() for part in parts])
            weights, counts = [float(weight) for weight in data["weights"]], [int(data["chunks"]), int(data["entries"])]
            sound = len(weights) == _KINDS and all(0.0 <= weight < math.inf for weight in weights) and min(counts) >= 0
            if not sound or not bool(torch.isfinite(values).all()):
                return made
        # OverflowError: an infinite count. RuntimeError: so many values do not split like that.
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
            return made
        for part, of in zip(parts, read, strict=True):
            part.copy_(of.view(part.shape))
        made._weights, made.measured = weights, True
        made.chunks, made.entries = counts
        return made


def scale(start: int, head_tokens: int, *, shallow: bool) -> float:
    """How much of the drift a chunk has at `start` that was prefilled behind a head of so many tokens."""
    there = head_tokens if shallow else head_tokens + CONTEXT_TOKENS
    return max(0.0, 1.0 - there / start) if start else 0.0


class Placed(NamedTuple):
    """A stored chunk in a prompt that is measured.

    kv: as it is stored, in the variant that would serve it there. shallow: that has no context behind the head.
    """

    start: int
    stop: int
    shallow: bool
    kv: ChunkKV


@torch.inference_mode()
def measure(drift: Drift, decoder: Decoder, ids: Sequence[int], head_tokens: int, chunks: Iterable[Placed]) -> None:
    """Add what is found in one prompt. ids: [tokens], of which the first `head_tokens` are what chunks stand behind."""
    cache = decoder.new_cache(len(ids))
    prefill(decoder, cache, full_plan(ids), None, RecomputeNone(), 0.0)
    for start, stop, shallow, stored in chunks:
        if (by := scale(start, head_tokens, shallow=shallow)) > 0.0:
            inverse = decoder.inverse_angles(start, stop)
            full = []
            for layer in range(decoder.n_layers):
                key, value = cache.read(layer, slice(start, stop))
                full.append(LayerKV(decoder.unrotate(layer, key, inverse), value))
            drift.add(shallow, by, full, stored)


class Deepened:
    """A source of reused KV, with what it lacks where it stands in this prompt.

    Args:
        source: unrotated KV of the plan's reused tokens.
        head_tokens: of the head that they were prefilled behind.
    """

    def __init__(self, source: LayerSource, drift: Drift, plan: Plan, head_tokens: int, decoder: Decoder) -> None:
        self._source, self._decoder = source, decoder
        like: dict[str, Any] = {"device": decoder.device, "dtype": decoder.dtype}
        scales = torch.zeros(len(plan.ids), _KINDS, dtype=torch.float32)  # of the two, a token has one at most
        for start, stop in plan.chunks:
            for shallow in (False, True):
                scales[start:stop, int(shallow)] = scale(start, head_tokens, shallow=shallow)
        scales[plan.shallow, 0] = 0.0
        scales[~plan.shallow, 1] = 0.0
        scales[plan.settled] = 0.0
        kinds = tuple(kind for kind in range(_KINDS) if drift.knows(kind) and bool(scales[:, kind].any()))
        self._scales = scales[plan.reused][None, :, list(kinds)].to(**like)
        self._vectors = drift.stacked(kinds, decoder.device, decoder.dtype) if kinds else []

    def layer(self, index: int) -> LayerKV:
        """See LayerSource."""
        kv = self._source.layer(index)
        if not self._vectors:
            return kv
        with self._decoder.own_dtype():
            return LayerKV(
                *(
                    torch.baddbmm(part, self._scales.expand(len(part), -1, -1), by)
                    for part, by in zip(kv, self._vectors[index], strict=True)
                )
            )
