"""Chunk borders at natural places.

A text is cut at its coarsest borders first, and again inside every part that is still too long: headings by their
level, then paragraphs, list items and table rows; code, and files with a record a line, before what stands furthest to
the left behind a blank line, then at other blank lines, then anywhere between lines. What has no border inside goes
through LlamaIndex's SentenceSplitter. Then neighbours are put together again where the parts are small. So

- every chunk is a piece of its text, in order, and together they are all of it;
- no chunk has more than `chunk_tokens` tokens;
- a heading stays with what follows it;
- the same text gives the same chunks.

LlamaIndex's own structure parsers do less: MarkdownNodeParser makes a node of every section, however small or large,
and knows `#` headings only; HTMLNodeParser drops text outside the tags it is told; CodeSplitter needs a grammar for
each language, and counts characters.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ragblend.kb.files import Part

SPLITTING_VERSION = 5
"""Raised when the same file is read or split in another way: documents are then split anew at the next ingest."""

# Ranks of borders; headings have their level, from 1.
_PARAGRAPH, _ITEM, _TOP, _BLANK, _LINE = 10, 11, 20, 21, 22

_LINES = {
    *(".csv", ".log", ".tsv"),  # records, the others are code
    *(".bash", ".c", ".cc", ".clj", ".cpp", ".cs", ".css", ".dart", ".ex", ".exs", ".go", ".h", ".hpp", ".hs", ".java"),
    *(".jl", ".js", ".json", ".jsonl", ".jsx", ".kt", ".lua", ".m", ".ml", ".php", ".pl", ".ps1", ".proto", ".py"),
    *(".pyi", ".r", ".rb", ".rs", ".scala", ".scss", ".sh", ".sql", ".swift", ".tf", ".toml", ".ts", ".tsx", ".vue"),
    *(".xml", ".yaml", ".yml", ".zig"),
}
_BEGINNING_CHARS = 16  # for each token of a chunk: words have fewer for one, runs of white space more
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+\S")
_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_UNDERLINED = {"=": 1, "-": 2}
_HEADING_LINES = re.compile(r"[^\n]*\n(?:[^\w\s][^\w\n]*\n)?")
_LIST_ITEM = re.compile(r"\s*([-*+]|\d{1,3}[.)])\s|\|")


class _Border(NamedTuple):
    """A place to cut: before character `at`. rank: the smaller, the sooner. heading: whether a heading begins there."""

    at: int
    rank: int
    heading: bool = False


class Splitter:
    """Splits texts into chunks of at most `chunk_tokens` tokens, as `encode` counts them."""

    def __init__(self, encode: Callable[[str], list[int]], chunk_tokens: int) -> None:
        self._encoded = lru_cache(maxsize=4096)(lambda text: len(encode(text)))
        self._chunk_tokens = chunk_tokens

    def split(self, parts: Iterable[Part], suffix: str = "") -> list[Part]:
        """The chunks of a document, none of them empty. suffix: of its file, which tells what is lines from prose."""
        chunks: list[Part] = []
        for part in parts:
            text = part.text
            borders = code_borders(text) if suffix.lower() in _LINES else prose_borders(text, part.headings)
            spans = self._spans(text, 0, len(text), borders)
            chunks += (Part(text[start:stop].strip(), part.metadata) for start, stop in spans)
        return [chunk for chunk in chunks if chunk.text]

    def _count(self, text: str) -> int:
        """Tokens of a text; of one that is far too long for a chunk, of its beginning, if that is, too.

        Encoding a whole book would take a hundred times its size in memory.
        """
        chars = _BEGINNING_CHARS * self._chunk_tokens
        while chars < len(text):
            # Twice as many as fit: where the beginning is cut off there may be some that the whole has not.
            if (tokens := self._encoded(text[:chars])) >= 2 * self._chunk_tokens:
                return tokens
            chars *= 4
        return self._encoded(text)

    def _fits(self, text: str, start: int, stop: int) -> bool:
        return self._count(text[start:stop].strip()) <= self._chunk_tokens

    def _spans(self, text: str, start: int, stop: int, borders: Sequence[_Border]) -> list[tuple[int, int]]:
        """Half-open character ranges from start to stop that follow on each other, each short enough."""
        if self._fits(text, start, stop):
            return [(start, stop)]
        inside = [border for border in borders if start < border.at < stop]
        if not inside:
            return self._sentences(text, start, stop, any(b.heading and b.at == start for b in borders))
        rank = min(border.rank for border in inside)
        cuts = [start, *(border.at for border in inside if border.rank == rank), stop]
        spans: list[tuple[int, int]] = []
        for left, right in pairwise(cuts):
            first, last = (bisect_left(borders, place, key=lambda border: border.at) for place in (left, right))
            spans += self._spans(text, left, right, borders[first:last])
        # Sections are kept apart unless they are small; what is smaller than a section fills chunks.
        return self._joined(text, spans, self._chunk_tokens if rank >= _PARAGRAPH else self._chunk_tokens // 2)

    def _joined(self, text: str, spans: list[tuple[int, int]], small: int) -> list[tuple[int, int]]:
        """Neighbours of which one is under `small` tokens put together, where the whole is short enough."""
        joined: list[tuple[int, int]] = []
        for start, stop in spans:
            if joined and self._fits(text, joined[-1][0], stop):
                sizes = (self._count(text[left:right].strip()) for left, right in (joined[-1], (start, stop)))
                if min(sizes) < small:
                    joined[-1] = (joined[-1][0], stop)
                    continue
            joined.append((start, stop))
        return joined

    def _sentences(self, text: str, start: int, stop: int, heading: bool) -> list[tuple[int, int]]:
        """Cut where there are no borders: between sentences, and between words where a sentence is too long."""
        from llama_index.core.node_parser import SentenceSplitter

        body = start
        if heading and (lines := _HEADING_LINES.match(text, start, stop)):  # it goes to the first piece
            body = lines.end()
        room = self._chunk_tokens - self._count(text[start:body].strip())
        if room < self._chunk_tokens // 2:
            body, room = start, self._chunk_tokens
        while True:
            # No overlap: sentences are kept whole as it is, and every token that is in two chunks is prefilled and
            # stored twice.
            splitter = SentenceSplitter(
                chunk_size=room,
                chunk_overlap=0,
                paragraph_separator="\n\n",
                tokenizer=lambda text: [0] * self._count(text),  # it only asks how many
            )
            cuts, at = [start], body
            for piece in splitter.split_text(text[body:stop])[:-1]:
                at = text.index(piece, at) + len(piece)
                cuts.append(at)
            spans = list(pairwise([*cuts, stop]))
            # A piece can have more tokens than its sentences had: tokens run over their ends.
            if room == 1 or all(self._fits(text, left, right) for left, right in spans):
                return spans
            room = max(1, room * 7 // 8)


def prose_borders(text: str, headings: Iterable[tuple[int, int]] = ()) -> list[_Border]:
    """Where prose can be cut, ascending: headings (Markdown's, reStructuredText's), paragraphs, list items, code lines.

    Args:
        headings: (offset, level) of headings that the text itself does not show, as in HTML.
    """
    given = dict(headings)
    borders: list[_Border] = []
    fence = ""
    blank = after_heading = underlines = False
    lines = text.splitlines(keepends=True)
    at = 0
    for n, (line, following) in enumerate(zip(lines, [*lines, ""][1:], strict=True)):
        bare = line.strip()
        opened = None if underlines else _FENCE.match(line)
        level = shown = 0
        if fence:
            if bare.startswith(fence) and not bare.strip(fence[0]):
                fence = ""
            if bare:
                borders.append(_Border(at, _BLANK if blank else _LINE))
        elif not underlines:
            shown = _shown_level(line)
            level = shown or given.get(at) or (_underlined_level(line, following.rstrip()) if blank or n == 0 else 0)
            # A heading right below another one, such as a title's subtitle, stays with it.
            if not after_heading:
                if level:
                    borders.append(_Border(at, level, heading=True))
                elif bare and blank:
                    borders.append(_Border(at, _PARAGRAPH))
                elif bare and _LIST_ITEM.match(line):
                    borders.append(_Border(at, _ITEM))
            if opened:
                fence = opened.group(1)
        if bare:
            after_heading = bool(level) or underlines
            underlines = bool(level) and not shown and at not in given
        blank = not bare
        at += len(line)
    return borders


def code_borders(text: str) -> list[_Border]:
    """Where code can be cut, ascending: before each line that is not blank."""
    borders: list[_Border] = []
    blank = False
    at = 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            if at:
                left = not line[0].isspace() and line[0] not in ")]}"
                borders.append(_Border(at, (_TOP if left else _BLANK) if blank else _LINE))
            blank = False
        else:
            blank = True
        at += len(line)
    return borders


def _shown_level(line: str) -> int:
    found = _HEADING.match(line)
    return len(found.group(1)) if found else 0


def _underlined_level(line: str, following: str) -> int:
    underline = _UNDERLINE.match(following)
    bare = line.rstrip()
    if not underline or not bare or not bare[0].isalnum() or len(following) < len(bare) // 2:
        return 0
    return _UNDERLINED.get(underline.group(1), 3)
