"""The sockets of a ping, on `lo`."""

from __future__ import annotations

import socket
import threading
import time
from ipaddress import IPv4Interface

import pytest
from msgspec import structs

from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.observe import ping
from mingle.observe.observer import Observer
from mingle.observe.pinger import Pinger
from mingle.wire import datagrams, echo
from mingle.wire.datagrams import BROWSE_GROUP
from mingle.wire.echo import EchoReply, EchoRequest
from tests.support.bystanders import finder_of
from tests.support.loopback import longer
from tests.support.pingers import answering
from tests.support.ports import free_udp_port
from tests.support.receiving import no_descriptor_leaks


def run_two(networks: tuple[Network, Network], count: int = 5) -> tuple[Pinger, Pinger]:
    """Let one process ping so many times, and another one until the first has ended."""
    with answering(networks[1], "j") as other, Pinger(networks[0], "j", interval=0.1, count=count) as one:
        one.run(until=time.monotonic() + 60)
    return one, other


def test_two_processes_of_one_host_hear_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ping, "WAIT_SECONDS", 30.0)  # a late answer is no lost one
    monkeypatch.setattr(ping, "GRACE_SECONDS", 30.0)
    network = Network(interfaces=("lo",), port=free_udp_port())

    def hear(pinger: Pinger) -> bool:
        figures = [peer.figures[way] for peer in pinger.pings.peers.values() for way in ("multicast", "link", "tcp")]
        return len(figures) == 3 and all(each.received and each.arrived for each in figures)

    with no_descriptor_leaks():
        one, other = longer(
            lambda seconds: run_two((network, network), count=int(5 * seconds)), lambda both: all(map(hear, both))
        )
    assert one.interfaces == ("lo",)
    assert "lo" in one.driver.udp.multicasts_on
    for pinger in (one, other):
        (peer,) = pinger.pings.peers.values()
        assert peer.address == "127.0.0.1"
        for way in ("multicast", "link", "tcp"):
            assert peer.figures[way].received == peer.figures[way].sent > 0, way
            assert peer.figures[way].arrived > 0
        assert peer.figures["unicast"].sent == 0


def test_a_secret_keeps_strangers_out() -> None:
    port = free_udp_port()
    networks = tuple(Network(interfaces=("lo",), port=port, secret=each) for each in (b"a", b"b"))
    one, other = longer(
        lambda seconds: run_two(networks, count=int(5 * seconds)),  # type: ignore[arg-type]
        lambda both: bool(both[0].pings.strangers),
    )
    assert one.pings.peers == other.pings.peers == {}
    assert "127.0.0.1" in one.pings.strangers


def test_another_version_is_noted() -> None:
    port = free_udp_port()
    seek = datagrams.encode(datagrams.Seek(job="j", member=bytes(16), world_size=2))
    with (
        Pinger(Network(interfaces=("lo",), port=port), interval=0.05, count=2) as pinger,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign,
    ):
        foreign.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        for data in (seek, seek[:4] + b"\x09" + seek[5:]):
            foreign.sendto(data, (BROWSE_GROUP.ipv4, port))
        pinger.run(until=time.monotonic() + 30)
    assert pinger.versions == {"version 9": "127.0.0.1"}


def test_a_host_that_does_not_answer() -> None:
    network = Network(interfaces=("lo",), port=free_udp_port(), peers=(Peer("127.0.0.9"),))
    with Pinger(network, interval=0.05, count=3) as pinger:
        pinger.run(until=time.monotonic() + 30)
    assert list(pinger.pings.asked.values()) == [False]


def test_a_zone_is_known_by_the_name_of_its_interface() -> None:
    """The source of an answer has the name, a resolver gives the number."""
    network = Network(interfaces=("lo",), port=free_udp_port(), peers=(Peer("fe80::9%1"),))
    with Pinger(network, interval=0.05, count=3) as pinger:
        pinger.run(until=time.monotonic() + 30)
    assert list(pinger.pings.asked) == [("fe80::9%lo", network.port)]


def test_pinger_listens_on_new_addresses() -> None:
    with Pinger(Network(interfaces=("lo",), port=free_udp_port())) as pinger:
        interfaces = pinger.driver.interfaces
        (lo,) = interfaces.usable
        interfaces.usable = (structs.replace(lo, addresses=(*lo.addresses, IPv4Interface("127.0.0.77/8"))),)
        assert pinger.driver._scanned is not None
        pinger.driver._scanned(time.monotonic(), True)
        assert "127.0.0.77" in pinger.pings.own
        socket.create_connection(("127.0.0.77", pinger.driver.connections.port), timeout=30).close()


def test_a_unicast_that_another_process_gets_is_handed_on() -> None:
    """Whoever opens the port last gets what is sent to it; a rank hands a ping to the process that waits for it."""
    network = Network(interfaces=("lo",), port=free_udp_port())
    over = threading.Event()
    with answering(network), Observer(network) as rank, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        looking = threading.Thread(
            target=rank.run, args=(finder_of(rank),), kwargs={"until": None, "done": over.is_set, "every": 0.1}
        )
        looking.start()
        asker.settimeout(30)
        asker.connect(("127.0.0.1", network.port))
        try:
            asker.send(echo.encode(EchoRequest(pinger=b"s" * 16, number=1, way="unicast")))
            answer = echo.decode(asker.recv(2000))
        finally:
            over.set()
            looking.join()
        assert rank.driver.rejections.counts == {}
    assert isinstance(answer, EchoReply)
    assert answer.asker == b"s" * 16
