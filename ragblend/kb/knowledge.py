"""KnowledgeBase: keeps index and KV store in step, asks and answers.

    ingest   new documents -> parts -> chunks -> vectors; then each: neighbours -> KV -> one commit to the index
    query    question -> vector -> closest chunks -> LlamaIndex's query engine over RagBlendLLM -> answer, report

Chunks are prefilled behind their neighbours, the closest chunks of the corpus, so all vectors come first. A document
enters the index only when the KV of all its chunks is stored. A run that is killed loses at most the document it was
at, and finds the KV of that document's chunks when it comes back. KV that stands behind a text that has gone from the
corpus is deleted, and those chunks are prefilled anew.

Models are loaded when they are first needed: statistics, and an ingest in which nothing changed, need none.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ragblend.blend.variants import NEIGHBOURS
from ragblend.errors import ContextWindowError, EmptyPromptError, IngestError, InvalidSettingError
from ragblend.kb.embedder import DEFAULT_EMBEDDING_MODEL, Embedder
from ragblend.kb.files import (
    Part,
    Skipped,
    UnreadableError,
    content_digest,
    find_files,
    printable,
    read_file,
    readable,
)
from ragblend.kb.index import DocumentIndex, KVEntry, NewChunk, StoredChunk
from ragblend.report import BlendReport
from ragblend.store.kvstore import KVStore, VerifyReport

if TYPE_CHECKING:
    import numpy as np
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore
    from llama_index.llms.ragblend import RagBlendLLM

    from ragblend.engine import IngestReport, RagBlend

DEFAULT_CHUNK_TOKENS = 300
DEFAULT_TOP_K = 4

Progress = Callable[[str, float, int], None]
"""Called with (document at work, documents done with its fraction, documents in all)."""


@dataclass(frozen=True)
class IngestSummary:
    """What an ingest did.

    Attributes:
        documents: documents that were read and committed, new and changed ones.
        unchanged: documents that were there with the same content already.
        chunks: chunks of the former; computed + already_stored of them have their KV in the store.
        computed, already_stored: chunks whose KV was prefilled now, or found.
        tokens, bytes: of the KV that was prefilled now.
        seconds: wall time, loading of models included.
        skipped: files that hold no text we can get at.
        refreshed: chunks prefilled again, because a text that they were prefilled behind has gone from the corpus.
        pruned: documents that were forgotten.
    """

    documents: int
    unchanged: int
    chunks: int
    computed: int
    already_stored: int
    tokens: int
    bytes: int
    seconds: float
    skipped: tuple[Skipped, ...]
    refreshed: int = 0
    pruned: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "skipped": [skip._asdict() for skip in self.skipped]}


@dataclass(frozen=True)
class Reply:
    """An answer, the chunks it was made from (closest first), and how. sources: LlamaIndex's NodeWithScore."""

    text: str
    sources: tuple[NodeWithScore, ...]
    report: BlendReport | None

    def as_dict(self) -> dict[str, Any]:
        sources = [{**s.node.metadata, "similarity": s.score, "text": s.node.get_content()} for s in self.sources]
        report = None if self.report is None else self.report.as_dict()
        return {"answer": self.text, "sources": sources, "report": report}


@dataclass(frozen=True)
class KnowledgeBaseStats:
    """Documents and chunks of the index, and what the KV store counts.

    Attributes:
        documents, indexed_chunks: in the index.
        chunks, tokens, bytes: of stored KV. Chunks of equal text share it; each model has its own.
        size_limit_bytes: KV bytes that are kept at most, least recently used out first.
        hits, misses, evictions, records: as in the store's StoreStats.
        embedding_model: what the index was made with; None while it is empty.
    """

    documents: int
    indexed_chunks: int
    chunks: int
    tokens: int
    bytes: int
    size_limit_bytes: int
    hits: int
    misses: int
    evictions: int
    records: int
    embedding_model: str | None


