"""A member alone with a scripted host. Whole jobs run in tests/lan."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from mingle.errors import ConflictError, DiscoveryTimeoutError
from mingle.protocol.claims import SILENT_SECONDS
from mingle.protocol.connection_race import ADDRESS_SECONDS
from mingle.protocol.handshake import HandshakeFailed, HostConversation
from mingle.protocol.machine import (
    Context,
    Dial,
    Effect,
    Hangup,
    Identity,
    Multicast,
    NetworkFacts,
    ProveStore,
    Source,
    Write,
)
from mingle.protocol.member import (
    READY_HEARD_SECONDS,
    RETURN_SECONDS,
    STORE_RETRY_SECONDS,
    SUSPECT_SECONDS,
    Joiner,
    Step,
)
from mingle.protocol.pacing import SEEK_INTERVAL_MAX_SECONDS
from mingle.protocol.sessions import RETRY_SECONDS
from mingle.wire import frames
from mingle.wire.datagrams import Offer, State
from mingle.wire.frames import ProcessInfo

SESSION, OTHER = b"S" * 16, b"T" * 16
ADDRESS = "10.0.0.1"
HERE = Source(interface="eth0", address=ADDRESS)
IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h1", pid=11)
)


def offer(session: bytes = SESSION, *, state: State = "open", port: int = 4000) -> Offer:
    return Offer(job="job", session=session, host=session, addresses=(ADDRESS,), port=port, world_size=2, state=state)


class Alone:
    """A joiner, and a host that says what it is told to say."""

    def __init__(self, timeout: float = 60.0) -> None:
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=timeout)
        self.joiner = Joiner(IDENTITY, context, 0.0)
        self.hosts: dict[int, HostConversation] = {}
        self.said: list[Any] = []

    def done(self) -> list[Effect]:
        """Take the effects; what was written arrives at the host."""
        done = self.joiner.effects()
        for effect in done:
            if isinstance(effect, Write):
                self.said += self.hosts[effect.conn].receive_data(effect.data)
        return done

    def step(self) -> Step:
        return self.joiner.step

    def blocked(self) -> bool:
        return self.joiner.running_check.may_run()

    def dialed(self) -> list[int]:
        return [effect.conn for effect in self.done() if isinstance(effect, Dial)]

    def answer(
        self,
        conn: int,
        now: float,
        *said: frames.AnyFrame,
        session: bytes = SESSION,
        addresses: tuple[str, ...] = (ADDRESS,),
        port: int = 4000,
    ) -> None:
        """The host at the other end of a dialed connection proves itself and says something."""
        self.hosts[conn] = HostConversation(job="job", attempt="", session=session, addresses=addresses, port=port)
        self.joiner.connected(conn, "10.0.0.2", "eth0", now)
        self.done()
        self.hear(conn, now, *said)

    def hear(self, conn: int, now: float, *said: frames.AnyFrame) -> None:
        for frame in said:
            self.hosts[conn].send(frame)
        self.joiner.received(conn, self.hosts[conn].data_to_send(), now)
        self.done()

    def join(self, now: float = 1.0) -> int:
        self.joiner.heard(offer(), HERE, now)
        (conn,) = self.dialed()
        self.answer(conn, now)
        self.hear(conn, now, frames.Joined(session=SESSION))
        return conn

    def seal(self, now: float = 2.0, *, epoch: int = 1) -> int:
        conn = self.join(now)
        self.hear(conn, now, frames.Confirm(session=SESSION, epoch=epoch))
        self.hear(conn, now, sealed(epoch))
        return conn


def sealed(epoch: int = 1, store_address: str = ADDRESS) -> frames.Sealed:
    return frames.Sealed(
        session=SESSION,
        epoch=epoch,
        place=frames.Place(rank=1, world_size=2, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2),
        store_address=store_address,
        store_port=5000,
        store_token="token",
        roster_digest=b"d" * 32,
    )


def running(state: Any = "running") -> frames.Running:
    return frames.Running(state=state, world_size=2, seconds=5.0, host=ProcessInfo(hostname="h0", pid=1, rank=0))


def test_it_asks_and_then_asks_less() -> None:
    alone = Alone()
    asked = []
    now = 0.0
    while now < 20.0:
        now = alone.joiner.next_timer() or 0.0
        alone.joiner.handle_timer(now)
        asked += [now for effect in alone.done() if isinstance(effect, Multicast) and not effect.browse]
    gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert gaps[0] < 0.1
    assert SEEK_INTERVAL_MAX_SECONDS * 0.75 <= gaps[-1] <= SEEK_INTERVAL_MAX_SECONDS * 1.25


def asked(alone: Alone, until: float) -> list[float]:
    """Let a joiner's timers run until this time; return when it asked for its host."""
    times = []
    while (due := alone.joiner.next_timer()) is not None and due < until:
        alone.joiner.handle_timer(due)
        times += [due for effect in alone.done() if isinstance(effect, Multicast) and not effect.browse]
    return times


