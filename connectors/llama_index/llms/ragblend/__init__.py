"""`Settings.llm = RagBlendLLM(store="kv")`: a LlamaIndex LLM that answers from the KV of chunks it has seen before."""

from llama_index.llms.ragblend.base import RagBlendLLM
from llama_index.llms.ragblend.preamble import default_preamble

__all__ = ["RagBlendLLM", "default_preamble"]
