"""The agents that join a session after CONFIRM, its *latecomers*. Pure.

Each latecomer becomes a member of the running session by a commit of its own: CONFIRM, SEALED, ACK and GO go between it
and the host alone, and its loss voids nothing. If the session is voided before GO, its latecomers become members of the
open session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mingle.protocol.admission import Admission
from mingle.protocol.machine import RegistrarPort, roster_digest
from mingle.protocol.roster import roster
from mingle.protocol.seats import Latecomer, Seated, Seats
from mingle.wire import frames

if TYPE_CHECKING:
    from mingle.protocol.registrar import Committed

ADMITTED_SECONDS = 30.0
"""How long a latecomer can take from JOIN to ACK; it can be bound to another session for a third of that time."""


class Latecomers:
    """The commits by which latecomers become members.

    Args:
        session: the name of the session.
        seats: its seats, with the latecomers beside them.
        port: what the registrar calls.
        admission: whether a newcomer is taken now.
        refuse: refuses the newcomer on a connection.
    """

    def __init__(
        self,
        session: bytes,
        seats: Seats,
        port: RegistrarPort,
        admission: Admission,
        refuse: Callable[[int, frames.Join, frames.Refused], None],
    ) -> None:
        self._session = session
        self._seats = seats
        self._port = port
        self._admission = admission
        self._refuse = refuse

    def add(self, seat: Seated, now: float) -> None:
        """Let a newcomer wait beside the members."""
        self._seats.wait(Latecomer(seat, admit_by=now + ADMITTED_SECONDS))

    def ask(self, epoch: int, now: float) -> None:
        """Send CONFIRM to the latecomers that wait for it, once the session can take them."""
        for latecomer in self._seats.latecomers.values():
            if not latecomer.asked and self._admission.admits(now):
                assert latecomer.seat.conn is not None
                latecomer.asked = True
                self._port.send(latecomer.seat.conn, frames.Confirm(session=self._session, epoch=epoch))

    def confirmed(
        self, latecomer: Latecomer, conn: int, committed: Committed, paths: tuple[frames.Path, ...], now: float
    ) -> None:
        """Send SEALED to a latecomer that has confirmed, unless it has not reached the store's address."""
        seat, seats = latecomer.seat, self._seats
        seat.paths = paths
        if not self._admission.admits(now):
            latecomer.asked = False
            return
        if committed.store_address not in {path.host_address for path in paths}:
            detail = f"the store listens on {committed.store_address}, which the newcomer has not reached"
            self.forget(seat)
            refusal = frames.Refused(reason="network", detail=detail, who=seats.host.applicant.who)
            self._refuse(conn, seat.applicant, refusal)
            return
        others = (each.place for each in seats.latecomers.values() if each is not latecomer)
        taken = {each.rank for each in (*committed.places.values(), *others) if each is not None}
        free = next(rank for rank in range(seats.size) if rank not in taken)
        latecomer.place = frames.Place(
            rank=free,
            world_size=seats.size,
            local_rank=0,
            local_world_size=1,
            node_rank=free,
            num_nodes=seats.size,
        )
        self._admission.sealed(seat.member, now)
        members = self._admission.members(joining=1)
        if members is not None:
            self._port.send(conn, members)
        digest = roster_digest(roster(seats, committed.places, committed.store_address))
        self._port.send(conn, committed.frame(self._session, latecomer.place, digest))

    def acknowledged(self, latecomer: Latecomer, conn: int, committed: Committed, now: float) -> None:
        """Make a latecomer a member: it has reached the store."""
        seat, where = latecomer.seat, latecomer.place
        if where is None:
            return
        if not self._admission.admits(now) or not self._admission.acknowledged(seat.member, now):
            latecomer.asked = False  # its acknowledgement came too late, or at a bad moment: it is asked again
            return
        committed.places[seat.member] = where
        self._seats.take(seat)
        self._port.send(conn, frames.Go(session=self._session, epoch=committed.epoch))

    def forget(self, seat: Seated) -> None:
        """Forget a latecomer that is gone."""
        self._seats.free(seat)
        self._admission.gone(seat.member)

    def overdue(self, now: float) -> list[int]:
        """Return the connections of the latecomers that have taken too long."""
        late = (each.seat.conn for each in self._seats.latecomers.values() if now >= each.admit_by)
        return [conn for conn in late if conn is not None]
