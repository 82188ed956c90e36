"""The registrar of a session: it gives out the seats, and confirms, seals and forms the session. Pure.

A session forms by a two-phase commit: SEALED asks every member to prepare, ACK is its vote, GO is the commit, and VOID
is the abort. Only this module moves a session through its phases::

    OPEN ──all seats taken──▶ CONFIRMING ──all confirmed──▶ SEALING ──store open──▶ SEALED ──all acked──▶ RUNNING
      ▲                           │                            │                       │
      └────────── VOID ───────────┴────────────────────────────┴───────────────────────┘

* Before GO every member has said, in this epoch, that it is still there (CONFIRMED) and that it has reached the store
  (ACK). The loss of a member in between voids the epoch, and the number of a voided epoch is never used again.
* GO is decided once per session. RUNNING is terminal.
* A member is known by its member id, and proves that it holds its seat by the seat's *token*: with both on another
  connection, it replaces the old one. If another process claims a taken rank, or a member id without the token, the
  registrar pings the member in that seat, and a member that answers keeps the seat. Every other frame counts on the
  connection of the seat only.

An :class:`Admission` decides how many members form the session, and whether it takes *latecomers* after that. A
latecomer goes through CONFIRM, SEALED, ACK and GO by itself and voids nothing.

Between the arrival of the last rank and GO every rank has to reach the store. So while the session waits for members,
the host opens its store where the present members would have it, and the members connect (STORE). This decides nothing:
SEALED alone says where the store is.
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from mingle.protocol import reports
from mingle.protocol.admission import Admission, Challenge, Challenges, HostSeat, Seated
from mingle.protocol.machine import RegistrarPort, roster_digest
from mingle.protocol.seating import common_address, place, reach_matrix
from mingle.wire import frames
from mingle.wire.authentication import same_token

CHALLENGE_SECONDS = 1.0
"""How long a seated member has to answer when another process claims its seat."""
RETURN_SECONDS = 5.0
"""How long a member whose connection broke after GO can take to come back."""
ADMITTED_SECONDS = 30.0
"""How long a latecomer can take from JOIN to ACK; it can be bound to another session for a third of that time."""
AHEAD_SECONDS = 0.25
"""How long no member must have come before the store is opened ahead: each newcomer can change the store's place."""
READDRESSED_SECONDS = 5.0
"""How long after a change of the host's addresses members without a common one are asked again: where a network is
plugged into several hosts, the interfaces of some come up a moment later."""
CONFIRM_AGAIN_SECONDS = 0.5
"""The time between two such questions."""
# Bounds against a rank that crashes and restarts in a loop, so that STATUS fits into one frame whatever the names are.
REMEMBERED_DEPARTURES = 16
REMEMBERED_TEXT = 256
"""The number of characters kept of each departure and refusal."""


class Phase(enum.Enum):
    """The phase of a session."""

    OPEN = "open"
    CONFIRMING = "confirming"
    SEALING = "sealing"
    SEALED = "sealed"
    RUNNING = "running"

    @property
    def sealed(self) -> bool:
        """Whether the members are fixed, but for latecomers."""
        return self in (Phase.SEALING, Phase.SEALED, Phase.RUNNING)


