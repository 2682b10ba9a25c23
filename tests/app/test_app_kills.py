"""Ingests that are killed at random moments, again and again: nothing is lost, left over, or done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("RAGBLEND_TEST_KILLS", "12"))
SEED = os.environ.get("RAGBLEND_TEST_SEED", "0")


def test_killed_ingests_end_as_if_nobody_had_disturbed_them(
    tiny_model: Path, tiny_embedding_model: Path, tmp_path: Path
) -> None:
    program = Path(__file__).with_name("killed_ingest.py")
    done = subprocess.run(
        [
            sys.executable,
            program,
            tiny_model,
            tiny_embedding_model,
            tmp_path,
            str(KILLS),
            os.environ.get("RAGBLEND_TEST_SEED", "0"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["kills"] == KILLS
    assert found["rounds"] >= 2
    assert found["repeated"] == []
