"""The part of what reused KV lacks that is the same for all tokens: measured at ingest, added when KV is loaded."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizers import BUILDERS
from torch import Tensor

from ragblend import Chunk, RagBlend
from ragblend.blend.drift import Deepened, Drift, Placed, measure, scale
from ragblend.blend.prefill import Plan
from ragblend.blend.variants import CONTEXT_TOKENS
from ragblend.kv import LayerKV, LayerShape
from ragblend.model.decoder import Decoder
from ragblend.settings import EngineSettings

HEAD = 10
LENGTHS = (400, 300, 200)
EXACT = 1e-4


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny_model("llama", vocab=len(BUILDERS["chatml"]())))


class Given:
    """KV that is at hand, as a source."""

    def __init__(self, layers: list[LayerKV]) -> None:
        self._layers = layers

    def layer(self, index: int) -> LayerKV:
        return self._layers[index]


def random_kv(shapes: Any, tokens: int, seed: int = 0) -> list[LayerKV]:
    made = torch.Generator().manual_seed(seed)
    return [
        LayerKV(torch.randn(heads, tokens, k, generator=made), torch.randn(heads, tokens, v, generator=made))
        for heads, k, v in shapes
    ]


def moved(layers: list[LayerKV], by: list[LayerKV], scales: Tensor) -> list[LayerKV]:
    """Each token's KV and what it would be where it stands. by: [heads, 1, dim] each. scales: [tokens]."""
    return [
        LayerKV(*(part + scales[None, :, None] * way for part, way in zip(layer, ways, strict=True)))
        for layer, ways in zip(layers, by, strict=True)
    ]


def plan_of(settled: int | None = None, shallow: int | None = None) -> tuple[Plan, list[tuple[int, int]]]:
    """Three chunks behind a head. settled, shallow: numbers of chunks that are."""
    chunks, at = [], HEAD
    for length in LENGTHS:
        chunks.append((at, at + length))
        at += length + 2
    masks = [torch.zeros(at + 5, dtype=torch.bool) for _ in range(4)]
    reused, settled_mask, unlike, shallow_mask = masks
    for n, (start, stop) in enumerate(chunks):
        reused[start:stop] = True
        settled_mask[start:stop] = n == settled
        shallow_mask[start:stop] = n == shallow
    ids = torch.zeros(at + 5, dtype=torch.int64)
    return Plan(ids, 0, reused, settled_mask, tuple(chunks), (at, at + 5), unlike, shallow_mask), chunks


