"""The algorithm: prefill a prompt of which some KV is already known, recomputing only the tokens that matter.

CacheBlend (Yao et al., arXiv 2405.16444, section 4), with exact causal masks and any selector:

1.  The prompt is cut into spans. Tokens are *known* (their KV is in the cache already: a prefix computed before),
    *reused* (their chunk's KV was computed elsewhere and is in the store) or *fresh* (everything else).
2.  Layer by layer, the reused keys and values stream in from the store; keys are rotated, once, to the positions they
    have in this prompt.
3.  A selector scores the reused tokens and the best `ratio` of them are recomputed beside the fresh ones. It may do so
    before the first layer (by the question's attention) or at some layer on the way (by how far the stored KV is from
    the recomputed one: HKVD tokens); the set of recomputed tokens only ever shrinks. Tokens that stand right behind
    the preamble they were computed behind are *settled*: their KV is a full prefill's, and they take no part.
4.  Each layer runs on the selected rows alone, against every position before them, and overwrites their KV.
5.  After the last layer the last row gives the logits, and the cache is what decoding goes on from.

Full prefill is the same loop with nothing reused; prefix caching with known tokens only; full reuse is ratio 0;
published CacheBlend is the HKVD selector over chunks that were prefilled alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ragblend.errors import InvalidSettingError, PrefillCancelledError
from ragblend.kv import LayerKV
from ragblend.model.cache import KVCache
from ragblend.model.decoder import Decoder, Rows


class LayerSource(Protocol):
    """Where reused KV comes from: `store.LayerLoader`, or anything that has a layer when it is asked for it."""

    def layer(self, index: int) -> LayerKV:
        """Unrotated KV of all reused tokens in prompt order; layers are asked for once, in order."""


@dataclass(frozen=True)
class Plan:
    """What is known about a prompt before the pass.

    ids: [tokens] int64.
    known: the first `known` positions have their KV in the cache already: a full prefill's, or an earlier blend's.
    reused: [tokens] bool; positions whose KV the source brings, in order. None of them is < known.
    settled: [tokens] bool; reused positions that stand in the very context they were computed in: never recomputed.
    chunks: (start, stop) of every reused chunk, in order; together they are the reused positions.
    question: (start, stop) of the tokens after the last chunk; may be empty.
    unlike: [tokens] bool; reused positions whose token repeats something before it here and did not where its KV was
        computed, or the other way round (see prompt.repeats).
    shallow: [tokens] bool; reused positions whose KV was computed with nothing but the head before it, at most, and
        which stand deeper here.
    """

    ids: Tensor
    known: int
    reused: Tensor
    settled: Tensor
    chunks: tuple[tuple[int, int], ...]
    question: tuple[int, int]
    unlike: Tensor
    shallow: Tensor


class Selector(Protocol):
    """Chooses the reused tokens to recompute: scores over them in, budget in, rows out."""

    def schedule(self, ratio: float) -> dict[int, float]:
        """Layer -> share of the reused tokens that is still recomputed from that layer on (descending shares).

        Until its first entry every reused token is recomputed; the last entry is the ratio itself.
        """

    def scores(self, state: Pass, layer: int) -> Tensor:
        """[tokens] fp32; the higher, the more a token matters. Only values at `state.kept` are looked at."""


class RatioChooser(Protocol):
    """Chooses the ratio of a pass when its tokens have been scored, before its first layer."""

    def __call__(self, scores: Tensor, state: Pass) -> float:
        """The ratio, 0..1. scores: [tokens] fp32, of which only the values at `state.kept` mean something."""


@dataclass
class Pass:
    """One prefill on its way through the layers; what a selector may look at.

    kept: [tokens] bool; reused tokens that are still being recomputed.
    fresh: [tokens] bool; those that are computed in any case: neither known nor reused, and the last one.
    angles: of every position, for each kind of layer (see Decoder.angles).
    positions: [rows] int64; the rows being computed: fresh and kept tokens, ascending. rows: the same for the decoder.
    hidden: [1, rows, hidden]; their hidden states before the current layer.
    row_layers: rows x layers computed so far, selection included.
    load_s: time spent waiting for reused KV and putting it in place.
    select_s: time spent choosing tokens; without that of loading layers, which every prefill spends sooner or later.
    """

    decoder: Decoder
    cache: KVCache
    plan: Plan
    source: LayerSource | None
    kept: Tensor
    positions: Tensor = field(init=False)
    rows: Rows = field(init=False)
    hidden: Tensor = field(init=False)
    row_layers: int = 0
    load_s: float = 0.0
    select_s: float = 0.0
    _loaded: int = 0

    def __post_init__(self) -> None:
        tokens = len(self.plan.ids)
        self.angles = self.decoder.angles(tokens)
        at = self.plan.reused.nonzero()[:, 0].to(self.decoder.device)
        self._reused_angles = {kind: (cos[:, at], sin[:, at]) for kind, (cos, sin) in self.angles.items()}
        fresh = ~self.plan.reused
        fresh[: self.plan.known] = False
        fresh[-1] = True  # the last position is always computed: its logits are what a prefill is for
        self.fresh = fresh
        self.positions = (fresh | self.kept).nonzero()[:, 0]
        self.rows = self.decoder.rows(self.positions, self.angles)
        self.hidden = self.decoder.embed(self.plan.ids[self.positions])

    def load(self, layer: int) -> None:
        """Bring the reused KV of every layer up to `layer` into the cache, keys rotated to their places here."""
        started = time.perf_counter()
        while self._loaded <= layer:
            if self.source is not None:
                stored = self.source.layer(self._loaded)
                key = self.decoder.rotate(self._loaded, stored.key, self._reused_angles)
                taken = 0
                for start, stop in self.plan.chunks:  # whole runs: several times faster than row by row
                    run = slice(taken, taken + stop - start)
                    self.cache.write(self._loaded, slice(start, stop), key[:, run], stored.value[:, run])
                    taken = run.stop
            self._loaded += 1
        self.load_s += time.perf_counter() - started

    @contextmanager
    def selecting(self) -> Iterator[None]:
        """Count the time spent in here as that of choosing tokens."""
        started, loaded_s = time.perf_counter(), self.load_s
        yield
        self.select_s += time.perf_counter() - started - (self.load_s - loaded_s)

    def narrow(self, keep: Tensor) -> None:
        """Go on with the fresh rows and the reused tokens in `keep` [tokens] bool, a subset of `kept`."""
        stay = (self.fresh | keep)[self.positions]
        self.kept = keep
        if not bool(stay.all()):
            self.positions = self.positions[stay]
            self.rows = self.decoder.rows(self.positions, self.angles)
            self.hidden = self.hidden[:, stay.to(self.hidden.device)]

    def run(self, layer: int) -> None:
        """Run a layer on the current rows."""
        self.hidden = self.decoder.layer(layer, self.hidden, self.rows, self.cache)
        self.row_layers += len(self.positions)

    def run_last(self, layer: int) -> None:
        """Run the last layer: every row leaves its KV for decoding, but only the last one's output is ever used."""
        if len(self.positions) > 1:
            kv = self.decoder.project(layer, self.hidden, self.rows)
            self.cache.write(layer, self.positions.to(self.decoder.device), kv.key, kv.value)
        self.row_layers += len(self.positions)
        self.hidden = self.hidden[:, -1:]
        last = self.decoder.rows(self.positions[-1:], self.angles)
        self.hidden = self.decoder.layer(layer, self.hidden, last, self.cache)


