"""A whole member, and a scripted host with which it speaks in bytes: from its first SEEK to GO.

The member's search, its part in the commit and its place after GO are modules of their own: test_search.py,
test_participant.py and test_membership.py. Whole jobs run in tests/lan.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mingle.errors import ConflictError, DiscoveryTimeoutError
from mingle.protocol.effects import Dial, Hangup, Multicast, ProveStore, Write
from mingle.protocol.events import (
    Accepted,
    BytesReceived,
    Connected,
    Disconnected,
    Heard,
    InterfacesChanged,
    StoreProved,
    StoreUnreachable,
    TimerDue,
)
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.explain.observations import NetworkFacts
from mingle.protocol.links.handshake import Call, HandshakeFailed, MemberConversation
from mingle.protocol.links.host_link import SUSPECT_SECONDS
from mingle.protocol.links.prover import greeting
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.protocol.member import Attached, Joining, Searching
from mingle.protocol.membership import RETURN_SECONDS
from mingle.protocol.participant import (
    STORE_RETRY_SECONDS,
    AwaitingConfirm,
    AwaitingGo,
    AwaitingSeal,
    ProvingStore,
    TryingPaths,
)
from mingle.protocol.sessions import RETRY_SECONDS
from mingle.wire import frame_codec, frames
from mingle.wire.datagrams import Offer
from tests.support.scripted_host import (
    ADDRESS,
    ENDPOINTS,
    HERE,
    IDENTITY,
    OTHER,
    SECOND,
    SESSION,
    Alone,
    Member,
    offer,
    running,
)

ELSEWHERE = offer(OTHER, port=4001)
"""The OFFER of another host."""
CONFIRM, GO = frames.Confirm(session=SESSION, epoch=1), frames.Go(session=SESSION, epoch=1)
JOINED = frames.Joined(session=SESSION, epoch=1)


def hear(alone: Alone, message: Offer, now: float) -> list[int]:
    """Hear an OFFER; return the connections that are made then."""
    alone.node.handle(Heard(message, HERE), now)
    return alone.dialed()


def test_the_way_to_its_outcome() -> None:
    alone = Alone()
    conn = alone.seal()
    assert [type(frame) for frame in alone.said] == [frames.Join, frames.Confirmed]
    assert alone.said[1].paths == (frames.Path(host_address=ADDRESS, local_address="10.0.0.2", interface="eth0"),)
    assert alone.step() is ProvingStore
    alone.node.handle(StoreUnreachable(SESSION, 1, "refused"), 2.0)
    assert list(alone.joiner.diagnostics.store_failures.values()) == ["refused"]
    for now, again in ((1.9, False), (2.0, True), (2.1, False)):
        alone.node.handle(TimerDue(), now + STORE_RETRY_SECONDS)
        assert any(isinstance(effect, ProveStore) for effect in alone.done()) is again
    alone.node.handle(StoreProved(SESSION, 1), 3.0)
    alone.done()
    assert alone.said[-1] == frames.Ack(session=SESSION, epoch=1)
    assert not alone.joiner.finished
    alone.hear(conn, 3.0, GO)
    outcome = alone.joiner.outcome
    assert outcome is not None
    assert (outcome.place.rank, outcome.store_port, outcome.interface, outcome.address) == (1, 5000, "eth0", "10.0.0.2")


@pytest.mark.parametrize("seated", [False, True])
def test_member_without_a_seat_asks_again_soon_when_its_interfaces_change(seated: bool) -> None:
    """A host whose job runs speaks only when it is asked."""
    alone, asked = Member(AwaitingConfirm) if seated else Alone(), 0
    for until in (40.0, 40.5):
        asked = 0
        while (due := alone.node.next_timer()) is not None and due < until:
            alone.node.handle(TimerDue(), due)
            asked += sum(isinstance(each, Multicast) and not each.browse for each in alone.done())
        alone.node.handle(InterfacesChanged(), 40.0)
    assert asked == 0 if seated else asked >= 3


# --- the host is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [AwaitingConfirm, TryingPaths, AwaitingSeal, ProvingStore, AwaitingGo, Attached])
def test_member_returns_after_a_loss_once_it_has_confirmed(state: type) -> None:
    member = Member(state)
    session = member.joiner.session
    member.lose(5.0)
    returns = state in (AwaitingSeal, ProvingStore, AwaitingGo, Attached)
    assert (member.joiner.session, member.joiner.returns_to) == (None, session if returns else None)


@pytest.mark.parametrize("late", [False, True], ids=["it breaks once more", "it comes back late"])
def test_a_member_that_has_acknowledged_lacks_go_alone_when_it_comes_back(late: bool) -> None:
    """Its host may have decided GO with its ACK."""
    member = Member(AwaitingGo)
    member.lose(5.0)
    if late:
        member.fail(5.0)
        assert member.step() is Searching
        now = 5.0 + RETURN_SECONDS
        member.node.handle(Heard(offer(), HERE), now)
    else:
        member.come_back(5.1)
        assert member.step() is Joining
        member.lose(5.2)
        now = 5.2 + RETRY_SECONDS
    member.come_back(now, JOINED, GO)
    assert member.step() is Attached


def test_a_seal_is_forgotten_when_another_session_gives_a_seat() -> None:
    """Otherwise an agent that may count there already would count here as well."""
    member = Member(AwaitingGo)
    member.lose(5.0)
    member.fail(5.0)
    member.meet(11.0)
    member.lose(12.0)
    member.node.handle(Heard(offer(), HERE), 13.0)
    member.come_back(13.0, JOINED)
    assert member.step() is AwaitingConfirm


def test_epochs_of_one_session_do_not_bind_another() -> None:
    member = Member(AwaitingConfirm)
    member.says(frames.Confirm(session=SESSION, epoch=7), frames.Void(session=SESSION, epoch=7, reason=""))
    member.lose(2.1)
    member.meet(3.0, frames.Confirm(session=OTHER, epoch=1))
    assert member.step() is AwaitingSeal


@pytest.mark.parametrize(
    ("connects", "reason", "ended"),
    [
        pytest.param(False, "Connection refused (ECONNREFUSED)", True, id="refused"),
        # This machine can have lost its own address.
        pytest.param(False, "Network is unreachable (ENETUNREACH)", False, id="no route"),
        pytest.param(True, "reset", False, id="reset before the proof"),
    ],
)
def test_member_waits_for_its_host_unless_that_refuses_connections(connects: bool, reason: str, ended: bool) -> None:
    """The host may have decided GO with its votes."""
    member = Member(ProvingStore)
    member.lose(3.0)
    (conn,) = member.dialed()
    if connects:
        member.hosts[conn] = member.hosts[member.conn]
        member.node.handle(Connected(conn, "10.0.0.2", "eth0"), 3.01)
        member.node.effects()
    member.node.handle(Disconnected(conn, reason), 3.02)
    assert bool(hear(member, ELSEWHERE, 3.1)) is ended
    if not ended:
        member.come_back(3.02 + RETRY_SECONDS)
        assert member.step() is Joining


def test_the_session_to_return_to_comes_first_and_has_its_time() -> None:
    member = Member(ProvingStore)
    member.lose(2.0)
    assert len(member.dialed()) == 1
    assert hear(member, ELSEWHERE, 2.1) == []
    member.node.handle(TimerDue(), 2.1 + ADDRESS_SECONDS)
    assert member.joiner.returns_to is not None
    for now in (2.0 + RETURN_SECONDS, 2.0 + RETURN_SECONDS + ADDRESS_SECONDS, 9.0):
        member.node.handle(TimerDue(), now)
    assert member.joiner.returns_to is None


def test_member_that_leaves_before_go_sends_no_ready() -> None:
    member = Member(AwaitingGo)
    member.node.close("gave up")
    assert Hangup(member.conn) in member.done()
    assert member.heard() == [frames.Leave(session=SESSION, reason="gave up")]


# --- a host that refuses, or says what it must not -------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", [frames.Refused(reason="full"), frames.Closed(session=SESSION)], ids=["REFUSED", "CLOSED"]
)
def test_member_that_is_sent_away_searches_again_and_is_bound_to_nothing(said: frames.AnyFrame) -> None:
    member = Member(AwaitingGo)
    session = member.joiner.session
    assert session is not None
    member.says(said)
    assert (member.step(), member.joiner.session) == (Searching, None)
    assert (session.confirmed, session.acknowledged) == (False, None)


@pytest.mark.parametrize("reason", ["running", "world size"])
def test_a_host_that_was_only_asked_cannot_refuse(reason: frames.RefusalReason) -> None:
    """Any process can prove a session without a secret: it must not end the vote of a member of another one."""
    member = Member(ProvingStore)
    (conn,) = hear(member, offer(OTHER, state="sealed", port=4001), 2.0)
    member.answer(conn, 2.0, frames.Refused(reason=reason), session=OTHER, port=4001)
    assert (member.joiner.failure, member.step()) == (None, ProvingStore)
    member.node.handle(StoreProved(SESSION, 1), 2.0)
    member.says(GO)
    assert member.step() is Attached


@pytest.mark.parametrize(
    ("said", "comes_to"),
    [
        pytest.param(frames.Joined(session=SESSION), ProvingStore, id="JOINED again"),
        pytest.param(frames.Refused(reason="session"), Searching, id="REFUSED after JOINED"),
        pytest.param(running("open"), ProvingStore, id="RUNNING to a member"),
    ],
)
def test_a_host_that_says_what_makes_no_sense_does_no_harm(said: frames.AnyFrame, comes_to: type) -> None:
    member = Member(ProvingStore)
    member.node.handle(StoreUnreachable(SESSION, 1, "refused"), 1.0)
    member.says(said)
    member.node.handle(TimerDue(), 1.0 + STORE_RETRY_SECONDS)
    assert member.step() is comes_to


def test_what_a_host_says_after_it_has_refused_means_nothing() -> None:
    alone = Alone()
    (conn,) = hear(alone, offer(), 1.0)
    closed = frames.Closed(session=SESSION, reason="two rank 0s", conflict=True)
    alone.answer(conn, 1.0, frames.Refused(reason="session"), closed)
    assert alone.joiner.search.conflict is None


def test_a_member_whose_time_is_up_after_its_hosts_repeats_the_cause_of_the_host() -> None:
    member = Member(AwaitingConfirm)
    blocked = "a firewall drops TCP between node2 and node3"
    member.says(frames.Closed(session=SESSION, reason="1 of 3 joined.", cause=blocked, remedy="open it."))
    error = timeout(member.node.situation(), NetworkFacts())
    assert str(error.cause).endswith(f"(10.0.0.1:4000), pid 0 gave up with this cause: {blocked}")
    assert error.remedy == "as that host says: open it."
    assert "it ended its session: 1 of 3 joined." in error.observation


# --- a host that closes for another one ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "state", "follows"),
    [
        pytest.param(None, AwaitingConfirm, True, id="where ranks are assigned"),
        pytest.param(None, AwaitingSeal, True, id="also once it has confirmed"),
        pytest.param(None, Attached, False, id="not if the job has formed"),
        pytest.param(1, AwaitingConfirm, False, id="not with a given rank"),
    ],
)
def test_a_member_makes_at_once_for_the_host_for_which_its_own_has_closed(
    rank: int | None, state: type, follows: bool
) -> None:
    member = Member(state, rank=rank)
    member.says(frames.Closed(session=SESSION, offer=ELSEWHERE))
    assert member.joiner.returns_to is None
    assert member.step() is (Attached if state is Attached else Searching)
    calls = member.dialed()
    assert len(calls) == follows
    for conn in calls:
        member.answer(conn, 2.0, session=OTHER, port=4001)
        assert (member.step(), member.heard()[-1].rank) == (Joining, None)


def test_a_member_that_does_not_reach_that_host_looks_for_any() -> None:
    member = Member(AwaitingConfirm, rank=None)
    member.says(frames.Closed(session=SESSION, offer=ELSEWHERE))
    assert member.node.expects_host(2.0)
    member.node.handle(TimerDue(), 2.0)
    assert any(isinstance(each, Multicast) and not each.browse for each in member.done()), "it asks meanwhile"
    member.node.handle(TimerDue(), 2.0 + ADDRESS_SECONDS)
    assert not member.node.expects_host(2.1 + ADDRESS_SECONDS)


def test_a_session_that_is_just_asked_whether_it_lives_is_raced_for_again_to_join_it() -> None:
    member = Member(AwaitingConfirm, rank=None)
    assert len(hear(member, replace(ELSEWHERE, state="sealed"), 1.0)) == 1
    member.says(frames.Closed(session=SESSION, offer=ELSEWHERE))
    (conn,) = member.dialed()
    member.answer(conn, 2.0, session=OTHER, port=4001)
    assert member.step() is Joining


def test_a_host_without_this_member_sends_it_nowhere() -> None:
    member = Member(AwaitingConfirm, rank=None)
    (conn,) = hear(member, offer(OTHER, state="sealed", port=4001), 1.0)
    third = offer(b"U" * 16, port=4002)
    member.answer(conn, 1.0, frames.Closed(session=OTHER, offer=third), session=OTHER, port=4001)
    assert (member.dialed(), member.step()) == ([], AwaitingConfirm)


def test_a_member_makes_for_no_session_of_its_own() -> None:
    member = Member(AwaitingConfirm, rank=None)
    member.says(frames.Closed(session=SESSION, offer=replace(ELSEWHERE, host=IDENTITY.member)))
    assert (member.dialed(), member.joiner.sightings.get(OTHER)) == ([], None)


# --- other hosts that it hears of ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 1])
def test_a_member_without_a_rank_tells_its_host_of_others(rank: int | None) -> None:
    member = Member(AwaitingSeal, rank=rank)
    for now, again in ((2.0, True), (2.5, False), (3.0, True)):
        assert hear(member, ELSEWHERE, now) == []
        assert member.heard() == [frames.HostSeen(offer=ELSEWHERE)] * (again and rank is None)


@pytest.mark.parametrize(
    ("state", "answers", "suspected", "kept"),
    [
        pytest.param(AwaitingConfirm, False, True, False, id="it is silent"),
        pytest.param(AwaitingConfirm, True, True, True, id="it answers"),
        pytest.param(AwaitingSeal, False, False, True, id="the member has confirmed"),
    ],
)
def test_member_doubts_a_silent_host_only_when_another_one_offers_itself(
    state: type, answers: bool, suspected: bool, kept: bool
) -> None:
    member = Member(state)
    member.node.handle(TimerDue(), 30.0)
    assert member.step() is state
    hear(member, ELSEWHERE, 30.0)
    assert member.heard() == [frames.Ping()] * suspected
    if answers:
        member.says(frames.Pong(), now=31.0)
    member.node.handle(TimerDue(), 30.0 + SUSPECT_SECONDS)
    assert (member.step() is state) is kept
    assert (Hangup(member.conn) not in member.done()) is kept


def test_a_stranger_under_the_sessions_name_is_no_sign_of_life() -> None:
    """Without a secret any process can offer a further address of a session, and takes the connection there."""
    member = Member(AwaitingConfirm)
    member.node.handle(Heard(offer(addresses=(ADDRESS, "10.0.0.66")), HERE), 30.0)
    member.node.handle(TimerDue(), 30.0)
    (stranger,) = member.dialed()
    member.node.handle(Connected(stranger, "10.0.0.2", "eth0"), 30.0)
    member.node.effects()
    hear(member, ELSEWHERE, 30.1)
    member.node.handle(BytesReceived(stranger, frame_codec.PREFACE[:4]), 31.0)
    member.node.handle(TimerDue(), 30.1 + SUSPECT_SECONDS)
    assert member.step() is Searching


def test_a_session_that_says_it_reopened_is_joined_only_by_proof() -> None:
    alone = Alone()
    (probe,) = hear(alone, offer(state="sealed"), 1.0)
    alone.answer(probe, 1.0, running("sealed"))
    (conn,) = hear(alone, offer(state="open"), 2.0)
    assert alone.blocked()
    alone.answer(conn, 2.0, frames.Joined(session=SESSION))
    assert (alone.blocked(), alone.step()) == (False, AwaitingConfirm)


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [AwaitingConfirm, AwaitingSeal])
@pytest.mark.parametrize("address", [ADDRESS, SECOND])
def test_a_host_that_no_longer_offers_the_address_in_use_must_show_that_it_lives(state: type, address: str) -> None:
    """It has ended the old connection, and its FIN went nowhere: TCP would notice after ten seconds."""
    member = Member(state)
    hear(member, offer(addresses=(address,)), 3.0)
    suspected = address != ADDRESS
    assert member.heard() == [frames.Ping()] * suspected
    member.node.handle(TimerDue(), 3.0 + SUSPECT_SECONDS)
    done = member.done()
    assert (Hangup(member.conn) in done) is suspected
    assert (SECOND in [effect.address for effect in done if isinstance(effect, Dial)]) is suspected
    assert (member.joiner.returns_to is not None) is (suspected and state is AwaitingSeal)


@pytest.mark.parametrize("confirmed", [False, True])
def test_when_the_own_interfaces_change_the_paths_are_proved_again(confirmed: bool) -> None:
    member = Member(AwaitingConfirm)
    member.node.handle(Heard(offer(addresses=(ADDRESS, SECOND)), HERE), 2.0)
    member.node.handle(TimerDue(), 2.1)
    member.fail(2.2, "Network is unreachable")
    if confirmed:
        member.says(CONFIRM, now=2.3)
    member.node.handle(InterfacesChanged(), 3.0)
    # A member that has confirmed has told its host what counts.
    assert len(member.dialed()) == (0 if confirmed else 1)


def test_a_change_of_the_interfaces_that_ends_the_last_attempt_lets_the_member_confirm() -> None:
    member = Member(TryingPaths)
    assert len(member.dialed()) == 1, "it still tries the other address"
    # The process was stopped meanwhile, and the time of that address is over.
    member.node.handle(InterfacesChanged(), ADDRESS_SECONDS + 2.0)
    assert isinstance(member.heard()[-1], frames.Confirmed)


def test_a_path_that_failed_while_the_connection_broke_is_proved_before_it_counts() -> None:
    member, two = Member(AwaitingConfirm), (ADDRESS, SECOND)
    member.lose(3.0)
    (conn,) = hear(member, offer(addresses=two), 3.5)
    member.answer(conn, 3.5, frames.Joined(session=SESSION), addresses=two)
    (other,) = member.dialed()
    member.node.handle(Disconnected(other, "reset"), 4.0)
    member.hear(conn, 4.1, CONFIRM)
    assert member.step() is TryingPaths, "it confirms once each path was tried again"


# --- why it waits, and the end of its time ---------------------------------------------------------------------------


def test_the_deadline() -> None:
    member = Member(AwaitingConfirm, timeout=10.0)
    member.node.handle(TimerDue(), 9.1)
    assert member.heard() == [frames.Ask(what="status")]
    assert not member.node.expired(9.9)
    assert member.node.expired(10.0)
    member.node.give_up(timeout(member.node.situation(), NetworkFacts()))
    assert isinstance(member.joiner.failure, DiscoveryTimeoutError)
    assert member.node.next_timer() is None


@pytest.mark.parametrize(
    ("ended_at", "gone"),
    [
        pytest.param(2.0, True, id="it has gone"),
        pytest.param(9.9, False, id="its time was up as well"),
        pytest.param(None, False, id="it is still there"),
    ],
)
def test_a_host_that_has_gone_is_told_from_one_whose_time_was_up_as_well(ended_at: float | None, gone: bool) -> None:
    alone = Alone(timeout=10.0)
    alone.node.handle(TimerDue(), 0.5)  # it asks before it has heard of the host
    conn, status = alone.join(), frames.Status(joined=2, world_size=3, missing=(2,))
    alone.hear(conn, 1.5, status)
    if ended_at is not None:
        alone.hear(conn, ended_at, frames.Closed(session=SESSION, reason="its user stopped it"))
        alone.node.handle(TimerDue(), ended_at + 0.05)
        assert any("its user stopped it" in told for told in alone.joiner.diagnostics.hosts.values())
    situation = alone.node.situation()
    assert (situation.gone, situation.status) == (gone, status)


def test_the_status_of_an_earlier_session_explains_nothing() -> None:
    member, status = Member(AwaitingConfirm), frames.Status(joined=1, world_size=2, missing=(0,))
    member.says(status)
    member.lose(3.0)
    member.meet(4.0)
    assert member.joiner.status is None
    member.says(status)
    member.lose(6.0)
    member.node.handle(TimerDue(), 6.0 + RETRY_SECONDS)
    member.meet(7.0)
    assert member.joiner.status == status


@pytest.mark.parametrize("another", [False, True])
def test_a_running_job_that_ends_in_a_conflict_explains_that_none_comes(another: bool) -> None:
    alone = Alone(timeout=10.0)
    (conn,) = hear(alone, offer(OTHER, state="sealed"), 1.0)
    alone.answer(conn, 1.0, running(), session=OTHER)
    alone.hear(conn, 3.0, frames.Closed(session=OTHER, reason="two rank 0s", conflict=True))
    assert not alone.joiner.finished, "the next one to come may be the only one"
    alone.node.handle(Disconnected(conn, "the other side closed the connection"), 3.0)
    if another:
        alone.join(4.0)
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert isinstance(alone.joiner.failure, DiscoveryTimeoutError if another else ConflictError)


# --- those that call it ----------------------------------------------------------------------------------------------


def called(member: Member, purpose: frames.Purpose, *said: frames.AnyFrame) -> MemberConversation:
    """Call a member on connection 90; return what the caller has seen of it."""
    member.node.endpoints = ENDPOINTS
    call = Call(job="job", member=b"N" * 16, session=SESSION, purpose=purpose)
    caller = MemberConversation(call, ("10.0.0.2", ENDPOINTS.port))
    member.node.handle(Accepted(90, "10.0.0.3"), 2.0)
    for frame in (None, *said):
        if frame is not None:
            caller.send(frame)
        while data := caller.data_to_send():
            member.node.handle(BytesReceived(90, data), 2.0)
            for effect in member.node.effects():
                if isinstance(effect, Write) and effect.conn == 90:
                    caller.receive_data(effect.data)
    return caller


def test_a_member_without_a_seat_hangs_up_on_callers() -> None:
    alone = Alone()
    alone.node.effects()
    alone.node.handle(Accepted(7, "10.0.0.2"), 5.0)
    assert alone.node.effects() == [Hangup(7)]


@pytest.mark.parametrize(
    ("said", "stays"), [(greeting(b"N" * 16), True), (frames.Ask(what="status"), False)], ids=["GREET", "ASK"]
)
def test_a_member_with_a_seat_answers_a_node_that_proves_the_mesh_and_nothing_else(
    said: frames.AnyFrame, stays: bool
) -> None:
    member = Member(AwaitingConfirm)
    assert called(member, "mesh", said).welcome is not None
    assert (90 in member.node.links) is stays


@pytest.mark.parametrize("purpose", ["join", "probe", "conflict"])
def test_a_member_is_no_host(purpose: frames.Purpose) -> None:
    member = Member(AwaitingConfirm)
    with pytest.raises(HandshakeFailed, match="session"):
        called(member, purpose)
    assert 90 not in member.node.links


def test_callers_of_the_mesh_go_with_the_session_also_before_it_has_given_a_seat() -> None:
    member = Member(AwaitingSeal)
    member.lose(5.0)
    member.come_back(6.0)
    assert member.step() is Joining
    called(member, "mesh")
    assert 90 in member.node.links
    member.lose(6.2)
    assert 90 not in member.node.links, "while this process hosts a session, nobody looks after them"
