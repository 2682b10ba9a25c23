"""LlamaIndex's view of the index: a retriever whose nodes are the index's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragblend.kb.index import DocumentIndex, Found

if TYPE_CHECKING:
    import numpy as np


class IndexRetriever(BaseRetriever):
    """The top_k chunks closest to a question, closest first."""

    def __init__(self, index: DocumentIndex, embed: Callable[[str], np.ndarray], top_k: int) -> None:
        super().__init__()
        self._index, self._embed, self._top_k = index, embed, top_k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._index.search(self._embed(query_bundle.query_str), self._top_k)
        return [NodeWithScore(node=_node(result), score=result.similarity) for result in found]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        # Core's own would embed the question on the event loop, and load the embedding model there.
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _node(found: Found) -> TextNode:
    chunk = found.chunk
    metadata = {**chunk.metadata, "document": chunk.document}
    # Metadata would stand before each chunk in the prompt: tokens to compute every time, and a first chunk that no
    # longer stands right behind the preamble it was prefilled behind.
    hidden = list(metadata)
    return TextNode(
        id_=str(chunk.id),
        text=chunk.text,
        metadata=metadata,
        excluded_llm_metadata_keys=hidden,
        excluded_embed_metadata_keys=hidden,
    )
