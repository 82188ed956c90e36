"""Keys and proofs made from the job's shared secret.

One secret may serve many jobs, so everything is keyed by a *job key* that is derived from the secret with scrypt
(RFC 7914) and from the job id with HKDF (RFC 5869): a message signed for one job proves nothing in another. All MACs
are HMAC-SHA256 (RFC 2104) and are compared in constant time.

Nothing here keeps, prints or logs the secret itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from typing import SupportsBytes

from mingle.errors import ConfigurationError

NONCE_BYTES = 16
TOKEN_BYTES = 16
SESSION_HASH_BYTES = 16
DATAGRAM_MAC_BYTES = 32
# Frames travel inside an ordered connection whose two ends have already proved themselves, so a truncated MAC
# (RFC 2104, section 5: not less than half of the hash) is enough for them.
FRAME_MAC_BYTES = 16
# An eavesdropper with one datagram can test guesses of the secret offline. scrypt makes each guess as expensive as the
# derivation here: 50 ms of a core and 16 MiB.
SCRYPT_N = 2**14
SCRYPT_R = 8
SCRYPT_P = 1
# The salt is fixed, because the ranks share nothing but the secret.
SCRYPT_SALT = b"mingle secret v1"
_SCRYPT_MEMORY = 64 * 1024 * 1024  # OpenSSL refuses to take more than 32 MiB unless it is told
_REMEMBERED_SECRETS = 16
_derived: dict[bytes, bytes] = {}
_memory_key = os.urandom(32)


def new_nonce() -> bytes:
    """Return fresh randomness that makes a proof worthless in any other connection."""
    return os.urandom(NONCE_BYTES)


def new_token() -> bytes:
    """Return fresh randomness that only its holder knows."""
    return os.urandom(TOKEN_BYTES)


def same_token(known: bytes, untrusted: bytes) -> bool:
    """Return, in constant time, whether two tokens are the same."""
    return hmac.compare_digest(known, untrusted)


def session_hash(session: bytes, nonce: bytes) -> bytes:
    """Return the hash that HELLO carries in place of the session id.

    An OFFER can be forged, so a rank must not send bytes from it to an endpoint that the OFFER names.
    """
    return hashlib.sha256(join_fields((b"mingle session", session, nonce))).digest()[:SESSION_HASH_BYTES]


def join_fields(fields: Iterable[bytes]) -> bytes:
    """Join byte strings, each after its length, so that no two different lists give the same bytes."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def _derive(secret: bytes | SupportsBytes) -> bytes:
    """Return the key of a secret, derived once per process and secret.

    Raises:
        ConfigurationError: Python's OpenSSL has no scrypt.
    """
    # Keep the secret's bytes out of this frame's variables, because a traceback can show them.
    name = hmac.digest(_memory_key, bytes(secret), hashlib.sha256)
    known = _derived.get(name)
    if known is not None:
        return known
    try:
        derived = hashlib.scrypt(
            bytes(secret), salt=SCRYPT_SALT, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P, maxmem=_SCRYPT_MEMORY, dklen=32
        )
    except (AttributeError, ValueError) as error:  # LibreSSL; OpenSSL in FIPS mode
        raise ConfigurationError.explain(
            f"no key can be derived from the secret: {error}",
            cause="the OpenSSL of this Python has no scrypt, or is in FIPS mode, which excludes it",
            remedy="use a Python with OpenSSL 1.1 or later; or run without a secret on a network of your own.",
        ) from None
    while len(_derived) >= _REMEMBERED_SECRETS:
        _derived.pop(next(iter(_derived)), None)
    _derived[name] = derived
    return derived


class JobKey:
    """The key of one job: it signs datagrams and proves that a process has the secret."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes | SupportsBytes, job_id: str) -> None:
        extracted = hmac.digest(b"mingle job key v1", _derive(secret), hashlib.sha256)
        self._key = hmac.digest(extracted, job_id.encode() + b"\x01", hashlib.sha256)

    def mac(self, purpose: bytes, data: bytes) -> bytes:
        """Return the 32-byte MAC of ``data``; ``purpose`` keeps MACs of different uses apart."""
        return hmac.digest(self._key, join_fields((purpose, data)), hashlib.sha256)

    def verify(self, purpose: bytes, data: bytes, tag: bytes) -> bool:
        """Return, in constant time, whether ``tag`` is the MAC of ``data``."""
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
        """Return the MAC of the next frame to be sent."""
        tag = self._tag(self._sending, self._sent, body)
        self._sent += 1
        return tag

    def check(self, body: bytes, tag: bytes) -> bool:
        """Return whether ``tag`` belongs to the next frame received."""
        expected = self._tag(self._receiving, self._received, body)
        self._received += 1
        return hmac.compare_digest(expected, tag)

    @staticmethod
    def _tag(key: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + body, hashlib.sha256)[:FRAME_MAC_BYTES]

    def __repr__(self) -> str:
        return "FrameKeys(…)"
