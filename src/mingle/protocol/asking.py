"""What a rank says and hears by datagrams until it has formed: pure.

Only the OFFERs of the own job are handed on; of all the rest a report is made, should the job not form.
"""

from __future__ import annotations

from msgspec import Struct

from mingle.protocol.lobby import BrowseGroup
from mingle.protocol.machine import Answer, Diagnostics, Effect, Identity, Multicast, Source, note, note_name
from mingle.protocol.membership import Membership
from mingle.protocol.pacing import Seeker
from mingle.protocol.sessions import Session
from mingle.wire.datagrams import Datagram, List, Offer, Seek


class Asking(Struct):
    """Asks by multicast, ever more rarely, and answers in the lobby."""

    identity: Identity
    membership: Membership
    seeker: Seeker
    lobby: BrowseGroup
    secured: bool
    """Whether this rank was given a secret."""
    effects: list[Effect]
    diagnostics: Diagnostics

    def heard(self, message: Datagram, source: Source, now: float) -> Offer | None:
        """A valid datagram came in; returns it if it is the OFFER of a host that ranks can join."""
        if isinstance(message, List):
            if message.member != self.identity.member:
                self._asked_in_lobby(message, source, now)
            return None
        if message.job != self.identity.job:
            self.diagnostics.other(message, source)
            return None
        if message.attempt != self.identity.attempt:
            note(self.diagnostics.other_attempts, message.attempt, source.address)
            return None
        if source.signed and not self.secured:
            self.diagnostics.signed_without_secret += 1
        if isinstance(message, Seek):
            self._heard_seek(message, source, now)
        elif isinstance(message, Offer):
            self.lobby.answered()
            if message.kind != "announcement":
                self.lobby.found()
                return message
            note_name(self.diagnostics.announcements, Session(message, ()).host_name)
        return None

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong."""
        ours = (message.job, message.attempt) == (self.identity.job, self.identity.attempt)
        if ours and not (isinstance(message, Seek) and message.kind == "announcement"):
            self.diagnostics.secret_signs += 1

    def _asked_in_lobby(self, message: List, source: Source, now: float) -> None:
        ours = message.job == self.identity.job
        if ours:
            self.diagnostics.seeker(message, source)
            self.lobby.overheard(now, seated=self.membership.seated)
        else:
            self.diagnostics.other(message, source)
        if self.membership.seated:
            return  # the host speaks for those that it has
        if source.multicast:
            self.lobby.asked(now)
        elif self.lobby.may_answer_by_unicast(now):
            self.effects.append(Answer(source, self.identity.seek()))

    def _heard_seek(self, seek: Seek, source: Source, now: float) -> None:
        if seek.member == self.identity.member:
            return
        self.diagnostics.seeker(seek, source)
        self.lobby.answered()
        if source.multicast:
            self.seeker.heard_seek(now)

    def timers(self) -> list[float | None]:
        """When :meth:`handle_timer` has something to do."""
        return [self.seeker.next_timer(), self.lobby.next_timer()]

    def handle_timer(self, now: float) -> None:
        """Says what is due."""
        if self.seeker.should_ask(now):
            self.effects.append(Multicast(self.identity.seek()))
        if self.lobby.should_ask(now):
            self.effects.append(Multicast(self.identity.list(), lobby=True))
        if self.lobby.should_answer(now):
            self.effects.append(Multicast(self.identity.seek(), lobby=True))
