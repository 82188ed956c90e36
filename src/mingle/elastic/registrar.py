"""Decide who joins a session of agents, when it is founded, and how long it is kept: MIN to MAX nodes. Pure.

The rules differ from those for ranks (:mod:`mingle.protocol.registrar`) as follows:

* CONFIRM goes out as soon as the quorum F is seated (:mod:`mingle.elastic.quorum`), or MIN after a last call where
  that is allowed. GO is decided only while the leases of that many agents are valid (:mod:`mingle.elastic.leases`).
* A session that is sealed takes members as long as a seat is free. A latecomer goes through the same steps (CONFIRM,
  SEALED, ACK, GO) by itself and voids nothing; the store and the network do not change.
* After GO the loss of a member frees its seat. The session continues while K agents are left.
* An agent that was refused because all MAX seats were taken by agents that answer is *surplus*: it counts for no
  founding until it has been admitted.
"""

from __future__ import annotations

import msgspec

from mingle.elastic.leases import LEASE_SECONDS, Leases
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Policy
from mingle.protocol import reports
from mingle.protocol.decisions import Drop, Tell
from mingle.protocol.registrar import Registrar
from mingle.protocol.seating import Place
from mingle.protocol.seats import REMEMBERED_TEXT, HostSeat, Phase, Seated, roster_digest
from mingle.wire import frames

ACKNOWLEDGE_SECONDS = 8.0
"""How long after SEALED the last ACK may come: less than a lease, which begins with SEALED."""
CONFIRM_SECONDS = 12.0
"""How long after CONFIRM the last CONFIRMED may come: a member can be bound to another session meanwhile."""
ADMITTED_SECONDS = 30.0
"""How long a latecomer can take from JOIN to ACK; it can be bound to another session for a third of that time."""
ANSWERS_SECONDS = 3.0
"""A member that has answered a PING within this time is alive, so its seat is not about to be free."""


