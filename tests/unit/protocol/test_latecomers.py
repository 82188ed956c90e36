"""How latecomers become members of a running session, one by one, and what keeps them out."""

from __future__ import annotations

import pytest

from mingle.protocol.machine import Mesh, roster_digest
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.latecomers import ADMITTED_SECONDS
from mingle.protocol.session.phases import Committed
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from mingle.wire.frames import Failure, Path, Place, ProcessInfo, Unreached
from tests.support.registrar_port import SESSION, Recorded, of, told

STORE = "10.0.0.1"
ELSEWHERE = "172.17.0.1"
MEMBERS = "ABC"
"""The members of the session; the first is the host."""


def member(letter: str) -> bytes:
    return letter.encode() * 16


def paths(letter: str, host_address: str = STORE) -> tuple[Path, ...]:
    """The path of an agent, from its address on that network."""
    own = f"{host_address.removesuffix('1')}{ord(letter) - 64}"
    return (Path(host_address=host_address, local_address=own, interface="eth0"),)


def join(letter: str, *, network: str = STORE, node: str = "", mesh_port: int = 4000) -> frames.Join:
    proved = paths(letter, network)
    who = ProcessInfo(hostname=f"node-{letter}", pid=ord(letter), address=proved[0].local_address, unit="node")
    return frames.Join(world_size=5, node=node or letter, kind="agents", who=who, paths=proved, mesh_port=mesh_port)


class Rules(Admission):
    """The rules of the test."""

    kind = "agents"
    takes_latecomers = True
    admitting = counting = news = True

    def __init__(self) -> None:
        super().__init__(5)
        self.silent: set[bytes] = set()
        self.gone_members: list[bytes] = []
        self.sealed_members: list[bytes] = []

    def complete(self, now: float) -> bool:
        return len(self.seats) == len(MEMBERS)

    def admits(self, now: float) -> bool:
        return self.admitting

    def acknowledged(self, member: bytes, now: float) -> bool:
        return self.counting

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

    def __init__(self, mesh: Mesh = "on", *, mesh_port: int = 4000) -> None:
        self.rules = Rules()
        host, *others = (join(each, mesh_port=mesh_port) for each in MEMBERS)
        seat = HostSeat(member=member("A"), applicant=host, prefix_lengths={STORE: 24})
        self.registrar = Recorded(seat, self.rules, mesh=mesh)
        self.port, self.seats = self.registrar.port, self.registrar.seats
        for letter, applicant in zip(MEMBERS[1:], others, strict=True):
            self.registrar.join(ord(letter), member(letter), applicant, 0.0)
        self.tell("confirm B, confirm C")
        self.registrar.confirmed(None, frames.Confirmed(session=SESSION, epoch=1, paths=host.paths), 0.0)
        self.registrar.store_opened(1, 5000, "token", 0.0)
        self.tell("acknowledge B, acknowledge C")
        assert isinstance(self.registrar.state, Committed)
        self.committed = self.registrar.state
        self.port.take()
        self.rules.sealed_members.clear()

    # --- what happens ---

    def tell(self, story: str) -> None:
        """Let these steps happen: each is a method below, with its arguments."""
        for step in story.split(", "):
            name, *arguments = step.split()
            getattr(self, name)(*arguments)

    def join(self, letters: str, how: str = "", node: str = "") -> None:
        """Let these come: "elsewhere", over a network that is not the job's; or "beside" a member, on its machine."""
        for letter in letters:
            applicant = join(letter, network=ELSEWHERE if how == "elsewhere" else STORE, node=node)
            self.registrar.join(ord(letter), member(letter), applicant, 0.0)

    def leave(self, letter: str) -> None:
        """Let the connection of one end."""
        self.registrar.lost(ord(letter), 1.0)

    def silence(self, letter: str) -> None:
        """Let a member answer no more."""
        self.rules.silent.add(member(letter))

    def confirm(self, letter: str, failed: str = "", how: Unreached = "no answer", network: str = STORE) -> None:
        """Let one confirm that it has not reached these."""
        failures = tuple(Failure(member=member(other), how=how) for other in failed)
        frame = frames.Confirmed(session=SESSION, epoch=1, paths=paths(letter, network), failures=failures)
        self.registrar.confirmed(ord(letter), frame, 2.0)

    def acknowledge(self, letter: str) -> None:
        self.registrar.acknowledged(ord(letter), 3.0)

    def admit(self, letter: str, failed: str = "") -> None:
        self.confirm(letter, failed)
        self.acknowledge(letter)
        assert self.has(letter)

    def ask(self) -> None:
        """Let the host do what follows from an event."""
        self.registrar.advance(1.0, held=False)

    # --- what is seen ---

    def has(self, letter: str) -> bool:
        """Whether it is a member."""
        return member(letter) in [seat.member for seat in self.seats.members()]

    def asked(self, letter: str) -> list[frames.Confirm]:
        """The questions to a latecomer since the last time."""
        return self.registrar.said(ord(letter), frames.Confirm)

    def targets(self, letter: str) -> str:
        """Whom a latecomer was asked last to dial."""
        *_, confirm = told(self.port.calls, ord(letter), frames.Confirm)
        return "".join(sorted(target.member[:1].decode() for target in confirm.targets))

    def sealed(self, letter: str) -> list[int]:
        """The ranks that SEALED has given to a latecomer."""
        return [each.place.rank for each in told(self.port.calls, ord(letter), frames.Sealed)]

    def refused(self) -> list[tuple[str, str]]:
        """Who was refused, and why."""
        sent = ((chr(call[1]), call[2]) for call in of(self.port.calls, "send"))
        return [(letter, frame.reason) for letter, frame in sent if isinstance(frame, frames.Refused)]

    def left_out(self) -> list[str]:
        return [text for _, text in of(self.port.calls, "notice")]


