"""One agent from session to session: what it does when its session is no more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mingle.elastic.agent import ElasticCandidacy, JobEnd
from mingle.elastic.member import ElasticMember
from mingle.protocol.effects import Hangup
from mingle.protocol.events import Accepted, Address, AddressesChanged, Heard, Source
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.machine import Identity
from mingle.wire.datagrams import Offer
from mingle.wire.frames import ProcessInfo
from tests.lan.agents import AgentGathering, AgentProcess

IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=None, world_size=4, node="M", who=ProcessInfo(), kind="agents"
)
HERE = Source(interface="eth0", address="10.0.0.9")


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


def running(gathering: AgentGathering, count: int) -> tuple[AgentProcess, list[AgentProcess]]:
    """The host of a session of so many, and its members."""
    agents = gathering.everybody(count)
    gathering.run_until_together(agents, 12.0)
    gathering.world.run(1.0)
    host = gathering.host_of(agents)
    return host, [each for each in agents if each is not host]


@pytest.mark.parametrize(
    ("other", "competes", "loses"),
    [
        pytest.param(offer("A"), True, True, id="the lower id"),
        pytest.param(offer("Z"), True, False, id="the higher id"),
        pytest.param(offer("Z", state="sealed", joined=3), True, True, id="sealed comes before open"),
        pytest.param(offer("A", state="sealed", joined=4), False, None, id="it has no free seat"),
        pytest.param(offer("M"), False, None, id="its own"),
        pytest.param(offer("A", kind="ranks"), False, None, id="of ranks"),
    ],
)
def test_every_session_that_could_be_joined_competes(other: Offer, competes: bool, loses: bool | None) -> None:
    candidacy = ElasticCandidacy(IDENTITY)
    assert candidacy.competes(other) is competes
    assert loses is None or candidacy.loses_to(other) is loses


def test_every_event_looks_at_the_clock_first() -> None:
    """Also one that concerns it not at all: what lay in the sockets while the process was stopped is handled later."""
    gathering = AgentGathering(5, (2, 3))
    host, members = running(gathering, 3)
    for process in (host, *members):
        process.agent.handle(Heard(replace(offer("T"), job="another"), HERE), process.now + 20.0)
        assert process.agent.outcome is None
        assert process.agent.losses == 1


def test_member_reports_no_session_of_its_own() -> None:
    """Its announcements of a session that it has lost can still be on their way, or lie in a folder."""
    _, (member,) = running(AgentGathering(5, (1, 2)), 2)
    assert isinstance(member.agent.role, ElasticMember)
    member.agent.effects()
    heard = offer("T", state="sealed")
    for other, reported in ((replace(heard, host=member.identity.member), False), (heard, True)):
        member.agent.handle(Heard(other, HERE), member.now)
        assert bool(member.agent.effects()) is reported


def test_what_is_claimed_has_a_budget_of_its_own_in_each_gathering() -> None:
    gathering = AgentGathering(5, (2, 2), timeout=5.0)
    process = gathering.start("m0")
    gathering.world.run(0.1)
    agent, now = process.agent, process.now
    agent.handle(Heard(offer("A"), HERE), now)
    agent.give_up(timeout(agent.situation(), process.facts()))  # while the claim is still being probed
    agent.gather(now + 20.0)
    agent.handle(Heard(offer("A"), HERE), now + 20.1)
    assert not agent.closed
    assert agent.expects_host(now + 20.2)


def test_failed_agent_rests_until_it_is_asked_again_and_a_closed_one_for_ever() -> None:
    gathering = AgentGathering(5, (2, 2), timeout=5.0)
    process = gathering.start("m0")
    gathering.world.run(1.0)
    agent, now = process.agent, gathering.world.now
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
    assert (agent.failure, agent.closed) == (None, False)
    assert agent.endpoints is not None
    assert agent.endpoints.addresses == moved
    assert not agent.expired(now + 4.9)
    assert agent.expired(now + 5.0)
    for _ in range(2):
        agent.close("done")
    agent.gather(now)
    assert agent.closed


@pytest.mark.parametrize("end", list(JobEnd))
def test_the_end_of_the_job_decides_whether_another_session_follows_a_lost_one(end: JobEnd) -> None:
    gathering = AgentGathering(5, (1, 3))
    host, (rest, other) = running(gathering, 3)
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
