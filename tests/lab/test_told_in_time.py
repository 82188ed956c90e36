"""What keeps a job from forming is said while its ranks wait, on both sides, on a terminal and in a log.

Which cause follows from which facts is in `tests.support.causes`; here are the facts that only a kernel gives, and the
time that it takes to find them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mingle
from mingle.config.launchers import Placement
from mingle.config.settings import Settings
from mingle.elastic.gathering import Gathering
from mingle.elastic.quorum import Nodes, Policy
from mingle.engine.progress import CAUSE_AFTER_SECONDS
from tests.support.levels import chosen, soaking
from tests.support.loopback import until

from . import Host, Lab, Rank, report
from .scenarios import without_udp

pytestmark = pytest.mark.soak(3)

TOLD_SECONDS = CAUSE_AFTER_SECONDS + (4.0 if soaking() else 14.0)
"""By when the line must name the cause: two looks after the first seconds, and what a busy machine adds."""
WAIT_SECONDS = 40.0
WIDE = {"COLUMNS": "400", "TERM": "xterm"}
DOORS = ("given", "assigned", "agents", "url")


def wait_in_vain(
    job_id: str, rank: int | None, world_size: int, door: str = "given", *, terminal: bool = False, **arguments: Any
) -> None:
    """Look for a job that does not form; what a terminal shows goes to stdout."""
    if terminal:
        ours, theirs = os.openpty()
        sys.stderr = os.fdopen(theirs, "w")
        threading.Thread(target=copy, args=(ours,), daemon=True).start()
    report("started")
    try:
        _wait(job_id, rank, world_size, door, **arguments)
    except mingle.MingleError as error:
        print(error, file=sys.stderr, flush=True)
        raise


def _wait(job_id: str, rank: int | None, world_size: int, door: str, **arguments: Any) -> None:
    if door == "agents":
        settings = Settings(
            job_id=job_id,
            placement=Placement(rank=None, world_size=world_size),
            discovery_timeout=WAIT_SECONDS,
            mesh=arguments.get("mesh", "off"),
        )
        gathering = Gathering(settings, Policy(nodes=Nodes(minimum=world_size, maximum=world_size), last_call=1.0))
        try:
            gathering.gather()
        finally:
            gathering.close("the test is over")
    elif door == "url":
        os.environ["MINGLE_TIMEOUT"] = str(WAIT_SECONDS)
        dist.init_process_group("gloo", init_method=f"mingle://{job_id}", rank=rank, world_size=world_size)
    else:
        mingle.discover(job_id, rank=rank, world_size=world_size, discovery_timeout=WAIT_SECONDS, **arguments)


def wait_in_vain_as_a_clone(*arguments: Any, **more: Any) -> None:
    """The same, on a machine with the name that its copies have as well."""
    socket.sethostname("vm")
    wait_in_vain(*arguments, **more)


def copy(terminal: int) -> None:
    """Write to stdout what a terminal gets."""
    while data := os.read(terminal, 65536):
        os.write(1, data)


def start(host: Host, *arguments: Any, env: Mapping[str, str] | None = None, **more: Any) -> Rank[Any]:
    return host.start(wait_in_vain, *arguments, env=WIDE | dict(env or {}), **more)


def assert_told(rank: Rank[Any], words: str) -> None:
    """A rank says this on its progress line, as a cause and in time."""
    rank.wait_for_output(words, WAIT_SECONDS)
    seconds = time.monotonic() - rank.events[0].time
    print(f"{seconds:.1f} s: {words}")
    assert "likely cause: " in rank.output.partition(words)[0]
    assert seconds <= TOLD_SECONDS


SEEN = [("given", True), ("assigned", False), ("agents", False)]
"""Each door once, and a terminal and a log."""


@pytest.mark.parametrize(
    ("door", "terminal"),
    chosen(SEEN, soak=[each for each in itertools.product(DOORS, (False, True)) if each not in SEEN]),
    ids=lambda each: each if isinstance(each, str) else "terminal" if each else "log",
)
def test_a_mistyped_id_is_named_by_both_sides(lab: Lab, door: str, terminal: bool) -> None:
    given = door in ("given", "url")
    right, wrong = (
        start(host, job_id, rank if given else None, 2, door, terminal=terminal)
        for rank, (host, job_id) in enumerate(zip(lab.lan(2), ("resnet", "resent"), strict=True))
    )
    mistyped = "a mistyped --rdzv-id: " if door == "agents" else "a mistyped job id: "
    assert_told(wrong, f"{mistyped}'resnet' is on this network; fix: ")
    if given:
        assert_told(right, f"{mistyped}1 process with job id 'resent' is looking for a host; fix: ")
    else:  # each process hosts its own job
        assert_told(right, f"{mistyped}'resent' is on this network; fix: ")


@pytest.mark.parametrize("command", ["mingle.run.command", "mingle.check.command"])
def test_the_commands_name_it_as_well(lab: Lab, command: str) -> None:
    program = ["--", "true"] if command == "mingle.run.command" else []
    processes = [
        host.run(
            [sys.executable, "-m", command, "--nnodes", "2", "--job-id", job_id, *program],
            env={"MINGLE_TIMEOUT": f"{WAIT_SECONDS:g}"},
        )
        for host, job_id in zip(lab.lan(2), ("resnet", "resent"), strict=True)
    ]
    for process, other in zip(processes, ("resent", "resnet"), strict=True):
        process.wait_for_output(f"'{other}' is on this network; fix: ", WAIT_SECONDS + 10)
        said = re.search(r"1/2 joined.* · ([0-9]+) s · likely cause: ", process.stderr)
        assert said is not None
        assert float(said[1]) <= TOLD_SECONDS


@pytest.mark.parametrize(("door", "variable"), [("assigned", "MINGLE_INTERFACE"), ("given", "GLOO_SOCKET_IFNAME")])
def test_loopback_that_was_left_over_is_named_on_its_machine(lab: Lab, door: str, variable: str) -> None:
    given = door == "given"
    hosts = lab.lan(2)
    right = start(hosts[0], "left", 0 if given else None, 3, door)
    wrong = [start(hosts[1], "left", rank if given else None, 3, door, env={variable: "lo"}) for rank in (1, 2)]
    for rank in wrong:
        rank.wait_for("started")
    until(lambda: any("likely cause" in rank.output for rank in wrong), WAIT_SECONDS)
    said = next(rank for rank in wrong if "likely cause" in rank.output)
    assert_told(said, f"{variable} names loopback alone, so no other machine can be reached, but eth0 10.77.0.2/24")
    assert "likely cause" not in right.output


def test_another_directory_than_the_others_have_is_named(lab: Lab, tmp_path: Path) -> None:
    """The user has named it because UDP is closed, so UDP is not to blame."""
    for rank, host in enumerate(without_udp(lab, 2)):
        directory = tmp_path / str(rank)
        directory.mkdir()
        waiting = start(host, "directory", rank, 2, peers=f"dir:{directory}")
        assert_told(waiting, f"no other process of this job is seen in dir:{directory}")


def test_ranks_that_meet_in_a_directory_and_do_not_connect_are_named(lab: Lab, tmp_path: Path) -> None:
    hosts = without_udp(lab, 2)
    for host in hosts:
        host.drop('iifname != "lo" meta l4proto tcp')
    ranks = [start(host, "filtered", rank, 2, peers=f"dir:{tmp_path}") for rank, host in enumerate(hosts)]
    assert_told(ranks[0], f"dir:{tmp_path} shows one process that looks for this job and can't connect to this host")
    assert_told(ranks[1], "rank 0 was heard but could not be reached over TCP")


def test_a_host_that_has_no_free_port_is_named_by_both_sides(lab: Lab) -> None:
    hosts = lab.lan(2)
    hosts[1].namespace.tool(["sh", "-c", "echo 40000 40000 > /proc/sys/net/ipv4/ip_local_port_range"])
    for rank in [start(host, "ports", rank, 2) for rank, host in enumerate(hosts)]:
        assert_told(rank, "no port is free there for a connection to leave from (net.ipv4.ip_local_port_range)")


def readdress(host: Host, address: str) -> None:
    interface = host.interface()
    host.ip(f"address flush dev {interface}", f"address add {address} dev {interface}")


@pytest.mark.parametrize(
    ("named_alike", "door"),
    chosen([(False, "given"), (True, "agents")], soak=[(False, "agents"), (True, "given")]),
    ids=lambda each: each if isinstance(each, str) else "clones" if each else "names",
)
def test_an_address_that_two_machines_have_is_named(lab: Lab, named_alike: bool, door: str) -> None:
    hosts = lab.lan(3, link_local=False)
    address = hosts[1].address()
    readdress(hosts[2], f"{address}/24")
    ranks = list[Rank[Any]]()
    for number, host in enumerate(hosts):
        what = wait_in_vain_as_a_clone if named_alike and number else wait_in_vain
        ranks.append(host.start(what, "twice", None if door == "agents" else number, 3, door, env=WIDE))
        ranks[-1].wait_for("started")
        time.sleep(2)  # the second clone takes the address from the first one, which has joined
    words = f"two machines use the address {address}: " if named_alike else f" use the same address {address}; fix: "
    ranks[0].wait_for_output(words, WAIT_SECONDS)


def test_a_hardware_address_that_two_machines_have_is_named(lab: Lab) -> None:
    hosts = lab.lan(2)
    described = json.loads(hosts[0].namespace.tool(["ip", "-j", "link", "show", hosts[0].interface()]))
    interface = hosts[1].interface()
    hosts[1].ip(f"link set {interface} down", f"link set {interface} address {described[0]['address']} up")
    rank, _ = (start(host, "hardware", rank, 2) for rank, host in enumerate(hosts))
    address = hosts[1].address()
    assert_told(rank, f"{address} has the same hardware address as this machine's {hosts[0].interface()} (")


def test_another_netmask_is_named(lab: Lab) -> None:
    hosts = lab.lan(2, "10.77.0.0/16", link_local=False)
    readdress(hosts[0], "10.77.1.1/24")
    rank, _ = (start(host, "netmask", rank, 2) for rank, host in enumerate(hosts))
    address = hosts[1].address()
    assert_told(rank, f"{address} is on this network and in none of the subnets here (eth0 10.77.1.1/24)")


def test_address_translation_that_hides_rank_0_is_named(lab: Lab) -> None:
    inside, outside = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    router = lab.host(inside, outside, name="router")
    hosts = [lab.host(inside), lab.host(outside)]
    own, public = hosts[0].address(), router.address(outside)
    router.forward(f"ip daddr {public} dnat to {own}")
    hosts[0].ip(f"route replace default via {router.address(inside)}")
    start(hosts[0], "nat", 0, 2)
    rank = start(hosts[1], "nat", 1, 2, peers=[public])
    assert_told(
        rank, f"host {hosts[0].name} announces {own}, and its datagrams come from {public}: address translation"
    )
    assert "fix: set MINGLE_ADVERTISE there" in rank.output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", chosen(["assigned"], soak=["given"]))
def test_a_rank_that_fails_before_it_hosts_is_named_by_those_that_wait(lab: Lab, door: str) -> None:
    hosts = lab.lan(3)
    numbers = (0, 1, 2) if door == "given" else (None, None, None)
    waiting = [start(host, "fails", number, 3, door) for host, number in zip(hosts[1:], numbers[1:], strict=True)]
    for rank in waiting:
        rank.wait_for("started")
    until(lambda: any(" · 10 s" in rank.output for rank in waiting), WAIT_SECONDS)  # by now they listen
    hold = f"held = socket.create_server(('', {MASTER_PORT})); print('holding', flush=True); signal.pause()"
    hosts[0].run([sys.executable, "-c", f"import signal, socket; {hold}"]).wait_for_output("holding")
    failing = start(hosts[0], "fails", numbers[0], 3, door, master_port=MASTER_PORT)
    assert "Address already in use" in failing.error().message
    failed = time.monotonic()
    for rank in waiting:
        rank.wait_for_output(f"has failed: the store can't listen on {hosts[0].address()}:{MASTER_PORT}: Address", 40)
    assert time.monotonic() - failed <= TOLD_SECONDS


MASTER_PORT = 29400
NO_TCP, NO_CALLS = "", " tcp flags & (syn | ack) == syn"


def unreached_pair(text: str, *names: str) -> bool:
    """Return whether a line says that these hosts do not reach each other, or that one does not reach the other."""
    lines = (line for line in text.splitlines() if re.search(r" reach| gets no place", line))
    return any(all(re.search(rf"host {name}\b", line) for name in names) for line in lines)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("door", "pair", "match"),
    [
        ("given", (1, 2), NO_TCP),
        ("given", (0, 1), NO_CALLS),
        ("given", (1, 0), NO_CALLS),
        ("assigned", (1, 2), NO_CALLS),
        ("agents", (1, 2), NO_TCP),
    ],
    ids=lambda each: {NO_TCP: "no TCP", NO_CALLS: "no calls"}.get(each, str(each)),
)
def test_a_pair_that_can_not_talk_is_named_on_both_machines(
    lab: Lab, door: str, pair: tuple[int, int], match: str
) -> None:
    """Whichever of them, or the third, hosts the job: the host and a worker, each way, and two workers."""
    hosts = lab.lan(3)
    one, other = (hosts[number] for number in pair)
    one.drop(f"meta l4proto tcp ip saddr {other.address()}{match}")
    ranks = {
        host: start(host, "pair", number if door == "given" else None, 3, door, mesh="on")
        for number, host in enumerate(hosts)
    }
    for rank in ranks.values():
        rank.wait_for("started")
    began = time.monotonic()
    for host in (one, other):

        def named(rank: Rank[Any] = ranks[host]) -> bool:
            return unreached_pair(rank.output, one.name, other.name)

        until(named, WAIT_SECONDS)
        print(f"{host.name}: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began <= TOLD_SECONDS + 2.0
    assert "heard but" not in "".join(rank.output for rank in ranks.values())


def test_a_rank_that_just_comes_late_is_no_fault(lab: Lab) -> None:
    hosts = lab.lan(2)
    ranks = [start(host, "late", rank, 3, terminal=True) for rank, host in enumerate(hosts)]
    ranks.append(start(hosts[1], "another job", 1, 3, terminal=True))
    for rank in ranks:
        rank.wait_for("started")
    until(lambda: re.search(r" · (1[5-9]|2[0-4]) s", ranks[0].output), WAIT_SECONDS)
    assert [rank for rank in ranks if "likely cause" in rank.output] == []
