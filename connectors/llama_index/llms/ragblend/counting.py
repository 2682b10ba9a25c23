"""LlamaIndex's global tokenizer: what core counts tokens with when it splits documents and packs prompts."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import llama_index.core
from llama_index.core import Settings

from ragblend.prompt.template import PromptTokenizer

_setting = threading.Lock()


@dataclass(frozen=True, eq=False)
class ModelTokenizer:
    """Text -> ids, as content of a prompt becomes ids. Holds the tokenizer, not the model."""

    prompts: PromptTokenizer

    def __call__(self, text: str) -> list[int]:
        return self.prompts.encode_text(text)


def count_with(prompts: PromptTokenizer) -> bool:
    """Let core count with this model's tokenizer, unless the user chose another; whether it does now.

    What core took for want of a choice, or an LLM before this one, is replaced.
    """
    with _setting:
        current = llama_index.core.global_tokenizer
        # `get_tokenizer` keeps its default in the same place where a user's choice goes.
        is_cores_own = isinstance(current, partial) and current.keywords == {"allowed_special": "all"}
        if current is not None and not is_cores_own and not isinstance(current, ModelTokenizer):
            return False
        Settings.tokenizer = ModelTokenizer(prompts)
        return True
