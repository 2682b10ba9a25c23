"""The ways of answering that are compared, and the questions they are compared on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ragblend.blend.selectors import HKVD, QuestionAttention, RecomputeNone
from ragblend.engine import EngineSettings, RagBlend
from ragblend.errors import InvalidSettingError
from ragblend.model.decoder import Decoder, PreTrainedTokenizerBase
from ragblend.prompt.template import PromptTokenizer
from ragblend.store.kvstore import KVStore

HEAD = "Answer the question from the passages below.\n\n"
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Question:
    """A question with the passages to answer it from, cut to a number of tokens."""

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]

    def prompt(self, order: Sequence[int]) -> str:
        """The prompt string with the chunks in the given order."""
        passages = SEPARATOR.join(self.chunks[i] for i in order)
        return f"{HEAD}{passages}{SEPARATOR}Question: {self.question}\nAnswer briefly."


def read_questions(
    data: Path, tokenizer: PromptTokenizer, *, chunks: int, chunk_tokens: int, limit: int
) -> list[Question]:
    """Questions of a JSONL file of {question, answers, chunks}, each with `chunks` chunks of at most `chunk_tokens`.

    Raises:
        InvalidSettingError: the file cannot be read, or has no question with that many chunks.
    """
    questions: list[Question] = []
    try:
        with data.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(questions) == limit:
                    break
                if not line.strip():
                    continue
                record = json.loads(line)
                passages = [_cut(tokenizer, text, chunk_tokens) for text in record["chunks"][:chunks]]
                passages = list(dict.fromkeys(p for p in passages if p))
                if len(passages) == chunks:
                    identity = str(record.get("id", number))
                    answers = tuple(record.get("answers", ()))
                    questions.append(Question(identity, record["question"], answers, tuple(passages)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSettingError(
            f"{data} is not a JSONL file of {{question, answers, chunks}}: {type(error).__name__}: {error}"
        ) from error
    if not questions:
        raise InvalidSettingError(
            f"{data} holds no question with {chunks} different chunks: ask for fewer with --chunks"
        )
    return questions


def _cut(tokenizer: PromptTokenizer, text: str, tokens: int) -> str:
    return tokenizer.decode(tokenizer.encode_text(text.strip())[:tokens]).strip()


@dataclass(frozen=True)
class Strategy:
    """One way of answering: an engine and the ratio it is asked with."""

    name: str
    engine: RagBlend
    ratio: float

    @property
    def reads_store(self) -> bool:
        """Whether it needs what was ingested."""
        return self.ratio < 1.0


@contextmanager
def strategies(
    model: Decoder, tokenizer: PreTrainedTokenizerBase, store: KVStore, ratio: float
) -> Iterator[list[Strategy]]:
    """The strategies, on one model and one store.

    full: a full prefill. prefix: a full prefill behind what a prefix cache finds. reuse: stored KV as it is.
    cacheblend: as published, chunks prefilled alone and HKVD tokens recomputed. blend: ragblend's defaults.
    Blended prefixes are not kept: a repetition would measure RAM, not blending.
    """
    base = EngineSettings(preamble=HEAD, ratio=ratio, reuse_blended=False, learn=False)
    made = [
        Strategy("full", _engine(model, tokenizer, store, base, prefix_cache_bytes=0), 1.0),
        Strategy("prefix", _engine(model, tokenizer, store, base), 1.0),
        Strategy("reuse", _engine(model, tokenizer, store, base, selector=RecomputeNone()), 0.0),
        Strategy(
            "cacheblend",
            _engine(model, tokenizer, store, base, preamble=None, selector=HKVD(), prefix_cache_bytes=0),
            ratio,
        ),
        Strategy("blend", _engine(model, tokenizer, store, base, selector=QuestionAttention()), ratio),
    ]
    try:
        yield made
    finally:
        for strategy in made:
            strategy.engine.close()


def _engine(
    model: Decoder, tokenizer: PreTrainedTokenizerBase, store: KVStore, base: EngineSettings, **changes: object
) -> RagBlend:
    return RagBlend(model, tokenizer, store, replace(base, **changes))  # type: ignore[arg-type]


def orders(chunks: int, count: int, seed: int) -> list[list[int]]:
    """`count` chunk orders, each another one than the one before it."""
    generator = random.Random(seed)
    made: list[list[int]] = []
    while len(made) < count:
        order = generator.sample(range(chunks), chunks)
        if chunks == 1 or not made or order != made[-1]:
            made.append(order)
    return made
