"""RagBlendFaissStore: a FAISS vector store that can be updated, filtered exactly and persisted atomically."""

from llama_index.vector_stores.ragblend.base import RagBlendFaissStore

__all__ = ["RagBlendFaissStore"]
