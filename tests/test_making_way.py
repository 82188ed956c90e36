"""A host that makes way for another one: what it remembers of its members' words. Whole elections run in tests/lan."""

from __future__ import annotations

import pytest

from mingle.protocol.machine import Diagnostics
from mingle.protocol.making_way import MAX_SIGHTINGS, MakingWay
from mingle.wire.datagrams import Offer
from mingle.wire.frames import HostSeen, ProcessInfo

OTHER, THIRD = b"T" * 16, b"U" * 16
MEMBER = ProcessInfo(hostname="m", pid=7)


def offer(session: bytes = OTHER) -> Offer:
    return Offer(job="job", session=session, host=session, addresses=("10.0.0.9",), port=1, world_size=2)


@pytest.fixture
def way() -> MakingWay:
    return MakingWay(Diagnostics())


def test_reports_are_handed_out_once_in_their_order(way: MakingWay) -> None:
    way.sighted(HostSeen(offer=offer(THIRD)))
    way.sighted(HostSeen(offer=offer(), stands=True))
    assert way.take_sightings() == [(offer(THIRD), False), (offer(), True)]
    assert way.take_sightings() == []


def test_a_member_that_reports_without_end_fills_no_memory(way: MakingWay) -> None:
    for _ in range(MAX_SIGHTINGS + 1):
        way.sighted(HostSeen(offer=offer()))
    assert len(way.take_sightings()) == MAX_SIGHTINGS


def test_members_are_sent_where_it_says(way: MakingWay) -> None:
    assert way.send_after(offer()) is way.moved
    assert way.moved.offer == offer()


def test_a_member_that_can_not_follow_is_noted(way: MakingWay) -> None:
    way.send_after(offer())
    way.strand(MEMBER, OTHER)
    assert way.stranded
    assert [str(MEMBER) in reason for reason in way.diagnostics.hosts.values()] == [True]


def test_a_member_that_speaks_of_another_session_is_not_stranded(way: MakingWay) -> None:
    way.strand(MEMBER, OTHER)
    way.send_after(offer())
    way.strand(MEMBER, THIRD)
    assert not way.stranded


def test_who_is_sent_anew_or_called_back_is_not_stranded_any_more(way: MakingWay) -> None:
    way.begin()
    way.send_after(offer(THIRD))
    way.strand(MEMBER, THIRD)
    way.send_after(offer())
    assert not way.stranded
    way.strand(MEMBER, OTHER)
    way.end()
    assert (way.begun, way.moved, way.stranded) == (False, None, False)
