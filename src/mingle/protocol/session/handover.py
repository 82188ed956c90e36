"""The handover of a session: which member has to lead in its host's place, and which were asked to. Pure.

Where ranks are assigned, the first member in order hosts the job, and so is rank 0. A host that is not the first asks
it to lead once all have confirmed (LEAD). The first then opens a session of its own, and the host closes for it, as it
does for the winner of an election (:mod:`mingle.protocol.election`). Order decides nothing else.
"""

from __future__ import annotations

from mingle.protocol.explain import errors
from mingle.protocol.machine import Identity
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.phases import HandingOver, State
from mingle.protocol.session.seats import EXPLICIT, Seated, Seats

MOST_CALLS = 5
"""How often the session of a member that was asked to lead is called: one call is lost where one SYN is."""


class Handover:
    """The choice of the member that has to lead in place of the host.

    Args:
        seats: of the session.
        admission: whether the session is handed over at all.
    """

    def __init__(self, seats: Seats, admission: Admission) -> None:
        self.asked: set[bytes] = set()
        """The members that were sent LEAD: each can host a session now, and this one closes for it."""
        self.unreached: set[bytes] = set()
        """The members that are not asked to lead, as long as no other one is lost: the proof of the mesh does not show
        that all nodes reach them, or this host could not reach their sessions."""
        self._seats = seats
        self._admission = admission

    def first(self, proof: Proof | None) -> Seated | None:
        """Return the member that has to lead in place of this host: the first in order that all nodes reach."""
        for seat in self._seats.before_host() if self._admission.hands_over else ():
            if proof is not None and not proof.can_lead(seat.member):
                self.unreached.add(seat.member)
            else:
                return None if seat.member in self.unreached else seat
        return None

    def calls_again(self, state: State, member: bytes) -> bool:
        """Return whether the session of a member that was asked to lead is to be called again, and count the call."""
        if not isinstance(state, HandingOver) or state.leader != member or state.calls >= MOST_CALLS:
            return False
        state.calls += 1
        return True

    def remarks(self, identity: Identity) -> list[str]:
        """Return what to warn of if the order of the nodes can be another one than its user expects.

        Args:
            identity: of the host.
        """
        seats = self._seats
        if not (seats.assigned and self._admission.hands_over):
            return []
        remarks = [errors.first_not_reached(identity, first.who) for first in seats.before_host()[:1]]
        without = [each.who.hostname for each in seats.in_order() if not each.applicant.order.startswith(EXPLICIT)]
        if 0 < len(without) < len(seats):
            remarks.append(errors.some_node_ranks(identity, list(dict.fromkeys(without))))
        return remarks
