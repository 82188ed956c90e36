"""Hosts that share a directory and no UDP: they meet in it, and one that can't be used is named.

The mounts are in the mount namespaces of the lab's hosts, so they end with the hosts, also when a test fails. A server
that does not answer is in `test_hung_directory`.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mingle.network.folders import digest
from mingle.wire import datagrams
from mingle.wire.datagrams import Offer
from tests.support.loopback import longer, until

from . import Host, Lab
from .scenarios import formed, hold, start_apart, start_ranks, train, wait_for_log, without_udp
from .syscalls import MS_BIND, MS_RDONLY, MS_REMOUNT, mount
from .torchrun_jobs import MakeJob

NAMED_SECONDS = 24.0
TMPFS_BYTES = 1 << 16


def peers(directory: Path) -> dict[str, str]:
    return {"MINGLE_PEERS": f"dir:{directory}"}


@pytest.mark.quick
@pytest.mark.soak(5)
def test_assigned_ranks_meet_in_a_directory(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 4)
    ranks = start_apart(
        hosts, seed, lambda number: hosts[number].start(train, "directory", None, 4, env=peers(tmp_path))
    )
    formed(ranks, hosts, given=False)
    until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.soak(5)
def test_torchrun_agents_meet_in_a_directory_and_go_on_without_the_host(lab: Lab, job: MakeJob, tmp_path: Path) -> None:
    hosts = without_udp(lab, 3)
    place = tmp_path / "place"
    place.mkdir()
    made = job("directory", "2:3", restarts=3, env=peers(place))
    made.start(*hosts)
    made.wait_for_group(hosts)
    made.replace_store_host(hosts)
    # What is left is the object of the host that was killed.
    members = {path.name.split("-")[2] for path in place.rglob("?-*")}
    assert len(members) <= 3


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


@pytest.mark.soak(5)
def test_forged_files_do_not_keep_a_job_with_a_secret_apart(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 4)
    folder = tmp_path / digest("secret")[:32]
    folder.mkdir()
    rng = random.Random(seed)

    def object_name() -> str:
        return f"{rng.choice('hs')}-{rng.randbytes(8).hex()}-{rng.randbytes(16).hex()}-{rng.randrange(100)}"

    forged = Offer(
        job="secret", session=bytes(16), host=bytes(16), addresses=("10.1.2.3",), port=9, world_size=4, assigned=True
    )
    for _ in range(10_000):
        (folder / object_name()).write_bytes(rng.choice([datagrams.encode(forged), rng.randbytes(500), b""]))
    (folder / object_name()).write_bytes(bytes(1_000_000))
    (folder / object_name()).symlink_to("/etc/passwd")
    os.mkfifo(folder / object_name())
    ranks = start_ranks(hosts, "secret", given=False, env=peers(tmp_path), secret="s3cret")
    assert formed(ranks, hosts, given=False) < 28


@pytest.mark.soak(5)
def test_the_objects_of_a_killed_job_do_not_delay_the_next(lab: Lab, tmp_path: Path) -> None:
    hosts = without_udp(lab, 3)
    for rank in [host.start(hold, "again", rank, 3, env=peers(tmp_path)) for rank, host in enumerate(hosts)]:
        rank.wait_for("running")
    until(lambda: len(list(tmp_path.rglob("h-*"))) == 1)  # rank 0 has just renewed it, and deletes the one before
    for host in hosts:
        host.kill()
    assert len(list(tmp_path.rglob("h-*"))) == 1
    assert formed(start_ranks(hosts, "again", env=peers(tmp_path)), hosts) < 9


# --- a directory that can't be used -----------------------------------------------------------------------------------


def not_mounted(place: Path) -> None:
    """Take it away."""
    place.rmdir()


def read_only(place: Path) -> None:
    """Mount a directory over itself, read-only, for all processes of this host."""
    mount(str(place), str(place), None, MS_BIND)
    mount("none", str(place), None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    fails(errno.EROFS, lambda: (place / "probe").touch())


def full(place: Path) -> None:
    """Mount a file system over a directory that has no byte left, for all processes of this host."""
    mount("tmpfs", str(place), "tmpfs", 0, f"size={TMPFS_BYTES}")
    (place / "filler").write_bytes(bytes(TMPFS_BYTES))
    fails(errno.ENOSPC, lambda: (place / "probe").write_bytes(b"1"))


def full_of_files(place: Path) -> None:
    """Mount a file system over a directory that takes no further file, for all processes of this host."""
    mount("tmpfs", str(place), "tmpfs", 0, "nr_inodes=2")
    (place / "filler").touch()
    fails(errno.ENOSPC, lambda: (place / "probe").touch())


def fails(number: int, write: Callable[[], object]) -> None:
    with pytest.raises(OSError) as refused:
        write()
    assert refused.value.errno == number


@pytest.mark.soak(5)
@pytest.mark.parametrize(
    ("spoil", "observed", "fix"),
    [
        (not_mounted, "does not exist", "mount its file system"),
        (read_only, "Read-only file system", "mount it writable on every machine"),
        (full, "No space left on device", "free space there"),
        (full_of_files, "No space left on device", "free space there"),
    ],
    ids=["not mounted", "read-only", "full", "full of files"],
)
def test_what_is_wrong_with_a_directory_is_named(
    lab: Lab, tmp_path: Path, spoil: Callable[[Path], None], observed: str, fix: str
) -> None:
    """By a process that waits, and again when its time is up."""
    (host,) = without_udp(lab, 1)
    place = tmp_path / "mingle"
    place.mkdir()
    host.start(spoil, place).result()
    started = time.monotonic()
    rank = host.start(train, "unusable", None, 2, env=peers(place), discovery_timeout=25)
    wait_for_log(rank, f"likely cause: dir:{place} in MINGLE_PEERS ")
    took = time.monotonic() - started
    print(f"named after {took:.1f} s")
    assert took < NAMED_SECONDS
    progress = [text for event in rank.events if event.name == "log" and "likely cause" in (text := event.data["text"])]
    for text in (progress[0], rank.error().message):
        assert observed in text
        assert fix in text


@pytest.mark.soak(5)
def test_a_process_that_can_only_read_finds_the_host(lab: Lab, tmp_path: Path) -> None:
    hosts = without_udp(lab, 3)
    for host in hosts[1:]:
        host.start(read_only, tmp_path).result()
    formed(start_ranks(hosts, "reader", env=peers(tmp_path)), hosts)
    until(lambda: not list(tmp_path.iterdir()))
