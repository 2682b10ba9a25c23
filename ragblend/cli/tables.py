"""Results as tables, for people."""

from __future__ import annotations

from typing import Any

_COLUMNS = ("ttft_s", "cold_ttft_s", "speedup", "rows_fraction", "decode_tokens_per_s")


def ttft_table(result: dict[str, Any]) -> object:
    from rich.table import Table

    table = Table(title="Time to first token, medians; --json has all the numbers")
    strategies: dict[str, dict[str, Any]] = result["strategies"]
    columns = [name for name in _COLUMNS if any(name in numbers for numbers in strategies.values())]
    table.add_column("strategy")
    for column in columns:
        table.add_column(column, justify="right")
    for strategy, numbers in strategies.items():
        table.add_row(strategy, *(_cell(numbers.get(column)) for column in columns))
    return table


def bounds_table(result: dict[str, Any]) -> Any:
    from rich.table import Table

    title = f"{result['questions']} questions, calibrated on {result['calibrated_on']} others"
    table = Table(title=title, title_justify="left")
    for column in ("quality", "max kl", "within", "mean ratio", "full prefills", "ttft", "fixed ratio", "within by it"):
        table.add_column(column, justify="left" if column == "quality" else "right")
    for name, level in result["levels"].items():
        table.add_row(
            name,
            f"{level['max_kl']:g}",
            "{:.0%} [{:.0%}, {:.0%}]".format(level["within"], *level["within_ci"]),
            "{:.2f} [{:.2f}, {:.2f}]".format(level["ratio"], *level["ratio_ci"]),
            f"{level['full']:.0%}",
            f"{level['ttft_s']:.2f} s",
            f"{level['fixed_ratio']:g}",
            f"{level['fixed_within']:.0%}",
        )
    return table


def levels_table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    selector = found["selector"]
    how = ", ".join(f"{name} {value}" for name, value in selector.items() if name != "name")
    title = f"{found['questions']} questions ({found['source']}); tokens chosen by {selector['name']} ({how})"
    table = Table(title=title, title_justify="left")
    for column in ("quality", "max kl", "mean ratio", "mean kl", "within", "full prefills", "fixed ratio"):
        table.add_column(column, justify="left" if column == "quality" else "right")
    for name, level in found["levels"].items():
        table.add_row(
            name,
            f"{level['max_kl']:g}",
            "{:.2f} [{:.2f}, {:.2f}]".format(level["ratio"], *level["ratio_ci"]),
            "{:.4f} [{:.4f}, {:.4f}]".format(level["kl"], *level["kl_ci"]),
            f"{level['within']:.0%}",
            f"{level['full']:.0%}",
            f"{level['fixed_ratio']:g}",
        )
    return table


def chat_table(result: dict[str, Any]) -> object:
    from rich.table import Table

    ways: dict[str, dict[str, Any]] = result["ways"]
    caption = ["Means from turn 2 on, and how many times sooner a session is:"]
    for name, way in ways.items():
        caption.append(f"{name}: {way['ttft_s']:.3f} s, {way['session_speedup']:.1f}x. {way['about']}")
    table = Table(title="Time to first token, turn by turn", caption="\n".join(caption), caption_justify="left")
    counts = {"turn": "turn", "prompt_tokens": "prompt", "prefix_tokens": "known", "reused_tokens": "reused"}
    counts |= {"recomputed_tokens": "recomputed", "fresh_tokens": "fresh", "idle_s": "between turns s"}
    for title in (*counts.values(), *(f"{name} s" for name in ways)):
        table.add_column(title, justify="right")
    for turn in result["turns"]:
        table.add_row(*(_cell(turn[name]) for name in counts), *(_cell(turn["ttft_s"][name]) for name in ways))
    return table


def fidelity_table(result: dict[str, Any]) -> object:
    from rich import box
    from rich.table import Table

    table = Table(
        title="Closeness to a full prefill",
        caption="KL: mean, median and at the first token, in nats. agree: tokens. same: answers. F1: to gold answers. "
        "rows: share computed. --json has intervals and more.",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    columns = {
        "kl": "KL",
        "kl_median": "median",
        "kl_first": "first",
        "agreement": "agree",
        "exact": "same",
        "f1": "F1",
        "rows_fraction": "rows",
        "ttft_s": "TTFT s",
    }
    table.add_column("strategy", no_wrap=True)
    for title in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
    for strategy, numbers in result["strategies"].items():
        table.add_row(strategy, *(_cell(numbers.get(column)) for column in columns))
    return table


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
