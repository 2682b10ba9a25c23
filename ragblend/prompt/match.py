"""Finding known chunk texts inside a prompt string, by content alone.

Frameworks hand over a prompt as one string: which parts of it are chunks is no longer marked. `ChunkIndex` knows every
chunk by a record of 16 bytes and finds them all in one vectorised pass:

1. A fingerprint of every 32-character window of the prompt, by doubling: windows of 2, 4, 8, 16 and 32 characters.
2. Windows whose fingerprint is the *head* (first 32 characters) of a known text are candidates.
3. A candidate survives if the window that would end the text has the text's *tail* fingerprint. Those are already
   computed, so ten thousand texts behind one licence header cost one comparison each.
4. What survives is compared by a digest of the whole text, leftmost first, then longest.

Fingerprints and digests are short and not cryptographic. A collision would make the prompt be cut at a place where no
known chunk is; the chunk's key comes from the tokens that really stand there, so nothing wrong can be reused.

Frameworks also cut chunks where a prompt gets too long. What comes after a cut is useless, but KV never depends on what
follows, so that of the beginning is as good as ever. A head that stands where no whole text does is the sign of one:

5. Whoever keeps the chunks is asked for the texts behind those heads' records. That is a look into the store, which
   only prompts with such heads pay for, and nothing of it is kept in RAM.
6. The text that agrees with the prompt longest, character by character, gives the cut: at a word's border, so that the
   tokens before it are those of the whole text. Layout compares the tokens once more, one by one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ragblend.errors import InvalidSettingError
from ragblend.prompt.chunk import Chunk, CutChunk

RECORD_VERSION = 2
"""Part of every digest. Records of another version never match; whoever keeps records keeps this with them."""

RECORD_BYTES = 16
MIN_INDEXED_CHARS = 32
"""Shorter texts are not indexed: recomputing them is cheaper than finding them."""
MIN_CUT_CHARS = 64
"""Beginnings of cut texts that are shorter than this are not looked for."""

TextsOf: TypeAlias = Callable[[Sequence[bytes]], Mapping[bytes, str]]
"""From records to the texts they were made of; those it does not have are left out."""

_U32 = npt.NDArray[np.uint32]
_I64 = npt.NDArray[np.int64]

_COLUMNS = ("head", "length", "tail", "digest")
_RECORD = np.dtype([(column, "<u4") for column in _COLUMNS])
# One odd multiplier per doubling step: the same one twice would let halves trade places unnoticed.
_MULTIPLIERS = tuple(
    np.uint64(m)
    for m in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
)
_SPREAD = np.uint64(0xBF58476D1CE4E5B9)
_FOLD = np.uint64(31)

# What one `find` may spend on texts made to collide (long runs of one character, thousands of texts that share both
# ends). Far above any honest prompt; beyond it the rest of the prompt is left uncut, which is slow but never wrong.
_PAIR_BLOCK = 1 << 18
_PAIR_BUDGET = 1 << 22
_DIGEST_BUDGET_CHARS = 1 << 26
_DIGEST_OVERHEAD_CHARS = 256
# Places of one prompt that are searched for beginnings, texts that are looked up for it, those of them of one head.
_CUT_PLACES = 512
_CUT_TEXTS = 128
_CUT_TEXTS_OF_HEAD = 32
_WORD_CHARS = 32  # a longer run of letters is no word, or its script has no spaces: the cut stays inside it

# Records that wait to be merged: the same ones come with every retrieval, and an index may never be asked.
_PENDING_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def is_indexable(text: str) -> bool:
    """Whether `record_for` takes the text: it is at least MIN_INDEXED_CHARS characters long."""
    return len(text) >= MIN_INDEXED_CHARS


def record_for(text: str) -> bytes:
    """The text's index entry: 16 bytes, the same in every process; small enough to keep next to every stored chunk.

    u32 fingerprint of the first 32 characters, u32 length in characters, u32 fingerprint of the last 32 characters,
    u32 digest of all of them; all little-endian.

    Raises:
        InvalidSettingError: the text is shorter than 32 characters, see `is_indexable`.
    """
    if not is_indexable(text):
        raise InvalidSettingError(
            f"a text needs {MIN_INDEXED_CHARS} characters to be indexed, this one has {len(text)}: "
            "ask is_indexable() first, or mark it as a Chunk in the prompt"
        )
    codes = _codes(text)
    head = _window_fingerprints(codes[:MIN_INDEXED_CHARS])
    tail = _window_fingerprints(codes[-MIN_INDEXED_CHARS:])
    record = np.zeros(1, dtype=_RECORD)
    record[0] = (head[0], len(codes), tail[0], _digest(codes.tobytes()))
    return record.tobytes()


class _Table(NamedTuple):
    """Known texts, ordered by head; one row each. Never changed in place, so readers need no lock."""

    heads: _U32
    lengths: _U32
    tails: _U32
    digests: _U32

    def merged(self, records: bytes) -> _Table:
        """This table and some more records, equal rows once. Nearly sorted, so the sort takes linear time."""
        added = np.frombuffer(records, dtype=_RECORD)
        columns: list[npt.NDArray[Any]] = [
            np.concatenate([known, added[name]]).astype(np.uint32, copy=False)
            for known, name in zip(self, _COLUMNS, strict=True)
        ]
        order = np.argsort(columns[0], kind="stable")
        heads = columns[0][order]
        same_head = heads[1:] == heads[:-1]
        if same_head.any():
            # Only rows that share their head need the slow sort that puts equal rows next to each other.
            shared = np.zeros(len(order), dtype=bool)
            shared[1:] |= same_head
            shared[:-1] |= same_head
            rows = order[shared]
            order[shared] = rows[np.lexsort([column[rows] for column in reversed(columns)])]
        columns = [column[order] for column in columns]
        if same_head.any():
            repeated = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
            kept = np.concatenate([[True], ~repeated])
            columns = [column[kept] for column in columns]
        return _Table(*columns)

    def record(self, row: int) -> bytes:
        """What `record_for` gave for the text of this row."""
        return np.array([column[row] for column in self], dtype="<u4").tobytes()


_EMPTY = _Table(*(np.empty(0, np.uint32) for _ in _COLUMNS))


class _Heads(NamedTuple):
    """Where heads of known texts stand in a prompt.

    codes: [characters]. windows: [characters - 31] fingerprints. starts: [heads], ascending; the texts that begin so
    are rows first_rows .. first_rows + counts - 1 of the table.
    """

    table: _Table
    codes: _U32
    windows: _U32
    starts: _I64
    first_rows: _I64
    counts: _I64


class ChunkIndex:
    """Known chunk texts by content. `add`, `find` and `split` may be called from any thread at any time.

    Memory: 16 bytes a text. Adding is cheap: records wait until the next `find` and are merged in together then.
    """

    def __init__(self, records: Iterable[bytes] = ()) -> None:
        self._lock = threading.Lock()
        self._table = _EMPTY
        self._pending = bytearray()
        self.add(records)

    def add(self, records: Iterable[bytes]) -> None:
        """Make texts known by the records that `record_for` gave. Known ones are ignored.

        Raises:
            InvalidSettingError: a record has another size; then none of these records is added.
        """
        added = bytearray()
        for record in records:
            if len(record) != RECORD_BYTES:
                raise InvalidSettingError(f"an index record has {RECORD_BYTES} bytes, this one {len(record)}")
            added += record
        with self._lock:
            self._pending += added
            waiting = len(self._pending)
        if waiting > _PENDING_BYTES:
            self._merged()

    def __len__(self) -> int:
        """How many different texts are known."""
        return len(self._merged().heads)

    @property
    def n_bytes(self) -> int:
        """RAM that the records take."""
        return sum(column.nbytes for column in self._merged())

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where known texts stand in the text: half-open (start, stop) character ranges in order, never overlapping.

        Leftmost first, then longest. Texts under 32 characters are not found. If so many known texts nearly match that
        looking further would take unreasonably long, a warning is logged and the rest of the text goes unsearched.
        """
        heads = self._heads(text)
        return [] if heads is None else _whole(heads)

    def split(self, text: str, texts_of: TextsOf | None = None) -> list[str | Chunk]:
        """The text cut at known chunks; the texts of the parts, put together, are the text.

        Args:
            texts_of: asked for texts of which only the head was found, so that their beginnings, of MIN_CUT_CHARS at
                least, become CutChunks. Without it, cut texts are not looked for.
        """
        heads = self._heads(text)
        if heads is None:
            return [text] if text else []
        whole = _whole(heads)
        found: list[tuple[int, Chunk]] = [(start, Chunk(text[start:stop])) for start, stop in whole]
        if texts_of is not None:
            found = sorted([*found, *_cut(heads, text, whole, texts_of)], key=lambda at: at[0])
        parts: list[str | Chunk] = []
        done = 0
        for start, chunk in found:
            if start > done:
                parts.append(text[done:start])
            parts.append(chunk)
            done = start + len(chunk.text)
        if done < len(text):
            parts.append(text[done:])
        return parts

    def _heads(self, text: str) -> _Heads | None:
        """None where no head of a known text stands anywhere."""
        if len(text) < MIN_INDEXED_CHARS:
            return None
        table = self._merged()
        if not len(table.heads):
            return None
        codes = _codes(text)
        windows = _window_fingerprints(codes)
        first_rows = np.searchsorted(table.heads, windows)
        starts = np.flatnonzero(table.heads[np.minimum(first_rows, len(table.heads) - 1)] == windows)
        if not len(starts):
            return None
        first_rows = first_rows[starts]
        counts = np.searchsorted(table.heads, windows[starts], side="right") - first_rows
        return _Heads(table, codes, windows, starts, first_rows, counts)

    def _merged(self) -> _Table:
        with self._lock:
            if self._pending:
                self._table = self._table.merged(bytes(self._pending))
                self._pending = bytearray()
            return self._table