@dataclass(frozen=True)
class Prefilled:
    """What a prefill leaves behind, beside the filled cache.

    logits: [vocab] fp32 of the last position.
    recomputed: [tokens] bool; reused tokens recomputed in every layer.
    ratio: the share that they were meant to be of the reused tokens that are not settled.
    row_layers: rows x layers computed, selection included.
    select_s: time spent choosing tokens.
    """

    logits: Tensor
    recomputed: Tensor
    ratio: float
    row_layers: int
    select_s: float


@torch.inference_mode()
def prefill(
    decoder: Decoder,
    cache: KVCache,
    plan: Plan,
    source: LayerSource | None,
    selector: Selector,
    ratio: float | RatioChooser,
    cancelled: Callable[[], bool] = lambda: False,
) -> Prefilled:
    """Fill `cache` with the KV of every position of the plan and give the logits of the last one.

    Args:
        cache: capacity >= tokens; positions 0..known-1 filled.
        source: the reused tokens' KV; None when nothing is reused.
        ratio: share to recompute of the reused tokens that are not settled, 0..1; or what chooses it by their scores.
        cancelled: asked before each layer whether to give up; the cache is then worthless.

    Raises:
        CorruptPayloadError: from the source; the cache is then worthless, plan again without that chunk.
        InvalidSettingError: the selector looks at a layer that the model does not have, or scores too late for the
            ratio to be chosen; or what is chosen is no ratio.
        PrefillCancelledError: `cancelled` said so.
        ModelChangedError: the decoder's weights are not what they were.
    """
    decoder.check_unchanged()
    moved = plan.reused & ~plan.settled
    moved_tokens = int(moved.sum())
    state = Pass(decoder, cache, plan, source, kept=moved)
    scores: Tensor | None = None
    if callable(ratio):
        with state.selecting():
            scores, ratio = _scored_first(state, selector, ratio) if moved_tokens else (None, 0.0)
    schedule = selector.schedule(ratio) if moved_tokens else {}
    if max(schedule, default=0) >= decoder.n_layers:
        raise InvalidSettingError(f"{selector} looks at layer {max(schedule)}; the model has {decoder.n_layers}")
    for layer in range(decoder.n_layers):
        if cancelled():
            raise PrefillCancelledError(f"given up before layer {layer} of {decoder.n_layers}")
        state.load(layer)
        if layer in schedule and (budget := round(schedule[layer] * moved_tokens)) < int(state.kept.sum()):
            with state.selecting():
                if scores is None:
                    scores = selector.scores(state, layer) if budget else state.kept.float()
                state.narrow(_best(scores, state.kept, budget))
                scores = None
        if layer < decoder.n_layers - 1:
            state.run(layer)
        else:
            state.run_last(layer)
    logits = decoder.logits(state.hidden)[-1]
    decoder.wait()  # who times a prefill, or lets others in between parts of a long one, means the work itself
    return Prefilled(logits, state.kept, ratio, state.row_layers, state.select_s)


