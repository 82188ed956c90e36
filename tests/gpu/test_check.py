"""mingle-check with NCCL: each fault is blamed on what has it, as with Gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mingle.check.conductor import Options
from tests.lab import Host, Lab, Rank
from tests.lab.checks import SLOW, at_step, check, hosts_of, outcomes, verdicts

from .machines import SECONDS, own_machine


def start(hosts: Sequence[Host], **more: Any) -> list[Rank[tuple[int, str]]]:
    return [
        host.start(check, number, len(hosts), seconds=Options().seconds, env=own_machine(host), **more)
        for number, host in enumerate(hosts)
    ]


def blamed(report: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the verdicts, but not that a machine is busy, which the first use of a GPU can make true."""
    return [verdict for verdict in verdicts(report) if verdict[0] != "cpu-busy"]


@pytest.mark.parametrize(("backend", "used"), [("nccl", "nccl"), ("auto", "cpu:gloo,cuda:nccl")])
def test_healthy_hosts_raise_no_alarm(lab: Lab, backend: str, used: str) -> None:
    ranks = start(hosts_of(lab, 3), backend=backend)
    reports = outcomes(ranks)
    assert [line for rank in ranks for line in rank.stderr.splitlines() if "ProcessGroupNCCL" in line] == []
    for report in reports:
        assert verdicts(report) == []
        assert report["backend"] == used
        assert [step["name"] for step in report["steps"] if step["name"].startswith("links by NCCL")]
        assert {step["device"] for step in report["all_reduce"]} == ({"cuda"} if used == "nccl" else {"cpu", "cuda"})


@pytest.mark.parametrize("backend", ["nccl", "auto"])
def test_two_ranks_of_a_host_that_would_use_one_gpu_are_told(lab: Lab, backend: str) -> None:
    host = lab.host(lab.network(), name="node0")
    ranks = [
        host.start(check, number, 2, backend=backend, seconds=Options().seconds, as_json=False) for number in range(2)
    ]
    results = [rank.result(SECONDS) for rank in ranks]
    text = "".join(text for _, text in results)
    said = "".join(rank.stderr for rank in ranks)
    if backend == "nccl":
        assert [status for status, _ in results] == [1, 1]
        assert text.count("FAULT") == 1, "one rank speaks for the machine"
        assert "FAULT: node0 rank 0 and node0 rank 1 use the same GPU, which NCCL refuses." in text
        assert "correctness" not in said, "NCCL was not tried"
    else:
        assert "note: Gloo is used, on the CPU: ranks 0 and 1 on node0 would use the same GPU" in said
        assert "which NCCL refuses" not in text


@pytest.mark.parametrize("victim", [2, 0])
@pytest.mark.parametrize("how", ["ended", "silent"])
@pytest.mark.parametrize("step", ["correctness: broadcast on cuda", "bandwidth: all_reduce on cuda: 1024 B"])
def test_a_rank_that_is_killed_or_stopped_is_named(lab: Lab, tmp_path: Path, step: str, how: str, victim: int) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    ranks = start(hosts_of(lab, 3), backend="nccl", hold=step, until=str(fifo))
    at_step(ranks, step, fifo, ranks[victim].kill if how == "ended" else ranks[victim].stop)
    reports = outcomes([rank for number, rank in enumerate(ranks) if number != victim])
    assert [blamed(report) for report in reports] == [[(f"rank-{how}", (f"node{victim}",))]] * 2


@pytest.mark.parametrize("pair", [(1, 2), (0, 2)], ids=["of workers", "with rank 0"])
def test_a_filter_after_the_job_has_formed_is_named(lab: Lab, tmp_path: Path, pair: tuple[int, int]) -> None:
    hosts = hosts_of(lab, 3)
    one, other = (hosts[each] for each in pair)
    fifo, step = tmp_path / "go", "correctness: broadcast"
    os.mkfifo(fifo)
    ranks = start(hosts, backend="nccl", hold=step, until=str(fifo))
    at_step(ranks, step, fifo, lambda: other.drop(f"ip saddr {one.address()} meta l4proto tcp"))
    assert [blamed(report) for report in outcomes(ranks)] == [[("pair", (one.name, other.name))]] * 3


def slow_machine(hosts: Sequence[Host]) -> tuple[str, tuple[str, ...]]:
    hosts[2].drop(SLOW)
    return "slow-machine", ("node2",)


def lost_jumbo_frames(hosts: Sequence[Host]) -> tuple[str, tuple[str, ...]]:
    for host in hosts[1:]:
        host.ip(f"link set {host.interface()} mtu 9000 gso_max_segs 1")
    return "mtu", ("node1", "node2")


@pytest.mark.parametrize("fault", [slow_machine, lost_jumbo_frames])
def test_a_fault_of_the_network_is_named(
    lab: Lab, fault: Callable[[Sequence[Host]], tuple[str, tuple[str, ...]]]
) -> None:
    hosts = hosts_of(lab, 3)
    expected = fault(hosts)
    reports = outcomes(start(hosts, backend="nccl", mesh="off"))
    assert [blamed(report) for report in reports] == [[expected]] * 3
