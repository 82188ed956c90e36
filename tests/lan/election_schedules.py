"""Random schedules of processes that are given no rank.

A schedule of :mod:`tests.lan.schedules` with electors in place of ranks, and some more bad luck: the network is in
halves from the start, multicast passes one way only until the end, a firewall lets no connection in to some machine,
faults strike while hosts compete, deadlines pass in the midst of it, and there may be one process too many.
"""

from __future__ import annotations

import functools
import random

from mingle.protocol.session.phases import State
from tests.lan.electing import ElectionGathering
from tests.lan.gathering import Gathering
from tests.lan.process import Process
from tests.lan.schedules import HEALED_SECONDS, TIMEOUT_SECONDS, Schedule

FILTERED_SECONDS = 20.0
"""How much longer a job takes to form where some machine takes no calls: it can be the first to host, and then each of
the others claims its seat in vain."""


class ElectionSchedule(Schedule):
    """What one seed makes happen to processes without a rank."""

    mutes = False

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        super().__init__(seed, tracing=tracing)
        gathering, rng = self.gathering, self.rng
        self.surplus = rng.random() < 0.15
        if self.surplus:
            at = rng.uniform(0, 3) if rng.random() < 0.5 else rng.uniform(0, self.chaos)
            machine = f"m{rng.randrange(gathering.size)}"
            self.current[gathering.size] = self._begin(gathering.size, machine, at=at, ready_after=0.2)
        self._ending: set[Process] = set()
        self.one_way: set[tuple[str, str]] = set()
        if rng.random() < 0.3:
            self._halve()
        if rng.random() < 0.3:
            self._cut_one_way()
        for _ in range(rng.choice((0, 0, 1, 3))):
            self._plan_strike_at_competition()
        if rng.random() < 0.1:
            self._plan_a_new_crew()
        self.election.disturbed_at = self.healed_at
        if not self.surplus and not self.one_way and rng.random() < 0.3:
            self._filter()
        gathering.world.watchers.append(self._end_without_store)

    def _gather(self, seed: int, *, tracing: bool) -> Gathering:
        gathering = ElectionGathering(seed, timeout=TIMEOUT_SECONDS, tracing=tracing)
        self.election = gathering.election
        self._draw_orders(gathering, random.Random(f"orders of {seed}"))
        if gathering.rng.random() < 0.15:
            gathering.timeout = gathering.rng.uniform(4.0, 40.0)
        return gathering

    @staticmethod
    def _draw_orders(gathering: Gathering, rng: random.Random) -> None:
        """Let machines have orders: of their own, some alike, or none."""
        kind = rng.choice(("own", "own", "own", "some alike", "some without", "none"))
        numbers = rng.sample(range(10), 10)
        for machine, number in enumerate(numbers):
            order = b"\x01" + bytes((number // 3 if kind == "some alike" else number,))
            if kind != "none" and (kind != "some without" or number % 2):
                gathering.orders[f"m{machine}"] = order

    def _begin(self, rank: int, machine: str, *, at: float, ready_after: float) -> Process:
        processor = self.processors.get(machine)
        return self.gathering.elector(machine, at=at, ready_after=ready_after, processor=processor)

    def _end_without_store(self, process: Process) -> None:
        """Whose store is closed can't get its process group, and ends."""
        if process.closed_stores and process not in self._ending:
            self._ending.add(process)
            self.gathering.world.after(self.rng.uniform(0.1, 2.0), process.kill)

    # --- bad luck --------------------------------------------------------------------------------------------------

    def _hosts(self) -> list[int]:
        return [index for index, process in self.current.items() if process.alive and process.hosts]

    def _in_phase(self, phase: type[State]) -> bool:
        return any(self.current[index].phase is phase for index in self._hosts())

    def _target(self, rank: int) -> int:
        # Rank 0 of a schedule is whoever is struck because it hosts.
        hosts = self._hosts() if rank == 0 else []
        return self.rng.choice(hosts) if hosts else rank

    def _halve(self) -> None:
        """The network is in two halves from the start."""
        gathering = self.gathering
        machines = list({process.machine.name: process.machine for process in self.current.values()}.values())
        left = [machine for machine in machines if self.rng.random() < 0.5]
        end = self.rng.uniform(0.5, self.chaos)
        for one in left:
            for other in machines:
                if other not in left:
                    gathering.network.part(gathering.lan, one, other)
                    rejoin = functools.partial(gathering.network.part, gathering.lan, one, other, parted=False)
                    gathering.world.after(end, rejoin)

    def _cut_one_way(self) -> None:
        """Datagrams pass one way only between some machines, and go on so; connections pass."""
        names = sorted({process.machine.name for process in self.current.values()})
        one = self.rng.choice(names)
        for other in names:
            if other != one and self.rng.random() < 0.7:
                self.one_way.add(self.rng.choice(((one, other), (other, one))))
        self.gathering.lan.deaf |= self.one_way

    def _filter(self) -> None:
        """A firewall lets no connection in to one machine, and never will; its own go out."""
        names = sorted({process.machine.name for process in self.current.values()})
        if len(names) > 1:
            self.gathering.network.machine(self.rng.choice(names)).takes_calls = False
            self.election.disturbed_at += FILTERED_SECONDS

    def _plan_strike_at_competition(self) -> None:
        rng, world = self.rng, self.gathering.world
        strikes = (
            self._cut,
            self._part,
            self._deafen,
            self._kill,
            self._stop,
            self._power_off,
            self._reset_connections,
        )
        strike = rng.choice(strikes)
        delay = rng.choice((0.0, rng.uniform(0, 0.005), rng.uniform(0, 0.3)))
        world.when(
            self._competing,
            lambda: world.after(delay, functools.partial(self._unless_healed, strike, 0)),
        )

    def _plan_a_new_crew(self) -> None:
        """Once the job runs, everybody but its host is started again, and one more: enough for a second job."""
        delay = self.rng.choice((0.5, 10.0))
        self.gathering.world.when(
            lambda: any(self.current[index].outcome is not None for index in self._hosts()),
            lambda: self.gathering.world.after(delay, self._renew_the_crew),
        )

    def _renew_the_crew(self) -> None:
        gathering, world = self.gathering, self.gathering.world
        running = self.election.living(gathering.job)
        if not running or world.now >= self.healed_at:
            return
        host = running[0]
        for index, process in list(self.current.items()):
            if process is not host and process.alive:
                process.kill()
                self._restart(index, self.rng.uniform(0, 1))
            elif process is host:
                extra = self._begin(index, process.machine.name, at=self.rng.uniform(0, 1), ready_after=0.2)
                self.current[index] = extra
        if self.rng.random() < 0.5:
            world.after(self.rng.uniform(0, 15), host.close)

    def _competing(self) -> bool:
        return len(self._hosts()) > 1

    def _heal(self) -> None:
        super()._heal()
        self.gathering.lan.deaf |= self.one_way

    # --- what must come of it --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run it and judge the end."""
        gathering, world = self.gathering, self.gathering.world
        world.run(self.chaos, until=None)
        world.run(HEALED_SECONDS, until=self._over)
        running = self.election.living(gathering.job)
        if gathering.timeout == TIMEOUT_SECONDS:
            assert self.election.sessions, f"no GO {HEALED_SECONDS:.0f} s after the end of the chaos"
            late = [process.name for process in self._expected(running) if process.outcome is None]
            assert not late or not running, f"without GO {HEALED_SECONDS:.0f} s after the end of the chaos: {late}"
        waiting = [process.name for process in self.current.values() if process.alive and not process.finished]
        assert running or len(waiting) < gathering.size, f"all are there, and nothing has formed: {waiting}"
        world.run(TIMEOUT_SECONDS + 25.0, until=gathering.settled)
        assert gathering.settled(), "somebody still waits after every deadline"
