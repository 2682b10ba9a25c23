"""The ways of answering that are compared, and the questions they are compared on.

A way of answering is a policy (what chunks were prefilled behind) and a selector (which tokens are recomputed), written
policy/selector; a few have names of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ragblend.blend.prefill import Selector
from ragblend.blend.selectors import HKVD, FirstTokens, QuestionAttention, RecomputeNone
from ragblend.blend.variants import POLICIES, Policy
from ragblend.engine import RagBlend
from ragblend.errors import InvalidSettingError
from ragblend.evaluation.cases import Case, read_cases
from ragblend.model.decoder import Decoder, PreTrainedTokenizerBase
from ragblend.prompt.match import MIN_INDEXED_CHARS, is_indexable
from ragblend.prompt.template import PromptTokenizer
from ragblend.report import BlendReport
from ragblend.settings import EngineSettings
from ragblend.store.kvstore import KVStore

SELECTORS: Mapping[str, Selector] = {
    "none": RecomputeNone(),
    "first": FirstTokens(),
    "hkvd": HKVD(layers=10),
    "hkvd-oneshot": HKVD(),
    "question": QuestionAttention(),
}
NAMED = {"reuse": "none/none", "cacheblend": "none/hkvd", "blend": "neighbours/question"}
"""reuse: chunks prefilled alone, used as they are. cacheblend: as published, HKVD tokens by the keys of layer 1 with
gradual filtering. blend: what ragblend does if it is told nothing else."""

HEAD = "Answer the question from the passages below.\n\n"
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Question(Case):
    """A case as it is asked; its chunks are cut to a number of tokens."""

    def prompt(self, order: Sequence[int]) -> str:
        """The prompt string with the chunks in the given order."""
        passages = SEPARATOR.join(self.chunks[i] for i in order)
        return f"{HEAD}{passages}{SEPARATOR}Question: {self.question}\nAnswer briefly."


def read_questions(
    data: Path, tokenizer: PromptTokenizer, *, chunks: int, chunk_tokens: int, limit: int | None
) -> list[Question]:
    """Questions of a JSONL file of {question, answers, chunks}, each with `chunks` chunks of at most `chunk_tokens`.

    Those with fewer chunks, or with one that is too short to be found in a prompt, are passed over: nothing of it
    would be reused, and a full prefill be taken for a perfect blend.

    limit: so many at most; None: all.

    Raises:
        InvalidSettingError: as read_cases; or there is no question with that many chunks.
    """
    questions: list[Question] = []
    for case in read_cases(data):
        if len(questions) == limit:
            break
        passages = dict.fromkeys(_cut(tokenizer, text, chunk_tokens) for text in case.chunks[:chunks])
        if len(passages) == chunks and all(map(is_indexable, passages)):
            questions.append(Question(case.id, case.question, case.answers, tuple(passages)))
    if not questions:
        raise InvalidSettingError(
            f"{data} holds no question with {chunks} different chunks of {MIN_INDEXED_CHARS} characters or more when "
            f"they are cut to {chunk_tokens} tokens; shorter ones are not found in a prompt: ask for fewer with "
            "--chunks, or for longer ones with --chunk-tokens"
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


def parsed(strategy: str) -> tuple[Policy, Selector]:
    """The policy and the selector that a strategy's name means.

    Raises:
        InvalidSettingError: it means none.
    """
    policy, _, selector = NAMED.get(strategy, strategy).partition("/")
    for known in POLICIES:
        if policy == known and selector in SELECTORS:
            return known, SELECTORS[selector]
    raise InvalidSettingError(
        f"there is no strategy {strategy!r}: take one of {', '.join(NAMED)}, or policy/selector with a policy of "
        f"{', '.join(POLICIES)} and a selector of {', '.join(SELECTORS)}"
    )


@contextmanager
def engines(
    model: Decoder, tokenizer: PreTrainedTokenizerBase, store: KVStore, names: Sequence[str], *, namespace: str = ""
) -> Iterator[dict[str, RagBlend]]:
    """An engine for each strategy, on one model and one store; "full" and "prefix" are full prefills.

    Blended prefixes are not kept: a repetition would measure RAM, not blending.
    """
    with ExitStack() as stack:
        made: dict[str, RagBlend] = {}
        for name in names:
            policy, selector = parsed("blend" if name in ("full", "prefix") else name)
            if isinstance(selector, HKVD):  # there are models of fewer layers than it would filter over
                layers = min(selector.layers, model.n_layers - selector.check_layer)
                selector = replace(selector, layers=layers)
            # Published systems have no prefix cache beside the blend, and a full prefill must be one.
            settings = EngineSettings(
                preamble=HEAD,
                policy=policy,
                namespace=namespace,
                selector=None if name == "blend" else selector,
                prefix_cache_bytes=0 if name == "full" or policy == "none" else EngineSettings.prefix_cache_bytes,
                reuse_blended=False,
                learn=False,
                correct_drift=policy != "none",  # as published
            )
            made[name] = stack.enter_context(RagBlend(model, tokenizer, store, settings))
        yield made


@contextmanager
def strategies(
    model: Decoder, tokenizer: PreTrainedTokenizerBase, store: KVStore, ratio: float
) -> Iterator[list[Strategy]]:
    """What speed is compared of.

    full: a full prefill. prefix: a full prefill behind what a prefix cache finds. reuse: stored KV as it is.
    cacheblend: as published. blend: ragblend's defaults.
    """
    ratios = {"full": 1.0, "prefix": 1.0, "reuse": 0.0, "cacheblend": ratio, "blend": ratio}
    with engines(model, tokenizer, store, list(ratios)) as made:
        yield [Strategy(name, made[name], ratio) for name, ratio in ratios.items()]


def check_reused(strategy: str, report: BlendReport) -> None:
    """Raises InvalidSettingError if nothing was reused: a full prefill would pass for a perfect, slow blend."""
    if not report.reused_tokens:
        raise InvalidSettingError(
            f"{strategy} is measured on stored chunks and found none of this prompt's: if the store has a size limit, "
            "raise it above what the questions take, or leave --store out"
        )


def orders(chunks: int, count: int, seed: int) -> list[list[int]]:
    """`count` chunk orders, each another one than the one before it."""
    generator = random.Random(seed)
    made: list[list[int]] = []
    while len(made) < count:
        order = generator.sample(range(chunks), chunks)
        if chunks == 1 or not made or order != made[-1]:
            made.append(order)
    return made


def machine(decoder: Decoder) -> dict[str, Any]:
    """What a measurement ran on."""
    return {
        "device": str(decoder.device),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
