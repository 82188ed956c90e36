"""The interfaces of a machine that changes: `scan` is played by the test."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from ipaddress import ip_interface
from typing import Any

import pytest
from msgspec.structs import replace

from mingle.config.settings import Network
from mingle.engine.nics import LOOK_ANYWAY_SECONDS, LOOK_GAP_SECONDS, LOOK_SECONDS, Nics, own_addresses
from mingle.errors import InterfaceError
from mingle.network import interfaces, link_news
from mingle.network.interfaces import Interface
from mingle.wire import datagrams


def nic(name: str, index: int, *addresses: str, up: bool = True) -> Interface:
    """An interface of the machine that the test makes up."""
    return Interface(name, index, tuple(map(ip_interface, addresses)), up=up, loopback=name == "lo")


LO = nic("lo", 1, "127.0.0.1/8")
ETH0 = nic("eth0", 2, "10.0.0.1/24", "fd00::1/64", "fe80::1/64")
ETH1 = nic("eth1", 3, "10.1.0.1/24")
DOWN = replace(ETH0, up=False)


class Machine:
    """What `scan` finds."""

    def __init__(self, *found: Interface) -> None:
        self.found = found

    def scan(self) -> tuple[Interface, ...]:
        return self.found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """It tells no news."""
    made = Machine(LO, ETH0)
    monkeypatch.setattr(interfaces, "scan", made.scan)
    monkeypatch.setattr(link_news, "subscribe", lambda: None)
    return made


@pytest.fixture
def news(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the test writes that something has changed on the machine."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    theirs.setblocking(False)
    monkeypatch.setattr(link_news, "subscribe", lambda: theirs)
    with ours, theirs:
        yield ours


def new_nics(**settings: Any) -> Nics:
    """The interfaces at 0 s."""
    with contextlib.ExitStack() as stack:
        return Nics(Network(**settings), 0.0, stack)


def names(nics: Nics) -> list[str]:
    return [each.name for each in nics.usable]


def test_nothing_has_changed(machine: Machine) -> None:
    nics = new_nics()
    assert names(nics) == ["eth0"]
    assert nics.look(1.0) is False


def test_what_appears_is_used_and_what_vanishes_is_not(machine: Machine) -> None:
    nics = new_nics()
    machine.found = (LO, ETH0, ETH1)
    assert nics.look(1.0) is True
    assert names(nics) == ["eth0", "eth1"]
    assert nics.bare_addresses() == {"127.0.0.1", "10.0.0.1", "fd00::1", "fe80::1", "10.1.0.1"}
    machine.found = (LO, ETH1)
    assert nics.look(1.0) is True
    assert names(nics) == ["eth1"]
    assert [each.address for each in nics.addresses()] == ["10.1.0.1"]


def test_loopback_does_not_take_the_place_of_a_cable_that_was_pulled(machine: Machine) -> None:
    nics = new_nics()
    machine.found = (LO, DOWN)
    assert nics.look(1.0) is False
    assert names(nics) == ["eth0"]
    machine.found = (LO, ETH0)
    assert nics.look(1.0) is True
    assert names(nics) == ["eth0"]


def test_a_machine_that_was_offline_gets_a_network(machine: Machine) -> None:
    machine.found = (LO,)
    nics = new_nics()
    assert names(nics) == ["lo"]
    machine.found = (LO, ETH0)
    assert nics.look(1.0) is True
    assert names(nics) == ["eth0"]


def test_a_named_one_that_is_gone_is_waited_for(machine: Machine) -> None:
    nics = new_nics(interfaces=("eth0",))
    machine.found = (LO, ETH1)
    assert nics.look(1.0) is False
    assert names(nics) == ["eth0"]
    again = nic("eth0", 9, "10.0.0.7/24")
    machine.found = (LO, ETH1, again)
    assert nics.look(1.0) is True
    assert nics.usable == (again,)


def test_none_can_be_used(machine: Machine) -> None:
    machine.found = (DOWN,)
    with pytest.raises(InterfaceError, match="no network interface"):
        new_nics()


@pytest.mark.parametrize(
    ("named", "connections_through"),
    [((), {"eth0", "eth1", "lo", "docker0"}), (("eth1",), {"eth1"}), (("10.0.0.1",), {"eth0"})],
)
def test_connections_go_through_named_interfaces_only(
    machine: Machine, named: tuple[str, ...], connections_through: set[str]
) -> None:
    machine.found = (LO, ETH0, ETH1)
    nics = new_nics(interfaces=named)
    assert {name for name in ("eth0", "eth1", "lo", "docker0") if nics.in_use(name)} == connections_through


def test_who_owns_an_address(machine: Machine) -> None:
    machine.found = (LO, ETH0, ETH1)
    nics = new_nics()
    assert nics.owner("10.1.0.1", "eth0") == "eth1"
    assert nics.owner("fe80::1", "eth1") == "eth1", "each interface has such addresses: the one that was dialled on"
    assert nics.owner("192.0.2.1", "eth0") == "eth0"
    assert (nics.index("eth1"), nics.index("eth7"), nics.index("")) == (3, 0, 0)
    machine.found = (LO, ETH0)
    assert new_nics().index("") == 2, "only one can be meant"


def test_without_news_it_is_looked_every_two_seconds(machine: Machine) -> None:
    nics = new_nics()
    assert nics.look_due == LOOK_SECONDS
    nics.look(7.0)
    assert nics.look_due == 7.0 + LOOK_SECONDS


def test_with_news_it_is_looked_when_there_are_some(news: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        nics = Nics(Network(), 0.0, stack)
        assert nics.look_due == LOOK_ANYWAY_SECONDS
        for _ in range(3):
            news.send(b"an address has come")
        nics.heard_news()
        assert nics.look_due == LOOK_GAP_SECONDS, "soon, and not at once: a switch of networks is told in many words"
        nics.look(5.0)
        assert nics.look_due == 5.0 + LOOK_ANYWAY_SECONDS
        assert nics.news is not None
        with pytest.raises(BlockingIOError):
            nics.news.recv(1)
    assert nics.news.fileno() == -1


def test_the_addresses_to_listen_on() -> None:
    lonely = nic("eth1", 3, "fe80::2/64", "fe80::3/64")
    found = [(each.address, each.interface, each.index) for each in own_addresses([ETH0, lonely], "auto")]
    assert found == [("10.0.0.1", "eth0", 2), ("fd00::1", "eth0", 2), ("fe80::2", "eth1", 3)]
    assert [each.address for each in own_addresses([ETH0], "6")] == ["fd00::1"]
    many = nic("eth2", 4, *(f"10.0.1.{number}/24" for number in range(1, 40)))
    assert len(own_addresses([many], "auto")) == datagrams.MAX_ADDRESSES


def test_tunnels_and_bridges_are_a_last_resort() -> None:
    usable = [ETH1, nic("wg0", 4, "10.9.0.1/24"), nic("docker0", 5, "172.17.0.1/16"), LO]
    assert [each.last_resort for each in own_addresses(usable, "auto")] == [False, True, True, False]
