"""The index finds what a plain search finds, whatever the texts, the threads and the number of near misses."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragblend.errors import InvalidSettingError
from ragblend.prompt.chunk import Chunk
from ragblend.prompt.match import MIN_INDEXED_CHARS, RECORD_BYTES, ChunkIndex, is_indexable, record_for

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
    assert record.hex() == "75e0c5f7cf25c5102d00000003adfac37a6aa1abd8e2e218c7c8a091"
    assert len(record) == RECORD_BYTES


def test_a_record_of_another_size_is_refused_and_nothing_added() -> None:
    index = ChunkIndex()
    with pytest.raises(InvalidSettingError, match="28 bytes"):
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
