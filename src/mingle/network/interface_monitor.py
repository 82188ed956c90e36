"""The interfaces in use, as they come and go, and the connections that they can carry.

`InterfaceMonitor` repeats `scan` and `choose` when the kernel reports a change by rtnetlink(7), or after a while.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
from collections.abc import Collection, Container, Sequence

from mingle import forksafe
from mingle.config.settings import Family
from mingle.diagnostics import Detour
from mingle.errors import InterfaceError, counted
from mingle.network import interfaces, routes
from mingle.network.interfaces import Interface, choose, file_limit, without_zone
from mingle.records import logger

LOOK_SECONDS = 2.0
"""The interval between two scans where the kernel does not report changes, …"""
LOOK_ANYWAY_SECONDS = 20.0
"""… the interval where it does, …"""
LOOK_GAP_SECONDS = 0.2
"""… and the shortest interval, however many changes it reports: containers come and go all the time."""

REMEMBERED_ADDRESSES = 256
"""Of how many addresses is known on which interfaces they were heard; bounded against forged ones."""
# <linux/rtnetlink.h>: the groups of messages to subscribe to.
_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_DRAINED_AT_ONCE = 64


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
        self._take(interfaces.scan())
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
            found = interfaces.scan()
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
        parsed = without_zone(address)
        networks = (each.network for one in self.found for each in one.addresses)
        return parsed.is_link_local or any(parsed in each for each in networks) or routes.has_direct_route(address)

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
        """Return whether a connection says nothing about the network of `remote`: see `routes.reached_weakly`."""
        return routes.reached_weakly(self._owners.get(local_address), remote)

    def source_for(self, address: str) -> str:
        """Return the address of ours to bind for a connection to an address; empty: the kernel's choice will do.

        Of two interfaces in one subnet the kernel sends by the one whose route comes first, whichever was named. The
        address of a named one is bound, and rules of policy routing go by it. SO_BINDTODEVICE is of no use here: it
        refuses answers that come in by the other interface, as they do under a strict reverse path filter.
        """
        to = without_zone(address)
        if not self._named or to.is_link_local or address in self._owners:
            return ""
        owner = self._owners.get(source := routes.source_of(address))
        if source and (owner is None or self.in_use(owner.name)):  # no owner: the address is newer than the last scan
            return ""
        ours = [(each, own) for each in self.usable for own in each.addresses if own.version == to.version]
        near = (str(own.ip) for _, own in ours if to in own.network)
        by_rule = (str(own.ip) for each, own in ours if routes.egress(address, str(own.ip)) == each.index)
        return next(itertools.chain(near, by_rule), "")

    def detour(self, address: str, source: str = "") -> Detour | None:
        """Return how the kernel leads a connection astray; None: it does not, as far as it is known.

        Args:
            address: where the connection leads to.
            source: the address of ours that was bound; empty: none.
        """
        to = without_zone(address)
        if (to.version == 6 and to.is_link_local) or address in self._owners:
            return None
        heard = set() if self._named else self._heard.get(address, set())
        near = (each for each in self.usable if any(to in own.network for own in each.addresses))
        wanted = next((each for each in near if not heard or each.name in heard), None)
        if wanted is None:
            return None
        index = routes.egress(address, source)
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
        return None if detour is None or (detour.carrier and routes.neighbors(detour.taken).get(address)) else detour

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


def _lost(used: Interface, now: Interface | None, family: Family) -> str:
    """Return what has become of an interface so that it leads nowhere, or the empty string."""
    if now is None:
        return "has gone"
    if not now.up:
        return "is down"
    if used.of_family(family) and not now.of_family(family):
        return "has lost its addresses"
    return "" if now.running else "has no carrier"
