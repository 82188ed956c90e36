"""A name server for the lab: one name, whose addresses come one after the other (RFC 1035)."""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from collections.abc import Sequence

from .rank import report

_HEADER = struct.Struct(">6H")
_A, _AAAA = 1, 28
_RESPONSE, _AUTHORITATIVE, _NO_SUCH_NAME = 0x8000, 0x0400, 3


def serve_name(
    name: str, schedule: Sequence[tuple[float, Sequence[str]]], address: str, *, cached: float = 0.0
) -> None:
    """Answer on UDP port 53 of ``address`` until killed.

    Args:
        name: the one that exists.
        schedule: seconds after the first question, in ascending order, and the addresses that the name has from
            then on. With none it does not exist.
        address: where to listen.
        cached: for how many seconds an answer is repeated, also that a name does not exist, as a cluster's server does.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        report("listening")
        first: float | None = None
        looked = float("-inf")
        addresses: Sequence[str] = ()
        while True:
            question, asker = server.recvfrom(512)
            now = time.monotonic()
            first = now if first is None else first
            if now >= looked + cached:
                looked, passed = now, [addresses for since, addresses in schedule if now - first >= since]
                addresses = passed[-1] if passed else ()
            answer = _answer(question, name, addresses)
            report("answered", after=now - first, addresses=list(addresses))
            server.sendto(answer, asker)


def _answer(question: bytes, name: str, addresses: Sequence[str]) -> bytes:
    number, flags, *_ = _HEADER.unpack_from(question)
    labels, end = [], _HEADER.size
    while question[end]:
        labels.append(question[end + 1 : end + 1 + question[end]].decode())
        end += 1 + question[end]
    (kind,) = struct.unpack_from(">H", question, end + 1)
    asked = question[_HEADER.size : end + 5]
    exists = bool(addresses) and ".".join(labels).lower() == name.lower()
    packed = [ipaddress.ip_address(each).packed for each in addresses if exists]
    records = [each for each in packed if kind == {4: _A, 16: _AAAA}[len(each)]]
    header = _HEADER.pack(
        number,
        _RESPONSE | _AUTHORITATIVE | (flags & 0x0100) | (0 if exists else _NO_SUCH_NAME),
        1,
        len(records),
        0,
        0,
    )
    # 0xC00C: the name stands at offset 12, in the question; class IN, no caching.
    return header + asked + b"".join(struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(each)) + each for each in records)
