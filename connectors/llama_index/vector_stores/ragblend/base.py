"""RagBlendFaissStore: nodes and their vectors in memory, searched exactly by FAISS, persisted as one file.

Inside, every node that is added gets an int64 id that only ever grows, so that the id of a node that is gone never
comes back as another. The table of nodes is the truth. FAISS may for a moment hold more than the table (an add that was
interrupted, a deletion not yet carried out), never less, and what is too much is removed before anything is read.

    one file = "ragblend vectors <version>\\n" | xxh3-128 of the rest, 16 bytes | npz of ids, vectors and JSON

The file holds plain vectors, no FAISS index: a flat index is its vectors, and a parser that believes whatever a header
says never sees bytes from a disk. The digest is compared before anything is parsed, and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import operator
import os
import threading
import uuid
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import faiss
import numpy as np
import xxhash
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, ValidationError
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.simple import DEFAULT_VECTOR_STORE, NAMESPACE_SEP
from llama_index.core.vector_stores.types import (
    DEFAULT_PERSIST_DIR,
    DEFAULT_PERSIST_FNAME,
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from ragblend.errors import IngestError, InvalidSettingError, StoreError, StoreFormatError, StoreFullError
from ragblend.store.failures import is_full

FORMAT_VERSION = 1

_NAME = b"ragblend vectors "
_DIGEST_BYTES = 16
_DEFAULT_PATH = os.path.join(DEFAULT_PERSIST_DIR, f"{DEFAULT_VECTOR_STORE}{NAMESPACE_SEP}{DEFAULT_PERSIST_FNAME}")


class RagBlendFaissStore(BasePydanticVectorStore):
    """A vector store over FAISS: exact cosine similarity, higher is closer.

    Text, metadata and relationships are stored with the vectors, so that an index needs no document store. Adding a
    node whose id is there replaces it. Filters choose the nodes before the search, so that a filtered query has
    similarity_top_k results if that many nodes match. Threads may share a store.

    To load what a StorageContext persisted, hand it a store from `from_persist_dir` and the same folder.

    Core's VectorStoreIndex asks for nothing but its IndexNodes and ImageNodes if it has any beside text nodes; make
    such an index with store_nodes_override=True.

    Args:
        dimension: of the vectors. None: that of the first one. It stays when everything is deleted.
        embedding_model: a name for what makes the vectors, compared at loading. None: not compared.

    Raises:
        InvalidSettingError: an argument is unknown or out of range.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    stores_text: bool = True
    dimension: int | None = Field(default=None, ge=1, strict=True, description="Length of the vectors.")
    embedding_model: str | None = Field(default=None, description="Name of the model that makes the vectors.")

    _table: _Table = PrivateAttr()

    def __init__(self, dimension: int | None = None, embedding_model: str | None = None, **fields: Any) -> None:
        try:
            super().__init__(**{"dimension": dimension, "embedding_model": embedding_model, **fields})
        except ValidationError as error:
            raise InvalidSettingError(f"RagBlendFaissStore takes dimension and embedding_model: {error}") from error
        self._table = _Table(dimension)

    @classmethod
    def class_name(cls) -> str:
        return "RagBlendFaissStore"

    @property
    def client(self) -> Any:
        """The faiss.IndexIDMap2; None while the dimension is unknown. Not to be changed."""
        with self._table.lock:
            return self._table.settled()

    # ---- changes

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Store nodes with their embeddings, all or none; their node ids. Of two with one id the later counts.

        Raises:
            IngestError: an embedding is missing, zero, not finite or of another dimension than those that are there,
                or a node's metadata cannot be written as JSON.
        """
        if not nodes:
            return []
        table = self._table
        with table.lock:
            dimension, rows, vectors = table.dimension, [], []
            for row_id, node in enumerate(nodes, table.next_id):
                try:
                    vectors.append(_unit(node.get_embedding(), dimension))
                    rows.append(_Row(row_id, node.node_id, node.ref_doc_id, node_to_metadata_dict(node)))
                except (TypeError, ValueError) as error:  # of pydantic, too, where metadata is no JSON
                    raise IngestError(
                        f"node {node.node_id!r} cannot be stored, and no other of its batch was: {error}"
                    ) from error
                dimension = len(vectors[-1])
            table.put(rows, np.stack(vectors))
            self.dimension = dimension
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete all nodes of a document. None there is fine."""
        with self._table.lock:
            self._table.keep(lambda row: row.ref_doc_id != ref_doc_id)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete the nodes that are named, that match, or, given both, that are named and match.

        Raises:
            InvalidSettingError: neither is given, or a group of filters without any filter in it, at whatever depth,
                which would delete everything; or a filter is not understood.
        """
        if node_ids is None and (filters is None or _has_empty_group(filters)):
            raise InvalidSettingError(
                "delete_nodes needs node_ids or filters, and everything matches a group of filters that is empty: "
                "leave such groups out; clear() deletes everything"
            )
        with self._table.lock:
            gone = {row.id for row in self._chosen(node_ids=node_ids, filters=filters)}
            self._table.keep(lambda row: row.id not in gone)

    def clear(self) -> None:
        """Delete all nodes. Dimension and embedding model stay: other vectors belong in a store of their own."""
        with self._table.lock:
            self._table.keep(lambda row: False)

    # ---- questions

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Nodes by id, by filter, or by both; all of them, if neither is given; first added first, without embeddings.

        Raises:
            InvalidSettingError: a filter is not understood.
        """
        with self._table.lock:
            rows = self._chosen(node_ids=node_ids, filters=filters)
        return [row.node() for row in sorted(rows, key=lambda row: row.id)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The similarity_top_k closest nodes, closest first, of those the query's filters, doc_ids and node_ids allow.

        An empty doc_ids allows no node. An empty node_ids allows all: core's retrievers send one with every query.

        Raises:
            InvalidSettingError: another mode than DEFAULT, no similarity_top_k, a filter that is not understood, or an
                embedding that is missing, zero, not finite or of another dimension than those that are there.
        """
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise InvalidSettingError(
                f"RagBlendFaissStore answers queries of mode 'default' only, not {query.mode!s}: "
                "leave vector_store_query_mode out"
            )
        if query.similarity_top_k < 1:
            raise InvalidSettingError(f"similarity_top_k must be at least 1, it is {query.similarity_top_k}")
        table = self._table
        with table.lock:
            try:
                vector = _unit(query.query_embedding, table.dimension)
            except (TypeError, ValueError) as error:
                raise InvalidSettingError(f"nothing can be near this query: {error}") from error
            chosen = self._chosen(node_ids=query.node_ids or None, filters=query.filters, doc_ids=query.doc_ids)
            found = table.search(vector, query.similarity_top_k, chosen)
        return VectorStoreQueryResult(
            nodes=[row.node() for row, _ in found],
            similarities=[similarity for _, similarity in found],
            ids=[row.node_id for row, _ in found],
        )

    def _chosen(
        self,
        *,
        node_ids: Iterable[str] | None = None,
        filters: MetadataFilters | None = None,
        doc_ids: Iterable[str] | None = None,
    ) -> list[_Row]:
        matches = _matcher(filters)
        rows = self._table.rows
        named = rows.values() if node_ids is None else [rows[name] for name in dict.fromkeys(node_ids) if name in rows]
        documents = None if doc_ids is None else set(doc_ids)
        return [row for row in named if (documents is None or row.ref_doc_id in documents) and matches(row.fields)]

    # ---- the same, off the event loop

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """See add."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """See delete."""
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """See delete_nodes."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    async def aclear(self) -> None:
        """See clear."""
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """See get_nodes."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """See query."""
        return await asyncio.to_thread(self.query, query, **kwargs)

    # ---- on disk

    def persist(self, persist_path: str = _DEFAULT_PATH, fs: AbstractFileSystem | None = None) -> None:
        """Write the store to one file: aside first, then renamed, so that there is always a whole one.

        A symbolic link stays one: what it points to is written.

        Raises:
            StoreFullError: the disk is full; the file is as it was before.
            StoreError: it cannot be written.
        """
        path, files = os.fspath(persist_path), fs or LocalFileSystem()
        if isinstance(files, LocalFileSystem):
            path = os.path.realpath(files._strip_protocol(path))  # a rename would replace a link by the file
        aside = f"{path}.{uuid.uuid4().hex}.partial"
        # Two calls at once must not end with the older state in the file.
        with self._table.persisting:
            data = self._to_bytes()
            try:
                if files.isdir(path):
                    raise IsADirectoryError(errno.EISDIR, "this is a folder, not a file")
                if folder := os.path.dirname(path):
                    files.makedirs(folder, exist_ok=True)
                try:
                    files.pipe_file(aside, data)
                    files.mv(aside, path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        files.rm_file(aside)
                    raise
            except OSError as error:
                if is_full(error):
                    raise StoreFullError(f"no space left for {path} ({error}): free some and persist again") from error
                raise StoreError(f"cannot write the vector store to {path}: {error}") from error

    @classmethod
    def from_persist_dir(
        cls,
        persist_dir: str = DEFAULT_PERSIST_DIR,
        namespace: str = DEFAULT_VECTOR_STORE,
        fs: AbstractFileSystem | None = None,
        *,
        dimension: int | None = None,
        embedding_model: str | None = None,
    ) -> Self:
        """The store that a StorageContext persisted to a folder. See from_persist_path."""
        path = os.path.join(persist_dir, f"{namespace}{NAMESPACE_SEP}{DEFAULT_PERSIST_FNAME}")
        return cls.from_persist_path(path, fs, dimension=dimension, embedding_model=embedding_model)

    @classmethod
    def from_persist_path(
        cls,
        persist_path: str,
        fs: AbstractFileSystem | None = None,
        *,
        dimension: int | None = None,
        embedding_model: str | None = None,
    ) -> Self:
        """The store that `persist` wrote to a file.

        Args:
            dimension, embedding_model: what the store must be of. None: whatever it is. An embedding model is not
                compared where the file names none.

        Raises:
            StoreError: there is no such file, or it cannot be read.
            StoreFormatError: it is damaged, of another format version, or no vector store of ours.
            IngestError: it holds vectors of another dimension or embedding model.
        """
        path = os.fspath(persist_path)
        try:
            data = (fs or LocalFileSystem()).cat_file(path)
        except FileNotFoundError as error:
            raise StoreError(f"there is no vector store at {path}: persist one there first") from error
        except OSError as error:
            raise StoreError(f"cannot read the vector store at {path}: {error}") from error
        store = cls._from_bytes(data, path)
        if dimension is not None and store.dimension not in (None, dimension):
            raise IngestError(
                f"the vector store at {path} holds vectors of {store.dimension} dimensions, not {dimension}: "
                "use the embedding model it was made with, or index again"
            )
        if embedding_model is not None and store.embedding_model not in (None, embedding_model):
            raise IngestError(
                f"the vector store at {path} was made with the embedding model {store.embedding_model!r}, not "
                f"{embedding_model!r}: use that one, or index again"
            )
        if store.dimension is None and dimension is not None:
            return cls(dimension, embedding_model or store.embedding_model)
        store.embedding_model = store.embedding_model or embedding_model
        return store

    def _to_bytes(self) -> bytes:
        table = self._table
        with table.lock:
            rows = sorted(table.rows.values(), key=lambda row: row.id)
            ids = np.asarray([row.id for row in rows], np.int64)
            vectors = table.vectors(ids)
            nodes = {
                "dimension": table.dimension,
                "embedding_model": self.embedding_model,
                "next_id": table.next_id,
                "rows": [(row.node_id, row.ref_doc_id, row.fields) for row in rows],
            }
        body = io.BytesIO()
        np.savez(body, ids=ids, vectors=vectors, nodes=np.frombuffer(json.dumps(nodes).encode(), np.uint8))
        return b"%s%d\n%s%s" % (_NAME, FORMAT_VERSION, _digest(body.getbuffer()), body.getbuffer())

    @classmethod
    def _from_bytes(cls, data: bytes, path: str) -> Self:
        title = data[:64].partition(b"\n")[0]
        if not title.startswith(_NAME):
            raise StoreFormatError(f"{path} is no vector store of ragblend, or is damaged: index again")
        if title != b"%s%d" % (_NAME, FORMAT_VERSION):
            raise StoreFormatError(
                f"the vector store at {path} has another format version than {FORMAT_VERSION}, which this version of "
                "ragblend uses: index again"
            )
        start = len(title) + 1
        digest, body = data[start : start + _DIGEST_BYTES], data[start + _DIGEST_BYTES :]
        damaged = f"the vector store at {path} is damaged: restore a copy of it, or index again"
        if digest != _digest(body):
            raise StoreFormatError(damaged)
        try:
            with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
                ids, vectors, nodes = arrays["ids"], arrays["vectors"], json.loads(arrays["nodes"].tobytes())
            if vectors.shape != (len(ids), nodes["dimension"] or 0):
                raise ValueError(f"vectors of shape {vectors.shape}")
            rows = [_Row(row_id, *row) for row_id, row in zip(ids.tolist(), nodes["rows"], strict=True)]
            store = cls(nodes["dimension"], nodes["embedding_model"])
            store._table.next_id = nodes["next_id"]
            if rows:
                store._table.put(rows, vectors)
        except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise StoreFormatError(damaged) from error
        return store

    # Core's own pickling would leave the nodes out with no more than a warning, and a shallow copy would share them.

    def __reduce__(self) -> tuple[Callable[[bytes, str], Self], tuple[bytes, str]]:
        return type(self)._from_bytes, (self._to_bytes(), "a pickled copy")

    def __copy__(self) -> Self:
        return self._from_bytes(self._to_bytes(), "a copy")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.__copy__()


@dataclass(frozen=True, slots=True)
class _Row:
    """One stored node. fields: what core's node_to_metadata_dict makes of it, the node itself included."""

    id: int
    node_id: str
    ref_doc_id: str | None
    fields: dict[str, Any]

    def node(self) -> BaseNode:
        return metadata_dict_to_node(self.fields)


class _Table:
    """Rows by node id, and their vectors. Callers hold the lock.

    An exception or an interrupt leaves a change either made or not made, wherever it strikes: what counts is `rows`,
    which changes in one step. `_by_id` and the index hold that and possibly more, until `settled`.
    """

    def __init__(self, dimension: int | None) -> None:
        self.lock = threading.RLock()
        self.persisting = threading.Lock()
        self.rows: dict[str, _Row] = {}
        self.next_id = 0
        self._by_id: dict[int, _Row] = {}
        # Any: FAISS's stubs know neither ids as an array nor the arguments of SearchParameters.
        self._index: Any = None if dimension is None else _empty(dimension)

    @property
    def dimension(self) -> int | None:
        return None if self._index is None else int(self._index.d)

    def put(self, rows: Sequence[_Row], vectors: np.ndarray) -> None:
        """Add rows with ids that were never used; each replaces the one of its node id. vectors: [rows, dimension]."""
        ids = np.asarray([row.id for row in rows], np.int64)
        self.next_id = max(self.next_id, int(ids.max()) + 1)
        if self._index is None:
            self._index = _empty(vectors.shape[1])
        self._by_id.update(zip(ids.tolist(), rows, strict=True))
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), ids)
        self.rows.update((row.node_id, row) for row in rows)

    def keep(self, wanted: Callable[[_Row], bool]) -> None:
        self.rows = {name: row for name, row in self.rows.items() if wanted(row)}

    def settled(self) -> Any:
        """The FAISS index, holding exactly the rows; None while no dimension is known."""
        if len(self._by_id) != len(self.rows):
            gone = [row_id for row_id, row in self._by_id.items() if self.rows.get(row.node_id) is not row]
            if self._index is not None:
                self._index.remove_ids(np.asarray(gone, np.int64))
            for row_id in gone:
                del self._by_id[row_id]
        return self._index

    def search(self, vector: np.ndarray, top_k: int, chosen: Sequence[_Row]) -> list[tuple[_Row, float]]:
        """The closest of the chosen rows and their cosine similarities, closest first. vector: [dimension], unit."""
        if not chosen:
            return []
        index = self.settled()
        ids = np.asarray([row.id for row in chosen], np.int64)
        # Without a selector where there is nothing to leave out, since FAISS is faster so.
        parameters: Any = faiss.SearchParameters
        among = None if len(ids) == index.ntotal else parameters(sel=faiss.IDSelectorBatch(ids))
        similarities, found = index.search(vector[None, :], min(top_k, len(ids)), params=among)
        return [
            (self._by_id[row_id], similarity)
            for row_id, similarity in zip(found[0].tolist(), similarities[0].tolist(), strict=True)
        ]

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """[ids, dimension] float32, of rows that are there."""
        if not len(ids):
            return np.empty((0, self.dimension or 0), np.float32)
        vectors: np.ndarray = self.settled().reconstruct_batch(ids)
        return vectors


