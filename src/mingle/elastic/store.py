"""The TCPStores of torchrun's agents: clients of the gathering's, and a fresh one for the workers of each round.

The gathering's store is held by the gathering alone. Here are only its clients, so it ends when the gathering says so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore

from mingle.engine import store
from mingle.errors import MingleError


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
    for number in store.own_descriptors():
        # The socket was closed meanwhile, or is not connected.
        with contextlib.suppress(OSError, ValueError), store.own_socket(number) as own:
            if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
                host, peer_port = own.getpeername()[:2]
                if (_plain(host), peer_port) == peer:
                    own.shutdown(socket.SHUT_RDWR)


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
