"""What docs/benchmarks.md says of many ranks, in small; ``python -m tests.lan late --ranks 4096`` is it in large."""

from __future__ import annotations

import statistics

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


def test_a_small_job_forms_within_a_second_where_half_of_all_datagrams_are_lost() -> None:
    """Each is sent by IPv4 and by IPv6, so a quarter of the pairs is lost."""
    formed = []
    for seed in range(400 if soaking() else 100):
        gathering = Gathering(seed, size=8, loss=0.25)
        host = gathering.everybody([0.6, *(gathering.rng.uniform(0, 0.1) for _ in range(7))])[0]
        gathering.run()
        gathering.expect_formed()
        formed.append(max(each.formed_at or 0.0 for each in gathering.processes) - host.started_at)
    assert sorted(formed)[int(0.98 * len(formed))] < 1.0


def test_a_small_job_sends_few_datagrams() -> None:
    """A lone service and seven that browse for it by mDNS send 25."""
    sent = []
    for seed in range(20):
        gathering = Gathering(seed, size=8)
        gathering.everybody([gathering.rng.uniform(0, 1) for _ in range(8)])
        gathering.run()
        gathering.expect_formed()
        sent.append(gathering.world.counts["datagrams"])
    assert statistics.median(sent) <= 25
