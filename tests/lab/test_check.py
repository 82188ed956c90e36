"""mingle-check on real hosts: a healthy job raises no alarm, and each fault is blamed on what has it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.levels import chosen, soaking

from . import Lab
from .checks import (
    FORMS,
    SECONDS,
    SLOW,
    SLOW_SECONDS,
    TIMEOUT,
    at_step,
    crowd,
    hosts_of,
    note,
    outcomes,
    start,
    use_up_descriptors,
    verdicts,
)
from .processors import processor

pytestmark = pytest.mark.timeout(240)


def blamed(outcome: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the verdicts, but not that a machine is busy, which tests that run beside this one make true."""
    return [verdict for verdict in verdicts(outcome) if verdict[0] != "cpu-busy" or soaking()]


@pytest.mark.quick
@pytest.mark.soak(5)
@pytest.mark.parametrize("load", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_healthy_hosts_raise_no_alarm(lab: Lab, load: int, seed: int) -> None:
    hosts = hosts_of(lab, 4)
    for _ in range(load):
        hosts[0].run([sys.executable, "-c", "while True: pass"])
    reports = outcomes(start(hosts))
    note("healthy under load" if load else "healthy", seed, reports[0])
    assert [blamed(report) for report in reports] == [[]] * 4
    assert len([pair for pair in reports[0]["pairs"] if pair["rate"]]) == 12
    assert all(each["status"] == "ok" for each in reports[0]["steps"])


def test_healthy_hosts_with_link_local_addresses_alone_raise_no_alarm(lab: Lab) -> None:
    """Two machines joined by one cable. The zone of such an address is the interface of the one that connects."""
    network = lab.network(None)
    hosts = [lab.host(network, interfaces=(name,)) for name in ("eth0", "lan0", "up0")]
    assert [blamed(report) for report in outcomes(start(hosts))] == [[]] * 3


@pytest.mark.soak(3)
@pytest.mark.parametrize("fault", chosen(["slow-direction"], soak=["slow-machine", "slow-pair"]))
def test_a_slow_link_is_named(lab: Lab, fault: str, seed: int) -> None:
    hosts = hosts_of(lab, 4)
    if fault == "slow-machine":
        hosts[2].drop(SLOW)
        expected = ("node2",)
    else:
        hosts[2].drop(f"ip saddr {hosts[1].address()} {SLOW}")
        if fault == "slow-pair":
            hosts[1].drop(f"ip saddr {hosts[2].address()} {SLOW}")
        expected = ("node1", "node2")
    reports = outcomes(start(hosts, seconds=SLOW_SECONDS, mesh="off"))
    note(fault, seed, reports[0])
    assert [blamed(report) for report in reports] == [[(fault, expected)]] * 4


@pytest.mark.soak(3)
def test_lost_jumbo_frames_are_named(lab: Lab, seed: int) -> None:
    hosts = hosts_of(lab, 3)
    for host in hosts[1:]:
        # Whole packets, as a wire carries them: the kernel would hand larger units on between virtual interfaces.
        host.ip(f"link set {host.interface()} mtu 9000 gso_max_segs 1")
    reports = outcomes(start(hosts, mesh="off"))
    note("mtu", seed, reports[0])
    assert [blamed(report) for report in reports] == [[("mtu", ("node1", "node2"))]] * 3


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("pair", "seconds", "observed"),
    [((0, 2), SECONDS, "the connection between them fell silent"), ((1, 2), 10.0, "no TCP connection")],
    ids=["host and worker", "two workers"],
)
def test_a_filter_after_the_job_has_formed_is_named(
    lab: Lab, tmp_path: Path, pair: tuple[int, int], seconds: float, observed: str, seed: int
) -> None:
    """Also with a short deadline."""
    hosts = hosts_of(lab, 3)
    one, other = (hosts[each] for each in pair)
    step = "correctness: broadcast"
    ranks = start(hosts, hold=step, until=str(tmp_path / "go"), seconds=seconds)
    at_step(ranks, step, tmp_path / "go", lambda: other.drop(f"ip saddr {one.address()} meta l4proto tcp"))
    reports = outcomes(ranks)
    note(f"filter {pair}", seed, reports[0])
    assert [blamed(report) for report in reports] == [[("pair", (one.name, other.name))]] * 3
    assert observed in reports[0]["verdicts"][0]["observation"]


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("how", "victim"),
    chosen([("ended", 0), ("silent", 2), ("interrupted", 1)], soak=[("ended", 2), ("silent", 0)]),
)
def test_a_rank_that_is_killed_or_stopped_or_interrupted_is_named(
    lab: Lab, tmp_path: Path, how: str, victim: int, seed: int
) -> None:
    step = "bandwidth: all_reduce on cpu: 1024 B"
    ranks = start(hosts_of(lab, 3), hold=step, until=str(tmp_path / "go"))
    struck = ranks[victim]
    strike = {"ended": struck.kill, "silent": struck.stop, "interrupted": struck.interrupt}[how]
    at_step(ranks, step, tmp_path / "go", strike)
    del ranks[victim]
    reports = outcomes(ranks)
    note(f"{how} rank {victim}", seed, reports[0])
    assert [blamed(report) for report in reports] == [[(f"rank-{how}", (f"node{victim}",))]] * 2


