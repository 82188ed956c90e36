"""Who may join a session of agents, and when it is sealed."""

from __future__ import annotations

from typing import Any

import pytest

from mingle.agents.quorum import Nodes, Standing
from mingle.agents.registrar import AgentsRegistrar
from mingle.rules.decisions import Decision, Drop, OpenStore, PrepareStore, Tell
from mingle.rules.seats import HostSeat, Phase
from mingle.wire import frames
from tests.views import application, member, view

HOST_ADDRESS = "10.0.0.1"
LAST_CALL = 30.0


class Registry:
    """A registrar, its host "A", and whoever joins it: connection 1 is the first."""

    def __init__(self, minimum: int = 2, maximum: int = 4, *, allow_minority: bool = False, **standing: Any) -> None:
        self.dead: dict[bytes, float] = {}
        self.standing = Standing(**standing)
        self.nodes = Nodes(minimum=minimum, maximum=maximum)
        self.now = 0.0
        self.registrar = AgentsRegistrar(
            member("Z"),
            HostSeat(member=member("A"), applicant=self.wish("A"), prefix_lengths={HOST_ADDRESS: 24}),
            nodes=self.nodes,
            last_call=LAST_CALL,
            allow_minority=allow_minority,
            standing=self.standing,
            dead=self.dead,
            now=0.0,
        )
        self._conns = 0

    def wish(self, letter: str, **more: Any) -> frames.Join:
        return application(letter, world_size=self.nodes.maximum, minimum=self.nodes.minimum, **more)

    def join(self, letter: str, **more: Any) -> int:
        self._conns += 1
        self.registrar.join(self._conns, member(letter), self.wish(letter, **more), self.now)
        return self._conns

    def wait(self, seconds: float) -> None:
        """Lets the time pass, and the registrar do what it has planned."""
        end = self.now + seconds
        while (due := self.registrar.next_timer()) is not None and due <= end:
            assert due > self.now or self.now == 0.0, "a busy loop"
            self.now = max(self.now, due)
            self.registrar.handle_timer(self.now)
        self.now = end

    def said(self) -> dict[int, list[frames.AnyFrame]]:
        told: dict[int, list[frames.AnyFrame]] = {}
        self.last: list[Decision] = self.registrar.decisions()
        for decision in self.last:
            if isinstance(decision, Tell):
                told.setdefault(decision.conn, []).append(decision.frame)
        return told

    def kinds(self, conn: int) -> list[type]:
        return [type(frame) for frame in self.said().get(conn, [])]

    def confirm(self, conn: int, letter: str, **more: Any) -> None:
        paths = self.wish(letter, **more).paths
        session, epoch = self.registrar.session, self.registrar.epoch
        self.registrar.confirmed(conn, frames.Confirmed(session=session, epoch=epoch, paths=paths), self.now)

    def acknowledge(self, conn: int) -> None:
        self.registrar.acknowledged(conn, self.registrar.epoch, self.now)

    def open_store(self) -> None:
        self.registrar.store_opened(self.registrar.epoch, HOST_ADDRESS, 5000, "token", self.now)

    def go(self, *letters: str) -> dict[str, int]:
        """Lets these join and brings the session to GO."""
        conns = {letter: self.join(letter) for letter in letters}
        for letter, conn in conns.items():
            self.confirm(conn, letter)
        self.open_store()
        for conn in conns.values():
            self.acknowledge(conn)
        assert self.registrar.phase is Phase.RUNNING
        self.registrar.decisions()
        return conns


# --- when to seal ---------------------------------------------------------------------------------------------------


def test_more_than_half_of_the_most_is_enough_at_once() -> None:
    registry = Registry(2, 4)
    registry.join("B")
    assert registry.registrar.phase is Phase.OPEN
    registry.join("C")
    assert registry.registrar.phase is Phase.CONFIRMING
    assert not registry.registrar.small


def test_fewer_wait_for_a_whole_last_call_without_a_newcomer() -> None:
    registry = Registry(2, 5)
    registry.wait(20.0)
    registry.join("B")
    registry.wait(LAST_CALL - 0.1)
    assert registry.registrar.phase is Phase.OPEN
    assert "or 30 s without a newcomer" in registry.registrar.lacks()
    registry.wait(0.1)
    assert registry.registrar.phase is Phase.CONFIRMING
    assert registry.registrar.small


def test_fewer_than_the_least_are_never_enough() -> None:
    registry = Registry(3, 6, allow_minority=True)
    registry.join("B")
    registry.wait(10 * LAST_CALL)
    assert registry.registrar.phase is Phase.OPEN
    assert registry.registrar.lacks() == "1 more node(s): 3 to 6 are wanted"


