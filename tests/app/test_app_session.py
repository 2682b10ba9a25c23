"""Chats: what was said costs nothing any more, follow-up questions find their chunks, and nothing said is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core.schema import NodeWithScore

from ragblend.audit import Audit, Audited
from ragblend.errors import (
    ContextWindowError,
    EmptyPromptError,
    IngestError,
    InvalidSettingError,
    StoreError,
    StoreFullError,
)
from ragblend.kb import KnowledgeBase
from ragblend.kb.conversation import Conversation, Turn
from ragblend.kb.retriever import IndexRetriever
from ragblend.kb.session import DEFAULT_RATIO, ChatSession
from ragblend.report import BlendReport

TEXTS = {
    "bridge": "The Old Harbour Bridge was designed by Mira Solheim, and it was opened to carts in the year 1931.",
    "opening": "When the Old Harbour Bridge was opened in 1931, Mira Solheim crossed it first, on a bicycle.",
    "moon": "The moon is 384400 kilometres away from the earth, and a rocket takes three days to get there.",
    "orbit": "The moon is not always equally far away from the earth: its way around the earth is an ellipse.",
    "cats": "Cats sleep for sixteen hours a day, most of them in the afternoon on something that is warm.",
}
BRIDGE, MOON, CATS = "Who designed the Old Harbour Bridge?", "How far away is the moon?", "How long do cats sleep?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "store"
    with KnowledgeBase(folder, model=str(tiny_model)) as kb:
        kb.ingest_texts(TEXTS)
    return folder


@pytest.fixture
def kb(store: Path, tiny_model: Path, embedding_model: None) -> Iterator[KnowledgeBase]:
    with KnowledgeBase(store, model=str(tiny_model)) as opened:
        yield opened
        for file in (store / "sessions").glob("*"):
            file.unlink()


def reply_to(kb: KnowledgeBase, chat: ChatSession, message: str) -> BlendReport:
    """How a turn is answered whose user read the last reply first."""
    kb.engine.drain()
    report = chat.chat(message).report
    assert report is not None
    assert chat.last_report == report
    return report


def said_tokens(report: BlendReport) -> int:
    """Tokens of everything before this turn's chunks."""
    return report.chunks[0].start


def statuses(report: BlendReport) -> list[str]:
    return [use.status for use in report.chunks]


def test_answers_and_turns_are_audited(store: Path, tiny_model: Path, embedding_model: None) -> None:
    found: list[Audited] = []
    audit = Audit(share=1.0, on_result=found.append)
    with KnowledgeBase(store, model=str(tiny_model), audit=audit) as kb:
        kb.query(MOON, top_k=2, max_tokens=8)
        kb.engine.drain()
        assert len(found) == 1
        chat = kb.session("audited", top_k=2, max_tokens=8)
        chat.chat(BRIDGE)
        kb.engine.drain()
        chat.clear()
        assert len(found) == kb.engine.audits().audited == 2


def test_results_of_audits_may_look_at_the_engine_while_it_closes(
    store: Path, tiny_model: Path, embedding_model: None
) -> None:
    kb: KnowledgeBase
    closing, refused = threading.Event(), []

    def look(_: Audited) -> None:
        closing.wait(30)
        try:
            kb.engine.audits()
        except InvalidSettingError as error:
            refused.append(error)

    kb = KnowledgeBase(store, model=str(tiny_model), audit=Audit(share=1.0, on_result=look))
    kb.query(MOON, top_k=2, max_tokens=8)
    engine = kb.engine
    closer = threading.Thread(target=kb.close, daemon=True)
    closer.start()
    while not engine.closed:
        time.sleep(0.01)
    closing.set()
    closer.join(30)
    assert not closer.is_alive()
    assert len(refused) == 1


