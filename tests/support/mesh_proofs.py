"""Proofs of a mesh in which some pairs can't reach each other."""

from __future__ import annotations

from collections.abc import Iterable

from mingle.protocol.session.mesh_proof import Node, Pair, Proof
from mingle.wire.frames import Failure, ProcessInfo, Unreached


def member(number: int) -> bytes:
    return number.to_bytes(16, "big")


def proof(size: int, pairs: Iterable[Pair], how: Unreached = "no answer", *, detail: str = "") -> Proof:
    nodes = [
        Node(member(n), ProcessInfo(hostname=f"w{n}", pid=n, rank=n), "eth0", f"10.0.{n >> 8}.{n & 255}", 4000 + n)
        for n in range(size)
    ]
    made = Proof("10.0.0.0", "10.0.0.0/16", nodes, 6.0, last=True)
    for one, other in pairs:
        made.add(member(one), [Failure(member=member(other), how=how, detail=detail)])
    return made
