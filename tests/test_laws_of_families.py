"""Those laws that a family could break by what it does around its attention, for families that do it differently."""

from __future__ import annotations

import pytest
from test_laws import (  # noqa: F401 - collected here once more, with other families
    bench,
    test_blend_then_decode_equals_stock_decode_from_the_same_cache,
    test_every_permutation_subset_and_repetition_agrees_at_ratio_one,
    test_first_chunk_behind_its_own_preamble_is_the_stock_prefix,
    test_full_prefill_equals_the_stock_forward,
    test_keys_rotated_away_and_back_are_the_same,
    test_stored_kv_does_not_depend_on_what_was_computed_before,
)
from tiny_models import OTHER_FAMILIES


@pytest.fixture(scope="module", params=OTHER_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)
