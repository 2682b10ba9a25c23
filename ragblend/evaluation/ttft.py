"""Time to first token, decode rate and ingest rate of every strategy, interleaved in one process.

Everything is measured from the prompt *string*: tokenising, finding the chunks, reading the store are all in it. The
strategies take turns on each question, so that a machine that slows down slows them all; medians are reported.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ragblend.engine import RagBlend
from ragblend.errors import whole_number
from ragblend.evaluation.stock import Stock
from ragblend.evaluation.strategies import (
    Question,
    Strategy,
    check_reused,
    machine,
    orders,
    read_questions,
    strategies,
)
from ragblend.model.decoder import Decoder, PreTrainedModel, PreTrainedTokenizerBase
from ragblend.model.generate import DecodeSettings, decode
from ragblend.model.sources import load_model
from ragblend.prompt.chunk import Message
from ragblend.prompt.template import PromptTokenizer
from ragblend.store.kvstore import KVStore

ANSWER_TOKENS = 64  # the answer length for which total times are quoted


def run(
    *,
    model: str,
    data: Path,
    chunks: int,
    chunk_tokens: int,
    limit: int,
    ratio: float,
    repeats: int,
    decode_tokens: int,
    dtype: str = "auto",
    store: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure. All times are medians, in seconds.

    Args:
        data: a JSONL file of {question, answers, chunks}.
        limit: questions to take; repeats: chunk orders to ask each in.
        decode_tokens: tokens to decode for the decode rate.
        store: folder for the KV store; a temporary one when None.
        progress: called with (steps done, steps in all).

    Returns:
        {"strategies": {name: {...}}, "ingest": {...}, "store": {...}, "machine": {...}}; speedup is stock's ttft_s over
        a strategy's own, rows_fraction the rows it computed over those of a full prefill.

    Raises:
        InvalidSettingError, ModelError, StoreError.
    """
    for name, value in {
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "limit": limit,
        "repeats": repeats,
        "decode_tokens": decode_tokens,
    }.items():
        whole_number(name, value, least=1)
    with ExitStack() as stack:
        stock, tokenizer = load_model(model, dtype=dtype)
        driven, _ = load_model(model, dtype=dtype)
        folder = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragblend-bench-")))
        kv = stack.enter_context(KVStore(folder))
        prompts = PromptTokenizer(tokenizer)
        questions = read_questions(data, prompts, chunks=chunks, chunk_tokens=chunk_tokens, limit=limit)
        compared = stack.enter_context(strategies(Decoder(driven, pack=True), tokenizer, kv, ratio))
        total = len(questions) * (repeats + 2)
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        bench = _Bench(model, stock, tokenizer, prompts, compared)
        for question in questions:
            bench.ingest(question)
            step()
        os.sync()  # only clean pages can be dropped for the cold runs
        bench.warm_up(questions[0])
        for number, question in enumerate(questions):
            for order in orders(chunks, repeats, seed=number):
                bench.ask(question.prompt(order), kv)
                step()
        for number, question in enumerate(questions):
            if number < 3:
                bench.decode(question.prompt(range(chunks)), decode_tokens)
            step()
        return bench.results(kv)


