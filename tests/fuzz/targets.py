"""What is fuzzed: each target takes bytes that anybody may have sent and checks what must hold whatever they are."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

import msgspec

from mingle.check import messages
from mingle.network import local_relay, transport
from mingle.network.transport import Version
from mingle.protocol.links.handshake import HandshakeFailed, HostConversation, MemberConversation
from mingle.wire import datagrams, echo
from mingle.wire.authentication import DATAGRAM_MAC_BYTES
from mingle.wire.datagrams import Rejected
from mingle.wire.frame_codec import LENGTH_BYTES, MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, PREFACE, FrameReader
from tests.golden import load
from tests.golden.examples import ADDRESSES, JOB, KEY, PORT, SESSION, STORIES

from . import mutation, observers

_PACKETS = {name: bytes.fromhex(packet["hex"]) for name, packet in load().items()}
DATAGRAMS = [data for name, data in _PACKETS.items() if "/" not in name]
_SIGNED = {data[:6] + data[7:-DATAGRAM_MAC_BYTES] for data in DATAGRAMS if datagrams.is_signed(data)}
_ECHOES = (
    echo.EchoRequest(job="resnet", pinger=bytes(16), hostname="node-1", pid=1, port=4567, number=1, way="unicast"),
    echo.EchoReply(
        job="resnet", pinger=bytes(16), hostname="node-2", pid=2, asker=bytes(16), number=1, way="multicast"
    ),
    echo.EchoEnd(job="resnet", pinger=bytes(16)),
)
ECHOES = [echo.encode(message, key) for message in _ECHOES for key in (None, KEY)]
_TRUSTED = {data[:6] + data[7:] for data in ECHOES[1::2]}
_ORIGINS: tuple[tuple[str, str, int, Version, str], ...] = (
    ("eth0", "192.0.2.7", 0, "4", "192.0.2.1"),
    ("eth0", "2001:db8::7", 0, "6", "2001:db8::1"),
    ("wlan0", "fe80::7", 3, "6", "fe80::1"),
    ("", "127.0.0.1", 0, "4", ""),
)
LOCAL_MESSAGES = tuple(
    msgspec.msgpack.encode([data, interface, host, 40000, scope, family, False, destination])
    for data in (*DATAGRAMS, *ECHOES)
    for interface, host, scope, family, destination in _ORIGINS
)


_PEER = {"rank": 1, "address": "192.0.2.7", "port": 4567, "token": "t"}
_LOCAL = {"interface": "eth0", "address": "192.0.2.7", "network": "192.0.2.0/24", "mtu": 1500}
_HELLO = {
    **_PEER,
    "node": 1,
    "host": "node-1",
    "pid": 4711,
    "interface": "eth0",
    "networks": [_LOCAL],
    "options": {"backend": "auto", "max_size": 1 << 26, "seconds": 20.0},
}
QUESTIONS = tuple(
    msgspec.json.encode(each)
    for each in ({"token": "t"}, {"token": "t", "probe": _PEER}, {"token": "t", "hello": _HELLO})
)


def _closed(family: socket.AddressFamily) -> socket.socket:
    """A socket that sends nothing; an address that no socket takes is an error all the same."""
    with socket.socket(family, socket.SOCK_DGRAM) as opened:
        return opened


_NOWHERE: dict[Version, socket.socket] = {"4": _closed(socket.AF_INET), "6": _closed(socket.AF_INET6)}


_ECHOES = tuple(
    echo.encode(each)
    for each in (
        echo.EchoRequest(pinger=b"P" * 16, hostname="node-3", pid=4711, port=40124, number=1, way="multicast"),
        echo.EchoReply(pinger=b"P" * 16, hostname="node-3", pid=4711, port=40124, asker=b"F" * 16, number=1, way="tcp"),
        echo.EchoEnd(pinger=b"P" * 16, hostname="node-3", pid=4711, port=40124),
    )
)


def story(speaker: str) -> list[bytes]:
    """The bodies of all that one side says without a secret, handshake first; of who is ``probed`` only its answer."""
    if speaker == "probed":
        return [body for name in ("join/welcome", "probe/running") for body in mutation.bodies(_PACKETS[name])]
    first = {"member": ("hello", "prove"), "host": ("welcome",)}[speaker]
    later = [line.name for line in STORIES["join"].lines if line.speaker == speaker]
    names = [f"join/{name}" for name in (*first, *later)]
    names += [f"{story}/{line.name}" for story in ("election", "probe") for line in STORIES[story].lines]
    return [body for name in names if name in _PACKETS for body in mutation.bodies(_PACKETS[name])]


def plain_datagram(untrusted: bytes) -> None:
    """What is accepted is a message, and the same message once it was sent on."""
    try:
        message = datagrams.decode(untrusted)
    except Rejected:
        return
    assert getattr(message, "hostname", "").isprintable()
    try:
        again = datagrams.encode(message)
    except ValueError:  # padding that came as text of another form may grow by a byte
        return
    assert datagrams.decode(again) == message


def signed_datagram(untrusted: bytes) -> None:
    """Nothing is accepted but what was signed."""
    try:
        datagrams.decode(untrusted, KEY)
    except Rejected:
        return
    assert untrusted[:6] + untrusted[7:-DATAGRAM_MAC_BYTES] in _SIGNED


def frame_stream(untrusted: bytes) -> None:
    """However a stream is cut, no more is kept than one frame and what was read with it."""
    reader = FrameReader()
    half = len(untrusted) // 2
    with contextlib.suppress(Rejected):
        for piece in (untrusted[:half], untrusted[half:]):
            reader.feed(piece)
            while (frame := reader.next_frame()) is not None:
                for name in ("reason", "detail", "roster", "phase", "lacks"):
                    assert getattr(frame, name, "").isprintable()
            assert len(reader._buffer) <= MAX_FRAME_BYTES + LENGTH_BYTES


def called(untrusted: bytes) -> None:
    """A host with a secret takes no caller for proved that has not proved it, and keeps little of a stranger's."""
    for key in (None, KEY):
        host = HostConversation(job=JOB, attempt="1", session=SESSION, addresses=ADDRESSES, port=PORT, key=key)
        with contextlib.suppress(Rejected, HandshakeFailed):
            host.receive_data(untrusted)
        assert key is None or not host.proved
        assert len(host.data_to_send()) < 2 * MAX_HANDSHAKE_BYTES


