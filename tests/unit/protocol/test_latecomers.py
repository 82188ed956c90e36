"""How latecomers become members of a running session, one by one, and what keeps them out."""

from __future__ import annotations

import pytest

from mingle.protocol.machine import Mesh, roster_digest
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.latecomers import ADMITTED_SECONDS
from mingle.protocol.session.phases import Committed
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from mingle.wire.frames import Failure, Path, Place, ProcessInfo, Unreached
from tests.support.registrar_port import RecordingPort, of, told

SESSION = b"S" * 16
STORE = "10.0.0.1"
ELSEWHERE = "172.17.0.1"
MEMBERS = "ABC"
"""The members of the session; the first is the host."""


def member(letter: str) -> bytes:
    return letter.encode() * 16


def paths(letter: str, *host_addresses: str) -> tuple[Path, ...]:
    """The paths of an agent, from its address on each network."""
    return tuple(
        Path(host_address=each, local_address=f"{each.removesuffix('1')}{ord(letter) - 64}", interface="eth0")
        for each in host_addresses
    )


def join(letter: str, network: str = STORE, node: str = "") -> frames.Join:
    proved = paths(letter, network)
    who = ProcessInfo(hostname=f"node-{letter}", pid=ord(letter), address=proved[0].local_address, unit="node")
    port = 4000 + ord(letter)
    return frames.Join(world_size=5, node=node or letter, kind="agents", who=who, paths=proved, mesh_port=port)


def place(rank: int) -> Place:
    return Place(rank=rank, world_size=5, local_rank=0, local_world_size=1, node_rank=rank, num_nodes=5)


class Rules(Admission):
    """The rules of the test."""

    kind = "agents"
    takes_latecomers = True

    def __init__(self) -> None:
        super().__init__(5)
        self.admitting = self.counting = self.news = True
        self.silent: set[bytes] = set()
        self.gone_members: list[bytes] = []
        self.sealed_members: list[bytes] = []

    def complete(self, now: float) -> bool:
        return len(self.seats) == len(MEMBERS)

    def admits(self, now: float) -> bool:
        return self.admitting

    def acknowledged(self, member: bytes, now: float) -> bool:
        return self.counting

    def can_go(self, now: float) -> bool:
        return True

    def answers(self, member: bytes, now: float) -> bool:
        assert member in self.seats
        return member not in self.silent

    def leave_out(self, text: str) -> bool:
        return self.news

    def sealed(self, member: bytes, now: float) -> None:
        self.sealed_members.append(member)

    def gone(self, member: bytes) -> None:
        self.gone_members.append(member)

    def members(self, *, joining: int = 0) -> frames.Members:
        return frames.Members(generation=joining, quorum=True, present=())


