"""The order of nodes: what a process says of its own place, so that every start gives a machine the same rank.

An order is opaque bytes. Its owner computes it once, and all others only compare it, so no two processes can disagree
about it: nobody else's view of an address enters, which network address translation would change.
"""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

from mingle.text import one_line

if TYPE_CHECKING:
    from mingle.config.launchers import Placement

MAX_ORDER_BYTES = 96
EXPLICIT, BY_NAME = b"\x00", b"\x01"
"""The first byte: nodes with a node rank of their own come before nodes that are ordered by name and address."""
_RANK_BYTES = 4
_MAX_NAME_BYTES = MAX_ORDER_BYTES - 1 - 1 - 17
"""What remains beside the first byte, the end of the name, and an IPv6 address with its family."""
_MOST_DIGITS = 0x1F
"""The largest length byte. It stays below all printable characters, so a number sorts before any text in its place."""


def order_of(placement: Placement, hostname: str, address: str) -> bytes:
    """Return the order of the node of a process with this place; see :func:`order_key`.

    A launcher's number of the node is followed by name and address. The pods of two Jobs of one JobSet have the same
    numbers, as do the nodes of two allocations, and that is no conflict.
    """
    number = placement.node_rank
    if number is None or not placement.node_rank_launched:
        return order_key(number, hostname, address)
    return (order_key(number, "", "") + order_key(None, hostname, address))[:MAX_ORDER_BYTES]


def order_key(node_rank: int | None, hostname: str, address: str) -> bytes:
    """Return a node's place in the order, as bytes to compare; equal keys are possible.

    Host names are compared in natural order, without regard to case (RFC 4343): ``node2`` before ``node10``. Nodes of
    one name are compared by their addresses as numbers, IPv4 first. Any text is accepted.

    Args:
        node_rank: the rank that the node asks for; None: it asks for none.
        hostname: the node's name.
        address: the node's own address, with or without a zone.

    Raises:
        OverflowError: the node rank is negative, or has more than four bytes.
    """
    if node_rank is not None:
        return EXPLICIT + node_rank.to_bytes(_RANK_BYTES, "big")
    # The end of a name is a zero byte, so that a name comes before each longer one that begins with it.
    return BY_NAME + _natural(hostname)[:_MAX_NAME_BYTES] + b"\x00" + _number(address)


def asks(order: bytes) -> bool:
    """Return whether a node asks for a node rank, or its launcher does."""
    return order.startswith(EXPLICIT)


def _natural(text: str) -> bytes:
    """Return text as bytes whose order is the natural one: each run of digits is its length and the digits.

    Of two numbers without leading zeros, the one with more digits is larger. From 31 digits on they compare as text.
    """
    return re.sub(rb"[0-9]+", _counted, one_line(text).lower().encode())


def _counted(run: re.Match[bytes]) -> bytes:
    digits = run[0].lstrip(b"0") or b"0"
    return bytes((min(len(digits), _MOST_DIGITS),)) + digits


def _number(address: str) -> bytes:
    bare = address.partition("%")[0]
    for family, first in ((socket.AF_INET, b"\x04"), (socket.AF_INET6, b"\x06")):
        try:
            return first + socket.inet_pton(family, bare)
        except (OSError, ValueError):  # not an address of this family, or a null character or a surrogate in it
            continue
    return b""
