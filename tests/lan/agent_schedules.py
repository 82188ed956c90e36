"""Random schedules of agents: one seed makes a job of MIN:MAX nodes, a bad network and bad luck.

Agents start one after another, perhaps in two halves; then the network parts and heals, machines are cut off or lose
their power, agents are killed and started again, stopped and continued, and some finish on purpose. At the end all is
healed and as many live as there were. What must follow: no invariant breaks, ever (:mod:`tests.lan.agents`), and all
that live and have not finished come together in one session. Nobody fails: the deadline is far away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tests.lan.agents import AgentGathering, AgentProcess

HEALED_SECONDS = 75.0
"""How long after the end of the chaos it may take until all are in one session."""


class AgentSchedule:
    """What one seed makes happen."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        gathering = self.gathering = AgentGathering(seed, (1, 1), tracing=tracing)
        rng = self.rng = gathering.rng
        maximum = rng.randint(2, 6)
        minimum = rng.randint(1, maximum)
        gathering.nodes = type(gathering.nodes)(minimum=minimum, maximum=maximum)
        gathering.secret = b"secret" if rng.random() < 0.1 else None
        gathering.lan.loss = rng.choice((0.0, 0.0, 0.1, 0.3))
        gathering.lan.delay = (0.0001, rng.choice((0.001, 0.05)))
        gathering.lan.tcp_delay = (0.0001, rng.choice((0.001, 0.001, 0.02, 0.1)))
        self.count = rng.randint(minimum, maximum)
        self.chaos = rng.uniform(5.0, 60.0)
        self.current: dict[int, AgentProcess] = {}
        self.finished: set[int] = set()
        for number in range(self.count):
            at = rng.uniform(0, 3) if rng.random() < 0.8 else rng.uniform(0, self.chaos)
            self.current[number] = gathering.start(f"m{number}", at=at)
        if rng.random() < 0.3:
            self._halve(0)
        for _ in range(rng.choice((0, 2, 5, 9, 14))):
            self._plan_strike()
        gathering.world.after(self.chaos, self._heal)

    @property
    def healed_at(self) -> float:
        """When the chaos ends."""
        return 1000.0 + self.chaos

    # --- bad luck --------------------------------------------------------------------------------------------------

    def _plan_strike(self) -> None:
        rng, world = self.rng, self.gathering.world
        strike = rng.choice(
            (self._halve, self._halve, self._cut, self._kill, self._kill, self._stop, self._power_off, self._finish)
        )
        hosts = rng.random() < 0.5
        number = rng.randrange(self.count)

        def happen() -> None:
            if world.now < self.healed_at:
                strike(self._hosting(number) if hosts else number)

        if rng.random() < 0.3:
            # In the midst of a change: a moment after a session has begun.
            began = len(self.gathering.invariants.sessions) + rng.randint(0, 1)
            delay = rng.choice((0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.3)))
            world.when(
                lambda: len(self.gathering.invariants.sessions) > began, functools.partial(world.after, delay, happen)
            )
        else:
            world.after(rng.uniform(0, self.chaos), happen)

    def _hosting(self, number: int) -> int:
        hosts = [each for each, process in self.current.items() if process.hosted is not None]
        return self.rng.choice(hosts) if hosts else number

    def _duration(self) -> float:
        return self.rng.choice((self.rng.uniform(0.01, 1), self.rng.uniform(1, 9), self.rng.uniform(9, 30)))

    def _later(self, action: Callable[[], None]) -> None:
        self.gathering.world.after(self._duration(), action)

    def _halve(self, number: int) -> None:
        """The network is in two parts for some time."""
        machines = [process.machine for process in self.current.values()]
        left = [machine for machine in machines if self.rng.random() < 0.5]
        right = [machine for machine in machines if machine not in left]
        self.gathering.split(left, right)
        self._later(functools.partial(self.gathering.split, left, right, parted=False))

    def _cut(self, number: int) -> None:
        machine = self.current[number].machine
        self.gathering.network.cut(machine)
        self._later(functools.partial(self.gathering.network.heal, machine))

    def _kill(self, number: int) -> None:
        process = self.current[number]
        if process.alive:
            process.kill()
            self._later(functools.partial(self._restart, number, process))

    def _power_off(self, number: int) -> None:
        """Nobody says good-bye, and no kernel either; the machine is back after a while."""
        process = self.current[number]
        if process.alive:
            self.gathering.network.cut(process.machine)
            process.kill()

            def back() -> None:
                self.gathering.network.heal(process.machine)
                self._restart(number, process)

            self._later(back)

    def _restart(self, number: int, old: AgentProcess) -> None:
        if self.current[number] is old and number not in self.finished:
            self.current[number] = self.gathering.start(old.machine.name)

    def _stop(self, number: int) -> None:
        process = self.current[number]
        process.stop()
        self._later(process.cont)

    def _finish(self, number: int) -> None:
        """A node whose workers are done leaves, unless too few would be left or the job would end with it."""
        process = self.current[number]
        enough = self.count - len(self.finished) > self.gathering.nodes.minimum
        if process.alive and process.core is not None and process.hosted is None and enough and not process.stopped:
            part = process.agent.part
            if process.outcome is not None and part is not None:
                self.finished.add(number)
                process.close()

    def _heal(self) -> None:
        self.gathering.network.heal_all()
        for number, process in list(self.current.items()):
            process.cont()
            if process.core is not None and not process.alive:
                self._restart(number, process)

    # --- what must come of it --------------------------------------------------------------------------------------

    def _living(self) -> list[AgentProcess]:
        return [process for number, process in self.current.items() if number not in self.finished]

    def run(self) -> None:
        """Runs it and judges the end."""
        world = self.gathering.world
        world.run(self.chaos + 0.5)
        met = world.run(HEALED_SECONDS, until=lambda: self.gathering.together(self._living()))
        states = {each.name: (each.agent.stage(), each.failure) for each in self._living() if each.core is not None}
        assert met, f"not together {HEALED_SECONDS:.0f} s after the end of the chaos: {states}"
        world.run(20.0)
        assert self.gathering.together(self._living()), "together once, and then not any more, without a fault"
