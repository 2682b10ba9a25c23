"""Exact attention of selected rows over full-length keys.

A full prefill has as many query rows as keys and a triangular mask. A blend has a few rows, at scattered positions,
against every key before them:

    keys      0 1 2 3 4 5 6 7
    row @ 2   1 1 1 . . . . .
    row @ 3   1 1 1 1 . . . .      block 1: rows @2, @3 look at keys 0..4 only
    row @ 6   1 1 1 1 1 1 1 .
    row @ 7   1 1 1 1 1 1 1 1      block 2: rows @6, @7 look at keys 0..8

`CausalRows` is that mask as a structure instead of a tensor. Rows are cut into position blocks: a block never looks
past its own last row, which halves the work of scattered rows, and the mask is rows x keys of one block; no S x S
tensor exists. `attend` picks the kernel by shape. It is registered with transformers under ATTENTION_NAME and called
by the model's own attention layers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION_NAME = "ragblend"

_UNKNOWN_FEATURES = {"position_bias": "a bias by position"}
# Rows in a block. Smaller blocks look at fewer keys beyond the diagonal; larger ones fill the matrix units and, on a
# GPU, need fewer launches. The fused CPU kernel tiles queries by 64, so other multiples cost more per row.
_BLOCK_ROWS = {"cpu": 128, "cuda": 512}
# What one block more must save, in rows x keys: scattered rows gain nothing by finer blocks, but a prompt's head and
# its question, computed together, would have the head look past everything between them.
_WORTH_A_BLOCK = 40_000
# The fused CPU kernel's largest tiles start here; smaller ones are as fast with a mask.
_LARGE_TILES = 768
# For half-width numbers, on processors with matrix units, the fused CPU kernel has products written for every pair of
# sizes that its last tiles of rows and keys may have, and each thread keeps all of them: a service that answers prompts
# of all lengths never stopped growing. Numbers of keys are rounded up to these, behind a mask.
_TILE_KEYS = 64
# Block masks are the same in every layer. They are kept while they are small beside the KV itself.
_KEPT_MASK_ELEMENTS = 16 * 1024 * 1024


class Block(NamedTuple):
    """Rows start..stop of a pass and the keys key_start..key_stop they may see (both half-open)."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask: Tensor | None  # additive, [rows, keys rounded up]; None when every row sees every key


@dataclass(frozen=True)
class AttentionProbe:
    """Collects how much attention the rows from `first_row` on pay to each key: mass [keys], fp32, added to."""

    first_row: int
    mass: Tensor


