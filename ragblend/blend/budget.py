"""The error budget: how much has to be recomputed for this request, so that the answer stays as close as was asked.

What divergence to expect is predicted from what is known once the reused tokens are scored, before the first layer runs
(`signals`): how many would be left as they are, how many of those were computed where little stood before them, on how
few the question's attention hangs. Requests of the user's own corpus, answered both ways at several ratios (`Samples`),
say what divergence follows from that.

A `Budget` then takes the smallest ratio whose predicted divergence, with a margin, is within the bound, and all of them
where none is: a full prefill. The margin is not a guess. It is the smallest with which, over the sampled requests, the
bound is broken so seldom that it holds for new ones with the probability asked for: conformal risk control
(Angelopoulos et al., arXiv 2208.02814, section 2), each request predicted by a fit that has not seen it. The promise is
for requests like the sampled ones.

How much signals say differs from corpus to corpus, and where they say little, what they say costs more than it saves.
So predictions are drawn towards what all requests have in common, as far as makes the ratios of the sampled ones
smallest; at the far end every request gets the same ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ragblend.blend.prefill import Pass, Selector
from ragblend.blend.selectors import selector_as_dict, selector_from_dict
from ragblend.errors import InvalidSettingError, NotCalibratedError
from ragblend.quality import MaxKL

Floats = npt.NDArray[np.float64]

MEASURED = (0.0, 0.02, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6)
"""The ratios at which sampled requests are answered; 1 comes on top and needs no measuring."""

RATIOS = tuple(round(0.02 * n, 2) for n in range(31))
"""The ratios that are chosen from. Between the measured ones, the logarithm of the divergence is interpolated."""

_SIGNALS = 4
_RIDGE = 1.0
_TRUST = (1.0, 0.75, 0.5, 0.25, 0.0)  # of what the signals say of a request; 0: nothing
_FLOOR = 1e-5  # nats: below, divergence is rounding
_STRONGEST = 0.05  # share of the tokens
_TRACE = 1e-4  # attention: less is as good as none
_TRACE_SHARE = 0.05  # of the tokens: so many less are as good as none


def signals(scores: Tensor, state: Pass, ratios: Sequence[float]) -> Floats:
    """[ratios, signals]: what the divergence at each ratio is predicted from.

    Logarithms, as the divergence's will be: of the share of tokens that is left as it is; of how many of them were
    computed at the start of a context and stand deep in one; of the attention from the question that falls on those
    which were no repetitions and have become some, or the other way round; and of the share of its attention that the
    strongest tokens get, since an answer that hangs on a few of them suffers most.

    Args:
        scores: [tokens] fp32. What is negative counts as 0.
    """
    weight = scores.cpu()[state.kept].clamp(min=0).double().numpy()
    unlike, shallow = (mask[state.kept].numpy() for mask in (state.plan.unlike, state.plan.shallow))
    order = np.argsort(-weight, kind="stable")
    left_unlike, left_shallow = (_sums_from(values[order]) for values in (weight * unlike, shallow * 1.0))
    taken = np.rint(np.asarray(ratios) * len(weight)).astype(int)
    strongest = weight[order[: math.ceil(_STRONGEST * len(weight))]].sum() / max(weight.sum(), _TRACE)
    columns = [
        1.0 - np.asarray(ratios) + _TRACE_SHARE,
        left_shallow[taken] + 1.0,
        left_unlike[taken] + _TRACE,
        np.full(len(taken), strongest + _TRACE),
    ]
    found: Floats = np.log(np.stack(columns, 1))
    return found


def _sums_from(values: Floats) -> Floats:
    """[n + 1]: the sum of the values from each place on."""
    sums: Floats = np.append(values[::-1].cumsum()[::-1], 0.0)
    return sums


@dataclass(frozen=True, eq=False)
class Samples:
    """Requests answered both ways, at several ratios.

    selector: what scored their tokens.
    ratios: [ratios], ascending, without 1.
    signals: [requests, ratios, signals].
    kl: [requests, ratios] nats, means over an answer's first tokens.
    """

    selector: Selector
    ratios: tuple[float, ...]
    signals: Floats
    kl: Floats

    def __len__(self) -> int:
        return len(self.kl)

    @classmethod
    def measured(cls, selector: Selector, signals: Floats, kl: Floats) -> Self:
        """Of divergences at the ratios MEASURED. signals: [requests, RATIOS, signals]. kl: [requests, MEASURED]."""
        between = np.exp([np.interp(RATIOS, MEASURED, row) for row in _logs(kl)])
        return cls(selector, RATIOS, signals, between)

    def budget(self, bound: MaxKL) -> Budget:
        """What chooses a ratio for requests like these.

        Raises:
            NotCalibratedError: so few requests can't promise that, whatever the margin.
        """
        needed = math.ceil(1 / bound.risk) - 1
        if len(self) < needed:
            raise NotCalibratedError(
                f"to promise at most {bound.nats:g} nats for {1 - bound.risk:.0%} of the requests takes {needed} "
                f"sampled ones at least, and there are {len(self)}: calibrate with more questions"
            )
        trust, margin, _ = self._settled(bound)
        weights, common = _fit(self.signals, self.kl), _logs(self.kl).mean(0)
        return Budget(bound, self.ratios, weights, self._predicted.mean(0), common, trust, margin)

    def chosen(self, bound: MaxKL) -> tuple[Floats, Floats]:
        """[requests]: the ratio that each sampled request would be given by a fit that has not seen it, and its KL."""
        at = self._settled(bound)[2]
        kl = np.column_stack([self.kl, np.zeros(len(self))])
        return np.append(self.ratios, 1.0)[at], np.take_along_axis(kl, at[:, None], 1)[:, 0]

    def fixed(self, bound: MaxKL) -> float:
        """The smallest ratio that could promise the same, given to every request alike; 1 if none can."""
        risks = ((self.kl > bound.nats).sum(0) + 1) / (len(self) + 1)
        return next((r for r, risk in zip(self.ratios, risks, strict=True) if risk <= bound.risk), 1.0)

    def _settled(self, bound: MaxKL) -> tuple[float, float, npt.NDArray[np.intp]]:
        """Trust and margin with which the sampled requests get the smallest ratios; the number of each one's ratio."""
        logs, found = _logs(self.kl), []
        others = (logs.sum(0) - logs) / (len(self) - 1)
        for trust in _TRUST:
            predicted = others + trust * (self._predicted - self._predicted.mean(0))
            margin = _margin(predicted, self.kl, bound)
            found.append((trust, margin, _first_within(predicted, margin, bound)))
        return min(found, key=lambda each: float(np.append(self.ratios, 1.0)[each[2]].mean()))

    @cached_property
    def _predicted(self) -> Floats:
        """[requests, ratios] log nats, each request by a fit of the others."""
        rows = range(len(self))
        fits = [_fit(np.delete(self.signals, n, 0), np.delete(self.kl, n, 0)) for n in rows]
        return np.stack([_predict(self.signals[n], fits[n]) for n in rows])

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return {
            "selector": selector_as_dict(self.selector),
            "ratios": list(self.ratios),
            "signals": self.signals.tolist(),
            "kl": self.kl.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What as_dict gave.

        Raises:
            InvalidSettingError: it is something else.
        """
        try:
            made = cls(
                selector_from_dict(data["selector"]),
                tuple(map(float, data["ratios"])),
                np.array(data["signals"], dtype=np.float64),
                np.array(data["kl"], dtype=np.float64),
            )
            fits = made.signals.shape == (*made.kl.shape, _SIGNALS) and made.kl.shape[1:] == (len(made.ratios),)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSettingError(f"these are no samples ({error!r}): calibrate again") from error
        ascending = made.ratios == tuple(sorted(made.ratios)) and all(0.0 <= ratio < 1.0 for ratio in made.ratios)
        if not (fits and ascending and len(made) and np.isfinite(made.signals).all() and np.isfinite(made.kl).all()):
            raise InvalidSettingError("these samples are damaged or another version's: calibrate again")
        return made


@dataclass(frozen=True, eq=False)
class Budget:
    """Chooses a request's ratio, see the top of this file.

    weights: [1 + signals] of the logarithm of the divergence. mean: [ratios] what they predict on average.
    common: [ratios] what it is on average. trust: 0..1, of what is predicted for a request beside that.
    margin: added, in log nats.
    """

    bound: MaxKL
    ratios: tuple[float, ...]
    weights: Floats
    mean: Floats
    common: Floats
    trust: float
    margin: float

    def __call__(self, scores: Tensor, state: Pass) -> float:
        return self.ratio(signals(scores, state, self.ratios))

    def ratio(self, signals: Floats) -> float:
        """signals: [ratios, signals] of a request."""
        predicted = self.common + self.trust * (_predict(signals, self.weights) - self.mean)
        (at,) = _first_within(predicted[None], self.margin, self.bound)
        return float((*self.ratios, 1.0)[at])


def _logs(kl: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(kl, _FLOOR))
    return logs


def _fit(signals: Floats, kl: Floats) -> Floats:
    """[1 + signals] weights of a ridge regression of log KL. Signals are all logarithms: one penalty suits them."""
    rows = signals.reshape(-1, signals.shape[-1])
    target = _logs(kl).reshape(-1)
    means = rows.mean(0)
    centred = rows - means
    slopes = np.linalg.solve(centred.T @ centred + _RIDGE * np.eye(len(means)), centred.T @ (target - target.mean()))
    return np.append(target.mean() - means @ slopes, slopes)


def _predict(signals: Floats, weights: Floats) -> Floats:
    predicted: Floats = weights[0] + signals @ weights[1:]
    return predicted


def _first_within(predicted: Floats, margin: float, bound: MaxKL) -> npt.NDArray[np.intp]:
    """[requests]: number of the first ratio predicted to keep the bound; of the full prefill, if there is none."""
    within = math.log(bound.nats) - predicted >= margin
    always = np.ones((len(predicted), 1), dtype=np.bool_)
    first: npt.NDArray[np.intp] = np.concatenate([within, always], 1).argmax(1)
    return first


def _margin(predicted: Floats, kl: Floats, bound: MaxKL) -> float:
    """Conformal risk control: the smallest margin from which on (broken + 1) / (requests + 1) is within the risk."""
    margins = np.unique(math.log(bound.nats) - predicted)  # between two of them nobody's ratio changes
    kl = np.column_stack([kl, np.zeros(len(kl))])
    margin = math.inf
    for tried in [math.inf, *margins[::-1], -math.inf]:
        broken = np.take_along_axis(kl, _first_within(predicted, tried, bound)[:, None], 1) > bound.nats
        if (broken.sum() + 1) / (len(kl) + 1) > bound.risk:
            break
        margin = tried
    return float(margin)
