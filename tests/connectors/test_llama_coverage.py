"""Every way in which core sends retrieved text to an LLM, on real text: each retrieved chunk is a hit.

The text is that of installed packages' READMEs. The model is tiny and random, which does for most ways: what it says
does not matter to what is sent. Where an app acts on an answer (routers, sub-questions, agents, rerankers) the answer
is dictated to the model's last layer, token by token, and everything else is as always.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import metadata
from typing import Any
from zlib import crc32

import llama_index.core
import numpy as np
import pytest
import tiny_tokenizers
import torch
from llama_bench import MakeEngine, Recorder, tiny_llama
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import LLMRerank, LongContextReorder, MetadataReplacementPostProcessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llama_index.llms.ragblend import RagBlendLLM, default_preamble
from llama_index.node_parser.ragblend import KVPrefill
from transformers import LlamaForCausalLM

from ragblend.settings import EngineSettings

# Core's agents use deprecated parts of core.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PACKAGES = (
    *("diskcache", "rich", "typer", "accelerate", "xxhash", "transformers", "sentence-transformers", "torch", "tqdm"),
    *("pydantic", "yarl", "regex", "psutil", "ruff", "threadpoolctl", "charset-normalizer", "frozenlist", "propcache"),
)
QUESTION = "How is a cache opened, and what does it cost to read from it?"
ASKED = (
    QUESTION,
    "How is a cache opened?",
    "How is a cache closed?",
    "And how is it closed?",
    "What does a bar look like?",
    f"input is {QUESTION}\n",  # as RetrieverTool puts it
)
"""All that is looked up in the index: only what is found is ingested."""
TOP_K = 5
SHORT = 8
"""Tokens of an answer that nobody dictates."""


class WordEmbedding(BaseEmbedding):
    """Texts that share words are close. The same in every process."""

    @classmethod
    def class_name(cls) -> str:
        return "WordEmbedding"

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = np.zeros(256)
        for word in text.lower().split():
            vector[crc32(word.encode()) % 256] += 1.0
        return list(vector / max(1.0, float(np.linalg.norm(vector))))

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Dictation:
    """Makes a model say given answers, in turn; after those, what it would say by itself.

    Its logits are overwritten per position, so that guesses that are checked ahead see the right ones, too.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._answers: deque[list[int]] = deque()
        self._now: list[int] = []
        self._positions = torch.zeros(1, dtype=torch.int64)
        self._prompt_tokens = 0
        model.model.rotary_emb.register_forward_pre_hook(self._at, with_kwargs=True)
        model.lm_head.register_forward_hook(self._say)

    def say(self, *answers: list[int]) -> None:
        self._answers = deque(answers)

    @property
    def left(self) -> int:
        return len(self._answers)

    def _at(self, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._positions = (named["position_ids"] if "position_ids" in named else given[1])[0]

    def _say(self, _module: Any, _given: Any, logits: torch.Tensor) -> torch.Tensor | None:
        first = int(self._positions[0])
        if first == 0:
            self._prompt_tokens = len(self._positions)
            self._now = self._answers.popleft() if self._answers else []
        rows = logits.shape[1]
        last = 0 if first == 0 else first + rows - self._prompt_tokens
        for row, n in enumerate(range(last - rows + 1, last + 1)):
            if 0 <= n < len(self._now):
                logits[0, row] = 0.0
                logits[0, row, self._now[n]] = 1.0
        return logits


@dataclass(frozen=True)
class Shelf:
    """An app's parts: engine, LLM, chunks of READMEs that are ingested, their index, and what the model is to say."""

    engine: Recorder
    llm: RagBlendLLM
    documents: Sequence[Document]
    nodes: Sequence[BaseNode]
    index: VectorStoreIndex
    dictation: Dictation

    def retrieved(self, retriever: Any = None, question: str = QUESTION) -> list[NodeWithScore]:
        return list((retriever or self.index.as_retriever(similarity_top_k=TOP_K)).retrieve(question))

    def ingest(self, nodes: Sequence[BaseNode]) -> Sequence[BaseNode]:
        self.engine.ingest(text_of(node) for node in nodes)
        return nodes

    def dictate(self, *answers: str) -> None:
        end = self.engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
        dictated = [[*self.engine.prompts.encode_text(answer), end] for answer in answers]
        self.llm.max_tokens = max(map(len, dictated))
        self.dictation.say(*dictated)


def text_of(node: BaseNode) -> str:
    return node.get_content(metadata_mode=MetadataMode.NONE).strip()


def texts_of(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [text_of(found.node) for found in nodes]


@pytest.fixture(scope="module")
def module_shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    before = llama_index.core.global_tokenizer
    llama_index.core.global_tokenizer = None
    tokenizer = tiny_tokenizers.chatml()
    model = tiny_llama(tokenizer, window=16384)
    engine = Recorder(
        model,
        tokenizer,
        tmp_path_factory.mktemp("coverage") / "kv",
        EngineSettings(preamble=default_preamble(is_chat_model=True), learn=False),
    )
    llm = RagBlendLLM.from_engine(engine, max_tokens=SHORT)
    documents = [
        Document(text=str(metadata(name)["Description"])[:6000], doc_id=name, metadata={"package": name})
        for name in PACKAGES
    ]
    nodes = SentenceSplitter(chunk_size=300, chunk_overlap=0).get_nodes_from_documents(documents)
    assert len(nodes) >= 300
    index = VectorStoreIndex(nodes, embed_model=WordEmbedding())
    retriever = index.as_retriever(similarity_top_k=TOP_K)
    engine.ingest(text_of(found.node) for question in ASKED for found in retriever.retrieve(question))
    yield Shelf(engine, llm, documents, nodes, index, Dictation(model))
    engine.close()
    llama_index.core.global_tokenizer = before


@pytest.fixture
def shelf(module_shelf: Shelf, settings: Any) -> Iterator[Shelf]:
    settings.llm = module_shelf.llm
    settings.embed_model = WordEmbedding()
    module_shelf.engine.prefix_cache.clear()
    module_shelf.engine.streams.clear()
    module_shelf.engine.prompts_ids.clear()
    yield module_shelf
    module_shelf.llm.max_tokens = SHORT
    left = module_shelf.dictation.left
    module_shelf.dictation.say()
    assert left == 0, "an answer was dictated and never asked for"


# -- the ways: each asks, and says which texts the model was sent -----------------------------------------------------

Way = Callable[[Shelf], Sequence[str]]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__.removeprefix("_")] = function
    return function


def _mode(mode: ResponseMode, *, asynchronous: bool, multimodal: bool = False) -> Way:
    def ask(shelf: Shelf) -> Sequence[str]:
        engine = shelf.index.as_query_engine(
            similarity_top_k=TOP_K, response_mode=mode, use_async=asynchronous, multimodal=multimodal
        )
        response = asyncio.run(engine.aquery(QUESTION)) if asynchronous else engine.query(QUESTION)
        return texts_of(response.source_nodes)

    return ask


for _each in ("compact", "refine", "tree_summarize", "accumulate", "simple_summarize", "compact_accumulate"):
    for _asynchronous in (False, True):
        WAYS[f"{_each}-{'async' if _asynchronous else 'sync'}"] = _mode(ResponseMode(_each), asynchronous=_asynchronous)
for _asynchronous in (False, True):
    WAYS[f"multimodal-{'async' if _asynchronous else 'sync'}"] = _mode(
        ResponseMode.COMPACT, asynchronous=_asynchronous, multimodal=True
    )


@way
def _streaming(shelf: Shelf) -> Sequence[str]:
    response: Any = shelf.index.as_query_engine(similarity_top_k=TOP_K, streaming=True).query(QUESTION)
    assert list(response.response_gen)
    return texts_of(response.source_nodes)


@way
def _citations(shelf: Shelf) -> Sequence[str]:
    CitationQueryEngine.from_args(shelf.index, similarity_top_k=TOP_K).query(QUESTION)
    return texts_of(shelf.retrieved())


@way
def _context_chat(shelf: Shelf) -> Sequence[str]:
    memory = ChatMemoryBuffer.from_defaults(llm=shelf.llm)
    chat = ContextChatEngine.from_defaults(shelf.index.as_retriever(similarity_top_k=TOP_K), memory=memory)
    asked = texts_of(chat.chat(QUESTION).source_nodes)
    second = chat.stream_chat("And how is it closed?")
    assert list(second.response_gen) is not None
    return [*asked, *texts_of(second.source_nodes)]


@way
def _condense_plus_context(shelf: Shelf) -> Sequence[str]:
    memory = ChatMemoryBuffer.from_defaults(llm=shelf.llm)
    chat = CondensePlusContextChatEngine.from_defaults(
        shelf.index.as_retriever(similarity_top_k=TOP_K), memory=memory, llm=shelf.llm
    )
    asked = texts_of(chat.chat(QUESTION).source_nodes)
    shelf.dictate("How is a cache closed?", "It is closed.")
    second = chat.chat("And how is it closed?")
    assert second.response == "It is closed."
    return [*asked, *texts_of(second.source_nodes)]


@way
def _simple_chat_with_pasted_chunks(shelf: Shelf) -> Sequence[str]:
    texts = texts_of(shelf.retrieved())
    chat = SimpleChatEngine.from_defaults(llm=shelf.llm, memory=ChatMemoryBuffer.from_defaults(llm=shelf.llm))
    chat.chat("I found this:\n\n" + "\n----\n".join(texts) + f"\n\n{QUESTION}")
    return texts


@way
def _router(shelf: Shelf) -> Sequence[str]:
    tools = [
        QueryEngineTool.from_defaults(shelf.index.as_query_engine(similarity_top_k=k), description=f"finds {k} texts")
        for k in (1, TOP_K)
    ]
    shelf.dictate(json.dumps([{"choice": 2, "reason": "more is better"}]))
    response = RouterQueryEngine(LLMSingleSelector.from_defaults(llm=shelf.llm), tools, llm=shelf.llm).query(QUESTION)
    assert len(response.source_nodes) == TOP_K
    return texts_of(response.source_nodes)


@way
def _sub_questions(shelf: Shelf) -> Sequence[str]:
    tool = QueryEngineTool.from_defaults(
        shelf.index.as_query_engine(similarity_top_k=TOP_K), name="readmes", description="READMEs"
    )
    questions = ["How is a cache opened?", "What does a bar look like?"]
    asked = {"items": [{"sub_question": question, "tool_name": "readmes"} for question in questions]}
    shelf.dictate(f"```json\n{json.dumps(asked)}\n```")
    engine = SubQuestionQueryEngine.from_defaults(
        [tool],
        llm=shelf.llm,
        question_gen=LLMQuestionGenerator.from_defaults(shelf.llm),
        use_async=False,
        verbose=False,
    )
    engine.query(QUESTION)
    return [text for question in questions for text in texts_of(shelf.retrieved(question=question))]


@way
def _retriever_tool_in_react(shelf: Shelf) -> Sequence[str]:
    tool = RetrieverTool.from_defaults(
        shelf.index.as_retriever(similarity_top_k=TOP_K), name="readmes", description="Looks things up in READMEs."
    )
    shelf.dictate(
        f'Thought: I look it up.\nAction: readmes\nAction Input: {{"input": "{QUESTION}"}}',
        "Thought: I can answer.\nAnswer: With a path.",
    )

    async def run() -> Any:
        return await ReActAgent(tools=[tool], llm=shelf.llm).run(user_msg=QUESTION)

    output = asyncio.run(run())
    assert str(output).strip() == "With a path."
    (call,) = output.tool_calls
    found = texts_of(call.tool_output.raw_output)
    assert len(found) == TOP_K
    return found


@way
def _auto_merging(shelf: Shelf) -> Sequence[str]:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[600, 150], chunk_overlap=0)
    nodes = shelf.ingest(parser.get_nodes_from_documents(list(shelf.documents[:2])))
    leaves = get_leaf_nodes(list(nodes))
    storage = llama_index.core.StorageContext.from_defaults(docstore=SimpleDocumentStore())
    storage.docstore.add_documents(nodes)
    base = VectorStoreIndex(leaves, storage_context=storage).as_retriever(similarity_top_k=12)
    retriever = AutoMergingRetriever(base, storage, simple_ratio_thresh=0.4)
    merged = texts_of(shelf.retrieved(retriever))
    assert set(merged) - {text_of(leaf) for leaf in leaves}  # some are parents now
    RetrieverQueryEngine.from_args(retriever, llm=shelf.llm).query(QUESTION)
    return merged


