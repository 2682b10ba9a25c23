"""Documents, their chunks and the chunks' vectors, beside the KV store.

    <directory>/index.db        SQLite: documents, chunks with text, metadata and vector, keys of their KV
    <directory>/vectors.faiss   the same vectors, searchable

SQLite is the truth. The FAISS file is made from it and carries no information of its own: it is written aside and
renamed, and used only if its digest and the generation it was made of are those that SQLite notes. After a crash, or
when another process committed meanwhile, it is simply made again, so that the two cannot disagree for long.

One document is one transaction. Chunk ids only ever grow: the id of a chunk that is gone never comes back as another.

KV is stored before the chunk that has it is committed, and deleted after the commit that gives it up. Whatever is
between the two is *loose*: its key is written down before, in a transaction of its own or in the one that gives it up,
so that a process that is killed in between leaves nothing behind that nobody knows of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from ragblend.errors import IngestError, StoreError, StoreFormatError, StoreFullError
from ragblend.store.failures import is_damaged, is_full
from ragblend.store.folder import write_whole

FORMAT_VERSION = 4

_DATABASE = "index.db"
_VECTORS = "vectors.faiss"
_AT_WORK = "ingest.lock"
_BUSY_TIMEOUT_S = 60.0
_ROWS_AT_ONCE = 4096
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (name TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    document TEXT NOT NULL REFERENCES documents (name),
    text TEXT NOT NULL,
    digest BLOB NOT NULL,
    metadata TEXT NOT NULL,
    vector BLOB NOT NULL
);
CREATE INDEX chunks_of_document ON chunks (document);
CREATE INDEX chunks_of_digest ON chunks (digest);
CREATE TABLE kv (
    chunk INTEGER NOT NULL REFERENCES chunks (id) ON DELETE CASCADE,
    model TEXT NOT NULL,
    key TEXT NOT NULL,
    PRIMARY KEY (chunk, model, key)
) WITHOUT ROWID;
CREATE INDEX kv_of_key ON kv (key);
CREATE TABLE behind (key TEXT NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (key, digest)) WITHOUT ROWID;
CREATE TABLE loose (key TEXT PRIMARY KEY) WITHOUT ROWID;
"""
_STALE = "key IN (SELECT key FROM behind WHERE digest NOT IN (SELECT digest FROM chunks))"


@dataclass(frozen=True)
class StoredChunk:
    """One chunk of the index. kv_keys: under which the KV store has it for the model that was asked about, if noted."""

    id: int
    document: str
    text: str
    metadata: dict[str, Any]
    kv_keys: tuple[str, ...] = ()


class KVEntry(NamedTuple):
    """One stored variant of a chunk's KV. behind: the texts of other chunks that it was prefilled behind."""

    key: str
    behind: tuple[str, ...] = ()


class NewChunk(NamedTuple):
    """One chunk to add. vector: [dimensions] float32. kv: its stored variants."""

    text: str
    metadata: Mapping[str, Any]
    vector: np.ndarray
    kv: Sequence[KVEntry]


class Found(NamedTuple):
    """A search result. similarity: cosine, higher is closer."""

    chunk: StoredChunk
    similarity: float


