"""The fidelity bench through its public function and the command line, on a tiny model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ragblend.errors import InvalidSettingError
from ragblend.evaluation import fidelity, leaks
from ragblend.evaluation.cases import two_hop, write_cases
from ragblend.evaluation.strategies import NAMED, SELECTORS, Question, parsed
from ragblend.store.kvstore import KVStore

pytestmark = pytest.mark.usefixtures("embedding_model")
NUMBERS = {
    "kl",
    "kl_median",
    "kl_p95",
    "kl_first",
    "agreement",
    "exact",
    "em",
    "f1",
    "rouge_l",
    "rows_fraction",
    "ttft_s",
    "select_s",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    write_cases(file, two_hop(4, chunks=3))
    return file


@pytest.fixture(scope="module")
def measured(tiny_model: Path, data: Path) -> dict[str, Any]:
    return fidelity.run(
        model=str(tiny_model),
        data=data,
        chunks=3,
        chunk_tokens=60,
        limit=3,
        ratios=(0.0, 0.3, 1.0),
        strategies=("reuse", "cacheblend", "blend", "system/first", "filler/question", "document/none"),
        answer_tokens=5,
        dtype="float32",
    )


def test_every_strategy_at_every_ratio_it_takes_notice_of(measured: dict[str, Any]) -> None:
    expected = {"full@1", "reuse@0", "document/none@0"}
    for strategy in ("cacheblend", "blend", "system/first", "filler/question"):
        expected |= {f"{strategy}@{ratio}" for ratio in ("0", "0.3", "1")}
    assert measured["strategies"].keys() == expected
    for row in measured["strategies"].values():
        assert set(row) == NUMBERS | {"ci", "kl_by_position"}
        assert set(row["ci"]) == NUMBERS
        assert all(low <= row[name] <= high for name, (low, high) in row["ci"].items() if name != "kl_p95")
    json.dumps(measured, allow_nan=False)


def test_ratio_one_is_a_full_prefill_and_less_is_not(measured: dict[str, Any]) -> None:
    rows = measured["strategies"]
    assert rows["full@1"]["kl"] == 0.0
    assert rows["full@1"]["agreement"] == rows["full@1"]["exact"] == 1.0
    for name, row in rows.items():
        if name.endswith("@1"):
            assert row["kl"] < 1e-6, name
            assert row["exact"] == 1.0, name
        elif name.endswith("@0"):
            assert row["kl"] > 1e-7, name
            assert row["rows_fraction"] < 0.7, name


def test_chunks_are_reused_where_they_have_the_same_ids_as_text(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    """With a token for each character, the warm-up's prompt is that of the first question, id for id."""
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path)
    backend = Tokenizer(models.WordLevel({char: n for n, char in enumerate(map(chr, range(256)))}, unk_token="\0"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    rows = fidelity.run(
        model=str(tmp_path),
        data=data,
        chunks=3,
        chunk_tokens=200,
        limit=1,
        ratios=(0.0,),
        strategies=("blend",),
        answer_tokens=2,
    )["strategies"]
    assert rows["blend@0"]["kl"] > 1e-7
    assert 0.0 < rows["blend@0"]["rows_fraction"] < 0.7


def test_strangers_stand_in_no_prompt_of_the_chunk() -> None:
    first, second = (
        Question(str(n), case.question, case.answers, case.chunks) for n, case in enumerate(two_hop(2, chunks=3))
    )
    shared = replace(second, chunks=(*second.chunks, first.chunks[0]))  # its chunk is one of both questions
    corpus = fidelity.Corpus([first, shared], strangers=True)
    assert corpus.neighbours(first.chunks[0]) == []
    assert set(corpus.neighbours(first.chunks[1])) == set(second.chunks)
    assert set(corpus.neighbours(second.chunks[0])) == set(first.chunks[1:])


def test_deviations_are_told_by_policy_layer_and_place(measured: dict[str, Any]) -> None:
    layers, slots = measured["deviation_by_layer"], measured["deviation_by_slot"]
    assert layers.keys() == slots.keys() == {"none", "neighbours", "system", "filler", "document"}
    for policy in layers:
        assert len(layers[policy]["key"]) == len(layers[policy]["value"]) == 3, "layers of the tiny model"
        assert len(slots[policy]) == 3
        assert layers[policy]["key"][0] < 1e-9, "layer 0's keys depend on the token alone"
        assert layers[policy]["key"][2] > 0.0
    assert slots["system"][0] < 1e-9, "the first chunk stands right behind the head, where it was made"
    assert slots["none"][0] > 1e-6


def test_the_settings_are_checked(tiny_model: Path, data: Path) -> None:
    right = {"model": str(tiny_model), "data": data, "chunks": 3, "chunk_tokens": 60, "limit": 3}
    right |= {"ratios": (0.5,), "answer_tokens": 5}
    for wrong in (
        {"strategies": ("blend", "magic")},
        {"strategies": ("neighbours/magic",)},
        {"strategies": ()},
        {"ratios": ()},
        {"ratios": (0.5, 1.5)},
        {"chunks": 0},
        {"answer_tokens": 0},
        {"chunks": 50},
        {"data": data.with_name("missing")},
    ):
        with pytest.raises(InvalidSettingError):
            fidelity.run(**{**right, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*NAMED, *(f"neighbours/{selector}" for selector in SELECTORS)])
def test_every_documented_strategy_has_a_meaning(name: str) -> None:
    policy, selector = parsed(name)
    assert selector in SELECTORS.values()
    assert f"{policy}/" in NAMED.get(name, name)


def test_leaks_are_counted(tiny_model: Path) -> None:
    told = leaks.run(model=str(tiny_model), count=2, chunks=2, ratios=(0.0, 1.0), dtype="float32")
    assert told["strategies"].keys() == {"full@1", "blend@0", "blend@1"}
    assert told["strategies"]["blend@1"]["told"] == told["strategies"]["full@1"]["told"]
    with pytest.raises(InvalidSettingError):
        leaks.run(model=str(tiny_model), count=2, ratios=(2.0,))


def test_the_command_line_measures_and_draws(cli: Cli, data: Path, tmp_path: Path) -> None:
    small = ["--chunks", "3", "--chunk-tokens", "40", "--limit", "1", "--answer-tokens", "3", "--dtype", "float32"]
    measured = cli("bench", "fidelity", "--data", data, "--ratios", "0,0.2", "--strangers", *small, "--json").json
    assert set(measured["strategies"]) == {
        "full@1",
        "reuse@0",
        "cacheblend@0",
        "cacheblend@0.2",
        "blend@0",
        "blend@0.2",
    }
    assert measured["neighbours"] == "none in the prompt"
    assert measured["command"].startswith(f"ragblend bench fidelity --data {data} --ratios 0,0.2 ")
    assert " --strangers " in measured["command"]
    assert " --store" not in measured["command"]
    file = tmp_path / "fidelity.json"
    file.write_text(json.dumps(measured))
    drawn = cli("bench", "report", tmp_path / "out", "--results", file, "--json").json["files"]
    assert {Path(name).name for name in drawn} >= {"index.html", "pareto.png"}
    assert "blend@0.2" in cli("bench", "fidelity", "--data", data, "--ratios", "0.2", *small).out


def test_the_command_line_explains_what_is_wrong(cli: Cli, data: Path, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("no")
    for command in (
        ["fidelity", "--data", tmp_path / "missing"],
        ["fidelity", "--data", data, "--ratios", "0,x"],
        ["fidelity", "--data", data, "--ratios", "2"],
        ["fidelity", "--data", data, "--limit", "0"],
        ["fidelity", "--data", data, "--strategy", "magic"],
        ["report", tmp_path / "out"],
        ["report", tmp_path / "out", "--results", tmp_path / "no.json"],
        ["report", tmp_path / "out", "--results", tmp_path / "missing"],
        ["leaks", "--ratios", "-1"],
        ["cases", tmp_path / "cases", "--chunks", "1"],
        ["cases", tmp_path],
    ):
        done = cli("bench", *command, "--json")
        assert done.code == 1, command
        assert done.json["error"]["type"] == "InvalidSettingError", command


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"answers": "text"}, "line 2: answers"),
        ({"answers": [1871]}, "line 2: answers"),
        ({"chunks": "ab"}, "line 2: chunks"),
        ({"question": None}, "line 2: .*question"),
    ],
)
@pytest.mark.parametrize("bench", ["fidelity", "ttft", "budget", "chat"])
def test_questions_of_another_form_are_refused(
    cli: Cli, data: Path, tmp_path: Path, bench: str, wrong: dict[str, Any], reason: str
) -> None:
    good = json.loads(data.read_text().splitlines()[0])
    file = tmp_path / "wrong.jsonl"
    file.write_text("\n".join(map(json.dumps, (good, good | wrong))))
    done = cli("bench", bench, "--data", file, "--chunks", "3", "--limit", "2", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "InvalidSettingError"
    assert re.search(f"{re.escape(str(file))}, {reason}", done.json["error"]["message"])


def test_chunks_too_short_to_be_found_in_a_prompt_are_not_measured(cli: Cli, data: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"question": "Where?", "answers": ["Rome"], "chunks": ["Paris.", "Rome."]}))
    for args in (["--data", short, "--chunks", "2"], ["--data", data, "--chunks", "3", "--chunk-tokens", "5"]):
        done = cli("bench", "fidelity", *args, "--json")
        assert done.code == 1
        assert "32 characters" in done.json["error"]["message"]
        assert "--chunk-tokens" in done.json["error"]["message"]


@pytest.mark.parametrize("bench", ["fidelity", "ttft"])
def test_chunks_that_the_store_did_not_keep_are_not_measured(cli: Cli, data: Path, tmp_path: Path, bench: str) -> None:
    KVStore(tmp_path / "small", size_limit_bytes=1).close()
    args = ["--data", data, "--store", tmp_path / "small", "--chunks", "3", "--limit", "1", "--dtype", "float32"]
    done = cli("bench", bench, *args, "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "InvalidSettingError"
    assert "size limit" in done.json["error"]["message"]


def test_made_questions_are_written(cli: Cli, tmp_path: Path) -> None:
    assert cli("bench", "cases", tmp_path / "a.jsonl", "--limit", "5", "--chunks", "3", "--json").json["questions"] == 5
    cli("bench", "cases", tmp_path / "b.jsonl", "--limit", "5", "--chunks", "3")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 5
