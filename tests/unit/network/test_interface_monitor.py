"""The interfaces of a machine that changes: the test plays `scan` and the kernel's reports.

That the kernel reports changes is seen in the lab, where interfaces can be changed.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator
from ipaddress import ip_interface

import pytest
from msgspec.structs import replace

from mingle.network import interface_monitor, interfaces, routes
from mingle.network.interface_monitor import LOOK_ANYWAY_SECONDS, LOOK_GAP_SECONDS, LOOK_SECONDS, InterfaceMonitor
from mingle.network.interfaces import Interface
from tests.support.failing import refusing
from tests.support.nics import nic
from tests.support.receiving import no_descriptor_leaks

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
    monkeypatch.setattr(interface_monitor, "_subscribe", lambda: None)
    return made


@pytest.fixture
def news(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the test writes that something has changed on the machine."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    theirs.setblocking(False)
    monkeypatch.setattr(interface_monitor, "_subscribe", lambda: theirs)
    with ours, theirs:
        yield ours


def monitored(*named: str) -> InterfaceMonitor:
    """The interfaces at 0 s."""
    with contextlib.ExitStack() as stack:
        return InterfaceMonitor(named, "", "auto", 0.0, stack)


def names(monitor: InterfaceMonitor) -> list[str]:
    return [each.name for each in monitor.usable]


UNPLUGGED = replace(ETH0, running=False)
SERVICE = nic("lo", 1, "127.0.0.1/8", "10.9.0.1/32")
CONTAINER = nic("cali0001", 7, "fe80::ecee:eeff:feee:eeee/64")


@pytest.mark.parametrize(
    ("named", "before", "after", "used"),
    [
        pytest.param((), (LO, ETH0), (LO, ETH0, ETH1), (ETH0, ETH1), id="one comes"),
        pytest.param((), (LO, ETH0, ETH1), (LO, ETH1), (ETH1,), id="one of two goes"),
        pytest.param((), (LO, ETH0), (LO, UNPLUGGED), (ETH0,), id="the last one loses its carrier"),
        pytest.param((), (LO, UNPLUGGED), (LO, UNPLUGGED, ETH1), (ETH1, UNPLUGGED), id="another one has a carrier"),
        pytest.param((), (LO, ETH0), (LO, ETH0, CONTAINER), (ETH0,), id="a container comes"),
        pytest.param((), (LO,), (LO, ETH0), (ETH0,), id="an offline machine gets a network"),
        pytest.param((), (SERVICE, ETH0), (SERVICE, DOWN), (ETH0, SERVICE), id="loopback once, beside what was lost"),
        pytest.param(("lo",), (LO, ETH0), (SERVICE, ETH0), (SERVICE,), id="loopback that was named gets an address"),
    ],
)
def test_rescan_follows_interfaces_that_come_and_go(
    machine: Machine,
    named: tuple[str, ...],
    before: tuple[Interface, ...],
    after: tuple[Interface, ...],
    used: tuple[Interface, ...],
) -> None:
    machine.found = before
    monitor = monitored(*named)
    had = monitor.usable
    machine.found = after
    assert monitor.rescan(1.0) is (CONTAINER not in after)
    assert monitor.rescan(2.0) is False
    assert names(monitor) == [each.name for each in used]
    assert {each.addresses for each in monitor.usable} == {each.addresses for each in used}
    assert monitor.addresses() == {str(own.ip) for each in after for own in each.addresses}
    assert (had == monitor.usable) is (CONTAINER in after)


def test_a_carrier_that_is_lost_is_known(machine: Machine) -> None:
    monitor = monitored()
    machine.found = (LO, UNPLUGGED)
    assert monitor.rescan(1.0) is True
    assert (names(monitor), monitor.lost(), monitor.had_carrier) == (["eth0"], {"eth0": "has no carrier"}, True)
    machine.found = (LO, UNPLUGGED, ETH1)
    assert monitor.rescan(2.0) is True
    assert monitor.lost() == {}


@pytest.mark.parametrize(
    ("left", "lost"),
    [
        ((LO, DOWN), "is down"),
        ((LO, nic("eth0", 2)), "has lost its addresses"),
        ((LO,), "has gone"),
        ((LO, nic("cali1", 5, "fe80::1/64"), DOWN), "is down"),
    ],
)
def test_what_is_left_is_used_beside_what_is_lost(machine: Machine, left: tuple[Interface, ...], lost: str) -> None:
    monitor = monitored()
    assert not monitor.lost()
    machine.found = left
    assert monitor.rescan(1.0) is True
    assert names(monitor) == ["eth0", "cali1" if len(left) == 3 else "lo"]
    assert monitor.lost() == {"eth0": lost}
    machine.found = (LO, ETH0)
    assert monitor.rescan(1.0) is True
    assert names(monitor) == ["eth0"]
    assert not monitor.lost()


def test_interfaces_without_room_are_known(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface_monitor, "file_limit", lambda: 16)
    monitor = monitored()
    assert not monitor.left_out
    machine.found = (LO, ETH0, ETH1)
    assert monitor.rescan(1.0) is False
    assert monitor.left_out == (ETH1,)


def test_of_those_that_are_named_the_ones_that_exist_are_followed_and_the_last_is_waited_for(machine: Machine) -> None:
    machine.found = (LO, ETH0, ETH1)
    monitor = monitored("eth1", "eth0")
    assert names(monitor) == ["eth1", "eth0"]
    renumbered = nic("eth0", 9, "10.0.0.9/24")
    machine.found = (LO, replace(ETH1, up=False), renumbered)
    assert monitor.rescan(1.0) is True
    assert monitor.usable == (renumbered,)
    machine.found = (LO, ETH1, renumbered)
    assert monitor.rescan(2.0) is True
    assert names(monitor) == ["eth1", "eth0"]
    for found in ((), (LO, CONTAINER)):
        machine.found = found
        assert monitor.rescan(3.0) is False
    assert (names(monitor), monitor.lost()) == (["eth1", "eth0"], {"eth1": "has gone", "eth0": "has gone"})
    machine.found = (LO, ETH1, renumbered)
    assert monitor.rescan(4.0) is True, "the same ones are back"
    assert (names(monitor), monitor.lost()) == (["eth1", "eth0"], {})


@pytest.mark.parametrize(
    ("named", "connections_through"),
    [((), {"eth0", "eth1", "lo", "docker0"}), (("eth1",), {"eth1"}), (("10.0.0.1",), {"eth0"})],
)
def test_connections_go_through_named_interfaces_only(
    machine: Machine, named: tuple[str, ...], connections_through: set[str]
) -> None:
    machine.found = (LO, ETH0, ETH1)
    monitor = monitored(*named)
    assert {name for name in ("eth0", "eth1", "lo", "docker0") if monitor.in_use(name)} == connections_through


TWIN = replace(ETH1, addresses=(ip_interface("10.0.0.2/24"),))
"""A second NIC in the subnet of eth0."""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The interfaces by which this machine sends from each address of its own; the empty one is the kernel's choice."""
    table = {"": ETH0.index}
    monkeypatch.setattr(routes, "egress", lambda address, source="": table.get(source, table[""]))
    monkeypatch.setattr(routes, "source_of", lambda address: "10.0.0.1")
    monkeypatch.setattr(routes, "neighbors", lambda _interface: {})
    return table


