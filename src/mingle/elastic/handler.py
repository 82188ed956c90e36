"""Torchrun's rendezvous handler: gather the agents, run c10d's rendezvous, and gather again after a loss.

Compared with stock c10d, no node is told an endpoint, and the job survives the loss of the node that holds the agents'
store. Torch's own rendezvous decides which nodes are in a round (`mingle.elastic.rounds`).
"""

from __future__ import annotations

import functools
import json
import logging
import math
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from mingle import detached
from mingle.config.order import order_of
from mingle.config.settings import GENERATION
from mingle.detached import AbandonedError
from mingle.distributed import environment, gloo
from mingle.distributed.environment import process_environment
from mingle.elastic import rounds as agent_rounds
from mingle.elastic.rounds import BACKEND, Rounds, Since
from mingle.engine import progress
from mingle.errors import ConflictError, DiscoveryTimeoutError, MingleError
from mingle.protocol.machine import scoped

if TYPE_CHECKING:
    from mingle.elastic.gathering import Gathered, Gathering
    from mingle.elastic.settings import AgentSettings

logger = logging.getLogger("mingle")

ENDED_SECONDS = 5.0
"""How long a call may take to finish after the job has ended: its store fails at once, or has answered."""
BROKEN_ROUNDS = 3
"""So many rounds in a row that lose agent 0, before it has published the workers' store, are an error."""

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""The prefix of torch's keys for the barrier in which an agent waits after its workers are done."""
ROLE = "torchelastic/role_info/"
"""The prefix of torch's keys by which each agent publishes its role and its number of workers."""
RANKS = "torchelastic/assigned_ranks/"
"""The prefix of torch's keys by which agent 0 publishes the workers' ranks."""
LOOK_SECONDS = 0.01

_T = TypeVar("_T")


