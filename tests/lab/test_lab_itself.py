"""The lab does what it says, shown with plain sockets, and leaves nothing behind."""

# ruff: noqa: PT012 - what a lab leaves behind shows at the end of its block

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

from . import UDP, Host, Lab, LabError, Network, Rank, why_unavailable
from .namespaces import processes_in
from .sockets import accept_one, can_connect, listen, send
from .test_processes import wait_for_ever
from .zygote import KILL_SECONDS, kill_all
from .zygote_client import ROOT, ZygoteClient, shared_zygote

IPV4, IPV6 = "239.192.7.7", "ff15::8000:7"
GROUPS = pytest.mark.parametrize("group", [IPV4, IPV6])


def start_listener(host: Host, group: str = IPV4, network: Network | None = None) -> Rank[int]:
    rank = host.start(listen, group, host.interface(network))
    rank.wait_for("listening")
    return rank


def multicast(host: Host, *texts: str, group: str = IPV4, network: Network | None = None) -> None:
    host.start(send, group, host.interface(network), texts).result()


def heard(rank: Rank[int]) -> list[str]:
    """What a listener heard until the end of its conversation."""
    rank.result()
    return [event["text"] for event in rank.events if event.name == "heard"]


@GROUPS
def test_multicast_reaches_every_host_of_its_lab_and_none_of_another(lab: Lab, group: str) -> None:
    with Lab() as other:
        lan, lan_of_other = lab.network(ipv6="fd77::/64"), other.network(ipv6="fd77::/64")
        a, b, c = (lab.host(lan) for _ in range(3))
        stranger = other.host(lan_of_other)
        near = [start_listener(host, group) for host in (b, c)]
        far = start_listener(stranger, group)
        multicast(a, "hello", "end", group=group)
        multicast(stranger, "end", group=group)
        assert [heard(rank) for rank in near] == [["hello"], ["hello"]]
        assert heard(far) == []


def test_a_host_without_ipv4_is_reached_by_its_link_local_address(lab: Lab) -> None:
    lan = lab.network(None)
    a, b = lab.host(lan), lab.host(lan)
    listener = start_listener(b, "ff12::8000:7")
    multicast(a, "hello", "end", group="ff12::8000:7")
    assert heard(listener) == ["hello"]
    assert listener.events[1]["sender"].startswith("fe80::")


@GROUPS
def test_loss_drops_the_share_that_it_was_given(lab: Lab, group: str) -> None:
    lan = lab.network()
    a, b = lab.host(lan), lab.host(lan)
    b.drop_udp(30)
    listener = start_listener(b, group)
    multicast(a, *map(str, range(1000)), group=group)
    b.clear_rules()
    multicast(a, "end", group=group)
    assert 600 < listener.result() < 800  # 700 expected, with a standard deviation of 14.5


@GROUPS
def test_a_cut_host_hears_nothing_until_it_is_healed(lab: Lab, group: str) -> None:
    lan = lab.network(ipv6="fd77::/64")
    a, b = lab.host(lan), lab.host(lan)
    listener = start_listener(b, group)
    carrier = ["cat", "/sys/class/net/eth0/carrier"]
    b.cut(lan)
    unplugged = b.run(carrier)
    unplugged.wait()
    multicast(a, "lost", group=group)
    b.heal(lan)
    multicast(a, "found", "end", group=group)
    assert heard(listener) == ["found"]
    plugged = b.run(carrier)
    plugged.wait()
    assert (unplugged.stdout, plugged.stdout) == ("0\n", "1\n")


@pytest.mark.parametrize(("direction", "hears"), [("in", "a"), ("out", "b")])
def test_isolation_works_in_one_direction(lab: Lab, direction: Literal["in", "out"], hears: str) -> None:
    lan = lab.network()
    a, b = lab.host(lan), lab.host(lan)
    at_a, at_b = start_listener(a), start_listener(b)
    b.isolate_one_way(direction)
    multicast(a, "from a")
    multicast(b, "from b")
    b.heal()
    multicast(a, "end")
    # each hears itself as well (IP_MULTICAST_LOOP)
    assert heard(at_a) == (["from a", "from b"] if hears == "a" else ["from a"])
    assert heard(at_b) == (["from a", "from b"] if hears == "b" else ["from b"])


