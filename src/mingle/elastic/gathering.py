"""One agent's place among the agents of its job: what the torchrun back-end uses.

An agent is the process that starts a node's workers (torchrun). Agents find each other like ranks without a number,
and one of them hosts the store. Unlike a job of ranks theirs goes on when the host is lost: the survivors gather anew.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
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
        self.disturbed = threading.Event()
        """Set whenever ``lost`` or ``ended`` becomes set; cleared by :meth:`gather`."""
        self._settings = settings
        self._policy = Policy(nodes=nodes, last_call=last_call, allow_minority=allow_minority)
        self._identity = process_identity(settings, minimum=nodes.minimum)
        self._pid = os.getpid()
        self._loop: AgentLoop | None = None
        self._lock = forksafe.register_lock(threading.Condition())
        self._gathered: Gathered | None = None
        self._store: Any | None = None
        self._present: frozenset[bytes] | None = None
        self._lost: str | None = None
        self._ended: str | None = None
        self._failure: MingleError | None = None
        self._held_until = float("-inf")
        self._ending = False
        self._losses = 0
        self._closed = False

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def store(self) -> Any | None:
        """The ``TCPStore`` on the host: the server, whose port is never let go of. None elsewhere."""
        with self._lock:
            return self._store

    @property
    def member(self) -> bytes:
        """This agent's own member id, the same in all its sessions."""
        return self._identity.member

    @property
    def present(self) -> frozenset[bytes] | None:
        """On the host, the member ids of all that are in the session now, its own included; None elsewhere."""
        with self._lock:
            return self._present

    @property
    def held(self) -> bool:
        """Return whether this agent can complete a round now: its lease must be valid at this moment."""
        with self._lock:
            return self._gathered is not None and boot_time() < self._held_until

    @property
    def ending(self) -> bool:
        """On the host: whether an agent has ended the job for all, after which no round begins."""
        with self._lock:
            return self._ending

    @property
    def lost(self) -> str | None:
        """Why the session that :meth:`gather` returned is no more, in words; None while it is."""
        with self._lock:
            return self._lost

    @property
    def ended(self) -> str | None:
        """Why the host has ended the job on purpose, in words; None: it has not."""
        with self._lock:
            return self._ended

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
                self._lost = self._failure = None
                self.disturbed.clear()
            loop.agent.gather(boot_time())
            self._publish()
            began.set()

        loop.driver.call(begin, lambda _: began.set())
        while not began.wait(1.0) and loop.alive:
            pass
        if loop.driver.failure is not None:
            raise loop.driver.failure.copied()
        with self._lock:
            while self._gathered is None and self._ended is None and self._failure is None and not self._closed:
                self._lock.wait()
            if self._gathered is not None and not self._closed:
                return self._gathered
            if self._failure is not None:
                raise self._failure.copied()
            raise elastic_reports.ended(self._identity, self._ended or "this agent has closed its part in it")

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
            self._gathered = self._store = self._present = None
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
        agent = loop.agent
        with self._lock:
            if self._closed:
                return
            if loop.driver.failure is not None:
                # The machine's state is void after the failure, and no other session follows.
                self._failure, self._lost = loop.driver.failure, loop.driver.failure.observation
                self._gathered = self._store = self._present = None
                self.disturbed.set()
                self._lock.notify_all()
                return
            outcome = agent.outcome
            if agent.losses > self._losses:
                self._losses, self._lost = agent.losses, agent.lost
                self.disturbed.set()
            if agent.ended is not None and self._ended is None:
                self._ended = agent.ended
                self.disturbed.set()
            self._failure = agent.failure
            self._held_until = agent.held_until
            hosting = agent.part if isinstance(agent.part, ElasticHost) and outcome is not None else None
            self._present = None if hosting is None else frozenset(hosting.registrar.seats)
            self._ending = hosting is not None and hosting.quorum.ending
            if outcome is None:
                self._gathered = self._store = None
            elif self._gathered is None or self._gathered.session != outcome.session:
                server = loop.stores.server
                self._store = server.handle if hosting is not None and server is not None else None
                self._gathered = Gathered(
                    session=outcome.session,
                    generation=max(agent.memory.generation, 0),
                    is_host=hosting is not None,
                    store_address=outcome.store_address,
                    store_port=outcome.store_port,
                    interface=outcome.interface,
                    address=outcome.address,
                )
            self._lock.notify_all()
