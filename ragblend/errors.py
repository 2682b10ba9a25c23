"""What can go wrong, as one tree.

RagBlendError
+-- InvalidSettingError                     a setting outside its range: ratio, temperature, sizes
+-- NotCalibratedError                      a bound on the divergence was asked for, and nothing says what keeps it
+-- EmptyPromptError (also ValueError)      nothing to answer
+-- PrefillCancelledError                   whoever asked does not want the answer any more
+-- ContextWindowError                      prompt + answer do not fit the model; raised before any compute
+-- ModelError
|   +-- ModelNotFoundError                  no such folder, hub id, GGUF file or installed package
|   +-- UnsupportedModelError               not a RoPE decoder this engine can drive exactly; says why
|   +-- ModelChangedError                   its weights are others than when the engine was made
+-- StoreError
|   +-- StoreFormatError                    the folder was written by another format version, or is no store
|   +-- StoreFullError                      the disk is full; what was committed before is intact
|   +-- CorruptPayloadError                 a payload does not match its checksum; callers turn it into a miss
+-- IngestError                             nothing readable to ingest, or an index that does not fit
+-- MissingDependencyError (also ImportError)  an optional package is needed; says which pip command brings it

Every message says what to do next.
"""

from __future__ import annotations

import contextlib
from typing import Any


class RagBlendError(Exception):
    """Base of everything ragblend raises on purpose."""


class InvalidSettingError(RagBlendError):
    """A setting is outside the range it can take.

    No ValueError: LlamaIndex's refining synthesizers log those and answer "Empty Response".
    """


class NotCalibratedError(RagBlendError):
    """A bound on the divergence was asked for, and nothing says what keeps it: the store has no calibration for this
    model, or it is for another selector, or of too few questions.
    """


class EmptyPromptError(RagBlendError, ValueError):
    """The prompt holds no text."""


class PrefillCancelledError(RagBlendError):
    """Whoever asked gave up while the prompt was being prefilled."""


class ContextWindowError(RagBlendError):
    """The prompt does not fit the model's context window.

    No ValueError, for the same reason as InvalidSettingError.

    Attributes:
        prompt_tokens: tokens in the prompt.
        max_tokens: tokens asked for as an answer.
        context_window_tokens: positions the model was trained for.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, context_window_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context_window_tokens = context_window_tokens
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and {max_tokens} more were asked for, but the model's "
            f"context window holds {context_window_tokens}: retrieve fewer or shorter chunks, or lower max_tokens"
        )


class ModelError(RagBlendError):
    """Something about the model."""


class ModelNotFoundError(ModelError):
    """The model cannot be found under the given name."""


class UnsupportedModelError(ModelError):
    """The model is not one whose layers this engine can drive exactly."""


class ModelChangedError(ModelError):
    """The model computes something else than when the engine was made: KV of both would go by one name."""


class StoreError(RagBlendError):
    """Something about the KV store."""


class StoreFormatError(StoreError):
    """The folder was written by another format version, or is not a store."""


class StoreFullError(StoreError):
    """No space is left on the store's disk."""


class CorruptPayloadError(StoreError):
    """A stored payload is truncated or does not match its checksum.

    Attributes:
        key: the chunk key of the payload.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        super().__init__(f"payload {key[:16]} is corrupt ({reason}); it is treated as a miss")


class IngestError(RagBlendError):
    """Nothing could be ingested."""


class MissingDependencyError(RagBlendError, ImportError):
    """An optional package is needed for what was asked."""


def whole_number(name: str, value: Any, *, least: int) -> int:
    """A setting that is a whole number, as an int: 2e9 and NumPy's integers are some, too.

    Raises:
        InvalidSettingError: it is none, or too small.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and int(value) == value and value >= least:
            return int(value)
    raise InvalidSettingError(f"{name} is a whole number, {least} or more; got {value!r:.80}")
