from __future__ import annotations

import hashlib
import ipaddress
import random
import re
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import (
    BROWSE_GROUP,
    FLAG_REPEATED,
    HEADER_BYTES,
    MAJOR_VERSION,
    MAX_ADDRESSES,
    MAX_BYTES,
    MAX_WORLD_SIZE,
    Datagram,
    Group,
    List,
    Offer,
    Rejected,
    Seek,
    as_repeated,
    decode,
    encode,
    is_repeated,
    is_signed,
    job_group,
    padded,
    truncate_utf8,
    with_first,
)
from tests import golden
from tests.fuzz.targets import TARGETS
from tests.golden.examples import ADDRESSES, DATAGRAMS, HOST, JOB, KEY, MEMBER, PORT, SECRET, SESSION
from tests.support.wire_strategies import messages

REASONS = re.compile(r"size|magic|version \d{1,3}|unsigned|signature|malformed")
GOLDEN = [(name, signed) for name in DATAGRAMS for signed in (False, True)]
SEEK = Seek(job=JOB, member=MEMBER, world_size=4)
OFFER = Offer(job=JOB, session=SESSION, host=HOST, addresses=ADDRESSES, port=PORT, world_size=4)
KINDS = typing.get_args(Datagram)


def golden_bytes(name: str, *, signed: bool) -> bytes:
    return golden.data(f"{name} signed" if signed else name)


def reason(untrusted: bytes, key: JobKey | None = None) -> str:
    """Why the bytes are rejected; fails when they are not, or when the reason is not a documented one."""
    with pytest.raises(Rejected) as rejected:
        decode(untrusted, key)
    assert REASONS.fullmatch(rejected.value.reason)
    return rejected.value.reason


def from_fields(message: Datagram, *, minor: int = 0, **other: Any) -> bytes:
    """A message with other fields, as somebody else's code may make it."""
    fields = {**msgspec.msgpack.decode(msgspec.msgpack.encode(message)), **other}
    return b"MNGL" + bytes((MAJOR_VERSION, minor, 0, 0)) + msgspec.msgpack.encode(fields)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# --- golden packets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "signed"), GOLDEN)
def test_golden_packet_is_what_we_send_and_understand(name: str, signed: bool) -> None:
    data, message = golden_bytes(name, signed=signed), DATAGRAMS[name][1]
    assert encode(message, KEY if signed else None) == data
    assert decode(data, KEY if signed else None) == message
    assert decode(data) == message, "a process without the secret learns what it lacks"


def test_there_is_a_golden_packet_of_each_type() -> None:
    assert {type(message) for _, message in DATAGRAMS.values()} == {*KINDS}


# --- what is rejected ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "signed"), GOLDEN)
def test_every_truncation_is_rejected(name: str, signed: bool) -> None:
    data = golden_bytes(name, signed=signed)
    for key in (None, KEY) if signed else (None,):
        assert {reason(data[:length], key) for length in range(len(data))} <= {"size", "signature", "malformed"}


@pytest.mark.parametrize("name", DATAGRAMS)
def test_every_bit_flip_of_a_signed_packet_is_rejected(name: str) -> None:
    data = golden_bytes(name, signed=True)
    # The mark of a repeater, who has no key, is the one bit that the MAC does not cover.
    uncovered = 6 * 8 + FLAG_REPEATED.bit_length() - 1
    for bit in set(range(8 * len(data))) - {uncovered}:
        reason(flipped(data, bit), KEY)
    assert decode(flipped(data, uncovered), KEY) == DATAGRAMS[name][1]


def test_packet_of_another_secret_or_job_is_rejected() -> None:
    data = encode(SEEK, KEY)
    assert reason(data, JobKey(b"another", JOB)) == "signature"
    assert reason(data, JobKey(SECRET, "another")) == "signature"
    assert reason(encode(SEEK), KEY) == "unsigned"


