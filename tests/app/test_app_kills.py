"""Ingests and chats that are killed at random moments, again and again: nothing is lost, left over, or done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KILLS = int(os.environ.get("RAGBLEND_TEST_KILLS", "12"))
SEED = os.environ.get("RAGBLEND_TEST_SEED", "0")


def outcome(program: str, kills: int, *args: Path) -> dict[str, Any]:
    """What the program prints in the end."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), *args, str(kills), SEED],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["kills"] == kills
    return dict(found)


def test_killed_ingests_end_as_if_nobody_had_disturbed_them(
    tiny_model: Path, tiny_embedding_model: Path, tmp_path: Path
) -> None:
    found = outcome("killed_ingest.py", KILLS, tiny_model, tiny_embedding_model, tmp_path)
    assert found["rounds"] >= 2
    assert found["repeated"] == []


def test_a_killed_chat_is_as_it_was_after_its_last_finished_turn(
    tiny_model: Path, tiny_embedding_model: Path, tmp_path: Path
) -> None:
    found = outcome("killed_chat.py", KILLS // 2, tiny_model, tiny_embedding_model, tmp_path)
    assert found["in_a_turn"] > 0
