"""Linear layers with their weights laid out for the CPU's matrix units.

PyTorch hands a bfloat16 weight to oneDNN in row-major order, and oneDNN reorders it on every call. For thousands of
rows that is lost in the noise; for the tens to hundreds of rows of a blend it is a quarter of the time, and for the
one row of a decode step a third. Packed once, the same kernels give the same results without it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The layout hardly depends on the number of rows it is optimised for; this is a blend's order of magnitude.
_TYPICAL_ROWS = 64


class PackedLinear(nn.Module):
    """y = x W^T + b for bfloat16 on a CPU. Takes the weight over from `linear`, packed; for inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # Not a buffer: the packed layout is opaque, and must be neither moved, converted nor saved.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch and this processor have the kernels."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.inference_mode()
def pack_linears(module: nn.Module) -> int:
    """Replace every nn.Linear below `module` by a PackedLinear, which frees its own weight; how many there were."""
    packed = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
            packed += 1
        else:
            packed += pack_linears(child)
    return packed


@torch.no_grad()
def release_mapping(module: nn.Module) -> None:
    """Copy what was not packed, so that the weights' file, of which all pages were read, is no longer held in memory.

    Weights are loaded as views of one memory-mapped file; a single tensor that stays a view keeps all of it.
    """
    copies: dict[int, Tensor] = {}  # tied parameters stay tied
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = copies.setdefault(tensor.data_ptr(), tensor.data.clone())
