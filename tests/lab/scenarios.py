"""What lab ranks run, and what is checked of a job that formed."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import mingle

from . import Host, Lab, RaisedError, Rank, leak_check, report

R = TypeVar("R")
FAULT = "could not be handled and was dropped"
TIMEOUT = 30.0
"""The discovery timeout of ranks that shall succeed: far above what they need, below what a test may take."""


class _Reporting(logging.Handler):
    """Sends every line of mingle's log to the test as an event."""

    def emit(self, record: logging.LogRecord) -> None:
        report("log", text=record.getMessage())


def report_log() -> None:
    """Let the test see how far this rank has come."""
    logger = logging.getLogger("mingle")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_Reporting())


def wait_for_log(rank: Rank[Any], text: str, timeout: float = TIMEOUT) -> None:
    """Wait until a line of a rank's log contains this."""
    while text not in rank.wait_for("log", timeout)["text"]:
        pass


def without_udp(lab: Lab, count: int) -> list[Host]:
    """Hosts between which no datagram passes."""
    hosts = lab.lan(count)
    for host in hosts:
        for direction in ("in", "out"):
            host.drop("meta l4proto udp", direction)  # type: ignore[arg-type]
    return hosts


def with_a_silent_name_server(lab: Lab, count: int) -> tuple[Host, list[Host]]:
    """A name server that does not answer, and hosts that ask it: torch alone waits 10 s for it."""
    silent, *hosts = lab.lan(count + 1)
    silent.drop("udp dport 53")
    for host in hosts:
        host.resolver_file.write_text(f"nameserver {silent.address()}\n")
    return silent, hosts


def ranks_are(given: bool) -> str:
    """The id of a test whose ranks are given, or assigned."""
    return "given" if given else "assigned"


def start_ranks(
    hosts: Sequence[Host], job_id: str, *, given: bool = True, **arguments: Any
) -> list[Rank[dict[str, Any]]]:
    """Start `train` on each host, with ranks in this order or none."""
    size = len(hosts)
    return [host.start(train, job_id, rank if given else None, size, **arguments) for rank, host in enumerate(hosts)]


def start_apart(hosts: Sequence[Host], seed: int, start: Callable[[int], Rank[R]]) -> list[Rank[R]]:
    """Start a process on each host, in random order and up to half a second apart; return them as the hosts stand."""
    rng = random.Random(seed)
    ranks = {}
    for number in rng.sample(range(len(hosts)), len(hosts)):
        ranks[number] = start(number)
        time.sleep(rng.uniform(0, 0.5))
    return [ranks[number] for number in range(len(hosts))]


def least(measure: Callable[[], float], limit: float) -> float:
    """Measure three times at most, until it is below the limit; return the least: a machine may stall once."""
    taken: list[float] = []
    while len(taken) < 3 and (not taken or taken[-1] >= limit):
        time.sleep(5.0 * len(taken))  # until it is over
        taken.append(measure())
    return min(taken)


def interrupt(rank: Rank[Any]) -> float:
    """Press Ctrl-C in a process that waits; return how long it takes until it has ended, in seconds."""
    interrupted = time.monotonic()
    rank.interrupt()
    assert rank.error().name == "KeyboardInterrupt"
    rank.wait(10)
    took = time.monotonic() - interrupted
    print(f"ended after {took:.2f} s")
    return took


def describe(job: mingle.Job) -> dict[str, Any]:
    """What a rank knows at the end."""
    return {
        "rank": job.rank,
        "world_size": job.world_size,
        "local_rank": job.local_rank,
        "local_world_size": job.local_world_size,
        "node_rank": job.node_rank,
        "num_nodes": job.num_nodes,
        "master_addr": job.master_addr,
        "interface": job.interface,
        "address": job.address,
        "elapsed": job.elapsed,
        "members": job.members,
        "exported": {name: os.environ.get(name) for name in EXPORTED},
    }


EXPORTED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


def sum_of_ranks() -> int:
    """One all_reduce: every rank adds its own number plus one."""
    numbers = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(numbers)
    return int(numbers.item())


def train(job_id: str, rank: int | None, world_size: int, door: str = "init", **arguments: Any) -> dict[str, Any]:
    """Come through one of the doors, reduce once, and leave nothing behind."""
    report_log()
    arguments.setdefault("discovery_timeout", TIMEOUT)
    with leak_check():
        if door == "init":
            with mingle.init(job_id, rank=rank, world_size=world_size, backend="gloo", **arguments) as job:
                return _reduced(job)
        if door == "env":
            with mingle.discover(job_id, rank=rank, world_size=world_size, **arguments) as job:
                dist.init_process_group("gloo", init_method="env://")
                try:
                    return _reduced(job)
                finally:
                    dist.destroy_process_group()
        assert door == "url"
        os.environ["MINGLE_TIMEOUT"] = str(arguments["discovery_timeout"])
        try:
            dist.init_process_group("gloo", init_method=f"mingle://{job_id}", rank=rank, world_size=world_size)
            result = {"sum": sum_of_ranks(), "exported": {name: os.environ.get(name) for name in EXPORTED}}
            dist.barrier()
            dist.destroy_process_group()
            return result
        finally:
            del os.environ["MINGLE_TIMEOUT"]
            end_session()


