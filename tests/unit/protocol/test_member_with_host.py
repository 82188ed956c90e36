"""A whole member, and a scripted host with which it speaks in bytes: from its first SEEK to the end after GO.

The steps that need no answer of a host are in test_member.py. Whole jobs run in tests/lan.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from mingle.errors import ConflictError, DiscoveryTimeoutError
from mingle.protocol.effects import Hangup, Multicast, ProveStore, Write
from mingle.protocol.events import (
    Accepted,
    Address,
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
from mingle.protocol.links.handshake import Call, HandshakeFailed, HostConversation, MemberConversation
from mingle.protocol.links.host_link import SUSPECT_SECONDS
from mingle.protocol.links.prover import greeting
from mingle.protocol.machine import Endpoints
from mingle.protocol.member import Attached, Joining, Searching
from mingle.protocol.membership import READY_HEARD_SECONDS
from mingle.protocol.pacing import SEEK_INTERVAL_MAX_SECONDS
from mingle.protocol.participant import STORE_RETRY_SECONDS, AwaitingConfirm, AwaitingSeal, ProvingStore, TryingPaths
from mingle.protocol.sessions import RETRY_SECONDS
from mingle.wire import frame_codec, frames
from tests.support.scripted_host import ADDRESS, HERE, OTHER, SESSION, Alone, offer, running


def test_member_asks_less_and_less() -> None:
    alone = Alone()
    asked = []
    now = 0.0
    while now < 20.0:
        now = alone.node.next_timer() or 0.0
        alone.node.handle(TimerDue(), now)
        asked += [now for effect in alone.done() if isinstance(effect, Multicast) and not effect.browse]
    gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert gaps[0] < 0.1
    assert SEEK_INTERVAL_MAX_SECONDS * 0.75 <= gaps[-1] <= SEEK_INTERVAL_MAX_SECONDS * 1.25


def asked(alone: Alone, until: float) -> list[float]:
    """Let a joiner's timers run until this time; return when it asked for its host."""
    times = []
    while (due := alone.node.next_timer()) is not None and due < until:
        alone.node.handle(TimerDue(), due)
        times += [due for effect in alone.done() if isinstance(effect, Multicast) and not effect.browse]
    return times


def test_member_asks_again_soon_when_its_interfaces_change() -> None:
    """A host whose job runs speaks only when it is asked."""
    alone = Alone()
    asked(alone, 40.0)
    alone.node.handle(InterfacesChanged(), 40.0)
    assert len(asked(alone, 40.5)) >= 3


def test_a_rank_with_a_seat_asks_for_no_host_when_its_interfaces_change() -> None:
    alone = Alone()
    alone.join()
    alone.node.handle(InterfacesChanged(), 40.0)
    assert asked(alone, 45.0) == []


def test_a_rank_that_was_given_its_number_is_sent_to_no_other_host() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Closed(session=SESSION, offer=offer(OTHER)))
    assert alone.joiner.sightings.get(OTHER) is None
    assert alone.joiner.session is None


def test_the_way_to_its_outcome() -> None:
    alone = Alone()
    conn = alone.seal()
    assert [type(frame) for frame in alone.said] == [frames.Join, frames.Confirmed]
    assert alone.said[1].paths == (frames.Path(host_address=ADDRESS, local_address="10.0.0.2", interface="eth0"),)
    assert alone.step() is ProvingStore
    alone.node.handle(StoreProved(SESSION, 1), 3.0)
    alone.done()
    assert alone.said[-1] == frames.Ack(session=SESSION, epoch=1)
    assert not alone.joiner.finished
    alone.hear(conn, 3.0, frames.Go(session=SESSION, epoch=1))
    outcome = alone.joiner.outcome
    assert outcome is not None
    assert (outcome.place.rank, outcome.store_port, outcome.interface, outcome.address) == (1, 5000, "eth0", "10.0.0.2")


