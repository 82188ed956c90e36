"""Views and agents' applications for tests of the rules of agents."""

from __future__ import annotations

from typing import Any

from mingle.agents.quorum import machine_of
from mingle.wire.frames import Join, Node, Path, View, Who


def member(letter: str) -> bytes:
    """The member id that tests call by a letter."""
    return letter.encode() * 16


def members(letters: str) -> set[bytes]:
    """Several of them."""
    return {member(letter) for letter in letters}


def node(letter: str) -> Node:
    """That member in a view, on a machine of its own."""
    return Node(member(letter), f"10.0.0.{ord(letter) - 64}", 4000 + ord(letter), machine_of(letter))


def view(letters: str, *, host: str = "H", generation: int = 0, number: int = 1, session: str = "S") -> View:
    """A view of these members."""
    return View(
        generation=generation,
        number=number,
        session=member(session),
        host=member(host),
        nodes=tuple(node(letter) for letter in letters),
    )


def application(letter: str, **more: Any) -> Join:
    """What an agent says when it asks for a seat in a job of 2 to 4 nodes."""
    known = node(letter)
    path = Path(host_address="10.0.0.1", local_address=known.address, interface="eth0")
    who = Who(hostname=f"node-{letter}", pid=ord(letter), address=known.address)
    defaults: dict[str, Any] = {
        "world_size": 4,
        "minimum": 2,
        "node": letter,
        "kind": "agents",
        "who": who,
        "port": known.port,
        "paths": (path,),
    }
    return Join(**{**defaults, **more})
