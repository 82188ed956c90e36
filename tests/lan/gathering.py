"""Whole jobs in a few lines: machines, processes and what is expected of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from mingle.errors import MingleError
from mingle.protocol.events import Address
from mingle.protocol.machine import Context, Endpoints, Formation, Identity, Mesh
from mingle.protocol.node import Node
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram, Kind, encode
from mingle.wire.frames import ProcessInfo
from tests.lan.invariants import Invariants
from tests.lan.network import Machine, Network, Packet, Segment
from tests.lan.process import Process
from tests.lan.processor import Processor
from tests.lan.world import World
from tests.support.recording import Recording

TIMEOUT_SECONDS = 60.0


class Gathering:
    """A world with one network, in which jobs are started by hand."""

    def __init__(
        self,
        seed: int,
        *,
        size: int = 4,
        loss: float = 0.0,
        timeout: float = TIMEOUT_SECONDS,
        job: str = "job",
        secret: bytes | None = None,
        duplicates: bool = False,
        checked: bool = True,
        tracing: bool = False,
        mesh: Mesh = "off",
    ) -> None:
        self.mesh = mesh
        self.world = World(seed, tracing=tracing)
        self.network = Network(self.world)
        self.lan = self.network.segment("lan")
        self.lan.loss = loss
        self.size = size
        self.timeout = timeout
        self.job = job
        self.secret = secret
        self.invariants = Invariants(self.world, duplicates=duplicates)
        if not checked:
            # Strangers take part: what they are told and say is no promise of ours.
            self.world.watchers.clear()
        self.processes: list[Process] = []
        self.orders: dict[str, bytes] = {}
        """The orders of machines; a process on another machine has none."""
        self._pids = 100

    @property
    def rng(self) -> random.Random:
        """The world's dice."""
        return self.world.rng

    @property
    def now(self) -> float:
        """The world's time."""
        return self.world.now

    # --- making processes ------------------------------------------------------------------------------------------

    def host(self, machine: str = "m0", *, at: float = 0.0, **settings: Any) -> Process:
        """Plans the start of rank 0."""
        return self._start(machine, 0, at, **settings)

    def member(self, rank: int, machine: str | None = None, *, at: float = 0.0, **settings: Any) -> Process:
        """Plans the start of a rank that is not the host; without a machine, on one of its own."""
        return self._start(machine or f"m{rank}", rank, at, **settings)

    def elector(self, machine: str, *, at: float = 0.0, **settings: Any) -> Process:
        """Plans the start of a process that is given no rank."""
        return self._start(machine, None, at, **settings)

    def everybody(self, starts: Sequence[float] | None = None, **settings: Any) -> list[Process]:
        """Plans the start of all ranks, each on a machine of its own; returns them in order of rank."""
        starts = starts or [0.0] * self.size
        host = self.host(at=starts[0], **settings)
        return [host, *(self.member(rank, at=starts[rank], **settings) for rank in range(1, self.size))]

    def again(self, process: Process, *, at: float = 0.0) -> Process:
        """Plans the start of the same rank on the same machine: a new process."""
        return self._start(process.machine.name, process.identity.rank, at, processor=process.processor)

    def say(self, machine: str, message: Datagram, *, secret: bytes | None = None) -> None:
        """Have somebody on a machine multicast a message: on the job's group, through every interface."""
        where = self.network.machine(machine)
        key = None if secret is None else JobKey(secret, message.job)
        for nic in where.nics:
            self.network.multicast(message.job, nic, Packet(encode(message, key)), browse=False)

    def _start(
        self,
        machine: str,
        rank: int | None,
        at: float,
        *,
        job: str | None = None,
        size: int | None = None,
        timeout: float | None = None,
        secret: bytes | str | None = "",
        attempt: str = "",
        kind: Kind = "ranks",
        node: str | None = None,
        ready_after: float | None = 0.2,
        interfaces: tuple[str, ...] | None = None,
        advertised: tuple[str, ...] = (),
        processor: Processor | None = None,
    ) -> Process:
        where = self.network.machine(machine)
        self._pids += 1
        name = self.job if job is None else job
        held = self.secret if isinstance(secret, str) else secret
        key = None if held is None else JobKey(held, name)
        identity = Identity(
            job=name,
            attempt=attempt,
            member=self.world.identifier(),
            rank=rank,
            world_size=self.size if size is None else size,
            node=node or machine,
            who=ProcessInfo(hostname=machine, pid=self._pids, address=where.nics[0].address, rank=rank),
            kind=kind,
            order=self.orders.get(machine, b""),
        )
        seconds = self.timeout if timeout is None else timeout

        def build(recording: Recording, now: float) -> Node:
            dice = random.Random(recording.draw(lambda: self.world.rng.getrandbits(64)))
            new_id = functools.partial(recording.draw, self.world.new_id)
            new_session = functools.partial(recording.draw, self.world.identifier)
            context = Context(key=key, new_id=new_id, rng=dice, timeout=seconds, mesh=self.mesh)
            if rank and self.mesh == "off":
                return Node(identity, None, context, now)
            nics = recording.draw(lambda: [nic for nic in where.nics if interfaces is None or nic.name in interfaces])
            addresses = tuple(Address(nic.address, nic.name, nic.prefix_length) for nic in nics)
            port = 20_000 + new_id() % 20_000
            endpoints = Endpoints(addresses=addresses, port=port, advertised=advertised)
            return Node(identity, endpoints, context, now, new_session=new_session)

        process = Process(
            self.network,
            where,
            identity,
            build,
            key=key,
            ready_after=ready_after,
            interfaces=interfaces,
            processor=processor,
        )
        self.processes.append(process)
        self.world.at(self.world.now + at, process.start)
        return process

    def machine(self, process_or_name: Process | str) -> Machine:
        """A machine by its name or by a process on it."""
        if isinstance(process_or_name, Process):
            return process_or_name.machine
        return self.network.machine(process_or_name)

    def segment(self, name: str) -> Segment:
        """A segment by its name."""
        return self.network.segment(name)

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, seconds: float | None = None) -> None:
        """Run until every process that lives has an outcome or a failure, or so long."""
        limit = (self.timeout + 120.0) if seconds is None else seconds
        self.world.run(limit, until=None if seconds is not None else self.settled)

    def settled(self) -> bool:
        """Whether nobody waits any more."""
        return all(each.finished or (each.core is not None and not each.alive) for each in self.processes)

    def formed(self) -> list[Process]:
        """The processes that have an outcome."""
        return [each for each in self.processes if each.outcome is not None]

    def expect_formed(self, processes: Sequence[Process] | None = None, *, within: float | None = None) -> None:
        """Demands that these (or all) have formed one job, not later than so many seconds after the last start."""
        expected = self.processes if processes is None else processes
        for process in expected:
            assert process.outcome is not None, f"{process.name}: {process.failure}"
        assert len({outcome_of(process).session for process in expected}) == 1
        if within is not None:
            last = max(process.started_at for process in expected)
            end = max(process.formed_at or 0.0 for process in expected)
            assert end - last < within, f"GO {end - last:.3f} s after the last start"


def outcome_of(process: Process) -> Formation:
    """Its outcome, which it must have."""
    assert process.outcome is not None, f"{process.name}: {process.failure}"
    return process.outcome


def failure_of(process: Process) -> MingleError:
    """Its failure, which it must have."""
    assert process.failure is not None, f"{process.name} has not failed"
    return process.failure
