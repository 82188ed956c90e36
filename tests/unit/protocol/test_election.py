"""Single rules of an election; whole elections run in tests/lan/test_election*.py."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec.structs import replace

from mingle.errors import DiscoveryTimeoutError
from mingle.protocol.effects import Dial, Effect, Hangup, Multicast, Write
from mingle.protocol.election import (
    ATTENDANCE_SECONDS,
    CALL_AGAIN_SECONDS,
    ELECT_AFTER_SECONDS,
    ELECT_SOONEST_SECONDS,
    LOWER_SECONDS,
    Attendance,
)
from mingle.protocol.events import (
    Accepted,
    Address,
    AddressesChanged,
    BytesReceived,
    Connected,
    Disconnected,
    FoldersListed,
    Heard,
    InterfacesChanged,
    Source,
    TimerDue,
)
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.explain.observations import NetworkFacts
from mingle.protocol.links.handshake import Call, HostConversation, MemberConversation
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.node import Node
from mingle.protocol.pacing import COUNTED_RANKS
from mingle.protocol.session.phases import Confirming, HandingOver
from mingle.protocol.sightings import SILENT_SECONDS
from mingle.wire import frames
from mingle.wire.datagrams import Bye, Kind, Offer, Seek
from tests.support.scripted_host import IDENTITY, SESSION, Alone
from tests.support.scripted_host import offer as session_offer

JOB, LOW, HIGH = "job", bytes(16), b"\xff" * 16
HERE = Source(interface="eth0", address="10.0.0.9")
ENDPOINTS = Endpoints(addresses=(Address("10.0.0.1", "eth0", 24),), port=4000)


def elector(member: bytes = HIGH, *, timeout: float = 30.0, world_size: int = 3, folder_seconds: float = 0.0) -> Node:
    identity = Identity(
        job=JOB,
        attempt="",
        member=member,
        rank=None,
        world_size=world_size,
        node="here",
        who=frames.ProcessInfo(hostname="here", pid=1),
    )
    return Node(
        identity,
        ENDPOINTS,
        Context(
            key=None,
            new_id=itertools.count(1).__next__,
            rng=random.Random(1),
            timeout=timeout,
            folder_seconds=folder_seconds,
        ),
        0.0,
    )


def run(machine: Node, until: float, *, now: float = 0.0) -> list[tuple[float, Effect]]:
    """Let the clock run; return what was done when."""
    done: list[tuple[float, Effect]] = []
    while (due := machine.next_timer()) is not None and due <= until:
        now = max(now, due)
        machine.handle(TimerDue(), now)
        done += [(now, effect) for effect in machine.effects()]
    return done


def offer(host: bytes, **more: Any) -> Offer:
    fields: dict[str, Any] = {
        "session": b"other session 16",
        "addresses": ("10.0.0.9",),
        "port": 4001,
        "world_size": 3,
        "assigned": True,
    }
    return Offer(job=JOB, host=host, **{**fields, **more})


def offers(done: list[tuple[float, Effect]]) -> list[float]:
    return [now for now, effect in done if isinstance(effect, Multicast) and isinstance(effect.message, Offer)]


def test_process_that_hears_no_host_becomes_one_and_lower_ids_sooner() -> None:
    low, high = elector(LOW), elector(HIGH)
    first = {name: offers(run(machine, 3.0))[0] for name, machine in (("low", low), ("high", high))}
    assert 0.1 < first["low"] < first["high"] < 1.0
    assert low.host is not None
    assert not low.finished


def ask(machine: Node, *members: bytes, now: float, **more: Any) -> None:
    for member in members:
        machine.handle(Heard(Seek(job=JOB, **{"member": member, "world_size": 3, **more}), HERE), now)


OTHERS = tuple(bytes([number]) * 16 for number in range(1, 4))


def begin(*others: bytes, member: bytes = LOW, at: float = 0.05, **more: Any) -> float:
    """Let a process hear these others ask; return when it becomes the host."""
    machine = elector(member, **more)
    run(machine, at)
    ask(machine, *others, now=at)
    return offers(run(machine, 9.0, now=at))[0]


def test_patience_ends_once_all_are_there() -> None:
    assert begin(*OTHERS[:2]) == pytest.approx(ELECT_SOONEST_SECONDS)
    assert begin(*OTHERS) == pytest.approx(ELECT_SOONEST_SECONDS)  # one too many ends it as well
    assert begin(*OTHERS[:2], at=0.35) == pytest.approx(0.35)


def test_patience_goes_on_while_one_is_missing_or_another_has_the_lowest_id() -> None:
    assert begin(OTHERS[0]) == ELECT_AFTER_SECONDS
    assert begin(OTHERS[0], OTHERS[0]) == ELECT_AFTER_SECONDS
    second = begin(LOW, OTHERS[2], member=OTHERS[0])
    assert second == begin(member=OTHERS[0]) > ELECT_AFTER_SECONDS


def test_process_of_another_job_or_kind_or_with_a_rank_does_not_count() -> None:
    for more in ({"job": "jbo"}, {"attempt": "2"}, {"kind": "agents"}, {"kind": "observer"}, {"rank": 1}):
        machine = elector(LOW)
        run(machine, 0.05)
        for member in OTHERS:
            machine.handle(Heard(Seek(**{"job": JOB, "member": member, "world_size": 3, **more}), HERE), 0.05)
        assert offers(run(machine, 9.0))[0] == ELECT_AFTER_SECONDS, more


def test_attendance_forgets_processes_heard_three_seconds_ago() -> None:
    attendance = Attendance(elector(LOW).identity)
    for number, member in enumerate(OTHERS[:2]):
        attendance.heard(Seek(job=JOB, member=member, world_size=3), float(number))
    assert attendance.complete(ATTENDANCE_SECONDS)
    assert not attendance.complete(ATTENDANCE_SECONDS + 0.1)


def test_offer_keeps_the_patience_up() -> None:
    attendance = Attendance(elector(LOW).identity)
    attendance.heard(offer(HIGH), 0.0)
    for now in (0.1, 3.1):
        for member in OTHERS[:2]:
            attendance.heard(Seek(job=JOB, member=member, world_size=3), now)
        assert attendance.complete(now) is (now > ATTENDANCE_SECONDS)


def test_invented_ids_neither_fill_the_memory_nor_lengthen_the_patience() -> None:
    machine = elector(b"\x80" * 16)
    run(machine, 0.05)
    for number in range(1000):
        ask(machine, number.to_bytes(16, "little"), now=0.05)
    assert offers(run(machine, 9.0))[0] == begin(member=b"\x80" * 16)
    assert len(machine._patience.attendance._asked) <= 2 * COUNTED_RANKS


def test_process_that_goes_on_asking_is_not_forgotten_for_invented_ids() -> None:
    attendance = Attendance(elector(b"\x50" * 16).identity)

    def ask_as(member: bytes, now: float) -> None:
        attendance.heard(Seek(job=JOB, member=member, world_size=3), now)

    ask_as(LOW, 1.0)
    for number in range(2 * COUNTED_RANKS):
        if number == COUNTED_RANKS:
            ask_as(LOW, 1.5)
        ask_as(b"\xf0" + number.to_bytes(15, "big"), 2.0)
    assert not attendance.complete(2.0), "the one with the lower id is there"


def test_process_that_has_not_asked_waits_however_many_are_there() -> None:
    machine = elector(LOW)
    ask(machine, *OTHERS, now=0.0)
    late = 0.5
    machine.handle(TimerDue(), late)  # it was stopped before its first question
    assert offers(run(machine, 9.0))[0] == ELECT_AFTER_SECONDS


def test_with_shared_folders_all_must_be_there_and_the_folders_show_this_process() -> None:
    machine = elector(LOW, folder_seconds=5.0)
    run(machine, 0.05)
    ask(machine, *OTHERS, now=0.05)
    run(machine, 0.4)
    machine.handle(FoldersListed(), 0.4)
    assert offers(run(machine, 9.0))[0] == pytest.approx(0.4, abs=0.01)


def test_with_shared_folders_the_election_waits_until_they_show_this_process() -> None:
    without, late = (offers(run(elector(LOW, folder_seconds=seconds), 9.0))[0] for seconds in (0.0, 5.0))
    assert late == pytest.approx(without + 5.0)  # and for no longer than that
    machine = elector(LOW, folder_seconds=5.0)
    run(machine, 2.0)
    machine.handle(FoldersListed(), 2.0)
    machine.handle(FoldersListed(), 2.3)
    assert offers(run(machine, 9.0))[0] == pytest.approx(2.0 + without)


def test_a_lower_process_in_a_shared_folder_delays_the_election_by_three_seconds() -> None:
    alone = offers(run(elector(HIGH), 9.0))[0]
    machine = elector(HIGH, folder_seconds=5.0)
    for tenths in range(1, 50):
        machine.handle(FoldersListed(lower=True), tenths / 10)
    assert machine.next_timer() is not None
    first = offers(run(machine, 9.0))[0]
    assert first == pytest.approx(0.1 + LOWER_SECONDS + alone)
    machine = elector(HIGH, folder_seconds=5.0)
    machine.handle(FoldersListed(lower=True), 0.1)
    machine.handle(FoldersListed(), 0.5)  # it has become a host, and its OFFER was heard, or it has ended
    assert offers(run(machine, 9.0))[0] == pytest.approx(0.5 + alone)


def test_a_sealed_session_of_a_folder_delays_the_election_only_if_it_answers() -> None:
    """Its machine can be gone: then no address refuses, and its object is still there."""
    alone = offers(run(elector(HIGH), 9.0))[0]
    in_folder = Source(interface="", multicast=False, address="dir:/shared", folder=True)
    machine = elector(HIGH)
    machine.handle(Heard(offer(LOW, state="sealed"), in_folder), 0.05)
    assert offers(run(machine, 9.0))[0] == pytest.approx(alone)
    machine = elector(HIGH)
    machine.handle(Heard(offer(LOW, state="sealed"), HERE), 0.05)
    assert offers(run(machine, 20.0))[0] > 5.0
    machine = elector(HIGH)
    machine.handle(Heard(offer(LOW), in_folder), 0.05)
    assert offers(run(machine, 9.0))[0] <= alone + 2.0


@pytest.mark.parametrize(
    ("kind", "confirms", "epoch", "leads"),
    [
        pytest.param("ranks", True, 1, True, id="asked"),
        pytest.param("ranks", True, 0, False, id="in an epoch that is over"),
        pytest.param("ranks", False, 0, False, id="before it has confirmed"),
        pytest.param("agents", True, 1, False, id="an agent"),
    ],
)
def test_process_leads_only_if_its_host_asks_in_the_epoch_that_it_has_confirmed(
    kind: Kind, confirms: bool, epoch: int, leads: bool
) -> None:
    alone = Alone()
    context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
    alone.node = Node(replace(IDENTITY, rank=None, kind=kind), ENDPOINTS, context, 0.0)
    conn = alone.join(1.0)
    if confirms:
        alone.hear(conn, 1.0, frames.Confirm(session=SESSION, epoch=1))
    alone.hear(conn, 1.0, frames.Lead(session=SESSION, epoch=epoch))
    assert (alone.node.host is not None) is leads


def test_a_host_that_asks_to_be_replaced_and_closes_in_one_breath_is_not_replaced() -> None:
    """Its process was stopped meanwhile, and reads both at once."""
    alone = Alone()
    alone.node = machine = elector(HIGH)
    conn = alone.join(0.05)
    alone.hear(conn, 0.05, frames.Confirm(session=SESSION, epoch=1))
    alone.hear(conn, 1.0, frames.Lead(session=SESSION, epoch=1), frames.Closed(session=SESSION, reason="Ctrl-C"))
    machine.handle(TimerDue(), 1.1)
    assert machine.host is None
    assert machine.joiner.part is None
    assert machine.stage() == "seeking"


def test_process_that_leads_does_not_close_for_the_host_that_has_asked_it_to() -> None:
    """That host closes, whatever the ids; its announcements are still on their way."""
    alone = Alone()
    alone.node = machine = elector(HIGH)
    conn = alone.join(0.05)
    alone.hear(conn, 0.05, frames.Confirm(session=SESSION, epoch=1))
    alone.hear(conn, 0.05, frames.Lead(session=SESSION, epoch=1))
    host = machine.host
    assert host is not None
    asking = replace(session_offer(), assigned=True)
    assert asking.host < HIGH
    machine.handle(Heard(asking, HERE), 0.1)
    (call,) = alone.dialed()
    alone.answer(call, 0.1, running("open"))
    assert machine.host is host
    assert alone.said[-1] == frames.HostSeen(offer=host.offer())


def test_a_host_in_sight_is_joined_and_nobody_else_becomes_one() -> None:
    machine = elector(LOW)
    machine.handle(Heard(offer(HIGH), HERE), 0.05)
    assert any(isinstance(effect, Dial) for effect in machine.effects())
    assert offers(run(machine, 1.0)) == []
    assert machine.host is None


def test_a_host_that_was_called_in_vain_delays_the_election_no_longer() -> None:
    """A firewall drops every call to it, and it offers itself again and again."""
    alone = offers(run(elector(HIGH), 9.0))[0]
    machine = elector(HIGH)
    machine.handle(Heard(offer(LOW), HERE), 0.0)
    for quarters in range(1, 40):
        if machine.host is not None:
            break
        run(machine, quarters / 4)
        machine.handle(Heard(offer(LOW), HERE), quarters / 4)
    assert quarters / 4 <= ADDRESS_SECONDS + alone + 0.5


def test_a_host_that_takes_a_call_and_is_slow_delays_the_election() -> None:
    """On a slow machine each process would become one, and each would call each other."""
    machine = elector(HIGH)
    for quarters in range(16):
        machine.handle(Heard(offer(LOW), HERE), quarters / 4)
        for effect in machine.effects():
            if isinstance(effect, Dial):
                machine.handle(Connected(effect.conn, "10.0.0.1", "eth0"), quarters / 4)
        run(machine, (quarters + 1) / 4)
    assert machine.host is None


def test_a_host_calls_every_other_host_and_closes_for_none_that_has_proved_nothing() -> None:
    for member, other in ((HIGH, LOW), (LOW, HIGH)):
        machine = elector(member)
        run(machine, 1.0)
        machine.handle(Heard(offer(other), HERE), 1.5)
        dialed = [effect for effect in machine.effects() if isinstance(effect, Dial)]
        assert [(effect.address, effect.port) for effect in dialed] == [("10.0.0.9", 4001)]
        assert machine.host is not None
        assert not machine.host.registrar.held


def test_a_sealed_session_wins_nobody_over() -> None:
    machine = elector(HIGH)
    run(machine, 1.0)
    machine.handle(Heard(offer(LOW, state="sealed"), HERE), 1.5)
    assert not any(each.races_to("conflict") for each in machine.sightings)
    assert machine.host is not None
    assert machine.host.registrar.held, "the job may run there"


def test_elector_without_a_host_hangs_up_on_callers() -> None:
    machine = elector()
    machine.handle(Accepted(7, "10.0.0.9"), 0.01)
    assert Hangup(7) in machine.effects()


def test_elector_expires_at_its_deadline_and_closes_quietly() -> None:
    machine = elector(timeout=2.0)
    run(machine, 1.9)
    assert not machine.expired(1.9)
    assert machine.expired(2.0)
    machine.close("interrupted")
    assert machine.host is not None
    assert machine.host.closed


def test_elector_ignores_its_own_offers() -> None:
    machine = elector(HIGH)
    machine.handle(Heard(offer(HIGH), HERE), 0.01)
    run(machine, 1.0)
    machine.handle(Heard(offer(HIGH), HERE), 1.5)
    assert not any(isinstance(effect, Dial) for effect in machine.effects())


def test_the_error_of_its_session_stays_when_that_is_gone() -> None:
    machine = elector(timeout=5.0)
    run(machine, 4.9)
    machine.give_up(timeout(machine.situation(), NetworkFacts()))
    failure = machine.failure
    assert isinstance(failure, DiscoveryTimeoutError)
    assert "within 5 s" in str(failure)
    machine.close("failed")
    assert machine.failure is failure


def test_addresses_that_come_later_are_those_of_its_session() -> None:
    machine = elector()
    first, second = (Address(address, "eth1", 24) for address in ("10.1.0.1", "10.2.0.1"))
    machine.handle(AddressesChanged((first,)), 0.0)
    run(machine, 3.0)
    assert machine.host is not None
    assert machine.host.offer().addresses == ("10.1.0.1",)
    machine.handle(AddressesChanged((first, second)), 4.0)
    assert machine.host.endpoints.addresses == (first, second)
    assert machine.host.offer().addresses == ("10.1.0.1", "10.2.0.1")
    machine.handle(InterfacesChanged(), 4.0)
    assert not machine.finished


# --- competing with another host ------------------------------------------------------------------------------------


class Hosting:
    """A process that hosts a session and hears of another host."""

    def __init__(self, member: bytes = LOW) -> None:
        self.machine = elector(member)
        run(self.machine, 1.0)

    @property
    def hosts(self) -> bool:
        return self.machine.host is not None

    def dialed(self, now: float, host: bytes = HIGH, **more: Any) -> list[int]:
        self.machine.handle(Heard(offer(host, **more), HERE), now)
        return [effect.conn for effect in self.machine.effects() if isinstance(effect, Dial)]

    def prove(
        self, conn: int, *answer: frames.AnyFrame, now: float = 1.6
    ) -> tuple[HostConversation, list[frames.AnyFrame], list[Effect]]:
        """The other host proves itself and answers; returns what it hears then, and what else is done."""
        host = HostConversation(job=JOB, attempt="", session=b"other session 16", addresses=("10.0.0.9",), port=4001)
        heard: list[frames.AnyFrame] = []
        done: list[Effect] = []
        self.machine.handle(Connected(conn, "10.0.0.1", "eth0"), now)
        for step in range(3):
            for effect in self.machine.effects():
                if isinstance(effect, Write) and effect.conn == conn:
                    heard += host.receive_data(effect.data)
                else:
                    done.append(effect)
            if step == 1:
                assert self.hosts, "it has a proof and no word of the state"
                for frame in answer or (running(),):
                    host.send(frame)
            if data := host.data_to_send():
                self.machine.handle(BytesReceived(conn, data), now)
        done += self.machine.effects()
        return host, heard, done

    def meet(self, host: bytes, *answer: frames.AnyFrame, **more: Any) -> list[Effect]:
        """It hears of another host, which proves itself and answers; returns what is done then."""
        (conn,) = self.dialed(1.5, host, **more)
        _, _, done = self.prove(conn, *answer)
        return done


def running(state: Any = "open") -> frames.Running:
    return frames.Running(state=state, world_size=3, host=frames.ProcessInfo(hostname="other", pid=2), seconds=1.0)


def test_a_host_closes_for_a_lower_id_that_has_proved_itself_and_makes_for_it() -> None:
    process = Hosting(HIGH)
    done = process.meet(LOW)
    assert not process.hosts
    assert [type(each.message) for each in done if isinstance(each, Multicast)] == [Bye]
    (race,) = [each for each in process.machine.joiner.sightings if each.races_to("join")]
    assert race.offer == offer(LOW)
    assert [(each.address, each.port) for each in done if isinstance(each, Dial)] == [("10.0.0.9", 4001)]


def test_a_winner_that_is_not_reached_after_that_is_looked_for_no_longer() -> None:
    process = Hosting(HIGH)
    (join,) = [each.conn for each in process.meet(LOW) if isinstance(each, Dial)]
    process.machine.handle(Disconnected(join, "refused"), 1.7)
    assert process.machine.joiner.search._client.seeker.next_timer() is not None
    run(process.machine, 3.0)
    assert process.hosts


@pytest.mark.parametrize("state", ["sealed", "running"])
def test_a_host_closes_for_no_session_that_is_not_open(state: str) -> None:
    process = Hosting(HIGH)
    process.meet(LOW, running(state))
    assert process.hosts


def test_from_confirm_on_a_host_closes_for_nobody() -> None:
    process = Hosting(HIGH)
    (conn,) = process.dialed(1.5, LOW)
    assert process.machine.host is not None
    process.machine.host.registrar.state = Confirming(epoch=1, ends=float("inf"))
    process.prove(conn)
    assert process.hosts
    assert process.dialed(9.0, LOW) == []


@pytest.mark.parametrize(("leader", "closes"), [(LOW, True), (OTHERS[0], False)])
def test_host_that_hands_over_closes_for_the_first_alone(leader: bytes, closes: bool) -> None:
    process = Hosting(HIGH)
    (conn,) = process.dialed(1.5, LOW)
    assert process.machine.host is not None
    process.machine.host.registrar.state = HandingOver(epoch=1, leader=leader, ends=float("inf"))
    process.prove(conn)
    assert process.hosts is not closes


def test_a_host_that_was_given_its_rank_is_followed_whatever_its_id() -> None:
    process = Hosting(LOW)
    (conn,) = process.dialed(1.5, HIGH, assigned=False)
    _, _, done = process.prove(conn)
    assert not process.hosts
    assert Hangup(conn) in done, "it would take a connection that lasts for a second rank 0"


def test_a_higher_id_hears_of_this_host_again_and_again_on_one_connection() -> None:
    process = Hosting(LOW)
    (conn,) = process.dialed(1.5)
    host, heard, done = process.prove(conn)
    assert host.hello is not None
    assert (host.hello.member, host.hello.purpose) == (LOW, "conflict")
    (said,) = heard
    assert isinstance(said, frames.HostSeen)
    assert said.offer.host == LOW
    assert process.hosts
    assert Hangup(conn) not in done
    for later, again in ((1.4, False), (1.5, True), (1.6, False), (2.5, True)):
        process.machine.handle(Heard(offer(HIGH), HERE), later + CALL_AGAIN_SECONDS)
        written = [each for each in process.machine.effects() if isinstance(each, Write)]
        assert [host.receive_data(each.data) for each in written] == [[said]] * again


@pytest.mark.parametrize(("own", "closes"), [(True, True), (False, False)])
def test_a_host_closes_for_one_that_cannot_reach_it(own: bool, closes: bool) -> None:
    process = Hosting(LOW)
    (conn,) = process.dialed(1.5)
    host, _, _ = process.prove(conn)
    assert process.machine.host is not None
    host.send(frames.Unreachable(session=process.machine.host.session if own else b"a third session."))
    process.machine.handle(BytesReceived(conn, host.data_to_send()), 1.7)
    assert process.hosts is not closes
    effects = process.machine.effects()
    assert [each.port for each in effects if isinstance(each, Dial)] == [4001] * closes
    assert (Hangup(conn) in effects) is closes


@pytest.mark.parametrize(
    ("caller", "purpose", "lower", "answered"),
    [
        pytest.param(LOW, "conflict", LOW, True, id="the winner itself"),
        pytest.param(LOW, "join", LOW, False, id="a member with its id"),
        pytest.param(b"m" * 16, "conflict", LOW, False, id="a third host"),
        pytest.param(HIGH, "conflict", HIGH, False, id="a host that loses"),
    ],
)
def test_a_host_tells_the_winner_that_it_cannot_reach_it(
    caller: bytes, purpose: frames.Purpose, lower: bytes, answered: bool
) -> None:
    """Where the other host's firewall drops the calls of this one, no other connection leads there."""
    process = Hosting(b"M" * 16)
    machine = process.machine
    assert machine.host is not None
    conversation = MemberConversation(
        Call(job=JOB, member=caller, session=machine.host.session, purpose=purpose), ("10.0.0.1", 4000)
    )
    machine.handle(Accepted(9, "10.0.0.9", "eth7"), 1.5)
    heard: list[frames.AnyFrame] = []
    dialed: list[int] = []

    def take() -> None:
        for effect in machine.effects():
            if isinstance(effect, Write) and effect.conn == 9:
                heard.extend(conversation.receive_data(effect.data))
            elif isinstance(effect, Dial):
                assert effect.interface == "eth7", "the scope of a link-local address"
                dialed.append(effect.conn)

    for step in range(2):
        if step:
            conversation.send(frames.HostSeen(offer=offer(lower)))
        machine.handle(BytesReceived(9, conversation.data_to_send()), 1.5)
        take()
    (conn,) = dialed
    machine.handle(Disconnected(conn, "no answer"), 2.5)
    take()
    told = [each.session for each in heard if isinstance(each, frames.Unreachable)]
    assert told == [b"other session 16"] * answered
    assert process.hosts
    assert any("no answer" in reason for reason in machine.host.diagnostics.hosts.values())


