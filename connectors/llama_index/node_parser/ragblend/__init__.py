"""KVPrefill: the last transformation of an ingestion, after which a RagBlendLLM answers from these nodes' KV."""

from llama_index.node_parser.ragblend.base import KVPrefill

__all__ = ["KVPrefill"]
