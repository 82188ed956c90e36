"""For which of the sessions that a rank has heard of it races, and when: pure.

Only one may be joined at a time, and none while the job runs in another one; but whether a sealed one lives is asked
always.
"""

from __future__ import annotations

from msgspec import Struct, field

from mingle.protocol.blocking import Blocking
from mingle.protocol.connection_race import ClaimBudget, DialTarget, Verdict, merged, named
from mingle.protocol.machine import Diagnostics, note
from mingle.protocol.membership import Membership
from mingle.protocol.moving import Moving
from mingle.protocol.sessions import Session, Sessions
from mingle.wire import frames
from mingle.wire.datagrams import Offer

TELL_HOST_SECONDS = 1.0
"""How often at most a member tells its host of the same other host."""


class Racing(Struct):
    """Starts the races and looks how they end."""

    sessions: Sessions
    membership: Membership
    blocking: Blocking
    moving: Moving
    diagnostics: Diagnostics
    _suspicion: ClaimBudget = field(default_factory=ClaimBudget)

    def offered(self, offer: Offer, interface: str, now: float, *, sender: str = "") -> None:
        """A datagram speaks of a host of our job."""
        session = self.sessions.get(offer.session)
        targets = merged(named(offer, interface, sender), () if session is None else session.targets)
        if session is None:
            note(self.diagnostics.hosts, Session(offer, targets).host_name, "heard")
            session = self._remember(offer, targets, sender)
            if session is None:
                return
        session.offer = offer
        if session.race is not None:
            if session is self.membership.current and session.race.address not in offer.addresses:
                # The address that we are connected to has gone, and TCP would wait for it.
                self.membership.doubt(now)
            reopened = session.race.purpose == "probe" and offer.takes_members
            if not reopened or session.race.verdict is Verdict.RACING or now < session.retry_at:
                session.race.add(targets)
                return
            # It was sealed when we asked, and says that it takes members again: that is proved by joining.
            session.hang_up()
            session.retry_later(now)
            session.targets = targets
            self.prove(session, now)
            return
        session.targets = targets
        current = self.membership.current
        if current is not None and session is not current and offer.takes_members:
            self.membership.doubt(now)
            if self.membership.seated and self.membership.identity.rank is None and now >= session.retry_at:
                # Our host may not hear the other's datagrams.
                session.retry_at = now + TELL_HOST_SECONDS
                self.membership.send(frames.HostSeen(offer=offer))
        elif now >= session.retry_at and session is not current:
            self.prove(session, now)

    def make_for(self, offer: Offer, interface: str, now: float, *, sender: str = "") -> None:
        """Joins that session, without waiting for a datagram of its host."""
        targets = named(offer, interface, sender)
        session = self.sessions.get(offer.session) or self._remember(offer, targets)
        if session is not None and session.race is None:
            session.offer, session.targets = offer, targets
            self.prove(session, now)

    def _remember(self, offer: Offer, targets: list[DialTarget], sender: str = "") -> Session | None:
        return self.sessions.remember(offer, targets, keep=self.membership.return_to, sender=sender)

    def prove(self, session: Session, now: float) -> bool:
        """Starts a race for a session, unless it is one to join and another comes first. Tells whether it did.

        Should that other one end, this one will be heard again.
        """
        if session.purpose == "join" and self.bound_elsewhere(session):
            # It is said to take members by now: then it does not run without us.
            self.blocking.unblock(session)
            return False
        self.sessions.race(session, now)
        self.blocking.weigh(now)
        return True

    def bound_elsewhere(self, candidate: Session) -> bool:
        """Whether the candidate may not be joined now: we have a host, may have one, or the job runs elsewhere."""
        membership = self.membership
        if candidate.name == self.moving.to:
            return False
        if membership.current is not None or membership.return_to is not None:
            return membership.current is not None or candidate is not membership.return_to
        return self.blocking.known(candidate)

    def rewired(self, now: float) -> None:
        """Our interfaces have changed: other ways may lead to our host now."""
        session = self.membership.current
        if session is not None and session.race is not None and not self.membership.has_confirmed:
            session.race.prove_again(now)

    @property
    def host_in_sight(self) -> bool:
        """Whether we have a host, or are about to see whether we have one."""
        return self._has_host or self._races

    def expects_host(self, now: float) -> bool:
        """Whether we need not be host ourselves: as before, but hosts that are only claimed are not waited for long."""
        self._weigh(now)
        return self._has_host or (self._races and not self._suspicion.spent)

    @property
    def _has_host(self) -> bool:
        return self.membership.current is not None or self.membership.return_to is not None

    @property
    def _races(self) -> bool:
        return any(each.races_to("join") for each in self.sessions)

    def stop(self) -> None:
        """Hangs up everywhere."""
        self.sessions.hang_up()
        self._suspicion = ClaimBudget()

    def settle(self, session: Session, now: float) -> None:
        """Looks whether a race was lost on every address."""
        race = session.race
        if race is None or race.verdict not in (Verdict.DEAD, Verdict.SILENT):
            return
        session.race = None
        session.retry_later(now)
        failures = "; ".join(f"{address} {reason}" for address, reason in race.failures.items())
        note(self.diagnostics.hosts, session.host_name, f"not reached: {failures}")
        membership = self.membership
        if session is membership.return_to and race.verdict is Verdict.DEAD and membership.outcome is None:
            # Refused everywhere: its process is gone, and there is nothing to come back to.
            membership.return_to = None
        silent = race.purpose == "probe" and race.verdict is Verdict.SILENT and self.blocking.silent(session, now)
        asked_again = silent and self.prove(session, now)
        if not asked_again and session.blocking_since is not None:
            # Dead, or said to take members meanwhile while we have a host: in neither case it is in the way.
            self.blocking.free(session, now)

    def _weigh(self, now: float) -> None:
        """Takes note of whether a host is raced for that is only claimed to be there."""
        self._suspicion.note(now, pending=self._races)

    def timers(self) -> list[float | None]:
        """When :meth:`handle_timer` has something to do."""
        times = [self._suspicion.next_timer()]
        for session in self.sessions:
            if session.race is not None:
                times.append(session.race.next_timer())
            elif session is self.membership.return_to:
                times.append(session.retry_at)
        return times

    def handle_timer(self, now: float) -> None:
        """Goes on with every race, and tries the session to return to again."""
        for session in self.sessions:
            if session.race is not None:
                session.race.handle_timer(now)
                self.settle(session, now)
            elif session is self.membership.return_to and now >= session.retry_at:
                if now < self.membership.return_until:
                    self.prove(session, now)
                else:
                    self.membership.return_to = None
        self._weigh(now)
