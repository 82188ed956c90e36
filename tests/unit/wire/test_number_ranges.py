"""Every number that comes from the network has a range: what is outside is malformed, and nothing has to look again."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from mingle.wire import datagrams, echo, frames

MESSAGES = [
    each for union in (datagrams.Datagram, frames.AnyFrame, echo.EchoMessage) for each in typing.get_args(union)
]


def numbers(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every number in a type, with the fields that lead to it."""
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        yield path, kind
    for field in getattr(kind, "fields", ()):
        yield from numbers(field.type, f"{path}.{field.name}")
    for inner in getattr(kind, "types", ()):
        yield from numbers(inner, path)
    for name in ("item_type", "key_type", "value_type"):
        if (inner := getattr(kind, name, None)) is not None:
            yield from numbers(inner, f"{path}[]")
    for inner in getattr(kind, "item_types", ()):
        yield from numbers(inner, f"{path}[]")


@pytest.mark.parametrize("message", MESSAGES)
def test_every_number_has_a_range(message: type[msgspec.Struct]) -> None:
    unbounded = [
        path
        for path, kind in numbers(inspect.type_info(message), message.__name__)
        if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)
    ]
    assert unbounded == []
