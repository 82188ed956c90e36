"""For which sessions a process races, to join or to probe them, and what becomes of each."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec.structs import replace

from mingle.protocol.effects import Dial, Hangup, Multicast, Write
from mingle.protocol.events import BytesReceived, Connected, Disconnected, Source
from mingle.protocol.explain.observations import TOLD_AGAIN_SECONDS, Diagnostics
from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.protocol.machine import Context
from mingle.protocol.search import Search
from mingle.protocol.sessions import (
    REMEMBERED_BY_SENDER,
    REMEMBERED_SESSIONS,
    RETRY_SECONDS,
    KnownSession,
    SessionPolicy,
)
from mingle.protocol.sightings import RUNNING_NOTICE_SECONDS, SILENT_SECONDS, Sightings
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer, Seek
from tests.support.scripted_host import ADDRESS, HERE, IDENTITY, OTHER, SESSION, offer, running

SECOND = "10.0.0.7"


class Searcher:
    """The member that searches: it notes what it is told."""

    def __init__(self) -> None:
        self.session: KnownSession | None = None
        self.returns_to: KnownSession | None = None
        self.told: list[tuple[Any, ...]] = []

    def join(self, session: KnownSession, now: float) -> None:
        self.told.append(("join", session.name))
        self.session = session

    def host_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        self.told.append(("said", session.name, frame))

    def host_lost(self, session: KnownSession, reason: str, now: float) -> None:
        self.told.append(("lost", session.name, reason))
        self.session = None

    def unreached(self, session: KnownSession, now: float, *, refused: bool) -> None:
        self.told.append(("unreached", session.name, refused))

    def names(self) -> list[str]:
        return [each[0] for each in self.told]


class Searching:
    """A process that searches, and hosts that say what the test says."""

    def __init__(self, key: JobKey | None = None) -> None:
        self.searcher = Searcher()
        self.diagnostics = Diagnostics()
        context = Context(key=key, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.links, self.effects = context.links, context.links.effects
        self.sightings = Sightings(SessionPolicy(), IDENTITY, context)
        self.search = Search(
            IDENTITY,
            context,
            0.0,
            diagnostics=self.diagnostics,
            sightings=self.sightings,
            searcher=self.searcher,
        )
        self.sightings.serve(self.search)
        self.hosts: dict[int, HostConversation] = {}

    def hear(self, message: Offer, now: float = 1.0, source: Source = HERE) -> KnownSession:
        """Hear an OFFER, as a member does that is in no session."""
        session = self.search.heard(message, source, now, seated=False)
        assert session is not None
        self.search.offered(session, now)
        return session

    def asked(self, until: float) -> list[float]:
        """Let time pass, and return when a host was asked for."""
        times = []
        while (due := self.search.next_timer()) is not None and due < until:
            self.effects.clear()
            self.search.handle_timer(due)
            times += [due for each in self.effects if isinstance(each, Multicast) and isinstance(each.message, Seek)]
        self.effects.clear()
        return times

    def dials(self) -> list[Dial]:
        """The connections that are to be made since the last time."""
        dials = [each for each in self.effects if isinstance(each, Dial)]
        self.effects.clear()
        return dials

    def prove(self, session: KnownSession, *said: frames.AnyFrame, now: float = 1.0) -> int:
        """Let the host of a session answer the connection that is just to be made, and say something."""
        (dial,) = self.dials()
        host = HostConversation(
            job="job", attempt="", session=session.name, addresses=session.offer.addresses, port=dial.port
        )
        self.hosts[dial.conn] = host
        self.links.handle(Connected(dial.conn, "10.0.0.2", "eth0"), now)
        for each in self.links.take_effects():
            if isinstance(each, Write) and each.conn == dial.conn:
                host.receive_data(each.data)
        self.links.handle(BytesReceived(dial.conn, host.data_to_send()), now)
        for frame in said:
            self.say(dial.conn, frame, now)
        return dial.conn

    def say(self, conn: int, frame: frames.AnyFrame, now: float = 1.0) -> None:
        self.hosts[conn].send(frame)
        self.links.handle(BytesReceived(conn, self.hosts[conn].data_to_send()), now)

    def fail(self, reason: str = "ECONNREFUSED", now: float = 1.0) -> None:
        """Fail each connection that is just to be made."""
        for dial in self.dials():
            self.links.handle(Disconnected(dial.conn, reason), now)


def test_sessions_are_raced_for_side_by_side_and_each_once() -> None:
    searching = Searching()
    for each in (offer(), offer(OTHER, port=4001), offer()):
        searching.hear(each)
    assert [dial.port for dial in searching.dials()] == [4000, 4001]
    assert all(each.races_to("join") for each in searching.sightings)
    assert list(searching.diagnostics.hosts.values()) == ["heard"] * 2


@pytest.mark.parametrize("folder", [False, True])
def test_sealed_session_is_only_asked_whether_it_runs(folder: bool) -> None:
    searching = Searching()
    session = searching.hear(offer(state="sealed"), source=replace(HERE, folder=folder))
    assert session.races_to("probe")
    assert searching.sightings.may_run() is not folder, "an object in a folder outlives its host"


def test_sealed_session_that_has_the_confirmation_of_this_process_is_joined() -> None:
    searching = Searching()
    session = searching.search.heard(offer(state="sealed"), HERE, 1.0, seated=False)
    assert session is not None
    session.confirmed = True
    searching.search.offered(session, 1.0)
    assert session.races_to("join")


def test_address_that_is_heard_later_is_tried_in_the_same_race() -> None:
    searching = Searching()
    session = searching.hear(offer())
    searching.dials()
    searching.hear(replace(offer(), addresses=(ADDRESS, SECOND)), 1.1)
    searching.sightings.handle_timer(1.2)
    assert [dial.address for dial in searching.dials()] == [SECOND]
    assert session.races_to("join")


def test_session_that_proves_itself_is_joined() -> None:
    searching = Searching()
    session = searching.hear(offer())
    searching.prove(session, frames.Joined(session=SESSION))
    assert searching.searcher.told == [("join", SESSION), ("said", SESSION, frames.Joined(session=SESSION))]
    assert list(searching.diagnostics.proved) == [session.host_name]
    assert searching.diagnostics.hosts[session.host_name] == "proved"


def test_process_with_a_seat_races_for_no_other_session_that_has_one_free() -> None:
    searching = Searching()
    searching.prove(searching.hear(offer()))
    assert searching.hear(offer(OTHER, port=4001)).race is None


def test_two_races_that_are_both_won_lead_to_one_session() -> None:
    searching = Searching()
    sessions = [searching.hear(offer(), 1.0)]
    (dial,) = searching.dials()
    sessions.append(searching.hear(offer(OTHER, port=4001), 1.0))
    searching.prove(sessions[1])
    searching.effects.append(dial)
    searching.prove(sessions[0])
    assert searching.searcher.told == [("join", OTHER)]
    assert sessions[0].race is None
    assert Hangup(dial.conn) in searching.effects


def test_member_that_returns_to_a_session_joins_no_other_one_and_keeps_it_in_mind() -> None:
    searching = Searching()
    session = searching.hear(offer())
    searching.fail()
    searching.searcher.returns_to = session
    assert searching.hear(offer(OTHER, port=4001), 2.0).race is None
    for number in range(2 * REMEMBERED_SESSIONS):
        searching.hear(offer(number.to_bytes(16, "big")), 2.0, replace(HERE, address=f"10.0.1.{number}"))
    assert searching.sightings.get(SESSION) is session
    assert searching.hear(offer(), 2.0).races_to("join")


def test_sender_of_many_sessions_is_followed_to_a_few() -> None:
    searching = Searching()
    sessions = [searching.search.heard(offer(bytes([n]) * 16), HERE, 1.0, seated=False) for n in range(1, 12)]
    assert all(sessions)
    assert len(searching.sightings) == REMEMBERED_BY_SENDER


# --- races that are lost ---------------------------------------------------------------------------------------------


def test_race_that_was_lost_is_noted_and_run_again_later() -> None:
    searching = Searching()
    session = searching.hear(offer())
    searching.dials()
    lost_at = 1.0 + ADDRESS_SECONDS
    searching.sightings.handle_timer(lost_at)
    assert searching.searcher.told == [("unreached", SESSION, False)]
    assert "not reached: 10.0.0.1 no answer" in searching.diagnostics.hosts[session.host_name]
    searching.hear(offer(), lost_at + RETRY_SECONDS - 0.01)
    assert session.race is None
    assert "not reached" in searching.diagnostics.hosts[session.host_name], "that is more than that it was heard"
    searching.hear(offer(), lost_at + RETRY_SECONDS)
    assert session.races_to("join")


@pytest.mark.parametrize(("reason", "refused"), [("ECONNREFUSED", True), ("ENETUNREACH", False)])
def test_only_a_refusal_shows_that_the_process_has_ended(reason: str, refused: bool) -> None:
    searching = Searching()
    searching.hear(offer())
    searching.fail(reason)
    assert searching.searcher.told == [("unreached", SESSION, refused)]
    assert not searching.diagnostics.secret_failures


def test_silent_host_of_a_sealed_session_is_asked_again_for_a_while() -> None:
    searching = Searching()
    session = searching.hear(offer(state="sealed"))
    now = 1.0
    while session.races_to("probe") and now < 60.0:
        now += ADDRESS_SECONDS
        searching.sightings.handle_timer(now)
    assert session.race is None
    assert session.alive_since is None
    assert searching.searcher.names().count("unreached") > 1


def test_wrong_secret_is_noted_for_the_report() -> None:
    searching = Searching(JobKey(b"secret", "job"))
    session = searching.hear(offer())
    (dial,) = searching.dials()
    host = HostConversation(job="job", attempt="", session=SESSION, addresses=(ADDRESS,), port=4000)
    searching.links.handle(Connected(dial.conn, "10.0.0.2", "eth0"), 1.0)
    (write,) = [each for each in searching.links.take_effects() if isinstance(each, Write)]
    host.receive_data(write.data)
    searching.links.handle(BytesReceived(dial.conn, host.data_to_send()), 1.0)
    (failure,) = searching.diagnostics.secret_failures
    assert failure.startswith(f"{ADDRESS}: secret")
    assert session.race is None


# --- sessions that run without this process --------------------------------------------------------------------------


def probed(searching: Searching, state: str = "running") -> tuple[KnownSession, int]:
    """A sealed session that has proved itself, and says that it is in this state."""
    session = searching.hear(offer(state="sealed"))
    return session, searching.prove(session, running(state))


def test_no_session_is_joined_while_the_job_runs_elsewhere() -> None:
    searching = Searching()
    probed(searching)
    assert searching.hear(offer(OTHER, port=4001), 1.1).race is None
    assert searching.hear(offer(b"U" * 16, state="sealed", port=4002), 1.1).races_to("probe")


@pytest.mark.parametrize(("state", "seconds"), [("running", RUNNING_NOTICE_SECONDS), ("sealed", SILENT_SECONDS)])
def test_such_a_session_is_looked_at_in_time(state: str, seconds: float) -> None:
    """People are told that it runs, and one that says nothing after its seal is left."""
    searching = Searching()
    probed(searching, state)
    searching.search.pause()
    searching.asked(1.0 + seconds)
    timers = [searching.search.next_timer(), searching.sightings.next_timer()]
    assert 1.0 + seconds in timers


def test_end_of_that_session_frees_the_process() -> None:
    searching = Searching()
    session, conn = probed(searching)
    searching.search.pause()
    searching.links.handle(Disconnected(conn, "closed"), 2.0)
    assert (session.alive_since, session.ran) == (None, None)
    assert searching.search.next_timer() == 2.0, "it asks for a host again"
    assert searching.hear(offer(OTHER, port=4001), 2.0).races_to("join")


def test_session_that_is_open_again_is_joined_whatever_its_next_offer_says() -> None:
    searching = Searching()
    session, _ = probed(searching, "open")
    assert session.race is None
    assert searching.hear(offer(OTHER, port=4001), 1.0).races_to("join"), "nothing is in the way of another one"
    searching.fail(now=1.0)
    searching.hear(offer(state="sealed"), 1.0 + RETRY_SECONDS)
    assert session.races_to("join")
    searching.fail(now=1.5)
    searching.hear(offer(state="sealed"), 1.5 + RETRY_SECONDS)
    assert session.races_to("probe"), "its word counts once"


def test_offer_of_a_session_that_was_sealed_when_it_was_asked_leads_to_a_race_to_join() -> None:
    searching = Searching()
    session, conn = probed(searching, "sealed")
    race = session.race
    searching.hear(offer(state="sealed"), 2.0)
    assert session.race is race
    searching.hear(offer(), 2.0)
    assert Hangup(conn) in searching.effects
    assert session.races_to("join")
    assert searching.sightings.runs()
    searching.effects[:] = [each for each in searching.effects if isinstance(each, Dial)]
    searching.prove(session, now=2.0)
    assert not searching.sightings.runs(), "its answer to JOIN shows whether it runs"


def test_process_that_returns_to_another_session_only_asks_whether_such_a_session_lives() -> None:
    searching = Searching()
    session, _ = probed(searching, "sealed")
    searching.searcher.returns_to = KnownSession(offer(OTHER), [])
    searching.hear(offer(), 2.0)
    assert session.races_to("probe")


@pytest.mark.parametrize("proved", [False, True])
def test_host_that_ran_and_is_gone_is_no_reason_that_the_job_has_not_formed(proved: bool) -> None:
    searching = Searching()
    session = searching.hear(offer())
    session.ran = running()
    if proved:
        searching.links.handle(Disconnected(searching.prove(session), "reset"), 2.0)
    else:
        searching.fail()
    assert session.ran is None


def test_probe_that_is_under_way_goes_on_when_the_session_is_offered_again() -> None:
    searching = Searching()
    session = searching.hear(offer(state="sealed"))
    searching.hear(offer(), 1.1)
    assert session.races_to("probe")


@pytest.mark.parametrize("joins", [False, True])
def test_conflict_of_such_a_session_counts_if_none_is_joined(joins: bool) -> None:
    searching = Searching()
    _, conn = probed(searching)
    searching.say(conn, frames.Closed(session=SESSION, reason="its user stopped it"))
    assert searching.search.conflict is None
    searching.say(conn, frames.Closed(session=SESSION, reason="two rank 0s", conflict=True))
    assert "two rank 0s" in str(searching.search.conflict)
    searching.links.handle(Disconnected(conn, "closed"), 2.0)
    searching.effects.clear()
    if joins:
        searching.prove(searching.hear(offer(OTHER, port=4001), 2.0), now=2.0)
    assert (searching.search.conflict is None) is joins


def test_host_of_the_own_session_is_heard_and_lost() -> None:
    searching = Searching()
    conn = searching.prove(searching.hear(offer()))
    searching.say(conn, running("open"))
    searching.links.handle(Disconnected(conn, "reset"), 2.0)
    assert searching.searcher.told[1:] == [("said", SESSION, running("open")), ("lost", SESSION, "reset")]


# --- another host that is named, and other networks ------------------------------------------------------------------


def test_session_that_is_named_is_joined_in_place_of_a_probe_and_once() -> None:
    searching = Searching()
    session = searching.hear(offer(state="sealed"))
    (probe,) = searching.dials()
    searching.search.make_for(offer(), "eth0", 1.1)
    assert Hangup(probe.conn) in searching.effects
    assert session.races_to("join")
    race = session.race
    searching.search.make_for(offer(), "eth0", 1.2)
    assert session.race is race


def test_change_of_the_interfaces_puts_paths_in_doubt_and_hurries_the_questions() -> None:
    searching = Searching()
    session = searching.hear(offer())
    searching.fail()
    asked = searching.asked(40.0)
    assert asked[-1] - asked[-2] > 1.0
    assert not session.paths_stale
    searching.search.rewired(40.0)
    assert session.paths_stale
    assert len(searching.asked(40.5)) > 1


def test_process_that_has_a_host_asks_no_more_until_it_needs_another() -> None:
    searching = Searching()
    assert searching.asked(0.9)[0] == searching.search.asked_at
    session = searching.hear(offer())
    searching.prove(session)
    assert searching.asked(5.0) == []
    searching.search.resume(5.0)
    assert searching.search.asked_at is None
    assert searching.asked(6.0)[0] == searching.search.asked_at == 5.0


def questions(searching: Searching, now: float) -> list[Seek]:
    searching.effects.clear()
    searching.search.handle_timer(now)
    sent = [each.message for each in searching.effects if isinstance(each, Multicast)]
    searching.effects.clear()
    return [each for each in sent if isinstance(each, Seek)]


def test_question_names_a_session_whose_host_was_dialed_twice_in_vain() -> None:
    searching = Searching()
    for now in (1.0, 2.0):
        assert searching.search.question.unreached is None
        searching.hear(offer(), now)
        searching.fail(now=now)
    (question, *_) = questions(searching, 2.5)
    assert (question.unreached, question.how) == (SESSION, f"{ADDRESS} ECONNREFUSED")
    ((pair, each),) = searching.diagnostics.unreached.items()
    assert pair == (IDENTITY.member, SESSION)
    assert each.host == f"rank 0 on host unknown ({ADDRESS}), pid 0"
    searching.prove(searching.hear(offer(), 3.0), now=3.0)
    assert searching.search.question.unreached is None
    assert searching.diagnostics.unreached == {}


def test_question_names_no_host_that_answers_or_has_gone() -> None:
    searching = Searching()
    for now in (1.0, 2.0, 3.0):
        searching.hear(offer(), now)
        (dial,) = searching.dials()
        searching.links.handle(Connected(dial.conn, "10.0.0.2", "eth0"), now)
        searching.links.handle(Disconnected(dial.conn, "closed"), now)
        searching.effects.clear()
    assert searching.search.question.unreached is None
    for now in (4.0, 5.0):
        searching.hear(offer(), now)
        searching.fail(now=now)
    assert questions(searching, 10.0)[0].unreached == SESSION
    assert questions(searching, 5.0 + TOLD_AGAIN_SECONDS + 0.1)[0].unreached is None
