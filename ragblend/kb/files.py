"""Paths to documents: which files there are, and their text, through LlamaIndex's readers.

Markdown and every other text file, CSV too, are read as they are. HTML loses its tags, PDF is read page by page. What a
reader cannot make text of is skipped, with a reason a person can act on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import mimetypes
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragblend.errors import IngestError, InvalidSettingError

if TYPE_CHECKING:
    from llama_index.core.readers.base import BaseReader

# Files that are binary and have a reader all the same. Any other one with a zero byte in its beginning is no text.
_BINARY_DOCUMENTS = {".pdf", ".docx", ".pptx", ".ppt", ".pptm", ".epub", ".hwp", ".xls", ".xlsx"}
_HTML_HEADINGS = ["h1", "h2", "h3", "h4", "h5", "h6"]
_HTML_BLOCKS = [
    *_HTML_HEADINGS,
    *("address", "article", "aside", "blockquote", "br", "caption", "center", "dd", "details", "dialog", "dir", "div"),
    *("dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hgroup", "hr", "legend", "li"),
    *("listing", "main", "menu", "nav", "ol", "optgroup", "option", "p", "pre", "search", "section", "select"),
    *("summary", "table", "textarea", "tr", "ul", "xmp"),
]
_HTML_VERBATIM = ["pre", "textarea"]
# Stand before a heading of HTML, with its level, until the text is final and offsets can be told, and before lines that
# are left as they are. No characters: HTML that holds one nevertheless is given U+FFFD for it, and text of other kinds
# is not looked through for any.
_MARK, _VERBATIM = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_MARK}{_VERBATIM}]")
_HEADINGS = "html_headings"  # under which the reader gives them, beside the text
_MARKED = re.compile(f"^{_MARK}([1-6])", re.MULTILINE)
_BLANK_LINES = re.compile(r"\A(?:\s*\n)?")  # those that a text begins with


class Skipped(NamedTuple):
    """A file that was not ingested, and why."""

    path: str
    reason: str


class Part(NamedTuple):
    """A run of a document's text.

    metadata: where in the document it stands, such as a page label.
    headings: (offset, level) of headings that do not show in the text itself.
    """

    text: str
    metadata: dict[str, str]
    headings: tuple[tuple[int, int], ...] = ()


def readable(text: str) -> str:
    """The text without lone surrogates, which nothing can encode: they become U+FFFD, as for the tokenizer.

    Raises:
        InvalidSettingError: it is no text.
    """
    if not isinstance(text, str):
        raise InvalidSettingError(f"a text is wanted, and this is {type(text).__name__}: {text!r:.80}")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def printable(name: str) -> str:
    """A file's name that can be stored and printed: bytes that are no UTF-8 are written out, so names stay distinct."""
    return name.encode("utf-8", "backslashreplace").decode()


class UnreadableError(Exception):
    """This file cannot be looked into now; its message says why."""


