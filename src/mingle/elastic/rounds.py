"""The rendezvous of one session: torch's c10d rendezvous on the store of a gathering, and a monitor beside it.

Elastic sizes, restarts and heartbeats are torch's own. This module adds a store of its own for the workers of each
round, writes that return as soon as a round is complete, and a monitor that sees waiting nodes and marks dead ones.

An agent has two connections to the store. The heartbeat client carries the state of the rendezvous in short calls. The
agent client also carries calls that wait. A client that is blocked in ``wait()`` holds its connection, so with one
connection an agent in torchrun's exit barrier would send no heartbeat and count as dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _RendezvousStateHolder,
    create_handler,
)

from mingle import detached
from mingle.config.order import asks
from mingle.detached import AbandonedError
from mingle.engine import progress, store
from mingle.errors import MingleError
from mingle.protocol.machine import scoped
from mingle.text import few

if TYPE_CHECKING:
    from mingle.elastic.gathering import Gathered, Gathering
    from mingle.elastic.settings import AgentSettings

logger = logging.getLogger("mingle")

BACKEND = "mingle"
"""The name of the backend, which torch's registry compares with ``--rdzv-backend``."""
LOSS_SECONDS = 15.0
"""How long the store may fail before that is an error; the gathering notices a lost host within 10 s."""

LINGER_SECONDS = 1.0
"""How long a write waits for the other nodes: as long as torch would sleep."""
POLL_SECONDS = 0.02
POLL_SECONDS_PER_NODE = 0.0005
"""The interval of reads meanwhile. Each node reads the state of all, so the bytes grow with the square of the nodes."""

