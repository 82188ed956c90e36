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
from mingle.protocol.session.latecomers import ADMITTED_SECONDS
from mingle.protocol.session.phases import Committed, Confirming, Open, Sealing
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.roster import whos
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from tests.support.registrar_port import RecordingPort

HOST_ADDRESS = "10.0.0.1"
LAST_CALL = 30.0


def member(letter: str) -> bytes:
    """The member id that tests call by a letter."""
    return letter.encode() * 16


def application(letter: str, **more: Any) -> frames.Join:
    """What an agent says when it asks for a seat in a job of 2 to 4 nodes."""
    address = f"10.0.0.{ord(letter) - 64}"
    defaults: dict[str, Any] = {
        "world_size": 4,
        "minimum": 2,
        "node": letter,
        "kind": "agents",
        "age": 60.0,
        "rounds": True,
        "who": frames.ProcessInfo(hostname=f"node-{letter}", pid=ord(letter), address=address, unit="node"),
        "paths": (frames.Path(host_address=HOST_ADDRESS, local_address=address, interface="eth0"),),
    }
    return frames.Join(**{**defaults, **more})


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

    def wish(self, letter: str, **more: Any) -> frames.Join:
        return application(letter, world_size=self.nodes.maximum, minimum=self.nodes.minimum, **more)

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

    def said(self) -> dict[int, list[frames.AnyFrame]]:
        told: dict[int, list[frames.AnyFrame]] = {}
        self.last = self.port.take()
        for call in self.last:
            if call[0] == "send":
                told.setdefault(call[1], []).append(call[2])
        return told

    def kinds(self, conn: int) -> list[type]:
        return [type(frame) for frame in self.said().get(conn, [])]

    def confirm(self, conn: int, letter: str, **more: Any) -> None:
        paths = self.wish(letter, **more).paths
        session, epoch = self.registrar.session, self.registrar.state.epoch
        self.registrar.confirmed(conn, frames.Confirmed(session=session, epoch=epoch, paths=paths), self.now)

    def acknowledge(self, conn: int) -> None:
        self.registrar.acknowledged(conn, self.now)

    def answer(self, *letters: str) -> None:
        """Let these members, or all, answer a PING that is sent now."""
        leases = self.quorum.leases
        for each in map(member, letters) if letters else self.registrar.seats:
            leases.answered(each, self.now)
        self.registrar.advance(self.now, held=False)  # as the host does after every event

    def open_store(self) -> None:
        self.registrar.store_opened(self.registrar.state.epoch, 5000, "token", self.now)

    def seal(self, *letters: str) -> dict[str, int]:
        """Let these join and confirm, and open the store."""
        conns = {letter: self.join(letter) for letter in letters}
        for letter, conn in conns.items():
            self.confirm(conn, letter)
        self.open_store()
        return conns

    def go(self, *letters: str) -> dict[str, int]:
        """Let these join and bring the session to GO."""
        conns = self.seal(*letters)
        for conn in conns.values():
            self.acknowledge(conn)
        assert type(self.registrar.state) is Committed
        self.answer()
        self.port.take()
        return conns


# --- when to found --------------------------------------------------------------------------------------------------


def test_the_quorum_is_enough_at_once() -> None:
    registry = Registry(2, 4)
    registry.join("B")
    assert type(registry.registrar.state) is Open
    registry.join("C")
    assert type(registry.registrar.state) is Confirming
    assert not registry.quorum.small


def test_fewer_wait_for_a_whole_last_call_without_a_newcomer() -> None:
    registry = Registry(2, 5)
    registry.wait(20.0)
    registry.join("B")
    registry.wait(LAST_CALL - 0.1)
    assert type(registry.registrar.state) is Open
    assert registry.quorum.lacks() == "1 more node: it takes 3 to begin, or 30 s without a newcomer"
    registry.wait(0.1)
    assert type(registry.registrar.state) is Confirming
    assert registry.quorum.small


def test_fewer_than_the_least_are_never_enough() -> None:
    registry = Registry(3, 6, allow_minority=True)
    registry.join("B")
    registry.wait(10 * LAST_CALL)
    assert type(registry.registrar.state) is Open
    assert registry.quorum.lacks() == "2 more nodes: it takes 4 to begin"


