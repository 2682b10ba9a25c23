"""Tiny random models of the families the laws are tested on; fp32, CPU, no trained weights needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

FAMILIES: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": lambda vocab: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab)),
    "qwen2": lambda vocab: Qwen2ForCausalLM(Qwen2Config(**SIZES, vocab_size=vocab)),
    "qwen3": lambda vocab: Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=vocab)),
    # Windows shorter than the prompts of the tests, so that they matter.
    "mistral": lambda vocab: MistralForCausalLM(MistralConfig(**SIZES, vocab_size=vocab, sliding_window=24)),
    "gemma3": lambda vocab: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, vocab_size=vocab, sliding_window=20, query_pre_attn_scalar=16, sliding_window_pattern=2
        )
    ),
    "llama-yarn": lambda vocab: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab, rope_parameters=dict(YARN))),
    "llama-llama3": lambda vocab: LlamaForCausalLM(
        LlamaConfig(**SIZES, vocab_size=vocab, rope_parameters=dict(LLAMA3))
    ),
}


def tiny_model(family: str, vocab: int = 320, seed: int = 0) -> PreTrainedModel:
    """A random model of the family, the same for the same seed."""
    torch.manual_seed(seed)
    model = FAMILIES[family](vocab).eval()
    # Norm weights and biases are made ones and zeros: a model that ignored them would pass unnoticed.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
    return model
