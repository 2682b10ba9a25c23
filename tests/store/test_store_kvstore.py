"""The folder of chunks: verbs, limits, formats, and what is refused."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from ragblend.errors import InvalidSettingError, StoreError, StoreFormatError
from ragblend.kv import LayerKV
from ragblend.store import folder, kvstore, table
from ragblend.store.kvstore import KVStore, Opened

PAYLOAD_BYTES = 15_500  # about, for the chunks of `big`


@pytest.fixture
def store(tmp_path):
    with KVStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def big(make_chunk):
    return lambda seed=0: make_chunk(seed, n_tokens=100)


def files(store: KVStore) -> list[Path]:
    return sorted((store.directory / "kv").glob("*.safetensors"))


def holds(opened: Opened, layers: list[LayerKV]) -> bool:
    assert opened.status == "hit"
    assert opened.reader is not None
    with opened.reader as reader:
        return all(torch.equal(reader.read_layer_kv(i).key, layer.key) for i, layer in enumerate(layers))


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def edit(store: KVStore, statement: str, args: tuple = ()) -> None:
    connection = sqlite3.connect(store.directory / "kv" / "cache.db")
    with connection:
        connection.execute(statement, args)
    connection.close()


# ---- verbs


def test_put_open_delete(store, make_chunk):
    size = store.put("a", make_chunk(1))
    assert [path.stat().st_size for path in files(store)] == [size]
    assert "a" in store
    assert "b" not in store
    assert 3 not in store
    assert len(store) == 1
    assert holds(store.open_many(["a"])[0], make_chunk(1))
    assert store.open("b") is None
    assert store.open_many(["b"]) == [Opened(None, "miss")]
    assert store.open_many([]) == []
    assert store.delete("a")
    assert not store.delete("a")
    assert store.keys() == []
    assert files(store) == []


def test_open_many_keeps_order_and_shares_repeats(store, make_chunk):
    for seed, key in enumerate("abc"):
        store.put(key, make_chunk(seed))
    opened = store.open_many(["c", "x", "a", "c"])
    assert [status for _, status in opened] == ["hit", "miss", "hit", "hit"]
    assert opened[0].reader is opened[3].reader
    assert [reader and reader.key for reader, _ in opened] == ["c", None, "a", "c"]
    assert holds(opened[0], make_chunk(2))
    assert holds(opened[2], make_chunk(0))


def test_put_again_is_a_no_op(store, make_chunk):
    size = store.put("a", make_chunk(1))
    before = files(store)
    assert store.put("a", make_chunk(2)) == size
    assert files(store) == before
    assert holds(store.open_many(["a"])[0], make_chunk(1))
    store.put("a", make_chunk(2), overwrite=True)
    assert len(files(store)) == 1
    assert holds(store.open_many(["a"])[0], make_chunk(2))


def test_put_again_heals_a_lost_or_cut_file(store, make_chunk):
    for harm in (Path.unlink, lambda path: os.truncate(path, 100)):
        store.put("a", make_chunk(1), overwrite=True)
        harm(files(store)[0])
        store.put("a", make_chunk(1))
        assert holds(store.open_many(["a"])[0], make_chunk(1))
    assert store.verify().ok


def test_bad_arguments(store, tmp_path, make_chunk):
    for key in ("", 3, b"a", None, ("a",)):
        with pytest.raises(InvalidSettingError):
            store.put(key, make_chunk())
    with pytest.raises(InvalidSettingError):
        store.put("a", [])
    for limit in (0, -1, 0.5, "20GB", True, float("nan"), float("inf")):
        with pytest.raises(InvalidSettingError, match="size_limit_bytes is a whole number"):
            KVStore(tmp_path / "other", size_limit_bytes=limit)
    for directory in (None, 3, "", ["kv"]):
        with pytest.raises(InvalidSettingError, match="path of a folder"):
            KVStore(directory)
    assert not (tmp_path / "other").exists()
    assert store.verify().ok


def test_a_closed_store_says_so(store, make_chunk):
    store.put("a", make_chunk())
    reader = store.open("a")
    store.close()
    store.close()
    for use in (store.keys, store.stats, store.verify, store.remembered, lambda: store.open("a"), lambda: "a" in store):
        with pytest.raises(StoreError, match="closed"):
            use()
    with pytest.raises(StoreError, match="closed"):
        store.put("b", make_chunk())
    with reader:
        reader.read_layer_kv(0)


def test_stats(store, make_chunk):
    size = store.put("a", make_chunk(n_tokens=5)) + store.put("b", make_chunk(n_tokens=6))
    for reader, _ in store.open_many(["a", "b", "c"]):
        if reader:
            reader.close()
    store.remember([b"x" * 28])
    stats = store.stats()
    assert (stats.chunks, stats.tokens, stats.bytes) == (2, 11, size)
    assert (stats.hits, stats.misses, stats.evictions, stats.records) == (2, 1, 0, 1)
    assert stats.size_limit_bytes == store.size_limit_bytes


def test_looking_at_a_store_does_not_import_torch(store, make_chunk):
    store.put("a", make_chunk())
    code = (
        "import sys\n"
        "from ragblend.store.kvstore import KVStore\n"
        "with KVStore(sys.argv[1], create=False) as store:\n"
        "    assert store.stats().tokens == 7, store.stats()\n"
        "    assert store.keys() == ['a'] and 'a' in store and store.remembered() == []\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(store.directory)], check=True, timeout=60, env=environment)


# ---- notes


@pytest.mark.parametrize("note", [b"", b"x", bytes(range(256)), b"\0" * 3, b"n" * (64 << 10)])
def test_a_note_comes_back(store, make_chunk, note):
    store.put("a", make_chunk(), note=note)
    store.put("b", make_chunk())
    with KVStore(store.directory) as again:
        assert again.notes(["a", "missing", "b"]) == {"a": note, "b": b""}
    assert holds(store.open_many(["a"])[0], make_chunk())
    assert store.verify().ok


def test_a_note_goes_with_its_kv(store, make_chunk):
    store.put("a", make_chunk(1), note=b"first")
    store.put("a", make_chunk(2), note=b"second")
    assert store.notes(["a"]) == {"a": b"first"}, "nothing is written where something is stored"
    store.put("a", make_chunk(2), note=b"second", overwrite=True)
    assert store.notes(["a"]) == {"a": b"second"}
    assert holds(store.open_many(["a"])[0], make_chunk(2))
    store.put("a", make_chunk(3), overwrite=True)
    assert store.notes(["a"]) == {"a": b""}
    store.put("a", make_chunk(3), note=b"third", overwrite=True)
    files(store)[0].unlink()
    store.put("a", make_chunk(4), note=b"fourth")
    assert store.notes(["a"]) == {"a": b"fourth"}, "a lost file is put back, with its note"
    store.delete("a")
    assert store.notes(["a"]) == {}


def test_notes_of_more_keys_than_one_query_takes(store, make_chunk):
    chunk = make_chunk(n_tokens=1, n_layers=1)
    some = {f"key {n}": f"note {n}".encode() for n in range(0, 2500, 25)}
    for key, note in some.items():
        store.put(key, chunk, note=note)
    assert store.notes([f"key {n}" for n in range(2500)]) == some
    assert store.notes(["key 0", "key 0"]) == {"key 0": b"note 0"}
    assert store.notes([]) == {}


def test_a_note_that_is_too_long_is_refused(store, make_chunk):
    with pytest.raises(InvalidSettingError, match="65536 bytes"):
        store.put("a", make_chunk(), note=b"n" * ((64 << 10) + 1))
    assert "a" not in store
    assert files(store) == []
    store.put("a", make_chunk(1), note=b"kept")
    with pytest.raises(InvalidSettingError):
        store.put("a", make_chunk(2), note=b"n" * (1 << 20), overwrite=True)
    assert store.notes(["a"]) == {"a": b"kept"}
    assert holds(store.open_many(["a"])[0], make_chunk(1))


def test_reading_notes_is_no_use_of_a_chunk(tmp_path, big):
    with KVStore(tmp_path / "store", size_limit_bytes=3 * PAYLOAD_BYTES) as store:
        for seed, key in enumerate("abc"):
            store.put(key, big(seed), note=key.encode())
        before = store.stats()
        assert store.notes(["a", "x"]) == {"a": b"a"}
        assert store.stats() == before
        store.put("d", big(3), note=b"d")
        assert store.notes(list("abcd")) == {"b": b"b", "c": b"c", "d": b"d"}, "the least recently used one went"


def test_notes_are_found_by_their_labels(store, make_chunk):
    labels = [bytes([number]) * 16 for number in range(3)]
    for key, note in {
        "a": labels[0] + b"one",
        "b": labels[0] + b"two",
        "c": labels[1],
        "d": b"",
        "e": b"short",
    }.items():
        store.put(key, make_chunk(1), note=note)
    assert store.notes_labelled([]) == store.notes_labelled([labels[2], b""]) == {}
    assert store.notes_labelled(labels[:1]) == {"a": labels[0] + b"one", "b": labels[0] + b"two"}
    assert store.notes_labelled([*labels, *labels]).keys() == {"a", "b", "c"}
    assert store.notes_labelled([bytes([n % 256, n // 256]) * 8 for n in range(2000)]).keys() == {"a", "b", "c"}
    store.delete("a")
    store.put("c", make_chunk(1), note=labels[2], overwrite=True)
    assert store.notes_labelled(labels).keys() == {"b", "c"}
    assert store.notes_labelled(labels[1:2]) == {}
    assert (store.stats().hits, store.stats().misses) == (0, 0)


def test_labels_are_looked_up_and_not_searched_for(store):
    query = f"EXPLAIN QUERY PLAN SELECT key, value FROM Cache WHERE raw = 1 AND {kvstore._LABEL} IN (?, ?)"
    plan = " ".join(str(row) for row in store._kv.rows(query, (b"a" * 16, b"b" * 16)))
    assert "Cache_label" in plan
    assert "SCAN" not in plan


def test_paths_of_what_is_stored(store, make_chunk):
    store.put("a", make_chunk(1))
    store.put("b", make_chunk(2))
    paths = store.paths(["b", "missing", "a"])
    assert paths.keys() == {"a", "b"}
    for key, path in paths.items():
        assert key.encode() in path.read_bytes()
    assert (store.stats().hits, store.stats().misses) == (0, 0)


def test_notes_of_a_closed_store(store):
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.notes(["a"])


# ---- size limit


def test_least_recently_used_goes_first(tmp_path, big):
    with KVStore(tmp_path / "store", size_limit_bytes=3 * PAYLOAD_BYTES) as store:
        for seed, key in enumerate("abc"):
            store.put(key, big(seed))
        with store.open("a"):
            pass
        store.put("d", big(3))
        assert store.keys() == ["a", "c", "d"]
        for seed in range(20):
            store.put(f"more{seed}", big(seed))
            stats = store.stats()
            assert stats.bytes <= 3 * PAYLOAD_BYTES
            assert stats.chunks == 3
            assert sum(path.stat().st_size for path in files(store)) == stats.bytes
            assert f"more{seed}" in store
        assert store.stats().evictions == 21
        assert store.verify().ok


def test_eviction_takes_as_many_as_needed(tmp_path, make_chunk):
    small, large = make_chunk(n_tokens=10), make_chunk(n_tokens=200)
    with KVStore(tmp_path / "store", size_limit_bytes=40_000) as store:
        for index in range(30):
            store.put(f"small{index:02}", small)
        before = len(store)
        store.put("large", large)
        assert "large" in store
        assert before > len(store) > 1
        assert "small29" in store
        assert store.stats().bytes <= 40_000


def test_a_smaller_limit_holds_from_the_opening_on(tmp_path, make_chunk):
    with KVStore(tmp_path / "store") as store:
        sizes = [store.put(key, make_chunk(seed)) for seed, key in enumerate("abcd")]
        store.open("a").close()
    limit = 2 * max(sizes)
    with KVStore(tmp_path / "store", size_limit_bytes=limit) as store:
        assert store.stats().bytes <= limit
        assert store.keys() == ["a", "d"]
        assert len(files(store)) == store.stats().evictions == 2
        assert store.verify().ok


def test_open_readers_survive_eviction_deletion_and_overwriting(tmp_path, big):
    with KVStore(tmp_path, size_limit_bytes=PAYLOAD_BYTES * 2) as store:
        store.put("a", big(1))
        evicted = store.open_many(["a"])[0]
        store.put("b", big(2))
        deleted = store.open_many(["b"])[0]
        store.put("c", big(3))
        store.delete("b")
        overwritten = store.open_many(["c"])[0]
        store.put("c", big(4), overwrite=True)
        assert store.keys() == ["c"]
        for seed, opened in enumerate((evicted, deleted, overwritten), 1):
            assert holds(opened, big(seed))


def test_a_chunk_larger_than_the_limit_is_refused(tmp_path, big):
    with KVStore(tmp_path, size_limit_bytes=1000) as store:
        with pytest.raises(InvalidSettingError, match=r"1000 bytes"):
            store.put("a", big())
        assert store.keys() == []
        assert files(store) == []


def test_the_limit_is_remembered(tmp_path):
    directory = tmp_path / "store"
    with KVStore(directory) as store:
        assert 0 < store.size_limit_bytes <= folder.DEFAULT_SIZE_LIMIT_BYTES
    with KVStore(directory, size_limit_bytes=12345):
        pass
    with KVStore(directory) as store:
        assert store.size_limit_bytes == 12345
        assert store.stats().size_limit_bytes == 12345


@pytest.mark.parametrize("limit", [2e9, np.int64(2_000_000_000)])
def test_the_limit_is_remembered_whatever_kind_of_number_it_is(tmp_path, limit):
    """2e9 was written to the marker as it is, which the next one to open the store took for no limit."""
    KVStore(tmp_path, size_limit_bytes=limit).close()
    with KVStore(tmp_path) as store:
        assert (store.size_limit_bytes, type(store.size_limit_bytes)) == (2_000_000_000, int)


def test_the_default_limit_is_bounded_by_the_disk(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with KVStore(tmp_path / "store") as store:
        assert store.size_limit_bytes == 1 << 19


# ---- damage


@pytest.mark.parametrize("harm", [Path.unlink, lambda p: damage(p, 30), lambda p: os.truncate(p, 200)])
def test_an_unusable_payload_is_reported_once_and_forgotten(store, make_chunk, harm):
    store.put("a", make_chunk(1))
    store.put("b", make_chunk(2))
    (path,) = (file for file in files(store) if b'\\"a\\"' in file.read_bytes())
    harm(path)
    opened = store.open_many(["a", "b"])
    assert opened[0] == Opened(None, "corrupt")
    assert holds(opened[1], make_chunk(2))
    assert store.open_many(["a"]) == [Opened(None, "miss")]
    assert len(files(store)) == 1
    store.put("a", make_chunk(1))
    assert store.verify().ok


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs a list of this process's open files")
@pytest.mark.parametrize("read_only", [False, True])
def test_a_thread_that_ends_leaves_no_file_open(tmp_path, make_chunk, monkeypatch, read_only):
    KVStore(tmp_path / "store").close()
    if read_only:
        monkeypatch.setattr(os, "access", lambda *_: False)
    with KVStore(tmp_path / "store") as store:
        assert store.read_only == read_only
        before = 0
        gc.disable()  # as between two of its full runs, which are seldom where much is alive
        try:
            for n in range(20):
                thread = threading.Thread(target=store.stats)
                thread.start()
                thread.join()
                if n == 0:  # SQLite keeps one file at hand
                    before = len(os.listdir("/proc/self/fd"))
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            gc.enable()


def test_no_descriptor_leaks(store, make_chunk):
    for key in "abc":
        store.put(key, make_chunk())

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    def use() -> None:
        for reader, _ in store.open_many(["a", "b", "c", "d"]):
            if reader:
                reader.close()
        store.put("bad", make_chunk())
        damage(max(files(store), key=lambda path: path.stat().st_mtime_ns), 20)
        store.open_many(["bad"])
        store.verify()

    use()
    before = descriptors()
    for _ in range(5):
        use()
    assert descriptors() == before


def test_verify_finds_every_kind_of_damage(store, make_chunk):
    for key in ("fine", "flipped", "cut", "lost", "moved", "x"):
        store.put(key, make_chunk())
    path = {json.loads(_note(file))["key"]: file for file in files(store)}
    damage(path["flipped"], -1)
    os.truncate(path["cut"], path["cut"].stat().st_size - 1)
    path["lost"].unlink()
    path["moved"].write_bytes(path["fine"].read_bytes())
    orphan = path["fine"].with_name("0" * 32 + ".safetensors")
    orphan.write_bytes(b"x")
    seen = []
    report = store.verify(progress=lambda done, total: seen.append((done, total)))
    assert not report.ok
    assert report.checked == 6
    assert seen == [(done, 6) for done in range(1, 7)]
    assert sorted(key for key, _ in report.bad) == ["cut", "flipped", "lost", "moved"]
    assert "checksum" in dict(report.bad)["flipped"]
    assert report.orphans == (orphan.name,)
    assert report.deleted == 0
    assert len(store) == 6
    report = store.verify(delete_bad=True)
    assert (len(report.bad), report.deleted, report.ok) == (4, 5, False)
    assert store.verify().ok
    assert store.keys() == ["fine", "x"]
    assert len(files(store)) == 2


def _note(path: Path) -> str:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["ragblend"]


def test_verify_finds_wrong_books(store, make_chunk):
    store.put("a", make_chunk())
    edit(store, "UPDATE Settings SET value = 7 WHERE key = 'count'")
    edit(store, "UPDATE Settings SET value = 7 WHERE key = 'size'")
    assert len(store.verify().index_problems) == 2


def test_verify_takes_no_memory_for_notes(store, make_chunk):
    for n in range(50):
        store.put(f"k{n}", make_chunk(n_tokens=1), note=bytes(60_000))
    store.verify()  # imports what it needs
    tracemalloc.start()
    try:
        assert store.verify().ok
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_verify_leaves_the_lru_order_alone(tmp_path, big):
    with KVStore(tmp_path, size_limit_bytes=PAYLOAD_BYTES * 3) as store:
        for seed, key in enumerate("abc"):
            store.put(key, big(seed))
        before = store.keys()
        store.verify()
        store.put("d", big(3))
        assert store.keys() == [*before[1:], "d"]


def test_a_damaged_index_is_a_typed_error(tmp_path, make_chunk):
    with KVStore(tmp_path) as store:
        store.put("a", make_chunk())
    for name in ("cache.db-wal", "cache.db-shm"):
        (tmp_path / "kv" / name).unlink(missing_ok=True)
    (tmp_path / "kv" / "cache.db").write_bytes(b"no database at all" * 1000)
    with pytest.raises(StoreFormatError, match="damaged"):
        KVStore(tmp_path)


# ---- no pickle


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_planted_pickles_are_never_loaded(store, make_chunk, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    store.put("good", make_chunk())
    for key in ("inline", "file", "raw", "outside"):
        store.put(key, make_chunk())
    name = "f" * 32 + ".safetensors"
    (store.directory / "kv" / name).write_bytes(bomb)
    outside = tmp_path / "outside"
    outside.write_bytes(b"not yours")
    update = "UPDATE Cache SET mode = ?, filename = ?, value = ? WHERE key = ?"
    edit(store, update, (4, None, bomb, "inline"))
    edit(store, update, (4, name, None, "file"))
    edit(store, update, (1, None, 5, "raw"))
    edit(store, update, (2, "../../outside", None, "outside"))
    edit(store, "INSERT INTO Cache (key, raw, mode, value) VALUES (?, 0, 4, ?)", (bomb, bomb))
    report = store.verify()
    assert len(report.bad) == 5
    assert store.keys() == ["file", "good", "inline", "outside", "raw"]
    assert [status for _, status in store.open_many(["inline", "file", "raw", "outside"])] == ["corrupt"] * 4
    assert store.keys() == ["good"]
    assert len(store.verify(delete_bad=True).bad) == 1
    assert store.verify().ok
    assert outside.read_bytes() == b"not yours"
    assert not (tmp_path / "exploded").exists()


def test_planted_records_are_never_loaded(store, tmp_path):
    store.remember([b"r" * 30])
    connection = sqlite3.connect(store.directory / "texts" / "cache.db")
    with connection:
        bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
        connection.execute("INSERT INTO Cache (key, raw, mode, value) VALUES ('text', 0, 4, ?)", (bomb,))
    connection.close()
    assert store.remembered() == [b"r" * 30]
    assert not (tmp_path / "exploded").exists()


def test_nothing_can_be_pickled_in_or_out(store):
    cache = store._kv
    with pytest.raises(StoreError, match="pickled"):
        cache.set(("a", 1), 5)
    with pytest.raises(StoreError, match="pickled"):
        cache.set("a", {"any": "thing"})
    with pytest.raises(StoreError, match="unpickle"):
        cache.disk.get(pickle.dumps("a"), False)
    with pytest.raises(StoreError, match="unpickle"):
        cache.disk.fetch(4, None, pickle.dumps("a"), False)
    with pytest.raises(StoreError, match="unpickle"):
        cache.disk.fetch(4, "0" * 32 + ".safetensors", None, True)
    with pytest.raises(StoreError, match="payload file"):
        cache.disk.fetch(2, "../" + "0" * 32 + ".safetensors", None, True)
    assert store.keys() == []


# ---- the folder


def test_marker(tmp_path):
    with KVStore(tmp_path / "a" / "b", size_limit_bytes=10_000) as store:
        epoch = store.epoch
    assert json.loads((tmp_path / "a" / "b" / "ragblend.json").read_text()) == {
        "format": 1,
        "size_limit_bytes": 10_000,
        "epoch": epoch,
    }
    with KVStore(tmp_path / "a" / "b", size_limit_bytes=20_000) as store:
        assert store.epoch == epoch
    with KVStore(tmp_path / "other") as store:
        assert len(store.epoch) == 32
        assert store.epoch != epoch
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "kv",
        "ragblend.json",
        "ragblend.lock",
        "texts",
    ]


@pytest.mark.parametrize("text", ['{"format": 2}', '{"format": "1"}', "{}", "[]", "", "\xff", "null", "[" * 9999])
def test_another_format_is_refused(tmp_path, text):
    (tmp_path / "ragblend.json").write_text(text, encoding="latin-1")
    with pytest.raises(StoreFormatError, match="another folder"):
        KVStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ragblend.json"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.docx").write_text("precious")
    with pytest.raises(StoreFormatError, match="not a ragblend store"):
        KVStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.docx"]
    with pytest.raises(StoreFormatError, match="is a file"):
        KVStore(tmp_path / "thesis.docx")


def test_things_beside_the_store_are_fine(tmp_path, make_chunk):
    with KVStore(tmp_path):
        pass
    (tmp_path / "index").mkdir()
    with KVStore(tmp_path) as store:
        store.put("a", make_chunk())
        assert store.verify().ok


def test_create_false(tmp_path):
    with pytest.raises(StoreError, match="no store"):
        KVStore(tmp_path / "missing", create=False)
    assert not (tmp_path / "missing").exists()
    with pytest.raises(StoreError, match="no store"):
        KVStore(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="check that the folder exists"):
        KVStore(tmp_path / "file" / "store")
    with KVStore(tmp_path / "store"):
        pass
    (tmp_path / "store" / "kv" / "cache.db").unlink()
    (tmp_path / "store" / "kv" / "cache.db").mkdir()
    with pytest.raises(StoreError, match="cannot open"):
        KVStore(tmp_path / "store")


def test_a_path_that_looks_like_a_variable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SOMEWHERE", "else")
    with pytest.raises(StoreError, match="variable"):
        KVStore(tmp_path / "$SOMEWHERE")


# ---- text records


def test_records(store):
    first = [bytes([index]) * 28 for index in range(5)]
    assert store.remembered() == []
    assert (store.remembered_count(), store.remembered_version()) == (0, 0)
    assert store.remember(iter([*first, first[0]])) == 5
    version = store.remembered_version()
    assert store.remember(first) == 0
    assert store.remembered_version() == version
    assert store.remember([first[2], b"y" * 64]) == 1
    assert store.remembered() == [*first, b"y" * 64]
    assert store.remembered_count() == 6
    assert store.remembered_version() != version
    assert store.remembered(after=version) == [b"y" * 64]
    assert store.remembered(after=store.remembered_version()) == []
    assert store.remember([]) == 0
    with KVStore(store.directory) as other:
        assert other.remembered() == store.remembered()
        other.remember([b"z"])
    assert store.remembered_count() == 7


@pytest.mark.parametrize("record", ["text", b"", b"x" * 257, bytearray(b"x"), 3])
def test_bad_records_keep_nothing(store, record):
    with pytest.raises((InvalidSettingError, TypeError)):
        store.remember([b"fine", record])
    assert store.remembered() == []


def test_the_oldest_records_make_room(store, monkeypatch):
    monkeypatch.setattr(kvstore, "MAX_RECORDS", 10)
    for index in range(0, 30, 3):
        before = store.remembered_version()
        store.remember([b"%d" % number for number in range(index, index + 3)])
        assert store.remembered_version() > before
        assert store.remembered_count() <= 10
    assert store.remembered() == [b"%d" % number for number in range(20, 30)]
    assert store.verify().ok


def test_a_hundred_thousand_records_come_back_fast(store):
    records = [index.to_bytes(40, "big") for index in range(100_000)]
    store.remember(records)
    began = time.perf_counter()
    assert store.remembered() == records
    assert time.perf_counter() - began < 1.0
    began = time.perf_counter()
    for _ in range(100):
        store.remembered_count()
        store.remembered_version()
    assert time.perf_counter() - began < 0.5


# ---- threads


def test_threads_share_a_store(tmp_path, big):
    """Puts, opens and deletes of the same keys, under eviction: a hit is always whole and right."""
    chunks = {f"k{seed}": big(seed) for seed in range(6)}
    failures: list[BaseException] = []
    hits = []
    with KVStore(tmp_path, size_limit_bytes=PAYLOAD_BYTES * 4) as store:

        def work(offset: int) -> None:
            try:
                for turn in range(25):
                    for step in range(6):
                        key = f"k{(step * (offset + 1) + turn) % 6}"
                        if (turn + step + offset) % 4 == 0:
                            store.put(key, chunks[key], overwrite=turn % 2 == 0)
                        elif (turn + step) % 7 == 0:
                            store.delete(key)
                        else:
                            (opened,) = store.open_many([key])
                            assert opened.status != "corrupt"
                            if opened.reader:
                                assert holds(opened, chunks[key])
                                hits.append(key)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert hits
        assert store.verify().ok
        assert store.stats().bytes <= PAYLOAD_BYTES * 4


def test_a_system_that_writes_a_few_bytes_at_a_time(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(memoryview(data)[:13])

    monkeypatch.setattr(kvstore, "open", lambda path, mode, buffering: Slow(path, mode), raising=False)
    pieces = [memoryview(bytes(range(length))) for length in (40, 13, 1, 200, 7)]
    kvstore._write_file(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_a_reader_does_not_wait_for_a_writer_nor_a_writer_for_a_reader(store, big, monkeypatch):
    """A payload file is written outside the index's lock, and reading holds no lock at all."""
    store.put("a", big(1))
    writing, go_on = threading.Event(), threading.Event()
    write = kvstore._write_file

    def slowly(path, pieces):
        writing.set()
        assert go_on.wait(10)
        write(path, pieces)

    monkeypatch.setattr(kvstore, "_write_file", slowly)
    thread = threading.Thread(target=store.put, args=("b", big(2)))
    thread.start()
    assert writing.wait(10)
    began = time.perf_counter()
    (opened,) = store.open_many(["a"])
    store.delete("a")
    with KVStore(store.directory) as other:  # and a newcomer does not take the file under way for an orphan
        assert other.keys() == []
    took = time.perf_counter() - began
    go_on.set()
    thread.join()
    assert holds(opened, big(1))
    assert took < 1.0
    assert holds(store.open_many(["b"])[0], big(2))


