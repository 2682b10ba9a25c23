"""Equalities that must hold whatever the model, the chunks and their order. fp32 on the CPU, real store and loader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, YARN, own_logits, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ragblend.blend.precompute import Precomputer
from ragblend.blend.prefill import Pass, Plan, Prefilled, Selector, full_plan, prefill
from ragblend.blend.selectors import HKVD, FirstTokens, QuestionAttention, RecomputeAll, RecomputeNone
from ragblend.model.cache import KVCache
from ragblend.model.decoder import Decoder
from ragblend.model.generate import DecodeSettings, _Lookup, decode
from ragblend.store.kvstore import KVStore
from ragblend.store.loader import LayerLoader

TOLERANCE = 1e-4
SELECTORS: list[Selector] = [
    QuestionAttention(),
    QuestionAttention(band=(0.0, 1.0)),
    HKVD(),
    HKVD(by="k", check_layer=2),
    HKVD(layers=3, slack=2.0),
    FirstTokens(),
    RecomputeAll(),
    RecomputeNone(),
]
HEAD = tuple(range(5, 14))
QUESTION = tuple(range(200, 211))


def chunk_ids(n: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(100 + n)
    return tuple(torch.randint(15, 300, (9 + 7 * n,), generator=generator).tolist())


CHUNKS = tuple(chunk_ids(n) for n in range(4))


@dataclass
class Bench:
    """A model with a store in which all CHUNKS but those in `absent` have KV."""

    decoder: Decoder
    store: KVStore
    absent: frozenset[int] = frozenset()

    def plan(self, order: Sequence[int], *, head: Sequence[int] = HEAD, glue: Sequence[int] = (7, 9)) -> Plan:
        ids, reused, settled, chunks = list(head), [False] * len(head), [False] * len(head), []
        for place, n in enumerate(order):
            if place:
                ids += glue
                reused += [False] * len(glue)
                settled += [False] * len(glue)
            hit = n not in self.absent
            if hit:
                chunks.append((len(ids), len(ids) + len(CHUNKS[n])))
            ids += CHUNKS[n]
            reused += [hit] * len(CHUNKS[n])
            settled += [hit and place == 0 and tuple(head) == HEAD] * len(CHUNKS[n])
        question = (len(ids), len(ids) + len(QUESTION))
        ids += QUESTION
        tail = [False] * len(QUESTION)
        return Plan(
            ids=torch.tensor(ids),
            known=0,
            reused=torch.tensor(reused + tail),
            settled=torch.tensor(settled + tail),
            chunks=tuple(chunks),
            question=question,
            unlike=torch.zeros(len(ids), dtype=torch.bool),
            shallow=torch.zeros(len(ids), dtype=torch.bool),
        )

    def blend(
        self, order: Sequence[int], selector: Selector, ratio: float, plan: Plan | None = None
    ) -> tuple[Prefilled, KVCache, Plan]:
        plan = plan or self.plan(order)
        opened = self.store.open_many([str(n) for n in order if n not in self.absent])
        cache = self.decoder.new_cache(len(plan.ids) + 16)
        readers = [found.reader for found in opened if found.reader is not None]
        assert len(readers) == len(opened)
        with LayerLoader(readers, device="cpu", dtype=torch.float32) as loader:
            done = prefill(self.decoder, cache, plan, loader if readers else None, selector, ratio)
        for reader in readers:
            reader.close()
        return done, cache, plan


@pytest.fixture(scope="module")
def bench(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    decoder = Decoder(tiny_model(family))
    with KVStore(tmp_path_factory.mktemp(family) / "kv") as store:
        precomputer = Precomputer(decoder, HEAD)
        for n, ids in enumerate(CHUNKS):
            store.put(str(n), precomputer.chunk_kv(ids))
        yield Bench(decoder, store)


def test_full_prefill_equals_the_stock_forward(family: str) -> None:
    decoder = Decoder(tiny_model(family))
    for tokens in (1, 2, 97, 300):
        ids = torch.randint(0, 320, (tokens,), generator=torch.Generator().manual_seed(tokens))
        done = prefill(decoder, decoder.new_cache(tokens), full_plan(ids), None, RecomputeNone(), 0.0)
        assert (done.logits - own_logits(family, ids)[-1]).abs().max() < TOLERANCE
        assert done.row_layers == tokens * decoder.n_layers


@pytest.mark.parametrize("selector", SELECTORS[:-1], ids=repr)
def test_ratio_one_equals_the_stock_forward(bench: Bench, family: str, selector: Selector) -> None:
    done, _, plan = bench.blend((2, 0, 3, 1), selector, 1.0)
    assert (done.logits - own_logits(family, plan.ids)[-1]).abs().max() < TOLERANCE
    assert torch.equal(done.recomputed | plan.settled, plan.reused)


def test_every_permutation_subset_and_repetition_agrees_at_ratio_one(bench: Bench, family: str) -> None:
    orders: list[tuple[int, ...]] = [()]
    for size in range(1, 4):
        orders += itertools.permutations(range(3), size)
    orders += [(1, 1), (0, 2, 0), (3, 3, 3, 3)]
    for order in orders:
        done, _, plan = bench.blend(order, RecomputeAll(), 1.0)
        assert (done.logits - own_logits(family, plan.ids)[-1]).abs().max() < TOLERANCE, order


@pytest.mark.parametrize("absent", [{0, 1, 2, 3}, {1}, {0, 3}], ids=str)
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_misses_run_at_every_ratio(bench: Bench, family: str, absent: set[int], selector: Selector) -> None:
    missing = Bench(bench.decoder, bench.store, frozenset(absent))
    for ratio in (0.0, 0.3, 1.0):
        done, _, plan = missing.blend((1, 3, 0, 1, 2), selector, ratio)
        assert torch.isfinite(done.logits).all()
        if len(absent) == 4 or (ratio == 1.0 and selector != RecomputeNone()):
            assert (done.logits - own_logits(family, plan.ids)[-1]).abs().max() < TOLERANCE


def test_first_chunk_behind_its_own_preamble_is_the_stock_prefix(bench: Bench, family: str) -> None:
    done, cache, plan = bench.blend((2,), RecomputeNone(), 0.0)
    expected = bench.decoder.new_cache(len(plan.ids))
    full = prefill(bench.decoder, expected, full_plan(plan.ids), None, RecomputeNone(), 0.0)
    for layer in range(bench.decoder.n_layers):
        for got, want in zip(
            cache.read(layer, slice(0, len(plan.ids))), expected.read(layer, slice(0, len(plan.ids))), strict=True
        ):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert (done.logits - full.logits).abs().max() < TOLERANCE
    assert (done.logits - own_logits(family, plan.ids)[-1]).abs().max() < TOLERANCE


def ended(plan: Plan, stop: int) -> Plan:
    """The plan of the first `stop` tokens, the last of which is a chunk's."""
    parts = {name: getattr(plan, name)[:stop] for name in ("ids", "reused", "settled", "unlike", "shallow")}
    return replace(plan, **parts, question=(stop, stop))


