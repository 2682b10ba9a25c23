"""What makes a folder a store: its marker, its size limit, and the lock for files on their way in or out.

The marker says the format, the size limit that the store was last opened with, and its epoch. The lock is held shared
while a payload file is there that no row knows: its row is not committed yet, or is gone already.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ragblend.errors import StoreError, StoreFormatError
from ragblend.store import FORMAT_VERSION

if sys.platform != "win32":
    import fcntl

DEFAULT_SIZE_LIMIT_BYTES = 20 << 30
"""20 GiB: about 3,000 chunks of 300 tokens of a 135M model (23 kB a token), or 500 of an 8B model (131 kB a token).
Enough for a personal document folder, and an amount few machines miss. Never more than half of what is free."""

MARKER = "ragblend.json"
_LOCK = "ragblend.lock"
_IGNORED = re.compile(r"\.ragblend\.json\..*|lost\+found|\.DS_Store")


class Marker(NamedTuple):
    """What the marker says; size_limit_bytes None and epoch "" where it does not, or is missing."""

    size_limit_bytes: int | None
    epoch: str


def claim(directory: Path, create: bool) -> Marker:
    """Make sure the folder is a store of our format, or may become one. What its marker says, as far as it does.

    Raises:
        StoreError: there is no store, and create is False.
        StoreFormatError: it holds something else, or a store of another format version.
    """
    if not directory.exists() and not create:
        raise StoreError(f"there is no store in {directory}: check the path, or ingest some documents first")
    if directory.exists() and not directory.is_dir():
        raise StoreFormatError(f"{directory} is a file: choose a folder for the store")
    if create:
        directory.mkdir(parents=True, exist_ok=True)
    marker = directory / MARKER
    names = [name for name in os.listdir(directory) if not _IGNORED.fullmatch(name)]
    if not marker.exists():
        if names and not marker.exists():  # asked twice: another process may be making this very store
            raise StoreFormatError(
                f"{directory} is not empty and not a ragblend store (no {MARKER}): choose another folder"
            )
        if not create:
            raise StoreError(f"there is no store in {directory}: check the path, or ingest some documents first")
        return Marker(None, "")
    try:
        note = json.loads(marker.read_bytes())
        version, limit, epoch = note["format"], note.get("size_limit_bytes"), note.get("epoch")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreFormatError(f"{marker} is not readable: choose another folder, or delete this one") from None
    if version != FORMAT_VERSION:
        raise StoreFormatError(
            f"the store in {directory} has format {version!r:.20}, this version of ragblend uses {FORMAT_VERSION}: "
            "choose another folder, or delete this one and ingest again"
        )
    return Marker(limit if type(limit) is int and limit > 0 else None, epoch if isinstance(epoch, str) else "")


def write_marker(directory: Path, size_limit_bytes: int, epoch: str) -> None:
    note = {"format": FORMAT_VERSION, "size_limit_bytes": size_limit_bytes, "epoch": epoch}
    write_whole(directory / MARKER, json.dumps(note).encode() + b"\n")


def default_limit_bytes(directory: Path) -> int:
    """Of a new store: DEFAULT_SIZE_LIMIT_BYTES, or half of what is free on its disk."""
    return max(1, min(DEFAULT_SIZE_LIMIT_BYTES, shutil.disk_usage(directory).free // 2))


@contextlib.contextmanager
def changing_files(directory: Path) -> Iterator[None]:
    """Held while files come and go, one before its row and one after it, so that nobody takes them for orphans.

    The system releases the lock when the process dies, however it dies.
    """
    if sys.platform == "win32":
        yield
        return
    with open(directory / _LOCK, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def files_settled(directory: Path, *, patience_s: float, read_only: bool = False) -> Iterator[bool]:
    """True while no file is being added or removed anywhere; False where that could not be had within patience_s."""
    if sys.platform == "win32":
        yield False
        return
    deadline = time.monotonic() + patience_s
    with open(directory / _LOCK, "rb" if read_only else "ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.005)
        yield True


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: aside first, then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
