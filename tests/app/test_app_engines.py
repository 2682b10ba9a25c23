"""LlamaIndex's own engines over a knowledge base: every chunk they put into a prompt is reused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LongContextReorder

from ragblend.errors import IngestError, InvalidSettingError
from ragblend.kb import KnowledgeBase

TOP_K = 3
TEXTS = {
    f"place {n}": f"Place {n} has a bridge of {n * 7} metres, and people cross it when it rains." for n in range(8)
}


pytestmark = pytest.mark.usefixtures("event_loop_for_core")


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, embedding_model: None) -> Iterator[KnowledgeBase]:
    with KnowledgeBase(tmp_path_factory.mktemp("engines") / "store", model=str(tiny_model)) as opened:
        opened.ingest_texts(TEXTS)
        yield opened


def test_query_engines_take_settings_of_the_llm_and_of_core(kb: KnowledgeBase) -> None:
    llms: list[Any] = []
    for mode in ("compact", "refine", "tree_summarize"):
        engine = kb.as_query_engine(
            TOP_K, max_tokens=5, ratio=0.0, response_mode=mode, node_postprocessors=[LongContextReorder()]
        )
        response = engine.query(f"Which place has the longest bridge, asked with {mode}?")
        assert len(response.source_nodes) == TOP_K
        llms.append(engine._response_synthesizer._llm)
        report = llms[-1].last_report
        assert report.hits == len(report.chunks) > 0
        assert report.ratio == 0.0
        assert report.decode_tokens < 5
    assert all(llm.engine is kb.engine for llm in llms)


def test_template_settings_are_remembered_with_the_store(
    tmp_path: Path, tiny_model: Path, embedding_model: None
) -> None:
    def prompt_tokens(settings: dict[str, Any] | None = None, *, ingest: bool = False) -> int:
        with KnowledgeBase(tmp_path / "store", model=str(tiny_model), template_settings=settings) as kb:
            if ingest:
                kb.ingest_texts(TEXTS)
            report = kb.query("Which place has the longest bridge?", top_k=2, max_tokens=1).report
            assert report is not None
            assert report.hits == 2
            return report.prompt_tokens

    thinking = prompt_tokens(ingest=True)
    silent = prompt_tokens({"enable_thinking": False})
    assert silent > thinking
    assert prompt_tokens() == thinking, "what is asked for once is not for all"
    assert prompt_tokens({"enable_thinking": False}, ingest=True) == prompt_tokens() == silent
    assert prompt_tokens({}) == thinking
    with pytest.raises(InvalidSettingError, match="as JSON"):
        prompt_tokens({"enable_thinking": object()})


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
def test_chat_engines_hit_where_the_context_stands_before_the_history(kb: KnowledgeBase, mode: Any) -> None:
    chat: Any = kb.as_chat_engine(
        mode, TOP_K, max_tokens=5, system_prompt="Be brief.", memory=ChatMemoryBuffer(token_limit=2000)
    )
    assert type(chat) is {"context": ContextChatEngine}.get(mode, CondensePlusContextChatEngine)
    for message in ("How long is the bridge of place 3?", "And that of place 6?"):
        response = chat.chat(message)
        assert len(response.source_nodes) == TOP_K
        report = chat._llm.last_report
        assert report.hits == len(report.chunks) == TOP_K
        assert report.misses == 0
    assert [message.role.value for message in chat.chat_history] == ["user", "assistant"] * 2
    assert "".join(chat.stream_chat("And of place 1?").response_gen) is not None
    assert chat._llm.last_report.hits == TOP_K


def test_a_text_of_several_documents_is_retrieved_once(tmp_path: Path, tiny_model: Path, embedding_model: None) -> None:
    """A licence at the end of every page takes one of the places, not all of them."""
    licence = "Anyone may use this text, copy it and change it, and nobody is liable."
    names = [f"page {n}" for n in range(9)]
    with KnowledgeBase(tmp_path / "store", model=str(tiny_model)) as kb:
        kb.ingest_texts({**TEXTS, **dict.fromkeys(names, licence)})
        found = kb.as_retriever(TOP_K).retrieve("Who may use and copy this text?")
        texts = [source.node.get_content() for source in found]
        assert texts[0] == licence
        assert len(set(texts)) == len(texts) == TOP_K
        licensed = found[0].node.metadata
        assert sorted([licensed["document"], *licensed["also_in"]]) == names
        assert all("also_in" not in source.node.metadata for source in found[1:])
        everything = kb.as_retriever(100).retrieve("Who may use and copy this text?")
        assert len(everything) == len(TEXTS) + 1
        chat = kb.session("someone", top_k=TOP_K, max_tokens=4)
        for _ in range(2):
            sources = chat.chat("Who may use and copy this text?").sources
            assert len({source.node.get_content() for source in sources}) == len(sources) == TOP_K


def test_what_cannot_be_made_is_refused(kb: KnowledgeBase, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match="condense_plus_context"):
        kb.as_chat_engine("best")  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError):
        kb.as_chat_engine("context", 0)
    with KnowledgeBase(tmp_path / "empty") as empty, pytest.raises(IngestError):
        empty.as_chat_engine()


def test_settings_that_nothing_takes_are_refused(kb: KnowledgeBase) -> None:
    """Core's engines take any, and ignore what they do not know: a misspelt limit would be none."""
    for ask in (partial(kb.query, "Which?"), kb.as_query_engine, kb.as_chat_engine):
        for unknown in ("max_token", "similarity_top_k", "llm", "engine", "model", "dtype", "preamble"):
            with pytest.raises(
                InvalidSettingError, match=rf"no setting {unknown}\b.*max_tokens.*node_postprocessors.*top_k"
            ):
                ask(**{unknown: 5})
    modes: tuple[Any, ...] = ("context", "condense_plus_context")
    for mode in modes:
        made: Any = kb.as_chat_engine(mode, memory=ChatMemoryBuffer(token_limit=9), verbose=True, skip_condense=True)
        assert made.chat_history == []  # an app may choose the mode by one word
