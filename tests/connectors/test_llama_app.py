"""Unmodified LlamaIndex apps: split, embed, index, retrieve, ask. Only the LLM is ours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from llama_bench import MakeEngine, Recorder
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.llms.ragblend import RagBlendLLM, default_preamble
from llama_index.node_parser.ragblend import KVPrefill

from ragblend.errors import ContextWindowError
from ragblend.prompt.chunk import Message

QUESTION = "Who has the documents that say why?"
FAMILIES = ["chatml", "llama3", "mistral", "llama2", "gemma", "base_with_bos"]


def documents(texts: list[str], **metadata: Any) -> list[Document]:
    return [Document(text=text, doc_id=str(n), metadata=dict(metadata)) for n, text in enumerate(texts)]


def app(settings: Any, llm: RagBlendLLM, docs: list[Document], *, prefill: bool = True) -> VectorStoreIndex:
    settings.llm = llm
    settings.embed_model = MockEmbedding(embed_dim=4)
    steps = [SentenceSplitter(chunk_size=256, chunk_overlap=0), *([KVPrefill(llm=llm)] if prefill else [])]
    return VectorStoreIndex(IngestionPipeline(transformations=steps).run(documents=docs))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_retrieved_chunk_hits_and_stands_behind_the_preamble(
    make_engine: MakeEngine, settings: Any, texts: list[str], family: str
) -> None:
    engine = make_engine(family, window=16384)
    llm = RagBlendLLM.from_engine(engine, max_tokens=6)
    index = app(settings, llm, documents(texts))
    response = index.as_query_engine(similarity_top_k=4).query(QUESTION)

    assert len(response.source_nodes) == 4
    report = llm.last_report
    assert report is not None
    assert (report.hits, report.misses) == (4, 0)
    # The law that makes chunks' KV fit: what they were prefilled behind is what stands before the first of them.
    head = len(engine.preamble_ids)
    assert head > 0
    assert tuple(engine.prompts_ids[-1][:head]) == engine.preamble_ids
    assert report.chunks[0].start == head


@pytest.mark.parametrize("family", ["chatml", "llama2", "base_with_bos"])
def test_a_system_prompt_is_part_of_the_preamble(
    make_engine: MakeEngine, settings: Any, texts: list[str], family: str
) -> None:
    rules = "You work for the archive."
    preamble = default_preamble(is_chat_model=family != "base_with_bos", system_prompt=rules)
    engine = make_engine(family, window=16384, preamble=preamble)
    llm = RagBlendLLM.from_engine(engine, max_tokens=2, system_prompt=rules)
    app(settings, llm, documents(texts)).as_query_engine(similarity_top_k=2).query(QUESTION)
    assert llm.last_report is not None
    assert llm.last_report.chunks[0].start == len(engine.preamble_ids)
    assert tuple(engine.prompts_ids[-1][: len(engine.preamble_ids)]) == engine.preamble_ids


def test_metadata_headers_are_glue_around_chunks_that_hit(llm: RagBlendLLM, settings: Any, texts: list[str]) -> None:
    index = app(settings, llm, documents(texts, file_path="somewhere/else.txt", author="nobody"))
    index.as_query_engine(similarity_top_k=3).query(QUESTION)
    assert llm.last_report is not None
    assert (llm.last_report.hits, llm.last_report.misses) == (3, 0)


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
def test_other_response_modes_hit_too(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str], mode: str
) -> None:
    app(settings, llm, documents(texts)).as_query_engine(similarity_top_k=3, response_mode=mode).query(QUESTION)
    assert sum(stream.report.hits for stream in engine.streams) >= 3
    assert sum(stream.report.misses for stream in engine.streams) == 0


def test_streaming_and_async_queries_answer_alike(llm: RagBlendLLM, settings: Any, texts: list[str]) -> None:
    index = app(settings, llm, documents(texts))
    plain = str(index.as_query_engine(similarity_top_k=3).query(QUESTION))
    streaming: Any = index.as_query_engine(similarity_top_k=3, streaming=True).query(QUESTION)
    assert "".join(streaming.response_gen) == plain
    assert str(asyncio.run(index.as_query_engine(similarity_top_k=3).aquery(QUESTION))) == plain
    assert llm.last_report is not None
    assert llm.last_report.hits == 3


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate", "simple_summarize"])
def test_a_prompt_too_long_raises_in_every_mode_instead_of_an_empty_answer(
    make_engine: MakeEngine, settings: Any, texts: list[str], mode: str
) -> None:
    llm = RagBlendLLM.from_engine(make_engine(window=384), max_tokens=4)
    # Core packs prompts for another model's window, and its refining modes catch every ValueError.
    settings.prompt_helper = PromptHelper(context_window=8192, num_output=4)
    index = app(settings, llm, documents([" ".join(texts)] * 2), prefill=False)
    how: dict[str, Any] = {"similarity_top_k": 2, "response_mode": mode}
    with pytest.raises(ContextWindowError) as caught:
        index.as_query_engine(**how).query(QUESTION)
    assert caught.value.prompt_tokens > caught.value.context_window_tokens == 384
    with pytest.raises(ContextWindowError):
        asyncio.run(index.as_query_engine(**how, use_async=True).aquery(QUESTION))
    if mode in ("compact", "refine"):  # as far as core asks before somebody reads
        with pytest.raises(ContextWindowError):
            list(index.as_query_engine(**how, streaming=True).query(QUESTION).response_gen)  # type: ignore[union-attr]


def test_a_chat_engine_hits_in_the_system_message(llm: RagBlendLLM, settings: Any, texts: list[str]) -> None:
    # Core's default memory leaves a database connection open, which pytest reports as an error of a later test.
    memory = ChatMemoryBuffer.from_defaults(llm=llm)
    chat = app(settings, llm, documents(texts)).as_chat_engine(chat_mode="context", similarity_top_k=3, memory=memory)
    for question in (QUESTION, "And when was that?"):
        assert chat.chat(question).response is not None
        assert llm.last_report is not None
        assert (llm.last_report.hits, llm.last_report.misses) == (3, 0)


def test_an_app_that_never_ingested_gets_its_answer_all_the_same(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str]
) -> None:
    index = app(settings, llm, documents(texts), prefill=False)
    assert index.as_query_engine(similarity_top_k=3).query(QUESTION).source_nodes
    assert llm.last_report is not None
    assert (llm.last_report.hits, llm.last_report.reused_tokens) == (0, 0)
    assert len(engine.store) == 0


def test_what_was_evicted_is_a_miss_and_is_learned(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str]
) -> None:
    queries = app(settings, llm, documents(texts)).as_query_engine(similarity_top_k=3)
    for key in engine.store.keys():  # noqa: SIM118  (a KVStore is no mapping)
        engine.store.delete(key)
    queries.query(QUESTION)
    assert llm.last_report is not None
    assert (llm.last_report.hits, llm.last_report.misses) == (0, 3)
    engine.drain()
    engine.prefix_cache.clear()
    queries.query("Another question?")
    assert (llm.last_report.hits, llm.last_report.misses) == (3, 0)


@pytest.mark.parametrize("replaced", [True, False], ids=["windows", "sentences"])
@pytest.mark.parametrize("ingested", ["the other text", "nothing"])
def test_windows_or_sentences_that_were_missed_are_learned(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str], replaced: bool, ingested: str
) -> None:
    settings.llm, settings.embed_model = llm, MockEmbedding(embed_dim=4)
    prefill = KVPrefill(llm=llm, window_metadata_key=None if replaced else "window")
    steps = [SentenceWindowNodeParser.from_defaults(window_size=1), *([prefill] if ingested != "nothing" else [])]
    index = VectorStoreIndex.from_documents([Document(text=" ".join(texts))], transformations=steps)
    replace = [MetadataReplacementPostProcessor("window")] if replaced else []
    queries = index.as_query_engine(similarity_top_k=3, node_postprocessors=replace)
    seen = []
    for question in (QUESTION, "Another question?"):
        sources = queries.query(question).source_nodes
        assert llm.last_report is not None
        seen.append((llm.last_report.hits, llm.last_report.misses))
        assert len(sources) == 3
        engine.drain()
        engine.prefix_cache.clear()
    assert seen == [(0, 3), (3, 0)]


def test_at_ratio_1_the_answer_is_that_of_the_models_own_generate(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str]
) -> None:
    llm.ratio = 1.0
    app(settings, llm, documents(texts)).as_query_engine(similarity_top_k=3).query(QUESTION)
    assert llm.last_report is not None
    assert {use.status for use in llm.last_report.chunks} == {"recomputed"}
    ids = torch.tensor([engine.prompts_ids[-1]])
    stock = engine.decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=llm.max_tokens,
        pad_token_id=0,
        eos_token_id=sorted(engine.prompts.stop_ids),  # not what a tiny model's config says by default
    )
    answer = engine.streams[-1].token_ids
    assert stock[0, ids.shape[1] :].tolist()[: len(answer)] == answer


def test_the_real_model_in_a_real_app(smollm2: RagBlendLLM, settings: Any, texts: list[str]) -> None:
    engine = smollm2.engine
    smollm2.ratio = 0.15  # "auto" follows how fast reading and computing are at the moment
    debug = LlamaDebugHandler(print_trace_on_end=False)
    settings.callback_manager = CallbackManager([debug])
    index = app(settings, smollm2, documents(texts))
    response = index.as_query_engine(similarity_top_k=4).query("In which drawer is the model kept?")
    assert str(response).strip()
    report = smollm2.last_report
    assert report is not None
    assert (report.hits, report.misses) == (4, 0)
    ((start, _),) = debug.get_event_pairs(CBEventType.LLM)
    sent = [Message(message.role.value, message.content) for message in start.payload[EventPayload.MESSAGES]]
    head = report.chunks[0].start
    assert tuple(engine.prefill(sent).ids[:head].tolist()) == engine.preamble_ids
    assert report.rows_fraction < 0.8
    engine.drain()
    engine.prefix_cache.clear()  # the same rows once more: in bfloat16, other rows beside them can turn a near tie
    streaming: Any = index.as_query_engine(similarity_top_k=4, streaming=True).query(
        "In which drawer is the model kept?"
    )
    assert "".join(streaming.response_gen) == str(response)
    assert smollm2.metadata.is_chat_model
    assert not smollm2.metadata.is_function_calling_model  # as the README says
    assert smollm2.metadata.context_window == 8192
