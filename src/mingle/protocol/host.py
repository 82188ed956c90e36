"""The rank that hosts the gathering: a pure machine around the registrar.

It carries frames from its callers (:class:`~mingle.protocol.callers.Callers`) to the registrar, the decisions back, and
lets the network know of the session (:class:`~mingle.protocol.presence.Presence`). Two things hold the registrar up:
another live host of the same job (*rival*), and another run of the job that is sealed already (*blocker*). Neither is
believed from a datagram; both are proved over TCP (:class:`~mingle.protocol.conflicts.ConflictingHosts`).
"""

from __future__ import annotations

import functools

import msgspec

from mingle.errors import InterfaceError, MingleError
from mingle.protocol import reports
from mingle.protocol.answers import Answers
from mingle.protocol.callers import Caller, Callers
from mingle.protocol.conflicts import ConflictingHosts
from mingle.protocol.connection_race import address_seconds, named
from mingle.protocol.handshake import HandshakeFailed
from mingle.protocol.introduction import Introduction
from mingle.protocol.machine import (
    Address,
    CloseStore,
    Context,
    Diagnostics,
    Effect,
    Endpoints,
    Formation,
    Identity,
    Multicast,
    NetworkFacts,
    Notice,
    OpenStore,
    PrepareStore,
    Snapshot,
    Source,
    note_name,
)
from mingle.protocol.making_way import MakingWay
from mingle.protocol.presence import Presence
from mingle.protocol.registrar import Admission, Phase, Registrar
from mingle.protocol.seating import contiguous
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer, Rejected


