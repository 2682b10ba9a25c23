"""A conversation's turns, in memory and in a file: one JSON object a line, appended and synced turn by turn.

Several processes may keep one conversation: whoever appends or rewrites is alone in the folder, and reads what the
others wrote before. A process that is killed while it writes leaves a last line that is cut off; that turn never was.
Turns leave the conversation at its beginning only, and the file is then made again aside and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ragblend.errors import InvalidSettingError, StoreError, StoreFullError
from ragblend.store.failures import is_full

DEFAULT_MAX_TURNS = 32

_LOCK = "sessions.lock"  # SQLite's lock, as an ingest's is: one that every system has
_PATIENCE_S = 60.0
_ASIDE = ".rewritten"  # one for all conversations of a folder: a process that is killed leaves one at most
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Turn:
    """What was asked, and what was answered."""

    question: str
    answer: str


class _State(NamedTuple):
    """By which a file is known to be as it was."""

    inode: int
    size: int
    changed_ns: int


class Conversation:
    """The turns of one chat. Threads may share it, and other processes may have one on the same file."""

    def __init__(self, folder: Path, name: str) -> None:
        """Load the conversation of this name, or begin one; nothing is written before its first turn.

        Raises:
            InvalidSettingError: the name is no plain word, which could mean another file.
            StoreError: the file cannot be read.
        """
        if not isinstance(name, str) or not _ID.fullmatch(name):
            raise InvalidSettingError(
                f"a session's id is 1 to 128 letters, digits, '.', '_' and '-', and begins with a letter or a digit; "
                f"got {name!r}"
            )
        self._path, self._aside = folder / _file_name(name), folder / _ASIDE
        self._lock = threading.Lock()
        self._stored: tuple[Turn, ...] = ()
        self._unwritten: tuple[Turn, ...] = ()  # where writing failed
        self._seen: _State | None = None  # of the file when it held what is stored; None: there was none
        with self._typed_errors("read"):
            if folder.exists():
                with self._alone():
                    self._aside.unlink(missing_ok=True)
                    self._catch_up()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What has been said, oldest first, whoever wrote it down.

        Raises:
            StoreError: the file was changed and cannot be read.
        """
        with self._lock, self._typed_errors("read"):
            if self._state() != self._seen:
                with self._alone():
                    self._catch_up()
            return (*self._stored, *self._unwritten)

    def add(self, turn: Turn, forget: Sequence[Turn] = ()) -> None:
        """Append a turn.

        Args:
            forget: the oldest turns, which go, unless they have gone already.

        Raises:
            StoreError, StoreFullError: it cannot be written; it is in memory all the same, and is written with the
                next one.
        """
        with self._lock, self._typed_errors("write"):
            self._unwritten = (*self._unwritten, turn)
            with self._alone():
                self._catch_up()
                turns = (*self._stored, *self._unwritten)
                drop = len(forget) if turns[: len(forget)] == tuple(forget) else 0
                if drop:
                    self._rewrite(turns[drop:])
                else:
                    self._append(self._unwritten)
                self._stored, self._unwritten, self._seen = turns[drop:], (), self._state()

    def clear(self) -> None:
        """Forget everything that was said, on the disk, too.

        Raises:
            StoreError: the file cannot be removed; nothing is forgotten then.
        """
        with self._lock, self._typed_errors("remove"), self._alone():
            self._path.unlink(missing_ok=True)
            self._stored, self._unwritten, self._seen = (), (), None

    def _state(self) -> _State | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return _State(found.st_ino, found.st_size, found.st_mtime_ns)

    def _catch_up(self) -> None:
        """Read the file, and mend it: nothing is ever appended to a line that was cut off. For who is alone."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        turns: list[Turn] = []
        for line in data.splitlines(keepends=True):
            try:
                record = json.loads(line)
                turns.append(Turn(str(record["question"]), str(record["answer"])))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # the turns behind a damaged line are as good as ever
        self._stored = tuple(turns)
        if _lines(turns) != data:
            self._rewrite(turns)
        self._seen = self._state()

    def _append(self, turns: Sequence[Turn]) -> None:
        try:
            _write(self._path, "ab", turns)
        except BaseException:
            with contextlib.suppress(OSError):  # they are written again, and must not be there twice
                os.truncate(self._path, self._seen.size if self._seen else 0)
            raise

    def _rewrite(self, turns: Sequence[Turn]) -> None:
        try:
            _write(self._aside, "wb", turns)
            os.replace(self._aside, self._path)
        finally:
            self._aside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else reads or writes a conversation of this folder meanwhile.

        The system releases the lock when the process dies, however it dies.
        """
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(folder / _LOCK, timeout=_PATIENCE_S, isolation_level=None)) as lock:
            lock.execute("PRAGMA journal_mode = OFF")  # nothing is ever written
            lock.execute("BEGIN EXCLUSIVE")
            yield

    @contextlib.contextmanager
    def _typed_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_full(error):
                raise StoreFullError(f"the disk of {self._path} is full: free some space") from error
            raise StoreError(f"cannot {verb} the conversation {self._path}: {error}") from error
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot {verb} the conversation {self._path}, since {_LOCK} beside it cannot be locked ({error}): "
                "see whether another process hangs, and whether the folder can be written"
            ) from error


def _write(path: Path, mode: str, turns: Sequence[Turn]) -> None:
    with path.open(mode) as file:
        file.write(_lines(turns))
        file.flush()
        os.fsync(file.fileno())


def _lines(turns: Sequence[Turn]) -> bytes:
    return b"".join(json.dumps(asdict(turn)).encode() + b"\n" for turn in turns)


def _file_name(name: str) -> str:
    """Of a conversation's file. "Bob" and "bob" are two, also where the file system takes them for one."""
    digest = "" if name == name.lower() else "~" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{name}{digest}.jsonl"
