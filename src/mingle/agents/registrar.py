"""Who may join a session of agents, and when it is sealed: MIN to MAX nodes, majorities, and latecomers. Pure.

What differs from ranks, whose rules are those of :mod:`mingle.rules.registrar`:

* The first gathering is sealed as soon as no other half can have as many (:attr:`mingle.agents.quorum.Nodes.at_once`);
  with fewer, but MIN, only when a whole last call went by without a newcomer.
* If anybody in it was in a session before, it is sealed as soon as it holds the majority of those views
  (:mod:`mingle.agents.quorum`) and MIN nodes; no last call is waited for, since others are admitted later. Without that
  majority it is sealed only after a last call, and only if the host that was lost is proved dead or the user allows it.
* A session that is sealed takes members as long as a seat is free. A latecomer goes through the same steps (CONFIRM,
  SEALED, ACK, GO) by itself and voids nothing.
* After GO a lost member is no reason to end anything: its seat is free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from mingle.agents.quorum import Nodes, Standing, in_force, machine_of, may_survive, members_of, survives
from mingle.rules.decisions import Drop, Tell
from mingle.rules.registrar import Registrar
from mingle.rules.seating import Place
from mingle.rules.seats import REMEMBERED_TEXT, HostSeat, Phase, Seated, roster_digest
from mingle.wire import frames

QUESTIONED_SECONDS = 10.0
"""How long the host of a running session looks whether those are dead of whom a refused newcomer told."""


class AgentsRegistrar(Registrar):
    """The one decider of a session of agents.

    Args:
        last_call: how long, in seconds, a gathering without a majority waits for one more.
        allow_minority: whether such a gathering goes on also if others may have a majority without it.
        standing: what the host knows of earlier sessions.
        dead: who is proved dead, and since when; somebody else adds to it.
    """

    def __init__(
        self,
        session: bytes,
        host: HostSeat,
        *,
        nodes: Nodes,
        last_call: float,
        allow_minority: bool,
        standing: Standing,
        dead: Mapping[bytes, float],
        now: float,
    ) -> None:
        super().__init__(session, nodes.maximum, host, kind="agents")
        self.nodes = nodes
        self.dead = dead
        self.left_on_purpose: set[bytes] = set()
        self.latecomers: dict[bytes, Seated] = {}
        """Seated, and not in the job yet: they came when the session was on its way to GO, or after that."""
        self.counted: AbstractSet[bytes] = frozenset()
        """Once it runs, who counts for its majority; somebody else keeps this."""
        self.small = False
        """Whether it was sealed after a last call, with so few that another half could have as many."""
        self.unsure = False
        """Whether it was sealed after a last call, without the majority of the session before."""
        self._last_call = last_call
        self._allow_minority = allow_minority
        self._standing = standing
        self._newcomer_at = self._looked_at = now
        self._bound_until: dict[bytes, float] = {}
        self._generation = 0
        self._store = ("", 0, "")
        self._questioned: list[frames.Node] = []
        self._questioned_until = now
        self._refused_since: dict[bytes, float] = {}

    # --- what is known ---------------------------------------------------------------------------------------------

    def views(self) -> list[frames.View]:
        """The views of which this gathering needs the majority."""
        joins = [seat.applicant for seat in self.seats.values() if seat.conn is not None]
        settled = [each.settled for each in joins] + [self._standing.settled]
        proposed = [each.proposed for each in joins] + [self._standing.proposed]
        return in_force([each for each in settled if each], [each for each in proposed if each])

    @property
    def generation(self) -> int:
        """One more than that of any session that somebody in this gathering was in; from the seal on it is fixed."""
        if self.phase in (Phase.SEALED, Phase.RUNNING):
            return self._generation
        return max([self._standing.generation, *(view.generation for view in self.views())]) + 1

    @property
    def missed(self) -> list[frames.Node]:
        """Those who count for a majority and are not here."""
        nodes = {node.member: node for view in self.views() for node in view.nodes}
        return [node for member, node in nodes.items() if member not in self.seats]

    def _has_majority(self, now: float) -> bool:
        return self._survives(self.views(), self.seats.keys(), now)

    def leads(self, now: float) -> bool:
        """Whether this gathering goes on with a session of before, and nobody else may."""
        return bool(self.views()) and self._has_majority(now)

    def _survives(self, views: Iterable[frames.View], present: AbstractSet[bytes], now: float) -> bool:
        bound = {**self._bound_until, self.host.member: self._standing.bound_until}
        return all(survives(view, present, bound_until=bound, dead=self.dead, now=now) for view in views)

    def view(self, number: int) -> frames.View:
        """Returns who is in this session now."""
        return frames.View(
            generation=self.generation,
            number=number,
            session=self.session,
            host=self.host.member,
            nodes=self.present_nodes(),
        )

    def present_nodes(self) -> tuple[frames.Node, ...]:
        """Who is in, and where it can be asked whether it lives."""
        return tuple(self._node(seat) for seat in self.seats.values())

    def _node(self, seat: Seated) -> frames.Node:
        address = self.store_address if seat.conn is None else seat.applicant.who.address
        return frames.Node(seat.member, address, seat.applicant.port, machine_of(seat.applicant.node))

    def lacks(self) -> str:
        """What has to come before this gathering can be sealed, for people; empty: nothing."""
        joined = len(self.seats)
        if joined < self.nodes.minimum:
            return f"{self.nodes.minimum - joined} more node(s): {self.nodes} are wanted"
        if self.views() and not self._has_majority(self._looked_at):
            held = [f"{len(members_of(view) & self.seats.keys())} of {len(view.nodes)}" for view in self.views()]
            return (
                f"a majority of the nodes that were in the job before ({'; '.join(held)}): "
                "the others may be cut off, and go on without us"
            )
        if not self.views() and joined < self.nodes.at_once:
            return f"{self.nodes.at_once - joined} more node(s), or {self._last_call:g} s without a newcomer"
        return ""

    def status(self) -> frames.Status:
        """How it stands, for people."""
        present = [str(who)[:REMEMBERED_TEXT] for who in self.whos()[:32]]
        return msgspec.structs.replace(super().status(), present=tuple(present), lacks=self.lacks())

    # --- when to seal ----------------------------------------------------------------------------------------------

    def _complete(self, now: float) -> bool:
        joined = len(self.seats)
        if joined < self.nodes.minimum:
            return False
        called = now >= self._newcomer_at + self._last_call
        views = self.views()
        if views:
            self.unsure = not self._has_majority(now)
            lone = all(may_survive(view, self.seats.keys(), self.dead.keys()) for view in views)
            return not self.unsure or (called and (lone or self._allow_minority))
        self.small = joined < self.nodes.at_once
        return not self.small or called

    def look_again(self, now: float) -> None:
        """Somebody was proved dead: perhaps that makes a majority."""
        self._advance(now)

    def next_timer(self) -> float | None:
        """The time at which :meth:`handle_timer` has something to do."""
        times = [super().next_timer()]
        if self.phase is Phase.OPEN and not self.held and len(self.seats) >= self.nodes.minimum:
            later = [self._newcomer_at + self._last_call, self._standing.bound_until, *self._bound_until.values()]
            times += [time for time in later if time > self._looked_at]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        self._looked_at = now
        super().handle_timer(now)
        self._advance(now)

    # --- coming ----------------------------------------------------------------------------------------------------

    def join(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        """A proved connection asks for a seat."""
        known = self.seats.get(member)
        late = self.phase is not Phase.OPEN and (
            known is None or (self.phase is Phase.RUNNING and member != self.host.member)
        )
        for seat in (known, self.latecomers.get(member)) if late else ():
            if seat is not None and seat.conn is not None:
                # The same agent on another connection: its old one is dead, whether or not we have noticed.
                self._decisions.append(Drop(seat.conn))
                self.lost(seat.conn, now, "it came back on another connection")
        self._bound_until[member] = float("-inf") if applicant.bound is None else now + applicant.bound
        if late:
            self._join_late(conn, member, applicant, now)
        else:
            if self.phase is Phase.OPEN and known is None:
                self._newcomer_at = now
            super().join(conn, member, applicant, now)
        self._forget_unless_in(member)

    def _forget_unless_in(self, member: bytes) -> None:
        """Member ids are what callers say they are: nothing is kept of one that has no seat."""
        if member not in self.seats and member not in self.latecomers:
            self._bound_until.pop(member, None)

    def _join_late(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        refusal = self._refusal(applicant) or self._claims(member, applicant, now)
        if refusal is not None:
            self._refuse(conn, applicant, refusal)
            return
        self.latecomers[member] = Seated(member, conn, applicant, applicant.paths)
        self._conns[conn] = member
        self._decisions.append(Tell(conn, frames.Joined(session=self.session, epoch=self.epoch)))
        if self.phase is Phase.RUNNING:
            self._admit(conn)

    def _refusal(self, applicant: frames.Join) -> frames.Refused | None:
        if applicant.kind == self.kind:
            if (applicant.minimum, applicant.world_size) != (self.nodes.minimum, self.nodes.maximum):
                theirs = f"{applicant.minimum}:{applicant.world_size}"
                return frames.Refused(
                    reason="world size",
                    detail=f"the host was started with --nnodes={self.nodes.minimum}:{self.nodes.maximum}, "
                    f"the newcomer with --nnodes={theirs}",
                    who=self.host.applicant.who,
                )
            if len(self.seats) + len(self.latecomers) >= self.nodes.maximum:
                return frames.Refused(reason="full", detail=self.crowd(), who=self.host.applicant.who)
            if self.phase is not Phase.OPEN:
                return None
        return super()._refusal(applicant)

    # --- latecomers ------------------------------------------------------------------------------------------------

    def _latecomer(self, conn: int) -> Seated | None:
        member = self._conns.get(conn)
        return None if member is None else self.latecomers.get(member)

    def _seat_at(self, conn: int) -> Seated | None:
        member = self._conns.get(conn)
        return None if member is None else self.seats.get(member)

    def _claims(self, member: bytes, applicant: frames.Join, now: float) -> frames.Refused | None:
        """A newcomer who counts in our views was in a later generation than ours: is that one certainly over?

        If it were not, the newcomer might give us a majority that others have without it. As for a gathering, it is
        enough after a last call that all others of that session are dead, its host among them.
        """
        if member not in self.counted:
            return None
        present = {*self.seats, member}
        views = [each for each in (applicant.settled, applicant.proposed) if each and each.generation > self.generation]
        self._refused_since = {each: at for each, at in self._refused_since.items() if each in self.counted}
        since = self._refused_since.setdefault(member, now)
        lone = all(may_survive(view, present, self.dead.keys()) for view in views)
        if self._survives(views, present, now) or (lone and now >= since + self._last_call):
            del self._refused_since[member]
            return None
        self._questioned = [node for view in views for node in view.nodes if node.member not in present]
        self._questioned_until = now + QUESTIONED_SECONDS
        return frames.Refused(
            reason="generation",
            detail="the newcomer was in a later session of this job, which may still run",
            who=self.host.applicant.who,
        )

    def questioned(self, now: float) -> list[frames.Node]:
        """Those who may still run a later session, of which a newcomer told; are they dead?"""
        return self._questioned if now < self._questioned_until else []

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
        free = next(rank for rank in range(self.nodes.maximum) if all(rank != p.rank for p in self.places.values()))
        where = Place(rank=free, local_rank=0, local_world_size=1, node_rank=free, num_nodes=len(self.seats) + 1)
        self.places[late.member] = where
        self._decisions.append(Tell(conn, self._sealed(where)))

    def _sealed(self, where: Place) -> frames.Sealed:
        return frames.Sealed(
            session=self.session,
            epoch=self.epoch,
            rank=where.rank,
            world_size=self.nodes.maximum,
            local_rank=where.local_rank,
            local_world_size=where.local_world_size,
            node_rank=where.node_rank,
            num_nodes=self.nodes.maximum,
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
            late.acked = epoch
            self.seats[late.member] = self.latecomers.pop(late.member)
            known = [each.generation for each in (late.applicant.settled, late.applicant.proposed) if each]
            if max(known, default=-1) > self._generation:
                self._generation = max(known) + 1
            self._decisions.append(Tell(conn, frames.Go(session=self.session, epoch=epoch)))

    def _drop_latecomer(self, conn: int) -> None:
        member = self._conns.pop(conn)
        del self.latecomers[member]
        self.places.pop(member, None)
        self._forget_unless_in(member)

    # --- going -----------------------------------------------------------------------------------------------------

    def lost(self, conn: int, now: float, reason: str = "its connection closed") -> None:
        """A connection ended; whoever sat there is gone, and after GO that is all."""
        late, seat = self._latecomer(conn), self._seat_at(conn)
        if late is not None:
            self._drop_latecomer(conn)
        elif self.phase is Phase.RUNNING and seat is not None:
            del self._conns[conn], self.seats[seat.member], self.places[seat.member]
            self.departures.append(f"{self._describe(seat)}: {reason}"[:REMEMBERED_TEXT])
        else:
            super().lost(conn, now, reason)
        if seat is not None:
            self._forget_unless_in(seat.member)

    def left(self, conn: int, now: float, reason: str) -> None:
        """A member says good-bye: it counts in no majority any more."""
        seat = self._seat_at(conn)
        if seat is not None and self.phase is Phase.RUNNING:
            self.left_on_purpose.add(seat.member)
        self.lost(conn, now, reason)

    # --- the way through the phases --------------------------------------------------------------------------------

    def store_opened(self, epoch: int, address: str, port: int, token: str, now: float) -> None:
        """The store listens: everybody is told who is in, its place, and where the store is."""
        if self.phase is not Phase.SEALING or epoch != self.epoch:
            return
        self._store = (address, port, token)
        self._generation = self.generation
        # By its number it is newer than that of an epoch that was voided, of which somebody may not have heard.
        self._tell_all(frames.Members(view=self.view(epoch)))
        super().store_opened(epoch, address, port, token, now)

    def _void(self, reason: str, now: float) -> None:
        if self.phase in (Phase.CONFIRMING, Phase.SEALING, Phase.SEALED):
            self.seats |= self.latecomers
            self.latecomers.clear()
        super()._void(reason, now)

    def _advance(self, now: float) -> None:
        ran = self.phase is Phase.RUNNING
        super()._advance(now)
        if self.phase is Phase.RUNNING and not ran:
            for late in self.latecomers.values():
                if late.conn is not None:
                    self._admit(late.conn)
