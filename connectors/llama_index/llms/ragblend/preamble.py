"""What stands before the first chunk when core formats a prompt."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.llms import LLM
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.llms.ragblend.conversation import conversation

from ragblend.errors import InvalidSettingError
from ragblend.prompt.chunk import Message

_CONTEXT = "\N{OBJECT REPLACEMENT CHARACTER}context\N{OBJECT REPLACEMENT CHARACTER}"


class _Formatter(MockLLM):
    """Formats prompts as a chat model or a completion model would have them formatted, without a model."""

    is_chat_model: bool

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=self.is_chat_model)

    def head(self, template: BasePromptTemplate) -> list[Message]:
        """What `predict` would send, up to the context.

        What a function of the template makes ends it, too: that is known with a prompt only, and may be made of its
        context.
        """
        template = selected(template, self)
        made = dict.fromkeys(template.function_mappings or {}, lambda **_: _CONTEXT)
        template = template.model_copy(update={"function_mappings": made})
        given = {*template.kwargs, *(template.template_var_mappings or {}).values()}
        variables = {name: "" for name in template.template_vars if name not in given} | {"context_str": _CONTEXT}
        if self.is_chat_model:
            messages = conversation(self._get_messages(template, **variables), self.messages_to_prompt)
        else:
            messages = [Message("user", self._get_prompt(template, **variables))]
        for n, message in enumerate(messages):
            before, found, _ = "".join(map(str, message.content)).partition(_CONTEXT)
            if found:
                return [*messages[:n], Message(message.role, before)]
        raise InvalidSettingError("chunks are prefilled behind a prompt's beginning up to {context_str}; it has none")


def selected(template: BasePromptTemplate, llm: LLM) -> BasePromptTemplate:
    """The prompt that this one stands for where this LLM asks."""
    while isinstance(template, SelectorPromptTemplate):
        template = template.select(llm)
    return template


def default_preamble(
    template: BasePromptTemplate = DEFAULT_TEXT_QA_PROMPT_SEL, *, is_chat_model: bool, **llm_fields: Any
) -> tuple[Message, ...]:
    """What stands before the first chunk when core formats this prompt: its messages up to `{context_str}`.

    Args:
        template: the prompt; by default the one that core's query engines ask with.
        is_chat_model: whether the model has a chat template; core formats other prompts for those that have none.
        **llm_fields: what else the LLM formats with: system_prompt, completion_to_prompt, ...

    Raises:
        InvalidSettingError: the prompt has no `{context_str}`.
    """
    # Not validated: MockLLM's constructor takes some of an LLM's fields only.
    return tuple(_Formatter.model_construct(is_chat_model=is_chat_model, **llm_fields).head(template))
