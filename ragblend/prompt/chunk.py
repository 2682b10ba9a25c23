"""What a prompt is made of, and the names its parts go by: chunks, messages, chunk keys, tokenizer fingerprints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from ragblend.errors import InvalidSettingError, UnsupportedModelError

KEY_FORMAT_VERSION = 2
"""Raised when what is hashed into a chunk key changes: keys of another version can then never meet."""

_KEY_BYTES = 32
_ID_LIMIT = 2**32
# A role is written into the template's own text, where control tokens are live, so it must not be able to spell one.
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer this room uses. Only tokenizers with a `tokenizers` backend fit."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    @property
    def bos_token_id(self) -> Any: ...
    @property
    def special_tokens_map(self) -> Any: ...
    @property
    def all_special_tokens(self) -> Any: ...
    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Chunk:
    """Text that is prefilled once and reused wherever it appears: one span, tokenised on its own.

    Raises:
        InvalidSettingError: text is not a string.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidSettingError(f"Chunk takes a string, not {type(self.text).__name__}")


@dataclass(frozen=True)
class CutChunk(Chunk):
    """The beginning of a chunk whose rest does not stand there. whole: the chunk's text, which begins with this one."""

    whole: str


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that an assistant's message makes. arguments: of JSON's types. id: what its result refers to."""

    name: str
    arguments: Mapping[str, Any] = field(hash=False)
    id: str = ""


@dataclass(frozen=True, init=False)
class Message:
    """One turn: who speaks, and plain text and chunks in reading order.

    Attributes:
        role: "system", "user", "assistant" or another role that the model's template knows.
        content: the parts, kept as they were given; a single string or Chunk becomes a tuple of one.
        tool_calls: what an assistant calls.
        tool_call_id: the call whose result this is, for the role "tool".
        asks: whether it may end in a question, which is always computed; of a tool's result nothing is one.

    Raises:
        InvalidSettingError: the role is not a plain word, or a part is neither a string nor a Chunk.
    """

    role: str
    content: tuple[str | Chunk, ...]
    tool_calls: tuple[ToolCall, ...]
    tool_call_id: str
    asks: bool

    def __init__(
        self,
        role: str,
        content: str | Chunk | Iterable[str | Chunk] = (),
        tool_calls: Iterable[ToolCall] = (),
        tool_call_id: str = "",
        *,
        asks: bool | None = None,
    ) -> None:
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InvalidSettingError(f"a role is one plain word such as 'user', not {role!r}")
        if not isinstance(content, (str, Chunk, Iterable)):
            raise InvalidSettingError(f"a message holds text and Chunks, not {type(content).__name__}")
        parts = (content,) if isinstance(content, (str, Chunk)) else tuple(content)
        for part in parts:
            if not isinstance(part, (str, Chunk)):
                raise InvalidSettingError(f"a message holds text and Chunks, not {type(part).__name__}")
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "content", parts)
        object.__setattr__(self, "tool_calls", tuple(tool_calls))
        object.__setattr__(self, "tool_call_id", tool_call_id)
        object.__setattr__(self, "asks", role != "tool" if asks is None else asks)


def joined_parts(parts: Iterable[str | Chunk]) -> list[str | Chunk]:
    """The same parts with neighbouring strings joined and empty strings and empty chunks left out."""
    joined: list[str | Chunk] = []
    for part in parts:
        if isinstance(part, Chunk):
            if part.text:
                joined.append(part)
        elif joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return joined


def chunk_key(
    model_fingerprint: str,
    preamble_ids: Sequence[int] | np.ndarray,
    token_ids: Sequence[int] | np.ndarray,
    variant: str = "",
) -> str:
    """The name under which a chunk's KV is stored: equal exactly when model, preamble, tokens and variant are equal.

    The same in every process and on every machine.

    Args:
        model_fingerprint: what makes the KV: weights, dtype, config, tokenizer.
        preamble_ids: [preamble tokens], what the chunk is prefilled behind; may be empty.
        token_ids: [chunk tokens], at least one.
        variant: what else stood between preamble and chunk, where that is not the same for all chunks.

    Returns:
        64 hex digits.

    Raises:
        InvalidSettingError: no token ids, or an id that is not an integer in 0 .. 2**32 - 1.
    """
    digest = blake2b(digest_size=_KEY_BYTES, person=b"ragblend-chunk")
    digest.update(KEY_FORMAT_VERSION.to_bytes(4, "little"))
    model = model_fingerprint.encode()
    digest.update(len(model).to_bytes(8, "little"))
    digest.update(model)
    for name, ids in (("preamble_ids", preamble_ids), ("token_ids", token_ids)):
        data = _id_bytes(name, ids)
        # The length in front keeps (ab, c) and (a, bc) apart.
        digest.update((len(data) // 4).to_bytes(8, "little"))
        digest.update(data)
    if len(token_ids) == 0:
        raise InvalidSettingError("a chunk needs at least one token to have a key")
    if variant:
        digest.update(variant.encode())  # the last part: it needs no length in front
    return digest.hexdigest()


def _id_bytes(name: str, ids: Sequence[int] | np.ndarray) -> bytes:
    if len(ids) == 0:
        return b""
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidSettingError(f"{name} must be a flat sequence of integers")
    if int(array.min()) < 0 or int(array.max()) >= _ID_LIMIT:
        raise InvalidSettingError(f"{name} holds an id outside 0 .. {_ID_LIMIT - 1}")
    return array.astype("<u4").tobytes()


def backend_of(tokenizer: ChatTokenizer) -> Tokenizer:
    """The tokenizer's Rust backend; it is only ever read.

    Raises:
        UnsupportedModelError: the tokenizer has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} has no `tokenizers` backend. Without one its special-token rules cannot be "
            "taken apart, so documents could smuggle control tokens into a prompt. Use the fast tokenizer: "
            "load with use_fast=True, or convert the model's vocabulary to a tokenizer.json"
        )
    return backend


def template_sources(tokenizer: ChatTokenizer) -> dict[str, str]:
    """The tokenizer's chat templates by name; one unnamed template is called "default"; none gives {}."""
    template = tokenizer.chat_template
    if not template:
        return {}
    return {"default": template} if isinstance(template, str) else dict(template)


def tokenizer_fingerprint(tokenizer: ChatTokenizer) -> str:
    """A digest of everything that decides which ids a prompt becomes.

    That is the backend (vocabulary, merges, added tokens, normalisers, post-processor), the chat templates and the
    special-token settings. Truncation and padding are left out: ordinary calls of a tokenizer change them, and this
    room never uses them.

    Returns:
        64 hex digits, the same in every process.

    Raises:
        UnsupportedModelError: the tokenizer has no `tokenizers` backend.
    """
    document = json.loads(backend_of(tokenizer).to_str())
    document.pop("truncation", None)
    document.pop("padding", None)
    settings = {
        "backend": document,
        "templates": template_sources(tokenizer),
        "special_tokens_map": {name: str(token) for name, token in dict(tokenizer.special_tokens_map).items()},
        "special_tokens": sorted(map(str, tokenizer.all_special_tokens)),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
    }
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=_KEY_BYTES, person=b"ragblend-tokens").hexdigest()
