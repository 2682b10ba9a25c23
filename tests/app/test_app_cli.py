"""Every command, every exit code, and the shape of what --json prints."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from command_line import RUN, Cli

from ragblend.cli.reporting import reporting
from ragblend.kb import KnowledgeBase

needs_embedding = pytest.mark.usefixtures("embedding_model")
VARIANTS = 2
"""Each chunk's KV is stored behind the prompt's head alone, and behind its neighbour."""


@needs_embedding
def test_ingest_query_stats_verify(cli: Cli, documents: Path) -> None:
    done = cli("ingest", documents, "--json")
    assert done.code == 0, done.err
    assert done.json["documents"] == 4
    assert done.json["computed"] == done.json["chunks"] == 4
    assert done.json["skipped"] == []

    before = cli("stats", "--json").json["hits"]
    asked = cli("query", "Who designed the bridge?", "--top-k", "3", "--max-tokens", "5", "--json")
    assert asked.code == 0, asked.err
    assert asked.json["question"] == "Who designed the bridge?"
    assert Path(asked.json["sources"][0]["document"]).name == "bridge.md"
    assert asked.json["report"]["hits"] == 3
    assert asked.json["report"]["misses"] == 0

    counts = cli("stats", "--json").json
    assert counts["documents"] == counts["indexed_chunks"] == 4
    assert counts["chunks"] == 4 * VARIANTS
    assert counts["tokens"] > 0
    assert 0 < counts["bytes"] <= counts["size_limit_bytes"]
    assert counts["hits"] == before + 3

    verified = cli("verify", "--json")
    assert verified.code == 0
    assert verified.json["ok"]
    assert verified.json["checked"] == 4 * VARIANTS


@needs_embedding
def test_each_kind_of_file_is_read_as_its_text(cli: Cli, documents: Path) -> None:
    cli("ingest", documents)
    found = cli("query", "What?", "--top-k", "9", "--max-tokens", "1", "--json").json["sources"]
    texts = {Path(source["document"]).name: source for source in found}
    assert "25 minutes" in texts["ferry.pdf"]["text"]
    assert texts["ferry.pdf"]["page"] == "1"
    assert texts["cats.html"]["text"] == "Cats\n\nCats sleep 16 hours a day."
    assert texts["bridge.md"]["text"].startswith("# Bridge\n\nThe Old")


@needs_embedding
def test_for_people(cli: Cli, documents: Path) -> None:
    done = cli("ingest", documents)
    assert "4 documents ingested" in done.out
    asked = cli("query", "How far is the moon?", "--max-tokens", "3", "--stream")
    assert asked.code == 0
    assert "moon.txt" in asked.out
    assert "chunks reused" in asked.out
    assert "documents" in cli("stats").out
    assert "0 problems" in cli("verify").out


@needs_embedding
def test_only_what_changed_is_worked_on(cli: Cli, documents: Path) -> None:
    cli("ingest", documents)
    # A model that cannot be loaded shows that none is.
    again = cli("ingest", documents, "--json", "--embedding-model", "sentence-transformers/all-MiniLM-L6-v2")
    assert (again.json["documents"], again.json["unchanged"], again.json["computed"]) == (0, 4, 0)

    (documents / "moon.txt").write_text("The sun is 150 million kilometres away.\n")
    changed = cli("ingest", documents, "--json").json
    assert (changed["documents"], changed["unchanged"], changed["computed"]) == (1, 3, 1)
    counts = cli("stats", "--json").json
    assert counts["documents"] == counts["indexed_chunks"] == 4
    assert counts["chunks"] == 4 * VARIANTS, "the KV of the text that is gone is freed"
    texts = [s["text"] for s in cli("query", "How far?", "--top-k", "9", "--max-tokens", "1", "--json").json["sources"]]
    assert len(texts) == 4
    assert not any("moon" in text for text in texts)


@needs_embedding
def test_the_length_of_chunks_is_remembered(
    cli: Cli, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("\n\n".join(f"Paragraph {n} tells what {n} is good for." for n in range(20)))
    assert cli("ingest", file, "--chunk-tokens", "5000", "--json").json["error"]["type"] == "InvalidSettingError"
    assert cli("stats", "--json").json["chunk_tokens"] == 300, "what the model cannot take is not remembered"
    short = cli("ingest", file, "--chunk-tokens", "64", "--json").json["chunks"]
    assert short > 5
    again = cli("ingest", file, "--json").json
    assert (again["documents"], again["unchanged"], again["computed"]) == (0, 1, 0)
    file.write_text(file.read_text() + "\n\nAnd one more.")
    assert cli("ingest", file, "--json").json["chunks"] >= short
    assert "chunk_tokens      64" in cli("stats").out
    assert not caplog.messages
    with KnowledgeBase(tmp_path / "store", model=tiny_model) as kb:
        assert kb.chunk_tokens == 64
        kb.ingest_texts({"text": file.read_text()})
        texts = [chunk.text for chunk in kb.index.chunks_of("text", kb.models.signature)]
        assert texts == [chunk.text for chunk in kb.index.chunks_of(str(file), kb.models.signature)]

    longer = cli("ingest", file, "--chunk-tokens", "200", "--json").json
    assert longer["documents"] == 1
    assert longer["chunks"] < short
    assert caplog.messages == ["chunks have 200 tokens at most now, not 64: documents are split anew"]
    assert cli("ingest", file, "--json").json["unchanged"] == 1
    settings = tmp_path / "store" / "knowledge.json"
    for damage in ('{"chunk_tokens": 3}', '{"chunk_tokens": "64"}', "[", '{"chunk_tokens": true}'):
        settings.write_text(damage)
        assert cli("stats", "--json").json["chunk_tokens"] == 300


@needs_embedding
def test_an_unchanged_ingest_loads_no_model(cli: Cli, documents: Path, tmp_path: Path, tiny_model: Path) -> None:
    cli("ingest", documents)
    probe = "import sys\nfrom ragblend.cli import app\n"
    probe += "app(sys.argv[1:], standalone_mode=False)\n"
    probe += "assert not {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules), 'a model was loaded'"
    args = ["ingest", str(documents), "--store", str(tmp_path / "store"), "--model", str(tiny_model)]
    done = subprocess.run([sys.executable, "-c", probe, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 unchanged" in done.stdout


@needs_embedding
def test_another_model_shares_the_index(cli: Cli, documents: Path, tiny_model: Path, tmp_path: Path) -> None:
    cli("ingest", documents)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.embed_tokens.weight.data.mul_(1.5)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(other)
    done = cli("ingest", documents, "--model", other, "--json").json
    assert (done["documents"], done["unchanged"], done["computed"]) == (0, 4, 4)
    assert cli("ingest", documents, "--model", other, "--json").json["computed"] == 0
    counts = cli("stats", "--json").json
    assert (counts["indexed_chunks"], counts["chunks"]) == (4, 2 * 4 * VARIANTS)


@needs_embedding
def test_files_without_text_are_skipped_and_listed(cli: Cli, documents: Path) -> None:
    (documents / "noise.dat").write_bytes(bytes(range(256)) * 9)
    (documents / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (documents / "empty.txt").write_bytes(b"")
    (documents / "blank.md").write_text(" \n\n")
    (documents / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing")
    (documents / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"1" * 50)
    (documents / "gone.txt").symlink_to(documents / "nowhere")
    os.mkfifo(documents / "pipe.txt")
    (documents / ".hidden.txt").write_text("nobody asked for this")
    done = cli("ingest", documents, "--json")
    assert done.code == 3
    assert done.json["documents"] == 4
    reasons = {Path(skip["path"]).name: skip["reason"] for skip in done.json["skipped"]}
    assert set(reasons) == {
        *("noise.dat", "latin.txt", "empty.txt", "blank.md", "broken.pdf", "photo.png", "gone.txt", "pipe.txt")
    }
    assert all(reasons.values())
    assert "UTF-8" in reasons["latin.txt"]
    for name in reasons:
        assert name in done.err
    assert cli("verify").code == 0


def test_only_files_without_text(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "noise.dat").write_bytes(b"\0\1\2")
    done = cli("ingest", tmp_path / "noise.dat", "--json")
    assert done.code == 3
    assert done.json["documents"] == 0
    assert done.json["skipped"] == [{"path": str(tmp_path / "noise.dat"), "reason": "not a text file"}]


def ingest_missing_path(cli: Cli, tmp_path: Path) -> list[str | Path]:
    return ["ingest", tmp_path / "nowhere"]


def ingest_empty_folder(cli: Cli, tmp_path: Path) -> list[str | Path]:
    (tmp_path / "empty").mkdir()
    return ["ingest", tmp_path / "empty"]


def one_document(tmp_path: Path) -> Path:
    file = tmp_path / "one.txt"
    file.write_text("One document of one sentence.")
    return file


def ingest_into_other_folder(cli: Cli, tmp_path: Path) -> list[str | Path]:
    return ["ingest", one_document(tmp_path), "--store", tmp_path]


def ingest_with_missing_model(cli: Cli, tmp_path: Path) -> list[str | Path]:
    return ["ingest", one_document(tmp_path), "--model", "./nowhere"]


def ingest_with_model_without_rope(cli: Cli, tmp_path: Path) -> list[str | Path]:
    from transformers import GPT2Config

    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    return ["ingest", one_document(tmp_path), "--model", tmp_path / "gpt2"]


def ingest_with_tiny_chunks(cli: Cli, tmp_path: Path) -> list[str | Path]:
    return ["ingest", one_document(tmp_path), "--chunk-tokens", "3"]


def store_of_another_format(cli: Cli, tmp_path: Path) -> list[str | Path]:
    from ragblend.store.kvstore import KVStore

    KVStore(tmp_path / "store").close()
    (tmp_path / "store" / "ragblend.json").write_text(json.dumps({"format": 999}))
    return ["stats"]


def index_of_another_format(cli: Cli, tmp_path: Path) -> list[str | Path]:
    import sqlite3

    from ragblend.kb import KnowledgeBase

    KnowledgeBase(tmp_path / "store").close()
    with sqlite3.connect(tmp_path / "store" / "index" / "index.db") as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    return ["verify"]


def damaged_index(cli: Cli, tmp_path: Path) -> list[str | Path]:
    from ragblend.kb import KnowledgeBase

    KnowledgeBase(tmp_path / "store").close()
    (tmp_path / "store" / "index" / "index.db").write_bytes(b"no database" * 999)
    return ["stats"]


def missing_store(cli: Cli, tmp_path: Path) -> list[str | Path]:
    return ["query", "Where?"]


def store_without_documents(cli: Cli, tmp_path: Path) -> list[str | Path]:
    from ragblend.store.kvstore import KVStore

    KVStore(tmp_path / "store").close()
    return ["query", "Where?"]


def empty_question(cli: Cli, tmp_path: Path) -> list[str | Path]:
    store_without_documents(cli, tmp_path)
    return ["query", "  "]


def ratio_above_one(cli: Cli, tmp_path: Path) -> list[str | Path]:
    store_without_documents(cli, tmp_path)
    return ["query", "Where?", "--ratio", "1.5"]


def ratio_that_is_no_number(cli: Cli, tmp_path: Path) -> list[str | Path]:
    store_without_documents(cli, tmp_path)
    return ["query", "Where?", "--ratio", "much"]


def top_k_of_zero(cli: Cli, tmp_path: Path) -> list[str | Path]:
    store_without_documents(cli, tmp_path)
    return ["query", "Where?", "--top-k", "0"]


def bench_without_data(cli: Cli, tmp_path: Path) -> list[str | Path]:
    return ["bench", "ttft", "--data", tmp_path / "nowhere.jsonl"]


def bench_that_decodes_nothing(cli: Cli, tmp_path: Path) -> list[str | Path]:
    data = questions(tmp_path / "questions.jsonl")
    return ["bench", "ttft", "--data", data, "--chunks", "2", "--chunk-tokens", "60", "--decode-tokens", "0"]


@pytest.mark.parametrize(
    ("prepare", "kind"),
    [
        (ingest_missing_path, "IngestError"),
        (ingest_empty_folder, "IngestError"),
        (ingest_into_other_folder, "StoreFormatError"),
        (ingest_with_missing_model, "ModelNotFoundError"),
        (ingest_with_model_without_rope, "UnsupportedModelError"),
        (ingest_with_tiny_chunks, "InvalidSettingError"),
        (store_of_another_format, "StoreFormatError"),
        (index_of_another_format, "StoreFormatError"),
        (damaged_index, "StoreFormatError"),
        (missing_store, "StoreError"),
        (store_without_documents, "IngestError"),
        (empty_question, "EmptyPromptError"),
        (ratio_above_one, "InvalidSettingError"),
        (ratio_that_is_no_number, "InvalidSettingError"),
        (top_k_of_zero, "InvalidSettingError"),
        (bench_without_data, "InvalidSettingError"),
        (bench_that_decodes_nothing, "InvalidSettingError"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_bad_input_is_explained(cli: Cli, tmp_path: Path, prepare: object, kind: str) -> None:
    assert callable(prepare)
    args = prepare(cli, tmp_path)
    done = cli(*args, "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == kind
    assert len(done.json["error"]["message"]) > 20
    plain = cli(*args)
    assert plain.code == 1
    assert plain.err.startswith("error: ")
    assert "Traceback" not in plain.err
    assert plain.out == ""


def test_template_settings(cli: Cli, documents: Path) -> None:
    refused = cli("ingest", documents, "--template-setting", "thinking", "--json")
    assert refused.code == 1
    assert "NAME=VALUE" in refused.json["error"]["message"]
    unread = cli("ingest", documents, "--template-setting", "nobody_reads_this=1", "--json")
    assert "reads no nobody_reads_this" in unread.json["error"]["message"]
    assert cli("ingest", documents).code == 0
    asked = cli("query", "What is here?", "--max-tokens", "1", "--json")
    assert asked.code == 0, asked.err
    before = asked.json["report"]["prompt_tokens"]
    assert cli("ingest", documents, "--template-setting", "enable_thinking=false").code == 0
    assert cli("query", "What is here?", "--max-tokens", "1", "--json").json["report"]["prompt_tokens"] > before
    assert cli("ingest", documents, "--template-setting", "enable_thinking=null").code == 0
    assert cli("query", "What is here?", "--max-tokens", "1", "--json").json["report"]["prompt_tokens"] == before


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["query"], "QUESTION"),
        (["ingest"], "PATH"),
        (["stats", "--nonsense"], "--nonsense"),
        (["query", "x", "--top-k", "many"], "--top-k"),
        (["bench", "ttft", "--limit", "abc"], "--limit"),
        (["bench", "nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage(cli: Cli, args: list[str], named: str) -> None:
    plain, done = cli(*args), cli(*args, "--json")
    assert plain.code == done.code == 2
    assert plain.out == ""
    assert "Usage" in plain.err
    assert "Usage" in done.err
    assert done.json["error"]["type"] == "UsageError"
    assert named in done.json["error"]["message"]
    assert cli(*args[:1], "--model", "m", "--nonsense", "--", "--json").out == "", "--json is no option there"


@needs_embedding
def test_verify_finds_a_bad_payload_and_repairs_it(cli: Cli, documents: Path, tmp_path: Path) -> None:
    cli("ingest", documents)
    payload = min((tmp_path / "store" / "kv").glob("*.safetensors"))
    data = bytearray(payload.read_bytes())
    data[-3] ^= 0xFF
    payload.write_bytes(data)
    found = cli("verify", "--json")
    assert found.code == 1
    assert not found.json["ok"]
    assert len(found.json["bad"]) == 1
    assert cli("verify", "--repair").code == 1
    assert cli("verify").code == 0
    refilled = cli("ingest", documents, "--json").json
    assert (refilled["unchanged"], refilled["computed"]) == (4, 1)
    assert cli("stats", "--json").json["chunks"] == 4 * VARIANTS


@needs_embedding
def test_verify_finds_a_bad_index_file_and_queries_go_on_without_it(cli: Cli, documents: Path, tmp_path: Path) -> None:
    cli("ingest", documents)
    vectors = tmp_path / "store" / "index" / "vectors.faiss"
    data = bytearray(vectors.read_bytes())
    data[-3] ^= 0xFF
    vectors.write_bytes(data)
    assert "vectors.faiss" in cli("verify", "--json").json["index_problems"][0]
    asked = cli("query", "Who designed the bridge?", "--top-k", "1", "--max-tokens", "1", "--json").json
    assert Path(asked["sources"][0]["document"]).name == "bridge.md"
    assert cli("verify", "--repair").code == 1
    assert cli("verify").code == 0


@needs_embedding
def test_an_index_keeps_its_embedding_model(cli: Cli, documents: Path, tmp_path: Path) -> None:
    cli("ingest", documents)
    done = cli("ingest", documents, "--embedding-model", tmp_path, "--json")
    assert done.code == 1
    assert "all-MiniLM-L6-v2" in done.json["error"]["message"]


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["stats", "--help"], ["stats"]])
def test_what_needs_no_model_imports_no_torch(args: list[str], tmp_path: Path) -> None:
    from ragblend.store.kvstore import KVStore

    KVStore(tmp_path / "store").close()
    probe = "import sys\nfrom ragblend.cli import main\n"
    probe += "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
    probe += "assert not {'torch', 'transformers', 'llama_index', 'faiss'} & set(sys.modules)\n"
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", probe, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "RAGBLEND_STORE": str(tmp_path / "store")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    # Half a second on a quiet machine; importing torch would take several.
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("args", [["--help"], ["ingest", "--help"]])
def test_help_can_be_read_where_the_terminal_knows_no_more_than_ascii(args: list[str]) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*RUN, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_a_result_that_could_not_be_written_is_an_error_and_comes_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(typer.Exit) as ended, reporting(True) as say:
        say({"found": 1}, "1 found")
    assert ended.value.exit_code == 1
    assert written == ['{"found": 1}']
    assert capsys.readouterr().err.startswith("error: OSError")


@pytest.mark.parametrize("command", ["ingest", "query", "stats", "verify", "bench ttft"])
def test_every_command_takes_store_model_and_json(cli: Cli, command: str) -> None:
    shown = cli(*command.split(), "--help")
    assert shown.code == 0
    for option in ("--store", "--model", "--json"):
        assert option in shown.out


def questions(path: Path) -> Path:
    """Two questions in the benchmark's format."""
    chunks = [f"Place {i} has a bridge of {i} metres, and people cross it. " * 12 for i in range(6)]
    rows = [{"id": f"{i}", "question": f"Which is {i} long?", "answers": ["one"], "chunks": chunks} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_bench_ttft(cli: Cli, tmp_path: Path) -> None:
    data = questions(tmp_path / "questions.jsonl")
    args = ["bench", "ttft", "--data", data, "--chunks", "2", "--chunk-tokens", "60", "--limit", "1"]
    done = cli(*args, "--decode-tokens", "4", "--json")
    assert done.code == 0, done.err
    strategies = done.json["strategies"]
    assert {"stock", "full", "prefix", "reuse", "cacheblend", "blend"} == set(strategies)
    for numbers in strategies.values():
        assert {"ttft_s", "cold_ttft_s", "speedup", "rows_fraction"} <= set(numbers)
    shown = cli(*args, "--decode-tokens", "4")
    assert shown.code == 0
    assert "cacheblend" in shown.out
    assert "speedup" in shown.out


@needs_embedding
def test_bench_chat(cli: Cli, tmp_path: Path) -> None:
    data = questions(tmp_path / "questions.jsonl")
    args = ["bench", "chat", "--data", data, "--chunks", "2", "--chunk-tokens", "60", "--turns", "2"]
    done = cli(*args, "--answer-tokens", "4", "--json")
    assert done.code == 0, done.err
    assert [turn["turn"] for turn in done.json["turns"]] == [1, 2]
    later = done.json["turns"][1]
    assert later["prefix_tokens"] > 0
    assert later["idle_s"] > 0
    assert later["prefix_tokens"] + later["reused_tokens"] + later["fresh_tokens"] == later["prompt_tokens"]
    assert done.json["ways"].keys() == later["ttft_s"].keys() == {"session", "same_messages", "context_engine"}
    assert done.json["ways"]["session"]["session_speedup"] == 1.0
    assert "generate" in done.json["ways"]["same_messages"]["about"]
    shown = cli(*args, "--answer-tokens", "4")
    assert shown.code == 0
    assert "HuggingFaceLLM" in shown.out
    assert cli(*args, "--turns", "1", "--json").json["error"]["type"] == "InvalidSettingError"
    assert cli(*args, "--turns", "9", "--json").json["error"]["type"] == "InvalidSettingError"
