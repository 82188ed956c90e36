"""Gloo on the address that was proved.

``GLOO_SOCKET_IFNAME`` names an interface, and Gloo then takes the first address that getifaddrs(3) lists for it: IPv4
before IPv6, and of several the one that was configured first (gloo/transport/tcp/device.cc). Where that is another
one than all ranks have proved to each other, a group would hang although every rank has been found: on hosts whose
IPv4 leads nowhere, with a second address on the interface, and with IPv6, where the first one is often link-local.
No variable names an address, and ``init_process_group`` hands no options to Gloo. So its class is told.

The workers of torchrun have never heard of mingle. Where theirs is the wrong address, the agent has torch itself call
:func:`bind_as_told` in them: at the end of its import torch loads what it finds under the entry point group
``torch.backends`` (from 2.5 on, pytorch#122468), and an entry point is found wherever ``PYTHONPATH`` leads to.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import netifaces

VARIABLE = "GLOO_SOCKET_IFNAME"
"""How Gloo is told an interface."""

_ADDRESS = "_MINGLE_GLOO_ADDRESS"  # between an agent and its workers: no setting, so nothing that users are told of


def default_address(interface: str) -> str | None:
    """Returns the address that Gloo takes for an interface by itself, without its zone; None: it has none."""
    try:
        families = netifaces.ifaddresses(interface)
    except ValueError:  # it has gone; to list all names first would take as long again
        return None
    for family in (netifaces.AF_INET, netifaces.AF_INET6):
        for entry in families.get(family, ()):
            return str(entry["addr"].partition("%")[0])
    return None


def misses(interface: str, address: str, environ: Mapping[str, str]) -> bool:
    """Returns whether Gloo, by the interface that it is told there, would take another address than this one."""
    return environ.get(VARIABLE) == interface and default_address(interface) not in (address, None)


def for_workers(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which processes that don't call mingle use this address as well: see `bind_as_told`.

    Args:
        address: it, with its zone if it is a link-local one.
        environ: what they would inherit without.
    """
    ours = str(Path(__file__).with_name("for_workers"))
    return {_ADDRESS: address, "PYTHONPATH": os.pathsep.join(filter(None, (ours, environ.get("PYTHONPATH"))))}


def bind_as_told() -> None:
    """Torch calls this in every process that has inherited `for_workers`, before any code of the user's uses torch."""
    if address := os.environ.get(_ADDRESS):
        bind(address)


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
