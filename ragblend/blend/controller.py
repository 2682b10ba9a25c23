"""The loading controller: how much can be recomputed for free (arXiv 2405.16444, section 5.1).

While layer i computes, layer i + 1 is read from the store. If reading is the slower of the two, recomputing more
tokens costs no time: the largest ratio whose compute hides behind loading is chosen, and never less than the floor
that quality needs.
"""

from __future__ import annotations

import threading

_MEMORY = 0.7  # how much of a rate the past keeps when a new measurement comes in


class LoadingController:
    """Keeps measured load and compute rates and turns them into a recompute ratio. Thread-safe.

    floor: the least that is recomputed; 0.15 in the paper.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._lock = threading.Lock()
        self._load_s_per_byte: float | None = None
        self._compute_s_per_row_layer: float | None = None

    def observe(self, *, bytes_read: int, load_s: float, row_layers: int, compute_s: float) -> None:
        """Take in what one pass measured. compute_s: without time spent waiting for the store."""
        with self._lock:
            if bytes_read:
                self._load_s_per_byte = _blend(self._load_s_per_byte, load_s / bytes_read)
            if row_layers:
                self._compute_s_per_row_layer = _blend(self._compute_s_per_row_layer, compute_s / row_layers)

    def ratio(self, *, reused_tokens: int, reused_bytes: int, fresh_tokens: int, n_layers: int) -> float:
        """The largest ratio whose compute hides behind reading `reused_bytes`, floor..1; the floor until measured."""
        with self._lock:
            if not reused_tokens or self._load_s_per_byte is None or not self._compute_s_per_row_layer:
                return self.floor
            load_s = self._load_s_per_byte * reused_bytes
            hidden_rows = load_s / (self._compute_s_per_row_layer * n_layers) - fresh_tokens
        return min(1.0, max(self.floor, hidden_rows / reused_tokens))


def _blend(past: float | None, now: float) -> float:
    return now if past is None else _MEMORY * past + (1 - _MEMORY) * now