def test_a_turn_pays_for_its_question_and_its_chunks(kb: KnowledgeBase) -> None:
    chat = kb.session("a", top_k=2, max_tokens=40)
    said = 0
    for message in (BRIDGE, "When was the Old Harbour Bridge opened?", MOON, CATS):
        report = reply_to(kb, chat, message)
        assert said_tokens(report) > said
        said = said_tokens(report)
        assert said - 16 <= report.prefix_tokens <= said  # from the first turn on, up to a block's border
        assert report.prefix_is_exact
        assert statuses(report) == ["hit", "hit"]
        question = len(kb.engine.prompts.encode_text(message))
        assert report.fresh_tokens < question + 100  # the tiny tokenizer makes many tokens of the template
        assert report.ttft_s > 0
    assert said > sum(len(kb.engine.prompts.encode_text(turn.answer)) for turn in chat.turns[:-1])
    # Who asks at once waits for what is not there yet, and gets the same.
    chat.chat(BRIDGE)
    kb.engine.prefix_cache.clear()
    assert chat.chat(MOON).report.hits == 2  # type: ignore[union-attr]


def test_a_question_is_embedded_beside_the_event_loop(kb: KnowledgeBase) -> None:
    threads: list[threading.Thread] = []

    def embed(question: str) -> np.ndarray:
        threads.append(threading.current_thread())
        return np.eye(kb.index.dimensions or 0, dtype=np.float32)[0]

    assert len(asyncio.run(IndexRetriever(kb.index, embed, 2).aretrieve(BRIDGE))) == 2
    assert threads[0] is not threading.current_thread()


def test_a_follow_up_question_finds_what_it_is_about(kb: KnowledgeBase) -> None:
    def found(sources: Sequence[NodeWithScore]) -> set[str]:
        return {source.node.metadata["document"] for source in sources}

    chat = kb.session("follow", top_k=2, max_tokens=3)
    assert found(chat.chat(BRIDGE).sources) == {"bridge", "opening"}
    for message in ("Why?", "What else do you know?"):
        assert found(kb.as_retriever(2).retrieve(message)) != {"bridge", "opening"}
        assert found(chat.chat(message).sources) == {"bridge", "opening"}
    sources = chat.chat(MOON).sources
    assert found(sources) == {"moon", "orbit"}
    assert sources[0].score >= sources[1].score  # type: ignore[operator]


def test_the_same_answers_as_without_any_cache(kb: KnowledgeBase) -> None:
    """At ratio 1 nothing is approximated: with and without what the prefix cache holds, a chat goes the same way."""
    chat = kb.session("cached", ratio=1.0, max_tokens=12)
    cached = [chat.chat(message).text for message in (BRIDGE, MOON, CATS)]
    assert chat.last_report is not None
    assert chat.last_report.prefix_tokens > 0
    chat = kb.session("uncached", ratio=1.0, max_tokens=12)
    uncached = []
    for message in (BRIDGE, MOON, CATS):
        kb.engine.drain()
        kb.engine.prefix_cache.clear()
        uncached.append(chat.chat(message).text)
    assert cached == uncached


def test_a_chat_goes_on_in_another_process(store: Path, tiny_model: Path, embedding_model: None) -> None:
    with KnowledgeBase(store, model=str(tiny_model)) as kb:
        chat = kb.session("restart", top_k=1, max_tokens=40)
        for message in (BRIDGE, MOON):
            chat.chat(message)
        said = chat.turns
    with KnowledgeBase(store, model=str(tiny_model)) as kb:
        chat = kb.session("restart", top_k=1, max_tokens=1)
        assert chat.turns == said
        report = reply_to(kb, chat, CATS)
        assert statuses(report) == ["hit"]
        assert said_tokens(report) - 16 <= report.prefix_tokens <= said_tokens(report)


def test_only_what_was_said_is_held_in_ram(kb: KnowledgeBase) -> None:
    chat, engine = kb.session("ram", top_k=3, max_tokens=12), kb.engine
    for message in (BRIDGE, MOON, CATS, BRIDGE, MOON):
        report = reply_to(kb, chat, message)
        assert report.hits == 3
        engine.drain()
        held_tokens = engine.prefix_cache.n_bytes / engine.decoder.kv_bytes_per_token
        # Each prompt's head up to its chunks is held, too, beside the turn that takes its place.
        assert held_tokens < 2 * said_tokens(report)
        assert report.prompt_tokens > 1.4 * said_tokens(report)


