"""An agent that looks for a session or is a member of one (:mod:`mingle.protocol.member`), also after GO. Pure.

An agent is bound to its host by its own clock (:class:`mingle.elastic.leases.Binding`): while it is bound, it confirms
no other session. From GO on it has lost its host when the connection or the binding ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec import structs

from mingle.elastic import reports
from mingle.elastic.leases import BINDING_SECONDS, Hold, is_fresh
from mingle.elastic.memory import Memory, SessionEnd
from mingle.elastic.quorum import LEFT_OUT_REMEMBERED
from mingle.network.connections import CLOSED_BY_PEER
from mingle.protocol.effects import Notice
from mingle.protocol.events import Source, StoreProved
from mingle.protocol.explain.observations import Diagnostics, Situation
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.member import HOST_SEEN_SECONDS, LEFT_OUT_SECONDS, Joiner, Joining
from mingle.protocol.participant import AwaitingGo, AwaitingSeal, ProvingStore
from mingle.protocol.sessions import KnownSession
from mingle.protocol.sightings import Sightings
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer

LATE_SECONDS = 1.0
"""By how much the timer of a running process can be late. One that is later was stopped, or its machine suspended."""


class ElasticMember(Joiner):
    """The role of an agent in one session, from the search for it to its loss.

    Args:
        memory: what this agent knows across its sessions.
    """

    host_silence = BINDING_SECONDS

    def __init__(
        self,
        identity: Identity,
        context: Context,
        now: float,
        *,
        endpoints: Callable[[], Endpoints | None],
        deadline: float,
        diagnostics: Diagnostics,
        sightings: Sightings,
        memory: Memory,
    ) -> None:
        self.end: SessionEnd | None = None
        """How the session has ended, once it had formed."""
        self._memory = memory
        self.members: frames.Members | None = None
        """The agents of its session, as its host has said last; without meaning before the session has formed."""
        self.proved_at = float("-inf")
        """When the last question about a round was asked that the host has answered."""
        self._rounds_asked: dict[int, float] = {}
        """When each question about a round was asked, by its number."""
        self._last_number = 0
        self._left_out: deque[str] = deque(maxlen=LEFT_OUT_REMEMBERED)
        """The nodes that got no seat, as its host has said."""
        self._left_out_until: float | None = None
        """Until when this agent founds no session itself, since it is left out of one."""
        self._report_at = float("-inf")
        self._checked_at = now
        super().__init__(
            identity,
            context,
            now,
            endpoints=endpoints,
            deadline=deadline,
            diagnostics=diagnostics,
            sightings=sightings,
        )

    @property
    def running(self) -> bool:
        """Whether the session has formed and its host is not lost."""
        return self.membership is not None and self.membership.connected

    @property
    def hold(self) -> Hold:
        """How firmly this agent knows that its session is the only one."""
        return Hold(self._memory.binding.until, self.proved_at)

    def check(self, now: float) -> None:
        """Check whether the agent is still bound. Every event does this first."""
        self._checked_at = now
        if self.running and not self._memory.binding.holds(now):
            late = now - self._memory.binding.until  # a timer is due at the end of the binding
            stood_still = f"this process stood still for {late:.0f} s or more, and its lease has ended"
            self.drop_host(stood_still if late > LATE_SECONDS else f"it was silent for {BINDING_SECONDS:.0f} s", now)

    def next_timer(self) -> float | None:
        """The time of the next `TimerDue`: also the end of the binding, if it matters."""
        due, binding = super().next_timer(), self._memory.binding
        if self._left_out_until is not None and not self.finished:
            due = self._left_out_until if due is None else min(due, self._left_out_until)
        if not (self.running or (self.part is not None and self.part.can_confirm and binding.holds(self._checked_at))):
            return due
        return binding.until if due is None else min(due, binding.until)

    def explained(self, situation: Situation) -> Situation:
        """Return the node's situation with what explains why this agent waits."""
        away = self.session is None
        surplus = away and self.is_surplus and not self.sightings.may_run()
        return structs.replace(
            super().explained(situation), agents=self._memory.told(self.identity.who, away=away, surplus=surplus)
        )

    # --- what is heard ---------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Handle a valid datagram; report other sessions of the job to the host, which may not hear them."""
        current = self.session
        if current is None and self.is_surplus and isinstance(message, Offer) and message.state == "open":
            return  # it has no seat for this agent before it has formed
        if self.outcome is None:
            super().heard(message, source, now)
        elif isinstance(message, Offer) and current is not None and now >= self._report_at:
            ours = (message.job, message.attempt) == (self.identity.job, self.identity.attempt)
            if ours and message.session != current.name and message.state == "sealed":
                self._report_at = now + HOST_SEEN_SECONDS
                current.send(frames.HostSeen(offer=message))

    def host_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of the host: renew the binding, and handle those that only agents get."""
        formed, memory = self.outcome is not None, self._memory
        self._renew(session, frame, now)
        match frame:
            case frames.Members():
                self._learn(frame)
                return
            case frames.Begin() | frames.Wanted() if formed:
                memory.hear_of_round(frame)
                return
            case frames.RoundHeld() if formed:
                self.proved_at = max(self.proved_at, self._rounds_asked.pop(frame.number, float("-inf")))
                return
            case frames.Void() if self.part is not None and frame.epoch == self.part.epoch:
                memory.called_off(session.name)
            case frames.Status() if not formed:
                memory.note_status(frame)
            case frames.Closed():
                self._released(session, frame)
            case frames.Refused(reason="surplus"):
                memory.refused_as_surplus(session.name, frame.detail)
                frame = structs.replace(frame, reason="full")
            case frames.Refused(reason="mesh"):
                self._is_left_out(frame, now)
        super().host_said(session, frame, now)

    def _renew(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Renew the binding: from SEALED on, every frame of the host does."""
        state = None if self.part is None else self.part.state
        sealed = isinstance(state, AwaitingSeal) and isinstance(frame, frames.Sealed) and frame.epoch == state.epoch
        if sealed or isinstance(state, ProvingStore | AwaitingGo) or self.outcome is not None:
            self._memory.binding.renew(session.name, now)

    def _is_left_out(self, refusal: frames.Refused, now: float) -> None:
        """Say why this agent gets no seat; it does not compete with the session that goes on without it."""
        self._left_out_until = now + LEFT_OUT_SECONDS
        if self._memory.refused_for_its_paths(refusal):
            self._effects.append(Notice(reports.left_out(self.identity, self._memory.policy.nodes, refusal)))

    def stand_back(self, refusal: frames.Refused, now: float) -> None:
        """Look for a host again, and be none for a while, since this agent, as the host, can't reach others."""
        super().stand_back(refusal, now)
        self._is_left_out(refusal, now)

    @property
    def may_host(self) -> bool:
        """Whether this agent can be the host: not while it is left out or surplus, since others form the session."""
        return self._left_out_until is None and not self.is_surplus

    @property
    def is_surplus(self) -> bool:
        """Whether this agent counts for no founding, so that it leaves the seats of a gathering to others."""
        return self._memory.surplus

    def _gather(self, now: float) -> None:
        if self._left_out_until is not None and now >= self._left_out_until:
            self._left_out_until = None
        super()._gather(now)

    def _mesh_session(self) -> KnownSession | None:
        """The session whose mesh this agent is part of: latecomers dial the members of one that runs, too."""
        return self.session

    # --- the steps -------------------------------------------------------------------------------------------------

    def _application(self, session: KnownSession, now: float) -> frames.Join:
        memory = self._memory
        name, token = memory.seat
        if name == session.name:
            session.token = token  # of a seat that this agent had before it lost the session and heard of it again
        join = super()._application(session, now)
        return structs.replace(
            join,
            generation=memory.generation,
            clock=memory.clock,
            had_quorum=memory.had_quorum,
            surplus=self.is_surplus,
            rounds=True,
            age=min(max(0.0, now - memory.began_at), frames.MAX_SECONDS),
        )

    def _joined(self, state: Joining, frame: frames.Joined) -> None:
        super()._joined(state, frame)
        self._memory.take_seat(state.link.session.name, frame.token)

    def _may_confirm(self, session: KnownSession, now: float) -> bool:
        self._checked_at = now  # until GO no event calls `check`
        return super()._may_confirm(session, now) and not self._memory.binding.elsewhere(session.name, now)

    def store_proved(self, event: StoreProved) -> bool:
        """Vote for GO: from now on the host may decide it, even if this agent never hears of it."""
        voted = super().store_proved(event)
        if voted and self.members is not None:
            self._memory.acknowledge(event.session, self.members)
        return voted

    def _go(self, session: KnownSession, sealed: frames.Sealed) -> None:
        super()._go(session, sealed)
        self._memory.formed(hosts=False)
        if self.members is not None:
            self._learn(self.members)
        # An agent that loses its host can join any other one; unlike a rank it has no process group to return to.
        assert self.membership is not None
        self.membership.ready()

    def _learn(self, members: frames.Members) -> None:
        """Take note of the members."""
        self.members = members
        news = [text for text in members.left_out if text not in self._left_out]
        self._left_out.extend(news)
        self._effects += [Notice(f"job {self.identity.job!r}: {text}") for text in news]
        if self.outcome is not None and (lost := self._memory.learn(members)):
            self._effects.append(Notice(reports.nodes_lost(self.identity, self._memory.policy, members, lost)))

    # --- rounds ----------------------------------------------------------------------------------------------------

    def say_of_round(self, frame: frames.Next | frames.Done, now: float) -> None:
        """Tell the host that this agent waits for a round, or needs no other one."""
        if self.membership is not None:
            self.membership.send(frame)

    def ask_round(self, now: float) -> None:
        """Ask the host whether the session still stands, since a round has begun."""
        if self.running:
            self._last_number += 1
            # An answer to an older question comes too late.
            asked = {number: at for number, at in self._rounds_asked.items() if is_fresh(at, now)}
            self._rounds_asked = {**asked, self._last_number: now}
            assert self.membership is not None
            self.membership.send(frames.Round(number=self._last_number))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _released(self, session: KnownSession, frame: frames.Closed) -> None:
        """Handle CLOSED: the host gives up its session or ends the job, and so releases this agent."""
        if self.outcome is None:
            self._memory.called_off(session.name)
        elif frame.regather:
            self.end = SessionEnd(frame.reason or "its host gave it up", moved_to=frame.offer)
        else:
            self.end = SessionEnd(frame.reason or "its host closed it", of_job=True)
        self._memory.binding.release(session.name)

    def host_lost(self, session: KnownSession, reason: str, now: float) -> None:
        """Handle the end of the connection to the host."""
        if self.is_freed_by(reason):
            self._memory.binding.release(session.name)
        self._memory.lose_host(session.offer.hostname, session.offer.pid)
        super().host_lost(session, reason, now)
        if self.outcome is not None and self.end is None:
            self.end = SessionEnd(f"the connection to {session.host_name} is lost: {reason}")

    def is_freed_by(self, reason: str) -> bool:
        """Return whether the host certainly no longer counts this agent, since its connection ended for this reason.

        A firewall does not forge an orderly close (FIN): the host's process has ended, or the host has dropped this
        agent. Before JOINED it may not know which agent called, and count an earlier connection.
        """
        return reason == CLOSED_BY_PEER and not isinstance(self.state, Joining)
