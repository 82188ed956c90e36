"""A host among datagrams: when it speaks, whom it answers, and what it remembers of what it heard.

No more than hints come in here. The only one that leads anywhere, the OFFER of another session of the same job, is
handed out for somebody else to prove.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from mingle.protocol.introduction import Introduction
from mingle.protocol.lobby import BrowseGroup
from mingle.protocol.machine import Answer, Diagnostics, Effect, Multicast, Source, note, note_name
from mingle.protocol.pacing import Announcer
from mingle.wire.datagrams import Datagram, List, Offer, Seek


class Presence:
    """The datagrams of one host. ``offer`` returns what it says of itself at that moment."""

    def __init__(
        self,
        introduction: Introduction,
        offer: Callable[[], Offer],
        *,
        secured: bool,
        diagnostics: Diagnostics,
        effects: list[Effect],
        rng: random.Random,
        deadline: float,
    ) -> None:
        self._identity = introduction.identity
        self._session = introduction.session
        self._offer = offer
        self._secured = secured
        self._diagnostics = diagnostics
        self._effects = effects
        self._announcer = Announcer(introduction.started)
        self._lobby = BrowseGroup(introduction.started, deadline, rng)

    # --- what was heard --------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> Offer | None:
        """A valid datagram came in. Returns it if it names another session of this job, which may be alive."""
        if isinstance(message, List):
            if message.member != self._identity.member:
                self._asked_in_lobby(message, source, now)
        elif message.job != self._identity.job:
            self._diagnostics.other(message, source)
        elif message.attempt != self._identity.attempt:
            note(self._diagnostics.other_attempts, message.attempt, source.address)
        else:
            if source.signed and not self._secured:
                self._diagnostics.signed_without_secret += 1
            if isinstance(message, Seek):
                self._asked(message, source)
            elif isinstance(message, Offer) and message.session != self._session:
                return self._other_session(message)
        return None

    def _asked(self, message: Seek, source: Source) -> None:
        if message.member != self._identity.member:  # else it is our own, from before we were a host
            self._diagnostics.seeker(message, source)
        if source.multicast:
            self._announcer.asked()
        else:
            self._effects.append(Answer(source, self._offer()))

    def _asked_in_lobby(self, message: List, source: Source, now: float) -> None:
        if message.job != self._identity.job:
            self._diagnostics.other(message, source)
        else:
            self._diagnostics.seeker(message, source)
        if source.multicast:
            self._lobby.asked(now)
        elif self._lobby.may_answer_by_unicast(now):
            self._effects.append(Answer(source, self._offer()))

    def _other_session(self, offer: Offer) -> Offer | None:
        if offer.kind == "announcement":
            who = f"host {offer.hostname} ({offer.addresses[0]}), pid {offer.pid}"
            note_name(self._diagnostics.announcements, who)
            return None
        if self._announcer.sealed and offer.state == "open":
            # It should hear that the job runs. Two open hosts dial each other, which tells both.
            self._announcer.asked()
        return offer

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong: a hint for the report, and no more than that."""
        onlooker = isinstance(message, Seek) and message.kind == "announcement"
        ours = (message.job, message.attempt) == (self._identity.job, self._identity.attempt)
        if ours and not onlooker:
            self._diagnostics.secret_signs += 1

    # --- how the session stands ------------------------------------------------------------------------------------

    def seal(self) -> None:
        """The session takes no members any more: speak when asked only."""
        self._announcer.sealed = True

    def reopen(self, now: float) -> None:
        """It takes members again."""
        self._announcer.sealed = False
        self.burst(now)

    def burst(self, now: float) -> None:
        """Speaks several times soon, as at the beginning."""
        self._announcer.burst(now)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self, *, finished: bool) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        lobby = self._lobby.answer_timer() if finished else self._lobby.next_timer()
        times = [self._announcer.next_timer(), lobby]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float, *, finished: bool, mute: bool) -> None:
        """Says what is due; once the gathering is ``finished`` the lobby is only answered, ``mute`` offers nothing."""
        if self._announcer.should_speak(now) and not mute:
            self._effects.append(Multicast(self._offer()))
        if not finished and self._lobby.should_ask(now):
            self._effects.append(Multicast(self._identity.list(), lobby=True))
        if self._lobby.should_answer(now):
            self._effects.append(Multicast(self._offer(), lobby=True))
