"""One ingest: which documents are new, their chunks, vectors and KV, and one commit to the index for each.

Chunks are prefilled behind their neighbours, the closest chunks of the corpus, so all vectors come first. A document
enters the index only when the KV of all its chunks is stored. A run that is killed loses at most the document it was
at, and finds the KV of that document's chunks when it comes back; what no document has in the end is deleted, whoever
left it, a killed run or a question. KV that stands behind a text that has gone from the corpus is deleted, and those
chunks are prefilled anew.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragblend.blend.variants import Note, texts_before
from ragblend.errors import ContextWindowError, InvalidSettingError
from ragblend.kb.corpus import Corpus, SplitDocument
from ragblend.kb.files import (
    NoTextError,
    Part,
    Skipped,
    UnreadableError,
    content_digest,
    printable,
    read_file,
    readable,
)
from ragblend.kb.index import DocumentIndex, KVEntry, NewChunk, StoredChunk
from ragblend.kb.models import Models
from ragblend.kb.reports import IngestSummary
from ragblend.kb.splitting import SPLITTING_VERSION, Splitter
from ragblend.store.kvstore import KVStore

if TYPE_CHECKING:
    from ragblend.chunks import IngestReport

_log = logging.getLogger(__name__)

_NOTES_AT_ONCE = 4096  # of some kilobytes each
_FILLED = 0.9  # share of a store that evicts up to which it is filled again: payloads are of different sizes
_TELLING = 0.02  # share of a store after which it can be told how full it is going to be

KNOWLEDGE = "knowledge"
"""The store's document that says how its documents are split and prefilled."""

Progress = Callable[[str, float, int], None]
"""Called with (document at work, documents done with its fraction, documents in all)."""


class Document(NamedTuple):
    """digest: of its content; read: its text. Both raise UnreadableError, and NoTextError where it holds none."""

    name: str
    digest: Callable[[], str]
    read: Callable[[], list[Part]]


def file_document(path: Path) -> Document:
    """A file, which is opened when it is asked for its digest or its text."""
    return Document(printable(str(path)), lambda: content_digest(path), lambda: read_file(path))


