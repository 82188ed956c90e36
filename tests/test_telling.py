"""Telling a loser: one HOST_SEEN on a connection that both sides have proved, and no more."""

from __future__ import annotations

import itertools

from mingle.protocol.connection_race import ADDRESS_SECONDS
from mingle.protocol.handshake import HostConversation
from mingle.protocol.machine import Dial, Effect, Hangup, Identity, Write
from mingle.protocol.telling import MAX_TOLD, TELL_AGAIN_SECONDS, Notifier
from mingle.wire import frames
from mingle.wire.datagrams import Offer
from mingle.wire.frames import HostSeen, ProcessInfo

OWN, LOSER = b"A" * 16, b"T" * 16
IDENTITY = Identity(
    job="job", attempt="", member=OWN, rank=None, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)


def offer(session: bytes) -> Offer:
    return Offer(job="job", session=session, host=session, addresses=("10.0.0.9",), port=4000, world_size=2)


class Teller:
    """One that tells, and the host that it tells."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.own: Offer | None = offer(OWN)
        ids = itertools.count(1)
        self.telling = Notifier(IDENTITY, lambda: self.own, key=None, new_id=ids.__next__, effects=self.effects)

    def tell(self, now: float, *, session: bytes = LOSER, stands: bool = False) -> list[int]:
        """The connections that were dialled for it."""
        self.telling.tell(offer(session), "eth0", stands=stands, now=now)
        dialled = [effect.conn for effect in self.effects if isinstance(effect, Dial)]
        self.effects.clear()
        return dialled

    def answer(
        self, conn: int, now: float, *, session: bytes = LOSER
    ) -> tuple[HostConversation, list[frames.AnyFrame]]:
        """The other side answers; returns what it hears after the proof."""
        host = HostConversation(job="job", attempt="", session=session, addresses=("10.0.0.9",), port=4000)
        self.telling.connected(conn, "10.0.0.1", "eth0")
        self._carry(host)
        self.telling.received(conn, host.data_to_send(), now)
        return host, self._carry(host)

    def _carry(self, host: HostConversation) -> list[frames.AnyFrame]:
        heard: list[frames.AnyFrame] = []
        for effect in self.effects:
            if isinstance(effect, Write):
                heard += host.receive_data(effect.data)
        self.effects[:] = [effect for effect in self.effects if not isinstance(effect, Write)]
        return heard


def test_the_loser_hears_of_us_and_is_hung_up_on() -> None:
    teller = Teller()
    (conn,) = teller.tell(0.0, stands=True)
    assert teller.telling.owns(conn)
    host, heard = teller.answer(conn, 0.1)
    assert host.hello is not None
    assert (host.hello.member, host.hello.purpose) == (OWN, "rival")
    assert heard == [HostSeen(offer=offer(OWN), stands=True)]
    assert teller.effects[-1] == Hangup(conn)
    assert not teller.telling.owns(conn)


def test_who_makes_way_itself_meanwhile_says_nothing() -> None:
    teller = Teller()
    (conn,) = teller.tell(0.0)
    teller.own = None
    _, heard = teller.answer(conn, 0.1)
    assert heard == []
    assert not teller.telling.owns(conn)


def test_the_same_one_is_not_called_again_at_once() -> None:
    teller = Teller()
    (conn,) = teller.tell(0.0)
    assert teller.tell(2 * TELL_AGAIN_SECONDS) == [], "it is being called"
    teller.telling.disconnected(conn, "refused", 0.1)
    assert teller.tell(TELL_AGAIN_SECONDS - 0.01) == []
    assert len(teller.tell(TELL_AGAIN_SECONDS)) == 1


def test_one_is_no_reason_not_to_call_another() -> None:
    teller = Teller()
    first, second = teller.tell(0.0), teller.tell(0.0, session=b"U" * 16)
    assert len(first) == len(second) == 1
    assert teller.telling.owns(first[0])
    assert teller.telling.owns(second[0])


def test_somebody_else_at_the_address_is_told_nothing() -> None:
    teller = Teller()
    (conn,) = teller.tell(0.0)
    teller.telling.connected(conn, "10.0.0.1", "eth0")
    teller.effects.clear()
    teller.telling.received(conn, b"SSH-2.0-OpenSSH_9.6\r\n", 0.1)
    assert teller.effects == [Hangup(conn)]
    assert not teller.telling.owns(conn)


def test_who_stays_silent_is_given_up() -> None:
    teller = Teller()
    (conn,) = teller.tell(0.0)
    assert teller.telling.next_timer() == ADDRESS_SECONDS
    teller.telling.handle_timer(ADDRESS_SECONDS)
    assert teller.effects == [Hangup(conn)]
    assert teller.telling.next_timer() is None


def test_abandoned_it_hangs_up_everywhere() -> None:
    teller = Teller()
    connections = teller.tell(0.0) + teller.tell(0.0, session=b"U" * 16)
    teller.telling.abandon()
    assert teller.effects == [Hangup(conn) for conn in connections]
    assert teller.telling.next_timer() is None


def test_invented_hosts_are_forgotten_the_oldest_first() -> None:
    teller = Teller()
    for number in range(MAX_TOLD + 1):
        (conn,) = teller.tell(0.0, session=number.to_bytes(16, "big"))
        teller.telling.disconnected(conn, "refused", 0.0)
    assert teller.tell(0.1, session=bytes([0] * 15 + [MAX_TOLD])) == [], "remembered"
    assert len(teller.tell(0.1, session=bytes(16))) == 1, "forgotten"
