"""Prefix caching in RAM: in-context KV found again by what precedes it, and reused bit for bit.

A prompt is cut into blocks of ids. A block's hash covers its own ids and the hash of everything before it, so equal
hashes mean equal prefixes. The chain starts at a *root* that names what the KV is: exact KV has one root; blended KV,
an approximation, lives under another one for each way of making it, and can never be taken for exact.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from ragblend.model.decoder import KVCache

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks that were kept together. keys[i], values[i]: [kv_heads, tokens, dim] of layer i, rotated."""

    hashes: tuple[bytes, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    n_bytes: int


class PrefixCache:
    """Bounded, least recently used out first. Thread-safe.

    limit_bytes: RAM for keys and values; 0 keeps nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()  # by a run's first hash
        self._where: dict[bytes, tuple[bytes, int]] = {}  # block hash -> (its run's first hash, block in the run)
        self._bytes = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values held."""
        return self._bytes

    def find(self, root: bytes, ids: Tensor) -> int:
        """How many leading tokens of ids [tokens] are held under this root."""
        with self._lock:
            return len(self._held(_chain(root, ids))) * BLOCK_TOKENS

    def fetch(self, root: bytes, ids: Tensor, cache: KVCache) -> int:
        """Copy the longest held prefix of `ids` into positions 0.. of `cache`; the number of tokens copied."""
        with self._lock:
            held = self._held(_chain(root, ids))
            pieces: list[tuple[_Run, int, int]] = []  # run, first block, one past the last
            for first, block in held:
                if pieces and pieces[-1][0].hashes[0] == first and pieces[-1][2] == block:
                    pieces[-1] = (pieces[-1][0], pieces[-1][1], block + 1)
                else:
                    pieces.append((self._runs[first], block, block + 1))
                self._runs.move_to_end(first)
        position = 0
        for run, start, stop in pieces:
            tokens = slice(start * BLOCK_TOKENS, stop * BLOCK_TOKENS)
            at = slice(position, position + tokens.stop - tokens.start)
            for layer, (key, value) in enumerate(zip(run.keys, run.values, strict=True)):
                cache.write(layer, at, key[:, tokens], value[:, tokens])
            position = at.stop
        return position

    def keep(self, root: bytes, ids: Tensor, cache: KVCache) -> None:
        """Hold the KV of ids [tokens], which is in positions 0.. of `cache`, under this root. Whole blocks only."""
        chain = _chain(root, ids)
        with self._lock:
            new = len(self._held(chain))
        hashes = tuple(chain[new:])
        at = slice(new * BLOCK_TOKENS, len(chain) * BLOCK_TOKENS)
        row_bytes = sum(t.shape[1] * t.shape[3] * t.element_size() for t in (*cache.keys, *cache.values))
        n_bytes = row_bytes * len(hashes) * BLOCK_TOKENS
        if not hashes or n_bytes > self._limit:
            return
        keys = tuple(layer[0, :, at].clone() for layer in cache.keys)
        values = tuple(layer[0, :, at].clone() for layer in cache.values)
        with self._lock:
            if any(h in self._where for h in hashes):  # another thread was faster
                return
            while self._bytes + n_bytes > self._limit:
                _, oldest = self._runs.popitem(last=False)
                self._bytes -= oldest.n_bytes
                for h in oldest.hashes:
                    del self._where[h]
            self._runs[hashes[0]] = _Run(hashes, keys, values, n_bytes)
            self._where.update((h, (hashes[0], i)) for i, h in enumerate(hashes))
            self._bytes += n_bytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._runs.clear()
            self._where.clear()
            self._bytes = 0

    def _held(self, chain: list[bytes]) -> list[tuple[bytes, int]]:
        held = []
        for block in chain:
            where = self._where.get(block)
            if where is None:
                break
            held.append(where)
        return held


def _chain(root: bytes, ids: Tensor) -> list[bytes]:
    raw = ids.contiguous().numpy().astype("<i8").tobytes()
    step = BLOCK_TOKENS * 8
    chain = []
    parent = root
    for start in range(0, len(raw) - step + 1, step):
        parent = hashlib.blake2b(parent + raw[start : start + step], digest_size=16).digest()
        chain.append(parent)
    return chain
