"""A host alone with scripted callers. Whole jobs run in tests/lan."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from mingle.errors import ConfigurationError, DiscoveryTimeoutError
from mingle.protocol.effects import Answer, Dial, Effect, FormedStore, Hangup, Multicast, OpenStore, Write
from mingle.protocol.events import (
    Accepted,
    Address,
    AddressesChanged,
    BytesReceived,
    Disconnected,
    Heard,
    Source,
    StoreFailed,
    StoreOpened,
    StoreProved,
    StoreUnreachable,
    TimerDue,
)
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.explain.observations import NetworkFacts
from mingle.protocol.links.handshake import Call, HandshakeFailed, MemberConversation
from mingle.protocol.links.prover import greeting
from mingle.protocol.machine import roster_digest
from mingle.protocol.pacing import LATE_ANSWERS_AT_ONCE, LATE_ANSWERS_PER_SECOND
from mingle.protocol.session import description
from mingle.protocol.session.phases import Acknowledging, Committed, Open, Sealing, State
from mingle.protocol.session.registrar import Registrar
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, Failed, List, Offer, Seek
from mingle.wire.frames import Path
from tests.support.lone_host import OWN, SESSION, Alone

HERE = Source(interface="eth0", address="10.0.0.9")
BY_UNICAST = Source(interface="eth0", address="10.0.0.9", multicast=False)
OTHER = b"T" * 16
SEEK = Seek(job="job", member=b"M" * 16, world_size=2, rank=1, hostname="h1")
OFFER = Offer(job="job", session=OTHER, host=OTHER, addresses=("10.0.0.9",), port=1, world_size=2)


def member(number: int) -> bytes:
    return number.to_bytes(16, "big")


def hear(alone: Alone, message: Datagram, now: float = 1.0, source: Source = HERE) -> list[Effect]:
    alone.node.handle(Heard(message, source), now)
    return alone.done()


def due(alone: Alone, *, before: float = 59.0) -> list[Effect]:
    """What it sends at its next timer."""
    at = alone.node.next_timer()
    if at is None or at >= before:
        return []
    alone.node.handle(TimerDue(), at)
    return [effect for effect in alone.done() if isinstance(effect, Answer | Multicast)]


def formed(**settings: Any) -> Alone:
    """A host whose job of two has formed, and that has said what it had to say."""
    alone = Alone(**settings)
    alone.come_to(Committed)
    alone.done()
    return alone


def test_the_way_to_its_outcome() -> None:
    alone = Alone()
    alone.join(1, 1)
    assert [type(frame) for frame in alone.said[1]] == [frames.Joined, frames.Confirm]
    assert OpenStore(1, "10.0.0.1") in alone.confirm(1)
    assert alone.host.offer().state == "sealed"
    alone.node.handle(StoreOpened(1, 5000, "token"), 2.0)
    alone.done()
    effects = alone.say(1, frames.Ack(session=SESSION, epoch=1), now=3.0)
    assert [type(frame) for frame in alone.said[1][2:]] == [frames.Sealed, frames.Go]
    # mingle-run lets go of its port before GO is sent.
    assert [type(effect) for effect in effects if isinstance(effect, FormedStore | Write)] == [FormedStore, Write]
    outcome = alone.host.outcome
    assert outcome is not None
    assert (outcome.place.rank, outcome.store_address, outcome.store_port) == (0, "10.0.0.1", 5000)
    assert outcome.interface == "eth0"


def test_only_the_store_of_the_present_seal_fails_the_job() -> None:
    alone, taken = Alone(), ConfigurationError.explain("taken", cause="c", remedy="r")
    alone.join(1, 1)
    alone.confirm(1)
    alone.say(1, frames.Leave(session=SESSION, reason="a second thought"))
    alone.node.handle(StoreFailed(1, taken), 2.0)
    alone.join(2, 1)
    alone.confirm(2)
    alone.node.handle(StoreFailed(1, taken), 2.0)
    assert (alone.host.registrar.state.epoch, alone.phase(), alone.host.failure) == (2, Sealing, None)
    alone.node.handle(StoreFailed(2, taken), 2.0)
    assert alone.host.failure is taken
    assert Multicast(alone.host.identity.failed(taken), to_peers=True) in alone.done()


def test_host_ignores_a_store_of_its_earlier_membership() -> None:
    """A process that was elected can still be waiting for the store of the host that is lost."""
    alone = Alone()
    alone.join(1, 1)
    phase = alone.phase()
    alone.node.handle(StoreUnreachable(b"other", 1, "no answer"), 2.0)
    alone.node.handle(StoreProved(b"other", 1), 2.0)
    assert (alone.phase(), alone.host.failure) == (phase, None)


@pytest.mark.parametrize("question", [List(job="", member=b"M" * 16), replace(SEEK, attempt="2")], ids=["LIST", "SEEK"])
def test_closed_host_says_good_bye_once_and_has_nothing_more_to_do(question: List | Seek) -> None:
    alone = formed(attempt="2")
    hear(alone, question, 20.0)
    assert alone.node.next_timer() is not None
    alone.node.close("done")
    effects = alone.done()
    assert alone.said[1][-1] == frames.Closed(session=SESSION, reason="done")
    assert Hangup(1) in effects
    assert Multicast(Bye(job="job", attempt="2", session=SESSION)) in effects
    assert alone.node.next_timer() is None, "its thread would spin"
    alone.node.close("again")
    alone.node.handle(TimerDue(), 99.0)
    assert alone.done() == []
    alone.node.handle(Accepted(7, "10.0.0.2"), 99.0)
    assert alone.done() == [Hangup(7)]


def test_the_members_of_a_session_that_ends_for_another_one_are_told_which() -> None:
    alone = Alone(size=3)
    alone.join(1, 1)
    alone.host.close("it closes for another host", winner=OFFER)
    alone.done()
    (said,) = [each for each in alone.said[1] if isinstance(each, frames.Closed)]
    assert (said.offer, said.conflict, said.regather) == (OFFER, False, False)


# --- what callers are told -------------------------------------------------------------------------------------------


def asked(alone: Alone, conn: int, *what: str) -> list[Any]:
    """What a caller is told that asks all this in one piece."""
    alone.said[conn].clear()
    alone.say(conn, *(frames.Ask(what=each) for each in what))  # type: ignore[arg-type]
    return list(alone.said[conn])


def test_member_that_asks_gets_the_roster() -> None:
    (roster,) = asked(formed(), 1, "roster")
    seats = [(seat.rank, seat.hostname, seat.address) for seat in roster.seats]
    assert seats == [(0, "h0", "10.0.0.1"), (1, "", "10.0.0.2")]


@pytest.mark.parametrize("purpose", ["join", "probe", "conflict"])
@pytest.mark.parametrize("what", ["status", "roster"])
def test_caller_without_a_seat_gets_no_status_and_no_roster(purpose: str, what: str) -> None:
    alone = formed()
    alone.call(7, purpose=purpose)
    assert asked(alone, 7, what) == []


def test_of_many_questions_one_of_each_sort_is_answered_before_the_answer_is_taken() -> None:
    """Twenty-six bytes ask for the whole roster."""
    alone = formed()
    alone.unsent[1] = 1
    assert [type(frame) for frame in asked(alone, 1, *["roster"] * 1200)] == [frames.Roster]
    told = asked(alone, 1, *["roster", "status"] * 600)
    assert [type(frame) for frame in told] == [frames.Status], "another question"
    alone.unsent[1] = 0
    assert [type(frame) for frame in asked(alone, 1, "roster")] == [frames.Roster]


def test_an_answer_is_built_once_per_change() -> None:
    alone = Alone(size=3)
    alone.join(1, 1)
    with mock.patch.object(Registrar, "status", autospec=True, side_effect=Registrar.status) as status:
        for _ in range(5):
            assert [frame.missing for frame in asked(alone, 1, "status")] == [(2,)]
        assert status.call_count == 1
    with mock.patch.object(description, "whos", side_effect=description.whos) as whos:
        for conn in (7, 8, 9):
            alone.call(conn, purpose="probe")
        assert whos.call_count == 1
    alone.join(2, 2)
    assert [frame.missing for frame in asked(alone, 1, "status") if isinstance(frame, frames.Status)] == [()]


def test_rank_that_left_is_missing_for_those_that_only_ask() -> None:
    """`list`, `watch` and `find` show RUNNING."""
    alone = Alone(size=4)
    alone.join(1, 1)
    alone.join(2, 2)
    alone.say(1, frames.Leave(session=SESSION, reason="it was stopped"))
    running = alone.running(2.0)
    assert (running.joined, running.missing) == ((0, 2), (1, 3))


@pytest.mark.parametrize("purpose", ["probe", "conflict", "join", "mesh"])
def test_only_a_caller_that_has_called_for_it_gets_a_seat_or_is_greeted(purpose: str) -> None:
    alone = Alone()
    alone.call(1, purpose=purpose)
    alone.say(1, *[greeting(member(1))] * 3)
    assert alone.said[1].count(greeting(OWN)) == (purpose == "mesh"), "once until it has been read"
    alone.say(1, frames.Join(world_size=2, rank=1, node="n1"))
    assert (member(1) in alone.host.registrar.seats) is (purpose == "join")


@pytest.mark.parametrize(("purpose", "counts"), [("join", True), ("probe", False)])
def test_a_caller_without_the_secret_is_kept_for_the_report_unless_it_only_asks(purpose: str, counts: bool) -> None:
    """Such as `mingle-discover find`, which a colleague runs without the job's secret."""
    alone = Alone(key=JobKey(b"one", "job"))
    with pytest.raises(HandshakeFailed):
        alone.call(1, key=JobKey(b"two", "job"), purpose=purpose)
    assert bool(alone.host.diagnostics.secret_failures) is counts


