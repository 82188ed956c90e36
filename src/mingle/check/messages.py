"""What the ranks of a check say to each other, in JSON. All that one reads from another is decoded here.

A message of a wrong type ends its connection. A result of a wrong type ends the check with a report.
"""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from multiprocessing.connection import Connection
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field

from mingle.check.verdicts import Report

QUESTION_LIMIT = 1 << 18
_MESSAGE_LIMIT = 1 << 24

_T = TypeVar("_T")
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Count = Annotated[int, Meta(ge=0)]


class LocalNetwork(Struct, frozen=True):
    """An address of a machine, and its network."""

    interface: str
    address: str
    network: str
    mtu: int


class ProbedRank(Struct):
    """A rank, and where its server is reached."""

    rank: _Count
    address: str
    port: _Port
    token: str

    def __post_init__(self) -> None:
        """Reject a text that is not an address."""
        if self.address:
            ip_address(self.address)


class Introduction(ProbedRank, omit_defaults=True):
    """What a rank says of itself, and what rank 0 adds."""

    node: _Count
    host: str
    pid: int | None
    interface: str
    networks: list[LocalNetwork]
    options: dict[str, Any]
    reached: str = ""
    """The address at which the rank has reached rank 0."""
    gpu: str = ""
    gpu_missing: str = ""
    """Why the rank uses no GPU; empty where there is none."""


class Question(Struct, omit_defaults=True):
    """What a caller says first: ``hello`` to rank 0, ``probe`` if another rank has to be reached, else neither."""

    token: str
    hello: Introduction | None = None
    probe: ProbedRank | None = None


class Greeting(Struct, omit_defaults=True):
    """What a rank's server answers: its rank, and whether it reaches the other one, or why it answers no more."""

    rank: int = -1
    reached: bool = False
    gone: str = ""


class Order(Struct, omit_defaults=True):
    """What rank 0 says: a task with its number, words to show, the roster, the report; if it is empty, a heartbeat."""

    show: str = ""
    id: int = 0
    do: str = ""
    arguments: dict[str, Any] = field(name="with", default_factory=dict)
    roster: list[Introduction] = []
    report: Report | None = None
    gone: str = ""


class Reply(Struct, omit_defaults=True):
    """What a rank says to rank 0: what became of a task, or how the rank is lost; if it is empty, a heartbeat."""

    id: int = 0
    result: Raw = Raw(b"null")
    """As the task's return type says: rank 0 knows which task it was."""
    error: str = ""
    gone: str = ""


# Made here, and not by the first call: where two threads have msgspec look at the fields of a type for the first time
# at once, the process can crash (SIGSEGV, seen with 0.22).
_question = msgspec.json.Decoder(Question)
GREETING = msgspec.json.Decoder(Greeting)
ORDER = msgspec.json.Decoder(Order)
REPLY = msgspec.json.Decoder(Reply)
ADDRESS = msgspec.json.Decoder(tuple[_Port, str])
"""What the store says of rank 0's server: its port and its token."""


def decode(decoder: msgspec.json.Decoder[_T], untrusted: bytes | Raw) -> _T:
    """Decode what another process has sent.

    Raises:
        ValueError: it is not what the decoder decodes.
    """
    try:
        return decoder.decode(untrusted)
    except RecursionError as error:
        raise ValueError("no message") from error


def question_of(untrusted: bytes) -> Question:
    """Decode what a caller says first.

    Raises:
        ValueError: it is not a question.
    """
    return decode(_question, untrusted)


def send(connection: Connection, message: Struct) -> None:
    """Send a message; a connection that has ended shows where it is read."""
    with suppress(OSError):
        connection.send_bytes(msgspec.json.encode(message))


def receive(connection: Connection, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Return the next message.

    Raises:
        EOFError: the connection has ended.
        OSError: it was reset, or the message does not arrive.
        ValueError: it is not a message of this kind.
    """
    return decode(decoder, connection.recv_bytes(_MESSAGE_LIMIT))
