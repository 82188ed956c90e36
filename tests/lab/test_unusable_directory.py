"""A directory that is read-only or full: it is named with what to do, and it delays neither multicast nor an end.

The mounts are in the mount namespaces of the lab's hosts, so they end with the hosts, also when a test fails.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.levels import chosen, repeated, soaking
from tests.support.loopback import until

from . import Host, Lab
from .scenarios import check, interrupt, least, results, train, wait_for_log, without_udp
from .syscalls import MS_BIND, MS_RDONLY, MS_REMOUNT, mount
from .test_election import assigned
from .test_shared_directory import peers

NAMED_SECONDS = 24.0
END_SECONDS = 2.0 if soaking() else 4.0
TMPFS_BYTES = 1 << 16


def make_read_only(place: Path) -> None:
    """Mount a directory over itself, read-only, for all processes of this host."""
    mount(str(place), str(place), None, MS_BIND)
    mount("none", str(place), None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    with pytest.raises(OSError) as refused:
        (place / "probe").touch()
    assert refused.value.errno == errno.EROFS


def make_full(place: Path) -> None:
    """Mount a file system over a directory that has no byte left, for all processes of this host."""
    mount("tmpfs", str(place), "tmpfs", 0, f"size={TMPFS_BYTES}")
    (place / "filler").write_bytes(bytes(TMPFS_BYTES))
    fails_for_space(lambda: (place / "probe").write_bytes(b"1"))


def make_full_of_files(place: Path) -> None:
    """Mount a file system over a directory that takes no further file, for all processes of this host."""
    mount("tmpfs", str(place), "tmpfs", 0, "nr_inodes=2")
    (place / "filler").touch()
    fails_for_space(lambda: (place / "probe").touch())


def fails_for_space(write: Callable[[], object]) -> None:
    with pytest.raises(OSError) as refused:
        write()
    assert refused.value.errno == errno.ENOSPC


Spoil = Callable[[Path], None]
READ_ONLY = "Read-only file system", "mount it writable on every machine"
FULL = "No space left on device", "free space there"
WORDS: dict[Spoil, tuple[str, str]] = {make_read_only: READ_ONLY, make_full: FULL, make_full_of_files: FULL}
"""What is observed of each, and the fix."""
NAMES = {make_read_only: "read-only", make_full: "full", make_full_of_files: "full of files"}
UNUSABLE = pytest.mark.parametrize("spoil", WORDS, ids=NAMES.get)
ONE_OF_THEM = pytest.mark.parametrize(
    "spoil", chosen([make_full], soak=[make_read_only, make_full_of_files]), ids=NAMES.get
)


def spoil_for(hosts: list[Host], spoil: Spoil, place: Path) -> None:
    for host in hosts:
        host.start(spoil, place).result()


@UNUSABLE
@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_it_is_named_with_what_to_do(lab: Lab, tmp_path: Path, spoil: Spoil, seed: int) -> None:
    (host,) = without_udp(lab, 1)
    spoil_for([host], spoil, tmp_path)
    started = time.monotonic()
    rank = host.start(assigned, f"unusable {seed}", 2, env=peers(tmp_path), discovery_timeout=25)
    wait_for_log(rank, f"likely cause: dir:{tmp_path} in MINGLE_PEERS ")
    took = time.monotonic() - started
    print(f"named after {took:.1f} s")
    assert took < NAMED_SECONDS
    progress = [text for event in rank.events if event.name == "log" and "likely cause" in (text := event.data["text"])]
    for text in (progress[0], rank.error().message):
        for words in WORDS[spoil]:
            assert words in text


@ONE_OF_THEM
@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_multicast_works_beside_it(lab: Lab, tmp_path: Path, spoil: Spoil, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    spoil_for(hosts, spoil, tmp_path)

    def form() -> float:
        ranks = [host.start(train, f"beside {seed}", rank, 3, env=peers(tmp_path)) for rank, host in enumerate(hosts)]
        found = results(ranks)
        check(found, hosts, hosts[0])
        print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}")
        return float(max(result["elapsed"] for result in found))

    assert least(form, 4) < 4


@ONE_OF_THEM
@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_ctrl_c_ends_the_wait_at_once(lab: Lab, tmp_path: Path, spoil: Spoil, seed: int) -> None:
    (host,) = without_udp(lab, 1)
    spoil_for([host], spoil, tmp_path)

    def end() -> float:
        rank = host.start(assigned, f"interrupted {seed}", 2, env=peers(tmp_path))
        wait_for_log(rank, "likely cause: dir:")
        return interrupt(rank)

    assert least(end, END_SECONDS) < END_SECONDS


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_process_that_can_only_read_finds_the_host(lab: Lab, tmp_path: Path, seed: int) -> None:
    hosts = without_udp(lab, 3)
    spoil_for(hosts[1:], make_read_only, tmp_path)
    name = f"reader {seed}"
    ranks = [host.start(train, name, rank, 3, env=peers(tmp_path)) for rank, host in enumerate(hosts)]
    found = results(ranks)
    check(found, hosts, hosts[0])
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}")
    until(lambda: not list(tmp_path.iterdir()))