@pytest.mark.parametrize("who", ["host", "member"])
def test_agent_of_a_session_with_a_quorum_waits_for_the_next_quorum(who: str) -> None:
    registry = Registry(2, 5, had_quorum=who == "host", companions=(application("H").who,))
    registry.join("B", had_quorum=who == "member")
    registry.wait(10 * LAST_CALL)
    assert type(registry.registrar.state) is Open
    assert registry.registrar.status().lacks == (
        "1 more node: it takes 3 to begin, or 2 with --rdzv-conf allow_minority=1; "
        "missed: host node-H (10.0.0.8), pid 72"
    )
    assert registry.registrar.status().present == tuple(map(str, whos(registry.registrar.seats.members(), {})))


def test_the_user_may_allow_a_minority_after_a_last_call() -> None:
    registry = Registry(2, 5, had_quorum=True, allow_minority=True)
    registry.join("B", had_quorum=True)
    registry.wait(LAST_CALL - 0.1)
    assert type(registry.registrar.state) is Open
    registry.wait(0.2)
    assert type(registry.registrar.state) is Confirming


def test_a_host_that_is_bound_founds_nothing() -> None:
    registry = Registry(2, 3)
    registry.memory.binding.renew(member("S"), -2.0)
    registry.join("B")
    assert registry.quorum.lacks() == "the end of its lease in the previous session"
    told = registry.registrar.status_version()
    registry.wait(7.9)
    assert type(registry.registrar.state) is Open
    registry.wait(0.2)
    assert type(registry.registrar.state) is Confirming
    assert told != registry.registrar.status_version(), "a status that is kept would name what is no longer lacking"


def test_a_surplus_agent_gets_a_seat_only_once_the_session_has_formed() -> None:
    registry = Registry(2, 3)
    assert refusal(registry, registry.join("D", surplus=True)).reason == "full"
    conn = registry.join("B")
    assert refusal(registry, registry.join("D", surplus=True)).reason == "full"
    registry.confirm(conn, "B")
    registry.open_store()
    registry.acknowledge(conn)
    registry.answer()
    assert registry.kinds(registry.join("D", surplus=True)) == [frames.Joined, frames.Confirm]


def test_a_surplus_host_does_not_count_for_the_founding() -> None:
    registry = Registry(2, 3)
    registry.memory.surplus = True
    registry.join("B")
    registry.wait(10 * LAST_CALL)
    assert type(registry.registrar.state) is Open
    registry.join("C")
    assert type(registry.registrar.state) is Confirming
    assert not registry.quorum.small


def test_members_frame_precedes_the_seal() -> None:
    registry = Registry(2, 3, generation=4)
    conn = registry.join("B", generation=6)
    registry.confirm(conn, "B")
    registry.said()
    assert [call[0] for call in registry.last if call[0] != "send"] == ["open_store"]
    registry.open_store()
    members, sealed = registry.said()[conn]
    assert isinstance(members, frames.Members)
    assert isinstance(sealed, frames.Sealed)
    assert (members.generation, members.quorum) == (7, True), "it has by the time at which they hear GO"
    assert [who.hostname for who in members.present] == ["node-A", "node-B"]
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
    conn = registry.join("B", generation=known[1], clock=clocks[1])
    registry.confirm(conn, "B")
    registry.open_store()
    assert registry.quorum.members().generation == number


def test_go_takes_a_valid_lease_of_the_whole_quorum() -> None:
    registry = Registry(3, 3)
    conns = registry.seal("B", "C")
    registry.acknowledge(conns["B"])
    registry.now = LEASE_SECONDS  # the process was stopped: its timer comes late
    registry.said()
    registry.acknowledge(conns["C"])
    assert type(registry.registrar.state) is Confirming
    assert registry.kinds(conns["B"]) == [frames.Void, frames.Confirm]


def test_a_host_that_turns_out_to_be_surplus_does_not_count_for_go() -> None:
    registry = Registry(2, 4)
    conns = registry.seal("B", "C")
    registry.acknowledge(conns["B"])
    registry.memory.surplus = True  # a session of four has said so meanwhile
    registry.said()
    registry.acknowledge(conns["C"])
    assert registry.kinds(conns["B"]) == [frames.Void]
    assert type(registry.registrar.state) is Open


