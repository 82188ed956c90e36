"""The seeds of what is quick enough to go through several of them in one test."""

from __future__ import annotations

import pytest

from tests.support.levels import spread


@pytest.fixture(params=spread(3, 9))
def seeds(request: pytest.FixtureRequest) -> range:
    """The first three on every level; what they miss, six more and the random schedules look for."""
    found: range = request.param
    return found
