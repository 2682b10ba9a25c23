"""Variants of a chunk through the engine's public API: which are made, which serve a prompt, and who may meet whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import own_logits, tiny_model
from tiny_tokenizers import BUILDERS
from torch import Tensor

from ragblend import Chunk, RagBlend
from ragblend.blend import precompute
from ragblend.blend import variants as variants_of_chunks
from ragblend.blend.prefill import Plan, Prefilled, prefill
from ragblend.blend.variants import CONTEXT_TOKENS, FILLER, POLICIES, VARIANTS, Name, Policy
from ragblend.chunks import Entry, IngestReport
from ragblend.errors import IngestError
from ragblend.kv import LayerKV
from ragblend.model.cache import KVCache
from ragblend.model.decoder import Decoder
from ragblend.settings import EngineSettings
from ragblend.store.kvstore import KVStore

LAMP = "The lamp burned oil from whales until 1902, and electric light came with the new keeper and his dog."
STAIRS = "A stair of two hundred steps leads up to it, and on the last one the keeper carved his name."
STORM = "In the storm of 1911 the glass broke, and for three nights a fire on the rocks had to do instead."
TODAY = "Today a machine in another town turns the light on, and nobody lives there but a pair of owls."
FIRST, SECOND = f"{LAMP} {STAIRS} {STORM}", f"{STAIRS} {STORM} {TODAY}"  # overlapping windows
COPPER = "Copper turns green in sea air, because salt and water make a thin skin on the metal."
FERRY = "A ferry leaves the old harbour at nine in the morning and comes back at six at night."
QUESTION = "\n\nWho built the lighthouse?"
EXACT = 1e-4  # of logits in fp32


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of these short texts is deep enough, but where it is depth that is tested."""
    monkeypatch.setattr(variants_of_chunks, "DEEP_TOKENS", 1)


@pytest.fixture
def deep(shallow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny_model("llama", vocab=len(BUILDERS["chatml"]())))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with KVStore(tmp_path / "kv") as opened:
        yield opened


@pytest.fixture
def engine(decoder: Decoder, store: KVStore) -> Any:
    with make_engine(decoder, store) as made:
        yield made


def make_engine(decoder: Decoder, store: KVStore, policy: Policy = "neighbours", **settings: Any) -> RagBlend:
    """Without a prefix cache and without learning, so that one prompt says nothing about the next."""
    how = {"prefix_cache_bytes": 0, "learn": False, **settings}
    return RagBlend(decoder, BUILDERS["chatml"](), store, EngineSettings(policy=policy, **how))


def prompt(*texts: str) -> list[str | Chunk]:
    return [part for text in texts for part in (Chunk(text), "\n\n")] + [QUESTION]


def kv(store: KVStore, key: str) -> LayerKV:
    """The stored last layer, which depends on all that stood before."""
    (opened,) = store.open_many([key])
    assert opened.reader is not None
    with opened.reader as reader:
        return reader.read_layer_kv(reader.n_layers - 1)


def own_forward(engine: RagBlend, ids: Tensor) -> Tensor:
    """[vocab] logits of the last token, by transformers alone."""
    return own_logits("llama", ids, len(engine.tokenizer))[-1]


def variants(engine: RagBlend, texts: Sequence[str], **how: Any) -> list[str]:
    return [use.variant for use in engine.answer(prompt(*texts), max_tokens=1, **how).report.chunks]


def behind_texts(report: IngestReport) -> list[Entry]:
    """The entries but for those of the head alone, which every text has beside them."""
    return [entry for entry in report.entries if entry.variant != "head"]


# -- ingest -----------------------------------------------------------------------------------------------------