@way
def _sentence_windows(shelf: Shelf) -> Sequence[str]:
    transformations = [SentenceWindowNodeParser.from_defaults(), KVPrefill(llm=shelf.llm)]
    index = VectorStoreIndex.from_documents(list(shelf.documents[:1]), transformations=transformations)
    replace = MetadataReplacementPostProcessor("window")
    response = index.as_query_engine(similarity_top_k=TOP_K, node_postprocessors=[replace]).query(QUESTION)
    assert len(shelf.engine.streams[-1].report.chunks) == TOP_K  # and no parts of them
    return texts_of(response.source_nodes)


@way
def _long_context_reorder(shelf: Shelf) -> Sequence[str]:
    engine = shelf.index.as_query_engine(similarity_top_k=TOP_K, node_postprocessors=[LongContextReorder()])
    response = engine.query(QUESTION)
    assert texts_of(response.source_nodes) != texts_of(shelf.retrieved())
    return texts_of(response.source_nodes)


@way
def _reranker(shelf: Shelf) -> Sequence[str]:
    shelf.dictate("Doc: 3, Relevance: 9\nDoc: 1, Relevance: 7")
    rerank = LLMRerank(llm=shelf.llm, top_n=2)
    response = shelf.index.as_query_engine(similarity_top_k=TOP_K, node_postprocessors=[rerank]).query(QUESTION)
    retrieved = texts_of(shelf.retrieved())
    assert texts_of(response.source_nodes) == [retrieved[2], retrieved[0]]
    return retrieved  # the reranker's prompt holds all of them


