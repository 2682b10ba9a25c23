"""The benchmark of matching finds what it put into its prompts, and says what that took."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ragblend.cli import app
from ragblend.errors import InvalidSettingError
from ragblend.evaluation.matching import run
from ragblend.prompt import match

SMALL: dict[str, Any] = {"chunks": 400, "chunk_chars": 400, "prompt_chars": 3000, "repeats": 1}


def test_all_chunks_of_the_prompts_are_found() -> None:
    steps: list[tuple[int, int]] = []
    result = run(**SMALL, progress=lambda done, total: steps.append((done, total)))
    assert result["chunks"] == 400
    assert result["found"] == 7  # as many as fit, the one that is cut among them
    assert result["searches"] == 10
    assert 0 < result["median_ms"] <= result["p95_ms"]
    assert result["cut_median_ms"] > 0
    assert steps[-1] == (400, 400)


def test_a_text_whose_head_many_texts_have_is_not_the_one_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "_CUT_TEXTS_OF_HEAD", 1)
    for seed in (6, 18, 27):  # by chance, such a text would be the last of a prompt
        assert run(**SMALL, seed=seed)["found"] == 7


def test_the_index_takes_little_more_than_its_records() -> None:
    few, many = (run(**{**SMALL, "chunks": chunks})["index_bytes"] for chunks in (1000, 5000))
    assert many - few == pytest.approx(16 * 4000, rel=0.1)


@pytest.mark.parametrize("name", SMALL)
def test_numbers_too_small_to_measure_with(name: str) -> None:
    with pytest.raises(InvalidSettingError, match=name):
        run(**{**SMALL, name: 0})


def test_the_command() -> None:
    args = ["bench", "match", *(str(part) for name, n in SMALL.items() for part in (f"--{name.replace('_', '-')}", n))]
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["found"] == 7
    shown = CliRunner().invoke(app, args)
    assert "7 of 400 known texts found" in shown.stdout
    assert "MB of index" in shown.stdout
