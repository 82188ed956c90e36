"""A host alone with scripted callers. Whole jobs run in tests/lan."""

from __future__ import annotations

from typing import Any

import pytest

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
from mingle.protocol.explain.ladder import waiting
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
from mingle.wire.datagrams import Bye, Failed, List, Offer, Seek
from mingle.wire.frames import Path
from tests.support.lone_host import OWN, SESSION, Alone

HERE = Source(interface="eth0", address="10.0.0.9")


def test_the_way_to_its_outcome() -> None:
    alone = Alone()
    alone.join(1, 1)
    assert [type(frame) for frame in alone.said[1]] == [frames.Joined, frames.Confirm]
    assert OpenStore(1, "10.0.0.1") in alone.confirm(1)
    assert alone.host.offer().state == "sealed"
    alone.node.handle(StoreOpened(1, 5000, "token"), 2.0)
    alone.say(1, frames.Ack(session=SESSION, epoch=1), now=3.0)
    assert [type(frame) for frame in alone.said[1][2:]] == [frames.Sealed, frames.Go]
    outcome = alone.host.outcome
    assert outcome is not None
    assert (outcome.place.rank, outcome.store_address, outcome.store_port, outcome.interface) == (
        0,
        "10.0.0.1",
        5000,
        "eth0",
    )


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


def test_member_that_asks_gets_the_roster() -> None:
    alone = Alone()
    alone.form()
    alone.say(1, frames.Ask(what="roster"))
    (roster,) = [frame for frame in alone.said[1] if isinstance(frame, frames.Roster)]
    assert [(seat.rank, seat.hostname, seat.address) for seat in roster.seats] == [
        (0, "h0", "10.0.0.1"),
        (1, "", "10.0.0.2"),
    ]


def asked(alone: Alone, conn: int, *what: str) -> list[frames.AnyFrame]:
    """What a caller is told that asks all this in one piece."""
    alone.said[conn].clear()
    alone.say(conn, *(frames.Ask(what=each) for each in what))  # type: ignore[arg-type]
    return list(alone.said[conn])


@pytest.mark.parametrize("purpose", ["join", "probe", "conflict"])
@pytest.mark.parametrize("what", ["status", "roster"])
def test_caller_without_a_seat_gets_no_status_and_no_roster(purpose: str, what: str) -> None:
    alone = Alone()
    alone.form()
    alone.call(7, purpose=purpose)
    assert asked(alone, 7, what) == []


def test_of_many_questions_in_one_piece_one_of_each_sort_is_answered() -> None:
    """Twenty-six bytes ask for the whole roster."""
    alone = Alone()
    alone.form()
    told = asked(alone, 1, *["roster", "status", "roster", "status"] * 600)
    assert [type(frame) for frame in told] == [frames.Roster, frames.Status]
    assert len(asked(alone, 1, "roster")) == 1, "the answer was taken"


def test_caller_that_does_not_read_gets_no_second_answer() -> None:
    alone = Alone()
    alone.form()
    alone.unsent[1] = 1
    assert len(asked(alone, 1, "roster")) == 1
    assert asked(alone, 1, "roster", "roster") == []
    assert len(asked(alone, 1, "status")) == 1, "another question"
    alone.unsent[1] = 0
    assert len(asked(alone, 1, "roster")) == 1


def test_an_answer_is_built_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, built = Alone(size=3), []
    for owner, name in ((Registrar, "status"), (description, "whos")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, n=name, call=original: (built.append(n), call(*args))[1])
    alone.join(1, 1)
    for _ in range(5):
        assert [frame.missing for frame in asked(alone, 1, "status") if isinstance(frame, frames.Status)] == [(2,)]
    assert built.count("status") == 1
    built.clear()
    for conn in (7, 8, 9):
        alone.call(conn, purpose="probe")
    assert built.count("whos") == 1
    alone.join(2, 2)
    assert [frame.missing for frame in asked(alone, 1, "status") if isinstance(frame, frames.Status)] == [()]


def test_rank_that_left_is_missing_in_running_and_status() -> None:
    """`list`, `watch` and `find` show RUNNING; members get STATUS."""
    alone = Alone(size=4)
    alone.join(1, 1)
    alone.join(2, 2)
    alone.say(1, frames.Leave(session=SESSION, reason="it was stopped"))
    alone.call(7, purpose="probe")
    (running,) = alone.said[7]
    assert (running.joined, running.missing) == ((0, 2), (1, 3))


