"""The engine: texts in, answers out. Wires the rooms together; owns no maths.

ingest   text -> ids -> variants -> prefill behind head and context -> store
answer   prompt -> spans -> {known prefix, hit, miss} -> blend -> decode -> text, report; misses are learned later
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ragblend.audit import COMPARED_TOKENS, Audited, AuditLog, Guard
from ragblend.blend.budget import Budget, Samples
from ragblend.blend.controller import LoadingController
from ragblend.blend.divergence import agreement, answer_logits, kl_divergence
from ragblend.blend.prefill import Plan, Prefilled, RatioChooser, Selector, full_plan, prefill
from ragblend.blend.prefix import PrefixCache
from ragblend.blend.selectors import QuestionAttention, RecomputeNone
from ragblend.blend.variants import Name
from ragblend.chunks import IngestReport, StoredChunks
from ragblend.errors import (
    ContextWindowError,
    CorruptPayloadError,
    InvalidSettingError,
    NotCalibratedError,
)
from ragblend.idle import IdleWorker
from ragblend.model.cache import KVCache
from ragblend.model.decoder import Decoder, PreTrainedModel, PreTrainedTokenizerBase
from ragblend.model.generate import DecodeSettings, Step, decode
from ragblend.model.sources import DEFAULT_MODEL, Model, load_model
from ragblend.prompt.chunk import tokenizer_fingerprint
from ragblend.prompt.layout import Layout, Prompt, lay_out
from ragblend.prompt.template import PromptTokenizer
from ragblend.quality import CALIBRATION, QUALITIES, MaxKL
from ragblend.report import BlendReport
from ragblend.serving import Serving
from ragblend.settings import DEFAULT_RATIO, EngineSettings, Ratio, check_ratio, check_selector
from ragblend.store.kvstore import KVStore
from ragblend.store.loader import LayerLoader, Prefetcher

_log = logging.getLogger(__name__)

_WAITING = 256  # misses waiting to be learned; more are dropped, they will be missed again
_AUDITED_AT_ONCE = 256  # tokens: a request that comes in while another is audited waits for no more


@dataclass(frozen=True)
class Answer:
    """A finished answer. token_ids: with the token that ended it, if one did."""

    text: str
    token_ids: tuple[int, ...]
    report: BlendReport


class _Miss(NamedTuple):
    ids: tuple[int, ...]
    text: str


class Ready(NamedTuple):
    """A prefilled prompt, ready to decode.

    ids: [tokens] int64. cache: holds their KV. logits: [vocab] fp32 of the last one.
    root: names this way of blending in the prefix cache; b"" where its blended KV is of no use to later prompts.
    exact_tokens: leading tokens whose KV is exact.
    misses: chunks to be stored when the answer is over.
    started: time.perf_counter() when the prompt came in.
    """

    ids: Tensor
    cache: KVCache
    logits: Tensor
    report: BlendReport
    root: bytes
    exact_tokens: int
    misses: tuple[_Miss, ...]
    started: float


class _Blended(NamedTuple):
    plan: Plan
    prefilled: Prefilled
    report: BlendReport


class AnswerStream(Iterator[str]):
    """Pieces of an answer as they become certain. Close it (or leave it as a context) to stop early, from any thread.

    Attributes:
        report: grows complete as the answer does.
        text, token_ids: what there is so far.
    """

    def __init__(self, engine: RagBlend, ready: Ready, settings: DecodeSettings, *, marks: bool, goes_on: bool) -> None:
        self.report = ready.report
        self.text = ""
        self.token_ids: list[int] = []
        self._engine, self._goes_on, self._started = engine, goes_on, ready.started
        self._ready: Ready | None = ready  # its KV is held until the answer ends
        self._steps = engine.steps(ready, settings, marks=marks)
        self._sampled = settings.temperature > 0 or settings.repetition_penalty != 1.0
        self._first_s: float | None = None
        self._lock = threading.RLock()  # held while a token is computed
        self._stopped = self._done = False

    def __next__(self) -> str:
        with self._lock:
            while not self._done:
                if self._stopped:
                    self._finish("cancelled")
                    break
                step = next(self._steps)
                self.token_ids.append(step.token_id)
                now = time.perf_counter()
                if self._first_s is None:
                    self._first_s = now
                    self.report = replace(self.report, ttft_s=now - self._started)
                if step.finish:
                    self._finish(step.finish)
                if step.text:
                    self.text += step.text
                    return step.text
        raise StopIteration

    def close(self) -> None:
        """Stop computing, after the token that is being computed; the report says "cancelled" if that was too soon."""
        self._stopped = True
        with self._lock:
            if not self._done:
                self._finish("cancelled")

    def _finish(self, reason: str) -> None:
        self._done = True
        self._steps.close()
        decode_s = 0.0 if self._first_s is None else time.perf_counter() - self._first_s
        decoded = max(0, len(self.token_ids) - 1)
        self.report = replace(self.report, decode_tokens=decoded, decode_s=decode_s, finish_reason=reason)
        ready, self._ready = self._ready, None
        if ready is not None:
            self._engine._after(ready, self.token_ids, self._sampled, self._goes_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RagBlend:
    """A model and a store of chunk KV. Any number of threads may ask at once; computing takes turns.

    Attributes:
        settings: how it blends.
        decoder, tokenizer, prompts: the model, driven layer by layer; its tokenizer; what makes ids of prompts and text
            of ids.
        fingerprint: of model and tokenizer, a part of every chunk's key.
        preamble_ids: [tokens]; the head that chunks are prefilled behind. () with the policy "none".
        store, chunks: the KV store; the chunks in it that are this engine's.
        prefix_cache: KV of prompt beginnings, in RAM.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        tokenizer: PreTrainedTokenizerBase,
        store: KVStore | str | Path,
        settings: EngineSettings | None = None,
    ) -> None:
        """Raises UnsupportedModelError, StoreError and InvalidSettingError. Engines that share a Decoder take turns."""
        self.settings = settings or EngineSettings()
        self.decoder = model if isinstance(model, Decoder) else Decoder(model)
        self.tokenizer = tokenizer
        self.prompts = PromptTokenizer(tokenizer, template_settings=self.settings.template_settings)
        self.fingerprint = hashlib.blake2b(
            f"{self.decoder.fingerprint}:{tokenizer_fingerprint(tokenizer)}".encode(), digest_size=20
        ).hexdigest()
        head, policy = self.settings.head, self.settings.policy
        self.preamble_ids = () if policy == "none" else self.prompts.head_ids(head)
        self._owns_store = not isinstance(store, KVStore)
        self.store = store if isinstance(store, KVStore) else KVStore(store)
        self.chunks = StoredChunks(
            self.decoder,
            self.prompts,
            self.store,
            fingerprint=self.fingerprint,
            preamble_ids=self.preamble_ids,
            policy=policy,
            namespace=self.settings.namespace,
            correct_drift=self.settings.correct_drift,
        )
        dated = policy != "none" and self.preamble_ids != self.prompts.head_ids(head, today=True)
        todays_head = partial(self.prompts.head_ids, head, today=True) if dated else None
        self._serving = Serving(self.decoder, self.store, self.chunks, todays_head)
        corrected = "_drift" if self.settings.correct_drift else ""  # another way is another name
        self._blending = self.chunks.made + corrected
        self._samples = self._calibrated()
        self._budgets: dict[tuple[Samples, MaxKL], Budget] = {}
        self.prefix_cache = PrefixCache(self.settings.prefix_cache_bytes)
        self._controller = LoadingController(floor=DEFAULT_RATIO)
        self._prefetcher = Prefetcher()
        self._idle = IdleWorker(_WAITING)
        # Not `close`: engines are collected in whatever thread, which may hold what the worker is waiting for.
        weakref.finalize(self, self._idle.stop).atexit = False
        self._guard = None if self.settings.audit is None else Guard(self.settings.audit)

    @classmethod
    def from_pretrained(
        cls,
        model: Model = DEFAULT_MODEL,
        *,
        store: KVStore | str | Path,
        dtype: str = "auto",
        device: str = "auto",
        size_limit_bytes: int | None = None,
        pack: bool | None = None,
        **settings: Any,
    ) -> RagBlend:
        """Load a model and open a store.

        Args:
            model: a local folder, a GGUF file, a hub id, the default model's name, or (model, tokenizer).
            store: the KV store's folder (made if missing), or an open KVStore.
            dtype: "auto" takes what is fastest here; it is part of what identifies a chunk's KV.
            device: "auto" takes a CUDA GPU where there is one.
            size_limit_bytes: bound for the store's payloads, when `store` is a folder.
            pack: whether the model's weights may be laid out anew for speed (see Decoder); by default yes, unless the
                model was handed over as a pair and may have other users.
            **settings: fields of EngineSettings.

        Raises:
            ModelNotFoundError, UnsupportedModelError, StoreError, InvalidSettingError.
        """
        try:
            chosen = EngineSettings(**settings)
        except TypeError as error:
            raise InvalidSettingError(f"{error}; settings are {', '.join(EngineSettings.__annotations__)}") from error
        loaded, tokenizer = load_model(model, dtype=dtype, device=device)
        opened = store if isinstance(store, KVStore) else KVStore(store, size_limit_bytes=size_limit_bytes)
        try:
            decoder = Decoder(loaded, pack=not isinstance(model, tuple) if pack is None else pack)
            engine = cls(decoder, tokenizer, opened, chosen)
        except BaseException:
            if opened is not store:
                opened.close()
            raise
        engine._owns_store = opened is not store
        return engine

    # -- ingest -------------------------------------------------------------------------------------------------

    def ingest(
        self,
        texts: Iterable[str],
        *,
        neighbours: Sequence[Sequence[str]] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> IngestReport:
        """Prefill texts and store their KV. What is stored already costs a look-up, so a killed ingest resumes.

        Args:
            texts: one chunk each; surrounding white space does not count.
            neighbours: for each text, other texts of the corpus that are likely to stand beside it in a prompt, the
                likeliest first; a handful is enough. With the policy "document": the texts before it, the last one
                first. Without any, texts are prefilled behind the filler. Other policies take no notice. What is
                stored behind a text that is not among them any more is prefilled again.
            progress: called with the number of texts done so far. What it raises ends the ingest; what is stored stays.

        Raises:
            ContextWindowError: a text does not fit the model behind the preamble.
            IngestError: something is not a text, or there are neighbours for more or fewer texts than there are.
            StoreFullError: the disk is full; what was stored before stays.
        """
        return self.chunks.ingest(texts, neighbours=neighbours, progress=progress)

    def stored_variants(self, text: str) -> dict[Name, str]:
        """The variants of a text that this engine would use and the store has, with their keys."""
        return self.chunks.stored(text)

    def variant_keys(self, text: str) -> dict[Name, str]:
        """Under which keys `ingest` may store a text, and answers look for it."""
        return self.chunks.keys(text)

    # -- answer -------------------------------------------------------------------------------------------------

    def answer(
        self, prompt: Prompt, *, ratio: Ratio | None = None, selector: Selector | None = None, **how: Any
    ) -> Answer:
        """Answer a prompt.

        Args:
            prompt: a string in which ingested texts are found by themselves; or a sequence of strings and Chunks (one
                user message); or a sequence of Messages.
            ratio, selector: instead of the engine's.
            **how: fields of DecodeSettings: max_tokens, temperature, top_k, top_p, repetition_penalty, stop, seed.

        Raises:
            EmptyPromptError, ContextWindowError, InvalidSettingError: before anything is computed.
            NotCalibratedError: a bound on the divergence is asked for, and nothing says what keeps it.
        """
        with self.stream(prompt, ratio=ratio, selector=selector, **how) as stream:
            for _ in stream:
                pass
        return Answer(stream.text, tuple(stream.token_ids), stream.report)

    def stream(
        self,
        prompt: Prompt,
        *,
        ratio: Ratio | None = None,
        selector: Selector | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        begin: str = "",
        goes_on: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
        **how: Any,
    ) -> AnswerStream:
        """Like `answer`, piece by piece. The prompt is prefilled before this returns.

        Args:
            tools: definitions of tools that the answer may call; then the marks of calls stay in its text, for
                `prompt.calls.read_calls`.
            begin: what the answer is made to begin with (`prompts.begin_call`); it is no part of its text.
            goes_on: whether later prompts may go on from the whole of this one; if not, its blended KV is not kept.
            cancelled: asked while the prompt is prefilled whether to give up.

        Raises:
            As `answer`.
            PrefillCancelledError: `cancelled` said so.
        """
        try:
            settings = DecodeSettings(**how)
        except TypeError as error:
            raise InvalidSettingError(f"{error}; known are {', '.join(DecodeSettings.__annotations__)}") from error
        ready = self.prefill(
            prompt,
            ratio=ratio,
            selector=selector,
            max_tokens=settings.max_tokens,
            tools=tools,
            begin=begin,
            cancelled=cancelled,
        )
        room = self.decoder.context_window_tokens - len(ready.ids)
        settings = replace(settings, max_tokens=min(settings.max_tokens, room))
        return AnswerStream(self, ready, settings, marks=bool(tools), goes_on=goes_on)

    def prefill(
        self,
        prompt: Prompt,
        *,
        ratio: Ratio | None = None,
        selector: Selector | None = None,
        max_tokens: int = 1,
        tools: Sequence[Mapping[str, Any]] = (),
        begin: str = "",
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Ready:
        """Everything up to the first token's logits.

        Args:
            max_tokens: how many positions to leave room for behind the prompt.
            tools, begin, cancelled: as for `stream`.

        Raises:
            As `stream`.
        """
        started = time.perf_counter()
        ratio = self.settings.ratio if ratio is None else ratio
        check_ratio(ratio)
        selector = selector or self.settings.selector or self.default_selector
        check_selector(selector)
        least = 0.0 if self._guard is None else self._guard.least_ratio
        ratio = 1.0 if least == 1.0 else ratio
        layout = lay_out(
            self.prompts, prompt, self.chunks.known_texts(), self.chunks.texts_of, tools=tools, begin=begin
        )
        tokens, window = len(layout.ids), self.decoder.context_window_tokens
        if tokens >= window:
            raise ContextWindowError(tokens, max_tokens, window)
        ids = torch.from_numpy(layout.ids.copy())
        tokenise_s = time.perf_counter() - started

        root = self._exact_root(tokens)
        if self._is_bounded(ratio):
            # What a bound lets pass for one prompt it may not for one that goes on from it.
            root = b""
        elif ratio != 1 and type(selector).__repr__ is object.__repr__:
            root = b""  # it only tells its address, which another one will have when it is gone
        elif ratio != 1:
            way = repr((self._blending, ratio, selector, least, self.decoder.is_long(tokens), self.chunks.drift_known))
            root = hashlib.blake2b(way.encode(), digest_size=16).digest()
        with self.decoder.turn:
            cache = self.decoder.new_cache(min(tokens + max_tokens, window))
            known, exact = self._known_prefix(root, ids, cache)
            done = self._blend(layout, ids, cache, known, ratio, selector, least, cancelled)
            self._idle.busy()
        plan, prefilled, report = done.plan, done.prefilled, done.report
        reused = int(plan.reused.sum())
        report = replace(
            report,
            least_ratio=least,
            prompt_tokens=tokens,
            prefix_tokens=plan.known,
            prefix_is_exact=plan.known <= exact,
            reused_tokens=reused,
            recomputed_tokens=int(prefilled.recomputed.sum()),
            fresh_tokens=tokens - plan.known - reused,
            selector=repr(selector),
            rows_fraction=prefilled.row_layers / (tokens * self.decoder.n_layers),
            tokenise_s=tokenise_s,
            select_s=prefilled.select_s,
        )
        exact_tokens = tokens
        if plan.known > exact:
            exact_tokens = exact
        elif reused:
            exact_tokens = int(plan.reused.nonzero()[0])
        wanted = {"miss", "corrupt"} if self.learns else set()
        misses = tuple(
            _Miss(tuple(layout.ids_of(span).tolist()), span.text or "")
            for use, span in zip(report.chunks, layout.chunks, strict=True)
            if use.status in wanted and not span.whole
        )
        return Ready(ids, cache, prefilled.logits, report, root, exact_tokens, misses, started)

    def _exact_root(self, tokens: int) -> bytes:
        """Names exact KV in prompts of so many tokens in the prefix cache."""
        return self.fingerprint.encode() + (b"long" if self.decoder.is_long(tokens) else b"")

    def _known_prefix(self, root: bytes, ids: Tensor, cache: KVCache) -> tuple[int, int]:
        """Fill the start of `cache` from the prefix cache; (tokens filled, how many are exact).

        The last token is always computed: its logits are what a prefill is for.
        """
        exact_root = self._exact_root(len(ids))
        exact = self.prefix_cache.fetch(exact_root, ids[:-1], cache)
        if root in (exact_root, b""):
            return exact, exact
        return self.prefix_cache.fetch_whole(root, ids[:-1], cache, longer_than=exact) or exact, exact

    def _blend(
        self,
        layout: Layout,
        ids: Tensor,
        cache: KVCache,
        known: int,
        ratio: Ratio,
        selector: Selector,
        least: float,
        cancelled: Callable[[], bool],
    ) -> _Blended:
        """Prefill with what the store has. A payload that turns out corrupt on the way is a miss: plan anew."""
        corrupt: set[str] = set()
        while True:
            began = time.perf_counter()
            served = self._serving.serve(layout, ids, known, corrupt, read=ratio != 1)
            lookup_s = time.perf_counter() - began
            plan = served.plan
            reused = int(plan.reused.sum())
            try:
                share = self._share(ratio, selector, plan, least)
                with LayerLoader(
                    served.readers, device=self.decoder.device, dtype=self.decoder.dtype, tokens=served.tokens
                ) as loader:
                    began = time.perf_counter()
                    source = self.chunks.source(loader, plan) if reused else None
                    prefilled = prefill(self.decoder, cache, plan, source, selector, share, cancelled)
                    prefill_s = time.perf_counter() - began
            except CorruptPayloadError as error:
                _log.warning("%s", error)
                corrupt.add(error.key)
                self._serving.forget(error.key)
                known = plan.known  # what is behind it has been written over
                continue
            finally:
                served.close()
            self._controller.observe(
                bytes_read=loader.bytes_read,
                load_s=loader.load_s,
                row_layers=prefilled.row_layers,
                compute_s=max(0.0, prefill_s - loader.stall_s),
            )
            report = BlendReport(
                chunks=served.uses,
                ratio=prefilled.ratio,
                bytes_read=loader.bytes_read,
                lookup_s=lookup_s,
                load_s=loader.load_s,
                stall_s=loader.stall_s,
                prefill_s=prefill_s,
            )
            return _Blended(plan, prefilled, report)

    def _is_bounded(self, ratio: Ratio) -> bool:
        """Whether the divergence is bounded, by choosing a ratio for each prompt."""
        return not isinstance(ratio, (int, float)) and (ratio != "auto" or self._samples is not None)

    def _share(self, ratio: Ratio, selector: Selector, plan: Plan, least: float) -> float | RatioChooser:
        """What a pass is given for a ratio. least: what the guard says."""
        if isinstance(ratio, (int, float)):
            return max(ratio, least)
        if callable(ratio):
            choose: RatioChooser = ratio
        elif ratio == "auto":
            reused = int(plan.reused.sum())
            hidden = self._controller.ratio(
                reused_tokens=reused,
                reused_bytes=reused * self.decoder.kv_bytes_per_token,
                fresh_tokens=len(plan.ids) - plan.known - reused,
                n_layers=self.decoder.n_layers,
            )
            if self._samples is None or self._samples.selector != selector:
                return max(hidden, least)
            least = max(hidden, least)
            choose = self._budget(MaxKL(QUALITIES["balanced"]), selector)
        else:
            choose = self._budget(MaxKL(QUALITIES[ratio]) if isinstance(ratio, str) else ratio, selector)
        return (lambda scores, state: max(least, choose(scores, state))) if least else choose

    def steps(self, ready: Ready, settings: DecodeSettings, *, marks: bool = False) -> Generator[Step, None, None]:
        """Decode a prefilled prompt, taking the turn for one token at a time: several answers grow side by side.

        Args:
            marks: leave the marks of calls of tools in the text.
        """
        steps = decode(
            self.decoder,
            ready.cache,
            ready.logits,
            ready.ids,
            settings,
            sorted(self.prompts.stop_ids),
            partial(self.prompts.decode, marks=marks),
        )
        while True:
            with self.decoder.turn:
                step = next(steps, None)
                self._idle.busy()
            if step is None:
                return
            yield step

    def logits(self, ready: Ready, answer: Sequence[int]) -> Tensor:
        """[answer tokens, vocab] fp32: what is made of each of an answer's tokens, given the prompt and those before.

        answer: as many token ids as the prefill left room for; what was decoded so far is overwritten.
        """
        with self.decoder.turn:
            return answer_logits(self.decoder, ready.cache, ready.logits, len(ready.ids), answer)

    def _after(self, ready: Ready, token_ids: Sequence[int], sampled: bool, goes_on: bool) -> None:
        """What an answer leaves behind: its prefix in RAM, its misses to be learned, itself to be audited."""
        if self.closed or self.decoder.changed:
            return
        for miss in ready.misses:
            self._idle.submit("a missed chunk was not learned", partial(self.chunks.learn, miss.ids, miss.text))
        exact_root = self._exact_root(len(ready.ids))
        with_answer = torch.cat([ready.ids, torch.tensor(token_ids[:-1], dtype=torch.int64)])
        longest = max(len(with_answer), len(ready.ids) + COMPARED_TOKENS)
        if self.decoder.is_long(longest) != self.decoder.is_long(len(ready.ids)):
            return  # decoding has replaced the prompt's KV, or an audit would
        if ready.exact_tokens == len(ready.ids):
            self.prefix_cache.keep(exact_root, with_answer, ready.cache)
        else:
            self.prefix_cache.keep(exact_root, ready.ids[: ready.exact_tokens], ready.cache)
            if self.settings.reuse_blended and goes_on and ready.root:
                self.prefix_cache.keep_whole(ready.root, with_answer, ready.cache, len(ready.ids))
        blended = ready.exact_tokens < len(ready.ids) and len(token_ids) > 0
        if blended and self._guard is not None and self._guard.picks():
            job = partial(self._audit, ready, tuple(token_ids), sampled)
            if not self._idle.submit("an answer was not audited", job):
                self._guard.done()

    @property
    def learns(self) -> bool:
        """Whether chunks that were missed are stored: the settings say so, and the store can be written."""
        return self.settings.learn and not self.store.read_only

    # -- what is likely to come ---------------------------------------------------------------------------------

    def prefetch(self, texts: Iterable[str]) -> Future[int]:
        """Have the KV of texts that are likely to come in a prompt soon, in this order, read into the page cache.

        A hint: this returns at once, never fails, and may come to nothing.

        Returns:
            how many bytes were asked for, in the end. There is no need to wait for it.
        """
        return self._prefetcher.start(partial(self.chunks.payloads_of, list(texts)))

    def expect(self, texts: Iterable[str]) -> None:
        """Find these texts in prompts to come, although nothing may be stored for them yet: they miss, and are learned.

        Until they are, this engine alone knows of them, in RAM: this returns at once, whoever writes to the store.
        """
        self.chunks.expect(texts)

    def warm(self, prompt: Prompt) -> None:
        """Have a prompt prefilled in full when there is nothing else to do: what begins as it does finds it in RAM.

        A hint, as what is going to be asked is often known in part while its asker still thinks: the conversation so
        far. This returns at once, and may come to nothing.
        """
        self._idle.submit("a prompt was not prefilled ahead", partial(self._warm, prompt))

    # -- calibration --------------------------------------------------------------------------------------------

    @property
    def default_selector(self) -> Selector:
        """What chooses tokens if nothing else is said: what calibration found best, before it QuestionAttention()."""
        return QuestionAttention() if self._samples is None else self._samples.selector

    @property
    def samples(self) -> Samples | None:
        """What ratios are chosen by; None before calibration."""
        return self._samples

    @property
    def calibration(self) -> dict[str, Any]:
        """What calibration found for this model, preamble, policy, namespace and `correct_drift`; empty before it.

        Plain types only.
        """
        return self.store.document(CALIBRATION + self._blending)

    def keep_calibration(self, samples: Samples, summary: Mapping[str, Any]) -> None:
        """Choose ratios by these samples from now on, and keep them with the store.

        Args:
            summary: what else is kept, in plain types; for people.

        Raises:
            StoreError: it cannot be written.
        """
        self.store.save_document(CALIBRATION + self._blending, {**summary, "samples": samples.as_dict()})
        self._samples = samples
        self._budgets.clear()

    def _calibrated(self) -> Samples | None:
        found = self.calibration
        try:
            return Samples.from_dict(found["samples"]) if found else None
        except (InvalidSettingError, KeyError) as error:
            _log.warning("what calibration found cannot be used: %s", error)
            return None

    def _budget(self, bound: MaxKL, selector: Selector) -> Budget:
        samples = self._samples
        if samples is None:
            raise NotCalibratedError(
                f"nothing says yet what keeps an answer within {bound.nats:g} nats of a full prefill's: run `ragblend "
                "calibrate` on this store, or give a recompute ratio"
            )
        if samples.selector != selector:
            raise NotCalibratedError(f"the store was calibrated for {samples.selector}, not {selector}: use that one")
        budget = self._budgets.get((samples, bound))
        if budget is None:  # of these samples: there may be others by the time it is made
            budget = self._budgets[samples, bound] = samples.budget(bound)
        return budget

    # -- when there is nothing else to do -----------------------------------------------------------------------

    def _audit(self, ready: Ready, answer: Sequence[int], sampled: bool) -> None:
        """Hold an answer against a full prefill's; see audit.py."""
        assert self._guard is not None
        try:
            room = min(COMPARED_TOKENS, ready.cache.capacity - len(ready.ids))
            full = self._fully(ready.ids, room)
            if full is None:
                return
            wanted = [step.token_id for step in self.steps(full, DecodeSettings(max_tokens=room))]
            there, here = self.logits(full, wanted), self.logits(ready, wanted)
            kl = kl_divergence(there, here)
            given = list(answer[: len(wanted)])
            result = Audited(
                kl=float(kl.mean()),
                kl_first=float(kl[0]),
                agreement=agreement(there, here),
                same_answer=None if sampled else given == wanted[: len(given)],
                ratio=ready.report.ratio,
                foreign=self._foreign(ready),
            )
            self._guard.note(result)
        finally:
            self._guard.done()

    def _warm(self, prompt: Prompt) -> None:
        layout = lay_out(self.prompts, prompt, self.chunks.known_texts(), self.chunks.texts_of)
        ids = torch.from_numpy(layout.ids.copy())
        n_bytes = len(ids) * self.decoder.kv_bytes_per_token
        if len(ids) < self.decoder.context_window_tokens and n_bytes <= self.settings.prefix_cache_bytes:
            done = self._fully(ids, 0, for_prefix=True)
            if done is not None:
                self.prefix_cache.keep(self._exact_root(len(ids)), ids, done.cache)

    def _fully(self, ids: Tensor, max_tokens: int, *, for_prefix: bool = False) -> Ready | None:
        """A full prefill, block by block, giving way to requests in between; None where closing did not wait for it.

        for_prefix: whether it goes on from what the prefix cache holds, and is of use there only.
        """
        with self.decoder.turn:
            cache = self.decoder.new_cache(len(ids) + max_tokens)
            known = self._known_prefix(self._exact_root(len(ids)), ids, cache)[0] if for_prefix else 0
        while True:
            self._idle.wait_for_idle()
            if self._idle.closing if for_prefix else self._idle.overdue:
                return None
            stop = min(known + _AUDITED_AT_ONCE, len(ids))
            if self.decoder.is_long(stop) != self.decoder.is_long(len(ids)):
                stop = len(ids)
            with self.decoder.turn:
                done = prefill(self.decoder, cache, full_plan(ids[:stop], known), None, RecomputeNone(), 0.0)
            if stop == len(ids):
                return Ready(ids, cache, done.logits, BlendReport(), b"", len(ids), (), 0.0)
            known = stop

    def _foreign(self, ready: Ready) -> tuple[str, ...]:
        """What of one of the chunks that were reused is stored and is not this model's; see StoredChunks.foreign."""
        hits = [use for use in ready.report.chunks if use.status in ("hit", "prefix")]
        if not hits:
            return ()
        use = hits[int(ready.ids.sum()) % len(hits)]
        self._idle.wait_for_idle()
        return self.chunks.foreign(ready.ids[use.start : use.stop].tolist())

    def audits(self) -> AuditLog:
        """What audits found so far, and whether the guard has stepped in."""
        return AuditLog() if self._guard is None else self._guard.log()

    def drain(self) -> None:
        """Wait for what is done when there is nothing else to do: missed chunks learned, prompts prefilled ahead,
        answers audited."""
        self._idle.drain()

    # -- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Learn what is waiting (for a few seconds at most), free caches, close the store if this engine opened it."""
        self._prefetcher.close()
        self._idle.close()
        self.prefix_cache.clear()
        if self._owns_store:
            self.store.close()

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._idle.closing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
