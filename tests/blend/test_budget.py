"""The error budget: what a ratio is chosen from, and the promise that the bound is kept. Simulated requests."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragblend import MaxKL
from ragblend.blend.budget import RATIOS, Floats, Samples, signals
from ragblend.blend.selectors import (
    HKVD,
    FirstTokens,
    QuestionAttention,
    RecomputeAll,
    RecomputeNone,
    selector_as_dict,
    selector_from_dict,
)
from ragblend.errors import InvalidSettingError, NotCalibratedError

BOUND = MaxKL(0.05)


def requests(count: int, seed: int, noise: float = 0.6) -> tuple[Floats, Floats]:
    """Signals and divergences of requests of which some are ten times as hard as others, and partly seen to be."""
    random = np.random.default_rng(seed)
    hard = random.normal(-3.2, 1.0, (count, 1)) - 3.5 * np.array(RATIOS)
    nothing = 0.1 * random.normal(size=(*hard.shape, 3))
    kl = np.exp(hard + random.normal(0, noise, (count, 1)) + random.normal(0, 0.15, hard.shape))
    return np.concatenate([hard[..., None], nothing], -1), kl


def samples(count: int, seed: int = 0, **how: float) -> Samples:
    return Samples(QuestionAttention(), RATIOS, *requests(count, seed, **how))


def state(kept: list[bool], unlike: list[bool], shallow: list[bool]) -> Any:
    plan = SimpleNamespace(unlike=torch.tensor(unlike), shallow=torch.tensor(shallow))
    return SimpleNamespace(kept=torch.tensor(kept), plan=plan)


def chosen(made: Samples, bound: MaxKL, seed: int) -> tuple[Floats, Floats]:
    """The ratios and divergences of 400 new requests."""
    budget = made.budget(bound)
    new_signals, new_kl = requests(400, seed)
    given = np.array([budget.ratio(each) for each in new_signals])
    at = np.searchsorted(np.append(RATIOS, 1.0), given)
    return given, np.column_stack([new_kl, np.zeros(400)])[np.arange(400), at]


def test_signals_are_of_what_is_left_as_it_is() -> None:
    kept, unlike, shallow = [False, *[True] * 4], [True, False, False, True, False], [True, False, True, False, True]
    scores = torch.tensor([9.0, 0.4, -1.0, 0.2, 0.1])
    got = np.exp(signals(scores, state(kept, unlike, shallow), [0.0, 0.5, 1.0]))
    assert got[:, 0] == pytest.approx([1.05, 0.55, 0.05])  # the share that is left
    assert got[:, 1] == pytest.approx([3.0, 3.0, 1.0])  # 1 + how many of it were computed near a start
    assert got[:, 2] == pytest.approx([0.2001, 0.0001, 0.0001])  # attention to what has changed its role
    assert got[:, 3] == pytest.approx([0.4 / 0.7 + 1e-4] * 3)  # the strongest twentieth


def test_signals_of_scores_that_are_no_attention_are_finite() -> None:
    for scores in (torch.full((5,), -torch.inf), torch.zeros(5)):
        assert np.isfinite(signals(scores, state([True] * 5, [False] * 5, [False] * 5), RATIOS)).all()


def test_the_bound_is_kept_as_often_as_promised_at_less_than_a_fixed_ratio() -> None:
    broken, ratios, fixed = [], [], []
    for seed in range(30):
        made = samples(60, seed)
        given, kl = chosen(made, BOUND, 1000 + seed)
        broken.append((kl > BOUND.nats).mean())
        ratios.append(given.mean())
        fixed.append(made.fixed(BOUND))
    assert np.mean(broken) <= 0.055  # a promise on average; 30 calibrations say it to half a percent
    assert np.mean(ratios) < 0.7 * np.mean(fixed)


def test_a_tighter_bound_recomputes_more_and_a_lower_risk_too() -> None:
    made = samples(120)
    means = [chosen(made, bound, 5)[0].mean() for bound in (MaxKL(0.2), BOUND, MaxKL(0.05, 0.02), MaxKL(0.005))]
    assert means == sorted(means)
    assert len(set(means)) == 4


def test_what_no_ratio_keeps_is_prefilled_in_full() -> None:
    made = samples(60)
    assert (chosen(made, MaxKL(1e-9), 5)[0] == 1.0).mean() > 0.85  # the risk allows for a few
    assert chosen(made, MaxKL(1e9), 5)[0].tolist() == [0.0] * 400


def test_signals_that_say_nothing_cost_ratio_and_not_the_promise() -> None:
    blind = samples(60, noise=3.0)
    given, kl = blind.chosen(BOUND)
    assert (kl > BOUND.nats).mean() <= 0.05
    assert given.mean() > samples(60).chosen(BOUND)[0].mean()


def test_signals_that_say_nothing_are_not_listened_to() -> None:
    noise = np.random.default_rng(1).normal(size=(60, len(RATIOS), 4))
    deaf = Samples(QuestionAttention(), RATIOS, noise, samples(60).kl)
    given, kl = deaf.chosen(BOUND)
    assert given.mean() <= deaf.fixed(BOUND) + 0.02
    assert (kl > BOUND.nats).mean() <= 0.05


def test_divergence_between_measured_ratios_is_interpolated() -> None:
    kl = np.array([[0.08, 0.04, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0]])
    made = Samples.measured(FirstTokens(), np.zeros((1, len(RATIOS), 4)), kl)
    assert [made.kl[0, RATIOS.index(ratio)] for ratio in (0.0, 0.02, 0.1, 0.4)] == pytest.approx(
        [0.08, 0.04, 0.01, 0.001]
    )
    assert made.kl[0, RATIOS.index(0.2)] == pytest.approx((0.005 * 0.002) ** 0.5)
    assert (np.diff(made.kl[0]) < 0).all()


def test_each_sampled_request_is_judged_by_the_others() -> None:
    made = samples(40)
    wild = made.kl.copy()
    wild[7] *= 1e4  # what a fit that has seen it would bend to
    assert Samples(made.selector, RATIOS, made.signals, wild)._predicted[7] == pytest.approx(made._predicted[7])


def test_too_few_requests_promise_nothing() -> None:
    with pytest.raises(NotCalibratedError, match="19 sampled"):
        samples(18).budget(BOUND)
    samples(19).budget(BOUND)
    with pytest.raises(NotCalibratedError, match="99 sampled"):
        samples(60).budget(MaxKL(0.05, risk=0.01))


def test_samples_survive_json() -> None:
    made = samples(20)
    again = Samples.from_dict(json.loads(json.dumps(made.as_dict())))
    assert again.selector == made.selector
    assert again.ratios == made.ratios
    assert (again.signals == made.signals).all()
    assert (again.kl == made.kl).all()


@pytest.mark.parametrize(
    "damage",
    [
        {"kl": [[1.0, float("nan")]]},
        {"kl": [[0.1] * 3] * 20},
        {"signals": "no"},
        {"selector": {"name": "Best"}},
        {"selector": {"name": "HKVD", "by": "x"}},
        {"ratios": None},
        {"kl": [], "signals": []},
    ],
)
def test_damaged_samples_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError):
        Samples.from_dict({**samples(20).as_dict(), **damage})
    with pytest.raises(InvalidSettingError):
        Samples.from_dict({})


@pytest.mark.parametrize(
    "selector",
    [FirstTokens(), HKVD(by="kv", layers=4), QuestionAttention((0.25, 0.5), 8), RecomputeAll(), RecomputeNone()],
)
def test_selectors_survive_json(selector: Any) -> None:
    assert selector_from_dict(json.loads(json.dumps(selector_as_dict(selector)))) == selector


def test_a_selector_of_ones_own_cannot_be_written_down() -> None:
    class Mine(FirstTokens):
        pass

    with pytest.raises(InvalidSettingError):
        selector_as_dict(Mine())


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan"), "0.1", True])
def test_bad_bounds_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSettingError):
        MaxKL(wrong)
    with pytest.raises(InvalidSettingError):
        MaxKL(0.1, risk=wrong)
