"""A job of many ranks that start at one moment, on processors for which each of them is work."""

from __future__ import annotations

from dataclasses import dataclass

from tests.lan.gathering import Gathering
from tests.lan.processor import Processor


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
    """Starts them. They share so many ``cores``; None: only the host's work takes time, on one core of its own."""
    gathering = Gathering(seed, size=ranks, loss=loss, timeout=600.0)
    world = gathering.world
    host = Processor(world, cores or 1)
    others = host if cores else None
    gathering.host(processor=host)
    for rank in range(1, ranks):
        gathering.member(rank, processor=others)
    began = gathering.now
    gathering.run()
    gathering.expect_formed()
    return Figures(
        formed=max(process.formed_at or 0.0 for process in gathering.processes) - began,
        connections=world.counts["connections"],
        datagrams=world.counts["datagrams"],
        epochs=gathering.processes[0].host.registrar.epoch,
    )
