"""An agent that hosts: whom it counts, when it stops, and for which session it steps down."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from mingle.elastic.host import LOOK_AROUND_SECONDS, QUESTIONS, STORE_GONE_SECONDS, ElasticHost
from mingle.elastic.leases import ANSWER_SECONDS, LEASE_SECONDS, Hold
from mingle.protocol.effects import CloseStore, Dial, Effect, Multicast, Reset, Write
from mingle.protocol.events import BytesReceived, Connected, Heard, Source, TimerDue
from mingle.protocol.host import Serving
from mingle.protocol.links.claims import SENDER_DIALS_AT_ONCE, SENDER_DIALS_PER_SECOND
from mingle.protocol.links.handshake import HostConversation
from mingle.wire import frames
from mingle.wire.datagrams import Seek
from tests.lan.agents import AgentGathering, AgentProcess

STRANGER = Source(interface="eth0", address="10.0.0.66")


@pytest.fixture
def gathering() -> AgentGathering:
    return AgentGathering(7, (1, 4))


def started(gathering: AgentGathering, count: int = 4) -> tuple[AgentProcess, ElasticHost, list[AgentProcess]]:
    """The host's process, its machine, and the others."""
    agents = gathering.everybody(count)
    gathering.run_until_together(agents, 15.0)
    gathering.world.run(1.0)
    process = gathering.host_of(agents)
    assert process.hosted is not None
    return process, process.hosted, [agent for agent in agents if agent is not process]


def timers(process: AgentProcess, seconds: float) -> list[Effect]:
    """Return what an agent does for so long if nothing happens but the time passing."""
    agent, done, end = process.agent, process.agent.effects(), process.now + seconds
    while (due := agent.next_timer()) is not None and due <= end:
        agent.handle(TimerDue(), max(due, process.now))
        done += agent.effects()
    return done


# --- its members -----------------------------------------------------------------------------------------------------


def test_all_members_learn_of_a_latecomer(gathering: AgentGathering) -> None:
    process, host, others = started(gathering, 3)
    everybody = [process, *others, gathering.start("m9")]
    gathering.run_until_together(everybody, 3.0)
    gathering.world.run(0.5)
    for agent in everybody:
        memory = agent.agent.memory
        assert {who.hostname for who in memory.companions} == {each.machine.name for each in everybody}
        assert (memory.generation, memory.had_quorum) == (host.quorum.generation, True)
    assert (host.offer().joined, host.offer().quorum, host.offer().takes_members) == (4, True, False)


def test_a_silent_member_is_reset_when_its_lease_ends_and_the_session_when_too_few_are_left(
    gathering: AgentGathering,
) -> None:
    """A member would take an orderly close for the end of the process."""
    process, host, others = started(gathering)
    seats = host.registrar.seats
    silent, conn = others[0].identity.member, seats[others[0].identity.member].conn
    gathering.network.cut(others[0].machine)
    gathering.world.run(LEASE_SECONDS - 2.0)
    assert silent in seats
    assert [effect for effect in timers(process, 2.0) if isinstance(effect, Reset)] == [Reset(conn or 0)]
    assert seats.keys() == {each.identity.member for each in (process, *others[1:])}
    done = timers(process, LEASE_SECONDS)
    assert host.end is not None
    assert "1 node can be reached, and it takes 2 to keep the session" in host.end.reason
    assert CloseStore(host.end.reason) in done
    assert process.agent.lost == host.end.reason


def test_host_of_a_running_session_looks_for_others_periodically(gathering: AgentGathering) -> None:
    process, host, _ = started(gathering)
    asked = [each for each in timers(process, LEASE_SECONDS - 1.5) if isinstance(each, Multicast)]
    assert all(isinstance(each.message, Seek) for each in asked)
    assert LEASE_SECONDS / LOOK_AROUND_SECONDS / 2 < len(asked) < 2 * LEASE_SECONDS / LOOK_AROUND_SECONDS
    assert host.calling() == process.identity.seek()


