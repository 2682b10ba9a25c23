"""The commands that measure: bench ttft, fidelity, budget and so on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.cli.options import (
    AsJson,
    BenchChunks,
    BenchChunkTokens,
    BenchStore,
    Data,
    Dtype,
    Model,
    Ratios,
    at_least_one,
    is_there,
    model_of,
    ratio_of,
    ratios_of,
)
from ragblend.cli.reporting import counting, progress_bar, reporting
from ragblend.cli.tables import bounds_table, chat_table, fidelity_table, ttft_table
from ragblend.errors import InvalidSettingError
from ragblend.quality import QUALITIES, MaxKL

# Of fidelity, and of the report that measures it.
_CHUNKS, _CHUNK_TOKENS, _ANSWER_TOKENS, _RATIOS = 6, 300, 16, "0,0.05,0.15"

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")


@bench.command()
def ttft(
    data: Data,
    chunks: BenchChunks = 6,
    chunk_tokens: BenchChunkTokens = 300,
    limit: Annotated[int, typer.Option(help="Questions to ask.")] = 10,
    ratio: Annotated[float, typer.Option(help="Share of reused tokens to recompute.")] = 0.15,
    repeats: Annotated[int, typer.Option(help="How often each question is timed.")] = 1,
    dtype: Dtype = "auto",
    decode_tokens: Annotated[int, typer.Option(help="Length of the answers whose speed is measured.")] = 64,
    store: BenchStore = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token: stock transformers, full prefill, prefix caching, full reuse, CacheBlend and ours.

    Example:

    - ragblend bench ttft --data questions.jsonl --chunks 6 --chunk-tokens 300 --limit 10 --json
    """
    with reporting(as_json) as say:
        is_there(data)
        at_least_one(
            chunks=chunks, chunk_tokens=chunk_tokens, limit=limit, repeats=repeats, decode_tokens=decode_tokens
        )
        ratio_of(str(ratio))
        from ragblend.evaluation.ttft import run

        with progress_bar("measuring") as bar:
            result = run(
                model=model_of(model),
                data=data,
                chunks=chunks,
                chunk_tokens=chunk_tokens,
                limit=limit,
                ratio=ratio,
                repeats=repeats,
                dtype=dtype,
                decode_tokens=decode_tokens,
                store=store,
                progress=counting(bar),
            )
        say(result, None if as_json else ttft_table(result))


