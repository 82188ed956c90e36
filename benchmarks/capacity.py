"""What rank 0 can carry: a real host, and members that are machines in a few processes whose CPU does not count."""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
import threading
import time
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

from tests.lab import Lab, report
from torch.distributed import TCPStore

import mingle
from benchmarks.results import Comparison
from benchmarks.samples import alternate, ratio
from mingle.config import settings
from mingle.config.settings import Arguments, Settings
from mingle.engine import store
from mingle.engine.driver import Driver
from mingle.engine.party import make_room
from mingle.protocol import events
from mingle.protocol.effects import Dial, Effect, ProveStore
from mingle.protocol.events import (
    BytesReceived,
    Connected,
    Disconnected,
    Heard,
    StoreProved,
    StoreUnreachable,
    TimerDue,
)
from mingle.protocol.machine import Context, Identity
from mingle.protocol.node import Node
from mingle.wire.datagrams import Datagram
from mingle.wire.frames import ProcessInfo

SIZES = (256, 1024)
CROWDS = 2
"""The processes that drive the members."""
STORE_THREADS = 8
FILES_PER_MEMBER = 4
PORT = 29400
TIMEOUT = 300.0

TEXT = """\
Rank 0's own CPU from its call of `discover` until GO. Its members are state machines on two other hosts, with real
connections and proofs of the session and the store, but without the mesh: none of them accepts its connections. The
other contender is a TCPStore alone, to which as many clients connect."""


