"""The types of the frames: each survives the way through bytes, and what is out of bounds does not."""

from __future__ import annotations

import random
import re
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings

from mingle.protocol.session.roster import REMEMBERED_DEPARTURES, REMEMBERED_TEXT
from mingle.wire import frames
from mingle.wire.authentication import FRAME_MAC_BYTES, FrameKeys
from mingle.wire.datagrams import MAX_ADDRESSES, MAX_WORLD_SIZE, Rejected, truncate_utf8
from mingle.wire.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    PREFACE,
    AnyFrame,
    FrameReader,
    encode_frame,
)
from tests.golden.examples import (
    ADDRESSES,
    HOST_NONCE,
    KEY,
    MEMBER,
    MEMBER_NONCE,
    PORT,
    SESSION,
    STORIES,
    Spoken,
    speak,
)
from tests.support.frames import read
from tests.support.wire_strategies import messages

ALL_FRAMES: tuple[type[AnyFrame], ...] = typing.get_args(AnyFrame)


def from_fields(fields: dict[str, Any]) -> bytes:
    """A frame with any body, as somebody else's code may make it."""
    body = msgspec.msgpack.encode(fields)
    return len(body).to_bytes(4, "big") + body


def test_there_is_a_golden_frame_of_each_type() -> None:
    told = {type(line.frame) for story in STORIES.values() for line in story.lines}
    assert told | {frames.Hello, frames.Welcome, frames.Prove} == set(ALL_FRAMES)


@pytest.mark.parametrize("kind", ALL_FRAMES)
def test_round_trip(kind: type[AnyFrame]) -> None:
    @settings(derandomize=True, database=None, max_examples=15, deadline=None)
    @given(messages(kind))
    def check(frame: AnyFrame) -> None:
        assert read(encode_frame(frame)) == frame

    check()


@pytest.mark.parametrize("kind", ALL_FRAMES)
def test_unknown_fields_are_ignored(kind: type[AnyFrame]) -> None:
    @settings(derandomize=True, database=None, max_examples=5, deadline=None)
    @given(messages(kind))
    def check(frame: AnyFrame) -> None:
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
        assert read(from_fields({**fields, "colour": [{"deep": b"blue"}]})) == frame

    check()


LETTERS = pytest.mark.parametrize("letter", ["x", "Ж", "作", "😀"])


def who(letter: str) -> frames.ProcessInfo:
    return frames.ProcessInfo(
        hostname=truncate_utf8(letter * 64), pid=2**32 - 1, address=truncate_utf8(letter * 64), rank=MAX_WORLD_SIZE - 1
    )


@LETTERS
def test_the_longest_frames_of_a_handshake_fit_its_limit(letter: str) -> None:
    hello = frames.Hello(
        job=truncate_utf8(letter * 256, 256),
        attempt=truncate_utf8(letter * 64),
        member=MEMBER,
        session_hash=SESSION,
        nonce=MEMBER_NONCE,
        purpose="conflict",
        who=who(letter),
        proof=bytes(32),
    )
    welcome = frames.Welcome(
        session=SESSION,
        nonce=HOST_NONCE,
        addresses=("ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255",) * MAX_ADDRESSES,
        port=65535,
        proof=bytes(32),
    )
    for frame in (hello, welcome):
        assert len(encode_frame(frame)) < MAX_HANDSHAKE_BYTES // 2


@LETTERS
def test_a_full_part_of_a_roster_fits_into_a_frame(letter: str) -> None:
    seat = frames.Seat(
        rank=MAX_WORLD_SIZE - 1,
        local_rank=MAX_WORLD_SIZE - 1,
        node_rank=MAX_WORLD_SIZE - 1,
        # Not cut by anybody: what members say of themselves is repeated as they said it.
        hostname=letter * 64,
        address="ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255",
        pid=2**32 - 1,
    )
    seats = (seat,) * frames.ROSTER_CHUNK
    roster = frames.Roster(first=MAX_WORLD_SIZE - 1, total=MAX_WORLD_SIZE, seats=seats)
    assert len(encode_frame(roster)) + FRAME_MAC_BYTES <= MAX_FRAME_BYTES
    assert read(encode_frame(roster)) == roster


@LETTERS
def test_the_fullest_status_fits_into_a_frame(letter: str) -> None:
    ranks = (MAX_WORLD_SIZE - 1,) * 4096
    lines = (letter * REMEMBERED_TEXT,) * REMEMBERED_DEPARTURES
    status = frames.Status(
        joined=MAX_WORLD_SIZE,
        world_size=MAX_WORLD_SIZE,
        missing=ranks,
        departed=ranks,
        left=lines,
        refused=lines,
        phase=truncate_utf8(letter * 64),
        unconfirmed=ranks,
    )
    assert len(encode_frame(status)) + FRAME_MAC_BYTES <= MAX_FRAME_BYTES
    assert read(encode_frame(status)) == status


