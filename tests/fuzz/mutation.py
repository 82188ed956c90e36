"""Makes hostile inputs of good ones: by bits and bytes, by MessagePack values, and by the order of frames."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from mingle.wire.datagrams import HEADER_BYTES
from mingle.wire.frame_codec import LENGTH_BYTES, PREFACE

_NUMBERS = (0, 1, -1, 2, 3, 255, 256, 65_535, 65_536, 999_999, 1_000_000, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63))
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    *(None, True, False, 1e300, float("inf"), float("nan"), [], {}, [[]], [None], {"type": "offer"}),
    *(
        "",
        "x",
        "x" * 64,
        "x" * 257,
        "\U0001f600" * 64,
        "0.0.0.0",
        "::",
        "fe80::1%eth0",
        "::ffff:1.2.3.4",
        "host.invalid",
    ),
    *("127.0.0.1\0", "127.0.0.1 ", "255.255.255.255", "224.0.0.1", "ff02::1", "::1", "4", "6", "../eth0", "\u202e"),
    *("open", "sealed", "running", "conflict", "probe", "roster", "agents", "offer", "go", "\0", "a\nb", "\x1b[2J"),
    *(b"", bytes(16), b"\xff" * 16, bytes(15), bytes(17), bytes(64), bytes(1200)),
)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one thing wrong: a bit, a byte, a cut, a gap, something put in, something twice."""
    if not data:
        return rng.randbytes(rng.randrange(16))
    at = rng.randrange(len(data))
    match rng.randrange(7):
        case 0:
            return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]
        case 1:
            return (
                data[:at]
                + bytes((rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xDB, 0xDD, 0xDF, 0xFF)),))
                + data[at + 1 :]
            )
        case 2:
            return data[:at]
        case 3:
            return data[:at] + data[at + 1 + rng.randrange(8) :]
        case 4:
            return data[:at] + rng.randbytes(1 + rng.randrange(8)) + data[at:]
        case 5:
            end = at + 1 + rng.randrange(32)
            return data[:end] + data[at:end] + data[end:]
        case _:
            return rng.randbytes(rng.randrange(1300))


def vary(body: bytes, rng: random.Random) -> bytes:
    """Return a MessagePack map with a value changed, so that most of what checks it is passed."""
    try:
        fields = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, ValueError):
        return damage(body, rng)
    where: Any = fields
    while isinstance(where, (dict, list)) and where:
        key = rng.choice(list(where)) if isinstance(where, dict) else rng.randrange(len(where))
        inner = where[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            where = inner
            continue
        match rng.randrange(4):
            case 0 if isinstance(inner, int):
                where[key] = max(_NUMBERS[-1], min(_NUMBERS[-2], inner + rng.choice((-1, 1))))  # what MessagePack holds
            case 1 if isinstance(where, dict):
                del where[key]
            case 2 if isinstance(inner, list):
                where[key] = inner * rng.choice((2, 13, 65))
            case _:
                where[key] = rng.choice(_VALUES)
        break
    return msgspec.msgpack.encode(fields)


def datagram(seed: bytes, rng: random.Random) -> bytes:
    """Return a datagram made of a good one."""
    if rng.random() < 0.5:
        return seed[:HEADER_BYTES] + vary(seed[HEADER_BYTES:], rng)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        seed = damage(seed, rng)
    return seed


def local_message(seed: bytes, rng: random.Random) -> bytes:
    """Return a message between processes of one machine made of a good one: a list of fields, a datagram the first."""
    if rng.random() < 0.3:
        data, *fields = msgspec.msgpack.decode(seed)
        return msgspec.msgpack.encode([datagram(data, rng), *fields])
    return vary(seed, rng) if rng.random() < 0.7 else damage(seed, rng)


def json_text(seed: bytes, rng: random.Random) -> bytes:
    """Return JSON made of good JSON: a value changed or nested deeply, or bytes that are wrong."""
    if rng.random() < 0.3:
        return damage(seed, rng)
    fields = msgspec.json.decode(seed)
    where = fields
    while isinstance(inner := where[key := rng.choice(list(where))], dict) and inner and rng.random() < 0.7:
        where = inner
    if rng.random() < 0.01:
        where[key] = "nested"
        depth = rng.choice((10, 2_000, 100_000))
        return json.dumps(fields).replace('"nested"', rng.choice(('{"a":', "[")) * depth).encode()
    where[key] = rng.choice([each for each in _VALUES if not isinstance(each, bytes)])
    return json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def bodies(stream: bytes) -> list[bytes]:
    """Cuts a good stream, with its preface or without, into the frames' bodies."""
    rest, found = stream.removeprefix(PREFACE), []
    while rest:
        length = int.from_bytes(rest[:LENGTH_BYTES], "big")
        found.append(rest[LENGTH_BYTES : LENGTH_BYTES + length])
        rest = rest[LENGTH_BYTES + length :]
    return found


def stream(seeds: list[bytes], rng: random.Random) -> bytes:
    """Return a stream made of good frames: some changed, left out, repeated or moved, the lengths mostly right."""
    frames = list(seeds)
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(frames))
        match rng.randrange(4):
            case 0 if len(frames) > 1:
                del frames[at]
            case 1:
                frames.insert(rng.randrange(len(frames)), frames[at])
            case _:
                frames[at] = vary(frames[at], rng) if rng.random() < 0.7 else damage(frames[at], rng)
    whole = PREFACE + b"".join(len(body).to_bytes(LENGTH_BYTES, "big") + body for body in frames)
    return damage(whole, rng) if rng.random() < 0.2 else whole
