"""The stream of frames: in whatever pieces it comes, and whatever was done to its bytes."""

from __future__ import annotations

import random
import re

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
from tests.golden.examples import KEY, STORIES, Spoken, speak

REASONS = re.compile(r"magic|version \d{1,3}|size|signature|malformed")
PLAIN = {name: list(speak(story, None)) for name, story in STORIES.items()}
PING = encode_frame(frames.Ping(number=1))


def stream(speaker: str, spoken: list[Spoken]) -> bytes:
    return b"".join(each.data for each in spoken if each.speaker == speaker)


STREAMS = [stream(speaker, spoken) for spoken in PLAIN.values() for speaker in ("member", "host")]


def read_all(reader: FrameReader, data: bytes, chunk: int) -> list[AnyFrame]:
    """Feed the bytes in pieces, and read as a connection's owner does: until there is no whole frame."""
    received = []
    for start in range(0, len(data), chunk):
        reader.feed(data[start : start + chunk])
        while (frame := reader.next_frame()) is not None:
            received.append(frame)
    return received


def keys() -> tuple[FrameKeys, FrameKeys]:
    return FrameKeys(KEY, b"transcript", host=False), FrameKeys(KEY, b"transcript", host=True)


@pytest.mark.parametrize("data", STREAMS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 100_000])
def test_frames_come_out_the_same_in_whatever_pieces_they_come_in(data: bytes, chunk: int) -> None:
    assert read_all(FrameReader(), data, chunk) == read_all(FrameReader(), data, len(data)) != []


@pytest.mark.parametrize("data", STREAMS)
def test_a_truncated_stream_gives_the_whole_frames_and_waits(data: bytes) -> None:
    whole = read_all(FrameReader(), data, len(data))
    for length in range(len(data)):
        reader = FrameReader()
        received = read_all(reader, data[:length], len(data))
        assert received == whole[: len(received)] != whole
        assert reader.next_frame() is None
        reader.feed(data[length:])
        rest = []
        while (frame := reader.next_frame()) is not None:
            rest.append(frame)
        assert received + rest == whole


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
        pytest.param(PREFACE + b"\x00\x00\x00\x01\xc1", "malformed", id="no MessagePack"),
        pytest.param(PREFACE + b"\x00\x00\x00\x01\x80", "malformed", id="no type"),
        pytest.param(PREFACE + b"\x00\x00\x00\x05\xdf\xff\xff\xff\xff", "malformed", id="a huge map"),
        pytest.param(
            PREFACE + len(PING).to_bytes(4, "big") + PING[4:] + bytes(4), "malformed", id="bytes after the map"
        ),
    ],
)
def test_rejection_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(Rejected) as rejected:
        read_all(FrameReader(), data, 3)
    assert rejected.value.reason == reason


@pytest.mark.parametrize(
    ("chain", "rule"),
    [
        *((chain, "drop") for chain in ("inet x y\n", "inet x y; reboot", "inet x `y`", "inet x $(y)", "inet -f y")),
        *((chain, "drop") for chain in ("bridge x y", "inet x", f"ip x {65 * 'y'}")),
        *(("inet x y", rule) for rule in ("drop` fix: `reboot", "drop; reboot", "drop\n", "$(reboot)", 201 * "x")),
    ],
)
def test_firewall_that_could_be_a_command_is_malformed(chain: str, rule: str) -> None:
    blocked = frames.Blocked(address="192.0.2.7", chain=chain, rule=rule)
    frame = frames.Confirmed(session=b"s" * 16, epoch=1, paths=(), blocked=blocked)
    with pytest.raises(Rejected, match="malformed"):
        read_all(FrameReader(), PREFACE + frame_codec.encode_frame(frame), MAX_FRAME_BYTES)


@pytest.mark.parametrize("opener", [b"\x91", b"\x81", b"\x81\xa1x"])
@pytest.mark.parametrize("start", [b"", b"\x82\xa4type\xa4ping\xa1x"])
def test_deep_nesting_is_malformed(opener: bytes, start: bytes) -> None:
    body = (start + opener * MAX_FRAME_BYTES)[:MAX_FRAME_BYTES]
    with pytest.raises(Rejected, match="malformed"):
        read_all(FrameReader(), PREFACE + len(body).to_bytes(4, "big") + body, MAX_FRAME_BYTES)


def test_a_higher_minor_version_is_accepted_and_known() -> None:
    reader = FrameReader()
    preface = b"MNGL\x01\xff\xff\xff"
    assert read_all(reader, preface + PING, 3) == [frames.Ping(number=1)]
    assert reader.preface == preface


def test_the_body_is_kept_as_it_came() -> None:
    body = b"\x83\xa4type\xa4ping\xa6number\xcd\x00\x01\xa6colour\xa4blue"
    reader = FrameReader()
    assert read_all(reader, PREFACE + len(body).to_bytes(4, "big") + body, 5) == [frames.Ping(number=1)]
    assert reader.body == body


# --- limits -------------------------------------------------------------------------------------------------


