"""Read encoded frames."""

from __future__ import annotations

from mingle.wire.frames import (
    PREFACE,
    AnyFrame,
    FrameReader,
)


def read(*encoded: bytes) -> AnyFrame | None:
    reader = FrameReader()
    reader.feed(PREFACE + b"".join(encoded))
    return reader.next_frame()