def test_entries_name_what_is_stored_and_what_it_stands_behind(engine: RagBlend) -> None:
    report = engine.ingest(
        [FIRST, COPPER, SECOND, FERRY, " "], neighbours=[[SECOND, COPPER], [FERRY, FIRST], [" ", FIRST], [], [FIRST]]
    )
    assert [(entry.text, entry.variant, entry.neighbours) for entry in report.entries] == [
        (0, "head", ()),
        (0, "neighbour", (1,)),
        (0, "copy", (0,)),
        (1, "head", ()),
        (1, "neighbour", (0,)),
        (2, "head", ()),
        (2, "filler", ()),
        (2, "copy", (1,)),
        (3, "head", ()),
        (3, "filler", ()),
    ]
    assert (report.computed, report.already_stored, report.empty) == (4, 0, 1)
    assert len(engine.store) == len({entry.key for entry in report.entries}) == 10
    assert all(entry.key in engine.store for entry in report.entries)
    lengths = [len(engine.prompts.encode_text(text)) for text in (FIRST, COPPER, SECOND, FERRY)]
    assert report.tokens == sum(lengths[entry.text] for entry in report.entries)
    assert report.bytes == engine.store.stats().bytes
    for number, text in enumerate((FIRST, COPPER, SECOND, FERRY)):
        named = {entry.variant: entry.key for entry in report.entries if entry.text == number}
        assert engine.stored_variants(f" {text}\n") == named
    assert engine.stored_variants(" ") == engine.stored_variants("unheard of") == {}


def test_the_same_neighbours_again_cost_nothing(engine: RagBlend) -> None:
    texts, neighbours = [FIRST, COPPER], [[SECOND, COPPER], [FERRY, FIRST]]
    first = engine.ingest(texts, neighbours=neighbours)
    files = {path: path.read_bytes() for path in engine.store.directory.rglob("*.safetensors")}
    again = engine.ingest(texts, neighbours=neighbours)
    assert (again.computed, again.already_stored, again.tokens, again.bytes) == (0, 2, 0, 0)
    assert again.entries == first.entries
    # Nor does another order of theirs: the entry says where the one that counts stands now.
    other = engine.ingest(texts, neighbours=[[COPPER, SECOND], [FIRST, FERRY]])
    assert (other.computed, other.tokens) == (0, 0)
    assert [(entry.variant, entry.neighbours) for entry in behind_texts(other)] == [
        ("neighbour", (0,)),
        ("copy", (1,)),
        ("neighbour", (1,)),
    ]
    assert {path: path.read_bytes() for path in engine.store.directory.rglob("*.safetensors")} == files


def test_other_neighbours_prefill_again(engine: RagBlend) -> None:
    (entry,) = behind_texts(engine.ingest([COPPER], neighbours=[[FERRY]]))
    behind_ferry = kv(engine.store, entry.key)
    report = engine.ingest([COPPER], neighbours=[[LAMP]])
    assert (report.computed, report.already_stored) == (1, 0)
    assert behind_texts(report) == [entry]  # the same name, for a prompt cannot know what it stands behind
    assert len(engine.store) == 2
    behind_lamp = kv(engine.store, entry.key)
    assert not torch.equal(behind_lamp.value, behind_ferry.value)
    engine.ingest([COPPER], neighbours=[[FERRY]])
    assert torch.equal(kv(engine.store, entry.key).value, behind_ferry.value)


def test_of_two_variants_only_the_one_that_changed_is_made_again(engine: RagBlend) -> None:
    engine.ingest([SECOND], neighbours=[[FIRST, FERRY]])
    tokens = len(engine.prompts.encode_text(SECOND))
    report = engine.ingest([SECOND], neighbours=[[FIRST, COPPER]])
    assert (report.computed, report.tokens) == (1, tokens)
    assert [(entry.variant, entry.neighbours) for entry in behind_texts(report)] == [
        ("neighbour", (1,)),
        ("copy", (0,)),
    ]


