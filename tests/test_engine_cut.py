"""Chunks of which a prompt holds the beginning only: reused as far as they go, and never further."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import own_logits, tiny_model
from tiny_tokenizers import BUILDERS

from ragblend import Chunk, Message, RagBlend
from ragblend.blend.selectors import RecomputeNone
from ragblend.engine import Ready
from ragblend.prompt.layout import lay_out
from ragblend.settings import EngineSettings

HEAD = "Read this.\n\n"
LIGHTHOUSE = (
    "The lighthouse of Alden was built in the year 1871 by two sisters from the village. Its lamp burned oil from "
    "whales until 1902; then the electric light came, and with it a keeper who could read."
)
COPPER = (
    "Copper turns green in sea air, because salt and water make a thin skin on the metal. The roof of the lighthouse "
    "is of copper, and so are the pipes that lead the rain into the well."
)
FERRY = (
    "A ferry leaves the old harbour at nine in the morning and comes back at six at night. Who misses it may walk: the "
    "path along the cliffs takes four hours, and is closed when the wind blows from the west."
)
TEXTS = [LIGHTHOUSE, COPPER, FERRY]
QUESTION = "\n\nWho built the lighthouse?"
EXACT = 1e-4  # of logits in fp32


def make_engine(folder: Path, family: str = "llama", seed: int = 0, **settings: Any) -> RagBlend:
    tokenizer = BUILDERS["chatml"]()
    how = {"preamble": HEAD, "prefix_cache_bytes": 0, **settings}
    return RagBlend(tiny_model(family, len(tokenizer), seed), tokenizer, folder, EngineSettings(**how))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagBlend]:
    with make_engine(tmp_path_factory.mktemp("cut") / "kv", learn=False) as made:
        made.ingest(TEXTS, neighbours=[[COPPER], [FERRY], [LIGHTHOUSE]])
        yield made


def statuses(ready: Ready) -> list[str]:
    return [use.status for use in ready.report.chunks]


def own_forward(engine: RagBlend, family: str, ready: Ready) -> torch.Tensor:
    """[vocab] logits of the last token, by transformers alone."""
    return own_logits(family, ready.ids, len(engine.tokenizer))[-1]


def test_a_cut_chunk_is_read_under_the_whole_ones_key(engine: RagBlend) -> None:
    ready = engine.prefill(f"{HEAD}{COPPER}\n\n{FERRY[:120]}\n\n{LIGHTHOUSE[:90]}{QUESTION}")
    report = ready.report
    assert statuses(ready) == ["hit", "cut", "cut"]
    assert (report.hits, report.cuts, report.misses) == (1, 2, 0)
    for use, text in zip(report.chunks, (COPPER, FERRY, LIGHTHOUSE), strict=True):
        assert use.key in engine.stored_variants(text).values()
        ids = engine.prompts.encode_text(text)
        assert ready.ids[use.start : use.stop].tolist() == ids[: use.stop - use.start]
    assert report.reused_tokens == sum(use.stop - use.start for use in report.chunks)
    assert report.prompt_tokens == report.prefix_tokens + report.reused_tokens + report.fresh_tokens
    assert [use.variant for use in report.chunks] == ["head", "neighbour", "neighbour"]
    assert engine.prefill(f"{HEAD}{FERRY[:120]}{QUESTION}").report.chunks[0].variant == "head"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "llama-yarn"])
def test_a_cut_chunk_behind_its_own_context_is_the_stock_prefix(tmp_path: Path, family: str) -> None:
    """Ratio 0, and yet exact: what a token's KV is does not depend on what follows."""
    with make_engine(tmp_path / "kv", family) as engine:
        engine.ingest(TEXTS)
        for stop in (70, 125, len(COPPER) - 1):
            prompt = f"{HEAD}{COPPER[:stop]}{QUESTION}"
            ready, full = (engine.prefill(prompt, ratio=ratio, selector=RecomputeNone()) for ratio in (0.0, 1.0))
            assert (statuses(ready), statuses(full)) == (["cut"], ["recomputed"])
            assert ready.report.reused_tokens > 16
            assert (ready.logits - own_forward(engine, family, ready)).abs().max() < EXACT
            for layer in range(engine.decoder.n_layers):
                for got, want in zip(
                    *(each.cache.read(layer, slice(0, len(ready.ids))) for each in (ready, full)), strict=True
                ):
                    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_ratio_one_is_a_full_prefill(engine: RagBlend) -> None:
    prompt = f"Well. {FERRY[:120]}\n\n{COPPER}\n\n{LIGHTHOUSE[:90]}{QUESTION}"
    full = engine.prefill(prompt, ratio=1.0)
    assert statuses(full) == ["recomputed"] * 3
    assert (full.logits - own_forward(engine, "llama", full)).abs().max() < EXACT
    # All but nothing is the same loop with the stored KV overwritten.
    almost = engine.prefill(prompt, ratio=0.9999)
    assert statuses(almost) == ["cut", "hit", "cut"]
    assert almost.report.recomputed_tokens == almost.report.reused_tokens
    assert (almost.logits - full.logits).abs().max() < EXACT


