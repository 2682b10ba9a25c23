"""Spreading by its formula, token by token. What it must not do is in tests/test_laws.py."""

from __future__ import annotations

import math

import pytest
import torch

from ragblend.blend.spread import _FARTHEST, _in_blocks, _weights


@pytest.mark.parametrize("share", [0.02, 0.15, 0.6])
@pytest.mark.parametrize("lengths", [(30, 200), (1, 2, 3, 500, 64), (2500,)], ids=str)
def test_weights_are_the_formulas(lengths: tuple[int, ...], share: float) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    chunks, stop = [], 5
    for length in lengths:
        chunks.append((stop, stop + length))
        stop += length + 3
    moved = torch.zeros(stop, dtype=torch.bool)
    for start, end in chunks:
        moved[start:end] = True
    moved[chunks[-1][0] : chunks[-1][0] + 10] = False  # settled
    kept = moved & (torch.rand(stop, generator=generator) < share)
    means, last, shares = _weights(tuple(chunks), moved, kept)
    recomputed = kept.nonzero()[:, 0].tolist()
    deviation = torch.randn(stop, 2, generator=generator)
    expected = torch.zeros(stop, 2)
    for start, end in chunks:
        for token in range(start, end):
            before = [other for other in recomputed if start <= other < token]
            if not before or not moved[token] or kept[token] or token - before[-1] > _FARTHEST:
                continue
            before = [other for other in before if before[-1] - other <= _FARTHEST]
            weights = [math.exp((other - token) / 16) for other in before]
            total = sum(w * deviation[other] for w, other in zip(weights, before, strict=True))
            expected[token] = total / (sum(weights) + 2.0)
    if not recomputed:
        assert not shares.any()
        return
    blocks = deviation[_in_blocks(kept.nonzero()[:, 0])]
    near = torch.cat([torch.cat([torch.zeros(1, *blocks.shape[1:]), blocks[:-1]]), blocks], 1)
    given = torch.matmul(means, near).flatten(0, 1)[last] * shares[:, None]
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)
    assert bool((means.sum(2) * shares.max() < 1.0).all())  # never more than a mean


def test_weights_take_memory_in_proportion_to_the_tokens() -> None:
    tokens = 100_000
    moved = torch.ones(tokens, dtype=torch.bool)
    kept = torch.zeros(tokens, dtype=torch.bool)
    kept[::2] = True
    means, last, shares = _weights(((0, tokens),), moved, kept)
    assert means.numel() == (50_000 + 48) * 2 * _FARTHEST
    assert bool(torch.isfinite(means).all())
    assert bool(torch.isfinite(shares).all())
    assert len(last) == len(shares) == tokens
