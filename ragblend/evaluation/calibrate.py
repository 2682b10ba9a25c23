"""Calibration: what keeps answers close to a full prefill's on this corpus, with this model.

First the selectors are compared, on a part of the requests and at two ratios: the cheapest of those that are not worse
than the best one beyond chance is taken. Then every request is answered by a full prefill and, with that selector, at
each ratio; from these samples the engine chooses ratios for new requests (blend.budget).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from ragblend.blend.budget import MEASURED, RATIOS, Floats, Samples, signals
from ragblend.blend.divergence import kl_divergence
from ragblend.blend.prefill import Pass, Selector
from ragblend.blend.selectors import FirstTokens, QuestionAttention, selector_as_dict
from ragblend.engine import RagBlend
from ragblend.errors import ContextWindowError, IngestError, InvalidSettingError
from ragblend.evaluation.metrics import bootstrap_interval, paired_ratio_interval
from ragblend.kb.knowledge import DEFAULT_TOP_K
from ragblend.model.generate import DecodeSettings
from ragblend.prompt.chunk import Message
from ragblend.prompt.layout import Prompt
from ragblend.quality import QUALITIES, RISK, MaxKL
from ragblend.report import BlendReport
from ragblend.settings import Ratio

if TYPE_CHECKING:
    from ragblend.kb import KnowledgeBase

_log = logging.getLogger(__name__)

CANDIDATES: tuple[Selector, ...] = (
    FirstTokens(),
    QuestionAttention((0.125, 0.25)),
    QuestionAttention((0.375, 0.625)),
    QuestionAttention((0.5, 1.0)),
)
"""The selectors that are compared; all choose before the first layer, as a ratio chosen by their scores needs."""

DEFAULT_QUESTIONS = 60
DEFAULT_MINUTES = 10.0
NEEDED = round(1 / RISK) - 1
"""Requests without which nothing can be promised."""

_COMPARED_AT = (0.05, 0.15)
_COMPARED_ON = 12  # requests
_ANSWER_TOKENS = 16
_TRIED = NEEDED * 3 // 2  # made-up questions at least: some reuse nothing
_SPARE = 0.9  # share of the time that is spent asking
_MAKING = 0.25  # share of the time that making questions up takes at most, if they are enough by then


class Reference(NamedTuple):
    """A full prefill's greedy answer. logits: [tokens, vocab] at each of its tokens."""

    prompt: Prompt
    ids: list[int]
    logits: Tensor


@dataclass
class _Probe:
    """Takes a given ratio, and notes the signals of every ratio."""

    ratio: float
    seen: Floats | None = field(default=None, repr=False)

    def __call__(self, scores: Tensor, state: Pass) -> float:
        self.seen = signals(scores, state, RATIOS)
        return self.ratio


