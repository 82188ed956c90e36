"""What docker-compose.yml promises: containers that are told no address train one network."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from .output import accuracy, identical_ranks, roster
from .project import MakeProject
from .training import BRIEFLY, FOREVER


def test_replicas_that_are_told_no_rank_train_one_network(project: MakeProject) -> None:
    four = project()
    containers = four.up()
    assert len(containers) == 4
    log = four.logs()
    assert accuracy(log) >= 0.95
    assert identical_ranks(log) == 4
    job = roster(log)
    assert sorted(job.hostnames) == sorted(container.hostname for container in containers)
    assert len(set(job.addresses)) == 4
    assert {IPv4Address(address) in four.subnet for address in job.addresses} == {True}


def test_ranks_by_number_with_rank_0_last(project: MakeProject) -> None:
    by_number = project()
    by_number.compose("--profile", "ranks", "up", "--detach", "--scale", "trainer=0")
    log = by_number.logs()
    assert accuracy(log) >= 0.95
    assert identical_ranks(log) == 4
    job = roster(log)
    places = [by_number.containers(f"rank{rank}") for rank in range(4)]
    assert [[container.hostname for container in place] for place in places] == [[name] for name in job.hostnames]


def test_over_ipv6_alone(project: MakeProject) -> None:
    override = {"services": {"trainer": {**BRIEFLY["services"]["trainer"], "environment": {"MINGLE_FAMILY": "6"}}}}
    two = project(override, WORLD_SIZE="2")
    two.up()
    addresses = roster(two.logs()).addresses
    assert {IPv6Address(address) in two.subnet6 for address in addresses} == {True}


def test_projects_side_by_side_do_not_mix(project: MakeProject) -> None:
    """Even with one job id: each project has a network to itself. Their size follows from one variable."""
    services = {"trainer": {**BRIEFLY["services"]["trainer"], "environment": {"MINGLE_JOB_ID": "the same"}}}
    projects = [project({"services": services}, WORLD_SIZE="2") for _ in range(2)]
    containers = [each.up() for each in projects]
    assert [len(own) for own in containers] == [2, 2]
    for each, own in zip(projects, containers, strict=True):
        job = roster(each.logs())
        assert sorted(job.hostnames) == sorted(container.hostname for container in own)
        assert {IPv4Address(address) in each.subnet for address in job.addresses} == {True}


def test_up_again_right_after_down(project: MakeProject) -> None:
    """The containers of the second run have the addresses of the first, and nothing of it is in their way."""
    two = project(FOREVER, WORLD_SIZE="2")
    for container in two.up():
        container.wait_for("^rank")
    two.down()
    two.change(BRIEFLY)
    containers = two.up()
    assert sorted(roster(two.logs()).hostnames) == sorted(container.hostname for container in containers)