@way
def _workflow_with_its_own_prompt(shelf: Shelf) -> Sequence[str]:
    class Own(Workflow):
        @step
        async def ask(self, event: StartEvent) -> StopEvent:
            found = await shelf.index.as_retriever(similarity_top_k=TOP_K).aretrieve(QUESTION)
            notes = "\n".join(f"[{n}] {text}" for n, text in enumerate(texts_of(found), 1))
            answer = await shelf.llm.acomplete(f"Notes:\n{notes}\n\nAsked: {QUESTION}\nAnswer:")
            return StopEvent(result=(answer.text, texts_of(found)))

    async def run() -> Any:
        return await Own(timeout=60).run()

    _, texts = asyncio.run(run())
    return list(texts)


@pytest.mark.parametrize("name", WAYS)
def test_every_chunk_that_is_sent_is_a_hit(shelf: Shelf, name: str) -> None:
    sent = WAYS[name](shelf)
    assert len(sent) >= 2
    uses = [use for stream in shelf.engine.streams for use in stream.report.chunks]
    assert {use.status for use in uses} <= {"hit", "prefix"}
    hit = {use.key for use in uses}
    for text in sent:
        assert hit & set(shelf.engine.stored_variants(text).values()), text


# -- text that is cut -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_chunks_that_are_cut_because_a_prompt_gets_too_long_reuse_their_beginnings(
    make_engine: MakeEngine, settings: Any, asynchronous: bool
) -> None:
    engine = make_engine(window=1024, learn=False, prefix_cache_bytes=0)
    settings.llm = RagBlendLLM.from_engine(engine, max_tokens=SHORT)
    settings.embed_model = WordEmbedding()
    documents = [Document(text=str(metadata(name)["Description"])[:6000]) for name in PACKAGES[:2]]
    nodes = SentenceSplitter(chunk_size=120, chunk_overlap=0).get_nodes_from_documents(documents)
    engine.ingest(text_of(node) for node in nodes)
    index = VectorStoreIndex(nodes).as_query_engine(similarity_top_k=8, use_async=asynchronous)
    response = asyncio.run(index.aquery(QUESTION)) if asynchronous else index.query(QUESTION)

    calls = list(zip(engine.prompts_ids, engine.streams, strict=True))
    assert len(calls) > 1
    statuses = []
    for ids, stream in calls:
        prompt = engine.prompts.decode(ids)
        for text in texts_of(response.source_nodes):
            begins = next((n for n in range(len(text), 63, -1) if text[:n] in prompt), 0)
            if begins:
                keys = engine.stored_variants(text).values()
                (use,) = (use for use in stream.report.chunks if use.key in keys)
                reused = engine.prompts.decode(ids[use.start : use.stop])
                assert text.startswith(reused)
                assert len(reused) > begins - (32 if begins < len(text) else 1)  # a cut is made at a word's border
                assert use.status == ("cut" if begins < len(text) else "hit")
                statuses.append(use.status)
        assert stream.report.misses == 0
    assert statuses.count("hit") >= 2
    assert statuses.count("cut") >= 2