def test_a_member_that_does_not_confirm_holds_the_others_up_for_a_while_only() -> None:
    registry = Registry(2, 3)
    registry.join("B")
    stopped = registry.join("C")  # it comes while B is asked
    assert type(registry.registrar.state) is Confirming
    registry.registrar.lost(1, 0.0)
    assert set(registry.registrar.seats) == {member("A"), member("C")}
    registry.said()
    registry.wait(CONFIRM_SECONDS + 0.1)
    assert ("hang_up", stopped) in (registry.said(), registry.last)[1]
    assert type(registry.registrar.state) is Open
    again = registry.join("D")
    registry.confirm(again, "D")
    assert type(registry.registrar.state) is Sealing


# --- how long to keep -------------------------------------------------------------------------------------------------


def test_a_session_is_kept_until_fewer_leases_than_it_takes_are_valid() -> None:
    registry = Registry(2, 5)
    conns = registry.go("B", "C")
    registrar = registry.registrar
    assert (registry.quorum.wanted, registry.quorum.kept_until()) == (3, LEASE_SECONDS)
    registry.quorum.leases.answered(member("B"), 3.0)
    assert registry.quorum.kept_until() == LEASE_SECONDS, "the other one's lease is what ends first"
    registry.quorum.leases.answered(member("C"), 2.0)
    assert registry.quorum.kept_until() == 2.0 + LEASE_SECONDS
    assert registry.quorum.counting(2.0 + LEASE_SECONDS) == [member("A"), member("B")]
    registrar.lost(conns["B"], 4.0)
    assert registry.quorum.kept_until() == float("-inf")


def test_one_keeps_a_session_of_all() -> None:
    registry = Registry(3, 3)
    conns = registry.go("B", "C")
    for conn in conns.values():
        registry.registrar.lost(conn, 1.0)
    assert registry.quorum.kept_until() == float("inf")


def begin_small() -> Registry:
    """Return a session of 2:5 that "A" and "B" have begun after a last call; "B" has answered."""
    registry = Registry(2, 5)
    conn = registry.join("B")
    registry.wait(LAST_CALL + 1)
    registry.confirm(conn, "B")
    registry.open_store()
    registry.acknowledge(conn)
    registry.answer()
    return registry


def come_late(registry: Registry, letter: str, **more: Any) -> None:
    late = registry.join(letter, **more)
    registry.confirm(late, letter)
    registry.acknowledge(late)


def has_had_quorum(registry: Registry) -> bool:
    registry.quorum.note_quorum(registry.now)
    return registry.quorum.had_quorum


def test_a_small_session_is_kept_by_the_least_until_it_has_had_its_quorum() -> None:
    registry = begin_small()
    assert not has_had_quorum(registry)
    assert registry.quorum.wanted == 2
    come_late(registry, "C")
    assert not has_had_quorum(registry)
    registry.now += 1.0
    registry.answer("B", "C")
    assert has_had_quorum(registry)
    assert (registry.quorum.members().quorum, registry.quorum.wanted) == (True, 3)


def test_a_young_latecomer_gives_no_small_session_its_quorum_before_it_is_old_enough() -> None:
    registry = begin_small()
    come_late(registry, "C", age=0.0)
    registry.now += GROWN_SECONDS - 0.1
    registry.answer("B", "C")
    assert not has_had_quorum(registry)
    registry.now += 0.1
    assert not has_had_quorum(registry), "nothing shows that it lives still"
    registry.answer("B", "C")
    assert has_had_quorum(registry)


def test_a_member_that_no_longer_answers_gives_no_small_session_its_quorum_though_it_has_a_lease() -> None:
    registry = begin_small()
    registry.now += 1.0
    come_late(registry, "C")
    registry.now += 1.0
    registry.answer("C")
    assert registry.quorum.leases.until(member("B")) > registry.now
    assert not has_had_quorum(registry)
    registry.answer("B")
    assert has_had_quorum(registry)


def test_a_member_and_the_one_in_its_place_are_not_both_there_for_a_round() -> None:
    registry = Registry(4, 6)  # three keep it
    registry.go("B", "C", "D")
    registry.now += 1.0
    registry.answer("B")
    registry.now += 0.1
    come_late(registry, "E")
    registry.now += 0.4
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


