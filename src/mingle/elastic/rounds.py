"""c10d's dynamic rendezvous on the store of one gathering: its rounds, who waits for the next one, and its end.

Elastic sizes, restarts and heartbeats are torch's own. What is added: a store of its own for the workers of each round,
and an eye on nodes that vanish, which torch alone notices only when another node comes or a worker fails.

Everything here but `Rounds.abandon` and `Watch.waiting` may block; it is called by way of `mingle.abandonable`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from mingle import abandonable
from mingle.elastic import store as agent_store
from mingle.elastic.absentees import Absentees, sign
from mingle.elastic.c10d_backend import BACKEND, Backend
from mingle.engine.store import StoreServer

if TYPE_CHECKING:
    from mingle.elastic.gathering import Gathered, Gathering
    from mingle.elastic.settings import AgentSettings

logger = logging.getLogger("mingle")

LOOK_SECONDS = 1.0
"""How often the rendezvous is looked at for nodes that wait or are gone: as often as torch reads it anew."""
BROKEN_ROUNDS = 3
"""How many rounds in a row may lose their rank 0 between their completion and its word where its store is."""


@dataclass(frozen=True, slots=True)
class Round:
    """A completed round.

    Attributes:
        number: torch's count of the rounds on this store.
        rank: this agent's rank among the agents.
        size: how many agents there are.
        store: the agents' store, with this round's prefix.
        bootstrap: where the workers' own store is.
    """

    number: int
    rank: int
    size: int
    store: Any
    bootstrap: RendezvousStoreInfo


class Rounds:
    """One gathering's rendezvous, from the agents' store on which it lives to its last round.

    Attributes:
        closed: whether some agent has ended the job for good, as far as was seen.
        watch: what looks at the present round; None between rounds.
    """

    def __init__(self, wanted: AgentSettings, gathering: Gathering, gathered: Gathered) -> None:
        self.closed = False
        self.watch: Watch | None = None
        self._wanted = wanted
        self._gathering = gathering
        self._gathered = gathered
        self._absentees: Absentees | None = None
        self._abandoned = False
        self._inner: DynamicRendezvousHandler | None = None
        self._server: StoreServer | None = None

    def next(self) -> Round:
        """Takes part in the next round and returns it; torch's rendezvous errors pass through."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        if self._server is not None:
            self._server.release()
            self._server = None
        inner = self._inner = self._inner or self._open()
        for attempt in range(1, BROKEN_ROUNDS + 1):
            try:
                completed = self._join(inner)
            except RuntimeError as error:  # of the store's; those of the rendezvous are none
                if attempt == BROKEN_ROUNDS:
                    raise
                logger.warning("a round of the rendezvous broke, joining the next one: %s", first_line(error))
            else:
                if self._abandoned:
                    raise abandonable.AbandonedError
                self.watch = Watch(functools.partial(self._look, inner, completed))
                return completed
        raise AssertionError("the last attempt returns or raises")

    def _open(self) -> DynamicRendezvousHandler:
        where = self._gathered.store_address, self._gathered.store_port, self._wanted.read_timeout
        # One for the rendezvous and one for the agent: a client that is blocked in wait() holds its connection, and
        # an agent that waits in the exit barrier would send no heartbeat and pass for dead (pytorch's own c10d does).
        heart, hand = (agent_store.connect(*where) for _ in range(2))
        params = RendezvousParameters(
            backend=BACKEND,
            endpoint="",
            run_id=self._wanted.settings.job_id,
            min_nodes=self._wanted.minimum,
            max_nodes=self._wanted.maximum,
            # Without it torch advertises what the host calls itself, which is often "localhost".
            local_addr=self._wanted.local_addr or self._gathered.address,
            **dict(self._wanted.torch),
        )
        backend = Backend(heart, params.run_id, params.max_nodes)
        inner = create_handler(hand, backend, params)
        backend.node = inner._this_node
        sign(hand, inner, self._gathering.member)
        if self._abandoned:
            raise abandonable.AbandonedError
        if self._gathered.is_host:
            eye = agent_store.connect(*where)
            looking = Backend(eye, params.run_id, params.max_nodes)
            self._absentees = Absentees(eye, looking, inner, lambda: self._gathering.present)
        return inner

    def _join(self, inner: DynamicRendezvousHandler) -> Round:
        info = inner.next_rendezvous()
        # Torch has put an address of its own making under the round's prefix, where a second one would race with it.
        place = PrefixStore(BACKEND, info.store)
        if info.rank == 0:
            self._server = agent_store.open_for_workers(self._gathered.address, self._wanted.local_addr)
        bootstrap = RendezvousStoreInfo.build(
            info.rank,
            place,
            local_addr=self._wanted.local_addr or self._gathered.address,
            server_port=None if self._server is None else self._server.port,
        )
        number = inner._state_holder.state.round
        return Round(number, info.rank, info.world_size, place, bootstrap)

    def _look(self, inner: DynamicRendezvousHandler, present: Round) -> int:
        """Returns how many nodes wait for the next round, or make one necessary by having gone."""
        waiting: int = inner.num_nodes_waiting()
        state = inner._state_holder.state
        if state.closed:
            # Who ends the job for good is missed soon after, and is no reason to restart healthy workers.
            self.closed = True
            return 0
        if waiting:
            return waiting
        if state.round != present.number or not state.complete:
            return 1  # the others have gone on without us
        return max(0, present.size - len(state.participants))

    def is_closed(self) -> bool:
        """Whether the job has been ended for good."""
        if self._inner is not None and not self.closed:
            self.closed = self._inner.is_closed()
        return self.closed

    def close(self) -> None:
        """Ends the job for good, for all its agents.

        Raises:
            RendezvousError: the others could not be told.
        """
        if self._inner is not None and not self.closed:
            self._inner.set_closed()
        self.closed = True

    def end(self) -> None:
        """Stops the heartbeats and the watch, and lets the clients and the workers' store go."""
        if self.watch is not None:
            self.watch.stop(wait=False)
            self.watch = None
        if self._absentees is not None:
            self._absentees.stop()
            self._absentees = None
        if self._inner is not None:
            self._inner._stop_heartbeats()
            self._inner = None
        if self._server is not None:
            self._server.release()
            self._server = None

    def abandon(self) -> None:
        """Leaves this rendezvous at once, whatever is blocked in it, and never comes back to it."""
        self._abandoned = True
        agent_store.sever(self._gathered.store_address, self._gathered.store_port)
        # It waits for the thread that sends heartbeats, and that one may be inside a call that does not end.
        abandonable.Call(self.end, "rendezvous")


class Watch:
    """Looks at a round every second in a thread of its own, so that who asks never waits for a store."""

    def __init__(self, look: Callable[[], int]) -> None:
        self.waiting = 0
        self.error: Exception | None = None
        self.failing_since: float | None = None
        self._look = look
        self._stopped = threading.Event()
        # By its name it may be left behind: it can be inside a call that does not end.
        self._thread = threading.Thread(target=self._run, name="mingle-abandoned-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self.waiting = self._look()
            except Exception as error:  # whatever it is: a watch that has ended would show its last look for ever
                self.error = error
                self.failing_since = self.failing_since or time.monotonic()
            else:
                self.failing_since = None

    def stop(self, *, wait: bool = True) -> None:
        """Ends it; with ``wait``, only when no look is going on any more."""
        self._stopped.set()
        if wait:
            self._thread.join()


def first_line(error: BaseException) -> str:
    """Returns an error's text without the C++ stack that torch adds."""
    with contextlib.suppress(IndexError):
        return str(error).splitlines()[0]
    return type(error).__name__
