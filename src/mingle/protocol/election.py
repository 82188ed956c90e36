"""Leader election: a process that was given no rank looks for a host, and becomes one when there is none. Pure.

Every process runs the same command. It begins as a :class:`Candidate`; one that hears no host for a
while (shorter for a lower member id) opens a session as a :class:`~mingle.protocol.host.Host`. The one with the lowest
id does so earlier if it hears all the others ask (:class:`Attendance`): no host can be among them. So there can
be several hosts for a moment, and these rules make them one. As in the bully algorithm (Garcia-Molina, "Elections in a
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

Only a session that is OPEN is closed for another one, and a session that is closed decides nothing more. A process asks
another host for a seat only when its own session is closed. So it never counts in two sessions that can both form.
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

import functools
import os
from collections.abc import Callable, Sequence
from typing import TypeGuard

from msgspec import structs

from mingle.errors import MingleError
from mingle.protocol.effects import Effect, Multicast
from mingle.protocol.events import (
    Accepted,
    AddressesChanged,
    BytesReceived,
    Connected,
    Disconnected,
    Event,
    FoldersListed,
    Heard,
    HeardUnverified,
    Inspected,
    InterfacesChanged,
    StoreFailed,
    StoreOpened,
    StoreProved,
    StoreUnreachable,
    TimerDue,
)
from mingle.protocol.explain.observations import Situation, note
from mingle.protocol.host import Host
from mingle.protocol.links.race import ConnectionRace, RaceState, named
from mingle.protocol.machine import Context, Endpoints, Formation, Identity
from mingle.protocol.member import LEAVE, Joiner, Searching
from mingle.protocol.pacing import COUNTED_RANKS
from mingle.protocol.participant import AwaitingSeal
from mingle.protocol.session.phases import HandingOver, Open
from mingle.protocol.sessions import KnownSession
from mingle.protocol.sightings import Sightings
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


class Candidate(Joiner):
    """A member that was given no rank: it can become a host itself, and its host can name the one that has won."""

    def __init__(self, identity: Identity, context: Context, now: float) -> None:
        super().__init__(identity, context, now)
        self.asked_to_lead = False
        """Whether its host has sent LEAD: this process must host the job."""

    @property
    def may_host(self) -> bool:
        """Whether this process can be the host."""
        return True

    def expects_host(self, now: float) -> bool:
        """Return whether there is a host in sight; one that is only claimed counts for one call and a limited time."""
        sightings = self.search.sightings
        sightings.weigh(now)
        races = any(each.races_to("join") and not each.called_in_vain for each in sightings)
        return self.session is not None or self.returns_to is not None or (races and not sightings.claims_spent)

    def host_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of the own host."""
        if isinstance(frame, frames.Lead):
            part = self.part
            if part is not None and isinstance(part.state, AwaitingSeal) and frame.epoch == part.epoch:
                self.asked_to_lead = self.identity.kind == "ranks"
            return
        super().host_said(session, frame, now)

    def pause(self) -> None:
        """Stop looking: this process is about to host a session of its own."""
        self.asked_to_lead = False
        self.search.sightings.serve(self.search)
        if not isinstance(self.state, Searching):
            self._change(LEAVE, Searching())
        self.search.pause()

    def stand_back(self, refusal: frames.Refused, now: float) -> None:
        """Look for a host again, since this process, as the host, can't reach others."""
        self.search.resume(now)

    def look_again(self, winner: Offer, interface: str, now: float) -> None:
        """Look for a host, at first where the OFFER of the one that has won says."""
        self.search.resume(now)
        if winner.host != self.identity.member:
            self.search.make_for(winner, interface, now)

    def _closed_by_host(self, session: KnownSession, frame: frames.Closed, now: float) -> None:
        path = next(iter(session.paths), None)
        super()._closed_by_host(session, frame, now)
        if frame.offer is not None and not self.finished:
            self.look_again(frame.offer, path.interface if path is not None else "", now)


