"""A gathering without a network: the agents of this process share a store, and a test says what is lost."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from mingle.elastic.gathering import Gathered
from mingle.engine.store import StoreServer, open_server
from mingle.errors import DiscoveryTimeoutError
from mingle.protocol.machine import Formation
from mingle.wire import frames


def set_last_call(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have an incomplete round wait so long for further nodes from now on: shortly where a node is to continue alone.

    Where all nodes come, a round is complete without it, and on a busy machine a short one would leave some behind.
    """
    monkeypatch.setattr(RendezvousTimeout, "last_call", timedelta(seconds=seconds))


@dataclass
class Place:
    """What the agents of one job share."""

    generation: int = 0
    server: StoreServer | None = None
    members: list[FixedGathering] = field(default_factory=list)
    handlers: list[RendezvousHandler] = field(default_factory=list)
    """All that a test has made, to be shut down at its end however it ends."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> StoreServer:
        """The store of the present generation, opened by whoever asks first."""
        with self.lock:
            if self.server is None:
                self.server = open_server("0.0.0.0", None, secrets.token_bytes(16))
            return self.server

    def lose(self, reason: str = "the host is gone") -> None:
        """The host dies: its store, and the gathering of all."""
        with self.lock:
            server, self.server = self.server, None
            self.generation += 1
        assert server is not None
        server.abort()
        for member in self.members:
            member.lost = reason
            member.session_lost.set()

    def end(self, reason: str = "its agent has finished") -> None:
        """The host ends the job on purpose."""
        for member in self.members:
            member.ended = reason
            member.session_lost.set()
        self.close()

    def close(self) -> None:
        """The store goes."""
        with self.lock:
            server, self.server = self.server, None
        if server is not None:
            server.abort()


class FixedGathering:
    """Stands in for `mingle.elastic.gathering.Gathering`."""

    def __init__(self, place: Place, *, timeout: bool = False) -> None:
        self.lost: str | None = None
        self.ended: str | None = None
        self.session_lost = threading.Event()
        self.held = True
        self.ending = False
        self.gathered = 0
        self.done = False
        self.closed: str | None = None
        self.member = secrets.token_bytes(16)
        self.absent: set[bytes] = set()
        self._hosts = not place.members
        self._place = place
        self._timeout = timeout
        place.members.append(self)
        # Each agent reaches the store at an address of its own: the connections of one are told apart by it.
        self._address = f"127.0.0.{1 + len(place.members)}"

    @property
    def state(self) -> FixedGathering:
        """What the loop publishes."""
        return self

    def gather(self) -> Gathered:
        if self._timeout:
            raise DiscoveryTimeoutError.explain("1 of 2 nodes", cause="b was not started", remedy="start it")
        self.lost = None
        self.session_lost.clear()
        self.gathered += 1
        server = self._place.open()
        formation = Formation(
            session=server.session,
            place=frames.Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1),
            store_address=self._address,
            store_port=server.port,
            interface="lo",
            address="127.0.0.1",
            roster_digest=b"",
        )
        return Gathered(formation, self._place.generation)

    @property
    def present(self) -> frozenset[bytes] | None:
        if not self._hosts:
            return None
        return frozenset(member.member for member in self._place.members) - self.absent

    def await_round(self, is_over: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (self.session_lost.is_set() or is_over() or time.monotonic() > deadline):
            if self.held:
                return True
            self.session_lost.wait(0.02)
        return False

    def workers_done(self) -> None:
        self.done = True

    def close(self, reason: str) -> None:
        self.closed = reason
