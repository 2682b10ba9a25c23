"""The chunks of an engine in its store: how they are named, made, checked, chosen for a place, and found by their text.

A chunk's name, its key, says which model made its KV and what it stands behind as far as that is the same for all
chunks. What else it stands behind is kept in its note (see blend.variants). Beside the KV there are records of the
chunks' texts, by which they are found in a prompt (see prompt.match).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ragblend.audit import CHECKED_LAYERS, FOREIGN, deviation
from ragblend.blend.drift import LEAST_TOKENS, MOST_TOKENS, PROMPT_TOKENS, Deepened, Drift, Placed, measure
from ragblend.blend.precompute import InMemory, Precomputer
from ragblend.blend.prefill import LayerSource, Plan
from ragblend.blend.variants import (
    CONTEXT_TOKENS,
    FILLER,
    NEW_SHARE,
    SHALLOW,
    VARIANTS,
    Context,
    Name,
    Note,
    Policy,
    best,
    contexts,
    digest,
)
from ragblend.errors import CorruptPayloadError, IngestError, StoreError
from ragblend.kv import ChunkKV
from ragblend.model.decoder import Decoder
from ragblend.prompt.chunk import chunk_key
from ragblend.prompt.layout import Span
from ragblend.prompt.match import RECORD_BYTES, ChunkIndex, is_indexable, record_for
from ragblend.prompt.repeats import Ids, Mask, repeated
from ragblend.prompt.template import PromptTokenizer
from ragblend.store.kvstore import LABEL_BYTES, KVStore
from ragblend.store.loader import LayerLoader
from ragblend.store.payload import PayloadReader

_log = logging.getLogger(__name__)

_TOGETHER = 64  # texts of which all are prefilled behind the head before the first one is behind another
_TEXTS_AT_ONCE = 256
_LOOKED_AT = 64 * _TEXTS_AT_ONCE  # texts of a store among which those of this engine are looked for
_DRIFT = "drift_"  # how the names of those of a store's documents begin that say what was measured
_MAX_NOTED_CHARS = 10_000  # longer texts are not found by their beginnings: a note must stay a note


class Entry(NamedTuple):
    """One stored variant of an ingested text.

    text: number of the text. variant: what it was prefilled behind. key: its name in the store.
    neighbours: numbers of the texts, of those offered for it, that it was prefilled behind, the one right before it
        first; () for the head and the filler. A repeated text shares the first one's variants, whatever it is offered.
    """

    text: int
    variant: Name
    key: str
    neighbours: tuple[int, ...]


class Choice(NamedTuple):
    """The variant that serves a chunk span.

    stored: whether it is there. exact: it stands behind the very ids that it was prefilled behind.
    repeats, unlike: [span tokens] bool; tokens that are repetitions here; those that are here and were none there, or
        the other way round.
    """

    variant: Name
    key: str
    stored: bool
    exact: bool
    repeats: Mask
    unlike: Mask


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        computed, already_stored, empty: texts with something to compute, with everything there, and without tokens;
            together all texts that were seen. A repeated text counts as already stored.
        tokens, bytes: of the KV that was computed, over all variants.
        seconds: of that. drift_s: spent on measuring the drift besides, which a store mostly needs once.
        entries: the variants of each text, in order.
    """

    computed: int
    already_stored: int
    empty: int
    tokens: int
    bytes: int
    seconds: float
    entries: tuple[Entry, ...] = ()
    drift_s: float = 0.0


class _Wanted(NamedTuple):
    """A text to ingest. offered: ids of the texts that it may be prefilled behind. contexts: of its variants."""

    number: int
    text: str
    ids: Sequence[int]
    offered: Sequence[Sequence[int]]
    contexts: Sequence[Context]


def _blocks(wanted: Iterator[_Wanted]) -> Iterator[list[_Wanted]]:
    """_TOGETHER at a time. Where the next one is none, or cannot be had, those before it come first."""
    while True:
        block: list[_Wanted] = []
        try:
            for text in itertools.islice(wanted, _TOGETHER):
                block.append(text)
        except Exception:
            if block:
                yield block
            raise
        if not block:
            return
        yield block


