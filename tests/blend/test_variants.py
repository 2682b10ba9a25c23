"""What chunks are prefilled behind, what is remembered of it, which variant fits; and the KV that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import tiny_model

from ragblend.blend import variants
from ragblend.blend.precompute import Precomputer
from ragblend.blend.prefill import full_plan, prefill
from ragblend.blend.selectors import RecomputeNone
from ragblend.blend.variants import (
    COPY_SHARE,
    NEW_SHARE,
    POLICIES,
    VARIANTS,
    Context,
    Name,
    Note,
    Policy,
    best,
    contexts,
    digest,
    neighbours_of,
    texts_before,
)
from ragblend.errors import ContextWindowError
from ragblend.kv import ChunkKV, LayerKV
from ragblend.model.decoder import Decoder
from ragblend.prompt.repeats import repeated_behind

CHUNK = tuple(range(100, 200))
FILLER = tuple(range(1000, 1020))


def sharing(tokens: int, salt: int = 0) -> tuple[int, ...]:
    """A text that CHUNK repeats its last `tokens` from, and nothing else."""
    return (*range(2000 + 100 * salt, 2010 + 100 * salt), *CHUNK[len(CHUNK) - tokens :])


SEPARATOR = (1, 2)
NEW, NEW_TOO, HALFWAY, COPY, CLOSER_COPY = sharing(0), sharing(9, 1), sharing(20, 2), sharing(26, 3), sharing(60, 4)
ALONE_BEHIND_HEAD = Context("head", ())
BEHIND_FILLER = Context("filler", (*FILLER, *SEPARATOR))


def made(
    policy: Policy, offered: Sequence[Sequence[int]], filler: Sequence[int] = FILLER, room: int = 1000
) -> list[Context]:
    return contexts(policy, CHUNK, filler, offered, SEPARATOR, room)


def behind(name: Name, texts: Sequence[Sequence[int]], *sources: int, filler: int = 0) -> Context:
    """What is to be made of these texts, the one right before the chunk first, behind so much filler."""
    start = (*FILLER[:filler], *SEPARATOR) if filler else ()
    ids = (*start, *(token for n in reversed(sources) for token in (*texts[n], *SEPARATOR)))
    return Context(name, ids, sources, 0 if filler else len(texts[sources[-1]]))


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text is deep enough."""
    monkeypatch.setattr(variants, "DEEP_TOKENS", 1)


# -- which variants are made ------------------------------------------------------------------------------------


def test_the_texts_of_these_tests_share_what_they_say() -> None:
    shares = [
        float(repeated_behind(np.array(text), np.array(CHUNK)).mean())
        for text in (NEW, NEW_TOO, HALFWAY, COPY, CLOSER_COPY)
    ]
    assert shares == [0.0, 0.09, 0.2, 0.26, 0.6]
    assert shares[1] < NEW_SHARE < shares[2] < COPY_SHARE < shares[3]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    ("offered", "new", "copy"),
    [
        ([], None, None),
        ([NEW], 0, None),
        ([NEW_TOO, NEW], 0, None),
        ([HALFWAY], None, None),
        ([HALFWAY, NEW], 1, None),
        ([COPY], None, 0),
        ([COPY, NEW], 1, 0),
        ([NEW, COPY, CLOSER_COPY, NEW_TOO], 0, 2),
        ([COPY, COPY], None, 0),
        ([(), NEW], 1, None),
        ([(), COPY, (), NEW], 3, 1),
        ([(), ()], None, None),
    ],
)
def test_neighbours_are_the_first_new_text_and_the_closest_copy(
    offered: list[tuple[int, ...]], new: int | None, copy: int | None
) -> None:
    expected = [
        ALONE_BEHIND_HEAD,
        BEHIND_FILLER if new is None else behind("neighbour", offered, new),
        *([] if copy is None else [behind("copy", offered, copy)]),
    ]
    assert made("neighbours", offered) == expected
    assert made("neighbours", [list(text) for text in offered], list(FILLER)) == expected


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    ("share", "names"), [(9, ["neighbour"]), (10, ["filler"]), (25, ["filler"]), (26, ["filler", "copy"])]
)
def test_the_thresholds_themselves_are_neither_new_nor_a_copy(share: int, names: list[Name]) -> None:
    assert [context.name for context in made("neighbours", [sharing(share)])] == ["head", *names]


