"""Who is in a running session of agents, as its host keeps it: one change at a time, settled by a majority. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from mingle.agents.quorum import holds, members_of
from mingle.wire.frames import Node, View


@dataclass(slots=True)
class Roll:
    """The host's views. ``settled`` is in force; ``proposed`` is told to all and waits for a majority to say so."""

    settled: View
    proposed: View | None = None
    _known: dict[bytes, int] = field(default_factory=dict)
    """The number of the last view that each member is known to have received."""

    @property
    def latest(self) -> View:
        """The one that members are told."""
        return self.proposed or self.settled

    @property
    def counted(self) -> frozenset[bytes]:
        """Who counts for a majority."""
        return members_of(self.settled) | members_of(self.latest)

    def change(self, nodes: Sequence[Node], generation: int) -> bool:
        """Proposes who is in now, if that is new and nothing else is proposed; tells whether it did."""
        now_in = frozenset(node.member for node in nodes)
        if self.proposed is not None or now_in == members_of(self.settled):
            return False
        self.proposed = msgspec.structs.replace(
            self.settled, generation=generation, number=self.settled.number + 1, nodes=tuple(nodes)
        )
        return True

    def acknowledged(self, member: bytes, number: int) -> None:
        """A member has received the view of that number."""
        self._known[member] = max(number, self._known.get(member, 0))

    def settle(self, present: AbstractSet[bytes], gone: AbstractSet[bytes], bound: AbstractSet[bytes]) -> bool:
        """Puts the proposed view in force if enough of the one before know of it; tells whether it did.

        Half of them, with the host, are enough only if none of the others is bound to us: one who is counts us out
        when we are proved dead.
        """
        proposed = self.proposed
        if proposed is None:
            return False
        known = {member for member in present if self._known.get(member, 0) >= proposed.number}
        aware = known | {self.settled.host}
        rest = members_of(self.settled) - gone
        tie = 2 * len(rest & aware) == len(rest)
        if not holds(self.settled, aware, gone) or (tie and (rest - aware) & bound):
            return False
        self.settled, self.proposed = proposed, None
        self._known.clear()  # the number of the next one is higher
        return True

    def holds(self, present: AbstractSet[bytes], gone: AbstractSet[bytes]) -> bool:
        """Whether the host and those that are present may go on."""
        views = [self.settled] if self.proposed is None else [self.settled, self.proposed]
        return all(holds(view, present, gone) for view in views)

    def absent(self, present: AbstractSet[bytes]) -> list[Node]:
        """Those that count and are not there."""
        views = [self.settled] if self.proposed is None else [self.settled, self.proposed]
        return list({node.member: node for view in views for node in view.nodes if node.member not in present}.values())