class DocumentIndex:
    """The index of one store. Threads may share it; several processes may use one folder."""

    def __init__(self, directory: Path, *, in_memory: bool = False) -> None:
        """Open the index in `directory`, or make one there.

        Args:
            in_memory: an empty one that leaves no trace on the disk, for readers of a store that has none.

        Raises:
            StoreError: the folder cannot be written.
            StoreFormatError: it was written by another format version, or is damaged.
        """
        self.directory = directory
        self.in_memory = in_memory
        self._lock = threading.RLock()
        self._closed = False
        self._faiss: Any = None
        self._faiss_generation = -1
        with self._typed_errors("open"):
            if not in_memory:
                directory.mkdir(parents=True, exist_ok=True)
            database = ":memory:" if in_memory else directory / _DATABASE
            self._db = sqlite3.connect(database, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("PRAGMA foreign_keys = ON")
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        if self._version() == 0:
            with self._transaction():
                if self._version() == 0:  # asked again: another process may have been faster
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        if (version := self._version()) != FORMAT_VERSION:
            raise StoreFormatError(
                f"the index in {self.directory} has format {version}, this version of ragblend uses "
                f"{FORMAT_VERSION}: choose another store, or delete the folder {self.directory} and ingest again"
            )

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    # ---- what is there

    @property
    def embedding_model(self) -> str | None:
        """Name of the model the vectors were made with; None while there are none."""
        with self._typed_errors("read"):
            return self._meta("embedding_model")

    @property
    def dimensions(self) -> int | None:
        with self._typed_errors("read"):
            value = self._meta("dimensions")
            return None if value is None else int(value)

    def count_documents(self) -> int:
        return self._count("documents")

    def count_chunks(self) -> int:
        return self._count("chunks")

    def digests(self) -> dict[str, str]:
        """{document name: digest of its content}."""
        with self._typed_errors("read"):
            return dict(self._db.execute("SELECT name, digest FROM documents"))

    def chunks_of(self, document: str, model: str) -> list[StoredChunk]:
        """A document's chunks in reading order, each with the key of its KV by `model` where that is noted."""
        query = (
            "SELECT id, document, text, metadata, (SELECT GROUP_CONCAT(key) FROM kv WHERE chunk = id AND model = ?)"
            " FROM chunks WHERE document = ? ORDER BY id"
        )
        with self._typed_errors("read"):
            return [_chunk(row) for row in self._db.execute(query, (model, document))]

    def documents_with(self, text: str) -> list[str]:
        """The names of the documents that have a chunk of this text, sorted."""
        query = "SELECT DISTINCT document FROM chunks WHERE digest = ? ORDER BY document"
        with self._typed_errors("read"):
            return [document for (document,) in self._db.execute(query, (_digest(text),))]

    def vector_of(self, text: str, document: str) -> np.ndarray | None:
        """The vector of a document's first chunk of this text: [dimensions] float32; None where it has none."""
        query = "SELECT vector FROM chunks WHERE digest = ? AND document = ? ORDER BY id LIMIT 1"
        with self._typed_errors("read"):
            row = self._db.execute(query, (_digest(text), document)).fetchone()
            return None if row is None else np.frombuffer(row[0], "<f4")

    def stale_keys(self) -> list[str]:
        """Keys of KV that was prefilled behind a text that no chunk has any more, sorted."""
        with self._typed_errors("read"):
            return [key for (key,) in self._db.execute(f"SELECT DISTINCT key FROM kv WHERE {_STALE} ORDER BY key")]

    def stale_chunks(self, model: str) -> dict[str, set[int]]:
        """Ids of the chunks with such KV by a model, for each document that has some, in the order of their names."""
        query = (
            "SELECT DISTINCT document, chunk FROM kv JOIN chunks ON chunk = id"
            f" WHERE model = ? AND {_STALE} ORDER BY document"
        )
        found: dict[str, set[int]] = {}
        with self._typed_errors("read"):
            for document, chunk in self._db.execute(query, (model,)):
                found.setdefault(document, set()).add(chunk)
        return found

    def behind(self, text: str) -> list[str]:
        """The texts of chunks that stored KV of this text was prefilled behind, by whatever model, the oldest first."""
        query = (
            "SELECT text FROM chunks WHERE id IN"
            " (SELECT (SELECT MIN(id) FROM chunks WHERE digest = behind.digest) FROM behind WHERE key IN"
            " (SELECT key FROM kv JOIN chunks ON chunk = id WHERE digest = ?)) ORDER BY id"
        )
        with self._typed_errors("read"):
            return [other for (other,) in self._db.execute(query, (_digest(text),))]

    def sample(self, count: int) -> list[str]:
        """Different texts of so many chunks, if there are; the same ones while the corpus is the same."""
        with self._typed_errors("read"):
            rows = self._db.execute("SELECT text FROM chunks GROUP BY digest ORDER BY digest LIMIT ?", (count,))
            return [text for (text,) in rows]

    def texts_only_in(self, documents: Iterable[str]) -> set[str]:
        """The texts of these documents' chunks that no chunk of another document has."""
        among = set(documents)
        texts: dict[bytes, str] = {}
        with self._typed_errors("read"):
            for document in among:
                texts |= self._db.execute("SELECT digest, text FROM chunks WHERE document = ?", (document,)).fetchall()
            holders = "SELECT DISTINCT document FROM chunks WHERE digest = ?"
            return {
                text
                for digest, text in texts.items()
                if among.issuperset(document for (document,) in self._db.execute(holders, (digest,)))
            }

    def without_chunk(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that no chunk has, in their order."""
        with self._typed_errors("read"):
            noted = {key for (key,) in self._db.execute("SELECT DISTINCT key FROM kv")}
        return [key for key in keys if key not in noted]

    def loose_keys(self) -> list[str]:
        """Keys under which there may be KV that no chunk has, sorted."""
        with self._typed_errors("read"):
            query = "SELECT key FROM loose WHERE key NOT IN (SELECT key FROM kv) ORDER BY key"
            return [key for (key,) in self._db.execute(query)]

    def search(self, vector: np.ndarray, top_k: int) -> list[Found]:
        """The closest chunks to a normalised vector [dimensions] float32, closest first."""
        with self._typed_errors("read"):
            index = self._current_faiss()
            if index is None or index.ntotal == 0:
                return []
            similarities, ids = index.search(
                np.ascontiguousarray(vector, np.float32)[None, :], min(top_k, index.ntotal)
            )
            found: list[Found] = []
            for chunk_id, similarity in zip(ids[0].tolist(), similarities[0].tolist(), strict=True):
                row = self._db.execute(
                    "SELECT id, document, text, metadata, NULL FROM chunks WHERE id = ?", (chunk_id,)
                ).fetchone()
                if row is not None:  # -1 where there are fewer chunks; or deleted by another process just now
                    found.append(Found(_chunk(row), similarity))
            return found

    # ---- changes

    def replace(
        self, document: str, digest: str, chunks: Sequence[NewChunk], *, model: str, embedding_model: str
    ) -> None:
        """Put a document's chunks in the place of those it had.

        Raises:
            IngestError: the vectors do not fit those that are there.
            StoreFullError: the disk is full; the document is as it was before.
        """
        with self._typed_errors("write to"), self._transaction():
            self._check_vectors(chunks, embedding_model)
            known = self._keys_of(document)
            gone = [row[0] for row in self._db.execute("SELECT id FROM chunks WHERE document = ?", (document,))]
            self._db.execute("DELETE FROM chunks WHERE document = ?", (document,))
            self._db.execute(
                "INSERT INTO documents VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET digest = excluded.digest",
                (document, digest),
            )
            added: list[int] = []
            for chunk in chunks:
                vector = chunk.vector.astype("<f4").tobytes()
                row = (document, chunk.text, _digest(chunk.text), json.dumps(dict(chunk.metadata)), vector)
                cursor = self._db.execute(
                    "INSERT INTO chunks (document, text, digest, metadata, vector) VALUES (?, ?, ?, ?, ?)", row
                )
                added.append(int(cursor.lastrowid or 0))
                self._note_kv(added[-1], model, chunk.kv)
            before = int(self._meta("generation") or 0)
            self._set_meta("generation", str(before + 1))
            self._loosen(known)
        # Only after the commit, so that memory never runs ahead of the disk.
        if self._faiss is not None and self._faiss_generation == before:
            if gone:
                self._faiss.remove_ids(np.asarray(gone, np.int64))
            if added:
                self._faiss.add_with_ids(np.stack([c.vector for c in chunks]).astype(np.float32), np.asarray(added))
            self._faiss_generation = before + 1

    def remove(self, document: str) -> None:
        """Forget a document."""
        with self._typed_errors("write to"), self._transaction():
            keys = self._keys_of(document)
            self._db.execute("DELETE FROM chunks WHERE document = ?", (document,))
            self._db.execute("DELETE FROM documents WHERE name = ?", (document,))
            # Made again from what is left when it is asked for next.
            self._set_meta("generation", str(int(self._meta("generation") or 0) + 1))
            self._loosen(keys)

    def note_kv(self, entries: Mapping[int, Sequence[KVEntry]], *, model: str) -> None:
        """Note the stored variants of chunks, by chunk id, in the place of those noted for the model before.

        Those of chunks that another ingest has removed meanwhile are loose.
        """
        gone: dict[str, None] = {}
        with self._typed_errors("write to"), self._transaction():
            for chunk, kv in entries.items():
                where = (chunk, model)
                gone |= dict.fromkeys(
                    key for (key,) in self._db.execute("SELECT key FROM kv WHERE chunk = ? AND model = ?", where)
                )
                self._db.execute("DELETE FROM kv WHERE chunk = ? AND model = ?", where)
                if self._db.execute("SELECT 1 FROM chunks WHERE id = ?", (chunk,)).fetchone():
                    self._note_kv(chunk, model, kv)
                else:
                    gone |= dict.fromkeys(entry.key for entry in kv)
            self._loosen(gone)

    def loosen(self, keys: Iterable[str]) -> None:
        """Write down keys before KV is stored under them. They are loose until a chunk has them."""
        with self._typed_errors("write to"), self._transaction():
            self._loosen(keys)

    def forget_loose(self, keys: Iterable[str]) -> None:
        """There is no KV under these keys any more."""
        with self._typed_errors("write to"), self._transaction():
            self._db.executemany("DELETE FROM loose WHERE key = ?", [(key,) for key in keys])

    @contextlib.contextmanager
    def ingesting(self) -> Iterator[Callable[[], bool]]:
        """Tells other processes that an ingest is at work, for as long as this process lives.

        Yields:
            a function to be called in the end: whether no other ingest is at work. None begins before this one is over.
        """
        with self._typed_errors("write to"):
            lock = sqlite3.connect(self.directory / _AT_WORK, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        with contextlib.closing(lock):
            with self._typed_errors("read"):
                lock.execute("BEGIN")
                lock.execute("SELECT * FROM sqlite_master").fetchall()  # a shared lock

            def alone() -> bool:
                lock.execute("COMMIT")
                lock.execute("PRAGMA busy_timeout = 0")
                try:
                    lock.execute("BEGIN EXCLUSIVE")
                except sqlite3.OperationalError:
                    return False
                return True

            yield alone

    def kv_keys(self, model: str) -> list[str]:
        """All keys under which the KV of chunks is noted for a model, sorted."""
        with self._typed_errors("read"):
            query = "SELECT DISTINCT key FROM kv WHERE model = ? ORDER BY key"
            return [key for (key,) in self._db.execute(query, (model,))]

    def forget_kv(self, keys: Sequence[str]) -> None:
        """Note that chunks with KV under these keys have none at all any more, for the model that made it.

        A chunk that kept some of its variants would look as if it had them all.
        """
        with self._typed_errors("write to"), self._transaction():
            self._db.executemany(
                "DELETE FROM kv WHERE (chunk, model) IN (SELECT chunk, model FROM kv WHERE key = ?)",
                [(key,) for key in keys],
            )

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether there is an index in the folder, for all we know."""
        try:
            return (directory / _DATABASE).is_file()
        except PermissionError:  # opening it says so
            return True

    def save(self) -> None:
        """Write the FAISS file, if there is something new to write."""
        with self._typed_errors("write to"):
            index = self._current_faiss()
            if index is None or self._noted() == (self._faiss_generation, self._file_digest()):
                return
            import faiss

            data = faiss.serialize_index(index).tobytes()
            write_whole(self.directory / _VECTORS, data)
            with self._transaction():
                self._set_meta("faiss", json.dumps([self._faiss_generation, xxhash.xxh3_128_hexdigest(data)]))

    def verify(self, *, repair: bool = False) -> list[str]:
        """What is wrong, in words. With repair, the FAISS file is made again where it is what is wrong."""
        with self._typed_errors("verify"):
            problems = [text for (text,) in self._db.execute("PRAGMA integrity_check") if text != "ok"]
            problems += [f"row without its parent: {row}" for row in self._db.execute("PRAGMA foreign_key_check")]
            bad_sizes = self._db.execute(
                "SELECT COUNT(*) FROM chunks WHERE LENGTH(vector) != 4 * ?", (self.dimensions or 0,)
            ).fetchone()[0]
            if bad_sizes:
                problems.append(f"{bad_sizes} stored vectors are not of {self.dimensions} dimensions")
            noted, generation = self._noted(), int(self._meta("generation") or 0)
            if noted is not None and noted[0] == generation and noted[1] != self._file_digest():
                problems.append(f"{_VECTORS} is not what was written; it can be made again")
                if repair:
                    self._faiss = None
                    self.save()
        return problems

    # ---- life

    def close(self) -> None:
        """Close the database, once no other thread is at work on it. Closing twice is fine."""
        with self._lock:  # SQLite's module does not survive that a connection is closed in the middle of a query
            self._closed = True
            self._db.close()
            self._faiss = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _note_kv(self, chunk: int, model: str, kv: Sequence[KVEntry]) -> None:
        keys = [(key,) for key, _ in kv]
        self._db.executemany("INSERT INTO kv VALUES (?, ?, ?)", [(chunk, model, key) for (key,) in keys])
        # Chunks of equal text share their KV, and may have found it behind something else than it is behind now.
        self._db.executemany("DELETE FROM behind WHERE key = ?", keys)
        behind = [(key, _digest(text)) for key, texts in kv for text in texts]
        self._db.executemany("INSERT OR IGNORE INTO behind VALUES (?, ?)", behind)
        self._db.executemany("DELETE FROM loose WHERE key = ?", keys)

    def _loosen(self, keys: Iterable[str]) -> None:
        rows, nobodys = [(key,) for key in keys], "NOT EXISTS (SELECT 1 FROM kv WHERE key = ?1)"
        self._db.executemany(f"INSERT OR IGNORE INTO loose SELECT ?1 WHERE {nobodys}", rows)
        self._db.executemany(f"DELETE FROM behind WHERE key = ?1 AND {nobodys}", rows)

    def _keys_of(self, document: str) -> list[str]:
        query = "SELECT key FROM kv JOIN chunks ON chunk = id WHERE document = ? ORDER BY id"
        return list(dict.fromkeys(key for (key,) in self._db.execute(query, (document,))))

    def _check_vectors(self, chunks: Sequence[NewChunk], embedding_model: str) -> None:
        known, dimensions = self._meta("embedding_model"), self._meta("dimensions")
        if known is None and chunks:
            known, dimensions = embedding_model, str(chunks[0].vector.shape[0])
            self._set_meta("embedding_model", known)
            self._set_meta("dimensions", dimensions)
        if known is not None and known != embedding_model:
            raise IngestError(
                f"the index in {self.directory} was made with the embedding model {known!r}, not {embedding_model!r}: "
                "use that one, or another store"
            )
        for chunk in chunks:
            if chunk.vector.shape != (int(dimensions or 0),):
                raise IngestError(
                    f"the index in {self.directory} holds vectors of {dimensions} dimensions, these have shape "
                    f"{chunk.vector.shape}: the embedding model changed under its name; use another store"
                )

    def _current_faiss(self) -> Any:
        """The FAISS index of what is committed: the one in memory, the one on disk, or made again."""
        generation, dimensions = int(self._meta("generation") or 0), self.dimensions
        if dimensions is None:
            return None
        if self._faiss is None or self._faiss_generation != generation:
            self._faiss = self._read_faiss(generation, dimensions) or self._made_faiss(dimensions)
            self._faiss_generation = generation
        return self._faiss

    def _read_faiss(self, generation: int, dimensions: int) -> Any:
        import faiss

        noted = self._noted()
        if noted is None or noted[0] != generation:
            return None
        try:
            data = (self.directory / _VECTORS).read_bytes()
        except OSError:
            return None
        # The digest comes first: FAISS believes whatever a file's header says.
        if xxhash.xxh3_128_hexdigest(data) != noted[1]:
            return None
        index = faiss.deserialize_index(np.frombuffer(data, np.uint8))
        return index if index.d == dimensions else None

    def _made_faiss(self, dimensions: int) -> Any:
        import faiss

        index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimensions))
        cursor = self._db.execute(
            "SELECT id, vector FROM chunks WHERE LENGTH(vector) = ? ORDER BY id", (4 * dimensions,)
        )
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            vectors = np.frombuffer(b"".join(vector for _, vector in rows), "<f4").reshape(len(rows), dimensions)
            index.add_with_ids(vectors.astype(np.float32), np.asarray([row[0] for row in rows], np.int64))
        return index

    def _noted(self) -> tuple[int, str] | None:
        """(generation, digest) of the FAISS file that was written last."""
        value = self._meta("faiss")
        return None if value is None else (lambda pair: (int(pair[0]), str(pair[1])))(json.loads(value))

    def _file_digest(self) -> str:
        try:
            return xxhash.xxh3_128_hexdigest((self.directory / _VECTORS).read_bytes())
        except OSError:
            return ""

    def _meta(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _set_meta(self, name: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", (name, value)
        )

    def _count(self, table: str) -> int:
        with self._typed_errors("read"):
            return int(self._db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # SQLite itself has rolled back after some errors, a full disk among them.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _typed_errors(self, verb: str) -> Iterator[None]:
        """One thread at a time, and every error of the disk or of SQLite as a StoreError that says what to do."""
        with self._lock:
            if self._closed:
                raise StoreError(f"the index in {self.directory} is closed: open it again")
            try:
                yield
            except (OSError, sqlite3.Error) as error:
                if is_full(error):
                    raise StoreFullError(
                        f"the disk of the index in {self.directory} is full ({error}): free some space; what was "
                        "ingested before is intact"
                    ) from error
                if is_damaged(error):
                    raise StoreFormatError(
                        f"the index in {self.directory} is damaged ({error}): delete that folder and ingest again; "
                        "stored KV is found again"
                    ) from error
                raise StoreError(f"cannot {verb} the index in {self.directory}: {error}") from error


def _chunk(row: Sequence[Any]) -> StoredChunk:
    chunk_id, document, text, metadata, keys = row
    return StoredChunk(chunk_id, document, text, json.loads(metadata), tuple(keys.split(",")) if keys else ())


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
