"""What a host says of itself: its addresses and name, its own seat, how its session stands, and its place at the end.

Everything here is computed from who the host is and from the seats; nothing is decided and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from mingle.protocol.handshake import Call, HostConversation
from mingle.protocol.machine import Address, Endpoints, Formation, Identity, scoped
from mingle.protocol.registrar import HostSeat, Phase, Registrar, roster_digest
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_ADDRESSES, Bye, Offer

# The longest names (four bytes a character) of so many seats still fit into one frame.
SEATS_PER_FRAME = 128


class _Crowd(Struct, frozen=True):
    """The members of a session at one time."""

    version: tuple[object, ...]
    joined: tuple[int, ...]
    missing: tuple[int, ...]
    roster: str


class Introduction(Struct, kw_only=True):
    """ProcessInfo a host is, and the messages made of it. Only its addresses ever change."""

    identity: Identity
    session: bytes
    endpoints: Endpoints
    started: float
    _described: _Crowd | None = None

    # --- who it is, and where --------------------------------------------------------------------------------------

    def announced(self) -> tuple[str, ...]:
        """Every address under which the control port may be dialled."""
        own = tuple(each.address for each in self.endpoints.addresses)
        return (*self.endpoints.advertised, *own)[:MAX_ADDRESSES]

    def who(self) -> frames.ProcessInfo:
        """ProcessInfo it is, for people."""
        address, rank = self.endpoints.addresses[0].address, self.identity.rank
        return msgspec.structs.replace(self.identity.who, address=address, rank=rank)

    def paths(self) -> tuple[frames.Path, ...]:
        """The ways from an announced address to where to listen: NAT leads the advertised ones to our first own."""
        own, advertised = self.endpoints.addresses, self.endpoints.advertised
        ways = [(each.address, each) for each in own] + [(each, own[0]) for each in advertised]
        return tuple(
            frames.Path(host_address=announced, local_address=each.address, interface=each.interface[:64])
            for announced, each in ways
        )

    def path(self, announced: str) -> frames.Path:
        """Returns the way from one announced address."""
        return next(each for each in self.paths() if each.host_address == announced)

    def listens_at(self, announced: str) -> str:
        """Returns where to listen for who comes to one announced address, with its zone."""
        path = self.path(announced)
        return scoped(path.local_address, path.interface)

    def seat(self) -> HostSeat:
        """Its own seat in its session. Nothing is on the subnet of an advertised address."""
        own = self.endpoints.addresses
        lengths = {each.address: each.prefix_length for each in own}
        return HostSeat(
            member=self.identity.member,
            applicant=self.join(),
            prefix_lengths={**dict.fromkeys(self.endpoints.advertised, 0), **lengths},
            last_resort=frozenset(each.address for each in own if each.last_resort),
            named=self.endpoints.named,
        )

    def readdress(self, addresses: tuple[Address, ...], registrar: Registrar) -> None:
        """Its interfaces have changed: from now on it is to be found at these, its register is told."""
        self.endpoints = msgspec.structs.replace(self.endpoints, addresses=addresses)
        registrar.readdress(self.seat())

    # --- on a connection -------------------------------------------------------------------------------------------

    def join(self) -> frames.Join:
        """Its application for a seat in its own session."""
        return self.identity.join(self.who(), self.paths())

    def conversation(self, key: JobKey | None) -> HostConversation:
        """Begins its side of a conversation with a caller."""
        return HostConversation(
            job=self.identity.job,
            attempt=self.identity.attempt,
            session=self.session,
            addresses=self.announced(),
            port=self.endpoints.port,
            key=key,
        )

    def call(self, session: bytes, purpose: frames.Purpose) -> Call:
        """Its HELLO to the host of another session."""
        return Call(
            job=self.identity.job,
            attempt=self.identity.attempt,
            member=self.identity.member,
            session=session,
            purpose=purpose,
            who=self.who(),
        )

    # --- how its session stands ------------------------------------------------------------------------------------

    def offer(self, seats: Registrar) -> Offer:
        """What the network is told."""
        return Offer(
            job=self.identity.job,
            attempt=self.identity.attempt,
            session=self.session,
            host=self.identity.member,
            addresses=self.announced(),
            port=self.endpoints.port,
            world_size=self.identity.world_size,
            joined=len(seats.seats) + len(seats.latecomers),
            quorum=seats.admission.had_quorum,
            state="sealed" if seats.phase.sealed else "open",
            kind=self.identity.kind,
            assigned=seats.assigned,
            hostname=self.identity.who.hostname,
            pid=self.identity.who.pid,
        )

    def bye(self) -> Bye:
        """What the network is told when the session ends."""
        return Bye(job=self.identity.job, attempt=self.identity.attempt, session=self.session)

    def running(self, seats: Registrar, now: float, *, sealed_since: float, store_port: int) -> frames.Running:
        """What a caller is told that only asks."""
        phase, crowd = seats.phase, self._crowd(seats)
        store_stands = phase in (Phase.SEALED, Phase.RUNNING)
        return frames.Running(
            state="running" if phase is Phase.RUNNING else "sealed" if phase.sealed else "open",
            world_size=self.identity.world_size,
            seconds=max(0.0, now - (sealed_since if phase.sealed else self.started)),
            host=self.who(),
            joined=crowd.joined,
            missing=crowd.missing,
            roster=crowd.roster,
            store_address=seats.store_address if store_stands else "",
            store_port=store_port if store_stands else 0,
        )

    def _crowd(self, seats: Registrar) -> _Crowd:
        """The description of the members, cached until the roster changes, because callers can ask often."""
        version = seats.status_version()
        if self._described is None or self._described.version != version:
            self._described = _Crowd(
                version,
                joined=tuple(sorted(who.rank for who in seats.whos() if who.rank is not None))[:4096],
                missing=seats.missing[:4096],
                roster=seats.describe_members(),
            )
        return self._described

    def formation(self, seats: Registrar, store_port: int) -> Formation:
        """Its own place in the job that has formed."""
        where = seats.places[self.identity.member]
        roster = seats.roster()
        seat = next(each for each in roster if each.rank == where.rank)
        path = self.path(seats.store_address)
        return Formation(
            session=self.session,
            rank=where.rank,
            world_size=self.identity.world_size,
            local_rank=where.local_rank,
            local_world_size=where.local_world_size,
            node_rank=where.node_rank,
            num_nodes=where.num_nodes,
            store_address=scoped(path.local_address, path.interface),
            store_port=store_port,
            interface=path.interface,
            address=seat.address,
            roster_digest=roster_digest(roster),
        )


def roster_parts(seats: Registrar) -> Iterator[frames.Roster]:
    """Yields who is in the session, as frames that are short enough; nothing before it is sealed."""
    if not seats.phase.sealed:
        return
    roster = seats.roster()
    for first in range(0, len(roster), SEATS_PER_FRAME):
        part = tuple(roster[first : first + SEATS_PER_FRAME])
        yield frames.Roster(first=first, total=len(roster), seats=part)
