"""Layers of several chunks streamed into memory while the layer before is being computed.

    thread     | read 0 | read 1 |  wait  | read 2 |  wait  | read 3 | ...
    consumer   |  stall | compute 0       | compute 1       | compute 2
    buffers        A        B                 A                 B

Two buffer sets are reused throughout, so memory is bounded by two layers, whatever the model's depth. On CUDA each set
is a pinned host buffer and a device buffer, and the copy between them runs on a stream of its own: nobody waits for
it on the CPU, the consumer's stream waits for it on the device.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ragblend.errors import CorruptPayloadError, RagBlendError
from ragblend.kv import LayerKV, LayerShape
from ragblend.store.payload import PayloadReader, Target

PREFETCH_BYTES = 256 << 20
"""What one prefetch reads at most; more than the page cache spares would only drive out what came first."""

_PREFETCHES = 4  # at work and waiting; a hint that comes late is none
_READAHEAD_BYTES = 128 << 10  # Linux cuts a longer request off at the device's own limit, without a word

_log = logging.getLogger(__name__)


class _Buffers:
    """One of the two buffer sets: flat, so that layers of different shapes fit. On CPU, device is host.

    targets: by layer shape, where each payload's part goes; made and used by the thread only.
    """

    def __init__(self, key_numel: int, value_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.host = tuple(torch.empty(numel, dtype=dtype, pin_memory=cuda) for numel in (key_numel, value_numel))
        self.device = tuple(torch.empty_like(part, device=device) for part in self.host) if cuda else self.host
        self.copied = torch.cuda.Event() if cuda else None
        self.consumed = torch.cuda.Event() if cuda else None
        self.targets: dict[LayerShape, list[Target | LayerKV]] = {}

    def views(self, where: tuple[Tensor, ...], shape: LayerShape, n_tokens: int) -> LayerKV:
        """The front of the buffers as key [kv_heads, tokens, key_dim] and value [kv_heads, tokens, value_dim]."""
        parts = []
        for flat, dim in zip(where, (shape.key_dim, shape.value_dim), strict=True):
            size = (shape.kv_heads, n_tokens, dim)
            parts.append(flat[: size[0] * size[1] * size[2]].view(size))
        return LayerKV(*parts)


class LayerLoader:
    """Streams the layers of several payloads, concatenated along tokens in reader order.

        with LayerLoader(readers, device=device, dtype=dtype) as loader:
            for index in range(n_layers):
                key, value = loader.layer(index)

    For one consumer thread. The same reader may appear several times. Readers stay the caller's: they must be open
    until the context is left, and are not closed by it. Leaving the context at any time stops and joins the thread and
    lets go of the buffers.

    Attributes:
        n_layers: layers to come; 0 without readers.
        n_tokens: tokens that are wanted of all readers together.
        load_s: seconds the thread spent reading, verifying and converting.
        stall_s: seconds layer() waited for the thread.
        bytes_read: tensor bytes read from payloads.
    """

    def __init__(
        self,
        readers: Sequence[PayloadReader],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            readers: open payloads of one model; a repeated chunk is its reader repeated.
            device: where the layers are wanted: CPU or CUDA.
            dtype: dtype they are wanted in; payloads of another dtype are converted by the thread.
            tokens: how many of each payload's tokens are wanted, from its first one on; None: all of them. Whole
                payloads are read all the same, since checksums are of the whole.

        Raises:
            CorruptPayloadError: a payload's layers have other shapes than the first one's. Check the first against
                the model (PayloadReader.shapes) to know which is foreign.
            ValueError: a device of another kind, or more tokens than a payload has.
        """
        self._device = torch.device(device)
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"layers can be loaded to cpu or cuda, not to {self._device.type}")
        if self._device.type == "cuda" and self._device.index is None:
            # The thread has a current device of its own, which need not be the caller's.
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._readers = tuple(readers)
        self._dtype = dtype
        self._shapes = self._readers[0].shapes if self._readers else ()
        for reader in self._readers:
            if reader.shapes != self._shapes:
                raise CorruptPayloadError(reader.key, "its layers have other shapes than the first payload's")
        self._tokens = tuple(reader.n_tokens for reader in readers) if tokens is None else tuple(tokens)
        for reader, wanted in zip(self._readers, self._tokens, strict=True):
            if not 0 < wanted <= reader.n_tokens:
                raise ValueError(f"{wanted} tokens are wanted of a payload of {reader.n_tokens}")
        self.n_layers = len(self._shapes)
        self.n_tokens = sum(self._tokens)
        self.load_s = 0.0
        self.stall_s = 0.0
        self.bytes_read = 0
        self._next = 0
        self._error: BaseException | None = None
        self._held: _Buffers | None = None
        self._stop = threading.Event()
        self._free: queue.SimpleQueue[_Buffers | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Buffers | BaseException] = queue.SimpleQueue()
        self._copies: torch.cuda.Stream | None = None  # for copies from host to device
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._thread is not None or self._stop.is_set():
            raise RuntimeError("a LayerLoader can be entered once: make another one")
        if not self._readers:
            return self
        numels = [
            (shape.kv_heads * self.n_tokens * shape.key_dim, shape.kv_heads * self.n_tokens * shape.value_dim)
            for shape in self._shapes
        ]
        key_numel, value_numel = (max(column) for column in zip(*numels, strict=True))
        if self._device.type == "cuda":
            self._copies = torch.cuda.Stream(self._device)
        for _ in range(min(2, self.n_layers)):
            buffers = _Buffers(key_numel, value_numel, self._dtype, self._device)
            # The allocator may hand out memory the consumer's stream is still using: copies start behind that.
            self._record_consumed(buffers)
            self._free.put(buffers)
        # Daemon only so that a consumer that never leaves the context cannot hang the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name="ragblend-loader", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layer(self, index: int) -> LayerKV:
        """Layer `index`: key [kv_heads, n_tokens, key_dim] unrotated, value [kv_heads, n_tokens, value_dim].

        Call it for 0, 1, 2, ... in this order. The tensors are reused: they are valid until the next call. On CUDA
        they are valid on the stream that is current during the call, and so is the work that uses them.

        Raises:
            CorruptPayloadError: a payload turned out to be damaged in this layer; every later call raises it too.
            RuntimeError: called out of order, or outside the context.
        """
        if self._error is not None:
            raise self._error
        if self._thread is None or self._stop.is_set():
            raise RuntimeError("layers can be read inside the loader's context only")
        if index != self._next or index >= self.n_layers:
            raise RuntimeError(f"layer {index} was asked for, but layer {self._next} of {self.n_layers} comes next")
        if self._held is not None:
            self._record_consumed(self._held)
            self._free.put(self._held)
            self._held = None
        try:
            loaded = self._ready.get_nowait()
        except queue.Empty:
            if self._copies is not None:  # while the device computes what it was given before, nothing stalls
                torch.cuda.current_stream(self._device).synchronize()
            began = time.perf_counter()
            loaded = self._ready.get()
            self.stall_s += time.perf_counter() - began
        if isinstance(loaded, BaseException):
            self._error = loaded
            raise loaded
        self._held = loaded
        self._next += 1
        if loaded.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(loaded.copied)
        return loaded.views(loaded.device, self._shapes[index], self.n_tokens)

    def close(self) -> None:
        """Stop and join the thread and let go of the buffers. Tensors handed out stay valid. Idempotent."""
        self._stop.set()
        self._free.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._copies is not None:
            # A copy under way writes into memory that is about to go back to the allocator.
            self._copies.synchronize()
            self._copies = None
        self._held = None
        for waiting in (self._free, self._ready):
            while not waiting.empty():
                waiting.get_nowait()

    def _record_consumed(self, buffers: _Buffers) -> None:
        """From here on in the current stream, the device buffers may be overwritten."""
        if buffers.consumed is not None:
            buffers.consumed.record(torch.cuda.current_stream(self._device))

    @torch.inference_mode()  # as a consumer may be, whose buffers then are of this kind
    def _run(self) -> None:
        try:
            self._load_all()
        except BaseException as error:
            # The consumer may keep the error for long; its frames must not keep the buffers.
            for link in (error, error.__cause__):
                if link is not None:
                    traceback.clear_frames(link.__traceback__)
            self._ready.put(error)

    def _load_all(self) -> None:
        for index in range(self.n_layers):
            buffers = self._free.get()
            if buffers is None or self._stop.is_set():
                return
            if buffers.copied is not None:
                buffers.copied.synchronize()  # the pinned buffer is still the source of the copy before
            began = time.perf_counter()
            complete = self._fill(buffers, index)
            self.load_s += time.perf_counter() - began
            if not complete:
                return
            self._send(buffers, index)
            self._ready.put(buffers)

    def _fill(self, buffers: _Buffers, index: int) -> bool:
        """Read one layer of every payload into the host buffers; False where the loader was closed meanwhile."""
        for reader, target in zip(self._readers, self._targets(buffers, index), strict=True):
            if self._stop.is_set():
                return False
            if isinstance(target, Target):
                self.bytes_read += reader.read_layer(index, target)
                continue
            stored = reader.read_layer_kv(index)
            for part, wanted in zip(stored, target, strict=True):
                wanted.copy_(part[:, : wanted.shape[1]])
                self.bytes_read += part.nbytes
        return True

    def _targets(self, buffers: _Buffers, index: int) -> list[Target | LayerKV]:
        """Where each payload's part of a layer goes. A LayerKV is for those that cannot be read there as they are."""
        shape = self._shapes[index]
        if shape not in buffers.targets:
            whole = buffers.views(buffers.host, shape, self.n_tokens)
            targets: list[Target | LayerKV] = []
            start = 0
            for reader, tokens in zip(self._readers, self._tokens, strict=True):
                stop = start + tokens
                part = LayerKV(whole.key[:, start:stop], whole.value[:, start:stop])
                as_it_is = reader.dtype == self._dtype and tokens == reader.n_tokens
                targets.append(reader.target(index, *part) if as_it_is else part)
                start = stop
            buffers.targets[shape] = targets
        return buffers.targets[shape]

    def _send(self, buffers: _Buffers, index: int) -> None:
        """On CUDA, queue the copy to the device behind the last use of the device buffers."""
        if self._copies is None or buffers.copied is None or buffers.consumed is None:
            return
        shape = self._shapes[index]
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(buffers.consumed)
            wanted = buffers.views(buffers.device, shape, self.n_tokens)
            for target, source in zip(wanted, buffers.views(buffers.host, shape, self.n_tokens), strict=True):
                target.copy_(source, non_blocking=True)
            buffers.copied.record(self._copies)


