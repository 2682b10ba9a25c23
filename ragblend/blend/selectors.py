"""Which reused tokens to recompute. Each selector is a frozen dataclass; its fields are its parameters.

There is none for the product of deviation and attention: with SmolLM2-135M it came no closer to a full prefill than
attention alone, and it costs both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ragblend.blend.prefill import Pass, Selector
from ragblend.errors import InvalidSettingError
from ragblend.model.attention import AttentionProbe


@dataclass(frozen=True)
class RecomputeAll:
    """Recompute every reused token whatever the ratio says: full prefill in all but the reading."""

    def schedule(self, ratio: float) -> dict[int, float]:
        return {0: 1.0}

    def scores(self, state: Pass, layer: int) -> Tensor:
        return state.kept.float()


@dataclass(frozen=True)
class RecomputeNone:
    """Recompute nothing whatever the ratio says: full reuse (PromptCache, arXiv 2311.04934)."""

    def schedule(self, ratio: float) -> dict[int, float]:
        return {0: 0.0}

    def scores(self, state: Pass, layer: int) -> Tensor:
        return state.kept.float()


@dataclass(frozen=True)
class FirstTokens:
    """The first tokens of every chunk: they lack the most context and draw the most attention.

    EPIC (arXiv 2410.15332) recomputes a fixed number of them; here the budget decides how many.
    """

    def schedule(self, ratio: float) -> dict[int, float]:
        return {0: ratio}

    def scores(self, state: Pass, layer: int) -> Tensor:
        scores = torch.full(state.kept.shape, float("-inf"))
        for start, stop in state.plan.chunks:
            scores[start:stop] = -torch.arange(stop - start, dtype=torch.float32)
        return scores


@dataclass(frozen=True)
class HKVD:
    """High-KV-deviation tokens: those whose recomputed KV is farthest from the stored one (arXiv 2405.16444, 4.2-4.3).

    Every reused token goes through the layers before `check_layer`, since deviation needs fresh hidden states; layer
    0's KV depends on the token alone, so layer 1 is the first that can show any.

    by: deviation of keys, values, or both (squared L2 norm over heads and dimensions; angles do not change it). Keys
        alone rank best where values of a few tokens are huge.
    check_layer: the layer at which tokens are first ranked.
    layers: over how many layers the set shrinks to the ratio (1: at once). Gradual filtering: the first keeps
        `slack` times the ratio, each next one geometrically less, the last the ratio.

    Raises:
        InvalidSettingError: a value out of range.
    """

    by: Literal["k", "v", "kv"] = "k"
    check_layer: int = 1
    layers: int = 1
    slack: float = 1.5

    def __post_init__(self) -> None:
        if self.by not in ("k", "v", "kv") or self.check_layer < 1 or self.layers < 1 or self.slack < 1.0:
            raise InvalidSettingError(
                f"{self}: by is 'k', 'v' or 'kv', check_layer and layers are at least 1, slack is at least 1.0"
            )

    def schedule(self, ratio: float) -> dict[int, float]:
        steps = range(self.layers)
        shrink = [self.slack ** (1 - step / max(1, self.layers - 1)) if self.layers > 1 else 1.0 for step in steps]
        return {self.check_layer + step: min(1.0, ratio * shrink[step]) for step in steps}

    def scores(self, state: Pass, layer: int) -> Tensor:
        at = state.positions.to(state.decoder.device)
        fresh = state.decoder.project(layer, state.hidden, state.rows)
        stored = state.cache.read(layer, at)
        deviation = torch.zeros(len(at), device=at.device)
        for name, now, then in (("k", fresh.key, stored[0]), ("v", fresh.value, stored[1])):
            if name in self.by:
                deviation += (now.float() - then.float()).square().sum((0, 2))
        scores = torch.zeros(state.kept.shape)
        scores[state.positions] = deviation.cpu()
        return scores


@dataclass(frozen=True)
class QuestionAttention:
    """The reused tokens the question attends to, over a band of layers.

    The question's rows run ahead through the first layers against the stored KV; the attention they pay to each reused
    token, averaged over their rows, the heads and the band's layers, is its score. What the answer reads is what has to
    be right. The run stops behind the band. Early bands are cheap, late ones know better what is going to be read; the
    middle quarter of the layers has most of both (calibration looks for the model's own).

    band: (start, stop) of the band as shares of the depth.
    question_tokens: at most so many of the last rows are asked.

    Raises:
        InvalidSettingError: a value out of range.
    """

    band: tuple[float, float] = (0.375, 0.625)
    question_tokens: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "band", tuple(self.band))  # JSON has lists only
        if len(self.band) != 2 or not 0.0 <= self.band[0] < self.band[1] <= 1.0 or self.question_tokens < 1:
            raise InvalidSettingError(f"{self}: band is 0 <= start < stop <= 1 and question_tokens at least 1")

    def schedule(self, ratio: float) -> dict[int, float]:
        return {0: ratio}

    def scores(self, state: Pass, layer: int) -> Tensor:
        plan, decoder = state.plan, state.decoder
        tokens = len(plan.ids)
        # A prompt that ends in a chunk is asked through its last token.
        question = range(max(min(plan.question[0], tokens - 1), tokens - self.question_tokens), tokens)
        # The prompt's head comes along, as the sink that attention weights are relative to: all of it, so that the same
        # tokens are chosen whether it is known or not. Other fresh tokens have no KV yet and stay invisible.
        head = range(plan.known, plan.chunks[0][0]) if plan.chunks else range(0)
        positions = torch.tensor([*head, *question])
        invisible = state.fresh.clone()
        invisible[positions] = False
        if bool(invisible.any()):
            state.cache.blank(invisible.nonzero()[:, 0])
            rows = decoder.rows(positions, state.angles, invisible=invisible)
        else:
            rows = decoder.rows(positions, state.angles)

        asked = self.asked_layers(decoder.windows, tokens)
        mass = torch.zeros(tokens, device=decoder.device)
        probing = rows.probing(AttentionProbe(len(positions) - len(question), mass))
        hidden = decoder.embed(plan.ids[positions])
        for i in range(max(asked) + 1):
            state.load(i)
            hidden = decoder.layer(i, hidden, probing if i in asked else rows, state.cache)
            state.row_layers += len(positions)
        return mass.cpu()

    def asked_layers(self, windows: Sequence[int | None], tokens: int) -> frozenset[int]:
        """Those of the band that see the whole prompt.

        A layer with a sliding window says nothing about what lies before it. Where the band has no other, the next
        layer that sees everything is asked, and where the model has none, the band as it is.
        """
        n_layers = len(windows)
        first = min(int(self.band[0] * n_layers), n_layers - 1)
        band = range(first, max(first + 1, round(self.band[1] * n_layers)))
        seeing = [i for i in range(first, n_layers) if windows[i] is None or (windows[i] or 0) >= tokens]
        return frozenset([i for i in seeing if i in band] or seeing[:1] or band)


_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (RecomputeAll, RecomputeNone, FirstTokens, HKVD, QuestionAttention)
}


def selector_as_dict(selector: Selector) -> dict[str, Any]:
    """Plain types only, for JSON: the selector's name and its parameters.

    Raises:
        InvalidSettingError: it is none of this file's.
    """
    name = type(selector).__name__
    if _KINDS.get(name) is not type(selector):
        raise InvalidSettingError(f"{selector!r} cannot be written down: only {', '.join(_KINDS)} can")
    return {"name": name, **asdict(selector)}  # type: ignore[call-overload]


def selector_from_dict(data: Mapping[str, Any]) -> Selector:
    """What selector_as_dict gave.

    Raises:
        InvalidSettingError: it is something else.
    """
    parameters = dict(data)
    try:
        made: Selector = _KINDS[parameters.pop("name")](**parameters)
    except (KeyError, TypeError) as error:
        raise InvalidSettingError(f"{dict(data)} is no selector: calibrate again") from error
    return made