def test_survivors_are_sealed_as_soon_as_they_are_the_majority() -> None:
    registry = Registry(settled=view("HAB"))
    assert registry.registrar.generation == 1
    registry.join("B", settled=view("HAB"))
    assert registry.registrar.phase is Phase.CONFIRMING
    assert not registry.registrar.unsure


def test_survivors_wait_until_none_of_them_is_bound() -> None:
    registry = Registry(settled=view("HAB"), bound_until=5.0)
    registry.join("B", settled=view("HAB"), bound=8.0)
    registry.wait(7.9)
    assert registry.registrar.phase is Phase.OPEN
    registry.wait(0.2)
    assert registry.registrar.phase is Phase.CONFIRMING


def test_survivors_of_a_dead_host_wait_for_nothing() -> None:
    registry = Registry(settled=view("HAB"), bound_until=8.0)
    registry.join("B", settled=view("HAB"), bound=8.0)
    assert [node.member for node in registry.registrar.missed] == [member("H")]
    registry.dead[member("H")] = 0.0
    registry.registrar.look_again(0.0)
    assert registry.registrar.phase is Phase.CONFIRMING


def test_a_minority_does_not_go_on() -> None:
    registry = Registry(settled=view("HABC"))
    registry.join("B", settled=view("HABC"))
    registry.wait(10 * LAST_CALL)
    assert registry.registrar.phase is Phase.OPEN
    assert "a majority of the nodes that were in the job before (2 of 4)" in registry.registrar.lacks()
    assert "a majority" in registry.registrar.status().lacks
    assert registry.registrar.status().present == tuple(str(who) for who in registry.registrar.whos())


@pytest.mark.parametrize("allowed", [False, True])
def test_a_minority_goes_on_after_a_last_call_if_the_host_is_dead_or_the_user_says_so(allowed: bool) -> None:
    registry = Registry(settled=view("HABC"), allow_minority=allowed)
    registry.join("B", settled=view("HABC"))
    registry.wait(1.0)
    if not allowed:
        registry.dead[member("H")] = 1.0
        registry.dead[member("C")] = 1.0
        registry.registrar.look_again(1.0)
    registry.wait(LAST_CALL - 1.1)
    assert registry.registrar.phase is Phase.OPEN
    registry.wait(0.2)
    assert registry.registrar.phase is Phase.CONFIRMING
    assert registry.registrar.unsure


def test_the_latest_view_that_anybody_knows_is_what_counts() -> None:
    registry = Registry(settled=view("HAB"))
    registry.join("B", settled=view("HABCDE", number=2))
    assert registry.registrar.phase is Phase.OPEN
    registry.join("C", settled=view("HAB"), proposed=view("HABCDE", number=2))
    assert registry.registrar.phase is Phase.OPEN, "three of six, without the host"
    registry.join("D", settled=view("HABCDE", number=2))
    assert registry.registrar.phase is Phase.CONFIRMING


def test_the_view_comes_before_the_seal() -> None:
    registry = Registry(settled=view("HAB"))
    conn = registry.join("B", settled=view("HAB"))
    registry.confirm(conn, "B")
    registry.said()
    assert [type(each) for each in registry.last if not isinstance(each, Tell)] == [PrepareStore, OpenStore]
    registry.open_store()
    members, sealed = registry.said()[conn]
    assert isinstance(members, frames.Members)
    assert isinstance(sealed, frames.Sealed)
    assert not members.settled
    assert (members.view.generation, members.view.number) == (1, 1)
    assert {node.member for node in members.view.nodes} == {member("A"), member("B")}
    assert members.view.nodes[0].address == HOST_ADDRESS
    registry.acknowledge(conn)
    assert registry.kinds(conn) == [frames.Go]


# --- who may join ---------------------------------------------------------------------------------------------------


def refusal(registry: Registry, conn: int) -> frames.Refused:
    frame = registry.said()[conn][-1]
    assert isinstance(frame, frames.Refused)
    assert Drop(conn) in registry.last
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
def test_who_does_not_fit_is_refused(wish: dict[str, Any], reason: str, detail: str, running: bool) -> None:
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
    (sealed,) = registry.said()[late]
    assert isinstance(sealed, frames.Sealed)
    assert (sealed.rank, sealed.store_port) == (3, 5000)
    assert member("D") not in registry.registrar.seats
    registry.acknowledge(late)
    told = registry.said()
    assert [type(frame) for frame in told[late]] == [frames.Go]
    assert not others.keys() & told.keys()
    assert len(registry.registrar.roster()) == 4
    full = registry.join("E")
    assert refusal(registry, full).reason == "full"


