"""Whatever a peer says after a valid handshake, no machine breaks, waits for ever or spins."""

from __future__ import annotations

import functools

import pytest

from mingle.wire.datagrams import Offer
from tests.lan.gathering import Gathering
from tests.lan.process import Process
from tests.lan.strangers import Babbler, Caller

SEEDS_PER_TEST = 40


def _has_begun(process: Process) -> bool:
    return process.core is not None


@pytest.mark.parametrize("first", range(0, 4 * SEEDS_PER_TEST, SEEDS_PER_TEST))
def test_callers_that_say_anything(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        gathering = Gathering(seed, timeout=15, checked=False)
        everybody = gathering.everybody([gathering.rng.uniform(0, 3) for _ in range(4)])
        host = everybody[0]
        gathering.world.run(3.1, until=functools.partial(_has_begun, host))
        machine = gathering.machine("m9")
        for _ in range(25):
            member = gathering.rng.choice(
                [process.identity.member for process in everybody] + [gathering.world.identifier()] * 3
            )
            gathering.world.run(gathering.rng.uniform(0, 0.2))
            if host.alive:
                Caller(gathering.network, machine, host, member)
        gathering.world.run(60.0)
        assert gathering.settled(), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 4 * SEEDS_PER_TEST, SEEDS_PER_TEST))
def test_hosts_that_say_anything(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        gathering = Gathering(seed, timeout=15, checked=False)
        gathering.everybody([gathering.rng.uniform(0, 3) for _ in range(4)])
        machine = gathering.machine("m9")
        for number in range(3):
            session = gathering.world.identifier()
            Babbler(gathering.network, machine, 4000 + number, "job", session)
            offer = Offer(
                job="job",
                session=session,
                host=gathering.world.identifier(),
                addresses=(machine.nics[0].address,),
                port=4000 + number,
                world_size=4,
                state="open" if gathering.rng.random() < 0.7 else "sealed",
                hostname="m9",
            )
            for tick in range(60):
                gathering.world.after(tick / 4, functools.partial(gathering.say, "m9", offer))
        gathering.world.run(60.0)
        assert gathering.settled(), f"seed {seed}"
