"""A model that rotates keys otherwise in long prompts (longrope): KV of both kinds never goes together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import LONGROPE_BORDER, own_logits, tiny_model
from tiny_tokenizers import BUILDERS
from torch import Tensor

from ragblend import Audit, Chunk, RagBlend
from ragblend.settings import EngineSettings

FAMILY = "phi3-longrope"
TEXTS = [
    "The lighthouse of Alden was built in the year 1871 by two sisters from the village.",
    "Copper turns green in sea air, because salt and water make a thin skin on the metal.",
]
SHORT = [Chunk(TEXTS[0]), "\n\nWho built it?"]
LONG = [Chunk(TEXTS[0]), "\n\n" + "The tide was low and the quay was empty again. " * 9, "Who built it?"]


def make_engine(folder: Path, **settings: object) -> RagBlend:
    tokenizer = BUILDERS["chatml"]()
    return RagBlend(tiny_model(FAMILY, len(tokenizer)), tokenizer, folder, EngineSettings(**settings))  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RagBlend]:
    with make_engine(tmp_path / "kv") as made:
        assert len(made.prefill(SHORT).ids) <= LONGROPE_BORDER < len(made.prefill(LONG).ids)
        yield made


def stock_logits(engine: RagBlend, ids: Tensor) -> Tensor:
    """[vocab] of the last position."""
    return own_logits(FAMILY, ids, len(engine.tokenizer))[-1]


def difference(engine: RagBlend, prompt: list[str | Chunk], ratio: float) -> float:
    ready = engine.prefill(prompt, ratio=ratio)
    return float((ready.logits - stock_logits(engine, ready.ids)).abs().max())


def test_a_prefix_known_from_a_prompt_of_the_other_kind_is_not_used(engine: RagBlend) -> None:
    for prompt in (SHORT, LONG, SHORT, LONG):
        engine.answer(prompt, ratio=1.0, max_tokens=4)
        assert difference(engine, prompt, 1.0) < 1e-4
    assert engine.prefill(LONG, ratio=1.0).report.prefix_tokens > LONGROPE_BORDER


def test_a_first_chunk_is_exact_in_prompts_of_its_own_kind_only(engine: RagBlend) -> None:
    engine.ingest(TEXTS[:1])
    assert engine.prefill(SHORT, ratio=0.0).report.hits == 1
    assert difference(engine, SHORT, 0.0) < 1e-4
    # Where nothing is settled, as many tokens as the ratio asks for are recomputed.
    assert engine.prefill(SHORT, ratio=0.5).report.recomputed_tokens == 0
    assert engine.prefill(LONG, ratio=0.5).report.recomputed_tokens > 0


def test_chunks_that_end_behind_the_border_are_computed_as_in_a_long_prompt(engine: RagBlend) -> None:
    text = " ".join(["The ferry leaves the old harbour at nine, and the copper turns green in the sea air."] * 8)
    assert len(engine.prompts.encode_text(text)) > LONGROPE_BORDER
    engine.ingest([text])
    prompt = [Chunk(text), "\n\nWhen?"]
    report = engine.prefill(prompt, ratio=0.0).report
    assert report.hits == 1
    assert difference(engine, prompt, 0.0) < 1e-4


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_an_answer_that_crosses_the_border_is_that_of_forwards_from_the_start(engine: RagBlend, penalty: float) -> None:
    glue = "\n\n"
    while len(engine.prefill([Chunk(TEXTS[0]), glue + "Who?"]).ids) < LONGROPE_BORDER - 4:
        glue += "So "
    prompt = [Chunk(TEXTS[0]), glue + "Who?"]
    answer = engine.answer(prompt, ratio=1.0, max_tokens=40, repetition_penalty=penalty)
    ids = engine.prefill(prompt, ratio=1.0).ids.tolist()
    assert len(ids) < LONGROPE_BORDER < len(ids) + len(answer.token_ids) - 4
    for token in answer.token_ids:
        logits = stock_logits(engine, torch.tensor(ids)).clone()
        if penalty != 1.0:
            seen = sorted(set(ids))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        assert int(logits.argmax()) == token
        ids.append(token)
    assert difference(engine, prompt, 1.0) < 1e-4  # what decoding replaced was not kept


def test_audits_compare_with_a_full_prefill_of_one_kind(tmp_path: Path) -> None:
    found = []
    with make_engine(tmp_path / "kv", audit=Audit(share=1.0, on_result=found.append)) as engine:
        engine.ingest(TEXTS)
        long = [Chunk(TEXTS[0]), "\n", Chunk(TEXTS[1]), "\n" + "The tide was low. " * 40, "Who built it?"]
        assert len(engine.prefill(long).ids) > 256
        engine.answer(long, ratio=1 - 1e-9, max_tokens=4)  # all is recomputed that is reused
        engine.drain()
    assert [audited.kl < 1e-4 for audited in found] == [True]
