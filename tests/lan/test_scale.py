"""What docs/benchmarks.md says of many ranks, in small; ``python -m tests.lan late --ranks 10000`` is it in large."""

from __future__ import annotations

import pytest

from tests.lan.gathering import Gathering
from tests.lan.scale import late_host
from tests.support.levels import soaking

RANKS = 10_000 if soaking() else 100
RANKS_WITH_SEATS = 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_late_host_is_known_soon_and_waiting_for_it_is_cheap() -> None:
    figures = late_host(RANKS, loss=0.3, waiting=30.0, seed=1)
    assert len(figures.known) == RANKS - 1
    assert figures.percentile(0.99) < 1.0
    assert 0 < figures.waiting_per_minute <= 3_000


def test_ranks_that_wait_for_a_late_one_hardly_speak() -> None:
    """All have their seats, and one of them asks on the browse group for all who else is there."""
    gathering = Gathering(1, size=RANKS_WITH_SEATS + 1, timeout=60.0)
    gathering.host()
    for rank in range(1, RANKS_WITH_SEATS):
        gathering.member(rank, at=gathering.rng.uniform(0, 1))
    gathering.world.run(2.0)
    assert len(gathering.processes[0].host.registrar.seats) == RANKS_WITH_SEATS
    before = gathering.world.counts["datagrams"]
    gathering.world.run(57.5)
    offers = 58
    assert offers - 2 <= gathering.world.counts["datagrams"] - before <= offers + 10
    gathering.member(RANKS_WITH_SEATS)
    gathering.run()
    gathering.expect_formed()
