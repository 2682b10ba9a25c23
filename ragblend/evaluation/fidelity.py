"""How close each way of answering comes to a full prefill, and to the right answer.

Every strategy answers the same prompts. The reference is a full prefill's own greedy answer: at each of its tokens the
next-token distributions are compared (KL divergence, teacher forced, so that one early difference is not counted ever
after), and beside that the answers themselves, with the full prefill's and with the gold ones.

Chunks are ingested as the corpus they are: the neighbours of a chunk are looked for among the chunks of all questions.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ragblend.blend.divergence import agreement, kl_divergence
from ragblend.blend.variants import Policy, neighbours_of, texts_before
from ragblend.engine import RagBlend, Ready
from ragblend.errors import InvalidSettingError, whole_number
from ragblend.evaluation.metrics import (
    Statistic,
    bootstrap_interval,
    estimate,
    exact_match,
    rouge_l,
    token_f1,
)
from ragblend.evaluation.strategies import Question, check_reused, engines, machine, parsed, read_questions
from ragblend.kb.embedder import Embedder
from ragblend.model.decoder import Decoder
from ragblend.model.generate import DecodeSettings
from ragblend.model.sources import load_model
from ragblend.prompt.template import PromptTokenizer
from ragblend.store.kvstore import KVStore

DEFAULT_STRATEGIES = ("reuse", "cacheblend", "blend")
ANSWER_TOKENS = 32  # of the answers that are compared with the gold ones

# Number in the result -> values of a question it is made from, and how.
_NUMBERS: dict[str, tuple[str, Statistic]] = {
    "kl": ("kl", "mean"),
    "kl_median": ("kl", "median"),
    "kl_p95": ("kl", "p95"),
    "kl_first": ("kl_first", "mean"),
    "agreement": ("agreement", "mean"),
    "exact": ("exact", "mean"),
    "em": ("em", "mean"),
    "f1": ("f1", "mean"),
    "rouge_l": ("rouge_l", "mean"),
    "rows_fraction": ("rows_fraction", "mean"),
    "ttft_s": ("ttft_s", "median"),
    "select_s": ("select_s", "median"),
}


class Entry(NamedTuple):
    """One strategy at one ratio."""

    strategy: str
    ratio: float

    @property
    def name(self) -> str:
        return f"{self.strategy}@{self.ratio:g}"


def entries(strategies: Sequence[str], ratios: Sequence[float]) -> list[Entry]:
    """The full prefill, and every strategy at every ratio that it takes notice of.

    Raises:
        InvalidSettingError: an unknown strategy, a ratio outside 0..1, or none at all.
    """
    if not strategies or not ratios:
        raise InvalidSettingError("name at least one strategy and one ratio")
    made = [Entry("full", 1.0)]
    for strategy in dict.fromkeys(strategies):
        if strategy == "full":
            continue
        _, selector = parsed(strategy)
        for ratio in dict.fromkeys(ratios):
            if not 0.0 <= ratio <= 1.0:
                raise InvalidSettingError(f"a recompute ratio is a number from 0 to 1; got {ratio}")
            share = min(ratio, max(selector.schedule(ratio).values()))
            made.append(Entry(strategy, share))
    return list(dict.fromkeys(made))


def run(
    *,
    model: str,
    data: Path,
    chunks: int,
    chunk_tokens: int,
    limit: int,
    ratios: Sequence[float],
    answer_tokens: int,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    strangers: bool = False,
    dtype: str = "auto",
    store: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure.

    Args:
        data: a JSONL file of {question, answers, chunks}. All of it is the corpus; `limit` questions are asked.
        ratios, strategies: what to compare, see strategies.py for the names.
        answer_tokens: tokens of the full prefill's answer over which distributions are compared.
        strangers: take a chunk's neighbours from chunks that share no question with it, so that none is in the prompt.
        store: folder for the KV store; a temporary one when None.
        progress: called with (steps done, steps in all).

    Returns:
        {"strategies": {"blend@0.15": {"kl": ..., "ci": {"kl": [low, high], ...}, ...}, ...},
        "deviation_by_layer": {...}, "deviation_by_slot": {...}, ...}.

        kl, kl_median, kl_p95: nats, over the questions, of each one's mean over the answer's tokens; kl_first: mean
        over the questions of the first token's; agreement: share of tokens at which both would choose the same; exact:
        share of equal answers; em, f1, rouge_l: against the gold answers; rows_fraction: rows computed over those of a
        full prefill; ttft_s, select_s: medians, in seconds. Deviations are squared, relative to the full prefill's
        keys and values.

    Raises:
        InvalidSettingError, ModelError, MissingDependencyError, StoreError.
    """
    counts = {"chunks": chunks, "chunk_tokens": chunk_tokens, "limit": limit, "answer_tokens": answer_tokens}
    for name, value in counts.items():
        whole_number(name, value, least=1)
    compared = entries(strategies, ratios)
    with ExitStack() as stack:
        loaded, tokenizer = load_model(model, dtype=dtype)
        prompts = PromptTokenizer(tokenizer)
        everything = read_questions(data, prompts, chunks=chunks, chunk_tokens=chunk_tokens, limit=None)
        questions = everything[:limit]
        folder = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragblend-bench-")))
        kv = stack.enter_context(KVStore(folder))
        decoder = Decoder(loaded, pack=True)
        names = list(dict.fromkeys(entry.strategy for entry in compared))
        made = stack.enter_context(
            engines(decoder, tokenizer, kv, names, namespace="strangers" if strangers else "questions")
        )
        corpus = Corpus(everything, strangers)
        bench = _Bench(made, compared, answer_tokens)
        bench.warm_up(questions[0])
        for done, question in enumerate(questions):
            if progress is not None:
                progress(done, len(questions))
            bench.ingest(question, corpus)
            bench.ask(question)
        if progress is not None:
            progress(len(questions), len(questions))
        return {
            "model": model,
            "questions": len(questions),
            "chunks": chunks,
            "chunk_tokens": chunk_tokens,
            "answer_tokens": answer_tokens,
            "neighbours": "none in the prompt" if strangers else "may be in the prompt",
            **bench.results(),
            "machine": machine(decoder),
        }


