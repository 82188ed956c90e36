"""The types of the frames: each survives the way through bytes, and what is out of bounds does not."""

from __future__ import annotations

import math
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


def from_fields(frame: AnyFrame, **other: Any) -> bytes:
    """A frame with other fields, as somebody else's code may make it."""
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(msgspec.msgpack.encode(frame)), **other})
    return len(body).to_bytes(4, "big") + body


def test_there_is_a_golden_frame_of_each_type() -> None:
    told = {type(line.frame) for story in STORIES.values() for line in story.lines}
    assert told | {frames.Hello, frames.Welcome, frames.Prove} == set(ALL_FRAMES)


@pytest.mark.parametrize("kind", ALL_FRAMES)
def test_round_trip_also_with_fields_that_are_not_known(kind: type[AnyFrame]) -> None:
    @settings(derandomize=True, database=None, max_examples=15, deadline=None)
    @given(messages(kind))
    def check(frame: AnyFrame) -> None:
        assert read(encode_frame(frame)) == frame
        assert read(from_fields(frame, colour=[{"deep": b"blue"}])) == frame

    check()


RANK = MAX_WORLD_SIZE - 1
LONGEST_ADDRESS = "ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255"


def longest_frames(letter: str) -> list[tuple[AnyFrame, int]]:
    """Return the longest frames whose texts consist of a letter, and how long they may be."""
    short, node = truncate_utf8(letter * 64), truncate_utf8(letter * 256, 256)
    who = frames.ProcessInfo(hostname=short, pid=2**32 - 1, address=short, rank=RANK)
    hello = frames.Hello(
        job=node,
        attempt=short,
        member=MEMBER,
        session_hash=SESSION,
        nonce=MEMBER_NONCE,
        purpose="conflict",
        who=who,
        proof=bytes(32),
    )
    welcome = frames.Welcome(
        session=SESSION,
        nonce=HOST_NONCE,
        addresses=(LONGEST_ADDRESS,) * MAX_ADDRESSES,
        port=65535,
        proof=bytes(32),
    )
    path = frames.Path(host_address=LONGEST_ADDRESS, local_address=LONGEST_ADDRESS, interface=short)
    join = frames.Join(
        world_size=MAX_WORLD_SIZE,
        node=node,
        who=who,
        versions={truncate_utf8(f"{number}{letter * 64}"): short for number in range(10, 26)},
        paths=(path,) * 64,
        addresses=(LONGEST_ADDRESS,) * 64,
    )
    seat = frames.Seat(
        rank=RANK,
        local_rank=RANK,
        node_rank=RANK,
        # Not cut by anybody: what members say of themselves is repeated as they said it.
        hostname=letter * 64,
        address=LONGEST_ADDRESS,
        pid=2**32 - 1,
    )
    lines = (letter * REMEMBERED_TEXT,) * REMEMBERED_DEPARTURES
    status = frames.Status(
        joined=MAX_WORLD_SIZE,
        world_size=MAX_WORLD_SIZE,
        missing=(RANK,) * 4096,
        departed=(RANK,) * 4096,
        left=lines,
        refused=lines,
        phase=short,
        unconfirmed=(RANK,) * 4096,
    )
    roster = frames.Roster(first=RANK, total=MAX_WORLD_SIZE, seats=(seat,) * frames.ROSTER_CHUNK)
    handshake, sealed = MAX_HANDSHAKE_BYTES // 2, MAX_FRAME_BYTES - FRAME_MAC_BYTES
    return [(hello, handshake), (welcome, handshake), (join, sealed), (roster, sealed), (status, sealed)]


@pytest.mark.parametrize("letter", ["x", "Ж", "作", "😀"])
def test_the_longest_frames_fit_into_their_limits(letter: str) -> None:
    for frame, limit in longest_frames(letter):
        encoded = encode_frame(frame)
        assert len(encoded) <= limit
        assert read(encoded) == frame


