"""The host of a session: the machine around the registrar. Pure.

The host answers datagrams, carries its callers' frames (:class:`~mingle.protocol.callers.Callers`) to the registrar,
and is the port through which the registrar speaks. The registrar waits while another host of the same job is alive, or
while another run of the job is sealed. Neither is believed from a datagram: both have to prove themselves over TCP
(:class:`~mingle.protocol.conflicts.ConflictingHosts`).

Where ranks are assigned, :mod:`mingle.protocol.election` can have a host *step down* for another one: it then takes no
members and confirms nothing while it joins the other host, and sends its members there afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec

from mingle.errors import InterfaceError, MingleError
from mingle.protocol import reports
from mingle.protocol.admission import Admission, HostSeat
from mingle.protocol.callers import Caller, Callers
from mingle.protocol.conflicts import ConflictingHosts
from mingle.protocol.connection_race import named
from mingle.protocol.handshake import HandshakeFailed, HostConversation
from mingle.protocol.machine import (
    Address,
    Answer,
    CloseStore,
    Context,
    Diagnostics,
    Effect,
    Endpoints,
    Formation,
    FormedStore,
    Hangup,
    Identity,
    Multicast,
    NetworkFacts,
    Notice,
    OpenStore,
    PrepareStore,
    Snapshot,
    Source,
    note,
    note_name,
    roster_digest,
    scoped,
)
from mingle.protocol.pacing import LATE_ANSWERS_AT_ONCE, LATE_ANSWERS_PER_SECOND, Announcer, BrowseGroup, Credit
from mingle.protocol.registrar import Phase, Registrar
from mingle.protocol.seating import contiguous
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_ADDRESSES, Bye, Datagram, List, Offer, Rejected, Seek

SEATS_PER_FRAME = 128
"""The seats in one ROSTER: with the longest names (four bytes a character) they still fit into one frame."""
MAX_HOSTS_SEEN = 64
"""Reports of other hosts between two events; bounded against a member that sends many."""


class HostSighting(msgspec.Struct, frozen=True):
    """A report of another host (HOST_SEEN)."""

    offer: Offer
    stays: bool
    """Whether that host stays a candidate although its id is the higher one."""
    caller: int | None
    """The connection that the other host has made to say so itself; None: a member says it."""


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
        self.endpoints = endpoints
        """Where others can connect to this host."""
        self._newest_addresses = endpoints.addresses
        """The addresses of this machine now; while the session is sealed, they can differ from those announced."""
        self.rng = context.rng
        self.timeout = context.timeout
        self.secured = context.key is not None
        """Whether it was given a secret."""
        self.started = started
        self.outcome: Formation | None = None
        self.failure: MingleError | None = None
        self.diagnostics = Diagnostics(unit=identity.who.unit) if diagnostics is None else diagnostics
        self.closed = False
        self.store_port = 0
        self.stepping_down = False
        """Whether this host takes no members and confirms nothing, because it joins another host."""
        self.redirect: frames.Redirect | None = None
        """The host to which the members, and all that still come, are sent."""
        self.redirect_failed = False
        """Whether a member can't reach that host."""
        self._deadline = started + context.timeout
        self._effects: list[Effect] = []
        self._sealed_since = 0.0
        self._hosts_seen: list[HostSighting] = []
        self._description: tuple[tuple[object, ...], tuple[int, ...], str] = ((), (), "")
        """A version of the status, with the ranks and the description of the members at that version."""
        self._announcer = Announcer(started)
        self._browse_group = BrowseGroup(started, self._deadline, context.rng)
        self._late_answers = Credit(LATE_ANSWERS_PER_SECOND, LATE_ANSWERS_AT_ONCE, started)
        self.registrar = Registrar(session, self._seat(), self, self._admission())
        self.conflicts = ConflictingHosts(identity, context, self._effects, competes=identity.rank is None)
        self._callers = Callers(
            functools.partial(self._conversation, context.key),
            self._effects,
            gone=self.conflicts.caller_gone,
            expected=identity.world_size,
            free_files=context.free_files,
            unsent=context.unsent,
        )

    def _admission(self) -> Admission:
        """Return the rules for the members of the session."""
        return Admission(self.identity.world_size)

    # --- what the driver reads -------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""
        self._callers.flush()
        done, self._effects[:] = list(self._effects), []
        return done

    @property
    def finished(self) -> bool:
        """Whether the gathering has ended, by success or failure."""
        return self.outcome is not None or self.failure is not None

    @property
    def hosting(self) -> Host:
        """The machine that hosts a session: this one."""
        return self

    @property
    def has_members(self) -> bool:
        """Whether any process but the host itself has a seat."""
        return len(self.registrar.seats) > 1

    @property
    def had_members(self) -> bool:
        """Whether any process but the host itself has, or had, a seat: it has proved the secret, if there is one."""
        return self.has_members or bool(self.registrar.departures)

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        if self.closed:
            return None
        times = [each.next_timer() for each in (self.registrar, self.conflicts, self._callers, self._announcer)]
        if self.finished:
            times.append(self._browse_group.answer_timer())
        else:
            times += [self._browse_group.next_timer(), self._deadline, self.conflicts.verdict_timer()]
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """Return the phase and the number of members, for the log."""
        return f"{self.registrar.phase.value}, {len(self.registrar.seats)}/{self.identity.world_size} joined"

    def snapshot(self) -> Snapshot:
        """Return the state for the progress line."""
        status = self.registrar.status()
        running = self.conflicts.running_check.running
        text = f"the job is already running, hosted by {running[0].host}" if running else ""
        return Snapshot(True, status.joined, status.awaited or status.unconfirmed, status.phase, text, status.hosts)

    def cause(self, facts: NetworkFacts, now: float) -> reports.Cause | None:
        """Return the best cause so far why the job does not form, for the progress line."""
        heard = self.diagnostics.lately(now)
        apart = None if self.had_members else reports.kept_apart(self.identity, heard, secured=self.secured)
        return apart or self._why_waiting(heard, facts)

    def _why_waiting(self, heard: Diagnostics, facts: NetworkFacts) -> reports.Cause | None:
        return reports.waiting(self.identity, heard, facts, status=self.registrar.status(), connected=True)

    def ask_status(self) -> None:
        """Do nothing: the host knows the status."""

    def calling(self) -> Datagram | None:
        """Return the datagram to send to unicast peers now."""
        return None if self.finished else self.offer()

    # --- the host's description of itself --------------------------------------------------------------------------

    def _announced(self) -> tuple[str, ...]:
        """Every address at which the control port can be reached."""
        own = tuple(each.address for each in self.endpoints.addresses)
        return (*self.endpoints.advertised, *own)[:MAX_ADDRESSES]

    def _process(self) -> frames.ProcessInfo:
        address, rank = self.endpoints.addresses[0].address, self.identity.rank
        return msgspec.structs.replace(self.identity.who, address=address, rank=rank)

    def _paths(self) -> tuple[frames.Path, ...]:
        """The path from each announced address to a local one. NAT leads the advertised ones to our first address."""
        own, advertised = self.endpoints.addresses, self.endpoints.advertised
        paths = [(each.address, each) for each in own] + [(each, own[0]) for each in advertised]
        return tuple(
            frames.Path(host_address=announced, local_address=each.address, interface=each.interface[:64])
            for announced, each in paths
        )

    def _path(self, announced: str) -> frames.Path:
        return next(each for each in self._paths() if each.host_address == announced)

    def _listens_at(self, announced: str) -> str:
        """Return the local address, with its zone, that serves one announced address."""
        path = self._path(announced)
        return scoped(path.local_address, path.interface)

    def _seat(self) -> HostSeat:
        own = self.endpoints.addresses
        lengths = {each.address: each.prefix_length for each in own}
        return HostSeat(
            member=self.identity.member,
            applicant=self.identity.join(self._process(), self._paths()),
            # No member is on the subnet of an advertised address.
            prefix_lengths={**dict.fromkeys(self.endpoints.advertised, 0), **lengths},
            last_resort=frozenset(each.address for each in own if each.last_resort),
            named=self.endpoints.named,
        )

    def _conversation(self, key: JobKey | None) -> HostConversation:
        """Begin the host's side of a conversation with a caller."""
        return HostConversation(
            job=self.identity.job,
            attempt=self.identity.attempt,
            session=self.session,
            addresses=self._announced(),
            port=self.endpoints.port,
            key=key,
        )

    def offer(self) -> Offer:
        """Return the OFFER of this session."""
        registrar = self.registrar
        return Offer(
            job=self.identity.job,
            attempt=self.identity.attempt,
            session=self.session,
            host=self.identity.member,
            addresses=self._announced(),
            port=self.endpoints.port,
            world_size=self.identity.world_size,
            joined=len(registrar.seats) + len(registrar.latecomers),
            state="sealed" if registrar.phase.sealed else "open",
            kind=self.identity.kind,
            assigned=registrar.assigned,
            hostname=self.identity.who.hostname,
            pid=self.identity.who.pid,
            quorum=registrar.admission.had_quorum,
        )

    def describe_running(self, caller: frames.ProcessInfo, now: float) -> frames.Running:
        """Return the answer to a caller that only asks for the state of the session."""
        registrar, phase = self.registrar, self.registrar.phase
        version = registrar.status_version()
        if self._description[0] != version:  # callers can ask often
            ranks = tuple(sorted(who.rank for who in registrar.whos() if who.rank is not None))[:4096]
            self._description = version, ranks, registrar.describe_members()
        store_stands = phase in (Phase.SEALED, Phase.RUNNING)
        return frames.Running(
            state="running" if phase is Phase.RUNNING else "sealed" if phase.sealed else "open",
            world_size=self.identity.world_size,
            seconds=max(0.0, now - (self._sealed_since if phase.sealed else self.started)),
            host=self._process(),
            joined=self._description[1],
            missing=registrar.status().awaited[:4096],
            roster=self._description[2],
            store_address=registrar.store_address if store_stands else "",
            store_port=self.store_port if store_stands else 0,
            surplus=registrar.is_surplus(caller, now),
        )

    def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
        """Take new addresses; if a store can already listen on an old one, when the session takes members again."""
        self._newest_addresses = addresses
        if addresses != self.endpoints.addresses and not self.registrar.phase.sealed:
            self.endpoints = msgspec.structs.replace(self.endpoints, addresses=addresses)
            self.registrar.readdress(self._seat(), now)
            self._announcer.burst(now)

    def rewired(self, now: float) -> None:
        """Do nothing: other processes find the paths to a host."""

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Handle a valid datagram."""
        if self.closed:
            return
        if isinstance(message, List):
            self._heard_list(message, source, now)
        elif self.diagnostics.concerns(self.identity, message, source, now, secured=self.secured):
            if isinstance(message, Seek):
                self._heard_seek(message, source, now)
            elif isinstance(message, Offer) and message.session != self.session:
                self._heard_offer(message, source, now)

    def _heard_seek(self, message: Seek, source: Source, now: float) -> None:
        if message.member != self.identity.member:  # else it is our own, from before this process was a host
            self.diagnostics.seeker(message, source, now)
        if source.multicast:
            self._announcer.asked()
        if not source.multicast or (message.padding and self._late_answers.take(now)):
            self._effects.append(Answer(source, self.offer()))

    def _heard_list(self, message: List, source: Source, now: float) -> None:
        if message.member == self.identity.member:
            return
        if self.diagnostics.concerns(self.identity, message, source, now, secured=self.secured):
            self.diagnostics.seeker(message, source, now)
        if source.multicast:
            self._browse_group.asked(now)
        elif self._browse_group.may_answer_by_unicast(now):
            self._effects.append(Answer(source, self.offer()))

    def _heard_offer(self, offer: Offer, source: Source, now: float) -> None:
        if offer.kind == "announcement":
            who = f"host {offer.hostname} ({offer.addresses[0]}), pid {offer.pid}"
            note_name(self.diagnostics.announcements, who)
            return
        if self._announcer.sealed and offer.state == "open":
            # That host should hear that the job runs. Two open hosts dial each other, which tells both.
            self._announcer.asked()
        self._sighted(offer, source, now)

    def _sighted(self, offer: Offer, source: Source, now: float) -> None:
        """Have another session of this job probed."""
        if not self.finished:
            self.conflicts.heard(offer, named(offer, source.interface, source.address), now, sender=source.address)
            self._hold(now)

    def heard_unverified(self, message: Datagram) -> None:
        """Handle a datagram whose signature is missing or wrong."""
        self.diagnostics.unverified(self.identity, message)

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Handle a new connection to the control port."""
        if self.closed:
            self._effects.append(Hangup(conn))
            return
        awaited = max(0, self.registrar.world_size - len(self.registrar.seats))
        self._callers.expect(awaited, sealed=self.registrar.phase.sealed)
        self._callers.accepted(conn, address, now)

    def owns(self, conn: int) -> bool:
        """Return whether a connection is this machine's."""
        return conn in self._callers or self.conflicts.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """Handle an established connection to another host."""
        self.conflicts.connected(conn, local_address, interface, now)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Handle bytes that came in on a connection."""
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
        """Handle the end of a connection."""
        if self.conflicts.owns(conn):
            self.conflicts.disconnected(conn, reason, now)
        else:
            self._callers.forget(conn)
            self.registrar.lost(conn, now, reason)
        self._hold(now)

    def _greet(self, conn: int, caller: Caller, now: float) -> None:
        """Answer a caller that has just proved itself and only asks."""
        hello = caller.hello
        if hello.purpose in ("probe", "conflict"):
            self._callers.send(conn, self.describe_running(hello.who, now))
        elector = self.registrar.assigned and hello.who.rank is None
        if hello.purpose == "conflict" and not elector and not self.finished:
            self.conflicts.caller(conn, hello.member, caller.as_seen(hello.who), now)

    def _frame(self, conn: int, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        if isinstance(frame, frames.Join) and caller.hello.purpose == "join":
            self._join(conn, caller, frame, now)
        elif isinstance(frame, frames.Confirmed):
            self.registrar.confirmed(conn, frame, now)
        elif isinstance(frame, frames.Ack):
            self.registrar.acknowledged(conn, frame.epoch, now)
        elif isinstance(frame, frames.HostSeen):
            if len(self._hosts_seen) < MAX_HOSTS_SEEN:
                itself = caller.hello.purpose == "conflict" and caller.hello.member == frame.offer.host
                self._hosts_seen.append(HostSighting(frame.offer, frame.stays, conn if itself else None))
        elif isinstance(frame, frames.Unreachable):
            self._redirect_failed(caller.as_seen(caller.hello.who), frame.session)
        elif isinstance(frame, frames.Ready):
            self.registrar.ready(conn)
        elif isinstance(frame, frames.Leave):
            self.registrar.left(conn, now, frame.reason or "it left")
            self._callers.send(conn, frames.Closed(session=self.session, reason="it has left"))
            self._callers.hang_up(conn)
        elif isinstance(frame, frames.Pong):
            self.registrar.pong(conn)
        elif isinstance(frame, frames.Ping):
            self._callers.send(conn, frames.Pong(number=frame.number))
        elif isinstance(frame, frames.Ask) and self.registrar.has_seat(conn):
            if frame.what == "roster":
                self._callers.answer(conn, "roster", self.registrar.version(), self._roster)
            else:
                self._callers.answer(conn, "status", self.registrar.status_version(), self._status)

    def _join(self, conn: int, caller: Caller, join: frames.Join, now: float) -> None:
        self.diagnostics.joined(caller.hello.member)
        self.registrar.join(conn, caller.hello.member, msgspec.structs.replace(join, who=caller.as_seen(join.who)), now)
        if self.redirect is not None:
            self._callers.send(conn, self.redirect)

    def _status(self) -> Iterator[frames.AnyFrame]:
        yield self.registrar.status()

    def _roster(self) -> Iterator[frames.AnyFrame]:
        """Yield the roster in frames that are short enough; nothing before the seal."""
        roster = self.registrar.roster() if self.registrar.phase.sealed else []
        for first in range(0, len(roster), SEATS_PER_FRAME):
            part = tuple(roster[first : first + SEATS_PER_FRAME])
            yield frames.Roster(first=first, total=len(roster), seats=part)

    def _hold(self, now: float) -> None:
        """Tell the registrar, after every event, whether it can go on."""
        self.registrar.hold(self.conflicts.any_alive or self.stepping_down, now)

    # --- what the registrar calls ----------------------------------------------------------------------------------

    def send(self, conn: int, frame: frames.AnyFrame) -> None:
        """Send a frame to a caller."""
        self._callers.send(conn, frame)

    def hang_up(self, conn: int) -> None:
        """Close a caller's connection after what is still to be sent."""
        self._callers.hang_up(conn)

    def prepare_store(self, address: str) -> None:
        """Have the store opened ahead."""
        self._callers.flush()  # the members first
        self._effects.append(PrepareStore(self._listens_at(address)))

    def open_store(self, epoch: int, address: str, now: float) -> None:
        """Have the store opened, and announce the session only to those that ask."""
        self._announcer.sealed, self._sealed_since = True, now
        self._effects.append(OpenStore(epoch, self._listens_at(address)))

    def no_common_network(self, matrix: str) -> None:
        """Fail: no address of this host was reached by every member."""
        self._fail(reports.no_common_network(self.identity, matrix), conflict=True)

    def reopened(self, reason: str, now: float) -> None:
        """Announce that the session takes members again."""
        self._announcer.sealed = False
        self._announcer.burst(now)
        if self._newest_addresses != self.endpoints.addresses:
            self.readdress(self._newest_addresses, now)
        self._effects.append(Notice(reports.reopened(self.identity, reason)))

    def formed(self) -> None:
        """Take the host's own place in the job."""
        registrar = self.registrar
        where, roster = registrar.places[self.identity.member], registrar.roster()
        path = self._path(registrar.store_address)
        self.conflicts.abandon()
        self.outcome = Formation(
            session=self.session,
            place=where,
            store_address=scoped(path.local_address, path.interface),
            store_port=self.store_port,
            interface=path.interface,
            address=next(seat.address for seat in roster if seat.rank == where.rank),
            roster_digest=roster_digest(roster),
        )
        self._effects.append(FormedStore())  # GO waits in the callers until they are flushed
        if not contiguous(list(registrar.places.values())):
            self._effects.append(Notice(reports.not_contiguous(self.identity)))

    def member_lost(self, who: frames.ProcessInfo, how: str) -> None:
        """Close the store: the other members can't go on without this one."""
        self._effects.append(CloseStore(reports.member_lost(self.identity, who, how), lost=who, how=how))

    # --- the store -------------------------------------------------------------------------------------------------

    def store_prepared(self, port: int) -> None:
        """Take note that the store that was asked for ahead listens."""
        self.registrar.store_prepared(port)

    def store_opened(self, epoch: int, port: int, token: str, now: float) -> None:
        """Take note that the store listens."""
        self.store_port = port
        self.registrar.store_opened(epoch, self.registrar.store_address, port, token, now)

    def store_failed(self, epoch: int, error: MingleError, now: float) -> None:
        """Fail: the store could not be opened, and another attempt would not help."""
        if self.registrar.awaits_store(epoch):
            self._fail(error, conflict=False)

    def store_proved(self, session: bytes, epoch: int, now: float) -> None:
        """Ignore the store of another session: this process lost its seat there, and was elected since it asked."""

    def store_unreachable(self, session: bytes, epoch: int, reason: str, now: float) -> None:
        """Ignore the same when it does not answer."""

    # --- stepping down for another host (when ranks are assigned) ----------------------------------------------------

    def step_down(self, now: float) -> None:
        """Take no members and confirm nothing, for the time that it takes to join another host."""
        self.stepping_down = True
        self._hold(now)

    def redirect_members(self, offer: Offer) -> None:
        """Send the members to that host, and all processes that still come."""
        self.redirect, self.redirect_failed = frames.Redirect(offer=offer), False
        for conn in self.registrar.member_connections():
            self._callers.send(conn, self.redirect)

    def _redirect_failed(self, who: frames.ProcessInfo, session: bytes) -> None:
        if self.redirect is not None and self.redirect.offer.session == session:
            self.redirect_failed = True
            note(self.diagnostics.hosts, self.redirect.offer.host_name, f"not reached by {who}")

    def stay_host(self, now: float) -> None:
        """Take members again: the other host is gone, or some members can't reach it."""
        self.stepping_down, self.redirect, self.redirect_failed = False, None, False
        self._announcer.burst(now)
        self._hold(now)

    def take_hosts_seen(self) -> list[HostSighting]:
        """Return, once, the other hosts that were reported."""
        seen, self._hosts_seen = self._hosts_seen, []
        return seen

    # --- time ------------------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        if self.closed:
            return
        self._callers.handle_timer(now)
        self.registrar.handle_timer(now)
        self.conflicts.handle_timer(now)
        if self._announcer.should_speak(now) and not self.stepping_down:
            self._effects.append(Multicast(self.offer()))
        if not self.finished and self._browse_group.should_ask(now):
            self._effects.append(Multicast(self.identity.list(), browse=True))
        if self._browse_group.should_answer(now):
            self._effects.append(Multicast(self.offer(), browse=True))
        self._hold(now)
        if not self.finished:
            self._judge(now)

    def _judge(self, now: float) -> None:
        """Fail if another host of this job stays."""
        if others := self.conflicts.lasting(now):
            self._fail(reports.two_hosts(self.identity, others), conflict=True)
            return
        if error := self.conflicts.running_check.verdict(now):
            self._fail(error, conflict=True)

    def expired(self, now: float) -> bool:
        """Return whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """End at the deadline with the error that explains it."""
        identity = self.identity
        failure = self.conflicts.running_check.failure(self._deadline)
        if failure is None and not self.had_members:
            failure = reports.authentication(identity, self.diagnostics, facts, secured=self.secured)
        self._fail(failure or self._incomplete(facts), conflict=False)

    def _incomplete(self, facts: NetworkFacts) -> MingleError:
        """Return the error that names the missing ranks."""
        status = self.registrar.status()
        return reports.timeout(
            self.identity, self.diagnostics, facts, seconds=self.timeout, status=status, connected=True
        )

    def _fail(self, error: MingleError, *, conflict: bool) -> None:
        if self.failure is None:
            self.failure = error
            reason = reports.one_line(error.observation)
            self._end(reason, conflict=conflict, network=isinstance(error, InterfaceError))

    def close(self, reason: str) -> None:
        """End the session on purpose: tell all callers and hang up."""
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
                    # Every rank can then name the ranks that were missing.
                    self._callers.send(conn, status)
                self._callers.send(conn, farewell)
            self._callers.hang_up(conn)
        self.conflicts.abandon()
        bye = Bye(job=self.identity.job, attempt=self.identity.attempt, session=self.session)
        self._effects.append(Multicast(bye))
