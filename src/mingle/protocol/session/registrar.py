"""The registrar of a session: it gives out the seats, and confirms, seals and forms the session. Pure.

A session forms by a two-phase commit: SEALED asks every member to prepare, ACK is its vote, GO is the commit, and VOID
is the abort. Only this module moves a session from one state to the next
(:data:`mingle.protocol.session.phases.TRANSITIONS`):

* Before GO every member has said, in this epoch, that it is still there (CONFIRMED) and that it has reached the store
  (ACK). The loss of a member in between voids the epoch, unless it goes to lead, and the number of a voided epoch is
  never used again.
* GO is decided once per session. :class:`Committed` is final.
* A member is known by its member id, and proves that it holds its seat by the seat's *token*: with both on another
  connection, it replaces the old one. If another process claims a taken rank, or a member id without the token, the
  registrar pings the member in that seat, and a member that answers keeps the seat. Every other frame of a seat counts
  on its connection only.

What it asks before a step: an :class:`~mingle.protocol.session.admission.Admission` how many members form the session,
:class:`~mingle.protocol.session.applications.Applications` what becomes of a JOIN, a
:class:`~mingle.protocol.session.network_choice.NetworkChoice` on which network all members reach each other, and a
:class:`~mingle.protocol.session.handover.Handover` which member has to lead in place of this host. A
:class:`~mingle.protocol.session.commit.Commit` sends the members the frames of each step.
:class:`~mingle.protocol.session.latecomers.Latecomers` come after CONFIRM, and have commits of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard

import msgspec

from mingle.protocol.explain import mesh_report
from mingle.protocol.explain.mesh_report import LeftOut
from mingle.protocol.machine import Mesh
from mingle.protocol.membership import RETURN_SECONDS
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.applications import Applications, Challenge
from mingle.protocol.session.commit import Commit, Connections
from mingle.protocol.session.handover import Handover
from mingle.protocol.session.latecomers import ADMITTED_SECONDS, Latecomers
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.network_choice import (
    AnotherProof,
    Chosen,
    GiveWay,
    KeepApart,
    LeaveOut,
    MeshBroken,
    NetworkChoice,
    NothingShared,
)
from mingle.protocol.session.phases import (
    DOES_NOT_LEAD,
    HELD,
    TRANSITIONS,
    Acknowledging,
    Apart,
    Committed,
    Confirming,
    HandingOver,
    NoNetwork,
    Open,
    Placed,
    Sealing,
    State,
    Stored,
)
from mingle.protocol.session.roster import History, rank_of, roster, status, status_version
from mingle.protocol.session.seating import place
from mingle.protocol.session.seats import HostSeat, Seated, Seats, Stage
from mingle.protocol.states import transition
from mingle.text import few
from mingle.wire import frames

CONFIRM_AGAIN_SECONDS = 0.5
"""How long the host waits before it asks members again that share no address of it."""


class RegistrarPort(Protocol):
    """What a registrar calls beside its members' connections: the store, and the host."""

    def open_store(self, epoch: int, address: str, now: float) -> None:
        """Open the store and call the registrar's ``store_opened``."""

    def prove_mesh(self, epoch: int, proof: Proof, now: float) -> None:
        """Open connections to the host's own targets, and call the registrar's ``confirmed`` for it."""

    def end_without_network(self, end: NothingShared | MeshBroken | GiveWay) -> None:
        """Fail, or close for those that can form the job without this host."""

    def notice(self, text: str, *, warns: bool = True) -> None:
        """Show a message about the job."""

    def reopened(self, reason: str, now: float) -> None:
        """Announce that an epoch was voided and the session takes members again."""

    def formed(self) -> None:
        """Take note of GO."""

    def member_lost(self, who: frames.ProcessInfo, how: str) -> None:
        """Handle the loss of a member after GO and before its process group existed: the others can't go on."""


