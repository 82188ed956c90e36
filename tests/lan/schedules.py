"""Random schedules: one seed makes a job, a bad network and bad luck, and says what must come of it.

First there is chaos for some time: processes start one after another, are killed and restarted, stopped and
continued, or ended by their users, cables are pulled, pairs of machines are parted, connections are reset, datagrams
pass one way only, addresses change, stores open slowly or are out of reach, processors are slow. Some of it strikes at
random times, some in a chosen phase of the session, some at a chosen frame. Then all is healed and every rank runs
exactly once. What must follow:

* no invariant breaks, ever (:mod:`tests.lan.invariants`);
* if GO was never decided before, the job forms;
* if it was, and its host lives, every member that lives has formed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from mingle.protocol.registrar import Phase
from tests.lan.gathering import Gathering
from tests.lan.process import Endpoint, Process
from tests.lan.processor import Processor

TIMEOUT_SECONDS = 75.0
HEALED_SECONDS = 40.0
"""How long after the end of the chaos a job may take to form: keepalive, the return window and one more round."""
_FRAMES = (
    *("prove", "join", "joined", "store", "confirm", "confirmed", "sealed", "ack", "go", "void"),
    *("host-seen", "redirect", "unreachable", "ready", "leave", "closed", "refused", "running", "ping", "pong"),
)
_PHASES = (Phase.OPEN, Phase.CONFIRMING, Phase.SEALING, Phase.SEALED, Phase.RUNNING)


def _mark(kind: str) -> bytes:
    """What the bytes of a frame of this kind contain."""
    return b"\xa4type" + bytes((0xA0 + len(kind),)) + kind.encode()


class Schedule:
    """What one seed makes happen."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        gathering = self.gathering = self._gather(seed, tracing=tracing)
        rng = self.rng = gathering.rng
        gathering.size = rng.randint(2, 9)
        gathering.secret = b"secret" if rng.random() < 0.2 else None
        gathering.lan.loss = rng.choice((0.0, 0.0, 0.1, 0.3, 0.5))
        gathering.lan.duplicates = rng.choice((0.0, 0.2))
        gathering.lan.delay = (0.0001, rng.choice((0.001, 0.05, 0.3)))
        gathering.lan.tcp_delay = (0.0001, rng.choice((0.001, 0.001, 0.02, 0.2)))
        if rng.random() < 0.1:
            gathering.lan.delay = (0.0001, rng.uniform(1.0, 4.0))
        self.chaos = rng.uniform(3.0, 20.0)
        self.current: dict[int, Process] = {}
        self.processors: dict[str, Processor] = {}
        machines = rng.randint(1, gathering.size)
        if rng.random() < 0.15:
            for number in range(machines):
                if rng.random() < 0.5:
                    seconds = rng.choice((0.0003, 0.003, 0.01))
                    self.processors[f"m{number}"] = Processor(gathering.world, event_seconds=seconds)
        for rank in range(gathering.size):
            machine = f"m{rank % machines}"
            at = rng.uniform(0, 3) if rng.random() < 0.9 else rng.uniform(0, self.chaos)
            ready_after = rng.choice((0.0, 0.2, 8.0, 40.0))
            self.current[rank] = self._begin(rank, machine, at=at, ready_after=ready_after)
        if rng.random() < 0.2:
            for name in sorted({process.machine.name for process in self.current.values()}):
                if rng.random() < 0.5:
                    gathering.machine(name).opening = (0.001, rng.choice((0.5, 5.0, 12.0)))
        for _ in range(rng.randint(0, 9)):
            self._plan_strike()
        for _ in range(rng.choice((0, 1, 2, 5))):
            self._plan_strike_at_frame()
        gathering.world.after(self.chaos, self._heal)

    def _gather(self, seed: int, *, tracing: bool) -> Gathering:
        return Gathering(seed, timeout=TIMEOUT_SECONDS, tracing=tracing)

    def _begin(self, rank: int, machine: str, *, at: float, ready_after: float) -> Process:
        processor = self.processors.get(machine)
        if rank == 0:
            return self.gathering.host(machine, at=at, ready_after=ready_after, processor=processor)
        return self.gathering.member(rank, machine, at=at, ready_after=ready_after, processor=processor)

    def _in_phase(self, phase: Phase) -> bool:
        return self.current[0].alive and self.current[0].phase is phase

    def _target(self, rank: int) -> int:
        return rank

    def _plan_strike(self) -> None:
        rng, world = self.rng, self.gathering.world
        strike = rng.choice(
            (
                self._cut,
                self._cut,
                self._part,
                self._deafen,
                self._kill,
                self._kill,
                self._stop,
                self._stop,
                self._power_off,
                self._play_again,
                self._reset_connections,
                self._reset_connections,
                self._part_one_way,
                self._leave,
                self._shut_stores,
                self._renumber,
                self._plug_in,
            )
        )
        rank = 0 if rng.random() < 0.35 else rng.randrange(self.gathering.size)
        if rng.random() < 0.4:
            world.after(
                rng.uniform(0, rng.choice((4.0, self.chaos))), functools.partial(self._unless_healed, strike, rank)
            )
            return
        phase, delay = rng.choice(_PHASES), rng.choice((0.0, 0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.3)))
        after = world.now + rng.choice((0.0, 0.0, rng.uniform(0, self.chaos)))
        world.when(
            lambda: world.now >= after and self._in_phase(phase),
            lambda: world.after(delay, functools.partial(self._unless_healed, strike, rank)),
        )

    def _plan_strike_at_frame(self) -> None:
        """Strike the sender or the receiver of a frame just before it is written, or a moment after."""
        rng, world = self.rng, self.gathering.world
        mark, number = _mark(rng.choice(_FRAMES)), rng.choice((1, 1, 2, 3, rng.randint(1, 20)))
        delay = rng.choice((None, None, 0.0, rng.uniform(0, 0.01)))
        strikes_sender = rng.random() < 0.6
        strike = rng.choice(
            (self._kill, self._stop, self._stop, self._cut, self._part, self._reset_connections, self._leave)
        )
        written = 0

        def watch(sender: Process, receiver: Endpoint, data: bytes) -> None:
            nonlocal written
            written += mark in data
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
        if self.gathering.now < self.healed_at:
            strike(self._target(rank))

    @property
    def healed_at(self) -> float:
        """When the chaos ends."""
        return 1000.0 + self.chaos

    def _duration(self) -> float:
        return self.rng.choice((self.rng.uniform(0.01, 0.5), self.rng.uniform(0.5, 4), self.rng.uniform(4, 16)))

    def _cut(self, rank: int) -> None:
        gathering, machine = self.gathering, self.current[rank].machine
        gathering.network.cut(machine)
        gathering.world.after(self._duration(), functools.partial(gathering.network.heal, machine))

    def _part(self, rank: int) -> None:
        gathering, one = self.gathering, self.current[rank].machine
        other = self.current[self.rng.randrange(gathering.size)].machine
        if one is not other:
            gathering.network.part(gathering.lan, one, other)
            rejoin = functools.partial(gathering.network.part, gathering.lan, one, other, parted=False)
            gathering.world.after(self._duration(), rejoin)

    def _part_one_way(self, rank: int) -> None:
        gathering, one = self.gathering, self.current[rank].machine
        other = self.current[self.rng.randrange(gathering.size)].machine
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
            self._restart(rank, self.rng.choice((0.0, self.rng.uniform(0, 0.3), self.rng.uniform(0, 4))))

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
            if nic in machine.nics and len(machine.nics) > 1:
                network.unplug(nic)
                world.after(self.rng.uniform(0, 2.0), functools.partial(network.scan, machine))

        world.after(self._duration(), end)

    def _deafen(self, rank: int) -> None:
        one = self.current[rank].machine
        other = self.current[self.rng.randrange(self.gathering.size)].machine
        self.gathering.lan.deaf.add((one.name, other.name))

    def _kill(self, rank: int) -> None:
        process = self.current[rank]
        if process.alive:
            process.kill()
            self._restart(rank, self.rng.choice((0.0, self.rng.uniform(0, 0.3), self.rng.uniform(0, 4))))

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

    def _restart(self, rank: int, delay: float) -> None:
        old = self.current[rank]
        self.current[rank] = self.gathering.again(old, at=delay)

    def _stop(self, rank: int) -> None:
        process = self.current[rank]
        process.stop()
        self.gathering.world.after(self._duration(), process.cont)

    def _heal(self) -> None:
        self.gathering.network.heal_all()
        for machine in self.gathering.network.machines.values():
            machine.stores_shut, machine.opening = False, (0.001, 0.02)
            self.gathering.network.scan(machine)
        for rank, process in self.current.items():
            process.cont()
            if process.core is not None and not process.alive and process.failure is None:
                self._restart(rank, 0.0)

    # --- what must come of it --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run it and judge the end."""
        world = self.gathering.world
        world.run(self.chaos + HEALED_SECONDS, until=self._over)
        decided = list(self.gathering.invariants.sessions.values())
        if not decided or all(host in self.current.values() for host in decided):
            late = [each.name for each in self._expected(decided) if each.outcome is None]
            assert not late, f"not formed {HEALED_SECONDS:.0f} s after the end of the chaos: {late}"
        world.run(TIMEOUT_SECONDS + 25.0, until=self.gathering.settled)
        assert self.gathering.settled(), "somebody still waits after every deadline"

    def _expected(self, decided: list[Process]) -> list[Process]:
        if not decided:
            return list(self.current.values())
        return [
            process
            for process in self.current.values()
            if any(host.holds_store and process.identity.member in host.host.registrar.seats for host in decided)
        ]

    def _over(self) -> bool:
        return self.gathering.now > self.healed_at and self.gathering.settled()
