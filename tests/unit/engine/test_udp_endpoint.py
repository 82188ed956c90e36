"""Datagrams, as a machine hears them and has them sent."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.engine.udp_endpoint import REFRESH_SECONDS
from mingle.network import transport
from mingle.network.peers import ROUND_SECONDS
from mingle.protocol.effects import Answer, Multicast
from mingle.protocol.events import Heard, TimerDue
from mingle.wire import datagrams
from mingle.wire.datagrams import Bye, List, Offer, Seek
from tests.support.failing import refusing
from tests.support.noting_driver import MEMBER, SEEK, SESSION, Noting, fail, let_lo_have
from tests.support.ports import free_udp_port


def test_own_multicast_comes_back_with_its_source(driver: Noting) -> None:
    driver.notes.to_do.append(Multicast(SEEK))
    message, source = driver.hear()
    assert message == SEEK
    assert (source.interface, source.multicast, source.address) == ("lo", True, "127.0.0.1")


def offer(*addresses: str) -> Offer:
    addresses = addresses or ("127.0.0.1",)
    return Offer(job="a job", session=SESSION, host=MEMBER, addresses=addresses, port=9, world_size=2)


@contextlib.contextmanager
def asker() -> Iterator[socket.socket]:
    """A program that asks by unicast."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.bind(("127.0.0.1", 0))
        asking.settimeout(30)
        yield asking


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell a broadcast from a unicast")
def test_a_broadcast_is_dropped(driver: Noting) -> None:
    """A unicast of the same bytes is heard."""
    question = datagrams.padded(List(member=MEMBER), datagrams.MAX_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for destination in ("127.255.255.255", "127.0.0.9"):
            stranger.sendto(question, (destination, driver.network.port))
    assert driver.hear()[0].member == MEMBER
    assert len(driver.notes.heard()) == 1
    assert driver.evidence.facts().rejected == {"broadcast": 1}


def test_an_offer_names_the_address_of_the_interface_it_leaves_by_first(driver: Noting) -> None:
    driver.notes.to_do.append(Multicast(offer("192.0.2.1", "127.0.0.1", "192.0.2.2")))
    message, _ = driver.hear()
    assert message.addresses == ("127.0.0.1", "192.0.2.1", "192.0.2.2")


@pytest.fixture
def with_peer() -> Iterator[Noting]:
    """A driver whose only peer is this machine."""
    peers = (Peer("127.0.0.1", None),)
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port(), peers=peers), stack)


