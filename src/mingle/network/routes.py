"""The routes of this machine, as the kernel tells them: where packets to an address go, and what answers there.

Nothing is sent to find that out. Answers are for the caller's network namespace.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

from mingle.network.interfaces import Interface, without_zone

# <linux/rtnetlink.h>
_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_RTA_DST, _RTA_SRC, _RTA_OIF = 1, 2, 4
_NLM_F_REQUEST = 1
_ATF_COM = 0x2  # <linux/if_arp.h>: the entry is complete


def reached_weakly(wire: Interface | None, remote: str) -> bool:
    """Return whether a connection by `wire` to `remote` says nothing about the network that `remote` is on.

    Linux answers for each of its addresses on every wire (the weak end system model: RFC 1122, section 3.3.4.2).
    So a host on one of the networks of another may reach all of that one's addresses, and those networks need not
    be joined by anything else. That is seen from here when packets to `remote` go straight to a wire on which there
    is no such subnet. IPv6 neighbors answer for the addresses of that wire alone (ndisc_recv_ns in the kernel).
    """
    if wire is None or wire.loopback:
        return False
    wanted = without_zone(remote)
    if wanted.version == 6:
        return False
    subnets = [own.network for own in wire.addresses if own.version == 4]
    # Without a subnet (a tunnel's end, a cloud's /32) everything is reached through a router.
    if all(subnet.prefixlen == 32 for subnet in subnets) or any(wanted in subnet for subnet in subnets):
        return False
    return has_direct_route(remote)


def has_direct_route(address: str) -> bool:
    """Return whether the kernel sends packets to this IPv4 address without a router.

    Connecting a UDP socket looks the route up and sends nothing.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, 1)
            probe.connect((address, 9))
    except OSError:  # also EMFILE: then it is not known
        return False
    return True


def source_of(address: str) -> str:
    """Return the address from which the kernel sends to an address; empty: there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def egress(address: str, source: str = "") -> int:
    """Return the index of the interface by which the kernel sends to an address; 0: it is not known (rtnetlink(7)).

    Args:
        address: where to.
        source: the address of this machine from which, which a rule can route by; empty: the kernel's choice.
    """
    if sys.platform != "linux":
        return 0
    to, ours = without_zone(address).packed, without_zone(source).packed if source else b""
    family = socket.AF_INET if len(to) == 4 else socket.AF_INET6
    route = struct.pack("=8BI", family, 8 * len(to), 8 * len(ours), 0, 0, 0, 0, 0, 0)
    for number, value in ((_RTA_DST, to), (_RTA_SRC, ours)):
        route += struct.pack("=HH", 4 + len(value), number) + value if value else b""
    request = struct.pack("=IHHII", 16 + len(route), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + route
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
            netlink.setblocking(False)  # the kernel has answered when send(2) returns
            netlink.send(request)
            answer = netlink.recv(4096)
    except OSError:  # also EMFILE, and a sandbox without netlink
        return 0
    if struct.unpack_from("=H", answer, 4) != (_RTM_NEWROUTE,):
        return 0
    at = 16 + len(struct.pack("=8BI", *bytes(9)))
    while at + 4 <= len(answer):
        length, number = struct.unpack_from("=HH", answer, at)
        if number == _RTA_OIF:
            return int(struct.unpack_from("=i", answer, at + 4)[0])
        at += max(4, (length + 3) & ~3)
    return 0


def reverse_path_drops() -> int:
    """Return how many packets the reverse path filter of this network namespace has dropped so far (Linux)."""
    lines = [line.split() for line in read_text(Path("/proc/self/net/netstat")).splitlines()]
    extended = [line for line in lines if line[:1] == ["TcpExt:"]]
    for names, values in zip(extended[::2], extended[1::2], strict=False):
        if "IPReversePathFilter" in names:
            return int(values[names.index("IPReversePathFilter")])
    return 0


def port_range() -> tuple[int, int]:
    """Return the first and the last port that the system chooses (ip(7)); its default where that can't be read."""
    first, last = read_text(Path("/proc/sys/net/ipv4/ip_local_port_range")).split() or (32768, 60999)
    return int(first), int(last)


def neighbors(interface: str = "") -> dict[str, str]:
    """Return the kernel's ARP table (proc_net(5)): hardware addresses by IPv4 address; empty: no answer (Linux).

    Args:
        interface: on which; empty: on any.
    """
    lines = read_text(Path("/proc/self/net/arp")).splitlines()[1:]
    rows = [row for row in map(str.split, lines) if len(row) > 3 and interface in ("", row[-1])]
    return {row[0]: row[3] if int(row[2], 16) & _ATF_COM else "" for row in rows}


def read_text(path: Path) -> str:
    """Return the content of a file of the system; empty: it is not there, or not for this user."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
