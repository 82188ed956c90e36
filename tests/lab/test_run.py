"""mingle-run on real hosts: any program on each of them, and what its end, or a host's, does to the others."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.levels import chosen
from tests.support.run_nodes import has_ended

from . import Host, Lab, Process

SECONDS = 60.0
LOST_SECONDS = 45.0
"""Far above the time to notice a dead machine: ten seconds of TCP's, and five in which it could come back."""
WAITING = ("sh", "-c", "echo $$ started as {node_rank} at {master_addr}; exec sleep 1000")
ENDED = 128 + signal.SIGTERM


def start(host: Host, *words: str, count: int = 3, env: dict[str, str] | None = None) -> Process:
    line = [sys.executable, "-m", "mingle.run.command", "--nnodes", str(count), "--job-id", "lab", *words]
    return host.run(line, env={"MINGLE_TIMEOUT": f"{SECONDS:g}", **(env or {})})


def running(hosts: list[Host], *words: str) -> tuple[list[Process], list[int]]:
    """Start a program that waits on every host, by given node ranks; return them and the pids of the programs."""
    processes = [start(host, "--node-rank", str(rank), *words, "--", *WAITING) for rank, host in enumerate(hosts)]
    for rank, process in enumerate(processes):
        process.wait_for_output(f"started as {rank} at {hosts[0].address()}", SECONDS)
    return processes, [int(process.stdout.split()[0]) for process in processes]


@pytest.mark.quick
@pytest.mark.soak(3)
def test_three_hosts_are_assigned_node_ranks_in_order_and_told_one_address(lab: Lab) -> None:
    hosts = lab.lan(3)
    values = (
        "{node_rank} $NODE_RANK {nnodes} {master_addr} {master_port} {address} {interface} $GLOO_SOCKET_IFNAME $HOST_IP"
    )
    show = f'echo "{values} {{hosts}}"; cat {{hostfile}}'
    processes = [start(host, "--", "sh", "-c", show) for host in hosts]
    assert [process.wait(SECONDS) for process in processes] == [0, 0, 0]
    addresses = [host.address() for host in hosts]
    port = processes[0].stdout.split()[4]
    for rank, (own, process) in enumerate(zip(addresses, processes, strict=True)):
        words = process.stdout.split()
        assert words[:9] == [str(rank), str(rank), "3", addresses[0], port, own, "eth0", "eth0", own]
        assert words[9].split(",") == words[10:] == addresses


def test_on_several_networks_the_address_is_the_one_that_all_machines_share(lab: Lab) -> None:
    """And not that of the default route, which programs take that are told nothing."""
    uplinks, shared = [lab.network("10.1.0.0/24"), lab.network("10.2.0.0/24")], lab.network()
    hosts = [lab.host(uplink, shared) for uplink in uplinks]
    by_default = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('8.8.8.8', 9)); print(s.getsockname()[0])"
    )
    look = (
        sys.executable,
        "-c",
        f"import os; print({{node_rank}}, '{{hosts}}', os.environ['VLLM_HOST_IP']); {by_default}",
    )
    processes = [start(host, "--", *look, count=2) for host in hosts]
    assert [process.wait(SECONDS) for process in processes] == [0, 0]
    for host, process in zip(hosts, processes, strict=True):
        rank, everybody, own, default = process.stdout.split()
        assert own == host.address(shared) == everybody.split(",")[int(rank)]
        assert set(everybody.split(",")) == {host.address(shared) for host in hosts}
        assert default == host.address()


@pytest.mark.soak(3)
def test_over_ipv6_with_a_secret_and_another_command_on_node_0(lab: Lab, tmp_path: Path) -> None:
    hosts = lab.lan(3, None, ipv6="fd00:77::/64")
    secret = tmp_path / "secret"
    secret.write_text("correct horse battery staple")
    secret.chmod(0o600)
    words = ("--secret-file", str(secret), "--head", "echo head [{master_addr}]", "--", "echo", "{address}")
    processes = [start(host, "--node-rank", str(rank), *words) for rank, host in enumerate(hosts)]
    assert [process.wait(SECONDS) for process in processes] == [0, 0, 0]
    said = [process.stdout.strip() for process in processes]
    assert said == [f"head [{hosts[0].address()}]", hosts[1].address(), hosts[2].address()]


