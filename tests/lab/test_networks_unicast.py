"""Networks that carry no multicast: hosts are named in ``MINGLE_PEERS``, and asked by unicast."""

from __future__ import annotations

import pytest

from tests.support.levels import chosen
from tests.support.loopback import longer

from . import Host, Lab, Process
from .scenarios import formed, hold, ranks_are, start_ranks, train, wait_for_log


def without_multicast(lab: Lab, count: int, family: int = 4) -> list[Host]:
    """Hosts that neither send nor hear any."""
    hosts = lab.lan(count) if family == 4 else lab.lan(count, None, ipv6="fd77::/64")
    for host in hosts:
        host.drop_multicast()
    return hosts


@pytest.mark.quick
@pytest.mark.soak(3)
def test_only_the_host_of_rank_0_is_named(lab: Lab) -> None:
    hosts = without_multicast(lab, 4)
    formed(start_ranks(hosts, "one peer", env={"MINGLE_PEERS": hosts[0].address()}), hosts)


@pytest.mark.soak(3)
@pytest.mark.parametrize("given", [True, False], ids=ranks_are)
def test_several_ranks_on_each_host(lab: Lab, given: bool) -> None:
    """The ranks of a host share a UDP port, and what comes to it reaches one of them only."""
    machines = without_multicast(lab, 2)
    hosts = [machine for machine in machines for _ in range(3)]
    named = machines[:1] if given else machines
    env = {"MINGLE_PEERS": ",".join(machine.address() for machine in named)}
    formed(start_ranks(hosts, "shared port", given=given, env=env), hosts, given=given)


@pytest.mark.soak(3)
def test_a_name_that_leads_to_another_machine_is_shown_with_its_address(lab: Lab) -> None:
    """Of rank 0, by a stale line in /etc/hosts; that of rank 2 is right, and shows that names and the network work."""
    *hosts, stale = lab.lan(4)
    for host in hosts:
        host.isolate_one_way("in", match="meta pkttype multicast")
        names = {stale: "node0", hosts[1]: "node1", hosts[2]: "node2"}
        lines = [f"{each.address()} {name}\n" for each, name in names.items()]
        host.hosts_file.write_text(host.hosts_file.read_text() + "".join(lines))
    peers = ["node0", "node1", "node2"]
    ranks = [
        host.start(train, "stale", rank, 3, peers=peers if rank else [], discovery_timeout=16.0)
        for rank, host in enumerate(hosts)
    ]
    wrong = f"node0 = {stale.address()}: no answer"
    wait_for_log(ranks[1], f"nothing has come from {wrong}")
    error = str(ranks[1].error(40.0))
    assert f"nothing has come from {wrong}" in error
    assert f"peers: {wrong}, node1: this machine, node2 = {hosts[2].address()}: answers" in error


@pytest.mark.soak(3)
@pytest.mark.parametrize(("secret", "family"), chosen([("s3cret", 4), (None, 6)], soak=[(None, 4)]))
def test_jobs_whose_rank_0s_share_a_host(lab: Lab, secret: str | None, family: int) -> None:
    """None of them ends before all have formed; one of them may have a secret that the others don't know."""
    hosts = without_multicast(lab, 3, family)
    secrets = {"one": None, "two": secret, "three": None}
    partners = {"one": hosts[1], "two": hosts[2], "three": hosts[1]}
    env = {"MINGLE_PEERS": hosts[0].address()}
    ranks = [hosts[0].start(hold, job_id, 0, 2, env=env, secret=secrets[job_id]) for job_id in secrets]
    ranks += [partners[job_id].start(hold, job_id, 1, 2, env=env, secret=secrets[job_id]) for job_id in secrets]
    for rank in ranks:
        assert rank.wait_for("running")["sum"] == 3


@pytest.mark.parametrize("family", [4, 6])
def test_the_commands_ask_peers_as_well(lab: Lab, family: int) -> None:
    """Also about jobs that wait in processes which share the asked host's port."""
    hosts = without_multicast(lab, 2, family)
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
    assert found.stdout.startswith(f"{address}:" if family == 4 else f"[{address}]:")
    jobs = ("running", "first", "second")
    listed = longer(listing, lambda command: all(job_id in command.stdout for job_id in jobs))
    assert listed.wait() == 0, listed.output
    for job_id in jobs:
        assert job_id in listed.stdout
