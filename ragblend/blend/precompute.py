"""Chunk KV, computed once and stored: a chunk prefilled behind what variants.py chooses.

The head, the ids that stand before the first chunk of a real prompt, is prefilled once and kept; so is the context
behind it that was used last, since many chunks in a row share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ragblend.blend.prefill import LayerSource, Plan, full_plan, prefill
from ragblend.blend.selectors import RecomputeNone
from ragblend.errors import ContextWindowError
from ragblend.kv import ChunkKV, LayerKV
from ragblend.model.decoder import Decoder, KVCache


class Precomputer:
    """Computes the standalone KV of chunks behind one head.

    head_ids: may be empty: a chunk without a context is then prefilled alone, as published CacheBlend does.
    """

    def __init__(self, decoder: Decoder, head_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._head = tuple(head_ids)
        self._known: tuple[int, ...] = ()  # ids whose KV stands at the start of the buffers
        self._cache: KVCache | None = None

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
        cache = self._room_for(tokens)
        if self._known != before:
            self._known = self._head if self._known[: len(self._head)] == self._head else ()
        if self._known != before and source is not None:
            if self._known != self._head:
                self._prefill(cache, self._head)
                self._known = self._head
            plan = _behind_stored((*before, *ids), len(self._head), stored)
            prefill(self._decoder, cache, plan, source, RecomputeNone(), 0.0)
        else:
            if self._known != before:
                self._prefill(cache, before)
                self._known = before
            self._prefill(cache, (*before, *ids))
        return self._unrotated(cache, len(before), tokens)

    def _prefill(self, cache: KVCache, ids: Sequence[int]) -> None:
        prefill(self._decoder, cache, full_plan(ids, len(self._known)), None, RecomputeNone(), 0.0)

    def _room_for(self, tokens: int) -> KVCache:
        """Buffers of at least that size, with what is known at their start."""
        if self._cache is None or self._cache.capacity < tokens:
            grown = self._decoder.new_cache(tokens if self._cache is None else tokens + tokens // 4)
            known = slice(0, len(self._known))
            if self._cache is not None:
                for layer in range(self._decoder.n_layers):
                    grown.write(layer, known, *self._cache.read(layer, known))
            self._cache = grown
        return self._cache

    @torch.inference_mode()
    def _unrotated(self, cache: KVCache, start: int, stop: int) -> ChunkKV:
        at = slice(start, stop)
        inverse = self._decoder.inverse_angles(start, stop)
        layers = []
        for layer in range(self._decoder.n_layers):
            key, value = cache.read(layer, at)
            # Copies: the buffers are used again for the next chunk, while this one is still being written.
            layers.append(LayerKV(self._decoder.unrotate(layer, key, inverse).cpu(), value.clone().cpu()))
        return layers


def _behind_stored(ids: Sequence[int], known: int, stored: int) -> Plan:
    """Everything is computed but `known` tokens, which are in the cache, and the `stored` ones behind them."""
    plan = full_plan(ids, known)
    reused = torch.zeros(len(ids), dtype=torch.bool)
    reused[known : known + stored] = True
    return replace(plan, reused=reused, settled=reused, chunks=((known, known + stored),))
