"""Real torchrun on hosts that nobody was told an address of: every host runs the same line."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.levels import chosen, repeated, soaking

from . import Host, Lab, LabError
from .torchrun_jobs import SECONDS, Job, jobs

pytestmark = pytest.mark.timeout(600)
MakeJob = Callable[..., Job]


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


def started_right(job: Job, hosts: list[Host], workers: int) -> None:
    """Every worker's place is right, and rank 0's address is one of a host of the lab."""
    every = [said for host in hosts for said in job.said(host, "started")]
    assert sorted(said["rank"] for said in every) == list(range(len(hosts) * workers))
    for host in hosts:
        here = job.said(host, "started")
        assert sorted(said["environment"]["LOCAL_RANK"] for said in here) == [str(n) for n in range(workers)]
        assert {said["environment"]["GLOO_SOCKET_IFNAME"] for said in here} == {host.interface()}
    (master,) = {said["environment"]["MASTER_ADDR"] for said in every}
    assert master in {host.address() for host in hosts}


@pytest.mark.quick
@pytest.mark.soak
@pytest.mark.parametrize("workers", chosen([1], soak=[2]))
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_three_hosts_in_any_order(lab: Lab, job: MakeJob, seed: int, workers: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"any-order-{seed}-{workers}", "3", workers=workers)
    rng = random.Random(seed)
    for host in rng.sample(hosts, 3):
        made.start(host)
        threading.Event().wait(rng.uniform(0, 10 if soaking() else 1))
    made.wait_for_group(hosts)
    started_right(made, hosts, workers)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("naming", chosen(["unresolvable"], soak=["localhost"]))
def test_agents_gather_although_host_names_do_not_resolve_or_are_equal(
    lab: Lab, job: MakeJob, naming: str, seed: int
) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    for host in hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n")
        if naming == "localhost":
            assert host.run(["hostname", "localhost"]).wait() == 0
    made = job(f"names-{naming}-{seed}", "2")
    made.start(*hosts)
    names = {"localhost"} if naming == "localhost" else {host.name for host in hosts}
    made.until(lambda: all(names == set(made.group(host)) for host in hosts), "a step together")
    assert made.said(hosts[0], "step")[0]["size"] == 2
    started_right(made, hosts, 1)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_of_two_interfaces_the_shared_one_is_used(lab: Lab, job: MakeJob, seed: int) -> None:
    shared = lab.network("10.77.0.0/24")
    # Each has another one first, with the default route and the host's name on it.
    hosts = [lab.host(lab.network(f"10.8{number}.0.0/24")) for number in range(2)]
    for host in hosts:
        host.attach(shared)
    made = job(f"two-nics-{seed}", "2")
    made.start(*hosts)
    made.wait_for_group(hosts)
    for host in hosts:
        environment = made.said(host, "started")[0]["environment"]
        assert environment["MASTER_ADDR"] in {each.address(shared) for each in hosts}
        assert environment["GLOO_SOCKET_IFNAME"] == host.interface(shared)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_three_of_ten_datagrams_are_lost(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    for host in hosts:
        host.drop_udp(30)
    made = job(f"loss-{seed}", "3")
    made.start(*hosts)
    made.wait_for_group(hosts)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("count", chosen([2], soak=[3]))
def test_a_worker_crashes_in_its_first_attempt(lab: Lab, job: MakeJob, count: int, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(count)]
    made = job(f"crash-{count}-{seed}", str(count), restarts=3, script=["--crash=1"])
    made.start(*hosts)
    made.until(lambda: any(said["attempt"] == 1 for said in made.said(hosts[0])), "a second attempt")
    made.wait_for_group(hosts)
    made.finish(*hosts)
    ports = {said["environment"]["MASTER_PORT"] for said in made.said(hosts[0], "started")}
    assert len(ports) > 1  # a store of its own for each round


def test_fewer_nodes_than_wanted_end_with_who_was_there_and_the_mistyped_id(lab: Lab, job: MakeJob) -> None:
    network = lab.network()
    *hosts, apart = [lab.host(network) for _ in range(3)]
    made, mistyped = job("few", "3", conf="discovery_timeout=12"), job("fwe", "3", conf="discovery_timeout=12")
    made.start(*hosts)
    mistyped.start(apart)
    for host in hosts:
        failure = made.agents[host].error(SECONDS)
        assert failure.name == "RendezvousTimeoutError"
        assert "2 of 3 nodes were there" in failure.message
        for each in hosts:
            assert f"host {each.name} ({each.address()})" in failure.message
        assert "a mistyped --rdzv-id: 'fwe' is on this network" in failure.message
    failure = mistyped.agents[apart].error(SECONDS)
    assert "1 of 3 nodes were there" in failure.message
    assert "a mistyped --rdzv-id: 'few' is on this network" in failure.message
    assert f"interfaces: {apart.interface(network)} " in failure.message
    assert "UDP port 29499" in failure.message
    assert re.search(r"datagrams: [1-9]\d* sent, [1-9]\d* heard, 0 rejected", failure.message)


def test_two_jobs_at_once_and_one_again_with_the_same_id(lab: Lab, job: MakeJob) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    first, second = job("one", "2"), job("other", "2")
    for made in (first, second):
        made.start(*hosts)
    for made in (first, second):
        made.wait_for_group(hosts)
    assert {said["environment"]["TORCHELASTIC_RUN_ID"] for said in first.said(hosts[0], "started")} == {"one"}
    first.finish(*hosts)
    first.stop_file.unlink()
    first.start(*hosts)
    first.wait_for_group(hosts)
    first.finish(*hosts)
    second.finish(*hosts)


def logged(made: Job, host: Host, part: str) -> None:
    """Wait until the agent of this host has said something."""
    agent = made.agents[host]
    made.until(lambda: any(part in event.data.get("text", "") for event in agent.events), f"{part!r} on {host.name}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_second_run_of_an_id_on_other_machines_begins_when_the_first_one_has_ended(
    lab: Lab, job: MakeJob, seed: int
) -> None:
    network = lab.network()
    hosts, others = ([lab.host(network) for _ in range(2)] for _ in range(2))
    first = job(f"first-{seed}", "2")
    second = job(f"second-{seed}", "2", options=[f"--rdzv-id={first.name}"])
    first.start(*hosts)
    first.wait_for_group(hosts)
    second.start(*others)
    for other in others:
        logged(second, other, "has been running for")
    first.finish(*hosts)
    second.wait_for_group(others)
    second.finish(*others)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_second_run_of_an_id_says_why_it_waits_when_signals_have_ended_the_first_one(
    lab: Lab, job: MakeJob, seed: int
) -> None:
    network = lab.network()
    hosts, others = ([lab.host(network) for _ in range(2)] for _ in range(2))
    first = job(f"killed-{seed}", "2")
    second = job(
        f"waits-{seed}",
        "2",
        conf="discovery_timeout=40",
        options=[f"--rdzv-id={first.name}"],
        env={"MINGLE_PROGRESS": "auto"},
    )
    first.start(*hosts)
    first.wait_for_group(hosts)
    second.start(*others)
    for other in others:
        logged(second, other, "has been running for")
    for host in hosts:
        first.agents[host].stop()  # both end at once: one that is left gives the place of the other to a newcomer
    for host in hosts:
        host.kill()
    for other in others:
        logged(second, other, "likely cause: nodes came while the job ran on others (node 0 on host ")
    for other in others:
        failure = second.agents[other].error(SECONDS)
        assert "if that run has ended, start the nodes of this one again" in failure.message


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_machine_that_waits_since_nnodes_was_forgotten_is_told_so(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    host, other = (lab.host(network) for _ in range(2))
    first = job(f"alone-{seed}", "1")
    second = job(f"apart-{seed}", "1", options=[f"--rdzv-id={first.name}"])
    first.start(host)
    first.wait_for_group([host])
    second.start(other)
    logged(second, other, "a job of 1 node runs there: was --nnodes forgotten?")
    first.finish(host)
    second.wait_for_group([other])
    second.finish(other)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_two_torchruns_of_one_machine_that_take_the_place_of_another_one_are_named(
    lab: Lab, job: MakeJob, seed: int
) -> None:
    network = lab.network()
    host, other = (lab.host(network) for _ in range(2))
    made = job(f"twice-{seed}", "2", conf="discovery_timeout=20")
    made.start(host, host)
    said = "several torchruns of one machine are in this job"
    made.until(
        lambda: any(said in event.data.get("text", "") for _, agent in made.past for event in agent.events),
        "the warning",
    )
    made.start(other)
    logged(made, other, said)
    failure = made.agents[other].error(SECONDS)
    assert f"likely cause: {said}" in failure.message
    assert "start one torchrun on each machine" in failure.message
    made.stop_file.touch()
    for _, agent in made.past[:2]:
        agent.result(SECONDS)


def test_a_mistake_in_the_line_is_told_before_anything_else(lab: Lab, job: MakeJob) -> None:
    host = lab.host()  # without a network: nothing could be sent
    lines: list[tuple[dict[str, Any], str]] = [
        ({"options": ["--rdzv-endpoint=node1:29400"]}, "remove --rdzv-endpoint"),
        ({"conf": "typo=1"}, "mingle's keys are node_rank, discovery_timeout, interface"),
    ]
    for line, part in lines:
        made = job("mistake", "1", **line)
        made.start(host)
        failure = made.agents[host].error(SECONDS)
        assert failure.name == "ConfigurationError"
        assert part in failure.message
    with pytest.raises(LabError):
        host.address()


def test_a_host_name_of_64_bytes_is_told_before_anything_else(lab: Lab, job: MakeJob) -> None:
    host = lab.host()
    assert host.run(["hostname", "n" * 64]).wait() == 0
    made = job("long-name", "1")
    made.start(host)
    failure = made.agents[host].error(SECONDS)
    assert failure.name == "ConfigurationError"
    assert f"this machine's host name, {'n' * 64} (64 bytes), can't be looked up" in failure.message


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_one_node_of_two_begins_after_one_last_call(lab: Lab, job: MakeJob, seed: int) -> None:
    host = lab.host(lab.network())
    last_call = 12
    made = job(f"one-{seed}", "1:2", conf=f"last_call_timeout={last_call}")
    at = time.monotonic()
    made.start(host)
    made.wait_for_group([host])
    began = made.rounds()[0][0] - at
    print(f"its first round began after {began:.1f} s")
    assert last_call < began < 2 * last_call
    made.finish(host)
