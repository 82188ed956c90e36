"""What an agent remembers from session to session."""

from __future__ import annotations

from mingle.elastic.memory import Memory
from mingle.wire.frames import ProcessInfo


def test_who_was_there_and_is_not_here_is_missed() -> None:
    one, two = (
        ProcessInfo(hostname="one", pid=1, address="10.0.0.1"),
        ProcessInfo(hostname="two", pid=2, address="10.0.0.2"),
    )
    memory = Memory(companions=(one, two))
    assert memory.missed([ProcessInfo(hostname="one", pid=1, address="192.0.2.9")]) == ["host two (10.0.0.2), pid 2"]
    assert memory.missed([one, ProcessInfo(hostname="two", pid=3)]) == [str(two)], "started again it is another process"
