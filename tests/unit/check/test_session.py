"""mingle-check: the schedule of its pairs, whom it blames for what it saw, and what it prints."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import mingle
from mingle.check import command, control, probes, session
from mingle.check.session import Options
from mingle.check.verdicts import KINDS, CheckedRank, Evidence, Other, judge, rounds
from mingle.config.settings import Arguments
from mingle.errors import InterfaceError
from tests.support.bystanders import ROOT, command_environment, free_udp_port

NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize("count", range(1, 12))
def test_every_pair_meets_once_and_no_place_is_in_two_pairs_of_a_round(count: int) -> None:
    schedule = list(rounds(count))
    assert sorted(itertools.chain(*schedule)) == sorted(itertools.combinations(range(count), 2))
    for pairs in schedule:
        places = [place for pair in pairs for place in pair]
        assert len(places) == len(set(places))
    assert len(schedule) == (0 if count == 1 else count - 1 + count % 2)


def healthy(count: int = 4) -> Evidence:
    """Return what a healthy job shows whose links and hosts differ by half from each other."""
    uneven = itertools.cycle((1.0e9, 1.4e9, 0.8e9))
    return Evidence(
        places=[CheckedRank(name, rank, f"10.0.0.{rank + 1}", "eth0", 1500) for rank, name in enumerate(NAMES[:count])],
        place_of={rank: rank for rank in range(count)},
        rates={pair: next(uneven) for pair in itertools.permutations(range(count), 2)},
        others={
            pair: [Other("10.1.0.0/24", ("eth1", "eth1"), 1.2e9, 1e9)]
            for pair in itertools.combinations(range(count), 2)
        },
        work={rank: (0.03 + 0.01 * (rank % 2), 0.02) for rank in range(count)},
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_healthy_job_raises_no_alarm(count: int) -> None:
    assert judge(healthy(count)) == []


def slow(*pairs: tuple[int, int]) -> Callable[[Evidence], None]:
    def make(seen: Evidence) -> None:
        seen.rates.update(dict.fromkeys(pairs, 0.1e9))

    return make


def at(place: int, count: int, direction: str) -> list[tuple[int, int]]:
    """Return the links of a place."""
    others = [other for other in range(count) if other != place]
    into, out = [(other, place) for other in others], [(place, other) for other in others]
    return {"in": into, "out": out, "both": into + out}[direction]


def busy(rank: int, cpu: float) -> Callable[[Evidence], None]:
    def make(seen: Evidence) -> None:
        seen.work[rank] = (0.2, cpu)
        # Its links look slow as well.
        seen.rates.update(dict.fromkeys(at(rank, len(seen.places), "both"), 0.05e9))

    return make


def set_to(name: str, value: object) -> Callable[[Evidence], None]:
    return lambda seen: setattr(seen, name, value)


def faster_network(seen: Evidence) -> None:
    faster = Other("10.1.0.0/24", ("eth1", "eth1"), 9e9, 1e9)
    seen.others.update({pair: [faster] for pair in itertools.combinations(range(len(seen.places)), 2)})


FAULTS: dict[str, tuple[Callable[[Evidence], None], list[tuple[str, tuple[str, ...]]]]] = {
    "machine slow both ways": (slow(*at(2, 4, "both")), [("slow-machine", ("c",))]),
    "machine slow to receive": (slow(*at(0, 4, "in")), [("slow-machine", ("a",))]),
    "machine slow to send": (slow(*at(3, 4, "out")), [("slow-machine", ("d",))]),
    "pair slow both ways": (slow((1, 3), (3, 1)), [("slow-pair", ("b", "d"))]),
    "pair slow one way": (slow((3, 1)), [("slow-direction", ("d", "b"))]),
    "pair filtered": (set_to("broken", {(1, 2): "no TCP connection"}), [("pair", ("b", "c"))]),
    "machine filtered": (set_to("broken", {(0, 2): "no", (1, 2): "no", (2, 3): "no"}), [("machine", ("c",))]),
    "large lost": (set_to("broken", {(0, 3): "large"}), [("mtu", ("a", "d"))]),
    "torch's messages late": (
        set_to("broken", {(0, 3): "torch's messages fail (not finished at its deadline)"}),
        [("messages", ("a", "d"))],
    ),
    "rank killed": (set_to("lost", {1: "ended"}), [("rank-ended", ("b",))]),
    "rank stopped": (set_to("lost", {0: "silent"}), [("rank-silent", ("a",))]),
    "rank without descriptors": (set_to("lost", {2: "descriptors"}), [("rank-descriptors", ("c",))]),
    "rank interrupted": (set_to("lost", {3: "interrupted"}), [("rank-interrupted", ("d",))]),
    "rank 0 cut off": (set_to("lost", {2: "cut"}), [("pair", ("a", "c"))]),
    "machine busy": (busy(1, 0.02), [("cpu-busy", ("b",))]),
    "clock slow": (busy(1, 0.19), [("cpu-slow", ("b",))]),
    "wrong network": (faster_network, [("interface", ("a", "b", "c", "d"))]),
    "wrong result": (set_to("wrong", ["all_reduce on cpu, rank 1: 3 of 8 numbers differ"]), [("wrong-result", ())]),
    "check's port filtered": (set_to("unreached", {2: "c"}), [("control", ("c",))]),
    "error of the check": (set_to("defect", "KeyError: 'rank'"), [("defect", ())]),
    "collective hangs": (set_to("failed", ["broadcast on cpu: not finished"]), [("collective", ())]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_blamed_on_what_has_it(name: str) -> None:
    make, expected = FAULTS[name]
    seen = healthy()
    make(seen)
    found = judge(seen)
    assert [(verdict.kind, verdict.where) for verdict in found] == expected
    for verdict in found:
        assert all(name in verdict.observation for name in verdict.where)
        assert verdict.cause
        assert verdict.fix


def test_each_kind_of_fault_is_tried_and_is_on_the_page() -> None:
    assert {kind for _, expected in FAULTS.values() for kind, _ in expected} == KINDS
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []


@pytest.mark.parametrize("direction", ["in", "out", "both"])
@pytest.mark.parametrize("place", range(3))
def test_one_slow_machine_of_three_is_named(place: int, direction: str) -> None:
    seen = healthy(3)
    slow(*at(place, 3, direction))(seen)
    assert [(verdict.kind, verdict.where) for verdict in judge(seen)] == [("slow-machine", (NAMES[place],))]


@pytest.mark.parametrize(("slowest", "expected"), [(66, []), (5, [("slow-direction", ("b", "c"))])])
def test_rates_that_load_has_spread_are_no_fault(slowest: float, expected: list[tuple[str, tuple[str, ...]]]) -> None:
    """These were measured on two cores with a load of 24: no link is slow but the one that is."""
    seen = healthy()
    spread = iter((72, 101, 109, 150, 169, 233, 248, 322, 390, 559, 911))
    seen.rates = {pair: 1e6 * next(spread) for pair in itertools.permutations(range(4), 2) if pair != (1, 2)}
    seen.rates[1, 2] = 1e6 * slowest
    assert [(verdict.kind, verdict.where) for verdict in judge(seen)] == expected


def test_of_two_machines_the_slow_direction_is_named() -> None:
    seen = healthy(2)
    slow((1, 0))(seen)
    assert [(verdict.kind, verdict.where) for verdict in judge(seen)] == [("slow-direction", ("b", "a"))]


def test_a_lost_rank_excuses_what_it_breaks() -> None:
    seen = healthy()
    seen.lost = {2: "silent"}
    seen.broken = {(0, 2): "no answer", (1, 2): "no answer"}
    seen.failed = ["broadcast on cpu: not finished at its deadline"]
    assert [verdict.kind for verdict in judge(seen)] == ["rank-silent"]


def test_a_busy_machine_excuses_the_pairs_that_it_breaks() -> None:
    seen = healthy()
    busy(3, 0.02)(seen)
    seen.broken = {(0, 3): "large", (1, 3): "torch's messages fail (not finished at its deadline)"}
    assert [(verdict.kind, verdict.where) for verdict in judge(seen)] == [("cpu-busy", ("d",))]


@pytest.mark.parametrize("how", ["silent", "cut"])
def test_a_busy_machine_excuses_its_silence(how: str) -> None:
    seen = healthy()
    busy(3, 0.02)(seen)
    seen.lost = {3: how}
    assert [(verdict.kind, verdict.where) for verdict in judge(seen)] == [("cpu-busy", ("d",))]
    seen.lost = {3: "ended"}
    assert [(verdict.kind, verdict.where) for verdict in judge(seen)] == [
        ("rank-ended", ("d",)),
        ("cpu-busy", ("d",)),
    ]


def test_the_verdict_shows_interface_address_and_mtu_of_both_ends() -> None:
    seen = healthy()
    seen.broken = {(1, 2): "no TCP connection (timed out)"}
    (verdict,) = judge(seen)
    assert "b (eth0 10.0.0.2, MTU 1500) and c (eth0 10.0.0.3, MTU 1500)" in verdict.observation


@pytest.fixture
def roster() -> Iterator[list[dict[str, Any]]]:
    """Give three ranks on machines of their own, whose servers run in this process."""
    with ExitStack() as servers:
        made = [servers.enter_context(closing(control.Server(rank))) for rank in range(3)]
        yield [
            {"rank": rank, "node": rank, "address": "127.0.0.1", "port": server.port, "token": server.token}
            for rank, server in enumerate(made)
        ]


def test_a_lost_rank_that_another_machine_reaches_is_cut_off(roster: list[dict[str, Any]]) -> None:
    assert control.judge_loss(roster, 1, 0, "silent") == "cut"


def test_a_lost_rank_that_no_other_machine_reaches_is_gone(roster: list[dict[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        roster[0]["port"] = silent.getsockname()[1]
        assert control.judge_loss(roster, 1, 0, "silent") == "silent"
        assert control.judge_loss(roster[:2], 1, 0, "silent") == "silent"
    assert control.judge_loss(roster, 1, 0, "ended") == "ended"
    assert control.judge_loss(roster[:2], 1, 0, "silent") == "cut"


def test_another_process_at_the_address_of_a_rank_is_not_taken_for_it(roster: list[dict[str, Any]]) -> None:
    imposter = {**roster[1], "rank": 0}
    assert control.reaches(roster[1])
    assert not control.reaches(imposter)
    assert not control.reaches({**roster[1], "token": "another"})


def test_a_network_on_which_a_message_stalls_is_slow_and_not_absent() -> None:
    ends = threading.Event()

    def swallow(listening: socket.socket) -> None:
        with Connection(listening.accept()[0].detach()) as connection:
            control.receive(connection)
            control.send(connection, {"rank": 1})
            ends.wait()

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:
        pool.submit(swallow, listening)
        peer = {"rank": 1, "port": listening.getsockname()[1], "token": ""}
        assert probes.path_rate(peer, "127.0.0.1", stall=0.5) == probes.PATH_BYTES / 0.5
        ends.set()
        listening.close()
        assert probes.path_rate(peer, "127.0.0.1") == 0


def test_a_path_that_does_not_answer_shows_before_a_short_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = {"rank": 1, "address": "127.0.0.1", "port": silent.getsockname()[1], "token": ""}
        tried = probes.Probes(None, None, [{}, there])  # type: ignore[arg-type]
        assert tried.path(peer=1, seconds=0.2) == "a small message is not answered (timed out)"


class _Tasks:
    def __init__(self) -> None:
        self.ends = threading.Event()

    def hang(self) -> None:
        self.ends.wait()

    def add(self, *, one: int, other: int) -> int:
        return one + other


def test_a_task_that_hangs_gives_way_to_the_next() -> None:
    here, there = multiprocessing.Pipe()
    tasks, steps = _Tasks(), list[str]()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(control.Worker(there, [], 60).run, tasks, steps.append)
        control.send(here, {"id": 1, "show": "first", "do": "hang", "with": {}})
        control.send(here, {"id": 2, "show": "second", "do": "add", "with": {"one": 1, "other": 2}})
        assert control.receive(here) == {"id": 2, "result": 3}
        control.send(here, {"id": 3, "show": "third", "do": "add", "with": {"one": 1}})
        assert "TypeError" in control.receive(here)["error"]
        control.send(here, {})
        assert control.receive(here) == {}
        control.send(here, {"report": {"healthy": True}})
        assert running.result(30) == {"healthy": True}
        tasks.ends.set()
    assert steps == ["first", "second", "third"]


def test_ctrl_c_that_hits_the_start_of_a_task_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()  # as CPython's Condition does then: a RuntimeError

    here, there = multiprocessing.Pipe()
    control.send(here, {"id": 1, "show": "first", "do": "add", "with": {"one": 1, "other": 2}})
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        control.Worker(there, [], 60).run(_Tasks(), str)
    assert control.receive(here) == {"gone": "interrupted"}


def test_a_rank_knows_how_it_lost_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    for end, how in ((False, "silent"), (True, "ended")):
        here, there = multiprocessing.Pipe()
        if end:
            here.close()
        with pytest.raises(control.LostError) as lost:
            control.Worker(there, [], 0.1).run(_Tasks(), str)
        assert lost.value.how == how


def test_rank_zero_sends_heartbeats_while_others_look_for_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    here, there = multiprocessing.Pipe()
    conductor = session.Conductor(None, None, Options(), str)  # type: ignore[arg-type]
    conductor._lines = {there: 1}

    def look(*_asked: object) -> str:
        for _ in range(3):
            assert here.poll(10)
            assert control.receive(here) == {}
        return "cut"

    monkeypatch.setattr(control, "judge_loss", look)
    conductor._seen.lost = {1: "silent"}
    conductor._judge_losses()
    assert conductor._seen.lost == {1: "cut"}


def waiting_for_one(options: Options) -> tuple[session.Conductor, Connection]:
    """Return rank 0's part with a single rank, and that rank's end of the connection."""
    here, there = multiprocessing.Pipe()
    conductor = session.Conductor(None, None, options, str)  # type: ignore[arg-type]
    conductor._lines = {there: 1}
    return conductor, here


def test_the_time_in_which_rank_zero_did_not_run_makes_no_rank_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    conductor, here = waiting_for_one(Options(seconds=1000))
    clock = itertools.count(0, 10)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    received = conductor._received

    def late(seconds: float) -> Iterator[tuple[int, Any]]:
        if next(clock) > 60:
            control.send(here, {"id": 1, "result": 2})
        return received(0)

    monkeypatch.setattr(conductor, "_received", late)
    assert conductor._ask("step", {1: {"do": "add"}}) == {1: {"id": 1, "result": 2}}


def test_a_rank_that_stopped_before_a_short_deadline_is_silent_and_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    monkeypatch.setattr(control, "SILENCE_SECONDS", 0.2)
    conductor, here = waiting_for_one(Options(seconds=0.1))
    with pytest.raises(session.StopError), here:
        conductor._ask("step", {1: {"do": "add"}})
    assert conductor._seen.lost == {1: "silent"}


def test_ctrl_c_while_other_ranks_are_missing_ends_the_check() -> None:
    here, there = multiprocessing.Pipe()
    server = SimpleNamespace(controls=queue.SimpleQueue(), starved=threading.Event())
    job = SimpleNamespace(world_size=3)
    conductor = session.Conductor(job, server, Options(seconds=60), str)  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    hello = {"rank": 0, "node": 0, "host": "a", "pid": 1, "address": "10.0.0.1", "interface": "eth0", "networks": []}
    server.controls.put((there, {**hello, "reached": "", "options": options}))
    control.send(here, {"gone": "interrupted"})
    conductor.run()
    while "report" not in (message := control.receive(here)):
        pass
    assert message["report"]["lost"] == {"0": "interrupted"}
    assert [verdict["kind"] for verdict in message["report"]["verdicts"]] == ["rank-interrupted"]


def conduct(monkeypatch: pytest.MonkeyPatch, seconds: float, *, fails: str = "") -> tuple[Evidence, list[Any]]:
    """Run the steps of rank 0 for two machines whose link looks slow; return what it saw, and its tasks."""
    told: list[Any] = []

    def ask(name: str, tasks: dict[int, Any]) -> dict[int, Any]:
        told.extend(tasks.values())
        if fails and fails in name:
            return {rank: {"error": "not finished at its deadline"} for rank in tasks}
        return {rank: {"result": result(rank, task["do"])} for rank, task in tasks.items()}

    def result(rank: int, do: str) -> Any:
        pair = {"rtt": 1e-4, "others": [], "rate": 1e9 if rank else 1e6}
        return {"work": [0.02, 0.02], "right": "", "fast": seconds, "pair": pair}.get(do)

    conductor = session.Conductor(None, None, Options(seconds=seconds), str)  # type: ignore[arg-type]
    hello = {"gpus": 0, "local_world_size": 1, "networks": [], "interface": "eth0", "address": "", "pid": 1}
    conductor._roster = [{**hello, "rank": rank, "node": rank, "host": NAMES[rank]} for rank in range(2)]
    conductor._seen = session.evidence_of(conductor._roster)
    monkeypatch.setattr(conductor, "_collect", str)
    monkeypatch.setattr(conductor, "_ask", ask)
    conductor.run()
    return conductor._seen, told


@pytest.mark.parametrize("seconds", [1.0, 5.0, 10.0, 20.0])
def test_timed_measurements_end_before_the_deadline_of_their_step(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    _, told = conduct(monkeypatch, seconds)
    (work,) = {task["with"]["seconds"] for task in told if task["do"] == "work"}
    windows = [task["with"]["window"] for task in told if task["do"] == "pair"]
    assert work <= seconds / 2
    assert len(windows) == 2 * (1 + session.CONFIRMATIONS), "a slow pair is measured again"
    # Both directions, and the last message of each can take as long as all before it.
    assert 4 * max(windows) < seconds


def test_the_pairs_are_tried_also_when_the_first_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, told = conduct(monkeypatch, 20.0, fails="host time")
    assert seen.defect == ""
    assert seen.failed
    assert [task for task in told if task["do"] == "pair"]


def test_the_machines_are_in_the_order_of_their_names() -> None:
    """Ranks are assigned: node10 can have rank 0."""
    hello = {"networks": [], "interface": "eth0", "address": "", "pid": 1}
    hosts = ["node10", "node9", "node9", "node1"]
    roster = [
        {**hello, "rank": rank, "node": max(0, rank - (rank > 1)), "host": host} for rank, host in enumerate(hosts)
    ]
    seen = session.evidence_of(roster)
    assert [(place.name, place.rank) for place in seen.places] == [("node1", 3), ("node9", 1), ("node10", 0)]
    assert seen.place_of == {0: 2, 1: 1, 2: 1, 3: 0}


def test_a_terminal_gets_the_tables_under_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = healthy()
    seen.all_reduce = [{"device": "cpu", "size": 4, "seconds": 1e-4, "algbw": 4e4, "busbw": 6e4}]
    monkeypatch.setattr(command.output, "is_terminal", lambda: True)
    command.show_report(session.report_of(seen, [], 0.0))
    shown = capsys.readouterr().out
    parts = ("bandwidth of all_reduce", "BUSBW MB/s", "links between the machines", "MB/s from", "healthy: ")
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


def test_a_pipe_gets_the_names_and_units_of_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    seen = healthy()
    seen.all_reduce = [{"device": "cpu", "size": 4, "seconds": 1e-4, "algbw": 4e4, "busbw": 6e4}]
    command.show_report(session.report_of(seen, [], 0.0))
    lines = capsys.readouterr().out.splitlines()
    for names, kind in (
        ("COLLECTIVE DEVICE BYTES TIME_us ALGBW_MB/s BUSBW_MB/s", "all_reduce"),
        ("LINK FROM TO RTT_us MB/s", "pair"),
    ):
        above = lines.index(names.replace(" ", "\t").replace("_", " "))
        assert lines[above + 1].split("\t")[0] == kind
        assert len(lines[above + 1].split("\t")) == len(names.split())


def test_a_terminal_gets_a_matrix_in_color() -> None:
    seen = healthy()
    slow((3, 1))(seen)
    seen.broken = {(0, 2): "no TCP connection"}
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard")
    console.print(command.matrix(session.report_of(seen, [], 0.0)))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "\x1b[1;31m100\x1b[0m" in drawn
    assert drawn.count("\x1b[1;31mbroken\x1b[0m") == 2
    assert "\x1b[32m1000\x1b[0m" in drawn


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nnodes", "0"],
        ["--nnodes", "2", "--max-size", "3"],
        ["--nnodes", "2", "--max-size", "900G"],
        ["--nnodes", "2", "--backend", "mpi"],
        ["--nnodes", "1", "--timeout", "0.5"],
        ["--nnodes", "1", "--timeout", "1e13"],
        ["--nnodes", "2", "--job-id", ""],
        ["--nnodes", "1", "--backend", "nccl"],
    ],
)
def test_wrong_usage_is_told_before_the_first_packet(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "gpus", lambda: 0)
    told = CliRunner().invoke(command.check, arguments, prog_name="mingle-check")
    assert told.exit_code == 2
    assert "mingle-discover" not in told.output


def test_an_empty_job_id_of_the_environment_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGLE_JOB_ID", "")
    told = CliRunner().invoke(command.check, ["--nnodes", "1"], prog_name="mingle-check")
    assert told.exit_code == 2
    assert "MINGLE_JOB_ID='' is empty" in told.output


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "mingle-check-ada"),
        ({"USER": "eve", "LOGNAME": "eve"}, "mingle-check-ada"),
        ({"MINGLE_RANK": "0", "MINGLE_WORLD_SIZE": "2"}, "mingle-check-ada"),
        ({"MINGLE_JOB_ID": "mine"}, "mine"),
    ],
)
def test_the_checks_of_two_users_do_not_meet(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str
) -> None:
    given: list[str] = []
    monkeypatch.setattr(command, "run", lambda arguments, *_options, **_more: given.append(arguments.job_id) or 0)
    monkeypatch.setattr("pwd.getpwuid", lambda _number: SimpleNamespace(pw_name="ada"))
    told = CliRunner().invoke(command.check, ["--nnodes", "2"], env={"USER": None, **environ})
    assert told.exit_code == 0
    assert given == [expected]
    assert ("--job-id" in told.stderr) is (not environ or "USER" in environ)


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_111)
    assert command._user() == "4000111"


@pytest.mark.parametrize("timeout", [None, "3"])
def test_the_timeout_is_that_of_a_step_and_not_of_the_discovery(
    monkeypatch: pytest.MonkeyPatch, timeout: str | None
) -> None:
    given: dict[str, Any] = {}

    def run(arguments: Arguments, options: Options, **_more: Any) -> int:
        given.update(limit=arguments.discovery_timeout, seconds=options.seconds)
        return 0

    monkeypatch.setattr(command, "run", run)
    arguments = ["--nnodes", "2", *(["--timeout", timeout] if timeout else [])]
    assert CliRunner().invoke(command.check, arguments).exit_code == 0
    assert given["seconds"] == float(timeout or 20)
    assert given["limit"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_processes_of_this_machine(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    further = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def run(*_given: object, **_more: object) -> int:
        signal.raise_signal(number)
        return 0

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "_start_further", lambda _count: [further])
    before = signal.signal(signal.SIGTERM, command._terminate)
    try:
        told = CliRunner().invoke(command.check, ["--nnodes", "2"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told.exit_code == 128 + number
    assert number.name in told.stderr
    assert told.stdout == ""
    assert further.returncode == -signal.SIGTERM


def test_a_blank_rank_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere: a template sets a variable that it has no value for."""
    given: list[int | None] = []

    def run(arguments: Arguments, *_given: object, **_more: Any) -> int:
        given.append(arguments.world_size)
        return 0

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setenv("RANK", "")
    told = CliRunner().invoke(command.check, ["--nnodes", "2"], prog_name="mingle-check")
    assert told.exit_code == 0, told.stderr
    assert given == [2]


