"""Single rules of an election; whole elections run in tests/lan/test_election*.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from mingle.errors import DiscoveryTimeoutError
from mingle.protocol.effects import Dial, Effect, Hangup, Multicast
from mingle.protocol.election import (
    ATTENDANCE_SECONDS,
    CALL_AGAIN_SECONDS,
    ELECT_AFTER_SECONDS,
    ELECT_SOONEST_SECONDS,
    ELECT_SPREAD_MAX_SECONDS,
    ELECT_SPREAD_SECONDS,
    LOWER_SECONDS,
    Attendance,
    Candidacy,
)
from mingle.protocol.events import (
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
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.protocol.machine import Context, Endpoints
from mingle.protocol.node import Node
from mingle.protocol.pacing import COUNTED_RANKS
from mingle.protocol.session.phases import Confirming, HandingOver
from mingle.protocol.sightings import SILENT_SECONDS
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Kind, Offer, Seek
from tests.support import lone_host
from tests.support.scripted_host import IDENTITY, OTHER, SESSION, Alone, running
from tests.support.scripted_host import offer as session_offer

LOW, HIGH = bytes(16), b"\xff" * 16
OTHERS = tuple(bytes([number]) * 16 for number in range(1, 4))
HERE = Source(interface="eth0", address="10.0.0.9")


def elector(member: bytes = HIGH, *, size: int = 3, kind: Kind = "ranks", **settings: Any) -> Node:
    """A process without a rank that begins to look for a host at 0.0."""
    identity = replace(IDENTITY, member=member, rank=None, world_size=size, kind=kind)
    endpoints = Endpoints(addresses=(Address("10.0.0.1", "eth0", 24),), port=4000)
    numbers, rng = itertools.count(1).__next__, random.Random(1)
    return Node(identity, endpoints, Context(key=None, new_id=numbers, rng=rng, **{"timeout": 30.0, **settings}), 0.0)


def run(node: Node, until: float, *, now: float = 0.0) -> list[Effect]:
    """Let the clock run; return what was done."""
    done: list[Effect] = []
    while (due := node.next_timer()) is not None and due <= until:
        now = max(now, due)
        node.handle(TimerDue(), now)
        done += node.effects()
    return done


def hosts_at(node: Node, *, now: float = 0.0) -> float:
    """Let the clock run; return when the process becomes the host."""
    while node.host is None:
        due = node.next_timer()
        assert due is not None
        now = max(now, due)
        node.handle(TimerDue(), now)
    return now


def dials(node: Node) -> list[Dial]:
    return [effect for effect in node.effects() if isinstance(effect, Dial)]


def offer(host: bytes, **more: Any) -> Offer:
    """The OFFER of another host."""
    plain = Offer(job="job", session=OTHER, host=host, addresses=("10.0.0.9",), port=4001, world_size=3, assigned=True)
    return replace(plain, **more)


def seek(member: bytes, **more: Any) -> Seek:
    return replace(Seek(job="job", member=member, world_size=3), **more)


# --- how long a process looks for a host -----------------------------------------------------------------------------


def test_the_lower_its_id_the_sooner_a_process_becomes_the_host_and_offers_itself() -> None:
    waits = [hosts_at(elector(bytes([number]) * 16)) for number in (0, 1, 100, 255)]
    assert waits == sorted(waits)
    assert waits[0] == ELECT_AFTER_SECONDS
    assert waits[-1] - waits[0] == pytest.approx(ELECT_SPREAD_SECONDS, rel=0.02)
    node = elector(LOW)
    said = [each.message for each in run(node, waits[0]) if isinstance(each, Multicast)]
    assert node.host is not None
    assert node.host.offer() in said
    assert not node.finished


def test_processes_of_a_large_job_wait_longer_within_bounds() -> None:
    waits = [Candidacy(elector(HIGH, size=size).identity).patience() for size in (4, 1000, 100_000)]
    assert waits[0] < waits[1] < waits[2] <= ELECT_AFTER_SECONDS + ELECT_SPREAD_MAX_SECONDS


@pytest.mark.parametrize(
    ("member", "others", "heard_at", "ends"),
    [
        pytest.param(LOW, OTHERS[:2], 0.05, ELECT_SOONEST_SECONDS, id="all are there"),
        pytest.param(LOW, OTHERS[:2], 0.35, 0.35, id="the last one comes later"),
        pytest.param(LOW, OTHERS, 0.05, ELECT_SOONEST_SECONDS, id="one too many"),
        pytest.param(LOW, OTHERS[:1], 0.05, ELECT_AFTER_SECONDS, id="one is missing"),
        pytest.param(LOW, OTHERS[:1] * 2, 0.05, ELECT_AFTER_SECONDS, id="one has asked twice"),
        pytest.param(OTHERS[0], (LOW, OTHERS[2]), 0.05, None, id="another one has the lowest id"),
    ],
)
def test_patience_ends_once_all_are_there(
    member: bytes, others: Sequence[bytes], heard_at: float, ends: float | None
) -> None:
    node = elector(member)
    run(node, heard_at)
    for other in others:
        node.handle(Heard(seek(other), HERE), heard_at)
    alone = hosts_at(elector(member))
    assert hosts_at(node, now=heard_at) == pytest.approx(alone if ends is None else ends)


@pytest.mark.parametrize(
    "more", [{"job": "jbo"}, {"attempt": "2"}, {"kind": "agents"}, {"kind": "observer"}, {"rank": 1}], ids=str
)
def test_process_of_another_job_or_kind_or_with_a_rank_does_not_count(more: dict[str, Any]) -> None:
    node = elector(LOW)
    run(node, 0.05)
    for member in OTHERS:
        node.handle(Heard(seek(member, **more), HERE), 0.05)
    assert hosts_at(node) == ELECT_AFTER_SECONDS


def test_process_that_has_not_asked_waits_however_many_are_there() -> None:
    node = elector(LOW)
    for member in OTHERS:
        node.handle(Heard(seek(member), HERE), 0.0)
    node.handle(TimerDue(), 0.5)  # it was stopped before its first question
    assert hosts_at(node, now=0.5) == ELECT_AFTER_SECONDS


def test_attendance_forgets_processes_heard_three_seconds_ago() -> None:
    attendance = Attendance(elector(LOW).identity)
    for number, member in enumerate(OTHERS[:2]):
        attendance.heard(seek(member), float(number))
    assert attendance.complete(ATTENDANCE_SECONDS)
    assert not attendance.complete(ATTENDANCE_SECONDS + 0.1)


def test_offer_keeps_the_patience_up() -> None:
    attendance = Attendance(elector(LOW).identity)
    attendance.heard(offer(HIGH), 0.0)
    for now in (0.1, 3.1):
        for member in OTHERS[:2]:
            attendance.heard(seek(member), now)
        assert attendance.complete(now) is (now > ATTENDANCE_SECONDS)


@pytest.mark.parametrize("goes_on", [True, False])
def test_process_that_goes_on_asking_is_not_forgotten_for_invented_ids(goes_on: bool) -> None:
    attendance = Attendance(elector(b"\x50" * 16).identity)
    attendance.heard(seek(LOW), 1.0)
    for number in range(2 * COUNTED_RANKS):
        if goes_on and number == COUNTED_RANKS:
            attendance.heard(seek(LOW), 1.5)
        attendance.heard(seek(b"\xf0" + number.to_bytes(15, "big")), 2.0)
    assert attendance.complete(2.0) is not goes_on, "the one with the lower id is there"


@pytest.mark.parametrize(
    ("listings", "begins"),
    [
        pytest.param([], 5.0, id="they never do"),
        pytest.param([(2.0, False), (2.3, False)], 2.0, id="they do"),
        pytest.param([(tenths / 10, True) for tenths in range(1, 41)], 0.1 + LOWER_SECONDS, id="and a lower process"),
        pytest.param([(0.1, True), (0.5, False)], 0.5, id="and a lower process that has ended, or hosts and was heard"),
    ],
)
def test_with_shared_folders_patience_begins_when_they_show_this_process(
    listings: Sequence[tuple[float, bool]], begins: float
) -> None:
    node, now = elector(HIGH, folder_seconds=5.0), 0.0
    for now, lower in listings:
        run(node, now)
        node.handle(FoldersListed(lower), now)
    assert hosts_at(node, now=now) == pytest.approx(begins + hosts_at(elector(HIGH)))


def test_with_shared_folders_all_must_be_there_and_the_folders_show_this_process() -> None:
    node = elector(LOW, folder_seconds=5.0)
    run(node, 0.05)
    for member in OTHERS:
        node.handle(Heard(seek(member), HERE), 0.05)
    run(node, 0.4)
    node.handle(FoldersListed(), 0.4)
    assert hosts_at(node) == pytest.approx(0.4, abs=0.01)


# --- a host in sight -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "folder", "earliest", "latest"),
    [("sealed", True, 0.0, 0.0), ("sealed", False, 5.0, 20.0), ("open", True, 0.0, 2.0)],
)
def test_a_sealed_session_of_a_folder_delays_the_election_only_if_it_answers(
    state: Any, folder: bool, earliest: float, latest: float
) -> None:
    """Its machine can be gone: then no address refuses, and its object is still there."""
    node, alone = elector(HIGH), hosts_at(elector(HIGH))
    in_folder = Source(interface="", multicast=False, address="dir:/shared", folder=True)
    node.handle(Heard(offer(LOW, state=state), in_folder if folder else HERE), 0.05)
    assert earliest <= hosts_at(node) - alone <= latest + 1e-6


@pytest.mark.parametrize("takes_the_call", [False, True])
def test_only_a_host_that_takes_a_call_delays_the_election_while_it_offers_itself(
    takes_the_call: bool,
) -> None:
    """A firewall can drop every call to it. On a slow machine each process would become one, and call each other."""
    node, alone = elector(HIGH), hosts_at(elector(HIGH))
    now = 0.0
    while node.host is None and now < 10.0:
        node.handle(Heard(offer(LOW), HERE), now)
        for dial in dials(node) if takes_the_call else ():
            node.handle(Connected(dial.conn, "10.0.0.1", "eth0"), now)
        now += 0.25
        run(node, now)
    assert (node.host is None) is takes_the_call
    assert takes_the_call or now <= ADDRESS_SECONDS + alone + 0.5


# --- a process that is asked to lead ---------------------------------------------------------------------------------


def seated(node: Node, *, confirms: bool = True) -> tuple[Alone, int]:
    """A host with the connection of this process, which has a seat there and has confirmed epoch 1."""
    alone = Alone()
    alone.node = node
    conn = alone.join(0.05)
    if confirms:
        alone.hear(conn, 0.05, frames.Confirm(session=SESSION, epoch=1))
    return alone, conn


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
    alone, conn = seated(elector(kind=kind), confirms=confirms)
    alone.hear(conn, 0.05, frames.Lead(session=SESSION, epoch=epoch))
    assert (alone.node.host is not None) is leads


def test_a_host_that_asks_to_be_replaced_and_closes_in_one_breath_is_not_replaced() -> None:
    """Its process was stopped meanwhile, and reads both at once."""
    alone, conn = seated(elector())
    alone.hear(conn, 1.0, frames.Lead(session=SESSION, epoch=1), frames.Closed(session=SESSION, reason="Ctrl-C"))
    alone.node.handle(TimerDue(), 1.1)
    assert alone.node.host is None
    assert alone.joiner.part is None
    assert alone.node.stage() == "seeking"


def test_process_that_leads_does_not_close_for_the_host_that_has_asked_it_to() -> None:
    """That host closes, whatever the ids; its announcements are still on their way."""
    alone, conn = seated(elector(HIGH))
    alone.hear(conn, 0.05, frames.Lead(session=SESSION, epoch=1))
    host = alone.node.host
    assert host is not None
    asking = replace(session_offer(), assigned=True)
    assert asking.host < HIGH
    alone.node.handle(Heard(asking, HERE), 0.1)
    (call,) = alone.dialed()
    alone.answer(call, 0.1, running("open"))
    assert alone.node.host is host
    assert alone.said[-1] == frames.HostSeen(offer=host.offer())


# --- a host ----------------------------------------------------------------------------------------------------------


def test_elected_host_fails_at_its_deadline_and_its_error_stays() -> None:
    node = elector(timeout=2.0)
    run(node, 1.9)
    host = node.host
    assert host is not None
    assert not node.expired(1.9)
    assert node.expired(2.0)
    node.give_up(timeout(node.situation(), NetworkFacts()))
    failure = node.failure
    assert isinstance(failure, DiscoveryTimeoutError)
    node.close("failed")
    assert (node.failure, host.closed) == (failure, True)


def test_elector_ignores_its_own_offers() -> None:
    node = elector(HIGH)
    for now in (0.01, 1.5):
        run(node, now)
        node.handle(Heard(offer(HIGH), HERE), now)
        assert not dials(node)
    assert node.host is not None


def test_addresses_that_come_before_it_hosts_are_those_of_its_session() -> None:
    node = elector()
    node.handle(AddressesChanged((Address("10.1.0.1", "eth1", 24),)), 0.0)
    hosts_at(node)
    assert node.host is not None
    assert node.host.offer().addresses == ("10.1.0.1",)
    node.handle(InterfacesChanged(), 4.0)
    assert not node.finished


# --- two hosts compete -----------------------------------------------------------------------------------------------


def test_only_an_open_session_of_ranks_of_this_job_and_of_somebody_else_competes() -> None:
    ours = Candidacy(elector(LOW).identity)
    assert ours.competes(offer(HIGH))
    other_fields = [{"job": "jbo"}, {"attempt": "2"}, {"state": "sealed"}, {"kind": "agents"}]
    for other in (*(offer(HIGH, **each) for each in other_fields), offer(LOW), seek(HIGH)):
        assert not ours.competes(other)


def test_of_any_two_exactly_one_closes() -> None:
    for one, other in itertools.permutations(OTHERS, 2):
        first, second = Candidacy(elector(one).identity), Candidacy(elector(other).identity)
        assert first.loses_to(offer(other)) is not second.loses_to(offer(one))
        assert first.loses_to(offer(other)) is (other < one)


class Hosting(lone_host.Alone):
    """A process that was elected, and hears of other hosts: its id is higher than LOW, and lower than HIGH."""

    def __init__(self, size: int = 3, **settings: Any) -> None:
        super().__init__(size, rank=None, **settings)
        self.done()

    @property
    def hosts(self) -> bool:
        return self.node.host is not None

    @property
    def waits(self) -> bool:
        """Whether it decides nothing, since the job may run elsewhere."""
        return self.host.conflicts.any_alive

    def dialed(self, now: float, host: bytes, **more: Any) -> list[int]:
        """Hear the OFFER of another host; return the connections that are made then."""
        self.node.handle(Heard(offer(host, **more), HERE), now)
        return [effect.conn for effect in self.done() if isinstance(effect, Dial)]

    def prove(self, conn: int, state: str = "open") -> list[Effect]:
        """The other host proves its session, and says in which state that is; return what is done then."""
        done = self.prove_other(conn, offer(HIGH), now=1.6)
        assert self.hosts, "it has a proof and no word of the state"
        return done + self.answer(conn, running(state), now=1.6)

    def hand_over(self) -> None:
        """Ask the other member of a job of two, whose id is HIGH, to lead."""
        self.join(1, None, member=HIGH, order=b"\1a")
        self.confirm(1)
        assert self.phase() is HandingOver


@pytest.mark.parametrize(("other", "state"), [(LOW, "open"), (HIGH, "open"), (LOW, "sealed")])
def test_a_host_calls_every_other_host_and_closes_for_none_that_has_proved_nothing(other: bytes, state: Any) -> None:
    process = Hosting()
    process.node.handle(Heard(offer(other, state=state), HERE), 1.5)
    assert [(effect.address, effect.port) for effect in dials(process.node)] == [("10.0.0.9", 4001)]
    assert process.hosts
    assert process.host.registrar.held is (state == "sealed"), "the job may run there"
    assert any(each.races_to("conflict") for each in process.node.sightings) is (state == "open")


@pytest.mark.parametrize(
    ("other", "assigned", "says", "closes"),
    [
        pytest.param(LOW, True, "open", True, id="a lower id"),
        pytest.param(HIGH, True, "open", False, id="a higher id"),
        pytest.param(HIGH, False, "open", True, id="a host that was given its rank, with any id"),
        pytest.param(LOW, True, "sealed", False, id="a lower id that is sealed"),
        pytest.param(LOW, True, "running", False, id="a lower id whose job runs"),
    ],
)
def test_a_host_closes_for_an_open_session_that_wins_and_makes_for_it(
    other: bytes, assigned: bool, says: str, closes: bool
) -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5, other, assigned=assigned)
    done = process.prove(conn, says)
    assert process.hosts is not closes
    assert [type(each.message) for each in done if isinstance(each, Multicast)] == [Bye] * closes
    assert (Hangup(conn) in done) is closes, "it would take a connection that lasts for a second rank 0"
    assert [(each.address, each.port) for each in done if isinstance(each, Dial)] == [("10.0.0.9", 4001)] * closes
    races = [each.offer for each in process.node.sightings if each.races_to("join")]
    assert races == [offer(other, assigned=assigned)] * closes


def test_a_host_with_a_secret_calls_others_with_it() -> None:
    process = Hosting(key=JobKey(b"secret", "job"))
    (conn,) = process.dialed(1.5, LOW)
    process.prove(conn)
    assert not process.hosts


def test_from_confirm_on_a_host_closes_for_nobody() -> None:
    process = Hosting(size=2)
    (conn,) = process.dialed(0.9, LOW)
    process.join(1, None)
    assert process.phase() is Confirming
    process.prove(conn)
    assert process.hosts
    assert process.dialed(9.0, LOW) == []


@pytest.mark.parametrize(("other", "closes"), [(HIGH, True), (LOW, False)], ids=["the first", "another one"])
def test_host_that_hands_over_closes_for_the_first_alone_whatever_the_ids(other: bytes, closes: bool) -> None:
    process = Hosting(size=2)
    (conn,) = process.dialed(0.9, other)
    process.hand_over()
    process.prove(conn)
    assert process.hosts is not closes


def test_the_first_that_is_called_again_has_one_race_also_if_a_datagram_says_that_it_is_sealed() -> None:
    process = Hosting(size=2)
    process.hand_over()
    called = set(process.dialed(1.5, HIGH)) | set(process.dialed(1.6, HIGH, state="sealed", joined=3))
    for effect in run(process.node, 1.6 + 2 * ADDRESS_SECONDS, now=1.6):
        called |= {effect.conn} if isinstance(effect, Dial) else set()
        called -= {effect.conn} if isinstance(effect, Hangup) else set()
    assert len(called) == 1


def test_a_higher_id_hears_of_this_host_again_and_again_on_one_connection() -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5, HIGH)
    done = process.prove(conn)
    hello = process.others[conn].hello
    assert hello is not None
    assert (hello.member, hello.purpose) == (process.host.identity.member, "conflict")
    seen = frames.HostSeen(offer=process.host.offer())
    assert process.said[conn] == [seen]
    assert process.hosts
    assert Hangup(conn) not in done
    for later, again in ((1.4, False), (1.5, True), (1.6, False), (2.5, True)):
        process.said[conn].clear()
        assert process.dialed(later + CALL_AGAIN_SECONDS, HIGH) == []
        assert process.said[conn] == [seen] * again


@pytest.mark.parametrize(("session", "closes"), [(lone_host.SESSION, True), (b"a third session.", False)])
def test_a_host_closes_for_one_that_cannot_reach_it(session: bytes, closes: bool) -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5, HIGH)
    process.prove(conn)
    done = process.answer(conn, frames.Unreachable(session=session), now=1.7)
    assert process.hosts is not closes
    assert [each.port for each in done if isinstance(each, Dial)] == [4001] * closes
    assert (Hangup(conn) in done) is closes


@pytest.mark.parametrize(
    ("caller", "purpose", "other", "answered"),
    [
        pytest.param(LOW, "conflict", LOW, True, id="the winner itself"),
        pytest.param(LOW, "join", LOW, False, id="a member with its id"),
        pytest.param(OTHERS[0], "conflict", LOW, False, id="a third host"),
        pytest.param(HIGH, "conflict", HIGH, False, id="a host that loses"),
    ],
)
def test_a_host_tells_the_winner_that_it_cannot_reach_it(
    caller: bytes, purpose: frames.Purpose, other: bytes, answered: bool
) -> None:
    """Where the other host's firewall drops the calls of this one, no other connection leads there."""
    process = Hosting()
    process.call(9, member=caller, purpose=purpose)
    (dial,) = [each for each in process.say(9, frames.HostSeen(offer=offer(other))) if isinstance(each, Dial)]
    assert dial.interface == "eth9", "the scope of a link-local address"
    process.node.handle(Disconnected(dial.conn, "no answer"), 2.5)
    process.done()
    assert process.said[9].count(frames.Unreachable(session=OTHER)) == answered
    assert process.hosts
    assert any("no answer" in reason for reason in process.host.diagnostics.hosts.values())


