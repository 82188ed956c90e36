"""Single UDP sockets: how each kind is opened, and how a datagram is read with what the kernel knows of it.

Multicast sockets are those of `multicast_expert`; what it has no socket for (plain unicast, IPv6 unicast on
the shared port) stands beside them. Every socket that leaves this module does not block, is not inherited by
programs or forked children, asks for a large receive buffer and reports where a datagram was addressed to.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ipaddress import IPv4Interface, IPv6Interface
from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct
from multicast_expert import IfaceInfo, McastRxSocket, McastTxSocket, os_multicast

from mingle import forksafe
from mingle.network.interfaces import Interface

Version = Literal["4", "6"]
"""An IP version, in the spelling of the `family` setting."""

SocketAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]
"""Host literal without zone and port; for IPv6 also flow information and scope id."""

MAX_DATAGRAM = 2048
"""The largest datagram read whole, in bytes. One byte more is read, so that a longer one shows."""

RECEIVE_BUFFER = 4 * 1024 * 1024
"""Bytes. Linux's default of 212 992 holds fewer than 200 small datagrams: each counts with its overhead."""

ADDRESS_FAMILIES: dict[Version, socket.AddressFamily] = {"4": socket.AF_INET, "6": socket.AF_INET6}

# Numbers that Python's socket module does not name on every version and platform.
_SO_RCVBUFFORCE = 33  # Linux, <asm-generic/socket.h>
_IP_PKTINFO = 26 if sys.platform == "darwin" else 8
_IPV6_MULTICAST_ALL = 29  # Linux 4.20, <linux/in6.h>
_IN_PKTINFO = struct.Struct("=I4s4s")  # index, our address, address in the header; ip(7)
_IN6_PKTINFO = struct.Struct("=16sI")  # address in the header, index; RFC 3542, section 6.1
_ANCILLARY_SIZE = 64  # holds either with its header

_Mcast = TypeVar("_Mcast", McastRxSocket, McastTxSocket)


class Datagram(Struct, frozen=True):
    """One datagram as read."""

    data: bytes
    """At most `MAX_DATAGRAM + 1` bytes."""
    source: SocketAddress
    destination: str
    """Our address that it reached; for a multicast the group. Empty when the kernel did not say."""
    multicast: bool
    """Whether it was addressed to a group."""
    index: int
    """Of the interface it came in on; 0 when the kernel did not say."""


def open_receiver(
    stack: ExitStack, interface: Interface, version: Version, groups: Sequence[str], port: int
) -> McastRxSocket:
    """A receiver of `groups` on `interface` alone, closed by `stack`.

    The IPv4 socket also gets unicast to `port`; the IPv6 ones (one per group) do not, see
    `open_shared`.

    Raises:
        OSError: the kernel refused; nothing is left open.
    """
    info = _interface_info(interface, interface.of_family(version))
    receiver = McastRxSocket(ADDRESS_FAMILIES[version], groups, port, iface=info, blocking=False)
    _enter(stack, receiver)
    for opened in receiver.sockets:
        _prepare(opened, version)
    return receiver


def open_sender(
    stack: ExitStack, interface: Interface, version: Version, groups: Sequence[str], ttl: int
) -> McastTxSocket:
    """A sender to `groups` out of `interface`, on a port of its own, closed by `stack`.

    Other sockets of this machine hear it too.

    Raises:
        OSError: the kernel refused; nothing is left open.
    """
    addresses = interface.of_family(version)
    for address in addresses:
        info = _interface_info(interface, (address,))
        sender = McastTxSocket(ADDRESS_FAMILIES[version], groups, iface=info, ttl=ttl, enable_external_loopback=True)
        try:
            _enter(stack, sender)
        except OSError as error:
            # An IPv6 address cannot be bound before its duplicate check is over (RFC 4862, section 5.4): one
            # to two seconds in which the next address, often the link-local one, is as good.
            if error.errno != errno.EADDRNOTAVAIL or address is addresses[-1]:
                raise
        else:
            break
    _prepare(sender.socket, version)
    return sender


def open_shared(port: int) -> socket.socket:
    """The socket for IPv6 unicast to the shared port: the receivers are bound to their groups and get none.

    Raises:
        OSError: the kernel refused, EADDRINUSE when a program holds the port and does not share it.
    """
    return _open_plain("6", port)


def open_unicast(version: Version) -> socket.socket:
    """A plain socket on a port of its own: the multicast senders refuse every address but a group's.

    Raises:
        OSError: the kernel refused, EAFNOSUPPORT where IPv6 is switched off.
    """
    return _open_plain(version, 0)


def _open_plain(version: Version, port: int) -> socket.socket:
    opened = socket.socket(ADDRESS_FAMILIES[version], socket.SOCK_DGRAM)
    try:
        if version == "6":
            # Else the socket would compete with the IPv4 receivers for the port.
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if sys.platform == "linux":
                # A socket that joined no group gets what all others joined. Only a saving of wake-ups: an
                # older kernel refuses, and the transport tells multicasts by their destination anyway.
                with suppress(OSError):
                    opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_MULTICAST_ALL, 0)
        if port:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "darwin":  # where SO_REUSEADDR alone does not let two sockets share both
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(("", port))
        _prepare(opened, version)
    except BaseException:
        opened.close()
        raise
    return opened


