"""The machine's network interfaces: which exist, which of them to use, and when they change.

`scan` asks the kernel; `choose` is pure, so that every rule of preference can be tested on
machines that do not exist. An interface that is passed over is returned with the reason in words.
`InterfaceMonitor` repeats both when the kernel reports a change by rtnetlink(7), or after a while.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import struct
import sys
from collections.abc import Collection, Container, Iterable, Sequence
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface
from pathlib import Path

import netifaces
from msgspec import Struct, structs

from mingle import forksafe
from mingle.config.settings import Family
from mingle.config.values import parse_address
from mingle.diagnostics import Detour
from mingle.errors import InterfaceError, counted
from mingle.records import logger

if sys.platform != "win32":
    import fcntl
    import resource

LOOK_SECONDS = 2.0
"""The interval between two scans where the kernel does not report changes, …"""
LOOK_ANYWAY_SECONDS = 20.0
"""… the interval where it does, …"""
LOOK_GAP_SECONDS = 0.2
"""… and the shortest interval, however many changes it reports: containers come and go all the time."""

REMEMBERED_ADDRESSES = 256
"""Of how many addresses is known on which interfaces they were heard; bounded against forged ones."""
# What an interface costs in descriptors, by IP version: the receivers, the sender, a listener of the control port.
_FILES_PER_VERSION = {4: 3, 6: 4}

# <net/if.h>. The first four agree on Linux and the BSDs, the last does not.
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
_IFF_POINTOPOINT = 0x10
_IFF_RUNNING = 0x40
_IFF_MULTICAST = 0x8000 if sys.platform == "darwin" else 0x1000
_SIOCGIFINDEX = 0x8933
_SIOCGIFFLAGS = 0xC0206911 if sys.platform == "darwin" else 0x8913
# <linux/rtnetlink.h>: the groups of messages to subscribe to.
_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_RTA_DST, _RTA_SRC, _RTA_OIF = 1, 2, 4
_NLM_F_REQUEST = 1
_DRAINED_AT_ONCE = 64
_ATF_COM = 0x2  # <linux/if_arp.h>: the entry is complete
_IFREQ_SIZE = 40  # struct ifreq of a 64-bit Linux; the BSDs' 32 bytes fit

# Prefixes of names. A container's own end of a veth pair is named eth0 and is as good as a card.
_VIRTUAL = (
    "antrea", "anpi", "awdl", "azv", "bridge", "cali", "cbr", "cilium", "cni", "docker", "dummy", "eni", "flannel",
    "geneve", "gke", "ifb", "kube-", "llw", "lxc", "lxdbr", "nodelocaldns", "ovn", "ovs", "podman", "tunl", "vboxnet",
    "veth", "virbr", "vmnet", "vnet", "vxlan", "weave",
)  # fmt: skip
_VPN = (
    "gpd", "gre", "ip6tnl", "ipsec", "nebula", "nordlynx", "ppp", "sit", "tailscale", "tap", "tun", "utun", "vpn", "wg",
    "zt",
)  # fmt: skip


class Kind(IntEnum):
    """The kinds of interfaces, in the order of preference."""

    PHYSICAL = 0
    """A card, or what looks like one from inside a container."""
    VPN = 1
    """A tunnel or another point-to-point link."""
    VIRTUAL = 2
    """A bridge or overlay that containers or virtual machines of this machine use; told by the name."""
    LOOPBACK = 3


class Interface(Struct, frozen=True):
    """One network interface as the kernel described it."""

    name: str
    index: int
    """The kernel's number, which is also the scope id of link-local addresses on it."""
    addresses: tuple[IPv4Interface | IPv6Interface, ...]
    """Best first: routable ones before link-local ones, then IPv4 before IPv6. IPv6 without zone."""
    up: bool = True
    """Switched on by the administrator."""
    running: bool = True
    """Has a carrier."""
    multicast: bool = True
    """Has the MULTICAST flag. `lo` lacks it on Linux and carries IPv4 multicast all the same."""
    loopback: bool = False
    point_to_point: bool = False

    @property
    def kind(self) -> Kind:
        """Told by the flags where they say it, else by the name."""
        if self.loopback:
            return Kind.LOOPBACK
        # Docker names its bridges br- and twelve digits; a user's br-lan is none of them.
        if self.name.startswith(_VIRTUAL) or (self.name.startswith("br-") and len(self.name) == 15):
            return Kind.VIRTUAL
        if self.point_to_point or self.name.startswith(_VPN):
            return Kind.VPN
        return Kind.PHYSICAL

    def of_family(self, family: Family) -> tuple[IPv4Interface | IPv6Interface, ...]:
        """Return the addresses of `family`, best first."""
        return tuple(address for address in self.addresses if family in ("auto", str(address.version)))

    def is_container_link(self, family: Family) -> bool:
        """Return whether this is what a container's network plugin leaves on the machine, without a subnet of its own.

        A node of Kubernetes has one for each pod. No other machine is behind it.
        """
        return self.kind is Kind.VIRTUAL and self.is_only_link_local(family)

    def is_only_link_local(self, family: Family) -> bool:
        """Return whether every address of `family` is a link-local one."""
        return all(address.is_link_local for address in self.of_family(family))

    def service_addresses(self, family: Family) -> tuple[IPv4Interface | IPv6Interface, ...]:
        """Return the addresses of loopback that other machines can reach: those of a host to which a fabric routes."""
        return tuple(each for each in self.of_family(family) if not (each.is_loopback or each.is_link_local))

    def __str__(self) -> str:
        return " ".join([self.name, *(str(address) for address in self.addresses)])


