"""Chunk KV, computed once and stored: a chunk prefilled behind what variants.py chooses.

What it is prefilled behind is mostly the same for many chunks in a row: the head, the ids that stand before the first
chunk of a real prompt, and the head with a context behind it. The KV of the last two of these is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ragblend.blend.prefill import LayerSource, Plan, full_plan, prefill
from ragblend.blend.selectors import RecomputeNone
from ragblend.errors import ContextWindowError
from ragblend.kv import ChunkKV, LayerKV
from ragblend.model.cache import KVCache
from ragblend.model.decoder import Decoder

_KEPT = 2  # "behind the head" and "behind a context" take turns, chunk by chunk


@dataclass
class _Begun:
    """Buffers that begin with the KV of `known` ids. A chunk is computed behind them, and overwritten by the next."""

    known: tuple[int, ...]
    cache: KVCache


class InMemory:
    """KV that is at hand, as a source for a prefill; brought to `device` layer by layer."""

    def __init__(self, layers: ChunkKV, device: torch.device) -> None:
        self._layers, self._device = layers, device

    def layer(self, index: int) -> LayerKV:
        """See LayerSource."""
        return LayerKV(*(part.to(self._device) for part in self._layers[index]))


class Precomputer:
    """Computes the standalone KV of chunks behind one head.

    head_ids: may be empty: a chunk without a context is then prefilled alone, as published CacheBlend does.
    """

    def __init__(self, decoder: Decoder, head_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._head = tuple(head_ids)
        self._begun: list[_Begun] = []  # the one used last comes last

    def chunk_kv(
        self, ids: Sequence[int], context: Sequence[int] = (), source: LayerSource | None = None, stored: int = 0
    ) -> ChunkKV:
        """Unrotated KV of a chunk's tokens, on the CPU: LayerKV [kv_heads, tokens, dim] for each layer.

        Args:
            ids: [chunk tokens].
            context: what stands between the head and the chunk.
            source: KV of the first `stored` tokens of the context, as it is right behind the head: a chunk is often
                prefilled behind another one, whose own KV is stored already.

        Raises:
            ContextWindowError: head, context and chunk do not fit the model.
            CorruptPayloadError: from the source.
        """
        before = (*self._head, *context)
        tokens = len(before) + len(ids)
        if tokens > self._decoder.context_window_tokens:
            raise ContextWindowError(tokens, 0, self._decoder.context_window_tokens)
        if before and self._decoder.is_long(len(self._head)) != self._decoder.is_long(tokens):
            # What is kept, or stored, of the beginning is a short prompt's.
            cache = self._decoder.new_cache(tokens)
            prefill(self._decoder, cache, full_plan((*before, *ids)), None, RecomputeNone(), 0.0)
            return self._unrotated(cache, len(before), tokens)
        begun = self._begin(before, tokens)
        self._compute(begun, self._head)
        if begun.known != before and source is not None:
            plan = _behind_stored((*before, *ids), len(self._head), stored)
            prefill(self._decoder, begun.cache, plan, source, RecomputeNone(), 0.0)
        else:
            self._compute(begun, before)
            prefill(self._decoder, begun.cache, full_plan((*before, *ids), len(before)), None, RecomputeNone(), 0.0)
        return self._unrotated(begun.cache, len(before), tokens)

    def _begin(self, before: tuple[int, ...], tokens: int) -> _Begun:
        """Buffers for so many tokens that begin with `before`, or else with the head, or else with nothing.

        Never with the beginning of something longer: computed together with more rows, the head is rounded otherwise,
        and a chunk's KV is not to depend on which chunks came before it.
        """
        begun = next((each for each in self._begun if each.known == before), None)
        if begun is not None:
            self._begun.remove(begun)
        elif len(self._begun) < _KEPT:
            begun = _Begun((), self._decoder.new_cache(tokens))
        else:
            begun = self._begun.pop(0)
            begun.known = self._head if begun.known == self._head else ()
        if begun.cache.capacity < tokens:
            grown = self._decoder.new_cache(tokens + tokens // 4)
            known = slice(0, len(begun.known))
            for layer in range(self._decoder.n_layers):
                grown.write(layer, known, *begun.cache.read(layer, known))
            begun.cache = grown
        self._begun.append(begun)
        return begun

    def _compute(self, begun: _Begun, ids: tuple[int, ...]) -> None:
        """Have the buffers begin with these ids at least; what is known begins with them, or they with it."""
        if len(begun.known) < len(ids):
            prefill(self._decoder, begun.cache, full_plan(ids, len(begun.known)), None, RecomputeNone(), 0.0)
            begun.known = ids

    @torch.inference_mode()
    def _unrotated(self, cache: KVCache, start: int, stop: int) -> ChunkKV:
        at = slice(start, stop)
        inverse = self._decoder.inverse_angles(start, stop)
        layers = []
        for layer in range(self._decoder.n_layers):
            key, value = cache.read(layer, at)
            # Copies, also of keys that have no rotation to undo: the buffers are used again for the next chunk, while
            # this one is still being written.
            layers.append(LayerKV(self._decoder.unrotate(layer, key.clone(), inverse).cpu(), value.clone().cpu()))
        return layers


def _behind_stored(ids: Sequence[int], known: int, stored: int) -> Plan:
    """Everything is computed but `known` tokens, which are in the cache, and the `stored` ones behind them."""
    plan = full_plan(ids, known)
    reused = torch.zeros(len(ids), dtype=torch.bool)
    reused[known : known + stored] = True
    return replace(plan, reused=reused, settled=reused, chunks=((known, known + stored),))
