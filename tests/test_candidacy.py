"""Who becomes a host, and who makes way for whom."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from mingle.protocol.election import (
    ELECT_AFTER_SECONDS,
    ELECT_SPREAD_MAX_SECONDS,
    ELECT_SPREAD_SECONDS,
    REMEMBERED,
    STAND_SECONDS,
    Candidacy,
)
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


def test_in_a_large_job_they_wait_longer_but_within_bounds() -> None:
    waits = [candidate(255, size=size).patience() for size in (4, 1000, 100_000)]
    assert waits[0] < waits[1] < waits[2] <= ELECT_AFTER_SECONDS + ELECT_SPREAD_MAX_SECONDS


def test_only_an_open_session_of_ranks_of_this_job_and_of_somebody_else_competes() -> None:
    ours = candidate(5)
    assert ours.competes(offer(7))
    for other in (
        offer(7, job="jbo"),
        offer(7, attempt="2"),
        offer(7, state="sealed"),
        offer(7, kind="announcement"),
        offer(5),
        Seek(job="job", member=bytes(16), world_size=4),
    ):
        assert not ours.competes(other)


def test_of_any_two_exactly_one_makes_way() -> None:
    for one, other in itertools.permutations(range(4), 2):
        first = candidate(one).loses_to(offer(other), stands=False, now=0.0)
        second = candidate(other).loses_to(offer(one), stands=False, now=0.0)
        assert first is not second
        assert first is (other < one)


def test_a_higher_one_that_stands_or_was_given_its_rank_is_made_way_for() -> None:
    ours = candidate(5)
    assert ours.loses_to(offer(7), stands=True, now=0.0)
    assert ours.loses_to(offer(7, assigned=False), stands=False, now=0.0)


def test_who_stands_against_a_lower_one_does_so_for_a_while() -> None:
    ours, lower = candidate(5), offer(3)
    ours.stand_against(lower.host, 1.0)
    assert ours.stands_against(lower.host, 1.0)
    assert not ours.loses_to(lower, stands=False, now=1.0 + STAND_SECONDS - 0.001)
    assert not ours.loses_to(lower, stands=True, now=1.0)
    assert ours.loses_to(offer(2), stands=False, now=1.0), "of the others it is no word"
    assert ours.loses_to(lower, stands=False, now=1.0 + STAND_SECONDS)


def test_invented_hosts_are_forgotten_the_oldest_first() -> None:
    ours = candidate(255)
    hosts = [number.to_bytes(16, "big") for number in range(REMEMBERED + 1)]
    for host in [*hosts[:REMEMBERED], hosts[0], hosts[-1]]:
        ours.stand_against(host, 0.0)
    standing = [host for host in hosts if ours.stands_against(host, 1.0)]
    assert standing == [hosts[0], *hosts[2:]], "what was said again counts as new"
