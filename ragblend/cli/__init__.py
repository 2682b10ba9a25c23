"""The command line: ragblend ingest, query, calibrate, stats, verify, bench.

Results go to stdout, everything else (progress, warnings, errors) to stderr. With --json stdout carries exactly one
JSON object, errors included. What imports torch is imported inside the commands that need it, so that --help, --version
and stats answer at once.

With RAGBLEND_DEBUG set, errors nobody expected come with a traceback.

Exit codes: 0 done; 1 an error, explained, or a store that is not well; 2 a wrong option; 3 done, but some files were
skipped; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ragblend import __version__
from ragblend.cli.bench import bench
from ragblend.cli.commands import calibrate, ingest, query, stats, verify
from ragblend.cli.reporting import INTERRUPTED, WRONG_USAGE, as_line, write_anything


class _Commands(TyperGroup):
    """All commands. What is wrong with their options is known before one of them runs, and reported here."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **how: Any) -> Any:
        write_anything()
        args = sys.argv[1:] if args is None else list(args)
        options = args[: args.index("--")] if "--" in args else args
        try:
            return super().main(args, *more, **how)
        except SystemExit as stop:
            if stop.code == WRONG_USAGE and "--json" in options:
                wrong: Any = stop.__context__  # what typer explained on stderr
                typer.echo(as_line({"error": {"type": "UsageError", "message": wrong.format_message()}}))
            raise


app = typer.Typer(
    name="ragblend",
    cls=_Commands,
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


for command in (ingest, query, calibrate, stats, verify):
    app.command()(command)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"ragblend {__version__}")
        raise typer.Exit


def main() -> None:
    """The console script."""
    try:
        app()
    except KeyboardInterrupt:  # outside any command, such as while modules are being imported
        sys.exit(INTERRUPTED)
