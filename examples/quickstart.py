"""The engine by itself: texts in, answers out, in any order of the texts.

python examples/quickstart.py [MODEL] [STORE]
"""

from __future__ import annotations

import sys
import tempfile

from ragblend import Chunk, RagBlend
from ragblend.model.sources import DEFAULT_MODEL

TEXTS = [
    "The Old Harbour Bridge was designed by Mira Solheim. It opened in 1931 and carries two lanes of road.",
    "The lighthouse on Gull Island is 38 metres high. Its lamp was electrified in 1957.",
    "The ferry from the harbour to Gull Island runs every two hours and takes 25 minutes.",
]
QUESTION = "\n\nAnswer in one sentence: who designed the Old Harbour Bridge?"


def main(model: str, store: str) -> None:
    with RagBlend.from_pretrained(model, store=store) as engine:
        # Once: each text runs through the model and its keys and values go to disk.
        report = engine.ingest(TEXTS)
        print(f"{report.computed} texts prefilled, {report.already_stored} were stored already")

        # As often as you like: any of the texts, in any order, with anything in between.
        for order in ([0, 1, 2], [2, 0, 1], [1, 0]):
            answer = engine.answer([*(Chunk(TEXTS[i]) for i in order), QUESTION], max_tokens=40)
            print(f"{order}: {answer.text.strip()}")
            r = answer.report
            print(f"  {r.hits} of {len(r.chunks)} texts reused, first token after {r.ttft_s:.3f} s")

        # A text that was never ingested is a miss: computed in the same pass, and learned for the next time.
        answer = engine.answer([Chunk("The bakery in Mill Lane opens at six."), "\n\nWhen does the bakery open?"])
        print(f"miss: {answer.text.strip()} ({answer.report.misses} missed)")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*[*sys.argv[1:3], *[DEFAULT_MODEL, folder][len(sys.argv[1:3]) :]])
