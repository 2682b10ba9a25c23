"""A prompt as token ids, and which of them are reusable chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ragblend.errors import EmptyPromptError, InvalidSettingError
from ragblend.prompt.chunk import Chunk, Message, joined_parts
from ragblend.prompt.match import ChunkIndex, TextsOf
from ragblend.prompt.template import PromptTokenizer, Segment

Prompt: TypeAlias = str | Sequence[str | Chunk | Message]
"""A string, or a mix of strings and Chunks, is one user message; a conversation is Messages only. (One sequence type
rather than two, so that type checkers understand a list that is written in place.)"""

MIN_CUT_TOKENS = 16
"""A cut chunk of fewer tokens is text like any other."""

_FORMS = "a prompt is a string, a sequence of strings and Chunks, or a sequence of Messages"


@dataclass(frozen=True)
class Span:
    """Tokens start .. stop - 1 of a prompt (half-open, absolute positions).

    text: computed fresh: template, glue, question. chunk: one chunk, whose text is kept.
    whole: of a cut chunk, all ids of the chunk, by which it is stored; they begin with the span's. Of others, ().
    """

    kind: Literal["text", "chunk"]
    start: int
    stop: int
    text: str | None = None
    whole: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Layout:
    """A prompt's ids and the spans they fall into.

    Attributes:
        ids: [tokens] int64; not to be written to.
        spans: in order, each non-empty, the first from 0, each from where the one before stops, the last to the end.
            No two text spans touch; two chunk spans may.

    Raises:
        InvalidSettingError: the spans do not cover the ids exactly.
    """

    ids: npt.NDArray[np.int64]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        position = 0
        for span in self.spans:
            if span.start != position or span.stop <= span.start:
                raise InvalidSettingError(f"span {span.start}..{span.stop} does not go on from token {position}")
            position = span.stop
        if self.ids.ndim != 1 or self.ids.dtype != np.int64 or position != len(self.ids):
            raise InvalidSettingError(
                f"the spans cover {position} tokens, the ids are {self.ids.dtype}{self.ids.shape}"
            )

    @property
    def chunks(self) -> tuple[Span, ...]:
        """The chunk spans, in order; a chunk that stands there twice is two spans."""
        return tuple(span for span in self.spans if span.kind == "chunk")

    @property
    def question(self) -> tuple[int, int]:
        """Half-open token range after the last chunk: all tokens if there is no chunk, empty if a chunk comes last."""
        return max((span.stop for span in self.chunks), default=0), len(self.ids)

    def ids_of(self, span: Span) -> npt.NDArray[np.int64]:
        """[span tokens] int64."""
        return self.ids[span.start : span.stop]


def lay_out(
    tokenizer: PromptTokenizer,
    prompt: Prompt,
    index: ChunkIndex | None = None,
    texts_of: TextsOf | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    begin: str = "",
) -> Layout:
    """The prompt's ids, cut into spans: chunks that are marked, and chunks that the index knows by their text.

    A chunk's ids are the same in every prompt. Marked Chunks are taken as they are; the index searches plain text only,
    in messages of every role and in the texts of tools, for whole texts and, where `texts_of` gives those that may be
    cut, in messages for their beginnings. Of a cut chunk, those tokens are taken that are the chunk's; what its last
    ones became by the cut is text. A known text that the prompt ends in is not taken: it is what the prompt asks, if
    that is no tool's result. Chunks without any tokens are left out.

    Args:
        tools: definitions of tools that the answer may call.
        begin: what the answer begins with, as `PromptTokenizer.begin_call` gives it.

    Raises:
        EmptyPromptError: there is nothing but white space in the prompt.
        InvalidSettingError: the prompt has another type, the chat template refuses its roles, or it takes no tools.
        UnsupportedModelError: the model's chat template is broken.
    """
    given = _messages(prompt)
    messages = [_searched(message, index, texts_of, last=message is given[-1]) for message in given]
    if not any(_text_of(part).strip() for message in messages for part in message.content):
        raise EmptyPromptError("the prompt holds no text: give a question, with or without chunks")
    ids: list[int] = []
    spans: list[Span] = []
    split = None if index is None else index.split
    for segment in tokenizer.render(messages, tools=tools, begin=begin, split=split):
        start = len(ids)
        ids += tokenizer.encode(segment)
        if len(ids) == start:
            continue
        if segment.kind == "chunk":
            whole = () if segment.whole is None else tuple(tokenizer.encode(Segment("chunk", segment.whole)))
            stop = start + _agreement(ids[start:], whole) if whole else len(ids)
            if not whole or stop - start >= MIN_CUT_TOKENS:
                spans.append(Span("chunk", start, stop, segment.text, whole))
                start = stop
        if start < len(ids):
            if spans and spans[-1].kind == "text":
                start = spans.pop().start
            spans.append(Span("text", start, len(ids)))
    return Layout(np.array(ids, dtype=np.int64), tuple(spans))


def _agreement(some: Sequence[int], others: Sequence[int]) -> int:
    """How many ids are the same from the first one on."""
    shorter = min(len(some), len(others))
    return next((n for n in range(shorter) if some[n] != others[n]), shorter)


def _messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidSettingError(f"{_FORMS}; this is {type(prompt).__name__}")
    messages: list[Message] = []
    parts: list[str | Chunk] = []
    for item in prompt:
        if isinstance(item, Message):
            messages.append(item)
        elif isinstance(item, (str, Chunk)):
            parts.append(item)
        else:
            raise InvalidSettingError(f"{_FORMS}; this one holds {type(item).__name__}")
    if messages and parts:
        raise InvalidSettingError(f"{_FORMS}; this one mixes Messages with bare text: put the text into a Message")
    return messages or [Message("user", parts)]


def _searched(message: Message, index: ChunkIndex | None, texts_of: TextsOf | None, *, last: bool) -> Message:
    # Joined first: a chunk's text may run over the border of two strings.
    parts = joined_parts(piece for part in message.content for piece in _bare(part))
    if index is None:
        return replace(message, content=tuple(parts))
    found: list[str | Chunk] = []
    for place, part in enumerate(parts, 1):
        pieces: list[str | Chunk] = index.split(part, texts_of) if isinstance(part, str) else [part]
        if last and message.asks and place == len(parts) and isinstance(part, str):
            # What a prompt ends in is what it asks, and stays fresh even where a document asks the same.
            end = len(pieces) - 1
            while end > 0 and not _text_of(pieces[end]).strip():
                end -= 1
            pieces[end:] = ["".join(_text_of(piece) for piece in pieces[end:])]
        found += pieces
    return replace(message, content=tuple(found))


def _bare(part: str | Chunk) -> list[str | Chunk]:
    """A chunk without its outer white space, which is glue: chunks are stored without, and it must not hide them."""
    if isinstance(part, str) or part.text == (bare := part.text.strip()):
        return [part]
    if not bare:
        return [part.text]
    start = part.text.index(bare)
    return [part.text[:start], Chunk(bare), part.text[start + len(bare) :]]


def _text_of(part: str | Chunk) -> str:
    return part.text if isinstance(part, Chunk) else part