def _scored_first(state: Pass, selector: Selector, choose: RatioChooser) -> tuple[Tensor, float]:
    """The scores of the reused tokens, and the ratio chosen by them."""
    if set(selector.schedule(1.0)) != {0}:
        raise InvalidSettingError(f"{selector} scores tokens on the way; a ratio is chosen by scores known before it")
    state.load(0)
    scores = selector.scores(state, 0)
    ratio = choose(scores, state)
    if not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
        raise InvalidSettingError(f"{choose} chose the ratio {ratio!r}: it must be a number from 0 to 1")
    return scores, ratio


def _best(scores: Tensor, among: Tensor, budget: int) -> Tensor:
    """[tokens] bool: the `budget` highest scores among the tokens in `among`; ties go to the earlier token."""
    best = torch.zeros_like(among)
    candidates = among.nonzero()[:, 0]
    order = torch.sort(scores.cpu()[candidates], descending=True, stable=True).indices
    best[candidates[order[:budget]]] = True
    return best


def full_plan(ids: Sequence[int] | Tensor, known: int = 0) -> Plan:
    """A plan that reuses nothing behind `known` positions."""
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    nothing = torch.zeros(len(tokens), dtype=torch.bool)
    return Plan(tokens, known, nothing, nothing, (), (known, len(tokens)), nothing, nothing)