def test_a_line_that_was_typed_twice_on_one_machine_is_warned_of(lab: Lab) -> None:
    (host,) = lab.lan(1)
    twice = [start(host, "--", "true", count=2) for _ in range(2)]
    assert [process.wait(SECONDS) for process in twice] == [0, 0]
    (warning,) = [process.stderr for process in twice if process.stderr]
    assert "2 of its 2 nodes are on this machine; fix: start mingle-run once on each machine" in warning


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("what", "victim"),
    chosen(
        [("program", 2), ("machine", 0), ("machine", 2)],
        soak=[("program", 0), *((what, victim) for what in ("mingle-run", "Ctrl-C") for victim in (0, 2))],
    ),
)
def test_the_end_of_one_ends_the_others_and_names_it(lab: Lab, what: str, victim: int) -> None:
    hosts = lab.lan(3)
    processes, pids = running(hosts)
    if what == "program":
        hosts[victim].run(["kill", "-9", str(pids[victim])]).wait()
        status, told = 128 + signal.SIGKILL, "its command was ended by SIGKILL"
    elif what == "Ctrl-C":
        processes[victim].send_signal(signal.SIGINT)
        status, told = 128 + signal.SIGINT, "its command was ended by SIGINT."
    elif what == "mingle-run":
        processes[victim].kill()
        status, told = -signal.SIGKILL, "is lost"
    else:
        hosts[victim].cut()
        status, told = ENDED, "is lost"
    statuses = [process.wait(LOST_SECONDS) for process in processes]
    assert statuses == [status if number == victim else ENDED for number in range(3)]
    for number, process in enumerate(processes):
        if number != victim:
            assert f"node {victim} on host {hosts[victim].name}" in process.stderr.replace("is lost (host", "on host")
            assert told in process.stderr
            assert "fix: " in process.stderr
    if what == "machine":
        assert "this machine is offline (eth0 has no carrier), so node " in processes[victim].stderr
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.soak(3)
@pytest.mark.parametrize("victim", chosen([0], soak=[2]))
def test_with_keep_going_the_others_run_on(lab: Lab, victim: int) -> None:
    hosts = lab.lan(3)
    processes, pids = running(hosts, "--keep-going")
    hosts[victim].cut()
    others = [number for number in range(3) if number != victim]
    for number in others:
        if 0 in (victim, number):  # the host alone knows of the loss of a member
            processes[number].wait_for_output("the command runs on (--keep-going): node", LOST_SECONDS)
    for number in others:
        assert not has_ended(pids[number])
        hosts[number].run(["kill", "-9", str(pids[number])]).wait()
    # Node 0 stays until the commands of all others have ended.
    assert [processes[number].wait(SECONDS) for number in others] == [128 + signal.SIGKILL] * 2


def succeed_after(hosts: list[Host], folder: Path, fault: Callable[[], object], pause: float = 0.5) -> list[Process]:
    """Let programs run on all hosts, by given node ranks, and succeed together a moment after a fault."""
    until = folder / "until"
    words = (
        "sh",
        "-c",
        f"echo started as {{node_rank}} at {{master_addr}}; until test -e {until}; do sleep 0.05; done",
    )
    processes = [start(host, "--node-rank", str(rank), "--", *words) for rank, host in enumerate(hosts)]
    for rank, process in enumerate(processes):
        process.wait_for_output(f"started as {rank}", SECONDS)
    time.sleep(1)  # the programs run for a while
    fault()
    time.sleep(pause)
    until.touch()
    return processes


def succeeded(processes: list[Process]) -> bool:
    return [process.wait(LOST_SECONDS) for process in processes] == [0] * len(processes)


@pytest.mark.soak(3)
@pytest.mark.parametrize("pause", [0.5, 20.0], ids=["shortly before", "long before"])
def test_a_renumbered_member_ends_well(lab: Lab, tmp_path: Path, pause: float) -> None:
    hosts = lab.lan(3)

    def renumber() -> None:
        hosts[2].ip(f"address del {hosts[2].address()}/24 dev eth0", "address add 10.77.0.99/24 dev eth0")

    assert succeeded(succeed_after(hosts, tmp_path, renumber, pause))


@pytest.mark.soak(3)
@pytest.mark.parametrize(("which", "victim"), chosen([("used", 0), ("unused", 2)], soak=[("used", 2), ("unused", 0)]))
def test_a_nic_that_dies_where_there_is_another_one_ends_nothing(
    lab: Lab, tmp_path: Path, which: str, victim: int
) -> None:
    networks = lab.network(), lab.network("10.78.0.0/24")
    hosts = [lab.host(*networks) for _ in range(3)]
    if which == "unused":
        for host in hosts:  # they hear of each other on eth1 and connect there; the job itself prefers eth0
            host.drop('iifname "eth0" meta l4proto udp')
    network = networks[0 if which == "used" else 1]
    processes = succeed_after(hosts, tmp_path, lambda: hosts[victim].cut(network))
    assert succeeded(processes)
    assert [process.stdout.split()[-1] for process in processes] == [hosts[0].address()] * 3


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("before", "seconds", "victim"),
    chosen([(0.5, 7.0, 0), (2.0, 2.5, 2)], soak=[(0.5, 2.5, 0), (2.0, 7.0, 0), (0.5, 7.0, 2)]),
)
def test_a_cut_shortly_before_the_end_is_waited_for(
    lab: Lab, tmp_path: Path, before: float, seconds: float, victim: int
) -> None:
    """So long before the end, for so many seconds in all, whoever's cable it is."""
    hosts = lab.lan(3)
    processes = succeed_after(hosts, tmp_path, hosts[victim].cut, before)
    time.sleep(seconds - before)
    hosts[victim].heal()
    assert succeeded(processes)


REDUCE = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
line = json.dumps([dist.get_rank(), total.item(), os.environ["GLOO_SOCKET_IFNAME"]])
# torchrun's -u has print write the end of a line apart, and two ranks share a pipe.
os.write(1, f"{line}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.soak(3)
@pytest.mark.timeout(300)
def test_static_torchrun_on_three_hosts_with_two_workers_each(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    place = ("--nnodes={nnodes}", "--node-rank={node_rank}")
    master = ("--master-addr={master_addr}", "--master-port={master_port}")
    words = ("--", sys.executable, "-m", "torch.distributed.run", *place, *master, "--nproc-per-node=2", str(script))
    processes = [start(host, *words) for host in lab.lan(3)]
    assert [process.wait(240) for process in processes] == [0, 0, 0]
    records = [json.loads(text) for process in processes for text in process.stdout.splitlines() if text[:1] == "["]
    assert sorted(records) == [[rank, 21.0, "eth0"] for rank in range(6)]