@pytest.mark.parametrize("target", ["plain-datagram", "signed-datagram", "echo", "frames"])
def test_damaged_messages_are_rejected_or_valid(target: str) -> None:
    """A few thousand of those that the fuzzer makes."""
    rng, make = random.Random(20260101), TARGETS[target].maker()
    for _ in range(5_000):
        TARGETS[target].check(make(rng))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 2**32 - 1 entries"),
        pytest.param(b"\x82\xa4type\xa4seek\xa3job\xdb\xff\xff\xff\xff", id="text of 4 GiB"),
        pytest.param(b"\x82\xa4type\xa5offer\xa9addresses\xdd\xff\xff\xff\xff", id="4 billion addresses"),
        pytest.param(b"\x82\xa4type\xa4seek\xa1x" + b"\x91" * 1100, id="deep lists in an unknown field"),
        pytest.param(b"\x82\xa4type\xa4seek\xa1x" + b"\x81" * 1100, id="deep maps in an unknown field"),
        pytest.param(b"\x91" * 1100, id="deep lists"),
        pytest.param(b"\x81\xa4type\xa4\xff\xfe\xff\xfe", id="a type that is not UTF-8"),
        pytest.param(b"\x82\xa4type\xa3bye\xa3job\xa2\xff\xfe", id="a job that is not UTF-8"),
        pytest.param(b"\x82\xa4type\xa3bye\xa3job\xa3\xed\xa0\x80", id="a lone surrogate"),
        pytest.param(b"\xc1", id="the byte that MessagePack never uses"),
        pytest.param(b"\x80", id="an empty map"),
        pytest.param(encode(SEEK)[HEADER_BYTES:] + b"\0", id="bytes after the message"),
    ],
)
def test_hostile_bodies_are_malformed(body: bytes) -> None:
    assert reason(b"MNGL\x01\x00\x00\x00" + body) == "malformed"


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        pytest.param(SEEK, {"job": ""}, id="empty job"),
        pytest.param(SEEK, {"job": "Ж" * 129}, id="258 bytes of job in 129 characters"),
        pytest.param(SEEK, {"type": "shout"}, id="unknown type"),
        pytest.param(SEEK, {"member": b"short"}, id="short id"),
        pytest.param(SEEK, {"world_size": 0}, id="no ranks"),
        pytest.param(SEEK, {"world_size": MAX_WORLD_SIZE + 1}, id="too many ranks"),
        pytest.param(SEEK, {"rank": -1}, id="negative rank"),
        pytest.param(SEEK, {"rank": MAX_WORLD_SIZE}, id="rank too large"),
        pytest.param(SEEK, {"hostname": "h" * 65}, id="long host name"),
        pytest.param(SEEK, {"pid": 2**32}, id="large pid"),
        pytest.param(SEEK, {"kind": "people"}, id="unknown kind"),
        pytest.param(OFFER, {"port": 0}, id="port 0"),
        pytest.param(OFFER, {"port": 65536}, id="large port"),
        pytest.param(OFFER, {"addresses": []}, id="no address"),
        pytest.param(OFFER, {"addresses": ["192.0.2.1"] * (MAX_ADDRESSES + 1)}, id="too many addresses"),
        pytest.param(OFFER, {"addresses": ["node-1.example"]}, id="a name to be resolved"),
        pytest.param(OFFER, {"addresses": ["beef"]}, id="a name in hexadecimal letters"),
        pytest.param(OFFER, {"addresses": ["192.0.2.256"]}, id="no octet"),
        pytest.param(OFFER, {"addresses": ["192.0.2"]}, id="three octets"),
        pytest.param(OFFER, {"addresses": ["fe80::1%eth0"]}, id="somebody else's zone"),
        pytest.param(OFFER, {"addresses": ["2001:db8:::1"]}, id="no IPv6 address"),
    ],
)
def test_a_field_out_of_bounds_is_malformed(message: Datagram, wrong: dict[str, Any]) -> None:
    assert decode(from_fields(message)) == message
    assert reason(from_fields(message, **wrong)) == "malformed"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"", "size", id="nothing"),
        pytest.param(b"MNGL\x01\x00\x00\x00", "size", id="no body"),
        pytest.param(b"MNGL\x01\x00\x00\x00" + bytes(MAX_BYTES), "size", id="too long"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", "magic", id="another protocol"),
        pytest.param(b"MNGL\x00\x00\x00\x00\x80", "version 0", id="major 0"),
        pytest.param(b"MNGL\x02\x00\x00\x00\x80", "version 2", id="the next major"),
        pytest.param(b"MNGL\xff\x00\x00\x00\x80", "version 255", id="the last major"),
    ],
)
def test_rejection_is_named(data: bytes, expected: str) -> None:
    assert reason(data) == expected
    assert reason(data, KEY) == expected
    assert datagrams.is_datagram(data) == expected.startswith("version")


# --- what is accepted ---------------------------------------------------------------------------------------


def test_what_a_later_version_adds_is_ignored() -> None:
    data = bytearray(from_fields(SEEK, minor=255, colour={"deep": [1, {"x": b"y"}]}))
    data[6] |= 0xFC  # unknown flags
    data[7] = 0xFF  # the reserved byte
    assert decode(bytes(data)) == SEEK


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: type[Datagram]) -> None:
    @settings(derandomize=True, database=None, max_examples=60, deadline=None)
    @given(messages(kind))
    def check(message: Datagram) -> None:
        for key in (None, JobKey(b"secret", message.job)):
            data = encode(message, key)
            assert len(data) <= MAX_BYTES
            assert is_signed(data) == (key is not None)
            assert decode(data, key) == message

    check()