@pytest.mark.parametrize("local", ["", "1"])
def test_an_error_on_a_machine_with_several_processes_is_one_json_object(
    monkeypatch: pytest.MonkeyPatch, local: str
) -> None:
    def run(*_given: object, **_more: object) -> int:
        raise InterfaceError("no interface")

    monkeypatch.setattr(command, "run", run)
    if local:
        monkeypatch.setenv("_MINGLE_CHECK_LOCAL", local)
    told = CliRunner().invoke(command.check, ["--nnodes", "2", "--json"], prog_name="mingle-check")
    assert told.exit_code == 1
    assert told.stderr.splitlines()[-1] == "mingle-check: no interface"
    assert bool(told.stdout) is not bool(local)


def last_lines(steps: list[str]) -> list[str]:
    """Return what a terminal shows of these steps at the end."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with command.steps(console) as show:
        for step in steps:
            show(step)
    assert isinstance(console.file, io.StringIO)
    drawn = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", console.file.getvalue()).replace("\r", "\n")
    return re.findall(r"0:00:00 (.*?)\s*$", drawn, re.MULTILINE)[-2:]


def test_a_terminal_gets_a_line_for_each_step_with_its_time() -> None:
    steps = ["correctness: broadcast on cpu", "bandwidth: all_reduce on cpu: 4 B", "bandwidth: all_reduce on cpu: 16 B"]
    assert last_lines(steps) == ["correctness: broadcast on cpu", "bandwidth: all_reduce on cpu: 16 B"]


def test_a_terminal_keeps_each_warning() -> None:
    warnings = ["warning: the ranks are on 3 machines", "warning: the options differ"]
    assert last_lines(warnings) == warnings


BY_HAND = [sys.executable, "-m", "mingle.check.command", "--nnodes=1", "--nproc-per-node=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["silent", "ended"])
def test_a_store_that_does_not_answer_is_rank_zero_s(monkeypatch: pytest.MonkeyPatch, how: str, rank: int) -> None:
    ends = threading.Event()
    monkeypatch.setattr(session, "_connect_store", lambda _seconds: ends.wait())
    monkeypatch.setattr(control, "SILENCE_SECONDS", 0.1)
    store = socket.create_server(("127.0.0.1", 0))
    job = mingle.Job(
        job_id="j",
        rank=rank,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        node_rank=rank,
        num_nodes=2,
        master_addr="127.0.0.1",
        master_port=store.getsockname()[1],
        interface="eth0",
        address=f"10.0.0.{rank + 1}",
        elapsed=0.0,
    )
    if how == "ended":
        store.close()
    with closing(control.Server(rank)) as server, store:
        report = session.take_part(job, server, Options(seconds=0.1), str)
    ends.set()
    assert report["lost"] == {"0": how}
    (verdict,) = report["verdicts"]
    assert verdict["kind"] == f"rank-{how}"
    assert ("127.0.0.1" if rank else "10.0.0.1") in verdict["observation"]


@pytest.mark.slow
def test_options_that_differ_are_told_and_those_of_rank_zero_count() -> None:
    environment = {**command_environment(free_udp_port()), "PYTHONPATH": str(ROOT / "src"), "MINGLE_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "mingle.check.command", "--json", "--timeout=60", f"--max-size={size}"],
            env={**environment, "MINGLE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, size in enumerate(("64K", "1M"))
    ]
    (answer, steps), _ = [rank.communicate(timeout=110) for rank in ranks]
    assert {rank.returncode for rank in ranks} <= {0, 1}, steps  # on a busy machine a rank has less CPU than another
    assert "warning: rank 0's options count; those of ranks 1 differ" in steps
    assert json.loads(answer)["all_reduce"][-1]["size"] == 1 << 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [BY_HAND, [*TORCHRUN, "-m", "mingle.check.command"], [*TORCHRUN, "--no-python", "mingle-check"]],
    ids=["by hand", "torchrun", "torchrun and the console script"],
)
def test_two_processes_of_one_machine_check_each_other(line: list[str]) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*line, "--max-size=1M", "--json"],
        env={**command_environment(free_udp_port()), "PYTHONPATH": str(ROOT / "src"), "PATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema"] == 1
    assert answer["command"] == "check"
    assert answer["healthy"] is True
    assert [pair["fault"] for pair in answer["pairs"]] == [None, None]
    assert answer["all_reduce"][-1]["size"] == 1 << 20
    # nccl-tests: of two ranks, the bus carries what the algorithm does.
    assert all(each["busbw"] == pytest.approx(each["algbw"]) for each in answer["all_reduce"])
