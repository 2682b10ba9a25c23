"""Noticing that a model's weights are others than they were, without reading them all each time.

Whoever else holds a model may train it, merge an adapter into it, or load other weights into it. KV of before and after
goes by one name then, in RAM and on the disk, where it outlives both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED_BYTES = 32  # of each tensor, from its middle


class Watch:
    """Where the parameters and saved buffers of a module are, how often each was written to, and a few bytes of it.

    The bytes are for what writes to `parameter.data`, as merging an adapter does: it is not counted.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], str]] = []
        for each in module.modules():
            self._held += [(each._parameters, name) for name in each._parameters]
            self._held += [(each._buffers, name) for name in each._buffers.keys() - each._non_persistent_buffers_set]
        self.begin()

    def begin(self) -> None:
        """Look for changes from now on."""
        self._places = self._look()
        plain = (tensor for tensor in self._tensors() if _is_plain(tensor) and tensor.is_contiguous())
        self._samples = [_some_bytes(tensor) for tensor in plain]
        self._bytes = self._sampled()

    def sees_change(self) -> bool:
        """Whether something may have been changed: moved, written to, or replaced."""
        return self._look() != self._places or self._sampled() != self._bytes

    def _tensors(self) -> list[Tensor]:
        return [tensor for holder, name in self._held if (tensor := holder.get(name)) is not None]

    def _look(self) -> list[tuple[int, int, int]]:
        return [
            (
                id(tensor),
                tensor.data_ptr() if _is_plain(tensor) else 0,
                0 if tensor.is_inference() else tensor._version,
            )
            for tensor in self._tensors()
        ]

    def _sampled(self) -> bytes:
        return torch.cat(self._samples).cpu().numpy().tobytes() if self._samples else b""


def _is_plain(tensor: Tensor) -> bool:
    """What quantises keeps its numbers in tensors of its own kind, which need not lie anywhere."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_quantized


def _some_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8 of a contiguous tensor; a view."""
    every = tensor.detach().view(-1).view(torch.uint8)
    middle = len(every) // 2
    return every[middle : middle + _SAMPLED_BYTES]
