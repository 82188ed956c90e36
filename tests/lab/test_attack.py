"""Somebody on the network sends whatever harms most, as fast as one core can: the job forms, with the right host."""

from __future__ import annotations

import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from mingle.protocol.links.claims import SENDER_DIALS_AT_ONCE, SENDER_DIALS_PER_SECOND
from mingle.protocol.sightings import SILENT_SECONDS
from mingle.wire import datagrams
from tests.support.levels import chosen, repeated, soaking

from . import Host, Lab, Rank
from .attacker import (
    aim,
    attack,
    bait,
    contradict,
    impersonate,
    overhear,
    record,
    record_offers,
    replay,
    shout,
    whisper,
)
from .scenarios import check, discover_only, hold, hold_back, least, results, train, wait_for_log
from .test_agents import Agents
from .test_election import assigned
from .test_election import check as check_election
from .test_run import SECONDS, start
from .test_timeouts import failure, timed

SECRET = "correct horse battery staple"
AIMED_SECONDS = 3.0
SLOWER = 3.0
"""How many times the undisturbed time a job may take to form …"""
SCHEDULING_SECONDS = 1.5
"""… and what a machine on which the attacker takes a core from the ranks may add to that."""

HELD_UP_SECONDS = SILENT_SECONDS + (SLOWER if soaking() else 15.0)
"""How long false sessions may hold a job up."""
BROADCAST_CPU_SECONDS = 2.5
"""The CPU time that 600 broadcasts can cost 15 ranks of one machine: a read each, and what waiting costs anyway."""


def form(hosts: list[Host], job_id: str, **arguments: Any) -> tuple[list[dict[str, Any]], float]:
    """Start the ranks, rank 0 last; return their results and the longest time that one took."""
    ranks: list[Rank[dict[str, Any]]] = [
        hosts[rank].start(train, job_id, rank, len(hosts), **arguments) for rank in reversed(range(len(hosts)))
    ]
    found = results(list(reversed(ranks)))
    return found, max(result["elapsed"] for result in found)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_an_attacker_without_the_secret(lab: Lab, seed: int) -> None:
    """Forged OFFERs, replays of an earlier run with this id and secret, unsigned copies, truncations, garbage."""
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    recorder = enemy.start(record, "attacked", enemy.address())
    recorder.wait_for("listening")
    found, undisturbed = form(hosts, "attacked", secret=SECRET)
    check(found, hosts, hosts[0])
    recorded = recorder.result()
    trap = enemy.start(bait, enemy.address())
    trap.wait_for("listening")
    storm = enemy.start(attack, "attacked", enemy.address(), recorded, seed=seed)
    storm.wait_for("sent")

    def attacked() -> float:
        found, elapsed = form(hosts, "attacked", secret=SECRET)
        check(found, hosts, hosts[0])
        return elapsed

    limit = SLOWER * undisturbed + SCHEDULING_SECONDS
    disturbed = least(attacked, limit)
    counts = [event["count"] for event in storm.events if event.name == "sent"]
    print(f"undisturbed {undisturbed:.3f} s, disturbed {disturbed:.3f} s, at {max(counts)} datagrams per second")
    assert disturbed < limit
    assert [event for event in trap.events if event.name == "bitten"] == []


@pytest.mark.soak
def test_an_attacker_costs_at_most_three_times_the_undisturbed(lab: Lab) -> None:
    """By the medians of jobs that form in turns with the attacker stopped and not."""
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    storm = enemy.start(attack, "weighed", enemy.address(), [])
    storm.wait_for("sent")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(25 if soaking() else 3):
        for attacked, taken in seconds.items():
            storm.resume() if attacked else storm.stop()
            found, slowest = form(hosts, "weighed", secret=SECRET)
            check(found, hosts, hosts[0])
            taken.append(slowest)
    undisturbed, disturbed = (statistics.median(taken) for taken in seconds.values())
    ratio = disturbed / undisturbed
    print(f"medians of {len(seconds[True])}: {undisturbed:.3f} s, attacked {disturbed:.3f} s: {ratio:.2f} times")
    if soaking():  # a few jobs say nothing of a median, nor do tests that run beside this one
        assert ratio <= SLOWER


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_an_attacker_on_an_election(lab: Lab, seed: int) -> None:
    """Its OFFERs name the lowest member id there is: unsigned, it wins nothing."""
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    trap = enemy.start(bait, enemy.address())
    trap.wait_for("listening")
    enemy.start(attack, "elected", enemy.address(), [], seed=seed).wait_for("sent")
    ranks = [host.start(assigned, "elected", len(hosts), secret=SECRET) for host in hosts]
    check_election(results(ranks), hosts)
    assert [event for event in trap.events if event.name == "bitten"] == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_garbage_harms_nothing_without_a_secret_either(lab: Lab, seed: int) -> None:
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(3)]
    enemy.start(attack, "garbage", enemy.address(), [], offers=False, seed=seed).wait_for("sent")
    found, _ = form(hosts, "garbage")
    check(found, hosts, hosts[0])


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_invented_sessions_hold_nobody_up_for_long_without_a_secret_either(lab: Lab, seed: int) -> None:
    """Well-formed OFFERs of open and of running sessions, a new one each time, that lead nowhere."""
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(3)]
    enemy.start(attack, "invented", enemy.address(), [], seed=seed).wait_for("sent")
    found, disturbed = form(hosts, "invented")
    check(found, hosts, hosts[0])
    print(f"GO after {disturbed:.3f} s")
    assert disturbed < HELD_UP_SECONDS


