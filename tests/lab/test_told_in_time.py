"""What keeps a job from forming is said while its ranks wait, on both sides, on a terminal and in a log."""

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
from mingle.config.values import Secret
from mingle.elastic.gathering import Gathering
from mingle.elastic.quorum import Nodes, Policy
from mingle.engine.progress import CAUSE_AFTER_SECONDS
from tests.support.levels import chosen, repeated, soaking
from tests.support.loopback import until

from . import Host, Lab, Rank, report
from .scenarios import without_udp

TOLD_SECONDS = CAUSE_AFTER_SECONDS + (4.0 if soaking() else 14.0)
"""By when the line must name the cause: two looks after the first seconds, and what a busy machine adds."""
WAIT_SECONDS = 40.0
WIDE = {"COLUMNS": "400", "TERM": "xterm"}


def wait_in_vain(job_id: str, rank: int | None, world_size: int, door: str, terminal: bool, **arguments: Any) -> None:
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
        policy = Policy(nodes=Nodes(minimum=world_size, maximum=world_size), last_call=1.0)
        secret = Secret.of(arguments.get("secret"))
        settings = Settings(
            job_id=job_id,
            placement=Placement(rank=None, world_size=world_size),
            discovery_timeout=WAIT_SECONDS,
            interfaces=tuple(filter(None, [os.environ.get("MINGLE_INTERFACE")])),
            interfaces_from="MINGLE_INTERFACE",
            secret=secret,
            mesh=arguments.get("mesh", "off"),
        )
        gathering = Gathering(settings, policy)
        try:
            gathering.gather()
        finally:
            gathering.close("the test is over")
    elif door == "url":
        os.environ["MINGLE_TIMEOUT"] = str(WAIT_SECONDS)
        if "secret" in arguments:
            os.environ["MINGLE_SECRET"] = arguments["secret"]
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


def seconds_until(rank: Rank[Any], words: str) -> float:
    """Return how long after its start a rank said this on its progress line."""
    rank.wait_for_output(words, WAIT_SECONDS)
    seconds = time.monotonic() - rank.events[0].time
    before, _, _ = rank.output.partition(words)
    assert "likely cause: " in before
    return seconds


def assert_told(rank: Rank[Any], words: str) -> None:
    seconds = seconds_until(rank, words)
    print(f"{seconds:.1f} s: {words}")
    assert seconds <= TOLD_SECONDS


def two(lab: Lab) -> list[Host]:
    network = lab.network()
    return [lab.host(network) for _ in range(2)]


DOORS = ("given", "assigned", "agents", "url")
SCREENS = {False: "log", True: "terminal"}
SEEN = [("given", True), ("assigned", False), ("agents", False)]
"""Each door once, and each screen."""
DOORS_AND_SCREENS = pytest.mark.parametrize(
    ("door", "terminal"),
    chosen(SEEN, soak=[each for each in itertools.product(DOORS, SCREENS) if each not in SEEN]),
    ids=lambda each: each if isinstance(each, str) else SCREENS[each],
)


def ranks_of(door: str) -> tuple[int | None, int | None]:
    return (0, 1) if door in ("given", "url") else (None, None)


@pytest.mark.soak
@DOORS_AND_SCREENS
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_mistyped_id_is_named_by_both_sides(lab: Lab, door: str, terminal: bool, seed: int) -> None:
    one, other = ranks_of(door)
    hosts = two(lab)
    right = start(hosts[0], f"resnet {seed}", one, 2, door, terminal)
    wrong = start(hosts[1], f"resent {seed}", other, 2, door, terminal)
    mistyped = "a mistyped --rdzv-id: " if door == "agents" else "a mistyped job id: "
    assert_told(wrong, f"{mistyped}'resnet {seed}' is on this network; fix: ")
    if other is None:  # each process hosts its own job
        assert_told(right, f"{mistyped}'resent {seed}' is on this network; fix: ")
    else:
        assert_told(right, f"{mistyped}1 process with job id 'resent {seed}' is looking for a host; fix: ")


