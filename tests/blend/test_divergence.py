"""The distance between a blend and a full prefill: KL against values worked out by hand, logits against stock ones."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import tiny_model

from ragblend.blend.divergence import answer_logits, kl_divergence
from ragblend.blend.prefill import full_plan, prefill
from ragblend.blend.selectors import RecomputeNone
from ragblend.errors import InvalidSettingError
from ragblend.model.decoder import Decoder


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_kl_is_of_the_reference_to_the_other_in_nats() -> None:
    got = kl_divergence(logits_of([0.5, 0.5], [0.9, 0.1]), logits_of([0.9, 0.1], [0.5, 0.5]))
    first = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    second = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([first, second], rel=1e-6)


def test_kl_does_not_see_a_shift_of_all_logits() -> None:
    logits = torch.randint(-9, 9, (500, 50), generator=torch.Generator().manual_seed(0)).float()
    got = kl_divergence(logits, logits + 0.1)  # rounding alone would take it to either side of 0
    assert 0.0 <= got.min() <= got.max() < 1e-12


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_kl_of_the_same_logits_is_exactly_zero(scale: float) -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * scale
    logits[:, ::7] = -torch.inf  # tokens ruled out
    assert kl_divergence(logits, logits.clone()).tolist() == [0.0] * 5


def test_kl_is_never_negative_and_is_infinite_where_an_allowed_token_is_ruled_out() -> None:
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(1))
    nearly = logits + 1e-7 * torch.randn(200, 5000, generator=torch.Generator().manual_seed(2))
    got = kl_divergence(logits, nearly)
    assert got.min() >= 0.0
    assert got.max() < 1e-9
    allowed, ruled_out = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -torch.inf]])
    assert kl_divergence(allowed, ruled_out).tolist() == [math.inf]
    assert kl_divergence(ruled_out, allowed).tolist() == pytest.approx([math.log(2)])


@pytest.mark.parametrize("broken", ["reference", "other"])
def test_kl_of_broken_logits_is_no_good_score(broken: str) -> None:
    rows = {"reference": torch.zeros(2, 3), "other": torch.zeros(2, 3)}
    rows[broken][1, 2] = torch.nan
    got = kl_divergence(**rows)
    assert got[0] == 0.0
    assert got[1].isnan()


@pytest.mark.parametrize("shapes", [((2, 3), (1, 3)), ((3,), (3,)), ((1, 2, 3), (1, 2, 3))])
def test_kl_wants_two_matrices_of_one_shape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(InvalidSettingError, match=r"\[tokens, vocab\]"):
        kl_divergence(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


def test_logits_of_an_answer_are_those_of_the_models_own_forward(family: str) -> None:
    model = tiny_model(family)
    decoder = Decoder(model)
    ids, answer = torch.arange(40) % 31 + 5, [7, 300, 12, 9]
    cache = decoder.new_cache(len(ids) + len(answer))
    logits = prefill(decoder, cache, full_plan(ids), None, RecomputeNone(), 0.0).logits
    with torch.inference_mode():
        stock = model(torch.cat([ids, torch.tensor(answer)])[None]).logits[0].float()
    for tokens in (4, 1, 3):  # what was there behind the prompt is overwritten
        got = answer_logits(decoder, cache, logits, len(ids), answer[:tokens])
        assert (got - stock[len(ids) - 1 : len(ids) - 1 + tokens]).abs().max() < 1e-4
