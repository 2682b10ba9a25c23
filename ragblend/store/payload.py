"""One chunk's KV as one safetensors payload.

Layout: tensors `000.key, 000.value, 001.key, ...`. Names are in layer order, and so is the file: a layer's key and
value are neighbours, one read a layer, and the whole file is read front to back.

The header's only metadata entry is a small JSON text: format version, key, token count, and checksums. There is one
checksum a tensor, so that a layer is verified when it alone is read, and one seal over everything the header says, so
that a damaged header, or a payload found under another chunk's key, is never believed. One metadata entry, because
equal tensors must give equal bytes and the order of several would be anybody's choice.

The bytes are those that safetensors would write. It is not asked to, since it first makes one bytes object of them,
and fresh memory for that takes longer than writing: a payload is written piece by piece from where the tensors lie, and
read to where they are wanted.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

import torch
import xxhash
from torch import Tensor

from ragblend.errors import CorruptPayloadError, InvalidSettingError
from ragblend.kv import ChunkKV, LayerKV, LayerShape
from ragblend.store import FORMAT_VERSION

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA_ENTRY = "__metadata__"  # safetensors' own name for it
_METADATA = "ragblend"
_ALIGNMENT = 8  # of a safetensors header's end
_DIGEST_BYTES = 16
_MAX_HEADER_BYTES = 4 << 20  # ~200 B a layer are needed; more is a damaged length, and must not become an allocation
_KEPT_HEADERS, _KEPT_HEADER_BYTES = 256, 64 << 10  # 3 MB as a rule, 16 MiB at most
_MAX_IOVECS = 1024  # Linux and macOS refuse longer scatter lists

_T = TypeVar("_T")


class _Header(NamedTuple):
    n_tokens: int
    dtype: torch.dtype
    shapes: tuple[LayerShape, ...]
    digests: tuple[bytes, ...]  # key, value, key, value, ... in file order


class Target(NamedTuple):
    """Memory that layers of one shape, dtype and token count are read into, as byte arrays in the file's order."""

    fits: tuple[LayerShape, torch.dtype, int]
    key: list[memoryview]
    value: list[memoryview]


class _DamagedError(Exception):
    """Why a header cannot be believed; becomes CorruptPayloadError where the key is known."""


def encode(key: str, layers: ChunkKV) -> list[memoryview]:
    """The payload of one chunk, in pieces to be written one behind the other. Equal key and tensors give equal bytes.

    What is contiguous on the CPU is not copied: those tensors must stay as they are until the pieces are written.

    Args:
        key: the chunk key the payload is stored under; reading it under another key fails.
        layers: one LayerKV a layer: key [kv_heads, tokens, key_dim], value [kv_heads, tokens, value_dim], one float
            dtype (bf16, fp16 or fp32) and one token count throughout; heads and dims may differ between layers. Any
            device, any strides.

    Raises:
        InvalidSettingError: no layers, no tokens, or shapes and dtypes that do not fit together.
    """
    shapes, n_tokens, dtype = _check(layers)
    entries: dict[str, Any] = {_METADATA_ENTRY: {}}
    pieces: list[memoryview] = []
    digests: list[bytes] = []
    stop = 0
    for index, layer in enumerate(layers):
        for name, tensor in zip(_names(index, len(layers)), layer, strict=True):
            raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
            start, stop = stop, stop + raw.nbytes
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
            digests.append(xxhash.xxh3_128_digest(raw))
            pieces.append(raw)
    checks = _seal(key, _Header(n_tokens, dtype, shapes, tuple(digests))) + b"".join(digests)
    note = {"format": FORMAT_VERSION, "key": key, "tokens": n_tokens, "xxh3": base64.b64encode(checks).decode()}
    entries[_METADATA_ENTRY][_METADATA] = json.dumps(note, separators=(",", ":"))
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return [memoryview(len(header).to_bytes(8, "little") + header), *pieces]


