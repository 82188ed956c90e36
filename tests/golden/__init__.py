"""One fixed example of each datagram and each frame, and the bytes that they must have.

``packets.json`` holds the bytes, and ``docs/protocol.md`` names them. A change of them is a change of the wire
format: another implementation, or a rank with another version of mingle, will see it. After a deliberate
change, ``PYTHONPATH=src:. python -m tests.golden`` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

PACKETS = Path(__file__).with_name("packets.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


class Packet(TypedDict):
    """An entry of ``packets.json``."""

    meaning: str
    hex: str


def load() -> dict[str, Packet]:
    """Return the packets by name: ``seek``, ``seek signed``, ``join/hello``, ``join signed/hello`` …"""
    packets: dict[str, Packet] = json.loads(PACKETS.read_text(encoding="utf-8"))
    return packets


def data(name: str) -> bytes:
    """Return one packet's bytes."""
    return bytes.fromhex(load()[name]["hex"])
