"""The network that a session takes: which one is proved next, and what follows from the confirmations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pytest
from msgspec import structs

from mingle.protocol.machine import Mesh
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.network_choice import (
    LEAST_SECONDS,
    MOST_MOVES,
    AnotherProof,
    Choice,
    Chosen,
    KeepApart,
    MeshBroken,
    NetworkChoice,
    NothingShared,
)
from mingle.protocol.session.seats import HostSeat, Seated, Seats
from mingle.wire.frames import Failure, Join, Path, ProcessInfo

Asked: TypeAlias = tuple[str, float]
HOST = b"H" * 16
FIRST, SECOND = "10.1.0.1", "10.2.0.1"
BOTH = (1, 2)
Failures: TypeAlias = Mapping[int, Sequence[int]]
"""The members that a member does not reach."""
HOLDS: Failures = {}
BROKEN: Failures = {1: [2]}


def member(number: int) -> bytes:
    return HOST if number == 0 else number.to_bytes(16, "big")


def paths(number: int, networks: Sequence[int] = BOTH) -> tuple[Path, ...]:
    return tuple(
        Path(host_address=f"10.{each}.0.1", local_address=f"10.{each}.0.{number + 1}", interface=f"eth{each}")
        for each in networks
    )


def join(number: int, networks: Sequence[int] = BOTH) -> Join:
    who = ProcessInfo(hostname=f"h{number}", pid=number, address=f"10.{networks[0]}.0.{number + 1}")
    proved = paths(number, networks)
    return Join(world_size=3, rank=number, node=f"node{number}", who=who, paths=proved, mesh_port=4000 + number)


class Session:
    """A session of three nodes, whose host is on two networks, and the choice of one of these."""

    def __init__(self, mode: Mesh = "on", *, deadline: float = float("inf"), partial: bool = False) -> None:
        host = HostSeat(member=HOST, applicant=join(0), prefix_lengths={FIRST: 24, SECOND: 24})
        self.seats = Seats(host, 3)
        admission = Admission(3)
        admission.takes_latecomers = partial
        self.choice = NetworkChoice(self.seats, admission, mode, deadline)
        self.proof: Proof | None = None

    def take(self, applicant: Join) -> None:
        """Give a newcomer its seat."""
        assert applicant.rank is not None
        self.seats.take(Seated(member(applicant.rank), applicant.rank, applicant, applicant.paths))

    def ask(self) -> Asked | None:
        """Begin the next proof, as CONFIRM does, and return its network and time."""
        self.proof = self.choice.next_proof(1.0)
        return None if self.proof is None else (self.proof.network, self.proof.seconds)

    def reach(self, networks: Sequence[int]) -> None:
        """Let the members have paths to these networks alone."""
        for seat in self.seats.others():
            assert seat.applicant.rank is not None
            seat.paths = paths(seat.applicant.rank, networks)

    def confirm(self, failures: Failures = HOLDS, *, networks: Sequence[int] = BOTH) -> Choice | Asked:
        """Let all nodes confirm; each of them failed to reach some. Return the choice, or what is proved next."""
        self.reach(networks)
        for number, others in failures.items():
            assert self.proof is not None
            self.proof.add(member(number), [Failure(member=member(other), how="no answer") for other in others])
        choice = self.choice.choose(self.proof, 2.0)
        asked = self.ask() if choice == AnotherProof() else None
        return asked or choice


def joined(mode: Mesh = "on", networks: Sequence[int] = BOTH, *, deadline: float = float("inf")) -> Session:
    """A session of which all have joined, over these networks, and are asked to prove the mesh."""
    session = Session(mode, deadline=deadline)
    for number in (1, 2):
        session.take(join(number, networks))
    session.ask()
    return session


# --- what is proved next ---------------------------------------------------------------------------------------------


def test_near_deadline_leaves_each_proof_a_least_time() -> None:
    assert joined(deadline=1.1).ask() == (FIRST, LEAST_SECONDS)
    assert joined(deadline=60.0).ask() == (FIRST, mesh_proof.NETWORK_SECONDS)


@pytest.mark.parametrize("partial", [False, True])
def test_free_seats_delay_the_proof_unless_the_session_forms_without_them(partial: bool) -> None:
    session = Session(partial=partial)
    session.take(join(1))
    assert (session.ask() is not None) is partial


def test_cloned_machines_are_told_apart_by_the_newest_paths() -> None:
    """Both joined through address translation, and from the same private address."""
    session = Session()
    for number in (1, 2):
        private = Path(host_address=FIRST, local_address="172.17.0.2", interface="eth0")
        applicant = join(number)
        who = structs.replace(applicant.who, address="172.17.0.2")
        addresses = ("172.17.0.2", *(path.local_address for path in applicant.paths))
        applicant = structs.replace(applicant, node="clone", who=who, paths=(private,), addresses=addresses)
        session.take(applicant)
    session.reach(BOTH)
    session.ask()
    assert session.proof is not None
    assert [target.member for target in session.proof.targets(member(1))] == [member(2), HOST]


# --- the choice ------------------------------------------------------------------------------------------------------


FIRST_TRY = (FIRST, mesh_proof.NETWORK_SECONDS)
NEXT_TRY = (SECOND, mesh_proof.NEXT_NETWORK_SECONDS)
LAST_TRY = (FIRST, mesh_proof.AGAIN_SECONDS)


@pytest.mark.parametrize(
    ("networks", "walk"),
    [
        pytest.param(BOTH, [(HOLDS, BOTH, Chosen(FIRST))], id="the mesh holds"),
        pytest.param((2,), [(HOLDS, (2,), Chosen(SECOND))], id="the members share the second network alone"),
        pytest.param(
            BOTH, [(BROKEN, BOTH, NEXT_TRY), (HOLDS, BOTH, Chosen(SECOND))], id="a pair fails: the next one is taken"
        ),
        pytest.param(
            (1,), [(BROKEN, (1,), LAST_TRY), (HOLDS, (1,), Chosen(FIRST))], id="a path that is back ends nothing"
        ),
        pytest.param(
            BOTH,
            [(BROKEN, BOTH, NEXT_TRY), (BROKEN, BOTH, LAST_TRY), (HOLDS, (2,), KeepApart())],
            id="the network is lost during its last proof",
        ),
        # JOIN has the first path that was proved, and CONFIRMED all of them.
        pytest.param(
            (2,),
            [(HOLDS, BOTH, FIRST_TRY), (HOLDS, BOTH, Chosen(FIRST))],
            id="the one that the confirmations prefer is proved as well",
        ),
    ],
)
def test_network_is_taken_on_which_the_mesh_holds(
    networks: Sequence[int], walk: list[tuple[Failures, Sequence[int], Choice | Asked]]
) -> None:
    session = joined(networks=networks)
    for failures, there, outcome in walk:
        assert session.confirm(failures, networks=there) == outcome


def test_network_is_proved_once_more_before_the_job_fails() -> None:
    session = joined()
    assert [session.confirm(BROKEN) for _ in BOTH] == [NEXT_TRY, LAST_TRY]
    broken = session.confirm({0: [2], 2: [0]})
    assert isinstance(broken, MeshBroken)
    assert (broken.proof.network, broken.proof.others) == (FIRST, (SECOND,))
    assert list(broken.proof.failures) == [(0, 2), (2, 0)]


def test_network_that_has_gone_from_the_host_is_not_proved_once_more() -> None:
    session = joined()
    assert session.confirm(BROKEN) == NEXT_TRY
    session.seats.host = structs.replace(session.seats.host, applicant=join(0, (2,)))
    assert session.confirm(BROKEN, networks=(2,)) == (SECOND, mesh_proof.AGAIN_SECONDS)


def test_members_without_a_common_network_are_asked_again_and_then_share_nothing() -> None:
    session = joined()
    assert session.confirm(networks=()) == KeepApart()
    nothing = session.confirm(networks=())
    assert isinstance(nothing, NothingShared)
    assert nothing.matrix.count(f"not {FIRST}") == 2


def test_network_that_only_the_confirmations_show_is_proved() -> None:
    session = Session()
    session.take(join(1, (1,)))
    session.take(join(2, (2,)))
    assert session.ask() is None
    assert session.confirm() == FIRST_TRY


def test_nodes_of_which_none_takes_part_need_no_proof() -> None:
    session = Session()
    for number in (1, 2):
        session.take(structs.replace(join(number), mesh_port=0))
    assert session.ask() is None
    assert session.confirm() == Chosen(FIRST)


# --- newer paths -----------------------------------------------------------------------------------------------------


def wander(session: Session) -> list[Choice | Asked]:
    """Let the members confirm another network than the one that was proved, until that decides something."""
    outcomes: list[Choice | Asked] = []
    while len(outcomes) <= 2 * MOST_MOVES:
        assert session.proof is not None
        outcomes.append(session.confirm(networks=(2,) if session.proof.network == FIRST else (1,)))
        if isinstance(outcomes[-1], KeepApart):
            break
    return outcomes


def test_paths_that_change_all_the_time_move_the_session_a_few_times_only() -> None:
    session = joined()
    wandered = wander(session)
    assert len(wandered) == MOST_MOVES + 1
    assert wandered[-1] == KeepApart()
    session.choice.restart()
    session.reach(BOTH)
    session.ask()
    assert wander(session) == wandered, "new members can change theirs as often"


def test_network_that_holds_is_taken_once_the_paths_have_changed_too_often() -> None:
    session = joined(networks=(2,))
    for _ in range(MOST_MOVES):
        assert session.confirm() == FIRST_TRY
        session.reach((2,))  # the path to the preferred network is gone at the next CONFIRM
        session.ask()
    assert session.confirm() == Chosen(SECOND)


# --- a warning -------------------------------------------------------------------------------------------------------


def test_warning_names_the_pair_and_new_members_are_asked_for_a_proof_all_the_same() -> None:
    session = joined("warn", (1,))
    assert session.confirm(BROKEN, networks=(1,)) == LAST_TRY
    chosen = session.confirm(BROKEN, networks=(1,))
    assert isinstance(chosen, Chosen)
    assert chosen.address == FIRST
    assert chosen.broken is not None
    assert list(chosen.broken.failures) == [(1, 2)]
    session.choice.restart()
    assert session.ask() == FIRST_TRY
