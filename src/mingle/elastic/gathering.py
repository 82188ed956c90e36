"""One agent's place among the agents of its job: what the torchrun back-end uses.

An agent is the process that starts a node's workers (torchrun). Agents find each other like ranks without a number,
and one of them hosts the store. Unlike a job of ranks theirs goes on when the host is lost: the survivors gather anew.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Any

from mingle import forksafe
from mingle.config.settings import Settings
from mingle.elastic import reports as elastic_reports
from mingle.elastic.host import ElasticHost
from mingle.elastic.loop import AgentLoop, boot_time
from mingle.elastic.quorum import Nodes, Policy
from mingle.engine.discovery import process_identity
from mingle.errors import MingleError

__all__ = ["Gathered", "Gathering", "Nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A session that this agent is in.

    Attributes:
        session: its name, sixteen bytes.
        generation: its number, higher than that of any earlier session of its founders.
        is_host: whether this agent holds the store.
        store_address: where the store listens.
        store_port: its TCP port.
        interface: the name of the interface by which the others reach this agent.
        address: this agent's address there.
    """

    session: bytes
    generation: int
    is_host: bool
    store_address: str
    store_port: int
    interface: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What callers read of the loop's agent: replaced as a whole, so that reading it takes no lock."""

    gathered: Gathered | None = None
    store: Any | None = None
    present: frozenset[bytes] | None = None
    ending: bool = False
    held_until: float = float("-inf")
    lost: str | None = None
    ended: str | None = None
    failure: MingleError | None = None


class Gathering:
    """One agent's place among the agents of its job, across generations. Thread-safe.

    Nothing is sent before the first :meth:`gather`. After a loss this agent looks for the next session by itself;
    :meth:`gather` waits for it.

    Args:
        settings: how to discover; the job's id, attempt and secret.
        nodes: how many nodes the job may have, the same on all of them.
        last_call: how long a gathering below its quorum waits for another agent before it can start small, in seconds.
        allow_minority: whether MIN agents always continue, although another part of the job can continue as well.
    """

    def __init__(self, settings: Settings, nodes: Nodes, *, last_call: float, allow_minority: bool = False) -> None:
        self.session_lost = threading.Event()
        """Set whenever ``lost`` or ``ended`` becomes set; cleared by :meth:`gather`."""
        self._settings = settings
        self._policy = Policy(nodes=nodes, last_call=last_call, allow_minority=allow_minority)
        self._identity = process_identity(settings, minimum=nodes.minimum)
        self._pid = os.getpid()
        self._loop: AgentLoop | None = None
        self._lock = forksafe.register_lock(threading.Condition())
        self._state = _State()
        self._losses = 0
        self._closed = False

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def store(self) -> Any | None:
        """The ``TCPStore`` on the host: the server, whose port is never let go of. None elsewhere."""
        return self._state.store

    @property
    def member(self) -> bytes:
        """This agent's own member id, the same in all its sessions."""
        return self._identity.member

    @property
    def present(self) -> frozenset[bytes] | None:
        """On the host, the member ids of all that are in the session now, its own included; None elsewhere."""
        return self._state.present

    @property
    def held(self) -> bool:
        """Return whether this agent can complete a round now: its lease must be valid at this moment."""
        state = self._state
        return state.gathered is not None and boot_time() < state.held_until

    @property
    def ending(self) -> bool:
        """On the host: whether an agent has ended the job for all, after which no round begins."""
        return self._state.ending

    @property
    def lost(self) -> str | None:
        """Why the session that :meth:`gather` returned is no more, in words; None while it is."""
        return self._state.lost

    @property
    def ended(self) -> str | None:
        """Why the host has ended the job on purpose, in words; None: it has not."""
        return self._state.ended

    # --- what the caller does --------------------------------------------------------------------------------------

    def gather(self) -> Gathered:
        """Block until this agent is in a session whose store is open; a signal handler can raise out of it.

        Raises:
            DiscoveryTimeoutError: it did not come to that in time; names how many nodes were there, and which.
            ConflictError: the other nodes were started with other numbers, or are no agents.
            MingleError: the job has ended, or this gathering is closed.
        """
        loop = self._running_loop()
        began = threading.Event()

        def begin() -> None:
            with self._lock:
                self._state = replace(self._state, lost=None, failure=None)
                self.session_lost.clear()
            loop.agent.gather(boot_time())
            self._publish()
            began.set()

        loop.driver.call(begin, lambda _: began.set())
        while not began.wait(1.0) and loop.alive:
            pass
        if loop.driver.failure is not None:
            raise loop.driver.failure.copied()
        with self._lock:
            while not self._closed:
                state = self._state
                if state.gathered is not None:
                    return state.gathered
                if state.failure is not None:
                    raise state.failure.copied()
                if state.ended is not None:
                    raise elastic_reports.ended(self._identity, state.ended)
                self._lock.wait()
        raise elastic_reports.ended(self._identity, "this agent has closed its part in it")

    def workers_done(self) -> None:
        """Note that this node's workers are done: from now on a loss starts no election and no gathering."""
        with self._lock:
            loop = self._loop
        if loop is not None:
            loop.driver.call(loop.agent.stop_electing)

    def close(self, reason: str) -> None:
        """End this agent's part in the job on purpose: the others hear the reason and do not count it as lost.

        Where it hosts the session, the job has ended for all. Returns when every socket and thread is gone; a second
        call does nothing, and neither does one in a fork.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            self._state = replace(self._state, gathered=None, store=None, present=None)
            self._lock.notify_all()
        if loop is not None:
            loop.stop(reason)

    # --- the loop --------------------------------------------------------------------------------------------------

    def _running_loop(self) -> AgentLoop:
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                raise elastic_reports.ended(self._identity, "this agent has closed its part in it")
            if self._loop is None:
                self._loop = AgentLoop(self._settings, self._identity, self._policy, changed=self._publish)
            return self._loop

    def _publish(self) -> None:
        """Update what callers read. This runs in the loop's thread."""
        loop = self._loop
        if loop is None:
            return
        state = self._present_state(loop)
        with self._lock:
            if self._closed:
                return
            self._state = state
            if state.lost is not None or state.ended is not None:
                self.session_lost.set()
            self._lock.notify_all()

    def _present_state(self, loop: AgentLoop) -> _State:
        agent, before, failure = loop.agent, self._state, loop.driver.failure
        if failure is not None:
            # The machine's state is void after the failure, and no other session follows.
            return _State(lost=failure.observation, ended=before.ended, failure=failure)
        lost, outcome, gathered, handle = before.lost, agent.outcome, before.gathered, before.store
        if agent.losses > self._losses:
            self._losses, lost = agent.losses, agent.lost
        hosting = agent.part if isinstance(agent.part, ElasticHost) and outcome is not None else None
        if outcome is None:
            gathered = handle = None
        elif gathered is None or gathered.session != outcome.session:
            server = loop.stores.server
            handle = server.handle if hosting is not None and server is not None else None
            gathered = Gathered(
                session=outcome.session,
                generation=max(agent.memory.generation, 0),
                is_host=hosting is not None,
                store_address=outcome.store_address,
                store_port=outcome.store_port,
                interface=outcome.interface,
                address=outcome.address,
            )
        return _State(
            gathered=gathered,
            store=handle,
            present=None if hosting is None else frozenset(hosting.registrar.seats),
            ending=hosting is not None and hosting.quorum.ending,
            held_until=agent.held_until,
            lost=lost,
            ended=agent.ended,
            failure=agent.failure,
        )