class Running:
    """A running session of three agents, with two free seats."""

    def __init__(self, mesh: Mesh = "on") -> None:
        host = HostSeat(member=member("A"), applicant=join("A"), prefix_lengths={STORE: 24})
        self.port = RecordingPort()
        self.rules = Rules()
        self.registrar = Registrar(SESSION, host, self.port, self.port, self.rules, mesh=mesh)
        self.seats = self.registrar.seats
        self.join(MEMBERS[1:])
        for letter in MEMBERS[1:]:
            self.confirm(letter)
        own = frames.Confirmed(session=SESSION, epoch=1, paths=self.seats.own.paths)
        self.registrar.confirmed(None, own, 0.0)
        self.registrar.store_opened(1, 5000, "token", 0.0)
        for letter in MEMBERS[1:]:
            self.acknowledge(letter)
        assert isinstance(self.registrar.state, Committed)
        self.committed = self.registrar.state
        self.port.take()
        self.rules.sealed_members.clear()

    @property
    def refused(self) -> list[tuple[int, frames.Refused]]:
        """The refusals since the last time."""
        sent = [(call[1], call[2]) for call in of(self.port.calls, "send")]
        return [(conn, frame) for conn, frame in sent if isinstance(frame, frames.Refused)]

    def join(self, letters: str, network: str = STORE, node: str = "") -> None:
        """Let these come."""
        for letter in letters:
            self.registrar.join(ord(letter), member(letter), join(letter, network, node), 0.0)

    def leave(self, letter: str) -> None:
        """Let the connection of one end."""
        self.registrar.lost(ord(letter), 1.0)

    def ask(self) -> None:
        """Let the host do what follows from an event."""
        self.registrar.advance(1.0, held=False)

    def asked(self, letter: str) -> list[frames.Confirm]:
        """The questions to a latecomer since the last time."""
        asked = told(self.port.calls, ord(letter), frames.Confirm)
        self.port.calls = [each for each in self.port.calls if each[1:3] not in [(ord(letter), one) for one in asked]]
        return asked

    def targets(self, letter: str) -> str:
        """Whom a latecomer was asked to dial."""
        (confirm,) = self.asked(letter)
        return "".join(target.member[:1].decode() for target in confirm.targets)

    def confirm(self, letter: str, failed: str = "", how: Unreached = "no answer", network: str = STORE) -> None:
        """Let a latecomer confirm that it has not reached these."""
        failures = tuple(Failure(member=member(other), how=how) for other in failed)
        frame = frames.Confirmed(session=SESSION, epoch=1, paths=paths(letter, network), failures=failures)
        self.registrar.confirmed(ord(letter), frame, 2.0)

    def acknowledge(self, letter: str) -> None:
        self.registrar.acknowledged(ord(letter), 3.0)

    def admit(self, letter: str, failed: str = "") -> None:
        self.confirm(letter, failed)
        self.acknowledge(letter)
        assert self.has(letter)

    def has(self, letter: str) -> bool:
        """Whether it is a member."""
        return member(letter) in [seat.member for seat in self.seats.members()]

    def sealed(self, letter: str) -> list[int]:
        """The ranks that SEALED has given to a latecomer since the last time."""
        ranks = [each.place.rank for each in told(self.port.calls, ord(letter), frames.Sealed)]
        self.port.take()
        return ranks

    def left_out(self) -> list[str]:
        return [text for _, text in of(self.port.calls, "notice")]


def test_latecomer_becomes_a_member_by_a_commit_of_its_own() -> None:
    running = Running()
    running.join("D")
    running.port.take()
    digest = roster_digest(running.registrar.roster())
    running.confirm("D")
    members, sealed = (call[1:] for call in running.port.take())
    assert members == (ord("D"), running.rules.members(joining=1))
    assert sealed == (ord("D"), running.committed.frame(SESSION, place(3), digest))
    assert running.rules.sealed_members == [member("D")]
    assert not running.has("D")
    running.acknowledge("D")
    assert running.port.take() == [("send", ord("D"), frames.Go(session=SESSION, epoch=1))]
    assert running.committed.places[member("D")] == place(3)
    assert (running.has("D"), running.seats.latecomers()) == (True, [])


# --- CONFIRM ---------------------------------------------------------------------------------------------------------


def test_latecomer_is_asked_once_the_session_can_take_it() -> None:
    running = Running()
    running.rules.admitting = False
    running.join("D")
    assert running.asked("D") == []
    running.rules.admitting = True
    running.ask()
    running.ask()
    assert len(running.asked("D")) == 1


def test_latecomer_dials_the_members_and_those_that_were_asked_before_it() -> None:
    running = Running()
    running.join("DE")
    assert sorted(running.targets("D")) == ["A", "B", "C"]
    assert sorted(running.targets("E")) == ["A", "B", "C", "D"]


def test_latecomer_without_a_path_to_the_network_of_the_job_is_not_dialed() -> None:
    running = Running()
    running.join("D", ELSEWHERE)
    running.join("E")
    assert sorted(running.targets("E")) == ["A", "B", "C"]


def test_nothing_is_dialed_if_no_mesh_is_asked_for() -> None:
    running = Running("off")
    running.join("D")
    assert running.asked("D") == [frames.Confirm(session=SESSION, epoch=1)]
    running.admit("D")


def test_latecomer_that_reaches_nobody_by_its_own_node_is_asked_without_targets() -> None:
    running = Running()
    for seat in running.seats.values():
        seat.applicant = frames.Join(world_size=5, node=seat.applicant.node, who=seat.applicant.who)
    running.join("D")
    assert running.asked("D") == [frames.Confirm(session=SESSION, epoch=1)]
    running.admit("D")


# --- CONFIRMED -------------------------------------------------------------------------------------------------------


def test_latecomers_that_confirm_side_by_side_get_different_places() -> None:
    running = Running()
    running.join("DE")
    running.confirm("D")
    assert running.sealed("D") == [3]
    running.confirm("E")
    assert running.sealed("E") == [4]


