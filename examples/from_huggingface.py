"""An app that was written for HuggingFaceLLM. To move it over, its import was changed, and nothing else:

    - from llama_index.llms.huggingface import HuggingFaceLLM
    + from llama_index.llms.ragblend import RagBlendLLM as HuggingFaceLLM

It ingests nothing beforehand: what its retriever finds is computed once, and reused from the next prompt on. Run it
twice. The last lines show what became of it, and are not needed.

    python examples/from_huggingface.py [MODEL]
"""

from __future__ import annotations

import sys

from llama_index.core import Document, Settings, SummaryIndex
from llama_index.llms.ragblend import RagBlendLLM as HuggingFaceLLM

from ragblend.model.sources import DEFAULT_MODEL

DOCUMENTS = [
    Document(text="The Old Harbour Bridge was designed by Mira Solheim. It opened in 1931 and carries two lanes."),
    Document(text="The lighthouse on Gull Island is 38 metres high. Its lamp was electrified in 1957."),
]


def main(model: str = DEFAULT_MODEL) -> None:
    Settings.llm = HuggingFaceLLM(
        model_name=model,
        tokenizer_name=model,
        context_window=4096,
        max_new_tokens=40,
        generate_kwargs={"do_sample": False},
        device_map="auto",
    )
    response = SummaryIndex.from_documents(DOCUMENTS).as_query_engine().query("How high is the lighthouse?")
    print(str(response).strip())

    report = Settings.llm.last_report
    print(f"{report.hits} of {len(report.chunks)} chunks reused, first token after {report.ttft_s:.3f} s")
    Settings.llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