@bench.command()
def chat(
    data: Data,
    chunks: Annotated[int, typer.Option(help="Chunks to retrieve in each turn.")] = 4,
    chunk_tokens: BenchChunkTokens = 300,
    turns: Annotated[int, typer.Option(help="Turns of a chat. The first one is not counted.")] = 8,
    limit: Annotated[int, typer.Option(help="Chats.")] = 1,
    ratio: Annotated[float, typer.Option(help="Share of reused tokens to recompute.")] = 0.0,
    answer_tokens: Annotated[int, typer.Option(help="Length of the answers at most.")] = 256,
    dtype: Dtype = "auto",
    store: BenchStore = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token in chats whose chunks change: a session, and LlamaIndex's context chat engine without one.

    Example:

    - ragblend bench chat --data questions.jsonl --turns 8 --json
    """
    with reporting(as_json) as say:
        is_there(data)
        at_least_one(chunks=chunks, chunk_tokens=chunk_tokens, turns=turns, limit=limit, answer_tokens=answer_tokens)
        ratio_of(str(ratio))
        from ragblend.evaluation.chat import run

        with progress_bar("chatting") as bar:
            result = run(
                model=model_of(model),
                data=data,
                chunks=chunks,
                chunk_tokens=chunk_tokens,
                turns=turns,
                limit=limit,
                ratio=ratio,
                answer_tokens=answer_tokens,
                dtype=dtype,
                store=store,
                progress=counting(bar),
            )
        say(result, None if as_json else chat_table(result))


@bench.command()
def fidelity(
    data: Data,
    chunks: BenchChunks = _CHUNKS,
    chunk_tokens: BenchChunkTokens = _CHUNK_TOKENS,
    limit: Annotated[int, typer.Option(help="Questions to ask. The chunks of all of them are the corpus.")] = 20,
    ratios: Ratios = _RATIOS,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S",
            help="What to compare; may be repeated. reuse, cacheblend, blend, or policy/selector: none, system, "
            "filler, neighbours or document, with none, first, hkvd, hkvd-oneshot or question. Default: the first "
            "three.",
            show_default=False,
        ),
    ] = None,
    strangers: Annotated[
        bool, typer.Option("--strangers", help="Take neighbours from other questions, so that none is in the prompt.")
    ] = False,
    answer_tokens: Annotated[
        int, typer.Option(help="Tokens of the answer that distributions are compared at.")
    ] = _ANSWER_TOKENS,
    dtype: Dtype = "auto",
    store: BenchStore = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """How close each way of answering comes to a full prefill (KL, agreement) and to gold answers (EM, F1, ROUGE-L).

    Examples:

    - ragblend bench fidelity --data questions.jsonl --limit 20 --json > fidelity.json
    - ragblend bench fidelity --data questions.jsonl --strategy cacheblend --strategy system/question --ratios 0.15
    """
    with reporting(as_json) as say:
        result = _fidelity(
            data=data,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            limit=limit,
            ratios=ratios,
            strategy=strategy,
            strangers=strangers,
            answer_tokens=answer_tokens,
            dtype=dtype,
            store=store,
            model=model,
        )
        say(result, None if as_json else fidelity_table(result))


@bench.command()
def budget(
    data: Data,
    chunks: BenchChunks = 6,
    chunk_tokens: BenchChunkTokens = 300,
    limit: Annotated[int, typer.Option(help="Questions; every other one calibrates, the rest is asked.")] = 100,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", metavar="NATS", help="One bound instead of the three qualities.", show_default=False),
    ] = None,
    dtype: Dtype = "auto",
    store: BenchStore = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Whether bounds on the divergence are kept by questions that calibration has not seen, and at what ratio.

    Examples:

    - ragblend bench budget --data questions.jsonl
    - ragblend bench budget --data questions.jsonl --max-kl 0.02 --json
    """
    with reporting(as_json) as say:
        is_there(data)
        at_least_one(chunks=chunks, chunk_tokens=chunk_tokens, limit=limit)
        bounds = QUALITIES if max_kl is None else {"max_kl": MaxKL(max_kl).nats}
        from ragblend.evaluation.budget import run

        with progress_bar("measuring") as bar:
            result = run(
                model=model_of(model),
                data=data,
                chunks=chunks,
                chunk_tokens=chunk_tokens,
                limit=limit,
                bounds=bounds,
                dtype=dtype,
                store=store,
                progress=counting(bar),
            )
        say(result, None if as_json else bounds_table(result))


@bench.command()
def leaks(
    limit: Annotated[int, typer.Option(help="Questions to ask.")] = 100,
    ratios: Ratios = "0,0.15",
    dtype: Dtype = "auto",
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Whether answers tell what stands only in a text that a chunk was prefilled behind: made-up secrets, counted.

    Example:

    - ragblend bench leaks --limit 100 --json
    """
    with reporting(as_json) as say:
        at_least_one(limit=limit)
        shares = ratios_of(ratios)
        from ragblend.evaluation.leaks import run

        with progress_bar("asking") as bar:
            result = run(model=model_of(model), count=limit, ratios=shares, dtype=dtype, progress=counting(bar))
        lines = (f"{name}: {numbers['told']:.1%} told" for name, numbers in result["strategies"].items())
        say(result, "\n".join(lines))


@bench.command()
def match(
    chunks: Annotated[int, typer.Option(help="Texts that are known.")] = 100_000,
    chunk_chars: Annotated[int, typer.Option(help="Characters of a text.")] = 1200,
    prompt_chars: Annotated[int, typer.Option(help="Characters of a prompt.")] = 16_000,
    repeats: Annotated[int, typer.Option(help="How often each of ten prompts is searched.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed makes the same texts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """What it costs to find the chunks of a prompt by their text: time for a prompt, RAM for the index. Loads no model.

    Example:

    - ragblend bench match --chunks 100000 --prompt-chars 16000
    """
    with reporting(as_json) as say:
        from ragblend.evaluation.matching import run

        with progress_bar("making texts") as bar:
            result = run(
                chunks=chunks,
                chunk_chars=chunk_chars,
                prompt_chars=prompt_chars,
                repeats=repeats,
                seed=seed,
                progress=counting(bar),
            )
        say(
            result,
            f"{result['found']} of {result['chunks']} known texts found in a prompt of "
            f"{result['prompt_chars']} characters\n"
            f"{result['median_ms']:.2f} ms; {result['cut_median_ms']:.2f} ms where one is cut (medians of "
            f"{result['searches']})\n"
            f"{result['index_bytes'] / 1e6:.2f} MB of index",
        )


@bench.command()
def cases(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL file to write.", show_default=False)],
    limit: Annotated[int, typer.Option(help="Questions to make.")] = 200,
    chunks: Annotated[int, typer.Option(help="Chunks of each, 3 or more.")] = 6,
    seed: Annotated[int, typer.Option(help="The same seed makes the same questions.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make questions whose answer takes two chunks, for `bench fidelity`. No model knows them: the names are invented.

    Example:

    - ragblend bench cases two-hop.jsonl && ragblend bench fidelity --data two-hop.jsonl --limit 200
    """
    with reporting(as_json) as say:
        from ragblend.evaluation.cases import two_hop, write_cases

        made = two_hop(limit, chunks, seed)
        try:
            write_cases(out, made)
        except OSError as error:
            raise InvalidSettingError(f"{out} cannot be written: {error.strerror or error}") from error
        say({"file": str(out), "questions": len(made)}, f"{len(made)} questions in {out}")


@bench.command()
def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the page and its plots.", show_default=False)],
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `bench fidelity --json` printed. Default: measure now.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Questions, to measure with the defaults.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(help="Questions to ask.")] = 20,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Draw what `bench fidelity` measured: fidelity against TTFT, KL by ratio, deviation by layer and place.

    Examples:

    - ragblend bench report out/ --results fidelity.json
    - ragblend bench report out/ --data questions.jsonl
    """
    with reporting(as_json) as say:
        if (results is None) == (data is None):
            raise InvalidSettingError("give either --results, from `bench fidelity --json`, or --data to measure with")
        if results is not None:
            try:
                result = json.loads(results.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise InvalidSettingError(
                    f"{results} cannot be read as what `bench fidelity --json` prints: {error}"
                ) from error
        else:
            assert data is not None
            result = _fidelity(
                data=data,
                chunks=_CHUNKS,
                chunk_tokens=_CHUNK_TOKENS,
                limit=limit,
                ratios=_RATIOS,
                answer_tokens=_ANSWER_TOKENS,
                model=model,
            )
        from ragblend.evaluation.page import write_report

        files = write_report(result, out)
        say({"files": [str(file) for file in files]}, "\n".join(map(str, files)))


def _fidelity(
    *, data: Path, ratios: str, strategy: Sequence[str] | None = None, model: str | None, **how: Any
) -> dict[str, Any]:
    """What `bench fidelity` measures, and the command that measures it: arguments are the options' names."""
    is_there(data)
    at_least_one(**{name: value for name, value in how.items() if type(value) is int})
    shares = ratios_of(ratios)
    from ragblend.evaluation.fidelity import DEFAULT_STRATEGIES, run

    with progress_bar("measuring") as bar:
        result = run(
            model=model_of(model),
            data=data,
            ratios=shares,
            strategies=strategy or DEFAULT_STRATEGIES,
            progress=counting(bar),
            **how,
        )
    options = {"data": data, "ratios": ratios, "strategy": strategy, "model": model, **how}
    return {**result, "command": _command("bench", "fidelity", **options)}


def _command(*words: str, **options: Any) -> str:
    """What to type for these options: None and False are left out, lists repeat theirs."""
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words += (option,)
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                words += (option, str(one))
    return shlex.join(["ragblend", *words])
