"""Who may join, who is refused, when to confirm, seal, void and go: pure logic without sockets or clock.

The theory. A session passes through phases, and only this module moves it::

    OPEN ──all seats taken──▶ CONFIRMING ──all confirmed──▶ SEALING ──store open──▶ SEALED ──all acked──▶ RUNNING
      ▲                           │                            │                       │
      └────────── VOID ───────────┴────────────────────────────┴───────────────────────┘

* Nobody is told GO before every member has said, in this epoch, that it is still there (CONFIRMED) and that it has
  reached the store (ACK). A member lost in between voids the epoch, and a voided epoch number is never used again.
* GO is decided once per session; RUNNING is terminal.
* A member is known by its member id: the same id on another connection replaces the old connection. A *rank* that is
  taken by another id is another matter: the seated one is asked whether it lives, and the living one keeps the seat.

Every method takes the time as an argument and appends decisions, which :meth:`Registrar.decisions` hands out for
somebody else to carry out.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from mingle.protocol.decisions import (
    Decision,
    Deserted,
    Drop,
    Formed,
    NoCommonNetwork,
    OpenStore,
    PrepareStore,
    Reopened,
    Tell,
)
from mingle.protocol.seating import Applicant, common_address, contiguous, place, reach_matrix
from mingle.protocol.seats import REMEMBERED_TEXT, HostSeat, Phase, Seated, Seats, roster_digest
from mingle.protocol.store_ahead import StoreAhead
from mingle.wire import frames
from mingle.wire.datagrams import Kind

CHALLENGE_SECONDS = 1.0
"""How long a seated member has to answer when somebody else claims its rank."""
ACKNOWLEDGE_SECONDS = 10.0
"""How long after SEALED the last ACK may come before the epoch is voided …"""
ACKNOWLEDGE_SECONDS_PER_RANK = 0.01
"""… or so long for each rank, if that is more: the store takes one after another, in about a millisecond."""
RETURN_SECONDS = 5.0
"""How long a member whose connection broke after GO may take to come back."""


class Challenge(Struct):
    """A newcomer that claims a rank whose member is being asked whether it lives."""

    conn: int
    member: bytes
    applicant: frames.Join
    deadline: float
    seat: bytes


class Registrar(Seats):
    """The one decider of a session. See the module's text for its rules."""

    def __init__(self, session: bytes, world_size: int, host: HostSeat, *, kind: Kind = "ranks") -> None:
        super().__init__(session, world_size, host, kind=kind)
        self._lost: dict[bytes, float] = {}
        """Since when members have been gone after GO."""
        self._challenges: list[Challenge] = []
        self._patience = max(ACKNOWLEDGE_SECONDS, ACKNOWLEDGE_SECONDS_PER_RANK * world_size)
        self._sealed_at = 0.0
        # A round of torchrun takes seconds anyhow, and its agents may come and go all the time.
        self._ahead = StoreAhead(wanted=kind == "ranks")
        self._decisions: list[Decision] = []

    def decisions(self) -> list[Decision]:
        """Hands out what was decided since the last call."""
        decided, self._decisions = self._decisions, []
        return decided

    def next_timer(self) -> float | None:
        """The time at which :meth:`handle_timer` has something to do."""
        times = [challenge.deadline for challenge in self._challenges]
        if self.phase is Phase.OPEN and self._ahead.due is not None:
            times.append(self._ahead.due)
        if self.phase is Phase.SEALED:
            times.append(self._sealed_at + self._patience)
        if self.phase is Phase.RUNNING:
            times += [since + RETURN_SECONDS for since in self._lost.values()]
        return min(times, default=None)

    def readdress(self, host: HostSeat) -> None:
        """The host's addresses have changed. Not to be called once the store's address has been chosen."""
        self.host = host
        own = self.seats[host.member]
        own.applicant, own.paths = host.applicant, host.applicant.paths

    # --- what happens ----------------------------------------------------------------------------------------------

    def join(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        """A proved connection asks for a seat."""
        known = self.seats.get(member)
        if known is not None and member == self.host.member:
            self._refuse(conn, applicant, self._taken(known))
            return
        if known is not None:
            self._come_back(known, conn, applicant, now)
            return
        refusal = self._refusal(applicant)
        if refusal is not None:
            self._refuse(conn, applicant, refusal)
            return
        holder = self._holder(applicant.rank)
        if holder is not None:
            if holder.conn is None:
                self._refuse(conn, applicant, self._taken(holder))
            else:
                self._challenges.append(Challenge(conn, member, applicant, now + CHALLENGE_SECONDS, seat=holder.member))
                self._decisions.append(Tell(holder.conn, frames.Ping()))
            return
        self._seat(conn, member, applicant)
        self._ahead.came(now)
        self._advance(now)

    def _refusal(self, applicant: frames.Join) -> frames.Refused | None:
        host = msgspec.structs.replace(self.host.applicant.who, rank=self.host.applicant.rank)
        if applicant.kind != self.kind:
            return frames.Refused(
                reason="kind",
                detail=f"this session is one of {self.kind}, the newcomer is one of {applicant.kind}",
                who=host,
            )
        if self.phase in (Phase.SEALING, Phase.SEALED, Phase.RUNNING):
            return frames.Refused(reason="running", detail="the session is sealed already", who=host)
        if applicant.world_size != self.world_size:
            return frames.Refused(
                reason="world size",
                detail=f"the host was started with world_size={self.world_size}, "
                f"the newcomer with world_size={applicant.world_size}",
                who=host,
            )
        if (applicant.rank is None) != self.assigned:
            which = (
                "has no rank while the host was given one"
                if self.host.applicant.rank is not None
                else (f"was given rank {applicant.rank} while the host was given none")
            )
            return frames.Refused(reason="ranks mixed", detail=f"the newcomer {which}", who=host)
        if applicant.rank is not None and applicant.rank >= self.world_size:
            return frames.Refused(
                reason="rank out of range", detail=f"rank {applicant.rank} of {self.world_size}", who=host
            )
        if applicant.rank is None and len(self.seats) >= self.world_size:
            return frames.Refused(reason="full", detail=self.crowd(), who=host)
        return None

    @staticmethod
    def _taken(holder: Seated) -> frames.Refused:
        who = msgspec.structs.replace(holder.applicant.who, rank=holder.applicant.rank)
        detail = f"rank {holder.applicant.rank} is held by a live process"
        return frames.Refused(reason="rank taken", detail=detail, who=who)

    def _refuse(self, conn: int, applicant: frames.Join, refusal: frames.Refused) -> None:
        who = msgspec.structs.replace(applicant.who, rank=applicant.rank)
        self.refusals.append(f"{who}: {refusal.reason} ({refusal.detail})"[:REMEMBERED_TEXT])
        self._decisions += [Tell(conn, refusal), Drop(conn)]

    def _seat(self, conn: int, member: bytes, applicant: frames.Join) -> None:
        self.seats[member] = Seated(member, conn, applicant, applicant.paths)
        self._conns[conn] = member
        if applicant.rank is not None:
            self._ranks[applicant.rank] = member
            self.departed_ranks.discard(applicant.rank)
        self._decisions.append(Tell(conn, frames.Joined(session=self.session, epoch=self.epoch)))

    def _come_back(self, seat: Seated, conn: int, applicant: frames.Join, now: float) -> None:
        """The same member on a new connection: its old one is dead, whether or not we have noticed."""
        if seat.conn is not None and seat.conn != conn:
            self._conns.pop(seat.conn, None)
            self._decisions.append(Drop(seat.conn))
        seat.conn = conn
        self._lost.pop(seat.member, None)
        self._conns[conn] = seat.member
        self._refuse_challengers(seat)  # who comes back lives; the question went to its old connection
        self._decisions.append(Tell(conn, frames.Joined(session=self.session, epoch=self.epoch)))
        if self.phase is Phase.RUNNING:
            # It has acknowledged, so it lacks only this one word.
            self._decisions.append(Tell(conn, frames.Go(session=self.session, epoch=self.epoch)))
            return
        seat.paths = applicant.paths
        self._ahead.came(now)
        self._void(f"{self._describe(seat)} lost its connection and came back", now)

    def lost(self, conn: int, now: float, reason: str = "its connection closed") -> None:
        """A connection ended; whoever sat there is gone."""
        self._challenges = [challenge for challenge in self._challenges if challenge.conn != conn]
        member = self._conns.pop(conn, None)
        if member is None:
            return
        seat = self.seats[member]
        if self.phase is Phase.RUNNING:
            seat.conn = None
            if not seat.done:
                self._lost[member] = now
            return
        del self.seats[member]
        if seat.applicant.rank is not None:
            del self._ranks[seat.applicant.rank]
            self.departed_ranks.add(seat.applicant.rank)
        self.departures.append(f"{self._describe(seat)}: {reason}"[:REMEMBERED_TEXT])
        # Before its place is given to somebody else: a newcomer never slips into an epoch that it has not confirmed.
        self._void(f"{self._describe(seat)} is gone: {reason}", now)
        for challenge in [each for each in self._challenges if each.seat == member]:
            self._challenges.remove(challenge)
            self.join(challenge.conn, challenge.member, challenge.applicant, now)

    def left(self, conn: int, now: float, reason: str) -> None:
        """A member says good-bye. After GO that is no loss if it was ready, and one at once if it was not."""
        seat = self._seat_at(conn)
        self.lost(conn, now, reason)
        if seat is not None and seat.member in self._lost:
            self._desert(seat)

    def _desert(self, seat: Seated) -> None:
        del self._lost[seat.member]
        seat.done = True
        self._decisions.append(Deserted(msgspec.structs.replace(seat.applicant.who, rank=self._rank_of(seat))))

    def confirmed(self, conn: int, frame: frames.Confirmed, now: float) -> None:
        """A member says that it is still there, and which ways it has proved."""
        seat = self._seat_at(conn)
        if seat is None or self.phase is not Phase.CONFIRMING or frame.epoch != self.epoch:
            return
        seat.paths = frame.paths
        self._awaited.discard(seat.member)
        self._advance(now)

    def acknowledged(self, conn: int, epoch: int, now: float) -> None:
        """A member has reached the store."""
        seat = self._seat_at(conn)
        if seat is None or self.phase is not Phase.SEALED or epoch != self.epoch:
            return
        self._acknowledge(seat)
        self._advance(now)

    def _acknowledge(self, seat: Seated) -> None:
        seat.acked = self.epoch
        self._awaited.discard(seat.member)

    def pong(self, conn: int) -> None:
        """A seated member lives: whoever claims its rank is refused."""
        seat = self._seat_at(conn)
        if seat is not None:
            self._refuse_challengers(seat)

    def _refuse_challengers(self, seat: Seated) -> None:
        for challenge in [each for each in self._challenges if each.seat == seat.member]:
            self._challenges.remove(challenge)
            self._refuse(challenge.conn, challenge.applicant, self._taken(seat))

    def ready(self, conn: int) -> None:
        """A member's process group stands, or it leaves on purpose: its going is no loss from now on."""
        seat = self._seat_at(conn)
        if seat is not None and self.phase is Phase.RUNNING:
            seat.done = True

    def hold(self, held: bool, now: float) -> None:
        """Stops (or lets go on) the way from full to GO."""
        self.held = held
        self._advance(now)

    def awaits_store(self, epoch: int) -> bool:
        """Whether the store asked for in this epoch is still wanted."""
        return self.phase is Phase.SEALING and epoch == self.epoch

    def store_prepared(self, port: int) -> None:
        """The store listens already, where :class:`PrepareStore` asked for it: those who wait may connect to it."""
        if self.phase is not Phase.OPEN or not self._ahead.address:
            return
        where = frames.Store(session=self.session, address=self._ahead.address, port=port)
        self._decisions += [Tell(conn, where) for conn in self._ahead.to_tell(self._conns, port)]

    def store_opened(self, epoch: int, address: str, port: int, token: str, now: float) -> None:
        """The store asked for by :class:`OpenStore` listens: everybody is told its place and the store's."""
        if not self.awaits_store(epoch):
            return
        self.phase, self._sealed_at = Phase.SEALED, now
        self._awaited = set(self.seats)
        digest = roster_digest(self.roster())
        for member, seat in self.seats.items():
            if seat.conn is None:
                self._acknowledge(seat)
                continue
            where = self.places[member]
            self._decisions.append(
                Tell(
                    seat.conn,
                    frames.Sealed(
                        session=self.session,
                        epoch=epoch,
                        rank=where.rank,
                        world_size=self.world_size,
                        local_rank=where.local_rank,
                        local_world_size=where.local_world_size,
                        node_rank=where.node_rank,
                        num_nodes=where.num_nodes,
                        store_address=address,
                        store_port=port,
                        store_token=token,
                        roster_digest=digest,
                    ),
                )
            )
        self._advance(now)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        for member in dict.fromkeys(each.seat for each in self._challenges if each.deadline <= now):
            conn = self.seats[member].conn
            assert conn is not None
            self._decisions.append(Drop(conn))
            self.lost(conn, now, "it did not answer when another process claimed its rank")
        if self.phase is Phase.OPEN and self._ahead.is_due(now):
            self._open_ahead(now)
        if self.phase is Phase.SEALED and now >= self._sealed_at + self._patience:
            late = [self._describe(self.seats[member]) for member in sorted(self._awaited)]
            if late:
                lack = f"no acknowledgement within {self._patience:.0f} s from {'; '.join(late[:8])}"
            else:
                lack = "this job is held by another session"
            self._void(lack, now)
        if self.phase is Phase.RUNNING:
            for member in [each for each, since in self._lost.items() if now >= since + RETURN_SECONDS]:
                self._desert(self.seats[member])

    # --- the way through the phases --------------------------------------------------------------------------------

    def _complete(self, now: float) -> bool:
        """Whether all are in."""
        return len(self.seats) == self.world_size

    def _advance(self, now: float) -> None:
        if self.phase is Phase.OPEN and self._complete(now) and not self.held:
            self.phase = Phase.CONFIRMING
            self.epoch += 1
            self._awaited = set(self.seats) - {self.host.member}
            self._tell_all(frames.Confirm(session=self.session, epoch=self.epoch))
            self._prepare()
        if self.phase is Phase.CONFIRMING and not self._awaited and not self.held:
            self._seal()
        if self.phase is Phase.SEALED and not self._awaited and not self.held:
            self.phase = Phase.RUNNING
            self._tell_all(frames.Go(session=self.session, epoch=self.epoch))
            challenges, self._challenges = self._challenges, []
            for challenge in challenges:
                # The one in the seat has acknowledged: that is an answer, too.
                self.join(challenge.conn, challenge.member, challenge.applicant, now)
            self.seats[self.host.member].done = True
            self._decisions.append(Formed(contiguous(list(self.places.values()))))

    def _open_ahead(self, now: float) -> None:
        if self.held:
            self._ahead.came(now)
        elif self._conns:
            self._prepare()

    def _prepare(self) -> None:
        """Has the store opened where it belongs as far as is known; what the members confirm may still change that."""
        self._ahead.address = self._common_address() or ""
        if self._ahead.address:
            self._decisions.append(PrepareStore(self._ahead.address))

    def _common_address(self) -> str | None:
        ways = [seat.paths for seat in self._others()]
        own = [path.host_address for path in self.host.applicant.paths]
        host = self.host
        return common_address(own, host.prefix_lengths, ways, last_resort=host.last_resort, in_order=host.named)

    def _others(self) -> list[Seated]:
        return [seat for seat in self.seats.values() if seat.member != self.host.member]

    def _seal(self) -> None:
        address = self._common_address()
        if address is None:
            named = [(self._describe(seat), seat.paths) for seat in self._others()]
            own = [path.host_address for path in self.host.applicant.paths]
            self._decisions.append(NoCommonNetwork(reach_matrix(own, self.host.prefix_lengths, named)))
            return
        members = list(self.seats.values())
        self.phase, self.store_address = Phase.SEALING, address
        where = place([_applicant(seat.applicant) for seat in members])
        self.places = {seat.member: spot for seat, spot in zip(members, where, strict=True)}
        self._decisions.append(OpenStore(self.epoch, address))

    def _void(self, reason: str, now: float) -> None:
        if self.phase not in (Phase.CONFIRMING, Phase.SEALING, Phase.SEALED):
            self._advance(now)
            return
        self.phase = Phase.OPEN
        self.places = {}
        self._awaited = set()
        self._tell_all(frames.Void(session=self.session, epoch=self.epoch, reason=reason[:2048]))
        self._decisions.append(Reopened(reason))
        self._ahead.reopened(now)
        self._advance(now)

    def _tell_all(self, frame: frames.AnyFrame) -> None:
        self._decisions += [Tell(seat.conn, frame) for seat in self.seats.values() if seat.conn is not None]


def _applicant(join: frames.Join) -> Applicant:
    return Applicant(
        node=join.node,
        rank=join.rank,
        local_rank=join.local_rank,
        local_world_size=join.local_world_size,
        node_rank=join.node_rank,
    )
