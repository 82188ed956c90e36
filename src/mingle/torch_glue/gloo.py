"""Gloo on the address that was proved.

``GLOO_SOCKET_IFNAME`` names an interface, and Gloo then takes the first address that getifaddrs(3) lists for it: IPv4
before IPv6, and of several the one that was configured first (gloo/transport/tcp/device.cc). Where that is another
one than all ranks have proved to each other, a group would hang although every rank has been found: on hosts whose
IPv4 leads nowhere, with a second address on the interface, and with IPv6, where the first one is often link-local.
No variable names an address, and ``init_process_group`` hands no options to Gloo. So its class is told.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import netifaces


def default_address(interface: str) -> str | None:
    """Returns the address that Gloo takes for an interface by itself, without its zone; None: it has none."""
    if interface not in netifaces.interfaces():
        return None
    families = netifaces.ifaddresses(interface)
    for family in (netifaces.AF_INET, netifaces.AF_INET6):
        for entry in families.get(family, ()):
            return str(entry["addr"].partition("%")[0])
    return None


def bind(address: str) -> Callable[[], None]:
    """Makes every Gloo group of this process, made from now on, use this address; returns what undoes it.

    A group that is made with options of its own keeps them.
    """
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_gloo_available():
        return _nothing
    gloo = distributed.ProcessGroupGloo
    made_before = gloo.__init__

    @functools.wraps(made_before)
    def initialise(self: Any, store: Any, rank: int, size: int, *more: Any, **named: Any) -> None:
        given = [*more, *named.values()]  # one at most: the options or the timeout
        if any(isinstance(each, gloo._Options) for each in given):
            made_before(self, store, rank, size, *more, **named)
            return
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        for timeout in given:
            options._timeout = timeout
        made_before(self, store, rank, size, options)

    def undo() -> None:
        if gloo.__init__ is initialise:
            gloo.__init__ = made_before

    gloo.__init__ = initialise
    return undo


def _nothing() -> None:
    """There is nothing to undo."""
