"""The integration lives in namespaces that LlamaIndex shares with everybody: nothing of ours may shadow them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import llama_index
import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.schema import TransformComponent
from llama_index.llms.ragblend import RagBlendLLM
from llama_index.node_parser.ragblend import KVPrefill

ROOT = Path(__file__).parents[2]
LEAVES = ("llms", "node_parser", "response_synthesizers", "vector_stores")


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
    assert (
        FunctionCallingLLM in RagBlendLLM.__mro__
    )  # core looks for the class in some places, and for the flag in others
    # Its async methods block the event loop, and its chat is counted twice.
    assert not issubclass(RagBlendLLM, CustomLLM)
    assert RagBlendLLM.class_name() == "RagBlendLLM"
    assert TransformComponent.__name__ in [base.__name__ for base in KVPrefill.__mro__]
    assert KVPrefill.class_name() == "KVPrefill"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked, as an installer would have it."""
    pytest.importorskip("hatchling", reason="wheels are built with hatchling, which ragblend[dev] brings")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_all_sources_and_no_stray_init_file(wheel: Path) -> None:
    held = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    sources = [
        path.relative_to(root)
        for root, package in ((ROOT, "ragblend"), (ROOT / "connectors", "llama_index"))
        for path in (root / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    ]
    assert {str(path) for path in sources} <= held
    assert {path.split("/")[0] for path in held if ".dist-info" not in path} == {"ragblend", "llama_index"}
    inits = {path for path in held if path.startswith("llama_index/") and path.endswith("__init__.py")}
    assert inits == {f"llama_index/{leaf}/ragblend/__init__.py" for leaf in LEAVES}


def test_the_wheels_packages_are_found_beside_core_and_its_neighbours(wheel: Path, tmp_path: Path) -> None:
    modules = ["ragblend.engine", *(f"llama_index.{leaf}.ragblend" for leaf in LEAVES)]
    program = (
        "import importlib, llama_index.core, llama_index.embeddings.huggingface\n"
        f"for name in {modules}: print(importlib.import_module(name).__file__)\n"
        "from llama_index.core.vector_stores import SimpleVectorStore\n"
        "from llama_index.core.node_parser import SentenceSplitter\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [Path(file).is_relative_to(wheel) for file in done.stdout.splitlines()] == [True] * len(modules)
