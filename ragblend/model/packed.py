"""Linear layers with their weights laid out for the CPU's matrix units.

PyTorch hands a bfloat16 weight to oneDNN in row-major order, and oneDNN reorders it on every call. For thousands of
rows that is lost in the noise; for the tens to hundreds of rows of a blend it is a quarter of the time, and for the
one row of a decode step a third. Packed once, the same kernels give the same results without it.

Layers that are given the very same input (queries, keys and values; gate and up projections) become one product: few
rows are gone before a second product has got going.

For every number of rows it has not seen, oneDNN writes a kernel of its own, for each size of layer: 14 ms for the four
of a small model, and no two prompts select the same number of rows. `rounded_up` leaves few numbers to be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

# The layout hardly depends on the number of rows it is optimised for; this is a blend's order of magnitude.
_TYPICAL_ROWS = 64


class PackedLinear(nn.Module):
    """y = x W^T + b for bfloat16 on a CPU, for inference only.

    Args:
        linears: one layer, or several of the same input, whose outputs then stand side by side. Their weights are
            copied, packed.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        # Not a buffer: the packed layout is opaque, and must be neither moved, converted nor saved.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


class PackedPart(nn.Module):
    """One of several layers of the same input: whichever is asked first computes them all."""

    def __init__(self, together: _Together, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self._together, self._index = together, index
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]; a view into the rows of all of them."""
        return self._together.take(self._index, x)


class _Together:
    """The outputs of one product, each taken once by the layer it belongs to; every thread has its own."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._product = PackedLinear(*linears)
        self._sizes = [linear.out_features for linear in linears]
        self._left = threading.local()  # input: what `parts` were computed from; parts: those not taken yet, by index

    def take(self, index: int, x: Tensor) -> Tensor:
        left = self._left.__dict__
        parts: dict[int, Tensor] = left.get("parts", {})
        if left.get("input") is not x or index not in parts:
            left["input"] = x
            left["parts"] = parts = dict(enumerate(self._product(x).split(self._sizes, dim=-1)))
        part = parts.pop(index)
        if not parts:
            left.clear()
        return part


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch and this processor have the kernels."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Siblings(NamedTuple):
    """Linear layers that their parent hands the same input, by name."""

    parent: nn.Module
    names: tuple[str, ...]


def rounded_up(n_rows: int) -> int:
    """So many rows are computed in the place of `n_rows`: whole tiles of the matrix units, of which the last costs the
    same half empty."""
    if n_rows == 1:
        return 1
    step = 8 if n_rows <= 8 else 16 if n_rows <= 512 else 64
    return -(-n_rows // step) * step


@contextmanager
def same_inputs(module: nn.Module) -> Iterator[list[Siblings]]:
    """Watch `module` run; the list is there afterwards."""
    mine = threading.get_ident()  # others may be using the model
    given_to: dict[tuple[nn.Module, int], list[str]] = {}
    kept: list[Tensor] = []  # an id is only unique as long as its tensor lives
    hooks = []
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:

                def note(_: nn.Module, given: tuple[Tensor, ...], parent: nn.Module = parent, name: str = name) -> None:
                    # By position: by keyword, a packed layer would not take it anyway.
                    if given and threading.get_ident() == mine:
                        kept.append(given[0])
                        given_to.setdefault((parent, id(given[0])), []).append(name)

                hooks.append(child.register_forward_pre_hook(note))
    found: list[Siblings] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found.extend(Siblings(parent, tuple(dict.fromkeys(names))) for (parent, _), names in given_to.items())


@torch.inference_mode()
def pack_linears(module: nn.Module, siblings: Sequence[Siblings] = ()) -> int:
    """Replace every nn.Linear below `module` by a packed one, which frees its own weight; how many there were.

    siblings: those to compute together, which is done where all of them or none have a bias.
    """
    packed = 0
    inside = set(module.modules())
    for parent, names in siblings:
        linears = [getattr(parent, name) for name in names]
        plain = all(type(linear) is nn.Linear for linear in linears)  # one may be packed with others already
        if parent in inside and len(linears) > 1 and plain and len({linear.bias is None for linear in linears}) == 1:
            together = _Together(linears)
            for i, name in enumerate(names):
                setattr(parent, name, PackedPart(together, i, linears[i]))
            packed += len(names)
    for parent in inside:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
                packed += 1
    return packed


@torch.no_grad()
def release_mapping(module: nn.Module) -> None:
    """Copy what was not packed, so that the weights' file, of which all pages were read, is no longer held in memory.

    Weights are loaded as views of one memory-mapped file; a single tensor that stays a view keeps all of it.
    """
    copies: dict[int, Tensor] = {}  # tied parameters stay tied
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = copies.setdefault(tensor.data_ptr(), tensor.data.clone())
