"""An agent that joins: to what it is bound, what it tells of its past, and how it notices that its host is lost."""

from __future__ import annotations

import functools
import itertools
import random

import msgspec
import pytest

from mingle.elastic.leases import ANSWER_SECONDS, BINDING_SECONDS
from mingle.elastic.member import ElasticMember
from mingle.elastic.memory import Memory, SessionEnd
from mingle.elastic.quorum import Nodes, Policy
from mingle.network.connections import CLOSED_BY_PEER
from mingle.protocol.events import Address, Disconnected, Heard, Source, StoreProved, TimerDue
from mingle.protocol.machine import Context, Endpoints
from mingle.protocol.member import Joining
from mingle.protocol.node import Node
from mingle.protocol.participant import AwaitingGo
from mingle.protocol.sessions import KnownSession
from mingle.wire.datagrams import Offer
from mingle.wire.frames import (
    Closed,
    Confirm,
    Go,
    HostSeen,
    Join,
    Joined,
    Members,
    Next,
    Refused,
    Round,
    RoundHeld,
    Void,
)
from tests.lan.agents import STARTED_AT, AgentGathering, AgentProcess
from tests.lan.tcp import RESET
from tests.support.scripted_host import HERE, IDENTITY, SESSION, Alone, offer, running, sealed

OTHER = Offer(
    job="job",
    session=b"T" * 16,
    host=b"A" * 16,
    addresses=("10.0.0.9",),
    port=4000,
    world_size=2,
    joined=1,
    state="sealed",
    kind="agents",
)


@pytest.fixture
def gathering() -> AgentGathering:
    return AgentGathering(11, (1, 2))


@pytest.fixture
def host(gathering: AgentGathering) -> AgentProcess:
    process = gathering.start("m0")
    gathering.run_until_together([process], gathering.policy.last_call + 3.0)
    return process


@pytest.fixture
def joined(gathering: AgentGathering, host: AgentProcess) -> AgentProcess:
    process = gathering.start("m1")
    gathering.run_until_together([host, process], 3.0)
    gathering.world.run(0.5)
    return process


def application(process: AgentProcess) -> Join:
    """What an agent that looks for a session would say to its host."""
    return process.joiner._application(KnownSession(OTHER, []), process.now)


def test_member_is_bound_to_a_host_that_it_hears(gathering: AgentGathering, joined: AgentProcess) -> None:
    binding = joined.agent.memory.binding
    for _ in range(3):
        assert binding.until > gathering.world.now + BINDING_SECONDS - 1.5
        assert joined.outcome is not None
        assert binding.session == joined.outcome.session
        gathering.world.run(20.0)
    assert joined.agent.hold.until == binding.until


def test_a_silent_host_is_lost_when_the_binding_ends(
    gathering: AgentGathering, host: AgentProcess, joined: AgentProcess
) -> None:
    host.stop()
    gathering.world.run(BINDING_SECONDS - 1.5)
    assert joined.agent.losses == 0
    gathering.world.run(2.0)
    assert joined.agent.lost is not None
    assert "it was silent for 10 s" in joined.agent.lost


def test_a_member_that_was_stopped_blames_no_host(gathering: AgentGathering, joined: AgentProcess) -> None:
    joined.stop()
    gathering.world.run(BINDING_SECONDS + 6.0)
    joined.cont()
    assert joined.agent.lost is not None
    assert "this process stood still for " in joined.agent.lost
    assert "silent" not in joined.agent.lost


@pytest.mark.parametrize(("reason", "free"), [(CLOSED_BY_PEER, True), (RESET, False)])
def test_a_connection_that_ends_is_a_loss_and_only_an_orderly_end_sets_free(
    gathering: AgentGathering,
    host: AgentProcess,
    joined: AgentProcess,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    free: bool,
) -> None:
    monkeypatch.setattr(AgentProcess, "_killed", lambda _: reason)
    host.kill()
    gathering.world.run(0.1)
    assert joined.agent.lost is not None
    assert reason in joined.agent.lost
    assert joined.agent.memory.binding.holds(gathering.world.now) is not free


def test_join_after_a_loss_tells_of_the_agents_past(
    gathering: AgentGathering, host: AgentProcess, joined: AgentProcess
) -> None:
    first = host.agent.generation
    host.kill()
    gathering.world.run(0.2)
    join = application(joined)
    assert (join.generation, join.had_quorum, join.surplus) == (first, True, False)
    assert join.clock == int(STARTED_AT + gathering.world.now)
    assert joined.agent.memory.missed([])
    fresh = gathering.start("m2")
    gathering.world.run(0.01)
    join = application(fresh)
    assert (join.generation, join.had_quorum, join.surplus) == (-1, False, False)


def test_a_session_with_a_lower_number_makes_it_forget_no_higher_one(
    gathering: AgentGathering, host: AgentProcess
) -> None:
    process = gathering.start("m1")
    gathering.world.run(0.01)
    higher = process.agent.memory.generation = STARTED_AT + 2000
    gathering.run_until_together([host, process], 3.0)
    first, same = [each.agent.generation for each in (host, process)]
    assert first == same < higher
    host.kill()
    gathering.world.run(0.2)
    assert application(process).generation == higher, "the number of the next session is higher"


