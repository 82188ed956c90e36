"""The datagrams on the wire: bytes to typed messages and back.

A datagram is a *hint*: it says where to look, never what is true. Whatever counts is proved afterwards over
TCP (:mod:`mingle.protocol.links.handshake`). ``docs/protocol.md`` holds the same table with golden packets::

    0      4  magic "MNGL"
    4      1  major version: another one is rejected and named
    5      1  minor version: a higher one is accepted
    6      1  flags: bit 0 signed, bit 1 repeated within this host; unknown bits are ignored
    7      1  reserved, zero
    8      …  one MessagePack map (msgspec), its key "type" says which message it is; unknown keys are ignored
    …     32  with bit 0: HMAC-SHA256 over all that comes before, with bit 1 taken as zero

At most :data:`MAX_BYTES` long, so that it is never fragmented (some clouds drop fragments).

Each job has a multicast group, and all jobs share one browse group. The group only spares other hosts the packets: the
job id inside a message decides, so two jobs whose ids hash to one group wake each other's sockets and nothing else.

IPv4 groups come from 239.192.0.0/14, the organization-local scope (RFC 2365, section 6.2). The highest 256
addresses of a scoped range are reserved for scope-relative assignments (section 9) and are not used.

IPv6 group ids are 32 bits wide, because an Ethernet address keeps no more of them (RFC 2464, section 7), with
the top bit set, the range for groups that no authority assigned (RFC 3307, section 4.3). The address carries
the transient flag and the scope that suits the hop limit (RFC 4291, section 2.7): `ff12::` is link-local,
which no router forwards whatever a packet's hop limit says, and which the kernel binds to one interface;
`ff15::` is site-local, for a hop limit above 1, where a link-local group could never leave the link.
"""

# No `from __future__ import annotations`: msgspec would have to compile each of them again, whenever this is imported.

import hashlib
import socket
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from mingle.text import one_line
from mingle.wire.authentication import DATAGRAM_MAC_BYTES, JobKey

MAGIC = b"MNGL"
ECHO_MAGIC = b"MNGP"
"""The magic of :mod:`mingle.wire.echo`, which ranks hand on and otherwise leave alone."""
MAJOR_VERSION = 1
MINOR_VERSION = 0
HEADER_BYTES = 8
MAX_BYTES = 1200

FLAG_SIGNED = 0x01
FLAG_REPEATED = 0x02

MAX_JOB_ID_BYTES = 256
MAX_WORLD_SIZE = 1_000_000

JobId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_JOB_ID_BYTES)]
Identifier: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)]
WorldSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
TcpPort: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
ProcessId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
MAX_SHORT_TEXT_BYTES = 64
ShortText: TypeAlias = Annotated[str, Meta(max_length=MAX_SHORT_TEXT_BYTES)]
"""Truncate it with :func:`truncate_utf8`: readers count characters, the limit of a datagram counts bytes."""
MAX_REASON_BYTES = 256
Address: TypeAlias = Annotated[str, Meta(min_length=2, max_length=45)]
# Twelve addresses of the longest form still fit into one datagram beside the longest job id and short texts.
MAX_ADDRESSES = 12
Addresses: TypeAlias = Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_ADDRESSES)]
Kind: TypeAlias = Literal["ranks", "agents"]
State: TypeAlias = Literal["open", "sealed"]


def check_address(text: str) -> None:
    """Make sure that a text from the network is an address.

    A process that dials one must not resolve a name that a stranger chose, nor wait for a resolver.

    Raises:
        ValueError: it is no IPv4 or IPv6 literal, or has a zone, which means nothing on another machine.
    """
    if "%" in text:
        raise ValueError(f"{text!r} has a zone")
    try:
        # Ten times as fast as the ipaddress module, and one is checked for each rank, twice on rank 0.
        socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
    except OSError:
        raise ValueError(f"{text!r} is no address") from None


def make_printable(message: Struct, *names: str) -> None:
    """Apply :func:`~mingle.text.one_line` to the texts in these fields of a message.

    Each message calls this function when it is made or decoded (``__post_init__``), so code that logs, raises or shows
    a text does not have to. Texts that are compared stay unchanged, so code that shows a job id must show its ``repr``.
    """
    for name in names:
        value = getattr(message, name)
        if isinstance(value, str):
            if not value.isprintable():
                msgspec.structs.force_setattr(message, name, one_line(value))
        elif isinstance(value, dict):
            msgspec.structs.force_setattr(message, name, {one_line(a): one_line(b) for a, b in value.items()})
        else:
            msgspec.structs.force_setattr(message, name, tuple(map(one_line, value)))


