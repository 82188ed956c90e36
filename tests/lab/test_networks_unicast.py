"""Networks that carry no multicast: hosts are named in ``MINGLE_PEERS``, and asked by unicast."""

from __future__ import annotations

import pytest

from tests.support.levels import chosen, repeated
from tests.support.loopback import longer

from . import Host, Lab, Network, Process
from .name_server import serve_name
from .scenarios import check, hold, results, train, wait_for_log
from .test_election import assigned
from .test_election import check as check_assigned

NAME = "ranks.training.example"


def without_multicast(lab: Lab, count: int) -> tuple[Network, list[Host]]:
    """A network that carries none, and hosts that neither send nor hear any."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(count)]
    for host in hosts:
        host.drop_multicast()
    return network, hosts


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_only_the_host_of_rank_0_is_named(lab: Lab, seed: int) -> None:
    _, hosts = without_multicast(lab, 4)
    env = {"MINGLE_PEERS": hosts[0].address()}
    ranks = [host.start(train, f"one peer {seed}", rank, 4, env=env) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, hosts[0])


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_several_ranks_on_each_host(lab: Lab, seed: int) -> None:
    """The ranks of a host share a UDP port, and what comes to it reaches one of them only."""
    _, machines = without_multicast(lab, 2)
    hosts = [machine for machine in machines for _ in range(3)]
    env = {"MINGLE_PEERS": machines[0].address()}
    ranks = [host.start(train, f"shared port {seed}", rank, 6, env=env) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, machines[0])


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_name_that_leads_to_another_machine_is_shown_with_its_address(lab: Lab, seed: int) -> None:
    """Of rank 0, by a stale line in /etc/hosts; that of rank 2 is right, and shows that names and the network work."""
    network = lab.network()
    *hosts, stale = (lab.host(network) for _ in range(4))
    for host in hosts:
        host.isolate_one_way("in", match="meta pkttype multicast")
        names = {stale: "node0", hosts[1]: "node1", hosts[2]: "node2"}
        lines = [f"{each.address()} {name}\n" for each, name in names.items()]
        host.hosts_file.write_text(host.hosts_file.read_text() + "".join(lines))
    ranks = [
        host.start(
            train, f"stale {seed}", rank, 3, peers=["node0", "node1", "node2"][: rank and 3], discovery_timeout=16.0
        )
        for rank, host in enumerate(hosts)
    ]
    wrong = f"node0 = {stale.address()}: no answer"
    wait_for_log(ranks[1], f"nothing has come from {wrong}")
    error = str(ranks[1].error(40.0))
    assert f"nothing has come from {wrong}" in error
    assert f"peers: {wrong}, node1: this machine, node2 = {hosts[2].address()}: answers" in error


@pytest.mark.soak
@pytest.mark.parametrize("first", chosen(["given"], soak=["assigned"]))
def test_a_name_that_is_complete_only_after_5_seconds(lab: Lab, first: str) -> None:
    network, hosts = without_multicast(lab, 4)
    server = lab.host(network, name="dns")
    addresses = [host.address() for host in hosts]
    # At first the name does not even exist, then it is one host only.
    schedule = [(1.0, addresses[3:]), (5.0, addresses)]
    name_server = server.start(serve_name, NAME, schedule, server.address())
    name_server.wait_for("listening")
    for host in hosts:
        host.resolver_file.write_text(f"nameserver {server.address()}\n")
    env = {"MINGLE_PEERS": NAME}
    if first == "given":
        ranks = [host.start(train, "names", rank, 4, env=env) for rank, host in enumerate(hosts)]
        found = results(ranks)
        check(found, hosts, hosts[0])
        assert max(result["elapsed"] for result in found) >= 4, "it could not be complete before the name was"
    else:
        ranks = [host.start(assigned, "names", 4, env=env) for host in hosts]
        found = results(ranks)
        check_assigned(found, hosts)
    assert max(result["elapsed"] for result in found) < 25


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_assigned_ranks_with_all_hosts_listed(lab: Lab, seed: int) -> None:
    _, hosts = without_multicast(lab, 4)
    env = {"MINGLE_PEERS": ",".join(host.address() for host in hosts)}
    check_assigned(results([host.start(assigned, f"elect {seed}", 4, env=env) for host in hosts]), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_assigned_ranks_of_which_several_share_each_host(lab: Lab, seed: int) -> None:
    _, machines = without_multicast(lab, 2)
    hosts = [machine for machine in machines for _ in range(3)]
    env = {"MINGLE_PEERS": ",".join(machine.address() for machine in machines)}
    check_assigned(results([host.start(assigned, f"elect six {seed}", 6, env=env) for host in hosts]), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize(("secret", "family"), chosen([("s3cret", 4)], soak=[(None, 4), (None, 6)]))
def test_jobs_whose_rank_0s_share_a_host(lab: Lab, secret: str | None, family: int, seed: int) -> None:
    """None of them ends before all have formed; one of them may have a secret that the others don't know."""
    network = lab.network() if family == 4 else lab.network(None, ipv6="fd77::/64")
    hosts = [lab.host(network) for _ in range(3)]
    for host in hosts:
        host.drop_multicast()
    secrets = {"one": None, "two": secret, "three": None}
    partners = {"one": hosts[1], "two": hosts[2], "three": hosts[1]}
    env = {"MINGLE_PEERS": hosts[0].address()}
    ranks = [hosts[0].start(hold, f"{job_id} {seed}", 0, 2, env=env, secret=secrets[job_id]) for job_id in secrets]
    ranks += [
        partners[job_id].start(hold, f"{job_id} {seed}", 1, 2, env=env, secret=secrets[job_id]) for job_id in secrets
    ]
    for rank in ranks:
        assert rank.wait_for("running")["sum"] == 3


def test_ipv6_only_without_multicast(lab: Lab) -> None:
    network = lab.network(None, ipv6="fd77::/64")
    hosts = [lab.host(network) for _ in range(2)]
    for host in hosts:
        host.drop_multicast()
    env = {"MINGLE_PEERS": f"[{hosts[0].address()}]:29499"}
    ranks = [host.start(train, "six", rank, 2, env=env) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, hosts[0])


def test_the_commands_ask_peers_as_well(lab: Lab) -> None:
    """Also about jobs that wait in processes which share the asked host's port."""
    _, hosts = without_multicast(lab, 2)
    address = hosts[0].address()
    running = [hosts[0].start(hold, "running", rank, 2, peers=[address]) for rank in range(2)]
    for rank in running:
        rank.wait_for("running")
    for job_id in ("first", "second"):
        wait_for_log(hosts[0].start(hold, job_id, 0, 2, discovery_timeout=180), "1/2 joined")

    def listing(seconds: float) -> Process:
        command = hosts[1].run(["python", "-m", "mingle", "list", "--peers", address, "--timeout", f"{seconds:g}"])
        command.wait(60)
        return command

    found = hosts[1].run(["python", "-m", "mingle", "find", "running", "--peers", address, "--timeout", "30"])
    assert found.wait(60) == 0, found.output
    assert found.stdout.startswith(f"{address}:")
    jobs = ("running", "first", "second")
    listed = longer(listing, lambda command: all(job_id in command.stdout for job_id in jobs))
    assert listed.wait() == 0, listed.output
    for job_id in jobs:
        assert job_id in listed.stdout
