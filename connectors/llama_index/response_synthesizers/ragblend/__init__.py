"""BlendSynthesizer: one prompt of whole chunks, in the order of their scores, with a report of each chunk."""

from llama_index.response_synthesizers.ragblend.base import BlendSynthesizer

__all__ = ["BlendSynthesizer"]
