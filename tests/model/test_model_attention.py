"""Block attention of selected rows equals dense masked attention, whatever the rows, window, softcap and sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ragblend.model.attention import AttentionProbe, CausalRows, attend


class Layer(torch.nn.Module):
    layer_idx = 0


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: CausalRows,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: every logit, one mask, softmax. Returns (output, weights [heads, rows, keys])."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    keys = torch.arange(k.shape[2])
    seen = keys[None] <= rows.positions[:, None]
    if window is not None:
        seen &= keys[None] > rows.positions[:, None] - window
    if rows.invisible is not None:
        seen &= ~rows.invisible[None, : k.shape[2]]
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(1, -1, logits.shape[2], 1)], dim=-1)
    weights = logits.softmax(-1)[..., : len(keys)]
    return (weights @ v).transpose(1, 2), weights[0]


ROWS = {
    "all": list(range(200)),
    "one": [137],
    "first": [0],
    "suffix": list(range(60, 200)),
    "scattered": [0, 1, 5, *range(30, 50), 77, 90, *range(120, 130), 199],
    "every third": list(range(2, 200, 3)),
    "a block and one": [*range(0, 128, 2), 199],
    "head and question": [*range(30), *range(1900, 1920)],
    "all but a head": list(range(30, 830)),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 16, 500])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_equals_dense_attention(
    name: str, window: int | None, softcap: float | None, hide: bool, probe: bool, sink: bool
) -> None:
    generator = torch.Generator().manual_seed(len(name))
    q = torch.randn(1, 6, len(ROWS[name]), 16, generator=generator)
    keys = max(200, *ROWS[name]) + 10
    k, v = (torch.randn(1, 2, keys, 16, generator=generator) for _ in range(2))
    positions = torch.tensor(ROWS[name])
    invisible = None
    if hide:
        invisible = torch.zeros(keys, dtype=torch.bool)
        invisible[[3, 40, 41, 42]] = True
        invisible[positions] = False  # a row always sees itself
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0, 4.0, -torch.inf]) if sink else None
    mass = torch.zeros(keys)
    first_row = len(positions) // 2
    rows = CausalRows(positions, torch.device("cpu"), invisible, AttentionProbe(first_row, mass) if probe else None)
    expected, weights = dense(q, k, v, rows, window, softcap, sinks)
    for _ in range(2):  # the second time the kept masks are used
        mass.zero_()
        got, _ = attend(Layer(), q, k, v, rows, sliding_window=window, softcap=softcap, s_aux=sinks)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        if probe:
            torch.testing.assert_close(mass, weights[:, first_row:].sum((0, 1)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("sink", [False, True])
def test_half_width_numbers_meet_few_shapes(
    name: str, window: int | None, sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has a kernel written for each number of keys in the last tile, and each thread keeps all of them."""
    generator = torch.Generator().manual_seed(len(name))
    positions = torch.tensor(ROWS[name])
    q = torch.randn(1, 6, len(positions), 16, generator=generator).bfloat16()
    k, v = (torch.randn(1, 2, int(positions[-1]) + 1, 16, generator=generator).bfloat16() for _ in range(2))
    rows = CausalRows(positions, torch.device("cpu"))
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0, 4.0, -torch.inf]) if sink else None
    fused, keys = torch.nn.functional.scaled_dot_product_attention, set()

    def noted(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape[2] > 1:
            keys.add(key.shape[2])
        return fused(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    got, _ = attend(Layer(), q, k, v, rows, sliding_window=window, s_aux=sinks)
    expected, _ = dense(q.float(), k.float(), v.float(), rows, window, sinks=sinks)
    torch.testing.assert_close(got.float(), expected, atol=0.03, rtol=0.03)
    assert {n % 64 for n in keys} <= {1 if sink else 0}


def test_products_too_large_for_half_precision() -> None:
    """Biases of queries and keys, as Qwen2 has them, make products that fp16 has no number for."""
    generator = torch.Generator().manual_seed(0)
    bias = 40 * torch.randn(128, generator=generator)
    q, k = ((bias + torch.randn(1, n, 64, 128, generator=generator)).half() for n in (6, 2))
    v = torch.randn(1, 2, 64, 128, generator=generator).half()
    rows = CausalRows(torch.arange(64), torch.device("cpu"), probe=AttentionProbe(0, torch.zeros(64)))
    assert (q[:, :2] @ k.transpose(2, 3)).isinf().any()
    expected, weights = dense(q.float(), k.float(), v.float(), rows)
    torch.testing.assert_close(attend(Layer(), q, k, v, rows)[0].float(), expected, atol=0.02, rtol=0.02)
    assert rows.probe is not None
    torch.testing.assert_close(rows.probe.mass, weights.sum((0, 1)), atol=0.5, rtol=0.02)


def test_a_block_never_looks_past_its_last_row() -> None:
    rows = CausalRows(torch.arange(0, 1000, 3), torch.device("cpu"))
    blocks = list(rows.blocks(None, torch.float32))
    assert [b.start for b in blocks[1:]] == [b.stop for b in blocks[:-1]]
    assert (blocks[0].start, blocks[-1].stop) == (0, len(rows))
    for block in blocks:
        assert block.key_stop == int(rows.positions[block.stop - 1]) + 1
        assert block.mask is not None
        assert block.mask.shape == (block.stop - block.start, block.key_stop - block.key_start)


def test_rows_far_apart_do_not_share_a_block() -> None:
    """A prompt's head, computed with its question, need not look at what is between them."""
    rows = CausalRows(torch.tensor([*range(30), *range(1900, 1920)]), torch.device("cpu"))
    blocks = list(rows.blocks(None, torch.float32))
    assert [(b.start, b.stop, b.key_stop) for b in blocks] == [(0, 30, 30), (30, 50, 1920)]


def test_unknown_attention_features_are_not_ignored() -> None:
    rows = CausalRows(torch.tensor([0]), torch.device("cpu"))
    one = torch.zeros(1, 1, 1, 4)
    with pytest.raises(NotImplementedError, match="position_bias"):
        attend(Layer(), one, one, one, rows, position_bias=torch.zeros(1))
