"""For tests of what looks at jobs from outside: a wire between pure machines, and jobs on `lo`, no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from mingle.config.settings import Network
from mingle.observe.finder import Finder
from mingle.observe.observer import Observer, new_name, this_process
from mingle.protocol.effects import Answer, Dial, Effect, Hangup, Multicast, Notice, OpenStore, ProveStore, Reset, Write
from mingle.protocol.events import (
    Accepted,
    Address,
    BytesReceived,
    Connected,
    Disconnected,
    Event,
    Heard,
    Source,
    StoreOpened,
    StoreProved,
    TimerDue,
)
from mingle.protocol.host import Host
from mingle.protocol.machine import Context, Endpoints, Identity, Machine
from mingle.protocol.node import Node
from mingle.wire import datagrams, frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import BROWSE_GROUP

ROOT = Path(__file__).parents[2]
WHO = frames.ProcessInfo(hostname="bench", pid=4321)
STORE_PORT = 29500
"""Where the stores of the ranks here seem to listen."""


# --- a wire in memory ---------------------------------------------------------------------------------------


class Wire:
    """Joins pure machines, each on an address of its own, on a clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.machines: dict[str, Machine] = {}
        self.silent: set[str] = set()
        """Addresses that swallow connections instead of refusing them."""
        self.notices: list[str] = []
        self.new_id = itertools.count(1).__next__
        self._listeners: dict[tuple[str, int], str] = {}
        self._ends: dict[tuple[str, int], tuple[str, int]] = {}

    def add(self, address: str, machine: Machine, *ports: int) -> None:
        self.machines[address] = machine
        self._listeners |= {(address, port): address for port in ports}
        self.settle()

    def host(self, job: str = "resnet", address: str = "10.0.0.1", **options: Any) -> Rank:
        """Add the host of a job of one rank, which forms at once; options as for `a_formed_job`."""
        host = a_formed_job(self, job, address, **options)
        self.add(address, host, 5000)
        return host

    def look(self, job: str | None = "resnet", address: str = "10.0.0.2", **options: Any) -> Finder:
        """Add a finder; options as for `a_finder`."""
        finder = a_finder(self, job, **options)
        self.add(address, finder)
        return finder

    def remove(self, address: str) -> None:
        """Kill a machine: its connections break, its ports refuse."""
        del self.machines[address]
        self._listeners = {key: owner for key, owner in self._listeners.items() if owner != address}
        for (owner, conn), (other, far) in list(self._ends.items()):
            if owner == address:
                del self._ends[owner, conn], self._ends[other, far]
                if other in self.machines and far in self.machines[other].links:
                    self.machines[other].handle(Disconnected(far, "the other side closed it"), self.now)
        self.settle()

    def hear(self, address: str, message: datagrams.Datagram, sender: str, *, signed: bool = False) -> None:
        source = Source(interface="eth0", address=sender, signed=signed)
        self.machines[address].handle(Heard(message, source), self.now)
        self.settle()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        self.settle()
        while True:
            due = [timer for each in self.machines.values() if (timer := each.next_timer()) is not None]
            self.now = max(self.now, min([*due, end]))
            if self.now >= end:
                return
            for machine in list(self.machines.values()):
                timer = machine.next_timer()
                if timer is not None and self.now >= timer:
                    machine.handle(TimerDue(), self.now)
            self.settle()

    def settle(self) -> None:
        """Carry out what the machines want, until they want nothing more."""
        busy = True
        while busy:
            busy = False
            for address, machine in list(self.machines.items()):
                for effect in machine.effects():
                    busy = True
                    self._perform(address, machine, effect)

    def _perform(self, address: str, machine: Machine, effect: Effect) -> None:
        match effect:
            case Multicast(message):
                for other, far in list(self.machines.items()):
                    if other != address:
                        source = Source(interface="eth0", address=address, **_signature(machine, far))
                        far.handle(Heard(datagrams.decode(datagrams.encode(message)), source), self.now)
            case Answer(source, message):
                if source.address in self.machines:
                    back = Source(
                        interface="eth0",
                        address=address,
                        multicast=False,
                        **_signature(machine, self.machines[source.address]),
                    )
                    self.machines[source.address].handle(Heard(message, back), self.now)
            case Dial(conn, target, port, _):
                self._dial(address, machine, conn, target, port)
            case Write(conn, data):
                if (end := self._ends.get((address, conn))) is not None and end[1] in self.machines[end[0]].links:
                    self.machines[end[0]].handle(BytesReceived(end[1], data), self.now)
            case Hangup(conn) | Reset(conn):
                if (end := self._ends.pop((address, conn), None)) is not None:
                    self._ends.pop(end, None)
                    if end[1] in self.machines[end[0]].links:
                        self.machines[end[0]].handle(Disconnected(end[1], "the other side closed it"), self.now)
            case Notice(text):
                self.notices.append(text)
            case _:
                raise AssertionError(effect)

    def _dial(self, address: str, machine: Machine, conn: int, target: str, port: int) -> None:
        if target in self.silent:
            return
        owner = self._listeners.get((target, port))
        if owner is None:
            machine.handle(Disconnected(conn, "Connection refused (ECONNREFUSED)"), self.now)
            return
        far = self.new_id()
        self._ends[address, conn], self._ends[owner, far] = (owner, far), (address, conn)
        self.machines[owner].handle(Accepted(far, address), self.now)
        machine.handle(Connected(conn, address, "eth0"), self.now)


def _signature(speaker: object, hearer: object) -> dict[str, bool]:
    """Whether what one machine says is signed, and with the secret of the other."""
    key = speaker.key if isinstance(speaker, Rank) else None
    secret = hearer._secret if isinstance(hearer, Finder) else None
    if key is None or secret is None or not isinstance(speaker, Rank):
        return {"signed": key is not None}
    ours = JobKey(secret, speaker.rank.identity.job)
    return {"signed": True, "verified": ours.verify(b"", b"", key.mac(b"", b""))}