# --- who is old enough to found --------------------------------------------------------------------------------------


def test_a_young_agent_counts_when_it_is_old_enough_and_no_small_start_comes_before() -> None:
    registry = Registry(1, 3, began_at=0.0)
    registry.quorum.policy = replace(registry.quorum.policy, last_call=1.0)
    registry.join("B", age=1.0)
    assert type(registry.registrar.state) is Open
    registry.wait(GROWN_SECONDS - 0.1)
    assert type(registry.registrar.state) is Open
    registry.wait(0.1)
    assert (type(registry.registrar.state), registry.quorum.small) == (Confirming, False)


@pytest.mark.parametrize("surplus", [False, True])
def test_all_together_need_not_be_old_unless_one_is_surplus(surplus: bool) -> None:
    registry = Registry(1, 3, began_at=0.0)
    registry.join("B", age=0.0)
    registry.join("C", age=0.0, surplus=surplus)
    assert type(registry.registrar.state) is (Open if surplus else Confirming)


# --- who may join ---------------------------------------------------------------------------------------------------


def refusal(registry: Registry, conn: int) -> frames.Refused:
    frame = registry.said()[conn][-1]
    assert isinstance(frame, frames.Refused)
    assert ("hang_up", conn) in registry.last
    return frame


@pytest.mark.parametrize(
    ("wish", "reason", "detail"),
    [
        ({"minimum": 1}, "world size", "--nnodes=2:4, the newcomer with --nnodes=1:4"),
        ({"world_size": 5}, "world size", "--nnodes=2:4, the newcomer with --nnodes=2:5"),
        ({"kind": "ranks", "rank": 1}, "kind", "one of agents, the newcomer is one of ranks"),
    ],
)
@pytest.mark.parametrize("running", [False, True])
def test_agent_with_other_numbers_is_refused(wish: dict[str, Any], reason: str, detail: str, running: bool) -> None:
    registry = Registry(2, 4)
    if running:
        registry.go("B", "C")
    registry.registrar.join(9, member("X"), application("X", **{"world_size": 4, "minimum": 2, **wish}), 0.0)
    refused = refusal(registry, 9)
    assert refused.reason == reason
    assert detail in refused.detail


def test_a_running_session_admits_latecomers_by_themselves() -> None:
    registry = Registry(2, 4)
    others = registry.go("B", "C")
    late = registry.join("D")
    assert registry.kinds(late) == [frames.Joined, frames.Confirm]
    registry.confirm(late, "D")
    members, sealed = registry.said()[late]
    assert isinstance(members, frames.Members)
    assert isinstance(sealed, frames.Sealed)
    assert (sealed.place.rank, sealed.store_port) == (3, 5000)
    assert registry.registrar.seats[member("D")].is_latecomer
    registry.acknowledge(late)
    told = registry.said()
    assert [type(frame) for frame in told[late]] == [frames.Go]
    assert not others.keys() & told.keys()
    assert len(registry.registrar.roster()) == 4


def test_latecomer_to_a_sealed_session_waits_for_go() -> None:
    registry = Registry(2, 4)
    conns = {letter: registry.join(letter) for letter in "BC"}
    late = registry.join("D")
    for letter, conn in conns.items():
        registry.confirm(conn, letter)
    registry.said()
    registry.open_store()
    assert late not in registry.said()
    for conn in conns.values():
        registry.acknowledge(conn)
    assert registry.kinds(late) == []
    registry.answer("B")
    assert registry.kinds(late) == [frames.Confirm]


def test_a_running_session_admits_nobody_while_too_few_have_answered_lately() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    registry.now += ANSWER_SECONDS
    late = registry.join("D")
    assert registry.kinds(late) == [frames.Joined]
    registry.answer("B")
    assert registry.kinds(late) == [frames.Confirm]
    registry.now += ANSWER_SECONDS
    registry.confirm(late, "D")
    assert registry.kinds(late) == []
    registry.answer("C")
    assert registry.kinds(late) == [frames.Confirm]
    registry.confirm(late, "D")
    registry.said()
    registry.now += ANSWER_SECONDS
    registry.acknowledge(late)
    assert registry.kinds(late) == []
    assert registry.registrar.seats[member("D")].is_latecomer
    registry.answer("C")
    registry.confirm(late, "D")
    registry.acknowledge(late)
    assert not registry.registrar.seats[member("D")].is_latecomer