@LETTERS
def test_the_longest_application_fits_into_a_frame(letter: str) -> None:
    path = frames.Path(
        host_address="ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255",
        local_address="ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255",
        interface=truncate_utf8(letter * 64),
    )
    versions = {truncate_utf8(f"{number}{letter * 64}"): truncate_utf8(letter * 64) for number in range(10, 26)}
    join = frames.Join(
        world_size=MAX_WORLD_SIZE,
        node=truncate_utf8(letter * 256, 256),
        who=who(letter),
        versions=versions,
        paths=(path,) * 64,
        addresses=(path.local_address,) * 64,
    )
    assert len(encode_frame(join)) + FRAME_MAC_BYTES <= MAX_FRAME_BYTES
    assert read(encode_frame(join)) == join


NAME = "node.example"
TARGET = {"member": MEMBER, "address": NAME, "port": PORT}
SEALED = next(line.frame for line in STORIES["join"].lines if isinstance(line.frame, frames.Sealed))


@pytest.mark.parametrize(
    ("frame", "wrong"),
    [
        pytest.param(frames.Ping(), {"number": -1}, id="negative number"),
        pytest.param(frames.Go(session=SESSION, epoch=1), {"session": SESSION[1:]}, id="short session"),
        pytest.param(frames.Go(session=SESSION, epoch=1), {"epoch": 2**31}, id="large epoch"),
        pytest.param(frames.Prove(), {"proof": bytes(33)}, id="long proof"),
        pytest.param(frames.Ask(what="roster"), {"what": "secret"}, id="unknown question"),
        pytest.param(frames.Leave(session=SESSION), {"reason": "r" * 2049}, id="long text"),
        pytest.param(SEALED, {"store_address": "store.example"}, id="a store under a name"),
        pytest.param(SEALED, {"store_port": 0}, id="port 0"),
        pytest.param(
            frames.Running(state="open", world_size=1, host=frames.ProcessInfo()),
            {"seconds": float("nan")},
            id="a time that is no number",
        ),
        pytest.param(
            frames.Running(state="sealed", world_size=1, host=frames.ProcessInfo(), store_address="192.0.2.1"),
            {"store_address": "$(reboot)"},
            id="a running store under a name",
        ),
        pytest.param(
            frames.Confirmed(session=SESSION, epoch=1, paths=()),
            {"paths": [{"host_address": "192.0.2.1", "local_address": "eth0", "interface": "eth0"}]},
            id="a way from no address",
        ),
        pytest.param(
            frames.Confirmed(session=SESSION, epoch=1, paths=()),
            {"paths": [{"host_address": "node.example", "local_address": "192.0.2.1", "interface": "eth0"}]},
            id="a way to no address",
        ),
        pytest.param(
            frames.Welcome(session=SESSION, nonce=HOST_NONCE, addresses=ADDRESSES, port=PORT),
            {"addresses": []},
            id="no address",
        ),
        pytest.param(frames.Confirm(session=SESSION, epoch=1), {"network": NAME}, id="a network of no address"),
        pytest.param(frames.Confirm(session=SESSION, epoch=1), {"targets": [TARGET]}, id="a target under a name"),
        pytest.param(frames.Confirm(session=SESSION, epoch=1), {"suspects": [TARGET]}, id="a suspect under a name"),
        pytest.param(
            frames.Confirmed(session=SESSION, epoch=1, paths=()),
            {"blocked": {"address": NAME, "chain": "inet x y"}},
            id="a firewall that blocks a name",
        ),
        pytest.param(
            frames.Roster(first=0, total=1, seats=()),
            {"seats": [{"rank": 0, "local_rank": 0, "node_rank": 0, "hostname": "n", "address": NAME, "pid": 1}]},
            id="a seat under a name",
        ),
        pytest.param(frames.Roster(first=0, total=1, seats=()), {"seats": [{}] * 257}, id="too many seats"),
        pytest.param(frames.Status(joined=0, world_size=1), {"missing": list(range(4097))}, id="too many ranks"),
    ],
)
def test_frame_with_a_wrong_field_is_malformed(frame: AnyFrame, wrong: dict[str, Any]) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
    assert read(from_fields(fields)) == frame
    with pytest.raises(Rejected, match="malformed"):
        read(from_fields({**fields, **wrong}))


@pytest.mark.parametrize(
    ("named", "text"),
    [
        pytest.param(frames.ProcessInfo(), "host unknown, pid 0", id="nothing known"),
        pytest.param(
            frames.ProcessInfo(hostname="node-3", pid=7, address="192.0.2.3", rank=3),
            "rank 3 on host node-3 (192.0.2.3), pid 7",
            id="all known",
        ),
        pytest.param(frames.ProcessInfo(hostname="node-0", pid=7, rank=0), "rank 0 on host node-0, pid 7", id="rank 0"),
    ],
)
def test_a_process_is_named_as_errors_name_it(named: frames.ProcessInfo, text: str) -> None:
    assert str(named) == text


# --- bytes ------------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from mingle.wire.frames import AnyFrame

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
            PREFACE + len(PING).to_bytes(4, "big") + PING[4:] + bytes(4),
            "malformed",
            id="bytes after the map",
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
        read_all(FrameReader(), PREFACE + frames.encode_frame(frame), MAX_FRAME_BYTES)


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
    assert len(frames.encode_body(bytes(longest), keys()[0] if sealed else None)) == LENGTH_BYTES + MAX_FRAME_BYTES
    with pytest.raises(ValueError, match=f"longer than {MAX_FRAME_BYTES}"):
        frames.encode_body(bytes(longest + 1), sender)
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
