"""Strategies and what stored KV deviates by, as pictures: runs and curves -> panels of lines -> PNG bytes.

matplotlib draws, through its figure objects alone: neither pyplot nor the caller's style takes part, and nothing of it
is left behind.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ragblend.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Curves: TypeAlias = Mapping[str, list[float]]  # by policy: what the chunk was prefilled behind

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
class Run:
    """A strategy at one ratio: finite numbers by metric, their intervals, and the mean KL at each answer token."""

    label: str
    name: str
    ratio: float
    values: Mapping[str, float]
    ci: Mapping[str, tuple[float, float]]
    kl_by_position: list[float]


@dataclass(frozen=True)
class Line:
    """One line of a panel. y, low and high are NaN where there is nothing; marks are written beside the points."""

    name: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    legend: str
    x_kind: str = "count"  # count | seconds | share

    @property
    def drawn(self) -> list[Line]:
        """The lines that have a point."""
        return [line for line in self.lines if np.isfinite(line.y).any()]


@dataclass(frozen=True)
class Numbers:
    """Lines to be read as numbers. first: what their names are."""

    caption: str
    first: str
    lines: list[Line]


@dataclass(frozen=True)
class Plot:
    """One picture. `alike`: its panels share lines and scale, hence one legend and one y axis."""

    file: str
    title: str
    reading: str
    panels: list[Panel]
    alike: bool = True
    numbers: Sequence[Numbers] = ()


# --- what is drawn ----------------------------------------------------------------------------------------------------


def plots_of(runs: Sequence[Run], keys: Curves, values: Curves, slots: Curves) -> list[Plot]:
    """What there is to draw, data or not.

    Args:
        runs: by name and then by ratio.
        keys, values: relative squared deviation by layer.
        slots: of the keys, by place in the prompt.
    """
    names = list(dict.fromkeys(run.name for run in runs))
    policies = list(dict.fromkeys([*keys, *values, *slots]))
    # Ratio 1 is full prefill itself, at 0; left in, it would squeeze the ratios of interest into a corner.
    partial = [run for run in runs if run.ratio < 1] or runs

    def of(name: str, among: Sequence[Run], metric: str, x: str) -> Line:
        """The line of a strategy: a metric against the ratio or against another metric, which is above 0."""
        points = [run for run in among if run.name == name and {metric, x} <= {*run.values, "ratio"}]
        points = [run for run in points if run.values.get(x, 1.0) > 0]
        bounds = [run.ci.get(metric, (math.nan, math.nan)) for run in points]
        return Line(
            name,
            names.index(name),
            [run.values.get(x, run.ratio) for run in points],
            [run.values[metric] for run in points],
            [low for low, _ in bounds],
            [high for _, high in bounds],
            [f"{run.ratio:g}" for run in points if x != "ratio"],
        )

    def curve(name: str, style: int, y: Sequence[float], start: int = 0) -> Line:
        return Line(name, style, range(start, start + len(y)), y)

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
        Plot(
            "pareto.png",
            "Closeness against time to first token",
            "Further left is sooner, further down is closer to full prefill. Each point is the median over the "
            "questions at the ratio written beside it; whiskers are its confidence interval.",
            [Panel("median over the questions", "time to first token (s)", kl, times, "strategy", "seconds")],
        ),
        Plot(
            "kl_by_ratio.png",
            "Closeness by recompute ratio",
            "How much a larger recompute ratio buys: the flatter a line, the less. Bands and whiskers are confidence "
            "intervals, and points of one ratio are nudged apart. Ratio 1 is full prefill itself and is left out.",
            [
                Panel("mean over the questions", "recompute ratio", kl, means, "strategy", "share"),
                Panel("median over the questions", "recompute ratio", kl, medians, "strategy", "share"),
            ],
        ),
        Plot(
            "deviation_by_layer.png",
            "Where stored keys and values deviate",
            "How far a chunk's stored keys and values are from those of a full prefill, before anything is recomputed. "
            "In layer 0 they depend on the token alone; from there, the lower the line, the better what the chunk was "
            "prefilled behind stands in for the real prompt.",
            [Panel(kind, "layer", deviation, lines, "prefilled behind") for kind, lines in by_layer.items()],
            numbers=[Numbers(f"Deviation of {kind} by layer", "policy", lines) for kind, lines in by_layer.items()],
        ),
        Plot(
            "deviation_by_slot.png",
            "Where in the prompt and in the answer the error sits",
            "By place in the prompt: how far the stored keys of the first chunk, the second and so on are from a full "
            "prefill's. By place in the answer: the mean KL at each token, at each strategy's largest ratio below 1.",
            [
                Panel("keys by place in the prompt", "place of the chunk", deviation, by_slot, "prefilled behind"),
                Panel("KL by place in the answer", "answer token", kl, chosen, "strategy"),
            ],
            alike=False,
            numbers=[
                Numbers("Deviation of keys by place in the prompt", "policy", by_slot),
                Numbers("Mean KL by answer token", "strategy", by_token),
            ],
        ),
    ]


# --- drawing ----------------------------------------------------------------------------------------------------------


def images_of(plots: Sequence[Plot]) -> dict[str, bytes]:
    """{file: PNG}; empty for a plot without data.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
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


def _draw(figure: Figure, panels: list[Panel], alike: bool) -> None:
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


def _axis(ax: Axes, panel: Panel, lines: list[Line]) -> None:
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


def _line(ax: Axes, line: Line, depth: int, count: int, x_kind: str) -> Line2D:
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


def _mark(ax: Axes, lines: list[Line]) -> None:
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
