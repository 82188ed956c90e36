"""All UDP sockets of one discovery, over all its interfaces. Knows no protocol: bytes in, bytes out.

Per interface and family there is a receiver, which is a member of the groups on that interface alone (so it
is known where a datagram came in), and a sender with a port of its own, which is read as well: an answer to
what it sent arrives there and nowhere else, however many processes of this machine share the one port. Per
family there is a plain socket for unicast, and for IPv6 one more that hears unicast to the shared port.

A unicast datagram to the shared port reaches one process of the machine only, the last that opened the port; that
one hands it to the others (:mod:`mingle.network.siblings`).
"""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from multicast_expert import McastRxSocket, McastTxSocket

from mingle.diagnostics.findings import Status
from mingle.errors import InterfaceError
from mingle.network import inspection, udp
from mingle.network.interfaces import Family, Interface
from mingle.network.udp import MAX_DATAGRAM, SocketAddress, Version
from mingle.wire.groups import Group

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MAX_DATAGRAM", "Change", "Received", "SocketAddress", "Transport", "Version"]

_VERSIONS: tuple[Version, ...] = ("4", "6")
# Datagrams taken from one socket in one go, so that a flood on one cannot starve the others.
_BATCH = 64


class Received(Struct, frozen=True):
    """One datagram and where it came from."""

    data: bytes
    interface: str
    """The name of the interface it came in on."""
    source: SocketAddress
    family: Version
    multicast: bool
    """Whether it was addressed to a group, and not to this machine."""
    local: bool
    """Whether it comes from an address of this machine."""
    destination: str = ""
    """The address it was sent to: the group, or the one of ours."""
    via: socket.socket | None = None
    """The socket it arrived at; None: another process's."""
    shared: bool = False
    """Whether it is a unicast to the port that all processes of this machine share."""


class Change(NamedTuple):
    """Sockets to register with and to drop from a selector."""

    added: list[socket.socket]
    removed: list[socket.socket]
    """Closed already."""


class _Endpoint(Struct):
    """What is open on one interface in one family."""

    interface: Interface
    version: Version
    stack: ExitStack
    receiver: McastRxSocket | None = None
    sender: McastTxSocket | None = None

    def sockets(self) -> list[socket.socket]:
        receiving = list(self.receiver.sockets) if self.receiver else []
        return receiving + ([self.sender.socket] if self.sender else [])

    def serves(self, interface: Interface) -> bool:
        """Whether the sockets fit this newer description of the interface."""
        mine, theirs = self.interface, interface
        return mine.index == theirs.index and mine.of_family(self.version) == theirs.of_family(self.version)


