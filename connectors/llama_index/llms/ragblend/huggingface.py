"""HuggingFaceLLM's constructor arguments in terms of RagBlendLLM's, so that migrating is one import.

Each has one of three fates: it says what one of our settings says; it asks for what is so anyway; or it cannot be
honoured, and is refused with what to do instead. None is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.prompts import PromptTemplate

from ragblend.errors import InvalidSettingError

NAMES = frozenset(
    {
        "model_name",
        "tokenizer_name",
        "tokenizer",
        "max_new_tokens",
        "device_map",
        "generate_kwargs",
        "model_kwargs",
        "tokenizer_kwargs",
        "tokenizer_outputs_to_remove",
    }
)
"""Arguments that are HuggingFaceLLM's alone. Those that both have mean the same in both."""

_HAND_OVER = "load model and tokenizer with transformers as you like, and hand both over: model=..., tokenizer=..."
# Names of transformers' `generate` for ours.
_DECODING = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}
# What holds here anyway: one sequence at a time, never padded or truncated, with a cache.
_HOLDS: dict[str, Callable[[Any], bool]] = {
    "num_beams": lambda value: value in (None, 1),
    "num_return_sequences": lambda value: value in (None, 1),
    "use_cache": lambda value: value in (None, True),
    "pad_token_id": lambda value: True,
}


def with_theirs(own: Mapping[str, Any], theirs: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings, completed by what HuggingFaceLLM's arguments say.

    Args:
        own: settings of RagBlendLLM by name.
        theirs: arguments by the names in NAMES; None stands for not given.
        defaults: what settings are where nothing is given.

    Raises:
        InvalidSettingError: something cannot be honoured, or is given under both names with different values.
    """
    chosen = dict(own)
    for name, value in _translated(theirs, model=own["model"] if own["model"] != defaults["model"] else None).items():
        if name == "max_length":
            chosen["context_window"] = min(own["context_window"] or value, value)
        elif own.get(name) in (defaults.get(name), value) or (name == "model" and hasattr(own[name], "state_dict")):
            chosen[name] = value
        else:
            raise InvalidSettingError(f"{name} is given twice, as {own[name]!r} and as {value!r}: give it once")
    return chosen


def _translated(given: Mapping[str, Any], *, model: Any) -> dict[str, Any]:
    """Our settings for theirs; `max_length` stands for itself. model: what was given under our name, if anything."""
    asked = {name: value for name, value in given.items() if value is not None}
    ours: dict[str, Any] = _sources(asked, model)
    if "max_new_tokens" in asked:
        ours["max_tokens"] = asked["max_new_tokens"]
    if "device_map" in given:
        ours["device"] = _device(given["device_map"])
    for name, translate in (("generate_kwargs", _generate), ("model_kwargs", _model), ("tokenizer_kwargs", _tokenizer)):
        for setting, value in translate(dict(asked.get(name, {}))).items():
            if setting in ours and ours[setting] != value:
                raise InvalidSettingError(f"{name} gives {setting} again, as {value!r}: give it once")
            ours[setting] = value
    return ours


def query_wrapper(prompt: str | PromptTemplate | None) -> PromptTemplate | None:
    """A query wrapper as LlamaIndex keeps it; None for one that wraps nothing."""
    template = PromptTemplate(prompt) if isinstance(prompt, str) else prompt
    return None if template is None or template.format(query_str="x") == "x" else template


def _sources(asked: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """model and tokenizer, as a name or as a pair."""
    name, tokenizer, tokenizer_name = (asked.get(key) for key in ("model_name", "tokenizer", "tokenizer_name"))
    if isinstance(model, tuple) and tokenizer is not None:
        raise InvalidSettingError("model is a pair (model, tokenizer) already: leave out tokenizer")
    if tokenizer_name is not None and tokenizer is None and tokenizer_name != (model or name):
        raise InvalidSettingError(
            f"a model comes with its own tokenizer, here: leave out tokenizer_name, or {_HAND_OVER}"
        )
    if model is None:
        return {key: value for key, value in (("model", name), ("tokenizer", tokenizer)) if value is not None}
    if hasattr(model, "state_dict"):
        if tokenizer is None:
            raise InvalidSettingError("a loaded model needs its tokenizer, too: model=..., tokenizer=...")
        return {"model": (model, tokenizer)}
    return {} if tokenizer is None else {"tokenizer": tokenizer}


def _device(device_map: Any) -> str:
    if isinstance(device_map, Mapping) and len(device_map) == 1:
        device_map = device_map.get("")
    elif device_map is None:
        return "cpu"  # where transformers leaves a model without a map
    if isinstance(device_map, int) and not isinstance(device_map, bool):
        return f"cuda:{device_map}"
    name = str(device_map)
    if name == "auto" or name.split(":")[0] in ("cpu", "cuda"):
        return name
    raise InvalidSettingError(
        f"a model is on one device here, and device_map {device_map!r} may need several: say 'auto', 'cpu' or 'cuda:0'"
    )


def _generate(kwargs: dict[str, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    samples = kwargs.pop("do_sample", None)
    for name, value in kwargs.items():
        if name in _DECODING:
            if value is not None:
                ours[_DECODING[name]] = value
        elif name == "eos_token_id":
            ours["stopping_ids"] = [value] if isinstance(value, int) else list(value or ())
        elif not _HOLDS.get(name, lambda value: False)(value):
            raise InvalidSettingError(
                f"generate_kwargs has {name}={value!r}, which is not known here: leave it out; known are do_sample, "
                f"{', '.join(_DECODING)}"
            )
    if samples is False:
        ours["temperature"] = 0.0
    elif samples:
        ours.setdefault("temperature", 1.0)
    return ours


def _model(kwargs: dict[str, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in ("torch_dtype", "dtype"):
            ours["dtype"] = str(value).removeprefix("torch.")
        elif not (name == "low_cpu_mem_usage" or (name == "trust_remote_code" and not value)):
            raise InvalidSettingError(f"model_kwargs has {name}={value!r}, which is not known here: {_HAND_OVER}")
    return ours


def _tokenizer(kwargs: dict[str, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name == "max_length":
            ours["max_length"] = value
        elif not (
            name == "padding_side" or (name == "use_fast" and value) or (name == "trust_remote_code" and not value)
        ):
            raise InvalidSettingError(f"tokenizer_kwargs has {name}={value!r}, which is not known here: {_HAND_OVER}")
    return ours
