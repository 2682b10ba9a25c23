"""How far a blended prefill is from a full one: the KL divergence of what they make of an answer, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragblend.errors import InvalidSettingError
from ragblend.model.cache import KVCache
from ragblend.model.decoder import Decoder
from ragblend.model.generate import advance


@torch.inference_mode()
def answer_logits(
    decoder: Decoder, cache: KVCache, logits: Tensor, prompt_tokens: int, answer: Sequence[int]
) -> Tensor:
    """[answer tokens, vocab] fp32: the logits for each of the answer's tokens, given the prompt and those before it.

    Args:
        cache: holds the prompt, and has room for the answer; what stands behind the prompt is overwritten.
        logits: [vocab] of the prompt's last position.
        answer: at least one token id.
    """
    found = [logits[None]]
    if len(answer) > 1:
        found.append(advance(decoder, cache, answer[:-1], prompt_tokens, len(answer) - 1))
    return torch.cat(found).float().cpu()


def agreement(reference: Tensor, other: Tensor) -> float:
    """Share of the positions at which both would choose the same token. Logits: [tokens, vocab] each."""
    return float((reference.argmax(-1) == other.argmax(-1)).float().mean())


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) of the next-token distributions, position by position.

    Args:
        reference: [tokens, vocab] logits, fp32.
        other: [tokens, vocab] logits, fp32.

    Returns:
        [tokens] fp32, in nats: 0 where both rows are the same, inf where `other` rules out what `reference` allows,
        NaN where a row holds NaN.

    Raises:
        InvalidSettingError: the two are not matrices of the same shape.
    """
    if reference.ndim != 2 or reference.shape != other.shape:
        raise InvalidSettingError(
            f"logits of two runs over the same tokens are needed, [tokens, vocab] each: got {tuple(reference.shape)} "
            f"and {tuple(other.shape)}"
        )
    # In fp64: over a large vocabulary, fp32 sums are off by about the KL of two runs that differ by rounding only.
    log_p = reference.double().log_softmax(-1)
    log_q = other.double().log_softmax(-1)
    p = log_p.exp()
    terms = (p * (log_p - log_q)).masked_fill(p == 0, 0.0)  # a token that both rule out is inf - inf
    return terms.sum(-1).clamp(min=0.0).float()
