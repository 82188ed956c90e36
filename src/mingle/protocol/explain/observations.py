"""What a machine has observed, for the progress line and for the error that explains why a job did not form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Struct, field

from mingle.diagnostics import Finding
from mingle.protocol.events import Source
from mingle.protocol.machine import Identity
from mingle.wire.datagrams import Bye, Datagram, Failed, List, Offer, Seek, asker_name
from mingle.wire.frames import ProcessInfo, Refused, Status

_Name = TypeVar("_Name", str, bytes)
_Remark = TypeVar("_Remark")
Cause: TypeAlias = tuple[str, str]
"""A likely cause and its fix."""

# Other jobs and processes that were heard are remembered for reports; bounded against a network full of them.
REMEMBERED_PER_KIND = 64
REMEMBERED_NAMES = 4
LATELY_SECONDS = 75.0
"""How long a job that was heard counts as being on the network: two questions on the browse group, and a lost one."""
TOLD_AGAIN_SECONDS = 15.0
"""How long it counts that one process could not connect to another: it is said each time when it fails again."""
KEPT_OUT_SECONDS = 5.0
"""How long a rank must have looked for the job until it counts as kept out of it."""
SEEKING_SECONDS = 15.0
"""How long a rank that was heard counts as looking for the job: a few of its questions."""


class Unreached(Struct, frozen=True):
    """One process can't connect to another one, a host that it hears."""

    caller: str
    host: str
    how: str
    at: float
    """When that was seen or heard last."""


class Gone(Struct, frozen=True):
    """A process that has said that it failed."""

    rank: int | None
    hostname: str
    text: str
    """Who it was, and the first line of its error."""


