"""A thousand ranks on many nodes, on the virtual clock of the simulated network."""

from __future__ import annotations

from tests.lan.crowd import CORES_OF_A_NODE, MEASURED_EVENT_SECONDS, nodes
from tests.lan.processor import START_SECONDS

from benchmarks.results import Comparison, Goal
from benchmarks.samples import median

NODES, RANKS_ON_EACH = 128, 8
LOSS = 0.3

TEXT = f"""\
{NODES} nodes with {RANKS_ON_EACH} ranks each start at one moment, and lose {LOSS:.0%} of the datagrams (`tests/lan`).
The ranks of a node share {CORES_OF_A_NODE} cores; a start takes {START_SECONDS * 1e3:g} ms and each event
{MEASURED_EVENT_SECONDS * 1e3:g} ms, as measured."""


def run(rounds: int) -> Comparison:
    """Simulate; a round takes seconds of one core."""
    formed = [nodes(NODES, RANKS_ON_EACH, loss=LOSS, seed=seed).formed for seed in range(1, rounds + 1)]
    return Comparison(
        name="simulated",
        title="1,024 ranks on 128 nodes, simulated",
        text=TEXT,
        unit="s",
        samples={"mingle": formed},
        goals=(Goal("1,024 simulated ranks, 30 % loss: GO everywhere", median(formed), 1.5, "s"),),
    )