def test_it_asks_again_soon_when_its_interfaces_change() -> None:
    """A host whose job runs speaks only when it is asked."""
    alone = Alone()
    asked(alone, 40.0)
    alone.joiner.rewired(40.0)
    assert len(asked(alone, 40.5)) >= 3


def test_a_rank_with_a_seat_asks_for_no_host_when_its_interfaces_change() -> None:
    alone = Alone()
    alone.join()
    alone.joiner.rewired(40.0)
    assert asked(alone, 45.0) == []


def test_a_rank_that_was_given_its_number_is_not_redirected() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Redirect(offer=offer(OTHER)))
    assert alone.joiner._table.get(OTHER) is None
    assert alone.joiner.seat == SESSION


def test_the_way_to_its_outcome() -> None:
    alone = Alone()
    conn = alone.seal()
    assert [type(frame) for frame in alone.said] == [frames.Join, frames.Confirmed]
    assert alone.said[1].paths == (frames.Path(host_address=ADDRESS, local_address="10.0.0.2", interface="eth0"),)
    assert alone.step() is Step.PROVING_STORE
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.done()
    assert alone.said[-1] == frames.Ack(session=SESSION, epoch=1)
    assert not alone.joiner.finished
    alone.hear(conn, 3.0, frames.Go(session=SESSION, epoch=1))
    outcome = alone.joiner.outcome
    assert outcome is not None
    assert (outcome.place.rank, outcome.store_port, outcome.interface, outcome.address) == (1, 5000, "eth0", "10.0.0.2")


@pytest.mark.parametrize("when", ["before its ack", "of another epoch"])
def test_go_is_only_taken_after_its_ack_and_of_its_epoch(when: str) -> None:
    alone = Alone()
    conn = alone.seal()
    if when == "of another epoch":
        alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.hear(conn, 3.0, frames.Go(session=SESSION, epoch=2 if when == "of another epoch" else 1))
    assert alone.joiner.outcome is None


def test_a_store_that_is_not_reached_is_tried_again_until_the_epoch_is_void() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.joiner.store_unreachable(SESSION, 1, "refused", 3.0)
    alone.joiner.handle_timer(3.0 + STORE_RETRY_SECONDS)
    assert any(isinstance(effect, ProveStore) for effect in alone.done())
    alone.hear(conn, 4.0, frames.Void(session=SESSION, epoch=1, reason="test"))
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.done()
    assert alone.step() is Step.SEATED
    assert not any(isinstance(frame, frames.Ack) for frame in alone.said)


def test_epochs_of_one_session_do_not_bind_another() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 1.0, frames.Confirm(session=SESSION, epoch=7), frames.Void(session=SESSION, epoch=7, reason=""))
    alone.joiner.disconnected(conn, "reset", 1.1)
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 2.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 2.0, session=OTHER, port=4001)
    alone.hear(conn, 2.0, frames.Joined(session=OTHER), frames.Confirm(session=OTHER, epoch=1))
    assert alone.step() is Step.CONFIRMED


def test_after_confirmed_it_tries_the_same_session_first() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.joiner.disconnected(conn, "reset", 3.0)
    (conn,) = alone.dialed()
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 3.1)
    assert alone.dialed() == []
    alone.answer(conn, 3.2, frames.Joined(session=SESSION, epoch=1), frames.Go(session=SESSION, epoch=1))
    assert alone.joiner.outcome is not None


def test_a_host_that_refuses_connections_is_not_waited_for() -> None:
    alone = Alone()
    alone.joiner.disconnected(alone.seal(), "reset", 3.0)
    (conn,) = alone.dialed()
    alone.joiner.disconnected(conn, "Connection refused (ECONNREFUSED)", 3.01)
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 3.1)
    assert len(alone.dialed()) == 1


