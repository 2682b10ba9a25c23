"""Whether a bound on the divergence is kept by requests that calibration has not seen, and what that costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ragblend.errors import InvalidSettingError
from ragblend.evaluation.calibrate import NEEDED, divergence, reference_of
from ragblend.evaluation.calibrate import calibrate as calibrated
from ragblend.evaluation.fidelity import Corpus
from ragblend.evaluation.metrics import bootstrap_interval
from ragblend.evaluation.strategies import engines, read_questions
from ragblend.model.decoder import Decoder
from ragblend.model.sources import load_model
from ragblend.prompt.template import PromptTokenizer
from ragblend.quality import MaxKL
from ragblend.store.kvstore import KVStore


def run(
    *,
    model: str,
    data: Path,
    chunks: int,
    chunk_tokens: int,
    limit: int,
    bounds: Mapping[str, float],
    dtype: str = "auto",
    store: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Calibrate on every other question, and ask the others within each bound.

    Args:
        limit: questions, half of which calibrate.
        bounds: a name for each, and its nats.
        store: folder for the KV store; a temporary one when None.
        progress: called with (steps done, steps in all).

    Returns:
        {"levels": {name: {"max_kl", "within", "within_ci", "ratio", "ratio_ci", "kl", "full", "ttft_s", "fixed_ratio",
        "fixed_within"}}, "selector", ...}: of the questions held out the share that keeps the bound, the mean ratio and
        divergence, the share of full prefills and the median TTFT; and the fixed ratio that kept the bound as often on
        the questions it was calibrated on, with the share of the ones held out that keep it at that.

    Raises:
        InvalidSettingError, ModelError, StoreError.
    """
    for bound in bounds.values():
        MaxKL(bound)
    with ExitStack() as stack:
        loaded, tokenizer = load_model(model, dtype=dtype)
        everything = read_questions(
            data, PromptTokenizer(tokenizer), chunks=chunks, chunk_tokens=chunk_tokens, limit=None
        )
        asked = everything[:limit]
        known, new = asked[::2], asked[1::2]
        if len(known) < NEEDED:
            raise InvalidSettingError(
                f"one half of the questions calibrates and the other is asked: that takes {2 * NEEDED - 1} at least "
                f"(--limit), and there are {len(asked)}"
            )
        folder = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragblend-bench-")))
        kv = stack.enter_context(KVStore(folder))
        decoder = Decoder(loaded, pack=True)
        engine = stack.enter_context(engines(decoder, tokenizer, kv, ["blend"], namespace="questions"))["blend"]
        corpus = Corpus(everything)
        steps = 3 * len(asked)

        def step(done: int) -> None:
            if progress is not None:
                progress(done, steps)

        for done, question in enumerate(asked):
            step(done)
            engine.ingest(question.chunks, neighbours=[corpus.neighbours(chunk) for chunk in question.chunks])
        prompts = {question: question.prompt(range(chunks)) for question in asked}
        found = calibrated(
            engine,
            [prompts[question] for question in known],
            minutes=float("inf"),
            model=model,
            progress=lambda done, of: step(len(asked) + round(done / of * len(asked))),
        )
        assert engine.samples is not None
        ratios_alike = {name: engine.samples.fixed(MaxKL(nats)) for name, nats in bounds.items()}
        measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in bounds}
        fixed: dict[str, list[float]] = {name: [] for name in bounds}
        for done, question in enumerate(new):
            step(2 * len(asked) + 2 * done)
            reference = reference_of(engine, prompts[question])
            for name, nats in bounds.items():
                one = divergence(engine, reference, MaxKL(nats))
                measured[name].append((one.kl, one.report.ratio, one.seconds))
                fixed[name].append(divergence(engine, reference, ratios_alike[name]).kl)
        step(steps)
        levels = {}
        for name, nats in bounds.items():
            kl, ratios, seconds = (list(column) for column in zip(*measured[name], strict=True))
            within = [float(value <= nats) for value in kl]
            levels[name] = {
                "max_kl": nats,
                "within": float(np.mean(within)),
                "within_ci": list(bootstrap_interval(within)),
                "ratio": float(np.mean(ratios)),
                "ratio_ci": list(bootstrap_interval(ratios)),
                "kl": float(np.mean(kl)),
                "full": float(np.mean([ratio == 1.0 for ratio in ratios])),
                "ttft_s": float(np.median(seconds)),
                "fixed_ratio": ratios_alike[name],
                "fixed_within": float(np.mean([value <= nats for value in fixed[name]])),
            }
        return {
            "model": model,
            "calibrated_on": len(known),
            "questions": len(new),
            "chunks": chunks,
            "chunk_tokens": chunk_tokens,
            "selector": found["selector"],
            "levels": levels,
        }