class Prefetcher:
    """Has files read into the system's page cache before they are needed, from a thread of its own. Thread-safe.

    A hint and nothing more: it makes nobody wait, and whatever goes wrong is logged and forgotten.
    """

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_PREFETCHES)
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragblend-prefetch")  # starts with the first hint

    def start(self, find: Callable[[], Iterable[Path]]) -> Future[int]:
        """Read the files that `find`, called in the thread, names; until they are more than PREFETCH_BYTES.

        Returns:
            how many bytes were asked for, in the end; 0 where too many others are waiting, or this is closed.
        """
        nothing: Future[int] = Future()
        nothing.set_result(0)
        if self._closed.is_set() or not self._free.acquire(blocking=False):
            return nothing
        try:
            started = self._thread.submit(self._run, find)
        except RuntimeError:  # closed in between, or the interpreter is on its way out
            self._free.release()
            return nothing
        started.add_done_callback(lambda _: self._free.release())
        return started

    def close(self) -> None:
        """Stop as soon as possible, and wait until it has. Idempotent."""
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, find: Callable[[], Iterable[Path]]) -> int:
        done = 0
        try:
            for path in find():
                with open(path, "rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    if done + size > PREFETCH_BYTES:
                        break
                    for start in range(0, size, _READAHEAD_BYTES):
                        if self._closed.is_set():
                            return done
                        if hasattr(os, "posix_fadvise"):
                            os.posix_fadvise(file.fileno(), start, _READAHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                        else:
                            file.read(_READAHEAD_BYTES)
                done += size
        except (RagBlendError, OSError) as error:
            _log.warning("chunks were not read ahead: %s", error)
        except Exception:
            _log.exception("chunks were not read ahead")
        return done
