"""The machine's network interfaces: which exist, and which of them to use.

`scan` asks the kernel; `choose` is pure, so that every rule of preference can be tested on
machines that do not exist. An interface that is passed over is returned with the reason in words.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface

import netifaces
from msgspec import Struct, structs

from mingle.config.settings import Family
from mingle.config.values import parse_address
from mingle.errors import InterfaceError

if sys.platform != "win32":
    import fcntl
    import resource

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
    wanted = without_zone(name)
    first = sorted(interface_of.addresses, key=lambda address: address.ip != wanted)
    return structs.replace(interface_of, addresses=tuple(first))


def _unusable(interface: Interface, family: Family) -> str:
    """Return why the interface cannot be used, or the empty string."""
    if not interface.up:
        return "down"
    if not interface.of_family(family):
        return f"no {_in_words(family)} address"
    return ""


def owner(interfaces: Iterable[Interface], address: str | IPv4Address | IPv6Address) -> Interface | None:
    """Return the interface that has `address`; of several, the one with the lowest index.

    A zone (`fe80::1%eth0`, `fe80::1%2`) must be that interface's name or index. None if no interface has the
    address.

    Raises:
        ValueError: `address` is not an address.
    """
    zone = str(address).partition("%")[2]
    wanted = without_zone(address)
    owners = (
        interface
        for interface in interfaces
        if any(own.ip == wanted for own in interface.addresses) and zone in ("", interface.name, str(interface.index))
    )
    return min(owners, key=lambda interface: interface.index, default=None)


def hardware_address(name: str) -> str:
    """Return the hardware address of an interface; empty: it has none."""
    try:
        return next((str(each["addr"]) for each in netifaces.ifaddresses(name).get(netifaces.AF_LINK, ())), "")
    except ValueError:  # it has gone
        return ""


def without_zone(address: str | IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return an address without its zone.

    Raises:
        ValueError: it is not an address.
    """
    return ipaddress.ip_address(str(address).partition("%")[0])


def _in_words(family: Family) -> str:
    return {"auto": "IPv4 or IPv6", "4": "IPv4", "6": "IPv6"}[family]


def _inventory(found: Iterable[Interface]) -> str:
    listed = ", ".join(str(interface) + ("" if interface.up else " (down)") for interface in found)
    return f"the interfaces here are: {listed or 'none'}"
