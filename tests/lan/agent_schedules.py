"""Random schedules of agents: one seed makes a job of MIN:MAX nodes, a bad network and bad luck.

Agents start one after another, perhaps in two parts; then the network falls apart and heals (packets are dropped, or a
firewall answers with TCP resets or ICMP; into two parts or three, one way only, for moments again and again), machines
are cut off, suspended or lose their power, agents are killed and started again, stopped and continued, or end the job;
connections are reset, addresses change, stores open slowly or are out of reach, processors are slow. Some of it strikes
at a chosen frame. At the end all is healed and as many live as there were. What must follow: no invariant breaks, ever
(:mod:`tests.lan.agents`), and all come together in one session. Nobody fails: the deadline is far away.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from mingle.elastic.agent import JobEnd
from mingle.elastic.quorum import Nodes
from tests.lan.agents import AgentGathering, AgentProcess
from tests.lan.network import Barrier, Machine
from tests.lan.process import Process
from tests.lan.strikes import Strikes
from tests.lan.tcp import DEAD_SECONDS

HEALED_SECONDS = 75.0
"""How long after the end of the chaos it may take until all are in one session."""
NOTICED_SECONDS = DEAD_SECONDS + 2.5
"""How long after the chaos a connection can seem alive whose address went at the end of it."""
BARRIERS: tuple[Barrier, ...] = ("drop", "reset", "icmp")


class AgentSchedule(Strikes):
    """What one seed makes happen."""

    frames = (*Strikes.frames, "members")
    rests = True  # what has come together must stay so
    gathering: AgentGathering
    healed_seconds = HEALED_SECONDS

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        gathering = self.gathering = self._gather(tracing=tracing)
        rng = self.rng = gathering.rng
        maximum = rng.randint(2, 7)
        nodes = Nodes(minimum=rng.randint(1, maximum), maximum=maximum)
        gathering.resize(nodes)
        gathering.secret = b"secret" if rng.random() < 0.05 else None
        gathering.uneven_clocks = rng.random() < 0.5
        gathering.lan.loss = rng.choice((0.0, 0.0, 0.1, 0.3))
        gathering.lan.duplicates = rng.choice((0.0, 0.2))
        gathering.lan.delay = (0.0001, rng.choice((0.001, 0.05)))
        if rng.random() < 0.1:
            gathering.lan.delay = (0.0001, rng.uniform(1.0, 4.0))
        gathering.lan.tcp_delay = (0.0001, rng.choice((0.001, 0.001, 0.02, 0.1)))
        gathering.lan.tcp_again = (0.01, rng.choice((0.4, 3.0)))
        self.count = self._draw_count(nodes)
        self.chaos = rng.uniform(5.0, 80.0)
        self.current: dict[int, AgentProcess] = {}
        self._ending: set[AgentProcess] = set()
        self._draw_orders(random.Random(f"orders of {seed}"))
        self._slow_processors(self.count)
        for number in range(self.count):
            at = rng.uniform(0, 3) if rng.random() < 0.8 else rng.uniform(0, self.chaos)
            self.current[number] = self._begin(f"m{number}", at=at)
        self._slow_stores()
        if rng.random() < 0.3:
            self._halve(0)
        for _ in range(rng.choice((0, 2, 5, 9, 14))):
            self._plan_strike()
        for _ in range(rng.choice((0, 1, 2, 5))):
            self._plan_strike_at_frame()
        gathering.world.watchers.append(self._end_with_the_job)
        gathering.world.after(self.chaos, self._heal)

    def _gather(self, *, tracing: bool) -> AgentGathering:
        return AgentGathering(self.seed, (1, 1), tracing=tracing)

    def _draw_count(self, nodes: Nodes) -> int:
        return self.rng.randint(nodes.minimum, nodes.maximum)

    def _draw_orders(self, rng: random.Random) -> None:
        """Let machines have node ranks of their own, names, or nothing."""
        kind = rng.choice(("ranks", "ranks", "names", "some ranks", "nothing"))
        for machine, number in enumerate(rng.sample(range(10), 10)):
            if kind in ("ranks", "names") or (kind == "some ranks" and number % 2):
                begin = b"\x01" if kind == "names" else b"\x00\x00\x00\x00"
                self.gathering.orders[f"m{machine}"] = begin + bytes((number,))

    # --- bad luck --------------------------------------------------------------------------------------------------

    def _plan_strike(self) -> None:
        rng, world = self.rng, self.gathering.world
        strikes = (
            *(self._halve, self._halve, self._alone, self._alone, self._three_parts, self._late_answers),
            *(self._one_way, self._flap),
            *(self._cut, self._kill, self._kill, self._stop, self._stop, self._suspend, self._power_off),
            *(self._reset_connections, self._reset_connections, self._part_one_way, self._leave, self._shut_stores),
            *(self._renumber, self._plug_in, self._play_again, self._part, self._deafen),
            *(self._fail_workers, self._fail_workers),
        )
        strike = rng.choice(strikes)
        hosts = rng.random() < 0.5
        number = rng.randrange(self.count)

        def happen() -> None:
            self._unless_healed(strike, self._hosting(number) if hosts else number)

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

    def _away(self) -> float:
        return self._duration() if self.gathering.world.now < self.healed_at else 0.0

    def _begin(self, machine: str, *, at: float = 0.0) -> AgentProcess:
        return self.gathering.start(machine, at=at, processor=self.processors.get(machine))

    def _restart(self, rank: int, delay: float) -> None:
        old = self.current[rank]

        def back() -> None:
            if self.current[rank] is old:
                self.current[rank] = self._begin(old.machine.name)

        self.gathering.world.after(delay, back)

    def _end_with_the_job(self, process: Process) -> None:
        """When an agent has ended the job, all others end too, as torch's rendezvous is closed, and start again."""
        assert isinstance(process, AgentProcess)
        ending = process.agent.ended is not None or process.agent.job_end is JobEnd.ANNOUNCED
        if not ending or process in self._ending:
            return
        self._ending.add(process)

        def end() -> None:
            numbers = [number for number, each in self.current.items() if each is process]
            if process.stopped:
                self.gathering.world.after(1.0, end)
            elif numbers:
                self._leave(numbers[0])

        self.gathering.world.after(self.rng.uniform(0.1, 2.0), end)

    def _later(self, action: Callable[[], None]) -> None:
        self.gathering.world.after(self._duration(), action)

    def _parts(self, number: int) -> list[list[Machine]]:
        parts: list[list[Machine]] = [[] for _ in range(number)]
        for process in self.current.values():
            self.rng.choice(parts).append(process.machine)
        return parts

    def _separate(self, left: list[Machine], right: list[Machine], *, one_way: bool = False) -> None:
        barrier = self.rng.choice(BARRIERS)
        self.gathering.split(left, right, barrier=barrier, one_way=one_way)
        if self.rng.random() < 0.3:
            # One way comes back earlier: what was sent on it before arrives late.
            back = functools.partial(self.gathering.split, right, left, parted=False, one_way=True)
            self.gathering.world.after(self.rng.uniform(1, 9), back)
        self._later(functools.partial(self.gathering.split, left, right, parted=False, one_way=one_way))

    def _late_answers(self, number: int) -> None:
        """What others answer one machine is lost, then all is; the answers are sent again while it can't ask."""
        machine = self.current[number].machine
        others = [each.machine for each in self.current.values() if each.machine is not machine]
        world, split = self.gathering.world, self.gathering.split
        split(others, [machine], one_way=True)
        at = self.rng.uniform(0.3, 2.5)
        world.after(at, functools.partial(self._until_healed, [machine], others, "drop", one_way=True))
        at += self.rng.uniform(1.0, 8.0)
        world.after(at, functools.partial(split, others, [machine], parted=False, one_way=True))
        world.after(at + self._duration(), functools.partial(split, [machine], others, parted=False, one_way=True))

    def _alone(self, number: int) -> None:
        """One machine on the one side, all others on the other."""
        machine = self.current[number].machine
        self._separate([machine], [each.machine for each in self.current.values() if each.machine is not machine])

    def _halve(self, number: int) -> None:
        """The network is in two parts for some time."""
        self._separate(*self._parts(2))

    def _three_parts(self, number: int) -> None:
        one, two, three = self._parts(3)
        self._separate(one, [*two, *three])
        self._separate(two, three)

    def _one_way(self, number: int) -> None:
        self._separate(*self._parts(2), one_way=True)

    def _flap(self, number: int) -> None:
        """A barrier comes and goes."""
        left, right = self._parts(2)
        barrier, at = self.rng.choice(BARRIERS), 0.0
        for _ in range(self.rng.randint(2, 8)):
            at += self.rng.uniform(0.05, 4)
            self.gathering.world.after(at, functools.partial(self._until_healed, left, right, barrier))
            at += self.rng.uniform(0.05, 4)
            self.gathering.world.after(at, functools.partial(self.gathering.split, left, right, parted=False))

    def _until_healed(
        self, left: list[Machine], right: list[Machine], barrier: Barrier, *, one_way: bool = False
    ) -> None:
        if self.gathering.world.now < self.healed_at:
            self.gathering.split(left, right, barrier=barrier, one_way=one_way)

    def _fail_workers(self, number: int) -> None:
        self.current[number].fail_workers()

    def _suspend(self, number: int) -> None:
        process = self.current[number]
        process.suspend()
        self._later(process.resume)

    def _heal(self) -> None:
        for process in self.current.values():
            process.resume()
        self._heal_machines()
        for number, process in self.current.items():
            process.cont()
            if process.core is not None and not process.alive:
                self._restart(number, 0.0)

    # --- what must come of it --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run it and judge the end."""
        world = self.gathering.world
        world.run(self.chaos + NOTICED_SECONDS)
        experienced = any(process.agent.memory.had_quorum for process in self.current.values() if process.core)
        if experienced and self.count < self.gathering.policy.nodes.founders:
            return  # an agent that was killed counted beside the one in its place: now too few are left to go on
        met = world.run(self.healed_seconds - NOTICED_SECONDS, until=self._together)
        states = {
            each.name: (each.agent.stage(), each.failure, each.workers and each.workers[1])
            for each in self.current.values()
            if each.core
        }
        assert met, f"not together {self.healed_seconds:.0f} s after the end of the chaos: {states}"
        world.run(20.0)
        assert self._together(), "together once, and then not any more, without a fault"

    def _together(self) -> bool:
        return self.gathering.in_one_round(list(self.current.values()))


class CrowdedAgentSchedule(AgentSchedule):
    """What one seed makes happen to more agents than the job can have: MAX of them come together, the others wait.

    No invariant holds of so many. If too few agents are left that count, none of them need come together.
    """

    def _draw_count(self, nodes: Nodes) -> int:
        return nodes.maximum + self.rng.randint(1, 3)

    def _together(self) -> bool:
        seated = [each for each in self.current.values() if each.outcome is not None]
        maximum, founders = self.gathering.policy.nodes.maximum, self.gathering.policy.nodes.founders
        if not seated and sum(not each.agent.memory.surplus for each in self.current.values()) < founders:
            return True
        return len(seated) == maximum and self.gathering.in_one_round(seated)