def test_what_outgrows_the_window_is_dropped(kb: KnowledgeBase) -> None:
    chat = kb.session("long", top_k=1, max_tokens=8)
    window = kb.engine.decoder.context_window_tokens
    filler = "Tell me more, and take your time, about every single thing that comes to your mind. " * 12
    seen = 0
    for n in range(24):
        reply = chat.chat(f"{filler} {n}")
        assert reply.report is not None
        assert reply.report.prompt_tokens < window
        if len(chat.turns) <= seen:
            break
        seen = len(chat.turns)
    else:
        pytest.fail("nothing was dropped")
    assert chat.turns[-1].question.endswith(str(n))
    assert len(chat.turns) < n
    # The next turn finds all that is left.
    report = reply_to(kb, chat, MOON)
    assert said_tokens(report) - 16 <= report.prefix_tokens <= said_tokens(report)


def test_a_bounded_number_of_turns(kb: KnowledgeBase) -> None:
    chat = kb.session("short", top_k=1, max_turns=4, max_tokens=3)
    counts = []
    for n in range(10):
        chat.chat(f"{MOON} {n}")
        counts.append(len(chat.turns))
    assert max(counts) == 4
    assert counts[4] == 2
    with KnowledgeBase(kb.store.directory, model=str(kb.models._model)) as other:
        assert other.session("short").turns == chat.turns


def test_a_message_that_does_not_fit_is_refused_and_forgotten(kb: KnowledgeBase) -> None:
    chat = kb.session("big", max_tokens=3)
    chat.chat(BRIDGE)
    with pytest.raises(ContextWindowError, match="4096"):
        chat.chat("word " * 9000)
    assert len(chat.turns) == 1
    assert chat.chat(MOON).text


def test_streams(kb: KnowledgeBase) -> None:
    chat = kb.session("stream", max_tokens=12)
    with chat.stream(BRIDGE) as stream:
        text = "".join(stream)
    assert text == stream.reply.text
    assert chat.turns[-1].answer == text.strip()
    stream = chat.stream(MOON)
    heard = next(stream)
    stream.close()
    stream.close()
    assert chat.turns[-1].question == MOON
    assert chat.turns[-1].answer.startswith(heard.strip())
    assert chat.last_report is not None
    assert chat.last_report.finish_reason == "cancelled"
    assert chat.last_report.prefix_tokens > 0
    chat.stream(CATS).close()  # nothing was said
    assert len(chat.turns) == 2


def test_sessions_of_one_name_share_their_turns_and_others_do_not(kb: KnowledgeBase) -> None:
    one, same, other = (kb.session(name, max_tokens=3) for name in ("one", "one", "other"))
    one.chat(BRIDGE)
    assert same.turns == one.turns != ()
    assert other.turns == ()
    same.clear()
    assert one.turns == kb.session("one").turns == ()
    assert one.chat(MOON).text