MONITOR_SECONDS = 1.0
"""The interval at which the monitor reads the state: the one at which torch reads it."""
MISSED_LOOKS = 2
"""After so many looks in a row without a node it is dead; a node that lost its connection can return at once."""
LONG_PAST = datetime.min.replace(tzinfo=timezone.utc)
"""The heartbeat of a dead node. A machine without a battery can believe that it is 1970."""
NEVER_SECONDS = 10**9
"""After so long without a heartbeat torch itself counts a node as dead: never. Its clock says nothing about a node that
answers its host, while its heartbeat waits for a slow store."""
FIRST_CALL_SECONDS = 0.5
"""Torch's last call in the first round of a session that began after one. The members come within moments, and a write
already waits for them for `LINGER_SECONDS`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Since:
    """The first round that an agent was in.

    Attributes:
        generation: the number of its session.
        number: torch's number of the round in that session.
    """

    generation: int
    number: int


class Rounds:
    """The rendezvous of one session, from its first round to its last.

    The methods other than `nodes_waiting`, `begun` and `end` can block; call them through `mingle.detached`.

    Args:
        wanted: what the user asked for.
        gathering: this agent's place among the agents.
        gathered: the session.
        order: this node's place in the order of nodes.
        since: the first round that this agent was in; None: it was in none.

    Attributes:
        number: torch's number of the present round.
        since: the first round that this agent was in.
    """

    def __init__(
        self,
        wanted: AgentSettings,
        gathering: Gathering,
        gathered: Gathered,
        *,
        order: bytes = b"",
        since: Since | None = None,
    ) -> None:
        self.number = 0
        self.since = since
        self._wanted = wanted
        self._gathering = gathering
        self._gathered = gathered
        self._formation = gathered.formation
        self._order = order
        self._doubts = ""
        self._ended = threading.Event()
        self._opened: tuple[DynamicRendezvousHandler, Monitor] | None = None
        self._failed = False
        """Whether the last call of `next` failed: its connections can be broken, and torch opens no others."""
        self._server: store.StoreServer | None = None

    @property
    def closed(self) -> bool:
        """Whether an agent has ended the job for good, as far as the monitor has seen."""
        return self._opened is not None and self._opened[1].closed

    def next(self) -> RendezvousInfo:
        """Join the next round; torch's rendezvous errors pass through.

        Raises:
            RuntimeError: the store failed, or agent 0 was lost before it published the workers' store.
            RendezvousConnectionError: the store can't be reached.
        """
        inner, monitor = self._opened = self._opened or self._open()
        monitor.leave_round()
        self._server = None  # the previous round's
        if self._failed:
            self._reconnect(inner, monitor)
        self._failed = True
        joined = inner.next_rendezvous()
        # Torch has written an address of its own under the round's prefix, where ours would race with it.
        place = PrefixStore(BACKEND, joined.store)
        interface = self._formation.interface
        own = scoped(self._formation.address, interface)
        if joined.rank == 0:
            self._server = open_for_workers(own, self._wanted.local_addr)
        bootstrap = RendezvousStoreInfo.build(
            joined.rank,
            place,
            local_addr=self._wanted.local_addr or own,
            server_port=None if self._server is None else self._server.port,
        )
        if joined.rank != 0:  # a zone means nothing on another machine: each agent adds its own
            bootstrap.master_addr = scoped(bootstrap.master_addr.partition("%")[0], interface)
        self._leave_if_ended()
        self._failed = False
        self.number = inner._state_holder.state.round
        monitor.enter_round(self.number, joined.world_size)
        self._point_out(doubts(node.addr for node in inner._state_holder.state.participants))
        return RendezvousInfo(place, joined.rank, joined.world_size, bootstrap)

    def begun(self) -> None:
        """Note that the present round begins on this node: from now on it precedes nodes that come later."""
        self.since = self.since or Since(self._gathered.generation, self.number)

    def _point_out(self, found: str) -> None:
        """Warn of what is doubtful in the node ranks that the nodes ask for, once."""
        if found and found != self._doubts:
            settings = self._wanted.settings
            progress.say(logging.WARNING, f"job {settings.job_id}: {found}", quiet=settings.progress == "off")
        self._doubts = found

    def _name_in(self, number: int) -> str:
        """Return the name of this node in a round."""
        since = self.since or Since(self._gathered.generation, number)
        address = self._wanted.local_addr or self._formation.address
        return node_name(since, self._order, address, self._gathering.member)

    def _open(self) -> tuple[DynamicRendezvousHandler, Monitor]:
        heartbeat_client, agent_client = self._connect(), self._connect()
        params = RendezvousParameters(
            backend=BACKEND,
            endpoint="",
            run_id=self._wanted.settings.job_id,
            min_nodes=self._wanted.policy.nodes.minimum,
            max_nodes=self._wanted.policy.nodes.maximum,
            # Torch would name the node by its host name. It never resolves this name, and sorts the nodes by it.
            local_addr=self._name_in(0),
            **dict(self._wanted.torch),
        )
        backend = Backend(heartbeat_client, params.run_id, params.max_nodes, self._name_in)
        inner = backend.inner = create_handler(agent_client, backend, params)
        attempts = max(1, NEVER_SECONDS // round(inner.settings.keep_alive_interval.total_seconds()))
        settings = dataclasses.replace(inner.settings, keep_alive_max_attempt=attempts)
        inner._state_holder._settings = settings  # type: ignore[attr-defined]
        if self._gathered.small:
            timeout = FirstCall(settings.timeout, inner._state_holder)
            inner._op_executor._settings = dataclasses.replace(settings, timeout=timeout)  # type: ignore[attr-defined]
        self._leave_if_ended()
        monitor = Monitor(
            heartbeat_client,
            settings,
            lambda: self._gathering.state.present,
            self._ended,
            lambda: self._reconnect(inner, monitor),
        )
        return inner, monitor

    def _reconnect(self, inner: DynamicRendezvousHandler, monitor: Monitor) -> None:
        """Open new connections in place of those by which torch and the monitor reach the store."""
        heartbeat_client, agent_client = self._connect(), self._connect()
        self._leave_if_ended()  # if `end` comes later, it shuts these down as well
        inner._store = agent_client
        inner._state_holder._backend._store = heartbeat_client  # type: ignore[attr-defined]
        monitor.use(heartbeat_client)

    def _connect(self) -> TCPStore:
        try:
            client = store.connect(self._formation.store_address, self._formation.store_port).hand_over()
        except OSError as error:
            raise RendezvousConnectionError(f"the agents' store can't be reached: {error}") from error
        client.set_timeout(timedelta(seconds=self._wanted.torch["read_timeout"]))
        return client

    def nodes_waiting(self) -> int:
        """Return how many nodes make a new round necessary. Never blocks.

        Raises:
            Exception: the state could not be read for `LOSS_SECONDS`.
        """
        return 0 if self._opened is None else self._opened[1].nodes_waiting()

    def close(self) -> None:
        """End the job for good, for all its agents.

        Raises:
            RendezvousError: the other agents could not be told.
        """
        if self._opened is not None:
            inner, monitor = self._opened
            if not monitor.closed:
                inner.set_closed()
            inner._stop_heartbeats()

    def end(self) -> None:
        """Leave this rendezvous for good; a call that is blocked in it fails now.

        Without the shutdown of its connections, a blocked call would continue when the link is back, and take a seat
        in a rendezvous that this agent has left.
        """
        self._ended.set()
        store.shut_down_connections(self._formation.store_address, self._formation.store_port)
        self._release()

    def _release(self) -> None:
        opened, self._opened, self._server = self._opened, None, None
        if opened is not None:
            opened[0]._stop_heartbeats()

    def _leave_if_ended(self) -> None:
        """Leave again if another thread has called `end` during this call."""
        if self._ended.is_set():
            self._release()
            raise AbandonedError


class FirstCall(RendezvousTimeout):
    """Torch's timeouts for a session that began after a last call: another one before its first round is too much.

    Args:
        timeout: the timeouts that the user chose.
        holder: holds the state of the rendezvous.
    """

    def __init__(self, timeout: RendezvousTimeout, holder: _RendezvousStateHolder) -> None:
        super().__init__(timeout.join, timeout.last_call, timeout.close, timeout.heartbeat)
        self._holder = holder

    @property
    def last_call(self) -> timedelta:
        """The last call of the present round."""
        return timedelta(seconds=FIRST_CALL_SECONDS) if self._holder.state.round == 0 else super().last_call


class Backend(C10dRendezvousBackend):
    """Torch's backend, whose writes return only when the waiting node has something to do.

    Torch reads the state once a second. A node that joins an incomplete round would learn up to a second late that it
    is complete, although all agents come within moments of each other. Only the moment at which torch gets the state
    changes; the state is torch's.

    The one thing that changes in it is this node's own name. Torch ranks nodes by their names, and a name says in which
    round the node came. A node knows that only in the write by which it enters a round: until then the round can become
    complete without it.

    Args:
        client: a client of the agents' store.
        run_id: the job's id.
        nodes: the most nodes there may be.
        name_in: returns this node's name in the round of a number.

    Attributes:
        inner: torch's handler of this node.
    """

    def __init__(self, client: Store, run_id: str, nodes: int, name_in: Callable[[int], str]) -> None:
        super().__init__(client, run_id)
        self.inner: DynamicRendezvousHandler | None = None
        self._name_in = name_in
        self._poll_seconds = min(POLL_SECONDS + POLL_SECONDS_PER_NODE * nodes, LINGER_SECONDS)

    @property
    def name(self) -> str:
        """The name of the backend."""
        return BACKEND

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write the state as torch does; return the state at the end of the waiting.

        Returns:
            The state, its token, and whether the write succeeded; None if there is no state.
        """
        bits, node = self._named(state)
        answer = super().set_state(bits, token)
        if answer is not None and answer[2]:
            self._rename(node)
        until = time.monotonic() + LINGER_SECONDS
        while answer is not None and answer[2] and self._waits(answer[0]) and time.monotonic() < until:
            time.sleep(self._poll_seconds)
            now = self.get_state()
            answer = None if now is None else (*now, True)
        return answer

    @property
    def _node(self) -> Any:
        """Torch's descriptor of this node."""
        return None if self.inner is None else self.inner._this_node

    def _named(self, bits: bytes) -> tuple[bytes, Any]:
        """Return the state in which this node has its right name, and its descriptor by that name."""
        node = self._node
        if self._name_in(0) == self._name_in(1):
            return bits, node  # it was in a round before: in a large job each reading of the state takes milliseconds
        state = pickle.loads(bits)  # noqa: S301 - torch has just written these bytes
        if node not in state.participants or (name := self._name_in(state.round)) == node.addr:
            return bits, node
        named = dataclasses.replace(node, addr=name)
        for table in (state.participants, state.last_heartbeats):
            table[named] = table.pop(node)
        if state.complete:
            # The same write has completed the round, and torch has sorted the nodes by the names that it knew.
            state.participants = {each: rank for rank, each in enumerate(sorted(state.participants))}
        return pickle.dumps(state), named

    def _rename(self, node: Any) -> None:
        """Have torch call this node by the name that is in the state now."""
        if self.inner is not None and node != self._node:
            self.inner._this_node = self.inner._op_executor._node = node  # type: ignore[attr-defined]

    def _waits(self, bits: bytes) -> bool:
        try:
            # Torch reads the same bytes, in the same way, as soon as it has them.
            state = pickle.loads(bits)  # noqa: S301
        except pickle.PickleError:
            return False  # torch raises its own error
        # A complete round has its nodes, and others wait for the next one.
        waiting = state.wait_list if state.complete else state.participants
        return self._node in waiting and not state.closed


