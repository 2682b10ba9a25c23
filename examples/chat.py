"""A chat over documents: what was said costs nothing any more, and the chat goes on when the program is run again.

python examples/chat.py [MODEL] [STORE]
"""

from __future__ import annotations

import sys
import tempfile

from ragblend import KnowledgeBase
from ragblend.model.sources import DEFAULT_MODEL

DOCUMENTS = {
    "bridge": "# Old Harbour Bridge\n\nIt was designed by Mira Solheim. It opened in 1931, with two lanes of road.",
    "lighthouse": "# Gull Island\n\nThe lighthouse is 38 metres high. Its lamp was electrified in 1957.",
    "ferry": "# Ferry\n\nIt runs from the harbour to Gull Island every two hours and takes 25 minutes.",
}
MESSAGES = ["Who designed the Old Harbour Bridge?", "When did it open?", "How do I get to Gull Island?"]


def main(model: str, store: str) -> None:
    with KnowledgeBase(store, model=model) as kb:
        kb.ingest_texts(DOCUMENTS)
        chat = kb.session("example", top_k=2, max_tokens=40)
        for message in MESSAGES:
            print(f"{message}\n ", end="")
            with chat.stream(message) as stream:
                for piece in stream:
                    print(piece, end="", flush=True)
            report = chat.last_report
            assert report is not None
            print(
                f"\n  {report.prefix_tokens} tokens known, {report.reused_tokens} from the store, "
                f"{report.fresh_tokens} fresh; first token after {report.ttft_s:.3f} s"
            )
        print(f"{len(chat.turns)} turns")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*[*sys.argv[1:3], *[DEFAULT_MODEL, f"{folder}/store"][len(sys.argv[1:3]) :]])
