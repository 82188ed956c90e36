"""What the ranks of mingle-check read from each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from mingle.check import messages
from tests.support.evidence import HELLO
from tests.support.fresh_calls import files_run_by

DECODERS: dict[str, Callable[[bytes], object]] = {
    "question": messages.question_of,
    "greeting": partial(messages.decode, messages.GREETING),
    "order": partial(messages.decode, messages.ORDER),
    "reply": partial(messages.decode, messages.REPLY),
    "address": partial(messages.decode, messages.ADDRESS),
}


@pytest.mark.parametrize(
    "untrusted", [b"", b"[" * 200_000, b'{"a": ' * 50_000, b"\xff", b"[1]", b"9" * 5000, b'{"rank": "x", "id": "x"}']
)
@pytest.mark.parametrize("kind", DECODERS)
def test_what_is_no_message_is_a_value_error(kind: str, untrusted: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        DECODERS[kind](untrusted)


@pytest.mark.parametrize(
    "question",
    [
        *[{"token": token} for token in (1, None)],
        *[{"hello": hello} for hello in (1, [], {}, {"rank": 0}, HELLO | {"rank": []}, HELLO | {"rank": -1})],
        *[{"hello": HELLO | wrong} for wrong in ({"address": "a"}, {"networks": 1}, {"port": "x"})],
        *[{"probe": probe} for probe in (1, "x", {}, {"rank": 1}, HELLO | {"address": 5}, HELLO | {"port": 1 << 20})],
    ],
)
def test_a_question_that_makes_no_sense_is_a_value_error(question: dict[str, Any]) -> None:
    good = {"token": "t", "hello": HELLO, "probe": HELLO}
    assert messages.question_of(json.dumps(good).encode()).token == "t"
    with pytest.raises(ValueError, match=r"\w"):
        messages.question_of(json.dumps(good | question).encode())


@pytest.mark.parametrize(
    "order",
    [
        *[{"show": 1}, {"roster": [{}]}, {"do": []}, {"report": {"lost": 1}}],
        {"report": {"pairs": [{"from": 0, "to": 1}]}},
    ],
)
def test_an_order_that_makes_no_sense_is_a_value_error(order: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        messages.decode(messages.ORDER, json.dumps(order).encode())


def test_an_empty_message_is_a_heartbeat_and_a_field_of_a_later_version_is_passed_over() -> None:
    for decoder, kind in ((messages.ORDER, messages.Order), (messages.REPLY, messages.Reply)):
        assert msgspec.json.encode(kind()) == b"{}"
        assert messages.decode(decoder, b'{"later": 1}') == kind()


def test_no_type_is_looked_at_when_the_first_caller_comes() -> None:
    """Each caller has a thread: two of them that did so at once could crash in msgspec, and with it rank 0."""
    question = msgspec.json.encode({"token": "t", "hello": HELLO, "probe": HELLO})
    ran = files_run_by(f"messages.question_of({question!r})", after="from mingle.check import messages")
    assert any("messages" in file for file in ran)
    assert not [file for file in ran if "msgspec" in file]
