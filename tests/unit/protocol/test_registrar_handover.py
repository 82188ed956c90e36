"""The registrar hands its session over to the first member in order: the corners that chance rarely finds.

Whole handovers run in tests/lan/test_handover.py; who the first is stands in test_seats.py.
"""

from __future__ import annotations

import pytest

from mingle.protocol.session.admission import ACKNOWLEDGE_SECONDS, Admission
from mingle.protocol.session.phases import Confirming, HandingOver, Open, Sealing, State
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from mingle.wire.frames import Path, ProcessInfo
from tests.support.registrar_port import HOST, SESSION, Recorded, told

FIRST, SECOND = b"A" * 16, b"B" * 16
PATHS = (Path(host_address="10.0.0.1", local_address="10.0.0.9", interface="eth0"),)


def join(name: str) -> frames.Join:
    """The JOIN of a process on the node of this name, which decides about the order."""
    who = ProcessInfo(hostname=name, pid=1, address="10.0.0.9")
    return frames.Join(world_size=3, node=name, who=who, paths=PATHS, order=b"\1" + name.encode())


class Handing(Recorded):
    """A session of three whose host is the last in order; all have joined and confirmed: the first was asked to lead.

    The first has connection 1, the second connection 2.
    """

    def __init__(self) -> None:
        super().__init__(HostSeat(member=HOST, applicant=join("node3"), prefix_lengths={"10.0.0.1": 24}), Admission(3))
        self.come(1, FIRST)
        self.come(2, SECOND)
        self.confirm(1, 2)
        (lead,) = self.said(1, frames.Lead)
        assert lead.epoch == self.state.epoch

    def come(self, conn: int, member: bytes, now: float = 1.0) -> None:
        self.join(conn, member, join("node1" if member == FIRST else "node2"), now)

    def confirm(self, *conns: int) -> None:
        """Let members confirm the present epoch."""
        for conn in conns:
            self.confirmed(conn, frames.Confirmed(session=SESSION, epoch=self.state.epoch, paths=PATHS), 2.0)


def test_the_seat_of_the_first_is_given_to_no_other_process() -> None:
    handing = Handing()
    handing.hosts_itself(1, 3.0)
    calls = handing.port.take()
    assert ("hang_up", 1) in calls
    assert not told(calls, 2, frames.Void), "the second learns of the new session by CLOSED"
    assert handing.phase is HandingOver
    handing.join(7, b"X" * 16, join("node0"), 3.1)
    assert [refused.reason for refused in handing.said(7, frames.Refused)] == ["full"]


def test_a_first_that_comes_back_does_not_lead() -> None:
    handing = Handing()
    handing.hosts_itself(1, 3.0)
    handing.port.take()
    handing.come(8, FIRST, 3.5)
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


@pytest.mark.parametrize(("conn", "phase"), [(1, Sealing), (99, HandingOver)], ids=["sealed", "a stranger"])
def test_what_a_stranger_or_a_member_of_a_sealed_session_says_of_its_own_one_means_nothing(
    conn: int, phase: type[State]
) -> None:
    handing = Handing()
    if phase is Sealing:
        handing.first_not_reached(FIRST, 3.0)
        handing.confirm(1, 2)
    handing.port.take()
    handing.hosts_itself(conn, 4.0)
    assert (handing.phase, handing.port.take()) == (phase, [])


def test_a_first_that_is_not_reached_keeps_its_seat_and_is_not_asked_again() -> None:
    handing = Handing()
    handing.first_not_reached(SECOND, 3.0)
    assert (handing.phase, handing.handover.unreached) == (HandingOver, set()), "the second was not asked to lead"
    handing.first_not_reached(FIRST, 3.0)
    assert handing.said(1, frames.Void)
    assert handing.phase is Confirming
    handing.confirm(1, 2)
    assert not handing.said(2, frames.Lead)
    assert handing.phase is Sealing


def test_a_first_that_was_not_reached_is_asked_again_once_another_member_was_lost() -> None:
    handing = Handing()
    handing.first_not_reached(FIRST, 3.0)
    handing.lost(2, 4.0)
    handing.come(3, SECOND, 5.0)
    handing.confirm(1, 3)
    assert handing.phase is HandingOver


def test_the_session_of_the_first_is_called_five_times() -> None:
    handing = Handing()
    assert not handing.handover.calls_again(handing.state, SECOND)
    assert [handing.handover.calls_again(handing.state, FIRST) for _ in range(5)] == [True] * 4 + [False]
    handing.first_not_reached(FIRST, 3.0)
    assert not handing.handover.calls_again(handing.state, FIRST)


@pytest.mark.parametrize(("left", "later"), [(False, HandingOver), (True, Sealing)], ids=["stopped", "left"])
def test_a_first_that_leads_in_vain_is_asked_again_only_if_it_has_not_left(left: bool, later: type[State]) -> None:
    handing = Handing()
    if left:
        handing.hosts_itself(1, 3.0)
    due = handing.next_timer()
    assert due == 2.0 + ACKNOWLEDGE_SECONDS
    handing.handle_timer(due)
    assert handing.said(2, frames.Void)
    if left:
        handing.come(1, FIRST, due)
    assert handing.phase is Confirming
    handing.confirm(1, 2)
    assert handing.phase is later
