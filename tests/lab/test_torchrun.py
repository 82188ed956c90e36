"""Real torchrun on hosts that nobody was told an address of: every host runs the same line."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.support.levels import chosen, soaking

from . import Host, Lab
from .scenarios import with_a_silent_name_server
from .torchrun_jobs import Job, MakeJob

pytestmark = pytest.mark.timeout(600)


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
@pytest.mark.soak(3)
@pytest.mark.parametrize("workers", chosen([1], soak=[2]))
def test_three_hosts_in_any_order(lab: Lab, job: MakeJob, workers: int, seed: int) -> None:
    hosts = lab.lan(3)
    made = job("any-order", "3", workers=workers)
    rng = random.Random(seed)
    for host in rng.sample(hosts, 3):
        made.start(host)
        threading.Event().wait(rng.uniform(0, 10 if soaking() else 1))
    made.wait_for_group(hosts)
    started_right(made, hosts, workers)
    made.finish(*hosts)


@pytest.mark.soak(3)
@pytest.mark.parametrize("naming", chosen(["unresolvable"], soak=["localhost"]))
def test_agents_gather_although_host_names_do_not_resolve_or_are_equal(lab: Lab, job: MakeJob, naming: str) -> None:
    hosts = lab.lan(2)
    for host in hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n")
        if naming == "localhost":
            assert host.run(["hostname", "localhost"]).wait() == 0
    made = job("names", "2")
    made.start(*hosts)
    names = {"localhost"} if naming == "localhost" else {host.name for host in hosts}
    made.until(lambda: all(names == set(made.group(host)) for host in hosts), "a step together")
    assert made.said(hosts[0], "step")[0]["size"] == 2
    started_right(made, hosts, 1)
    made.finish(*hosts)


@pytest.mark.soak(3)
def test_of_two_interfaces_the_shared_one_is_used(lab: Lab, job: MakeJob) -> None:
    shared = lab.network("10.77.0.0/24")
    # Each has another one first, with the default route and the host's name on it.
    hosts = [lab.host(lab.network(f"10.8{number}.0.0/24"), shared) for number in range(2)]
    made = job("two-nics", "2")
    made.start(*hosts)
    made.wait_for_group(hosts)
    for host in hosts:
        environment = made.said(host, "started")[0]["environment"]
        assert environment["MASTER_ADDR"] in {each.address(shared) for each in hosts}
        assert environment["GLOO_SOCKET_IFNAME"] == host.interface(shared)
    made.finish(*hosts)


@pytest.mark.soak(3)
def test_agents_have_their_round_before_a_silent_name_server_is_given_up(lab: Lab, job: MakeJob) -> None:
    """Torch looks up the name of each host that it connects to, as the workers do then: for them it takes 10 s."""
    _, hosts = with_a_silent_name_server(lab, 3)
    made = job("dns", "3")
    began = time.monotonic()
    made.start(*hosts)
    had_rounds = [made.agents[host].wait_for("round").time - began for host in hosts]
    made.wait_for_group(hosts)
    made.finish(*hosts)
    assert max(had_rounds) < 9


@pytest.mark.soak(3)
def test_a_worker_crashes_in_its_first_attempt(lab: Lab, job: MakeJob) -> None:
    hosts = lab.lan(2)
    made = job("crash", "2", restarts=3, script=["--crash=1"])
    made.start(*hosts)
    made.until(lambda: any(said["attempt"] == 1 for said in made.said(hosts[0])), "a second attempt")
    made.wait_for_group(hosts)
    made.finish(*hosts)
    ports = {said["environment"]["MASTER_PORT"] for said in made.said(hosts[0], "started")}
    assert len(ports) > 1  # a store of its own for each round


def test_two_jobs_at_once_and_one_again_with_the_same_id(lab: Lab, job: MakeJob) -> None:
    hosts = lab.lan(2)
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


@pytest.mark.soak(3)
def test_one_node_of_two_begins_after_one_last_call(lab: Lab, job: MakeJob) -> None:
    """Torch has a last call of its own."""
    (host,) = lab.lan(1)
    last_call = 12
    made = job("one", "1:2", conf=f"last_call_timeout={last_call}")
    at = time.monotonic()
    made.start(host)
    made.wait_for_group([host])
    began = made.rounds()[0][0] - at
    print(f"its first round began after {began:.1f} s")
    assert last_call < began < 2 * last_call
    made.finish(host)
