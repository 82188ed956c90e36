"""The rank that hosts the gathering: a pure machine around the registrar.

It speaks on the network (:class:`~mingle.protocol.Announcer`), holds one conversation per member
(:class:`~mingle.control.HostConversation`), and carries frames to the registrar and its decisions back. Two things it
watches on its own: another live host of the same job (*rival*), and another run of the job that is sealed already
(*blocker*). Neither is believed from a datagram; both are proved over TCP.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from mingle import decisions, frames, reports
from mingle.authentication import JobKey, new_nonce
from mingle.control import HandshakeFailed, HostConversation
from mingle.datagrams import MAX_ADDRESSES, Bye, Datagram, List, Offer, Rejected, Seek
from mingle.errors import InterfaceError, MingleError
from mingle.lobby import Lobby
from mingle.machine import (
    Address,
    Answer,
    CloseStore,
    Effect,
    Evidence,
    Formation,
    Hangup,
    Identity,
    Multicast,
    NetworkFacts,
    NewId,
    Notice,
    OpenStore,
    Snapshot,
    Source,
    Write,
    note,
    note_name,
)
from mingle.protocol import Announcer
from mingle.proving import Endpoint
from mingle.registrar import Registrar
from mingle.rivals import Rivals
from mingle.seats import Phase, roster_digest

PROOF_SECONDS = 2.0
"""How long a caller may take until it has proved itself."""
# Callers that have not proved themselves; bounded against a flood of connections that never speak.
MAX_UNPROVED = 2048
# Reports of other hosts, handed out after each frame; bounded against a member that sends many at once.
MAX_SIGHTINGS = 64
# The longest names (four bytes a character) of so many seats still fit into one frame.
SEATS_PER_FRAME = 128
_SEALED_PHASES = (Phase.SEALING, Phase.SEALED, Phase.RUNNING)


@dataclass(slots=True)
class _Caller:
    conversation: HostConversation
    address: str


@dataclass(slots=True)
class Host:
    """The machine of the rank that hosts. ``outcome`` or ``failure`` ends the gathering; it serves on until closed."""

    identity: Identity
    session: bytes
    addresses: tuple[Address, ...]
    """Its own addresses in order of preference; the ones that are announced."""
    port: int
    key: JobKey | None
    timeout: float
    new_id: NewId
    rng: random.Random
    started: float
    advertised: tuple[str, ...] = ()
    """Addresses that are announced beside the own ones because NAT hides those."""
    outcome: Formation | None = None
    failure: MingleError | None = None
    evidence: Evidence = field(default_factory=Evidence)
    closed: bool = False
    registrar: Registrar = field(init=False)
    rivals: Rivals = field(init=False)
    _announcer: Announcer = field(init=False)
    _lobby: Lobby = field(init=False)
    _deadline: float = field(init=False)
    _effects: list[Effect] = field(default_factory=list)
    _callers: dict[int, _Caller] = field(default_factory=dict)
    _unproved: dict[int, float] = field(default_factory=dict)
    """Callers that have not proved themselves, the oldest first, each with its deadline."""
    _to_write: set[int] = field(default_factory=set)
    """Callers whose conversations may have something to say."""
    _sealed_since: float = 0.0
    stranded: bool = False
    """A member could not follow where it was sent."""
    _making_way: bool = False
    _moved: frames.Moved | None = None
    _sightings: list[tuple[Offer, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        identity = self.identity
        own = frames.Join(
            world_size=identity.world_size,
            rank=identity.rank,
            node=identity.node,
            local_rank=identity.local_rank,
            local_world_size=identity.local_world_size,
            node_rank=identity.node_rank,
            who=self._who(),
            kind=identity.kind,
            versions=identity.versions,
            paths=tuple(
                frames.Path(host_address=each.address, local_address=each.address, interface=each.interface[:64])
                for each in self.addresses
            )
            + tuple(
                frames.Path(
                    host_address=each,
                    local_address=self.addresses[0].address,
                    interface=self.addresses[0].interface[:64],
                )
                for each in self.advertised
            ),
        )
        prefixes: Mapping[str, int] = {each.address: each.prefix_length for each in self.addresses}
        self.registrar = Registrar(
            self.session,
            identity.world_size,
            identity.member,
            own,
            prefix_lengths={**dict.fromkeys(self.advertised, 0), **prefixes},
            kind=identity.kind,
        )
        self._announcer = Announcer(self.started)
        self._deadline = self.started + self.timeout
        self._lobby = Lobby(self.started, self._deadline, self.rng)
        competes = identity.rank is None
        self.rivals = Rivals(self._hello_to_rival, self.key, self.new_id, self._effects, competes)

    def _who(self) -> frames.Who:
        return msgspec.structs.replace(
            self.identity.who, address=self.addresses[0].address, rank=self.identity.rank
        )

    def announced(self) -> tuple[str, ...]:
        """Every address under which the control port may be dialled."""
        own = tuple(each.address for each in self.addresses)
        return (*self.advertised, *own)[:MAX_ADDRESSES]

    # --- what the driver reads -------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        for conn in sorted(self._to_write):
            data = self._callers[conn].conversation.data_to_send()
            if data:
                self._effects.append(Write(conn, data))
        self._to_write.clear()
        done = list(self._effects)
        self._effects.clear()
        return done

    @property
    def finished(self) -> bool:
        """Whether the gathering has come to an end, good or bad."""
        return self.outcome is not None or self.failure is not None

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [self._announcer.next_timer(), self.registrar.next_timer(), self.rivals.next_timer()]
        times.append(next(iter(self._unproved.values()), None))
        if not self.finished:
            times += [self._deadline, self._lobby.next_timer()]
            times.append(self.rivals.verdict_timer(self.timeout))
        else:
            times.append(self._lobby.answer_timer())
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """How far it has come, in a word, for the log."""
        return f"{self.registrar.phase.value}, {len(self.registrar.seats)}/{self.identity.world_size} joined"

    def snapshot(self) -> Snapshot:
        """How it stands, for the progress line."""
        status = self.registrar.status()
        note_text = ""
        if self.rivals.running:
            note_text = f"the job runs already, hosted by {self.rivals.running[0].host}"
        return Snapshot(True, status.joined, status.awaited or status.unconfirmed, status.phase, note_text)

    def ask_status(self) -> None:
        """The host knows how it stands."""

    def calling(self) -> Datagram | None:
        """What to tell unicast peers now."""
        return None if self.finished else self.offer()

    def offer(self) -> Offer:
        """What this host says of itself."""
        return Offer(
            job=self.identity.job,
            attempt=self.identity.attempt,
            session=self.session,
            host=self.identity.member,
            addresses=self.announced(),
            port=self.port,
            world_size=self.identity.world_size,
            joined=len(self.registrar.seats),
            state="sealed" if self.registrar.phase in _SEALED_PHASES else "open",
            kind=self.identity.kind,
            assigned=self.registrar.assigned,
            hostname=self.identity.who.hostname,
            pid=self.identity.who.pid,
        )

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if self.closed:
            return
        if isinstance(message, List):
            if message.member != self.identity.member:
                self._asked_in_lobby(message, source, now)
            return
        if message.job != self.identity.job:
            self.evidence.other(message, source)
            return
        if message.attempt != self.identity.attempt:
            note(self.evidence.other_attempts, message.attempt, source.address)
            return
        if source.signed and self.key is None:
            self.evidence.signed_without_secret += 1
        if isinstance(message, Seek):
            self.evidence.seeker(message, source)
            if source.multicast:
                self._announcer.asked()
            else:
                self._effects.append(Answer(source, self.offer()))
        elif isinstance(message, Offer) and message.session != self.session:
            self._other_host(message, source, now)

    def _asked_in_lobby(self, message: List, source: Source, now: float) -> None:
        if message.job != self.identity.job:
            self.evidence.other(message, source)
        else:
            self.evidence.seeker(message, source)
        if source.multicast:
            self._lobby.asked(now, same_job=False)
        else:
            self._effects.append(Answer(source, self.offer()))

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong: a hint for the report, and no more than that."""
        onlooker = isinstance(message, Seek) and message.kind == "announcement"
        if (message.job, message.attempt) == (self.identity.job, self.identity.attempt) and not onlooker:
            self.evidence.secret_signs += 1

    def _other_host(self, offer: Offer, source: Source, now: float) -> None:
        if offer.kind == "announcement":
            note_name(self.evidence.announcements, f"host {offer.hostname} ({offer.addresses[0]}), pid {offer.pid}")
            return
        if self._announcer.sealed and offer.state == "open":
            # It should hear that the job runs. Two open hosts dial each other, which tells both.
            self._announcer.asked()
        if self.finished:
            return
        endpoints = [Endpoint(address, source.interface) for address in offer.addresses]
        self.rivals.heard(offer, endpoints, now)

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Somebody has connected to the control port."""
        if len(self._unproved) >= MAX_UNPROVED:
            self._drop(next(iter(self._unproved)))
        conversation = HostConversation(
            job=self.identity.job,
            attempt=self.identity.attempt,
            session=self.session,
            addresses=self.announced(),
            port=self.port,
            key=self.key,
        )
        self._callers[conn] = _Caller(conversation, address)
        self._unproved[conn] = now + PROOF_SECONDS
        self._to_write.add(conn)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return conn in self._callers or self.rivals.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float) -> None:
        """A connection to another host stands."""
        self.rivals.connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        if self.rivals.owns(conn):
            self.rivals.received(conn, untrusted, now)
            self._hold(now)
            if not self.finished:
                self._judge(now)
            return
        caller = self._callers[conn]
        self._to_write.add(conn)
        try:
            received = caller.conversation.receive_data(untrusted)
        except (Rejected, HandshakeFailed) as failure:
            hello = caller.conversation.hello
            asked_only = hello is not None and hello.purpose == "probe"
            if isinstance(failure, HandshakeFailed) and failure.reason == "secret" and not asked_only:
                note_name(self.evidence.secret_failures, f"{caller.address}: {failure}")
            self._drop(conn)
            self.registrar.lost(conn, now, str(failure))
            self._hold(now)
            return
        if caller.conversation.proved and self._unproved.pop(conn, None) is not None:
            self._greet(conn, caller, now)
        for frame in received:
            if conn in self._callers:
                self._frame(conn, caller, frame, now)
        self._hold(now)

    def lost(self, conn: int, reason: str, now: float) -> None:
        """A connection ended."""
        if self.rivals.owns(conn):
            self.rivals.closed(conn, reason, now)
            self._hold(now)
            return
        self._forget(conn)
        self.registrar.lost(conn, now, reason)
        self._hold(now)

    def _forget(self, conn: int) -> _Caller | None:
        self._unproved.pop(conn, None)
        self._to_write.discard(conn)
        self.rivals.caller_gone(conn)
        return self._callers.pop(conn, None)

    def _drop(self, conn: int) -> None:
        """Says what is still to be said and hangs up."""
        caller = self._forget(conn)
        if caller is None:
            return
        data = caller.conversation.data_to_send()
        if data:
            self._effects.append(Write(conn, data))
        self._effects.append(Hangup(conn))

    def _greet(self, conn: int, caller: _Caller, now: float) -> None:
        """A caller has proved itself; the ones that only asked are answered."""
        hello = caller.conversation.hello
        assert hello is not None
        if hello.purpose in ("probe", "rival"):
            caller.conversation.send(self._running(now))
        elector = self.registrar.assigned and hello.who.rank is None
        if hello.purpose == "rival" and not elector and not self.finished:
            self.rivals.caller(conn, hello.member, msgspec.structs.replace(hello.who, address=caller.address), now)

    def _running(self, now: float) -> frames.Running:
        phase = self.registrar.phase
        store_stands = phase in (Phase.SEALED, Phase.RUNNING)
        return frames.Running(
            state="running" if phase is Phase.RUNNING else "sealed" if phase in _SEALED_PHASES else "open",
            world_size=self.identity.world_size,
            seconds=max(0.0, now - (self._sealed_since if phase in _SEALED_PHASES else self.started)),
            host=self._who(),
            joined=tuple(sorted(who.rank for who in self.registrar.whos() if who.rank is not None))[:4096],
            missing=self.registrar.missing[:4096],
            roster=self.registrar.crowd()[:2048],
            store_address=self.registrar.store_address if store_stands else "",
            store_port=self.store_port if store_stands else 0,
        )

    def _frame(self, conn: int, caller: _Caller, frame: frames.AnyFrame, now: float) -> None:
        hello = caller.conversation.hello
        assert hello is not None
        if isinstance(frame, frames.Join) and hello.purpose == "join":
            who = msgspec.structs.replace(frame.who, address=caller.address)
            self.evidence.seekers.pop(hello.member, None)
            self.registrar.join(conn, hello.member, msgspec.structs.replace(frame, who=who), now)
            if self._moved is not None:
                caller.conversation.send(self._moved)
        elif isinstance(frame, frames.Confirmed):
            self.registrar.confirmed(conn, frame, now)
        elif isinstance(frame, frames.Ack):
            self.registrar.acknowledged(conn, frame.epoch, now)
        elif isinstance(frame, frames.Sighting):
            if len(self._sightings) < MAX_SIGHTINGS:
                self._sightings.append((frame.offer, frame.stands))
        elif isinstance(frame, frames.Stranded):
            sent_there = self._moved is not None and self._moved.offer.session == frame.session
            self.stranded = self.stranded or sent_there
        elif isinstance(frame, frames.Ready):
            self.registrar.ready(conn)
        elif isinstance(frame, frames.Leave):
            self.registrar.left(conn, now, frame.reason or "it left")
            self._drop(conn)
        elif isinstance(frame, frames.Pong):
            self.registrar.pong(conn)
        elif isinstance(frame, frames.Ping):
            caller.conversation.send(frames.Pong(number=frame.number))
        elif isinstance(frame, frames.Ask) and frame.what == "status":
            caller.conversation.send(self.registrar.status())
        elif isinstance(frame, frames.Ask):
            self._send_roster(caller)

    def _send_roster(self, caller: _Caller) -> None:
        if self.registrar.phase not in _SEALED_PHASES:
            return
        seats = self.registrar.roster()
        for first in range(0, len(seats), SEATS_PER_FRAME):
            part = tuple(seats[first : first + SEATS_PER_FRAME])
            caller.conversation.send(frames.Roster(first=first, total=len(seats), seats=part))

    # --- decisions -------------------------------------------------------------------------------------------------

    def _hold(self, now: float) -> None:
        self.registrar.hold(self.rivals.any_alive or self._making_way, now)
        self._decide(now)

    def _decide(self, now: float) -> None:
        """Carries out what the registrar has decided."""
        for decision in self.registrar.decisions():
            match decision:
                case decisions.Tell(conn, frame):
                    if conn in self._callers:
                        self._callers[conn].conversation.send(frame)
                        self._to_write.add(conn)
                case decisions.Drop(conn):
                    self._drop(conn)
                case decisions.OpenStore(epoch, address):
                    self._announcer.sealed = True
                    self._sealed_since = now
                    self._effects.append(OpenStore(epoch, self._local(address)))
                case decisions.NoCommonNetwork(matrix):
                    self._fail(reports.no_common_network(self.identity, matrix), conflict=True)
                case decisions.Reopened(reason):
                    self._announcer.sealed = False
                    self._announcer.burst(now)
                    self._effects.append(
                        Notice(f"job {self.identity.job!r}: forming it was interrupted and starts again: {reason}")
                    )
                case decisions.Formed(contiguous):
                    self._formed(contiguous)
                case decisions.Deserted(who):
                    self._effects.append(
                        CloseStore(f"job {self.identity.job!r}: {who} was lost before its process group stood")
                    )

    def _local(self, address: str) -> str:
        """Returns where to listen for an announced address: NAT leads the advertised ones to our first own."""
        return next(path.local_address for path in self.registrar.own.paths if path.host_address == address)

    def _formed(self, contiguous: bool) -> None:
        where = self.registrar.places[self.identity.member]
        seat = next(each for each in self.registrar.roster() if each.rank == where.rank)
        path = next(
            each for each in self.registrar.own.paths if each.host_address == self.registrar.store_address
        )
        self.rivals.abandon()
        self.outcome = Formation(
            session=self.session,
            rank=where.rank,
            world_size=self.identity.world_size,
            local_rank=where.local_rank,
            local_world_size=where.local_world_size,
            node_rank=where.node_rank,
            num_nodes=where.num_nodes,
            store_address=path.local_address,
            store_port=self.store_port,
            interface=path.interface,
            address=seat.address,
            roster_digest=roster_digest(self.registrar.roster()),
        )
        if not contiguous:
            self._effects.append(
                Notice(
                    f"job {self.identity.job!r}: the given ranks are not contiguous per node. Frameworks that compute "
                    "rank = node_rank * devices + local_rank (Lightning, for one) will be wrong; give each node one "
                    "block of ranks."
                )
            )

    store_port: int = 0

    def store_opened(self, epoch: int, port: int, token: str, now: float) -> None:
        """The store listens."""
        self.store_port = port
        self.registrar.store_opened(epoch, self.registrar.store_address, port, token, now)
        self._decide(now)

    def store_failed(self, error: MingleError, now: float) -> None:
        """The store could not be opened, and trying again would not help."""
        self._fail(error, conflict=False)

    # --- making way for another host (when ranks are assigned) -------------------------------------------------------

    def take_sightings(self) -> list[tuple[Offer, bool]]:
        """Hands out which other hosts were reported, each with whether it stands against a lower id."""
        seen, self._sightings = self._sightings, []
        return seen

    @property
    def has_members(self) -> bool:
        """Whether anybody but the host itself has a seat."""
        return len(self.registrar.seats) > 1

    def make_way(self, now: float) -> None:
        """Stops taking members and confirming, for the time that it takes to join another host."""
        self._making_way = True
        self._hold(now)

    def send_after(self, offer: Offer) -> None:
        """Sends the members to that host, and everybody who still comes."""
        self._moved, self.stranded = frames.Moved(offer=offer), False
        for conn in self.registrar.member_connections():
            self._callers[conn].conversation.send(self._moved)
            self._to_write.add(conn)

    def open_again(self, now: float) -> None:
        """Takes members again: the other host is gone, or not reached by all."""
        self._making_way, self._moved, self.stranded = False, None, False
        self._announcer.burst(now)
        self._hold(now)

    # --- time ------------------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        if self.closed:
            return
        for conn, deadline in list(self._unproved.items()):
            if now < deadline:
                break
            self._drop(conn)
        self.registrar.handle_timer(now)
        self.rivals.handle_timer(now)
        self._hold(now)
        if not self.finished:
            self._judge(now)
        if self._announcer.should_speak(now) and not self._making_way:
            self._effects.append(Multicast(self.offer()))
        if not self.finished and self._lobby.should_ask(now):
            self._effects.append(Multicast(self.identity.list(), lobby=True))
        if self._lobby.should_answer(now):
            self._effects.append(Multicast(self.offer(), lobby=True))

    def _judge(self, now: float) -> None:
        """Looks whether another host of this job stays."""
        rivals = self.rivals.lasting(now)
        if rivals:
            self._fail(reports.two_hosts(self.identity, rivals), conflict=True)
            return
        for running, waited, told in self.rivals.blockers(now):
            if not told:
                self._effects.append(Notice(reports.running_notice(self.identity, running, waited)))
            if waited >= self.rivals.patience(self.timeout):
                self._fail(reports.running(self.identity, running, waited), conflict=True)
                return

    def expired(self, now: float) -> bool:
        """Tells whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        status = self.registrar.status()
        blockers = self.rivals.blockers(self._deadline)
        failure = None
        if blockers:
            failure = reports.running(self.identity, *blockers[0][:2])
        elif len(self.registrar.seats) == 1:
            failure = reports.authentication(self.identity, self.evidence, facts, secured=self.key is not None)
        self._fail(
            failure
            or reports.timeout(
                self.identity, self.evidence, facts, seconds=self.timeout, status=status, connected=True
            ),
            conflict=False,
        )

    def _fail(self, error: MingleError, *, conflict: bool) -> None:
        if self.failure is None:
            self.failure = error
            self._end(error.observation, conflict=conflict, network=isinstance(error, InterfaceError))

    def close(self, reason: str) -> None:
        """Ends the session on purpose: says so to everybody and hangs up."""
        if not self.closed:
            self._end(reason, conflict=False)

    def _end(self, reason: str, *, conflict: bool, network: bool = False) -> None:
        self.closed = True
        farewell = frames.Closed(session=self.session, reason=reason[:2048], conflict=conflict, network=network)
        status = self.registrar.status() if self.outcome is None else None
        for conn, caller in list(self._callers.items()):
            if caller.conversation.proved:
                if status is not None:
                    # So that every rank can name the ranks that were missing.
                    caller.conversation.send(status)
                caller.conversation.send(farewell)
            self._drop(conn)
        self.rivals.abandon()
        self._effects.append(
            Multicast(Bye(job=self.identity.job, attempt=self.identity.attempt, session=self.session))
        )

    def _hello_to_rival(self, session: bytes, purpose: frames.Purpose) -> frames.Hello:
        return frames.Hello(
            job=self.identity.job,
            attempt=self.identity.attempt,
            member=self.identity.member,
            session=session,
            nonce=new_nonce(),
            purpose=purpose,
            who=self._who(),
        )