class NetworkFacts(Struct, frozen=True, kw_only=True):
    """What the driver knows and a report should say."""

    interfaces: Sequence[str] = ()
    groups: Sequence[str] = ()
    port: int = 0
    named_port: bool = False
    """Whether the port is another one than the default."""
    peers: Sequence[str] = ()
    """The named hosts and shared folders, each host with its addresses and whether anything came from there."""
    unanswered: Sequence[str] = ()
    """Those hosts from which nothing came."""
    asked_ports: Sequence[int] = ()
    """The UDP ports at which they are asked, except the default one."""
    sent: int = 0
    received: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    send_errors: Counter[str] = field(default_factory=Counter)
    failures: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    """What is wrong with this machine, worst first; read when something has failed."""
    in_folders: Mapping[str, Collection[bytes]] = field(default_factory=dict)
    """The member ids of the other processes that show in a shared folder that they look for a host."""
    hostname: str = ""
    addresses: Collection[str] = ()
    """All addresses of this machine, except those of loopback."""
    neighbors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The hardware addresses that each IPv4 address on our networks has had; none: it does not answer ARP."""
    hardware: Mapping[str, str] = field(default_factory=dict)
    """Our own hardware addresses, each with its interface."""


class Diagnostics(Struct):
    """What was heard and tried, kept for the error that explains why the job did not form."""

    unit: str = "rank"
    """What the ranks of this job count (`ProcessInfo.unit`)."""
    member: bytes = b""
    """The member id of this process."""
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
    sessions: dict[bytes, tuple[bytes, str]] = field(default_factory=dict)
    """The hosts of the sessions of this job that were heard: their member ids and names."""
    unreached: dict[tuple[bytes, bytes], Unreached] = field(default_factory=dict)
    """The processes that can't connect to a host of this job, by both member ids: a datagram can claim it."""
    failed: dict[bytes, Gone] = field(default_factory=dict)
    """The processes of this job that have said that they failed, until another one comes in their place."""
    proved: dict[str, None] = field(default_factory=dict)
    """The hosts that have proved their session to us over TCP."""
    gave_up: Cause | None = None
    """What the first host that gave up with this process in its session has named as the cause, and the fix."""
    store_failures: dict[str, str] = field(default_factory=dict)
    """The stores of this job that this host could not reach, each with the reason."""
    signed_without_secret: int = 0
    secret_signs: int = 0
    """Datagrams of this job whose signature is missing or wrong."""
    secret_failures: dict[str, None] = field(default_factory=dict)
    machines: dict[str, dict[str, None]] = field(default_factory=dict)
    """The names of the machines whose multicasts came from each address."""
    translated: dict[str, str] = field(default_factory=dict)
    """The addresses that hosts announce, with the address from which their datagrams come instead."""
    off_link: dict[str, None] = field(default_factory=dict)
    """The addresses on our network that are in none of our subnets."""
    heard_at: dict[str | bytes, tuple[float, float]] = field(default_factory=dict)
    """When another job (by id) or a seeker (by member id) was heard first and last."""

    @property
    def empty(self) -> bool:
        """Whether no process was heard: no host, no rank, no other job and no sender with another secret."""
        names = (self.other_jobs, self.other_attempts, self.seekers, self.hosts, self.failed)
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
        return msgspec.structs.replace(self.without_mended(now), seekers=seekers, other_jobs=other_jobs)

    def without_mended(self, now: float) -> Diagnostics:
        """Return all that was heard, without the pairs of processes of which nothing was heard lately."""
        unreached = {pair: each for pair, each in self.unreached.items() if now <= each.at + TOLD_AGAIN_SECONDS}
        return msgspec.structs.replace(self, unreached=unreached)

    def joined(self, member: bytes, who: ProcessInfo) -> None:
        """Take note that a process that looked for this job has come."""
        self._came(who.rank, who.hostname)
        self._forget_seeker(member)
        self.reached(member)

    def _forget_seeker(self, member: bytes) -> None:
        self.seekers.pop(member, None)
        self.heard_at.pop(member, None)

    def reached(self, caller: bytes, host: bytes | None = None) -> None:
        """Take note that a process has reached a host, or has a seat, for which it has reached the one that counts."""
        for pair in [each for each in self.unreached if each[0] == caller and host in (None, each[1])]:
            del self.unreached[pair]

    def does_not_reach(self, identity: Identity, offer: Offer, how: str, now: float) -> None:
        """Note that this process can't connect to a host that it hears.

        That is known, so it takes the place of a pair that a datagram claims.
        """
        pair = identity.member, offer.host
        claimed = [each for each in self.unreached if each[0] != identity.member]
        if claimed and pair not in self.unreached and len(self.unreached) >= REMEMBERED_PER_KIND:
            del self.unreached[claimed[0]]
        self._note_unreached(pair, str(identity.who), _host_name(offer, self.unit), how, now)

    def _note_unreached(self, pair: tuple[bytes, bytes], caller: str, host: str, how: str, now: float) -> None:
        known = self.unreached.get(pair)
        # IPv4 and IPv6 take turns. A cause is shown when it stays the same, and people know no link-local address.
        if known is not None and "fe80:" not in f"{known.caller}{known.host}{known.how}":
            self.unreached[pair] = msgspec.structs.replace(known, at=now)
        elif known is not None or len(self.unreached) < REMEMBERED_PER_KIND:
            self.unreached[pair] = Unreached(caller, host, how, now)

    def has_failed(self, message: Failed, source: Source) -> None:
        """Note a process that says that it has failed."""
        if message.member not in self.failed and len(self.failed) < REMEMBERED_PER_KIND:
            who = self._named(message, source)
            self.failed[message.member] = Gone(message.rank, message.hostname, f"{who} has failed: {message.reason}")
            self._forget_seeker(message.member)

    def _came(self, rank: int | None, hostname: str) -> None:
        """Forget those that failed and were started again: a process of this rank and host has come after them."""
        for member in [each for each, gone in self.failed.items() if (gone.rank, gone.hostname) == (rank, hostname)]:
            del self.failed[member]

    def heard_host(self, offer: Offer, source: Source) -> None:
        """Note the name of the host of a session, for what others say of it, and whether NAT hides its addresses.

        The host of a full session does not look for the job any more, so it is not one that could not join.
        """
        if not offer.takes_members:
            self._forget_seeker(offer.host)
        by_unicast = not (source.multicast or source.folder or source.address.lower().startswith("fe80:"))
        for address in offer.addresses:
            if source.address in offer.addresses:
                self.translated.pop(address, None)
            elif by_unicast:
                note(self.translated, address, source.address)
        if offer.session not in self.sessions:
            self._came(None if offer.assigned or offer.kind == "agents" else 0, offer.hostname)
        note(self.sessions, offer.session, (offer.host, _host_name(offer, self.unit)))

    def _heard(self, memory: dict[str, str] | dict[bytes, str], who: str | bytes, now: float) -> None:
        if who in memory:
            first, _ = self.heard_at.get(who, (now, now))
            self.heard_at[who] = first, now

    def seeker(self, message: Seek | List, source: Source, now: float) -> None:
        """Note a rank that looks for this job; an observer looks for it, too, and never joins."""
        observer = message.kind == "observer" if isinstance(message, Seek) else not message.hostname
        if not observer and message.member not in self.seekers and len(self.seekers) < REMEMBERED_PER_KIND:
            self._came(message.rank, message.hostname)
            self.seekers[message.member] = asker_name(message, source.address, self.unit)
        self._heard(self.seekers, message.member, now)
        if isinstance(message, Seek) and message.unreached is not None and message.unreached in self.sessions:
            host, name = self.sessions[message.unreached]
            hosts = (other for member, other in self.sessions.values() if member == message.member)
            caller = next(hosts, self._named(message, source))
            self._note_unreached((message.member, host), caller, name, message.how, now)

    def _named(self, message: Seek | Failed, source: Source) -> str:
        rank = "" if message.rank is None else f"{self.unit} {message.rank} on "
        return f"{rank}host {message.hostname or 'unknown'} ({source.address}), pid {message.pid}"

    def concerns(self, identity: Identity, message: Datagram, source: Source, now: float, *, secured: bool) -> bool:
        """Note a datagram of another job or attempt; return whether this one is of the same job and attempt."""
        # An observer has no attempt, and its secret says nothing of the ranks'; a BYE does not tell whose it is.
        if isinstance(message, List):
            of_a_rank = bool(message.hostname)
        else:
            of_a_rank = not isinstance(message, Bye) and message.kind != "observer"
        if message.job != identity.job:
            self.other(message, source, now)
        elif message.attempt != identity.attempt:
            if of_a_rank:
                note(self.other_attempts, message.attempt or "none", source.address)
        else:
            self.signed_without_secret += of_a_rank and source.signed and not secured
            # Behind one NAT several machines have one address, and no multicast comes from there.
            if not isinstance(message, Bye) and message.hostname and source.multicast:
                self._heard_from(message.hostname, source)
            return True
        return False

    def _heard_from(self, hostname: str, source: Source) -> None:
        if source.address in self.machines or len(self.machines) < REMEMBERED_PER_KIND:
            names = self.machines.setdefault(source.address, {})
            note(names, hostname, None, REMEMBERED_NAMES)
        if source.off_link:
            note(self.off_link, source.address, None)

    def unverified(self, identity: Identity, message: Datagram) -> None:
        """Note a datagram whose signature is missing or wrong: a hint for the report, and no more than that."""
        ours = (message.job, message.attempt) == (identity.job, identity.attempt)
        if ours and not (isinstance(message, Seek) and message.kind == "observer"):
            self.secret_signs += 1

    def other(self, message: Datagram, source: Source, now: float) -> None:
        """Note a datagram of another job."""
        job = message.job
        if isinstance(message, Seek | Offer | Failed):
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
            note(self.other_seekers.setdefault(job, {}), message.member, None)