def test_a_caller_that_proves_nothing_is_kept_for_the_report_and_hung_up_on() -> None:
    alone = Alone(key=JobKey(b"one", "job"))
    liar = MemberConversation(Call(job="job", member=b"M" * 16, session=SESSION, purpose="join"), ("10.0.0.1", 4000))
    liar.send(frames.Prove(proof=b"?" * 32))
    alone.node.handle(Accepted(2, "10.0.0.3"), 1.0)
    alone.node.handle(BytesReceived(2, liar.data_to_send()), 1.0)
    assert any("secret" in text for text in alone.host.diagnostics.secret_failures)
    assert 2 not in alone.node.links


def test_a_member_that_was_there_rules_out_that_the_secret_is_wrong_for_all() -> None:
    """A member whose time is up a moment before the host's leaves an empty session, and had proved the secret."""
    alone = Alone(size=3, key=JobKey(b"one", "job"))
    alone.join(1, 1)
    alone.host.diagnostics.secret_signs += 20
    alone.node.handle(Disconnected(1, "its time was up"), 59.9)
    assert alone.node.situation().proved
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert isinstance(alone.host.failure, DiscoveryTimeoutError)


def test_a_host_that_gives_up_tells_the_first_line_of_its_error_and_the_cause() -> None:
    alone = Alone(size=3)
    alone.join(1, 1)
    error = timeout(alone.node.situation(), NetworkFacts())
    alone.node.give_up(error)
    alone.done()
    farewell = alone.said[1][-1]
    assert isinstance(farewell, frames.Closed)
    assert farewell.reason == error.observation.partition("\n")[0]
    assert (farewell.cause, farewell.remedy) == (error.cause, error.remedy)