def test_a_store_that_is_not_reached_is_tried_again_until_the_epoch_is_void() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.node.handle(StoreUnreachable(SESSION, 1, "refused"), 3.0)
    alone.done()
    alone.node.handle(TimerDue(), 2.9 + STORE_RETRY_SECONDS)
    assert not any(isinstance(effect, ProveStore) for effect in alone.done())
    alone.node.handle(TimerDue(), 3.0 + STORE_RETRY_SECONDS)
    assert any(isinstance(effect, ProveStore) for effect in alone.done())
    alone.hear(conn, 4.0, frames.Void(session=SESSION, epoch=1, reason="test"))
    alone.node.handle(StoreProved(SESSION, 1), 3.0)
    alone.done()
    assert alone.step() is AwaitingConfirm
    assert not any(isinstance(frame, frames.Ack) for frame in alone.said)


def test_epochs_of_one_session_do_not_bind_another() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 1.0, frames.Confirm(session=SESSION, epoch=7), frames.Void(session=SESSION, epoch=7, reason=""))
    alone.node.handle(Disconnected(conn, "reset"), 1.1)
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 2.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 2.0, session=OTHER, port=4001)
    alone.hear(conn, 2.0, frames.Joined(session=OTHER), frames.Confirm(session=OTHER, epoch=1))
    assert alone.step() is AwaitingSeal


def test_a_host_that_refuses_connections_is_not_waited_for() -> None:
    alone = Alone()
    alone.node.handle(Disconnected(alone.seal(), "reset"), 3.0)
    (conn,) = alone.dialed()
    alone.node.handle(Disconnected(conn, "Connection refused (ECONNREFUSED)"), 3.01)
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 3.1)
    assert len(alone.dialed()) == 1


def test_a_host_to_which_no_route_leads_may_live() -> None:
    """This machine can have lost its own address: nobody has refused anything."""
    alone = Alone()
    alone.node.handle(Disconnected(alone.seal(), "its address has gone"), 3.0)
    (conn,) = alone.dialed()
    alone.node.handle(Disconnected(conn, "Network is unreachable (ENETUNREACH)"), 3.01)
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 3.1)
    assert alone.dialed() == [], "its host may have decided GO with its votes"
    alone.node.handle(TimerDue(), 3.01 + RETRY_SECONDS)
    (conn,) = alone.dialed()
    alone.answer(conn, 3.5)
    assert alone.step() is Joining


def test_a_host_whose_connection_is_reset_before_the_proof_may_live() -> None:
    alone = Alone()
    alone.node.handle(Disconnected(alone.seal(), "reset"), 3.0)
    (conn,) = alone.dialed()
    alone.node.handle(Connected(conn, "10.0.0.2", "eth0"), 3.01)
    alone.node.handle(Disconnected(conn, "reset"), 3.02)
    alone.node.effects()
    alone.node.handle(TimerDue(), 3.02 + RETRY_SECONDS)
    (conn,) = alone.dialed()
    alone.answer(conn, 3.5)
    assert alone.step() is Joining


def test_a_connection_that_breaks_on_the_way_back_loses_no_seal() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.node.handle(StoreProved(SESSION, 1), 3.0)
    alone.done()
    alone.node.handle(Disconnected(conn, "reset"), 4.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 4.1)
    assert alone.step() is Joining
    alone.node.handle(Disconnected(conn, "reset"), 4.2)
    alone.node.handle(TimerDue(), 4.2 + RETRY_SECONDS)
    (conn,) = alone.dialed()
    alone.answer(conn, 4.5, frames.Joined(session=SESSION, epoch=1), frames.Go(session=SESSION, epoch=1))
    assert alone.step() is Attached, "its host may have decided GO with its ACK"


