"""A cable between two networks of the lab that doubles datagrams and lets them overtake each other.

No Linux network does so on demand without netem, which not every kernel has; so a process passes the frames on.
"""

from __future__ import annotations

import heapq
import random
import selectors
import socket
import struct
import time

from .rank import report

LATEST_SECONDS = 0.03
"""A datagram comes as late as chance wants, up to this; what is not UDP passes at once.

The first datagram, and every second one after it, comes twice, the copy at the latest. Chance has no say in that: a
job that forms sends so few datagrams that chance left all of them single once in a while.
"""

# <linux/if_packet.h>, <linux/if_ether.h>, <linux/virtio_net.h>; Python has no names for them.
_SOL_PACKET = 263
_ETH_P_ALL = 3
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_MR_PROMISC = 1
_PACKET_VNET_HDR = 15
_VNET_HEADER_BYTES = 10
_FRAME_BYTES = 1 << 17
_ETHERNET_BYTES = 14


def mix(interfaces: tuple[str, str], seed: int) -> None:
    """Join the networks of two interfaces until killed; reports ``mixing``, then ``mixed`` with each doubled one."""
    rng = random.Random(seed)
    with _listening(interfaces[0]) as one, _listening(interfaces[1]) as other, selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        report("mixing")
        late: list[tuple[float, int, socket.socket, bytes]] = []
        number = newest = 0
        while True:
            wait = max(0.0, late[0][0] - time.monotonic()) if late else None
            for key, _ in selector.select(wait):
                assert isinstance(key.fileobj, socket.socket)
                frame, (_, _, kind, *_) = key.fileobj.recvfrom(_FRAME_BYTES)
                if kind == socket.PACKET_OUTGOING:
                    continue
                if not _is_udp(frame[_VNET_HEADER_BYTES:]):
                    key.data.send(frame)
                    continue
                number += 1
                delays = [rng.uniform(0, LATEST_SECONDS)]
                if number % 2:
                    delays.append(LATEST_SECONDS)
                    report("mixed", what="doubled")
                for delay in delays:
                    heapq.heappush(late, (time.monotonic() + delay, number, key.data, frame))
            while late and late[0][0] <= time.monotonic():
                _, sent, target, frame = heapq.heappop(late)
                target.send(frame)
                if sent < newest:
                    report("mixed", what="overtaken")
                newest = max(newest, sent)


def _listening(interface: str) -> socket.socket:
    """A socket that takes and sends the frames of an interface, with what the kernel has put off: their checksums."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    everything = struct.pack("iHH8s", socket.if_nametoindex(interface), _PACKET_MR_PROMISC, 0, b"")  # packet_mreq
    opened.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, everything)
    opened.bind((interface, _ETH_P_ALL))
    return opened


def _is_udp(frame: bytes) -> bool:
    """Whether a frame holds UDP over IPv4, or over IPv6 without further headers."""
    kind, packet = frame[12:_ETHERNET_BYTES], frame[_ETHERNET_BYTES:]
    if kind == b"\x08\x00":
        return packet[9] == socket.IPPROTO_UDP
    return kind == b"\x86\xdd" and packet[6] == socket.IPPROTO_UDP
