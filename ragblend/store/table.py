"""diskcache made into the tables that a store needs: nothing is pickled, and errors can be told apart.

diskcache is used for its index in SQLite, its transactions and its LRU order. Unpickling a cache folder that somebody
else could write to runs their code, so whatever would have to be pickled is refused, in both directions. A payload's
row has its file's name and, in the place of a value, a note; a text record's row is its key, bytes that are inserted
without asking `Disk`.

The only file that imports diskcache.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import diskcache  # type: ignore[import-untyped]

from ragblend.errors import StoreError

PAYLOAD_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")

# SQLite itself waits this long for another process's transaction. Ours take microseconds, so that only a stopped
# process or a very slow disk gets that far; readers then go on without updating the LRU order, writers try again.
_BUSY_TIMEOUT_S = 2.0
_GIVE_UP_S = 60.0

LockedError = diskcache.Timeout
"""Another connection held its transaction for longer than the busy timeout."""


class PayloadFile(NamedTuple):
    """A payload file that is already written, and the note that its row carries."""

    name: str
    size_bytes: int
    note: bytes


class UnusableRowError(StoreError):
    """A row that is not one of ours, or whose file is gone."""


class Disk(diskcache.Disk):  # type: ignore[misc]
    """Keys are str, values are files already written. Everything else is refused, in both directions."""

    def __init__(self, directory: str, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self._postponed = threading.local()

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise StoreError(f"refusing a key of type {type(key).__name__}: it would have to be pickled; use a str")
        return key, True

    def get(self, key: Any, raw: bool) -> Any:
        if not raw:
            raise UnusableRowError("refusing to unpickle a stored key")
        return super().get(key, raw)

    def store(self, value: object, read: bool, key: object = diskcache.UNKNOWN) -> tuple[int, int, str, bytes]:
        if not isinstance(value, PayloadFile):
            raise StoreError(f"refusing a value of type {type(value).__name__}: it would have to be pickled")
        return value.size_bytes, diskcache.core.MODE_BINARY, value.name, value.note

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> str:
        """The payload file's path; opening it is left to the caller, who then is sure to close it."""
        # The name is checked, so that a planted row cannot make us open anything outside the folder.
        if mode != diskcache.core.MODE_BINARY or not (isinstance(filename, str) and PAYLOAD_FILE.fullmatch(filename)):
            raise UnusableRowError("the row does not point at a payload file; refusing to unpickle")
        return os.path.join(self._directory, filename)

    def remove(self, file_path: object) -> None:
        if not (isinstance(file_path, str) and PAYLOAD_FILE.fullmatch(file_path)):
            return  # nor delete
        if (postponed := getattr(self._postponed, "names", None)) is not None:
            postponed.append(file_path)
            return
        with contextlib.suppress(OSError):
            os.remove(os.path.join(self._directory, file_path))

    @contextlib.contextmanager
    def removing_afterwards(self) -> Iterator[None]:
        """Hold removals by this thread back until the block has ended well; forget them if it raises.

        In a transaction that spans several calls diskcache would remove files before the COMMIT, and a COMMIT that
        fails would leave rows whose files are gone.
        """
        names: list[str] = []
        self._postponed.names = names
        try:
            yield
        finally:
            self._postponed.names = None
        for name in names:
            self.remove(name)


class _Closing:
    """Closes a connection when the thread ends that it belongs to: only that thread's locals hold this.

    A connection and its cache of statements hold each other. Just dropped, it waits for the garbage collector with its
    files open, and where each request has a thread of its own there are soon more of those than a process may have.
    """

    def __init__(self, con: sqlite3.Connection) -> None:
        self.con, self._pid = con, os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a forked process leaves its parent's alone
            with contextlib.suppress(sqlite3.Error):  # of a table that another thread lets go of
                self.con.close()


