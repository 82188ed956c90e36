"""What docs/scale.md promises, in small; ``python -m tests.lan late --ranks 10000`` is the run in large."""

from __future__ import annotations

import pytest

from tests.lan.scale import late_host
from tests.soak import soaking

RANKS = 10_000 if soaking() else 300


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_late_host_is_known_soon_and_waiting_for_it_is_cheap() -> None:
    figures = late_host(RANKS, loss=0.3, waiting=30.0, seed=1)
    assert len(figures.known) == RANKS - 1
    assert figures.percentile(0.99) < 1.0
    assert 0 < figures.waiting_per_minute <= 3_000
