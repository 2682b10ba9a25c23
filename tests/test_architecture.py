"""The map as tests: which way imports go, and that each outside library has one file that knows it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ragblend"
CONNECTORS = ROOT / "connectors"

NOUNS = {"kv", "errors", "report", "quality"}
ENGINE_ROOMS = {"prompt", "store", "model"}
# What each room may import besides itself. Applications are all above the engine.
ALLOWED: dict[str, set[str]] = {
    "kv": set(),
    "errors": set(),
    "report": set(),
    "quality": {"errors"},
    "prompt": NOUNS,
    "store": NOUNS,
    "model": NOUNS,
    "blend": NOUNS | ENGINE_ROOMS,
    "audit": NOUNS,
    "idle": NOUNS,
    "settings": NOUNS | {"prompt", "blend", "audit"},
    "chunks": NOUNS | ENGINE_ROOMS | {"blend", "audit"},
    "serving": NOUNS | ENGINE_ROOMS | {"blend", "chunks"},
    "engine": NOUNS | ENGINE_ROOMS | {"blend", "audit", "idle", "settings", "chunks", "serving"},
}
ENGINE = NOUNS | ENGINE_ROOMS | {"blend", "audit", "idle", "settings", "chunks", "serving", "engine"}
APPLICATIONS: dict[str, set[str]] = {
    "kb": ENGINE,
    "evaluation": ENGINE | {"kb"},
    "cli": ENGINE | {"kb", "evaluation"},
}
LLAMA_INDEX_USERS = {"kb", "evaluation"}
ONE_IMPORTER = {
    "transformers": "ragblend/model/decoder.py",
    "diskcache": "ragblend/store/table.py",
}
SHADOWING = [
    "llama_index",
    "llama_index/llms",
    "llama_index/node_parser",
    "llama_index/response_synthesizers",
    "llama_index/vector_stores",
]


def source_files(root: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def room_of(path: Path) -> str:
    """The room a file of the package belongs to; "" for the package's own __init__."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in it: "package.module.name" for `from package.module import name`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports(path)]
    return {name[1] for name in parts if name[0] == "ragblend" and len(name) > 1} - {"__version__"}


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    if not room:
        return  # names what the package exports, and imports it when asked
    rules = ALLOWED | APPLICATIONS
    assert room in rules, f"{room} is a new room: say here what it may import"
    assert rooms_imported(path) <= rules[room] | {room}


def test_connectors_use_the_engine_and_no_application() -> None:
    for path in source_files(CONNECTORS):
        assert rooms_imported(path) <= ENGINE, path


def test_engine_rooms_do_not_know_llama_index() -> None:
    users = {room_of(path) for path in source_files() if any(n.split(".")[0] == "llama_index" for n in imports(path))}
    assert users <= LLAMA_INDEX_USERS


@pytest.mark.parametrize("library", ONE_IMPORTER)
def test_one_file_knows_each_outside_library(library: str) -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in source_files() + source_files(CONNECTORS)
        if any(name.split(".")[0] == library for name in imports(path))
    }
    assert importers == {ONE_IMPORTER[library]}


def test_no_drawers_for_things_without_a_name() -> None:
    names = {path.name for path in source_files() + source_files(CONNECTORS)}
    assert not names & {"utils.py", "util.py", "common.py", "types.py", "helpers.py", "misc.py"}


@pytest.mark.parametrize("folder", SHADOWING)
def test_nothing_shadows_llama_index(folder: str) -> None:
    # With an __init__.py there, this folder would hide the installed namespace packages of the same name.
    assert not (CONNECTORS / folder / "__init__.py").exists()
    assert not (ROOT / "tests" / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "statement",
    [
        "import ragblend",
        "import ragblend.store.kvstore",
        "from ragblend import KnowledgeBase",
        "import ragblend.cli",
        "import ragblend.prompt.layout, ragblend.prompt.template, ragblend.prompt.match",
    ],
)
def test_light_modules_do_not_import_torch(statement: str) -> None:
    probe = f"{statement}\nimport sys\nprint({{'torch', 'transformers', 'llama_index'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
