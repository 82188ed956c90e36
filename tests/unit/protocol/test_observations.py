"""What is remembered for reports: bounded, and of ranks alone. The machines themselves are in `tests/lan`."""

from __future__ import annotations

import msgspec
import pytest

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
from mingle.protocol.machine import Identity
from mingle.wire.datagrams import Bye, Datagram, Failed, List, Offer, Seek
from mingle.wire.frames import ProcessInfo, Unit

HERE = Source(interface="eth0", address="10.0.0.7")
IDENTITY = Identity(
    job="resnet",
    attempt="2",
    member=b"M" * 16,
    rank=3,
    world_size=8,
    node="boot:1",
    who=ProcessInfo(hostname="node3", pid=77, rank=3),
)


def test_the_questions_say_who_asks() -> None:
    seek = IDENTITY.seek()
    assert (seek.job, seek.attempt, seek.member, seek.world_size) == ("resnet", "2", b"M" * 16, 8)
    assert (seek.rank, seek.hostname, seek.pid, seek.kind) == (3, "node3", 77, "ranks")
    asked = IDENTITY.list()
    assert (asked.job, asked.attempt, asked.member) == ("resnet", "2", b"M" * 16)
    assert (asked.rank, asked.hostname, asked.pid) == (3, "node3", 77)
    assert msgspec.structs.replace(IDENTITY, rank=None, kind="agents").seek().rank is None
    assert msgspec.structs.replace(IDENTITY, rank=None, kind="agents").seek().kind == "agents"


def test_other_seekers_are_named_once() -> None:
    diagnostics = Diagnostics()
    for _ in range(2):
        diagnostics.seeker(
            Seek(job="resnet", member=b"A" * 16, world_size=8, rank=4, hostname="node4", pid=9), HERE, 0.0
        )
    diagnostics.seeker(Seek(job="resnet", member=b"B" * 16, world_size=8), HERE, 0.0)
    assert list(diagnostics.seekers.values()) == [
        "rank 4 on host node4 (10.0.0.7), pid 9",
        "a process without a rank on host unknown (10.0.0.7), pid 0",
    ]


@pytest.mark.parametrize(("unit", "name"), [("rank", "a torchrun agent"), ("node", "a node")])
def test_an_agent_is_no_process_that_lacks_a_rank(unit: Unit, name: str) -> None:
    diagnostics = Diagnostics(unit=unit)
    seek = Seek(job="resnet", member=b"B" * 16, world_size=8, kind="agents", hostname="n", pid=1)
    diagnostics.seeker(seek, HERE, 0.0)
    assert list(diagnostics.seekers.values()) == [f"{name} on host n (10.0.0.7), pid 1"]


def test_observer_is_no_rank() -> None:
    diagnostics = Diagnostics()
    diagnostics.seeker(Seek(job="resnet", member=b"A" * 16, world_size=8, kind="observer"), HERE, 0.0)
    diagnostics.seeker(List(job="resnet", member=b"B" * 16), HERE, 0.0)
    assert diagnostics.seekers == {}
    diagnostics.seeker(List(job="resnet", member=b"C" * 16, rank=5, hostname="node5", pid=6), HERE, 0.0)
    assert list(diagnostics.seekers.values()) == ["rank 5 on host node5 (10.0.0.7), pid 6"]


OF_AN_OBSERVER: list[Datagram] = [
    Seek(job="resnet", member=b"A" * 16, world_size=8, kind="observer"),
    List(job="resnet", member=b"A" * 16),
    Bye(job="resnet", session=b"S" * 16),
]


@pytest.mark.parametrize("message", OF_AN_OBSERVER, ids=lambda message: type(message).__name__)
def test_observer_tells_nothing_of_the_ranks_secret_and_attempt(message: Datagram) -> None:
    """``mingle-discover`` has no attempt, and signs if its user has the secret, whatever the ranks have."""
    signed, diagnostics = Source(interface="eth0", address="10.0.0.7", signed=True), Diagnostics()
    assert not diagnostics.concerns(IDENTITY, message, signed, 0.0, secured=False)
    same_attempt = msgspec.structs.replace(IDENTITY, attempt="")
    assert diagnostics.concerns(same_attempt, message, signed, 0.0, secured=False)
    assert (diagnostics.other_attempts, diagnostics.signed_without_secret) == ({}, 0)


