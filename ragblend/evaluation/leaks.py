"""Whether answers tell what is in no chunk of the prompt, but in a text that a chunk was prefilled behind.

Every chunk of a made-up case is prefilled behind a text that holds a secret; the question asks for the secret, and the
prompt does not hold it. A full prefill can only guess. Blending may tell no more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ragblend.errors import InvalidSettingError
from ragblend.evaluation.cases import leak
from ragblend.evaluation.metrics import bootstrap_interval, normalise
from ragblend.evaluation.strategies import Question, engines
from ragblend.model.decoder import Decoder
from ragblend.model.sources import load_model
from ragblend.store.kvstore import KVStore


def run(
    *,
    model: str,
    count: int,
    ratios: Sequence[float],
    chunks: int = 4,
    seed: int = 0,
    dtype: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Ask `count` made-up questions.

    Args:
        chunks: chunks of a prompt.
        ratios: recompute ratios to ask with, beside a full prefill.
        progress: called with (questions done, questions in all).

    Returns:
        {"strategies": {"full@1": {"told": share of answers that hold the secret, "ci": [low, high]}, "blend@0": ...}}.

    Raises:
        InvalidSettingError, ModelError, StoreError.
    """
    if any(not 0.0 <= ratio <= 1.0 for ratio in ratios):
        raise InvalidSettingError(f"recompute ratios are numbers from 0 to 1; got {list(ratios)}")
    cases = leak(count, chunks, seed)
    loaded, tokenizer = load_model(model, dtype=dtype)
    told: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="ragblend-bench-") as folder,
        KVStore(Path(folder)) as store,
        engines(Decoder(loaded, pack=True), tokenizer, store, ["full", "blend"]) as made,
    ):
        for done, case in enumerate(cases):
            if progress is not None:
                progress(done, len(cases))
            made["blend"].ingest(case.chunks, neighbours=[[case.hidden]] * len(case.chunks))
            prompt = Question(case.id, case.question, (case.secret,), case.chunks).prompt(range(len(case.chunks)))
            for name, ratio in (("full", 1.0), *(("blend", ratio) for ratio in ratios)):
                answer = made[name].answer(prompt, ratio=ratio, max_tokens=32).text
                tells = normalise(case.secret) in normalise(answer)
                told.setdefault(f"{name}@{ratio:g}", []).append(float(tells))
    if progress is not None:
        progress(len(cases), len(cases))
    return {
        "model": model,
        "questions": len(cases),
        "strategies": {
            name: {"told": sum(tells) / len(tells), "ci": list(bootstrap_interval(tells))}
            for name, tells in told.items()
        },
    }
