"""What torchrun's agents do with TCPStores: clients of the gathering's, and a fresh one for the workers of each round.

The gathering's store is held by the gathering alone. Here are only its clients, so it ends when the gathering says so.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from mingle.engine import store
from mingle.errors import MingleError

_T = TypeVar("_T")

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""With it begin the keys of the barrier in which an agent whose workers are done waits for the others."""


def connect(address: str, port: int, seconds: float) -> TCPStore:
    """Returns a new client of a store. May block for long.

    Raises:
        OSError: nobody listens there, or nobody answers.
        RuntimeError: torch's client failed.
    """
    # A plain connection goes first: TCPStore's constructor blocks for a minute or more where nobody answers.
    socket.create_connection((address, port), timeout=store.CONNECT_SECONDS).close()
    # If the store goes away in between, the constructor dials again until its timeout, and nothing can end that.
    dialling = timedelta(seconds=min(seconds, store.PROVE_SECONDS))
    client = TCPStore(address, port, is_master=False, timeout=dialling, wait_for_workers=False)
    client.set_timeout(timedelta(seconds=seconds))
    return client


def sever(address: str, port: int) -> None:
    """Shuts every connection of this process to a store down, so that whoever is blocked in one fails now.

    Torch has no call for it. Without it a call that was given up would go on once the link is back, and take a seat
    in a rendezvous that this agent has left.
    """
    peer = _plain(address), port
    descriptors = Path("/dev/fd")  # Linux and macOS
    for name in [entry.name for entry in descriptors.iterdir()] if descriptors.is_dir() else ():
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or connected to nobody
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    host, number = copy.getpeername()[:2]
                    if (_plain(host), number) == peer:
                        copy.shutdown(socket.SHUT_RDWR)


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an address without a zone, and without the form in which IPv6 sockets write IPv4 addresses."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def open_for_workers(address: str, local_addr: str | None) -> store.StoreServer:
    """Opens the store of one round, on a listening socket of our own that is never let go of.

    Torch would look for a free port, release it, and hope (``get_free_port``), or hand out the store of the first
    round again, with its keys.

    Args:
        address: this agent's address, as the gathering found it.
        local_addr: what the user gave as ``--local-addr``. The workers are told that, so it is listened on: as it
            is, or, where address translation hides this host or it is a name of another one, on every address.

    Raises:
        MingleError: the address can't be listened on.
    """
    if local_addr is None:
        return store.open_server(address, None, secrets.token_bytes(16))
    candidates: Sequence[str] = ()
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(local_addr, None, type=socket.SOCK_STREAM)
        candidates = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    for candidate in candidates:
        with contextlib.suppress(MingleError):
            return store.open_server(candidate, None, secrets.token_bytes(16))
    return store.open_server("::" if ":" in address else "0.0.0.0", None, secrets.token_bytes(16))


class RoundStore(PrefixStore):
    """The store that an agent is given for one round: each operation of it ends when the gathering is lost.

    The agent exchanges its role there, and waits there for the others when its workers are done. It calls in its main
    thread, which nothing must block for minutes.
    """

    def __init__(
        self,
        prefix: str,
        inner: Store,
        call: Callable[[Callable[[], Any]], Any],
        exit_barrier: Callable[[], None],
    ) -> None:
        """Wraps a store.

        Args:
            prefix: put before every key.
            inner: the store.
            call: makes a call that may block, and ends the waiting for it when that is in vain.
            exit_barrier: told when this agent's workers are done.
        """
        super().__init__(prefix, inner)
        self._call = call
        self._exit_barrier = exit_barrier

    def add(self, key: str, amount: int) -> int:
        """As `torch.distributed.Store.add`."""
        if key.startswith(EXIT_BARRIER):
            self._exit_barrier()
        return self._bounded(super().add, key, amount)

    def set(self, key: str, value: Any) -> None:
        """As `torch.distributed.Store.set`."""
        self._bounded(super().set, key, value)

    def get(self, key: str) -> bytes:
        """As `torch.distributed.Store.get`."""
        return self._bounded(super().get, key)

    def wait(self, *arguments: Any) -> None:
        """As `torch.distributed.Store.wait`."""
        self._bounded(super().wait, *arguments)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As `torch.distributed.Store.multi_get`."""
        return self._bounded(super().multi_get, keys)

    def multi_set(self, keys: list[str], values: Any) -> None:
        """As `torch.distributed.Store.multi_set`."""
        # Torch's stubs leave this one out.
        self._bounded(super().multi_set, keys, values)  # type: ignore[misc]

    def check(self, keys: list[str]) -> bool:
        """As `torch.distributed.Store.check`."""
        return self._bounded(super().check, keys)

    def _bounded(self, function: Callable[..., _T], *arguments: Any) -> _T:
        result: _T = self._call(functools.partial(function, *arguments))
        return result
