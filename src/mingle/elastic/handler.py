"""Torchrun's rendezvous handler: it gathers the agents, lets c10d's rendezvous run, and gathers them again on a loss.

What stock c10d can't: no node is told an endpoint, and the job survives the node on which the agents' store lives. What
is torch's stays torch's: who is in a round, elastic sizes, restarts, heartbeats (`mingle.elastic.rounds`).
"""

from __future__ import annotations

import contextlib
import logging
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

from mingle import abandonable
from mingle.abandonable import AbandonedError
from mingle.distributed import environment, gloo
from mingle.distributed.environment import process_environment
from mingle.elastic.c10d_backend import BACKEND
from mingle.elastic.round_store import RoundOverError, RoundStore
from mingle.elastic.rounds import Round, Rounds, first_line
from mingle.engine import progress
from mingle.errors import DiscoveryTimeoutError, MingleError
from mingle.protocol.machine import scoped

if TYPE_CHECKING:
    from mingle.elastic.gathering import Gathered, Gathering
    from mingle.elastic.settings import AgentSettings

logger = logging.getLogger("mingle")

LOSS_SECONDS = 15.0
"""A store that fails is the gathering's loss only if that one says so within this; it notices within 10 s."""
ENDED_SECONDS = 5.0
"""How long a call may still come to its end when the job has been ended: its store fails at once, or has answered."""

GENERATION = "MINGLE_GENERATION"
"""A fencing token: tells the workers their session; it is unique and sorts by the session's number."""

_T = TypeVar("_T")


