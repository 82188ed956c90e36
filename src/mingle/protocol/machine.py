"""What the pure machines of :mod:`mingle.protocol` and their driver say to each other.

A machine never touches a socket or a clock. Its driver (:mod:`mingle.engine.driver`, or a simulator) tells it what
happened, each time with the present time, and then carries out its *effects* in order.

Records are structs of msgspec here, and in all that a rank imports, rather than dataclasses: every two or three
dataclasses add a millisecond to the import of mingle, because the methods of each are compiled at import.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

import msgspec
from msgspec import Struct, field

from mingle.diagnostics import Finding
from mingle.protocol.claims import ClaimBudget, DialBudget
from mingle.protocol.handshake import Call
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, Kind, List, Offer, Seek, asker_name
from mingle.wire.frames import MAX_OWN_ADDRESSES, AnyFrame, Join, Path, Place, ProcessInfo, Purpose, Seat

# Other jobs and processes that were heard are remembered for reports; bounded against a network full of them.
REMEMBERED_PER_KIND = 64
LATELY_SECONDS = 75.0
"""How long a job that was heard counts as being on the network: two questions on the browse group, and a lost one."""
KEPT_OUT_SECONDS = 5.0
"""How long a rank must have looked for the job until it counts as kept out of it."""
SEEKING_SECONDS = 15.0
"""How long a rank that was heard counts as looking for the job: a few of its questions."""

NewId: TypeAlias = Callable[[], int]
"""Gives each connection of a process its own number."""


class Identity(Struct, frozen=True, kw_only=True):
    """This process in its job."""

    job: str
    attempt: str
    member: bytes
    """Sixteen random bytes, fresh in each call."""
    rank: int | None
    world_size: int
    node: str
    who: ProcessInfo
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    kind: Kind = "ranks"
    versions: dict[str, str] = field(default_factory=dict)
    addresses: Callable[[], Collection[str]] = tuple
    """Returns all addresses of this machine; none where its node key needs no second opinion."""
    minimum: int | None = None
    """Agents only: how many nodes there must be; ``world_size`` is how many there may be."""

    def seek(self) -> Seek:
        """Return the SEEK that asks for the host of this process's job."""
        return Seek(
            job=self.job,
            attempt=self.attempt,
            member=self.member,
            world_size=self.world_size,
            rank=self.rank,
            hostname=self.who.hostname,
            pid=self.who.pid,
            kind=self.kind,
        )

    def call(self, session: bytes, purpose: Purpose) -> Call:
        """Return what a HELLO to the host of a session is made of."""
        return Call(
            job=self.job, attempt=self.attempt, member=self.member, session=session, purpose=purpose, who=self.who
        )

    def join(self, who: ProcessInfo, paths: tuple[Path, ...], token: bytes = b"") -> Join:
        """Return the JOIN that asks for a seat.

        Args:
            who: this process as its host knows it.
            paths: the paths to the host that have been proved.
            token: the token of the seat, if this process has it already.
        """
        addresses = self.addresses()
        return Join(
            world_size=self.world_size,
            rank=self.rank,
            node=self.node,
            local_rank=self.local_rank,
            local_world_size=self.local_world_size,
            node_rank=self.node_rank,
            who=who,
            kind=self.kind,
            versions=self.versions,
            paths=paths,
            # A part of them could lack those that other processes use.
            addresses=tuple(sorted(addresses)) if len(addresses) <= MAX_OWN_ADDRESSES else (),
            minimum=self.minimum,
            token=token,
        )

    def list(self) -> List:
        """Return the LIST that asks which jobs there are."""
        return List(
            job=self.job,
            attempt=self.attempt,
            member=self.member,
            rank=self.rank,
            hostname=self.who.hostname,
            pid=self.who.pid,
        )


class Address(Struct, frozen=True):
    """One of this machine's own addresses."""

    address: str
    interface: str
    prefix_length: int
    index: int = 0
    """The kernel's number of the interface, which is the scope of a link-local address."""
    last_resort: bool = False
    """Whether it is on a tunnel, or on a bridge inside this machine: it is used only if all share nothing better."""


class Endpoints(Struct, frozen=True, kw_only=True):
    """Where others can connect to this process."""

    addresses: tuple[Address, ...]
    """This process's own addresses, best first; it listens on each of them."""
    port: int
    """The TCP port on which it listens."""
    advertised: tuple[str, ...] = ()
    """Addresses to announce as well, because NAT hides the process's own."""
    named: bool = False
    """Whether the user named the interfaces; if so, their order counts."""


