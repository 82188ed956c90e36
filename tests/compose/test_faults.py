"""Containers that die or lose their network, and those that take their places."""

from __future__ import annotations

import json
import threading
import time

from .output import MET, identical_ranks, roster
from .project import FORM_SECONDS, Container, MakeProject, Project
from .training import BRIEFLY, FOREVER, epochs

PATIENCE_SECONDS = 12  # of one process too many
UNPLUGGED_SECONDS = 3  # longer than mingle takes to see it


def gathering(project: Project, joined: int) -> str:
    """Look from inside a container until so many ranks have joined the one job; return its host's name."""
    observer, *_ = project.containers()
    answer = ""
    deadline = time.monotonic() + FORM_SECONDS
    while time.monotonic() < deadline:
        answer = observer.run("sh", "-c", "mingle-discover list --json || test $? = 1")  # 1: none yet
        jobs = json.loads(answer)["jobs"]
        if [(job["state"], job["joined"]) for job in jobs] == [("open", joined)]:
            return str(jobs[0]["host"]["hostname"])
    raise AssertionError(f"{joined} ranks never joined: {answer}")


def test_the_elected_host_is_killed_before_the_start(project: MakeProject) -> None:
    four = project(BRIEFLY)
    three = four.up("--scale", "trainer=3")
    host = gathering(four, 3)
    (victim,) = (container for container in three if container.hostname == host)
    victim.kill()
    containers = four.up("--scale", "trainer=4")
    assert len(containers) == 4
    assert victim.identity not in {container.identity for container in containers}
    log = four.logs()
    assert identical_ranks(log) == 4
    assert sorted(roster(log).hostnames) == sorted(container.hostname for container in containers)


def test_a_rank_by_number_is_killed_before_the_start(project: MakeProject) -> None:
    four = project(BRIEFLY)
    four.up_ranks(0, 1, 2)
    gathering(four, 3)
    (victim,) = four.containers("rank2")
    victim.kill()
    four.up_ranks(2, 3)
    log = four.logs()
    assert identical_ranks(log) == 4
    assert victim.hostname not in roster(log).hostnames


def move(project: Project, container: Container, address: str) -> None:
    """Take a container off its network for a while; it comes back at another address."""
    before, _ = container.addresses()
    assert before != address
    project.disconnect(container)
    threading.Event().wait(UNPLUGGED_SECONDS)
    project.connect(container, address)
    assert container.addresses()[0] == address


def test_networks_come_and_go_while_replicas_wait_for_the_last(project: MakeProject) -> None:
    """That of one that waits, then that of the host that was elected."""
    three = project(BRIEFLY, WORLD_SIZE="3")
    two = three.up("--scale", "trainer=2")
    host = gathering(three, 2)
    moved = sorted(two, key=lambda container: container.hostname == host)
    addresses = [str(three.subnet[200 + number]) for number in range(2)]
    for container, address in zip(moved, addresses, strict=True):
        move(three, container, address)
    containers = three.up("--scale", "trainer=3")
    assert {container.identity for container in two} < {container.identity for container in containers}
    log = three.logs()
    assert identical_ranks(log) == 3
    job = roster(log)
    assert sorted(job.hostnames) == sorted(container.hostname for container in containers)
    found = dict(zip(job.hostnames, job.addresses, strict=True))
    assert [found[container.hostname] for container in moved] == addresses


def test_the_network_of_rank_0_comes_and_goes_while_ranks_by_number_wait(project: MakeProject) -> None:
    services = {name: {**each, "environment": {"WORLD_SIZE": "3"}} for name, each in BRIEFLY["services"].items()}
    three = project({"services": services})
    three.up_ranks(0, 1)
    gathering(three, 2)
    (rank_zero,) = three.containers("rank0")
    address = str(three.subnet[200])
    move(three, rank_zero, address)
    three.up_ranks(2)
    log = three.logs()
    assert identical_ranks(log) == 3
    job = roster(log)
    assert (job.hostnames[0], job.addresses[0]) == (rank_zero.hostname, address)
    assert job.store.startswith(f"{address}:")


def test_containers_that_restart_one_by_one_form_one_new_job(project: MakeProject) -> None:
    """One process dies in training; that ends the others', each in its time, and Docker starts all of them again."""
    three = project(epochs(100_000, restart="always"), WORLD_SIZE="3")
    containers = three.up()
    first = [container.wait_for(MET)[0] for container in containers]
    victim = next(container for container, met in zip(containers, first, strict=True) if met[1] != "0")
    # Docker does not restart what `docker kill` has ended.
    (host,) = (container for container, met in zip(containers, first, strict=True) if met[1] == "0")
    (pid,) = {match[1] for match in host.wait_for(rf"^  rank \d+: {victim.hostname} .* pid (\d+)$")}
    victim.run("sh", "-c", f"kill -9 {pid}")
    second = [container.wait_for(MET, times=2)[1] for container in containers]
    assert sorted(int(met[1]) for met in second) == [0, 1, 2]
    assert [met[2] for met in second] == [met[2] for met in first]  # the same containers
    stores = [{met[3] for met in generation} for generation in (first, second)]
    assert [len(of_one) for of_one in stores] == [1, 1]
    assert stores[0] != stores[1]


def test_a_job_that_runs_is_seen_and_takes_nobody_more(project: MakeProject) -> None:
    two = project(FOREVER, WORLD_SIZE="2")
    containers = two.up()
    (met, _) = [container.wait_for(MET)[0] for container in containers]
    for seconds in (2, 8, 32):  # two processes that train fill this machine
        jobs = two.discover("list", "--timeout", str(seconds))["jobs"]
        if jobs and jobs[0]["proved"]:
            break
    (job,) = jobs
    assert (job["state"], job["joined"], job["missing"]) == ("running", 2, [])
    found = two.discover("find", job["job"], "--timeout", "60")
    assert (found["endpoint"], f"{found['address']}:{found['port']}") == ("store", met[3])
    surplus = ["run", "--rm", "-T", "-e", f"MINGLE_TIMEOUT={PATIENCE_SECONDS}", "trainer"]
    said = two.compose(*surplus, "sh", "-c", "python ddp_train.py 2>&1", accepted=(1,))
    assert "mingle.errors.ConflictError: " in said
    assert "full" in said
    for container in containers:
        assert container.hostname in said
