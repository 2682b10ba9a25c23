"""Threads take turns to compute, and leave nothing behind.

Every thread that computes gets a team of OpenMP threads, which outlives the work. GNU's OpenMP counts the teams of all
threads together; once they are more than the processors, whoever waits within a team goes to sleep at once, and each of
the hundred small operations of a layer pays for waking it up. A few turns in another thread (a web server's, an event
loop's worker, our own that works in idle time) make everything that follows half again as slow, for good.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable

from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

_SOFT = 1  # omp_pause_soft: what was set stays


class Turn:
    """A lock for whoever computes. Where several threads take turns, each one's team ends with its turn."""

    def __init__(self) -> None:
        self._begin()
        _turns.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._last: int | None = None
        self._shared = False

    def __enter__(self) -> None:
        self._lock.acquire()
        me = threading.get_ident()
        self._shared |= self._last not in (None, me)
        self._last = me

    def __exit__(self, *_: object) -> None:
        try:
            if self._shared:
                disband()
        finally:
            self._lock.release()


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked process: whoever had the turn is not there, and what was half computed is nobody's."""
    for turn in _turns:
        turn._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def disband() -> None:
    """End the calling thread's team. The next operation makes another one, in a tenth of a millisecond."""
    for pause in _pauses():
        pause(_SOFT)


@functools.cache
def _pauses() -> tuple[Callable[[int], int], ...]:
    """Other makers' OpenMP does not count, and lacks nothing."""
    found = ThreadpoolController().select(internal_api="openmp").lib_controllers
    return tuple(
        each.dynlib.omp_pause_resource_all
        for each in found
        if each.prefix == "libgomp" and hasattr(each.dynlib, "omp_pause_resource_all")
    )
