"""Read encoded frames."""

from __future__ import annotations

from mingle.wire.frame_codec import PREFACE, FrameReader
from mingle.wire.frames import AnyFrame


def read(*encoded: bytes) -> AnyFrame | None:
    reader = FrameReader()
    reader.feed(PREFACE + b"".join(encoded))
    return reader.next_frame()
