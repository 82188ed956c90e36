"""The latecomers: how processes that come after CONFIRM become members of a session that runs. Pure.

Each of them becomes a member by a commit of its own, in which it alone goes through the same stages from CONFIRM to GO,
and its loss voids nothing. If the session is voided before GO, they become members of the open one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mingle.protocol.explain import mesh_report
from mingle.protocol.explain.mesh_report import LeftOut
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.commit import Commit
from mingle.protocol.session.network_choice import AnotherProof, Chosen, LeaveOut, NetworkChoice, NothingShared
from mingle.protocol.session.phases import Committed
from mingle.protocol.session.seating import first_free
from mingle.protocol.session.seats import Seated, Seats, Stage
from mingle.wire import frames

ADMITTED_SECONDS = 30.0
"""How long a latecomer can take from JOIN to ACK; it can be bound to another session for a third of that time."""


class Latecomers:
    """Decides which step each latecomer to a running session takes next.

    Args:
        seats: of the session.
        admission: whether the session takes latecomers, and when.
        network: whether a latecomer reaches the members.
        commit: tells the latecomers.
        turn_away: refuses its seat to a latecomer.
        leave_out: refuses their seats to nodes without which all the others reach each other.
        tell: says which nodes a node does not reach.
    """

    def __init__(
        self,
        seats: Seats,
        admission: Admission,
        network: NetworkChoice,
        commit: Commit,
        *,
        turn_away: Callable[[Seated, frames.Refused], None],
        leave_out: Callable[[Sequence[LeftOut], float], None],
        tell: Callable[[LeftOut], None],
    ) -> None:
        self._seats = seats
        self._admission = admission
        self._network = network
        self._commit = commit
        self._turn_away = turn_away
        self._leave_out = leave_out
        self._tell = tell

    def waiting(self) -> list[Seated]:
        """Return those that are no members yet; none in a session that takes no latecomers."""
        return self._seats.latecomers() if self._admission.takes_latecomers else []

    def advance(self, state: Committed, now: float) -> None:
        """Take the next step of each latecomer's commit that is due."""
        for seat in self.waiting():
            if seat.stage in (Stage.ASKED, Stage.SEALED):
                continue
            if not self._admission.admits(now):
                seat.stage = Stage.SEATED  # it is asked, once more, as soon as the session can take it
            elif seat.stage is Stage.SEATED:
                self._commit.ask(seat, state.epoch, self._network.proof_for(seat, state.store_address))
            elif seat.stage is Stage.CONFIRMED:
                self._seal(state, seat, now)
            elif self._network.lacks_members(seat):
                seat.stage = Stage.SEATED
            else:
                assert seat.place is not None
                state.places[seat.member] = seat.place
                self._seats.admit(seat)
                self._commit.go([seat], state.epoch)

    def _seal(self, state: Committed, latecomer: Seated, now: float) -> None:
        """Send SEALED to a latecomer that has confirmed, unless it has not reached the store's address or a member."""
        network = state.store_address
        match self._network.choose_for(latecomer, network, lambda member: self._admission.answers(member, now)):
            case AnotherProof():
                latecomer.stage = Stage.SEATED
            case NothingShared():
                detail = f"the store listens on {network}, which the newcomer has not reached"
                host = self._seats.host.applicant.who
                self._turn_away(latecomer, frames.Refused(reason="network", detail=detail, who=host))
            case LeaveOut(left_out=left_out):
                self._leave_out(left_out, now)
            case Chosen(broken=broken):
                if broken is not None:
                    self._tell(mesh_report.without(broken, latecomer.member))
                others = (each.place for each in self.waiting() if each.place and each.stage >= Stage.SEALED)
                latecomer.place = first_free((*state.places.values(), *others), self._seats.size)
                self._commit.seal(state, {latecomer.member: latecomer.place}, now)
