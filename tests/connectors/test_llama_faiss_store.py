"""RagBlendFaissStore: right after any changes, filters that lose nothing, and files that are whole or refused."""

from __future__ import annotations

import asyncio
import copy
import errno
import importlib
import itertools
import pickle
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import hypothesis.strategies as st
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    IndexNode,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    SimpleVectorStore,
    VectorStoreQuery,
)
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryMode
from llama_index.vector_stores.ragblend import RagBlendFaissStore

from ragblend.errors import IngestError, InvalidSettingError, StoreError, StoreFormatError, StoreFullError

NAN = float("nan")
Vector = Sequence[float]


def node(node_id: str, vector: Vector | None, document: str | None = None, text: str = "", **metadata: Any) -> TextNode:
    made = TextNode(id_=node_id, text=text or f"text of {node_id}", metadata=metadata)
    made.embedding = None if vector is None else list(vector)
    if document is not None:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return made


def ask(store: RagBlendFaissStore, vector: Vector, top_k: int = 10, **query: Any) -> list[str]:
    result = store.query(VectorStoreQuery(query_embedding=list(vector), similarity_top_k=top_k, **query))
    assert result.ids is not None
    assert result.nodes is not None
    assert [found.node_id for found in result.nodes] == result.ids
    assert len(result.similarities or []) == len(result.ids)
    return result.ids


def where(key: str, operator: FilterOperator, value: Any = None) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])


@pytest.fixture
def store() -> RagBlendFaissStore:
    """Three nodes of two documents, at 0, 45 and 90 degrees."""
    made = RagBlendFaissStore()
    made.add([node("a", [1, 0], "one", page=1), node("b", [3, 3], "one", page=2), node("c", [0, 2], "two", page=3)])
    return made


# ---- what it is


def test_class_name_base_and_neighbours() -> None:
    package = importlib.import_module("llama_index.vector_stores.ragblend")
    assert package.__all__ == ["RagBlendFaissStore"]
    assert issubclass(RagBlendFaissStore, BasePydanticVectorStore)
    assert RagBlendFaissStore.class_name() == "RagBlendFaissStore"
    made = RagBlendFaissStore(dimension=2, embedding_model="m")
    assert made.stores_text
    assert made.is_embedding_query
    again = RagBlendFaissStore.from_dict(made.to_dict())
    assert (again.dimension, again.embedding_model) == (2, "m")


def test_other_packages_of_the_namespace_are_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As pip lays a stock integration out, in a folder of its own on the path.
    neighbour = tmp_path / "llama_index" / "vector_stores" / "neighbour"
    neighbour.mkdir(parents=True)
    (neighbour / "__init__.py").write_text("NAME = 'neighbour'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert importlib.import_module("llama_index.vector_stores.neighbour").NAME == "neighbour"
    assert importlib.import_module("llama_index.core").__file__ is not None
    assert importlib.import_module("llama_index.vector_stores").__file__ is None


def test_settings_out_of_range_or_unknown_are_refused() -> None:
    for wrong in ({"dimension": 0}, {"dimension": 2.5}, {"dimensions": 3}, {"embedding_model": 7}):
        with pytest.raises(InvalidSettingError, match="takes dimension and embedding_model"):
            RagBlendFaissStore(**wrong)  # type: ignore[arg-type]


def test_the_client_is_a_faiss_index_of_exactly_what_is_stored(store: RagBlendFaissStore) -> None:
    assert RagBlendFaissStore().client is None
    assert isinstance(store.client, faiss.IndexIDMap2)
    store.delete("one")
    assert store.client.ntotal == 1


# ---- search


def test_similarity_is_the_cosine_and_the_closest_comes_first(store: RagBlendFaissStore) -> None:
    result = store.query(VectorStoreQuery(query_embedding=[5.0, 0.0], similarity_top_k=3))
    assert result.ids == ["a", "b", "c"]
    assert result.similarities == pytest.approx([1, 0.5**0.5, 0], abs=1e-6)
    assert ask(store, [0, 1], top_k=1) == ["c"]
    assert len(ask(store, [1, 1], top_k=10**9)) == 3


def test_an_empty_store_finds_nothing() -> None:
    assert ask(RagBlendFaissStore(), [1, 0]) == []
    assert ask(RagBlendFaissStore(dimension=2), [1, 0]) == []


def test_nodes_come_back_whole() -> None:
    first = node("n", [1, 0], "doc", text="Grüße \ud800", deep={"list": [1, {"x": None}]}, doc_id="mine")
    first.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id="m", metadata={"k": 1})
    first.excluded_llm_metadata_keys = ["deep"]
    kinds: list[BaseNode] = [
        first,
        ImageNode(id_="i", text="seen", image="aGVsbG8="),
        IndexNode(id_="x", text="see there", index_id="elsewhere"),
        Node(id_="g", text_resource={"text": "general", "mimetype": "text/plain"}),
        Document(id_="d", text="whole document"),
    ]
    for each in kinds:
        each.embedding = [1.0, 2.0]
    store = RagBlendFaissStore()
    store.add(kinds)
    for before, after in zip(kinds, store.get_nodes(), strict=True):
        assert after.get_content() == before.get_content()
        assert after.embedding is None
        assert after.relationships == before.relationships
        assert after.metadata == before.metadata
        if not isinstance(before, Document):  # which core brings back as a TextNode
            assert after == before.model_copy(update={"embedding": None})
    found = store.get_nodes(["n"])[0]
    found.metadata["deep"]["list"].clear()
    assert store.get_nodes(["n"])[0].metadata == first.metadata


