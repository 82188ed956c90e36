"""What goes wrong on machines while a job forms: never a hang, never a wrong success, nothing left.

Processes are killed or paused, links are cut, and limits, ports, clocks, disks and name servers are at fault. When, and
what follows, is the simulator's; here is what kernels make of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import mingle
from mingle.config.settings import Settings
from mingle.distributed import rendezvous
from mingle.distributed.session import Session
from mingle.engine import store
from mingle.protocol.membership import RETURN_SECONDS
from tests.support.levels import chosen, soaking

from . import Lab, report
from .attacker import PORT
from .scenarios import (
    TIMEOUT,
    check,
    discover_only,
    formed,
    ranks_are,
    report_log,
    results,
    start_ranks,
    train,
    wait_for_log,
    with_a_silent_name_server,
)

BUSY_SECONDS = 10.0
"""What a busy machine may add to an end that torch alone would bring about after minutes."""
AWAY_SECONDS = {"cut": 5.0, "stop": 10.0} if soaking() else {"cut": 2.0, "stop": 2.0}

# --- while it forms ---------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.soak(5)
def test_rank_zero_is_killed_while_others_wait(lab: Lab) -> None:
    hosts = lab.lan(3)
    waiting = hosts[1].start(train, "killed", 1, 3)
    first = hosts[0].start(train, "killed", 0, 3)
    wait_for_log(waiting, "seated")
    first.kill()
    wait_for_log(waiting, "seeking")
    again, last = (hosts[rank].start(train, "killed", rank, 3) for rank in (0, 2))
    formed([again, waiting, last], hosts)


def fork_and_wait(job_id: str) -> None:
    """Be a rank 0 that has a DataLoader worker: a forked child that outlives it."""
    report_log()
    read, write = os.pipe()
    threading.Timer(0.5, fork_child, (read, write)).start()
    discover_only(job_id, 0, 3)


def fork_child(read: int, write: int) -> None:
    """Fork; the child holds on until its host goes."""
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)
        while True:
            threading.Event().wait()
    report("forked")


def test_a_forked_child_of_a_killed_rank_zero(lab: Lab) -> None:
    hosts = lab.lan(3)
    old = hosts[0].start(fork_and_wait, "forked")
    worker = hosts[1].start(train, "forked", 1, 3)
    wait_for_log(worker, "seated")
    old.wait_for("forked")
    old.kill()
    # The child would have kept the connection, and the worker in its seat, for ever.
    wait_for_log(worker, "seeking")
    ranks = [hosts[0].start(train, "forked", 0, 3), worker, hosts[2].start(train, "forked", 2, 3)]
    found = results(ranks)
    check(found, hosts)
    assert found[0]["elapsed"] < 25


@pytest.mark.soak(3)
@pytest.mark.parametrize("fault", ["cut", "stop"])
def test_rank_zero_is_away_for_a_while(lab: Lab, fault: str) -> None:
    hosts = lab.lan(3)
    worker = hosts[1].start(train, "away", 1, 3)
    host_zero = hosts[0].start(train, "away", 0, 3)
    wait_for_log(worker, "seated")
    hosts[0].cut() if fault == "cut" else host_zero.stop()
    last = hosts[2].start(train, "away", 2, 3)
    wait_for_log(last, "seeking")
    threading.Event().wait(AWAY_SECONDS[fault])
    hosts[0].heal() if fault == "cut" else host_zero.resume()
    formed([host_zero, worker, last], hosts)


def run_for_ever(job_id: str, rank: int) -> None:
    """Form, and run until killed."""
    with mingle.discover(job_id, rank=rank, world_size=3, discovery_timeout=TIMEOUT):
        report("formed")
        threading.Event().wait()


@pytest.mark.soak(5)
def test_all_ranks_are_restarted_while_the_old_ones_still_die(lab: Lab) -> None:
    hosts = lab.lan(3)
    old = [host.start(run_for_ever, "again", rank) for rank, host in enumerate(hosts)]
    for each in old:
        each.wait_for("formed")
    new = []
    for rank, host in enumerate(hosts):
        old[rank].send_signal(signal.SIGKILL)  # and nobody waits for its end
        new.append(host.start(train, "again", rank, 3))
    formed(new, hosts)


# --- after GO ---------------------------------------------------------------------------------------------------------


def initialize_late(job_id: str, rank: int, world_size: int, victim: int) -> None:
    """Pass GO; then one rank never makes its process group, and the others wait for it there."""
    report_log()
    with mingle.discover(job_id, rank=rank, world_size=world_size, discovery_timeout=TIMEOUT):
        report("formed")
        if rank == victim:
            threading.Event().wait()
        started = time.monotonic()
        try:
            dist.init_process_group("gloo")
        finally:
            report("ended", seconds=time.monotonic() - started)


@pytest.mark.soak(5)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_lost_between_go_and_its_process_group_fails_the_others_soon(lab: Lab, victim: int) -> None:
    """Torch alone would let them wait for half an hour."""
    ranks = [host.start(initialize_late, "lost", rank, 3, victim) for rank, host in enumerate(lab.lan(3))]
    for rank in ranks:
        rank.wait_for("formed")
    # By then they have connected to the store; torch would go on for minutes trying to reach one that is gone.
    threading.Event().wait(1)
    ranks.pop(victim).kill()
    for rank in ranks:
        assert rank.error().name == "DistNetworkError"
        assert rank.wait_for("ended")["seconds"] < RETURN_SECONDS + BUSY_SECONDS


def initialize_without_rank_zero(job_id: str, rank: int, door: str) -> None:
    """Pass GO; rank 0 goes no further, and the others go on when its store is out of reach."""
    form = rendezvous.form

    def held(wanted: Settings, **more: Any) -> tuple[mingle.Job, Session]:
        job, session = form(wanted, **more)
        report("formed")
        if rank == 0:
            threading.Event().wait()
        while reaches(job.master_addr, job.master_port):
            threading.Event().wait(0.01)
        report("gone")
        return job, session

    rendezvous.form = held
    try:
        train(job_id, rank, 3, door)
    finally:
        report("ended")


def reaches(address: str, port: int) -> bool:
    """Whether anybody answers there."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.soak(5)
