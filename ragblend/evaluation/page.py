"""A fidelity result as one page: what `ragblend bench fidelity --json` printed, to look at and to send on.

result -> runs and curves -> pictures -> index.html, and only then the disk.
"""

from __future__ import annotations

import base64
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from ragblend.errors import InvalidSettingError
from ragblend.evaluation.plots import Curves, Numbers, Plot, Run, images_of, plots_of

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
    plots = plots_of(runs, keys, values, _curves(result, "deviation_by_slot"))
    images = images_of(plots)
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


def _runs(result: Mapping[str, Any]) -> list[Run]:
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
            Run(
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


def _curves(result: Mapping[str, Any], part: str, kind: str | None = None) -> Curves:
    """The numbers of a part, or those of one kind ("key" or "value") in it."""
    curves = {}
    for policy, given in _mapping(result.get(part), part).items():
        where = f"{part}[{policy!r}]"
        curves[policy] = _numbers(given if kind is None else _mapping(given, where).get(kind), where)
    return curves


# --- the page ---------------------------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """Rows of (name, cells); a cell is a number and its interval, as text."""

    caption: str
    head: list[str]
    rows: list[tuple[str, list[tuple[str, str]]]]


def _page(result: Mapping[str, Any], runs: list[Run], plots: list[Plot], images: Mapping[str, bytes]) -> bytes:
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
    missing = [title for metric, title in METRICS.items() if metric not in metrics]
    missing += [f"{plot.title} ({panel.title})" for plot in plots for panel in plot.panels if not panel.drawn]
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    page = pages.from_string(_TEMPLATE).render(
        facts=facts,
        figures=[
            (plot, base64.b64encode(images[plot.file]).decode(), [_of_lines(numbers) for numbers in plot.numbers])
            for plot in plots
            if images[plot.file]
        ],
        all=_of_metrics(runs, metrics),
        missing=missing,
    )
    return page.encode("utf-8", "backslashreplace")  # JSON can hold half a surrogate pair, UTF-8 cannot


def _of_metrics(runs: Iterable[Run], metrics: Sequence[str]) -> _Table:
    def cell(run: Run, metric: str) -> tuple[str, str]:
        interval = " to ".join(_text(bound, 3) for bound in run.ci.get(metric, ()))
        return _text(run.values.get(metric, math.nan)), interval

    head = ["strategy", *(METRICS[metric] for metric in metrics)]
    rows = [(run.label, [cell(run, metric) for metric in metrics]) for run in runs]
    return _Table("Every metric of every strategy", head, rows)


def _of_lines(numbers: Numbers) -> _Table:
    places = sorted({x for line in numbers.lines for x in line.x})
    rows = [(line.name, [(_text(y), "") for y in line.y]) for line in numbers.lines if len(line.y)]
    return _Table(numbers.caption, [numbers.first, *(f"{place:g}" for place in places)], rows)


def _text(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else "-"


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
{% for plot, image, tables in figures %}
<h2>{{ plot.title }}</h2>
<figure>
<div class="wide" role="region" aria-label="{{ plot.title }}" tabindex="0">
<img src="data:image/png;base64,{{ image }}" alt="Plot: {{ plot.title }}. The tables have its numbers."></div>
<figcaption>{{ plot.reading }}</figcaption>
</figure>
{% for table in tables if table.rows %}
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