def test_many_threads_in_one_chat(kb: KnowledgeBase) -> None:
    chat = kb.session("threads", max_tokens=3, top_k=1)
    failed: list[BaseException] = []

    def ask(n: int) -> None:
        try:
            chat.chat(f"{MOON} {n}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert {turn.question for turn in chat.turns} == {f"{MOON} {n}" for n in range(8)}
    assert Conversation(kb.store.directory / "sessions", "threads").turns == chat.turns


@pytest.mark.parametrize(
    "name", ["", "..", "../up", "a/b", ".hidden", "a b", "x" * 129, "caf\xe9", "a\n", 7, None, ["x"]]
)
def test_an_id_is_a_plain_word(kb: KnowledgeBase, name: object) -> None:
    with pytest.raises(InvalidSettingError, match="id is 1 to 128"):
        kb.session(name)  # type: ignore[arg-type]


def test_a_turn_recomputes_less_than_a_prompt_that_is_all_chunks(kb: KnowledgeBase) -> None:
    reply = kb.session("default", max_tokens=2).chat(BRIDGE)
    assert reply.report is not None
    assert reply.report.ratio == DEFAULT_RATIO < kb.engine.settings.ratio
    chosen = kb.session("chosen", max_tokens=2, ratio=0.5).chat(BRIDGE)
    assert chosen.report is not None
    assert chosen.report.ratio == 0.5


def test_what_cannot_be_asked_is_refused(kb: KnowledgeBase, tmp_path: Path) -> None:
    with pytest.raises(EmptyPromptError):
        kb.session("a").chat(" \n")
    with pytest.raises(InvalidSettingError):
        kb.session("a").chat(None)  # type: ignore[arg-type]
    for settings in ({"ratio": 2.0}, {"max_tokens": 0}, {"colour": "red"}, {"max_turns": "3"}, {"top_k": 0}):
        with pytest.raises(InvalidSettingError):
            kb.session("a", **settings)
    with pytest.raises(InvalidSettingError):
        kb.session("a").chat("Who?", colour="red")
    with pytest.raises(InvalidSettingError, match="number of a session's sources"):
        kb.session("a").chat("Who?", top_k=5)
    with KnowledgeBase(tmp_path / "empty") as empty, pytest.raises(IngestError):
        empty.session("a")


@pytest.mark.parametrize("stop", [str, lambda text: [text], lambda text: (text,), lambda text: iter([text])])
def test_stop_strings_are_given_as_for_a_query(kb: KnowledgeBase, stop: Callable[[str], Any]) -> None:
    how: dict[str, Any] = {"top_k": 2, "max_tokens": 12}
    whole = kb.query(BRIDGE, **how).text
    assert kb.query(BRIDGE, stop=stop(whole[3]), **how).text == whole[: whole.index(whole[3])]
    said = kb.session("whole", **how).chat(BRIDGE).text
    assert kb.session("all", stop=stop(said[3]), **how).chat(BRIDGE).text == said[: said.index(said[3])]
    assert kb.session("one", **how).chat(BRIDGE, stop=stop(said[3])).text == said[: said.index(said[3])]
    with pytest.raises(InvalidSettingError, match="stop"):
        kb.session("empty", stop="")


def test_names_that_differ_in_capitals_alone_are_two_conversations_on_every_disk(tmp_path: Path) -> None:
    for name in ("Bob", "bob", "BOB"):
        Conversation(tmp_path, name).add(Turn(f"Who am I? {name}", "You."))
    assert [turn.question for turn in Conversation(tmp_path, "Bob").turns] == ["Who am I? Bob"]
    assert len({path.name.lower() for path in tmp_path.glob("*.jsonl")}) == 3


def test_a_file_that_was_cut_off_loses_one_turn_at_most(tmp_path: Path) -> None:
    turns = [Turn(f"question {n} \ud83d", f"answer {n}") for n in range(3)]
    conversation = Conversation(tmp_path, "a")
    for turn in turns:
        conversation.add(turn)
    whole = (tmp_path / "a.jsonl").read_bytes()
    for cut in range(0, len(whole), 3):
        (tmp_path / "a.jsonl").write_bytes(whole[:cut])
        found = Conversation(tmp_path, "a")
        complete = whole[:cut].count(b"\n")
        assert found.turns[:complete] == tuple(turns[:complete])
        found.add(turns[-1])
        assert Conversation(tmp_path, "a").turns == found.turns
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(StoreError):
        Conversation(tmp_path, "b")


@pytest.mark.parametrize("damaged", ["{no JSON", '{"question": "q"}', "[" * 50_000, "\x00\x00"])
def test_a_damaged_line_costs_no_turn_behind_it(tmp_path: Path, damaged: str) -> None:
    turns = [Turn(f"question {n}", f"answer {n}") for n in range(3)]
    for turn in turns:
        Conversation(tmp_path, "a").add(turn)
    file = tmp_path / "a.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], damaged, lines[2]]) + "\n")
    assert Conversation(tmp_path, "a").turns == (turns[0], turns[2])
    assert file.read_text().splitlines() == [lines[0], lines[2]]


# -- two at once ------------------------------------------------------------------------------------------------------


def turn(n: int, who: str = "a") -> Turn:
    return Turn(f"question {n} of {who}", f"answer {n}")


def test_two_knowledge_bases_share_a_chat(kb: KnowledgeBase) -> None:
    with KnowledgeBase(kb.store.directory, model=str(kb.models._model)) as other_kb:
        chats = [each.session("shared", top_k=1, max_turns=4, max_tokens=3) for each in (kb, other_kb)]
        asked = [f"{MOON} {n}" for n in range(7)]
        for n, message in enumerate(asked):
            report = reply_to((kb, other_kb)[n % 2], chats[n % 2], message)
            assert chats[0].turns == chats[1].turns == kb.session("shared").turns
            assert len(chats[0].turns) <= 4
            assert report.chunks[0].start > 0
        assert [said.question for said in chats[0].turns] == asked[-len(chats[0].turns) :]
        chats[1].clear()
        assert chats[0].turns == ()


def test_what_others_said_meanwhile_is_kept(tmp_path: Path) -> None:
    one, other = Conversation(tmp_path, "a"), Conversation(tmp_path, "a")
    one.add(turn(0))
    other.add(turn(1))
    assert one.turns == other.turns == (turn(0), turn(1))
    seen = other.turns
    one.add(turn(2))
    other.add(turn(3), forget=seen[:1])  # does not know of 2
    assert one.turns == other.turns == Conversation(tmp_path, "a").turns == (turn(1), turn(2), turn(3))
    one.add(turn(4), forget=seen[:1])  # gone already
    assert other.turns == (turn(1), turn(2), turn(3), turn(4))
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join([lines[0], b"{damaged\n", *lines[2:], b'{"question": "cut o']))
    one.add(turn(5))
    assert one.turns == other.turns == Conversation(tmp_path, "a").turns == (turn(1), turn(3), turn(4), turn(5))
    other.clear()
    assert one.turns == ()


