"""Time to first token in a chat whose chunks change, turn by turn: a session against LlamaIndex's context chat engine.

A conversation asks one question after another, and each retrieves its chunks out of those of all questions, so that
they change with every turn. What LlamaIndex's context chat engine would send at that turn (the same chunks in the
system message, then what was said, then the question) is given to transformers' own `generate`, through the model's
chat template, as LlamaIndex's HuggingFaceLLM does; and so are the session's own messages. All three take turns in one
process, on the same conversation. Times are from the prompt to the first token; retrieval is in none.

Between two turns the engine has time for what a session leaves for it while its user reads. How long that takes is
measured, too: a user who asks at once waits for no more than that in addition.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ragblend.errors import InvalidSettingError
from ragblend.evaluation.stock import Stock
from ragblend.evaluation.strategies import machine, read_questions
from ragblend.kb import KnowledgeBase
from ragblend.kb.conversation import Turn
from ragblend.model.sources import load_model
from ragblend.prompt.chunk import Message
from ragblend.prompt.template import PromptTokenizer

_ABOUT = {
    "session": "blended chunks behind what was said, which the prefix cache holds",
    "context_engine": "what LlamaIndex's context chat engine sends, by transformers' generate, as HuggingFaceLLM does",
    "same_messages": "the session's own messages, by transformers' generate",
}

_TIMES = ("tokenise_s", "lookup_s", "load_s", "stall_s", "select_s", "prefill_s")


def run(
    *,
    model: str,
    data: Path,
    chunks: int,
    chunk_tokens: int,
    turns: int,
    limit: int,
    ratio: float,
    answer_tokens: int,
    dtype: str = "auto",
    store: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure.

    Args:
        data: a JSONL file of {question, answers, chunks}.
        chunks: to retrieve in each turn, and to take of each question.
        turns: of a conversation; limit: conversations.
        answer_tokens: of the session's answers at most; they are the history for all three.
        ratio: share of the reused tokens that the session recomputes.
        store: folder for documents and KV; a temporary one when None.
        progress: called with (steps done, steps in all).

    Returns:
        {"turns": [one for each turn of each conversation], "ways": {name: {mean ttft_s, speedup of the session}},
        "machine": ...}; means are from the second turn on.

    Raises:
        InvalidSettingError, ModelError, StoreError.
    """
    if turns < 2:
        raise InvalidSettingError(f"a chat has 2 turns or more, not {turns}: the first one is not counted")
    with ExitStack() as stack:
        driven, tokenizer = load_model(model, dtype=dtype)
        stock = Stock(driven, tokenizer)
        prompts = PromptTokenizer(tokenizer)
        questions = read_questions(data, prompts, chunks=chunks, chunk_tokens=chunk_tokens, limit=limit * turns)
        if len(questions) < limit * turns:
            raise InvalidSettingError(
                f"{data} has {len(questions)} questions with {chunks} chunks, and {limit} chats of {turns} turns take "
                f"{limit * turns}: ask for fewer with --limit or --turns"
            )
        folder = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragblend-bench-"))) / "store"
        kb = stack.enter_context(KnowledgeBase(folder, model=model, chunk_tokens=chunk_tokens, dtype=dtype))
        steps = 1 + limit * turns

        def step(done: int) -> None:
            if progress is not None:
                progress(done, steps)

        kb.ingest_texts({f"{q.id}-{n}": text for q in questions for n, text in enumerate(q.chunks)})
        step(1)
        _warm_up(kb, stock, ratio)
        taken: list[dict[str, Any]] = []
        for number in range(limit):
            session = kb.session(f"chat-{number}", top_k=chunks, max_tokens=answer_tokens, ratio=ratio)
            session.clear()
            for n, question in enumerate(questions[number * turns : (number + 1) * turns]):
                before = session.turns
                with session.stream(question.question) as stream:
                    for _ in stream:
                        pass
                report = stream.reply.report
                assert report is not None
                began = time.perf_counter()
                kb.engine.drain()  # before anything else is timed
                idle_s = time.perf_counter() - began
                retrieved = [source.node.get_content() for source in stream.sources]
                engine = _context_engine(retrieved, before, question.question)
                ways = [("context_engine", engine), ("same_messages", stream.messages)]
                times = {name: stock.ttft_s(messages) for name, messages in (ways if n % 2 else ways[::-1])}
                taken.append(
                    {
                        "chat": number,
                        "turn": n + 1,
                        "fresh_chunks": sum(use.status == "hit" for use in report.chunks),
                        "prompt_tokens": report.prompt_tokens,
                        "prefix_tokens": report.prefix_tokens,
                        "reused_tokens": report.reused_tokens,
                        "recomputed_tokens": report.recomputed_tokens,
                        "fresh_tokens": report.fresh_tokens,
                        "ttft_s": {"session": report.ttft_s, **times},
                        **{name: getattr(report, name) for name in _TIMES},
                        "idle_s": idle_s,
                        "context_engine_tokens": int(stock.ids(engine).shape[1]),
                    }
                )
                step(1 + len(taken))
        decoder = kb.engine.decoder
        return {
            "model": model,
            "turns": taken,
            "ways": _means(taken),
            "machine": machine(decoder),
        }


def _warm_up(kb: KnowledgeBase, stock: Stock, ratio: float) -> None:
    """First calls pay for memory, threads and kernels."""
    session = kb.session("warm-up", top_k=1, max_tokens=2, ratio=ratio)
    session.clear()
    for message in ("What is this about?", "And what else?"):
        with session.stream(message) as stream:
            for _ in stream:
                pass
        stock.ttft_s(stream.messages)
    session.clear()
    kb.engine.prefix_cache.clear()


def _context_engine(chunks: list[str], turns: tuple[Turn, ...], question: str) -> list[Message]:
    context = "\n\n".join(chunks)
    rule = "-" * 20
    system = f"Use the context information below to assist the user.\n{rule}\n{context}\n{rule}\n"
    said = [m for turn in turns for m in (Message("user", turn.question), Message("assistant", turn.answer))]
    return [Message("system", system), *said, Message("user", question)]


def _means(taken: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    later = [turn["ttft_s"] for turn in taken if turn["turn"] > 1]
    means = {name: statistics.mean(times[name] for times in later) for name in _ABOUT}
    return {
        name: {"about": about, "ttft_s": means[name], "session_speedup": means[name] / means["session"]}
        for name, about in _ABOUT.items()
    }
