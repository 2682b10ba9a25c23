"""The index finds what a plain search finds, whatever the texts, the threads and the number of near misses."""

from __future__ import annotations

import logging
import threading
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from string import ascii_letters

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragblend.errors import InvalidSettingError
from ragblend.prompt.chunk import Chunk, CutChunk
from ragblend.prompt.match import (
    MIN_CUT_CHARS,
    MIN_INDEXED_CHARS,
    RECORD_BYTES,
    ChunkIndex,
    TextsOf,
    is_indexable,
    record_for,
)

# Few letters, so that texts overlap, share heads and tails, and nearly match.
SCARCE = st.text(alphabet="ab", min_size=0, max_size=40)
ODD = st.text(
    alphabet=st.sampled_from("a\x00\r\n \u0301\u200d\ud800\udfff\U0001f600\u00e9e\uffff"), min_size=0, max_size=50
)


def reference(known: set[str], text: str) -> list[tuple[int, int]]:
    found, at = [], 0
    while at < len(text):
        longest = max((len(one) for one in known if text.startswith(one, at)), default=0)
        if longest:
            found.append((at, at + longest))
        at += longest or 1
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_find_is_plain_search(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(data.draw(st.sampled_from([SCARCE, ODD])), min_size=1, max_size=6))
    joined = st.lists(st.sampled_from(pieces), max_size=8).map("".join)
    known = {text for text in data.draw(st.lists(joined, max_size=6)) if len(text) >= MIN_INDEXED_CHARS}
    text = "".join(data.draw(st.lists(st.one_of(joined, st.sampled_from([*known, ""])), max_size=6)))
    index = ChunkIndex(map(record_for, known))
    assert index.find(text) == reference(known, text)
    assert len(index) == len(known)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(0, 200), st.lists(st.integers(32, 60), max_size=5))
def test_find_is_plain_search_on_periodic_text(period: int, size: int, lengths: list[int]) -> None:
    text = ("abc"[:period] * size)[:size]
    known = {("abc"[:period] * 60)[:length] for length in lengths}
    assert ChunkIndex(map(record_for, known)).find(text) == reference(known, text)


@settings(max_examples=100, deadline=None)
@given(st.lists(ODD, max_size=6))
def test_split_gives_the_text_back(pieces: list[str]) -> None:
    known = [piece for piece in pieces if is_indexable(piece)]
    text = "".join([*pieces, " glue ", *reversed(pieces)])
    parts = ChunkIndex(map(record_for, known)).split(text)
    assert "".join(part.text if isinstance(part, Chunk) else part for part in parts) == text
    assert all(part.text in known if isinstance(part, Chunk) else part for part in parts)


def test_split_cuts_at_known_texts() -> None:
    first, second = "The cache keeps the keys and values.", "A question is asked; an answer comes."
    index = ChunkIndex([record_for(first), record_for(second)])
    assert index.split(f"{second}{first}\n{first}?") == [Chunk(second), Chunk(first), "\n", Chunk(first), "?"]
    assert index.split("") == []
    assert index.split("nothing known") == ["nothing known"]


def test_leftmost_then_longest() -> None:
    text = "".join(chr(0x4E00 + number) for number in range(200))
    index = ChunkIndex(
        record_for(text[start:stop]) for start, stop in [(10, 60), (5, 45), (5, 50), (50, 90), (40, 199)]
    )
    assert index.find(text) == [(5, 50), (50, 90)]


def test_cut_or_changed_texts_are_not_found() -> None:
    text = "The cache keeps the keys and the values of every chunk. The keys are turned when their place is known."
    index = ChunkIndex([record_for(text)])
    assert index.find(text[:-1]) == []
    assert index.find(text[1:]) == []
    assert index.find(text[:50] + "?" + text[51:]) == []  # head, tail and length are those of the known text
    assert index.find(text[:-8] + "?" + text[-7:]) == []
    assert index.find("x" + text + "x") == [(1, 1 + len(text))]


def test_normal_forms_of_one_text_are_different_texts() -> None:
    composed, decomposed = "caf\u00e9 " * 10, "cafe\u0301 " * 10
    index = ChunkIndex([record_for(composed)])
    assert index.find(decomposed) == []
    assert index.find(composed.replace(" ", "\r\n")) == []


def test_short_texts_are_not_indexed() -> None:
    assert not is_indexable("a" * 31)
    assert is_indexable("a" * 32)
    with pytest.raises(InvalidSettingError, match="needs 32 characters"):
        record_for("a" * 31)
    assert ChunkIndex().find("a" * 100) == []
    assert ChunkIndex([record_for("a" * 32)]).find("a" * 31) == []


