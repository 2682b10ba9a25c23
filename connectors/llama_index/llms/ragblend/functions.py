"""What core asks of an LLM that calls functions: to offer tools, to read their calls, to answer in a class's form."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program.utils import get_program_for_llm
from llama_index.core.tools.types import BaseTool
from llama_index.core.types import BasePydanticProgram, PydanticProgramMode
from llama_index.llms.ragblend.templates import TemplateLLM
from llama_index.llms.ragblend.tools import calls_of


class FunctionLLM(TemplateLLM, FunctionCallingLLM):
    """Core's LLM that calls functions. A structured stream requires its call, too, and a call of a tool that the model
    made up is an error that says so.

    `metadata.is_function_calling_model` says whether core asks in this way.
    """

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or ())
        if user_msg is not None:
            asked = (
                user_msg if isinstance(user_msg, ChatMessage) else ChatMessage(role=MessageRole.USER, content=user_msg)
            )
            messages.append(asked)
        return {
            **kwargs,
            "messages": messages,
            # The limit that is skipped is one of OpenAI's.
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_required": tool_required,
            "allow_parallel_tool_calls": allow_parallel_tool_calls,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls that an answer makes.

        Raises:
            ValueError: it makes none, and that is an error.
        """
        calls = calls_of(response.message)
        if not calls and error_on_no_tool_call:
            raise ValueError(f"the model called no tool, and said: {response.message.content or ''!r:.200}")
        return [ToolSelection(tool_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments)) for call in calls]

    def predict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """As core's.

        Raises:
            ValueError: the model called no tool, or one that there is not.
        """
        with _known_tools(tools):
            return super().predict_and_call(tools, *args, **kwargs)

    async def apredict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        await self.loaded()
        with _known_tools(tools):
            return await super().apredict_and_call(tools, *args, **kwargs)

    def _structured_stream_call(
        self, output_cls: type[Any], prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        return self._streaming_program(output_cls, prompt).stream_call(llm_kwargs=llm_kwargs, **prompt_args)

    async def _structured_astream_call(
        self, output_cls: type[Any], prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        return await self._streaming_program(output_cls, prompt).astream_call(llm_kwargs=llm_kwargs, **prompt_args)

    def _streaming_program(self, output_cls: type[Any], prompt: Any) -> BasePydanticProgram[Any]:
        """Core's program for structured output. Its streams, unlike its calls, do not say that the tool is required."""
        mode = self.pydantic_program_mode
        functions = mode == PydanticProgramMode.FUNCTION or (
            mode == PydanticProgramMode.DEFAULT and self.metadata.is_function_calling_model
        )
        required = {"tool_choice": "required"} if functions else {}
        return get_program_for_llm(output_cls, prompt, self, pydantic_program_mode=mode, **required)


@contextlib.contextmanager
def _known_tools(offered: Sequence[BaseTool]) -> Iterator[None]:
    """Core looks tools up by the name that the model called, which the model may have made up."""
    try:
        yield
    except KeyError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or trace.tb_frame.f_globals.get("__name__") != "llama_index.core.tools.calling":
            raise
        names = ", ".join(tool.metadata.get_name() for tool in offered)
        raise ValueError(
            f"the model called a tool {error}, and there is only {names}: ask again, or require one with tool_choice="
        ) from error