def test_a_path_that_failed_while_the_connection_broke_is_proved_before_it_counts() -> None:
    alone = Alone()
    two = msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.9.9"))
    alone.node.handle(Disconnected(alone.join(2.0), "reset"), 3.0)
    alone.node.handle(Heard(two, HERE), 3.5)
    (conn,) = alone.dialed()
    alone.answer(conn, 3.5, addresses=two.addresses)
    alone.hear(conn, 3.5, frames.Joined(session=SESSION))
    session = alone.joiner.session
    assert session is not None
    assert session.race is not None
    (other,) = [each.conn for each in session.race._attempts if each.conn != conn]
    alone.node.handle(Disconnected(other, "reset"), 4.0)
    assert not session.race.pending
    alone.hear(conn, 4.1, frames.Confirm(session=SESSION, epoch=1))
    assert alone.step() is TryingPaths, "it confirms once each path was tried again"


def test_a_formed_member_comes_back_until_its_ready_was_certainly_heard() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.node.handle(StoreProved(SESSION, 1), 3.0)
    alone.hear(conn, 3.0, frames.Go(session=SESSION, epoch=1))
    assert alone.node.next_timer() is None
    alone.node.handle(Disconnected(conn, "reset"), 4.0)
    (conn,) = alone.dialed()
    alone.membership().ready(4.0)
    for again in (4.1, 4.0 + READY_HEARD_SECONDS):
        alone.answer(conn, again, frames.Joined(session=SESSION, epoch=1), frames.Go(session=SESSION, epoch=1))
        assert alone.said[-1] == frames.Ready(session=SESSION)
        alone.node.handle(Disconnected(conn, "reset"), again + READY_HEARD_SECONDS - 0.1)
        (conn,) = alone.dialed()
    alone.answer(conn, 40.0, frames.Joined(session=SESSION, epoch=1))
    alone.node.handle(Disconnected(conn, "reset"), 40.0 + READY_HEARD_SECONDS)
    assert alone.dialed() == []


def test_member_doubts_a_silent_host_only_when_another_one_offers_itself() -> None:
    alone = Alone()
    conn = alone.join()
    alone.node.handle(TimerDue(), 30.0)
    assert alone.step() is AwaitingConfirm
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 30.0)
    alone.done()
    assert alone.said[-1] == frames.Ping()
    alone.node.handle(TimerDue(), 30.0 + SUSPECT_SECONDS)
    assert Hangup(conn) in alone.done()
    assert alone.step() is Searching


def test_member_that_has_confirmed_does_not_doubt_its_host() -> None:
    alone = Alone()
    alone.seal(1.0)
    alone.said.clear()
    alone.node.handle(Heard(offer(OTHER), HERE), 2.0)
    alone.done()
    assert not any(isinstance(frame, frames.Ping) for frame in alone.said)
    alone.node.handle(TimerDue(), 2.0 + SUSPECT_SECONDS)
    assert alone.joiner.session is not None


def test_what_a_host_says_after_it_has_refused_means_nothing() -> None:
    alone = Alone()
    alone.node.handle(Heard(offer(), HERE), 1.0)
    (conn,) = alone.dialed()
    closed = frames.Closed(session=SESSION, reason="two rank 0s", conflict=True)
    alone.answer(conn, 1.0, frames.Refused(reason="session"), closed)
    assert alone.joiner.search.conflict is None


def test_a_stranger_under_the_sessions_name_is_no_sign_of_life() -> None:
    """Without a secret any process can offer a further address of a session, and takes the connection there."""
    alone = Alone()
    alone.join()
    forged = msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.0.66"))
    alone.node.handle(Heard(forged, HERE), 30.0)
    alone.node.handle(TimerDue(), 30.0)
    (stranger,) = alone.dialed()
    alone.node.handle(Connected(stranger, "10.0.0.2", "eth0"), 30.0)
    alone.node.effects()
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 30.1)
    alone.node.handle(BytesReceived(stranger, frame_codec.PREFACE[:4]), 31.0)
    alone.node.handle(TimerDue(), 30.1 + SUSPECT_SECONDS)
    assert alone.step() is Searching


