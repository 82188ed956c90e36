"""The host of a session: the role of a node around the registrar. Pure.

The host answers datagrams, carries its callers' frames (:class:`~mingle.protocol.links.callers.Callers`) to the
registrar, and is the port through which the registrar speaks. The registrar waits while another host of the same job is
alive, or while another run of the job is sealed. A datagram alone delays it for a limited time: both have to prove
themselves over TCP (:class:`~mingle.protocol.session.conflicts.ConflictingHosts`). What the host says of itself is its
:class:`~mingle.protocol.session.description.Description`, and when it says so unasked, its
:class:`~mingle.protocol.pacing.HostAnnouncements`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

from mingle.errors import InterfaceError, MingleError
from mingle.protocol.effects import CloseStore, FormedStore, Multicast, Notice, OpenStore
from mingle.protocol.events import Accepted, Address, Inspected, Source, StoreFailed, StoreOpened
from mingle.protocol.explain import errors, mesh_report
from mingle.protocol.explain.observations import Diagnostics, Situation, note
from mingle.protocol.links.callers import Caller, Callers
from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.links.prover import Prover, greeting
from mingle.protocol.links.race import named
from mingle.protocol.machine import Context, Endpoints, Formation, Identity, roster_digest
from mingle.protocol.pacing import HostAnnouncements
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.conflicts import ConflictingHosts
from mingle.protocol.session.description import Description
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.network_choice import GiveWay, MeshBroken, NothingShared
from mingle.protocol.session.phases import Committed, Sealing
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.roster import version
from mingle.protocol.session.seating import contiguous
from mingle.protocol.sightings import Sightings
from mingle.protocol.states import Transitions, transition
from mingle.text import joined_lines
from mingle.wire import frames
from mingle.wire.datagrams import Bye, Datagram, Offer, Seek


class Forming(Struct, frozen=True):
    """The job has not formed. Its session has states of its own (:mod:`mingle.protocol.session.phases`)."""


class Serving(Struct, frozen=True):
    """The job has formed. The host still answers."""

    formation: Formation
    """The host's place in the job."""


class Ended(Struct, frozen=True):
    """The session is over: its job has failed, or it was closed."""

    formation: Formation | None
    failure: MingleError | None


State: TypeAlias = Forming | Serving | Ended

TRANSITIONS: Transitions = {
    Forming: {"GO is decided": Serving, "the job has failed": Ended, "the session is closed": Ended},
    Serving: {"the session is closed": Ended},
    Ended: {},
}