@pytest.fixture
def no_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is taken as it is."""
    monkeypatch.setattr("ragblend.blend.drift._PRIOR_TOKENS", 0.0)


@pytest.mark.usefixtures("no_prior")
def test_what_all_tokens_lack_is_found_and_given_back(decoder: Decoder) -> None:
    plan, chunks = plan_of(shallow=1)
    scales = torch.cat(
        [torch.full((stop - start,), scale(start, HEAD, shallow=n == 1)) for n, (start, stop) in enumerate(chunks)]
    )
    way = random_kv(decoder.shapes, 1, seed=1)
    stored = random_kv(decoder.shapes, sum(LENGTHS))
    full = moved(stored, way, scales)
    drift = Drift(decoder.shapes)
    begin = 0
    for n, length in enumerate(LENGTHS):
        run = slice(begin, begin + length)
        parts = [[LayerKV(key[:, run], value[:, run]) for key, value in layers] for layers in (full, stored)]
        if n:  # the first stands where it was prefilled
            drift.add(n == 1, float(scales[begin]), *parts)
        begin += length
    assert drift.chunks == 2
    source = Deepened(Given(stored), drift, plan, HEAD, decoder)
    for layer, expected in enumerate(full):
        for found, right in zip(source.layer(layer), expected, strict=True):
            torch.testing.assert_close(found, right, atol=1e-4, rtol=0)


def test_what_is_settled_or_stands_no_deeper_is_left_as_it_is(decoder: Decoder) -> None:
    plan, _ = plan_of(settled=1)
    stored = random_kv(decoder.shapes, sum(LENGTHS))
    drift = Drift(decoder.shapes)
    drift.add(False, 1.0, random_kv(decoder.shapes, 7, seed=2), random_kv(decoder.shapes, 7, seed=3))
    found = Deepened(Given(stored), drift, plan, HEAD, decoder).layer(2)
    first, second = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    for now, then in zip(found, stored[2], strict=True):
        assert torch.equal(now[:, :second], then[:, :second])
        assert not torch.isclose(now[:, second:], then[:, second:]).all(dim=(0, 2)).any()
    nothing = Deepened(Given(stored), Drift(decoder.shapes), plan, HEAD, decoder).layer(2)
    assert torch.equal(nothing.key, stored[2].key)
    assert scale(HEAD + first, HEAD, shallow=False) > 0


def test_the_deeper_a_chunk_stands_the_more_it_lacks_up_to_all() -> None:
    behind = HEAD + CONTEXT_TOKENS
    scales = [scale(start, HEAD, shallow=False) for start in (0, HEAD, behind, 2 * behind, 4 * behind, 10**9)]
    assert scales[:3] == [0, 0, 0]
    assert scales[3:5] == [0.5, 0.75]
    assert scales[5] == pytest.approx(1)
    assert scale(0, 0, shallow=True) == 0
    assert scale(1, 0, shallow=True) == 1


def test_it_is_written_down_and_read_again(decoder: Decoder) -> None:
    drift = Drift(decoder.shapes)
    for shallow in (False, True):
        drift.add(shallow, 0.7, random_kv(decoder.shapes, 7, seed=2), random_kv(decoder.shapes, 7, seed=3))
    data = json.loads(json.dumps(drift.as_dict()))
    read = Drift.from_dict(data, decoder.shapes)
    assert read.measured
    assert read.chunks == 2
    for shallow in (False, True):
        assert read.knows(shallow)
        for now, then in zip(read.vectors(shallow), drift.vectors(shallow), strict=True):
            assert torch.equal(now.key, then.key)
            assert torch.equal(now.value, then.value)
    other = [LayerShape(2, 8, 8)] * 3
    damaged = [{}, data | {"version": 0}, data | {"sums": "AAAA"}, data | {"sums": 5}, data | {"weights": [1.0]}]
    damaged += [data | {"chunks": float("inf")}, data | {"chunks": -1}, data | {"weights": [float("nan"), 1.0]}]
    damaged += [data | {"weights": [10**400, 1.0]}, data | {"weights": [-1.0, 1.0]}]
    damaged += [data | {"sums": "f" * len(data["sums"])}]  # no numbers
    for wrong, shapes in [*((each, decoder.shapes) for each in damaged), (data, other)]:
        nothing = Drift.from_dict(wrong, shapes)
        assert not nothing.measured
        assert not nothing.knows(False)


def test_the_less_is_measured_the_less_is_done(decoder: Decoder) -> None:
    way = random_kv(decoder.shapes, 1, seed=1)
    taken = []
    for tokens in (30, 3000):
        stored = random_kv(decoder.shapes, tokens)
        drift = Drift(decoder.shapes)
        drift.add(False, 1.0, moved(stored, way, torch.ones(tokens)), stored)
        taken.append(float((drift.vectors(False)[1].key / way[1].key[:, 0]).mean()))
    assert 0.0 < taken[0] < 0.1
    assert 0.8 < taken[1] < 1.0


@pytest.mark.usefixtures("no_prior")
def test_measured_is_a_full_prefill_less_what_is_stored(decoder: Decoder) -> None:
    ids = torch.randint(5, 200, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    zero = [LayerKV(torch.zeros(h, 80, k), torch.zeros(h, 80, v)) for h, k, v in decoder.shapes]
    drift = Drift(decoder.shapes)
    measure(drift, decoder, ids, HEAD, [Placed(HEAD, HEAD + 80, False, zero), Placed(420, 500, False, zero)])
    assert drift.chunks == 1, "the first stands no deeper than it was prefilled"
    with torch.inference_mode():
        own = decoder.model(torch.tensor([ids]), use_cache=True).past_key_values
    vectors = drift.vectors(False)
    for layer in range(decoder.n_layers):
        value = own.layers[layer].values[0, :, 420:].mean(1) / scale(420, HEAD, shallow=False)
        torch.testing.assert_close(vectors[layer].value, value, atol=1e-3, rtol=0)


WORDS = ["harbour", "lamp", "stone", "rain", "bread", "copper", "ferry", "owl", "glass", "winter", "storm", "rope"]


def texts(count: int) -> list[str]:
    """Long ones that have nothing in common."""
    rng = random.Random(0)
    return [" ".join(f"{rng.choice(WORDS)}{rng.randrange(10**6)}" for _ in range(16)) for _ in range(count)]


def make(decoder: Decoder, folder: Path, **settings: Any) -> RagBlend:
    how: dict[str, Any] = {"policy": "system", "preamble": "Read this.\n\n", "prefix_cache_bytes": 0, "learn": False}
    return RagBlend(decoder, BUILDERS["chatml"](), folder, EngineSettings(**how | settings))


def test_an_engine_measures_it_once_and_keeps_it_with_the_store(decoder: Decoder, tmp_path: Path) -> None:
    given = texts(60)
    with make(decoder, tmp_path / "kv") as engine:
        assert engine.chunks.drift is not None
        engine.ingest(given[:3])
        assert not engine.chunks.drift.measured, "too little to tell"
        report = engine.ingest(given)
        known = engine.chunks.drift
        assert known.measured
        assert known.chunks > 10
        assert report.drift_s > 0
        asked = [part for text in given[5:8] for part in (Chunk(text), "\n\n")]
        blended = engine.prefill(["Read this.\n\n", *asked, "What now?"], ratio=0.0)
        exact = engine.prefill(["Read this.\n\n", *asked, "What now?"], ratio=1.0)
    with make(decoder, tmp_path / "kv") as again:
        assert again.chunks.drift_known == known.chunks
        assert again.ingest(given).drift_s < report.drift_s
        assert torch.equal(again.prefill(["Read this.\n\n", *asked, "What now?"], ratio=0.0).logits, blended.logits)
    with make(decoder, tmp_path / "kv", correct_drift=False) as plain:
        assert plain.chunks.drift is None
        left = plain.prefill(["Read this.\n\n", *asked, "What now?"], ratio=0.0)
        assert not torch.allclose(left.logits, blended.logits, atol=EXACT)
        full = plain.prefill(["Read this.\n\n", *asked, "What now?"], ratio=1.0)
        torch.testing.assert_close(full.logits, exact.logits, atol=EXACT, rtol=0)
        # The first chunk stands where it was prefilled, and is exact with it and without.
        stop = left.report.chunks[0].stop
        for way in (blended, left):
            for layer in range(decoder.n_layers):
                for now, right in zip(
                    way.cache.read(layer, slice(stop)), full.cache.read(layer, slice(stop)), strict=True
                ):
                    torch.testing.assert_close(now, right, atol=EXACT, rtol=0)
    with make(decoder, tmp_path / "kv", namespace="others") as others:
        assert others.chunks.drift_known == 0


def test_a_damaged_record_of_it_is_measured_again(
    decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = texts(60)
    with make(decoder, tmp_path / "kv") as engine:
        engine.ingest(given)
        known = engine.chunks.drift_known
    (record,) = (tmp_path / "kv").glob("drift_*.json")
    record.write_text(record.read_text()[:100])
    with make(decoder, tmp_path / "kv") as again, caplog.at_level(logging.WARNING):
        assert again.chunks.drift_known == 0
        assert again.ingest(given).drift_s > 0
        assert again.chunks.drift_known == known
    assert json.loads(record.read_text())["chunks"] == known


def test_the_sample_is_looked_for_again_when_there_may_be_one(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = texts(60)
    with make(decoder, tmp_path / "kv") as engine:
        looked: list[int] = []
        remembered = engine.store.remembered

        def noted() -> list[bytes]:
            looked.append(len(found := remembered()))
            return found

        monkeypatch.setattr(engine.store, "remembered", noted)
        for text in [*given[:2], *given[:2]]:
            engine.ingest([text])
        assert looked == [1], "what is there has to be looked at once"
        with pytest.raises(KeyboardInterrupt):
            engine.ingest(given, progress=interrupt)
        assert not engine.ingest(given[:30]).computed
        assert looked == [1, len(given)]
        assert engine.chunks.drift_known > 10


def interrupt(done: int) -> None:
    if done == 60:
        raise KeyboardInterrupt


def test_where_little_could_be_measured_it_is_measured_again_when_the_store_has_doubled(
    decoder: Decoder, tmp_path: Path
) -> None:
    body, *others = texts(180)
    copies = [f"{body} {n}" for n in range(60)]
    with make(decoder, tmp_path / "kv") as engine:
        assert engine.ingest(copies).drift_s > 0
        assert engine.chunks.drift is not None
        assert engine.chunks.drift.measured
        assert engine.chunks.drift_known == 0, "near copies tell nothing of how other text drifts"
    with make(decoder, tmp_path / "kv") as again, make(decoder, tmp_path / "kv") as serving:
        again.ingest(others[:50])
        assert again.chunks.drift_known == 0, "not half of it is new"
        again.ingest(others[50:])
        known = again.chunks.drift_known
        assert known > 10
        serving.answer([Chunk(copies[0]), "hello"], max_tokens=1)
        assert serving.chunks.drift_known == known
        again.ingest(texts(600))
        assert again.chunks.drift_known == known, "that was enough"


def test_another_process_has_what_was_measured_by_the_time_it_asks(decoder: Decoder, tmp_path: Path) -> None:
    given = texts(60)
    with make(decoder, tmp_path / "kv") as serving:
        serving.answer("hello", max_tokens=1)
        with make(decoder, tmp_path / "kv") as ingesting:
            ingesting.ingest(given)
        serving.answer([Chunk(given[0]), "hello"], max_tokens=1)
        assert serving.chunks.drift_known > 0


def test_another_process_that_asks_while_it_is_measured_has_it_afterwards(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = texts(60)
    with make(decoder, tmp_path / "kv") as serving, make(decoder, tmp_path / "kv") as ingesting:
        save = ingesting.store.save_document

        def asked_before(name: str, content: Any) -> None:
            serving.answer([Chunk(given[0]), "hello"], max_tokens=1)
            save(name, content)

        monkeypatch.setattr(ingesting.store, "save_document", asked_before)
        ingesting.ingest(given)
        serving.answer([Chunk(given[0]), "hello"], max_tokens=1)
        assert serving.chunks.drift_known == ingesting.chunks.drift_known > 0


def test_who_asks_while_it_is_measured_here_does_not_undo_it(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(decoder, tmp_path / "kv") as engine:
        chunks = engine.chunks
        engine.ingest(texts(3))
        measured = Drift(decoder.shapes)
        measured.measured = True

        def slow(*_: object) -> dict[str, Any]:
            chunks.drift = measured  # by another thread, after nothing was found to read
            return {}

        monkeypatch.setattr(engine.store, "document", slow)
        monkeypatch.setattr(chunks, "_drift_stamp", (0,), raising=False)
        monkeypatch.setattr(chunks, "_index_version", -1)
        chunks.known_texts()
        assert chunks.drift is measured


def test_a_callers_autocast_and_default_dtype_leave_it_as_it_is(decoder: Decoder, tmp_path: Path) -> None:
    plan, _ = plan_of(settled=1)
    stored = random_kv(decoder.shapes, sum(LENGTHS))
    torch.set_default_dtype(torch.bfloat16)
    try:
        drift = Drift(decoder.shapes)
        drift.add(False, 1.0, random_kv(decoder.shapes, 7, seed=2), random_kv(decoder.shapes, 7, seed=3))
        assert Drift.from_dict(drift.as_dict(), decoder.shapes).measured
        source = Deepened(Given(stored), drift, plan, HEAD, decoder)
    finally:
        torch.set_default_dtype(torch.float32)
    right = source.layer(2)
    with torch.autocast("cpu", torch.bfloat16):
        found = source.layer(2)
    for now, plain in zip(found, right, strict=True):
        assert now.dtype == torch.float32
        assert torch.equal(now, plain)


def test_a_chunk_whose_numbers_have_overflown_does_not_count(decoder: Decoder) -> None:
    drift = Drift(decoder.shapes)
    broken = random_kv(decoder.shapes, 7)
    broken[1].value[0, 3, 2] = float("inf")
    drift.add(False, 1.0, broken, random_kv(decoder.shapes, 7))
    assert not drift.knows(False)
    assert drift.chunks == 0
    drift.add(False, 1.0, random_kv(decoder.shapes, 7, seed=2), random_kv(decoder.shapes, 7))
    assert drift.chunks == 1
    assert all(bool(torch.isfinite(part).all()) for layer in drift.vectors(False) for part in layer)


def test_chunks_of_which_two_are_longer_than_a_prompt_should_be_are_measured(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = texts(60)
    with make(decoder, tmp_path / "kv") as engine:
        longest = max(len(engine.prompts.encode_text(text)) for text in given)
        monkeypatch.setattr("ragblend.chunks.PROMPT_TOKENS", longest + len(engine.preamble_ids) + 2)
        engine.ingest(given)
        assert engine.chunks.drift_known > 10


def test_what_was_calibrated_with_it_is_not_taken_without_it(decoder: Decoder, tmp_path: Path) -> None:
    with make(decoder, tmp_path / "kv") as engine:
        engine.store.save_document("calibration_" + engine._blending, {"for": "corrected"})
        assert engine.calibration
    with make(decoder, tmp_path / "kv", correct_drift=False) as plain:
        assert not plain.calibration
