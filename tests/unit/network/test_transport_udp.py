"""Single sockets, on `lo`: their options, what is read, and what is left when one can't be opened."""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_interface
from pathlib import Path

import pytest

from mingle.network import transport
from mingle.network.interfaces import Interface, scan
from tests.support.ports import free_udp_port

LO = next(interface for interface in scan() if interface.loopback)
GROUP = "239.195.1.2"
GHOST = Interface("ghost0", 9999, (ip_interface("192.0.2.77/24"), ip_interface("2001:db8::77/64")))

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="these options are Linux's")
needs_ipv6 = pytest.mark.skipif(not LO.of_family("6"), reason="lo has no IPv6 address")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def next_datagram(opened: socket.socket) -> transport.Received:
    assert select.select([opened], [], [], 5)[0], "nothing came"
    datagram = transport.read(opened)
    assert datagram is not None
    return datagram


@linux_only
def test_datagram_queued_before_pktinfo_has_no_destination(stack: ExitStack) -> None:
    """The kernel reports 0.0.0.0 for a datagram that was queued before the socket asked for the address."""
    receiver, sender = (stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2))
    receiver.bind(("127.0.0.1", 0))
    sender.sendto(b"early", receiver.getsockname())
    assert select.select([receiver], [], [], 5)[0]
    receiver.setsockopt(socket.IPPROTO_IP, transport._IP_PKTINFO, 1)
    heard = next_datagram(receiver)
    assert (heard.data, heard.destination, heard.multicast, heard.index) == (b"early", "", False, 0)


def test_a_datagram_that_is_too_long_shows(stack: ExitStack) -> None:
    here, there = (stack.enter_context(transport.open_unicast("4")) for _ in range(2))
    for length in (0, transport.MAX_DATAGRAM, transport.MAX_DATAGRAM + 700):
        there.sendto(bytes(length), ("127.0.0.1", here.getsockname()[1]))
    lengths = [len(next_datagram(here).data) for _ in range(3)]
    assert lengths == [0, transport.MAX_DATAGRAM, transport.MAX_DATAGRAM + 1]


@linux_only
def test_a_pending_error_is_raised_once(stack: ExitStack) -> None:
    opened = stack.enter_context(transport.open_unicast("4"))
    opened.connect(("127.0.0.1", free_udp_port()))
    opened.send(b"anybody?")
    assert select.select([opened], [], [], 5)[0]
    with pytest.raises(ConnectionRefusedError):
        transport.read(opened)
    assert transport.read(opened) is None


def test_every_socket_is_ready_for_a_loop_and_private_to_the_process(stack: ExitStack) -> None:
    opened = [
        *transport.open_receiver(stack, LO, "4", [GROUP], free_udp_port()).sockets,
        transport.open_sender(stack, LO, "4", [GROUP], 1).socket,
        stack.enter_context(transport.open_unicast("4")),
    ]
    if LO.of_family("6"):
        opened.append(stack.enter_context(transport.open_unicast("6", free_udp_port())))
    limit = Path("/proc/sys/net/core/rmem_max")
    # The kernel doubles what is asked for, and cuts it for who has no CAP_NET_ADMIN; socket(7).
    enough = min(transport.RECEIVE_BUFFER, int(limit.read_text()) if limit.exists() else 1)
    for each in opened:
        assert each.getblocking() is False
        assert each.get_inheritable() is False
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= enough


@linux_only
@pytest.mark.parametrize("ttl", [0, 1, 7])
def test_a_sender_keeps_to_its_hop_limit_and_interface(stack: ExitStack, ttl: int) -> None:
    sender = transport.open_sender(stack, LO, "4", [GROUP], ttl).socket
    assert sender.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL) == ttl
    assert sender.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP) == 1
    assert sender.getsockname()[0] == "127.0.0.1"


@needs_ipv6
def test_the_shared_socket_is_for_ipv6_alone_and_shares(stack: ExitStack) -> None:
    port = free_udp_port()
    shared = [stack.enter_context(transport.open_unicast("6", port)) for _ in range(2)]
    receiver = transport.open_receiver(stack, LO, "4", [GROUP], port)
    for version, address in (("6", "::1"), ("4", "127.0.0.1")):
        stack.enter_context(transport.open_unicast(version)).sendto(b"x", (address, port))  # type: ignore[arg-type]
    assert select.select(shared, [], [], 5)[0]
    assert sum(transport.read(each) is not None for each in shared) == 1
    assert next_datagram(receiver.sockets[0]).source[0] == "127.0.0.1"


@linux_only
def test_joining_again_keeps_the_membership(stack: ExitStack) -> None:
    port = free_udp_port()
    receiver = transport.open_receiver(stack, LO, "4", [GROUP, "239.195.1.3"], port)
    sender = transport.open_sender(stack, LO, "4", [GROUP], 1)
    for _ in range(2):
        transport.rejoin(receiver)
    # Also when the kernel has dropped it meanwhile, as it does when an interface goes and comes back.
    membership = socket.inet_aton(GROUP) + socket.inet_aton("127.0.0.1")
    receiver.sockets[0].setsockopt(socket.IPPROTO_IP, socket.IP_DROP_MEMBERSHIP, membership)
    transport.rejoin(receiver)
    sender.sendto(b"still here?", (GROUP, port))
    assert next_datagram(receiver.sockets[0]).data == b"still here?"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", ("10.0.0.1", 9)),
        ("2001:db8::1", ("2001:db8::1", 9, 0, 0)),
        ("fe80::1%7", ("fe80::1", 9, 0, 7)),
        (f"fe80::1%{LO.name}", ("fe80::1", 9, 0, LO.index)),
        ("localhost", ValueError),
        ("fe80::1%ghost0", OSError),
    ],
)
def test_addresses_as_the_kernel_takes_them(host: str, expected: transport.SocketAddress | type[Exception]) -> None:
    if isinstance(expected, tuple):
        assert transport.socket_address(host, 9) == expected
    else:
        with pytest.raises(expected):
            transport.socket_address(host, 9)
