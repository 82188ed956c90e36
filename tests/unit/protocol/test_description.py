"""What a host says of itself and of its session: addresses, OFFER, state and roster."""

from __future__ import annotations

from unittest import mock

import pytest

from mingle.protocol.machine import Endpoints
from mingle.protocol.session.description import SEATS_PER_FRAME, Description
from mingle.protocol.session.phases import Acknowledging, Committed, Confirming, Open, Sealing, State
from mingle.protocol.session.registrar import Registrar
from mingle.wire import frames
from mingle.wire.datagrams import MAX_ADDRESSES
from mingle.wire.frame_codec import encode_frame
from mingle.wire.frames import ProcessInfo
from tests.support.frames import read
from tests.support.lone_host import Alone
from tests.support.scripted_host import IDENTITY, SESSION


def test_advertised_addresses_are_named_first_and_lead_to_the_first_own_one() -> None:
    alone = Alone(advertised=("203.0.113.9",))
    assert alone.host.offer().addresses == ("203.0.113.9", "10.0.0.1", "10.1.0.1")
    seat = alone.host.registrar.seats.host
    assert [(path.host_address, path.local_address, path.interface) for path in seat.applicant.paths] == [
        ("10.0.0.1", "10.0.0.1", "eth0"),
        ("10.1.0.1", "10.1.0.1", "eth1"),
        ("203.0.113.9", "10.0.0.1", "eth0"),
    ]
    assert seat.prefix_lengths == {"203.0.113.9": 0, "10.0.0.1": 24, "10.1.0.1": 24}
    assert seat.applicant.who == ProcessInfo(hostname="h0", pid=1, address="10.0.0.1", rank=0)


def test_an_address_that_is_advertised_and_its_own_keeps_its_subnet() -> None:
    assert Alone(advertised=("10.1.0.1",)).host.registrar.seats.host.prefix_lengths["10.1.0.1"] == 24


def test_an_offer_holds_no_more_addresses_than_fit() -> None:
    alone = Alone(addresses=2 * MAX_ADDRESSES, advertised=("203.0.113.9",))
    assert len(alone.host.offer().addresses) == MAX_ADDRESSES
    assert alone.host.offer().addresses[0] == "203.0.113.9"


@pytest.mark.parametrize(
    ("phase", "offered", "told", "seconds", "port"),
    [
        (Open, "open", "open", 30.0, 0),
        (Confirming, "open", "open", 30.0, 0),
        (Sealing, "sealed", "sealed", 29.0, 0),
        (Acknowledging, "sealed", "sealed", 29.0, 5000),
        (Committed, "sealed", "running", 29.0, 5000),
    ],
)
def test_the_state_is_told_by_phase(phase: type[State], offered: str, told: str, seconds: float, port: int) -> None:
    alone = Alone()
    alone.come_to(phase)
    assert alone.host.offer().state == offered
    running = alone.running(30.0)
    assert (running.state, running.seconds, running.store_port) == (told, seconds, port)
    assert running.store_address == ("10.0.0.1" if port else None)
    assert running.joined == ((0,) if phase is Open else (0, 1))


@pytest.mark.parametrize("count", [0, 1, SEATS_PER_FRAME, 2 * SEATS_PER_FRAME + 1])
def test_a_large_roster_comes_in_parts_that_fit(count: int) -> None:
    seats = [
        frames.Seat(rank=rank, local_rank=0, node_rank=rank, hostname="h", address="10.0.0.1", pid=1)
        for rank in range(count)
    ]
    registrar = mock.create_autospec(Registrar, instance=True)
    registrar.roster.return_value = seats
    description = Description(IDENTITY, SESSION, Endpoints(addresses=(), port=4000), 0.0)
    parts = [read(encode_frame(part)) for part in description.roster(registrar)]
    assert parts == [
        frames.Roster(first=first, total=count, seats=tuple(seats[first : first + SEATS_PER_FRAME]))
        for first in range(0, count, SEATS_PER_FRAME)
    ]
