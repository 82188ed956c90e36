"""The facts that one agent keeps across sessions. Pure, and lost with the process: a restarted agent is a new one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mingle.elastic.leases import Binding
from mingle.wire.frames import ProcessInfo


@dataclass(slots=True)
class Memory:
    """The past of one agent."""

    binding: Binding = field(default_factory=Binding)
    generation: int = -1
    """The highest generation of the sessions that it was in; -1 before the first."""
    had_quorum: bool = False
    """Whether it was in a session that had its quorum; such an agent takes part in no small start."""
    surplus: bool = False
    """Whether a session with MAX answering agents refused it; such an agent counts for no founding until admitted."""
    companions: tuple[ProcessInfo, ...] = ()
    """Who was in its last session, for messages."""

    def missed(self, present: Iterable[ProcessInfo]) -> list[str]:
        """Return who was in the last session and is not here."""
        here = {(who.hostname, who.pid) for who in present}
        return [str(who) for who in self.companions if (who.hostname, who.pid) not in here]
