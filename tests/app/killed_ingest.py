"""A program that kills ingests at random moments and prints what came of it. Run by test_app_kills.py.

    killed_ingest.py MODEL EMBEDDING_MODEL FOLDER KILLS SEED

Each ingest is a process of its own. The documents change whenever one has come to its end; each time the result is
compared with that of a store whose ingests nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from forks import forked

from ragblend.kb import KnowledgeBase
from ragblend.kb.index import DocumentIndex
from ragblend.store.kvstore import KVStore


class Trial:
    """Two stores over the same documents: one is disturbed, the other is not."""

    def __init__(self, model: Path, embedding_model: Path, folder: Path, seed: int) -> None:
        self.model, self.embedding_model, self.folder = model, embedding_model, folder
        self.random = random.Random(seed)
        self.documents, self.log = folder / "documents", folder / "log"
        self.documents.mkdir()
        self.kills = Counter[str]()
        self.rounds = 0

    def ingest(self, store: str) -> None:
        with self.opened(store) as kb:
            kb.ingest([self.documents], prune=True)

    def opened(self, store: str) -> KnowledgeBase:
        return KnowledgeBase(
            self.folder / store, model=self.model, embedding_model=str(self.embedding_model), chunk_tokens=60
        )

    def change_documents(self, first: int = 0) -> None:
        """Some are written anew, some go, some come. first: number of the first of the twelve sections they are of."""
        for n in range(9):
            path = self.documents / f"{n}.md"
            choice = self.random.random()
            if choice < 0.15:
                path.unlink(missing_ok=True)
            elif choice < 0.5 or not self.rounds:
                # Sections are shared by documents, and few enough to come back.
                sections = self.random.sample(range(first, first + 12), 3)
                path.write_text(
                    "".join(f"# Place {s}\n\nIt has a bridge of {s * 7} metres. {'So. ' * 9}\n\n" for s in sections)
                )

    def fork(self, store: str) -> int:
        return forked(lambda: self.ingest(store))

    def undisturbed(self) -> float:
        """Seconds an ingest takes that nobody disturbs."""
        started = time.monotonic()
        _, status = os.waitpid(self.fork("undisturbed"), 0)
        assert status == 0
        return time.monotonic() - started

    def killed(self, store: str, after_s: float) -> bool:
        """Start an ingest and kill it; False: it was done before."""
        pid = self.fork(store)
        deadline = time.monotonic() + after_s
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert status == 0
                return False
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.WIFSIGNALED(status)

    def events(self) -> list[tuple[str, str]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [tuple(line.split("\t", 1)) for line in lines]  # type: ignore[misc]

    def contents(self, store: str) -> dict[str, Any]:
        with self.opened(store) as kb:
            assert kb.verify().ok
            assert kb.index.loose_keys() == kb.index.stale_keys() == []
            chunks = {
                name: [(chunk.text, sorted(chunk.kv_keys)) for chunk in kb.index.chunks_of(name, kb.models.signature)]
                for name in sorted(kb.index.digests())
            }
            keys = kb.store.keys()
            assert keys == kb.index.kv_keys(kb.models.signature), "KV that nobody knows of"
            return {"chunks": chunks, "keys": keys, "notes": kb.store.notes(keys)}


def traced(trial: Trial) -> None:
    """Write down, from inside the children, what was stored and committed for good."""

    def note(event: str, name: str) -> None:
        handle = os.open(trial.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{event}\t{name}\n".encode())
        os.close(handle)

    put, replace = KVStore.put, DocumentIndex.replace

    def traced_put(self: KVStore, key: str, *args: Any, **kwargs: Any) -> int:
        written = put(self, key, *args, **kwargs)
        note(f"put {self.directory.name}", key)
        return written

    def traced_replace(self: DocumentIndex, document: str, *args: Any, **kwargs: Any) -> None:
        replace(self, document, *args, **kwargs)
        note(f"commit {self.directory.parent.name}", document)

    KVStore.put, DocumentIndex.replace = traced_put, traced_replace  # type: ignore[method-assign]


def main(model: Path, embedding_model: Path, folder: Path, kills: int, seed: int) -> None:
    trial = Trial(model, embedding_model, folder, seed)
    trial.change_documents()
    traced(trial)
    repeated: list[str] = []
    longest = 0.0
    while trial.kills["killed"] < kills:
        trial.log.unlink(missing_ok=True)
        seconds = trial.undisturbed()
        longest = max(longest, seconds)
        while trial.killed("disturbed", trial.random.uniform(0.0, seconds)):
            trial.kills["killed"] += 1
            if trial.kills["killed"] >= kills:
                assert not trial.killed("disturbed", 600.0)
                break
        for event, times in Counter(trial.events()).items():
            # What was refreshed and not committed may be deleted and made again, but not in a store that begins.
            if times > 1 and (event[0] == "commit disturbed" or (event[0] == "put disturbed" and not trial.rounds)):
                repeated.append("\t".join(event))
        assert trial.contents("disturbed") == trial.contents("undisturbed"), f"round {trial.rounds}"
        trial.rounds += 1
        trial.change_documents()
    # Documents that change before what was killed could go on: nothing of what it began with is left.
    for n in range(kills // 2):
        trial.killed("restless", trial.random.uniform(0.3, 1.0) * longest)
        trial.change_documents(first=100 * n)
    trial.ingest("restless")
    trial.ingest("undisturbed")
    restless, undisturbed = (trial.contents(store)["chunks"] for store in ("restless", "undisturbed"))
    assert restless.keys() == undisturbed.keys()
    assert [[text for text, _ in chunks] for chunks in restless.values()] == [
        [text for text, _ in chunks] for chunks in undisturbed.values()
    ]
    computed = Counter(event for event, _ in trial.events())
    print(json.dumps({"kills": trial.kills["killed"], "rounds": trial.rounds, "repeated": repeated, **computed}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))  # type: ignore[arg-type]
