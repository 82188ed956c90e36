"""The same command everywhere: ranks are assigned, one host is elected, and the job is one."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from msgspec import structs

import mingle
from tests.support.levels import chosen, repeated

from . import UDP, EndedError, Host, Lab, Rank, report
from .scenarios import TIMEOUT, describe, report_log, results, sum_of_ranks, wait_for_log
from .test_timeouts import failure, timed


def assigned(job_id: str, world_size: int, **arguments: Any) -> dict[str, Any]:
    """What every process runs: only the size is known."""
    import torch.distributed as dist

    import mingle

    from . import leak_check, report

    report_log()
    arguments.setdefault("discovery_timeout", TIMEOUT)
    with leak_check(), mingle.init(job_id, world_size=world_size, backend="gloo", **arguments) as job:
        report("formed", rank=job.rank, master_addr=job.master_addr)
        result = describe(job)
        result["sum"] = sum_of_ranks()
        dist.barrier()
        return result


def start(hosts: list[Host], job_id: str, seed: int, longest: float = 3.0) -> list[Rank[dict[str, Any]]]:
    """Start the same command on all hosts, each at a moment of its own."""
    rng = random.Random(seed)
    moments = sorted((rng.uniform(0, longest), index) for index in range(len(hosts)))
    ranks: dict[int, Rank[dict[str, Any]]] = {}
    pause, before = threading.Event(), 0.0
    for moment, index in moments:
        pause.wait(moment - before)
        before = moment
        ranks[index] = hosts[index].start(assigned, job_id, len(hosts))
    return [ranks[index] for index in range(len(hosts))]


def found_with_id(job_id: str, world_size: int, member: bytes) -> dict[str, Any]:
    """Find the others under this member id; the lowest one wins elections. The job forms also without a mesh."""
    from mingle.engine import party

    made = party.process_identity
    party.process_identity = lambda *args, **more: structs.replace(made(*args, **more), member=member)
    report_log()
    with mingle.discover(job_id, world_size=world_size, discovery_timeout=TIMEOUT, mesh="off") as job:
        report("formed", rank=job.rank, master_addr=job.master_addr)
        result = describe(job)
        job.members  # noqa: B018 - before the host ends
        threading.Event().wait(5.0)
        return result


def check(found: list[dict[str, Any]], hosts: list[Host]) -> None:
    """One host, every rank once, ranks contiguous per node, everything else right."""
    world_size = len(found)
    assert sorted(result["rank"] for result in found) == list(range(world_size))
    assert {result["sum"] for result in found} == {world_size * (world_size + 1) // 2}
    assert len({result["master_addr"] for result in found}) == 1
    assert len({result["members"] for result in found}) == 1
    by_rank = sorted(zip(found, hosts, strict=True), key=lambda pair: pair[0]["rank"])
    assert by_rank[0][0]["master_addr"] == by_rank[0][1].address()
    nodes = list(dict.fromkeys(host.name for _, host in by_rank))
    blocks = [host.name for _, host in by_rank]
    assert blocks == sorted(blocks, key=nodes.index), "ranks are contiguous per host"
    for result, host in by_rank:
        here = [other["rank"] for other, on in by_rank if on is host]
        assert result["local_rank"] == here.index(result["rank"])
        assert result["local_world_size"] == len(here)
        assert (result["node_rank"], result["num_nodes"]) == (nodes.index(host.name), len(nodes))
        assert result["exported"]["LOCAL_RANK"] == str(result["local_rank"])


@pytest.mark.quick
@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_four_hosts(lab: Lab, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    check(results(start(hosts, f"elect {seed}", seed)), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_two_hosts_with_four_processes_each(lab: Lab, seed: int) -> None:
    network = lab.network()
    hosts = [host for host in (lab.host(network), lab.host(network)) for _ in range(4)]
    check(results(start(hosts, f"eight {seed}", seed, longest=1)), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_under_loss(lab: Lab, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    for host in hosts:
        host.drop_udp(30)
    check(results(start(hosts, f"lossy {seed}", seed)), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_network_cut_in_two_from_the_start(lab: Lab, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    lab.split(network, set(hosts[:2]), set(hosts[2:]))
    ranks = start(hosts, f"halves {seed}", seed, longest=0.5)
    for rank in ranks:
        wait_for_log(rank, "seeking")
    # Each half has elected a host of its own by then.
    threading.Event().wait(random.Random(seed).uniform(1, 3))
    assert not any(event.name == "formed" for rank in ranks for event in rank.events)
    lab.join(network)
    check(results(ranks), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("direction", chosen(["out"], soak=["in"]))
def test_one_host_is_not_heard_by_multicast(lab: Lab, direction: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    hosts[0].isolate_one_way("out" if direction == "out" else "in", match=UDP)
    check(results(start(hosts, f"one way {seed}", seed, longest=1)), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("place", chosen([0], soak=[1, 3]))
def test_one_host_that_takes_no_connections(lab: Lab, place: int, seed: int) -> None:
    """By its place in the order of ids: the lowest is the first to host, and no other can call it."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    filtered = hosts[place]
    filtered.drop("tcp flags & (syn | ack) == syn")
    ids = [bytes([number]) + random.Random(seed).randbytes(15) for number in (0, 80, 160, 240)]
    ranks = [host.start(found_with_id, f"filtered {seed}", 4, member) for host, member in zip(hosts, ids, strict=True)]
    found = results(ranks)
    print(f"GO after {max(result['elapsed'] for result in found):.1f} s")
    assert sorted(result["rank"] for result in found) == list(range(4))
    assert len({result["members"] for result in found}) == 1
    (master,) = {result["master_addr"] for result in found}
    assert master in {host.address() for host in hosts} - {filtered.address()}


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("phase", chosen(["open, 3/4"], soak=["open, 1/4", "open, 2/4"]))
def test_the_elected_host_is_killed_and_replaced(lab: Lab, phase: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(5)]
    before = int(phase[6])
    ranks = [host.start(assigned, f"killed {seed}", 4) for host in hosts[:before]]
    victim = wait_for_host(ranks, phase)
    ranks[victim].kill()
    del ranks[victim], hosts[victim]
    ranks += [host.start(assigned, f"killed {seed}", 4) for host in hosts[before - 1 :]]
    check(results(ranks), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_the_elected_host_is_killed_while_the_job_seals(lab: Lab, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(5)]
    ranks = [host.start(assigned, f"seals {seed}", 4) for host in hosts[:4]]
    victim = wait_for_host(ranks, "confirming")
    threading.Event().wait(random.Random(seed).uniform(0, 0.004))
    try:
        ranks[victim].kill()
    except EndedError:
        ranks[victim].result()  # it has formed
    lost = hosts[victim].address()
    del ranks[victim], hosts[victim]
    ranks.append(hosts[3].start(assigned, f"seals {seed}", 4))
    if have_formed_without(lost, ranks):
        check(results(ranks), hosts)
    # Else the kill came too late: GO was out, and the ranks that had it say so. The victim itself can't: what it was
    # about to report died with it.


def have_formed_without(lost: str, ranks: list[Rank[dict[str, Any]]]) -> bool:
    """Wait until all have formed, or one had formed with the host that was lost; return whether it is the former."""
    step = threading.Event()
    for _ in range(int(TIMEOUT / 0.01)):
        formed = [event for rank in ranks for event in rank.events if event.name == "formed"]
        if any(event["master_addr"] == lost for event in formed) or any(
            "lost after the job had formed" in event.data.get("text", "") for rank in ranks for event in rank.events
        ):
            return False
        if len(formed) == len(ranks):
            return True
        step.wait(0.01)
    return True  # neither: the results tell why


def wait_for_host(ranks: list[Rank[dict[str, Any]]], phase: str) -> int:
    """Wait until one of them hosts and has come this far; return which."""
    step = threading.Event()
    for _ in range(24_000):
        for index, rank in enumerate(ranks):
            if any(event.name == "log" and phase in event["text"] for event in rank.events):
                return index
        step.wait(0.005)
    raise AssertionError(f"nobody came to {phase!r}")


def test_one_process_too_many(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(5)]
    ranks = [host.start(hold_assigned, "five", 4) for host in hosts[:4]]
    for rank in ranks:
        rank.wait_for("formed")
    fifth = hosts[4].start(timed, "five", None, 4, discovery_timeout=12)
    error = failure(fifth, 12)
    assert error.name == "ConflictError"
    assert "full" in error.message
    for host in hosts[:4]:
        assert host.name in error.message


def hold_assigned(job_id: str, world_size: int) -> None:
    """Form, and run until killed."""
    import mingle

    from . import report

    with mingle.discover(job_id, world_size=world_size, discovery_timeout=TIMEOUT) as job:
        report("formed", rank=job.rank)
        threading.Event().wait()


@pytest.mark.soak
@pytest.mark.parametrize("given", chosen([1], soak=[0]))
def test_some_ranks_given_and_some_not(lab: Lab, given: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    ranks = [
        hosts[0].start(timed, "mixed", given, 2, discovery_timeout=8),
        hosts[1].start(timed, "mixed", None, 2, discovery_timeout=8),
    ]
    errors = [rank.error() for rank in ranks]
    assert "ConflictError" in {error.name for error in errors}
    assert any("rank" in error.message and "none" in error.message for error in errors if error.name == "ConflictError")
