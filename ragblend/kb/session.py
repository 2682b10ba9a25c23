"""A chat with the knowledge base in which a turn pays for what is new in it.

A turn's message holds the retrieved chunks that are not in the conversation yet, and the question. It is appended to
everything before, which stays as it was, chunks and all:

    head  [chunks] question  answer  [chunks] question  answer  ...  [fresh chunks] question

So everything up to this turn is the beginning of this prompt, found in the engine's prefix cache; the turn's chunks
come from the store, and the question is computed. A follow-up question finds what it is about in the conversation, even
where a search for its words alone would not. LlamaIndex's chat engines put the context of this turn before the history
instead: there everything that was said moves with each turn.

Where the conversation outgrows the model's window, or its number of turns, the older part is dropped, at least down to
half, so that it does not happen every turn. What is left then stands at another place: its chunks come from the store,
as do the answers, which are marked as chunks and learned when they are first missed. So it is after a restart, and
where other conversations have filled the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ragblend.engine import AnswerStream, RagBlend
from ragblend.errors import EmptyPromptError, InvalidSettingError
from ragblend.kb.conversation import DEFAULT_MAX_TURNS, Conversation, Turn
from ragblend.kb.files import readable
from ragblend.kb.reports import Reply
from ragblend.model.generate import DecodeSettings
from ragblend.prompt.chunk import Chunk, Message
from ragblend.report import BlendReport
from ragblend.settings import check_ratio, check_selector

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

DEFAULT_MAX_TOKENS = 256

_SEPARATOR = "\n\n"
_ASK = "\n---------------------\nAnswer from the context above and from what was said before.\n"
_TURN_TOKENS = 64  # what template and glue add to a turn, and more


class ReplyStream(Iterator[str]):
    """Pieces of a reply. The turn enters the conversation when the reply ends, or when this is closed before.

    Attributes:
        sources: the chunks that were retrieved for this turn, closest first.
        messages: the whole prompt.
    """

    def __init__(
        self,
        stream: AnswerStream,
        sources: Sequence[NodeWithScore],
        messages: Sequence[Message],
        ended: Callable[[AnswerStream], None],
    ) -> None:
        self.sources, self.messages = tuple(sources), tuple(messages)
        self._stream, self._ended = stream, ended
        self._open = True

    @property
    def reply(self) -> Reply:
        """What there is so far."""
        return Reply(self._stream.text, self.sources, self._stream.report)

    def __next__(self) -> str:
        try:
            piece = next(self._stream)
        except StopIteration:
            self._end()
            raise
        if self._stream.report.finish_reason:
            self._end()
        return piece

    def close(self) -> None:
        """Stop computing. What has been said stays said."""
        self._stream.close()
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._ended(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ChatSession:
    """One chat. Threads may share it: turns that are asked at once do not know of each other.

    chat = kb.session("someone")
    print(chat.chat("Who designed the bridge?").text)
    print(chat.chat("And when?").text)

    Attributes:
        last_report: how the turn that ended last was answered: tokens found in RAM (prefix_tokens: what was said
            before), read from the store (reused_tokens), of those recomputed, and computed (fresh_tokens); TTFT.
    """

    def __init__(
        self,
        engine: RagBlend,
        retrieve: Callable[[str], Sequence[NodeWithScore]],
        conversation: Conversation,
        *,
        max_turns: int = DEFAULT_MAX_TURNS,
        **settings: Any,
    ) -> None:
        """Raises InvalidSettingError. settings: ratio, selector, and those of DecodeSettings, for all turns."""
        if max_turns < 1:
            raise InvalidSettingError(f"max_turns must be 1 or more, not {max_turns}")
        self.last_report: BlendReport | None = None
        self._engine, self._retrieve, self._conversation = engine, retrieve, conversation
        self._max_turns = max_turns
        self._settings = {"max_tokens": DEFAULT_MAX_TOKENS} | _checked(settings)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What has been said and is still known, oldest first."""
        return self._conversation.turns

    def chat(self, message: str, **settings: Any) -> Reply:
        """Ask, and wait for the whole reply.

        Args:
            **settings: for this turn instead of the session's.

        Raises:
            EmptyPromptError, InvalidSettingError: before anything is computed.
            ContextWindowError: the message alone does not fit the model's window.
        """
        with self.stream(message, **settings) as stream:
            for _ in stream:
                pass
        return stream.reply

    def stream(self, message: str, **settings: Any) -> ReplyStream:
        """The same, piece by piece. The prompt is prefilled before this returns."""
        question = readable(message).strip()
        if not question:
            raise EmptyPromptError("the message is empty: say something")
        chosen = self._settings | _checked(settings)
        sources = self._retrieve(question)
        texts = list(dict.fromkeys(source.node.get_content().strip() for source in sources))
        turns = self._conversation.turns
        known, fresh = self._fitted(turns, texts, question, int(chosen["max_tokens"]))
        messages = self._prompt(known, Turn(question, "", fresh))
        stream = self._engine.stream(messages, **chosen)

        def ended(stream: AnswerStream) -> None:
            self.last_report = stream.report
            if answer := stream.text.strip():
                self._conversation.add(Turn(question, answer, fresh), forget=turns[: len(turns) - len(known)])

        return ReplyStream(stream, sources, messages, ended)

    def clear(self) -> None:
        """Forget what was said.

        Raises:
            StoreError: the file of the conversation cannot be removed.
        """
        self._conversation.clear()

    def _fitted(
        self, turns: Sequence[Turn], texts: Sequence[str], question: str, max_tokens: int
    ) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
        """The turns that are kept, and the texts that they do not hold: as many, the first ones first, as there is
        room for."""
        window = self._engine.decoder.context_window_tokens
        room = window - min(max_tokens, window // 4) - len(self._engine.preamble_ids) - self._tokens(question)
        kept = tuple(turns)
        if len(kept) >= self._max_turns:
            kept = kept[len(kept) - self._max_turns // 2 :] if self._max_turns > 1 else ()
        sizes = [self._tokens(turn.question, turn.answer, *turn.chunks) for turn in kept]
        if sum(sizes) + self._tokens(*_missing(kept, texts)) > room:
            while sizes and sum(sizes) > room // 2:
                kept, sizes = kept[1:], sizes[1:]
        fresh = _missing(kept, texts)
        while fresh and sum(sizes) + self._tokens(*fresh) > room:
            fresh = fresh[:-1]
        return kept, fresh

    def _tokens(self, *texts: str) -> int:
        """Tokens of these texts in one message, and some more for what stands around them."""
        return _TURN_TOKENS + sum(2 + len(self._engine.prompts.encode_text(text)) for text in texts)

    def _prompt(self, known: Sequence[Turn], turn: Turn) -> list[Message]:
        """The conversation. All but its last message are the same in the turns that follow."""
        preamble = self._engine.settings.preamble
        head = [Message("user", preamble)] if isinstance(preamble, str) else list(preamble)
        messages = head[:-1]
        for earlier in known:
            messages.append(_asking(head[-1], earlier))
            # The last answer's end is fresh in any case: a chunk would be missed for it, and learned for nothing.
            answer = earlier.answer if earlier is known[-1] else Chunk(earlier.answer)
            messages.append(Message("assistant", answer))
        return [*messages, _asking(head[-1], turn)]


def _asking(head: Message, turn: Turn) -> Message:
    """A user's message: the chunks behind what stands before chunks in every prompt, then the question."""
    if not turn.chunks:
        return Message(head.role, turn.question)
    chunks = [part for text in turn.chunks for part in (Chunk(text), _SEPARATOR)][:-1]
    return Message(head.role, [*head.content, *chunks, _ASK + turn.question])


def _missing(turns: Sequence[Turn], texts: Sequence[str]) -> tuple[str, ...]:
    held = {text for turn in turns for text in turn.chunks}
    return tuple(text for text in texts if text not in held)


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidSettingError where the engine would, before a turn is asked."""
    chosen = {name: value for name, value in settings.items() if value is not None}
    if "ratio" in chosen:
        check_ratio(chosen["ratio"])
    if "selector" in chosen:
        check_selector(chosen["selector"])
    try:
        DecodeSettings(**{name: value for name, value in chosen.items() if name not in ("ratio", "selector")})
    except TypeError as error:
        raise InvalidSettingError(f"a session has no such setting: {error}") from error
    return chosen
