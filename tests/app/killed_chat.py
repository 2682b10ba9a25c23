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
from pathlib import Path

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


def main(model: Path, embedding_model: Path, folder: Path, kills: int, seed: int) -> None:
    def opened() -> KnowledgeBase:
        return KnowledgeBase(folder / "store", model=model, embedding_model=str(embedding_model))

    with opened() as kb:
        kb.ingest_texts(TEXTS)
        states: dict[int, Turns] = {-1: ()}
        started = time.monotonic()
        chat(kb, "undisturbed", lambda turns: states.update({number(turns): turns}))
        turn_s = (time.monotonic() - started) / MESSAGES
    assert len(states) > MESSAGES // 2, "the model says nothing"
    assert states[max(states)][0].question.split()[1] != "0", "nothing was forgotten"
    sessions, log = folder / "store" / "sessions", folder / "log"
    file = sessions / "disturbed.jsonl"
    chance = random.Random(seed)
    in_a_turn = done = 0
    while done < kills:
        log.write_bytes(b"")
        pid = os.fork()
        if not pid:
            try:
                with opened() as kb, log.open("ab", buffering=0) as written:
                    chat(kb, "disturbed", lambda turns: written.write(f"{number(turns)}\n".encode()))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        while not log.read_bytes():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 8 * turn_s))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        noted = int(log.read_text().split()[-1])
        turns = Conversation(sessions, "disturbed").turns
        assert turns == states[number(turns)], f"after message {number(turns)}: {turns}"
        assert number(turns) in (noted, min((n for n in states if n > noted), default=noted))
        assert not file.exists() or file.read_bytes().count(b"\n") == len(turns)
        if noted == max(states):  # from the beginning again
            file.unlink()
        elif os.WIFSIGNALED(status):
            done += 1
            in_a_turn += number(turns) == noted
    print(json.dumps({"kills": done, "in_a_turn": in_a_turn}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))  # type: ignore[arg-type]
