"""Find one job, or all jobs on the network, without joining one.

`Finder` is a pure machine. It asks as a rank does (SEEK, on the job's group) and as a process does that knows no job id
(LIST, on the browse group). It believes neither answer: it dials each session with the purpose ``probe``, and uses only
what the host then says on the proved connection. :mod:`mingle.observe.lookup` runs it with an observer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct, field

from mingle.config.values import Secret
from mingle.protocol.effects import Effect, Multicast
from mingle.protocol.events import BytesReceived, Connected, Disconnected, Event, Heard, Source, TimerDue
from mingle.protocol.explain.observations import Diagnostics
from mingle.protocol.links.handshake import Call
from mingle.protocol.links.race import ConnectionRace, merged, named
from mingle.protocol.machine import Context, NewId, scoped
from mingle.protocol.pacing import Seeker
from mingle.protocol.sessions import KnownSession, SessionPolicy, SessionTable
from mingle.text import endpoint_text
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Seek, asker_name

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

EndpointKind: TypeAlias = Literal["store", "control"]


class Target(Struct, frozen=True):
    """Where a job can be reached."""

    address: str
    """An address, with its zone if it is link-local."""
    port: int
    kind: EndpointKind
    """Rank 0's store; or rank 0's control port, while ranks are joining."""

    def __str__(self) -> str:
        return endpoint_text(self.address, self.port)


class Seeking(Struct, frozen=True):
    """A rank that looks for its host."""

    seek: Seek
    address: str
    """Where its question came from; or the shared folder that holds its sign."""
    signed: bool
    heard_at: float = 0.0
    in_folder: bool = False

    def __str__(self) -> str:
        return asker_name(self.seek, f"in {self.address}" if self.in_folder else self.address)


class FoundSession(KnownSession, eq=False, kw_only=True):
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
        assert self.path is not None
        if self.running.store_address is None:
            return Target(self._reachable(self.path.host_address), self.probed.port, "control")
        return Target(self._reachable(self.running.store_address), self.running.store_port, "store")

    def _reachable(self, address: str) -> str:
        """Return one of the host's addresses, a link-local one with our own zone."""
        assert self.path is not None
        return scoped(address, self.path.interface)


def ranks_seeking(seekers: Sequence[Seeking], sessions: Sequence[FoundSession]) -> list[Seeking]:
    """Return the seekers of a job whose rank has no seat at its hosts."""
    seated = {rank for each in sessions if each.running is not None for rank in each.running.joined}
    return [each for each in seekers if each.seek.rank not in seated]


