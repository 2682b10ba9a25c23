"""LlamaIndex's view of the index: a retriever whose nodes are the index's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragblend.kb.index import DocumentIndex, Found, StoredChunk

if TYPE_CHECKING:
    import numpy as np


class IndexRetriever(BaseRetriever):
    """The top_k chunks closest to a question, closest first.

    A text that several documents have comes once, with the name of the one whose chunk is closest; `also_in` in its
    metadata names the others.
    """

    def __init__(self, index: DocumentIndex, embed: Callable[[str], np.ndarray], top_k: int) -> None:
        super().__init__()
        self._index, self._embed, self._top_k = index, embed, top_k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        vector, reach = self._embed(query_bundle.query_str), self._top_k
        while True:
            found = self._index.search(vector, reach)
            closest: dict[str, Found] = {}
            for result in found:
                closest.setdefault(result.chunk.text, result)
            if len(closest) >= self._top_k or len(found) < reach:
                break
            reach *= 2
        different = list(closest.values())[: self._top_k]
        return [NodeWithScore(node=self._node(result.chunk), score=result.similarity) for result in different]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        # Core's own would embed the question on the event loop, and load the embedding model there.
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _node(self, chunk: StoredChunk) -> TextNode:
        metadata = {**chunk.metadata, "document": chunk.document}
        if others := [name for name in self._index.documents_with(chunk.text) if name != chunk.document]:
            metadata["also_in"] = others
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
