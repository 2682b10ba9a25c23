"""KVPrefill: a transformation that stores each node's KV and returns the nodes as they are."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.node_parser.text.sentence_window import DEFAULT_WINDOW_METADATA_KEY
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.llms.ragblend import RagBlendLLM
from llama_index.llms.ragblend.retrieval import window_of

from ragblend.blend.variants import neighbours_of, texts_before
from ragblend.chunks import IngestReport
from ragblend.engine import RagBlend
from ragblend.errors import InvalidSettingError
from ragblend.prompt.chunk import KEY_FORMAT_VERSION


class KVPrefill(TransformComponent):
    """Prefills nodes' texts into a RagBlend engine's store. Put it last: what comes after could change the texts.

    A chunk is a node's content, without metadata and without white space around it; that is what stands in a prompt
    whatever header core puts before it. What is stored already costs a look-up, so that running it again is cheap, and
    a killed run resumes.

    Behind a SentenceWindowNodeParser a chunk is the window around a node's sentence, since that is what stands in the
    prompt once MetadataReplacementPostProcessor("window") has put it in the sentence's place. The sentence is not
    stored beside it: a window that core has to cut would then be found as sentences, and not as its own beginning. An
    app without that postprocessor says window_metadata_key=None.

    Nodes that have been embedded before they come here are prefilled behind their neighbours, the closest other nodes
    of the batch: chunks that are retrieved together are then stored as they are in each other's company.

    An IngestionPipeline skips a transformation whose fields and nodes it has seen before. The fields here are therefore
    what the stored KV depends on: another model, preamble, store or text, and the nodes come here again. An engine that
    had to evict KV since does not learn of it here; it computes and learns such chunks when they are asked for.

    Args:
        llm: the RagBlendLLM that will answer, or
        engine: the engine that will.
        window_metadata_key: under which key of a node's metadata the text stands that will replace the node's own: what
            the postprocessor calls target_metadata_key. Nodes without one, or whose LLM is shown it as metadata (it is
            not in their excluded_llm_metadata_keys), are prefilled with their own; None: all are.

    Raises:
        InvalidSettingError: neither or both are given, or something else.
    """

    model_fingerprint: str = Field(description="Digest of weights, dtype, tokenizer, preamble, policy and key format.")
    store_epoch: str = Field(description="Names this store folder, from its making to its deletion.")
    window_metadata_key: str | None = Field(description="Metadata key of the text that replaces a node's own.")

    _engine: RagBlend = PrivateAttr()
    _last_report: IngestReport | None = PrivateAttr(default=None)

    def __init__(
        self,
        *,
        llm: RagBlendLLM | None = None,
        engine: RagBlend | None = None,
        window_metadata_key: str | None = DEFAULT_WINDOW_METADATA_KEY,
    ) -> None:
        if (llm is None) == (engine is None):
            raise InvalidSettingError(
                "KVPrefill takes the RagBlendLLM that will answer, or its engine: llm=... or engine=..."
            )
        chosen = llm.engine if isinstance(llm, RagBlendLLM) else engine
        if not isinstance(chosen, RagBlend):
            raise InvalidSettingError(
                f"KVPrefill stores KV for a RagBlendLLM or a RagBlend engine, not for {type(llm or engine).__name__}: "
                "give llm=RagBlendLLM(...)"
            )
        fields: dict[str, Any] = {
            "model_fingerprint": _fingerprint(chosen),
            "store_epoch": chosen.store.epoch,
            "window_metadata_key": window_metadata_key,
        }
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
        texts = [self._text(node) for node in nodes]
        self._last_report = self._engine.ingest(texts, neighbours=_neighbours(self._engine, nodes, texts))
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same in a thread. If the task is cancelled it stops after the prefill it is at."""
        cancelled = threading.Event()
        texts = [self._text(node) for node in nodes]

        def check(_: int) -> None:
            if cancelled.is_set():
                raise asyncio.CancelledError  # nobody waits for it any more

        def ingest() -> IngestReport:
            neighbours = _neighbours(self._engine, nodes, texts)
            return self._engine.ingest(texts, neighbours=neighbours, progress=check)

        try:
            self._last_report = await asyncio.to_thread(ingest)
        finally:
            cancelled.set()
        return nodes

    def _text(self, node: BaseNode) -> str:
        window = None if self.window_metadata_key is None else window_of(node, self.window_metadata_key)
        return (node.get_content(metadata_mode=MetadataMode.NONE) if window is None else window).strip()

    def __getstate__(self) -> NoReturn:
        # Core's own would drop the engine with a warning, and the workers would store nothing.
        raise InvalidSettingError(
            "KVPrefill holds a loaded model and cannot be sent to other processes: run the pipeline without "
            "num_workers, or split in one pipeline with num_workers and prefill in a second one without"
        )


def _neighbours(engine: RagBlend, nodes: Sequence[BaseNode], texts: Sequence[str]) -> list[list[str]] | None:
    """What each text should be prefilled behind; None where nothing says."""
    if engine.settings.policy == "document":
        documents = groupby(zip(nodes, texts, strict=True), key=lambda pair: pair[0].ref_doc_id)
        return [before for _, pairs in documents for before in texts_before([text for _, text in pairs])]
    vectors = [node.embedding for node in nodes if node.embedding is not None]
    if len(vectors) < max(2, len(nodes)) or len({len(vector) for vector in vectors}) != 1:
        return None
    return neighbours_of(texts, np.asarray(vectors, dtype=np.float32))


def _fingerprint(engine: RagBlend) -> str:
    settings = engine.settings
    before = ",".join([settings.policy, settings.namespace, *map(str, engine.preamble_ids)])
    described = f"{KEY_FORMAT_VERSION}:{engine.fingerprint}:{before}"
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
