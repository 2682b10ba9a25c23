"""Tools: what of a definition is template and what is content, and the calls in what a model says.

Models write calls in a few formats. Three are read here: JSON objects between `<tool_call>` tags (Hermes, Qwen), a JSON
list behind `[TOOL_CALLS]` (Mistral), and an answer that is nothing but JSON with a tool's name (Llama 3). What looks
like a call and is not well-formed stays text: a model's slip is never an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ragblend.errors import InvalidSettingError
from ragblend.prompt.chunk import ToolCall

_TAG, _END_TAG, _LIST = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
MARKS = (_TAG, _END_TAG, _LIST)
"""What calls are recognised by. In many vocabularies these are control tokens, which an answer's text leaves out."""

# An answer that begins like this may turn out to be a call and nothing else.
_MAYBE_BARE = re.compile(r'\s*(\{\s*("|$)|\[\s*(\{|$))')
_BETWEEN_CALLS = re.compile(r"[\s;,]*")
_JSON = json.JSONDecoder(strict=False)  # models write bare line breaks into strings


def checked(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Definitions of tools as plain JSON types.

    Raises:
        InvalidSettingError: one is not of the form {"type": "function", "function": {"name": ..., ...}}.
    """
    try:
        plain = json.loads(json.dumps(list(tools)))
        names = [tool["function"]["name"] for tool in plain]
    except (TypeError, KeyError, ValueError) as error:
        raise InvalidSettingError(
            'a tool is {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}, in '
            f"types that JSON has; this is not: {error!r}"
        ) from error
    if wrong := [name for name in names if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name, re.ASCII)]:
        raise InvalidSettingError(f"a tool's name is made of letters, digits, _, - and dots; not {wrong[0]!r}")
    return list(plain)


def replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """A JSON value with every string in it, names of members included, put through a function."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {replace(name): replaced(member, replace) for name, member in value.items()}
    return [replaced(item, replace) for item in value] if isinstance(value, (list, tuple)) else value


def read_calls(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """What an answer says, and the calls it makes; those that carry no id have "".

    Args:
        text: the whole answer, MARKS included.
        names: of the tools there are. JSON without a mark is a call only of one of these.
    """
    said: list[str] = []
    calls: list[ToolCall] = []
    if _TAG in text:
        start = 0
        while (tag := text.find(_TAG, start)) >= 0:
            said.append(text[start:tag])
            value, stop = _value(text, tag + len(_TAG))
            call = _call(value)
            if call is None:
                following = text.find(_TAG, tag + 1)
                stop = len(text) if following < 0 else following
                said.append(text[tag:stop])
            else:
                calls.append(call)
                following, end = text.find(_TAG, stop), text.find(_END_TAG, stop)
                if end >= 0 and not 0 <= following < end:
                    stop = end + len(_END_TAG)
            start = stop
        said.append(text[start:])
    elif _LIST in text:
        before, _, listed = text.partition(_LIST)
        found, stop = _calls(listed)
        said, calls = [before, listed[stop:]], found
    elif _MAYBE_BARE.match(text):
        found, stop = _calls(text)
        if not text[stop:].strip() and all(call.name in names for call in found):
            calls = found
    if not calls:
        return text, ()
    return "".join(piece for piece in said if piece.strip()).rstrip(), tuple(calls)


def certain(text: str) -> str:
    """The beginning of an unfinished answer that `read_calls` will leave as it is, whatever follows."""
    if _MAYBE_BARE.match(text):
        return ""
    cut = len(text)
    for mark in (_TAG, _LIST):
        whole = text.find(mark)
        part = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        cut = min(cut, len(text) - part if whole < 0 else whole)
    return text[:cut].rstrip()


def _value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins there, and where it stops; None where there is none."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _calls(text: str) -> tuple[list[ToolCall], int]:
    """The calls at the text's beginning, in a list or one after another, and where they stop."""
    calls: list[ToolCall] = []
    stop = 0
    while True:
        value, end = _value(text, stop)
        read = [_call(item) for item in (value if isinstance(value, list) else [value])]
        good = [call for call in read if call is not None]
        if len(good) < len(read) or not good:
            return calls, stop
        calls += good
        between = _BETWEEN_CALLS.match(text, end)
        stop = end if between is None else between.end()


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value(arguments, 0)[0]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments, value["id"] if isinstance(value.get("id"), str) else "")
