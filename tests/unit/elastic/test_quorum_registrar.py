"""Which processes may join a session of agents, when it is founded, and how long it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mingle.config.order import order_key
from mingle.elastic.leases import ANSWER_SECONDS, GROWN_SECONDS, LEASE_SECONDS
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import CONFIRM_SECONDS, Nodes, Policy, Quorum
from mingle.protocol.session.applications import CHALLENGE_SECONDS
from mingle.protocol.session.phases import Committed, Confirming, Open, Sealing
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from tests.support.registrar_port import RecordingPort

HOST_ADDRESS = "10.0.0.1"
LAST_CALL = 30.0
NEVER = 1000.0
"""Longer than anything is waited for."""


def member(letter: str) -> bytes:
    """The member id that tests call by a letter."""
    return letter.encode() * 16


class Registry:
    """A registrar, its host "A", and whoever joins it: connection 1 is the first."""

    def __init__(self, minimum: int = 2, maximum: int = 4, *, allow_minority: bool = False, **past: Any) -> None:
        self.nodes = Nodes(minimum=minimum, maximum=maximum)
        self.now = 0.0
        self.port = RecordingPort()
        policy = Policy(nodes=self.nodes, last_call=LAST_CALL, allow_minority=allow_minority)
        self.memory = Memory(policy, **past)
        self.quorum = Quorum(member("Z"), self.memory, 0.0)
        seat = HostSeat(member=member("A"), applicant=self.wish("A"), prefix_lengths={HOST_ADDRESS: 24})
        self.registrar = Registrar(member("Z"), seat, self.port, self.port, self.quorum)
        self._conns = 0

    @property
    def phase(self) -> type:
        return type(self.registrar.state)

    @property
    def seated(self) -> str:
        return "".join(chr(each[0]) for each in self.registrar.seats)

    def wish(self, letter: str, **more: Any) -> frames.Join:
        """What an agent says when it asks for a seat."""
        address = f"10.0.0.{ord(letter) - 64}"
        defaults: dict[str, Any] = {
            "world_size": self.nodes.maximum,
            "minimum": self.nodes.minimum,
            "node": letter,
            "kind": "agents",
            "age": 60.0,
            "rounds": True,
            "who": frames.ProcessInfo(hostname=f"node-{letter}", pid=ord(letter), address=address, unit="node"),
            "paths": (frames.Path(host_address=HOST_ADDRESS, local_address=address, interface="eth0"),),
        }
        return frames.Join(**{**defaults, **more})

    def join(self, letter: str, **more: Any) -> int:
        self._conns += 1
        self.registrar.join(self._conns, member(letter), self.wish(letter, **more), self.now)
        return self._conns

    def wait(self, seconds: float) -> None:
        """Let the time pass, and the registrar do what it has planned."""
        end = self.now + seconds
        while (due := self.registrar.next_timer()) is not None and due <= end:
            assert due > self.now or self.now == 0.0, "a busy loop"
            self.now = max(self.now, due)
            self.registrar.handle_timer(self.now)
        self.now = end

    def founds_after(self, seconds: float) -> bool:
        """Whether the session asks its members to confirm after so long, and not before."""
        if seconds:
            self.wait(seconds - 0.1)
            assert self.phase is Open
            self.wait(0.2)
        return self.phase is Confirming

    def said(self) -> dict[int, list[frames.AnyFrame]]:
        told: dict[int, list[frames.AnyFrame]] = {}
        self.last = self.port.take()
        for call in self.last:
            if call[0] == "send":
                told.setdefault(call[1], []).append(call[2])
        return told

    def kinds(self, conn: int) -> list[type]:
        return [type(frame) for frame in self.said().get(conn, [])]

    def refusal(self, conn: int) -> frames.Refused:
        frame = self.said()[conn][-1]
        assert isinstance(frame, frames.Refused)
        assert ("hang_up", conn) in self.last
        return frame

    def confirm(self, conn: int, letter: str) -> None:
        session, epoch = self.registrar.session, self.registrar.state.epoch
        frame = frames.Confirmed(session=session, epoch=epoch, paths=self.wish(letter).paths)
        self.registrar.confirmed(conn, frame, self.now)

    def acknowledge(self, *conns: int) -> None:
        for conn in conns:
            self.registrar.acknowledged(conn, self.now)

    def answer(self, *letters: str) -> None:
        """Let these members, or all, answer a PING that is sent now."""
        for each in map(member, letters) if letters else self.registrar.seats:
            self.quorum.leases.answered(each, self.now)
        self.registrar.advance(self.now, held=False)  # as the host does after every event

    def open_store(self) -> None:
        self.registrar.store_opened(self.registrar.state.epoch, 5000, "token", self.now)

    def seal(self, *letters: str) -> list[int]:
        """Let these join and confirm, and open the store."""
        conns = [self.join(letter) for letter in letters]
        for letter, conn in zip(letters, conns, strict=True):
            self.confirm(conn, letter)
        self.open_store()
        return conns

    def go(self, *letters: str) -> list[int]:
        """Let these join and bring the session to GO."""
        conns = self.seal(*letters)
        self.acknowledge(*conns)
        assert self.phase is Committed
        self.answer()
        self.port.take()
        return conns

    def come_late(self, letter: str, **more: Any) -> None:
        late = self.join(letter, **more)
        self.confirm(late, letter)
        self.acknowledge(late)

    def has_had_quorum(self) -> bool:
        self.quorum.note_quorum(self.now)
        return self.quorum.had_quorum


# --- when to found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "past", "wish", "seconds", "lacks"),
    [
        pytest.param((2, 3), {}, {}, 0.0, "", id="a quorum at once"),
        pytest.param((2, 5), {}, {}, LAST_CALL, "1 more node: it takes 3 to begin, or 30 s", id="after a last call"),
        pytest.param(
            (3, 6), {"allow_minority": True}, {}, NEVER, "2 more nodes: it takes 4 to begin", id="fewer than MIN never"
        ),
        pytest.param(
            (2, 5),
            {"had_quorum": True, "companions": (frames.ProcessInfo(hostname="node-H", pid=72),)},
            {},
            NEVER,
            "or 2 with --rdzv-conf allow_minority=1; missed: host node-H, pid 72",
            id="the host is experienced, and misses another agent",
        ),
        pytest.param((2, 5), {}, {"had_quorum": True}, NEVER, "or 2 with --rdzv-conf", id="the member is experienced"),
        pytest.param(
            (2, 5), {"had_quorum": True, "allow_minority": True}, {}, LAST_CALL, "30 s", id="a minority is allowed"
        ),
        pytest.param((2, 3), {"surplus": True}, {}, NEVER, "1 more node", id="a surplus host does not count"),
        pytest.param((1, 3), {"began_at": 20.0}, {}, GROWN_SECONDS, "", id="a young host counts once it is older"),
        pytest.param((1, 3), {}, {"age": 1.0}, GROWN_SECONDS - 1.0, "", id="and a young member"),
    ],
)
def test_how_long_after_a_second_agent_has_come_a_session_is_founded(
    nodes: tuple[int, int], past: dict[str, Any], wish: dict[str, Any], seconds: float, lacks: str
) -> None:
    registry = Registry(*nodes, **past)
    registry.now = 20.0
    registry.join("B", **wish)
    assert lacks in registry.registrar.status().lacks
    assert registry.founds_after(seconds) is (seconds < NEVER)
    assert registry.quorum.small is (seconds >= LAST_CALL)


def test_no_small_start_comes_before_a_young_agent_counts() -> None:
    registry = Registry(1, 3, began_at=0.0)
    registry.quorum.policy = replace(registry.quorum.policy, last_call=1.0)
    registry.join("B", age=1.0)
    assert registry.founds_after(GROWN_SECONDS)
    assert not registry.quorum.small


@pytest.mark.parametrize("surplus", [False, True])
def test_all_together_need_not_be_old_unless_one_is_surplus(surplus: bool) -> None:
    registry = Registry(1, 3, began_at=0.0)
    registry.join("B", age=0.0)
    registry.join("C", age=0.0, surplus=surplus)
    assert registry.phase is (Open if surplus else Confirming)


def test_a_host_that_is_bound_founds_nothing() -> None:
    registry = Registry(2, 3)
    registry.memory.binding.renew(member("S"), -2.0)
    registry.join("B")
    assert "its lease in the previous session" in registry.quorum.lacks()
    told = registry.registrar.status_version()
    assert registry.founds_after(8.0)
    assert told != registry.registrar.status_version(), "a status that is kept would name what is no longer lacking"


def test_a_surplus_agent_gets_a_seat_only_once_the_session_has_formed() -> None:
    registry = Registry(2, 3)
    assert registry.refusal(registry.join("D", surplus=True)).reason == "full"
    (conn,) = registry.seal("B")
    assert registry.refusal(registry.join("D", surplus=True)).reason == "full"
    registry.acknowledge(conn)
    registry.answer()
    assert registry.kinds(registry.join("D", surplus=True)) == [frames.Joined, frames.Confirm]


def test_members_hear_of_their_session_before_the_seal() -> None:
    registry = Registry(2, 3, generation=4)
    conn = registry.join("B", generation=6)
    registry.confirm(conn, "B")
    registry.said()
    registry.open_store()
    members, sealed = registry.said()[conn]
    assert isinstance(members, frames.Members)
    assert isinstance(sealed, frames.Sealed)
    assert (members.generation, members.quorum) == (7, True), "it has by the time at which they hear GO"
    assert [who.hostname for who in members.present] == ["node-A", "node-B"]
    assert not registry.quorum.had_quorum
    registry.acknowledge(conn)
    assert registry.kinds(conn) == [frames.Go]
    assert registry.quorum.had_quorum


DAY = 86_400
NOW = 1_700_000_000


@pytest.mark.parametrize(
    ("clocks", "known", "number"),
    [
        ((NOW, NOW + 3), (-1, -1), NOW + 3),  # all agents are new
        ((NOW + 3, NOW), (-1, -1), NOW + 3),
        ((NOW, NOW), (NOW - 5, -1), NOW),  # one was started again
        ((NOW, NOW), (NOW, NOW - 9), NOW + 1),  # two sessions in one second
        ((NOW - 3600, NOW - 3600), (NOW, NOW), NOW + 1),  # the clocks were set back
        ((NOW, NOW), (NOW + DAY, NOW), NOW + DAY + 1),
        ((NOW, NOW), (NOW + DAY + 1, NOW), NOW + 1),  # a clock that was wrong is right again
        ((NOW, NOW), (-1, frames.MAX_GENERATION), NOW),  # forged
        ((NOW, NOW), (frames.MAX_GENERATION, -1), NOW),
        ((NOW + 365 * DAY, NOW), (NOW, NOW), NOW + 365 * DAY),
        ((NOW, frames.MAX_GENERATION), (-1, frames.MAX_GENERATION), frames.MAX_GENERATION),
        ((2 * frames.MAX_GENERATION, 0), (-1, -1), frames.MAX_GENERATION),
        ((-5, 0), (-1, -1), 0),
        ((0, 0), (4, 6), 7),
    ],
)
def test_the_number_of_a_session_sorts_by_time(clocks: tuple[int, int], known: tuple[int, int], number: int) -> None:
    registry = Registry(2, 3, generation=known[0], wall_clock=lambda: clocks[0] + 0.5)
    registry.confirm(registry.join("B", generation=known[1], clock=clocks[1]), "B")
    registry.open_store()
    assert registry.quorum.members().generation == number


def test_go_takes_a_valid_lease_of_the_whole_quorum() -> None:
    registry = Registry(3, 3)
    first, second = registry.seal("B", "C")
    registry.acknowledge(first)
    registry.now = LEASE_SECONDS  # the process was stopped: its timer comes late
    registry.said()
    registry.acknowledge(second)
    assert registry.phase is Confirming
    assert registry.kinds(first) == [frames.Void, frames.Confirm]


def test_a_host_that_turns_out_to_be_surplus_does_not_count_for_go() -> None:
    registry = Registry(2, 4)
    first, second = registry.seal("B", "C")
    registry.memory.surplus = True  # a session of four has said so meanwhile
    registry.said()
    registry.acknowledge(first, second)
    assert registry.phase is Open
    assert registry.kinds(first) == [frames.Void]


def test_a_member_that_does_not_confirm_holds_the_others_up_for_a_while_only() -> None:
    registry = Registry(2, 3)
    registry.join("B")
    stopped = registry.join("C")  # it comes while B is asked
    registry.registrar.lost(1, 0.0)
    assert (registry.phase, registry.seated) == (Confirming, "AC"), (
        "it is a founder of the next epoch, and no latecomer"
    )
    assert registry.registrar.seats.latecomers() == []
    registry.said()
    registry.wait(CONFIRM_SECONDS + 0.1)
    assert ("hang_up", stopped) in (registry.said(), registry.last)[1]
    assert registry.phase is Open
    registry.confirm(registry.join("D"), "D")
    assert registry.phase is Sealing


# --- how long to keep -------------------------------------------------------------------------------------------------


def test_a_session_is_kept_until_fewer_leases_than_it_takes_are_valid() -> None:
    registry = Registry(2, 5)
    conn, _ = registry.go("B", "C")
    quorum = registry.quorum
    assert (quorum.wanted, quorum.kept_until()) == (3, LEASE_SECONDS)
    quorum.leases.answered(member("B"), 3.0)
    assert quorum.kept_until() == LEASE_SECONDS, "the other one's lease is what ends first"
    quorum.leases.answered(member("C"), 2.0)
    assert quorum.kept_until() == 2.0 + LEASE_SECONDS
    assert quorum.counting(2.0 + LEASE_SECONDS) == [member("A"), member("B")]
    registry.registrar.lost(conn, 4.0)
    assert quorum.kept_until() == float("-inf")


def test_one_keeps_a_session_of_all() -> None:
    registry = Registry(3, 3)
    for conn in registry.go("B", "C"):
        registry.registrar.lost(conn, 1.0)
    assert registry.quorum.kept_until() == float("inf")


@pytest.fixture
def small() -> Registry:
    """A session of 2:5 that "A" and "B" have begun after a last call; "B" has answered."""
    registry = Registry(2, 5)
    conn = registry.join("B")
    registry.wait(LAST_CALL + 1)
    registry.confirm(conn, "B")
    registry.open_store()
    registry.acknowledge(conn)
    registry.answer()
    assert not registry.has_had_quorum()
    return registry


def test_a_small_session_is_kept_by_the_least_until_it_has_had_its_quorum(small: Registry) -> None:
    assert small.quorum.wanted == 2
    small.come_late("C")
    assert not small.has_had_quorum()
    small.now += 1.0
    small.answer("B", "C")
    assert small.has_had_quorum()
    assert (small.quorum.members().quorum, small.quorum.wanted) == (True, 3)


def test_a_young_latecomer_gives_no_small_session_its_quorum_before_it_is_old_enough(small: Registry) -> None:
    small.come_late("C", age=0.0)
    small.now += GROWN_SECONDS - 0.1
    small.answer("B", "C")
    assert not small.has_had_quorum()
    small.now += 0.1
    assert not small.has_had_quorum(), "nothing shows that it lives still"
    small.answer("B", "C")
    assert small.has_had_quorum()


def test_a_member_that_no_longer_answers_gives_no_small_session_its_quorum_though_it_has_a_lease(
    small: Registry,
) -> None:
    small.now += 1.0
    small.come_late("C")
    small.now += 1.0
    small.answer("C")
    assert small.quorum.leases.until(member("B")) > small.now
    assert not small.has_had_quorum()
    small.answer("B")
    assert small.has_had_quorum()


def test_a_member_and_the_one_in_its_place_are_not_both_there_for_a_round() -> None:
    registry = Registry(4, 6)  # three keep it
    registry.go("B", "C", "D")
    registry.now = 1.0
    registry.answer("B")
    registry.now = 1.1
    registry.come_late("E")
    registry.now = 1.5
    registry.answer("E")
    assert registry.quorum.kept_until() == 1.0 + LEASE_SECONDS
    assert registry.quorum.proved_at() == 0.0, "B was killed before E began"
    registry.answer("B")
    assert registry.quorum.proved_at() == registry.now


def test_a_member_answers_for_as_long_as_its_last_answer_is_young_whatever_its_lease() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    assert registry.quorum.answers(member("B"), ANSWER_SECONDS - 0.1)
    assert not registry.quorum.answers(member("B"), ANSWER_SECONDS)
    assert registry.quorum.leases.until(member("B")) > ANSWER_SECONDS
    assert registry.quorum.answers(member("A"), ANSWER_SECONDS), "the host itself"


# --- who may join ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "reason", "detail"),
    [
        ({"minimum": 1}, "world size", "--nnodes=2:4, the newcomer with --nnodes=1:4"),
        ({"world_size": 5}, "world size", "--nnodes=2:4, the newcomer with --nnodes=2:5"),
        ({"kind": "ranks", "rank": 1}, "kind", "one of agents, the newcomer is one of ranks"),
        ({"rounds": False, "versions": {"mingle": "0.9"}}, "version", "the newcomer has mingle 0.9, the host unknown"),
    ],
)
@pytest.mark.parametrize("running", [False, True])
def test_agent_with_other_numbers_or_without_rounds_is_refused(
    wish: dict[str, Any], reason: str, detail: str, running: bool
) -> None:
    registry = Registry(2, 4)
    if running:
        registry.go("B", "C")
    refused = registry.refusal(registry.join("X", **wish))
    assert refused.reason == reason
    assert detail in refused.detail


def test_a_session_admits_nobody_before_go_and_while_too_few_have_answered_lately() -> None:
    registry = Registry(2, 4)
    conns = registry.seal("B", "C")
    late = registry.join("D")
    registry.acknowledge(*conns)
    assert registry.kinds(late) == [frames.Joined]
    registry.answer("B")
    assert registry.kinds(late) == [frames.Confirm]
    registry.now += ANSWER_SECONDS
    registry.confirm(late, "D")
    assert registry.kinds(late) == []
    registry.answer("C")
    assert registry.kinds(late) == [frames.Confirm]
    registry.confirm(late, "D")
    members, sealed = registry.said()[late]
    assert isinstance(members, frames.Members)
    assert isinstance(sealed, frames.Sealed)
    registry.now += ANSWER_SECONDS
    registry.acknowledge(late)
    assert registry.registrar.seats[member("D")].is_latecomer
    registry.answer("C")
    registry.confirm(late, "D")
    registry.said()
    registry.acknowledge(late)
    assert registry.kinds(late) == [frames.Go]
    assert not registry.registrar.seats[member("D")].is_latecomer


def test_a_latecomer_whose_acknowledgement_comes_too_late_is_asked_again() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    late = registry.join("D")
    registry.confirm(late, "D")
    registry.now += LEASE_SECONDS
    registry.answer("B")  # the session can take somebody
    registry.said()
    registry.acknowledge(late)
    assert registry.kinds(late) == [frames.Confirm]


def test_after_go_a_lost_member_gives_its_seat_free_and_no_more() -> None:
    registry = Registry(2, 4)
    first, second = registry.go("B", "C")
    registry.registrar.lost(first, 1.0, "its connection closed")
    assert (registry.phase, registry.seated) == (Committed, "AC")
    assert registry.said() == {}
    assert not registry.quorum.ending
    registry.registrar.left(second, 1.0, "DiscoveryTimeoutError")
    assert not registry.quorum.ending, "it had not heard GO yet"


def test_a_session_that_is_ending_takes_only_agents_that_were_in_it() -> None:
    registry = Registry(2, 4)
    _, conn = registry.go("B", "C")
    registry.registrar.ready(conn)
    registry.registrar.left(conn, 2.0, "its workers are done")
    assert registry.quorum.ending
    assert registry.refusal(registry.join("E")).reason == "running", "it waits for the end instead"
    registry.now += ANSWER_SECONDS
    back = registry.join("D", generation=registry.quorum.generation)
    assert registry.kinds(back) == [frames.Joined, frames.Confirm], "whoever answers, since no round begins any more"


@pytest.mark.parametrize("late", [False, True], ids=["member", "latecomer"])
def test_an_agent_keeps_its_seat_from_a_caller_that_only_knows_its_id_for_as_long_as_it_has_a_lease(late: bool) -> None:
    registry = Registry(2, 4)
    conn, _ = registry.go("B", "C")
    name = "D" if late else "B"
    if late:
        conn = registry.join("D")
    token = registry.registrar.seats[member(name)].token
    registry.port.take()
    stranger, asked_at = registry.join(name), registry.now
    assert registry.kinds(conn) == [frames.Ping]
    registry.wait(5.0)
    assert registry.port.take() == [], "a silent agent is lost by its lease alone"
    registry.registrar.pong(conn, asked_at, registry.now)
    assert registry.refusal(stranger).reason == "session"
    registry.answer()
    waits, again = registry.join(name), registry.join(name, token=token)
    said = registry.said()
    assert [type(frame) for frame in said[waits]] == [frames.Refused], "the holder has moved, so it lives"
    assert [type(frame) for frame in said[again]] == [frames.Joined, frames.Confirm]
    assert ("hang_up", conn) in registry.last
    registry.registrar.join(again, member(name), registry.wish(name), registry.now)
    assert registry.port.take() == [], "asked twice on one connection"
    assert registry.registrar.seats[member(name)].conn == again


@pytest.mark.parametrize("late", [False, True], ids=["member", "latecomer"])
def test_an_agent_that_never_heard_its_token_waits_for_the_end_of_its_old_connection(late: bool) -> None:
    registry = Registry(2, 4)
    conn, _ = registry.go("B", "C")
    if late:
        conn = registry.join("D")
    again = registry.join("D" if late else "B")
    registry.port.take()
    registry.registrar.lost(conn, registry.now, "it has not answered for too long")
    assert registry.kinds(again) == [frames.Joined, frames.Confirm]


@pytest.mark.parametrize(
    ("hostname", "answered_at", "reason"),
    [("node-E", 1.0, "surplus"), ("node-E", -2.5, "full"), ("node-B", 1.0, "full")],
    ids=["one too many", "a member is silent", "a member, started again"],
)
def test_one_more_than_the_most_is_surplus_if_all_the_others_certainly_live(
    hostname: str, answered_at: float, reason: str
) -> None:
    registry = Registry(3, 3)
    registry.now = -3.0
    conn, _ = registry.go("B", "C")
    leases, registry.now = registry.quorum.leases, 1.0
    leases.answered(member("B"), 1.0)
    leases.answered(member("C"), answered_at)
    newcomer = registry.join("E", who=frames.ProcessInfo(hostname=hostname, pid=1))
    assert registry.refusal(newcomer).reason == reason
    registry.registrar.lost(conn, 2.0)
    assert registry.kinds(registry.join("E")) == [frames.Joined, frames.Confirm]


# --- node ranks given by hand -----------------------------------------------------------------------------------------

CLAIM = order_key(1, "", "")


@pytest.mark.parametrize("late", [False, True], ids=["member", "latecomer"])
def test_a_node_rank_that_a_live_agent_has_is_refused_by_its_name(late: bool) -> None:
    registry = Registry(2 if late else 3, 5)
    if late:
        registry.go("B", "C")
    holder = registry.join("D", order=CLAIM)
    registry.said()
    newcomer = registry.join("E", order=CLAIM)
    assert registry.said() == {holder: [frames.Ping()]}
    registry.registrar.pong(holder, registry.now, registry.now)
    refused = registry.refusal(newcomer)
    assert (refused.reason, refused.detail) == ("node rank taken", "node rank 1 is held by another live node")
    assert refused.who is not None
    assert refused.who.hostname == "node-D"


def test_a_silent_agent_loses_its_node_rank_before_the_session_has_formed() -> None:
    registry = Registry(3, 4)
    for letter in "BC":
        registry.join(letter, order=CLAIM)
    registry.wait(CHALLENGE_SECONDS)
    assert registry.seated == "AC"


def test_the_node_rank_of_the_host_is_refused_at_once() -> None:
    registry = Registry(3, 4)
    registry.registrar.seats[member("A")].applicant = registry.wish("A", order=CLAIM)
    assert registry.refusal(registry.join("B", order=CLAIM)).reason == "node rank taken"