def test_vectors_of_any_length_have_a_direction() -> None:
    store = RagBlendFaissStore()
    store.add([node("huge", [1e300, 1e300]), node("tiny", [5e-324, 0])])
    assert ask(store, [1e-310, 1e-310]) == ["huge", "tiny"]
    assert ask(store, [1e308, 0]) == ["tiny", "huge"]


@pytest.mark.parametrize("mode", [mode for mode in VectorStoreQueryMode if mode != VectorStoreQueryMode.DEFAULT])
def test_other_modes_are_refused(store: RagBlendFaissStore, mode: VectorStoreQueryMode) -> None:
    with pytest.raises(InvalidSettingError, match="of mode 'default' only"):
        ask(store, [1, 0], mode=mode)


def test_queries_without_an_answer_are_refused(store: RagBlendFaissStore) -> None:
    for vector in ([0, 0], [NAN, 1], [1, float("inf")], [1, 2, 3], [], [[1, 0]]):
        with pytest.raises(InvalidSettingError, match="nothing can be near this query"):
            ask(store, vector)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="there is no embedding"):
        store.query(VectorStoreQuery(query_embedding=None))
    with pytest.raises(InvalidSettingError, match="similarity_top_k"):
        ask(store, [1, 0], top_k=0)


# ---- changes


def test_a_new_node_never_answers_for_one_that_is_gone(store: RagBlendFaissStore) -> None:
    store.delete("one")
    store.add([node("d", [1, 0]), node("e", [0, -1])])
    assert ask(store, [1, 0]) == ["d", "c", "e"] or ask(store, [1, 0]) == ["d", "e", "c"]
    store.delete_nodes(["c"])
    store.clear()
    store.add([node("f", [1, 1])])
    assert ask(store, [1, 0]) == ["f"]
    assert faiss.vector_to_array(store.client.id_map).tolist() == [5]


def test_adding_an_id_again_replaces_its_node(store: RagBlendFaissStore) -> None:
    again = [node("a", [-1, 0], "two", text="first"), node("n", [1, 0]), node("a", [0, -1], "two", text="second")]
    assert store.add(again) == ["a", "n", "a"]
    assert [found.get_content() for found in store.get_nodes(["a"])] == ["second"]
    assert ask(store, [0, -1], top_k=1) == ["a"]
    store.delete("one")
    assert sorted(ask(store, [1, 0])) == ["a", "c", "n"]


def test_delete_takes_one_document_only(store: RagBlendFaissStore) -> None:
    store.add([node("free", [1, 0])])
    store.delete("None")  # what core writes for nodes of no document
    store.delete("unknown")
    assert sorted(ask(store, [1, 0])) == ["a", "b", "c", "free"]
    store.delete("one")
    assert sorted(ask(store, [1, 0])) == ["c", "free"]


def test_delete_nodes_by_id_by_filter_by_both_and_never_by_accident(store: RagBlendFaissStore) -> None:
    store.delete_nodes([])
    store.delete_nodes(["unknown"])
    store.delete_nodes(["a", "b"], where("page", FilterOperator.GT, 1))
    assert sorted(ask(store, [1, 0])) == ["a", "c"]
    empty, some = MetadataFilters(filters=[]), where("page", FilterOperator.EQ, 1)
    nested = MetadataFilters(filters=[MetadataFilters(filters=[empty])])
    either = MetadataFilters(filters=[some, nested], condition=FilterCondition.OR)
    for nothing in (None, empty, nested, either):
        with pytest.raises(InvalidSettingError, match=re.escape("clear() deletes everything")):
            store.delete_nodes(filters=nothing)
        with pytest.raises(InvalidSettingError):
            asyncio.run(store.adelete_nodes(filters=nothing))
    assert sorted(ask(store, [1, 0])) == ["a", "c"]
    store.delete_nodes(filters=where("page", FilterOperator.EQ, 3))
    assert ask(store, [1, 0]) == ["a"]


