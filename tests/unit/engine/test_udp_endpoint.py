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
from mingle.network import transport
from mingle.network.peers import ROUND_SECONDS
from mingle.protocol.effects import Answer, Multicast
from mingle.protocol.events import (
    Heard,
    TimerDue,
)
from mingle.wire import datagrams
from mingle.wire.datagrams import Bye, List, Offer, Seek
from tests.support.noting_driver import MEMBER, SEEK, SESSION, Noting, fail, let_lo_have
from tests.support.ports import free_udp_port


@pytest.fixture
def driver() -> Iterator[Noting]:
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port()), stack)


def test_own_multicast_comes_back_with_its_source(driver: Noting) -> None:
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    driver.notes.to_do.append(Multicast(seek))
    message, source = driver.hear()
    assert message == seek
    assert (source.interface, source.multicast, source.address) == ("lo", True, "127.0.0.1")


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
    addresses = ("192.0.2.1", "127.0.0.1", "192.0.2.2")
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=addresses, port=9, world_size=2)
    driver.notes.to_do.append(Multicast(offer))
    message, _ = driver.hear()
    assert message.addresses == ("127.0.0.1", "192.0.2.1", "192.0.2.2")


def test_peers_are_asked_with_a_padded_question(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_udp_port()
    with contextlib.ExitStack() as stack:
        driver = Noting(Network(interfaces=("lo",), port=port, peers=(Peer("127.0.0.1", None),)), stack)
        driver.notes.says = Seek(job="a job", member=MEMBER, world_size=2)
        message, source = driver.hear()
        assert source.multicast is False
        assert len(message.padding) > 800
        driver.notes.told.clear()
        driver.notes.says = Bye(job="a job", session=SESSION)
        while driver.hear()[0] != driver.notes.says:
            driver.notes.told.clear()
        let_lo_have(monkeypatch, "127.0.0.2")
        driver.interfaces.scan_due = 0.0
        driver.turn()
        due = driver.udp.peers.next_timer(now := time.monotonic())
        assert due is not None
        assert due <= now + ROUND_SECONDS, "another way may lead to them"


@pytest.mark.parametrize("padded", [True, False])
def test_a_question_to_the_group_is_answered_by_unicast_only_if_it_is_long_enough(driver: Noting, padded: bool) -> None:
    driver.notes.to_do.append(Multicast(SEEK, padded=padded))
    question, source = driver.hear()
    assert source.multicast
    assert len(question.padding) == (0 if not padded else datagrams.MAX_BYTES - len(datagrams.encode(SEEK)) - 11)
    driver.notes.told.clear()
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    driver.notes.to_do += [Answer(source, offer), *([] if padded else [Multicast(offer)])]
    answer, source = driver.hear()
    assert (answer, source.multicast) == (offer, not padded)
    assert driver.evidence.facts().rejected["unpadded"] == (not padded)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
@pytest.mark.parametrize("hosted_by", ["first", "last", "nobody"])
def test_a_unicast_question_reaches_every_process_of_the_host_and_is_answered_once(hosted_by: str) -> None:
    network = Network(interfaces=("lo",), port=free_udp_port())
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("192.0.2.1", "127.0.0.1"), port=9, world_size=2)
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    with contextlib.ExitStack() as stack:
        drivers = {name: Noting(network, stack) for name in ("first", "middle", "last")}
        asker = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        asker.bind(("127.0.0.1", 0))
        asker.settimeout(30)
        if hosted_by in drivers:
            drivers[hosted_by].notes.says = offer
        asker.sendto(datagrams.padded(seek, datagrams.MAX_BYTES), ("127.0.0.1", network.port))
        drivers["last"].turn_until(Heard)  # who opened the port last receives it
        if hosted_by == "last":
            for name in ("first", "middle"):  # it will be answered: nobody else is asked
                assert drivers[name].udp.relay.receive() == []
            return
        for name in ("first", "middle"):
            message, source = drivers[name].hear()
            assert msgspec.structs.replace(message, padding=b"") == seek
            assert (source.multicast, source.address) == (False, "127.0.0.1")
        assert drivers["last"].udp.relay.receive() == []
        drivers["middle"].notes.to_do.append(Answer(source, offer))
        drivers["middle"].carry_out()
        data, answerer = asker.recvfrom(2048)
        assert answerer == ("127.0.0.1", network.port), "from where it was asked: a firewall lets nothing else in"
        answer = datagrams.decode(data)
        assert isinstance(answer, Offer)
        assert answer.addresses == ("127.0.0.1", "192.0.2.1"), "the address that the asker has reached comes first"


