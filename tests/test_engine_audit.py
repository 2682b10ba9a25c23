"""Audits through the engine: what is found, what the guard does. Tiny models, real store."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_prefill import UntilClosed
from tiny_models import tiny_model
from tiny_tokenizers import BUILDERS

from ragblend import Audit, Chunk, RagBlend
from ragblend.audit import Audited, AuditLog, Guard
from ragblend.errors import InvalidSettingError
from ragblend.kv import LayerKV
from ragblend.model.decoder import Decoder
from ragblend.settings import EngineSettings
from ragblend.store.kvstore import KVStore

TEXTS = [
    "The lighthouse of Alden was built in the year 1871 by two sisters from the village.",
    "Copper turns green in sea air, because salt and water make a thin skin on the metal.",
    "A ferry leaves the old harbour at nine in the morning and comes back six at night.",
    "The museum keeps the lamp of the lighthouse; it burned oil from whales until 1902.",
]
ORDERS = [(2, 0, 1), (1, 3, 2), (3, 0, 2), (0, 1, 3), (2, 1, 0), (1, 0, 3)]
TOKENIZER = BUILDERS["chatml"]()


def engine_on(store: KVStore, *, decoder: Decoder | None = None, **settings: Any) -> RagBlend:
    return RagBlend(
        decoder or Decoder(tiny_model("llama", vocab=len(TOKENIZER))), TOKENIZER, store, EngineSettings(**settings)
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "kv") as made:
        yield made


def prompt(order: tuple[int, ...], question: object = "") -> list[str | Chunk]:
    return [*(part for n in order for part in (Chunk(TEXTS[n]), "\n")), f"Who built it, {question}?"]


def ask(engine: RagBlend, count: int, **how: Any) -> None:
    for number in range(count):
        engine.answer(prompt(ORDERS[number % len(ORDERS)], number), max_tokens=20, **how)
        engine.drain()


def test_an_audit_measures_what_was_decoded_from(store: KVStore) -> None:
    results: list[Audited] = []
    with engine_on(store, audit=Audit(share=1.0, max_kl=1e6, on_result=results.append)) as engine:
        engine.ingest(TEXTS)
        ask(engine, 3, ratio=0.0)
        assert len(results) == 3
        assert all(result.kl > 0 and result.ratio == 0.0 and not result.foreign for result in results)
        ask(engine, 1, ratio=1.0)  # nothing to audit in a full prefill
        assert len(results) == 3
        engine.answer(prompt((1, 2)), ratio=0.0, max_tokens=4, temperature=1.0, seed=1)
        engine.drain()
        assert results[-1].same_answer is None
        log = engine.audits()
        assert (log.audited, log.least_ratio, log.foreign) == (4, 0.0, 0)
        assert log.kl == pytest.approx(sum(result.kl for result in results) / 4)
        assert log.as_dict()["disagreed"] is not None


def test_what_is_recomputed_in_all_but_name_diverges_by_nothing(store: KVStore) -> None:
    results: list[Audited] = []
    with engine_on(store, audit=Audit(share=1.0, on_result=results.append)) as engine:
        engine.ingest(TEXTS)
        ask(engine, 2, ratio=0.9999)
    assert [result.kl < 1e-6 and result.same_answer for result in results] == [True, True]


def test_nothing_is_audited_unless_asked_for(store: KVStore) -> None:
    with engine_on(store) as engine:
        engine.ingest(TEXTS)
        ask(engine, 2)
        assert engine.audits() == AuditLog()


def test_the_share_is_kept_to(store: KVStore) -> None:
    guard = Guard(Audit(share=0.2))
    picked = 0
    for _ in range(2000):
        if guard.picks():
            picked += 1
            assert not guard.picks()  # one at a time
            guard.done()
    assert 300 < picked < 500


def planted(store: KVStore, how: str) -> None:
    """KV under the right names that was computed by slightly other weights, or behind another preamble."""
    with engine_on(store) as right:
        names = {}
        for text in TEXTS:
            right.ingest([text])
            names[text] = right.stored_variants(text)
        decoder = right.decoder
        if how == "weights":
            torch.manual_seed(1)
            model = copy.deepcopy(tiny_model("llama", vocab=len(TOKENIZER)))
            with torch.no_grad():
                for weights in model.parameters():
                    weights.mul_(1 + 0.01 * torch.randn_like(weights))
            decoder = Decoder(model)
        preamble = "" if how == "weights" else "Revision 2 of the preamble, with other words. "
        with engine_on(store, decoder=decoder, preamble=preamble) as wrong:
            wrong.ingest(TEXTS)
            for text in TEXTS:
                for name, key in wrong.stored_variants(text).items():
                    reader, note = store.open(key), store.notes([names[text][name]])[names[text][name]]
                    assert reader is not None
                    with reader:
                        layers = [reader.read_layer_kv(layer) for layer in range(decoder.n_layers)]
                    store.put(names[text][name], layers, note=note, overwrite=True)


@pytest.mark.parametrize("how", ["weights", "preamble"])
def test_a_planted_degradation_is_found(store: KVStore, how: str, caplog: pytest.LogCaptureFixture) -> None:
    planted(store, how)
    with engine_on(store, audit=Audit(share=0.2, max_kl=1e6), learn=False) as engine, caplog.at_level(logging.WARNING):
        ask(engine, 50, ratio=0.0)
        log = engine.audits()
        assert log.foreign >= 2
        assert log.least_ratio == 1.0
        assert "not what this model makes" in log.reason
        assert "prefilled in full" in caplog.text
        after = engine.answer(prompt(ORDERS[0]), ratio=0.0, max_tokens=2).report
        assert (after.least_ratio, after.ratio, after.reused_tokens) == (1.0, 1.0, 0)


def test_a_healthy_store_is_left_alone(store: KVStore) -> None:
    with engine_on(store, audit=Audit(share=1.0, max_kl=1e6)) as engine:
        engine.ingest(TEXTS)
        ask(engine, 12)
        assert (engine.audits().foreign, engine.audits().least_ratio) == (0, 0.0)
        assert len(store) == 2 * len(TEXTS)


def test_the_guard_raises_the_ratio_and_then_falls_back(store: KVStore) -> None:
    ratios: list[float] = []
    audit = Audit(share=1.0, max_kl=1e-12, window=5, on_result=lambda result: ratios.append(result.ratio))
    with engine_on(store, audit=audit) as engine:
        engine.ingest(TEXTS)
        ask(engine, 16, ratio=0.1)
        assert ratios == [0.1] * 5 + [0.3] * 5
        assert engine.audits().least_ratio == 1.0
        assert "nats" in engine.audits().reason


def test_chance_alone_moves_nothing() -> None:
    guard = Guard(Audit(share=1.0, max_kl=0.1))
    for n in range(50):  # a mean above the bound, by one outlier
        guard.note(Audited(6.0 if n == 0 else 0.0, 0.0, 1.0, True, 0.15))
    assert guard.least_ratio == 0.0
    for _ in range(50):
        guard.note(Audited(0.2, 0.0, 1.0, True, 0.15))
    assert guard.least_ratio >= 0.3


def test_answers_are_audited_for_ever_even_if_an_audit_fails(store: KVStore) -> None:
    def broken(_: Audited) -> None:
        raise ZeroDivisionError

    with engine_on(store, audit=Audit(share=1.0, on_result=broken)) as engine:
        engine.ingest(TEXTS)
        ask(engine, 3)
        assert engine.audits().audited == 3


def test_closing_waits_for_an_audit_for_a_while_only(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragblend.engine._AUDITED_AT_ONCE", 16)
    monkeypatch.setattr("ragblend.idle._PATIENCE_S", 0.0)
    engine = engine_on(store, audit=Audit(share=1.0))
    engine.ingest(TEXTS)
    slow = UntilClosed(engine)
    with engine.stream(prompt((2, 0, 1)), ratio=0.0, max_tokens=2) as stream:
        monkeypatch.setattr("ragblend.engine.prefill", slow)
        list(stream)
    assert slow.begun.wait(30)
    engine.close()
    assert slow.calls == 1
    assert engine.audits().audited == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": 0.0},
        {"share": 1.1},
        {"share": "x"},
        {"max_kl": 0.0},
        {"max_kl": float("nan")},
        {"max_kl": "x"},
        {"window": 1},
        {"window": "x"},
        {"on_result": 3},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError):
        Audit(**wrong)
    with pytest.raises(InvalidSettingError):
        EngineSettings(audit=0.1)  # type: ignore[arg-type]


def test_an_engine_that_is_let_go_of_is_collected(store: KVStore) -> None:
    engine = engine_on(store, audit=Audit(share=1.0))
    engine.ingest(TEXTS[:2])
    engine.answer(prompt((0, 1, 2)), ratio=0.0, max_tokens=2)  # learns, and is audited
    engine.drain()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_nothing_that_is_called_back_ends_the_audits(store: KVStore, error: type[BaseException]) -> None:
    engines: list[RagBlend] = []

    def on_result(_: Audited) -> None:
        engines[0].drain()  # does not wait for itself
        raise error

    with engine_on(store, audit=Audit(share=1.0, on_result=on_result)) as engine:
        engines.append(engine)
        engine.ingest(TEXTS)
        ask(engine, 2)
        assert engine.audits().audited == 2


@pytest.mark.parametrize("chosen", [float("nan"), -0.1, 1.1, "much", None])
def test_a_ratio_that_is_none_is_refused(store: KVStore, chosen: Any) -> None:
    with engine_on(store) as engine:
        engine.ingest(TEXTS)
        with pytest.raises(InvalidSettingError, match="from 0 to 1"):
            engine.answer(prompt((0, 1)), ratio=lambda scores, state: chosen)


def test_one_accident_on_the_disk_is_no_foreign_store(store: KVStore) -> None:
    """A chunk is one chunk, in however many variants it is stored."""
    with engine_on(store, audit=Audit(share=1.0, max_kl=1e6), learn=False) as engine:
        engine.ingest(TEXTS)
        keys = engine.stored_variants(TEXTS[0])
        assert len(keys) == 2
        for key in keys.values():
            reader, note = store.open(key), store.notes([key])[key]
            assert reader is not None
            with reader:
                layers = [reader.read_layer_kv(layer) for layer in range(reader.n_layers)]
            store.put(key, [LayerKV(kv.key * 1.5, kv.value) for kv in layers], note=note, overwrite=True)
        ask(engine, 24, ratio=0.0)
        assert (engine.audits().foreign, engine.audits().least_ratio) == (1, 0.0)
        assert not engine.stored_variants(TEXTS[0])


def test_a_payload_that_is_damaged_meanwhile_costs_no_audit(store: KVStore) -> None:
    results: list[Audited] = []
    with engine_on(store, audit=Audit(share=1.0, max_kl=1e6, on_result=results.append)) as engine:
        engine.ingest(TEXTS)
        with engine.stream(prompt((2, 0, 1)), ratio=0.0, max_tokens=2) as stream:
            for file in store.directory.rglob("*.safetensors"):
                size, header = file.stat().st_size, file.read_bytes()[:2048]
                file.write_bytes(header + bytes(size - len(header)))
            list(stream)
        engine.drain()
    assert [(result.kl > 0, result.foreign) for result in results] == [(True, ())]
