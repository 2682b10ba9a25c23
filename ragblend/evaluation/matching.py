"""What it costs to find the chunks of a prompt among all that are known: time for a prompt, RAM for the index.

The texts are made up of random words, the same for the same seed. One in a hundred begins with the same notice, as
files under one licence do.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ragblend.blend.variants import Note
from ragblend.errors import whole_number
from ragblend.kv import LayerKV
from ragblend.prompt.chunk import Chunk, CutChunk
from ragblend.prompt.match import MIN_CUT_CHARS, ChunkIndex, record_for
from ragblend.store.kvstore import KVStore

PROMPTS = 10
NOTICE = "Licensed under terms that stand at the top of every single file, and that nobody has read to the end. "
QUESTION = "Question: what do the passages above have in common, and what sets them apart?"
_WORDS = 5000
_SHORTEST = 2 * MIN_CUT_CHARS + len(NOTICE)


def run(
    *,
    chunks: int,
    chunk_chars: int,
    prompt_chars: int,
    repeats: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure.

    Args:
        chunks: texts that are known, each of about chunk_chars characters.
        prompt_chars: characters of a prompt, filled with known texts and a question.
        repeats: how often each of PROMPTS prompts is searched.
        progress: called with (texts made, texts in all).

    Returns:
        {"median_ms": of a prompt that holds whole texts only; "cut_median_ms": of one in which the last of them is cut,
        which costs a look into the store; "found": texts found in a prompt; "index_bytes": RAM the index takes, with
        Python's own bookkeeping; ...}.

    Raises:
        InvalidSettingError: a number too small to measure with.
    """
    for name, value, least in (
        ("chunks", chunks, PROMPTS),
        ("chunk_chars", chunk_chars, _SHORTEST),
        ("prompt_chars", prompt_chars, 2 * chunk_chars + len(QUESTION)),
        ("repeats", repeats, 1),
    ):
        whole_number(name, value, least=least)
    source = _Texts(seed, chunk_chars)
    in_a_prompt = (prompt_chars - len(QUESTION)) // (chunk_chars + 2)
    wanted = set(random.Random(seed).sample(range(chunks), min(chunks, PROMPTS * in_a_prompt)))
    texts: list[str] = []
    records: list[bytes] = []
    for number in range(chunks):
        text = source.text(number)
        records.append(record_for(text))
        if number in wanted:
            texts.append(text)
        if progress is not None and number % 1000 == 0:
            progress(number, chunks)
    random.Random(seed).shuffle(texts)
    # The last one of a prompt will be cut, and of texts that begin with the notice only a few are looked at for that.
    texts.sort(key=lambda text: not text.startswith(NOTICE))
    shares = [texts[first::PROMPTS] for first in range(PROMPTS)]

    gc.collect()
    tracemalloc.start()
    index = ChunkIndex(records)
    known = len(index)
    gc.collect()
    index_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as folder, KVStore(folder) as store:
        for text in texts:
            _keep(store, text)

        def texts_of(asked: Sequence[bytes]) -> Mapping[bytes, str]:
            notes = map(Note.from_bytes, store.notes_labelled(asked).values())
            return {note.label: note.text for note in notes}

        def search(prompt: str, expected: type[Chunk]) -> tuple[float, int]:
            started = time.perf_counter()
            parts = index.split(prompt, texts_of)
            seconds = time.perf_counter() - started
            found = [part for part in parts if isinstance(part, Chunk)]
            if not found or type(found[-1]) is not expected:
                raise RuntimeError("a text that stands in the prompt was not found")
            return seconds, len(found)

        whole = ["\n\n".join([*share, QUESTION]) for share in shares]
        cut = ["\n\n".join([*share[:-1], share[-1][: chunk_chars // 2], QUESTION]) for share in shares]
        times: dict[type[Chunk], list[float]] = {Chunk: [], CutChunk: []}
        for expected, prompts in ((Chunk, whole), (CutChunk, cut)):
            search(prompts[0], expected)  # the first one pays for what is loaded late
            for prompt in prompts * repeats:
                seconds, found = search(prompt, expected)
                times[expected].append(seconds)
    if progress is not None:
        progress(chunks, chunks)
    return {
        "chunks": known,
        "chunk_chars": chunk_chars,
        "prompt_chars": round(statistics.mean(map(len, whole))),
        "found": found,
        "searches": PROMPTS * repeats,
        "median_ms": statistics.median(times[Chunk]) * 1e3,
        "p95_ms": float(np.percentile(times[Chunk], 95)) * 1e3,
        "cut_median_ms": statistics.median(times[CutChunk]) * 1e3,
        "index_bytes": index_bytes,
    }


class _Texts:
    """The same text for the same number."""

    def __init__(self, seed: int, chars: int) -> None:
        self._seed, self._chars = seed, chars
        letters = random.Random(seed)
        self._words = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=1 + n % 11)) for n in range(_WORDS)]

    def text(self, number: int) -> str:
        words = random.Random(f"{self._seed}:{number}").choices(self._words, k=self._chars // 6)
        body = " ".join(words)
        return f"{NOTICE if number % 100 == 0 else ''}{body}"[: self._chars].strip()


def _keep(store: KVStore, text: str) -> None:
    """What a store knows of a text, with the smallest KV there is."""
    record = record_for(text)
    smallest = torch.zeros(1, 1, 1)
    note = Note(b"", np.zeros(1, dtype=np.bool_), record, text)
    store.put(record.hex(), [LayerKV(smallest, smallest)], note=note.to_bytes())
