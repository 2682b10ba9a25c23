"""Repeated runs of tokens against their definition, word for word; and the edges where arrays are short."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.prompt.repeats import RUN_TOKENS, Ids, repeated, repeated_behind

# Few different tokens, so that long runs come back by themselves; and the ends of the range of ids.
TOKENS = st.sampled_from([0, 1, 2**31 - 1, 2**31])


def tokens(values: Sequence[int]) -> Ids:
    return np.array(values, dtype=np.int64)


def by_definition(ids: Sequence[int], start: int, stop: int) -> list[bool]:
    """Which tokens of start..stop lie in a run inside the span that occurs as a whole in ids[:start]."""
    before = {tuple(ids[at : at + RUN_TOKENS]) for at in range(start - RUN_TOKENS + 1)}
    mask = [False] * (stop - start)
    for at in range(start, stop - RUN_TOKENS + 1):
        if tuple(ids[at : at + RUN_TOKENS]) in before:
            mask[at - start : at - start + RUN_TOKENS] = [True] * RUN_TOKENS
    return mask


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids made of a few passages that come again and again, and spans over them that may touch or be empty."""
    passages = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=14), min_size=1, max_size=3))
    ids = [token for passage in draw(st.lists(st.sampled_from(passages), max_size=10)) for token in passage]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), min_size=2, max_size=8)))
    return ids, list(itertools.pairwise(cuts))


@given(prompts())
def test_runs_are_those_of_the_definition_in_every_span(prompt: tuple[list[int], list[tuple[int, int]]]) -> None:
    ids, spans = prompt
    masks = repeated(tokens(ids), spans)
    assert [mask.tolist() for mask in masks] == [by_definition(ids, *span) for span in spans]
    assert all(mask.dtype == np.bool_ for mask in masks)


@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, max_size=30))
def test_a_context_and_a_chunk_are_one_span_behind_it(context: list[int], chunk: list[int]) -> None:
    together = context + chunk
    mask = repeated_behind(tokens(context), tokens(chunk))
    assert mask.tolist() == by_definition(together, len(context), len(together))


@given(st.lists(st.integers(0, 2**31), min_size=RUN_TOKENS, max_size=60, unique=True), st.data())
def test_ids_that_differ_in_one_token_are_another_run(ids: list[int], data: st.DataObject) -> None:
    assert repeated_behind(tokens(ids), tokens(ids)).all()
    changed = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids]
    other[changed] ^= 1 << data.draw(st.integers(0, 30))
    assert repeated_behind(tokens(ids), tokens(other)).tolist() == by_definition(ids + other, len(ids), 2 * len(ids))


@pytest.mark.parametrize("context", [0, 1, RUN_TOKENS - 1, RUN_TOKENS])
@pytest.mark.parametrize("chunk", [0, 1, RUN_TOKENS - 1, RUN_TOKENS])
def test_only_whole_runs_count(context: int, chunk: int) -> None:
    mask = repeated_behind(tokens(range(context)), tokens(range(chunk)))
    assert mask.tolist() == [context == chunk == RUN_TOKENS] * chunk


def test_a_run_begins_and_ends_in_the_span_and_in_what_stands_before_it() -> None:
    run = list(range(RUN_TOKENS))
    ids = tokens([*run, *run, 99])
    assert not repeated(ids, [(4, 16)])[0].any()  # the first copy reaches into the span
    assert not repeated(ids, [(9, 17)])[0].any()  # the second one begins before it
    assert repeated(ids, [(8, 17)])[0].tolist() == [True] * RUN_TOKENS + [False]
    # Inside one span, nothing repeats itself.
    assert not repeated(ids, [(0, 17)])[0].any()
    assert not repeated(tokens([5] * 40), [(0, 40)])[0].any()


def test_nothing_in_nothing_out() -> None:
    assert repeated(tokens([]), []) == []
    assert [mask.tolist() for mask in repeated(tokens([]), [(0, 0), (0, 0)])] == [[], []]


def test_masks_are_the_same_in_every_process() -> None:
    probe = (
        "import numpy as np\n"
        "from ragblend.prompt.repeats import repeated\n"
        "ids = np.random.default_rng(0).integers(0, 2, 400) * 2**31\n"
        "print(np.packbits(repeated(ids, [(150, 280), (280, 400)])[0]).tobytes().hex())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", probe],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    ids = np.random.default_rng(0).integers(0, 2, 400) * 2**31
    assert printed == {np.packbits(by_definition(ids.tolist(), 150, 280)).tobytes().hex() + "\n"}
