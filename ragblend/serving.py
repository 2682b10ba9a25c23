"""How the chunks of a prompt are served: by which stored variant, or by none; and the plan of a pass that comes of it.

What is stored is a hint until it has been opened: it may be another model's, damaged, or gone by then. That chunk is
then served by another variant, or computed like any other text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.blend.prefill import Plan
from ragblend.blend.variants import SHALLOW
from ragblend.chunks import Choice, StoredChunks
from ragblend.errors import StoreError
from ragblend.model.decoder import Decoder
from ragblend.prompt.layout import Layout, Span
from ragblend.report import ChunkStatus, ChunkUse
from ragblend.store.kvstore import KVStore
from ragblend.store.payload import PayloadReader

_READ = ("hit", "cut")  # statuses of spans whose KV is read


@dataclass(frozen=True)
class Served:
    """What the chunks of one prompt are served by.

    uses: of every chunk, in prompt order. readers: an open one for each that is read, in prompt order; close them.
    """

    plan: Plan
    uses: tuple[ChunkUse, ...]
    readers: list[PayloadReader]

    @property
    def tokens(self) -> list[int]:
        """How many leading tokens of each reader's chunk stand in the prompt."""
        return [use.stop - use.start for use in self.uses if use.status in _READ]

    def close(self) -> None:
        """Close the readers."""
        for reader in self.readers:
            reader.close()


class Serving:
    """Looks up the chunks of one model's prompts in a store. Thread-safe.

    todays_head: gives the ids of the head as they are today, where it has a date in it; else None.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        chunks: StoredChunks,
        todays_head: Callable[[], tuple[int, ...]] | None,
    ) -> None:
        self._decoder, self._store, self._chunks, self._todays_head = decoder, store, chunks, todays_head

    def serve(self, layout: Layout, ids: Tensor, known: int, corrupt: set[str], *, read: bool) -> Served:
        """Find and open what serves each chunk.

        Args:
            ids: [tokens] int64, the prompt's.
            known: so many leading tokens have exact or blended KV in RAM.
            corrupt: keys whose payloads cannot be used; those that are found to be so are added.
            read: whether stored KV is of use at all; at ratio 1 it is not.
        """
        while True:
            seen = len(corrupt)
            todays_head = () if self._todays_head is None else self._todays_head()
            choices = self._chunks.choose(layout.ids, layout.chunks, corrupt, todays_head)
            uses, readers = self._look_up(layout.chunks, choices, known, corrupt, read=read)
            served = Served(_plan(layout, ids, known, uses, choices), uses, readers)
            if len(corrupt) == seen:
                return served
            served.close()  # another variant may be whole

    def _look_up(
        self, spans: Sequence[Span], choices: Sequence[Choice], known: int, corrupt: set[str], *, read: bool
    ) -> tuple[tuple[ChunkUse, ...], list[PayloadReader]]:
        """How each chunk span will be served, and an open reader for each hit, in prompt order."""
        wanted = [choice.key for choice, span in zip(choices, spans, strict=True) if read and span.stop > known]
        opened = dict(zip(wanted, self._store.open_many(wanted), strict=True))
        uses: list[ChunkUse] = []
        readers: list[PayloadReader] = []
        for choice, span in zip(choices, spans, strict=True):
            key = choice.key
            status: ChunkStatus
            if span.stop <= known:
                status = "prefix"
            elif not read:
                status = "recomputed" if choice.stored else "miss"
            else:
                reader, status = opened[key]
                if status == "corrupt":
                    corrupt.add(key)
                if reader is not None and not self._fits(reader, span):
                    reader.close()
                    corrupt.add(key)
                    self.forget(key)
                if key in corrupt:
                    status = "corrupt"
                elif reader is not None:
                    readers.append(reader)
                    status = "cut" if span.whole else "hit"
            uses.append(ChunkUse(key, span.start, span.stop, status, choice.variant))
        return tuple(uses), readers

    def forget(self, key: str) -> None:
        """Delete what turned out corrupt. On a locked, full or read-only disk it stays, and stays corrupt."""
        with contextlib.suppress(StoreError):
            self._store.delete(key)

    def _fits(self, reader: PayloadReader, span: Span) -> bool:
        return (
            reader.n_tokens == len(span.whole or span)
            and reader.dtype == self._decoder.dtype
            and reader.shapes == self._decoder.shapes
        )


def _plan(layout: Layout, ids: Tensor, known: int, uses: Sequence[ChunkUse], choices: Sequence[Choice]) -> Plan:
    """Sort the tokens of a prompt into known, reused and fresh."""
    hits = [(use, choice) for use, choice in zip(uses, choices, strict=True) if use.status in _READ]
    for use, _ in hits:
        # Payloads are read whole: what is known of a chunk's beginning is read again.
        if use.start < known < use.stop:
            known = use.start
    reused, settled, unlike, shallow = (torch.zeros(len(ids), dtype=torch.bool) for _ in range(4))
    for use, choice in hits:
        reused[use.start : use.stop] = True
        settled[use.start : use.stop] = choice.exact
        unlike[use.start : use.stop] = torch.from_numpy(choice.unlike)
        shallow[use.start : use.stop] = choice.variant in SHALLOW and not choice.exact
    chunks = tuple((use.start, use.stop) for use, _ in hits)
    return Plan(ids, known, reused, settled, chunks, layout.question, unlike, shallow)
