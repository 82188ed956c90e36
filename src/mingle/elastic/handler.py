"""Torchrun's rendezvous handler: gather the agents, wait for a round to begin, and gather anew after a loss.

Compared with c10d, no node is told an endpoint, and the job survives the loss of the node that holds the agents'
store. The host of the session decides which nodes are in a round (`mingle.elastic.rounds`).
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from mingle import detached
from mingle.config.settings import GENERATION
from mingle.detached import AbandonedError
from mingle.distributed import environment, gloo
from mingle.distributed.environment import process_environment
from mingle.elastic import worker_store
from mingle.elastic.round_store import RoundStore
from mingle.engine import progress, store
from mingle.errors import ConflictError, DiscoveryTimeoutError, MingleError, counted
from mingle.protocol.machine import scoped
from mingle.text import few

if TYPE_CHECKING:
    from mingle.elastic.gathering import Gathered, Gathering
    from mingle.elastic.settings import AgentSettings
    from mingle.elastic.worker_store import Stores
    from mingle.wire.frames import Begin

logger = logging.getLogger("mingle")

BACKEND = "mingle"
"""The name of the backend, which torch's registry compares with ``--rdzv-backend``."""
NEVER = -1, -1
"""The first round of a torchrun that got none."""
LOSS_SECONDS = 15.0
"""How long the store can fail before that is an error; the gathering notices a lost host within 10 s."""
ENDED_SECONDS = 5.0
"""How long a call may take to finish after the job has ended: its store fails at once, or has answered."""
BROKEN_ROUNDS = 3
"""So many rounds in a row whose stores fail, although their session lives, are an error."""

_T = TypeVar("_T")