def test_two_sealed_hosts_do_not_talk_to_each_other_for_ever() -> None:
    alone = Alone()
    alone.form()
    alone.done()
    other = Offer(job="job", session=b"T" * 16, host=b"T" * 16, addresses=("10.0.0.7",), port=1, world_size=2)
    alone.node.handle(Heard(Offer(**{**_fields(other), "state": "sealed"}), HERE), 9.0)
    assert alone.node.next_timer() is None
    alone.node.handle(Heard(other, HERE), 9.0)
    assert alone.node.next_timer() is not None


def _fields(offer: Offer) -> dict[str, Any]:
    return {name: getattr(offer, name) for name in ("job", "session", "host", "addresses", "port", "world_size")}


def test_a_caller_without_the_secret_is_kept_for_the_report() -> None:
    alone = Alone(key=JobKey(b"one", "job"))
    with pytest.raises(HandshakeFailed):
        alone.call(1, key=JobKey(b"two", "job"))
    hello = frames.Prove(proof=b"?" * 32)
    liar = MemberConversation(Call(job="job", member=b"M" * 16, session=SESSION, purpose="join"), ("10.0.0.1", 4000))
    liar.send(hello)
    alone.node.handle(Accepted(2, "10.0.0.3"), 1.0)
    alone.node.handle(BytesReceived(2, liar.data_to_send()), 1.0)
    assert any("secret" in text for text in alone.host.diagnostics.secret_failures)
    assert 2 not in alone.node.links


def test_a_caller_that_only_asks_is_no_rank_with_another_secret() -> None:
    """Such as `mingle-discover find`, which a colleague runs without the job's secret."""
    alone = Alone(key=JobKey(b"one", "job"))
    with pytest.raises(HandshakeFailed):
        alone.call(1, key=JobKey(b"two", "job"), purpose="probe")
    assert not alone.host.diagnostics.secret_failures


def test_a_member_that_was_there_rules_out_that_the_secret_is_wrong_for_all() -> None:
    """A member whose time is up a moment before the host's leaves an empty session, and had proved the secret."""
    alone = Alone(size=3, key=JobKey(b"one", "job"))
    alone.join(1, 1)
    alone.host.diagnostics.secret_signs += 20
    alone.node.handle(Disconnected(1, "its time was up"), 59.9)
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert isinstance(alone.host.failure, DiscoveryTimeoutError)
    assert "missing ranks: 2" in alone.host.failure.observation
    assert "secret" in str(alone.host.failure)


def test_host_notes_go_before_sending_it() -> None:
    """`mingle-run` lets go of its port in between."""
    alone = Alone()
    alone.join(1, 1)
    alone.confirm(1)
    alone.node.handle(StoreOpened(1, 5000, "token"), 2.0)
    alone.done()
    alone.callers[1].send(frames.Ack(session=SESSION, epoch=1))
    alone.node.handle(BytesReceived(1, alone.callers[1].data_to_send()), 3.0)
    effects = alone.done()
    assert isinstance(alone.said[1][-1], frames.Go)
    assert [type(effect) for effect in effects if isinstance(effect, FormedStore | Write)] == [FormedStore, Write]


@pytest.mark.parametrize("message", [List(job="", member=b"M" * 16), Seek(job="job", member=b"M" * 16, world_size=2)])
def test_closed_host_has_no_timer(message: List | Seek) -> None:
    alone = Alone()
    alone.form()
    alone.node.handle(Heard(message, HERE), 20.0)
    assert alone.node.next_timer() is not None
    alone.node.close("done")
    assert alone.node.next_timer() is None, "its thread would spin"


def test_closed_host_says_good_bye_once() -> None:
    alone = Alone()
    alone.form()
    alone.node.close("done")
    effects = alone.done()
    assert alone.said[1][-1] == frames.Closed(session=SESSION, reason="done")
    assert Hangup(1) in effects
    alone.node.close("again")
    alone.node.handle(TimerDue(), 99.0)
    assert alone.done() == []


# --- its interfaces change ------------------------------------------------------------------------------------------

NEW = Address("10.2.0.1", "eth2", 24)


TUNNEL = Address("10.9.0.1", "wg0", 24, last_resort=True)


def test_new_addresses_are_announced_and_counted_at_the_seal() -> None:
    alone = Alone()
    alone.node.handle(TimerDue(), 0.0)
    alone.done()
    alone.node.handle(AddressesChanged((NEW, TUNNEL)), 5.0)
    alone.node.handle(TimerDue(), 5.0)
    said = [each.message for each in alone.done() if isinstance(each, Multicast)]
    assert [each.addresses for each in said if isinstance(each, Offer)] == [("10.2.0.1", "10.9.0.1")]
    registrar = alone.host.registrar
    assert [path.host_address for path in registrar.seats.host.applicant.paths] == ["10.2.0.1", "10.9.0.1"]
    assert registrar.seats[OWN].paths == registrar.seats.host.applicant.paths
    assert (registrar.seats.host.prefix_lengths["10.2.0.1"], registrar.seats.host.last_resort) == (24, {"10.9.0.1"})
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