class AgentHandler(RendezvousHandler):
    """One agent's rendezvous. Torchrun calls it from its main thread."""

    def __init__(self, wanted: AgentSettings, gathering: Gathering) -> None:
        """Makes a handler that has not sent a packet yet.

        Args:
            wanted: what the user asked for.
            gathering: this agent's place among the agents; the handler closes it.
        """
        self._wanted = wanted
        self._gathering = gathering
        self._rounds: Rounds | None = None
        self._closed = False
        self._over = False
        """Whether the agent has been told of ranks that don't count, since another round must follow."""

    def get_backend(self) -> str:
        """The name of the backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job's id."""
        return self._wanted.settings.job_id

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients of the store whose address they get: its server is here, in an agent."""
        return True

    # --- the next round ------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Gathers the agents if need be, and returns the round that then completes.

        Raises:
            RendezvousTimeoutError: too few agents came in time; the message names who was there.
            RendezvousClosedError: the job has been ended for good.
            RendezvousConnectionError: the store fails though its host lives.
            RendezvousError: the agents could not be brought together.
        """
        while True:
            self._refuse_if_over()
            rounds = self._present_rounds()
            try:
                completed = self._bounded(rounds.next, "rendezvous")
            except AbandonedError:
                continue
            except RendezvousClosedError:
                rounds.closed = True
                continue
            except (RendezvousConnectionError, OSError, RuntimeError) as error:
                if not self._is_disturbed_within(LOSS_SECONDS):
                    raise
                logger.info("the rendezvous was interrupted: %s", first_line(error))
                continue
            if self._counts():
                return self._info(completed)

    def _counts(self) -> bool:
        """Return whether a completed round counts: this agent's lease must be valid at this moment.

        The process can have been stopped, or the machine suspended, since the round completed. The gathering notices
        that soon, so wait briefly for it.
        """
        if not self._gathering.held:
            self._gathering.disturbed.wait(LOSS_SECONDS)
        return self._gathering.held and not self._gathering.disturbed.is_set()

    def _refuse_if_over(self) -> None:
        ended = self._gathering.ended
        if ended is not None:
            raise RendezvousClosedError(f"job {self.get_run_id()!r} has ended: {ended}")
        if self._closed or self._gathering.ending or (self._rounds is not None and self._rounds.closed):
            raise RendezvousClosedError(f"job {self.get_run_id()!r} has been closed by one of its agents")

    def _present_rounds(self) -> Rounds:
        """Returns the rendezvous of the present gathering; if there is none, the agents gather first."""
        lost = self._gathering.lost
        if self._rounds is not None and lost is None:
            return self._rounds
        if self._rounds is not None:
            self._say(f"{lost}; looking for the other nodes again")
            self._rounds.abandon()
            self._rounds = None
        try:
            gathered = self._gathering.gather()
        except DiscoveryTimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error
        except MingleError as error:
            self._refuse_if_over()
            raise RendezvousError(str(error)) from error
        self._export(gathered)
        logger.info(
            "job %s: generation %d, the agents' store is at %s:%d, own address %s on %s",
            self.get_run_id(),
            gathered.generation,
            gathered.store_address,
            gathered.store_port,
            gathered.address,
            gathered.interface,
        )
        self._rounds = Rounds(self._wanted, self._gathering, gathered)
        return self._rounds

    def _export(self, gathered: Gathered) -> None:
        """Tells the workers, and torch's own code in this process, by the environment that they inherit."""
        interface, before = gathered.interface, process_environment.visible()
        named = self._wanted.settings.interfaces_from in ("interface=", "MINGLE_INTERFACE")
        # Torch 2.13 hands the bootstrap information of the first round out again in all that follow; with this it
        # makes a new one each time, which is then not used either (see `Rounds`).
        told = {
            **environment.socket_interfaces(interface, named=named),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            GENERATION: f"{gathered.generation:06d}-{gathered.session.hex()[:8]}",
        }
        # What the user has set stays.
        if gloo.misses(interface, gathered.address, {gloo.VARIABLE: before.get(gloo.VARIABLE) or interface}):
            told |= gloo.for_workers(scoped(gathered.address, interface), before)
        process_environment.export(told)

    def _info(self, completed: Round) -> RendezvousInfo:
        logger.info(
            "job %s: round %d, agent %d of %d, the workers' store is at %s:%d",
            self.get_run_id(),
            completed.number,
            completed.rank,
            completed.size,
            completed.bootstrap.master_addr,
            completed.bootstrap.master_port,
        )
        self._over = False
        store = RoundStore("agent", completed.store, self, rank=completed.rank, size=completed.size)
        return RendezvousInfo(store, completed.rank, completed.size, completed.bootstrap)

    # --- while the workers run -----------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """How many nodes make a new round necessary; never blocks, torchrun asks ten times a second.

        The loss of the gathering counts as one. Once the job has been ended nobody does: healthy workers go on.

        Raises:
            RendezvousError: the store fails though its host lives.
        """
        rounds = self._rounds
        if rounds is None or rounds.closed or self._gathering.ended is not None:
            return 0
        if self._over or self._gathering.lost is not None:
            return 1
        watch = rounds.watch
        if watch is None:
            return 0
        since, error = watch.failing_since, watch.error
        if since is not None and error is not None and time.monotonic() - since > LOSS_SECONDS:
            raise error
        return watch.waiting

    # --- the end -------------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Whether the job has been ended for good."""
        rounds = self._rounds
        if self._closed or self._gathering.ended is not None or rounds is None:
            return self._closed or self._gathering.ended is not None
        with contextlib.suppress(AbandonedError):
            return self._bounded(rounds.is_closed, "rendezvous")
        return rounds.closed

    def set_closed(self) -> None:
        """Ends the job for good, for all its agents.

        Raises:
            RendezvousError: the others could not be told.
        """
        self._closed = True
        rounds = self._rounds
        if rounds is not None and self._gathering.lost is None and self._gathering.ended is None:
            with contextlib.suppress(AbandonedError):
                self._bounded(rounds.close, "rendezvous")

    def shutdown(self) -> bool:
        """Ends the job for good and lets go of everything; returns whether the others could be told.

        Torchrun calls it when it ends in whatever way but by a signal.
        """
        told = True
        rounds, self._rounds = self._rounds, None
        try:
            if rounds is not None:
                told = self._part(rounds)
        finally:
            self._gathering.close(_reason())
            process_environment.restore()
        return told

    def _part(self, rounds: Rounds) -> bool:
        deadline = time.monotonic() + self._wanted.close_timeout

        def given_up() -> bool:
            return self._gathering.lost is not None or time.monotonic() > deadline

        told = self._gathering.ended is not None
        if not told and self._gathering.lost is None:
            try:
                abandonable.run(rounds.close, "rendezvous", given_up)
                told = True
            except (AbandonedError, RendezvousError, RuntimeError) as error:
                logger.info("the other nodes could not be told of the end: %s", first_line(error))
        try:
            abandonable.run(rounds.end, "rendezvous", given_up)
        except AbandonedError:
            rounds.abandon()
        return told

    # --- waiting -------------------------------------------------------------------------------------------------

    def _bounded(self, function: Callable[[], _T], name: str) -> _T:
        """Makes a call that may block, and leaves it to itself when the gathering is no more."""
        return abandonable.run(function, name, _Patience(self._gathering))

    def store_call(self, function: Callable[[], _T]) -> _T:
        """Makes a call of the agent's to its round's store.

        Raises:
            RendezvousConnectionError: the store is gone.
        """
        try:
            return self._bounded(function, "store")
        except AbandonedError:
            raise self._store_gone() from None

    def role_call(self, function: Callable[[], _T]) -> _T:
        """Makes one by which the agents exchange their roles.

        Raises:
            RoundOverError: the gathering is lost; another round follows.
            RendezvousConnectionError: the job has been ended.
        """
        try:
            return self._bounded(function, "store")
        except AbandonedError:
            pass
        except (OSError, RuntimeError):
            # The store's connection may break before the gathering has noticed that its host is lost.
            if not self._is_disturbed_within(LOSS_SECONDS):
                raise
        lost = self._gathering.lost
        if lost is None:
            raise self._store_gone() from None
        self._over = True
        raise RoundOverError(lost) from None

    def check_round(self) -> None:
        """Looks whether the present round goes on.

        Raises:
            RoundOverError: another one must follow.
        """
        watch = None if self._rounds is None else self._rounds.watch
        if watch is not None and watch.waiting > 0:
            self._over = True
            raise RoundOverError("a node is gone, or a new one waits")

    def workers_done(self) -> None:
        """This node's workers are done."""
        self._gathering.workers_done()

    def _store_gone(self) -> RendezvousConnectionError:
        reason = self._gathering.lost or self._gathering.ended
        return RendezvousConnectionError(f"the agents' store is gone: {reason}")

    def _is_disturbed_within(self, seconds: float) -> bool:
        return self._gathering.disturbed.wait(seconds)

    def _say(self, text: str) -> None:
        quiet = self._wanted.settings.progress == "off"
        progress.say(logging.WARNING, f"job {self.get_run_id()}: {text}", quiet=quiet)


class _Patience:
    """Whether to give a call up: at once when the gathering is lost, a little later when the job has been ended."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._ended_at: float | None = None

    def __call__(self) -> bool:
        if self._gathering.lost is not None:
            return True
        if self._gathering.ended is None:
            return False
        self._ended_at = self._ended_at or time.monotonic()
        return time.monotonic() - self._ended_at > ENDED_SECONDS


def _reason() -> str:
    """Returns why this agent ends, for the others: torchrun calls `shutdown` with its exception on the way."""
    kind = sys.exc_info()[0]
    return "closed" if kind is None else f"ended by {kind.__name__}"
