"""Work that can wait: done by one thread, when nothing has been computed for a moment."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

from ragblend.errors import RagBlendError

_log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # how long closing waits for what is waiting
_IDLE_S = 0.05  # how long nothing may have been computed before work takes a turn

Job = Callable[[], None]

_workers: weakref.WeakSet[IdleWorker] = weakref.WeakSet()


class IdleWorker:
    """Does jobs one after another, off the critical path. What fails is logged, and nobody is told.

    Its thread knows this object and the jobs, not their owner, which can be collected without closing anything.

    room: jobs that may wait; more are refused.
    """

    def __init__(self, room: int) -> None:
        self._busy_s = 0.0
        self._room = room
        self._closed = False
        self._until = 0.0
        self._begin()
        _workers.add(self)

    def _begin(self) -> None:
        self._jobs: queue.Queue[tuple[str, Job] | None] = queue.Queue()  # has no bound: the end mark fits
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, name: str, job: Job) -> bool:
        """Whether it was taken. name: what did not work, if it does not."""
        with self._lock:  # nothing is put behind the end mark that `stop` puts
            if self._closed or self._jobs.qsize() >= self._room:
                return False
            self._jobs.put((name, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ragblend-idle", daemon=True)
                self._thread.start()
            return True

    def busy(self) -> None:
        """Something has been computed just now."""
        self._busy_s = time.perf_counter()

    @property
    def closing(self) -> bool:
        """Whether there is no use any more in what would be in RAM only."""
        return self._closed

    @property
    def overdue(self) -> bool:
        """Whether closing has taken as long as it may."""
        return self._closed and time.perf_counter() >= self._until

    def wait_for_idle(self) -> None:
        """Come back when nothing has been computed for a moment, or the worker is being closed."""
        while not self._closed and time.perf_counter() - self._busy_s < _IDLE_S:
            time.sleep(_IDLE_S)

    def drain(self) -> None:
        """Wait until every job so far is done. A job that asks for it does not wait for itself."""
        if threading.current_thread() is not self._thread:
            self._jobs.join()

    def stop(self) -> None:
        """Take no more jobs, and have what is waiting done, for a few seconds at most. Does not wait for it."""
        with self._lock:
            if not self._closed:
                self._until = time.perf_counter() + _PATIENCE_S
                self._closed = True
                if self._thread is not None:
                    self._jobs.put(None)

    def close(self) -> None:
        """`stop`, and wait for it. Closing twice is fine."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            self._do(*entry)
            del entry  # nothing of a job is held while there is none
            self._jobs.task_done()
        self._jobs.task_done()

    def _do(self, name: str, job: Job) -> None:
        try:
            self.wait_for_idle()
            if not self.overdue:
                job()
        except RagBlendError as error:
            _log.warning("%s: %s", name, error)
        except BaseException:  # whatever a caller's function does, the next job is done
            _log.exception("%s", name)


def _begin_anew() -> None:
    """In a forked process: threads are not forked, and what was waiting is the parent's to do."""
    for worker in _workers:
        worker._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
