"""What a process says of itself, and the records of a job that has formed."""

from __future__ import annotations

import pytest

from mingle.protocol.machine import Identity, lone_formation, roster_digest, scoped
from mingle.wire.frames import MAX_OWN_ADDRESSES, ProcessInfo, Seat

WHO = ProcessInfo(hostname="h1", pid=7)


def identity(addresses: int = 2) -> Identity:
    own = {f"10.0.{number // 256}.{number % 256}" for number in range(addresses)}
    return Identity(
        job="job", attempt="2", member=b"M" * 16, rank=1, world_size=3, node="n1", who=WHO, addresses=lambda: own
    )


def test_a_process_is_the_same_in_each_of_its_messages() -> None:
    own = identity()
    for message in (own.seek(), own.list(), own.call(b"S" * 16, "join")):
        assert (message.job, message.attempt, message.member) == ("job", "2", b"M" * 16)
    for question in (own.seek(), own.list()):
        assert (question.rank, question.hostname, question.pid) == (1, "h1", 7)


@pytest.mark.parametrize(
    ("count", "said"), [(0, 0), (MAX_OWN_ADDRESSES, MAX_OWN_ADDRESSES), (MAX_OWN_ADDRESSES + 1, 0)]
)
def test_a_join_has_all_addresses_of_the_machine_or_none(count: int, said: int) -> None:
    addresses = identity(count).join(WHO, ()).addresses
    assert len(addresses) == said
    assert list(addresses) == sorted(addresses)


@pytest.mark.parametrize(
    ("address", "needed"),
    [("fe80::1", "fe80::1%eth0"), ("FE80::1", "FE80::1%eth0"), ("fd00::1", "fd00::1"), ("10.0.0.1", "10.0.0.1")],
)
def test_a_link_local_address_needs_its_interface(address: str, needed: str) -> None:
    assert scoped(address, "eth0") == needed


def test_a_job_of_one_process_forms_on_loopback() -> None:
    alone = lone_formation(b"S" * 16, 4711, local_rank=3)
    assert (alone.store_address, alone.store_port, alone.address) == ("127.0.0.1", 4711, "127.0.0.1")
    assert (alone.place.rank, alone.place.world_size, alone.place.local_rank) == (0, 1, 3)


def test_the_digest_differs_for_each_roster() -> None:
    one, other = (
        Seat(rank=rank, local_rank=0, node_rank=rank, hostname="h", address="10.0.0.1", pid=1) for rank in range(2)
    )
    digests = [roster_digest(roster) for roster in ([one, other], [other, one], [one], [])]
    assert len(set(digests)) == len(digests)
    assert roster_digest((one, other)) == digests[0], "a tuple of the same seats is the same roster"