class _Bench:
    def __init__(
        self,
        name: str,
        stock: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: PromptTokenizer,
        compared: list[Strategy],
    ) -> None:
        self._name = name
        self._stock = Stock(stock, tokenizer)
        self._prompts, self._compared = prompts, compared
        self._times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._ingest_rates: list[float] = []  # tokens a second, all variants of a chunk counted
        self._prefill_rates: list[float] = []
        self._tokens: list[int] = []
        self._turn = 0

    def ingest(self, question: Question) -> None:
        """Ingest a question's chunks behind the preamble, and time the stock model's own forward over the same ids."""
        stock_s, stock_tokens = 0.0, 0
        with torch.inference_mode():
            for chunk in question.chunks:
                ids = torch.tensor([self._prompts.encode_text(chunk)], device=self._stock.model.device)
                started = time.perf_counter()
                self._stock.model(input_ids=ids, use_cache=True, logits_to_keep=1)
                self._engine("blend").decoder.wait()
                stock_s += time.perf_counter() - started
                stock_tokens += ids.shape[1]
        report = self._engine("blend").ingest(question.chunks)
        if report.computed == len(question.chunks):
            self._ingest_rates.append(report.tokens / report.seconds)
            self._prefill_rates.append(stock_tokens / stock_s)
        self._engine("cacheblend").ingest(question.chunks)

    def warm_up(self, question: Question) -> None:
        """First calls pay for memory, threads and kernels; and the prefix caches learn the prompt's head."""
        prompt = question.prompt(range(len(question.chunks)))
        self._stock.ttft_s([Message("user", prompt)])
        for strategy in self._compared:
            self._ttft(strategy, prompt, keep=True)

    def ask(self, prompt: str, store: KVStore) -> None:
        """Every strategy once, in an order that rotates; then those that read the store from a cold page cache."""
        takers: list[Strategy | None] = [None, *self._compared]
        self._turn += 1
        for i in range(len(takers)):
            taker = takers[(i + self._turn) % len(takers)]
            if taker is None:
                self._times["stock"]["ttft_s"].append(self._stock.ttft_s([Message("user", prompt)]))
                self._times["stock"]["rows_fraction"].append(1.0)
            else:
                seconds, report = self._ttft(taker, prompt, keep=taker.name == "prefix")
                times = self._times[taker.name]
                times["ttft_s"].append(seconds)
                times["rows_fraction"].append(report.rows_fraction)
                for name in ("tokenise_s", "lookup_s", "load_s", "stall_s", "select_s", "prefill_s"):
                    times[name].append(getattr(report, name))
                self._tokens.append(report.prompt_tokens)
        for taker in self._compared:
            if taker.reads_store:
                _drop_page_cache(store.directory.rglob("*.safetensors"))
                self._times[taker.name]["cold_ttft_s"].append(self._ttft(taker, prompt, keep=False)[0])

    def decode(self, prompt: str, tokens: int) -> None:
        """Decode the same number of tokens behind the same prompt, stock and blended."""
        ids = self._stock.ids([Message("user", prompt)])
        first = self._stock.generate(ids, 1)
        self._times["stock"]["decode_token_s"].append((self._stock.generate(ids, 1 + tokens) - first) / tokens)
        blend = next(s for s in self._compared if s.name == "blend")
        ready = blend.engine.prefill(prompt, ratio=blend.ratio, max_tokens=tokens + 2)
        steps = decode(
            blend.engine.decoder,
            ready.cache,
            ready.logits,
            ready.ids,
            DecodeSettings(max_tokens=tokens + 1),
            (),
            self._prompts.decode,
        )
        next(steps)
        started = time.perf_counter()
        decoded = sum(1 for _ in steps)
        self._times["blend"]["decode_token_s"].append((time.perf_counter() - started) / max(1, decoded))

    def results(self, store: KVStore) -> dict[str, Any]:
        """Medians of everything."""
        rows: dict[str, dict[str, float]] = {}
        for name, times in self._times.items():
            row = {key: statistics.median(values) for key, values in times.items()}
            row.setdefault("cold_ttft_s", row["ttft_s"])  # reads nothing: no page cache to be cold
            rows[name] = row
        for row in rows.values():
            row["speedup"] = rows["stock"]["ttft_s"] / row["ttft_s"]
            if "decode_token_s" in row:
                row["decode_tokens_per_s"] = 1.0 / row["decode_token_s"]
                row[f"answer_{ANSWER_TOKENS}_tokens_s"] = row["ttft_s"] + (ANSWER_TOKENS - 1) * row["decode_token_s"]
        engine = self._engine("blend")
        stats = store.stats()
        raw = engine.decoder.kv_bytes_per_token
        return {
            "model": self._name,
            "strategies": rows,
            "ingest": {
                "tokens_per_s": statistics.median(self._ingest_rates),
                "stock_prefill_tokens_per_s": statistics.median(self._prefill_rates),
                "median_ratio": statistics.median(
                    ours / stock for ours, stock in zip(self._ingest_rates, self._prefill_rates, strict=True)
                ),
            }
            if self._ingest_rates
            else None,
            "store": {
                "bytes": stats.bytes,
                "tokens": stats.tokens,
                "bytes_over_kv": stats.bytes / (stats.tokens * raw) if stats.tokens else None,
            },
            "machine": machine(engine.decoder),
            "prompt_tokens": statistics.median(self._tokens),
        }

    def _engine(self, name: str) -> RagBlend:
        return next(s.engine for s in self._compared if s.name == name)

    def _ttft(self, strategy: Strategy, prompt: str, *, keep: bool) -> tuple[float, Any]:
        started = time.perf_counter()
        stream = strategy.engine.stream(prompt, ratio=strategy.ratio, max_tokens=2)
        next(stream, None)
        seconds = time.perf_counter() - started
        if strategy.reads_store:
            check_reused(strategy.name, stream.report)
        if keep:
            stream.close()
        return seconds, stream.report


def _drop_page_cache(files: Iterable[Path]) -> None:
    """Make the next read come from the disk, where the system lets us."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
