"""The folder of stored chunks: verbs over two diskcache tables.

    <directory>/ragblend.json      marker: format, size limit, epoch (see folder.py)
    <directory>/ragblend.lock      held shared while a payload file is on its way in or out
    <directory>/kv/                cache.db (SQLite) and one <random>.safetensors a chunk
    <directory>/texts/             cache.db only: small opaque records about chunk texts
    <directory>/<name>.json        small documents, such as what calibration found

A payload is written to its file first and enters the index in a transaction afterwards, so that the index is locked for
microseconds, not for the time a file takes. A process killed in between leaves a file no row knows; the next opening of
the folder removes it.

No fsync: after a power cut a payload may be torn, and its checksums say so. A cache may forget, it must not lie.

This module does not import torch until a payload is written or read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, Self

from ragblend.errors import (
    CorruptPayloadError,
    InvalidSettingError,
    StoreError,
    StoreFullError,
    whole_number,
)
from ragblend.store.failures import store_error
from ragblend.store.folder import (
    MARKER,
    changing_files,
    claim,
    default_limit_bytes,
    files_settled,
    write_marker,
    write_whole,
)
from ragblend.store.table import (
    PAYLOAD_FILE,
    LockedError,
    PayloadFile,
    ReadOnlyTable,
    Table,
    UnusableRowError,
)

if TYPE_CHECKING:
    from ragblend.kv import ChunkKV
    from ragblend.store.payload import PayloadReader

_log = logging.getLogger(__name__)

LABEL_BYTES = 16
"""A note may begin with a label, by which `notes_labelled` finds it."""

MAX_RECORDS = 500_000
"""Text records kept; beyond, the oldest are forgotten. About 300 bytes of disk each."""

_MAX_RECORD_BYTES = 256
_MAX_NOTE_BYTES = 64 << 10
_KEYS_AT_ONCE = 500  # SQLite takes about a thousand parameters a query
_WHERE_IS = "SELECT size, mode, filename, value FROM Cache WHERE key = ? AND raw = 1"
_LABEL = f"substr(value, 1, {LABEL_BYTES})"
_SETTLE_S = 5.0  # how long verify waits for a moment in which no payload file is being written


class Opened(NamedTuple):
    """What KVStore.open_many found under one key.

    reader: open payload, or None unless status is "hit".
    status: "hit"; "miss", nothing stored; "corrupt", something unusable was stored and has been deleted.
    """

    reader: PayloadReader | None
    status: Literal["hit", "miss", "corrupt"]


@dataclass(frozen=True)
class StoreStats:
    """Counts over the life of the folder, all processes together.

    Attributes:
        chunks: payloads stored.
        tokens: tokens of those chunks.
        bytes: payload bytes on disk, headers included, index (about 300 bytes a chunk) not.
        size_limit_bytes: payload bytes this store keeps at most.
        hits, misses: keys looked up and found, or not.
        evictions: payloads removed to stay within the size limit.
        records: text records remembered.
    """

    chunks: int
    tokens: int
    bytes: int
    size_limit_bytes: int
    hits: int
    misses: int
    evictions: int
    records: int


@dataclass(frozen=True)
class VerifyReport:
    """What KVStore.verify found.

    Attributes:
        checked: payloads read to the last byte.
        bad: (key, reason) of each row that is unusable.
        orphans: names of payload files that no row knows.
        index_problems: what is wrong with the index itself.
        deleted: bad rows and orphans that were deleted.
    """

    checked: int
    bad: tuple[tuple[str, str], ...]
    orphans: tuple[str, ...]
    index_problems: tuple[str, ...]
    deleted: int

    @property
    def ok(self) -> bool:
        """Nothing was wrong (what was deleted counts as wrong)."""
        return not (self.bad or self.orphans or self.index_problems)


class KVStore:
    """Chunks' KV on disk, by key, within a size limit, least recently used out first.

    Any number of threads and processes may use one folder at once. Readers wait for nobody: where the index is locked
    or the disk full, they read without updating the LRU order. A folder that cannot be written can be read.

    Attributes:
        directory, size_limit_bytes: what they say.
        read_only: whether the folder cannot be written, or its disk was full when it was opened; whatever would write
            is then refused by a StoreError.
        epoch: random name of this store, from its making to its deletion; for callers that remember having filled it.
    """

    def __init__(self, directory: str | Path, *, size_limit_bytes: int | None = None, create: bool = True) -> None:
        """Open the store in `directory`, or make one there.

        Args:
            directory: a folder of its own; missing and empty ones are made into a store.
            size_limit_bytes: payload bytes to keep at most; what is there beyond that is evicted. None: what the store
                was last opened with, and for a new one the smaller of folder.DEFAULT_SIZE_LIMIT_BYTES and half of the
                disk's free space.
            create: whether to make a store where there is none.

        Raises:
            InvalidSettingError: the directory is no path, or the size limit no number of bytes.
            StoreFormatError: the folder holds something else, or a store of another format version.
            StoreFullError: no space for the index of a new one. (One that is there is opened, for reading only.)
            StoreError: the folder is missing and create is False, or it cannot be made or read.
        """
        if not isinstance(directory, (str, os.PathLike)) or directory == "":
            # An empty one is to Python the current folder; to whoever wrote it a variable that was not set.
            raise InvalidSettingError(f"a store is the path of a folder, which may be a new one; got {directory!r:.80}")
        if size_limit_bytes is not None:
            size_limit_bytes = whole_number("size_limit_bytes", size_limit_bytes, least=1)
        self.directory = Path(directory).expanduser().absolute()
        if os.path.expandvars(os.path.expanduser(self.directory)) != str(self.directory):
            # diskcache would expand it and put the payloads somewhere else.
            raise StoreError(f"the store's path {self.directory} looks like a shell variable: choose another name")
        self._closed = False
        self._full: StoreFullError | None = None
        self._kv_directory = self.directory / "kv"
        self._kv: Table
        self._texts: Table
        with self._typed_errors("open"):
            # Asked of the system, not tried: who may write anyway, as root may, finds nothing in the way.
            self.read_only = (self.directory / MARKER).exists() and not os.access(self.directory, os.W_OK)
            known = claim(self.directory, create)
            limit = size_limit_bytes or known.size_limit_bytes or default_limit_bytes(self.directory)
            if self.read_only:
                self.epoch, self.size_limit_bytes = known.epoch, limit
                self._open_read_only()
                return
            if limit != known.size_limit_bytes or not known.epoch:
                write_marker(self.directory, limit, known.epoch or os.urandom(16).hex())
                known = claim(self.directory, create)  # another process may have been making this very store
            self.epoch = known.epoch
            self.size_limit_bytes = limit
            try:
                self._open_tables()
            except (OSError, sqlite3.Error) as error:
                full = store_error(error, "open", self.directory)
                if not isinstance(full, StoreFullError):
                    raise
                self._full = full
            if self._full is not None:  # SQLite opens nothing without writing, but what is stored can be read
                try:
                    self._open_read_only()
                except (OSError, sqlite3.Error):
                    raise self._full from None
                self.read_only = True
                _log.warning("%s; it is opened for reading only", self._full)

    def _open_tables(self) -> None:
        self._kv = Table(self._kv_directory, policy="least-recently-used")
        self._kv.payload_limit_bytes = self.size_limit_bytes
        try:
            if not self._kv.rows("SELECT 1 FROM sqlite_master WHERE name = 'Cache_label'"):
                with self._kv.writing() as sql:
                    sql(f"CREATE INDEX IF NOT EXISTS Cache_label ON Cache ({_LABEL})")
            with changing_files(self.directory):
                self._kv.shrink()
            self._texts = Table(self.directory / "texts", policy="least-recently-stored")
            with files_settled(self.directory, patience_s=0.0) as settled:
                if settled:
                    for name in self._orphans():
                        self._kv.disk.remove(name)
        except BaseException:
            self._kv.close()
            raise

    def _open_read_only(self) -> None:
        self._kv = ReadOnlyTable(self._kv_directory)
        self._texts = ReadOnlyTable(self.directory / "texts")

    # ---- chunks

    def put(self, key: str, layers: ChunkKV, *, note: bytes = b"", overwrite: bool = False) -> int:
        """Store one chunk's KV and return its payload size in bytes.

        A key that is already stored costs a look-up and nothing is written, unless overwrite is True. Evicts least
        recently used chunks where the size limit asks for it.

        Args:
            key: the chunk key.
            layers: one LayerKV a layer, see payload.encode; unchanged until this returns.
            note: some bytes kept in the index beside it, for `notes`.

        Raises:
            InvalidSettingError: the KV is malformed, or alone larger than the size limit; or the note is too long.
            StoreFullError: the disk is full. Nothing of this chunk is left behind, and what was stored is intact.
            StoreError: the store is closed, cannot be written, or stayed locked for a minute.
        """
        from ragblend.store import payload

        if not isinstance(key, str) or not key:
            raise InvalidSettingError(f"a chunk key is a text that is not empty, not {key!r:.80}")
        if len(note) > _MAX_NOTE_BYTES:
            raise InvalidSettingError(f"a note has at most {_MAX_NOTE_BYTES} bytes, not {len(note)}")
        with self._typed_errors("write to"):
            self.check_writable()
            if not overwrite and (size := self._stored_bytes(key)) is not None:
                return size
            pieces = payload.encode(key, layers)
            size_bytes = sum(piece.nbytes for piece in pieces)
            if size_bytes > self.size_limit_bytes:
                raise InvalidSettingError(
                    f"the chunk's payload of {size_bytes} bytes is larger than the store's size limit of "
                    f"{self.size_limit_bytes} bytes: raise size_limit_bytes, or make chunks smaller"
                )
            name = f"{os.urandom(16).hex()}.safetensors"
            with changing_files(self.directory):
                try:
                    _write_file(self._kv_directory / name, pieces)
                    with self._kv.writing():
                        # The token count rides along as the tag: statistics need no look into the files.
                        self._kv.set(key, PayloadFile(name, size_bytes, note), tag=layers[0].n_tokens)
                except BaseException:
                    self._kv.disk.remove(name)
                    raise
            return size_bytes

    def open(self, key: str) -> PayloadReader | None:
        """The chunk's payload, open for reading; None where nothing usable is stored. See open_many."""
        return self.open_many([key])[0].reader

    def open_many(self, keys: Sequence[str]) -> list[Opened]:
        """Open several chunks' payloads, in one transaction. A repeated key gives the same reader each time.

        The caller closes the readers. They stay readable when their entries are evicted, deleted or replaced. An
        unusable entry is reported as corrupt and deleted, so that the chunk can be learned again.

        Raises:
            StoreError: the store is closed, or its index cannot be read at all.
        """
        from ragblend.store.payload import PayloadReader

        opened: dict[str, Opened] = {}
        with self._typed_errors("read"):
            for key, file in self._files(list(dict.fromkeys(keys))).items():
                if file is None:
                    opened[key] = Opened(None, "miss")
                    continue
                try:
                    if isinstance(file, UnusableRowError):
                        raise CorruptPayloadError(key, str(file))
                    opened[key] = Opened(PayloadReader(file, key), "hit")
                except CorruptPayloadError as error:
                    _log.warning("%s", error)
                    opened[key] = Opened(None, "corrupt")
                    # On a locked, full or read-only disk it stays, and stays corrupt.
                    with (
                        contextlib.suppress(OSError, sqlite3.Error, LockedError),
                        changing_files(self.directory),
                        self._kv.writing(give_up_s=0.0),
                    ):
                        self._kv.delete(key)
        return [opened[key] for key in keys]

    def notes(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The notes of those keys under which something is stored. No file is opened, nothing counted or touched.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        found = self._values_where("key", keys)
        return {key: note if isinstance(note, bytes) else b"" for key, note in found.items()}

    def notes_labelled(self, labels: Sequence[bytes]) -> dict[str, bytes]:
        """The notes that begin with one of these labels, LABEL_BYTES each, by key. Nothing is counted or touched.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        return self._values_where(_LABEL, labels)

    def _values_where(self, expression: str, among: Sequence[object]) -> dict[str, Any]:
        """key -> value of the rows in which the SQL expression is one of these."""
        found: dict[str, Any] = {}
        with self._typed_errors("read"):
            for first in range(0, len(among), _KEYS_AT_ONCE):
                some = list(among[first : first + _KEYS_AT_ONCE])
                marks = ",".join("?" * len(some))
                query = f"SELECT key, value FROM Cache WHERE raw = 1 AND {expression} IN ({marks})"
                found.update(self._kv.rows(query, some))
        return found

    def paths(self, keys: Sequence[str]) -> dict[str, Path]:
        """Where the payload files of those keys are that are stored. Nothing is opened, counted or touched.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        found: dict[str, Path] = {}
        with self._typed_errors("read"):
            for key in keys:
                for _, *where in self._kv.rows(_WHERE_IS, (key,)):
                    with contextlib.suppress(UnusableRowError):
                        found[key] = Path(self._kv.disk.fetch(*where, True))
        return found

    def contains(self, key: str) -> bool:
        """Whether something is stored under the key. No read, no effect on the LRU order.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        with self._typed_errors("read"):
            return bool(self._kv.rows("SELECT 1 FROM Cache WHERE key = ? AND raw = 1", (key,)))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.contains(key)

    def __bool__(self) -> bool:
        return True  # an empty store is one, too

    def __len__(self) -> int:
        with self._typed_errors("read"):
            return int(self._kv.rows("SELECT COUNT(*) FROM Cache")[0][0])

    def delete(self, key: str) -> bool:
        """Forget the chunk; whether it was there. Readers of it that are open stay usable.

        Raises:
            StoreError: the store is closed, cannot be written, or stayed locked for a minute.
        """
        with self._typed_errors("write to"):
            self.check_writable()
            with changing_files(self.directory), self._kv.writing():
                return bool(self._kv.delete(key))

    def keys(self) -> list[str]:
        """Keys of all stored chunks, sorted.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        query = "SELECT key FROM Cache WHERE raw = 1 AND typeof(key) = 'text' ORDER BY key"
        with self._typed_errors("read"):
            return [key for (key,) in self._kv.rows(query)]

    def stats(self) -> StoreStats:
        """Counts, without importing torch or reading payloads.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        with self._typed_errors("read"):
            tokens = "COALESCE(SUM(CASE WHEN typeof(tag) = 'integer' THEN tag ELSE 0 END), 0)"
            ((chunks, n_tokens, size),) = self._kv.rows(f"SELECT COUNT(*), {tokens}, TOTAL(size) FROM Cache")
            counters = dict(self._kv.rows("SELECT key, value FROM Settings"))
            return StoreStats(
                chunks=chunks,
                tokens=n_tokens,
                bytes=int(size),
                size_limit_bytes=self.size_limit_bytes,
                hits=counters.get("hits", 0),
                misses=counters.get("misses", 0),
                evictions=counters.get("evictions", 0),
                records=self.remembered_count(),
            )

    def verify(self, *, delete_bad: bool = False, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every payload to its last byte, and compare the index with the files.

        Others may go on using the store meanwhile; the LRU order is left as it is.

        Args:
            delete_bad: delete what is unusable: those chunks are then simply missing.
            progress: called with (payloads done, payloads in all) after each one.

        Raises:
            StoreError: the store is closed, or its index cannot be read; with delete_bad, or it cannot be written.
        """
        bad: list[tuple[str, str]] = []
        deleted = 0
        with self._typed_errors("verify"):
            if delete_bad:
                self.check_writable()
            problems = [f"{table}: {text}" for table in ("kv", "texts") for text in self._index_problems(table)]
            # Without the notes, which take more memory than everything else.
            rows = self._kv.rows("SELECT rowid, key, raw, size, mode, filename FROM Cache ORDER BY rowid")
            for done, (rowid, key, raw, size, mode, filename) in enumerate(rows, 1):
                reason = self._why_bad(key, raw, size, mode, filename)
                # It may have been evicted or replaced while we looked, which is no fault.
                same = "FROM Cache WHERE rowid = ? AND filename IS ?"
                if reason and self._kv.rows(f"SELECT 1 {same}", (rowid, filename)):
                    bad.append((key if isinstance(key, str) else repr(key)[:80], reason))
                    if delete_bad:
                        with changing_files(self.directory):
                            with self._kv.writing() as sql:
                                sql(f"DELETE {same}", (rowid, filename))
                            self._kv.disk.remove(str(filename))
                        deleted += 1
                if progress is not None:
                    progress(done, len(rows))
            orphans: list[str] = []
            with files_settled(self.directory, patience_s=_SETTLE_S, read_only=self.read_only) as settled:
                if settled:
                    orphans = self._orphans()
                    if delete_bad:
                        for name in orphans:
                            self._kv.disk.remove(name)
                        deleted += len(orphans)
        return VerifyReport(len(rows), tuple(bad), tuple(orphans), tuple(problems), deleted)

    # ---- text records

    def remember(self, records: Iterable[bytes]) -> int:
        """Keep small opaque records, each once; how many were not known before.

        At most MAX_RECORDS are kept; the oldest go first.

        Args:
            records: each 1..256 bytes.

        Raises:
            InvalidSettingError: something is no bytes, or of another length; nothing is kept then.
            StoreFullError: the disk is full; nothing of this call is kept.
            StoreError: the store is closed, cannot be written, or stayed locked for a minute.
        """
        batch = list(dict.fromkeys(records))
        for record in batch:
            if type(record) is not bytes or not 1 <= len(record) <= _MAX_RECORD_BYTES:
                raise InvalidSettingError(f"a record is 1..{_MAX_RECORD_BYTES} bytes, not {record!r:.80}")
        with self._typed_errors("write to"):
            self.check_writable()
            if not batch:
                return 0
            with self._texts.writing() as sql:
                added = self._texts.insert_bytes(batch, time.time())
                if (excess := self._texts.rows("SELECT COUNT(*) FROM Cache")[0][0] - MAX_RECORDS) > 0:
                    oldest = "SELECT rowid FROM Cache ORDER BY rowid LIMIT ?"
                    sql(f"DELETE FROM Cache WHERE rowid IN ({oldest})", (excess,))
                return added

    def remembered(self, *, after: int = 0) -> list[bytes]:
        """All records, oldest first.

        Args:
            after: what remembered_version() said once: only records that came in since.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        with self._typed_errors("read"):
            rows = self._texts.rows("SELECT key FROM Cache WHERE rowid > ? ORDER BY rowid", (after,))
            return [record for (record,) in rows if type(record) is bytes]

    def remembered_count(self) -> int:
        """How many records there are.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        with self._typed_errors("read"):
            return int(self._texts.rows("SELECT value FROM Settings WHERE key = 'count'")[0][0])

    def remembered_version(self) -> int:
        """A number that differs whenever a record came in, from any process; cheap enough to ask for each prompt.

        Unlike the count it also moves when the store is at MAX_RECORDS and an old record made room.

        Raises:
            StoreError: the store is closed, or its index cannot be read.
        """
        with self._typed_errors("read"):
            return int(self._texts.rows("SELECT COALESCE(MAX(rowid), 0) FROM Cache")[0][0])

    # ---- life

    def check_writable(self) -> None:
        """Raises StoreError where this store can only be read."""
        if self._full is not None:
            raise StoreFullError(str(self._full))
        if self.read_only:
            raise StoreError(
                f"the store in {self.directory} is read-only, and this would write to it: give yourself the right to, "
                "mount it writable, or copy it to where you may write"
            )

    def document(self, name: str) -> dict[str, Any]:
        """What save_document kept under this name; empty if nothing, or if it cannot be read."""
        path = self._document_path(name)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read and is left out: %s", path, error)
            return {}
        return kept if isinstance(kept, dict) else {}

    def document_stamp(self, name: str) -> tuple[int, ...] | None:
        """Differs whenever any process has replaced a document; None: there is none. Cheap enough for each prompt."""
        try:
            found = self._document_path(name).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def save_document(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep a small JSON object beside the payloads; it replaces the one of that name, whole or not at all.

        Raises:
            StoreError: it cannot be written.
        """
        with self._typed_errors("write"):
            self.check_writable()
            write_whole(self._document_path(name), json.dumps(content).encode() + b"\n")

    def documents(self, prefix: str) -> dict[str, dict[str, Any]]:
        """All documents whose names begin so, by name."""
        names = sorted(path.stem for path in self.directory.glob(f"{prefix}*.json"))
        return {name: self.document(name) for name in names}

    def _document_path(self, name: str) -> Path:
        if not name.isidentifier():
            raise StoreError(f"a document's name is letters, digits and underscores, not {name!r}")
        return self.directory / f"{name}.json"

    def close(self) -> None:
        """Close the index. Open readers stay usable. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._kv.close()
            self._texts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"KVStore({str(self.directory)!r}, size_limit_bytes={self.size_limit_bytes})"

    # ---- inside

    @contextlib.contextmanager
    def _typed_errors(self, verb: str) -> Iterator[None]:
        """Every error of the disk or of SQLite becomes a StoreError that says what to do."""
        if self._closed:
            raise StoreError(f"the store in {self.directory} is closed: open it again")
        try:
            yield
        except (OSError, sqlite3.Error, LockedError) as error:
            raise store_error(error, verb, self.directory) from error

    def _stored_bytes(self, key: str) -> int | None:
        """Size of the payload stored under the key; None where it is missing or not whole."""
        for size, *where in self._kv.rows(_WHERE_IS, (key,)):
            with contextlib.suppress(OSError, UnusableRowError):
                if os.path.getsize(self._kv.disk.fetch(*where, True)) == size:
                    return int(size)
        return None

    def _files(self, keys: Sequence[str]) -> dict[str, BinaryIO | UnusableRowError | None]:
        """Per key the open payload file, None where nothing is stored, or why what is stored cannot be used."""
        found: dict[str, BinaryIO | UnusableRowError | None] = {}
        touched = False
        try:
            if not self.read_only:
                try:
                    with self._kv.writing(give_up_s=0.0):
                        for key in keys:
                            found[key] = self._file(key, touch=True)
                    touched = True
                except (sqlite3.Error, LockedError) as error:
                    # Locked, full or read-only since: what is stored can be read all the same.
                    why = error or "it is locked"
                    _log.warning("reading %s without updating its LRU order: %s", self.directory, why)
            if not touched:
                for key in keys:
                    if found.get(key) is None:
                        found[key] = self._file(key, touch=False)
        except BaseException:
            for file in found.values():
                if file is not None and not isinstance(file, UnusableRowError):
                    file.close()
            raise
        return found

    def _file(self, key: str, *, touch: bool) -> BinaryIO | UnusableRowError | None:
        # Inside a transaction a row's file is there, or lost for good. Outside, it may have been evicted or replaced
        # between the SELECT and the opening, so one more look tells.
        for last in (True,) if touch else (False, True):
            try:
                if touch:
                    path = self._kv.get(key, read=True)
                else:
                    path = next(
                        (self._kv.disk.fetch(*where, True) for _, *where in self._kv.rows(_WHERE_IS, (key,))), None
                    )
                return None if path is None else open(path, "rb", buffering=0)
            except FileNotFoundError:
                if last:
                    return UnusableRowError("the payload file is gone")
            except UnusableRowError as error:
                return error
            except OSError as error:
                _log.warning("cannot open payload %s, it counts as a miss: %s", key[:16], error)
                return None
        raise AssertionError("the last look returns")

    def _orphans(self) -> list[str]:
        """Payload files no row knows. Files are listed first: what is added later cannot be mistaken for one."""
        names = [name for name in os.listdir(self._kv_directory) if PAYLOAD_FILE.fullmatch(name)]
        known = {name for (name,) in self._kv.rows("SELECT filename FROM Cache WHERE filename IS NOT NULL")}
        # Those that were deleted or evicted since are no orphans.
        return sorted(name for name in names if name not in known and (self._kv_directory / name).exists())

    def _index_problems(self, table: str) -> list[str]:
        cache = self._kv if table == "kv" else self._texts
        problems = [text for (text,) in cache.rows("PRAGMA integrity_check") if text != "ok"]
        # One statement, so that both sides are of one moment.
        ((count, counted, size, summed),) = cache.rows(
            "SELECT (SELECT value FROM Settings WHERE key = 'count'), COUNT(*),"
            " (SELECT value FROM Settings WHERE key = 'size'), COALESCE(SUM(size), 0) FROM Cache"
        )
        if count != counted:
            problems.append(f"{counted} rows where {count} are noted")
        if size != summed:
            problems.append(f"rows of {summed} bytes where {size} are noted")
        return problems

    def _why_bad(self, key: Any, raw: int, size: int, mode: int, filename: str | None) -> str:
        """What is wrong with one row and its payload; "" where nothing is."""
        from ragblend.store.payload import PayloadReader

        if not raw or not isinstance(key, str):
            return "the key is not text"
        try:
            path = self._kv.disk.fetch(mode, filename, None, True)
            with open(path, "rb", buffering=0) as file, PayloadReader(file, key) as reader:
                if reader.nbytes != size:
                    return f"the file has {reader.nbytes} bytes, the index says {size}"
                for layer in range(reader.n_layers):
                    reader.read_layer_kv(layer)
        except (UnusableRowError, CorruptPayloadError) as error:
            return str(error)
        except OSError as error:
            return f"cannot be opened: {error}"
        return ""


def _write_file(path: Path, pieces: Iterable[memoryview]) -> None:
    with open(path, "xb", buffering=0) as file:
        for rest in pieces:
            while rest:  # the system may take less than it is given
                rest = rest[file.write(rest) :]