@pytest.mark.soak
@pytest.mark.parametrize("command", ["mingle.run.command", "mingle.check.command"])
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_the_commands_name_it_as_well(lab: Lab, command: str, seed: int) -> None:
    program = ["--", "true"] if command == "mingle.run.command" else []
    processes = [
        host.run(
            [sys.executable, "-m", command, "--nnodes", "2", "--job-id", f"{job_id} {seed}", *program],
            env={"MINGLE_TIMEOUT": f"{WAIT_SECONDS:g}"},
        )
        for host, job_id in zip(two(lab), ("resnet", "resent"), strict=True)
    ]
    for process, other in zip(processes, ("resent", "resnet"), strict=True):
        process.wait_for_output(f"'{other} {seed}' is on this network; fix: ", WAIT_SECONDS + 10)
        said = re.search(r"1/2 joined.* · ([0-9]+) s · likely cause: ", process.stderr)
        assert said is not None
        assert float(said[1]) <= TOLD_SECONDS


@pytest.mark.soak
@DOORS_AND_SCREENS
@pytest.mark.parametrize(
    "secrets",
    chosen([("s3cret", "another")], soak=[("s3cret", None)]),
    ids=lambda secrets: "differ" if secrets[1] else "one-side",
)
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_secret_that_differs_is_named_by_both_sides(
    lab: Lab, secrets: tuple[str, str | None], door: str, terminal: bool, seed: int
) -> None:
    ranks = [
        start(host, f"secret {seed}", rank, 2, door, terminal, **({"secret": secret} if secret else {}))
        for host, rank, secret in zip(two(lab), ranks_of(door), secrets, strict=True)
    ]
    units = "nodes" if door == "agents" else "ranks"
    for rank, secret in zip(ranks, secrets, strict=True):
        assert_told(
            rank,
            "s have no secret, or another one; fix: "
            if secret
            else f"MINGLE_SECRET or MINGLE_SECRET_FILE is set for the other {units} only; fix: ",
        )


