"""Keys and proofs made from the job's shared secret.

One secret may serve many jobs, so everything is keyed by a *job key* that is derived from the secret and the
job id with HKDF (RFC 5869): a message signed for one job proves nothing in another. All MACs are HMAC-SHA256
(RFC 2104) and are compared in constant time.

Nothing here keeps, prints or logs the secret itself.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

NONCE_BYTES = 16
DATAGRAM_MAC_BYTES = 32
# Frames travel inside an ordered connection whose two ends have already proved themselves, so a truncated MAC
# (RFC 2104, section 5: not less than half of the hash) is enough for them.
FRAME_MAC_BYTES = 16


def new_nonce() -> bytes:
    """Returns fresh randomness that makes a proof worthless in any other connection."""
    return secrets.token_bytes(NONCE_BYTES)


def join_fields(fields: Iterable[bytes]) -> bytes:
    """Joins byte strings, each after its length, so that no two different lists give the same bytes."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


class JobKey:
    """The key of one job: signs datagrams and proves who holds the secret."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes, job_id: str) -> None:
        extracted = hmac.digest(b"mingle job key v1", secret, hashlib.sha256)
        self._key = hmac.digest(extracted, job_id.encode() + b"\x01", hashlib.sha256)

    def mac(self, purpose: bytes, data: bytes) -> bytes:
        """Returns the 32-byte MAC of ``data``; ``purpose`` keeps MACs of different uses apart."""
        return hmac.digest(self._key, join_fields((purpose, data)), hashlib.sha256)

    def verify(self, purpose: bytes, data: bytes, tag: bytes) -> bool:
        """Tells, in constant time, whether ``tag`` is the MAC of ``data``."""
        return hmac.compare_digest(self.mac(purpose, data), tag)

    def __repr__(self) -> str:
        return "JobKey(…)"


class FrameKeys:
    """The keys of one connection's two directions; each frame's MAC covers its place in the stream.

    Both sides derive them from the job key and the handshake's transcript, so a frame recorded on one
    connection, or in the other direction, or earlier on the same connection, is never accepted.
    """

    __slots__ = ("_received", "_receiving", "_sending", "_sent")

    def __init__(self, key: JobKey, transcript: bytes, *, host: bool) -> None:
        directions = (key.mac(b"frames to host", transcript), key.mac(b"frames to member", transcript))
        self._receiving, self._sending = directions if host else directions[::-1]
        self._sent = 0
        self._received = 0

    def seal(self, body: bytes) -> bytes:
        """Returns the MAC of the next frame to be sent."""
        tag = self._tag(self._sending, self._sent, body)
        self._sent += 1
        return tag

    def check(self, body: bytes, tag: bytes) -> bool:
        """Tells whether ``tag`` belongs to the next frame received."""
        expected = self._tag(self._receiving, self._received, body)
        self._received += 1
        return hmac.compare_digest(expected, tag)

    @staticmethod
    def _tag(key: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + body, hashlib.sha256)[:FRAME_MAC_BYTES]

    def __repr__(self) -> str:
        return "FrameKeys(…)"
