"""What core formats and sends for a prompt template: plain answers and structured ones, of an LLM and of the
structured LLM that core makes of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import TokenAsyncGen, TokenGen
from llama_index.llms.ragblend.conversation import joined_contexts


class TemplateLLM(LLM):
    """Core's LLM, but a list of contexts is one text in the prompt, and nothing is loaded on the event loop.

    How core formats depends on the metadata, which takes a loaded model: whatever asks for it on the loop is preceded
    by `loaded`.
    """

    async def loaded(self) -> None:
        """Come back when the metadata is known.

        Raises:
            As loading does.
        """
        await asyncio.to_thread(getattr, self, "metadata")

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return super().predict(prompt, **joined_contexts(prompt_args))

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        return super().stream(prompt, **joined_contexts(prompt_args))

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        await self.loaded()
        return await super().apredict(prompt, **joined_contexts(prompt_args))

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        await self.loaded()
        return await super().astream(prompt, **joined_contexts(prompt_args))

    def structured_predict(
        self, output_cls: type[Any], prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        return super().structured_predict(output_cls, prompt, llm_kwargs, **joined_contexts(prompt_args))

    async def astructured_predict(
        self, output_cls: type[Any], prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        await self.loaded()
        return await super().astructured_predict(output_cls, prompt, llm_kwargs, **joined_contexts(prompt_args))

    def stream_structured_predict(
        self, output_cls: type[Any], prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        return super().stream_structured_predict(output_cls, prompt, llm_kwargs, **joined_contexts(prompt_args))

    async def astream_structured_predict(
        self, output_cls: type[Any], prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        await self.loaded()
        return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **joined_contexts(prompt_args))


class StructuredTemplateLLM(TemplateLLM, StructuredLLM):
    """Core's structured LLM over a TemplateLLM."""

    def to_payload(self) -> dict[str, Any]:
        return {**self.llm.to_payload(), "class_name": self.class_name()}