@dataclass(frozen=True)
class CausalRows:
    """Query rows at absolute positions; the row at position p sees keys 0..p (or the layer's window of them).

    positions: [rows] int64 on the CPU, strictly ascending.
    invisible: [keys] bool or None; keys that no row may see because nothing is there yet.
    probe: where attention weights are added up, or None.
    windows: filled with the window each layer asked for (layer index -> tokens or None) when given; the parity probe
        reads it.
    """

    positions: Tensor
    device: torch.device
    invisible: Tensor | None = None
    probe: AttentionProbe | None = None
    windows: dict[int, int | None] | None = None
    _kept: dict[tuple[int | None, torch.dtype], tuple[Block, ...]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def start(self) -> int:
        return int(self.positions[0])

    @functools.cached_property
    def stop(self) -> int:
        """One past the last row's position: how many keys the rows may see at most."""
        return int(self.positions[-1]) + 1

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    @functools.cached_property
    def is_run(self) -> bool:
        """True when the positions are start, start + 1, ..., stop - 1."""
        return self.stop - self.start == len(self)

    def blocks(self, window: int | None, dtype: torch.dtype) -> Iterator[Block] | tuple[Block, ...]:
        """The rows cut into blocks; additive masks in `dtype`. window: keys a row may see, itself included."""
        kept = self._kept.get((window, dtype))
        if kept is not None:
            return kept
        made = self._make_blocks(window, dtype)
        if len(self) * self.stop <= _KEPT_MASK_ELEMENTS:
            return self._kept.setdefault((window, dtype), tuple(made))
        return made

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every block: rows of a full tile, and where they lie far apart, two blocks of them."""
        size = _BLOCK_ROWS.get(self.device.type, 512)
        # A block that is not full is the first one: half-empty tiles cost least where there are the fewest keys.
        for stop in range((len(self) - 1) % size + 1, len(self) + 1, size):
            start = max(0, stop - size)
            rows = self.positions[start:stop]
            saved = torch.arange(1, len(rows)) * (rows[-1] - rows[:-1])
            if len(saved) and int(saved.max()) > _WORTH_A_BLOCK:
                cut = start + int(saved.argmax()) + 1
                yield start, cut
                start = cut
            yield start, stop

    def _make_blocks(self, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
        for start, stop in self._cuts():
            rows = self.positions[start:stop]
            first, last = int(rows[0]), int(rows[-1])
            key_start = 0 if window is None else max(0, first - window + 1)
            key_stop = last + 1
            mask = None
            if len(rows) > 1 or self.invisible is not None:
                keys = torch.arange(key_start, key_stop)
                blocked = keys[None, :] > rows[:, None]
                if window is not None:
                    blocked |= keys[None, :] <= rows[:, None] - window
                if self.invisible is not None:
                    blocked |= self.invisible[None, key_start:key_stop]
                blocked = F.pad(blocked, (0, _more_keys(len(keys), dtype, self.device)), value=True)
                mask = torch.zeros(blocked.shape, dtype=dtype).masked_fill_(blocked, float("-inf")).to(self.device)
            yield Block(start, stop, key_start, key_stop, mask)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of selected rows. Signature of a transformers attention function, with `CausalRows` as the mask.

    Args:
        query: [1, heads, rows, head_dim], rotated.
        key, value: [1, kv_heads, keys, dim] with keys >= attention_mask.stop; keys rotated.
        sliding_window: keys a row may see, itself included; None for all.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        s_aux: [heads]; learned sinks (gpt-oss): one more logit in each head's softmax, whose weight goes nowhere.

    Returns:
        ([1, rows, heads, value_dim], None).

    Raises:
        NotImplementedError: for attention features it does not know (a bias by position).
    """
    unknown = [f"{what} ({name})" for name, what in _UNKNOWN_FEATURES.items() if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    rows = attention_mask
    if rows.windows is not None:
        rows.windows[int(module.layer_idx)] = sliding_window  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < rows.stop else None

    plain = softcap is None and s_aux is None and rows.invisible is None and rows.probe is None and window is None
    short_past = rows.start == 0 or (len(rows) >= _LARGE_TILES and 2 * rows.start <= len(rows))
    if plain and rows.is_run and len(rows) > 1 and short_past:
        # Rows of nothing in the place of a short past: with many rows they cost less than a mask for all others.
        # More of them, and keys of nothing, behind the last one, which sees none of those.
        more = _more_keys(rows.stop, query.dtype, query.device)
        whole = F.pad(query, (0, 0, rows.start, more)) if rows.start or more else query
        k, v = (_with_more(some[:, :, : rows.stop], more) for some in (key, value))
        attended = F.scaled_dot_product_attention(whole, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return attended[:, :, rows.start : rows.start + query.shape[2]].transpose(1, 2), None

    out: Tensor | None = None
    for block in rows.blocks(window, query.dtype):
        q = query[:, :, block.start : block.stop]
        k = key[:, :, block.key_start : block.key_stop]
        v = value[:, :, block.key_start : block.key_stop]
        one_row = q.shape[2] == 1 and (s_aux is not None or _explicit_is_faster(q, k, v))
        if softcap is not None or rows.probe is not None or one_row:
            attended = _explicit(q, k, v, block, scale, softcap, s_aux, rows.probe)
        else:
            attended = _fused(q, k, v, block.mask, scale, s_aux)
        if block.stop - block.start == len(rows):
            return attended.transpose(1, 2), None
        if out is None:
            out = query.new_empty((1, len(rows), query.shape[1], value.shape[-1]))
        out[:, block.start : block.stop] = attended.transpose(1, 2)
    assert out is not None
    return out, None


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    """q: [1, heads, rows, dim]; k, v: [1, kv_heads, keys, dim]; mask: [rows, keys rounded up].

    Returns [1, heads, rows, dim].
    """
    if mask is not None:
        k, v = (_with_more(some, mask.shape[-1] - some.shape[2]) for some in (k, v))
    if sinks is not None:
        # One more key and value, of zeros: its logit is what the mask adds, and its weight is of no account.
        k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
        mask = _with_sinks(q.new_zeros(()) if mask is None else mask, sinks, q.shape[2], k.shape[2])
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    # Fused CUDA kernels take a mask or grouped heads, not both: fold the group into the rows instead.
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    packed = q.reshape(1, kv_heads, groups * q.shape[2], q.shape[3])
    if mask is not None:
        mask = mask.repeat(groups, 1) if mask.ndim == 2 else mask.reshape(1, kv_heads, -1, mask.shape[-1])
    attended = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scale)
    return attended.reshape(1, q.shape[1], q.shape[2], v.shape[3])


def _more_keys(n_keys: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many keys of nothing are put behind so many."""
    return 0 if device.type != "cpu" or dtype.itemsize != 2 else -n_keys % _TILE_KEYS


def _with_more(keys: Tensor, n_more: int) -> Tensor:
    """[1, kv_heads, keys, dim] with so many of nothing behind them."""
    return F.pad(keys, (0, 0, 0, n_more)) if n_more else keys


def _with_sinks(logits: Tensor, sinks: Tensor, n_rows: int, n_keys: int) -> Tensor:
    """[1, heads, rows, keys], of which the first is each head's sink.

    logits: of the others, of a shape that can be expanded. sinks: [heads].
    """
    made = logits.new_empty((1, len(sinks), n_rows, n_keys))
    made[..., :1] = sinks.to(logits.dtype)[:, None, None]
    made[..., 1:] = logits
    return made


def _explicit_is_faster(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """For one row, the fused CPU kernel wins on some processors and loses eightfold on others: measured once."""
    if q.is_cuda:
        return False
    return _race(q.dtype, q.shape[1], k.shape[1], k.shape[3], v.shape[3])


@functools.cache
def _race(dtype: torch.dtype, heads: int, kv_heads: int, key_dim: int, value_dim: int) -> bool:
    q = torch.ones((1, heads, 1, key_dim), dtype=dtype)
    k = torch.ones((1, kv_heads, 1024, key_dim), dtype=dtype)
    v = torch.ones((1, kv_heads, 1024, value_dim), dtype=dtype)
    block = Block(0, 1, 0, 1024, None)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):
        started = time.perf_counter()
        _explicit(q, k, v, block, 1.0, None, None, None)
        between = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        seconds[0].append(between - started)
        seconds[1].append(time.perf_counter() - between)
    return min(seconds[0]) < min(seconds[1])


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    probe: AttentionProbe | None,
) -> Tensor:
    """Softmax attention spelled out, for few rows: a one-row fused kernel is slower on a CPU, and none gives weights.

    q: [1, heads, rows, head_dim]; k, v: [1, kv_heads, keys, dim]. Returns [1, heads, rows, value_dim].
    """
    _, heads, n_rows, dim = q.shape
    kv_heads, n_keys = k.shape[1], k.shape[2]
    packed = q.reshape(kv_heads, (heads // kv_heads) * n_rows, dim)
    # Of keys in the front of a longer buffer a batched product makes a far slower copy of its own.
    keys, values = k[0].contiguous(), v[0].contiguous()
    if q.dtype == torch.float16:  # which has no numbers for products as large as those of some models
        packed, keys = packed.float(), keys.float()
    logits = torch.bmm(packed, keys.transpose(1, 2)).float().mul_(scale)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if block.mask is not None:
        logits.view(kv_heads, -1, n_rows, n_keys).add_(block.mask[:, :n_keys])
    if sinks is not None:
        logits = _with_sinks(logits.view(1, heads, n_rows, n_keys), sinks, n_rows, 1 + n_keys)
        logits = logits.view(kv_heads, -1, 1 + n_keys)
    weights = torch.softmax(logits, dim=-1)[..., -n_keys:]
    if probe is not None and probe.first_row < block.stop:
        skip = max(0, probe.first_row - block.start)
        watched = weights.reshape(heads, n_rows, n_keys)[:, skip:].sum((0, 1))
        probe.mass[block.key_start : block.key_stop] += watched.to(probe.mass.device)
    return torch.bmm(weights.to(v.dtype), values).view(1, heads, n_rows, v.shape[-1])