class Monitor:
    """Reads the rendezvous' state every second, in a thread of its own.

    By itself torch counts a node as dead that has sent no heartbeat for 15 s. Only the host of the session knows which
    nodes are dead: its connection to the node's agent has closed, or been silent for too long. It ages such a node's
    heartbeat, so that the next reader removes the node. Torch's own clock removes no node (`NEVER_SECONDS`).

    Args:
        client: a client of the agents' store.
        settings: torch's settings of the rendezvous.
        present: returns the members of the session; None where they are not known, as on all agents but the host.
        ended: ends the thread when it is set.
        reconnect: opens new connections to the store, after a failure.

    Attributes:
        closed: whether an agent has ended the job for good.
    """

    def __init__(
        self,
        client: Store,
        settings: RendezvousSettings,
        present: Callable[[], frozenset[bytes] | None],
        ended: threading.Event,
        reconnect: Callable[[], None],
    ) -> None:
        self.closed = False
        self._backend = C10dRendezvousBackend(client, settings.run_id)
        self._holder = _BackendRendezvousStateHolder(self._backend, settings, cache_duration=0)
        self._reconnect = reconnect
        self._present = present
        self._ended = ended
        self._round: tuple[int, int] | None = None
        self._waiting = 0
        self._missed: Counter[Any] = Counter()
        self._error: Exception | None = None
        self._failing_since: float | None = None
        detached.start_explained(detached.thread("monitor", self._run))

    def use(self, client: Store) -> None:
        """Read by another client from now on."""
        self._backend._store = client

    def enter_round(self, number: int, size: int) -> None:
        """Watch the round of this number, which so many nodes have joined."""
        self._waiting = 0
        self._round = number, size

    def leave_round(self) -> None:
        """Watch no round."""
        self._round = None

    def nodes_waiting(self) -> int:
        """Return how many nodes make a new round necessary.

        Raises:
            Exception: the state could not be read for `LOSS_SECONDS`.
        """
        since, error = self._failing_since, self._error
        if since is not None and error is not None and time.monotonic() - since > LOSS_SECONDS:
            raise error
        return self._waiting

    def _run(self) -> None:
        while not self._ended.wait(MONITOR_SECONDS):
            try:
                self._look()
            except Exception as error:  # a monitor that ended here would show its last reading forever
                self._error = error
                self._failing_since = self._failing_since or time.monotonic()
                with contextlib.suppress(Exception):  # then the next look fails as well
                    self._reconnect()
            else:
                self._error = self._failing_since = None

    def _look(self) -> None:
        watched = self._round
        self._holder.sync()
        self._mark_dead_nodes()
        state = self._holder.state
        # The end of a node that has ended the job for good is no reason to restart healthy workers.
        self.closed = self.closed or state.closed
        if watched is None or watched is not self._round:
            return
        number, size = watched
        if self.closed:
            self._waiting = 0
        elif state.round != number or not state.complete:
            self._waiting = 1  # the others have continued without this node
        else:
            self._waiting = len(state.wait_list) or max(0, size - len(state.participants))

    def _mark_dead_nodes(self) -> None:
        # Ask after the state was read: every node in it had joined the session by then.
        present = self._present()
        heartbeats = self._holder.state.last_heartbeats
        # An agent that comes back to the session is a new node with a higher number; its earlier node is dead.
        newest = {member_of(node.addr): node for node in sorted(heartbeats, key=lambda node: node.local_id)}
        missing = {
            node
            for node in heartbeats
            if present is not None and (member_of(node.addr) not in present or node != newest[member_of(node.addr)])
        }
        self._missed = Counter({node: self._missed[node] + 1 for node in missing})
        dead = [node for node, looks in self._missed.items() if looks >= MISSED_LOOKS]
        if dead:
            logger.info("the rendezvous need not wait for %s: lost", ", ".join(map(str, dead)))
            for node in dead:
                heartbeats[node] = LONG_PAST
            self._holder.mark_dirty()
            self._holder.sync()  # if another node wrote first, the next look repeats it