APART_SECONDS = 2.5
"""How long the same is claimed before the contrary: longer than a race for a session that does not answer."""


def ranks_are(given: bool) -> str:
    return "given" if given else "assigned"


def form_under_claims(hosts: list[Host], job_id: str, *, given: bool, **arguments: Any) -> float:
    """Return how long the slowest rank took."""
    if given:
        found, elapsed = form(hosts, job_id, **arguments)
        check(found, hosts, hosts[0])
    else:
        found = results([host.start(assigned, job_id, len(hosts), **arguments) for host in hosts])
        check_election(found, hosts)
        elapsed = max(result["elapsed"] for result in found)
    print(f"GO after {elapsed:.3f} s")
    return elapsed


@pytest.mark.soak
@pytest.mark.parametrize("given", chosen([True], soak=[False]), ids=ranks_are)
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_run_that_is_played_again_holds_nobody_up_for_long(lab: Lab, given: bool, seed: int) -> None:
    """What was signed with the job's secret, while the port of the earlier host drops what comes."""
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    spy = enemy.start(record_offers, "again", enemy.address())
    spy.wait_for("listening")
    earlier = [host.start(hold, "again", rank if given else None, 3, secret=SECRET) for rank, host in enumerate(hosts)]
    recorded = spy.result()
    for rank in earlier:
        rank.kill()
    offer = datagrams.decode(recorded[0])
    assert isinstance(offer, datagrams.Offer)
    (gone,) = (host for host in hosts if host.address() in offer.addresses)
    gone.drop(f"tcp dport {offer.port}")
    enemy.start(replay, "again", enemy.address(), recorded, APART_SECONDS).wait_for("replaying")
    assert form_under_claims(hosts, "again", given=given, secret=SECRET) < HELD_UP_SECONDS


@pytest.mark.soak
@pytest.mark.parametrize("given", chosen([False], soak=[True]), ids=ranks_are)
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_session_that_is_now_open_and_now_sealed_holds_nobody_up_for_long(lab: Lab, given: bool, seed: int) -> None:
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    enemy.drop("tcp dport != 0")
    forged = contradict("both", enemy.address(), assigned=not given)
    enemy.start(replay, "both", enemy.address(), forged, APART_SECONDS).wait_for("replaying")
    assert form_under_claims(hosts, "both", given=given) < HELD_UP_SECONDS


@pytest.mark.soak
@pytest.mark.parametrize("uid", chosen([65534], soak=[None]))
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_local_message_with_an_invalid_destination_harms_nothing(lab: Lab, seed: int, uid: int | None) -> None:
    """Sent by a process of the same user or of another one, on two hosts, while the ranks form."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    for host in hosts[:2]:
        host.start(whisper, "whispered", len(hosts), uid).wait_for("whispering")
    found, _ = form(hosts, "whispered")
    check(found, hosts, hosts[0])


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_forged_offers_aim_at_nobody_for_long(lab: Lab, seed: int) -> None:
    """Fifty a second, by multicast and by unicast: at services on the ranks' own loopback, and at another machine."""
    network = lab.network()
    enemy, target, *hosts = [lab.host(network) for _ in range(4)]
    job_id = f"aimed {seed}"
    trap = target.start(bait, target.address())
    own = [host.start(bait, address) for host in hosts for address in ("127.0.0.1", "::1")]
    for each in (trap, *own):
        each.wait_for("listening")
    member = hosts[1].start(train, job_id, 1, 2)
    wait_for_log(member, "seeking")
    started = time.monotonic()
    storm = enemy.start(
        aim, job_id, enemy.address(), target.address(), [host.address() for host in hosts], 50, AIMED_SECONDS
    )
    sessions = storm.result()
    host = hosts[0].start(train, job_id, 0, 2)
    check(results([host, member]), hosts, hosts[0])
    seconds = time.monotonic() - started
    bites = [event for event in trap.events if event.name == "bitten"]
    print(f"{len(bites)} connections in {seconds:.1f} s")
    assert 0 < len(bites) <= SENDER_DIALS_AT_ONCE + seconds * SENDER_DIALS_PER_SECOND + 1
    assert [event["said"] for event in bites if any(session in event["said"] for session in sessions)] == []
    assert [event for each in own for event in each.events if event.name == "bitten"] == []


