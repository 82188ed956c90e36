"""Hosts that share a bucket and nothing else: S3 from moto's server, without multicast, names, or any UDP."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from mingle.network.folders import digest
from mingle.wire import datagrams
from mingle.wire.datagrams import MAX_BYTES, Offer
from tests.support.levels import chosen, repeated, soaking
from tests.support.loopback import until

from . import Host, Lab
from .object_store import BUCKET, credentials, left, requests, serve_silence, start
from .process import Rank
from .scenarios import check, hold, interrupt, least, results, start_apart, train, wait_for_log, without_udp
from .test_election import assigned
from .test_election import check as check_assigned
from .torchrun_jobs import Job, jobs

# The versions of s3fs and fsspec that belong together need it (constraints.txt).
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="constraints.txt has no s3fs for this Python")

MakeJob = Callable[..., Job]
URL = f"s3://{BUCKET}/mingle"
UNDISTURBED_SECONDS = 4.5
"""How long a job takes at most where no other objects lie: to load s3fs, six times at once on two cores that other
tests keep busy, and a turn."""
STRANGERS = 10_000 if soaking() else 500
"""More than a process reads in its time. moto takes a millisecond of processor time to list one, and an answer that
comes after 5 s is none: on two cores that other tests keep busy, four processes wait as long for 2,000."""


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


def hosts_and_store(lab: Lab, count: int) -> tuple[list[Host], Host]:
    """Return hosts between which no datagram passes, and one for the server."""
    *hosts, store = without_udp(lab, count + 1)
    return hosts, store


def peers(server: Host, **more: str) -> dict[str, str]:
    return {"MINGLE_PEERS": URL, **credentials(server.address()), **more}


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_assigned_ranks_meet_in_a_bucket(lab: Lab, seed: int) -> None:
    hosts, store = hosts_and_store(lab, 4)
    server = start(store)
    ranks = start_apart(hosts, seed, lambda rank: hosts[rank].start(assigned, f"bucket {seed}", 4, env=peers(store)))
    found = results(ranks)
    check_assigned(found, hosts)
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}, requests: {dict(requests(server))}")
    until(lambda: not left(server))  # a process deletes its own, a moment after it has told its place


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_given_ranks_meet_in_any_order(lab: Lab, seed: int) -> None:
    hosts, store = hosts_and_store(lab, 4)
    server = start(store)
    ranks = start_apart(hosts, seed, lambda rank: hosts[rank].start(train, f"given {seed}", rank, 4, env=peers(store)))
    found = results(ranks)
    check(found, hosts, hosts[0])
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}, requests: {dict(requests(server))}")
    until(lambda: not left(server))


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_torchrun_agents_go_on_without_the_host(lab: Lab, job: MakeJob, seed: int) -> None:
    hosts, store = hosts_and_store(lab, 3)
    start(store, tell=False)
    made = job(f"bucket-{seed}", "2:3", restarts=3, env=peers(store))
    made.start(*hosts)
    made.wait_for_group(hosts)
    made.replace_store_host(hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_mingle_run_meets_in_a_bucket(lab: Lab, seed: int) -> None:
    hosts, store = hosts_and_store(lab, 3)
    server = start(store)
    line = [sys.executable, "-m", "mingle.run.command", "--nnodes", "3", "--job-id", f"run {seed}"]
    show = ["--peers", URL, "--", "echo", "{node_rank}", "{master_addr}"]
    env = {"MINGLE_TIMEOUT": "60", **credentials(store.address())}
    processes = [host.run([*line, *show], env=env) for host in hosts]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    said = [process.stdout.split() for process in processes]
    assert sorted(rank for rank, _ in said) == ["0", "1", "2"]
    assert len({address for _, address in said}) == 1
    until(lambda: not left(server))


@pytest.mark.soak
@pytest.mark.parametrize(
    "gone", chosen([True], soak=[False]), ids=lambda gone: f"its machines {'are gone' if gone else 'refuse'}"
)
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_the_objects_of_a_killed_job_do_not_delay_the_next(lab: Lab, seed: int, gone: bool) -> None:
    hosts, store = hosts_and_store(lab, 6)
    server = start(store)
    name = f"again {seed}"
    before, after = (hosts[:3], hosts[3:]) if gone else (hosts[:3], hosts[:3])
    undisturbed = elapsed(after, store, f"first {seed}")
    for rank in [host.start(hold, name, rank, 3, env=peers(store)) for rank, host in enumerate(before)]:
        rank.wait_for("running")
    until(lambda: len(left(server)) == 1)  # rank 0 has just renewed its object, and deletes the one before
    for host in before:
        if gone:
            host.cut()
        host.kill()
    assert left(server)
    took = elapsed(after, store, name)
    print(f"elapsed: {took:.2f} s, without the objects: {undisturbed:.2f} s")
    # Two runs differ by the time that is left until the next turn, whatever lies there. A session that does not answer
    # would count as alive for 10 s.
    assert took < max(undisturbed, UNDISTURBED_SECONDS) + 5


def elapsed(hosts: list[Host], store: Host, name: str) -> float:
    """Return how long the slowest rank of a job takes."""
    ranks = [host.start(train, name, rank, len(hosts), env=peers(store)) for rank, host in enumerate(hosts)]
    found = results(ranks)
    check(found, hosts, hosts[0])
    return float(max(result["elapsed"] for result in found))


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_forged_objects_do_not_keep_a_job_with_a_secret_apart(lab: Lab, seed: int) -> None:
    hosts, store = hosts_and_store(lab, 4)
    name = f"secret {seed}"
    start(store, objects=partial(forged_objects, name, seed), tell=False)
    ranks = [host.start(assigned, name, 4, env=peers(store), secret="s3cret", discovery_timeout=50) for host in hosts]
    found = results(ranks)
    check_assigned(found, hosts)
    print(f"elapsed: {sorted(round(result['elapsed'], 2) for result in found)}")
    # Four processes list 10,000 objects at once, which takes moto 6 s. The OFFER is read in the third turn or so, or at
    # the latest when it has its next name, 15 s later.
    assert max(result["elapsed"] for result in found) < 48


def forged_objects(name: str, seed: int) -> dict[str, bytes]:
    """Return what a stranger leaves in the folder of a job."""
    rng = random.Random(seed)

    def key() -> str:
        written_by = f"{rng.randbytes(8).hex()}-{rng.randbytes(16).hex()}"
        return f"mingle/{digest(name)[:32]}/{rng.choice('hs')}-{written_by}-{rng.randrange(100)}"

    forged = Offer(
        job=name, session=bytes(16), host=bytes(16), addresses=("10.1.2.3",), port=9, world_size=4, assigned=True
    )
    contents = [datagrams.encode(forged), rng.randbytes(500), b"", bytes(MAX_BYTES + 1)]
    objects = {key(): rng.choice(contents) for _ in range(STRANGERS)}
    objects[key()] = bytes(1_000_000)
    return objects


def test_the_helper_of_a_member_ends_at_go_and_that_of_rank_0_with_it(lab: Lab) -> None:
    hosts, store = hosts_and_store(lab, 2)
    start(store)
    ranks = [host.start(hold, "helpers", rank, 2, env=peers(store)) for rank, host in enumerate(hosts)]
    for rank in ranks:
        rank.wait_for("running")
    until(lambda: not children(ranks[1]))
    (helper,) = children(ranks[0])
    hosts[0].kill()
    until(lambda: not (Path("/proc") / helper / "exe").exists())


def children(rank: Rank[None]) -> list[str]:
    return [child for each in Path(f"/proc/{rank.pid}/task").glob("*/children") for child in each.read_text().split()]


# --- a bucket that can't be used ------------------------------------------------------------------------------------


def named(lab: Lab, expected: str, *, fix: str, prepare: Callable[[Host], object] = lambda _: None, **env: str) -> None:
    """Check that a waiting process names what is wrong, and again when its time is up."""
    (host,), store = hosts_and_store(lab, 1)
    prepare(store)
    started = time.monotonic()
    variables = {**peers(store), **env}
    rank = host.start(assigned, "no bucket", 2, env=variables, discovery_timeout=25)
    wait_for_log(rank, expected)
    took = time.monotonic() - started
    print(f"named after {took:.1f} s")
    assert took < 24
    error = rank.error()
    assert f"likely cause: {variables['MINGLE_PEERS']} in MINGLE_PEERS " in error.message
    assert expected in error.message
    assert fix in error.message


def test_a_bucket_that_does_not_exist_is_named(lab: Lab) -> None:
    named(lab, "does not exist", fix="create the bucket", prepare=start, MINGLE_PEERS="s3://nowhere/mingle")


def test_credentials_that_are_refused_are_named(lab: Lab) -> None:
    def refusing(store: Host) -> None:
        start(store, answer_refusal=True)

    named(lab, "access is refused: The key does not exist", fix="s3:PutObject", prepare=refusing)


def test_credentials_that_are_missing_are_named(lab: Lab) -> None:
    named(lab, "without credentials", fix="AWS_ACCESS_KEY_ID", prepare=start, AWS_ACCESS_KEY_ID="", AWS_PROFILE="")


def test_a_server_that_refuses_connections_is_named(lab: Lab) -> None:
    named(lab, "can't be reached", fix="AWS_ENDPOINT_URL")


def test_a_server_that_is_silent_is_named(lab: Lab) -> None:
    def silent(store: Host) -> None:
        start(store, serve_silence)

    named(lab, "has not answered", fix="AWS_ENDPOINT_URL", prepare=silent)


def test_a_back_end_that_is_missing_is_named(lab: Lab) -> None:
    named(
        lab,
        "needs a package that is not installed here",
        fix="install what fsspec needs for gs://",
        MINGLE_PEERS="gs://place/mingle",
    )


def test_multicast_works_beside_a_bucket_that_is_silent(lab: Lab) -> None:
    network = lab.network()
    *hosts, store = [lab.host(network) for _ in range(4)]
    start(store, serve_silence)

    def form() -> float:
        took = elapsed(hosts, store, "beside")
        print(f"elapsed: {took:.2f} s")
        return took

    assert least(form, 4) < 4


def test_ctrl_c_ends_a_wait_for_a_silent_bucket_at_once(lab: Lab) -> None:
    def end() -> float:
        (host,), store = hosts_and_store(lab, 1)
        server = start(store, serve_silence)
        rank = host.start(assigned, "interrupted", 2, env=peers(store))
        server.wait_for("accepted")
        return interrupt(rank)

    assert least(end, 4) < 4