class MingleRendezvousHandler(RendezvousHandler):
    """One agent's rendezvous. Torchrun calls it from its main thread."""

    def __init__(self, wanted: AgentSettings, gathering: Gathering) -> None:
        """Make a handler; it has not sent a packet yet.

        Args:
            wanted: what the user asked for.
            gathering: this agent's place among the agents; the handler closes it.
        """
        self._wanted = wanted
        self._gathering = gathering
        self._gathered: Gathered | None = None
        """The present session."""
        self._server: store.StoreServer | None = None
        """The workers' store, on agent 0."""
        self._closed = False
        self._first = NEVER
        """The generation and the number of the first round that torchrun got."""
        self._in_round = False
        """Whether torchrun has a round, and has not asked for the next one."""
        self._doubts = ""
        self.round_is_void = False
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
        """Gather the agents if necessary, and return the next round when it has begun.

        Raises:
            RendezvousTimeoutError: too few agents came in time; the message names those that were there.
            RendezvousClosedError: the job has been ended for good.
            RendezvousConnectionError: the store fails although its host lives.
            RendezvousError: the agents could not be brought together.
            ConflictError: the other agents refuse this one: it was started with other sizes, or with their node rank.
        """
        broken = 0
        self._in_round = False
        self._server = None  # the previous round's
        while True:
            if self.is_closed():
                raise self._closed_error()
            if self._gathered is None or self._gathering.state.lost is not None:
                self._gathered, broken = self._gather(), 0
            gathered = self._gathered
            begun = self._await_begin()
            if begun is None:
                continue
            try:
                stores = self._meet(gathered, begun)
            except AbandonedError:
                continue
            except MingleError as error:
                raise RendezvousError(str(error)) from error.__cause__
            except (RendezvousConnectionError, OSError, RuntimeError) as error:
                broken += 1
                if broken < BROKEN_ROUNDS:
                    logger.warning("the stores of a round failed, joining the next one: %s", first_line(error))
                elif not self._gathering.session_lost.wait(LOSS_SECONDS):
                    raise
                continue
            if self._gathering.await_round(self._is_over, self._wanted.torch["join_timeout"]):
                return self._begin(gathered, begun, stores)  # at once: each moment makes the others' answers older
            if not self._is_over() and not self._gathering.session_lost.is_set():
                raise RendezvousTimeoutError(str(self._unanswered_error()))

    def _await_begin(self) -> Begin | None:
        seconds = self._wanted.torch["join_timeout"]
        try:
            return self._gathering.next_round(self._first, seconds, self._remark_on_wait)
        except TimeoutError:
            raise RendezvousTimeoutError(str(self._no_round_error(seconds))) from None
        except MingleError as error:
            raise self._no_session_error(error) from error.__cause__

    def _remark_on_wait(self) -> None:
        """Say what the next round waits for."""
        policy = self._wanted.policy
        least = counted(self._least(), "node")
        text = f"waiting for a round; it takes {least} or more whose workers have ended"
        if self._first == NEVER and policy.nodes.minimum < policy.nodes.maximum:
            wait = f"{policy.last_call:g} s (last_call_timeout)"
            text += f", and the first one waits {wait} for more, unless all {policy.nodes.maximum} are there"
        if here := self._gathering.state.present:
            text += f"; here {'is' if len(here) == 1 else 'are'} {few(here, '; ')}"
        seconds = self._wanted.torch["join_timeout"]
        self._warn(f"{text}; this node waits {seconds:g} s at most (join_timeout), and Ctrl-C ends it")

    def _warn(self, text: str) -> None:
        quiet = self._wanted.settings.progress == "off"
        progress.say(logging.WARNING, f"job {self.get_run_id()}: {text}", quiet=quiet)

    def _least(self) -> int:
        """Return how many nodes a round needs."""
        assert self._gathered is not None
        return self._wanted.policy.round_minimum(had_quorum=not self._gathered.small)

    def _meet(self, gathered: Gathered, begun: Begin) -> Stores:
        meet = functools.partial(
            worker_store.meet,
            gathered.formation,
            begun,
            local_addr=self._wanted.local_addr,
            read_seconds=self._wanted.torch["read_timeout"],
        )
        # A thread that is given up can wait for agent 0 for the rest of read_timeout: it holds nothing but a connection
        # of its own, which the end of the session shuts down.
        return detached.run(meet, "rendezvous", lambda: self._is_over() or self._gathering.session_lost.is_set())

    def _is_over(self) -> bool:
        """Return whether another round has to follow the present one, or the job has ended."""
        return self._gathering.state.round_wanted or self.is_closed()

    def _no_round_error(self, seconds: float) -> MingleError:
        return DiscoveryTimeoutError.explain(
            f"job {self.get_run_id()!r}: no round of the job began within {seconds:g} s.",
            cause=f"fewer than {counted(self._least(), 'node')} are there with their workers stopped",
            remedy="look at the output of the other nodes; --rdzv-conf=join_timeout=SECONDS waits longer.",
        )

    def _unanswered_error(self) -> MingleError:
        return DiscoveryTimeoutError.explain(
            f"job {self.get_run_id()!r}: a round was complete, and too few nodes answered within 2 s to begin it.",
            cause="the network takes seconds to deliver a packet, or the nodes are too busy to answer",
            remedy="run `mingle-discover ping` on all nodes at once: it shows what is lost and how long packets take.",
        )

    def _no_session_error(self, error: MingleError) -> RendezvousError:
        return self._closed_error() if self.is_closed() else RendezvousError(str(error))

    def _closed_error(self) -> RendezvousClosedError:
        ended = self._gathering.state.ended
        text = "has been closed by one of its agents" if ended is None else f"has ended: {ended}"
        return RendezvousClosedError(f"job {self.get_run_id()!r} {text}")

    def _gather(self) -> Gathered:
        """Wait until this agent is in a session."""
        lost = self._gathering.state.lost
        if self._gathered is not None:
            self._warn(f"{lost}; looking for the other nodes again")
            self._leave_session()
        try:
            gathered = self._gathering.gather()
        except DiscoveryTimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error.__cause__  # the message says it all
        except ConflictError:
            raise
        except MingleError as error:
            raise self._no_session_error(error) from error.__cause__
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
        return gathered

    def _leave_session(self) -> None:
        """Have the calls fail that are blocked in the agents' store, and close the workers' store."""
        if self._gathered is not None:
            formation = self._gathered.formation
            store.shut_down_connections(formation.store_address, formation.store_port)
        self._gathered = self._server = None

    def _begin(self, gathered: Gathered, begun: Begin, stores: Stores) -> RendezvousInfo:
        self._server, self.round_is_void, self._in_round = stores.server, False, True
        if self._first == NEVER:
            self._first = gathered.generation, begun.number
        self._export(gathered, begun.number)
        logger.info(
            "job %s: round %d, agent %d of %d, the workers' store is at %s:%d",
            self.get_run_id(),
            begun.number,
            begun.rank,
            begun.size,
            stores.workers.master_addr,
            stores.workers.master_port,
        )
        if begun.doubts and begun.doubts != self._doubts:
            self._warn(begun.doubts)
        self._doubts = begun.doubts
        agents = RoundStore(stores.agents, self, rank=begun.rank, size=begun.size)
        return RendezvousInfo(agents, begun.rank, begun.size, stores.workers)

    def _export(self, gathered: Gathered, number: int) -> None:
        """Export what the workers inherit, and torch's own code in this process reads."""
        formation, before = gathered.formation, process_environment.visible()
        interface = formation.interface
        named = self._wanted.settings.interface_was_named
        told = {
            **environment.socket_interfaces(interface, named=named),
            # Torch 2.13 would keep the workers' store of the first round for all later ones.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # A node that was left out of a round can have workers of the last one.
            GENERATION: f"{gathered.generation:010d}-{number:06d}-{formation.session.hex()[:8]}",
        }
        # The user's own value takes precedence.
        if gloo.misses(interface, formation.address, {gloo.VARIABLE: before.get(gloo.VARIABLE) or interface}):
            told |= gloo.for_workers(scoped(formation.address, interface), before)
        process_environment.export(told)

    # --- while the workers run -----------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return 1 if a new round is necessary, else 0; never blocks, torchrun asks ten times a second.

        A lost session makes one necessary, and so does a void round, whose workers have stand-in ranks. After the end
        of the job no other node counts: healthy workers continue.
        """
        state = self._gathering.state
        if self.round_is_void:
            return 1
        if self._gathered is None or state.ended is not None or state.ending:
            return 0
        return int(state.lost is not None or state.round_wanted)

    def is_lost(self) -> bool:
        """Return whether the store failed because the session is lost; the gathering can notice later."""
        return self._gathering.session_lost.wait(LOSS_SECONDS) and self._gathering.state.lost is not None

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
        return self._closed or self._gathering.state.ended is not None or self._gathering.state.ending

    def has_ended(self, *, patient: bool = False) -> bool:
        """Return whether the host has ended the job; ``patient``: its store has failed, and that can be heard later."""
        if patient:
            self._gathering.session_lost.wait(LOSS_SECONDS)
        return self._gathering.state.ended is not None

    def waits_in_vain(self) -> bool:
        """Return whether this is the host, and the agents that are done wait for others that can't come any more."""
        return self._gathering.state.round_over

    def set_closed(self) -> None:
        """End the job for good, for all its agents; an agent that is in no round ends its own part in it alone."""
        # Torchrun calls this by `shutdown` with its exception on the way; the other agents are told its kind. One that
        # has given up its wait for a round is lost to the others, as if a signal had ended it.
        kind, failed = sys.exc_info()[0], not (self._in_round or self.is_closed())
        self._closed = True
        self._gathering.close("closed" if kind is None else f"ended by {kind.__name__}", failed=failed)

    def shutdown(self) -> bool:
        """End the job for good and release everything. Torchrun calls it at every end except by a signal."""
        self.set_closed()
        self._leave_session()
        process_environment.restore()
        return True


def first_line(error: BaseException) -> str:
    """Return an error's text without the C++ stack that torch adds."""
    return next(iter(str(error).splitlines()), type(error).__name__)
