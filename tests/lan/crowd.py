"""A job of many ranks that start at one moment, on processors for which each of them is work."""

from __future__ import annotations

from dataclasses import dataclass

from tests.lan.gathering import Gathering
from tests.lan.processor import Processor

CORES_OF_A_NODE = 2
MEASURED_EVENT_SECONDS = 0.0001
"""To serve a datagram, some bytes or a timer: rank 0 was measured to take half a millisecond for each member, for which
it serves six of these."""


@dataclass(frozen=True)
class Figures:
    """Of one run.

    Attributes:
        formed: seconds from the start until GO everywhere.
        connections: made by all together.
        datagrams: sent by all together.
        epochs: how often the host asked for confirmation.
    """

    formed: float
    connections: int
    datagrams: int
    epochs: int


def crowd(ranks: int, *, cores: int | None, loss: float = 0.0, seed: int = 1) -> Figures:
    """Start them. They share so many ``cores``; None: only the host's work takes time, on one core of its own."""
    gathering = Gathering(seed, size=ranks, loss=loss, timeout=600.0)
    host = Processor(gathering.world, cores or 1)
    others = host if cores else None
    gathering.host(processor=host)
    for rank in range(1, ranks):
        gathering.member(rank, processor=others)
    return _run(gathering)


def nodes(count: int, ranks_on_each: int, *, loss: float = 0.0, seed: int = 1) -> Figures:
    """Start as many ranks on each node, which share its cores; work takes what was measured of it."""
    gathering = Gathering(seed, size=count * ranks_on_each, loss=loss, timeout=600.0)
    for node in range(count):
        cores = Processor(gathering.world, CORES_OF_A_NODE, event_seconds=MEASURED_EVENT_SECONDS)
        for rank in range(node * ranks_on_each, (node + 1) * ranks_on_each):
            if rank == 0:
                gathering.host(processor=cores)
            else:
                gathering.member(rank, f"m{node}", processor=cores)
    return _run(gathering)


def _run(gathering: Gathering) -> Figures:
    world, began = gathering.world, gathering.now
    gathering.run()
    gathering.expect_formed()
    return Figures(
        formed=max(process.formed_at or 0.0 for process in gathering.processes) - began,
        connections=world.counts["connections"],
        datagrams=world.counts["datagrams"],
        epochs=gathering.processes[0].host.registrar.state.epoch,
    )