def test_who_comes_while_the_session_is_sealed_waits_for_go() -> None:
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
    assert registry.kinds(late) == [frames.Confirm]


def test_who_came_late_is_in_the_next_epoch_when_the_first_is_voided() -> None:
    registry = Registry(2, 4)
    conns = {letter: registry.join(letter) for letter in "BC"}
    registry.join("D")
    registry.registrar.lost(conns["B"], 1.0)
    assert registry.registrar.phase is Phase.CONFIRMING
    assert set(registry.registrar.seats) == {member("A"), member("C"), member("D")}
    assert registry.registrar.latecomers == {}


def test_a_latecomer_that_does_not_reach_the_store_is_refused() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    late = registry.join("D")
    path = frames.Path(host_address="172.17.0.1", local_address="172.17.0.2", interface="docker0")
    registry.confirm(late, "D", paths=(path,))
    assert refusal(registry, late).reason == "network"
    assert registry.registrar.latecomers == {}


def test_after_go_a_lost_member_gives_its_seat_free_and_no_more() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    registry.registrar.lost(conns["B"], 1.0, "its connection closed")
    assert registry.registrar.phase is Phase.RUNNING
    assert registry.said() == {}
    assert registry.registrar.left_on_purpose == set()
    registry.registrar.left(conns["C"], 2.0, "its workers are done")
    assert registry.registrar.left_on_purpose == {member("C")}
    assert set(registry.registrar.seats) == {member("A")}
    late = registry.join("D")
    assert registry.kinds(late) == [frames.Joined, frames.Confirm]
    registry.registrar.lost(late, 3.0)
    assert registry.registrar.latecomers == {}


def test_the_same_agent_on_another_connection_replaces_the_old_one() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    again = registry.join("B")
    assert registry.kinds(again) == [frames.Joined, frames.Confirm]
    assert Drop(conns["B"]) in registry.last
    third = registry.join("B")
    assert registry.kinds(third) == [frames.Joined, frames.Confirm]
    assert Drop(again) in registry.last


# --- newcomers with a past ------------------------------------------------------------------------------------------


def test_who_counts_and_was_in_a_later_session_must_show_that_it_is_over() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    registry.registrar.counted = {member("A"), member("B"), member("C")}
    registry.registrar.lost(conns["B"], 1.0)
    later = view("NB", host="N", generation=1, session="T")
    assert refusal(registry, registry.join("B", proposed=later)).reason == "generation"
    assert [node.member for node in registry.registrar.questioned(registry.now)] == [member("N")]
    registry.dead[member("N")] = registry.now
    back = registry.join("B", proposed=later, bound=5.0)
    assert registry.kinds(back) == [frames.Joined, frames.Confirm]
    registry.confirm(back, "B")
    registry.acknowledge(back)
    assert registry.registrar.generation == 2, "generations only rise"
    assert registry.registrar.questioned(registry.now + 60) == []


def test_who_counts_for_nothing_here_may_come_from_anywhere() -> None:
    registry = Registry(2, 4)
    registry.go("B", "C")
    registry.registrar.counted = {member("A"), member("B"), member("C")}
    late = registry.join("D", settled=view("DEF", host="E", generation=4, session="T"))
    assert registry.kinds(late) == [frames.Joined, frames.Confirm]


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [False, True])
def test_nothing_is_kept_of_who_has_no_seat(running: bool) -> None:
    registry = Registry(2, 3)
    if running:
        registry.go("B", "C")
    strangers = "KLMNOP"
    for letter in strangers:
        registry.registrar.join(100, member(letter), registry.wish(letter, kind="ranks", bound=5.0), registry.now)
    assert not {member(letter) for letter in strangers} & registry.registrar._bound_until.keys()


def test_nothing_is_kept_of_who_has_left() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    assert registry.registrar._bound_until.keys() == {member("B"), member("C")}
    late = registry.join("D", bound=5.0)
    registry.registrar.lost(late, 1.0)
    registry.registrar.lost(conns["B"], 1.0)
    again = registry.join("C", bound=5.0)
    assert registry.registrar._bound_until == {member("C"): registry.now + 5.0}
    registry.registrar.left(again, 2.0, "its workers are done")
    assert registry.registrar._bound_until == {}


def test_of_those_that_were_refused_only_who_counts_is_remembered() -> None:
    registry = Registry(2, 4)
    conns = registry.go("B", "C")
    for letter in "BC":
        later = view(f"N{letter}", host="N", generation=1, session="T")
        registry.registrar.lost(conns[letter], 1.0)
        registry.registrar.counted = {member("A"), member(letter)}
        assert refusal(registry, registry.join(letter, proposed=later)).reason == "generation"
    assert registry.registrar._refused_since.keys() == {member("C")}
