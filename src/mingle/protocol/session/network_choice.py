"""The network that a session takes: one that all members share and, where a mesh is asked for, on which it holds. Pure.

The host chooses from the paths that the members have proved to its addresses, before CONFIRM, and lets the nodes dial
each other there (:mod:`mingle.protocol.links.prover`). The confirmations bring newer paths and what could not be
reached, and so either settle the choice or ask for another proof. Paths and failures can change with each epoch, so all
that counts here is bounded: each network is proved once, one of them once more at the end, :data:`MOST_MOVES` limits
how often newer paths can move the session, and :data:`MOST_REPEATS` how often processes that were stopped can repeat a
proof. A running session stays on its network: there each latecomer dials the members, which do not dial it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TypeAlias

from msgspec import Struct

from mingle.protocol.explain import mesh_report
from mingle.protocol.explain.mesh_report import LeftOut
from mingle.protocol.machine import Mesh
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.seating import common_address, reach_matrix
from mingle.protocol.session.seats import Seated, Seats, Stage

LEAST_SECONDS = 0.5
"""The least time for a target that does not answer, if the deadline is near."""
MOST_MOVES = 3
"""How often the mesh is proved on another network because the members have found more paths meanwhile."""
MOST_REPEATS = 5
"""How often a proof is repeated because a process that did not answer has confirmed since."""
READDRESSED_SECONDS = 5.0
"""How long after a change of the host's addresses members without a common one are asked again: where a network is
plugged into several hosts, the interfaces of some come up a moment later."""

# --- what comes out of the confirmations -----------------------------------------------------------------------------


class Chosen(Struct, frozen=True):
    """The session takes this network."""

    address: str
    """The host's address on it."""
    broken: Proof | None = None
    """The mesh that does not hold there, which is only a warning; None: it holds, or none is asked for."""


class KeepApart(Struct, frozen=True):
    """No address of the host is reached by all members, which are to be asked again in a moment."""


class NothingShared(Struct, frozen=True):
    """No address of the host is reached by all members, again; or the latecomer does not reach that of the session."""

    matrix: str = ""
    """Which members reach which of the host's addresses, as text."""


class AnotherProof(Struct, frozen=True):
    """The mesh is to be proved on another network, or on this one again."""


class MeshBroken(Struct, frozen=True):
    """On no network that the members share do all nodes reach each other."""

    proof: Proof


class LeaveOut(Struct, frozen=True):
    """Without these nodes all the others reach each other."""

    left_out: list[LeftOut]


class GiveWay(Struct, frozen=True):
    """The host is the node without which the others reach each other, and they are enough."""

    left_out: LeftOut


Choice: TypeAlias = Chosen | KeepApart | NothingShared | AnotherProof | MeshBroken | LeaveOut | GiveWay


class _Dialing(Struct):
    """What a latecomer was asked to dial. It is kept once the latecomer is a member."""

    proof: Proof
    others: dict[bytes, bool]
    """The processes to whose nodes it has dialed, or was asked to, each with whether it was a member then."""


