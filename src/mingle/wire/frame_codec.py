"""The bytes of the control connection: frames are encoded here, and cut out of the stream of untrusted bytes.

Each side begins with a preface of eight bytes, the header of :mod:`mingle.wire.datagrams` (magic, versions,
zeros), so that a stranger or another major version is known before anything is parsed. Then frames follow::

    0   4  length of what follows, big endian
    4   …  one MessagePack map (msgspec), its key "type" says which frame it is; unknown keys are ignored
    …  16  once both sides have proved the secret: a truncated HMAC-SHA256
           (:class:`~mingle.wire.authentication.FrameKeys`)
"""

from __future__ import annotations

import msgspec

from mingle.wire.authentication import FRAME_MAC_BYTES, FrameKeys
from mingle.wire.datagrams import HEADER_BYTES, MAGIC, MAJOR_VERSION, MINOR_VERSION, Rejected
from mingle.wire.frames import AnyFrame

# A peer can make this process hold one such frame per connection; the fullest STATUS and ROSTER fit in it.
MAX_FRAME_BYTES = 131_072
# A peer that has proved nothing yet can make it hold one of these: the frames of the handshake are short.
MAX_HANDSHAKE_BYTES = 4_096
LENGTH_BYTES = 4
PREFACE = MAGIC + bytes((MAJOR_VERSION, MINOR_VERSION, 0, 0))

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


def encode_frame(frame: AnyFrame, keys: FrameKeys | None = None) -> bytes:
    """Return the frame's bytes with length and, with keys, its MAC.

    Raises:
        ValueError: it would be longer than :data:`MAX_FRAME_BYTES`.
    """
    return encode_body(body_of(frame), keys)


def body_of(frame: AnyFrame) -> bytes:
    """Return the frame's MessagePack map, which may be sent on several connections."""
    return _encoder.encode(frame)


def encode_body(body: bytes, keys: FrameKeys | None = None) -> bytes:
    """Return the encoded frame, as `encode_frame` does, from a frame's MessagePack map.

    Raises:
        ValueError: as `encode_frame`.
    """
    length = len(body) + (0 if keys is None else FRAME_MAC_BYTES)
    # Before it is sealed: a MAC that is not sent would put the two sides' counters out of step.
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
    if keys is not None:
        body += keys.seal(body)
    return length.to_bytes(LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts a stream of untrusted bytes into frames.

    Keys and the limit may be set between two frames: what was proved in one frame guards the next.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.keys: FrameKeys | None = None
        self.max_bytes = max_bytes
        self.preface = b""
        """The peer's first eight bytes, once they are here."""
        self.body = b""
        """The MessagePack map of the last frame, as it came: what a proof covers, unknown keys included."""
        self._buffer = bytearray()
        self._failure = ""

    def feed(self, untrusted: bytes) -> None:
        """Take what came in; it stays bounded because :meth:`next_frame` is called until it gives None."""
        if not self._failure:
            self._buffer += untrusted

    def next_frame(self) -> AnyFrame | None:
        """Return the next whole frame, or None until more bytes come.

        Raises:
            Rejected: the peer speaks something else; the connection is of no use any more, nothing more is
                kept of it, and every later call raises the same. The reason is one of ``magic``,
                ``version N``, ``size``, ``signature`` and ``malformed``.
        """
        if self._failure:
            raise Rejected(self._failure)
        try:
            return self._next_frame()
        except Rejected as rejected:
            self._failure = rejected.reason
            self._buffer.clear()
            raise

    def _next_frame(self) -> AnyFrame | None:
        if not self.preface:
            if not MAGIC.startswith(bytes(self._buffer[:4])):
                raise Rejected("magic")
            if len(self._buffer) < HEADER_BYTES:
                return None
            if self._buffer[4] != MAJOR_VERSION:
                raise Rejected(f"version {self._buffer[4]}")
            self.preface = bytes(self._buffer[:HEADER_BYTES])
            del self._buffer[:HEADER_BYTES]
        if len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if not 0 < length <= self.max_bytes:
            raise Rejected("size")
        if len(self._buffer) < LENGTH_BYTES + length:
            return None
        body = bytes(self._buffer[LENGTH_BYTES : LENGTH_BYTES + length])
        del self._buffer[: LENGTH_BYTES + length]
        if self.keys is not None:
            body, tag = body[:-FRAME_MAC_BYTES], body[-FRAME_MAC_BYTES:]
            if not self.keys.check(body, tag):
                raise Rejected("signature")
        self.body = body
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise Rejected("malformed") from None
