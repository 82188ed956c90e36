"""The process's environment: the only place where mingle writes to it, and puts back what was there.

Frameworks that take over after discovery read ``RANK``, ``MASTER_ADDR`` and their like from ``os.environ``,
so these are exported there. What mingle wrote is remembered: a later call must not take it for the user's.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mingle import forksafe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from mingle.protocol.machine import Formation

_T = TypeVar("_T")

SOCKET_INTERFACES = frozenset({"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"})
"""The variables by which torch's backends choose a network interface: a value that the user set stays."""


class Environment:
    """An environment that remembers what mingle wrote into it. Its methods can be called from any thread.

    A value that is no longer the one mingle wrote is the user's: it is visible, and it stays.
    """

    def __init__(self, target: MutableMapping[str, str]) -> None:
        self._target = target
        # The interpreter keeps a lock and its owner as one: between two lines of ours a signal could come.
        self._lock: Any = forksafe.register_lock(threading.RLock())
        # For each name the value that mingle wrote, and what was there before (None: nothing).
        self._written: dict[str, tuple[str, str | None]] = {}
        # A signal's handler can close a job at any line of a call below: its `restore` comes at the end of that call.
        self._restores_later = False

    def visible(self) -> dict[str, str]:
        """Return the environment as it would be if mingle had never written: what to read settings from."""
        return self._at_once(self._visible)

    def export(self, values: Mapping[str, str]) -> list[str]:
        """Write the values, and undo what an earlier export wrote.

        A value in `SOCKET_INTERFACES` that the user has set stays.

        Returns:
            A sentence for a warning about each value of the user's that was replaced. ``MASTER_ADDR`` and
            ``MASTER_PORT`` are one pair and share a sentence.
        """
        return self._at_once(partial(self._export, values))

    def restore(self) -> None:
        """Restore what was there before mingle wrote; a second call does nothing."""
        if self._lock._is_owned():
            self._restores_later = True
        else:
            self._at_once(self._restore)

    def _at_once(self, work: Callable[[], _T]) -> _T:
        try:
            with self._lock:
                if self._restores_later:  # an interrupt, or a fork, has kept it from being done
                    self._restore()
                return work()
        finally:
            if self._restores_later:
                self.restore()

    def _restore(self) -> None:
        self._put_all_back()
        self._restores_later = False  # last: after an interrupt before it the next call does the rest

    def _visible(self) -> dict[str, str]:
        seen = dict(self._target)
        for name in self._written:
            value = self._seen(name)
            if value is None:
                seen.pop(name, None)
            else:
                seen[name] = value
        return seen

    def _export(self, values: Mapping[str, str]) -> list[str]:
        before = {name: value for name in values if (value := self._seen(name)) is not None}
        kept = {name for name in SOCKET_INTERFACES if before.get(name)}
        wanted = {name: value for name, value in values.items() if name not in kept}
        self._put_all_back()
        for name, value in wanted.items():
            # Save the value first: after an interrupt or a fork at this point, the current value still counts as the
            # user's.
            self._written[name] = (value, before.get(name))
            self._target[name] = value
        return _replaced(before, wanted)

    def _put_all_back(self) -> None:
        for name in list(self._written):
            self._put_back(name)

    def _seen(self, name: str) -> str | None:
        """Return one variable as `visible` shows it: reading all of them costs as much as a round trip."""
        value = self._target.get(name)
        if name in self._written:
            written, previous = self._written[name]
            return previous if value == written else value
        return value

    def _put_back(self, name: str) -> None:
        written, previous = self._written[name]
        if self._target.get(name) == written:
            if previous is None:
                self._target.pop(name, None)
            else:
                self._target[name] = previous
        del self._written[name]  # last: after an interrupt before it there is nothing left to put back


process_environment = Environment(os.environ)
"""The environment of this process."""


def variables(formation: Formation, *, named: bool) -> dict[str, str]:
    """Return what to export for a job that has formed. ``GROUP_RANK`` is torchrun's name for ``NODE_RANK``.

    Args:
        formation: the job.
        named: whether the user named the interface.
    """
    place = formation.place
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": formation.store_address,
        "MASTER_PORT": str(formation.store_port),
        **socket_interfaces(formation.interface, named=named),
    }


def socket_interfaces(interface: str, *, named: bool) -> dict[str, str]:
    """Return the variables that name an interface to torch's backends.

    ``NCCL_SOCKET_IFNAME`` is among them only when the user named the interface, because it switches off NCCL's own
    choice of InfiniBand and of several interfaces; its ``=`` asks for exactly that name, where a bare name is a
    prefix (NCCL's documentation).

    Args:
        interface: the interface that reaches the others.
        named: whether the user named it.
    """
    told = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    if named:
        told["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return told


def _replaced(before: Mapping[str, str], written: Mapping[str, str]) -> list[str]:
    """Return a sentence for each value that the user had set and that has become another one."""
    differing = {name for name in written if before.get(name) and before[name] != written[name]}
    notes = []
    pair = ("MASTER_ADDR", "MASTER_PORT")
    if differing.intersection(pair):
        found = " ".join(f"{name}={before[name]}" for name in pair if before.get(name))
        new = " ".join(f"{name}={written[name]}" for name in pair if name in written)
        notes.append(
            f"{found} was set; mingle replaced it with {new}, the address of this job's rank 0. Unset both to avoid "
            "this warning"
        )
    notes.extend(
        f"the environment had {name}={before[name]}; mingle replaced it with {name}={written[name]}, which is "
        "this process's place in the job"
        for name in written
        if name in differing.difference(pair)
    )
    return notes
