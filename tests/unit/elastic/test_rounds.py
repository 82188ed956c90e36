"""When a host begins the rounds of its session, whom it takes into them, and in which order. Pure."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from mingle.config.order import order_key
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes, Policy, Quorum
from mingle.elastic.rounds import COMPANIONS_SECONDS, STOP_SECONDS, Rounds, missing_node_ranks
from mingle.protocol.session.seats import Seated
from mingle.wire import frames

LAST_CALL = 30.0
NEVER = frames.Next()


def who(letter: str) -> frames.ProcessInfo:
    return frames.ProcessInfo(hostname=f"node-{letter}", pid=ord(letter), address=f"10.0.0.{ord(letter) - 64}")


def seat(letter: str, order: bytes | None = None) -> Seated:
    """The seat of an agent; "A" is the host's own."""
    order = order_key(None, f"node-{letter}", "10.0.0.1") if order is None else order
    applicant = frames.Join(world_size=4, node=letter, kind="agents", order=order, who=who(letter))
    return Seated(letter.encode() * 16, None if letter == "A" else ord(letter), applicant)


class Session:
    """The rounds of a session, its seats, and what its host has told whom since the last look at that.

    Args:
        nodes: MIN and MAX.
        last_call: the user's; None: torch's default.
        small: whether the session began with fewer than F agents.
        past: more of what the host knew before the session.
    """

    def __init__(
        self,
        nodes: tuple[int, int] = (2, 4),
        *,
        last_call: float | None = None,
        small: bool = False,
        allow_minority: bool = False,
        **past: Any,
    ) -> None:
        policy = Policy(
            nodes=Nodes(minimum=nodes[0], maximum=nodes[1]),
            last_call=LAST_CALL if last_call is None else last_call,
            last_call_is_set=last_call is not None,
            allow_minority=allow_minority,
        )
        self.now = 100.0
        self.seats: dict[str, Seated] = {}
        memory = Memory(policy, **past)
        self.quorum = Quorum(b"S" * 16, memory, self.now)
        self.quorum.small, self.quorum.had_quorum = small, not small
        self.rounds = Rounds(self.quorum, memory, self._send)
        self._listed: list[Seated] = []
        self.begins: list[tuple[str, frames.Begin]] = []
        self.wants: list[tuple[str, frames.Wanted]] = []

    def _send(self, member: bytes, frame: frames.Begin | frames.Wanted) -> None:
        letter = chr(member[0])
        assert letter in self.seats, "only a member can be told anything"
        if isinstance(frame, frames.Begin):
            self.begins.append((letter, frame))
        else:
            self.wants.append((letter, frame))

    def seat(self, letters: str, order: bytes | None = None) -> None:
        """Give these agents seats."""
        self.seats |= {letter: seat(letter, order) for letter in letters}
        self.look()

    def next(self, letters: str, first: frames.Next = NEVER) -> None:
        """Have these agents, which may have no seats yet, say NEXT; ``first`` is the first round that they got."""
        for letter in letters:
            if letter not in self.seats:
                self.seats[letter] = seat(letter)
        for letter in letters:
            self.rounds.said_next(letter.encode() * 16, first, self.now)
        self.look()

    def lose(self, letters: str) -> None:
        for letter in letters:
            del self.seats[letter]
        self.look()

    def done(self, letters: str) -> None:
        for letter in letters:
            self.rounds.said_done(letter.encode() * 16)
        self.look()

    def look(self) -> None:
        if (seats := list(self.seats.values())) != self._listed:
            self._listed = seats  # another object only if the members are others
        self.rounds.look(self._listed, self.now)
        assert self.rounds.due is None or self.rounds.due > self.now, "a busy loop"

    def wait(self, seconds: float) -> None:
        """Let the time pass; the host looks only when it is due."""
        end = self.now + seconds
        while (due := self.rounds.due) is not None and due <= end:
            self.now = due
            before = len(self.begins) + len(self.wants)
            self.look()
            assert len(self.begins) + len(self.wants) > before, "due, and there was nothing to do"
        self.now = end

    def begun(self) -> str:
        """Return the agents of the round that has begun since the last call, by rank; empty: none has."""
        begins, self.begins = self.begins, []
        assert [(frame.rank, frame.size) for _, frame in begins] == [(rank, len(begins)) for rank in range(len(begins))]
        assert len({frame.number for _, frame in begins}) <= 1
        return "".join(letter for letter, _ in begins)

    def wanted(self) -> str:
        """Return whom the host has told since the last call that another round has to follow."""
        wants, self.wants = self.wants, []
        return "".join(sorted(letter for letter, _ in wants))

    def run(self, letters: str) -> None:
        """Bring these into the first round."""
        self.next(letters)
        while not self.begins:
            assert self.rounds.due is not None
            self.wait(self.rounds.due - self.now)
        assert self.begun() == letters


