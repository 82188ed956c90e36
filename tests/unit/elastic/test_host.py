"""An agent that hosts: whom it counts, when it stops, and for which session it steps down."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from mingle.elastic.agent import JobEnd
from mingle.elastic.host import LOOK_AROUND_SECONDS, QUESTIONS, STORE_GONE_SECONDS, ElasticHost
from mingle.elastic.leases import ANSWER_SECONDS, LEASE_SECONDS, Hold
from mingle.protocol.effects import Dial, Reset, Write
from mingle.protocol.events import BytesReceived, Connected, Heard, Source
from mingle.protocol.host import Serving
from mingle.protocol.links.claims import SENDER_DIALS_AT_ONCE, SENDER_DIALS_PER_SECOND
from mingle.protocol.links.handshake import HostConversation
from mingle.wire import frames
from mingle.wire.datagrams import Seek
from tests.lan.agents import AgentGathering, AgentProcess


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


def ids(*agents: AgentProcess) -> set[bytes]:
    return {agent.identity.member for agent in agents}


def test_all_members_learn_of_a_latecomer(gathering: AgentGathering) -> None:
    process, host, others = started(gathering, 3)
    late = gathering.start("m9")
    gathering.run_until_together([process, *others, late], 3.0)
    gathering.world.run(0.5)
    for agent in (process, *others, late):
        memory = agent.agent.memory
        assert {who.hostname for who in memory.companions} == {each.machine.name for each in (process, *others, late)}
        assert (memory.generation, memory.had_quorum) == (host.quorum.generation, True)
    assert host.offer().joined == 4
    assert host.offer().quorum
    assert not host.offer().takes_members


def test_a_silent_member_is_reset_when_its_lease_ends(
    gathering: AgentGathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, host, others = started(gathering)
    done: list[object] = []
    genuine = AgentProcess._do
    monkeypatch.setattr(AgentProcess, "_do", lambda self, effect: (done.append(effect), genuine(self, effect))[1])
    seat = host.registrar.seats[others[0].identity.member]
    gathering.network.cut(others[0].machine)
    gathering.world.run(LEASE_SECONDS - 1.5)
    assert seat.member in host.registrar.seats
    gathering.world.run(1.6)
    assert host.registrar.seats.keys() == ids(process, *others[1:])
    assert [effect for effect in done if isinstance(effect, Reset)] == [Reset(seat.conn or 0)]


def test_host_with_too_few_members_stops_at_once_and_says_why(gathering: AgentGathering) -> None:
    process, host, _ = started(gathering)
    gathering.network.cut(process.machine)
    gathering.world.run(LEASE_SECONDS + 0.01)
    assert host.end is not None
    assert "1 node can be reached, and it takes 2 to keep the session" in host.end.reason
    assert process.closed_stores == [host.end.reason]
    assert process.agent.lost == host.end.reason


def test_host_of_a_running_session_asks_for_others_periodically(
    gathering: AgentGathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    process, host, _ = started(gathering)
    original = AgentProcess._multicast

    def count(self: AgentProcess, message: object, browse: bool, *, padded: bool) -> None:
        if isinstance(message, Seek) and self is process:
            asked.append(gathering.world.now)
        original(self, message, browse, padded=padded)  # type: ignore[arg-type]

    monkeypatch.setattr(AgentProcess, "_multicast", count)
    gathering.world.run(10 * LOOK_AROUND_SECONDS)
    assert 7 <= len(asked) <= 15
    assert host.calling() == process.identity.seek()


def test_closed_host_asks_for_nothing(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    process.close()
    gathering.world.run(1.0)
    assert host.closed
    assert all(other.agent.ended == "its workers are done" for other in others)
    assert host.calling() is None


def test_a_job_that_an_agent_has_ended_keeps_its_store_and_begins_no_round(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    others[0].close()
    gathering.world.run(0.5)
    assert process.agent.hold == Hold(), "no round begins, although enough members answer"
    for other in others[1:]:
        other.close()
    gathering.world.run(2 * LEASE_SECONDS)
    assert process.hosted is host, "its workers go on to their end, and their store stays"
    assert host.quorum.ending
    assert process.agent.hold.until == float("-inf")


def test_the_end_of_a_job_ends_the_wait_of_a_newcomer_for_a_round() -> None:
    gathering = AgentGathering(7, (1, 5))
    process, host, others = started(gathering, 3)
    assert gathering.world.run(30.0, until=lambda: gathering.in_one_round([process, *others]))
    late = gathering.start("m9")
    gathering.run_until_together([process, *others, late], 10.0)
    gathering.world.run(0.1)
    due = host.rounds.due
    assert due is not None
    others[0].close()
    gathering.world.run(0.1)
    assert host.quorum.ending
    gathering.world.run(due + 10.0 - gathering.world.now)
    assert late.workers is None
    assert all(each.workers is not None for each in (process, others[1])), "their workers go on to their end"


def test_agents_that_are_done_wait_in_vain_once_all_others_have_ended_the_job(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)
    assert gathering.world.run(30.0, until=lambda: gathering.in_one_round([process, *others]))
    for done in (process.agent, others[0].agent):
        done.stop_electing(gathering.world.now)
    others[1].close()
    gathering.world.run(0.5)
    assert host.quorum.ending
    assert not process.agent.round_over, "one still runs"
    others[2].close()
    gathering.world.run(0.5)
    assert process.agent.round_over


def test_after_the_end_of_a_job_no_agent_looks_for_another_session(gathering: AgentGathering) -> None:
    process, _, others = started(gathering)
    others[0].close()
    gathering.world.run(0.5)
    assert all(each.agent.job_end is JobEnd.ANNOUNCED for each in (process, *others[1:]))
    process.kill()
    gathering.world.run(20.0)
    for each in others[1:]:
        assert each.agent.lost is not None
        assert each.agent.closed, "its workers go on to their end"


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
    assert not any(each.agent.memory.round_wanted for each in (process, *others[1:]))


@pytest.mark.parametrize("who", ["host", "member"])
def test_an_agent_that_got_no_round_is_lost_and_ends_no_job(gathering: AgentGathering, who: str) -> None:
    process, host, others = started(gathering)
    leaves, *stay = (process, *others) if who == "host" else (*others, process)
    leaves._event(lambda: leaves.agent.close("ended by RendezvousTimeoutError", failed=True))
    leaves.alive = False
    assert gathering.world.run(60.0, until=lambda: gathering.in_one_round(stay))
    assert not any(each.agent.job_end is JobEnd.ANNOUNCED or each.agent.ended for each in stay)
    assert (process.hosted is host) is (who == "member")


def test_an_agent_that_knows_no_rounds_gets_no_seat(gathering: AgentGathering) -> None:
    _, host, others = started(gathering, 3)
    member = others[0].identity.member
    seat = host.registrar.seats[member]
    older = replace(seat.applicant, rounds=False, versions={"mingle": "0.9"})
    assert host.quorum.misfit(seat.applicant, assigned=True) is None
    assert host.quorum.misfit(older, assigned=True) == (
        "version",
        "the newcomer has mingle 0.9, the host unknown, which begins the rounds itself",
    )


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


def ask_round(agent: AgentProcess) -> float:
    """Let an agent ask whether its session stands, since a round is complete now; when that is."""
    made = agent.now
    agent._event(lambda: agent.agent.ask_round(agent.now))
    return made


def test_a_round_is_proved_by_answers_to_what_was_sent_after_it_for_two_seconds(gathering: AgentGathering) -> None:
    process, _, others = started(gathering)
    for agent in (process, others[0]):
        made = agent.now
        assert not agent.agent.hold.allows(made, agent.now)
        ask_round(agent)
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
    process, host, others = started(gathering, 5)
    for other in others[1:]:
        gathering.network.cut(other.machine)
    made = [ask_round(agent) for agent in (process, others[0])]
    gathering.world.run(ANSWER_SECONDS + 1.5)
    assert not any(agent.agent.hold.allows(at, agent.now) for agent, at in zip((process, others[0]), made, strict=True))
    asked = [at for questions in host._rounds_asked.values() for at in questions.values()]
    assert min(asked) > process.now - ANSWER_SECONDS - 1.1, "older questions are forgotten"
    for other in others[1:]:
        gathering.network.heal(other.machine)
    gathering.world.run(1.5)
    for agent, at in zip((process, others[0]), made, strict=True):
        ask_round(agent)
        gathering.world.run(0.1)
        assert agent.agent.hold.allows(at, agent.now)


def test_link_local_address_that_is_listed_no_more_ends_no_session_that_members_hold(gathering: AgentGathering) -> None:
    process, host, _ = started(gathering)
    assert host.outcome is not None
    host.state = Serving(replace(host.outcome, store_address="fe80::1%eth0"))
    gathering.world.run(2 * STORE_GONE_SECONDS)
    assert process.hosted is host


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


def test_many_questions_cost_few_pings(gathering: AgentGathering) -> None:
    process, host, others = started(gathering)

    def pings() -> int:
        asked = [conn for seat in host.registrar.seats.values() if (conn := seat.conn) is not None]
        return sum(host._callers[conn].last_answered + len(host._callers[conn].asked) for conn in asked)

    before = pings()
    for other in others:
        for _ in range(4):
            ask_round(other)
    gathering.world.run(0.3)
    assert pings() - before <= 5 * len(others)
    assert all(other.agent.hold.allows(other.now - 0.3, other.now) for other in others)
    assert process.hosted is host


def test_dial_budget_of_a_sender_also_bounds_a_running_session(gathering: AgentGathering) -> None:
    process, host, _ = started(gathering)
    offer = replace(host.offer(), host=bytes(16), addresses=tuple(f"10.9.0.{number}" for number in range(1, 13)))
    for number in range(30):
        forged = replace(offer, session=number.to_bytes(16, "big"))
        process.agent.handle(Heard(forged, Source(interface="eth0", address="10.0.0.66")), process.now)
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
    agent, now, here = process.agent, process.now, Source(interface="eth0", address="10.0.0.66")
    other = replace(
        host.offer(), session=b"T" * 16, host=bytes(16), addresses=("10.0.0.66",), joined=3, assigned=assigned
    )
    agent.effects()
    agent.handle(Heard(replace(other, state="open"), here), now)
    assert agent.effects() == []
    agent.handle(Heard(other, here), now)
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


def test_of_two_sessions_the_one_that_has_had_its_quorumyields_to_then_the_lower_host_id(
    gathering: AgentGathering,
) -> None:
    process, host, _ = started(gathering)
    offer = host.offer()
    low, high = b"\x00" * 16, b"\xff" * 16
    assert not host.yields_to(offer)

    def comes_first(other: bytes, *, quorum: bool) -> bool:
        return host.yields_to(
            type(offer)(
                job="job",
                session=b"T" * 16,
                host=other,
                addresses=offer.addresses,
                port=1,
                world_size=4,
                state="sealed",
                kind="agents",
                quorum=quorum,
            )
        )

    assert [comes_first(low, quorum=True), comes_first(high, quorum=True)] == [True, False]
    assert not comes_first(low, quorum=False)
    host.quorum.had_quorum = False
    assert [comes_first(high, quorum=True), comes_first(low, quorum=False)] == [True, True]
    assert process.hosted is host