def test_a_host_to_which_no_route_leads_may_live() -> None:
    """This machine can have lost its own address: nobody has refused anything."""
    alone = Alone()
    alone.joiner.disconnected(alone.seal(), "its address has gone", 3.0)
    (conn,) = alone.dialed()
    alone.joiner.disconnected(conn, "Network is unreachable (ENETUNREACH)", 3.01)
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 3.1)
    assert alone.dialed() == [], "its host may have decided GO with its votes"
    alone.joiner.handle_timer(3.01 + RETRY_SECONDS)
    (conn,) = alone.dialed()
    alone.answer(conn, 3.5)
    assert alone.step() is Step.JOINING


def test_a_host_whose_connection_is_reset_before_the_proof_may_live() -> None:
    alone = Alone()
    alone.joiner.disconnected(alone.seal(), "reset", 3.0)
    (conn,) = alone.dialed()
    alone.joiner.connected(conn, "10.0.0.2", "eth0", 3.01)
    alone.joiner.disconnected(conn, "reset", 3.02)
    alone.joiner.effects()
    alone.joiner.handle_timer(3.02 + RETRY_SECONDS)
    (conn,) = alone.dialed()
    alone.answer(conn, 3.5)
    assert alone.step() is Step.JOINING


def test_a_connection_that_breaks_on_the_way_back_loses_no_seal() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.done()
    alone.joiner.disconnected(conn, "reset", 4.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 4.1)
    assert alone.step() is Step.JOINING
    alone.joiner.disconnected(conn, "reset", 4.2)
    alone.joiner.handle_timer(4.2 + RETRY_SECONDS)
    (conn,) = alone.dialed()
    alone.answer(conn, 4.5, frames.Joined(session=SESSION, epoch=1), frames.Go(session=SESSION, epoch=1))
    assert alone.step() is Step.FORMED, "its host may have decided GO with its ACK"


def test_a_path_that_failed_while_the_connection_broke_is_proved_before_it_counts() -> None:
    alone = Alone()
    two = msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.9.9"))
    alone.joiner.disconnected(alone.join(2.0), "reset", 3.0)
    alone.joiner.heard(two, HERE, 3.5)
    (conn,) = alone.dialed()
    alone.answer(conn, 3.5, addresses=two.addresses)
    alone.hear(conn, 3.5, frames.Joined(session=SESSION))
    session = alone.joiner.current
    assert session is not None
    assert session.race is not None
    (other,) = session.race._attempts.keys() - {conn}
    alone.joiner.disconnected(other, "reset", 4.0)
    assert not session.race.pending
    alone.hear(conn, 4.1, frames.Confirm(session=SESSION, epoch=1))
    assert alone.step() is Step.SEATED, "it confirms once each path was tried again"


def test_a_formed_member_comes_back_until_its_ready_was_certainly_heard() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.hear(conn, 3.0, frames.Go(session=SESSION, epoch=1))
    assert alone.joiner.next_timer() is None
    alone.joiner.disconnected(conn, "reset", 4.0)
    (conn,) = alone.dialed()
    alone.joiner.ready(4.0)
    for again in (4.1, 4.0 + READY_HEARD_SECONDS):
        alone.answer(conn, again, frames.Joined(session=SESSION, epoch=1), frames.Go(session=SESSION, epoch=1))
        assert alone.said[-1] == frames.Ready(session=SESSION)
        alone.joiner.disconnected(conn, "reset", again + READY_HEARD_SECONDS - 0.1)
        (conn,) = alone.dialed()
    alone.answer(conn, 40.0, frames.Joined(session=SESSION, epoch=1))
    alone.joiner.disconnected(conn, "reset", 40.0 + READY_HEARD_SECONDS)
    assert alone.dialed() == []


def test_a_formed_member_gives_up_coming_back() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.hear(conn, 3.0, frames.Go(session=SESSION, epoch=1))
    alone.joiner.disconnected(conn, "reset", 4.0)
    while (due := alone.joiner.next_timer()) is not None:
        assert due <= 4.0 + RETURN_SECONDS + ADDRESS_SECONDS
        alone.joiner.handle_timer(due)
        alone.done()
    assert alone.joiner.outcome is not None