class Choice(Struct, frozen=True):
    """The result of `choose`."""

    usable: tuple[Interface, ...]
    """Best first; never empty."""
    skipped: tuple[tuple[Interface, str], ...]
    """The others, each with the reason."""
    offline: bool = False
    """Whether nothing is left but what is used when nothing else is."""
    left_out: tuple[Interface, ...] = ()
    """Those of the others for which the limit of open files has no room."""


def scan() -> tuple[Interface, ...]:
    """Return all interfaces of this machine (on Linux: of this network namespace), sorted by index.

    Addresses that IPv6 still checks for duplicates, or calls deprecated, cannot be told from others here.
    """
    addresses: dict[str, list[IPv4Interface | IPv6Interface]] = {}
    for label in netifaces.interfaces():
        # An address with a label (`ip addr add … label eth0:1`) is listed as if it were an interface.
        name = label.split(":", 1)[0]
        addresses.setdefault(name, []).extend(_addresses(label))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, owned in addresses.items():
            try:
                index, flags = _index(probe, name), _flags(probe, name)
            except OSError:  # ENODEV: the interface went away after it was listed
                continue
            found.append(
                Interface(
                    name=name,
                    index=index,
                    addresses=tuple(sorted(dict.fromkeys(owned), key=_address_order)),
                    up=bool(flags & _IFF_UP),
                    running=bool(flags & _IFF_RUNNING),
                    multicast=bool(flags & _IFF_MULTICAST),
                    loopback=bool(flags & _IFF_LOOPBACK),
                    point_to_point=bool(flags & _IFF_POINTOPOINT),
                )
            )
    return tuple(sorted(found, key=lambda interface: interface.index))


def _addresses(label: str) -> list[IPv4Interface | IPv6Interface]:
    try:
        families = netifaces.ifaddresses(label)
    except ValueError:  # netifaces: no such interface; it went away after it was listed
        return []
    # netifaces writes an IPv6 mask as "ffff:ffff::/32" and appends the zone to link-local addresses
    # ("fe80::1%eth0"). The zone is dropped: the index of the interface says the same, and two spellings of
    # one address would not be equal.
    # The bytes, since the kernel's own text needs no validation, and that takes longer than all else here.
    found: list[IPv4Interface | IPv6Interface] = [
        IPv4Interface((socket.inet_aton(entry["addr"]), entry.get("netmask", "32")))
        for entry in families.get(netifaces.AF_INET, ())
    ]
    for entry in families.get(netifaces.AF_INET6, ()):
        length = int(entry.get("netmask", "/128").rpartition("/")[2])
        packed = socket.inet_pton(socket.AF_INET6, entry["addr"].partition("%")[0])
        found.append(IPv6Interface((packed, length)))
    return found


