"""The agents that join a session after CONFIRM, its *latecomers*. Pure.

Each latecomer becomes a member of the running session by a commit of its own: CONFIRM, SEALED, ACK and GO go between it
and the host alone, and its loss voids nothing. If the session is voided before GO, its latecomers become members of the
open session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mingle.protocol.explain import mesh_report
from mingle.protocol.machine import Mesh, roster_digest
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.phases import Committed
from mingle.protocol.session.roster import roster
from mingle.protocol.session.seats import Latecomer, Seated, Seats
from mingle.wire import frames

ADMITTED_SECONDS = 30.0
"""How long a latecomer can take from JOIN to ACK; it can be bound to another session for a third of that time."""


class Latecomers:
    """The commits by which latecomers become members.

    Args:
        session: the name of the session.
        seats: its seats, with the latecomers beside them.
        admission: whether a newcomer is taken now.
        refuse: refuses the newcomer on a connection.
        send: sends a frame on a connection.
        notice: shows a message about the job.
        mesh: what to do if a latecomer can't reach a member.
    """

    def __init__(
        self,
        session: bytes,
        seats: Seats,
        admission: Admission,
        refuse: Callable[[int, frames.Join, frames.Refused], None],
        *,
        send: Callable[[int, frames.AnyFrame], None],
        notice: Callable[[str], None],
        mesh: Mesh,
    ) -> None:
        self._session = session
        self._seats = seats
        self._send = send
        self._notice = notice
        self._admission = admission
        self._refuse = refuse
        self._mesh = mesh
        self._proofs: dict[bytes, Proof] = {}
        """What is known of the connections of latecomers to the members, by the latecomers that were asked to dial."""
        self._dialed: dict[bytes, set[bytes]] = {}
        """The processes to whose nodes each of them has dialed, or was asked to; kept once it is a member."""
        self._doubtful: dict[bytes, frozenset[bytes]] = {}
        """Those of them that were no members when it was asked."""

    def _lacks_members(self, seat: Seated) -> bool:
        """Return whether there is a member that has not dialed the latecomer's node, nor the latecomer its node."""
        nobody = set[bytes]()
        unknown = self._seats.keys() - self._dialed.get(seat.member, nobody)
        return self._mesh != "off" and any(seat.member not in self._dialed.get(each, nobody) for each in unknown)

    def add(self, seat: Seated, now: float) -> None:
        """Let a newcomer wait beside the members."""
        self._seats.wait(Latecomer(seat, admit_by=now + ADMITTED_SECONDS))

    def ask(self, committed: Committed, now: float) -> None:
        """Send CONFIRM to the latecomers that wait for it, once the session can take them."""
        for latecomer in self._seats.latecomers.values():
            if not latecomer.asked and self._admission.admits(now):
                assert latecomer.seat.conn is not None
                latecomer.asked, latecomer.place = True, None
                self._send(latecomer.seat.conn, self._confirm(latecomer, committed))

    def _confirm(self, latecomer: Latecomer, committed: Committed) -> frames.Confirm:
        seat, seats, network = latecomer.seat, self._seats, committed.store_address
        plain = frames.Confirm(session=self._session, epoch=committed.epoch)
        self._proofs.pop(seat.member, None)
        if self._mesh == "off":
            return plain
        # Those that wait like it may be members before it is; one that has not proved a path there can't be dialed yet.
        waiting = [each.seat for each in seats.latecomers.values() if each.asked]
        known = [each for each in waiting if any(path.host_address == network for path in each.paths)]
        others = {**seats, **{each.member: each for each in known}}
        self._dialed[seat.member] = set(others)
        self._doubtful[seat.member] = frozenset(others) - seats.keys()
        proof = mesh_proof.begin_for(seat, network, seats.host, others)
        if not proof.targets(seat.member):
            return plain
        self._proofs[seat.member] = proof
        return proof.asked_of(seat.member, plain)

    def confirmed(
        self, latecomer: Latecomer, conn: int, committed: Committed, frame: frames.Confirmed, now: float
    ) -> None:
        """Send SEALED to a latecomer that has confirmed, unless it has not reached the store's address or a member."""
        seat, seats, paths = latecomer.seat, self._seats, frame.paths
        seat.paths = paths
        failures = [each for each in frame.failures if each.member in seats]
        # That is no path to complain of: a member whose machine has just failed is still counted, for a latecomer that
        # was stopped nobody has waited, and one that has come back can have another address.
        certain = self._dialed.get(seat.member, set()) - self._doubtful.get(seat.member, frozenset())
        in_doubt = any(each.member not in certain or not self._admission.answers(each.member, now) for each in failures)
        proof = self._proofs.get(seat.member)
        if proof is not None and self._mesh == "on":
            self._dialed[seat.member] -= proof.unreached(frame.failures)
        if in_doubt or not self._admission.admits(now):
            latecomer.asked = False
            return
        if committed.store_address not in {path.host_address for path in paths}:
            detail = f"the store listens on {committed.store_address}, which the newcomer has not reached"
            self.forget(seat)
            refusal = frames.Refused(reason="network", detail=detail, who=seats.host.applicant.who)
            self._refuse(conn, seat.applicant, refusal)
            return
        if self._leaves_out(seat, conn, failures):
            return
        if self._lacks_members(seat):
            latecomer.asked = False
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
            self._send(conn, members)
        digest = roster_digest(roster(seats, committed.places, committed.store_address))
        self._send(conn, committed.frame(self._session, latecomer.place, digest))

    def _leaves_out(self, seat: Seated, conn: int, failures: Iterable[frames.Failure]) -> bool:
        """Show which members a latecomer does not reach, if any; return whether it is refused for that."""
        seats, proof = self._seats, self._proofs.pop(seat.member, None)
        if proof is None:
            return False
        proof.add(seat.member, failures)
        if not proof.failures:
            return False
        left_out = mesh_report.without(proof, seat.member)
        if self._admission.leave_out(str(left_out)):
            self._notice(str(left_out))
        if self._mesh == "warn":
            return False
        self.forget(seat)
        self._refuse(conn, seat.applicant, left_out.refusal(seats.host.applicant.who))
        return True

    def acknowledged(self, latecomer: Latecomer, conn: int, committed: Committed, now: float) -> None:
        """Make a latecomer a member: it has reached the store."""
        seat, where = latecomer.seat, latecomer.place
        if where is None:
            return
        counts = self._admission.admits(now) and self._admission.acknowledged(seat.member, now)
        if not counts or self._lacks_members(seat):
            latecomer.asked = False  # its acknowledgement came too late, or at a bad moment: it is asked again
            return
        committed.places[seat.member] = where
        self._seats.take(seat)
        self._send(conn, frames.Go(session=self._session, epoch=committed.epoch))

    def forget(self, seat: Seated) -> None:
        """Forget a latecomer that is gone."""
        self._seats.free(seat)
        self._admission.gone(seat.member)
        self.lost(seat.member)

    def lost(self, member: bytes) -> None:
        """Take note that a latecomer or a member is gone; it can come back with another address."""
        for known in (self._proofs, self._dialed, self._doubtful):
            known.pop(member, None)
        for others in self._dialed.values():
            others.discard(member)

    def overdue(self, now: float) -> list[int]:
        """Return the connections of the latecomers that have taken too long."""
        late = (each.seat.conn for each in self._seats.latecomers.values() if now >= each.admit_by)
        return [conn for conn in late if conn is not None]
