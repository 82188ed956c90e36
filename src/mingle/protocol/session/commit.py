"""The commit of a session, as its members hear of it: the frame of each step, and the stage that follows from it. Pure.

The registrar decides when a step is due (:mod:`mingle.protocol.session.registrar`): for all members, or for one
latecomer (:mod:`mingle.protocol.session.latecomers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mingle.protocol.machine import roster_digest
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.phases import Committed, Open, State, Stored
from mingle.protocol.session.roster import roster
from mingle.protocol.session.seats import Seated, Seats, Stage
from mingle.wire import frames


class Connections(Protocol):
    """The connections of a session's members, and of those that apply."""

    def send(self, conn: int, frame: frames.AnyFrame) -> None:
        """Send a frame."""

    def ping(self, conn: int, now: float) -> None:
        """Ask whether the process there lives; its answer goes to the registrar's ``pong``."""

    def hang_up(self, conn: int) -> None:
        """Close a connection after what is still to be sent."""


class Commit:
    """Takes seats to the next stage of the commit, and tells their holders.

    Args:
        session: its name.
        seats: of the session.
        admission: takes note of who was sent SEALED.
        connections: of the members.
    """

    def __init__(self, session: bytes, seats: Seats, admission: Admission, connections: Connections) -> None:
        self._session = session
        self._seats = seats
        self._admission = admission
        self._connections = connections

    def joined(self, seat: Seated, conn: int, state: State) -> None:
        """Send JOINED: the process on this connection has a seat."""
        self._connections.send(conn, frames.Joined(session=self._session, epoch=state.epoch, token=seat.token))
        if isinstance(state, Open) and state.epoch:
            # It may have acknowledged this epoch on a connection that broke before the VOID, and would wait for GO.
            reason = "voided before the member came back"
            self._connections.send(conn, frames.Void(session=self._session, epoch=state.epoch, reason=reason))

    def ask(self, seat: Seated, epoch: int, proof: Proof | None) -> None:
        """Send CONFIRM."""
        seat.stage, plain = Stage.ASKED, frames.Confirm(session=self._session, epoch=epoch)
        self._tell(seat, plain if proof is None else proof.asked_of(seat.member, plain))

    def lead(self, first: Seated, epoch: int) -> None:
        """Send LEAD to the first in order."""
        self._tell(first, frames.Lead(session=self._session, epoch=epoch))

    def seal(self, state: Stored, places: Mapping[bytes, frames.Place], now: float, *, unproved: str = "") -> None:
        """Send SEALED to those that get these places: all members, or a latecomer.

        Args:
            state: of the session.
            places: the places in the job.
            now: the time.
            unproved: what the proof of the mesh does not show.
        """
        members = self._admission.members(joining=int(isinstance(state, Committed)))
        digest = roster_digest(roster(self._seats.members(), state.places, state.store_address))
        for member, where in places.items():
            seat = self._seats[member]
            self._admission.sealed(member, now)
            seat.stage, seat.due, seat.bound_at = Stage.SEALED, now + self._admission.acknowledge_seconds, now
            if members is not None:
                self._tell(seat, members)
            self._tell(seat, state.frame(self._session, where, digest, unproved))

    def go(self, seats: Sequence[Seated], epoch: int) -> None:
        """Send GO."""
        for seat in seats:
            seat.stage = Stage.IN
            self._tell(seat, frames.Go(session=self._session, epoch=epoch))

    def void(self, epoch: int, reason: str) -> None:
        """Send VOID to all members, and make members of the latecomers."""
        void = frames.Void(session=self._session, epoch=epoch, reason=reason[: frames.MAX_TEXT_CHARACTERS])
        for seat in self._seats.values():
            if not seat.is_latecomer:
                self._tell(seat, void)
            seat.stage = Stage.SEATED
            self._seats.admit(seat)

    def _tell(self, seat: Seated, frame: frames.AnyFrame) -> None:
        """Send a frame to the holder of a seat, if it is connected; the host itself is not."""
        if seat.conn is not None:
            self._connections.send(seat.conn, frame)
