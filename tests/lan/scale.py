"""What a job of many ranks costs, on the virtual clock: how soon all know their host, and what waiting for it sends."""

from __future__ import annotations

from dataclasses import dataclass

from tests.lan.gathering import Gathering
from tests.lan.process import Process

SETTLING_SECONDS = 20.0
"""Until those who wait ask as rarely as they ever will."""


@dataclass(frozen=True)
class Figures:
    """Of one run.

    Attributes:
        ranks: how many there were.
        loss: the chance that a datagram is lost on its way to one of them.
        waiting_per_minute: datagrams that all of them together sent in a minute of waiting for their host.
        known: for each rank, in order, the seconds from the host's first OFFER until it had proved that host to itself.
        formed: seconds from that OFFER until GO everywhere.
        datagrams: sent by all from that OFFER to GO.
    """

    ranks: int
    loss: float
    waiting_per_minute: float
    known: tuple[float, ...]
    formed: float
    datagrams: int

    def percentile(self, share: float) -> float:
        """The time within which that share of the ranks knew their host."""
        return self.known[min(len(self.known) - 1, int(share * len(self.known)))]


def late_host(ranks: int, *, loss: float, waiting: float, seed: int) -> Figures:
    """Start all ranks but the host within a second, let them wait, and start the host."""
    gathering = Gathering(seed, size=ranks, loss=loss, timeout=waiting + SETTLING_SECONDS + 600.0)
    world, began = gathering.world, gathering.now
    for rank in range(1, ranks):
        gathering.member(rank, at=gathering.rng.uniform(0, 1))
    world.run(SETTLING_SECONDS)
    before = world.counts["datagrams"]
    world.run(waiting)
    sent = world.counts["datagrams"] - before
    known: dict[Process, float] = {}

    def watch(process: Process) -> None:
        if process not in known and not process.hosts and process.joiner.state.link is not None:
            known[process] = world.now

    world.watchers.append(watch)
    before = world.counts["datagrams"]
    host = gathering.host()
    gathering.run()
    gathering.expect_formed()
    assert host.started_at >= began + waiting
    return Figures(
        ranks=ranks,
        loss=loss,
        waiting_per_minute=sent * 60 / waiting,
        known=tuple(sorted(at - host.started_at for at in known.values())),
        formed=max(process.formed_at or 0.0 for process in gathering.processes) - host.started_at,
        datagrams=world.counts["datagrams"] - before,
    )