class Context(Struct, frozen=True, kw_only=True):
    """What its driver gives a machine to work with."""

    key: JobKey | None
    """The key for signatures and proofs; None: the job has no secret."""
    new_id: NewId
    rng: random.Random
    timeout: float
    """Seconds until a job that has not formed is an error."""
    free_files: Callable[[], int] = lambda: 1_000_000
    """Return the number of further connections that this process can hold."""
    unsent: Callable[[int], int] = lambda _conn: 0
    """Return the number of unsent bytes of a connection."""
    dials: DialBudget = field(default_factory=DialBudget)
    """The budget for connections to unproved endpoints."""
    claims: ClaimBudget = field(default_factory=ClaimBudget)
    """The budget of the time to wait for sessions that are only claimed, of one attempt to join."""


def scoped(address: str, interface: str) -> str:
    """Return an address as torch and the kernel need it here: a link-local one with the interface it is reached by."""
    return f"{address}%{interface}" if address.startswith("fe80:") else address


class Source(Struct, frozen=True, kw_only=True):
    """Where a datagram came from."""

    interface: str
    multicast: bool = True
    signed: bool = False
    verified: bool = False
    """An OFFER that our secret has signed."""
    address: str = ""
    reply_to: object = None
    """The driver's own handle for an answer by unicast."""


class Formation(Struct, frozen=True, kw_only=True):
    """A job that has formed, as one rank knows it."""

    session: bytes
    place: Place
    store_address: str
    store_port: int
    interface: str
    address: str
    roster_digest: bytes


def lone_formation(session: bytes, port: int, *, local_rank: int = 0) -> Formation:
    """Return the formation of a job of one process, whose store listens on loopback."""
    return Formation(
        session=session,
        place=Place(rank=0, world_size=1, local_rank=local_rank, local_world_size=1, node_rank=0, num_nodes=1),
        store_address="127.0.0.1",
        store_port=port,
        interface="lo" if sys.platform == "linux" else "lo0",
        address="127.0.0.1",
        roster_digest=b"",
    )


def roster_digest(seats: Sequence[Seat]) -> bytes:
    """Return the digest of a roster: SEALED promises it, and the roster must match it."""
    return hashlib.sha256(msgspec.msgpack.encode(list(seats))).digest()


# --- effects -------------------------------------------------------------------------------------------------------


class Multicast(Struct, frozen=True):
    """Send to the job's group (or the browse group) on every interface."""

    message: Datagram
    browse: bool = False
    turn: int | None = None
    """The number of a datagram that goes out by one IP version, IPv4 and IPv6 in turn; None: by both."""
    padded: bool = False
    """Whether to make a question as long as the longest answer, so that it can be answered by unicast."""


class Answer(Struct, frozen=True):
    """Send to the source of what was heard, by unicast."""

    source: Source
    message: Datagram


class Dial(Struct, frozen=True):
    """Connect. ``interface`` is where the address was heard: the scope of a link-local one."""

    conn: int
    address: str
    port: int
    interface: str


class Write(Struct, frozen=True):
    """Write on a connection."""

    conn: int
    data: bytes


class Hangup(Struct, frozen=True):
    """Close a connection, after what was to be written on it. The machine is not told of the end."""

    conn: int


class Reset(Struct, frozen=True):
    """End a connection by a TCP reset, so that the peer does not take it for the end of this process."""

    conn: int


class PrepareStore(Struct, frozen=True):
    """Open the store on this address of ours ahead of the seal, which will most likely choose it."""

    address: str


class OpenStore(Struct, frozen=True):
    """Open the store on this address of ours."""

    epoch: int
    address: str


class ReachStore(Struct, frozen=True):
    """Connect to this store ahead of the seal, which will most likely name it."""

    address: str
    port: int


class ProveStore(Struct, frozen=True):
    """Connect to the store and read the session's token there."""

    epoch: int
    address: str
    port: int
    session: bytes
    token: str


class FormedStore(Struct, frozen=True):
    """Take note that GO is decided; this effect comes before GO is sent."""


class CloseStore(Struct, frozen=True):
    """Close the store with all its connections: a rank was lost, and no other rank must wait for it."""

    reason: str
    lost: ProcessInfo | None = None
    """The rank that was lost; None: the session has ended for another reason."""
    how: str = ""
    """How it was lost."""


class Notice(Struct, frozen=True):
    """Show a warning to people."""

    text: str


_StoreEffect: TypeAlias = PrepareStore | OpenStore | ReachStore | ProveStore | FormedStore | CloseStore
Effect: TypeAlias = Multicast | Answer | Dial | Write | Hangup | Reset | _StoreEffect | Notice


