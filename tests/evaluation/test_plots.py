"""The report of a fidelity result: its pictures, its page, and what it does with odd results and odd folders."""

from __future__ import annotations

import base64
import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from ragblend.errors import InvalidSettingError, MissingDependencyError
from ragblend.evaluation.page import METRICS, write_report

PICTURES = ["pareto.png", "kl_by_ratio.png", "deviation_by_layer.png", "deviation_by_slot.png"]


def run(kl: float, ttft_s: float) -> dict[str, Any]:
    """A strategy's row, in which no two numbers are alike."""
    row: dict[str, Any] = {metric: kl * (1 + i / 7) for i, metric in enumerate(METRICS)}
    row["ttft_s"] = ttft_s
    row["ci"] = {metric: [value * 0.83, value * 1.21] for metric, value in row.items()}
    row["kl_by_position"] = [kl * (1 + math.sin(3 * i) / 2) for i in range(16)]
    return row


def result() -> dict[str, Any]:
    strategies = {
        "full@1": run(0.0, 2.34),
        "reuse@0": run(0.121, 0.21),
        "cacheblend@0.15": run(0.253, 0.71),
        "blend@0.15": run(0.0391, 0.62),
        "blend@0": run(0.0817, 0.2),
        "blend@0.05": run(0.0653, 0.31),
        "system/hkvd@0.15": run(0.152, 0.7),
    }
    policies = {"none": 0.1, "system": 0.05, "neighbours": 0.02}
    layers = {p: [0.0, *(d * (1 + i / 9) for i in range(7))] for p, d in policies.items()}
    return {
        "model": "a <b>bold</b> & brave model",
        "questions": 20,
        "chunks": 6,
        "chunk_tokens": 300,
        "answer_tokens": 16,
        "machine": {"device": "cpu", "dtype": "bfloat16", "threads": 2, "torch": "2.13.0"},
        "command": "ragblend bench fidelity --data q.jsonl",
        "strategies": strategies,
        "deviation_by_layer": {p: {"key": y, "value": [3 * v for v in y]} for p, y in layers.items()},
        "deviation_by_slot": {p: [d / 50, d, d * 1.1] for p, d in policies.items()},
    }


