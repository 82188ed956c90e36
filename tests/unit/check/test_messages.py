"""What the ranks of mingle-check read from each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mingle.check import messages
from tests.support.evidence import HELLO
from tests.support.fresh_calls import files_run_by


@pytest.mark.parametrize(
    "untrusted", [b"", b"[" * 200_000, b'{"a": ' * 50_000, b"\xff", b"1", b'{"rank": "x", "id": "x"}']
)
@pytest.mark.parametrize("decoder", [messages.GREETING, messages.ORDER, messages.REPLY, messages.ADDRESS])
def test_what_is_no_message_is_a_value_error(decoder: msgspec.json.Decoder[Any], untrusted: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        messages.decode(decoder, untrusted)


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
