"""How commands report: results on stdout, everything else on stderr; errors become a message and an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ragblend.errors import RagBlendError

if TYPE_CHECKING:
    from rich.progress import Progress


SKIPPED, FAILED, WRONG_USAGE, INTERRUPTED = 3, 1, 2, 130
Say = Callable[[dict[str, Any], object], None]


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[Say]:
    """Run a command's work; `say` gives its result, as JSON or for people. Errors become a message and an exit code.

    A KeyboardInterrupt may carry what is to be said of it.
    """
    stdout = sys.stdout
    said = False

    def say(result: dict[str, Any], for_people: object) -> None:
        nonlocal said
        if as_json:
            if not said:
                said = True  # before it is: where that fails or is interrupted, no second object follows
                print(as_line(result), file=stdout, flush=True)
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

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Model loaders draw bars of their own across ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Libraries print now and then; with --json that must not get between the reader and the object.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            yield say
        except RagBlendError as error:
            raise fail(type(error).__name__, str(error), FAILED) from None
        except KeyboardInterrupt as interrupt:
            raise fail("KeyboardInterrupt", str(interrupt) or "interrupted", INTERRUPTED) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):  # typer knows what to do
            raise
        except Exception as error:
            if os.environ.get("RAGBLEND_DEBUG"):
                traceback.print_exc(file=sys.stderr)
            message = f"{type(error).__name__}: {error} (set RAGBLEND_DEBUG=1 for a traceback)"
            raise fail(type(error).__name__, message, FAILED) from None


def write_anything() -> None:
    """Help, file names and documents hold what a terminal's encoding, or any, cannot write: that is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def as_line(result: dict[str, Any]) -> str:
    """One line of JSON, which knows neither NaN nor infinity: they are null, as an end that an interval lacks."""
    return json.dumps(_finite(result), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def interrupted(message: str) -> Iterator[None]:
    """Say this where Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {message}") from None


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """A progress bar on stderr, with one task."""
    from rich.console import Console
    from rich.progress import Progress

    # Nothing where nobody looks: without a terminal rich would leave one stray line.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(description, total=None)
        yield bar


def following(bar: Progress) -> Callable[[str, float, int], None]:
    """A progress function of (what is worked on, steps done, steps in all) that moves the bar and names the work."""
    task = bar.tasks[0].id

    def show(document: str, done: float, total: int) -> None:
        bar.update(task, description=Path(document).name[-40:], completed=done, total=total)

    return show


def counting(bar: Progress) -> Callable[[int, int], None]:
    """A progress function of (steps done, steps in all) that moves the bar."""
    task = bar.tasks[0].id
    return lambda done, total: bar.update(task, completed=done, total=total)
