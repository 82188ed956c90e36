"""This machine's interfaces as they come and go: which are in use, and the addresses to be reached at."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from mingle.config.settings import Network
from mingle.errors import InterfaceError
from mingle.network import interfaces, link_news
from mingle.network.interfaces import Family, Interface, Kind
from mingle.protocol.machine import Address
from mingle.wire import datagrams

logger = logging.getLogger("mingle")

LOOK_SECONDS = 2.0
"""How often the interfaces are looked at where the kernel does not tell that one has come or gone, …"""
LOOK_ANYWAY_SECONDS = 20.0
"""… how often where it does, …"""
LOOK_GAP_SECONDS = 0.2
"""… and how soon again at the earliest, however much it tells: containers come and go all the time."""


class Nics:
    """The interfaces of this machine.

    Args:
        network: which of them are wanted.
        now: the time; they are looked at again from then on.
        stack: what is to be closed at the end goes there.

    Raises:
        InterfaceError: none can be used.
    """

    def __init__(self, network: Network, now: float, stack: contextlib.ExitStack) -> None:
        self._network = network
        self.news = link_news.subscribe()
        """Readable when something may have changed; None: the kernel does not tell."""
        if self.news is not None:
            stack.callback(self.news.close)
        self._looked_at = now
        self.look_due = self._next_look()
        """When to look again."""
        self.found = interfaces.scan()
        """All that there are."""
        self.usable = interfaces.choose(self.found, named=network.interfaces, family=network.family).usable
        """Those in use, best first."""

    def _next_look(self) -> float:
        return self._looked_at + (LOOK_SECONDS if self.news is None else LOOK_ANYWAY_SECONDS)

    def heard_news(self, _mask: int = 0) -> tuple[()]:
        """The kernel says that something has changed: it is looked at soon. For a selector; no event comes of it."""
        assert self.news is not None
        link_news.drain(self.news)
        self.look_due = min(self.look_due, self._looked_at + LOOK_GAP_SECONDS)
        return ()

    def look(self, now: float) -> bool:
        """Looks whether something has changed.

        Named ones that are gone are waited for; so is everything when nothing but loopback is left: a cable that was
        pulled may come back, and what the others know of this machine still holds then.
        """
        self._looked_at = now
        self.look_due = self._next_look()
        try:
            found = interfaces.scan()
        except OSError as error:
            # Out of descriptors, for example: what was there stays, and it is looked again.
            logger.debug("the interfaces can't be looked at: %s", error)
            return False
        if found == self.found:
            return False
        self.found = found
        try:
            usable = interfaces.choose(found, named=self._network.interfaces, family=self._network.family).usable
        except InterfaceError as error:
            logger.debug("%s", error.observation)
            return False
        if all(each.loopback for each in usable) and not all(each.loopback for each in self.usable):
            return False
        self.usable = usable
        return True

    def addresses(self) -> tuple[Address, ...]:
        """Every address to listen on, best first."""
        return own_addresses(self.usable, self._network.family)

    def bare_addresses(self) -> frozenset[str]:
        """Every address that this machine has, in use or not."""
        return frozenset(str(each.ip) for interface in self.found for each in interface.addresses)

    def index(self, name: str) -> int:
        """An interface's number; where none is named and only one can be meant, that one's; else 0."""
        if not name and len(self.usable) == 1:
            return self.usable[0].index
        return next((each.index for each in self.found if each.name == name), 0)

    def owner(self, local_address: str, dialled: str) -> str:
        """The name of the interface that owns a connection's local address.

        Every interface has link-local addresses: such a connection is that of the interface it was dialled on.
        """
        if local_address.startswith("fe80:"):
            return dialled
        interface = interfaces.owner(self.found, local_address)
        return dialled if interface is None else interface.name

    def in_use(self, name: str) -> bool:
        """Whether connections may go through an interface: those that were not named when others were may not."""
        return not self._network.interfaces or any(each.name == name for each in self.usable)


def own_addresses(usable: Iterable[Interface], family: Family) -> tuple[Address, ...]:
    """Returns every address to listen on, best first. A link-local one counts only where an interface has no other."""
    found: list[Address] = []
    for interface in usable:
        every = interface.of_family(family)
        routable = [each for each in every if not each.is_link_local]
        found += [
            Address(
                str(each.ip),
                interface.name,
                each.network.prefixlen,
                interface.index,
                last_resort=interface.kind in (Kind.VPN, Kind.VIRTUAL),
            )
            for each in routable or every[:1]
        ]
    return tuple(found[: datagrams.MAX_ADDRESSES])
