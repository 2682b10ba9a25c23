"""The tensors that cross rooms: one layer's keys and values for a run of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class LayerShape(NamedTuple):
    """Sizes of one layer's keys and values; layers of one model may differ."""

    kv_heads: int
    key_dim: int
    value_dim: int


class LayerKV(NamedTuple):
    """One layer's keys and values.

    key:   [kv_heads, tokens, key_dim], *unrotated*: as the layer makes it before RoPE, so that it can be rotated
           once, to whatever position the tokens end up at.
    value: [kv_heads, tokens, value_dim].
    """

    key: Tensor
    value: Tensor

    @property
    def n_tokens(self) -> int:
        return int(self.key.shape[1])


ChunkKV = Sequence[LayerKV]
"""A chunk's KV: one LayerKV a layer, first layer first."""
