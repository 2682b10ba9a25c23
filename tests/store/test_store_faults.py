"""Full disks, read-only folders, killed and competing processes: the store stays whole and says what happened."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from ragblend.errors import StoreError, StoreFullError
from ragblend.store import kvstore
from ragblend.store.kvstore import KVStore

ROOT = Path(__file__).parents[2]

# Every child starts with this: the same chunks in every process, from the seed alone.
PRELUDE = """
import os, random, sys, time, torch
torch.set_num_threads(1)
from ragblend.errors import *
from ragblend.kv import LayerKV
from ragblend.store import kvstore
from ragblend.store.kvstore import KVStore

def chunk(seed, n_tokens=100):
    make = torch.Generator().manual_seed(seed)
    return [LayerKV(torch.randn((2, n_tokens, 16), generator=make), torch.randn((2, n_tokens, 8), generator=make))
            for _ in range(3)]

def right(reader, seed):
    with reader:
        return all(torch.equal(reader.read_layer_kv(i).key, layer.key) for i, layer in enumerate(chunk(seed)))

directory = sys.argv[1]
"""


def child(code: str, *args: object, prefix: tuple[str, ...] = (), **options) -> subprocess.Popen:
    command = [*prefix, sys.executable, "-c", PRELUDE + code, *map(str, args)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    return output


@pytest.fixture
def store(tmp_path, make_chunk):
    with KVStore(tmp_path / "store") as store:
        store.put("before", make_chunk(1))
        yield store


def assert_whole(store: KVStore, make_chunk) -> None:
    """Only what was committed before is there, and it is intact."""
    assert store.verify().ok
    assert store.keys() == ["before"]
    assert len(list((store.directory / "kv").glob("*.safetensors"))) == 1
    with store.open("before") as reader:
        assert torch.equal(reader.read_layer_kv(0).key, make_chunk(1)[0].key)


# ---- full disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_space_for_the_payload(store, make_chunk, monkeypatch, code):
    def half(path, pieces):
        path.write_bytes(b"".join(pieces[: len(pieces) // 2]))
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(kvstore, "_write_file", half)
        for key in ("new", "before"):
            with pytest.raises(StoreFullError, match="free some space"):
                store.put(key, make_chunk(2), overwrite=True)
    assert_whole(store, make_chunk)
    store.put("new", make_chunk(2))


def test_no_space_for_the_index(store, make_chunk):
    ((pages,),) = store._kv.rows("PRAGMA page_count")
    store._kv.rows(f"PRAGMA max_page_count = {pages}")  # a real SQLITE_FULL, when the next page is needed

    def put_many() -> None:
        for index in range(1000):
            store.put(f"{index:0200}", make_chunk(2))

    with pytest.raises(StoreFullError):
        put_many()
    assert not store._kv._con.in_transaction
    assert store.verify().ok
    assert len(store) == len(list((store.directory / "kv").glob("*.safetensors"))) > 1
    store._texts.rows(f"PRAGMA max_page_count = {store._texts.rows('PRAGMA page_count')[0][0]}")
    with pytest.raises(StoreFullError):
        store.remember(index.to_bytes(60, "big") for index in range(10_000))
    assert store.remembered() == []
    store._kv.rows("PRAGMA max_page_count = 1000000")
    store.put("new", make_chunk(2))


def refuse(what: str):
    """An SQLite authorizer: the one statement fails, everything else works."""

    def authorize(action, name, *_):
        denied = (action == sqlite3.SQLITE_TRANSACTION and name == what) or (
            action == sqlite3.SQLITE_UPDATE and what == f"UPDATE {name}"
        )
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    return authorize


@pytest.mark.parametrize("what", ["COMMIT", "BEGIN", "UPDATE Cache", "UPDATE Settings"])
def test_a_failing_transaction_changes_nothing(store, make_chunk, what):
    """Above all at COMMIT: neither the old payload's file nor an evicted one may be gone by then."""
    store._kv.payload_limit_bytes = 2000
    store._kv._con.set_authorizer(refuse(what))
    try:
        for key in ("before", "new") if what != "UPDATE Cache" else ("before",):
            with pytest.raises(StoreError):
                store.put(key, make_chunk(2, n_tokens=11), overwrite=True)
            assert not store._kv._con.in_transaction
        if what != "UPDATE Cache":
            with pytest.raises(StoreError):
                store.delete("before")
        opened = store.open_many(["before", "none"])  # reading goes on, without touching the LRU order
        assert [status for _, status in opened] == ["hit", "miss"]
        opened[0].reader.close()
    finally:
        store._kv._con.set_authorizer(None)
    assert_whole(store, make_chunk)


def test_file_size_limit_of_the_process(tmp_path):
    """A real failing write, half way through the payload."""
    code = """
import resource
with KVStore(directory) as store:
    store.put("before", chunk(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    try:
        store.put("new", chunk(2, n_tokens=1000))
    except StoreFullError:
        print("full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert store.keys() == ["before"] and store.verify().ok and right(store.open("before"), 1)
"""
    assert finish(child(code, tmp_path)) == "full\n"


