"""What agents are told when it did not work: how many nodes were there, which, and what to do."""

from __future__ import annotations

from mingle.agents import reports as agent_reports
from mingle.agents.quorum import Nodes
from mingle.agents.reports import Attendance
from mingle.errors import DiscoveryTimeoutError
from mingle.rules.machine import Identity
from mingle.wire.frames import Status, Who
from tests.views import member, view

NODES = Nodes(minimum=2, maximum=4)
IDENTITY = Identity(
    job="resnet", attempt="", member=member("A"), rank=None, world_size=4, node="A", who=Who(hostname="one", pid=1)
)


def test_too_few_nodes() -> None:
    status = Status(joined=1, world_size=4, present=("host one, pid 1",), lacks="1 more node(s): 2 to 4 are wanted")
    error = agent_reports.incomplete(IDENTITY, NODES, status, 30.0, Attendance())
    assert isinstance(error, DiscoveryTimeoutError)
    assert "within 30 s: 1 of 2 to 4 nodes were there (host one, pid 1)" in error.observation
    assert "lacks 1 more node(s)" in error.observation
    assert error.remedy is not None
    assert "mingle-discover list" in error.remedy


def test_a_part_without_the_majority() -> None:
    status = Status(joined=2, world_size=4, lacks="a majority of …", left=("C: gone",), refused=("D: kind",))
    error = agent_reports.incomplete(IDENTITY, NODES, status, 30.0, Attendance())
    assert error.cause is not None
    assert "the network is in parts" in error.cause
    assert "allow_minority=1" in str(error.remedy)
    assert "came and went: C: gone" in error.observation
    assert "refused: D: kind" in error.observation


def test_whoever_is_last_names_those_that_gave_up_before() -> None:
    attendance = Attendance()
    attendance.note(Status(joined=1, world_size=4))
    attendance.note(Status(joined=3, world_size=4, present=("one", "two", "three")))
    attendance.note(Status(joined=2, world_size=4))
    error = agent_reports.incomplete(IDENTITY, NODES, Status(joined=1, world_size=4), 30.0, attendance)
    assert "3 of 2 to 4 nodes were there (one; two; three), 1 at the end" in error.observation


def test_a_gathering_that_lacks_nothing_any_more() -> None:
    status = Status(joined=3, world_size=4, phase="sealed")
    assert agent_reports.incomplete(IDENTITY, NODES, status, 1.0, Attendance()).observation.endswith("sealed.")


def test_notices_name_the_job_and_what_follows() -> None:
    texts = [
        agent_reports.small(IDENTITY, NODES, 2),
        agent_reports.unsure(IDENTITY, 1),
        agent_reports.minority(IDENTITY, view("HABC"), 1),
        agent_reports.superseded(IDENTITY, "two"),
    ]
    assert all(text.startswith("job 'resnet'") for text in texts)
    assert "2 of 4 nodes" in texts[0]
    assert "only 1 of 4 nodes are reached" in texts[2]
    assert "on host two" in texts[3]


def test_a_job_that_has_ended() -> None:
    error = agent_reports.ended(IDENTITY, "its workers failed")
    assert error.observation == "job 'resnet' has ended: its workers failed."