class Page(HTMLParser):
    """What of a page the tests look at: its text, its tables row by row, its images, and all tags there are."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()
        self.images: list[dict[str, str | None]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._caption = self._cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._caption, self._cell = tag == "caption", tag in ("td", "th", "small")
        if tag == "img":
            self.images.append(dict(attrs))
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th", "small"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._caption = self._cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._caption:
            self.tables[data] = self._rows = []
        elif self._cell:
            self._rows[-1][-1] += data

    @property
    def all_numbers(self) -> list[list[str]]:
        return self.tables["Every metric of every strategy"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "made" / "on the way"
    assert write_report(result(), out) == [out / name for name in (*PICTURES, "index.html")]
    return out


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png), format="png")


def test_pictures_are_pngs_of_a_sane_size_on_white(report: Path) -> None:
    for name in PICTURES:
        image = pixels((report / name).read_bytes())
        height, width, _ = image.shape
        assert width == 1600, name
        assert 700 < height < 1400, name
        assert (image[[0, 0, -1, -1], [0, -1, 0, -1]] == 1).all(), f"{name}: corners are white"
        drawn = (image[..., :3] < 1).any(axis=-1).mean()
        assert 0.01 < drawn < 0.4, f"{name}: {drawn:.0%} of it is drawn on"


def test_pictures_are_drawn_in_the_palette(report: Path) -> None:
    image = (pixels((report / "pareto.png").read_bytes())[..., :3] * 255).round().astype(int)
    found = {tuple(colour) for colour in image.reshape(-1, 3)[::3].tolist()}
    assert {(0, 0, 0), (0xE6, 0x9F, 0x00), (0x56, 0xB4, 0xE9), (0x00, 0x9E, 0x73), (0x00, 0x72, 0xB2)} <= found


def test_nothing_else_is_left_in_the_folder(report: Path) -> None:
    assert sorted(path.name for path in report.iterdir()) == sorted([*PICTURES, "index.html"])


def test_page_holds_the_pictures_and_asks_for_nothing_from_outside(report: Path) -> None:
    page = Page(report / "index.html")
    held = [base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,")) for image in page.images]
    assert held == [(report / name).read_bytes() for name in PICTURES]
    assert all(image["alt"] for image in page.images)
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert not re.search(r"https?://|url\(|@import", (report / "index.html").read_text(encoding="utf-8"))


def test_page_has_every_strategy_and_number_by_name_and_ratio(report: Path) -> None:
    head, *rows = Page(report / "index.html").all_numbers
    strategies = result()["strategies"]
    order = ["blend@0", "blend@0.05", "blend@0.15", "cacheblend@0.15", "full@1", "reuse@0", "system/hkvd@0.15"]
    assert head == ["strategy", *METRICS.values()]
    assert [row[0] for row in rows] == order
    for name, *cells in rows:
        expected = []
        for metric in METRICS:
            low, high = strategies[name]["ci"][metric]
            expected += [f"{strategies[name][metric]:.4g}", f"{low:.3g} to {high:.3g}"]
        assert cells == expected, name


def test_page_has_the_numbers_of_the_curves(report: Path) -> None:
    tables, given = Page(report / "index.html").tables, result()
    for kind in ("key", "value"):
        rows = [[policy, *map("{:.4g}".format, y[kind])] for policy, y in given["deviation_by_layer"].items()]
        assert tables[f"Deviation of {kind}s by layer"] == [["policy", *map(str, range(8))], *rows]
    rows = [[policy, *map("{:.4g}".format, y)] for policy, y in given["deviation_by_slot"].items()]
    assert tables["Deviation of keys by place in the prompt"] == [["policy", "1", "2", "3"], *rows]
    by_token = {row[0]: row[1:] for row in tables["Mean KL by answer token"]}
    for name, row in given["strategies"].items():
        assert by_token[name] == [f"{kl:.4g}" for kl in row["kl_by_position"]]


def test_page_says_what_was_measured_and_escapes_it(report: Path) -> None:
    page = Page(report / "index.html")
    for fact in ("a <b>bold</b> & brave model", "20", "device cpu", "torch 2.13.0", "ragblend bench fidelity --data"):
        assert fact in page.text
    assert "b" not in page.tags
    assert "Missing" not in page.text


def test_names_are_text_in_table_and_picture(tmp_path: Path) -> None:
    hostile = ["<script>alert(1)</script>@0.1", "$\\frac{1$@0.2", "_hidden@0.3", "half \ud800 a pair@0.4", "a@b@0.5"]
    write_report({"strategies": {name: run(0.1, 0.3) for name in hostile}}, tmp_path)
    page = Page(tmp_path / "index.html")
    assert "script" not in page.tags
    shown = {row[0] for row in page.all_numbers[1:]}
    assert shown == {name.encode("utf-8", "backslashreplace").decode() for name in hostile}


def test_missing_parts_are_left_out_and_named(tmp_path: Path) -> None:
    given = result()
    row = {"kl": 0.1, "kl_median": 0.05}
    given["strategies"] = {"blend@0": row, "blend@0.15": {**row, "kl": math.nan, "kl_median": None}}
    del given["deviation_by_slot"], given["model"]
    given["deviation_by_layer"] = {"none": {"key": [0.0, 0.2, None, math.inf]}}
    assert [path.name for path in write_report(given, tmp_path)] == [
        "kl_by_ratio.png",
        "deviation_by_layer.png",
        "index.html",
    ]
    page = Page(tmp_path / "index.html")
    missing = re.search(r"Missing from this result[^\n]*", page.text)
    assert missing is not None
    for part in ("against time to first token", "(values)", "by place in the prompt", "by place in the answer", "F1"):
        assert part in missing[0]
    assert "(keys)" not in missing[0]
    assert "not given" in page.text
    assert page.all_numbers[1:] == [["blend@0", "0.1", "0.05"], ["blend@0.15", "-", "-"]]
    assert page.tables["Deviation of keys by layer"][1] == ["none", "0", "0.2", "-", "-"]


def test_a_report_without_a_number_is_a_page_without_a_picture(tmp_path: Path) -> None:
    assert write_report({"strategies": {"blend@0": {"kl": None, "ci": None}}}, tmp_path) == [tmp_path / "index.html"]
    assert Page(tmp_path / "index.html").images == []


def test_a_picture_of_an_earlier_report_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write_report(result(), tmp_path)
    write_report({"strategies": {"blend@0.15": {"kl": 0.1}}}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "kl_by_ratio.png", "notes.txt"]


def many() -> Iterator[tuple[str, dict[str, Any]]]:
    for i in range(12):
        for ratio in (0, 0.05, 0.15):
            yield (
                f"policy {i} with quite a long name/selector {i % 3}@{ratio}",
                run(0.3 * 0.8**i * (1 - ratio), 0.2 + ratio),
            )


@pytest.mark.parametrize(
    "strategies",
    [
        {"blend@0.15": run(0.04, 0.6)},
        {"full@1": run(0.0, 2.3)},
        {"blend@0.15": run(1e-12, 0.6), "other@0.15": run(-1e-9, 0.6)},
        {f"s{i}@{ratio}": run(0.04, 0.6) for i in range(5) for ratio in (0, 0.15)},
        {"tiny@0": run(1e-5, 0.001), "huge@0": run(12.0, 900.0)},
        {"timeless@0": run(0.1, 0.0), "timed@0": run(0.1, 0.5)},
        {"a name that never ends " * 9 + "x" * 90 + "@0": run(0.1, 0.3)},
        dict(many()),
    ],
    ids=["one", "only full", "zero", "equal", "far apart", "no time", "long name", "many"],
)
def test_awkward_results_are_drawn(strategies: dict[str, Any], tmp_path: Path) -> None:
    write_report({"strategies": strategies}, tmp_path)  # any warning of matplotlib's is an error here
    for name in ("pareto.png", "kl_by_ratio.png", "deviation_by_slot.png"):
        height, width, _ = pixels((tmp_path / name).read_bytes()).shape
        assert width == 1600
        assert 700 < height < 2200


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ({}, "no strategies"),
        ({"strategies": {}}, "no strategies"),
        ({"strategies": [1]}, "strategies is not an object"),
        ({"strategies": {"blend": {}}}, "name@ratio"),
        ({"strategies": {"@0.1": {}}}, "name@ratio"),
        ({"strategies": {"blend@nan": {}}}, "name@ratio"),
        ({"strategies": {"blend@1.5": {}}}, "name@ratio"),
        ({"strategies": {"blend@0": 3}}, "not an object"),
        ({"strategies": {"blend@0": {"kl": "0.1"}}}, "kl is '0.1', not a number"),
        ({"strategies": {"blend@0": {"kl": True}}}, "not a number"),
        ({"strategies": {"blend@0": {"ci": {"kl": [0.1]}}}}, "ci.kl is not"),
        ({"strategies": {"blend@0": {"kl_by_position": "12"}}}, "kl_by_position is not a list"),
        ({"strategies": {"blend@0": {}}, "deviation_by_slot": {"none": {"key": []}}}, "deviation_by_slot['none']"),
        ({"strategies": {"blend@0": {}}, "deviation_by_layer": {"none": [0.1]}}, "deviation_by_layer['none']"),
        ([], "the result is not an object"),
    ],
)
def test_what_is_no_fidelity_result_is_refused_and_nothing_written(broken: Any, where: str, tmp_path: Path) -> None:
    out = tmp_path / "report"
    with pytest.raises(InvalidSettingError, match=re.escape(where)) as refused:
        write_report(broken, out)
    assert "ragblend bench fidelity --json" in str(refused.value)
    assert not out.exists()


def test_a_file_in_the_folders_place_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("mine")
    with pytest.raises(InvalidSettingError, match="is a file"):
        write_report(result(), tmp_path / "report")
    with pytest.raises(InvalidSettingError, match="name another folder"):
        write_report({"strategies": {"a@0": {}}}, tmp_path / "report" / "below")
    assert (tmp_path / "report").read_text() == "mine"


def test_a_failed_write_leaves_the_earlier_page_and_no_half_of_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report({"strategies": {"first@0": {}}}, tmp_path)
    before = (tmp_path / "index.html").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidSettingError, match="No space left"):
        write_report({"strategies": {"second@0": {"kl": 0.1}}}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_bytes() == before


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'ragblend[bench]'")):
        write_report(result(), tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_the_callers_matplotlib_is_left_alone(tmp_path: Path) -> None:
    probe = (
        "import sys, pathlib\n"
        "import ragblend.evaluation.page as page\n"
        "assert 'matplotlib' not in sys.modules, 'imported before it is needed'\n"
        "import matplotlib\n"
        "matplotlib.rcParams['font.size'] = 33\n"
        "before = dict(matplotlib.rcParams)\n"
        "page.write_report({'strategies': {'a@0': {'kl': 0.1}}}, pathlib.Path(sys.argv[1]))\n"
        "assert dict(matplotlib.rcParams) == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe, str(tmp_path)], check=True, env={**os.environ, "MPLBACKEND": "Agg"})
