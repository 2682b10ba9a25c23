"""What the commands can be told, and how it is read; an InvalidSettingError says which option is wrong, and how."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.errors import InvalidSettingError
from ragblend.quality import QUALITIES, MaxKL

Store = Annotated[
    Path, typer.Option("--store", envvar="RAGBLEND_STORE", metavar="DIR", help="Folder of documents' KV and index.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="RAGBLEND_MODEL",
        metavar="M",
        help="A model folder, a GGUF file or a hub id. Default: the small model that is installed with ragblend.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
RatioOption = Annotated[
    str | None,
    typer.Option(
        metavar="R",
        help="Share of reused tokens to recompute: 0 is fastest, 1 is a full prefill; or auto. Default: 0.15.",
        show_default=False,
    ),
]
MaxKLOption = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        metavar="NATS",
        help="Instead of --ratio: recompute as much as it takes to stay so close (KL divergence) to a full prefill's "
        "answer. Needs `ragblend calibrate`.",
        show_default=False,
    ),
]
QualityOption = Annotated[
    str | None,
    typer.Option(
        "--quality",
        metavar="Q",
        help="The same by name: strict, balanced or fast.",
        show_default=False,
    ),
]
Data = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="Questions, one JSON object a line: question, answers, chunks.", show_default=False
    ),
]
BenchChunks = Annotated[int, typer.Option(help="Chunks in a prompt.")]
BenchChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk.")]
BenchStore = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Keep the KV here. Default: a temporary folder.", show_default=False),
]
Ratios = Annotated[str, typer.Option(help="Shares of reused tokens to recompute.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
DEFAULT_STORE = Path(".ragblend")


def ratios_of(value: str) -> list[float]:
    with contextlib.suppress(ValueError):
        shares = [float(ratio) for ratio in value.split(",")]
        if all(0.0 <= share <= 1.0 for share in shares):
            return shares
    raise InvalidSettingError(f"--ratios takes numbers from 0 to 1 with commas between; got {value!r}")


def how_much(ratio: str | None, max_kl: float | None, quality: str | None) -> Any:
    """The recompute ratio that one of these options asks for; None if none does."""
    if sum(option is not None for option in (ratio, max_kl, quality)) > 1:
        raise InvalidSettingError("--ratio, --max-kl and --quality say the same thing in three ways: give one of them")
    if max_kl is not None:
        return MaxKL(max_kl)
    if quality is not None and quality not in QUALITIES:
        raise InvalidSettingError(f"--quality is one of {', '.join(QUALITIES)}; got {quality!r}")
    return ratio_of(ratio) if quality is None else quality


def questions_of(file: Path) -> list[str]:
    """The questions of a file: a line each, plain or as JSON objects."""
    try:
        # Not splitlines(): what JSON may hold bare, such as U+2028, ends no line.
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")]
        if "[" in lines:
            raise ValueError("a JSON list over several lines")
        asked = [json.loads(line)["question"] if line.startswith("{") else line for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidSettingError(
            f"{file} cannot be read as questions, one a line, plain or as JSON objects: {type(error).__name__}: {error}"
        ) from error
    if not all(isinstance(question, str) and question.strip() for question in asked):
        raise InvalidSettingError(f"{file} holds questions that are no text")
    return list(dict.fromkeys(asked))


def ratio_of(value: str | None) -> float | str | None:
    if value is None or value == "auto":
        return value
    with contextlib.suppress(ValueError):
        if 0.0 <= (number := float(value)) <= 1.0:
            return number
    raise InvalidSettingError(f"--ratio takes a number from 0 to 1, or auto; got {value!r}")


def model_of(name: str | None) -> str:
    from ragblend.model.sources import DEFAULT_MODEL  # which knows torch, and that takes its time

    return name or DEFAULT_MODEL


def at_least_one(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise InvalidSettingError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")


def bytes_of(size_limit_gb: float | None) -> int | None:
    if size_limit_gb is None:
        return None
    # More than SQLite can count, and infinity, are no limits; NaN is neither above nor below anything.
    if not math.isfinite(size_limit_gb) or not 1 <= size_limit_gb * 1e9 < 2**63:
        raise InvalidSettingError(f"--size-limit-gb takes a number of gigabytes above 0, not {size_limit_gb}")
    return int(size_limit_gb * 1e9)


def template_settings_of(pairs: Sequence[str] | None) -> dict[str, Any] | None:
    """NAME=VALUE each; a value that is JSON is what that says, any other a string. null: no more."""
    if not pairs:
        return None
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidSettingError(
                f"--template-setting takes NAME=VALUE, such as enable_thinking=false; got {pair!r}"
            )
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return {name: value for name, value in settings.items() if value is not None}


def is_there(data: Path) -> None:
    if not os.path.isfile(data):
        raise InvalidSettingError(f"there is no file {data}: --data takes questions, one JSON object a line")
