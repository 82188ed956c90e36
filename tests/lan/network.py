"""Machines and the segments between them; datagrams get lost, doubled, late and out of order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram, Rejected, decode, is_signed
from tests.lan.world import World

if TYPE_CHECKING:
    from tests.lan.process import Endpoint, Process
    from tests.lan.tcp import Connection


RECORDED = 200

Barrier: TypeAlias = Literal["drop", "reset", "icmp"]
"""What a firewall does: say nothing, answer for the receiver with a TCP reset, or with ICMP port unreachable."""


@dataclass(eq=False, slots=True)
class Segment:
    """One broadcast domain."""

    name: str
    loss: float = 0.0
    duplicates: float = 0.0
    delay: tuple[float, float] = (0.0001, 0.001)
    """The least and the greatest delay in seconds; the spread is what reorders datagrams."""
    tcp_delay: tuple[float, float] = (0.0001, 0.001)
    multicast: bool = True
    nics: list[Nic] = field(default_factory=list)
    tcp_again: tuple[float, float] = (0.01, 0.4)
    """How long after a way is back what was lost on it is sent again: TCP waits ever longer."""
    parted: dict[tuple[str, str], Barrier] = field(default_factory=dict)
    """Pairs (from, to) of machines between which nothing passes, and what the sender is told."""
    closed: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (from, to) between which no connection can be opened any more, and those that stand go on: a stateful
    firewall was enabled."""
    deaf: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (from, to) between which no datagram passes: a one-way path."""
    no_multicast: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (from, to) between which no multicast passes: a switch has lost a membership."""


@dataclass(eq=False, slots=True)
class Nic:
    """A machine's interface."""

    machine: Machine
    name: str
    address: str
    segment: Segment | None = None
    prefix_length: int = 24
    up: bool = True


@dataclass(eq=False, slots=True)
class Machine:
    """A computer: interfaces, and processes that share its ports."""

    name: str
    nics: list[Nic] = field(default_factory=list)
    listeners: dict[int, Endpoint] = field(default_factory=dict)
    stores: dict[int, Process] = field(default_factory=dict)
    filtered: set[str] = field(default_factory=set)
    """Own addresses at which connections from outside are dropped without a word."""
    takes_calls: bool = True
    """Whether connections from outside come in at all; its own go out in any case."""
    processes: list[Process] = field(default_factory=list)
    rate: float = 0.0
    """How fast its clock runs, where that matters."""
    opening: tuple[float, float] = (0.001, 0.02)
    """How long a store takes to open."""
    stores_shut: bool = False
    """Whether no store can be reached from here."""
    addresses: set[str] = field(default_factory=set)
    """Every address that it ever had."""
    nat: str = ""
    """The address of a gateway from which its connections seem to come."""

    def nic(self, address: str) -> Nic | None:
        """The interface that owns an address."""
        return next((nic for nic in self.nics if nic.address == address), None)


@dataclass(frozen=True, slots=True)
class Route:
    """A way for connections from one machine to an address of another, or of the same one."""

    near: Nic
    far: Nic

    @property
    def alive(self) -> bool:
        """Whether packets pass, both ways."""
        if self.near.machine is self.far.machine:
            return True
        return self.passes(self.near.machine, self.far.machine) and self.passes(self.far.machine, self.near.machine)

    def passes(self, sender: Machine, receiver: Machine) -> bool:
        """Whether packets pass in this direction."""
        if sender is receiver:
            return True
        return self.near.up and self.far.up and self.barrier(sender, receiver) is None

    @property
    def opens(self) -> bool:
        """Whether a connection can be opened from the near end to the far one."""
        segment, sender, receiver = self.near.segment, self.near.machine, self.far.machine
        return self.alive and (segment is None or (sender.name, receiver.name) not in segment.closed)

    def barrier(self, sender: Machine, receiver: Machine) -> Barrier | None:
        """What a firewall does with packets in this direction, if there is one."""
        segment = self.near.segment
        assert segment is not None
        return segment.parted.get((sender.name, receiver.name))


