"""The sessions that a rank has heard of, and the races by which they are proved: pure.

A datagram may name any session; what is kept of them is bounded, and nothing follows from one that is not proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from mingle.protocol.claims import DialBudget
from mingle.protocol.connection_race import ConnectionRace, DialTarget, Verdict, address_seconds
from mingle.protocol.handshake import Call
from mingle.protocol.machine import Effect, Identity, NewId
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer

RETRY_SECONDS = 0.25
"""How soon a session that could not be reached may be tried again."""
# Sessions remembered at a time, of all and by the address that their datagrams came from; bounded against somebody who
# invents them, and who shall not leave the others without a place.
REMEMBERED_SESSIONS = 32
REMEMBERED_BY_SENDER = 8


class Session(Struct, eq=False):
    """A session that was heard of."""

    offer: Offer
    targets: Sequence[DialTarget]
    sender: str = ""
    """The address of whoever spoke of it first; empty: a connection that has proved itself."""
    race: ConnectionRace | None = None
    retry_at: float = 0.0
    confirmed: bool = False
    """We have confirmed there: it may have decided GO with us in it."""
    counted_dead: bool = False
    """Silent for too long once: from now on it blocks us only when it speaks."""
    running: frames.Running | None = None
    """What it said of itself, if it runs without us."""
    blocking_since: float | None = None
    """Since when it is known, or suspected, to run without us."""
    told: bool = False
    """Whether people were told that it does."""

    @property
    def name(self) -> bytes:
        """The id that its host has given it."""
        return self.offer.session

    @property
    def host_name(self) -> str:
        """Its host, for reports."""
        return self.offer.host_name

    @property
    def purpose(self) -> frames.Purpose:
        """What a race for it is for: to join it, or, when it is sealed without us, to see whether it lives."""
        return "join" if self.offer.takes_members or self.confirmed else "probe"

    def races_to(self, purpose: frames.Purpose) -> bool:
        """Whether a race for that purpose is under way."""
        return self.race is not None and self.race.purpose == purpose and self.race.verdict is Verdict.RACING

    def send(self, frame: frames.AnyFrame) -> None:
        """Says something to its host, if it is on the line."""
        if self.race is not None and self.race.conversation is not None:
            self.race.conversation.send(frame)

    def hang_up(self) -> None:
        """Ends its race or its connection."""
        if self.race is not None:
            self.race.abandon()
            self.race = None

    def retry_later(self, now: float) -> None:
        """No other race for it starts at once."""
        self.retry_at = now + RETRY_SECONDS


class Sessions(Struct):
    """Keeps them, and knows which connection is whose."""

    identity: Identity
    key: JobKey | None
    new_id: NewId
    effects: list[Effect]
    dials: DialBudget = field(default_factory=DialBudget)
    _known: dict[bytes, Session] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._known.values()))

    def get(self, name: bytes) -> Session | None:
        """The session of that id, if it was heard of."""
        return self._known.get(name)

    def remember(
        self, offer: Offer, targets: Sequence[DialTarget], *, keep: Session | None, sender: str = ""
    ) -> Session | None:
        """Keeps a session that was not known; None if there is no room. ``keep`` is never forgotten for it."""
        of_sender = [each for each in self._known.values() if sender and each.sender == sender]
        crowded = of_sender if len(of_sender) >= REMEMBERED_BY_SENDER else list(self._known.values())
        if crowded is of_sender or len(crowded) >= REMEMBERED_SESSIONS:
            # A flood of forged ones waits for its dial budget; none of them is in the way of one that can be dialled.
            idle = [each for each in crowded if each.race is None and each is not keep]
            idle += [each for each in crowded if each.race is not None and not each.race.dialing]
            if not idle:
                return None
            idle[0].hang_up()
            del self._known[idle[0].name]
        session = self._known[offer.session] = Session(offer, targets, sender)
        return session

    def race(self, session: Session, now: float) -> None:
        """Starts a race for a session, on all addresses that it is known by."""
        purpose = session.purpose
        session.race = ConnectionRace(
            Call(
                job=self.identity.job,
                attempt=self.identity.attempt,
                member=self.identity.member,
                session=session.name,
                purpose=purpose,
                who=self.identity.who,
            ),
            session.targets,
            session.offer.port,
            key=self.key,
            new_id=self.new_id,
            effects=self.effects,
            now=now,
            patience=address_seconds(self.identity.world_size),
            all_ways=purpose == "join",
            dials=self.dials,
        )

    def owns(self, conn: int) -> bool:
        """Tells whether a connection belongs to one of them."""
        return any(each.race is not None and each.race.owns(conn) for each in self._known.values())

    def owner(self, conn: int) -> tuple[Session, ConnectionRace]:
        """The session, and its race, to which a connection belongs."""
        return next(
            (each, each.race) for each in self._known.values() if each.race is not None and each.race.owns(conn)
        )

    def flush(self) -> None:
        """Writes what the conversations want to say."""
        for session in self._known.values():
            if session.race is not None:
                session.race.flush()

    def keep_only(self, chosen: Session) -> None:
        """Ends all races: the chosen session keeps the connection that won, the others are hung up on."""
        for session in self._known.values():
            if session is not chosen:
                session.hang_up()
            elif session.race is not None:
                session.race.stop_trying()

    def hang_up(self) -> None:
        """Hangs up everywhere."""
        for session in self._known.values():
            session.hang_up()
