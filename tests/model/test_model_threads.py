"""Threads that take turns to compute leave no OpenMP teams behind, which would slow down everybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ragblend.model.threads import Turn

# Two threads compute in turn and stay. Printed: the threads that the process then has beyond these two.
PROGRAM = """
import contextlib, os, sys, threading
import torch
from ragblend.model.threads import Turn, disband

def compute():
    with turn:
        torch.ones(1_000_000).exp_()

def count():
    return len(os.listdir("/proc/self/task"))

turn = Turn() if sys.argv[1] == "turn" else contextlib.nullcontext()
compute()
disband()
before = count()
computed, ended = threading.Barrier(3), threading.Event()
def work():
    for _ in range(3):
        compute()
    computed.wait()
    ended.wait()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
computed.wait()
print(count() - before - len(threads))
ended.set()
"""


def left_behind(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted as Linux shows them")
def test_a_turn_ends_with_its_team() -> None:
    if left_behind("without") == 0:
        pytest.skip("this PyTorch keeps no teams of threads")
    assert left_behind("turn") == 0


def test_one_computes_at_a_time_and_an_error_ends_the_turn() -> None:
    turn = Turn()
    inside: list[int] = []
    most: list[int] = []

    def take() -> None:
        for _ in range(50):
            with turn:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(KeyError), turn:
        raise KeyError
    for thread in threads:
        thread.join()
    with turn:
        assert max(most) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_process_has_the_turn_that_a_thread_of_its_parent_had() -> None:
    """As where an audit computes in the background while a server forks its workers."""
    turn, taken, ended = Turn(), threading.Event(), threading.Event()

    def compute() -> None:
        with turn:
            taken.set()
            ended.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    taken.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # ends a child that waits
        with turn:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert turn._lock.locked(), "the parent's is as it was"
    ended.set()
    thread.join()
    assert status == 0
