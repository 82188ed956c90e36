"""An agent that joins: to what it is bound, what it tells of its past, and how it notices that its host is lost."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from mingle.elastic.leases import BINDING_SECONDS
from mingle.elastic.member import AgentMember
from mingle.elastic.quorum import Memory, Nodes, Policy
from mingle.network.connections import CLOSED_BY_PEER
from mingle.protocol.election import Elector
from mingle.protocol.events import Heard, Source, TimerDue
from mingle.protocol.machine import Context
from mingle.protocol.member import Joiner
from mingle.protocol.participant import AwaitingGo
from mingle.protocol.sessions import KnownSession
from mingle.wire.datagrams import Offer
from mingle.wire.frames import Confirm, HostSeen, Join, Void
from tests.lan.agents import STARTED_AT, AgentGathering, AgentProcess
from tests.lan.tcp import RESET
from tests.support.scripted_host import HERE, IDENTITY, SESSION, Alone, running

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


def part(process: AgentProcess) -> Joiner:
    assert isinstance(process.agent.part, Joiner)
    return process.agent.part


def application(process: AgentProcess) -> Join:
    """What an agent that looks for a session would say to its host."""
    assert isinstance(process.agent.part, Elector)
    joiner = process.agent.part.joiner
    return joiner._application(KnownSession(OTHER, []), process.now)


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
    joiner = part(joined)
    sent: list[object] = []
    monkeypatch.setattr(KnownSession, "send", lambda _, frame: sent.append(frame))
    current = joiner.state.session
    assert current is not None
    now = gathering.world.now + 5.0
    for message in (OTHER, OTHER, current.offer):
        joiner.handle(Heard(message, Source(interface="eth0")), now)
    assert sent == [HostSeen(offer=OTHER)]
    joiner.handle(Heard(OTHER, Source(interface="eth0")), now + 1.0)
    assert len(sent) == 2


def test_an_acknowledgement_that_the_host_calls_off_leaves_no_past(gathering: AgentGathering) -> None:
    agents = gathering.everybody(2)

    def acknowledged() -> list[AgentProcess]:
        electing = [(each, each.agent.part) for each in agents if each.core is not None]
        parts = [(each, part.joiner.part) for each, part in electing if isinstance(part, Elector)]
        return [each for each, part in parts if part is not None and isinstance(part.state, AwaitingGo)]

    assert gathering.world.run(15.0, until=lambda: bool(acknowledged()))
    (member,) = acknowledged()
    memory = member.agent.memory
    assert memory.generation >= STARTED_AT
    assert memory.had_quorum, "its host may have decided GO"
    assert isinstance(member.agent.part, Elector)
    joiner = member.agent.part.joiner
    taken = joiner.part
    assert taken is not None
    void = Void(session=taken.session.name, epoch=taken.epoch, reason="too late")
    joiner.search.on_frame(taken.session, void, gathering.world.now)
    assert (memory.generation, memory.had_quorum) == (-1, False)


def test_the_end_of_its_binding_is_no_reason_to_wake_up_again_and_again() -> None:
    memory = Memory(Policy(nodes=Nodes(minimum=1, maximum=2), last_call=30.0))
    memory.binding.renew(b"U" * 16, 0.0)
    identity = msgspec.structs.replace(IDENTITY, rank=None, kind="agents", minimum=1)
    context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
    alone = Alone()
    alone.joiner = AgentMember(identity, context, 0.0, memory=memory)
    conn = alone.join(1.0)
    alone.joiner.handle(Heard(msgspec.structs.replace(OTHER, joined=2), HERE), 2.0)
    (probe,) = alone.dialed()
    alone.answer(probe, 2.0, running(), session=OTHER.session, addresses=OTHER.addresses)
    alone.hear(conn, 3.0, Confirm(session=SESSION, epoch=1))
    for _ in range(8):
        due = alone.joiner.next_timer()
        assert due is not None
        if due > BINDING_SECONDS:
            break
        alone.joiner.handle(TimerDue(), due)
    assert alone.blocked(), "it confirms nothing yet, since the job runs elsewhere"
    assert due > BINDING_SECONDS
