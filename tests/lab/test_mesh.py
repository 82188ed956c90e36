"""Nodes of a job that can't reach each other: every rank raises the same error in seconds, and it names them.

Which nodes are named is shown by the simulator, and here what kernels, firewalls and other programs make of a path.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

import mingle
from tests.support.levels import chosen, soaking

from . import Host, Lab
from .scenarios import TIMEOUT, formed, report_log, train, wait_for_log

pytestmark = pytest.mark.timeout(120)

RAISED_SECONDS = 12.0 if soaking() else 25.0
"""By when every rank has raised, from its start. Without the check it is the discovery timeout."""
SIZE = 4


def join(job_id: str, rank: int, world_size: int = SIZE) -> tuple[float, str, str]:
    """Discover; return the seconds until it ended, the kind of its end, and what it said."""
    report_log()
    began = time.monotonic()
    try:
        with mingle.discover(job_id, rank=rank, world_size=world_size, discovery_timeout=TIMEOUT, mesh="on") as job:
            return time.monotonic() - began, "formed", job.master_addr
    except mingle.MingleError as error:
        return time.monotonic() - began, type(error).__name__, str(error)


def raised(hosts: Sequence[Host]) -> str:
    """Start a rank on each host; return the error that all of them raise, which must come in time."""
    ranks = [host.start(join, "mesh", rank, len(hosts)) for rank, host in enumerate(hosts)]
    ends = [rank.result(2 * TIMEOUT) for rank in ranks]
    assert {kind for _, kind, _ in ends} == {"ConnectivityError"}, ends
    assert len({text for *_, text in ends}) == 1, ends
    assert max(seconds for seconds, *_ in ends) < RAISED_SECONDS, ends
    text = ends[0][2]
    print(f"{max(seconds for seconds, *_ in ends):.2f} s\n{text}", file=sys.stderr)
    assert len(text.splitlines()) <= 10
    return text


def pairs_of(text: str) -> list[str]:
    """Return the lines about pairs."""
    return [line.strip() for line in text.partition("\n  likely cause:")[0].splitlines()[1:]]


def from_host(host: Host) -> str:
    """Match the TCP packets of a host; UDP passes."""
    return f"meta l4proto tcp ip saddr {host.address()}"


@pytest.mark.quick
@pytest.mark.soak(3)
def test_a_filter_between_two_workers(lab: Lab) -> None:
    hosts = lab.lan(SIZE)
    hosts[1].drop(from_host(hosts[2]))
    text = raised(hosts)
    (line,) = pairs_of(text)
    assert "rank 1 on host host2" in line
    assert "rank 2 on host host3" in line
    assert "do not reach each other: no answer" in line
    found = re.search(r"likely cause: as host2 finds in its own firewall, rule `(.*)` of chain (.*) blocks TCP", text)
    assert found is not None, text
    assert hosts[2].address() in found[1]
    assert f"fix: on host2 (torch needs all TCP ports):\n    nft insert rule {found[2]} ip saddr 10.77." in text


AFTER_SYN = {
    "all but SYNs": "tcp flags & (syn | ack) != syn drop",
    "what belongs to a connection": "ct state established drop",
    "what an accept of SYNs leaves": "tcp flags syn / syn,ack accept; {them} drop",
    "on its way out": "tcp flags & (syn | ack) != syn drop",
}


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    "rule",
    chosen(["all but SYNs", "on its way out"], soak=["what belongs to a connection", "what an accept of SYNs leaves"]),
)
def test_a_firewall_that_lets_nothing_but_syns_pass_is_named(lab: Lab, rule: str) -> None:
    """The connections of one host open and stay silent, as if another program had accepted them."""
    hosts = lab.lan(SIZE)
    hook, end = ("output", "daddr") if rule == "on its way out" else ("input", "saddr")
    them = f"meta l4proto tcp ip {end} {hosts[2].address()}"
    rules = f"{them} {AFTER_SYN[rule].format(them=them)}"
    hosts[1].namespace.nft(f"table inet own {{ chain c {{ type filter hook {hook} priority 0; {rules}; }}; }}")
    text = raised(hosts)
    (line,) = pairs_of(text)
    assert "rank 1 on host host2" in line
    assert "rank 2 on host host3" in line
    assert "likely cause: as host2 finds in its own firewall, rule `" in text
    assert f"of chain inet own c blocks TCP connections {'to' if hook == 'output' else 'from'} " in text
    assert "also the address of another machine" not in text


SYN = "tcp flags & (syn | ack) == syn"


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("rule", "start", "end"),
    [
        # As by a firewall with states: the other direction works.
        (f"{SYN} reject with tcp reset", "rank 2 on host host3", "refuses connections; the other way works"),
        (f"{SYN} drop", "rank 2 on host host3", "the other way works"),
        ("meta length > 1000 drop", "rank ", "large packets do not pass"),
    ],
    ids=["rejects SYNs", "drops SYNs", "drops large packets"],
)
def test_what_a_path_does_is_told(lab: Lab, rule: str, start: str, end: str) -> None:
    hosts = lab.lan(SIZE)
    rules = f"{from_host(hosts[2])} {rule}"
    hosts[1].namespace.nft(f"table inet own {{ chain c {{ type filter hook input priority 0; {rules}; }}; }}")
    (line,) = pairs_of(raised(hosts))
    assert line.startswith(start)
    assert "rank 1 on host host2" in line
    assert "rank 2 on host host3" in line
    assert end in line


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("length", "others"),
    chosen(
        [pytest.param(31, [3], id="all but rank 3")],
        soak=[pytest.param(32, [2, 3], id="rank 0 only")],
    ),
)
def test_a_wrong_netmask(lab: Lab, length: int, others: list[int]) -> None:
    """Rank 1 has routes to rank 0 and not to all others, so it can't answer them either."""
    hosts = lab.lan(SIZE)
    address, interface = hosts[1].address(), hosts[1].interface()
    hosts[1].ip(
        f"address flush dev {interface}",
        f"address add {address}/{length} dev {interface}",
        f"route replace {hosts[0].address()}/32 dev {interface}",
    )
    lines = pairs_of(raised(hosts))
    assert all("host2" in line for line in lines), lines
    named = {number for number in (0, 2, 3) if any(f"host{number + 1}" in line for line in lines)}
    assert named == set(others), lines