def test_get_nodes(store: RagBlendFaissStore) -> None:
    def ids(*arguments: Any) -> list[str]:
        return [found.node_id for found in store.get_nodes(*arguments)]

    assert ids() == ["a", "b", "c"]
    assert ids([]) == []
    assert ids(["c", "a", "a", "unknown"]) == ["a", "c"]
    assert ids(None, where("page", FilterOperator.GTE, 2)) == ["b", "c"]
    assert ids(["a", "b"], where("page", FilterOperator.GTE, 2)) == ["b"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (node("bad", None), "embedding not set"),
        (node("bad", [0, 0]), "zero"),
        (node("bad", [NAN, 1]), "NaN or infinity"),
        (node("bad", [1, float("-inf")]), "NaN or infinity"),
        (node("bad", [1, 0, 0]), "the store wants a vector of 2 dimensions"),
        (node("bad", []), "the store wants a vector of 2 dimensions"),
        (node("bad", [1, 0], when=object()), "serialize"),
    ],
)
def test_a_batch_with_a_bad_node_changes_nothing(store: RagBlendFaissStore, bad: TextNode, reason: str) -> None:
    for batch in ([node("a", [0, 1]), bad], [bad, node("new", [1, 0])]):
        with pytest.raises(IngestError, match=f"'bad' cannot be stored, and no other.*{reason}"):
            store.add(batch)
    assert ask(store, [1, 0]) == ["a", "b", "c"]
    assert store.client.ntotal == 3
    fresh = RagBlendFaissStore()
    with pytest.raises(IngestError):
        fresh.add([node("good", [1, 0]), bad])
    assert fresh.dimension is None
    assert fresh.get_nodes() == []
    assert fresh.add([]) == []


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupted_add_is_no_add(
    store: RagBlendFaissStore, monkeypatch: pytest.MonkeyPatch, *, before: bool
) -> None:
    real = faiss.IndexIDMap2.add_with_ids

    def interrupted(self: Any, *arguments: Any) -> None:
        if not before:
            real(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(faiss.IndexIDMap2, "add_with_ids", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.add([node("a", [0, 1]), node("new", [1, 0])])
    monkeypatch.undo()
    assert ask(store, [1, 0]) == ["a", "b", "c"]
    assert store.client.ntotal == 3
    store.add([node("later", [1, 0.1])])
    assert ask(store, [1, 0]) == ["a", "later", "b", "c"]


def test_the_dimension_is_that_of_the_first_vector_and_stays(store: RagBlendFaissStore) -> None:
    assert store.dimension == 2
    store.clear()
    with pytest.raises(IngestError, match="2 dimensions"):
        store.add([node("n", [1, 0, 0])])
    with pytest.raises(IngestError, match="3 dimensions"):
        RagBlendFaissStore(dimension=3).add([node("n", [1, 0])])


def test_async_forms_do_the_same(store: RagBlendFaissStore) -> None:
    async def run() -> list[list[str] | None]:
        query = VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=5)
        seen = []
        for change in (
            store.async_add([node("d", [1, 0.1], "three")]),
            store.adelete("one"),
            store.adelete_nodes(["c"]),
            store.aclear(),
        ):
            await change
            seen.append((await store.aquery(query)).ids)
            assert {found.node_id for found in await store.aget_nodes()} == set(seen[-1] or [])
        return seen

    assert asyncio.run(run()) == [["a", "d", "b", "c"], ["d", "c"], ["d"], []]


def test_threads_may_share_a_store(tmp_path: Path) -> None:
    store, errors = RagBlendFaissStore(), []
    path = str(tmp_path / "vectors")

    def work(number: int) -> None:
        try:
            for turn in range(15):
                name = f"{number}.{turn}"
                store.add([node(f"{name}.{part}", [number + 1, part + 1], name) for part in range(3)])
                for found in ask(store, [1, 1], top_k=50):
                    assert re.fullmatch(r"\d+\.\d+\.\d", found)
                if turn % 2:
                    store.delete(f"{number}.{turn - 1}")
                if turn % 5 == 0:
                    store.persist(path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {found.ref_doc_id for found in store.get_nodes()} == {
        f"{number}.{turn}" for number, turn in itertools.product(range(4), (1, 3, 5, 7, 9, 11, 13, 14))
    }
    RagBlendFaissStore.from_persist_path(path)


# ---- filters

FILTERED: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"n": None, "s": None, "l": None},
    "low": {"n": 1, "s": "Apple pie", "l": ["red", "round"]},
    "mid": {"n": 2.5, "s": "banana", "l": []},
    "high": {"n": 7, "s": "", "l": ["red", "blue", "7"]},
    "odd": {"n": "seven", "s": 7, "l": "red wine"},
}
FILTERS: list[tuple[str, FilterOperator, Any, set[str]]] = [
    ("n", FilterOperator.EQ, 1, {"low"}),
    ("n", FilterOperator.EQ, "seven", {"odd"}),
    ("n", FilterOperator.NE, 1, {"none", "null", "mid", "high", "odd"}),
    ("n", FilterOperator.GT, 1, {"mid", "high"}),
    ("n", FilterOperator.GTE, 2.5, {"mid", "high"}),
    ("n", FilterOperator.LT, 7, {"low", "mid"}),
    ("n", FilterOperator.LTE, 7, {"low", "mid", "high"}),
    ("s", FilterOperator.GT, "Banana", {"mid"}),
    ("n", FilterOperator.IN, [1, 7], {"low", "high"}),
    ("n", FilterOperator.NIN, [1, 7], {"none", "null", "mid", "odd"}),
    ("l", FilterOperator.CONTAINS, "red", {"low", "high", "odd"}),
    ("l", FilterOperator.ANY, ["round", "blue"], {"low", "high"}),
    ("l", FilterOperator.ALL, ["red", "blue"], {"high"}),
    ("s", FilterOperator.TEXT_MATCH, "apple", set()),
    ("s", FilterOperator.TEXT_MATCH, "Apple", {"low"}),
    ("s", FilterOperator.TEXT_MATCH_INSENSITIVE, "apple", {"low"}),
    ("s", FilterOperator.IS_EMPTY, None, {"none", "null", "high"}),
    ("l", FilterOperator.IS_EMPTY, None, {"none", "null", "mid"}),
]