def _reduced(job: mingle.Job) -> dict[str, Any]:
    result = describe(job)
    result["sum"] = sum_of_ranks()
    # Nobody may leave while another still asks rank 0 for the roster.
    dist.barrier()
    report("reduced")
    return result


def end_session() -> None:
    """What the interpreter's exit does: the ``mingle://`` door gives no job to close."""
    from mingle.distributed import rendezvous

    rendezvous.end_session()


def discover_only(job_id: str, rank: int | None, world_size: int, **arguments: Any) -> dict[str, Any]:
    """Find the others, then hold on until killed or told otherwise."""
    report_log()
    arguments.setdefault("discovery_timeout", TIMEOUT)
    with leak_check(), mingle.discover(job_id, rank=rank, world_size=world_size, **arguments) as job:
        report("formed", elapsed=job.elapsed)
        return describe(job)


def describe_and_stay(job_id: str, rank: int, world_size: int, **arguments: Any) -> None:
    """Find the others, say what came of it, and hold on until killed."""
    report_log()
    with mingle.discover(job_id, rank=rank, world_size=world_size, discovery_timeout=TIMEOUT, **arguments) as job:
        report("formed", **describe(job))
        threading.Event().wait()


def hold_back(job_id: str, rank: int, world_size: int, seconds: float) -> dict[str, Any]:
    """Find the others, and make the process group so much later."""
    report_log()
    with leak_check(), mingle.discover(job_id, rank=rank, world_size=world_size, discovery_timeout=TIMEOUT) as job:
        report("formed")
        time.sleep(seconds)
        dist.init_process_group("gloo", init_method="env://")
        try:
            return _reduced(job)
        finally:
            dist.destroy_process_group()


def hold(job_id: str, rank: int, world_size: int, **arguments: Any) -> None:
    """Like ``train``, but keep the job running until killed."""
    report_log()
    arguments.setdefault("discovery_timeout", TIMEOUT)
    with mingle.init(job_id, rank=rank, world_size=world_size, backend="gloo", **arguments):
        report("running", sum=sum_of_ranks())
        threading.Event().wait()


def timed(job_id: str, rank: int | None, world_size: int, **arguments: Any) -> None:
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


def check(found: Sequence[dict[str, Any]], hosts: Sequence[Host], *, given: bool = True) -> None:
    """Every promise about a job that formed; ``hosts`` are those of the results, in order of rank if it was given."""
    if not given:
        pairs = sorted(zip(found, hosts, strict=True), key=lambda pair: int(pair[0]["rank"]))
        found, hosts = [result for result, _ in pairs], [host for _, host in pairs]
        assert hosts == sorted(hosts, key=hosts.index), "the ranks of a host follow each other"
    world_size = len(found)
    nodes: list[Host] = list(dict.fromkeys(hosts))
    for rank, (result, host) in enumerate(zip(found, hosts, strict=True)):
        here = [each for each in range(world_size) if hosts[each] is host]
        assert result["rank"] == rank
        assert result["sum"] == world_size * (world_size + 1) // 2
        assert result["local_rank"] == here.index(rank)
        assert result["local_world_size"] == len(here)
        assert result["node_rank"] == nodes.index(host)
        assert result["num_nodes"] == len(nodes)
        assert result["members"] == found[0]["members"]
        exported = result["exported"]
        assert exported["MASTER_ADDR"] == result["master_addr"] == hosts[0].address()
        assert exported["GLOO_SOCKET_IFNAME"] == exported["TP_SOCKET_IFNAME"] == result["interface"]
        if len(nodes) > 1:
            assert result["interface"] == host.interface()
        assert result["address"] == host.address()
        assert exported["NCCL_SOCKET_IFNAME"] is None
        assert [exported["RANK"], exported["WORLD_SIZE"]] == [str(rank), str(world_size)]
        assert exported["LOCAL_RANK"] == str(result["local_rank"])
    for rank, member in enumerate(found[0]["members"]):
        assert (member.rank, member.hostname, member.address) == (rank, hosts[rank].name, hosts[rank].address())


def results(ranks: Sequence[Rank[R]], timeout: float = 2 * TIMEOUT) -> list[R]:
    """What all of them returned. None of them may have dropped input that it could not handle: that is a defect."""
    found = [rank.result(timeout) for rank in ranks]
    faults = [
        event["text"] for rank in ranks for event in rank.events if event.name == "log" and FAULT in event["text"]
    ]
    assert faults == []
    return found


def formed(ranks: Sequence[Rank[dict[str, Any]]], hosts: Sequence[Host], *, given: bool = True) -> float:
    """Check that these ranks form a job, and return how long the slowest one took."""
    found = results(ranks)
    check(found, hosts, given=given)
    seconds = sorted(round(float(result["elapsed"]), 3) for result in found)
    print(f"formed after {seconds} s")
    return seconds[-1]