def _whole(heads: _Heads) -> list[tuple[int, int]]:
    """See ChunkIndex.find."""
    found: list[tuple[int, int]] = []
    starts, counts = heads.starts, heads.counts
    raw = memoryview(heads.codes.tobytes())
    pairs_left, chars_left = _PAIR_BUDGET, _DIGEST_BUDGET_CHARS
    free_from = 0  # characters before this one belong to a match already
    at = searched = 0
    while (at := max(at, int(np.searchsorted(starts, free_from)))) < len(starts):
        # As many candidates as fit a block, but one at least.
        until = at + max(1, int(np.searchsorted(np.cumsum(counts[at : at + _PAIR_BLOCK]), _PAIR_BLOCK)))
        searched = int(starts[at])
        pairs_left -= int(counts[at:until].sum())
        if pairs_left < 0:
            break
        for start, stop, digests in _plausible(heads, slice(at, until)):
            searched = start
            if start < free_from:
                continue
            chars_left -= stop - start + _DIGEST_OVERHEAD_CHARS
            if chars_left < 0:
                break
            if (digests == _digest(raw[4 * start : 4 * stop])).any():
                found.append((start, stop))
                free_from = stop
        if chars_left < 0:
            break
        at = until
    if pairs_left < 0 or chars_left < 0:
        _log.warning(
            "too many known chunks begin and end like parts of this prompt: searched up to character %d of %d",
            searched,
            len(heads.codes),
        )
    return found