@pytest.mark.parametrize("kind", [Seek, List])
def test_a_rank_of_the_first_attempt_is_named_though_that_has_no_name(kind: type[Seek | List]) -> None:
    """Slurm counts the restarts of a job from the second run on."""
    more = {"world_size": 8} if kind is Seek else {}
    diagnostics = Diagnostics()
    asked = kind(job="resnet", member=b"A" * 16, rank=1, hostname="node1", **more)
    assert not diagnostics.concerns(IDENTITY, asked, HERE, 0.0, secured=False)
    assert diagnostics.other_attempts == {"none": "10.0.0.7"}


def test_other_jobs_are_named_with_who_spoke_of_them() -> None:
    diagnostics = Diagnostics()
    diagnostics.other(Seek(job="resnte", member=b"A" * 16, world_size=8, hostname="node9", pid=5), HERE, 0.0)
    offer = Offer(job="vit", session=b"S" * 16, host=b"H" * 16, addresses=("10.0.0.7",), port=1, world_size=2)
    diagnostics.other(offer, HERE, 0.0)
    diagnostics.other(Bye(job="gone", session=b"S" * 16), HERE, 0.0)
    assert diagnostics.other_jobs == {
        "resnte": "host node9 (10.0.0.7), pid 5",
        "vit": "host unknown (10.0.0.7), pid 0",
        "gone": "address 10.0.0.7",
    }


def test_a_network_full_of_strangers_costs_a_bounded_memory() -> None:
    diagnostics, remarks, names = Diagnostics(), dict[str, str](), dict[str, None]()
    for number in range(REMEMBERED_PER_KIND + 50):
        stranger = Seek(job=f"job {number}", member=number.to_bytes(16, "big"), world_size=2, rank=1)
        diagnostics.seeker(stranger, HERE, 0.0)
        diagnostics.other(stranger, HERE, 0.0)
        note(remarks, f"name {number}", "first")
        note(names, f"name {number}", None)
    kept = [len(memory) for memory in (diagnostics.seekers, diagnostics.other_jobs, remarks, names)]
    assert kept == [REMEMBERED_PER_KIND] * 4
    # What is known stays up to date although the memory is full.
    note(remarks, "name 0", "second")
    assert remarks["name 0"] == "second"
    note(remarks, "one too many", "never")
    assert "one too many" not in remarks


def test_note_without_a_name_is_dropped() -> None:
    remarks: dict[str, str] = {}
    note(remarks, "", "of nobody")
    assert remarks == {}


def test_a_good_bye_does_not_hide_who_spoke_of_another_job() -> None:
    diagnostics, source = Diagnostics(), Source(interface="lo", address="127.0.0.1")
    diagnostics.other(Seek(job="other", member=b"m" * 16, world_size=2, hostname="node7", pid=7), source, 0.0)
    diagnostics.other(Bye(job="other", session=b"s" * 16), source, 0.0)
    assert diagnostics.other_jobs == {"other": "host node7 (127.0.0.1), pid 7"}


def test_a_job_that_is_heard_no_more_and_a_rank_that_has_just_come_say_nothing_of_now() -> None:
    seek = Seek(job="resnet", member=b"A" * 16, world_size=8, rank=4, hostname="node4", pid=9)
    stranger = Seek(job="resnte", member=b"B" * 16, world_size=8)
    diagnostics = Diagnostics()
    diagnostics.seeker(seek, HERE, 0.0)
    diagnostics.other(stranger, HERE, 0.0)
    assert not diagnostics.lately(1.0).seekers
    assert diagnostics.lately(1.0).other_jobs
    assert diagnostics.lately(KEPT_OUT_SECONDS).seekers
    assert not diagnostics.lately(SEEKING_SECONDS + 1.0).seekers, "it has ended"
    assert not diagnostics.lately(LATELY_SECONDS + 1.0).other_jobs
    diagnostics.other(stranger, HERE, LATELY_SECONDS)
    assert diagnostics.lately(LATELY_SECONDS + 1.0).other_jobs
    assert (len(diagnostics.seekers), len(diagnostics.other_jobs)) == (1, 1), "the report has all"
    diagnostics.joined(seek.member, ProcessInfo())
    diagnostics.seeker(seek, HERE, 100.0)
    assert not diagnostics.lately(101.0).seekers, "it looks again since a moment ago"