class Agents(Struct, frozen=True, kw_only=True):
    """What an agent of an elastic job remembers across its sessions."""

    who: str
    nodes: str
    """How many nodes the job can have, as text."""
    minimum: int
    maximum: int
    founders: int
    had_quorum: bool = False
    others: str = ""
    """The agents of the last session that ran without this one."""
    missed: Sequence[str] = ()
    """The agents of its last session."""
    best: Status | None = None
    """The status of the present gathering when most agents were there."""
    left_out: Refused | None = None
    """Why it gets no seat, if it and a member can't reach each other."""
    surplus: bool = False
    """Whether it waits for the end of a run that had no place for it."""


class Observing(Struct, frozen=True, kw_only=True):
    """What `mingle-discover find` says in its own words: it looks for a job, and joins none."""

    unproved_fix: str
    mistyped_fix: str
    unreached: Cause | None
    """The cause, if sessions of the job were heard."""
    sought: Cause | None
    """The cause, if ranks that look for the job were heard."""


class Situation(Struct, frozen=True, kw_only=True):
    """All that the likely cause follows from: what a machine knows of its job, with the facts of its driver."""

    diagnostics: Diagnostics
    """What was heard."""
    facts: NetworkFacts = field(default_factory=NetworkFacts)
    """What was tried, and the findings of the local checks."""
    job: str = ""
    """The job id; empty: no certain job is looked for."""
    rank: int | None = None
    unit: str = "rank"
    status: Status | None = None
    """The last status of the job, if its host has told one."""
    connected: bool = False
    """Whether that is its status now: the process is connected to the host, or is the host."""
    running: str = ""
    """The host of another run of the job, if one was found."""
    gone: bool = False
    """Whether the host was lost long before the process's own time was up, so that its status explains nothing."""
    proved: bool = True
    """Whether another process has proved that it has the secret of this one, or has none either."""
    secured: bool = False
    """Whether this process has a secret."""
    seconds: float = 0.0
    """How long it waits in all."""
    deadline: float = 0.0
    agents: Agents | None = None
    observer: Observing | None = None
    early: bool = False
    """Whether the process still waits. What only the deadline justifies is no cause then: ranks that do not answer yet,
    and warnings of the local checks."""
    final: bool = False
    """Whether its time is up, so that there is always a cause."""

    @property
    def me(self) -> str:
        """This process, as reports name it."""
        return own_name(self.unit, self.rank)

    @property
    def host(self) -> str:
        """The host of the job, as reports name it."""
        return "a host" if self.rank is None else f"{self.unit} 0"

    @property
    def size(self) -> str:
        """The size of the job, as its user types it."""
        return size_name(self.unit)

    @property
    def told(self) -> Status:
        """The status, where there is one."""
        assert self.status is not None
        return self.status

    @property
    def most(self) -> Status | None:
        """The status when most were there. Deadlines pass one after another, and the last agent names the others."""
        best = None if self.early or self.agents is None else self.agents.best
        return best if best is not None and (self.status is None or best.joined > self.status.joined) else self.status

    @property
    def alone(self) -> bool:
        """Whether the time is up, and no other process has ever joined."""
        most = self.most
        return self.final and (most is None or (most.joined <= 1 and not self.told.left))