class _Writer:
    """Puts chunk KV into the store: a tenth of the time of computing it, and spent while the next is computed.

    written: chunks handed over. notes: of what may not have arrived yet.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragblend-ingest")
        self._last: Future[int] | None = None
        self._bytes = self.written = 0
        self.notes: dict[str, bytes] = {}

    def write(self, key: str, layers: ChunkKV, note: Note, *, overwrite: bool) -> None:
        """Hand over one chunk. Waits for the one before, and raises what became of that."""
        self.finish()
        put = partial(self._store.put, note=note.to_bytes(), overwrite=overwrite)
        self._last, self.notes = self._thread.submit(put, key, layers), {key: note.to_bytes()}
        self.written += 1

    def finish(self) -> int:
        """Wait until everything is stored; how many bytes that was."""
        if self._last is not None:
            last, self._last = self._last, None
            self._bytes += last.result()
        return self._bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


class StoredChunks:
    """The chunks of one model behind one preamble, under one policy and in one namespace. Thread-safe.

    fingerprint: of model and tokenizer. preamble_ids: the head that chunks are prefilled behind.
    made: names all that decides what their KV is: model, preamble, policy and namespace.
    drift: what is known of it, see blend.drift; None: it is left alone.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: PromptTokenizer,
        store: KVStore,
        *,
        fingerprint: str,
        preamble_ids: tuple[int, ...],
        policy: Policy,
        namespace: str,
        correct_drift: bool,
    ) -> None:
        self._decoder, self._prompts, self._store = decoder, prompts, store
        self._fingerprint, self.preamble_ids = fingerprint, preamble_ids
        self._policy, self._namespace = policy, namespace
        self._label_key = hashlib.blake2b(f"{fingerprint}:{preamble_ids}".encode()).digest()
        self._separator = prompts.encode_text("\n\n")
        self._filler = prompts.encode_text(FILLER)[:CONTEXT_TOKENS]
        self._precomputer = Precomputer(decoder, preamble_ids)
        about = repr((fingerprint, preamble_ids, policy, namespace)).encode()
        self.made = hashlib.blake2b(about, digest_size=16).hexdigest()
        self._drift_name = _DRIFT + self.made
        self._drift_lock = threading.Lock()
        self._drift_lacks = 0  # tokens to be prefilled before it is worth while to look for a sample
        self._drift_stamp = store.document_stamp(self._drift_name)
        self.drift = self._kept_drift() if correct_drift else None
        self._index = ChunkIndex()
        self._index_lock = threading.Lock()
        self._index_version = -1

    def ingest(
        self,
        texts: Iterable[str],
        *,
        neighbours: Sequence[Sequence[str]] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> IngestReport:
        """See RagBlend.ingest."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise IngestError(f"ingest takes a list of texts, not {type(texts).__name__}")
        if neighbours is not None and isinstance(texts, Sized) and len(texts) != len(neighbours):
            raise IngestError(f"neighbours for {len(neighbours)} texts, and {len(texts)} texts: give one list each")
        started = time.perf_counter()
        entries: list[Entry] = []
        settled: set[str] = set()
        computed: set[int] = set()
        seen = empty = tokens = 0
        with _Writer(self._store) as writer:
            for block in _blocks(self._wanted(texts, neighbours)):
                steps = [(text, context) for text in block for context in text.contexts]
                # What others stand behind first: it is there by then.
                steps.sort(key=lambda step: len(step[1].sources) > 0)
                try:
                    for n, (text, context) in enumerate(steps):
                        before = writer.written
                        entries.append(self._variant(text, context, writer, settled))
                        settled.add(entries[-1].key)
                        if writer.written > before:
                            computed.add(text.number)
                            tokens += len(text.ids)
                        if progress is not None:
                            progress(seen + (n + 1) * len(block) // len(steps))
                finally:
                    # A text that is remembered and not stored would be a miss: no harm, so the order does not matter.
                    self._remember([record_for(text.text) for text in block if is_indexable(text.text)])
                seen += len(block)
                empty += sum(not text.ids for text in block)
                if progress is not None and not steps:
                    progress(seen)
            n_bytes = writer.finish()
        entries.sort(key=lambda entry: entry.text)
        stored = seen - empty - len(computed)
        seconds = time.perf_counter() - started
        self._measure_drift()
        drift_s = time.perf_counter() - started - seconds
        return IngestReport(len(computed), stored, empty, tokens, n_bytes, seconds, tuple(entries), drift_s)

    def _measure_drift(self) -> None:
        """Measure the drift, unless that was done or there are too few chunks yet.

        Where little of what there was could be measured, that is done again when the store has doubled.
        """
        with self._drift_lock:
            if self.drift is None or self._drift_lacks > 0 or self._is_measured(self.drift):
                return
            self._look_for_drift()
            if self._is_measured(self.drift):
                return
            sample = self._sample()
            self._drift_lacks = LEAST_TOKENS - sum(map(len, sample))
            if self._drift_lacks > 0:
                return
            measured = Drift(self._decoder.shapes)
            while sample:
                del sample[: self._measure_together(measured, sample)]
            # Never another one of as many chunks: that would go by the same name, see `drift_known`.
            measured = max(self.drift, measured, key=lambda drift: drift.chunks)
            measured.measured, measured.entries = True, len(self._store)
            self.drift = measured
            try:
                self._store.save_document(self._drift_name, measured.as_dict())
            except StoreError as error:  # the next ingest measures it again
                _log.warning("the drift that was measured could not be kept: %s", error)

    def _is_measured(self, drift: Drift) -> bool:
        return drift.settled or (drift.measured and len(self._store) < 2 * drift.entries)

    def _sample(self) -> list[list[int]]:
        """Ids of some chunks of this engine's, in no order: labels are as good as random."""
        sample: list[list[int]] = []
        tokens = 0
        records = sorted(self._store.remembered(), key=self._label)[:_LOOKED_AT]
        for first in range(0, len(records), _TEXTS_AT_ONCE):
            for text in self.texts_of(records[first : first + _TEXTS_AT_ONCE]).values():
                if not self.stored(text):  # but under another policy or in another namespace
                    continue
                sample.append(ids := self._prompts.encode_text(text))
                tokens += len(ids)
                if tokens >= MOST_TOKENS:
                    return sample
        return sample

    def _measure_together(self, drift: Drift, sample: Sequence[Sequence[int]]) -> int:
        """Measure it on a prompt of the first of these chunks, each served by the variant that would be taken there.

        Chunks that have something in common with what stands before them are passed over: what happens to them is not
        what happens to all.

        Returns:
            How many chunks that were, at least one.
        """
        ids = list(self.preamble_ids)
        spans: list[Span] = []
        for chunk in sample:
            room = min(PROMPT_TOKENS * (1 if len(spans) > 1 else 2), self._decoder.context_window_tokens)
            if len(ids) + len(chunk) + len(self._separator) > room:
                break
            spans.append(Span("chunk", len(ids), len(ids) + len(chunk)))
            ids += [*chunk, *self._separator]
        if len(spans) < 2 or self._decoder.is_long(len(ids)):  # what is stored is a short prompt's
            return max(1, len(spans))
        placed = []
        for span, choice in zip(spans, self.choose(np.array(ids), spans), strict=True):
            if not choice.stored or choice.exact or choice.repeats.mean() >= NEW_SHARE:
                continue
            if (reader := self._store.open(choice.key)) is None:
                continue
            with reader, contextlib.suppress(CorruptPayloadError):  # who asks for it finds that, too
                if self._fits(reader):
                    kv = [reader.read_layer_kv(layer) for layer in range(self._decoder.n_layers)]
                    placed.append(Placed(span.start, span.stop, choice.variant in SHALLOW, kv))
        if placed:
            with self._decoder.turn:
                measure(drift, self._decoder, ids, len(self.preamble_ids), placed)
        return len(spans)

    def _look_for_drift(self) -> None:
        """Take what another process has measured since: that comes a while after the last text."""
        if self.drift is None or self.drift.settled:
            return
        stamp = self._store.document_stamp(self._drift_name)
        if stamp != self._drift_stamp:
            self._drift_stamp = stamp
            if (kept := self._kept_drift()).measured:  # or it might replace what this process measures just now
                self.drift = kept

    def _kept_drift(self) -> Drift:
        return Drift.from_dict(self._store.document(self._drift_name), self._decoder.shapes)

    @property
    def drift_known(self) -> int:
        """On how many chunks the drift was measured: what was blended by less is not the same."""
        return 0 if self.drift is None else self.drift.chunks

    def source(self, stored: LayerSource, plan: Plan) -> LayerSource:
        """What is stored of a plan's reused tokens, with what it lacks where they stand."""
        if self.drift is None:
            return stored
        return Deepened(stored, self.drift, plan, len(self.preamble_ids), self._decoder)

    def _wanted(self, texts: Iterable[str], neighbours: Sequence[Sequence[str]] | None) -> Iterator[_Wanted]:
        """The texts to ingest, each with the variants that are made of it."""
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise IngestError(f"ingest takes texts, not {type(text).__name__}")
            if neighbours is not None and number >= len(neighbours):
                raise IngestError(f"neighbours for {len(neighbours)} texts, and more texts: give one list each")
            others = () if neighbours is None else neighbours[number]
            listed = isinstance(others, Sequence) and not isinstance(others, str)
            if not listed or not all(isinstance(other, str) for other in others):
                raise IngestError(f"neighbours are a list of texts for each text, not {others!r:.80}")
            ids = self._prompts.encode_text(text := text.strip())
            offered = [self._prompts.encode_text(other.strip())[:CONTEXT_TOKENS] for other in others] if ids else []
            yield _Wanted(number, text, ids, offered, self.contexts(ids, offered) if ids else [])

    def _variant(self, text: _Wanted, context: Context, writer: _Writer, settled: Collection[str]) -> Entry:
        """One of a text's variants, made where it is not there, or behind something that is not offered any more.

        settled: keys of the variants that this ingest has made or found as they should be. A text that comes again
            with other neighbours, as the last lines of every document do, leaves them alone.
        """
        key, sources = self.key(text.ids, context.name), context.sources
        note = (self._store.notes([key]) | writer.notes).get(key)
        noted = () if note is None else Note.from_bytes(note, len(text.ids)).sources
        numbers = {digest(other): n for n, other in reversed(list(enumerate(text.offered)))} if noted else {}
        if noted and (key in settled or all(source in numbers for source in noted)):
            sources = tuple(numbers[source] for source in noted if source in numbers)
        elif note is None or sources:
            made = self.kv(text.ids, context, text.text, [text.offered[n] for n in sources])
            writer.write(key, *made, overwrite=note is not None)
        return Entry(text.number, context.name, key, sources)

    def stored(self, text: str) -> dict[Name, str]:
        """The variants of a text that this engine would use and the store has, with their keys."""
        keys = self.keys(text)
        notes = self._store.notes(list(keys.values()))
        return {name: key for name, key in keys.items() if key in notes}

    def keys(self, text: str) -> dict[Name, str]:
        """Under which keys `ingest` may store a text, and answers look for it."""
        ids = self._prompts.encode_text(text.strip())
        return self._keys(ids) if ids else {}

    def _keys(self, ids: Sequence[int] | np.ndarray) -> dict[Name, str]:
        return {name: self.key(ids, name) for name in VARIANTS[self._policy]}

    def choose(
        self, ids: Ids, spans: Sequence[Span], corrupt: Collection[str] = (), todays_head: tuple[int, ...] = ()
    ) -> list[Choice]:
        """The variant to serve each chunk span of a prompt with.

        Args:
            ids: [tokens] int64, the prompt's.
            corrupt: keys that are chosen only where there is no other.
            todays_head: of the head as it is today, where it has a date in it; else ().
        """
        chunks = [span.whole or ids[span.start : span.stop] for span in spans]  # a cut one is stored whole
        keys = [self._keys(chunk) for chunk in chunks]
        notes = self._store.notes(list(dict.fromkeys(key for each in keys for key in each.values())))
        long = self._decoder.is_long(len(ids))
        here = repeated(ids, [(span.start, span.stop) for span in spans])
        choices = []
        for each, chunk, span, repeats in zip(keys, chunks, spans, here, strict=True):
            usable = {name: key for name, key in each.items() if key in notes and key not in corrupt}
            noted = {name: Note.from_bytes(notes[key], len(chunk)) for name, key in usable.items()}
            stored = {name: note.beginning(len(span)) for name, note in noted.items()}
            behind = digest(ids[: span.start])
            # Behind the head of another day a chunk is not exact, but nothing fits better.
            dated = 0 < span.start == len(todays_head) and tuple(ids[: span.start].tolist()) == todays_head
            fits = best(stored, self._policy, repeats, digest(self.preamble_ids) if dated else behind)
            if fits is not None:
                note = stored[fits]
                exact = note.behind == behind and self._decoder.is_long(span.stop) == long
                choices.append(Choice(fits, each[fits], True, exact, repeats, note.repeats != repeats))
            else:
                lost = next((name for name in each if each[name] in corrupt), next(iter(each)))
                choices.append(Choice(lost, each[lost], False, False, repeats, repeats))
        return choices

    def contexts(self, ids: Sequence[int], offered: Sequence[Sequence[int]] = ()) -> list[Context]:
        """The variants to make of a chunk. offered: ids of other texts, see `variants.contexts`."""
        room = self._decoder.context_window_tokens - len(self.preamble_ids) - len(ids)
        return contexts(self._policy, ids, self._filler, offered, self._separator, room)

    def key(self, ids: Sequence[int] | np.ndarray, variant: Name) -> str:
        """The name of a chunk's variant in the store.

        It holds what the chunk was prefilled behind as far as that is the same for all chunks. What it was for this
        one is kept in its note: a prompt that looks for the chunk cannot know it.
        """
        filler = (*self._filler, *self._separator) if variant == "filler" else ()
        own = variant in ("alone", "head", "filler")
        before = (*self.preamble_ids, *filler)
        return chunk_key(self._fingerprint, before, ids, "" if own else f"{variant}:{self._namespace}")

    def kv(
        self, ids: Sequence[int], context: Context, text: str = "", sources: Iterable[Sequence[int]] = ()
    ) -> tuple[ChunkKV, Note]:
        """A chunk's KV for one of its variants, and what is remembered beside it.

        sources: ids of the texts that the context names as its sources.
        """
        self._drift_lacks -= len(ids)
        label = self._label_of(text)
        noted = text if len(text) <= _MAX_NOTED_CHARS else ""
        note = Note.of((*self.preamble_ids, *context.ids), ids, label, noted, sources)
        # A neighbour's own KV right behind the head is the beginning of what this chunk is prefilled behind.
        neighbour = context.ids[: context.first_tokens]
        if not neighbour:
            with self._decoder.turn:
                return self._precomputer.chunk_kv(ids, context.ids), note
        with self._stored_source(self.key(neighbour, "head")) as stored, self._decoder.turn:
            if stored is not None:
                try:
                    return self._precomputer.chunk_kv(ids, context.ids, stored, len(neighbour)), note
                except CorruptPayloadError as error:
                    _log.warning("%s", error)
            # As it would be stored, or a chunk's KV would depend on whether its neighbour happened to be stored first.
            made = InMemory(self._precomputer.chunk_kv(neighbour), self._decoder.device)
            return self._precomputer.chunk_kv(ids, context.ids, made, len(neighbour)), note

    @contextlib.contextmanager
    def _stored_source(self, key: str) -> Iterator[LayerSource | None]:
        """What is stored under a key, as a source for a prefill; None where nothing of this model is."""
        reader = self._store.open(key)
        if reader is None:
            yield None
            return
        with reader:
            if not self._fits(reader):
                yield None
                return
            with LayerLoader([reader], device=self._decoder.device, dtype=self._decoder.dtype) as loader:
                yield loader

    def _fits(self, reader: PayloadReader) -> bool:
        return reader.shapes == self._decoder.shapes and reader.dtype == self._decoder.dtype

    def _label(self, record: bytes) -> bytes:
        """By which KV of a text is found that this model made behind this preamble."""
        return hashlib.blake2b(record, key=self._label_key, digest_size=LABEL_BYTES).digest()

    def _label_of(self, text: str) -> bytes:
        return self._label(record_for(text)) if is_indexable(text) else bytes(LABEL_BYTES)

    def _remember(self, records: Sequence[bytes]) -> None:
        if records:
            self._index.add(records)
            self._store.remember(records)

    def expect(self, texts: Iterable[str]) -> None:
        """See RagBlend.expect. A record is kept in the store when the text is learned."""
        stripped = (text.strip() for text in texts)
        self._index.add(record_for(text) for text in stripped if is_indexable(text))

    def learn(self, ids: Sequence[int], text: str) -> None:
        """Store the KV of a chunk that was missed.

        Behind the filler, where the policy would have a text of the corpus: what stood beside it in one prompt may be
        anybody's.
        """
        for context in self.contexts(ids):
            key = self.key(ids, context.name)
            if key not in self._store:
                layers, note = self.kv(ids, context, text)
                self._store.put(key, layers, note=note.to_bytes())
        if is_indexable(text):
            self._remember([record_for(text)])

    def foreign(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The keys of a chunk's stored KV, if that is not what this model makes of it. It is then forgotten altogether.

        Checked is what was prefilled behind the head or the filler; what else it was behind is known by a digest only.
        """
        for context in self.contexts(ids):
            reader = self._store.open(self.key(ids, context.name))
            if reader is None:
                continue
            with reader:
                layers = range(min(CHECKED_LAYERS, self._decoder.n_layers))
                try:
                    stored = [reader.read_layer_kv(layer) for layer in layers]
                except CorruptPayloadError as error:  # no model's; who asks for it next finds that, too
                    _log.warning("%s", error)
                    continue
            if deviation(stored, self.kv(ids, context)[0][: len(stored)]) > FOREIGN:
                return tuple(key for key in self._keys(ids).values() if self._store.delete(key))
            return ()
        return ()

    def known_texts(self) -> ChunkIndex:
        """The index of chunk texts, with what other processes added since."""
        with self._index_lock:
            version = self._store.remembered_version()
            if version != self._index_version:
                since = self._store.remembered(after=max(0, self._index_version))
                # Another version's records would match nothing.
                self._index.add(record for record in since if len(record) == RECORD_BYTES)
                self._index_version = version
            self._look_for_drift()
        return self._index

    def texts_of(self, records: Sequence[bytes]) -> dict[bytes, str]:
        """The texts of those records for which this model's KV is stored."""
        by_label = {self._label(record): record for record in records}
        notes = (Note.from_bytes(note) for note in self._store.notes_labelled(list(by_label)).values())
        return {by_label[note.label]: note.text for note in notes if note.label in by_label and note.text}

    def payloads_of(self, texts: Sequence[str]) -> Iterator[Path]:
        """For each text the payload of the variant that it most likely takes: that depends on the prompt to come."""
        names = VARIANTS[self._policy]
        for place, text in enumerate(texts):
            ids = self._prompts.encode_text(text.strip())
            # The first one is likely to come right behind the head.
            order = names if place else sorted(names, key=lambda name: name != "head")
            paths = self._store.paths([self.key(ids, name) for name in order] if ids else [])
            yield from list(paths.values())[:1]
