"""The two models of a knowledge base, each loaded when it is first needed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.kb.embedder import Embedder
from ragblend.kb.files import printable
from ragblend.store.kvstore import KVStore

if TYPE_CHECKING:
    from llama_index.llms.ragblend import RagBlendLLM

    from ragblend.audit import Audit
    from ragblend.blend.variants import Policy
    from ragblend.engine import RagBlend

DEFAULT_POLICY: Policy = "neighbours"


class Models:
    """Who answers, and who makes the vectors.

    Attributes:
        embedding_name: under which the index records what its vectors were made with.
        policy: what chunks are prefilled behind.
    """

    def __init__(
        self,
        store: KVStore,
        model: str | Path | None,
        embedding_name: str,
        policy: Policy,
        dtype: str,
        *,
        auto_dtype: str,
        template_settings: Mapping[str, Any],
        audit: Audit | None,
    ) -> None:
        """auto_dtype: what the dtype "auto" came to when a model was loaded last; "" if nobody knows."""
        self.embedding_name, self.policy = embedding_name, policy
        self._store, self._model, self._audit = store, model, audit
        self._template_settings = dict(template_settings)
        self._dtype, self._auto_dtype = dtype, auto_dtype
        self._loading = threading.RLock()
        self._llm: RagBlendLLM | None = None
        self._embedder: Embedder | None = None

    @property
    def engine(self) -> RagBlend:
        """The engine, behind the preamble that LlamaIndex's prompts really have; the model is loaded on first use."""
        with self._loading:
            if self._llm is None:
                from llama_index.llms.ragblend import RagBlendLLM

                chosen: dict[str, Any] = {} if self._model is None else {"model": str(self._model)}
                chosen |= {"dtype": self._dtype, "policy": self.policy, "audit": self._audit}
                chosen |= {"template_settings": self._template_settings}
                self._llm = RagBlendLLM(store=self._store, **chosen)
            return self._llm.engine

    @property
    def loaded(self) -> bool:
        """Whether the model that answers is there already."""
        return self._llm is not None

    @property
    def embedder(self) -> Embedder:
        """What makes the vectors; loaded on first use."""
        with self._loading:
            if self._embedder is None:
                self._embedder = Embedder(self.embedding_name)
            return self._embedder

    @property
    def name(self) -> str:
        """Of the model that answers: where it was found, or the hub's or our name for it. Loads nothing."""
        from ragblend.model.sources import DEFAULT_MODEL

        if self._model is None:
            return DEFAULT_MODEL
        path = Path(self._model).expanduser()
        return printable(str(path.resolve() if os.path.exists(path) else self._model))

    @property
    def signature(self) -> str:
        """Names in the index what made the KV, without loading it: the model, the policy if it is not the default, and
        the dtype. The real identity is in the KV's keys; a wrong guess here costs a look-up or a miss."""
        policy = "" if self.policy == DEFAULT_POLICY else self.policy
        return "|".join(filter(None, (self._model_signature, policy, self.auto_dtype or self._dtype)))

    @property
    def auto_dtype(self) -> str:
        """What the dtype "auto" comes to: it is measured when the model is loaded, and as it was before until then.

        "" if another one was asked for, or nobody knows.
        """
        if self._dtype == "auto" and self._llm is not None:
            return str(self._llm.engine.decoder.dtype).removeprefix("torch.")
        return self._auto_dtype if self._dtype == "auto" else ""

    @cached_property
    def _model_signature(self) -> str:
        path = Path(self._model or "").expanduser()
        stamps: list[tuple[str, int, int]] = []
        if self._model is not None:
            with contextlib.suppress(OSError):  # nothing there, or nothing that may be looked at
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
        if not stamps:
            return printable(str(self._model or ""))
        return f"{printable(str(path.resolve()))}#{hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()}"

    def close(self) -> None:
        """Let go of them. Closing twice is fine."""
        with self._loading:
            llm, self._embedder = self._llm, None
        # Not under the lock: closing waits for audits, and who is told their results may ask for the engine.
        if llm is not None:
            llm.close()