@pytest.mark.parametrize("how", ["deleted", "corrupt", "bad", "beyond the limit"])
def test_a_file_on_its_way_out_is_no_orphan(store, big, monkeypatch, how):
    """Its row has gone already, and another process looks before the file has."""
    store.put("a", big(1))
    (file,) = files(store)
    monkeypatch.setattr(kvstore, "_SETTLE_S", 0.0)
    seen: list[bool] = []
    remove = os.remove

    def after_a_look(path):
        with KVStore(store.directory) as other:  # opening takes no orphan away, either
            seen.append(file.exists() and other.verify().ok)
        remove(path)

    if how in ("corrupt", "bad"):
        file.write_bytes(b"nothing")
    monkeypatch.setattr(table.os, "remove", after_a_look)
    if how == "deleted":
        assert store.delete("a")
    elif how == "corrupt":
        assert store.open_many(["a"])[0].status == "corrupt"
    elif how == "bad":
        assert store.verify(delete_bad=True).deleted == 1
    else:
        KVStore(store.directory, size_limit_bytes=1).close()
    assert seen == [True]
    assert not file.exists()


def test_a_lock_that_stays_is_survived_by_readers_and_named_to_writers(tmp_path, big, monkeypatch):
    monkeypatch.setattr(table, "_BUSY_TIMEOUT_S", 0.05)
    with KVStore(tmp_path) as store:
        store.put("a", big(1))
        holder = sqlite3.connect(tmp_path / "kv" / "cache.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        try:
            began = time.perf_counter()
            opened = store.open_many(["a", "b"])
            assert time.perf_counter() - began < 1.0
            assert opened[1].status == "miss"
            assert holds(opened[0], big(1))
            monkeypatch.setattr(table, "_GIVE_UP_S", 0.2)
            for write in (lambda: store.put("b", big(2)), lambda: store.delete("a")):
                with pytest.raises(StoreError, match="locked by another process"):
                    write()
            assert len(files(store)) == 1
        finally:
            holder.execute("ROLLBACK")
            holder.close()
        store.put("b", big(2))
        assert store.verify().ok
