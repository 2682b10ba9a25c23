"""A conversation's turns, in memory and in a file: one JSON object a line, appended and synced turn by turn.

A process that is killed while it writes leaves a last line that is cut off; that turn never was. Turns leave the
conversation at its beginning only, and the file is then made again aside and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ragblend.errors import InvalidSettingError, StoreError, StoreFullError

DEFAULT_MAX_TURNS = 32

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Turn:
    """What was asked, and what was answered."""

    question: str
    answer: str


class Conversation:
    """The turns of one chat. Threads may share it."""

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
        self._path = folder / f"{name}.jsonl"
        self._lock = threading.Lock()
        self._turns = self._read()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What has been said, oldest first."""
        return self._turns

    def add(self, turn: Turn, forget: Sequence[Turn] = ()) -> None:
        """Append a turn.

        Args:
            forget: the oldest turns, which go, unless they have gone already.

        Raises:
            StoreError, StoreFullError: it cannot be written; it is in memory all the same.
        """
        with self._lock, self._typed_errors("write"):
            drop = len(forget) if self._turns[: len(forget)] == tuple(forget) else 0
            self._turns = (*self._turns[drop:], turn)
            if drop:
                self._rewrite()
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(_line(turn))
                file.flush()
                os.fsync(file.fileno())

    def clear(self) -> None:
        """Forget everything that was said, on the disk, too.

        Raises:
            StoreError: the file cannot be removed.
        """
        with self._lock, self._typed_errors("remove"):
            self._turns = ()
            self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[Turn, ...]:
        with self._typed_errors("read"):
            try:
                data = self._path.read_bytes()
            except FileNotFoundError:
                return ()
            turns: list[Turn] = []
            for line in data.splitlines(keepends=True):
                try:
                    record = json.loads(line)
                    turns.append(Turn(str(record["question"]), str(record["answer"])))
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # the turns behind a damaged line are as good as ever
            self._turns = tuple(turns)
            if b"".join(map(_line, turns)) != data:
                self._rewrite()  # nothing is ever appended to a line that was cut off
            return self._turns

    def _rewrite(self) -> None:
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with aside.open("wb") as file:
                file.write(b"".join(map(_line, self._turns)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self._path)
        finally:
            aside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _typed_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFullError(f"the disk of {self._path} is full: free some space") from error
            raise StoreError(f"cannot {verb} the conversation {self._path}: {error}") from error


def _line(turn: Turn) -> bytes:
    return json.dumps(asdict(turn)).encode() + b"\n"
