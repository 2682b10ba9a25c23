"""RagBlendLLM: LlamaIndex's LLM interface over a RagBlend engine.

An app that retrieves, formats and asks as usual needs nothing else: by the time an LLM is called the retrieved nodes
are one string, and the engine finds the chunks it knows in that string by their content.

All ways to ask go through `_open` (settings, prompt, prefill) and `_pieces` (decode), so that they cannot differ.
A stream's prompt is prefilled before the call returns: a prompt that does not fit raises where it was asked, not when
somebody first looks at the stream. After that each piece is computed when it is asked for, so that a stream nobody
reads costs nothing, and closing one ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt as core_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, ValidationError
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.llms.ragblend import huggingface, tools
from llama_index.llms.ragblend.conversation import conversation, flattened, joined_contexts
from llama_index.llms.ragblend.counting import count_with
from llama_index.llms.ragblend.functions import FunctionLLM
from llama_index.llms.ragblend.opening import ENGINE_SETTINGS, FORMATTING, Opening, check_formatting
from llama_index.llms.ragblend.retrieval import listen, stop_listening
from llama_index.llms.ragblend.templates import StructuredTemplateLLM

from ragblend.blend.prefill import Selector
from ragblend.chunks import IngestReport
from ragblend.engine import AnswerStream, RagBlend
from ragblend.errors import InvalidSettingError
from ragblend.model.generate import DecodeSettings, stop_strings
from ragblend.model.sources import DEFAULT_MODEL, Model
from ragblend.prompt.chunk import Message, ToolCall
from ragblend.quality import MaxKL
from ragblend.report import BlendReport
from ragblend.settings import Ratio, check_ratio, check_selector
from ragblend.store.kvstore import KVStore

_DECODING = tuple(DecodeSettings.__annotations__)
_PER_CALL = (*_DECODING, "ratio", "selector")
# Core's own DocumentContextExtractor sends HTTP headers to whatever LLM it has. They mean nothing here.
_IGNORED = frozenset({"extra_headers"})
# Fields that make no sense in another process: what listens there is another object.
_STAY_BEHIND = frozenset({"callback_manager", "rate_limiter"})


class _Piece(NamedTuple):
    """The answer so far, what is new in it, and with the last piece what the answer took and which tools it calls."""

    text: str
    delta: str
    raw: dict[str, Any] | None
    calls: tuple[ToolCall, ...] = ()

    @property
    def says_something(self) -> bool:
        return bool(self.delta) or self.raw is not None


class _Opened(NamedTuple):
    """An answer whose prompt is prefilled, and the tools it may call."""

    stream: AnswerStream
    offer: tools.Offer | None = None


class RagBlendLLM(FunctionLLM):
    """A local LLM that starts to answer sooner when the prompt holds chunks whose KV is stored.

    The model, the store and the engine are opened here, so that what is wrong with them shows here.

    It calls functions where the model's chat template renders tools, as `metadata.is_function_calling_model` says.
    Where that is False, core asks about tools in ReAct's way.

    Args:
        model: a local folder, a GGUF file, a hub id, or (model, tokenizer). None: the default model.
        store: folder of the KV store (made if missing), or an open KVStore. None: `default_store()`, a folder in the
            user's cache folder that all LLMs without a store of their own share; $RAGBLEND_CACHE moves it.
        dtype, device: "auto" takes what is fastest.
        size_limit_bytes: bound of the store, when `store` is a folder.
        preamble: what chunks are prefilled behind: what stands before the first chunk of the prompts to come. A
            LlamaIndex prompt is cut at its `context_str`; the default is the text-QA prompt of core's query engines.
            A string or Messages are taken as they are. None: chunks are prefilled alone.
        ratio, selector: how many of the reused tokens are recomputed and which; None: as the engine does by itself.
        max_tokens, temperature, top_k, top_p, repetition_penalty, stop, seed: as in ragblend's DecodeSettings. Each of
            these, ratio and selector can be given to a single call, too.
        context_window: pack prompts to fewer tokens than the model takes.
        system_prompt: goes before every prompt that is not a conversation already.
        is_chat_model: whether core formats chat prompts for this LLM; None: if the model has a chat template.
        is_function_calling_model: whether core calls functions through this LLM; None: if the model's template renders
            tools and core formats chat prompts.
        stopping_ids: tokens that end an answer. Those of the model do so anyway; others are refused: use `stop`.
        set_tokenizer: let LlamaIndex count tokens with this model's tokenizer (`Settings.tokenizer`), unless the user
            set one. False leaves that setting alone.
        learn_retrieved: chunks that a retriever returns, and the windows around them that SentenceWindowNodeParser put
            into their metadata, are found in the prompts that follow although they were never ingested, and are learned
            when they are first asked about. False: only ingested ones are found.
        lazy: open model and store on first use.
        engine: an engine to use instead of opening one. It keeps its own preamble, and stays open on `close`.
        **others: the other settings of an engine (`EngineSettings`) that is opened here; the other fields of
            LlamaIndex's LLM (callback_manager, output_parser, completion_to_prompt, ...); and HuggingFaceLLM's names
            for what is above (model_name, tokenizer, tokenizer_name, device_map, max_new_tokens, generate_kwargs,
            model_kwargs, tokenizer_kwargs, ...). What those ask for and cannot be honoured is refused.

    A copy, deep or not, has settings of its own and answers with the same engine, which only the LLM that opened it
    closes. A pickled LLM opens its model and store again in the other process, on first use; its callbacks stay behind.

    Raises:
        ModelNotFoundError, UnsupportedModelError, StoreError, InvalidSettingError.
    """

    model_name: str = Field(description="Where the model came from.")
    max_tokens: int = Field(description="At most so many tokens an answer.")
    temperature: float = Field(description="0 is greedy.")
    top_k: int = Field(description="Sample from so many of the likeliest tokens; 0 is off.")
    top_p: float = Field(description="Sample from the likeliest tokens with this probability together.")
    repetition_penalty: float = Field(description="Above 1: tokens that were seen become less likely.")
    stop: tuple[str, ...] = Field(description="Strings that end an answer.")
    seed: int | None = Field(description="Makes sampling repeatable.")
    ratio: Any = Field(description="Share of reused tokens to recompute; or what chooses it.")
    selector: Any = Field(description="Which tokens those are.", exclude=True)
    context_window: int | None = Field(description="Fewer tokens than the model's own window.")
    is_chat_model: bool | None = Field(description="Whether core formats chat prompts; None: as the model has it.")
    is_function_calling_model: bool | None = Field(
        description="Whether core calls functions; None: as the model has it."
    )
    stopping_ids: tuple[int, ...] = Field(description="Tokens that end an answer.", exclude=True)
    set_tokenizer: bool = Field(description="Let core count with this model's tokenizer.")
    learn_retrieved: bool = Field(description="Find and learn retrieved chunks that were never ingested.")

    _engine: RagBlend | None = PrivateAttr(default=None)
    _opening: Opening | None = PrivateAttr(default=None)
    _owns_engine: bool = PrivateAttr(default=True)
    _closed: bool = PrivateAttr(default=False)
    _changing: threading.RLock = PrivateAttr(default_factory=threading.RLock)
    _last_report: BlendReport | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: Model | None = None,
        *,
        store: KVStore | str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        size_limit_bytes: int | None = None,
        preamble: BasePromptTemplate | str | Sequence[Message] | None = DEFAULT_TEXT_QA_PROMPT_SEL,
        ratio: Ratio | None = None,
        selector: Selector | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        context_window: int | None = None,
        system_prompt: str | None = None,
        is_chat_model: bool | None = None,
        is_function_calling_model: bool | None = None,
        stopping_ids: Sequence[int] | None = None,
        set_tokenizer: bool = True,
        learn_retrieved: bool = True,
        lazy: bool = False,
        engine: RagBlend | None = None,
        **others: Any,
    ) -> None:
        theirs = {name: others.pop(name) for name in huggingface.NAMES & others.keys()}
        engine_settings = {name: others.pop(name) for name in ENGINE_SETTINGS & others.keys()}
        if unknown := sorted(others.keys() - LLM.model_fields.keys()):
            raise InvalidSettingError(f"RagBlendLLM has no setting {', '.join(unknown)}")
        own = {
            "model": DEFAULT_MODEL if model is None else model,
            "dtype": dtype,
            "device": device,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "stop": stop_strings(stop),
            "context_window": context_window,
            "stopping_ids": None if stopping_ids is None else list(stopping_ids),
        }
        chosen = huggingface.with_theirs(own, theirs, defaults=_DEFAULTS) | {"seed": seed}
        decoding = {name: chosen[name] for name in _DECODING} | {"stop": stop_strings(chosen["stop"])}
        DecodeSettings(**decoding)
        if isinstance(ratio, dict):  # as to_dict writes it
            ratio = MaxKL(**ratio)
        if ratio is not None:
            check_ratio(ratio)
        if selector is not None:
            check_selector(selector)
        if engine is not None and (
            store is not None
            or engine_settings
            or size_limit_bytes is not None
            or chosen["model"] != DEFAULT_MODEL
            or "tokenizer" in chosen
            or (chosen["dtype"], chosen["device"]) != ("auto", "auto")
            or preamble is not DEFAULT_TEXT_QA_PROMPT_SEL
        ):
            raise InvalidSettingError(
                "an engine brings its own model, store and preamble: give either what makes one or an engine"
            )
        if engine is not None and not isinstance(engine, RagBlend):
            raise InvalidSettingError(f"engine is a RagBlend, not {type(engine).__name__}: {engine!r:.80}")
        opening = Opening(
            chosen["model"],
            chosen.get("tokenizer"),
            # Absolute from here on: a process may change its folder before it opens or pickles this.
            Path(store).expanduser().absolute() if isinstance(store, (str, Path)) else store,
            chosen["dtype"],
            chosen["device"],
            size_limit_bytes,
            preamble,
            engine_settings,
        )
        others["query_wrapper_prompt"] = huggingface.query_wrapper(others.get("query_wrapper_prompt"))
        fields: dict[str, Any] = {
            **others,
            **decoding,
            "model_name": theirs.get("model_name") or _name_of(chosen["model"] if engine is None else engine),
            "ratio": ratio,
            "selector": selector,
            "context_window": chosen["context_window"],
            "system_prompt": system_prompt or None,
            "is_chat_model": is_chat_model,
            "is_function_calling_model": is_function_calling_model,
            "stopping_ids": tuple(chosen["stopping_ids"] or ()),
            "set_tokenizer": set_tokenizer,
            "learn_retrieved": learn_retrieved,
        }
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidSettingError(f"a setting of the wrong type: {error}") from error
        if engine is None:
            self._opening = opening
            if not lazy:
                self._engine = self._opened(opening)
        else:
            self._check(engine)
            self._engine, self._owns_engine = engine, False
        listen(self)

    @classmethod
    def from_engine(cls, engine: RagBlend, **settings: Any) -> Self:
        """An LLM over an engine that is open already; it keeps its own preamble.

        Args:
            **settings: as for RagBlendLLM, without what makes an engine.
        """
        return cls(engine=engine, **settings)

    @classmethod
    def class_name(cls) -> str:
        return "RagBlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        engine = self.engine
        window = self.context_window or engine.decoder.context_window_tokens
        return LLMMetadata(
            context_window=window,
            # Core takes this off the window before it packs a prompt. An answer ends where the window does anyway.
            num_output=max(1, min(self.max_tokens, window // 4)),
            is_chat_model=self._chats(engine),
            is_function_calling_model=self._calls_functions(engine),
            model_name=self.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """What events say of this LLM. Before its model is loaded that is its name: events do not wait for loading."""
        if self._engine is None:
            return {"class_name": self.class_name(), "model_name": self.model_name}
        return super().to_payload()

    @property
    def engine(self) -> RagBlend:
        """The engine that answers; `KVPrefill(llm=...)` fills its store. Opened here if it was not yet.

        Raises:
            InvalidSettingError: this LLM is closed.
        """
        engine = self._engine
        if engine is not None:
            return engine
        with self._changing:  # several threads may be the first
            if self._closed or self._opening is None:
                raise InvalidSettingError("this RagBlendLLM is closed: make a new one")
            if self._engine is None:
                self._engine = self._opened(self._opening)
            return self._engine

    @property
    def last_report(self) -> BlendReport | None:
        """What the answer that ended last took. With several threads, read `response.raw["ragblend"]` instead."""
        return self._last_report

    def remember(self, texts: Iterable[str]) -> IngestReport:
        """Make texts that recur in prompts reusable: few-shot examples, definitions of tools, policies.

        They are stored like documents' chunks, and found in prompts by their text (of 32 characters or more).

        Raises:
            ContextWindowError, IngestError, StoreFullError: as the engine's `ingest`.
        """
        return self.engine.ingest(texts)

    def expect(self, texts: Iterable[str]) -> None:
        """Have texts found in prompts although nothing is stored for them yet: they miss once, and are learned then.

        Only memory is touched, so that this may be called on an event loop. Does nothing while the model is not loaded,
        or where the engine does not learn.
        """
        engine = self._engine
        if engine is not None and engine.learns:
            engine.expect(texts)

    def retrieved(self, texts: Sequence[str]) -> None:
        """Take notice of what a retriever returned, which is likely to come in a prompt soon: its KV is read ahead.

        It is expected, too, where `learn_retrieved` says so. Waits for nothing, as it is called on event loops.
        """
        engine = self._engine
        if engine is None or engine.closed:  # by whoever made it
            return
        engine.prefetch(texts)
        if self.learn_retrieved:
            self.expect(texts)

    def close(self) -> None:
        """Let go of the model, and close the engine if this LLM opened it: what was missed is learned first."""
        stop_listening(self)
        with self._changing:
            engine, self._engine, self._closed = self._engine, None, True
        if engine is not None and self._owns_engine:
            engine.close()

    def _opened(self, opening: Opening) -> RagBlend:
        engine = opening.open(is_chat_model=self.is_chat_model, **self._formatting())
        try:
            self._check(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    def _check(self, engine: RagBlend) -> None:
        """What only a model can tell about settings; then core may count with its tokenizer."""
        window = engine.decoder.context_window_tokens
        if self.context_window is not None and not 0 < self.context_window <= window:
            raise InvalidSettingError(f"context_window must be 1 to {window}, the model's; got {self.context_window}")
        if others := sorted(set(self.stopping_ids) - engine.prompts.stop_ids):
            raise InvalidSettingError(
                f"tokens {others} do not end an answer of this model ({sorted(engine.prompts.stop_ids)} do): "
                "give their text as stop="
            )
        check_formatting(engine, self._chats(engine), **self._formatting())
        if self.is_function_calling_model and not engine.prompts.has_tools:
            raise InvalidSettingError(
                "is_function_calling_model=True needs a model whose chat template renders tools: leave it out, and "
                "core asks about tools in ReAct's way"
            )
        if self.set_tokenizer:
            count_with(engine.prompts)

    def _chats(self, engine: RagBlend) -> bool:
        return engine.prompts.has_template if self.is_chat_model is None else self.is_chat_model

    def _calls_functions(self, engine: RagBlend) -> bool:
        if self.is_function_calling_model is not None:
            return self.is_function_calling_model
        # A function of the user's that makes one text of all messages knows nothing of calls and results.
        as_messages = self.messages_to_prompt in (None, core_messages_to_prompt)
        return engine.prompts.has_tools and self._chats(engine) and as_messages

    def _formatting(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FORMATTING}

    # -- the one way to an answer -------------------------------------------------------------------------------------

    def _open(
        self,
        prompt: Sequence[Message],
        settings: dict[str, Any],
        cancelled: Callable[[], bool],
        offer: tools.Offer | None = None,
    ) -> AnswerStream:
        """Prefill the prompt; the answer's pieces are still to be computed.

        Args:
            settings: of this call; None stands for the LLM's own.
            cancelled: says while the prompt is prefilled whether to give up.
            offer: tools that the answer may call.

        Raises:
            EmptyPromptError, ContextWindowError, InvalidSettingError: before anything is computed.
        """
        if unknown := sorted(settings.keys() - {*_PER_CALL, *_IGNORED}):
            raise InvalidSettingError(f"a call takes {', '.join(_PER_CALL)}; not {', '.join(unknown)}")
        chosen = {name: getattr(self, name) if settings.get(name) is None else settings[name] for name in _PER_CALL}
        chosen["stop"] = stop_strings(chosen["stop"])
        if offer is not None:
            chosen |= {"tools": offer.tools, "begin": offer.begin}
        return self.engine.stream(prompt, cancelled=cancelled, **chosen)

    def _pieces(self, stream: AnswerStream, offer: tools.Offer | None = None) -> Generator[_Piece, None, None]:
        """The answer piece by piece; at least one, and the last one has `raw`. Closing it stops the computing.

        Calls of tools are no text: what may become one is held back until the answer is complete. Meanwhile pieces say
        nothing new, so that whoever wants to stop has a turn.
        """
        given = ""
        try:
            for _ in stream:
                if stream.report.finish_reason:
                    break
                text = stream.text if offer is None else offer.certain(stream.text)
                yield _Piece(text, text[len(given) :], None)
                given = text
            text, calls = (stream.text, ()) if offer is None else offer.read(stream.text)
            yield _Piece(text, text[len(given) :], _raw(stream), calls)
        finally:
            stream.close()
            self._last_report = stream.report

    async def _apieces(self, ask: Callable[..., _Opened]) -> AsyncGenerator[_Piece, None]:
        """`ask` and `_pieces` in a thread of their own; the prompt is prefilled when this returns."""
        # One thread for the whole answer: a step that is under way when the caller is cancelled cannot be interrupted,
        # and what closes the stream has to queue behind it. A prefill can, between two layers.
        worker = ThreadPoolExecutor(1, thread_name_prefix="ragblend-answer")
        given_up = threading.Event()
        opening = worker.submit(ask, cancelled=given_up.is_set)
        try:
            opened = await asyncio.wrap_future(opening)
        except BaseException:
            given_up.set()
            opening.add_done_callback(_close_opened)
            worker.shutdown(wait=False)
            raise
        return self._drain(worker, self._pieces(*opened))

    async def _drain(
        self, worker: ThreadPoolExecutor, pieces: Generator[_Piece, None, None]
    ) -> AsyncGenerator[_Piece, None]:
        try:
            while (piece := await asyncio.wrap_future(worker.submit(next, pieces, None))) is not None:
                if piece.says_something:
                    yield piece
        finally:
            worker.submit(pieces.close)
            worker.shutdown(wait=False)

    def _one(self, prompt: str, formatted: bool) -> list[Message]:
        """A completion prompt as a conversation; the model's template is put around it once, if there is one.

        What the prompt says can never become a control token, so one that spells a template itself is plain text.
        """
        if formatted:
            return [Message("user", prompt)]
        if self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        if not self.metadata.is_chat_model:
            return [Message("user", self._extend_prompt(prompt))]
        return [*([Message("system", self.system_prompt)] if self.system_prompt else []), Message("user", prompt)]

    def _ask(
        self, prompt: str, formatted: bool, settings: dict[str, Any], cancelled: Callable[[], bool] = lambda: False
    ) -> _Opened:
        return _Opened(self._open(self._one(prompt, formatted), settings, cancelled))

    def _ask_chat(
        self, messages: Sequence[ChatMessage], settings: dict[str, Any], cancelled: Callable[[], bool] = lambda: False
    ) -> _Opened:
        engine = self.engine
        offer, left = tools.taken(settings, engine.prompts)
        prompt = conversation(messages, self.messages_to_prompt, lambda text: engine.chunks.known_texts().find(text))
        return _Opened(self._open(prompt, left, cancelled, offer), offer)

    # -- the ways to ask ----------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(_last(self._pieces(*self._ask(prompt, formatted, kwargs))))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        pieces = self._pieces(*self._ask(prompt, formatted, kwargs))

        def responses() -> CompletionResponseGen:
            with contextlib.closing(pieces):
                for piece in pieces:
                    yield _completion(piece, delta=piece.delta)

        return responses()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(_last(self._pieces(*self._ask_chat(messages, kwargs))))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        pieces = self._pieces(*self._ask_chat(messages, kwargs))

        def responses() -> ChatResponseGen:
            with contextlib.closing(pieces):
                for piece in pieces:
                    if piece.says_something:
                        yield _chat(piece, delta=piece.delta)

        return responses()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(await _alast(await self._apieces(partial(self._ask, prompt, formatted, kwargs))))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        pieces = await self._apieces(partial(self._ask, prompt, formatted, kwargs))

        async def responses() -> CompletionResponseAsyncGen:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield _completion(piece, delta=piece.delta)

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(await _alast(await self._apieces(partial(self._ask_chat, messages, kwargs))))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        pieces = await self._apieces(partial(self._ask_chat, messages, kwargs))

        async def responses() -> ChatResponseAsyncGen:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield _chat(piece, delta=piece.delta)

        return responses()

    # -- prompt templates -------------------------------------------------------------------------------------------

    def messages_for(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        """The messages that `predict` asks with; a model that takes no conversations has one."""
        prompt_args = joined_contexts(prompt_args)
        if self.metadata.is_chat_model:
            return flattened(self._get_messages(prompt, **prompt_args), self.messages_to_prompt)
        return [ChatMessage(role=MessageRole.USER, content=self._get_prompt(prompt, **prompt_args))]

    def as_structured_llm(self, output_cls: type[BaseModel], **kwargs: Any) -> StructuredLLM:
        return StructuredTemplateLLM(llm=self, output_cls=output_cls, **kwargs)

    # -- copies -----------------------------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        made = super().__copy__()
        made._changing = threading.RLock()
        # A lazy LLM has nothing to share before it is used: its copy opens an engine of its own.
        made._owns_engine = made._engine is None
        listen(made)
        return made

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # Whoever copies what an LLM is part of wants other settings, not the weights a second time, and an open store
        # cannot be copied at all. What the fields hold are values, or functions and handlers of the user's.
        made = self.__copy__()
        if memo is not None:
            memo[id(self)] = made
        return made

    # -- other processes --------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        # Core's own pickling would drop the engine with a warning and leave an LLM that cannot answer.
        if self._opening is None:
            raise InvalidSettingError(
                "a RagBlendLLM over an engine cannot be pickled: make one from a model's name and a store folder"
            )
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in _STAY_BEHIND}
        del fields["model_name"]
        return partial(type(self), lazy=True, **self._opening.settings(), **fields), ()


def _raw(stream: AnswerStream) -> dict[str, Any]:
    prompt, answer = stream.report.prompt_tokens, len(stream.token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return {"usage": usage, "ragblend": stream.report.as_dict()}


def _last(pieces: Iterable[_Piece]) -> _Piece:
    for piece in pieces:
        last = piece
    return last


async def _alast(pieces: AsyncGenerator[_Piece, None]) -> _Piece:
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            last = piece
    return last


def _completion(piece: _Piece, delta: str | None = None) -> CompletionResponse:
    return CompletionResponse(text=piece.text, delta=delta, raw=piece.raw)


def _chat(piece: _Piece, delta: str | None = None) -> ChatResponse:
    return ChatResponse(message=tools.answer(piece.text, piece.calls), delta=delta, raw=piece.raw)


def _name_of(model: Model | RagBlend) -> str:
    if isinstance(model, (str, Path)):
        return str(model)
    loaded = model.decoder.model if isinstance(model, RagBlend) else model
    loaded = loaded[0] if isinstance(loaded, tuple) and loaded else loaded
    return getattr(loaded, "name_or_path", "") or type(loaded).__name__


def _close_opened(opening: Future[_Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().stream.close()


_DEFAULTS = {name: it.default for name, it in inspect.signature(RagBlendLLM.__init__).parameters.items()} | {
    "model": DEFAULT_MODEL
}