def _unit(vector: Any, dimension: int | None) -> np.ndarray:
    """A vector at length 1, [dimension] float32.

    Raises:
        ValueError: it has no direction, or another dimension than wanted.
    """
    if vector is None:
        raise ValueError("there is no embedding: set one, or an embedding model")
    exact = np.asarray(vector, np.float64)
    if exact.ndim != 1 or not exact.size or dimension not in (None, len(exact)):
        wanted = "a vector" if dimension is None else f"a vector of {dimension} dimensions"
        raise ValueError(f"the embedding has shape {exact.shape}, the store wants {wanted}: use one embedding model")
    if not np.isfinite(exact).all():
        raise ValueError("the embedding holds NaN or infinity: see what the embedding model made it from")
    if not (largest := np.abs(exact).max()):
        raise ValueError("the embedding is zero and points nowhere: leave empty texts out")
    exact = exact / largest  # so that no square overflows or vanishes
    unit: np.ndarray = (exact / np.linalg.norm(exact)).astype(np.float32)
    return unit


def _digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _empty(dimension: int) -> faiss.IndexIDMap2:
    return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))


# ---- filters

_Fields = Mapping[str, Any]
_SCALAR = (str, int, float)
_CONDITIONS: dict[FilterCondition, Callable[[Iterable[bool]], bool]] = {
    FilterCondition.AND: all,
    FilterCondition.OR: any,
    FilterCondition.NOT: lambda parts: not any(parts),
}