class Table(diskcache.Cache):  # type: ignore[misc]
    """diskcache's Cache with exact eviction and with errors told apart.

    It reaches for diskcache's protected `_sql`, `_con` and `_cull`: the public interface has no query, and its
    eviction removes ten rows at a time, which empties a small store.
    """

    payload_limit_bytes: int | None = None

    def __init__(self, directory: Path, *, policy: str) -> None:
        super().__init__(
            str(directory),
            timeout=_BUSY_TIMEOUT_S,
            disk=Disk,
            statistics=1,
            tag_index=0,
            eviction_policy=policy,
            size_limit=sys.maxsize,
            disk_min_file_size=0,
            sqlite_cache_size=1024,
        )

    @property
    def _con(self) -> sqlite3.Connection:
        con: sqlite3.Connection = super()._con
        if getattr(self._local, "closing", None) is None or self._local.closing.con is not con:
            self._local.closing = _Closing(con)
        return con

    @contextlib.contextmanager
    def writing(self, *, give_up_s: float | None = None) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """A write transaction, waited for at most give_up_s, in steps of the busy timeout; None: a minute.

        diskcache's own `retry=True` would repeat for ever on any error, a read-only disk included.
        """
        deadline = time.monotonic() + (_GIVE_UP_S if give_up_s is None else give_up_s)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.disk.removing_afterwards())
                while True:
                    try:
                        stack.enter_context(self.transact())
                        break
                    except diskcache.Timeout as timeout:
                        cause = timeout.__context__
                        if isinstance(cause, sqlite3.Error) and sqlite_code(cause) != sqlite3.SQLITE_BUSY:
                            raise cause from None
                        if time.monotonic() >= deadline:
                            raise
                yield self._sql
        except BaseException:
            # A COMMIT that fails, as on a full disk, leaves diskcache's connection inside the transaction.
            with contextlib.suppress(sqlite3.Error):
                if self._con.in_transaction:
                    self._con.rollback()
            raise

    def rows(self, query: str, args: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """A read outside any write transaction: it waits for nobody."""
        return self._sql(query, args).fetchall()  # type: ignore[no-any-return]

    def insert_bytes(self, keys: Iterable[bytes], now: float) -> int:
        """Insert keys of value 0, inside a transaction; those already there are left alone. Rows inserted."""
        return self._con.executemany(
            "INSERT OR IGNORE INTO Cache (key, raw, store_time, access_time, mode, value) VALUES (?, 1, ?, ?, ?, 0)",
            ((key, now, now, diskcache.core.MODE_RAW) for key in keys),
        ).rowcount

    def shrink(self) -> None:
        """Evict what is there beyond the limit, as where it was a higher one before; the next set() does, too."""
        ((size_bytes,),) = self.rows("SELECT value FROM Settings WHERE key = 'size'")
        if self.payload_limit_bytes is not None and size_bytes > self.payload_limit_bytes:
            with contextlib.suppress(LockedError), self.writing(give_up_s=0.0) as sql:
                self._cull(time.time(), sql, self.disk.remove)

    def _cull(
        self,
        now: float,
        sql: Callable[..., sqlite3.Cursor],
        cleanup: Callable[[str | None], None],
        limit: int | None = None,
    ) -> None:
        """Inside a transaction, such as that of set(): evict as few least recently used rows as it takes."""
        limit_bytes = self.payload_limit_bytes
        if limit_bytes is None:
            return
        ((size_bytes,),) = sql("SELECT value FROM Settings WHERE key = 'size'").fetchall()
        excess = size_bytes - limit_bytes
        doomed: list[int] = []
        if excess > 0:
            for rowid, size, filename in sql("SELECT rowid, size, filename FROM Cache ORDER BY access_time, rowid"):
                doomed.append(rowid)
                cleanup(filename)
                excess -= size
                if excess <= 0:
                    break
        for rowid in doomed:
            sql("DELETE FROM Cache WHERE rowid = ?", (rowid,))
        if doomed:
            sql(
                "INSERT INTO Settings VALUES ('evictions', ?)"
                " ON CONFLICT (key) DO UPDATE SET value = value + excluded.value",
                (len(doomed),),
            )


class ReadOnlyTable(Table):
    """The same where nothing can be written, as on a disk that is mounted read-only."""

    def __init__(self, directory: Path) -> None:
        # What diskcache's own sets, without the tables that it makes and the settings that it writes.
        self._directory, self._timeout, self._txn_id = str(directory), _BUSY_TIMEOUT_S, None
        self._local = threading.local()
        self._disk = Disk(str(directory))
        self._con.execute("SELECT 1 FROM Cache LIMIT 1")

    @property
    def _con(self) -> sqlite3.Connection:
        # A connection belongs to a thread, and stays behind in a forked process, as diskcache has it.
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.pid, self._local.con = os.getpid(), self._connected()
            self._local.closing = _Closing(self._local.con)
        con: sqlite3.Connection = self._local.con
        return con

    def _connected(self) -> sqlite3.Connection:
        path = Path(self._directory, diskcache.core.DBNAME)

        def connect(how: str) -> sqlite3.Connection:
            uri = f"{path.as_uri()}?{how}"
            return sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)

        con = connect("mode=ro")
        try:
            con.execute("SELECT 1 FROM sqlite_master")
        except sqlite3.OperationalError:
            con.close()
            log = path.with_name(f"{path.name}-wal")
            if log.exists() and log.stat().st_size:
                raise  # what is in the log counts
            # SQLite cannot make the files that it shares with writers; there are no writers.
            con = connect("immutable=1")
        return con

    def close(self) -> None:
        super().close()
        self._local.pid = None


def sqlite_code(error: BaseException) -> int | None:
    """SQLite's primary result code; Python's own errors of the module have none."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
