"""The role of a node that looks for the host of its job, joins it, waits for GO, and is then its member. Pure.

The member searches (:mod:`mingle.protocol.search`) and joins the first host that proves its session. With a seat it
takes part in the commit of that session (:mod:`mingle.protocol.participant`), and after GO it has its place in the job
(:mod:`mingle.protocol.membership`). A member whose connection breaks after CONFIRMED returns to the same session before
it looks at any other one: those that wait for GO must not scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeAlias

import msgspec
from msgspec import Struct

from mingle.errors import MingleError
from mingle.protocol.events import Accepted, Inspected, Source, StoreProved, StoreUnreachable
from mingle.protocol.explain import errors
from mingle.protocol.explain.observations import Diagnostics, Situation, note
from mingle.protocol.links.host_link import HostLink
from mingle.protocol.links.prover import Prover
from mingle.protocol.links.responder import Responder
from mingle.protocol.machine import Context, Endpoints, Formation, Identity, scoped
from mingle.protocol.membership import RETURN_SECONDS, Membership, RosterAnswer
from mingle.protocol.participant import AwaitingConfirm, AwaitingSeal, Decided, Participant, TryingPaths
from mingle.protocol.search import Search
from mingle.protocol.sessions import KnownSession
from mingle.protocol.sightings import Sightings
from mingle.protocol.states import Transitions, transition
from mingle.text import endpoint_text
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Seek

HOST_SEEN_SECONDS = 1.0
"""The least time between two reports of the same other host to the own one."""
LEFT_OUT_SECONDS = 30.0
"""How long a node that can't reach a member waits before it asks the session for a seat again."""
HOST_GONE_SECONDS = 5.0
"""A host that is lost this long before our deadline has not ended with it, as one does that was started with us."""
STATUS_BEFORE_DEADLINE_SECONDS = 1.0
"""How long before its deadline a member asks for the status once more, for the error."""


# --- states --------------------------------------------------------------------------------------------------------


class WayBack(Struct, frozen=True):
    """The connection to the host broke while this member is bound to the session, and calls it before any other."""

    session: KnownSession
    until: float


class _MemberState(Struct, frozen=True):
    """What holds in most states."""

    @property
    def link(self) -> HostLink | None:
        """The connection to a host."""
        return None

    @property
    def way_back(self) -> WayBack | None:
        """The way back on which the member is."""
        return None


class Searching(_MemberState, frozen=True):
    """No host has proved itself yet."""

    stage: ClassVar[str] = "seeking"


class Joining(_MemberState, frozen=True):
    """JOIN was sent."""

    stage: ClassVar[str] = "joining"
    link: HostLink
    way_back: WayBack | None = None


class Participating(_MemberState, frozen=True):
    """The member has a seat in a session that has not formed."""

    link: HostLink
    part: Participant

    @property
    def stage(self) -> str:
        """The step of the commit."""
        return self.part.state.stage


class Away(_MemberState, frozen=True):
    """The connection broke after CONFIRMED, or after GO: the member calls the same session first."""

    stage: ClassVar[str] = "seeking"
    way_back: WayBack


class Attached(_MemberState, frozen=True):
    """GO has come, and the member is connected to its host."""

    stage: ClassVar[str] = "formed"
    link: HostLink


class Detached(_MemberState, frozen=True):
    """GO has come, and the member has no host: it is gone, or no longer needed."""

    stage: ClassVar[str] = "formed"


State: TypeAlias = Searching | Joining | Participating | Away | Attached | Detached

CLOSED, LEAVE, LOST, REFUSED = "CLOSED", "LEAVE", "connection lost", "REFUSED"
PROVED = "a host proves its session: JOIN"
GONE = "the job has formed, and the host is not needed, or gone"
TRANSITIONS: Transitions = {
    Searching: {PROVED: Joining},
    Joining: {
        "JOINED": Participating,
        "JOINED, the job has formed": Attached,
        REFUSED: Searching,
        CLOSED: Searching,
        LOST: Searching,
        "connection lost on the way back": Away,
        GONE: Detached,
        LEAVE: Searching,
    },
    Participating: {
        "GO": Attached,
        REFUSED: Searching,
        CLOSED: Searching,
        LOST: Searching,
        "connection lost after CONFIRMED": Away,
        LEAVE: Searching,
    },
    Away: {PROVED: Joining, "refused on every address, or too late": Searching, GONE: Detached, LEAVE: Searching},
    Attached: {"connection lost, the host is needed": Away, GONE: Detached},
    Detached: {},
}


