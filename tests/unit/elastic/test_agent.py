"""One agent from session to session: what it does when its session is no more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mingle.elastic.agent import ElasticCandidacy, JobEnd
from mingle.elastic.host import ElasticHost
from mingle.elastic.member import ElasticMember
from mingle.protocol.effects import Hangup
from mingle.protocol.events import (
    Accepted,
    Address,
    AddressesChanged,
    BytesReceived,
    Heard,
    Source,
    StoreProved,
    StoreUnreachable,
)
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.machine import Identity
from mingle.wire.datagrams import Offer
from mingle.wire.frames import ProcessInfo
from tests.lan.agents import AgentGathering

IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=None, world_size=4, node="M", who=ProcessInfo(), kind="agents"
)


def offer(host: str, *, joined: int = 1, state: str = "open", kind: str = "agents") -> Offer:
    return Offer(
        job="job",
        session=b"T" * 16,
        host=host.encode() * 16,
        addresses=("10.0.0.9",),
        port=4000,
        world_size=4,
        joined=joined,
        state=state,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        assigned=True,
    )


@pytest.mark.parametrize(
    ("other", "competes"),
    [
        (offer("A"), True),
        (offer("A", state="sealed", joined=3), True),
        (offer("A", state="sealed", joined=4), False),
        (offer("M"), False),
        (offer("A", kind="ranks"), False),
    ],
)
def test_every_session_that_could_be_joined_competes(other: Offer, competes: bool) -> None:
    assert ElasticCandidacy(IDENTITY).competes(other) is competes


@pytest.mark.parametrize(
    ("other", "loses"), [(offer("A"), True), (offer("Z"), False), (offer("Z", state="sealed"), True)]
)
def test_sealed_comes_before_open_then_the_lower_id(other: Offer, loses: bool) -> None:
    assert ElasticCandidacy(IDENTITY).loses_to(other) is loses


def test_from_seeking_to_a_session_and_on_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.lan.agents.UNREAD", 0.0)
    gathering = AgentGathering(5, (1, 2))
    one, other = agents = [gathering.start("m0"), gathering.start("m1")]
    gathering.world.run(0.1)
    assert not any(each.finished or each.agent.closed for each in agents)
    gathering.run_until_together(agents, 12.0)
    assert {type(each.agent.role) for each in agents} == {ElasticHost, ElasticMember}
    host = gathering.host_of(agents)
    rest = other if host is one else one
    port, identity = rest.agent.endpoints.port, rest.identity.member
    assert (rest.agent.stage(), rest.agent.losses, rest.agent.lost) == ("formed", 0, None)
    first = rest.agent.generation
    host.kill()
    gathering.world.run(0.01)
    assert rest.outcome is None
    assert rest.agent.hold.until == float("-inf")
    assert not rest.agent.closed
    back = gathering.start(host.machine.name)
    gathering.run_until_together([rest, back], 5.0)
    (second,) = {each.agent.memory.generation for each in (rest, back)}
    assert second > first
    assert (rest.agent.endpoints.port, rest.identity.member) == (port, identity)
    assert rest.agent.losses == 1


def test_every_event_looks_at_the_clock_first() -> None:
    gathering = AgentGathering(5, (2, 3))
    agents = gathering.everybody(3)
    gathering.run_until_together(agents, 12.0)
    gathering.world.run(1.0)
    for process in agents:
        agent, conn = process.agent, next(iter(process._ends))
        late = gathering.world.now + 20.0
        agent.handle(BytesReceived(conn, b"what lay in the socket meanwhile"), late)
        assert agent.outcome is None
        assert agent.losses == 1


def test_member_reports_no_session_of_its_own() -> None:
    """Its announcements of a session that it has lost can still be on their way, or lie in a folder."""
    gathering = AgentGathering(5, (1, 2))
    agents = gathering.everybody(2)
    gathering.run_until_together(agents, 12.0)
    gathering.world.run(1.0)
    host = gathering.host_of(agents)
    rest = next(each for each in agents if each is not host)
    assert isinstance(rest.agent.role, ElasticMember)
    rest.agent.effects()
    heard = offer("T", state="sealed")
    for other, reported in ((replace(heard, host=rest.identity.member), False), (heard, True)):
        rest.agent.handle(Heard(other, Source(interface="eth0", address="10.0.0.9")), rest.now)
        assert bool(rest.agent.effects()) is reported


def test_what_is_claimed_has_a_budget_of_its_own_in_each_gathering() -> None:
    gathering = AgentGathering(5, (2, 2), timeout=5.0)
    process = gathering.start("m0")
    gathering.world.run(0.1)
    agent, now, here = process.agent, process.now, Source(interface="eth0", address="10.0.0.9")
    agent.handle(Heard(offer("A"), here), now)
    agent.give_up(timeout(agent.situation(), process.facts()))  # while the claim is still being probed
    agent.gather(now + 20.0)
    agent.handle(Heard(offer("A"), here), now + 20.1)
    assert not agent.closed
    assert agent.expects_host(now + 20.2)


def test_failed_agent_rests_until_it_is_asked_again() -> None:
    gathering = AgentGathering(5, (2, 2), timeout=5.0)
    process = gathering.start("m0")
    gathering.world.run(1.0)
    agent = process.agent
    now = gathering.world.now
    agent.give_up(timeout(agent.situation(), process.facts()))
    assert agent.failure is not None
    assert agent.closed
    assert (agent.stage(), agent.calling(), agent.next_timer()) == ("closed", None, None)
    agent.effects()
    agent.handle(Accepted(77, "10.0.0.9"), now)
    assert agent.effects() == [Hangup(77)]
    moved = (Address("10.0.0.77", "eth0", 24),)
    agent.handle(AddressesChanged(moved), now)
    agent.gather(now)
    assert agent.failure is None
    assert not agent.closed
    assert agent.endpoints is not None
    assert agent.endpoints.addresses == moved
    assert not agent.expired(now + 4.9)
    assert agent.expired(now + 5.0)


def test_closed_agent_looks_for_no_session() -> None:
    gathering = AgentGathering(5, (2, 2))
    process = gathering.start("m0")
    gathering.world.run(1.0)
    agent = process.agent
    agent.close("done")
    agent.close("done")
    agent.gather(gathering.world.now)
    assert agent.closed
    assert agent.closed


def test_store_answers_of_an_earlier_session_are_ignored() -> None:
    gathering = AgentGathering(5, (1, 2))
    agents = gathering.everybody(2)
    gathering.run_until_together(agents, 12.0)
    host = gathering.host_of(agents)
    rest = next(each for each in agents if each is not host)
    assert rest.outcome is not None
    old_session = rest.outcome.session
    host.kill()
    gathering.world.run(0.01)
    now = gathering.world.now
    rest.agent.handle(StoreProved(old_session, 1), now)
    rest.agent.handle(StoreUnreachable(old_session, 1, "no answer"), now)
    assert not rest.agent.closed
    assert rest.outcome is None


@pytest.mark.parametrize("end", list(JobEnd))
def test_the_end_of_the_job_decides_whether_another_session_follows_a_lost_one(end: JobEnd) -> None:
    gathering = AgentGathering(5, (1, 3))
    agents = gathering.everybody(3)
    gathering.run_until_together(agents, 12.0)
    host = gathering.host_of(agents)
    rest, other = (each for each in agents if each is not host)
    if end is JobEnd.DONE:
        rest.agent.stop_electing(gathering.world.now)
    elif end is JobEnd.ANNOUNCED:
        other.close()
    elif end is JobEnd.REACHED:
        host.close()
    gathering.world.run(0.5)
    assert rest.agent.job_end is end
    host.kill()
    gathering.world.run(0.5)
    assert rest.agent.closed is (end is not JobEnd.OPEN)
    rest.agent.gather(gathering.world.now)
    assert rest.agent.closed is (end > JobEnd.DONE), "only an agent whose workers are done can be asked to look again"
