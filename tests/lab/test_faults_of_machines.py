"""What else goes wrong on machines: limits, ports, clocks, people. Never a hang, never a wrong success, nothing left.

Kills, pauses and cut links at each phase are in `test_faults`.
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

import mingle
from mingle.engine import store
from tests.support.levels import chosen, repeated

from . import Host, Lab, Rank, report
from .attacker import PORT
from .mixer import mix
from .scenarios import TIMEOUT, check, results, train, wait_for_log
from .test_timeouts import timed

REPEATS = repeated(1, soak=5)
pytestmark = pytest.mark.soak


def trio(lab: Lab) -> list[Host]:
    """Three hosts on a network."""
    network = lab.network()
    return [lab.host(network) for _ in range(3)]


def in_trouble(trouble: Callable[[], None], job_id: str, rank: int, **arguments: Any) -> dict[str, Any]:
    """Train with something wrong in this process."""
    trouble()
    return train(job_id, rank, 3, **arguments)


def check_trouble(hosts: list[Host], trouble: Callable[[], None], job_id: str, **arguments: Any) -> None:
    """Every rank has the trouble, and the job forms."""
    ranks = [host.start(in_trouble, trouble, job_id, rank, **arguments) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, hosts[0])


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", REPEATS)
def test_seven_of_ten_datagrams_are_lost(lab: Lab, seed: int) -> None:
    hosts = trio(lab)
    for host in hosts:
        host.drop_udp(70)
    ranks = [host.start(train, f"lossy {seed}", rank, 3) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, hosts[0])


@pytest.mark.parametrize("seed", REPEATS)
def test_datagrams_are_doubled_and_overtake_each_other(lab: Lab, seed: int) -> None:
    """Between rank 0 and the others is a cable that does so, and passes the rest on as it is."""
    near, far = (lab.network("10.77.0.0/24") for _ in range(2))
    cable = lab.host(near, far)
    hosts = [lab.host(near)]
    far.next_port()  # whose address is rank 0's
    hosts += [lab.host(far) for _ in range(2)]
    mixing = cable.start(mix, (cable.interface(near), cable.interface(far)), seed)
    mixing.wait_for("mixing")
    ranks = [hosts[rank].start(train, f"mixed {seed}", rank, 3) for rank in (2, 1, 0)]
    check(results(ranks[::-1]), hosts, hosts[0])
    assert {event["what"] for event in mixing.events if event.name == "mixed"} == {"doubled", "overtaken"}


@pytest.mark.parametrize("seed", REPEATS)
@pytest.mark.parametrize(("victim", "direction"), chosen([(0, "in"), (1, "out")], soak=[(0, "out"), (1, "in")]))
def test_a_host_hears_and_is_not_heard_for_a_while(lab: Lab, victim: int, direction: Any, seed: int) -> None:
    """Or the reverse. Nothing passes that way, TCP included, while the last rank comes."""
    hosts = trio(lab)
    ranks = [hosts[rank].start(train, f"one way {seed}", rank, 3) for rank in (0, 1)]
    wait_for_log(ranks[1], "seated")
    hosts[victim].isolate_one_way(direction)
    ranks.append(hosts[2].start(train, f"one way {seed}", 2, 3))
    threading.Event().wait(2)
    assert not any(event.name == "reduced" for rank in ranks for event in rank.events)
    hosts[victim].heal()
    check(results(ranks), hosts, hosts[0])


@pytest.mark.parametrize("seed", REPEATS)
@pytest.mark.parametrize("ranks_from", chosen(["assigned"], soak=["given"]))
def test_name_servers_that_do_not_answer(lab: Lab, ranks_from: str, seed: int) -> None:
    """A name among the peers is never resolved, and torch looks up the name of each host that it connects to."""
    network = lab.network()
    silent, *hosts = [lab.host(network) for _ in range(5)]
    silent.drop("udp dport 53")
    for host in hosts:
        host.resolver_file.write_text(f"nameserver {silent.address()}\n")  # torch alone waits 10 s
    given = ranks_from == "given"
    ranks = [
        host.start(train, f"dns {seed}", rank if given else None, 4, peers=["nobody.invalid"])
        for rank, host in enumerate(hosts)
    ]
    found = results(ranks)
    check(found, hosts, hosts[0])
    assert max(result["elapsed"] for result in found) < 9


def look_up_for_long(job_id: str, rank: int) -> dict[str, Any]:
    """Train where torch is told to wait longer for a name server than a host once waited for an ACK."""
    store.LOOK_UP_SECONDS = 13
    return train(job_id, rank, 2, discovery_timeout=60.0)


@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_look_up_that_takes_longer_than_an_ack_is_named_and_voids_nothing(lab: Lab, seed: int) -> None:
    network = lab.network()
    silent, *hosts = [lab.host(network) for _ in range(3)]
    silent.drop("udp dport 53")
    for host in hosts:
        host.resolver_file.write_text(f"nameserver {silent.address()}\n")
    ranks = [host.start(look_up_for_long, f"slow {seed}", rank) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, hosts[0])
    said = "\n".join(event["text"] for rank in ranks for event in rank.events if event.name == "log")
    assert "starts again" not in said
    assert f"{silent.address()} does not answer name queries: torch waits 10 s for each connection" in said


# --- the machine ------------------------------------------------------------------------------------------------------


def step_the_clock() -> None:
    """The wall clock goes an hour forth, and back, all the time."""
    real, hours = time.time, iter(range(10**9))
    time.time = lambda: real() + 3600 * (next(hours) % 3 - 1)


@pytest.mark.parametrize("seed", REPEATS)
def test_the_wall_clock_is_stepped(lab: Lab, seed: int) -> None:
    check_trouble(trio(lab), step_the_clock, f"clock {seed}")


def fill_the_disk() -> None:
    """No file can be written any more, the one that takes stderr included."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("seed", REPEATS)