# --- how many ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "options", "least"),
    [
        ((2, 4), {}, 2),
        ((3, 4), {}, 3),
        ((1, 6), {}, 3),  # K: with fewer, another session of the job could have a round at the same time
        ((1, 2), {}, 1),
        ((1, 6), {"small": True}, 1),
        ((1, 6), {"allow_minority": True}, 1),
        ((2, 6), {"allow_minority": True}, 2),
    ],
)
def test_a_round_has_at_least_min_agents_and_as_many_as_keep_the_session(
    nodes: tuple[int, int], options: dict[str, bool], least: int
) -> None:
    session = Session(nodes, **options)
    letters = "ABCDEF"[:least]
    if least > 1:
        session.next(letters[:-1])
        session.wait(1000.0)
        assert session.begun() == "", "too few"
    session.next(letters[-1])
    session.wait(LAST_CALL)
    assert session.begun() == letters


@pytest.mark.parametrize("last_call", [None, 7.0])
def test_a_round_of_all_begins_at_once(last_call: float | None) -> None:
    session = Session(last_call=last_call)
    for _ in range(2):
        session.next("ABC")
        assert session.begun() == ""
        session.next("D")
        assert session.begun() == "ABCD"


def test_too_few_of_a_later_round_wait_for_another() -> None:
    session = Session()
    session.run("ABC")
    session.lose("BC")
    assert session.wanted() == "A"
    session.next("A")
    session.wait(1000.0)
    session.next("D")
    assert session.begun() == "AD"


# --- the first round -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("set_by_user", "seconds"), [(None, LAST_CALL), (7.0, 7.0)])
def test_the_first_round_of_a_job_waits_a_last_call_for_more_nodes(set_by_user: float | None, seconds: float) -> None:
    session = Session(last_call=set_by_user)
    session.next("A")
    session.wait(5.0)
    session.next("B")
    session.wait(seconds - 1.0)
    session.next("C")
    assert session.begun() == ""
    session.wait(1.0)
    assert session.begun() == "ABC", "from when they were enough, and another does not extend it"


def test_the_last_call_begins_anew_when_too_few_are_left() -> None:
    session = Session()
    session.next("AB")
    session.wait(LAST_CALL - 1.0)
    session.lose("B")
    session.next("C")
    session.wait(LAST_CALL - 0.5)
    assert session.begun() == ""
    session.wait(0.5)
    assert session.begun() == "AC"


@pytest.mark.parametrize("last_call", [None, 7.0])
def test_a_session_that_began_after_a_last_call_makes_no_second_one(last_call: float | None) -> None:
    session = Session(small=True, last_call=last_call)
    session.next("AB")
    assert session.begun() == "AB"


def test_the_first_round_waits_for_every_agent_that_has_a_seat() -> None:
    session = Session()
    session.seat("ABC")
    session.next("AB")
    session.wait(LAST_CALL + 1.0)
    assert session.begun() == "", "the workers of its last session have not ended yet"
    session.next("C")
    assert session.begun() == "ABC"
    session = Session()
    session.seat("ABC")
    session.next("AB")
    session.wait(STOP_SECONDS - 0.1)
    assert session.begun() == ""
    session.wait(0.1)
    assert session.begun() == "AB", "one that is stuck is not waited for without end"


