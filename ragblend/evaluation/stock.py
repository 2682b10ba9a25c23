"""The model as transformers runs it, to compare with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ragblend.model.decoder import PreTrainedModel, PreTrainedTokenizerBase
from ragblend.prompt.chunk import Chunk, Message, template_sources


class Stock:
    """A model and its own `generate`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model: Any = model
        self._tokenizer = tokenizer

    def ids(self, messages: Sequence[Message]) -> torch.Tensor:
        """[1, tokens] ids of a conversation through the model's own chat template, tokenised as one text."""
        contents = ["".join(p.text if isinstance(p, Chunk) else p for p in message.content) for message in messages]
        if has_template := bool(template_sources(self._tokenizer)):
            given = [{"role": m.role, "content": content} for m, content in zip(messages, contents, strict=True)]
            text = str(self._tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
        else:
            text = "\n\n".join(contents)
        encoded = self._tokenizer(text, add_special_tokens=not has_template, return_tensors="pt")
        ids: torch.Tensor = encoded.input_ids.to(self.model.device)
        return ids

    def ttft_s(self, messages: Sequence[Message]) -> float:
        """Seconds from the messages to the first token."""
        started = time.perf_counter()
        self.generate(self.ids(messages), 1)
        return time.perf_counter() - started

    @torch.inference_mode()
    def generate(self, ids: torch.Tensor, tokens: int) -> float:
        """Seconds that so many tokens take behind ids [1, tokens]."""
        started = time.perf_counter()
        self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=self._tokenizer.eos_token_id,
        )
        return time.perf_counter() - started