class Corpus:
    """The chunks of all questions, and each one's neighbours."""

    def __init__(self, questions: Sequence[Question], strangers: bool = False) -> None:
        asked: dict[str, set[int]] = {}  # a chunk may stand in the prompts of several questions
        for n, question in enumerate(questions):
            for chunk in question.chunks:
                asked.setdefault(chunk, set()).add(n)
        texts = list(asked)
        vectors = Embedder().embed(texts)
        ranked = neighbours_of(texts, vectors, apart=list(asked.values()) if strangers else ())
        self._neighbours = dict(zip(texts, ranked, strict=True))

    def neighbours(self, chunk: str) -> list[str]:
        """The closest other chunks, closest first."""
        return self._neighbours[chunk]


class _Reference(NamedTuple):
    """A full prefill's greedy answer. logits: [tokens, vocab] at each of its tokens."""

    ready: Ready
    ids: list[int]
    logits: Tensor
    answer: str


@dataclass
class _Deviations:
    """Of one policy's KV from a full prefill's: per question [layers] of keys and values, and [slots] of keys."""

    key: list[np.ndarray] = field(default_factory=list)
    value: list[np.ndarray] = field(default_factory=list)
    slot: list[np.ndarray] = field(default_factory=list)


class _Bench:
    def __init__(self, made: dict[str, RagBlend], compared: Sequence[Entry], answer_tokens: int) -> None:
        self._engines, self._compared, self._answer_tokens = made, compared, answer_tokens
        self._values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._by_position: dict[str, list[list[float]]] = defaultdict(list)
        self._deviations: dict[Policy, _Deviations] = defaultdict(_Deviations)

    def warm_up(self, question: Question) -> None:
        """First calls pay for memory, threads and kernels; and prefix caches learn the prompts' head, and no more."""
        for engine in self._engines.values():
            engine.answer(question.prompt(range(len(question.chunks))), ratio=1.0, max_tokens=2)
            # By its ids, this very prompt may be one of those to come: none of its chunks was known yet.
            engine.prefix_cache.clear()
            engine.answer(question.prompt(()), ratio=1.0, max_tokens=2)

    def ingest(self, question: Question, corpus: Corpus) -> None:
        neighbours = [corpus.neighbours(chunk) for chunk in question.chunks]
        for policy, engine in {e.settings.policy: e for name, e in self._engines.items() if name != "full"}.items():
            before = texts_before(question.chunks) if policy == "document" else neighbours
            engine.ingest(question.chunks, neighbours=before)

    def ask(self, question: Question) -> None:
        """Every strategy once; the full prefill first, since the others are held against its answer."""
        prompt = question.prompt(range(len(question.chunks)))
        reference = self._reference(prompt)
        seen: set[Policy] = set()
        for entry in self._compared:
            engine = self._engines[entry.strategy]
            started = time.perf_counter()
            ready = engine.prefill(prompt, ratio=entry.ratio, max_tokens=self._room)
            seconds = time.perf_counter() - started
            if entry.ratio < 1.0:
                check_reused(entry.name, ready.report)
            policy = engine.settings.policy
            if entry.ratio == 0.0 and policy not in seen:
                seen.add(policy)
                self._note_deviations(self._deviations[policy], reference.ready, ready)
            logits = engine.logits(ready, reference.ids)
            kl = kl_divergence(reference.logits, logits)
            answer = self._answer(engine, ready)[0]
            values = {
                "kl": float(kl.mean()),
                "kl_first": float(kl[0]),
                "agreement": agreement(reference.logits, logits),
                "exact": float(answer.strip() == reference.answer.strip()),
                "rows_fraction": ready.report.rows_fraction,
                "ttft_s": seconds,
                "select_s": ready.report.select_s,
            }
            if question.answers:
                values["em"] = exact_match(answer, question.answers)
                values["f1"] = token_f1(answer, question.answers)
                values["rouge_l"] = rouge_l(answer, question.answers)
            for name, value in values.items():
                self._values[entry.name][name].append(value)
            self._by_position[entry.name].append(kl.tolist())

    @property
    def _room(self) -> int:
        return max(self._answer_tokens, ANSWER_TOKENS) + 1

    def _reference(self, prompt: str) -> _Reference:
        engine = self._engines["full"]
        ready = engine.prefill(prompt, ratio=1.0, max_tokens=self._room)
        answer, ids = self._answer(engine, ready)
        ids = ids[: self._answer_tokens]
        return _Reference(ready, ids, engine.logits(ready, ids), answer)

    def _answer(self, engine: RagBlend, ready: Ready) -> tuple[str, list[int]]:
        steps = engine.steps(ready, DecodeSettings(max_tokens=max(self._answer_tokens, ANSWER_TOKENS)))
        pieces = [(step.text, step.token_id) for step in steps]
        return "".join(text for text, _ in pieces), [token for _, token in pieces]

    def _note_deviations(self, found: _Deviations, full: Ready, blended: Ready) -> None:
        chunks = [(use.start, use.stop) for use in blended.report.chunks if use.status == "hit"]
        keys, values, slots = [], [], []
        for layer in range(len(full.cache.keys)):
            per_slot = []
            sums = np.zeros((2, 2))
            for start, stop in chunks:
                for kind, (want, got) in enumerate(
                    zip(
                        full.cache.read(layer, slice(start, stop)),
                        blended.cache.read(layer, slice(start, stop)),
                        strict=True,
                    )
                ):
                    parts = np.array([float((got - want).float().square().sum()), float(want.float().square().sum())])
                    sums[kind] += parts
                    if kind == 0:
                        per_slot.append(parts[0] / parts[1])
            ratios = sums[:, 0] / np.maximum(sums[:, 1], np.finfo(np.float64).tiny)
            keys.append(ratios[0])
            values.append(ratios[1])
            slots.append(per_slot)
        found.key.append(np.array(keys))
        found.value.append(np.array(values))
        found.slot.append(np.mean(slots, axis=0))

    def results(self) -> dict[str, Any]:
        table: dict[str, dict[str, Any]] = {}
        for name, values in self._values.items():
            row: dict[str, Any] = {}
            intervals: dict[str, list[float]] = {}
            for number, (source, statistic) in _NUMBERS.items():
                if values.get(source):
                    row[number] = estimate(values[source], statistic)
                    intervals[number] = list(bootstrap_interval(values[source], statistic))
            table[name] = {**row, "ci": intervals, "kl_by_position": _ragged_mean(self._by_position[name])}
        layers = {
            policy: {"key": np.mean(d.key, axis=0).tolist(), "value": np.mean(d.value, axis=0).tolist()}
            for policy, d in self._deviations.items()
        }
        slots = {policy: _ragged_mean([s.tolist() for s in d.slot]) for policy, d in self._deviations.items()}
        return {"strategies": table, "deviation_by_layer": layers, "deviation_by_slot": slots}


def _ragged_mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each place, over the rows that are so long."""
    longest = max((len(row) for row in rows), default=0)
    return [float(np.mean([row[place] for row in rows if len(row) > place])) for place in range(longest)]
