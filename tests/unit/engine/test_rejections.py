"""Failures on input: each is counted, and logged once."""

from __future__ import annotations

import sys

import pytest

from mingle.network.transport import Received
from mingle.protocol.effects import Answer, Multicast
from mingle.protocol.events import Heard, Source
from mingle.wire import datagrams
from mingle.wire.datagrams import Offer, Seek
from tests.support.noting_driver import MEMBER, SESSION, Noting


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
def test_an_answer_that_can_not_be_sent_ends_no_loop(driver: Noting, caplog: pytest.LogCaptureFixture) -> None:
    """A local message, for example, may name a destination that is no address."""
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    question = datagrams.padded(Seek(job="a job", member=MEMBER, world_size=2), datagrams.MAX_BYTES)
    received = Received(question, ("127.0.0.1", 9), "4", False, "127.0.0.1\0", interface="lo", shared=True)
    source = Source(interface="lo", multicast=False, signed=False, address="127.0.0.1", reply_to=received)
    for _ in range(3):
        driver.notes.to_do += [Answer(source, offer), Multicast(offer)]
        driver.turn_until(Heard)
        driver.notes.told.clear()
    assert driver.evidence.facts().rejected["fault"] == 3
    assert len(caplog.records) == 1, "each fault is logged once"
    assert "embedded null" in caplog.text
