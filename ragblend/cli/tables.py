"""Results as tables, for people: as wide as a terminal of 80 columns, which is also what a pipe gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def ttft_table(result: dict[str, Any]) -> object:
    strategies: dict[str, dict[str, Any]] = result["strategies"]
    columns = {
        "ttft_s": ("warm s", "{:.3f}"),
        "cold_ttft_s": ("cold s", "{:.3f}"),
        "speedup": ("speedup", "{:.1f}x"),
        "rows_fraction": ("rows", "{:.0%}"),
        "decode_tokens_per_s": ("decoding tokens/s", "{:.1f}"),
    }
    columns = {name: each for name, each in columns.items() if any(name in numbers for numbers in strategies.values())}
    return _table(
        ["strategy", *(title for title, _ in columns.values())],
        ([strategy, *_cells(numbers, columns)] for strategy, numbers in strategies.items()),
        title="Time to first token",
        caption="Medians. cold: files not in the page cache. speedup: over stock. rows: share computed. --json has all "
        "the numbers.",
    )


def bounds_table(result: dict[str, Any]) -> object:
    return _table(
        ["quality", "max KL", "within", "mean ratio", "full", "TTFT s", "fixed", "within"],
        (
            [
                name,
                f"{level['max_kl']:g}",
                "{:.0%} [{:.0%}, {:.0%}]".format(level["within"], *level["within_ci"]),
                "{:.2f} [{:.2f}, {:.2f}]".format(level["ratio"], *level["ratio_ci"]),
                f"{level['full']:.0%}",
                f"{level['ttft_s']:.2f}",
                f"{level['fixed_ratio']:g}",
                f"{level['fixed_within']:.0%}",
            ]
            for name, level in result["levels"].items()
        ),
        title=f"{result['questions']} questions, calibrated on {result['calibrated_on']} others",
        caption="within: requests that keep the bound. full: full prefills among them. fixed: the ratio that promises "
        "the same to all alike, and what keeps the bound by it. Intervals of 95 %.",
    )


def levels_table(found: dict[str, Any]) -> object:
    selector = found["selector"]
    how = ", ".join(f"{name} {value}" for name, value in selector.items() if name != "name")
    return _table(
        ["quality", "max KL", "mean ratio", "mean KL", "within", "full", "fixed"],
        (
            [
                name,
                f"{level['max_kl']:g}",
                "{:.2f} [{:.2f}, {:.2f}]".format(level["ratio"], *level["ratio_ci"]),
                "{:.4f} [{:.4f}, {:.4f}]".format(level["kl"], *level["kl_ci"]),
                f"{level['within']:.0%}",
                f"{level['full']:.0%}",
                f"{level['fixed_ratio']:g}",
            ]
            for name, level in found["levels"].items()
        ),
        title=f"{found['questions']} questions ({found['source']}); tokens chosen by {selector['name']} ({how})",
        caption="within: requests that keep the bound. full: full prefills among them. fixed: the ratio that promises "
        "the same to all alike. Intervals of 95 %.",
    )


def chat_table(result: dict[str, Any]) -> object:
    ways: dict[str, dict[str, Any]] = result["ways"]
    caption = ["Means from turn 2 on, and how many times sooner a session is:"]
    for name, way in ways.items():
        caption.append(f"{name}: {way['ttft_s']:.3f} s, {way['session_speedup']:.1f}x. {way['about']}")
    counts = {"turn": "turn", "prompt_tokens": "prompt", "prefix_tokens": "known", "reused_tokens": "reused"}
    counts |= {"recomputed_tokens": "again", "fresh_tokens": "fresh"}
    return _table(
        [*counts.values(), "idle s", *(f"{name} s".replace("_", "\n") for name in ways)],
        (
            [
                *(str(turn[name]) for name in counts),
                f"{turn['idle_s']:.2f}",
                *(f"{turn['ttft_s'][name]:.3f}" for name in ways),
            ]
            for turn in result["turns"]
        ),
        title="Time to first token, turn by turn",
        caption="prompt: tokens; known from before, reused, of these computed again, fresh. idle: work between turns.\n"
        + "\n".join(caption),
    )


def fidelity_table(result: dict[str, Any]) -> object:
    columns = {
        "kl": ("KL", "{:.3f}"),
        "kl_median": ("median", "{:.3f}"),
        "kl_first": ("first", "{:.3f}"),
        "agreement": ("agree", "{:.0%}"),
        "exact": ("same", "{:.0%}"),
        "f1": ("F1", "{:.2f}"),
        "rows_fraction": ("rows", "{:.0%}"),
        "ttft_s": ("TTFT s", "{:.2f}"),
    }
    return _table(
        ["strategy", *(title for title, _ in columns.values())],
        ([strategy, *_cells(numbers, columns)] for strategy, numbers in result["strategies"].items()),
        title="Closeness to a full prefill",
        caption="KL: mean, median and at the first token, in nats. agree: tokens. same: answers. F1: to gold answers. "
        "rows: share computed. --json has intervals and more.",
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str, caption: str) -> object:
    """The first column is of names, the others of numbers; nothing in it is broken or cut while there is room."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE,
        padding=0,
    )
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _cells(numbers: dict[str, Any], columns: dict[str, tuple[str, str]]) -> list[str]:
    values = [(numbers.get(name), form) for name, (_, form) in columns.items()]
    return ["" if value is None else form.format(value) for value, form in values]