def test_without_neighbours_there_is_the_filler(engine: RagBlend) -> None:
    named = engine.ingest([COPPER, FIRST], neighbours=[[FERRY], [SECOND]])
    before = {entry.key: kv(engine.store, entry.key) for entry in named.entries}
    report = engine.ingest([COPPER, FIRST])
    assert [(entry.text, entry.variant, entry.neighbours) for entry in behind_texts(report)] == [
        (0, "filler", ()),
        (1, "filler", ()),
    ]
    assert (report.computed, report.already_stored) == (1, 1)  # the second had it, for lack of a new neighbour
    for key, layer in before.items():
        assert torch.equal(kv(engine.store, key).value, layer.value)


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize(("policy", "variant"), [("neighbours", "neighbour"), ("document", "before")])
def test_several_short_texts_make_the_depth(decoder: Decoder, store: KVStore, policy: Policy, variant: Name) -> None:
    with make_engine(decoder, store, policy) as engine:
        offered = [FERRY, COPPER, LAMP, TODAY, STORM]
        sizes = [len(engine.prompts.encode_text(text)) + len(engine.prompts.encode_text("\n\n")) for text in offered]
        assert sum(sizes[:3]) < variants_of_chunks.DEEP_TOKENS <= sum(sizes[:4])
        (entry,) = behind_texts(engine.ingest([STAIRS], neighbours=[offered]))
        assert (entry.variant, entry.neighbours) == (variant, (0, 1, 2, 3))
        # It is exact behind them, the closest right before it.
        ready = engine.prefill(prompt(TODAY, LAMP, COPPER, FERRY, STAIRS), ratio=0.0)
        assert (ready.report.chunks[-1].variant, ready.report.hits) == (variant, 1)
        assert (ready.logits - own_forward(engine, ready.ids)).abs().max() < EXACT
        # While they are offered, it stays, in whatever order and company.
        before = kv(store, entry.key)
        (again,) = behind_texts(engine.ingest([STAIRS], neighbours=[[LAMP, TODAY, STORM, FERRY, COPPER]]))
        assert again.neighbours == (3, 4, 0, 1)
        assert torch.equal(kv(store, entry.key).key, before.key)
        # Without one of them it is made again, and where they do not suffice the filler stands before them.
        report = engine.ingest([STAIRS], neighbours=[[FERRY, COPPER]])
        assert (report.computed, behind_texts(report)[0].neighbours) == (1, (0, 1))
        (made,) = [
            c
            for c in engine.chunks.contexts(
                engine.prompts.encode_text(STAIRS), [engine.prompts.encode_text(text) for text in (FERRY, COPPER)]
            )
            if c.name == variant
        ]
        filler = engine.prompts.decode(made.ids[: len(made.ids) - sum(sizes[:2])])
        assert FILLER.startswith(filler.removesuffix("\n\n"))
        context: list[str | Chunk] = [Chunk(filler.removesuffix("\n\n")), "\n\n"]
        ready = engine.prefill([*context, *prompt(COPPER, FERRY, STAIRS)], ratio=0.0)
        assert ready.report.chunks[-1].variant == variant
        assert (ready.logits - own_forward(engine, ready.ids)).abs().max() < EXACT


@pytest.mark.parametrize("neighbours", [[], [[]], [[FERRY]] * 3], ids=len)
def test_every_text_has_its_neighbours(engine: RagBlend, neighbours: list[list[str]]) -> None:
    with pytest.raises(IngestError, match=f"neighbours for {len(neighbours)} texts, and 2"):
        engine.ingest([COPPER, FERRY], neighbours=neighbours)
    assert len(engine.store) == 0


@pytest.mark.parametrize("neighbours", [FERRY, None, [FERRY, None]], ids=["text", "none", "no_text"])
def test_neighbours_are_lists_of_texts(engine: RagBlend, neighbours: Any) -> None:
    with pytest.raises(IngestError, match="a list of texts for each text, not "):
        engine.ingest([COPPER], neighbours=[neighbours])
    assert len(engine.store) == 0


def test_texts_that_come_one_by_one_may_not_outnumber_their_neighbours(engine: RagBlend) -> None:
    neighbours = [[FERRY], [FERRY]]
    assert engine.ingest(iter([COPPER, LAMP]), neighbours=neighbours).computed == 2
    with pytest.raises(IngestError, match="neighbours for 2 texts, and more"):
        engine.ingest(iter([COPPER, LAMP, STORM]), neighbours=neighbours)


def test_other_policies_take_no_notice_of_neighbours(decoder: Decoder, store: KVStore) -> None:
    variant: dict[Policy, Name] = {"none": "alone", "system": "head", "filler": "filler"}
    for policy, name in variant.items():
        with make_engine(decoder, store, policy) as engine:
            (entry,) = engine.ingest([SECOND], neighbours=[[FIRST, FERRY]]).entries
            assert (entry.variant, entry.neighbours) == (name, ())
            assert engine.ingest([SECOND]).computed == 0


# -- which variant serves ---------------------------------------------------------------------------------------


