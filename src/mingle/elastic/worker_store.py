"""The stores of a round: a place in the agents' store for torchrun itself, and a store for the workers."""

from __future__ import annotations

import contextlib
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStoreInfo

from mingle.engine import store
from mingle.errors import MingleError
from mingle.protocol.machine import Formation, scoped
from mingle.wire.frames import Begin


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of a round.

    Attributes:
        agents: the agents' store, with the round's prefix.
        workers: where the workers' store is.
        server: the workers' store, on agent 0; None on the others.
    """

    agents: Store
    workers: RendezvousStoreInfo
    server: store.StoreServer | None


def meet(formation: Formation, begun: Begin, *, local_addr: str | None, read_seconds: float) -> Stores:
    """Open or find the workers' store of a round. This blocks until agent 0 has opened it: call it in a thread.

    Each round has a connection of its own to the agents' store. A call that waits in a client blocks all its later
    calls, and nothing but the end of the connection ends it.

    Args:
        formation: the session.
        begun: the round.
        local_addr: the value of ``--local-addr``, which the workers are told.
        read_seconds: how long a key of the agents' store is waited for.

    Raises:
        RendezvousConnectionError: the agents' store can't be reached.
        RuntimeError: it failed, or agent 0 was lost before it published the workers' store.
        MingleError: the workers' store can't be opened.
    """
    try:
        client = store.connect(formation.store_address, formation.store_port).hand_over()
    except OSError as error:
        raise RendezvousConnectionError(f"the agents' store can't be reached: {error}") from error
    client.set_timeout(timedelta(seconds=read_seconds))
    agents = PrefixStore(f"mingle/round/{begun.number}", client)
    own = scoped(formation.address, formation.interface)
    server = open_for_workers(own, local_addr) if begun.rank == 0 else None
    workers = RendezvousStoreInfo.build(
        begun.rank, agents, local_addr=local_addr or own, server_port=None if server is None else server.port
    )
    if server is None:  # a zone means nothing on another machine: each agent adds its own
        workers.master_addr = scoped(workers.master_addr.partition("%")[0], formation.interface)
    return Stores(agents, workers, server)


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