def test_the_disk_is_full(lab: Lab, seed: int) -> None:
    check_trouble(trio(lab), fill_the_disk, f"disk {seed}")


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


@pytest.mark.parametrize("seed", REPEATS)
def test_rank_zero_is_out_of_descriptors_for_a_while(lab: Lab, seed: int) -> None:
    hosts = trio(lab)
    zero = hosts[0].start(in_trouble, exhaust_descriptors, f"files {seed}", 0)
    zero.wait_for("exhausted")
    others = [hosts[rank].start(train, f"files {seed}", rank, 3) for rank in (1, 2)]
    check(results([zero, *others]), hosts, hosts[0])


def bind_the_port(reuse: bool) -> None:
    """Hold the discovery's UDP port, willing to share it or not, and never read."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        if reuse:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", PORT))
        report("bound")
        threading.Event().wait()


@pytest.mark.parametrize("seed", REPEATS)
def test_a_second_binder_of_the_port_appears(lab: Lab, seed: int) -> None:
    """Multicast reaches both; what comes by unicast reaches the stranger alone, and is lost."""
    hosts = trio(lab)
    zero = hosts[0].start(train, f"binder {seed}", 0, 3)
    wait_for_log(zero, "open")
    hosts[0].start(bind_the_port, True).wait_for("bound")
    others = [hosts[rank].start(train, f"binder {seed}", rank, 3) for rank in (1, 2)]
    check(results([zero, *others]), hosts, hosts[0])


def test_a_port_that_is_not_shared_is_named_at_once(lab: Lab) -> None:
    network = lab.network(link_local=False)
    host = lab.host(network)
    host.start(bind_the_port, False).wait_for("bound")
    error = host.start(timed, "taken", 1, 2, discovery_timeout=TIMEOUT).error()
    assert error.name == "InterfaceError"
    assert "EADDRINUSE" in error.message
    assert f"UDP port {PORT} is held by another program" in error.message


# --- people -----------------------------------------------------------------------------------------------------------


def run_for_ever(job_id: str, rank: int) -> None:
    """Form, and run until killed."""
    with mingle.discover(job_id, rank=rank, world_size=3, discovery_timeout=TIMEOUT):
        report("formed")
        threading.Event().wait()


@pytest.mark.parametrize("seed", REPEATS)
def test_all_ranks_are_restarted_while_the_old_ones_still_die(lab: Lab, seed: int) -> None:
    hosts = trio(lab)
    old = [host.start(run_for_ever, f"again {seed}", rank) for rank, host in enumerate(hosts)]
    for each in old:
        each.wait_for("formed")
    new: list[Rank[dict[str, Any]]] = []
    for rank, host in enumerate(hosts):
        old[rank].send_signal(signal.SIGKILL)  # and nobody waits for its end
        new.append(host.start(train, f"again {seed}", rank, 3))
    check(results(new), hosts, hosts[0])


def run_or_say_why(job_id: str, rank: int) -> None:
    """The same, but say it when it has become clear that this one may not."""
    try:
        with mingle.discover(job_id, rank=rank, world_size=3, discovery_timeout=15):
            report("decided", formed=True)
            threading.Event().wait()
    except mingle.MingleError:
        report("decided", formed=False)
        raise


@pytest.mark.parametrize("seed", REPEATS)
def test_the_same_job_is_started_twice_by_mistake(lab: Lab, seed: int) -> None:
    """At most one of them forms, of whichever processes; everybody else is told who is in the way."""
    hosts = trio(lab)
    ranks = [host.start(run_or_say_why, f"twice {seed}", rank) for _ in range(2) for rank, host in enumerate(hosts)]
    losers = [rank for rank in ranks if not rank.wait_for("decided")["formed"]]
    assert len(losers) in {3, 6}
    assert {rank.error().name for rank in losers} == {"ConflictError"}
