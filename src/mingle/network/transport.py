"""All UDP sockets of one discovery, over all its interfaces. Knows no protocol: bytes in, bytes out.

Per interface and family there is a receiver, which is a member of the groups on that interface alone (so it
is known where a datagram came in), and a sender with a port of its own, which is read as well: an answer to
what it sent arrives there and nowhere else, however many processes of this machine share the one port. Per
family there is a plain socket for unicast, and for IPv6 one more that hears unicast to the shared port.
Multicast sockets are those of `multicast_expert`. No socket blocks or is inherited by programs or forked
children; each asks for a large receive buffer and reports which address a datagram was sent to.

A unicast datagram to the shared port reaches one process of the machine only, the last that opened the port; that
process hands it to the others (:mod:`mingle.network.local_relay`).
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from ipaddress import IPv4Interface, IPv6Interface
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from multicast_expert import IfaceInfo, McastRxSocket, McastTxSocket, os_multicast

from mingle import forksafe
from mingle.config.settings import Family
from mingle.errors import FREE_DESCRIPTORS, NO_DESCRIPTOR, NO_PORT, InterfaceError
from mingle.network.interfaces import Interface
from mingle.network.routes import port_range
from mingle.wire.datagrams import Group

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

_VERSIONS: tuple[Version, ...] = ("4", "6")
# Datagrams taken from one socket in one go, so that a flood on one cannot starve the others.
_BATCH = 64


class Received(Struct):
    """One datagram, where it came from and where it arrived."""

    data: bytes
    """At most `MAX_DATAGRAM + 1` bytes."""
    source: SocketAddress
    family: Version
    multicast: bool
    """Whether it was addressed to a group, and not to this machine."""
    destination: str = ""
    """The address it was sent to, the group or one of ours; empty if the kernel did not report it."""
    index: int = 0
    """Of the interface it came in on; 0 if the kernel did not report it."""
    interface: str = ""
    """The name of that interface."""
    local: bool = False
    """Whether it comes from an address of this machine."""
    via: socket.socket | None = None
    """The socket it arrived at; None: another process's."""
    shared: bool = False
    """Whether it is a unicast to the port that all processes of this machine share."""
    broadcast: bool = False
    """Whether it was addressed to all machines of a network: every process that shares the port gets a copy."""


class Change(NamedTuple):
    """Sockets to register with and to drop from a selector."""

    added: list[socket.socket]
    removed: list[socket.socket]
    """Closed already."""


class _Endpoint(Struct):
    """The open sockets of one interface in one family."""

    interface: Interface
    version: Version
    stack: ExitStack
    receiver: McastRxSocket | None = None
    sender: McastTxSocket | None = None

    def sockets(self) -> list[socket.socket]:
        receiving = list(self.receiver.sockets) if self.receiver else []
        return receiving + ([self.sender.socket] if self.sender else [])

    def serves(self, interface: Interface) -> bool:
        """Return whether the sockets fit this newer description of the interface."""
        mine, theirs = self.interface, interface
        return mine.index == theirs.index and mine.of_family(self.version) == theirs.of_family(self.version)


class NothingOpenedError(Exception):
    """Nothing could be opened. A loop, which imports nothing, leaves the diagnosis to its caller."""

    def __init__(self, port: int, failures: Mapping[str, str]) -> None:
        super().__init__(port, failures)
        self.port = port
        self.failures = failures

    def diagnosed(self) -> InterfaceError:
        """Return the error for the user."""
        reasons = [f"{what}: {why}" for what, why in self.failures.items()] or ["no interface was given"]
        observation = f"nothing could be opened for discovery on UDP port {self.port} ({'; '.join(reasons)})"
        if any(why.startswith(("EMFILE", "ENFILE")) for why in self.failures.values()):
            return InterfaceError.explain(observation, cause=NO_DESCRIPTOR, remedy=FREE_DESCRIPTORS)
        from mingle.diagnostics import CheckStatus, diagnosis
        from mingle.network import inspection

        facts = diagnosis.Facts(
            port=self.port,
            failures=self.failures,
            holders=inspection.holders(self.port),
            memberships=inspection.membership_limit(),
            port_range=port_range(),
        )
        for finding in diagnosis.troubles(facts):
            if finding.status is CheckStatus.FAIL:
                return InterfaceError.explain(observation, cause=finding.observation, remedy=finding.remedy)
        return InterfaceError.explain(
            observation,
            cause="the interfaces went down or lost their addresses, or the system refuses such sockets",
            remedy="look at `mingle-discover interfaces`, or name a working interface in MINGLE_INTERFACE",
        )


