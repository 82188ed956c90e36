"""The seeds of what is quick enough to go through several of them in one test."""

from __future__ import annotations

import pytest

from tests.support.levels import spread


@pytest.fixture(params=spread(2, 9))
def seeds(request: pytest.FixtureRequest) -> range:
    """The first two on every level; what they miss, seven more and the random schedules look for."""
    found: range = request.param
    return found
