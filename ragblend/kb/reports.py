"""What a knowledge base says of its work: an ingest, an answer, counts, and what a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ragblend.kb.files import Skipped
from ragblend.report import BlendReport
from ragblend.store.kvstore import VerifyReport

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore


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
        skipped: files that hold no text we can get at, or cannot be read.
        refreshed: chunks prefilled again, because a text that they were prefilled behind has gone from the corpus.
        pruned: documents that were forgotten: their files hold no text any more, or are gone, where that was asked for.
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
        policy, chunk_tokens: what chunks are prefilled behind, and how long they are at most; as an ingest that says
            nothing else would have it.
        calibrations: what `ragblend calibrate` found, for each model and policy; see evaluation.calibrate.
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
    policy: str
    chunk_tokens: int
    calibrations: list[dict[str, Any]]


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
