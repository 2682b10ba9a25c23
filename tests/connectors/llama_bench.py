"""What the connector tests share: texts, a tiny model, and an engine that keeps what went through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from tiny_models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from ragblend.engine import AnswerStream, RagBlend, Ready

SUBJECTS = ("cache", "chunk", "key", "value", "model", "user", "store", "reader", "layer", "token", "query", "answer")
TEXTS = [
    f"The {subject} number {n} is kept in drawer {7 * n + 3} of the archive. It was put there by the {SUBJECTS[n - 1]} "
    f"in the year {1900 + n}, and nobody but the {subject} has the documents that say why."
    for n, subject in enumerate(SUBJECTS)
]


class Recorder(RagBlend):
    """The engine, keeping what went through it: prompts' ids and answers' streams."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.prompts_ids: list[list[int]] = []
        self.streams: list[AnswerStream] = []
        self.prefetched: list[Future[int]] = []

    def prefill(self, *args: Any, **settings: Any) -> Ready:
        ready = super().prefill(*args, **settings)
        self.prompts_ids.append(ready.ids.tolist())
        return ready

    def stream(self, *args: Any, **settings: Any) -> AnswerStream:
        stream = super().stream(*args, **settings)
        self.streams.append(stream)
        return stream

    def prefetch(self, texts: Iterable[str]) -> Future[int]:
        self.prefetched.append(super().prefetch(texts))
        return self.prefetched[-1]


def tiny_llama(tokenizer: Any, window: int = 8192) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 3, "max_position_embeddings": window}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer))).eval()


MakeEngine = Callable[..., Recorder]
