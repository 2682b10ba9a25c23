"""How close two answers are, and how sure a number is.

Answers are compared as the SQuAD evaluation does (arXiv 1606.05250; unanswerable questions as in arXiv 1806.03822), and
by ROUGE-L (Lin 2004). Intervals are 95 % percentile bootstraps (Efron 1979), the same for the same values.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ragblend.errors import InvalidSettingError, MissingDependencyError

Statistic = Literal["mean", "median", "p95"]

_STATISTICS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda values: float(values.mean()),
    "median": lambda values: float(np.median(values)),
    "p95": lambda values: float(np.percentile(values, 95)),
}
_CONFIDENCE = 0.95
_RESAMPLES = 1000
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORDS = re.compile(r"[^\W_]+")


def normalise(text: str) -> str:
    """Lower case, without punctuation and English articles, single spaces.

    Punctuation is ASCII's, as in SQuAD, and beyond it all that Unicode calls so: curly quotes, dashes.
    """
    kept = "".join(c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    return " ".join(_ARTICLES.sub(" ", kept).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1.0 if the answer is one of the golds after normalisation, else 0.0. An unanswerable question's gold is "".

    Raises:
        InvalidSettingError: no golds.
    """
    given = normalise(answer)
    return _best(golds, lambda gold: float(given == normalise(gold)))


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """F1 of the words that answer and gold share after normalisation, for the gold that suits best.

    Where either has no words left, 1.0 if neither has, else 0.0.

    Raises:
        InvalidSettingError: no golds.
    """
    given = normalise(answer).split()
    return _best(golds, lambda gold: _f1(given, normalise(gold).split()))


def rouge_l(answer: str, golds: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words, for the gold that suits best; 1.0 if neither has words.

    No stemming. Words are those of the rouge-score package for ASCII; unlike there, letters of other alphabets count.

    Raises:
        InvalidSettingError: no golds.
        MissingDependencyError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError(
            f"ROUGE-L needs the rouge-score package ({error}): run `pip install 'ragblend[bench]'`"
        ) from error
    words = _Words()
    scorer = RougeScorer(["rougeL"], tokenizer=words)

    def score(gold: str) -> float:
        if not words.tokenize(gold) and not words.tokenize(answer):
            return 1.0
        return float(scorer.score(gold, answer)["rougeL"].fmeasure)

    return _best(golds, score)


class _Words:
    """rouge-score's idea of a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        return _WORDS.findall(text.lower())


def _best(golds: Sequence[str], score: Callable[[str], float]) -> float:
    if isinstance(golds, str) or not golds:
        raise InvalidSettingError(
            f"a sequence of at least one right answer is needed, got {golds!r}; an unanswerable question's is ['']"
        )
    return max(score(gold) for gold in golds)


def _f1(given: list[str], gold: list[str]) -> float:
    if not given or not gold:
        return float(given == gold)
    shared = (Counter(given) & Counter(gold)).total()
    return 2 * shared / (len(given) + len(gold))


class Interval(NamedTuple):
    """A confidence interval, ends included."""

    low: float
    high: float


def estimate(values: Sequence[float], statistic: Statistic = "mean") -> float:
    """The statistic of the sample itself; p95 interpolates between neighbours.

    Raises:
        InvalidSettingError: no values, a value that is not finite, an unknown statistic.
    """
    return _statistic(statistic)(_sample(values))


def bootstrap_interval(values: Sequence[float], statistic: Statistic = "mean") -> Interval:
    """Bootstrap of a statistic. Of a single value, that value twice.

    Raises:
        InvalidSettingError: as `estimate`.
    """
    compute, sample = _statistic(statistic), _sample(values)
    return _percentiles([compute(sample[rows]) for rows in _resamples(len(sample))])


def paired_ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Bootstrap of mean(ours) / mean(theirs), where ours[i] and theirs[i] belong together.

    Pairs are drawn as pairs, so what makes both large (a hard question, a busy machine) does not widen the interval.
    Where a resample's denominator is 0, the ratio is inf with the numerator's sign, or 1 if that is 0, too: no
    difference. An end of the interval may then be infinite.

    Raises:
        InvalidSettingError: as `bootstrap_interval`; the samples differ in length.
    """
    above, below = _sample(ours), _sample(theirs)
    if len(above) != len(below):
        raise InvalidSettingError(f"paired samples are of one length: got {len(above)} and {len(below)} values")
    draws = _resamples(len(above))
    return _percentiles([_ratio(float(above[rows].mean()), float(below[rows].mean())) for rows in draws])


def _ratio(above: float, below: float) -> float:
    if below:
        return above / below
    return float(np.copysign(np.inf, above)) if above else 1.0


def _statistic(name: str) -> Callable[[np.ndarray], float]:
    if name not in _STATISTICS:
        raise InvalidSettingError(f"statistic is one of {', '.join(_STATISTICS)}: got {name!r}")
    return _STATISTICS[name]


def _sample(values: Sequence[float]) -> np.ndarray:
    try:
        sample = np.asarray(values, np.float64)
    except (TypeError, ValueError):  # text, or lists of several lengths
        sample = np.empty(0)
    if sample.ndim != 1 or not sample.size or not np.isfinite(sample).all():
        raise InvalidSettingError("a statistic is of at least one value, all of them finite, in one list: check yours")
    return sample


def _resamples(size: int) -> Iterator[np.ndarray]:
    """Draws of `size` row numbers, with replacement."""
    generator = np.random.default_rng(0)
    return (generator.integers(size, size=size) for _ in range(_RESAMPLES))


def _percentiles(resampled: list[float]) -> Interval:
    tail = (1.0 - _CONFIDENCE) / 2
    # Ends that are values, rounded outwards: between two infinities nothing can be interpolated.
    low = np.quantile(resampled, tail, method="lower")
    high = np.quantile(resampled, 1.0 - tail, method="higher")
    return Interval(float(low), float(high))