class Transport:
    """The sockets. Not thread-safe: one thread opens, serves and closes.

    Args:
        interfaces: Those to use, best first.
        groups: Those to join; others cannot be sent to.
        port: The UDP port that all jobs share.
        ttl: Hop limit of multicasts; above 1 IPv6 uses site-local groups.
        family: Which IP versions to use.

    Raises:
        InterfaceError: nothing could be opened. If only a part could not, `failures` says so.
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
        self.received = 0
        """Datagrams returned by `receive`."""
        self.send_errors: Counter[str] = Counter()
        """By name of the error number."""
        self.receive_errors: Counter[str] = Counter()
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
                raise self._nothing_opened()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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

        A switch that snoops on IGMP or MLD forgets the members of a group when nobody asks for them
        periodically, and multicast "works for minutes, then stops". Joining makes the kernel report the
        membership again, provided that no other socket of this machine stayed a member meanwhile.
        """
        change = Change([], [])
        for key, endpoint in list(self._endpoints.items()):
            if endpoint.receiver is None:
                continue
            try:
                udp.rejoin(endpoint.receiver)
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
                    endpoint.receiver = udp.open_receiver(stack, interface, version, groups, self.port)
                    endpoint.sender = udp.open_sender(stack, interface, version, groups, self.ttl)
                except OSError as error:
                    self.failures[f"{interface.name} IPv{version}"] = _in_words(error)
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
                self._unicast[version] = opened = udp.open_unicast(version)
                self._receiving[opened] = None
                change.added.append(opened)
            if version == "6" and self._shared is None:
                self._shared = opened = udp.open_shared(self.port)
                self._receiving[opened] = None
                change.added.append(opened)
        except OSError as error:
            self.failures[f"IPv{version} unicast"] = _in_words(error)

    def _drop(self, key: tuple[str, Version], change: Change) -> None:
        endpoint = self._endpoints.pop(key)
        for opened in endpoint.sockets():
            del self._receiving[opened]
            change.removed.append(opened)
        endpoint.stack.close()

    def _nothing_opened(self) -> InterfaceError:
        from mingle.diagnostics import diagnosis
        from mingle.diagnostics.holders import holders

        reasons = [f"{what}: {why}" for what, why in self.failures.items()] or ["no interface was given"]
        observation = f"nothing could be opened for discovery on UDP port {self.port} ({'; '.join(reasons)})"
        facts = diagnosis.Facts(
            port=self.port,
            failures=self.failures,
            holders=holders(self.port),
            memberships=inspection.membership_limit(),
        )
        for finding in diagnosis.troubles(facts):
            if finding.status is Status.FAIL:
                return InterfaceError.explain(observation, cause=finding.observation, remedy=finding.remedy)
        return InterfaceError.explain(
            observation,
            cause="the interfaces went down or lost their addresses, or the system refuses such sockets",
            remedy="look at `mingle-discover interfaces`, or name a working interface in MINGLE_INTERFACE",
        )

    def receive(self, opened: socket.socket) -> list[Received]:
        """What waits on `opened`, up to a bound; call again when it is still readable.

        Errors are counted and never raised. A socket that was closed meanwhile has nothing.
        """
        batch: list[Received] = []
        if opened not in self._receiving:
            return batch
        endpoint = self._receiving[opened]
        for _ in range(_BATCH):
            try:
                datagram = udp.read(opened)
            except OSError as error:
                self.receive_errors[_error_name(error)] += 1
                continue
            if datagram is None:
                break
            # The kernel gives an IPv6 multicast to every member, also to one that joined on another interface
            # (net/ipv6/mcast.c, inet6_mc_check), and to sockets that never joined: a copy too many.
            if datagram.multicast and (endpoint is None or datagram.index != endpoint.interface.index):
                continue
            batch.append(self._received(datagram, opened, endpoint))
        self.received += len(batch)
        return batch

    def _received(self, datagram: udp.Datagram, opened: socket.socket, endpoint: _Endpoint | None) -> Received:
        host = datagram.source[0]
        # Not by asking the socket, which takes a tenth of the time that a flood's datagram costs.
        version: Version = "4" if len(datagram.source) == 2 else "6"
        scope = datagram.source[3] if len(datagram.source) == 4 else 0
        return Received(
            data=datagram.data,
            interface=self._interface_name(datagram.index, endpoint),
            source=datagram.source,
            family=version,
            multicast=datagram.multicast,
            local=host == "::1" or host.startswith("127.") or (host, scope) in self._own,
            destination=datagram.destination,
            via=opened,
            shared=not datagram.multicast and (endpoint is not None or opened is self._shared),
        )

    def _interface_name(self, index: int, endpoint: _Endpoint | None) -> str:
        for interface in self._interfaces:
            if interface.index == index:
                return interface.name
        try:
            return socket.if_indextoname(index)
        except OSError:  # the interface has gone since
            return endpoint.interface.name if endpoint else ""

    def multicast(self, interface_name: str, data: bytes, group: Group) -> bool:
        """Send `data` to `group` out of one interface, in every family open there; whether any went out.

        Like every sending method it counts an error and goes on: the next attempt may succeed.

        Raises:
            MulticastExpertError: `group` is none of those the transport was made for.
        """
        went_out = False
        for version in _VERSIONS:
            endpoint = self._endpoints.get((interface_name, version))
            if endpoint is not None and endpoint.sender is not None:
                target = (self._address(group, version), self.port)
                went_out |= self._attempt(endpoint.sender.sendto, data, target)
        return went_out

    def reply(self, received: Received, data: bytes) -> bool:
        """Send `data` to where `received` came from; whether it went out.

        What came by unicast is answered from the very address and port it was sent to: stateful firewalls and
        address translation let only such an answer back in. What came by multicast is answered by that
        interface's sender.
        """
        via = received.via or self._at_shared_port(received.family)
        if not received.multicast and via in self._receiving:
            return self._attempt(udp.send_from, via, data, received.destination, received.source)
        endpoint = self._endpoints.get((received.interface, received.family))
        if endpoint is not None and endpoint.sender is not None:
            return self._attempt(endpoint.sender.socket.sendto, data, received.source)
        return self._send_plain(received.family, data, received.source)

    def _at_shared_port(self, version: Version) -> socket.socket | None:
        """A socket of ours that answers like the one of a sibling, which has handed us what it received."""
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
            target = udp.socket_address(*address)
        except OSError as error:
            self.send_errors[_error_name(error)] += 1
            return False
        return self._send_plain("6" if len(target) == 4 else "4", data, target)

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


def _wanted(family: Family) -> tuple[Version, ...]:
    return _VERSIONS if family == "auto" else (family,)


def _error_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def _in_words(error: OSError) -> str:
    return f"{_error_name(error)}: {error.strerror or error}"