# --- the machine ---------------------------------------------------------------------------------------------------


class Joiner:
    """A node that looks for a host, or is its member. ``outcome`` or ``failure`` ends its wait.

    Args:
        identity: of this process.
        context: what its parts need.
        now: the time.
        endpoints: returns where others can connect to this process, for the mesh; None: they can't.
        deadline: when a job that has not formed is an error.
        diagnostics: takes note of what is observed.
        sightings: the other sessions of the job that this process has heard of.
    """

    host_silence: float | None = None
    """The time after which a host that does not answer is given up before GO; None: never."""

    def __init__(
        self,
        identity: Identity,
        context: Context,
        now: float,
        *,
        endpoints: Callable[[], Endpoints | None],
        deadline: float,
        diagnostics: Diagnostics,
        sightings: Sightings,
    ) -> None:
        self.identity = identity
        self.diagnostics = diagnostics
        self.state: State = Searching()
        self.failure: MingleError | None = None
        self.membership: Membership | None = None
        """The place in the job with its host, once it has formed."""
        self.status: frames.Status | None = None
        """The last status of the job from its host."""
        self.roster = RosterAnswer(identity.world_size)
        self._status_of = b""
        """The session of that status."""
        self._effects = context.links.effects
        self._deadline = deadline
        self._responder = Responder(identity, context, endpoints)
        self._prover = Prover(identity, context, port=lambda: self._responder.port)
        self.sightings = sightings
        self.search = Search(identity, context, now, diagnostics=diagnostics, sightings=sightings, searcher=self)

    def _change(self, why: str, state: State) -> None:
        before = self.part
        self.state = transition(TRANSITIONS, self.state, why, state)
        ended = before if self.part is not before else None
        if ended is not None:
            ended.end()
        if ended is not None or self.session is None:
            self._responder.callers.hang_up_all()

    # --- what the node reads -------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Formation | None:
        """The place in the job, once it has formed."""
        return None if self.membership is None else self.membership.outcome

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.membership is not None or self.failure is not None

    @property
    def session(self) -> KnownSession | None:
        """The session whose host this member is connected to."""
        return None if self.state.link is None else self.state.link.session

    @property
    def returns_to(self) -> KnownSession | None:
        """The session that this member tries before any other."""
        return self.state.way_back.session if isinstance(self.state, Away) else None

    @property
    def _may_form(self) -> bool:
        """Whether the host may decide GO with this member, or has, as long as they are connected."""
        return self.membership is not None or (self.part is not None and self.part.is_bound)

    @property
    def part(self) -> Participant | None:
        """This member's part in the commit of a session, while it has a seat there."""
        return self.state.part if isinstance(self.state, Participating) else None

    def next_timer(self) -> float | None:
        """The time of the next `TimerDue`."""
        if self.failure is not None:
            return None
        state, times = self.state, [self.sightings.next_timer(), self._responder.callers.next_timer()]
        if isinstance(state, Away) and state.way_back.session.race is None:
            times.append(state.way_back.session.retry_at)
        if self.membership is not None:
            times.append(self.membership.next_timer())
        else:
            times.append(self.search.next_timer())
            if state.link is not None:
                times.append(state.link.next_timer(bound=self._may_form))
            if isinstance(state, Participating):
                times.append(state.part.next_timer())
                if not state.link.status_asked:
                    times.append(self._deadline - STATUS_BEFORE_DEADLINE_SECONDS)
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """Return the current step, in a word, for the log."""
        return self.state.stage if self.membership is None else Attached.stage

    def explained(self, situation: Situation) -> Situation:
        """Return the node's situation with how far the job has come, and what explains why this member waits."""
        asked_at = self.search.asked_at  # since it has lost its host, if it had one
        lost = self.session is None and asked_at is not None and self._deadline - asked_at >= HOST_GONE_SECONDS
        return msgspec.structs.replace(
            situation,
            status=self.status,
            connected=self.session is not None,
            gone=lost,
            proved=bool(self.diagnostics.proved),
        )

    def showing(self) -> Seek | None:
        """Return what to ask peers, and to show in a shared folder: nothing if there is a host."""
        return self.search.question if self.session is None and not self.finished else None

    # --- events ----------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Handle a valid datagram, or an object in a folder."""
        if self.finished:
            return
        session = self.search.heard(message, source, now, seated=self.part is not None)
        if session is None:
            return
        link = self.state.link
        if link is not None and session is link.session:
            link.offered(now)
        elif link is not None and session.race is None and session.offer.takes_members:
            self._another_offers(link, session, now)
        else:
            self.search.offered(session, now)

    def _another_offers(self, link: HostLink, other: KnownSession, now: float) -> None:
        """Handle the OFFER of another host that takes members: the own one may have gone, or may not hear it."""
        if not self._may_form:
            link.suspect("silent while another host offered itself", now)
        if self.part is not None and self.identity.rank is None and now >= other.report_at:
            other.report_at = now + HOST_SEEN_SECONDS
            link.session.send(frames.HostSeen(offer=other.offer))

    def rewired(self, now: float) -> None:
        """Handle a change of this machine's interfaces.

        Paths to the host are proved now, unless this member has confirmed, and once more when the host asks again: an
        attempt that is under way goes out by an old interface.
        """
        self.search.rewired(now)
        link = self.state.link
        if link is not None and link.session.race is not None and not self._may_form:
            link.session.race.prove_again(now)
            self.after_connection(now)  # the last other attempt can have been given up just now

    # --- the mesh, which others prove ------------------------------------------------------------------------------

    def accepted(self, event: Accepted, now: float) -> None:
        """Answer a connection of the mesh, or hang up on it."""
        self._responder.accepted(event, self._mesh_session(), now)

    def _mesh_session(self) -> KnownSession | None:
        """The session whose mesh this member is part of: none before a seat is asked for, and from SEALED on."""
        link, part = self.state.link if self.membership is None else None, self.part
        forming = part is None or isinstance(part.state, AwaitingConfirm | TryingPaths | AwaitingSeal)
        return link.session if link is not None and forming else None

    # --- the way to GO ---------------------------------------------------------------------------------------------

    def join(self, session: KnownSession, now: float) -> None:
        """Ask the host of a session that has proved itself for a seat."""
        self._change(PROVED, Joining(HostLink(session, self.host_silence), self.state.way_back))
        if session.name != self._status_of:
            self.status = None
        session.send(self._application(session, now))

    def _application(self, session: KnownSession, now: float) -> frames.Join:
        application = self.identity.join(self.identity.who, session.paths, session.token)
        return msgspec.structs.replace(application, mesh_port=self._responder.port)

    def host_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of the own host."""
        state = self.state
        match frame:
            case frames.Ping():
                proving = self.part is not None and self.part.is_proving
                session.send(frames.Pong(number=frame.number, proving=proving))
            case frames.Status():
                self.status, self._status_of = frame, session.name
            case frames.Roster():
                self.roster.said(frame)
            case frames.Refused():  # without a secret any process can prove a session and say this
                self._refused(session, frame, now)
            case frames.Closed() if self.membership is not None:
                self.membership.close_reason = frame.reason or "it gave no reason"
            case frames.Closed():
                self._closed_by_host(session, frame, now)
            case frames.Joined() if isinstance(state, Joining) and self.membership is not None:
                session.token = frame.token
                self._change("JOINED, the job has formed", Attached(state.link))
                self.membership.came_back(now)
            case frames.Joined() if isinstance(state, Joining):
                self._joined(state, frame)
            case _ if isinstance(state, Participating):
                state.part.said(frame, now)
                if isinstance(state.part.state, Decided):
                    self._go(session, state.part.state.sealed)

    def _joined(self, state: Joining, frame: frames.Joined) -> None:
        session = state.link.session
        session.token, session.ran = frame.token, None
        for other in self.sightings:
            if other is not session:
                other.acknowledged = None  # a member counts in one session at a time
        self._change(
            "JOINED", Participating(state.link, Participant(session, frame.epoch, self._effects, self._prover))
        )

    def after_connection(self, now: float) -> None:
        """Confirm if that is due after what has happened, unless the job runs without this member already, or may."""
        self.sightings.weigh(now)
        part = self.part
        if part is None:
            return
        part.prove_mesh(now)
        if part.can_confirm and self._may_confirm(part.session, now):
            part.confirm()

    def inspected(self, event: Inspected, now: float) -> None:
        """Take note of what this machine blocks, for the proof of the mesh."""
        self._prover.inspected(event)
        self.after_connection(now)

    def _may_confirm(self, session: KnownSession, now: float) -> bool:
        return not self.sightings.may_run(session)

    def store_proved(self, event: StoreProved) -> bool:
        """Vote for GO if the store of the seal was reached; return whether it was that one."""
        return self.part is not None and self.part.store_proved(event)

    def store_unreachable(self, event: StoreUnreachable, now: float) -> None:
        """Take note that the store was not reached; it is tried again."""
        sealed = None if self.part is None else self.part.store_unreachable(event, now)
        if sealed is not None:
            store = endpoint_text(sealed.store_address, sealed.store_port)
            note(self.diagnostics.store_failures, store, event.reason)

    def _go(self, session: KnownSession, sealed: frames.Sealed) -> None:
        # The member can have come back over another path than the one that was sealed.
        path = session.path_to(sealed.store_address) or session.paths[0]
        self.sightings.hang_up(but=session)
        outcome = Formation(
            session=sealed.session,
            place=sealed.place,
            store_address=scoped(sealed.store_address, path.interface),
            store_port=sealed.store_port,
            interface=path.interface,
            address=path.local_address,
            roster_digest=sealed.roster_digest,
            unproved=sealed.unproved,
        )
        assert self.state.link is not None
        self.membership = Membership(self.identity, outcome, self.roster, lambda: self.session)
        self._change("GO", Attached(self.state.link))

    # --- REFUSED, CLOSED and loss ----------------------------------------------------------------------------------

    def _refused(self, session: KnownSession, frame: frames.Refused, now: float) -> None:
        session.hang_up()
        session.confirmed, session.acknowledged = False, None
        if self.membership is not None:
            self._detach(self.membership)
            return
        self._change(REFUSED, Searching())
        note(self.diagnostics.hosts, session.host_name, f"refused us: {frame.reason}")
        if frame.reason in ("session", "secret", "network"):
            session.ran = None
            session.retry_later(now)
            self.search.resume(now)
        elif frame.reason == "mesh":
            session.ran, session.retry_at = None, now + LEFT_OUT_SECONDS
            self.search.resume(now)
        elif frame.reason in ("running", "full"):
            session.turned_away = frame.reason == "running"
            # Full, or sealed without this member: wait for its end, like for any other run of the same job.
            full = session.offer.world_size
            session.offer = msgspec.structs.replace(session.offer, state="sealed", joined=full)
            self.search.race(session, now)
            self.search.resume(now)
        else:
            self.failure = errors.refused(self.identity, frame)

    def _closed_by_host(self, session: KnownSession, frame: frames.Closed, now: float) -> None:
        if frame.conflict:
            self.failure = errors.closed_by_host(self.identity, frame)
            return
        # With this member it has not decided GO, which would have come first on this connection, and never will.
        path = next(iter(session.paths), None)
        session.give_up(now)
        session.confirmed, session.acknowledged = False, None
        note(self.diagnostics.hosts, session.host_name, f"it ended its session: {frame.reason}")
        if frame.cause and self.diagnostics.gave_up is None:
            cause = f"{session.host_name} gave up with this cause: {frame.cause}"
            self.diagnostics.gave_up = cause, f"as that host says: {frame.remedy}"
        self._change(CLOSED, Searching())
        self.search.resume(now)
        if frame.offer is not None and self.identity.rank is None:
            self.search.look_again(frame.offer, path.interface if path is not None else "", now)

    def drop_host(self, reason: str, now: float) -> None:
        """Hang up on the host that this member is connected to: it is silent."""
        session = self.session
        assert session is not None
        session.give_up(now)
        self.host_lost(session, reason, now)

    def host_lost(self, session: KnownSession, reason: str, now: float) -> None:
        """Handle the end of the connection to the host."""
        note(self.diagnostics.hosts, session.host_name, f"connection lost: {reason}")
        state = self.state
        if self.membership is not None:
            if self.membership.lost(session, reason, now):
                way_back = WayBack(session, now + RETURN_SECONDS)
                event = "connection lost, the host is needed"
                if isinstance(state, Joining):
                    event = "connection lost on the way back"
                self._change(event, Away(way_back))
                self.search.race(session, now)
            else:
                self._detach(self.membership)
            return
        self.search.paths_broke()  # what broke this connection can fail the proof of another path as well
        self.search.resume(now)
        if isinstance(state, Joining) and state.way_back is not None:
            self._change("connection lost on the way back", Away(state.way_back))
        elif isinstance(state, Participating) and state.part.is_bound:
            self._change("connection lost after CONFIRMED", Away(WayBack(session, now + RETURN_SECONDS)))
            self.search.race(session, now)
        else:
            self._change(LOST, Searching())

    def unreached(self, session: KnownSession, now: float, *, refused: bool) -> None:
        """Handle a race that was lost; ``refused``: on every address, so that the host's process has ended."""
        if not (refused and isinstance(self.state, Away) and session is self.state.way_back.session):
            return
        if self.membership is None:
            self._change("refused on every address, or too late", Searching())
        elif now >= self.state.way_back.until:
            self._detach(self.membership)

    def _detach(self, membership: Membership) -> None:
        """Have no host any more: the job has formed."""
        membership.host_gone = True
        self._change(GONE, Detached())

    def _return(self, way_back: WayBack, now: float) -> None:
        """Call the host again, or give it up."""
        leaving = self.membership is not None and self.membership.leaving
        if now < way_back.until or leaving:
            self.search.race(way_back.session, now)
        elif self.membership is not None:
            self._detach(self.membership)
        else:
            self._change("refused on every address, or too late", Searching())

    # --- between looking and hosting -------------------------------------------------------------------------------

    @property
    def may_host(self) -> bool:
        """Whether this process can be the host."""
        return True

    def pause(self) -> None:
        """Stop looking: this process is about to host a session of its own."""
        if not isinstance(self.state, Searching):
            self._change(LEAVE, Searching())
        self.search.pause()

    def stand_back(self, refusal: frames.Refused, now: float) -> None:
        """Look for a host again, since this process, as the host, can't reach others."""
        self.search.resume(now)

    # --- time ------------------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        if self.failure is not None:
            return
        self.sightings.handle_timer(now)
        self._responder.callers.handle_timer(now)
        state = self.state
        if isinstance(state, Away) and state.way_back.session.race is None and now >= state.way_back.session.retry_at:
            self._return(state.way_back, now)
        if self.membership is None:
            self._gather(now)
        elif self.membership.unanswered(now):
            self.drop_host("it did not answer the good-bye", now)

    def _gather(self, now: float) -> None:
        """Do everything that is due until the job has formed."""
        self.failure = self.sightings.verdict(now)
        self.after_connection(now)
        link = self.state.link
        if link is not None and (why := link.check(now, bound=self._may_form)):
            self.drop_host(why, now)
        self.search.handle_timer(now)
        if isinstance(self.state, Participating):
            self.state.part.handle_timer(now)
            self.after_connection(now)
            if not self.state.link.status_asked and now >= self._deadline - STATUS_BEFORE_DEADLINE_SECONDS:
                self.state.link.status_asked = True
                self.ask_status()

    # --- the end ---------------------------------------------------------------------------------------------------

    def ask_status(self) -> None:
        """Ask the host for the job's status."""
        if self.part is not None:
            self.part.session.send(frames.Ask(what="status"))

    def give_up(self, known: MingleError | None, error: MingleError) -> None:
        """End at the deadline, with the error of what is known of other sessions, or else this one."""
        self.failure = known or self.search.conflict or self.failure or error

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Send the good-byes and close every connection.

        Args:
            reason: why.
            failed: whether the host must take this for a loss, after GO.
        """
        if self.membership is not None:
            self.membership.close(reason, failed=failed)
            if not isinstance(self.state, Detached):
                self._detach(self.membership)
        elif self.session is not None:
            self.session.send(frames.Leave(session=self.session.name, reason=reason[: frames.MAX_TEXT_CHARACTERS]))
        if self.part is not None:
            self.part.end()
        self._responder.callers.hang_up_all()
        self.sightings.hang_up()