def test_latecomer_becomes_a_member_by_a_commit_of_its_own() -> None:
    running = Running()
    running.join("D")
    running.port.take()
    digest = roster_digest(running.registrar.roster())
    running.confirm("D")
    place = Place(rank=3, world_size=5, local_rank=0, local_world_size=1, node_rank=3, num_nodes=5)
    members, sealed = (call[1:] for call in running.port.take())
    assert members == (ord("D"), running.rules.members(joining=1))
    assert sealed == (ord("D"), running.committed.frame(SESSION, place, digest))
    assert running.rules.sealed_members == [member("D")]
    assert not running.has("D")
    running.acknowledge("D")
    assert running.port.take() == [("send", ord("D"), frames.Go(session=SESSION, epoch=1))]
    assert running.committed.places[member("D")] == place
    assert (running.has("D"), running.seats.latecomers()) == (True, [])


# --- CONFIRM ---------------------------------------------------------------------------------------------------------


def test_latecomer_is_asked_once_the_session_can_take_it() -> None:
    running = Running()
    running.rules.admitting = False
    running.join("D")
    assert running.asked("D") == []
    running.rules.admitting = True
    running.tell("ask, ask")
    assert len(running.asked("D")) == 1


@pytest.mark.parametrize(
    ("story", "targets"),
    [
        pytest.param("join D, join E", "ABCD", id="the members and those that were asked before it"),
        pytest.param("join D elsewhere, join E", "ABC", id="none that has no path to the network of the job"),
        # The one before was killed and still counts: to have reached that one says nothing of this one.
        pytest.param("join D beside B, join E", "ACD", id="of a machine the process that came last"),
        pytest.param("join D beside A, join E", "ABC", id="but for the host's"),
    ],
)
def test_whom_a_latecomer_dials(story: str, targets: str) -> None:
    running = Running()
    running.tell(story)
    assert running.targets("E") == targets


@pytest.mark.parametrize(("mesh", "mesh_port"), [("off", 4000), ("on", 0)], ids=["off", "no member can be dialed"])
def test_latecomer_that_has_nobody_to_dial_is_asked_all_the_same(mesh: Mesh, mesh_port: int) -> None:
    running = Running(mesh, mesh_port=mesh_port)
    running.join("D")
    assert running.asked("D") == [frames.Confirm(session=SESSION, epoch=1)]
    running.admit("D")


# --- CONFIRMED -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "story", "letter", "rank"),
    [
        pytest.param("on", "leave B, join D, confirm D", "D", 1, id="the first that is free"),
        pytest.param("on", "join DE, confirm D, confirm E", "E", 4, id="another one than a latecomer beside it"),
        pytest.param("on", "join D elsewhere, confirm D", "D", 3, id="by its newest paths it reaches the store"),
        pytest.param("on", "join D, leave B, confirm D B", "D", 1, id="a member that is gone meanwhile is not missed"),
        pytest.param("on", "join DE, admit E, confirm D", "D", 4, id="a pair is dialed by one of the two"),
        pytest.param("warn", "join DE, admit E D, confirm D", "D", 4, id="a pair that fails, with warn"),
    ],
)
def test_which_place_a_latecomer_gets_that_has_confirmed(mesh: Mesh, story: str, letter: str, rank: int) -> None:
    running = Running(mesh)
    running.tell(story)
    assert running.sealed(letter) == [rank]
    assert (running.refused(), running.left_out()) == ([], [])
    running.acknowledge(letter)
    assert running.has(letter)
    assert {seat.rank: seat.address for seat in running.registrar.roster()}[rank] == paths(letter)[0].local_address


def test_a_second_confirmation_changes_nothing() -> None:
    running = Running()
    running.tell("join D, confirm D")
    running.port.take()
    running.confirm("D", "B")
    assert running.port.take() == []
    running.acknowledge("D")
    assert running.has("D")