class Message(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all datagrams: the job, and the attempt of it."""

    job: JobId
    """The job id, verbatim."""
    attempt: ShortText = ""
    """The launcher's attempt number; ranks of different attempts never meet."""


class Seek(Message, frozen=True, kw_only=True, tag="seek", omit_defaults=True):
    """A question: where is the host of this job?"""

    member: Identifier
    """The sender: new in each call, so that a restarted process is not taken for the one before."""
    world_size: WorldSize
    rank: Rank | None = None
    """The rank given to it; None: the host assigns ranks."""
    hostname: ShortText = ""
    pid: ProcessId = 0
    kind: Kind | Literal["observer"] = "ranks"
    """An observer looks for the host and never joins it."""
    unreached: Identifier | None = None
    """The session whose host the sender hears and can't connect to. A host says so as well, and needs no answer."""
    how: ShortText = ""
    """How the connection failed, for reports."""
    padding: Annotated[bytes, Meta(max_length=MAX_BYTES)] = b""
    """Makes a unicast question as long as the longest answer, so that a forged source gains no amplification."""

    def __post_init__(self) -> None:
        make_printable(self, "hostname", "how")


class Offer(Message, frozen=True, kw_only=True, tag="offer", omit_defaults=True):
    """A host's announcement: it hosts a session of this job, at these addresses."""

    session: Identifier
    """The session's id: unlike an address and a port, it can't become another process's."""
    host: Identifier
    """The host's member id; when ranks are assigned the lower one wins."""
    addresses: Addresses
    """Where the control port listens; the address of the interface that sent this comes first."""
    port: TcpPort
    """The control port."""
    world_size: WorldSize
    joined: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)] = 0
    state: State = "open"
    kind: Kind = "ranks"
    assigned: bool = False
    """Whether this session assigns ranks, because none were given."""
    hostname: ShortText = ""
    pid: ProcessId = 0
    quorum: bool = False
    """Agents only: whether this session has had its quorum."""

    @property
    def takes_members(self) -> bool:
        """Whether it has room: a session of ranks until it is sealed, one of agents as long as a seat is free."""
        return self.state == "open" or (self.kind == "agents" and self.joined < self.world_size)

    def __post_init__(self) -> None:
        make_printable(self, "hostname")
        for address in self.addresses:
            check_address(address)

    @property
    def host_name(self) -> str:
        """The sender, as a report names it."""
        return f"host {self.hostname or 'unknown'} ({self.addresses[0]}:{self.port}), pid {self.pid}"


class Bye(Message, frozen=True, kw_only=True, tag="bye", omit_defaults=True):
    """A host's good-bye: this session is over."""

    session: Identifier


class List(Message, frozen=True, kw_only=True, tag="list", omit_defaults=True):
    """Which jobs are there? Sent to the browse group. It names the sender's job, so that others learn of that one."""

    job: Annotated[str, Meta(max_length=MAX_JOB_ID_BYTES)] = ""
    member: Identifier
    rank: Rank | None = None
    hostname: ShortText = ""
    """Empty if an observer asks and no rank."""
    pid: ProcessId = 0
    padding: Annotated[bytes, Meta(max_length=MAX_BYTES)] = b""

    def __post_init__(self) -> None:
        make_printable(self, "hostname")


class Failed(Message, frozen=True, kw_only=True, tag="failed", omit_defaults=True):
    """A process of the job has failed before it could host or join a session, and ends."""

    member: Identifier
    rank: Rank | None = None
    hostname: ShortText = ""
    pid: ProcessId = 0
    kind: Kind = "ranks"
    reason: Annotated[str, Meta(max_length=MAX_REASON_BYTES)] = ""
    """The first line of its error."""

    def __post_init__(self) -> None:
        make_printable(self, "hostname", "reason")


Datagram: TypeAlias = Seek | Offer | Bye | List | Failed


