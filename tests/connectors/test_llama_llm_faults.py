"""RagBlendLLM: migrating from HuggingFaceLLM, counting tokens, other processes, closing, retrieved chunks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
import tiny_tokenizers
import torch
from llama_bench import TEXTS, MakeEngine, Recorder, tiny_llama
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.utils import get_tokenizer
from llama_index.llms.ragblend import RagBlendLLM

from ragblend.errors import InvalidSettingError, ModelNotFoundError, StoreError
from ragblend.store.kvstore import KVStore

QUESTION = "Who has the documents that say why?"
Open = Callable[..., RagBlendLLM]


@pytest.fixture(autouse=True)
def untouched_tokenizer() -> Iterator[None]:
    """As in a new process: nobody chose a tokenizer to count with."""
    before = llama_index.core.global_tokenizer
    llama_index.core.global_tokenizer = None
    yield
    llama_index.core.global_tokenizer = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizers.chatml()
    tiny_llama(tokenizer, window=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Iterator[Open]:
    """LLMs over the folder and one store, closed at the end."""
    made: list[RagBlendLLM] = []

    def make(**settings: Any) -> RagBlendLLM:
        if not settings.keys() & {"model", "model_name"}:
            settings["model"] = folder
        llm = RagBlendLLM(**{"store": tmp_path / "kv", "dtype": "float32", "max_tokens": 8} | settings)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


# -- HuggingFaceLLM's names -------------------------------------------------------------------------------------------


def test_an_app_of_huggingfacellm_changes_one_import(folder: Path, tmp_path: Path) -> None:
    llm = RagBlendLLM(
        store=tmp_path / "kv",
        model_name=str(folder),
        tokenizer_name=str(folder),
        context_window=2000,
        max_new_tokens=6,
        device_map="cpu",
        model_kwargs={"torch_dtype": torch.float32, "trust_remote_code": False, "low_cpu_mem_usage": True},
        tokenizer_kwargs={"max_length": 1024, "use_fast": True, "padding_side": "left"},
        generate_kwargs={"do_sample": True, "temperature": 0.5, "top_p": 0.9, "pad_token_id": 0, "num_beams": 1},
        tokenizer_outputs_to_remove=["token_type_ids"],
        query_wrapper_prompt="{query_str}",
        system_prompt="",
        is_chat_model=True,
    )
    assert llm.model_name == str(folder)
    assert (llm.max_tokens, llm.temperature, llm.top_p) == (6, 0.5, 0.9)
    assert llm.metadata.context_window == 1024
    assert llm.engine.decoder.dtype == torch.float32
    assert llm.complete(QUESTION).raw["usage"]["completion_tokens"] <= 6  # type: ignore[index]
    llm.close()


def test_a_loaded_model_and_its_tokenizer_may_be_handed_over_one_by_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.chatml()
    model = tiny_llama(tokenizer)
    llm = RagBlendLLM(model=model, tokenizer=tokenizer, model_name="mine", store=tmp_path / "kv", max_new_tokens=2)
    assert llm.engine.decoder.model is model
    assert llm.engine.tokenizer is tokenizer
    assert llm.model_name == "mine"
    llm.close()


def test_another_tokenizer_may_come_with_a_models_name(opened: Open, folder: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    own = tiny_tokenizers.with_template(tiny_tokenizers.chatml(), template)
    llm = opened(model=None, model_name=str(folder), tokenizer=own)
    assert llm.engine.tokenizer is own


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        # The example of HuggingFaceLLM's own documentation.
        ({"temperature": 0.7, "top_k": 50, "top_p": 0.95}, {"temperature": 0.7, "top_k": 50, "top_p": 0.95}),
        ({"max_new_tokens": 3, "repetition_penalty": 1.1}, {"max_tokens": 3, "repetition_penalty": 1.1}),
        ({"stop_strings": ["END"], "use_cache": True, "top_k": None}, {"stop": ("END",), "top_k": 0}),
    ],
)
def test_generate_kwargs_that_mean_something_here(opened: Open, kwargs: Any, expected: dict[str, Any]) -> None:
    llm = opened(max_tokens=256, generate_kwargs=kwargs)
    assert {name: getattr(llm, name) for name in expected} == expected


def test_stopping_ids_are_taken_where_the_model_stops_at_them_anyway(opened: Open) -> None:
    ends = sorted(opened().engine.prompts.stop_ids)
    assert opened(stopping_ids=ends).stopping_ids == tuple(ends)
    assert opened(generate_kwargs={"eos_token_id": ends}).stopping_ids == tuple(ends)
    with pytest.raises(InvalidSettingError, match=r"tokens \[5\] do not end an answer.*stop="):
        opened(stopping_ids=[5])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"generate_kwargs": {"num_beams": 4}}, "num_beams=4"),
        ({"generate_kwargs": {"typical_p": 0.9}}, "typical_p=0.9"),
        ({"generate_kwargs": {"max_new_tokens": 3}, "max_new_tokens": 4}, "max_tokens again"),
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_tokens is given twice"),
        ({"model_kwargs": {"load_in_4bit": True}}, "load_in_4bit.*hand both over"),
        ({"model_kwargs": {"trust_remote_code": True}}, "trust_remote_code"),
        ({"tokenizer_kwargs": {"revision": "x"}}, "revision"),
        ({"tokenizer_name": "other"}, "leave out tokenizer_name"),
        ({"device_map": {"model.layers.0": 0, "lm_head": "cpu"}}, "one device"),
        ({"device_map": "balanced"}, "one device"),
        ({"query_wrapper_prompt": "Say: {query_str}"}, "query_wrapper_prompt is for completion prompts"),
        ({"completion_to_prompt": lambda text: f"<|im_start|>user\n{text}"}, "completion_to_prompt writes the model's"),
        (
            {
                "messages_to_prompt": lambda messages: (
                    "<|im_end|>".join(str(message) for message in messages) + "<|im_end|>"
                )
            },
            "messages_to_prompt writes",
        ),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1"),
        ({"selector": "first"}, "selector is an object"),
        ({"context_window": 99999}, "context_window must be 1 to 2048"),
        ({"tokenizer": tiny_tokenizers.mistral()}, "use the model's own tokenizer"),
    ],
)
def test_what_cannot_be_honoured_is_refused(opened: Open, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSettingError, match=says):
        opened(**{"max_tokens": 256} | wrong)


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(tiny_tokenizers.chatml())
    with pytest.raises(InvalidSettingError, match="tokenizer="):
        RagBlendLLM(model=model, store=tmp_path / "kv")
    pair = (model, tiny_tokenizers.chatml())
    with pytest.raises(InvalidSettingError, match="leave out tokenizer"):
        RagBlendLLM(model=pair, tokenizer=tiny_tokenizers.chatml(), store=tmp_path / "kv")


def test_is_chat_model_is_the_templates_unless_it_is_said(make_engine: MakeEngine) -> None:
    chat = RagBlendLLM.from_engine(make_engine("chatml"), is_chat_model=False, query_wrapper_prompt="Say: {query_str}")
    assert not chat.metadata.is_chat_model
    base = make_engine("base_with_bos", store="other")
    with pytest.raises(InvalidSettingError, match="chat template"):
        RagBlendLLM.from_engine(base, is_chat_model=True)


@pytest.mark.parametrize("family", ["chatml", "base_with_bos"])
def test_ways_to_format_that_are_plain_text_are_used_once(make_engine: MakeEngine, family: str) -> None:
    engine = make_engine(family)
    llm = RagBlendLLM.from_engine(
        engine,
        max_tokens=1,
        is_chat_model=False,
        query_wrapper_prompt=PromptTemplate("Say: {query_str}"),
        messages_to_prompt=lambda messages: " / ".join(str(message.content) for message in messages),
    )
    llm.complete(QUESTION)
    llm.predict(PromptTemplate("{x}"), x=QUESTION)
    assert engine.prompts_ids[0] == engine.prompts_ids[1]
    assert engine.prompts.decode(engine.prompts_ids[0]).count("Say: ") == 1
    llm.chat([ChatMessage(role=MessageRole.USER, content="One."), ChatMessage(role=MessageRole.USER, content="Two.")])
    assert "One. / Two." in engine.prompts.decode(engine.prompts_ids[2])


# -- counting ---------------------------------------------------------------------------------------------------------


def test_core_counts_with_the_models_tokenizer(engine: Recorder) -> None:
    RagBlendLLM.from_engine(engine)
    ids = engine.prompts.encode_text(QUESTION)
    assert Settings.tokenizer(QUESTION) == ids
    assert get_tokenizer()(QUESTION) == ids
    assert PromptHelper()._token_counter.get_string_tokens(QUESTION) == len(ids)
    assert SentenceSplitter()._token_size(QUESTION) == len(ids)


def test_a_tokenizer_that_the_user_chose_stays(engine: Recorder) -> None:
    chosen = str.split
    Settings.tokenizer = chosen
    RagBlendLLM.from_engine(engine)
    assert Settings.tokenizer is chosen


def test_what_core_took_by_default_or_another_llm_gave_is_replaced(make_engine: MakeEngine) -> None:
    SentenceSplitter()  # makes core take its default
    assert llama_index.core.global_tokenizer is not None
    for family in ("chatml", "llama3"):
        engine = make_engine(family, store=family)
        RagBlendLLM.from_engine(engine)
        assert Settings.tokenizer(QUESTION) == engine.prompts.encode_text(QUESTION)


def test_core_is_left_alone_on_demand(engine: Recorder) -> None:
    RagBlendLLM.from_engine(engine, set_tokenizer=False)
    assert llama_index.core.global_tokenizer is None


# -- other processes --------------------------------------------------------------------------------------------------


def test_a_pickled_llm_opens_again_on_first_use_with_its_settings(opened: Open, texts: list[str]) -> None:
    llm = opened(temperature=0.5, seed=3, ratio=0.5, system_prompt="Be brief.", size_limit_bytes=10**8, stop="END")
    llm.engine.ingest(texts[:2])
    llm.max_tokens = 5
    prompt = f"{texts[1]}\n\n{texts[0]}\n\n{QUESTION}"
    again = pickle.loads(pickle.dumps(llm))
    assert again._engine is None
    assert again.model_dump() == llm.model_dump()
    answers = [one.complete(prompt) for one in (llm, again)]
    assert answers[0].text == answers[1].text
    assert answers[1].raw["ragblend"]["hits"] == 2  # the same store, the same keys
    assert again.engine is not llm.engine
    again.close()


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda llm: llm.model_copy(), lambda llm: llm.model_copy(deep=True)]
)
def test_a_copy_has_its_own_settings_and_the_same_engine(opened: Open, texts: list[str], copied: Any) -> None:
    llm = opened(temperature=0.5, seed=3, system_prompt="Be brief.")
    llm.engine.ingest(texts[:2])
    again = copied(llm)
    assert type(again) is RagBlendLLM
    assert again.model_dump() == llm.model_dump()
    assert again.engine is llm.engine
    again.max_tokens = 2
    assert llm.max_tokens == 8
    assert again.complete(f"{texts[0]}\n\n{QUESTION}").raw["ragblend"]["hits"] == 1
    again.close()
    with pytest.raises(InvalidSettingError, match="closed"):
        again.complete(QUESTION)
    assert llm.complete(f"{texts[1]}\n\n{QUESTION}").raw["ragblend"]["hits"] == 1  # type: ignore[index]


def test_a_copy_hears_what_is_retrieved_when_the_original_is_gone(engine: Recorder, texts: list[str]) -> None:
    llm = RagBlendLLM.from_engine(engine, max_tokens=2)
    again = copy.deepcopy(llm)
    del llm
    gc.collect()
    _retrieve(texts[:2])
    assert again.complete("\n\n".join([*texts[:2], QUESTION])).raw["ragblend"]["misses"] == 2  # type: ignore[index]


def test_what_holds_an_llm_can_be_copied_deep(opened: Open) -> None:
    llm = opened(lazy=True)
    parts = copy.deepcopy({"llm": llm, "same": llm, "structured": llm.as_structured_llm(Said)})
    assert parts["llm"] is parts["same"] is parts["structured"].llm
    assert parts["llm"] is not llm
    assert parts["llm"]._engine is None  # a lazy one stays lazy
    assert parts["llm"].engine is not llm.engine
    engine = parts["llm"].engine
    parts["llm"].close()
    assert engine.closed
    assert not llm.engine.closed


def test_another_process_answers_alike(
    opened: Open, folder: Path, tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    llm = opened(store="kv")
    monkeypatch.chdir(folder)
    llm.engine.ingest(texts[:1])
    (tmp_path / "llm.pickle").write_bytes(pickle.dumps(llm))
    program = (
        "import pickle, sys, warnings\n"
        "llm = pickle.loads(open(sys.argv[1], 'rb').read())\n"
        "answer = llm.complete(sys.argv[2])\n"
        "print(answer.raw['ragblend']['hits'], repr(answer.text))\n"
        "llm.close()\n"
    )
    prompt = f"{texts[0]}\n\n{QUESTION}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "llm.pickle"), prompt],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    assert done.stdout.strip() == f"1 {llm.complete(prompt).text!r}"


@pytest.mark.parametrize("kind", ["pair", "store", "engine"])
def test_what_holds_loaded_objects_cannot_be_pickled(engine: Recorder, folder: Path, tmp_path: Path, kind: str) -> None:
    tokenizer = tiny_tokenizers.chatml()
    if kind == "engine":
        llm = RagBlendLLM.from_engine(engine)
    elif kind == "pair":
        llm = RagBlendLLM((tiny_llama(tokenizer), tokenizer), store=tmp_path / "own")
    else:
        llm = RagBlendLLM(folder, store=KVStore(tmp_path / "own"), dtype="float32", lazy=True)
    with pytest.raises(InvalidSettingError, match="pickled"):
        pickle.dumps(llm)
    llm.close()


def test_a_lazy_llm_shows_what_is_wrong_on_first_use(opened: Open, tmp_path: Path) -> None:
    llm = opened(model=tmp_path / "nowhere", lazy=True)
    with pytest.raises(ModelNotFoundError):
        llm.complete(QUESTION)
    wrong = opened(context_window=9999, lazy=True)
    with pytest.raises(InvalidSettingError, match="2048"):
        wrong.complete(QUESTION)


TEMPLATE = PromptTemplate("Read: {context_str}\nSay: {query_str}")
SLOTS = {"context_str": TEXTS[:1], "query_str": QUESTION}
ASKED = [ChatMessage(role=MessageRole.USER, content=QUESTION)]


class Said(BaseModel):
    """What was said."""

    text: str


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.acomplete(QUESTION),
        lambda llm: llm.achat(ASKED),
        lambda llm: llm.astream_complete(QUESTION),
        lambda llm: llm.astream_chat(ASKED),
        lambda llm: llm.apredict(TEMPLATE, **SLOTS),
        lambda llm: llm.astream(TEMPLATE, **SLOTS),
        lambda llm: llm.astructured_predict(Said, TEMPLATE, **SLOTS),
        lambda llm: llm.astream_structured_predict(Said, TEMPLATE, **SLOTS),
        lambda llm: llm.as_structured_llm(Said).apredict(TEMPLATE, **SLOTS),
        lambda llm: llm.as_structured_llm(Said).achat(ASKED),
        lambda llm: llm.apredict_and_call([FunctionTool.from_defaults(repr)], user_msg=QUESTION),
    ],
)
def test_a_lazy_llm_loads_its_model_beside_the_event_loop(folder: Path, tmp_path: Path, ask: Any) -> None:
    threads: list[threading.Thread] = []

    class Noting(RagBlendLLM):
        def _opened(self, *args: Any) -> Any:
            threads.append(threading.current_thread())
            return super()._opened(*args)

    llm = Noting(folder, store=tmp_path / "kv", dtype="float32", max_tokens=2, lazy=True)

    async def run() -> None:
        answer = await ask(llm)
        if isinstance(answer, AsyncIterator):
            async for _ in answer:
                pass

    with contextlib.suppress(ValueError):  # this model says nothing that has a structure, and calls nothing
        asyncio.run(run())
    llm.close()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_many_threads_that_come_first_open_one_engine(opened: Open) -> None:
    llm = opened(lazy=True)
    together = threading.Barrier(16)

    def first(_: int) -> int:
        together.wait()
        return id(llm.engine)

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(first, range(16)))) == 1


# -- closing ----------------------------------------------------------------------------------------------------------


def test_close_frees_the_model(opened: Open, texts: list[str]) -> None:
    llm = opened()
    llm.remember(texts[:2])
    assert llm.complete(f"{texts[0]}\n\n{texts[3]}\n\n{QUESTION}").text is not None
    list(llm.stream_complete(QUESTION))
    asyncio.run(llm.acomplete(QUESTION))
    model, engine = weakref.ref(llm.engine.decoder.model), weakref.ref(llm.engine)
    llm.close()
    gc.collect()
    assert (model(), engine()) == (None, None)
    assert llm.last_report is not None
    with pytest.raises(InvalidSettingError, match="closed"):
        llm.complete(QUESTION)


# -- texts that recur, and texts that are retrieved -------------------------------------------------------------------


def test_what_is_remembered_is_reused_in_any_prompt(llm: RagBlendLLM) -> None:
    rules = "House rules: answer in one sentence, name your source, and say so if you do not know."
    assert llm.remember([rules, rules]).computed == 1
    chat = [ChatMessage(role=MessageRole.SYSTEM, content=rules), ChatMessage(role=MessageRole.USER, content=QUESTION)]
    assert llm.chat(chat).raw["ragblend"]["hits"] == 1  # type: ignore[index]
    assert llm.complete(f"Mind this. {rules} {QUESTION}").raw["ragblend"]["hits"] == 1  # type: ignore[index]


def _retrieve(texts: list[str]) -> list[NodeWithScore]:
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in texts], embed_model=MockEmbedding(embed_dim=4)
    )
    return list(index.as_retriever(similarity_top_k=len(texts)).retrieve(QUESTION))


def test_retrieved_chunks_miss_once_and_are_learned(llm: RagBlendLLM, engine: Recorder, texts: list[str]) -> None:
    engine.ingest(texts[:1])
    prompt = "\n\n".join([*texts[:4], QUESTION])
    _retrieve(texts[:3])
    first = llm.complete(prompt).raw
    assert first is not None
    assert (first["ragblend"]["hits"], first["ragblend"]["misses"]) == (1, 2)  # the fourth was not retrieved
    engine.drain()
    engine.prefix_cache.clear()
    again = llm.complete(prompt).raw
    assert again is not None
    assert (again["ragblend"]["hits"], again["ragblend"]["misses"]) == (3, 0)


def test_a_retrieval_waits_for_nobody_who_writes_to_the_store(
    llm: RagBlendLLM, engine: Recorder, texts: list[str]
) -> None:
    (database,) = engine.store.directory.rglob("texts/cache.db")
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        _retrieve(texts[:2])
        assert time.monotonic() - started < 2.0  # before, it waited until the lock was given up
        other.execute("ROLLBACK")
    assert llm.complete("\n\n".join([*texts[:2], QUESTION])).raw["ragblend"]["misses"] == 2  # type: ignore[index]


def test_retrieved_chunks_are_left_alone_on_demand(engine: Recorder, texts: list[str]) -> None:
    llm = RagBlendLLM.from_engine(engine, learn_retrieved=False, max_tokens=2)
    _retrieve(texts[:2])
    assert llm.complete("\n\n".join([*texts[:2], QUESTION])).raw["ragblend"]["chunks"] == ()  # type: ignore[index]


def test_an_engine_that_does_not_learn_expects_nothing(make_engine: MakeEngine, texts: list[str]) -> None:
    llm = RagBlendLLM.from_engine(make_engine(learn=False), max_tokens=2)
    llm.expect(texts[:2])
    assert llm.complete("\n\n".join([*texts[:2], QUESTION])).raw["ragblend"]["chunks"] == ()  # type: ignore[index]


@pytest.mark.parametrize("learn_retrieved", [False, True])
def test_the_kv_of_retrieved_chunks_is_read_ahead(engine: Recorder, texts: list[str], learn_retrieved: bool) -> None:
    llm = RagBlendLLM.from_engine(engine, learn_retrieved=learn_retrieved)
    engine.ingest(texts[:2])
    before = engine.store.stats()
    assert len(_retrieve(texts[:3])) == 3
    (reading,) = engine.prefetched
    keys = [engine.stored_variants(text) for text in texts[:2]]
    sizes = [{path.stat().st_size for path in engine.store.paths(list(each.values())).values()} for each in keys]
    assert reading.result(10) == sum(min(each) for each in sizes)
    after = engine.store.stats()
    assert (after.hits, after.misses, after.chunks) == (before.hits, before.misses, before.chunks)
    llm.close()
    _retrieve(texts[:2])
    assert len(engine.prefetched) == 1


def test_listening_keeps_nobody_alive_and_adds_one_handler(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = len(get_dispatcher().event_handlers)
    llms = [weakref.ref(RagBlendLLM.from_engine(engine)) for _ in range(5)]
    assert len(get_dispatcher().event_handlers) <= before + 1
    gc.collect()
    assert [llm() for llm in llms] == [None] * 5
    _retrieve(TEXTS[:2])


def test_what_goes_wrong_while_listening_is_logged_and_stops_nothing(
    engine: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    def fails(texts: Any) -> None:
        raise StoreError("the disk is on fire")

    llm = RagBlendLLM.from_engine(engine)
    monkeypatch.setattr(engine, "expect", fails)
    with caplog.at_level(logging.WARNING, logger="llama_index.llms.ragblend"):
        assert len(_retrieve(texts[:2])) == 2
    assert "was not taken notice of" in caplog.text
    llm.close()
    caplog.clear()
    node = NodeWithScore(node=TextNode(text=texts[0]))
    get_dispatcher().event(RetrievalEndEvent(str_or_query_bundle=QUESTION, nodes=[node]))
    assert caplog.text == ""


def test_an_engine_that_was_closed_beneath_its_llm_is_told_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = RagBlendLLM.from_engine(engine)
    engine.close()
    engine.store.close()
    assert engine.closed
    llm.retrieved(["A text that is long enough to be found in a prompt by itself."])  # raised a StoreError before
