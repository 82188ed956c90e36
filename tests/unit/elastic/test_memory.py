"""What an agent knows across its sessions."""

from __future__ import annotations

import msgspec
import pytest

from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes, Policy
from mingle.wire.frames import Begin, Closed, Members, Next, ProcessInfo, Refused, Wanted
from tests.support.scripted_host import running

POLICY = Policy(nodes=Nodes(minimum=1, maximum=2), last_call=1.0)
HERE = ProcessInfo(hostname="one", pid=1)


def test_what_was_acknowledged_counts_unless_that_session_is_called_off() -> None:
    memory = Memory(POLICY)
    memory.acknowledge(b"S" * 16, Members(generation=7, quorum=True))
    memory.called_off(b"T" * 16)
    assert (memory.generation, memory.had_quorum) == (7, True)
    memory.called_off(b"S" * 16)
    assert (memory.generation, memory.had_quorum) == (-1, False)


def test_nothing_is_forgotten_in_a_session_that_has_a_lower_number_and_no_quorum() -> None:
    memory = Memory(POLICY, generation=9, had_quorum=True)
    memory.learn(Members(generation=7, quorum=False))
    assert (memory.generation, memory.had_quorum) == (9, True)


@pytest.mark.parametrize(
    ("asks", "members", "lost"),
    [
        (True, Members(generation=7, present=(HERE,)), ["host two, pid 2"]),
        (False, Members(generation=7, present=(HERE,)), []),
        (True, Members(generation=7, present=(HERE,), ending=True), []),
        (True, Members(generation=7, present=tuple(ProcessInfo(hostname="x", pid=n) for n in range(64))), []),
    ],
    ids=["while a round is wanted", "while none is", "at the end of the job", "where not all are listed"],
)
def test_the_agents_that_a_round_has_lost(asks: bool, members: Members, lost: list[str]) -> None:
    memory = Memory(POLICY)
    assert memory.learn(Members(generation=7, present=(HERE, ProcessInfo(hostname="two", pid=2)))) == []
    memory.wait_for_round(Next(generation=-1, number=-1) if asks else None)
    assert memory.learn(members) == lost
    assert memory.learn(members) == []


def test_a_refusal_for_the_same_reason_is_no_news_until_a_session_has_taken_the_agent() -> None:
    memory, (one, two) = Memory(POLICY), (Refused(reason="mesh", detail=text) for text in ("one", "two"))
    assert [memory.refused_for_its_paths(each) for each in (one, one, two)] == [True, False, True]
    memory.formed(hosts=False)
    assert memory.refused_for_its_paths(two)


def test_an_agent_is_in_the_round_that_it_has_asked_for_until_it_asks_again() -> None:
    memory = Memory(POLICY)
    begun = Begin(number=3, rank=0, size=2)
    memory.hear_of_round(begun)
    assert memory.round is None, "it has not asked"
    memory.wait_for_round(Next())
    memory.hear_of_round(Wanted(number=3))
    assert not memory.round_wanted, "it is in no round"
    memory.hear_of_round(begun)
    assert (memory.asked, memory.round, memory.round_wanted) == (None, begun, False)
    memory.hear_of_round(Begin(number=4, rank=1, size=2))
    memory.hear_of_round(Wanted(number=2))
    assert (memory.round, memory.round_wanted) == (begun, False)
    memory.hear_of_round(Wanted(number=3))
    assert memory.round_wanted
    memory.wait_for_round(Next(generation=1, number=3))
    assert (memory.round, memory.round_wanted) == (None, False)


def test_companions_that_are_absent_are_missed() -> None:
    one, two = (
        ProcessInfo(hostname="one", pid=1, address="10.0.0.1"),
        ProcessInfo(hostname="two", pid=2, address="10.0.0.2"),
    )
    memory = Memory(POLICY, companions=(one, two))
    assert memory.missed([ProcessInfo(hostname="one", pid=1, address="192.0.2.9")]) == ["host two (10.0.0.2), pid 2"]
    assert memory.missed([one, ProcessInfo(hostname="two", pid=3)]) == [str(two)], "started again it is another process"


@pytest.mark.parametrize("regather", [False, True])
def test_an_agent_is_surplus_until_the_job_ends_that_runs_now_whatever_is_heard_of_an_earlier_run(
    regather: bool,
) -> None:
    memory, (earlier, contender, now) = Memory(POLICY), (b"1" * 16, b"2" * 16, b"3" * 16)
    full = msgspec.structs.replace(running("running"), surplus=True)
    for session, said in ((earlier, full), (now, full), (contender, running("open"))):
        memory.note_run(session, said)
    memory.note_run(earlier, Closed(session=earlier))
    assert memory.surplus, "two sessions of the job could run"
    memory.note_run(now, Closed(session=now, regather=regather))
    assert memory.surplus == regather
