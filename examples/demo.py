"""The whole thing on documents nobody here wrote: the READMEs of the Python packages that are installed.

They are read, split, run through the model once and stored. Then five questions are asked. Each is retrieved once and
answered with its chunks in three orders: a prefix cache could serve one of them, stored chunks serve all.

    python examples/demo.py [STORE]

The second run finds everything stored and starts asking at once.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.llms.ragblend import RagBlendLLM

from ragblend.kb import KnowledgeBase
from ragblend.report import BlendReport

STORE = Path(__file__).parent / ".ragblend" / "demo"
README_CHARS = range(800, 200_000)  # shorter ones say nothing, longer ones are change logs
READ_CHARS = 1_100  # of each: its beginning says what it is for, and ingesting all takes a minute or two
TOP_K = 8
QUESTIONS = [
    "Where does the name tqdm come from?",
    "What is the sortedcontainers library written in?",
    "What does certifi provide?",
    "What does platformdirs determine?",
    "What is shellingham for?",
]


def readmes() -> dict[str, str]:
    """{package: the beginning of its README}."""
    found: dict[str, str] = {}
    for distribution in distributions():
        text = str(distribution.metadata.json.get("description", ""))
        if len(text) in README_CHARS:
            # Cut between lines, so that no chunk ends inside a word.
            found[distribution.name] = text[:READ_CHARS].rsplit("\n", 1)[0]
    return dict(sorted(found.items()))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def progress(name: str, done: float, total: int) -> None:
    """One line that is written over on a terminal; a line every twenty documents elsewhere."""
    if sys.stderr.isatty():
        print(f"\r  {done:5.1f} of {total} documents  {name[:40]:<40}", end="", file=sys.stderr, flush=True)
    elif done % 20 == 0 and done:
        note(f"  {done:.0f} of {total} documents")


def ask(kb: KnowledgeBase, question: str, nodes: Sequence[NodeWithScore], **settings: float) -> tuple[str, BlendReport]:
    """Put these nodes, in this order, into the prompt of a LlamaIndex query engine."""
    # Every time is that of a prompt never seen before: without this, the second way to ask would start where the
    # first one left off.
    kb.engine.prefix_cache.clear()
    llm = RagBlendLLM.from_engine(kb.engine, **settings)
    response = RetrieverQueryEngine.from_args(kb.as_retriever(), llm=llm).synthesize(QueryBundle(question), list(nodes))
    assert llm.last_report is not None
    return " ".join(str(response).split()), llm.last_report


def main(store: Path) -> None:
    started = time.perf_counter()
    documents = readmes()
    note(f"{len(documents)} READMEs of installed packages, into {store}")
    store.parent.mkdir(parents=True, exist_ok=True)
    with KnowledgeBase(store, model=os.environ.get("RAGBLEND_MODEL")) as kb:
        summary = kb.ingest_texts(documents, progress=progress)
        note(
            f"\n{summary.documents} documents ingested, {summary.unchanged} were there: {summary.computed} chunks "
            f"({summary.tokens} tokens) prefilled in {summary.seconds:.0f} s"
        )
        speedups: list[float] = []
        for question in QUESTIONS:
            nodes = kb.as_retriever(TOP_K).retrieve(question)
            print(f"\n{question}")
            print(f"  sources: {', '.join(node.node.metadata['document'] for node in nodes)}")
            orders = {"as retrieved": nodes, "reversed": nodes[::-1], "rotated": nodes[2:] + nodes[:2]}
            for order, ordered in orders.items():
                answer, blend = ask(kb, question, ordered, max_tokens=40)
                _, full = ask(kb, question, ordered, max_tokens=1, ratio=1.0)
                speedups.append(full.ttft_s / blend.ttft_s)
                print(f"  {order}: {answer}")
                print(
                    f"    {blend.hits} of {len(blend.chunks)} chunks reused; first token after {full.ttft_s:.2f} s "
                    f"(full prefill), {blend.ttft_s:.2f} s (blend): {speedups[-1]:.1f}x sooner"
                )
    print(
        f"\n{len(speedups)} prompts: the first token came {statistics.median(speedups):.1f}x sooner (median). "
        f"{time.perf_counter() - started:.0f} s in all."
    )
    print(f'Ask your own: ragblend query "What is attrs?" --store {store}')


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else STORE)