def test_a_prompt_may_end_in_a_chunk(bench: Bench, family: str) -> None:
    whole = bench.plan((1, 2))
    stop = whole.question[0]
    plan = ended(whole, stop)
    expected = own_logits(family, plan.ids)[-1]
    for selector in SELECTORS:
        for ratio in (0.0, 0.3, 1.0):
            done, _, _ = bench.blend((1, 2), selector, ratio, plan)
            assert torch.isfinite(done.logits).all()
            if ratio == 1.0 and selector != RecomputeNone():
                assert (done.logits - expected).abs().max() < TOLERANCE
    # A settled chunk alone: nothing but its last row is computed, and that is enough.
    stop = len(HEAD) + len(CHUNKS[2])
    whole = bench.plan((2,))
    plan = ended(whole, stop)
    done, _, _ = bench.blend((2,), RecomputeNone(), 0.0, plan)
    assert (done.logits - own_logits(family, plan.ids)[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
def test_recomputed_set_only_shrinks_and_ends_at_the_budget(
    bench: Bench, selector: Selector, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []
    run, run_last = Pass.run, Pass.run_last

    def watch(state: Pass, layer: int) -> None:
        seen.append(set(state.positions.tolist()))
        (run_last if layer == state.decoder.n_layers - 1 else run)(state, layer)

    monkeypatch.setattr(Pass, "run", watch)
    monkeypatch.setattr(Pass, "run_last", watch)
    done, _, plan = bench.blend((3, 1, 2), selector, ratio)
    assert all(later <= earlier for earlier, later in itertools.pairwise(seen))
    fresh = {i for i in range(len(plan.ids)) if not plan.reused[i]}
    assert fresh <= seen[-1]
    budget = {RecomputeAll(): 1.0, RecomputeNone(): 0.0}.get(selector, ratio) * int((plan.reused & ~plan.settled).sum())  # type: ignore[call-overload]
    assert int(done.recomputed.sum()) == round(budget)
    assert not bool((done.recomputed & plan.settled).any())


@pytest.mark.parametrize("selector", [QuestionAttention(), HKVD(), FirstTokens()], ids=repr)
def test_a_recomputed_token_never_sees_a_later_one(bench: Bench, selector: Selector) -> None:
    """Its KV in every layer, hence its output, is the same whatever comes behind it, and so is all that it sees."""

    class Fixed:
        """The same tokens in both runs: selection may look ahead, computing may not."""

        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

        def schedule(self, ratio: float) -> dict[int, float]:
            return {0: ratio}

        def scores(self, state: Pass, layer: int) -> Tensor:
            return self.rows[: len(state.plan.ids)].float()

    done, _, plan = bench.blend((0, 2, 3), selector, 0.4)
    rows = done.recomputed
    _, before, _ = bench.blend((0, 2, 3), Fixed(rows), 0.4)
    for position in (*rows.nonzero()[:, 0].tolist()[::5], len(plan.ids) - 3):
        changed = plan.ids.clone()
        changed[position + 1 :] = (changed[position + 1 :] + 31) % 300
        _, after, _ = bench.blend(
            (0, 2, 3),
            Fixed(rows),
            0.4,
            replace(plan, ids=changed),
        )
        for layer in range(bench.decoder.n_layers):
            for got, want in zip(
                after.read(layer, slice(0, position + 1)),
                before.read(layer, slice(0, position + 1)),
                strict=True,
            ):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_known_prefix_and_rest_equal_the_whole(bench: Bench, family: str) -> None:
    _, cache, plan = bench.blend((2, 0), RecomputeAll(), 1.0)
    for known in (1, 16, len(plan.ids) - 1):
        again = bench.decoder.new_cache(len(plan.ids))
        for layer in range(bench.decoder.n_layers):
            again.write(layer, slice(0, known), *cache.read(layer, slice(0, known)))
        done = prefill(bench.decoder, again, full_plan(plan.ids, known), None, RecomputeNone(), 0.0)
        assert (done.logits - own_logits(family, plan.ids)[-1]).abs().max() < TOLERANCE
        assert done.row_layers == (len(plan.ids) - known) * bench.decoder.n_layers


def test_blend_then_decode_equals_stock_decode_from_the_same_cache(bench: Bench, family: str) -> None:
    from transformers import DynamicCache

    done, cache, plan = bench.blend((1, 2, 0), QuestionAttention(), 0.2)
    model = tiny_model(family)
    stock = DynamicCache()  # full-length layers: a windowed model's own mask looks at the window only
    for layer in range(bench.decoder.n_layers):
        key, value = cache.read(layer, slice(0, len(plan.ids)))
        stock.update(key[None].clone(), value[None].clone(), layer)
    expected, logits = [], done.logits
    with torch.inference_mode():
        for position in range(len(plan.ids), len(plan.ids) + 8):
            expected.append(int(logits.argmax()))
            logits = model(
                input_ids=torch.tensor([[expected[-1]]]),
                cache=stock,
                position_ids=torch.tensor([[position]]),
            ).logits[0, -1]
    steps = decode(bench.decoder, cache, done.logits, plan.ids, DecodeSettings(max_tokens=8), (), str)
    assert [step.token_id for step in steps] == expected


@pytest.mark.parametrize(
    "settings",
    [
        DecodeSettings(30),
        DecodeSettings(30, repetition_penalty=1.3),
        DecodeSettings(30, temperature=1.2, top_p=0.9, seed=5),
        DecodeSettings(30, temperature=0.7, top_k=40, repetition_penalty=1.1, seed=6),
    ],
    ids=["greedy", "penalty", "sampled", "sampled-penalty"],
)
def test_guessing_ahead_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, settings: DecodeSettings
) -> None:
    """Whatever is guessed, right, wrong or right at first, the answer is that of one token at a time."""
    done, cache, plan = bench.blend((3, 1, 2), QuestionAttention(), 0.3)
    prompt = len(plan.ids)
    passes: list[int] = []
    embed = bench.decoder.embed

    def counted(ids: Tensor) -> Tensor:
        passes.append(len(ids))
        return embed(ids)

    monkeypatch.setattr(bench.decoder, "embed", counted)

    def answer() -> list[int]:
        roomy = bench.decoder.new_cache(prompt + 30)
        for layer in range(bench.decoder.n_layers):
            roomy.write(layer, slice(0, prompt), *cache.read(layer, slice(0, prompt)))
        passes.clear()
        return [s.token_id for s in decode(bench.decoder, roomy, done.logits, plan.ids, settings, (), str)]

    monkeypatch.setattr(_Lookup, "after", lambda self, ids: [])
    alone = answer()
    assert passes == [1] * 29

    for right, wrong in ((7, 0), (0, 7), (3, 2), (1, 1)):

        def guess(self: _Lookup, ids: Sequence[int], right: int = right, wrong: int = wrong) -> list[int]:
            at = len(ids) - prompt
            return [*alone[at : at + right], *((t + 1) % 300 for t in alone[at + right : at + right + wrong])]

        monkeypatch.setattr(_Lookup, "after", guess)
        assert answer() == alone
        assert len(passes) == -(-29 // (right + 1))


def test_lookup_finds_what_followed_the_last_tokens() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 0, 0, 0, 0, 0, 2, 3]
    lookup = _Lookup()
    assert lookup.after(ids) == [4, 5, 6, 7, 8, 9, 3]  # two tokens agree there, one at the later 3
    assert lookup.after([*ids, 11]) == []
    assert lookup.after([*ids, 11, 6]) == [7, 8, 9, 3, 0, 0, 0]  # one is better than nothing
    assert lookup.after([*ids, 11, 6, 2, 3]) == [11, 6, 2, 3, 11, 6, 2]  # the latest of equals, and on in its loop
    assert _Lookup().after([5]) == []


def test_keys_rotated_away_and_back_are_the_same(family: str) -> None:
    decoder = Decoder(tiny_model(family))
    angles = decoder.angles(200)
    shape = decoder.shapes[0]
    key = torch.randn(shape.kv_heads, 200, shape.key_dim)
    without_positions = {"smollm3": {1, 3}, "afmoe": {3}}.get(family, set())
    for layer in range(decoder.n_layers):
        there = decoder.rotate(layer, key, angles)
        assert torch.allclose(there[:, 1:], key[:, 1:]) == (layer in without_positions)
        torch.testing.assert_close(
            decoder.unrotate(layer, there, decoder.inverse_angles(0, 200)), key, atol=1e-5, rtol=1e-5
        )


def test_stored_kv_does_not_depend_on_what_was_computed_before(family: str) -> None:
    decoder = Decoder(tiny_model(family))
    one, other = Precomputer(decoder, HEAD), Precomputer(decoder, HEAD)
    first = {n: one.chunk_kv(CHUNKS[n]) for n in (0, 1, 2, 3)}
    second = {n: other.chunk_kv(CHUNKS[n]) for n in (3, 1, 0, 2)}
    for n in first:
        for a, b in zip(first[n], second[n], strict=True):
            assert torch.equal(a.key, b.key)
            assert torch.equal(a.value, b.value)


def test_fingerprint_names_config_dtype_and_weights() -> None:
    prints = {family: Decoder(tiny_model(family)).fingerprint for family in FAMILIES}
    assert len(set(prints.values())) == len(FAMILIES)
    assert Decoder(tiny_model("llama")).fingerprint == prints["llama"]
    assert Decoder(tiny_model("llama", seed=1)).fingerprint != prints["llama"]
    assert Decoder(tiny_model("llama").to(torch.bfloat16)).fingerprint != prints["llama"]
    nudged = tiny_model("llama")
    with torch.no_grad():
        nudged.model.layers[2].mlp.up_proj.weight[5, 7] *= 1.01
    assert Decoder(nudged).fingerprint != prints["llama"]


def rescaled(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.5


def with_other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.9)


def with_another_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def with_another_activation(model: Any) -> None:
    model.model.layers[2].mlp.act_fn = torch.nn.Tanh()


def with_a_config_that_came_too_late(model: Any) -> None:
    model.config.rope_parameters = dict(YARN)


@pytest.mark.parametrize(
    "change",
    [
        rescaled,
        with_other_frequencies,
        with_another_epsilon,
        with_another_activation,
        with_a_config_that_came_too_late,
    ],
)
def test_fingerprint_names_what_modules_hold_beside_their_weights(change: Callable[[Any], None]) -> None:
    changed = tiny_model("llama")
    change(changed)
    others = {Decoder(tiny_model(family)).fingerprint for family in ("llama", "llama-yarn")}
    assert Decoder(changed).fingerprint not in others


def test_fingerprint_tells_a_converted_model_from_one_that_was_loaded_so(tmp_path: Path) -> None:
    """Converting a model rounds its frequencies, too, and a few hundred tokens on keys point somewhere else."""
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16) for _ in range(2)]
    loaded[1].train()
    loaded[1](input_ids=torch.arange(30)[None])
    converted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(torch.bfloat16)
    prints = [Decoder(model).fingerprint for model in (*loaded, converted)]
    assert prints[0] == prints[1] != prints[2]


def test_fingerprint_of_a_model_with_hooks_on_its_layers_is_like_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """As where its activations are steered: what a function does has no digest."""
    plain, steered = tiny_model("llama"), tiny_model("llama")
    plain(input_ids=torch.arange(9)[None], output_hidden_states=True)  # transformers' own hooks, which stay
    known = {Decoder(tiny_model("llama")).fingerprint}
    assert Decoder(plain).fingerprint in known
    assert not caplog.text
    direction = torch.randn(64)

    def steer(_: Any, __: Any, hidden: Tensor) -> Tensor:
        return hidden + direction

    hook = steered.model.layers[1].register_forward_hook(steer)
    prints = {Decoder(steered).fingerprint for _ in range(2)}
    assert len(prints | known) == 3
    assert "steer" in caplog.text
    hook.remove()
    assert Decoder(steered).fingerprint in known


def test_fingerprint_names_which_weights_are_shared() -> None:
    prints = set()
    for second in (0, 1):
        model: Any = tiny_model("llama")
        for layer in (2, 3, 4):
            model.model.layers[layer].load_state_dict(model.model.layers[second].state_dict(), assign=True)
        prints.add(Decoder(model).fingerprint)
    assert len(prints) == 2