@pytest.mark.parametrize(
    ("named", "address", "source"),
    [
        pytest.param(("eth1",), "10.0.0.9", "10.0.0.2", id="the kernel sends by the other one of the subnet"),
        pytest.param(("eth1",), "203.0.113.1", "", id="elsewhere nothing is gained"),
        pytest.param(("eth1",), "203.0.113.2", "10.0.0.2", id="a rule leads to the named one"),
        pytest.param(("eth1",), "10.0.0.2", "", id="this machine itself"),
        pytest.param(("eth1",), "fe80::7", "", id="link-local"),
        pytest.param(("eth0",), "10.0.0.9", "", id="the kernel sends by the named one"),
        pytest.param((), "10.0.0.9", "", id="none is named"),
    ],
)
def test_the_address_of_a_named_interface_is_bound_where_the_kernel_would_take_another(
    machine: Machine, table: dict[str, int], named: tuple[str, ...], address: str, source: str
) -> None:
    machine.found = (LO, ETH0, TWIN)
    if address == "203.0.113.2":
        table["10.0.0.2"] = TWIN.index
    assert monitored(*named).source_for(address) == source


def test_the_kernel_leads_astray_by_an_interface_that_was_not_named_or_has_no_carrier(
    machine: Machine, table: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.found = (LO, ETH0, TWIN)
    assert monitored().astray("10.0.0.9") is None, "none is named"
    assert monitored("eth0").astray("10.0.0.9") is None
    assert monitored("eth1").astray("203.0.113.1") is None, "no interface is known to lead there"
    found = monitored("eth1").astray("10.0.0.9")
    assert str(found) == "the kernel sends to 10.0.0.9 through eth0, and eth1 was named"
    table["10.0.0.2"] = TWIN.index
    assert monitored("eth1").astray("10.0.0.9", "10.0.0.2") is None, "a rule leads there"
    machine.found = (LO, replace(ETH0, running=False), TWIN)
    for named in ((), ("eth1",)):
        found = monitored(*named).astray("10.0.0.9")
        assert found is not None
        assert found.remedy == "plug in the cable of eth0, or set it down:\nsudo ip link set eth0 down"
    machine.found = (LO, ETH0, TWIN)
    monkeypatch.setattr(routes, "neighbors", {"eth0": {"10.0.0.9": "52:54:00:00:00:09"}}.__getitem__)
    assert monitored("eth1").astray("10.0.0.9") is None, "somebody has answered for the address there"
    assert monitored("eth1").detour("10.0.0.9") is not None


@pytest.mark.parametrize(
    ("named", "heard", "astray"),
    [
        pytest.param((), {"eth1"}, True, id="another one of the subnet"),
        pytest.param((), {"eth0", "eth1"}, False, id="both are on one wire"),
        pytest.param((), {"eth0"}, False, id="the right one"),
        pytest.param(("eth0",), {"eth1"}, False, id="the user knows better"),
    ],
)
def test_the_kernel_leads_astray_by_an_interface_on_which_the_other_machine_is_not_heard(
    machine: Machine, table: dict[str, int], named: tuple[str, ...], heard: set[str], astray: bool
) -> None:
    eth0, eth1 = nic("eth0", 2, "169.254.0.1/16"), nic("eth1", 3, "169.254.1.1/16")
    machine.found = (LO, eth0, eth1)
    monitor = monitored(*named)
    for name in heard:
        monitor.note_heard("169.254.1.2", name)
    monitor.note_heard("203.0.113.1", "eth1")  # no subnet of ours
    (found,) = monitor.heard_astray(()) or [None]
    assert monitor.astray("169.254.1.2") == found
    assert (found is not None) is astray
    if found is not None:
        assert str(found) == "the kernel sends to 169.254.1.2 through eth0, and 169.254.1.2 was heard on eth1"
        assert found.remedy.endswith("sudo ip route add 169.254.1.2/32 dev eth1")
    assert not monitor.heard_astray({"169.254.1.2"}), "a connection stands"


def test_monitor_names_the_owner_of_an_address(machine: Machine) -> None:
    machine.found = (LO, ETH0, ETH1)
    monitor = monitored()
    assert monitor.owner("10.1.0.1", "eth0") == "eth1"
    assert monitor.owner("fe80::1", "eth1") == "eth1", "each interface has such addresses: the one that was dialed on"
    assert monitor.owner("192.0.2.1", "eth0") == "eth0"
    assert (monitor.index("eth1"), monitor.index("eth7"), monitor.index("")) == (3, 0, 0)
    assert (monitor.name(3), monitor.name(9), monitor.name(0), monitor.owner("fe80::1", "")) == ("eth1", "", "", "")
    machine.found = (LO, ETH0)
    only = monitored()
    assert (only.index(""), only.name(0), only.owner("fe80::1", "")) == (2, "eth0", "eth0"), "only one can be meant"


def test_addresses_on_link(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "has_direct_route", lambda address: address == "192.0.2.9")
    on_link = {
        each
        for each in ("10.0.0.7", "fd00::7", "fe80::7", "192.0.2.9", "10.0.1.7", "fd01::7", "203.0.113.1")
        if monitored().is_on_link(each)
    }
    assert on_link == {"10.0.0.7", "fd00::7", "fe80::7", "192.0.2.9"}


def test_netlink_report_makes_a_scan_due(news: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        monitor = InterfaceMonitor((), "", "auto", 0.0, stack)
        assert monitor.scan_due == LOOK_ANYWAY_SECONDS
        for _ in range(3):
            news.send(b"an address has come")
        monitor.drain_netlink()
        assert monitor.scan_due == LOOK_GAP_SECONDS, "soon, and not at once: a switch of networks is told in many words"
        monitor.rescan(5.0)
        assert monitor.scan_due == 5.0 + LOOK_ANYWAY_SECONDS
        assert monitor.netlink is not None
        with pytest.raises(BlockingIOError):
            monitor.netlink.recv(1)
    assert monitor.netlink.fileno() == -1


@pytest.mark.skipif(sys.platform != "linux", reason="rtnetlink is Linux's")
@pytest.mark.parametrize("without", ["sockets", "groups", "Linux"])
def test_where_the_kernel_reports_nothing_scans_are_due_all_the_same_and_no_socket_stays_open(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "scan", lambda: (LO, ETH0))
    if without == "Linux":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif without == "sockets":
        monkeypatch.setattr(socket, "socket", refusing(errno.EAFNOSUPPORT))
    else:
        monkeypatch.setattr(socket.socket, "bind", refusing(errno.EPERM))
    with no_descriptor_leaks():
        monitor = monitored()
    assert (monitor.netlink, monitor.scan_due) == (None, LOOK_SECONDS)
    monitor.rescan(7.0)
    assert monitor.scan_due == 7.0 + LOOK_SECONDS
