"""Two that want the same place: a living one is named, one that is frozen is not in the way."""

from __future__ import annotations

import pytest

from . import Lab
from .scenarios import formed, timed, train, wait_for_log


@pytest.mark.quick
def test_the_same_rank_twice(lab: Lab) -> None:
    hosts = lab.lan(3)
    ranks = [hosts[rank].start(train, "twice", rank, 3) for rank in (0, 1)]
    wait_for_log(ranks[1], "seated")
    newcomer = hosts[2].start(timed, "twice", 1, 3)
    error = newcomer.error()
    assert newcomer.wait_for("ended")["seconds"] < 20
    assert error.name == "ConflictError"
    for part in ("rank 1 on host", hosts[1].name, hosts[1].address(), f"pid {ranks[1].pid}"):
        assert part in error.message
    # Those who were right are not disturbed.
    ranks.append(hosts[2].start(train, "twice", 2, 3))
    formed(ranks, hosts)


def test_a_rank_whose_holder_is_frozen_is_replaced(lab: Lab) -> None:
    """The kernel of a stopped process goes on to acknowledge what comes."""
    hosts = lab.lan(3)
    host_zero = hosts[0].start(train, "frozen", 0, 3)
    frozen = hosts[1].start(timed, "frozen", 1, 3)
    wait_for_log(frozen, "seated")
    frozen.stop()
    formed([host_zero, *(hosts[rank].start(train, "frozen", rank, 3) for rank in (1, 2))], hosts)
