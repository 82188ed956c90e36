"""Which interfaces there are, which of them are used, and why not the others."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_interface

import netifaces
import pytest

from mingle.config.settings import Family
from mingle.errors import InterfaceError
from mingle.network.interfaces import Choice, Interface, Kind, choose, owner, scan
from tests.support.isolation import ip, needs_namespaces, run_isolated, wait_for_link_local
from tests.support.nics import nic

LO = nic("lo", 1, "127.0.0.1/8", "::1/128", multicast=False)
ETH0 = nic("eth0", 2, "10.0.0.1/24", "fd00::1/64", "fe80::1/64")
DOCKER0 = nic("docker0", 3, "172.17.0.1/16")
ETH1 = nic("eth1", 4, "10.1.0.1/24")
DOWN = nic("eth9", 6, "10.6.0.1/24", up=False, running=False)
BARE = nic("eth8", 7)


def names(choice: Choice) -> list[str]:
    return [interface.name for interface in choice.usable]


KINDS = {
    Kind.PHYSICAL: "eth0 enp5s0f0 ib0 bond0 br0 br-lan",  # an administrator's bridge carries the machine's own address
    Kind.VIRTUAL: "br-0123456789ab docker0 virbr0 cni0 veth12ab flannel.1 cali0f00 vxlan.calico",
    Kind.VPN: "tun0 tap3 wg0 tailscale0",
    Kind.LOOPBACK: "lo",
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, named in KINDS.items() for name in named.split()])
def test_the_kind_by_name(name: str, kind: Kind) -> None:
    assert nic(name, 2).kind is kind
    assert nic("eth0", 2, point_to_point=True).kind is Kind.VPN


def test_physical_before_vpn_before_virtual_and_by_index() -> None:
    vpn = nic("tun0", 5, "10.9.0.1/24")
    assert names(choose([DOCKER0, vpn, ETH1, ETH0, LO])) == ["eth0", "eth1", "tun0", "docker0"]
    dumb, unplugged = nic("eth2", 2, "10.2.0.1/24", multicast=False), nic("eth3", 3, "10.3.0.1/24", running=False)
    assert names(choose([dumb, unplugged, DOCKER0])) == ["docker0", "eth2", "eth3"]


def test_skipped_interface_has_a_reason() -> None:
    choice = choose([LO, ETH0, DOWN, BARE])
    assert names(choice) == ["eth0"]
    reasons = {interface.name: reason for interface, reason in choice.skipped}
    assert reasons == {
        "lo": "loopback: used when nothing else is, or when it is named",
        "eth9": "down",
        "eth8": "no IPv4 or IPv6 address",
    }


def pods(count: int) -> list[Interface]:
    """The links of so many pods, as Calico makes them."""
    return [nic(f"cali{number:04x}", 100 + number, "fe80::ecee:eeff:feee:eeee/64") for number in range(count)]


def test_the_links_of_containers_when_there_is_nothing_else() -> None:
    choice = choose([LO, ETH0, DOCKER0, *pods(250)])
    assert names(choice) == ["eth0", "docker0"]
    reasons = {interface.name: reason for interface, reason in choice.skipped}
    assert reasons["cali0007"] == "a container's link: used when nothing else is, or when it is named"
    assert names(choose([LO, *pods(2)])) == ["cali0000", "cali0001"]
    assert names(choose([LO, ETH0, *pods(2)], named=["cali0001"])) == ["cali0001"]


def test_a_card_and_a_bridge_with_a_subnet_are_no_link_of_a_container() -> None:
    fabric = nic("eth5", 5, "fe80::5/64")
    assert names(choose([LO, ETH0, fabric, *pods(1)])) == ["eth0", "eth5"]
    assert names(choose([LO, fabric, *pods(1)])) == ["eth5"]
    bridge = nic("docker0", 3, "172.17.0.1/16", "fe80::3/64")
    assert names(choose([LO, bridge])) == ["docker0"]
    assert names(choose([LO, ETH0, bridge], family="6")) == ["eth0"], "IPv6 has no subnet there"


def test_the_limit_of_open_files_leaves_out_the_last_ones_and_never_the_first() -> None:
    unknown = [nic(f"plugin{number:03}", 100 + number, "fe80::1/64") for number in range(250)]
    card = nic("eth7", 900, "10.7.0.1/24")
    choice = choose([LO, *unknown, card], files=1024)
    assert names(choice) == ["eth7", *(f"plugin{number:03}" for number in range(127))]
    assert choice.left_out == tuple(unknown[127:])
    assert (unknown[127], "the limit of 1024 open files has no room for it") in choice.skipped
    assert names(choose([LO, *unknown, card], files=3)) == ["eth7"]
    assert names(choose([LO, ETH0, *unknown], named=["plugin249", "plugin003"], files=3)) == ["plugin249", "plugin003"]
    assert not choose([LO, ETH0, ETH1], files=1024).left_out


def test_a_service_address_on_loopback_is_as_good_as_a_card() -> None:
    routed = nic("lo", 1, "127.0.0.1/8", "10.9.0.1/32", "::1/128", "fd09::1/128", "169.254.20.10/32")
    fabric = nic("eth5", 5, "fe80::5/64")
    choice = choose([routed, fabric])
    assert [str(one) for one in choice.usable] == ["lo 10.9.0.1/32 fd09::1/128", "eth5 fe80::5/64"]
    assert not choice.skipped
    assert names(choose([routed, ETH0])) == ["eth0", "lo"]
    assert [str(one) for one in choose([routed, fabric], family="4", named=["10.9.0.1"]).usable] == [
        "lo 10.9.0.1/32 127.0.0.1/8 ::1/128 fd09::1/128 169.254.20.10/32"
    ]
    assert choose([routed, DOWN]).usable == (routed,), "an offline machine has all of loopback"
    assert names(choose([LO, DOWN, BARE])) == ["lo"]


def test_family() -> None:
    assert ETH0.of_family("auto")[0] == ETH0.addresses[0]
    assert ETH0.of_family("6") == (ip_interface("fd00::1/64"), ip_interface("fe80::1/64"))
    assert names(choose([ETH0, ETH1], family="6")) == ["eth0"]
    only_link_local = nic("eth5", 5, "fe80::5/64")
    assert names(choose([only_link_local], family="6")) == ["eth5"]
    assert names(choose([only_link_local])) == ["eth5"]
    with pytest.raises(InterfaceError, match="no network interface can be used with IPv4;"):
        choose([only_link_local], family="4")


@pytest.mark.parametrize(("found", "listed"), [([DOWN, BARE], r"eth9 10\.6\.0\.1/24 \(down\), eth8"), ([], "none")])
def test_nothing_usable_lists_what_there_is(found: list[Interface], listed: str) -> None:
    with pytest.raises(InterfaceError, match=f"the interfaces here are: {listed}"):
        choose(found)


def test_named_interfaces_are_chosen_exactly_and_in_order() -> None:
    choice = choose([LO, ETH0, ETH1, DOCKER0], named=["docker0", "lo", "eth0", "docker0"])
    assert names(choice) == ["docker0", "lo", "eth0"]
    assert choice.skipped == ((ETH1, "another interface was named"),)


def test_interface_named_by_an_address_lists_it_first() -> None:
    two = nic("eth0", 2, "10.0.0.1/24", "10.0.0.2/24", "fd00::1/64")
    assert choose([LO, two], named=["10.0.0.2"]).usable[0].addresses[0].ip == IPv4Address("10.0.0.2")
    chosen = choose([LO, two], named=["fd00::1"]).usable[0]
    assert chosen.addresses[0].ip == IPv6Address("fd00::1")
    assert sorted(map(str, chosen.addresses)) == sorted(map(str, two.addresses))
    (twice,) = choose([LO, two], named=["10.0.0.2", "10.0.0.1", "eth0"]).usable
    assert twice.addresses[0].ip == IPv4Address("10.0.0.2"), "the first name decides"


@pytest.mark.parametrize(
    ("named", "family", "message"),
    [
        ("eth7", "auto", "no interface has the name 'eth7'"),
        ("10.0.0.9", "auto", "no interface has the address '10.0.0.9'"),
        ("eth9", "auto", "'eth9' was named, but it cannot be used: down"),
        ("eth1", "6", "'eth1' was named, but it cannot be used: no IPv6 address"),
    ],
)
# Where another variable or an argument names it, MINGLE_INTERFACE is unset already, or comes after the argument.
@pytest.mark.parametrize("named_by", ["MINGLE_INTERFACE", "GLOO_SOCKET_IFNAME", "interface="])
def test_a_named_one_that_cannot_be_used_is_an_error_whose_fix_is_where_it_was_named(
    named: str, family: Family, message: str, named_by: str
) -> None:
    with pytest.raises(InterfaceError) as caught:
        choose([LO, ETH0, ETH1, DOWN], named=[named], family=family, named_by=named_by)
    assert message in str(caught.value)
    assert "the interfaces here are: lo 127.0.0.1/8 ::1/128, eth0 10.0.0.1/24" in str(caught.value)
    assert named_by in str(caught.value.remedy)
    assert ("MINGLE_INTERFACE" in str(caught.value)) is (named_by == "MINGLE_INTERFACE")


# Where another variable or an argument names it, MINGLE_INTERFACE is unset already, or comes after the argument.


TWIN = nic("eth7", 9, "fe80::1/64", "10.0.0.1/24")


@pytest.mark.parametrize(
    ("found", "address", "name"),
    [
        ((LO, ETH0, ETH1), "10.1.0.1", "eth1"),
        ((LO, ETH0, ETH1), IPv6Address("fd00::1"), "eth0"),
        ((LO, ETH0, ETH1), "10.1.0.2", None),
        ((TWIN, ETH0), "10.0.0.1", "eth0"),
        ((ETH0, TWIN), "fe80::1%eth7", "eth7"),
        ((ETH0, TWIN), "fe80::1%9", "eth7"),
        ((ETH0, TWIN), "fe80::1%eth3", None),
    ],
)
def test_owner_of_an_address(found: tuple[Interface, ...], address: str | IPv6Address, name: str | None) -> None:
    owns = owner(found, address)
    assert (None if owns is None else owns.name) == name
    with pytest.raises(ValueError, match="localhost"):
        owner(found, "localhost")


def test_scan_finds_loopback_and_nothing_that_vanishes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = netifaces.interfaces()
    monkeypatch.setattr(netifaces, "interfaces", lambda: [*listed, "gone0"])
    found = scan()
    assert [interface.index for interface in found] == sorted(interface.index for interface in found)
    assert "gone0" not in [interface.name for interface in found]
    (loopback,) = [interface for interface in found if interface.loopback]
    assert (loopback.up, loopback.running) == (True, True)
    assert loopback.of_family("4")[0].ip == IPv4Address("127.0.0.1")


@pytest.mark.lab
@needs_namespaces
def test_scan_of_every_sort_of_interface() -> None:
    run_isolated(every_sort_of_interface)


def every_sort_of_interface() -> None:
    ip("link add plugged type veth peer name other")
    ip("link set other addrgenmode none up")
    ip("address add 169.254.7.7/16 dev plugged")
    ip("address add 10.5.0.1/24 dev plugged")
    ip("address add 10.5.0.7/24 dev plugged label plugged:1")
    ip("address add fd00::5/64 dev plugged nodad")
    ip("link set plugged up")
    wait_for_link_local("plugged")
    ip("link add unplugged type veth peer name its-peer")
    ip("address add 10.6.0.1/24 dev unplugged")
    ip("link set unplugged up")
    ip("tuntap add tunnel mode tun")
    ip("address add 10.7.0.1 peer 10.7.0.2/32 dev tunnel")
    ip("link set tunnel up")
    ip("link add switched-off type bridge")
    ip("address add 10.8.0.1/24 dev switched-off")
    # /sys still shows the namespace that this process came from: scan must not depend on it.
    found = {interface.name: interface for interface in scan()}
    assert set(found) == {"lo", "other", "plugged", "unplugged", "its-peer", "tunnel", "switched-off"}
    plugged = found["plugged"]
    assert [str(address) for address in plugged.addresses][:3] == ["10.5.0.1/24", "10.5.0.7/24", "fd00::5/64"]
    assert [str(address) for address in plugged.of_family("4")][-1] == "169.254.7.7/16"
    last_ipv6 = plugged.of_family("6")[-1]
    assert last_ipv6.is_link_local
    assert "%" not in str(last_ipv6)
    assert (plugged.up, plugged.running, plugged.multicast, plugged.loopback) == (True, True, True, False)
    assert (found["unplugged"].up, found["unplugged"].running) == (True, False)
    assert found["tunnel"].point_to_point
    assert found["tunnel"].kind is Kind.VPN
    assert not found["switched-off"].up
    assert not found["lo"].multicast
    choice = choose(found.values())
    assert choice.usable[0].name == "plugged"
    assert {interface.name for interface, _ in choice.skipped} >= {"lo", "switched-off"}