def test_the_copy_serves_behind_the_text_it_copies_and_the_neighbour_elsewhere(engine: RagBlend) -> None:
    engine.ingest([FIRST, SECOND, COPPER], neighbours=[[COPPER], [FIRST, COPPER], [FERRY]])
    assert variants(engine, [FIRST, SECOND]) == ["head", "copy"]
    assert variants(engine, [FIRST, COPPER, SECOND]) == ["head", "neighbour", "copy"]
    assert variants(engine, [FIRST, SECOND, COPPER, COPPER]) == ["head", "copy", "neighbour", "neighbour"]
    assert variants(engine, [SECOND, FIRST]) == ["head", "neighbour"]  # FIRST has no other
    assert variants(engine, [SECOND]) == ["head"]
    assert variants(engine, [COPPER, SECOND]) == ["head", "neighbour"]
    # The second time in one prompt, all of it is a repetition.
    assert variants(engine, [SECOND, SECOND]) == ["head", "copy"]
    # Where the words come from does not count: in a question's preface they are copied, too.
    report = engine.answer(
        [f"Somebody wrote of stairs: {STAIRS[2:]} {STORM}\n\n", *prompt(SECOND)], max_tokens=1
    ).report
    assert [use.variant for use in report.chunks] == ["copy"]
    assert report.hits == 1


def test_reports_name_the_variants_own_key(engine: RagBlend) -> None:
    engine.ingest([SECOND], neighbours=[[FIRST, COPPER]])
    keys = engine.stored_variants(SECOND)
    expected: list[tuple[str, Name]] = [(FIRST, "copy"), (COPPER, "neighbour")]
    for before, variant in expected:
        use = engine.answer(prompt(before, SECOND), max_tokens=1).report.chunks[1]
        assert (use.variant, use.key, use.status) == (variant, keys[variant], "hit")
    # A miss names what was looked for first.
    assert [use.variant for use in engine.answer(prompt(FERRY), max_tokens=1).report.chunks] == ["neighbour"]


def filler_text(engine: RagBlend) -> str:
    text = engine.prompts.decode(engine.prompts.encode_text(FILLER)[:CONTEXT_TOKENS])
    assert FILLER.startswith(text)
    return text


@pytest.mark.parametrize(
    ("policy", "variant"),
    [
        ("system", "head"),
        ("filler", "filler"),
        ("neighbours", "head"),
        ("neighbours", "filler"),
        ("neighbours", "neighbour"),
        ("neighbours", "copy"),
        ("document", "head"),
        ("document", "before"),
    ],
)
def test_a_chunk_behind_the_very_context_it_was_prefilled_behind_is_exact(
    decoder: Decoder, store: KVStore, policy: Policy, variant: Name
) -> None:
    with make_engine(decoder, store, policy, preamble="Read this. ") as engine:
        engine.ingest([SECOND], neighbours=[[FERRY, FIRST]])
        engine.ingest([SECOND])
        # What stands before the chunk is not stored, and so computed: if the chunk is exact, all of the prompt is.
        before = {"head": None, "filler": filler_text(engine), "copy": FIRST}.get(variant, FERRY)
        context: list[str | Chunk] = [Chunk(before), "\n\n"] if before else []
        tokens = len(engine.prompts.encode_text(SECOND))
        # One word more in the head, and it is neither exact nor taken for it.
        for head, exact in (("Read this. ", True), ("Read this. Well: ", False)):
            asked = [head, *context, Chunk(SECOND), QUESTION]
            ready = engine.prefill(asked, ratio=0.0)
            use = ready.report.chunks[-1]
            assert (use.status, ready.report.reused_tokens) == ("hit", tokens)
            assert use.variant == variant or not exact
            assert ((ready.logits - own_forward(engine, ready.ids)).abs().max() < EXACT) == exact
            report = engine.prefill(asked, ratio=0.5).report
            assert report.recomputed_tokens == (0 if exact else round(tokens / 2))


def test_alone_is_exact_nowhere(decoder: Decoder, store: KVStore) -> None:
    with make_engine(decoder, store, "none") as engine:
        engine.ingest([SECOND])
        ready = engine.prefill(prompt(SECOND), ratio=0.0)
        assert (ready.logits - own_forward(engine, ready.ids)).abs().max() > 100 * EXACT
        report = engine.prefill(prompt(SECOND), ratio=0.5).report
        assert report.recomputed_tokens == round(report.reused_tokens / 2) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_ratio_1_is_a_full_prefill_whatever_the_policy(decoder: Decoder, store: KVStore, policy: Policy) -> None:
    with make_engine(decoder, store, policy) as engine:
        engine.ingest([FIRST, SECOND, COPPER], neighbours=[[COPPER], [FIRST, COPPER], []])
        for texts in ([FIRST, SECOND, COPPER], [COPPER, SECOND], [SECOND, SECOND]):
            ready = engine.prefill(prompt(*texts), ratio=1.0)
            assert [use.status for use in ready.report.chunks] == ["recomputed"] * len(texts)
            assert (ready.logits - own_forward(engine, ready.ids)).abs().max() < EXACT