def test_host_ignores_a_store_of_its_earlier_membership() -> None:
    """A process that was elected can still be waiting for the store of the host that is lost."""
    alone = Alone()
    alone.join(1, 1)
    phase = alone.phase()
    alone.node.handle(StoreUnreachable(b"other", 1, "no answer"), 2.0)
    alone.node.handle(StoreProved(b"other", 1), 2.0)
    assert (alone.phase(), alone.host.failure) == (phase, None)


def test_host_takes_addresses_of_its_sealed_time_when_it_opens_again() -> None:
    alone = Alone()
    alone.join(1, 1)
    alone.confirm(1)
    assert alone.phase() is Sealing
    alone.node.handle(AddressesChanged((TUNNEL,)), 2.0)
    alone.node.handle(AddressesChanged((NEW,)), 3.0)
    alone.node.handle(Disconnected(1, "its address has gone"), 5.0)
    assert alone.phase() is Open
    assert alone.host.endpoints.addresses == (NEW,)
    assert alone.host.offer().addresses == ("10.2.0.1",)
    assert [path.host_address for path in alone.host.registrar.seats.host.applicant.paths] == ["10.2.0.1"]


def test_its_store_listens_on_its_own_address_for_an_advertised_one() -> None:
    alone = Alone(addresses=1, advertised=("203.0.113.9",))
    alone.call(1)
    paths = (Path(host_address="203.0.113.9", local_address="192.168.0.2", interface="eth0"),)
    alone.say(1, frames.Join(world_size=2, rank=1, node="n1", paths=paths))
    assert OpenStore(1, "10.0.0.1") in alone.confirm(1, paths)
    alone.node.handle(StoreOpened(1, 5000, "token"), 2.0)
    alone.say(1, frames.Ack(session=SESSION, epoch=1), now=3.0)
    (sealed,) = [frame for frame in alone.said[1] if isinstance(frame, frames.Sealed)]
    assert sealed.store_address == "203.0.113.9"
    outcome = alone.host.outcome
    assert outcome is not None
    assert (outcome.store_address, outcome.store_port, outcome.interface) == ("10.0.0.1", 5000, "eth0")
    assert outcome.roster_digest == sealed.roster_digest == roster_digest(alone.host.registrar.roster())


def test_good_bye_names_the_job_and_the_attempt() -> None:
    alone = Alone(attempt="2")
    alone.node.close("done")
    assert Multicast(Bye(job="job", attempt="2", session=SESSION)) in alone.done()


# --- datagrams ------------------------------------------------------------------------------------------------------

OTHER = b"T" * 16


BY_UNICAST = Source(interface="eth0", address="10.0.0.9", multicast=False)


def other_offer(**more: Any) -> Offer:
    fields = {"job": "job", "session": OTHER, "host": OTHER, "addresses": ("10.0.0.9",), "port": 1, "world_size": 2}
    return Offer(**{**fields, **more})


def due(alone: Alone, *, before: float = 59.0) -> list[Effect]:
    """What it sends at its next timer."""
    at = alone.node.next_timer()
    if at is None or at >= before:
        return []
    alone.node.handle(TimerDue(), at)
    return [effect for effect in alone.done() if isinstance(effect, Answer | Multicast)]


def formed() -> Alone:
    """A host whose job of two has formed, and that has said what it had to say."""
    alone = Alone()
    alone.form()
    alone.done()
    return alone


def test_host_offers_at_once_and_again_when_it_takes_members_again() -> None:
    alone = Alone()
    assert due(alone) == [Multicast(alone.host.offer())]
    alone.join(1, 1)
    alone.confirm(1)
    alone.done()
    assert due(alone, before=3.0) == [], "sealed it speaks only when asked"
    alone.node.handle(Disconnected(1, "reset"), 3.0)
    assert alone.node.next_timer() == 3.0
    alone.done()
    assert Multicast(alone.host.offer()) in due(alone)


def test_a_question_by_unicast_is_answered_to_the_asker_also_when_sealed() -> None:
    alone = formed()
    alone.node.handle(Heard(Seek(job="job", member=b"M" * 16, world_size=2, rank=1, hostname="h1"), BY_UNICAST), 4.0)
    assert alone.done() == [Answer(BY_UNICAST, alone.host.offer())]
    assert list(alone.host.diagnostics.seekers) == [b"M" * 16]


