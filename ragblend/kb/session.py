"""A chat with the knowledge base: a turn pays for its question, little for its chunks, nothing for what was said.

A turn's chunks stand behind what was said, right before its question, and leave the conversation with it:

    head  question answer  question answer  ...  [chunks] question

What was said only grows, as the beginning of every prompt, and no chunk stands before it: its KV is exact, and in the
engine's prefix cache. The last turn's question and answer are added to it when the turn is over, while the user reads.
The chunks come from the store, blended as in any prompt. LlamaIndex's chat engines put the chunks before the history
instead: there everything that was said moves with each turn. (Keeping all chunks in the conversation, as a prefix that
only grows, costs more: after a few turns, what is new attends to many thousand tokens.) That chunks are gone with their
turn is why a search is made for the message together with the last ones, too: a follow-up question finds them again.

Where the conversation outgrows the model's window, or its number of turns, the older part is dropped, down to half, so
that it does not happen every turn. What is left is prefilled anew, also while the user reads; so it is after a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from ragblend.engine import AnswerStream, RagBlend
from ragblend.errors import EmptyPromptError, InvalidSettingError, whole_number
from ragblend.kb.conversation import DEFAULT_MAX_TURNS, Conversation, Turn
from ragblend.kb.files import readable
from ragblend.kb.reports import Reply
from ragblend.model.generate import DecodeSettings, stop_strings
from ragblend.prompt.chunk import Chunk, Message
from ragblend.report import BlendReport
from ragblend.settings import check_ratio, check_selector

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

DEFAULT_MAX_TOKENS = 256
DEFAULT_RATIO = 0.0
"""Nothing, where 0.15 is the rule: of what a turn costs here, choosing tokens and recomputing a twentieth of them is a
third, and who talks waits in every turn. In chats of eight turns with SmolLM2-135M the KL divergence from a full
prefill's first 16 tokens is 0.027 nats so, 0.018 at 0.05 and 0.012 at 0.15."""

