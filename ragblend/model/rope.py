"""Positions on keys, through the model's own rotary module (law 6).

Keys are stored as a layer makes them before RoPE and rotated once, to the position they end up at. Both the angles
(`rotary_emb`: base, llama3 / YaRN / long scaling, attention scaling) and the way pairs are laid out
(`apply_rotary_pos_emb`: halves, interleaved) belong to the model; nothing here knows a RoPE type. How many of a
key's dimensions are rotated, if any, differs by model and layer: `Decoder` finds it out when it loads one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ragblend.errors import UnsupportedModelError

USE_RATHER = "use a RoPE decoder such as Llama, Qwen, Mistral, Gemma or SmolLM"

Angles = tuple[Tensor, Tensor]
"""(cos, sin), each [1, tokens, rotary_dim], or half of it (gpt-oss), attention scaling included."""


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one model.

    module: the model's `rotary_emb`.
    apply: the model's `apply_rotary_pos_emb(q, k, cos, sin)`.
    layer_types: the type of each layer, for models with more than one RoPE base; None when there is one.
    """

    module: nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    layer_types: tuple[str, ...] | None

    @classmethod
    def of(cls, base: nn.Module, layer: nn.Module, layer_types: tuple[str, ...] | None) -> Rope:
        """Find the rotary module of a decoder and the function its layers rotate with.

        Raises:
            UnsupportedModelError: the decoder has none.
        """
        module = getattr(base, "rotary_emb", None)
        apply = getattr(sys.modules[type(layer).__module__], "apply_rotary_pos_emb", None)
        if not isinstance(module, nn.Module) or apply is None:
            raise UnsupportedModelError(
                f"{type(base).__name__} has no `rotary_emb` for all of its layers, which `apply_rotary_pos_emb` would "
                f"rotate keys by: they cannot be moved to another position; {USE_RATHER}"
            )
        typed = "layer_type" in inspect.signature(module.forward).parameters
        if typed and layer_types is None:
            raise UnsupportedModelError(f"{type(base).__name__} has several RoPE bases but names no layer types")
        return cls(module, apply, layer_types if typed else None)

    def key_of(self, layer: int) -> str:
        """Layers with the same key share angles."""
        return "" if self.layer_types is None else self.layer_types[layer]

    def angles(self, positions: Tensor, like: Tensor) -> dict[str, Angles]:
        """Angles of absolute positions [tokens] for every kind of layer, in the dtype and on the device of `like`.

        Frequencies of length-dependent scalings follow the largest position, so ask for a whole prompt at once.
        """
        position_ids = positions.to(like.device)[None]
        if self.layer_types is None:
            return {"": self.module(like, position_ids)}
        return {kind: self.module(like, position_ids, kind) for kind in dict.fromkeys(self.layer_types)}

    def steady(self, window_tokens: int, like: Tensor) -> int:
        """Prompts of up to so many tokens have the same frequencies; the window, where all have.

        Raises:
            UnsupportedModelError: longer prompts do not have the same ones among each other, or some layers have none.
        """

        def frequencies(tokens: int) -> Tensor:
            angles = self.angles(torch.tensor([1, max(1, tokens - 1)]), like)
            return torch.cat([part[0, 0].float() for pair in angles.values() for part in pair])

        try:
            short, long = frequencies(1), frequencies(window_tokens)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} does not give angles for the positions of every kind of layer "
                f"({type(error).__name__}: {error}); {USE_RATHER}"
            ) from error
        if torch.equal(short, long):
            return window_tokens
        steady, changed = 1, window_tokens
        while changed - steady > 1:
            middle = (steady + changed) // 2
            if torch.equal(frequencies(middle), short):
                steady = middle
            else:
                changed = middle
        if not torch.equal(frequencies(changed), long):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} rotates keys differently in prompts of every length: what is computed "
                f"for one could be used in no other; {USE_RATHER}"
            )
        return steady

    def rotate(self, key: Tensor, angles: Angles, width: int) -> Tensor:
        """Rotate keys [kv_heads, tokens, key_dim] to the positions of `angles`.

        width: so many of their first dimensions are rotated. Models split either before the function or in it.
        """
        if width == 0:
            return key
        cos, sin = angles
        batched = key[None, ..., :width]
        rotated: Tensor = self.apply(batched[:, :0], batched, cos, sin)[1][0]
        return rotated if width == key.shape[-1] else torch.cat([rotated, key[..., width:]], dim=-1)

    def unrotate(self, key: Tensor, inverse: Angles, width: int) -> Tensor:
        """Undo `rotate`, attention scaling included. inverse: `inverted` angles of those the keys were rotated by."""
        return self.rotate(key.float(), inverse, width).to(key.dtype)


def inverted(angles: Angles) -> Angles:
    """Angles that undo a rotation: the inverse of [[c, -s], [s, c]] is [[c, s], [-s, c]] / (c2 + s2).

    In fp32: half-precision angles are not exactly orthogonal, and the division takes care of that too.
    """
    cos, sin = angles[0].float(), angles[1].float()
    norm = cos.square() + sin.square()
    return cos / norm, -sin / norm


def identity_angles(like: Tensor) -> Angles:
    """Angles that leave keys where they are; shaped as `like`, a cos tensor."""
    return torch.ones_like(like), torch.zeros_like(like)
