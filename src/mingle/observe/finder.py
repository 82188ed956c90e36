"""Look at jobs without being a part of one: a pure machine that collects OFFERs and lets each host prove itself.

It asks as a rank does (SEEK, on the job's group) and as a process does that knows no job id (LIST, on the browse
group). It believes neither answer: it dials each session with the purpose ``probe``, and uses only what the host then
says on the proved connection. Its driver is :mod:`mingle.observe.observer`.
"""

from __future__ import annotations

import ipaddress
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec import field

from mingle.config.values import Secret
from mingle.protocol.connection_race import ConnectionRace, merged, named
from mingle.protocol.handshake import Call
from mingle.protocol.machine import Context, Diagnostics, Effect, Multicast, NewId, Source
from mingle.protocol.pacing import Seeker
from mingle.protocol.sessions import KnownSession, SessionPolicy, SessionTable
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Seek

LIST_SECONDS = (0.0, 0.4, 1.0)
"""When to ask on the browse group after the start: a single packet can be lost."""
LIST_PERIOD_SECONDS = 2.0
"""The interval of further questions."""
ANSWER_SECONDS = 2.0
"""The time in which a host that has proved its session must give its state."""
SETTLE_SECONDS = 0.5
"""How long to wait for a second host after the first: a sealed one answers at most twice a second."""
UNTRIED_SECONDS = 3.0
"""How long to wait after that for sessions that were not tried yet; bounded, because a stranger can invent sessions."""
SESSION_SECONDS = 5.0
"""How long `watch` keeps a host that no longer proves itself; hosts answer the browse group every two seconds."""
SEEKER_SECONDS = 12.0
"""How long `watch` keeps a seeker; one seeker of a job answers each question, and not always the same one."""
# Bounded against invented sessions and seekers; the one that was silent for longest is dropped.
MAX_SESSIONS = 1024
MAX_SEEKERS = 1024
# A RUNNING frame names no more ranks than this (frames.Ranks); a longer list is cut.
_RANKS_NAMED = 4096
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")