class Registrar:
    """The seats of a session and its state. The only place that decides about membership.

    Args:
        session: its name.
        host: the host's own seat.
        port: what the registrar calls.
        connections: of the members, and of those that apply.
        admission: how many members form the session, and which newcomers fit in.
        mesh: what to do if nodes can't reach each other.
        deadline: when a job that has not formed is an error.
    """

    def __init__(
        self,
        session: bytes,
        host: HostSeat,
        port: RegistrarPort,
        connections: Connections,
        admission: Admission,
        *,
        mesh: Mesh = "off",
        deadline: float = float("inf"),
    ) -> None:
        self.session = session
        self.admission = admission
        self.state: State = Open()
        self.seats = admission.seats = Seats(host, admission.world_size)
        self.history = History()
        self.handover = Handover(self.seats, admission)
        self.unproved = ""
        """What the proof of the mesh does not show."""
        self.held = False
        """Whether another session may hold this job: this one takes members, but confirms and commits nothing."""
        self._port = port
        self._connections = connections
        self._network = NetworkChoice(self.seats, admission, mesh, deadline)
        self._applications = Applications(self.seats, admission, refuse=self._refuse, ping=connections.ping)
        self._commit = Commit(session, self.seats, admission, connections)
        self._latecomers = Latecomers(
            self.seats,
            admission,
            self._network,
            self._commit,
            turn_away=self._turn_away,
            leave_out=self._leave_out,
            tell=self._tell,
        )

    # --- what is known ---------------------------------------------------------------------------------------------

    def status(self) -> frames.Status:
        """Return the state of the session, for people."""
        named, lacks = self.admission.takes_latecomers, self.admission.lacks()
        return status(self.state, self.seats, self.history, lacks=lacks, named=named)

    def roster(self) -> list[frames.Seat]:
        """Return the seats of all members, in order of rank; none before the members have their places."""
        state = self.state
        return roster(self.seats.members(), state.places, state.store_address) if isinstance(state, Placed) else []

    def status_version(self) -> tuple[object, ...]:
        """Return a value that changes whenever the status changes."""
        return (*status_version(self.state, self.seats, self.history), self.admission.lacks())

    # --- coming ----------------------------------------------------------------------------------------------------

    def join(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        """Handle JOIN: a connection that has proved the session asks for a seat."""
        if isinstance(self.state, HandingOver) and member == self.state.leader and member not in self.seats:
            self._void(DOES_NOT_LEAD, f"{applicant.who} does not lead the job", now)
        match self._applications.judge(conn, member, applicant, self.state, now):
            case "seat it":
                self._seat(conn, member, applicant, now)
            case "it comes back":
                self._come_back(self.seats[member], conn, applicant, now)
            case "it joins anew":
                old = self.seats[member].conn
                assert old is not None
                self._drop(old, "it came back on another connection", now)
                self.join(conn, member, applicant, now)

    def _refuse(self, conn: int, applicant: frames.Join, refusal: frames.Refused) -> None:
        self.history.refused(applicant, refusal)
        self._connections.send(conn, refusal)
        self._connections.hang_up(conn)

    def _seat(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        admit_by = float("inf") if isinstance(self.state, Open) else now + ADMITTED_SECONDS
        seat = Seated(member, conn, applicant, applicant.paths, joined_at=now, admit_by=admit_by)
        self._commit.joined(seat, conn, self.state)
        self.seats.take(seat)
        if not seat.is_latecomer:
            self.history.came(applicant)
            self.admission.came(now)
        self._advance(now)

    def _come_back(self, seat: Seated, conn: int, applicant: frames.Join, now: float) -> None:
        """Move a member to its new connection: its old one is dead, even if no end of it was seen."""
        if seat.conn is not None:
            self._connections.hang_up(seat.conn)
        self.seats.move(seat, conn)
        self._commit.joined(seat, conn, self.state)
        if isinstance(self.state, Committed):
            # It has acknowledged, so it lacks only this one frame.
            self.state.lost.pop(seat.member, None)
            self._commit.go([seat], self.state.epoch)
            return
        seat.paths = applicant.paths
        self._void("a member has come back", f"{seat.who} lost its connection and came back", now)

    # --- going -----------------------------------------------------------------------------------------------------

    def lost(self, conn: int, now: float, reason: str = "its connection closed") -> None:
        """Handle the end of a connection."""
        self._applications.withdraw(conn)
        seat = self.seats.at(conn)
        if seat is None:
            return
        if isinstance(self.state, Committed) and not self.admission.takes_latecomers:
            self.seats.disconnect(seat)
            if not seat.done:
                self.state.lost[seat.member] = now, reason
            return
        self._free(seat)
        if not seat.is_latecomer:
            self.history.gone(seat, reason)
            if isinstance(self.state, Committed):
                del self.state.places[seat.member]
            else:
                self._void("a member is lost", f"{seat.who} is gone: {reason}", now)
        # Only after the VOID: a newcomer never enters an epoch that it has not confirmed.
        for challenge in self._applications.take(seat.member):
            self.join(challenge.conn, challenge.member, challenge.applicant, now)

    def _free(self, seat: Seated) -> None:
        self.admission.gone(seat.member)
        self.seats.free(seat)
        self._network.forget(seat.member)

    def _turn_away(self, seat: Seated, refusal: frames.Refused) -> None:
        """Refuse its seat to a process that has one."""
        assert seat.conn is not None
        self._free(seat)
        self._refuse(seat.conn, seat.applicant, refusal)

    def _drop(self, conn: int, reason: str, now: float) -> None:
        self._connections.hang_up(conn)
        self.lost(conn, now, reason)

    def left(self, conn: int, now: float, reason: str) -> None:
        """Handle LEAVE. After GO it is no loss if the member was ready, and one at once if it was not."""
        seat = self.seats.at(conn)
        self.lost(conn, now, reason)
        if seat is not None and isinstance(self.state, Committed):
            if seat.done:
                self.admission.ended_by_member()
            if seat.member in self.state.lost:  # without READY: the member left before it heard GO
                self._member_lost(self.state, seat)

    def _member_lost(self, state: Committed, seat: Seated) -> None:
        _, how = state.lost.pop(seat.member)
        seat.done = True
        who = msgspec.structs.replace(seat.applicant.who, rank=rank_of(seat, state.places))
        self._port.member_lost(who, how)

    # --- frames of the members -------------------------------------------------------------------------------------

    def confirmed(self, conn: int | None, frame: frames.Confirmed, now: float) -> None:
        """Handle CONFIRMED: a process is still there, has proved these paths, and has dialed its targets.

        Args:
            conn: its connection; None: it is the host itself.
            frame: what it says.
            now: the time.
        """
        state, seat = self.state, self.seats.own if conn is None else self.seats.at(conn)
        if seat is None or seat.stage is not Stage.ASKED or not self.counts(frame.epoch):
            return
        seat.stage, seat.paths = Stage.CONFIRMED, frame.paths
        proof = state.proof if isinstance(state, Confirming) else self._network.proof_of(seat.member)
        if proof is not None:
            unconfirmed = {each.member for each in self.seats.behind(Stage.CONFIRMED)} if frame.failures else ()
            proof.add(seat.member, frame.failures, frame.blocked, unconfirmed=unconfirmed)
        self._advance(now)

    def counts(self, epoch: int) -> bool:
        """Return whether an answer of this epoch counts: one of a voided epoch can still be on its way."""
        return epoch == self.state.epoch

    def acknowledged(self, conn: int, now: float) -> None:
        """Handle ACK: a process has reached the store.

        The ACK is one of this epoch: the process has confirmed it on the same connection, and all that it sent before
        CONFIRMED was read before it was sent SEALED.
        """
        seat = self.seats.at(conn)
        if seat is not None and seat.stage is Stage.SEALED:
            in_time = self.admission.acknowledged(seat.member, now)
            # A latecomer that was too late is asked again; for the others can_go() counts who was in time.
            seat.stage = Stage.ACKNOWLEDGED if in_time or not seat.is_latecomer else Stage.SEATED
            self._advance(now)

    def hosts_itself(self, conn: int, now: float) -> None:
        """Handle HOST_SEEN of a member about its own session: it is a member of this one no more."""
        seat, state = self.seats.at(conn), self.state
        if seat is None or state.sealed:
            return
        if isinstance(state, HandingOver) and seat.member == state.leader:
            self._free(seat)
            self._connections.hang_up(conn)
        else:
            self._drop(conn, "it hosts a session of its own", now)

    def first_not_reached(self, member: bytes, now: float) -> None:
        """Take note that this host can't reach the session of a member that it has asked to lead."""
        if member not in self.handover.asked:
            return
        self.handover.unreached.add(member)
        if isinstance(self.state, HandingOver) and self.state.leader == member:
            self._void(DOES_NOT_LEAD, "the first in order can't be reached", now)

    def pong(self, conn: int, asked_at: float, now: float, *, proving: bool = False) -> None:
        """Handle PONG: the member has lived since it was asked, so the process that claims its seat is refused.

        Args:
            conn: its connection.
            asked_at: when the PING was sent that it has answered.
            now: the time.
            proving: whether it is still trying to reach the store.
        """
        seat, state = self.seats.at(conn), self.state
        if seat is None:
            return
        self._applications.answered(seat, asked_at)
        if not isinstance(state, Acknowledging):
            return
        if proving and self.admission.waits_for_proofs:
            seat.due = now + self.admission.acknowledge_seconds
        if seat.stage is Stage.DOUBTED and asked_at >= seat.bound_at:
            seat.stage, seat.bound_at = Stage.ACKNOWLEDGED, asked_at
            self._advance(now)

    def ready(self, conn: int) -> None:
        """Handle READY: the member's process group stands, so its end is no loss from now on."""
        seat = self.seats.at(conn)
        if seat is not None and seat.stage is Stage.IN:
            seat.done = True

    # --- the host --------------------------------------------------------------------------------------------------

    def advance(self, now: float, *, held: bool) -> None:
        """Take the steps from Open to GO that are due; none while another session may hold the job."""
        self.held = held
        self._advance(now)

    def store_opened(self, epoch: int, port: int, token: str, now: float) -> None:
        """Send every member its place and the store's address: the store of this epoch listens."""
        state = self.state
        if not isinstance(state, Sealing) or state.epoch != epoch:
            return
        seconds = self.admission.acknowledge_seconds
        acknowledging = Acknowledging(
            **msgspec.structs.asdict(state),
            store_port=port,
            store_token=token,
            ends=now + seconds,
            ask_at=now + seconds / 2,
        )
        self.state = transition(TRANSITIONS, state, "the store is open", acknowledging)
        self.admission.seal()
        self._commit.seal(acknowledging, acknowledging.places, now, unproved=self.unproved)
        self.admission.acknowledged(self.seats.host.member, now)
        self.seats.own.stage = Stage.ACKNOWLEDGED
        self._advance(now)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        times = [self._applications.next_timer(), *(seat.admit_by for seat in self._latecomers.waiting())]
        match self.state:
            case Open() if self.admission.due is not None:
                times.append(self.admission.due)
            case Confirming(ends=ends) | HandingOver(ends=ends):
                times.append(ends)
            case Acknowledging(ask_at=ask_at, ends=ends):
                times += [ask_at, ends]
            case Apart(again_at=again_at):
                times.append(again_at)
            case Committed(lost=lost):
                times += [since + RETURN_SECONDS for since, _ in lost.values()]
        due = min(times)
        return due if due < float("inf") else None

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        for seat in self._latecomers.waiting():
            if now >= seat.admit_by and seat.conn is not None:
                self._drop(seat.conn, "it took too long to join", now)
        for member in self._applications.unanswered(now):
            holder = self.seats.get(member)
            if holder is not None and holder.conn is not None:
                self._drop(holder.conn, "it did not answer when another process claimed its seat", now)
        state = self.state
        if isinstance(state, Confirming | Acknowledging) and now >= state.ends:
            self._overdue(state, now)
        elif isinstance(state, Apart) and now >= state.again_at:
            self._ask_to_confirm("the pause is over", now)
        elif isinstance(state, Acknowledging) and now >= state.ask_at:
            state.ask_at = now + self.admission.acknowledge_seconds / 2
            for seat in self.seats.behind(state.barrier) if self.admission.waits_for_proofs else ():
                if seat.conn is not None:
                    self._connections.ping(seat.conn, now)
        elif isinstance(state, HandingOver) and now >= state.ends:
            if state.leader not in self.seats:
                self.handover.unreached.add(state.leader)
            self._void(DOES_NOT_LEAD, "the first in order does not answer", now)
        elif isinstance(state, Committed):
            for member in [each for each, (since, _) in state.lost.items() if now >= since + RETURN_SECONDS]:
                self._member_lost(state, self.seats[member])
        self._advance(now)

    def _overdue(self, state: Confirming | Acknowledging, now: float) -> None:
        """Drop the members that have not confirmed in time, or void the epoch without the ACK of a member."""
        behind = self.seats.behind(state.barrier)
        if not behind:
            # Open again, it can close for the other session.
            self._void(HELD, "this job is held by another session", now)
        elif isinstance(state, Confirming):
            state.ends = now + CONFIRM_AGAIN_SECONDS  # for this host itself, if it alone still dials
            for seat in behind:
                if seat.conn is not None:
                    self._drop(seat.conn, "it did not confirm in time", now)
        elif any(now >= seat.due for seat in behind):
            silent = few((seat.who for seat in behind), "; ")
            lack = f"no acknowledgement within {self.admission.acknowledge_seconds:.0f} s from {silent}"
            self._void("not all have acknowledged in time", lack, now)
        else:
            state.ends = min(seat.due for seat in behind)

    # --- from state to state -----------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Go on as far as nothing more is awaited."""
        if isinstance(self.state, Open) and self.admission.complete(now) and not self.held:
            self._ask_to_confirm("the members are complete", now)
        if self.may_seal(self.state):
            self._seal(self.state, now)
        if self.may_go(self.state):
            if not self.admission.can_go(now):
                self._void("not all have acknowledged in time", "the acknowledgements came too late", now)
            elif not self._asks_again(self.state, now):
                self._go(self.state, now)
        if isinstance(self.state, Committed):
            self._latecomers.advance(self.state, now)

    def _asks_again(self, state: Acknowledging, now: float) -> bool:
        """Ask members again that can have left this session since they acknowledged; return whether there are any.

        A member whose connection broke stays with the session for a while. This host can have been stopped for longer,
        and reads the acknowledgement then before it sees the end of the connection.
        """
        if self.admission.takes_latecomers:
            return False  # leases tell
        doubted = [seat for seat in self.seats.others() if seat.bound_at <= now - RETURN_SECONDS]
        for seat in doubted:
            assert seat.conn is not None
            seat.stage, seat.bound_at = Stage.DOUBTED, now
            state.ends = seat.due = now + self.admission.acknowledge_seconds
            self._connections.ping(seat.conn, now)
        return bool(doubted)

    def may_seal(self, state: State) -> TypeGuard[Confirming]:
        """Return whether all members have confirmed."""
        return isinstance(state, Confirming) and self.seats.have_come_to(state.barrier) and not self.held

    def may_go(self, state: State) -> TypeGuard[Acknowledging]:
        """Return whether all members have acknowledged."""
        return isinstance(state, Acknowledging) and self.seats.have_come_to(state.barrier) and not self.held

    def next_epoch(self) -> int:
        """Return the number of the next epoch, which was never used in this session."""
        return self.state.epoch + 1

    def _ask_to_confirm(self, event: str, now: float) -> None:
        if isinstance(self.state, Open):
            self._network.restart()  # the members may be others now
        seats, proof, epoch = self.seats, self._network.next_proof(now), self.next_epoch()
        confirming = Confirming(epoch, now + self.admission.confirm_seconds, proof=proof)
        self.state = transition(TRANSITIONS, self.state, event, confirming)
        # The host has no question to answer, but its own targets to dial.
        seats.own.stage = Stage.CONFIRMED if proof is None else Stage.ASKED
        for seat in seats.others():
            self._commit.ask(seat, epoch, proof)
        if proof is not None:
            self._port.prove_mesh(epoch, proof, now)

    def _ask_to_lead(self, state: Confirming, first: Seated, now: float) -> None:
        self.handover.asked.add(first.member)
        handing = HandingOver(state.epoch, first.member, now + self.admission.acknowledge_seconds)
        event = "all have confirmed, and another member is the first: LEAD"
        self.state = transition(TRANSITIONS, state, event, handing)
        self._commit.lead(first, state.epoch)

    def _seal(self, state: Confirming, now: float) -> None:
        seats, epoch = self.seats, state.epoch
        address = self._settle_network(state, now)
        if address is None:
            return
        if (first := self.handover.first(state.proof)) is not None:
            self._ask_to_lead(state, first, now)
            return
        if state.proof is not None and state.proof.is_mesh and not state.proof.failures:
            self._note_unproved(state.proof)
        # The paths of JOIN can be older than a change of the member's addresses.
        ordered = seats.in_order()
        applicants = [msgspec.structs.replace(seat.applicant, paths=seat.paths) for seat in ordered]
        places = dict(zip((seat.member for seat in ordered), place(applicants, seats.size), strict=True))
        sealing = Sealing(epoch=epoch, places=places, store_address=address, since=now)
        self.state = transition(TRANSITIONS, state, "all have confirmed", sealing)
        self._port.open_store(epoch, address, now)

    def _settle_network(self, state: Confirming, now: float) -> str | None:
        """Return the host's address on the network of the job; None: another state goes on without one."""
        match self._network.choose(state.proof, now):
            case Chosen(address=address, broken=broken):
                if broken is not None and self.handover.first(broken) is None:  # else the first shows it
                    self._port.notice(mesh_report.warning(broken))
                return address
            case KeepApart():
                pause = Apart(epoch=state.epoch, again_at=now + CONFIRM_AGAIN_SECONDS)
                self.state = transition(TRANSITIONS, state, "no network is common to all", pause)
            case AnotherProof():
                self._ask_to_confirm("the mesh is to be proved again", now)
            case LeaveOut(left_out=left_out):
                self._leave_out(left_out, now)
            case NothingShared() | MeshBroken() | GiveWay() as end:
                self.state = transition(TRANSITIONS, state, "no network is left", NoNetwork(epoch=state.epoch))
                self._port.end_without_network(end)
        return None

    def _note_unproved(self, proof: Proof) -> None:
        """Say what the proof does not show; once, since elastic jobs have a proof for each round."""
        before, self.unproved = self.unproved, mesh_report.unproved(proof)
        if self.unproved not in ("", before):
            self._port.notice(self.unproved, warns=bool(proof.hidden))

    def _leave_out(self, nodes: Sequence[LeftOut], now: float) -> None:
        """Refuse their seats to nodes without which all the others reach each other."""
        claimants: list[Challenge] = []
        for left_out in nodes:
            self._tell(left_out)
            claimants += self._applications.take(left_out.node.member)
            self._turn_away(self.seats[left_out.node.member], left_out.refusal(self.seats.host.applicant.who))
        self._void("nodes that reach not all others are left out", "some nodes can't reach each other", now)
        for challenge in claimants:
            self.join(challenge.conn, challenge.member, challenge.applicant, now)

    def _tell(self, left_out: LeftOut) -> None:
        """Say which nodes another one does not reach, unless it was said lately."""
        if self.admission.leave_out(str(left_out)):
            self._port.notice(str(left_out))

    def _go(self, state: Acknowledging, now: float) -> None:
        kept = msgspec.structs.asdict(state)
        committed = Committed(**{name: kept[name] for name in Stored.__struct_fields__})
        self.state = transition(TRANSITIONS, state, "all have acknowledged", committed)
        self.admission.formed()
        self._commit.go(self.seats.members(), committed.epoch)
        for challenge in self._applications.take_all():
            # The member in the seat has acknowledged, which answers the challenge, too.
            self.join(challenge.conn, challenge.member, challenge.applicant, now)
        self._port.formed()

    def _void(self, event: str, reason: str, now: float) -> None:
        """Void the epoch, if members were asked to confirm it, and go on."""
        if isinstance(self.state, (Confirming, Apart, HandingOver, Sealing, Acknowledging)):
            opened = Open(epoch=self.state.epoch)
            self.state = transition(TRANSITIONS, self.state, event, opened)
            if event != DOES_NOT_LEAD:
                self.handover.unreached.clear()
            self._commit.void(opened.epoch, reason)
            self._port.reopened(reason, now)
        self._advance(now)
