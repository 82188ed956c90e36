"""What a host says of itself and of its session: its addresses, its OFFER, and the answers to questions. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.machine import Endpoints, Identity, scoped
from mingle.protocol.session.phases import Committed, Placed, Stored
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.roster import described, whos
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_ADDRESSES, Offer

SEATS_PER_FRAME = 128
"""The seats in one ROSTER: with the longest names (four bytes a character) they still fit into one frame."""


class Description:
    """The host of a session, as other processes see it.

    Args:
        identity: who hosts.
        session: the name of the session.
        endpoints: where others can connect to the host.
        started: when the session was opened.
    """

    def __init__(self, identity: Identity, session: bytes, endpoints: Endpoints, started: float) -> None:
        self.endpoints = endpoints
        self.newest_addresses = endpoints.addresses
        """The addresses of this machine now; while the session is sealed, they can differ from those announced."""
        self._identity = identity
        self._session = session
        self._started = started
        self._members: tuple[tuple[object, ...], tuple[int, ...], str] = ((), (), "")
        """A version of the status, with the ranks of the members at that version, and with the members as text."""

    # --- its addresses ---------------------------------------------------------------------------------------------

    def take_newest_addresses(self) -> bool:
        """Announce the addresses that the machine has now; return whether they are others."""
        changed = self.newest_addresses != self.endpoints.addresses
        self.endpoints = msgspec.structs.replace(self.endpoints, addresses=self.newest_addresses)
        return changed

    def path(self, announced: str) -> frames.Path:
        """Return the path from an announced address to a local one."""
        return next(each for each in self._paths() if each.host_address == announced)

    def listens_at(self, announced: str) -> str:
        """Return the local address, with its zone, that serves an announced address."""
        path = self.path(announced)
        return scoped(path.local_address, path.interface)

    def has(self, address: str) -> bool:
        """Return whether the machine has an address now."""
        return any(each.address == address for each in self.newest_addresses)

    def _announced(self) -> tuple[str, ...]:
        """Return every address at which the control port can be reached."""
        own = tuple(each.address for each in self.endpoints.addresses)
        return (*self.endpoints.advertised, *own)[:MAX_ADDRESSES]

    def _paths(self) -> tuple[frames.Path, ...]:
        """Return the path from each announced address. NAT leads the advertised ones to our first address."""
        own, advertised = self.endpoints.addresses, self.endpoints.advertised
        paths = [(each.address, each) for each in own] + [(each, own[0]) for each in advertised]
        return tuple(
            frames.Path(host_address=announced, local_address=each.address, interface=each.interface[:64])
            for announced, each in paths
        )

    # --- to its members --------------------------------------------------------------------------------------------

    def seat(self, readdressed_at: float = float("-inf")) -> HostSeat:
        """Return the host's own seat; ``readdressed_at``: when its addresses changed, if they did."""
        own = self.endpoints.addresses
        lengths = {each.address: each.prefix_length for each in own}
        return HostSeat(
            member=self._identity.member,
            applicant=msgspec.structs.replace(
                self._identity.join(self._process(), self._paths()), mesh_port=self.endpoints.port
            ),
            # No member is on the subnet of an advertised address.
            prefix_lengths={**dict.fromkeys(self.endpoints.advertised, 0), **lengths},
            last_resort=frozenset(each.address for each in own if each.last_resort),
            named=self.endpoints.named,
            readdressed_at=readdressed_at,
        )

    def conversation(self, key: JobKey | None) -> HostConversation:
        """Begin the host's side of a conversation with a caller."""
        return HostConversation(
            job=self._identity.job,
            attempt=self._identity.attempt,
            session=self._session,
            addresses=self._announced(),
            port=self.endpoints.port,
            key=key,
        )

    def roster(self, registrar: Registrar) -> Iterator[frames.AnyFrame]:
        """Yield the roster in frames that are short enough; nothing before the seal."""
        roster = registrar.roster()
        for first in range(0, len(roster), SEATS_PER_FRAME):
            part = tuple(roster[first : first + SEATS_PER_FRAME])
            yield frames.Roster(first=first, total=len(roster), seats=part)

    # --- to all ----------------------------------------------------------------------------------------------------

    def offer(self, registrar: Registrar) -> Offer:
        """Return the OFFER of the session."""
        identity = self._identity
        return Offer(
            job=identity.job,
            attempt=identity.attempt,
            session=self._session,
            host=identity.member,
            addresses=self._announced(),
            port=self.endpoints.port,
            world_size=identity.world_size,
            joined=len(registrar.seats),
            state="sealed" if registrar.state.sealed else "open",
            kind=identity.kind,
            assigned=registrar.seats.assigned,
            hostname=identity.who.hostname,
            pid=identity.who.pid,
            quorum=registrar.admission.had_quorum,
        )

    def running(self, registrar: Registrar, caller: frames.ProcessInfo, now: float) -> frames.Running:
        """Return the answer to a caller that only asks for the state of the session."""
        state, version = registrar.state, registrar.status_version()
        if self._members[0] != version:  # callers can ask often
            members = whos(registrar.seats.members(), state.places)
            ranks = tuple(sorted(who.rank for who in members if who.rank is not None))[:4096]
            shared = registrar.admission.shared_machines()
            roster = f"{described(members)}; {shared}" if shared else described(members)
            self._members = version, ranks, roster[: frames.MAX_TEXT_CHARACTERS]
        return frames.Running(
            state="running" if isinstance(state, Committed) else "sealed" if state.sealed else "open",
            world_size=self._identity.world_size,
            seconds=max(0.0, now - (state.since if isinstance(state, Placed) else self._started)),
            host=self._process(),
            joined=self._members[1],
            missing=registrar.status().awaited[:4096],
            roster=self._members[2],
            store_address=state.store_address if isinstance(state, Stored) else None,
            store_port=state.store_port if isinstance(state, Stored) else 0,
            surplus=registrar.admission.is_surplus(caller, now),
        )

    def _process(self) -> frames.ProcessInfo:
        address = self.endpoints.addresses[0].address
        return msgspec.structs.replace(self._identity.who, address=address, rank=self._identity.rank)