PROCESS = """
import sys
from pathlib import Path
from ragblend.kb.conversation import Conversation, Turn
folder, who = Path(sys.argv[1]), sys.argv[2]
conversation = Conversation(folder, "a")
sys.stdin.readline()  # both begin at once
for n in range(40):
    said = conversation.turns
    forgotten = said[:4] if len(said) > 8 else ()
    conversation.add(Turn(f"question {n} of {who}", f"answer {n}"), forget=forgotten)
    print(*(turn.question for turn in forgotten), sep="\\n")
"""


def test_two_processes_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, tmp_path, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for who in "ab"
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    left = [said.question for said in Conversation(tmp_path, "a").turns]
    asked = {turn(n, who).question for n in range(40) for who in "ab"}
    assert len(left) == len(set(left))
    assert set(left) | {line for lines in printed for line in lines.splitlines() if line} == asked
    assert set(os.listdir(tmp_path)) == {"a.jsonl", "sessions.lock"}


KILLED = """
import os, sys
from pathlib import Path
from ragblend.kb.conversation import Conversation, Turn
conversation = Conversation(Path(sys.argv[1]), "a")
os.replace = lambda *_: os._exit(9)
conversation.add(Turn("never", "said"), forget=conversation.turns[:1])
"""


def test_a_kill_while_a_file_is_made_again_costs_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    turns = tuple(map(turn, range(3)))
    for each in turns:
        Conversation(tmp_path, "a").add(each)
    before = set(os.listdir(tmp_path))
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", KILLED, tmp_path]).returncode == 9
    assert len(set(os.listdir(tmp_path)) - before) == 1
    Conversation(tmp_path, "b")
    assert set(os.listdir(tmp_path)) == before
    assert Conversation(tmp_path, "a").turns == turns


def test_what_cannot_be_removed_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn("Who?", "Mira.")
    conversation = Conversation(tmp_path, "one")
    conversation.add(turn)

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(StoreError, match="cannot remove"):
            conversation.clear()
    assert conversation.turns == (turn,)
    conversation.clear()
    assert conversation.turns == Conversation(tmp_path, "one").turns == ()


def test_a_turn_that_could_not_be_written_is_written_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(tmp_path, "a")
    conversation.add(turn(0))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreFullError):
            conversation.add(turn(1))
    assert conversation.turns == (turn(0), turn(1))
    assert Conversation(tmp_path, "a").turns == (turn(0),)
    Conversation(tmp_path, "a").add(turn(2))
    conversation.add(turn(3))
    assert conversation.turns == Conversation(tmp_path, "a").turns == (turn(0), turn(2), turn(1), turn(3))
