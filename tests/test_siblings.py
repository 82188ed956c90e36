"""What processes that share a UDP port hand to each other; several of them are played in this one."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import msgspec
import pytest

from mingle.network import siblings
from mingle.network.siblings import Siblings
from mingle.network.transport import Received
from mingle.wire import datagrams
from mingle.wire.datagrams import Seek
from tests.bystanders import free_udp_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")

QUESTION = datagrams.encode(Seek(job="a job", member=b"m" * 16, world_size=2))
SOURCES = [("192.0.2.7", 40000), ("fe80::7", 40000, 0, 3)]


def heard(data: bytes = QUESTION, source: siblings.SocketAddress = ("192.0.2.7", 40000)) -> Received:
    """A unicast datagram that came in at the shared port."""
    family: siblings.Version = "4" if len(source) == 2 else "6"
    return Received(data, "eth0", source, family, False, False, "192.0.2.1", shared=True)


@pytest.fixture
def family() -> Iterator[list[Siblings]]:
    port = free_udp_port()
    with contextlib.ExitStack() as stack:
        made = [Siblings(port) for _ in range(3)]
        for each in made:
            stack.callback(each.close)
        yield made


@pytest.mark.parametrize("source", SOURCES)
def test_all_others_get_it_with_its_source(family: list[Siblings], source: siblings.SocketAddress) -> None:
    family[1].hand_on(heard(source=source), 0.0)
    assert family[1].receive() == []
    for each in (family[0], family[2]):
        (received,) = each.receive()
        assert received == heard(datagrams.as_repeated(QUESTION), source)
        assert received.via is None
        assert each.receive() == []


def test_nothing_is_handed_on_twice(family: list[Siblings]) -> None:
    family[0].hand_on(heard(), 0.0)
    (received,) = family[1].receive()
    family[1].hand_on(received, 0.0)
    assert len(family[2].receive()) == 1
    assert family[0].receive() == []


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1", QUESTION + bytes(datagrams.MAX_BYTES)])
def test_what_is_no_datagram_of_ours_is_not_handed_on(family: list[Siblings], data: bytes) -> None:
    family[0].hand_on(heard(data), 0.0)
    assert family[1].receive() == []


def test_a_flood_is_not_multiplied(family: list[Siblings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "HANDED_AT_ONCE", 3.0)
    monkeypatch.setattr(siblings, "HANDED_PER_SECOND", 2.0)
    for _ in range(10):
        family[0].hand_on(heard(), 5.0)
    assert len(family[1].receive()) == 3
    for _ in range(10):
        family[0].hand_on(heard(), 6.0)
    assert len(family[1].receive()) == 2


@pytest.mark.parametrize("source", ["a.name.to.look.up", "192.0.2.7 ", ""])
def test_what_other_programs_send_is_dropped(family: list[Siblings], source: str) -> None:
    assert family[0].socket is not None
    own = family[0].socket.getsockname()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"\xc1 no MessagePack", own)
        stranger.sendto(bytes(8192), own)
        stranger.sendto(msgspec.msgpack.encode([QUESTION, "eth0", source, 1, 0, "4", False, ""]), own)
    family[1].hand_on(heard(), 0.0)
    assert [received.source for received in family[0].receive()] == [("192.0.2.7", 40000)]


def test_a_port_is_a_family_of_its_own_and_names_are_used_again(family: list[Siblings]) -> None:
    with contextlib.closing(Siblings(free_udp_port())) as stranger:
        family[0].hand_on(heard(), 0.0)
        assert stranger.receive() == []
    assert family[1].socket is not None
    name = family[1].socket.getsockname()
    family[1].close()
    family[1].close()
    assert family[1].receive() == []
    family[1].hand_on(heard(), 0.0)  # it is gone: nothing happens
    port = int(name.partition(b"udp-")[2].partition(b"/")[0])
    with contextlib.closing(Siblings(port)) as heir:
        assert heir.socket is not None
        assert heir.socket.getsockname() == name


def test_more_than_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "MAX_SIBLINGS", 1)
    port = free_udp_port()
    with contextlib.closing(Siblings(port)), contextlib.closing(Siblings(port)) as second:
        assert second.socket is None
        second.hand_on(heard(), 0.0)
        assert second.receive() == []