def test_isolation_can_be_narrowed_to_udp(lab: Lab) -> None:
    lan = lab.network()
    a, b = lab.host(lan), lab.host(lan)
    listener = start_listener(b)
    b.isolate_one_way("in", match=UDP)
    multicast(a, "lost")
    server = b.start(accept_one)
    server.wait_for("listening")
    assert a.start(can_connect, b.address(), 5.0).result()
    assert server.result() == a.address()
    b.heal()
    multicast(a, "end")
    assert heard(listener) == []


def test_a_split_parts_the_network_until_it_is_joined(lab: Lab) -> None:
    lan = lab.network()
    a, b, c, d = (lab.host(lan) for _ in range(4))
    lab.split(lan, {a, b}, {c, d})
    at_b, at_c = start_listener(b), start_listener(c)
    multicast(a, "from a")
    multicast(d, "from d")
    lab.join(lan)
    multicast(a, "joined", "end")
    assert heard(at_b) == ["from a", "joined"]
    assert heard(at_c) == ["from d", "joined"]


def test_a_silent_network_lets_no_connection_through(lab: Lab) -> None:
    lan = lab.network()
    a, b = lab.host(lan), lab.host(lan)
    server = b.start(accept_one)
    server.wait_for("listening")
    lab.split(lan, {a}, {b})
    assert not a.start(can_connect, b.address(), 0.3).result()
    lab.join(lan)
    assert a.start(can_connect, b.address(), 5.0).result()


def test_a_host_with_two_nics_hears_each_network_on_its_own(lab: Lab) -> None:
    one, two = lab.network("10.77.1.0/24"), lab.network("10.77.2.0/24")
    both = lab.host(one, two, interfaces=("docker0", "eth7"))
    a, b = lab.host(one), lab.host(two)
    assert [both.address(one), both.address(two), a.address(), b.address()] == [
        "10.77.1.1",
        "10.77.2.1",
        "10.77.1.2",
        "10.77.2.2",
    ]
    listener = start_listener(both, network=two)
    multicast(a, "on one")
    multicast(b, "on two", "end")
    assert heard(listener) == ["on two"]
    routes = both.run(["ip", "route", "show", "default"])
    assert routes.wait() == 0
    assert "docker0" in routes.stdout


def test_a_nic_can_come_and_go(lab: Lab) -> None:
    one, two = lab.network("10.77.1.0/24"), lab.network("10.77.2.0/24")
    host = lab.host(one)
    host.attach(two, "hot0")
    host.detach(one)
    assert host.start(nic_names).result() == ["hot0", "lo"]
    assert host.interface() == "hot0"


def nic_names() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def test_snooping_is_a_choice(lab: Lab) -> None:
    lan = lab.network(snooping=True, querier=True)
    shown = lan.namespace.tool(["ip", "-details", "link", "show", "type", "bridge"])
    assert "mcast_snooping 1" in shown
    assert "mcast_querier 1" in shown


def names() -> tuple[str, str]:
    return socket.gethostname(), socket.gethostbyname(socket.gethostname())


def look_up_nobody() -> float:
    started = time.monotonic()
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("nobody.example", 80)
    return time.monotonic() - started


def test_hosts_have_names_of_their_own_and_no_name_server(lab: Lab) -> None:
    lan = lab.network()
    hosts = [lab.host(lan), lab.host(lan, name="node-a")]
    ranks = [host.start(names) for host in hosts]
    assert [rank.result() for rank in ranks] == [("host1", "10.77.0.1"), ("node-a", "10.77.0.2")]
    assert hosts[0].start(look_up_nobody).result() < 2  # a resolver that is waited for takes 5 s or more


def modules() -> tuple[bool, int]:
    return "torch" in sys.modules, len(list(Path("/proc/self/task").iterdir()))


def test_torch_is_imported_already_and_no_thread_runs(lab: Lab) -> None:
    assert lab.host().start(modules).result() == (True, 1)


