"""A web service that answers from documents, and streams. A client that goes away stops the computing.

pip install ".[examples]"
python examples/fastapi_app.py [MODEL] [STORE]
curl -N "localhost:8000/ask?question=How+high+is+the+lighthouse%3F"
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from llama_index.llms.ragblend import RagBlendLLM

from ragblend.model.sources import DEFAULT_MODEL

NOTES = [
    "The Old Harbour Bridge was designed by Mira Solheim. It opened in 1931 and carries two lanes of road.",
    "The lighthouse on Gull Island is 38 metres high. Its lamp was electrified in 1957.",
]


async def pieces(llm: RagBlendLLM, question: str) -> AsyncIterator[str]:
    """The answer bit by bit; other requests go on meanwhile. Your retriever belongs where the notes are."""
    prompt = "\n\n".join(["Answer from these notes.", *NOTES, question])
    async with aclosing(await llm.astream_complete(prompt)) as stream:
        async for piece in stream:
            yield piece.delta or ""


def service(model: Any, store: str) -> Any:
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    llm = RagBlendLLM(model, store=store, max_tokens=100, preamble="Answer from these notes.\n\n")
    llm.remember(NOTES)

    @asynccontextmanager
    async def closing(_: Any) -> AsyncIterator[None]:
        yield
        llm.close()

    app = FastAPI(lifespan=closing)

    @app.get("/ask")
    async def ask(question: str) -> Any:
        return StreamingResponse(pieces(llm, question), media_type="text/plain")

    return app


if __name__ == "__main__":
    import uvicorn

    with tempfile.TemporaryDirectory() as folder:
        uvicorn.run(service(*[*sys.argv[1:3], *[DEFAULT_MODEL, folder][len(sys.argv[1:3]) :]]))