def test_ten_megabytes_of_garbage_leave_nothing() -> None:
    rng = random.Random(7)
    for start in (b"", PREFACE, PREFACE + PING):
        reader = FrameReader()
        with pytest.raises(Rejected):
            read_all(reader, start + b"\xff" + rng.randbytes(65_535), 65_536)
        for _ in range(160):
            reader.feed(rng.randbytes(65_536))
            assert not reader._buffer


def test_a_rejected_stream_stays_rejected() -> None:
    reader = FrameReader()
    reader.feed(b"GET / HTTP/1.1\r\n")
    for _ in range(2):
        with pytest.raises(Rejected, match="magic"):
            reader.next_frame()
        reader.feed(PREFACE + PING)


@pytest.mark.parametrize("limit", [MAX_HANDSHAKE_BYTES, MAX_FRAME_BYTES])
def test_a_slow_sender_makes_us_hold_one_frame_at_most(limit: int) -> None:
    reader = FrameReader(limit)
    reader.feed(PREFACE + limit.to_bytes(4, "big"))
    held = 0
    for _ in range(limit - 1):
        reader.feed(b"\xc0")
        assert reader.next_frame() is None
        held = max(held, len(reader._buffer))
    assert held == LENGTH_BYTES + limit - 1
    reader.feed(b"\xc0")
    with pytest.raises(Rejected, match="malformed"):
        reader.next_frame()
    assert not reader._buffer


def test_the_limit_may_be_raised_between_two_frames() -> None:
    long = encode_frame(frames.Running(state="open", world_size=1, host=frames.ProcessInfo(), joined=(9,) * 4096))
    assert len(long) > MAX_HANDSHAKE_BYTES
    with pytest.raises(Rejected, match="size"):
        read_all(FrameReader(MAX_HANDSHAKE_BYTES), PREFACE + long[:LENGTH_BYTES], 9)
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
    assert read_all(reader, PREFACE + encode_frame(frames.Ping(), sender), 9) == [frames.Ping()]


# --- frames with a MAC --------------------------------------------------------------------------------------


def sealed_stream() -> tuple[bytes, FrameKeys, list[AnyFrame]]:
    member, host = keys()
    said = [line.frame for line in STORIES["join"].lines if line.speaker == "member"]
    return PREFACE + b"".join(encode_frame(frame, member) for frame in said), host, said


def test_sealed_frames_are_read_with_the_keys() -> None:
    data, host, said = sealed_stream()
    reader = FrameReader()
    reader.keys = host
    assert read_all(reader, data, 11) == said


@pytest.mark.parametrize("length", range(1, 17))
def test_a_sealed_frame_shorter_than_its_mac_is_refused(length: int) -> None:
    reader = FrameReader()
    reader.keys = keys()[1]
    with pytest.raises(Rejected, match="signature"):
        read_all(reader, PREFACE + length.to_bytes(4, "big") + bytes(length), 100)


def _outcome(reader: FrameReader) -> tuple[list[AnyFrame], str]:
    """The frames that are whole, and what comes after them: nothing, a part, or why the rest is rejected."""
    received = []
    try:
        while (frame := reader.next_frame()) is not None:
            received.append(frame)
    except Rejected as rejected:
        return received, rejected.reason.split()[0] if REASONS.fullmatch(rejected.reason) else "undocumented"
    return received, "waiting" if reader._buffer else "accepted"


def test_every_bit_flip_of_a_sealed_stream_is_noticed() -> None:
    data, _, said = sealed_stream()
    for bit in range(8 * len(PREFACE), 8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        reader = FrameReader()
        reader.keys = keys()[1]
        reader.feed(bytes(changed))
        received, end = _outcome(reader)
        # A length that grew waits for bytes that never come: the end of the connection leaves it unread.
        assert end in {"signature", "size", "waiting"}
        assert received == said[: len(received)] != said


def test_random_streams_are_rejected_or_valid_and_never_raise_anything_else() -> None:
    rng = random.Random(20260102)
    plain = [frame for data in STREAMS for frame in _cut(data)]
    outcomes: set[str] = set()
    for number in range(20_000):
        reader = FrameReader()
        if number % 4 == 3:
            reader.keys = keys()[1]
        data = bytearray(PREFACE + rng.choice(plain) + rng.choice(plain))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(4 if rng.random() < 0.1 else 8, len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            data[8:] = rng.randbytes(rng.randrange(40))
        if rng.random() < 0.05:
            data[: rng.randrange(8)] = b""
        chunk = rng.choice((3, 17, 400))
        end = "accepted"
        for start in range(0, len(data), chunk):
            reader.feed(bytes(data[start : start + chunk]))
            received, end = _outcome(reader)
            for frame in received:
                assert encode_frame(frame)
        assert not reader._buffer or end == "waiting"
        outcomes.add(end)
    assert outcomes == {"accepted", "waiting", "magic", "version", "size", "signature", "malformed"}


def _cut(data: bytes) -> list[bytes]:
    """The frames of a plain stream, each with its length."""
    found, at = [], len(PREFACE)
    while at < len(data):
        end = at + LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "big")
        found.append(data[at:end])
        at = end
    return found