@pytest.fixture(scope="module")
def filtered() -> RagBlendFaissStore:
    made = RagBlendFaissStore()
    made.add([node(name, [1, number], **metadata) for number, (name, metadata) in enumerate(FILTERED.items())])
    return made


@pytest.mark.parametrize(("key", "operator", "value", "wanted"), FILTERS)
def test_filter_operators(
    filtered: RagBlendFaissStore, key: str, operator: FilterOperator, value: Any, wanted: set[str]
) -> None:
    assert set(ask(filtered, [1, 0], filters=where(key, operator, value))) == wanted
    rest = MetadataFilters(filters=[where(key, operator, value)], condition=FilterCondition.NOT)
    assert set(ask(filtered, [1, 0], filters=rest)) == set(FILTERED) - wanted


def test_every_operator_core_knows_is_tested() -> None:
    assert {operator for _, operator, _, _ in FILTERS} == set(FilterOperator)


def test_filters_agree_with_those_of_the_simple_store() -> None:
    simple, ours = SimpleVectorStore(), RagBlendFaissStore()
    plain = [node(name, [1, 1], **FILTERED[name]) for name in ("none", "null", "low", "mid", "high")]
    simple.add(plain)
    ours.add(plain)
    for key, operator, value, _ in FILTERS:
        query = VectorStoreQuery(query_embedding=[1, 1], similarity_top_k=9, filters=where(key, operator, value))
        assert set(simple.query(query).ids or []) == set(ours.query(query).ids or []), (key, operator, value)


def test_filters_nest(filtered: RagBlendFaissStore) -> None:
    red = where("l", FilterOperator.CONTAINS, "red")
    numbers = MetadataFilters(
        filters=[where("n", FilterOperator.EQ, 1), where("n", FilterOperator.EQ, 2.5)], condition=FilterCondition.OR
    )
    both = MetadataFilters(filters=[red, numbers], condition=FilterCondition.AND)
    neither = MetadataFilters(filters=[red, numbers], condition=FilterCondition.NOT)
    unsaid = MetadataFilters(filters=[red, numbers], condition=None)
    assert ask(filtered, [1, 0], filters=both) == ask(filtered, [1, 0], filters=unsaid) == ["low"]
    assert set(ask(filtered, [1, 0], filters=neither)) == {"none", "null"}
    assert len(ask(filtered, [1, 0], filters=MetadataFilters(filters=[]))) == len(FILTERED)


@pytest.mark.parametrize(
    ("operator", "value"),
    [
        (FilterOperator.EQ, None),
        (FilterOperator.NE, None),
        (FilterOperator.GT, ["a"]),
        (FilterOperator.IN, "abc"),
        (FilterOperator.NIN, 3),
        (FilterOperator.ANY, "red"),
        (FilterOperator.ALL, None),
        (FilterOperator.CONTAINS, ["red"]),
        (FilterOperator.TEXT_MATCH, 7),
        (FilterOperator.TEXT_MATCH_INSENSITIVE, 7),
    ],
)
def test_filters_that_mean_nothing_are_refused(operator: FilterOperator, value: Any) -> None:
    empty = RagBlendFaissStore()
    with pytest.raises(InvalidSettingError, match="on 'key' takes a"):
        ask(empty, [1, 0], filters=where("key", operator, value))