def experienced(**options: Any) -> Session:
    """The session after one of the agents "A" to "D", in which "D" was the host and is lost."""
    past = {"companions": tuple(map(who, "ABCD")), "host_lost": ("node-D", ord("D"))}
    return Session(**{**past, **options})


FIRST = frames.Next(generation=5, number=0)


def test_after_a_loss_the_round_begins_once_all_but_the_lost_host_are_back() -> None:
    session = experienced()
    session.next("AB", FIRST)
    session.wait(1.0)
    assert session.begun() == ""
    session.next("C", FIRST)
    assert session.begun() == "ABC"


def test_after_a_loss_the_round_waits_briefly_for_those_that_are_not_back() -> None:
    session = experienced()
    session.next("AB", FIRST)
    session.wait(COMPANIONS_SECONDS - 0.1)
    assert session.begun() == ""
    session.wait(0.1)
    assert session.begun() == "AB"


def test_a_restarted_host_knows_no_companions_and_waits_briefly_for_them() -> None:
    session = Session()
    session.next("A")
    session.next("B", FIRST)
    session.wait(COMPANIONS_SECONDS - 0.1)
    assert session.begun() == ""
    session.wait(0.1)
    assert session.begun() == "BA", "and it is no first round of the job, whose last call would be longer"


@pytest.mark.parametrize("back", ["AB", "ABC"])
def test_a_last_call_that_the_user_has_set_is_made_after_a_loss_too(back: str) -> None:
    session = experienced(last_call=7.0)
    session.next(back, FIRST)
    session.wait(6.9)
    assert session.begun() == ""
    session.wait(0.1)
    assert session.begun() == back
    session = experienced(last_call=1.0)
    session.next("AB", FIRST)
    session.wait(COMPANIONS_SECONDS)
    assert session.begun() == "AB", "the longer one of the two counts"


# --- another round -------------------------------------------------------------------------------------------------


def test_the_loss_of_a_participant_makes_another_round_wanted_once() -> None:
    session = Session()
    session.run("ABC")
    session.lose("C")
    assert session.wanted() == "AB"
    session.look()
    session.next("A")
    assert session.wanted() == ""
    session.next("B")
    assert session.begun() == "AB", "without the last call that is torch's default"


def test_next_of_a_participant_makes_another_round_wanted_once() -> None:
    session = Session()
    session.run("ABC")
    session.next("B")
    assert {"A", "C"} <= set(session.wanted())
    session.next("A")
    session.lose("C")
    assert session.begun() == "AB"


def test_each_round_has_the_number_after_the_last_and_wanted_names_the_present_one() -> None:
    session = Session((2, 2))
    for number in range(3):
        session.next("AB")
        assert {frame.number for _, frame in session.wants} == ({number - 1} if number else set())
        assert {frame.number for _, frame in session.begins} == {number}
        session.begins, session.wants = [], []


def test_a_last_call_that_the_user_has_set_is_made_in_a_later_round_too() -> None:
    session = Session(last_call=7.0)
    session.run("ABC")
    session.lose("C")
    assert session.wanted() == "AB"
    session.next("A")
    session.wait(20.0)
    session.next("B")
    session.wait(6.9)
    assert session.begun() == ""
    session.wait(0.1)
    assert session.begun() == "AB"


def test_a_last_call_begins_anew_with_each_round() -> None:
    session = Session((1, 2), last_call=7.0)
    session.run("A")
    session.wait(20.0)
    session.next("A")
    session.wait(6.9)
    assert session.begun() == ""
    session.wait(0.1)
    assert session.begun() == "A"


def test_a_later_round_waits_for_no_agent_that_was_not_in_the_last_one() -> None:
    session = Session()
    session.run("ABC")
    session.seat("D")
    session.lose("C")
    session.next("AB")
    assert session.begun() == "AB"


def test_a_participant_that_does_not_say_next_is_left_behind_and_comes_as_a_newcomer() -> None:
    session = Session()
    session.run("ABC")
    session.next("A")
    session.wanted()
    session.wait(5.0)
    session.next("B")
    session.wait(STOP_SECONDS - 5.1)
    assert session.begun() == ""
    session.wait(0.1)
    assert session.begun() == "AB", "60 s after the round was wanted"
    session.next("C")
    assert session.wanted() == "", "the others are not restarted at once"
    session.wait(LAST_CALL)
    assert session.wanted() == "AB"
    session.next("AB")
    assert session.begun() == "ABC"


