"""KVPrefill: what an IngestionPipeline may do to a transformation with side effects, and what it must not break."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from llama_bench import MakeEngine, Recorder
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.schema import BaseNode, Document, TextNode
from llama_index.llms.ragblend import RagBlendLLM
from llama_index.node_parser.ragblend import KVPrefill
from llama_index.node_parser.ragblend import base as node_parser

from ragblend.errors import ContextWindowError, InvalidSettingError

VARIANTS = 2  # of a chunk without known neighbours: behind the head, and behind head and filler


@pytest.fixture
def nodes(texts: list[str]) -> list[BaseNode]:
    return [TextNode(text=text, metadata={"file": f"{n}.txt"}) for n, text in enumerate(texts[:4])]


def test_nodes_come_back_as_they_were_and_their_kv_is_stored(engine: Recorder, nodes: list[BaseNode]) -> None:
    before = [node.to_dict() for node in nodes]
    prefill = KVPrefill(engine=engine)
    assert prefill(nodes) is nodes
    assert [node.to_dict() for node in nodes] == before
    assert len(engine.store) == 4 * VARIANTS
    assert prefill.last_report is not None
    assert prefill.last_report.computed == 4


def test_running_again_computes_nothing(engine: Recorder, nodes: list[BaseNode]) -> None:
    prefill = KVPrefill(engine=engine)
    prefill(nodes)
    prefill(nodes)
    assert prefill.last_report is not None
    assert (prefill.last_report.computed, prefill.last_report.already_stored) == (0, 4)


def test_embedded_nodes_are_prefilled_behind_their_neighbours(engine: Recorder, texts: list[str]) -> None:
    vectors = [[1.0, 0.0], [0.0, 2.0], [3.0, 0.1], [0.1, 1.0]]
    nodes = [TextNode(text=text, embedding=vector) for text, vector in zip(texts[:4], vectors, strict=True)]
    prefill = KVPrefill(engine=engine)
    prefill(nodes)
    assert prefill.last_report is not None
    behind = [entry for entry in prefill.last_report.entries if entry.variant != "head"]
    assert {entry.text for entry in behind} == {0, 1, 2, 3}
    assert {entry.variant for entry in behind} <= {"neighbour", "copy", "filler"}
    assert any(entry.neighbours for entry in behind)
    nodes[3].embedding = None  # not all of them say where they are
    prefill(nodes)
    assert {entry.variant for entry in prefill.last_report.entries} == {"head", "filler"}


def test_with_the_policy_document_nodes_are_prefilled_behind_the_one_before(
    make_engine: MakeEngine, texts: list[str]
) -> None:
    prefill = KVPrefill(engine=make_engine(policy="document"))
    documents = [Document(text=texts[0], id_="a"), Document(text=texts[1], id_="b")]
    split = SentenceSplitter(chunk_size=24, chunk_overlap=0).get_nodes_from_documents(documents)
    prefill(split)
    assert prefill.last_report is not None
    first = {next(n for n, node in enumerate(split) if node.ref_doc_id == document.id_) for document in documents}
    for number in range(len(split)):
        (variant,) = {e.variant for e in prefill.last_report.entries if e.text == number and e.variant != "head"}
        assert variant == ("filler" if number in first else "before")
    assert len(split) > 3


def test_a_chunk_is_a_nodes_content_whatever_its_metadata_and_id(engine: Recorder, texts: list[str]) -> None:
    prefill = KVPrefill(engine=engine)
    prefill([TextNode(text=texts[0], metadata={"file_path": "a.txt"})])
    prefill([TextNode(text=f"\n{texts[0]}  ", metadata={"file_path": "b.txt", "page": 3})])
    assert len(engine.store) == VARIANTS


def test_a_text_that_will_replace_a_nodes_own_is_prefilled_instead(engine: Recorder, texts: list[str]) -> None:
    sentence, window = texts[0].split(". ")[0], " ".join(texts[:3])

    def stored(node: BaseNode, **settings: Any) -> list[str]:
        prefill = KVPrefill(engine=engine, **settings)
        prefill([node])
        found = [text for text in (sentence, window) if engine.stored_variants(text)]
        for text in found:
            for key in engine.variant_keys(text).values():
                engine.store.delete(key)
        return found

    def node(key: str, value: Any, *, shown: bool = False) -> BaseNode:
        return TextNode(text=sentence, metadata={key: value}, excluded_llm_metadata_keys=[] if shown else [key])

    assert stored(node("window", window)) == [window]
    assert stored(node("window", window), window_metadata_key=None) == [sentence]
    assert stored(node("around", window)) == [sentence]
    assert stored(node("around", window), window_metadata_key="around") == [window]
    # Metadata that happens to have this name.
    assert stored(node("window", window, shown=True)) == [sentence]
    assert stored(node("window", 5)) == [sentence]


def test_a_cached_pipeline_comes_back_for_other_texts(engine: Recorder, texts: list[str]) -> None:
    documents = [Document(text=" ".join(texts[:3]))]
    pipeline = IngestionPipeline(transformations=[SentenceWindowNodeParser.from_defaults(), KVPrefill(engine=engine)])
    (sentence, *_) = pipeline.run(documents=documents)
    assert not engine.stored_variants(sentence.get_content())
    pipeline.transformations[-1] = KVPrefill(engine=engine, window_metadata_key=None)
    pipeline.run(documents=documents)
    assert engine.stored_variants(sentence.get_content())


def test_empty_nodes_are_skipped(engine: Recorder, texts: list[str]) -> None:
    prefill = KVPrefill(engine=engine)
    nodes = [TextNode(text=""), TextNode(text=" \n", metadata={"a": "b"}), TextNode(text=texts[0])]
    assert len(prefill(nodes)) == 3
    assert prefill.last_report is not None
    assert (prefill.last_report.computed, prefill.last_report.empty) == (1, 2)
    assert prefill([]) == []


def test_it_takes_the_llm_or_the_engine(llm: RagBlendLLM, engine: Recorder) -> None:
    assert KVPrefill(llm=llm).model_dump() == KVPrefill(engine=engine).model_dump()
    with pytest.raises(InvalidSettingError, match=r"llm=.*engine="):
        KVPrefill()
    with pytest.raises(InvalidSettingError, match=r"llm=.*engine="):
        KVPrefill(llm=llm, engine=engine)
    for wrong in ({"llm": MockLLM()}, {"engine": llm}, {"llm": engine}):
        with pytest.raises(InvalidSettingError, match="give llm=RagBlendLLM"):
            KVPrefill(**wrong)


def test_the_fields_say_what_stored_kv_depends_on(
    make_engine: MakeEngine, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = KVPrefill(engine=engine).to_dict()
    assert KVPrefill(engine=make_engine()).to_dict() == fields, "same model, preamble and folder"
    other_head = KVPrefill(engine=make_engine(preamble="Read this: ")).to_dict()
    assert other_head["model_fingerprint"] != fields["model_fingerprint"]
    assert other_head["store_epoch"] == fields["store_epoch"]
    other_model = KVPrefill(engine=make_engine("llama3")).to_dict()
    assert other_model["model_fingerprint"] != fields["model_fingerprint"]
    other_store = KVPrefill(engine=make_engine(store="other")).to_dict()
    assert other_store["model_fingerprint"] == fields["model_fingerprint"]
    assert other_store["store_epoch"] != fields["store_epoch"]
    monkeypatch.setattr(node_parser, "KEY_FORMAT_VERSION", 0)
    other_format = KVPrefill(engine=engine).to_dict()
    assert other_format["model_fingerprint"] != fields["model_fingerprint"], "under other keys nothing is found"


def test_the_store_epoch_lives_as_long_as_the_store(
    make_engine: MakeEngine, tmp_path: Path, nodes: list[BaseNode]
) -> None:
    first = make_engine()
    epoch = KVPrefill(engine=first).store_epoch
    KVPrefill(engine=first)(nodes)
    assert KVPrefill(engine=first).store_epoch == epoch
    first.close()
    reopened = make_engine()
    assert KVPrefill(engine=reopened).store_epoch == epoch
    reopened.close()
    shutil.rmtree(tmp_path / "kv")
    assert KVPrefill(engine=make_engine()).store_epoch != epoch


def test_a_pipeline_that_cached_its_nodes_comes_back_for_a_new_store(
    make_engine: MakeEngine, tmp_path: Path, texts: list[str]
) -> None:
    documents = [Document(text=text, doc_id=str(n)) for n, text in enumerate(texts[:3])]
    first = make_engine()
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(), KVPrefill(engine=first)])
    pipeline.run(documents=documents)
    pipeline.run(documents=documents)
    assert len(first.store) == 3 * VARIANTS
    second = make_engine(store="other")
    pipeline.transformations[-1] = KVPrefill(engine=second)
    pipeline.run(documents=documents)
    assert len(second.store) == 3 * VARIANTS


def test_the_cache_key_does_not_hold_the_engine(llm: RagBlendLLM, nodes: list[BaseNode]) -> None:
    assert get_transformation_hash(nodes, KVPrefill(llm=llm)) == get_transformation_hash(nodes, KVPrefill(llm=llm))


def test_other_processes_are_refused_clearly(engine: Recorder, nodes: list[BaseNode]) -> None:
    prefill = KVPrefill(engine=engine)
    with pytest.raises(InvalidSettingError, match="num_workers"):
        pickle.dumps(prefill)
    with pytest.raises(InvalidSettingError, match="num_workers"):
        IngestionPipeline(transformations=[prefill]).run(nodes=nodes, num_workers=2)
    assert len(engine.store) == 0


def test_a_node_that_does_not_fit_the_model_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ContextWindowError):
        KVPrefill(engine=make_engine(window=512))([TextNode(text="word " * 600)])


def test_async_runs_leave_the_event_loop_free(engine: Recorder, nodes: list[BaseNode]) -> None:
    async def run() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        with engine.decoder.turn:  # somebody else's turn: ingest waits
            task = asyncio.create_task(IngestionPipeline(transformations=[KVPrefill(engine=engine)]).arun(nodes=nodes))
            await asyncio.sleep(0.1)
            assert not task.done()
        assert len(await task) == len(nodes)
        ticker.cancel()
        return ticks

    assert asyncio.run(run()) > 10
    assert len(engine.store) == 4 * VARIANTS


def test_a_cancelled_async_run_stops(engine: Recorder, nodes: list[BaseNode]) -> None:
    async def run() -> None:
        with engine.decoder.turn:
            task: asyncio.Task[Any] = asyncio.create_task(KVPrefill(engine=engine).acall(nodes))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())  # it waits for the thread to end
    assert len(engine.store) <= VARIANTS