@pytest.mark.parametrize(
    ("message", "browse"),
    [(Seek(job="job", member=b"M" * 16, world_size=2), False), (List(job="jbo", member=b"M" * 16), True)],
)
def test_a_question_by_multicast_is_answered_where_it_was_asked(message: Seek | List, browse: bool) -> None:
    alone = formed()
    alone.node.handle(Heard(message, HERE), 4.0)
    assert due(alone) == [Multicast(alone.host.offer(), browse=browse)]


def test_padded_questions_to_the_group_are_answered_by_unicast_as_well_but_not_each_of_a_flood() -> None:
    alone = formed()
    question = Seek(job="job", member=b"M" * 16, world_size=2, padding=bytes(900))
    for now, answers in ((4.0, LATE_ANSWERS_AT_ONCE), (5.0, LATE_ANSWERS_PER_SECOND)):
        for _ in range(1000):
            alone.node.handle(Heard(question, HERE), now)
        answered = [effect for effect in alone.done() if isinstance(effect, Answer)]
        assert answered == [Answer(HERE, alone.host.offer())] * int(answers)
        assert due(alone) == [Multicast(alone.host.offer())]


def test_own_earlier_questions_are_no_other_seekers() -> None:
    alone = formed()
    alone.node.handle(Heard(alone.host.identity.seek(), HERE), 4.0)
    assert alone.host.diagnostics.seekers == {}
    alone.done()
    due(alone)
    alone.node.handle(Heard(alone.host.identity.list(), HERE), 9.0)
    assert alone.host.diagnostics.seekers == {}
    assert alone.node.next_timer() is None


def test_only_an_offer_of_another_session_of_this_job_is_looked_into() -> None:
    alone = Alone()
    for message in (
        alone.host.offer(),
        other_offer(job="jbo"),
        other_offer(attempt="2"),
        Bye(job="job", session=OTHER),
    ):
        alone.node.handle(Heard(message, HERE), 1.0)
        assert not any(isinstance(effect, Dial) for effect in alone.done())
    alone.node.handle(Heard(other_offer(), HERE), 1.0)
    assert any(isinstance(effect, Dial) for effect in alone.done())
    assert "jbo" in alone.host.diagnostics.other_jobs
    assert alone.host.diagnostics.other_attempts == {"2": "10.0.0.9"}


def test_host_decides_nothing_while_it_probes_a_sealed_session() -> None:
    alone = Alone()
    alone.join(1, 1)
    alone.confirm(1)
    alone.node.handle(StoreOpened(1, 5000, "token"), 2.0)
    alone.done()
    alone.node.handle(Heard(other_offer(state="sealed"), HERE), 2.5)
    (conn,) = [effect.conn for effect in alone.done() if isinstance(effect, Dial)]
    alone.say(1, frames.Ack(session=SESSION, epoch=1), now=2.5)
    assert alone.phase() is Acknowledging
    alone.node.handle(Disconnected(conn, "refused"), 2.6)
    assert alone.phase() is Committed


@pytest.mark.parametrize(("secured", "counted"), [(False, 1), (True, 0)])
def test_a_signature_is_a_hint_for_a_host_without_a_secret(secured: bool, counted: int) -> None:
    alone = Alone(key=JobKey(b"one", "job") if secured else None)
    source = Source(interface="eth0", signed=True)
    alone.node.handle(Heard(Seek(job="job", member=b"M" * 16, world_size=2), source), 1.0)
    assert alone.host.diagnostics.signed_without_secret == counted


@pytest.mark.parametrize("finished", [False, True])
def test_host_asks_on_the_browse_group_only_until_the_job_has_formed(finished: bool) -> None:
    alone = formed() if finished else Alone()
    asked: list[Effect] = []
    while (at := alone.node.next_timer()) is not None and at < 55.0:
        alone.node.handle(TimerDue(), at)
        asked += alone.done()
    assert (Multicast(alone.host.identity.list(), browse=True) in asked) is not finished


# --- other hosts, where ranks are assigned --------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 0])
def test_elected_host_calls_a_host_that_a_member_reports_and_one_with_a_given_rank_does_not(rank: int | None) -> None:
    alone = Alone(size=3, rank=rank)
    alone.join(1, None if rank is None else 1)
    done = alone.say(1, *[frames.HostSeen(offer=other_offer())] * 3, frames.HostSeen(offer=other_offer(host=OWN)))
    assert [(effect.address, effect.interface) for effect in done if isinstance(effect, Dial)] == (
        [("10.0.0.9", "eth1")] if rank is None else []
    )


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


