"""Spreading: what recomputed tokens show of those behind them.

A recomputed token's KV is compared with what was stored of it, and the difference, its KV deviation, is for the most
part not its own: text is read in another light here than where it was prefilled, and the next token is, too. In a small
Llama's middle layers the deviations of tokens that stand side by side correlate by 0.6 to 0.7, and by 0.4 when they are
eight tokens apart; in early layers, by half of that. So each token that is not recomputed is given the mean of what the
recomputed ones before it in its chunk deviate by, the nearest counting most, and less than all of it:

    w(gap) = exp(-gap / 16)      added = sum(w * deviation) / (sum(w) + 2)

Only what stands before: a token whose KV followed from later ones would let rows see what is to come, and exact
causality would be gone. (Taking both sides would bring KV a little closer still.)

It costs no rows, and little time: that sum is the one at the last recomputed token before, and has only faded since.
So means are taken at recomputed tokens alone, each over the last few dozen, and each other token gets its share of one.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ragblend.kv import LayerKV
from ragblend.model.decoder import Decoder, KVCache
from ragblend.model.rope import Angles, inverted

_DECAY_TOKENS = 16.0
_PRIOR = 2.0  # of tokens right before, that deviate by nothing
_FARTHEST = 64  # tokens: less than a fiftieth is left. And recomputed ones in a block: the last block has all that near


class Spread:
    """Adds to reused tokens what those before them turn out to deviate by, layer by layer.

    Args:
        chunks: (start, stop) of every reused chunk, in order.
        moved: [tokens] bool; reused tokens whose KV is no full prefill's.
        kept: [tokens] bool; those of them that are recomputed.
        positions: [rows] int64, ascending; of what is computed.
        angles: of every position, see Decoder.angles.
    """

    def __init__(
        self,
        decoder: Decoder,
        chunks: tuple[tuple[int, int], ...],
        moved: Tensor,
        kept: Tensor,
        positions: Tensor,
        angles: dict[str, Angles],
    ) -> None:
        self._decoder = decoder
        means, last, shares = _weights(chunks, moved, kept)
        given = shares.nonzero()[:, 0]
        self._idle = len(given) == 0
        if self._idle:
            return
        device, dtype = decoder.device, decoder.dtype
        span = slice(int(given[0]), int(given[-1]) + 1)  # one run, zeros and all: several times faster than picking
        rows = _in_blocks(kept[positions].nonzero()[:, 0]).flatten().to(device)
        self._span, self._rows, self._at = span, rows, positions.to(device)[rows]
        self._means, self._last = means.to(device, dtype), last[span].to(device)
        self._shares = shares[span, None].to(device, dtype)
        self._angles = {kind: (cos[:, span], sin[:, span]) for kind, (cos, sin) in angles.items()}
        self._inverse = {
            kind: cast(Angles, tuple(part.to(dtype) for part in inverted((cos[:, self._at], sin[:, self._at]))))
            for kind, (cos, sin) in angles.items()
        }

    def __call__(self, layer: int, found: LayerKV, cache: KVCache) -> None:
        """Correct a layer of `cache`, which holds what was stored.

        found: [kv_heads, rows, dim] of every row, keys rotated; not yet in the cache.
        """
        if self._idle or layer == 0:  # whose KV follows from the token alone
            return
        with self._decoder.own_dtype():
            key, value = (  # index_select: several times faster here than indexing is
                now.index_select(1, self._rows) - stored[0].index_select(1, self._at)
                for now, stored in zip(found, (cache.keys[layer], cache.values[layer]), strict=True)
            )
            key = self._decoder.rotate(layer, key, self._inverse)
            # [recomputed, kv_heads * (key_dim + value_dim)], whole blocks of them; each sees itself and the one before
            deviation = torch.cat([part.transpose(0, 1).flatten(1) for part in (key, value)], 1)
            near = F.pad(deviation, (0, 0, _FARTHEST, 0)).unfold(0, 2 * _FARTHEST, _FARTHEST)
            means = torch.matmul(self._means, near.transpose(1, 2)).flatten(0, 1)
            key, value = (
                part.unflatten(1, (len(key), -1)).transpose(0, 1).index_select(1, self._last)
                for part in means.split([key[:, 0].numel(), value[:, 0].numel()], 1)
            )
            key = self._decoder.rotate(layer, key, self._angles)
            for buffer, part in ((cache.keys[layer], key), (cache.values[layer], value)):
                buffer[0, :, self._span].addcmul_(part, self._shares)


def _in_blocks(recomputed: Tensor) -> Tensor:
    """[blocks, _FARTHEST] of [recomputed]; the first one again where the last block is not full."""
    more = -len(recomputed) % _FARTHEST
    return torch.cat([recomputed, recomputed[:1].expand(more)]).view(-1, _FARTHEST)


def _weights(chunks: tuple[tuple[int, int], ...], moved: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How deviations are averaged, and given.

    Returns:
        means: [blocks, _FARTHEST, 2 * _FARTHEST] fp32; what each recomputed token takes of those in its block and
            in the one before, for the mean there.
        last: [tokens] int64; the last recomputed one before each token.
        shares: [tokens] fp32; how much of the mean there a token is given; 0 for those that get nothing.
    """
    tokens = len(kept)
    at = kept.nonzero()[:, 0]
    if not len(at):
        nothing = torch.zeros(tokens)
        return nothing[:0], nothing.long(), nothing
    chunk = torch.full((tokens,), -1)
    for n, (start, stop) in enumerate(chunks):
        chunk[start:stop] = n
    here = _in_blocks(at)
    near = torch.cat([here.roll(1, 0), here], 1)
    number = torch.arange(here.numel()).view_as(here)
    numbers = torch.cat([number - _FARTHEST, number], 1)
    gap = here[:, :, None] - near[:, None, :]
    taken = (chunk[here][:, :, None] == chunk[near][:, None, :]) & (gap >= 0) & (gap <= _FARTHEST)
    taken &= (numbers >= 0)[:, None, :] & (numbers[:, None, :] <= number[:, :, None])
    weights = torch.where(taken, torch.exp(gap / -_DECAY_TOKENS), 0.0)
    total = weights.sum(2, keepdim=True) + _PRIOR
    before = kept.cumsum(0)
    last = (before - 1).clamp(min=0)
    gone = torch.arange(tokens) - at[last]
    fading = torch.exp(gone / -_DECAY_TOKENS)
    given = moved & ~kept & (before > 0) & (chunk == chunk[at[last]]) & (gone <= _FARTHEST)
    # There the sum was divided by total, and here, where it has faded, the prior counts for more.
    there = total.flatten()[last]
    shares = torch.where(given, fading * there / ((there - _PRIOR) * fading + _PRIOR), 0.0)
    return weights / total, last, shares