def test_a_question_shorter_than_its_answer_gets_none() -> None:
    """Whoever forges the sender of a question makes us send no more bytes there than it sends itself."""
    port = free_udp_port()
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    with contextlib.ExitStack() as stack:
        driver = Noting(Network(interfaces=("lo",), port=port, family="4"), stack)
        asking = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        asking.bind(("127.0.0.1", 0))
        seek, answer = Seek(job="a job", member=MEMBER, world_size=2), datagrams.encode(offer)
        for length in (len(answer) - 1, len(answer) + 20):
            asking.sendto(datagrams.padded(seek, length), ("127.0.0.1", port))
            message, source = driver.hear()
            driver.notes.told.clear()
            assert message.member == MEMBER
            driver.notes.to_do.append(Answer(source, offer))
            driver.carry_out()
        asking.settimeout(30)
        assert asking.recv(2000) == answer
        asking.setblocking(False)
        with pytest.raises(BlockingIOError):
            asking.recv(2000)
        assert driver.evidence.facts().rejected["unpadded"] == 1


def test_a_socket_that_could_not_be_opened_is_opened_with_a_later_scan(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of IPv6's duplicate check, or of a shortage of memory, changes nothing that a scan finds."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    assert driver.udp.transport is not None
    with monkeypatch.context() as patched:
        patched.setattr(transport, "rejoin", refuse)
        patched.setattr(transport, "open_receiver", refuse)
        driver.udp._refresh_due = 0.0
        driver.notes.due = time.monotonic()
        driver.turn_until(TimerDue)
        assert list(driver.udp.transport.failures) == ["lo IPv4"]
    driver.notes.told.clear()
    driver.interfaces.scan_due = 0.0
    driver.notes.due = time.monotonic()
    driver.turn_until(TimerDue)
    assert not driver.udp.transport.failures
    driver.notes.to_do.append(Multicast(Seek(job="a job", member=MEMBER, world_size=2)))
    driver.turn_until(Heard)


def test_a_datagram_that_a_machine_can_not_handle_is_dropped(
    driver: Noting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    driver.notes.instead[Heard] = fail
    driver.notes.to_do += [Multicast(seek)] * 3
    deadline = time.monotonic() + 30
    while driver.evidence.facts().rejected["fault"] < 3:
        assert time.monotonic() < deadline
        driver.notes.due = time.monotonic()
        driver.carry_out()
        driver.turn()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    driver.notes.instead.clear()
    driver.notes.to_do.append(Multicast(seek))
    assert driver.hear()[0] == seek


def test_what_is_said_to_peers_reaches_them_beside_the_group() -> None:
    port = free_udp_port()
    with contextlib.ExitStack() as stack:
        driver = Noting(Network(interfaces=("lo",), port=port, peers=(Peer("127.0.0.1", None),)), stack)
        driver.notes.says = Bye(job="a job", session=SESSION)
        driver.hear()  # so that the peer's address is known
        driver.notes.told.clear()
        driver.notes.says = None
        driver.notes.to_do.append(Multicast(SEEK, to_peers=True))
        while {each.source.multicast for each in driver.notes.told if isinstance(each, Heard)} != {True, False}:
            driver.notes.due = time.monotonic() + 0.2
            driver.carry_out()
            driver.turn()
        assert [message for message in driver.notes.heard() if isinstance(message, Seek) and message.member == MEMBER]