@pytest.mark.parametrize("purpose", ["probe", "conflict", "mesh"])
def test_only_a_caller_that_has_called_to_join_gets_a_seat(purpose: str) -> None:
    alone = Alone()
    alone.call(1, purpose=purpose)
    path = Path(host_address="10.0.0.1", local_address="10.0.0.2", interface="eth0")
    alone.say(1, frames.Join(world_size=2, rank=1, node="n1", paths=(path,)))
    assert len(alone.host.registrar.seats) == 1


@pytest.mark.parametrize(
    ("purpose", "greeted"), [("probe", False), ("conflict", False), ("join", False), ("mesh", True)]
)
def test_only_a_caller_of_the_mesh_is_greeted(purpose: str, greeted: bool) -> None:
    alone = Alone()
    alone.call(1, purpose=purpose)
    alone.say(1, *[greeting((1).to_bytes(16, "big"))] * 3)
    assert alone.said[1].count(greeting(OWN)) == greeted, "once until it has been read"


def test_member_that_reports_another_host_keeps_its_seat_and_one_that_hosts_loses_it() -> None:
    alone = Alone(3, rank=None)
    alone.join(1, None)
    alone.say(1, frames.HostSeen(offer=other_offer()))
    assert len(alone.host.registrar.seats) > 1
    alone.say(1, frames.HostSeen(offer=other_offer(host=(1).to_bytes(16, "big"))))
    assert len(alone.host.registrar.seats) == 1


def test_a_host_is_answered_on_the_connections_that_it_has_made_itself() -> None:
    alone = Alone(size=5)
    alone.join(1, 1)
    alone.call(2, purpose="conflict")
    alone.call(3, purpose="conflict")
    frame = frames.Unreachable(session=OTHER)
    for member in (1, 2):
        alone.host.answer_host(member.to_bytes(16, "big"), frame)
    alone.done()
    assert [conn for conn, said in alone.said.items() if frame in said] == [2]


def test_the_members_of_a_session_that_ends_for_another_one_are_told_which() -> None:
    alone = Alone(size=3)
    alone.join(1, 1)
    alone.host.close("it closes for another host", winner=other_offer())
    alone.done()
    (said,) = [each for each in alone.said[1] if isinstance(each, frames.Closed)]
    assert (said.offer, said.conflict, said.regather) == (other_offer(), False, False)


def test_a_host_that_has_ended_its_session_hangs_up_on_callers() -> None:
    alone = Alone()
    alone.node.close("the test is over")
    alone.node.effects()
    alone.node.handle(Accepted(7, "10.0.0.2"), 5.0)
    assert alone.node.effects() == [Hangup(7)]


def test_seek_that_cannot_reach_the_host_is_the_cause_until_the_member_joins() -> None:
    alone = Alone(3)
    alone.join(1, 1)
    seek = Seek(
        job="job", member=b"c" * 16, world_size=3, rank=2, hostname="h2", pid=8, unreached=SESSION, how="10.0.0.1 x"
    )
    alone.node.handle(Heard(seek, HERE), 10.0)
    cause = waiting(alone.node.situation(), NetworkFacts(), 11.0)
    assert cause is not None
    said = "rank 2 on host h2 (10.0.0.9), pid 8 hears host h0, pid 1 and does not reach it over TCP (10.0.0.1 x)"
    assert cause[0].startswith(said)
    alone.host.diagnostics.joined(seek.member, frames.ProcessInfo())
    assert waiting(alone.node.situation(), NetworkFacts(), 11.0) is None


def test_question_of_a_seated_member_does_not_make_it_an_outsider() -> None:
    alone = Alone(3)
    alone.join(1, 1)
    (member,) = (each for each in alone.host.registrar.seats if each != OWN)
    alone.node.handle(Heard(Seek(job="job", member=member, world_size=3, rank=1), HERE), 10.0)
    alone.node.handle(Heard(List(job="job", member=member, rank=1, hostname="h1"), HERE), 10.0)
    assert alone.host.diagnostics.seekers == {}


def test_missing_rank_that_says_that_it_failed_is_the_cause_and_a_seated_one_is_not() -> None:
    alone = Alone(3)
    alone.join(1, 1)
    (seated,) = (each for each in alone.host.registrar.seats if each != OWN)
    for member, rank in ((seated, 1), (b"c" * 16, 2)):
        said = Failed(job="job", member=member, rank=rank, hostname=f"h{rank}", pid=8, reason="no room")
        alone.node.handle(Heard(said, HERE), 10.0)
    cause = waiting(alone.node.situation(), NetworkFacts(), 11.0)
    assert cause is not None
    assert cause[0] == "rank 2 on host h2 (10.0.0.9), pid 8 has failed: no room"
