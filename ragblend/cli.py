"""The command line: ragblend ingest, query, calibrate, stats, verify, bench.

Results go to stdout, everything else (progress, warnings, errors) to stderr. With --json stdout carries exactly one
JSON object, errors included. What imports torch is imported inside the commands that need it, so that --help, --version
and stats answer at once.

With RAGBLEND_DEBUG set, errors nobody expected come with a traceback.

Exit codes: 0 done; 1 an error, explained; 2 a wrong option; 3 done, but some files were skipped; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ragblend import __version__
from ragblend.errors import EmptyPromptError, InvalidSettingError, RagBlendError
from ragblend.quality import QUALITIES, MaxKL

if TYPE_CHECKING:
    from rich.progress import Progress

    from ragblend.blend.variants import Policy

_SKIPPED, _FAILED, _INTERRUPTED = 3, 1, 130
_COLUMNS = ("ttft_s", "cold_ttft_s", "speedup", "rows_fraction", "decode_tokens_per_s")

app = typer.Typer(
    name="ragblend",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    help="""Answer questions from your documents, several times sooner.

    Documents are read, split and run through the model once; what the model made of them (its KV) is kept on disk and
    put together again for each question.

    **Start like this**

    - ragblend ingest docs/ notes.md paper.pdf
    - ragblend query "How do I clear the cache?"

    Both use the store in .ragblend and a small built-in model. Choose others with --store and --model, or with
    RAGBLEND_STORE and RAGBLEND_MODEL.
    """,
)
bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.add_typer(bench, name="bench")

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


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"ragblend {__version__}")
        raise typer.Exit


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)],
    store: Store = DEFAULT_STORE,
    model: Model = None,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk at most.")] = 300,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="What chunks are prefilled behind: neighbours, filler, document, system or none. Default: as before, "
            "neighbours at first.",
            show_default=False,
        ),
    ] = None,
    size_limit_gb: Annotated[
        float | None,
        typer.Option(help="Keep at most so many GB of KV; least recently used goes first.", show_default=False),
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(metavar="E", help="Folder or hub id. Default: all-MiniLM-L6-v2.", show_default=False),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Also forget documents under these paths whose files are gone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read documents (text, Markdown, HTML, PDF and what else LlamaIndex reads) into the store.

    Only what is new or changed costs time. Interrupt it whenever you like: what was committed stays, and the same
    command goes on from there.

    Examples:

    - ragblend ingest docs/
    - ragblend ingest *.pdf --store papers --model ./my-model
    """
    with _reporting(as_json) as say:
        limit = _bytes(size_limit_gb)
        from ragblend.kb import KnowledgeBase

        with (
            KnowledgeBase(
                store,
                model=model,
                embedding_model=embedding_model,
                chunk_tokens=chunk_tokens,
                policy=cast("Policy | None", policy),  # checked there
                size_limit_bytes=limit,
            ) as kb,
            _bar("reading") as bar,
        ):
            summary = kb.ingest(paths, prune=prune, progress=_following(bar))
        for skip in summary.skipped:
            typer.echo(f"skipped {skip.path}: {skip.reason}", err=True)
        say(
            summary.as_dict(),
            f"{summary.documents} documents ingested, {summary.unchanged} unchanged, {len(summary.skipped)} skipped, "
            f"{summary.pruned} forgotten; "
            f"{summary.computed} chunks prefilled ({summary.tokens} tokens, {summary.bytes / 1e6:.1f} MB) in "
            f"{summary.seconds:.1f} s",
        )
        if summary.skipped:
            raise typer.Exit(_SKIPPED)