class AgentHandler(RendezvousHandler):
    """One agent's rendezvous. Torchrun calls it from its main thread."""

    def __init__(self, wanted: AgentSettings, gathering: Gathering) -> None:
        """Make a handler; it has not sent a packet yet.

        Args:
            wanted: what the user asked for.
            gathering: this agent's place among the agents; the handler closes it.
        """
        self._wanted = wanted
        self._gathering = gathering
        self._rounds: Rounds | None = None
        self._closed = False
        self._order: bytes | None = None
        self._since: Since | None = None
        """The first round that this agent was in."""
        self._void = False
        """Whether the present round's ranks don't count, since another round must follow."""

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._wanted.settings.job_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers are clients of the store that they are told: its server is in an agent."""
        return True

    # --- the next round ------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Gather the agents if necessary, and return the next round when it is complete.

        Raises:
            RendezvousTimeoutError: too few agents came in time; the message names those that were there.
            RendezvousClosedError: the job has been ended for good.
            RendezvousConnectionError: the store fails although its host lives.
            RendezvousError: the agents could not be brought together.
            ConflictError: the other agents refuse this one: it was started with other sizes, or with their node rank.
        """
        tried, broken = None, 0
        while True:
            if self.is_closed():
                raise self._closed_error()
            rounds = self._present_rounds()
            if rounds is not tried:  # another session
                tried, broken = rounds, 0
            try:
                joined = self.call(rounds.next)
            except RendezvousClosedError:
                raise self._closed_error() from None
            except MingleError as error:
                raise RendezvousError(str(error)) from error.__cause__
            except (RendezvousConnectionError, OSError, RuntimeError) as error:
                broken += 1
                # Torch's store raises a RuntimeError; torch's rendezvous errors are none.
                if isinstance(error, RuntimeError) and broken < BROKEN_ROUNDS:
                    logger.warning("a round of the rendezvous broke, joining the next one: %s", first_line(error))
                    continue
                if broken == 1 and not self._gathering.session_lost.is_set():  # once more, by new connections
                    logger.info("the connection to the store broke, opening another one: %s", first_line(error))
                    continue
                if not self._gathering.session_lost.wait(agent_rounds.LOSS_SECONDS):
                    raise
                logger.info("the rendezvous was interrupted: %s", first_line(error))
                continue
            begun = self._begin(rounds.number, joined)
            if self._gathering.await_round(self.is_closed, self._wanted.torch["join_timeout"]):
                rounds.begun()
                self._since = rounds.since
                return begun  # at once: each moment makes the answers of the others older
            if not self.is_closed() and not self._gathering.session_lost.is_set():
                raise RendezvousTimeoutError(str(self._unanswered_error()))

    def _unanswered_error(self) -> MingleError:
        return DiscoveryTimeoutError.explain(
            f"job {self.get_run_id()!r}: a round was complete, and too few nodes answered within 2 s to begin it.",
            cause="the network takes seconds to deliver a packet, or the nodes are too busy to answer",
            remedy="run `mingle-discover ping` on all nodes at once: it shows what is lost and how long packets take.",
        )

    def _closed_error(self) -> RendezvousClosedError:
        ended = self._gathering.state.ended
        text = "has been closed by one of its agents" if ended is None else f"has ended: {ended}"
        return RendezvousClosedError(f"job {self.get_run_id()!r} {text}")

    def _present_rounds(self) -> Rounds:
        """Return the rendezvous of the present session; if there is none, gather the agents first."""
        lost = self._gathering.state.lost
        if self._rounds is not None and lost is None:
            return self._rounds
        if self._rounds is not None:
            quiet = self._wanted.settings.progress == "off"
            text = f"job {self.get_run_id()}: {lost}; looking for the other nodes again"
            progress.say(logging.WARNING, text, quiet=quiet)
            self._rounds.end()
            self._rounds = None
        try:
            gathered = self._gathering.gather()
        except DiscoveryTimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error.__cause__  # the message says it all
        except ConflictError:
            raise
        except MingleError as error:
            if self.is_closed():
                raise self._closed_error() from error
            raise RendezvousError(str(error)) from error.__cause__
        self._export(gathered)
        formation = gathered.formation
        logger.info(
            "job %s: generation %d, the agents' store is at %s:%d, own address %s on %s",
            self.get_run_id(),
            gathered.generation,
            formation.store_address,
            formation.store_port,
            formation.address,
            formation.interface,
        )
        self._rounds = Rounds(
            self._wanted, self._gathering, gathered, order=self._order_at(formation.address), since=self._since
        )
        return self._rounds

    def _order_at(self, address: str) -> bytes:
        """Return this node's place in the order of nodes, which never changes while the agent lives."""
        if self._order is None:
            address = self._wanted.local_addr or address
            self._order = order_of(self._wanted.settings.placement, socket.gethostname(), address)
        return self._order

    def _export(self, gathered: Gathered) -> None:
        """Export what the workers inherit, and torch's own code in this process reads."""
        formation, before = gathered.formation, process_environment.visible()
        interface = formation.interface
        named = self._wanted.settings.interface_was_named
        told = {
            **environment.socket_interfaces(interface, named=named),
            # Torch 2.13 would keep the workers' store of the first round for all later ones.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            GENERATION: f"{gathered.generation:010d}-{formation.session.hex()[:8]}",
        }
        # The user's own value takes precedence.
        if gloo.misses(interface, formation.address, {gloo.VARIABLE: before.get(gloo.VARIABLE) or interface}):
            told |= gloo.for_workers(scoped(formation.address, interface), before)
        process_environment.export(told)

    def _begin(self, number: int, joined: RendezvousInfo) -> RendezvousInfo:
        place = joined.bootstrap_store_info
        assert place is not None
        logger.info(
            "job %s: round %d, agent %d of %d, the workers' store is at %s:%d",
            self.get_run_id(),
            number,
            joined.rank,
            joined.world_size,
            place.master_addr,
            place.master_port,
        )
        self._void = False
        store = RoundStore(joined.store, self, rank=joined.rank, size=joined.world_size)
        return RendezvousInfo(store, joined.rank, joined.world_size, place)

    # --- while the workers run -----------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return how many nodes make a new round necessary; never blocks, torchrun asks ten times a second.

        A lost gathering counts as one, and so does a void round, whose workers have stand-in ranks. After the end of
        the job no other node counts: healthy workers continue.

        Raises:
            RendezvousError: the store fails although its host lives.
        """
        rounds = self._rounds
        if self._void:
            return 1
        if rounds is None or rounds.closed or self._gathering.state.ended is not None:
            return 0
        if self._gathering.state.lost is not None:
            return 1
        return rounds.nodes_waiting()

    def void_round(self) -> None:
        """Have torchrun come for another round, since this one's ranks don't count."""
        self._void = True

    def is_lost(self) -> bool:
        """Return whether the store failed because the session is lost; the gathering can notice later."""
        return self._gathering.session_lost.wait(agent_rounds.LOSS_SECONDS) and self._gathering.state.lost is not None

    def workers_done(self) -> None:
        """Tell the gathering that this node's workers are done."""
        self._gathering.workers_done()

    def call(self, function: Callable[[], _T]) -> _T:
        """Make a call that may block in the agents' store, in a thread that is abandoned when the session is lost.

        Raises:
            RendezvousConnectionError: the session is lost, or the job has ended.
        """
        deadline = math.inf

        def is_over() -> bool:
            nonlocal deadline
            if self._gathering.state.ended is not None:
                deadline = min(deadline, time.monotonic() + ENDED_SECONDS)
            return self._gathering.state.lost is not None or time.monotonic() > deadline

        try:
            return detached.run(function, "rendezvous", is_over)
        except AbandonedError:
            pass
        except (OSError, RuntimeError):
            if self._gathering.state.ended is None:
                raise
        reason = self._gathering.state.lost or self._gathering.state.ended
        raise RendezvousConnectionError(f"the agents' store is gone: {reason}") from None

    # --- the end -------------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Return whether the job has been ended for good."""
        ended = self._gathering.state.ended is not None or self._gathering.state.ending
        return self._closed or ended or (self._rounds is not None and self._rounds.closed)

    def set_closed(self) -> None:
        """End the job for good, for all its agents.

        Raises:
            RendezvousError: the other agents could not be told.
        """
        self._closed = True
        if self._rounds is not None and self._gathering.state.ended is None:
            self.call(self._rounds.close)

    def shutdown(self) -> bool:
        """End the job for good and release everything; return whether the other agents could be told.

        Torchrun calls it at every end except by a signal.
        """
        told = True
        try:
            self.set_closed()
        except (RendezvousError, RuntimeError) as error:
            logger.info("the other nodes could not be told of the end: %s", first_line(error))
            told = False
        finally:
            if self._rounds is not None:
                self._rounds.end()
                self._rounds = None
            # Torchrun calls this with its exception on the way; the other agents are told its kind.
            kind = sys.exc_info()[0]
            self._gathering.close("closed" if kind is None else f"ended by {kind.__name__}")
            process_environment.restore()
        return told


