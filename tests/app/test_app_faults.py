"""Ingests that are killed, interrupted or run out of disk: what was committed stays, and the next run goes on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
from command_line import RUN, Cli

pytestmark = pytest.mark.usefixtures("embedding_model")
DOCUMENTS = 30
# Whoever runs the tests in the background has SIGINT ignored, and children inherit that; a terminal's child does not.
SET_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "


@pytest.fixture
def many_documents(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for n in range(DOCUMENTS):
        text = "\n\n".join(f"Paragraph {i} of document {n} tells what {i * n} is good for." for i in range(12))
        (folder / f"{n:03}.txt").write_text(text)
    return folder


def committed(store: Path) -> int:
    """Documents in the index, looked up from outside while somebody else writes."""
    if not (store / "index" / "index.db").exists():
        return 0
    with closing(sqlite3.connect(f"file:{store}/index/index.db?mode=ro", uri=True)) as db:
        try:
            return int(db.execute("SELECT COUNT(*) FROM documents").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def start_and_stop(documents: Path, store: Path, model: Path, sent: signal.Signals) -> subprocess.Popen[str]:
    """Start an ingest, wait until some documents are committed, and send a signal."""
    process = subprocess.Popen(
        [*RUN[:-1], SET_SIGINT + RUN[-1], "ingest", str(documents), "--json"],
        env={**os.environ, "RAGBLEND_STORE": str(store), "RAGBLEND_MODEL": str(model)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while committed(store) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sent)
    return process


def stored_keys(store: Path) -> list[str]:
    from ragblend.store.kvstore import KVStore

    with KVStore(store) as opened:
        return opened.keys()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_ingest_goes_on(
    cli: Cli, many_documents: Path, tiny_model: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    store = tmp_path / "store"
    process = start_and_stop(many_documents, store, tiny_model, sent)
    out, err = process.communicate(timeout=60)
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert json.loads(out)["error"]["type"] == "KeyboardInterrupt"
        assert "Traceback" not in err
    kept = committed(store)
    assert 3 <= kept < DOCUMENTS, "it was stopped in the middle"
    assert cli("verify", "--json").json["bad"] == []

    resumed = cli("ingest", many_documents, "--json").json
    assert resumed["unchanged"] == kept
    assert resumed["documents"] == DOCUMENTS - kept

    undisturbed = cli("ingest", many_documents, "--store", tmp_path / "undisturbed", "--json").json
    # Nothing that was stored is computed again: at most the one chunk whose payload was being written.
    assert resumed["computed"] + resumed["already_stored"] == resumed["chunks"]
    assert stored_keys(store) == stored_keys(tmp_path / "undisturbed")
    assert resumed["chunks"] < undisturbed["chunks"]
    assert cli("verify").code == 0
    assert cli("stats", "--json").json["documents"] == DOCUMENTS


def test_a_full_disk_is_explained_and_the_store_stays_valid(
    many_documents: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """On a file system of its own that really is full, and later has room again."""
    store = tmp_path / "store"
    store.mkdir()
    private = ["unshare", "-Urm", "sh", "-c"]
    mount = f'mount -t tmpfs -o size=1m tmpfs "{store}"'
    if not shutil.which("unshare") or subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("needs a small file system of its own")
    ingest = f'ragblend ingest "{many_documents}" --json; echo "code $?"'
    script = f"""
ragblend() {{ {shlex.join(RUN)} "$@"; }}
{mount}
{ingest}
ragblend verify > "{tmp_path}/verified" 2>&1; echo "code $?"
mount -o remount,size=99m "{store}"
{ingest}
"""
    done = subprocess.run(
        [*private, script],
        env={**os.environ, "RAGBLEND_STORE": str(store), "RAGBLEND_MODEL": str(tiny_model)},
        capture_output=True,
        text=True,
    )
    full, code_full, code_verify, resumed, code_resumed = done.stdout.splitlines()
    assert (code_full, code_verify, code_resumed) == ("code 1", "code 0", "code 0"), done.stderr
    assert json.loads(full)["error"]["type"] == "StoreFullError"
    assert 0 < json.loads(resumed)["unchanged"] < DOCUMENTS
    assert json.loads(resumed)["documents"] + json.loads(resumed)["unchanged"] == DOCUMENTS