def _enter(stack: ExitStack, mcast: _Mcast) -> None:
    """Open a `multicast_expert` socket, or leave nothing of it open."""
    try:
        stack.enter_context(mcast)
    except BaseException as error:
        # Its __enter__ closes nothing when it fails, and the socket that failed is known to its frame only.
        strays = [*getattr(mcast, "sockets", ()), getattr(mcast, "socket", None)]
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals["__name__"].startswith("multicast_expert."):
                strays += frame.f_locals.values()
        for stray in strays:
            if isinstance(stray, socket.socket):
                stray.close()
        raise


def _prepare(opened: socket.socket, version: Version) -> None:
    forksafe.register(opened)
    opened.setblocking(False)
    try:
        if sys.platform != "linux":
            raise PermissionError
        # Beyond net.core.rmem_max, for who has CAP_NET_ADMIN.
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER)
    except PermissionError:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)  # Linux cuts it to rmem_max
    if version == "4":
        opened.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    else:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)


def _interface_info(interface: Interface, addresses: Sequence[IPv4Interface | IPv6Interface]) -> IfaceInfo:
    """Our record in the library's terms, so that it does not scan the machine again for every socket."""
    return IfaceInfo(
        machine_name=interface.name,
        index=interface.index,
        link_layer_address=None,
        ip4_addrs=[address for address in addresses if isinstance(address, IPv4Interface)],
        ip6_addrs=[address for address in addresses if isinstance(address, IPv6Interface)],
    )


def rejoin(receiver: McastRxSocket) -> None:
    """Leave and join every group of `receiver` again.

    Raises:
        OSError: a group could not be joined, ENODEV when the interface has gone.
    """
    family = receiver.addr_family
    (info,) = receiver.network_interfaces
    for number, group in enumerate(receiver.mcast_ips):
        if family == socket.AF_INET:
            member = receiver.sockets[0]
            level, leave = socket.IPPROTO_IP, socket.IP_DROP_MEMBERSHIP
            request = os_multicast.make_ip_mreqn_struct(group, info)
        else:
            member = receiver.sockets[number]
            level, leave = socket.IPPROTO_IPV6, socket.IPV6_LEAVE_GROUP
            request = os_multicast.make_ipv6_mreq_struct(group, info)
        # EADDRNOTAVAIL: no member, because the interface was taken away meanwhile. Joining is what matters.
        with suppress(OSError):
            member.setsockopt(level, leave, request)
        os_multicast.add_memberships(member, [group], info, family)


def read(opened: socket.socket) -> Datagram | None:
    """The next datagram, or None when there is none.

    Raises:
        OSError: an error that was pending on the socket; reading took it off.
    """
    try:
        data, ancillary, _, source = opened.recvmsg(MAX_DATAGRAM + 1, _ANCILLARY_SIZE)
    except BlockingIOError:
        return None
    destination, multicast, index = "", False, 0
    for level, kind, value in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_PKTINFO:
            index, ours, header = _IN_PKTINFO.unpack(value)
            multicast = header[0] & 0xF0 == 0xE0
            # The two differ for a group and for a broadcast, from which nobody can answer.
            destination = _address(header if multicast else ours)
        elif level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            header, index = _IN6_PKTINFO.unpack(value)
            multicast = header[0] == 0xFF
            destination = _address(header)
    if len(source) == 4:  # asking the socket for its family takes longer than all the rest of this
        host, port, _flow, scope = source
        source = (host, port, 0, scope)
    return Datagram(data, source, destination, multicast, index)


@functools.lru_cache(maxsize=64)
def _address(packed: bytes) -> str:
    """An address of ours, or a group's, as text."""
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def send_from(opened: socket.socket, data: bytes, own: str, target: SocketAddress) -> None:
    """Send `data` to `target` with `own` as the source address.

    Raises:
        OSError: the kernel refused.
    """
    if sys.platform != "linux" or not own:
        opened.sendto(data, target)
    elif opened.family == socket.AF_INET:
        information = _IN_PKTINFO.pack(0, socket.inet_pton(socket.AF_INET, own), bytes(4))
        opened.sendmsg([data], [(socket.IPPROTO_IP, _IP_PKTINFO, information)], 0, target)
    else:
        scope = target[3] if len(target) == 4 else 0
        information = _IN6_PKTINFO.pack(socket.inet_pton(socket.AF_INET6, own), scope)
        opened.sendmsg([data], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, information)], 0, target)


def socket_address(host: str, port: int) -> SocketAddress:
    """`host`, a literal and no name, as the kernel takes it; an IPv6 zone may be a name or a number.

    Raises:
        ValueError: `host` is not an address.
        OSError: its zone is not an interface here.
    """
    literal, _, zone = host.partition("%")
    if ipaddress.ip_address(host).version == 4:
        return literal, port
    if not zone or zone.isdigit():
        return literal, port, 0, int(zone or 0)
    return literal, port, 0, socket.if_nametoindex(zone)
