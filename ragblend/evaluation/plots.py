"""A fidelity result as pictures and one page: what `ragblend bench fidelity --json` printed, to look at and to send on.

result -> runs -> panels of lines -> PNG bytes -> index.html, and only then the disk. matplotlib draws, through its
figure objects alone: neither pyplot nor the caller's style takes part, and nothing of it is left behind.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import os
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jinja2
import numpy as np

from ragblend.errors import InvalidSettingError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_Curves: TypeAlias = Mapping[str, list[float]]  # by policy: what the chunk was prefilled behind
PAGE = "index.html"
METRICS = {
    "kl": "KL, mean (nats)",
    "kl_median": "KL, median (nats)",
    "kl_p95": "KL, 95th percentile (nats)",
    "kl_first": "KL, first token (nats)",
    "agreement": "top-1 agreement",
    "exact": "same answer as full prefill",
    "em": "exact match",
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "rows_fraction": "rows computed",
    "ttft_s": "TTFT (s)",
}
_ZERO = 1e-6  # rounding leaves less than this where two computations agree; a log axis has no place for it
# Okabe and Ito's colours without yellow, which white paper swallows. Seven colours and eight markers: 56 pairs.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_DASHES = ("-", "--", ":")
_STYLE = {"font.size": 11, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
_WAYS = ((1, 0), (0, 1), (0, -1), (-1, 0), (0.8, 0.8), (0.8, -0.8), (-0.8, 0.8), (-0.8, -0.8))
_CHARACTERS = 140  # of a legend, abreast
_WIDTH_IN, _HEIGHT_IN, _DPI = 10.0, 5.2, 160  # the height without the legend


@dataclass(frozen=True)
class _Run:
    """A strategy at one ratio: finite numbers by metric, their intervals, and the mean KL at each answer token."""

    label: str
    name: str
    ratio: float
    values: Mapping[str, float]
    ci: Mapping[str, tuple[float, float]]
    kl_by_position: list[float]


@dataclass(frozen=True)
class _Line:
    """One line of a panel. y, low and high are NaN where there is nothing; marks are written beside the points."""

    name: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class _Panel:
    title: str
    x_label: str
    y_label: str
    lines: list[_Line]
    legend: str
    x_kind: str = "count"  # count | seconds | share

    @property
    def drawn(self) -> list[_Line]:
        """The lines that have a point."""
        return [line for line in self.lines if np.isfinite(line.y).any()]


@dataclass(frozen=True)
class _Table:
    """Rows of (name, cells); a cell is a number and its interval, as text."""

    caption: str
    head: list[str]
    rows: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class _Plot:
    """One picture. `alike`: its panels share lines and scale, hence one legend and one y axis."""

    file: str
    title: str
    reading: str
    panels: list[_Panel]
    alike: bool = True
    tables: Sequence[_Table] = ()


def write_report(result: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw a fidelity result and write it into the folder `out`: the PNGs, and a page that holds them, too.

    Every part but "strategies" may be missing, and any number None or NaN: then what it would show is left out, and
    the page says so. Everything is drawn before anything is written, and the page is put in place last. A picture
    that an earlier report left there and this one has no data for is removed.

    Returns:
        The files written, the page last.

    Raises:
        InvalidSettingError: `result` is no such result, or `out` is a file or cannot be written to.
        MissingDependencyError: matplotlib is not installed.
    """
    if os.path.isfile(out):
        raise InvalidSettingError(f"{out} is a file: name a folder to write the report into")
    runs = _runs(result)
    keys, values = (_curves(result, "deviation_by_layer", kind) for kind in ("key", "value"))
    plots = _plots(runs, keys, values, _curves(result, "deviation_by_slot"))
    images = _images(plots)
    page = _page(result, runs, plots, images)
    files = {name: image for name, image in images.items() if image} | {PAGE: page}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as aside:
            for name, content in files.items():
                (Path(aside) / name).write_bytes(content)
            for name in files:
                os.replace(Path(aside) / name, out / name)
        for name in images.keys() - files.keys():
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise InvalidSettingError(f"cannot write the report into {out} ({error}): name another folder") from error
    return [out / name for name in files]


