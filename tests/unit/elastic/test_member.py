"""An agent that joins: to what it is bound, what it tells of its past, and how it notices that its host is lost."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import msgspec
import pytest

from mingle.elastic.leases import ANSWER_SECONDS, BINDING_SECONDS
from mingle.elastic.member import ElasticMember
from mingle.elastic.memory import Memory, SessionEnd
from mingle.elastic.quorum import Nodes, Policy
from mingle.network.connections import CLOSED_BY_PEER
from mingle.protocol.events import Address, Disconnected, Heard, StoreProved, TimerDue
from mingle.protocol.machine import Context, Endpoints
from mingle.protocol.member import Joining
from mingle.protocol.node import Node
from mingle.wire import frames
from mingle.wire.datagrams import Offer
from mingle.wire.frames import Closed, Confirm, Go, HostSeen, Join, Joined, Members, Next, Refused, Round, Void
from tests.lan.agents import AgentGathering, AgentProcess
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
    state="open",
    kind="agents",
)
OTHER_SEALED = msgspec.structs.replace(OTHER, state="sealed")


# --- in a session ----------------------------------------------------------------------------------------------------


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


def test_a_silent_host_is_lost_when_the_binding_ends(
    gathering: AgentGathering, host: AgentProcess, joined: AgentProcess
) -> None:
    gathering.world.run(2 * BINDING_SECONDS)
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


@pytest.mark.parametrize(("reset", "reason"), [(0.0, CLOSED_BY_PEER), (1.0, RESET)])
def test_a_connection_that_ends_is_a_loss_and_only_an_orderly_end_sets_free(
    gathering: AgentGathering,
    host: AgentProcess,
    joined: AgentProcess,
    monkeypatch: pytest.MonkeyPatch,
    reset: float,
    reason: str,
) -> None:
    monkeypatch.setattr("tests.lan.agents.UNREAD", reset)
    host.kill()
    gathering.world.run(0.1)
    assert joined.agent.lost is not None
    assert reason in joined.agent.lost
    assert joined.agent.memory.binding.holds(gathering.world.now) is bool(reset)


def test_an_agent_asks_for_a_round_in_a_session_alone_and_once_until_one_begins(
    gathering: AgentGathering, host: AgentProcess, joined: AgentProcess
) -> None:
    process = gathering.start("m2")
    gathering.world.run(2.0, until=lambda: process.core is not None)
    process._event(lambda: process.agent.next_round((-1, -1), process.now))
    assert process.agent.memory.asked is None, "it is in no session"
    assert gathering.world.run(60.0, until=lambda: gathering.in_one_round([host, joined]))
    for first in (5, 6):
        joined._event(lambda first=first: joined.agent.next_round((first, 0), joined.now))
        assert (joined.agent.memory.round, joined.agent.memory.asked) == (None, Next(generation=5, number=0))
    assert gathering.world.run(5.0, until=lambda: host.agent.memory.round_wanted), "the host has heard it"


# --- with a host that says what the test tells it to say --------------------------------------------------------------


def new_memory(**past: Any) -> Memory:
    return Memory(Policy(nodes=Nodes(minimum=1, maximum=2), last_call=30.0), **past)


def alone_with(memory: Memory) -> Alone:
    """An agent, and hosts that say what they are told to say."""
    identity = msgspec.structs.replace(IDENTITY, rank=None, kind="agents", minimum=1)
    context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
    endpoints = Endpoints(addresses=(Address("10.0.0.2", "eth0", 24),), port=4002)
    alone = Alone()
    alone.node = Node(identity, endpoints, context, 0.0, make_joiner=functools.partial(ElasticMember, memory=memory))
    return alone


def call_other(alone: Alone, now: float, heard: Offer = OTHER, *said: frames.AnyFrame) -> int:
    """Have the agent hear of the other session and call its host, which says something; return the connection."""
    alone.node.handle(Heard(heard, HERE), now)
    (conn,) = alone.dialed()
    alone.answer(conn, now, *said, session=OTHER.session, addresses=OTHER.addresses)
    return conn


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


@pytest.mark.parametrize(
    "past", [{}, {"generation": 9, "had_quorum": True, "surplus": True, "began_at": -30.0}], ids=["new", "experienced"]
)
def test_join_tells_of_the_agents_past(past: dict[str, Any]) -> None:
    memory = new_memory(**{"wall_clock": lambda: 1234.5, "began_at": 0.0, **past})
    alone = alone_with(memory)
    alone.node.handle(Heard(msgspec.structs.replace(offer(state="sealed"), kind="agents", joined=1), HERE), 2.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 2.0)
    (join,) = (frame for frame in alone.said if isinstance(frame, Join))
    told = (join.generation, join.had_quorum, join.surplus, join.age, join.clock, join.rounds)
    assert told == ((9, True, True, 32.0, 1234, True) if past else (-1, False, False, 2.0, 1234, True))


def test_member_tells_its_host_of_other_sessions() -> None:
    alone = alone_with(new_memory())
    formed(alone)
    ours = msgspec.structs.replace(offer(state="sealed"), kind="agents")
    for message, now in ((OTHER, 3.0), (OTHER_SEALED, 3.0), (OTHER_SEALED, 3.0), (ours, 4.1), (OTHER_SEALED, 4.1)):
        alone.node.handle(Heard(message, HERE), now)
        alone.done()
    assert [frame for frame in alone.said if isinstance(frame, HostSeen)] == [HostSeen(offer=OTHER_SEALED)] * 2


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
    call_other(alone, 2.0, msgspec.structs.replace(OTHER_SEALED, joined=2), running())
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
    assert (memory.generation, memory.had_quorum) == (7, True), "its host may have decided GO"
    alone.hear(conn, 2.0, Void(session=SESSION, epoch=1 if voided else 0, reason="too late"))
    assert (memory.generation, memory.had_quorum) == ((-1, False) if voided else (7, True))
    assert memory.binding.holds(2.1) is not voided


def test_the_void_of_another_session_does_not_undo_its_past() -> None:
    """The first host may have decided GO: an agent that forgot its quorum could found a small session beside it."""
    memory, session = new_memory(), OTHER.session
    alone = alone_with(memory)
    conn = acknowledged(alone)
    alone.node.handle(Disconnected(conn, RESET), 3.0)
    (back,) = alone.dialed()
    alone.node.handle(Disconnected(back, "ECONNREFUSED"), 3.0)
    other = call_other(alone, 3.5)
    said = (Joined(session=session), Confirm(session=session, epoch=1), Void(session=session, epoch=1, reason="lost"))
    alone.hear(other, 3.5, *said)
    assert alone.joiner.session is not None
    assert alone.joiner.session.name == session
    assert (memory.generation, memory.had_quorum) == (7, True)
    assert memory.binding.elsewhere(session, 3.6)


def test_the_token_of_a_seat_is_told_to_no_other_session() -> None:
    alone = alone_with(new_memory(seat=(SESSION, b"t" * 16)))
    other = call_other(alone, 1.0)
    alone.node.handle(Disconnected(other, RESET), 1.1)
    alone.join(2.0)
    assert [frame.token for frame in alone.said if isinstance(frame, Join)] == [b"", b"t" * 16]


def test_host_that_gives_its_session_up_sets_its_members_free() -> None:
    memory = new_memory()
    conn, member = formed(alone := alone_with(memory))
    assert memory.binding.holds(3.0)
    alone.hear(conn, 3.0, Closed(session=SESSION, reason="it is alone", regather=True))
    assert member.end == SessionEnd("it is alone")
    assert not memory.binding.holds(3.0)


def test_only_the_answer_to_its_own_question_proves_a_round() -> None:
    conn, member = formed(alone := alone_with(new_memory()))
    member.ask_round(3.0)
    alone.done()
    asked = alone.said[-1]
    assert isinstance(asked, Round)
    alone.hear(conn, 3.1, frames.RoundHeld(number=asked.number + 1))
    assert member.proved_at == float("-inf")
    for at in (3.2, 3.3):
        alone.hear(conn, at, frames.RoundHeld(number=asked.number))
    assert member.proved_at == 3.0
    member.ask_round(4.0)
    member.ask_round(4.0 + ANSWER_SECONDS)
    alone.hear(conn, 6.1, frames.RoundHeld(number=asked.number + 1))
    assert member.proved_at == 3.0, "it was asked too long ago"


def test_a_surplus_agent_asks_no_session_for_a_seat_that_has_not_formed() -> None:
    alone = alone_with(new_memory(surplus=True))
    alone.node.handle(Heard(OTHER, HERE), 1.0)
    assert alone.dialed() == []
    alone.node.handle(Heard(OTHER_SEALED, HERE), 1.0)
    assert len(alone.dialed()) == 1


def test_an_agent_that_a_session_has_taken_is_surplus_and_left_out_no_more() -> None:
    memory = new_memory()
    alone = alone_with(memory)
    conn = acknowledged(alone)
    memory.surplus, memory.left_out = True, Refused(reason="mesh")
    alone.hear(conn, 2.0, Go(session=SESSION, epoch=1))
    assert (memory.surplus, memory.left_out) == (False, None)
