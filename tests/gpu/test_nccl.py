"""Ranks on hosts of the lab use NCCL. They share one GPU, which NCCL allows between what it takes for two machines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mingle
from tests.lab import Lab, Rank
from tests.lab.torchrun_jobs import Job, jobs

from .machines import SECONDS, own_machine

BACKENDS: dict[str, dict[str, Any]] = {
    "torch's choice": {},
    "nccl": {"backend": "nccl"},
    "nccl, connected at once": {"backend": "nccl", "device_id": torch.device("cuda", 0)},
    "both": {"backend": "cpu:gloo,cuda:nccl"},
}


def train(**arguments: Any) -> dict[str, Any]:
    """Join the job and add up a tensor on the GPU, then one on the CPU."""
    with mingle.init(job_id="gpu", world_size=2, **arguments) as job:
        torch.cuda.set_device(0)
        on_gpu, on_cpu = torch.full((1 << 20,), job.rank + 1.0, device="cuda"), torch.full((1,), job.rank + 1.0)
        dist.all_reduce(on_gpu)
        try:
            dist.all_reduce(on_cpu)
        except RuntimeError as error:
            said = str(error)
        else:
            said = str(on_cpu.item())
        return {
            "sums": [value.item() for value in on_gpu.unique()],
            "on the CPU": said,
            "ifname": os.environ.get("NCCL_SOCKET_IFNAME"),
        }


def interfaces_of_nccl(rank: Rank[Any]) -> list[str]:
    """Return the interfaces that NCCL said it uses."""
    (said,) = set(re.findall(r"NET/Socket : Using (.*)", rank.output))
    return re.findall(r"\[\d+\](\w+):", said)


@pytest.mark.parametrize("named", [None, "eth1"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_two_hosts_add_up_tensors(lab: Lab, backend: str, named: str | None) -> None:
    networks = [lab.network("10.77.0.0/24"), lab.network("10.78.0.0/24")]
    hosts = [lab.host(*networks) for _ in range(2)]
    environment = {"NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = [
        host.start(train, interface=named, env=own_machine(host, **environment), **BACKENDS[backend]) for host in hosts
    ]
    for rank in ranks:
        result = rank.result(SECONDS)
        assert result["sums"] == [3]
        # docs/gpus.md says so: what torch chooses is NCCL alone.
        assert result["on the CPU"] == (
            "3.0" if backend == "both" else "No backend type associated with device type cpu"
        )
        assert result["ifname"] == (f"={named}" if named else None)
        assert interfaces_of_nccl(rank) == ([named] if named else ["eth0", "eth1"])


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    with jobs() as make:
        yield make


def test_torchrun_trains_again_after_the_loss_of_a_worker_and_of_the_host_of_the_store(
    lab: Lab, job: Callable[..., Job]
) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job("gpu-torchrun", "2:3", restarts=10, script=["--device=cuda"])
    for host in hosts:
        made.start(host, **own_machine(host))
    made.wait_for_group(hosts, seconds=SECONDS)
    os.kill(made.said(hosts[1], "started")[-1]["pid"], signal.SIGKILL)
    made.until(lambda: all(len(made.said(host, "started")) > 1 for host in hosts), "a second attempt", SECONDS)
    made.wait_for_group(hosts, since=made.said(hosts[0], "started")[-1]["at"], seconds=SECONDS)
    made.replace_store_host(hosts)
    made.finish(*hosts, seconds=SECONDS)


def by_url(rank: int) -> float:
    """Make the process group as a script does that never imports mingle, and add up the ranks."""
    dist.init_process_group("nccl", init_method="mingle://gpu-url", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    total = torch.full((1,), rank + 1.0, device="cuda")
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_process_group_by_url(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    ranks = [host.start(by_url, rank, env=own_machine(host)) for rank, host in enumerate(hosts)]
    assert [rank.result(SECONDS) for rank in ranks] == [3, 3]