# --- its interfaces change ------------------------------------------------------------------------------------------

NEW = Address("10.2.0.1", "eth2", 24)
TUNNEL = Address("10.9.0.1", "wg0", 24, last_resort=True)


def test_new_addresses_are_announced_and_counted_at_the_seal() -> None:
    alone = Alone()
    due(alone)
    alone.node.handle(AddressesChanged((NEW, TUNNEL)), 5.0)
    alone.node.handle(TimerDue(), 5.0)
    assert Multicast(alone.host.offer()) in alone.done()
    assert alone.host.offer().addresses == ("10.2.0.1", "10.9.0.1")
    seats = alone.host.registrar.seats
    assert seats.own.paths == seats.host.applicant.paths
    assert seats.host.addresses == ["10.2.0.1", "10.9.0.1"]
    assert (seats.host.prefix_lengths["10.2.0.1"], seats.host.last_resort) == (24, {"10.9.0.1"})
    with pytest.raises(HandshakeFailed, match="not one of the host's own addresses"):
        alone.call(1)  # dials an old one


def test_the_same_addresses_are_no_news() -> None:
    alone = Alone()
    alone.node.handle(TimerDue(), 9.0)
    alone.done()
    alone.node.handle(AddressesChanged(alone.host.endpoints.addresses), 9.1)
    alone.node.handle(TimerDue(), 9.2)
    assert alone.done() == []


@pytest.mark.parametrize("phase", [Sealing, Acknowledging, Committed])
def test_addresses_stay_once_a_store_may_stand_on_one(phase: type[State]) -> None:
    alone = Alone()
    before = alone.host.endpoints.addresses
    alone.come_to(phase)
    alone.node.handle(AddressesChanged((NEW,)), 5.0)
    assert alone.host.endpoints.addresses == before
    assert alone.host.offer().addresses == ("10.0.0.1", "10.1.0.1")


