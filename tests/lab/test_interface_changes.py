"""The kernel's news of interfaces: heard at once, and enough to find an interface that comes while a rank waits."""

from __future__ import annotations

import contextlib
import select
import time

import mingle
from mingle.network.interface_monitor import LOOK_ANYWAY_SECONDS, InterfaceMonitor
from tests.lab import Lab, report

SOON_SECONDS = LOOK_ANYWAY_SECONDS / 2


def listen() -> None:
    with contextlib.ExitStack() as stack:
        monitor = InterfaceMonitor((), "", "auto", time.monotonic(), stack)
        netlink = monitor.netlink
        assert netlink is not None
        report("listening")
        heard = select.select([netlink], [], [], SOON_SECONDS)[0]
        monitor.drain_netlink()
        report("heard", heard=bool(heard), left=bool(select.select([netlink], [], [], 0)[0]))


def test_an_address_that_comes_is_told(lab: Lab) -> None:
    host = lab.host(lab.network())
    rank = host.start(listen)
    rank.wait_for("listening")
    host.ip("address add 192.0.2.7/32 dev lo")
    heard = rank.wait_for("heard", SOON_SECONDS + 5)
    assert (heard["heard"], heard["left"]) == (True, False)


def join(job_id: str, rank: int) -> None:
    report("waiting")
    mingle.discover(job_id, rank=rank, world_size=2, discovery_timeout=SOON_SECONDS)
    report("formed")


def test_a_network_that_comes_while_a_rank_waits_is_used_at_once(lab: Lab) -> None:
    hosts = lab.lan(2)
    hosts[1].ip("link set eth0 down")
    waiting = hosts[1].start(join, "late-network", 1)
    waiting.wait_for("waiting")
    hosting = hosts[0].start(join, "late-network", 0)
    hosting.wait_for("waiting")
    hosts[1].ip("link set eth0 up")
    for rank in (waiting, hosting):
        rank.wait_for("formed", SOON_SECONDS + 5)
