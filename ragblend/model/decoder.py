"""The seam to transformers: a causal LM driven layer by layer, on rows of our choosing.

The only file that imports transformers. It calls the decoder layers that transformers ships (law 7) with two things
of ours: a `Cache` that scatters the computed rows into preallocated full-length buffers, and `CausalRows` in the place
of a mask, which the registered attention function understands. `probe` compares the result with the model's own
forward before the model is used for anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from huggingface_hub import HfApi, try_to_load_from_cache
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers import PreTrainedModel as PreTrainedModel
from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from ragblend.errors import ModelNotFoundError, UnsupportedModelError
from ragblend.kv import LayerKV, LayerShape
from ragblend.model.attention import ATTENTION_NAME, AttentionProbe, CausalRows, attend
from ragblend.model.packed import can_pack, pack_linears, release_mapping, rounded_up, same_inputs
from ragblend.model.pages import prefer_huge_pages
from ragblend.model.rope import Angles, Rope, identity_angles, inverted
from ragblend.model.threads import Turn, disband

_HUB_PATIENCE_S = 5.0
_PROBE_TOKENS = 24
# Largest difference to the model's own logits that rounding explains, in units of the logits' standard deviation.
_PARITY_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.25, torch.float16: 0.05}
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
# Of models whose weights were packed, which hides them: for whoever drives such a model once more.
_packed_fingerprints: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()


class Rows(NamedTuple):
    """Rows of one pass: where they are, and the angles of those positions for each kind of layer.

    There may be more angles than rows: so many rows are computed.
    """

    mask: CausalRows
    angles: dict[str, Angles]

    def probing(self, probe: AttentionProbe | None) -> Rows:
        """The same rows, with attention weights collected in `probe`."""
        return Rows(replace(self.mask, probe=probe), self.angles)


class KVCache:
    """Rotated keys and values of every position, layer by layer, in buffers allocated once.

    keys[i]: [1, kv_heads, capacity, key_dim]; values[i]: [1, kv_heads, capacity, value_dim].
    """

    def __init__(self, shapes: Sequence[LayerShape], capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity, self._dtype, self._device = capacity, dtype, device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            self.add_layer(shape)

    def add_layer(self, shape: LayerShape) -> None:
        """Buffers for one more layer."""
        kv_heads, key_dim, value_dim = shape
        self.keys.append(torch.empty((1, kv_heads, self.capacity, key_dim), dtype=self._dtype, device=self._device))
        self.values.append(torch.empty((1, kv_heads, self.capacity, value_dim), dtype=self._dtype, device=self._device))

    def write(self, layer: int, positions: Tensor | slice, key: Tensor, value: Tensor) -> None:
        """Put rotated key and value [kv_heads, rows, dim] at `positions` ([rows] int64, or a slice of one run)."""
        if isinstance(positions, slice):
            self.keys[layer][0, :, positions] = key
            self.values[layer][0, :, positions] = value
        else:
            self.keys[layer][0].index_copy_(1, positions, key)
            self.values[layer][0].index_copy_(1, positions, value)

    def blank(self, positions: Tensor) -> None:
        """Zero these positions in every layer: a masked key is multiplied by nothing, but 0 * NaN is NaN."""
        at = positions.to(self._device)
        for buffer in (*self.keys, *self.values):
            buffer[0].index_fill_(1, at, 0.0)

    def read(self, layer: int, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Rotated key and value [kv_heads, rows, dim] at `positions`."""
        return self.keys[layer][0][:, positions], self.values[layer][0][:, positions]


class _Scatter(Cache):
    """What a layer sees as its cache: takes the rows' keys and values, gives those of every position back."""

    def __init__(self, kv: KVCache, rows: CausalRows, positions: Tensor | slice) -> None:
        super().__init__(layers=[])
        self._kv, self._rows, self._stop, self._positions = kv, rows, rows.stop, positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        n_rows = len(self._rows)
        self._kv.write(layer_idx, self._positions, key_states[0][:, :n_rows], value_states[0][:, :n_rows])
        return self._kv.keys[layer_idx][:, :, : self._stop], self._kv.values[layer_idx][:, :, : self._stop]