def test_an_answer_counts_on_the_connection_of_the_seat_only(gathering: AgentGathering) -> None:
    _, host, others = started(gathering)
    member = others[0].identity.member
    seat, leases = host.registrar.seats[member], host.quorum.leases
    assert seat.conn is not None
    caller, now = host._callers[seat.conn], gathering.world.now + 0.5
    caller.answered_at = now
    host.caller_said(replace(caller, conn=10**6), frames.Pong(), now)
    assert leases.until(member) < now + LEASE_SECONDS, "a claim to be that member renews no lease"
    host.caller_said(caller, frames.Pong(), now)
    assert leases.until(member) == now + LEASE_SECONDS


def test_link_local_address_that_is_listed_no_more_ends_no_session_that_members_hold(gathering: AgentGathering) -> None:
    process, host, _ = started(gathering)
    assert host.outcome is not None
    host.state = Serving(replace(host.outcome, store_address="fe80::1%eth0"))
    gathering.world.run(2 * STORE_GONE_SECONDS)
    assert process.hosted is host


@pytest.mark.parametrize("hosts_already", [False, True])
def test_a_surplus_agent_hosts_no_session_and_is_surplus_no_more_once_it_is_in_one(
    gathering: AgentGathering, hosts_already: bool
) -> None:
    agents = [gathering.start(f"m{number}") for number in range(2)]
    first = min(agents, key=lambda each: each.identity.member)
    gathering.world.run(5.0, until=lambda: all(each.core is not None for each in agents))
    if hosts_already:
        assert gathering.world.run(5.0, until=lambda: first.agent.host is not None)
    first.agent.memory.surplus = True
    agents += [gathering.start(f"m{number}") for number in range(2, 4)]
    gathering.run_until_together(agents, 15.0)
    assert gathering.host_of(agents) is not first
    assert not first.agent.memory.surplus


# --- the end of a job ------------------------------------------------------------------------------------------------


