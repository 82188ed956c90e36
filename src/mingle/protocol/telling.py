"""Telling the hosts that should make way of our own session, over TCP: our datagrams may not reach them.

Each one is raced for on its addresses, hears in one HOST_SEEN who we are, and is hung up on.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from mingle.protocol.claims import DialBudget
from mingle.protocol.connection_race import ConnectionRace, Verdict, address_seconds, named
from mingle.protocol.handshake import Call, HandshakeFailed
from mingle.protocol.machine import Effect, Hangup, Identity, NewId
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer, Rejected

TELL_AGAIN_SECONDS = 1.0
"""How long after one call the next to the same host may come."""
# Hosts remembered; bounded against somebody who invents them.
MAX_TOLD = 64


class _Told(Struct):
    """A host that is being told of us, or was."""

    again_at: float
    race: ConnectionRace | None = None
    stands: bool = False
    """Whether its lower id does not beat us: somebody of ours can't reach it."""


class Notifier:
    """The calls of one host. ``own_offer`` returns what to say when one is answered; None: nothing any more."""

    def __init__(
        self,
        identity: Identity,
        own_offer: Callable[[], Offer | None],
        *,
        key: JobKey | None,
        new_id: NewId,
        effects: list[Effect],
        dials: DialBudget | None = None,
    ) -> None:
        self._identity = identity
        self._own_offer = own_offer
        self._key = key
        self._new_id = new_id
        self._effects = effects
        self._dials = dials
        self._told: dict[bytes, _Told] = {}

    def tell(self, offer: Offer, interface: str, *, stands: bool, now: float, sender: str = "") -> None:
        """Calls the host of that session, unless it was called a moment ago."""
        told = self._told.get(offer.session)
        if told is None:
            if len(self._told) >= MAX_TOLD:
                oldest = self._told.pop(next(iter(self._told)))
                if oldest.race is not None:
                    oldest.race.abandon()
            told = self._told[offer.session] = _Told(now)
        if told.race is not None or now < told.again_at:
            return
        told.again_at, told.stands = now + TELL_AGAIN_SECONDS, stands
        told.race = ConnectionRace(
            self._call_to(offer.session),
            named(offer, interface, sender),
            offer.port,
            key=self._key,
            new_id=self._new_id,
            effects=self._effects,
            now=now,
            patience=address_seconds(self._identity.world_size),
            dials=self._dials,
        )

    def _call_to(self, session: bytes) -> Call:
        return Call(
            job=self._identity.job,
            attempt=self._identity.attempt,
            member=self._identity.member,
            session=session,
            purpose="rival",
            who=self._identity.who,
        )

    def _settle(self, told: _Told, race: ConnectionRace) -> None:
        """Once the other host is on the line: says who we are, and that is all."""
        if race.verdict is Verdict.RACING:
            return
        offer = self._own_offer()
        if race.conversation is not None and offer is not None:
            race.conversation.send(frames.HostSeen(offer=offer, stands=told.stands))
        race.abandon()
        told.race = None

    # --- connections -----------------------------------------------------------------------------------------------

    def _owner(self, conn: int) -> tuple[_Told, ConnectionRace] | None:
        for told in self._told.values():
            if told.race is not None and told.race.owns(conn):
                return told, told.race
        return None

    def _call(self, conn: int) -> tuple[_Told, ConnectionRace]:
        found = self._owner(conn)
        assert found is not None
        return found

    def owns(self, conn: int) -> bool:
        """Tells whether a connection was dialled here."""
        return self._owner(conn) is not None

    def connected(self, conn: int, local_address: str, interface: str) -> None:
        """A connection stands."""
        _, race = self._call(conn)
        race.connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in."""
        told, race = self._call(conn)
        try:
            race.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self._effects.append(Hangup(conn))
            race.disconnected(conn, str(failure), now)
        self._settle(told, race)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        told, race = self._call(conn)
        race.disconnected(conn, reason, now)
        self._settle(told, race)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [told.race.next_timer() for told in self._told.values() if told.race is not None]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Lets the races go on."""
        for told in self._told.values():
            if told.race is not None:
                told.race.handle_timer(now)
                self._settle(told, told.race)

    def abandon(self) -> None:
        """Hangs up everywhere and forgets who was told."""
        for told in self._told.values():
            if told.race is not None:
                told.race.abandon()
        self._told.clear()
