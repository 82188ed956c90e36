"""The stream of frames: in whatever pieces it comes, and whatever was done to its bytes."""

from __future__ import annotations

import pytest

from mingle.wire import frame_codec, frames
from mingle.wire.authentication import FRAME_MAC_BYTES, FrameKeys
from mingle.wire.datagrams import Rejected
from mingle.wire.frame_codec import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    PREFACE,
    FrameReader,
    encode_frame,
)
from mingle.wire.frames import AnyFrame
from tests.golden.examples import KEY, STORIES, speak

STREAMS = [
    b"".join(each.data for each in speak(story, None) if each.speaker == speaker)
    for story in STORIES.values()
    for speaker in ("member", "host")
]
PING = encode_frame(frames.Ping(number=1))
DEEP = b"\x82\xa4type\xa4ping\xa1x"
"""The begin of a PING with a field that is not known."""


def whole_frames(reader: FrameReader) -> list[AnyFrame]:
    received = []
    while (frame := reader.next_frame()) is not None:
        received.append(frame)
    return received


def read_all(reader: FrameReader, data: bytes, chunk: int = MAX_FRAME_BYTES) -> list[AnyFrame]:
    """Feed the bytes in pieces, and read as a connection's owner does: until there is no whole frame."""
    received = []
    for start in range(0, len(data), chunk):
        reader.feed(data[start : start + chunk])
        received += whole_frames(reader)
    return received


def keys() -> tuple[FrameKeys, FrameKeys]:
    return FrameKeys(KEY, b"transcript", host=False), FrameKeys(KEY, b"transcript", host=True)


def sealed_reader() -> FrameReader:
    reader = FrameReader()
    reader.keys = keys()[1]
    return reader


def framed(body: bytes) -> bytes:
    return PREFACE + len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("data", STREAMS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_frames_come_out_the_same_in_whatever_pieces_they_come_in(data: bytes, chunk: int) -> None:
    assert read_all(FrameReader(), data, chunk) == read_all(FrameReader(), data) != []


@pytest.mark.parametrize("data", STREAMS)
def test_a_truncated_stream_gives_the_whole_frames_and_waits(data: bytes) -> None:
    whole = read_all(FrameReader(), data)
    for length in range(len(data)):
        reader = FrameReader()
        received = read_all(reader, data[:length])
        assert received == whole[: len(received)] != whole
        assert received + read_all(reader, data[length:]) == whole


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"H", "magic", id="first byte of another protocol"),
        pytest.param(b"MNGK", "magic", id="near miss"),
        pytest.param(b"\x16\x03\x01\x02\x00", "magic", id="TLS"),
        pytest.param(b"MNGL\x02\x00\x00\x00", "version 2", id="the next major"),
        pytest.param(b"MNGL\x00\x00\x00\x00", "version 0", id="major 0"),
        pytest.param(PREFACE + bytes(4), "size", id="an empty frame"),
        pytest.param(PREFACE + (MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "size", id="one byte too long"),
        pytest.param(PREFACE + b"\xff\xff\xff\xff", "size", id="4 GiB"),
        pytest.param(framed(b"\xc1"), "malformed", id="no MessagePack"),
        pytest.param(framed(b"\x80"), "malformed", id="no type"),
        pytest.param(framed(b"\xdf\xff\xff\xff\xff"), "malformed", id="a huge map"),
        pytest.param(framed(PING[4:] + bytes(4)), "malformed", id="bytes after the map"),
        pytest.param(framed(b"\x91" * MAX_FRAME_BYTES), "malformed", id="deep lists"),
        pytest.param(framed(DEEP + b"\x91" * 100_000), "malformed", id="deep lists in an unknown field"),
        pytest.param(framed(DEEP + b"\x81" * 100_000), "malformed", id="deep maps in an unknown field"),
    ],
)
def test_a_rejected_stream_stays_rejected_and_leaves_nothing(data: bytes, reason: str) -> None:
    reader = FrameReader()
    with pytest.raises(Rejected) as rejected:
        read_all(reader, data, 997)
    assert rejected.value.reason == reason
    for _ in range(2):
        reader.feed(PREFACE + PING)
        assert not reader._buffer
        with pytest.raises(Rejected, match=f"^{reason}$"):
            reader.next_frame()