@pytest.mark.parametrize(
    ("story", "whom"),
    [
        pytest.param("join E elsewhere, join D, admit E, confirm D", "DE", id="no path when it was asked"),
        pytest.param("join E elsewhere, join D, confirm D, admit E, acknowledge D", "DE", id="nor when it confirmed"),
        pytest.param("join D, silence B, confirm D B", "DB", id="the member has answered nobody lately"),
        # The old process of a machine ends while the new one is started.
        pytest.param("join D beside B, join E, confirm E D", "ED", id="it stands for a member on its machine"),
        # For one that was stopped then nobody has waited.
        pytest.param("join DE, admit D, confirm E D silent", "ED", id="it was no member then"),
        pytest.param("join DE, admit E D, confirm D", "DE", id="it has dialed in vain and was no member then"),
        # One that has come back can have another address.
        pytest.param("join DE, leave D, join D, admit D E, confirm E", "ED", id="a latecomer has come back"),
        pytest.param("join E, leave B, join B, admit B E, confirm E B", "EB", id="a member has come back"),
    ],
)
def test_latecomer_dials_again_if_it_is_not_known_whether_it_reaches_a_member(story: str, whom: str) -> None:
    running, (letter, other) = Running(), whom
    before, _, last = story.rpartition(", ")
    running.tell(before)
    running.port.take()
    running.tell(last)
    assert (running.port.take(), running.has(letter)) == ([], False)
    running.ask()
    assert other in running.targets(letter)
    running.admit(letter)


@pytest.mark.parametrize(
    ("story", "letter"),
    [("join D, confirm D B refused", "D"), ("join DE, admit D, confirm E D silent, ask, confirm E D", "E")],
    ids=["at once", "at the second try, as it was no member at the first"],
)
@pytest.mark.parametrize("news", [True, False])
def test_latecomer_that_does_not_reach_a_member_is_refused_and_named_once(story: str, letter: str, news: bool) -> None:
    running = Running()
    running.rules.news = news
    running.tell(story)
    assert running.refused() == [(letter, "mesh")]
    assert [text.partition(" (")[0] for text in running.left_out()] == [f"host node-{letter}"] * news
    assert member(letter) not in running.seats
    assert running.rules.gone_members == [member(letter)]


def test_latecomer_that_does_not_reach_a_member_is_named_and_admitted_with_warn() -> None:
    running = Running("warn")
    running.tell("join D, confirm D B")
    assert (running.sealed("D"), running.refused(), len(running.left_out())) == ([3], [], 1)
    running.acknowledge("D")
    assert running.has("D")


def test_latecomer_whose_newest_paths_do_not_reach_the_store_is_refused() -> None:
    running = Running()
    running.join("D")
    running.confirm("D", network=ELSEWHERE)
    assert (running.refused(), running.sealed("D")) == ([("D", "network")], [])
    assert member("D") not in running.seats
    assert running.rules.gone_members == [member("D")]


# --- ACK -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "step", "lack"),
    [
        pytest.param("join D", "confirm D", "admitting", id="too few members answer"),
        pytest.param("join D, confirm D", "acknowledge D", "admitting", id="too few members answer at its ACK"),
        pytest.param("join D, confirm D", "acknowledge D", "counting", id="its own lease has ended"),
    ],
)
def test_latecomer_is_asked_again_after_a_bad_moment(before: str, step: str, lack: str) -> None:
    running = Running()
    running.tell(before)
    running.port.take()
    setattr(running.rules, lack, False)
    running.tell(step)
    assert (running.sealed("D"), running.has("D")) == ([], False)
    setattr(running.rules, lack, True)
    running.ask()
    assert len(running.asked("D")) == 1
    running.admit("D")


def test_acknowledgement_counts_for_no_later_question() -> None:
    running = Running()
    running.tell("join D, acknowledge D")
    assert not running.has("D")
    running.confirm("D")
    running.rules.admitting = False
    running.acknowledge("D")
    running.rules.admitting = True
    running.tell("ask, acknowledge D")
    assert not running.has("D")


# --- those that go ---------------------------------------------------------------------------------------------------


def test_latecomer_has_its_time_from_join_to_ack() -> None:
    running = Running()
    running.tell("join DE, admit D")
    running.port.take()
    running.registrar.handle_timer(ADMITTED_SECONDS - 0.1)
    assert running.port.take() == []
    assert running.registrar.next_timer() == ADMITTED_SECONDS
    running.registrar.handle_timer(ADMITTED_SECONDS)
    assert running.port.take() == [("hang_up", ord("E"))]
    assert (running.has("D"), member("E") in running.seats) == (True, False)


def test_latecomer_that_is_gone_leaves_nothing_behind() -> None:
    running = Running()
    running.tell("join D, leave D")
    assert running.rules.gone_members == [member("D")]
    assert member("D") not in running.seats
    assert running.registrar.phase is Committed
