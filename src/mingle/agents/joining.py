"""An agent that joins the session of another one: a joiner (:mod:`mingle.rank.joining`) that goes on after GO.

It remembers who was in the session (:class:`mingle.agents.quorum.Standing`), so that after the loss of the host the
survivors know of whom they need the majority, and it notices that loss: the connection ends, or the host is silent. A
pure machine.
"""

from __future__ import annotations

import msgspec

from mingle.agents import reports as agent_reports
from mingle.agents.heartbeat import HOST_SILENT_SECONDS
from mingle.agents.quorum import Nodes, Standing
from mingle.agents.reports import Attendance
from mingle.rank.joining import Joiner
from mingle.rank.sessions import Session
from mingle.rules import reports
from mingle.rules.machine import Identity, Means, NetworkFacts, Source
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer

MAX_BOUND_SECONDS = 3600.0
"""What JOIN can say of the time since we were bound to a host."""
TELL_HOST_SECONDS = 1.0
"""How often at most a running member tells its host of another session of the job."""


class AgentJoiner(Joiner):
    """The machine of an agent that joins.

    Args:
        nodes: how many nodes the job may have.
        control_port: where this process can be asked whether it lives.
        standing: what it knows of earlier sessions; what it learns is added.
        attendance: how many were there at most, for the report.
    """

    def __init__(
        self,
        identity: Identity,
        means: Means,
        now: float,
        *,
        nodes: Nodes,
        control_port: int,
        standing: Standing,
        attendance: Attendance,
    ) -> None:
        super().__init__(identity, means, now)
        self.lost: str | None = None
        """Why the session that had formed is no more, if the job goes on."""
        self.ended: str | None = None
        """Why its host has ended the job on purpose."""
        self.moved_to: Offer | None = None
        self._nodes = nodes
        self._control_port = control_port
        self._standing = standing
        self._attendance = attendance
        self._generation = 0
        self._heard_at = self._now = now
        self._tell_at = now
        self._blocking.patience = means.timeout
        self.membership.application = self._complete

    def _complete(self, join: frames.Join) -> frames.Join:
        standing = self._standing
        bound = standing.bound_until - self._now
        return msgspec.structs.replace(
            join,
            port=self._control_port,
            settled=standing.settled,
            proposed=standing.proposed,
            bound=bound if bound > -MAX_BOUND_SECONDS else None,
        )

    @property
    def generation(self) -> int:
        """That of the session that we are in."""
        return max(self._generation, self._said_generation())

    def _said_generation(self) -> int:
        current = self.membership.current
        name = current.name if current is not None else b""
        for view in (self._standing.proposed, self._standing.settled):
            if view is not None and view.session == name:
                return view.generation
        return current.offer.generation if current is not None else 0

    # --- what happens ----------------------------------------------------------------------------------------------

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
            self.membership.send(frames.Sighting(offer=message))

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        self._now = now
        session, proving = self._sessions.owner(conn)
        if conn == proving.winner and session is self.membership.current:
            self._heard_at = now
            if self.outcome is not None:
                self._standing.heard(now)
        super().received(conn, untrusted, now)

    def _frame(self, session: Session, frame: frames.AnyFrame, now: float) -> None:
        ours = session is self.membership.current
        if ours and isinstance(frame, frames.Members):
            self._standing.learn(frame.view, settled=frame.settled)
            return
        if ours and isinstance(frame, frames.Void) and self.outcome is None:
            self._standing.withdraw(session.name)
        if self.outcome is not None and isinstance(frame, frames.Moved):
            self.moved_to = frame.offer
            return
        if ours and isinstance(frame, frames.Status) and self.outcome is None:
            self._attendance.note(frame)
        had_formed = self.outcome is not None
        super()._frame(session, frame, now)
        if self.outcome is not None and not had_formed:
            self._go(self.outcome.session, now)

    def _go(self, session: bytes, now: float) -> None:
        self._heard_at = now
        self._standing.heard(now)
        said, known = self._said_generation(), self._standing.generation
        # A host that admits somebody from a later session raises its own, and says so in its next view.
        self._generation = said if said >= known else known + 1
        # At once: what the host says next, perhaps in the same breath, is of a later view.
        self._standing.go(session)
        # Whoever loses this host looks for any: there is no process group for which it would have to come back.
        self.ready()

    def _closed_by_host(self, session: Session, frame: frames.Closed) -> None:
        if self.outcome is None:
            if frame.regather:
                self._standing.withdraw(session.name)
                self._standing.release()
            super()._closed_by_host(session, frame)
        elif frame.regather:
            self._standing.release()
            self.lost = frame.reason or "its host gave it up"
        else:
            self.ended = frame.reason or "its host closed it"

    def _lost(self, session: Session, reason: str, now: float) -> None:
        formed = self.outcome is not None
        super()._lost(session, reason, now)
        if formed and self.ended is None and self.lost is None:
            self.lost = f"the connection to {session.host_name} is lost: {reason}"

    # --- time ------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> bool:
        return self.outcome is not None and self.membership.current is not None

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [super().next_timer()]
        if self._running:
            times.append(self._heard_at + HOST_SILENT_SECONDS)
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        super().handle_timer(now)
        current = self.membership.current
        if self._running and current is not None and now >= self._heard_at + HOST_SILENT_SECONDS:
            current.hang_up()
            self._lost(current, f"it was silent for {HOST_SILENT_SECONDS:.0f} s", now)

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        status = self.membership.status
        failure = self._blocking.failure(self._deadline)
        if failure is None and status is None and self.membership.current is None:
            failure = reports.authentication(self.identity, self.evidence, facts, secured=self._secured)
        status = status or self._attendance.best
        if failure is None and status is not None:
            failure = agent_reports.incomplete(
                self.identity, self._nodes, status, self.timeout, self._attendance, self.evidence, facts
            )
        self.failure = failure
        if failure is None:
            super().give_up(facts)
