"""On a healthy network nothing is found wrong: whoever cries wolf is not believed when it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from . import Host, Lab
from .faults import run, said, start, tried, try_rank


def one_network(lab: Lab) -> Sequence[Host]:
    return lab.lan(3, ipv6="fd00:77::/64")


def two_networks(lab: Lab) -> Sequence[Host]:
    lans = lab.network("10.77.0.0/24"), lab.network("10.88.0.0/24")
    return [lab.host(*lans) for _ in range(2)]


def ipv6_alone(lab: Lab) -> Sequence[Host]:
    return lab.lan(2, None, ipv6="fd00:77::/64")


def snooping_with_a_querier(lab: Lab) -> Sequence[Host]:
    return lab.lan(2, snooping=True, querier=True)


@pytest.mark.parametrize("make", [one_network, two_networks, ipv6_alone, snooping_with_a_querier])
def test_nothing_is_wrong(lab: Lab, make: Callable[[Lab], Sequence[Host]]) -> None:
    tried(lab, lambda fresh: check_hosts(make(fresh)))


def check_hosts(hosts: Sequence[Host]) -> None:
    """Ping and doctor find all of them, and nothing wrong."""
    pinging = [start(host, "ping --count 6 --interval 0.2") for host in hosts]
    for host, (status, text) in zip(hosts, [each.result() for each in pinging], strict=True):
        assert status == 0, text
        assert "WARN" not in text
        assert "FAIL" not in text
        for other in hosts:
            if other is not host:
                assert f"{other.name} (" in text
    serving = start(hosts[1], "doctor --all --serve --timeout 4")
    status, text = start(hosts[0], f"doctor --all --check {hosts[1].address()}").result()
    assert status == 0, text
    assert f"{hosts[1].name} ({hosts[1].address()}): multicast, unicast, TCP pass" in text
    for told in (text, said(serving)):
        assert "WARN" not in told
        assert "FAIL" not in told
        assert told.count("PASS") >= 8


def test_a_host_on_which_nobody_serves_is_told_from_one_that_is_not_reached(lab: Lab) -> None:
    one, other = lab.lan(2)
    assert f"FAIL\t{other.address()}\tnothing serves on {other.address()}" in run(
        one, f"doctor --check {other.address()}"
    )
    other.drop("meta l4proto udp")
    assert f"FAIL\t{other.address()}\t{other.address()} did not answer" in run(one, f"doctor --check {other.address()}")


def test_an_older_program_that_shares_the_port_is_a_rank(lab: Lab) -> None:
    """Ranks of this host hold the port, too, and are no strangers."""
    one, _ = lab.lan(2)
    rank = try_rank(one, 0, discovery_timeout=4)
    rank.wait_for("started")
    told = run(one, "doctor --all")
    rank.result()
    assert "WARN" not in told
    assert "FAIL" not in told
    assert "PASS\tport" in told