def test_a_record_is_pinned() -> None:
    # Records are kept next to stored chunks: if this fails, raise RECORD_VERSION.
    record = record_for("The cache keeps the keys and the values.\r\n\U0001f600\ud800\x00")
    assert record.hex() == "75e0c5f72d00000003adfac3cfc2b398"
    assert len(record) == RECORD_BYTES


def test_a_record_of_another_size_is_refused_and_nothing_added() -> None:
    index = ChunkIndex()
    with pytest.raises(InvalidSettingError, match="16 bytes"):
        index.add([record_for("a" * 32), b"short"])
    assert len(index) == 0


def test_known_texts_are_counted_once() -> None:
    records = [record_for(f"{number:032}") for number in range(50)] + [record_for("a" * (32 + n)) for n in range(50)]
    index = ChunkIndex(records[:60] * 2)
    assert len(index) == 60
    for record in records:
        index.add([record, record])
    assert len(index) == 100
    index.add([])
    assert len(index) == 100


def test_texts_added_between_searches_are_found() -> None:
    index = ChunkIndex()
    texts = [f"{number:04} is the number of this text among the others" for number in range(40)]
    prompt = "\n".join(texts)
    for count, text in enumerate(texts, start=1):
        index.add([record_for(text)])
        assert len(index.find(prompt)) == count