def test_host_takes_addresses_of_its_sealed_time_when_it_opens_again() -> None:
    alone = Alone()
    alone.come_to(Sealing)
    alone.node.handle(AddressesChanged((TUNNEL,)), 2.0)
    alone.node.handle(AddressesChanged((NEW,)), 3.0)
    alone.node.handle(Disconnected(1, "its address has gone"), 5.0)
    assert alone.phase() is Open
    assert alone.host.endpoints.addresses == (NEW,)
    assert alone.host.offer().addresses == ("10.2.0.1",)
    assert alone.host.registrar.seats.host.addresses == ["10.2.0.1"]


def test_its_store_listens_on_its_own_address_for_an_advertised_one() -> None:
    alone = Alone(addresses=1, advertised=("203.0.113.9",))
    alone.call(1)
    paths = (Path(host_address="203.0.113.9", local_address="192.168.0.2", interface="eth0"),)
    alone.say(1, frames.Join(world_size=2, rank=1, node="n1", paths=paths))
    assert OpenStore(1, "10.0.0.1") in alone.confirm(1, paths)
    alone.come_to(Committed)
    (sealed,) = [frame for frame in alone.said[1] if isinstance(frame, frames.Sealed)]
    assert sealed.store_address == "203.0.113.9"
    outcome = alone.host.outcome
    assert outcome is not None
    assert (outcome.store_address, outcome.store_port, outcome.interface) == ("10.0.0.1", 5000, "eth0")
    assert outcome.roster_digest == sealed.roster_digest == roster_digest(alone.host.registrar.roster())


# --- datagrams ------------------------------------------------------------------------------------------------------


def test_host_offers_at_once_and_again_when_it_takes_members_again() -> None:
    alone = Alone()
    assert due(alone) == [Multicast(alone.host.offer())]
    alone.come_to(Sealing)
    alone.done()
    assert due(alone, before=3.0) == [], "sealed it speaks only when asked"
    alone.node.handle(Disconnected(1, "reset"), 3.0)
    assert alone.node.next_timer() == 3.0
    alone.done()
    assert Multicast(alone.host.offer()) in due(alone)


def test_a_question_by_unicast_is_answered_to_the_asker_also_when_sealed() -> None:
    alone = formed()
    assert hear(alone, SEEK, 4.0, BY_UNICAST) == [Answer(BY_UNICAST, alone.host.offer())]
    assert list(alone.host.diagnostics.seekers) == [SEEK.member]


@pytest.mark.parametrize(("message", "browse"), [(SEEK, False), (List(job="jbo", member=b"M" * 16), True)])
def test_a_question_by_multicast_is_answered_where_it_was_asked(message: Seek | List, browse: bool) -> None:
    alone = formed()
    hear(alone, message, 4.0)
    assert due(alone) == [Multicast(alone.host.offer(), browse=browse)]


def test_padded_questions_to_the_group_are_answered_by_unicast_as_well_but_not_each_of_a_flood() -> None:
    alone = formed()
    for now, answers in ((4.0, LATE_ANSWERS_AT_ONCE), (5.0, LATE_ANSWERS_PER_SECOND)):
        heard = [effect for _ in range(1000) for effect in hear(alone, replace(SEEK, padding=bytes(900)), now)]
        assert heard == [Answer(HERE, alone.host.offer())] * int(answers)
        assert due(alone) == [Multicast(alone.host.offer())]


@pytest.mark.parametrize("finished", [False, True])
def test_host_asks_on_the_browse_group_only_until_the_job_has_formed(finished: bool) -> None:
    alone, asked = formed() if finished else Alone(), list[Effect]()
    while (at := alone.node.next_timer()) is not None and at < 55.0:
        alone.node.handle(TimerDue(), at)
        asked += alone.done()
    assert (Multicast(alone.host.identity.list(), browse=True) in asked) is not finished


@pytest.mark.parametrize(("secured", "counted"), [(False, 1), (True, 0)])
def test_a_signature_is_a_hint_for_a_host_without_a_secret(secured: bool, counted: int) -> None:
    alone = Alone(key=JobKey(b"one", "job") if secured else None)
    hear(alone, SEEK, source=Source(interface="eth0", signed=True))
    assert alone.host.diagnostics.signed_without_secret == counted


