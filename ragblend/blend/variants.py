"""What a chunk is prefilled behind, and which of its stored variants fits a prompt.

A chunk's KV depends on what stood before it when it was computed. Three things about that matter, in this order:

*Depth.* At the start of a context a token sees a few tokens of template and soaks up attention that later goes
    elsewhere. Behind a few hundred tokens of any text, it looks as it will in a long prompt (`filler`).
*Copies.* A token that repeats text which stood there already is computed quite differently from one that is new (see
    prompt.repeats). No single context is right for both, so a chunk that has a near copy in its corpus (overlapping
    windows, versions of a page) is stored twice: behind text that is new to it and behind the copy (`copy`).
*Topic.* Behind text of the same topic, which is what gets retrieved together, it is closer still (`neighbour`). Where
    chunks are short, several such texts make the depth, the closest right before the chunk.

The first chunk of a prompt has nothing but the head before it, and is mostly the one that matters most; so what was
prefilled behind the head alone (`head`) is kept, too: there it is exact.

A policy says which variants are made. At query time each chunk of a prompt takes the stored variant whose tokens are
repetitions where, and only where, they are repetitions in this prompt; between equals the policy's order decides.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

from ragblend.errors import InvalidSettingError
from ragblend.prompt.repeats import Mask, repeated_behind
from ragblend.store.kvstore import LABEL_BYTES

Policy = Literal["none", "system", "filler", "neighbours", "document"]
"""none: chunks are prefilled alone, as in published CacheBlend. system: behind the prompt's own head. filler: behind
the head and a neutral passage, the same for all. neighbours: behind the head alone, again behind the head and the
closest other chunks of the corpus, and a third time where one of them is nearly a copy. document: behind the head
alone, and again behind the head and what stands before the chunk in its document."""

Name = Literal["alone", "head", "filler", "neighbour", "copy", "before"]

POLICIES: tuple[Policy, ...] = get_args(Policy)

VARIANTS: Mapping[Policy, tuple[Name, ...]] = {
    "none": ("alone",),
    "system": ("head",),
    "filler": ("filler",),
    "neighbours": ("neighbour", "filler", "copy", "head"),
    "document": ("before", "filler", "head"),
}
"""The variants that a policy looks for, the preferred first."""

SHALLOW: tuple[Name, ...] = ("alone", "head")
"""Variants without a context between head and chunk."""

NEW_SHARE = 0.1
"""A text is new to a chunk that repeats less than this share of its tokens from it."""
COPY_SHARE = 0.25
"""A chunk that repeats more than this share of its tokens from another one is worth a second variant."""
CONTEXT_TOKENS = 300
"""Length of the filler, and of each other text, at most: what is deeper than that already changes little."""
DEEP_TOKENS = 200
"""A context of so many tokens is deep enough; to a shorter one another text is added."""

NEIGHBOURS = 16
"""How many texts are worth offering for a chunk: where chunks overlap, many of the closest are nearly copies."""

FILLER = """\
A day at the harbour begins before the sun is up. The first boats come in with the tide, and the people on the quay \
know by the sound of the engines which of them it is. Boxes are lifted out, counted and weighed, and somebody writes \
the numbers on a board that was once green. By seven o'clock the auction is over and the lorries have left for the \
towns inland. What stays behind is the smell of salt and diesel, a few gulls, and the work of getting ready again: \
nets are mended, ropes are coiled, ice is ordered for the evening.

Bread is older than writing. Flour, water and time are all it needs; salt and yeast make it better. A baker who has \
made the same loaf for thirty years does not measure much, but the order of things never changes. First the dough is \
mixed and left alone, then it is folded, then it rests again. The oven has to be hotter than most people expect. After \
twenty minutes the crust sings, which is what bakers call the small cracking noise of a loaf that cools on the rack.

Rain that falls on the hills takes years to reach the springs below. It sinks through soil, gravel and cracked stone, \
and on the way it loses what it carried and picks up something else: lime in one valley, iron in the next. That is \
why two villages that can see each other may drink water that tastes quite different. In dry summers the upper wells \
fail first. Older houses still have a cistern under the kitchen floor, from the time before there were pipes, and \
children are told to keep away from the lid."""
"""A passage about nothing in particular, for the depth that it gives. It is public; no user's text is ever in it."""


