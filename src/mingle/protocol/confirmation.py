"""The question that a host asks all members before it seals: are you still there, and do you reach each other? Pure.

CONFIRM goes to every member, with the targets of its node if a mesh is proved, and CONFIRMED comes back
(:class:`~mingle.protocol.phases.Confirming`). The registrar decides what follows.
"""

from __future__ import annotations

from collections.abc import Iterable

from mingle.protocol import mesh_report
from mingle.protocol.admission import Admission
from mingle.protocol.machine import RegistrarPort
from mingle.protocol.mesh_proof import Proof, apart_from
from mingle.protocol.mesh_report import LeftOut
from mingle.protocol.network_choice import Choice, NetworkChoice
from mingle.protocol.phases import Confirming
from mingle.protocol.seats import Seated, Seats
from mingle.wire import frames

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

    def confirmed(
        self,
        state: Confirming,
        seat: Seated,
        failures: Iterable[frames.Failure],
        blocked: frames.Blocked | None,
    ) -> None:
        """Take note that a member, or the host, has confirmed.

        Args:
            state: of the session.
            seat: of the member.
            failures: the targets that it could not reach.
            blocked: what it has found out about its machine.
        """
        state.awaited.discard(seat.member)
        if state.proof is not None:
            state.proof.add(seat.member, failures, blocked, unconfirmed=state.awaited)

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