def test_latecomer_is_in_the_next_epoch_when_the_first_is_voided() -> None:
    registry = Registry(2, 4)
    conns = {letter: registry.join(letter) for letter in "BC"}
    registry.join("D")
    registry.registrar.lost(conns["B"], 1.0)
    assert type(registry.registrar.state) is Confirming
    assert set(registry.registrar.seats) == {member("A"), member("C"), member("D")}
    assert registry.registrar.seats.latecomers() == []


def test_after_go_a_lost_member_gives_its_seat_free_and_no_more() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    registry.registrar.lost(conns["B"], 1.0, "its connection closed")
    assert type(registry.registrar.state) is Committed
    assert registry.said() == {}
    assert not registry.quorum.ending
    registry.registrar.ready(conns["C"])
    registry.registrar.left(conns["C"], 2.0, "its workers are done")
    assert registry.quorum.ending
    assert set(registry.registrar.seats) == {member("A")}
    new = registry.join("E")
    (refusal,) = registry.said()[new]
    assert isinstance(refusal, frames.Refused)
    assert refusal.reason == "running", "it would join a job that ends, and waits for that instead"
    late = registry.join("D", generation=registry.quorum.generation)  # it was a member, and lost its connection
    assert registry.kinds(late) == [frames.Joined, frames.Confirm]
    registry.confirm(late, "D")
    sealed = registry.said()[late][-1]
    assert isinstance(sealed, frames.Sealed)
    assert sealed.place.rank == 1, "that of the first which is lost"
    registry.registrar.lost(late, 3.0)
    assert registry.registrar.seats.latecomers() == []


def test_a_good_bye_from_before_it_heard_go_does_not_end_the_job() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    registry.registrar.left(conns["B"], 1.0, "DiscoveryTimeoutError")
    assert not registry.quorum.ending
    assert set(registry.registrar.seats) == {member("A"), member("C")}


def test_an_agent_that_asks_twice_on_its_connection_keeps_one_seat_there() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    late = registry.join("D")
    registry.port.take()
    registry.registrar.join(late, member("D"), registry.wish("D"), registry.now)
    assert registry.port.take() == []
    assert registry.registrar.seats[member("D")].conn == late


def test_the_same_agent_on_another_connection_replaces_the_old_one() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    again = registry.join("B", token=registry.registrar.seats[member("B")].token)
    assert registry.kinds(again) == [frames.Joined, frames.Confirm]
    assert ("hang_up", conns["B"]) in registry.last
    registry.answer()
    third = registry.join("B", token=registry.registrar.seats[member("B")].token)
    assert registry.kinds(third) == [frames.Joined, frames.Confirm]
    assert ("hang_up", again) in registry.last


@pytest.mark.parametrize("late", [False, True], ids=["member", "latecomer"])
def test_agent_keeps_its_seat_from_a_caller_that_only_knows_its_id(late: bool) -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    name = "D" if late else "B"
    conn = registry.join("D") if late else conns["B"]
    registry.port.take()
    stranger = registry.join(name)
    assert registry.kinds(conn) == [frames.Ping]
    asked_at = registry.now
    registry.wait(5.0)  # a silent agent is lost by its lease alone
    assert registry.port.take() == []
    registry.registrar.pong(conn, asked_at, registry.now)
    assert [frame.reason for frame in registry.said()[stranger] if isinstance(frame, frames.Refused)] == ["session"]
    assert ("hang_up", conn) not in registry.last


@pytest.mark.parametrize("late", [False, True], ids=["member", "latecomer"])
def test_an_agent_that_never_heard_its_token_waits_for_the_end_of_its_old_connection(late: bool) -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    name = "D" if late else "B"
    conn = registry.join("D") if late else conns["B"]
    again = registry.join(name)
    registry.port.take()
    registry.registrar.lost(conn, registry.now, "it has not answered for too long")
    assert registry.kinds(again) == [frames.Joined, frames.Confirm]