part = st.one_of(
    st.sampled_from(TEXTS),
    st.tuples(st.sampled_from(TEXTS), st.integers(40, 200)).map(lambda cut: cut[0][: cut[1]]),
    st.tuples(st.sampled_from(TEXTS), st.integers(60, 150)).map(lambda at: f"{at[0][: at[1]]}#{at[0][at[1] + 1 :]}"),
    st.tuples(st.sampled_from(TEXTS), st.integers(1, 100)).map(lambda cut: cut[0][cut[1] :]),
    st.text(alphabet="aeiou \n<|>_", max_size=9),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(part, min_size=1, max_size=4), st.sampled_from(["", "\n\n", "x", " - "]))
def test_never_a_wrong_token_is_reused(engine: RagBlend, parts: list[str], glue: str) -> None:
    """In the first layer the KV of a token depends on the token alone, so that a wrong one would be seen there."""
    prompt = glue.join(parts) + QUESTION
    ready, full = (engine.prefill(prompt, ratio=ratio, selector=RecomputeNone()) for ratio in (0.0, 1.0))
    assert torch.equal(ready.ids, full.ids)
    assert set(statuses(ready)) <= {"hit", "cut"}
    everywhere = slice(0, len(ready.ids))
    for got, want in zip(ready.cache.read(0, everywhere), full.cache.read(0, everywhere), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    layout = lay_out(engine.prompts, prompt, engine.chunks.known_texts(), engine.chunks.texts_of)
    for span in layout.chunks:
        assert any(layout.ids_of(span).tolist() == engine.prompts.encode_text(text)[: len(span)] for text in TEXTS), (
            span
        )


def test_a_prefix_in_ram_may_end_inside_a_cut_chunk(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv", prefix_cache_bytes=1 << 26) as engine:
        engine.ingest(TEXTS)
        cut = f"{HEAD}{COPPER}\n\n{FERRY[:150]}\n\nAnswer in a few words, and say where it stands.\n"
        engine.answer(cut + "Who?", ratio=1.0, max_tokens=1)
        again = engine.answer(cut + "When does it leave, and where to?", ratio=0.0, max_tokens=1).report
        assert [use.status for use in again.chunks] == ["prefix", "prefix"]
        other = engine.answer(f"{HEAD}{COPPER}\n\n{FERRY[:100]}\n\nWhen?", ratio=0.0, max_tokens=1).report
        assert [use.status for use in other.chunks] == ["prefix", "cut"]
        assert other.prefix_tokens == other.chunks[1].start


def test_cut_chunks_are_not_learned(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv") as engine:
        engine.ingest(TEXTS)
        keys = engine.store.keys()
        engine.answer(f"{FERRY[:120]}{QUESTION}", max_tokens=1)
        engine.drain()
        assert engine.store.keys() == keys


def test_what_is_learned_is_found_where_it_is_cut(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv") as engine:
        assert engine.answer(["So: ", Chunk(FERRY), QUESTION], max_tokens=1).report.misses == 1
        engine.drain()
        assert statuses(engine.prefill(f"So: {FERRY[:120]}{QUESTION}")) == ["cut"]


def test_a_cut_chunk_whose_kv_is_gone_or_anothers_is_text(tmp_path: Path) -> None:
    prompt = f"So: {FERRY[:120]}{QUESTION}"
    with make_engine(tmp_path / "kv") as engine, make_engine(tmp_path / "kv", seed=1) as other:
        engine.ingest([FERRY])
        assert statuses(other.prefill(prompt)) == []
        assert statuses(engine.prefill(prompt)) == ["cut"]
        stored = engine.store.keys()
        for key in stored:
            engine.store.delete(key)
        assert statuses(engine.prefill(prompt)) == []


def test_a_corrupt_payload_is_a_miss_for_cut_chunks_too(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv", policy="system") as engine:
        engine.ingest([FERRY])
        prompt = f"So: {FERRY[:120]}{QUESTION}"
        expected = engine.answer(prompt, ratio=1.0, max_tokens=4).token_ids
        (path,) = engine.store.directory.rglob("*.safetensors")
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        answer = engine.answer(prompt, ratio=0.0, max_tokens=4)
        assert [use.status for use in answer.report.chunks] == ["corrupt"]
        assert answer.token_ids == expected
        engine.drain()
        assert len(engine.store) == 0, "a cut chunk is not learned"


def test_records_that_others_left_do_no_harm(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv") as engine:
        engine.store.remember([b"x" * 28, b"y", bytes(16)])
        engine.ingest([FERRY])
        assert statuses(engine.prefill([Message("user", f"{FERRY}{QUESTION}")])) == ["hit"]