def calibrate(
    engine: RagBlend,
    prompts: Sequence[Prompt],
    *,
    candidates: Sequence[Selector] = CANDIDATES,
    minutes: float = DEFAULT_MINUTES,
    source: str = "given",
    model: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Find the selector and sample the divergence; the engine uses both from then on and keeps them with its store.

    Args:
        prompts: requests like those to come, whose chunks are ingested.
        candidates: selectors that choose before the first layer.
        minutes: no request is begun when they are nearly over, except the few that anything can be promised from. The
            log says so where that takes longer.
        source: where the prompts come from, for the record.
        model: its name, for the record; "": as transformers has it.
        progress: called with (steps done, steps in all).

    Returns:
        {"selector": {...}, "questions": n, "levels": {"strict": {"max_kl", "ratio", "ratio_ci", "kl", "kl_ci",
        "within", "full", "fixed_ratio"}, ...}, "compared": [...], "source", "model", "dtype", "policy", "made",
        "seconds"}. Of each level: the mean ratio that requests are given, their mean KL, the shares that keep the bound
        and that get a full prefill, and the fixed ratio that would keep it as often.

    Raises:
        InvalidSettingError: too few prompts, or too few that reuse KV which is not exact where it stands; no
            candidates.
        IngestError: none of the prompts holds a stored chunk.
        ContextWindowError: they are too long for the model.
        StoreError: what is found could not be kept.
    """
    if not candidates:
        raise InvalidSettingError("calibration needs at least one selector to compare")
    if len(prompts) < NEEDED:
        raise _too_few(len(prompts))
    engine.store.check_writable()
    started = time.perf_counter()
    seconds = _SPARE * 60 * minutes
    compared_on = min(_COMPARED_ON, len(prompts)) if len(candidates) > 1 else 0
    steps, done = compared_on + len(prompts), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    compared = _Comparison(engine, candidates)
    references: dict[int, Reference] = {}
    for n, prompt in enumerate(prompts[:compared_on]):
        with contextlib.suppress(ContextWindowError):  # a prompt that could not be answered anyway
            references[n] = reference_of(engine, prompt)
            compared.ask(references[n])
        step()
        if time.perf_counter() - started > seconds / 2:
            break
    selector = compared.best() if compared_on else candidates[0]
    seen: list[Floats] = []
    kl: list[list[float]] = []
    exact = 0  # requests whose stored chunks all stand where they were prefilled
    too_long: ContextWindowError | None = None
    began, said = time.perf_counter(), False
    for asked, prompt in enumerate(prompts):
        if (now := time.perf_counter()) - started > seconds:
            if len(kl) >= NEEDED:
                break
            if asked and not said:
                left = NEEDED - len(kl)
                _log.warning(
                    "the time is over, but %d of the %d questions that have to be asked in any case are left: they "
                    "take about %.1f minutes more",
                    *(left, NEEDED, left * (now - began) / asked / 60),
                )
                said = True
        try:
            reference = references.pop(asked, None) or reference_of(engine, prompt)
            probes = [_Probe(ratio) for ratio in MEASURED]
            row = [divergence(engine, reference, probe, selector) for probe in probes]
            if (found := probes[0].seen) is not None:  # else nothing has moved: it is a full prefill's already
                seen.append(found)
                kl.append([measured.kl for measured in row])
            elif row[0].report.reused_tokens:
                exact += 1
        except ContextWindowError as error:
            too_long = error
        step()
    if not kl and not exact:
        raise too_long or IngestError("none of the chunks in these prompts is stored: ingest them first")
    if (reusing := len(kl) + exact) < NEEDED:
        raise InvalidSettingError(
            f"only {reusing} of {len(prompts)} questions reuse anything; {NEEDED} are needed at least: ask others"
        )
    if len(kl) < NEEDED:
        raise InvalidSettingError(
            f"{exact} of {len(prompts)} questions need no ratio: all they reuse stands where it was prefilled, and is "
            f"exact there. To promise something for others takes {NEEDED} of those at least, and there are {len(kl)}: "
            "ask with more chunks; or where answers are made from no more than these, ask for no bound"
        )
    samples = Samples.measured(selector, np.stack(seen), np.array(kl))
    summary = {
        "selector": selector_as_dict(selector),
        "questions": len(samples),
        "source": source,
        "model": model or engine.decoder.model.name_or_path or type(engine.decoder.model).__name__,
        "dtype": str(engine.decoder.dtype).removeprefix("torch."),
        "policy": engine.settings.policy,
        "levels": {name: _level(samples, MaxKL(nats)) for name, nats in QUALITIES.items()},
        "compared": compared.as_list(),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - started,
    }
    engine.keep_calibration(samples, summary)
    if progress is not None:
        progress(steps, steps)
    return summary


def calibrate_documents(
    kb: KnowledgeBase,
    questions: Sequence[str] | None = None,
    *,
    limit: int = DEFAULT_QUESTIONS,
    top_k: int = DEFAULT_TOP_K,
    minutes: float = DEFAULT_MINUTES,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Calibrate a knowledge base: each question is asked as `KnowledgeBase.query` would ask it.

    Args:
        questions: what its users ask; None: the model makes some up from a sample of the chunks.
        limit: questions at most.
        top_k: chunks of a prompt, as they will be asked with.
        progress: called with (what is being done, steps done, steps in all).

    Returns:
        As `calibrate`.

    Raises:
        InvalidSettingError, IngestError: as `calibrate`; or there are no documents.
        ModelError: there is no model.
    """
    started = time.perf_counter()
    if (count := limit if questions is None else min(limit, len(questions))) < NEEDED:
        raise _too_few(count)
    kb.store.check_writable()
    kb.as_retriever(top_k)  # says so at once if there is nothing to retrieve

    def doing(what: str) -> Callable[[int, int], None]:
        return lambda done, steps: None if progress is None else progress(what, done, steps)

    making_s = _MAKING * 60 * minutes
    asked = list(questions or _questions(kb, limit, making_s, doing("making questions")))[:limit]
    prompts = _prompts(kb, asked, top_k)
    left = minutes - (time.perf_counter() - started) / 60
    return calibrate(
        kb.engine,
        prompts,
        minutes=left,
        source="generated" if questions is None else "given",
        model=kb.models.name,
        progress=doing("calibrating"),
    )


def _questions(kb: KnowledgeBase, limit: int, seconds: float, progress: Callable[[int, int], None]) -> list[str]:
    """Questions that the model makes up, each from one chunk; only as many as are needed once the seconds are over."""
    started = time.perf_counter()
    chunks = kb.index.sample(limit)
    made: dict[str, None] = {}
    for done, text in enumerate(chunks):
        if len(made) >= _TRIED and time.perf_counter() - started > seconds:
            break
        progress(done, len(chunks))
        prompt = f"{text}\n\nWrite one short question that is answered by this text, and nothing else."
        answer = kb.engine.answer(prompt, ratio=1.0, max_tokens=48, stop=["?", "\n\n"]).text.strip()
        question = answer.splitlines()[-1].strip() if answer else ""
        if question:
            made[question + "?"] = None
    if len(made) < NEEDED:
        raise InvalidSettingError(
            f"only {len(made)} questions could be made from {len(chunks)} chunks; {NEEDED} are needed: give your own, "
            "or ingest more"
        )
    return list(made)


def _prompts(kb: KnowledgeBase, questions: Sequence[str], top_k: int) -> list[list[Message]]:
    """What core's query engine asks the model with, for each question."""
    from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
    from llama_index.core.schema import MetadataMode
    from llama_index.llms.ragblend import RagBlendLLM
    from llama_index.llms.ragblend.conversation import conversation

    retriever, llm = kb.as_retriever(top_k), RagBlendLLM.from_engine(kb.engine)
    template = DEFAULT_TEXT_QA_PROMPT_SEL.select(llm)
    prompts = []
    for question in questions:
        nodes = retriever.retrieve(question)
        context = "\n\n".join(node.get_content(MetadataMode.LLM) for node in nodes)
        asked = llm.messages_for(template, context_str=context, query_str=question)
        prompts.append(conversation(asked, llm.messages_to_prompt))
    return prompts


def _too_few(count: int) -> InvalidSettingError:
    return InvalidSettingError(
        f"{count} questions are too few: to promise something for {1 - RISK:.0%} of all requests takes {NEEDED} at "
        "least"
    )


class Measured(NamedTuple):
    """One way of answering held against the reference. kl: nats. seconds: of the prefill."""

    kl: float
    seconds: float
    report: BlendReport


def reference_of(engine: RagBlend, prompt: Prompt) -> Reference:
    """What a full prefill answers."""
    ready = engine.prefill(prompt, ratio=1.0, max_tokens=_ANSWER_TOKENS + 1)
    ids = [step.token_id for step in engine.steps(ready, DecodeSettings(max_tokens=_ANSWER_TOKENS))]
    return Reference(prompt, ids, engine.logits(ready, ids))


def divergence(engine: RagBlend, reference: Reference, ratio: Ratio, selector: Selector | None = None) -> Measured:
    """How far a blend is from the reference."""
    started = time.perf_counter()
    ready = engine.prefill(reference.prompt, ratio=ratio, selector=selector, max_tokens=_ANSWER_TOKENS + 1)
    seconds = time.perf_counter() - started
    kl = kl_divergence(reference.logits, engine.logits(ready, reference.ids))
    return Measured(float(kl.mean()), seconds, ready.report)


class _Comparison:
    """Selectors on the same requests. Divergences are compared by their geometric means: single ones differ tenfold."""

    def __init__(self, engine: RagBlend, candidates: Sequence[Selector]) -> None:
        self._engine, self._candidates = engine, candidates
        self._kl: list[list[float]] = [[] for _ in candidates]
        self._select_s: list[list[float]] = [[] for _ in candidates]

    def ask(self, reference: Reference) -> None:
        for n, selector in enumerate(self._candidates):
            for ratio in _COMPARED_AT:
                measured = divergence(self._engine, reference, ratio, selector)
                self._kl[n].append(measured.kl)
                self._select_s[n].append(measured.report.select_s)

    def best(self) -> Selector:
        if not self._kl[0]:
            return self._candidates[0]
        closest = min(range(len(self._candidates)), key=lambda n: float(np.mean(self._logs(n))))
        good = [n for n in range(len(self._candidates)) if n == closest or self._as_close(n, closest)]
        return self._candidates[min(good, key=lambda n: float(np.median(self._select_s[n])))]

    def _logs(self, n: int) -> Floats:
        logs: Floats = np.log(np.maximum(self._kl[n], 1e-5))
        return logs

    def _as_close(self, n: int, closest: int) -> bool:
        low, _ = bootstrap_interval((self._logs(n) - self._logs(closest)).tolist())
        return low <= 0

    def as_list(self) -> list[dict[str, Any]]:
        rows = []
        for n, selector in enumerate(self._candidates):
            if self._kl[n]:
                ratio_ci = paired_ratio_interval(self._kl[n], self._kl[0])
                rows.append(
                    {
                        "selector": selector_as_dict(selector),
                        "kl": float(np.mean(self._kl[n])),
                        "kl_ci": list(bootstrap_interval(self._kl[n])),
                        "to_the_first_ci": list(ratio_ci),
                        "select_s": float(np.median(self._select_s[n])),
                    }
                )
        return rows


def _level(samples: Samples, bound: MaxKL) -> dict[str, Any]:
    """What a quality level amounts to, each request judged by a fit that has not seen it."""
    ratios, kl = samples.chosen(bound)
    return {
        "max_kl": bound.nats,
        "ratio": float(ratios.mean()),
        "ratio_ci": list(bootstrap_interval(ratios.tolist())),
        "kl": float(kl.mean()),
        "kl_ci": list(bootstrap_interval(kl.tolist())),
        "within": float((kl <= bound.nats).mean()),
        "full": float((ratios == 1.0).mean()),
        "fixed_ratio": samples.fixed(bound),
    }
