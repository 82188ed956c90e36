"""Who is missing, and why: every present rank is told in time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.support.levels import repeated

from . import Host, Lab, RaisedError, Rank, report
from .scenarios import discover_only


def timed(job_id: str, rank: int, world_size: int, **arguments: Any) -> None:
    """Discover, and report how long it took until it failed."""
    report("started")
    started = time.monotonic()
    try:
        discover_only(job_id, rank, world_size, **arguments)
    finally:
        report("ended", seconds=time.monotonic() - started)


def failure(rank: Rank[Any], timeout: float) -> RaisedError:
    """The error of a rank that gave up, in time."""
    error = rank.error(3 * timeout + 25)
    assert rank.wait_for("ended")["seconds"] <= timeout + 15
    return error


def test_late_starters_name_only_the_rank_that_never_came(lab: Lab) -> None:
    """Rank 1's time is up before the others': it was there, and rank 2 was not."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    first = hosts[1].start(timed, "late", 1, 4, discovery_timeout=8)
    first.wait_for("started")
    threading.Event().wait(1)
    others = [hosts[index].start(timed, "late", rank, 4, discovery_timeout=12) for index, rank in ((0, 0), (2, 3))]
    assert "missing ranks: 2" in failure(first, 8).message
    for rank in others:
        message = failure(rank, 12).message
        assert "came and went: rank 1" in message


def without_default_route(lab: Lab, count: int) -> list[Host]:
    """Hosts on a switch of their own, such as a lab bench's."""
    network = lab.network(link_local=False)
    hosts = [lab.host(network) for _ in range(count)]
    for host in hosts:
        host.ip("route del default")
    return hosts


@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_no_default_route_is_never_the_cause_on_one_network(lab: Lab, seed: int) -> None:
    hosts = without_default_route(lab, 3)
    right = hosts[0].start(timed, f"bench {seed}", 0, 2, discovery_timeout=8)
    wrong = hosts[1].start(timed, f"bensh {seed}", 1, 2, discovery_timeout=8)
    alone = hosts[2].start(timed, f"another {seed}", 0, 2, discovery_timeout=8)
    for rank, other in ((right, f"bensh {seed}"), (wrong, f"bench {seed}")):
        message = failure(rank, 8).message
        cause = next(line for line in message.splitlines() if "likely cause:" in line)
        assert "a mistyped job id: " in cause
        assert f"'{other}'" in cause
        assert "on this machine: there is no default route" in message
    assert "likely cause: the missing ranks were not started" in failure(alone, 8).message


@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_loopback_is_not_the_cause_once_ranks_have_joined_over_it(lab: Lab, seed: int) -> None:
    host = lab.host()
    ranks = [host.start(timed, f"lo {seed}", rank, 3, discovery_timeout=8) for rank in range(2)]
    for rank in ranks:
        message = failure(rank, 8).message
        assert "missing ranks: 2" in message
        assert "likely cause: the missing ranks were not started" in message
        assert "on this machine: only loopback is used" in message


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (None, "s3cret"),
        pytest.param("s3cret", None, marks=pytest.mark.slow),
        pytest.param("s3cret", "another", marks=pytest.mark.slow),
    ],
)
def test_a_secret_on_one_side_only(lab: Lab, mine: str | None, other: str | None) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    ranks = [
        host.start(timed, "secrets", rank, 2, discovery_timeout=8, secret=secret)
        for rank, (host, secret) in enumerate(zip(hosts, (mine, other), strict=True))
    ]
    for rank in ranks:
        error = failure(rank, 8)
        assert error.name == "AuthenticationError"
        assert "s3cret" not in error.message
        assert "MINGLE_SECRET" in error.message


def interface_error(host: Host, **arguments: Any) -> RaisedError:
    """What a wrong interface gives, at once."""
    rank = host.start(timed, "interface", 1, 2, **arguments)
    error = rank.error()
    assert rank.wait_for("ended")["seconds"] < 10
    assert error.name == "InterfaceError"
    return error


def test_interfaces_that_cannot_be_used(lab: Lab) -> None:
    network = lab.network(link_local=False)
    host = lab.host(network)
    assert "eth0" in interface_error(host, interface="eth7").message
    assert "IPv6" in interface_error(host, interface="eth0", family="6").message
    host.ip("link set eth0 down")
    assert "down" in interface_error(host, interface="eth0").message
    host.ip("link set eth0 up", "address flush dev eth0")
    assert "address" in interface_error(host, interface="eth0").message