def test_the_same_host_is_not_called_again_at_once() -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5, HIGH)
    assert process.dialed(1.5 + 2 * CALL_AGAIN_SECONDS, HIGH) == [], "it is being called"
    process.node.handle(Disconnected(conn, "refused"), 1.6)
    assert process.dialed(1.4 + CALL_AGAIN_SECONDS, HIGH) == []
    assert len(process.dialed(1.5 + CALL_AGAIN_SECONDS, HIGH)) == 1


def test_host_that_calls_another_one_twice_in_vain_says_so_where_it_is_heard() -> None:
    process = Hosting()
    for now, says in ((1.5, False), (3.0, True)):
        (conn,) = process.dialed(now, HIGH)
        process.node.handle(Disconnected(conn, "ECONNREFUSED"), now)
        said = Multicast(process.host.identity.seek(OTHER, "10.0.0.9 ECONNREFUSED"), to_peers=True)
        assert (said in process.done()) is says
    assert [each.how for each in process.host.diagnostics.unreached.values()] == ["10.0.0.9 ECONNREFUSED"]


@pytest.mark.parametrize("answers", [b"SSH-2.0-OpenSSH_9.6\r\n", b""], ids=["a foreign server", "nothing"])
def test_who_does_not_speak_the_protocol_at_a_hosts_address_is_hung_up_on(answers: bytes) -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5, HIGH)
    if answers:
        process.node.handle(Connected(conn, "10.0.0.1", "eth0"), 1.6)
        process.node.handle(BytesReceived(conn, answers), 1.6)
    else:
        process.node.handle(TimerDue(), 1.5 + ADDRESS_SECONDS)
    assert Hangup(conn) in process.node.effects()


# --- a session that is sealed, or said to be ------------------------------------------------------------------------


def test_a_host_waits_for_another_one_that_is_sealed_although_it_has_called_it() -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5, HIGH)
    process.prove(conn)
    process.dialed(3.0, HIGH)  # it says once more that it is there
    assert not process.waits
    assert process.dialed(3.1, HIGH, state="sealed", joined=3)
    assert process.waits


def test_a_host_waits_no_longer_for_another_one_that_was_sealed_and_takes_members() -> None:
    process = Hosting()
    (conn,) = process.dialed(1.5, HIGH)
    process.dialed(1.55, HIGH, state="sealed", joined=3)
    process.prove(conn)
    assert not process.waits


def test_the_time_of_a_claim_begins_on_a_host_with_the_datagram() -> None:
    process = Hosting()
    process.dialed(1.5, HIGH)
    process.dialed(1.51, HIGH, state="sealed", joined=3)
    process.node.handle(TimerDue(), 1.52 + SILENT_SECONDS)
    assert not process.waits
