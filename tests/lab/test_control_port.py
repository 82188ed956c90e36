"""Strangers at the control port: they are refused and named, and nobody waits for them."""

from __future__ import annotations

import os
import resource
import threading

import pytest

import mingle
from tests.support.levels import soaking

from . import UDP, Lab, Rank, report
from .attacker import besiege, flood_port, locate, relay, stay_silent
from .scenarios import TIMEOUT, check, formed, report_log, results, sum_of_ranks, train, wait_for_log

DELAY_SECONDS = 28.0
"""Half a second on a quiet machine; eleven were seen on one that ran other tests."""
SILENT_CONNECTIONS = 1_000
BOGUS_CONNECTIONS = 10_000
OPEN_FILES = 1_024
SIEGE_CONNECTIONS = 7_000
SIEGE_PER_SECOND = 875


@pytest.mark.soak(5)
def test_a_flood_of_connections_does_not_delay_go(lab: Lab) -> None:
    """A thousand that connect and stay silent, ten thousand that come and go, and then the last real rank."""
    enemy, *hosts = lab.lan(4)
    job_id = "flooded"
    locating = enemy.start(locate, job_id, enemy.address())
    locating.wait_for("listening")
    ranks = [hosts[rank].start(train, job_id, rank, 3, secret="s3cret") for rank in (0, 1)]
    wait_for_log(ranks[1], "seated")
    address, port = locating.result()
    enemy.start(stay_silent, address, port, SILENT_CONNECTIONS).wait_for("silent")
    flood = enemy.start(flood_port, address, port, BOGUS_CONNECTIONS)
    flood.wait_for("flooding")
    ranks.append(hosts[2].start(train, job_id, 2, 3, secret="s3cret"))
    found = results(ranks)
    check(found, hosts)
    print(f"the last rank waited {found[2]['elapsed']:.3f} s")
    assert found[2]["elapsed"] < DELAY_SECONDS


def hold_and_open(job_id: str, rank: int, world_size: int, limit: int) -> dict[str, int]:
    """Rank 0 of a job under a limit of open files, beside a thread that opens a file every two milliseconds.

    Reports ``running`` after GO and ends when the other rank has; returns how often the file was opened and was not.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    report_log()
    counts = {"opened": 0, "failed": 0}
    over = threading.Event()

    def open_and_close() -> None:
        while not over.wait(0.002):
            try:
                os.close(os.open(os.devnull, os.O_RDONLY))
                counts["opened"] += 1
            except OSError:
                counts["failed"] += 1

    opening = threading.Thread(target=open_and_close)
    opening.start()
    try:
        with mingle.init(job_id, rank=rank, world_size=world_size, backend="gloo", discovery_timeout=2 * TIMEOUT):
            report("running", **counts)
            sum_of_ranks()
            sum_of_ranks()
    finally:
        over.set()
        opening.join()
    return counts


def hold_until_told(job_id: str, rank: int, world_size: int) -> None:
    """Another rank of that job, which ends when it gets SIGINT."""
    with mingle.init(job_id, rank=rank, world_size=world_size, backend="gloo", discovery_timeout=TIMEOUT) as job:
        sum_of_ranks()
        report("running", elapsed=job.elapsed)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            sum_of_ranks()


@pytest.mark.soak(5)
def test_silent_connections_take_no_descriptor_from_rank_0(lab: Lab) -> None:
    """Seven thousand within eight seconds, of which 1 024 would be too many, before GO and after it."""
    enemy, *hosts = lab.lan(3)
    job_id = "besieged"
    locating = enemy.start(locate, job_id, enemy.address())
    locating.wait_for("listening")
    first: Rank[dict[str, int]] = hosts[0].start(hold_and_open, job_id, 0, 2, OPEN_FILES)
    address, port = locating.result()
    count = SIEGE_CONNECTIONS if soaking() else SIEGE_CONNECTIONS * 2 // 5
    siege = enemy.start(besiege, address, port, count, SIEGE_PER_SECOND)
    assert siege.result() > 0
    siege = enemy.start(besiege, address, port, count, SIEGE_PER_SECOND)
    siege.wait_for("besieging")
    second = hosts[1].start(hold_until_told, job_id, 1, 2)
    waited = second.wait_for("running")["elapsed"]
    first.wait_for("running")
    siege.result()
    siege = enemy.start(besiege, address, port, count, SIEGE_PER_SECOND)
    siege.result()
    second.interrupt()
    counts = first.result()
    print(f"the second rank waited {waited:.3f} s; {counts}")
    assert counts["failed"] == 0
    assert counts["opened"] > 0


@pytest.mark.soak(5)
def test_a_relay_is_refused(lab: Lab) -> None:
    """Even without a secret: who is called at an address that is none of the host's gets no further than HELLO."""
    enemy, *hosts = lab.lan(3, link_local=False)
    job_id = "relayed"
    relaying = enemy.start(relay, job_id, enemy.address())
    relaying.wait_for("listening")
    hosts[1].drop(f"ip saddr {hosts[0].address()} {UDP}")  # it hears of the host by the relay alone
    host = hosts[0].start(train, job_id, 0, 2)
    relaying.wait_for("relaying")
    member = hosts[1].start(train, job_id, 1, 2)
    said = [relaying.wait_for("relayed")["said"] for _ in range(3)]
    hosts[1].clear_rules()
    formed([host, member], hosts)
    assert {b"hello" in each for each in said} == {True}
    said += [event["said"] for event in relaying.events if event.name == "relayed"]
    assert [each for each in said if b"prove" in each] == []
