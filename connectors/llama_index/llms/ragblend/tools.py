"""Tools between LlamaIndex and the engine: what a call offers the model, and the calls that come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock

from ragblend.errors import InvalidSettingError
from ragblend.prompt.calls import certain, checked, read_calls
from ragblend.prompt.chunk import ToolCall
from ragblend.prompt.template import PromptTokenizer

SETTINGS = ("tools", "tool_choice", "tool_required", "allow_parallel_tool_calls")
"""What a chat takes for tools, besides the settings that every call takes."""

_ID_CHARACTERS = 9  # what Mistral's templates insist on


class Offer(NamedTuple):
    """Tools that an answer may call.

    tools: their definitions. parallel: whether it may make several calls. begin: what it is made to begin with.
    """

    tools: tuple[dict[str, Any], ...]
    parallel: bool
    begin: str

    def certain(self, text: str) -> str:
        """What an unfinished answer says for certain, calls left out."""
        return "" if self.begin else certain(text)

    def read(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """What a finished answer says, and the calls it makes, each with an id."""
        said, calls = read_calls(self.begin + text, [tool["function"]["name"] for tool in self.tools])
        if self.begin and calls:
            said = ""  # what stood before the call was not the model's
        calls = calls if self.parallel else calls[:1]
        return said, tuple(
            ToolCall(call.name, call.arguments, call.id or uuid4().hex[:_ID_CHARACTERS]) for call in calls
        )


def taken(settings: Mapping[str, Any], prompts: PromptTokenizer) -> tuple[Offer | None, dict[str, Any]]:
    """The tools among a chat's settings, if it has any, and the settings that are left.

    `tool_choice` is "auto", "none", "required" or the name of a tool, also in OpenAI's longer form. A required call is
    one that the answer is made to begin with, in the words of the model's template; where there is one tool only, or
    one is named, its name is among them.

    Raises:
        InvalidSettingError: the model's template has no tools, or does not show how a call begins, which is required; a
            definition or a choice is malformed.
    """
    left = {name: value for name, value in settings.items() if name not in SETTINGS}
    tools = checked(settings.get("tools") or ())
    choice = settings.get("tool_choice")
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or choice).get("name")
    required = bool(settings.get("tool_required")) and choice in (None, "auto")
    if not tools or choice == "none":
        if required or choice not in (None, "auto", "none"):
            raise InvalidSettingError("a tool is required, and there are none: give tools=")
        return None, left
    if not prompts.has_tools:
        raise InvalidSettingError(
            "the model's chat template renders no tools: ask without, as core's ReActAgent does, or take another model"
        )
    names = [tool["function"]["name"] for tool in tools]
    named = choice not in (None, "auto", "required")
    if named and choice not in names:
        raise InvalidSettingError(f"tool_choice is auto, none, required or one of {', '.join(names)}; got {choice!r}")
    begin = ""
    if required or choice == "required" or named:
        begin = prompts.begin_call(str(choice) if named else names[0] if len(names) == 1 else "")
    parallel = settings.get("allow_parallel_tool_calls")
    return Offer(tuple(tools), parallel is None or bool(parallel), begin), left


def answer(text: str, calls: Sequence[ToolCall] = ()) -> ChatMessage:
    """An assistant's message. Its calls are blocks, and in additional_kwargs, where parts of core look for them."""
    if not calls:
        return ChatMessage(role=MessageRole.ASSISTANT, content=text)
    blocks = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments)) for call in calls
    ]
    listed = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
    return ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=[*([TextBlock(text=text)] if text else []), *blocks],
        additional_kwargs={"tool_calls": listed},
    )


def calls_of(message: ChatMessage) -> list[ToolCall]:
    """The calls a message makes, whichever LLM wrote it. Arguments that are no JSON object count as none."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [ToolCall(block.tool_name, _arguments(block.tool_kwargs), block.tool_call_id or "") for block in blocks]
    calls = []
    for listed in message.additional_kwargs.get("tool_calls") or ():
        call = listed if isinstance(listed, Mapping) else listed.model_dump()
        function = call.get("function") or {}
        calls.append(
            ToolCall(str(function.get("name", "")), _arguments(function.get("arguments")), str(call.get("id") or ""))
        )
    return calls


def _arguments(given: object) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {}
    return dict(given) if isinstance(given, Mapping) else {}
