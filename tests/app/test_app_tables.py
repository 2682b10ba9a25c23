"""Results for people, on a terminal of 80 columns: nothing is cut off, and a row is a line."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from ragblend.cli import tables

STRATEGIES = ["full", "reuse", "cacheblend 0.15", "blend 0.05", "neighbours/hkvd-oneshot 0.15"]
LEVEL = {
    **{"max_kl": 0.001, "ratio": 0.39, "ratio_ci": [0.3, 0.45], "kl": 0.0123, "kl_ci": [0.01, 0.02], "within": 1.0},
    **{"within_ci": [1.0, 1.0], "full": 0.05, "ttft_s": 12.34, "fixed_ratio": 0.48, "fixed_within": 1.0},
}
LEVELS = {"questions": 50, "levels": dict.fromkeys(("strict", "balanced", "fast", "max_kl"), LEVEL)}
SELECTOR = {"name": "QuestionAttention", "band": [0.125, 0.25], "question_tokens": 64}
TTFT = {"session": 1.432, "same_messages": 2.867, "context_engine": 3.2}
TURN = {
    **{"prompt_tokens": 28610, "prefix_tokens": 17001, "reused_tokens": 12001, "recomputed_tokens": 1801},
    **{"fresh_tokens": 12002, "idle_s": 12.34, "ttft_s": TTFT},
}
WAY = {"about": "What somebody else's generate makes of the same messages.", "ttft_s": 1.4, "session_speedup": 2.0}


def ttft() -> Any:
    numbers = {"ttft_s": 12.943, "cold_ttft_s": 13.234, "speedup": 10.02, "rows_fraction": 1.0}
    return {"strategies": {name: numbers | {"decode_tokens_per_s": 132.1} for name in STRATEGIES}}


def fidelity() -> Any:
    numbers = {"kl": 1.114, "kl_median": 1.097, "kl_first": 1.148, "agreement": 1.0, "exact": 1.0, "f1": 0.123}
    return {"strategies": {name: numbers | {"rows_fraction": 1.0, "ttft_s": 12.59} for name in STRATEGIES}}


def bounds() -> Any:
    return LEVELS | {"calibrated_on": 50}


def levels() -> Any:
    return LEVELS | {"selector": SELECTOR, "source": "generated"}


def chat() -> Any:
    return {"turns": [{"turn": n, **TURN} for n in range(1, 13)], "ways": dict.fromkeys(TURN["ttft_s"], WAY)}


@pytest.mark.parametrize(
    ("table", "result", "row"),
    [
        (tables.ttft_table, ttft, "12.943 13.234 10.0x 100% 132.1"),
        (tables.fidelity_table, fidelity, "1.114 1.097 1.148 100% 100% 0.12 100% 12.59"),
        (tables.bounds_table, bounds, "0.001 100% [100%, 100%] 0.39 [0.30, 0.45] 5% 12.34 0.48 100%"),
        (tables.levels_table, levels, "0.001 0.39 [0.30, 0.45] 0.0123 [0.0100, 0.0200] 100% 5% 0.48"),
        (tables.chat_table, chat, "28610 17001 12001 1801 12002 12.34 1.432 2.867 3.200"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_tables_are_whole_at_80_columns(table: Callable[[Any], object], result: Callable[[], Any], row: str) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(result()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    given = result()
    names = given.get("strategies") or given.get("levels") or [str(turn["turn"]) for turn in given["turns"]]
    for name in names:
        assert f"{name} {row}" in lines
