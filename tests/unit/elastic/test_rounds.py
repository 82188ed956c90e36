"""When a host begins the rounds of its session, whom it takes into them, and in which order. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from mingle.config.order import order_key
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes, Policy, Quorum
from mingle.elastic.rounds import COMPANIONS_SECONDS, STOP_SECONDS, Rounds
from mingle.protocol.session.seats import Seated
from mingle.wire import frames

LAST_CALL = 30.0
NEVER = frames.Next()
AGAIN = frames.Next(generation=5, number=0)


def who(letter: str) -> frames.ProcessInfo:
    return frames.ProcessInfo(hostname=f"node-{letter}", pid=ord(letter), address=f"10.0.0.{ord(letter) - 64}")


def seat(letter: str, order: bytes | None = None) -> Seated:
    """The seat of an agent; "A" is the host's own."""
    order = order_key(None, f"node-{letter}", "10.0.0.1") if order is None else order
    applicant = frames.Join(world_size=4, node=letter, kind="agents", order=order, who=who(letter))
    return Seated(letter.encode() * 16, None if letter == "A" else ord(letter), applicant)


class Session:
    """The rounds of a session and its seats. What happens returns the agents of the round that begins then, by rank.

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
        self._begun = 0
        self._begins: list[tuple[str, frames.Begin]] = []
        self._wants: list[str] = []

    def _send(self, member: bytes, frame: frames.Begin | frames.Wanted) -> None:
        letter = chr(member[0])
        assert letter in self.seats, "only a member can be told anything"
        if isinstance(frame, frames.Begin):
            self._begins.append((letter, frame))
        else:
            assert frame.number == self._begun - 1, "it names the present round"
            self._wants.append(letter)

    def seat(self, letters: str, order: bytes | None = None) -> str:
        self.seats |= {letter: seat(letter, order) for letter in letters}
        return self.look()

    def next(self, letters: str, first: frames.Next = NEVER) -> str:
        """Have these agents, which may have no seats yet, say NEXT; ``first`` is the first round that they got."""
        self.seats |= {letter: seat(letter) for letter in letters if letter not in self.seats}
        for letter in letters:
            self.rounds.said_next(letter.encode() * 16, first, self.now)
        return self.look()

    def lose(self, letters: str) -> str:
        for letter in letters:
            del self.seats[letter]
        return self.look()

    def done(self, letters: str) -> str:
        for letter in letters:
            self.rounds.said_done(letter.encode() * 16)
        return self.look()

    def look(self) -> str:
        if (seats := list(self.seats.values())) != self._listed:
            self._listed = seats  # another object only if the members are others
        self.rounds.look(self._listed, self.now)
        assert self.rounds.due is None or self.rounds.due > self.now, "a busy loop"
        begins, self._begins = self._begins, []
        told = [(frame.number, frame.rank, frame.size) for _, frame in begins]
        assert told == [(self._begun, rank, len(begins)) for rank in range(len(begins))]
        self._begun += bool(begins)
        self.doubts = [frame.doubts for _, frame in begins]
        return "".join(letter for letter, _ in begins)

    def wait(self, seconds: float) -> str:
        """Let the time pass; the host looks only when it is due."""
        end, begun = self.now + seconds, ""
        while (due := self.rounds.due) is not None and due <= end:
            self.now, wants = due, len(self._wants)
            begins = self.look()
            assert begins or len(self._wants) > wants, "due, and there was nothing to do"
            begun += begins
        self.now = end
        return begun

    def after(self, seconds: float) -> str:
        """Return who is in the round that begins after so long, and demand that none has begun before."""
        assert seconds < 0.1 or self.wait(seconds - 0.1) == ""
        return self.wait(min(seconds, 0.1))

    def wanted(self) -> str:
        """Return whom the host has told since the last call that another round has to follow."""
        wants, self._wants = self._wants, []
        return "".join(sorted(wants))

    def run(self, letters: str) -> None:
        """Bring these into the first round."""
        begun = self.next(letters)
        assert letters == begun or self.rounds.due is not None
        assert letters == begun or self.wait(self.rounds.due - self.now) == letters  # type: ignore[operator]


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
    session, letters = Session(nodes, **options), "ABCDEF"[:least]
    assert session.next(letters[:-1]) == session.wait(1000.0) == "", "too few"
    assert session.next(letters[-1]) + session.wait(LAST_CALL) == letters


@pytest.mark.parametrize("last_call", [None, 7.0])
def test_a_round_of_all_begins_at_once(last_call: float | None) -> None:
    session = Session(last_call=last_call)
    for _ in range(2):
        assert session.next("ABC") == ""
        assert session.next("D") == "ABCD"


def test_too_few_of_a_later_round_wait_for_another() -> None:
    session = Session()
    session.run("ABC")
    session.lose("BC")
    assert session.next("A") == session.wait(1000.0) == ""
    assert session.next("D") == "AD"


# --- the first round -----------------------------------------------------------------------------------------------


def after_a_loss(companions: str) -> dict[str, Any]:
    """The past of a host whose last session was that of these and of "D", which was its host and is lost."""
    return {"companions": tuple(map(who, f"{companions}D")), "host_lost": ("node-D", ord("D"))}


@pytest.mark.parametrize(
    ("past", "first", "seconds"),
    [
        pytest.param({}, NEVER, LAST_CALL, id="torch's last call at the start of a job"),
        pytest.param({"last_call": 7.0}, NEVER, 7.0, id="the user's last call"),
        pytest.param({"small": True}, NEVER, 0.0, id="no second one after that of the gathering"),
        pytest.param({"small": True, "last_call": 7.0}, NEVER, 0.0, id="not even the user's"),
        pytest.param(after_a_loss("AB"), AGAIN, 0.0, id="all but the lost host are back"),
        pytest.param(after_a_loss("ABC"), AGAIN, COMPANIONS_SECONDS, id="briefly for one that is not back"),
        pytest.param(after_a_loss("AB") | {"last_call": 7.0}, AGAIN, 7.0, id="the user's after a loss too"),
        pytest.param(after_a_loss("ABC") | {"last_call": 7.0}, AGAIN, 7.0, id="the longer of the two: the user's"),
        pytest.param(after_a_loss("ABC") | {"last_call": 1.0}, AGAIN, COMPANIONS_SECONDS, id="the longer of the two"),
    ],
)
def test_for_how_long_the_first_round_waits_for_more_nodes(
    past: dict[str, Any], first: frames.Next, seconds: float
) -> None:
    session = Session(**past)
    assert session.next("A", first) == session.wait(5.0) == ""
    assert session.next("B", first) + session.after(seconds) == "AB"


def test_a_restarted_host_knows_no_companions_and_waits_briefly_for_them() -> None:
    session = Session()
    session.next("A")
    session.next("B", AGAIN)
    assert session.after(COMPANIONS_SECONDS) == "BA", "and makes no last call, since it is no first round of the job"


def test_the_last_call_counts_from_when_they_were_enough_and_another_does_not_extend_it() -> None:
    session = Session()
    session.next("AB")
    session.wait(LAST_CALL - 1.0)
    session.next("C")
    assert session.after(1.0) == "ABC"


def test_the_last_call_begins_anew_when_too_few_are_left() -> None:
    session = Session()
    session.next("AB")
    session.wait(LAST_CALL - 1.0)
    session.lose("B")
    session.next("C")
    assert session.after(LAST_CALL) == "AC"


def test_the_first_round_waits_for_every_agent_that_has_a_seat_but_not_without_end() -> None:
    """The workers of its last session have not ended yet, or are stuck."""
    for comes in (True, False):
        session = Session()
        session.seat("ABC")
        session.next("AB")
        if comes:
            assert session.wait(LAST_CALL + 1.0) == ""
            assert session.next("C") == "ABC"
        else:
            assert session.after(STOP_SECONDS) == "AB"


# --- another round -------------------------------------------------------------------------------------------------


def test_the_loss_of_a_participant_makes_another_round_wanted_once() -> None:
    session = Session()
    session.run("ABC")
    session.lose("C")
    assert session.wanted() == "AB"
    session.look()
    assert session.next("A") == session.wanted() == ""
    assert session.next("B") == "AB", "without the last call that is torch's default"


def test_next_of_a_participant_makes_another_round_wanted_once() -> None:
    session = Session()
    session.run("ABC")
    session.next("B")
    assert set(session.wanted()) >= {"A", "C"}
    session.next("A")
    assert session.wanted() == ""
    assert session.lose("C") == "AB"


def test_a_last_call_that_the_user_has_set_is_made_anew_in_each_round() -> None:
    session = Session(last_call=7.0)
    session.run("ABC")
    session.lose("C")
    for _ in range(2):
        session.next("A")
        session.wait(20.0)
        session.next("B")
        assert session.after(7.0) == "AB"


def test_a_later_round_waits_for_no_agent_that_was_not_in_the_last_one() -> None:
    session = Session()
    session.run("ABC")
    session.seat("D")
    session.lose("C")
    assert session.next("AB") == "AB"


def test_a_participant_that_does_not_say_next_is_left_behind_and_comes_as_a_newcomer() -> None:
    session = Session()
    session.run("ABC")
    session.next("A")
    session.wanted()
    session.wait(5.0)
    session.next("B")
    assert session.after(STOP_SECONDS - 5.0) == "AB"
    session.next("C")
    assert session.wanted() == "", "the others are not restarted at once"
    session.wait(LAST_CALL)
    assert session.wanted() == "AB"
    assert session.next("AB") == "ABC"


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
    assert session.next("AB") == "ABC"
    session.wait(LAST_CALL + 5.0)
    session.next("D")
    assert session.wanted() == "ABC", "at once, since the round is older"


def test_a_node_that_makes_the_session_full_again_and_again_is_taken_at_once_and_then_once_in_a_last_call() -> None:
    session = Session()
    session.run("ABC")
    began, came = session.now, []
    for _ in range(12):
        session.next("D")
        if session.wanted():
            came.append(session.now)
            assert session.next("ABC") == "ABCD"
            session.wait(1.0)
        session.lose("D")
        if session.wanted():
            assert session.next("ABC") == "ABC"
        session.wait(10.0)
    assert came[0] == began
    assert len(came) >= 3
    assert all(later - earlier >= LAST_CALL for earlier, later in itertools.pairwise(came))


# --- the end of an agent's part --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param([(Session.done, "B"), (Session.lose, "B")], id="an agent that is done is lost"),
        pytest.param([(Session.next, "C"), (Session.lose, "C")], id="an agent that is in no round is lost"),
        pytest.param([(Session.next, "C"), (Session.done, "C")], id="a newcomer is done"),
        pytest.param([(Session.done, "A"), (Session.next, "CD")], id="newcomers come to a round that is ending"),
        pytest.param([(Session.done, "AB"), (Session.next, "CD")], id="newcomers come when all are done"),
    ],
)
def test_what_restarts_nobody(happens: list[tuple[Callable[[Session, str], str], str]]) -> None:
    session = Session()
    session.run("AB")
    for event, letters in happens:
        assert event(session, letters) == ""
    assert session.wait(1000.0) == session.wanted() == ""
    assert session.rounds.due is None


def test_a_failure_in_a_round_that_is_ending_restarts_those_that_are_not_done() -> None:
    session = Session()
    session.run("ABC")
    session.done("A")
    session.next("D")
    session.next("B")
    assert session.wanted() == "BC"
    assert session.next("C") == "BCD"
    session.next("E")
    session.wait(LAST_CALL)
    assert session.wanted() == "BCD", "newcomers count again"


@pytest.mark.parametrize(
    ("nodes", "before", "lost", "failed", "over"),
    [
        pytest.param((3, 3), "AB", "C", "", True, id="no round without all"),
        pytest.param((2, 3), "AB", "C", "", True, id="too few for a round"),
        pytest.param((2, 3), "A", "C", "", False, id="B still runs"),
        pytest.param((1, 2), "A", "B", "", False, id="B can come back"),
        pytest.param((2, 4), "AB", "CD", "", False, id="C and D can come back"),
        pytest.param((2, 4), "ABC", "D", "", True, id="D can't run alone"),
        pytest.param((3, 3), "ABC", "", "", False, id="all are done"),
        pytest.param((3, 3), "A", "", "B", False, id="B failed and C still runs"),
        pytest.param((3, 3), "A", "", "BC", True, id="B and C failed, and it takes three"),
    ],
)
def test_agents_that_are_done_wait_in_vain_once_too_few_others_can_come(
    nodes: tuple[int, int], before: str, lost: str, failed: str, over: bool
) -> None:
    session = Session(nodes)
    session.run("ABCD"[: nodes[1]])
    session.done(before)
    assert not session.rounds.over
    session.lose(lost)
    session.next(failed)
    assert session.rounds.over == over


def test_once_an_agent_has_ended_the_job_no_round_begins_and_those_that_are_done_wait_for_running_ones_alone() -> None:
    session = Session((2, 5))
    session.run("ABC")
    session.next("D")
    session.quorum.ending = True
    session.lose("B")
    assert session.wait(1000.0) == session.wanted() == ""
    session.done("A")
    assert not session.rounds.over, "C still runs"
    session.lose("C")
    assert session.rounds.over


# --- ranks ---------------------------------------------------------------------------------------------------------


def claim(number: int) -> bytes:
    """The order of a node that asks for this node rank."""
    return order_key(number, "", "")


@pytest.mark.parametrize(
    ("orders", "firsts", "expected"),
    [
        pytest.param([claim(3), claim(1), claim(2), claim(0)], {}, "DBCA", id="by the order of their nodes"),
        pytest.param([b"\1node", b"\1node"], {}, "AB", id="of one machine, the older process first"),
        pytest.param(
            [b"\1node9", b"\1node1"], {"A": AGAIN}, "AB", id="a newcomer last, whatever the order of the nodes"
        ),
        pytest.param(
            [b"\1node"] * 4,
            {"B": frames.Next(generation=5, number=3), "C": AGAIN, "D": frames.Next(generation=4, number=9)},
            "DCBA",
            id="by their first rounds, newcomers last",
        ),
    ],
)
def test_the_ranks_of_a_round(orders: list[bytes], firsts: dict[str, frames.Next], expected: str) -> None:
    """A newcomer's disk can be empty: as rank 0 it would send fresh weights to the nodes that have trained."""
    session, letters = Session((len(orders), len(orders))), "ABCD"[: len(orders)]
    for letter, order in zip(letters, orders, strict=True):
        session.seat(letter, order)
    for _ in range(2):
        assert [session.next(letter, firsts.get(letter, NEVER)) for letter in reversed(letters)][-1] == expected


@pytest.mark.parametrize(
    ("orders", "without"),
    [
        pytest.param([b"\1node1", b"\1node2", b"\1node2"], "", id="none asks"),
        pytest.param([claim(0), claim(1)], "", id="all ask"),
        pytest.param([claim(0), claim(0) + b"\1a", claim(0) + b"\1b"], "", id="a launcher's"),
        pytest.param([claim(0), b"\1node", b"\1node"], "10.0.0.2, 10.0.0.3", id="one asks"),
    ],
)
def test_nodes_that_ask_for_no_node_rank_although_others_do_are_named_to_all(orders: list[bytes], without: str) -> None:
    session = Session((len(orders), len(orders)))
    for letter, order in zip("ABC", orders, strict=False):
        session.seat(letter, order)
    session.next("ABC"[: len(orders)])
    (doubts,) = set(session.doubts)
    assert without in doubts
    assert bool(doubts) == bool(without)


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
    begun = session.next("".join(session.seats)) + session.wait(LAST_CALL)
    enough = len(session.seats) >= session.quorum.round_minimum
    assert sorted(begun) == (sorted(session.seats) if enough else [])