# -- rewritten text ---------------------------------------------------------------------------------------------------


class Masked(BaseNodePostprocessor):
    """Blackens vowels all over a chunk, as filters do with names."""

    @classmethod
    def class_name(cls) -> str:
        return "Masked"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        masked = []
        for found in nodes:
            node = found.node.model_copy()
            node.set_content(text_of(node).replace("e", "*"))
            masked.append(NodeWithScore(node=node, score=found.score))
        return masked


class _Upper(Masked):
    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        for found in (copies := super()._postprocess_nodes(nodes)):
            found.node.set_content(text_of(found.node).upper())
        return copies


@pytest.mark.parametrize("rewrite", [Masked(), _Upper()])
def test_rewritten_chunks_do_not_hit_and_are_answered_as_by_a_full_prefill(
    shelf: Shelf, rewrite: BaseNodePostprocessor
) -> None:
    shelf.index.as_query_engine(similarity_top_k=TOP_K, node_postprocessors=[rewrite]).query(QUESTION)
    (stream,) = shelf.engine.streams
    assert (stream.report.hits, stream.report.reused_tokens) == (0, 0)
    ids = torch.tensor(shelf.engine.prompts_ids)
    stock = shelf.engine.decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=SHORT,
        pad_token_id=0,
        eos_token_id=sorted(shelf.engine.prompts.stop_ids),
    )
    assert stock[0, ids.shape[1] :].tolist()[: len(stream.token_ids)] == stream.token_ids


def test_of_a_chunk_rewritten_in_the_middle_what_stands_before_is_reused(shelf: Shelf) -> None:
    first, second = texts_of(shelf.retrieved())[:2]
    half = len(first) // 2
    answer = shelf.llm.complete(f"{first[:half]} (sic) {first[half:]}\n\n{second}\n\n{QUESTION}")
    assert answer.raw is not None
    uses = answer.raw["ragblend"]["chunks"]
    assert {use["status"] for use in uses} <= {"cut", "hit"}
    (ids,) = shelf.engine.prompts_ids
    reused = [shelf.engine.prompts.decode(ids[use["start"] : use["stop"]]) for use in uses]
    assert first[:half].startswith(reused[0])
    assert first not in reused
    assert second in reused


def test_dictation_says_what_it_is_told_and_then_stops(shelf: Shelf) -> None:
    shelf.dictate("Yes, it is. Yes, it is. Yes, it is.", "No.")
    assert [shelf.llm.complete(QUESTION).text for _ in range(2)] == [
        "Yes, it is. Yes, it is. Yes, it is.",
        "No.",
    ]
    assert Settings.llm is shelf.llm