def _index(probe: socket.socket, name: str) -> int:
    """Return the index of the interface `name`; raise OSError if it does not exist."""
    if sys.platform != "linux":
        return socket.if_nametoindex(name)
    # if_nametoindex() opens a socket, and without a free descriptor it reports that the interface does not exist.
    answer = fcntl.ioctl(probe, _SIOCGIFINDEX, struct.pack(f"{_IFREQ_SIZE}s", name.encode()[:15]))
    (index,) = struct.unpack_from("=i", answer, 16)
    return int(index)


def _flags(probe: socket.socket, name: str) -> int:
    """Return the IFF_ flags of the interface `name`; raise OSError if it does not exist.

    By ioctl and not from /sys/class/net: that directory shows the network namespace it was mounted in, which
    need not be the caller's, and it leaves out IFF_RUNNING (net/core/net-sysfs.c prints `dev->flags`).
    """
    request = struct.pack(f"{_IFREQ_SIZE}s", name.encode()[:15])
    answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
    (flags,) = struct.unpack_from("=H", answer, 16)
    return int(flags)


def _address_order(address: IPv4Interface | IPv6Interface) -> tuple[bool, int]:
    return address.is_link_local, address.version


def file_limit() -> int:
    """Return the number of files that this process may open."""
    if sys.platform == "win32":  # for the type checker
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def choose(
    found: Iterable[Interface],
    *,
    named: Sequence[str] = (),
    named_by: str = "",
    family: Family = "auto",
    files: int = sys.maxsize,
) -> Choice:
    """Return the interfaces to use, and the reasons against the others.

    Named ones (by name or by an address on them) are taken exactly, in the order given; an address that was
    named comes first on its interface. Otherwise every interface is taken that is up and has an address of
    `family`, in the order: with a carrier, with a routable address, with the MULTICAST flag, by `Kind`, by index; the
    last ones are left out if all would take more than half of `files`. The links of containers, and the addresses
    127.0.0.0/8 and ::1, are taken when they are named or when there is nothing else, so that one offline machine works;
    other addresses of loopback are as good as a card's.

    Args:
        found: all interfaces.
        named: those that the user named.
        named_by: the variable or the argument that names them, for an error.
        family: the IP versions to use.
        files: the limit of open files.

    Raises:
        InterfaceError: a named interface does not exist, is down or has no address of `family`; or none is
        usable.
    """
    everything = tuple(found)
    if named:
        return _choose_named(everything, named, named_by or "MINGLE_INTERFACE", family)
    usable: list[Interface] = []
    links: list[Interface] = []
    loopback: list[Interface] = []
    skipped: list[tuple[Interface, str]] = []
    for interface in everything:
        reason = _unusable(interface, family)
        if reason:
            skipped.append((interface, reason))
        elif interface.loopback:
            loopback.append(interface)
        else:
            (links if interface.is_container_link(family) else usable).append(interface)
    offline = not usable
    if usable:
        for interface in loopback:
            service = interface.service_addresses(family)
            if service:
                usable.append(structs.replace(interface, addresses=service))
            else:
                skipped.append((interface, "loopback: used when nothing else is, or when it is named"))
        skipped += [(one, "a container's link: used when nothing else is, or when it is named") for one in links]
    else:
        usable = links or loopback
    if not usable:
        raise InterfaceError.explain(
            f"no network interface can be used with {_in_words(family)}; {_inventory(everything)}",
            cause="every interface is down or has no address of that family",
            remedy="bring one up (ip link set dev NAME up), or allow both families with MINGLE_FAMILY=auto",
        )
    usable.sort(
        key=lambda one: (not one.running, one.is_only_link_local(family), not one.multicast, one.kind, one.index)
    )
    count = _affordable(usable, family, files)
    skipped += [(one, f"the limit of {files} open files has no room for it") for one in usable[count:]]
    return Choice(tuple(usable[:count]), tuple(skipped), offline, tuple(usable[count:]))


