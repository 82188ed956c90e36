"""What is read of a session's seats; who changes them is shown in test_registrar.py."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mingle.config.launchers import Placement
from mingle.config.order import order_key, order_of
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from tests.support.registrar_port import RecordingPort

SESSION, HOST = b"s" * 16, b"h" * 16
LAUNCHED = order_of(Placement(rank=None, world_size=4, node_rank=1, node_rank_launched=True), "node1", "10.0.0.2")


def applicant(rank: int | None, name: str, address: str) -> frames.Join:
    path = frames.Path(host_address="10.0.0.1", local_address=address, interface="eth0")
    who = frames.ProcessInfo(hostname=name, pid=7, address=address)
    return frames.Join(world_size=4, rank=rank, node=name, who=who, paths=(path,))


def gathered(*ranks: int | None) -> Registrar:
    """A session of four whose host has the first of these ranks; the others have joined."""
    first, *others = ranks
    own = applicant(first, "node0", "10.0.0.1")
    seat = HostSeat(member=HOST, applicant=own, prefix_lengths={"10.0.0.1": 24})
    port = RecordingPort()
    registrar = Registrar(SESSION, seat, port, port, Admission(4))
    for conn, rank in enumerate(others, start=1):
        member = bytes([conn]) * 16
        registrar.join(conn, member, applicant(rank, f"node{conn}", f"10.0.0.{conn + 1}"), now=1.0)
    return registrar


def test_missing_are_those_that_never_came_and_departed_those_that_went() -> None:
    registrar = gathered(0, 1, 3)
    registrar.lost(1, 2.0, "it crashed")
    status = registrar.status()
    assert (status.joined, status.missing, status.departed, status.awaited) == (2, (2,), (1,), (1, 2))
    assert status.left == ("rank 1 on host node1 (10.0.0.2), pid 7: it crashed",)
    assert status.phase == "open"


def test_a_rank_that_comes_back_has_not_departed() -> None:
    registrar = gathered(0, 1)
    registrar.lost(1, 2.0)
    registrar.join(5, b"n" * 16, applicant(1, "node1", "10.0.0.2"), now=3.0)
    assert registrar.status().departed == ()
    assert registrar.seats.missing == (2, 3)


def test_assigned_ranks_have_no_missing_numbers() -> None:
    registrar = gathered(None, None)
    assert registrar.seats.assigned
    assert registrar.seats.missing == ()
    assert registrar.seats.connections() == [1]


@pytest.mark.parametrize(
    ("order", "unit", "machine", "taken"),
    [
        pytest.param(order_key(1, "", ""), "rank", "other", True, id="another machine"),
        pytest.param(order_key(1, "", ""), "rank", "node1", False, id="the ranks of one machine share its node rank"),
        pytest.param(order_key(1, "", ""), "node", "node1", True, id="each process of mingle-run is a node"),
        pytest.param(order_key(2, "", ""), "node", "other", False, id="another node rank"),
        pytest.param(LAUNCHED, "node", "other", False, id="launchers number the nodes of two groups alike"),
        pytest.param(order_key(None, "node1", "10.0.0.2"), "node", "other", False, id="a name is no claim"),
    ],
)
def test_a_node_rank_is_given_to_one_node(order: bytes, unit: frames.Unit, machine: str, taken: bool) -> None:
    registrar = gathered(None, None)
    holder = next(iter(registrar.seats.others()))
    shared = order if order != order_key(2, "", "") else order_key(1, "", "")
    holder.applicant = replace(holder.applicant, order=shared)
    newcomer = applicant(None, "node3", "10.0.0.9")
    newcomer = replace(newcomer, order=order, node=machine, who=replace(newcomer.who, unit=unit))
    assert registrar.seats.same_place(newcomer) is (holder if taken else None)


def test_members_are_one_list_until_one_comes_or_goes() -> None:
    registrar = gathered(None, None)
    seats = registrar.seats
    before = seats.members()
    assert seats.members() is before
    registrar.join(2, b"n" * 16, applicant(None, "node2", "10.0.0.3"), now=2.0)
    three = seats.members()
    assert [len(before), len(three)] == [2, 3]
    seats[b"n" * 16].admit_by = 9.0
    seats.free(seats[bytes([1]) * 16])
    assert (len(seats.members()), len(seats.latecomers())) == (1, 1)
    seats.admit(seats[b"n" * 16])
    assert (len(seats.members()), seats.latecomers()) == (2, [])