class NetworkChoice:
    """The choice of a session's network, from the first CONFIRM of an attempt until the session is sealed.

    Args:
        seats: of the session.
        admission: how many members form the session.
        mode: what to do if nodes can't reach each other.
        deadline: when a job that has not formed is an error.
    """

    def __init__(self, seats: Seats, admission: Admission, mode: Mesh, deadline: float) -> None:
        self._seats = seats
        self._admission = admission
        self._mode = mode
        self._deadline = deadline
        self.restart()

    def restart(self) -> None:
        """Forget all proofs: the members may be others now."""
        self._broken: dict[str, Proof] = {}
        """The networks on which the mesh does not hold."""
        self._moves = 0
        """How often newer paths have moved the session to another network."""
        self._repeats = 0
        """How often a proof was repeated."""
        self._apart = False
        """Whether the members have shared no address of the host before."""
        self._dialing: dict[bytes, _Dialing] = {}

    def next_proof(self, now: float) -> Proof | None:
        """Return what is to be proved next; None: nothing."""
        seats, is_mesh, partial = self._seats, self._mode != "off", self._admission.takes_latecomers
        first = None if partial else next(iter(seats.before_host()), None)
        if not (is_mesh or first is not None) or not (partial or seats.is_full):
            return None
        network, last = self._common(without=self._broken), False
        brief = self._broken or not is_mesh
        seconds = mesh_proof.NEXT_NETWORK_SECONDS if brief else mesh_proof.NETWORK_SECONDS
        if network is None:
            # Once more on the first network: a path that was cut for a moment must not end the job.
            network = next((each for each in self._broken if each in seats.host.addresses), None)
            seconds, last = mesh_proof.AGAIN_SECONDS, True
        if network is None:
            return None
        # The error that names the nodes has to come before the deadline.
        seconds = min(seconds, max(LEAST_SECONDS, (self._deadline - now) / 3))
        proof = mesh_proof.begin(
            network,
            seats.host,
            seats.in_order(),
            seconds=seconds,
            last=last,
            is_mesh=is_mesh,
            first=None if first is None else first.member,
        )
        if last:
            proof.suspects = mesh_proof.suspects(self._broken[network])
        return proof if proof.is_needed else None

    def choose(self, proof: Proof | None, now: float) -> Choice:
        """Return the choice, now that all members have confirmed.

        Args:
            proof: what they have proved beforehand; None: nothing.
            now: the current time.
        """
        common = self._common()
        if common is None:
            return self._keep_apart(now)
        if proof is None:
            # Without a next proof there is one node, or no other one takes part.
            return Chosen(common) if self.next_proof(now) is None else AnotherProof()
        if proof.unanswered and not proof.failures:
            self._repeats += 1
            if self._repeats <= MOST_REPEATS:
                return AnotherProof()
            proof.failures.update(proof.unanswered)
        if not proof.is_mesh:
            return Chosen(common)
        if proof.failures:
            if proof.last:
                return self._give_up(proof, common)
            self._broken[proof.network] = proof
            return AnotherProof()
        exhausted = proof.last or self._moves >= MOST_MOVES
        if self._is_common(proof.network):
            # The confirmations can have brought a network that is preferred to the one that was chosen before them.
            if exhausted or proof.network == self._common(without=self._broken):
                return Chosen(proof.network)
        elif exhausted:
            return self._keep_apart(now)
        self._moves += 1
        return AnotherProof()

    def _keep_apart(self, now: float) -> KeepApart | NothingShared:
        host, before, self._apart = self._seats.host, self._apart, True
        # The second time also where no address is new: a host that stood still for a second proved no path.
        if now < host.readdressed_at + READDRESSED_SECONDS or not before:
            return KeepApart()
        return NothingShared(reach_matrix(host, [(str(seat.who), seat.paths) for seat in self._seats.others()]))

    def _give_up(self, proof: Proof, common: str) -> Chosen | MeshBroken | LeaveOut | GiveWay:
        proof.others = tuple(each for each in self._broken if each != proof.network)
        proof.compare(self._broken[proof.network].failures)
        if self._mode == "warn":
            return Chosen(common, proof)
        if not self._admission.takes_latecomers:
            return MeshBroken(proof)
        host, count = self._seats.host.member, len(self._seats.members())
        left_out = mesh_report.left_out(proof, host)
        if not self._admission.enough(count - len(left_out)):
            without_host = mesh_report.left_out(mesh_proof.apart_from(proof, host), host)
            if self._admission.enough(count - 1 - len(without_host)):
                return GiveWay(mesh_report.without(proof, host))
        return LeaveOut(left_out)

    # --- latecomers to a running session ------------------------------------------------------------------------------

    def proof_for(self, latecomer: Seated, network: str) -> Proof | None:
        """Return what a latecomer is to prove on the network of the session; None: nothing."""
        if self._mode == "off":
            return None
        # Those that wait like it may be members before it is; one that has not proved a path there can't be dialed yet.
        others = [
            each
            for each in self._seats.values()
            if not each.is_latecomer or (each.stage > Stage.SEATED and _reaches(each, network))
        ]
        proof = mesh_proof.begin_for(latecomer, network, self._seats.host, others)
        self._dialing[latecomer.member] = _Dialing(proof, {each.member: not each.is_latecomer for each in others})
        return proof if proof.targets(latecomer.member) else None

    def proof_of(self, latecomer: bytes) -> Proof | None:
        """Return what a latecomer was asked to prove."""
        dialing = self._dialing.get(latecomer)
        return None if dialing is None else dialing.proof

    def choose_for(self, latecomer: Seated, network: str, answers: Callable[[bytes], bool]) -> Choice:
        """Return whether a latecomer can be in the session, now that it has confirmed.

        Args:
            latecomer: that has confirmed.
            network: the host's address on the network of the session.
            answers: returns whether a member was alive a moment ago.
        """
        proof, broken = self.proof_of(latecomer.member), False
        if proof is not None:
            others, failures = self._dialing[latecomer.member].others, list(proof.failures.values())
            members = {seat.member for seat in self._seats.members()}
            proof.failures = {pair: each for pair, each in proof.failures.items() if each.member in members}
            broken = bool(proof.failures)
            # That is no path to complain of: a member whose machine has just failed is still counted, for a latecomer
            # that was stopped nobody has waited, and one that has come back can have another address.
            doubtful = any(not (others.get(each.member) and answers(each.member)) for each in proof.failures.values())
            for member in proof.unreached(failures) if self._mode == "on" else ():
                others.pop(member, None)
            if doubtful:
                return AnotherProof()
        if not _reaches(latecomer, network):
            return NothingShared()
        if proof is not None and broken and self._mode == "on":
            return LeaveOut([mesh_report.without(proof, latecomer.member)])
        return AnotherProof() if self.lacks_members(latecomer) else Chosen(network, proof if broken else None)

    def lacks_members(self, latecomer: Seated) -> bool:
        """Return whether there is a member that has not dialed the latecomer's node, nor the latecomer its node."""
        pairs = [(latecomer.member, seat.member) for seat in self._seats.members()] if self._mode != "off" else []
        return any(not self._has_dialed(one, other) and not self._has_dialed(other, one) for one, other in pairs)

    def _has_dialed(self, one: bytes, other: bytes) -> bool:
        return one in self._dialing and other in self._dialing[one].others

    def forget(self, member: bytes) -> None:
        """Take note that a process is gone; it can come back with another address."""
        self._dialing.pop(member, None)
        for each in self._dialing.values():
            each.others.pop(member, None)

    # --- all ---------------------------------------------------------------------------------------------------------

    def _common(self, without: Container[str] = ()) -> str | None:
        return common_address(self._seats.host, self._seats.paths(), without=without)

    def _is_common(self, address: str) -> bool:
        others = [each for each in self._seats.host.addresses if each != address]
        return self._common(without=others) is not None


def _reaches(seat: Seated, address: str) -> bool:
    return any(path.host_address == address for path in seat.paths)