def test_a_host_that_answers_is_kept() -> None:
    alone = Alone()
    conn = alone.join()
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 5.0)
    alone.done()
    alone.hear(conn, 6.0, frames.Pong())
    alone.node.handle(TimerDue(), 5.0 + SUSPECT_SECONDS)
    assert alone.step() is AwaitingConfirm


@pytest.mark.parametrize("another", [False, True])
def test_a_running_job_that_ends_in_a_conflict_explains_that_none_comes(another: bool) -> None:
    alone = Alone(timeout=10.0)
    alone.node.handle(Heard(offer(OTHER, state="sealed"), HERE), 1.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 1.0, session=OTHER)
    alone.hear(conn, 1.0, running())
    alone.hear(conn, 3.0, frames.Closed(session=OTHER, reason="two rank 0s", conflict=True))
    assert not alone.joiner.finished, "who comes next may be the only one"
    alone.node.handle(Disconnected(conn, "the other side closed the connection"), 3.0)
    if another:
        alone.join(4.0)
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert isinstance(alone.joiner.failure, DiscoveryTimeoutError if another else ConflictError)
    assert ("two rank 0s" in str(alone.joiner.failure)) is not another


def test_a_session_that_says_it_reopened_is_joined_only_by_proof() -> None:
    alone = Alone()
    alone.node.handle(Heard(offer(state="sealed"), HERE), 1.0)
    (probe,) = alone.dialed()
    alone.answer(probe, 1.0)
    alone.hear(probe, 1.0, running("sealed"))
    alone.node.handle(Heard(offer(state="open"), HERE), 2.0)
    (conn,) = alone.dialed()
    assert alone.blocked()
    alone.answer(conn, 2.0)
    alone.hear(conn, 2.0, frames.Joined(session=SESSION))
    assert not alone.blocked()
    assert alone.step() is AwaitingConfirm


def test_running_on_its_own_connection_is_nonsense() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, running("open"))
    assert alone.step() is AwaitingConfirm
    assert alone.joiner.session is not None


def test_the_deadline() -> None:
    alone = Alone(timeout=10.0)
    alone.join()
    alone.node.handle(TimerDue(), 9.1)
    alone.done()
    assert alone.said[-1] == frames.Ask(what="status")
    assert not alone.node.expired(9.9)
    assert alone.node.expired(10.0)
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert isinstance(alone.joiner.failure, DiscoveryTimeoutError)
    assert alone.node.next_timer() is None


def test_why_a_host_has_ended_its_session_is_in_the_report() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Closed(session=SESSION, reason="its user stopped it"))
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert "it ended its session: its user stopped it" in str(alone.joiner.failure)


@pytest.mark.parametrize(("ended_at", "gone"), [(2.0, True), (9.9, False)])
def test_a_host_that_has_gone_is_the_cause_unless_its_time_was_up_as_well(ended_at: float, gone: bool) -> None:
    alone = Alone(timeout=10.0)
    conn = alone.join()
    alone.hear(conn, 1.5, frames.Status(joined=2, world_size=3, missing=(2,)))
    alone.hear(conn, ended_at, frames.Closed(session=SESSION, reason="2 of 3 ranks joined"))
    alone.node.handle(TimerDue(), ended_at + 0.05)
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert ("has gone since" in str(alone.joiner.failure.cause)) is gone  # type: ignore[union-attr]
    assert "2 of 3 ranks joined, missing ranks: 2 (as last reported by rank 0" in str(alone.joiner.failure)


def test_a_host_that_is_still_there_has_not_gone() -> None:
    alone = Alone(timeout=10.0)
    alone.node.handle(TimerDue(), 0.5)  # it asks before it has heard of the host
    assert alone.joiner.search.asked_at is not None
    conn = alone.join()
    alone.hear(conn, 1.5, frames.Status(joined=2, world_size=3, missing=(2,)))
    alone.node.give_up(timeout(alone.node.situation(), NetworkFacts()))
    assert "the missing ranks were not started" in str(alone.joiner.failure)


