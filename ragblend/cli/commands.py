"""The commands that work with documents: ingest, query, calibrate, stats, verify."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ragblend.cli.options import (
    DEFAULT_STORE,
    AsJson,
    MaxKLOption,
    Model,
    QualityOption,
    RatioOption,
    Store,
    at_least_one,
    bytes_of,
    how_much,
    questions_of,
    template_settings_of,
)
from ragblend.cli.reporting import FAILED, SKIPPED, counting, following, interrupted, progress_bar, reporting
from ragblend.cli.tables import levels_table
from ragblend.errors import EmptyPromptError, InvalidSettingError

if TYPE_CHECKING:
    from ragblend.blend.variants import Policy


def ingest(
    # Not Path: that of an empty text is the current folder.
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)],
    store: Store = DEFAULT_STORE,
    model: Model = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of a chunk at most; another number than before splits the documents anew. Default: as before, "
            "300 at first.",
            show_default=False,
        ),
    ] = None,
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
    template_setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable for the model's chat template, such as enable_thinking=false; may be repeated. Default: "
            "as before, none at first.",
            show_default=False,
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Also forget documents at or under these paths whose files are gone.")
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
    with reporting(as_json) as say:
        limit, template_settings = bytes_of(size_limit_gb), template_settings_of(template_setting)
        from ragblend.kb import KnowledgeBase

        with (
            interrupted("what was committed is kept, and the same command goes on from there"),
            KnowledgeBase(
                store,
                model=model,
                embedding_model=embedding_model,
                chunk_tokens=chunk_tokens,
                policy=cast("Policy | None", policy),  # checked there
                size_limit_bytes=limit,
                template_settings=template_settings,
            ) as kb,
            progress_bar("reading") as bar,
        ):
            summary = kb.ingest(paths, prune=prune, progress=following(bar))
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
            raise typer.Exit(SKIPPED)


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
    with reporting(as_json) as say:
        # All that can be refused without a model is refused before torch is imported for one.
        if not question.strip():
            raise EmptyPromptError("the question is empty: ask something")
        at_least_one(top_k=top_k, max_tokens=max_tokens)
        share = how_much(ratio, max_kl, quality)
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
    minutes: Annotated[
        float,
        typer.Option(
            help="No question is begun when they are nearly over. 19 are asked in any case, however long that takes: "
            "nothing could be promised from fewer."
        ),
    ] = 10.0,
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
    with reporting(as_json) as say:
        at_least_one(limit=limit, top_k=top_k)
        if not minutes > 0:
            raise InvalidSettingError(f"--minutes takes a number above 0, not {minutes}")
        asked = None if questions is None else questions_of(questions)
        from ragblend.kb import KnowledgeBase

        with KnowledgeBase(store, model=model, create=False) as kb:
            kb.as_retriever(top_k)
            from ragblend.evaluation.calibrate import NEEDED, calibrate_documents

            with (
                interrupted(
                    "nothing was changed: what was calibrated before still is. --minutes makes it shorter, down to the "
                    f"time that {NEEDED} questions take"
                ),
                progress_bar("calibrating") as bar,
            ):
                found = calibrate_documents(
                    kb, asked, limit=limit, top_k=top_k, minutes=minutes, progress=following(bar)
                )
        say(found, None if as_json else levels_table(found))


def stats(store: Store = DEFAULT_STORE, model: Model = None, as_json: AsJson = False) -> None:
    """Count documents, chunks, tokens and bytes. Loads no model (--model is accepted for symmetry)."""
    with reporting(as_json) as say:
        from ragblend.kb import KnowledgeBase

        with KnowledgeBase(store, model=model, create=False) as kb:
            counts = asdict(kb.stats())
        width = max(map(len, counts))
        lines = [f"{name:<{width}}  {value}" for name, value in counts.items() if name != "calibrations"]
        for found in counts["calibrations"]:
            try:
                levels = ", ".join(f"{name} {level['ratio']:.2f}" for name, level in found["levels"].items())
                lines += [
                    f"{'calibrated':<{width}}  {found['model']} ({found['dtype']}), policy {found['policy']}",
                    f"{'':<{width}}  mean ratios: {levels}",
                    f"{'':<{width}}  {found['questions']} questions ({found['source']}), {found['made']}",
                ]
            except (AttributeError, KeyError, TypeError, ValueError):
                lines.append(f"{'calibrated':<{width}}  unreadable: calibrate again")
        say(counts, "\n".join(lines))


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
    with reporting(as_json) as say:
        from ragblend.kb import KnowledgeBase

        with KnowledgeBase(store, model=model, create=False) as kb, progress_bar("verifying") as bar:
            found = kb.verify(repair=repair, progress=counting(bar))
        problems = [f"bad payload {key[:16]}: {reason}" for key, reason in found.kv.bad]
        problems += [f"missing payload {key[:16]}: a chunk of the index refers to it" for key in found.missing]
        problems += [f"file of no chunk: {name}" for name in found.kv.orphans]
        problems += [f"index: {text}" for text in (*found.kv.index_problems, *found.index_problems)]
        for problem in problems:
            typer.echo(problem, err=True)
        outcome = f"{found.kv.checked} payloads checked, {len(problems)} problems, {found.kv.deleted} deleted"
        say({**found.as_dict(), "repaired": repair}, outcome)
        if not found.ok:
            raise typer.Exit(FAILED)
