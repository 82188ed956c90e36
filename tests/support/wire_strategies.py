"""Hypothesis strategies for what may travel, derived from the messages' types: no field is forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import strategies as st

from mingle.wire.datagrams import MAX_JOB_ID_BYTES, MAX_SHORT_TEXT_BYTES, truncate_utf8

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

_TEXT = st.characters(codec="utf-8")
# As long as a field of type ``Text`` gets here; longer ones only make the search slow.
_LONG_TEXT = 200
_MAX_ITEMS = 6
_ADDRESS = (2, 45)


def messages(kind: type[msgspec.Struct]) -> SearchStrategy[Any]:
    """Return valid messages of a type, with texts cut as their makers cut them."""
    return _strategy(msgspec.inspect.type_info(kind))


def _strategy(info: msgspec.inspect.Type) -> SearchStrategy[Any]:
    make = _MAKERS.get(type(info))
    if make is None:
        raise NotImplementedError(f"no strategy for {info}")
    return make(info)


def _integers(info: Any) -> SearchStrategy[int]:
    low = info.ge if info.ge is not None else (None if info.gt is None else info.gt + 1)
    high = info.le if info.le is not None else (None if info.lt is None else info.lt - 1)
    # MessagePack holds whole numbers of 64 bits.
    return st.integers(low if low is not None else -(2**63), high if high is not None else 2**63 - 1)


def _texts(info: Any) -> SearchStrategy[str]:
    if (info.min_length, info.max_length) == _ADDRESS:
        return st.ip_addresses().map(str)
    if info.pattern is not None:
        return st.from_regex(info.pattern)
    limit = min(info.max_length, _LONG_TEXT) if info.max_length != MAX_JOB_ID_BYTES else MAX_JOB_ID_BYTES
    max_bytes = {MAX_SHORT_TEXT_BYTES: MAX_SHORT_TEXT_BYTES, MAX_JOB_ID_BYTES: MAX_JOB_ID_BYTES}
    texts = st.text(_TEXT, min_size=info.min_length or 0, max_size=limit)
    cut = max_bytes.get(info.max_length)
    return texts if cut is None else texts.map(lambda text: truncate_utf8(text, cut))


def _structs(info: Any) -> SearchStrategy[Any]:
    return st.builds(
        info.cls, **{field.name: _strategy(field.type) for field in info.fields if field.name != "padding"}
    )


_MAKERS: dict[type[msgspec.inspect.Type], Callable[[Any], SearchStrategy[Any]]] = {
    msgspec.inspect.IntType: _integers,
    msgspec.inspect.StrType: _texts,
    msgspec.inspect.StructType: _structs,
    msgspec.inspect.BoolType: lambda _: st.booleans(),
    msgspec.inspect.NoneType: lambda _: st.none(),
    msgspec.inspect.FloatType: lambda info: st.floats(info.ge, info.le, allow_nan=False),
    msgspec.inspect.BytesType: lambda info: st.binary(min_size=info.min_length or 0, max_size=min(info.max_length, 64)),
    msgspec.inspect.LiteralType: lambda info: st.sampled_from(info.values),
    msgspec.inspect.UnionType: lambda info: st.one_of([_strategy(each) for each in info.types]),
    msgspec.inspect.VarTupleType: lambda info: st.lists(
        _strategy(info.item_type),
        min_size=info.min_length or 0,
        max_size=min(info.max_length, max(_MAX_ITEMS, info.min_length or 0)),
    ).map(tuple),
    msgspec.inspect.DictType: lambda info: st.dictionaries(
        _strategy(info.key_type), _strategy(info.value_type), max_size=_MAX_ITEMS
    ),
}
