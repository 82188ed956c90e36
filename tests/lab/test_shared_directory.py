"""Hosts that share a directory and nothing else: no multicast, no names, and where it says so no UDP at all."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mingle.network.folders import digest
from mingle.wire import datagrams
from mingle.wire.datagrams import Offer
from tests.support.levels import repeated
from tests.support.loopback import longer, until

from . import Host, Lab
from .scenarios import check, hold, results, start_apart, train, wait_for_log, without_udp
from .test_election import assigned
from .test_election import check as check_assigned
from .torchrun_jobs import Job, jobs

MakeJob = Callable[..., Job]


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


def peers(directory: Path) -> dict[str, str]:
    return {"MINGLE_PEERS": f"dir:{directory}"}


@pytest.mark.quick
@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_assigned_ranks_meet_in_a_directory(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 4)
    ranks = start_apart(
        hosts, seed, lambda rank: hosts[rank].start(assigned, f"directory {seed}", 4, env=peers(tmp_path))
    )
    found = results(ranks)
    check_assigned(found, hosts)
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}")
    until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_they_meet_where_only_multicast_is_lost(lab: Lab, tmp_path: Path, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    for host in hosts:
        host.drop_multicast()
    ranks = start_apart(
        hosts, seed, lambda rank: hosts[rank].start(assigned, f"no multicast {seed}", 4, env=peers(tmp_path))
    )
    found = results(ranks)
    check_assigned(found, hosts)
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}")
    until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_given_ranks_meet_in_any_order(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 4)
    ranks = start_apart(
        hosts, seed, lambda rank: hosts[rank].start(train, f"given {seed}", rank, 4, env=peers(tmp_path))
    )
    check(results(ranks), hosts, hosts[0])
    until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_torchrun_agents_meet_in_a_directory_and_go_on_without_the_host(
    lab: Lab, job: MakeJob, tmp_path: Path, seed: int
) -> None:
    hosts = without_udp(lab, 3)
    place = tmp_path / "place"
    place.mkdir()
    made = job(f"directory-{seed}", "2:3", restarts=3, env=peers(place))
    made.start(*hosts)
    made.wait_for_group(hosts)
    made.replace_store_host(hosts)
    # What is left is the object of the host that was killed.
    members = {path.name.split("-")[2] for path in place.rglob("?-*")}
    assert len(members) <= 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_mingle_run_meets_in_a_directory(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 3)
    line = [sys.executable, "-m", "mingle.run.command", "--nnodes", "3", "--job-id", f"run {seed}"]
    show = ["--peers", f"dir:{tmp_path}", "--", "echo", "{node_rank}", "{master_addr}"]
    processes = [host.run([*line, *show], env={"MINGLE_TIMEOUT": "60"}) for host in hosts]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    said = [process.stdout.split() for process in processes]
    assert sorted(rank for rank, _ in said) == ["0", "1", "2"]
    assert len({address for _, address in said}) == 1
    until(lambda: not list(tmp_path.iterdir()))


def test_check_and_the_commands_of_discover_look_into_a_directory(lab: Lab, tmp_path: Path) -> None:
    hosts = without_udp(lab, 3)
    discover = [sys.executable, "-m", "mingle"]
    shared = ["--peers", f"dir:{tmp_path}"]
    waiting = hosts[0].start(hold, "waiting", 0, 2, env=peers(tmp_path), discovery_timeout=180)
    until(lambda: list(tmp_path.rglob("h-*")))

    def ask(host: Host, command: str, *more: str) -> Callable[[float], str]:
        def answer(seconds: float) -> str:
            asked = host.run([*discover, command, "--timeout", f"{seconds:g}", *more, *shared])
            asked.wait(60)
            return asked.stdout

        return answer

    listed = longer(ask(hosts[1], "list", "--json"), lambda told: '"proved": true' in told)
    (found,) = json.loads(listed)["jobs"]
    assert (found["job"], found["proved"], found["missing"]) == ("waiting", True, [1])
    assert (found["address"], found["endpoint"]) == (hosts[0].address(), "control")
    sought = hosts[2].run([*discover, "find", "waiting", "--timeout", "5", *shared])
    assert sought.wait(60) == 1
    assert "1 of 2 ranks joined, missing ranks: 1" in sought.stderr
    watched = longer(ask(hosts[2], "watch"), lambda told: told.startswith("+\twaiting\topen\t"))
    assert watched.startswith("+\twaiting\topen\t")
    waiting.kill()
    serving = hosts[0].run([*discover, "doctor", "--serve", *shared])
    serving.wait_for_output("serving")
    examined = hosts[1].run([*discover, "doctor", "--all", *shared])
    examined.wait(60)
    assert f"writes in dir:{tmp_path}, and sees there what it has written, and reads what " in examined.stdout
    serving.interrupt()
    serving.wait(60)
    line = [sys.executable, "-m", "mingle.check.command", "--nnodes", "3", "--job-id", "checked", *shared]
    checked = [host.run(line, env={"MINGLE_TIMEOUT": "60"}) for host in hosts]
    codes = [process.wait(100) for process in checked]
    assert codes == [0, 0, 0], [process.output for process in checked]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_forged_files_do_not_keep_a_job_with_a_secret_apart(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 4)
    name = f"secret {seed}"
    folder = tmp_path / digest(name)[:32]
    folder.mkdir()
    rng = random.Random(seed)

    def object_name() -> str:
        return f"{rng.choice('hs')}-{rng.randbytes(8).hex()}-{rng.randbytes(16).hex()}-{rng.randrange(100)}"

    forged = Offer(
        job=name, session=bytes(16), host=bytes(16), addresses=("10.1.2.3",), port=9, world_size=4, assigned=True
    )
    for _ in range(10_000):
        (folder / object_name()).write_bytes(rng.choice([datagrams.encode(forged), rng.randbytes(500), b""]))
    (folder / object_name()).write_bytes(bytes(1_000_000))
    (folder / object_name()).symlink_to("/etc/passwd")
    os.mkfifo(folder / object_name())
    ranks = [host.start(assigned, name, 4, env=peers(tmp_path), secret="s3cret") for host in hosts]
    found = results(ranks)
    check_assigned(found, hosts)
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}")
    assert max(result["elapsed"] for result in found) < 28


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_the_objects_of_a_killed_job_do_not_delay_the_next(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 3)
    name = f"again {seed}"
    for rank in [host.start(hold, name, rank, 3, env=peers(tmp_path)) for rank, host in enumerate(hosts)]:
        rank.wait_for("running")
    until(lambda: len(list(tmp_path.rglob("h-*"))) == 1)  # rank 0 has just renewed it, and deletes the one before
    for host in hosts:
        host.kill()
    assert len(list(tmp_path.rglob("h-*"))) == 1
    ranks = [host.start(train, name, rank, 3, env=peers(tmp_path)) for rank, host in enumerate(hosts)]
    found = results(ranks)
    check(found, hosts, hosts[0])
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}")
    assert max(result["elapsed"] for result in found) < 9


def test_a_directory_that_is_not_mounted_is_named(lab: Lab, tmp_path: Path) -> None:
    (host,) = without_udp(lab, 1)
    missing = tmp_path / "mingle"
    rank = host.start(assigned, "not mounted", 2, env=peers(missing), discovery_timeout=25)
    wait_for_log(rank, f"likely cause: dir:{missing} in MINGLE_PEERS does not exist")
    error = rank.error()
    assert f"likely cause: dir:{missing} in MINGLE_PEERS does not exist" in error.message
    assert "mount its file system" in error.message


def test_times_beside_multicast_and_a_name(lab: Lab, tmp_path: Path) -> None:
    """Print how long a job takes from the last start on, by each road."""
    for road in ("multicast", "a name", "a directory"):
        hosts = [lab.host(network) for network in [lab.network()] * 4] if road == "multicast" else without_udp(lab, 4)
        if road == "a name":
            for host in hosts:
                host.clear_rules()
                host.drop_multicast()
        env = {"multicast": {}, "a name": {"MINGLE_PEERS": hosts[0].address()}, "a directory": peers(tmp_path)}[road]
        took = []
        for number in range(5):
            waiting = [hosts[rank].start(train, f"{road} {number}", rank, 4, env=env) for rank in range(3)]
            time.sleep(1.5)
            last = hosts[3].start(train, f"{road} {number}", 3, 4, env=env)
            found = results([*waiting, last])
            check(found, hosts, hosts[0])
            took.append(found[3]["elapsed"])
        print(f"{road}: {', '.join(f'{each * 1000:.0f}' for each in sorted(took))} ms")
