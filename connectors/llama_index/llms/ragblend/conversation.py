"""What LlamaIndex sends, as the engine's messages: roles, blocks of text, and where a chunk begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from llama_index.core.agent.react.types import ObservationReasoningStep
from llama_index.core.base.llms.generic_utils import messages_to_prompt as core_messages_to_prompt
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitationBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import MessagesToPromptType
from llama_index.llms.ragblend.tools import calls_of

from ragblend.errors import InvalidSettingError
from ragblend.prompt.chunk import Chunk, Message
from ragblend.prompt.template import MESSAGE_SEPARATOR

CHUNKS = "ragblend_chunks"
"""Key of a ChatMessage's additional_kwargs: half-open [start, stop) character ranges of its content that are chunks.

The content itself stays what it would be without, so that callbacks and token counters see what the model reads.
"""

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
_OBSERVATION = ObservationReasoningStep(observation="").get_content()
# What other LLMs leave beside their text: core's rendering of a message leaves out what they thought and which sources
# they name, and so do we.
_TAKEN = (TextBlock, CachePoint, ToolCallBlock, ThinkingBlock, CitationBlock)
_BETWEEN_BLOCKS = "\n"  # what core puts there when it reads a message's content


def conversation(
    messages: Iterable[ChatMessage],
    messages_to_prompt: MessagesToPromptType | None = None,
    known: Callable[[str], Sequence[tuple[int, int]]] = lambda text: (),
) -> list[Message]:
    """The messages as the engine takes them.

    A CachePoint ends a segment: the text between it and the one before (or the message's beginning) is a chunk of its
    own, so that no chunk is found across it. Where known chunks make up most of it, they are taken instead: what a
    retriever finds comes in another selection each time, and all of it together never again. The last text of a
    conversation is what it asks, and is none.

    Thoughts and citations in the messages of other LLMs are left out, as core does where it makes text of a message.

    System messages that begin the conversation are one.

    Args:
        messages_to_prompt: makes one text of them; core's own stands for the model's template, as None does. Messages
            with marked chunks are not put through it: whoever marked them has formatted them.
        known: gives the half-open character ranges of known chunks in a text.

    Raises:
        InvalidSettingError: a block holds what is no text (an image, a document), or chunk ranges are not ranges of the
            message's text in order.
    """
    given = list(messages)
    for message in given:
        for block in message.blocks:
            if not isinstance(block, _TAKEN):
                raise InvalidSettingError(
                    f"RagBlendLLM reads text, and this message holds a {type(block).__name__}: send its text instead"
                )
    if not any(CHUNKS in message.additional_kwargs for message in given):
        given = flattened(given, messages_to_prompt)
    taken: list[Message] = []
    for message in given:
        role = _ROLES.get(message.role, message.role.value)
        parts = _parts(message, known, last=message is given[-1])
        if role == "system" and len(taken) == 1 and taken[0].role == role:
            # Core puts an LLM's system prompt before that of a template, and many models' templates take one only.
            taken[0] = Message(role, (*taken[0].content, MESSAGE_SEPARATOR, *parts))
        else:
            result_of = message.additional_kwargs.get("tool_call_id") if role == "tool" else None
            observed = bool(taken) and taken[-1].role == "assistant" and _is_observation(message)
            asks = False if observed else None
            taken.append(Message(role, parts, calls_of(message), str(result_of or ""), asks=asks))
    return taken


def _is_observation(message: ChatMessage) -> bool:
    """Whether it is what core's ReAct agents send as a user's turn where it is a tool's: its result."""
    return message.role == MessageRole.USER and (message.content or "").startswith(_OBSERVATION)


def flattened(messages: list[ChatMessage], messages_to_prompt: MessagesToPromptType | None) -> list[ChatMessage]:
    """The messages as one, if there is a function of the user's to make a text of them."""
    if messages_to_prompt in (None, core_messages_to_prompt):
        return messages
    return [ChatMessage(role=MessageRole.USER, content=messages_to_prompt(messages))]


def joined_contexts(prompt_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a prompt template in which a list of contexts is one text, joined as core's `compact` joins it.

    Core's SimpleSummarize passes a list, and a template would show its repr, quotes and escapes and all.
    """
    return {
        name: "\n\n".join(text.strip() for text in value if text.strip())
        if name == "context_str" and isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
        else value
        for name, value in prompt_args.items()
    }


def cut(text: str, ranges: Sequence[Sequence[int]]) -> list[str | Chunk]:
    """The text in parts; those in the half-open character ranges are chunks.

    Raises:
        InvalidSettingError: the ranges are not in order, overlap or lie outside.
    """
    borders = [0, *(int(border) for start_stop in ranges for border in start_stop), len(text)]
    if any(len(start_stop) != 2 for start_stop in ranges) or borders != sorted(borders):
        raise InvalidSettingError(f"chunk ranges are (start, stop) pairs in order within {len(text)}; got {ranges!r}")
    parts: list[str | Chunk] = []
    for n, (start, stop) in enumerate(pairwise(borders)):
        if start < stop:
            parts.append(Chunk(text[start:stop]) if n % 2 else text[start:stop])
    return parts


def _parts(message: ChatMessage, known: Callable[[str], Sequence[tuple[int, int]]], *, last: bool) -> list[str | Chunk]:
    content = message.content or ""
    if ranges := message.additional_kwargs.get(CHUNKS):
        return cut(content, ranges)
    chunks: list[tuple[int, int]] = []
    for start, stop in _segments(message, last=last):
        inside = [(start + first, start + end) for first, end in known(content[start:stop])]
        most = 2 * sum(end - first for first, end in inside) > stop - start
        chunks += inside if most else [(start, stop)]
    return cut(content, chunks)


def _segments(message: ChatMessage, *, last: bool) -> list[tuple[int, int]]:
    """Character ranges of the content that CachePoints end."""
    ranges: list[tuple[int, int]] = []
    start = stop = at = 0  # of the segment under way; where the next block of text begins
    for block in message.blocks:
        if isinstance(block, TextBlock):
            stop = at + len(block.text)
            at = stop + len(_BETWEEN_BLOCKS)
        elif isinstance(block, CachePoint) and start < stop:
            ranges.append((start, stop))
            start = at
    asks_in_a_range = last and ranges and ranges[-1][1] >= len((message.content or "").rstrip())
    return ranges[:-1] if asks_in_a_range else ranges
