"""Leader election: a process that was given no rank looks for a host, and becomes one when there is none. Pure.

Every process runs the same command. It looks for a host; one that hears of none for a while (shorter for a lower member
id) opens a session of its own (:class:`~mingle.protocol.node.Node`). The one with the lowest id does so earlier if it
hears all the others ask (:class:`Attendance`): no host can be among them. So there can be several hosts for a moment,
and the rules of their :class:`Competition` make them one. As in the bully algorithm (Garcia-Molina, "Elections in a
Distributed Computing System", 1982) one order of ids decides, here the lower id; but a loser believes only what it has
proved itself:

* A host calls every other host that it hears of, by a datagram or by the HOST_SEEN of a member. The other one proves
  its session over TCP and says whether it is open.
* If that one is open and has the lower id, this host *closes*: it says CLOSED with the winner's OFFER. Its members, and
  its own process, look for a host again, at first where the OFFER says.
* If that one has the higher id, this host says HOST_SEEN to it, which then calls in its turn: it may not hear datagrams
  of this host.
* A firewall can keep every call away from the host with the lower id. A host that calls it in vain says UNREACHABLE on
  the connection on which it was called. The host that made this connection has proved the other one by it, and closes.

Only a session that is OPEN is closed for another one, but for LEAD (below) and for sessions of agents that run
(:mod:`mingle.elastic.host`). A session that is closed decides nothing more. A process asks another host for a seat only
when its own session is closed. So it never counts in two sessions that can both form.

The winner of an election need not be the first in order, which must host the job. A host hands its session over once
all members have confirmed: it sends LEAD to the first (:class:`~mingle.protocol.session.phases.HandingOver`). That
process leaves the session, opens one of its own, and answers with its OFFER. The host calls it like any other host and
closes for it, whatever their ids; then it joins as the last one, so the new session can't be full before the old one is
closed. Where the host can't reach the first, it keeps the job and says UNREACHABLE. No other rule knows of the order,
so a false one can't split an election.

Ids are totally ordered, so hosts do not close in a circle, unless one of them becomes reachable just when it was called
UNREACHABLE. Then all of them look again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from msgspec import structs

from mingle.protocol.effects import Multicast
from mingle.protocol.explain.observations import note
from mingle.protocol.host import Host
from mingle.protocol.links.race import ConnectionRace, RaceState, named
from mingle.protocol.machine import Identity
from mingle.protocol.pacing import COUNTED_RANKS
from mingle.protocol.session.conflicts import ConflictingHosts
from mingle.protocol.session.phases import HandingOver, Open
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer, Seek

ELECT_AFTER_SECONDS = 0.6
"""The time for which every process looks for a host before the first becomes one. It covers a few questions, so that
one can be lost."""
ELECT_SOONEST_SECONDS = 0.2
"""The time after a process's first question before which it never becomes the host: a host that is there answers
sooner, also one that keeps back its next answer (:data:`mingle.protocol.pacing.SEALED_ANSWER_GAP_SECONDS`)."""
ATTENDANCE_SECONDS = 3.0
"""The time for which a process that was heard to ask counts as there."""
LOWER_SECONDS = 3.0
"""The longest time to wait for a process with a lower id that looks for a host in a shared folder as well: it is about
to become one, and listings can be late."""
ELECT_SPREAD_SECONDS = 0.3
"""The time after that over which the processes become hosts, by their member ids."""
ELECT_SPREAD_SECONDS_PER_RANK = 0.0005
ELECT_SPREAD_MAX_SECONDS = 3.0
"""The bound of that time in a large job."""
CALL_AGAIN_SECONDS = 1.0
"""The least time between two calls to the same other host, or two HOST_SEENs to it."""


class Candidacy:
    """The rules among processes that can all become the host: how long each waits first, and which host closes."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def patience(self) -> float:
        """Return how long to look for a host before becoming one, in seconds: a lower member id waits less."""
        spread = min(
            ELECT_SPREAD_SECONDS + ELECT_SPREAD_SECONDS_PER_RANK * self._identity.world_size, ELECT_SPREAD_MAX_SECONDS
        )
        return ELECT_AFTER_SECONDS + spread * int.from_bytes(self._identity.member[:8], "big") / 2**64

    def is_other_host(self, message: Datagram) -> TypeGuard[Offer]:
        """Return whether this is the OFFER of another host of the same job."""
        return (
            isinstance(message, Offer)
            and (message.job, message.attempt) == (self._identity.job, self._identity.attempt)
            and message.kind == self._identity.kind
            and message.host != self._identity.member
        )

    def competes(self, message: Datagram) -> TypeGuard[Offer]:
        """Return whether this is another open session of the same job."""
        return self.is_other_host(message) and message.state == "open"

    def loses_to(self, offer: Offer) -> bool:
        """Return whether this host closes for that one."""
        # A host that was given its rank is no candidate: a process that joins it is told that ranks are mixed.
        return offer.host < self._identity.member or not offer.assigned


