"""Telling the hosts that should make way of our own session, over TCP: our datagrams may not reach them.

Each one is raced for on its addresses, hears in one SIGHTING who we are, and is hung up on.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from mingle.protocol.claims import DialBudget
from mingle.protocol.control import Call, HandshakeFailed
from mingle.protocol.machine import Effect, Hangup, Identity, NewId
from mingle.protocol.proving import Proving, Verdict, address_seconds, named
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
    proving: Proving | None = None
    stands: bool = False
    """Whether its lower id does not beat us: somebody of ours can't reach it."""


class Telling:
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
                if oldest.proving is not None:
                    oldest.proving.abandon()
            told = self._told[offer.session] = _Told(now)
        if told.proving is not None or now < told.again_at:
            return
        told.again_at, told.stands = now + TELL_AGAIN_SECONDS, stands
        told.proving = Proving(
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

    def _settle(self, told: _Told, proving: Proving) -> None:
        """Once the other host is on the line: says who we are, and that is all."""
        if proving.verdict is Verdict.RACING:
            return
        offer = self._own_offer()
        if proving.conversation is not None and offer is not None:
            proving.conversation.send(frames.Sighting(offer=offer, stands=told.stands))
        proving.abandon()
        told.proving = None

    # --- connections -----------------------------------------------------------------------------------------------

    def _owner(self, conn: int) -> tuple[_Told, Proving] | None:
        for told in self._told.values():
            if told.proving is not None and told.proving.owns(conn):
                return told, told.proving
        return None

    def _call(self, conn: int) -> tuple[_Told, Proving]:
        found = self._owner(conn)
        assert found is not None
        return found

    def owns(self, conn: int) -> bool:
        """Tells whether a connection was dialled here."""
        return self._owner(conn) is not None

    def connected(self, conn: int, local_address: str, interface: str) -> None:
        """A connection stands."""
        _, proving = self._call(conn)
        proving.connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in."""
        told, proving = self._call(conn)
        try:
            proving.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self._effects.append(Hangup(conn))
            proving.closed(conn, str(failure), now)
        self._settle(told, proving)

    def closed(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        told, proving = self._call(conn)
        proving.closed(conn, reason, now)
        self._settle(told, proving)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [told.proving.next_timer() for told in self._told.values() if told.proving is not None]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Lets the races go on."""
        for told in self._told.values():
            if told.proving is not None:
                told.proving.handle_timer(now)
                self._settle(told, told.proving)

    def abandon(self) -> None:
        """Hangs up everywhere and forgets who was told."""
        for told in self._told.values():
            if told.proving is not None:
                told.proving.abandon()
        self._told.clear()