def _affordable(interfaces: Sequence[Interface], family: Family, files: int) -> int:
    """Return how many of the interfaces, and at least the first, take half of the open files at most."""
    room = files // 2
    for count, interface in enumerate(interfaces):
        room -= sum(_FILES_PER_VERSION[version] for version in {each.version for each in interface.of_family(family)})
        if room < 0 and count:
            return count
    return len(interfaces)


def _choose_named(found: tuple[Interface, ...], named: Sequence[str], named_by: str, family: Family) -> Choice:
    chosen: dict[int, Interface] = {}
    for name in named:
        interface = _find(found, name, named_by)
        reason = _unusable(interface, family)
        if reason:
            raise InterfaceError.explain(
                f"the interface {name!r} was named, but it cannot be used: {reason}; {_inventory(found)}",
                cause="the wrong interface was named, or it is not configured yet",
                remedy=f"name another one in {named_by}, or leave it out to use every suitable one",
            )
        # One interface may be named twice, once by each of its addresses: the first name decides.
        chosen.setdefault(interface.index, interface)
    skipped = tuple((one, "another interface was named") for one in found if one.index not in chosen)
    return Choice(tuple(chosen.values()), skipped)


def _find(found: tuple[Interface, ...], name: str, named_by: str) -> Interface:
    for interface in found:
        if interface.name == name:
            return interface
    interface_of = owner(found, name) if parse_address(name) else None
    if interface_of is None:
        raise InterfaceError.explain(
            f"no interface has the {'address' if parse_address(name) else 'name'} {name!r}; " + _inventory(found),
            cause="interface names and addresses differ from machine to machine",
            remedy=f"name one of these in {named_by}, or leave it out to use every suitable one",
        )
    wanted = _literal(name)
    first = sorted(interface_of.addresses, key=lambda address: address.ip != wanted)
    return structs.replace(interface_of, addresses=tuple(first))


def _unusable(interface: Interface, family: Family) -> str:
    """Return why the interface cannot be used, or the empty string."""
    if not interface.up:
        return "down"
    if not interface.of_family(family):
        return f"no {_in_words(family)} address"
    return ""


def _lost(used: Interface, now: Interface | None, family: Family) -> str:
    """Return what has become of an interface so that it leads nowhere, or the empty string."""
    if now is None:
        return "has gone"
    if not now.up:
        return "is down"
    if used.of_family(family) and not now.of_family(family):
        return "has lost its addresses"
    return "" if now.running else "has no carrier"


def owner(interfaces: Iterable[Interface], address: str | IPv4Address | IPv6Address) -> Interface | None:
    """Return the interface that has `address`; of several, the one with the lowest index.

    A zone (`fe80::1%eth0`, `fe80::1%2`) must be that interface's name or index. None if no interface has the
    address.

    Raises:
        ValueError: `address` is not an address.
    """
    zone = str(address).partition("%")[2]
    wanted = _literal(address)
    owners = (
        interface
        for interface in interfaces
        if any(own.ip == wanted for own in interface.addresses) and zone in ("", interface.name, str(interface.index))
    )
    return min(owners, key=lambda interface: interface.index, default=None)


def reached_weakly(wire: Interface | None, remote: str) -> bool:
    """Return whether a connection by `wire` to `remote` says nothing about the network that `remote` is on.

    Linux answers for each of its addresses on every wire (the weak end system model: RFC 1122, section 3.3.4.2).
    So a host on one of the networks of another may reach all of that one's addresses, and those networks need not
    be joined by anything else. That is seen from here when packets to `remote` go straight to a wire on which there
    is no such subnet. IPv6 neighbors answer for the addresses of that wire alone (ndisc_recv_ns in the kernel).
    """
    if wire is None or wire.loopback:
        return False
    wanted = _literal(remote)
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


