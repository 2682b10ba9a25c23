"""Adapters (LoRA and its kind, by PEFT): they change what a model computes, and which of them do is in no weight."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from ragblend.errors import UnsupportedModelError


def uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile has wrapped, if it has: code compiled for it would not attend by ours."""
    return cast(nn.Module, getattr(module, "_orig_mod", module))


def plain_name(name: str) -> str:
    """A module's or a weight's name, the same whether it is compiled or not."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model that torch.compile or PEFT has wrapped, if they have; adapters stay in its layers.

    Raises:
        UnsupportedModelError: the adapter is not in its layers but in front of the prompt.
    """
    model = uncompiled(model)
    if not hasattr(model, "get_base_model") or not hasattr(model, "peft_config"):
        return model
    tuned: Any = model
    for name in tuned.active_adapters:
        if getattr(tuned.peft_config[name], "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"the adapter {name!r} ({type(tuned.peft_config[name]).__name__}) puts learned tokens in front of the "
                "prompt, where ragblend cannot keep them: use an adapter of the layers, such as LoRA"
            )
    return uncompiled(tuned.get_base_model())


def adapters(model: nn.Module) -> list[Any]:
    """What each layer that has adapters computes with, beside its weights; plain types, the same in every process.

    That is which of them are active, which are merged into its weights, and the numbers of those active (scaling, and
    by which variant of the method).
    """
    found: list[Any] = []
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if not isinstance(active, (list, tuple)):
            continue
        numbers = {
            attribute: [kept.get(adapter) for adapter in active]
            for attribute, kept in sorted(vars(module).items())
            if isinstance(kept, dict) and kept and all(isinstance(v, (bool, int, float, str)) for v in kept.values())
        }
        off, merged = bool(getattr(module, "disable_adapters", False)), list(getattr(module, "merged_adapters", ()))
        found.append([plain_name(name), list(active), off, merged, numbers])
    return found
