"""Random schedules of rounds: part of a session is cut off, and the agents that it counts are started again.

One seed makes a small job with more seats than it takes to found a session. Again and again a part of the session that
is too small to be kept is cut off at a chosen frame: the host with the last answers to it under way, or members with
their last questions. The others are killed a moment later and started again, found a session, and get rounds there.
Then the cut ends, and what was under way arrives. What must follow: no torchrun gets a round of a session after one
of a later session (:mod:`tests.lan.agents`). In the end all are in one round, or those that are not cut off for good.
"""

from __future__ import annotations

import functools
import random

from mingle.elastic.quorum import Nodes
from tests.lan.agents import AgentGathering, AgentProcess
from tests.lan.network import Machine
from tests.lan.process import Endpoint, Process
from tests.lan.strikes import mark

SIZES = ((1, 3), (1, 5), (2, 4))
FRAMES = ("pong", "pong", "pong", "pong", "ping", "round", "round-held", "ack")


class RoundSchedule:
    """What one seed makes happen."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        self.gathering = AgentGathering(seed, (1, 1), last_call=1.0, tracing=tracing)
        gathering, rng = self.gathering, self.gathering.rng
        minimum, maximum = rng.choice(SIZES)
        gathering.resize(Nodes(minimum=minimum, maximum=maximum))
        gathering.uneven_clocks = rng.random() < 0.5
        gathering.lan.tcp_delay = (0.0001, rng.choice((0.001, 0.02)))
        gathering.lan.tcp_again = (0.001, rng.choice((0.01, 0.05, 0.5)))
        self.current = gathering.everybody(maximum, within=0.5)

    # --- what befalls them -----------------------------------------------------------------------------------------

    def _hosts(self) -> list[AgentProcess]:
        return [each for each in self.current if each.hosted is not None and each.hosted.quorum.had_quorum]

    def _strike(self) -> None:
        """Cut a part of a session off, at a frame or now."""
        gathering, rng = self.gathering, self.gathering.rng
        world = gathering.world
        host = rng.choice(self._hosts())
        assert host.hosted is not None
        inside = {seat.member for seat in host.hosted.registrar.seats.members()}
        members = [each for each in self.current if each is not host and each.identity.member in inside]
        keepers = gathering.policy.nodes.keepers
        if rng.random() < 0.6:
            side = [host, *rng.sample(members, min(len(members), rng.randint(0, max(0, keepers - 2))))]
        else:
            side = rng.sample(members, min(len(members), max(1, keepers - 1)))
        strike = functools.partial(self._cut_off, host, side, [each for each in (host, *members) if each not in side])
        if rng.random() < 0.2:
            strike()
            return
        kind, delay = mark(rng.choice(FRAMES)), rng.choice((0.0, 0.0, 0.0005, 0.01))

        def watch(sender: Process, receiver: Endpoint, data: bytes) -> None:
            if kind in data and (sender in side or receiver in side):
                world.before_write.remove(watch)
                if delay:
                    world.after(delay, strike)
                else:
                    strike()

        world.before_write.append(watch)
        if rng.random() < 0.7:  # a question is under way, and its answers are struck
            for each in (host, *members):
                each.see_round(host.hosted.session)
        world.after(2.5, lambda: world.before_write.remove(watch) if watch in world.before_write else None)

    def _cut_off(self, host: AgentProcess, side: list[AgentProcess], others: list[AgentProcess]) -> None:
        gathering, rng = self.gathering, self.gathering.rng
        world, seconds = gathering.world, rng.choice((0.5, 1.5, 2.8, 3.3, 4.0, 4.5, 6.0, 7.5))
        for each in side:
            cut = functools.partial(gathering.network.cut, each.machine)
            world.after(rng.choice((0.0, 0.0005, 0.002)), cut) if rng.random() < 0.3 else cut()
            world.after(seconds + rng.choice((0.0, 0.0, 0.01)), functools.partial(self._heal, each.machine))
        for each in others:
            world.after(rng.choice((0.001, 0.003, 0.01, 0.1, 0.3)), functools.partial(self._restart, each))
        if rng.random() < 0.2:
            host.stop()
            world.after(rng.choice((0.5, seconds, 8.0)), host.cont)
        if rng.random() < 0.3:
            world.after(seconds - rng.choice((0.05, 0.5)), self._restart_newest)

    def _heal(self, machine: Machine) -> None:
        self.gathering.network.heal(machine)

    def _restart(self, old: AgentProcess) -> None:
        if old not in self.current or not old.alive:
            return
        old.kill()
        gathering = self.gathering
        new = gathering.start(old.machine.name, at=gathering.rng.choice((0.1, 0.1, 0.3, 0.3, 1.0, 3.0)))
        self.current[self.current.index(old)] = new

    def _restart_newest(self) -> None:
        """Kill the host of the newest session, so that its members may come back to an older one."""
        order = self.gathering.invariants.quorate
        hosts = sorted(self._hosts(), key=lambda each: order.index(each.hosted.session) if each.hosted else -1)
        if len(hosts) > 1:
            self._restart(hosts[-1])

    # --- what must come of it --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run it and judge the end."""
        gathering, rng = self.gathering, self.gathering.rng
        gathering.run_until_together(self.current, 20.0)
        for _ in range(3):
            gathering.world.run(rng.uniform(0.2, 3.0))
            if self._hosts():
                self._strike()
            gathering.world.run(rng.choice((3.0, 6.0, 11.0)))
        gathering.network.heal_all()
        machines = self._cut_others_off()
        gathering.world.run(15.0)
        stay = [each for each in self.current if each.machine in machines]
        gathering.run_until_together(stay, 30.0)
        met = gathering.world.run(30.0, until=lambda: gathering.in_one_round(stay))
        assert met, f"not together in one round: {[(each.name, each.workers) for each in stay]}"

    def _cut_others_off(self) -> list[Machine]:
        """Cut machines off for good but for as many as found a session, or more; return those, which can go on."""
        machines = [each.machine for each in self.current]
        dice = random.Random(f"those that stay of {self.seed}")
        if dice.random() < 0.7:
            return machines
        stay = dice.sample(machines, dice.randint(self.gathering.policy.nodes.founders, len(machines)))
        # A cable that was pulled can yet be plugged in again.
        self.gathering.split(stay, [each for each in machines if each not in stay])
        return stay
