"""Looking at jobs without being a part of one: a pure machine that collects OFFERs and proves each over TCP.

It asks as a rank does (SEEK, on the job's group) and as somebody does who knows no job id (LIST, on the
lobby), and believes neither answer: each session that is named is dialled with the purpose ``probe``, and
only what the proved host then says of itself counts. Its driver is :mod:`mingle.observe.observer`.
"""

from __future__ import annotations

import random

from mingle.config.values import Secret
from mingle.observe.sighting import Seeking, Sighting, is_host
from mingle.protocol.claims import DialBudget
from mingle.protocol.connection_race import ConnectionRace, Verdict, merged, named
from mingle.protocol.handshake import Call, HandshakeFailed
from mingle.protocol.machine import Diagnostics, Effect, Hangup, Multicast, NewId, Source
from mingle.protocol.pacing import Seeker
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Rejected, Seek

LIST_SECONDS = (0.0, 0.4, 1.0)
"""When the lobby is asked: a single packet may be lost."""
LIST_PERIOD_SECONDS = 2.0
"""How often it is asked after that."""
RETRY_SECONDS = 0.5
"""How soon a session that did not answer is tried again."""
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


class Finder:
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
        self._new_id = new_id
        self._refresh = refresh
        self._forgets = forgets
        self._effects: list[Effect] = []
        self._dials = DialBudget()
        self._sessions: dict[bytes, Sighting] = {}
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
        order = sorted(self._sessions.items(), key=lambda item: (item[1].offer.job, item[0]))
        return [sighting for _, sighting in order]

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
        return any(not sighting.tried for sighting in self._sessions.values())

    @property
    def racing(self) -> bool:
        """Whether a session that is not proved is being tried."""
        return any(each.race is not None and not each.alive for each in self._sessions.values())

    # --- what the driver reads ------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        done, self._effects[:] = list(self._effects), []
        return done

    def calling(self) -> Datagram | None:
        """What to ask unicast peers now."""
        return self._list() if self.job is None else self._seek(self.job)

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [self._list_due[0], self._seeker.next_timer(), self._settle_at, self._patient_until]
        for sighting in self._sessions.values():
            if sighting.race is not None:
                times += [sighting.race.next_timer(), sighting.answer_by]
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
        for sighting in self._sessions.values():
            if sighting.race is not None:
                sighting.race.handle_timer(now)
                self._settle(sighting, now)
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
        for sighting in self._sessions.values():
            if sighting.race is not None:
                sighting.race.abandon()
                sighting.race = None

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
        elif isinstance(message, Bye) and message.session in self._sessions:
            sighting = self._sessions[message.session]
            if sighting.race is None and now >= sighting.retry_at:
                self._prove(sighting, now)

    def _offered(self, offer: Offer, source: Source, now: float) -> None:
        targets = named(offer, source.interface, source.address)
        sighting = self._sessions.get(offer.session)
        if sighting is None:
            if len(self._sessions) >= MAX_SESSIONS and not self._forget_one():
                return
            sighting = self._sessions[offer.session] = Sighting(
                offer, source.signed, targets, offer, verified=source.verified, heard_at=now
            )
            self._prove(sighting, now)
            return
        if sighting.verified and not source.verified:
            return  # forged: its host signs all
        sighting.offer, sighting.signed, sighting.verified = offer, source.signed, source.verified
        sighting.heard_at = now
        if sighting.race is not None:
            sighting.race.add(targets)
            return
        sighting.targets = merged(targets, sighting.targets)
        changed = (offer.state, offer.joined) != (sighting.probed.state, sighting.probed.joined)
        if now >= sighting.retry_at and (changed or not sighting.alive):
            self._prove(sighting, now)

    def _forget_one(self) -> bool:
        idle = [name for name, each in self._sessions.items() if _is_idle(each)]
        if not idle:
            return False
        del self._sessions[min(idle, key=lambda name: self._sessions[name].heard_at)]
        return True

    def _forget_old(self, now: float) -> None:
        for session, sighting in list(self._sessions.items()):
            if now - sighting.heard_at >= SESSION_SECONDS and _is_idle(sighting):
                del self._sessions[session]
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
        sighting.race = ConnectionRace(
            Call(
                job=offer.job,
                attempt=offer.attempt,
                member=self._member,
                session=offer.session,
                purpose="probe",
                who=self._who,
            ),
            sighting.targets,
            offer.port,
            key=self._key(sighting),
            new_id=self._new_id,
            effects=self._effects,
            now=now,
            dials=self._dials,
        )
        sighting.answer_by = None

    def _key(self, sighting: Sighting) -> JobKey | None:
        if self._secret is None or not sighting.verified:
            return None
        return JobKey(self._secret, sighting.offer.job)

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Nobody is listened for, so nobody connects."""

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return any(each.race is not None and each.race.owns(conn) for each in self._sessions.values())

    def _owner(self, conn: int) -> tuple[Sighting, ConnectionRace]:
        return next(
            (each, each.race) for each in self._sessions.values() if each.race is not None and each.race.owns(conn)
        )

    def connected(self, conn: int, local_address: str, interface: str, _now: float, *, weak: bool = False) -> None:
        """A connection that was dialled stands."""
        self._owner(conn)[1].connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        sighting, race = self._owner(conn)
        try:
            received = race.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self._effects.append(Hangup(conn))
            self.disconnected(conn, str(failure), now)
            return
        race.flush()
        if race.winner is not None and sighting.answer_by is None:
            sighting.answer_by = now + ANSWER_SECONDS
        for frame in received:
            if isinstance(frame, frames.Running):
                self._answered(sighting, race, frame, now)
                return
        self._settle(sighting, now)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        sighting, race = self._owner(conn)
        was_winner = conn == race.winner
        race.disconnected(conn, reason, now)
        if was_winner:
            self._give_up(sighting, dict(race.failures), now)
        else:
            self._settle(sighting, now)

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

    def _settle(self, sighting: Sighting, now: float) -> None:
        """Looks whether a race was lost on every address."""
        race = sighting.race
        if race is not None and race.verdict in (Verdict.DEAD, Verdict.SILENT):
            self._give_up(sighting, dict(race.failures), now)

    def _give_up(self, sighting: Sighting, failures: dict[str, str], now: float) -> None:
        self._end(sighting, now)
        sighting.running = sighting.path = None
        sighting.failures = failures
        if not any(each.alive for each in self._sessions.values()):
            self._settle_at, self._waited, self._patient_until = None, False, None

    @staticmethod
    def _end(sighting: Sighting, now: float) -> None:
        if sighting.race is not None:
            sighting.race.abandon()
        sighting.race = sighting.answer_by = None
        sighting.tried = True
        sighting.retry_at = now + RETRY_SECONDS


def _is_idle(sighting: Sighting) -> bool:
    """Return whether a session is neither proved nor being dialed; a flood of forged ones waits for the dial budget."""
    return not sighting.alive and (sighting.race is None or not sighting.race.dialing)
