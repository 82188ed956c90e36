"""An agent that hosts: it keeps its roll, notices who is lost, stops without a majority, and makes way."""

from __future__ import annotations

import pytest

from mingle.agents.heartbeat import LEASE_MARGIN_SECONDS, MEMBER_SILENT_SECONDS
from mingle.agents.hosting import LOOK_AROUND_SECONDS, MINORITY_SECONDS, AgentHost
from mingle.agents.quorum import LEASE_SECONDS, members_of
from mingle.wire import frames
from mingle.wire.datagrams import Seek
from tests.lan.agents import AgentGathering, AgentProcess


@pytest.fixture
def gathering() -> AgentGathering:
    return AgentGathering(7, (1, 4))


def started(gathering: AgentGathering, count: int = 4) -> tuple[AgentProcess, AgentHost, list[AgentProcess]]:
    """The host's process, its machine, and the others."""
    agents = gathering.everybody(count)
    gathering.run_until_together(agents, 15.0)
    gathering.world.run(1.0)
    process = gathering.host_of(agents)
    assert process.hosted is not None
    return process, process.hosted, [agent for agent in agents if agent is not process]


def on_the_roll(host: AgentHost) -> set[bytes]:
    assert host.roll is not None
    return set(members_of(host.roll.settled))


def ids(*agents: AgentProcess) -> set[bytes]:
    return {agent.identity.member for agent in agents}


def test_everybody_who_comes_is_on_the_roll_and_knows_it(gathering: AgentGathering) -> None:
    process, host, others = started(gathering, 3)
    late = gathering.start("m9")
    gathering.run_until_together([process, *others, late], 3.0)
    gathering.world.run(0.5)
    assert on_the_roll(host) == ids(process, *others, late)
    assert host.roll is not None
    for agent in (*others, late):
        assert agent.agent.standing.settled == host.roll.settled
        assert agent.agent.standing.proposed is None
    assert host.offer().joined == 4
    assert not host.offer().takes_members


def test_the_dead_are_off_the_roll_at_once_and_the_silent_when_they_are_not_bound_any_more(
    gathering: AgentGathering,
) -> None:
    process, host, others = started(gathering)
    others[0].kill()
    gathering.world.run(1.0)
    assert on_the_roll(host) == ids(process, *others[1:])
    gathering.network.cut(others[1].machine)
    gathering.world.run(MEMBER_SILENT_SECONDS + 1.0)
    assert host.registrar.seats.keys() == ids(process, others[2])
    assert others[1].identity.member in on_the_roll(host)
    gathering.world.run(LEASE_SECONDS + LEASE_MARGIN_SECONDS)  # after it was asked for the last time
    assert on_the_roll(host) == ids(process, others[2])


def test_who_leaves_is_off_the_roll_at_once(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    others[0].close()
    gathering.world.run(0.5)
    assert on_the_roll(host) == ids(process, *others[1:])


def test_with_half_it_goes_on(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    for other in others[:2]:
        gathering.network.cut(other.machine)
    gathering.world.run(MEMBER_SILENT_SECONDS + MINORITY_SECONDS + 1.0)
    assert process.hosted is host
    assert len(host.registrar.seats) == 2


def test_without_the_majority_it_stops_and_says_why(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    gathering.network.cut(process.machine)
    gathering.world.run(MEMBER_SILENT_SECONDS + MINORITY_SECONDS + 0.5)
    assert host.dissolved is not None
    assert "only 1 of 4 nodes are reached" in host.dissolved
    assert process.closed_stores == [host.dissolved]
    assert process.agent.lost == host.dissolved
    assert others


def test_it_looks_around_now_and_then(gathering: AgentGathering, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    process, host, _ = started(gathering)
    original = AgentProcess._multicast

    def count(self: AgentProcess, message: object, lobby: bool) -> None:
        if isinstance(message, Seek) and self is process:
            asked.append(gathering.world.now)
        original(self, message, lobby)  # type: ignore[arg-type]

    monkeypatch.setattr(AgentProcess, "_multicast", count)
    gathering.world.run(10 * LOOK_AROUND_SECONDS)
    assert 7 <= len(asked) <= 15
    assert host.calling() == process.identity.seek()


def test_nothing_is_asked_for_once_it_is_closed(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    process.close()
    gathering.world.run(1.0)
    assert host.closed
    assert all(other.agent.ended == "its workers are done" for other in others)
    assert host.calling() is None


def test_nothing_is_kept_of_those_that_count_no_more(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    for agent in others[:2]:
        agent.close()
    gathering.world.run(1.0)
    assert on_the_roll(host) == ids(process, others[2])
    assert not [agent for agent in others[:2] if agent.identity.member in host._leases]
    assert others[2].identity.member in host._leases
    assert host.registrar.left_on_purpose == set()


def test_an_answer_counts_on_the_connection_of_the_seat_only(gathering: AgentGathering) -> None:
    _, host, others = started(gathering)
    seat = host.registrar.seats[others[0].identity.member]
    assert host.roll is not None
    assert seat.conn is not None
    caller, number = host._callers[seat.conn], host.roll.latest.number + 1
    host._frame(10**6, caller, frames.Pong(number=number), gathering.world.now)
    assert host.roll._known.get(seat.member, 0) < number, "whoever says it is that member has shown nothing"
    host._frame(seat.conn, caller, frames.Pong(number=number), gathering.world.now)
    assert host.roll._known[seat.member] == number