def own_name(unit: str, rank: int | None) -> str:
    """Return what a report calls the process that makes it."""
    return f"{unit} {rank}" if rank is not None else "this process"


def size_name(unit: str) -> str:
    """Return the size of a job as its user types it."""
    return "--nnodes value" if unit == "node" else "world size"


def _host_name(offer: Offer, unit: str) -> str:
    """Return the name of a host; with given ranks it is rank 0."""
    rank = "" if offer.assigned or offer.kind == "agents" else f"{unit} 0 on "
    # A link-local address says little to people; it stands first where the OFFER came by IPv6.
    address = next((each for each in offer.addresses if not each.lower().startswith("fe80:")), offer.addresses[0])
    return f"{rank}host {offer.hostname or 'unknown'} ({address}), pid {offer.pid}"


def _looks_for_a_host(question: Seek | List) -> bool:
    """Return whether a rank that asks has no host: hosts ask on the browse group as well, and observers SEEK."""
    if isinstance(question, Seek):
        return question.kind != "observer"
    return question.rank not in (None, 0)


def note(memory: dict[_Name, _Remark], name: _Name, remark: _Remark, most: int = REMEMBERED_PER_KIND) -> None:
    """Keep a remark, unless too many are kept already."""
    if name and (name in memory or len(memory) < most):
        memory[name] = remark