def test_the_loss_of_an_agent_that_is_in_no_round_is_none() -> None:
    session = Session()
    session.run("AB")
    session.next("C")
    session.lose("C")
    session.wait(1000.0)
    assert session.wanted() == ""


# --- newcomers -----------------------------------------------------------------------------------------------------


def test_newcomers_are_taken_a_last_call_after_the_round_began() -> None:
    session = Session()
    session.run("AB")
    session.wait(10.0)
    session.next("C")
    session.wait(LAST_CALL - 10.1)
    assert session.wanted() == ""
    session.wait(0.1)
    assert session.wanted() == "AB"
    session.next("AB")
    assert session.begun() == "ABC"
    session.wait(LAST_CALL + 5.0)
    session.next("D")
    assert session.wanted() == "ABC", "at once, since the round is older"


def test_a_newcomer_that_makes_the_session_full_is_taken_at_once() -> None:
    session = Session()
    session.run("ABC")
    session.next("D")
    assert session.wanted() == "ABC"
    session.next("ABC")
    assert session.begun() == "ABCD"


def test_a_node_that_crashes_again_and_again_restarts_all_once_in_a_last_call() -> None:
    session = Session()
    session.run("ABC")
    came = []
    for _ in range(12):
        session.next("D")
        if session.wanted():
            came.append(session.now)
            session.next("ABC")
            assert session.begun() == "ABCD"
            session.wait(1.0)
        session.lose("D")
        if session.wanted():
            session.next("ABC")
            assert session.begun() == "ABC"
        session.wait(10.0)
    assert len(came) >= 3
    assert all(later - earlier >= LAST_CALL for earlier, later in itertools.pairwise(came))


# --- the end of an agent's part --------------------------------------------------------------------------------------


def test_the_loss_of_an_agent_that_is_done_wants_no_round() -> None:
    session = Session()
    session.run("ABC")
    session.done("C")
    session.lose("C")
    session.wait(1000.0)
    assert session.wanted() == ""
    session.next("A")
    assert session.wanted() != ""
    session.next("B")
    assert session.begun() == "AB", "and it is not awaited"


@pytest.mark.parametrize("done", ["A", "AB"])
def test_newcomers_restart_no_agents_of_a_round_that_is_ending(done: str) -> None:
    session = Session()
    session.run("AB")
    session.done(done)
    session.next("CD")
    session.wait(1000.0)
    assert session.wanted() == session.begun() == ""
    assert session.rounds.due is None


def test_a_newcomer_that_is_done_restarts_nobody() -> None:
    session = Session()
    session.run("AB")
    session.next("C")
    session.done("C")
    session.wait(1000.0)
    assert session.wanted() == ""


def test_a_failure_in_a_round_that_is_ending_restarts_those_that_are_not_done() -> None:
    session = Session()
    session.run("ABC")
    session.done("A")
    session.next("D")
    session.next("B")
    assert session.wanted() == "BC"
    session.next("C")
    assert session.begun() == "BCD"
    session.next("E")
    session.wait(LAST_CALL)
    assert session.wanted() == "BCD", "newcomers count again"


@pytest.mark.parametrize(
    ("nodes", "before", "lost", "over"),
    [
        ((3, 3), "AB", "C", True),
        ((2, 3), "AB", "C", True),
        ((2, 3), "A", "C", False),
        ((1, 2), "A", "B", False),
        ((2, 4), "AB", "CD", False),
        ((2, 4), "ABC", "D", True),
        ((3, 3), "ABC", "", False),
    ],
    ids=[
        "no round without all",
        "too few for a round",
        "B still runs",
        "B can come back",
        "C and D can come back",
        "D can't run alone",
        "all are done",
    ],
)
def test_agents_that_are_done_wait_in_vain_once_too_few_others_can_come(
    nodes: tuple[int, int], before: str, lost: str, over: bool
) -> None:
    session = Session(nodes)
    session.run("ABCD"[: nodes[1]])
    session.done(before)
    assert not session.rounds.over
    session.lose(lost)
    assert session.rounds.over == over


