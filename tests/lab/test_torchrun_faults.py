"""Nodes of a torchrun job that die, are cut off, come back, come late, or end for good while the job trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mingle.elastic.rounds import STOP_SECONDS
from tests.support.levels import chosen, repeated, soaking

from . import Host, Lab
from .torchrun_jobs import SECONDS, Job, jobs

pytestmark = pytest.mark.timeout(600)
MakeJob = Callable[..., Job]

KILLED_SECONDS, CUT_SECONDS = (15.0, 40.0) if soaking() else (40.0, 75.0)
"""How soon the survivors train again after a node was killed, and after its link was cut: 26.7 s were seen at a load of
11. Without a recovery it is never."""
KILL_SECONDS = 30.0
"""After how long torchrun kills a worker that ignores SIGTERM."""
START_SECONDS = 6.0
"""How soon an idle machine with two cores makes its first step. A slower one gets the difference once more."""


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


def three_in_training(lab: Lab, job: MakeJob, name: str, conf: str = "") -> tuple[Job, list[Host]]:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(name, "2:3", restarts=3, conf=conf)
    at = time.monotonic()
    made.start(*hosts)
    made.late_seconds = max(0.0, made.wait_for_group(hosts) - at - START_SECONDS)
    return made, hosts


def survivors(job: Job, hosts: list[Host], *, of_host: bool) -> tuple[Host, list[Host]]:
    """The host to lose (the store's, or another one), and the rest."""
    holder = job.store_host(hosts)
    lost = holder if of_host else next(host for host in hosts if host is not holder)
    return lost, [host for host in hosts if host is not lost]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("victim", chosen(["host"], soak=["other"]))
def test_a_host_dies_and_comes_back(lab: Lab, job: MakeJob, victim: str, seed: int) -> None:
    made, hosts = three_in_training(lab, job, f"dies-{victim}-{seed}")
    lost, rest = survivors(made, hosts, of_host=victim == "host")
    first = generation(made, rest[0])
    lost.kill()
    at = time.monotonic()
    again = made.wait_for_group(rest, since=at)
    told = {generation(made, host) for host in rest}
    assert len(told) == 1
    assert max(told) > first
    assert (session(max(told)) != session(first)) == (victim == "host")
    print(
        f"survivors of the {victim}'s death trained again after {again - at:.1f} s, {made.late_seconds:.1f} s of slack"
    )
    assert again - at < KILLED_SECONDS + made.late_seconds
    made.start(lost)
    back = time.monotonic()
    grown = made.wait_for_group(hosts, since=back)
    print(f"three again {grown - back:.1f} s after its start")
    made.finish(*hosts)


def generation(job: Job, host: Host) -> str:
    """What the workers of this host were told of their session, last."""
    told: str = job.said(host, "started")[-1]["environment"]["MINGLE_GENERATION"]
    return told


def session(told: str) -> str:
    """Return the session that such a value names."""
    return told.rpartition("-")[2]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("nodes", chosen(["1:2"], soak=["2"]))
def test_of_two_nodes_one_waits_for_the_host_to_be_started_again(lab: Lab, job: MakeJob, nodes: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    made = job(f"two-{nodes[0]}-{seed}", nodes, restarts=3)
    made.start(*hosts)
    made.wait_for_group(hosts)
    lost, rest = survivors(made, hosts, of_host=True)
    first = generation(made, rest[0])
    lost.kill()
    made.start(lost)
    back = time.monotonic()
    again = made.wait_for_group(hosts, since=back)
    print(f"two again {again - back:.1f} s after its start")
    assert generation(made, lost) == generation(made, rest[0]) > first
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("allowed", chosen([False], soak=[True]), ids=lambda allowed: f"allow_minority={allowed:d}")
def test_of_two_nodes_one_goes_on_alone_only_where_that_is_allowed(
    lab: Lab, job: MakeJob, allowed: bool, seed: int
) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    conf = f"last_call_timeout=3,allow_minority={allowed:d}" + ("" if allowed else ",discovery_timeout=20")
    made = job(f"alone-{allowed:d}-{seed}", "1:2", restarts=3, conf=conf)
    made.start(*hosts)
    made.wait_for_group(hosts)
    lost, rest = survivors(made, hosts, of_host=True)
    lost.kill()
    at = time.monotonic()
    if allowed:
        print(f"one alone after {made.wait_for_group(rest, since=at) - at:.1f} s")
        made.finish(*rest)
        return
    failure = made.agents[rest[0]].error(SECONDS)
    assert failure.name == "RendezvousTimeoutError"
    assert "1 of 1 to 2 nodes were there" in failure.message
    assert "it takes 2 to begin, or 1 with --rdzv-conf allow_minority=1" in failure.message
    assert f"missed: host {lost.name} ({lost.address()})" in failure.message
    assert not [step for step in made.said(rest[0]) if step["at"] > at + 1]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_spare_takes_the_place_of_a_lost_node(lab: Lab, job: MakeJob, seed: int) -> None:
    made, hosts = three_in_training(lab, job, f"spare-{seed}")
    spare = lab.host(hosts[0].nic().network)
    made.start(spare)
    lost, rest = survivors(made, hosts, of_host=False)
    made.until(
        lambda: any("has been running for" in event.data.get("text", "") for event in made.agents[spare].events),
        "the spare to wait",
    )
    lost.kill()
    at = time.monotonic()
    again = made.wait_for_group([*rest, spare], since=at)
    print(f"with the spare in its place after {again - at:.1f} s")
    made.finish(*rest, spare)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("victim", chosen(["host"], soak=["other"]))
def test_a_link_is_cut_and_healed(lab: Lab, job: MakeJob, victim: str, seed: int) -> None:
    made, hosts = three_in_training(lab, job, f"cut-{victim}-{seed}")
    lost, rest = survivors(made, hosts, of_host=victim == "host")
    lost.cut()
    at = time.monotonic()
    again = made.wait_for_group(rest, since=at)
    print(f"survivors of the {victim}'s cut link trained again after {again - at:.1f} s")
    assert again - at < CUT_SECONDS + made.late_seconds
    assert not [step for step in made.said(lost) if step["at"] > at + 1]
    lost.heal()
    healed = time.monotonic()
    whole = made.wait_for_group(hosts, since=healed)
    print(f"three again {whole - healed:.1f} s after the link was back")
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("how", chosen(["fails"], soak=["finishes"]))
def test_a_host_that_ends_for_good_restarts_nobody(lab: Lab, job: MakeJob, how: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    # Without collectives: healthy workers feel nothing of another one's end.
    made = job(f"good-{how}-{seed}", "3", script=["--alone"])
    made.start(*hosts)
    made.wait_for_group(hosts)
    holder = made.store_host(hosts)
    rest = [host for host in hosts if host is not holder]
    before = {host: made.said(host, "started") for host in rest}
    if how == "fails":
        made.fail_file.write_text(holder.name)
        assert made.agents[holder].error(SECONDS).name == "ChildFailedError"
    else:
        made.leave_file(holder).touch()
        made.until(lambda: bool(made.said(holder, "done")), "the host's workers to finish")
    at = time.monotonic()
    # Long enough for every heartbeat of the one that ended to be too old.
    made.until(lambda: all(made.said(host)[-1]["at"] > at + 20 for host in rest), "the others to go on")
    assert {host: made.said(host, "started") for host in rest} == before
    made.finish(*(rest if how == "fails" else hosts))


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("how", ["lost", "fails"])
def test_a_host_that_is_done_waits_for_no_node_that_can_not_be_done(
    lab: Lab, job: MakeJob, how: str, seed: int
) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"done-{how}-{seed}", "3", script=["--alone"])
    made.start(*hosts)
    made.wait_for_group(hosts)
    lost, rest = survivors(made, hosts, of_host=False)
    for host in rest:
        made.leave_file(host).touch()
    made.until(lambda: all(made.said(host, "done") for host in rest), "the workers of two to finish")
    threading.Event().wait(3.0)  # torchrun sees within 0.1 s that a worker has ended
    if how == "lost":
        lost.kill()
    else:
        made.fail_file.write_text(lost.name)
        assert made.agents[lost].error(SECONDS).name == "ChildFailedError"
    for host in rest:
        made.agents[host].result(SECONDS)  # torch's exit barrier would last for 300 s


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_an_agent_that_is_stopped_for_a_moment_restarts_no_workers(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"short-{seed}", "3", script=["--alone"])
    made.start(*hosts)
    made.wait_for_group(hosts)
    holder = made.store_host(hosts)
    late = made.agents[next(host for host in hosts if host is not holder)]
    late.stop()
    threading.Event().wait(4.0)  # shorter than a lease
    late.resume()
    at = time.monotonic()
    made.until(lambda: all(made.said(host)[-1]["at"] > at + 10 for host in hosts), "all to go on")
    assert len(made.rounds()) == len(hosts)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("victim", chosen(["host"], soak=["other"]))
def test_a_torchrun_that_hangs_is_left_behind_and_takes_its_place_again(
    lab: Lab, job: MakeJob, victim: str, seed: int
) -> None:
    made, hosts = three_in_training(lab, job, f"hangs-{victim}-{seed}")
    lost, rest = survivors(made, hosts, of_host=victim == "host")
    places = {host: made.said(host, "started")[-1]["rank"] for host in hosts}
    made.agents[lost].stop()
    at = time.monotonic()
    again = made.wait_for_group(rest, since=at)
    print(f"the others trained again {again - at:.1f} s after the {victim}'s torchrun was stopped")
    assert again - at < CUT_SECONDS + made.late_seconds
    made.agents[lost].resume()
    resumed = time.monotonic()
    whole = made.wait_for_group(hosts, since=resumed)
    print(f"three again {whole - resumed:.1f} s after it went on")
    assert {host: made.said(host, "started")[-1]["rank"] for host in hosts} == places
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_worker_that_ignores_sigterm_holds_a_round_up_until_torchrun_kills_it(
    lab: Lab, job: MakeJob, seed: int
) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    deaf = hosts[1]
    # Without collectives: a worker in a collective would end with it.
    made = job(f"deaf-{seed}", "2:3", restarts=3, conf="", script=["--alone", f"--deaf={deaf.name}", "--crash=1"])
    at = time.monotonic()
    made.start(*hosts)
    made.until(lambda: len(made.rounds()) == 3, "the first round")
    began = made.rounds()[-1][0]
    made.until(lambda: len(made.rounds()) == 6, "the round after the crash")
    again = made.rounds()[-1][0]
    print(f"the first round {began - at:.1f} s after the start, the next one {again - began:.1f} s later")
    assert KILL_SECONDS <= again - began < STOP_SECONDS
    assert made.group(deaf) == tuple(host.name for host in hosts)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_third_node_that_comes_late_joins(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"late-{seed}", "2:3", restarts=3)
    made.start(*hosts[:2])
    made.wait_for_group(hosts[:2])
    made.start(hosts[2])
    made.wait_for_group(hosts)
    made.finish(*hosts)