class Transport:
    """The sockets. Not thread-safe: one thread opens, serves and closes.

    Args:
        interfaces: Those to use, best first.
        groups: Those to join; others cannot be sent to.
        port: The UDP port that all jobs share.
        ttl: Hop limit of multicasts; above 1 IPv6 uses site-local groups.
        family: Which IP versions to use.

    Raises:
        NothingOpenedError: nothing could be opened. If only a part could not, `failures` says so.
    """

    def __init__(
        self,
        interfaces: Sequence[Interface],
        *,
        groups: Sequence[Group],
        port: int,
        ttl: int = 1,
        family: Family = "auto",
    ) -> None:
        self.port = port
        self.ttl = ttl
        self.family: Family = family
        self.failures: dict[str, str] = {}
        """What could not be opened ("eth0 IPv6"), and why ("EADDRNOTAVAIL: …")."""
        self.sent = 0
        """Datagrams handed to the kernel."""
        self.unicasts_sent = 0
        """Those of them that `unicast` has sent."""
        self.received = 0
        """Datagrams returned by `receive`."""
        self.send_errors: Counter[str] = Counter()
        """By name of the error number."""
        self._groups = tuple(groups)
        self._interfaces: tuple[Interface, ...] = ()
        self._endpoints: dict[tuple[str, Version], _Endpoint] = {}
        self._shared: socket.socket | None = None
        self._unicast: dict[Version, socket.socket] = {}
        # Open socket -> the endpoint whose receiver it belongs to; None for those that take no multicast.
        self._receiving: dict[socket.socket, _Endpoint | None] = {}
        self._own: frozenset[tuple[str, int]] = frozenset()
        try:
            self.update(interfaces)
            if not self._listens():
                raise NothingOpenedError(self.port, self.failures)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every socket; a second call does nothing."""
        for endpoint in self._endpoints.values():
            endpoint.stack.close()
        for opened in self._receiving:
            opened.close()
        self._endpoints.clear()
        self._unicast.clear()
        self._receiving.clear()
        self._shared = None

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """Those on which something is open, best first."""
        in_use = {name for name, _ in self._endpoints}
        return tuple(interface for interface in self._interfaces if interface.name in in_use)

    def sockets(self) -> list[socket.socket]:
        """Every socket that may become readable."""
        return list(self._receiving)

    def update(self, interfaces: Sequence[Interface]) -> Change:
        """Adapt to the interfaces there are now: open what is new, close what has gone, retry what failed.

        An interface whose addresses have changed is opened anew. Nothing is raised when nothing is left open:
        a cable that was pulled may come back.
        """
        change = Change([], [])
        wanted = {(one.name, version): one for one in interfaces for version in self._versions(one)}
        for key, endpoint in list(self._endpoints.items()):
            if key in wanted and endpoint.serves(wanted[key]):
                endpoint.interface = wanted[key]
            else:
                self._drop(key, change)
        self._interfaces = tuple(interfaces)
        self._own = frozenset(
            (str(address.ip), interface.index if address.version == 6 and address.is_link_local else 0)
            for interface in interfaces
            for address in interface.addresses
        )
        self.failures.clear()
        for key, interface in wanted.items():
            if key not in self._endpoints:
                self._open(interface, key[1], change)
        for version in _VERSIONS:
            if any(key[1] == version for key in wanted):
                self._open_unicast(version, change)
        return change

    def refresh(self) -> Change:
        """Leave and join every group again; what cannot be joined is opened anew.

        A switch that snoops on IGMP or MLD forgets the members of a group when no querier asks for them
        periodically, and multicast "works for minutes, then stops". Joining makes the kernel report the
        membership again, provided that no other socket of this machine stayed a member meanwhile.
        """
        change = Change([], [])
        for key, endpoint in list(self._endpoints.items()):
            if endpoint.receiver is None:
                continue
            try:
                rejoin(endpoint.receiver)
            except OSError:
                self._drop(key, change)
                self._open(endpoint.interface, endpoint.version, change)
        return change

    def _versions(self, interface: Interface) -> tuple[Version, ...]:
        versions = tuple(one for one in _wanted(self.family) if interface.of_family(one))
        # On Linux lo has no IPv6 multicast route ("Network is unreachable"), while its IPv4 multicast works.
        return ("4",) if interface.loopback and "4" in versions else versions

    def _listens(self) -> bool:
        return self._shared is not None or any(endpoint.receiver for endpoint in self._endpoints.values())

    def _address(self, group: Group, version: Version) -> str:
        return group.ipv4 if version == "4" else group.ipv6(self.ttl)

    def _open(self, interface: Interface, version: Version, change: Change) -> None:
        with ExitStack() as stack:
            endpoint = _Endpoint(interface, version, stack)
            if not (interface.loopback and version == "6"):
                groups = [self._address(group, version) for group in self._groups]
                try:
                    endpoint.receiver = open_receiver(stack, interface, version, groups, self.port)
                    endpoint.sender = open_sender(stack, interface, version, groups, self.ttl)
                except OSError as error:
                    named = endpoint.receiver is None
                    self.failures[f"{interface.name} IPv{version}"] = _in_words(error, named_port=named)
                    return
            endpoint.stack = stack.pop_all()
        self._endpoints[interface.name, version] = endpoint
        for opened in endpoint.sockets():
            is_sender = endpoint.sender is not None and opened is endpoint.sender.socket
            self._receiving[opened] = None if is_sender else endpoint
            change.added.append(opened)

    def _open_unicast(self, version: Version, change: Change) -> None:
        try:
            if version not in self._unicast:
                self._unicast[version] = opened = open_unicast(version)
                self._receiving[opened] = None
                change.added.append(opened)
            if version == "6" and self._shared is None:
                self._shared = opened = open_unicast("6", self.port)
                self._receiving[opened] = None
                change.added.append(opened)
        except OSError as error:
            self.failures[f"IPv{version} unicast"] = _in_words(error, named_port=version in self._unicast)

    def _drop(self, key: tuple[str, Version], change: Change) -> None:
        endpoint = self._endpoints.pop(key)
        for opened in endpoint.sockets():
            del self._receiving[opened]
            change.removed.append(opened)
        endpoint.stack.close()

    def receive(self, opened: socket.socket) -> list[Received]:
        """Return the datagrams that wait on `opened`, up to a bound; call again while it is readable.

        Errors are counted and never raised. A socket that was closed meanwhile has nothing.
        """
        batch: list[Received] = []
        if opened not in self._receiving:
            return batch
        endpoint = self._receiving[opened]
        for _ in range(_BATCH):
            try:
                received = read(opened)
            except OSError:
                continue
            if received is None:
                break
            # The kernel gives an IPv6 multicast to every member, also to one that joined on another interface
            # (net/ipv6/mcast.c, inet6_mc_check), and to sockets that never joined: a copy too many.
            if received.multicast and (endpoint is None or received.index != endpoint.interface.index):
                continue
            host, scope = received.source[0], received.source[3] if len(received.source) == 4 else 0
            received.local = host == "::1" or host.startswith("127.") or (host, scope) in self._own
            received.interface = self._interface_name(received.index, endpoint)
            received.shared = not received.multicast and (endpoint is not None or opened is self._shared)
            batch.append(received)
        self.received += len(batch)
        return batch

    def _interface_name(self, index: int, endpoint: _Endpoint | None) -> str:
        for interface in self._interfaces:
            if interface.index == index:
                return interface.name
        try:
            return socket.if_indextoname(index)
        except OSError:  # the interface has gone since
            return endpoint.interface.name if endpoint else ""

    def multicast(self, interface_name: str, data: bytes, group: Group, turn: int | None = None) -> bool:
        """Send `data` to `group` out of one interface, in every family open there; whether any went out.

        With a `turn`, a running number, it goes out in one of these families only: in each of them in turn, and in
        the other if it can't be sent there.

        Like every sending method it counts an error and goes on: the next attempt may succeed.

        Raises:
            MulticastExpertError: `group` is none of those the transport was made for.
        """
        endpoints = [self._endpoints.get((interface_name, version)) for version in _VERSIONS]
        senders = [(each.sender, each.version) for each in endpoints if each is not None and each.sender is not None]
        if turn is not None and turn % 2:
            senders.reverse()
        went_out = False
        for sender, version in senders:
            if turn is not None and went_out:
                break
            target = (self._address(group, version), self.port)
            went_out |= self._attempt(sender.sendto, data, target)
        return went_out

    def reply(self, received: Received, data: bytes) -> bool:
        """Send `data` to where `received` came from; whether it went out.

        What came by unicast is answered from the very address and port it was sent to: stateful firewalls and
        address translation let only such an answer back in. What came by multicast is answered by that
        interface's sender.
        """
        via = received.via or self._at_shared_port(received.family)
        if not received.multicast and via in self._receiving:
            return self._attempt(send_from, via, data, received.destination, received.source)
        endpoint = self._endpoints.get((received.interface, received.family))
        if endpoint is not None and endpoint.sender is not None:
            return self._attempt(endpoint.sender.socket.sendto, data, received.source)
        return self._send_plain(received.family, data, received.source)

    def _at_shared_port(self, version: Version) -> socket.socket | None:
        """Return a socket that answers as that of the process would which has relayed a datagram to this one."""
        if version == "6":
            return self._shared
        receivers = (each.receiver for each in self._endpoints.values() if each.version == "4")
        return next((receiver.sockets[0] for receiver in receivers if receiver is not None), None)

    def unicast(self, data: bytes, address: tuple[str, int]) -> bool:
        """Send `data` to a host literal (an IPv6 one may carry a zone) and port; whether it went out.

        Raises:
            ValueError: the host is not an address.
        """
        try:
            target = socket_address(*address)
        except OSError as error:
            self.send_errors[_error_name(error)] += 1
            return False
        went_out = self._send_plain("6" if len(target) == 4 else "4", data, target)
        self.unicasts_sent += went_out
        return went_out

    def _send_plain(self, version: Version, data: bytes, target: SocketAddress) -> bool:
        if version not in self._unicast:
            self.send_errors["EAFNOSUPPORT"] += 1
            return False
        return self._attempt(self._unicast[version].sendto, data, target)

    def _attempt(self, send: Callable[..., object], *arguments: object) -> bool:
        try:
            send(*arguments)
        except OSError as error:
            self.send_errors[_error_name(error)] += 1
            return False
        self.sent += 1
        return True


# --- single sockets --------------------------------------------------------------------------------------------------


def open_receiver(
    stack: ExitStack, interface: Interface, version: Version, groups: Sequence[str], port: int
) -> McastRxSocket:
    """Open a receiver of `groups` on `interface` alone, closed by `stack`.

    The IPv4 socket also gets unicast to `port`; the IPv6 ones (one per group) do not, see
    `open_unicast`.

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
    """Open a sender to `groups` out of `interface`, on a port of its own, closed by `stack`.

    Other sockets of this machine hear it, too.

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


def open_unicast(version: Version, port: int = 0) -> socket.socket:
    """Open a plain socket: the multicast senders refuse every address but a group's.

    Args:
        version: the IP version.
        port: the shared port, for IPv6 unicast: the receivers are bound to their groups and get none; 0: any free port.

    Raises:
        OSError: the kernel refused: EAFNOSUPPORT where IPv6 is switched off, EADDRINUSE if a program holds the port
            and does not share it.
    """
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
        _prepare(opened, version)
        opened.bind(("", port))
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
        # This exceeds net.core.rmem_max, and needs CAP_NET_ADMIN.
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER)
    except PermissionError:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)  # Linux cuts it to rmem_max
    if version == "4":
        opened.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    else:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)


def _interface_info(interface: Interface, addresses: Sequence[IPv4Interface | IPv6Interface]) -> IfaceInfo:
    """Return the record of `multicast_expert`, which would scan the machine again for every socket."""
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


def read(opened: socket.socket) -> Received | None:
    """Return the next datagram, or None if there is none.

    Raises:
        OSError: an error that was pending on the socket; reading took it off.
    """
    try:
        data, ancillary, _, source = opened.recvmsg(MAX_DATAGRAM + 1, _ANCILLARY_SIZE)
    except BlockingIOError:
        return None
    destination, multicast, broadcast, index = "", False, False, 0
    for level, kind, value in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_PKTINFO:
            index, ours, header = _IN_PKTINFO.unpack(value)
            multicast = header[0] & 0xF0 == 0xE0
            # The two differ for a group and for a broadcast, which cannot be the source of an answer: the kernel has
            # looked the header's address up in its own routes (fib_compute_spec_dst). Of a datagram that was queued
            # before the socket asked for them, the kernel reports neither address nor interface.
            if multicast or any(ours):
                destination = _address(header if multicast else ours)
                broadcast = not multicast and header != ours
        elif level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            header, index = _IN6_PKTINFO.unpack(value)
            multicast = header[0] == 0xFF
            destination = _address(header)
    # Asking the socket for its family takes longer than all the rest of this.
    if len(source) == 2:
        return Received(data, source, "4", multicast, destination, index, via=opened, broadcast=broadcast)
    host, port, _flow, scope = source
    return Received(data, (host, port, 0, scope), "6", multicast, destination, index, via=opened)


@functools.lru_cache(maxsize=64)
def _address(packed: bytes) -> str:
    """Return an address of ours, or a group's, as text."""
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
    """Return a host literal as the kernel takes it; an IPv6 zone can be a name or a number.

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


def _wanted(family: Family) -> tuple[Version, ...]:
    return _VERSIONS if family == "auto" else (family,)


def _error_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def _in_words(error: OSError, *, named_port: bool) -> str:
    reason = f"{_error_name(error)}: {error.strerror or error}"
    return reason if named_port or error.errno != errno.EADDRINUSE else f"{NO_PORT} ({reason})"
