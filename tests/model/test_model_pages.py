"""Huge pages: asked for where the system has them, nothing anywhere else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ragblend.model import pages

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_GROW = """
import os, torch
from ragblend.model.pages import prefer_huge_pages

def huge_kib():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

before = huge_kib()
assert prefer_huge_pages() is (os.environ.get("RAGBLEND_HUGE_PAGES") != "0")
kept = [torch.ones(300_000) for _ in range(40)]  # 48 MB on the heap, 1.2 MB each
print(huge_kib() - before)
"""


def _grown_kib(**environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _GROW],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not _THP.exists() or "[madvise]" not in _THP.read_text(), reason="no huge pages for those who ask")
def test_the_heap_grows_on_huge_pages_unless_switched_off() -> None:
    assert _grown_kib() >= 32 * 1024
    assert _grown_kib(**{pages.SWITCH: "0"}) == 0


def test_what_the_system_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_libc", lambda: None)
    assert not pages.prefer_huge_pages([torch.ones(3)])


def test_a_tensor_on_huge_pages_keeps_its_values() -> None:
    weights = torch.arange(12_000_000, dtype=torch.float32)
    pages.prefer_huge_pages([weights, weights[5:]])
    pages.prefer_huge_pages([weights, weights.view(3000, 4000).to_sparse(), torch.empty(12_000_000, device="meta")])
    torch.testing.assert_close(weights, torch.arange(12_000_000, dtype=torch.float32), rtol=0, atol=0)
