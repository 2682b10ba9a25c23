"""The loading controller and the prefix cache on their own."""

from __future__ import annotations

import random

import pytest
import torch

from ragblend.blend.controller import LoadingController
from ragblend.blend.prefix import BLOCK_TOKENS, PrefixCache
from ragblend.blend.selectors import HKVD, QuestionAttention
from ragblend.errors import InvalidSettingError
from ragblend.kv import LayerShape
from ragblend.model.cache import KVCache


def test_controller_recomputes_what_hides_behind_loading() -> None:
    controller = LoadingController(floor=0.15)
    asked = {"reused_tokens": 1000, "reused_bytes": 1_000_000, "fresh_tokens": 100, "n_layers": 10}
    assert controller.ratio(**asked) == 0.15  # nothing measured yet
    # 1 ms a row-layer and 1 us a byte: 1 s of loading hides 100 rows over 10 layers, which the fresh ones fill.
    controller.observe(bytes_read=1_000_000, load_s=1.0, row_layers=1000, compute_s=1.0)
    assert controller.ratio(**asked) == 0.15
    for _ in range(60):  # a store ten times slower: 1000 rows hide, 900 beside the fresh ones
        controller.observe(bytes_read=1_000_000, load_s=10.0, row_layers=1000, compute_s=1.0)
    assert controller.ratio(**asked) == pytest.approx(0.9, abs=0.01)
    for _ in range(60):
        controller.observe(bytes_read=1_000_000, load_s=100.0, row_layers=1000, compute_s=1.0)
    assert controller.ratio(**asked) == 1.0
    assert controller.ratio(**{**asked, "reused_tokens": 0}) == 0.15


SHAPES = [LayerShape(2, 4, 6), LayerShape(1, 8, 8)]


def filled(ids: torch.Tensor, salt: float) -> KVCache:
    """A cache whose values say which prefix they belong to."""
    cache = KVCache(SHAPES, len(ids) + 3, torch.float32, torch.device("cpu"))
    running = torch.cumsum(ids.float() * torch.arange(1, len(ids) + 1), 0) + salt
    for layer, shape in enumerate(SHAPES):
        mark = running[None, :, None] * (layer + 1)
        cache.write(
            layer,
            slice(0, len(ids)),
            mark.expand(shape.kv_heads, -1, shape.key_dim),
            -mark.expand(shape.kv_heads, -1, shape.value_dim),
        )
    return cache


def agrees(cache: KVCache, expected: KVCache, tokens: int, start: int = 0) -> bool:
    at = slice(start, tokens)
    return all(
        torch.equal(got, want)
        for layer in range(len(SHAPES))
        for got, want in zip(cache.read(layer, at), expected.read(layer, at), strict=True)
    )


@pytest.mark.parametrize("seed", range(5))
def test_prefix_cache_gives_back_what_was_kept_or_nothing(seed: int) -> None:
    generator = random.Random(seed)
    blocks = [torch.tensor([generator.randrange(50) for _ in range(BLOCK_TOKENS)]) for _ in range(3)]
    cache = PrefixCache(limit_bytes=40_000)
    kept: dict[bytes, list[torch.Tensor]] = {b"exact": [], b"whole": []}
    for _ in range(150):
        ids = torch.cat([generator.choice(blocks) for _ in range(generator.randrange(1, 6))])
        ids = torch.cat([ids, torch.tensor([1] * generator.randrange(BLOCK_TOKENS), dtype=torch.int64)])
        room = KVCache(SHAPES, len(ids), torch.float32, torch.device("cpu"))
        exact = cache.fetch(b"exact", ids, room)
        assert exact % BLOCK_TOKENS == 0
        assert agrees(room, filled(ids, 0.0), exact)
        known = max((_shared(ids, other) for other in kept[b"exact"]), default=0)
        assert exact <= known // BLOCK_TOKENS * BLOCK_TOKENS
        whole = cache.fetch_whole(b"whole", ids, room, longer_than=exact)
        if whole:
            assert whole > exact
            assert agrees(room, filled(ids, 0.0), exact), "what is exact stays"
            assert agrees(room, filled(ids, 0.5), whole, start=exact)
            assert any(
                len(o) // BLOCK_TOKENS * BLOCK_TOKENS == whole == _shared(ids, o[:whole]) for o in kept[b"whole"]
            )
        if generator.random() < 0.5:
            cache.keep(b"exact", ids, filled(ids, 0.0))
            kept[b"exact"].append(ids)
        else:
            end = generator.randrange(len(ids))
            cache.keep_whole(b"whole", ids, filled(ids, 0.5), end)
            kept[b"whole"] += [ids, ids[:end]]
        assert cache.n_bytes <= 40_000
    cache.clear()
    assert cache.n_bytes == 0
    assert cache.fetch(b"exact", ids, room) == 0


