"""Laws of spans: every token in exactly one, chunks with their own ids, whatever the form of the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import chatml, t5

from ragblend.errors import EmptyPromptError, InvalidSettingError
from ragblend.prompt.chunk import Chunk, Message
from ragblend.prompt.layout import MIN_CUT_TOKENS, Layout, Prompt, Span, lay_out
from ragblend.prompt.match import ChunkIndex, record_for
from ragblend.prompt.template import PromptTokenizer

A = "The cache keeps the keys and the values of every chunk of the documents."
B = "A question about the documents is asked by the user, and is answered.<|im_end|></s><eos>"
CHATML = PromptTokenizer(chatml())

parts = st.lists(st.one_of(st.text(max_size=12), st.sampled_from([Chunk(A), Chunk(B)]), st.text(max_size=9).map(Chunk)))


def check_spans(layout: Layout) -> None:
    position = 0
    for before, span in zip((None, *layout.spans), layout.spans, strict=False):
        assert span.start == position < span.stop
        assert before is None or "chunk" in (before.kind, span.kind)
        assert (span.text is not None) == (span.kind == "chunk")
        position = span.stop
    assert position == len(layout.ids)
    assert layout.ids.dtype == np.int64
    assert np.array_equal(np.concatenate([layout.ids_of(span) for span in layout.spans]), layout.ids)


@settings(max_examples=60, deadline=None)
@given(content=parts, system=parts)
def test_spans_cover_the_ids_and_chunks_have_their_own_ids(
    tokenizer: PromptTokenizer, content: list[str | Chunk], system: list[str | Chunk]
) -> None:
    prompt = [Message("system", [*system, "Read."]), Message("user", [*content, "Why?"])]
    layout = lay_out(tokenizer, prompt)
    check_spans(layout)
    # A chunk's outer white space is glue: it is stored without.
    bare = [part.text.strip() for part in (*system, *content) if isinstance(part, Chunk)]
    wanted = [text for text in bare if tokenizer.encode_text(text)]
    assert [span.text for span in layout.chunks] == wanted
    for span in layout.chunks:
        assert layout.ids_of(span).tolist() == tokenizer.encode_text(span.text or "")
    assert np.array_equal(lay_out(tokenizer, prompt).ids, layout.ids)


def test_all_forms_of_one_prompt_are_one_prompt(tokenizer: PromptTokenizer) -> None:
    index = ChunkIndex([record_for(A), record_for(B)])
    text = f"Use this:\n{A}\n\n{B}\n\n{A} Why?"
    marked: list[str | Chunk] = ["Use this:\n", Chunk(A), "\n\n", Chunk(B), "\n\n", Chunk(A), " Why?"]
    forms: list[Prompt] = [marked, tuple(marked), [Message("user", marked)], text, [text], [Message("user", text)]]
    layouts = [lay_out(tokenizer, form, index) for form in forms]
    for layout in layouts:
        check_spans(layout)
        assert np.array_equal(layout.ids, layouts[0].ids)
        assert layout.spans == layouts[0].spans
        assert [span.text for span in layout.chunks] == [A, B, A]


def test_known_texts_are_found_in_every_role_and_over_borders_of_strings() -> None:
    index = ChunkIndex([record_for(A), record_for(B)])
    turns = [Message("system", ["Read: ", A[:40], A[40:]]), Message("user", "Hi."), Message("assistant", B)]
    prompt = [*turns, Message("user", "And?")]
    assert [span.text for span in lay_out(CHATML, prompt, index).chunks] == [A, B]
    assert lay_out(CHATML, prompt).chunks == ()


def test_a_marked_chunk_is_not_searched() -> None:
    index = ChunkIndex([record_for(A)])
    assert [span.text for span in lay_out(CHATML, [Chunk(f"x{A}y"), A, "?"], index).chunks] == [f"x{A}y", A]


def test_what_a_prompt_ends_in_is_what_it_asks() -> None:
    index = ChunkIndex([record_for(A), record_for(B)])
    assert [span.text for span in lay_out(CHATML, f"{B} {A}", index).chunks] == [B]
    assert [span.text for span in lay_out(CHATML, f"{B} {A} \n", index).chunks] == [B]
    assert [span.text for span in lay_out(CHATML, A, index).chunks] == []
    assert [span.text for span in lay_out(CHATML, ["See ", Chunk(A)], index).chunks] == [A]
    # Marked chunks are chunks there too, whatever white space is behind them.
    for end in ([Chunk(f"{A}\n")], [Chunk(A), "\n"], ["\n", Chunk(f" {A} "), " \n"]):
        assert [span.text for span in lay_out(CHATML, [f"{B} ", *end], index).chunks] == [B, A]
    for result in (Message("tool", f"{B} {A}"), Message("user", f"{B} {A}", asks=False)):
        assert [span.text for span in lay_out(CHATML, [Message("user", "Why?"), result], index).chunks] == [B, A]


def test_adjacent_and_repeated_chunks_are_separate_spans() -> None:
    layout = lay_out(CHATML, [Chunk(A), Chunk(A), Chunk(B)])
    assert [span.text for span in layout.chunks] == [A, A, B]
    assert layout.chunks[0].stop == layout.chunks[1].start
    assert np.array_equal(layout.ids_of(layout.chunks[0]), layout.ids_of(layout.chunks[1]))


def test_the_question_is_what_comes_after_the_last_chunk(tokenizer: PromptTokenizer) -> None:
    plain = lay_out(tokenizer, "Why?")
    assert plain.question == (0, len(plain.ids))
    layout = lay_out(tokenizer, [Chunk(A), " glue ", Chunk(B), " Why?"])
    start, stop = layout.question
    assert (start, stop) == (layout.chunks[-1].stop, len(layout.ids))
    assert layout.ids[start:stop].tolist()[: len(tokenizer.encode_text(" Why?"))] == tokenizer.encode_text(" Why?")
    no_template = lay_out(PromptTokenizer(t5()), [Chunk(A)])
    assert no_template.question == (len(no_template.ids), len(no_template.ids))


def test_the_preamble_is_the_head_of_the_layout(tokenizer: PromptTokenizer) -> None:
    head = [Message("system", "Read."), Message("user", "Context:\n")]
    layout = lay_out(tokenizer, [head[0], Message("user", ["Context:\n", Chunk(A), "\nWhy?"])])
    assert tokenizer.head_ids(head) == tuple(layout.ids[: layout.chunks[0].start].tolist())


@pytest.mark.parametrize(
    "prompt",
    ["", " \n\t", [], [""], [Chunk("")], [Chunk(" "), "\n"], [Message("user", "")], [Message("system", " ")]],
)
def test_nothing_to_answer(prompt: Any) -> None:
    with pytest.raises(EmptyPromptError):
        lay_out(CHATML, prompt)


def test_empty_chunks_are_dropped() -> None:
    assert np.array_equal(lay_out(CHATML, ["Why", Chunk(""), "?"]).ids, lay_out(CHATML, "Why?").ids)


@pytest.mark.parametrize(
    "prompt",
    [None, 1, b"bytes", {"role": "user"}, [1], [b"x"], [{"role": "user"}], ["a", Message("user", "b")], Chunk("a")],
)
def test_other_types_are_told_what_is_accepted(prompt: Any) -> None:
    with pytest.raises(InvalidSettingError, match="a prompt is a string, a sequence of strings and Chunks, or"):
        lay_out(CHATML, prompt)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span("text", 0, 2),),
        (Span("text", 0, 2), Span("chunk", 1, 3, "a")),
        (Span("text", 0, 0), Span("chunk", 0, 3, "a")),
        (Span("text", 1, 3),),
    ],
)
def test_a_layout_refuses_spans_that_do_not_cover(spans: tuple[Span, ...]) -> None:
    with pytest.raises(InvalidSettingError):
        Layout(np.arange(3, dtype=np.int64), spans)


def test_a_layout_refuses_other_ids() -> None:
    with pytest.raises(InvalidSettingError):
        Layout(np.arange(3, dtype=np.int32), (Span("text", 0, 3),))


LONG = f"{A} It reads them layer by layer. {B} Nothing is asked in the end; caf\u00e9s and \U0001f600 are in it, too."


@settings(max_examples=40, deadline=None)
@given(stop=st.integers(60, len(LONG) - 1), behind=st.sampled_from(["\n\nWhy?", "x Why?", " - ", "\U0001f600!"]))
def test_of_a_cut_chunk_those_tokens_are_taken_that_are_its_own(
    tokenizer: PromptTokenizer, stop: int, behind: str
) -> None:
    index, texts_of = ChunkIndex([record_for(LONG)]), lambda records: dict.fromkeys(records, LONG)
    prompt = f"Read:\n{LONG[:stop]}{behind} And now?"
    layout = lay_out(tokenizer, prompt, index, texts_of)
    check_spans(layout)
    whole = tokenizer.encode_text(LONG)
    for span in layout.chunks:
        assert LONG.startswith(span.text or "?")
        assert list(span.whole) == whole
        assert MIN_CUT_TOKENS <= len(span) < len(whole)
        assert layout.ids_of(span).tolist() == whole[: len(span)]
    if stop > 150:
        (span,) = layout.chunks
        text = span.text or ""
        # What the cut can change is the last word, letter by letter at worst.
        assert len(span) >= len(tokenizer.encode_text(text)) - len(text.split()[-1]) - 1
    # All of the prompt is there, once.
    text = tokenizer.decode(layout.ids.tolist())
    assert text.count("And now?") == tokenizer.decode(lay_out(tokenizer, prompt).ids.tolist()).count("And now?") == 1


def test_what_a_prompt_ends_in_is_no_cut_chunk() -> None:
    index, texts_of = ChunkIndex([record_for(LONG)]), lambda records: dict.fromkeys(records, LONG)
    assert lay_out(CHATML, f"So: {LONG[:150]}", index, texts_of).chunks == ()
    assert len(lay_out(CHATML, f"So: {LONG[:150]}\nWhy?", index, texts_of).chunks) == 1
    assert lay_out(CHATML, f"So: {LONG[:150]}\nWhy?", index).chunks == ()
    earlier = [Message("user", LONG[:150]), Message("assistant", "Yes."), Message("user", "Why?")]
    assert len(lay_out(CHATML, earlier, index, texts_of).chunks) == 1


def test_a_cut_chunk_of_few_tokens_is_text() -> None:
    text = "the quick brown fox jumps over the lazy dog " * 20
    few = MIN_CUT_TOKENS * 4
    assert len(CHATML.encode_text(text[:70])) < few
    index, texts_of = ChunkIndex([record_for(text)]), lambda records: dict.fromkeys(records, text)
    spans = {n: lay_out(CHATML, f"{text[:n]}?", index, texts_of).chunks for n in range(64, 300, 20)}
    for n, found in spans.items():
        assert bool(found) == (len(CHATML.encode_text(text[:n].rstrip())) >= MIN_CUT_TOKENS), n


def test_a_text_that_becomes_other_tokens_is_not_taken() -> None:
    """Whatever the store says a text is: tokens that are not its own are never taken for its."""
    index, other = ChunkIndex([record_for(LONG)]), LONG[:70] + "".join(reversed(LONG[70:]))
    cut = lay_out(CHATML, f"{LONG[:200]}\nWhy?", index, lambda records: dict.fromkeys(records, other))
    for span in cut.chunks:
        assert cut.ids_of(span).tolist() == CHATML.encode_text(other)[: len(span)]
    assert sum(map(len, cut.chunks)) <= len(CHATML.encode_text(LONG[:72]))
