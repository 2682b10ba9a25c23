"""Results as tables, for people: as wide as a terminal of 80 columns, which is also what a pipe gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What a column is called, and how its cells are made of a row's numbers.
Column = tuple[str, str]

_NAME = ("strategy", "{name}")
_QUALITY = (("quality", "{name}"), ("max KL", "{max_kl:g}"))
_MEAN_RATIO = ("mean ratio", "{ratio:.2f} [{ratio_ci[0]:.2f}, {ratio_ci[1]:.2f}]")
_FULL = ("full", "{full:.0%}")
_FIXED = ("fixed", "{fixed_ratio:g}")
_BOUNDS = (
    "within: requests that keep the bound. full: full prefills among them. fixed: the ratio that promises the same"
)


def ttft_table(result: dict[str, Any]) -> object:
    strategies: dict[str, dict[str, Any]] = result["strategies"]
    columns = [_NAME, ("warm s", "{ttft_s:.3f}"), ("cold s", "{cold_ttft_s:.3f}"), ("speedup", "{speedup:.1f}x")]
    columns.append(("rows", "{rows_fraction:.0%}"))
    if any("decode_tokens_per_s" in numbers for numbers in strategies.values()):
        columns.append(("decoding tokens/s", "{decode_tokens_per_s:.1f}"))
    return _table(
        columns,
        _named(strategies),
        title="Time to first token",
        caption="Medians. cold: files not in the page cache. speedup: over stock. rows: share computed. --json has all "
        "the numbers.",
    )


def bounds_table(result: dict[str, Any]) -> object:
    return _table(
        [
            *_QUALITY,
            ("within", "{within:.0%} [{within_ci[0]:.0%}, {within_ci[1]:.0%}]"),
            _MEAN_RATIO,
            _FULL,
            ("TTFT s", "{ttft_s:.2f}"),
            _FIXED,
            ("within", "{fixed_within:.0%}"),
        ],
        _named(result["levels"]),
        title=f"{result['questions']} questions, calibrated on {result['calibrated_on']} others",
        caption=f"{_BOUNDS}, and what keeps the bound by it. Intervals of 95 %.",
    )


def levels_table(found: dict[str, Any]) -> object:
    selector = found["selector"]
    how = ", ".join(f"{name} {value}" for name, value in selector.items() if name != "name")
    return _table(
        [
            *_QUALITY,
            _MEAN_RATIO,
            ("mean KL", "{kl:.4f} [{kl_ci[0]:.4f}, {kl_ci[1]:.4f}]"),
            ("within", "{within:.0%}"),
            _FULL,
            _FIXED,
        ],
        _named(found["levels"]),
        title=f"{found['questions']} questions ({found['source']}); tokens chosen by {selector['name']} ({how})",
        caption=f"{_BOUNDS}. Intervals of 95 %.",
    )


def chat_table(result: dict[str, Any]) -> object:
    ways: dict[str, dict[str, Any]] = result["ways"]
    caption = ["Means from turn 2 on, and how many times sooner a session is:"]
    for name, way in ways.items():
        caption.append(f"{name}: {way['ttft_s']:.3f} s, {way['session_speedup']:.1f}x. {way['about']}")
    return _table(
        [
            ("turn", "{turn}"),
            ("prompt", "{prompt_tokens}"),
            ("known", "{prefix_tokens}"),
            ("reused", "{reused_tokens}"),
            ("again", "{recomputed_tokens}"),
            ("fresh", "{fresh_tokens}"),
            ("idle s", "{idle_s:.2f}"),
            *((f"{name} s".replace("_", "\n"), f"{{ttft_s[{name}]:.3f}}") for name in ways),
        ],
        result["turns"],
        title="Time to first token, turn by turn",
        caption="prompt: tokens; known from before, reused, of these computed again, fresh. idle: work between turns.\n"
        + "\n".join(caption),
    )


def fidelity_table(result: dict[str, Any]) -> object:
    return _table(
        [
            _NAME,
            ("KL", "{kl:.3f}"),
            ("median", "{kl_median:.3f}"),
            ("first", "{kl_first:.3f}"),
            ("agree", "{agreement:.0%}"),
            ("same", "{exact:.0%}"),
            ("F1", "{f1:.2f}"),
            ("rows", "{rows_fraction:.0%}"),
            ("TTFT s", "{ttft_s:.2f}"),
        ],
        _named(result["strategies"]),
        title="Closeness to a full prefill",
        caption="KL: mean, median and at the first token, in nats. agree: tokens. same: answers. F1: to gold answers. "
        "rows: share computed. --json has intervals and more.",
    )


def _named(rows: Mapping[str, Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return ({**numbers, "name": name} for name, numbers in rows.items())


def _table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, title: str, caption: str) -> object:
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
    for name, _ in columns:
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(form, row) for _, form in columns))
    return table


def _cell(form: str, row: Mapping[str, Any]) -> str:
    try:
        return form.format_map(row)
    except KeyError:  # a number that this row does not have
        return ""