def test_searching_while_others_add() -> None:
    texts = [f"{number:04} is the number of this text among the others" for number in range(400)]
    prompt = "\n".join(texts[:40])
    index = ChunkIndex(map(record_for, texts[:20]))
    failures: list[BaseException] = []

    def add(share: int) -> None:
        for text in texts[share::4]:
            index.add([record_for(text)])

    def search() -> None:
        try:
            seen = 20
            while seen < 40:
                found = index.find(prompt)
                assert len(found) >= seen
                assert all(prompt[start:stop] in texts for start, stop in found)
                seen = len(found)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(share,)) for share in range(4)]
    threads += [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert not failures
    assert len(index) == len(texts)


def test_thousands_of_texts_behind_one_header_are_told_apart_quickly() -> None:
    header = "Licensed under terms that stand at the top of every single file. " * 4
    texts = [f"{header}{'body ' * (number % 90)}{number}" for number in range(3000)]
    index = ChunkIndex(map(record_for, texts))
    prompt = "\n".join(texts[::100])
    assert len(index) == len(texts)
    started = time.perf_counter()
    assert [prompt[start:stop] for start, stop in index.find(prompt)] == texts[::100]
    assert time.perf_counter() - started < 2  # seconds; about 0.01 on a quiet machine


def test_texts_made_to_collide_cost_reuse_and_not_time(caplog: pytest.LogCaptureFixture) -> None:
    known = [" " * 40 + chr(0x4E00 + number) + " " * 60 for number in range(6000)]
    index = ChunkIndex(map(record_for, known))
    prompt = known[17] + "\n" + " " * 16_000 + known[18]
    started = time.perf_counter()
    with caplog.at_level(logging.WARNING, logger="ragblend.prompt.match"):
        found = index.find(prompt)
    assert time.perf_counter() - started < 5  # seconds; about 0.3 on a quiet machine
    assert (0, len(known[17])) in found
    assert "too many known chunks" in caplog.text


# -- beginnings of texts that are cut ---------------------------------------------------------------------------------

PROSE = (
    "The cache keeps the keys and the values of every chunk. The keys are turned when their place is known, and not "
    "before; so a chunk may stand anywhere. What it was computed behind is written down beside it."
)


def kept(*texts: str) -> TextsOf:
    """A store's answer to the question which texts these records are of."""
    by_record = {record_for(text): text for text in texts}
    return lambda records: {record: by_record[record] for record in records if record in by_record}


def cuts(known: list[str], prompt: str) -> list[str]:
    parts = ChunkIndex(map(record_for, known)).split(prompt, kept(*known))
    assert "".join(part if isinstance(part, str) else part.text for part in parts) == prompt
    return [part.text for part in parts if isinstance(part, CutChunk)]


def test_the_beginning_of_a_cut_text_is_found() -> None:
    index = ChunkIndex([record_for(PROSE)])
    prompt = f"Context:\n{PROSE[:150]}\n---\nWhy?"
    assert index.split(prompt) == [prompt]
    assert index.split(prompt, kept(PROSE)) == [
        "Context:\n",
        CutChunk(PROSE[:150].rstrip(), PROSE),
        prompt[9 + len(PROSE[:150].rstrip()) :],
    ]
    assert index.split(prompt, kept()) == [prompt], "nothing is known but that a text begins so"
    assert index.split(prompt, kept(PROSE[:-1])) == [prompt], "and no other text will do"
    assert index.split(PROSE, kept(PROSE)) == [Chunk(PROSE)]


def test_a_cut_ends_at_a_words_border_and_without_space() -> None:
    for stop in range(70, len(PROSE)):
        (cut,) = cuts([PROSE], f"{PROSE[:stop]}\n\nWhy?")
        assert cut == PROSE[:stop].rstrip()
        (cut,) = cuts([PROSE], f"{PROSE[:stop]}qq Why?")
        assert cut == PROSE[:stop].rstrip(ascii_letters).rstrip()
    letters = "".join(chr(0x4E00 + number) for number in range(200))  # a script without spaces
    assert cuts([letters], f"{letters[:150]}qq") == [letters[:150]]
    assert cuts([PROSE], PROSE[:80]) == [PROSE[:80].rstrip()]


def test_beginnings_that_are_short_are_left_alone() -> None:
    assert MIN_CUT_CHARS == 64
    text = "".join(chr(0x4E00 + number) for number in range(200))
    assert cuts([text], text[:64] + "?") == [text[:64]]
    assert cuts([text], text[:63] + "?") == []
    assert cuts([text], text[1:]) == []


def test_of_several_texts_that_begin_alike_the_one_that_agrees_longest_is_taken() -> None:
    known = [PROSE[:90] + tail for tail in ("; and no more is known.", "; and that is all. ", ". But then?")]
    index = ChunkIndex(map(record_for, known))
    parts = index.split(f"{known[1][:-8]}\n\n{known[2][:-3]}\n\nWhy?", kept(*known))
    assert parts == [CutChunk(known[1][:-9], known[1]), " \n\n", CutChunk(known[2][:-3].rstrip(), known[2]), "\n\nWhy?"]


def test_whole_texts_come_first() -> None:
    parent, other = PROSE, "Another text goes on from there, and stands whole behind the one that was cut."
    assert cuts([parent, PROSE[:100]], f"{PROSE[:140]} Why?") == []
    # A cut text ends where a whole one begins.
    assert cuts([parent, other], f"{PROSE[:100]}{other} Why?") == [PROSE[:96].rstrip()]


def test_a_texts_beginning_may_stand_there_again_and_again() -> None:
    assert cuts([PROSE], f"{PROSE[:90]}\n{PROSE}\n{PROSE[:70]}\n{PROSE[:66]}") == [
        PROSE[:90].rstrip(),
        PROSE[:70].rstrip(),
        PROSE[:66].rstrip(),
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_only_what_a_known_text_begins_with_is_taken(data: st.DataObject) -> None:
    letters = data.draw(st.sampled_from(["ab", "ab \n", "a\ud800\U0001f600 "]))
    piece = st.text(alphabet=letters, min_size=20, max_size=90)
    pieces = data.draw(st.lists(piece, min_size=1, max_size=4))
    joined = st.lists(st.sampled_from(pieces), min_size=1, max_size=4).map("".join)
    known = [text for text in data.draw(st.lists(joined, max_size=5)) if is_indexable(text)]
    part = st.one_of(
        joined, st.sampled_from([*known, ""]).flatmap(lambda one: st.integers(0, 99).map(lambda n: one[:n]))
    )
    prompt = "".join(data.draw(st.lists(part, max_size=6)))
    index = ChunkIndex(map(record_for, known))
    parts = index.split(prompt, kept(*known))
    assert "".join(part if isinstance(part, str) else part.text for part in parts) == prompt
    assert [part for part in parts if type(part) is Chunk] == [Chunk(prompt[a:b]) for a, b in index.find(prompt)]
    for part in parts:
        if isinstance(part, CutChunk):
            assert part.whole in known
            assert part.whole.startswith(part.text)
            assert MIN_CUT_CHARS <= len(part.text) < len(part.whole)


def test_thousands_of_texts_that_begin_alike_are_not_all_looked_up() -> None:
    header = "Licensed under terms that stand at the top of every single file. " * 4
    known = [
        f"{header}{number} is the number of this text, and this text is not in the prompt" for number in range(3000)
    ]
    asked: list[int] = []

    def texts_of(records: Sequence[bytes]) -> Mapping[bytes, str]:
        asked.append(len(records))
        return kept(*known)(records)

    parts = ChunkIndex(map(record_for, known)).split(f"{header}What is new\n" * 50, texts_of)
    assert sum(isinstance(part, CutChunk) for part in parts) == 50
    assert len(asked) == 1
    assert asked[0] <= 128


def test_memory() -> None:
    index = ChunkIndex(record_for(f"{number:06} is the number of this text among the others") for number in range(1000))
    assert index.n_bytes == 16_000


def test_the_same_texts_again_and_again_take_no_memory_where_nobody_searches() -> None:
    """As where a retriever is heard by two LLMs, and one of them is never asked."""
    index = ChunkIndex()
    records = [record_for(f"{n:06} is the number of this text among the others") for n in range(1000)]
    tracemalloc.start()
    try:
        for _ in range(300):
            index.add(records)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2_000_000
    assert len(index) == 1000
