"""What the disk and SQLite report, told apart: no room, damage, a lock that is held, and everything else."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import sys
from pathlib import Path

from ragblend.errors import StoreError, StoreFormatError, StoreFullError
from ragblend.store.table import LockedError, sqlite_code

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: BaseException) -> bool:
    """Whether there was no room: on the disk, in a quota, or for so large a file."""
    return sqlite_code(error) == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in _NO_ROOM)


def is_damaged(error: BaseException) -> bool:
    """Whether SQLite found a file that is no database, or is not what it wrote."""
    return sqlite_code(error) in _DAMAGED


def store_error(error: BaseException, verb: str, directory: Path) -> StoreError:
    """What to say where the KV store in `directory` fails. verb: what was being done to it."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    codes = {sqlite_code(link) for link in chain}
    # Without room for its log, SQLite cannot even open a database, and says "disk I/O error".
    no_log = codes & {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN} and _free_bytes(directory) < 1 << 20
    if no_log or any(map(is_full, chain)):
        return StoreFullError(
            f"the disk of the store in {directory} is full ({error}): free some space, or give the store a smaller "
            "size_limit_bytes; what was stored before is intact"
        )
    if any(map(is_damaged, chain)):
        return StoreFormatError(
            f"the index of the store in {directory} is damaged ({error}): delete the folders kv and texts in it and "
            "ingest again"
        )
    if isinstance(error, LockedError) or codes & {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return StoreError(
            f"the store in {directory} stayed locked by another process: look for one that hangs, and try again"
        )
    return StoreError(
        f"cannot {verb} the store in {directory} ({error}): check that the folder exists and that you may write to it"
    )


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return sys.maxsize