def test_the_same_host_is_not_called_again_at_once() -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5)
    assert process.dialed(1.5 + 2 * CALL_AGAIN_SECONDS) == [], "it is being called"
    process.machine.handle(Disconnected(conn, "refused"), 1.6)
    assert process.dialed(1.4 + CALL_AGAIN_SECONDS) == []
    assert len(process.dialed(1.5 + CALL_AGAIN_SECONDS)) == 1


def test_foreign_server_at_a_hosts_address_is_hung_up_on() -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5)
    process.machine.handle(Connected(conn, "10.0.0.1", "eth0"), 1.6)
    process.machine.effects()
    process.machine.handle(BytesReceived(conn, b"SSH-2.0-OpenSSH_9.6\r\n"), 1.6)
    assert [each for each in process.machine.effects() if isinstance(each, Write | Hangup)] == [Hangup(conn)]


def test_a_host_that_stays_silent_is_given_up() -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5)
    process.machine.handle(TimerDue(), 1.5 + ADDRESS_SECONDS)
    assert Hangup(conn) in process.machine.effects()


def test_host_that_calls_another_one_twice_in_vain_says_so_where_it_is_heard() -> None:
    process = Hosting(LOW)
    for now, says in ((1.5, False), (3.0, True)):
        (conn,) = process.dialed(now)
        process.machine.handle(Disconnected(conn, "ECONNREFUSED"), now)
        said = [each for each in process.machine.effects() if isinstance(each, Multicast)]
        wanted = Multicast(process.machine.identity.seek(b"other session 16", "10.0.0.9 ECONNREFUSED"), to_peers=True)
        assert (wanted in said) is says
    assert process.machine.host is not None
    assert [each.how for each in process.machine.host.diagnostics.unreached.values()] == ["10.0.0.9 ECONNREFUSED"]