def test_it_doubts_a_silent_host_only_when_another_one_offers_itself() -> None:
    alone = Alone()
    conn = alone.join()
    alone.joiner.handle_timer(30.0)
    assert alone.step() is Step.SEATED
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 30.0)
    alone.done()
    assert alone.said[-1] == frames.Ping()
    alone.joiner.handle_timer(30.0 + SUSPECT_SECONDS)
    assert Hangup(conn) in alone.done()
    assert alone.step() is Step.SEEKING


def test_a_stranger_under_the_sessions_name_is_no_sign_of_life() -> None:
    """Without a secret any process can offer a further address of a session, and takes the connection there."""
    alone = Alone()
    alone.join()
    forged = msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.0.66"))
    alone.joiner.heard(forged, HERE, 30.0)
    alone.joiner.handle_timer(30.0)
    (stranger,) = alone.dialed()
    alone.joiner.connected(stranger, "10.0.0.2", "eth0", 30.0)
    alone.joiner.effects()
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 30.1)
    alone.joiner.received(stranger, frames.PREFACE[:4], 31.0)
    alone.joiner.handle_timer(30.1 + SUSPECT_SECONDS)
    assert alone.step() is Step.SEEKING


def test_a_host_that_answers_is_kept() -> None:
    alone = Alone()
    conn = alone.join()
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 5.0)
    alone.done()
    alone.hear(conn, 6.0, frames.Pong())
    alone.joiner.handle_timer(5.0 + SUSPECT_SECONDS)
    assert alone.step() is Step.SEATED


def test_a_running_job_is_said_soon_and_fails_late() -> None:
    alone = Alone()
    alone.joiner.heard(offer(state="sealed"), HERE, 1.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 1.0)
    alone.hear(conn, 1.0, running())
    assert alone.joiner.next_timer() is not None
    for now in (2.9, 3.1, 30.9, 31.1):
        alone.joiner.handle_timer(now)
        texts = [effect.text for effect in alone.done() if hasattr(effect, "text")]
        assert bool(texts) is (now == 3.1)
        assert (alone.joiner.failure is not None) is (now == 31.1)
    assert isinstance(alone.joiner.failure, ConflictError)


def test_a_running_job_that_ends_makes_room() -> None:
    alone = Alone()
    alone.joiner.heard(offer(state="sealed"), HERE, 1.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 1.0)
    alone.hear(conn, 1.0, running())
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 2.0)
    assert alone.dialed() == []
    alone.joiner.disconnected(conn, "the other side closed the connection", 3.0)
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 3.1)
    assert len(alone.dialed()) == 1


@pytest.mark.parametrize("another", [False, True])
def test_a_running_job_that_ends_in_a_conflict_explains_that_none_comes(another: bool) -> None:
    alone = Alone(timeout=10.0)
    alone.joiner.heard(offer(OTHER, state="sealed"), HERE, 1.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 1.0, session=OTHER)
    alone.hear(conn, 1.0, running())
    alone.hear(conn, 3.0, frames.Closed(session=OTHER, reason="two rank 0s", conflict=True))
    assert not alone.joiner.finished, "who comes next may be the only one"
    alone.joiner.disconnected(conn, "the other side closed the connection", 3.0)
    if another:
        alone.join(4.0)
    alone.joiner.give_up(NetworkFacts())
    assert isinstance(alone.joiner.failure, DiscoveryTimeoutError if another else ConflictError)
    assert ("two rank 0s" in str(alone.joiner.failure)) is not another


def test_a_silent_sealed_session_is_in_the_way_for_ten_seconds_once() -> None:
    alone = Alone()
    alone.joiner.handle_timer(0.0)
    alone.joiner.heard(offer(state="sealed"), HERE, 1.0)
    started = ended = None
    now = 1.0
    while now < 20.0:
        now = min(alone.joiner.next_timer() or 99.0, now + 0.5)
        alone.joiner.handle_timer(now)
        alone.done()
        alone.joiner.heard(offer(state="sealed"), HERE, now)
        if alone.blocked() and started is None:
            started = now
        if started is not None and ended is None and not alone.blocked():
            ended = now
    assert started is not None
    assert ended is not None
    assert SILENT_SECONDS <= ended - started < SILENT_SECONDS + 2 * ADDRESS_SECONDS
    assert not alone.blocked()