def finder_of(observer: Observer, job: str | None = None, kind: type[Finder] = Finder) -> Finder:
    """Return a finder that an observer can run."""
    return kind(
        job,
        member=new_name(),
        who=this_process(),
        secret=None,
        new_id=observer.driver.new_id,
        rng=observer.driver.rng,
        now=time.monotonic(),
    )


def a_finder(
    wire: Wire, job: str | None, *, secret: bytes | None = None, refresh: float | None = None, forgets: bool = False
) -> Finder:
    return Finder(
        job,
        member=bytes(15) + b"F",
        who=WHO,
        secret=secret,
        new_id=wire.new_id,
        rng=random.Random(7),
        now=wire.now,
        refresh=refresh,
        forgets=forgets,
    )


def a_formed_job(wire: Wire, job: str, address: str, *, name: bytes = b"A", secret: bytes | None = None) -> Rank:
    """The host of a job of one rank, which forms at once."""
    identity = _identity(job, 0, 1, member=name * 16)
    key = None if secret is None else JobKey(secret, job)
    context = Context(key=key, new_id=wire.new_id, rng=random.Random(8), timeout=60.0)
    endpoints = Endpoints(addresses=(Address(address, "eth0", 24),), port=5000)
    node = Node(identity, endpoints, context, wire.now, new_session=lambda: name * 16)
    return Rank(node, key, lambda: wire.now)


def _identity(job: str, rank: int, world_size: int, *, member: bytes) -> Identity:
    who = frames.ProcessInfo(hostname=f"node{rank}", pid=100 + rank, rank=rank)
    return Identity(job=job, attempt="", member=member, rank=rank, world_size=world_size, node="test", who=who)


class Rank:
    """A rank's machine, without a store: it seems to open and to be proved at once."""

    def __init__(self, rank: Node, key: JobKey | None, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.key = key
        self._clock = clock

    @property
    def host(self) -> Host:
        assert self.rank.host is not None
        return self.rank.host

    def effects(self) -> list[Effect]:
        done: list[Effect] = []
        while effects := self.rank.effects():
            for effect in effects:
                match effect:
                    case OpenStore(epoch):
                        self.rank.handle(StoreOpened(epoch, STORE_PORT, "token"), self._clock())
                    case ProveStore(epoch, session=session):
                        self.rank.handle(StoreProved(session, epoch), self._clock())
                    case Multicast() | Answer() | Dial() | Write() | Hangup() | Reset() | Notice():
                        done.append(effect)
        return done

    def next_timer(self) -> float | None:
        return self.rank.next_timer()

    def handle(self, event: Event, now: float) -> None:
        self.rank.handle(event, now)

    def calling(self) -> datagrams.Datagram | None:
        return self.rank.calling()

    @property
    def links(self) -> Container[int]:
        return self.rank.links

    def close(self, reason: str) -> None:
        self.rank.close(reason)


# --- jobs on lo, without torch ------------------------------------------------------------------------------


def _rank(observer: Observer, job: str, rank: int, world_size: int, key: JobKey | None) -> Rank:
    identity = _identity(job, rank, world_size, member=os.urandom(16))
    now = time.monotonic()
    context = Context(key=key, new_id=observer.driver.new_id, rng=observer.driver.rng, timeout=60.0)
    endpoints = observer.driver.control_port.listen(locally=False) if rank == 0 else None
    return Rank(Node(identity, endpoints, context, now), key, time.monotonic)


@contextlib.contextmanager
def gathering(
    job: str, port: int, ranks: Sequence[int], world_size: int, *, secret: bytes | None = None
) -> Iterator[Host | None]:
    """Ranks of a job on `lo`; entered when all of them have joined rank 0, and if these are all ranks, has formed.

    It yields rank 0, if that is one of them.
    """
    over, network = threading.Event(), Network(interfaces=("lo",), port=port, family="4")
    key = None if secret is None else JobKey(secret, job)
    with contextlib.ExitStack() as stack:
        driven = []
        for rank in ranks:
            observer = stack.enter_context(Observer(network, job, key))
            driven.append((observer, _rank(observer, job, rank, world_size, key)))
        joined = threading.Event()
        host = next((machine.rank.host for _, machine in driven if machine.rank.host is not None), None)

        def done() -> bool:
            if host is None or len(host.registrar.seats) == len(ranks) < world_size or host.outcome is not None:
                joined.set()
            return over.is_set()

        threads = [
            threading.Thread(target=observer.run, args=(machine,), kwargs={"until": None, "done": done})
            for observer, machine in driven
        ]
        for thread in threads:
            thread.start()
        try:
            assert joined.wait(60)
            yield host
        finally:
            over.set()
            while any(thread.is_alive() for thread in threads):
                _wake(port)
                for thread in threads:
                    thread.join(0.05)


def _wake(port: int) -> None:
    """Send a datagram that means nothing to every loop on `lo`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        sender.sendto(b"wake", (BROWSE_GROUP.ipv4, port))


# --- commands -----------------------------------------------------------------------------------------------


def command_environment(port: int, **variables: str) -> dict[str, str]:
    """The environment of a command on `lo`."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT / "src"), "MINGLE_INTERFACE": "lo", "MINGLE_PORT": str(port), **variables}


def patched_path(folder: Path, code: str) -> str:
    """Return a PYTHONPATH by which every Python of this environment runs the code before its program."""
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return f"{folder}{os.pathsep}{ROOT / 'src'}"


def run_command(*arguments: str, port: int, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `mingle-discover` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mingle", *arguments],
        env=command_environment(port, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == expect, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done
