"""Chunks to store: small, random, repeatable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ragblend.kv import LayerKV

MakeChunk = Callable[..., list[LayerKV]]


@pytest.fixture(scope="session")
def make_chunk() -> MakeChunk:
    def make(
        seed: int = 0,
        *,
        n_tokens: int = 7,
        n_layers: int = 3,
        kv_heads: int = 2,
        key_dim: int = 8,
        value_dim: int = 4,
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[LayerKV]:
        generator = torch.Generator().manual_seed(seed)

        def random(dim: int) -> torch.Tensor:
            return torch.randn((kv_heads, n_tokens, dim), generator=generator).to(dtype)

        return [LayerKV(random(key_dim), random(value_dim)) for _ in range(n_layers)]

    return make
