"""What agents are told when it did not work: how many nodes were there, which, and what to do."""

from __future__ import annotations

from collections import Counter

import pytest

from mingle.diagnostics import CheckStatus, Finding
from mingle.elastic import reports as agent_reports
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
FACTS = NetworkFacts(
    interfaces=["eth0 10.0.0.1/24"],
    groups=["239.192.7.7"],
    port=29499,
    sent=12,
    received=5,
    rejected=Counter({"unsigned": 2}),
)
BLOCKED = Finding("multicast", CheckStatus.FAIL, "this host's firewall drops it", "nft insert rule x")
DOUBTFUL = Finding("interfaces", CheckStatus.WARN, "eth1 is up, too", "name it", explains_silence=True)
ALONE = Status(joined=1, world_size=4, lacks="1 more node: 2 to 4 are wanted")


def incomplete(
    status: Status,
    *,
    seconds: float = 30.0,
    diagnostics: Diagnostics | None = None,
    facts: NetworkFacts = FACTS,
    memory: Memory | None = None,
) -> MingleError:
    agents = (memory or Memory(POLICY)).told(IDENTITY.who)
    heard = diagnostics or Diagnostics()
    situation = Situation(
        diagnostics=heard, job=IDENTITY.job, status=status, connected=True, seconds=seconds, agents=agents
    )
    return timeout(situation, facts)


def test_too_few_nodes() -> None:
    status = Status(joined=1, world_size=4, present=("host one, pid 1",), lacks="1 more node: 2 to 4 are wanted")
    error = incomplete(status)
    assert isinstance(error, DiscoveryTimeoutError)
    assert "within 30 s: 1 of 2 to 4 nodes were there (host one, pid 1)" in error.observation
    assert "lacks 1 more node" in error.observation
    assert "--nnodes=2:4 begins with 3 nodes (with 2 if --rdzv-conf allow_minority=1 is given)" in error.observation
    assert error.remedy is not None
    assert "MINGLE_PEERS=<all nodes>" in error.remedy, "no process was heard: most clouds carry no multicast"


def test_a_size_is_told_as_it_was_typed() -> None:
    fixed = Memory(Policy(nodes=Nodes(minimum=2, maximum=2), last_call=30.0))
    status = Status(joined=1, world_size=2, lacks="1 more node: it takes 2 to begin")
    text = str(incomplete(status, memory=fixed))
    assert "1 of 2 nodes were there" in text
    assert "--nnodes=" not in text
    pair = Policy(nodes=Nodes(minimum=1, maximum=2), last_call=30.0)
    assert "--nnodes=2 would prevent it" in agent_reports.small(IDENTITY, pair, 1)


@pytest.mark.parametrize(
    ("minimum", "follows"), [(3, "and the job waits for it"), (2, "and the job goes on without it if enough nodes are")]
)
def test_a_node_without_a_place_is_told_what_its_job_does(minimum: int, follows: str) -> None:
    refusal = Refused(reason="mesh", detail="host one and host two …", cause="a firewall", remedy="allow TCP.")
    assert follows in agent_reports.left_out(IDENTITY, Nodes(minimum=minimum, maximum=3), refusal)


def test_silence_does_not_contradict_the_nodes_that_joined() -> None:
    """Also the last agent: the others have given up before it."""
    memory = Memory(POLICY)
    memory.note_status(Status(joined=2, world_size=4, present=("one", "two")))
    for status in (Status(joined=2, world_size=4, lacks="1 more node"), Status(joined=1, world_size=4)):
        text = incomplete(status, memory=memory).observation
        assert "no process was heard, besides those that joined" in text
        assert "of this job or of another" not in text


def test_a_part_without_the_quorum() -> None:
    who = ProcessInfo(hostname="two", pid=2, address="10.0.0.2")
    memory = Memory(POLICY, had_quorum=True, companions=(who, ProcessInfo(hostname="three", pid=3)))
    status = Status(joined=2, world_size=4, present=(str(who),), left=("C: gone",), refused=("D: kind",))
    error = incomplete(status, memory=memory)
    assert "ended or are cut off" in str(error.cause)
    assert "allow_minority=1" in str(error.remedy)
    assert "missed since the last session: host three, pid 3" in error.observation
    assert "came and went: C: gone" in error.observation
    assert "refused: D: kind" in error.observation


def test_last_agent_names_the_agents_that_gave_up_before() -> None:
    memory = Memory(POLICY)
    memory.note_status(Status(joined=1, world_size=4))
    memory.note_status(Status(joined=3, world_size=4, present=("one", "two", "three")))
    memory.note_status(Status(joined=2, world_size=4))
    error = incomplete(Status(joined=1, world_size=4), memory=memory)
    assert "3 of 2 to 4 nodes were there (one; two; three), 1 at the end" in error.observation


