"""Functions for ranks with plain sockets: they judge the lab without the package under test."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence

from .rank import report

PORT = 29_777
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h; lets root exceed the system's limit
_BUFFER = 8 << 20  # for a burst that the reader is too slow for


def listen(group: str, interface: str, end: str = "end") -> int:
    """Join a multicast group and return how many datagrams came before the one that is ``end``.

    Reports each of them as ``heard``, and before ``listening``, once nothing more can be missed.
    """
    with _udp(group) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        receiver.bind(("", PORT))
        index = socket.if_nametoindex(interface)
        address = ipaddress.ip_address(group)
        if address.version == 4:
            request = struct.pack("4s4si", address.packed, bytes(4), index)  # struct ip_mreqn
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
        else:
            request = struct.pack("16si", address.packed, index)  # struct ipv6_mreq
            receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, request)
        report("listening")
        count = 0
        while True:
            text, sender = receiver.recvfrom(1500)
            if text.decode() == end:
                return count
            count += 1
            report("heard", text=text.decode(), sender=sender[0])


def send(group: str, interface: str, texts: Sequence[str]) -> None:
    """Send datagrams to a multicast group on one interface."""
    with _udp(group) as sender:
        index = socket.if_nametoindex(interface)
        if sender.family == socket.AF_INET:
            sender.setsockopt(
                socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("4s4si", bytes(4), bytes(4), index)
            )
        else:
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        for text in texts:
            sender.sendto(text.encode(), (group, PORT))


def _udp(group: str) -> socket.socket:
    family = socket.AF_INET if ipaddress.ip_address(group).version == 4 else socket.AF_INET6
    return socket.socket(family, socket.SOCK_DGRAM)
