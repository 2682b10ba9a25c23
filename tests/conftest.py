from __future__ import annotations

import pytest
from tiny_models import FAMILIES


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each tiny model family in turn."""
    return str(request.param)