def run(rounds: int) -> Comparison:
    """Measure; a round of 1,024 members takes ten seconds on two cores. CI guards the smaller size only."""
    samples: dict[str, list[float]] = {}
    for size in SIZES[:1] if rounds < 10 else SIZES:
        contenders = {name: partial(_round, name, size) for name in ("mingle", "TCPStore")}
        taken = alternate(min(rounds, max(3, rounds * 256 // size)), contenders)
        samples |= {f"{name}, {size} members": values for name, values in taken.items()}
    guarded = f"{SIZES[0]} members"
    return Comparison(
        name="capacity",
        title="What rank 0 can carry",
        text=TEXT,
        unit="ms of CPU",
        samples=samples,
        ratios={guarded: ratio(samples[f"mingle, {guarded}"], samples[f"TCPStore, {guarded}"])},
    )


def _round(contender: str, size: int, _round: int) -> float:
    """Return the milliseconds of CPU that rank 0 used."""
    host, others = {"mingle": (_host, members), "TCPStore": (_server, _clients)}[contender]
    with Lab() as lab:
        network = lab.network()
        first, *rest = [lab.host(network) for _ in range(CROWDS + 1)]
        waiting = [
            each.start(others, first.address(), range(1 + index, size + 1, CROWDS), size)
            for index, each in enumerate(rest)
        ]
        for each in waiting:
            each.wait_for("waiting", TIMEOUT)
        used = float(first.start(host, size).wait_for("done", TIMEOUT)["cpu"])
        for each in waiting:
            each.wait_for("done", TIMEOUT)
        return used * 1e3


# --- mingle --------------------------------------------------------------------------------------------------------


def _host(size: int) -> None:
    cpu = time.process_time()
    job = mingle.discover("capacity", rank=0, world_size=size + 1, discovery_timeout=TIMEOUT)
    report("done", cpu=time.process_time() - cpu)
    threading.Event().wait()
    del job


def members(_address: str, ranks: range, size: int) -> None:
    """Join rank 0 with so many members, report ``waiting`` and ``done``, and stay."""
    arguments = Arguments(job_id="capacity", rank=ranks[0], world_size=size + 1, discovery_timeout=TIMEOUT)
    wanted = settings.resolve({}, arguments)
    make_room(len(ranks), FILES_PER_MEMBER, what="members", quiet=False)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(STORE_THREADS) as threads:
        crowd = Crowd(wanted, ranks, threads, stack)
        report("waiting")
        crowd.run()
        report("done")
        crowd.serve()


class Crowd:
    """Many members behind one driver: a connection's events go to the member that dialed, datagrams to all."""

    def __init__(
        self, wanted: Settings, ranks: range, threads: ThreadPoolExecutor, stack: contextlib.ExitStack
    ) -> None:
        self._threads = threads
        self._owners: dict[int, int] = {}
        self._timers: list[tuple[float, int]] = []
        self._stirred: set[int] = set()
        self._clients: list[store.StoreClient] = []
        self._proving = -1
        self._driver = Driver(wanted, wanted.job_id, None, stack, perform=self._perform)
        now = time.monotonic()
        # A context of its own for each: it has the connections and the effects of one member.
        self._members = [
            Node(
                _identity(wanted, rank),
                None,
                Context(key=None, new_id=self._driver.new_id, rng=self._driver.rng, timeout=TIMEOUT),
                now,
            )
            for rank in ranks
        ]
        self._stirred.update(range(len(self._members)))
        self._driver.drive(self)

    def run(self) -> None:
        """Drive them until all have heard GO."""
        self._driver.carry_out()
        while not all(each.outcome for each in self._members):
            self._driver.turn(time.monotonic() + 1.0)
            failed = next((each.failure for each in self._members if each.failure is not None), None)
            if failed is not None:
                raise failed

    def serve(self) -> None:
        """Answer for them until the process ends."""
        while True:
            self._driver.turn()

    # --- the store -------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, ProveStore):
            member = self._proving
            self._threads.submit(self._prove, member, effect)

    def _prove(self, number: int, wanted: ProveStore) -> None:
        try:
            self._clients.append(store.prove(wanted.address, wanted.port, wanted.session, wanted.token))
        except OSError as error:
            event: events.Event = StoreUnreachable(wanted.session, wanted.epoch, str(error))
        else:
            event = StoreProved(wanted.session, wanted.epoch)
        self._driver.call(partial(self._stir, number, event, time.monotonic()))

    # --- the machine that the driver sees --------------------------------------------------------------------------

    def _stir(self, number: int, event: events.Event, now: float) -> None:
        self._members[number].handle(event, now)
        self._stirred.add(number)

    def handle(self, event: events.Event, now: float) -> None:
        """Have the members that an event concerns process it."""
        match event:
            case Heard():  # every process of a group hears it
                for number in range(len(self._members)):
                    self._stir(number, event, now)
            case Connected(conn) | BytesReceived(conn) | Disconnected(conn):
                self._stir(self._owners[conn], event, now)
            case TimerDue():
                self._handle_timer(now)
            case _:
                raise AssertionError(f"members listen nowhere, and the crowd has one driver: {event}")

    def effects(self) -> list[Effect]:
        """Hand out the effects of one member at a time, so that a proof of the store is known to be its own."""
        while self._stirred:
            number = self._stirred.pop()
            member = self._members[number]
            effects = member.effects()
            for effect in effects:
                if isinstance(effect, Dial):
                    self._owners[effect.conn] = number
            due = member.next_timer()
            if due is not None:
                heapq.heappush(self._timers, (due, number))
            if effects:
                self._proving = number
                self._stirred.add(number)
                return effects
        return []

    def next_timer(self) -> float | None:
        """Return the earliest timer; one that is out of date costs a `TimerDue` and no more."""
        return self._timers[0][0] if self._timers else None

    def _handle_timer(self, now: float) -> None:
        """Act for one member that is due: the others hear what it asks before their turn, as other processes would."""
        while self._timers and self._timers[0][0] <= now:
            number = heapq.heappop(self._timers)[1]
            due = self._members[number].next_timer()
            if due is not None and due <= now:
                self._stir(number, TimerDue(), now)
                return

    def calling(self) -> Datagram | None:
        """Return nothing: no member has unicast peers."""
        return None

    def showing(self) -> None:
        """Return nothing: no member shows anything in a shared directory."""
        return

    @property
    def links(self) -> Container[int]:
        """The connections of all members."""
        return self

    def __contains__(self, conn: object) -> bool:
        number = self._owners.get(conn) if isinstance(conn, int) else None
        return number is not None and conn in self._members[number].links

    def close(self, reason: str) -> None:
        """End all members."""
        for member in self._members:
            member.close(reason)


def _identity(wanted: Settings, rank: int) -> Identity:
    return Identity(
        job=wanted.job_id,
        attempt="",
        member=os.urandom(16),
        rank=rank,
        world_size=wanted.placement.world_size,
        node=socket.gethostname(),
        who=ProcessInfo(hostname=socket.gethostname(), pid=os.getpid(), rank=rank),
    )


# --- a bare store --------------------------------------------------------------------------------------------------


def _server(size: int) -> None:
    make_room(size, FILES_PER_MEMBER, what="clients", quiet=False)
    cpu = time.process_time()
    server = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    server.wait(["all"])
    report("done", cpu=time.process_time() - cpu)
    threading.Event().wait()


def _clients(address: str, ranks: range, size: int) -> None:
    make_room(len(ranks), FILES_PER_MEMBER, what="clients", quiet=False)
    report("waiting")
    with ThreadPoolExecutor(STORE_THREADS) as threads:
        kept = list(threads.map(partial(_client, address, size), ranks))
        report("done")
        threading.Event().wait()
        del kept


def _client(address: str, size: int, _rank: int) -> TCPStore:
    client = TCPStore(address, PORT, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    if client.add("clients", 1) == size:
        client.set("all", "1")
    return client
