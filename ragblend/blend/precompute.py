"""Chunk KV, computed once and stored: a chunk prefilled behind what variants.py chooses.

The head, the ids that stand before the first chunk of a real prompt, is prefilled once and kept; so is the context
behind it that was used last, since many chunks in a row share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragblend.blend.prefill import full_plan, prefill
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

    def chunk_kv(self, ids: Sequence[int], context: Sequence[int] = ()) -> ChunkKV:
        """Unrotated KV of a chunk's tokens, on the CPU: LayerKV [kv_heads, tokens, dim] for each layer.

        Args:
            ids: [chunk tokens].
            context: what stands between the head and the chunk.

        Raises:
            ContextWindowError: head, context and chunk do not fit the model.
        """
        before = (*self._head, *context)
        tokens = len(before) + len(ids)
        if tokens > self._decoder.context_window_tokens:
            raise ContextWindowError(tokens, 0, self._decoder.context_window_tokens)
        cache = self._room_for(tokens)
        if self._known != before:
            self._known = self._head if self._known[: len(self._head)] == self._head else ()
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
