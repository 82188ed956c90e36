"""The addresses on which the control port is open."""

from __future__ import annotations

from types import SimpleNamespace

from mingle.config.settings import Network
from mingle.engine.control_port import ControlPort, listening_addresses
from mingle.wire import datagrams
from tests.support.nics import nic

ETH0 = nic("eth0", 2, "10.0.0.1/24", "fd00::1/64", "fe80::1/64")


def test_the_addresses_to_listen_on() -> None:
    lonely = nic("eth1", 3, "fe80::2/64", "fe80::3/64")
    found = [(each.address, each.interface, each.index) for each in listening_addresses([ETH0, lonely], "auto")]
    assert found == [("10.0.0.1", "eth0", 2), ("fd00::1", "eth0", 2), ("fe80::2", "eth1", 3)]
    assert [each.address for each in listening_addresses([ETH0], "6")] == ["fd00::1"]
    many = nic("eth2", 4, *(f"10.0.1.{number}/24" for number in range(1, 40)))
    assert len(listening_addresses([many], "auto")) == datagrams.MAX_ADDRESSES


def test_further_addresses_are_listened_on_and_interfaces_that_have_gone_are_left() -> None:
    left: list[set[int]] = []
    connections = SimpleNamespace(
        listen_also=lambda addresses: frozenset(addresses[:1]), leave_interfaces=lambda *, but: left.append(but)
    )
    port = ControlPort(Network(interfaces=()), SimpleNamespace(usable=[ETH0]), connections)  # type: ignore[arg-type]
    assert [each.address for each in port.listen_also(locally=False)] == ["10.0.0.1"]
    assert left == [{2}]


def test_the_address_that_a_connection_leaves_from_is_listened_on_where_the_port_is_open() -> None:
    opened: list[tuple[str, int]] = []
    connections = SimpleNamespace(is_listening=False, listen_also=opened.extend)
    port = ControlPort(Network(interfaces=()), SimpleNamespace(usable=[ETH0]), connections)  # type: ignore[arg-type]
    port.listen_at_source("10.9.0.1", 1)
    assert not opened, "a process that answers nobody opens no port"
    connections.is_listening = True
    for address in ("127.0.0.1", "::1", "10.9.0.1"):
        port.listen_at_source(address, 1)
    assert opened == [("10.9.0.1", 1)], "on loopback nobody else calls"


def test_tunnels_and_bridges_are_a_last_resort() -> None:
    usable = [nic(name, number, f"10.{number}.0.1/24") for number, name in enumerate(("eth1", "wg0", "docker0", "lo"))]
    assert [each.last_resort for each in listening_addresses(usable, "auto")] == [False, True, True, False]