def _source_of(address: str) -> str:
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
    to, ours = _literal(address).packed, _literal(source).packed if source else b""
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


def _is_neighbor(address: str, interface: str) -> bool:
    """Return whether a machine has answered for an IPv4 address on an interface: proc(5), net/arp."""
    try:
        entries = [line.split() for line in Path("/proc/self/net/arp").read_text().splitlines()]
    except OSError:
        return False
    return any(entry[0] == address and entry[-1] == interface and entry[2] != "0x0" for entry in entries)


def reverse_path_drops() -> int:
    """Return how many packets the reverse path filter of this network namespace has dropped so far (Linux)."""
    try:
        lines = [line.split() for line in Path("/proc/self/net/netstat").read_text().splitlines()]
    except OSError:
        return 0
    extended = [line for line in lines if line[:1] == ["TcpExt:"]]
    for names, values in zip(extended[::2], extended[1::2], strict=False):
        if "IPReversePathFilter" in names:
            return int(values[names.index("IPReversePathFilter")])
    return 0


def port_range() -> tuple[int, int]:
    """Return the first and the last port that the system chooses (ip(7)); its default where that can't be read."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(first), int(last)


def neighbors() -> dict[str, str]:
    """Return the kernel's ARP table (proc_net(5)): hardware addresses by IPv4 address; empty: no answer (Linux)."""
    try:
        lines = Path("/proc/self/net/arp").read_text().splitlines()[1:]
    except OSError:
        return {}
    rows = [line.split() for line in lines]
    return {row[0]: row[3] if int(row[2], 16) & _ATF_COM else "" for row in rows if len(row) > 3}


def hardware_address(name: str) -> str:
    """Return the hardware address of an interface; empty: it has none."""
    try:
        return next((str(each["addr"]) for each in netifaces.ifaddresses(name).get(netifaces.AF_LINK, ())), "")
    except ValueError:  # it has gone
        return ""


