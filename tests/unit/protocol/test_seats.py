"""What is read of a session's seats; who changes them is shown in test_registrar.py."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mingle.config.launchers import Placement
from mingle.config.order import order_key, order_of
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.seats import HostSeat
from mingle.wire.frames import Join, ProcessInfo, Unit
from tests.support.registrar_port import HOST, Recorded

NAMED = b"\1node1"
NODE_RANK = order_key(1, "", "")
LAUNCHED = order_of(Placement(rank=None, world_size=4, node_rank=1, node_rank_launched=True), "node1", "10.0.0.2")


def applicant(rank: int | None, number: int = 0, **more: Any) -> Join:
    who = ProcessInfo(hostname=f"node{number}", pid=7, address=f"10.0.0.{number + 1}")
    return Join(**{"world_size": 4, "rank": rank, "node": f"node{number}", "who": who, **more})


def gathered(*applicants: Join) -> Recorded:
    """A session of four whose host is the first of these; the others have joined on the connections 1, 2 …"""
    own, *others = applicants
    registrar = Recorded(HostSeat(member=HOST, applicant=own, prefix_lengths={"10.0.0.1": 24}), Admission(4))
    for conn, each in enumerate(others, start=1):
        registrar.join(conn, bytes([conn]) * 16, each, 1.0)
    return registrar


def test_missing_are_those_that_never_came_and_departed_those_that_went() -> None:
    registrar = gathered(applicant(0), applicant(1, 1), applicant(3, 3))
    registrar.lost(1, 2.0, "it crashed")
    status = registrar.status()
    assert (status.joined, status.missing, status.departed, status.awaited) == (2, (2,), (1,), (1, 2))
    assert status.left == ("rank 1 on host node1 (10.0.0.2), pid 7: it crashed",)
    assert status.phase == "open"
    registrar.join(5, b"n" * 16, applicant(1, 1), 3.0)
    status = registrar.status()
    assert (status.missing, status.departed) == ((2,), ()), "it has come back"


def test_assigned_ranks_have_no_missing_numbers() -> None:
    seats = gathered(applicant(None), applicant(None, 1)).seats
    assert (seats.assigned, seats.missing, seats.connections()) == (True, (), [1])


@pytest.mark.parametrize(
    ("held", "order", "unit", "machine", "taken"),
    [
        pytest.param(NODE_RANK, NODE_RANK, "rank", "other", True, id="another machine"),
        pytest.param(NODE_RANK, NODE_RANK, "rank", "node1", False, id="the ranks of one machine share its node rank"),
        pytest.param(NODE_RANK, NODE_RANK, "node", "node1", True, id="each process of mingle-run is a node"),
        pytest.param(NODE_RANK, order_key(2, "", ""), "node", "other", False, id="another node rank"),
        pytest.param(LAUNCHED, LAUNCHED, "node", "other", False, id="launchers number the nodes of two groups alike"),
        pytest.param(NAMED, NAMED, "node", "other", False, id="a name is no claim"),
    ],
)
def test_a_node_rank_is_given_to_one_node(held: bytes, order: bytes, unit: Unit, machine: str, taken: bool) -> None:
    seats = gathered(applicant(None), applicant(None, 1, order=held)).seats
    newcomer = applicant(None, 3, order=order, node=machine, who=ProcessInfo(hostname="node3", unit=unit))
    assert seats.same_place(newcomer) is (seats[bytes([1]) * 16] if taken else None)


def test_members_are_one_list_until_one_comes_or_goes() -> None:
    registrar = gathered(applicant(None), applicant(None, 1))
    seats, newcomer = registrar.seats, b"n" * 16
    before = seats.members()
    assert seats.members() is before
    registrar.join(2, newcomer, applicant(None, 2), 2.0)
    assert (len(before), len(seats.members())) == (2, 3)
    seats[newcomer].admit_by = 9.0
    seats.free(seats[bytes([1]) * 16])
    assert (len(seats.members()), seats.latecomers()) == (1, [seats[newcomer]])
    seats.admit(seats[newcomer])
    assert (len(seats.members()), seats.latecomers()) == (2, [])


# --- the order -------------------------------------------------------------------------------------------------------


def on(order: bytes, *, pid: int = 1, local_rank: int | None = None) -> Join:
    return applicant(None, order=order, who=ProcessInfo(pid=pid), local_rank=local_rank)


@pytest.mark.parametrize(
    ("host", "other", "first"),
    [
        pytest.param(on(NAMED, pid=9), on(NAMED, pid=1), False, id="process id"),
        pytest.param(on(NAMED, local_rank=1), on(NAMED, local_rank=0), True, id="lower local rank"),
        pytest.param(on(NAMED, local_rank=0), on(NAMED, local_rank=1), False, id="higher local rank"),
        pytest.param(on(NAMED), on(NAMED, local_rank=3), True, id="local rank"),
        pytest.param(on(b""), on(b"\1zebra"), True, id="order"),
        pytest.param(on(b""), on(b"", pid=0), False, id="no order"),
        pytest.param(on(NAMED), on(b""), False, id="the host's order"),
        pytest.param(replace(on(b"\1zebra"), rank=0), replace(on(NAMED), rank=1), False, id="ranks are given"),
    ],
)
def test_who_comes_before_the_host(host: Join, other: Join, first: bool) -> None:
    assert bool(gathered(host, other).seats.before_host()) is first


def test_members_without_an_order_come_last_as_they_came() -> None:
    found = gathered(on(b"\1node3"), on(b"", pid=3), on(b"\1node2", pid=4), on(b"", pid=2)).seats.in_order()
    assert [seat.applicant.who.pid for seat in found] == [1, 4, 3, 2]
    assert found[0].member == HOST
