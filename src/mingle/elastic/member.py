"""What an agent does differently as a member of a session (:mod:`mingle.protocol.member`): it stays after GO. Pure.

An agent is bound to its host by its own clock (:class:`mingle.elastic.leases.Binding`): while it is bound, it confirms
no other session. From GO on it has lost its host when the connection or the binding ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mingle.elastic import reports
from mingle.elastic.leases import BINDING_SECONDS, Memory
from mingle.elastic.quorum import Policy
from mingle.elastic.reports import Attendance
from mingle.errors import MingleError
from mingle.network.connections import CLOSED_BY_PEER
from mingle.protocol.machine import NetworkFacts
from mingle.protocol.member import HOST_SEEN_SECONDS, Joiner, MemberPolicy, Step
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer


class AgentMembership(MemberPolicy):
    """The part of one agent in one session, from the search for it to its loss.

    Args:
        policy: how many agents found and keep a session.
        memory: this agent's past.
        attendance: the largest number of agents so far, for the report.
    """

    host_silence = BINDING_SECONDS

    def __init__(self, policy: Policy, memory: Memory, attendance: Attendance) -> None:
        self.lost_because: str | None = None
        """Why the session that had formed is no more, if the job goes on."""
        self.ended_because: str | None = None
        """Why its host has ended the job on purpose."""
        self.moved_to: Offer | None = None
        """The session for which the host has stepped down."""
        self._policy = policy
        self._memory = memory
        self._attendance = attendance
        self._members: frames.Members | None = None
        self._in_doubt: tuple[bytes, int, bool] | None = None
        """The session whose GO this agent may never hear of; memory's generation and quorum before it."""
        self._report_at = float("-inf")

    def attach(self, joiner: Joiner) -> None:
        """Take note of the machine that asks this policy."""
        super().attach(joiner)
        joiner.running_check.patience = joiner.timeout

    @property
    def running(self) -> bool:
        """Whether the session has formed and its host is not lost."""
        return self.joiner.outcome is not None and self.joiner.current is not None

    def check(self, now: float) -> None:
        """Check whether the agent is still bound."""
        if self.running and not self._memory.binding.holds(now):
            self.joiner.drop_host(f"it was silent for {BINDING_SECONDS:.0f} s", now)

    def complete(self, join: frames.Join) -> frames.Join:
        """Return the application for a seat, with this agent's past."""
        memory = self._memory
        return msgspec.structs.replace(
            join, generation=memory.generation, had_quorum=memory.had_quorum, surplus=memory.surplus
        )

    def heard_while_running(self, message: Datagram, now: float) -> None:
        """Report another session of the job to the host, which may not hear the other's datagrams."""
        joiner, current = self.joiner, self.joiner.current
        if not isinstance(message, Offer) or current is None or now < self._report_at:
            return
        ours = (message.job, message.attempt) == (joiner.identity.job, joiner.identity.attempt)
        if ours and message.session != current.name and message.state == "sealed":
            self._report_at = now + HOST_SEEN_SECONDS
            joiner.send(frames.HostSeen(offer=message))

    def host_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> bool:
        """Renew the binding by a frame that the host sent; handle those that only agents get."""
        joiner, memory = self.joiner, self._memory
        formed, this_epoch = joiner.outcome is not None, getattr(frame, "epoch", None) == joiner.epoch
        sealed = isinstance(frame, frames.Sealed) and joiner.step is Step.CONFIRMED and this_epoch
        if sealed or formed or joiner.step in (Step.PROVING_STORE, Step.ACKED):
            memory.binding.renew(session.name, now)
        if isinstance(frame, frames.Members):
            self._learn(frame)
            return True
        if isinstance(frame, frames.Redirect) and formed:
            self.moved_to = frame.offer
            return True
        if isinstance(frame, frames.Void) and not formed and this_epoch:
            self._called_off(session)
        elif isinstance(frame, frames.Status) and not formed:
            self._attendance.note(frame)
        return False

    def other_said(self, running: frames.Running) -> None:
        """Take note that the agent is surplus in another session."""
        self._memory.surplus |= running.surplus

    def refused(self, frame: frames.Refused) -> frames.Refused:
        """Take note that the agent is surplus, which is to be full otherwise."""
        if frame.reason != "surplus":
            return frame
        self._memory.surplus = True
        return msgspec.structs.replace(frame, reason="full")

    def may_confirm(self, session: KnownSession, now: float) -> bool:
        """Return whether the agent is not bound to another session."""
        return not self._memory.binding.elsewhere(session.name, now)

    def acknowledged(self, session: KnownSession) -> None:
        """The host may decide GO from now on, and count this agent even if the agent never hears so."""
        members, memory = self._members, self._memory
        if members is not None:
            self._in_doubt = session.name, memory.generation, memory.had_quorum
            memory.generation = max(memory.generation, members.generation)
            memory.had_quorum |= members.quorum

    def _called_off(self, session: KnownSession) -> None:
        """The host has not decided GO."""
        self._memory.binding.release(session.name)
        if self._in_doubt is not None and self._in_doubt[0] == session.name:
            _, self._memory.generation, self._memory.had_quorum = self._in_doubt
            self._in_doubt = None

    def formed(self) -> None:
        """The session has formed."""
        self._memory.surplus = False
        if self._members is not None:
            self._learn(self._members)
        # An agent that loses its host can join any other one; unlike a rank it has no process group to return to.
        self.joiner.ready()

    def _learn(self, members: frames.Members) -> None:
        """Take note of the members; before the session has formed, the list has no meaning."""
        self._members = members
        if self.joiner.outcome is not None:
            memory = self._memory
            memory.generation, memory.companions = members.generation, members.present
            memory.had_quorum |= members.quorum

    def closed(self, session: KnownSession, frame: frames.Closed) -> None:
        """The host gives up its session, or ends the job: it holds nothing any more."""
        self._memory.binding.release(session.name)
        if self.joiner.outcome is not None and frame.regather:
            self.lost_because = frame.reason or "its host gave it up"
        elif self.joiner.outcome is not None:
            self.ended_because = frame.reason or "its host closed it"

    def lost(self, session: KnownSession, reason: str) -> None:
        """The connection to the host has ended."""
        if reason == CLOSED_BY_PEER:
            # A firewall does not forge an orderly close (FIN), so the host's process has ended and holds nothing.
            self._memory.binding.release(session.name)
        if self.joiner.outcome is not None and self.ended_because is None and self.lost_because is None:
            self.lost_because = f"the connection to {session.host_name} is lost: {reason}"

    def timers(self, now: float) -> Sequence[float]:
        """Return when the binding ends, if anything follows from that."""
        binding = self._memory.binding
        waits = self.running or (self.joiner.can_confirm and binding.holds(now))
        return [binding.until] if waits else []

    def timeout(self, facts: NetworkFacts) -> MingleError:
        """Return the error of an agent whose time is up."""
        joiner = self.joiner
        status = joiner.status or self._attendance.best
        if status is None:
            return super().timeout(facts)
        return reports.incomplete(
            joiner.identity,
            self._policy,
            self._memory,
            status,
            joiner.timeout,
            self._attendance,
            joiner.diagnostics,
            facts,
        )
