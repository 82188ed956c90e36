"""A host that makes way for another host of its job, where ranks are assigned: what it has told, and what it was told.

When to do so is decided by :mod:`mingle.protocol.election`, with what the members report here.
"""

from __future__ import annotations

from msgspec import Struct, field

from mingle.protocol.machine import Diagnostics, note
from mingle.wire import frames
from mingle.wire.datagrams import Offer

MAX_SIGHTINGS = 64
"""Reports of other hosts are handed out after each frame; bounded against a member that sends many."""


class MakingWay(Struct):
    """How far it has come with that."""

    diagnostics: Diagnostics
    begun: bool = False
    """It takes no members and confirms nothing, for the time that it takes to join the other host."""
    moved: frames.Redirect | None = None
    """Where its members were sent; also everybody who still comes."""
    stranded: bool = False
    """A member could not follow where it was sent."""
    _sightings: list[tuple[Offer, bool]] = field(default_factory=list)

    def begin(self) -> None:
        """Stops taking members."""
        self.begun = True

    def send_after(self, offer: Offer) -> frames.Redirect:
        """Returns the word that sends the members to that host."""
        self.moved, self.stranded = frames.Redirect(offer=offer), False
        return self.moved

    def end(self) -> None:
        """Takes members again: the other host is gone, or not reached by all."""
        self.begun, self.moved, self.stranded = False, None, False

    def sighted(self, frame: frames.HostSeen) -> None:
        """A member reports another host."""
        if len(self._sightings) < MAX_SIGHTINGS:
            self._sightings.append((frame.offer, frame.stands))

    def take_sightings(self) -> list[tuple[Offer, bool]]:
        """Hands out which other hosts were reported, each with whether it stands against a lower id."""
        seen, self._sightings = self._sightings, []
        return seen

    def strand(self, who: frames.ProcessInfo, session: bytes) -> None:
        """A member can't reach the host of that session."""
        if self.moved is not None and self.moved.offer.session == session:
            self.stranded = True
            note(self.diagnostics.hosts, self.moved.offer.host_name, f"not reached by {who}")
