"""Decoding from a filled cache: one row at a time, sampled, turned into text as it comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ragblend.errors import InvalidSettingError
from ragblend.model.cache import KVCache
from ragblend.model.decoder import Decoder

FinishReason = Literal["", "stop", "length"]


@dataclass(frozen=True)
class DecodeSettings:
    """How an answer is decoded.

    max_tokens: at most so many tokens.
    temperature: 0 is greedy, and so is what is too small to tell from it (under 1e-4).
    top_k: sample from so many of the likeliest tokens; 0 is off, and 1 is greedy.
    top_p: of those, sample from the smallest set of tokens with at least this probability, 0 < top_p <= 1.
    repetition_penalty: > 1 makes tokens that were seen less likely (CTRL, arXiv 1909.05858); 1 is off.
    stop: strings that end the answer; they are not part of it.
    seed: makes sampling repeatable.

    Raises:
        InvalidSettingError: a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        sequence = isinstance(self.stop, Iterable) and not isinstance(self.stop, str)
        if not sequence or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidSettingError(f"stop is a sequence of non-empty strings, got {self.stop!r}")
        for name, value, kinds in (
            ("max_tokens", self.max_tokens, (int,)),
            ("temperature", self.temperature, (int, float)),
            ("top_k", self.top_k, (int,)),
            ("top_p", self.top_p, (int, float)),
            ("repetition_penalty", self.repetition_penalty, (int, float)),
            ("seed", self.seed, (int, type(None))),
        ):
            if not isinstance(value, kinds) or isinstance(value, bool):
                wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise InvalidSettingError(f"{name} must be {wanted}, got {value!r}")
        for name, value, valid, wanted in (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0.0, "above 0 (1 is off)"),
            ("seed", self.seed, self.seed is None or 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
        ):
            if not valid:
                raise InvalidSettingError(f"{name} must be {wanted}, got {value}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-4 or self.top_k == 1


def stop_strings(stop: object) -> Any:
    """Stop strings as DecodeSettings takes them, of one or several; what is neither is left for it to refuse."""
    if isinstance(stop, str):
        return (stop,)
    return tuple(stop) if isinstance(stop, Iterable) else stop


class Step(NamedTuple):
    """One decoded token. text: what became certain with it (may be empty). finish: "" while decoding goes on."""

    token_id: int
    text: str
    finish: FinishReason


@torch.inference_mode()
def next_token(logits: Tensor, settings: DecodeSettings, seen: Tensor, generator: torch.Generator | None) -> int:
    """Choose from logits [vocab], fp32. seen: [tokens] int64 ids of prompt and answer so far."""
    if settings.repetition_penalty != 1.0:
        ids = seen.unique().to(logits.device)
        picked = logits[ids]
        penalty = settings.repetition_penalty
        logits = logits.index_copy(0, ids, torch.where(picked > 0, picked / penalty, picked * penalty))
    if settings.greedy:
        return int(logits.argmax())
    if 0 < settings.top_k < len(logits):
        likeliest, ids = logits.topk(settings.top_k)
        logits = torch.full_like(logits, -torch.inf).index_copy(0, ids, likeliest)
    probabilities = torch.softmax(logits / settings.temperature, dim=-1)
    if settings.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        outside = ordered.cumsum(0) - ordered >= settings.top_p
        probabilities = probabilities.index_fill(0, order[outside], 0.0)
    return int(torch.multinomial(probabilities.cpu(), 1, generator=generator))


def decode(
    decoder: Decoder,
    cache: KVCache,
    logits: Tensor,
    prompt_ids: Tensor,
    settings: DecodeSettings,
    stop_ids: Sequence[int],
    to_text: Callable[[Sequence[int]], str],
) -> Iterator[Step]:
    """Decode from a cache that holds the prompt's KV in positions 0..tokens-1.

    Answers from retrieved text tend to repeat it, so what followed the last tokens where they stood before is guessed
    to follow again (prompt lookup decoding; Yang et al., arXiv 2304.04487). The guesses run through the model beside
    the token they follow, which costs hardly more than that token alone. Each token is still chosen from its own
    logits, by the rules of the settings, and a guess counts only if it is what was chosen: the answer is the same, only
    sooner. (As far as rounding goes: in half precision, a row computed beside others may differ in its last bit.)

    Args:
        cache: capacity >= prompt tokens + settings.max_tokens - 1; positions from the prompt's end on are overwritten.
            Where an answer makes a short context a long one (see `Decoder.is_long`), all of it is computed anew.
        logits: [vocab] of the prompt's last position.
        stop_ids: ids that end the answer; they are not part of its text.
        to_text: ids to text, special tokens left out.

    Yields:
        A Step for every token; the last one has a finish reason.
    """
    generator = None
    if not settings.greedy:
        generator = torch.Generator()
        generator.seed() if settings.seed is None else generator.manual_seed(settings.seed)
    ends = frozenset(stop_ids)
    text = _TextStream(to_text, settings.stop)
    ids = prompt_ids.tolist()
    penalised = settings.repetition_penalty != 1.0
    lookup = _Lookup()
    guesses: list[int] = []
    ahead = [logits]  # of the next position, and of those behind each guess
    left = settings.max_tokens
    while True:
        token = next_token(ahead.pop(0), settings, torch.tensor(ids) if penalised else prompt_ids, generator)
        if guesses and guesses.pop(0) != token:
            guesses, ahead = [], []
        left -= 1
        if token in ends:
            yield Step(token, text.finish(), "stop")
            return
        piece, stopped = text.push(token)
        if stopped:
            yield Step(token, piece, "stop")
            return
        if not left:
            yield Step(token, piece + text.finish(), "length")
            return
        yield Step(token, piece, "")
        ids.append(token)
        if not ahead:
            long = decoder.is_long(len(ids))
            guesses = lookup.after(ids)[: left - 1]
            while guesses and decoder.is_long(len(ids) + len(guesses)) != long:
                guesses.pop()
            known = len(ids) - 1 if decoder.is_long(len(ids) - 1) == long else 0
            ahead = list(advance(decoder, cache, [*ids[known:], *guesses], known, 1 + len(guesses)))


@torch.inference_mode()
def advance(decoder: Decoder, cache: KVCache, tokens: Sequence[int], position: int, wanted: int) -> Tensor:
    """Run tokens that stand at `position` and on through every layer.

    Args:
        cache: holds the KV of every position before them, and takes theirs.

    Returns:
        [wanted, vocab] fp32: the logits of the last ones.
    """
    rows = decoder.run(position, position + len(tokens))
    hidden = decoder.embed(torch.tensor(tokens))
    for layer in range(decoder.n_layers):
        hidden = decoder.layer(layer, hidden, rows, cache)
    return decoder.logits(hidden[:, -wanted:])


class _Lookup:
    """Guesses what follows the last tokens by what followed them before.

    Of the places where the last token stood, the one that most of those before it agree with (up to ENOUGH in all) is
    followed, and of several the latest. Where it is so near that less than GUESSES follow it, a loop is guessed.
    """

    GUESSES = 7  # beside the token they follow: a matrix unit takes eight rows in the time of one
    ENOUGH = 3

    def __init__(self) -> None:
        self._places: defaultdict[int, list[int]] = defaultdict(list)  # of each token, where others follow
        self._done = 0

    def after(self, ids: Sequence[int]) -> list[int]:
        """Guesses for what follows ids [tokens], of which those of earlier calls are the beginning."""
        for place in range(self._done, len(ids) - 1):
            self._places[ids[place]].append(place)
        self._done = len(ids) - 1
        longest, found = 0, 0
        for place in reversed(self._places[ids[-1]]):
            n = 1
            while n < self.ENOUGH and n <= place and ids[place - n] == ids[-1 - n]:
                n += 1
            if n > longest:
                longest, found = n, place
            if n == self.ENOUGH:
                break
        if not longest:
            return []
        followers = ids[found + 1 : found + 1 + self.GUESSES]
        return [followers[i % len(followers)] for i in range(self.GUESSES)]


class _TextStream:
    """Ids to text, bit by bit: never half a character, never the beginning of a stop string.

    Text of a few ids depends on its neighbours (bytes of one character, leading spaces), so ids since the last safe
    point are decoded again with each token and only what is new is given out.
    """

    def __init__(self, to_text: Callable[[Sequence[int]], str], stop: tuple[str, ...]) -> None:
        self._to_text, self._stop = to_text, stop
        self._ids: list[int] = []
        self._context = 0  # ids before this are done with
        self._given = 0  # ids before this are in `_held` or were given out
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Take a token; (text that is certain now, whether a stop string ended the answer)."""
        self._ids.append(token)
        before = self._to_text(self._ids[self._context : self._given])
        now = self._to_text(self._ids[self._context :])
        if now.endswith("�") and len(self._ids) - self._given < 8:
            return "", False
        self._held += now[len(before) :]
        self._context, self._given = self._given, len(self._ids)
        return self._release()

    def finish(self) -> str:
        """What was held back when the answer ends for another reason."""
        before = self._to_text(self._ids[self._context : self._given])
        now = self._to_text(self._ids[self._context :])
        self._held += now[len(before) :]
        self._given = self._context = len(self._ids)
        piece, stopped = self._release()
        if not stopped:
            piece, self._held = piece + self._held, ""
        return piece

    def _release(self) -> tuple[str, bool]:
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            piece, self._held = self._held[: min(found)], ""
            return piece, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece, False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