class NoTextError(UnreadableError):
    """What this file holds now is no text we can get at."""


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A file or folder, or several."""


def absolute(paths: Paths) -> list[Path]:
    """The paths, each absolute and without "~".

    Raises:
        IngestError: something is not a path.
    """
    try:
        several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if "" in several:  # to Python the current folder; to whoever wrote it a variable that was not set
            raise IngestError("a path is empty: for the current folder give '.'")
        return [Path(os.path.abspath(Path(path).expanduser())) for path in several]
    except TypeError as error:
        raise IngestError(f"paths are texts or Path objects, one or a list of them, not {paths!r:.80}") from error


def within(name: str, places: Set[Path]) -> bool:
    """Whether a document lies at or under one of the places."""
    path = Path(name)
    return not places.isdisjoint((path, *path.parents))


def find_files(
    paths: Paths, *, exclude: Path | None = None, known: Iterable[str] | None = None
) -> tuple[list[Path], list[Skipped]]:
    """All files under the paths, each once, in a stable order.

    Hidden files and folders, and links to folders, only where they are named themselves.

    Args:
        exclude: a folder that is left out: a store is no document.
        known: names of documents that may be gone. A path at which or under which there was one need not exist, and
            finding nothing is fine.

    Raises:
        IngestError: something is not a path, a path does not exist, or there is no file at all.
    """
    roots = absolute(paths)
    missing = [root for root in roots if not _exists(root)]
    never = [root for root in missing if not any(within(name, {Path(printable(str(root)))}) for name in known or ())]
    if never:
        raise IngestError(f"there is no file or folder {', '.join(map(str, never))}: check the spelling")
    files: dict[Path, None] = {}
    skipped: list[Skipped] = []
    for root in roots:
        if root not in missing:
            files |= dict.fromkeys(_walk(root, exclude, skipped) if os.path.isdir(root) else [root])
    if not files and not skipped and known is None:
        raise IngestError(f"nothing to ingest: there are no files in {', '.join(map(str, roots)) or 'no paths'}")
    return list(files), skipped


def _exists(path: Path) -> bool:
    """Whether there is something, for all we know."""
    try:
        os.lstat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _walk(root: Path, exclude: Path | None, skipped: list[Skipped]) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        skipped.append(Skipped(printable(str(error.filename)), error.strerror or str(error)))

    for folder, names, files in os.walk(root, onerror=refused):
        names[:] = sorted(n for n in names if not n.startswith(".") and Path(folder, n) != exclude)
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def content_digest(path: Path) -> str:
    """Digest of a file's bytes and of the way its kind is read.

    Raises:
        NoTextError: empty, or binary.
        UnreadableError: not a file that can be read.
    """
    try:
        # Asked before opening: opening a pipe would wait for somebody to write into it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableError("not a regular file")
        digest = hashlib.blake2b(os.fsencode(path.suffix.lower()), digest_size=20)
        with path.open("rb") as file:
            block = file.read(1 << 20)
            if b"\0" in block[:65536] and path.suffix.lower() not in _BINARY_DOCUMENTS:
                raise NoTextError("not a text file")
            if not block.strip():
                raise NoTextError("empty")
            while block:
                digest.update(block)
                block = file.read(1 << 20)
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    return digest.hexdigest()


def read_file(path: Path) -> list[Part]:
    """A file's text.

    Raises:
        NoTextError: binary, damaged, empty, or of a kind whose reader is not installed.
        UnreadableError: the system does not let us read it.
    """
    from llama_index.core import SimpleDirectoryReader

    kind = mimetypes.guess_type(path.name)[0] or ""
    if kind.startswith(("image/", "audio/", "video/")) and kind != "image/svg+xml":
        raise NoTextError(f"a file of kind {kind} holds no text")
    html, plain = _html_reader(), _plain_reader()
    try:
        with _quiet():
            _import_readers()
            documents = SimpleDirectoryReader.load_file(
                path,
                file_metadata=lambda _: {},
                file_extractor={".html": html, ".htm": html, ".xhtml": html, ".csv": plain},
                encoding="utf-8-sig",
                errors="strict",
                raise_on_error=True,
            )
    except Exception as error:
        cause = _cause(error)
        raise (UnreadableError if isinstance(cause, OSError) else NoTextError)(_why(cause)) from error
    parts: list[Part] = []
    for document in documents:
        if text := document.text.strip():
            page = {"page": document.metadata["page_label"]} if "page_label" in document.metadata else {}
            parts.append(Part(text, page, document.metadata.get(_HEADINGS, ())))
    if not parts:
        raise NoTextError("no text in it")
    if any("\0" in part.text for part in parts):
        raise NoTextError("not a text file")
    return parts


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The readers' own libraries warn about what they repair in damaged files; the text is what counts.

    The one for PDF does so by logging, many lines a file. Whoever has set its level wants to see them.
    """
    pdf = logging.getLogger("pypdf")
    chosen = pdf.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pdf.setLevel(chosen or logging.ERROR)
        try:
            yield
        finally:
            pdf.setLevel(chosen)


