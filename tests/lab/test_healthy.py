"""On a healthy network nothing is found wrong: whoever cries wolf is not believed when it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.support.levels import repeated

from . import Host, Lab
from .faults import run, said, start, tried, try_rank


def one_network(lab: Lab) -> Sequence[Host]:
    lan = lab.network(ipv6="fd00:77::/64")
    return [lab.host(lan) for _ in range(3)]


def two_networks(lab: Lab) -> Sequence[Host]:
    lans = lab.network("10.77.0.0/24"), lab.network("10.88.0.0/24")
    return [lab.host(*lans) for _ in range(2)]


def ipv6_alone(lab: Lab) -> Sequence[Host]:
    lan = lab.network(None, ipv6="fd00:77::/64")
    return [lab.host(lan) for _ in range(2)]


def snooping_with_a_querier(lab: Lab) -> Sequence[Host]:
    lan = lab.network(snooping=True, querier=True)
    return [lab.host(lan) for _ in range(2)]


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


@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_host_on_which_nobody_serves_is_told_from_one_that_is_not_reached(lab: Lab, seed: int) -> None:
    lan = lab.network()
    one, other = lab.host(lan), lab.host(lan)
    assert f"FAIL\t{other.address()}\tnothing serves on {other.address()}" in run(
        one, f"doctor --check {other.address()}"
    )
    other.drop("meta l4proto udp")
    assert f"FAIL\t{other.address()}\t{other.address()} did not answer" in run(one, f"doctor --check {other.address()}")


def test_an_older_program_that_shares_the_port_is_a_rank(lab: Lab) -> None:
    """Ranks of this host hold the port, too, and are no strangers."""
    lan = lab.network()
    one, _ = lab.host(lan), lab.host(lan)
    rank = try_rank(one, 0, discovery_timeout=4)
    rank.wait_for("started")
    told = run(one, "doctor --all")
    rank.result()
    assert "WARN" not in told
    assert "FAIL" not in told
    assert "PASS\tport" in told


def test_watch_tells_who_comes_and_goes(lab: Lab) -> None:
    lan = lab.network()
    hosts = [lab.host(lan) for _ in range(3)]
    watching = start(hosts[2], "watch --timeout 45")
    # Rank 1 ends first: a rank that looks for its host again is seen, too, and tells nobody of its end.
    ranks = [try_rank(hosts[0], 0, 3, discovery_timeout=20), try_rank(hosts[1], 1, 3, discovery_timeout=12)]
    for rank in ranks:
        rank.result()
    status, text = watching.result(60)
    assert status == 0
    lines = [line.split("\t") for line in text.splitlines()]
    assert lines[0][0] == "+"
    assert lines[-1][0] == "-", text
    assert any(line[1:3] == ["resnet", "open"] and line[5:7] == ["2/3", "2"] for line in lines), text
