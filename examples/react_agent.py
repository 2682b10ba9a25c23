"""An agent that looks things up. What its tool returns is retrieved text, and is reused like any other.

The built-in model's chat template knows no tools, so it is asked in ReAct's way; `stop` keeps it from making up what
the tool says. It is also too small to keep to that way: mostly it looks nothing up, and nothing is reused then. Give a
larger MODEL to see it work. Where `llm.metadata.is_function_calling_model` is True, core's FunctionAgent takes the same
arguments.

    python examples/react_agent.py [MODEL] [STORE]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from typing import Any

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.tools import RetrieverTool
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.ragblend import RagBlendLLM
from llama_index.node_parser.ragblend import KVPrefill

from ragblend.kb.embedder import default_folder
from ragblend.model.sources import DEFAULT_MODEL

DOCUMENTS = [
    Document(text="The Old Harbour Bridge was designed by Mira Solheim. It opened in 1931 and carries two lanes."),
    Document(text="The lighthouse on Gull Island is 38 metres high. Its lamp was electrified in 1957."),
    Document(text="The ferry from the harbour to Gull Island runs every two hours and takes 25 minutes."),
]


def agent(model: Any, store: str) -> ReActAgent:
    Settings.embed_model = HuggingFaceEmbedding(model_name=default_folder())
    llm = RagBlendLLM(model, store=store, max_tokens=100, stop="Observation:")
    index = VectorStoreIndex.from_documents(
        DOCUMENTS, transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0), KVPrefill(llm=llm)]
    )
    notes = RetrieverTool.from_defaults(
        index.as_retriever(similarity_top_k=3), name="notes", description="Finds notes about the harbour."
    )
    return ReActAgent(tools=[notes], llm=llm)


async def ask(agent: ReActAgent, question: str) -> None:
    print(await agent.run(user_msg=question))
    report = agent.llm.last_report
    print(f"{report.hits} of {len(report.chunks)} chunks reused in the last prompt")
    agent.llm.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = agent(*[*sys.argv[1:3], *[DEFAULT_MODEL, folder][len(sys.argv[1:3]) :]])
        asyncio.run(ask(made, "How high is the lighthouse?"))