FOREIGN = {
    "speaks": "while True: socket.accept()[0].sendall(b'SSH-2.0-OpenSSH_9.6\\r\\n')",
    "says nothing": "kept = []\nwhile True: kept.append(socket.accept())",
    "answers": "while True: one = socket.accept()[0]; one.recv(9); one.sendall(b'HTTP/1.0 400 Bad Request\\r\\n')",
}
"""What another program does with a connection."""


@pytest.mark.soak(3)
@pytest.mark.parametrize("program", chosen(["speaks", "says nothing"], soak=["answers"]))
def test_another_program_answers_for_a_worker(lab: Lab, program: str) -> None:
    """What rank 2 opens to rank 1, on whatever port, comes to another program; the other direction works."""
    hosts = lab.lan(SIZE)
    code = f"from socket import *\nsocket = create_server(('', 9999))\nprint('ready', flush=True)\n{FOREIGN[program]}"
    hosts[1].run([sys.executable, "-c", code]).wait_for_output("ready")
    rule = f"{from_host(hosts[2])} redirect to :9999"
    hosts[1].namespace.nft(f"table ip own {{ chain c {{ type nat hook prerouting priority dstnat; {rule}; }}; }}")
    (line,) = pairs_of(raised(hosts))
    assert line.startswith("rank 2 on host host3")
    assert "does not reach rank 1 on host host2" in line
    if program == "says nothing":
        assert "accepts connections and does not answer, though the process there runs" in line
    else:
        assert "another program answers on TCP port" in line
    assert line.endswith("the other way works")


# --- the commands -------------------------------------------------------------------------------------------------


@pytest.mark.soak(3)
@pytest.mark.parametrize("mesh", ["warn", "on", "off"])
def test_mingle_run_warns_or_refuses(lab: Lab, mesh: str) -> None:
    hosts = lab.lan(3)
    hosts[1].drop(from_host(hosts[2]))
    line = [sys.executable, "-m", "mingle.run.command", "--nnodes=3", "--job-id=run", f"--mesh={mesh}"]
    commands = [[*line, f"--node-rank={rank}", "--", "echo", "started {node_rank}"] for rank in range(3)]
    processes = [hosts[0].run(commands[0])]
    # Node 0 hosts before the others start: one of the pair could be elected, and the other could not join it.
    watching = hosts[0].run([sys.executable, "-m", "mingle", "watch", "-t", "60"])
    watching.wait_for_output("+\trun\topen")
    watching.interrupt()
    watching.wait(TIMEOUT)
    processes += [host.run(command) for host, command in zip(hosts[1:], commands[1:], strict=True)]
    statuses = [process.wait(2 * TIMEOUT) for process in processes]
    for rank, process in enumerate(processes):
        started = f"started {rank}" in process.stdout
        named = all(name in process.stderr for name in ("host host2 (10.77.0.2 on", "host host3 (10.77.0.3 on"))
        assert started == (mesh != "on"), process.stderr
        assert named == (mesh == "on" or (mesh == "warn" and rank == 0)), process.stderr
    assert statuses == [1 if mesh == "on" else 0] * 3