class Attendance:
    """The processes of the job that were heard lately: whether all of them look for a host.

    An election waits for a host that may be there and was not heard yet. Once every process of the job has asked for
    one, there is none. The attendance only ends the wait; it decides nothing else, since what it counts is not proved:
    a process that was started again counts twice, and a stranger can ask under any id. A wrong count costs one session
    that is opened early.

    Args:
        identity: of this process; its world size is the number of processes that are waited for. Of agents that is
            MAX: fewer found no session before they are a few seconds old, so a host would gain them nothing.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._asked: dict[bytes, float] = {}
        """When each other process was heard to ask last, in this order."""
        self._offered_at = float("-inf")

    def heard(self, message: Datagram, now: float) -> None:
        """Take note of a datagram."""
        identity = self._identity
        if not isinstance(message, Seek | Offer) or (message.job, message.attempt) != (identity.job, identity.attempt):
            return
        if isinstance(message, Offer):
            self._offered_at = now
        elif message.kind == identity.kind and message.rank is None and message.member != identity.member:
            self._asked.pop(message.member, None)
            self._asked[message.member] = now
            if len(self._asked) > 2 * COUNTED_RANKS:  # a stranger invents ids
                del self._asked[next(iter(self._asked))]

    def complete(self, now: float) -> bool:
        """Return whether all are there, none of them has a host, and this process has the lowest id."""
        others = self._identity.world_size - 1
        if self._identity.world_size > COUNTED_RANKS or len(self._asked) < others:
            return False
        lately = [member for member, at in self._asked.items() if at >= now - ATTENDANCE_SECONDS]
        return len(lately) >= others and not self.has_host(now) and self.comes_first(lately)

    def has_host(self, now: float) -> bool:
        """Return whether any process has lately offered itself as the host."""
        return self._offered_at >= now - ATTENDANCE_SECONDS

    def comes_first(self, others: Sequence[bytes]) -> bool:
        """Return whether this process has a lower id than all these."""
        return self._identity.member < min(others, default=b"\xff")


class Patience:
    """How long a process that expects no host looks for one before it becomes one.

    Args:
        seconds: how long (`Candidacy.patience`).
        attendance: can end it early.
        folder_seconds: how long shared folders can take to show a host; it begins after that.
    """

    def __init__(self, seconds: float, attendance: Attendance, folder_seconds: float) -> None:
        self.attendance = attendance
        self.ends_at: float | None = None
        """When the process becomes the host, as of the last event; None: it does not look for one."""
        self._seconds = seconds
        self._folder_seconds = folder_seconds
        self._folders_until = 0.0
        """The time until which the shared folders may not have shown a host yet."""
        self._until: float | None = None
        """When it ends if not all are there."""

    def begin(self, now: float) -> None:
        """Look for a host from now on."""
        self._folders_until = now + self._folder_seconds
        self.ends_at = self._until = self._folders_until + self._seconds

    def stop(self) -> None:
        """Look for no host: one is in sight, or hosts here."""
        self.ends_at = self._until = None

    def go_on(self, asked_at: float | None, now: float) -> None:
        """Find out when it ends, after an event that has brought no host in sight.

        Args:
            asked_at: the time of the first question; None: none was asked yet.
            now: the time.
        """
        if self._until is None:
            self.begin(now)
        assert self._until is not None
        self.ends_at = self.elects_at(self._until, asked_at, now)

    def elects_at(self, until: float, asked_at: float | None, now: float) -> float:
        """Return when the process becomes the host: once its patience ends, or earlier where all are there."""
        if asked_at is None or not self.attendance.complete(now):
            return until
        return min(until, max(asked_at + ELECT_SOONEST_SECONDS, self._folders_until))

    def folders_listed(self, lower: bool, now: float) -> None:
        """Handle a listing of the shared folders that has this process in it, and so all that wrote before.

        Args:
            lower: whether it has a process with a lower id.
            now: the time.
        """
        if self._until is not None and now < self._folders_until:
            self._folders_until = min(self._folders_until, now + (LOWER_SECONDS if lower else 0.0))
            self._until = self._folders_until + self._seconds


class Competition(ConflictingHosts):
    """The other hosts as an elected host sees them: of each two that both take members, one closes.

    Args:
        host: of this process.
        candidacy: the rules by which hosts compete.
        close_for: ends the session of this host for another one, which has proved itself.
        asked_by: the session whose host has asked this process to lead: that one closes, whatever the ids.
    """

    def __init__(
        self,
        host: Host,
        candidacy: Candidacy,
        close_for: Callable[[KnownSession, float], None],
        *,
        asked_by: bytes = b"",
    ) -> None:
        super().__init__(host.identity, host.conflicts.sightings, host.links)
        self._host = host
        self._candidacy = candidacy
        self._close_for = close_for
        self._asked_by = asked_by

    def can_close(self, other: bytes | None = None) -> bool:
        """Return whether this host can close for another one, whose member id is given if it is known."""
        state = self._host.registrar.state
        # From CONFIRM on all its members are there: it will be sealed, or open again.
        open_for_it = isinstance(state, Open) or (isinstance(state, HandingOver) and state.leader == other)
        return open_for_it and not self._host.finished

    def closes_for(self, offer: Offer) -> bool:
        """Return whether this host closes for that one."""
        if offer.session == self._asked_by:
            return False
        return offer.host in self._host.registrar.handover.asked or self._candidacy.loses_to(offer)

    def call(self, offer: Offer, now: float, *, interface: str = "", sender: str = "") -> None:
        """Call another host, or say again that this one is there; not too often.

        The connection to a host that loses stays, so that the other host can answer on it.
        """
        if not self.can_close(offer.host) or offer.session == self._host.session:
            return  # of this session, but forged with another host id: it is no other host
        session = self.sightings.remember(offer, named(offer, interface, sender), sender)
        if session is None or session.races_to("conflict") or now < max(session.retry_at, session.report_at):
            return
        if session.is_proved and not self.closes_for(offer):
            session.report_at = now + CALL_AGAIN_SECONDS
            session.send(frames.HostSeen(offer=self._host.offer()))
        else:
            session.retry_at = now + CALL_AGAIN_SECONDS
            session.hang_up()
            self.sightings.race(session, self._identity.call(session.name, "conflict"), now)

    def reported(self, offer: Offer, interface: str, now: float) -> None:
        """Call a host that was reported: this one may not hear its datagrams."""
        if self._candidacy.competes(offer):
            self.call(offer, now, interface=interface)

    def on_proved(self, session: KnownSession, now: float) -> None:
        """Handle another host that was reached."""
        self._host.diagnostics.reached(self._identity.member, session.offer.host)
        self._host.registrar.handover.unreached.discard(session.offer.host)
        super().on_proved(session, now)

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle what another host says that has proved itself on the call to it."""
        if not (isinstance(frame, frames.Running) and frame.state == "open"):
            super().on_frame(session, frame, now)
            self.rival_said(session, frame, now)
            return
        session.forget_life()  # an election waits for the end of no session that takes members
        session.presumed_dead = False
        if not self.rival_said(session, frame, now):
            session.give_up(now)

    def rival_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> bool:
        """Close for the other host, or tell it to call; return whether the two compete."""
        can_close = self.can_close(session.offer.host)
        match frame:
            case frames.Running(state=state):
                proved = structs.replace(session.offer, state="open" if state == "open" else "sealed")
                if not can_close or not self._candidacy.competes(proved):
                    return False
                if self.closes_for(proved):
                    self._close_for(session, now)
                else:
                    session.send(frames.HostSeen(offer=self._host.offer()))
            case frames.Unreachable(session=name) if can_close and name == self._host.session:
                self._close_for(session, now)
        return True

    def on_unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        """Tell a host that was called in vain, if it has called itself: it must not win."""
        if race.call.purpose == "conflict" and self.can_close(session.offer.host):
            self._called_in_vain(session, race, now)
        super().on_unreached(session, race, now)

    def _called_in_vain(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        host, other = self._host, session.offer.host
        note(host.diagnostics.hosts, session.host_name, f"not reached: {race.failure_text}")
        if how := session.lost(race):
            host.diagnostics.does_not_reach(self._identity, session.offer, how, now)
            self._links.effects.append(Multicast(self._identity.seek(session.name, how), to_peers=True))
        if race.state is RaceState.SILENT and host.registrar.handover.calls_again(host.registrar.state, other):
            self.sightings.race(session, self._identity.call(session.name, "conflict"), now)
            return
        if self.closes_for(session.offer):
            host.answer_host(other, frames.Unreachable(session=session.name))
        host.registrar.first_not_reached(other, now)
