"""For which sessions a process races, to join or to probe them, and what becomes of each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mingle.protocol.effects import Dial, Multicast, Notice
from mingle.protocol.events import BytesReceived, Connected, Disconnected, Heard, Source, TimerDue
from mingle.protocol.explain.observations import TOLD_AGAIN_SECONDS
from mingle.protocol.links.handshake import HandshakeFailed, HostConversation
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.protocol.sessions import REMEMBERED_BY_SENDER, REMEMBERED_SESSIONS, RETRY_SECONDS, KnownSession
from mingle.protocol.sightings import RUNNING_NOTICE_SECONDS, SILENT_SECONDS
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer, Seek
from tests.support.scripted_host import ADDRESS, HERE, IDENTITY, OTHER, SESSION, Alone, offer, running

SECOND = "10.0.0.7"
OPEN, SEALED = offer(), offer(state="sealed")
ELSEWHERE = offer(OTHER, port=4001)
"""The OFFER of another session."""


def hear(alone: Alone, message: Offer, now: float = 1.0, source: Source = HERE) -> KnownSession:
    """Hear an OFFER; return its session."""
    alone.node.handle(Heard(message, source), now)
    session = alone.joiner.sightings.get(message.session)
    assert session is not None
    return session


def prove(alone: Alone, session: KnownSession, *said: frames.AnyFrame, now: float = 1.0) -> int:
    """Let the host of a session answer the connection that is just to be made, and say something."""
    (conn,) = alone.dialed()
    alone.answer(conn, now, *said, session=session.name, port=session.offer.port)
    return conn


def fail(alone: Alone, now: float, reason: str = "ECONNREFUSED") -> None:
    """Fail each connection that is just to be made."""
    for conn in alone.dialed():
        alone.node.handle(Disconnected(conn, reason), now)


def questions(alone: Alone, now: float) -> list[Seek]:
    """Ask what is due, and return what asks for a host."""
    alone.node.handle(TimerDue(), now)
    sent = [each.message for each in alone.done() if isinstance(each, Multicast)]
    return [each for each in sent if isinstance(each, Seek)]


def test_sessions_are_raced_for_side_by_side_and_each_once() -> None:
    alone = Alone()
    for message in (OPEN, ELSEWHERE, OPEN):
        hear(alone, message)
    assert [effect.port for effect in alone.done() if isinstance(effect, Dial)] == [4000, 4001]
    assert all(each.races_to("join") for each in alone.joiner.sightings)
    assert list(alone.joiner.diagnostics.hosts.values()) == ["heard"] * 2


@pytest.mark.parametrize("folder", [False, True])
def test_sealed_session_is_only_asked_whether_it_runs(folder: bool) -> None:
    alone = Alone()
    assert hear(alone, SEALED, source=replace(HERE, folder=folder)).races_to("probe")
    assert alone.blocked() is not folder, "an object in a folder outlives its host"


def test_address_that_is_heard_later_is_tried_in_the_same_race() -> None:
    alone = Alone()
    hear(alone, OPEN)
    alone.dialed()
    hear(alone, replace(OPEN, addresses=(ADDRESS, SECOND)), 1.1)
    alone.node.handle(TimerDue(), 1.2)
    assert [effect.address for effect in alone.done() if isinstance(effect, Dial)] == [SECOND]


def test_of_two_sessions_that_prove_themselves_one_is_joined() -> None:
    alone = Alone()
    late = hear(alone, OPEN)
    (conn,) = alone.dialed()
    joined = hear(alone, ELSEWHERE)
    prove(alone, joined)
    alone.answer(conn, 1.0)
    assert [type(frame) for frame in alone.said] == [frames.Join]
    assert alone.joiner.session is joined
    assert late.race is None
    assert conn not in alone.node.links
    assert set(alone.joiner.diagnostics.hosts.values()) == {"proved"}


def test_session_to_return_to_is_kept_in_mind_whatever_else_is_offered() -> None:
    alone = Alone()
    alone.node.handle(Disconnected(alone.seal(), "reset"), 3.0)
    session = alone.joiner.returns_to
    for number in range(2 * REMEMBERED_SESSIONS):
        hear(alone, offer(number.to_bytes(16, "big")), 3.0, replace(HERE, address=f"10.0.1.{number}"))
    assert alone.joiner.sightings.get(SESSION) is session is not None


def test_sender_of_many_sessions_is_followed_to_a_few() -> None:
    alone = Alone()
    for number in range(1, 12):
        alone.node.handle(Heard(offer(bytes([number]) * 16, state="sealed"), HERE), 1.0)
    assert len(alone.joiner.sightings) == REMEMBERED_BY_SENDER


# --- races that are lost ---------------------------------------------------------------------------------------------


def test_race_that_was_lost_is_noted_and_run_again_later() -> None:
    alone = Alone()
    session = hear(alone, OPEN)
    lost_at = 1.0 + ADDRESS_SECONDS
    alone.node.handle(TimerDue(), lost_at)
    hear(alone, OPEN, lost_at + RETRY_SECONDS - 0.01)
    assert session.race is None
    (said,) = alone.joiner.diagnostics.hosts.values()
    assert said.startswith(f"not reached: {ADDRESS} no answer"), "that is more than that it was heard"
    assert hear(alone, OPEN, lost_at + RETRY_SECONDS).races_to("join")


def test_silent_host_of_a_sealed_session_is_asked_again_for_a_while() -> None:
    alone = Alone()
    session, now = hear(alone, SEALED), 1.0
    while session.races_to("probe") and now < 60.0:
        now += ADDRESS_SECONDS
        alone.node.handle(TimerDue(), now)
    assert len(alone.dialed()) > 1
    assert session.race is None
    assert not alone.blocked()


def test_wrong_secret_is_noted_for_the_report() -> None:
    alone = Alone()
    session = hear(alone, OPEN)
    (conn,) = alone.dialed()
    alone.hosts[conn] = HostConversation(
        job="job", attempt="", session=SESSION, addresses=(ADDRESS,), port=4000, key=JobKey(b"secret", "job")
    )
    alone.node.handle(Connected(conn, "10.0.0.2", "eth0"), 1.0)
    with pytest.raises(HandshakeFailed):
        alone.done()
    alone.node.handle(BytesReceived(conn, alone.hosts[conn].data_to_send()), 1.0)
    (failure,) = alone.joiner.diagnostics.secret_failures
    assert failure.startswith(f"{ADDRESS}: secret")
    assert session.race is None


# --- sessions that run without this process --------------------------------------------------------------------------


def probed(alone: Alone, state: str = "running") -> tuple[KnownSession, int]:
    """A sealed session that has proved itself, and says that it is in this state."""
    session = hear(alone, SEALED)
    return session, prove(alone, session, running(state))


def test_no_session_is_joined_while_the_job_runs_elsewhere() -> None:
    alone = Alone()
    probed(alone)
    assert hear(alone, ELSEWHERE, 1.1).race is None
    assert hear(alone, offer(b"U" * 16, state="sealed", port=4002), 1.1).races_to("probe")


def test_people_are_told_that_the_job_runs() -> None:
    alone = Alone()
    probed(alone)
    alone.joiner.search.pause()
    alone.node.handle(TimerDue(), 0.9 + RUNNING_NOTICE_SECONDS)
    alone.done()
    assert alone.node.next_timer() == 1.0 + RUNNING_NOTICE_SECONDS
    alone.node.handle(TimerDue(), 1.0 + RUNNING_NOTICE_SECONDS)
    assert sum(isinstance(effect, Notice) for effect in alone.done()) == 1


@pytest.mark.parametrize("said", [(), (running("sealed"),)], ids=["nothing", "that it is sealed"])
def test_host_that_proves_itself_and_never_says_that_it_runs_is_in_the_way_for_a_while_once(
    said: tuple[frames.Running, ...],
) -> None:
    alone = Alone()
    session = hear(alone, SEALED)
    prove(alone, session, *said)
    assert alone.blocked()
    alone.node.handle(TimerDue(), 1.0 + SILENT_SECONDS)
    assert not alone.blocked()
    assert session.race is None, "its host can be asked again later"
    prove(alone, hear(alone, SEALED, 20.0), now=20.0)
    assert not alone.blocked()


def test_end_of_that_session_frees_the_process() -> None:
    alone = Alone()
    session, conn = probed(alone)
    alone.joiner.search.pause()
    alone.node.handle(Disconnected(conn, "closed"), 2.0)
    assert (session.alive_since, session.ran) == (None, None)
    assert len(questions(alone, 2.0)) == 1
    assert hear(alone, ELSEWHERE, 2.0).races_to("join")


def test_session_that_is_open_again_is_joined_whatever_its_next_offer_says() -> None:
    alone = Alone()
    session, _ = probed(alone, "open")
    assert session.race is None
    assert hear(alone, ELSEWHERE).races_to("join"), "nothing is in the way of another one"
    fail(alone, 1.0)
    assert hear(alone, SEALED, 1.0 + RETRY_SECONDS).races_to("join")
    fail(alone, 1.5)
    assert hear(alone, SEALED, 1.5 + RETRY_SECONDS).races_to("probe"), "its word counts once"


def test_process_that_returns_to_another_session_only_asks_whether_such_a_session_lives() -> None:
    alone = Alone()
    alone.node.handle(Disconnected(alone.seal(), "reset"), 3.0)
    fail(alone, 3.0, "ENETUNREACH")
    other = hear(alone, replace(ELSEWHERE, state="sealed"), 3.0)
    prove(alone, other, running("sealed"), now=3.0)
    assert hear(alone, ELSEWHERE, 3.1).races_to("probe")


@pytest.mark.parametrize("proved", [False, True])
def test_host_that_ran_and_is_gone_is_no_reason_that_the_job_has_not_formed(proved: bool) -> None:
    alone = Alone()
    session = hear(alone, OPEN)
    session.ran = running()
    if proved:
        alone.node.handle(Disconnected(prove(alone, session), "closed"), 2.0)
    else:
        fail(alone, 1.0)
    assert session.ran is None


def test_probe_that_is_under_way_goes_on_when_the_session_is_offered_again() -> None:
    alone = Alone()
    hear(alone, SEALED)
    assert hear(alone, OPEN, 1.1).races_to("probe")


# --- a host that is heard and not reached ----------------------------------------------------------------------------


def test_question_names_a_session_whose_host_was_dialed_twice_in_vain() -> None:
    alone = Alone()
    for now in (1.0, 2.0):
        assert alone.joiner.search.question.unreached is None
        hear(alone, OPEN, now)
        fail(alone, now)
    (question, *_) = questions(alone, 2.5)
    assert (question.unreached, question.how) == (SESSION, f"{ADDRESS} ECONNREFUSED")
    ((pair, each),) = alone.joiner.diagnostics.unreached.items()
    assert pair == (IDENTITY.member, SESSION)
    assert each.host == f"rank 0 on host unknown ({ADDRESS}), pid 0"
    prove(alone, hear(alone, OPEN, 3.0), now=3.0)
    assert alone.joiner.search.question.unreached is None
    assert alone.joiner.diagnostics.unreached == {}


def test_question_names_no_host_that_answers_or_has_gone() -> None:
    alone = Alone()
    for now in (1.0, 2.0, 3.0):
        hear(alone, OPEN, now)
        (conn,) = alone.dialed()
        alone.node.handle(Connected(conn, "10.0.0.2", "eth0"), now)
        alone.node.effects()
        alone.node.handle(Disconnected(conn, "closed"), now)
    assert alone.joiner.search.question.unreached is None
    for now in (4.0, 5.0):
        hear(alone, OPEN, now)
        fail(alone, now)
    assert questions(alone, 10.0)[0].unreached == SESSION
    assert questions(alone, 5.0 + TOLD_AGAIN_SECONDS + 0.1)[0].unreached is None