def test_a_higher_minor_version_is_accepted_and_known() -> None:
    reader = FrameReader()
    preface = b"MNGL\x01\xff\xff\xff"
    assert read_all(reader, preface + PING, 3) == [frames.Ping(number=1)]
    assert reader.preface == preface


def test_the_body_is_kept_as_it_came() -> None:
    body = b"\x83\xa4type\xa4ping\xa6number\xcd\x00\x01\xa6colour\xa4blue"
    reader = FrameReader()
    assert read_all(reader, framed(body), 5) == [frames.Ping(number=1)]
    assert reader.body == body


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [MAX_HANDSHAKE_BYTES, MAX_FRAME_BYTES])
def test_a_slow_sender_makes_us_hold_one_frame_at_most(limit: int) -> None:
    reader = FrameReader(limit)
    reader.feed(PREFACE + limit.to_bytes(4, "big"))
    for _ in range(limit - 1):
        reader.feed(b"\xc0")
        assert reader.next_frame() is None
    assert len(reader._buffer) == LENGTH_BYTES + limit - 1
    reader.feed(b"\xc0")
    with pytest.raises(Rejected, match="malformed"):
        reader.next_frame()


def test_the_limit_may_be_raised_between_two_frames() -> None:
    long = encode_frame(frames.Running(state="open", world_size=1, host=frames.ProcessInfo(), joined=(9,) * 4096))
    assert len(long) > MAX_HANDSHAKE_BYTES
    with pytest.raises(Rejected, match="size"):
        read_all(FrameReader(MAX_HANDSHAKE_BYTES), PREFACE + long[:LENGTH_BYTES])
    reader = FrameReader(MAX_HANDSHAKE_BYTES)
    reader.feed(PREFACE + PING + long)
    assert reader.next_frame() == frames.Ping(number=1)
    reader.max_bytes = MAX_FRAME_BYTES
    assert isinstance(reader.next_frame(), frames.Running)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_frame_that_is_too_long_is_never_sent_and_counts_for_nothing(sealed: bool) -> None:
    sender, receiver = keys() if sealed else (None, None)
    longest = MAX_FRAME_BYTES - FRAME_MAC_BYTES * sealed
    assert len(frame_codec.encode_body(bytes(longest), keys()[0] if sealed else None)) == LENGTH_BYTES + MAX_FRAME_BYTES
    with pytest.raises(ValueError, match=f"longer than {MAX_FRAME_BYTES}"):
        frame_codec.encode_body(bytes(longest + 1), sender)
    reader = FrameReader()
    reader.keys = receiver
    assert read_all(reader, PREFACE + encode_frame(frames.Ping(), sender)) == [frames.Ping()]


# --- frames with a MAC --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 17))
def test_a_sealed_frame_shorter_than_its_mac_is_refused(length: int) -> None:
    with pytest.raises(Rejected, match="signature"):
        read_all(sealed_reader(), framed(bytes(length)))


def test_every_bit_flip_of_a_sealed_stream_is_noticed_before_a_frame_is_decoded() -> None:
    member, _ = keys()
    said = [line.frame for line in STORIES["join"].lines if line.speaker == "member"]
    data = PREFACE + b"".join(encode_frame(frame, member) for frame in said)
    assert read_all(sealed_reader(), data, 11) == said
    for bit in range(8 * len(PREFACE), 8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        reader = sealed_reader()
        reader.feed(bytes(changed))
        received, end = [], ""
        try:
            while (frame := reader.next_frame()) is not None:
                received.append(frame)
        except Rejected as rejected:
            end = rejected.reason
        # A length that grew waits for bytes that never come: the end of the connection leaves it unread.
        assert end in {"signature", "size", ""}
        assert received == said[: len(received)] != said
