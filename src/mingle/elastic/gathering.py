"""One agent's place among the agents of its job: the interface that the torchrun backend uses.

An agent is the process that starts a node's workers (torchrun). Agents find each other like ranks without a number,
and one of them hosts the store. Their job, unlike a job of ranks, survives the loss of its host: the others gather
anew.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mingle.config.settings import Settings
from mingle.elastic import reports as elastic_reports
from mingle.elastic.agent import Agent, JobEnd
from mingle.elastic.leases import Hold
from mingle.elastic.quorum import Policy
from mingle.engine.party import FILES_PER_NODE, Party
from mingle.errors import MingleError
from mingle.network.transport import NothingOpenedError
from mingle.protocol.effects import CloseStore
from mingle.protocol.machine import Context, Formation
from mingle.records import logger
from mingle.wire.frames import Begin, ProcessInfo, Unit

ASK_SECONDS = 1.0
"""How often this agent asks whether the session stands, until torchrun gets its round."""
REMARK_SECONDS = 5.0
"""After so long without a round people are told what is waited for."""
ROUND_WAIT_SECONDS = 0.1
"""How often it looks whether the round is given up meanwhile."""


def boot_time() -> float:
    """Return the seconds since boot, including the time in which the machine was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A session that this agent is in.

    Attributes:
        formation: its name, its store, and how the others reach this agent.
        generation: its number, higher than that of any earlier session of its founders. It is a time in seconds since
            1970, or slightly more, so that it is also higher after a restart of all agents.
        small: whether it began with few agents, after a last call.
    """

    formation: Formation
    generation: int
    small: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """What the loop publishes of its agent, replaced as a whole.

    Attributes:
        gathered: the session that the agent is in; None: it is in none.
        round: the round of that session that the agent is in; None: it is in none, or waits for the next one.
        round_wanted: whether another round has to follow that one.
        round_over: whether this agent is the host, and the agents of the round that are done wait for others in vain.
        ending: whether an agent has ended the job for all, after which no round begins.
        present: the agents of the session, the first of them if they are many.
        hold: how firmly the agent knows that its session is the only one.
        lost: why the session that :meth:`Gathering.gather` returned was lost, in words; None while it exists.
        ended: why the host has ended the job on purpose, in words; None: it has not.
        failure: the error that has ended the last attempt to gather.
    """

    gathered: Gathered | None = None
    round: Begin | None = None
    round_wanted: bool = False
    round_over: bool = False
    ending: bool = False
    present: tuple[ProcessInfo, ...] = ()
    hold: Hold = field(default_factory=Hold)
    lost: str | None = None
    ended: str | None = None
    failure: MingleError | None = None


class Gathering(Party):
    """One agent's place among the agents of its job, across generations. Thread-safe.

    Nothing is sent before the first :meth:`gather`. From then on the loop drives the agent's machine, to the end of its
    part in the job. After a loss this agent looks for the next session by itself; :meth:`gather` waits for it.

    Args:
        settings: how to discover; the job's id, attempt and secret.
        policy: how many nodes the job may have, and how many found and keep a session; the same on all of them.
    """

    name = "mingle-agent"
    unit: Unit = "node"
    files_per_member = FILES_PER_NODE
    _machine: Agent

    def __init__(self, settings: Settings, policy: Policy) -> None:
        super().__init__(settings, minimum=policy.nodes.minimum, clock=boot_time)
        self.session_lost = threading.Event()
        """Set whenever ``state`` says ``lost`` or ``ended``; cleared by :meth:`gather`."""
        self._policy = policy
        self.state = AgentState()
        self._losses = 0

    # --- what the caller does --------------------------------------------------------------------------------------

    def gather(self) -> Gathered:
        """Block until this agent is in a session whose store is open; a signal handler can raise out of it.

        Raises:
            DiscoveryTimeoutError: it did not come to that in time; names how many nodes were there, and which.
            ConflictError: the other nodes were started with other numbers, or are no agents.
            InterfaceError: no interface can be used.
            MingleError: the job has ended, this gathering is closed, or no file descriptor is free.
        """
        if self._stopping or os.getpid() != self._pid:
            raise elastic_reports.closed_here(self.identity)
        if self._thread is None:
            self.start()
        return self._await(self._outcome, self._begin)

    def _begin(self) -> None:
        self.session_lost.clear()
        self._time_is_up = False
        self.state = replace(self.state, lost=None)
        self._machine.gather(self.clock())
        self._publish()

    def _outcome(self) -> Gathered | None:
        state = self.state
        if self._stopping:
            raise elastic_reports.closed_here(self.identity)
        if state.gathered is None and state.failure is not None:
            raise state.failure.copied()
        if state.gathered is None and (state.ended is not None or state.ending):
            raise elastic_reports.ended(self.identity, state.ended or "one of its agents has ended it")
        return state.gathered

    def next_round(
        self, first: tuple[int, int], seconds: float, remark: Callable[[], object] = lambda: None
    ) -> Begin | None:
        """Say that the workers are stopped, and block until a round begins; a signal handler can raise out of it.

        Args:
            first: the generation and the number of the first round that torchrun got; -1 each: it got none.
            seconds: for how long to wait.
            remark: called once, if that takes long.

        Returns:
            The round. None if the session is lost, or the job has ended.

        Raises:
            TimeoutError: no round began in time.
            MingleError: this gathering is closed, or its loop has failed.
        """

        def say_next() -> None:
            if self.state.lost is None:  # else the machine can be in the next session, which `gather` has not returned
                self._machine.next_round(first, self.clock())
                self._publish()

        self.ask(say_next, patient=True)
        remark_at = self.clock() + REMARK_SECONDS
        deadline = self.clock() + seconds
        while not (self._stopping or self.session_lost.is_set() or self.state.ending):
            if (begun := self.state.round) is not None:
                return begun
            if (now := self.clock()) >= deadline:
                raise TimeoutError
            if now >= remark_at:
                remark_at = float("inf")
                remark()
            self.wait(min(deadline, remark_at))
        return None

    def await_round(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Block until torchrun can get the round that has begun; a signal handler can raise out of it.

        Return to torchrun at once afterwards: what this agent knows of the others is outdated within 2 s.

        Args:
            is_over: whether the round is given up.
            seconds: for how long to wait.

        Returns:
            Whether it can: False if the session is lost, the job has ended, or the round is given up.
        """
        made, asked_at, deadline = boot_time(), float("-inf"), time.monotonic() + seconds
        while not (self._stopping or self.session_lost.is_set() or is_over() or time.monotonic() > deadline):
            state, now = self.state, boot_time()
            if state.lost is None and state.hold.allows(made, now):
                return True
            if now >= asked_at + ASK_SECONDS:
                asked_at = now
                self.call(lambda: self._machine.ask_round(self.clock()))
            self.wait(self.clock() + ROUND_WAIT_SECONDS)
        return False

    def workers_done(self) -> None:
        """Note that this node's workers are done: from now on a loss starts no election and no gathering."""
        if self._thread is not None:
            self.call(lambda: self._machine.stop_electing(self.clock()))

    # --- the loop --------------------------------------------------------------------------------------------------

    def _make_machine(self, context: Context) -> Agent:
        endpoints = self._listen()
        return Agent(self.identity, endpoints, context, self.clock(), policy=self._policy, wall_clock=time.time)

    def _turn(self) -> None:
        super()._turn()
        if self.stores.server is not None:
            # A client of this session's store can still hold the port in the next session.
            self.stores.port = None
        if self._machine.finished and self._machine.host is None:
            self.stores.release()  # that of a session that this agent has given up
        self._publish()

    def _fail(self) -> None:
        self.stores.close()
        self._end_store()

    def _ended(self, error: BaseException | None) -> None:
        self._publish()
        if error is not None and not isinstance(error, MingleError | NothingOpenedError):
            self.say(logging.ERROR, str(self.failure), error)

    def _close_store(self, effect: CloseStore) -> None:
        logger.debug("job %s: the store is closed: %s", self.settings.job_id, effect.reason)
        self._end_store()

    def _end_store(self) -> None:
        self.stores.abort()
        self.stores.release()

    def say(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Show a message to people while a caller waits or this agent is in a session, and failures at any time.

        The loss of the session is for the caller, which says what follows.
        """
        warns = level >= logging.WARNING and self.state.gathered is not None and self._machine.outcome is not None
        if self._progress is not None or error is not None or warns:
            super().say(level, text, error)
        else:
            logger.log(level, "%s", text)

    # --- what callers read -----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self.state = state = self._present_state()
        if state.lost is not None or state.ended is not None:
            self.session_lost.set()
        self._notify()

    def _present_state(self) -> AgentState:
        before = self.state
        if self.failure is not None:
            # The machine's state is void after the failure, and no other session follows.
            return AgentState(lost=self.failure.observation, ended=before.ended)
        agent = self._machine
        lost, outcome, gathered = before.lost, agent.outcome, before.gathered
        if agent.losses > self._losses:
            self._losses, lost = agent.losses, agent.lost
        if outcome is None:
            gathered = None
        elif gathered is None or gathered.formation.session != outcome.session:
            small = agent.members is not None and not agent.members.quorum
            gathered = Gathered(outcome, agent.generation, small)
        return AgentState(
            gathered=gathered,
            round=agent.memory.round,
            round_wanted=agent.memory.round_wanted,
            round_over=agent.round_over,
            ending=agent.job_end is JobEnd.ANNOUNCED,
            present=() if agent.members is None else agent.members.present,
            hold=agent.hold,
            lost=lost,
            ended=agent.ended,
            failure=agent.failure,
        )