# --- the result, read with care ---------------------------------------------------------------------------------------


def _number(value: object, where: str) -> float:
    """A number; NaN for None and for what is not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _unfit(f"{where} is {value!r}, not a number")
    return float(value) if math.isfinite(value) else math.nan


def _numbers(value: object, where: str) -> list[float]:
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _unfit(f"{where} is not a list of numbers")
    return [_number(item, f"{where}[{i}]") for i, item in enumerate(value)]


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _unfit(f"{where} is not an object")
    return value


def _unfit(reason: str) -> InvalidSettingError:
    return InvalidSettingError(f"{reason}: a report needs what `ragblend bench fidelity --json` printed")


def _runs(result: Mapping[str, Any]) -> list[_Run]:
    """The runs, by name and then by ratio."""
    made = []
    for label, row in _mapping(_mapping(result, "the result").get("strategies"), "strategies").items():
        name, at, ratio = label.rpartition("@")
        where = f"strategies[{label!r}]"
        try:
            share = float(ratio)
        except ValueError:
            share = math.nan
        if not (at and name and 0 <= share <= 1):
            raise _unfit(f"{where} is not named name@ratio")
        fields = _mapping(row, where)
        values = {metric: _number(fields.get(metric), f"{where}.{metric}") for metric in METRICS}
        bounds = _mapping(fields.get("ci"), f"{where}.ci")
        ci = {metric: _numbers(bounds.get(metric), f"{where}.ci.{metric}") for metric in METRICS}
        if odd := [metric for metric, pair in ci.items() if len(pair) not in (0, 2)]:
            raise _unfit(f"{where}.ci.{odd[0]} is not [low, high]")
        made.append(
            _Run(
                label,
                name,
                share,
                {metric: value for metric, value in values.items() if math.isfinite(value)},
                {metric: (pair[0], pair[1]) for metric, pair in ci.items() if np.isfinite(pair).all() and pair},
                _numbers(fields.get("kl_by_position"), f"{where}.kl_by_position"),
            )
        )
    if not made:
        raise _unfit("the result has no strategies")
    return sorted(made, key=lambda run: (run.name, run.ratio))


def _curves(result: Mapping[str, Any], part: str, kind: str | None = None) -> _Curves:
    """The numbers of a part, or those of one kind ("key" or "value") in it."""
    curves = {}
    for policy, given in _mapping(result.get(part), part).items():
        where = f"{part}[{policy!r}]"
        curves[policy] = _numbers(given if kind is None else _mapping(given, where).get(kind), where)
    return curves


# --- what is drawn ----------------------------------------------------------------------------------------------------


def _plots(runs: list[_Run], keys: _Curves, values: _Curves, slots: _Curves) -> list[_Plot]:
    names = list(dict.fromkeys(run.name for run in runs))
    policies = list(dict.fromkeys([*keys, *values, *slots]))
    # Ratio 1 is full prefill itself, at 0; left in, it would squeeze the ratios of interest into a corner.
    partial = [run for run in runs if run.ratio < 1] or runs

    def of(name: str, among: list[_Run], metric: str, x: str) -> _Line:
        """The line of a strategy: a metric against the ratio or against another metric, which is above 0."""
        points = [run for run in among if run.name == name and {metric, x} <= {*run.values, "ratio"}]
        points = [run for run in points if run.values.get(x, 1.0) > 0]
        bounds = [run.ci.get(metric, (math.nan, math.nan)) for run in points]
        return _Line(
            name,
            names.index(name),
            [run.values.get(x, run.ratio) for run in points],
            [run.values[metric] for run in points],
            [low for low, _ in bounds],
            [high for _, high in bounds],
            [f"{run.ratio:g}" for run in points if x != "ratio"],
        )

    def curve(name: str, style: int, y: Sequence[float], start: int = 0) -> _Line:
        return _Line(name, style, range(start, start + len(y)), y)

    times = [of(name, runs, "kl_median", "ttft_s") for name in names]
    means, medians = ([of(name, partial, metric, "ratio") for name in names] for metric in ("kl", "kl_median"))
    by_layer = {
        kind: [curve(policy, policies.index(policy), y) for policy, y in curves.items()]
        for kind, curves in (("keys", keys), ("values", values))
    }
    by_slot = [curve(policy, policies.index(policy), y, 1) for policy, y in slots.items()]
    by_token = [curve(run.label, names.index(run.name), run.kl_by_position) for run in runs]
    # One line a strategy keeps that picture legible: its largest ratio below 1.
    largest = {run.name: run.label for run in partial if run.kl_by_position}.values()
    chosen = [line for line in by_token if line.name in largest]
    kl, deviation = "KL to full prefill (nats)", "relative squared deviation"
    return [
        _Plot(
            "pareto.png",
            "Closeness against time to first token",
            "Further left is sooner, further down is closer to full prefill. Each point is the median over the "
            "questions at the ratio written beside it; whiskers are its confidence interval.",
            [_Panel("median over the questions", "time to first token (s)", kl, times, "strategy", "seconds")],
        ),
        _Plot(
            "kl_by_ratio.png",
            "Closeness by recompute ratio",
            "How much a larger recompute ratio buys: the flatter a line, the less. Bands and whiskers are confidence "
            "intervals, and points of one ratio are nudged apart. Ratio 1 is full prefill itself and is left out.",
            [
                _Panel("mean over the questions", "recompute ratio", kl, means, "strategy", "share"),
                _Panel("median over the questions", "recompute ratio", kl, medians, "strategy", "share"),
            ],
        ),
        _Plot(
            "deviation_by_layer.png",
            "Where stored keys and values deviate",
            "How far a chunk's stored keys and values are from those of a full prefill, before anything is recomputed. "
            "In layer 0 they depend on the token alone; from there, the lower the line, the better what the chunk was "
            "prefilled behind stands in for the real prompt.",
            [_Panel(kind, "layer", deviation, lines, "prefilled behind") for kind, lines in by_layer.items()],
            tables=[_curve_table(f"Deviation of {kind} by layer", "policy", lines) for kind, lines in by_layer.items()],
        ),
        _Plot(
            "deviation_by_slot.png",
            "Where in the prompt and in the answer the error sits",
            "By place in the prompt: how far the stored keys of the first chunk, the second and so on are from a full "
            "prefill's. By place in the answer: the mean KL at each token, at each strategy's largest ratio below 1.",
            [
                _Panel("keys by place in the prompt", "place of the chunk", deviation, by_slot, "prefilled behind"),
                _Panel("KL by place in the answer", "answer token", kl, chosen, "strategy"),
            ],
            alike=False,
            tables=[
                _curve_table("Deviation of keys by place in the prompt", "policy", by_slot),
                _curve_table("Mean KL by answer token", "strategy", by_token),
            ],
        ),
    ]


def _curve_table(caption: str, first: str, lines: list[_Line]) -> _Table:
    places = sorted({x for line in lines for x in line.x})
    rows = [(line.name, [(_text(y), "") for y in line.y]) for line in lines if len(line.y)]
    return _Table(caption, [first, *(f"{place:g}" for place in places)], rows)


def _text(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else "-"


# --- drawing ----------------------------------------------------------------------------------------------------------


def _images(plots: list[_Plot]) -> dict[str, bytes]:
    """{file: PNG}; empty for a plot without data."""
    try:
        import matplotlib.style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingDependencyError(
            f"a report needs matplotlib ({error}); run: pip install 'ragblend[bench]'"
        ) from error
    images = {}
    with matplotlib.style.context(["default", _STYLE]):
        for plot in plots:
            panels = [panel for panel in plot.panels if panel.drawn]
            images[plot.file] = b""
            if not panels:
                continue
            layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
            figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, layout=layout)
            canvas: Any = FigureCanvasAgg(figure)  # untyped where it prints
            _draw(figure, panels, plot.alike)
            buffer = io.BytesIO()
            canvas.print_png(buffer)
            images[plot.file] = buffer.getvalue()
    return images


def _draw(figure: Figure, panels: list[_Panel], alike: bool) -> None:
    from matplotlib.transforms import ScaledTranslation

    axes: list[Axes] = list(figure.subplots(1, len(panels), squeeze=False, sharey=alike)[0])
    legend_lines = 0
    for ax, panel in zip(axes, panels, strict=True):
        _axis(ax, panel, [line for each in panels for line in each.drawn] if alike else panel.drawn)
        # Each name over a narrower line than the one below it: equal points show as nested marks.
        handles = [_line(ax, line, depth, len(panel.drawn), panel.x_kind) for depth, line in enumerate(panel.drawn)]
        labels = [textwrap.fill(_plain(line.name), 44) for line in panel.drawn]
        longest = max(len(row) for label in labels for row in label.split("\n"))
        columns = max(1, min(len(labels), (_CHARACTERS if alike else _CHARACTERS // len(panels)) // (longest + 8)))
        legend_lines = max(legend_lines, 1 + -(-sum(label.count("\n") + 1 for label in labels) // columns))
        style: dict[str, Any] = {"title": panel.legend, "ncols": columns, "frameon": False, "fontsize": 9.5}
        if not alike:
            drop_in = 0.5 + 0.2 * ax.get_xlabel().count("\n")
            below = ax.transAxes + ScaledTranslation(0, -drop_in, figure.dpi_scale_trans)
            ax.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, **style)
        elif ax is axes[0]:
            figure.legend(handles, labels, loc="outside lower center", **style)
        else:
            ax.set_ylabel("")
    figure.set_figheight(_HEIGHT_IN + 0.25 * legend_lines)
    figure.draw_without_rendering()  # only now is it known where the points lie, and there they stay:
    figure.set_layout_engine("none")
    for ax, panel in zip(axes, panels, strict=True):
        _mark(ax, panel.drawn)


def _axis(ax: Axes, panel: _Panel, lines: list[_Line]) -> None:
    """Scales, limits, ticks and labels. What is 0 is drawn on the bottom edge, and the label says so."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    points = [y for line in lines for y in line.y if y > _ZERO]
    tops = [y for line in lines for y in line.high if y > _ZERO]
    bottom, top = (min(points) / 2, max(points + tops) * 1.5) if points else (1e-3, 1.0)
    ax.set_ylim(bottom, top)
    _log(ax, "y", bottom, top)
    at_edge = any(y <= _ZERO for line in lines for y in line.y)
    note = "\n(what is 0 is drawn on the bottom edge)" if at_edge else ""
    ax.set(title=panel.title, xlabel=panel.x_label + note, ylabel=panel.y_label)
    xs = [x for line in panel.drawn for x in line.x]
    if panel.x_kind == "seconds":
        ax.set_xlim(min(xs) / 1.25, max(xs) * 1.25)
        _log(ax, "x", *ax.get_xlim())
    elif panel.x_kind == "share":
        ax.set_xlim(min(xs) - 0.02, max(xs) + 0.02)
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _log(ax: Axes, axis: Literal["x", "y"], low: float, high: float) -> None:
    """A log axis with ticks at plain numbers, however many or few decades it spans."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = math.log10(high / low)
    steps = (1,) if decades > 3 else (1, 2, 5) if decades > 1 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    ax.set(**{f"{axis}scale": "log"})
    which = ax.xaxis if axis == "x" else ax.yaxis
    which.set_major_locator(LogLocator(subs=steps))
    which.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    which.set_minor_locator(NullLocator())


def _line(ax: Axes, line: _Line, depth: int, count: int, x_kind: str) -> Line2D:
    style: dict[str, Any] = {
        "color": _COLOURS[line.style % len(_COLOURS)],
        "marker": _MARKERS[line.style % len(_MARKERS)],
        "linestyle": _DASHES[line.style // len(_COLOURS) % len(_DASHES)],
        "markersize": 9 - 4 * depth / count,
        "markevery": max(1, len(line.x) // 12),
    }
    bottom, top = ax.get_ylim()
    nudge = (depth - (count - 1) / 2) * np.ptp(ax.get_xlim()) * min(0.01, 0.05 / count) if x_kind == "share" else 0.0
    x = np.asarray(line.x, dtype=float) + nudge
    if len(line.low):
        low, high = np.clip(line.low, bottom, top), np.clip(line.high, bottom, top)
        if x_kind == "share" and len(x) > 1:
            ax.fill_between(x, low, high, color=style["color"], alpha=min(0.12, 0.6 / count), linewidth=0)
        else:
            ax.vlines(x, low, high, color=style["color"], alpha=0.5, linewidth=1.5)
    # Half of a mark on the edge lies outside the axes.
    return ax.plot(x, np.clip(line.y, bottom, None), clip_on=False, zorder=3 + depth / count, **style)[0]


def _mark(ax: Axes, lines: list[_Line]) -> None:
    """Write each mark beside its point, where it covers least of what is drawn. Equal marks on one point are one."""
    from matplotlib.patheffects import withStroke

    def pixels(x: Sequence[float], y: Sequence[float]) -> np.ndarray:
        return ax.transData.transform(np.column_stack([x, np.clip(y, *ax.get_ylim())]))

    scale = _DPI / 72  # pixels a point
    points, ink = [], []  # ink: samples of the pixels that are taken
    for line in (line for line in lines if line.marks):
        at = pixels(line.x, line.y)
        whiskers = zip(pixels(line.x, line.low), pixels(line.x, line.high), strict=True)
        ink += [np.linspace(start, stop, 40) for start, stop in (*itertools.pairwise(at), *whiskers)]
        ink.append(np.repeat(at, 40, axis=0))
        points += [(line, mark, point) for mark, point in zip(line.marks, at, strict=True)]
    written = set()
    for line, mark, point in points:
        if (place := (mark, *np.round(point / 8))) in written:
            continue
        written.add(place)
        half = np.array([3.0 * len(mark) + 2, 6.0])  # of a mark 9 points high
        choices: list[tuple[float, int, np.ndarray]] = []
        for gap, way in itertools.product((7, 13, 20, 32), _WAYS):
            offset = np.array(way) * (half + gap)
            low, high = point + (offset - half) * scale, point + (offset + half) * scale
            outside = (low < ax.bbox.min).any() or (high > ax.bbox.max).any()
            covered = sum(((low < some) & (some < high)).all(axis=1).sum() for some in ink)
            # A mark far from its point is read worse than one across a thin line.
            choices.append((covered + 1000 * outside + gap, len(choices), offset))
        best = min(choices)[-1]
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": "#777777"} if (np.abs(best) > half + 10).any() else None
        x, y = np.meshgrid(np.linspace(-1, 1, 12), np.linspace(-1, 1, 6))
        ink.append(point + (best + half * np.column_stack([x.ravel(), y.ravel()])) * scale)
        ax.annotate(
            mark,
            point,
            xycoords="figure pixels",
            xytext=tuple(best),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            color=_COLOURS[line.style % len(_COLOURS)],
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            arrowprops=leader,
            annotation_clip=False,
            zorder=9,
        ).set_in_layout(False)


def _plain(text: str) -> str:
    """Text as matplotlib draws it as it is: a dollar sign would open a formula, a lone surrogate break the font."""
    return text.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(result: Mapping[str, Any], runs: list[_Run], plots: list[_Plot], images: Mapping[str, bytes]) -> bytes:
    machine = result.get("machine")
    listed = ", ".join(f"{k} {v}" for k, v in machine.items()) if isinstance(machine, Mapping) else machine
    facts = {
        "model": result.get("model"),
        "questions": result.get("questions"),
        "chunks in a prompt": result.get("chunks"),
        "tokens of a chunk": result.get("chunk_tokens"),
        "answer tokens": result.get("answer_tokens"),
        "machine": listed,
        "command": result.get("command"),
    }
    metrics = [metric for metric in METRICS if any(metric in run.values for run in runs)]

    def cell(run: _Run, metric: str) -> tuple[str, str]:
        interval = " to ".join(_text(bound, 3) for bound in run.ci.get(metric, ()))
        return _text(run.values.get(metric, math.nan)), interval

    rows = [(run.label, [cell(run, metric) for metric in metrics]) for run in runs]
    missing = [title for metric, title in METRICS.items() if metric not in metrics]
    missing += [f"{plot.title} ({panel.title})" for plot in plots for panel in plot.panels if not panel.drawn]
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    page = pages.from_string(_TEMPLATE).render(
        facts=facts,
        figures=[(plot, base64.b64encode(images[plot.file]).decode()) for plot in plots if images[plot.file]],
        all=_Table("Every metric of every strategy", ["strategy", *(METRICS[metric] for metric in metrics)], rows),
        missing=missing,
    )
    return page.encode("utf-8", "backslashreplace")  # JSON can hold half a surrogate pair, UTF-8 cannot


_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Fidelity of reused KV{{ ": %s" % facts.model if facts.model else "" }}</title>
<style>
:root { color-scheme: light dark; --text: #1c1c1c; --soft: #595959; --page: #fff; --card: #f4f4f2; --line: #d0d0cc; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e6; --soft: #b0b0ac; --page: #161617; --card: #222224; --line: #454548; }
}
body { margin: 0 auto; max-width: 66rem; padding: 1rem clamp(.75rem, 3vw, 2rem) 3rem; line-height: 1.5;
  font-family: system-ui, sans-serif; color: var(--text); background: var(--page); overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) minmax(0, 1fr); gap: .25rem 1rem; padding: 1rem;
  border-radius: .5rem; background: var(--card); }
dt, small { color: var(--soft); } small { display: block; } dd, figure { margin: 0; }
figcaption { margin: .5rem 0; max-width: 46rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
.wide:focus-visible { outline: 3px solid #56b4e9; }
img { display: block; width: 100%; min-width: 40rem; height: auto; background: #fff; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; white-space: nowrap; padding: .5rem .75rem; font-weight: 600; }
th, td { padding: .35rem .75rem; border-top: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { vertical-align: bottom; white-space: normal; }
tr > :first-child { text-align: left; position: sticky; left: 0; max-width: 14rem; white-space: normal;
  background: var(--card); }
summary { cursor: pointer; padding: .5rem 0; }
</style>
{% macro wide(table) %}
<div class="wide" role="region" aria-label="{{ table.caption }}" tabindex="0"><table>
<caption>{{ table.caption }}</caption>
<thead><tr>{% for name in table.head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for name, cells in table.rows %}
<tr><th scope="row">{{ name }}</th>
{%- for value, interval in cells %}<td>{{ value }}{% if interval %}<small>{{ interval }}</small>{% endif %}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
<main>
<h1>How close answers from reused KV come to full prefill</h1>
<p>Each strategy answers the same questions; its next-token distributions are compared with those of a full prefill of
the same prompt, along the same answer. KL is the Kullback-Leibler divergence: 0 where the two agree.</p>
<dl>
{% for name, value in facts.items() %}
<dt>{{ name }}</dt><dd>{% if value is none %}not given{% elif name == "command" %}<code>{{ value }}</code>
{%- else %}{{ value }}{% endif %}</dd>
{% endfor %}
</dl>
{% if missing %}
<p>Missing from this result, and so from this page: {{ missing | join("; ") }}.</p>
{% endif %}
{% for plot, image in figures %}
<h2>{{ plot.title }}</h2>
<figure>
<div class="wide" role="region" aria-label="{{ plot.title }}" tabindex="0">
<img src="data:image/png;base64,{{ image }}" alt="Plot: {{ plot.title }}. The tables have its numbers."></div>
<figcaption>{{ plot.reading }}</figcaption>
</figure>
{% for table in plot.tables if table.rows %}
<details><summary>{{ table.caption }}: the numbers</summary>
{{ wide(table) }}</details>
{% endfor %}
{% endfor %}
<h2>All numbers</h2>
<p>Small print: confidence intervals.</p>
{{ wide(all) }}
</main>
</html>
"""
