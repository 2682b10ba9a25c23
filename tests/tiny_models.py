"""Tiny random models of the families the laws are tested on; fp32, CPU, no trained weights needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
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
LONGROPE_BORDER = 160  # tokens: longer prompts have other frequencies
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
    "factor": 1024 / LONGROPE_BORDER,
    "original_max_position_embeddings": LONGROPE_BORDER,
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

_OLDER_SIZES = {name: size for name, size in SIZES.items() if name != "head_dim"}
# Each differs from those above in what stands around its attention; the laws that could break by that are tested.
OTHER_FAMILIES: dict[str, Callable[[int], PreTrainedModel]] = {
    # A part of each key is rotated: split off before the model's own function, or in it.
    "stablelm": lambda vocab: StableLmForCausalLM(StableLmConfig(**_OLDER_SIZES, vocab_size=vocab)),
    "glm": lambda vocab: GlmForCausalLM(GlmConfig(**SIZES, vocab_size=vocab, pad_token_id=0)),
    # Other names for what is around the layers, and for what a layer is given; a head with a bias.
    "phi": lambda vocab: PhiForCausalLM(PhiConfig(**_OLDER_SIZES, vocab_size=vocab)),
    "gpt-neox": lambda vocab: GPTNeoXForCausalLM(GPTNeoXConfig(**_OLDER_SIZES, vocab_size=vocab)),
    # Layers without positions.
    "smollm3": lambda vocab: SmolLM3ForCausalLM(
        SmolLM3Config(**_OLDER_SIZES, vocab_size=vocab, pad_token_id=0, no_rope_layer_interval=2)
    ),
    # Frequencies that follow the length of the prompt.
    "phi3-longrope": lambda vocab: Phi3ForCausalLM(
        Phi3Config(
            **_OLDER_SIZES,
            vocab_size=vocab,
            pad_token_id=0,
            eos_token_id=1,
            original_max_position_embeddings=LONGROPE_BORDER,
            rope_parameters=dict(LONGROPE),
        )
    ),
    # Learned sinks, and one angle for each pair of dimensions.
    "gpt-oss": lambda vocab: GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            vocab_size=vocab,
            pad_token_id=0,
            eos_token_id=1,
            sliding_window=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=dict(YARN),
        )
    ),
    # Takes a view of what attention gives; experts, a gate behind attention, layers without positions.
    "afmoe": lambda vocab: AfmoeForCausalLM(
        AfmoeConfig(
            **SIZES, vocab_size=vocab, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, sliding_window=24
        )
    ),
    # An attention function of its own choice, for "sdpa" knows no softcap.
    "gemma2": lambda vocab: Gemma2ForCausalLM(Gemma2Config(**SIZES, vocab_size=vocab, sliding_window=24)),
}


def tiny_model(family: str, vocab: int = 320, seed: int = 0) -> PreTrainedModel:
    """A random model of the family, the same for the same seed."""
    torch.manual_seed(seed)
    model = (FAMILIES | OTHER_FAMILIES)[family](vocab).eval()
    # Norm weights and biases are made ones and zeros: a model that ignored them would pass unnoticed.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
    return model


@torch.inference_mode()
def own_logits(family: str, ids: Tensor, vocab: int = 320) -> Tensor:
    """What transformers itself says of ids [tokens], on a model ragblend never touched: [tokens, vocab]."""
    return tiny_model(family, vocab)(input_ids=ids[None]).logits[0]
