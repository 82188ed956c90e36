"""A member that is sent from one host to another. Whole elections run in tests/lan."""

from __future__ import annotations

import itertools

import pytest

from mingle.protocol.connection_race import DialTarget
from mingle.protocol.machine import Diagnostics, Effect, Identity
from mingle.protocol.membership import RETURN_SECONDS, Membership, Step
from mingle.protocol.moving import MOVE_SECONDS, Moving
from mingle.protocol.sessions import RETRY_SECONDS, Session, Sessions
from mingle.wire.datagrams import Offer
from mingle.wire.frames import ProcessInfo

IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=None, world_size=3, node="n", who=ProcessInfo(hostname="h", pid=1)
)


def offer(name: bytes, host: bytes | None = None) -> Offer:
    return Offer(job="job", session=name, host=host or name, addresses=("10.0.0.1",), port=4000, world_size=3)


class Seated:
    """A member with a seat, and a second session that was heard of."""

    def __init__(self) -> None:
        effects: list[Effect] = []
        self.sessions = Sessions(IDENTITY, None, itertools.count(1).__next__, effects)
        self.membership = Membership(IDENTITY, self.sessions, effects, Diagnostics())
        self.moving = Moving(self.sessions, self.membership)
        self.old, self.new = self.heard(b"S" * 16), self.heard(b"R" * 16)
        self.membership.join(self.old)
        self.membership.step = Step.SEATED

    def heard(self, name: bytes) -> Session:
        session = self.sessions.remember(offer(name), [DialTarget("10.0.0.1", "eth0")], keep=None)
        assert session is not None
        return session


def test_the_old_host_is_kept_until_the_new_one_is_reached() -> None:
    seated = Seated()
    assert seated.moving.sent_after(seated.new.offer, 1.0)
    assert (seated.moving.to, seated.moving.until) == (seated.new.name, 1.0 + MOVE_SECONDS)
    assert seated.membership.current is seated.old
    seated.moving.arrived(2.0)
    assert seated.membership.current is None
    assert seated.old.retry_at == 2.0 + RETURN_SECONDS
    assert seated.moving.until is None


@pytest.mark.parametrize("step", [Step.CONFIRMED, Step.PROVING_STORE, Step.ACKED, Step.FORMED])
def test_who_has_confirmed_goes_nowhere(step: Step) -> None:
    seated = Seated()
    seated.membership.step = step
    assert not seated.moving.sent_after(seated.new.offer, 1.0)
    assert seated.moving.to is None


def test_nobody_is_sent_to_where_it_is() -> None:
    seated = Seated()
    assert not seated.moving.sent_after(offer(b"S" * 16), 1.0)
    assert seated.membership.current is seated.old


@pytest.mark.parametrize("host", [b"S" * 16, b"A" * 16], ids=["the higher id", "the lower id"])
def test_of_two_that_make_way_for_each_other_the_lower_id_hosts_again(host: bytes) -> None:
    seated = Seated()
    seated.old.offer = offer(b"S" * 16, host=host)
    assert not seated.moving.sent_after(offer(b"R" * 16, host=IDENTITY.member), 1.0)
    assert seated.moving.to is None
    assert (seated.membership.current is seated.old) is (host < IDENTITY.member)


def test_a_host_that_is_not_reached_in_time_is_given_up() -> None:
    seated = Seated()
    seated.moving.sent_after(seated.new.offer, 1.0)
    seated.sessions.race(seated.new, 1.0)
    seated.moving.handle_timer(0.9 + MOVE_SECONDS)
    assert seated.new.race is not None
    seated.moving.handle_timer(1.0 + MOVE_SECONDS)
    assert seated.new.race is None
    assert seated.new.retry_at == 1.0 + MOVE_SECONDS + RETRY_SECONDS
    assert seated.moving.to is None
    assert seated.membership.current is seated.old