def test_a_session_that_says_it_reopened_is_joined_only_by_proof() -> None:
    alone = Alone()
    alone.joiner.heard(offer(state="sealed"), HERE, 1.0)
    (probe,) = alone.dialed()
    alone.answer(probe, 1.0)
    alone.hear(probe, 1.0, running("sealed"))
    alone.joiner.heard(offer(state="open"), HERE, 2.0)
    (conn,) = alone.dialed()
    assert alone.blocked()
    alone.answer(conn, 2.0)
    alone.hear(conn, 2.0, frames.Joined(session=SESSION))
    assert not alone.blocked()
    assert alone.step() is Step.SEATED


def test_a_refusal_that_is_final() -> None:
    alone = Alone()
    alone.joiner.heard(offer(), HERE, 1.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 1.0)
    alone.hear(
        conn, 1.0, frames.Refused(reason="rank taken", detail="rank 1", who=ProcessInfo(hostname="h9", pid=9, rank=1))
    )
    assert isinstance(alone.joiner.failure, ConflictError)
    assert "h9" in str(alone.joiner.failure)


def test_running_on_its_own_connection_is_nonsense() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, running("open"))
    assert alone.step() is Step.SEATED
    assert alone.joiner.connection_stands


def test_the_deadline() -> None:
    alone = Alone(timeout=10.0)
    alone.join()
    alone.joiner.handle_timer(9.1)
    alone.done()
    assert alone.said[-1] == frames.Ask(what="status")
    assert not alone.joiner.expired(9.9)
    assert alone.joiner.expired(10.0)
    alone.joiner.give_up(NetworkFacts())
    assert isinstance(alone.joiner.failure, DiscoveryTimeoutError)
    assert alone.joiner.next_timer() is None


def test_why_a_host_has_ended_its_session_is_in_the_report() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Closed(session=SESSION, reason="its user stopped it"))
    alone.joiner.give_up(NetworkFacts())
    assert "it ended its session: its user stopped it" in str(alone.joiner.failure)


def test_the_status_of_an_earlier_session_explains_nothing() -> None:
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Status(joined=1, world_size=2, missing=(0,)))
    alone.joiner.disconnected(conn, "reset", 3.0)
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 4.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 4.0, frames.Joined(session=OTHER), session=OTHER, port=4001)
    assert alone.step() is Step.SEATED
    assert alone.joiner.status is None
    alone.hear(conn, 5.0, frames.Status(joined=1, world_size=2, missing=(0,)))
    alone.joiner.disconnected(conn, "reset", 6.0)
    alone.joiner.handle_timer(6.0 + RETRY_SECONDS)
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 7.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 7.0, frames.Joined(session=OTHER), session=OTHER, port=4001)
    assert alone.joiner.status is not None


def test_who_leaves_before_go_says_no_ready() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.joiner.close("gave up")
    assert Hangup(conn) in alone.done()
    assert alone.said[-1] == frames.Leave(session=SESSION, reason="gave up")
    assert not any(isinstance(frame, frames.Ready) for frame in alone.said)


def test_who_leaves_after_go_was_ready() -> None:
    alone = Alone()
    conn = alone.seal()
    alone.joiner.store_proved(SESSION, 1, 3.0)
    alone.hear(conn, 3.0, frames.Go(session=SESSION, epoch=1))
    alone.joiner.close("done")
    alone.done()
    assert alone.said[-2:] == [frames.Ready(session=SESSION), frames.Leave(session=SESSION, reason="done")]


def test_who_answers_for_another_job_is_kept_for_the_report() -> None:
    alone = Alone()
    alone.joiner.heard(offer(), HERE, 1.0)
    (conn,) = alone.dialed()
    alone.joiner.connected(conn, "10.0.0.2", "eth0", 1.0)
    stranger = HostConversation(job="other", attempt="", session=SESSION, addresses=(ADDRESS,), port=4000)
    (write,) = [effect for effect in alone.joiner.effects() if isinstance(effect, Write)]
    with pytest.raises(HandshakeFailed):
        stranger.receive_data(write.data)
    alone.joiner.received(conn, stranger.data_to_send(), 1.0)
    assert any("session" in text for text in alone.joiner.diagnostics.hosts.values())


def test_a_member_hangs_up_on_callers() -> None:
    alone = Alone()
    alone.joiner.effects()
    alone.joiner.accepted(7, "10.0.0.2", 5.0)
    assert alone.joiner.effects() == [Hangup(7)]
