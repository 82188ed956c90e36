"""Schedules with impostors: strangers that have overheard the id of a member, and call its host under that id."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tests.lan.agents import AgentGathering
from tests.lan.gathering import Gathering
from tests.lan.process import Process
from tests.lan.strangers import Impostor


def impersonate(gathering: Gathering | AgentGathering, host: Process, members: Sequence[Process]) -> None:
    """Have a stranger call a host under the id of one that has a seat there."""
    if not host.alive or not host.hosts:
        return
    seats = host.host.registrar.seats
    seated = [each for each in members if each is not host and each.alive and each.identity.member in seats]
    if seated:
        Impostor(gathering.network, gathering.network.machine("m9"), host, gathering.world.rng.choice(seated))


def a_job_with_impostors(seed: int, *, given: bool) -> None:
    """Before GO, between GO and READY, and after it; some members lose their connection meanwhile and come back."""
    gathering = Gathering(seed, timeout=40)
    world, rng = gathering.world, gathering.rng
    starts = [rng.uniform(0, 3) for _ in range(4)]
    ready = {"ready_after": rng.choice((0.2, 4.0))}
    if given:
        ranks = gathering.everybody(starts, **ready)
    else:
        ranks = [gathering.elector(f"m{number}", at=at, **ready) for number, at in enumerate(starts)]
    gathering.machine("m9")

    def strike() -> None:
        for host in ranks:
            if host.core is not None:
                impersonate(gathering, host, ranks)

    for _ in range(40):
        world.after(rng.uniform(0, 8), strike)
    freed: list[str] = []
    for _ in range(rng.choice((0, 0, 3))):
        member = rng.choice(ranks)
        freed.append(f"pid {member.identity.who.pid}:")
        world.after(rng.uniform(0, 8), functools.partial(gathering.network.reset_connections, member.machine))
    gathering.run(20.0)
    gathering.expect_formed()
    assert [host.closed_stores for host in ranks] == [[]] * 4
    for host in ranks:
        if host.hosts:
            # The seat of a member that has lost its connection is free, for anybody until it comes back.
            forged = [text for text in host.host.registrar.history.departures if "forged" in text]
            assert [text for text in forged if not any(pid in text for pid in freed)] == []


def agents_with_impostors(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4), timeout=60.0)
    world = gathering.world
    agents = gathering.everybody(4)
    gathering.network.machine("m9")

    def strike() -> None:
        for agent in agents:
            impersonate(gathering, agent, agents)

    for _ in range(60):
        world.after(world.rng.uniform(0, 20), strike)
    world.run(30.0)
    assert all(agent.outcome is not None for agent in agents)
    assert [agent.agent.losses for agent in agents] == [0] * 4
