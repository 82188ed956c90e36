"""An agent that joins the session of another one: a joiner (:mod:`mingle.protocol.member`) that stays after GO.

It is bound to its host by its own clock (:class:`mingle.elastic.leases.Binding`): while it is bound, it confirms no
other session. It treats the host as lost when the connection or the binding ends. A pure machine.
"""

from __future__ import annotations

import msgspec

from mingle.elastic import reports as elastic_reports
from mingle.elastic.leases import BINDING_SECONDS
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Policy
from mingle.elastic.reports import Attendance
from mingle.network.connections import CLOSED_BY_PEER
from mingle.protocol import reports
from mingle.protocol.machine import Context, Identity, NetworkFacts, Source
from mingle.protocol.member import Joiner
from mingle.protocol.membership import Step
from mingle.protocol.sessions import Session
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer

TELL_HOST_SECONDS = 1.0
"""How often at most a running member tells its host of another session of the job."""
_BOUND = (Step.PROVING_STORE, Step.ACKED)
_BEFORE_GO = (Step.CONFIRMED, *_BOUND)
ASK_SECONDS = BINDING_SECONDS / 2
"""How long its host may be silent before GO until it is asked whether it lives; it may wait for others all the time."""


class ElasticMember(Joiner):
    """The machine of an agent that joins.

    Args:
        policy: how many agents found and keep a session.
        memory: this agent's past.
        attendance: the largest number of agents so far, for the report.
    """

    def __init__(
        self,
        identity: Identity,
        context: Context,
        now: float,
        *,
        policy: Policy,
        memory: Memory,
        attendance: Attendance,
    ) -> None:
        super().__init__(identity, context, now)
        self.lost: str | None = None
        """Why the session that had formed is no more, if the job goes on."""
        self.ended: str | None = None
        """Why its host has ended the job on purpose."""
        self.moved_to: Offer | None = None
        self._policy = policy
        self._memory = memory
        self._attendance = attendance
        self._members: frames.Members | None = None
        self._doubt: tuple[bytes, int, bool] | None = None
        """The session whose GO we may never hear of, and what memory held of generation and quorum before it."""
        self._now = self._tell_at = self._heard_at = now
        self._asked_host = False
        self._blocking.patience = context.timeout
        self.membership.application = self._complete

    def _complete(self, join: frames.Join) -> frames.Join:
        memory = self._memory
        return msgspec.structs.replace(
            join, generation=memory.generation, had_quorum=memory.had_quorum, surplus=memory.surplus
        )

    @property
    def running(self) -> bool:
        """Whether the session has formed and its host is not lost."""
        return self.outcome is not None and self.membership.current is not None

    # --- what happens ----------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Check whether the agent is still bound. The driver calls this method before it handles any other event."""
        self._now = now
        current = self.membership.current
        if self.running and current is not None and not self._memory.binding.holds(now):
            current.hang_up()
            self._lost(current, f"it was silent for {BINDING_SECONDS:.0f} s", now)

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if self.outcome is not None:
            self._heard_while_running(message, now)
        else:
            super().heard(message, source, now)

    def _heard_while_running(self, message: Datagram, now: float) -> None:
        """Our host may not hear the other's datagrams."""
        current = self.membership.current
        if not isinstance(message, Offer) or current is None or now < self._tell_at:
            return
        ours = (message.job, message.attempt) == (self.identity.job, self.identity.attempt)
        if ours and message.session != current.name and message.state == "sealed":
            self._tell_at = now + TELL_HOST_SECONDS
            self.membership.send(frames.HostSeen(offer=message))

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """Handle a connection that ended or could not be made."""
        self._now = now
        session, race = self._sessions.owner(conn)
        if reason == CLOSED_BY_PEER and conn == race.winner and session is self.membership.current:
            # A firewall does not forge an orderly close (FIN), so the host's process has ended and holds nothing.
            self._memory.binding.release(session.name)
        super().disconnected(conn, reason, now)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        self._now = now
        super().received(conn, untrusted, now)

    def _frame(self, session: Session, frame: frames.AnyFrame, now: float) -> None:
        memory, formed, step = self._memory, self.outcome is not None, self.step
        if session is not self.membership.current:
            if isinstance(frame, frames.Running):
                memory.surplus |= frame.surplus
        else:
            self._heard_at, self._asked_host = now, False
            sealed = (
                isinstance(frame, frames.Sealed) and step is Step.CONFIRMED and frame.epoch == self.membership.epoch
            )
            if sealed or formed or step in _BOUND:
                memory.binding.renew(session.name, now)
            if isinstance(frame, frames.Members):
                self._learn(frame)
                return
            if isinstance(frame, frames.Void) and not formed and frame.epoch == self.membership.epoch:
                self._called_off(session)
            elif isinstance(frame, frames.Redirect) and formed:
                self.moved_to = frame.offer
                return
            elif isinstance(frame, frames.Status) and not formed:
                self._attendance.note(frame)
        super()._frame(session, frame, now)
        if self.outcome is not None and not formed:
            memory.surplus = False
            if self._members is not None:
                self._learn(self._members)
            # An agent that loses its host can join any other one; unlike a rank it has no process group to return to.
            self.ready()

    def _learn(self, members: frames.Members) -> None:
        """Take note of the members; before the session has formed, the list has no meaning."""
        self._members = members
        if self.outcome is not None:
            memory = self._memory
            memory.generation, memory.companions = members.generation, members.present
            memory.had_quorum |= members.quorum

    def store_proved(self, epoch: int) -> None:
        """The store was reached: from now on the host may decide GO, and count this agent even if it never hears so."""
        acknowledged = self.step is Step.ACKED
        super().store_proved(epoch)
        current, members, memory = self.membership.current, self._members, self._memory
        if acknowledged or self.step is not Step.ACKED or current is None or members is None:
            return
        self._doubt = current.name, memory.generation, memory.had_quorum
        memory.generation = max(memory.generation, members.generation)
        memory.had_quorum |= members.quorum

    def _called_off(self, session: Session) -> None:
        """The host has not decided GO."""
        self._memory.binding.release(session.name)
        if self._doubt is not None and self._doubt[0] == session.name:
            _, self._memory.generation, self._memory.had_quorum = self._doubt
            self._doubt = None

    def _refused(self, session: Session, frame: frames.Refused, now: float) -> None:
        if frame.reason == "surplus":
            self._memory.surplus = True
            frame = msgspec.structs.replace(frame, reason="full")
        super()._refused(session, frame, now)

    def _confirm_if_due(self, now: float) -> None:
        """Confirm, unless this agent is bound to another session or can join a running one."""
        current = self.membership.current
        if current is None or not self._memory.binding.elsewhere(current.name, now):
            super()._confirm_if_due(now)

    def _closed_by_host(self, session: Session, frame: frames.Closed) -> None:
        self._memory.binding.release(session.name)
        if self.outcome is None:
            super()._closed_by_host(session, frame)
        elif frame.regather:
            self.lost = frame.reason or "its host gave it up"
        else:
            self.ended = frame.reason or "its host closed it"

    def _lost(self, session: Session, reason: str, now: float) -> None:
        formed = self.outcome is not None
        super()._lost(session, reason, now)
        if formed and self.ended is None and self.lost is None:
            self.lost = f"the connection to {session.host_name} is lost: {reason}"

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times, binding = [super().next_timer()], self._memory.binding
        if self.step in _BEFORE_GO:
            times.append(self._heard_at + (BINDING_SECONDS if self._asked_host else ASK_SECONDS))
        if self.running or (self.membership.can_confirm and binding.holds(self._now)):
            times.append(binding.until)
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        self._now = now
        super().handle_timer(now)
        self.check(now)
        self._doubt_host(now)

    def _doubt_host(self, now: float) -> None:
        """Leaves a host that is silent before GO: it may be stopped, and its kernel keeps the connection alive."""
        current = self.membership.current
        if self.step not in _BEFORE_GO or current is None:
            return
        if now >= self._heard_at + BINDING_SECONDS:
            current.hang_up()
            current.retry_later(now)
            self._lost(current, f"it was silent for {BINDING_SECONDS:.0f} s", now)
        elif now >= self._heard_at + ASK_SECONDS and not self._asked_host:
            self._asked_host = True
            self.membership.send(frames.Ping())

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        status = self.membership.status
        failure = self._blocking.failure(self._deadline)
        if failure is None and status is None and self.membership.current is None:
            failure = reports.authentication(self.identity, self.diagnostics, facts, secured=self._secured)
        status = status or self._attendance.best
        if failure is None and status is not None:
            failure = elastic_reports.incomplete(
                self.identity,
                self._policy,
                self._memory,
                status,
                self.timeout,
                self._attendance,
                self.diagnostics,
                facts,
            )
        self.failure = failure
        if failure is None:
            super().give_up(facts)