@pytest.fixture
def small_disk(tmp_path) -> tuple[str, ...]:
    """What to start a child with, so that tmp_path is a file system of 1 MB there."""
    mount = ("unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("needs a small file system of its own")
    return mount


def test_a_store_on_a_full_disk_can_be_opened_and_read(tmp_path, small_disk):
    code = """
with KVStore(directory + "/store", size_limit_bytes=1 << 30) as store:
    store.put("a", chunk(1))
    store.remember([b"text"])
with open(directory + "/rest", "wb", buffering=0) as rest:
    try:
        while True:
            rest.write(b"x" * 512)
    except OSError:
        pass
with KVStore(directory + "/store") as store:
    assert store.read_only and store.verify().ok and store.stats().chunks == 1 and store.remembered() == [b"text"]
    assert [status for _, status in store.open_many(["a", "b"])] == ["hit", "miss"] and right(store.open("a"), 1)
    for write in (lambda: store.put("b", chunk(2)), lambda: store.delete("a"), lambda: KVStore(directory + "/other")):
        try:
            write()
        except StoreFullError:
            print("full")
os.remove(directory + "/rest")
with KVStore(directory + "/store") as store:
    store.put("b", chunk(2))
    assert not store.read_only and store.verify().ok and len(store) == 2
"""
    assert finish(child(code, tmp_path, prefix=small_disk)) == "full\n" * 3


def test_a_disk_that_really_is_full(tmp_path, small_disk):
    code = """
with open(directory + "/ballast", "wb") as ballast:
    ballast.write(bytes(150_000))
with KVStore(directory + "/store", size_limit_bytes=1 << 30) as store:
    stored = []
    try:
        for seed in range(1000):
            store.put(f"k{seed:04}", chunk(seed))
            stored.append(seed)
    except StoreFullError as error:
        print("full")
    with open(directory + "/rest", "wb", buffering=0) as rest:  # not a single byte is left for SQLite either
        try:
            while True:
                rest.write(b"x" * 512)
        except OSError:
            pass
    for _ in range(20):
        for seed, opened in zip(stored, store.open_many([f"k{seed:04}" for seed in stored]), strict=True):
            assert opened.status == "hit" and right(opened.reader, seed), opened
    try:
        store.remember(bytes([i, j]) for i in range(256) for j in range(256))
    except StoreFullError:
        print("full")
    assert store.remembered() == []
    assert store.verify().ok and len(store) == len(stored) > 3
    os.remove(directory + "/ballast")
    store.delete("k0000")
    store.put("new", chunk(1))
    assert store.verify().ok
"""
    assert finish(child(code, tmp_path, prefix=small_disk)) == "full\nfull\n"


def test_read_only_folders_can_be_read_and_are_not_written():
    """Run as an ordinary user, whom permissions bind."""
    code = """
from pathlib import Path
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
base = Path(directory)
with KVStore(base / "store") as store:
    store.put("a", chunk(1))
    store.remember([b"text"])
    for path in [*(base / "store").rglob("*")][::-1] + [base / "store", base]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        store.put("b", chunk(2))
    except StoreError as error:
        print(error)
    assert right(store.open("a"), 1)
with KVStore(base / "store") as store:
    assert store.read_only
    assert [status for _, status in store.open_many(["a", "b"])] == ["hit", "miss"]
    assert right(store.open("a"), 1) and store.keys() == ["a"] and store.verify().ok and store.stats().chunks == 1
    assert store.remembered() == [b"text"]
    for write in (
        lambda: store.put("a", chunk(1)),
        lambda: store.delete("a"),
        lambda: store.remember([b"x"]),
        lambda: store.save_document("x", {}),
        lambda: store.verify(delete_bad=True),
    ):
        try:
            write()
        except StoreError as error:
            print(error)
    payload, = (base / "store" / "kv").glob("*.safetensors")
    payload.chmod(0o600)
    payload.write_bytes(b"damaged")
    assert store.open_many(["a"])[0].status == "corrupt"
    assert store.keys() == ["a"]
try:
    KVStore(base / "other")
except StoreError as error:
    print(error)
for path in [base, base / "store", *(base / "store").rglob("*")]:
    path.chmod(0o777)
"""
    base = tempfile.mkdtemp()  # pytest's own folders are closed to other users
    try:
        if os.getuid() == 0:
            os.chown(base, 65534, 65534)
        lines = finish(child(code, base)).splitlines()
    finally:
        shutil.rmtree(base)
    assert len(lines) == 7
    assert all("that you may write to it" in lines[n] for n in (0, -1))
    assert all("read-only" in line for line in lines[1:-1])


def test_an_index_that_became_read_only(store, make_chunk):
    """As after a remount: writers hear of it at once, readers go on."""
    database = store.directory / "kv" / "cache.db"
    store._kv.close()
    store._kv._local.con = sqlite3.connect(f"file:{database}?mode=ro", uri=True, isolation_level=None)
    began = time.perf_counter()
    with pytest.raises(StoreError, match="that you may write to it"):
        store.put("new", make_chunk(2))
    opened = store.open_many(["before", "new"])
    assert [status for _, status in opened] == ["hit", "miss"]
    assert time.perf_counter() - began < 5
    opened[0].reader.close()
    store._kv.close()
    assert_whole(store, make_chunk)


# ---- processes


STAGES = """
stage, directory = "", directory + "/store"
kvstore._SETTLE_S = 0.2

def payload_files():
    return len([name for name in os.listdir(directory + "/kv") if name.endswith(".safetensors")])

def put_and_hang(pipe):
    def hang(*_, **__):
        os.write(pipe, b"!")
        time.sleep(60)

    def half(path, pieces):
        path.write_bytes(b"".join(pieces[: len(pieces) // 2]))
        hang()

    store = KVStore(directory)
    put = store._kv.set
    if stage == "in the file":
        kvstore._write_file = half
    elif stage == "before the row":
        store._kv.set = hang
    elif stage == "before the commit":
        store._kv.set = lambda *a, **k: (put(*a, **k), hang())
    else:  # the row of the new payload is committed, the old payload's file is still there
        kvstore.os.remove = hang
    store.put("before" if stage == "after the commit" else "new", chunk(2), overwrite=True)

for stage in ("in the file", "before the row", "before the commit", "after the commit"):
    with KVStore(directory) as store:
        store.put("before", chunk(1), overwrite=True)
    pid = fork_until_told(put_and_hang)
    assert payload_files() == 2, stage
    if stage == "in the file":
        with KVStore(directory) as store:
            assert store.verify().ok and payload_files() == 2  # a file under way is no orphan
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with KVStore(directory) as store:
        assert store.verify().ok and store.keys() == ["before"] and payload_files() == 1, stage
        assert right(store.open("before"), 2 if stage == "after the commit" else 1), stage
        store.put("new", chunk(2))
        store.delete("new")
    print(stage)
"""

FORKS = """
import signal

def fork(work):
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())
        os._exit(1)

def fork_until_told(work):
    read, write = os.pipe()
    pid = fork(lambda: work(write))
    os.close(write)
    assert os.read(read, 1) == b"!"
    os.close(read)
    return pid
"""


def test_killed_in_the_middle_of_a_put(tmp_path):
    assert finish(child(FORKS + STAGES, tmp_path)).splitlines() == [
        "in the file",
        "before the row",
        "before the commit",
        "after the commit",
    ]


def test_killed_at_random_moments(tmp_path):
    """Writers that put, overwrite, delete and evict are killed again and again; the folder never breaks."""
    code = """
pick = random.Random(7)

def work(pipe):
    with KVStore(directory) as store:
        for turn in range(1_000_000):
            seed = pick.randrange(12)
            store.put(f"k{seed}", chunk(seed), overwrite=True)
            if turn == 0:
                os.write(pipe, b"!")
            if seed % 3 == 0:
                store.delete(f"k{pick.randrange(12)}")

checked = 0
with KVStore(directory, size_limit_bytes=300_000):
    pass
for turn in range(20):
    pid = fork_until_told(work)
    time.sleep(pick.uniform(0, 0.08))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    with KVStore(directory) as store:
        report = store.verify()
        assert report.ok, report
        checked += report.checked
        for key in store.keys():
            assert right(store.open(key), int(key[1:]))
        assert store.stats().bytes <= 300_000
print(checked > 20)
"""
    assert finish(child(FORKS + code, tmp_path)) == "True\n"


def test_processes_share_a_store(tmp_path):
    code = """
def work(number):
    pick = random.Random(number)
    hits = 0
    with KVStore(directory + "/store", size_limit_bytes=300_000) as store:
        for turn in range(100):
            seed = pick.randrange(12)
            do = pick.random()
            if do < 0.4:
                store.put(f"k{seed}", chunk(seed), overwrite=do < 0.1)
                store.remember([bytes([seed]) * 28])
            elif do < 0.5:
                store.delete(f"k{seed}")
            else:
                for other, opened in enumerate(store.open_many([f"k{other}" for other in range(12)])):
                    assert opened.status != "corrupt"
                    if opened.reader:
                        assert right(opened.reader, other)
                        hits += 1
    assert hits

# Three at once, from the creation of the folder on.
workers = [fork(lambda: work(number)) for number in range(3)]
assert [os.waitpid(pid, 0)[1] for pid in workers] == [0, 0, 0]
"""
    finish(child(FORKS + code, tmp_path))
    with KVStore(tmp_path / "store", create=False) as store:
        report = store.verify()
        assert report.ok, report
        assert 0 < store.stats().bytes <= 300_000
        assert store.remembered_count() == len(set(store.remembered())) == 12
