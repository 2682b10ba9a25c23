"""What a request did: counts and times, with their units in the names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ChunkStatus = Literal["hit", "cut", "prefix", "miss", "corrupt", "recomputed"]
"""hit: KV came from the store. cut: so it did, but only the chunk's beginning stands in the prompt, and of that alone.
prefix: all of it stood in the in-memory prefix cache. miss: not in the store, computed fresh. corrupt: stored, but
unusable, computed fresh. recomputed: stored, but ratio 1 asked for a full prefill."""


@dataclass(frozen=True)
class ChunkUse:
    """How one chunk span of the prompt was served.

    key: its name in the store; of a cut chunk, the name of the whole one. Token range is half-open: start, stop.
    variant: what the stored KV was prefilled behind (see blend.variants); of a miss, what was looked for first.
    """

    key: str
    start: int
    stop: int
    status: ChunkStatus
    variant: str = ""


@dataclass(frozen=True)
class BlendReport:
    """How a prompt was prefilled and decoded.

    Every prompt token is counted once: prompt_tokens == prefix_tokens + reused_tokens + fresh_tokens.

    Attributes:
        prompt_tokens: tokens in the prompt.
        prefix_tokens: leading tokens whose KV was found in the in-memory prefix cache.
        prefix_is_exact: whether that KV is a full prefill's, bit for bit, or that of an earlier blend.
        reused_tokens: tokens whose KV was read from the store.
        recomputed_tokens: of reused_tokens, those that were recomputed in every layer.
        fresh_tokens: tokens computed because nothing was stored for them: glue, question, misses.
        chunks: how each chunk span was served, in prompt order.
        ratio: the recompute ratio that was asked for, or chosen.
        least_ratio: what the guard of audits has raised it to, at least; 0 where it has not stepped in.
        selector: the selector's name and parameters.
        rows_fraction: token rows computed over all layers, selection included, over those of a full prefill.
        bytes_read: payload bytes read from the store.
        tokenise_s, lookup_s: prompt to ids; ids to open payload readers.
        load_s, stall_s: time the background reader worked; time the pass waited for it.
        select_s: time spent choosing tokens, loading apart (part of prefill_s).
        prefill_s: from the first layer to the last logits.
        ttft_s: from the prompt string to the first token, all of the above included.
        decode_tokens, decode_s: tokens after the first one, and the time they took.
        finish_reason: "stop", "length", "cancelled", or "" while the answer is still being made.
    """

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    prefix_is_exact: bool = True
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    fresh_tokens: int = 0
    chunks: tuple[ChunkUse, ...] = field(default_factory=tuple)
    ratio: float = 0.0
    least_ratio: float = 0.0
    selector: str = ""
    rows_fraction: float = 1.0
    bytes_read: int = 0
    tokenise_s: float = 0.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    stall_s: float = 0.0
    select_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    finish_reason: str = ""

    @property
    def hits(self) -> int:
        """Whole chunks that were not computed from scratch."""
        return sum(use.status in ("hit", "prefix") for use in self.chunks)

    @property
    def cuts(self) -> int:
        """Chunks of which only the beginning stands in the prompt, and was not computed from scratch."""
        return sum(use.status == "cut" for use in self.chunks)

    @property
    def misses(self) -> int:
        """Chunk spans for which nothing usable was stored."""
        return sum(use.status in ("miss", "corrupt") for use in self.chunks)

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON; hits, cuts and misses included."""
        return {**asdict(self), "hits": self.hits, "cuts": self.cuts, "misses": self.misses}
