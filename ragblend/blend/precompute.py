"""Chunk KV, computed once and stored: a chunk prefilled behind a preamble.

A chunk prefilled alone sits at the start of a context, where a model's first tokens soak up attention and look like
nothing that happens later. Behind the preamble, the ids that stand before the first chunk of a real prompt, it sees
the same beginning it will have at query time. The preamble's own KV is computed once and kept.
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
    """Computes the standalone KV of chunks behind one preamble.

    preamble_ids: may be empty: the chunk is then prefilled alone, as published CacheBlend does.
    """

    def __init__(self, decoder: Decoder, preamble_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._preamble = torch.as_tensor(list(preamble_ids), dtype=torch.int64)
        self._cache: KVCache | None = None

    def chunk_kv(self, ids: Sequence[int]) -> ChunkKV:
        """Unrotated KV of a chunk's tokens, on the CPU: LayerKV [kv_heads, tokens, dim] for each layer.

        Raises:
            ContextWindowError: preamble and chunk do not fit the model.
        """
        known = len(self._preamble)
        tokens = known + len(ids)
        if tokens > self._decoder.context_window_tokens:
            raise ContextWindowError(tokens, 0, self._decoder.context_window_tokens)
        cache = self._room_for(tokens)
        chunk = torch.cat([self._preamble, torch.as_tensor(ids, dtype=torch.int64)])
        prefill(self._decoder, cache, full_plan(chunk, known), None, RecomputeNone(), 0.0)
        return self._unrotated(cache, known, tokens)

    def _room_for(self, tokens: int) -> KVCache:
        """Buffers of at least that size with the preamble's KV at their start."""
        if self._cache is None or self._cache.capacity < tokens:
            grown = self._decoder.new_cache(tokens if self._cache is None else tokens + tokens // 4)
            known = len(self._preamble)
            if self._cache is not None:
                for layer in range(self._decoder.n_layers):
                    grown.write(layer, slice(0, known), *self._cache.read(layer, slice(0, known)))
            elif known:
                prefill(self._decoder, grown, full_plan(self._preamble), None, RecomputeNone(), 0.0)
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
