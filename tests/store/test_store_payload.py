"""Payload bytes: what is written is what is read, or it is refused."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from ragblend.errors import CorruptPayloadError, InvalidSettingError
from ragblend.kv import LayerKV, LayerShape
from ragblend.store import payload
from ragblend.store.payload import PayloadReader

KEY = "5eed" * 16


def reader_of(tmp_path: Path, data: bytes, key: str = KEY) -> PayloadReader:
    path = tmp_path / "payload"
    path.write_bytes(data)
    return PayloadReader(open(path, "rb", buffering=0), key)


def encode(key, layers) -> bytes:
    return b"".join(payload.encode(key, layers))


def assert_same(reader: PayloadReader, layers: list[LayerKV]) -> None:
    assert reader.n_layers == len(layers)
    for index, layer in enumerate(layers):
        got = reader.read_layer_kv(index)
        assert got.key.dtype == layer.key.dtype
        assert torch.equal(got.key, layer.key)
        assert torch.equal(got.value, layer.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("without_preadv", [False, True])
def test_roundtrip(tmp_path, make_chunk, dtype, without_preadv, monkeypatch):
    if without_preadv:
        monkeypatch.delattr(os, "preadv")
    layers = make_chunk(n_tokens=11, dtype=dtype)
    data = encode(KEY, layers)
    with reader_of(tmp_path, data) as reader:
        assert (reader.key, reader.n_tokens, reader.dtype, reader.nbytes) == (KEY, 11, dtype, len(data))
        assert reader.shapes == (LayerShape(2, 8, 4),) * 3
        assert_same(reader, layers)


def test_special_values_keep_their_bits(tmp_path):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # NaNs included
    layer = LayerKV(bits.view(4, 64, 256), bits.view(4, 64, 256).flip(1))
    with reader_of(tmp_path, encode(KEY, [layer])) as reader:
        assert torch.equal(reader.read_layer_kv(0).key.view(torch.int16), layer.key.view(torch.int16))


def test_layers_may_differ_in_shape_and_share_memory(tmp_path, make_chunk):
    fused = torch.randn(3, 5, 24)
    layers = [
        LayerKV(fused[:, :, :8], fused[:, :, 8:24]),
        LayerKV(fused, fused),
        *make_chunk(n_tokens=5, kv_heads=1, key_dim=2, value_dim=6, dtype=torch.float32),
    ]
    with reader_of(tmp_path, encode(KEY, layers)) as reader:
        assert reader.shapes[:3] == (LayerShape(3, 8, 16), LayerShape(3, 24, 24), LayerShape(1, 2, 6))
        assert_same(reader, layers)


def test_more_than_a_thousand_layers_stay_in_order(tmp_path, make_chunk):
    layers = make_chunk(n_layers=1003, n_tokens=1, kv_heads=1, key_dim=1, value_dim=1)
    with reader_of(tmp_path, encode(KEY, layers)) as reader:
        assert_same(reader, layers)


def test_many_heads_need_several_scatter_lists(tmp_path, make_chunk):
    (layer,) = make_chunk(kv_heads=1500, n_tokens=2, n_layers=1)
    with reader_of(tmp_path, encode(KEY, [layer])) as reader:
        key, value = torch.zeros(1500, 3, 8, dtype=torch.bfloat16), torch.zeros(1500, 3, 4, dtype=torch.bfloat16)
        reader.read_layer(0, reader.target(0, key[:, 1:], value[:, :2]))
        assert torch.equal(key[:, 1:], layer.key)
        assert torch.equal(value[:, :2], layer.value)


@pytest.mark.parametrize("at_most", [1, 13, 100])
def test_partial_reads_are_continued(tmp_path, make_chunk, monkeypatch, at_most):
    layers = make_chunk()
    whole = os.preadv

    def some(fd, parts, offset):
        buffer = bytearray(min(at_most, sum(part.nbytes for part in parts)))
        got = whole(fd, [buffer], offset)
        left = memoryview(buffer)[:got]
        for part in parts:
            flat = part.cast("B")
            flat[: len(left[: len(flat)])] = left[: len(flat)]
            left = left[len(flat) :]
        return got

    monkeypatch.setattr(os, "preadv", some)
    with reader_of(tmp_path, encode(KEY, layers)) as reader:
        key, value = torch.zeros(2, 9, 8, dtype=torch.bfloat16), torch.zeros(2, 9, 4, dtype=torch.bfloat16)
        reader.read_layer(1, reader.target(1, key[:, 2:], value[:, 2:]))
        assert torch.equal(key[:, 2:], layers[1].key)
        assert torch.equal(value[:, 2:], layers[1].value)


def test_reads_into_the_token_range_and_nowhere_else(tmp_path, make_chunk):
    layers = make_chunk()
    with reader_of(tmp_path, encode(KEY, layers)) as reader:
        key, value = torch.full((2, 20, 8), 7.0).bfloat16(), torch.full((2, 20, 4), 7.0).bfloat16()
        got = reader.read_layer(2, reader.target(2, key[:, 5:12], value[:, 5:12]))
        assert got == layers[2].key.nbytes + layers[2].value.nbytes
        for whole, part in ((key, layers[2].key), (value, layers[2].value)):
            assert torch.equal(whole[:, 5:12], part)
            assert bool((whole[:, :5] == 7).all())
            assert bool((whole[:, 12:] == 7).all())


def test_wrong_targets_and_layers_are_refused(tmp_path, make_chunk):
    with reader_of(tmp_path, encode(KEY, make_chunk())) as reader:
        key, value = torch.empty(2, 7, 8).bfloat16(), torch.empty(2, 7, 4).bfloat16()
        for bad_key in (
            key.float(),
            key[:, :6],
            key.to("meta"),
            torch.empty(2, 8, 7).bfloat16().transpose(1, 2),
            torch.empty(1, 7, 8).bfloat16().expand(2, 7, 8),
            torch.empty(2, 7, 16).bfloat16()[:, :, ::2],
        ):
            with pytest.raises(ValueError, match=r"CPU tensor|contiguous"):
                reader.read_layer(0, reader.target(0, bad_key, value))
        for layer in (-1, 3):
            with pytest.raises(IndexError):
                reader.read_layer(layer, reader.target(layer, key, value))
            with pytest.raises(IndexError):
                reader.read_layer_kv(layer)
    assert reader.closed
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read_layer(0, reader.target(0, key, value))


def test_a_target_is_for_one_shape_dtype_and_length(tmp_path, make_chunk):
    layers = [*make_chunk(n_layers=1), *make_chunk(n_layers=1, key_dim=4)]
    others = [make_chunk(dtype=torch.float16), make_chunk(n_tokens=9)]
    with reader_of(tmp_path, encode(KEY, layers)) as reader:
        there = reader.read_layer_kv(0)
        with pytest.raises(ValueError, match="target is for"):
            reader.read_layer(1, reader.target(0, *there))
        for number, other in enumerate(others):
            (tmp_path / str(number)).mkdir()
            with reader_of(tmp_path / str(number), encode(KEY, other)) as another:
                foreign = another.target(0, *another.read_layer_kv(0))
                with pytest.raises(ValueError, match="target is for"):
                    reader.read_layer(0, foreign)
        assert reader.read_layer(0, reader.target(0, *there)) == there.key.nbytes + there.value.nbytes


def test_a_header_is_checked_once(tmp_path, make_chunk):
    data = encode(KEY, make_chunk(seed=77))
    hits = payload._parse_kept.cache_info().hits
    for _ in range(3):
        reader_of(tmp_path, data).close()
    assert payload._parse_kept.cache_info().hits == hits + 2


def test_equal_tensors_give_equal_bytes(make_chunk):
    strided = [LayerKV(k.transpose(0, 1).contiguous().transpose(0, 1), v) for k, v in make_chunk()]
    assert not strided[0].key.is_contiguous()
    assert len({encode(KEY, chunk) for chunk in (make_chunk(), make_chunk(), strided) for _ in range(5)}) == 1


def test_any_strides_and_gradients_are_written(tmp_path):
    odd = torch.as_strided(torch.randn(40), (2, 5, 1), (5, 1, 7))  # contiguous, says torch: sizes of 1 do not count
    wanted = torch.randn(2, 5, 3, requires_grad=True)
    with reader_of(tmp_path, encode(KEY, [LayerKV(odd, wanted)])) as reader:
        assert_same(reader, [LayerKV(odd, wanted.detach())])


def test_bytes_budget(make_chunk):
    layers = make_chunk(n_tokens=300, n_layers=30, kv_heads=3, key_dim=64, value_dim=64)
    raw = sum(key.nbytes + value.nbytes for key, value in layers)
    assert len(encode(KEY, layers)) <= 1.002 * raw


def test_safetensors_reads_it_in_layer_order(make_chunk):
    layers = make_chunk()
    data = encode(KEY, layers)
    tensors = load(data)
    assert list(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) == [
        "__metadata__",
        *(f"{index:03d}.{part}" for index in range(3) for part in ("key", "value")),
    ]
    assert torch.equal(tensors["002.value"], layers[2].value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n_tokens", [1, 7, 300])
def test_the_bytes_are_those_that_safetensors_writes(make_chunk, dtype, n_tokens):
    data = encode(KEY, make_chunk(n_tokens=n_tokens, dtype=dtype))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert data == save(load(data), metadata=header["__metadata__"])


def test_nothing_is_copied(make_chunk):
    layers = make_chunk()
    pieces = payload.encode(KEY, layers)[1:]
    layers[1].value.zero_()
    assert not any(pieces[3])
    assert any(pieces[1])


def test_malformed_kv_is_refused(make_chunk):
    (good,) = make_chunk(n_layers=1)
    for layers in (
        [],
        [LayerKV(good.key.double(), good.value.double())],
        [LayerKV(good.key, good.value.float())],
        [good, LayerKV(good.key.half(), good.value.half())],
        [LayerKV(good.key[:, :3], good.value)],
        [LayerKV(good.key[:1], good.value)],
        [good, LayerKV(good.key[:, :3], good.value[:, :3])],
        [LayerKV(good.key[:, :0], good.value[:, :0])],
        [LayerKV(good.key[:, :, :0], good.value)],
        [LayerKV(good.key[0], good.value[0])],
        [LayerKV(good.key[None], good.value[None])],
    ):
        with pytest.raises(InvalidSettingError):
            encode(KEY, layers)


def test_a_payload_under_another_key_is_corrupt(tmp_path, make_chunk):
    with pytest.raises(CorruptPayloadError, match="payload of"):
        reader_of(tmp_path, encode(KEY, make_chunk()), key="other")


def read_all(tmp_path: Path, data: bytes) -> list[LayerKV]:
    with reader_of(tmp_path, data) as reader:
        return [reader.read_layer_kv(index) for index in range(reader.n_layers)]


def test_every_damaged_byte_is_noticed(tmp_path, make_chunk):
    """Whatever byte it is, in the length, the header or the tensors."""
    data = encode(KEY, make_chunk(n_layers=2, n_tokens=2, kv_heads=1, key_dim=2, value_dim=2))
    for position in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            with pytest.raises(CorruptPayloadError) as caught:
                read_all(tmp_path, bytes(damaged))
            assert caught.value.key == KEY


def test_every_truncation_is_noticed(tmp_path, make_chunk):
    data = encode(KEY, make_chunk(n_layers=2, n_tokens=2, kv_heads=1, key_dim=2, value_dim=2))
    for size in range(len(data)):
        with pytest.raises(CorruptPayloadError):
            read_all(tmp_path, data[:size])
    with pytest.raises(CorruptPayloadError):
        read_all(tmp_path, data + b"\0")


@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=300), at=st.integers(0, 700), keep_tail=st.booleans())
def test_noise_never_reads_as_kv(tmp_path_factory, make_chunk, noise, at, keep_tail):
    layers = make_chunk(n_layers=1)
    data = encode(KEY, layers)
    damaged = data[:at] + noise + (data[at + len(noise) :] if keep_tail else b"")
    try:
        (got,) = read_all(tmp_path_factory.getbasetemp(), damaged)
    except CorruptPayloadError:
        assert damaged != data
    else:  # nothing changed, or white space by other white space
        assert torch.equal(got.key, layers[0].key)
        assert torch.equal(got.value, layers[0].value)


def forged(data: bytes, change) -> bytes:
    """The payload with its header JSON changed and its length field made right again."""
    header_bytes = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + header_bytes])
    text = change(entries)
    text = json.dumps(entries) if text is None else text
    return len(text).to_bytes(8, "little") + text.encode() + data[8 + header_bytes :]


def test_well_formed_lies_in_the_header_are_noticed(tmp_path, make_chunk):
    data = encode(KEY, make_chunk())

    def note(name, value):
        def change(entries):
            said = json.loads(entries["__metadata__"]["ragblend"])
            said[name] = value
            entries["__metadata__"]["ragblend"] = json.dumps(said)

        return change

    def entry(tensor, name, value):
        return lambda entries: entries[tensor].update({name: value})

    swapped = {"000.key": "000.value", "000.value": "000.key"}
    for change in (
        note("format", 2),
        note("format", True),
        note("tokens", 6),
        note("tokens", "7"),
        note("key", "other"),
        note("xxh3", ""),
        note("xxh3", "%%%"),
        entry("001.key", "shape", [2, 7, 4]),
        entry("001.key", "shape", [4, 7, 4]),
        entry("001.key", "shape", [7, 2, 8]),
        entry("001.key", "shape", [2, 7, 8.0]),
        entry("001.key", "shape", [2, 7, True]),
        entry("001.key", "shape", [-2, 7, -8]),
        entry("001.key", "shape", [2, 7, 1 << 70]),
        entry("001.key", "shape", "278"),
        entry("001.key", "dtype", "F16"),
        entry("001.key", "dtype", "I16"),
        entry("001.key", "data_offsets", [0, 224]),
        entry("001.key", "data_offsets", [336, 10**30]),
        lambda entries: [entries[name].update(dtype="F16") for name in list(entries)[1:]] and None,
        lambda entries: entries.pop("002.value") and None,
        lambda entries: entries.pop("__metadata__") and None,
        lambda entries: entries.update({"003.key": entries["002.key"]}),
        lambda entries: entries.update({"000.key": [1]}),
        lambda entries: json.dumps({swapped.get(name, name): value for name, value in entries.items()}),
        lambda entries: "[" * 50_000,
        lambda entries: "[]",
        lambda entries: "null",
        lambda entries: '{"__metadata__": ' + "9" * 5000 + "}",
        lambda entries: json.dumps(entries)[:-1] + ', "000.key": {}}',
    ):
        with pytest.raises(CorruptPayloadError):
            read_all(tmp_path, forged(data, change))
    assert len(read_all(tmp_path, forged(data, lambda entries: None))) == 3


def test_a_huge_header_length_is_not_allocated(tmp_path):
    for length in (2**63, 2**64 - 1, payload._MAX_HEADER_BYTES + 1):
        with pytest.raises(CorruptPayloadError, match="header length"):
            reader_of(tmp_path, length.to_bytes(8, "little") + b"{}" * 40)


def test_truncated_while_open(tmp_path, make_chunk):
    with reader_of(tmp_path, data := encode(KEY, make_chunk())) as reader:
        reader.read_layer_kv(2)
        os.truncate(tmp_path / "payload", len(data) - 3)
        reader.read_layer_kv(1)
        with pytest.raises(CorruptPayloadError, match="ends after"):
            reader.read_layer_kv(2)


def test_a_failing_disk_is_corrupt(tmp_path, make_chunk, monkeypatch):
    with reader_of(tmp_path, encode(KEY, make_chunk())) as reader:

        def fail(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CorruptPayloadError, match="Input/output"):
            reader.read_layer_kv(0)
        with pytest.raises(CorruptPayloadError, match="Input/output"):
            reader_of(tmp_path, encode(KEY, make_chunk()))


def test_a_forgotten_reader_closes_its_file(tmp_path, make_chunk):
    reader = reader_of(tmp_path, encode(KEY, make_chunk()))
    handle = reader._close.peek()[1].__self__
    assert not handle.closed
    del reader
    gc.collect()
    assert handle.closed


def test_a_refused_payload_closes_its_file(tmp_path):
    (tmp_path / "payload").write_bytes(b"nonsense")
    with open(tmp_path / "payload", "rb", buffering=0) as handle:
        with pytest.raises(CorruptPayloadError):
            PayloadReader(handle, KEY)
        assert handle.closed
