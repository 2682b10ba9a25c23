"""Text comes out whole: no half characters, nothing behind or inside a stop string; sampling does what it says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ragblend.errors import InvalidSettingError
from ragblend.model.generate import DecodeSettings, _TextStream, next_token


def from_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer in its purest form."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(min_size=1, max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_are_the_text_up_to_the_first_stop_string(text: str, stop: list[str]) -> None:
    text = text.encode("utf-8", "replace").decode()
    stream = _TextStream(from_bytes, tuple(stop))
    pieces, stopped = [], False
    for byte in text.encode():
        piece, stopped = stream.push(byte)
        pieces.append(piece)
        assert "\N{REPLACEMENT CHARACTER}" not in piece or "\N{REPLACEMENT CHARACTER}" in text
        if stopped:
            break
    if not stopped:
        pieces.append(stream.finish())
    found = [text.find(s) for s in stop if s in text]
    got = "".join(pieces)
    if not found:
        assert got == text
    else:
        # The stop string that is complete first ends the answer.
        ends = min(text.find(s) + len(s) for s in stop if s in text)
        assert (
            got == text[: min(at for at in found if any(text[at:].startswith(s) and at + len(s) <= ends for s in stop))]
        )


def test_a_stop_string_over_token_seams_never_leaks() -> None:
    words = {1: "He", 2: "llo <", 3: "|e", 4: "nd|", 5: "> more"}
    stream = _TextStream(lambda ids: "".join(words[i] for i in ids), ("<|end|>",))
    assert [stream.push(i) for i in (1, 2, 3, 4, 5)] == [
        ("He", False),
        ("llo ", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_what_only_began_like_a_stop_string_comes_out_at_the_end() -> None:
    stream = _TextStream(from_bytes, ("END",))
    assert "".join([stream.push(b)[0] for b in b"the EN"]) == "the "
    assert stream.finish() == "EN"


def test_bytes_that_never_become_a_character_do_not_hold_the_text_for_ever() -> None:
    stream = _TextStream(from_bytes, ())
    assert "".join(stream.push(0xFF)[0] for _ in range(30)).count("\N{REPLACEMENT CHARACTER}") > 15


def test_greedy_top_p_and_penalty() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    seen = torch.tensor([1, 1])
    assert next_token(logits, DecodeSettings(), seen, None) == 1
    assert next_token(logits, DecodeSettings(repetition_penalty=1.5), seen, None) == 2
    assert next_token(-logits - 5, DecodeSettings(repetition_penalty=3.0), torch.tensor([3]), None) == 0
    generator = torch.Generator().manual_seed(0)
    narrow = DecodeSettings(temperature=1.0, top_p=0.6)
    assert {next_token(logits, narrow, seen, generator) for _ in range(100)} == {1, 2}
    assert {next_token(logits, DecodeSettings(temperature=1.0, top_p=0.01), seen, generator) for _ in range(50)} == {1}
    assert {next_token(logits, DecodeSettings(temperature=50.0), seen, generator) for _ in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize("stop", ["text", ("",), (3,)])
def test_stop_is_a_sequence_of_strings(stop: object) -> None:
    with pytest.raises(InvalidSettingError, match="stop"):
        DecodeSettings(stop=stop)  # type: ignore[arg-type]


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.3, 1.0, 2.0]), st.sampled_from([0.5, 0.9, 1.0])
)
def test_top_k_draws_from_the_k_likeliest_as_transformers_does(seed: int, k: int, temperature: float, p: float) -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    warped = TemperatureLogitsWarper(temperature)(None, logits[None])
    warped = TopKLogitsWarper(k)(None, warped)
    warped = TopPLogitsWarper(p)(None, warped)
    possible = set(torch.nonzero(torch.isfinite(warped[0])).flatten().tolist())
    settings = DecodeSettings(temperature=temperature, top_k=k, top_p=p)
    generator = torch.Generator().manual_seed(seed)
    drawn = [next_token(logits, settings, torch.tensor([0]), generator) for _ in range(40)]
    assert set(drawn) <= possible <= set(logits.topk(min(k, 10)).indices.tolist())
    if k == 1:
        assert settings.greedy
        assert set(drawn) == {next_token(logits, DecodeSettings(), torch.tensor([0]), None)}


def test_what_top_k_and_top_p_leave_is_all_drawn_in_the_end() -> None:
    logits = torch.tensor([2.0, 1.9, 1.8, 1.7, -1.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(**how: float) -> set[int]:
        settings = DecodeSettings(temperature=1.0, **how)  # type: ignore[arg-type]
        return {next_token(logits, settings, torch.tensor([0]), generator) for _ in range(200)}

    assert drawn(top_k=3) == {0, 1, 2}
    assert drawn(top_k=99) == drawn(top_k=0) == {0, 1, 2, 3, 4}
    assert drawn(top_p=0.6) == {0, 1, 2}
    assert drawn(top_k=3, top_p=0.6) == {0, 1}  # of what top_k leaves, not of everything