EndpointKind: TypeAlias = Literal["store", "control", "announced"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a job can be reached."""

    address: str
    """An address, with its zone if it is link-local; for an announcement it can be a host name."""
    port: int
    kind: EndpointKind
    """Rank 0's store; rank 0's control port, while the job gathers; or the announced address."""

    def __str__(self) -> str:
        return endpoint_text(self.address, self.port)


@dataclass(frozen=True, slots=True)
class Seeking:
    """A rank that looks for its host."""

    seek: Seek
    address: str
    signed: bool
    heard_at: float = 0.0

    def __str__(self) -> str:
        rank = "a process without a rank" if self.seek.rank is None else f"rank {self.seek.rank}"
        return f"{rank} on host {self.seek.hostname or 'unknown'} ({self.address}), pid {self.seek.pid}"


class Sighting(KnownSession, eq=False, kw_only=True):
    """A known session and the result of its last try; ``running`` is set while its host is proved."""

    signed: bool
    probed: Offer
    """The OFFER on which the last try is based."""
    verified: bool = False
    """Whether the last OFFER is signed with our secret."""
    path: frames.Path | None = None
    """The path on which the host was proved."""
    failures: dict[str, str] = field(default_factory=dict)
    """For each address of the last try, the reason why it did not prove the session."""
    heard_at: float = 0.0
    """The time of the last OFFER."""
    was_alive: bool = False
    """Whether the host has ever proved itself and answered."""
    tried: bool = False
    """Whether a try has ended."""
    answer_by: float | None = None
    """The time by which a proved host must give its state."""

    @property
    def alive(self) -> bool:
        """Whether the host has proved itself and answered."""
        return self.running is not None

    @property
    def problem(self) -> str:
        """Why the session is not proved, for people; empty if it is."""
        if self.running is not None:
            return ""
        return "; ".join(f"{address}: {why}" for address, why in self.failures.items()) or "it has not answered yet"

    @property
    def joined(self) -> int:
        """The number of ranks with a seat: from the proved list of ranks if it is complete, else from the OFFER."""
        listed = self.running is not None and not self.probed.assigned and self.probed.kind == "ranks"
        if self.running is None or not listed or len(self.running.joined) >= _RANKS_NAMED:
            return self.offer.joined
        return len(self.running.joined)

    def host(self) -> frames.ProcessInfo:
        """Return the host: as proved, else as in the OFFER."""
        if self.running is not None:
            return self.running.host
        offer = self.offer
        return frames.ProcessInfo(hostname=offer.hostname, pid=offer.pid, address=offer.addresses[0])

    def target(self) -> Target:
        """Return the store if there is one, else the proved control port. Requires :attr:`alive`."""
        assert self.running is not None
        control = self.control()
        if self.running.store_port == 0:
            return control
        address = self._reachable(self.running.store_address) or control.address
        kind: EndpointKind = "announced" if self.probed.kind == "announcement" else "store"
        return Target(address, self.running.store_port, kind)

    def control(self) -> Target:
        """Return the control port at which the host was proved. Requires :attr:`alive`."""
        assert self.path is not None
        return Target(self._reachable(self.path.host_address), self.probed.port, "control")

    def _reachable(self, address: str) -> str:
        """Return one of the host's addresses, a link-local one with our own zone."""
        assert self.path is not None
        return f"{address}%{self.path.interface}" if address.lower().startswith("fe80:") else address


def is_host(text: str) -> bool:
    """Return whether a text is empty, an address, or a host name (RFC 1123, and the underscore that Docker allows).

    Text from the network ends on a terminal or in a shell, where nothing else must get.
    """
    if not text:
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return "%" not in text


def endpoint_text(address: str, port: int) -> str:
    """Return ``address:port``, with an IPv6 address in brackets (RFC 3986, section 3.2.2)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def ranks_seeking(seekers: Sequence[Seeking], sightings: Sequence[Sighting]) -> list[Seeking]:
    """Return the seekers of a job whose rank has no seat at its hosts."""
    seated = {rank for each in sightings if each.running is not None for rank in each.running.joined}
    return [each for each in seekers if each.seek.rank is None or each.seek.rank not in seated]


class Finder(SessionPolicy[Sighting]):
    """Collects sessions and lets their hosts prove themselves. It never joins one.

    Args:
        job: the job to look for; None: all jobs, through the browse group.
        member: sixteen random bytes by which our own datagrams are known.
        who: this process, as the other side can name it.
        secret: proves this process to hosts with a secret; the host of a named job must have it as well.
        new_id: numbers connections.
        rng: for the jitter of the questions.
        now: the present, in seconds of a monotonic clock.
        refresh: the interval of asking a known session again, in seconds; None: when its OFFER changes.
        forgets: whether to drop silent sessions and seekers, as a long watch must; else they are kept for the report.
    """

    def __init__(
        self,
        job: str | None,
        *,
        member: bytes,
        who: frames.ProcessInfo,
        secret: bytes | Secret | None,
        new_id: NewId,
        rng: random.Random,
        now: float,
        refresh: float | None = None,
        forgets: bool = False,
    ) -> None:
        self.job = job
        self.diagnostics = Diagnostics()
        self.seekers: dict[bytes, Seeking] = {}
        """By member, in the order of their last datagrams."""
        self._member = member
        self._who = who
        self._secret = secret
        self._refresh = refresh
        self._forgets = forgets
        self._effects: list[Effect] = []
        context = Context(key=None, new_id=new_id, rng=rng, timeout=0.0)
        self._table: SessionTable[Sighting] = SessionTable(
            self, context, self._effects, most=MAX_SESSIONS, most_by_sender=MAX_SESSIONS
        )
        self.owns = self._table.owns
        self.connected = self._table.connected
        self.received = self._table.received
        self.disconnected = self._table.disconnected
        self._seeker = Seeker(1, now, rng)
        if job is None:
            self._seeker.pause()
        self._list_due = [now + offset for offset in LIST_SECONDS]
        self._settle_at: float | None = None
        self._waited = False
        self._patient_until: float | None = None
        """The end of the wait for untried sessions."""

    # --- what was found --------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[Sighting]:
        """All remembered sessions, by job and then by session."""
        return sorted(self._table, key=lambda sighting: (sighting.offer.job, sighting.name))

    @property
    def alive(self) -> list[Sighting]:
        """The proved sessions."""
        return [sighting for sighting in self.sessions if sighting.alive]

    @property
    def settled(self) -> bool:
        """Whether a session is proved, and a second one most likely would be as well if there were one."""
        return self._waited and (self._patient_until is None or all(sighting.tried for sighting in self._table))

    @property
    def racing(self) -> bool:
        """Whether a session that is not proved is being tried."""
        return any(each.race is not None and not each.alive for each in self._table)

    # --- what the driver reads -------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hand out what the driver must do."""
        self._table.flush()
        done, self._effects[:] = list(self._effects), []
        return done

    def calling(self) -> Datagram | None:
        """Return what to send to unicast peers now."""
        return self._list() if self.job is None else self._seek(self.job)

    def next_timer(self) -> float | None:
        """Return when to call :meth:`handle_timer`."""
        times = [self._list_due[0], self._seeker.next_timer(), self._settle_at, self._patient_until]
        times.append(self._table.next_timer())
        for sighting in self._table:
            if sighting.race is not None:
                times.append(sighting.answer_by)
            elif self._refresh is not None:
                times.append(sighting.retry_at)
        return min(time for time in times if time is not None)

    def handle_timer(self, now: float) -> None:
        """Ask what is due, go on with the tries, and forget what is old."""
        if self.job is not None and self._seeker.should_ask(now):
            self._effects.append(Multicast(self._seek(self.job)))
        if now >= self._list_due[0]:
            del self._list_due[0]
            self._list_due = self._list_due or [now + LIST_PERIOD_SECONDS]
            self._effects.append(Multicast(self._list(), browse=True))
        if self._forgets:
            self._forget_old(now)
        self._table.handle_timer(now)
        for sighting in self._table:
            if sighting.race is not None:
                if sighting.answer_by is not None and now >= sighting.answer_by:
                    *_, address = sighting.race.paths
                    self._give_up(sighting, {address: "proved its session and then said nothing"}, now)
            elif self._refresh is not None and now >= sighting.retry_at:
                self._prove(sighting, now)
        if self._settle_at is not None and now >= self._settle_at:
            self._settle_at, self._waited, self._patient_until = None, True, now + UNTRIED_SECONDS
        if self._patient_until is not None and now >= self._patient_until:
            self._patient_until = None

    def close(self, _reason: str = "") -> None:
        """Hang up on every host."""
        self._table.hang_up()

    # --- datagrams -------------------------------------------------------------------------------------------------

    def _seek(self, job: str) -> Seek:
        # The kind says that no rank asks, so that no host counts this process among the ranks that it waits for.
        return Seek(
            job=job,
            member=self._member,
            world_size=1,
            hostname=self._who.hostname,
            pid=self._who.pid,
            kind="announcement",
        )

    def _list(self) -> List:
        # It names no job: ranks of other jobs would remember that one as a job on this network.
        return List(member=self._member)

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Process a valid datagram. Its signature was not checked: only the proof over TCP counts."""
        if isinstance(message, List | Seek) and message.member == self._member:
            return
        if self.job is not None and message.job != self.job:
            self.diagnostics.other(message, source)
        elif isinstance(message, Seek):
            if message.kind == "announcement":
                return
            self.seekers.pop(message.member, None)
            self.seekers[message.member] = Seeking(message, source.address, source.signed, now)
            if len(self.seekers) > MAX_SEEKERS:
                del self.seekers[next(iter(self.seekers))]
            if source.multicast:
                self._seeker.heard_seek(now)
        elif isinstance(message, Offer):
            self._offered(message, source, now)
        elif isinstance(message, Bye):
            sighting = self._table.get(message.session)
            if sighting is not None and sighting.race is None and now >= sighting.retry_at:
                self._prove(sighting, now)

    def _offered(self, offer: Offer, source: Source, now: float) -> None:
        targets = named(offer, source.interface, source.address)
        sighting = self._table.get(offer.session)
        if sighting is None:
            sighting = Sighting(
                offer, targets, signed=source.signed, probed=offer, verified=source.verified, heard_at=now
            )
            if self._table.add(sighting):
                self._prove(sighting, now)
            return
        if sighting.verified and not source.verified:
            return  # forged: the host signs every OFFER
        sighting.offer, sighting.signed, sighting.verified = offer, source.signed, source.verified
        sighting.heard_at = now
        self._table.heard(sighting)
        if sighting.race is not None:
            sighting.race.add(targets)
            return
        sighting.targets = merged(targets, sighting.targets)
        changed = (offer.state, offer.joined) != (sighting.probed.state, sighting.probed.joined)
        if now >= sighting.retry_at and (changed or not sighting.alive):
            self._prove(sighting, now)

    def keeps(self, session: Sighting) -> bool:
        """Return whether a session must not make room for another one."""
        return session.alive

    def _forget_old(self, now: float) -> None:
        for sighting in self._table:
            dialing = sighting.race is not None and sighting.race.dialing
            if now - sighting.heard_at >= SESSION_SECONDS and not sighting.alive and not dialing:
                self._table.remove(sighting)
        for member, seeker in list(self.seekers.items()):
            if now - seeker.heard_at < SEEKER_SECONDS:
                return
            del self.seekers[member]

    # --- proofs ----------------------------------------------------------------------------------------------------

    def _prove(self, sighting: Sighting, now: float) -> None:
        offer = sighting.probed = sighting.offer
        if self._secret is not None and self.job is not None and not sighting.verified:
            # A search for one job with a secret trusts only hosts with the secret, and proves it only to them.
            why = "the host's secret is another one" if sighting.signed else "we have a secret and the host has none"
            self._give_up(sighting, dict.fromkeys(offer.addresses, f"secret: {why}"), now)
            return
        call = Call(
            job=offer.job,
            attempt=offer.attempt,
            member=self._member,
            session=offer.session,
            purpose="probe",
            who=self._who,
        )
        key = JobKey(self._secret, offer.job) if self._secret is not None and sighting.verified else None
        self._table.race(sighting, call, now, key=key)
        sighting.answer_by = None

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Process an incoming connection: the machine has no port to connect to."""

    def on_proved(self, session: Sighting, now: float) -> None:
        """Handle a session whose host has just proved it."""
        session.answer_by = now + ANSWER_SECONDS

    def on_frame(self, session: Sighting, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame from a proved host."""
        if not isinstance(frame, frames.Running) or session.race is None:
            return
        path = list(session.race.paths.values())[-1]
        if not is_host(frame.store_address):
            self._give_up(session, {path.host_address: "it names a store at what is no address"}, now)
            return
        self._end(session, now)
        session.running, session.path, session.failures = frame, path, {}
        session.was_alive = True
        if self._refresh is not None:
            session.retry_at = now + self._refresh
        if self._settle_at is None and not self._waited:
            self._settle_at = now + SETTLE_SECONDS

    def on_unreached(self, session: Sighting, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""
        self._give_up(session, dict(race.failures), now)

    def on_lost(self, session: Sighting, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle a proved host that hung up before it gave its state."""
        self._give_up(session, dict(race.failures), now)

    def _give_up(self, sighting: Sighting, failures: dict[str, str], now: float) -> None:
        self._end(sighting, now)
        sighting.running = sighting.path = None
        sighting.failures = failures
        if not any(each.alive for each in self._table):
            self._settle_at, self._waited, self._patient_until = None, False, None

    @staticmethod
    def _end(sighting: Sighting, now: float) -> None:
        sighting.hang_up()
        sighting.answer_by = None
        sighting.tried = True
        sighting.retry_later(now)
