"""A prefill that takes its time."""

from __future__ import annotations

import threading
import time
from typing import Any

from ragblend import RagBlend
from ragblend.blend.prefill import Prefilled, prefill


class UntilClosed:
    """Stands in the place of `prefill` in an engine: each call ends only when the engine is being closed.

    begun: set by the first call. calls: how many there were.
    """

    def __init__(self, engine: RagBlend) -> None:
        self._engine, self.begun, self.calls = engine, threading.Event(), 0

    def __call__(self, *args: Any) -> Prefilled:
        self.calls += 1
        self.begun.set()
        while not self._engine.closed:
            time.sleep(0.01)
        return prefill(*args)
