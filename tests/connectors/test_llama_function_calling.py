"""Tools: the LLM does not claim to call functions, so core asks it the ReAct way, and `stop` keeps it honest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_bench import MakeEngine, Recorder
from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.react.output_parser import ReActOutputParser
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.tools import FunctionTool
from llama_index.llms.ragblend import RagBlendLLM
from test_llama_coverage import Dictation

from ragblend.errors import InvalidSettingError

# Core's agents use deprecated parts of core.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ACTION = 'Thought: I look.\nAction: height\nAction Input: {"name": "lighthouse"}\n'


@pytest.fixture
def dictation(engine: Recorder) -> Iterator[Dictation]:
    made = Dictation(engine.decoder.model)
    yield made
    assert made.left == 0, "an answer was dictated and never asked for"


@pytest.fixture
def engine(make_engine: MakeEngine) -> Recorder:
    return make_engine(learn=False, window=16384)


@pytest.fixture
def asked() -> list[str]:
    """What the tool was asked."""
    return []


@pytest.fixture
def tool(asked: list[str]) -> FunctionTool:
    def height(name: str) -> str:
        """Height of a building."""
        asked.append(name)
        return "38 metres"

    return FunctionTool.from_defaults(height)


def ids(engine: Recorder, *answers: str) -> list[list[int]]:
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    return [[*engine.prompts.encode_text(answer), end] for answer in answers]


def test_function_calling_is_not_claimed(llm: RagBlendLLM, tool: FunctionTool) -> None:
    assert not llm.metadata.is_function_calling_model
    assert not isinstance(llm, FunctionCallingLLM)

    async def run() -> None:
        await FunctionAgent(tools=[tool], llm=llm).run(user_msg="How high is it?")

    with pytest.raises(ValueError, match="FunctionCallingLLM"):
        asyncio.run(run())


@pytest.mark.parametrize("given", [{"tools": []}, {"tool_choice": "auto"}, {"functions": []}])
def test_tools_given_to_a_call_are_refused_not_ignored(llm: RagBlendLLM, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=f"not {next(iter(given))}"):
        llm.complete("How high is it?", **given)


def test_react_calls_the_tool_and_an_observation_it_makes_up_is_cut_off(
    engine: Recorder, dictation: Dictation, tool: FunctionTool, asked: list[str]
) -> None:
    llm = RagBlendLLM.from_engine(engine, max_tokens=200, stop="Observation:")
    made_up = f"{ACTION}Observation: 12 metres\nThought: I know.\nAnswer: It is 12 metres high."
    dictation.say(*ids(engine, made_up, "Thought: I know.\nAnswer: It is 38 metres high."))

    async def run() -> str:
        return str(await ReActAgent(tools=[tool], llm=llm).run(user_msg="How high is the lighthouse?"))

    assert asyncio.run(run()).strip() == "It is 38 metres high."
    assert asked == ["lighthouse"]
    assert "12 metres" not in engine.streams[0].text
    prompt = engine.prompts.decode(engine.prompts_ids[-1])
    assert "Observation: 38 metres" in prompt
    assert "12 metres" not in prompt


def test_predict_and_call_goes_the_same_way(
    engine: Recorder, dictation: Dictation, tool: FunctionTool, asked: list[str]
) -> None:
    llm = RagBlendLLM.from_engine(engine, max_tokens=200)
    dictation.say(*ids(engine, ACTION))
    # Core's own defaults for these two do not validate.
    react: dict[str, Any] = {"react_chat_formatter": ReActChatFormatter(), "output_parser": ReActOutputParser()}
    assert llm.predict_and_call([tool], user_msg="How high is it?", **react).response == "38 metres"
    assert asked == ["lighthouse"]
