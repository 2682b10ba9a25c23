"""A program that kills chats at random moments and prints what came of it. Run by test_app_kills.py.

    killed_chat.py MODEL EMBEDDING_MODEL FOLDER KILLS SEED

Every process that opens the chat after a kill asks the messages that come next. At ratio 1 the model answers the same
history with the same words, so what was said after so many messages is known from a chat that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

from forks import forked

from ragblend.kb import KnowledgeBase
from ragblend.kb.conversation import Conversation, Turn

MESSAGES = 24
TEXTS = {f"place {n}": f"Place {n} has a bridge of {n * 7} metres, and people cross it on foot." for n in range(6)}
Turns = tuple[Turn, ...]


def number(turns: Sequence[Turn]) -> int:
    """Of the last message that was answered, from 0; -1: of none."""
    return int(turns[-1].question.split()[1]) if turns else -1


def chat(kb: KnowledgeBase, name: str, note: Callable[[Turns], None]) -> None:
    # Old turns are forgotten on the way, which writes the file anew.
    session = kb.session(name, top_k=2, max_turns=6, max_tokens=24, ratio=1.0)
    note(session.turns)
    for n in range(number(session.turns) + 1, MESSAGES):
        said = session.chat(f"Message {n} asks how long the bridge of place {n % 6} is.").text.strip()
        assert not said or session.turns[-1].answer == said
        note(session.turns)


class Trial:
    """Chats in processes of their own, which note what was said after each turn, and when."""

    def __init__(self, model: Path, embedding_model: Path, folder: Path) -> None:
        self._model, self._embedding_model, self._store = model, str(embedding_model), folder / "store"
        self._log = folder / "log"
        self.sessions = self._store / "sessions"

    def start(self, name: str) -> int:
        """The id of a process that chats, once it has opened the chat."""
        self._log.write_bytes(b"")

        def work() -> None:
            with (
                KnowledgeBase(self._store, model=self._model, embedding_model=self._embedding_model) as kb,
                self._log.open("ab", buffering=0) as log,
            ):
                kb.ingest_texts(TEXTS)  # only the first one has something to do
                chat(kb, name, lambda turns: _write(log.fileno(), turns))

        pid = forked(work)
        deadline = time.monotonic() + 240
        while not self.noted():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it began"
            assert time.monotonic() < deadline, "it does not begin"
            time.sleep(0.005)
        return pid

    def noted(self) -> list[tuple[float, Turns]]:
        lines = self._log.read_bytes().splitlines()
        return [(at, tuple(Turn(*turn) for turn in turns)) for at, turns in map(json.loads, lines)]


def _write(handle: int, turns: Turns) -> None:
    os.write(handle, json.dumps([time.monotonic(), list(map(astuple, turns))]).encode() + b"\n")


def main(model: Path, embedding_model: Path, folder: Path, kills: int, seed: int) -> None:
    trial = Trial(model, embedding_model, folder)
    _, status = os.waitpid(trial.start("undisturbed"), 0)
    assert status == 0
    noted = trial.noted()
    turn_s = (noted[-1][0] - noted[0][0]) / MESSAGES
    states = {number(turns): turns for _, turns in noted}
    assert len(states) > MESSAGES // 2, "the model says nothing"
    assert number(states[max(states)][:1]) > 0, "nothing was forgotten"
    file = trial.sessions / "disturbed.jsonl"
    chance = random.Random(seed)
    in_a_turn = done = 0
    while done < kills:
        pid = trial.start("disturbed")
        time.sleep(chance.uniform(0.0, 8 * turn_s))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        finished = number(trial.noted()[-1][1])
        turns = Conversation(trial.sessions, "disturbed").turns
        assert turns == states[number(turns)], f"after message {number(turns)}: {turns}"
        assert number(turns) in (finished, min((n for n in states if n > finished), default=finished))
        assert not file.exists() or file.read_bytes().count(b"\n") == len(turns)
        if finished == max(states):  # from the beginning again
            file.unlink()
        elif os.WIFSIGNALED(status):
            done += 1
            in_a_turn += number(turns) == finished
    print(json.dumps({"kills": done, "in_a_turn": in_a_turn}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))  # type: ignore[arg-type]
