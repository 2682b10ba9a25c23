"""Models with adapters: what they compute depends on more than their weights."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import tiny_model

from ragblend.blend.prefill import full_plan, prefill
from ragblend.blend.selectors import RecomputeNone
from ragblend.errors import ModelChangedError, UnsupportedModelError
from ragblend.model.decoder import Decoder
from ragblend.model.sources import load_model

IDS = torch.arange(7, 57)
# PEFT asks transformers for what the one deprecates, and says so when a second adapter is added.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def tuned(*, alpha: int = 8, dora: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Two adapters, of which "default" is active."""
    config = LoraConfig(
        r=4, lora_alpha=alpha, use_dora=dora, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    model = get_peft_model(tiny_model("llama").to(dtype), config)
    model.add_adapter("other", config)
    return model.eval()


@torch.inference_mode()
def logits(decoder: Decoder) -> torch.Tensor:
    return prefill(decoder, decoder.new_cache(50), full_plan(IDS), None, RecomputeNone(), 0.0).logits


@pytest.mark.parametrize("dora", [False, True])
def test_a_model_with_adapters_computes_what_it_computes_by_itself(dora: bool) -> None:
    model = tuned(dora=dora)
    with torch.inference_mode():
        expected = model(input_ids=IDS[None]).logits[0, -1]
        plain = tiny_model("llama")(input_ids=IDS[None]).logits[0, -1]
    assert not torch.allclose(expected, plain, atol=1e-2)
    torch.testing.assert_close(logits(Decoder(model)), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(Decoder(torch.compile(model, backend="eager"))), expected, atol=1e-4, rtol=0)
    assert load_model((model, None))[0] is model.get_base_model()


def test_a_fingerprint_names_what_adapters_do() -> None:
    """Scale and choice of the adapter are in no weight."""
    other, off, merged = tuned(), tuned(), tuned()
    other.set_adapter("other")
    off.base_model.disable_adapter_layers()
    merged.merge_adapter()
    variants = [tiny_model("llama"), tuned(), tuned(alpha=16), tuned(dora=True), other, off, merged]
    assert len({Decoder(model).fingerprint for model in variants}) == len(variants)
    assert Decoder(tuned()).fingerprint == Decoder(tuned()).fingerprint


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    script = (
        "from test_model_adapters import tuned; from ragblend.model.decoder import Decoder\n"
        "print(Decoder(tuned()).fingerprint)"
    )
    paths = ":".join(path for path in [*sys.path, str(__file__).rpartition("/")[0]] if path)
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {Decoder(tuned()).fingerprint + "\n"}


def test_switching_adapters_under_an_engine_is_refused_until_they_are_switched_back() -> None:
    model = tuned()
    decoder = Decoder(model)
    before = logits(decoder)
    model.set_adapter("other")
    with pytest.raises(ModelChangedError, match="adapters switched"):
        logits(decoder)
    model.set_adapter("default")
    assert torch.equal(logits(decoder), before)
    model.merge_adapter()
    with pytest.raises(ModelChangedError):
        logits(decoder)


def test_weights_that_an_adapter_looks_at_are_not_packed() -> None:
    model = tuned(dtype=torch.bfloat16)
    own = Decoder(model, pack=True)
    torch.testing.assert_close(logits(own), logits(Decoder(model)), atol=1e-4, rtol=0)


def test_tokens_learned_for_the_front_of_the_prompt_are_refused() -> None:
    model = get_peft_model(tiny_model("llama"), PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedModelError, match=r"'default'.*in front of the prompt"):
        Decoder(model)
