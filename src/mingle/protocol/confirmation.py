"""The question that a host asks all members before it seals: are you still there, and do you reach each other? Pure.

CONFIRM goes to every member, with the targets of its node if a mesh is proved, and CONFIRMED comes back
(:class:`~mingle.protocol.phases.Confirming`). The registrar decides what follows. A member whose target has accepted a
connection and stays silent asks the host whether the process there runs (UNANSWERED), so that a stopped process is
told from a broken path.
"""

from __future__ import annotations

from collections.abc import Sequence

from mingle.protocol import mesh_report
from mingle.protocol.admission import Admission
from mingle.protocol.machine import RegistrarPort
from mingle.protocol.mesh import RUNS_SECONDS
from mingle.protocol.mesh_proof import Proof, apart_from
from mingle.protocol.mesh_report import LeftOut
from mingle.protocol.network_choice import Choice, NetworkChoice
from mingle.protocol.phases import Confirming
from mingle.protocol.seats import Seated, Seats
from mingle.wire import frames

ASKED_SECONDS = RUNS_SECONDS + 1.0
"""How much longer the members have to confirm if one of them waits for a process that may be stopped."""
CONFIRM_AGAIN_SECONDS = 0.5
"""How long the host waits before it looks again, or asks members again that share no address of it."""


class Confirmation:
    """The questions and answers of one epoch after another.

    Args:
        session: the name of the session.
        seats: all members.
        port: what the registrar calls.
        admission: how long the members have, and how many of them are enough.
        network: the choice of the network, and so of what the members prove on it.
    """

    def __init__(
        self,
        session: bytes,
        seats: Seats,
        port: RegistrarPort,
        admission: Admission,
        network: NetworkChoice,
    ) -> None:
        self._session = session
        self._seats = seats
        self._port = port
        self._admission = admission
        self._network = network
        self._asked: dict[bytes, float] = {}
        """When each target was asked last that did not answer a member."""

    def restart(self) -> None:
        """Forget what was proved: the members may be others now."""
        self._network.restart()

    def begin(self, epoch: int, now: float, *, again: bool) -> Confirming:
        """Return the state in which all members are asked; :meth:`ask` asks them.

        Args:
            epoch: the new epoch.
            now: the current time.
            again: whether they are asked for the second time, since they shared no address of the host.
        """
        seats, proof = self._seats, self._network.next_proof(now)
        # The host has no question to answer, but its own targets to dial.
        awaited = set(seats) if proof is not None else seats.keys() - {seats.host.member}
        return Confirming(epoch, awaited, now + self._admission.confirm_seconds, again, proof=proof)

    def ask(self, state: Confirming, now: float) -> None:
        """Send CONFIRM to every member."""
        proof = state.proof
        for seat in self._seats.others():
            if seat.conn is not None:
                plain = frames.Confirm(session=self._session, epoch=state.epoch)
                self._port.send(seat.conn, plain if proof is None else proof.asked_of(seat.member, plain))
        if proof is not None:
            self._port.prove_mesh(state.epoch, proof, now)

    def confirmed(self, state: Confirming, seat: Seated, frame: frames.Confirmed) -> None:
        """Take note of the answer of a member."""
        seat.paths = frame.paths
        if state.proof is not None:
            state.proof.add(seat.member, frame.failures, frame.blocked)
        state.awaited.discard(seat.member)

    def choose(self, state: Confirming, now: float) -> Choice:
        """Return the network that the session takes, or why it takes none yet, once all have confirmed."""
        return self._network.choose(state.proof, now)

    def left_out(self, proof: Proof) -> list[LeftOut] | None:
        """Return the nodes without which all the others reach each other.

        Returns:
            The nodes. None if too few would stay with the host, and without it there are enough: it has to give way.
        """
        host, count = self._seats.host.member, len(self._seats)
        found = mesh_report.left_out(proof, host)
        if not self._admission.enough(count - len(found)):
            without_host = mesh_report.left_out(apart_from(proof, host), host)
            if self._admission.enough(count - 1 - len(without_host)):
                return None
        return found

    # --- members that do not answer --------------------------------------------------------------------------------

    def late(self, state: Confirming, now: float) -> list[Seated]:
        """Return the members that are to be dropped, since they have not confirmed in time.

        A member that only waits for a stopped process stays. If none is dropped, the question goes on for a moment.
        """
        proof, late = state.proof, set(state.awaited)
        if proof is not None and proof.asked and not state.extended:
            # The answer can be on its way, and one that hears that the process runs goes on waiting for a moment.
            state.extended, state.ends = True, now + ASKED_SECONDS
            return []
        if proof is not None and (silent := proof.silent()):
            late = (late - proof.wait_for_others()) | silent
        dropped = [seat for seat in self._seats.others() if seat.member in late]
        if not dropped:
            state.ends = now + CONFIRM_AGAIN_SECONDS  # this host itself still dials
        return dropped

    def unanswered(self, epoch: int, proofs: Sequence[Proof], member: bytes, target: bytes, now: float) -> None:
        """Handle UNANSWERED: ask whether the process of a target runs.

        Args:
            epoch: in which that was asked.
            proofs: those that are under way.
            member: that waits for the target.
            target: the member that has accepted a connection and does not answer.
            now: the current time.
        """
        asking = [proof for proof in proofs if proof.ask(member, target)]
        if not asking:
            return
        holder = self._seats.find(target)
        if holder is None or holder.conn is None or target in self._seats.latecomers:
            self.runs(epoch, proofs, target, now)  # nobody waits for another latecomer: that is no member yet
        else:
            self._port.ping(holder.conn, now)
            self._asked[target] = now

    def answered(self, epoch: int, proofs: Sequence[Proof], target: bytes, asked_at: float, now: float) -> None:
        """Handle PONG of a target: if it answers the last question, its process runs."""
        if self._asked.get(target, float("inf")) <= asked_at:
            del self._asked[target]
            self.runs(epoch, proofs, target, now)

    def runs(self, epoch: int, proofs: Sequence[Proof], target: bytes, now: float) -> None:
        """Tell the members that have asked about a process that it runs."""
        for proof in proofs:
            for member in proof.runs(target):
                seat = self._seats.find(member)
                if member == self._seats.host.member:
                    self._port.target_runs(target, now)
                elif seat is not None and seat.conn is not None:
                    runs = frames.Runs(session=self._session, epoch=epoch, member=target)
                    self._port.send(seat.conn, runs)