def test_a_second_confirmation_changes_nothing() -> None:
    running = Running()
    running.join("D")
    running.confirm("D")
    running.port.take()
    running.confirm("D", "B")
    assert running.port.take() == []
    running.acknowledge("D")
    assert running.has("D")


def test_first_free_place_is_taken() -> None:
    running = Running()
    running.leave("B")
    running.join("D")
    running.confirm("D")
    assert running.sealed("D") == [1]


@pytest.mark.parametrize("now_there", [True, False])
def test_latecomer_is_refused_if_its_newest_paths_do_not_reach_the_store(now_there: bool) -> None:
    running = Running()
    running.join("D", ELSEWHERE if now_there else STORE)
    running.confirm("D", network=STORE if now_there else ELSEWHERE)
    assert [(conn, each.reason) for conn, each in running.refused] == ([] if now_there else [(ord("D"), "network")])
    assert running.sealed("D") == ([3] if now_there else [])
    assert running.rules.gone_members == ([] if now_there else [member("D")])
    assert (member("D") in running.seats) is now_there
    if now_there:
        running.acknowledge("D")
        listed = running.registrar.roster()
        assert listed[-1].address == paths("D", STORE)[0].local_address


@pytest.mark.parametrize("why", ["too few members answer", "a member that it lacks is silent"])
def test_latecomer_is_asked_again_after_a_bad_moment(why: str) -> None:
    running = Running()
    running.join("D")
    assert running.asked("D")
    running.rules.silent = {member("B")}
    running.rules.admitting = why != "too few members answer"
    running.confirm("D", "B" if running.rules.admitting else "")
    running.rules.admitting = True
    assert (running.refused, running.left_out()) == ([], [])
    assert running.sealed("D") == []
    running.ask()
    assert len(running.asked("D")) == 1
    running.confirm("D")
    assert running.sealed("D") == [3]


# --- members that a latecomer does not reach -------------------------------------------------------------------------


def test_latecomer_that_does_not_reach_a_member_is_refused_and_named() -> None:
    running = Running()
    running.join("D")
    running.confirm("D", "B", how="refused")
    ((conn, refusal),) = running.refused
    assert (conn, refusal.reason) == (ord("D"), "mesh")
    assert "refuses connections" in refusal.detail
    (text,) = running.left_out()
    assert text.startswith("host node-D (10.0.0.4 on eth0) gets no place: ")
    assert member("D") not in running.seats
    assert running.rules.gone_members == [member("D")]


def test_latecomer_that_was_named_already_is_refused_without_a_word() -> None:
    running = Running()
    running.rules.news = False
    running.join("D")
    running.confirm("D", "B")
    assert len(running.refused) == 1
    assert running.left_out() == []


def test_latecomer_that_does_not_reach_a_member_is_named_and_admitted_with_warn() -> None:
    running = Running("warn")
    running.join("D")
    running.confirm("D", "B")
    assert len(running.left_out()) == 1
    assert not running.refused
    assert running.sealed("D") == [3]
    running.acknowledge("D")
    assert running.has("D")


def test_member_that_is_gone_meanwhile_is_not_missed() -> None:
    running = Running()
    running.join("D")
    running.leave("B")
    running.confirm("D", "B")
    assert running.left_out() == []
    assert running.sealed("D") == [1]


@pytest.mark.parametrize("confirmed", [False, True], ids=["before CONFIRMED", "before ACK"])
def test_latecomer_dials_a_member_that_had_no_path_when_it_was_asked(confirmed: bool) -> None:
    running = Running()
    running.join("E", ELSEWHERE)
    running.join("D")
    assert "E" not in running.targets("D")
    if confirmed:
        running.confirm("D")
    running.admit("E")
    if confirmed:
        running.acknowledge("D")
    else:
        running.confirm("D")
    assert told(running.port.calls, ord("D"), frames.Go) == []
    assert not running.has("D")
    running.ask()
    assert "E" in running.targets("D")
    running.admit("D")


@pytest.mark.parametrize(("where", "asked"), [("B", "ACD"), ("A", "ABC")])
def test_the_last_process_to_come_stands_for_its_machine_unless_the_host_does(where: str, asked: str) -> None:
    """The one before it was killed and still counts: to have reached that one says nothing of this one."""
    running = Running()
    running.join("D", node=where)
    running.join("E")
    assert "".join(sorted(running.targets("E"))) == asked