_SEPARATOR = "\n\n"
_ASK = "\n---------------------\n"
# "And when?" finds nothing by itself, and a message that is clear by itself must not find what was asked before. So
# what is found for a message with the last one, or the last two, counts by this share of its similarity. With 16
# questions of MuSiQue, follow-ups then found 249 of 256 chunks (by themselves 16), follow-ups of those 215, and no
# change of topic missed any chunk that it found by itself.
_WITH_LAST_MESSAGES = (0.6, 0.4)
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
        self._lock = threading.Lock()
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
        with self._lock:  # one thread may close what another one reads
            first, self._open = self._open, False
        if first:
            self._ended(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChatSession:
    """One chat. Threads and processes may share it: turns that are asked at once do not know of each other.

    chat = kb.session("someone")
    print(chat.chat("Who designed the bridge?").text)
    print(chat.chat("And when?").text)

    Attributes:
        last_report: how the turn that ended last was answered: tokens found in RAM (prefix_tokens: what was said
            before), read from the store (reused_tokens: its chunks), of those recomputed, and computed (fresh_tokens);
            TTFT.
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
        self.last_report: BlendReport | None = None
        self._engine, self._retrieve, self._conversation = engine, retrieve, conversation
        self._max_turns = whole_number("max_turns", max_turns, least=1)
        self._settings = {"max_tokens": DEFAULT_MAX_TOKENS, "ratio": DEFAULT_RATIO} | _checked(settings)
        *self._head, self._opening = engine.settings.head
        self._warm()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What has been said and is still known, oldest first.

        Raises:
            StoreError: another process changed the file of the conversation, and it cannot be read.
        """
        return self._conversation.turns

    def chat(self, message: str, **settings: Any) -> Reply:
        """Ask, and wait for the whole reply.

        Args:
            **settings: for this turn instead of the session's.

        Raises:
            EmptyPromptError, InvalidSettingError: before anything is computed.
            ContextWindowError: the message alone does not fit the model's window.
            NotCalibratedError: a bound on the divergence is asked for, and nothing says what keeps it.
            StoreError: what was said cannot be read or written.
        """
        with self.stream(message, **settings) as stream:
            for _ in stream:
                pass
        return stream.reply

    def stream(self, message: str, **settings: Any) -> ReplyStream:
        """The same, piece by piece. The prompt is prefilled before this returns.

        Raises:
            As `chat`; a StoreError where the reply ends, if it is what was said that cannot be written.
        """
        question = readable(message).strip()
        if not question:
            raise EmptyPromptError("the message is empty: say something")
        chosen = self._settings | _checked(settings)
        sources = self._sources(question)
        texts = list(dict.fromkeys(source.node.get_content().strip() for source in sources))
        turns = self._conversation.turns
        room = self._room(question, int(chosen["max_tokens"]))
        known = self._kept(turns, texts, room)
        chunks = self._fitting(texts, room - self._size(known))
        messages = [*self._said(known), self._asking(chunks, question)]
        stream = self._engine.stream(messages, goes_on=False, **chosen)  # this turn's chunks leave with it

        def ended(stream: AnswerStream) -> None:
            self.last_report = stream.report
            if answer := stream.text.strip():
                turn = Turn(question, answer)
                stay = max(1, len(self._kept((*known, turn), texts, room)))
                self._conversation.add(turn, forget=turns[: len(turns) + 1 - stay])
                self._warm()

        return ReplyStream(stream, sources, messages, ended)

    def clear(self) -> None:
        """Forget what was said.

        Raises:
            StoreError: the file of the conversation cannot be removed.
        """
        self._conversation.clear()

    def _sources(self, question: str) -> list[NodeWithScore]:
        """The chunks closest to the message, or to it together with the last ones; closest first."""
        found = list(self._retrieve(question))
        top_k = len(found)
        asked = [turn.question for turn in self._conversation.turns]
        for back, share in enumerate(_WITH_LAST_MESSAGES[: len(asked)], 1):
            if found and (found[-1].score or 0.0) >= share:
                break  # a similarity is 1 at most: nothing can come in
            for source in self._retrieve("\n".join([question, *asked[-back:]])):  # embedders cut off what is too long
                source.score = share * (source.score or 0.0)
                found.append(source)
            best: dict[str, NodeWithScore] = {}
            for source in sorted(found, key=lambda source: source.score or 0.0, reverse=True):
                best.setdefault(source.node.get_content(), source)
            found = list(best.values())[:top_k]
        return found

    def _warm(self) -> None:
        """Have everything that comes before the next turn's chunks computed while nobody waits for it."""
        self._engine.warm([*self._said(self._conversation.turns), self._opening])

    def _said(self, turns: Sequence[Turn]) -> list[Message]:
        said = [(Message(self._opening.role, t.question), Message("assistant", t.answer)) for t in turns]
        return [*self._head, *(message for pair in said for message in pair)]

    def _asking(self, chunks: Sequence[str], question: str) -> Message:
        """The chunks behind what stands before chunks in every prompt, then the question."""
        if not chunks:
            return Message(self._opening.role, question)
        parts = [part for text in chunks for part in (Chunk(text), _SEPARATOR)][:-1]
        return Message(self._opening.role, [*self._opening.content, *parts, _ASK + question])

    def _room(self, question: str, max_tokens: int) -> int:
        """Tokens that are left of the window for what was said, and chunks."""
        window = self._engine.decoder.context_window_tokens
        return window - min(max_tokens, window // 4) - len(self._engine.preamble_ids) - self._tokens(question)

    def _kept(self, turns: Sequence[Turn], texts: Sequence[str], room: int) -> tuple[Turn, ...]:
        """The turns that stay: all, if there is room for the texts beside them, or the last ones, up to half of it."""
        kept = tuple(turns)
        if len(kept) > self._max_turns:
            kept = kept[-max(1, self._max_turns // 2) :]
        if self._size(kept) + self._tokens(*texts) > room:
            while kept and self._size(kept) > room // 2:
                kept = kept[1:]
        return kept

    def _fitting(self, texts: Sequence[str], room: int) -> Sequence[str]:
        """As many, the first ones first, as there is room for."""
        while texts and self._tokens(*texts) > room:
            texts = texts[:-1]
        return texts

    def _size(self, turns: Sequence[Turn]) -> int:
        return sum(self._tokens(turn.question, turn.answer) for turn in turns)

    def _tokens(self, *texts: str) -> int:
        """Tokens of these texts in one message, and some more for what stands around them."""
        return _TURN_TOKENS + sum(2 + len(self._engine.prompts.encode_text(text)) for text in texts)


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as the engine takes them. Raises InvalidSettingError where it would, before a turn is asked."""
    chosen = {name: value for name, value in settings.items() if value is not None}
    if "stop" in chosen:
        chosen["stop"] = stop_strings(chosen["stop"])
    if "top_k" in chosen:
        raise InvalidSettingError("top_k is the number of a session's sources, for all turns: kb.session(top_k=...)")
    if "ratio" in chosen:
        check_ratio(chosen["ratio"])
    if "selector" in chosen:
        check_selector(chosen["selector"])
    try:
        DecodeSettings(**{name: value for name, value in chosen.items() if name not in ("ratio", "selector")})
    except TypeError as error:
        raise InvalidSettingError(f"a session has no such setting: {error}") from error
    return chosen
