"""The echo datagrams of ``mingle-discover ping`` and ``doctor``: bytes to PING, PONG and GONE and back.

They have a magic of their own and a multicast group of their own, so no rank ever takes one for a part of the
discovery, and no rank answers one. The header is that of :mod:`mingle.wire.datagrams` but for the magic; the rules are
the same: one MessagePack map, unknown keys ignored, with a secret a MAC behind it. ``docs/protocol.md`` has the fields.
"""

# No `from __future__ import annotations`: msgspec would have to compile each of them again, whenever this is imported.

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from mingle.wire.authentication import DATAGRAM_MAC_BYTES, JobKey
from mingle.wire.datagrams import (
    ECHO_MAGIC,
    HEADER_BYTES,
    MAX_BYTES,
    MAX_JOB_ID_BYTES,
    Group,
    Identifier,
    ProcessId,
    Rejected,
    ShortText,
    check_header,
    is_signed,
    is_signed_by,
    job_group,
    make_printable,
    payload_of,
    with_header,
)

PING_BYTES = 640
"""Every PING is padded to this, or a byte more: no PONG is longer, so a forged source gains no amplification."""
LENGTH_BYTES = 2
"""On TCP each message comes after its length, big endian."""

# RFC 4727, sections 2.4.2 and 3.4.2: for experiments. Switches must flood 224.0.0.x regardless of membership (RFC 4541,
# section 2.1.2), so what passes there and not on the job's group was filtered by IGMP snooping.
LINK_GROUP = Group(ipv4="224.0.0.254", ipv6_link="ff02::114", ipv6_site="ff02::114")

Way: TypeAlias = Literal["multicast", "link", "unicast", "tcp"]
WAYS: tuple[Way, ...] = ("multicast", "link", "unicast", "tcp")
"""By the job's own kind of group; by :data:`LINK_GROUP`; by unicast to the shared port; over TCP."""

_JobText: TypeAlias = Annotated[str, Meta(max_length=MAX_JOB_ID_BYTES)]
_Number: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
_Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]


class Echo(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all echo messages."""

    job: _JobText = ""
    """The job that is pinged about; empty: none."""
    pinger: Identifier
    """The sender: new in each process."""
    hostname: ShortText = ""
    pid: ProcessId = 0
    port: _Port = 0
    """Where its TCP port listens; 0: nowhere."""

    def __post_init__(self) -> None:
        make_printable(self, "hostname")


class EchoRequest(Echo, frozen=True, kw_only=True, tag="ping", omit_defaults=True):
    """A question that every process with the same job answers."""

    number: _Number
    way: Way
    padding: Annotated[bytes, Meta(max_length=MAX_BYTES)] = b""


class EchoReply(Echo, frozen=True, kw_only=True, tag="pong", omit_defaults=True):
    """The answer: by unicast, to where the PING came from, or on the connection it came on."""

    asker: Identifier
    number: _Number
    way: Way


class EchoEnd(Echo, frozen=True, kw_only=True, tag="gone", omit_defaults=True):
    """A good-bye: a PING that is sent to the sender from now on is not lost."""


EchoMessage: TypeAlias = EchoRequest | EchoReply | EchoEnd

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[EchoMessage] = msgspec.msgpack.Decoder(EchoMessage)


def ping_group(job: str) -> Group:
    """Return the multicast group of the pings about a job: it is like the job's own, and no rank is in it."""
    return job_group(f"\x00ping {job}")


def encode(message: EchoMessage, key: JobKey | None = None) -> bytes:
    """Return the message's bytes, a PING filled up to :data:`PING_BYTES`, signed if there is a key."""
    trailer = 0 if key is None else DATAGRAM_MAC_BYTES
    body = _encoder.encode(message)
    if isinstance(message, EchoRequest):
        # The key "padding" and a header of two bytes, or three from 256 bytes on: it may be a byte longer.
        room = PING_BYTES - HEADER_BYTES - trailer - len(body) - 10
        body = _encoder.encode(msgspec.structs.replace(message, padding=bytes(max(0, room))))
    return with_header(ECHO_MAGIC, body, b"echo", key)


def decode(untrusted: bytes) -> EchoMessage:
    """Return the message in untrusted bytes; see :func:`is_trusted`.

    Raises:
        Rejected: ``size``, ``magic``, ``version N`` or ``malformed``.
    """
    check_header(untrusted, ECHO_MAGIC)
    try:
        return _decoder.decode(payload_of(untrusted))
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Rejected("malformed") from None


def is_trusted(untrusted: bytes, key: JobKey | None) -> bool:
    """Return whether bytes that :func:`decode` took are signed with our secret, or, if we have none, not signed."""
    if key is None or not is_signed(untrusted):
        return key is None and not is_signed(untrusted)
    return is_signed_by(key, b"echo", untrusted)


def framed(data: bytes) -> bytes:
    """Return a message as it goes over TCP."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def unframed(buffer: bytes) -> bytes | None:
    """Return the first message in what has come over TCP, or None until more comes.

    Raises:
        Rejected: ``size``: no message is that long.
    """
    if len(buffer) < LENGTH_BYTES:
        return None
    length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
    if length > MAX_BYTES:
        raise Rejected("size")
    whole = buffer[LENGTH_BYTES : LENGTH_BYTES + length]
    return whole if len(whole) == length else None
