"""What a session says of its members, to other processes and to people. Pure.

The registrar (:mod:`mingle.protocol.session.registrar`) decides; nothing here does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mingle.protocol.explain import mesh_report
from mingle.protocol.explain.errors import refusal_text
from mingle.protocol.session.phases import Confirming, State
from mingle.protocol.session.seating import NodeKey, node_keys
from mingle.protocol.session.seats import Seated, Seats
from mingle.text import few
from mingle.wire import frames

# Bounds against a rank that crashes and restarts in a loop, so that STATUS fits into one frame whatever the names are.
REMEMBERED_DEPARTURES = 16
REMEMBERED_TEXT = 256
"""The number of characters kept of each departure and refusal."""
NAMED_AGENTS = 32
"""How many agents STATUS names."""


class History:
    """The members that have gone and the newcomers that were refused, as texts."""

    def __init__(self) -> None:
        self.departures: deque[str] = deque(maxlen=REMEMBERED_DEPARTURES)
        self.refusals: deque[str] = deque(maxlen=REMEMBERED_DEPARTURES)

    def gone(self, seat: Seated, reason: str) -> None:
        """Remember a member that is gone."""
        self.departures.append(f"{seat.who}: {reason}"[:REMEMBERED_TEXT])

    def refused(self, applicant: frames.Join, refusal: frames.Refused) -> None:
        """Remember a newcomer that was refused, unless its settings are right."""
        # These only wait, or come without their token.
        if refusal.reason not in ("running", "full", "surplus", "session"):
            who = msgspec.structs.replace(applicant.who, rank=applicant.rank)
            self.refusals.append(f"{who}: {refusal_text(refusal, who.unit)}"[:REMEMBERED_TEXT])

    def came(self, applicant: frames.Join) -> None:
        """Forget the refusals of a rank that has a seat now: it was started again with the right settings."""
        came = f"{applicant.who.unit} {applicant.rank} on "
        for refusal in [each for each in self.refusals if each.startswith(came)]:
            if ": rank taken (" not in refusal:  # else another process claimed this rank, and still may
                self.refusals.remove(refusal)


def status(state: State, seats: Seats, history: History, *, lacks: str, named: bool) -> frames.Status:
    """Return the state of the session, for people.

    Args:
        state: of the session.
        seats: its seats.
        history: who has gone, and who was refused.
        lacks: what it lacks before it can be sealed, as text.
        named: whether the members are named.
    """
    members, behind = seats.members(), seats.behind(state.barrier)
    proof = state.proof if isinstance(state, Confirming) else None
    unconfirmed = (rank_of(seat, state.places) for seat in behind)
    agents = whos(members, state.places)[:NAMED_AGENTS] if named else []
    ids = b"".join(seat.member[: frames.SEATED_ID_BYTES] for seat in members)
    return frames.Status(
        joined=len(members),
        world_size=seats.size,
        missing=seats.missing[:4096],
        departed=tuple(sorted(seats.departed_ranks))[:4096],
        left=tuple(history.departures),
        refused=tuple(history.refusals),
        phase=state.phase,
        unconfirmed=tuple(sorted(rank for rank in unconfirmed if rank is not None))[:4096],
        present=tuple(str(who)[:REMEMBERED_TEXT] for who in agents),
        lacks=lacks,
        hosts="" if seats.is_full else hosts(members),
        unanswered="" if proof is None else mesh_report.unanswered(proof, {seat.member for seat in behind}),
        seated=ids if len(members) <= frames.MAX_SEATED else b"",
    )


def status_version(state: State, seats: Seats, history: History) -> tuple[object, ...]:
    """Return a value that changes whenever the status changes, but for what the session lacks."""
    awaited = tuple(seat.member for seat in seats.behind(state.barrier))
    proof = state.proof if isinstance(state, Confirming) else None
    unanswered = () if proof is None else tuple(proof.unanswered)
    gone = tuple(history.departures), tuple(history.refusals), frozenset(seats.departed_ranks)
    return (*version(state), tuple(seats), awaited, *gone, unanswered)


def whos(members: Iterable[Seated], places: Mapping[bytes, frames.Place]) -> list[frames.ProcessInfo]:
    """Return the members' processes by rank, or in order while they have none.

    Args:
        members: the members.
        places: their places in the job, once they have any.
    """
    ordered = sorted(members, key=lambda seat: seat.key)
    everyone = [msgspec.structs.replace(seat.applicant.who, rank=rank_of(seat, places)) for seat in ordered]
    return sorted(everyone, key=lambda who: -1 if who.rank is None else who.rank)


def rank_of(seat: Seated, places: Mapping[bytes, frames.Place]) -> int | None:
    """Return a member's rank in the job, or the one that it was given."""
    place = places.get(seat.member)
    return place.rank if place else seat.applicant.rank


def described(members: Sequence[frames.ProcessInfo]) -> str:
    """Return the members as text for an error; cut where it gets long."""
    return few(members, "; ")[: frames.MAX_TEXT_CHARACTERS]


def hosts(members: Iterable[Seated]) -> str:
    """Return the host names of the members' machines, in order; with their addresses where machines share a name."""
    applicants = [seat.applicant for seat in sorted(members, key=lambda seat: seat.key)]
    machines: dict[tuple[str, NodeKey], str] = {}
    for key, applicant in zip(node_keys(applicants), applicants, strict=True):
        machines.setdefault((applicant.who.hostname or "unknown", key), applicant.who.address)
    named = [(name, address) for (name, _), address in machines.items()]
    shared = Counter(name for name, _ in named)
    return few(f"{name} ({address})" if address and shared[name] > 1 else name for name, address in named)


def roster(members: Iterable[Seated], places: Mapping[bytes, frames.Place], store_address: str) -> list[frames.Seat]:
    """Return the seats of all members, in order of rank.

    Args:
        members: the members.
        places: their places in the job.
        store_address: the host's address on the network of the job.
    """
    listed = []
    for seat in members:
        place = places[seat.member]
        listed.append(
            frames.Seat(
                rank=place.rank,
                local_rank=place.local_rank,
                node_rank=place.node_rank,
                hostname=seat.applicant.who.hostname,
                address=_address(seat, store_address),
                pid=seat.applicant.who.pid,
                program_port=seat.applicant.program_port,
            )
        )
    return sorted(listed, key=lambda seat: seat.rank)


def version(state: State) -> tuple[object, ...]:
    """Return a value that changes whenever the roster changes."""
    return (type(state), state.epoch, tuple(state.places))


def _address(seat: Seated, store_address: str) -> str:
    for path in seat.paths:
        if path.host_address == store_address:
            return path.local_address
    return seat.applicant.who.address