@pytest.mark.usefixtures("shallow")
def test_a_document_offers_what_stands_before() -> None:
    assert made("document", []) == made("document", [()]) == [ALONE_BEHIND_HEAD, BEHIND_FILLER]
    for before in (NEW, COPY):
        assert made("document", [before]) == [ALONE_BEHIND_HEAD, behind("before", [before], 0)]
    assert made("document", [(), NEW, COPY]) == [ALONE_BEHIND_HEAD, behind("before", [(), NEW, COPY], 1)]


@pytest.mark.parametrize(
    ("policy", "only"),
    [("none", Context("alone", ())), ("system", Context("head", ())), ("filler", BEHIND_FILLER)],
)
def test_other_policies_take_no_notice_of_other_texts(policy: Policy, only: Context) -> None:
    for offered in ([], [NEW], [COPY, NEW]):
        assert made(policy, offered) == [only]


def test_without_room_for_a_filler_there_is_the_head_alone() -> None:
    room = len(FILLER) + len(SEPARATOR)
    for policy in ("neighbours", "document"):
        assert made(policy, [()], room=room) == [ALONE_BEHIND_HEAD, BEHIND_FILLER]
        assert made(policy, [()], room=room - 1) == [ALONE_BEHIND_HEAD]
    assert made("filler", [], room=room - 1) == [Context("filler", ())]


PASSAGES = [tuple(range(5000 + 100 * n, 5000 + 100 * n + 90)) for n in range(5)]


def test_short_texts_stand_behind_one_another_until_it_is_deep_enough() -> None:
    assert 2 * 92 < variants.DEEP_TOKENS <= 3 * 92
    assert made("neighbours", PASSAGES)[1:] == [behind("neighbour", PASSAGES, 0, 1, 2)]
    assert made("document", PASSAGES)[1:] == [behind("before", PASSAGES, 0, 1, 2)]
    # None that the chunk repeats, and none that repeats another one; a document is as it is, but for the latter.
    mixed = [HALFWAY, PASSAGES[0], PASSAGES[0][:80], (), COPY, *PASSAGES[1:]]
    assert made("neighbours", mixed)[1:] == [behind("neighbour", mixed, 1, 5, 6), behind("copy", mixed, 4, 1, 5)]
    assert made("document", mixed)[1:] == [behind("before", mixed, 0, 1, 5)]


def test_where_texts_do_not_suffice_the_filler_stands_before_them() -> None:
    filler = tuple(range(10_000, 10_300))
    (_, context) = made("neighbours", PASSAGES[:2], filler)
    lacking = variants.CONTEXT_TOKENS - 2 * 92 - len(SEPARATOR)
    assert context.ids == (*filler[:lacking], *SEPARATOR, *PASSAGES[1], *SEPARATOR, *PASSAGES[0], *SEPARATOR)
    assert (context.sources, context.first_tokens, len(context.ids)) == ((0, 1), 0, variants.CONTEXT_TOKENS)
    (_, context) = made("neighbours", PASSAGES[:2], ())
    assert context == behind("neighbour", PASSAGES[:2], 0, 1)
    # A text that has the depth alone needs nothing.
    (_, context) = made("neighbours", [(*PASSAGES[0], *PASSAGES[1], *PASSAGES[2])], filler)
    assert context.ids == (*PASSAGES[0], *PASSAGES[1], *PASSAGES[2], *SEPARATOR)


@given(
    st.sampled_from(POLICIES),
    st.lists(st.sampled_from([(), NEW, NEW_TOO, HALFWAY, COPY, CLOSER_COPY, *PASSAGES]), max_size=8),
    st.integers(0, 400),
)
def test_every_variant_is_looked_for_fits_and_ends_in_its_sources(
    policy: Policy, offered: list[tuple[int, ...]], room: int
) -> None:
    found = made(policy, offered, room=room)
    names = [context.name for context in found]
    assert len(set(names)) == len(names)
    assert set(names) <= set(VARIANTS[policy])
    for context in found:
        assert len(context.ids) <= room
        assert len(set(context.sources)) == len(context.sources)
        texts = [token for n in reversed(context.sources) for token in (*offered[n], *SEPARATOR)]
        assert context.ids[len(context.ids) - len(texts) :] == tuple(texts)
        if context.sources:
            first = offered[context.sources[-1]]
            assert context.ids[: context.first_tokens] == (first if context.first_tokens else ())
            assert len(context.ids) == len(texts) or not context.first_tokens