class Host:
    """A node that hosts a session. ``outcome`` or ``failure`` ends the gathering; it serves on until closed.

    Args:
        identity: of this process.
        session: the id of the session.
        endpoints: where others can connect to this process.
        context: what its parts need.
        started: the time.
        deadline: when a job that has not formed is an error.
        diagnostics: takes note of what is observed.
        sightings: the other sessions of the job that this process has heard of.
        admission: the rules for the members of the session, if they are not those for ranks.
    """

    def __init__(
        self,
        identity: Identity,
        session: bytes,
        endpoints: Endpoints,
        context: Context,
        started: float,
        *,
        deadline: float,
        diagnostics: Diagnostics,
        sightings: Sightings,
        admission: Admission | None = None,
    ) -> None:
        self.identity = identity
        self.session = session
        self.rng = context.rng
        self.state: State = Forming()
        self.diagnostics = diagnostics
        self.links = context.links
        self._effects = context.links.effects
        self._key = context.key
        self.gave_way: frames.Refused | None = None
        """Why this host closes for nodes that it can't reach, if it does."""
        self._description = Description(identity, session, endpoints, started)
        self._announcements = HostAnnouncements(
            identity,
            session,
            context,
            started,
            deadline,
            offer=self.offer,
            seated=lambda member: member in self.registrar.seats,
            diagnostics=self.diagnostics,
            effects=self._effects,
        )
        self._prover = Prover(identity, context, port=lambda: self.endpoints.port)
        self._callers = Callers(self, context, expected=identity.world_size)
        self.registrar = Registrar(
            session,
            self._description.seat(),
            self,
            self._callers,
            admission or Admission(identity.world_size),
            mesh=context.mesh,
            deadline=deadline,
        )
        self.conflicts = ConflictingHosts(identity, sightings, context.links)
        self._sightings = sightings

    # --- what the node reads ---------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Formation | None:
        """The host's place in the job, once it has formed."""
        return None if isinstance(self.state, Forming) else self.state.formation

    @property
    def failure(self) -> MingleError | None:
        """Why the job has not formed, if it can't."""
        return self.state.failure if isinstance(self.state, Ended) else None

    @property
    def closed(self) -> bool:
        """Whether the session is over."""
        return isinstance(self.state, Ended)

    @property
    def finished(self) -> bool:
        """Whether the gathering has ended, by success or failure."""
        return self.outcome is not None or self.failure is not None

    def next_timer(self) -> float | None:
        """Return the time of the next `TimerDue`."""
        if self.closed:
            return None
        times = [each.next_timer() for each in (self.registrar, self._sightings, self._callers, self._prover)]
        times.append(self._announcements.next_timer(forming=isinstance(self.state, Forming)))
        if isinstance(self.state, Forming):
            times.append(self.conflicts.verdict_timer())
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """Return the phase and the number of members, for the log."""
        return f"{self.registrar.state.phase}, {len(self.registrar.seats)}/{self.identity.world_size} joined"

    def explained(self, situation: Situation) -> Situation:
        """Return the node's situation with how far the job has come, and what explains why it does not form."""
        registrar = self.registrar
        # A process that has, or had, a seat beside the host has proved the secret, if there is one.
        proved = len(registrar.seats) > 1 or bool(registrar.history.departures)
        return msgspec.structs.replace(situation, status=registrar.status(), connected=True, proved=proved)

    @property
    def endpoints(self) -> Endpoints:
        """Where others can connect to this host."""
        return self._description.endpoints

    def offer(self) -> Offer:
        """Return the OFFER of this session."""
        return self._description.offer(self.registrar)

    def calling(self) -> Datagram | None:
        """Return the datagram to send to unicast peers now."""
        return None if self.finished else self.offer()

    def showing(self) -> Seek | Offer | None:
        """Return what others are to find in a shared folder: the session, also once its job runs."""
        return None if self.closed else self.offer()

    # --- events ----------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Handle a valid datagram, or an object in a folder."""
        offer = None if self.closed else self._announcements.heard(message, source, now)
        if offer is not None:
            self._sighted(offer, source, now)

    def _sighted(self, offer: Offer, source: Source, now: float) -> None:
        """Have another session of this job probed."""
        if not self.finished:
            targets = named(offer, source.interface, source.address)
            self.conflicts.heard(offer, targets, now, sender=source.address, in_folder=source.folder)
            self._advance(now)

    def inspected(self, event: Inspected, now: float) -> None:
        """Take note of what this machine blocks, for the proof of the mesh."""
        self._prover.inspected(event)
        self._advance(now)

    def store_opened(self, event: StoreOpened, now: float) -> None:
        """Seal the session: its store is open."""
        self.registrar.store_opened(event.epoch, event.port, event.token, now)
        self._advance(now)

    def store_failed(self, event: StoreFailed) -> None:
        """Fail: the store can't be opened."""
        state = self.registrar.state
        if isinstance(state, Sealing) and state.epoch == event.epoch:
            self._effects.append(Multicast(self.identity.failed(event.error), to_peers=True))
            self._fail(event.error, conflict=False)  # another attempt would not help

    def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
        """Handle a change of this machine's addresses."""
        self._description.newest_addresses = addresses
        if not self.registrar.state.sealed:  # else a store can already listen on an old one
            self._readdress(now)

    def _readdress(self, now: float) -> None:
        """Announce the addresses that the machine has now."""
        if self._description.take_newest_addresses():
            self.registrar.seats.readdress(self._description.seat(readdressed_at=now))
            self._announcements.readdressed(now)

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, event: Accepted, now: float) -> None:
        """Handle a connection to the control port."""
        if self.closed:
            self.links.refuse(event.conn)
            return
        awaited = max(0, self.registrar.seats.size - len(self.registrar.seats))
        self._callers.expect(awaited, sealed=self.registrar.state.sealed)
        self._callers.accepted(event.conn, event.address, now, interface=event.interface)

    def after_connection(self, now: float) -> None:
        """Take the steps that follow from what has happened on a connection."""
        if self.closed:
            return
        self._sightings.weigh(now)
        self._advance(now)
        self._judge(now)

    def conversation(self) -> HostConversation:
        """Begin the host's side of a conversation with a caller."""
        return self._description.conversation(self._key)

    def caller_lost(self, caller: Caller, reason: str, now: float) -> None:
        """Handle the end of a caller's connection."""
        if reason.startswith("secret") and not caller.asks_only:
            note(self.diagnostics.secret_failures, f"{caller.address}: {reason}", None)
        self.registrar.lost(caller.conn, now, reason)

    def caller_proved(self, caller: Caller, now: float) -> None:
        """Answer a caller that only asks."""
        conn, hello = caller.conn, caller.hello
        if hello.purpose in ("probe", "conflict"):
            caller.send(self._description.running(self.registrar, hello.who, now))
        elector = self.registrar.seats.assigned and hello.who.rank is None
        if hello.purpose == "conflict" and not elector and not self.finished:
            self.conflicts.caller(conn, hello.member, caller.as_seen(hello.who), now)

    def caller_said(self, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of a caller."""
        conn, registrar = caller.conn, self.registrar
        match frame:
            case frames.Join() if caller.hello.purpose == "join":
                who, member = caller.as_seen(frame.who), caller.hello.member
                self.diagnostics.joined(member, msgspec.structs.replace(who, rank=frame.rank))
                registrar.join(conn, member, msgspec.structs.replace(frame, who=who), now)
            case frames.Confirmed():
                registrar.confirmed(conn, frame, now)
            case frames.Ack():
                registrar.acknowledged(conn, now)
            case frames.HostSeen(offer=offer):
                if offer.host == caller.hello.member:
                    registrar.hosts_itself(conn, now)
                self.conflicts.reported(offer, caller.interface, now)
            case frames.Greet() if caller.hello.purpose == "mesh":
                self._callers.answer(conn, "greeting", None, lambda: [greeting(self.identity.member)])
            case frames.Ready():
                registrar.ready(conn)
            case frames.Leave():
                registrar.left(conn, now, frame.reason or "it left")
                self._callers.send(conn, frames.Closed(session=self.session, reason="it has left"))
                self._callers.hang_up(conn)
            case frames.Pong():
                registrar.pong(conn, caller.answered_at, now, proving=frame.proving)
            case frames.Ping():
                self._callers.send(conn, frames.Pong(number=frame.number))
            case frames.Ask(what="roster") if registrar.seats.at(conn) is not None:
                self._callers.answer(
                    conn, "roster", version(registrar.state), lambda: self._description.roster(registrar)
                )
            case frames.Ask(what="status") if registrar.seats.at(conn) is not None:
                self._callers.answer(conn, "status", registrar.status_version(), lambda: [registrar.status()])

    def _advance(self, now: float) -> None:
        """Have the registrar take the steps that an event has made due, and confirm what this host has proved."""
        self.registrar.advance(now, held=self.conflicts.any_alive)
        while (result := self._prover.take_result()) is not None:
            own = frames.Confirmed(
                session=self.session,
                epoch=result.epoch,
                paths=self.registrar.seats.own.paths,
                failures=result.failures,
                blocked=result.blocked,
            )
            self.registrar.confirmed(None, own, now)

    # --- what the registrar calls ----------------------------------------------------------------------------------

    def open_store(self, epoch: int, address: str, now: float) -> None:
        """Have the store opened, and announce the session only to those that ask."""
        self._announcements.sealed()
        self._effects.append(OpenStore(epoch, self._description.listens_at(address)))

    def prove_mesh(self, epoch: int, proof: Proof, now: float) -> None:
        """Open connections to the targets of this host."""
        member = self.identity.member
        self._prover.begin(
            self.session,
            epoch,
            self._description.path(proof.network),
            targets=proof.targets(member),
            suspects=proof.suspects.get(member, ()),
            seconds=proof.seconds,
            now=now,
        )

    def end_without_network(self, end: NothingShared | MeshBroken | GiveWay) -> None:
        """Fail, with the same error on all ranks; or close, since others can form the job without this host."""
        if isinstance(end, GiveWay):
            self.gave_way = end.left_out.refusal(self.identity.who)
        elif isinstance(end, NothingShared):
            self._fail(errors.no_common_network(self.identity, end.matrix), conflict=True)
        elif isinstance(self.state, Forming):
            heading, lines = mesh_report.describe(end.proof)
            cause, remedy = mesh_report.cause_of(end.proof)
            error = mesh_report.error(self.identity.job, heading, lines, cause, remedy)
            self._end(
                frames.Closed(
                    session=self.session,
                    reason=heading,
                    conflict=True,
                    unconnected=tuple(lines),
                    cause=cause,
                    remedy=remedy,
                ),
                error,
            )

    def notice(self, text: str, *, warns: bool = True) -> None:
        """Show a message about the job."""
        self._effects.append(Notice(f"job {self.identity.job!r}: {text}", warns))

    def reopened(self, reason: str, now: float) -> None:
        """Announce that the session takes members again."""
        self._prover.stop()
        self._announcements.reopened(now)
        self._readdress(now)
        self._effects.append(Notice(errors.reopened(self.identity, reason)))

    def formed(self) -> None:
        """Take the host's own place in the job."""
        state, roster = self.registrar.state, self.registrar.roster()
        assert isinstance(state, Committed)
        where, path = state.places[self.identity.member], self._description.path(state.store_address)
        self.conflicts.abandon()
        formation = Formation(
            session=self.session,
            place=where,
            store_address=self._description.listens_at(state.store_address),
            store_port=state.store_port,
            interface=path.interface,
            address=next(seat.address for seat in roster if seat.rank == where.rank),
            roster_digest=roster_digest(roster),
            unproved=self.registrar.unproved,
        )
        self.state = transition(TRANSITIONS, self.state, "GO is decided", Serving(formation))
        self._effects.append(FormedStore())  # GO waits in the callers until they are flushed
        for conn in self._callers.connections():
            caller = self._callers[conn]
            if caller.conversation.proved and caller.asks_only:
                self._callers.send(conn, self._description.running(self.registrar, caller.hello.who, state.since))
        if not contiguous(list(state.places.values())):
            self._effects.append(Notice(errors.not_contiguous(self.identity)))
        self._effects += [Notice(text) for text in self.registrar.handover.remarks(self.identity)]

    def member_lost(self, who: frames.ProcessInfo, how: str) -> None:
        """Close the store: the other members can't go on without this one."""
        self._effects.append(CloseStore(errors.member_lost(self.identity, who, how), lost=who, how=how))

    # --- other hosts -----------------------------------------------------------------------------------------------

    def answer_host(self, member: bytes, frame: frames.AnyFrame) -> None:
        """Send a frame to another host, on every connection that it has made itself."""
        for conn in self._callers.connections():
            caller = self._callers[conn]
            if caller.conversation.proved and (caller.hello.member, caller.hello.purpose) == (member, "conflict"):
                self._callers.send(conn, frame)

    # --- time ------------------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        if self.closed:
            return
        self._callers.handle_timer(now)
        self._prover.handle_timer(now)
        self.registrar.handle_timer(now)
        self._sightings.handle_timer(now)
        self._announcements.handle_timer(now, forming=isinstance(self.state, Forming))
        self._advance(now)
        self._judge(now)

    def _judge(self, now: float) -> None:
        """Fail if another host of this job stays while it forms."""
        if self.finished:
            return
        if others := self.conflicts.lasting(now):
            self._fail(errors.two_hosts(self.identity, others), conflict=True)
        elif error := self._sightings.verdict(now):
            self._fail(error, conflict=True)

    def give_up(self, known: MingleError | None, error: MingleError) -> None:
        """End at the deadline, with the error of what is known of other sessions, or else this one."""
        self._fail(known or error, conflict=False)

    def _fail(self, error: MingleError, *, conflict: bool) -> None:
        if not isinstance(self.state, Forming):
            return
        if conflict:
            reason, network = joined_lines(error.observation), isinstance(error, InterfaceError)
            farewell = frames.Closed(session=self.session, reason=reason, conflict=True, network=network)
        else:
            reason = error.observation.partition("\n")[0]
            cause, remedy = (
                joined_lines(each or "")[: frames.MAX_TEXT_CHARACTERS] for each in (error.cause, error.remedy)
            )
            farewell = frames.Closed(session=self.session, reason=reason, cause=cause, remedy=remedy)
        self._end(farewell, error)

    def close(self, reason: str, *, failed: bool = False, winner: Offer | None = None) -> None:
        """End the session on purpose: tell all callers and hang up.

        Args:
            reason: why.
            failed: whether this process alone has failed; the job of a rank ends with its host in any case.
            winner: the OFFER of the host for which this session ends, if there is one.
        """
        if not self.closed:
            self._end(frames.Closed(session=self.session, reason=reason, offer=winner))

    def _end(self, farewell: frames.Closed, failure: MingleError | None = None) -> None:
        formation = self.outcome
        event = "the session is closed" if failure is None else "the job has failed"
        self.state = transition(TRANSITIONS, self.state, event, Ended(formation, failure))
        farewell = msgspec.structs.replace(farewell, reason=farewell.reason[: frames.MAX_TEXT_CHARACTERS])
        self._prover.stop()
        status = self.registrar.status() if formation is None else None
        for conn in self._callers.connections():
            if self._callers[conn].conversation.proved:
                if status is not None:
                    # Every rank can then name the ranks that were missing.
                    self._callers.send(conn, status)
                self._callers.send(conn, farewell)
            self._callers.hang_up(conn)
        self.conflicts.abandon()
        bye = Bye(job=self.identity.job, attempt=self.identity.attempt, session=self.session)
        self._effects.append(Multicast(bye))