class Packet:
    """A datagram under way; what it means is worked out once per key."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.signed = is_signed(data)
        self.opened = functools.cache(self._open)

    def _open(self, key: JobKey | None) -> Datagram | Rejected:
        try:
            return decode(self.data, key)
        except Rejected as rejected:
            return rejected


class Network:
    """All segments and machines of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.segments: dict[str, Segment] = {}
        self.machines: dict[str, Machine] = {}
        self.connections: set[Connection] = set()
        self.recorded: list[tuple[str, Nic, Packet, bool]] = []
        """The first datagrams that were sent, for somebody who plays them again."""
        self.timed_out_at = float("-inf")
        """When an end was last told that its connection is dead: until then it can't know."""
        self.watchers: list[Callable[[], None]] = []
        """What is called whenever some way begins or ends."""
        world.networks.append(self)

    def segment(self, name: str = "lan") -> Segment:
        """Return the segment of that name; make it when it is new."""
        return self.segments.setdefault(name, Segment(name))

    def machine(self, name: str) -> Machine:
        """Return the machine of that name; a new one has an interface on the segment ``lan``."""
        if name not in self.machines:
            self.machines[name] = Machine(name)
            number = len(self.machines)
            self.plug(name, "eth0", f"10.0.{number >> 8}.{number & 255}", "lan", 16)
        return self.machines[name]

    def bare_machine(self, name: str) -> Machine:
        """Make a machine without interfaces."""
        return self.machines.setdefault(name, Machine(name))

    def plug(self, machine: str, name: str, address: str, segment: str | None = None, prefix_length: int = 24) -> Nic:
        """Give a machine an interface, on a segment or (a virtual bridge) on none."""
        owner = self.machines[machine]
        where = None if segment is None else self.segment(segment)
        nic = Nic(owner, name, address, where, prefix_length)
        owner.nics.append(nic)
        owner.addresses.add(address)
        if where is not None:
            where.nics.append(nic)
        return nic

    def unplug(self, nic: Nic) -> None:
        """Take an interface away, with its address."""
        self.world.note(f"{nic.machine.name} loses {nic.name} {nic.address}")
        nic.machine.nics.remove(nic)
        if nic.segment is not None:
            nic.segment.nics.remove(nic)
        nic.up = False
        self._ways_changed()

    def scan(self, machine: Machine) -> None:
        """Have the processes of a machine look at its interfaces."""
        for process in list(machine.processes):
            process.scan()

    # --- datagrams -------------------------------------------------------------------------------------------------

    def multicast(self, job: str, nic: Nic, packet: Packet, *, browse: bool, sender: Process | None = None) -> None:
        """Send to everybody on a segment who has joined the group, the sender's own machine included."""
        self.world.counts["datagrams"] += 1
        if len(self.recorded) < RECORDED:
            self.recorded.append((job, nic, packet, browse))
        for process in nic.machine.processes:
            if browse or process.identity.job == job:
                self.world.after(0.0001, functools.partial(process.heard, packet, nic, sender, nic, True))
        if nic.segment is None or not nic.up or not nic.segment.multicast:
            return
        for other in nic.segment.nics:
            names = nic.machine.name, other.machine.name
            if other is not nic and self._passes(nic, other) and names not in nic.segment.no_multicast:
                for process in other.machine.processes:
                    if browse or process.identity.job == job:
                        self._send(sender, nic, process, other, packet, multicast=True)

    def play_again(self, number: int) -> None:
        """Send a recorded datagram once more, whether or not its sender lives."""
        if self.recorded:
            job, nic, packet, browse = self.recorded[number % len(self.recorded)]
            self.world.note(f"played again: {packet.opened(None)}")
            self.multicast(job, nic, packet, browse=browse)

    def unicast(self, sender: Process, receiver: Process, packet: Packet) -> None:
        """Send to one process by the first way there is."""
        self.world.counts["datagrams"] += 1
        for near in sender.machine.nics:
            for far in receiver.machine.nics:
                if near.segment is not None and near.segment is far.segment and self._passes(near, far):
                    self._send(sender, near, receiver, far, packet, multicast=False)
                    return
        if sender.machine is receiver.machine:
            near = sender.machine.nics[0]
            self.world.after(0.0001, functools.partial(receiver.heard, packet, near, sender, near, False))

    @staticmethod
    def _passes(near: Nic, far: Nic) -> bool:
        segment = near.segment
        assert segment is not None
        names = near.machine.name, far.machine.name
        return near.up and far.up and names not in segment.parted and names not in segment.deaf

    def _send(
        self, sender: Process | None, near: Nic, receiver: Process, far: Nic, packet: Packet, *, multicast: bool
    ) -> None:
        segment, rng = near.segment, self.world.rng
        assert segment is not None
        copies = 1 + (segment.duplicates > 0 and rng.random() < segment.duplicates)
        for _ in range(copies):
            if segment.loss and rng.random() < segment.loss:
                continue
            arrive = functools.partial(receiver.heard, packet, far, sender, near, multicast)
            self.world.after(rng.uniform(*segment.delay), arrive)

    # --- routes ----------------------------------------------------------------------------------------------------

    def route(self, machine: Machine, address: str) -> Route | None:
        """Return the way to an address: a machine's own addresses are its own, whoever else has them too."""
        own = machine.nic(address)
        if own is not None:
            return Route(own, own)
        for near in machine.nics:
            if near.segment is not None:
                for far in near.segment.nics:
                    if far.address == address:
                        return Route(near, far)
        return None

    # --- faults ----------------------------------------------------------------------------------------------------

    def cut(self, machine: Machine, *, nic: str | None = None) -> None:
        """Pulls a machine's cable, or all of them."""
        self.world.note(f"cut {machine.name}")
        for each in machine.nics:
            if nic in (None, each.name):
                each.up = False
        self._ways_changed()

    def heal(self, machine: Machine, *, nic: str | None = None) -> None:
        """Plugs it in again."""
        self.world.note(f"heal {machine.name}")
        for each in machine.nics:
            if nic in (None, each.name):
                each.up = True
        self._ways_changed()

    def part(
        self,
        segment: Segment,
        one: Machine,
        other: Machine,
        *,
        parted: bool = True,
        barrier: Barrier = "drop",
        one_way: bool = False,
    ) -> None:
        """Let nothing pass between two machines any more (``one_way``: from the first to the second), or again."""
        self.world.note(f"{f'part ({barrier})' if parted else 'join'} {one.name} and {other.name}")
        for sender, receiver in [(one, other)] if one_way else [(one, other), (other, one)]:
            if parted:
                segment.parted[sender.name, receiver.name] = barrier
            else:
                segment.parted.pop((sender.name, receiver.name), None)
        self._ways_changed()

    def close(self, segment: Segment, one: Machine, other: Machine) -> None:
        """Let no connection be opened from a machine to another one any more, until all is healed."""
        self.world.note(f"{other.name} is closed to {one.name}")
        segment.closed.add((one.name, other.name))
        self._ways_changed()

    def heal_all(self) -> None:
        """End every fault of the network."""
        self.world.note("heal all")
        for segment in self.segments.values():
            segment.parted.clear()
            segment.closed.clear()
            segment.deaf.clear()
            segment.no_multicast.clear()
            segment.loss = segment.duplicates = 0.0
        for machine in self.machines.values():
            for nic in machine.nics:
                nic.up = True
        self._ways_changed()

    def reset_connections(self, machine: Machine) -> None:
        """Reset the connections of a machine that lead to another one."""
        self.world.note(f"connections of {machine.name} are reset")
        for connection in sorted(self.connections, key=lambda each: each.number):
            ends = [end.owner.machine for end in connection.ends]
            if machine in ends and ends[0] is not ends[1]:
                connection.cut_off()

    def _ways_changed(self) -> None:
        for connection in sorted(self.connections, key=lambda each: each.number):
            connection.way_changed()
        for watch in self.watchers:
            watch()