def asker_name(question: Seek | List, address: str, unit: str = "rank") -> str:
    """Return the sender of a question, as a report names it.

    Args:
        question: the question.
        address: where it came from.
        unit: what ranks count (`mingle.wire.frames.Unit`).
    """
    if question.rank is not None:
        sender = f"{unit} {question.rank}"
    elif unit == "node":
        sender = "a node"
    else:
        agent = isinstance(question, Seek) and question.kind == "agents"
        sender = "a torchrun agent" if agent else "a process without a rank"
    return f"{sender} on host {question.hostname or 'unknown'} ({address}), pid {question.pid}"


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Datagram] = msgspec.msgpack.Decoder(Datagram)


class Rejected(Exception):
    """Bytes that must not be acted on; ``reason`` is a short word under which they are counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def truncate_utf8(text: str, max_bytes: int = MAX_SHORT_TEXT_BYTES) -> str:
    """Return the text cut to a number of bytes in UTF-8, between two characters.

    A lone surrogate, which UTF-8 can't hold (a host name in another encoding has some: PEP 383), becomes "?".
    """
    return text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")


def encode(message: Datagram, key: JobKey | None = None) -> bytes:
    """Return the datagram's bytes, signed if there is a key.

    Raises:
        ValueError: it would be longer than :data:`MAX_BYTES`.
    """
    data = with_header(MAGIC, _encoder.encode(message), b"datagram", key)
    if len(data) > MAX_BYTES:
        raise ValueError(f"a datagram of {len(data)} bytes is longer than {MAX_BYTES}")
    return data


def decode(untrusted: bytes, key: JobKey | None = None) -> Datagram:
    """Return the message in untrusted bytes.

    With a key, the MAC is checked before anything is parsed. Without one a signed datagram is still read (its
    signature says nothing to us): that is how a rank without the secret learns what it lacks.

    Raises:
        Rejected: always this and nothing else; its reason is one of ``size``, ``magic``, ``version N``,
            ``unsigned``, ``signature`` and ``malformed``.
    """
    check_header(untrusted, MAGIC)
    if key is not None:
        if not is_signed(untrusted):
            raise Rejected("unsigned")
        if not is_signed_by(key, b"datagram", untrusted):
            raise Rejected("signature")
    try:
        message = _decoder.decode(payload_of(untrusted))
        # msgspec counts characters; the limit is in bytes. Surrogates can't occur: MessagePack text is UTF-8.
        if len(message.job.encode()) > MAX_JOB_ID_BYTES:
            raise Rejected("malformed")
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Rejected("malformed") from None
    return message


def with_header(magic: bytes, body: bytes, purpose: bytes, key: JobKey | None) -> bytes:
    """Return a body with its header in front of it and, with a key, its MAC behind it."""
    flags = 0 if key is None else FLAG_SIGNED
    data = magic + bytes((MAJOR_VERSION, MINOR_VERSION, flags, 0)) + body
    return data if key is None else data + key.mac(purpose, data)


def check_header(untrusted: bytes, magic: bytes) -> None:
    """Check the length and the header of a datagram.

    Raises:
        Rejected: ``size``, ``magic`` or ``version N``.
    """
    if not HEADER_BYTES < len(untrusted) <= MAX_BYTES:
        raise Rejected("size")
    if untrusted[:4] != magic:
        raise Rejected("magic")
    if untrusted[4] != MAJOR_VERSION:
        raise Rejected(f"version {untrusted[4]}")


def payload_of(untrusted: bytes) -> bytes:
    """Return what lies between the header and the MAC, if it has one."""
    return untrusted[HEADER_BYTES : -DATAGRAM_MAC_BYTES if is_signed(untrusted) else None]


def is_signed_by(key: JobKey, purpose: bytes, untrusted: bytes) -> bool:
    """Tell whether the MAC at the end of a signed datagram is the key's; it does not cover the repeated mark."""
    covered = bytearray(untrusted[:-DATAGRAM_MAC_BYTES])
    covered[6:7] = bytes((untrusted[6] & ~FLAG_REPEATED,))
    return key.verify(purpose, bytes(covered), untrusted[-DATAGRAM_MAC_BYTES:])


def is_signed(data: bytes) -> bool:
    """Return whether a datagram claims to carry a MAC."""
    return len(data) >= HEADER_BYTES and bool(data[6] & FLAG_SIGNED)


