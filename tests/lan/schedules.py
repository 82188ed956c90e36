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

from mingle.protocol.session.phases import Acknowledging, Committed, Confirming, Open, Sealing, State
from tests.lan.gathering import Gathering
from tests.lan.process import Process
from tests.lan.strikes import Strikes

TIMEOUT_SECONDS = 75.0
HEALED_SECONDS = 40.0
"""How long after the end of the chaos a job may take to form: keepalive, the return window and one more round."""
_PHASES = (Open, Confirming, Sealing, Acknowledging, Committed)


class Schedule(Strikes):
    """What one seed makes happen."""

    gathering: Gathering
    mutes = True
    """Whether multicasts can pass one way only, from or to some machine, and go on so when all is healed."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        gathering = self.gathering = self._gather(seed, tracing=tracing)
        rng = self.rng = gathering.rng
        gathering.size = self.count = rng.randint(2, 9)
        gathering.secret = b"secret" if rng.random() < 0.2 else None
        gathering.lan.loss = rng.choice((0.0, 0.0, 0.1, 0.3, 0.5))
        gathering.lan.duplicates = rng.choice((0.0, 0.2))
        gathering.lan.delay = (0.0001, rng.choice((0.001, 0.05, 0.3)))
        gathering.lan.tcp_delay = (0.0001, rng.choice((0.001, 0.001, 0.02, 0.2)))
        if rng.random() < 0.1:
            gathering.lan.delay = (0.0001, rng.uniform(1.0, 4.0))
        self.chaos = rng.uniform(3.0, 20.0)
        self.current: dict[int, Process] = {}
        machines = rng.randint(1, gathering.size)
        self._slow_processors(machines)
        for rank in range(gathering.size):
            machine = f"m{rank % machines}"
            at = rng.uniform(0, 3) if rng.random() < 0.9 else rng.uniform(0, self.chaos)
            ready_after = rng.choice((0.0, 0.2, 8.0, 40.0))
            self.current[rank] = self._begin(rank, machine, at=at, ready_after=ready_after)
        self._slow_stores()
        for _ in range(rng.randint(0, 9)):
            self._plan_strike()
        for _ in range(rng.choice((0, 1, 2, 5))):
            self._plan_strike_at_frame()
        self._one_way_multicast: set[tuple[str, str]] = set()
        if self.mutes and rng.random() < 0.25:
            self._mute()
        gathering.world.after(self.chaos, self._heal)

    def _gather(self, seed: int, *, tracing: bool) -> Gathering:
        return Gathering(seed, timeout=TIMEOUT_SECONDS, tracing=tracing)

    def _begin(self, rank: int, machine: str, *, at: float, ready_after: float) -> Process:
        processor = self.processors.get(machine)
        if rank == 0:
            return self.gathering.host(machine, at=at, ready_after=ready_after, processor=processor)
        return self.gathering.member(rank, machine, at=at, ready_after=ready_after, processor=processor)

    def _in_phase(self, phase: type[State]) -> bool:
        return self.current[0].alive and self.current[0].phase is phase

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
        rank = 0 if rng.random() < 0.35 else rng.randrange(self.count)
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

    def _mute(self) -> None:
        """Let no multicast out of a machine, or none in; unicast and connections pass."""
        names = sorted({process.machine.name for process in self.current.values()})
        one = self.current[0].machine.name if self.rng.random() < 0.5 else self.rng.choice(names)
        out = self.rng.random() < 0.5
        self._one_way_multicast = {(one, other) if out else (other, one) for other in names if other != one}
        self.gathering.lan.no_multicast |= self._one_way_multicast

    def _duration(self) -> float:
        return self.rng.choice((self.rng.uniform(0.01, 0.5), self.rng.uniform(0.5, 4), self.rng.uniform(4, 16)))

    def _away(self) -> float:
        return self.rng.choice((0.0, self.rng.uniform(0, 0.3), self.rng.uniform(0, 4)))

    def _restart(self, rank: int, delay: float) -> None:
        old = self.current[rank]
        self.current[rank] = self.gathering.again(old, at=delay)

    def _heal(self) -> None:
        self._heal_machines()
        self.gathering.lan.no_multicast |= self._one_way_multicast
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
