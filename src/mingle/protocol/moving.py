"""Where ranks are assigned: a member that its own host sends to another one. Pure.

The old host stays ours until we have a proved connection to the new one. If that is not reached in time, the old one
is told (UNREACHABLE) and kept, since it may then open again (:mod:`mingle.protocol.election`).
"""

from __future__ import annotations

from msgspec import Struct

from mingle.protocol.membership import Membership
from mingle.protocol.sessions import Sessions
from mingle.wire import frames
from mingle.wire.datagrams import Offer

MOVE_SECONDS = 2.0
"""How long a member may take to reach the host that its own sends it to."""


class Moving(Struct):
    """The way from one host to another."""

    sessions: Sessions
    membership: Membership
    to: bytes | None = None
    """The session we are sent to."""
    until: float | None = None
    """By when it must be reached."""

    def sent_after(self, offer: Offer, now: float) -> bool:
        """Our host makes way for another one and sends us after it. Tells whether that one is to be joined now."""
        membership = self.membership
        if membership.has_confirmed or membership.current is None or offer.session == membership.current.name:
            return False
        if offer.host == membership.identity.member:
            # Each makes way for the other, perhaps in a circle of several: the lower id hosts again.
            if membership.identity.member < membership.current.offer.host:
                membership.move_on(now)
            else:
                membership.send(frames.Unreachable(session=offer.session))
            return False
        self.to, self.until = offer.session, now + MOVE_SECONDS
        return True

    def arrived(self, now: float) -> None:
        """The other host is reached: leave the old one."""
        self.stop()
        self.membership.move_on(now)

    def stop(self) -> None:
        """We are on the way to nobody."""
        self.to = self.until = None

    def handle_timer(self, now: float) -> None:
        """The other host was not reached in time: say so, and stay."""
        if self.until is None or now < self.until or self.to is None:
            return
        name = self.to
        self.stop()
        session = self.sessions.get(name)
        if session is not None:
            session.hang_up()
            session.retry_later(now)
        if self.membership.seated:
            self.membership.send(frames.Unreachable(session=name))
