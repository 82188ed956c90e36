"""The store that torchrun's agent is given for one round: what it does there ends when the round is over.

The agent calls in its main thread, which nothing must block for minutes, and takes every exception for its own end. It
exchanges its role there with the other agents before it starts its workers, and waits there for the others when those
are done.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch.distributed import PrefixStore, Store

logger = logging.getLogger("mingle")

_T = TypeVar("_T")

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""With it begin the keys of the barrier in which an agent whose workers are done waits for the others."""
ROLE = "torchelastic/role_info/"
"""With it begin the keys at which each agent says what it brings: its role and how many workers."""
RANKS = "torchelastic/assigned_ranks/"
"""With it begin the keys at which agent 0 says which ranks their workers have."""


LOOK_SECONDS = 0.01


class RoundOverError(Exception):
    """A round is over before all agents have exchanged their roles: another one follows."""


class Owner(Protocol):
    """Who hands the store out."""

    def store_call(self, function: Callable[[], _T], /) -> _T:
        """Makes a call that may block, and ends the waiting for it when that is in vain."""

    def role_call(self, function: Callable[[], _T], /) -> _T:
        """Likewise; raises `RoundOverError` where another round follows."""

    def check_round(self) -> None:
        """Raises `RoundOverError` if another round must follow because somebody is gone, or waits for it."""

    def workers_done(self) -> None:
        """This agent's workers are done."""


class RoundStore(PrefixStore):
    """The store of one round.

    If the round is over while roles are exchanged, the agent is told of ranks as they would be if all agents brought
    as many workers as this one. It starts its workers with them, and learns at its next look, a moment later, that
    there is a new round: an exception would have ended it.
    """

    def __init__(self, prefix: str, inner: Store, owner: Owner, *, rank: int, size: int) -> None:
        """Wraps a store.

        Args:
            prefix: put before every key.
            inner: the store.
            owner: makes the calls, and is told what the agent does.
            rank: the agent's rank among the agents.
            size: how many agents there are.
        """
        super().__init__(prefix, inner)
        self._owner = owner
        self._rank = rank
        self._size = size
        self._role = b""

    # --- while roles are exchanged ---------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        """As `torch.distributed.Store.set`."""
        if not key.startswith(ROLE):
            self._bounded(super().set, key, value)
            return
        self._role = value if isinstance(value, bytes) else str(value).encode()
        self._exchange(functools.partial(super().set, key, value), None)

    def get(self, key: str) -> bytes:
        """As `torch.distributed.Store.get`."""
        if not key.startswith(RANKS):
            return self._bounded(super().get, key)
        return self._exchange(functools.partial(super().get, key), self._ranks(), [key])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As `torch.distributed.Store.multi_get`."""
        if not all(key.startswith(ROLE) for key in keys):
            return self._bounded(super().multi_get, keys)
        return self._exchange(functools.partial(super().multi_get, keys), [self._role] * len(keys), keys)

    def multi_set(self, keys: list[str], values: Any) -> None:
        """As `torch.distributed.Store.multi_set`."""
        # Torch's stubs leave this one out.
        write = functools.partial(super().multi_set, keys, values)  # type: ignore[misc]
        if all(key.startswith(RANKS) for key in keys):
            self._exchange(write, None)
        else:
            self._bounded(write)

    def _exchange(self, function: Callable[[], _T], instead: _T, awaited: Sequence[str] = ()) -> _T:
        try:
            if awaited:
                self._await(list(awaited))
            return self._owner.role_call(function)
        except RoundOverError as over:
            logger.info("%s, so the ranks of this round do not matter any more", over)
            return instead

    def _await(self, keys: list[str]) -> None:
        """Waits for keys by looking: a call that waits in the store could not be ended, and keep later ones out."""
        check = functools.partial(super().check, keys)
        # Torch's stubs leave this one out.
        deadline = time.monotonic() + self.timeout.total_seconds()  # type: ignore[attr-defined]
        while not self._owner.role_call(check) and time.monotonic() < deadline:
            self._owner.check_round()
            time.sleep(LOOK_SECONDS)

    def _ranks(self) -> bytes:
        """Returns what agent 0 would have written: this agent's first rank and all workers, twice (for its role)."""
        workers = json.loads(self._role)["local_world_size"]
        place = [self._rank * workers, self._size * workers]
        return json.dumps([*place, *place]).encode()

    # --- later -----------------------------------------------------------------------------------------------------

    def add(self, key: str, amount: int) -> int:
        """As `torch.distributed.Store.add`."""
        if key.startswith(EXIT_BARRIER):
            self._owner.workers_done()
        return self._bounded(super().add, key, amount)

    def wait(self, *arguments: Any) -> None:
        """As `torch.distributed.Store.wait`."""
        self._bounded(super().wait, *arguments)

    def check(self, keys: list[str]) -> bool:
        """As `torch.distributed.Store.check`."""
        return self._bounded(super().check, keys)

    def _bounded(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return self._owner.store_call(functools.partial(function, *arguments))
