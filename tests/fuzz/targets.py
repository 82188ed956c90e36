"""What is fuzzed: each target takes bytes that anybody may have sent and checks what must hold whatever they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mingle.rules.control import HandshakeFailed
from mingle.wire import datagrams, framing
from mingle.wire.authentication import DATAGRAM_MAC_BYTES
from mingle.wire.datagrams import Rejected
from tests.golden import load
from tests.golden.examples import KEY, STORIES, conversations

from . import mutation

_PACKETS = {name: bytes.fromhex(packet["hex"]) for name, packet in load().items()}
DATAGRAMS = [data for name, data in _PACKETS.items() if "/" not in name]
_SIGNED = {data[:6] + data[7:-DATAGRAM_MAC_BYTES] for data in DATAGRAMS if datagrams.is_signed(data)}
_READ_BYTES = 65_536


def story(speaker: str) -> list[bytes]:
    """The bodies of all that one side says without a secret, handshake first."""
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


def frames(untrusted: bytes) -> None:
    """However a stream is cut, no more is kept than one frame and what was read with it."""
    reader = framing.FrameReader()
    half = len(untrusted) // 2
    with contextlib.suppress(Rejected):
        for piece in (untrusted[:half], untrusted[half:]):
            reader.feed(piece)
            while reader.next_frame() is not None:
                pass
            assert reader.buffered <= framing.MAX_FRAME_BYTES + framing.LENGTH_BYTES


def called(untrusted: bytes) -> None:
    """A host with a secret takes no caller for proved that has not proved it, and keeps little of a stranger's."""
    for key in (None, KEY):
        _, host = conversations(STORIES["join"], key)
        with contextlib.suppress(Rejected, HandshakeFailed):
            host.receive_data(untrusted)
        assert key is None or not host.proved
        assert len(host.data_to_send()) < 2 * framing.MAX_HANDSHAKE_BYTES


def calling(untrusted: bytes) -> None:
    """A member with a secret believes no host that has not proved it."""
    for key in (None, KEY):
        member, _ = conversations(STORIES["join"], key)
        with contextlib.suppress(Rejected, HandshakeFailed):
            member.receive_data(untrusted)
        assert key is None or member.welcome is None


@dataclass(frozen=True)
class Target:
    """A target, what is made into its inputs, and how."""

    check: Callable[[bytes], None]
    datagrams: tuple[bytes, ...] = ()
    speaker: str = ""

    def seeds(self) -> tuple[bytes, ...]:
        """Whole good inputs."""
        if self.datagrams:
            return self.datagrams
        parts = story(self.speaker)
        return tuple(
            framing.PREFACE + b"".join(len(body).to_bytes(framing.LENGTH_BYTES, "big") + body for body in parts[:end])
            for end in range(1, len(parts) + 1)
        )


TARGETS: Mapping[str, Target] = {
    "plain-datagram": Target(plain_datagram, datagrams=tuple(DATAGRAMS)),
    "signed-datagram": Target(
        signed_datagram, datagrams=tuple(each for each in DATAGRAMS if datagrams.is_signed(each))
    ),
    "frames": Target(frames, speaker="host"),
    "called": Target(called, speaker="member"),
    "calling": Target(calling, speaker="host"),
}