def processor_seconds(ranks: list[Rank[Any]]) -> float:
    """The CPU time of these processes so far."""
    stats = [Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split() for rank in ranks]
    return sum(int(each[11]) + int(each[12]) for each in stats) / os.sysconf("SC_CLK_TCK")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_broadcast_is_neither_answered_nor_relayed(lab: Lab, seed: int) -> None:
    """Every process that shares the port gets its own copy, and each would hand it to all others."""
    network = lab.network()
    enemy, host = [lab.host(network) for _ in range(2)]
    assert network.ipv4 is not None
    everybody = [str(network.ipv4.broadcast_address), "255.255.255.255"]
    waiting = [host.start(discover_only, f"broadcast {seed}", rank, 17) for rank in range(1, 16)]
    for rank in waiting:
        wait_for_log(rank, "seeking")
    ask = datagrams.padded(datagrams.List(member=bytes(16)), datagrams.MAX_BYTES)
    answers = enemy.start(shout, enemy.address(), everybody, ask, 2, 1.0).result()
    print(f"{answers} answers")
    garbage = datagrams.MAGIC + bytes((datagrams.MAJOR_VERSION, 0, 0, 0)) + bytes(92)
    before = processor_seconds(waiting)
    enemy.start(shout, enemy.address(), everybody, garbage, 200, 3.0).result()
    spent = processor_seconds(waiting) - before
    print(f"{spent:.2f} s of CPU for 600 broadcasts to 15 ranks")
    assert answers == 0
    assert spent < BROADCAST_CPU_SECONDS


def test_rejected_datagrams_are_counted_by_reason(lab: Lab) -> None:
    """A rank whose host never comes says at its deadline what it heard instead, and never hangs past it."""
    network = lab.network()
    enemy, host = [lab.host(network) for _ in range(2)]
    enemy.start(attack, "lonely", enemy.address(), []).wait_for("sent")
    error = failure(host.start(timed, "lonely", 1, 2, discovery_timeout=3, secret=SECRET), 3)
    for reason in ("magic", "signature", "size", "unsigned"):
        assert re.search(rf"\d+ {reason}|{reason}[:\s]+\d+", error.message), error.message
    assert SECRET not in error.message


IMPERSONATED_SECONDS = 15.0
"""For which a job stands while somebody impersonates its members: longer than a lost member can take to come back."""


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_an_overheard_member_id_does_not_end_a_command(lab: Lab, seed: int) -> None:
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    spy = enemy.start(overhear, "lab", enemy.address(), 1)
    spy.wait_for("listening")
    command = ("sh", "-c", f"echo started; exec sleep {IMPERSONATED_SECONDS:g}")
    nodes = [start(hosts[node], "--node-rank", str(node), "--", *command) for node in (2, 1)]
    members = spy.result()
    nodes.append(start(hosts[0], "--node-rank", "0", "--", *command))
    for node in nodes:
        node.wait_for_output("started", SECONDS)
    assert enemy.start(impersonate, "lab", enemy.address(), members, 3).result() == 3
    assert [node.wait(SECONDS) for node in nodes] == [0, 0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_an_overheard_member_id_does_not_cut_the_store_of_a_discovery(lab: Lab, seed: int) -> None:
    """Between GO and the process group, when the loss of any rank is the loss of the job."""
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    spy = enemy.start(overhear, "overheard", enemy.address(), 1)
    spy.wait_for("listening")
    ranks = [hosts[rank].start(hold_back, "overheard", rank, 3, IMPERSONATED_SECONDS) for rank in (2, 1)]
    members = spy.result()
    ranks.append(hosts[0].start(hold_back, "overheard", 0, 3, IMPERSONATED_SECONDS))
    for rank in ranks:
        rank.wait_for("formed")
    assert enemy.start(impersonate, "overheard", enemy.address(), members, 3).result() == 3
    check(list(reversed(results(ranks))), hosts, hosts[0])
    # A store that is cut is seen by those that use it already; `env://` opens another one.
    said = [event["text"] for rank in ranks for event in rank.events if event.name == "log"]
    assert [text for text in said if "its store is closed" in text] == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_an_overheard_member_id_ends_no_elastic_session(lab: Lab, seed: int) -> None:
    agents = Agents(lab, f"overheard {seed}", 2, 3)
    enemy = lab.host(agents.network)
    spy = enemy.start(overhear, f"overheard {seed}", enemy.address(), 2)
    spy.wait_for("listening")
    agents.start(*agents.hosts)
    agents.gather(agents.hosts, within=60.0)
    assert enemy.start(impersonate, f"overheard {seed}", enemy.address(), spy.result(), 6).result() >= 6
    time.sleep(IMPERSONATED_SECONDS)
    assert [event for rank in agents.ranks.values() for event in rank.events if event.name == "session_lost"] == []