def test_challenger_is_refused_when_the_holder_of_the_seat_moves() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    stranger = registry.join("B")
    again = registry.join("B", token=registry.registrar.seats[member("B")].token)
    said = registry.said()
    assert [type(frame) for frame in said[stranger]] == [frames.Refused]
    assert registry.registrar.seats[member("B")].conn == again
    assert registry.registrar.seats.at(stranger) is None


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
    conns = registry.go("B", "C")
    leases, registry.now = registry.quorum.leases, 1.0
    leases.answered(member("B"), 1.0)
    leases.answered(member("C"), answered_at)
    conn = registry.join("E", who=frames.ProcessInfo(hostname=hostname, pid=1))
    assert refusal(registry, conn).reason == reason
    registry.registrar.lost(conns["B"], 2.0)
    assert registry.kinds(registry.join("E")) == [frames.Joined, frames.Confirm]


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
    registry.confirm(late, "D")
    registry.said()
    registry.acknowledge(late)
    assert registry.kinds(late) == [frames.Go]


def test_a_latecomer_that_never_comes_to_the_end_gives_its_place_free() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    late = registry.join("D")
    assert registry.registrar.seats.is_full
    registry.said()
    registry.wait(ADMITTED_SECONDS + 0.1)
    registry.said()
    assert ("hang_up", late) in registry.last
    assert not registry.registrar.seats.is_full


# --- node ranks given by hand -----------------------------------------------------------------------------------------

CLAIM = order_key(1, "", "")


def refusals(registry: Registry, conn: int) -> list[frames.AnyFrame]:
    return [frame for frame in registry.said().get(conn, []) if isinstance(frame, frames.Refused)]


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("node", ["C", "B"])
def test_a_node_rank_that_a_living_member_has_is_refused_by_its_name(node: str, answers: bool) -> None:
    registry = Registry(3, 4)
    holder = registry.join("B", order=CLAIM)
    registry.said()
    newcomer = registry.join("C", node=node, order=CLAIM)
    assert registry.said() == {holder: [frames.Ping()]}
    if answers:
        registry.registrar.pong(holder, registry.now, registry.now)
        (refused,) = refusals(registry, newcomer)
        assert isinstance(refused, frames.Refused)
        assert (refused.reason, refused.detail) == ("node rank taken", "node rank 1 is held by another live node")
        assert str(refused.who) == "host node-B (10.0.0.2), pid 66"
        assert member("C") not in registry.registrar.seats
    else:
        registry.wait(CHALLENGE_SECONDS)
        assert member("B") not in registry.registrar.seats
        assert member("C") in registry.registrar.seats


def test_the_node_rank_of_the_host_is_refused_at_once() -> None:
    registry = Registry(3, 4)
    registry.registrar.seats[member("A")].applicant = registry.wish("A", order=CLAIM)
    (refused,) = refusals(registry, registry.join("B", order=CLAIM))
    assert isinstance(refused, frames.Refused)
    assert str(refused.who) == "host node-A (10.0.0.1), pid 65"


def test_in_a_running_session_only_the_end_of_its_lease_takes_a_node_rank_from_a_silent_member() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    registry.registrar.seats[member("B")].applicant = registry.wish("B", order=CLAIM)
    newcomer = registry.join("D", order=CLAIM)
    registry.wait(LEASE_SECONDS - 0.1)
    assert member("D") not in registry.registrar.seats
    registry.registrar.lost(1, registry.now, "it has not answered for too long")
    assert member("D") in registry.registrar.seats
    assert not refusals(registry, newcomer)


def test_two_latecomers_with_one_node_rank_do_not_both_get_a_seat() -> None:
    registry = Registry(2, 5)
    registry.go("B", "C")
    first = registry.join("D", order=CLAIM)
    second = registry.join("E", order=CLAIM)
    registry.registrar.pong(first, registry.now, registry.now)
    assert refusals(registry, second)
    assert [seat.member for seat in registry.registrar.seats.latecomers()] == [member("D")]


def test_node_ranks_of_a_launcher_can_be_equal() -> None:
    registry = Registry(3, 4)
    for letter in "BC":
        registry.join(letter, order=CLAIM + order_key(None, f"node-{letter}", "10.0.0.1"))
    assert len(registry.registrar.seats) == 3