class Finder(SessionPolicy[FoundSession]):
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
        context = Context(key=None, new_id=new_id, rng=rng, timeout=0.0)
        self.links = context.links
        self._effects = context.links.effects
        self._table: SessionTable[FoundSession] = SessionTable(
            self, context, most=MAX_SESSIONS, most_by_sender=MAX_SESSIONS
        )
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
    def sessions(self) -> list[FoundSession]:
        """All remembered sessions, by job and then by session."""
        return sorted(self._table, key=lambda session: (session.offer.job, session.name))

    @property
    def alive(self) -> list[FoundSession]:
        """The proved sessions."""
        return [session for session in self.sessions if session.alive]

    @property
    def settled(self) -> bool:
        """Whether a session is proved, and a second one most likely would be as well if there were one."""
        return self._waited and (self._patient_until is None or all(session.tried for session in self._table))

    # --- what the driver reads -------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hand out what the driver must do."""
        return self.links.take_effects()

    def calling(self) -> Datagram | None:
        """Return what to send to unicast peers now."""
        return self._list() if self.job is None else self._seek(self.job)

    def showing(self) -> None:
        """Nothing: an observer leaves no sign in a shared folder."""

    def next_timer(self) -> float | None:
        """Return the time of the next `TimerDue`."""
        times = [self._list_due[0], self._seeker.next_timer(), self._settle_at, self._patient_until]
        times.append(self._table.next_timer())
        for session in self._table:
            if session.race is not None:
                times.append(session.answer_by)
            elif self._refresh is not None:
                times.append(session.retry_at)
        return min(time for time in times if time is not None)

    def handle(self, event: Event, now: float) -> None:
        """Process what has happened. It has no port to connect to, and no store."""
        match event:
            case Heard(message, source):
                self._heard(message, source, now)
            case Connected() | BytesReceived() | Disconnected():
                self.links.handle(event, now)
            case TimerDue():
                self._handle_timer(now)

    def _handle_timer(self, now: float) -> None:
        """Ask what is due, go on with the tries, and forget what is old."""
        if self.job is not None and self._seeker.should_ask(now):
            self._effects.append(Multicast(self._seek(self.job), padded=self._seeker.is_late(now)))
        if now >= self._list_due[0]:
            del self._list_due[0]
            self._list_due = self._list_due or [now + LIST_PERIOD_SECONDS]
            self._effects.append(Multicast(self._list(), browse=True))
        if self._forgets:
            self._forget_old(now)
        self._table.handle_timer(now)
        for session in self._table:
            if session.race is not None:
                if session.answer_by is not None and now >= session.answer_by:
                    *_, address = session.race.paths
                    self._give_up(session, {address: "proved its session and then said nothing"}, now)
            elif self._refresh is not None and now >= session.retry_at:
                self._prove(session, now)
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
            kind="observer",
        )

    def _list(self) -> List:
        # It names no job: ranks of other jobs would remember that one as a job on this network.
        return List(member=self._member)

    def _heard(self, message: Datagram, source: Source, now: float) -> None:
        """Process a valid datagram. Its signature was not checked: only the proof over TCP counts."""
        if isinstance(message, List | Seek) and message.member == self._member:
            return
        if self.job is not None and message.job != self.job:
            self.diagnostics.other(message, source, now)
        elif isinstance(message, Seek):
            if message.kind == "observer":
                return
            self.seekers.pop(message.member, None)
            self.seekers[message.member] = Seeking(message, source.address, source.signed, now, source.folder)
            if len(self.seekers) > MAX_SEEKERS:
                del self.seekers[next(iter(self.seekers))]
            if source.multicast:
                self._seeker.heard_seek(now)
        elif isinstance(message, Offer):
            self._seeker.heard_offer(now)
            self._offered(message, source, now)
        elif isinstance(message, Bye):
            session = self._table.get(message.session)
            if session is not None and session.race is None and now >= session.retry_at:
                self._prove(session, now)

    def _offered(self, offer: Offer, source: Source, now: float) -> None:
        targets = named(offer, source.interface, source.address)
        session = self._table.get(offer.session)
        if session is None:
            session = FoundSession(
                offer, targets, signed=source.signed, probed=offer, verified=source.verified, heard_at=now
            )
            if self._table.add(session):
                self._prove(session, now)
            return
        if session.verified and not source.verified:
            return  # forged: the host signs every OFFER
        if session.alive and offer.job != session.probed.job:
            return  # forged: the host has proved that the session is of another job
        session.offer, session.signed, session.verified = offer, source.signed, source.verified
        session.heard_at = now
        self._table.heard(session)
        if session.race is not None:
            session.race.add(targets)
            return
        session.targets = merged(targets, session.targets)
        changed = (offer.state, offer.joined) != (session.probed.state, session.probed.joined)
        if now >= session.retry_at and (changed or not session.alive):
            self._prove(session, now)

    def keeps(self, session: FoundSession) -> bool:
        """Return whether a session must not make room for another one."""
        return session.alive

    def _forget_old(self, now: float) -> None:
        for session in self._table:
            dialing = session.race is not None and session.race.dialing
            if now - session.heard_at >= SESSION_SECONDS and not session.alive and not dialing:
                self._table.remove(session)
        for member, seeker in list(self.seekers.items()):
            if now - seeker.heard_at < SEEKER_SECONDS:
                return
            del self.seekers[member]

    # --- proofs ----------------------------------------------------------------------------------------------------

    def _prove(self, session: FoundSession, now: float) -> None:
        offer = session.probed = session.offer
        if self._secret is not None and self.job is not None and not session.verified:
            # A search for one job with a secret trusts only hosts with the secret, and proves it only to them.
            why = "the host's secret is another one" if session.signed else "we have a secret and the host has none"
            self._give_up(session, dict.fromkeys(offer.addresses, f"secret: {why}"), now)
            return
        call = Call(
            job=offer.job,
            attempt=offer.attempt,
            member=self._member,
            session=offer.session,
            purpose="probe",
            who=self._who,
        )
        key = JobKey(self._secret, offer.job) if self._secret is not None and session.verified else None
        self._table.race(session, call, now, key=key)
        session.answer_by = None

    def on_proved(self, session: FoundSession, now: float) -> None:
        """Handle a session whose host has just proved it."""
        session.answer_by = now + ANSWER_SECONDS

    def on_frame(self, session: FoundSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame from a proved host."""
        if not isinstance(frame, frames.Running) or session.race is None:
            return
        path = list(session.race.paths.values())[-1]
        self._end(session, now)
        session.running, session.path, session.failures = frame, path, {}
        session.was_alive = True
        if self._refresh is not None:
            session.retry_at = now + self._refresh
        if self._settle_at is None and not self._waited:
            self._settle_at = now + SETTLE_SECONDS

    def on_unreached(self, session: FoundSession, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""
        self._give_up(session, dict(race.failures), now)

    def on_lost(self, session: FoundSession, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle a proved host that hung up before it gave its state."""
        self._give_up(session, dict(race.failures), now)

    def _give_up(self, session: FoundSession, failures: dict[str, str], now: float) -> None:
        self._end(session, now)
        session.running = session.path = None
        session.failures = failures
        if not any(each.alive for each in self._table):
            self._settle_at, self._waited, self._patient_until = None, False, None

    @staticmethod
    def _end(session: FoundSession, now: float) -> None:
        session.hang_up()
        session.answer_by = None
        session.tried = True
        session.retry_later(now)