def test_peers_are_asked_with_a_padded_question(with_peer: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    with_peer.notes.says = SEEK
    message, source = with_peer.hear()
    assert source.multicast is False
    assert len(message.padding) > 800
    let_lo_have(monkeypatch, "127.0.0.2")
    with_peer.interfaces.scan_due = 0.0
    with_peer.turn()
    due = with_peer.udp.peers.next_timer(now := time.monotonic())
    assert due is not None
    assert due <= now + ROUND_SECONDS, "another way may lead to them"


def test_what_is_said_to_peers_reaches_them_beside_the_group(with_peer: Noting) -> None:
    with_peer.notes.says = Bye(job="a job", session=SESSION)
    assert with_peer.hear()[0] == with_peer.notes.says  # so that the peer's address is known
    with_peer.notes.told.clear()
    with_peer.notes.says = None
    with_peer.notes.to_do.append(Multicast(SEEK, to_peers=True))
    while {each.source.multicast for each in with_peer.notes.told if isinstance(each, Heard)} != {True, False}:
        with_peer.notes.due = time.monotonic() + 0.2
        with_peer.carry_out()
        with_peer.turn()
    assert SEEK.member in {message.member for message in with_peer.notes.heard() if isinstance(message, Seek)}


def test_a_question_to_the_group_is_as_long_as_its_answer_may_be_and_is_answered_by_unicast(driver: Noting) -> None:
    driver.notes.to_do.append(Multicast(SEEK, padded=True))
    question, source = driver.hear()
    assert source.multicast
    assert len(question.padding) == datagrams.MAX_BYTES - len(datagrams.encode(SEEK)) - 11
    driver.notes.told.clear()
    driver.notes.to_do.append(Answer(source, offer()))
    answer, source = driver.hear()
    assert (answer, source.multicast) == (offer(), False)
    assert not driver.evidence.facts().rejected["unpadded"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
@pytest.mark.parametrize("hosted_by", ["first", "last", "nobody"])
def test_a_unicast_question_reaches_every_process_of_the_host_and_is_answered_once(hosted_by: str) -> None:
    network = Network(interfaces=("lo",), port=free_udp_port())
    with contextlib.ExitStack() as stack:
        drivers = {name: Noting(network, stack) for name in ("first", "middle", "last")}
        asking = stack.enter_context(asker())
        if hosted_by in drivers:
            drivers[hosted_by].notes.says = offer("192.0.2.1", "127.0.0.1")
        asking.sendto(datagrams.padded(SEEK, datagrams.MAX_BYTES), ("127.0.0.1", network.port))
        drivers["last"].turn_until(Heard)  # who opened the port last receives it
        if hosted_by == "last":
            for name in ("first", "middle"):  # it will be answered: nobody else is asked
                assert drivers[name].udp.relay.receive() == []
            return
        for name in ("first", "middle"):
            message, source = drivers[name].hear()
            assert msgspec.structs.replace(message, padding=b"") == SEEK
            assert (source.multicast, source.address) == (False, "127.0.0.1")
        assert drivers["last"].udp.relay.receive() == []
        drivers["middle"].notes.to_do.append(Answer(source, offer("192.0.2.1", "127.0.0.1")))
        drivers["middle"].carry_out()
        data, answerer = asking.recvfrom(2048)
        assert answerer == ("127.0.0.1", network.port), "from where it was asked: a firewall lets nothing else in"
        assert datagrams.decode(data) == offer("127.0.0.1", "192.0.2.1"), "the address that was reached comes first"


def test_a_question_shorter_than_its_answer_gets_none(driver: Noting) -> None:
    """Whoever forges the sender of a question makes us send no more bytes there than it sends itself."""
    answer = datagrams.encode(offer())
    with asker() as asking:
        for length in (len(answer) - 1, len(answer) + 20):
            asking.sendto(datagrams.padded(SEEK, length), ("127.0.0.1", driver.network.port))
            _, source = driver.hear()
            driver.notes.told.clear()
            driver.notes.to_do.append(Answer(source, offer()))
            driver.carry_out()
        assert asking.recv(2000) == answer
        asking.setblocking(False)
        with pytest.raises(BlockingIOError):
            asking.recv(2000)
    assert driver.evidence.facts().rejected["unpadded"] == 1


def test_socket_that_could_not_be_opened_is_opened_with_a_scan(driver: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of IPv6's duplicate check, or of a shortage of memory, changes nothing that a scan finds."""
    sockets = driver.udp.transport
    assert sockets is not None
    with monkeypatch.context() as patched:
        for step in ("rejoin", "open_receiver"):
            patched.setattr(transport, step, refusing(errno.ENOBUFS))
        driver.udp.handle_timer(time.monotonic() + REFRESH_SECONDS)
        assert list(sockets.failures) == ["lo IPv4"]
    driver.interfaces.scan_due = 0.0
    driver.notes.due = time.monotonic()
    driver.turn_until(TimerDue)
    assert not sockets.failures
    driver.notes.to_do.append(Multicast(SEEK))
    assert driver.hear()[0] == SEEK


def test_a_datagram_that_a_machine_can_not_handle_is_dropped(driver: Noting, caplog: pytest.LogCaptureFixture) -> None:
    driver.notes.instead[Heard] = fail
    driver.notes.to_do += [Multicast(SEEK)] * 3
    driver.turn_until_dropped(3)
    assert [record.exc_info is not None for record in caplog.records] == [True]
    driver.notes.instead.clear()
    driver.notes.to_do.append(Multicast(SEEK))
    assert driver.hear()[0] == SEEK