def test_agents_that_are_done_wait_in_vain_for_one_whose_worker_failed() -> None:
    session = Session((3, 3))
    session.run("ABC")
    session.done("A")
    session.next("B")
    assert not session.rounds.over, "C still runs"
    session.next("C")
    assert session.rounds.over, "it takes three for another round"


# --- ranks ---------------------------------------------------------------------------------------------------------


def test_agents_that_start_together_are_in_order_of_their_nodes() -> None:
    session = Session()
    for number, letter in enumerate("DBCA"):
        session.seat(letter, order_key(number, "", ""))
    session.next("ACBD")
    assert session.begun() == "DBCA"
    session.next("CABD")
    assert session.begun() == "DBCA"


def test_of_two_agents_on_one_machine_the_older_process_is_first() -> None:
    session = Session((2, 2))
    for letter in "BA":
        session.seat(letter, b"\1node")
    session.next("BA")
    assert session.begun() == "AB"


def test_agents_come_in_the_order_of_their_first_rounds_and_newcomers_last() -> None:
    """A newcomer's disk can be empty: as rank 0 it would send fresh weights to the nodes that have trained."""
    session = Session()
    session.next("A")
    session.next("B", frames.Next(generation=5, number=3))
    session.next("C", frames.Next(generation=5, number=0))
    session.next("D", frames.Next(generation=4, number=9))
    assert session.begun() == "DCBA"


def test_a_newcomer_comes_after_those_that_are_there_whatever_their_order() -> None:
    session = Session((1, 2))
    session.seat("A", b"\1node9")
    session.run("A")
    session.seat("B", b"\1node1")
    session.next("B")
    session.next("A", frames.Next(generation=1, number=0))
    assert session.begun() == "AB"


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([b"\1node1", b"\1node2", b"\1node2"], ""),
        ([order_key(0, "", ""), order_key(1, "", "")], ""),
        ([order_key(0, "", ""), order_key(0, "", "") + b"\1a", order_key(0, "", "") + b"\1b"], ""),
        (
            [order_key(0, "", ""), b"\1node", b"\1node"],
            "some nodes ask for a node rank, and come first; these do not: 10.0.0.2, 10.0.0.3; "
            "fix: give each node a node rank of its own, or none",
        ),
    ],
)
def test_doubtful_node_ranks_are_named_to_all(orders: list[bytes], expected: str) -> None:
    assert missing_node_ranks(seat(letter, order) for letter, order in zip("ABC", orders, strict=False)) == expected
    session = Session((len(orders), len(orders)))
    for letter, order in zip("ABC", orders, strict=False):
        session.seat(letter, order)
    session.next("ABC"[: len(orders)])
    assert [frame.doubts for _, frame in session.begins] == [expected] * len(orders)


# --- at any time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happened_a_round_follows_once_all_have_stopped_their_workers(seed: int) -> None:
    """`Session.look` and `Session.wait` check that the host never looks in vain, and always when it has to."""
    dice = random.Random(seed)
    minimum, maximum = dice.choice([(1, 2), (2, 4), (1, 6), (3, 5)])
    session = Session((minimum, maximum), last_call=dice.choice([None, 0.0, 5.0]))
    for _ in range(60):
        here = list(session.seats)
        absent = [letter for letter in "ABCDEFGH" if letter not in here]
        match dice.choice(["seat", "next", "next", "lose", "wait"]):
            case "seat" if len(here) < maximum:
                session.seat(dice.choice(absent))
            case "wait":
                session.wait(dice.choice([0.1, 3.0, 31.0, 61.0]))
            case "next" if here:
                session.next(dice.choice(here))
            case "lose" if here:
                session.lose(dice.choice(here))
    session.begins.clear()
    session.next("".join(session.seats))
    session.wait(LAST_CALL)
    enough = len(session.seats) >= session.quorum.round_minimum
    assert sorted(session.begun()) == (sorted(session.seats) if enough else [])