def _literal(address: str | IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return ipaddress.ip_address(str(address).partition("%")[0])


def _in_words(family: Family) -> str:
    return {"auto": "IPv4 or IPv6", "4": "IPv4", "6": "IPv6"}[family]


def _inventory(found: Iterable[Interface]) -> str:
    listed = ", ".join(str(interface) + ("" if interface.up else " (down)") for interface in found)
    return f"the interfaces here are: {listed or 'none'}"


# --- changes --------------------------------------------------------------------------------------------------------


class InterfaceMonitor:
    """The interfaces of this machine, as they come and go.

    A scan costs about a millisecond: a thousand waiting ranks on one machine that scan every two seconds take half a
    core. So the kernel's report of a change (rtnetlink(7), Linux) triggers a scan. The report itself is not read, so
    a forged one does no harm.

    Args:
        named: the interfaces or addresses that the user named; empty: any interface.
        named_by: the variable or the argument that names them, for an error.
        family: which IP versions can be used.
        now: the time.
        stack: closes the netlink socket.

    Raises:
        InterfaceError: no interface can be used.
    """

    def __init__(
        self, named: Sequence[str], named_by: str, family: Family, now: float, stack: contextlib.ExitStack
    ) -> None:
        self._named = named
        self.family: Family = family
        self.netlink = _subscribe()
        """Readable when something may have changed; None where the kernel reports no changes."""
        if self.netlink is not None:
            stack.callback(self.netlink.close)
        self._scanned_at = now
        self.scan_due = self._next_scan()
        """When to scan again."""
        self._take(scan())
        choice = choose(self.found, named=named, named_by=named_by, family=family, files=file_limit())
        self.usable = choice.usable
        """Those in use, best first."""
        self._online = () if choice.offline else choice.usable
        self.had_carrier = any(each.running for each in self._online)
        """Whether an interface in use had a carrier at any time."""
        self.left_out = choice.left_out
        """Those for which the limit of open files has no room."""
        self._say_left_out()
        self._lost = False
        self._heard: dict[str, set[str]] = {}
        """The IPv4 addresses of other machines, each with the interfaces on which it was heard."""

    def _take(self, found: tuple[Interface, ...]) -> None:
        self.found = found
        """All interfaces."""
        # Every connection of a mesh asks for its owner. Of several interfaces with an address, the first one has it.
        self._owners = {str(own.ip): each for each in reversed(found) for own in each.addresses}

    def _next_scan(self) -> float:
        return self._scanned_at + (LOOK_SECONDS if self.netlink is None else LOOK_ANYWAY_SECONDS)

    def drain_netlink(self) -> None:
        """Discard the kernel's reports and make a scan due soon. Reports that remain make the socket readable again."""
        assert self.netlink is not None
        # BlockingIOError: the socket is empty. ENOBUFS: reports were lost, which also means that something changed.
        with contextlib.suppress(OSError):
            for _ in range(_DRAINED_AT_ONCE):
                self.netlink.recv(1)  # the kernel drops the rest of each datagram
        self.scan_due = self._scanned_at + LOOK_GAP_SECONDS

    def rescan(self, now: float) -> bool:
        """Scan, and return whether the interfaces in use have changed.

        The previous ones stay in use while no named interface can be used, and while the machine is offline: a pulled
        cable may be plugged in again, and what the other hosts know of this machine is valid again then. While it is
        offline, what a rank that starts here now would use is used as well, so that the ranks of one machine meet.
        """
        self._scanned_at = now
        self.scan_due = self._next_scan()
        try:
            found = scan()
        except OSError as error:  # EMFILE, for example
            logger.debug("the scan of the interfaces failed: %s", error)
            return False
        if found == self.found:
            return False
        self._take(found)
        try:
            named = [each for each in self._named if self._is_usable(each)]
            choice = choose(found, named=named or self._named, family=self.family, files=file_limit())
        except InterfaceError as error:
            logger.debug("%s", error.observation)
            self._lost = True
            return False
        if not choice.offline:
            self._online = choice.usable
            self.had_carrier |= any(each.running for each in choice.usable)
        usable = choice.usable
        if choice.offline:
            names = {each.name for each in usable}  # loopback can be in both, online with some of its addresses
            usable = (*(each for each in self._online if each.name not in names), *usable)
        # Containers that come and go change what is found here, and nothing else.
        changed = self._lost or usable != self.usable
        self._lost, self.usable = False, usable
        if choice.left_out != self.left_out:
            self.left_out = choice.left_out
            self._say_left_out()
        return changed

    def lost(self) -> dict[str, str]:
        """Return what has become of each interface in use that is not loopback, if none of them leads anywhere."""
        now = {each.name: each for each in self.found}
        online = self._online
        lost = {each.name: _lost(each, now.get(each.name), self.family) for each in online if not each.loopback}
        return lost if all(lost.values()) else {}

    def _say_left_out(self) -> None:
        if self.left_out:
            logger.info("the limit of open files has no room for %s", counted(len(self.left_out), "interface"))

    def _is_usable(self, name: str) -> bool:
        try:
            choose(self.found, named=(name,), family=self.family)
        except InterfaceError:
            return False
        return True

    def addresses(self) -> Collection[str]:
        """Return every address of this machine, in use or not."""
        return self._owners.keys()

    def is_on_link(self, address: str) -> bool:
        """Return whether an address is link-local, in one of our subnets, or routed directly: no router is between."""
        parsed = _literal(address)
        networks = (each.network for interface in self.found for each in interface.addresses)
        return parsed.is_link_local or any(parsed in each for each in networks) or has_direct_route(address)

    def index(self, name: str) -> int:
        """Return an interface's number; without a name that of the only interface in use; else 0."""
        if not name and len(self.usable) == 1:
            return self.usable[0].index
        return next((each.index for each in self.found if each.name == name), 0)

    def name(self, index: int) -> str:
        """Return the name of an interface; without a number that of the only interface in use; else nothing."""
        if not index and len(self.usable) == 1:
            return self.usable[0].name
        return next((each.name for each in self.found if each.index == index), "")

    def owner(self, local_address: str, dialed: str) -> str:
        """Return the name of the interface that owns a connection's local address.

        Every interface has link-local addresses, so the owner of such an address is the interface that was dialed on.
        """
        if local_address.startswith("fe80:"):
            return dialed or self.name(0)
        interface = self._owners.get(local_address)
        return dialed if interface is None else interface.name

    def reached_weakly(self, local_address: str, remote: str) -> bool:
        """Return whether a connection says nothing about the network that `remote` is on: see `reached_weakly`."""
        return reached_weakly(self._owners.get(local_address), remote)

    def source_for(self, address: str) -> str:
        """Return the address of ours to bind for a connection to an address; empty: the kernel's choice will do.

        Of two interfaces in one subnet the kernel sends by the one whose route comes first, whichever was named. The
        address of a named one is bound, and rules of policy routing go by it. SO_BINDTODEVICE is of no use here: it
        refuses answers that come in by the other interface, as they do under a strict reverse path filter.
        """
        to = _literal(address)
        if not self._named or to.is_link_local or address in self._owners:
            return ""
        owner = self._owners.get(source := _source_of(address))
        if source and (owner is None or self.in_use(owner.name)):  # no owner: the address is newer than the last scan
            return ""
        ours = [(each, own) for each in self.usable for own in each.addresses if own.version == to.version]
        near = (str(own.ip) for _, own in ours if to in own.network)
        by_rule = (str(own.ip) for each, own in ours if egress(address, str(own.ip)) == each.index)
        return next(itertools.chain(near, by_rule), "")

    def detour(self, address: str, source: str = "") -> Detour | None:
        """Return how the kernel leads a connection astray; None: it does not, as far as it is known.

        Args:
            address: where the connection leads to.
            source: the address of ours that was bound; empty: none.
        """
        to = _literal(address)
        if (to.version == 6 and to.is_link_local) or address in self._owners:
            return None
        heard = set() if self._named else self._heard.get(address, set())
        near = (each for each in self.usable if any(to in own.network for own in each.addresses))
        wanted = next((each for each in near if not heard or each.name in heard), None)
        if wanted is None:
            return None
        index = egress(address, source)
        taken = next((each for each in self.found if each.index == index), wanted)
        # What is not in use hears nothing.
        silent = bool(heard) and taken.name not in heard and any(each.name == taken.name for each in self.usable)
        if self.in_use(taken.name) and (taken.running or not wanted.running) and not silent:
            return None
        return Detour(address, wanted.name, taken.name, taken.running, heard=silent)

    def note_heard(self, address: str, name: str) -> None:
        """Take note that a multicast has come from an IPv4 address on an interface."""
        if address in self._heard or len(self._heard) < REMEMBERED_ADDRESSES:
            self._heard.setdefault(address, set()).add(name)

    def heard_astray(self, reached: Container[str]) -> list[Detour]:
        """Return the detours to addresses that were heard, but for those with which connections stand.

        A host dials nobody, and its answers to those that dial it go astray as well.
        """
        found = (self.astray(each) for each in self._heard if each not in reached)
        return [detour for detour in found if detour is not None and detour.heard]

    def astray(self, address: str, source: str = "") -> Detour | None:
        """Return the detour that can be the reason why a connection was not made: see `detour`.

        Linux answers for each of its addresses on every wire. If it has done so where the kernel sends, packets arrive.
        """
        detour = self.detour(address, source)
        return None if detour is None or (detour.carrier and _is_neighbor(address, detour.taken)) else detour

    def in_use(self, name: str) -> bool:
        """Return whether connections can use an interface: if the user named some, only those."""
        return not self._named or any(each.name == name for each in self.usable)


def _subscribe() -> socket.socket | None:
    """Return a netlink socket that becomes readable when an interface or an address changes.

    None on systems other than Linux, in sandboxes that refuse such a socket, and without a free descriptor.
    """
    if sys.platform != "linux":
        return None
    try:
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    except OSError:
        return None
    try:
        netlink.setblocking(False)
        netlink.bind((0, _RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR))
    except OSError:
        netlink.close()
        return None
    return forksafe.register(netlink)
