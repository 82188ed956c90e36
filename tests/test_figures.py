"""Sent, answered, lost."""

from __future__ import annotations

from dataclasses import fields

from mingle.observe.figures import Peer, Row
from mingle.wire.echo import WAYS


def test_a_row() -> None:
    row = Row(pending={1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0})
    row.answered(1, 10.25)
    row.answered(1, 10.5)
    row.answered(9, 10.5)
    assert (row.sent, row.received, row.figures, row.loss) == (1, 1, (0.25, 0.25, 0.25), 0.0)
    row.expire(11.0)
    row.failed(3, "refused")
    row.failed(3, "refused twice")
    assert (row.sent, row.received, row.reason) == (3, 1, "refused")
    assert round(row.loss, 3) == 0.667
    assert row.pending == {4: 13.0}
    row.answered(4, 13.75)
    assert row.figures == (0.25, 0.5, 0.75)
    assert (Row().loss, Row().figures) == (0, None)


def test_a_row_grows_no_larger_however_long_it_goes_on() -> None:
    row = Row()
    for number in range(1000):
        row.pending[number] = number
        row.answered(number, number + 0.5)
    assert (row.received, row.figures) == (1000, (0.5, 0.5, 0.5))
    assert not [each for each in vars_of(row) if isinstance(each, list | dict) and each]


def vars_of(row: Row) -> list[object]:
    return [getattr(row, each.name) for each in fields(row)]


def test_a_peer() -> None:
    peer = Peer(b"P" * 16, "", 3, "10.0.0.1", "eth0", 4000)
    assert tuple(peer.rows) == WAYS
    assert str(peer) == "unknown (10.0.0.1)"