def test_member_tells_its_host_of_other_sessions(
    joined: AgentProcess, gathering: AgentGathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    joiner = joined.joiner
    sent: list[object] = []
    monkeypatch.setattr(KnownSession, "send", lambda _, frame: sent.append(frame))
    current = joiner.session
    assert current is not None
    now = gathering.world.now + 5.0
    for message in (msgspec.structs.replace(OTHER, state="open"), OTHER, OTHER, current.offer):
        joined.agent.handle(Heard(message, Source(interface="eth0")), now)
    assert sent == [HostSeen(offer=OTHER)]
    joined.agent.handle(Heard(OTHER, Source(interface="eth0")), now + 1.0)
    assert len(sent) == 2


def test_an_acknowledgement_that_the_host_calls_off_leaves_no_past(gathering: AgentGathering) -> None:
    agents = gathering.everybody(2)

    def acknowledged() -> list[AgentProcess]:
        parts = [(each, each.joiner.part) for each in agents if each.core is not None]
        return [each for each, part in parts if part is not None and isinstance(part.state, AwaitingGo)]

    assert gathering.world.run(15.0, until=lambda: bool(acknowledged()))
    (member,) = acknowledged()
    memory = member.agent.memory
    assert memory.generation >= STARTED_AT
    assert memory.had_quorum, "its host may have decided GO"
    joiner = member.joiner
    taken = joiner.part
    assert taken is not None
    void = Void(session=taken.session.name, epoch=taken.epoch, reason="too late")
    joiner.search.on_frame(taken.session, void, gathering.world.now)
    assert (memory.generation, memory.had_quorum) == (-1, False)


def new_memory() -> Memory:
    return Memory(Policy(nodes=Nodes(minimum=1, maximum=2), last_call=30.0))


def alone_with(memory: Memory) -> Alone:
    """An agent, and hosts that say what they are told to say."""
    identity = msgspec.structs.replace(IDENTITY, rank=None, kind="agents", minimum=1)
    context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
    endpoints = Endpoints(addresses=(Address("10.0.0.2", "eth0", 24),), port=4002)
    alone = Alone()
    alone.node = Node(identity, endpoints, context, 0.0, make_joiner=functools.partial(ElasticMember, memory=memory))
    return alone


def acknowledged(alone: Alone, now: float = 2.0) -> int:
    """Bring the agent to its ACK in a session that has the number 7 and its quorum; return the connection."""
    conn = alone.join(now)
    alone.hear(conn, now, Confirm(session=SESSION, epoch=1))
    alone.hear(conn, now, Members(generation=7, quorum=True), sealed(1))
    alone.node.handle(StoreProved(SESSION, 1), now)
    alone.done()
    return conn


def formed(alone: Alone, now: float = 2.0) -> tuple[int, ElasticMember]:
    """Bring the agent to GO; return the connection, and the agent's machine."""
    conn = acknowledged(alone, now)
    alone.hear(conn, now, Go(session=SESSION, epoch=1))
    assert isinstance(alone.joiner, ElasticMember)
    assert alone.joiner.running
    return conn, alone.joiner


def test_the_end_of_a_connection_before_joined_sets_no_agent_free() -> None:
    """The host may count it by an earlier connection, and not know yet who has called."""
    memory = new_memory()
    memory.binding.renew(SESSION, 2.0)
    alone = alone_with(memory)
    alone.node.handle(Heard(offer(), HERE), 2.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 2.0)
    assert alone.step() is Joining
    alone.node.handle(Disconnected(conn, CLOSED_BY_PEER), 4.0)
    assert memory.binding.holds(4.0)


def test_the_end_of_its_binding_is_no_reason_to_wake_up_again_and_again() -> None:
    memory = new_memory()
    memory.binding.renew(b"U" * 16, 0.0)
    alone = alone_with(memory)
    conn = alone.join(1.0)
    alone.node.handle(Heard(msgspec.structs.replace(OTHER, joined=2), HERE), 2.0)
    (probe,) = alone.dialed()
    alone.answer(probe, 2.0, running(), session=OTHER.session, addresses=OTHER.addresses)
    alone.hear(conn, 3.0, Confirm(session=SESSION, epoch=1))
    for _ in range(8):
        due = alone.node.next_timer()
        assert due is not None
        if due > BINDING_SECONDS:
            break
        alone.node.handle(TimerDue(), due)
    assert alone.blocked(), "it confirms nothing yet, since the job runs elsewhere"
    assert due > BINDING_SECONDS


@pytest.mark.parametrize("voided", [True, False])
def test_only_the_void_of_its_last_acknowledgement_undoes_its_past(voided: bool) -> None:
    memory = new_memory()
    alone = alone_with(memory)
    conn = acknowledged(alone)
    alone.hear(conn, 2.0, Void(session=SESSION, epoch=1 if voided else 0, reason="too late"))
    assert (memory.generation, memory.had_quorum) == ((-1, False) if voided else (7, True))
    assert memory.binding.holds(2.1) is not voided


def test_the_void_of_another_session_does_not_undo_its_past() -> None:
    """The first host may have decided GO: an agent that forgot its quorum could found a small session beside it."""
    memory = new_memory()
    alone = alone_with(memory)
    conn = acknowledged(alone)
    alone.node.handle(Disconnected(conn, RESET), 3.0)
    (back,) = alone.dialed()
    alone.node.handle(Disconnected(back, "ECONNREFUSED"), 3.0)
    alone.node.handle(Heard(msgspec.structs.replace(OTHER, state="open"), HERE), 3.5)
    (other,) = alone.dialed()
    session = OTHER.session
    alone.answer(other, 3.5, session=session, addresses=OTHER.addresses)
    said = (Joined(session=session), Confirm(session=session, epoch=1), Void(session=session, epoch=1, reason="lost"))
    alone.hear(other, 3.5, *said)
    assert alone.joiner.session is not None
    assert alone.joiner.session.name == session
    assert (memory.generation, memory.had_quorum) == (7, True)
    assert memory.binding.elsewhere(session, 3.6)


def test_the_token_of_a_seat_is_told_to_no_other_session() -> None:
    memory = new_memory()
    memory.seat = SESSION, b"t" * 16
    alone = alone_with(memory)
    alone.node.handle(Heard(msgspec.structs.replace(OTHER, state="open"), HERE), 1.0)
    (other,) = alone.dialed()
    alone.answer(other, 1.0, session=OTHER.session, addresses=OTHER.addresses)
    alone.node.handle(Disconnected(other, RESET), 1.1)
    alone.join(2.0)
    assert [frame.token for frame in alone.said if isinstance(frame, Join)] == [b"", b"t" * 16]


def test_host_that_gives_its_session_up_sets_its_members_free() -> None:
    memory = new_memory()
    alone = alone_with(memory)
    conn, member = formed(alone)
    assert memory.binding.holds(3.0)
    alone.hear(conn, 3.0, Closed(session=SESSION, reason="it is alone", regather=True))
    assert member.end == SessionEnd("it is alone")
    assert not memory.binding.holds(3.0)


def test_an_agent_says_that_it_knows_rounds_and_asks_for_the_first_one_only_after_go(
    gathering: AgentGathering, host: AgentProcess, joined: AgentProcess
) -> None:
    process = gathering.start("m2")
    gathering.world.run(2.0, until=lambda: process.core is not None)
    assert application(process).rounds
    process._event(lambda: process.agent.next_round((-1, -1), process.now))
    assert process.agent.memory.asked is None, "it is in no session"
    assert gathering.world.run(60.0, until=lambda: gathering.in_one_round([host, joined]))
    joined._event(lambda: joined.agent.next_round((5, 0), joined.now))
    assert joined.agent.memory.round is None
    assert joined.agent.memory.asked == Next(generation=5, number=0)
    assert gathering.world.run(5.0, until=lambda: host.agent.memory.round_wanted), "the host has heard it"


def test_only_the_answer_to_its_own_question_proves_a_round() -> None:
    alone = alone_with(new_memory())
    conn, member = formed(alone)
    member.ask_round(3.0)
    alone.done()
    asked = alone.said[-1]
    assert isinstance(asked, Round)
    alone.hear(conn, 3.1, RoundHeld(number=asked.number + 1))
    assert member.proved_at == float("-inf")
    alone.hear(conn, 3.2, RoundHeld(number=asked.number))
    alone.hear(conn, 3.3, RoundHeld(number=asked.number))
    assert member.proved_at == 3.0
    member.ask_round(4.0)
    member.ask_round(4.0 + ANSWER_SECONDS)
    alone.hear(conn, 6.1, RoundHeld(number=asked.number + 1))
    assert member.proved_at == 3.0, "it was asked too long ago"


def test_a_surplus_agent_asks_no_session_for_a_seat_that_has_not_formed() -> None:
    memory = new_memory()
    memory.surplus = True
    alone = alone_with(memory)
    alone.node.handle(Heard(offer(), HERE), 1.0)
    assert alone.dialed() == []
    sealed = msgspec.structs.replace(offer(state="sealed"), kind="agents", joined=1)
    alone.node.handle(Heard(sealed, HERE), 1.0)
    assert len(alone.dialed()) == 1


def test_an_agent_that_a_session_has_taken_is_surplus_and_left_out_no_more() -> None:
    memory = new_memory()
    alone = alone_with(memory)
    conn = acknowledged(alone)
    memory.surplus, memory.left_out = True, Refused(reason="mesh")
    alone.hear(conn, 2.0, Go(session=SESSION, epoch=1))
    assert (memory.surplus, memory.left_out) == (False, None)
