"""The seam to transformers: a causal LM driven layer by layer, on rows of our choosing.

The only file that imports transformers. It calls the decoder layers that transformers ships (law 7) with two things
of ours: a `Cache` that scatters the computed rows into preallocated full-length buffers, and `CausalRows` in the place
of a mask, which the registered attention function understands. What stands around the layers is learned by watching
the model's own forward, and the result is compared with that forward before the model is used for anything.

The model stays as it is: layers choose their attention function by their config, so ours are copies of them, with the
same weights and a config of their own.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import xxhash
from huggingface_hub import HfApi, try_to_load_from_cache
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers import PreTrainedModel as PreTrainedModel
from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from ragblend.errors import ModelChangedError, ModelNotFoundError, UnsupportedModelError
from ragblend.kv import LayerKV, LayerShape
from ragblend.model.adapters import adapters, plain_name, uncompiled, unwrapped
from ragblend.model.attention import ATTENTION_NAME, AttentionProbe, CausalRows, attend
from ragblend.model.cache import KVCache
from ragblend.model.packed import can_pack, pack_linears, release_mapping, rounded_up, same_inputs
from ragblend.model.pages import prefer_huge_pages
from ragblend.model.rope import USE_RATHER, Angles, Rope, identity_angles, inverted
from ragblend.model.threads import Turn, disband
from ragblend.model.watch import Watch

_log = logging.getLogger(__name__)

DEVICE_TYPES = ("cpu", "cuda")

_HUB_PATIENCE_S = 5.0
_PROBE_TOKENS = 24
# Largest difference to the model's own logits that rounding explains, in units of the logits' standard deviation.
_PARITY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
_VOLATILE_ATTRIBUTES = ("max_seq_len_cached",)  # of modules: what they note down while they are used
# Of models whose weights were packed, which hides them: their fingerprint, and the digest of what is left to be read.
_packed: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, str]] = weakref.WeakKeyDictionary()


class Rows(NamedTuple):
    """Rows of one pass: where they are, and the angles of those positions for each kind of layer.

    There may be more angles and ids than rows: so many rows are computed.
    """

    mask: CausalRows
    angles: dict[str, Angles]
    position_ids: Tensor  # [1, angles]

    def probing(self, probe: AttentionProbe | None) -> Rows:
        """The same rows, with attention weights collected in `probe`."""
        return self._replace(mask=replace(self.mask, probe=probe))


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
        logits: Tensor = self.linear(self.norm(hidden)).float()
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class _OwnForward(NamedTuple):
    """What the model's own forward showed.

    before, after: modules between embedding and layers, and between layers and language-model head.
    cache_name: the keyword by which layers are given their cache.
    """

    logits: Tensor  # [tokens, vocab], fp32
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    cache_name: str


class Decoder:
    """A RoPE decoder-only causal LM, one layer and any set of rows at a time. Batch size is one throughout.

    Not thread-safe: one pass at a time. Whoever computes holds `turn`.

    Attributes:
        n_layers, context_window_tokens, vocab_size, dtype, device: what they say.
        shapes: LayerShape of each layer.
        windows: tokens each layer attends over, itself included; None for all of the past.
        fingerprint: digest of config, dtype, every weight, and what else modules compute with (frequencies, scales,
            adapters); names this model in chunk keys. A path or hub name is no identity. Of a model with hooks of its
            user's on its layers, unlike any other. (Hooks that are registered later are run, and not noticed.)
    """

    def __init__(self, model: PreTrainedModel, *, pack: bool = False) -> None:
        """Drive a loaded model.

        Args:
            model: a causal LM from transformers, or one with adapters of PEFT. It goes on working for whoever else
                holds it, with the attention implementation it has. Its modules must not be replaced, nor its weights
                changed: see `changed`.
            pack: lay the weights of its layers out for the CPU's matrix units, where that helps. The model still
                computes the same, but can no longer be trained, converted or saved: for a model nobody else holds.

        Raises:
            UnsupportedModelError: it is not a RoPE decoder, or its layers give other results here than in its own
                forward.
        """
        model = cast(PreTrainedModel, unwrapped(model))
        config = model.config.get_text_config()
        name = type(model).__name__
        _refuse_config(model.config, name)
        places = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(places) > 1 or places[0].split(":")[0] not in DEVICE_TYPES:
            raise UnsupportedModelError(
                f"the weights of {name} are on {' and '.join(places)}, and ragblend computes on the CPU or on one CUDA "
                "GPU (meta: kept elsewhere, to be fetched layer by layer): load the model without device_map, or with "
                "one that names a single device"
            )
        layer_types = getattr(config, "layer_types", None)
        for i, kind in enumerate((layer_types or ())[: config.num_hidden_layers]):
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(
                    f"layer {i} of {name} is a {kind} layer, not attention over all of a past or a window of it"
                )
        self.model = model.eval()
        base = model.get_decoder()
        linear, embed_tokens = model.get_output_embeddings(), model.get_input_embeddings()
        layers = next(
            (m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) >= config.num_hidden_layers), None
        )
        if layers is None or linear is None or embed_tokens is None:
            raise UnsupportedModelError(
                f"{name} is not one list of decoder layers between an embedding and a language-model head; {USE_RATHER}"
            )
        self._layers: list[Any] = [uncompiled(layer) for layer in layers[: config.num_hidden_layers]]
        self._embed_tokens = cast(nn.Embedding, embed_tokens)
        self._embedding_multiplier = float(getattr(config, "embedding_multiplier", None) or 1.0)
        self._rope = Rope.of(base, self._layers[0], tuple(layer_types) if layer_types else None)
        if not hasattr(sys.modules[type(self._layers[0]).__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise UnsupportedModelError(
                f"{name} computes attention in its own code alone, not through transformers' attention interface, so "
                f"it cannot be asked for selected rows; {USE_RATHER}"
            )
        self.n_layers = len(self._layers)
        self.context_window_tokens = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self.dtype: torch.dtype = self._embed_tokens.weight.dtype
        if self.dtype not in _PARITY_TOLERANCE:
            raise UnsupportedModelError(
                f"the weights of {name} are {str(self.dtype).removeprefix('torch.')}: load it in bfloat16, float16 or "
                "float32"
            )
        self.device: torch.device = self._embed_tokens.weight.device
        self._steady_tokens = self._rope.steady(self.context_window_tokens, self._embed_tokens.weight)
        self.turn = Turn()
        self._rounds_up = can_pack(self.dtype, self.device)
        self._adapters = adapters(model)
        self._content = self._content_now()
        packed_as, left = _packed.get(model, ("", ""))
        same = left == self._content
        fingerprint = packed_as if same else _fingerprint(model, self.dtype, packed_as + self._content)
        self.fingerprint = fingerprint
        if hooks := _users_hooks((self._embed_tokens, *self._layers)):
            # What they do to the KV has no name that another process, or a later moment, would know it by.
            self.fingerprint = hashlib.blake2b(fingerprint.encode() + os.urandom(16), digest_size=20).hexdigest()
            _log.warning(
                "%s has hooks on its layers (%s), which may change what they give: KV made with them is found by this "
                "engine alone, for as long as it lives. Remove those that only watch before you make one",
                name,
                ", ".join(hooks),
            )
        if self.device.type == "cpu":
            prefer_huge_pages()

        pack = pack and can_pack(self.dtype, self.device) and not self._adapters  # they look at the weights they adapt
        ids = torch.randint(0, self.vocab_size, (_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
        with same_inputs(model if pack else nn.Module()) as siblings:
            own = self._watch_own_forward(base, ids)
        if pack:
            pack_linears(nn.ModuleList(self._layers), siblings)
            release_mapping(model)
            self._content = self._content_now()
            _packed[model] = fingerprint, self._content
        configs: dict[int, PreTrainedConfig] = {}
        self._layers = [_redirected(layer, configs) for layer in self._layers]
        self._after_embedding = [_redirected(module, configs) for module in own.before]
        self._cache_name = own.cache_name
        multiplier = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        self._head = _Head(nn.Sequential(*own.after), linear, multiplier, softcap)
        self.shapes, self.windows, self._rotated_dims = self._probe(config, ids, own.logits)
        if self.device.type == "cpu":
            prefer_huge_pages(model.parameters())
        self._watch = Watch(model)
        disband()  # who loads a model need not be who uses it

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(d.kv_heads * (d.key_dim + d.value_dim) for d in self.shapes) * self.dtype.itemsize

    @property
    def changed(self) -> bool:
        """Whether the model's weights are others than when this was made, or somewhere else; or its adapters."""
        if self._adapters and adapters(self.model) != self._adapters:
            return True
        if not self._watch.sees_change():
            return False
        if self._embed_tokens.weight.device != self.device or self._content_now() != self._content:
            return True
        self._watch.begin()  # written to, and the same as before
        return False

    def check_unchanged(self) -> None:
        """Raises ModelChangedError where the weights are `changed`: their KV would go by the name of others."""
        if self.changed:
            raise ModelChangedError(
                f"the weights of {type(self.model).__name__} are not what they were when ragblend took the model: they "
                "have been trained, merged, loaded, converted or moved, or its adapters switched. Make a new RagBlend "
                "(or Decoder) of it, or put back what was there"
            )

    def _content_now(self) -> str:
        self.angles(1)  # frequencies of longrope are those of the last prompt
        return _content_digest(self.model)

    def new_cache(self, capacity_tokens: int) -> KVCache:
        """Empty buffers for `capacity_tokens` positions."""
        return KVCache(self.shapes, capacity_tokens, self.dtype, self.device)

    def angles(self, stop: int) -> dict[str, Angles]:
        """Angles of positions 0..stop-1 for every kind of layer."""
        return self._rope.angles(torch.arange(stop), self._embed_tokens.weight)

    def is_long(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens has other angles than short ones, as with longrope; never for most models.

        KV of short and of long prompts does not go together.
        """
        return tokens > self._steady_tokens

    def inverse_angles(self, start: int, stop: int) -> dict[str, Angles]:
        """What undoes the rotation of keys at positions start..stop-1 of a prompt that ends there, in fp32."""
        return {
            kind: inverted((cos[:, start:stop], sin[:, start:stop])) for kind, (cos, sin) in self.angles(stop).items()
        }

    def rows(self, positions: Tensor, angles: dict[str, Angles], *, invisible: Tensor | None = None) -> Rows:
        """Rows at ascending absolute positions [rows]. angles: of 0..stop-1 (see `angles`), picked from here."""
        at = self._rounded(positions.to(self.device))
        picked = {kind: (cos[:, at], sin[:, at]) for kind, (cos, sin) in angles.items()}
        return Rows(CausalRows(positions.cpu(), self.device, invisible), picked, at[None])

    def run(self, start: int, stop: int) -> Rows:
        """Rows at positions start..stop-1, for decoding."""
        positions = torch.arange(start, stop)
        rounded = self._rounded(positions)
        angles = self._rope.angles(rounded, self._embed_tokens.weight)
        return Rows(CausalRows(positions, self.device), angles, rounded.to(self.device)[None])

    def _rounded(self, positions: Tensor) -> Tensor:
        """Positions [rows], and 0 for each row that products make up (see `rounded_up`)."""
        rows = len(positions)
        return F.pad(positions, (0, rounded_up(rows) - rows)) if self._rounds_up else positions

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [rows] -> hidden states [1, rows, hidden]."""
        hidden: Tensor = self._embed_tokens(ids.to(self.device)[None])
        if self._embedding_multiplier != 1.0:
            hidden = hidden * self._embedding_multiplier
        for module in self._after_embedding:
            hidden = module(hidden)
        return hidden

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
        """Keys (rotated) and values [kv_heads, rows, dim] that a layer would make of `hidden`, and no more work.

        Raises:
            UnsupportedModelError: the layer makes none.
        """
        try:
            self._call(index, hidden, rows, _Intercept(rows.mask))
        except _Projected as projected:
            return LayerKV(projected.key, projected.value)
        raise UnsupportedModelError(f"layer {index} makes no keys and values of its own (shared KV)")

    def logits(self, hidden: Tensor) -> Tensor:
        """[1, rows, hidden] after the last layer -> logits [rows, vocab], fp32."""
        with self.own_dtype():
            return self._head(hidden)[0]

    def wait(self) -> None:
        """Come back when what was asked for is computed: a GPU is still at it when the functions here return."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def rotate(self, layer: int, key: Tensor, angles: dict[str, Angles]) -> Tensor:
        """Rotate stored keys [kv_heads, tokens, key_dim] to the positions of `angles`."""
        return self._rope.rotate(key, angles[self._rope.key_of(layer)], self._rotated_dims[layer])

    def unrotate(self, layer: int, key: Tensor, inverse: dict[str, Angles]) -> Tensor:
        """Undo `rotate`. inverse: `inverse_angles` of the positions the keys are at."""
        return self._rope.unrotate(key, inverse[self._rope.key_of(layer)], self._rotated_dims[layer])

    def _call(self, index: int, hidden: Tensor, rows: Rows, cache: Cache) -> Tensor:
        angles = rows.angles[self._rope.key_of(index)]
        n_rows = hidden.shape[1]
        spare = angles[0].shape[1] - n_rows
        if spare:  # rows of nothing, that nobody sees and that see nobody
            hidden = F.pad(hidden, (0, 0, 0, spare))
        with self.own_dtype():
            out: Tensor = self._layers[index](
                hidden,
                attention_mask=rows.mask,
                position_embeddings=angles,
                position_ids=rows.position_ids,
                use_cache=True,
                **{self._cache_name: cache},
            )
        return out[:, :n_rows]

    def own_dtype(self) -> AbstractContextManager[Any]:
        """What a caller has put under autocast is not KV, which goes by the name of the model's own dtype."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    # -- load-time checks ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _watch_own_forward(self, base: nn.Module, ids: Tensor) -> _OwnForward:
        """Run the model as transformers does, and see what it does before and after its layers."""
        called: list[nn.Module] = []
        before: list[nn.Module] = []
        cache_names: list[str] = []
        mine = threading.get_ident()  # others may be using the model

        def note(module: nn.Module, _: Any, output: Any) -> None:
            if threading.get_ident() == mine and isinstance(output, Tensor) and module is not self._embed_tokens:
                called.append(module)

        def enter_first(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
            if threading.get_ident() == mine:
                before.extend(called)
                cache_names.extend(name for name, value in given.items() if isinstance(value, Cache))

        def leave_last(*_: Any) -> None:
            if threading.get_ident() == mine:
                called.clear()

        hooks = [child.register_forward_hook(note) for child in base.children()]
        hooks.append(self._layers[0].register_forward_pre_hook(enter_first, with_kwargs=True))
        hooks.append(self._layers[-1].register_forward_hook(leave_last))
        try:
            # Nothing is compiled for the one call, and hooks that compilers cannot read are none of theirs.
            with torch.compiler.set_stance("force_eager"), self.own_dtype():
                logits = self.model(input_ids=ids.to(self.device)[None], use_cache=True).logits[0].float()
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}'s own forward fails on {len(ids)} tokens and an empty cache: "
                f"{_described(error)}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        return _OwnForward(logits, tuple(before), tuple(called), (cache_names or ["cache"])[0])

    @torch.inference_mode()
    def _probe(
        self, config: PreTrainedConfig, ids: Tensor, expected: Tensor
    ) -> tuple[tuple[LayerShape, ...], tuple[int | None, ...], tuple[int, ...]]:
        """Compare with the model's own logits of a short prompt and learn the layers' sizes.

        Also learns, layer by layer, what is rotated of a key, and checks that sliding layers ask for the window their
        config names: a short prompt would not show either.
        """
        name = type(self.model).__name__
        AttentionInterface.register(ATTENTION_NAME, _attention)
        try:
            windows: dict[int, int | None] = {}
            rows = self.rows(torch.arange(_PROBE_TOKENS), self.angles(_PROBE_TOKENS))
            rows = rows._replace(mask=replace(rows.mask, windows=windows))
            shapes: list[LayerShape] = []
            rotated: list[int] = []
            hidden = self.embed(ids)
            cache = KVCache((), _PROBE_TOKENS, self.dtype, self.device)
            for i in range(self.n_layers):
                made = self.project(i, hidden, rows)
                shapes.append(LayerShape(made.key.shape[0], made.key.shape[2], made.value.shape[2]))
                cache.add_layer(shapes[-1])
                given, hidden = hidden, self.layer(i, hidden, rows, cache)
                rotated.append(self._find_rotated(i, given, rows, made))
            got = self.logits(hidden)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{name}'s layers cannot be driven one by one, with rows in the place of a mask: {_described(error)}"
            ) from error

        self._check_windows(config, windows, name)
        difference = float((got - expected).abs().max() / expected.std())
        if not difference <= _PARITY_TOLERANCE.get(self.dtype, 0.25):
            raise UnsupportedModelError(
                f"{name} gives other logits layer by layer than in its own forward (largest difference "
                f"{difference:.3g} standard deviations): something between its layers is unknown to ragblend"
            )
        return tuple(shapes), tuple(windows[i] for i in range(self.n_layers)), tuple(rotated)

    def _find_rotated(self, index: int, hidden: Tensor, rows: Rows, made: LayerKV) -> int:
        """How many dimensions of a layer's keys the model's own function rotates; none in a layer without positions."""
        kind = self._rope.key_of(index)
        still = {kind: identity_angles(rows.angles[kind][0])}
        nowhere = rows._replace(angles=still, position_ids=torch.zeros_like(rows.position_ids))
        unrotated = self.project(index, hidden, nowhere)
        layer = f"layer {index} of {type(self.model).__name__}"
        if not torch.equal(unrotated.value, made.value):
            raise UnsupportedModelError(
                f"{layer} keeps rotated numbers in the place of values (latent attention): its KV cannot be moved to "
                "another position"
            )
        n_rows = len(rows.mask)
        cos, sin = (part[:, :n_rows] for part in rows.angles[kind])
        size = made.key.float().abs().max().clamp_min(1e-9)
        errors: dict[int, float] = {}
        for width in (cos.shape[-1], 2 * cos.shape[-1], 0):  # some models have one angle for each pair
            if width > made.key.shape[-1]:
                continue
            try:
                rotated = self._rope.rotate(unrotated.key, (cos, sin), width)
            except (RuntimeError, TypeError):  # not of this width, or not a function of these
                continue
            errors[width] = float((rotated.float() - made.key.float()).abs().max() / size)
        width = min(errors, key=errors.__getitem__)
        if not errors[width] <= (1e-4 if self.dtype.itemsize >= 4 else 2e-2):
            raise UnsupportedModelError(
                f"{layer} does not rotate its keys with the model's rotary embedding alone (relative error "
                f"{errors[width]:.3g}): its KV cannot be moved to another position"
            )
        return width

    def _check_windows(self, config: PreTrainedConfig, seen: dict[int, int | None], name: str) -> None:
        types = getattr(config, "layer_types", None) or [None] * self.n_layers
        window = getattr(config, "sliding_window", None)
        for i, kind in enumerate(types[: self.n_layers]):
            expected = window if kind in (None, "sliding_attention") else None
            if kind is None and not hasattr(config, "sliding_window"):
                expected = None
            if seen.get(i) != expected:
                raise UnsupportedModelError(
                    f"layer {i} of {name} attends over a window of {seen.get(i)} tokens; its config says {expected}"
                )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: CausalRows, **kwargs: Any
) -> tuple[Tensor, None]:
    """Registered with transformers. Nothing is asked for the rows that products make up."""
    n_rows = len(attention_mask)
    attended, weights = attend(module, query[:, :, :n_rows], key, value, attention_mask, **kwargs)
    spare = query.shape[2] - n_rows
    # Contiguous, as transformers' own functions have it: some layers take a view of it.
    return F.pad(attended, (0, 0, 0, 0, 0, spare)) if spare else attended.contiguous(), weights


