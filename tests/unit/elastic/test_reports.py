"""What agents are told when it did not work: how many nodes were there, and which.

The likely causes are rows of `tests/support/causes.py`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from mingle.elastic import reports
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes, Policy
from mingle.errors import DiscoveryTimeoutError, MingleError
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.explain.observations import Diagnostics, NetworkFacts, Situation
from mingle.protocol.machine import Identity
from mingle.wire.frames import ProcessInfo, Refused, Status

POLICY = Policy(nodes=Nodes(minimum=2, maximum=4), last_call=30.0)
IDENTITY = Identity(
    job="resnet",
    attempt="",
    member=b"A" * 16,
    rank=None,
    world_size=4,
    node="A",
    who=ProcessInfo(hostname="one", pid=1),
)
ALONE = Status(joined=1, world_size=4, lacks="1 more node: 2 to 4 are wanted")
TWO = ProcessInfo(hostname="two", pid=2, address="10.0.0.2")


def incomplete(status: Status, memory: Memory | None = None, **heard: object) -> MingleError:
    """The error of an agent whose time is up."""
    situation = Situation(
        diagnostics=Diagnostics(**heard),  # type: ignore[arg-type]
        job=IDENTITY.job,
        status=status,
        connected=True,
        seconds=30.0,
        agents=(memory or Memory(POLICY)).told(IDENTITY.who),
    )
    facts = NetworkFacts(
        interfaces=["eth0 10.0.0.1/24"],
        groups=["239.192.7.7"],
        port=29499,
        sent=12,
        received=5,
        rejected=Counter({"unsigned": 2}),
    )
    return timeout(situation, facts)


def test_too_few_nodes_are_counted_and_named_with_the_traffic() -> None:
    error = incomplete(ALONE, other_jobs={"bert": "host two (10.0.0.2), pid 7"})
    assert isinstance(error, DiscoveryTimeoutError)
    for part in (
        "within 30 s: 1 of 2 to 4 nodes were there (host one, pid 1), and it lacks 1 more node",
        "--nnodes=2:4 begins with 3 nodes (with 2 if --rdzv-conf allow_minority=1 is given)",
        "other job ids heard on this network: 'bert' by host two (10.0.0.2), pid 7",
        "interfaces: eth0 10.0.0.1/24; groups 239.192.7.7 and UDP port 29499",
        "datagrams: 12 sent, 5 heard, 2 rejected (2 unsigned)",
    ):
        assert part in error.observation
    assert "no process was heard" not in error.observation
    assert "no process was heard" in incomplete(ALONE).observation
    sealed = Status(joined=3, world_size=4, phase="sealed")
    assert "(host one, pid 1), sealed." in incomplete(sealed).observation, "it lacks nothing any more"


def test_a_size_is_told_as_it_was_typed() -> None:
    fixed = Memory(Policy(nodes=Nodes(minimum=2, maximum=2), last_call=30.0))
    said = incomplete(Status(joined=1, world_size=2, lacks="1 more node: it takes 2 to begin"), fixed).observation
    assert "1 of 2 nodes were there" in said
    assert "--nnodes=" not in said


def test_silence_does_not_contradict_the_nodes_that_joined() -> None:
    """Also the last agent: the others have given up before it."""
    memory = Memory(POLICY)
    memory.note_status(Status(joined=2, world_size=4, present=("one", "two")))
    for status in (Status(joined=2, world_size=4, lacks="1 more node"), ALONE):
        said = incomplete(status, memory).observation
        assert "no process was heard, besides those that joined" in said
        assert "of this job or of another" not in said


def test_a_part_without_the_quorum_names_those_that_it_misses() -> None:
    memory = Memory(POLICY, had_quorum=True, companions=(TWO, ProcessInfo(hostname="three", pid=3)))
    status = Status(joined=2, world_size=4, present=(str(TWO),), left=("C: gone",), refused=("D: kind",))
    error = incomplete(status, memory)
    for part in ("missed since the last session: host three, pid 3", "came and went: C: gone", "refused: D: kind"):
        assert part in error.observation
    assert "no process was heard" not in error.observation
    assert "ended or are cut off" in str(error.cause)
    assert "allow_minority=1" in str(error.remedy)


def test_last_agent_names_the_agents_that_gave_up_before() -> None:
    memory = Memory(POLICY)
    for status in (
        Status(joined=1, world_size=4),
        Status(joined=3, world_size=4, present=("one", "two", "three")),
        Status(joined=2, world_size=4),
    ):
        memory.note_status(status)
    said = incomplete(Status(joined=1, world_size=4), memory).observation
    assert "3 of 2 to 4 nodes were there (one; two; three), 1 at the end" in said


@pytest.mark.parametrize("left", [(), ("host two: its connection closed",)])
def test_joined_agent_is_not_reported_as_filtered(left: tuple[str, ...]) -> None:
    present = Status(joined=1 if left else 2, world_size=4, lacks="1 more", left=left)
    seekers = {b"B" * 16: f"a process without a rank on {TWO}"}
    assert "firewall" not in str(incomplete(present, seekers=seekers).cause)
    assert "firewall" in str(incomplete(ALONE, seekers=seekers).cause)


@pytest.mark.parametrize(
    ("minimum", "follows"), [(3, "and the job waits for it"), (2, "and the job goes on without it if enough nodes are")]
)
def test_a_node_without_a_place_is_told_what_its_job_does(minimum: int, follows: str) -> None:
    refusal = Refused(reason="mesh", detail="host one and host two …", cause="a firewall", remedy="allow TCP.")
    assert follows in reports.left_out(IDENTITY, Nodes(minimum=minimum, maximum=3), refusal)


@pytest.mark.parametrize(("nodes", "safe"), [((2, 4), "--nnodes=3:4"), ((1, 2), "--nnodes=2")])
def test_a_small_start_is_a_warning_that_says_what_would_prevent_it_unless_it_is_wanted(
    nodes: tuple[int, int], safe: str
) -> None:
    policy = Policy(nodes=Nodes(minimum=nodes[0], maximum=nodes[1]), last_call=1.0)
    assert f"{safe} would prevent it" in reports.small(IDENTITY, policy, nodes[0])
    lenient = Policy(nodes=policy.nodes, last_call=1.0, allow_minority=True)
    assert "prevent" not in reports.small(IDENTITY, lenient, nodes[0])
