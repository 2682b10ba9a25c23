"""What a prompt will probably hold is read ahead: the right files, from a thread, and whatever happens to them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizers import BUILDERS

from ragblend import RagBlend
from ragblend.settings import EngineSettings
from ragblend.store import loader

TEXTS = [
    "The lighthouse of Alden was built in the year 1871 by two sisters from the village.",
    "Copper turns green in sea air, because salt and water make a thin skin on the metal of the roof.",
    "A ferry leaves the old harbour at nine in the morning.",
]


class Watch:
    """Sees every file that is opened by Python code, and can hold the thread up that opens a payload."""

    def __init__(self) -> None:
        self.watching = False
        self.opened: list[tuple[str, Path]] = []  # thread, file
        self.go_on = threading.Event()

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if self.watching and event == "open" and str(given[0]).endswith(".safetensors"):
            self.opened.append((threading.current_thread().name, Path(given[0])))
            self.go_on.wait(10)


WATCH = Watch()
sys.addaudithook(WATCH)  # for good: Python has no way to take one away


@pytest.fixture
def watch() -> Iterator[Watch]:
    WATCH.opened.clear()
    WATCH.go_on.set()
    WATCH.watching = True
    yield WATCH
    WATCH.go_on.set()
    WATCH.watching = False


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RagBlend]:
    tokenizer = BUILDERS["chatml"]()
    settings = EngineSettings(preamble="Read.\n")
    with RagBlend(tiny_model("llama", len(tokenizer)), tokenizer, tmp_path / "kv", settings) as made:
        made.ingest(TEXTS, neighbours=[TEXTS[1:], TEXTS[:1], TEXTS[:1]])
        yield made


def test_the_likeliest_variant_of_each_text_is_read(engine: RagBlend, watch: Watch) -> None:
    before = engine.store.stats()
    size = engine.prefetch(["", "unknown", *(f"  {text}\n" for text in TEXTS)]).result(10)
    wanted = [engine.stored_variants(text)["neighbour"] for text in TEXTS]
    assert [path for _, path in watch.opened] == list(engine.store.paths(wanted).values())
    assert {thread for thread, _ in watch.opened} == {"ragblend-prefetch_0"}
    assert size == sum(path.stat().st_size for _, path in watch.opened)
    assert engine.store.stats() == before, "a hint is no use of a chunk"


def test_the_first_text_is_expected_right_behind_the_head(engine: RagBlend, watch: Watch) -> None:
    engine.prefetch(TEXTS[:2]).result(10)
    wanted = [engine.stored_variants(text)[name] for text, name in zip(TEXTS, ("head", "neighbour"), strict=False)]
    assert [path for _, path in watch.opened] == list(engine.store.paths(wanted).values())


def test_nobody_waits_and_hints_that_come_too_fast_are_dropped(engine: RagBlend, watch: Watch) -> None:
    watch.go_on.clear()
    first = [engine.prefetch(TEXTS) for _ in range(4)]
    assert not any(hint.done() for hint in first)
    late = engine.prefetch(TEXTS)
    assert (late.done(), late.result(0)) == (True, 0)
    assert engine.answer("Well?", max_tokens=1).report.prompt_tokens > 0
    watch.go_on.set()
    assert len({hint.result(10) for hint in first}) == 1
    assert engine.prefetch(TEXTS).result(10) == first[0].result()


def test_no_more_is_read_than_is_worth_it(engine: RagBlend, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [
        path.stat().st_size for path in engine.store.paths(list(engine.stored_variants(TEXTS[0]).values())).values()
    ]
    monkeypatch.setattr(loader, "PREFETCH_BYTES", sizes[0] + 1)
    assert engine.prefetch(TEXTS).result(10) == sizes[0]


def test_what_goes_wrong_is_logged_and_forgotten(
    engine: RagBlend, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = engine.stored_variants(TEXTS[0])["head"]
    engine.store.paths([key])[key].unlink()
    with caplog.at_level(logging.WARNING, logger="ragblend.store.loader"):
        assert engine.prefetch(TEXTS[:1]).result(10) == 0
        assert "were not read ahead" in caplog.text
        caplog.clear()
        nonsense: Any = [7]
        assert engine.prefetch(nonsense).result(10) == 0
        assert "were not read ahead" in caplog.text
        caplog.clear()
        engine.store.close()
        assert engine.prefetch(TEXTS).result(10) == 0
        assert "is closed" in caplog.text


def test_a_closed_engine_reads_nothing(engine: RagBlend, watch: Watch) -> None:
    watch.go_on.clear()
    hints = [engine.prefetch(TEXTS) for _ in range(3)]
    threading.Timer(0.1, watch.go_on.set).start()
    engine.close()
    assert all(hint.done() for hint in hints)
    assert hints[1].cancelled()
    assert engine.prefetch(TEXTS).result(0) == 0
