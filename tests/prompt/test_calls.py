"""Calls of tools in answers: every format, several at once, and what is broken stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.errors import InvalidSettingError
from ragblend.prompt.calls import certain, checked, read_calls, replaced
from ragblend.prompt.chunk import ToolCall

NAMES = ("height", "add")
HEIGHT = ToolCall("height", {"name": "lighthouse"})
ADD = ToolCall("add", {"a": 1, "b": 2})
ONE = '{"name": "height", "arguments": {"name": "lighthouse"}}'
TWO = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
BARE = '{"name": "height", "parameters": {"name": "lighthouse"}}'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"<tool_call>\n{ONE}\n</tool_call>", "", [HEIGHT]),
        (f"I look.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n", "I look.", [HEIGHT, ADD]),
        (f"<tool_call>{ONE}</tool_call>And then?", "And then?", [HEIGHT]),
        (f"<tool_call>\n{ONE}", "", [HEIGHT]),  # the end tag is a token that ended the answer
        (f"<tool_call>\n{ONE}}}\n</tool_call>", "", [HEIGHT]),  # small models close one brace too many
        (f"<tool_call>{ONE}<tool_call>{TWO}</tool_call>", "", [HEIGHT, ADD]),
        (f"[TOOL_CALLS] [{ONE}, {TWO}]", "", [HEIGHT, ADD]),
        (f"[TOOL_CALLS]{ONE}", "", [HEIGHT]),
        (f"I look.[TOOL_CALLS][{ONE}]", "I look.", [HEIGHT]),
        (
            '[TOOL_CALLS] [{"name": "height", "arguments": {}, "id": "a1b2c3d4e"}]',
            "",
            [ToolCall("height", {}, "a1b2c3d4e")],
        ),
        (BARE, "", [HEIGHT]),
        (f"\n{BARE}; {TWO}\n", "", [HEIGHT, ADD]),
        (f"[{BARE}]", "", [HEIGHT]),
        (json.dumps({"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}), "", [ADD]),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "", [ToolCall("nobody", {})]),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>\n</tool_call>"}}</tool_call>',
            "",
            [ToolCall("add", {"a": "<tool_call>\n</tool_call>"})],
        ),
    ],
)
def test_calls_are_read(text: str, said: str, calls: list[ToolCall]) -> None:
    assert read_calls(text, NAMES) == (said, tuple(calls))


@pytest.mark.parametrize(
    "text",
    [
        "It is 38 metres high.",
        "",
        " {",
        "[1] says so.",
        '<tool_call>\n{"name": "height", "arguments": {"name": "light\n</tool_call>',
        "<tool_call>\n{'name': 'height', 'arguments': {}}\n</tool_call>",
        '<tool_call>{"name": "height", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "height"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "[TOOL_CALLS]",
        f"[TOOL_CALLS] [{ONE}, 5]",
        '{"name": "nobody", "parameters": {}}',  # an answer in JSON, not a call
        '{"name": "height"}',
        f"{BARE} is how you call it.",
    ],
)
def test_what_is_no_call_is_text_as_it_is(text: str) -> None:
    assert read_calls(text, NAMES) == (text, ())


def test_of_several_calls_the_broken_one_is_text() -> None:
    text = f'First.<tool_call>{ONE}</tool_call><tool_call>{{"name": </tool_call><tool_call>{TWO}</tool_call>'
    assert read_calls(text, NAMES) == ('First.<tool_call>{"name": </tool_call>', (HEIGHT, ADD))


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", ONE, BARE, "{", "[", '"', " ", "\n", "So.", "<tool"]
)


@given(st.lists(pieces | st.text(max_size=3), max_size=8).map("".join))
def test_what_is_certain_never_has_to_be_taken_back(text: str) -> None:
    said, _ = read_calls(text, NAMES)
    before = ""
    for stop in range(len(text) + 1):
        now = certain(text[:stop])
        assert now.startswith(before)
        before = now
    assert said.startswith(before)


def test_what_cannot_be_a_call_is_given_out_at_once() -> None:
    assert certain("It is high. <b") == "It is high. <b"
    assert certain("It is high. <tool") == "It is high."
    assert certain("[1] says") == "[1] says"
    assert certain('{"name') == certain('[{"name') == certain("[") == ""


@pytest.mark.parametrize("wrong", [{"name": "height"}, {"type": "function", "function": {"name": "a b"}}, "height", 5])
def test_malformed_definitions_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidSettingError, match="tool"):
        checked([wrong])  # type: ignore[list-item]
    with pytest.raises(InvalidSettingError, match="JSON"):
        checked([{"type": "function", "function": {"name": "a", "parameters": {1, 2}}}])


def test_every_string_of_a_value_can_be_replaced() -> None:
    assert replaced({"a": ["b", {"c": 1}], "d": None}, str.upper) == {"A": ["B", {"C": 1}], "D": None}