class ElasticRegistrar(Registrar):
    """The registrar of a session of agents: the only place that decides about membership.

    Args:
        policy: how many agents found and keep the session.
        memory: the host's own past.
        now: the present time.
    """

    def __init__(self, session: bytes, host: HostSeat, *, policy: Policy, memory: Memory, now: float) -> None:
        super().__init__(session, policy.nodes.maximum, host, kind="agents")
        self._patience = ACKNOWLEDGE_SECONDS
        self.policy = policy
        self.leases = Leases()
        self.latecomers: dict[bytes, Seated] = {}
        """Seated, and not in the job yet: they came when the session was on its way to GO, or after that."""
        self.had_quorum = False
        """Whether the session has had F members at once: from then on K keep it."""
        self.small = False
        """Whether it was founded by fewer than F, after a last call."""
        self.ending = False
        """Whether a member has ended the job for all; no round begins after that, so no quorum is needed."""
        self.generation = 0
        """One more than the highest generation that any agent of the session knows; fixed at the seal."""
        self._memory = memory
        self._newcomer_at = now
        self._now = now
        self._confirm_by = now
        self._join_by: dict[bytes, float] = {}
        self._store = ("", 0, "")

    # --- who counts ------------------------------------------------------------------------------------------------

    def _counts(self, member: bytes, now: float) -> bool:
        return member == self.host.member or now < self.leases.until(member)

    def counting(self, now: float) -> list[bytes]:
        """Return the members whose lease is valid, the host included."""
        return [member for member in self.seats if self._counts(member, now)]

    def others(self) -> list[tuple[bytes, int]]:
        """Return the members other than the host, each with its connection."""
        return [(seat.member, seat.conn) for seat in self.seats.values() if seat.conn is not None]

    def _founding(self) -> list[bytes]:
        """The agents that count for the founding; surplus agents do not."""
        return [member for member, seat in self.seats.items() if not self._joined_with(seat).surplus]

    @property
    def _experienced(self) -> bool:
        return any(self._joined_with(seat).had_quorum for seat in self.seats.values())

    def _joined_with(self, seat: Seated) -> frames.Join | Memory:
        """The history of an agent: from JOIN for a member, from memory for the host."""
        return self._memory if seat.conn is None else seat.applicant

    @property
    def wanted(self) -> int:
        """The number of agents that found the session, or that keep it once it runs."""
        if self.phase is Phase.RUNNING:
            return self.policy.to_keep(had_quorum=self.had_quorum)
        return self.policy.nodes.minimum if self.small else self.policy.nodes.founders

    def kept_until(self) -> float:
        """Return the time at which too few leases will be valid to keep the session."""
        others = sorted((self.leases.until(member) for member, _ in self.others()), reverse=True)
        needed = self.wanted - 1
        if needed <= 0:
            return float("inf")
        return others[needed - 1] if needed <= len(others) else float("-inf")

    @property
    def is_full(self) -> bool:
        """Whether all seats are taken."""
        return len(self.seats) + len(self.latecomers) >= self.policy.nodes.maximum

    def is_surplus(self, who: frames.ProcessInfo, now: float) -> bool:
        """Whether a newcomer is certainly one more than MAX: every seat belongs to an agent that has answered lately.

        A newcomer on a host that already has a seat is more likely the same agent, restarted.
        """
        if self.phase is not Phase.RUNNING or len(self.seats) < self.policy.nodes.maximum:
            return False
        answered = now + LEASE_SECONDS - ANSWERS_SECONDS
        alive = all(self.leases.until(member) >= answered for member, _ in self.others())
        return alive and all(who.hostname != each.hostname for each in self.whos())

    # --- when to found ---------------------------------------------------------------------------------------------

    def _complete(self, now: float) -> bool:
        nodes, founding = self.policy.nodes, len(self._founding())
        if self._memory.binding.elsewhere(self.session, now):
            return False
        self.small = founding < nodes.founders
        if not self.small:
            return True
        allowed = self.policy.may_start_small(experienced=self._experienced)
        return allowed and founding >= nodes.minimum and now >= self._newcomer_at + self.policy.last_call

    def _advance(self, now: float) -> None:
        self._now = now
        if self.phase is Phase.SEALED and not self._awaited:
            valid = [member for member in self._founding() if self._counts(member, now)]
            if len(valid) < self.wanted:
                self._void("the acknowledgements came too late", now)
                return
        ran, confirming = self.phase is Phase.RUNNING, self.phase is Phase.CONFIRMING
        super()._advance(now)
        if self.phase is Phase.CONFIRMING and not confirming:
            self._confirm_by = now + CONFIRM_SECONDS
        if self.phase is Phase.RUNNING and not ran:
            self.had_quorum = not self.small
            for late in self.latecomers.values():
                if late.conn is not None:
                    self._admit(late.conn)

    def store_opened(self, epoch: int, address: str, port: int, token: str, now: float) -> None:
        """Send every member the list of members, its seat, and the store's address, because the store listens now."""
        if not self.awaits_store(epoch):
            return
        self._store = (address, port, token)
        known = max(self._joined_with(seat).generation for seat in self.seats.values())
        self.generation = min(known + 1, frames.MAX_GENERATION)  # a stranger may have named any number
        for member in self.seats:
            self.leases.sealed(member, now)
        self._tell_all(self.members(quorum=not self.small))
        super().store_opened(epoch, address, port, token, now)

    def _acknowledge(self, seat: Seated) -> None:
        self.leases.acknowledged(seat.member)
        super()._acknowledge(seat)

    def members(self, *, quorum: bool = False) -> frames.Members:
        """Return the MEMBERS frame for the session.

        Args:
            quorum: whether the session has its quorum when the members hear GO.
        """
        present = tuple(msgspec.structs.replace(who, rank=None) for who in self.whos()[: frames.MAX_PRESENT])
        return frames.Members(generation=self.generation, quorum=self.had_quorum or quorum, present=present)

    def note_quorum(self, now: float) -> bool:
        """Check whether a small session has reached F members; return whether that is new."""
        if self.had_quorum or len(self.counting(now)) < self.policy.nodes.founders:
            return False
        self.had_quorum = True
        return True

    # --- what people are told --------------------------------------------------------------------------------------

    def lacks(self) -> str:
        """Return what this gathering lacks before it can be sealed, as text for people; empty if nothing."""
        nodes, founding = self.policy.nodes, len(self._founding())
        if self._memory.binding.elsewhere(self.session, self._now):
            return "the end of its lease in the session before"
        if founding >= nodes.founders:
            return ""
        text = f"{nodes.founders - founding} more node(s): it takes {nodes.founders} to begin"
        if founding < len(self.seats):
            text += f", and {len(self.seats) - founding} of those here came when all {nodes.maximum} places were taken"
        if self.policy.may_start_small(experienced=self._experienced):
            if founding >= nodes.minimum:
                text += f", or {self.policy.last_call:g} s without a newcomer"
        elif nodes.minimum < nodes.founders:
            text += f", or {nodes.minimum} with --rdzv-conf allow_minority=1"
        missed = self._memory.missed(self.whos())
        return f"{text}; missed: {reports.few(missed, '; ')}" if missed else text

    def status(self) -> frames.Status:
        """How it stands, for people."""
        present = [str(who)[:REMEMBERED_TEXT] for who in self.whos()[:32]]
        return msgspec.structs.replace(super().status(), present=tuple(present), lacks=self.lacks())

    def status_version(self) -> tuple[object, ...]:
        """Return a value that changes whenever the status changes."""
        return (*super().status_version(), self.lacks())

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """The time at which :meth:`handle_timer` has something to do."""
        times = [super().next_timer(), *self._join_by.values()]
        if self.phase is Phase.CONFIRMING and self._awaited:
            times.append(self._confirm_by)
        if self.phase is Phase.OPEN and not self.held:
            later = (self._newcomer_at + self.policy.last_call, self._memory.binding.until)
            times += [time for time in later if time > self._now]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        for member in [each for each, by in self._join_by.items() if now >= by]:
            conn = self.latecomers[member].conn
            assert conn is not None
            self._decisions.append(Drop(conn))
            self.lost(conn, now, "it took too long to join")
        if self.phase is Phase.CONFIRMING and now >= self._confirm_by:
            for conn in [conn for member, conn in self.others() if member in self._awaited]:
                self._decisions.append(Drop(conn))
                self.lost(conn, now, "it did not confirm in time")
        super().handle_timer(now)
        self._advance(now)

    # --- coming ----------------------------------------------------------------------------------------------------

    def join(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        """A proved connection asks for a seat."""
        self._now = now
        known = self.seats.get(member)
        running = self.phase is Phase.RUNNING
        if self.phase is Phase.OPEN or (known is not None and (not running or known.conn is None)):
            if known is None:
                self._newcomer_at = now
            super().join(conn, member, applicant, now)
            return
        for seat in (known, self.latecomers.get(member)):
            if seat is not None and seat.conn is not None:
                # The same agent on another connection: its old one is dead, whether or not we have noticed.
                self._decisions.append(Drop(seat.conn))
                self.lost(seat.conn, now, "it came back on another connection")
        refusal = self._refusal(applicant)
        if refusal is not None:
            self._refuse(conn, applicant, refusal)
            return
        self.latecomers[member] = Seated(member, conn, applicant, applicant.paths)
        self._join_by[member] = now + ADMITTED_SECONDS
        self._conns[conn] = member
        self._decisions.append(Tell(conn, frames.Joined(session=self.session, epoch=self.epoch)))
        if running:
            self._admit(conn)

    def _refusal(self, applicant: frames.Join) -> frames.Refused | None:
        nodes, who = self.policy.nodes, self.host.applicant.who
        if applicant.kind != self.kind:
            return super()._refusal(applicant)
        if (applicant.minimum, applicant.world_size) != (nodes.minimum, nodes.maximum):
            theirs = f"{applicant.minimum}:{applicant.world_size}"
            return frames.Refused(
                reason="world size",
                detail=f"the host was started with --nnodes={nodes.minimum}:{nodes.maximum}, "
                f"the newcomer with --nnodes={theirs}",
                who=who,
            )
        if self.is_full:
            surplus = self.is_surplus(applicant.who, self._now)
            return frames.Refused(reason="surplus" if surplus else "full", detail=self.crowd(), who=who)
        return super()._refusal(applicant) if self.phase is Phase.OPEN else None

    # --- latecomers ------------------------------------------------------------------------------------------------

    def _latecomer(self, conn: int) -> Seated | None:
        member = self._conns.get(conn)
        return None if member is None else self.latecomers.get(member)

    def _seat_at(self, conn: int) -> Seated | None:
        member = self._conns.get(conn)
        return None if member is None else self.seats.get(member)

    def _admit(self, conn: int) -> None:
        self._decisions.append(Tell(conn, frames.Confirm(session=self.session, epoch=self.epoch)))

    def confirmed(self, conn: int, frame: frames.Confirmed, now: float) -> None:
        """A member says that it is still there, and which ways it has proved."""
        late = self._latecomer(conn)
        if late is None:
            super().confirmed(conn, frame, now)
            return
        if self.phase is not Phase.RUNNING or frame.epoch != self.epoch:
            return
        late.paths = frame.paths
        if self.store_address not in {path.host_address for path in frame.paths}:
            refusal = frames.Refused(
                reason="network",
                detail=f"the store listens on {self.store_address}, which the newcomer has not reached",
                who=self.host.applicant.who,
            )
            self._drop_latecomer(conn)
            self._refuse(conn, late.applicant, refusal)
            return
        self.places.pop(late.member, None)
        free = next(rank for rank in range(self.world_size) if all(rank != p.rank for p in self.places.values()))
        where = Place(rank=free, local_rank=0, local_world_size=1, node_rank=free, num_nodes=len(self.seats) + 1)
        self.places[late.member] = where
        self.leases.sealed(late.member, now)
        members = self.members(quorum=len(self.seats) + 1 >= self.policy.nodes.founders)
        self._decisions += [Tell(conn, members), Tell(conn, self._sealed(where))]

    def _sealed(self, where: Place) -> frames.Sealed:
        return frames.Sealed(
            session=self.session,
            epoch=self.epoch,
            rank=where.rank,
            world_size=self.world_size,
            local_rank=where.local_rank,
            local_world_size=where.local_world_size,
            node_rank=where.node_rank,
            num_nodes=self.world_size,
            store_address=self._store[0],
            store_port=self._store[1],
            store_token=self._store[2],
            roster_digest=roster_digest(self.roster()),
        )

    def acknowledged(self, conn: int, epoch: int, now: float) -> None:
        """A member has reached the store."""
        late = self._latecomer(conn)
        if late is None:
            super().acknowledged(conn, epoch, now)
        elif self.phase is Phase.RUNNING and epoch == self.epoch and late.member in self.places:
            self.leases.acknowledged(late.member)
            if not self._counts(late.member, now):
                self._admit(conn)  # its acknowledgement came too late: once more
                return
            late.acked = epoch
            self.seats[late.member] = self.latecomers.pop(late.member)
            del self._join_by[late.member]
            self._decisions.append(Tell(conn, frames.Go(session=self.session, epoch=epoch)))

    def _drop_latecomer(self, conn: int) -> None:
        member = self._conns.pop(conn)
        del self.latecomers[member], self._join_by[member]
        self.places.pop(member, None)
        self.leases.forget(member)

    # --- going -----------------------------------------------------------------------------------------------------

    def lost(self, conn: int, now: float, reason: str = "its connection closed") -> None:
        """Free the seat of a connection that ended; its member no longer counts."""
        self._now = now
        seat = self._seat_at(conn)
        if self._latecomer(conn) is not None:
            self._drop_latecomer(conn)
            return
        if seat is not None:
            self.leases.forget(seat.member)
        if self.phase is Phase.RUNNING and seat is not None:
            del self._conns[conn], self.seats[seat.member], self.places[seat.member]
            self.departures.append(f"{self._describe(seat)}: {reason}"[:REMEMBERED_TEXT])
        else:
            super().lost(conn, now, reason)

    def left(self, conn: int, now: float, reason: str) -> None:
        """Handle LEAVE: the member's workers are done or have failed for good, which ends the job."""
        self.ending |= self.phase is Phase.RUNNING and self._seat_at(conn) is not None
        self.lost(conn, now, reason)

    def _void(self, reason: str, now: float) -> None:
        if self.phase in (Phase.CONFIRMING, Phase.SEALING, Phase.SEALED):
            for member in self.seats:
                self.leases.forget(member)
            self.seats |= self.latecomers
            self.latecomers.clear()
            self._join_by.clear()
        super()._void(reason, now)