def node_name(since: Since, order: bytes, address: str, member: bytes) -> str:
    """Return the name by which torch's rendezvous knows a node, and sorts the nodes of a round.

    Nodes that were in an earlier round come first. A node that comes later can have an empty disk, and must not become
    rank 0 of a job that has trained. Nodes of the same first round are in their order, and of two agents on one machine
    the one with the lower process id is first. Address and member id follow, for people and for `member_of`.
    """
    seniority = f"{since.generation:016d}.{since.number:08d}"
    return f"{seniority}.{order.hex()}.{os.getpid():010d}.{address}/{member.hex()}"


def member_of(name: str) -> bytes:
    """Return the member id in a node's name."""
    return bytes.fromhex(name.rpartition("/")[2])


def doubts(names: Iterable[str]) -> str:
    """Return what is doubtful in the node ranks that the nodes of a round ask for; empty: nothing.

    Two nodes of a round ask for different ones: the host of the session takes each node rank once.
    """
    named = [name.rpartition("/")[0].split(".", maxsplit=4) for name in names]
    without = sorted(address for _, _, order, _, address in named if not asks(bytes.fromhex(order)))
    if not 0 < len(without) < len(named):
        return ""
    return (
        f"some nodes ask for a node rank, and come first; these do not: {few(without)}; "
        "fix: give each node a node rank of its own, or none"
    )


def open_for_workers(address: str, local_addr: str | None) -> store.StoreServer:
    """Open the store of one round on a listening socket that is never released.

    Torch would find a free port, release it and hope that it stays free, or reuse the store of the first round.

    Args:
        address: this agent's address, as the gathering found it.
        local_addr: the value of ``--local-addr``, which the workers are told. The store listens there if it can, else
            (the address of a NAT gateway, or another host's name) on every address.

    Raises:
        MingleError: the address can't be used.
    """
    candidates = [address]
    if local_addr is not None:
        candidates = ["::" if ":" in address else "0.0.0.0"]
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(local_addr, None, type=socket.SOCK_STREAM)
            candidates = [*dict.fromkeys(str(entry[4][0]) for entry in found), *candidates]
    for candidate in candidates[:-1]:
        with contextlib.suppress(MingleError):
            return store.open_server(candidate, None, secrets.token_bytes(16))
    return store.open_server(candidates[-1], None, secrets.token_bytes(16))
