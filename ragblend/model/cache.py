"""The KV of one prompt while it is prefilled and decoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragblend.kv import LayerShape


class KVCache:
    """Rotated keys and values of every position, layer by layer, in buffers allocated once.

    keys[i]: [1, kv_heads, capacity, key_dim]; values[i]: [1, kv_heads, capacity, value_dim].
    """

    def __init__(self, shapes: Sequence[LayerShape], capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity, self._dtype, self._device = capacity, dtype, device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            self.add_layer(shape)

    def add_layer(self, shape: LayerShape) -> None:
        """Buffers for one more layer."""
        kv_heads, key_dim, value_dim = shape
        self.keys.append(torch.empty((1, kv_heads, self.capacity, key_dim), dtype=self._dtype, device=self._device))
        self.values.append(torch.empty((1, kv_heads, self.capacity, value_dim), dtype=self._dtype, device=self._device))

    def write(self, layer: int, positions: Tensor | slice, key: Tensor, value: Tensor) -> None:
        """Put rotated key and value [kv_heads, rows, dim] at `positions` ([rows] int64, or a slice of one run)."""
        if isinstance(positions, slice):
            self.keys[layer][0, :, positions] = key
            self.values[layer][0, :, positions] = value
        else:
            self.keys[layer][0].index_copy_(1, positions, key)
            self.values[layer][0].index_copy_(1, positions, value)

    def blank(self, positions: Tensor) -> None:
        """Zero these positions in every layer: a masked key is multiplied by nothing, but 0 * NaN is NaN."""
        at = positions.to(self._device)
        for buffer in (*self.keys, *self.values):
            buffer[0].index_fill_(1, at, 0.0)

    def read(self, layer: int, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Rotated key and value [kv_heads, rows, dim] at `positions`."""
        return self.keys[layer][0][:, positions], self.values[layer][0][:, positions]