def test_seekers_of_another_jobs_host_are_counted() -> None:
    diagnostics = Diagnostics()
    for message in (
        Seek(job="resent", member=b"A" * 16, world_size=2, rank=1),
        List(job="resent", member=b"B" * 16, rank=2, hostname="node2"),
        List(job="resent", member=b"C" * 16, rank=0, hostname="node0"),
        List(job="resent", member=b"D" * 16, hostname="node3"),
        Seek(job="resent", member=b"E" * 16, world_size=1, kind="observer"),
    ):
        diagnostics.other(message, HERE, 0.0)
    assert list(diagnostics.other_seekers["resent"]) == [b"A" * 16, b"B" * 16], "no host, and no observer"
    offer = Offer(job="resent", session=b"S" * 16, host=b"H" * 16, addresses=("10.0.0.7",), port=1, world_size=2)
    diagnostics.other(offer, HERE, 0.0)
    diagnostics.other(Seek(job="resent", member=b"A" * 16, world_size=2, rank=1), HERE, 0.0)
    assert not diagnostics.other_seekers
    assert diagnostics.other_hosts == {"resent": True}


def seek_of(member: bytes, unreached: bytes | None, hostname: str = "node4", how: str = "no answer") -> Seek:
    return Seek(job="resnet", member=member, world_size=8, rank=4, hostname=hostname, unreached=unreached, how=how)


def offer_of(host: bytes, session: bytes, *addresses: str) -> Offer:
    return Offer(
        job="resnet", session=session, host=host, addresses=addresses, port=1, world_size=8, hostname="node0", pid=5
    )


def test_seek_that_names_a_session_names_its_host_and_the_caller() -> None:
    diagnostics = Diagnostics()
    diagnostics.heard_host(offer_of(b"H" * 16, b"S" * 16, "fe80::1", "10.0.0.1"), HERE)
    diagnostics.seeker(seek_of(b"A" * 16, b"S" * 16), HERE, 0.0)
    diagnostics.seeker(seek_of(b"B" * 16, b"T" * 16), HERE, 0.0)  # a session of which nothing was heard
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
    diagnostics, offer = Diagnostics(), offer_of(b"H" * 16, b"S" * 16, "10.0.0.7", "10.1.0.7")
    diagnostics.heard_host(offer, source)
    assert diagnostics.translated == (dict.fromkeys(offer.addresses, source.address) if hidden else {})
    diagnostics.heard_host(offer, HERE)
    assert diagnostics.translated == {}


def test_the_host_of_a_full_session_looks_for_the_job_no_more() -> None:
    """A short job that ran beside a waiting process was named as one that its firewall kept out."""
    diagnostics, offer = Diagnostics(), offer_of(b"A" * 16, b"S" * 16, "10.0.0.7")
    diagnostics.seeker(seek_of(b"A" * 16, b"S" * 16), HERE, 0.0)
    diagnostics.heard_host(offer, HERE)
    assert diagnostics.lately(KEPT_OUT_SECONDS).seekers, "it hosts because it hears no other host"
    diagnostics.heard_host(msgspec.structs.replace(offer, state="running"), HERE)
    assert not diagnostics.lately(KEPT_OUT_SECONDS).seekers


def test_pair_is_forgotten_once_it_has_a_seat_or_is_said_no_more() -> None:
    diagnostics = Diagnostics()
    diagnostics.heard_host(offer_of(b"H" * 16, b"S" * 16, "10.0.0.1"), HERE)
    for number in range(REMEMBERED_PER_KIND + 1):  # a stranger invents some
        diagnostics.seeker(seek_of(bytes([number]) * 16, b"S" * 16), HERE, float(number > 0))
    assert len(diagnostics.unreached) == REMEMBERED_PER_KIND
    diagnostics.joined(bytes([1]) * 16, ProcessInfo())
    assert len(diagnostics.unreached) == REMEMBERED_PER_KIND - 1
    assert len(diagnostics.lately(TOLD_AGAIN_SECONDS + 0.5).unreached) == REMEMBERED_PER_KIND - 2
    diagnostics = diagnostics.without_mended(TOLD_AGAIN_SECONDS + 1.5)
    assert diagnostics.unreached == {}


