"""Auditing: some of the answers given are held against a full prefill afterwards, and a guard acts on what is found.

Blending is an approximation, and how good it is depends on documents, questions and model: what was measured once may
not hold any more. So a share of live requests is prefilled in full when there is nothing else to do. The divergence of
the KV that really was decoded from is noted, whether the answer was the same, and whether stored KV is what this model
makes of the chunk. Where the divergence is above the bound beyond chance the guard raises the recompute ratio, and if
that does not help, it falls back to full prefills. It does not step back by itself: what it met is for people to look
at.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ragblend.errors import InvalidSettingError
from ragblend.kv import ChunkKV
from ragblend.quality import QUALITIES

_log = logging.getLogger(__name__)

COMPARED_TOKENS = 16
"""Length of the part of an answer that is compared."""

CHECKED_LAYERS = 4
"""Stored KV is compared at the first layers: rounding grows with depth, and these say enough."""

FOREIGN = 1.5e-4
"""Squared deviation of stored KV from the recomputed one, relative to it, from which on it is another model's or was
computed behind something else. On SmolLM2, bfloat16 against float32 is 0.5e-4, weights off by 1 % give 3.6e-4, and
another wording of the preamble 5.6e-4."""

_RAISED = 0.3  # the guard's first step, and at least twice what was given before
_LEAST = 5  # audits before a mean says anything
_SURE = 1.645  # standard errors: one-sided 95 %
_FOREIGN_LEAST = 2  # chunks; one may be an accident on the disk


@dataclass(frozen=True)
class Audit:
    """How answers are audited.

    share: of the answers that reused KV; 1 audits each one for which there is time. One waits at a time, with its KV.
    max_kl: nats. The mean divergence that is tolerated.
    window: over so many audits.
    on_result: called with each result, by the thread that audits; for metrics.

    Raises:
        InvalidSettingError: a value out of range.
    """

    share: float = 0.01
    max_kl: float = QUALITIES["fast"]
    window: int = 50
    on_result: Callable[[Audited], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.share, (int, float)) or not 0.0 < self.share <= 1.0:
            raise InvalidSettingError(f"the audited share is above 0 and at most 1; got {self.share!r}")
        if not isinstance(self.max_kl, (int, float)) or not 0.0 < self.max_kl < math.inf:
            raise InvalidSettingError(f"the tolerated divergence is a number of nats above 0; got {self.max_kl!r}")
        if not isinstance(self.window, int) or self.window < _LEAST:
            raise InvalidSettingError(f"the window holds {_LEAST} audits at least; got {self.window!r}")
        if self.on_result is not None and not callable(self.on_result):
            raise InvalidSettingError(f"on_result is a function of one result; got {self.on_result!r}")


@dataclass(frozen=True)
class Audited:
    """What one audit found.

    kl, kl_first: nats; mean over the first tokens of the full prefill's own answer, and of the first one.
    agreement: share of these tokens at which both would choose the same.
    same_answer: whether the answer given begins as the full prefill's does; None if it was sampled.
    ratio: with which it was given.
    foreign: keys of stored KV that is not what this model makes of the chunk; deleted since.
    """

    kl: float
    kl_first: float
    agreement: float
    same_answer: bool | None
    ratio: float
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class AuditLog:
    """What the audits found so far.

    audited: answers, in all. kl, agreement: means over the window; None before the first.
    disagreed: share of the window's unsampled answers that were others than the full prefill's; None without any.
    foreign: payloads found to be another model's, in all.
    least_ratio: what the guard has raised the recompute ratio to; 0 as long as it has not stepped in, 1 full prefills.
    reason: why it has, in words.
    """

    audited: int = 0
    kl: float | None = None
    agreement: float | None = None
    disagreed: float | None = None
    foreign: int = 0
    least_ratio: float = 0.0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON and metrics."""
        return asdict(self)


class Guard:
    """Chooses what is audited, takes in results, and steps in. Thread-safe."""

    def __init__(self, settings: Audit) -> None:
        self.settings = settings
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._window: deque[Audited] = deque(maxlen=settings.window)
        self._audited = self._foreign = 0
        self._waiting = False
        self.least_ratio = 0.0
        self._reason = ""

    def picks(self) -> bool:
        """Whether the answer that has just been given is audited. Until `done`, no other one is."""
        with self._lock:
            if self._waiting or self._random.random() >= self.settings.share:
                return False
            self._waiting = True
            return True

    def done(self) -> None:
        """The audit is over, whatever came of it."""
        with self._lock:
            self._waiting = False

    def note(self, result: Audited) -> None:
        """Take in a result."""
        with self._lock:
            self._audited += 1
            self._foreign += bool(result.foreign)  # one chunk, in however many variants
            self._window.append(result)
            if self._foreign >= _FOREIGN_LEAST and self.least_ratio < 1.0:
                self._step_in(
                    1.0, f"{self._foreign} stored chunks are not what this model makes of them: ingest into a new store"
                )
            elif (mean := self._surely_above()) is not None:
                given = max(each.ratio for each in self._window)
                raised = max(_RAISED, 2 * given)
                self._step_in(
                    raised if self.least_ratio == 0.0 and raised < 1.0 else 1.0,
                    f"answers were {mean:.3g} nats from full prefills' on average, and {self.settings.max_kl:g} are "
                    "tolerated",
                )
        if self.settings.on_result is not None:
            self.settings.on_result(result)

    def _surely_above(self) -> float | None:
        """The window's mean divergence, if it is above the bound beyond chance."""
        if len(self._window) < _LEAST or self.least_ratio == 1.0:
            return None
        values = [each.kl for each in self._window]
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        return mean if mean - _SURE * spread / math.sqrt(len(values)) > self.settings.max_kl else None

    def _step_in(self, least_ratio: float, reason: str) -> None:
        self.least_ratio, self._reason = least_ratio, reason
        self._window.clear()  # what follows is judged by itself
        what = "prompts are prefilled in full" if least_ratio == 1.0 else f"the recompute ratio is {least_ratio:g}"
        _log.warning("from now on %s, at least: %s", what, reason)

    def log(self) -> AuditLog:
        """What was found so far."""
        with self._lock:
            window = list(self._window)
            unsampled = [not each.same_answer for each in window if each.same_answer is not None]
            return AuditLog(
                audited=self._audited,
                kl=_mean([each.kl for each in window]),
                agreement=_mean([each.agreement for each in window]),
                disagreed=_mean(unsampled),
                foreign=self._foreign,
                least_ratio=self.least_ratio,
                reason=self._reason,
            )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def deviation(stored: ChunkKV, recomputed: ChunkKV) -> float:
    """Squared distance of stored keys and values from the recomputed ones, relative to these, over all layers.

    The larger one of both: values are small, and would be lost beside the keys.
    """

    def relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
        apart = sum(float((found.float() - wanted.float()).square().sum()) for found, wanted in pairs)
        return apart / max(sum(float(wanted.float().square().sum()) for _, wanted in pairs), 1e-30)

    layers = list(zip(stored, recomputed, strict=True))
    return max(
        relative([(found.key, wanted.key) for found, wanted in layers]),
        relative([(found.value, wanted.value) for found, wanted in layers]),
    )
