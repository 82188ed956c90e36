"""The machine of a process: it looks for a host, is its member, or hosts a session, and never two of these. Pure.

A node has connections (:class:`~mingle.protocol.links.link.Links`), sightings of the job's other sessions, a deadline
and a role: :class:`~mingle.protocol.member.Joiner` looks for a host and is its member, and
:class:`~mingle.protocol.host.Host` hosts. Its driver knows the node alone, before GO and after it.

With given ranks, rank 0 hosts from the beginning and no other rank ever does. Without them, a node becomes the host by
an election (:mod:`mingle.protocol.election`): here it is decided when; a
:class:`~mingle.protocol.election.Competition` decides which of two hosts closes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from msgspec import structs

from mingle.errors import MingleError
from mingle.protocol.effects import Effect
from mingle.protocol.election import Attendance, Candidacy, Competition, Patience
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
from mingle.protocol.explain.observations import Diagnostics, Situation
from mingle.protocol.host import Host
from mingle.protocol.machine import Context, Endpoints, Formation, Identity
from mingle.protocol.member import Joiner
from mingle.protocol.sessions import KnownSession, SessionPolicy
from mingle.protocol.sightings import Sightings
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer, Seek


class Node:
    """The machine of a process. ``outcome`` or ``failure`` ends its wait; it goes on until it is closed.

    Args:
        identity: of this process.
        endpoints: where others can connect to it; None: it does not listen, because it never hosts and proves no mesh.
        context: what its parts need.
        now: the time.
        new_session: returns the id of a session that this process hosts.
        candidacy: the rules by which hosts compete, if an agent has its own.
        make_joiner: makes the part that looks for a host and is its member.
        make_host: makes the part that hosts.
    """

    def __init__(
        self,
        identity: Identity,
        endpoints: Endpoints | None,
        context: Context,
        now: float,
        *,
        new_session: Callable[[], bytes] | None = None,
        candidacy: Candidacy | None = None,
        make_joiner: Callable[..., Joiner] = Joiner,
        make_host: Callable[..., Host] = Host,
    ) -> None:
        self.identity = identity
        self.endpoints = endpoints
        self.links = context.links
        self._context = context
        self._new_session = new_session or functools.partial(os.urandom, 16)
        self._elects = identity.rank is None
        self._candidacy = candidacy or Candidacy(identity)
        self._make_joiner, self._make_host = make_joiner, make_host
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Look for a session, or host one if this is rank 0."""
        context, identity = self._context, self.identity
        self.closed = False
        self.deadline = now + context.timeout
        self.diagnostics = Diagnostics(unit=identity.who.unit, member=identity.member)
        self.sightings = Sightings(SessionPolicy(), identity, context)
        self.host: Host | None = None
        # Without a mesh, ranks are called where all are to reach the first in order.
        called = context.mesh != "off" or identity.kind == "ranks"
        self.joiner = self._make_joiner(
            identity,
            context,
            now,
            endpoints=lambda: self.endpoints if called else None,
            deadline=self.deadline,
            diagnostics=self.diagnostics,
            sightings=self.sightings,
        )
        self.sightings.serve(self.joiner.search)
        self._patience = Patience(self._candidacy.patience(), Attendance(identity), context.folder_seconds)
        if self._elects:
            self._patience.begin(now)
        elif identity.rank == 0:
            self._become_host(now)

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def role(self) -> Host | Joiner:
        """The part that acts now."""
        return self.joiner if self.host is None else self.host

    @property
    def outcome(self) -> Formation | None:
        """The place in the job, once it has formed."""
        return self.role.outcome

    @property
    def failure(self) -> MingleError | None:
        """Why the job has not formed."""
        return self.role.failure

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""
        return self.links.take_effects()

    def next_timer(self) -> float | None:
        """Return when to send :class:`~mingle.protocol.events.TimerDue`."""
        if self.closed:
            return None
        times = [self.role.next_timer()]
        if not self.finished:
            times += [self._patience.ends_at, self.deadline]
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """Return the current step, in a word, for the log."""
        return "closed" if self.closed else self.role.stage()

    def situation(self) -> Situation:
        """Return how far the job has come, and what explains why this process waits."""
        running = self.sightings.running
        return self.role.explained(
            Situation(
                diagnostics=self.diagnostics,
                job=self.identity.job,
                rank=self.identity.rank,
                unit=self.identity.who.unit,
                running=str(running[0].host) if running else "",
                secured=self._context.key is not None,
                seconds=self._context.timeout,
                deadline=self.deadline,
            )
        )

    def ask_status(self) -> None:
        """Ask the host for the job's status, for the progress line of this process."""
        if self.host is None:
            self.joiner.ask_status()

    def calling(self) -> Datagram | None:
        """Return what to send to unicast peers now."""
        if self.closed:
            return None
        return self.joiner.showing() if self.host is None else self.host.calling()

    def showing(self) -> Seek | Offer | None:
        """Return what others are to find of this process in a shared folder now."""
        return None if self.closed else self.role.showing()

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> None:
        """Process what has happened.

        The role gets what any process can meet. The rest concerns one of the two parts, also while the other one acts:
        a store can still be proved for a session that this process has left.
        """
        if isinstance(event, AddressesChanged) and self.endpoints is not None:
            self.endpoints = structs.replace(self.endpoints, addresses=event.addresses)
        if self.closed:
            if isinstance(event, Accepted):
                self.links.refuse(event.conn)
            return
        match event:
            case Heard():
                self._heard(event, now)
            case HeardUnverified(message):
                self.diagnostics.unverified(self.identity, message)
            case Accepted():
                self.role.accepted(event, now)
            case Connected() | BytesReceived() | Disconnected():
                self.links.handle(event, now)
                self.role.after_connection(now)
            case Inspected():
                self.role.inspected(event, now)
            case StoreOpened() if self.host is not None:
                self.host.store_opened(event, now)
            case StoreFailed() if self.host is not None:
                self.host.store_failed(event)
            case StoreProved():
                self.joiner.store_proved(event)
            case StoreUnreachable():
                self.joiner.store_unreachable(event, now)
            case AddressesChanged(addresses) if self.host is not None:
                self.host.readdress(addresses, now)
            case InterfacesChanged():
                self.joiner.rewired(now)
            case FoldersListed(lower):
                self._patience.folders_listed(lower, now)
            case TimerDue():
                self._handle_timer(now)
        self._watch(now)

    @property
    def _competition(self) -> Competition | None:
        """The competition of this host with others, if it was elected."""
        conflicts = None if self.host is None else self.host.conflicts
        return conflicts if isinstance(conflicts, Competition) else None

    def _heard(self, event: Heard, now: float) -> None:
        message, source = event.message, event.source
        if isinstance(message, Offer) and message.host == self.identity.member:
            return  # of this process, from this session or from one that it has given up
        if self._elects and not self.finished:
            self._patience.attendance.heard(message, now)
            if self._candidacy.is_other_host(message):
                self.diagnostics.heard_host(message, source)
            if self._competition is not None and self._candidacy.competes(message):
                self._competition.call(message, now, interface=source.interface, sender=source.address)
                if message.state == "open" or not self._competition.can_close():
                    return  # once it has sent CONFIRM, it can't close, so it must not wait for that session either
                # A session that is sealed may run without this process: nothing is confirmed until that is known.
        self.role.heard(message, source, now)

    def _handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        self._watch(now)
        if self._patience.ends_at is not None and now >= self._patience.ends_at:
            self._become_host(now)
        self.role.handle_timer(now)

    # --- becoming the host, and closing ----------------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        """Check, after every event, whether to become the host, or to be it no more."""
        if not self._elects or self.finished:
            self._patience.stop()
            return
        part = self.joiner.part
        if part is not None and part.asked_to_lead and self.identity.kind == "ranks":
            self._become_host(now, asked_by=part.session)
        if self.host is not None and (refusal := self.host.gave_way) is not None:
            self._end_host("it can't reach nodes that can form the job without it")
            self.joiner.stand_back(refusal, now)
        may_host = self.joiner.may_host
        if not may_host and self._competition is not None and self._competition.can_close():
            self._end_host("it must not host the job any more")
            self.joiner.search.resume(now)
        awaited = self.expects_host(now) or self.sightings.may_run()  # the claims are weighed for a host, too
        if self.host is not None or awaited or not may_host:
            self._patience.stop()
        else:
            self._patience.go_on(self.joiner.search.asked_at, now)

    def expects_host(self, now: float) -> bool:
        """Return whether there is a host in sight; one that is only claimed counts for one call and a limited time."""
        joiner, sightings = self.joiner, self.sightings
        sightings.weigh(now)
        races = any(each.races_to("join") and not each.called_in_vain for each in sightings)
        return joiner.session is not None or joiner.returns_to is not None or (races and not sightings.claims_spent)

    def _become_host(self, now: float, *, asked_by: KnownSession | None = None) -> None:
        """Host a session; ``asked_by``: the session whose host has asked this process to host the job in its place."""
        assert self.endpoints is not None
        self._patience.stop()
        self.host = host = self._make_host(
            self.identity,
            self._new_session(),
            self.endpoints,
            self._context,
            now,
            deadline=self.deadline,
            diagnostics=self.diagnostics,
            sightings=self.sightings,
        )
        if asked_by is not None:
            # That host has not decided GO in this epoch, and can't without an ACK of this process.
            asked_by.confirmed = False
            asked_by.send(frames.HostSeen(offer=host.offer()))
        if self._elects:
            name = b"" if asked_by is None else asked_by.name
            host.conflicts = Competition(host, self._candidacy, self._close_for, asked_by=name)
        self.sightings.serve(host.conflicts)
        self.joiner.pause()

    def _close_for(self, session: KnownSession, now: float) -> None:
        """Close for a host that has proved itself."""
        winner, (path, *_) = session.offer, session.paths
        self._end_host(f"it closes for {winner.host_name}", winner)
        self.joiner.search.look_again(winner, path.interface, now)

    def _end_host(self, reason: str, winner: Offer | None = None) -> None:
        assert self.host is not None
        self.host.close(reason, winner=winner)
        self.host = None
        self.sightings.serve(self.joiner.search)

    # --- the end ---------------------------------------------------------------------------------------------------

    def expired(self, now: float) -> bool:
        """Return whether the deadline has passed without an end."""
        return not self.finished and not self.closed and now >= self.deadline

    def give_up(self, error: MingleError) -> None:
        """End at the deadline, with this error unless what happened before has its own."""
        self.role.give_up(self.sightings.failure(self.deadline), error)

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Send the good-byes and close every connection.

        Args:
            reason: why.
            failed: whether the others must take this for a loss, after GO. The end of a host is one anyway.
        """
        if not self.closed:
            self.closed = True
            self.role.close(reason, failed=failed)