def calling(untrusted: bytes) -> None:
    """A member with a secret believes no host that has not proved it."""
    for key in (None, KEY):
        member = MemberConversation(STORIES["join"].call, (ADDRESSES[0], PORT), key)
        with contextlib.suppress(Rejected, HandshakeFailed):
            member.receive_data(untrusted)
        assert key is None or member.welcome is None


def echoes(untrusted: bytes) -> None:
    """A ping or its answer is trusted with the secret alone, and says nothing that a terminal would obey."""
    try:
        message = echo.decode(untrusted)
    except Rejected:
        return
    assert message.hostname.isprintable()
    assert not echo.is_trusted(untrusted, KEY) or untrusted[:6] + untrusted[7:] in _TRUSTED


def local_message(untrusted: bytes) -> None:
    """What another process of this machine hands on can be read, and an answer to it can be sent, whatever it says."""
    try:
        received = local_relay.decode(untrusted)
    except Rejected:
        return
    family = socket.AF_INET if received.family == "4" else socket.AF_INET6
    assert socket.inet_pton(family, received.source[0])
    assert received.interface.isprintable()
    with contextlib.suppress(OSError):  # it is closed
        transport.send_from(_NOWHERE[received.family], b"", received.destination, received.source)
    with contextlib.suppress(Rejected):
        (datagrams if received.data[:4] == datagrams.MAGIC else echo).decode(received.data)


def check_question(untrusted: bytes) -> None:
    """What a rank of mingle-check is asked is one exception, or has all that is read of it."""
    try:
        question = messages.question_of(untrusted)
    except ValueError:
        return
    assert question.token.encode() is not None
    for who in (question.hello, question.probe):
        if who is not None:
            assert who.rank >= 0
            assert 0 < who.port < 65_536
            assert not who.address or ip_address(who.address)


@dataclass(frozen=True)
class Target:
    """A target, what is made into its inputs, and how."""

    check: Callable[[bytes], None]
    datagrams: tuple[bytes, ...] = ()
    speaker: str = ""
    mutate: Callable[[bytes, random.Random], bytes] = mutation.datagram

    def maker(self) -> Callable[[random.Random], bytes]:
        """What makes one hostile input after the other."""
        if self.datagrams:
            return lambda rng: self.mutate(rng.choice(self.datagrams), rng)
        said = story(self.speaker)
        return lambda rng: mutation.stream(said, rng)

    def seeds(self) -> tuple[bytes, ...]:
        """Whole good inputs."""
        if self.datagrams:
            return self.datagrams
        parts = story(self.speaker)
        return tuple(
            PREFACE + b"".join(len(body).to_bytes(LENGTH_BYTES, "big") + body for body in parts[:end])
            for end in range(1, len(parts) + 1)
        )


TARGETS: Mapping[str, Target] = {
    "plain-datagram": Target(plain_datagram, datagrams=tuple(DATAGRAMS)),
    "signed-datagram": Target(
        signed_datagram, datagrams=tuple(each for each in DATAGRAMS if datagrams.is_signed(each))
    ),
    "echo": Target(echoes, datagrams=tuple(ECHOES)),
    "local-message": Target(local_message, datagrams=LOCAL_MESSAGES, mutate=mutation.local_message),
    "frames": Target(frame_stream, speaker="host"),
    "called": Target(called, speaker="member"),
    "calling": Target(calling, speaker="host"),
    "json-seen": Target(observers.seen, datagrams=tuple(DATAGRAMS)),
    "json-told": Target(observers.told, speaker="probed"),
    "check-question": Target(check_question, datagrams=QUESTIONS, mutate=mutation.json_text),
    "json-pinged": Target(observers.pinged, datagrams=_ECHOES),
}
