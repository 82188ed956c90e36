"""The registrar hands its session over to the first member in order: the corners that chance rarely finds.

Whole handovers run in tests/lan/test_handover.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mingle.protocol.session.admission import ACKNOWLEDGE_SECONDS, Admission
from mingle.protocol.session.phases import Confirming, HandingOver, Open, Sealing, State
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.seats import HostSeat, Seats
from mingle.wire import frames
from mingle.wire.frames import Path, ProcessInfo
from tests.support.registrar_port import RecordingPort, told

SESSION, HOST, FIRST, SECOND = (letter.encode() * 16 for letter in "SHAB")
NODES = {HOST: b"\1node3", FIRST: b"\1node1", SECOND: b"\1node2"}


def join(order: bytes, *, pid: int = 1, local_rank: int | None = None) -> frames.Join:
    who = ProcessInfo(hostname=order.decode(errors="replace"), pid=pid, address="10.0.0.9")
    path = Path(host_address="10.0.0.1", local_address="10.0.0.9", interface="eth0")
    node = f"node {order!r}"
    return frames.Join(world_size=3, node=node, who=who, paths=(path,), order=order, local_rank=local_rank)


def host_seat(**more: Any) -> HostSeat:
    own = join(more.pop("order", NODES[HOST]), **more)
    return HostSeat(member=HOST, applicant=own, prefix_lengths={"10.0.0.1": 24})


class Handing(Registrar):
    """A session of three whose host is the last in order; all have joined and confirmed: the first was asked to lead.

    The first has connection 1, the second connection 2.
    """

    def __init__(self) -> None:
        self.port = RecordingPort()
        super().__init__(SESSION, host_seat(), self.port, self.port, Admission(3))
        for conn, name in enumerate((FIRST, SECOND), start=1):
            self.join(conn, name, join(NODES[name]), 1.0)
        self.confirm()
        (lead,) = told(self.port.take(), 1, frames.Lead)
        assert lead.epoch == self.state.epoch

    def confirm(self, *conns: int) -> None:
        """Let the members confirm the present epoch."""
        for conn in conns or (1, 2):
            paths = (Path(host_address="10.0.0.1", local_address="10.0.0.9", interface="eth0"),)
            self.confirmed(conn, frames.Confirmed(session=SESSION, epoch=self.state.epoch, paths=paths), 2.0)

    @property
    def phase(self) -> type[State]:
        """The state, read anew each time."""
        return type(self.state)


def refusals(handing: Handing, conn: int) -> list[str]:
    return [frame.reason for frame in told(handing.port.take(), conn, frames.Refused)]


def test_the_seat_of_the_first_is_given_to_no_other_process() -> None:
    handing = Handing()
    handing.hosts_itself(1, 3.0)
    calls = handing.port.take()
    assert ("hang_up", 1) in calls
    assert not told(calls, 2, frames.Void), "the second learns of the new session by CLOSED"
    assert handing.phase is HandingOver
    handing.join(7, b"X" * 16, join(b"\1node0"), 3.1)
    assert refusals(handing, 7) == ["full"]


def test_a_first_that_comes_back_does_not_lead() -> None:
    handing = Handing()
    handing.hosts_itself(1, 3.0)
    handing.port.take()
    handing.join(8, FIRST, join(NODES[FIRST]), 3.5)
    calls = handing.port.take()
    assert told(calls, 2, frames.Void)
    assert told(calls, 8, frames.Joined)
    handing.confirm(2, 8)
    assert handing.phase is HandingOver, "it is asked again"


def test_a_member_that_hosts_without_being_asked_is_dropped() -> None:
    handing = Handing()
    handing.hosts_itself(2, 3.0)
    calls = handing.port.take()
    assert told(calls, 1, frames.Void)
    assert ("hang_up", 2) in calls
    assert (handing.phase, SECOND in handing.seats) == (Open, False)


@pytest.mark.parametrize("conn", [1, 99])
def test_what_a_sealed_session_or_a_stranger_says_of_a_session_of_its_own_means_nothing(conn: int) -> None:
    handing = Handing()
    if conn == 1:
        handing.first_not_reached(FIRST, 3.0)
        handing.confirm()
        assert handing.phase is Sealing
    before = handing.phase
    handing.port.take()
    handing.hosts_itself(conn, 4.0)
    assert handing.phase is before
    assert handing.port.take() == []


def test_a_first_that_is_not_reached_keeps_its_seat_and_is_not_asked_again() -> None:
    handing = Handing()
    handing.first_not_reached(SECOND, 3.0)
    assert (handing.phase, handing.handover.unreached) == (HandingOver, set()), "the second was not asked to lead"
    handing.first_not_reached(FIRST, 3.0)
    assert told(handing.port.take(), 1, frames.Void)
    assert handing.phase is Confirming
    handing.confirm()
    assert not told(handing.port.take(), 2, frames.Lead)
    assert handing.phase is Sealing


def test_a_first_that_was_not_reached_is_asked_again_once_another_member_was_lost() -> None:
    handing = Handing()
    handing.first_not_reached(FIRST, 3.0)
    handing.lost(2, 4.0)
    handing.join(3, SECOND, join(NODES[SECOND]), 5.0)
    handing.confirm(1, 3)
    assert handing.phase is HandingOver


def test_the_session_of_the_first_is_called_five_times() -> None:
    handing = Handing()
    assert not handing.handover.calls_again(handing.state, SECOND)
    assert [handing.handover.calls_again(handing.state, FIRST) for _ in range(5)] == [True] * 4 + [False]
    handing.first_not_reached(FIRST, 3.0)
    assert not handing.handover.calls_again(handing.state, FIRST)


@pytest.mark.parametrize(("left", "later"), [(False, HandingOver), (True, Sealing)])
def test_a_first_that_leads_in_vain_until_the_end_of_the_time(left: bool, later: type[State]) -> None:
    """One that has left for a session that cannot be reached is not asked again; one that was only stopped is."""
    handing = Handing()
    if left:
        handing.hosts_itself(1, 3.0)
    due = handing.next_timer()
    assert due == 2.0 + ACKNOWLEDGE_SECONDS
    handing.handle_timer(due)
    assert told(handing.port.take(), 2, frames.Void)
    if left:
        handing.join(1, FIRST, join(NODES[FIRST]), due)
    assert handing.phase is Confirming
    handing.confirm()
    assert handing.phase is later


# --- who is the first ------------------------------------------------------------------------------------------------


def seats(host: HostSeat, *others: frames.Join) -> Seats:
    port = RecordingPort()
    registrar = Registrar(SESSION, host, port, port, Admission(4))
    for number, applicant in enumerate(others, start=1):
        registrar.join(number, bytes((number,)) * 16, replace(applicant, world_size=4), 1.0)
    return registrar.seats


@pytest.mark.parametrize(
    ("host", "other", "first"),
    [
        ({"pid": 9}, join(NODES[HOST], pid=1), False),
        ({"local_rank": 1}, join(NODES[HOST], local_rank=0), True),
        ({"local_rank": 0}, join(NODES[HOST], local_rank=1), False),
        ({}, join(NODES[HOST], local_rank=3), True),
        ({"order": b""}, join(b"\1zebra"), True),
        ({"order": b""}, join(b"", pid=0), False),
        ({}, join(b""), False),
    ],
    ids=["process id", "lower local rank", "higher local rank", "local rank", "order", "no order", "the host's order"],
)
def test_who_comes_before_the_host(host: dict[str, Any], other: frames.Join, first: bool) -> None:
    found = seats(host_seat(**host), other).before_host()
    assert bool(found) is first


def test_members_without_an_order_come_last_as_they_came() -> None:
    found = seats(host_seat(), join(b"", pid=3), join(NODES[SECOND], pid=4), join(b"", pid=2)).in_order()
    assert [seat.applicant.who.pid for seat in found] == [1, 4, 3, 2]
    assert found[0].member == HOST
