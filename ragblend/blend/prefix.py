"""Prefix caching in RAM: in-context KV found again by what precedes it, and reused bit for bit.

A prompt is cut into blocks of ids. A block's hash covers its own ids and the hash of everything before it, so equal
hashes mean equal prefixes. The chain starts at a *root* that names what the KV is: exact KV has one root; blended KV,
an approximation, lives under another one for each way of making it, and can never be taken for exact.

Exact KV is shared block by block. Blended KV was made for one question, so it is only found by prompts that go on from
the whole of an earlier one, question included (the next turn of a chat, the same prompt again); another question behind
the same chunks is blended anew.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ragblend.model.cache import KVCache

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks kept together. keys[i], values[i]: [kv_heads, tokens, dim] of layer i, rotated.

    hashes: under which its blocks are found: each block's own, or for a whole prompt those of the blocks it may end at.
    """

    hashes: tuple[bytes, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    n_bytes: int


class PrefixCache:
    """Bounded, least recently used out first, and what others go on from after them. Thread-safe.

    limit_bytes: RAM for keys and values; 0 keeps nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()  # by a run's last hash
        self._where: dict[bytes, tuple[bytes, int]] = {}  # block hash -> (its run's last hash, block in the run)
        self._bytes = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values held."""
        return self._bytes

    def fetch(self, root: bytes, ids: Tensor, cache: KVCache) -> int:
        """Copy the longest held prefix of ids [tokens] into positions 0.. of `cache`; the number of tokens copied."""
        with self._lock:
            pieces: list[tuple[_Run, int, int]] = []  # run, first block, one past the last
            held = self._held(_chain(root, ids))
            for name, block in held:
                if pieces and pieces[-1][0] is self._runs[name] and pieces[-1][2] == block:
                    pieces[-1] = (pieces[-1][0], pieces[-1][1], block + 1)
                else:
                    pieces.append((self._runs[name], block, block + 1))
            self._touch(name for name, _ in held)
        position = 0
        for run, start, stop in pieces:
            tokens = slice(start * BLOCK_TOKENS, stop * BLOCK_TOKENS)
            position = _copy(run, tokens, cache, position)
        return position

    def keep(self, root: bytes, ids: Tensor, cache: KVCache) -> None:
        """Hold the KV of ids [tokens], which is in positions 0.. of `cache`, under this root. Full blocks only.

        Of more than the limit allows, the beginning is held.
        """
        chain = _chain(root, ids)[: self._limit // _kv_bytes(cache, BLOCK_TOKENS)]
        with self._lock:
            held = self._held(chain)
            # What is behind a block that has gone is found no more.
            for name in {self._where[h][0] for h in chain[len(held) :] if h in self._where}:
                self._forget(name)
        where = {block_hash: block for block, block_hash in enumerate(chain[len(held) :])}
        before = dict.fromkeys(name for name, _ in held)
        self._add(where, slice(len(held) * BLOCK_TOKENS, len(chain) * BLOCK_TOKENS), cache, before)

    def fetch_whole(self, root: bytes, ids: Tensor, cache: KVCache, longer_than: int) -> int:
        """Like `fetch`, for prompts kept by `keep_whole`; 0 unless one of more than `longer_than` tokens is found.

        So many tokens are there already, from `fetch`, and stay: they are exact, and may be kept as such once more.
        """
        chain = _chain(root, ids)
        with self._lock:
            blocks = next((n for n in range(len(chain), 0, -1) if chain[n - 1] in self._where), 0)
            if blocks * BLOCK_TOKENS <= longer_than:
                return 0
            name, _ = self._where[chain[blocks - 1]]
            run = self._runs[name]
            self._runs.move_to_end(name)
        return _copy(run, slice(longer_than, blocks * BLOCK_TOKENS), cache, longer_than)

    def keep_whole(self, root: bytes, ids: Tensor, cache: KVCache, *ends: int) -> None:
        """Hold the KV of a whole prompt, ids [tokens], to be found only by prompts that begin with all of it.

        A prompt that was kept before and that this one goes on from becomes part of it: a conversation is held once.

        One that is too long to be held leaves what was kept before as it is.

        ends: numbers of leading tokens that are a whole prompt, too.
        """
        chain = _chain(root, ids)
        if not chain or _kv_bytes(cache, len(chain) * BLOCK_TOKENS) > self._limit:
            return
        blocks = {tokens // BLOCK_TOKENS for tokens in ends} | {len(chain)}
        with self._lock:
            if chain[-1] in self._where:
                return
            held = {block_hash: self._where[block_hash] for block_hash in chain if block_hash in self._where}
            for name in {name for name, _ in held.values()} & set(chain):
                blocks |= {block + 1 for of, block in held.values() if of == name}
                self._forget(name)
            where = {chain[n - 1]: n - 1 for n in sorted(blocks - {0}) if chain[n - 1] not in self._where}
        self._add(where, slice(0, len(chain) * BLOCK_TOKENS), cache)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._runs.clear()
            self._where.clear()
            self._bytes = 0

    def _add(self, where: Mapping[bytes, int], at: slice, cache: KVCache, before: Collection[bytes] = ()) -> None:
        """Hold tokens `at` of the cache as one run.

        Args:
            where: hash -> block in the run, ascending.
            before: the runs that it goes on from, in order. Without them it would never be found.
        """
        n_bytes = _kv_bytes(cache, at.stop - at.start)
        with self._lock:
            taken = sum(self._runs[name].n_bytes for name in before if name in self._runs)
        if not where or n_bytes + taken > self._limit:
            return
        keys = tuple(layer[0, :, at].clone() for layer in cache.keys)
        values = tuple(layer[0, :, at].clone() for layer in cache.values)
        hashes = tuple(where)
        with self._lock:
            if any(h in self._where for h in hashes) or any(name not in self._runs for name in before):
                return  # another thread was faster
            self._touch(before)
            while self._bytes + n_bytes > self._limit:
                self._forget(next(iter(self._runs)))
            self._runs[hashes[-1]] = _Run(hashes, keys, values, n_bytes)
            self._where.update((h, (hashes[-1], block)) for h, block in where.items())
            self._bytes += n_bytes
            self._touch(before)

    def _touch(self, names: Iterable[bytes]) -> None:
        """Runs, in order, that go on from each other are wanted: what others go on from is forgotten after them."""
        for name in reversed(dict.fromkeys(names)):
            self._runs.move_to_end(name)

    def _forget(self, name: bytes) -> None:
        run = self._runs.pop(name)
        self._bytes -= run.n_bytes
        for h in run.hashes:
            del self._where[h]

    def _held(self, chain: list[bytes]) -> list[tuple[bytes, int]]:
        held = []
        for block in chain:
            where = self._where.get(block)
            if where is None:
                break
            held.append(where)
        return held


def _kv_bytes(cache: KVCache, tokens: int) -> int:
    """Of so many tokens, over all layers."""
    return tokens * sum(t.shape[1] * t.shape[3] * t.element_size() for t in (*cache.keys, *cache.values))


def _copy(run: _Run, tokens: slice, cache: KVCache, position: int) -> int:
    """Put these tokens of a run at `position`; where they end."""
    stop = position + int(tokens.stop - tokens.start)
    for layer, (key, value) in enumerate(zip(run.keys, run.values, strict=True)):
        cache.write(layer, slice(position, stop), key[:, tokens], value[:, tokens])
    return stop


def _chain(root: bytes, ids: Tensor) -> list[bytes]:
    """The hash of each full block of ids [tokens]."""
    raw = ids.contiguous().numpy().astype("<i8").tobytes()
    step = BLOCK_TOKENS * 8
    chain = []
    parent = root
    for start in range(0, len(raw) - step + 1, step):
        parent = hashlib.blake2b(parent + raw[start : start + step], digest_size=16).digest()
        chain.append(parent)
    return chain
