"""The store that torchrun's agent is given for one round."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

if TYPE_CHECKING:
    from mingle.elastic.handler import MingleRendezvousHandler

logger = logging.getLogger("mingle")

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""The prefix of torch's keys for the barrier in which an agent waits after its workers are done."""
ROLE = "torchelastic/role_info/"
"""The prefix of torch's keys by which each agent publishes its role and its number of workers."""
RANKS = "torchelastic/assigned_ranks/"
"""The prefix of torch's keys by which agent 0 publishes the workers' ranks."""
ROLES_SECONDS = 0.01
"""How often an agent looks whether the others have published their roles, or agent 0 the ranks."""
BARRIER_SECONDS = 0.1
"""How often an agent looks whether all agents have come to the exit barrier."""

_T = TypeVar("_T")


class RoundStore(PrefixStore):
    """The store of one round. The agent calls it in its main thread, and every exception ends the agent.

    In it the agents exchange roles before they start their workers. If the round is over by then, the agent gets the
    ranks that it would have if all agents brought as many workers as it does. It starts its workers, and learns of the
    new round a moment later.
    """

    def __init__(self, inner: Store, handler: MingleRendezvousHandler, *, rank: int, size: int) -> None:
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

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store.check`."""
        return self._handler.call(functools.partial(super().check, keys))

    def _poll(self, keys: list[str], is_over: Callable[[], bool], every: float) -> None:
        """Wait for keys, and look meanwhile whether the wait is over.

        Nothing could end a call that waits in the store. It would block all later ones, and torch logs its stack if
        the store is closed.

        Raises:
            DistStoreError: torch's own error, once the store's timeout has passed.
        """
        # Torch's stubs lack this property.
        deadline = time.monotonic() + self.timeout.total_seconds()  # type: ignore[attr-defined]
        while not is_over():
            if time.monotonic() > deadline:
                self._handler.call(functools.partial(super().wait, keys, timedelta(milliseconds=1)))
                return
            time.sleep(every)

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
        """Make a call as soon as the keys that it reads are there; ``instead`` is its result if the round is over."""
        if awaited is not None:
            self._poll(awaited, functools.partial(self._is_exchange_over, awaited), ROLES_SECONDS)
            if self._handler.round_is_void:
                return instead
        return self._unless_lost(function, instead)

    def _is_exchange_over(self, awaited: list[str]) -> bool:
        """Return whether the other agents have written these keys, or another round must follow."""
        if self._unless_lost(functools.partial(super().check, awaited), instead=True):
            return True
        if self._handler.num_nodes_waiting() > 0:
            self._make_void()
        return self._handler.round_is_void

    def _unless_lost(self, function: Callable[[], _T], instead: _T) -> _T:
        try:
            return self._handler.call(function)
        except (RendezvousConnectionError, OSError, RuntimeError):
            if not self._handler.is_lost():
                raise
        self._make_void()
        return instead

    def _make_void(self) -> None:
        logger.info("another round must follow, so the ranks of this one do not matter")
        self._handler.round_is_void = True

    # --- the exit barrier ------------------------------------------------------------------------------------------

    def add(self, key: str, amount: int) -> int:
        """See `torch.distributed.Store.add`."""
        if key.startswith(EXIT_BARRIER):
            self._handler.workers_done()
        return self._handler.call(functools.partial(super().add, key, amount))

    def wait(self, *arguments: Any) -> None:
        """See `torch.distributed.Store.wait`."""
        keys: list[str] = arguments[0]
        if keys[0].startswith(EXIT_BARRIER):
            self._poll(keys, functools.partial(self._is_barrier_over, keys), BARRIER_SECONDS)
        else:
            self._handler.call(functools.partial(super().wait, *arguments))

    def _is_barrier_over(self, keys: list[str]) -> bool:
        """Return whether all agents have come to the exit barrier, no other one can come, or the job has ended."""
        if self._handler.has_ended():  # its store is closed, or about to be
            return True
        try:
            if self._handler.waits_in_vain():
                for key in keys:
                    self.set(key, "")  # ends the barrier for all
            return self.check(keys)
        except (RendezvousConnectionError, OSError, RuntimeError) as error:
            if not self._handler.has_ended(patient=True):
                raise
            logger.info("the exit barrier is over: %s", error)
            return True
