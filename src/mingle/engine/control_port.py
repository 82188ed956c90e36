"""The control port: on which addresses of this machine it is open, and which of them are announced."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence

from mingle.config.settings import Family, Network
from mingle.network.connections import Connections
from mingle.network.interface_monitor import InterfaceMonitor
from mingle.network.interfaces import Interface, Kind
from mingle.protocol.events import Address
from mingle.protocol.machine import Endpoints
from mingle.wire import datagrams


def listening_addresses(usable: Iterable[Interface], family: Family) -> tuple[Address, ...]:
    """Return the addresses to listen on, best first: a link-local one only if its interface has no other address."""
    found: list[Address] = []
    for interface in usable:
        addresses = interface.of_family(family)
        routable = [each for each in addresses if not each.is_link_local]
        found += [
            Address(
                str(each.ip),
                interface.name,
                each.network.prefixlen,
                interface.index,
                last_resort=interface.kind in (Kind.VPN, Kind.VIRTUAL),
            )
            for each in routable or addresses[:1]
        ]
    return tuple(found[: datagrams.MAX_ADDRESSES])


class ControlPort:
    """Where others can connect to this process.

    Args:
        network: which addresses are to be used, and which one is announced in their place.
        interfaces: of this machine.
        connections: accept.
    """

    def __init__(self, network: Network, interfaces: InterfaceMonitor, connections: Connections) -> None:
        self._network = network
        self._interfaces = interfaces
        self._connections = connections

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses to listen on, best first."""
        return listening_addresses(self._interfaces.usable, self._network.family)

    def listen(self, *, locally: bool) -> Endpoints:
        """Open the port, and return where it listens.

        Args:
            locally: whether to listen on the link-local addresses as well, which are not announced.

        Raises:
            InterfaceError: no address can be bound.
        """
        network = self._network
        endpoints = Endpoints(
            addresses=self._bound(self._connections.listen),
            port=self._connections.port,
            advertised=(network.advertise,) if network.advertise else (),
            named=bool(network.interfaces),
        )
        if locally:
            self._listen_locally()
        return endpoints

    def listen_also(self, *, locally: bool) -> tuple[Address, ...]:
        """Open the port on new addresses; return all that are announced and bound, the earlier ones as well."""
        self._connections.leave_interfaces(but={each.index for each in self._interfaces.usable})
        addresses = self._bound(self._connections.listen_also)
        if locally:
            self._listen_locally()
        return addresses

    def listen_at_source(self, address: str, index: int) -> None:
        """Open the port, if it is open elsewhere, on an address from which a connection to another node has left.

        A route can carry a source that is no announced address, such as a service address on loopback. The others know
        this process by it, so the mesh, and torch after it, dial it there.

        Args:
            address: the local address of the connection.
            index: the interface that owns it, which is the scope of a link-local one.
        """
        if self._connections.is_listening and not ipaddress.ip_address(address).is_loopback:
            self._connections.listen_also([(address, index)])

    def _listen_locally(self) -> None:
        local = [
            (str(each.ip), interface.index)
            for interface in self._interfaces.usable
            for each in interface.of_family(self._network.family)
            if each.is_link_local
        ]
        self._connections.listen_also(local)

    def _bound(self, listen: Callable[[Sequence[tuple[str, int]]], frozenset[tuple[str, int]]]) -> tuple[Address, ...]:
        wanted = self.addresses
        bound = listen([(each.address, each.index) for each in wanted])
        return tuple(each for each in wanted if (each.address, each.index) in bound)