def test_the_status_of_an_earlier_session_explains_nothing() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Status(joined=1, world_size=2, missing=(0,)))
    alone.node.handle(Disconnected(conn, "reset"), 3.0)
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 4.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 4.0, frames.Joined(session=OTHER), session=OTHER, port=4001)
    assert alone.step() is AwaitingConfirm
    assert alone.joiner.status is None
    alone.hear(conn, 5.0, frames.Status(joined=1, world_size=2, missing=(0,)))
    alone.node.handle(Disconnected(conn, "reset"), 6.0)
    alone.node.handle(TimerDue(), 6.0 + RETRY_SECONDS)
    alone.node.handle(Heard(offer(OTHER, port=4001), HERE), 7.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 7.0, frames.Joined(session=OTHER), session=OTHER, port=4001)
    assert alone.joiner.status is not None


def test_member_that_leaves_before_go_sends_no_ready() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.node.handle(StoreProved(SESSION, 1), 3.0)
    alone.node.close("gave up")
    assert Hangup(conn) in alone.done()
    assert alone.said[-1] == frames.Leave(session=SESSION, reason="gave up")
    assert not any(isinstance(frame, frames.Ready) for frame in alone.said)


def test_host_of_another_job_is_kept_for_the_report() -> None:
    alone = Alone()
    alone.node.handle(Heard(offer(), HERE), 1.0)
    (conn,) = alone.dialed()
    alone.node.handle(Connected(conn, "10.0.0.2", "eth0"), 1.0)
    stranger = HostConversation(job="other", attempt="", session=SESSION, addresses=(ADDRESS,), port=4000)
    (write,) = [effect for effect in alone.node.effects() if isinstance(effect, Write)]
    with pytest.raises(HandshakeFailed):
        stranger.receive_data(write.data)
    alone.node.handle(BytesReceived(conn, stranger.data_to_send()), 1.0)
    assert any("session" in text for text in alone.joiner.diagnostics.hosts.values())


def test_a_member_hangs_up_on_callers() -> None:
    alone = Alone()
    alone.node.effects()
    alone.node.handle(Accepted(7, "10.0.0.2"), 5.0)
    assert alone.node.effects() == [Hangup(7)]


# --- the mesh, which others prove ------------------------------------------------------------------------------------


def called(alone: Alone, purpose: frames.Purpose, *said: frames.AnyFrame) -> MemberConversation:
    """Call a member that has a seat; return what the caller has seen of it."""
    alone.node.endpoints = Endpoints(addresses=(Address("10.0.0.2", "eth0", 24),), port=4001)
    call = Call(job="job", member=b"N" * 16, session=SESSION, purpose=purpose)
    caller = MemberConversation(call, ("10.0.0.2", 4001))
    alone.node.handle(Accepted(90, "10.0.0.3"), 2.0)
    for frame in (None, *said):
        if frame is not None:
            caller.send(frame)
        while data := caller.data_to_send():
            alone.node.handle(BytesReceived(90, data), 2.0)
            for effect in alone.node.effects():
                if isinstance(effect, Write) and effect.conn == 90:
                    caller.receive_data(effect.data)
    return caller


def test_a_member_with_a_seat_answers_a_node_that_proves_the_mesh() -> None:
    alone = Alone()
    alone.join()
    caller = called(alone, "mesh", greeting(b"N" * 16))
    assert caller.welcome is not None
    assert 90 in alone.node.links


@pytest.mark.parametrize("purpose", ["join", "probe", "conflict"])
def test_a_member_is_no_host(purpose: frames.Purpose) -> None:
    alone = Alone()
    alone.join()
    with pytest.raises(HandshakeFailed, match="session"):
        called(alone, purpose)
    assert 90 not in alone.node.links


def test_a_member_hangs_up_on_a_node_that_asks_it_for_anything_else() -> None:
    alone = Alone()
    alone.join()
    called(alone, "mesh", frames.Ask(what="status"))
    assert 90 not in alone.node.links
