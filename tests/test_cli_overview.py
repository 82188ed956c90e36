"""The records of jobs, and their rows."""

from __future__ import annotations

from mingle.cli import overview
from mingle.observe.sighting import Seeking
from mingle.wire.datagrams import Seek
from tests.bystanders import Wire, a_finder, an_announcement


def a_seeker(job: str, rank: int | None, size: int = 4) -> Seeking:
    seek = Seek(job=job, member=bytes([rank or 9]) * 16, world_size=size, rank=rank, hostname="node", pid=5)
    return Seeking(seek, "10.0.0.5", signed=False)


def test_a_job_that_only_seekers_speak_of() -> None:
    (record,) = overview.records([], [a_seeker("resnet", 1), a_seeker("resnet", None)])
    assert (record["job"], record["state"], record["world_size"], record["host"]) == ("resnet", "seeking", 4, None)
    assert [each["rank"] for each in record["seeking"]] == [1, None]
    row = overview.row(record)
    assert len(row) == len(overview.COLUMNS)
    assert row[:5] == ("resnet", "seeking", "-", "-", "0/4")
    assert row[6] == "rank 1 on node pid 5; a process on node pid 5"
    (record,) = overview.records([], [a_seeker("resnet", 1), a_seeker("resnet", 2, size=8)])
    assert record["world_size"] is None


def test_a_session_that_is_proved() -> None:
    wire = Wire()
    finder = a_finder(wire, None)
    wire.add("10.0.0.9", finder)
    wire.add("10.0.0.1", an_announcement(wire, "resnet", "10.0.0.1"), 5000)
    wire.run(2)
    (record,) = overview.records(finder.sessions, [])
    assert record["proved"]
    assert overview.row(record)[:4] == ("resnet", "announced", "announcer pid 1", "10.0.0.1:29500")
    assert overview.record(finder.sessions[0])["session"] == record["session"]
