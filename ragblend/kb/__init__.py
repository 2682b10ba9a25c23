"""The knowledge base: files in, answers with sources out. An application of the engine, on LlamaIndex.

files.py      paths -> documents, through LlamaIndex's readers
embedder.py   texts -> vectors, with sentence-transformers
index.py      documents, chunks and vectors on disk: SQLite is the truth, the FAISS file is made from it
knowledge.py  KnowledgeBase: keeps index and KV store in step, asks and answers
retriever.py  LlamaIndex's view of the index
"""

from ragblend.kb.knowledge import IngestSummary, KnowledgeBase, KnowledgeBaseStats, Reply, Verification

__all__ = ["IngestSummary", "KnowledgeBase", "KnowledgeBaseStats", "Reply", "Verification"]
