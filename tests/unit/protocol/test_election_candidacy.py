"""Which process becomes a host, and which host closes for another one."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from mingle.protocol.election import ELECT_AFTER_SECONDS, ELECT_SPREAD_MAX_SECONDS, ELECT_SPREAD_SECONDS, Candidacy
from mingle.protocol.machine import Identity
from mingle.wire.datagrams import Offer, Seek
from mingle.wire.frames import ProcessInfo


def candidate(number: int, *, size: int = 4) -> Candidacy:
    return Candidacy(
        Identity(
            job="job",
            attempt="",
            member=bytes([number]) * 16,
            rank=None,
            world_size=size,
            node="n",
            who=ProcessInfo(hostname="h"),
        )
    )


def offer(number: int, **more: Any) -> Offer:
    name = bytes([number]) * 16
    plain = Offer(
        job="job", session=name, host=name, addresses=("10.0.0.9",), port=1, world_size=4, assigned=True, state="open"
    )
    return msgspec.structs.replace(plain, **more)


def test_the_lower_the_id_the_sooner_it_becomes_a_host() -> None:
    waits = [candidate(number).patience() for number in (0, 1, 100, 255)]
    assert waits == sorted(waits)
    assert waits[0] == ELECT_AFTER_SECONDS
    assert waits[-1] - waits[0] == pytest.approx(ELECT_SPREAD_SECONDS, rel=0.02)


def test_processes_of_a_large_job_wait_longer_within_bounds() -> None:
    waits = [candidate(255, size=size).patience() for size in (4, 1000, 100_000)]
    assert waits[0] < waits[1] < waits[2] <= ELECT_AFTER_SECONDS + ELECT_SPREAD_MAX_SECONDS


def test_only_an_open_session_of_ranks_of_this_job_and_of_somebody_else_competes() -> None:
    ours = candidate(5)
    assert ours.competes(offer(7))
    for other in (
        offer(7, job="jbo"),
        offer(7, attempt="2"),
        offer(7, state="sealed"),
        offer(7, kind="agents"),
        offer(5),
        Seek(job="job", member=bytes(16), world_size=4),
    ):
        assert not ours.competes(other)


def test_of_any_two_exactly_one_closes() -> None:
    for one, other in itertools.permutations(range(4), 2):
        first, second = candidate(one).loses_to(offer(other)), candidate(other).loses_to(offer(one))
        assert first is not second
        assert first is (other < one)


def test_a_host_that_was_given_its_rank_wins_with_any_id() -> None:
    assert candidate(5).loses_to(offer(7, assigned=False))
