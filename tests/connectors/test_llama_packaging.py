"""The integration lives in namespaces that LlamaIndex shares with everybody: nothing of ours may shadow them."""

from __future__ import annotations

import importlib
from pathlib import Path

import llama_index
import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.schema import TransformComponent
from llama_index.llms.ragblend import RagBlendLLM
from llama_index.node_parser.ragblend import KVPrefill

ROOT = Path(__file__).parents[2]


def test_no_init_file_above_the_leaf_packages() -> None:
    namespaces = [
        ROOT / "connectors",
        ROOT / "connectors" / "llama_index",
        *(ROOT / "connectors/llama_index").glob("*"),
    ]
    assert [folder for folder in namespaces if (folder / "__init__.py").exists()] == []


def test_no_test_folder_is_called_llama_index() -> None:
    # pytest would put its parent on sys.path, in front of core.
    assert list((ROOT / "tests").rglob("llama_index")) == []


def test_llama_index_stays_a_namespace_that_core_is_found_in() -> None:
    assert llama_index.__file__ is None
    assert importlib.import_module("llama_index.core").__file__ is not None


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("llama_index.llms.ragblend", ["RagBlendLLM", "default_preamble"]),
        ("llama_index.node_parser.ragblend", ["KVPrefill"]),
        ("llama_index.response_synthesizers.ragblend", ["BlendSynthesizer"]),
        ("llama_index.vector_stores.ragblend", ["RagBlendFaissStore"]),
    ],
)
def test_the_leaf_packages_export_what_they_say_and_are_typed(module: str, names: list[str]) -> None:
    package = importlib.import_module(module)
    assert package.__all__ == names
    assert all(hasattr(package, name) for name in names)
    assert package.__file__ is not None
    assert (Path(package.__file__).parent / "py.typed").exists()


def test_bases_and_class_names() -> None:
    assert BaseLLM.__name__ in [base.__name__ for base in RagBlendLLM.__mro__]
    # Its async methods block the event loop, and its chat is counted twice.
    assert not issubclass(RagBlendLLM, CustomLLM)
    assert RagBlendLLM.class_name() == "RagBlendLLM"
    assert TransformComponent.__name__ in [base.__name__ for base in KVPrefill.__mro__]
    assert KVPrefill.class_name() == "KVPrefill"
