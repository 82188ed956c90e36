"""Sent, answered, lost."""

from __future__ import annotations

from mingle.pings.figures import Peer, Row
from mingle.wire.echo import WAYS


def test_a_row() -> None:
    row = Row(pending={1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0})
    row.answered(1, 10.25)
    row.answered(1, 10.5)
    row.answered(9, 10.5)
    assert (row.sent, row.received, row.times, row.loss) == (1, 1, [0.25], 0.0)
    row.expire(11.0)
    row.failed(3, "refused")
    row.failed(3, "refused twice")
    assert (row.sent, row.received, row.reason) == (3, 1, "refused")
    assert round(row.loss, 3) == 0.667
    assert row.pending == {4: 13.0}
    assert Row().loss == 0


def test_a_peer() -> None:
    peer = Peer(b"P" * 16, "", 3, "10.0.0.1", "eth0", 4000)
    assert tuple(peer.rows) == WAYS
    assert str(peer) == "unknown (10.0.0.1)"
