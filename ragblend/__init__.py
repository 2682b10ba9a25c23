"""Retriever-aware KV cache: answer RAG prompts from precomputed chunk KV, in any order.

    from ragblend import RagBlend, Chunk

    engine = RagBlend.from_pretrained(store="kv")
    engine.ingest(texts)
    answer = engine.answer([Chunk(texts[4]), Chunk(texts[1]), "Who built the bridge?"])

Names are imported when they are first used: `import ragblend` costs nothing and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragblend.audit import Audit as Audit
    from ragblend.blend.selectors import HKVD as HKVD
    from ragblend.blend.selectors import FirstTokens as FirstTokens
    from ragblend.blend.selectors import QuestionAttention as QuestionAttention
    from ragblend.blend.selectors import RecomputeAll as RecomputeAll
    from ragblend.blend.selectors import RecomputeNone as RecomputeNone
    from ragblend.engine import Answer as Answer
    from ragblend.engine import RagBlend as RagBlend
    from ragblend.errors import RagBlendError as RagBlendError
    from ragblend.kb import KnowledgeBase as KnowledgeBase
    from ragblend.model.generate import DecodeSettings as DecodeSettings
    from ragblend.prompt.chunk import Chunk as Chunk
    from ragblend.prompt.chunk import Message as Message
    from ragblend.quality import MaxKL as MaxKL
    from ragblend.report import BlendReport as BlendReport

__version__ = "0.1.0"

_HOMES = {
    "Answer": "ragblend.engine",
    "Audit": "ragblend.audit",
    "BlendReport": "ragblend.report",
    "Chunk": "ragblend.prompt.chunk",
    "DecodeSettings": "ragblend.model.generate",
    "FirstTokens": "ragblend.blend.selectors",
    "HKVD": "ragblend.blend.selectors",
    "KnowledgeBase": "ragblend.kb",
    "MaxKL": "ragblend.quality",
    "Message": "ragblend.prompt.chunk",
    "QuestionAttention": "ragblend.blend.selectors",
    "RagBlend": "ragblend.engine",
    "RagBlendError": "ragblend.errors",
    "RecomputeAll": "ragblend.blend.selectors",
    "RecomputeNone": "ragblend.blend.selectors",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ragblend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
