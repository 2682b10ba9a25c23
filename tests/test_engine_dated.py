"""Chat templates that write today's date into the head of every prompt: what was stored yesterday is found today."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizers import CHATML, chatml, with_template
from transformers.utils import chat_template_utils

from ragblend import Chunk, RagBlend
from ragblend.model.decoder import Decoder
from ragblend.prompt import template
from ragblend.prompt.chunk import Message
from ragblend.prompt.template import PromptTokenizer
from ragblend.settings import EngineSettings

DATED = CHATML.replace("Be helpful.", "' + strftime_now('Today is %d %B %Y.') + '")
TEXTS = [
    "Copper turns green in sea air, because salt and water make a thin skin on the metal.",
    "A ferry leaves the old harbour at nine in the morning and comes back at six at night.",
    "The lamp burned oil from whales until 1902, and electric light came with the new keeper.",
]
PREAMBLE = "Answer from these notes.\n\n"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes it another day."""

    def day(number: int) -> None:
        class Then(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Then:
                return cls(2031, 5, number)

        monkeypatch.setattr(chat_template_utils, "datetime", Then)

    return day


def prompt(*order: int) -> list[str | Chunk]:
    return [PREAMBLE, *(part for n in order for part in (Chunk(TEXTS[n]), "\n\n")), "When does the ferry leave?"]


def test_the_head_is_the_same_every_day_and_prompts_are_not(on: Callable[[int], None]) -> None:
    prompts = PromptTokenizer(with_template(chatml(), DATED))
    heads, todays = [], []
    for day in (7, 8):
        on(day)
        heads.append(prompts.head_ids([Message("user", PREAMBLE)]))
        todays.append(prompts.head_ids([Message("user", PREAMBLE)], today=True))
        assert f"Today is 0{day} May 2031." in prompts.render([Message("user", "x")])[0].text
    assert heads[0] == heads[1]
    assert todays[0] != todays[1]
    plain = PromptTokenizer(chatml())
    assert plain.head_ids([Message("user", PREAMBLE)]) == plain.head_ids([Message("user", PREAMBLE)], today=True)


@pytest.mark.parametrize("before", ["\n", "  ", "\n  ", ""])
def test_only_the_date_is_another_one(on: Callable[[int], None], before: str) -> None:
    prompts = PromptTokenizer(with_template(chatml(), before + DATED))
    on(7)
    fixed, today = (
        prompts.decode(prompts.head_ids([Message("user", PREAMBLE)], today=today)) for today in (False, True)
    )
    assert fixed.replace("01 January 2025", "07 May 2031") == today


def test_the_head_does_not_depend_on_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PromptTokenizer(with_template(chatml(), DATED))
    head = prompts.head_ids([Message("user", PREAMBLE)])

    class German(datetime):
        def strftime(self, format: str) -> str:
            return super().strftime(format).replace("January", "Januar")

    monkeypatch.setattr(template, "datetime", German, raising=False)
    assert prompts.head_ids([Message("user", PREAMBLE)]) == head


def test_what_was_stored_yesterday_is_found_today(on: Callable[[int], None], tmp_path: Path) -> None:
    decoder = Decoder(tiny_model("llama", vocab=len(chatml())))
    tokenizer = with_template(chatml(), DATED)
    settings = EngineSettings(preamble=PREAMBLE, learn=False)
    on(7)
    with RagBlend(decoder, tokenizer, tmp_path / "kv", settings) as engine:
        engine.ingest(TEXTS, neighbours=[[TEXTS[1]], [TEXTS[2]], [TEXTS[0]]])
        assert engine.prefill(prompt(0, 1), ratio=0.0).report.hits == 2
        on(8)  # while it runs
        assert engine.prefill(prompt(2, 0), ratio=0.0).report.hits == 2
    with RagBlend(decoder, tokenizer, tmp_path / "kv", settings) as engine:
        ready = engine.prefill(prompt(2, 1, 0), ratio=0.0)
        assert ready.report.hits == 3
        # The first one stands behind the head: that of another day is nearer to it than any neighbour.
        assert [use.variant for use in ready.report.chunks] == ["head", "neighbour", "neighbour"]
        assert ready.exact_tokens == ready.report.chunks[0].start
        full = engine.prefill(prompt(2, 1, 0), ratio=1.0)
        assert "08 May 2031" in tokenizer.decode(full.ids)
        with torch.inference_mode():
            own = decoder.model(input_ids=full.ids[None]).logits[0, -1]
        assert (full.logits - own).abs().max() < 1e-4