@app.command()
def query(
    question: Annotated[str, typer.Argument(metavar="QUESTION", show_default=False)],
    store: Store = DEFAULT_STORE,
    model: Model = None,
    top_k: Annotated[int, typer.Option(help="How many chunks to answer from.")] = 4,
    ratio: RatioOption = None,
    max_kl: MaxKLOption = None,
    quality: QualityOption = None,
    max_tokens: Annotated[int, typer.Option(help="Length of the answer at most.")] = 256,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is being made.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question from the ingested documents, with sources and what it took.

    Examples:

    - ragblend query "Who wrote it?" --stream
    - ragblend query "Who wrote it?" --top-k 6 --ratio 0.3 --json
    - ragblend query "Who wrote it?" --quality strict
    """
    with _reporting(as_json) as say:
        # All that can be refused without a model is refused before torch is imported for one.
        if not question.strip():
            raise EmptyPromptError("the question is empty: ask something")
        _at_least_one(top_k=top_k, max_tokens=max_tokens)
        share = _how_much(ratio, max_kl, quality)
        from ragblend.kb import KnowledgeBase

        # With --json the answer is one object, which is complete only at the end.
        on_text = (lambda text: typer.echo(text, nl=False)) if stream and not as_json else None
        with KnowledgeBase(store, model=model, create=False) as kb:
            reply = kb.query(question, top_k=top_k, ratio=share, max_tokens=max_tokens, on_text=on_text)
        lines = ["" if on_text else reply.text.strip(), ""]
        for source in reply.sources:
            page = f", page {source.node.metadata['page']}" if "page" in source.node.metadata else ""
            lines.append(f"  {source.score or 0.0:.2f}  {source.node.metadata['document']}{page}")
        if (report := reply.report) is not None:
            lines.append(
                f"  {report.hits} of {len(report.chunks)} chunks reused, {report.rows_fraction:.0%} of a full prefill "
                f"computed, first token after {report.ttft_s:.2f} s"
            )
        say({"question": question, **reply.as_dict()}, "\n".join(lines))


@app.command()
def calibrate(
    store: Store = DEFAULT_STORE,
    model: Model = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What is asked of these documents: one question a line, or JSON objects with a question. Default: "
            "the model makes some up.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Questions at most.")] = 60,
    minutes: Annotated[float, typer.Option(help="No question is begun when they are nearly over.")] = 10.0,
    top_k: Annotated[int, typer.Option(help="How many chunks answers are made from.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Find out what keeps answers close to a full prefill's, on these documents with this model.

    Each question is answered by a full prefill and at several recompute ratios. What is found is kept with the store:
    which tokens are best recomputed, and how many it takes for a request. `query --quality` and `query --max-kl` go by
    it, and so does --ratio auto.

    Examples:

    - ragblend calibrate
    - ragblend calibrate --questions questions.txt --minutes 5
    """
    with _reporting(as_json) as say:
        _at_least_one(limit=limit, top_k=top_k)
        if not minutes > 0:
            raise InvalidSettingError(f"--minutes takes a number above 0, not {minutes}")
        asked = None if questions is None else _questions(questions)
        from ragblend.kb import KnowledgeBase

        with KnowledgeBase(store, model=model, create=False) as kb:
            kb.as_retriever(top_k)
            from ragblend.evaluation.calibrate import calibrate_documents

            with _bar("calibrating") as bar:
                found = calibrate_documents(
                    kb, asked, limit=limit, top_k=top_k, minutes=minutes, progress=_following(bar)
                )
        say(found, None if as_json else _levels_table(found))


@app.command()
def stats(store: Store = DEFAULT_STORE, model: Model = None, as_json: AsJson = False) -> None:
    """Count documents, chunks, tokens and bytes. Loads no model (--model is accepted for symmetry)."""
    with _reporting(as_json) as say:
        from ragblend.kb import KnowledgeBase

        with KnowledgeBase(store, model=model, create=False) as kb:
            counts = asdict(kb.stats())
        width = max(map(len, counts))
        lines = [f"{name:<{width}}  {value}" for name, value in counts.items() if name != "calibrations"]
        for found in counts["calibrations"]:
            levels = (f"{name} {level['ratio']:.2f}" for name, level in found.get("levels", {}).items())
            lines.append(
                f"{'calibrated':<{width}}  {found.get('made')}: {found.get('questions')} questions "
                f"({found.get('source')}), mean ratios {', '.join(levels)}"
            )
        say(counts, "\n".join(lines))


@app.command()
def verify(
    store: Store = DEFAULT_STORE,
    model: Model = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete what is bad. The next ingest makes it again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every stored payload to its last byte and check the index. Exit code 0 only when all is well.

    With --repair it still ends with 1 if something was wrong; a second run then ends with 0.
    """
    with _reporting(as_json) as say:
        from ragblend.kb import KnowledgeBase

        with KnowledgeBase(store, model=model, create=False) as kb, _bar("verifying") as bar:
            task = bar.tasks[0].id
            found = kb.verify(repair=repair, progress=lambda done, total: bar.update(task, completed=done, total=total))
        problems = [f"bad payload {key[:16]}: {reason}" for key, reason in found.kv.bad]
        problems += [f"missing payload {key[:16]}: a chunk of the index refers to it" for key in found.missing]
        problems += [f"file of no chunk: {name}" for name in found.kv.orphans]
        problems += [f"index: {text}" for text in (*found.kv.index_problems, *found.index_problems)]
        for problem in problems:
            typer.echo(problem, err=True)
        outcome = f"{found.kv.checked} payloads checked, {len(problems)} problems, {found.kv.deleted} deleted"
        say({**found.as_dict(), "repaired": repair}, outcome)
        if not found.ok:
            raise typer.Exit(_FAILED)


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
    with _reporting(as_json) as say:
        _is_there(data)
        _at_least_one(chunks=chunks, chunk_tokens=chunk_tokens, limit=limit, repeats=repeats)
        _ratio(str(ratio))
        from ragblend.evaluation.ttft import run
        from ragblend.model.sources import DEFAULT_MODEL

        with _bar("measuring") as bar:
            result = run(
                model=model or DEFAULT_MODEL,
                data=data,
                chunks=chunks,
                chunk_tokens=chunk_tokens,
                limit=limit,
                ratio=ratio,
                repeats=repeats,
                dtype=dtype,
                decode_tokens=decode_tokens,
                store=store,
                progress=_counting(bar),
            )
        say(result, None if as_json else _table(result))


@bench.command()
def chat(
    data: Data,
    chunks: Annotated[int, typer.Option(help="Chunks to retrieve in each turn.")] = 4,
    chunk_tokens: BenchChunkTokens = 300,
    turns: Annotated[int, typer.Option(help="Turns of a chat. The first one is not counted.")] = 8,
    limit: Annotated[int, typer.Option(help="Chats.")] = 1,
    ratio: Annotated[float, typer.Option(help="Share of reused tokens to recompute.")] = 0.15,
    answer_tokens: Annotated[int, typer.Option(help="Length of the answers at most.")] = 48,
    dtype: Dtype = "auto",
    store: BenchStore = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token in chats whose chunks change: a session, and full prefills by transformers' generate.

    Example:

    - ragblend bench chat --data questions.jsonl --turns 8 --json
    """
    with _reporting(as_json) as say:
        _is_there(data)
        _at_least_one(chunks=chunks, chunk_tokens=chunk_tokens, turns=turns, limit=limit, answer_tokens=answer_tokens)
        _ratio(str(ratio))
        from ragblend.evaluation.chat import run
        from ragblend.model.sources import DEFAULT_MODEL

        with _bar("chatting") as bar:
            result = run(
                model=model or DEFAULT_MODEL,
                data=data,
                chunks=chunks,
                chunk_tokens=chunk_tokens,
                turns=turns,
                limit=limit,
                ratio=ratio,
                answer_tokens=answer_tokens,
                dtype=dtype,
                store=store,
                progress=_counting(bar),
            )
        say(result, None if as_json else _chat_table(result))


@bench.command()
def fidelity(
    data: Data,
    chunks: BenchChunks = 6,
    chunk_tokens: BenchChunkTokens = 300,
    limit: Annotated[int, typer.Option(help="Questions to ask. The chunks of all of them are the corpus.")] = 20,
    ratios: Ratios = "0,0.05,0.15",
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
    answer_tokens: Annotated[int, typer.Option(help="Tokens of the answer that distributions are compared at.")] = 16,
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
    with _reporting(as_json) as say:
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
        say(result, None if as_json else _fidelity_table(result))


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
    with _reporting(as_json) as say:
        _is_there(data)
        _at_least_one(chunks=chunks, chunk_tokens=chunk_tokens, limit=limit)
        bounds = QUALITIES if max_kl is None else {"max_kl": MaxKL(max_kl).nats}
        from ragblend.evaluation.budget import run
        from ragblend.model.sources import DEFAULT_MODEL

        with _bar("measuring") as bar:
            result = run(
                model=model or DEFAULT_MODEL,
                data=data,
                chunks=chunks,
                chunk_tokens=chunk_tokens,
                limit=limit,
                bounds=bounds,
                dtype=dtype,
                store=store,
                progress=_counting(bar),
            )
        say(result, None if as_json else _bounds_table(result))


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
    with _reporting(as_json) as say:
        _at_least_one(limit=limit)
        shares = _ratios(ratios)
        from ragblend.evaluation.leaks import run
        from ragblend.model.sources import DEFAULT_MODEL

        with _bar("asking") as bar:
            result = run(model=model or DEFAULT_MODEL, count=limit, ratios=shares, dtype=dtype, progress=_counting(bar))
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
    with _reporting(as_json) as say:
        from ragblend.evaluation.matching import run

        with _bar("making texts") as bar:
            result = run(
                chunks=chunks,
                chunk_chars=chunk_chars,
                prompt_chars=prompt_chars,
                repeats=repeats,
                seed=seed,
                progress=_counting(bar),
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
    with _reporting(as_json) as say:
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
    with _reporting(as_json) as say:
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
            result = _fidelity(data=data, limit=limit, model=model)
        from ragblend.evaluation.page import write_report

        files = write_report(result, out)
        say({"files": [str(file) for file in files]}, "\n".join(map(str, files)))


def _fidelity(
    *, data: Path, ratios: str = "0,0.05,0.15", strategy: Sequence[str] | None = None, model: str | None, **how: Any
) -> dict[str, Any]:
    """What `bench fidelity` measures, and the command that measures it: arguments are the options' names."""
    _is_there(data)
    _at_least_one(**{name: value for name, value in how.items() if type(value) is int})
    shares = _ratios(ratios)
    from ragblend.evaluation.fidelity import DEFAULT_STRATEGIES, run
    from ragblend.model.sources import DEFAULT_MODEL

    with _bar("measuring") as bar:
        result = run(
            model=model or DEFAULT_MODEL,
            data=data,
            ratios=shares,
            strategies=strategy or DEFAULT_STRATEGIES,
            progress=_counting(bar),
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


def main() -> None:
    """The console script."""
    try:
        app()
    except KeyboardInterrupt:  # outside any command, such as while modules are being imported
        sys.exit(_INTERRUPTED)


Say = Callable[[dict[str, Any], object], None]


@contextlib.contextmanager
def _reporting(as_json: bool) -> Iterator[Say]:
    """Run a command's work; `say` gives its result, as JSON or for people. Errors become a message and an exit code."""
    stdout = sys.stdout
    # File names and documents hold what a terminal's encoding, or any, cannot write.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    said = False

    def say(result: dict[str, Any], for_people: object) -> None:
        nonlocal said
        if as_json:
            if not said:
                print(json.dumps(result), file=stdout, flush=True)
            said = True
        elif isinstance(for_people, str):
            typer.echo(for_people)
        else:
            from rich.console import Console

            Console().print(for_people)

    def fail(kind: str, message: str, code: int) -> typer.Exit:
        if as_json:
            say({"error": {"type": kind, "message": message}}, None)
        typer.echo(f"error: {message}", err=True)
        return typer.Exit(code)

    # Before libraries get to it: one of LlamaIndex's readers would turn on everybody's INFO messages.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Model loaders draw bars of their own across ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Libraries print now and then; with --json that must not get between the reader and the object.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            yield say
        except RagBlendError as error:
            raise fail(type(error).__name__, str(error), _FAILED) from None
        except KeyboardInterrupt:
            message = "interrupted; what was committed is kept, and the same command goes on from there"
            raise fail("KeyboardInterrupt", message, _INTERRUPTED) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):  # typer knows what to do
            raise
        except Exception as error:
            if os.environ.get("RAGBLEND_DEBUG"):
                traceback.print_exc(file=sys.stderr)
            message = f"{type(error).__name__}: {error} (set RAGBLEND_DEBUG=1 for a traceback)"
            raise fail(type(error).__name__, message, _FAILED) from None


@contextlib.contextmanager
def _bar(description: str) -> Iterator[Progress]:
    """A progress bar on stderr, with one task."""
    from rich.console import Console
    from rich.progress import Progress

    # Nothing where nobody looks: without a terminal rich would leave one stray line.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(description, total=None)
        yield bar


def _following(bar: Progress) -> Callable[[str, float, int], None]:
    task = bar.tasks[0].id

    def show(document: str, done: float, total: int) -> None:
        bar.update(task, description=Path(document).name[-40:], completed=done, total=total)

    return show


def _is_there(data: Path) -> None:
    if not data.is_file():
        raise InvalidSettingError(f"there is no file {data}: --data takes questions, one JSON object a line")


def _counting(bar: Progress) -> Callable[[int, int], None]:
    task = bar.tasks[0].id
    return lambda done, total: bar.update(task, completed=done, total=total)


def _ratios(value: str) -> list[float]:
    with contextlib.suppress(ValueError):
        shares = [float(ratio) for ratio in value.split(",")]
        if all(0.0 <= share <= 1.0 for share in shares):
            return shares
    raise InvalidSettingError(f"--ratios takes numbers from 0 to 1 with commas between; got {value!r}")


def _how_much(ratio: str | None, max_kl: float | None, quality: str | None) -> Any:
    """The recompute ratio that one of these options asks for; None if none does."""
    if sum(option is not None for option in (ratio, max_kl, quality)) > 1:
        raise InvalidSettingError("--ratio, --max-kl and --quality say the same thing in three ways: give one of them")
    if max_kl is not None:
        return MaxKL(max_kl)
    if quality is not None and quality not in QUALITIES:
        raise InvalidSettingError(f"--quality is one of {', '.join(QUALITIES)}; got {quality!r}")
    return _ratio(ratio) if quality is None else quality


def _questions(file: Path) -> list[str]:
    """The questions of a file: a line each, plain or as JSON objects."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        asked = [json.loads(line)["question"] if line.startswith("{") else line for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidSettingError(
            f"{file} cannot be read as questions, one a line, plain or as JSON objects: {type(error).__name__}: {error}"
        ) from error
    if not all(isinstance(question, str) and question.strip() for question in asked):
        raise InvalidSettingError(f"{file} holds questions that are no text")
    return list(dict.fromkeys(asked))


def _ratio(value: str | None) -> float | str | None:
    if value is None or value == "auto":
        return value
    with contextlib.suppress(ValueError):
        if 0.0 <= (number := float(value)) <= 1.0:
            return number
    raise InvalidSettingError(f"--ratio takes a number from 0 to 1, or auto; got {value!r}")


def _at_least_one(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise InvalidSettingError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")


def _bytes(size_limit_gb: float | None) -> int | None:
    if size_limit_gb is None:
        return None
    # More than SQLite can count, and infinity, are no limits; NaN is neither above nor below anything.
    if not math.isfinite(size_limit_gb) or not 1 <= size_limit_gb * 1e9 < 2**63:
        raise InvalidSettingError(f"--size-limit-gb takes a number of gigabytes above 0, not {size_limit_gb}")
    return int(size_limit_gb * 1e9)


def _table(result: dict[str, Any]) -> object:
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


def _bounds_table(result: dict[str, Any]) -> Any:
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


def _levels_table(found: dict[str, Any]) -> Any:
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


def _chat_table(result: dict[str, Any]) -> object:
    from rich.table import Table

    ways: dict[str, dict[str, Any]] = result["ways"]
    caption = ["Means from turn 2 on, and how many times sooner a session is:"]
    for name, way in ways.items():
        caption.append(f"{name}: {way['ttft_s']:.3f} s, {way['session_speedup']:.1f}x. {way['about']}")
    table = Table(title="Time to first token, turn by turn", caption="\n".join(caption), caption_justify="left")
    counts = {"turn": "turn", "prompt_tokens": "prompt", "prefix_tokens": "known", "reused_tokens": "reused"}
    counts |= {"recomputed_tokens": "recomputed", "fresh_tokens": "fresh"}
    for title in (*counts.values(), *(f"{name} s" for name in ways)):
        table.add_column(title, justify="right")
    for turn in result["turns"]:
        table.add_row(*(_cell(turn[name]) for name in counts), *(_cell(turn["ttft_s"][name]) for name in ways))
    return table


def _fidelity_table(result: dict[str, Any]) -> object:
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