def test_policies_share_a_store_and_each_takes_its_own(decoder: Decoder, store: KVStore, tmp_path: Path) -> None:
    texts, neighbours = [FIRST, SECOND, COPPER], [[COPPER], [LAMP, FIRST], [FERRY]]
    alone = {}
    for policy in POLICIES:
        with KVStore(tmp_path / policy) as own, make_engine(decoder, own, policy) as engine:
            engine.ingest(texts, neighbours=neighbours)
            alone[policy] = engine.prefill(prompt(FIRST, SECOND), ratio=0.0)
    for policy in POLICIES:
        with make_engine(decoder, store, policy) as engine:
            engine.ingest(texts, neighbours=neighbours)
    for policy in POLICIES:
        with make_engine(decoder, store, policy) as engine:
            assert engine.ingest(texts, neighbours=neighbours).computed == 0
            ready = engine.prefill(prompt(FIRST, SECOND), ratio=0.0)
            assert [use.key for use in ready.report.chunks] == [use.key for use in alone[policy].report.chunks]
            assert {use.variant for use in ready.report.chunks} <= set(VARIANTS[policy])
            assert torch.equal(ready.logits, alone[policy].logits)
    assert len({tuple(ready.logits.tolist()) for ready in alone.values()}) == len(POLICIES)


# -- namespaces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "own"), [("neighbours", {"neighbour", "copy"}), ("document", {"before"})])
def test_what_stood_behind_texts_of_a_corpus_stays_in_its_namespace(
    decoder: Decoder, store: KVStore, policy: Policy, own: set[Name]
) -> None:
    def stored(namespace: str) -> dict[Name, str]:
        with make_engine(decoder, store, policy, namespace=namespace) as engine:
            for neighbours in ([[FIRST, COPPER]], None):
                engine.ingest([SECOND], neighbours=neighbours)
            return engine.stored_variants(SECOND)

    ours = stored("ours")
    with make_engine(decoder, store, policy, namespace="theirs") as engine:
        assert engine.stored_variants(SECOND) == {name: ours[name] for name in ours if name not in own}
        assert variants(engine, [FIRST, SECOND]) == [VARIANTS[policy][0], "filler"]
    theirs = stored("theirs")
    assert {name for name in ours if ours[name] != theirs[name]} == own
    assert {name for name in ours if ours[name] == theirs[name]} == {"filler", "head"}
    assert not {*ours.values()} & {stored("")[name] for name in own}


@pytest.mark.parametrize("policy", ["none", "system", "filler"])
def test_what_depends_on_no_text_of_a_corpus_is_everybodys(decoder: Decoder, store: KVStore, policy: Policy) -> None:
    for namespace, computed in (("ours", 1), ("theirs", 0), ("", 0)):
        with make_engine(decoder, store, policy, namespace=namespace) as engine:
            assert engine.ingest([SECOND], neighbours=[[FIRST, COPPER]]).computed == computed


# -- misses and what goes wrong ---------------------------------------------------------------------------------