class Context(NamedTuple):
    """What stands between the head and a chunk for one of its variants.

    ids: a separator behind each text included.
    sources: which of the texts that were offered it is made of, the one right before the chunk first; () for the head
        alone and for the filler.
    first_tokens: of the text right behind the head, if that is one of those; else 0.
    """

    name: Name
    ids: tuple[int, ...]
    sources: tuple[int, ...] = ()
    first_tokens: int = 0


class Note(NamedTuple):
    """What is remembered of a variant beside its KV.

    behind: digest of all the ids it was prefilled behind, head included.
    sources: digests of the ids of each text of the corpus among them, the one right before the chunk first.
    repeats: [chunk tokens] bool; which of its tokens repeat something that stood there.
    label: LABEL_BYTES to find the chunk by where it is cut, so that its ids are not known; the note begins with them.
    text: the chunk's, to tell where it is cut; "" if it is not to be found so.
    """

    behind: bytes
    repeats: Mask
    label: bytes = bytes(LABEL_BYTES)
    text: str = ""
    sources: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        before: Sequence[int],
        ids: Sequence[int],
        label: bytes = bytes(LABEL_BYTES),
        text: str = "",
        sources: Iterable[Sequence[int]] = (),
    ) -> Self:
        """The note of a chunk of these ids behind those in `before`, the texts of `sources` among them."""
        repeats = repeated_behind(np.asarray(before, dtype=np.int64), np.asarray(ids, dtype=np.int64))
        return cls(digest(before), repeats, label, text, tuple(digest(source) for source in sources))

    def beginning(self, tokens: int) -> Self:
        """The note of the chunk's first tokens alone. (The last few of them may repeat a run that goes on behind.)"""
        return self._replace(repeats=self.repeats[:tokens])

    def to_bytes(self) -> bytes:
        head = _NOTE.pack(self.label, self.behind, len(self.repeats), len(self.sources))
        repeats = np.packbits(self.repeats).tobytes()
        return b"".join((head, *self.sources, repeats, self.text.encode("utf-8", "surrogatepass")))

    @classmethod
    def from_bytes(cls, data: bytes, tokens: int | None = None) -> Self:
        """What to_bytes gave, of a chunk of so many tokens; a note that cannot be read fits no prompt in particular."""
        try:
            label, behind, noted, n_sources = _NOTE.unpack_from(data)
            at = _NOTE.size + n_sources * _DIGEST_BYTES
            sources = tuple(data[start : start + _DIGEST_BYTES] for start in range(_NOTE.size, at, _DIGEST_BYTES))
            bits = np.frombuffer(data, dtype=np.uint8, count=-(-noted // 8), offset=at)
            if tokens in (None, noted):
                repeats = np.unpackbits(bits, count=noted).astype(np.bool_)
                return cls(behind, repeats, label, data[at + len(bits) :].decode("utf-8", "surrogatepass"), sources)
        except (struct.error, ValueError):
            pass
        return cls(b"", np.zeros(tokens or 0, dtype=np.bool_))


_DIGEST_BYTES = 16
_NOTE = struct.Struct(f"<{LABEL_BYTES}s{_DIGEST_BYTES}sIB")


def check_policy(policy: object) -> None:
    """Raises InvalidSettingError unless it is the name of one."""
    if policy not in POLICIES:
        raise InvalidSettingError(f"the policy is one of {', '.join(POLICIES)}; got {policy!r}")


def digest(ids: npt.ArrayLike) -> bytes:
    """Names what a chunk stands behind: [tokens] ids -> 16 bytes."""
    return hashlib.blake2b(np.asarray(ids, dtype="<u4").tobytes(), digest_size=_DIGEST_BYTES).digest()


def contexts(
    policy: Policy,
    ids: Sequence[int],
    filler: Sequence[int],
    offered: Sequence[Sequence[int]],
    separator: Sequence[int],
    room: int,
) -> list[Context]:
    """The variants to make of a chunk.

    Args:
        ids: [chunk tokens].
        filler: its ids.
        offered: ids of other texts: neighbours, closest first; or for the policy "document" those that stand before
            the chunk, the last one first. Empty ones are passed over.
        separator: ids that stand behind each text.
        room: tokens that a context can have, separators included. What does not fit is passed over.
    """
    if policy == "none":
        return [Context("alone", ())]
    if policy == "system":
        return [Context("head", ())]
    whole = [Context("filler", (*filler, *separator))] if len(filler) + len(separator) <= room else []
    if policy == "filler":
        return whole or [Context("filler", ())]
    others = {n: text for n, text in enumerate(offered) if 0 < len(text) <= room - len(separator)}
    made: list[Context] = []
    deepen = partial(_deepened, filler=filler, separator=separator, room=room)
    if policy == "document":
        if others:
            made = [deepen("before", others, list(others))]
    else:
        shares = {n: _repeated_share(text, ids) for n, text in others.items()}
        new = [n for n, share in shares.items() if share < NEW_SHARE]
        if new:
            made.append(deepen("neighbour", others, new))
        closest = max(shares, key=lambda n: shares[n], default=None)
        if closest is not None and shares[closest] > COPY_SHARE:
            made.append(deepen("copy", others, [closest, *new]))
    known = any(context.name in ("neighbour", "before") for context in made)
    return [Context("head", ()), *([] if known else whole), *made]


def _deepened(
    name: Name,
    texts: Mapping[int, Sequence[int]],
    order: Sequence[int],
    *,
    filler: Sequence[int],
    separator: Sequence[int],
    room: int,
) -> Context:
    """The first of the texts in `order`, and farther from the chunk the next ones, until it is deep enough.

    What repeats a text that is there already adds nothing, and is passed over. Where the texts do not suffice, the
    beginning of the filler stands before them.
    """
    taken: list[int] = []
    tokens = 0
    for n in order:
        size = len(texts[n]) + len(separator)
        if tokens + size <= room and all(_repeated_share(texts[other], texts[n]) < COPY_SHARE for other in taken):
            taken.append(n)
            tokens += size
        if tokens >= DEEP_TOKENS:
            break
    lacking = min(CONTEXT_TOKENS, room) - tokens - len(separator) if tokens < DEEP_TOKENS else 0
    start = (*filler[:lacking], *separator) if lacking > 0 and len(filler) else ()
    ids = (*start, *(token for n in reversed(taken) for token in (*texts[n], *separator)))
    return Context(name, ids, tuple(taken), 0 if start else len(texts[taken[-1]]))


def _repeated_share(text: Sequence[int], chunk: Sequence[int]) -> float:
    """The share of a chunk's tokens that repeat something in a text."""
    return float(repeated_behind(np.asarray(text, dtype=np.int64), np.asarray(chunk, dtype=np.int64)).mean())


def texts_before(texts: Sequence[str]) -> list[list[str]]:
    """For each text of a document those that stand before it, the last one first: as many as a context can need."""
    return [list(texts[max(0, n - NEIGHBOURS) : n][::-1]) for n in range(len(texts))]


def neighbours_of(
    texts: Sequence[str], vectors: np.ndarray, *, count: int = NEIGHBOURS, apart: Sequence[Collection[int]] = ()
) -> list[list[str]]:
    """For each text the closest other texts, closest first.

    Args:
        vectors: [texts, dimensions] float32.
        apart: the groups that each text is in; a neighbour then shares none of them. (): there are no groups.
    """
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    members: dict[int, list[int]] = {}
    for n, groups in enumerate(apart):
        for group in groups:
            members.setdefault(group, []).append(n)
    found = []
    reach = min(len(texts), 4 * count)  # equal texts and those of the same group are passed over
    for n, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        similarities = vectors @ vector
        for group in apart[n] if apart else ():
            similarities[members[group]] = -np.inf
        closest = np.argpartition(-similarities, reach - 1)[:reach]
        order = closest[np.lexsort((closest, -similarities[closest]))]
        ranked = dict.fromkeys(texts[m] for m in order if similarities[m] > -np.inf)
        found.append([other for other in ranked if other != text][:count])
    return found


def best(notes: Mapping[Name, Note], policy: Policy, here: Mask, behind: bytes) -> Name | None:
    """The variant to use, of those that are stored; None if there is none.

    Args:
        here: [chunk tokens] bool; which of the chunk's tokens repeat something that stands before it in the prompt.
        behind: digest of all ids that stand before it. A variant that was prefilled behind the very same is exact.
    """
    order = [name for name in VARIANTS[policy] if name in notes]
    return min(
        order,
        key=lambda name: (notes[name].behind != behind, int(np.count_nonzero(notes[name].repeats != here))),
        default=None,
    )