class Host:
    """The machine of the rank that hosts. ``outcome`` or ``failure`` ends the gathering; it serves on until closed."""

    def __init__(
        self,
        identity: Identity,
        session: bytes,
        endpoints: Endpoints,
        context: Context,
        started: float,
        *,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.identity = identity
        self.session = session
        self.rng = context.rng
        self.timeout = context.timeout
        self.secured = context.key is not None
        """Whether it was given a secret."""
        self.started = started
        self.outcome: Formation | None = None
        self.failure: MingleError | None = None
        self.diagnostics = Diagnostics() if diagnostics is None else diagnostics
        self.closed = False
        self.store_port = 0
        self.making_way = MakingWay(self.diagnostics)
        """For another host, where ranks are assigned."""
        self._deadline = started + context.timeout
        self._effects: list[Effect] = []
        self._sealed_since = 0.0
        self._introduction = introduction = Introduction(
            identity=identity, session=session, endpoints=endpoints, started=started
        )
        self.registrar = Registrar(session, introduction.seat(), self, self._admission())
        self._presence = Presence(
            introduction,
            self.offer,
            secured=self.secured,
            diagnostics=self.diagnostics,
            effects=self._effects,
            rng=context.rng,
            deadline=self._deadline,
        )
        self.conflicts = ConflictingHosts(
            introduction.call,
            context.key,
            context.new_id,
            self._effects,
            address_seconds=address_seconds(identity.world_size),
            competes=identity.rank is None,
            dials=context.dials,
        )
        converse = functools.partial(introduction.conversation, context.key)
        self._callers = Callers(
            converse,
            self._effects,
            gone=self._caller_gone,
            expected=identity.world_size,
            free_files=context.free_files,
        )
        self._answers = Answers(self.registrar, self._callers, context.unsent)

    def _admission(self) -> Admission:
        """Return the rules for the members of the session."""
        return Admission(self.identity.world_size)

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def endpoints(self) -> Endpoints:
        """Where others can connect to it; what it announces."""
        return self._introduction.endpoints

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        self._callers.flush()
        done, self._effects[:] = list(self._effects), []
        return done

    @property
    def finished(self) -> bool:
        """Whether the gathering has come to an end, good or bad."""
        return self.outcome is not None or self.failure is not None

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        if self.closed:
            return None
        times = [each.next_timer() for each in (self.registrar, self.conflicts, self._callers)]
        times.append(self._presence.next_timer(finished=self.finished))
        times += [] if self.finished else [self._deadline, self.conflicts.verdict_timer(self.timeout)]
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """How far it has come, in a word, for the log."""
        return f"{self.registrar.phase.value}, {len(self.registrar.seats)}/{self.identity.world_size} joined"

    def snapshot(self) -> Snapshot:
        """How it stands, for the progress line."""
        status = self.registrar.status()
        running = self.conflicts.running
        text = f"the job runs already, hosted by {running[0].host}" if running else ""
        return Snapshot(True, status.joined, status.awaited or status.unconfirmed, status.phase, text)

    def ask_status(self) -> None:
        """The host knows how it stands."""

    def calling(self) -> Datagram | None:
        """What to tell unicast peers now."""
        return None if self.finished else self.offer()

    def offer(self) -> Offer:
        """What this host says of itself."""
        return self._introduction.offer(self.registrar)

    def describe_running(self, caller: frames.ProcessInfo, now: float) -> frames.Running:
        """The answer to a caller that only asks."""
        since, port = self._sealed_since, self.store_port
        return self._introduction.running(self.registrar, now, sealed_since=since, store_port=port)

    def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
        """Its interfaces have changed: it listens at these addresses. They stay once a store may stand on one."""
        if self.registrar.phase in (Phase.OPEN, Phase.CONFIRMING):
            self._introduction.readdress(addresses, self.registrar)
            self._presence.burst(now)

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if self.closed:
            return
        other = self._presence.heard(message, source, now)
        if other is not None and not self.finished:
            self.conflicts.heard(other, named(other, source.interface, source.address), now, sender=source.address)

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong: a hint for the report, and no more than that."""
        self._presence.heard_unverified(message)

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Somebody has connected to the control port."""
        seats = self.registrar
        awaited = max(0, seats.world_size - len(seats.seats))
        self._callers.expect(awaited, sealed=seats.phase not in (Phase.OPEN, Phase.CONFIRMING))
        self._callers.accepted(conn, address, now)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return conn in self._callers or self.conflicts.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """A connection to another host stands."""
        self.conflicts.connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        if self.conflicts.owns(conn):
            self.conflicts.received(conn, untrusted, now)
            self._hold(now)
            if not self.finished:
                self._judge(now)
            return
        caller = self._callers[conn]
        was_proved = caller.conversation.proved
        try:
            received = self._callers.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            if isinstance(failure, HandshakeFailed) and failure.reason == "secret" and not caller.asks_only:
                note_name(self.diagnostics.secret_failures, f"{caller.address}: {failure}")
            self._callers.hang_up(conn)
            self.registrar.lost(conn, now, str(failure))
            self._hold(now)
            return
        if caller.conversation.proved and not was_proved:
            self._greet(conn, caller, now)
        for frame in received:
            if conn in self._callers:
                self._frame(conn, caller, frame, now)
        self._hold(now)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended."""
        if self.conflicts.owns(conn):
            self.conflicts.disconnected(conn, reason, now)
        else:
            self._callers.forget(conn)
            self.registrar.lost(conn, now, reason)
        self._hold(now)

    def _caller_gone(self, conn: int) -> None:
        self.conflicts.caller_gone(conn)
        self._answers.forget(conn)

    def _greet(self, conn: int, caller: Caller, now: float) -> None:
        """A caller has proved itself; the ones that only asked are answered."""
        hello = caller.hello
        if hello.purpose in ("probe", "rival"):
            self._callers.tell(conn, self.describe_running(hello.who, now))
        elector = self.registrar.assigned and hello.who.rank is None
        if hello.purpose == "rival" and not elector and not self.finished:
            self.conflicts.caller(conn, hello.member, caller.as_seen(hello.who), now)

    def _frame(self, conn: int, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        if isinstance(frame, frames.Join) and caller.hello.purpose == "join":
            self._join(conn, caller, frame, now)
        elif isinstance(frame, frames.Confirmed):
            self.registrar.confirmed(conn, frame, now)
        elif isinstance(frame, frames.Ack):
            self.registrar.acknowledged(conn, frame.epoch, now)
        elif isinstance(frame, frames.HostSeen):
            self.making_way.sighted(frame)
        elif isinstance(frame, frames.Unreachable):
            self.making_way.strand(caller.as_seen(caller.hello.who), frame.session)
        elif isinstance(frame, frames.Ready):
            self.registrar.ready(conn)
        elif isinstance(frame, frames.Leave):
            self.registrar.left(conn, now, frame.reason or "it left")
            self._callers.hang_up(conn)
        elif isinstance(frame, frames.Pong):
            self.registrar.pong(conn)
        elif isinstance(frame, frames.Ping):
            self._callers.tell(conn, frames.Pong(number=frame.number))
        elif isinstance(frame, frames.Ask):
            self._answers.asked(conn, frame.what)

    def _join(self, conn: int, caller: Caller, join: frames.Join, now: float) -> None:
        self.diagnostics.seekers.pop(caller.hello.member, None)
        self.registrar.join(conn, caller.hello.member, msgspec.structs.replace(join, who=caller.as_seen(join.who)), now)
        if self.making_way.moved is not None:
            self._callers.tell(conn, self.making_way.moved)

    # --- decisions -------------------------------------------------------------------------------------------------

    def _hold(self, now: float) -> None:
        self.registrar.hold(self.conflicts.any_alive or self.making_way.begun, now)

    # --- what the registrar calls ----------------------------------------------------------------------------------

    def send(self, conn: int, frame: frames.AnyFrame) -> None:
        """Send a frame to a caller."""
        self._callers.tell(conn, frame)

    def hang_up(self, conn: int) -> None:
        """Close a caller's connection after what is still to be sent."""
        self._callers.hang_up(conn)

    def prepare_store(self, address: str) -> None:
        """Have the store opened ahead."""
        self._callers.flush()  # the members first
        self._effects.append(PrepareStore(self._introduction.listens_at(address)))

    def open_store(self, epoch: int, address: str, now: float) -> None:
        """Have the store opened."""
        self._presence.seal()
        self._sealed_since = now
        self._effects.append(OpenStore(epoch, self._introduction.listens_at(address)))

    def no_common_network(self, matrix: str) -> None:
        """Fail: no address of this host was reached by every member."""
        self._fail(reports.no_common_network(self.identity, matrix), conflict=True)

    def reopened(self, reason: str, now: float) -> None:
        """Announce that the session takes members again."""
        self._presence.reopen(now)
        self._effects.append(Notice(reports.reopened(self.identity, reason)))

    def formed(self) -> None:
        """Take note of GO."""
        self.conflicts.abandon()
        self.outcome = self._introduction.formation(self.registrar, self.store_port)
        if not contiguous(list(self.registrar.places.values())):
            self._effects.append(Notice(reports.not_contiguous(self.identity)))

    def member_lost(self, who: frames.ProcessInfo) -> None:
        """Close the store: the other members can't go on without this one."""
        self._effects.append(CloseStore(reports.deserted(self.identity, who)))

    # --- the store -------------------------------------------------------------------------------------------------

    def store_prepared(self, port: int, now: float) -> None:
        """The store listens already, where it was to be prepared."""
        self.registrar.store_prepared(port)

    def store_opened(self, epoch: int, port: int, token: str, now: float) -> None:
        """The store listens."""
        self.store_port = port
        self.registrar.store_opened(epoch, self.registrar.store_address, port, token, now)

    def store_failed(self, epoch: int, error: MingleError, now: float) -> None:
        """The store could not be opened, and trying again would not help."""
        if self.registrar.awaits_store(epoch):
            self._fail(error, conflict=False)

    # --- making way for another host (when ranks are assigned) -------------------------------------------------------

    @property
    def has_members(self) -> bool:
        """Whether anybody but the host itself has a seat."""
        return len(self.registrar.seats) > 1

    @property
    def had_members(self) -> bool:
        """Whether any process but the host itself has, or had, a seat: it has proved the secret, if there is one."""
        return self.has_members or bool(self.registrar.departures)

    def make_way(self, now: float) -> None:
        """Stops taking members and confirming, for the time that it takes to join another host."""
        self.making_way.begin()
        self._hold(now)

    def send_after(self, offer: Offer) -> None:
        """Sends the members to that host, and everybody who still comes."""
        moved = self.making_way.send_after(offer)
        for conn in self.registrar.member_connections():
            self._callers.tell(conn, moved)

    def open_again(self, now: float) -> None:
        """Takes members again: the other host is gone, or not reached by all."""
        self.making_way.end()
        self._presence.burst(now)
        self._hold(now)

    # --- time ------------------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        if self.closed:
            return
        self._callers.handle_timer(now)
        self.registrar.handle_timer(now)
        self.conflicts.handle_timer(now)
        self._presence.handle_timer(now, finished=self.finished, mute=self.making_way.begun)
        self._hold(now)
        if not self.finished:
            self._judge(now)

    def _judge(self, now: float) -> None:
        """Looks whether another host of this job stays."""
        if conflicts := self.conflicts.lasting(now):
            self._fail(reports.two_hosts(self.identity, conflicts), conflict=True)
            return
        for running, waited, told in self.conflicts.blockers(now):
            if not told:
                self._effects.append(Notice(reports.running_notice(self.identity, running, waited)))
            if waited >= self.conflicts.patience(self.timeout):
                self._fail(reports.running(self.identity, running, waited), conflict=True)
                return

    def expired(self, now: float) -> bool:
        """Tells whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        identity, diagnostics, blockers = self.identity, self.diagnostics, self.conflicts.blockers(self._deadline)
        failure = reports.running(identity, *blockers[0][:2]) if blockers else None
        if failure is None and not self.had_members:
            failure = reports.authentication(identity, diagnostics, facts, secured=self.secured)
        if failure is None:
            status = self.registrar.status()
            failure = reports.timeout(identity, diagnostics, facts, seconds=self.timeout, status=status, connected=True)
        self._fail(failure, conflict=False)

    def _fail(self, error: MingleError, *, conflict: bool) -> None:
        if self.failure is None:
            self.failure = error
            reason = reports.one_line(error.observation)
            self._end(reason, conflict=conflict, network=isinstance(error, InterfaceError))

    def close(self, reason: str) -> None:
        """Ends the session on purpose: says so to everybody and hangs up."""
        if not self.closed:
            self._end(reason, conflict=False)

    def _end(self, reason: str, *, conflict: bool, network: bool = False, regather: bool = False) -> None:
        self.closed = True
        farewell = frames.Closed(
            session=self.session, reason=reason[:2048], conflict=conflict, network=network, regather=regather
        )
        status = self.registrar.status() if self.outcome is None else None
        for conn in self._callers.connections():
            if self._callers[conn].conversation.proved:
                if status is not None:
                    # So that every rank can name the ranks that were missing.
                    self._callers.tell(conn, status)
                self._callers.tell(conn, farewell)
            self._callers.hang_up(conn)
        self.conflicts.abandon()
        self._effects.append(Multicast(self._introduction.bye()))