def test_unknown_operators_and_conditions_are_refused(store: RagBlendFaissStore) -> None:
    operator = MetadataFilter.model_construct(key="page", value=1, operator="near")
    condition = MetadataFilters.model_construct(filters=[MetadataFilter(key="page", value=1)], condition="xor")
    for wrong in (MetadataFilters.model_construct(filters=[operator], condition=FilterCondition.AND), condition):
        for call in (
            lambda filters: ask(store, [1, 0], filters=filters),
            lambda filters: store.get_nodes(filters=filters),
            lambda filters: store.delete_nodes(filters=filters),
        ):
            with pytest.raises(InvalidSettingError, match="unknown"):
                call(wrong)
    assert len(store.get_nodes()) == 3


def test_a_filter_loses_no_results() -> None:
    store = RagBlendFaissStore()
    # The few that match are the farthest of all.
    store.add([node(f"near{number}", [1, number / 1e4], kind="near") for number in range(500)])
    store.add([node(f"far{number}", [-1, number / 1e4], f"doc{number}", kind="far") for number in range(7)])
    assert len(ask(store, [1, 0], top_k=5, filters=where("kind", FilterOperator.EQ, "far"))) == 5
    assert sorted(ask(store, [1, 0], top_k=2, doc_ids=["doc3", "doc5"])) == ["far3", "far5"]
    assert ask(store, [1, 0], top_k=2, node_ids=["far1", "near499", "far1", "unknown"]) == ["near499", "far1"]
    all_three = {"node_ids": ["far1", "far3"], "doc_ids": ["doc3", "doc4"]}
    assert ask(store, [1, 0], filters=where("kind", FilterOperator.EQ, "far"), **all_three) == ["far3"]
    assert ask(store, [1, 0], filters=where("kind", FilterOperator.EQ, "near"), **all_three) == []


def test_no_documents_allow_nothing_but_no_node_ids_allow_all(store: RagBlendFaissStore) -> None:
    assert ask(store, [1, 0], doc_ids=[]) == []
    assert ask(store, [1, 0], node_ids=["unknown"]) == []
    assert ask(store, [1, 0], node_ids=[]) == ["a", "b", "c"]  # what core sends for an index without a document store


# ---- on disk


def test_what_is_persisted_comes_back(store: RagBlendFaissStore, tmp_path: Path) -> None:
    store.embedding_model = "some model"
    store.delete_nodes(["c"])
    path = tmp_path / "new folder" / "vectors"
    store.persist(str(path))
    assert [each.name for each in path.parent.iterdir()] == ["vectors"]
    again = RagBlendFaissStore.from_persist_path(str(path), dimension=2, embedding_model="some model")
    assert (again.dimension, again.embedding_model) == (2, "some model")
    assert again.get_nodes() == store.get_nodes()
    assert ask(again, [1, 0]) == ["a", "b"]
    # The id of "c" is not given again.
    again.add([node("d", [1, 0.1])])
    assert faiss.vector_to_array(again.client.id_map).tolist() == [0, 1, 3]
    assert ask(again, [1, 0]) == ["a", "d", "b"]


def test_empty_stores_come_back(store: RagBlendFaissStore, tmp_path: Path) -> None:
    path = str(tmp_path / "vectors")
    store.clear()
    store.persist(path)
    again = RagBlendFaissStore.from_persist_path(path)
    assert again.dimension == 2
    again.add([node("n", [1, 0])])
    assert faiss.vector_to_array(again.client.id_map).tolist() == [3]
    RagBlendFaissStore().persist(path)
    blank = RagBlendFaissStore.from_persist_path(path, dimension=5, embedding_model="m")
    assert (blank.dimension, blank.embedding_model) == (5, "m")
    with pytest.raises(IngestError, match="5 dimensions"):
        blank.add([node("n", [1, 0])])


def test_another_dimension_or_model_is_refused(store: RagBlendFaissStore, tmp_path: Path) -> None:
    path = str(tmp_path / "vectors")
    store.persist(path)
    with pytest.raises(IngestError, match="2 dimensions, not 3"):
        RagBlendFaissStore.from_persist_path(path, dimension=3)
    assert RagBlendFaissStore.from_persist_path(path, embedding_model="new").embedding_model == "new"
    store.embedding_model = "old"
    store.persist(path)
    with pytest.raises(IngestError, match="'old', not 'new'"):
        RagBlendFaissStore.from_persist_path(path, embedding_model="new")
    assert RagBlendFaissStore.from_persist_path(path).embedding_model == "old"


