"""Many ranks, simulated: the real state machines with a virtual clock, on a fake network (``tests/lan``)."""

from __future__ import annotations

from tests.lan.crowd import CORES_OF_A_NODE, MEASURED_EVENT_SECONDS, nodes
from tests.lan.processor import START_SECONDS
from tests.lan.scale import late_host

from benchmarks.results import Comparison

SIZES = (64, 256, 1_024, 4_096)
RANKS_OF_A_NODE = 8
LOSS = 0.3
WAITING_SECONDS = 60.0
LATE, WAITING = "rank 0 comes last", "all wait"
NODES, ONE_NODE = "together, nodes of eight", "together, one node"

TEXT = f"""\
The mesh is off. {LOSS:.0%} of the datagrams are lost, but none in the rows "{ONE_NODE}". n runs have the
seeds 1 to n. "{LATE}": {WAITING_SECONDS:.0f} s after the others have settled, until the last has GO, and work takes
no time. "{WAITING}": the datagrams of all ranks together meanwhile. "Together": all ranks start at one moment, and
those of a node share {CORES_OF_A_NODE} cores: the {RANKS_OF_A_NODE} of each node, or all of them. A start takes
{START_SECONDS * 1e3:g} ms, and each datagram, frame or timer {MEASURED_EVENT_SECONDS * 1e3:g} ms, as measured."""


def run(rounds: int) -> Comparison:
    """Simulate; the large jobs with fewer seeds."""
    samples: dict[str, list[float]] = {}
    for size in SIZES:
        for seed in range(1, 1 + min(rounds, max(1, rounds * 256 // size))):
            late = late_host(size, loss=LOSS, waiting=WAITING_SECONDS, seed=seed)
            spread = nodes(size // RANKS_OF_A_NODE, RANKS_OF_A_NODE, loss=LOSS, seed=seed)
            figures = {
                f"{LATE}, {size} ranks, s": late.formed,
                f"{WAITING}, {size} ranks, datagrams a minute": late.waiting_per_minute,
                f"{NODES}, {size} ranks, s": spread.formed,
                f"{ONE_NODE}, {size} ranks, s": nodes(1, size, seed=seed).formed,
            }
            for name, value in figures.items():
                samples.setdefault(name, []).append(value)
    return Comparison(name="simulated", title="Many ranks, simulated", text=TEXT, unit="", samples=samples)
