"""The echo datagrams: what is sent is read, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mingle.observe.ping import ANSWERS_PER_SECOND
from mingle.wire import datagrams, echo
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import BROWSE_GROUP, MAX_BYTES, Rejected, job_group
from mingle.wire.echo import EchoEnd, EchoMessage, EchoReply, EchoRequest

KEY, OTHER = JobKey(b"s3cret", "resnet"), JobKey(b"another", "resnet")
PING = EchoRequest(job="resnet", pinger=b"P" * 16, hostname="node1", pid=7, port=4000, number=3, way="multicast")
LONGEST = EchoRequest(
    job="ж" * 128, pinger=b"P" * 16, hostname="h" * 64, pid=2**32 - 1, port=65535, number=2**31 - 1, way="multicast"
)
MESSAGES: list[EchoMessage] = [
    PING,
    EchoReply(job="resnet", pinger=b"Q" * 16, asker=b"P" * 16, number=3, way="unicast"),
    EchoEnd(pinger=b"Q" * 16),
]


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: EchoMessage, key: JobKey | None) -> None:
    data = echo.encode(message, key)
    received = echo.decode(data)
    if isinstance(received, EchoRequest):
        received = msgspec.structs.replace(received, padding=b"")
    assert received == message
    assert echo.is_trusted(data, key)
    assert not echo.is_trusted(data, OTHER if key else KEY)
    assert echo.is_trusted(data, None) == (key is None)
    assert echo.is_trusted(datagrams.as_repeated(data), key)
    assert datagrams.is_echo(data)
    with pytest.raises(Rejected, match="magic"):  # ranks ignore it
        datagrams.decode(data)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("message", [PING, LONGEST])
def test_no_answer_is_longer_than_its_question(message: EchoRequest, key: JobKey | None) -> None:
    asked = echo.encode(message, key)
    assert echo.PING_BYTES <= len(asked) <= echo.PING_BYTES + 1
    answer = EchoReply(
        job=message.job,
        pinger=b"Q" * 16,
        hostname="h" * 64,
        pid=2**32 - 1,
        port=65535,
        asker=message.pinger,
        number=message.number,
        way=message.way,
    )
    assert len(echo.encode(answer, key)) <= len(asked)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"MNGP", "size"),
        (bytes(datagrams.MAX_BYTES + 1), "size"),
        (datagrams.encode(datagrams.List(member=bytes(16))), "magic"),
        (b"MNGP\x07" + echo.encode(PING)[5:], "version 7"),
        (echo.encode(PING)[:-2], "malformed"),
        (echo.encode(PING) + b"\0", "malformed"),
    ],
)
def test_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(Rejected, match=f"^{reason}$"):
        echo.decode(data)


def test_the_group_is_one_of_its_own() -> None:
    groups = {echo.ping_group("resnet"), echo.ping_group(""), job_group("resnet"), BROWSE_GROUP, echo.LINK_GROUP}
    assert len({group.ipv4 for group in groups}) == len(groups)


def test_the_document_says_so() -> None:
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8").partition("\n## Pings\n")[2]
    for kind in (EchoRequest, EchoReply, EchoEnd):
        named = (kind.__struct_config__.tag, *kind.__struct_fields__)
        assert [name for name in named if f"`{name}`" not in text] == []
    assert all(f"`{way}`" in text for way in echo.WAYS)
    constants = [datagrams.ECHO_MAGIC.hex(" "), echo.LINK_GROUP.ipv4, echo.LINK_GROUP.ipv6_link, str(echo.PING_BYTES)]
    assert all(each in text for each in [*constants, f"{ANSWERS_PER_SECOND} times"])


def test_a_stream_is_cut_into_messages() -> None:
    data = echo.framed(echo.encode(PING))
    assert [echo.unframed(data[:length]) for length in (0, 1, 2, len(data) - 1)] == [None] * 4
    assert echo.unframed(data + b"more") == echo.encode(PING)
    assert echo.unframed(MAX_BYTES.to_bytes(2, "big")) is None
    with pytest.raises(Rejected, match="size"):
        echo.unframed((MAX_BYTES + 1).to_bytes(2, "big"))