def _redirected(module: nn.Module, configs: dict[int, PreTrainedConfig]) -> nn.Module:
    """The same weights and code, but attention computed by `_attention`.

    Modules that have a config, and those around them, are copied; the copies share their parameters with the
    originals. So are those without weights: dropout stays off here when somebody else goes on training the model.

    Args:
        configs: copies of configs met so far, by the id of the original.
    """
    module = uncompiled(module)
    children = {name: _redirected(child, configs) for name, child in module.named_children()}
    config = vars(module).get("config")
    bare = not (module._parameters or module._buffers or children)
    same = all(module._modules[name] is children[name] for name in children)
    if not isinstance(config, PreTrainedConfig) and same and not bare:
        return module
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    vars(twin).update({name: _rebound(value, module, twin) for name, value in vars(twin).items()})
    if isinstance(config, PreTrainedConfig):
        if id(config) not in configs:
            configs[id(config)] = copy.copy(config)
            configs[id(config)]._attn_implementation_internal = ATTENTION_NAME
        twin.__dict__["config"] = configs[id(config)]
    return twin


def _users_hooks(modules: Sequence[nn.Module]) -> list[str]:
    """Names of the hooks on these modules and inside them that are not those of the libraries a model is made with."""
    found: dict[str, None] = {}
    for module in (inner for outer in modules for inner in outer.modules()):
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            function = hook.func if isinstance(hook, functools.partial) else hook
            if str(function.__module__).split(".")[0] not in ("torch", "transformers", "accelerate", "peft"):
                found[getattr(function, "__qualname__", type(function).__qualname__)] = None
    return list(found)