def _comparable(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Strings compare with strings, numbers with numbers; nothing else matches."""
    return lambda have, want: (
        isinstance(have, _SCALAR) and isinstance(have, str) == isinstance(want, str) and compare(have, want)
    )


def _contains(have: Any, want: Any) -> bool:
    """Whether a list holds a value, or a string a part."""
    return want in have if isinstance(have, list) else _has_text(have, want)


def _has_text(have: Any, want: Any) -> bool:
    return isinstance(have, str) and isinstance(want, str) and want in have


# Operator: what its value may be, and (value in the metadata, value of the filter) -> match.
_OPERATORS: dict[FilterOperator, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]] = {
    FilterOperator.EQ: ((*_SCALAR, list), operator.eq),
    FilterOperator.NE: ((*_SCALAR, list), operator.ne),
    FilterOperator.GT: (_SCALAR, _comparable(operator.gt)),
    FilterOperator.GTE: (_SCALAR, _comparable(operator.ge)),
    FilterOperator.LT: (_SCALAR, _comparable(operator.lt)),
    FilterOperator.LTE: (_SCALAR, _comparable(operator.le)),
    FilterOperator.IN: (list, lambda have, want: have in want),
    FilterOperator.NIN: (list, lambda have, want: have not in want),
    FilterOperator.ANY: (list, lambda have, want: any(_contains(have, part) for part in want)),
    FilterOperator.ALL: (list, lambda have, want: all(_contains(have, part) for part in want)),
    FilterOperator.CONTAINS: (_SCALAR, _contains),
    FilterOperator.TEXT_MATCH: (str, _has_text),
    FilterOperator.TEXT_MATCH_INSENSITIVE: (
        str,
        lambda have, want: isinstance(have, str) and want.casefold() in have.casefold(),
    ),
}


def _matcher(filters: MetadataFilters | None) -> Callable[[_Fields], bool]:
    """What filters demand of a node's fields. Wrong ones are found here, before there is any node to match.

    Raises:
        InvalidSettingError: a condition, an operator or the type of a value that is not understood.
    """
    if filters is None or not filters.filters:
        return lambda fields: True
    parts = [_matcher(part) if isinstance(part, MetadataFilters) else _matcher_of_one(part) for part in filters.filters]
    combine = _CONDITIONS.get(filters.condition or FilterCondition.AND)
    if combine is None:
        raise InvalidSettingError(f"the filter condition {filters.condition!r} is unknown: use and, or, not")
    return lambda fields: combine(part(fields) for part in parts)


def _has_empty_group(filters: MetadataFilters) -> bool:
    groups = [part for part in filters.filters if isinstance(part, MetadataFilters)]
    return not filters.filters or any(map(_has_empty_group, groups))


def _matcher_of_one(part: MetadataFilter) -> Callable[[_Fields], bool]:
    key, want = part.key, part.value
    if part.operator == FilterOperator.IS_EMPTY:
        return lambda fields: fields.get(key) in (None, "", [])
    if part.operator not in _OPERATORS:
        known = ", ".join(known.value for known in _OPERATORS)
        raise InvalidSettingError(f"the filter operator {part.operator!r} on {key!r} is unknown: use one of {known}")
    types, test = _OPERATORS[part.operator]
    if not isinstance(want, types):
        names = " or ".join(kind.__name__ for kind in (types if isinstance(types, tuple) else (types,)))
        raise InvalidSettingError(
            f"the filter {part.operator.value!r} on {key!r} takes a {names}, not {want!r}; is_empty finds nodes without"
        )
    # As in core's own store: what is not there differs from everything.
    absent = part.operator in (FilterOperator.NE, FilterOperator.NIN)
    return lambda fields: absent if fields.get(key) is None else test(fields[key], want)