class Registrar:
    """The seats of a session and its phase. The only place that decides about membership.

    Args:
        session: its name.
        host: the host's own seat.
        port: what the registrar calls.
        admission: how many members form the session, and which newcomers fit in.
    """

    def __init__(self, session: bytes, host: HostSeat, port: RegistrarPort, admission: Admission) -> None:
        self.session = session
        self.host = host
        self.admission = admission
        self.world_size = admission.world_size
        self.phase = Phase.OPEN
        self.epoch = 0
        self.held = False
        """Whether another session may hold this job: this one takes members, but confirms and commits nothing."""
        self.seats = {host.member: Seated(host.member, None, host.applicant, host.applicant.paths)}
        self.latecomers: dict[bytes, Seated] = {}
        """Agents that joined after CONFIRM. They are not in the job yet."""
        self.places: dict[bytes, frames.Place] = {}
        self.store_address = ""
        self.departures: deque[str] = deque(maxlen=REMEMBERED_DEPARTURES)
        self.refusals: deque[str] = deque(maxlen=REMEMBERED_DEPARTURES)
        self.departed_ranks: set[int] = set()
        self._port = port
        self._conns: dict[int, bytes] = {}
        self._ranks = {} if host.applicant.rank is None else {host.applicant.rank: host.member}
        """The member that holds each given rank."""
        self._awaited: set[bytes] = set()
        """Those that have not confirmed, or not acknowledged, in this epoch."""
        self._phase_ends = float("inf")
        """By when CONFIRMING or SEALED must be over."""
        self._readdressed_at = float("-inf")
        """When the host's addresses have changed."""
        self._confirm_again_at: float | None = None
        """When to ask all to confirm again, since they share no address of the host yet."""
        self._asked_again = False
        """Whether they have been asked again, so that each has proved its paths a second time."""
        self._lost: dict[bytes, tuple[float, str]] = {}
        """When and how members were lost after GO."""
        self._challenges = Challenges()
        self._store = ("", 0, "")
        """The sealed store's address, port and token."""
        self._prepare_at: float | None = None
        """When to open the store ahead."""
        self._prepared = ""
        """The address where the store was last asked for ahead."""
        self._told_store: set[tuple[int, str, int]] = set()
        """Which of the present members were told which store, last."""
        admission.seats = self.seats

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def assigned(self) -> bool:
        """Whether this session assigns the ranks."""
        return self.host.applicant.rank is None

    @property
    def missing(self) -> tuple[int, ...]:
        """The given ranks that never came."""
        if self.assigned:
            return ()
        return tuple(
            rank for rank in range(self.world_size) if rank not in self._ranks and rank not in self.departed_ranks
        )

    @property
    def is_full(self) -> bool:
        """Whether all seats are taken."""
        return len(self.seats) + len(self.latecomers) >= self.world_size

    @property
    def all_ready(self) -> bool:
        """Whether every connected member has said READY: its process group stands."""
        return all(seat.done or seat.conn is None for seat in self._others())

    def is_surplus(self, newcomer: frames.ProcessInfo, now: float) -> bool:
        """Return whether a newcomer is certainly one too many."""
        return self.phase is Phase.RUNNING and self.admission.is_surplus(newcomer, now)

    def status(self) -> frames.Status:
        """Return the state of the session, for people."""
        waiting = (self._rank_of(self.seats[member]) for member in self._awaited)
        present = [str(who)[:REMEMBERED_TEXT] for who in self.whos()[:32]] if self.admission.takes_latecomers else []
        return frames.Status(
            joined=len(self.seats),
            world_size=self.world_size,
            missing=self.missing[:4096],
            departed=tuple(sorted(self.departed_ranks))[:4096],
            left=tuple(self.departures),
            refused=tuple(self.refusals),
            phase=self.phase.value,
            unconfirmed=tuple(sorted(rank for rank in waiting if rank is not None))[:4096],
            present=tuple(present),
            lacks=self.admission.lacks(),
            hosts="" if self.is_full else self._hosts(),
        )

    def _hosts(self) -> str:
        """Return the host names of the members, in the order in which they came."""
        return reports.few(dict.fromkeys(seat.applicant.who.hostname or "unknown" for seat in self.seats.values()))

    def roster(self) -> list[frames.Seat]:
        """Return the seats of all members, in order of rank. Call it only once the session is sealed."""
        seats = []
        for member, seat in self.seats.items():
            where = self.places[member]
            seats.append(
                frames.Seat(
                    rank=where.rank,
                    local_rank=where.local_rank,
                    node_rank=where.node_rank,
                    hostname=seat.applicant.who.hostname,
                    address=self._address_of(seat),
                    pid=seat.applicant.who.pid,
                )
            )
        return sorted(seats, key=lambda seat: seat.rank)

    def _address_of(self, seat: Seated) -> str:
        for path in seat.paths:
            if path.host_address == self.store_address:
                return path.local_address
        return seat.applicant.who.address

    def version(self) -> tuple[object, ...]:
        """Return a value that changes whenever the roster changes."""
        return (self.phase, self.epoch, self.store_address, tuple(self.seats), tuple(self.places))

    def status_version(self) -> tuple[object, ...]:
        """Return a value that changes whenever the status changes."""
        gone = tuple(self.departures), tuple(self.refusals), frozenset(self.departed_ranks)
        return (*self.version(), frozenset(self._awaited), *gone, self.admission.lacks())

    def has_seat(self, conn: int) -> bool:
        """Return whether a connection is that of a member or latecomer."""
        return conn in self._conns

    @property
    def all_left(self) -> bool:
        """Whether every other member has said good-bye, or was lost for good."""
        return all(seat.done and seat.conn is None for seat in self._others())

    def member_connections(self) -> list[int]:
        """Return the connections of all members and latecomers."""
        return list(self._conns)

    def whos(self) -> list[frames.ProcessInfo]:
        """Return the members' processes, by rank."""
        everyone = [
            msgspec.structs.replace(seat.applicant.who, rank=self._rank_of(seat)) for seat in self.seats.values()
        ]
        return sorted(everyone, key=lambda who: -1 if who.rank is None else who.rank)

    def _rank_of(self, seat: Seated) -> int | None:
        where = self.places.get(seat.member)
        return where.rank if where else seat.applicant.rank

    def describe_members(self) -> str:
        """Return the members with a seat, as text for an error; cut where it gets long."""
        return reports.few(self.whos(), "; ")[:2048]

    def awaits_store(self, epoch: int) -> bool:
        """Return whether the store asked for in this epoch is still needed."""
        return self.phase is Phase.SEALING and epoch == self.epoch

    def _others(self) -> list[Seated]:
        return [seat for seat in self.seats.values() if seat.member != self.host.member]

    def _holder(self, rank: int | None) -> Seated | None:
        member = None if rank is None else self._ranks.get(rank)
        return None if member is None else self.seats[member]

    def _seat_at(self, conn: int) -> Seated | None:
        return self.seats.get(self._conns.get(conn, b""))

    def _latecomer_at(self, conn: int) -> Seated | None:
        return self.latecomers.get(self._conns.get(conn, b""))

    def _known(self, member: bytes) -> Seated | None:
        return self.seats.get(member) or self.latecomers.get(member)

    # --- coming ----------------------------------------------------------------------------------------------------

    def join(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        """Handle JOIN: a connection that has proved the session asks for a seat."""
        self._challenges.withdraw(conn)
        if member == self.host.member:
            # A forged OFFER can name this session with another host id; the host then joins itself.
            self._port.send(conn, frames.Refused(reason="session", detail="the caller is the host of this session"))
            self._port.hang_up(conn)
            return
        known = self._known(member)
        if known is not None:
            if known.conn == conn:
                return  # it has asked already
            if not same_token(known.token, applicant.token):
                if self._may_lack_token:
                    self._challenge(known, conn, member, applicant, now)
                    return
            elif self._keeps_seat(known):
                self._come_back(known, conn, applicant, now)
                return
            elif known.conn is not None:
                self._refuse_challengers(known)  # none of them must get the seat that is free for a moment
                self._drop(known.conn, "it came back on another connection", now)
        refusal = self._refusal(applicant, now)
        if refusal is not None:
            self._refuse(conn, applicant, refusal)
            return
        holder = self._holder(applicant.rank)
        if holder is None:
            self._seat(conn, member, applicant, now)
        elif holder.conn is None:
            self._refuse(conn, applicant, self._taken(holder))
        else:
            self._challenge(holder, conn, member, applicant, now)

    @property
    def _may_lack_token(self) -> bool:
        """Whether a member that comes back can lack its token, because JOINED was lost with its first connection.

        All members of a sealed session of ranks have confirmed, and so have heard JOINED.
        """
        return not self.phase.sealed or self.admission.takes_latecomers

    def _challenge(self, holder: Seated, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        """Ask the holder of a seat whether it lives, because another process wants the seat."""
        assert holder.conn is not None
        # In a running session leases decide which member is lost: no caller must be able to shorten them.
        deadline = float("inf") if self.phase is Phase.RUNNING else now + CHALLENGE_SECONDS
        self._challenges.add(Challenge(conn, member, applicant, holder.member, deadline))
        self._port.send(holder.conn, frames.Ping())

    def _keeps_seat(self, known: Seated) -> bool:
        """Whether a member that comes back finds its seat again; an agent joins a running session anew."""
        running = self.phase is Phase.RUNNING and self.admission.takes_latecomers
        return not running and known.member not in self.latecomers

    def _refusal(self, applicant: frames.Join, now: float) -> frames.Refused | None:
        host = self.seats[self.host.member].who
        misfit = self.admission.misfit(applicant, assigned=self.assigned)
        if self.phase.sealed and not self.admission.takes_latecomers and (misfit is None or misfit[0] != "kind"):
            # A newcomer of another size waits for the end of this session as well.
            return frames.Refused(reason="running", detail="the session is sealed already", who=host)
        if misfit is not None:
            return frames.Refused(reason=misfit[0], detail=misfit[1], who=host)
        if applicant.rank is None and self.is_full:
            surplus, members = self.is_surplus(applicant.who, now), self.describe_members()
            return frames.Refused(reason="surplus" if surplus else "full", detail=members, who=host)
        return None

    @staticmethod
    def _taken(holder: Seated) -> frames.Refused:
        detail = f"rank {holder.applicant.rank} is held by a live process"
        return frames.Refused(reason="rank taken", detail=detail, who=holder.who)

    def _refuse(self, conn: int, applicant: frames.Join, refusal: frames.Refused) -> None:
        who = msgspec.structs.replace(applicant.who, rank=applicant.rank)
        # These only wait, or come without their token: their settings are right.
        if refusal.reason not in ("running", "full", "surplus", "session"):
            self.refusals.append(f"{who}: {reports.refusal_text(refusal, who.unit)}"[:REMEMBERED_TEXT])
        self._port.send(conn, refusal)
        self._port.hang_up(conn)

    def _seat(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        seat = Seated(member, conn, applicant, applicant.paths, joined_at=now)
        self._conns[conn] = member
        self._send_joined(seat, conn)
        if self.phase is not Phase.OPEN:
            seat.admit_by = now + ADMITTED_SECONDS
            self.latecomers[member] = seat
            self._advance(now)
            return
        self.seats[member] = seat
        if applicant.rank is not None:
            self._ranks[applicant.rank] = member
            self.departed_ranks.discard(applicant.rank)
            # It was started again with the right settings; a process that claimed the rank of another one was not.
            came = f"{applicant.who.unit} {applicant.rank} on "
            kept = (each for each in self.refusals if not each.startswith(came) or ": rank taken (" in each)
            self.refusals = deque(kept, REMEMBERED_DEPARTURES)
        self.admission.came(now)
        self._wait_for_quiet(now)
        self._advance(now)

    def _send_joined(self, seat: Seated, conn: int) -> None:
        self._port.send(conn, frames.Joined(session=self.session, epoch=self.epoch, token=seat.token))
        if self.phase is Phase.OPEN and self.epoch:
            # It may have acknowledged this epoch on a connection that broke before the VOID, and would wait for GO.
            void = frames.Void(session=self.session, epoch=self.epoch, reason="voided before the member came back")
            self._port.send(conn, void)

    def _come_back(self, seat: Seated, conn: int, applicant: frames.Join, now: float) -> None:
        """Move a member to its new connection: its old one is dead, even if no end of it was seen."""
        if seat.conn is not None:
            self._conns.pop(seat.conn, None)
            self._port.hang_up(seat.conn)
        seat.conn = conn
        self._lost.pop(seat.member, None)
        self._conns[conn] = seat.member
        self._refuse_challengers(seat)  # the member lives; the PING went to its old connection
        self._send_joined(seat, conn)
        if self.phase is Phase.RUNNING:
            # It has acknowledged, so it lacks only this one frame.
            self._port.send(conn, frames.Go(session=self.session, epoch=self.epoch))
            return
        seat.paths = applicant.paths
        self._wait_for_quiet(now)
        self._void(f"{seat.who} lost its connection and came back", now)

    # --- going -----------------------------------------------------------------------------------------------------

    def lost(self, conn: int, now: float, reason: str = "its connection closed") -> None:
        """Handle the end of a connection."""
        self._challenges.withdraw(conn)
        member = self._conns.pop(conn, None)
        if member is None:
            return
        if member in self.latecomers:
            self._forget_latecomer(member)
        elif not self._give_up_seat(self.seats[member], now, reason):
            return
        for challenge in self._challenges.take(member):
            self.join(challenge.conn, challenge.member, challenge.applicant, now)

    def _give_up_seat(self, seat: Seated, now: float, reason: str) -> bool:
        """Free the seat of a member that was lost; return False if the seat is kept for a while, or for ever."""
        if self.phase is Phase.RUNNING and not self.admission.takes_latecomers:
            seat.conn = None
            if not seat.done:
                self._lost[seat.member] = now, reason
            return False
        self.admission.gone(seat.member)
        del self.seats[seat.member]
        if seat.applicant.rank is not None:
            del self._ranks[seat.applicant.rank]
            self.departed_ranks.add(seat.applicant.rank)
        self.departures.append(f"{seat.who}: {reason}"[:REMEMBERED_TEXT])
        if self.phase is Phase.RUNNING:
            del self.places[seat.member]
        else:
            # Before its seat is given to another process: a newcomer never enters an epoch that it has not confirmed.
            self._void(f"{seat.who} is gone: {reason}", now)
        return True

    def _drop(self, conn: int, reason: str, now: float) -> None:
        self._port.hang_up(conn)
        self.lost(conn, now, reason)

    def left(self, conn: int, now: float, reason: str) -> None:
        """Handle LEAVE. After GO it is no loss if the member was ready, and one at once if it was not."""
        seat = self._seat_at(conn)
        self.lost(conn, now, reason)
        # Without READY the member left before it heard GO.
        if seat is not None and seat.done and self.phase is Phase.RUNNING:
            self.admission.ended_by_member()
        if seat is not None and seat.member in self._lost:
            self._member_lost(seat)

    def _member_lost(self, seat: Seated) -> None:
        _, how = self._lost.pop(seat.member)
        seat.done = True
        self._port.member_lost(msgspec.structs.replace(seat.applicant.who, rank=self._rank_of(seat)), how)

    # --- frames of the members -------------------------------------------------------------------------------------

    def confirmed(self, conn: int, frame: frames.Confirmed, now: float) -> None:
        """Handle CONFIRMED: a member is still there, and has proved these paths."""
        if frame.epoch != self.epoch:
            return
        seat, latecomer = self._seat_at(conn), self._latecomer_at(conn)
        if latecomer is not None and self.phase is Phase.RUNNING:
            latecomer.paths = frame.paths
            if self.admission.admits(now):
                self._seal_latecomer(latecomer, conn, now)
            else:
                latecomer.asked = False
        elif seat is not None and self.phase is Phase.CONFIRMING:
            seat.paths = frame.paths
            self._awaited.discard(seat.member)
            self._advance(now)

    def acknowledged(self, conn: int, epoch: int, now: float) -> None:
        """Handle ACK: a member has reached the store."""
        if epoch != self.epoch:
            return
        seat, latecomer = self._seat_at(conn), self._latecomer_at(conn)
        if latecomer is not None and self.phase is Phase.RUNNING:
            self._admit(latecomer, conn, now)
        elif seat is not None and self.phase is Phase.SEALED:
            self._acknowledge(seat, now)
            self._advance(now)

    def _acknowledge(self, seat: Seated, now: float) -> None:
        self.admission.acknowledged(seat.member, now)
        seat.acked = self.epoch
        self._awaited.discard(seat.member)

    def pong(self, conn: int) -> None:
        """Handle PONG: the member lives, so another process that claims its seat is refused."""
        seat = self._seat_at(conn) or self._latecomer_at(conn)
        if seat is not None:
            self._refuse_challengers(seat)

    def _refuse_challengers(self, seat: Seated) -> None:
        for challenge in self._challenges.take(seat.member):
            refusal = self._taken(seat)
            if challenge.member == seat.member:
                # It looks further, as a member does whose own answer was still on its way.
                detail = "a live process with this member id has a seat, and its token"
                refusal = frames.Refused(reason="session", detail=detail, who=seat.who)
            self._refuse(challenge.conn, challenge.applicant, refusal)

    def ready(self, conn: int) -> None:
        """Handle READY: the member's process group stands, so its end is no loss from now on."""
        seat = self._seat_at(conn)
        if seat is not None and self.phase is Phase.RUNNING:
            seat.done = True

    # --- the host --------------------------------------------------------------------------------------------------

    def hold(self, held: bool, now: float) -> None:
        """Pause (or continue) the steps from OPEN to GO."""
        self.held = held
        self._advance(now)

    def readdress(self, host: HostSeat, now: float) -> None:
        """Take the host's new addresses. Call it only before the store's address has been chosen."""
        self.host, self._readdressed_at = host, now
        own = self.seats[host.member]
        own.applicant, own.paths = host.applicant, host.applicant.paths

    def store_prepared(self, port: int) -> None:
        """Tell the waiting members that the store listens where :meth:`RegistrarPort.prepare_store` asked for it."""
        if self.phase is not Phase.OPEN or not self._prepared:
            return
        before = self._told_store
        self._told_store = {(conn, self._prepared, port) for conn in self._conns}
        where = frames.Store(session=self.session, address=self._prepared, port=port)
        for conn, _, _ in sorted(self._told_store - before):
            self._port.send(conn, where)

    def store_opened(self, epoch: int, address: str, port: int, token: str, now: float) -> None:
        """Send every member its place and the store's address: the store of this epoch listens."""
        if not self.awaits_store(epoch):
            return
        self.phase, self._phase_ends = Phase.SEALED, now + self.admission.acknowledge_seconds
        self._store = address, port, token
        self._awaited = set(self.seats)
        self.admission.seal()
        self._send_all(self.admission.members())
        digest = roster_digest(self.roster())
        for member, seat in self.seats.items():
            self.admission.sealed(member, now)
            if seat.conn is None:
                self._acknowledge(seat, now)
            else:
                self._port.send(seat.conn, self._sealed(member, digest))
        self._advance(now)

    def _sealed(self, member: bytes, digest: bytes) -> frames.Sealed:
        address, port, token = self._store
        return frames.Sealed(
            session=self.session,
            epoch=self.epoch,
            place=self.places[member],
            store_address=address,
            store_port=port,
            store_token=token,
            roster_digest=digest,
        )

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        times = [self._challenges.next_timer()]
        times += [seat.admit_by for seat in self.latecomers.values()]
        if self.phase is Phase.OPEN:
            times += [due for due in (self._prepare_at, self.admission.due) if due is not None]
        elif self.phase is Phase.CONFIRMING and self._confirm_again_at is not None:
            times.append(self._confirm_again_at)
        elif self.phase is Phase.SEALED or (self.phase is Phase.CONFIRMING and self._awaited):
            times.append(self._phase_ends)
        elif self.phase is Phase.RUNNING:
            times += [since + RETURN_SECONDS for since, _ in self._lost.values()]
        due = min(times)
        return due if due < float("inf") else None

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        for seat in [each for each in self.latecomers.values() if now >= each.admit_by and each.conn is not None]:
            assert seat.conn is not None
            self._drop(seat.conn, "it took too long to join", now)
        for member in self._challenges.unanswered(now):
            holder = self._known(member)
            if holder is not None and holder.conn is not None:
                self._drop(holder.conn, "it did not answer when another process claimed its seat", now)
        if self.phase is Phase.OPEN and self._prepare_at is not None and now >= self._prepare_at:
            self._prepare_at = None
            if self.held:
                self._wait_for_quiet(now)
            elif self._conns:
                self._prepare_store()
        if self._confirm_again_at is not None and now >= self._confirm_again_at:
            self._ask_to_confirm(now)
        if self.phase is Phase.CONFIRMING and now >= self._phase_ends:
            late = [seat.conn for seat in self._others() if seat.member in self._awaited]
            for conn in late:
                assert conn is not None
                self._drop(conn, "it did not confirm in time", now)
        elif self.phase is Phase.SEALED and now >= self._phase_ends:
            silent = reports.few((self.seats[member].who for member in sorted(self._awaited)), "; ")
            if silent:
                lack = f"no acknowledgement within {self.admission.acknowledge_seconds:.0f} s from {silent}"
            else:
                lack = "this job is held by another session"
            self._void(lack, now)
        elif self.phase is Phase.RUNNING:
            for member in [each for each, (since, _) in self._lost.items() if now >= since + RETURN_SECONDS]:
                self._member_lost(self.seats[member])
        self._advance(now)

    # --- the way through the phases --------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        if self.phase is Phase.OPEN and self.admission.complete(now) and not self.held:
            self._ask_to_confirm(now)
            self._prepare_store()
        if self.phase is Phase.CONFIRMING and not self._awaited and not self.held and self._confirm_again_at is None:
            self._seal(now)
        if self.phase is Phase.SEALED and not self._awaited and not self.held:
            if self.admission.can_go(now):
                self._go(now)
            else:
                self._void("the acknowledgements came too late", now)
        if self.phase is Phase.RUNNING:
            self._ask_latecomers(now)

    def _ask_to_confirm(self, now: float) -> None:
        self.phase, self._phase_ends = Phase.CONFIRMING, now + self.admission.confirm_seconds
        self.epoch += 1
        self._awaited, self._confirm_again_at = set(self.seats) - {self.host.member}, None
        self._send_all(frames.Confirm(session=self.session, epoch=self.epoch))

    def _seal(self, now: float) -> None:
        address = self._common_address()
        if address is None and (now < self._readdressed_at + READDRESSED_SECONDS or not self._asked_again):
            # The second time also where no address is new: a host that stood still for a second proved no path.
            self._asked_again, self._confirm_again_at = True, now + CONFIRM_AGAIN_SECONDS
            return
        if address is None:
            named = [(str(seat.who), seat.paths) for seat in self._others()]
            self._port.no_common_network(reach_matrix(self.host, named))
            return
        members = list(self.seats.values())
        self.phase, self.store_address, self._asked_again = Phase.SEALING, address, False
        # The paths of JOIN can be older than a change of the member's addresses.
        applicants = [msgspec.structs.replace(seat.applicant, paths=seat.paths) for seat in members]
        where = place(applicants, self.world_size)
        self.places = {seat.member: spot for seat, spot in zip(members, where, strict=True)}
        self._port.open_store(self.epoch, address, now)

    def _go(self, now: float) -> None:
        self.phase = Phase.RUNNING
        self.admission.formed()
        self._send_all(frames.Go(session=self.session, epoch=self.epoch))
        for challenge in self._challenges.take_all():
            # The member in the seat has acknowledged, which answers the challenge, too.
            self.join(challenge.conn, challenge.member, challenge.applicant, now)
        self.seats[self.host.member].done = True
        self._port.formed()

    def _void(self, reason: str, now: float) -> None:
        if self.phase not in (Phase.CONFIRMING, Phase.SEALING, Phase.SEALED):
            self._advance(now)
            return
        self.phase, self._asked_again = Phase.OPEN, False
        self.places = {}
        self._awaited, self._confirm_again_at = set(), None
        for member in self.seats:
            self.admission.gone(member)
        self._send_all(frames.Void(session=self.session, epoch=self.epoch, reason=reason[:2048]))
        self.seats.update(self.latecomers)
        self.latecomers.clear()
        self._port.reopened(reason, now)
        self._told_store.clear()  # The void seal has used up the connections that were made ahead for it.
        self._wait_for_quiet(now)
        self._advance(now)

    def _wait_for_quiet(self, now: float) -> None:
        if self.admission.store_ahead:
            self._prepare_at = now + AHEAD_SECONDS

    def _prepare_store(self) -> None:
        """Have the store opened where it most likely belongs; the confirmations can still change that."""
        self._prepared = self._common_address() or ""
        if self._prepared:
            self._port.prepare_store(self._prepared)

    def _common_address(self) -> str | None:
        return common_address(self.host, [seat.paths for seat in self._others()])

    def _send_all(self, frame: frames.AnyFrame | None) -> None:
        for seat in self.seats.values():
            if seat.conn is not None and frame is not None:
                self._port.send(seat.conn, frame)

    # --- latecomers ------------------------------------------------------------------------------------------------

    def _ask_latecomers(self, now: float) -> None:
        """Send CONFIRM to the latecomers that wait for it, once the session can take them."""
        for latecomer in self.latecomers.values():
            if not latecomer.asked and self.admission.admits(now):
                assert latecomer.conn is not None
                latecomer.asked = True
                self._port.send(latecomer.conn, frames.Confirm(session=self.session, epoch=self.epoch))

    def _seal_latecomer(self, latecomer: Seated, conn: int, now: float) -> None:
        if self.store_address not in {path.host_address for path in latecomer.paths}:
            detail = f"the store listens on {self.store_address}, which the newcomer has not reached"
            refusal = frames.Refused(reason="network", detail=detail, who=self.host.applicant.who)
            del self._conns[conn]
            self._forget_latecomer(latecomer.member)
            self._refuse(conn, latecomer.applicant, refusal)
            return
        self.places.pop(latecomer.member, None)
        taken = {where.rank for where in self.places.values()}
        free = next(rank for rank in range(self.world_size) if rank not in taken)
        self.places[latecomer.member] = frames.Place(
            rank=free,
            world_size=self.world_size,
            local_rank=0,
            local_world_size=1,
            node_rank=free,
            num_nodes=self.world_size,
        )
        self.admission.sealed(latecomer.member, now)
        members = self.admission.members(joining=1)
        if members is not None:
            self._port.send(conn, members)
        self._port.send(conn, self._sealed(latecomer.member, roster_digest(self.roster())))

    def _admit(self, latecomer: Seated, conn: int, now: float) -> None:
        if latecomer.member not in self.places:
            return
        if not self.admission.admits(now) or not self.admission.acknowledged(latecomer.member, now):
            latecomer.asked = False  # its acknowledgement came too late, or at a bad moment: it is asked again
            return
        latecomer.acked = self.epoch
        self.seats[latecomer.member] = self.latecomers.pop(latecomer.member)
        self._port.send(conn, frames.Go(session=self.session, epoch=self.epoch))

    def _forget_latecomer(self, member: bytes) -> None:
        del self.latecomers[member]
        self.places.pop(member, None)
        self.admission.gone(member)
