"""One fixed example of each datagram and each frame, and the bytes that they must have.

``packets.json`` holds the bytes; ``docs/protocol.md`` shows them. A change in either is a change of the wire
format: another implementation, or a rank with another version of mingle, will see it. After a deliberate
change, ``PYTHONPATH=src python -m tests.golden`` writes both anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypedDict

PACKETS = Path(__file__).with_name("packets.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"

_BLOCK = re.compile(r"^```golden (?P<name>[a-z /]+)\n(?P<hex>[0-9a-f\n]*)```$", re.MULTILINE)
_BYTES_PER_LINE = 32


class Packet(TypedDict):
    """An entry of ``packets.json``."""

    meaning: str
    hex: str


def load() -> dict[str, Packet]:
    """Returns the packets by name: ``seek``, ``seek signed``, ``join/hello``, ``join signed/hello`` …"""
    packets: dict[str, Packet] = json.loads(PACKETS.read_text(encoding="utf-8"))
    return packets


def data(name: str) -> bytes:
    """Returns one packet's bytes."""
    return bytes.fromhex(load()[name]["hex"])


def shown_in_document() -> dict[str, str]:
    """Returns the hexadecimal text of the packets in the document, by name."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return {block["name"]: block["hex"].replace("\n", "") for block in _BLOCK.finditer(text)}


def rewrite_document(packets: dict[str, Packet]) -> None:
    """Puts the packets' bytes into the blocks that the document has for them."""

    def fill(block: re.Match[str]) -> str:
        return f"```golden {block['name']}\n{wrapped(packets[block['name']]['hex'])}\n```"

    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(_BLOCK.sub(fill, text), encoding="utf-8")


def wrapped(text: str) -> str:
    """Returns hexadecimal text in lines of 32 bytes."""
    width = 2 * _BYTES_PER_LINE
    return "\n".join(text[start : start + width] for start in range(0, len(text), width))