def all_reduce(rank: int, world_size: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def test_gloo_works_between_hosts_that_are_told_the_address(lab: Lab) -> None:
    lan = lab.network()
    hosts = [lab.host(lan), lab.host(lan)]
    env = {"MASTER_ADDR": hosts[0].address(), "MASTER_PORT": "29500"}
    ranks = [host.start(all_reduce, rank, 2, env=env) for rank, host in enumerate(hosts)]
    assert [rank.result() for rank in ranks] == [3.0, 3.0]


def test_a_wrong_rule_is_refused_and_named(lab: Lab) -> None:
    host = lab.host()
    with pytest.raises(LabError, match="no such match drop"):
        host.drop("no such match")


def held() -> tuple[str, list[str], set[str]]:
    """The machine's mounts and named network namespaces, and the descriptors of the zygote."""
    named = Path("/run/netns")
    zygote = Path("/proc", str(shared_zygote().pid), "fd")
    return (
        Path("/proc/self/mounts").read_text(),
        sorted(entry.name for entry in named.iterdir()) if named.is_dir() else [],
        {entry.name for entry in zygote.iterdir()},
    )


def test_nothing_is_left_when_a_lab_ends_in_an_error() -> None:
    shared_zygote().wait_ready()
    before = held()
    with pytest.raises(ZeroDivisionError), Lab() as lab:
        lan = lab.network()
        hosts = [lab.host(lan), lab.host(lan)]
        ranks = [host.start(wait_for_ever) for host in hosts]
        inodes = [Path(host.namespace.path).stat().st_ino for host in hosts]
        directory = hosts[0].hosts_file.parents[1]
        assert set(processes_in(inodes)) == {rank.pid for rank in ranks}
        raise ZeroDivisionError
    assert held() == before
    assert not set(processes_in(inodes))
    assert not directory.exists()
    with pytest.raises(LabError, match="inside its `with` block"):
        hosts[0].start(wait_for_ever)


KILLED_TEST = """
import os, signal
from {package} import Lab
from {package}.test_processes import wait_for_ever
from {package}.zygote_client import shared_zygote
with Lab() as lab:
    rank = lab.host(lab.network()).start(wait_for_ever)
    rank.wait_for("waiting")
    print(shared_zygote().directory, shared_zygote().pid, rank.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_when_the_test_process_is_killed() -> None:
    code = KILLED_TEST.format(package=__name__.rpartition(".")[0])
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=100, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    directory, *pids = killed.stdout.split()
    assert len(pids) == 2
    for pid in pids:
        _wait_gone(int(pid), 20)
    assert not Path(directory).exists()


def _wait_gone(pid: int, seconds: float) -> None:
    """Wait for the end of a process that is no child of this one; a zombie has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], seconds)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


def test_the_death_of_the_zygote_is_loud() -> None:
    zygote = ZygoteClient()
    try:
        with pytest.raises(LabError, match=r"ended with status -9"), Lab(zygote) as lab:
            host = lab.host()
            os.kill(zygote.pid, signal.SIGKILL)
            host.start(wait_for_ever)
    finally:
        zygote.close()


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_a_machine_without_the_tools_skips_unless_the_lab_is_required(required: str, outcome: str) -> None:
    test = f"{__file__}::test_snooping_is_a_choice"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env={**os.environ, "PATH": "/nonexistent", "MINGLE_LAB_REQUIRED": required},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome in run.stdout
    assert "apt-get install iproute2 nftables" in run.stdout


def test_without_root_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run the tests as root" in str(why_unavailable())


# --- the end of many ------------------------------------------------------------------------------------------------


class Dying:
    """Processes that were killed: some of them end in each second, by their own clock."""

    def __init__(self, *left: int) -> None:
        self.now = 0.0
        self._left = left

    def kill(self) -> int:
        return self._left[min(int(self.now), len(self._left) - 1)]

    def wait(self) -> None:
        self.now += 0.25


def test_many_processes_may_take_long_to_end_as_long_as_some_do() -> None:
    dying = Dying(*range(100, -1, -1))
    kill_all(dying.kill, dying.wait, lambda: dying.now)
    assert dying.now == 100


@pytest.mark.parametrize("left", [(1,), (5, 3, 3), (3, 5)])
def test_processes_that_do_not_end_are_an_error(left: tuple[int, ...]) -> None:
    dying = Dying(*left)
    with pytest.raises(LabError, match=rf"did not end within .* of SIGKILL: {left[-1]} are left"):
        kill_all(dying.kill, dying.wait, lambda: dying.now)
    assert KILL_SECONDS < dying.now < KILL_SECONDS + 3