def is_datagram(untrusted: bytes) -> bool:
    """Return whether bytes look like a datagram of ours, regardless of its content and its signature."""
    return HEADER_BYTES < len(untrusted) <= MAX_BYTES and untrusted[:4] == MAGIC


def is_echo(untrusted: bytes) -> bool:
    """Tell whether bytes look like an echo datagram."""
    return HEADER_BYTES < len(untrusted) <= MAX_BYTES and untrusted[:5] == ECHO_MAGIC + bytes((MAJOR_VERSION,))


def is_repeated(data: bytes) -> bool:
    """Return whether another process of this host has repeated the datagram; it is not repeated again."""
    return len(data) >= HEADER_BYTES and bool(data[6] & FLAG_REPEATED)


def as_repeated(data: bytes) -> bytes:
    """Return a valid datagram marked as repeated; its MAC does not cover the mark, so no key is needed."""
    return data[:6] + bytes((data[6] | FLAG_REPEATED,)) + data[7:]


def padded(message: Seek | List, length: int, key: JobKey | None = None) -> bytes:
    """Return the encoded question, filled up to ``length`` bytes: no answer is longer than it."""
    bare = encode(message, key)
    # A MessagePack key "padding" with a short binary header costs up to 8 + 3 bytes.
    room = length - len(bare) - 11
    if room <= 0:
        return bare
    return encode(msgspec.structs.replace(message, padding=bytes(room)), key)


def with_first(message: Datagram, reached: Iterable[str]) -> Datagram:
    """Return an OFFER with these addresses first: a process that it reaches there can most likely connect there."""
    if not isinstance(message, Offer):
        return message
    first = set(reached)
    return msgspec.structs.replace(
        message, addresses=tuple(sorted(message.addresses, key=lambda address: address not in first))
    )


# --- multicast groups -----------------------------------------------------------------------------------------------

_IPV4_FIRST = 0xEFC0_0000  # 239.192.0.0/14
_IPV4_SCOPE_RELATIVE = 256
_IPV4_BROWSE = 2**18 - _IPV4_SCOPE_RELATIVE - 1
_IPV6_LINK = 0xFF12 << 112
_IPV6_SITE = 0xFF15 << 112
_IPV6_FIRST_DYNAMIC = 0x8000_0000
_IPV6_BROWSE = 0  # offset into the dynamic group ids; a job starts at 1
_IPV6_DYNAMIC_IDS = 2**31
# Separates this hash from every other use of a job id; a change of the mapping needs another text here.
_DOMAIN = b"mingle multicast group 1\x00"


class Group(Struct, frozen=True):
    """One group in each family and scope, as address literals."""

    ipv4: str
    """In 239.192.0.0/14."""
    ipv6_link: str
    """In ff12::/96, for a hop limit of 1."""
    ipv6_site: str
    """In ff15::/96, for a hop limit above 1."""

    def ipv6(self, ttl: int) -> str:
        """Return the IPv6 address whose scope fits packets of hop limit `ttl`."""
        return self.ipv6_site if ttl > 1 else self.ipv6_link


def job_group(job_id: str) -> Group:
    """Return the group of the job `job_id`, the same on every machine and never the browse group."""
    digest = hashlib.sha256(_DOMAIN + job_id.encode("utf-8")).digest()
    return _group(
        ipv4_offset=int.from_bytes(digest[:16], "big") % _IPV4_BROWSE,
        ipv6_offset=int.from_bytes(digest[16:], "big") % (_IPV6_DYNAMIC_IDS - 1) + 1,
    )


def _group(*, ipv4_offset: int, ipv6_offset: int) -> Group:
    group_id = _IPV6_FIRST_DYNAMIC + ipv6_offset
    return Group(
        ipv4=socket.inet_ntop(socket.AF_INET, (_IPV4_FIRST + ipv4_offset).to_bytes(4, "big")),
        ipv6_link=socket.inet_ntop(socket.AF_INET6, (_IPV6_LINK + group_id).to_bytes(16, "big")),
        ipv6_site=socket.inet_ntop(socket.AF_INET6, (_IPV6_SITE + group_id).to_bytes(16, "big")),
    )


BROWSE_GROUP = _group(ipv4_offset=_IPV4_BROWSE, ipv6_offset=_IPV6_BROWSE)
"""The group for all jobs, for a process that does not know, or doubts, its job id. No job id hashes to it."""
