"""RagBlendLLM: LlamaIndex's LLM interface over a RagBlend engine.

An app that retrieves, formats and asks as usual needs nothing else: by the time an LLM is called the retrieved nodes
are one string, and the engine finds the chunks it knows in that string by their content.

All eight ways to ask go through `_open` (settings, prompt, prefill) and `_pieces` (decode), so that they cannot differ.
A stream's prompt is prefilled before the call returns: a prompt that does not fit raises where it was asked, not when
somebody first looks at the stream. After that each piece is computed when it is asked for, so that a stream nobody
reads costs nothing, and closing one ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

from ragblend.blend.prefill import Selector
from ragblend.engine import AnswerStream, RagBlend, Ratio, check_ratio
from ragblend.errors import InvalidSettingError
from ragblend.model.generate import DecodeSettings
from ragblend.model.sources import DEFAULT_MODEL, Model, load_model
from ragblend.prompt.chunk import Message, template_sources
from ragblend.report import BlendReport
from ragblend.store.kvstore import KVStore

_DECODING = ("max_tokens", "temperature", "top_p", "repetition_penalty", "stop", "seed")
_PER_CALL = (*_DECODING, "ratio", "selector")
# Core's own DocumentContextExtractor sends HTTP headers to whatever LLM it has. They mean nothing here.
_IGNORED = frozenset({"extra_headers"})
_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
_CONTEXT = "\N{OBJECT REPLACEMENT CHARACTER}context\N{OBJECT REPLACEMENT CHARACTER}"


class _Piece(NamedTuple):
    """The answer so far, what is new in it, and with the last piece what the answer took."""

    text: str
    delta: str
    raw: dict[str, Any] | None


class RagBlendLLM(LLM):
    """A local LLM that starts to answer sooner when the prompt holds chunks whose KV is stored.

    The model, the store and the engine are opened here, so that what is wrong with them shows here.

    Args:
        model: a local folder, a GGUF file, a hub id, the default model's name, or (model, tokenizer).
        store: folder of the KV store (made if missing), or an open KVStore.
        dtype, device: "auto" takes what is fastest.
        size_limit_bytes: bound of the store, when `store` is a folder.
        preamble: what chunks are prefilled behind: what stands before the first chunk of the prompts to come. A
            LlamaIndex prompt is cut at its `context_str`; the default is the text-QA prompt of core's query engines.
            A string or Messages are taken as they are. None: chunks are prefilled alone.
        ratio, selector: how many of the reused tokens are recomputed and which; None: as the engine does by itself.
        max_tokens, temperature, top_p, repetition_penalty, stop, seed: as in ragblend's DecodeSettings. Each of these,
            ratio and selector can be given to a single call, too.
        context_window: pack prompts to fewer tokens than the model takes.
        system_prompt: goes before every prompt that core formats.
        engine: an engine to use instead of opening one. It keeps its own preamble, and stays open on `close`.
        **llm_fields: the other fields of LlamaIndex's LLM: callback_manager, output_parser, completion_to_prompt, ...

    Raises:
        ModelNotFoundError, UnsupportedModelError, StoreError, InvalidSettingError.
    """

    model_name: str = Field(description="Where the model came from.")
    max_tokens: int = Field(description="At most so many tokens an answer.")
    temperature: float = Field(description="0 is greedy.")
    top_p: float = Field(description="Sample from the likeliest tokens with this probability together.")
    repetition_penalty: float = Field(description="Above 1: tokens that were seen become less likely.")
    stop: tuple[str, ...] = Field(description="Strings that end an answer.")
    seed: int | None = Field(description="Makes sampling repeatable.")
    ratio: float | str | None = Field(description="Share of reused tokens to recompute, or 'auto'.")
    selector: Any = Field(description="Which tokens those are.", exclude=True)
    context_window: int | None = Field(description="Fewer tokens than the model's own window.")

    _engine: RagBlend = PrivateAttr()
    _owns_engine: bool = PrivateAttr()
    _last_report: BlendReport | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: Model = DEFAULT_MODEL,
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
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        context_window: int | None = None,
        system_prompt: str | None = None,
        engine: RagBlend | None = None,
        **llm_fields: Any,
    ) -> None:
        if unknown := sorted(llm_fields.keys() - LLM.model_fields.keys()):
            raise InvalidSettingError(f"RagBlendLLM has no setting {', '.join(unknown)}")
        llm_fields["system_prompt"] = system_prompt
        decoding = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "stop": _stops(stop),
            "seed": seed,
        }
        _check_decoding(decoding)
        if ratio is not None:
            check_ratio(ratio)
        name = str(model)
        if engine is None:
            if store is None:
                raise InvalidSettingError(
                    'say where chunk KV is kept: RagBlendLLM(store="a-folder"), or give an engine'
                )
            opened = _open_engine(model, store, dtype, device, size_limit_bytes, preamble, llm_fields)
        else:
            if store is not None or size_limit_bytes is not None or model != DEFAULT_MODEL:
                raise InvalidSettingError("an engine brings its own model and store: give either those or an engine")
            opened = engine
        if engine is not None or isinstance(model, tuple):
            loaded = opened.decoder.model
            name = loaded.name_or_path or type(loaded).__name__
        fields: dict[str, Any] = {
            **llm_fields,
            **decoding,
            "model_name": name,
            "ratio": ratio,
            "selector": selector,
            "context_window": context_window,
        }
        try:
            window = opened.decoder.context_window_tokens
            if context_window is not None and not 0 < context_window <= window:
                raise InvalidSettingError(f"context_window must be 1 to {window}, the model's; got {context_window}")
            super().__init__(**fields)
        except BaseException:
            if engine is None:
                opened.close()
            raise
        self._engine = opened
        self._owns_engine = engine is None

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
        window = self.context_window or self._engine.decoder.context_window_tokens
        return LLMMetadata(
            context_window=window,
            # Core takes this off the window before it packs a prompt. An answer ends where the window does anyway.
            num_output=max(1, min(self.max_tokens, window // 4)),
            is_chat_model=self._engine.prompts.has_template,
            is_function_calling_model=False,
            model_name=self.model_name,
        )

    @property
    def engine(self) -> RagBlend:
        """The engine that answers; `KVPrefill(llm=...)` fills its store."""
        return self._engine

    @property
    def last_report(self) -> BlendReport | None:
        """What the answer that ended last took. With several threads, read `response.raw["ragblend"]` instead."""
        return self._last_report

    def close(self) -> None:
        """Close the engine, if this LLM opened it: what was missed is learned first."""
        if self._owns_engine:
            self._engine.close()

    # -- the one way to an answer -------------------------------------------------------------------------------------

    def _open(self, prompt: Sequence[Message], settings: dict[str, Any]) -> AnswerStream:
        """Prefill the prompt; the answer's pieces are still to be computed.

        Args:
            settings: of this call; None stands for the LLM's own.

        Raises:
            EmptyPromptError, ContextWindowError, InvalidSettingError: before anything is computed.
        """
        if unknown := sorted(settings.keys() - {*_PER_CALL, *_IGNORED}):
            raise InvalidSettingError(f"a call takes {', '.join(_PER_CALL)}; not {', '.join(unknown)}")
        chosen = {name: getattr(self, name) if settings.get(name) is None else settings[name] for name in _PER_CALL}
        chosen["stop"] = _stops(chosen["stop"])
        return self._engine.stream(prompt, **chosen)

    def _pieces(self, stream: AnswerStream) -> Generator[_Piece, None, None]:
        """The answer piece by piece; at least one, and the last one has `raw`. Closing it stops the computing."""
        try:
            for delta in stream:
                if stream.report.finish_reason:
                    break
                yield _Piece(stream.text, delta, None)
            else:
                delta = ""  # it ended with a token that shows nothing, such as the end of the turn
            yield _Piece(stream.text, delta, _raw(stream))
        finally:
            stream.close()
            self._last_report = stream.report

    async def _apieces(self, prompt: Sequence[Message], settings: dict[str, Any]) -> AsyncGenerator[_Piece, None]:
        """`_open` and `_pieces` in a thread of their own; the prompt is prefilled when this returns."""
        # One thread for the whole answer: a step that is under way when the caller is cancelled cannot be interrupted,
        # and what closes the stream has to queue behind it.
        worker = ThreadPoolExecutor(1, thread_name_prefix="ragblend-answer")
        opening = worker.submit(self._open, prompt, settings)
        try:
            stream = await asyncio.wrap_future(opening)
        except BaseException:
            opening.add_done_callback(_close_opened)
            worker.shutdown(wait=False)
            raise
        return self._drain(worker, stream)

    async def _drain(self, worker: ThreadPoolExecutor, stream: AnswerStream) -> AsyncGenerator[_Piece, None]:
        pieces = self._pieces(stream)
        try:
            while (piece := await asyncio.wrap_future(worker.submit(next, pieces, None))) is not None:
                yield piece
        finally:
            worker.submit(pieces.close)
            worker.shutdown(wait=False)

    def _one(self, prompt: str, formatted: bool) -> list[Message]:
        """A completion prompt as a conversation; the model's template is put around it once, if there is one.

        What the prompt says can never become a control token, so one that spells a template itself is plain text.
        """
        if not formatted and self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        return [Message("user", prompt)]

    # -- the ways to ask ----------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(_last(self._pieces(self._open(self._one(prompt, formatted), kwargs))))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        pieces = self._pieces(self._open(self._one(prompt, formatted), kwargs))

        def responses() -> CompletionResponseGen:
            with contextlib.closing(pieces):
                for piece in pieces:
                    yield _completion(piece, delta=piece.delta)

        return responses()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(_last(self._pieces(self._open(_conversation(messages), kwargs))))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        pieces = self._pieces(self._open(_conversation(messages), kwargs))

        def responses() -> ChatResponseGen:
            with contextlib.closing(pieces):
                for piece in pieces:
                    yield _chat(piece, delta=piece.delta)

        return responses()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(await _alast(await self._apieces(self._one(prompt, formatted), kwargs)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        pieces = await self._apieces(self._one(prompt, formatted), kwargs)

        async def responses() -> CompletionResponseAsyncGen:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield _completion(piece, delta=piece.delta)

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(await _alast(await self._apieces(_conversation(messages), kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        pieces = await self._apieces(_conversation(messages), kwargs)

        async def responses() -> ChatResponseAsyncGen:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield _chat(piece, delta=piece.delta)

        return responses()

    def __getstate__(self) -> NoReturn:
        # Core's own would drop the engine with a warning and leave an LLM that cannot answer.
        raise InvalidSettingError(
            "a RagBlendLLM holds a loaded model and cannot be pickled: make one in each process, over the same store"
        )


class _Formatter(MockLLM):
    """Formats prompts as a chat model or a completion model would have them formatted, without a model."""

    is_chat_model: bool

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=self.is_chat_model)

    def head(self, template: BasePromptTemplate) -> list[Message]:
        """What `predict` would send, up to the context."""
        given = {*template.kwargs, *(template.template_var_mappings or {}).values()}
        variables = {name: "" for name in template.template_vars if name not in given} | {"context_str": _CONTEXT}
        if self.is_chat_model:
            messages = _conversation(self._get_messages(template, **variables))
        else:
            messages = [Message("user", self._get_prompt(template, **variables))]
        for n, message in enumerate(messages):
            before, found, _ = "".join(map(str, message.content)).partition(_CONTEXT)
            if found:
                return [*messages[:n], Message(message.role, before)]
        raise InvalidSettingError("chunks are prefilled behind a prompt's beginning up to {context_str}; it has none")


def default_preamble(
    template: BasePromptTemplate = DEFAULT_TEXT_QA_PROMPT_SEL, *, is_chat_model: bool, **llm_fields: Any
) -> tuple[Message, ...]:
    """What stands before the first chunk when core formats this prompt: its messages up to `{context_str}`.

    Args:
        template: the prompt; by default the one that core's query engines ask with.
        is_chat_model: whether the model has a chat template; core formats other prompts for those that have none.
        **llm_fields: what else the LLM formats with: system_prompt, completion_to_prompt, ...

    Raises:
        InvalidSettingError: the prompt has no `{context_str}`.
    """
    # Not validated: MockLLM's constructor takes some of an LLM's fields only.
    return tuple(_Formatter.model_construct(is_chat_model=is_chat_model, **llm_fields).head(template))


def _open_engine(
    model: Model,
    store: KVStore | str | Path,
    dtype: str,
    device: str,
    size_limit_bytes: int | None,
    preamble: BasePromptTemplate | str | Sequence[Message] | None,
    llm_fields: dict[str, Any],
) -> RagBlend:
    # The model comes first: which prompt core will format depends on whether its tokenizer has a chat template.
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    if isinstance(preamble, BasePromptTemplate):
        preamble = default_preamble(preamble, is_chat_model=bool(template_sources(tokenizer)), **llm_fields)
    return RagBlend.from_pretrained(
        (loaded, tokenizer),
        store=store,
        size_limit_bytes=size_limit_bytes,
        pack=not isinstance(model, tuple),
        preamble=preamble,
    )


def _conversation(messages: Iterable[ChatMessage]) -> list[Message]:
    conversation = []
    for message in messages:
        for block in message.blocks:
            if not isinstance(block, (TextBlock, CachePoint)):
                raise InvalidSettingError(
                    f"RagBlendLLM reads text, and this message holds a {type(block).__name__}: send its text instead"
                )
        conversation.append(Message(_ROLES.get(message.role, message.role.value), message.content or ""))
    return conversation


def _stops(stop: object) -> Any:
    """Stop strings as the engine takes them; what is no sequence of strings is left for it to refuse."""
    if isinstance(stop, str):
        return (stop,)
    return tuple(stop) if isinstance(stop, Iterable) else stop


def _check_decoding(settings: dict[str, Any]) -> None:
    try:
        DecodeSettings(**settings)
    except TypeError as error:
        raise InvalidSettingError(f"a setting of the wrong type: {error}") from error


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
    message = ChatMessage(role=MessageRole.ASSISTANT, content=piece.text)
    return ChatResponse(message=message, delta=delta, raw=piece.raw)


def _close_opened(opening: Future[AnswerStream]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
