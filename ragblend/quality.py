"""How close to a full prefill an answer has to be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ragblend.errors import InvalidSettingError

QUALITIES: Mapping[str, float] = {"strict": 0.01, "balanced": 0.03, "fast": 0.1}
"""Nats of divergence that each quality level allows, see MaxKL."""

CALIBRATION = "calibration_"
"""How the names of those of a store's documents begin that say what calibration found."""

RISK = 0.05
"""Share of requests that may break the bound."""


@dataclass(frozen=True)
class MaxKL:
    """A recompute ratio chosen for each request, so that its divergence stays within `nats`.

    nats: mean KL(full prefill || blend) over the first tokens of the answer.
    risk: share of requests that may break it.

    Raises:
        InvalidSettingError: a value out of range.
    """

    nats: float
    risk: float = RISK

    def __post_init__(self) -> None:
        if isinstance(self.nats, bool) or not isinstance(self.nats, (int, float)) or not 0.0 < self.nats < math.inf:
            raise InvalidSettingError(f"the largest KL divergence is a number of nats above 0; got {self.nats!r}")
        if isinstance(self.risk, bool) or not isinstance(self.risk, (int, float)) or not 0.0 < self.risk < 1.0:
            raise InvalidSettingError(f"the risk is a share between 0 and 1; got {self.risk!r}")