def _cut(
    heads: _Heads, text: str, whole: Sequence[tuple[int, int]], texts_of: TextsOf
) -> Iterator[tuple[int, CutChunk]]:
    """(start, beginning) of known texts that are cut, by start; leftmost first, then longest, none inside a whole one.

    Only the first so many heads are looked at: beginnings that are left uncut are slow, and never wrong.
    """
    upcoming = iter([*whole, (len(text), len(text))])
    taken, border = 0, next(upcoming)  # of the whole texts: where the last one stops, and the next one
    candidates: list[tuple[int, int, list[bytes]]] = []  # start, where the next whole text begins, records
    records_at: dict[int, list[bytes]] = {}  # by first row
    left = _CUT_TEXTS
    for start, first, count in zip(*(column.tolist() for column in heads[3:]), strict=True):
        while start >= border[0]:
            taken, border = border[1], next(upcoming)
        if start < taken or border[0] - start < MIN_CUT_CHARS:
            continue
        if first not in records_at:
            rows = range(first, first + min(count, _CUT_TEXTS_OF_HEAD, left))
            records_at[first] = [heads.table.record(row) for row in rows]
            left -= len(rows)
        candidates.append((start, border[0], records_at[first]))
        if len(candidates) == _CUT_PLACES:
            break
    if not candidates:
        return
    texts = texts_of([record for records in records_at.values() for record in records])
    free_from = 0
    for start, limit, records in candidates:
        known = [texts[record] for record in records if record in texts]
        if start < free_from or not known:
            continue
        agreed, best = max(((_agreement(text, start, limit, one), one) for one in known), key=lambda one: one[0])
        stop = _word_border(text, start, start + agreed)
        if stop - start >= MIN_CUT_CHARS and stop - start < len(best):
            yield start, CutChunk(text[start:stop], best)
            free_from = stop


