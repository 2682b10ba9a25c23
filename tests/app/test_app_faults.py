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


def test_a_store_that_cannot_be_written_answers_all_the_same(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    """On a mount that is read-only for everybody."""
    store, document = tmp_path / "store", tmp_path / "bridge.txt"
    document.write_text("The Old Harbour Bridge was designed by Mira Solheim in 1931.")
    assert cli("ingest", document).code == 0
    private = ["unshare", "-Urm", "sh", "-c"]
    mount = f'mount --bind "{store}" "{store}" && mount -o remount,ro,bind "{store}"'
    if not shutil.which("unshare") or subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("needs a mount of its own")
    # One process, since models take longer to import than to run.
    code = """
import json, subprocess, sys
from pathlib import Path
from typer.testing import CliRunner
from ragblend.cli import app

document = sys.argv[1]
asked = ["query", "Who?", "--max-tokens", "2", "--json"]

def run(*args):
    done = CliRunner().invoke(app, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    print(json.dumps([done.exit_code, json.loads(done.stdout), done.stderr]))

run(*asked)
run(*asked)
run("stats", "--json")
run("verify", "--json")
subprocess.run(["mount", "-o", "remount,rw,bind", "store"], check=True)
for payload in Path("store/kv").glob("*.safetensors"):
    payload.write_bytes(payload.read_bytes()[:-3] + b"...")
subprocess.run(["mount", "-o", "remount,ro,bind", "store"], check=True)
run(*asked)
run("verify", "--json")
run("verify", "--repair", "--json")
run("ingest", document, "--json")
run("calibrate", "--json")
from ragblend import KnowledgeBase
from ragblend.errors import StoreError
with KnowledgeBase("store") as kb:
    try:
        kb.session("someone")
    except StoreError as error:
        print(json.dumps(str(error)))
"""
    python = shlex.join([*RUN[:-1], code, str(document)])
    done = subprocess.run(
        [*private, f"{mount}\n{python}"],
        env={**os.environ, "RAGBLEND_STORE": str(store), "RAGBLEND_MODEL": str(tiny_model)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    query, again, stats, verify, damaged, found, *refused, session = map(json.loads, done.stdout.splitlines())
    for code, reply, err in (query, again):
        assert (code, err) == (0, "")
        assert (reply["report"]["hits"], reply["report"]["misses"]) == (1, 0)
    assert (stats[0], stats[1]["documents"]) == (0, 1)
    assert (verify[0], verify[1]["ok"]) == (0, True)
    assert [use["status"] for use in damaged[1]["report"]["chunks"]] == ["corrupt"]
    assert (found[0], len(found[1]["bad"])) == (1, stats[1]["chunks"])
    for code, reply, _ in refused:
        assert (code, reply["error"]["type"]) == (1, "StoreError")
        assert "read-only" in reply["error"]["message"]
    assert "read-only" in session
    assert cli("verify", "--repair", "--json").json["deleted"] == stats[1]["chunks"]


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
