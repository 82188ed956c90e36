"""The network that a session takes: which one is proved next, and what follows from the confirmations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

HOST = b"H" * 16
FIRST, SECOND = "10.1.0.1", "10.2.0.1"
BOTH = (1, 2)
BROKEN = {1: [2]}
"""Member 1 does not reach member 2."""


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

    def ask(self) -> tuple[str, float] | None:
        """Begin the next proof, as CONFIRM does, and return its network and time."""
        self.proof = self.choice.next_proof(1.0)
        return None if self.proof is None else (self.proof.network, self.proof.seconds)

    def reach(self, networks: Sequence[int]) -> None:
        """Let the members have paths to these networks alone."""
        for seat in self.seats.others():
            assert seat.applicant.rank is not None
            seat.paths = paths(seat.applicant.rank, networks)

    def confirm(self, failures: Mapping[int, Sequence[int]] | None = None, *, networks: Sequence[int] = BOTH) -> Choice:
        """Let all nodes confirm; each of them failed to reach some."""
        self.reach(networks)
        for number, others in (failures or {}).items():
            assert self.proof is not None
            self.proof.add(member(number), [Failure(member=member(other), how="no answer") for other in others])
        return self.choice.choose(self.proof, 2.0)


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


@pytest.mark.parametrize(("networks", "chosen"), [(BOTH, FIRST), ((2,), SECOND)])
def test_network_on_which_the_mesh_holds_is_chosen(networks: Sequence[int], chosen: str) -> None:
    session = joined(networks=networks)
    assert session.confirm(networks=networks) == Chosen(chosen)


def test_next_network_is_proved_and_taken_if_a_pair_fails() -> None:
    session = joined()
    assert session.confirm(BROKEN) == AnotherProof()
    assert session.ask() == (SECOND, mesh_proof.NEXT_NETWORK_SECONDS)
    assert session.confirm() == Chosen(SECOND)


def test_network_is_proved_once_more_before_the_job_fails() -> None:
    session = joined()
    for _ in BOTH:
        assert session.confirm(BROKEN) == AnotherProof()
        asked = session.ask()
    assert asked == (FIRST, mesh_proof.AGAIN_SECONDS)
    broken = session.confirm({0: [2], 2: [0]})
    assert isinstance(broken, MeshBroken)
    assert (broken.proof.network, broken.proof.others) == (FIRST, (SECOND,))
    assert list(broken.proof.failures) == [(0, 2), (2, 0)]


def test_network_that_has_gone_from_the_host_is_not_proved_once_more() -> None:
    session = joined()
    assert session.confirm(BROKEN) == AnotherProof()
    session.ask()
    session.seats.host = structs.replace(session.seats.host, applicant=join(0, (2,)))
    assert session.confirm(BROKEN, networks=(2,)) == AnotherProof()
    assert session.ask() == (SECOND, mesh_proof.AGAIN_SECONDS)


def test_path_that_is_back_at_the_second_try_ends_nothing() -> None:
    session = joined(networks=(1,))
    assert session.confirm(BROKEN, networks=(1,)) == AnotherProof()
    assert session.ask() == (FIRST, mesh_proof.AGAIN_SECONDS)
    assert session.confirm(networks=(1,)) == Chosen(FIRST)


def test_network_that_is_lost_during_the_last_proof_leaves_nothing_shared() -> None:
    session = joined()
    for _ in BOTH:
        session.confirm(BROKEN)
        session.ask()
    assert session.confirm(networks=(2,)) == KeepApart()


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
    assert session.confirm() == AnotherProof()
    assert session.ask() == (FIRST, mesh_proof.NETWORK_SECONDS)


def test_nodes_of_which_none_takes_part_need_no_proof() -> None:
    session = Session()
    for number in (1, 2):
        session.take(structs.replace(join(number), mesh_port=0))
    assert session.ask() is None
    assert session.confirm() == Chosen(FIRST)


# --- newer paths -----------------------------------------------------------------------------------------------------


def test_network_that_the_confirmations_prefer_is_proved_as_well() -> None:
    """JOIN has the first path that was proved, and CONFIRMED all of them."""
    session = joined(networks=(2,))
    assert session.ask() == (SECOND, mesh_proof.NETWORK_SECONDS)
    assert session.confirm() == AnotherProof()
    assert session.ask() == (FIRST, mesh_proof.NETWORK_SECONDS)
    assert session.confirm() == Chosen(FIRST)


def test_network_on_which_the_mesh_is_broken_is_not_preferred() -> None:
    session = joined()
    session.confirm(BROKEN)
    session.ask()
    assert session.confirm() == Chosen(SECOND)


def wander(session: Session) -> list[Choice]:
    """Let the members confirm another network than the one that was proved, until that decides something."""
    choices: list[Choice] = []
    while len(choices) <= 2 * MOST_MOVES:
        assert session.proof is not None
        choices.append(session.confirm(networks=(2,) if session.proof.network == FIRST else (1,)))
        if choices[-1] != AnotherProof():
            break
        session.ask()
    return choices


def test_paths_that_change_all_the_time_move_the_session_a_few_times_only() -> None:
    assert wander(joined()) == [AnotherProof()] * MOST_MOVES + [KeepApart()]


def test_network_that_holds_is_taken_once_the_paths_have_changed_too_often() -> None:
    session = joined(networks=(2,))
    for _ in range(MOST_MOVES):
        assert session.confirm() == AnotherProof()
        session.reach((2,))  # the path to the preferred network is gone at the next CONFIRM
        session.ask()
    assert session.confirm() == Chosen(SECOND)


# --- a warning, and new members --------------------------------------------------------------------------------------


def test_warning_names_the_pair() -> None:
    session = joined("warn", (1,))
    assert session.confirm(BROKEN, networks=(1,)) == AnotherProof()
    session.ask()
    chosen = session.confirm(BROKEN, networks=(1,))
    assert isinstance(chosen, Chosen)
    assert chosen.address == FIRST
    assert chosen.broken is not None
    assert list(chosen.broken.failures) == [(1, 2)]


def test_new_members_are_asked_for_a_proof_after_a_warning() -> None:
    session = joined("warn", (1,))
    for _ in range(2):
        session.confirm(BROKEN, networks=(1,))
        session.ask()
    session.choice.restart()
    assert session.ask() == (FIRST, mesh_proof.NETWORK_SECONDS)


def test_new_members_can_change_their_paths_as_often() -> None:
    session = joined()
    before = wander(session)
    session.choice.restart()
    session.reach(BOTH)
    session.ask()
    assert wander(session) == before