@dataclass(frozen=True)
class Verification:
    """What was found wrong with KV payloads and with the index.

    Attributes:
        missing: keys that the index notes for the model and the KV store does not have. What was evicted to keep the
            size limit is not missed: a store that evicts has none.
    """

    kv: VerifyReport
    index_problems: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing was wrong (what was repaired counts as wrong)."""
        return self.kv.ok and not self.index_problems and not self.missing

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "checked": self.kv.checked,
            "bad": [{"key": key, "reason": reason} for key, reason in self.kv.bad],
            "orphans": list(self.kv.orphans),
            "index_problems": [*self.kv.index_problems, *self.index_problems],
            "missing": list(self.missing),
            "deleted": self.kv.deleted,
        }


class _Split(NamedTuple):
    """A new document, ready to be prefilled. vectors: [pieces, dimensions] float32."""

    name: str
    digest: str
    pieces: list[Part]
    vectors: np.ndarray


class _Document(NamedTuple):
    """digest: of its content; raises UnreadableError. read: its text; raises UnreadableError."""

    name: str
    digest: Callable[[], str]
    read: Callable[[], list[Part]]


class KnowledgeBase:
    """Documents in a store folder, and a model that answers from them.

    with KnowledgeBase("store") as kb:
        kb.ingest(["docs"])
        print(kb.query("How is the cache cleared?").text)
    """

    def __init__(
        self,
        store: str | Path,
        *,
        model: str | Path | None = None,
        embedding_model: str | None = None,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        size_limit_bytes: int | None = None,
        create: bool = True,
    ) -> None:
        """Open a knowledge base, or make one.

        Args:
            store: its folder, which is a KVStore's folder too.
            model: who answers: a folder, a GGUF file or a hub id; None: the engine's default.
            embedding_model: who makes the vectors; None: what the index was made with, and for a new one
                all-MiniLM-L6-v2.
            chunk_tokens: tokens of a chunk at most, counted as the model counts them.
            size_limit_bytes: KV bytes kept at most; None: as before, see KVStore.
            create: whether to make one where there is none.

        Raises:
            StoreError, InvalidSettingError, IngestError.
        """
        if chunk_tokens < 16:
            raise InvalidSettingError(f"chunk_tokens must be 16 or more, not {chunk_tokens}: less says nothing")
        self.store = KVStore(store, size_limit_bytes=size_limit_bytes, create=create)
        try:
            # Beside the KV, and only now: the KV store refuses to be made in a folder that is not empty.
            folder = self.store.directory / "index"
            self.index = DocumentIndex(folder, in_memory=not create and not DocumentIndex.is_in(folder))
            known = self.index.embedding_model
            if known is not None and embedding_model not in (None, known):
                self.index.close()
                raise IngestError(
                    f"the store in {self.store.directory} was made with the embedding model {known!r}, not "
                    f"{embedding_model!r}: use that one, or another store"
                )
        except BaseException:
            self.store.close()
            raise
        self.chunk_tokens = chunk_tokens
        self._model = model
        self._embedding_model = embedding_model or known or DEFAULT_EMBEDDING_MODEL
        self._loading = threading.RLock()
        self._llm: RagBlendLLM | None = None

    # ---- ingest

    def ingest(
        self, paths: Sequence[str | Path], *, prune: bool = False, progress: Progress | None = None
    ) -> IngestSummary:
        """Read the files under the paths. Only what is new or changed is worked on.

        Args:
            prune: also forget documents under these paths whose files are gone.

        Raises:
            IngestError: a path does not exist, or there is no file at all.
            ModelError, MissingDependencyError: a model is needed and not to be had.
            StoreFullError: the disk is full; what was committed before stays.
        """
        files, skipped = find_files(paths, exclude=self.store.directory, may_be_empty=prune)
        documents = [_file(path) for path in files]
        vanished: list[str] = []
        if prune:
            roots = [Path(os.path.abspath(Path(path).expanduser())) for path in paths]
            present = {document.name for document in documents}  # a name that is no UTF-8 is not that of its file
            vanished = [name for name in self.index.digests() if name not in present and _vanished(Path(name), roots)]
        return self._ingest(documents, skipped, vanished, progress)

    def ingest_texts(self, texts: Mapping[str, str], *, progress: Progress | None = None) -> IngestSummary:
        """The same for texts that are no files: {name: text}."""
        return self._ingest([_text(name, text) for name, text in texts.items()], [], [], progress)

    def _ingest(
        self,
        documents: Sequence[_Document],
        skipped: list[Skipped],
        vanished: Sequence[str],
        progress: Progress | None,
    ) -> IngestSummary:
        started = time.perf_counter()
        if self.index.in_memory:
            self.index.close()
            self.index = DocumentIndex(self.index.directory)
        reports: list[IngestReport] = []
        refreshed: list[IngestReport] = []
        chunks = 0
        try:
            for name in vanished:
                self._free(self.index.remove(name))
            unchanged, new = self._read(documents, skipped, progress)
            corpus = _Corpus(self.index, new)
            done = len(documents) - len(unchanged) - len(new)  # those that were skipped
            for n, split in enumerate(new, done):
                reports.append(self._prefill_new(split, corpus, _fraction(progress, split.name, n, len(documents))))
                chunks += len(split.pieces)
            for n, name in enumerate(unchanged, done + len(new)):
                reports += self._prefill_lacking(name, corpus, _fraction(progress, name, n, len(documents)))
            # What was prefilled behind a text that is gone now goes first, so that nothing of it is ever served. The
            # index knows it as stale until it is prefilled anew, by the next run with this model if this one is killed.
            self._free(self.index.stale_keys())
            for name, stale in self.index.stale_chunks(self._model_signature).items():
                at_work = _fraction(progress, name, len(documents), len(documents))
                refreshed += self._prefill_lacking(name, corpus, at_work, stale)
        finally:
            self.index.save()
        if progress is not None:
            progress("", len(documents), len(documents))
        everything = [*reports, *refreshed]
        return IngestSummary(
            documents=len(new),
            unchanged=len(unchanged),
            chunks=chunks,
            computed=sum(r.computed for r in reports),
            already_stored=sum(r.already_stored for r in reports),
            tokens=sum(r.tokens for r in everything),
            bytes=sum(r.bytes for r in everything),
            seconds=time.perf_counter() - started,
            skipped=tuple(skipped),
            refreshed=sum(r.computed for r in refreshed),
            pruned=len(vanished),
        )

    def _read(
        self, documents: Sequence[_Document], skipped: list[Skipped], progress: Progress | None
    ) -> tuple[list[str], list[_Split]]:
        """Names of unchanged documents, and new ones in chunks with their vectors."""
        known = self.index.digests()
        unchanged: list[str] = []
        new: dict[str, _Split] = {}
        for document in documents:
            _fraction(progress, document.name, 0, len(documents))(0.0)
            try:
                digest = f"{document.digest()}-{self.chunk_tokens}"
                if known.get(document.name) == digest:
                    unchanged.append(document.name)
                    continue
                pieces = self._split(document.read())
                for piece in pieces:
                    self._check_fits(piece.text)
            except (UnreadableError, ContextWindowError) as error:
                skipped.append(Skipped(document.name, readable(str(error))))
                continue
            if not pieces:
                skipped.append(Skipped(document.name, "no text in it"))
                continue
            title = Path(document.name).stem  # says what the whole document is about, which a chunk alone may not
            vectors = self._embedder.embed([f"{title}\n\n{piece.text}" for piece in pieces])
            new[document.name] = _Split(document.name, digest, pieces, vectors)
        return unchanged, list(new.values())

    def _split(self, parts: Sequence[Part]) -> list[Part]:
        from llama_index.core.node_parser import SentenceSplitter

        room = self.engine.decoder.context_window_tokens - len(self.engine.preamble_ids)
        if self.chunk_tokens > room:
            raise InvalidSettingError(
                f"chunk_tokens is {self.chunk_tokens}, but a chunk of this model can have {room} at most: its context "
                f"window holds {self.engine.decoder.context_window_tokens} tokens, and {len(self.engine.preamble_ids)} "
                "stand before every chunk; choose less"
            )
        # No overlap: sentences are kept whole as it is, and every token that is in two chunks is prefilled and
        # stored twice.
        splitter = SentenceSplitter(
            chunk_size=self.chunk_tokens,
            chunk_overlap=0,
            paragraph_separator="\n\n",
            tokenizer=lambda text: list(self.engine.prompts.encode_text(text)),
        )
        pieces = [
            Part(text.strip(), part.metadata) for part in parts for text in splitter.split_text(readable(part.text))
        ]
        return [piece for piece in pieces if piece.text]

    def _check_fits(self, text: str) -> None:
        """Raises ContextWindowError where a chunk is too long for the model, which a splitter cannot always prevent."""
        engine = self.engine
        tokens = len(engine.preamble_ids) + len(engine.prompts.encode_text(text))
        if tokens > engine.decoder.context_window_tokens:
            raise ContextWindowError(tokens, 0, engine.decoder.context_window_tokens)

    def _prefill_new(self, split: _Split, corpus: _Corpus, at_work: Callable[[float], None]) -> IngestReport:
        texts = [piece.text for piece in split.pieces]
        report, kv = self._prefill(texts, split.vectors, corpus, at_work)
        chunks = [
            NewChunk(piece.text, piece.metadata, vector, entries)
            for piece, vector, entries in zip(split.pieces, split.vectors, kv, strict=True)
        ]
        unreferenced = self.index.replace(
            split.name, split.digest, chunks, model=self._model_signature, embedding_model=self._embedding_model
        )
        self._free(unreferenced)
        return report

    def _prefill(
        self, texts: Sequence[str], vectors: np.ndarray, corpus: _Corpus, at_work: Callable[[float], None]
    ) -> tuple[IngestReport, list[list[KVEntry]]]:
        """Prefill texts behind their neighbours; what was done, and the stored variants of each."""
        neighbours = [corpus.neighbours(text, vector) for text, vector in zip(texts, vectors, strict=True)]
        # One more step than texts: the commit is still to come.
        report = self.engine.ingest(
            texts, neighbours=neighbours, progress=lambda count: at_work(count / (len(texts) + 1))
        )
        kv: list[list[KVEntry]] = [[] for _ in texts]
        for entry in report.entries:
            behind = None if entry.neighbour is None else neighbours[entry.text][entry.neighbour]
            kv[entry.text].append(KVEntry(entry.key, behind))
        # A run that was killed may have left variants that no chunk has: nobody would notice when they become stale.
        for text, entries in zip(texts, kv, strict=True):
            strays = set(self.engine.stored_variants(text).values()).difference(key for key, _ in entries)
            self._free([key for key in sorted(strays) if not self.index.refers_to(key)])
        return report, kv

    def _prefill_lacking(
        self, document: str, corpus: _Corpus, at_work: Callable[[float], None], stale: Container[int] = ()
    ) -> list[IngestReport]:
        """Prefill what an unchanged document lacks for this model: another one did it, or the KV is gone since.

        Args:
            stale: ids of chunks that lack theirs in any case.
        """
        chunks = self.index.chunks_of(document, self._model_signature)
        lacking = [n for n, chunk in enumerate(chunks) if chunk.id in stale or not self._has_kv(chunk)]
        if not lacking:
            return []
        vectors = self.index.vectors_of(document)[lacking]
        report, kv = self._prefill([chunks[n].text for n in lacking], vectors, corpus, at_work)
        noted = {chunks[n].id: entries for n, entries in zip(lacking, kv, strict=True)}
        self._free(self.index.note_kv(noted, model=self._model_signature))
        return [report]

    def _has_kv(self, chunk: StoredChunk) -> bool:
        # In a store that is too small for everything, putting back what was evicted would evict the rest, each time.
        # A chunk that is asked about is learned then.
        return bool(chunk.kv_keys) and (self._evicts or all(key in self.store for key in chunk.kv_keys))

    def _free(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.store.delete(key)

    # ---- ask

    def query(
        self,
        question: str,
        *,
        top_k: int = DEFAULT_TOP_K,
        on_text: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> Reply:
        """Answer a question from the closest chunks.

        Args:
            on_text: called with each piece of the answer as soon as there is one.
            **settings: of RagBlendLLM: ratio, selector, max_tokens, temperature, ...

        Raises:
            EmptyPromptError, InvalidSettingError, IngestError (there are no documents): before a model is loaded.
            ContextWindowError: the question leaves no room in the model's window.
        """
        question = readable(question)
        if not question.strip():
            raise EmptyPromptError("the question is empty: ask something")
        if "ratio" in settings and settings["ratio"] is not None:
            from ragblend.engine import check_ratio

            check_ratio(settings["ratio"])
        if settings.keys() & {"max_tokens", "temperature", "top_p", "repetition_penalty", "seed"}:
            from ragblend.model.generate import DecodeSettings

            names = DecodeSettings.__annotations__.keys() - {"stop"}  # the LLM takes stop strings in more ways
            DecodeSettings(**{name: value for name, value in settings.items() if name in names})
        engine, llm = self._query_engine(top_k, streaming=on_text is not None, **settings)
        self._check_room(question, llm)
        try:
            response: Any = engine.query(question)
        except ValueError as error:
            if not _of_prompt_helper(error):
                raise
            # Core counts with a tokenizer of its own, which may see more tokens than the model does.
            raise self._no_room(question, llm) from error
        if on_text is None:
            text = str(response)
        else:
            pieces: list[str] = []
            for piece in response.response_gen:
                pieces.append(piece)
                on_text(piece)
            text = "".join(pieces)
        return Reply(text, tuple(response.source_nodes), llm.last_report)

    def _check_room(self, question: str, llm: RagBlendLLM) -> None:
        error = self._no_room(question, llm)
        if error.prompt_tokens >= error.context_window_tokens:
            raise error

    def _no_room(self, question: str, llm: RagBlendLLM) -> ContextWindowError:
        tokens = len(self.engine.preamble_ids) + len(self.engine.prompts.encode_text(question))
        return ContextWindowError(tokens, llm.max_tokens, llm.metadata.context_window)

    def as_retriever(self, top_k: int = DEFAULT_TOP_K) -> BaseRetriever:
        """LlamaIndex's retriever over the index.

        Raises:
            InvalidSettingError, IngestError: there are no documents.
        """
        from ragblend.kb.retriever import IndexRetriever

        if top_k < 1:
            raise InvalidSettingError(f"top_k must be 1 or more, not {top_k}")
        if not self.index.count_chunks():
            raise IngestError(f"there are no documents in {self.store.directory} yet: ingest some first")
        return IndexRetriever(self.index, self._embed_question, top_k)

    def as_query_engine(self, top_k: int = DEFAULT_TOP_K, **settings: Any) -> RetrieverQueryEngine:
        """LlamaIndex's query engine over the retriever and the model.

        Args:
            **settings: streaming, and settings of RagBlendLLM.
        """
        return self._query_engine(top_k, **settings)[0]

    def _query_engine(
        self, top_k: int, *, streaming: bool = False, **settings: Any
    ) -> tuple[RetrieverQueryEngine, RagBlendLLM]:
        from llama_index.core.query_engine import RetrieverQueryEngine

        retriever = self.as_retriever(top_k)
        from llama_index.llms.ragblend import RagBlendLLM

        llm = RagBlendLLM.from_engine(self.engine, **settings)
        return RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=streaming), llm

    def _embed_question(self, question: str) -> np.ndarray:
        vector: np.ndarray = self._embedder.embed([question])[0]
        return vector

    # ---- look after it

    def stats(self) -> KnowledgeBaseStats:
        """Counts. Imports neither torch nor LlamaIndex."""
        return KnowledgeBaseStats(
            documents=self.index.count_documents(),
            indexed_chunks=self.index.count_chunks(),
            embedding_model=self.index.embedding_model,
            **asdict(self.store.stats()),
        )

    def verify(self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Read every KV payload to its last byte and check the index.

        Args:
            repair: delete payloads that are bad, forget those that are missing, and make the FAISS file again; the
                next ingest prefills what is missing.
            progress: called with (payloads done, payloads in all).
        """
        kv = self.store.verify(delete_bad=repair, progress=progress)
        problems = tuple(self.index.verify(repair=repair))
        gone: set[str] = set()
        if not self.store.stats().evictions:
            gone = set(self.index.kv_keys(self._model_signature)).difference(self.store.keys())
            if repair and gone:
                self.index.forget_kv(sorted(gone))
        return Verification(kv, problems, tuple(sorted(gone.difference(key for key, _ in kv.bad))))

    @property
    def engine(self) -> RagBlend:
        """The engine, behind the preamble that LlamaIndex's prompts really have; the model is loaded on first use."""
        with self._loading:
            if self._llm is None:
                from llama_index.llms.ragblend import RagBlendLLM

                chosen: dict[str, Any] = {} if self._model is None else {"model": str(self._model)}
                self._llm = RagBlendLLM(store=self.store, **chosen)
            return self._llm.engine

    @cached_property
    def _embedder(self) -> Embedder:
        return Embedder(self._embedding_model)

    @cached_property
    def _evicts(self) -> bool:
        return self.store.stats().evictions > 0

    @cached_property
    def _model_signature(self) -> str:
        """Names the model in the index without loading it. The real identity is in the KV's keys; a wrong guess here
        costs a look-up or a miss."""
        path = Path(self._model or "").expanduser()
        if self._model is None or not path.exists():
            return printable(str(self._model or ""))
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
        return f"{printable(str(path.resolve()))}#{hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()}"

    def close(self) -> None:
        """Close everything. Closing twice is fine."""
        with self._loading:
            if self._llm is not None:
                self._llm.close()
        self.index.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Corpus:
    """Where a chunk's neighbours are looked for: in the index, and among the documents that are about to enter it."""

    def __init__(self, index: DocumentIndex, new: Sequence[_Split]) -> None:
        import numpy as np

        self._index = index
        self._replaced = {split.name for split in new}
        self._texts = [piece.text for split in new for piece in split.pieces]
        self._vectors = np.concatenate([split.vectors for split in new]) if new else None

    def neighbours(self, text: str, vector: np.ndarray) -> list[str]:
        """The closest other texts, closest first; and what stored KV of this text stands behind already.

        The same ones whichever documents are in the index and which are still to come: a run that goes on where
        another was killed makes the same variants.
        """
        reach, most = 2 * NEIGHBOURS, max(self._index.count_chunks(), len(self._texts))
        closest = self._closest(text, vector, reach)
        while len(closest) < NEIGHBOURS and reach < most:  # equal texts, and those that are about to be replaced
            reach *= 2
            closest = self._closest(text, vector, reach)
        known = [
            chunk.text
            for chunk in self._index.behind(text)
            if chunk.text != text and (chunk.document not in self._replaced or chunk.text in self._texts)
        ]
        return list(dict.fromkeys([*closest[:NEIGHBOURS], *known]))

    def _closest(self, text: str, vector: np.ndarray, reach: int) -> list[str]:
        """Of the `reach` closest in the index and of as many new ones, those that differ, closest first."""
        found = [
            (hit.similarity, hit.chunk.text)
            for hit in self._index.search(vector, reach)
            if hit.chunk.document not in self._replaced
        ]
        if self._vectors is not None:
            similarities = self._vectors @ vector
            closest = similarities.argsort(kind="stable")[::-1][:reach]
            found += [(float(similarities[n]), self._texts[n]) for n in closest]
        # FAISS and NumPy differ in the last digits.
        ranked = sorted(found, key=lambda hit: (-round(hit[0], 5), hit[1]))
        return [other for other in dict.fromkeys(other for _, other in ranked) if other != text]


def _vanished(path: Path, roots: Sequence[Path]) -> bool:
    """Whether there is no such file under the roots. One that cannot be looked at is not gone."""
    if not any(path == root or root in path.parents for root in roots):
        return False
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _file(path: Path) -> _Document:
    return _Document(printable(str(path)), lambda: content_digest(path), lambda: read_file(path))


def _text(name: str, text: str) -> _Document:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
    return _Document(printable(name), lambda: digest, lambda: [Part(text, {})])


def _of_prompt_helper(error: BaseException) -> bool:
    """Whether it comes from where core packs prompts: it says there is no room, in a plain ValueError."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "llama_index.core.indices.prompt_helper":
            return True
        trace = trace.tb_next
    return False


def _fraction(progress: Progress | None, name: str, done: int, documents: int) -> Callable[[float], None]:
    def at_work(fraction: float) -> None:
        if progress is not None:
            progress(name, done + fraction, documents)

    return at_work