def test_a_document_offers_its_texts_from_the_last_one_back() -> None:
    assert texts_before(["a", "b", "c"]) == [[], ["a"], ["b", "a"]]
    many = [str(n) for n in range(30)]
    assert texts_before(many)[20] == many[4:20][::-1]
    assert texts_before([]) == []


def test_every_policy_has_its_variants() -> None:
    assert set(VARIANTS) == set(POLICIES)


def test_the_closest_other_texts_are_offered_closest_first() -> None:
    texts = ["a", "b", "twin", "d", "twin", "f"]
    angles = np.array([0.0, 0.1, 0.3, 0.6, 0.3, 3.0])
    lengths = np.array([[1.0], [9.0], [0.1], [2.0], [5.0], [1.0]])  # of no importance
    vectors = (np.stack([np.cos(angles), np.sin(angles)], axis=1) * lengths).astype(np.float32)
    near = neighbours_of(texts, vectors)
    assert near[0] == ["b", "twin", "d", "f"]
    assert near[2] == near[4] == ["b", "a", "d", "f"]
    assert near[5] == ["d", "twin", "b", "a"]
    assert neighbours_of(texts, vectors, count=2) == [others[:2] for others in near]
    assert neighbours_of(texts, vectors, apart=[{0}, {0}, {0}, {1}, {1}, {1}])[:2] == [["twin", "d", "f"]] * 2
    shared = neighbours_of(texts, vectors, apart=[{0}, {0}, {0}, {1}, {1}, {0, 1}])  # "f" stands in both groups
    assert shared[:2] == [["twin", "d"]] * 2
    assert shared[5] == []
    assert neighbours_of(texts[:1], vectors[:1]) == [[]]
    assert neighbours_of([], np.zeros((0, 2), dtype=np.float32)) == []
    assert neighbours_of(["a", "b"], np.zeros((2, 2), dtype=np.float32)) == [["b"], ["a"]]


# -- what is remembered of them ---------------------------------------------------------------------------------


DIGEST = st.binary(min_size=16, max_size=16)