class PayloadReader:
    """A stored chunk, open for reading layer by layer.

    It holds the open file, not its path: on POSIX systems an entry that is evicted or replaced meanwhile stays
    readable to the end. The header is parsed and checked once, on opening; each layer's bytes when they are read.
    Reading is safe from several threads; close() only once no other thread is reading.

    Attributes:
        key: the chunk key.
        n_tokens: tokens of the chunk.
        n_layers: layers of the chunk.
        dtype: dtype of every tensor.
        shapes: one LayerShape a layer.
        nbytes: size of the whole payload in bytes, header included.
    """

    def __init__(self, handle: BinaryIO, key: str) -> None:
        """Takes over `handle`, a real file open in binary mode, and closes it, also when this raises.

        Raises:
            CorruptPayloadError: the header is damaged, does not fit the file, or belongs to another key.
        """
        self.key = key
        self._close = weakref.finalize(self, handle.close)
        self._lock = threading.Lock()
        try:
            self._fd = handle.fileno()
            self.nbytes = os.fstat(self._fd).st_size
            header_bytes = int.from_bytes(self._read_head(0, 8), "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, self.nbytes - 8):
                raise _DamagedError(f"header length {header_bytes} in a file of {self.nbytes} bytes")
            start = 8 + header_bytes
            parse = _parse_kept if header_bytes <= _KEPT_HEADER_BYTES else _parse
            header = parse(self._read_head(8, header_bytes), key, self.nbytes - start)
        except _DamagedError as damage:
            self.close()
            raise CorruptPayloadError(key, str(damage)) from None
        except OSError as error:
            self.close()
            raise CorruptPayloadError(key, f"cannot be read: {error}") from error
        except BaseException:
            self.close()
            raise
        self.n_tokens, self.dtype, self.shapes, self._digests = header
        self.n_layers = len(self.shapes)
        self._offsets = []
        for shape in self.shapes:
            self._offsets.append(start)
            start += sum(_tensor_bytes(shape, self.n_tokens, self.dtype))

    def target(self, layer: int, key_out: Tensor, value_out: Tensor) -> Target:
        """The caller's memory, taken apart for `read_layer`: once for all layers of a shape, as it takes its time.

        Args:
            layer: 0..n_layers-1.
            key_out, value_out: CPU tensors [kv_heads, tokens, key_dim] and [kv_heads, tokens, value_dim] of this
                payload's dtype. Each head's [tokens, dim] must be contiguous; heads may lie apart, as the token
                range of a longer buffer does.

        Raises:
            IndexError: no such layer.
            ValueError: the tensors do not fit this layer.
        """
        shape = self._shape_of(layer)
        return Target(
            (shape, self.dtype, self.n_tokens),
            self._parts(key_out, shape.kv_heads, shape.key_dim),
            self._parts(value_out, shape.kv_heads, shape.value_dim),
        )

    def read_layer(self, layer: int, target: Target) -> int:
        """Read one layer straight into the caller's memory, verify it, and return the bytes read.

        Args:
            layer: 0..n_layers-1.
            target: from `target`, of this reader or another of its dtype and tokens, for a layer of this one's shape.

        Raises:
            CorruptPayloadError: the bytes are not the ones that were stored; the memory then holds garbage.
            IndexError: no such layer.
            ValueError: the target is for something else, or the reader is closed.
        """
        if not self._close.alive:
            raise ValueError(f"the reader of payload {self.key[:16]} is closed")
        shape = self._shape_of(layer)
        if target.fits != (fits := (shape, self.dtype, self.n_tokens)):
            raise ValueError(f"the target is for {target.fits}; layer {layer} is {fits}")
        size = sum(_tensor_bytes(shape, self.n_tokens, self.dtype))
        self._read_into([*target.key, *target.value], self._offsets[layer], size, layer)
        for parts, digest, name in (
            (target.key, self._digests[2 * layer], "key"),
            (target.value, self._digests[2 * layer + 1], "value"),
        ):
            if _digest(parts) != digest:
                raise CorruptPayloadError(self.key, f"checksum of layer {layer}'s {name} does not match")
        return size

    def read_layer_kv(self, layer: int) -> LayerKV:
        """One layer in tensors of its own; see read_layer, which says what is raised."""
        shape = self._shape_of(layer)
        key = torch.empty((shape.kv_heads, self.n_tokens, shape.key_dim), dtype=self.dtype)
        value = torch.empty((shape.kv_heads, self.n_tokens, shape.value_dim), dtype=self.dtype)
        self.read_layer(layer, self.target(layer, key, value))
        return LayerKV(key, value)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._close()

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"PayloadReader({self.key[:16]}, {self.n_tokens} tokens, {self.n_layers} layers{state})"

    def _shape_of(self, layer: int) -> LayerShape:
        if not 0 <= layer < self.n_layers:
            raise IndexError(f"layer {layer} of a payload of {self.n_layers} layers")
        return self.shapes[layer]

    def _parts(self, tensor: Tensor, kv_heads: int, dim: int) -> list[memoryview]:
        """The tensor's memory as byte arrays, in the order of the file's bytes."""
        expected = (kv_heads, self.n_tokens, dim)
        if tensor.shape != expected or tensor.dtype != self.dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"need a CPU tensor {list(expected)} of {self.dtype}, got {tensor.device} {list(tensor.shape)} of "
                f"{tensor.dtype}"
            )
        if not tensor[0].is_contiguous() or (kv_heads > 1 and tensor.stride(0) < self.n_tokens * dim):
            raise ValueError("each head's [tokens, dim] must be contiguous, and heads must not overlap")
        raw = tensor.detach().view(torch.uint8).numpy()
        if raw.flags.c_contiguous:
            return [raw.data]
        return [head.data for head in raw]

    def _read_head(self, offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        if (got := self._scatter([memoryview(buffer)], offset)) != size:
            raise _DamagedError(f"{got} bytes where {size} of header should be")
        return bytes(buffer)

    def _read_into(self, parts: Sequence[memoryview], offset: int, size: int, layer: int) -> None:
        try:
            got = self._scatter(parts, offset)
        except OSError as error:
            raise CorruptPayloadError(self.key, f"layer {layer} cannot be read: {error}") from error
        if got != size:
            raise CorruptPayloadError(self.key, f"layer {layer} ends after {got} of {size} bytes")

    def _scatter(self, parts: Sequence[memoryview], offset: int) -> int:
        """Fill the arrays in order from `offset`; bytes read, fewer than asked for only at the end of the file."""
        total = 0
        for first in range(0, len(parts), _MAX_IOVECS):
            some: Sequence[memoryview] = parts[first : first + _MAX_IOVECS]
            missing = sum(part.nbytes for part in some)
            while missing:
                got = self._read_some(some, offset + total)
                if not got:
                    return total
                total += got
                missing -= got
                if missing:  # a signal, or more than the system reads at once: go on behind what came
                    some = _behind(some, got)
        return total

    def _read_some(self, parts: Sequence[memoryview], offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, parts, offset)
        # Without positioned reads the file's one position is shared by all threads.
        with self._lock:
            os.lseek(self._fd, offset, os.SEEK_SET)
            data = os.read(self._fd, parts[0].nbytes)
        parts[0].cast("B")[: len(data)] = data
        return len(data)


def _behind(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for part in parts:
        if done >= part.nbytes:
            done -= part.nbytes
        else:
            rest.append(part.cast("B")[done:])
            done = 0
    return rest


def _digest(parts: Sequence[memoryview]) -> bytes:
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _names(layer: int, n_layers: int) -> tuple[str, str]:
    """What a layer's tensors are called: in the order of their names they are in the order of the layers."""
    width = max(3, len(str(n_layers - 1)))
    return f"{layer:0{width}d}.key", f"{layer:0{width}d}.value"


def _tensor_bytes(shape: LayerShape, n_tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of one layer's key and of its value."""
    per_dim = shape.kv_heads * n_tokens * dtype.itemsize
    return per_dim * shape.key_dim, per_dim * shape.value_dim


def _seal(key: str, header: _Header) -> bytes:
    said = (FORMAT_VERSION, key, header.n_tokens, _NAMES[header.dtype], header.shapes)
    return xxhash.xxh3_128_digest(json.dumps(said).encode() + b"".join(header.digests))


def _check(layers: ChunkKV) -> tuple[tuple[LayerShape, ...], int, torch.dtype]:
    if not layers:
        raise InvalidSettingError("a chunk's KV needs at least one layer: pass one LayerKV for each layer")
    dtype, n_tokens = layers[0].key.dtype, layers[0].key.shape[1] if layers[0].key.dim() == 3 else 0
    if dtype not in _NAMES:
        raise InvalidSettingError(f"KV of {dtype} cannot be stored: convert it to bfloat16, float16 or float32")
    shapes = []
    for index, (key, value) in enumerate(layers):
        if key.dtype != dtype or value.dtype != dtype:
            raise InvalidSettingError(f"layer {index} is {key.dtype}/{value.dtype}, layer 0 {dtype}: use one dtype")
        if key.dim() != 3 or value.dim() != 3 or key.shape[:2] != value.shape[:2]:
            raise InvalidSettingError(
                f"layer {index} has key {list(key.shape)} and value {list(value.shape)}: both must be "
                "[kv_heads, tokens, dim] with equal kv_heads and tokens"
            )
        if key.shape[1] != n_tokens or not key.numel() or not value.numel():
            raise InvalidSettingError(
                f"layer {index} has key {list(key.shape)} and value {list(value.shape)}: every layer must hold the "
                f"same tokens ({n_tokens} in layer 0), at least one, and no size may be 0"
            )
        shapes.append(LayerShape(key.shape[0], key.shape[2], value.shape[2]))
    return tuple(shapes), n_tokens, dtype


def _parse(text: bytes, key: str, data_bytes: int) -> _Header:
    """What the header says, once everything in it has been checked against itself, the key and the file size."""
    try:
        entries = json.loads(text.decode("utf-8"))
        note = json.loads(_field(_field(entries, _METADATA_ENTRY, dict), _METADATA, str))
        checks = base64.b64decode(_field(note, "xxh3", str), validate=True)
    except (ValueError, RecursionError, binascii.Error) as error:  # ValueError: JSON, UTF-8, oversized numbers
        raise _DamagedError(f"header is not readable: {error}") from None
    if (version := _field(note, "format", int)) != FORMAT_VERSION:
        raise _DamagedError(f"payload format {version}, this version of ragblend reads {FORMAT_VERSION}")
    if (stored_key := _field(note, "key", str)) != key:
        raise _DamagedError(f"it is the payload of {stored_key[:16]!r}")
    n_tokens = _field(note, "tokens", int)
    n_layers, odd = divmod(len(entries) - 1, 2)
    if odd or n_layers < 1 or len(checks) != _DIGEST_BYTES * (1 + 2 * n_layers):
        raise _DamagedError(f"{len(entries) - 1} tensors with {len(checks)} bytes of checksums")
    shapes, position, dtype_names = [], 0, set()
    for layer in range(n_layers):
        dims = []
        for name in _names(layer, n_layers):
            entry = _field(entries, name, dict)
            dtype_names.add(dtype_name := _field(entry, "dtype", str))
            if dtype_name not in _DTYPES or len(dtype_names) > 1:
                raise _DamagedError(f"dtypes {sorted(dtype_names)}")
            shape = _sizes(entry, "shape", 3)
            start, stop = _sizes(entry, "data_offsets", 2)
            size = shape[0] * shape[1] * shape[2] * _DTYPES[dtype_name].itemsize
            if shape[1] != n_tokens or size == 0 or start != position or stop - start != size:
                raise _DamagedError(f"{name} of shape {shape} at {start}..{stop}")
            position = stop
            dims.append(shape)
        if dims[0][0] != dims[1][0]:
            raise _DamagedError(f"layer {layer} has {dims[0][0]} heads of keys and {dims[1][0]} of values")
        shapes.append(LayerShape(dims[0][0], dims[0][2], dims[1][2]))
    if position != data_bytes:
        raise _DamagedError(f"{data_bytes} bytes of tensors where {position} should be")
    digests = tuple(checks[at : at + _DIGEST_BYTES] for at in range(_DIGEST_BYTES, len(checks), _DIGEST_BYTES))
    header = _Header(n_tokens, _DTYPES[dtype_names.pop()], tuple(shapes), digests)
    if _seal(key, header) != checks[:_DIGEST_BYTES]:
        raise _DamagedError("header does not match its seal")
    return header


# The same chunks come again and again, and checking a header takes half a millisecond.
_parse_kept = functools.lru_cache(_KEPT_HEADERS)(_parse)


def _field(found: Any, name: str, kind: type[_T]) -> _T:
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _DamagedError(f"header has no proper {name!r}")
    return value


def _sizes(entry: dict[str, Any], name: str, count: int) -> list[int]:
    sizes = _field(entry, name, list)
    if len(sizes) != count or any(type(size) is not int or size < 0 for size in sizes):
        raise _DamagedError(f"{name} is {sizes!r:.80}")
    return sizes
