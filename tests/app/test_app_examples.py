"""The examples run, on the tiny model: what a reader would copy works."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import pdf

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST = {"demo.py": 120}


def run(name: str, *args: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *args],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < LONGEST.get(path.name, 60), path.name


def test_quickstart(tiny_model: Path, tmp_path: Path) -> None:
    out = run("quickstart.py", tiny_model, tmp_path / "store")
    assert "3 texts prefilled" in out
    assert "3 of 3 texts reused" in out
    assert "2 of 2 texts reused" in out
    assert "(1 missed)" in out


@pytest.mark.usefixtures("embedding_model")
def test_llamaindex_app(tiny_model: Path, tmp_path: Path) -> None:
    out = run("llamaindex_app.py", tiny_model, tmp_path / "store")
    assert out.count("3 of 3 chunks reused") == 2


@pytest.mark.usefixtures("embedding_model")
def test_knowledge_base(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "bridge.md").write_text("# Bridge\n\nThe Old Harbour Bridge was designed by Mira Solheim in 1931.\n")
    (docs / "mill.txt").write_text("The bakery in Mill Lane opens at six, and closes when the bread is sold.\n")
    # In this process, since it is run twice and most of a run is imports.
    main = runpy.run_path(str(EXAMPLES / "knowledge_base.py"))["main"]
    asked = (docs, "Who designed the bridge?", tiny_model, tmp_path / "store")
    main(*asked)
    out = capsys.readouterr().out
    assert "2 documents new or changed, 0 as before, 0 gone" in out
    assert "bridge.md" in out
    assert "2 of 2 chunks reused" in out
    (docs / "mill.txt").unlink()
    main(*asked)
    assert "0 documents new or changed, 1 as before, 1 gone" in capsys.readouterr().out


@pytest.mark.usefixtures("embedding_model")
def test_an_ingest_leaves_logging_and_stderr_alone(tiny_model: Path, tmp_path: Path) -> None:
    """One of LlamaIndex's readers sets up logging when it is imported, another one's library logs what it repairs, and
    the embedding model's loader draws a bar."""
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "bridge.md").write_text("The Old Harbour Bridge was designed by Mira Solheim in 1931.\n")
    (documents / "ferry.pdf").write_bytes(b"garbage\n" + pdf("The ferry to Gull Island takes 25 minutes."))
    (documents / "torn.pdf").write_bytes(pdf("The lighthouse is 38 metres high.")[:99])
    program = """
import logging, sys
from ragblend import KnowledgeBase

with KnowledgeBase(sys.argv[1], model=sys.argv[2]) as kb:
    print(kb.ingest(sys.argv[3]).documents)
    kb.query("Who designed the bridge?", max_tokens=2)
root = logging.getLogger()
print(root.handlers, logging.getLevelName(root.level))
"""
    args = [sys.executable, "-c", program, tmp_path / "store", tiny_model, documents]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2\n[] WARNING", "")


@pytest.mark.usefixtures("embedding_model")
def test_demo(tiny_model: Path, tmp_path: Path) -> None:
    out = run("demo.py", tmp_path / "store", RAGBLEND_MODEL=str(tiny_model))
    assert out.count("8 of 8 chunks reused") == 15
    assert "15 prompts" in out


@pytest.mark.usefixtures("embedding_model")
def test_chat(tiny_model: Path, tmp_path: Path) -> None:
    out = run("chat.py", tiny_model, tmp_path / "store")
    assert out.count("tokens known") == 3
    assert out.count("  0 tokens known") <= 1, "only the first turn can begin from nothing"
    assert "3 turns" in out
    again = run("chat.py", tiny_model, tmp_path / "store")
    assert "6 turns" in again