def test_a_gathering_that_lacks_nothing_any_more() -> None:
    status = Status(joined=3, world_size=4, phase="sealed")
    assert "(host one, pid 1), sealed." in incomplete(status, seconds=1.0).observation


def test_report_names_other_jobs_and_the_traffic() -> None:
    diagnostics = Diagnostics()
    diagnostics.other_jobs["resent"] = "host two (10.0.0.2), pid 7"
    error = incomplete(ALONE, diagnostics=diagnostics)
    for part in (
        "other job ids heard on this network: 'resent' by host two (10.0.0.2), pid 7",
        "interfaces: eth0 10.0.0.1/24; groups 239.192.7.7 and UDP port 29499",
        "datagrams: 12 sent, 5 heard, 2 rejected (2 unsigned)",
    ):
        assert part in error.observation
    assert error.cause == "a mistyped --rdzv-id: 'resent' is on this network"
    other = Diagnostics(other_jobs={"bert": "host two (10.0.0.2), pid 7"})
    assert "'bert'" not in str(incomplete(ALONE, diagnostics=other).cause)
    assert "'bert' by host two" in incomplete(ALONE, diagnostics=other).observation
    assert "no process was heard, of this job or of another" in incomplete(ALONE).observation


def test_the_cause_follows_the_evidence() -> None:
    seekers, secret, typo = Diagnostics(), Diagnostics(), Diagnostics()
    seekers.seekers[b"B" * 16] = "a process without a rank on host two (10.0.0.2), pid 7"
    secret.secret_failures["10.0.0.2: it has another secret"] = None
    typo.other_jobs["resent"] = "host two (10.0.0.2), pid 7"
    maybe = NetworkFacts(findings=[DOUBTFUL])
    assert "firewall" in str(incomplete(ALONE, diagnostics=seekers).cause)
    assert "host two (10.0.0.2), pid 7" in incomplete(ALONE, diagnostics=seekers).observation
    assert "secret" in str(incomplete(ALONE, diagnostics=secret).cause)
    assert "did not prove the secret: 10.0.0.2" in incomplete(ALONE, diagnostics=secret).observation
    assert "incompatible" in str(incomplete(ALONE, facts=NetworkFacts(rejected=Counter({"version 9": 1}))).cause)
    assert incomplete(ALONE, facts=maybe).cause == DOUBTFUL.observation
    assert "'resent'" in str(incomplete(ALONE, facts=maybe, diagnostics=typo).cause)
    refused = Status(joined=1, world_size=4, lacks="1 more", refused=("host two: world size",))
    assert "contradict" in str(incomplete(refused, diagnostics=typo).cause)


@pytest.mark.parametrize("left", [(), ("host two: its connection closed",)])
def test_joined_agent_is_not_reported_as_filtered(left: tuple[str, ...]) -> None:
    diagnostics = Diagnostics()
    diagnostics.seekers[b"B" * 16] = "a process without a rank on host two (10.0.0.2), pid 7"
    present = Status(joined=1 if left else 2, world_size=4, lacks="1 more", left=left)
    assert "firewall" not in str(incomplete(present, diagnostics=diagnostics).cause)


def test_failed_check_of_this_machine_is_the_likely_cause() -> None:
    """The same sentence that `mingle-discover doctor` says."""
    error = incomplete(ALONE, facts=NetworkFacts(findings=[BLOCKED, DOUBTFUL]))
    assert (error.cause, error.remedy) == (BLOCKED.observation, "nft insert rule x.")
    assert "on this machine: eth1 is up, too" in error.observation


def test_notices_name_the_job_and_what_follows() -> None:
    texts = [
        agent_reports.small(IDENTITY, POLICY, 2),
        agent_reports.too_few(IDENTITY, 1, 2),
        agent_reports.comes_second(IDENTITY, "host two"),
    ]
    assert all(text.startswith("job 'resnet'") for text in texts)
    assert "2 of 4 nodes" in texts[0]
    assert "--nnodes=3:4 would prevent it" in texts[0]
    assert "1 node can be reached, and it takes 2" in texts[1]
    assert "on host two" in texts[2]
    lenient = Policy(nodes=POLICY.nodes, last_call=1.0, allow_minority=True)
    assert "prevent" not in agent_reports.small(IDENTITY, lenient, 2)


def test_a_job_that_has_ended() -> None:
    error = agent_reports.ended(IDENTITY, "its workers failed")
    assert error.observation == "job 'resnet' has ended: its workers failed."


def test_a_node_that_was_refused_was_heard() -> None:
    met = Status(joined=1, world_size=4, lacks="1 more node", refused=("host x: world size",))
    assert "no process was heard" not in str(incomplete(met))