@pytest.mark.soak(3)
@pytest.mark.parametrize("victim", chosen([2], soak=[0]))
def test_a_rank_without_descriptors_is_named(lab: Lab, tmp_path: Path, victim: int, seed: int) -> None:
    step = "correctness: process group"
    ranks = start(hosts_of(lab, 3), hold=step, until=str(tmp_path / "go"))
    at_step(ranks, step, tmp_path / "go", lambda: use_up_descriptors(ranks[victim].pid))
    reports = outcomes(ranks)
    note(f"descriptors of rank {victim}", seed, reports[0])
    assert [blamed(report) for report in reports] == [[("rank-descriptors", (f"node{victim}",))]] * 3


@pytest.mark.soak(3)
def test_strangers_at_the_ports_of_the_ranks_are_no_fault(lab: Lab, tmp_path: Path, seed: int) -> None:
    *hosts, stranger = hosts_of(lab, 4)
    ranks = start(hosts, hold="links: round 1", until=str(tmp_path / "go"))

    def come() -> None:
        ports = [
            (host.address(), rank.wait_for("port", FORMS)["number"]) for host, rank in zip(hosts, ranks, strict=True)
        ]
        stranger.start(crowd, ports, 150).wait_for("crowded", FORMS)

    at_step(ranks, "links: round 1", tmp_path / "go", come)
    reports = outcomes(ranks)
    note("strangers", seed, reports[0])
    assert [blamed(report) for report in reports] == [[]] * 3
    assert not any("Traceback" in rank.stderr for rank in ranks)


@pytest.mark.soak(3)
def test_a_busy_machine_is_named(lab: Lab, seed: int) -> None:
    hosts = hosts_of(lab, 4)
    # With a core of its own, the machine would be the fastest of all, whatever it does beside: those of two tests that
    # run at once have no more of two cores each.
    with processor(0.5) as processes:
        burners = [
            hosts[3].run([sys.executable, "-c", "print('burns', flush=True)\nwhile True: pass"]) for _ in range(8)
        ]
        for burner in burners:
            burner.wait_for_output("burns", FORMS)
            processes.write_text(str(burner.pid))  # before the ranks start: outside they would slow down all hosts
        ranks = start(hosts)
        processes.write_text(str(ranks[3].pid))
        reports = outcomes(ranks)
        for burner in burners:
            burner.kill()
    note("cpu", seed, reports[0])
    assert [verdicts(report) for report in reports] == [[("cpu-busy", ("node3",))]] * 4


@pytest.mark.soak(3)
def test_the_slower_of_two_networks_is_named(lab: Lab, seed: int) -> None:
    slow, fast = lab.network("10.77.0.0/24", link_local=False), lab.network("10.78.0.0/24", link_local=False)
    hosts = [lab.host(slow, fast, name=f"node{number}") for number in range(3)]
    for host in hosts:
        host.drop(f'iifname "{host.interface(slow)}" {SLOW}')
    reports = outcomes(start(hosts, env={"MINGLE_INTERFACE": "eth0"}, seconds=SLOW_SECONDS))
    note("interface", seed, reports[0])
    assert [blamed(report) for report in reports] == [[("interface", ("node0", "node1", "node2"))]] * 3
    assert "MINGLE_INTERFACE=eth1" in reports[0]["verdicts"][0]["fix"]


def test_torchrun_on_two_hosts(lab: Lab) -> None:
    """torchrun tells a rank neither its address nor its interface."""
    hosts = hosts_of(lab, 2)
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=mingle"]
    line += ["--rdzv-id=check", "-m", "mingle.check.command", "--json", "--max-size=4M"]
    agents = [host.run(line) for host in hosts]
    statuses = {agent.wait(TIMEOUT) for agent in agents}
    (report,) = [json.loads(agent.stdout) for agent in agents if agent.stdout]
    assert {place["address"] for place in report["places"]} == {host.address() for host in hosts}
    assert {place["interface"] for place in report["places"]} == {"eth0"}
    assert blamed(report) == []
    assert statuses <= ({0} if report["healthy"] else {0, 1})


def test_sigterm_ends_the_processes_of_all_machines(lab: Lab) -> None:
    hosts = hosts_of(lab, 2)
    line = [sys.executable, "-m", "mingle.check.command", "--nnodes=2", "--nproc-per-node=2", "--json"]
    ranks = [host.run(line, env={"MINGLE_TIMEOUT": str(FORMS)}) for host in hosts]
    ranks[1].wait_for_output("correctness: ", FORMS)
    ranks[1].send_signal(signal.SIGTERM)
    assert [rank.wait(60) for rank in ranks] == [1, 128 + signal.SIGTERM]
    assert {kind for kind, _ in verdicts(json.loads(ranks[0].stdout))} == {"rank-interrupted"}
    assert [rank.stdout for rank in ranks[1:]] == [""]
    assert not any("Traceback" in rank.stderr for rank in ranks)