def test_a_job_that_agents_have_ended_keeps_its_store_and_begins_no_round(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    others[0].close()
    gathering.world.run(0.5)
    assert process.agent.hold == Hold(), "no round begins, although enough members answer"
    for other in others[1:]:
        other.close()
    gathering.world.run(2 * LEASE_SECONDS)
    assert process.hosted is host, "its workers go on to their end, and their store stays"
    assert host.quorum.ending


@pytest.mark.parametrize("who", ["host", "member"])
def test_a_worker_that_fails_while_its_agent_has_not_heard_of_the_end_of_the_job(
    gathering: AgentGathering, who: str
) -> None:
    process, host, others = started(gathering)
    assert gathering.world.run(30.0, until=lambda: gathering.in_one_round([process, *others]))
    others[0].close()
    assert gathering.world.run(1.0, until=lambda: host.quorum.ending)
    failed = process if who == "host" else others[1]
    failed._event(lambda: failed.agent.next_round(failed.first, failed.now))
    gathering.world.run(LEASE_SECONDS)
    assert process.hosted is host
    rest = [each for each in (process, *others[1:]) if each is not failed]
    assert all(each.workers is not None for each in rest), "their workers go on to their end"


# --- whether the session still stands --------------------------------------------------------------------------------


def ask_round(agent: AgentProcess) -> float:
    """Let an agent ask whether its session stands, since a round is complete now; when that is."""
    made = agent.now
    agent._event(lambda: agent.agent.ask_round(agent.now))
    return made


def test_a_round_is_proved_by_answers_to_what_was_sent_after_it_for_two_seconds(gathering: AgentGathering) -> None:
    process, _, others = started(gathering)
    for agent in (process, others[0]):
        assert not agent.agent.hold.allows(agent.now, agent.now)
        made = ask_round(agent)
        gathering.world.run(0.1)
        assert agent.agent.hold.allows(made, agent.now)
    for other in others:
        gathering.network.cut(other.machine)
    gathering.world.run(ANSWER_SECONDS)
    for agent in (process, others[0]):
        assert agent.now < agent.agent.hold.until, "the lease is valid"
        assert not agent.agent.hold.allows(made, agent.now)


def test_no_member_is_answered_while_too_few_answer_the_host() -> None:
    gathering = AgentGathering(7, (1, 5))
    process, _, (asker, *others) = started(gathering, 5)

    def asked(seconds: float) -> list[bool]:
        made = [(agent, ask_round(agent)) for agent in (process, asker)]
        gathering.world.run(seconds)
        return [agent.agent.hold.allows(at, agent.now) for agent, at in made]

    for other in others:
        gathering.network.cut(other.machine)
    assert asked(ANSWER_SECONDS + 1.5) == [False, False]
    for other in others:
        gathering.network.heal(other.machine)
    gathering.world.run(1.5)
    assert asked(0.1) == [True, True]


def test_host_keeps_few_questions_of_one_member() -> None:
    gathering = AgentGathering(7, (1, 5))
    _, _, (asker, *others) = started(gathering, 5)
    for other in others:
        other.stop()
    made = []
    for _ in range(2 * QUESTIONS):
        made.append(ask_round(asker))
        gathering.world.run(0.05)
    for other in others:
        other.cont()
    gathering.world.run(0.5)
    assert asker.agent.hold.proved_at == made[QUESTIONS - 1]


def test_many_questions_at_once_cost_one_ping(gathering: AgentGathering) -> None:
    process, host, _ = started(gathering)
    sent: list[int] = []
    for _ in range(12):
        process.agent.ask_round(process.now)
        sent += [each.conn for each in timers(process, 0.0) if isinstance(each, Write)]
    assert sorted(sent) == sorted(host.registrar.seats.connections())


# --- other sessions --------------------------------------------------------------------------------------------------


def test_dial_budget_of_a_sender_also_bounds_a_running_session(gathering: AgentGathering) -> None:
    process, host, _ = started(gathering)
    offer = replace(host.offer(), host=bytes(16), addresses=tuple(f"10.9.0.{number}" for number in range(1, 13)))
    for number in range(30):
        process.agent.handle(Heard(replace(offer, session=number.to_bytes(16, "big")), STRANGER), process.now)
    seconds = 0.75  # none of them is given up meanwhile
    for step in range(1, 16):
        host.conflicts.sightings.handle_timer(process.now + seconds * step / 15)
    dialed = [effect for effect in process.agent.effects() if isinstance(effect, Dial)]
    assert 0 < len(dialed) <= SENDER_DIALS_AT_ONCE + SENDER_DIALS_PER_SECOND * seconds


@pytest.mark.parametrize("assigned", [True, False])
@pytest.mark.parametrize(("said", "ends"), [("open", False), ("sealed", True), ("running", True)])
def test_a_running_session_ends_only_for_one_that_has_proved_to_be_sealed(
    gathering: AgentGathering, said: Literal["open", "sealed", "running"], ends: bool, assigned: bool
) -> None:
    process, host, _ = started(gathering)
    agent, now = process.agent, process.now
    other = replace(
        host.offer(), session=b"T" * 16, host=bytes(16), addresses=(STRANGER.address,), joined=3, assigned=assigned
    )
    agent.effects()
    agent.handle(Heard(replace(other, state="open"), STRANGER), now)
    assert agent.effects() == []
    agent.handle(Heard(other, STRANGER), now)
    (dial,) = agent.effects()
    assert isinstance(dial, Dial)
    answering = HostConversation(
        job=other.job, attempt=other.attempt, session=other.session, addresses=other.addresses, port=other.port
    )

    def carry() -> None:
        for effect in agent.effects():
            if isinstance(effect, Write) and effect.conn == dial.conn:
                answering.receive_data(effect.data)
        agent.handle(BytesReceived(dial.conn, answering.data_to_send()), now)

    agent.handle(Connected(dial.conn, "10.0.0.1", "eth0"), now)
    carry()
    carry()
    answering.send(frames.Running(state=said, world_size=4, host=frames.ProcessInfo()))
    carry()
    assert agent.losses == ends


def test_of_two_sessions_the_one_that_has_had_its_quorum_comes_first_then_the_lower_host_id(
    gathering: AgentGathering,
) -> None:
    _, host, _ = started(gathering)
    low, high = b"\x00" * 16, b"\xff" * 16
    assert not host.yields_to(host.offer())
    for ours, other, theirs, yields in (
        (True, low, True, True),
        (True, high, True, False),
        (True, low, False, False),
        (False, high, True, True),
        (False, low, False, True),
    ):
        host.quorum.had_quorum = ours
        assert host.yields_to(replace(host.offer(), session=b"T" * 16, host=other, quorum=theirs)) is yields
