"""Hosts that share a bucket and nothing else: S3 from moto's server, without multicast, names, or any UDP.

What a directory shows as well is in `test_shared_directory`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.levels import chosen
from tests.support.loopback import until

from . import Host, Lab
from .object_store import BUCKET, credentials, left, requests, serve_silence, start
from .process import Rank
from .scenarios import (
    formed,
    hold,
    interrupt,
    least,
    ranks_are,
    start_apart,
    start_ranks,
    train,
    wait_for_log,
    without_udp,
)
from .torchrun_jobs import MakeJob

# The versions of s3fs and fsspec that belong together need it (constraints.txt).
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="constraints.txt has no s3fs for this Python")

URL = f"s3://{BUCKET}/mingle"


def hosts_and_store(lab: Lab, count: int) -> tuple[list[Host], Host]:
    """Return hosts between which no datagram passes, and one for the server."""
    *hosts, store = without_udp(lab, count + 1)
    return hosts, store


def peers(server: Host) -> dict[str, str]:
    return {"MINGLE_PEERS": URL, **credentials(server.address())}


@pytest.mark.soak(5)
@pytest.mark.parametrize("given", chosen([False], soak=[True]), ids=ranks_are)
def test_ranks_meet_in_a_bucket_in_any_order(lab: Lab, given: bool, seed: int) -> None:
    hosts, store = hosts_and_store(lab, 4)
    server = start(store)

    def begin(number: int) -> Rank[dict[str, Any]]:
        return hosts[number].start(train, "bucket", number if given else None, 4, env=peers(store))

    formed(start_apart(hosts, seed, begin), hosts, given=given)
    print(f"requests: {dict(requests(server))}")
    until(lambda: not left(server))  # a process deletes its own, a moment after it has told its place


@pytest.mark.soak(5)
def test_torchrun_agents_go_on_without_the_host(lab: Lab, job: MakeJob) -> None:
    hosts, store = hosts_and_store(lab, 3)
    start(store, tell=False)
    made = job("bucket", "2:3", restarts=3, env=peers(store))
    made.start(*hosts)
    made.wait_for_group(hosts)
    made.replace_store_host(hosts)


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


def refusing(store: Host) -> None:
    start(store, answer_refusal=True)


def silent(store: Host) -> Rank[None]:
    return start(store, serve_silence)


def unreachable(_: Host) -> None:
    """No server runs there."""


Serve = Callable[[Host], object]


@pytest.mark.parametrize(
    ("serve", "env", "expected", "fix"),
    [
        (start, {"MINGLE_PEERS": "s3://nowhere/mingle"}, "does not exist", "create the bucket"),
        (refusing, {}, "access is refused: The key does not exist", "s3:PutObject"),
        (start, {"AWS_ACCESS_KEY_ID": "", "AWS_PROFILE": ""}, "without credentials", "AWS_ACCESS_KEY_ID"),
        (unreachable, {}, "can't be reached", "AWS_ENDPOINT_URL"),
        (silent, {}, "has not answered", "AWS_ENDPOINT_URL"),
        (
            unreachable,
            {"MINGLE_PEERS": "gs://place/mingle"},
            "needs a package that is not installed here",
            "install what fsspec needs for gs://",
        ),
    ],
    ids=["no bucket", "refused", "no credentials", "no server", "silent", "no back end"],
)
def test_what_is_wrong_with_a_bucket_is_named(
    lab: Lab, serve: Serve, env: dict[str, str], expected: str, fix: str
) -> None:
    """By a process that waits, and again when its time is up."""
    (host,), store = hosts_and_store(lab, 1)
    serve(store)
    started = time.monotonic()
    variables = peers(store) | env
    rank = host.start(train, "no bucket", None, 2, env=variables, discovery_timeout=25)
    wait_for_log(rank, expected)
    took = time.monotonic() - started
    print(f"named after {took:.1f} s")
    assert took < 24
    error = rank.error()
    assert f"likely cause: {variables['MINGLE_PEERS']} in MINGLE_PEERS " in error.message
    assert expected in error.message
    assert fix in error.message


def test_multicast_works_beside_a_bucket_that_is_silent(lab: Lab) -> None:
    *hosts, store = lab.lan(4)
    silent(store)
    assert least(lambda: formed(start_ranks(hosts, "beside", env=peers(store)), hosts), 4) < 4


def test_ctrl_c_ends_a_wait_for_a_silent_bucket_at_once(lab: Lab) -> None:
    def end() -> float:
        (host,), store = hosts_and_store(lab, 1)
        server = silent(store)
        rank = host.start(train, "interrupted", None, 2, env=peers(store))
        server.wait_for("accepted")
        return interrupt(rank)

    assert least(end, 4) < 4