def damage(store: KVStore, key: str, how: str) -> None:
    (path,) = (path for path in store.directory.rglob("*.safetensors") if key.encode() in path.read_bytes())
    data = bytearray(path.read_bytes())
    if how == "last layer":
        data[-100] ^= 1
    path.write_bytes(data[: len(data) // 2] if how == "truncated" else data)


def test_a_damaged_variant_leaves_the_chunk_to_another_one(engine: RagBlend) -> None:
    engine.ingest([FIRST, SECOND], neighbours=[[COPPER], [FIRST, COPPER]])
    engine.ingest([SECOND])
    keys = engine.stored_variants(SECOND)
    assert set(keys) == {"neighbour", "filler", "copy", "head"}
    order: list[Name] = ["copy", "neighbour", "filler", "head"]
    for damaged, served in itertools.pairwise(order):
        damage(engine.store, keys[damaged], "last layer")
        report = engine.answer(prompt(FIRST, SECOND), max_tokens=1).report
        assert [(use.status, use.variant) for use in report.chunks] == [("hit", "head"), ("hit", served)]
        assert keys[damaged] not in engine.store
    # Without another one it is a miss that says why.
    damage(engine.store, keys["head"], "last layer")
    report = engine.answer(prompt(FIRST, SECOND), max_tokens=1).report
    assert [(use.status, use.variant) for use in report.chunks] == [("hit", "head"), ("corrupt", "head")]
    assert engine.stored_variants(SECOND) == {}
    # Ingesting makes again what is gone.
    assert engine.ingest([FIRST, SECOND], neighbours=[[COPPER], [FIRST, COPPER]]).computed == 1
    assert variants(engine, [FIRST, SECOND]) == ["head", "copy"]


def test_damage_that_shows_on_opening_leaves_the_chunk_to_another_variant(engine: RagBlend) -> None:
    engine.ingest([SECOND], neighbours=[[FIRST, COPPER]])
    damage(engine.store, engine.stored_variants(SECOND)["copy"], "truncated")
    report = engine.answer(prompt(FIRST, SECOND), max_tokens=1).report
    assert [(use.status, use.variant) for use in report.chunks[1:]] == [("hit", "neighbour")]


@pytest.mark.parametrize(
    ("policy", "learned"),
    [
        ("none", ["alone"]),
        ("system", ["head"]),
        ("filler", ["filler"]),
        ("neighbours", ["filler", "head"]),
        ("document", ["filler", "head"]),
    ],
)
def test_misses_are_learned_behind_nobodys_text(
    decoder: Decoder, store: KVStore, policy: Policy, learned: list[Name]
) -> None:
    with make_engine(decoder, store, policy, learn=True) as engine:
        assert engine.answer(prompt(FIRST, SECOND), max_tokens=1).report.misses == 2
        engine.drain()
        assert list(engine.stored_variants(SECOND)) == learned
        key = engine.stored_variants(SECOND)[learned[0]]
        assert len(store) == 2 * len(learned)
        assert variants(engine, [FIRST, SECOND]) == [learned[-1], learned[0]]
        # It is what an ingest stores.
        kept = kv(store, key)
        assert engine.ingest([SECOND]).computed == 0
        store.delete(key)
        engine.ingest([SECOND])
        assert torch.equal(kv(store, key).key, kept.key)


def test_contexts_that_do_not_fit_the_window_are_left_out(engine: RagBlend) -> None:
    room = engine.decoder.context_window_tokens - len(engine.preamble_ids)
    ids = engine.prompts.encode_text("".join(chr(0x4E00 + 7 * n) for n in range(700)))

    def text_of(tokens: int) -> str:
        """A text of about as many tokens, and no more."""
        return engine.prompts.decode(ids[: tokens - 3]).rstrip("\ufffd")

    short = len(engine.prompts.encode_text(COPPER)) + 5
    for tokens, expected in (
        (room - short, [("neighbour", (1,))]),  # FIRST is too long, COPPER is not
        (room - 40 + 10, []),
    ):
        text = text_of(tokens)
        assert room - CONTEXT_TOKENS < len(engine.prompts.encode_text(text)) <= tokens
        entries = behind_texts(engine.ingest([text], neighbours=[[FIRST, COPPER, FERRY]]))
        assert [(entry.variant, entry.neighbours) for entry in entries] == expected
    # What has room for nothing else stands behind the head alone, and is exact at a prompt's beginning.
    ready = engine.prefill([Chunk(text), "?"], ratio=0.0)
    assert [(use.status, use.variant) for use in ready.report.chunks] == [("hit", "head")]
    assert (ready.logits - own_forward(engine, ready.ids)).abs().max() < EXACT


@pytest.mark.parametrize("policy", ["neighbours", "document"])
def test_payloads_do_not_depend_on_the_order_of_ingesting(decoder: Decoder, tmp_path: Path, policy: Policy) -> None:
    """Not even on whether a neighbour's own KV was there already when a chunk was prefilled behind it."""
    behind = {COPPER: [FERRY], FERRY: [LAMP], LAMP: [COPPER]}
    found = []
    for number, texts in enumerate(itertools.permutations(behind)):
        with KVStore(tmp_path / str(number)) as store, make_engine(decoder, store, policy) as engine:
            for text in texts:
                engine.ingest([text], neighbours=[behind[text]])
            found.append({key: path.read_bytes() for key, path in store.paths(store.keys()).items()})
    assert len(found[0]) == 6
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_payloads_do_not_depend_on_what_an_engine_made_before(decoder: Decoder, tmp_path: Path, policy: Policy) -> None:
    found = []
    for number, before in enumerate(([], [STORM], [STORM, TODAY, FIRST])):
        with KVStore(tmp_path / str(number)) as store, make_engine(decoder, store, policy) as engine:
            engine.ingest(before)
            engine.ingest(before, neighbours=[[STAIRS] for _ in before])
            keys = [entry.key for entry in engine.ingest([COPPER], neighbours=[[FERRY]]).entries]
            found.append([path.read_bytes() for path in store.paths(keys).values()])
    assert found[0]
    assert found[0] == found[1] == found[2]


def test_the_head_is_computed_by_itself(engine: RagBlend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with what follows it, it would be rounded otherwise, and chunks behind it with it."""
    computed = []

    def noted(decoder: Decoder, cache: KVCache, plan: Plan, *how: Any) -> Prefilled:
        computed.append((plan.known, len(plan.ids)))
        return prefill(decoder, cache, plan, *how)

    engine.ingest([STORM])  # behind head and filler
    monkeypatch.setattr(precompute, "prefill", noted)
    engine.ingest([COPPER], neighbours=[[FERRY]])
    assert (0, len(engine.preamble_ids)) in computed


def test_what_texts_stand_behind_is_computed_once(engine: RagBlend, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def noted(decoder: Decoder, cache: KVCache, plan: Plan, *how: Any) -> Prefilled:
        computed.append(len(plan.ids) - plan.known - int(plan.reused.sum()))
        return prefill(decoder, cache, plan, *how)

    monkeypatch.setattr(precompute, "prefill", noted)
    texts = [COPPER, FERRY, LAMP]
    report = engine.ingest(texts, neighbours=[[FERRY], [LAMP], [COPPER]])
    assert [entry.text for entry in report.entries] == [0, 0, 1, 1, 2, 2]
    heads = 2 * len(engine.preamble_ids)  # chunks behind it alone, and behind it and another
    separators = len(texts) * len(engine.prompts.encode_text("\n\n"))
    assert report.tokens == 2 * sum(len(engine.prompts.encode_text(text)) for text in texts)
    assert sum(computed) == heads + separators + report.tokens


def test_progress_counts_texts(engine: RagBlend) -> None:
    counts: list[int] = []
    texts = [COPPER, "", FERRY, *(f"{LAMP} {n}" for n in range(80))]
    engine.ingest(texts, neighbours=[[STORM] for _ in texts], progress=counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == len(texts)
    counts.clear()
    engine.ingest(["", " "], progress=counts.append)
    assert counts == [2]


@pytest.mark.parametrize("policy", ["neighbours", "document"])
def test_a_text_that_comes_again_with_other_neighbours_is_left_alone(
    decoder: Decoder, store: KVStore, policy: Policy
) -> None:
    texts, neighbours = [COPPER, FERRY, COPPER], [[LAMP], [], [STORM]]
    with make_engine(decoder, store, policy) as engine:
        first = engine.ingest(texts, neighbours=neighbours)
        assert (first.computed, first.already_stored) == (2, 1)
        once, again = (entry for entry in behind_texts(first) if entry.text != 1)
        assert (once.key, once.neighbours, again.neighbours) == (again.key, (0,), ())
        assert engine.ingest(texts, neighbours=neighbours).computed == 0
        # By itself it may stand behind nothing that it is not offered.
        assert engine.ingest(texts[2:], neighbours=neighbours[2:]).computed == 1


@pytest.mark.parametrize("bad", [ValueError("the texts ended too soon"), 3])
def test_what_came_before_a_text_that_cannot_be_had_is_stored(engine: RagBlend, bad: Any) -> None:
    def texts() -> Iterator[Any]:
        yield from (COPPER, FERRY)
        if isinstance(bad, Exception):
            raise bad
        yield from (bad, LAMP)

    with pytest.raises((ValueError, IngestError)):
        engine.ingest(texts(), neighbours=[[FERRY], [COPPER], [], []])
    assert [sorted(engine.stored_variants(text)) for text in (COPPER, FERRY)] == [["head", "neighbour"]] * 2
    assert not engine.stored_variants(LAMP)