def test_question_of_the_host_itself_or_of_a_seated_member_is_not_one_of_an_outsider() -> None:
    alone = formed()
    hear(alone, alone.host.identity.seek(), 4.0)
    hear(alone, replace(SEEK, member=member(1)), 4.0)
    hear(alone, List(job="job", member=member(1), rank=1, hostname="h1"), 4.0)
    while due(alone):
        pass
    hear(alone, alone.host.identity.list(), 9.0)
    assert alone.host.diagnostics.seekers == {}
    assert alone.node.next_timer() is None


def test_process_that_can_not_reach_the_host_is_known_until_it_joins() -> None:
    alone = Alone(3)
    hear(alone, replace(SEEK, member=member(2), world_size=3, unreached=SESSION, how="10.0.0.1 x"), 10.0)
    ((pair, how),) = ((pair, each.how) for pair, each in alone.host.diagnostics.unreached.items())
    assert (pair, how) == ((member(2), OWN), "10.0.0.1 x")
    alone.join(2, 2, now=11.0)
    assert alone.host.diagnostics.unreached == {}


def test_missing_rank_that_says_that_it_failed_is_known_and_a_seated_one_has_not_failed() -> None:
    alone = Alone(3)
    alone.join(1, 1)
    for number in (1, 2):
        hear(alone, Failed(job="job", member=member(number), rank=number, hostname="h", pid=8, reason="no room"))
    assert [gone.rank for gone in alone.host.diagnostics.failed.values()] == [2]


# --- other hosts ----------------------------------------------------------------------------------------------------


def test_only_an_offer_of_another_session_of_this_job_is_looked_into() -> None:
    alone = Alone()
    others = (replace(OFFER, job="jbo"), replace(OFFER, attempt="2"), Bye(job="job", session=OTHER))
    for message in (alone.host.offer(), *others):
        assert not any(isinstance(effect, Dial) for effect in hear(alone, message))
    assert any(isinstance(effect, Dial) for effect in hear(alone, OFFER))
    assert "jbo" in alone.host.diagnostics.other_jobs
    assert alone.host.diagnostics.other_attempts == {"2": "10.0.0.9"}


def test_two_sealed_hosts_do_not_talk_to_each_other_for_ever() -> None:
    alone = formed()
    hear(alone, replace(OFFER, state="sealed"), 9.0)
    assert alone.node.next_timer() is None
    hear(alone, OFFER, 9.0)
    assert alone.node.next_timer() is not None


def test_host_decides_nothing_while_it_probes_a_sealed_session() -> None:
    alone = Alone()
    alone.come_to(Acknowledging)
    alone.done()
    (dial,) = [each for each in hear(alone, replace(OFFER, state="sealed"), 2.5) if isinstance(each, Dial)]
    alone.say(1, frames.Ack(session=SESSION, epoch=1), now=2.5)
    assert alone.phase() is Acknowledging
    alone.node.handle(Disconnected(dial.conn, "refused"), 2.6)
    assert alone.phase() is Committed


@pytest.mark.parametrize("rank", [None, 0])
def test_elected_host_calls_a_host_that_a_member_reports_and_one_with_a_given_rank_does_not(rank: int | None) -> None:
    alone = Alone(size=3, rank=rank)
    alone.join(1, None if rank is None else 1)
    done = alone.say(1, *[frames.HostSeen(offer=OFFER)] * 3, frames.HostSeen(offer=replace(OFFER, host=OWN)))
    dialed = [(effect.address, effect.interface) for effect in done if isinstance(effect, Dial)]
    assert dialed == ([("10.0.0.9", "eth1")] if rank is None else [])
    assert member(1) in alone.host.registrar.seats
    alone.say(1, frames.HostSeen(offer=replace(OFFER, host=member(1))))
    assert member(1) not in alone.host.registrar.seats, "it hosts a session of its own"


@pytest.mark.parametrize(
    ("ours", "theirs", "conflict"), [(0, 0, True), (0, None, True), (None, 0, True), (None, None, False)]
)
def test_host_that_calls_is_a_conflict_until_it_is_gone_unless_the_two_can_agree(
    ours: int | None, theirs: int | None, conflict: bool
) -> None:
    alone = Alone(rank=ours)
    alone.call(9, purpose="conflict", rank=theirs)
    assert alone.host.conflicts.any_alive is conflict
    alone.node.handle(Disconnected(9, "reset"), 2.0)
    assert not alone.host.conflicts.any_alive