@pytest.mark.parametrize("door", chosen(["init"], soak=["url"]))
@pytest.mark.parametrize("fault", chosen(["kill"], soak=["cut"]))
def test_rank_zero_is_lost_before_the_others_enter_its_store(lab: Lab, fault: str, door: str) -> None:
    """Torch's calls could not be stopped there."""
    hosts = lab.lan(3)
    ranks = [host.start(initialize_without_rank_zero, "early", rank, door) for rank, host in enumerate(hosts)]
    for rank in ranks:
        rank.wait_for("formed")
    ranks[0].kill() if fault == "kill" else hosts[0].cut()
    for rank in ranks[1:]:
        gone = rank.wait_for("gone").time
        error = rank.error(30)
        assert error.name == "MingleError"
        assert f"{hosts[0].name} ({hosts[0].address()}" in error.message
        assert rank.wait_for("ended").time - gone < (7 if fault == "kill" else 20) + BUSY_SECONDS


# --- name servers -----------------------------------------------------------------------------------------------------


@pytest.mark.soak(5)
@pytest.mark.parametrize("given", chosen([False], soak=[True]), ids=ranks_are)
def test_name_servers_that_do_not_answer(lab: Lab, given: bool) -> None:
    """A name among the peers is never resolved, and torch looks up the name of each host that it connects to."""
    _, hosts = with_a_silent_name_server(lab, 4)
    ranks = start_ranks(hosts, "dns", given=given, peers=["nobody.invalid"])
    assert formed(ranks, hosts, given=given) < 9


def look_up_for_long(job_id: str, rank: int) -> dict[str, Any]:
    """Train where torch is told to wait longer for a name server than a host once waited for an ACK."""
    store.LOOK_UP_SECONDS = 13
    return train(job_id, rank, 2, discovery_timeout=60.0)


@pytest.mark.soak(3)
def test_a_look_up_that_takes_longer_than_an_ack_is_named_and_voids_nothing(lab: Lab) -> None:
    silent, hosts = with_a_silent_name_server(lab, 2)
    ranks = [host.start(look_up_for_long, "slow", rank) for rank, host in enumerate(hosts)]
    formed(ranks, hosts)
    said = "\n".join(event["text"] for rank in ranks for event in rank.events if event.name == "log")
    assert "starts again" not in said
    assert f"{silent.address()} does not answer name queries" in said


# --- the machine ------------------------------------------------------------------------------------------------------


def step_the_clock() -> None:
    """The wall clock goes an hour forth, and back, all the time."""
    real, hours = time.time, iter(range(10**9))
    time.time = lambda: real() + 3600 * (next(hours) % 3 - 1)


def fill_the_disk() -> None:
    """No file can be written any more, the one that takes stderr included."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def exhaust_descriptors() -> None:
    """From the moment at which the session takes members there is no descriptor left; two seconds later there are."""

    def eat() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        eaten = []
        with contextlib.suppress(OSError):  # EMFILE
            while True:
                eaten.append(os.dup(0))
        report("exhausted")
        threading.Event().wait(2)
        for descriptor in eaten:
            os.close(descriptor)

    eater = threading.Thread(target=eat)

    class WhenOpen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if ": open" in record.getMessage() and eater.ident is None:
                eater.start()

    logging.getLogger("mingle").addHandler(WhenOpen())


def in_trouble(trouble: Callable[[], None], job_id: str, rank: int) -> dict[str, Any]:
    """Train with something wrong in this process."""
    trouble()
    return train(job_id, rank, 3)


@pytest.mark.soak(5)
@pytest.mark.parametrize("trouble", [step_the_clock, fill_the_disk])
def test_every_rank_has_a_clock_that_is_stepped_or_a_disk_that_is_full(lab: Lab, trouble: Callable[[], None]) -> None:
    hosts = lab.lan(3)
    formed([host.start(in_trouble, trouble, "trouble", rank) for rank, host in enumerate(hosts)], hosts)


@pytest.mark.soak(5)
def test_rank_zero_is_out_of_descriptors_for_a_while(lab: Lab) -> None:
    hosts = lab.lan(3)
    zero = hosts[0].start(in_trouble, exhaust_descriptors, "files", 0)
    zero.wait_for("exhausted")
    formed([zero, *(hosts[rank].start(train, "files", rank, 3) for rank in (1, 2))], hosts)


def share_the_port() -> None:
    """Hold the discovery's UDP port with others, and never read."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", PORT))
        report("bound")
        threading.Event().wait()


@pytest.mark.soak(5)
def test_a_second_binder_of_the_port_appears(lab: Lab) -> None:
    """Multicast reaches both; what comes by unicast reaches the stranger alone, and is lost."""
    hosts = lab.lan(3)
    zero = hosts[0].start(train, "binder", 0, 3)
    wait_for_log(zero, "open")
    hosts[0].start(share_the_port).wait_for("bound")
    formed([zero, *(hosts[rank].start(train, "binder", rank, 3) for rank in (1, 2))], hosts)