@pytest.mark.soak
@DOORS_AND_SCREENS
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_rank_that_was_refused_is_named_by_those_that_wait(lab: Lab, door: str, terminal: bool, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    one, other = ranks_of(door)
    ranks = [
        start(host, f"size {seed}", rank, 3, door, terminal) for host, rank in zip(hosts[:2], (one, other), strict=True)
    ]
    for rank in ranks:
        rank.wait_for("started")
    time.sleep(2)  # the one that is refused finds a host
    refused = start(hosts[2], f"size {seed}", None if one is None else 2, 4, door, terminal)
    size = "--nnodes (" if door == "agents" else "world size ("
    assert size in refused.error().message
    for rank in ranks:
        assert_told(rank, f"s that contradict the others: {'' if one is None else 'rank 2 on '}host {hosts[2].name} ")
        assert size in rank.output


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_rank_that_was_started_twice_is_named_by_both_where_rank_0_is_missing(lab: Lab, seed: int) -> None:
    hosts = two(lab)
    ranks = [start(host, f"twice {seed}", 1, 3, "given", False) for host in hosts]
    for rank, other in zip(ranks, reversed(hosts), strict=True):
        assert_told(rank, f"rank 1 was started twice, here and on host {other.name} ")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_size_of_1_that_was_left_over_is_named(lab: Lab, seed: int) -> None:
    """Rank 0 runs alone, and sends no packet."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    left_over = {"RANK": "0", "WORLD_SIZE": "1"}
    alone = start(hosts[0], f"size {seed}", None, None, "given", False, env=left_over)
    waiting = [start(host, f"size {seed}", rank, 3, "given", False) for rank, host in enumerate(hosts) if rank]
    alone.wait_for_output("this process runs alone, since WORLD_SIZE is 1; ")
    for rank in waiting:
        assert_told(rank, "rank 0 was not started, has ended already, or runs alone with a world size of 1, ")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_peer_that_does_not_resolve_is_named(lab: Lab, seed: int) -> None:
    host, _ = two(lab)
    rank = start(host, f"peer {seed}", 1, 2, "given", False, peers=["nosuch.example"])
    assert_told(rank, "'nosuch.example' in MINGLE_PEERS does not resolve")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("door", "variable"),
    chosen(
        [("assigned", "MINGLE_INTERFACE"), ("given", "GLOO_SOCKET_IFNAME")],
        soak=[(door, "MINGLE_INTERFACE") for door in DOORS if door != "assigned"],
    ),
)
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_loopback_that_was_left_over_is_named_on_its_machine(lab: Lab, door: str, variable: str, seed: int) -> None:
    given = ranks_of(door)[0] is not None
    hosts = two(lab)
    right = start(hosts[0], f"left {seed}", 0 if given else None, 3, door, False)
    wrong = [
        start(hosts[1], f"left {seed}", rank if given else None, 3, door, False, env={variable: "lo"})
        for rank in (1, 2)
    ]
    for rank in wrong:
        rank.wait_for("started")
    until(lambda: any("likely cause" in rank.output for rank in wrong), WAIT_SECONDS)
    said = next(rank for rank in wrong if "likely cause" in rank.output)
    assert_told(said, f"{variable} names loopback alone, so no other machine can be reached, but eth0 10.77.0.2/24")
    assert f"several machines, unset {variable}" in said.output
    assert "likely cause" not in right.output


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_port_that_is_not_the_default_is_named_where_it_was_set(lab: Lab, seed: int) -> None:
    one, other = ranks_of("given")
    hosts = two(lab)
    right = start(hosts[0], f"port {seed}", one, 2, "given", False)
    wrong = start(hosts[1], f"port {seed}", other, 2, "given", False, env={"MINGLE_PORT": "31000"})
    assert_told(wrong, "no process is heard on UDP port 31000, which is not the default")
    assert "likely cause" not in right.output


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_another_directory_than_the_others_have_is_named(lab: Lab, tmp_path: Path, seed: int) -> None:
    """The user has named it because UDP is closed, so UDP is not to blame."""
    hosts = without_udp(lab, 2)
    for rank, host in enumerate(hosts):
        directory = tmp_path / str(rank)
        directory.mkdir()
        waiting = start(host, f"directory {seed}", rank, 2, "given", False, peers=f"dir:{directory}")
        assert_told(waiting, f"no other process of this job is seen in dir:{directory}")


@pytest.mark.soak
@pytest.mark.parametrize("way", chosen(["peers"], soak=["directory"]))
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_dropped_multicast_is_no_cause_where_there_is_another_way(
    lab: Lab, tmp_path: Path, way: str, seed: int
) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    for host in hosts:
        host.drop_multicast()
    peers = f"dir:{tmp_path}" if way == "directory" else ",".join(host.address() for host in hosts)
    ranks = [start(host, f"way {seed}", rank, 3, "given", False, peers=peers) for rank, host in enumerate(hosts[:2])]
    for rank in ranks:
        rank.wait_for("started")
    until(lambda: re.search(r"2/3 joined.* · 1[0-9] s", ranks[0].output), WAIT_SECONDS)
    message = ranks[0].error(WAIT_SECONDS + 20).message
    assert "likely cause: this host's firewall" not in ranks[0].output + message
    assert "likely cause: the missing ranks were not started" in message
    assert "(not needed: " in message


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_ranks_that_meet_in_a_directory_and_do_not_connect_are_named(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 2)
    for host in hosts:
        host.drop('iifname != "lo" meta l4proto tcp')
    ranks = [
        start(host, f"filtered {seed}", rank, 2, "given", False, peers=f"dir:{tmp_path}")
        for rank, host in enumerate(hosts)
    ]
    assert_told(ranks[0], f"dir:{tmp_path} shows one process that looks for this job and can't connect to this host")
    assert_told(ranks[1], "rank 0 was heard but could not be reached over TCP")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_host_that_has_no_free_port_is_named_by_both_sides(lab: Lab, seed: int) -> None:
    hosts = two(lab)
    hosts[1].namespace.tool(["sh", "-c", "echo 40000 40000 > /proc/sys/net/ipv4/ip_local_port_range"])
    ranks = [start(host, f"ports {seed}", rank, 2, "given", False) for rank, host in enumerate(hosts)]
    for rank in ranks:
        assert_told(rank, "no port is free there for a connection to leave from (net.ipv4.ip_local_port_range)")


def readdress(host: Host, address: str) -> None:
    interface = host.interface()
    host.ip(f"address flush dev {interface}", f"address add {address} dev {interface}")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("named_alike", "door"),
    chosen([(False, "given"), (True, "agents")], soak=[(False, "agents"), (True, "given")]),
    ids=lambda each: each if isinstance(each, str) else "clones" if each else "names",
)
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_an_address_that_two_machines_have_is_named(lab: Lab, named_alike: bool, door: str, seed: int) -> None:
    network = lab.network(link_local=False)
    hosts = [lab.host(network) for _ in range(3)]
    address = hosts[1].address()
    readdress(hosts[2], f"{address}/24")
    ranks = list[Rank[Any]]()
    for number, host in enumerate(hosts):
        what = wait_in_vain_as_a_clone if named_alike and number else wait_in_vain
        rank = None if door == "agents" else number
        ranks.append(host.start(what, f"twice {seed}", rank, 3, door, False, env=WIDE))
        ranks[-1].wait_for("started")
        time.sleep(2)  # the second clone takes the address from the first one, which has joined
    words = f"two machines use the address {address}: " if named_alike else f" use the same address {address}; fix: "
    ranks[0].wait_for_output(words, WAIT_SECONDS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_hardware_address_that_two_machines_have_is_named(lab: Lab, seed: int) -> None:
    hosts = two(lab)
    described = json.loads(hosts[0].namespace.tool(["ip", "-j", "link", "show", hosts[0].interface()]))
    interface = hosts[1].interface()
    hosts[1].ip(f"link set {interface} down", f"link set {interface} address {described[0]['address']} up")
    ranks = [start(host, f"hardware {seed}", rank, 2, "given", False) for rank, host in enumerate(hosts)]
    address = hosts[1].address()
    assert_told(ranks[0], f"{address} has the same hardware address as this machine's {hosts[0].interface()} (")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_another_netmask_is_named(lab: Lab, seed: int) -> None:
    network = lab.network("10.77.0.0/16", link_local=False)
    hosts = [lab.host(network) for _ in range(2)]
    readdress(hosts[0], "10.77.1.1/24")
    ranks = [start(host, f"netmask {seed}", rank, 2, "given", False) for rank, host in enumerate(hosts)]
    address = hosts[1].address()
    assert_told(ranks[0], f"{address} is on this network and in none of the subnets here (eth0 10.77.1.1/24)")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_address_translation_that_hides_rank_0_is_named(lab: Lab, seed: int) -> None:
    inside, outside = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    router = lab.host(inside, outside, name="router")
    hosts = [lab.host(inside), lab.host(outside)]
    own, public = hosts[0].address(), router.address(outside)
    router.forward(f"ip daddr {public} dnat to {own}")
    hosts[0].ip(f"route replace default via {router.address(inside)}")
    start(hosts[0], f"nat {seed}", 0, 2, "given", False)
    rank = start(hosts[1], f"nat {seed}", 1, 2, "given", False, peers=[public])
    assert_told(
        rank, f"host {hosts[0].name} announces {own}, and its datagrams come from {public}: address translation"
    )
    assert "fix: set MINGLE_ADVERTISE there" in rank.output


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_rank_that_is_heard_and_does_not_come_is_named(lab: Lab, seed: int) -> None:
    """Its packets arrive, and it hears nothing of rank 0."""
    hosts = two(lab)
    hosts[1].isolate_one_way("in")
    right = start(hosts[0], f"deaf {seed}", 0, 2, "given", False)
    start(hosts[1], f"deaf {seed}", 1, 2, "given", False)
    assert_told(right, f"rank 1 on host {hosts[1].name} ")
    assert "heard but not joined" in right.output


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", chosen(["assigned"], soak=["given"]))
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_rank_that_fails_before_it_hosts_is_named_by_those_that_wait(lab: Lab, door: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    numbers = (0, 1, 2) if door == "given" else (None, None, None)
    waiting = [
        start(host, f"fails {seed}", number, 3, door, False)
        for host, number in zip(hosts[1:], numbers[1:], strict=True)
    ]
    for rank in waiting:
        rank.wait_for("started")
    until(lambda: any(" · 10 s" in rank.output for rank in waiting), WAIT_SECONDS)  # by now they listen
    hold = f"held = socket.create_server(('', {MASTER_PORT})); print('holding', flush=True); signal.pause()"
    hosts[0].run([sys.executable, "-c", f"import signal, socket; {hold}"]).wait_for_output("holding")
    failing = start(hosts[0], f"fails {seed}", numbers[0], 3, door, False, master_port=MASTER_PORT)
    assert "Address already in use" in failing.error().message
    failed = time.monotonic()
    for rank in waiting:
        rank.wait_for_output(f"has failed: the store can't listen on {hosts[0].address()}:{MASTER_PORT}: Address", 40)
    assert time.monotonic() - failed <= TOLD_SECONDS


MASTER_PORT = 29400
NO_TCP, NO_CALLS = "", " tcp flags & (syn | ack) == syn"
UNREACHED = [
    ("given", (1, 2), NO_TCP),
    ("given", (0, 1), NO_CALLS),
    ("given", (1, 0), NO_CALLS),
    ("assigned", (1, 2), NO_CALLS),
    ("agents", (1, 2), NO_TCP),
    ("agents", (1, 2), NO_CALLS),
]
"""The host and a worker, each way, and two workers. Where a host is elected, chance decides which of them they are."""
_EVERY_PAIR = itertools.product(
    ("given", "assigned", "agents"), itertools.permutations(range(3), 2), (NO_TCP, NO_CALLS)
)


def unreached_pair(text: str, *names: str) -> bool:
    """Return whether a line says that these hosts do not reach each other, or that one does not reach the other."""
    lines = (line for line in text.splitlines() if re.search(r" reach| gets no place", line))
    return any(all(re.search(rf"host {name}\b", line) for name in names) for line in lines)


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("door", "pair", "match"),
    chosen(UNREACHED, soak=[each for each in _EVERY_PAIR if each not in UNREACHED]),
    ids=lambda each: {NO_TCP: "no TCP", NO_CALLS: "no calls"}.get(each, str(each)),
)
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_pair_that_can_not_talk_is_named_on_both_machines(
    lab: Lab, door: str, pair: tuple[int, int], match: str, seed: int
) -> None:
    """Whichever of them, or the third, hosts the job."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    one, other = (hosts[number] for number in pair)
    one.drop(f"meta l4proto tcp ip saddr {other.address()}{match}")
    numbers = (0, 1, 2) if door == "given" else (None, None, None)
    ranks = {
        host: start(host, f"pair {seed}", number, 3, door, False, mesh="on")
        for host, number in zip(hosts, numbers, strict=True)
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


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_rank_that_just_comes_late_is_no_fault(lab: Lab, seed: int) -> None:
    hosts = two(lab)
    first = start(hosts[0], f"late {seed}", 0, 3, "given", True)
    second = start(hosts[1], f"late {seed}", 1, 3, "given", True)
    stranger = start(hosts[1], f"another job {seed}", 1, 3, "given", True)
    for rank in (first, second, stranger):
        rank.wait_for("started")
    until(lambda: re.search(r" · (1[5-9]|2[0-4]) s", first.output), WAIT_SECONDS)
    assert [rank for rank in (first, second, stranger) if "likely cause" in rank.output] == []
