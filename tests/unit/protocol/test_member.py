"""Single steps of a member: a frame or a lost connection is handed to it, and its next state is looked at.

They concern refusals, the loss of the host, and other hosts that the member hears of. A host that answers is in
test_member_with_host.py. The member's search, its part in the commit and its place after GO are modules of their own:
test_search.py, test_participant.py and test_membership.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest

from mingle.protocol.effects import Dial, Hangup
from mingle.protocol.events import (
    Accepted,
    Address,
    Disconnected,
    Heard,
    InterfacesChanged,
    StoreProved,
    StoreUnreachable,
    TimerDue,
)
from mingle.protocol.links.host_link import SUSPECT_SECONDS
from mingle.protocol.links.race import ADDRESS_SECONDS, DialTarget
from mingle.protocol.machine import Context, Endpoints
from mingle.protocol.member import HOST_SEEN_SECONDS, Attached, Away, Searching
from mingle.protocol.membership import RETURN_SECONDS, Membership
from mingle.protocol.node import Node
from mingle.protocol.participant import (
    STORE_RETRY_SECONDS,
    AwaitingConfirm,
    AwaitingGo,
    AwaitingSeal,
    ProvingStore,
    TryingPaths,
)
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from tests.support.scripted_host import ADDRESS, HERE, IDENTITY, OTHER, SESSION, Alone, offer, sealed


class Joined:
    """A member whose host has no ear: what it does is seen in its state."""

    def __init__(self, rank: int | None = 1) -> None:
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        endpoints = Endpoints(addresses=(Address("10.0.0.2", "eth0", 24),), port=4002) if rank is None else None
        self.node = Node(msgspec.structs.replace(IDENTITY, rank=rank), endpoints, context, 0.0)
        self.joiner = self.node.joiner
        self.session = self.known(SESSION)
        self.joiner.search.race(self.session, 0.0)
        assert self.session.race is not None
        self.session.race.paths[ADDRESS] = frames.Path(host_address=ADDRESS, local_address="10.0.0.2", interface="eth0")
        self.joiner.join(self.session, 0.0)
        self.hear(frames.Joined(session=SESSION))

    def known(self, name: bytes) -> KnownSession:
        session = KnownSession(offer(name), [DialTarget(ADDRESS, "eth0", 4000)])
        assert self.joiner.sightings.add(session)
        return session

    def hear(self, *said: frames.AnyFrame) -> None:
        for frame in said:
            self.joiner.search.on_frame(self.session, frame, 1.0)

    def confirm(self) -> None:
        assert self.session.race is not None
        self.session.race.stop_trying()
        self.joiner.after_connection(1.0)

    def seal(self, epoch: int = 1) -> None:
        self.hear(frames.Confirm(session=SESSION, epoch=epoch))
        self.confirm()
        self.hear(sealed(epoch))

    def prove_store(self, now: float = 3.0) -> None:
        self.node.handle(StoreProved(SESSION, 1), now)

    def reach(self, state: type) -> None:
        """Go on to this state of the member, or of its part in the commit."""
        steps: list[Callable[[], None]] = [
            lambda: self.hear(frames.Confirm(session=SESSION, epoch=1)),
            self.confirm,
            lambda: self.hear(sealed()),
            self.prove_store,
            lambda: self.hear(frames.Go(session=SESSION, epoch=1)),
        ]
        while self.state() is not state:
            steps.pop(0)()

    def state(self) -> type:
        part = self.joiner.part
        return type(self.joiner.state if part is None else part.state)

    def membership(self) -> Membership:
        assert self.joiner.membership is not None
        return self.joiner.membership

    def lose(self, reason: str, now: float) -> bool:
        """The connection ends; tells whether the same session is tried first."""
        self.session.hang_up()
        self.session.retry_later(now)
        self.joiner.host_lost(self.session, reason, now)
        return self.joiner.returns_to is not None


@pytest.mark.parametrize("state", [AwaitingConfirm, TryingPaths, AwaitingSeal, ProvingStore, AwaitingGo, Attached])
def test_member_returns_after_a_loss_once_it_has_confirmed(state: type) -> None:
    joined = Joined()
    joined.reach(state)
    returning = state in (AwaitingSeal, ProvingStore, AwaitingGo, Attached)
    assert joined.lose("reset", 5.0) is returning
    assert joined.joiner.session is None
    assert (joined.joiner.returns_to is joined.session) is returning


@pytest.mark.parametrize(("state", "returns_to"), [(ProvingStore, AwaitingConfirm), (AwaitingGo, AwaitingGo)])
def test_only_an_acknowledged_seal_outlasts_a_loss(state: type, returns_to: type) -> None:
    joined = Joined()
    joined.reach(state)
    joined.lose("reset", 5.0)
    joined.joiner.join(joined.session, 6.0)
    joined.hear(frames.Joined(session=SESSION, epoch=1))
    assert joined.state() is returns_to


def test_callers_of_the_mesh_go_with_the_session_also_before_it_has_given_a_seat() -> None:
    joined = Joined()
    joined.node.endpoints = Endpoints(addresses=(Address("10.0.0.2", "eth0", 24),), port=4002)
    joined.reach(AwaitingSeal)
    joined.lose("reset", 5.0)
    joined.joiner.join(joined.session, 6.0)
    joined.node.handle(Accepted(99, "10.0.0.3"), 6.1)
    assert 99 in joined.node.links
    joined.lose("reset", 6.2)
    assert 99 not in joined.node.links, "while this process hosts a session, nobody looks after them"


def test_a_member_that_comes_back_late_still_lacks_go_alone() -> None:
    joined = Joined()
    joined.reach(AwaitingGo)
    joined.lose("reset", 5.0)
    joined.session.hang_up()
    joined.node.handle(TimerDue(), 5.0 + RETURN_SECONDS)
    assert joined.state() is Searching
    joined.joiner.search.race(joined.session, 20.0)
    assert joined.session.race is not None
    joined.session.race.paths[ADDRESS] = frames.Path(host_address=ADDRESS, local_address="10.0.0.2", interface="eth0")
    joined.joiner.join(joined.session, 20.0)
    joined.hear(frames.Joined(session=SESSION, epoch=1), frames.Go(session=SESSION, epoch=1))
    assert joined.joiner.outcome is not None


def test_a_seal_is_forgotten_when_another_session_gives_a_seat() -> None:
    """Otherwise an agent that may count there already would count here as well."""
    joined = Joined()
    joined.reach(AwaitingGo)
    other = joined.known(OTHER)
    joined.lose("reset", 5.0)
    joined.session.hang_up()
    joined.node.handle(TimerDue(), 5.0 + RETURN_SECONDS)
    joined.joiner.join(other, 11.0)
    joined.joiner.host_said(other, frames.Joined(session=OTHER), 11.0)
    joined.joiner.host_lost(other, "reset", 12.0)
    joined.joiner.join(joined.session, 13.0)
    joined.hear(frames.Joined(session=SESSION, epoch=1))
    assert joined.state() is AwaitingConfirm


def formed() -> Joined:
    joined = Joined()
    joined.seal()
    joined.node.handle(StoreProved(SESSION, 1), 3.0)
    joined.hear(frames.Go(session=SESSION, epoch=1))
    assert joined.state() is Attached
    return joined


def test_a_host_that_is_lost_after_go_is_given_up_when_it_cannot_be_returned_to() -> None:
    joined = formed()
    membership = joined.membership()
    assert not membership.host_lost_error
    assert joined.lose("reset", 5.0)
    assert not membership.host_lost_error, "it is tried again first"
    state = joined.joiner.state
    assert isinstance(state, Away)
    joined.session.hang_up()
    joined.node.handle(TimerDue(), state.way_back.until)
    assert membership.host_lost_error
    assert "reset" in membership.loss


def test_refused_member_searches_again() -> None:
    joined = Joined()
    joined.session.confirmed = True
    joined.hear(frames.Refused(reason="full"))
    assert joined.joiner.session is None
    assert joined.state() is Searching
    assert not joined.session.confirmed


@pytest.mark.parametrize("reason", ["running", "world size"])
def test_a_host_that_was_only_asked_cannot_refuse(reason: frames.RefusalReason) -> None:
    """Any process can prove a session without a secret: it must not end the vote of a member of another one."""
    joined = Joined()
    joined.seal()
    other = joined.known(OTHER)
    joined.joiner.search.on_frame(other, frames.Refused(reason=reason), 2.0)
    assert joined.joiner.failure is None
    assert joined.state() is ProvingStore
    joined.node.handle(StoreProved(SESSION, 1), 2.0)
    joined.hear(frames.Go(session=SESSION, epoch=1))
    assert joined.joiner.outcome is not None


@pytest.mark.parametrize(
    "said", [frames.Joined(session=SESSION), frames.Refused(reason="session")], ids=["joined", "refused"]
)
def test_a_host_that_answers_a_join_twice_does_no_harm(said: frames.AnyFrame) -> None:
    joined = Joined()
    joined.seal()
    joined.node.handle(StoreUnreachable(SESSION, 1, "refused"), 1.0)
    joined.hear(said)
    joined.node.handle(TimerDue(), 1.0 + STORE_RETRY_SECONDS)


# --- a host that closes for another one, where ranks are assigned ---------------------------------------------------


def test_a_member_makes_at_once_for_the_host_for_which_its_own_has_closed() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.hear(frames.Closed(session=SESSION, offer=new.offer))
    assert (joined.joiner.session, joined.state()) == (None, Searching)
    assert new.races_to("join")
    joined.joiner.search.on_proved(new, 2.0)
    assert joined.joiner.session is new


def test_a_member_that_does_not_reach_that_host_looks_for_any() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.hear(frames.Closed(session=SESSION, offer=new.offer))
    assert joined.joiner.search._client.seeker.next_timer() == 1.0
    joined.node.handle(TimerDue(), 1.0 + ADDRESS_SECONDS)
    assert not new.races_to("join")
    assert not joined.node.expects_host(1.1 + ADDRESS_SECONDS)


def test_a_session_that_is_just_asked_whether_it_lives_is_raced_for_again_to_join_it() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.joiner.sightings.race(new, IDENTITY.call(OTHER, "probe"), 1.0)
    joined.hear(frames.Closed(session=SESSION, offer=new.offer))
    assert new.races_to("join")


def test_a_member_that_has_confirmed_does_not_return_to_a_session_that_is_closed() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.hear(frames.Confirm(session=SESSION, epoch=1))
    joined.confirm()
    assert joined.state() is AwaitingSeal
    joined.hear(frames.Closed(session=SESSION, offer=new.offer))
    assert joined.joiner.returns_to is None
    assert new.races_to("join")


def test_a_member_whose_job_has_formed_makes_for_no_other_host() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.seal()
    joined.node.handle(StoreProved(SESSION, 1), 1.0)
    joined.hear(frames.Go(session=SESSION, epoch=1), frames.Closed(session=SESSION, offer=new.offer))
    assert new.race is None


def test_a_host_without_this_member_sends_it_nowhere() -> None:
    joined = Joined(None)
    new, other = joined.known(OTHER), joined.known(b"T" * 16)
    joined.joiner.search.on_frame(other, frames.Closed(session=other.name, offer=new.offer), 1.0)
    assert new.race is None
    assert joined.joiner.session is joined.session


def test_a_member_makes_for_no_session_of_its_own() -> None:
    joined = Joined(None)
    joined.hear(frames.Closed(session=SESSION, offer=msgspec.structs.replace(offer(OTHER), host=IDENTITY.member)))
    assert joined.joiner.sightings.get(OTHER) is None


# --- other hosts, and other paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 1])
def test_a_member_without_a_rank_tells_its_host_of_others(rank: int | None) -> None:
    joined = Joined(rank)
    joined.node.handle(Heard(offer(OTHER), HERE), 2.0)
    other = joined.joiner.sightings.get(OTHER)
    assert other is not None
    assert other.race is None
    assert other.report_at == (0.0 if rank is not None else 2.0 + HOST_SEEN_SECONDS)


def test_the_session_to_return_to_comes_first_and_has_its_time() -> None:
    joined = Joined()
    joined.seal()
    assert joined.lose("reset", 2.0)
    assert joined.session.races_to("join")
    joined.node.handle(Heard(offer(OTHER), HERE), 2.1)
    other = joined.joiner.sightings.get(OTHER)
    assert other is not None
    assert other.race is None
    joined.node.handle(TimerDue(), 2.1 + ADDRESS_SECONDS)
    assert joined.joiner.returns_to is joined.session
    for now in (2.0 + RETURN_SECONDS, 2.0 + RETURN_SECONDS + ADDRESS_SECONDS, 9.0):
        joined.node.handle(TimerDue(), now)
    assert joined.joiner.returns_to is None


@pytest.mark.parametrize(("address", "suspected"), [(ADDRESS, False), ("10.0.0.7", True)])
def test_a_host_that_no_longer_offers_the_address_in_use_is_asked_whether_it_lives(
    address: str, suspected: bool
) -> None:
    alone = Alone()
    alone.join()
    alone.node.handle(Heard(msgspec.structs.replace(offer(), addresses=(address,)), HERE), 2.0)
    alone.done()
    assert (alone.said[-1] == frames.Ping()) is suspected


def test_a_member_that_has_confirmed_goes_back_to_a_host_whose_address_has_gone() -> None:
    """The host has ended the old connection, and its FIN went nowhere: TCP would notice after ten seconds."""
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Confirm(session=SESSION, epoch=1))
    assert alone.step() is AwaitingSeal
    alone.node.handle(Heard(msgspec.structs.replace(offer(), addresses=("10.0.0.7",)), HERE), 3.0)
    alone.done()
    alone.node.handle(TimerDue(), 3.0 + SUSPECT_SECONDS)
    done = alone.done()
    assert Hangup(conn) in done
    assert "10.0.0.7" in [effect.address for effect in done if isinstance(effect, Dial)]


def fail_a_second_path(alone: Alone, reason: str) -> None:
    """The host names another address, where it is not reached."""
    alone.node.handle(Heard(msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.0.7")), HERE), 2.0)
    alone.node.handle(TimerDue(), 2.1)
    (second,) = alone.dialed()
    alone.node.handle(Disconnected(second, reason), 2.2)


@pytest.mark.parametrize("confirmed", [False, True])
def test_when_the_own_interfaces_change_the_paths_are_proved_again(confirmed: bool) -> None:
    alone = Alone()
    conn = alone.join()
    fail_a_second_path(alone, "Network is unreachable")
    if confirmed:
        alone.hear(conn, 2.3, frames.Confirm(session=SESSION, epoch=1))
    alone.node.handle(InterfacesChanged(), 3.0)
    # A member that has confirmed has told its host what counts.
    assert len(alone.dialed()) == (0 if confirmed else 1)


def test_a_change_of_the_interfaces_that_ends_the_last_attempt_lets_the_member_confirm() -> None:
    alone = Alone()
    conn = alone.join()
    alone.node.handle(Heard(msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.0.7")), HERE), 2.0)
    alone.node.handle(TimerDue(), 2.1)
    assert len(alone.dialed()) == 1
    alone.hear(conn, 2.3, frames.Confirm(session=SESSION, epoch=1))
    assert alone.step() is TryingPaths, "it still tries the other address"
    # The process was stopped meanwhile, and the time of that address is over.
    alone.node.handle(InterfacesChanged(), 2.1 + ADDRESS_SECONDS + 2.0)
    alone.done()
    assert isinstance(alone.said[-1], frames.Confirmed)
