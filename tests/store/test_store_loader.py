"""The loader streams what direct reads give, and cleans up however it is left."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragblend.errors import CorruptPayloadError
from ragblend.kv import LayerKV
from ragblend.store import loader as loader_module
from ragblend.store.kvstore import KVStore
from ragblend.store.loader import LayerLoader
from ragblend.store.payload import PayloadReader

N_LAYERS = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mixed_chunk(make_chunk, seed: int, n_tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[LayerKV]:
    """Layers 0, 3, 4 and 1, 2 of different shapes: each of the two buffer sets sees both."""
    one = make_chunk(seed, n_tokens=n_tokens, n_layers=3, dtype=dtype)
    two = make_chunk(seed + 100, n_tokens=n_tokens, n_layers=2, kv_heads=3, key_dim=4, value_dim=16, dtype=dtype)
    return [one[0], two[0], two[1], one[1], one[2]]


@pytest.fixture(scope="module")
def chunks(make_chunk) -> list[list[LayerKV]]:
    return [mixed_chunk(make_chunk, seed, n_tokens=3 + 2 * seed) for seed in range(4)]


@pytest.fixture(scope="module")
def readers(tmp_path_factory, chunks):
    with KVStore(tmp_path_factory.mktemp("loader") / "store") as store:
        for index, chunk in enumerate(chunks):
            store.put(str(index), chunk)
        found = [reader for reader, _ in store.open_many([str(index) for index in range(len(chunks))])]
    yield found
    for reader in found:
        reader.close()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "ragblend-loader"]


def load_all(readers, dtype=torch.bfloat16) -> list[LayerKV]:
    with LayerLoader(readers, device="cpu", dtype=dtype) as loader:
        return [
            LayerKV(key.clone(), value.clone())
            for key, value in (loader.layer(index) for index in range(loader.n_layers))
        ]


@settings(max_examples=40, deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=7), dtype=st.sampled_from(DTYPES))
def test_equals_direct_reads_for_any_order_and_repeats(readers, chunks, order, dtype):
    got = load_all([readers[index] for index in order], dtype)
    assert len(got) == N_LAYERS
    for index, (key, value) in enumerate(got):
        assert torch.equal(key, torch.cat([chunks[chunk][index].key for chunk in order], dim=1).to(dtype))
        assert torch.equal(value, torch.cat([chunks[chunk][index].value for chunk in order], dim=1).to(dtype))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_beginnings_of_payloads(readers, chunks, data, dtype):
    order = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    tokens = [data.draw(st.integers(1, chunks[index][0].n_tokens)) for index in order]
    with LayerLoader([readers[index] for index in order], device="cpu", dtype=dtype, tokens=tokens) as loader:
        assert loader.n_tokens == sum(tokens)
        for layer in range(N_LAYERS):
            key, value = loader.layer(layer)
            parts = [(chunks[chunk][layer], wanted) for chunk, wanted in zip(order, tokens, strict=True)]
            assert torch.equal(key, torch.cat([kv.key[:, :wanted] for kv, wanted in parts], dim=1).to(dtype))
            assert torch.equal(value, torch.cat([kv.value[:, :wanted] for kv, wanted in parts], dim=1).to(dtype))


@pytest.mark.parametrize("tokens", [[0], [4], [-1]], ids=str)
def test_more_tokens_than_there_are(readers, tokens):
    with pytest.raises(ValueError, match="of a payload of 3"):
        LayerLoader(readers[:1], device="cpu", dtype=torch.bfloat16, tokens=tokens)


def test_payloads_of_different_dtypes_mix(tmp_path, make_chunk):
    with KVStore(tmp_path) as store:
        for dtype in DTYPES:
            store.put(str(dtype), mixed_chunk(make_chunk, 1, n_tokens=4, dtype=dtype))
        opened = [reader for reader, _ in store.open_many([str(dtype) for dtype in DTYPES])]
    for got, layer in zip(load_all(opened), mixed_chunk(make_chunk, 1, 4, torch.float32), strict=True):
        assert torch.equal(got.key[:, 8:], layer.key.bfloat16())
        assert torch.equal(got.key[:, :4], got.key[:, 8:])
    for reader in opened:
        reader.close()


def test_no_readers():
    with LayerLoader([], device="cpu", dtype=torch.float32) as loader:
        assert (loader.n_layers, loader.n_tokens) == (0, 0)
        with pytest.raises(RuntimeError):
            loader.layer(0)


def test_in_order_and_inside_the_context_only(readers):
    loader = LayerLoader(readers, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="context"):
        loader.layer(0)
    with loader:
        for wrong in (1, -1, N_LAYERS):
            with pytest.raises(RuntimeError, match="comes next"):
                loader.layer(wrong)
        first = loader.layer(0).key.clone()
        for wrong in (0, 2):
            with pytest.raises(RuntimeError, match="comes next"):
                loader.layer(wrong)
        for index in range(1, N_LAYERS):
            loader.layer(index)
        with pytest.raises(RuntimeError, match="comes next"):
            loader.layer(N_LAYERS)
    with pytest.raises(RuntimeError, match="context"):
        loader.layer(0)
    with pytest.raises(RuntimeError, match="once"):
        loader.__enter__()
    assert first.shape[1] == loader.n_tokens


def test_a_layer_stays_valid_until_the_next_is_asked_for(readers, chunks):
    with LayerLoader(readers[:2], device="cpu", dtype=torch.bfloat16) as loader:
        for index in range(N_LAYERS):
            key, _ = loader.layer(index)
            time.sleep(0.02)  # the thread has all the time to overwrite it
            assert torch.equal(key, torch.cat([chunk[index].key for chunk in chunks[:2]], dim=1))


def test_only_two_buffer_sets_are_used(readers):
    seen = set()
    with LayerLoader(readers, device="cpu", dtype=torch.bfloat16) as loader:
        for index in range(N_LAYERS):
            seen.add(loader.layer(index).key.data_ptr())
    assert len(seen) == 2


def test_counts(readers, chunks):
    with LayerLoader([*readers, readers[0]], device="cpu", dtype=torch.float32) as loader:
        for index in range(N_LAYERS):
            loader.layer(index)
    read = [*chunks, chunks[0]]
    assert loader.bytes_read == sum(key.nbytes + value.nbytes for chunk in read for key, value in chunk)
    assert loader.load_s > 0


def test_a_slow_disk_is_waited_for_and_counted(readers, monkeypatch):
    read = PayloadReader.read_layer

    def slowly(self, *args):
        time.sleep(0.02)
        return read(self, *args)

    monkeypatch.setattr(PayloadReader, "read_layer", slowly)
    began = time.perf_counter()
    with LayerLoader(readers[:1], device="cpu", dtype=torch.bfloat16) as loader:
        for index in range(N_LAYERS):
            loader.layer(index)
    took = time.perf_counter() - began
    assert 0.02 * N_LAYERS * 0.8 < loader.stall_s <= took
    assert 0.02 * N_LAYERS <= loader.load_s <= took


def test_a_slow_consumer_does_not_wait(readers, monkeypatch):
    read = PayloadReader.read_layer

    def slowly(self, *args):
        time.sleep(0.01)
        return read(self, *args)

    monkeypatch.setattr(PayloadReader, "read_layer", slowly)
    with LayerLoader(readers[:1], device="cpu", dtype=torch.bfloat16) as loader:
        for index in range(N_LAYERS):
            loader.layer(index)
            time.sleep(0.06)
    assert loader.stall_s < loader.load_s / 2  # the first layer, which nothing could hide


def fail_at(monkeypatch, layer: int, error: BaseException) -> None:
    read = PayloadReader.read_layer

    def failing(self, index, target):
        if index == layer:
            raise error
        return read(self, index, target)

    monkeypatch.setattr(PayloadReader, "read_layer", failing)


@pytest.mark.parametrize("error", [CorruptPayloadError("k", "why"), KeyError("bug"), SystemExit(3)])
@pytest.mark.parametrize("layer", [0, 2])
def test_an_error_of_the_thread_is_raised_in_its_layer(readers, monkeypatch, error, layer):
    fail_at(monkeypatch, layer, error)
    with LayerLoader(readers, device="cpu", dtype=torch.bfloat16) as loader:
        for index in range(layer):
            loader.layer(index)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                loader.layer(layer)
            assert caught.value is error


def test_a_damaged_payload_is_named(tmp_path, make_chunk):
    with KVStore(tmp_path) as store:
        store.put("good", make_chunk(1))
        store.put("damaged", make_chunk(2, n_tokens=9))
        (path,) = (file for file in (tmp_path / "kv").glob("*.safetensors") if b"damaged" in file.read_bytes())
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        opened = [reader for reader, _ in store.open_many(["good", "damaged", "good"])]
        with LayerLoader(opened, device="cpu", dtype=torch.bfloat16) as loader:
            loader.layer(0)
            loader.layer(1)
            with pytest.raises(CorruptPayloadError) as caught:
                loader.layer(2)
        assert caught.value.key == "damaged"
        for reader in opened:
            reader.close()


def test_payloads_of_different_models_are_refused(tmp_path, make_chunk):
    with KVStore(tmp_path) as store:
        store.put("a", make_chunk(1))
        store.put("b", make_chunk(1, key_dim=4))
        opened = [reader for reader, _ in store.open_many(["a", "b"])]
    with pytest.raises(CorruptPayloadError) as caught:
        LayerLoader(opened, device="cpu", dtype=torch.bfloat16)
    assert caught.value.key == "b"
    for reader in opened:
        reader.close()


def test_other_devices_are_refused(readers):
    with pytest.raises(ValueError, match="meta"):
        LayerLoader(readers, device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize("after", range(N_LAYERS + 1))
@pytest.mark.parametrize("how", ["leave", "raise", "damage"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_leaving_at_any_time_joins_and_frees(readers, monkeypatch, after, how, dtype):
    made: list[weakref.ref] = []
    make, target = loader_module._Buffers, PayloadReader.target

    def remembered(*args):
        buffers = make(*args)
        made.extend(weakref.ref(part) for part in (buffers, *buffers.host))
        return buffers

    def taken_apart(self, *args):
        found = target(self, *args)
        made.extend(weakref.ref(part) for part in (*found.key, *found.value))
        return found

    monkeypatch.setattr(loader_module, "_Buffers", remembered)
    monkeypatch.setattr(PayloadReader, "target", taken_apart)
    kept: BaseException | None = None
    if how == "damage":
        fail_at(monkeypatch, after, CorruptPayloadError("k", "why"))
    loader = LayerLoader(readers, device="cpu", dtype=dtype)
    try:
        with loader:
            for index in range(after):
                loader.layer(index)
            if how == "damage" and after < N_LAYERS:
                loader.layer(after)
            if how == "raise":
                raise KeyError("the consumer's own error")
    except (KeyError, CorruptPayloadError) as error:
        kept = error
    assert made
    gc.collect()
    assert not [ref for ref in made if ref() is not None], "buffers outlive the context, held by the loader or an error"
    assert (kept is None) == (how == "leave" or (how == "damage" and after == N_LAYERS))


def test_memory_is_taken_apart_once_for_a_buffer_set(readers, monkeypatch):
    calls = []
    target = PayloadReader.target
    monkeypatch.setattr(PayloadReader, "target", lambda *args: calls.append(args[1]) or target(*args))
    load_all(readers)
    assert len(calls) == len(readers) * 2 * 2  # shapes, buffer sets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [None, 2])
def test_a_consumer_in_inference_mode(readers, chunks, dtype, tokens):
    """Its buffers are tensors that only inference mode may write to, in the thread, too."""
    wanted = None if tokens is None else [tokens] * len(readers)
    with torch.inference_mode(), LayerLoader(readers, device="cpu", dtype=dtype, tokens=wanted) as loader:
        for index in range(N_LAYERS):
            got = loader.layer(index).key.clone()
            assert torch.equal(got, torch.cat([chunk[index].key[:, :tokens] for chunk in chunks], 1).to(dtype))


def test_leaving_while_the_thread_reads(readers, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    read = PayloadReader.read_layer
    calls = []

    def blocking(self, *args):
        calls.append(self)
        inside.set()
        assert go_on.wait(10)
        return read(self, *args)

    monkeypatch.setattr(PayloadReader, "read_layer", blocking)
    with LayerLoader(readers, device="cpu", dtype=torch.bfloat16):
        assert inside.wait(10)
        threading.Timer(0.05, go_on.set).start()
    assert len(calls) == 1  # it finished the read it was in and started no other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu(readers, chunks):
    order = [2, 0, 0, 3, 1]
    for _ in range(5):
        with LayerLoader([readers[index] for index in order], device="cuda", dtype=torch.float32) as loader:
            for index in range(N_LAYERS):
                key, value = loader.layer(index)
                # Work in the consumer's stream that is still reading while the next layers are being loaded.
                torch.cuda._sleep(2_000_000)
                got_key, got_value = key * 1, value * 1
                want = [torch.cat([chunks[chunk][index][part] for chunk in order], dim=1).float() for part in (0, 1)]
                assert torch.equal(got_key.cpu(), want[0])
                assert torch.equal(got_value.cpu(), want[1])