class RoundStore(PrefixStore):
    """The store that torchrun's agent is given for one round.

    The agent calls it in its main thread, and every exception ends the agent. There it exchanges roles with the other
    agents before it starts its workers. If the round is over by then, the agent gets the ranks that it would have if
    all agents brought as many workers as it does. It starts its workers, and learns of the new round a moment later.
    """

    def __init__(self, inner: Store, handler: AgentHandler, *, rank: int, size: int) -> None:
        """Wrap a store.

        Args:
            inner: the store, with the round's prefix.
            handler: makes the calls, and is told what the agent does.
            rank: the agent's rank among the agents.
            size: how many agents there are.
        """
        super().__init__("agent", inner)
        self._handler = handler
        self._rank = rank
        self._size = size
        self._role = b""

    # --- the exchange of roles -------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        """See `torch.distributed.Store.set`."""
        write = functools.partial(super().set, key, value)
        if not key.startswith(ROLE):
            self._handler.call(write)
            return
        self._role = value if isinstance(value, bytes) else str(value).encode()
        self._exchange(write, None)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store.get`."""
        read = functools.partial(super().get, key)
        if not key.startswith(RANKS):
            return self._handler.call(read)
        workers = json.loads(self._role)["local_world_size"]
        # As agent 0 would write it: this agent's first rank and the number of all workers, and the same for its role.
        ranks = [self._rank * workers, self._size * workers] * 2
        return self._exchange(read, json.dumps(ranks).encode(), awaited=[key])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `torch.distributed.Store.multi_get`."""
        read = functools.partial(super().multi_get, keys)
        if not all(key.startswith(ROLE) for key in keys):
            return self._handler.call(read)
        return self._exchange(read, [self._role] * len(keys), awaited=keys)

    def multi_set(self, keys: list[str], values: Any) -> None:
        """See `torch.distributed.Store.multi_set`."""
        # Torch's stubs lack this method.
        write = functools.partial(super().multi_set, keys, values)  # type: ignore[misc]
        if all(key.startswith(RANKS) for key in keys):
            self._exchange(write, None)
        else:
            self._handler.call(write)

    def _exchange(self, function: Callable[[], _T], instead: _T, *, awaited: list[str] | None = None) -> _T:
        check = functools.partial(super().check, awaited or [])
        # Torch's stubs lack this property.
        deadline = time.monotonic() + self.timeout.total_seconds()  # type: ignore[attr-defined]
        try:
            # Poll: nothing could end a call that waits in the store, and it would block all later ones.
            while awaited and not self._handler.call(check) and time.monotonic() < deadline:
                if self._handler.num_nodes_waiting() > 0:
                    break
                time.sleep(LOOK_SECONDS)
            else:
                return self._handler.call(function)
        except (RendezvousConnectionError, OSError, RuntimeError):
            if not self._handler.is_lost():
                raise
        logger.info("another round must follow, so the ranks of this one do not matter")
        self._handler.void_round()
        return instead

    # --- later -----------------------------------------------------------------------------------------------------

    def add(self, key: str, amount: int) -> int:
        """See `torch.distributed.Store.add`."""
        if key.startswith(EXIT_BARRIER):
            self._handler.workers_done()
        return self._handler.call(functools.partial(super().add, key, amount))

    def wait(self, *arguments: Any) -> None:
        """See `torch.distributed.Store.wait`."""
        self._handler.call(functools.partial(super().wait, *arguments))

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store.check`."""
        return self._handler.call(functools.partial(super().check, keys))


def first_line(error: BaseException) -> str:
    """Return an error's text without the C++ stack that torch adds."""
    return next(iter(str(error).splitlines()), type(error).__name__)