def _agreement(text: str, start: int, limit: int, known: str) -> int:
    """How many characters of `known` stand at text[start:limit], from its first one on."""
    low, high = 0, min(limit - start, len(known))
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(known[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low


def _word_border(text: str, start: int, stop: int) -> int:
    """`stop`, or the end of the last whole word before it: tokens seldom run over that."""
    at = stop
    while start < at < len(text) and stop - at <= _WORD_CHARS and text[at - 1].isalnum() and text[at].isalnum():
        at -= 1
    if stop - at > _WORD_CHARS:
        at = stop
    return start + len(text[start:at].rstrip())


def _plausible(heads: _Heads, some: slice) -> Iterator[tuple[int, int, _U32]]:
    """(start, stop, [texts] digests) of known texts that begin and end as the prompt does; by start, longest first."""
    table, windows, counts = heads.table, heads.windows, heads.counts[some]
    starts = np.repeat(heads.starts[some], counts)
    rows = np.arange(len(starts)) + np.repeat(heads.first_rows[some] - np.cumsum(counts) + counts, counts)
    stops = starts + table.lengths[rows]
    last_window = len(windows) - 1
    tail_at = stops - MIN_INDEXED_CHARS
    fits = tail_at <= last_window
    fits &= windows[np.minimum(tail_at, last_window)] == table.tails[rows]
    starts, stops, digests = starts[fits], stops[fits], table.digests[rows[fits]]
    order = np.lexsort((-stops, starts))
    starts, stops, digests = starts[order], stops[order], digests[order]
    # Texts of one length behind one head share a place: one digest of the prompt answers for all of them.
    borders = np.flatnonzero((starts[1:] != starts[:-1]) | (stops[1:] != stops[:-1])) + 1
    for low, high in pairwise([0, *borders.tolist(), len(starts)]):
        if low < high:
            yield int(starts[low]), int(stops[low]), digests[low:high]


def _codes(text: str) -> _U32:
    """[characters], one code point each. Lone surrogates are let through: a prompt may hold anything."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _digest(utf32: bytes | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(utf32, seed=RECORD_VERSION)) & 0xFFFFFFFF


def _window_fingerprints(codes: _U32) -> _U32:
    """[characters] -> [characters - 31]: a fingerprint of each run of 32 characters, arithmetic modulo 2**64; of
    the result, half the bits.

    Each step joins a window with the one right after it, so 5 steps make 32 characters. The fold in every step mixes
    high bits down; without it the low bits of a product would depend on the low bits of the characters alone.
    """
    hashes = (codes.astype(np.uint64) + np.uint64(1)) * _SPREAD
    hashes ^= hashes >> _FOLD
    for step, multiplier in zip((1, 2, 4, 8, 16), _MULTIPLIERS, strict=True):
        joined = hashes[:-step] * multiplier
        joined += hashes[step:]
        joined ^= joined >> _FOLD
        hashes = joined
    hashes *= _SPREAD
    hashes ^= hashes >> _FOLD
    return hashes.astype(np.uint32)