@pytest.mark.soak(3)
@pytest.mark.timeout(240)
def test_mingle_check_names_the_pair(lab: Lab) -> None:
    hosts = lab.lan(3)
    hosts[1].drop(from_host(hosts[2]))
    line = [sys.executable, "-m", "mingle.check.command", "--nnodes=3", "--json", "--mesh=on"]
    # Given ranks: of assigned ones, a process of the pair could be elected first, and the other can't join it.
    ranks = [{"MINGLE_RANK": str(rank), "MINGLE_WORLD_SIZE": "3", "MINGLE_TIMEOUT": "90"} for rank in range(3)]
    processes = [host.run(line, env=env) for host, env in zip(hosts, ranks, strict=True)]
    assert [process.wait(150) for process in processes] == [1, 1, 1]
    (error,) = {json.dumps(json.loads(process.stdout)["error"]) for process in processes}
    assert json.loads(error)["type"] == "ConnectivityError"
    assert "host host2 (10.77.0.2 on eth0)" in error
    assert "host host3 (10.77.0.3 on eth0)" in error
    assert "host1 (" not in error


# --- no false alarm -----------------------------------------------------------------------------------------------


BLAMED = ("MTU", "another program", "is also the address of another machine", "no file descriptor")


@pytest.mark.soak(5)
@pytest.mark.timeout(180)
def test_no_host_is_blamed_where_three_of_ten_tcp_packets_are_lost(lab: Lab) -> None:
    """Such a job often forms in its 30 s; where it does not, no line names another cause and leaves out the loss."""
    hosts = lab.lan(SIZE)
    for host in hosts:
        host.isolate_one_way("in", match="ip protocol tcp numgen random mod 100 < 30")
    ranks = [host.start(join, "loss", rank) for rank, host in enumerate(hosts)]
    for rank in ranks:
        _, _, text = rank.result(2 * TIMEOUT)
        said = [text, rank.stderr, *(event["text"] for event in rank.events if event.name == "log")]
        lines = [line for each in said for line in each.splitlines()]
        assert [line for line in lines if "lost" not in line and any(words in line for words in BLAMED)] == []


@contextlib.contextmanager
def busy_processors(host: Host) -> Iterator[None]:
    """Keep each processor of this machine busy."""
    burners = [
        host.run([sys.executable, "-c", "print('burns', flush=True)\nwhile True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    for burner in burners:
        burner.wait_for_output("burns")
    yield
    for burner in burners:
        burner.kill()


@pytest.mark.soak(50)
def test_no_alarm_where_packets_are_lost_processors_are_busy_and_a_rank_is_stopped(lab: Lab, seed: int) -> None:
    """It is stopped for 3 s at a moment between the last start and GO, wherever chance puts it."""
    hosts = lab.lan(SIZE)
    for host in hosts:
        host.drop_udp(50)
        host.drop('iifname != "lo" meta l4proto tcp numgen random mod 100 < 5')
    chance = random.Random(seed)
    with busy_processors(hosts[0]):
        ranks = [hosts[rank].start(train, "healthy", rank, SIZE, mesh="on") for rank in range(SIZE - 1)]
        wait_for_log(ranks[1], "seated")
        ranks.append(hosts[-1].start(train, "healthy", SIZE - 1, SIZE, mesh="on"))
        wait_for_log(ranks[-1], "joining")
        threading.Event().wait(chance.uniform(0, chance.choice((0.02, 0.5))))
        victim = chance.choice(ranks)
        with contextlib.suppress(ProcessLookupError):  # it may have formed and ended already
            os.kill(victim.pid, signal.SIGSTOP)
            threading.Event().wait(3.0)
            os.kill(victim.pid, signal.SIGCONT)
        formed(ranks, hosts)
