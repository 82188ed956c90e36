"""``docs/protocol.md`` says what the code does: packets, fields, constants, groups and states are compared.

The MACs are computed here once more from the document's words alone, as another implementation would.
``UPDATE_DOCS=1 python -m pytest tests/docs/test_protocol_document.py`` draws the diagrams of the states anew.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import ipaddress
import re
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingle.protocol import host, member, participant
from mingle.protocol.machine import roster_digest
from mingle.protocol.session import phases
from mingle.protocol.states import Transitions
from mingle.wire import datagrams, frame_codec, frames
from tests import golden
from tests.golden.examples import ADDRESSES, HOST_NONCE, JOB, MEMBER_NONCE, PORT, SECRET, SESSION, render
from tests.support.documents import UPDATE, named, rewrite

TEXT = golden.DOCUMENT.read_text(encoding="utf-8")
EXAMPLES = settings(derandomize=True, database=None, deadline=None)


def section(title: str) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", TEXT, re.MULTILINE)
    assert found, title
    rest = TEXT[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    bodies = [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if "|---" not in line + after]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in bodies]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# --- packets ------------------------------------------------------------------------------------------------


def test_the_names_of_all_golden_packets_are_described() -> None:
    described = {name.split("/")[0] for cells in rows(section("Golden packets")) for name in quoted(cells[0])}
    assert {name.split("/")[0].removesuffix(" signed") for name in golden.load()} == described - {
        " signed",
        "join signed",
    }


def test_golden_packets_are_those_of_the_examples() -> None:
    assert golden.load() == render()


def test_packet_taken_apart_is_the_golden_seek() -> None:
    (block,) = re.findall(r"```text\n(4d4e474c .*?)```", TEXT, re.DOTALL)
    written = "".join(re.split(r"\s{3,}", line.strip())[0] for line in block.splitlines())
    whole = "".join(written.split()).replace("1011…1f", bytes(range(0x10, 0x20)).hex())
    assert whole == golden.load()["seek"]["hex"]


def length(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big")


def mac(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(key, length(purpose) + purpose + length(data) + data, "sha256")


def job_key() -> bytes:
    stretched = hashlib.scrypt(SECRET, salt=b"mingle secret v1", n=16_384, r=8, p=1, maxmem=64 * 1024 * 1024, dklen=32)
    extracted = hmac.digest(b"mingle job key v1", stretched, "sha256")
    return hmac.digest(extracted, JOB.encode() + b"\x01", "sha256")


@pytest.mark.parametrize("name", ["seek", "offer", "bye", "list"])
def test_datagram_mac_by_the_document(name: str) -> None:
    data = golden.data(f"{name} signed")
    assert data[-32:] == mac(job_key(), b"datagram", data[:-32])


def test_handshake_and_frame_macs_by_the_document() -> None:
    hello, welcome, prove, join, joined, ping, pong = (
        golden.data(f"join signed/{name}") for name in ("hello", "welcome", "prove", "join", "joined", "ping", "pong")
    )
    parts = [hello[:8], hello[12:], welcome[:8], HOST_NONCE, SESSION, str(PORT).encode()]
    parts += [address.encode() for address in ADDRESSES]
    transcript = b"".join(length(part) + part for part in parts)
    assert msgspec.msgpack.decode(welcome[12:])["proof"] == mac(job_key(), b"host proof", transcript)
    assert msgspec.msgpack.decode(prove[4:])["proof"] == mac(job_key(), b"member proof", transcript)
    said = msgspec.msgpack.decode(hello[12:])
    known = [b"mingle session", SESSION, MEMBER_NONCE]
    assert said["nonce"] == MEMBER_NONCE
    assert said["session_hash"] == hashlib.sha256(b"".join(length(part) + part for part in known)).digest()[:16]
    assert said["proof"] == mac(job_key(), b"hello", b"".join(length(part) + part for part in known[1:]))
    to_host = mac(job_key(), b"frames to host", transcript)
    to_member = mac(job_key(), b"frames to member", transcript)
    for key, number, frame in ((to_host, 0, join), (to_member, 0, joined), (to_member, 1, ping), (to_host, 1, pong)):
        body = frame[4:-16]
        assert length(frame[4:]) == frame[:4]
        assert frame[-16:] == hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")[:16]


def test_roster_digest_by_the_document() -> None:
    names = re.search(r"in order of rank: (.*?)\)", section("Frame types"))
    assert names
    seats = [{name: {"hostname": "h", "address": "192.0.2.1"}.get(name, 0) for name in quoted(names[1])}]
    seats.append({**seats[0], "rank": 1, "program_port": 20123})
    digest = hashlib.sha256(msgspec.msgpack.encode(seats)).digest()
    assert roster_digest([msgspec.convert(seat, frames.Seat) for seat in seats]) == digest


# --- fields -------------------------------------------------------------------------------------------------


FRAMES: tuple[type[frames.AnyFrame], ...] = typing.get_args(frames.AnyFrame)


def tag_of(kind: type[frames.AnyFrame]) -> str:
    return str(kind.__struct_config__.tag)


def fields_of(kind: Any) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def test_all_datagrams_and_their_fields_are_described() -> None:
    for kind in typing.get_args(datagrams.Datagram):
        named = [name for cells in rows(section(kind.__name__.upper())) for name in quoted(cells[0])]
        assert sorted(named) == sorted(fields_of(kind)), kind


def test_all_frames_and_their_fields_are_described() -> None:
    table = section("Frame types").partition("A REFUSED's reason")[0]
    described = {quoted(cells[0])[0]: cells for cells in rows(table)}
    kinds = {tag_of(kind): kind for kind in FRAMES}
    assert described.keys() == kinds.keys()
    for tag, kind in kinds.items():
        speaker = {"Member to host": "member", "Host to": "host", "Either side": "either"}
        assert kind.__doc__
        assert [described[tag][1]] == [who for start, who in speaker.items() if kind.__doc__.startswith(start)]
        named = set(quoted(described[tag][2]))
        assert set(fields_of(kind)) <= named, tag


def test_types_of_who_and_path_are_described() -> None:
    introduction = section("Frame types").partition("The handshake:")[0]
    for kind in (frames.ProcessInfo, frames.Path, frames.Place, frames.Seat):
        where = section("Frame types") if kind is frames.Seat else introduction
        assert set(fields_of(kind)) <= set(quoted(where))


def test_all_purposes_kinds_and_states_are_described() -> None:
    for alias in (frames.Purpose, datagrams.Kind, datagrams.State):
        assert set(typing.get_args(alias)) <= set(quoted(TEXT))


def test_all_refusals_are_described() -> None:
    table = section("Frame types").partition("A REFUSED's reason")[2]
    assert {name for cells in rows(table) for name in quoted(cells[0])} == set(typing.get_args(frames.RefusalReason))


def test_all_rejections_are_described() -> None:
    described = [quoted(cells[0])[0] for cells in rows(section("Rejection"))]
    assert datagrams.decode.__doc__
    documented = re.findall(r"``([^`]+)``", datagrams.decode.__doc__.partition("reason is one of")[2])
    assert described == documented


# --- constants ----------------------------------------------------------------------------------------------

CONSTANTS = {
    quoted(cells[0])[0]: cells[1]
    for title in ("Timers and limits", "Shared directories")
    for cells in rows(section(title))
    if quoted(cells[0])
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_has_the_documented_value(name: str) -> None:
    module, _, constant = name.rpartition(".")
    value = getattr(importlib.import_module(f"mingle.{module}"), constant)
    documented = tuple(float(number) for number in CONSTANTS[name].split(","))
    assert documented == (value if isinstance(value, tuple) else (value,))


def test_sizes_in_the_text_are_those_of_the_code() -> None:
    assert f"{datagrams.MAX_BYTES} bytes, so it is never fragmented" in TEXT
    assert f"1 to {frame_codec.MAX_FRAME_BYTES:,}".replace(",", " ") in TEXT
    assert f"at most {frame_codec.MAX_HANDSHAKE_BYTES} until the handshake is over" in TEXT
    assert f"(`{frame_codec.PREFACE.hex(' ', -4)}`)" in TEXT


# --- groups -------------------------------------------------------------------------------------------------


def test_groups_in_the_table() -> None:
    for name, *addresses in rows(section("Groups and ports")):
        group = datagrams.BROWSE_GROUP if name == "browse group" else datagrams.job_group(quoted(name)[0])
        assert addresses == [group.ipv4, group.ipv6_link, group.ipv6_site]


@EXAMPLES
@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_groups_by_the_document(job: str) -> None:
    digest = hashlib.sha256(b"mingle multicast group 1\0" + job.encode()).digest()
    ipv4 = ipaddress.ip_address("239.192.0.0") + int.from_bytes(digest[:16], "big") % 261_887
    ipv6 = 0x8000_0001 + int.from_bytes(digest[16:], "big") % (2**31 - 1)
    group = datagrams.job_group(job)
    assert group.ipv4 == str(ipv4)
    assert group.ipv6_link == str(ipaddress.ip_address("ff12::") + ipv6)
    assert group.ipv6_site == str(ipaddress.ip_address("ff15::") + ipv6)


# --- diagrams ---------------------------------------------------------------------------------------------


MACHINES: dict[str, Transitions] = {
    "member": member.TRANSITIONS,
    "participant": participant.TRANSITIONS,
    "host": host.TRANSITIONS,
    "registrar": phases.TRANSITIONS,
}
"""The tables of transitions, by the name of the block that shows each of them."""


def diagram(table: Transitions) -> str:
    """Draw a table of transitions."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table)).__name__}"]
    for state, events in table.items():
        for following in dict.fromkeys(events.values()):
            causes = " / ".join(event for event, leads_to in events.items() if leads_to is following)
            lines.append(f"    {state.__name__} --> {following.__name__}: {causes}")
        if not events:
            lines.append(f"    {state.__name__} --> [*]")
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("name", MACHINES)
def test_diagram_is_the_table_of_transitions(name: str) -> None:
    block, drawn = named(golden.DOCUMENT, name), diagram(MACHINES[name])
    if UPDATE:
        rewrite(block, drawn)
        return
    assert block.text == drawn


def test_sequence_says_every_frame_of_joining_and_asking() -> None:
    (diagram,) = re.findall(r"```mermaid\nsequenceDiagram\n(.*?)```", TEXT, re.DOTALL)
    elsewhere = {
        *("running", "ping", "pong", "void", "host-seen", "unreachable", "members"),
        *("next", "begin", "wanted", "done", "round", "round-held"),
    }
    tags = {tag_of(kind) for kind in FRAMES}
    said = set(re.findall(r": (?:preface, )?([A-Z]+)", diagram)) - {"SEEK", "OFFER"}
    assert {name.lower() for name in said} == tags - elsewhere