def _import_readers() -> None:
    """Import LlamaIndex's readers, and leave logging as it is.

    One of them sets it up when it is imported, to everybody's INFO messages on stderr, unless somebody has done so
    before. That is for the program to choose, and it may not have chosen yet.
    """
    root, somebody = logging.getLogger(), logging.NullHandler()
    root.addHandler(somebody)
    try:
        importlib.import_module("llama_index.readers.file")
    finally:
        root.removeHandler(somebody)


def _cause(error: BaseException) -> BaseException:
    """The first cause: readers wrap it in errors of their own, and retries in theirs."""
    while True:
        attempt = getattr(error, "last_attempt", None)
        inner = (attempt.exception() if attempt is not None else None) or error.__cause__
        if inner is None:
            return error
        error = inner


def _why(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, UnicodeDecodeError):
        return "not a text file (not UTF-8)"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _plain_reader() -> BaseReader:
    """LlamaIndex's own CSV reader leaves out the names of the columns, and writes 0471 as 471.0 and nothing as nan."""
    from llama_index.core.readers.base import BaseReader
    from llama_index.core.schema import Document

    class PlainTextReader(BaseReader):
        def load_data(self, file: Path, extra_info: dict[str, Any] | None = None) -> list[Document]:
            return [Document(text=Path(file).read_bytes().decode("utf-8-sig"), metadata=extra_info or {})]

    return PlainTextReader()


def _html_reader() -> BaseReader:
    """LlamaIndex's own HTML reader takes one kind of tag, and what stands in it of scripts too; this one the text."""
    from bs4 import BeautifulSoup
    from llama_index.core.readers.base import BaseReader
    from llama_index.core.schema import Document

    class HtmlTextReader(BaseReader):
        def load_data(self, file: Path, extra_info: dict[str, Any] | None = None) -> list[Document]:
            soup = BeautifulSoup(Path(file).read_bytes(), "html.parser")
            # Not the whole head: where its end is left out, as HTML allows, this parser puts the body into it.
            for tag in [*soup(["script", "style", "template", "noscript"]), *soup.select("head > title")]:
                tag.decompose()
            for string in soup.find_all(string=_MARKS):
                string.replace_with(type(string)(_MARKS.sub("\ufffd", string)))  # a comment stays one
            for tag in soup(["td", "th"]):
                tag.insert_before(" ")  # not after: a cell whose end is left out holds the next ones, to this parser
            for tag in soup(_HTML_HEADINGS):
                if tag.get_text(strip=True):
                    tag.insert(0, f"{_MARK}{tag.name[1]}")
            for tag in soup(_HTML_BLOCKS):
                tag.insert_before("\n")
                tag.insert_after("\n")
            for tag in soup(_HTML_VERBATIM):
                lines = _BLANK_LINES.sub("", tag.get_text()).rstrip().splitlines()
                tag.string = "\n".join(_VERBATIM + line for line in lines)
            text, headings = _unmarked(_tidy(soup.get_text().splitlines()).strip())
            return [Document(text=text, metadata={**(extra_info or {}), _HEADINGS: headings})]

    return HtmlTextReader()


def _unmarked(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text without marks of headings, and the headings: (offset, level)."""
    pieces = _MARKED.split(text)  # text, level, text, level, text ...
    bare, headings = pieces[0], []
    for level, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        headings.append((len(bare), int(level)))
        bare += piece.lstrip(" ")
    return bare, tuple(headings)


def _tidy(lines: Iterable[str]) -> str:
    """Lines without outer white space, and runs of empty ones as one, so that paragraphs stay paragraphs.

    Lines that are marked to be left as they are lose their mark only, and the white space at their ends.
    """
    tidy: list[str] = []
    for line in lines:
        bare = line.strip()
        if bare.startswith(_VERBATIM):
            tidy.append(bare.removeprefix(_VERBATIM))
        elif bare or (tidy and tidy[-1]):
            tidy.append(bare)
    return "\n".join(tidy)
