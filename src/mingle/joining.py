"""A rank that looks for its host, joins it and waits for GO: a pure machine.

The way, and what leads back::

    SEEKING ──proved and JOIN sent──▶ JOINING ──JOINED──▶ SEATED ──CONFIRM──▶ CONFIRMED ──SEALED──▶ PROVING STORE
       ▲                                 │                  │  ▲                  │                      │
       └────────── connection lost ──────┴──────────────────┴──┼───── VOID ───────┴──────────────────────┤
                                                               └────── VOID ── ACKED ◀─── store proved ──┘
                                                                                 │
                                                                                 └──GO──▶ FORMED

After CONFIRMED a member leaves only on VOID, EOF or its own deadline: silence is no reason. If its connection broke
there, it tries the same session first, since the host may already have decided GO.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

import msgspec

from mingle import frames, reports
from mingle.authentication import JobKey, new_nonce
from mingle.control import HandshakeFailed
from mingle.datagrams import Datagram, List, Offer, Rejected, Seek
from mingle.errors import MingleError
from mingle.lobby import Lobby
from mingle.machine import (
    Answer,
    Effect,
    Evidence,
    Formation,
    Hangup,
    Identity,
    Multicast,
    NetworkFacts,
    NewId,
    Notice,
    ProveStore,
    Snapshot,
    Source,
    note,
    note_name,
)
from mingle.protocol import Seeker
from mingle.proving import Endpoint, Proving, Verdict

RETRY_SECONDS = 0.25
"""How soon a session that could not be reached may be tried again."""
DOUBT_SECONDS = 2.0
"""How long a host that has not confirmed may be silent when another one offers itself."""
TELL_HOST_SECONDS = 1.0
"""How often at most a member tells its host of the same other host."""
MOVE_SECONDS = 2.0
"""How long a member may take to reach the host that its own sends it to."""
RETURN_SECONDS = 5.0
"""How long a member that lost its connection after CONFIRMED tries the same session first."""
STORE_RETRY_SECONDS = 0.5
STATUS_BEFORE_DEADLINE_SECONDS = 1.0
RUNNING_NOTICE_SECONDS = 2.0
RUNNING_PATIENCE_SECONDS = 30.0
"""How long at most a rank waits for another run of the same job to end."""
SILENT_SECONDS = 10.0
"""How long a sealed session that does not answer is still taken for alive."""
MAX_PATHS = 64
# Sessions remembered at a time; bounded against somebody who invents them.
REMEMBERED_SESSIONS = 32


class Step(enum.Enum):
    """How far a rank has come."""

    SEEKING = "seeking"
    JOINING = "joining"
    SEATED = "seated"
    CONFIRMED = "confirmed"
    PROVING_STORE = "proving the store"
    ACKED = "acknowledged"
    FORMED = "formed"


_AFTER_CONFIRMED = (Step.CONFIRMED, Step.PROVING_STORE, Step.ACKED)


@dataclass(slots=True)
class _Session:
    """A session that was heard of."""

    offer: Offer
    endpoints: list[Endpoint]
    proving: Proving | None = None
    retry_at: float = 0.0
    confirmed: bool = False
    """We have confirmed there: it may have decided GO with us in it."""
    counted_dead: bool = False
    """Silent for too long once: from now on it blocks us only when it speaks."""
    running: frames.Running | None = None
    blocking_since: float | None = None
    """Since when it is known, or suspected, to run without us."""
    told: bool = False


class Joiner:
    """The machine of a rank that is not the host. ``outcome`` or ``failure`` ends it."""

    def __init__(
        self,
        identity: Identity,
        *,
        key: JobKey | None,
        timeout: float,
        new_id: NewId,
        rng: random.Random,
        now: float,
    ) -> None:
        self.identity = identity
        self.step = Step.SEEKING
        self.outcome: Formation | None = None
        self.failure: MingleError | None = None
        self.evidence = Evidence()
        self.status: frames.Status | None = None
        self._key = key
        self._new_id = new_id
        self._started = now
        self._timeout = timeout
        self._deadline = now + timeout
        self._effects: list[Effect] = []
        self._seeker = Seeker(identity.world_size, now, rng)
        self._lobby = Lobby(now, self._deadline, rng)
        self._sessions: dict[bytes, _Session] = {}
        self._current: bytes | None = None
        self._return_to: bytes | None = None
        self._return_until = 0.0
        self._epoch = 0
        self._confirm_due = False
        self._sealed: frames.Sealed | None = None
        self._store_retry_at: float | None = None
        self._final_ask_done = False
        self._doubt_until: float | None = None
        self._moving_to: bytes | None = None
        self._move_until: float | None = None
        self._store_failed = False
        self._ready = False
        self.roster: list[frames.Seat] = []

    # --- what the driver reads -------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        for session in self._sessions.values():
            if session.proving is not None:
                session.proving.flush()
        done, self._effects[:] = list(self._effects), []
        return done

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        if self.failure is not None:
            return None
        times: list[float | None] = []
        for name, session in self._sessions.items():
            if session.proving is not None:
                times.append(session.proving.next_timer())
            elif name == self._return_to:
                times.append(session.retry_at)
        if self.outcome is None:
            times += self._gathering_timers()
        return min((time for time in times if time is not None), default=None)

    def _gathering_timers(self) -> list[float | None]:
        times = [
            self._deadline,
            self._seeker.next_timer(),
            self._lobby.next_timer(),
            self._store_retry_at,
            self._doubt_until,
            self._move_until,
        ]
        if self._seated and not self._final_ask_done:
            times.append(self._deadline - STATUS_BEFORE_DEADLINE_SECONDS)
        for session in self._sessions.values():
            if session.blocking_since is not None and self._is_mute(session):
                times.append(session.blocking_since + SILENT_SECONDS)
            elif session.blocking_since is not None and session.running is not None:
                times.append(session.blocking_since + self._patience())
                if not session.told:
                    times.append(session.blocking_since + RUNNING_NOTICE_SECONDS)
        return times

    def stage(self) -> str:
        """How far it has come, in a word, for the log."""
        return self.step.value

    def snapshot(self) -> Snapshot:
        """How it stands, for the progress line."""
        blocker = next((each.running for each in self._sessions.values() if each.running is not None), None)
        note_text = f"the job runs already, hosted by {blocker.host}" if blocker is not None else ""
        status = self.status
        if status is None or self._current is None:
            return Snapshot(self._current is not None, 0, (), self.step.value, note_text)
        return Snapshot(True, status.joined, status.awaited or status.unconfirmed, status.phase, note_text)

    def calling(self) -> Datagram | None:
        """What to ask unicast peers now."""
        return self.identity.seek() if self._current is None and not self.finished else None

    @property
    def _seated(self) -> bool:
        return self._current is not None and self.step is not Step.JOINING

    def ask_status(self) -> None:
        """Asks the host how it stands (for the progress line of this node)."""
        if self._seated:
            self._send(frames.Ask(what="status"))

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if self.finished:
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
        if source.signed and self._key is None:
            self.evidence.signed_without_secret += 1
        if isinstance(message, Seek):
            self._heard_seek(message, source, now)
        elif isinstance(message, Offer):
            self._lobby.answered()
            self._offered(message, source, now)

    def _asked_in_lobby(self, message: List, source: Source, now: float) -> None:
        ours = message.job == self.identity.job
        if ours:
            self.evidence.seeker(message, source)
        else:
            self.evidence.other(message, source)
        if self._seated:
            return  # the host speaks for those that it has
        if source.multicast:
            self._lobby.asked(now, same_job=ours)
        else:
            self._effects.append(Answer(source, self.identity.seek()))

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong: a hint for the report, and no more than that."""
        if self._is_ours(message) and not (isinstance(message, Seek) and message.kind == "announcement"):
            self.evidence.secret_signs += 1

    def _is_ours(self, message: Datagram) -> bool:
        return (message.job, message.attempt) == (self.identity.job, self.identity.attempt)

    def _heard_seek(self, seek: Seek, source: Source, now: float) -> None:
        if seek.member == self.identity.member:
            return
        self.evidence.seeker(seek, source)
        self._lobby.answered()
        if source.multicast:
            self._seeker.heard_seek(now)

    def _offered(self, offer: Offer, source: Source, now: float) -> None:
        who = f"host {offer.hostname or 'unknown'} ({offer.addresses[0]}:{offer.port}), pid {offer.pid}"
        if offer.kind == "announcement":
            note_name(self.evidence.announcements, who)
            return
        session = self._sessions.get(offer.session)
        endpoints = [Endpoint(address, source.interface) for address in offer.addresses]
        if session is None:
            note(self.evidence.hosts, who, "heard")
            session = self._remember(offer, endpoints)
            if session is None:
                return
        session.offer = offer
        if session.proving is not None:
            reopened = session.proving.purpose == "probe" and offer.state == "open"
            if not reopened or session.proving.verdict is Verdict.RACING or now < session.retry_at:
                session.proving.add(endpoints)
                return
            # It was sealed when we asked, and says that it takes members again: that is proved by joining.
            session.proving.abandon()
            session.proving = None
            session.retry_at = now + RETRY_SECONDS
            session.endpoints = endpoints
            self._prove(offer.session, session, now)
            return
        session.endpoints = endpoints
        if self._current is not None and offer.session != self._current and offer.state == "open":
            self._doubt(now)
            if self._seated and self.identity.rank is None and now >= session.retry_at:
                # Our host may not hear the other's datagrams.
                session.retry_at = now + TELL_HOST_SECONDS
                self._send(frames.Sighting(offer=offer))
        elif now >= session.retry_at and offer.session != self._current:
            self._prove(offer.session, session, now)

    def _doubt(self, now: float) -> None:
        """Another host takes members: is ours still alive? It may be stopped, or its machine gone without a word."""
        if self._doubt_until is None and self.step in (Step.JOINING, Step.SEATED):
            self._doubt_until = now + DOUBT_SECONDS
            self._send(frames.Ping())

    def _remember(self, offer: Offer, endpoints: list[Endpoint]) -> _Session | None:
        if len(self._sessions) >= REMEMBERED_SESSIONS:
            idle = [name for name, each in self._sessions.items() if each.proving is None and name != self._return_to]
            if not idle:
                return None
            del self._sessions[idle[0]]
        session = self._sessions[offer.session] = _Session(offer, endpoints)
        return session

    # --- proving and joining ---------------------------------------------------------------------------------------

    def _prove(self, name: bytes, session: _Session, now: float) -> None:
        """Starts a race for a session: to join it, or, when it is sealed without us, to see whether it lives."""
        purpose: frames.Purpose = (
            "probe" if session.offer.state == "sealed" and not session.confirmed else "join"
        )
        if purpose == "join" and self._bound_elsewhere(name):
            # Another session comes first; should it end, this one will be heard again.
            return

        def hello() -> frames.Hello:
            return frames.Hello(
                job=self.identity.job,
                attempt=self.identity.attempt,
                member=self.identity.member,
                session=name,
                nonce=new_nonce(),
                purpose=purpose,
                who=self.identity.who,
            )

        session.proving = Proving(
            hello,
            session.endpoints,
            session.offer.port,
            key=self._key,
            new_id=self._new_id,
            effects=self._effects,
            now=now,
            all_ways=purpose == "join",
        )

    def connected(self, conn: int, local_address: str, interface: str, now: float) -> None:
        """A connection that was dialled stands."""
        proving = self._owner(conn)[1].proving
        assert proving is not None
        proving.connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        name, session = self._owner(conn)
        proving = session.proving
        assert proving is not None
        won_before = proving.winner
        try:
            received = proving.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self._effects.append(Hangup(conn))
            self.closed(conn, str(failure), now)
            return
        if name == self._current:
            self._doubt_until = None
        self._note_secret_failures(session)
        if won_before is None and proving.winner is not None:
            self._won(name, session, proving, now)
        elif proving.winner is None:
            self._settle(name, session, now)
        for frame in received:
            if session.proving is not proving:
                break
            self._frame(name, session, frame, now)
        self._confirm_if_due()

    def closed(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        name, session = self._owner(conn)
        proving = session.proving
        assert proving is not None
        was_winner = conn == proving.winner
        proving.closed(conn, reason, now)
        self._note_secret_failures(session)
        if was_winner:
            proving.abandon()
            session.proving = None
            session.retry_at = now + RETRY_SECONDS
            if name == self._current:
                self._lost(name, session, reason, now)
            elif session.blocking_since is not None:
                self._unblock(session)
                self._seeker.resume(now)
        else:
            self._settle(name, session, now)
        self._confirm_if_due()

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return any(each.proving is not None and each.proving.owns(conn) for each in self._sessions.values())

    def _owner(self, conn: int) -> tuple[bytes, _Session]:
        return next(
            (name, each)
            for name, each in self._sessions.items()
            if each.proving is not None and each.proving.owns(conn)
        )

    def _note_secret_failures(self, session: _Session) -> None:
        assert session.proving is not None
        for address, reason in session.proving.failures.items():
            if reason.startswith("secret"):
                note_name(self.evidence.secret_failures, f"{address}: {reason}")

    def _won(self, name: bytes, session: _Session, proving: Proving, now: float) -> None:
        note(self.evidence.hosts, self._host_name(session), "proved")
        if proving.purpose != "join":
            # It lives; in what state, it is about to say.
            if session.blocking_since is None:
                session.blocking_since = now
            return
        if self._bound_elsewhere(name):
            # Another session was quicker, or the job runs elsewhere: this one will be heard again.
            proving.abandon()
            session.proving = None
            return
        if name == self._moving_to:
            self._move(now)
        self._current = name
        if self.outcome is None:
            self.step = Step.JOINING
        self._seeker.pause()
        identity = self.identity
        self._send(
            frames.Join(
                world_size=identity.world_size,
                rank=identity.rank,
                node=identity.node,
                local_rank=identity.local_rank,
                local_world_size=identity.local_world_size,
                node_rank=identity.node_rank,
                who=identity.who,
                kind=identity.kind,
                versions=identity.versions,
                paths=tuple(proving.paths.values())[:MAX_PATHS],
            )
        )

    @staticmethod
    def _host_name(session: _Session) -> str:
        offer = session.offer
        return f"host {offer.hostname or 'unknown'} ({offer.addresses[0]}:{offer.port}), pid {offer.pid}"

    def _settle(self, name: bytes, session: _Session, now: float) -> None:
        """Looks whether a race was lost on every address."""
        proving = session.proving
        if proving is None or proving.verdict not in (Verdict.DEAD, Verdict.SILENT):
            return
        session.proving = None
        session.retry_at = now + RETRY_SECONDS
        failures = "; ".join(f"{address} {reason}" for address, reason in proving.failures.items())
        note(self.evidence.hosts, self._host_name(session), f"not reached: {failures}")
        if name == self._return_to and proving.verdict is Verdict.DEAD and self.outcome is None:
            # Refused everywhere: its process is gone, and there is nothing to come back to.
            self._return_to = None
        if proving.purpose == "probe" and proving.verdict is Verdict.SILENT and not session.counted_dead:
            if session.blocking_since is None:
                session.blocking_since = now
            if now - session.blocking_since < SILENT_SECONDS:
                self._prove(name, session, now)
                return
            session.counted_dead = True
        if session.blocking_since is not None:
            self._unblock(session)
            self._seeker.resume(now)

    # --- a job that runs already -----------------------------------------------------------------------------------

    def _patience(self) -> float:
        return min(RUNNING_PATIENCE_SECONDS, self._timeout)

    def _bound_elsewhere(self, candidate: bytes) -> bool:
        """Whether the candidate may not be joined now: we have a host, may have one, or the job runs elsewhere."""
        if candidate == self._moving_to:
            return False
        if self._current is not None or self._return_to is not None:
            return self._current is not None or candidate != self._return_to
        return self._blocked(candidate)

    def _blocked(self, candidate: bytes) -> bool:
        """Whether the job runs in another session than the candidate."""
        return any(
            each.blocking_since is not None and name != candidate for name, each in self._sessions.items()
        )

    @staticmethod
    def _is_mute(session: _Session) -> bool:
        """Whether it has proved itself and not said yet in what state it is."""
        return session.running is None and session.proving is not None and session.proving.verdict is Verdict.PROVED

    def _unblock(self, session: _Session) -> None:
        session.blocking_since = session.running = None
        session.told = False
        if session.proving is not None and session.proving.purpose == "probe":
            session.proving = None

    # --- frames ----------------------------------------------------------------------------------------------------

    def _send(self, frame: frames.AnyFrame) -> None:
        assert self._current is not None
        proving = self._sessions[self._current].proving
        if proving is not None and proving.conversation is not None:
            proving.conversation.send(frame)

    def _frame(self, name: bytes, session: _Session, frame: frames.AnyFrame, now: float) -> None:
        if isinstance(frame, frames.Running):
            if name != self._current:
                self._runs(session, frame, now)
        elif isinstance(frame, frames.Refused):
            self._refused(name, session, frame, now)
        elif name != self._current:
            return
        elif isinstance(frame, frames.Joined):
            self._joined(name, session, frame)
        elif isinstance(frame, frames.Confirm):
            if frame.epoch >= self._epoch and self.outcome is None:
                self._epoch, self.step, self._confirm_due = frame.epoch, Step.SEATED, True
                self._sealed = self._store_retry_at = None
                if self._store_failed and session.proving is not None:
                    # A way that was proved once, and over which the store was not reached, may be broken by now.
                    session.proving.prove_again(now)
                self._store_failed = False
        elif isinstance(frame, frames.Sealed):
            if frame.epoch == self._epoch and self.step is Step.CONFIRMED:
                self.step, self._sealed = Step.PROVING_STORE, frame
                self._prove_store()
        elif isinstance(frame, frames.Go):
            if self._sealed is not None and frame.epoch == self._sealed.epoch and self.step is Step.ACKED:
                self._go(session, self._sealed)
        elif isinstance(frame, frames.Void):
            if frame.epoch == self._epoch and self.outcome is None:
                self.step, self._sealed = Step.SEATED, None
                self._confirm_due, self._store_retry_at = False, None
        elif isinstance(frame, frames.Moved):
            self._sent_after(session, frame.offer, now)
        elif isinstance(frame, frames.Ping):
            self._send(frames.Pong(number=frame.number))
        elif isinstance(frame, frames.Status):
            self.status = frame
        elif isinstance(frame, frames.Roster):
            self.roster += frame.seats
        elif isinstance(frame, frames.Closed) and self.outcome is None:
            if frame.conflict:
                self.failure = reports.closed_by_host(self.identity, frame.reason, network=frame.network)
            else:
                note(self.evidence.hosts, self._host_name(session), f"ended the session: {frame.reason}")

    def _joined(self, name: bytes, session: _Session, frame: frames.Joined) -> None:
        self._return_to = None
        self._unblock(session)
        if self.outcome is not None:
            if self._ready:
                self._send(frames.Ready(session=name))
            return
        self._epoch = frame.epoch
        # Kept from before the connection broke, if the store had been proved: only GO is lacking.
        acked = self._sealed
        if acked is not None and (acked.session, acked.epoch) == (name, frame.epoch):
            self.step = Step.ACKED
        else:
            self.step, self._sealed = Step.SEATED, None

    def _runs(self, session: _Session, frame: frames.Running, now: float) -> None:
        """A session we only asked whether it lives says that it does."""
        if frame.state == "open":
            # It reopened while we asked; its next OFFER lets us join.
            assert session.proving is not None
            session.proving.abandon()
            session.proving = None
            session.retry_at = now + RETRY_SECONDS
            self._unblock(session)
            self._seeker.resume(now)
            return
        session.running, session.counted_dead = frame, False
        if session.blocking_since is None:
            session.blocking_since = now

    def _refused(self, name: bytes, session: _Session, frame: frames.Refused, now: float) -> None:
        assert session.proving is not None
        session.proving.abandon()
        session.proving = None
        session.confirmed = False
        if name == self._return_to:
            self._return_to = None
        if name == self._current:
            self._current = None
        if self.outcome is not None:
            return
        self.step, self._doubt_until = Step.SEEKING, None
        note(self.evidence.hosts, self._host_name(session), f"refused us: {frame.reason}")
        if frame.reason in ("session", "ended", "secret"):
            session.retry_at = now + RETRY_SECONDS
            self._seeker.resume(now)
        elif frame.reason in ("running", "full"):
            # Full or sealed without us: wait for its end, like for any other run of the same job.
            session.offer = _sealed(session.offer)
            self._prove(name, session, now)
            self._seeker.resume(now)
        else:
            self.failure = reports.refused(self.identity, frame)

    def _runs_elsewhere(self, current: bytes) -> bool:
        """Tells whether the job runs without us already, or may: then this one is not confirmed."""
        return self._blocked(current) or any(
            each.proving is not None
            and each.proving.purpose == "probe"
            and each.proving.verdict is Verdict.RACING
            and not each.counted_dead
            for each in self._sessions.values()
        )

    def _confirm_if_due(self) -> None:
        """Confirms once every way to the host has been tried: the seal chooses among them."""
        if not self._confirm_due or self._current is None:
            return
        proving = self._sessions[self._current].proving
        if proving is None or proving.pending or self._runs_elsewhere(self._current):
            return
        self._confirm_due, self.step = False, Step.CONFIRMED
        self._sessions[self._current].confirmed = True
        paths = tuple(proving.paths.values())[:MAX_PATHS]
        self._send(frames.Confirmed(session=self._current, epoch=self._epoch, paths=paths))

    def _prove_store(self) -> None:
        sealed = self._sealed
        assert sealed is not None
        self._store_retry_at = None
        address = sealed.store_address
        path = self._path(address)
        if address.startswith("fe80:") and path is not None:
            # A link-local address means nothing without the interface it is reached on, and that is ours to add.
            address = f"{address}%{path.interface}"
        self._effects.append(
            ProveStore(sealed.epoch, address, sealed.store_port, sealed.session, sealed.store_token)
        )

    def _path(self, address: str) -> frames.Path | None:
        assert self._current is not None
        proving = self._sessions[self._current].proving
        return None if proving is None else proving.paths.get(address)

    def store_proved(self, epoch: int) -> None:
        """The store was reached and holds the session's token."""
        if self.step is Step.PROVING_STORE and self._sealed is not None and self._sealed.epoch == epoch:
            self.step = Step.ACKED
            self._send(frames.Ack(session=self._sealed.session, epoch=epoch))

    def store_unreachable(self, epoch: int, reason: str, now: float) -> None:
        """The store was not reached; it is tried again until the host voids the epoch."""
        if self.step is Step.PROVING_STORE and self._sealed is not None and self._sealed.epoch == epoch:
            note(self.evidence.hosts, f"store at {self._sealed.store_address}:{self._sealed.store_port}", reason)
            self._store_retry_at, self._store_failed = now + STORE_RETRY_SECONDS, True

    def _go(self, session: _Session, sealed: frames.Sealed) -> None:
        path = self._path(sealed.store_address)
        if path is None:
            # The member came back over another way than the one that was sealed.
            assert session.proving is not None
            path = next(iter(session.proving.paths.values()))
        self.step = Step.FORMED
        for each in self._sessions.values():
            if each is session:
                assert each.proving is not None
                each.proving.stop_trying()
            elif each.proving is not None:
                each.proving.abandon()
                each.proving = None
        self.outcome = Formation(
            session=sealed.session,
            rank=sealed.rank,
            world_size=sealed.world_size,
            local_rank=sealed.local_rank,
            local_world_size=sealed.local_world_size,
            node_rank=sealed.node_rank,
            num_nodes=sealed.num_nodes,
            store_address=sealed.store_address,
            store_port=sealed.store_port,
            interface=path.interface,
            address=path.local_address,
            roster_digest=sealed.roster_digest,
        )

    # --- electing: moves from one host to another ---------------------------------------------------------------------

    @property
    def seat(self) -> bytes | None:
        """The session in which we have a seat."""
        return self._current if self._seated else None

    @property
    def has_confirmed(self) -> bool:
        """Whether our host may decide GO with us in it."""
        return self.step in _AFTER_CONFIRMED or self.step is Step.FORMED

    @property
    def host_in_sight(self) -> bool:
        """Whether we have a host, or are about to see whether we have one."""
        racing = any(
            each.proving is not None and each.proving.purpose == "join" and each.proving.verdict is Verdict.RACING
            for each in self._sessions.values()
        )
        return self._current is not None or self._return_to is not None or racing

    @property
    def blocked(self) -> bool:
        """Whether the job runs without us, or may."""
        return self._runs_elsewhere(b"")

    def offer_of(self, name: bytes) -> Offer | None:
        """What a session's host last said of itself."""
        session = self._sessions.get(name)
        return None if session is None else session.offer

    def sealed(self) -> list[tuple[Offer, list[Endpoint]]]:
        """The sessions that were last known to run, or about to."""
        return [(each.offer, each.endpoints) for each in self._sessions.values() if each.offer.state == "sealed"]

    def pause(self) -> None:
        """Stops looking and leaves its seat: this process hosts a session of its own."""
        if self._current is not None:
            self._send(frames.Leave(session=self._current, reason="it hosts a session of its own"))
        for session in self._sessions.values():
            if session.proving is not None:
                session.proving.abandon()
                session.proving = None
            self._unblock(session)
        self._current, self._return_to, self._sealed = None, None, None
        self._confirm_due, self._store_retry_at, self._doubt_until = False, None, None
        self._moving_to = self._move_until = None
        self.step = Step.SEEKING
        self._seeker.pause()

    def make_for(self, offer: Offer, interface: str, now: float) -> None:
        """Joins that session, without asking for others: this process makes way for its host."""
        endpoints = [Endpoint(address, interface) for address in offer.addresses]
        session = self._sessions.get(offer.session) or self._remember(offer, endpoints)
        if session is not None and session.proving is None:
            session.offer, session.endpoints = offer, endpoints
            self._prove(offer.session, session, now)

    def _sent_after(self, session: _Session, offer: Offer, now: float) -> None:
        """Our host makes way for another one and sends us after it; it stays ours until we have reached that one."""
        if self.outcome is not None or self.has_confirmed or offer.session == self._current:
            return
        if offer.host == self.identity.member:
            # Each makes way for the other, perhaps in a circle of several. It stays, then, and so do we.
            self._send(frames.Stranded(session=offer.session))
            return
        here = next(iter(session.proving.paths.values())) if session.proving and session.proving.paths else None
        self._moving_to, self._move_until = offer.session, now + MOVE_SECONDS
        self.make_for(offer, here.interface if here is not None else "", now)

    def _move(self, now: float) -> None:
        """The other host is reached: leave the old one."""
        self._moving_to = self._move_until = None
        if self._current is None:
            return
        old = self._sessions[self._current]
        self._send(frames.Leave(session=self._current, reason="it went to another host"))
        if old.proving is not None:
            old.proving.abandon()
            old.proving = None
        old.retry_at = now + RETURN_SECONDS
        self._current, self._sealed = None, None
        self._confirm_due, self._store_retry_at, self._doubt_until = False, None, None

    def _strand(self, now: float) -> None:
        """The other host was not reached: say so, and stay."""
        name, self._moving_to, self._move_until = self._moving_to, None, None
        if name is None:
            return
        session = self._sessions.get(name)
        if session is not None:
            if session.proving is not None:
                session.proving.abandon()
                session.proving = None
            session.retry_at = now + RETRY_SECONDS
        if self._seated:
            self._send(frames.Stranded(session=name))

    # --- loss and time ---------------------------------------------------------------------------------------------

    def _lost(self, name: bytes, session: _Session, reason: str, now: float) -> None:
        note(self.evidence.hosts, self._host_name(session), f"connection lost: {reason}")
        self._doubt_until = None
        if self.outcome is not None:
            self._current = None
            if not self._ready:
                # The host counts us as lost unless we come back and say READY.
                self._return_to, self._return_until = name, now + RETURN_SECONDS
                self._prove(name, session, now)
            return
        returning = self.step in _AFTER_CONFIRMED
        if self.step is not Step.ACKED:
            self._sealed = None
        self._current, self.step = None, Step.SEEKING
        self._confirm_due, self._store_retry_at = False, None
        self._moving_to = self._move_until = None
        if returning:
            self._return_to, self._return_until = name, now + RETURN_SECONDS
            self._prove(name, session, now)
        self._seeker.resume(now)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        if self.failure is not None:
            return
        self._race(now)
        if self.outcome is None:
            self._gather(now)

    def _race(self, now: float) -> None:
        for name, session in list(self._sessions.items()):
            if session.proving is not None:
                session.proving.handle_timer(now)
                self._settle(name, session, now)
            elif name == self._return_to and now >= session.retry_at:
                if now < self._return_until:
                    self._prove(name, session, now)
                else:
                    self._return_to = None

    def _gather(self, now: float) -> None:
        for session in self._sessions.values():
            self._watch_blocker(session, now)
        self._confirm_if_due()
        if self._doubt_until is not None and now >= self._doubt_until:
            self._leave_silent_host(now)
        if self._move_until is not None and now >= self._move_until:
            self._strand(now)
        if self._store_retry_at is not None and now >= self._store_retry_at:
            self._prove_store()
        if self._seeker.should_ask(now):
            self._effects.append(Multicast(self.identity.seek()))
        if self._lobby.should_ask(now):
            self._effects.append(Multicast(self.identity.list(), lobby=True))
        if self._lobby.should_answer(now):
            self._effects.append(Multicast(self.identity.seek(), lobby=True))
        if self._seated and not self._final_ask_done and now >= self._deadline - STATUS_BEFORE_DEADLINE_SECONDS:
            self._final_ask_done = True
            self.ask_status()

    def _leave_silent_host(self, now: float) -> None:
        self._doubt_until = None
        name = self._current
        if name is None or self.step not in (Step.JOINING, Step.SEATED):
            return
        session = self._sessions[name]
        if session.proving is not None:
            session.proving.abandon()
            session.proving = None
        session.retry_at = now + RETRY_SECONDS
        self._lost(name, session, "silent while another host offered itself", now)

    def _watch_blocker(self, session: _Session, now: float) -> None:
        if session.blocking_since is None:
            return
        waited = now - session.blocking_since
        if session.running is None:
            if self._is_mute(session) and waited >= SILENT_SECONDS:
                assert session.proving is not None
                session.proving.abandon()
                session.counted_dead = True
                self._unblock(session)
                self._seeker.resume(now)
            return
        if waited >= RUNNING_NOTICE_SECONDS and not session.told:
            session.told = True
            self._effects.append(Notice(reports.running_notice(self.identity, session.running, waited)))
        if waited >= self._patience():
            self.failure = reports.running(self.identity, session.running, waited)

    def expired(self, now: float) -> bool:
        """Tells whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        for session in self._sessions.values():
            if session.running is not None and session.blocking_since is not None:
                waited = self._deadline - session.blocking_since
                self.failure = reports.running(self.identity, session.running, waited)
        if self.failure is None and self.status is None and self._current is None:
            self.failure = reports.authentication(
                self.identity, self.evidence, facts, secured=self._key is not None
            )
        if self.failure is None:
            self.failure = reports.timeout(
                self.identity,
                self.evidence,
                facts,
                seconds=self._timeout,
                status=self.status,
                connected=self._current is not None,
            )

    # --- after GO --------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Tells the host that the process group stands."""
        self._ready = True
        if self._current is not None and self.outcome is not None:
            self._send(frames.Ready(session=self._current))

    def ask_roster(self) -> None:
        """Asks the host who is in the job; the answer gathers in ``roster``."""
        self.roster = []
        self._send(frames.Ask(what="roster"))

    @property
    def connection_stands(self) -> bool:
        """Whether the host can still be asked."""
        return self._current is not None and self._sessions[self._current].proving is not None

    def leave(self, reason: str) -> None:
        """Says good-bye and hangs up everywhere.

        One that has heard GO says READY first. Without it the host takes LEAVE for what it is from a member that
        gave up before it heard GO: a loss, whether or not GO has been decided meanwhile.
        """
        if self.outcome is not None and not self._ready:
            self.ready()
        if self._current is not None:
            self._send(frames.Leave(session=self._current, reason=reason[:2048]))
        for session in self._sessions.values():
            if session.proving is not None:
                session.proving.abandon()
                session.proving = None


def _sealed(offer: Offer) -> Offer:
    return msgspec.structs.replace(offer, state="sealed")
