"""A folder of documents that can be asked. Run it again: only what changed in the folder is worked on.

python examples/knowledge_base.py FOLDER "QUESTION" [MODEL] [STORE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from ragblend.kb import KnowledgeBase
from ragblend.model.sources import DEFAULT_MODEL

STORE = Path(__file__).parent / ".ragblend" / "knowledge"


def main(folder: str, question: str, model: str = DEFAULT_MODEL, store: str | Path = STORE) -> None:
    Path(store).parent.mkdir(parents=True, exist_ok=True)
    with KnowledgeBase(store, model=model) as kb:
        done = kb.ingest([folder], prune=True)  # prune: forget documents whose files are gone
        print(f"{done.documents} documents new or changed, {done.unchanged} as before, {done.pruned} gone")
        for name, reason in done.skipped:
            print(f"  not read: {name}: {reason}")

        reply = kb.query(question, top_k=3, max_tokens=60)
        print(f"{question}\n  {reply.text.strip()}")
        for source in reply.sources:
            print(f"  from {source.node.metadata['document']} (similarity {source.score:.2f})")
        if reply.report is not None:
            print(f"  {reply.report.hits} of {len(reply.report.chunks)} chunks reused")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:5])
