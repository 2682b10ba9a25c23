"""The knowledge base: files in, answers with sources out. An application of the engine, on LlamaIndex.

files.py      paths -> documents, through LlamaIndex's readers
splitting.py  their text -> chunks, cut at natural places
embedder.py   texts -> vectors, with sentence-transformers
models.py     the models, loaded when they are needed
index.py      documents, chunks and vectors on disk: SQLite is the truth, the FAISS file is made from it
corpus.py     which texts stand beside a chunk
ingestion.py  one ingest: brings index and KV store to where the documents are
knowledge.py  KnowledgeBase: ingests, asks and answers
retriever.py  LlamaIndex's view of the index
session.py    a chat in which a turn pays for what is new in it
conversation.py  its turns, in memory and on disk
reports.py    what is said of all that
"""

from ragblend.kb.knowledge import KnowledgeBase
from ragblend.kb.reports import IngestSummary, KnowledgeBaseStats, Reply, Verification

__all__ = ["IngestSummary", "KnowledgeBase", "KnowledgeBaseStats", "Reply", "Verification"]
