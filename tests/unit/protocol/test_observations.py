"""What is remembered for reports: bounded, and of ranks alone. The machines themselves are in `tests/lan`."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from mingle.protocol.events import Source
from mingle.protocol.explain.observations import (
    KEPT_OUT_SECONDS,
    LATELY_SECONDS,
    REMEMBERED_PER_KIND,
    SEEKING_SECONDS,
    TOLD_AGAIN_SECONDS,
    Diagnostics,
    note,
)
from mingle.wire.datagrams import Bye, Datagram, Failed, List, Offer, Seek
from mingle.wire.frames import ProcessInfo, Unit
from tests.support.scripted_host import IDENTITY

HERE = Source(interface="eth0", address="10.0.0.7")
AGAIN = structs.replace(IDENTITY, attempt="2")
"""The same process in the second attempt of its launcher."""


def seek(member: bytes = b"A" * 16, *, job: str = "job", **more: Any) -> Seek:
    return Seek(job=job, member=member, world_size=8, **more)


def offer(host: bytes = b"H" * 16, session: bytes = b"S" * 16, *addresses: str, **more: Any) -> Offer:
    named: dict[str, Any] = {"job": "job", "hostname": "node0", "pid": 5, **more}
    return Offer(session=session, host=host, addresses=addresses or ("10.0.0.7",), port=1, world_size=8, **named)


NODE4: dict[str, Any] = {"rank": 4, "hostname": "node4"}


# --- who looks for the job --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "unit", "name"),
    [
        (seek(**NODE4, pid=9), "rank", "rank 4 on host node4 (10.0.0.7), pid 9"),
        (List(job="job", member=b"A" * 16, **NODE4, pid=9), "rank", "rank 4 on host node4 (10.0.0.7), pid 9"),
        (seek(), "rank", "a process without a rank on host unknown (10.0.0.7), pid 0"),
        (seek(kind="agents", hostname="n"), "rank", "a torchrun agent on host n (10.0.0.7), pid 0"),
        (seek(kind="agents", hostname="n"), "node", "a node on host n (10.0.0.7), pid 0"),
        (seek(kind="observer"), "rank", None),
        (List(job="job", member=b"A" * 16), "rank", None),
    ],
    ids=["a rank", "its LIST", "without a rank", "agent", "node", "observer", "LIST of an observer"],
)
def test_other_seekers_are_named_once(message: Seek | List, unit: Unit, name: str | None) -> None:
    diagnostics = Diagnostics(unit=unit)
    for _ in range(2):
        diagnostics.seeker(message, HERE, 0.0)
    assert list(diagnostics.seekers.values()) == ([] if name is None else [name])


OF_AN_OBSERVER: list[Datagram] = [
    seek(kind="observer"),
    List(job="job", member=b"A" * 16),
    Bye(job="job", session=b"S" * 16),
]


@pytest.mark.parametrize("message", OF_AN_OBSERVER, ids=lambda message: type(message).__name__)
def test_observer_tells_nothing_of_the_ranks_secret_and_attempt(message: Datagram) -> None:
    """``mingle-discover`` has no attempt, and signs if its user has the secret, whatever the ranks have."""
    signed, diagnostics = structs.replace(HERE, signed=True), Diagnostics()
    assert not diagnostics.concerns(AGAIN, message, signed, 0.0, secured=False)
    assert diagnostics.concerns(IDENTITY, message, signed, 0.0, secured=False)
    assert (diagnostics.other_attempts, diagnostics.signed_without_secret) == ({}, 0)


@pytest.mark.parametrize("asked", [seek(rank=1), List(job="job", member=b"A" * 16, rank=1, hostname="node1")])
def test_a_rank_of_the_first_attempt_is_named_though_that_has_no_name(asked: Datagram) -> None:
    """Slurm counts the restarts of a job from the second run on."""
    diagnostics = Diagnostics()
    assert not diagnostics.concerns(AGAIN, asked, HERE, 0.0, secured=False)
    assert diagnostics.other_attempts == {"none": "10.0.0.7"}


def test_unverified_datagram_counts_if_a_rank_of_this_job_has_sent_it() -> None:
    diagnostics = Diagnostics()
    for message in (seek(), offer(), offer(job="vit"), offer(attempt="2"), seek(kind="observer")):
        diagnostics.unverified(IDENTITY, message)
    assert diagnostics.secret_signs == 2


@pytest.mark.parametrize("secured", [False, True])
def test_signature_is_a_sign_for_a_process_without_a_secret(secured: bool) -> None:
    diagnostics = Diagnostics()
    assert diagnostics.concerns(IDENTITY, seek(), structs.replace(HERE, signed=True), 0.0, secured=secured)
    assert diagnostics.signed_without_secret == (not secured)


# --- other jobs -------------------------------------------------------------------------------------------------------


def test_other_jobs_are_named_with_who_spoke_of_them() -> None:
    diagnostics = Diagnostics()
    bye = Bye(job="vit", session=b"S" * 16)
    mistyped = seek(job="resnte", hostname="node9", pid=5)
    for message in (mistyped, offer(job="vit"), bye, structs.replace(bye, job="gone")):
        diagnostics.other(message, HERE, 0.0)
    assert diagnostics.other_jobs == {
        "resnte": "host node9 (10.0.0.7), pid 5",
        "vit": "host node0 (10.0.0.7), pid 5",
        "gone": "address 10.0.0.7",
    }


def test_seekers_of_another_jobs_host_are_counted() -> None:
    diagnostics = Diagnostics()
    for message in (
        seek(job="resent", rank=1),
        List(job="resent", member=b"B" * 16, rank=2, hostname="node2"),
        List(job="resent", member=b"C" * 16, rank=0, hostname="node0"),
        List(job="resent", member=b"D" * 16, hostname="node3"),
        seek(b"E" * 16, job="resent", kind="observer"),
    ):
        diagnostics.other(message, HERE, 0.0)
    assert list(diagnostics.other_seekers["resent"]) == [b"A" * 16, b"B" * 16], "no host, and no observer"
    for message in (offer(job="resent"), seek(job="resent", rank=1)):
        diagnostics.other(message, HERE, 0.0)
    assert not diagnostics.other_seekers
    assert diagnostics.other_hosts == {"resent": True}


def test_a_job_that_is_heard_no_more_and_a_rank_that_has_just_come_say_nothing_of_now() -> None:
    stranger = seek(b"B" * 16, job="resnte")
    diagnostics = Diagnostics()
    diagnostics.seeker(seek(), HERE, 0.0)
    diagnostics.other(stranger, HERE, 0.0)
    assert not diagnostics.lately(1.0).seekers
    assert diagnostics.lately(1.0).other_jobs
    assert diagnostics.lately(KEPT_OUT_SECONDS).seekers
    assert not diagnostics.lately(SEEKING_SECONDS + 1.0).seekers, "it has ended"
    assert not diagnostics.lately(LATELY_SECONDS + 1.0).other_jobs
    diagnostics.other(stranger, HERE, LATELY_SECONDS)
    assert diagnostics.lately(LATELY_SECONDS + 1.0).other_jobs
    assert (len(diagnostics.seekers), len(diagnostics.other_jobs)) == (1, 1), "the report has all"
    diagnostics.joined(b"A" * 16, ProcessInfo())
    diagnostics.seeker(seek(), HERE, 100.0)
    assert not diagnostics.lately(101.0).seekers, "it looks again since a moment ago"


# --- hosts, and who does not reach them -------------------------------------------------------------------------------


def unreached(member: bytes = b"A" * 16, session: bytes = b"S" * 16, *, how: str = "no answer") -> Seek:
    return seek(member, **NODE4, unreached=session, how=how)


def test_seek_that_names_a_session_names_its_host_and_the_caller() -> None:
    diagnostics = Diagnostics()
    diagnostics.heard_host(offer(b"H" * 16, b"S" * 16, "fe80::1", "10.0.0.1"), HERE)
    diagnostics.seeker(unreached(), HERE, 0.0)
    diagnostics.seeker(unreached(b"B" * 16, b"T" * 16), HERE, 0.0)  # a session of which nothing was heard
    ((pair, each),) = diagnostics.unreached.items()
    assert pair == (b"A" * 16, b"H" * 16)
    assert each.caller == "rank 4 on host node4 (10.0.0.7), pid 0"
    assert each.host == "rank 0 on host node0 (10.0.0.1), pid 5"
    assert each.how == "no answer"


@pytest.mark.parametrize(
    ("source", "hidden"),
    [
        (Source(interface="eth0", address="203.0.113.7", multicast=False), True),
        (Source(interface="eth0", address="fe80::7", multicast=False), False),
        (Source(interface="", address="dir:/shared", multicast=False, folder=True), False),
        (Source(interface="eth0", address="10.0.0.8"), False),
    ],
    ids=["another address", "link-local", "folder", "multicast"],
)
def test_address_that_is_none_of_the_announced_ones_is_a_translated_one(source: Source, hidden: bool) -> None:
    diagnostics, host = Diagnostics(), offer(b"H" * 16, b"S" * 16, "10.0.0.7", "10.1.0.7")
    diagnostics.heard_host(host, source)
    assert diagnostics.translated == (dict.fromkeys(host.addresses, source.address) if hidden else {})
    diagnostics.heard_host(host, HERE)
    assert diagnostics.translated == {}


def test_the_host_of_a_full_session_looks_for_the_job_no_more() -> None:
    """A short job that ran beside a waiting process was named as one that its firewall kept out."""
    diagnostics = Diagnostics()
    diagnostics.seeker(seek(), HERE, 0.0)
    diagnostics.heard_host(offer(b"A" * 16), HERE)
    assert diagnostics.lately(KEPT_OUT_SECONDS).seekers, "it hosts because it hears no other host"
    diagnostics.heard_host(offer(b"A" * 16, state="running"), HERE)
    assert not diagnostics.lately(KEPT_OUT_SECONDS).seekers


def test_pair_keeps_the_addresses_by_which_it_was_named_unless_they_are_link_local() -> None:
    diagnostics, link_local = Diagnostics(), Source(interface="eth0", address="fe80::7")
    diagnostics.heard_host(offer(), HERE)
    said = []
    for source, how in ((link_local, "fe80::1 x"), (HERE, "10.0.0.1 x"), (link_local, "fe80::1 x")):
        diagnostics.seeker(unreached(how=how), source, len(said))
        (each,) = diagnostics.unreached.values()
        said.append((each.caller, each.how, each.at))
    assert said == [
        ("rank 4 on host node4 (fe80::7), pid 0", "fe80::1 x", 0),
        ("rank 4 on host node4 (10.0.0.7), pid 0", "10.0.0.1 x", 1),
        ("rank 4 on host node4 (10.0.0.7), pid 0", "10.0.0.1 x", 2),
    ]


def test_pair_is_forgotten_once_it_has_a_seat_or_is_said_no_more() -> None:
    diagnostics = Diagnostics()
    diagnostics.heard_host(offer(), HERE)
    for number in range(REMEMBERED_PER_KIND + 1):  # a stranger invents some
        diagnostics.seeker(unreached(bytes([number]) * 16), HERE, float(number > 0))
    assert len(diagnostics.unreached) == REMEMBERED_PER_KIND
    diagnostics.joined(bytes([1]) * 16, ProcessInfo())
    assert len(diagnostics.unreached) == REMEMBERED_PER_KIND - 1
    assert len(diagnostics.lately(TOLD_AGAIN_SECONDS + 0.5).unreached) == REMEMBERED_PER_KIND - 2
    diagnostics = diagnostics.without_mended(TOLD_AGAIN_SECONDS + 1.5)
    assert diagnostics.unreached == {}


def test_forged_pairs_leave_room_for_the_hosts_that_this_process_does_not_reach() -> None:
    diagnostics, us = Diagnostics(member=IDENTITY.member), []
    diagnostics.heard_host(offer(), HERE)
    for number in range(REMEMBERED_PER_KIND + 1):
        diagnostics.seeker(unreached(bytes([number]) * 16), HERE, 0.0)
    for number in range(REMEMBERED_PER_KIND + 1):
        host = bytes([200 - number]) * 16
        us.append((IDENTITY.member, host))
        diagnostics.does_not_reach(IDENTITY, offer(host, host, "10.0.0.2"), "no answer", 0.0)
        assert us[0] in diagnostics.unreached
        assert len(diagnostics.unreached) == REMEMBERED_PER_KIND
    assert list(diagnostics.unreached) == us[:-1]


# --- processes that failed --------------------------------------------------------------------------------------------


def failed(member: bytes, rank: int | None, hostname: str) -> Failed:
    return Failed(job="job", member=member, rank=rank, hostname=hostname, pid=9, reason="no room")


@pytest.mark.parametrize("comes", ["asks", "hosts", "joins"])
def test_process_that_fails_is_named_until_another_one_comes_in_its_place(comes: str) -> None:
    diagnostics = Diagnostics()
    diagnostics.seeker(seek(rank=0, hostname="node0"), HERE, 0.0)
    diagnostics.has_failed(failed(b"A" * 16, 0, "node0"), HERE)
    assert diagnostics.seekers == {}
    (gone,) = diagnostics.failed.values()
    assert gone.text == "rank 0 on host node0 (10.0.0.7), pid 9 has failed: no room"
    for number, (rank, hostname) in enumerate(((0, "node1"), (1, "node0"), (0, "node0"))):
        assert diagnostics.failed
        if comes == "asks":
            diagnostics.seeker(seek(bytes([number]) * 16, rank=rank, hostname=hostname), HERE, 1.0)
        elif comes == "joins":
            diagnostics.joined(b"B" * 16, ProcessInfo(rank=rank, hostname=hostname))
        elif rank == 0:
            diagnostics.heard_host(offer(b"B" * 16, bytes([number]) * 16, hostname=hostname), HERE)
    assert not diagnostics.failed


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_network_full_of_strangers_costs_a_bounded_memory() -> None:
    diagnostics, remarks, names = Diagnostics(), dict[str, str](), dict[str, None]()
    for number in range(REMEMBERED_PER_KIND + 50):
        stranger = seek(number.to_bytes(16, "big"), job=f"job {number}")
        diagnostics.seeker(stranger, HERE, 0.0)
        diagnostics.other(stranger, HERE, 0.0)
        diagnostics.has_failed(failed(bytes([number]) * 16, None, f"node{number}"), HERE)
        note(remarks, f"name {number}", "first")
        note(names, f"name {number}", None)
    kept = [diagnostics.seekers, diagnostics.other_jobs, diagnostics.failed, remarks, names]
    assert [len(memory) for memory in kept] == [REMEMBERED_PER_KIND] * 5
    for name in ("name 0", "one too many"):
        note(remarks, name, "second")
    assert len(remarks) == REMEMBERED_PER_KIND
    assert remarks["name 0"] == "second", "what is known stays up to date although the memory is full"


def test_note_without_a_name_is_dropped() -> None:
    remarks: dict[str, str] = {}
    note(remarks, "", "of nobody")
    assert remarks == {}


def test_stranger_that_comes_and_fails_under_ever_new_ids_fills_no_memory() -> None:
    diagnostics = Diagnostics()
    for number in range(10 * REMEMBERED_PER_KIND):
        member = number.to_bytes(16, "big")
        diagnostics.seeker(seek(member, **NODE4), HERE, 0.0)
        diagnostics.has_failed(failed(member, 4, "node4"), HERE)
    kept = (diagnostics.seekers, diagnostics.failed, diagnostics.heard_at)
    assert sum(map(len, kept)) <= 2 * REMEMBERED_PER_KIND