class Elector:
    """The machine of a process without a rank. ``outcome`` or ``failure`` ends it.

    It has a host or looks for one, and never both.

    Args:
        identity: of this process.
        endpoints: where others can connect to it.
        context: what its machines need.
        now: the time.
        new_session: returns the id of a session that this process hosts.
        make_joiner: makes the machine that looks for a host.
        make_host: makes the machine that hosts.
        candidacy: the rules by which hosts compete.
    """

    def __init__(
        self,
        identity: Identity,
        endpoints: Endpoints,
        context: Context,
        now: float,
        *,
        new_session: Callable[[], bytes] | None = None,
        make_joiner: Callable[[Identity, Context, float], Candidate] = Candidate,
        make_host: Callable[..., Host] = Host,
        candidacy: Candidacy | None = None,
    ) -> None:
        self.identity = identity
        self.endpoints = endpoints
        self.joiner = make_joiner(identity, context, now)
        if context.mesh != "off" or identity.kind == "ranks":
            self.joiner.endpoints = endpoints  # it is also called where all are to reach the first in order
        self.host: Host | None = None
        self._make_host = make_host
        self._context = context
        self._new_session = new_session or functools.partial(os.urandom, 16)
        self._deadline = now + context.timeout
        self._failure: MingleError | None = None
        """Why the own session failed, once it is gone."""
        self.links = context.links
        self._candidacy = candidacy or Candidacy(identity)
        self._attendance = Attendance(identity)
        self._patient_until: float | None = None
        """When it becomes the host if it hears of none until then; None: it does not look for one."""
        self._elect_at: float | None = None
        """The same, or earlier where all are there."""
        self._folders_until = 0.0
        """The time until which the shared folders may not have shown a host yet."""
        self._look_from(now)
        self._asked_by: bytes | None = None
        """The session whose host has asked this process to lead: that host closes for this one, whatever the ids."""

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def sightings(self) -> Sightings:
        """The other sessions of the job that this process has heard of."""
        return self.joiner.search.sightings

    @property
    def acting(self) -> Host | Candidate:
        """The machine that speaks for this process."""
        return self.joiner if self.host is None else self.host

    @property
    def hosting(self) -> Host | None:
        """The machine that hosts a session, if one does."""
        return self.host

    @property
    def outcome(self) -> Formation | None:
        """The place in the job, once it has formed."""
        return self.acting.outcome

    @property
    def failure(self) -> MingleError | None:
        """Why the job has not formed."""
        return self._failure or self.acting.failure

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""
        return self.links.take_effects()

    def next_timer(self) -> float | None:
        """The time of the next `TimerDue`."""
        times = [self.acting.next_timer()]
        if not self.finished:
            times += [self._elect_at, self._deadline]
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """Return the current step, in a word, for the log."""
        return self.acting.stage()

    def situation(self) -> Situation:
        """Return how far the job has come, and what explains why this process waits."""
        return self.acting.situation()

    def ask_status(self) -> None:
        """Ask the host for the job's status."""
        self.acting.ask_status()

    def calling(self) -> Datagram | None:
        """The datagram for unicast peers now."""
        return self.acting.calling()

    def showing(self) -> Seek | Offer | None:
        """The sign in a shared folder now."""
        return self.acting.showing()

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> None:
        """Have the machine that an event concerns process it, and see what follows from it for the election."""
        match event:
            case Heard():
                self._heard(event, now)
            case HeardUnverified() | Accepted() | Inspected() | Connected() | BytesReceived() | Disconnected():
                self.acting.handle(event, now)
            case StoreOpened() | StoreFailed():
                if self.host is not None:
                    self.host.handle(event, now)
            case StoreProved() | StoreUnreachable() | InterfacesChanged():
                self.joiner.handle(event, now)
            case AddressesChanged(addresses):
                self.endpoints = structs.replace(self.endpoints, addresses=addresses)
                self.joiner.handle(event, now)
                if self.host is not None:
                    self.host.handle(event, now)
            case FoldersListed(lower):
                self._folders_listed(lower, now)
            case TimerDue():
                self._handle_timer(now)
        self._watch(now)

    def _heard(self, event: Heard, now: float) -> None:
        message, source = event.message, event.source
        if isinstance(message, Offer) and message.host == self.identity.member:
            return  # of this process, from this session or from one that it has given up
        self._attendance.heard(message, now)
        if self._candidacy.is_other_host(message):
            self.joiner.diagnostics.heard_host(message, source)
        if self.host is not None and self._candidacy.competes(message):
            self._call(message, now, interface=source.interface, sender=source.address)
            if message.state == "open" or self._competing() is None:
                return  # once it has sent CONFIRM, this host can't close, so it must not wait for that session either
            # A session that is sealed may run without this process: nothing is confirmed until that is known.
        self.acting.handle(event, now)

    # --- becoming the host -----------------------------------------------------------------------------------------

    def _handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        if not self.finished:
            self._watch(now)
            if self._elect_at is not None and now >= self._elect_at:
                self._become_host(now)
        self.acting.handle(TimerDue(), now)

    def _watch(self, now: float) -> None:
        """Check, after every event, whether to call another host, and whether to become one."""
        if self.finished:
            return
        if self.joiner.session is None:
            self.joiner.asked_to_lead = False  # that host has closed its session in the same read
        elif self.host is None and self.joiner.asked_to_lead:
            self._lead(now)
        if self.host is not None and (refusal := self.host.gave_way) is not None:
            self._end_host("it can't reach nodes that can form the job without it")
            self.joiner.stand_back(refusal, now)
        may_host = self.joiner.may_host
        if not may_host and self._competing() is not None:
            self._end_host("it must not host the job any more")
            self.joiner.search.resume(now)
        for offer, interface in self.host.take_hosts_seen() if self.host is not None else ():
            if self._candidacy.competes(offer):
                self._call(offer, now, interface=interface)
        awaited = self.joiner.expects_host(now) or self.sightings.may_run()
        if self.host is not None or awaited or not may_host:
            self._patient_until = None
        elif self._patient_until is None:
            self._look_from(now)
        self._elect_at = None if self._patient_until is None else self.elects_at(self._patient_until, now)

    def elects_at(self, patient_until: float, now: float) -> float:
        """Return when this process becomes the host: once its patience ends, or earlier where all are there."""
        asked_at = self.joiner.search.asked_at
        if asked_at is None or not self._attendance.complete(now):
            return patient_until
        return min(patient_until, max(asked_at + ELECT_SOONEST_SECONDS, self._folders_until))

    def _look_from(self, now: float) -> None:
        """Begin to look for a host, which ends with an election."""
        self._folders_until = now + self._context.folder_seconds
        self._elect_at = self._patient_until = self._folders_until + self._candidacy.patience()

    def _folders_listed(self, lower: bool, now: float) -> None:
        """Handle a listing of the shared folders that has this process in it, and so all that wrote before."""
        if self._patient_until is not None and now < self._folders_until:
            self._folders_until = min(self._folders_until, now + (LOWER_SECONDS if lower else 0.0))
            self._patient_until = self._folders_until + self._candidacy.patience()

    def _become_host(self, now: float) -> None:
        self._elect_at = self._patient_until = None
        self.joiner.pause()
        self._host(self._open_session(now))

    def _host(self, host: Host) -> None:
        self.host = host
        self.sightings.serve(host.conflicts)

    def _open_session(self, now: float) -> Host:
        return self._make_host(
            self.identity,
            self._new_session(),
            self.endpoints,
            self._context,
            now,
            deadline=self._deadline,
            diagnostics=self.joiner.diagnostics,
            contest=self,
        )

    def _lead(self, now: float) -> None:
        """Host the job in place of the host that has asked for it."""
        session = self.joiner.session
        assert session is not None
        host = self._open_session(now)
        # That host has not decided GO in this epoch, and can't without an ACK of this process.
        session.confirmed = False
        session.send(frames.HostSeen(offer=host.offer()))
        self._asked_by = session.name
        self.joiner.pause()
        self._host(host)

    # --- competing with another host -------------------------------------------------------------------------------

    def _competing(self, other: bytes | None = None) -> Host | None:
        """Return the host of this process if it can close for another one, whose member id is given if it is known."""
        host = self.host
        if host is None or host.finished:
            return None
        state = host.registrar.state
        # From CONFIRM on all its members are there: it will be sealed, or open again.
        if isinstance(state, Open) or (isinstance(state, HandingOver) and state.leader == other):
            return host
        return None

    def _loses_to(self, offer: Offer) -> bool:
        """Return whether the host of this process closes for that one."""
        if offer.session == self._asked_by:
            return False
        host = self.host
        return (host is not None and offer.host in host.registrar.asked_to_lead) or self._candidacy.loses_to(offer)

    def _call(self, offer: Offer, now: float, *, interface: str = "", sender: str = "") -> None:
        """Call another host, or say again that this one is there; not too often.

        The connection to a host that loses stays, so that the other host can answer on it.
        """
        host, targets = self._competing(offer.host), named(offer, interface, sender)
        if host is not None and offer.session == host.session:
            return  # forged with another host id: it is no other host
        session = self.sightings.remember(offer, targets, sender) if host is not None else None
        if host is None or session is None or session.races_to("conflict"):
            return
        if now < max(session.retry_at, session.report_at):
            return
        if session.is_proved and not self._loses_to(offer):
            session.report_at = now + CALL_AGAIN_SECONDS
            session.send(frames.HostSeen(offer=host.offer()))
        else:
            session.retry_at = now + CALL_AGAIN_SECONDS
            session.hang_up()
            self.sightings.race(session, self.identity.call(session.name, "conflict"), now)

    def rival_proved(self, session: KnownSession) -> None:
        """Take note that another host was reached."""
        self.joiner.diagnostics.reached(self.identity.member, session.offer.host)
        if self.host is not None:
            self.host.registrar.unreached.discard(session.offer.host)

    def rival_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> bool:
        """Handle what a host says that has proved itself on the call to it; return whether the two compete."""
        host = self._competing(session.offer.host)
        match frame:
            case frames.Running(state=state):
                proved = structs.replace(session.offer, state="open" if state == "open" else "sealed")
                if host is None or not self._candidacy.competes(proved):
                    return False
                if self._loses_to(proved):
                    self._close_for(session, now)
                else:
                    session.send(frames.HostSeen(offer=host.offer()))
            case frames.Unreachable(session=name) if host is not None and name == host.session:
                self._close_for(session, now)
        return True

    def rival_unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        """Tell a host that was called in vain, if it has called itself: it must not win."""
        other = session.offer.host
        host = self._competing(other)
        if host is not None:
            note(host.diagnostics.hosts, session.host_name, f"not reached: {race.failure_text}")
            if how := session.lost(race):
                host.diagnostics.does_not_reach(self.identity, session.offer, how, now)
                self.links.effects.append(Multicast(self.identity.seek(session.name, how), to_peers=True))
            if race.state is RaceState.SILENT and host.registrar.calls_again(other):
                self.sightings.race(session, self.identity.call(session.name, "conflict"), now)
                return
            if self._loses_to(session.offer):
                host.answer_host(other, frames.Unreachable(session=session.name))
            host.registrar.first_not_reached(other, now)

    def _close_for(self, session: KnownSession, now: float) -> None:
        """Close for a host that has proved itself."""
        winner, (path, *_) = session.offer, session.paths
        self._end_host(f"it closes for {winner.host_name}", winner)
        self.joiner.look_again(winner, path.interface, now)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _end_host(self, reason: str, winner: Offer | None = None) -> None:
        self._asked_by = None
        if self.host is not None:
            self._failure = self.host.failure
            self.host.close(reason, winner)
            self.host = None
            self.sightings.serve(self.joiner.search)

    def expired(self, now: float) -> bool:
        """Return whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, error: MingleError) -> None:
        """End at the deadline, with this error unless what happened before has its own."""
        self.acting.give_up(error)

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Send the good-byes and close every connection, as :meth:`Joiner.close`."""
        self._end_host(reason)
        self.joiner.close(reason, failed=failed)
