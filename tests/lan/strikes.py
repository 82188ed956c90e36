"""What can befall the processes of a random schedule, ranks and agents alike."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping

from tests.lan.agents import AgentGathering
from tests.lan.gathering import Gathering
from tests.lan.process import Endpoint, Process
from tests.lan.processor import Processor

_FRAMES = (
    *("prove", "join", "joined", "store", "confirm", "confirmed", "sealed", "ack", "go", "void"),
    *("lead", "host-seen", "unreachable", "ready", "leave", "closed", "refused", "running", "ping", "pong"),
)


MAX_WORK_SECONDS = 0.03
"""The most time that the processes of a machine take, together, to serve one multicast. Beyond it they can't keep up
with the questions that they ask each other at two addresses. A real process takes 0.3 ms."""


def mark(kind: str) -> bytes:
    """What the bytes of a frame of this kind contain."""
    return b"\xa4type" + bytes((0xA0 + len(kind),)) + kind.encode()


class Strikes:
    """The bad luck of a schedule. Its processes have numbers, and each strike hits one of them or its machine."""

    frames: tuple[str, ...] = _FRAMES
    """The kinds of frames at which it strikes."""
    rests = False
    """Whether interfaces stay once all is healed."""
    gathering: Gathering | AgentGathering
    rng: random.Random
    chaos: float
    """For how long strikes happen."""
    count: int
    current: Mapping[int, Process]
    processors: dict[str, Processor]

    def _slow_processors(self, machines: int) -> None:
        """Let work take time on some machines, or on none."""
        rng = self.rng
        self.processors = {}
        if rng.random() < 0.15:
            for number in range(machines):
                if rng.random() < 0.5:
                    seconds = min(rng.choice((0.0003, 0.003, 0.01)), MAX_WORK_SECONDS / -(-self.count // machines))
                    self.processors[f"m{number}"] = Processor(self.gathering.world, event_seconds=seconds)

    def _slow_stores(self) -> None:
        """Let stores take seconds to open on some machines, or on none."""
        rng = self.rng
        if rng.random() < 0.2:
            for name in sorted({process.machine.name for process in self.current.values()}):
                if rng.random() < 0.5:
                    self.gathering.network.machine(name).opening = (0.001, rng.choice((0.5, 5.0, 12.0)))

    def _target(self, rank: int) -> int:
        return rank

    def _plan_strike_at_frame(self) -> None:
        """Strike the sender or the receiver of a frame just before it is written, or a moment after."""
        rng, world = self.rng, self.gathering.world
        marked, number = mark(rng.choice(self.frames)), rng.choice((1, 1, 2, 3, rng.randint(1, 20)))
        delay = rng.choice((None, None, 0.0, rng.uniform(0, 0.01)))
        strikes_sender = rng.random() < 0.6
        strike = rng.choice(
            (self._kill, self._stop, self._stop, self._cut, self._part, self._reset_connections, self._leave)
        )
        written = 0

        def watch(sender: Process, receiver: Endpoint, data: bytes) -> None:
            nonlocal written
            written += marked in data
            if written < number:
                return
            world.before_write.remove(watch)
            struck = sender if strikes_sender else receiver
            rank = next((rank for rank, process in self.current.items() if process is struck), None)
            if rank is None or world.now >= self.healed_at:
                return
            if delay is None and strike not in (self._leave, self._reset_connections):
                strike(rank)  # a process notices the other two only after its step
            else:
                world.after(delay or 0.0, functools.partial(self._unless_healed, strike, rank))

        world.before_write.append(watch)

    def _unless_healed(self, strike: Callable[[int], None], rank: int) -> None:
        if self.gathering.world.now < self.healed_at:
            strike(self._target(rank))

    @property
    def healed_at(self) -> float:
        """When the chaos ends."""
        return 1000.0 + self.chaos

    def _duration(self) -> float:
        """How long a fault lasts."""
        raise NotImplementedError

    def _away(self) -> float:
        """How long after its end a process is started again."""
        raise NotImplementedError

    def _restart(self, rank: int, delay: float) -> None:
        """Start a process again that has ended."""
        raise NotImplementedError

    def _cut(self, rank: int) -> None:
        gathering, machine = self.gathering, self.current[rank].machine
        gathering.network.cut(machine)
        gathering.world.after(self._duration(), functools.partial(gathering.network.heal, machine))

    def _part(self, rank: int) -> None:
        gathering, one = self.gathering, self.current[rank].machine
        other = self.current[self.rng.randrange(self.count)].machine
        if one is not other:
            gathering.network.part(gathering.lan, one, other)
            rejoin = functools.partial(gathering.network.part, gathering.lan, one, other, parted=False)
            gathering.world.after(self._duration(), rejoin)

    def _part_one_way(self, rank: int) -> None:
        gathering, one = self.gathering, self.current[rank].machine
        other = self.current[self.rng.randrange(self.count)].machine
        if one is not other:
            pair = (one, other) if self.rng.random() < 0.5 else (other, one)
            gathering.network.part(gathering.lan, *pair, one_way=True)
            rejoin = functools.partial(gathering.network.part, gathering.lan, *pair, parted=False, one_way=True)
            gathering.world.after(self._duration(), rejoin)

    def _leave(self, rank: int) -> None:
        """Its user ends it, by Ctrl-C or in his program, and starts it again."""
        process = self.current[rank]
        if process.alive and not process.stopped:
            process.close()
            if self.current[rank] is not process:
                return  # another strike hit it at its good-bye, and planned its return
            self._restart(rank, self._away())

    def _shut_stores(self, rank: int) -> None:
        """A firewall drops what a machine sends to stores."""
        machine = self.current[rank].machine
        machine.stores_shut = True
        self.gathering.world.after(self._duration(), functools.partial(setattr, machine, "stores_shut", False))

    def _renumber(self, rank: int) -> None:
        """A machine gets another address, or loses its interface for a moment."""
        network, machine = self.gathering.network, self.current[rank].machine
        old = machine.nics[0]
        network.unplug(old)
        number = self.gathering.world.new_id()
        address = old.address if self.rng.random() < 0.3 else f"10.0.{100 + number // 250}.{number % 250 + 1}"
        network.plug(machine.name, old.name, address, "lan", 16)
        machine.nics.insert(0, machine.nics.pop())
        self.gathering.world.after(self.rng.uniform(0, 2.0), functools.partial(network.scan, machine))

    def _plug_in(self, rank: int) -> None:
        """A machine gets one more interface, for a while."""
        world, network, machine = self.gathering.world, self.gathering.network, self.current[rank].machine
        if len(machine.nics) > 2:
            return
        number = world.new_id()
        nic = network.plug(machine.name, f"eth{number}", f"10.0.{100 + number // 250}.{number % 250 + 1}", "lan", 16)
        world.after(self.rng.uniform(0, 2.0), functools.partial(network.scan, machine))

        def end() -> None:
            if nic in machine.nics and len(machine.nics) > 1 and not (self.rests and world.now >= self.healed_at):
                network.unplug(nic)
                world.after(self.rng.uniform(0, 2.0), functools.partial(network.scan, machine))

        world.after(self._duration(), end)

    def _deafen(self, rank: int) -> None:
        one = self.current[rank].machine
        other = self.current[self.rng.randrange(self.count)].machine
        self.gathering.lan.deaf.add((one.name, other.name))

    def _kill(self, rank: int) -> None:
        process = self.current[rank]
        if process.alive:
            process.kill()
            self._restart(rank, self._away())

    def _power_off(self, rank: int) -> None:
        """No process says good-bye, and no kernel either; the machine is back after a while."""
        gathering, machine = self.gathering, self.current[rank].machine
        gathering.network.cut(machine)
        seconds = self._duration()
        for other, process in self.current.items():
            if process.machine is machine and process.alive:
                process.kill()
                self._restart(other, seconds)
        gathering.world.after(seconds, functools.partial(gathering.network.heal, machine))

    def _play_again(self, rank: int) -> None:
        for _ in range(self.rng.randint(1, 20)):
            play = functools.partial(self.gathering.network.play_again, self.rng.getrandbits(16))
            self.gathering.world.after(self.rng.uniform(0, 15), play)

    def _reset_connections(self, rank: int) -> None:
        """Connections end while both ends live, and again on the way back."""
        gathering, machine = self.gathering, self.current[rank].machine
        for _ in range(self.rng.randint(1, 4)):
            reset = functools.partial(gathering.network.reset_connections, machine)
            gathering.world.after(self.rng.choice((0.0, self.rng.uniform(0, 0.05), self.rng.uniform(0, 6))), reset)

    def _stop(self, rank: int) -> None:
        process = self.current[rank]
        process.stop()
        self.gathering.world.after(self._duration(), process.cont)

    def _heal_machines(self) -> None:
        """End every fault of the network and of the machines."""
        self.gathering.network.heal_all()
        for machine in self.gathering.network.machines.values():
            machine.stores_shut, machine.opening = False, (0.001, 0.02)
            self.gathering.network.scan(machine)