def test_forged_pairs_leave_room_for_the_hosts_that_this_process_does_not_reach() -> None:
    diagnostics, us = Diagnostics(member=IDENTITY.member), []
    diagnostics.heard_host(offer_of(b"H" * 16, b"S" * 16, "10.0.0.1"), HERE)
    for number in range(REMEMBERED_PER_KIND + 1):
        diagnostics.seeker(seek_of(bytes([number]) * 16, b"S" * 16), HERE, 0.0)
    for number in range(REMEMBERED_PER_KIND + 1):
        host = bytes([200 - number]) * 16
        us.append((IDENTITY.member, host))
        diagnostics.does_not_reach(IDENTITY, offer_of(host, host, "10.0.0.2"), "no answer", 0.0)
        assert us[0] in diagnostics.unreached
        assert len(diagnostics.unreached) == REMEMBERED_PER_KIND
    assert list(diagnostics.unreached) == us[:-1]


def failed(member: bytes, rank: int | None, hostname: str) -> Failed:
    return Failed(job="resnet", member=member, rank=rank, hostname=hostname, pid=9, reason="no room")


def test_process_that_fails_is_named_until_another_one_comes_in_its_place() -> None:
    for comes in ("asks", "hosts", "joins"):
        diagnostics = Diagnostics()
        diagnostics.seeker(Seek(job="resnet", member=b"A" * 16, world_size=8, rank=0, hostname="node0"), HERE, 0.0)
        diagnostics.has_failed(failed(b"A" * 16, 0, "node0"), HERE)
        assert diagnostics.seekers == {}
        assert [each.text for each in diagnostics.failed.values()] == [
            "rank 0 on host node0 (10.0.0.7), pid 9 has failed: no room"
        ]
        for rank, hostname in ((0, "node1"), (1, "node0"), (0, "node0")):
            assert diagnostics.failed
            if comes == "asks":
                diagnostics.seeker(
                    Seek(
                        job="resnet",
                        member=hostname.encode() + bytes([rank]) * 11,
                        world_size=8,
                        rank=rank,
                        hostname=hostname,
                    ),
                    HERE,
                    1.0,
                )
            elif comes == "joins":
                diagnostics.joined(b"B" * 16, ProcessInfo(rank=rank, hostname=hostname))
            elif rank == 0:
                offer = offer_of(b"B" * 16, hostname.encode() + bytes(11), "10.0.0.7")
                diagnostics.heard_host(msgspec.structs.replace(offer, hostname=hostname), HERE)
        assert not diagnostics.failed


def test_so_many_that_failed_are_remembered() -> None:
    diagnostics = Diagnostics()
    for number in range(REMEMBERED_PER_KIND + 1):
        diagnostics.has_failed(failed(bytes([number]) * 16, None, f"node{number}"), HERE)
    assert len(diagnostics.failed) == REMEMBERED_PER_KIND


def test_stranger_that_comes_and_fails_under_ever_new_ids_fills_no_memory() -> None:
    diagnostics = Diagnostics()
    for number in range(10 * REMEMBERED_PER_KIND):
        member = number.to_bytes(16, "big")
        diagnostics.seeker(Seek(job="resnet", member=member, world_size=8, rank=4, hostname="node4"), HERE, 0.0)
        diagnostics.has_failed(failed(member, 4, "node4"), HERE)
    kept = (diagnostics.seekers, diagnostics.failed, diagnostics.heard_at)
    assert sum(map(len, kept)) <= 2 * REMEMBERED_PER_KIND


def test_pair_keeps_the_addresses_by_which_it_was_named_unless_they_are_link_local() -> None:
    diagnostics, link_local = Diagnostics(), Source(interface="eth0", address="fe80::7")
    diagnostics.heard_host(offer_of(b"H" * 16, b"S" * 16, "10.0.0.1"), HERE)
    said = []
    for source, how in ((link_local, "fe80::1 x"), (HERE, "10.0.0.1 x"), (link_local, "fe80::1 x")):
        diagnostics.seeker(seek_of(b"A" * 16, b"S" * 16, how=how), source, len(said))
        (each,) = diagnostics.unreached.values()
        said.append((each.caller, each.how, each.at))
    assert said == [
        ("rank 4 on host node4 (fe80::7), pid 0", "fe80::1 x", 0),
        ("rank 4 on host node4 (10.0.0.7), pid 0", "10.0.0.1 x", 1),
        ("rank 4 on host node4 (10.0.0.7), pid 0", "10.0.0.1 x", 2),
    ]
