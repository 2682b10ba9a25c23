"""Scores against values worked out by hand, and intervals against what is known of their statistics."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from ragblend.errors import InvalidSettingError, MissingDependencyError
from ragblend.evaluation.metrics import (
    Interval,
    Statistic,
    bootstrap_interval,
    estimate,
    exact_match,
    normalise,
    paired_ratio_interval,
    rouge_l,
    token_f1,
)

Score = Callable[[str, Sequence[str]], float]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Old\tHarbour\nBridge.", "old harbour bridge"),
        ("an apple, a pear & the rest", "apple pear rest"),
        ("Theatre of Athens", "theatre of athens"),
        ("O'Brien-Smith", "obriensmith"),
        ("“Zürich” \N{EN DASH} 1914\N{EN DASH}1918…", "zürich 19141918"),
        ("the.", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_exact_match_is_of_any_gold_after_normalisation() -> None:
    assert exact_match("The Old Bridge.", ["a tunnel", "old bridge"]) == 1.0
    assert exact_match("in the old bridge", ["old bridge"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("the old harbour bridge", ["harbour bridge"], 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("bridge bridge bridge", ["the bridge"], 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # a word counts as often as in both
        ("harbour", ["bridge", "the harbour"], 1.0),
        ("bridge harbour", ["harbour bridge"], 1.0),  # order is not asked for
        ("tunnel", ["bridge"], 0.0),
    ],
)
def test_token_f1(answer: str, golds: list[str], expected: float) -> None:
    assert token_f1(answer, golds) == pytest.approx(expected)


def test_rouge_l_counts_the_longest_common_subsequence() -> None:
    # Common subsequence "old bridge": precision 2/3, recall 2/4.
    assert rouge_l("bridge old bridge", ["old harbour bridge here"]) == pytest.approx(4 / 7)
    assert rouge_l("bridge harbour", ["harbour bridge"]) == pytest.approx(0.5)
    assert rouge_l("harbour bridge", ["tunnel", "harbour bridge"]) == 1.0


@pytest.mark.parametrize("answer", ["It's the Old-Harbour bridge_2, (1931).", "no word in common", "the Harbour"])
def test_rouge_l_is_the_packages_own_for_ascii(answer: str) -> None:
    gold = "It is the old harbour bridge 2 of 1931; the bridge's lamps are old."
    assert rouge_l(answer, [gold]) == RougeScorer(["rougeL"]).score(gold, answer)["rougeL"].fmeasure


def test_rouge_l_reads_other_alphabets() -> None:
    assert rouge_l("Старый мост", ["старый мост"]) == 1.0
    assert rouge_l("Старый мост", ["новый мост"]) == 0.5


@pytest.mark.parametrize("score", [exact_match, token_f1, rouge_l])
@pytest.mark.parametrize(
    ("answer", "gold", "expected"), [("", "", 1.0), ("...", "", 1.0), ("x", "", 0.0), ("", "x", 0.0)]
)
def test_unanswerable_questions(score: Score, answer: str, gold: str, expected: float) -> None:
    assert score(answer, [gold]) == expected


@pytest.mark.parametrize("score", [exact_match, token_f1, rouge_l])
@pytest.mark.parametrize("golds", [[], (), "a string is no list of answers"])
def test_without_golds_there_is_no_score(score: Score, golds: Sequence[str]) -> None:
    with pytest.raises(InvalidSettingError, match="at least one right answer"):
        score("answer", golds)


def test_without_rouge_score_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ragblend\[bench\]'"):
        rouge_l("answer", ["gold"])
    assert token_f1("answer", ["answer"]) == 1.0


SAMPLE = np.random.default_rng(7).normal(10.0, 2.0, size=400)


@pytest.mark.parametrize(("statistic", "expected"), [("mean", 4.0), ("median", 3.0), ("p95", 8.8)])
def test_estimates(statistic: Statistic, expected: float) -> None:
    assert estimate([1.0, 2.0, 3.0, 4.0, 10.0][::-1], statistic) == pytest.approx(expected)


def test_the_interval_of_a_mean_is_what_theory_says() -> None:
    low, high = bootstrap_interval(SAMPLE.tolist())
    error = 1.96 * SAMPLE.std() / math.sqrt(len(SAMPLE))
    assert low == pytest.approx(SAMPLE.mean() - error, abs=0.2 * error)
    assert high == pytest.approx(SAMPLE.mean() + error, abs=0.2 * error)


@pytest.mark.parametrize("statistic", ["mean", "median", "p95"])
def test_intervals_hold_the_estimate_and_are_the_same_each_time(statistic: Statistic) -> None:
    interval = bootstrap_interval(SAMPLE.tolist(), statistic)
    assert interval.low < estimate(SAMPLE.tolist(), statistic) < interval.high
    assert interval == bootstrap_interval(SAMPLE.tolist(), statistic)


@pytest.mark.parametrize("statistic", ["mean", "median", "p95"])
def test_of_one_value_the_interval_is_that_value(statistic: Statistic) -> None:
    assert bootstrap_interval([4.5], statistic) == Interval(4.5, 4.5)
    assert paired_ratio_interval([3.0], [2.0]) == Interval(1.5, 1.5)


def test_pairs_are_drawn_as_pairs() -> None:
    # A constant ratio over values that differ a hundredfold: only a draw that breaks pairs could widen it.
    theirs = [0.1, 1.0, 10.0, 3.0, 0.5]
    assert paired_ratio_interval([2 * x for x in theirs], theirs) == pytest.approx((2.0, 2.0))


def test_the_ratio_is_of_ours_over_theirs() -> None:
    low, high = paired_ratio_interval([2.0, 1.0, 3.0, 2.0], [8.0, 8.0, 8.0, 8.0])
    assert 0.125 <= low < 0.25 < high <= 0.375


def test_a_zero_denominator_makes_the_ratio_infinite() -> None:
    assert paired_ratio_interval([1.0, 2.0], [0.0, 0.0]) == Interval(math.inf, math.inf)
    assert paired_ratio_interval([-1.0], [0.0]) == Interval(-math.inf, -math.inf)
    assert paired_ratio_interval([0.0, 0.0], [0.0, 0.0]) == Interval(1.0, 1.0)
    low, high = paired_ratio_interval([1.0, 1.0], [1.0, 0.0])
    assert (low, high) == (1.0, math.inf)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf], [[1.0, 2.0]], ["many"], [[1.0], [2.0, 3.0]]])
def test_bad_samples_are_refused(values: list[float]) -> None:
    for refused in (estimate, bootstrap_interval):
        with pytest.raises(InvalidSettingError, match="at least one value"):
            refused(values)
    with pytest.raises(InvalidSettingError, match="at least one value"):
        paired_ratio_interval([1.0], values)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InvalidSettingError, match="mean, median, p95"):
        bootstrap_interval([1.0], "mode")  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="one length"):
        paired_ratio_interval([1.0, 2.0], [1.0])
