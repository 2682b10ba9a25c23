"""Huge pages for what a model computes with, on Linux with glibc.

A pass walks through hundreds of megabytes of weights, keys and intermediate results. On pages of 4 KiB the processor
remembers the whereabouts of a few megabytes only, and looks the rest up again and again, at twice the price in a
virtual machine. And glibc hands freed buffers back to the kernel early: the next layer gets the same memory back, page
fault by page fault. With both mended, passes take about a tenth less time.

Most kernels give huge pages to those who ask. `prefer_huge_pages` asks, and has glibc keep some freed memory. It asks
for the heap, which the process's first thread allocates from: what other threads allocate stays on small pages.
RAGBLEND_HUGE_PAGES=0 leaves everything as it is.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

SWITCH = "RAGBLEND_HUGE_PAGES"

_HUGE = 2 * 1024 * 1024
# Free memory at the heap's end that stays with the process: the intermediate results of some thousand rows.
_KEPT = 256 * 1024 * 1024
_LARGEST_ON_HEAP = 32 * 1024 * 1024  # as far as glibc's own adjustment goes
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # madvise(2); the second one since Linux 6.1, older ones take their time


def prefer_huge_pages(tensors: Iterable[Tensor] = ()) -> bool:
    """Have the heap's growth in the near future on huge pages, and move these tensors there.

    To be called before a model is made ready, for its weights, and afterwards, for what will be computed with them.
    Whatever the system does not know is left out; nothing fails.

    Returns:
        Whether anything could be done.
    """
    libc = _libc()
    if libc is None or os.environ.get(SWITCH) == "0":
        return False
    _keep_freed_memory(libc)
    libc.free(libc.malloc(_LARGEST_ON_HEAP - 4096))  # the heap grows now, if it has to
    for start, stop in _heap():
        _advise(libc, start, stop, _MADV_HUGEPAGE)
    for tensor in tensors:
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if plain and tensor.nbytes > _LARGEST_ON_HEAP:
            start = tensor.data_ptr()
            _advise(libc, start, start + tensor.nbytes, _MADV_HUGEPAGE, _MADV_COLLAPSE)
    return True


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
    except OSError:
        return None
    if not all(hasattr(libc, name) for name in ("madvise", "mallopt", "malloc", "free", "gnu_get_libc_version")):
        return None
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    return libc


def _keep_freed_memory(libc: ctypes.CDLL) -> None:
    """Have freed memory kept up to a limit, and the heap grow by as much at a time: addresses, no memory yet."""
    for option, value in (
        (_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP),
        (_M_TRIM_THRESHOLD, _KEPT),
        (_M_TOP_PAD, _KEPT),
    ):
        libc.mallopt(option, value)


def _heap() -> Iterator[tuple[int, int]]:
    """(start, stop) addresses of the heap's parts."""
    try:
        with open("/proc/self/maps", "rb") as maps:  # names of files in it are any bytes
            lines = [line.split() for line in maps]
    except OSError:
        return
    for line in lines:
        if line[-1] == b"[heap]":
            start, _, stop = line[0].partition(b"-")
            yield int(start, 16), int(stop, 16)


def _advise(libc: ctypes.CDLL, start: int, stop: int, *advice: int) -> None:
    """Give the system advice on the whole huge pages between two addresses."""
    start, stop = -(-start // _HUGE) * _HUGE, stop // _HUGE * _HUGE
    if start < stop:
        for each in advice:
            libc.madvise(start, stop - start, each)