def test_latecomer_that_did_not_reach_who_stands_for_a_member_dials_again() -> None:
    """Both live on one machine: the old one ends while the new one is started."""
    running = Running()
    running.join("D", node="B")
    running.join("E")
    running.port.take()
    running.confirm("E", "D")
    assert running.sealed("E") == []
    running.ask()
    assert "D" in running.targets("E")
    running.admit("E")


def test_failure_against_one_that_was_no_member_when_it_was_dialed_is_tried_again() -> None:
    """Nobody has waited for it, if it was stopped then."""
    running = Running()
    running.join("DE")
    running.port.take()
    running.admit("D")
    running.confirm("E", "D", "silent")
    assert running.refused == []
    assert running.sealed("E") == []
    running.ask()
    assert "D" in running.targets("E")
    running.confirm("E", "D")
    assert [conn for conn, _ in running.refused] == [ord("E")], "it was a member this time"


def test_latecomer_that_comes_back_is_dialed_anew() -> None:
    """It can have another address by then."""
    running = Running()
    running.join("DE")
    running.port.take()
    running.leave("D")
    running.join("D")
    running.admit("D", "E")
    running.confirm("E")
    assert running.sealed("E") == []
    running.ask()
    assert "D" in running.targets("E")


def test_failure_against_a_member_that_has_come_back_is_tried_again() -> None:
    """Its old address was dialed."""
    running = Running()
    running.join("E")
    running.port.take()
    running.leave("B")
    running.join("B")
    running.admit("B", "E")
    running.confirm("E", "B")
    assert running.refused == []
    running.ask()
    assert "B" in running.targets("E")
    running.admit("E")


def test_pair_of_latecomers_is_dialed_by_one_of_them() -> None:
    running = Running()
    running.join("DE")
    running.admit("E")
    running.port.take()
    running.confirm("D")  # E has dialed it
    assert running.sealed("D") == [4]


@pytest.mark.parametrize(("mesh", "again"), [("on", True), ("warn", False)])
def test_latecomer_that_another_one_did_not_reach_dials_it_once_that_is_a_member(mesh: Mesh, again: bool) -> None:
    running = Running(mesh)
    running.join("DE")
    running.admit("E", "D")
    assert running.left_out() == [], "that was no member"
    running.port.take()
    running.confirm("D")
    assert bool(running.sealed("D")) is not again
    running.ask()
    assert ["E" in "".join(target.member[:1].decode() for target in each.targets) for each in running.asked("D")] == (
        [True] if again else []
    )


# --- ACK -------------------------------------------------------------------------------------------------------------


def test_acknowledgement_counts_for_no_later_question() -> None:
    running = Running()
    running.join("D")
    running.acknowledge("D")
    assert not running.has("D")
    running.confirm("D")
    running.rules.admitting = False
    running.acknowledge("D")
    running.rules.admitting = True
    running.ask()
    running.acknowledge("D")
    assert not running.has("D")


@pytest.mark.parametrize("why", ["too few members answer", "its own lease has ended"])
def test_acknowledgement_at_a_bad_moment_is_asked_for_again(why: str) -> None:
    running = Running()
    running.join("D")
    running.confirm("D")
    running.rules.admitting = why != "too few members answer"
    running.rules.counting = why != "its own lease has ended"
    running.port.take()
    running.acknowledge("D")
    running.rules.admitting = running.rules.counting = True
    running.ask()
    assert len(running.asked("D")) == 1
    running.admit("D")


# --- those that go ---------------------------------------------------------------------------------------------------


def test_latecomer_has_its_time_from_join_to_ack() -> None:
    running = Running()
    running.join("DE")
    running.admit("D")
    running.port.take()
    running.registrar.handle_timer(ADMITTED_SECONDS - 0.1)
    assert running.port.take() == []
    assert running.registrar.next_timer() == ADMITTED_SECONDS
    running.registrar.handle_timer(ADMITTED_SECONDS)
    assert running.port.take() == [("hang_up", ord("E"))]
    assert (running.has("D"), member("E") in running.seats) == (True, False)


def test_latecomer_that_is_gone_leaves_nothing_behind() -> None:
    running = Running()
    running.join("D")
    running.leave("D")
    assert running.rules.gone_members == [member("D")]
    assert member("D") not in running.seats
    assert isinstance(running.registrar.state, Committed)