# --- what a driver calls -------------------------------------------------------------------------------------------


class Machine(Protocol):
    """What every machine offers its driver."""

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""

    def next_timer(self) -> float | None:
        """Return when to call :meth:`handle_timer`."""

    def handle_timer(self, now: float, /) -> None:
        """Act on the time."""

    def calling(self) -> Datagram | None:
        """Return what to send to unicast peers now."""

    def heard(self, message: Datagram, source: Source, now: float, /) -> None:
        """Process a valid datagram."""

    def owns(self, conn: int, /) -> bool:
        """Return whether a connection is this machine's."""

    def accepted(self, conn: int, address: str, now: float, /) -> None:
        """Process a connection to the control port."""

    def connected(self, conn: int, local_address: str, interface: str, now: float, /, *, weak: bool = False) -> None:
        """Process an established outgoing connection; ``weak``: it says nothing about the peer's network."""

    def received(self, conn: int, untrusted: bytes, now: float, /) -> None:
        """Process bytes from a connection."""

    def disconnected(self, conn: int, reason: str, now: float, /) -> None:
        """Process the end of a connection, or the failure to make one."""

    def close(self, reason: str, /) -> None:
        """End everything."""


class Listening(Protocol):
    """A machine whose control port others connect to."""

    def readdress(self, addresses: tuple[Address, ...], now: float, /) -> None:
        """Announce these addresses, unless they are announced already."""


class RegistrarPort(Protocol):
    """What a registrar calls: its members' connections, the store, and the host."""

    def send(self, conn: int, frame: AnyFrame) -> None:
        """Send a frame."""

    def hang_up(self, conn: int) -> None:
        """Close a connection after what is still to be sent."""

    def prepare_store(self, address: str) -> None:
        """Open the store on this address already: it will most likely be needed there."""

    def open_store(self, epoch: int, address: str, now: float) -> None:
        """Open the store and call the registrar's ``store_opened``."""

    def no_common_network(self, matrix: str) -> None:
        """Fail: no address of the host was reached by every member."""

    def reopened(self, reason: str, now: float) -> None:
        """Announce that an epoch was voided and the session takes members again."""

    def formed(self) -> None:
        """Take note of GO."""

    def member_lost(self, who: ProcessInfo, how: str) -> None:
        """Handle the loss of a member after GO and before its process group existed: the others can't go on."""


# --- what reports are made of --------------------------------------------------------------------------------------


class NetworkFacts(Struct, frozen=True, kw_only=True):
    """What the driver knows and a report should say."""

    interfaces: Sequence[str] = ()
    groups: Sequence[str] = ()
    port: int = 0
    peers: Sequence[str] = ()
    sent: int = 0
    received: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    send_errors: Counter[str] = field(default_factory=Counter)
    failures: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    """What is wrong with this machine, worst first; read when something has failed."""


class Snapshot(Struct, frozen=True):
    """The state of a discovery, for the progress line."""

    host_found: bool
    joined: int
    missing: tuple[int, ...]
    phase: str = "open"
    note: str = ""
    hosts: str = ""
    """The machines of those that have joined, if others are missing."""


