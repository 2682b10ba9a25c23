"""BlendSynthesizer: nodes stay chunks of their own, whatever their length, and what does not fit is named."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from llama_bench import MakeEngine, Recorder
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate, SelectorPromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.ragblend import RagBlendLLM, default_preamble
from llama_index.response_synthesizers.ragblend import BlendSynthesizer

from ragblend.errors import ContextWindowError, InvalidSettingError

QUESTION = "Who has the documents that say why?"
FAMILIES = ["chatml", "llama2", "gemma", "base_with_bos"]


def found(texts: list[str], *scores: float | None, **metadata: Any) -> list[NodeWithScore]:
    """Nodes called n0, n1, ... with these scores; descending ones by default."""
    given = scores or [1.0 - n / 10 for n in range(len(texts))]
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"n{n}", metadata=dict(metadata)), score=score)
        for n, (text, score) in enumerate(zip(texts, given, strict=True))
    ]


@pytest.fixture
def synthesizer(llm: RagBlendLLM, settings: Any) -> BlendSynthesizer:
    return BlendSynthesizer(llm)


def test_chunks_stand_in_the_order_of_their_scores_and_the_report_names_their_nodes(
    synthesizer: BlendSynthesizer, engine: Recorder, texts: list[str]
) -> None:
    engine.ingest(texts[:2])
    short = "Drawer nine."  # too short to be found by its text
    response = synthesizer.synthesize(QUESTION, found([texts[0], short, texts[1]], 0.2, 0.9, None, shelf="b 7"))
    report = response.metadata["ragblend"]
    assert [(use["node_id"], use["status"]) for use in report["chunks"]] == [
        ("n1", "miss"),
        ("n0", "hit"),
        ("n2", "hit"),
    ]
    assert (report["hits"], report["misses"], report["dropped"]) == (2, 1, [])
    assert [node.node.node_id for node in response.source_nodes] == ["n1", "n0", "n2"]
    assert response.metadata["n0"] == {"shelf": "b 7"}
    prompt = engine.prompts.decode(engine.prompts_ids[-1])
    assert f"shelf: b 7\n\n{short}\n\nshelf: b 7\n\n{texts[0]}\n\n" in prompt
    # Learned, although nobody ingested it and no text search could find it.
    engine.drain()
    engine.prefix_cache.clear()
    assert synthesizer.synthesize(QUESTION, found([short])).metadata["ragblend"]["hits"] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_chunk_stands_right_behind_the_preamble(
    make_engine: MakeEngine, settings: Any, texts: list[str], family: str
) -> None:
    engine = make_engine(family, window=16384)
    engine.ingest(texts[:3])
    synthesizer = BlendSynthesizer(RagBlendLLM.from_engine(engine, max_tokens=4))
    chunks = synthesizer.synthesize(QUESTION, found(texts[:3])).metadata["ragblend"]["chunks"]
    assert {use["status"] for use in chunks} == {"hit"}
    head = len(engine.preamble_ids)
    assert chunks[0]["start"] == head
    assert tuple(engine.prompts_ids[-1][:head]) == engine.preamble_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_what_core_sends(make_engine: MakeEngine, settings: Any, texts: list[str], family: str) -> None:
    engine = make_engine(family, window=16384)
    engine.ingest(texts[:3])
    settings.llm = llm = RagBlendLLM.from_engine(engine, max_tokens=4, system_prompt="Be brief.")
    index = VectorStoreIndex([node.node for node in found(texts[:3])], embed_model=MockEmbedding(embed_dim=4))
    plain = index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTION)
    ours = index.as_query_engine(response_synthesizer=BlendSynthesizer(llm), similarity_top_k=3).query(QUESTION)
    assert engine.prompts_ids[0] == engine.prompts_ids[1]
    assert str(ours) == str(plain)


def test_streaming_and_async_answer_alike(llm: RagBlendLLM, settings: Any, texts: list[str]) -> None:
    settings.llm = llm
    llm.remember(texts[:3])
    index = VectorStoreIndex([node.node for node in found(texts[:3])], embed_model=MockEmbedding(embed_dim=4))
    plain, streaming = BlendSynthesizer(llm), BlendSynthesizer(llm, streaming=True)
    expected = str(index.as_query_engine(response_synthesizer=plain, similarity_top_k=3).query(QUESTION))

    async def asked() -> tuple[str, str, Any]:
        answer = await index.as_query_engine(response_synthesizer=plain, similarity_top_k=3).aquery(QUESTION)
        stream: Any = await index.as_query_engine(response_synthesizer=streaming, similarity_top_k=3).aquery(QUESTION)
        pieces = [piece async for piece in stream.async_response_gen()]
        return str(answer), "".join(pieces), stream.metadata

    answer, pieces, metadata = asyncio.run(asked())
    assert (answer, pieces) == (expected, expected)
    assert metadata["ragblend"]["hits"] == 3
    stream: Any = index.as_query_engine(response_synthesizer=streaming, similarity_top_k=3).query(QUESTION)
    assert "hits" not in stream.metadata["ragblend"]  # not over yet
    assert "".join(stream.response_gen) == expected
    assert [use["node_id"] for use in stream.metadata["ragblend"]["chunks"]]
    assert stream.metadata["ragblend"]["finish_reason"]


def test_closing_a_stream_stops_the_compute(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str]
) -> None:
    llm.max_tokens = 500
    response: Any = BlendSynthesizer(llm, streaming=True).synthesize(QUESTION, found(texts[:2]))
    next(response.response_gen)
    response.response_gen.close()
    assert engine.streams[-1].report.finish_reason == "cancelled"


def test_what_does_not_fit_is_left_out_lowest_score_first_and_named(
    make_engine: MakeEngine, settings: Any, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(window=512)
    engine.ingest(texts)
    synthesizer = BlendSynthesizer(RagBlendLLM.from_engine(engine, max_tokens=16))
    with caplog.at_level(logging.WARNING):
        response = synthesizer.synthesize(QUESTION, found(texts[:6], 0.1, 0.9, 0.2, 0.8, 0.3, 0.7))
    report = response.metadata["ragblend"]
    used = [use["node_id"] for use in report["chunks"]]
    assert used == ["n1", "n3", "n5", "n4", "n2", "n0"][: len(used)]
    assert 1 <= len(used) < 6
    assert [*used, *report["dropped"]] == ["n1", "n3", "n5", "n4", "n2", "n0"]
    assert f"{6 - len(used)} of 6 retrieved nodes do not fit" in caplog.text
    assert report["prompt_tokens"] + 16 <= 512
    assert [node.node.node_id for node in response.source_nodes] == used


def test_a_window_that_not_even_one_node_fits_is_a_typed_error(
    make_engine: MakeEngine, settings: Any, texts: list[str]
) -> None:
    synthesizer = BlendSynthesizer(RagBlendLLM.from_engine(make_engine(window=512), max_tokens=16))
    long = found([" ".join(texts * 3), " ".join(texts * 4)])
    with pytest.raises(ContextWindowError) as caught:
        synthesizer.synthesize(QUESTION, long)
    assert caught.value.context_window_tokens == 512 < caught.value.prompt_tokens
    with pytest.raises(ContextWindowError):
        asyncio.run(synthesizer.asynthesize(QUESTION, long))


def test_a_template_of_ones_own(llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str]) -> None:
    template = PromptTemplate("Read, in {tone}:\n{context_str}\nThen say: {query_str}")
    synthesizer = BlendSynthesizer(llm, text_qa_template=template)
    assert synthesizer.get_prompts() == {"text_qa_template": template}
    synthesizer.synthesize(QUESTION, found(texts[:1]), tone="earnest")
    assert f"Read, in earnest:\n{texts[0]}\nThen say: {QUESTION}" in engine.prompts.decode(engine.prompts_ids[-1])
    synthesizer.update_prompts({"text_qa_template": PromptTemplate("Only {query_str}")})
    with pytest.raises(InvalidSettingError, match="context_str"):
        synthesizer.synthesize(QUESTION, found(texts[:1]))


def _plain(template: PromptTemplate) -> BasePromptTemplate:
    return template


def _selected(template: PromptTemplate) -> BasePromptTemplate:
    never = PromptTemplate("never {context_str}")
    return SelectorPromptTemplate(never, [(lambda llm: isinstance(llm, RagBlendLLM), template)])


def _partial(template: PromptTemplate) -> BasePromptTemplate:
    return template.partial_format(tone="earnest")


@pytest.mark.parametrize("wrapped", [_plain, _selected, _partial])
def test_functions_of_a_template_get_the_passages_and_the_model_what_they_make_of_them(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str], wrapped: Any
) -> None:
    llm.remember(texts[:3])

    def asked(**functions: Any) -> tuple[str, list[tuple[str, str]]]:
        template = PromptTemplate("Read:\n{context_str}\nThen say: {query_str}", function_mappings=functions)
        synthesizer = BlendSynthesizer(llm, text_qa_template=wrapped(template))
        chunks = synthesizer.synthesize(QUESTION, found(texts[:3])).metadata["ragblend"]["chunks"]
        return engine.prompts.decode(engine.prompts_ids[-1]), [(use["node_id"], use["status"]) for use in chunks]

    seen: list[str] = []

    def redacted(**known: Any) -> str:
        seen.append(known["context_str"])
        return str(known["context_str"]).replace(" is kept in drawer ", " [REDACTED] ")

    prompt, chunks = asked(context_str=redacted)
    assert set(seen) == {"\n\n".join(texts[:3])}
    assert "drawer" not in prompt
    assert prompt.count("[REDACTED]") == 3
    assert chunks == []
    prompt, chunks = asked(context_str=lambda **known: known["context_str"].upper())
    assert "\n\n".join(texts[:3]).upper() in prompt
    assert chunks == []
    # What a function leaves alone is found: all of it, or the passages around one that it rewrote.
    prompt, chunks = asked(context_str=lambda **known: f"<{known['context_str']}>", query_str=lambda **known: "Why?")
    assert "<" + "\n\n".join(texts[:3]) + ">\nThen say: Why?" in prompt
    assert [node for node, _ in chunks] == ["n0", "n1", "n2"]
    engine.prefix_cache.clear()
    _, chunks = asked(context_str=lambda **known: known["context_str"].replace(texts[1], "(none of your business)"))
    assert chunks == [("n0", "hit"), ("n2", "hit")]


def test_a_function_of_a_template_may_make_another_variable_of_the_passages(
    llm: RagBlendLLM, engine: Recorder, settings: Any, texts: list[str]
) -> None:
    numbered = PromptTemplate(
        "Read these {n}:\n{notes}\nThen say: {query_str}",
        function_mappings={
            "n": lambda **known: str(len(known["context_str"].split("\n\n"))),
            "notes": lambda **known: "".join(f"* {note}\n" for note in known["context_str"].split("\n\n")),
        },
    )
    llm.remember(texts[:2])
    report = BlendSynthesizer(llm, text_qa_template=numbered).synthesize(QUESTION, found(texts[:2])).metadata
    prompt = engine.prompts.decode(engine.prompts_ids[-1])
    assert f"Read these 2:\n* {texts[0]}\n* {texts[1]}\n" in prompt
    assert [use["node_id"] for use in report["ragblend"]["chunks"]] == ["n0", "n1"]


def test_what_a_user_makes_of_messages_is_made_of_rewritten_passages_once(
    make_engine: MakeEngine, settings: Any, texts: list[str]
) -> None:
    engine = make_engine()
    llm = RagBlendLLM.from_engine(
        engine, max_tokens=2, messages_to_prompt=lambda messages: f"Begin {messages[-1].content} End"
    )
    shouted = PromptTemplate(
        "{context_str} {query_str}", function_mappings={"context_str": lambda **known: known["context_str"].upper()}
    )
    BlendSynthesizer(llm, text_qa_template=shouted).synthesize(QUESTION, found(texts[:1]))
    prompt = engine.prompts.decode(engine.prompts_ids[-1])
    assert f"Begin {texts[0].upper()} {QUESTION} End" in prompt
    assert prompt.count("Begin") == 1


def test_passages_that_the_question_repeats_are_computed(
    synthesizer: BlendSynthesizer, engine: Recorder, settings: Any
) -> None:
    synthesizer.synthesize("Is it drawer nine?", found(["drawer nine"]))
    assert engine.streams[-1].report.chunks == ()


def test_a_preamble_ends_where_a_function_begins() -> None:
    template = PromptTemplate(
        "Read, on {day}:\n{context_str}\n{query_str}",
        function_mappings={"context_str": lambda **known: known["context_str"].upper()},
    )
    (head,) = default_preamble(template.partial_format(day="Monday"), is_chat_model=True)
    assert head.content == ("Read, on Monday:\n",)
    daily = PromptTemplate(
        "Read, on {day}:\n{context_str}\n{query_str}",
        function_mappings={"day": lambda **known: known["weekday"]},
    )
    (head,) = default_preamble(SelectorPromptTemplate(daily), is_chat_model=True)
    assert head.content == ("Read, on ",)


def test_texts_instead_of_nodes_are_chunks_too(
    synthesizer: BlendSynthesizer, llm: RagBlendLLM, texts: list[str]
) -> None:
    assert synthesizer.get_response(QUESTION, [texts[0], " ", texts[1]])
    assert llm.last_report is not None
    assert len(llm.last_report.chunks) == 2
    asyncio.run(synthesizer.aget_response(QUESTION, texts[:3]))
    assert len(llm.last_report.chunks) == 3


def test_other_chunks_in_the_prompt_are_not_taken_for_nodes(
    make_engine: MakeEngine, settings: Any, texts: list[str]
) -> None:
    rules = "Answer in one sentence, name your source, and say so if you do not know."
    engine = make_engine(preamble=default_preamble(is_chat_model=True, system_prompt=rules))
    llm = RagBlendLLM.from_engine(engine, max_tokens=4, system_prompt=rules)
    llm.remember([rules, *texts[:2]])
    chunks = BlendSynthesizer(llm).synthesize(QUESTION, found(texts[:2])).metadata["ragblend"]["chunks"]
    assert [use["node_id"] for use in chunks] == [None, "n0", "n1"]


def test_without_nodes_or_text_there_is_the_empty_response(synthesizer: BlendSynthesizer) -> None:
    for nodes in ([], found(["", " \n"])):
        response = synthesizer.synthesize(QUESTION, nodes)
        assert str(response) == "Empty Response"
        assert response.metadata["ragblend"] == {"dropped": []}


def test_another_llm_is_refused(settings: Any) -> None:
    with pytest.raises(InvalidSettingError, match="RagBlendLLM"):
        BlendSynthesizer(MockLLM())
