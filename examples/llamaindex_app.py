"""An ordinary LlamaIndex app. Two things are ours: the LLM, and the last transformation.

python examples/llamaindex_app.py [MODEL] [STORE]
"""

from __future__ import annotations

import sys
import tempfile

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
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


def main(model: str, store: str) -> None:
    Settings.embed_model = HuggingFaceEmbedding(model_name=default_folder())
    Settings.llm = llm = RagBlendLLM(model, store=store, max_tokens=40)

    index = VectorStoreIndex.from_documents(
        DOCUMENTS, transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0), KVPrefill(llm=llm)]
    )
    query_engine = index.as_query_engine(similarity_top_k=3)

    for question in ("Who designed the Old Harbour Bridge?", "How high is the lighthouse on Gull Island?"):
        print(question)
        print(f"  {str(query_engine.query(question)).strip()}")
        report = llm.last_report
        assert report is not None
        print(f"  {report.hits} of {len(report.chunks)} chunks reused, first token after {report.ttft_s:.3f} s")
    llm.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*[*sys.argv[1:3], *[DEFAULT_MODEL, folder][len(sys.argv[1:3]) :]])