@pytest.mark.parametrize("letter", ["j", "Ж", "作", "😀"])
def test_everything_maximal_fits_into_one_datagram(letter: str) -> None:
    """What a maker cuts with truncate_utf8() never makes a datagram too long, whatever the script."""
    job, short = truncate_utf8(letter * 256, 256), truncate_utf8(letter * 256)
    longest = "ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255"
    offer = Offer(
        job=job,
        attempt=short,
        session=SESSION,
        host=HOST,
        addresses=(longest,) * MAX_ADDRESSES,
        port=65535,
        world_size=MAX_WORLD_SIZE,
        joined=MAX_WORLD_SIZE,
        state="sealed",
        kind="agents",
        assigned=True,
        hostname=short,
        pid=2**32 - 1,
        quorum=True,
    )
    key = JobKey(b"secret", job)
    data = encode(offer, key)
    assert MAX_BYTES - 32 < len(data) <= MAX_BYTES
    assert decode(data, key) == offer


def test_too_long_a_datagram_is_never_sent() -> None:
    with pytest.raises(ValueError, match="longer than 1200"):
        encode(Seek(job="j" * 1200, member=MEMBER, world_size=1))


# --- truncate_utf8, padding, repetition ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("node-1", "node-1", id="short"),
        pytest.param("n" * 65, "n" * 64, id="long"),
        pytest.param("Ж" * 40, "Ж" * 32, id="two bytes each"),
        pytest.param("n" + "作" * 40, "n" + "作" * 21, id="no half character"),
        pytest.param("\udcff", "?", id="lone surrogate"),
    ],
)
def test_clip(text: str, expected: str) -> None:
    assert truncate_utf8(text) == expected


def test_offer_names_first_where_it_was_reached_and_keeps_the_order_of_the_others() -> None:
    offer = msgspec.structs.replace(OFFER, addresses=(*ADDRESSES, "192.0.2.12"))
    toward = with_first(offer, ["192.0.2.12", "192.0.2.99"])
    assert isinstance(toward, Offer)
    assert toward.addresses == ("192.0.2.12", *ADDRESSES)
    assert with_first(SEEK, ADDRESSES) is SEEK


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("message", [SEEK, List(member=MEMBER)])
def test_padding_fills_a_question_up_to_a_length(message: Seek | List, key: JobKey | None) -> None:
    bare = len(encode(message, key))
    for length in range(MAX_BYTES + 1):
        data = padded(message, length, key)
        if length < bare + 12:
            assert len(data) <= max(bare, length)
        else:
            # One byte may be missing where MessagePack has no header of the size that would be needed.
            assert length - 1 <= len(data) <= length
    assert msgspec.structs.replace(decode(data, key), padding=b"") == message


@pytest.mark.parametrize("key", [None, KEY])
def test_repetition_is_marked_without_the_key_and_read_with_it(key: JobKey | None) -> None:
    data = encode(OFFER, key)
    repeated = as_repeated(data)
    assert (is_repeated(data), is_repeated(repeated)) == (False, True)
    assert as_repeated(repeated) == repeated
    assert decode(repeated, key) == OFFER
    assert len(repeated) == len(data)
    assert not is_repeated(repeated[: HEADER_BYTES - 1])
    assert not is_signed(repeated[: HEADER_BYTES - 1])


# --- multicast groups -------------------------------------------------------------------------------------------------


def test_the_addresses_of_a_job_never_change() -> None:
    # A change of the hash would silently part old versions from new ones.
    assert job_group("resnet") == Group("239.192.180.44", "ff12::b195:745f", "ff15::b195:745f")
    assert Group("239.195.254.255", "ff12::8000:0", "ff15::8000:0") == BROWSE_GROUP


@pytest.mark.parametrize("digest", [b"\x00" * 32, b"\xff" * 32])
def test_the_ends_of_the_hash_are_in_the_ranges_of_the_standards(
    monkeypatch: pytest.MonkeyPatch, digest: bytes
) -> None:
    class Fixed:
        def __init__(self, _: bytes) -> None: ...

        def digest(self) -> bytes:
            return digest

    monkeypatch.setattr(hashlib, "sha256", Fixed)
    group = job_group("resnet")
    ipv4 = ipaddress.IPv4Address(group.ipv4)
    assert ipv4 in ipaddress.IPv4Network("239.192.0.0/14")
    assert ipv4 not in ipaddress.IPv4Network("239.195.255.0/24")  # RFC 2365: scope-relative
    link, site = ipaddress.IPv6Address(group.ipv6_link), ipaddress.IPv6Address(group.ipv6_site)
    assert link in ipaddress.IPv6Network("ff12::/96")
    assert site in ipaddress.IPv6Network("ff15::/96")
    assert int(link) & 0xFFFF_FFFF == int(site) & 0xFFFF_FFFF >= 0x8000_0000  # RFC 3307: dynamic
    assert {group.ipv4, group.ipv6_link, group.ipv6_site}.isdisjoint(msgspec.structs.astuple(BROWSE_GROUP))


def test_a_hop_limit_above_one_needs_the_site_scope() -> None:
    group = job_group("resnet")
    assert group.ipv6(1) == group.ipv6_link
    assert group.ipv6(2) == group.ipv6_site