def test_a_conversation_is_held_once_and_found_from_every_turn() -> None:
    cache = PrefixCache(limit_bytes=10**9)
    turns = torch.arange(8 * BLOCK_TOKENS)
    for stop in (2, 4, 6):
        ids = turns[: stop * BLOCK_TOKENS]
        cache.keep_whole(b"whole", ids, filled(ids, 0.5), (stop - 1) * BLOCK_TOKENS)
        held = cache.n_bytes
    with_one = PrefixCache(limit_bytes=10**9)
    with_one.keep_whole(b"whole", ids, filled(ids, 0.5))
    assert held == with_one.n_bytes
    room = KVCache(SHAPES, len(turns), torch.float32, torch.device("cpu"))
    for blocks in range(1, 7):
        again = torch.cat([turns[: blocks * BLOCK_TOKENS], torch.tensor([7] * 40)])
        assert cache.fetch_whole(b"whole", again, room, longer_than=0) == blocks * BLOCK_TOKENS
        assert agrees(room, filled(again, 0.5), blocks * BLOCK_TOKENS)
    # Another way on from the first turn is held beside the rest.
    other = torch.cat([turns[: 2 * BLOCK_TOKENS], torch.tensor([9] * BLOCK_TOKENS)])
    cache.keep_whole(b"whole", other, filled(other, 0.5))
    for ids in (other, turns[: 6 * BLOCK_TOKENS]):
        assert cache.fetch_whole(b"whole", ids, room, longer_than=0) == len(ids)


def test_what_others_go_on_from_is_forgotten_last() -> None:
    """Or what is left of a conversation is never found again, and keeps it from being held anew."""
    one = torch.arange(8 * BLOCK_TOKENS)
    held = PrefixCache(limit_bytes=10**9)
    held.keep(b"", one, filled(one, 0.0))
    cache = PrefixCache(limit_bytes=10 * held.n_bytes // 8)
    room = KVCache(SHAPES, 32 * BLOCK_TOKENS, torch.float32, torch.device("cpu"))

    def ask(ids: torch.Tensor) -> int:
        known = cache.fetch(b"", ids, room)
        cache.keep(b"", ids, filled(ids, 0.0))
        return known // BLOCK_TOKENS

    for blocks in (4, 6, 8):  # 4, and 2, and 2
        ask(one[: blocks * BLOCK_TOKENS])
    assert ask(torch.arange(1000, 1000 + 4 * BLOCK_TOKENS)) == 0  # takes the place of the last 2
    assert [ask(one), ask(one)] == [6, 8]
    # Of one that outgrows the cache, what there is room for is kept.
    ids = torch.arange(2000, 2000 + 32 * BLOCK_TOKENS)
    assert [ask(ids[: blocks * BLOCK_TOKENS]) for blocks in (6, 9, 14, 20, 32)] == [0, 6, 9, 10, 10]


def test_a_conversation_that_outgrows_the_cache_is_found_up_to_there() -> None:
    turns = torch.arange(8 * BLOCK_TOKENS)
    room = KVCache(SHAPES, len(turns), torch.float32, torch.device("cpu"))
    cache = PrefixCache(limit_bytes=10**9)
    cache.keep_whole(b"", turns[: 5 * BLOCK_TOKENS], filled(turns[: 5 * BLOCK_TOKENS], 0.5))
    cache = PrefixCache(limit_bytes=cache.n_bytes)
    for stop in (4, 8):
        ids = turns[: stop * BLOCK_TOKENS]
        cache.keep_whole(b"", ids, filled(ids, 0.5))
        assert cache.fetch_whole(b"", ids, room, longer_than=0) == 4 * BLOCK_TOKENS


def test_what_is_longer_than_the_limit_is_held_from_its_beginning_on() -> None:
    tokens = torch.arange(12 * BLOCK_TOKENS)
    one = PrefixCache(limit_bytes=10**9)
    one.keep(b"exact", tokens[:BLOCK_TOKENS], filled(tokens[:BLOCK_TOKENS], 0.0))
    cache = PrefixCache(limit_bytes=4 * one.n_bytes)
    room = KVCache(SHAPES, len(tokens), torch.float32, torch.device("cpu"))
    for blocks in (2, 3, 5, 6, 12):
        ids = tokens[: blocks * BLOCK_TOKENS]
        cache.keep(b"exact", ids, filled(ids, 0.0))
        assert cache.fetch(b"exact", ids, room) == min(blocks, 4) * BLOCK_TOKENS
    # Another prompt drives out the end before what the end is found behind.
    other = torch.full((BLOCK_TOKENS,), 9)
    cache.keep(b"exact", other, filled(other, 0.0))
    assert cache.fetch(b"exact", tokens, room) == 3 * BLOCK_TOKENS
    cache.keep(b"exact", tokens, filled(tokens, 0.0))
    assert cache.fetch(b"exact", tokens, room) == 4 * BLOCK_TOKENS
    assert cache.fetch(b"exact", other, room) == 0


def _shared(a: torch.Tensor, b: torch.Tensor) -> int:
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0]) if len(different) else n


def test_selector_parameters_are_checked() -> None:
    for bad in ({"by": "x"}, {"check_layer": 0}, {"layers": 0}, {"slack": 0.5}):
        with pytest.raises(InvalidSettingError):
            HKVD(**bad)  # type: ignore[arg-type]
    for bad in ({"band": (0.5, 0.5)}, {"band": (-0.1, 0.5)}, {"question_tokens": 0}):
        with pytest.raises(InvalidSettingError):
            QuestionAttention(**bad)  # type: ignore[arg-type]


def test_gradual_filtering_ends_at_the_ratio() -> None:
    shares = list(HKVD(layers=4, slack=2.0).schedule(0.15).values())
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.3)
    assert shares[-1] == pytest.approx(0.15)
    assert HKVD().schedule(0.15) == {1: 0.15}