class _Projected(Exception):  # noqa: N818 - not an error: how `project` leaves a layer early
    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value


class _Intercept(Cache):
    """A cache that ends the layer as soon as its keys and values are there."""

    def __init__(self, rows: CausalRows) -> None:
        super().__init__(layers=[])
        self._n_rows = len(rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        raise _Projected(key_states[0][:, : self._n_rows], value_states[0][:, : self._n_rows])


@dataclass(frozen=True)
class _Head:
    """From the last hidden state to logits: norm, projection, and what a config may ask for on top."""

    norm: nn.Module
    linear: nn.Module
    multiplier: float
    softcap: float | None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(hidden)).float() * self.multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Decoder:
    """A RoPE decoder-only causal LM, one layer and any set of rows at a time. Batch size is one throughout.

    Not thread-safe: one pass at a time. Whoever computes holds `turn`.

    Attributes:
        n_layers, context_window_tokens, vocab_size, dtype, device: what they say.
        shapes: LayerShape of each layer.
        windows: tokens each layer attends over, itself included; None for all of the past.
        fingerprint: digest of config, dtype and every weight; names this model in chunk keys. A path or hub name
            is no identity.
    """

    def __init__(self, model: PreTrainedModel, *, pack: bool = False) -> None:
        """Take over a loaded model.

        Args:
            model: a causal LM from transformers. Its attention implementation is set to ragblend's, which does what
                "sdpa" does whenever transformers calls it with its own masks, so `model.generate` keeps working.
            pack: lay the weights of its layers out for the CPU's matrix units, where that helps. The model still
                computes the same, but can no longer be trained, converted or saved: for a model nobody else holds.

        Raises:
            UnsupportedModelError: it is not a RoPE decoder, or its layers give other results here than in its own
                forward.
        """
        config = model.config.get_text_config()
        _refuse_config(model.config, type(model).__name__)
        self.model = model.eval()
        base = model.get_decoder()
        layers = getattr(base, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not hasattr(base, "embed_tokens"):
            raise UnsupportedModelError(
                f"{type(model).__name__} does not keep its decoder layers in `layers` behind `embed_tokens`; "
                "use a RoPE decoder such as Llama, Qwen, Mistral, Gemma or SmolLM"
            )
        self._layers: list[Any] = list(layers[: config.num_hidden_layers])
        self._embed_tokens = base.embed_tokens
        self._embedding_multiplier = float(getattr(config, "embedding_multiplier", None) or 1.0)
        layer_types = getattr(config, "layer_types", None)
        self._rope = Rope.of(base, self._layers[0].self_attn, tuple(layer_types) if layer_types else None)
        linear = model.get_output_embeddings()
        if linear is None or not hasattr(base, "norm"):
            raise UnsupportedModelError(f"{type(model).__name__} has no language-model head behind a final norm")
        multiplier = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._head = _Head(base.norm, linear, multiplier, getattr(config, "final_logit_softcapping", None))
        self.n_layers = len(self._layers)
        self.context_window_tokens = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self.dtype: torch.dtype = self._embed_tokens.weight.dtype
        self.device: torch.device = self._embed_tokens.weight.device
        self.turn = Turn()
        self._rounds_up = can_pack(self.dtype, self.device)
        self.fingerprint = _fingerprint(model, self.dtype)
        if self.device.type == "cpu":
            prefer_huge_pages()
        self.shapes, self.windows = self._probe(config, pack and can_pack(self.dtype, self.device))
        if self.device.type == "cpu":
            prefer_huge_pages(model.parameters())
        disband()  # who loads a model need not be who uses it

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(d.kv_heads * (d.key_dim + d.value_dim) for d in self.shapes) * self.dtype.itemsize

    def new_cache(self, capacity_tokens: int) -> KVCache:
        """Empty buffers for `capacity_tokens` positions."""
        return KVCache(self.shapes, capacity_tokens, self.dtype, self.device)

    def angles(self, stop: int) -> dict[str, Angles]:
        """Angles of positions 0..stop-1 for every kind of layer."""
        return self._rope.angles(torch.arange(stop), self._embed_tokens.weight)

    def inverse_angles(self, start: int, stop: int) -> dict[str, Angles]:
        """What undoes the rotation of keys at positions start..stop-1 of a prompt that ends there, in fp32."""
        return {
            kind: inverted((cos[:, start:stop], sin[:, start:stop])) for kind, (cos, sin) in self.angles(stop).items()
        }

    def rows(self, positions: Tensor, angles: dict[str, Angles], *, invisible: Tensor | None = None) -> Rows:
        """Rows at ascending absolute positions [rows]. angles: of 0..stop-1 (see `angles`), picked from here."""
        at = self._rounded(positions.to(self.device))
        picked = {kind: (cos[:, at], sin[:, at]) for kind, (cos, sin) in angles.items()}
        return Rows(CausalRows(positions.cpu(), self.device, invisible), picked)

    def run(self, start: int, stop: int) -> Rows:
        """Rows at positions start..stop-1, for decoding."""
        positions = torch.arange(start, stop)
        angles = self._rope.angles(self._rounded(positions), self._embed_tokens.weight)
        return Rows(CausalRows(positions, self.device), angles)

    def _rounded(self, positions: Tensor) -> Tensor:
        """Positions [rows], and 0 for each row that products make up (see `rounded_up`)."""
        rows = len(positions)
        return F.pad(positions, (0, rounded_up(rows) - rows)) if self._rounds_up else positions

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [rows] -> hidden states [1, rows, hidden]."""
        hidden: Tensor = self._embed_tokens(ids.to(self.device)[None])
        return hidden if self._embedding_multiplier == 1.0 else hidden * self._embedding_multiplier

    def layer(self, index: int, hidden: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Run one of the model's own layers on the selected rows against every position before them.

        Args:
            hidden: [1, rows, hidden].
            cache: takes the rows' keys and values; must hold those of all other visible positions.

        Returns:
            [1, rows, hidden].
        """
        mask = rows.mask
        at = slice(mask.start, mask.stop) if mask.is_run else mask.positions.to(self.device)
        return self._call(index, hidden, rows, _Scatter(cache, mask, at))

    def project(self, index: int, hidden: Tensor, rows: Rows) -> LayerKV:
        """Keys (rotated) and values [kv_heads, rows, dim] that a layer would make of `hidden`, and no more work."""
        try:
            self._call(index, hidden, rows, _Intercept(rows.mask))
        except _Projected as projected:
            return LayerKV(projected.key, projected.value)
        raise UnsupportedModelError(f"layer {index} makes no keys and values of its own (shared KV)")

    def logits(self, hidden: Tensor) -> Tensor:
        """[1, rows, hidden] after the last layer -> logits [rows, vocab], fp32."""
        return self._head(hidden)[0]

    def rotate(self, layer: int, key: Tensor, angles: dict[str, Angles]) -> Tensor:
        """Rotate stored keys [kv_heads, tokens, key_dim] to the positions of `angles`."""
        return self._rope.rotate(key, angles[self._rope.key_of(layer)])

    def unrotate(self, layer: int, key: Tensor, inverse: dict[str, Angles]) -> Tensor:
        """Undo `rotate`. inverse: `inverse_angles` of the positions the keys are at."""
        return self._rope.unrotate(key, inverse[self._rope.key_of(layer)])

    def _call(self, index: int, hidden: Tensor, rows: Rows, cache: Cache) -> Tensor:
        angles = rows.angles[self._rope.key_of(index)]
        n_rows = hidden.shape[1]
        spare = angles[0].shape[1] - n_rows
        if spare:  # rows of nothing, that nobody sees and that see nobody
            hidden = F.pad(hidden, (0, 0, 0, spare))
        out: Tensor = self._layers[index](
            hidden,
            attention_mask=rows.mask,
            position_embeddings=angles,
            position_ids=None,
            cache=cache,
            use_cache=True,
        )
        return out[:, :n_rows]

    # -- load-time checks ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _probe(self, config: PreTrainedConfig, pack: bool) -> tuple[tuple[LayerShape, ...], tuple[int | None, ...]]:
        """Compare with the model's own forward on a short prompt and learn the layers' sizes.

        Also checks, layer by layer, that keys are rotated the way `rotate` rotates and that sliding layers ask for
        the window their config names: a short prompt would not show either.
        """
        ids = torch.randint(0, self.vocab_size, (_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
        name = type(self.model).__name__
        with same_inputs(self.model if pack else nn.Module()) as siblings:
            expected = self.model(input_ids=ids.to(self.device)[None], use_cache=False).logits[0].float()

        if pack:
            _packed_fingerprints[self.model] = self.fingerprint
            pack_linears(nn.ModuleList(self._layers), siblings)
            release_mapping(self.model)
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        self.model.set_attn_implementation(ATTENTION_NAME)
        try:
            windows: dict[int, int | None] = {}
            rows = self.rows(torch.arange(_PROBE_TOKENS), self.angles(_PROBE_TOKENS))
            rows = Rows(replace(rows.mask, windows=windows), rows.angles)
            shapes: list[LayerShape] = []
            hidden = self.embed(ids)
            cache = KVCache((), _PROBE_TOKENS, self.dtype, self.device)
            for i in range(self.n_layers):
                rotated = self.project(i, hidden, rows)
                shapes.append(LayerShape(rotated.key.shape[0], rotated.key.shape[2], rotated.value.shape[2]))
                self._check_rotation(i, hidden, rows, rotated.key)
                cache.add_layer(shapes[-1])
                hidden = self.layer(i, hidden, rows, cache)
            got = self.logits(hidden)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"{name}'s layers cannot be driven one by one: {error}") from error

        self._check_windows(config, windows, name)
        difference = float((got - expected).abs().max() / expected.std())
        if not difference <= _PARITY_TOLERANCE.get(self.dtype, 0.25):
            raise UnsupportedModelError(
                f"{name} gives other logits layer by layer than in its own forward (largest difference "
                f"{difference:.3g} standard deviations): something between its layers is unknown to ragblend"
            )
        return tuple(shapes), tuple(windows[i] for i in range(self.n_layers))

    def _check_rotation(self, index: int, hidden: Tensor, rows: Rows, rotated: Tensor) -> None:
        kind = self._rope.key_of(index)
        still = identity_angles(rows.angles[kind][0])
        unrotated = self.project(index, hidden, Rows(rows.mask, {kind: still})).key
        n_rows = len(rows.mask)
        angles = {kind: (cos[:, :n_rows], sin[:, :n_rows]) for kind, (cos, sin) in rows.angles.items()}
        expected = self.rotate(index, unrotated, angles).float()
        error = float((expected - rotated.float()).abs().max() / rotated.float().abs().max().clamp_min(1e-9))
        if not error <= (1e-4 if self.dtype.itemsize >= 4 else 2e-2):
            raise UnsupportedModelError(
                f"layer {index} of {type(self.model).__name__} does not rotate its keys with the model's rotary "
                f"embedding alone (relative error {error:.3g}): its KV cannot be moved to another position"
            )

    def _check_windows(self, config: PreTrainedConfig, seen: dict[int, int | None], name: str) -> None:
        types = getattr(config, "layer_types", None) or [None] * self.n_layers
        window = getattr(config, "sliding_window", None)
        for i, kind in enumerate(types[: self.n_layers]):
            if kind not in (None, "full_attention", "sliding_attention"):
                raise UnsupportedModelError(f"layer {i} of {name} is a {kind} layer, not softmax attention over a past")
            expected = window if kind in (None, "sliding_attention") else None
            if kind is None and not hasattr(config, "sliding_window"):
                expected = None
            if seen.get(i) != expected:
                raise UnsupportedModelError(
                    f"layer {i} of {name} attends over a window of {seen.get(i)} tokens; its config says {expected}"
                )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Registered with transformers: selected rows are ours, everything else is its own "sdpa" (or "eager")."""
    if isinstance(attention_mask, CausalRows):
        n_rows = len(attention_mask)
        attended, weights = attend(module, query[:, :, :n_rows], key, value, attention_mask, **kwargs)
        spare = query.shape[2] - n_rows
        return F.pad(attended, (0, 0, 0, 0, 0, spare)) if spare else attended, weights
    stock = AttentionInterface()["sdpa"]
    out: tuple[Tensor, Tensor | None] = stock(module, query, key, value, attention_mask, **kwargs)
    return out


def _refuse_config(config: PreTrainedConfig, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; ragblend blends the KV of decoder-only models")
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None) is None and getattr(text, "rope_theta", None) is None:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) has no rotary position embedding (RoPE): its keys cannot be moved to "
            "another position; use a RoPE decoder such as Llama, Qwen, Mistral, Gemma or SmolLM"
        )


def _fingerprint(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Digest of what decides the KV of given ids: config, dtype, weights."""
    if model in _packed_fingerprints:  # its weights cannot be read any more
        return _packed_fingerprints[model]
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in _VOLATILE_CONFIG}
    weights = xxhash.xxh3_128()
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() in seen:  # tied
            continue
        seen.add(tensor.data_ptr())
        weights.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    described = json.dumps([config, str(dtype), weights.hexdigest()], sort_keys=True, default=str)
    return hashlib.blake2b(described.encode(), digest_size=20).hexdigest()


# -- loading ----------------------------------------------------------------------------------------------------


def load_pretrained(
    source: str | Path, *, dtype: torch.dtype, device: torch.device, gguf_file: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from a local folder or a hub id.

    Raises:
        ModelNotFoundError: nothing there, or the hub cannot be reached.
        UnsupportedModelError: not a decoder-only RoPE model (found out before weights are read).
    """
    extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    if os.path.isdir(source) or not hub_has(str(source), "config.json"):
        extra["local_files_only"] = True
    with _quiet(gguf_file is None):
        try:
            config = AutoConfig.from_pretrained(source, **extra)
            _refuse_config(config, (config.architectures or [config.model_type])[0])
            # GGUF weights are dequantised in fp32 and rounded once.
            read_as = dtype if gguf_file is None else torch.float32
            model = AutoModelForCausalLM.from_pretrained(source, dtype=read_as, **extra)
            tokenizer = AutoTokenizer.from_pretrained(source, **extra)
        except (OSError, ValueError) as error:
            raise _not_found(source, error) from error
    nn.Module.to(model, device, dtype)
    return model, tokenizer


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """No progress bars: reading weights takes a second. Converting a GGUF file takes many, and shows its progress."""
    if not wanted or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def hub_has(name: str, file: str) -> bool:
    """Whether to ask the hub for a model that `file` belongs to.

    What is cached need not be asked for, and where there is no hub its client would retry for minutes.
    """
    try:
        if isinstance(try_to_load_from_cache(name, file), str):
            return False
        HfApi().model_info(name, timeout=_HUB_PATIENCE_S)
    except Exception:
        return False
    return True


def _not_found(source: str | Path, error: Exception) -> ModelNotFoundError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelNotFoundError(
        f"no model at {str(source)!r} ({first}): give a folder with config.json and safetensors, a GGUF file, or the "
        "id of a model on a hub this machine can reach"
    )


def save_without_quantization(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model that was read from a quantised file, and its tokenizer, as plain safetensors.

    `save_pretrained` refuses a model that remembers its quantised origin, so the weights move to a model that never
    had one.
    """
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