class Diagnostics(Struct):
    """What was heard and tried, kept for the error that explains why the job did not form."""

    unit: str = "rank"
    """What the ranks of this job count (`ProcessInfo.unit`)."""
    other_jobs: dict[str, str] = field(default_factory=dict)
    """Other job ids on the network, each with a process that named it."""
    other_seekers: dict[str, dict[bytes, None]] = field(default_factory=dict)
    """The processes that look for the host of another job, by job id, if no host of it was heard."""
    other_hosts: dict[str, bool] = field(default_factory=dict)
    """The other jobs that have a host, each with whether it takes members."""
    other_attempts: dict[str, str] = field(default_factory=dict)
    seekers: dict[bytes, str] = field(default_factory=dict)
    """The other processes that look for this job, by member id."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Hosts of this job that were heard, each with what became of it."""
    proved: dict[str, None] = field(default_factory=dict)
    """The hosts that have proved their session to us over TCP."""
    store_failures: dict[str, str] = field(default_factory=dict)
    """The stores of this job that this host could not reach, each with the reason."""
    announcements: dict[str, None] = field(default_factory=dict)
    signed_without_secret: int = 0
    secret_signs: int = 0
    """Datagrams of this job whose signature is missing or wrong."""
    secret_failures: dict[str, None] = field(default_factory=dict)
    heard_at: dict[str | bytes, tuple[float, float]] = field(default_factory=dict)
    """When another job (by id) or a seeker (by member id) was heard first and last."""

    @property
    def empty(self) -> bool:
        """Whether no process was heard: no host, no rank, no other job and no sender with another secret."""
        names = (self.other_jobs, self.other_attempts, self.seekers, self.hosts, self.announcements)
        return not (any(names) or self.secret_failures or self.signed_without_secret or self.secret_signs)

    def lately(self, now: float) -> Diagnostics:
        """Return what holds of the network now, for the progress line: jobs and ranks that are gone are left out.

        A rank that has just begun to look for the job is left out as well, since it is about to join.
        """
        since = {each: now - first for each, (first, _) in self.heard_at.items()}
        silent = {each: now - last for each, (_, last) in self.heard_at.items()}
        seekers = {
            member: text
            for member, text in self.seekers.items()
            if since[member] >= KEPT_OUT_SECONDS and silent[member] <= SEEKING_SECONDS
        }
        other_jobs = {job: text for job, text in self.other_jobs.items() if silent[job] <= LATELY_SECONDS}
        return msgspec.structs.replace(self, seekers=seekers, other_jobs=other_jobs)

    def joined(self, member: bytes) -> None:
        """Take note that a process that looked for this job has come."""
        self.seekers.pop(member, None)
        self.heard_at.pop(member, None)

    def _heard(self, memory: dict[str, str] | dict[bytes, str], who: str | bytes, now: float) -> None:
        if who in memory:
            first, _ = self.heard_at.get(who, (now, now))
            self.heard_at[who] = first, now

    def seeker(self, message: Seek | List, source: Source, now: float) -> None:
        """Note a rank that looks for this job; an observer looks for it, too, and never joins."""
        observer = message.kind == "announcement" if isinstance(message, Seek) else not message.hostname
        if not observer and message.member not in self.seekers and len(self.seekers) < REMEMBERED_PER_KIND:
            self.seekers[message.member] = asker_name(message, source.address, self.unit)
        self._heard(self.seekers, message.member, now)

    def concerns(self, identity: Identity, message: Datagram, source: Source, now: float, *, secured: bool) -> bool:
        """Note a datagram of another job or attempt; return whether this one is of the same job and attempt."""
        # An observer has no attempt, and its secret says nothing of the ranks'; a BYE does not tell whose it is.
        if isinstance(message, List):
            of_a_rank = bool(message.hostname)
        else:
            of_a_rank = not isinstance(message, Bye) and message.kind != "announcement"
        if message.job != identity.job:
            self.other(message, source, now)
        elif message.attempt != identity.attempt:
            if of_a_rank:
                note(self.other_attempts, message.attempt or "none", source.address)
        else:
            self.signed_without_secret += of_a_rank and source.signed and not secured
            return True
        return False

    def unverified(self, identity: Identity, message: Datagram) -> None:
        """Note a datagram whose signature is missing or wrong: a hint for the report, and no more than that."""
        ours = (message.job, message.attempt) == (identity.job, identity.attempt)
        if ours and not (isinstance(message, Seek) and message.kind == "announcement"):
            self.secret_signs += 1

    def other(self, message: Datagram, source: Source, now: float) -> None:
        """Note a datagram of another job."""
        job = message.job
        if isinstance(message, Seek | Offer):
            note(self.other_jobs, job, f"host {message.hostname or 'unknown'} ({source.address}), pid {message.pid}")
        elif job not in self.other_jobs:  # a good-bye says less than what was heard before
            note(self.other_jobs, job, f"address {source.address}")
        self._heard(self.other_jobs, job, now)
        if job not in self.other_jobs:
            return
        if isinstance(message, Offer):
            self.other_hosts[job] = message.takes_members
            self.other_seekers.pop(job, None)
        elif isinstance(message, Seek | List) and job not in self.other_hosts and _looks_for_a_host(message):
            seekers = self.other_seekers.setdefault(job, {})
            if len(seekers) < REMEMBERED_PER_KIND:
                seekers[message.member] = None


def _looks_for_a_host(question: Seek | List) -> bool:
    """Return whether a rank that asks has no host: hosts ask on the browse group as well, and announcements SEEK."""
    if isinstance(question, Seek):
        return question.kind != "announcement"
    return question.rank not in (None, 0)


def note(memory: dict[str, str], name: str, text: str) -> None:
    """Keep a remark, unless too many are kept already."""
    if name and (name in memory or len(memory) < REMEMBERED_PER_KIND):
        memory[name] = text


def note_name(memory: dict[str, None], name: str) -> None:
    """Keep a name, unless too many are kept already."""
    if name in memory or len(memory) < REMEMBERED_PER_KIND:
        memory[name] = None
