"""Ports of a test's own, which no other process gets until the test uses them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw39").removeprefix("gw")) % 40
_ports = itertools.cycle(random.Random().sample(range(10_000 + 250 * _WORKER, 10_250 + 250 * _WORKER), 250))


def free_udp_port() -> int:
    """A port that nobody uses, for a discovery of the test's own."""
    return _free_port(socket.SOCK_DGRAM)


def free_tcp_port() -> int:
    """A port that nobody uses, for a store of the test's own."""
    return _free_port(socket.SOCK_STREAM)


def _free_port(kind: socket.SocketKind) -> int:
    """A port that stays free until it is used: the system takes none below 32768, and each worker has its own."""
    for port in _ports:
        with socket.socket(socket.AF_INET, kind) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("itertools.cycle never ends")
