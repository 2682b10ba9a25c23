"""A Decoder beside others who use the same model, and models it refuses."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny_models import SIZES, tiny_model
from torch import Tensor
from torch.ao.quantization import quantize_dynamic
from transformers import LlamaForCausalLM

from ragblend.blend.prefill import full_plan, prefill
from ragblend.blend.selectors import RecomputeNone
from ragblend.errors import UnsupportedModelError
from ragblend.model.decoder import Decoder
from ragblend.model.sources import load_model

IDS = torch.arange(7, 57)[None]


@torch.inference_mode()
def answers(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    padded = torch.ones_like(IDS)
    padded[:, :5] = 0
    return (
        model(input_ids=IDS).logits,
        model(input_ids=IDS, attention_mask=padded).logits,
        model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0),
    )


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("mistral", "eager"), ("gemma2", "eager"), ("gpt-neox", "sdpa")],
)
def test_a_model_stays_as_it_is_for_its_other_users(family: str, implementation: str) -> None:
    other, model = tiny_model("llama"), tiny_model(family)
    model.set_attn_implementation(implementation)
    before = answers(model)
    Decoder(other)
    Decoder(model)
    assert Decoder(model).fingerprint == Decoder(model).fingerprint
    assert model.config._attn_implementation == implementation
    for now, then in zip(answers(model), before, strict=True):
        assert torch.equal(now, then)
    # Nor does it keep what it was: its users may choose another one later.
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        assert len(model(input_ids=IDS, output_attentions=True).attentions) == SIZES["num_hidden_layers"]


def test_a_model_may_be_in_use_while_it_is_loaded() -> None:
    """What others' calls do is not taken for the probe's own."""
    model, stop = tiny_model("llama"), threading.Event()
    started = threading.Event()

    def use() -> None:
        while not stop.is_set():
            with torch.inference_mode():
                model(input_ids=IDS)
            started.set()

    user = threading.Thread(target=use)
    user.start()
    try:
        assert started.wait(10)
        for _ in range(5):
            Decoder(model)
    finally:
        stop.set()
        user.join()


def test_forwards_that_others_have_hooked_are_those_of_the_copies() -> None:
    """accelerate puts its hooks into the place of a module's forward, bound to that module."""
    model = tiny_model("llama")
    before = answers(model)
    for layer in model.model.layers:
        add_hook_to_module(layer, ModelHook())
        add_hook_to_module(layer.self_attn, ModelHook())
    Decoder(model)
    for now, then in zip(answers(model), before, strict=True):
        assert torch.equal(now, then)


def compiled_in_part(model: Any, part: str) -> Any:
    """As torch.compile leaves it: the whole model, its layers, or one module of each; or compiled in place."""
    if part == "model":
        return torch.compile(model, backend="eager")
    if part == "in place":
        model.compile(backend="eager")
        return model
    layers = model.model.layers
    for n, layer in enumerate(layers):
        if part == "layer":
            layers[n] = torch.compile(layer, backend="eager")
        else:
            setattr(layer, part, torch.compile(getattr(layer, part), backend="eager"))
    return model


@pytest.mark.parametrize("part", ["model", "in place", "layer", "self_attn", "mlp"])
def test_compiled_models_are_driven_like_others_and_stay_compiled(part: str) -> None:
    model = compiled_in_part(tiny_model("llama"), part)
    decoder = Decoder(load_model((model, None))[0])  # type: ignore[arg-type]
    assert decoder.fingerprint == Decoder(tiny_model("llama")).fingerprint
    with torch.inference_mode():
        expected = tiny_model("llama")(input_ids=IDS).logits
        assert torch.equal(model(input_ids=IDS).logits, expected)
        done = prefill(decoder, decoder.new_cache(50), full_plan(IDS[0]), None, RecomputeNone(), 0.0)
    torch.testing.assert_close(done.logits, expected[0, -1], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_dropout_stays_off_where_somebody_else_trains_the_model() -> None:
    model = tiny_model("phi")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    expected = model(input_ids=IDS).logits[0, -1]
    decoder = Decoder(model)
    model.train()
    done = prefill(decoder, decoder.new_cache(50), full_plan(IDS[0]), None, RecomputeNone(), 0.0)
    torch.testing.assert_close(done.logits, expected, atol=1e-4, rtol=0)
    assert all(module.training for module in model.modules())


def test_quantised_linear_layers_are_driven_and_named_by_what_they_hold() -> None:
    """Theirs are no tensors: torch.ao packs weight and bias into one object."""

    def quantised(seed: int) -> Decoder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.ao is deprecated, and in use
            return Decoder(quantize_dynamic(tiny_model("llama", seed=seed), {torch.nn.Linear}, dtype=torch.qint8))

    assert quantised(0).fingerprint == quantised(0).fingerprint
    assert len({quantised(0).fingerprint, quantised(1).fingerprint, Decoder(tiny_model("llama")).fingerprint}) == 3


def test_weights_of_a_type_that_is_not_stored_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="float64: load it in bfloat16"):
        Decoder(tiny_model("llama").double())


def test_weights_on_several_devices_or_another_kind_are_refused(tmp_path: Path) -> None:
    """As accelerate leaves them that keeps some on the disk."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], "cpu")
    places |= {f"model.layers.{n}": "disk" if n > 2 else "cpu" for n in range(5)}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "aside")
    for one in (model, tiny_model("llama").to("meta")):
        with pytest.raises(UnsupportedModelError, match="on the CPU or on one CUDA GPU"):
            Decoder(one)


def test_weights_are_the_models_own() -> None:
    model = tiny_model("llama")
    decoder = Decoder(model)
    cache = decoder.new_cache(4)
    rows = decoder.run(0, 4)
    hidden = decoder.embed(torch.arange(4))
    with torch.inference_mode():
        first = decoder.layer(0, hidden, rows, cache)
        model.model.layers[0].self_attn.o_proj.weight.mul_(2.0)
        assert not torch.allclose(decoder.layer(0, hidden, rows, cache), first)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Falcon", {}, "not through transformers' attention interface"),
        ("HunYuanDenseV1", {"head_dim": 16}, "does not rotate its keys with the model's rotary embedding alone"),
        ("GPTJ", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "in its config"),
        ("Beam", {"sliding_window": 20}, "BeamRotaryEmbedding does not give angles for the positions of every kind"),
        ("Lfm2", {"layer_types": ["full_attention", *["conv"] * 4]}, "layer 1 of Lfm2ForCausalLM is a conv layer"),
        (
            "MiniCPM3",
            {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
            "in the place of values",
        ),
    ],
)
def test_refusals_say_why(name: str, settings: dict[str, Any], reason: str) -> None:
    sizes = {} if name == "GPTJ" else {k: v for k, v in SIZES.items() if k != "head_dim"}
    config = getattr(transformers, f"{name}Config")(**sizes, **settings, vocab_size=320, pad_token_id=0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # a norm behind the rotation is no hindrance as long as all of its weights are one
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with pytest.raises(UnsupportedModelError, match=reason):
        Decoder(model)
