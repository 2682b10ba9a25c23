"""What a chunk is prefilled behind, and which of its stored variants fits a prompt.

A chunk's KV depends on what stood before it when it was computed. Three things about that matter, in this order:

*Depth.* At the start of a context a token sees a few tokens of template and soaks up attention that later goes
    elsewhere. Behind a few hundred tokens of any text, it looks as it will in a long prompt (`filler`).
*Copies.* A token that repeats text which stood there already is computed quite differently from one that is new (see
    prompt.repeats). No single context is right for both, so a chunk that has a near copy in its corpus (overlapping
    windows, versions of a page) is stored twice: behind text that is new to it and behind the copy (`copy`).
*Topic.* Behind text of the same topic, which is what gets retrieved together, it is closer still (`neighbour`).

The first chunk of a prompt has nothing but the head before it, and is mostly the one that matters most; so what was
prefilled behind the head alone (`head`) is kept, too: there it is exact.

A policy says which variants are made. At query time each chunk of a prompt takes the stored variant whose tokens are
repetitions where, and only where, they are repetitions in this prompt; between equals the policy's order decides.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

from ragblend.prompt.repeats import Mask, repeated_behind

Policy = Literal["none", "system", "filler", "neighbours", "document"]
"""none: chunks are prefilled alone, as in published CacheBlend. system: behind the prompt's own head. filler: behind
the head and a neutral passage, the same for all. neighbours: behind the head alone, again behind the head and the
closest other chunk of the corpus, and a third time where one of them is nearly a copy. document: behind the head alone,
and again behind the head and what stands before the chunk in its document."""

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

NEW_SHARE = 0.1
"""A text is new to a chunk that repeats less than this share of its tokens from it."""
COPY_SHARE = 0.25
"""A chunk that repeats more than this share of its tokens from another one is worth a second variant."""
CONTEXT_TOKENS = 300
"""Length of filler and neighbour at most: depth that has been reached by then changes little afterwards."""

LABEL_BYTES = 16
"""Of a note's label, as in the store."""

NEIGHBOURS = 16
"""How many are worth offering for a chunk: where chunks overlap, many of the closest are nearly copies."""

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

    source: which of the texts that were offered it is; None for the head alone and for the filler.
    """

    name: Name
    ids: tuple[int, ...]
    source: int | None = None


class Note(NamedTuple):
    """What is remembered of a variant beside its KV.

    behind: digest of all the ids it was prefilled behind, head included.
    repeats: [chunk tokens] bool; which of its tokens repeat something that stood there.
    label: 16 bytes to find the chunk by where it is cut, so that its ids are not known; the note begins with them.
    text: the chunk's, to tell where it is cut; "" if it is not to be found so.
    """

    behind: bytes
    repeats: Mask
    label: bytes = bytes(LABEL_BYTES)
    text: str = ""

    @classmethod
    def of(cls, before: Sequence[int], ids: Sequence[int], label: bytes = bytes(LABEL_BYTES), text: str = "") -> Self:
        context = np.asarray(before, dtype=np.int64)
        return cls(digest(context), repeated_behind(context, np.asarray(ids, dtype=np.int64)), label, text)

    def beginning(self, tokens: int) -> Self:
        """The note of the chunk's first tokens alone. (The last few of them may repeat a run that goes on behind.)"""
        return self._replace(repeats=self.repeats[:tokens])

    def to_bytes(self) -> bytes:
        head = _NOTE.pack(self.label, self.behind, len(self.repeats))
        return head + np.packbits(self.repeats).tobytes() + self.text.encode("utf-8", "surrogatepass")

    @classmethod
    def from_bytes(cls, data: bytes, tokens: int | None = None) -> Self:
        """What to_bytes gave, of a chunk of so many tokens; a note that cannot be read fits no prompt in particular."""
        try:
            label, behind, noted = _NOTE.unpack_from(data)
            bits = np.frombuffer(data, dtype=np.uint8, count=-(-noted // 8), offset=_NOTE.size)
            if tokens in (None, noted):
                repeats = np.unpackbits(bits, count=noted).astype(np.bool_)
                return cls(behind, repeats, label, data[_NOTE.size + len(bits) :].decode("utf-8", "surrogatepass"))
        except (struct.error, ValueError):
            pass
        return cls(b"", np.zeros(tokens or 0, dtype=np.bool_))


_DIGEST_BYTES = 16
_NOTE = struct.Struct(f"<{LABEL_BYTES}s{_DIGEST_BYTES}sI")


def digest(ids: npt.NDArray[np.integer]) -> bytes:
    """Names what a chunk stands behind: [tokens] ids -> 16 bytes."""
    return hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=_DIGEST_BYTES).digest()


def contexts(
    policy: Policy, ids: Sequence[int], filler: Sequence[int], offered: Iterable[Sequence[int]]
) -> list[Context]:
    """The variants to make of a chunk.

    Args:
        ids: [chunk tokens].
        filler: ids of the filler, separator included; none where there is no room for it.
        offered: ids of other texts, separator included: neighbours, closest first; or for the policy "document" the
            one text that stands before the chunk. Empty ones are passed over.
    """
    if policy == "none":
        return [Context("alone", ())]
    if policy == "system":
        return [Context("head", ())]
    made: list[Context] = []
    if policy == "document":
        made = [Context("before", tuple(text), n) for n, text in enumerate(offered) if len(text)][:1]
    elif policy == "neighbours":
        chunk = np.asarray(ids, dtype=np.int64)
        others = [(n, tuple(text)) for n, text in enumerate(offered) if len(text)]
        shares = [float(repeated_behind(np.asarray(text, dtype=np.int64), chunk).mean()) for _, text in others]
        new = next((other for other, share in zip(others, shares, strict=True) if share < NEW_SHARE), None)
        if new is not None:
            made.append(Context("neighbour", new[1], new[0]))
        if shares and max(shares) > COPY_SHARE:
            n, text = others[shares.index(max(shares))]
            made.append(Context("copy", text, n))
    known = any(context.name in ("neighbour", "before") for context in made)
    if not known and (len(filler) or policy == "filler"):
        made.insert(0, Context("filler", tuple(filler)))
    return made if policy == "filler" else [Context("head", ()), *made]


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
