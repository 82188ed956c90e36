"""The mesh of a session: each node opens a connection to each other one before the job forms. No sockets.

GO means that every pair of nodes has opened a TCP connection in both directions on the network that was chosen. CONFIRM
gives each node its targets. A :class:`Prover` dials them, and CONFIRMED names those that it could not reach. The
process at the other end answers (:mod:`mingle.protocol.links.responder`).

A connection counts when both sides have proved the session, with the handshake of every control connection, and have
greeted each other. GREET is longer than a packet, because a path that drops large packets carries a handshake. A
target that accepts and does not answer has failed only if further connections stay unanswered, too: where many packets
are lost, TCP can pause on one connection for seconds. Its process can also be stopped, which only the host can tell
from a broken path (:func:`mingle.protocol.session.mesh_proof.shows_a_broken_path`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from mingle.protocol.effects import Inspect
from mingle.protocol.events import BytesReceived, Connected, ConnectionEvent, Disconnected, Inspected
from mingle.protocol.links.handshake import HandshakeFailed, MemberConversation
from mingle.protocol.links.link import Link
from mingle.protocol.machine import Context, Identity
from mingle.wire import frames
from mingle.wire.datagrams import Rejected
from mingle.wire.frames import PADDING_BYTES, Blocked, Failure, Target, Unreached

TARGETS_AT_ONCE = 32
"""The number of targets that one node dials at a time."""
DIAL_SECONDS = 0.5
"""The time after which a target that has not answered is dialed once more: a lost SYN is sent again by the kernel only
after a second, and then ever more rarely. Two SYNs are not enough on a network that loses one packet in twenty."""
DIALS_AT_ONCE = 3
"""The connections to one target that can be under way: a fourth one replaces the first."""
REFUSED_SECONDS = 1.0
"""How long a target is dialed that refuses, or answers as another program does: its listener can be late."""
ANSWER_SECONDS = 3.0
"""The time for each answer on a connection. TCP repeats a packet that was lost within a fraction of it."""
LATE_SECONDS = 0.5
"""A timer that is later than this was kept back with the process, which has not dialed meanwhile."""
REMEMBERED_SECONDS = 60.0
"""How long a target counts as reached, or as failed, so that the same members do not prove the mesh twice."""
MAX_REMEMBERED = 4096
"""The number of targets that are remembered; members can come and go for as long as a job has not formed."""
INSPECTION_SECONDS = 2.0
"""The time in which a machine has to find out what is wrong with itself: a tool that lists its firewall can hang, and
the last try must not become longer for it."""
LOSSY = "some packets pass and others are lost"
"""The detail of a target to which connections were made that failed in different ways."""


def greeting(member: bytes) -> frames.Greet:
    """Return the GREET of a member."""
    return frames.Greet(member=member, padding=bytes(PADDING_BYTES))


def _place(target: Target) -> tuple[bytes, str, int]:
    """Return what a target is remembered by: a member that has moved is another one."""
    return target.member, target.address, target.port


class _Attempt(Link, kw_only=True):
    """One connection to a target."""

    conversation: MemberConversation
    pursuit: _Pursuit


class _Pursuit(Struct, eq=False):
    """What is known of one target."""

    target: Target
    ends: float
    """Until when it is dialed if nobody answers."""
    next_dial: float
    attempts: list[_Attempt] = field(default_factory=list)
    refused_until: float | None = None
    """Until when it is dialed if it goes on to refuse."""
    how: Unreached = "no answer"
    """How it failed last."""
    detail: str = ""
    answer_by: float = float("inf")
    """By when it must answer on a connection."""
    repeated: bool = False
    """Whether further connections were opened because the first one went unanswered."""
    due: float = float("inf")
    """When there is something to do for it."""

    @property
    def connected(self) -> bool:
        """Whether a connection is established."""
        return any(each.established for each in self.attempts)

    @property
    def unanswered(self) -> tuple[Unreached, str]:
        """How it has failed if no connection was answered, with a detail: as each of all that can be made has.

        On a network that loses three packets in ten, two connections fail alike by chance.
        """
        greeted = [each.conversation.welcome is not None for each in self.attempts if each.established]
        if len(greeted) < DIALS_AT_ONCE or len(set(greeted)) > 1:
            return "no answer", LOSSY
        return ("large packets" if greeted[0] else "silent"), ""

    @property
    def greeted(self) -> bool:
        """Whether GREET was sent on a connection."""
        return any(each.conversation.welcome is not None for each in self.attempts)


class ProofResult(Struct, frozen=True):
    """What a node has proved."""

    epoch: int
    failures: tuple[Failure, ...]
    """The targets that it could not reach."""
    blocked: Blocked | None
    """What it has found out about itself."""


class Prover:
    """A node's part in the proof of the mesh: its connections to its targets, an epoch at a time.

    The host and its members have the same part. CONFIRM, or the host's own registrar, begins it; its result goes into
    CONFIRMED.

    Args:
        identity: of this process.
        context: has and numbers connections, and remembers the targets that were reached.
        port: returns where this process answers; 0: it does not.
    """

    def __init__(self, identity: Identity, context: Context, port: Callable[[], int]) -> None:
        self._identity = identity
        self._context = context
        self._links = context.links
        self._port = port
        self._epoch: int | None = None
        """The epoch whose result is owed."""
        self._call = identity.call(b"", "mesh")
        self._interface = ""
        self._seconds = self._answer_seconds = 0.0
        self._waiting: list[Target] = []
        self._pursuits: dict[bytes, _Pursuit] = {}
        self._failures: list[Failure] = []
        self._blocked: Blocked | None = None
        self._inspection = 0
        """The number of what is being found out about this machine; 0: nothing."""
        self._inspected_by = float("inf")

    def begin(
        self,
        session: bytes,
        epoch: int,
        path: frames.Path | None,
        *,
        targets: Sequence[Target],
        suspects: tuple[Target, ...] = (),
        seconds: float,
        now: float,
    ) -> None:
        """Open connections to the targets, in place of those of an earlier epoch.

        Args:
            session: the name of the session.
            epoch: the epoch that the result belongs to.
            path: this node's own on the network that is to be proved; None: it has none.
            targets: where to dial, the first first.
            suspects: nodes that could not reach this one, so that it has to look at itself.
            seconds: how long to dial a target that does not answer.
            now: the time.
        """
        self.stop()
        self._epoch = epoch
        self._call = self._identity.call(session, "mesh")
        self._interface = "" if path is None else path.interface
        self._seconds, self._answer_seconds = seconds, min(ANSWER_SECONDS, seconds)
        self._failures, self._blocked = [], None
        if path is not None and suspects:
            self._inspection = self._context.new_id()
            self._inspected_by = now + min(INSPECTION_SECONDS, seconds)
            inspect = Inspect(self._inspection, path.interface, path.local_address, self._port(), suspects)
            self._links.effects.append(inspect)
        for each in targets:
            if (failure := self._failed_before(each, now)) is not None:
                self._failures.append(failure)
            elif not self.was_reached(each, now):
                self._waiting.append(each)
        self._fill(now)

    def stop(self) -> None:
        """Hang up on all targets: the epoch is over."""
        self._epoch, self._inspection = None, 0
        self._waiting.clear()
        for pursuit in list(self._pursuits.values()):
            self._forget(pursuit)

    @property
    def under_way(self) -> bool:
        """Whether a target has neither been reached nor given up, or this machine is still being looked at."""
        return bool(self._waiting or self._pursuits or self._inspection)

    def take_result(self) -> ProofResult | None:
        """Return, once, what a proof that is no longer under way has shown; None: nothing was asked for."""
        if self._epoch is None or self.under_way:
            return None
        epoch, self._epoch = self._epoch, None
        return ProofResult(epoch, tuple(self._failures), self._blocked)

    # --- what happens ----------------------------------------------------------------------------------------------

    def _handle(self, attempt: _Attempt, event: ConnectionEvent, now: float) -> None:
        """Process what has happened on a connection of this prover."""
        pursuit = attempt.pursuit
        self._notice_pause(now)
        match event:
            case Connected():
                self._connected(pursuit, attempt, now)
            case BytesReceived(_, untrusted):
                self._received(pursuit, attempt, untrusted, now)
            case Disconnected(_, reason):
                self._disconnected(pursuit, attempt, reason, now)
        pursuit.due = self._due(pursuit)
        self._fill(now)

    def inspected(self, event: Inspected) -> None:
        """Take note of what this machine has found out about itself."""
        if event.number == self._inspection:
            self._inspection, self._blocked = 0, event.blocked

    def _connected(self, pursuit: _Pursuit, attempt: _Attempt, now: float) -> None:
        # Later ones are to show whether it is chance that the first one is not answered.
        if not any(each.established for each in pursuit.attempts if each is not attempt):
            pursuit.answer_by = now + self._answer_seconds
            for other in [each for each in pursuit.attempts if not each.established]:
                self._hang_up(other)

    def _received(self, pursuit: _Pursuit, attempt: _Attempt, untrusted: bytes, now: float) -> None:
        conversation = attempt.conversation
        was_proved, is_progress = conversation.welcome is not None, not pursuit.greeted
        try:
            received = attempt.receive(untrusted)
        except (Rejected, HandshakeFailed) as failure:
            self._hang_up(attempt)
            self._refused(pursuit, "another program", str(failure), now)
            return
        if conversation.welcome is not None and not was_proved:
            self._links.flush()  # where large packets are lost, the proof passes in one of its own
            attempt.send(greeting(self._identity.member))
            if is_progress:
                pursuit.answer_by = now + self._answer_seconds
        for frame in received:
            if isinstance(frame, frames.Greet):
                if self.accepts(pursuit.target, frame):
                    self._reached(pursuit, now)
                else:
                    self._hang_up(attempt)
                    self._refused(pursuit, "another program", "another member of the job answers there", now)
                return

    def accepts(self, target: Target, greeting: frames.Greet) -> bool:
        """Return whether it is the target that has answered."""
        return greeting.member == target.member

    def _disconnected(self, pursuit: _Pursuit, attempt: _Attempt, reason: str, now: float) -> None:
        pursuit.attempts.remove(attempt)
        if attempt.established:
            # A process without a free descriptor accepts with a spare one, and closes.
            pursuit.how, pursuit.detail, pursuit.refused_until = "closed", reason, None
            self._dial_again(pursuit, now)
        elif "ECONNREFUSED" in reason:
            self._refused(pursuit, "refused", "", now)
        elif "EMFILE" in reason or "ENFILE" in reason:
            pursuit.how, pursuit.detail = "no descriptor", reason
            self._dial_again(pursuit, now)
        else:
            pursuit.how = "no answer" if "ETIMEDOUT" in reason else "no route"
            pursuit.detail, pursuit.refused_until = reason, None
            self._dial_again(pursuit, now)

    def _refused(self, pursuit: _Pursuit, how: Unreached, detail: str, now: float) -> None:
        """Handle an answer that another program or the kernel has given; the target's listener can be late."""
        pursuit.how, pursuit.detail = how, detail
        if pursuit.refused_until is None:
            pursuit.refused_until = now + REFUSED_SECONDS
        if now >= pursuit.refused_until:
            self._failed(pursuit, now)
        else:
            self._dial_again(pursuit, now)

    @staticmethod
    def _dial_again(pursuit: _Pursuit, now: float) -> None:
        if not pursuit.attempts:
            pursuit.next_dial = min(max(pursuit.next_dial, now), now + DIAL_SECONDS / 2)

    # --- the end of a target -----------------------------------------------------------------------------------------

    def was_reached(self, target: Target, now: float) -> bool:
        """Return whether a target was reached lately, so that it is not dialed again."""
        at = self._context.reached.get(_place(target))
        return at is not None and now - at < REMEMBERED_SECONDS

    def _failed_before(self, target: Target, now: float) -> Failure | None:
        """Return, once, how a target lately failed in another session: the first in order leads a session of its own.

        It counts only where a broken mesh is no error, and the next try dials again.
        """
        place = _place(target)
        at, session, failure = self._context.failed.get(place, (float("-inf"), self._call.session, None))
        if self._context.mesh != "warn" or session == self._call.session or now - at >= REMEMBERED_SECONDS:
            return None
        del self._context.failed[place]
        return failure

    def _reached(self, pursuit: _Pursuit, now: float) -> None:
        place = _place(pursuit.target)
        if len(self._context.reached) >= MAX_REMEMBERED:
            self._context.reached.clear()
        self._context.reached[place] = now
        self._context.failed.pop(place, None)
        self._forget(pursuit)

    def _failed(self, pursuit: _Pursuit, now: float) -> None:
        if pursuit.how in ("no answer", "no route") and (detour := self._context.astray(pursuit.target.address)):
            pursuit.how, pursuit.detail = "no route", detour.brief
        target = pursuit.target
        failure = Failure(member=target.member, how=pursuit.how, detail=pursuit.detail[:64])  # a ShortText
        self._failures.append(failure)
        if len(self._context.failed) >= MAX_REMEMBERED:
            self._context.failed.clear()
        self._context.failed[_place(target)] = (now, self._call.session, failure)
        self._forget(pursuit)

    def _forget(self, pursuit: _Pursuit) -> None:
        for attempt in list(pursuit.attempts):
            self._hang_up(attempt)
        del self._pursuits[pursuit.target.member]

    def _hang_up(self, attempt: _Attempt) -> None:
        attempt.pursuit.attempts.remove(attempt)
        self._links.hang_up(attempt)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        due = min((each.due for each in self._pursuits.values()), default=float("inf"))
        if self._inspection:
            due = min(due, self._inspected_by)
        return due if due < float("inf") else None

    @staticmethod
    def _due(pursuit: _Pursuit) -> float:
        """Return when there is something to do for a target."""
        if pursuit.connected:
            return pursuit.answer_by
        times = [pursuit.next_dial, pursuit.ends]
        return min(times if pursuit.refused_until is None else [*times, pursuit.refused_until])

    def handle_timer(self, now: float) -> None:
        """Dial again, and give up what has taken too long."""
        self._notice_pause(now)
        if now >= self._inspected_by:
            self._inspection = 0
        for pursuit in list(self._pursuits.values()):
            self._look_after(pursuit, now)
        self._fill(now)

    def _notice_pause(self, now: float) -> None:
        """Handle a pause of this process, in which it has dialed nobody: what was due long ago shows it."""
        due = self.next_timer()
        if due is None or now - due <= LATE_SECONDS:
            return
        seconds = now - due
        self._inspected_by += seconds
        for pursuit in self._pursuits.values():
            pursuit.ends += seconds
            if pursuit.refused_until is not None:
                pursuit.refused_until += seconds
            pursuit.answer_by += seconds
            pursuit.due = self._due(pursuit)

    def _look_after(self, pursuit: _Pursuit, now: float) -> None:
        if now < pursuit.due:
            return
        if not pursuit.connected:
            refused = pursuit.refused_until is not None and now >= pursuit.refused_until
            if now >= pursuit.ends or refused:
                self._failed(pursuit, now)
            elif now >= pursuit.next_dial:
                self._dial(pursuit, now)
        elif pursuit.repeated:
            pursuit.how, pursuit.detail = pursuit.unanswered
            self._failed(pursuit, now)
        else:
            pursuit.repeated, pursuit.answer_by = True, now + self._answer_seconds
            while len(pursuit.attempts) < DIALS_AT_ONCE:
                self._dial(pursuit, now)
        pursuit.due = self._due(pursuit)

    def _fill(self, now: float) -> None:
        """Begin with further targets, as long as not too many are dialed at a time."""
        if not self._waiting:
            return
        free = TARGETS_AT_ONCE - sum(not each.connected for each in self._pursuits.values())
        beginning, self._waiting = self._waiting[: max(0, free)], self._waiting[max(0, free) :]
        for target in beginning:
            pursuit = _Pursuit(target, now + self._seconds, now)
            self._pursuits[target.member] = pursuit
            self._dial(pursuit, now)
            pursuit.due = self._due(pursuit)

    def _dial(self, pursuit: _Pursuit, now: float) -> None:
        pursuit.next_dial = now + DIAL_SECONDS
        if len(pursuit.attempts) >= DIALS_AT_ONCE:
            self._hang_up(pursuit.attempts[0])
        target = pursuit.target
        attempt = _Attempt(
            conn=self._context.new_id(),
            conversation=MemberConversation(self._call, (target.address, target.port), self._context.key),
            handler=self._handle,
            pursuit=pursuit,
        )
        pursuit.attempts.append(attempt)
        self._links.dial(attempt, target.address, target.port, self._interface, as_torch=True)
