"""Who is still there."""

from __future__ import annotations

from mingle.observing.watching import SEEKER_SECONDS, SESSION_SECONDS, Watching
from tests.bystanders import Wire, a_finder, an_announcement


def test_a_host_that_goes_is_forgotten() -> None:
    wire = Wire()
    finder = a_finder(wire, None, refresh=1.0)
    wire.add("10.0.0.9", finder)
    watching = Watching(finder)
    assert watching.present(wire.now) == ([], [])
    wire.add("10.0.0.1", an_announcement(wire, "resnet", "10.0.0.1"), 5000)
    wire.run(3)
    assert [each.offer.job for each in watching.present(wire.now)[0]] == ["resnet"]
    wire.remove("10.0.0.1")
    wire.run(1.5)
    assert not finder.alive
    assert len(watching.present(wire.now)[0]) == 1
    wire.run(SESSION_SECONDS + 2)
    assert watching.present(wire.now)[0] == []


def test_a_seeker_that_goes_is_forgotten() -> None:
    from mingle.wire.datagrams import Seek

    wire = Wire()
    finder = a_finder(wire, None)
    wire.add("10.0.0.9", finder)
    watching = Watching(finder)
    seek = Seek(job="resnet", member=b"m" * 16, world_size=2, rank=1)
    wire.hear("10.0.0.9", seek, "10.0.0.1")
    assert len(watching.present(wire.now)[1]) == 1
    assert len(watching.present(wire.now + SEEKER_SECONDS - 1)[1]) == 1
    assert watching.present(wire.now + SEEKER_SECONDS + 1)[1] == []
    wire.hear("10.0.0.9", seek, "10.0.0.1")
    assert len(watching.present(wire.now + SEEKER_SECONDS + 2)[1]) == 1
