"""What a host says of itself."""

from __future__ import annotations

import msgspec
import pytest

from mingle.protocol.introduction import SEATS_PER_FRAME, Introduction, roster_parts
from mingle.protocol.machine import Address, Endpoints, Identity
from mingle.protocol.registrar import Admission, Phase, Registrar, Seated, roster_digest
from mingle.protocol.seating import Place
from mingle.wire import frames
from mingle.wire.datagrams import MAX_ADDRESSES
from mingle.wire.frames import Path, ProcessInfo
from mingle.wire.framing import MAX_FRAME_BYTES, encode_frame

from .registrar_port import RecordingPort

SESSION, OWN = b"S" * 16, b"H" * 16
IDENTITY = Identity(
    job="job",
    attempt="2",
    member=OWN,
    rank=0,
    world_size=2,
    node="n0",
    who=ProcessInfo(hostname="h0", pid=1),
    node_rank=3,
)


def introduction(*, addresses: int = 2, advertised: tuple[str, ...] = ("203.0.113.9",)) -> Introduction:
    return Introduction(
        identity=IDENTITY,
        session=SESSION,
        endpoints=Endpoints(
            addresses=tuple(Address(f"10.{each}.0.1", f"eth{each}", 24) for each in range(addresses)),
            advertised=advertised,
            port=4000,
        ),
        started=10.0,
    )


def seats(phase: Phase, *, size: int = 2, store_address: str = "10.1.0.1") -> Registrar:
    """A session in which everybody sits on a node of its own."""
    found = Registrar(SESSION, introduction().seat(), RecordingPort(), Admission(size))
    found.phase, found.store_address = phase, store_address
    for rank in range(1, size):
        name = rank.to_bytes(16, "big")
        who = ProcessInfo(hostname="ü" * 126, pid=2**31, address=f"10.0.{rank // 256}.{rank % 256}")
        join = frames.Join(world_size=size, rank=rank, node=f"n{rank}", who=who)
        found.seats[name] = Seated(name, rank, join)
        found._ranks[rank] = name
    for rank, name in enumerate(found.seats):
        found.places[name] = Place(rank=rank, local_rank=0, local_world_size=1, node_rank=rank, num_nodes=size)
    return found


def test_advertised_addresses_are_named_first_and_lead_to_the_first_own_one() -> None:
    ours = introduction()
    assert ours.announced() == ("203.0.113.9", "10.0.0.1", "10.1.0.1")
    assert ours.path("203.0.113.9") == Path(host_address="203.0.113.9", local_address="10.0.0.1", interface="eth0")
    assert ours.path("10.1.0.1") == Path(host_address="10.1.0.1", local_address="10.1.0.1", interface="eth1")
    assert ours.seat().prefix_lengths == {"203.0.113.9": 0, "10.0.0.1": 24, "10.1.0.1": 24}


def test_an_address_that_is_advertised_and_its_own_keeps_its_subnet() -> None:
    assert introduction(advertised=("10.1.0.1",)).seat().prefix_lengths["10.1.0.1"] == 24


def test_an_offer_holds_no_more_addresses_than_fit() -> None:
    ours = introduction(addresses=2 * MAX_ADDRESSES)
    assert len(ours.offer(seats(Phase.OPEN)).addresses) == MAX_ADDRESSES
    assert ours.offer(seats(Phase.OPEN)).addresses[0] == "203.0.113.9"


def test_it_applies_for_its_own_seat_like_anybody() -> None:
    join = introduction().join()
    assert (join.rank, join.world_size, join.node, join.node_rank) == (0, 2, "n0", 3)
    assert join.who == ProcessInfo(hostname="h0", pid=1, address="10.0.0.1", rank=0)
    assert [path.host_address for path in join.paths] == ["10.0.0.1", "10.1.0.1", "203.0.113.9"]


@pytest.mark.parametrize(
    ("phase", "offered", "told", "seconds", "port"),
    [
        (Phase.OPEN, "open", "open", 20.0, 0),
        (Phase.CONFIRMING, "open", "open", 20.0, 0),
        (Phase.SEALING, "sealed", "sealed", 5.0, 0),
        (Phase.SEALED, "sealed", "sealed", 5.0, 5000),
        (Phase.RUNNING, "sealed", "running", 5.0, 5000),
    ],
)
def test_how_it_stands_is_told_by_phase(phase: Phase, offered: str, told: str, seconds: float, port: int) -> None:
    ours, session = introduction(), seats(phase)
    assert ours.offer(session).state == offered
    running = ours.running(session, 30.0, sealed_since=25.0, store_port=5000)
    assert (running.state, running.seconds, running.store_port) == (told, seconds, port)
    assert running.store_address == ("10.1.0.1" if port else "")
    assert (running.joined, running.missing) == ((0, 1), ())


def test_its_place_names_where_its_store_listens() -> None:
    session = seats(Phase.RUNNING, store_address="203.0.113.9")
    formation = introduction().formation(session, 5000)
    assert (formation.rank, formation.node_rank, formation.num_nodes) == (0, 0, 2)
    assert (formation.store_address, formation.store_port, formation.interface) == ("10.0.0.1", 5000, "eth0")
    assert formation.roster_digest == roster_digest(session.roster())


def test_hello_and_good_bye_name_the_job_and_the_attempt() -> None:
    hello, bye = introduction().call(b"T" * 16, "rival"), introduction().bye()
    assert (hello.job, hello.attempt, hello.session, hello.purpose) == ("job", "2", b"T" * 16, "rival")
    assert hello.who.address == "10.0.0.1"
    assert (bye.job, bye.attempt, bye.session) == ("job", "2", SESSION)


def test_a_large_roster_comes_in_parts_that_fit() -> None:
    session = seats(Phase.RUNNING, size=2 * SEATS_PER_FRAME + 1)
    parts = list(roster_parts(session))
    assert [part.first for part in parts] == [0, SEATS_PER_FRAME, 2 * SEATS_PER_FRAME]
    assert {part.total for part in parts} == {len(session.seats)}
    assert [seat for part in parts for seat in part.seats] == session.roster()
    assert max(len(encode_frame(part)) for part in parts) <= MAX_FRAME_BYTES


def test_before_the_seal_there_is_no_roster() -> None:
    assert list(roster_parts(seats(Phase.CONFIRMING))) == []


def test_nonces_are_new_in_every_hello() -> None:
    call = introduction().call(SESSION, "probe")
    hellos = [call.hello(None) for _ in range(2)]
    assert hellos[0].nonce != hellos[1].nonce
    assert hellos[0].session_hash != hellos[1].session_hash
    nonce, session_hash = hellos[1].nonce, hellos[1].session_hash
    assert msgspec.structs.replace(hellos[0], nonce=nonce, session_hash=session_hash) == hellos[1]