def test_damaged_and_foreign_files_are_refused(store: RagBlendFaissStore, tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    store.persist(str(path))
    whole = path.read_bytes()

    def refused(data: bytes, reason: str) -> None:
        path.write_bytes(data)
        with pytest.raises(StoreFormatError, match=reason):
            RagBlendFaissStore.from_persist_path(str(path))

    for place in range(0, len(whole), 29):
        refused(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], "damaged|format version")
        refused(whole[:place], "damaged|format version")
    refused(whole + b"\0", "is damaged")
    refused(b'{"embedding_dict": {}}', "no vector store of ragblend")
    refused(whole.replace(b"vectors 1", b"vectors 2", 1), "another format version")
    path.write_bytes(whole)
    assert ask(RagBlendFaissStore.from_persist_path(str(path)), [1, 0]) == ["a", "b", "c"]


def test_a_file_that_is_not_there_or_a_folder(store: RagBlendFaissStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no vector store at"):
        RagBlendFaissStore.from_persist_dir(str(tmp_path))
    with pytest.raises(StoreError, match="cannot read"):
        RagBlendFaissStore.from_persist_path(str(tmp_path))
    with pytest.raises(StoreError, match="a folder"):
        store.persist(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        store.persist(str(tmp_path / "file" / "vectors"))


@pytest.mark.parametrize("named", [str, "file://{}".format])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one_and_what_it_points_to_is_written_whole(
    store: RagBlendFaissStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exists: bool,
    named: Callable[[Any], str],
) -> None:
    target, link = tmp_path / "elsewhere" / "vectors", tmp_path / "link"
    if exists:
        target.parent.mkdir()
        target.write_bytes(b"older")
    link.symlink_to(Path("elsewhere") / "vectors")
    store.persist(named(link))
    assert link.is_symlink()
    assert ask(RagBlendFaissStore.from_persist_path(str(target)), [1, 0]) == ["a", "b", "c"]
    store.delete("one")
    monkeypatch.setattr(LocalFileSystem, "mv", fail)
    with pytest.raises(StoreError):
        store.persist(named(link))
    assert list(target.parent.iterdir()) == [target]
    assert ask(RagBlendFaissStore.from_persist_path(named(link)), [1, 0]) == ["a", "b", "c"]


def fail_halfway(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
    Path(path).write_bytes(value[: len(value) // 2])
    raise OSError(errno.ENOSPC, "no space left on device")


def fail(self: Any, *arguments: Any, **kwargs: Any) -> None:
    raise PermissionError(errno.EACCES, "not allowed")


def interrupt(self: Any, *arguments: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "fault", "error"),
    [
        ("pipe_file", fail_halfway, StoreFullError),
        ("mv", fail, StoreError),
        ("mv", interrupt, KeyboardInterrupt),
    ],
)
def test_a_failed_persist_leaves_the_old_file(
    store: RagBlendFaissStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    fault: Callable[..., None],
    error: type[BaseException],
) -> None:
    path = tmp_path / "vectors"
    store.persist(str(path))
    store.delete("one")
    monkeypatch.setattr(LocalFileSystem, step, fault)
    with pytest.raises(error):
        store.persist(str(path))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [path]
    assert ask(RagBlendFaissStore.from_persist_path(str(path)), [1, 0]) == ["a", "b", "c"]
    store.persist(str(path))
    assert ask(RagBlendFaissStore.from_persist_path(str(path)), [1, 0]) == ["c"]


def test_persist_and_load_agree_on_their_defaults(
    store: RagBlendFaissStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store.persist()
    assert ask(RagBlendFaissStore.from_persist_dir(), [1, 0]) == ["a", "b", "c"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_copies_hold_all_nodes_and_share_nothing(
    store: RagBlendFaissStore, copied: Callable[[RagBlendFaissStore], RagBlendFaissStore]
) -> None:
    other = copied(store)
    other.add([node("d", [1, 0.1])])
    store.delete("one")
    assert ask(other, [1, 0]) == ["a", "d", "b", "c"]
    assert ask(store, [1, 0]) == ["c"]
    assert store.model_copy().get_nodes() == store.get_nodes()


# ---- under core


class Letters(BaseEmbedding):
    """Words at fixed places of a vector: deterministic, and close where texts share words."""

    def _vector(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % 64] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vector(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)


BRIDGE = Document(id_="bridge", text="Mara Lindqvist designed the Old Harbour Bridge.", metadata={"year": 1921})
TOWER = Document(id_="tower", text="The lighthouse is thirty metres high.", metadata={"year": 1874})
FERRY = Document(id_="ferry", text="A ferry crosses the sound twice a day.", metadata={"year": 1990})


@pytest.fixture
def index() -> VectorStoreIndex:
    storage = StorageContext.from_defaults(vector_store=RagBlendFaissStore())
    return VectorStoreIndex.from_documents([BRIDGE, TOWER, FERRY], storage_context=storage, embed_model=Letters())


def retrieved(index: VectorStoreIndex, question: str, **settings: Any) -> list[str]:
    settings = {"similarity_top_k": 1, **settings}
    return [found.node.get_content() for found in index.as_retriever(**settings).retrieve(question)]


def test_an_index_retrieves(index: VectorStoreIndex) -> None:
    assert retrieved(index, "how high is the lighthouse") == [TOWER.text]
    found = index.as_retriever(similarity_top_k=3).retrieve("who designed the bridge")
    scores = [each.score or 0.0 for each in found]
    assert found[0].node.ref_doc_id == "bridge"
    assert found[0].node.metadata == {"year": 1921}
    assert scores == sorted(scores, reverse=True)
    assert scores[0] <= 1.0 + 1e-6
    late = where("year", FilterOperator.GT, 1900)
    assert TOWER.text not in retrieved(index, "how high is the lighthouse", similarity_top_k=2, filters=late)
    assert retrieved(index, "how high is the lighthouse", doc_ids=["ferry"]) == [FERRY.text]
    assert len(asyncio.run(index.as_retriever(similarity_top_k=2).aretrieve("ferry"))) == 2


def test_an_index_deletes_and_refreshes(index: VectorStoreIndex) -> None:
    index.delete_ref_doc("bridge")
    assert sorted(retrieved(index, "who designed the bridge", similarity_top_k=3)) == sorted([TOWER.text, FERRY.text])
    taller = Document(id_="tower", text="The lighthouse is forty metres high.")
    assert index.refresh_ref_docs([FERRY, taller]) == [False, True]
    assert retrieved(index, "how high is the lighthouse", similarity_top_k=3) == [taller.text, FERRY.text]
    index.update_ref_doc(TOWER)
    assert retrieved(index, "how high is the lighthouse", similarity_top_k=3) == [TOWER.text, FERRY.text]
    index.insert(BRIDGE)
    assert retrieved(index, "who designed the bridge") == [BRIDGE.text]


@pytest.mark.parametrize("remote", [False, True])
def test_an_index_persists_and_loads(index: VectorStoreIndex, tmp_path: Path, *, remote: bool) -> None:
    fs = MemoryFileSystem() if remote else None
    folder = f"/{tmp_path.name}" if remote else str(tmp_path)
    index.delete_ref_doc("ferry")
    for _ in range(2):  # the second time over the first
        index.storage_context.persist(folder, fs=fs)
    store = RagBlendFaissStore.from_persist_dir(folder, fs=fs, dimension=64)
    storage = StorageContext.from_defaults(vector_store=store, persist_dir=folder, fs=fs)
    again = load_index_from_storage(storage, embed_model=Letters())
    assert isinstance(again, VectorStoreIndex)
    assert retrieved(again, "how high is the lighthouse", similarity_top_k=3) == [TOWER.text, BRIDGE.text]
    again.delete_ref_doc("tower")
    again.insert(FERRY)
    assert sorted(retrieved(again, "ferry", similarity_top_k=3)) == sorted([FERRY.text, BRIDGE.text])
    assert again.refresh_ref_docs([BRIDGE]) == [False]


def test_an_index_over_a_store_alone_needs_nothing_else(index: VectorStoreIndex) -> None:
    again = VectorStoreIndex.from_vector_store(index.vector_store, embed_model=Letters())
    assert retrieved(again, "who designed the bridge") == [BRIDGE.text]


def test_index_nodes_beside_text_nodes_are_all_found_as_the_docstring_says() -> None:
    storage = StorageContext.from_defaults(vector_store=RagBlendFaissStore())
    nodes = [TextNode(text="plain words"), IndexNode(text="other words", index_id="there")]
    index = VectorStoreIndex(nodes, storage_context=storage, embed_model=Letters(), store_nodes_override=True)
    assert sorted(retrieved(index, "words", similarity_top_k=5)) == ["other words", "plain words"]


def test_an_ingestion_pipeline_upserts() -> None:
    store = RagBlendFaissStore()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), Letters()],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    pipeline.run(documents=[BRIDGE, TOWER])
    taller = Document(id_="tower", text="The lighthouse is forty metres high.")
    pipeline.run(documents=[BRIDGE, taller])
    assert [found.get_content() for found in store.get_nodes()] == [BRIDGE.text, taller.text]


# ---- any sequence of changes, against a model that is a dict and a matrix product

NAMES = st.sampled_from([f"n{number}" for number in range(12)])
DOCUMENTS = st.sampled_from(["d0", "d1", "d2", None])
# Few directions, so that there are ties.
VECTORS = st.tuples(*[st.integers(-2, 2)] * 3).filter(any)
NODES = st.lists(st.tuples(NAMES, VECTORS, DOCUMENTS, st.integers(0, 3)), max_size=5)
Model = dict[str, tuple[Vector, str | None, int, str]]


class Changes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = f"{self.folder.name}/vectors"
        self.store = RagBlendFaissStore()
        self.model: Model = {}
        self.persisted: Model | None = None
        self.texts: Iterator[int] = itertools.count()

    def teardown(self) -> None:
        self.folder.cleanup()

    def made(self, rows: Sequence[tuple[str, Vector, str | None, int]]) -> tuple[list[TextNode], Model]:
        added = {name: (vector, document, color, f"text {next(self.texts)}") for name, vector, document, color in rows}
        nodes = [
            node(name, vector, document, text=text, color=color)
            for name, (vector, document, color, text) in added.items()
        ]
        return nodes, added

    @initialize(declared=st.booleans())
    def start(self, *, declared: bool) -> None:
        self.store = RagBlendFaissStore(dimension=3 if declared else None)

    @rule(rows=NODES)
    def add(self, rows: list[tuple[str, Vector, str | None, int]]) -> None:
        nodes, added = self.made(rows)
        assert self.store.add(nodes) == list(added)
        self.model |= added

    @rule(rows=NODES, bad=st.sampled_from([(0, 0, 0), (NAN, 1, 0)]), name=NAMES)
    def fail_to_add(self, rows: list[tuple[str, Vector, str | None, int]], bad: Vector, name: str) -> None:
        nodes, _ = self.made([row for row in rows if row[0] != name])
        with pytest.raises(IngestError):
            self.store.add([*nodes, node(name, bad)])

    @rule(document=DOCUMENTS)
    def delete(self, document: str | None) -> None:
        self.store.delete(document or "None")
        self.model = {name: row for name, row in self.model.items() if document is None or row[1] != document}

    @rule(names=st.lists(NAMES, max_size=3), color=st.none() | st.integers(0, 3))
    def delete_nodes(self, names: list[str], color: int | None) -> None:
        self.store.delete_nodes(names, None if color is None else where("color", FilterOperator.EQ, color))
        self.model = {name: row for name, row in self.model.items() if name not in names or color not in (None, row[2])}

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model = {}

    @rule()
    def persist(self) -> None:
        self.store.persist(self.path)
        self.persisted = dict(self.model)

    @rule()
    def reload(self) -> None:
        if self.persisted is not None:
            self.store = RagBlendFaissStore.from_persist_path(self.path)
            self.model = dict(self.persisted)

    @rule(
        vector=VECTORS,
        top_k=st.integers(1, 15),
        least=st.none() | st.integers(0, 4),
        documents=st.none() | st.lists(st.sampled_from(["d0", "d1", "d2"]), max_size=2),
        names=st.none() | st.lists(NAMES, min_size=1, max_size=4),
    )
    def query(
        self, vector: Vector, top_k: int, least: int | None, documents: list[str] | None, names: list[str] | None
    ) -> None:
        result = self.store.query(
            VectorStoreQuery(
                query_embedding=list(vector),
                similarity_top_k=top_k,
                filters=None if least is None else where("color", FilterOperator.GTE, least),
                doc_ids=documents,
                node_ids=names,
            )
        )
        unit = np.asarray(vector) / np.linalg.norm(vector)
        wanted = {
            name: float(np.asarray(other) @ unit / np.linalg.norm(other))
            for name, (other, document, color, _) in self.model.items()
            if (least is None or color >= least)
            and (documents is None or document in documents)
            and (names is None or name in names)
        }
        assert result.ids is not None
        assert result.similarities is not None
        assert len(set(result.ids)) == len(result.ids)
        # Of nodes that are equally close any may come first, so similarities are compared, not ids.
        assert result.similarities == pytest.approx(sorted(wanted.values(), reverse=True)[:top_k], abs=1e-5)
        assert result.similarities == pytest.approx([wanted[name] for name in result.ids], abs=1e-5)
        for found in result.nodes or []:
            _, document, color, text = self.model[found.node_id]
            assert (found.ref_doc_id, found.metadata, found.get_content()) == (document, {"color": color}, text)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert {found.node_id: found.get_content() for found in self.store.get_nodes()} == {
            name: row[3] for name, row in self.model.items()
        }


TestChanges = Changes.TestCase
TestChanges.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
