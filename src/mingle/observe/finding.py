"""Looking at jobs without being a part of one: a pure machine that collects OFFERs and proves each over TCP.

It asks as a rank does (SEEK, on the job's group) and as somebody does who knows no job id (LIST, on the
lobby), and believes neither answer: each session that is named is dialled with the purpose ``probe``, and
only what the proved host then says of itself counts. Its driver is :mod:`mingle.observe.observer`.
"""

from __future__ import annotations

import random

from mingle.config.values import Secret
from mingle.observe.sighting import Seeking, Sighting, is_host
from mingle.protocol.connection_race import ConnectionRace, merged, named
from mingle.protocol.handshake import Call
from mingle.protocol.machine import Context, Diagnostics, Effect, Multicast, NewId, Source
from mingle.protocol.pacing import Seeker
from mingle.protocol.sessions import SessionPolicy, SessionTable
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Seek

LIST_SECONDS = (0.0, 0.4, 1.0)
"""When the lobby is asked: a single packet may be lost."""
LIST_PERIOD_SECONDS = 2.0
"""How often it is asked after that."""
ANSWER_SECONDS = 2.0
"""How long a host that has proved itself may take to say how it stands."""
SETTLE_SECONDS = 0.5
"""How long after the first host a second one is waited for: a sealed one answers at most twice a second."""
UNTRIED_SECONDS = 3.0
"""How long after that others that are only claimed to be there are still tried: somebody may invent them for ever."""
SESSION_SECONDS = 5.0
"""How long `watch` keeps a host that no longer proves itself; hosts answer the lobby every two seconds."""
SEEKER_SECONDS = 12.0
"""How long `watch` keeps a seeker; each time only one seeker of a job answers, and not always the same one."""
# Bounded against invented sessions and seekers; the one that was silent for longest is dropped.
MAX_SESSIONS = 1024
MAX_SEEKERS = 1024


class Finder(SessionPolicy[Sighting]):
    """Collects sessions and proves them. It never joins one.

    Args:
        job: the job to look for; None: all jobs, through the lobby.
        member: sixteen random bytes by which our own datagrams are known.
        who: this process, as the other side may name it.
        secret: proves to hosts that have one; when a job is named, its host must have it too.
        new_id: numbers connections.
        rng: for the jitter of the questions.
        now: the present, in seconds of a monotonic clock.
        refresh: how often to query a known session again, in seconds; None: when its OFFER changes.
        forgets: whether to drop sessions and seekers that have gone silent, as a long watch must; else they are kept
            for the final report.
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
        self.secured = secret is not None
        self.diagnostics = Diagnostics()
        self.seekers: dict[bytes, Seeking] = {}
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
        """By when those are to be tried that are only claimed to be there."""

    # --- what was found -------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[Sighting]:
        """All remembered sessions, by job and then by session."""
        return sorted(self._table, key=lambda sighting: (sighting.offer.job, sighting.name))

    @property
    def alive(self) -> list[Sighting]:
        """Those that are proved."""
        return [sighting for sighting in self.sessions if sighting.alive]

    @property
    def settled(self) -> bool:
        """Whether one is proved and a second one would most likely be, too, if there were one."""
        return self._waited and (self._patient_until is None or not self._has_untried)

    @property
    def _has_untried(self) -> bool:
        return any(not sighting.tried for sighting in self._table)

    @property
    def racing(self) -> bool:
        """Whether a session that is not proved is being tried."""
        return any(each.race is not None and not each.alive for each in self._table)

    # --- what the driver reads ------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        self._table.flush()
        done, self._effects[:] = list(self._effects), []
        return done

    def calling(self) -> Datagram | None:
        """What to ask unicast peers now."""
        return self._list() if self.job is None else self._seek(self.job)

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [self._list_due[0], self._seeker.next_timer(), self._settle_at, self._patient_until]
        times.append(self._table.next_timer())
        for sighting in self._table:
            if sighting.race is not None:
                times.append(sighting.answer_by)
            elif self._refresh is not None:
                times.append(sighting.retry_at)
        return min(time for time in times if time is not None)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        if self.job is not None and self._seeker.should_ask(now):
            self._effects.append(Multicast(self._seek(self.job)))
        if now >= self._list_due[0]:
            del self._list_due[0]
            self._list_due = self._list_due or [now + LIST_PERIOD_SECONDS]
            self._effects.append(Multicast(self._list(), lobby=True))
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
        """Hangs up everywhere."""
        self._table.hang_up()

    # --- datagrams ------------------------------------------------------------------------------------------

    def _seek(self, job: str) -> Seek:
        # The kind says that no rank is asking, so nobody counts this process among those that are waited for.
        return Seek(
            job=job,
            member=self._member,
            world_size=1,
            hostname=self._who.hostname,
            pid=self._who.pid,
            kind="announcement",
        )

    def _list(self) -> List:
        # No job is named: ranks of other jobs would remember it as one that is on this network.
        return List(member=self._member)

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in. Its signature was not checked: the proof over TCP is what counts."""
        if isinstance(message, List | Seek) and message.member == self._member:
            return
        if self.job is not None and message.job != self.job:
            self.diagnostics.other(message, source)
        elif isinstance(message, Seek):
            if message.kind == "announcement":
                return
            # In order of last contact, so that the first is the oldest.
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
            return  # forged: its host signs all
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
        while self.seekers:
            oldest = next(iter(self.seekers))
            if now - self.seekers[oldest].heard_at < SEEKER_SECONDS:
                return
            del self.seekers[oldest]

    # --- proving --------------------------------------------------------------------------------------------

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
        self._table.race(sighting, call, now, key=self._key(sighting))
        sighting.answer_by = None

    def _key(self, sighting: Sighting) -> JobKey | None:
        if self._secret is None or not sighting.verified:
            return None
        return JobKey(self._secret, sighting.offer.job)

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Nobody is listened for, so nobody connects."""

    def on_proved(self, session: Sighting, now: float) -> None:
        """Handle a session whose host has just proved it."""
        session.answer_by = now + ANSWER_SECONDS

    def on_frame(self, session: Sighting, frame: frames.AnyFrame, now: float) -> None:
        """Handle what a host says."""
        if isinstance(frame, frames.Running) and session.race is not None:
            self._answered(session, session.race, frame, now)

    def on_unreached(self, session: Sighting, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""
        self._give_up(session, dict(race.failures), now)

    def on_lost(self, session: Sighting, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle a host that hung up before it said how it stands."""
        self._give_up(session, dict(race.failures), now)

    def _answered(self, sighting: Sighting, race: ConnectionRace, running: frames.Running, now: float) -> None:
        path = list(race.paths.values())[-1]
        if not is_host(running.store_address):
            self._give_up(sighting, {path.host_address: "it names a store at what is no address"}, now)
            return
        self._end(sighting, now)
        sighting.running, sighting.path, sighting.failures = running, path, {}
        sighting.was_alive = True
        if self._refresh is not None:
            sighting.retry_at = now + self._refresh
        if self._settle_at is None and not self._waited:
            self._settle_at = now + SETTLE_SECONDS

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
