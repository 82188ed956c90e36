"""What the ranks of mingle-check say of themselves, and what a check of healthy machines has seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from mingle.check.verdicts import CheckedRank, Evidence, Other

HELLO: dict[str, Any] = {
    "rank": 1,
    "node": 0,
    "host": "a",
    "pid": 4711,
    "address": "10.0.0.2",
    "interface": "eth0",
    "networks": [{"interface": "eth0", "address": "10.0.0.2", "network": "10.0.0.0/24", "mtu": 1500}],
    "port": 4567,
    "token": "t",
    "options": {"backend": "auto"},
}
NAMES = ["a", "b", "c", "d", "e", "f"]
PATIENT = """
import mingle.check.control as control
import mingle.check.verdicts as verdicts
control.SILENCE_SECONDS = control.CONNECT_SECONDS = control.dial.__kwdefaults__["seconds"] = 60.0
verdicts.SLOW_FACTOR = float("inf")
"""
"""For `patched_path`: the ranks wait for each other, however busy the machine is, and no link counts as slow.

Other processes take the time of one direction and leave it to the other, which measures as a slow link.
"""


def healthy(count: int = 4) -> Evidence:
    """Return what a healthy job shows whose links and hosts differ by half from each other."""
    uneven = itertools.cycle((1.0e9, 1.4e9, 0.8e9))
    return Evidence(
        places=[CheckedRank(name, rank, f"10.0.0.{rank + 1}", "eth0", 1500) for rank, name in enumerate(NAMES[:count])],
        place_of={rank: rank for rank in range(count)},
        rates={pair: next(uneven) for pair in itertools.permutations(range(count), 2)},
        others={
            pair: [Other("10.1.0.0/24", ("eth1", "eth1"), 1.2e9, 1e9)]
            for pair in itertools.combinations(range(count), 2)
        },
        work={rank: (0.03 + 0.01 * (rank % 2), 0.02) for rank in range(count)},
    )


def slow(*pairs: tuple[int, int]) -> Callable[[Evidence], None]:
    """Return what makes these links slow, each from its first place to its second."""

    def make(seen: Evidence) -> None:
        seen.rates.update(dict.fromkeys(pairs, 0.1e9))

    return make