def test_a_host_waits_for_another_one_that_is_sealed_although_it_has_called_it() -> None:
    process = Hosting(LOW)
    process.meet(HIGH)
    process.dialed(3.0)  # it says once more that it is there
    assert process.machine.host is not None
    assert not process.machine.host.conflicts.any_alive
    assert process.dialed(3.1, HIGH, state="sealed", joined=3)
    assert process.machine.host.conflicts.any_alive


def test_a_host_waits_no_longer_for_another_one_that_was_sealed_and_takes_members() -> None:
    process = Hosting(LOW)
    (conn,) = process.dialed(1.5)
    process.dialed(1.55, HIGH, state="sealed", joined=3)
    process.prove(conn)
    assert process.machine.host is not None
    assert not process.machine.host.conflicts.any_alive


def test_the_time_of_a_claim_begins_on_a_host_with_the_datagram() -> None:
    process = Hosting(LOW)
    process.dialed(1.5)
    process.dialed(1.51, HIGH, state="sealed", joined=3)
    process.machine.handle(TimerDue(), 1.52 + SILENT_SECONDS)
    assert process.machine.host is not None
    assert not process.machine.host.conflicts.any_alive


def test_the_first_that_is_called_again_has_one_race_also_if_a_datagram_says_that_it_is_sealed() -> None:
    process = Hosting(HIGH)
    assert process.machine.host is not None
    process.machine.host.registrar.state = HandingOver(epoch=1, leader=LOW, ends=float("inf"))
    assert process.dialed(1.5, LOW)
    process.dialed(1.6, LOW, state="sealed", joined=3)
    run(process.machine, 1.6 + 2 * ADDRESS_SECONDS, now=1.6)
    (session,) = process.machine.sightings
    assert session.race is not None
    assert len(process.machine.links) == len(session.race._attempts)
