"""One process and its jobs: again and again, interrupted, in notebooks, and through fresh interpreters."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

import mingle
from mingle.distributed import gloo
from tests.support.loopback import until

from . import Lab, leak_check, report
from .scenarios import TIMEOUT, report_log, sum_of_ranks, wait_for_log


def again_and_again(rank: int, notebook: bool) -> list[int]:
    """Make the same job three times; a notebook never closes what it had."""
    sums = []
    with leak_check():
        job = None
        for _ in range(3):
            job = mingle.init("again", rank=rank, world_size=2, backend="gloo", discovery_timeout=TIMEOUT)
            sums.append(sum_of_ranks())
            assert [member.rank for member in job.members] == [0, 1]
            dist.barrier()  # rank 0 could end the job before rank 1 has asked for the members
            if not notebook:
                gloo.settle()  # torch before 2.8 may hang in the next line without it
                dist.destroy_process_group()
        assert job is not None
        job.__exit__(None, None, None)
    return sums


@pytest.mark.parametrize("notebook", [False, True])
def test_several_times_in_the_same_processes(lab: Lab, notebook: bool) -> None:
    ranks = [host.start(again_and_again, rank, notebook) for rank, host in enumerate(lab.lan(2))]
    assert [rank.result(60) for rank in ranks] == [[3, 3, 3], [3, 3, 3]]


def interrupted(rank: int, job_id: str) -> None:
    """Wait for a job that never forms; Ctrl-C must end it and leave nothing."""
    report_log()
    with leak_check():
        try:
            mingle.init(job_id, rank=rank, world_size=3, backend="gloo", discovery_timeout=TIMEOUT)
        finally:
            until(lambda: threading.active_count() == 1, 10)  # a thread of mingle's may be in its last instructions
            report("left", threads=threading.active_count(), environment=os.environ.get("MASTER_ADDR"))


def test_control_c_ends_ranks_that_wait(lab: Lab) -> None:
    """Rank 0, one that has a seat, and one that looks for another job."""
    waits = ((0, "one", "open"), (1, "one", "seated"), (1, "other", "seeking"))
    ranks = [host.start(interrupted, rank, job_id) for host, (rank, job_id, _) in zip(lab.lan(3), waits, strict=True)]
    for rank, (*_, moment) in zip(ranks, waits, strict=True):
        wait_for_log(rank, moment)
    for rank in reversed(ranks):
        rank.interrupt()
        assert rank.error(30).name == "KeyboardInterrupt"
        left = rank.wait_for("left")
        wait_for_log(rank, ": interrupted: ")
        assert (left["threads"], left["environment"]) == (1, None)


SCRIPT = """
import {first}
import {second}
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="mingle://fresh job/ä", rank={rank}, world_size=2)
numbers = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(numbers)
print("sum", numbers.item())
dist.destroy_process_group()
"""


def test_fresh_interpreters_in_either_order_of_imports(lab: Lab) -> None:
    orders = ("torch.distributed", "mingle"), ("mingle", "torch")
    ranks = [
        host.run(
            ["python", "-c", SCRIPT.format(first=first, second=second, rank=rank)],
            env={"OMP_NUM_THREADS": "1"},
        )
        for rank, (host, (first, second)) in enumerate(zip(lab.lan(2), orders, strict=True))
    ]
    for rank in ranks:
        assert rank.wait(60) == 0
        assert "sum 3" in rank.stdout
        assert "Traceback" not in rank.stderr


def test_under_torchrun_the_library_passes_through(lab: Lab) -> None:
    script = """
import os, mingle, torch, torch.distributed as dist
with mingle.init(backend="gloo") as job:
    numbers = torch.tensor([job.rank + 1])
    dist.all_reduce(numbers)
    assert job.members == () and os.environ["NODE_RANK"] == "0", (job, os.environ)
    print("sum", numbers.item())
"""
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    process = lab.host(lab.network()).run([*torchrun, "python", "-c", script], env={"OMP_NUM_THREADS": "1"})
    assert process.wait(90) == 0, process.output
    assert process.stdout.splitlines() == ["sum 3", "sum 3"]