NAME = "node.example"
TARGET = {"member": MEMBER, "address": NAME, "port": PORT}
SEAT = {"rank": 0, "local_rank": 0, "node_rank": 0, "hostname": "n", "address": NAME, "pid": 1}
SEALED = next(line.frame for line in STORIES["join"].lines if isinstance(line.frame, frames.Sealed))
GO = frames.Go(session=SESSION, epoch=1)
CONFIRM = frames.Confirm(session=SESSION, epoch=1)
CONFIRMED = frames.Confirmed(session=SESSION, epoch=1, paths=())
RUNNING = frames.Running(state="sealed", world_size=1, host=frames.ProcessInfo(), store_address="192.0.2.1")
WELCOME = frames.Welcome(session=SESSION, nonce=HOST_NONCE, addresses=ADDRESSES, port=PORT)
ROSTER = frames.Roster(first=0, total=1, seats=())
COMMANDS = ("inet x y\n", "inet x y; reboot", "inet x `y`", "inet x $(y)", "inet -f y", "bridge x y", "inet x")
RULES = ("drop` fix: `reboot", "drop; reboot", "drop\n", "$(reboot)", 201 * "x")


@pytest.mark.parametrize(
    ("frame", "wrong"),
    [
        pytest.param(frames.Ping(), {"number": -1}, id="negative number"),
        pytest.param(GO, {"session": SESSION[1:]}, id="short session"),
        pytest.param(GO, {"epoch": 2**31}, id="large epoch"),
        pytest.param(frames.Prove(), {"proof": bytes(33)}, id="long proof"),
        pytest.param(frames.Ask(what="roster"), {"what": "secret"}, id="unknown question"),
        pytest.param(frames.Leave(session=SESSION), {"reason": "r" * 2049}, id="long text"),
        pytest.param(SEALED, {"store_address": "store.example"}, id="a store under a name"),
        pytest.param(SEALED, {"store_port": 0}, id="port 0"),
        *(
            pytest.param(RUNNING, {"seconds": seconds}, id=f"{seconds} seconds")
            for seconds in (math.inf, -math.inf, math.nan, 1e300, 2**63, -1.0)
        ),
        pytest.param(RUNNING, {"store_address": "$(reboot)"}, id="a running store under a name"),
        *(
            pytest.param(
                CONFIRMED,
                {"paths": [{"host_address": "192.0.2.1", "local_address": "192.0.2.2", "interface": "x", end: NAME}]},
                id=f"a path whose {end} is a name",
            )
            for end in ("host_address", "local_address")
        ),
        pytest.param(WELCOME, {"addresses": []}, id="no address"),
        pytest.param(CONFIRM, {"network": NAME}, id="a network of no address"),
        pytest.param(CONFIRM, {"targets": [TARGET]}, id="a target under a name"),
        pytest.param(CONFIRM, {"suspects": [TARGET]}, id="a suspect under a name"),
        pytest.param(
            CONFIRMED, {"blocked": {"address": NAME, "chain": "inet x y"}}, id="a firewall that blocks a name"
        ),
        # What the host shows of a firewall must not look like a command, nor end a line of one.
        *(
            pytest.param(
                CONFIRMED, {"blocked": {"address": "192.0.2.7", "chain": "inet x y", **named}}, id=str(named)[:40]
            )
            for named in (
                *({"chain": chain} for chain in (*COMMANDS, f"ip x {65 * 'y'}")),
                *({"rule": rule} for rule in RULES),
            )
        ),
        pytest.param(ROSTER, {"seats": [SEAT]}, id="a seat under a name"),
        pytest.param(ROSTER, {"seats": [{**SEAT, "address": "192.0.2.1"}] * 257}, id="too many seats"),
        pytest.param(frames.Status(joined=0, world_size=1), {"missing": list(range(4097))}, id="too many ranks"),
    ],
)
def test_frame_with_a_wrong_field_is_malformed(frame: AnyFrame, wrong: dict[str, Any]) -> None:
    assert read(from_fields(frame)) == frame
    with pytest.raises(Rejected, match="malformed"):
        read(from_fields(frame, **wrong))


def test_a_process_is_named_by_what_is_known_of_it() -> None:
    known = frames.ProcessInfo(hostname="node-3", pid=7, address="192.0.2.3", rank=0)
    assert str(known) == "rank 0 on host node-3 (192.0.2.3), pid 7"
    assert str(frames.ProcessInfo()) == "host unknown, pid 0"