def text_document(name: str, text: str) -> Document:
    """A text that is at hand."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
    return Document(printable(name), lambda: digest, lambda: [Part(text, {})])


def remember(store: KVStore, **settings: Any) -> None:
    """Have the next ingests that say nothing else go by these settings. They are kept as JSON."""
    known = store.document(KNOWLEDGE)
    if (now := {**known, **settings}) != known:
        store.save_document(KNOWLEDGE, now)


class Ingestion:
    """Brings an index and a KV store to where the documents are."""

    def __init__(self, index: DocumentIndex, store: KVStore, models: Models, chunk_tokens: int) -> None:
        self._index, self._store, self._models, self._chunk_tokens = index, store, models, chunk_tokens

    def run(
        self,
        documents: Sequence[Document],
        skipped: list[Skipped],
        vanished: Sequence[str],
        progress: Progress | None,
    ) -> IngestSummary:
        """Work on what is new or changed.

        Args:
            skipped: what was skipped before; what is skipped here is added.
            vanished: names of documents to forget.
        """
        started = time.perf_counter()
        evictions = self._store.stats().evictions
        reports: list[IngestReport] = []
        refreshed: list[IngestReport] = []
        chunks = 0
        with self._index.ingesting() as alone:
            try:
                self._loosen_learned(vanished)
                for name in vanished:
                    self._index.remove(name)
                unchanged, new, emptied = self._read(documents, skipped, progress)
                self._loosen_learned([*emptied, *(split.name for split in new)])
                for name in emptied:
                    self._index.remove(name)
                corpus = Corpus(self._index, new)
                done = len(documents) - len(unchanged) - len(new)  # those that were skipped
                outlook = _Outlook(self._store.size_limit_bytes, sum(map(_characters, new)))
                for n, split in enumerate(new, done):
                    reports.append(self._prefill_new(split, corpus, _fraction(progress, split.name, n, len(documents))))
                    chunks += len(split.pieces)
                    outlook.after(_characters(split), reports[-1].bytes)
                for n, name in enumerate(unchanged, done + len(new)):
                    reports += self._prefill_lacking(name, corpus, _fraction(progress, name, n, len(documents)))
                # What was prefilled behind a text that is gone now goes first, so that nothing of it is ever served.
                # The index knows it as stale until it is prefilled anew, by the next run with this model if this one
                # is killed.
                self._delete(self._index.stale_keys())
                for name, stale in self._index.stale_chunks(self._models.signature).items():
                    at_work = _fraction(progress, name, len(documents), len(documents))
                    refreshed += self._prefill_lacking(name, corpus, at_work, stale)
                # Another ingest's are loose while it is at work; the last one to end deletes what is left.
                if alone():
                    loose = self._index.loose_keys()
                    self._delete(loose)
                    self._index.forget_loose(loose)
            finally:
                self._index.save()
        if progress is not None:
            progress("", len(documents), len(documents))
        if evicted := self._store.stats().evictions - evictions:
            _log.warning(
                "the store keeps %.3g GB of KV at most, and %d payloads were evicted from it during this ingest; what "
                "is gone is computed anew when it is asked for. A larger size limit keeps more",
                self._store.size_limit_bytes / 1e9,
                evicted,
            )
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
            pruned=len(vanished) + len(emptied),
        )

    def _read(
        self, documents: Sequence[Document], skipped: list[Skipped], progress: Progress | None
    ) -> tuple[list[str], list[SplitDocument], list[str]]:
        """Names of unchanged documents; new ones in chunks with their vectors; names of those without text any more.

        What was read from the latter before is in them no longer, whatever the reason that nothing else could be. Of
        one whose content cannot be looked at nothing is known.
        """
        known = self._index.digests()
        unchanged: list[str] = []
        emptied: list[str] = []
        new: dict[str, SplitDocument] = {}
        for document in documents:
            _fraction(progress, document.name, 0, len(documents))(0.0)
            before, content = known.get(document.name), ""
            try:
                content = document.digest()
                digest = f"{content}-{self._chunk_tokens}-{SPLITTING_VERSION}"
                if before == digest:
                    unchanged.append(document.name)
                    continue
                pieces = self._split(document)
                if not pieces:
                    raise NoTextError("no text in it")
                for piece in pieces:
                    self._check_fits(piece.text)
            except (UnreadableError, ContextWindowError) as error:
                reason = readable(str(error))
                changed = before is not None and not before.startswith(f"{content}-")
                if changed and isinstance(error, (NoTextError, ContextWindowError)):
                    emptied.append(document.name)
                    reason += "; what was read from it before is forgotten"
                skipped.append(Skipped(document.name, reason))
                continue
            title = Path(document.name).stem  # says what the whole document is about, which a chunk alone may not
            vectors = self._models.embedder.embed([f"{title}\n\n{piece.text}" for piece in pieces])
            new[document.name] = SplitDocument(document.name, digest, pieces, vectors)
        return unchanged, list(new.values()), emptied

    def _split(self, document: Document) -> list[Part]:
        parts = [part._replace(text=readable(part.text)) for part in document.read()]
        return self._splitter.split(parts, Path(document.name).suffix)

    @cached_property
    def _splitter(self) -> Splitter:
        """Remembers in the store how long chunks are, once it is known that the model takes so many tokens."""
        window, before = self._models.engine.decoder.context_window_tokens, len(self._models.engine.preamble_ids)
        if self._chunk_tokens > window - before:
            raise InvalidSettingError(
                f"chunk_tokens is {self._chunk_tokens}, but a chunk of this model can have {window - before} at most: "
                f"its context window holds {window} tokens, and {before} stand before every chunk; choose less"
            )
        now = self._chunk_tokens
        if (last := self._store.document(KNOWLEDGE).get("chunk_tokens", now)) != now:
            _log.warning("chunks have %d tokens at most now, not %s: documents are split anew", now, last)
        remember(self._store, chunk_tokens=now)
        encode = self._models.engine.prompts.encode_text
        return Splitter(lambda text: list(encode(text)), self._chunk_tokens)

    def _check_fits(self, text: str) -> None:
        """Raises ContextWindowError where a chunk is too long for the model, which a splitter cannot always prevent."""
        engine = self._models.engine
        tokens = len(engine.preamble_ids) + len(engine.prompts.encode_text(text))
        if tokens > engine.decoder.context_window_tokens:
            raise ContextWindowError(tokens, 0, engine.decoder.context_window_tokens)

    def _prefill_new(self, split: SplitDocument, corpus: Corpus, at_work: Callable[[float], None]) -> IngestReport:
        texts = [piece.text for piece in split.pieces]
        report, kv = self._prefill(texts, texts_before(texts), corpus, at_work)
        chunks = [
            NewChunk(piece.text, piece.metadata, vector, entries)
            for piece, vector, entries in zip(split.pieces, split.vectors, kv, strict=True)
        ]
        self._index.replace(
            split.name, split.digest, chunks, model=self._models.signature, embedding_model=self._models.embedding_name
        )
        return report

    def _prefill(
        self,
        texts: Sequence[str],
        before: Sequence[Sequence[str]],
        corpus: Corpus,
        at_work: Callable[[float], None],
    ) -> tuple[IngestReport, list[list[KVEntry]]]:
        """Prefill texts behind what the policy says; what was done, and the stored variants of each.

        before: for each, the texts that stand before it in its document, the last one first.
        """
        if self._models.policy == "document":
            neighbours = [list(texts) for texts in before]
        else:
            neighbours = [corpus.neighbours(text) for text in texts]
        self._index.loosen(key for text in texts for key in self._models.engine.variant_keys(text).values())
        if self._models.auto_dtype:  # the next ingest is to know by which name the index has what is done now
            remember(self._store, auto_dtype=self._models.auto_dtype)
        # One more step than texts: the commit is still to come.
        report = self._models.engine.ingest(
            texts, neighbours=neighbours, progress=lambda count: at_work(count / (len(texts) + 1))
        )
        # A text that comes again shares the KV, and may not be offered what that stands behind.
        behind: dict[str, dict[str, None]] = {}
        for entry in report.entries:
            others = (neighbours[entry.text][n] for n in entry.neighbours)
            behind.setdefault(entry.key, {}).update(dict.fromkeys(others))
        kv: list[list[KVEntry]] = [[] for _ in texts]
        for entry in report.entries:
            kv[entry.text].append(KVEntry(entry.key, tuple(behind[entry.key])))
        return report, kv

    def _prefill_lacking(
        self, document: str, corpus: Corpus, at_work: Callable[[float], None], stale: Container[int] = ()
    ) -> list[IngestReport]:
        """Prefill what an unchanged document lacks for this model: another one did it, or the KV is gone since.

        Args:
            stale: ids of chunks that lack theirs in any case.
        """
        chunks = self._index.chunks_of(document, self._models.signature)
        lacking = [n for n, chunk in enumerate(chunks) if chunk.id in stale or not self._has_kv(chunk)]
        if not lacking:
            return []
        texts = [chunk.text for chunk in chunks]
        before = texts_before(texts)
        report, kv = self._prefill([texts[n] for n in lacking], [before[n] for n in lacking], corpus, at_work)
        noted = {chunks[n].id: entries for n, entries in zip(lacking, kv, strict=True)}
        self._index.note_kv(noted, model=self._models.signature)
        return [report]

    def _has_kv(self, chunk: StoredChunk) -> bool:
        if not chunk.kv_keys or self._room_bytes <= 0:
            return bool(chunk.kv_keys)
        gone = sum(key not in self._store for key in chunk.kv_keys) * self._payload_bytes
        if gone > self._room_bytes:
            return True
        self._room_bytes -= gone
        return not gone

    def _loosen_learned(self, documents: Iterable[str]) -> None:
        """Write down what the store has of texts that are about to go with these documents, and no chunk knows of.

        It is there because questions had it stored, when they found nothing else of these texts. Its notes tell whose
        it is, whatever model made it, but not of very long texts: those are found for the model at hand.
        """
        gone = self._index.texts_only_in(documents)
        if not gone:
            return
        unknown = self._index.without_chunk(self._store.keys())
        for first in range(0, len(unknown), _NOTES_AT_ONCE):
            notes = self._store.notes(unknown[first : first + _NOTES_AT_ONCE])
            self._index.loosen([key for key, note in notes.items() if Note.from_bytes(note).text in gone])
        if self._models.loaded:
            self._index.loosen(key for text in gone for key in self._models.engine.variant_keys(text).values())

    def _delete(self, keys: Sequence[str]) -> None:
        for key in self._store.notes(list(keys)):
            self._store.delete(key)

    @cached_property
    def _room_bytes(self) -> float:
        """What may be put back of what the store has lost.

        In a store that is too small for everything, putting back what was evicted would evict the rest, each time. A
        chunk that is asked about is learned then. Where there is room again, as after the limit was raised, there is
        nothing against it.
        """
        stats = self._store.stats()
        return _FILLED * stats.size_limit_bytes - stats.bytes if stats.evictions else math.inf

    @cached_property
    def _payload_bytes(self) -> float:
        """Of one payload, about."""
        stats = self._store.stats()
        return max(1.0, stats.bytes / max(1, stats.chunks))


def _characters(split: SplitDocument) -> int:
    return sum(len(piece.text) for piece in split.pieces)


@dataclass
class _Outlook:
    """Says so early if the store is going to be too small: who waits for hours would rather know before."""

    limit_bytes: int
    characters: int
    _seen: int = 0
    _made_bytes: int = 0
    _said: bool = False

    def after(self, characters: int, made_bytes: int) -> None:
        """One more document is done, whose KV took so many bytes."""
        self._seen += characters
        self._made_bytes += made_bytes
        if self._said or self._made_bytes < _TELLING * self.limit_bytes:
            return
        if (expected := self._made_bytes * self.characters / max(1, self._seen)) > self.limit_bytes:
            self._said = True
            _log.warning(
                "these documents are going to take about %.3g GB of KV, and the store keeps %.3g GB at most: what is "
                "prefilled first will be evicted before the end. Stop and come back with a larger size limit, or with "
                "fewer documents, if that is not what you want",
                expected / 1e9,
                self.limit_bytes / 1e9,
            )


def _fraction(progress: Progress | None, name: str, done: int, documents: int) -> Callable[[float], None]:
    def at_work(fraction: float) -> None:
        if progress is not None:
            progress(name, done + fraction, documents)

    return at_work