def _rebound(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    """A module's attribute for its twin: what others put in the place of its forward (accelerate does) is bound."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, twin)
    if isinstance(value, functools.partial) and value.args and value.args[0] is module:
        return functools.partial(value.func, twin, *value.args[1:], **value.keywords)
    return value


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _refuse_config(config: PreTrainedConfig, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; ragblend blends the KV of decoder-only models")
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None) is None and getattr(text, "rope_theta", None) is None:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) has no rotary position embedding (RoPE) in its config, by which its keys "
            f"could be moved to another position; {USE_RATHER}"
        )


def _fingerprint(model: PreTrainedModel, dtype: torch.dtype, content: str) -> str:
    """Digest of what decides the KV of given ids. content: of the model, see `_content_digest`."""
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in _VOLATILE_CONFIG}
    described = json.dumps([config, str(dtype), content], sort_keys=True, default=str)
    return hashlib.blake2b(described.encode(), digest_size=20).hexdigest()


def _content_digest(model: PreTrainedModel) -> str:
    """Digest of the weights, and of what modules hold beside them."""
    content = xxhash.xxh3_128()
    seen: dict[tuple[Any, ...], str] = {}
    state: dict[str, Any] = {plain_name(name): kept for name, kept in model.state_dict().items()}
    for name, tensor in sorted(state.items()):
        if type(tensor) is not Tensor or tensor.is_quantized:  # packed, as quantised layers keep theirs
            saved = io.BytesIO()
            torch.save(tensor, saved)
            content.update(name.encode() + saved.getvalue())
            continue
        where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if (first := seen.setdefault(where, name)) != name:  # tied
            content.update(f"{name}={first}".encode())
            continue
        content.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        content.update(_raw(tensor))
    for name, module in model.named_modules():
        # Neither what is around the layers nor compilers' wrapping.
        if not isinstance(module, PreTrainedModel) and uncompiled(module) is module:
            content.update(json.dumps([plain_name(name), *_described_module(module)], sort_keys=True).encode())
    content.update(json.dumps(adapters(model)).encode())
    return content.hexdigest()


def _described_module(module: nn.Module) -> tuple[Any, ...]:
    """What a module computes with beside its weights, in plain types: class, numbers, buffers that are not saved.

    The config says most of it, but need not be what they were made from: frequencies are rounded where a model is
    converted as a whole, and a config may be changed when its modules are there already.
    """
    numbers = {
        key: f"{value:.6g}" if isinstance(value, float) else value
        for key, value in vars(module).items()
        if type(value) in (int, float, str) and not key.startswith("_") and key not in _VOLATILE_ATTRIBUTES
    }
    buffers: dict[str, Any] = {}
    for key in sorted(module._non_persistent_buffers_set):
        if (buffer := module._buffers[key]) is not None:
            kept = buffer.detach()
            if kept.is_floating_point():
                # Three digits: other machines' last bits are others, and what is meant to differ differs by more.
                mantissa, exponent = torch.frexp(kept.cpu().double())
                kept = torch.stack([(mantissa * 1024).round(), exponent.double()])
            digest = xxhash.xxh3_128_hexdigest(_raw(kept))
            buffers[key] = [str(buffer.dtype), tuple(buffer.shape), digest]
    return type(module).__name__, numbers, buffers


def _raw(tensor: Tensor) -> Any:
    """A tensor's bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


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
    # Converting a GGUF file takes long enough to show its progress.
    with no_progress_bars() if gguf_file is None else nullcontext():
        try:
            config = AutoConfig.from_pretrained(source, **extra)
            _refuse_config(config, (config.architectures or [config.model_type])[0])
            # GGUF weights are dequantised in fp32 and rounded once.
            read_as = dtype if gguf_file is None else torch.float32
            model = AutoModelForCausalLM.from_pretrained(source, dtype=read_as, **extra)
            tokenizer = AutoTokenizer.from_pretrained(source, **extra)
        except (OSError, ValueError) as error:
            raise _not_found(source if gguf_file is None else Path(source, gguf_file), error) from error
    nn.Module.to(model, device)
    for parameter in model.parameters():
        # Not the buffers: frequencies of rotary embeddings stay fp32 whatever the weights are, as in transformers.
        parameter.data = parameter.data.to(dtype)
    return model, tokenizer


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """For what takes a second, as reading weights does."""
    if not transformers_logging.is_progress_bar_enabled():
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