@given(st.integers(1, 500), DIGEST, DIGEST, st.lists(DIGEST), st.text(), st.randoms(use_true_random=False))
@example(3, b"b" * 16, b"l" * 16, [b"s" * 16], "odd \ud800 text", Random(0))
def test_a_note_comes_back_as_it_was(
    tokens: int, behind: bytes, label: bytes, sources: list[bytes], text: str, random: Any
) -> None:
    repeats = np.array([random.random() < 0.5 for _ in range(tokens)])
    data = Note(behind, repeats, label, text, tuple(sources)).to_bytes()
    assert data.startswith(label)
    for again in (Note.from_bytes(data, tokens), Note.from_bytes(data)):
        assert (again.behind, again.label, again.text, again.sources) == (behind, label, text, tuple(sources))
        assert again.repeats.dtype == np.bool_
        assert again.repeats.tolist() == repeats.tolist()
        cut = again.beginning(tokens // 2)
        assert (cut.behind, cut.repeats.tolist()) == (behind, repeats[: tokens // 2].tolist())
    assert Note.from_bytes(data, tokens + 1).behind == b""


@given(st.integers(1, 500), st.binary(max_size=100))
@example(8, b"longer than its note")
@example(8, bytes(37))
@example(8, bytes(32) + bytes([8, 0, 0, 0, 0]) + b"\x01\xff")
@example(8, bytes(32) + bytes([8, 0, 0, 0, 1]) + b"a digest cut off")
@example(8, bytes(32) + bytes([255, 255, 255, 255, 0]) + b"\x01")
def test_any_bytes_make_a_note(tokens: int, data: bytes) -> None:
    Note.from_bytes(data)
    note = Note.from_bytes(data, tokens)
    assert note.repeats.shape == (tokens,)
    if int.from_bytes(data[32:36], "little") != tokens:
        assert note.behind == b""  # no context has this digest, so nothing is taken for exact
        assert not note.repeats.any()
    assert best({"head": note}, "system", np.ones(tokens, dtype=np.bool_), b"somewhere else, 16") == "head"


def test_a_note_says_what_a_chunk_stood_behind_and_repeats_of_it() -> None:
    note = Note.of((7, 8, *COPY), CHUNK)
    assert note.behind == digest(np.array([7, 8, *COPY])) != digest(np.array(COPY))
    assert note.repeats.tolist() == [False] * 74 + [True] * 26
    assert note.sources == ()
    assert Note.of((7, *NEW, *COPY), CHUNK, sources=[COPY, NEW]).sources == (digest(COPY), digest(NEW))
    alone = Note.of((), CHUNK)
    assert alone.behind == digest(np.array([], dtype=np.int64))
    assert not alone.repeats.any()


def test_digests_tell_contexts_apart_and_do_not_depend_on_the_width_of_ids() -> None:
    some = [[], [0], [0, 0], [1], [1, 2], [2, 1], [2**31], [258], [2**31, 258]]
    digests = {digest(np.array(ids, dtype=np.int64)) for ids in some}
    assert len(digests) == len(some)
    assert {len(one) for one in digests} == {16}
    assert digest(np.array([3, 2**31 - 1], dtype=np.int32)) == digest(np.array([3, 2**31 - 1], dtype=np.int64))


# -- which of them fits -----------------------------------------------------------------------------------------


def note(repeats: str, behind: bytes = b"") -> Note:
    return Note(behind, np.array([mark == "x" for mark in repeats]))


def chosen(notes: dict[Name, Note], here: str, behind: bytes = b"here", policy: Policy = "neighbours") -> Name | None:
    return best(notes, policy, np.array([mark == "x" for mark in here]), behind)


def test_the_variant_that_repeats_where_the_prompt_does() -> None:
    stored: dict[Name, Note] = {"copy": note("xxx..."), "filler": note("......"), "neighbour": note(".....x")}
    assert chosen(stored, "xxx...") == "copy"
    assert chosen(stored, "xx....") == "copy"
    assert chosen(stored, ".x....") == "filler"
    assert chosen(stored, "......") == "filler"
    assert chosen(stored, "....xx") == "neighbour"
    assert chosen(stored, "xxxxxx") == "copy"


def test_between_equals_the_policys_order() -> None:
    stored: dict[Name, Note] = {name: note("....") for name in ("copy", "filler", "neighbour", "before")}
    assert chosen(stored, "....") == chosen(stored, "xxxx") == "neighbour"
    assert chosen(stored, "....", policy="document") == "before"
    del stored["neighbour"]
    assert chosen(stored, "....") == "filler"
    del stored["filler"]
    assert chosen(stored, "....") == "copy"


def test_the_very_context_comes_first() -> None:
    stored: dict[Name, Note] = {"neighbour": note("...."), "filler": note("...."), "copy": note("xx..", b"here")}
    assert chosen(stored, "....") == "copy"
    assert chosen(stored, "....", b"there") == "neighbour"
    stored["filler"] = note("....", b"here")  # two at once: then the fewer mismatches
    assert chosen(stored, "....") == "filler"


def test_what_the_policy_does_not_know_is_not_there() -> None:
    stored: dict[Name, Note] = {"alone": note("....", b"here"), "before": note("....", b"here")}
    assert chosen(stored, "....") is None
    assert chosen({}, "....") is None
    assert chosen({**stored, "copy": note("xxxx")}, "....") == "copy"


# -- what is computed -------------------------------------------------------------------------------------------


def ids_of(tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(15, 300, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist())


HEAD = ids_of(9, 0)
A, B, LONG = ids_of(40, 1), ids_of(31, 2), ids_of(300, 3)
ONE, TWO = ids_of(17, 4), ids_of(28, 5)


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder(tiny_model(request.param))


def full_prefill(decoder: Decoder, before: tuple[int, ...], chunk: tuple[int, ...]) -> ChunkKV:
    """The chunk's slice of one prefill of everything, in buffers of its own that fit exactly."""
    ids, at = (*before, *chunk), slice(len(before), len(before) + len(chunk))
    cache = decoder.new_cache(len(ids))
    prefill(decoder, cache, full_plan(ids), None, RecomputeNone(), 0.0)
    return [LayerKV(*cache.read(layer, at)) for layer in range(decoder.n_layers)]  # rotated keys


def rotated(decoder: Decoder, kv: ChunkKV, start: int) -> ChunkKV:
    stop = start + kv[0].n_tokens
    angles = {kind: (cos[:, start:stop], sin[:, start:stop]) for kind, (cos, sin) in decoder.angles(stop).items()}
    return [layer._replace(key=decoder.rotate(n, layer.key, angles)) for n, layer in enumerate(kv)]


@torch.inference_mode()
def assert_is_a_full_prefills(decoder: Decoder, kv: ChunkKV, before: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    expected = full_prefill(decoder, before, chunk)
    for got, want in zip(rotated(decoder, kv, len(before)), expected, strict=True):
        torch.testing.assert_close(got.key, want.key, rtol=0, atol=2e-5)
        torch.testing.assert_close(got.value, want.value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("head", [HEAD, ()], ids=["head", "no head"])
def test_a_chunks_kv_is_its_part_of_a_full_prefill(decoder: Decoder, head: tuple[int, ...]) -> None:
    precomputer = Precomputer(decoder, head)
    order = [
        ((), ONE),
        (A, ONE),
        (A, TWO),
        (A[::-1], TWO),  # as long, and another one
        (B, ONE),
        (A, TWO),
        ((), TWO),
        (LONG, ONE),  # the buffers grow, with a context in them that is of no use any more
        (LONG, TWO),
        (LONG + A, TWO),
        (A, ONE),
        (A + B, ONE),  # begins like the one before
        ((), ONE),
    ]
    for context, chunk in order:
        kv = precomputer.chunk_kv(chunk, context)
        assert_is_a_full_prefills(decoder, kv, head + context, chunk)


def test_buffers_grow_around_what_is_known(decoder: Decoder) -> None:
    """The same context, and a chunk that is longer than what has been there."""
    precomputer = Precomputer(decoder, HEAD)
    for chunk in (ONE, LONG, ONE, LONG + LONG):
        assert_is_a_full_prefills(decoder, precomputer.chunk_kv(chunk, A), HEAD + A, chunk)


def test_a_chunks_kv_stays_when_the_next_one_is_computed(decoder: Decoder) -> None:
    precomputer = Precomputer(decoder, HEAD)
    first = precomputer.chunk_kv(TWO, A)
    kept = [(layer.key.clone(), layer.value.clone()) for layer in first]
    precomputer.chunk_kv(ONE, B)  # shorter: it goes into the same buffers
    for layer, (key, value) in zip(first, kept, strict=True):
        assert torch.equal(layer.key, key)
        assert torch.equal(layer.value, value)


def test_what_stands_before_is_computed_once_for_chunks_that_take_turns(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the head, behind a context, and the same for the next chunk: so ingest goes through its texts."""
    precomputer = Precomputer(decoder, HEAD)
    for context in ((), A):
        precomputer.chunk_kv(ONE, context)
    rows: list[int] = []
    run = decoder.layer

    def counted(index: int, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.extend([hidden.shape[1]] if index == 0 else [])
        return run(index, hidden, *rest)

    monkeypatch.setattr(decoder, "layer", counted)
    for chunk in (TWO, ONE):
        for context in ((), A):
            precomputer.chunk_kv(chunk, context)
    assert rows == [len(TWO), len(TWO), len(ONE), len(ONE)]


def test_what_does_not_fit_is_refused_and_does_no_harm(decoder: Decoder) -> None:
    precomputer = Precomputer(decoder, HEAD)
    window = decoder.context_window_tokens
    precomputer.chunk_kv(ONE, A)
    with pytest.raises(ContextWindowError) as refused:
        precomputer.chunk_kv(ONE, ids_of(window - len(HEAD) - len(ONE) + 1, 6))
    assert refused.value.prompt_tokens == window + 1
    assert_is_a_full_prefills(decoder, precomputer.chunk_kv(ONE, A), HEAD + A, ONE)
    filling = ids_of(window - len(HEAD) - len(ONE), 6)
    assert_is_a_full_prefills(decoder, precomputer.chunk_kv(ONE, filling), HEAD + filling, ONE)


def test_an_interrupted_prefill_leaves_nothing_wrong_behind(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    precomputer = Precomputer(decoder, HEAD)
    precomputer.chunk_kv(ONE, A)
    run = decoder.layer

    def stop(index: int, *rest: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return run(index, *rest)

    for chunk, context in ((ONE, B), (TWO, A), (TWO, ()), (LONG, A)):
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "layer", stop)
            with pytest.raises(KeyboardInterrupt):
                precomputer.chunk_kv(chunk, context)
        assert_is_a_full_prefills(decoder, precomputer.chunk_kv(ONE, context), HEAD + context, ONE)
        assert_is_a_full_prefills(decoder, precomputer.chunk_kv(ONE, A), HEAD + A, ONE)
