"""KVPrefill: a transformation that stores each node's KV and returns the nodes as they are."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.llms.ragblend import RagBlendLLM

from ragblend.engine import IngestReport, RagBlend
from ragblend.errors import InvalidSettingError


class KVPrefill(TransformComponent):
    """Prefills nodes' texts into a RagBlend engine's store. Put it last: what comes after could change the texts.

    A chunk is a node's content, without metadata and without white space around it; that is what stands in a prompt
    whatever header core puts before it. What is stored already costs a look-up, so that running it again is cheap, and
    a killed run resumes.

    An IngestionPipeline skips a transformation whose fields and nodes it has seen before. The two fields here are
    therefore what the stored KV depends on: another model, preamble or store, and the nodes come here again. An
    engine that had to evict KV since does not learn of it here; it computes and learns such chunks when they are asked
    for.

    Args:
        llm: the RagBlendLLM that will answer, or
        engine: the engine that will.

    Raises:
        InvalidSettingError: neither or both are given.
    """

    model_fingerprint: str = Field(description="Digest of weights, dtype, tokenizer and preamble.")
    store_epoch: str = Field(description="Names this store folder, from its making to its deletion.")

    _engine: RagBlend = PrivateAttr()
    _last_report: IngestReport | None = PrivateAttr(default=None)

    def __init__(self, *, llm: RagBlendLLM | None = None, engine: RagBlend | None = None) -> None:
        if (llm is None) == (engine is None):
            raise InvalidSettingError(
                "KVPrefill takes the RagBlendLLM that will answer, or its engine: llm=... or engine=..."
            )
        chosen = engine if llm is None else llm.engine
        assert chosen is not None
        fields = {"model_fingerprint": _fingerprint(chosen), "store_epoch": chosen.store.epoch}
        super().__init__(**fields)
        self._engine = chosen

    @classmethod
    def class_name(cls) -> str:
        return "KVPrefill"

    @property
    def last_report(self) -> IngestReport | None:
        """What the last run did."""
        return self._last_report

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Store the KV of these nodes and return them.

        Raises:
            ContextWindowError: a node does not fit the model; split it first.
            StoreFullError: the disk is full; what was stored before stays.
        """
        self._last_report = self._engine.ingest(_text(node) for node in nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same in a thread. If the task is cancelled it stops after the node it is at."""
        cancelled = threading.Event()

        def texts() -> Iterator[str]:
            for node in nodes:
                if cancelled.is_set():
                    return
                yield _text(node)

        try:
            self._last_report = await asyncio.to_thread(self._engine.ingest, texts())
        finally:
            cancelled.set()
        return nodes

    def __getstate__(self) -> NoReturn:
        # Core's own would drop the engine with a warning, and the workers would store nothing.
        raise InvalidSettingError(
            "KVPrefill holds a loaded model and cannot be sent to other processes: run the pipeline without "
            "num_workers, or split in one pipeline with num_workers and prefill in a second one without"
        )


def _text(node: BaseNode) -> str:
    return node.get_content(metadata_mode=MetadataMode.NONE).strip()


def _fingerprint(engine: RagBlend) -> str:
    preamble = ",".join(map(str, engine.preamble_ids))
    return hashlib.blake2b(f"{engine.fingerprint}:{preamble}".encode(), digest_size=16).hexdigest()
