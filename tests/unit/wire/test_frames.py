"""The types of the frames: each survives the way through bytes, and what is out of bounds does not."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from mingle.protocol.session.roster import REMEMBERED_DEPARTURES, REMEMBERED_TEXT
from mingle.wire import frames
from mingle.wire.authentication import FRAME_MAC_BYTES
from mingle.wire.datagrams import MAX_ADDRESSES, MAX_WORLD_SIZE, Rejected, truncate_utf8
from mingle.wire.frame_codec import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, encode_frame
from mingle.wire.frames import AnyFrame
from tests.golden.examples import ADDRESSES, HOST_NONCE, MEMBER, MEMBER_NONCE, PORT, SESSION, STORIES
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
