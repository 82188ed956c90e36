"""Interfaces of a machine that a test makes up."""

from __future__ import annotations

from ipaddress import ip_interface

from mingle.network.interfaces import Interface


def nic(name: str, index: int, *addresses: str, **flags: bool) -> Interface:
    """Return an interface, which is loopback if it has that name."""
    return Interface(name, index, tuple(map(ip_interface, addresses)), **{"loopback": name == "lo", **flags})
