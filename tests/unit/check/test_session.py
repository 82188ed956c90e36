"""A check on rank 0 and on the others: its steps, which ranks are lost, and what a rank reports without rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mingle
from mingle.check import control, session
from mingle.check.session import Options
from mingle.check.verdicts import TORCH_FAILS, Evidence, judge, rounds
from tests.support.bystanders import command_environment, patched_path
from tests.support.evidence import HELLO, NAMES, PATIENT, healthy
from tests.support.ports import free_tcp_port, free_udp_port


def test_rank_zero_sends_heartbeats_while_others_look_for_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    here, there = multiprocessing.Pipe()
    conductor = session.Conductor(None, None, Options(), str)  # type: ignore[arg-type]
    conductor._lines = {there: 1}

    def look(*_asked: object) -> str:
        for _ in range(3):
            assert here.poll(60)
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


def conduct(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    *,
    fails: str = "",
    backend: str = "auto",
    machines: int = 2,
    rates: Mapping[str, float] | None = None,
    without_gpu: Sequence[int] = (),
) -> tuple[Evidence, list[Any]]:
    """Run the steps of rank 0 for machines whose links look slow, or have the rates of their devices.

    Returns:
        What it saw, and its tasks.
    """
    told: list[Any] = []

    def ask(name: str, tasks: dict[int, Any], _least: float = 0.0) -> dict[int, Any]:
        told.extend(tasks.values())
        if fails and fails in name:
            return {rank: {"error": "not finished at its deadline"} for rank in tasks}
        return {rank: {"result": result(rank, task)} for rank, task in tasks.items()}

    def result(rank: int, task: dict[str, Any]) -> Any:
        at_first = len(told) <= 2 + sum(task["do"] != "pair" for task in told)
        pair = {"rtt": 1e-4 if at_first else 2e-4, "others": [], "rate": 1e9 if rank else 2e6 if at_first else 1e6}
        if rates and task["do"] == "pair":
            pair["rate"] = rates[task["with"]["device"]]
        gpu = (f"GPU-{rank}" if backend == "nccl" and rank not in without_gpu else "", "")
        return {"gpu": gpu, "work": [0.02, 0.02], "right": "", "fast": seconds, "pair": pair}.get(task["do"])

    conductor = session.Conductor(None, None, Options(seconds=seconds, backend=backend), str)  # type: ignore[arg-type]
    hello = {"networks": [], "interface": "eth0", "address": "", "pid": 1}
    conductor._roster = [{**hello, "rank": rank, "node": rank, "host": NAMES[rank]} for rank in range(machines)]
    conductor._seen = session.evidence_of(conductor._roster)
    monkeypatch.setattr(conductor, "_collect", str)
    monkeypatch.setattr(conductor, "_ask", ask)
    conductor.run()
    return conductor._seen, told


@pytest.mark.parametrize("seconds", [1.0, 5.0, 10.0, 20.0])
def test_timed_measurements_end_before_the_deadline_of_their_step(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    seen, told = conduct(monkeypatch, seconds)
    assert [each["size"] for each in seen.all_reduce] == [4], "a larger size would take too long"
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


@pytest.mark.parametrize(
    ("fails", "first", "later"),
    [("", "cuda", "cuda"), ("correctness", "cpu", "cpu"), ("NCCL: round 1", "cuda", "cpu")],
)
def test_gloo_shows_the_links_once_nccl_has_failed(
    monkeypatch: pytest.MonkeyPatch, fails: str, first: str, later: str
) -> None:
    """A kernel of NCCL that waits for ever blocks all later ones of its GPU, also those of other pairs."""
    seen, told = conduct(monkeypatch, 20.0, fails=fails, backend="nccl", machines=3)
    assert seen.defect == ""
    devices = [task["with"]["device"] for task in told if task["do"] == "pair"]
    assert devices[:2] == [first] * 2
    assert set(devices[2:]) == {later}


def test_rates_of_nccl_and_gloo_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the rounds before the one in which NCCL has failed are measured again; a broken pair is not."""
    rates = {"cuda": 20e9, "cpu": 1e9}
    seen, _ = conduct(monkeypatch, 20.0, fails="NCCL: round 2", backend="nccl", machines=4, rates=rates)
    assert [verdict.kind for verdict in judge(seen)] == ["messages"]
    assert set(seen.rates.values()) == {1e9}
    assert len(seen.rates) == 2 * 6 - 2 * len(seen.broken)


@pytest.mark.parametrize("finds", [0, 1])
@pytest.mark.parametrize("error", ["DistStoreError: timed out", "not finished at its deadline"])
def test_what_one_end_finds_on_the_path_counts_before_what_torch_says_at_the_other(
    monkeypatch: pytest.MonkeyPatch, finds: int, error: str
) -> None:
    conductor = session.Conductor(None, None, Options(), str)  # type: ignore[arg-type]
    conductor._seen = healthy(2)
    conductor._seen.backend = "gloo"
    answers = {finds: {"result": {"fault": "no TCP connection (timed out)"}}, 1 - finds: {"error": error}}
    monkeypatch.setattr(conductor, "_ask", lambda *_: answers)
    conductor._round("links: round 1 of 1", [(0, 1)])
    assert conductor._seen.broken == {(0, 1): "no TCP connection (timed out)"}


def test_an_error_counts_before_those_that_are_only_late() -> None:
    answers = {0: {"error": session._LATE}, 1: {"result": 1}, 2: {"error": "NCCL error"}}
    assert session._first_error(answers) == "NCCL error"
    assert session._first_error({0: answers[0], 1: answers[1]}) == session._LATE
    assert session._first_error({1: answers[1]}) == ""


def test_of_several_measurements_of_a_pair_the_best_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = conduct(monkeypatch, 20.0)
    assert seen.rates == {(0, 1): 2e6, (1, 0): 1e9}
    assert seen.trips == {(0, 1): 1e-4}


def test_the_bus_of_two_ranks_carries_what_the_algorithm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in nccl-tests."""
    seen, _ = conduct(monkeypatch, 20.0)
    assert [each["busbw"] for each in seen.all_reduce] == [each["algbw"] for each in seen.all_reduce]


def gpus(*ids: str, nodes: Sequence[int], missing: str = "", host: str = "") -> list[dict[str, Any]]:
    """Return the roster of ranks that would use these GPUs; the last one has none for this reason."""
    reasons = [*[""] * (len(ids) - 1), missing]
    return [
        {"rank": rank, "node": node, "host": host or NAMES[node], "gpu": uuid, "gpu_missing": reason}
        for rank, (uuid, node, reason) in enumerate(zip(ids, nodes, reasons, strict=True))
    ]


@pytest.mark.parametrize(
    ("roster", "backend", "note"),
    [
        (gpus("", "", nodes=[0, 1]), "gloo", ""),
        (gpus("GPU-1", "", nodes=[0, 1]), "gloo", "rank 1 on b sees no GPU"),
        (gpus("GPU-1", "", nodes=[0, 1], missing="sees a GPU that fails"), "gloo", "rank 1 on b sees a GPU that fails"),
        (gpus("", "", nodes=[0, 1], missing="sees a GPU that fails"), "gloo", "rank 1 on b sees a GPU that fails"),
        # NCCL refuses it: "Duplicate GPU detected"
        (gpus("GPU-1", "GPU-2", "GPU-2", nodes=[0, 1, 1]), "gloo", "ranks 1 and 2 on b would use the same GPU"),
        (gpus("GPU-1", "GPU-1", nodes=[0, 1], host="a"), "gloo", "ranks 0 and 1 on a would use the same GPU"),
        (gpus("GPU-1", "GPU-1", nodes=[0, 1]), "cpu:gloo,cuda:nccl", ""),
        # also where a launcher shows each rank its own GPU alone
        (gpus("GPU-1", "GPU-2", nodes=[0, 0]), "cpu:gloo,cuda:nccl", ""),
    ],
)
def test_nccl_is_chosen_where_every_rank_has_a_gpu_of_its_own(
    roster: list[dict[str, Any]], backend: str, note: str
) -> None:
    assert session.choose_backend(roster) == (backend, note)


def test_each_rank_is_asked_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver can load for longer than a step may last, or never answer."""
    conductor = session.Conductor(None, None, Options(seconds=1.0), str)  # type: ignore[arg-type]
    conductor._roster = [{"rank": rank} for rank in range(4)]
    asked: list[float] = []

    def ask(_name: str, tasks: dict[int, Any], least: float) -> dict[int, Any]:
        asked.append(least)
        answers = [{"result": ["GPU-1", ""]}, {"result": ["", "sees a GPU that fails"]}]
        answers += [{"error": "not finished at its deadline"}, {"error": "OSError: no"}]
        return dict(zip(tasks, answers, strict=True))

    monkeypatch.setattr(conductor, "_ask", ask)
    conductor._look_for_gpus()
    assert asked == [session.GPU_SECONDS]
    assert [(hello["gpu"], hello["gpu_missing"]) for hello in conductor._roster] == [
        ("GPU-1", ""),
        ("", "sees a GPU that fails"),
        ("", "has a GPU whose driver has not answered in 60 s"),
        ("", "OSError: no"),
    ]


def test_nccl_that_a_rank_has_no_gpu_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was told to use it, and the other was not."""
    seen, told = conduct(monkeypatch, 20.0, backend="nccl", without_gpu=[1])
    assert {task["do"] for task in told} == {"gpu"}
    (verdict,) = judge(seen)
    assert verdict.observation == "rank 1 on b sees no GPU, and `--backend nccl` needs a GPU for each rank."


def test_a_rank_that_ends_while_it_looks_for_its_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    conductor = session.Conductor(None, None, Options(), str)  # type: ignore[arg-type]
    conductor._roster = [hello | {"pid": 1} for hello in gpus("", "", nodes=[0, 1])]
    conductor._seen = seen = healthy(2)

    def ask(*_asked: object) -> None:
        seen.lost[1] = "ended"
        raise session.StopError

    monkeypatch.setattr(conductor, "_collect", str)
    monkeypatch.setattr(conductor, "_ask", ask)
    conductor.run()
    assert [verdict.kind for verdict in judge(seen)] == ["rank-ended"]


def test_a_step_can_have_more_time_than_the_user_gives_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    conductor, here = waiting_for_one(Options(seconds=0.01))
    received = conductor._received

    def late(seconds: float) -> Iterator[tuple[int, Any]]:
        while here.poll(0):
            if "do" in control.receive(here):
                began.append(time.monotonic())
        control.send(here, {"id": 1, "result": 2} if time.monotonic() > began[0] + 0.2 else {})
        return received(seconds)

    began: list[float] = []
    monkeypatch.setattr(conductor, "_received", late)
    assert conductor._ask("step", {1: {"do": "add"}}, 60.0) == {1: {"id": 1, "result": 2}}


def test_a_slow_pair_that_can_not_be_confirmed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has failed before the pair had its turn, and Gloo's rate says nothing of NCCL's."""
    conductor = session.Conductor(None, None, Options(), str)  # type: ignore[arg-type]
    conductor._seen = seen = healthy(6)
    seen.backend = "nccl"
    schedule = list(rounds(6))
    first, later = schedule[0][0], next(pair for pair in schedule[1] if not {*pair} & {*schedule[0][0]})
    seen.rates.update(dict.fromkeys([first, later], 0.1e9))

    def fail(_name: str, pairs: Sequence[tuple[int, int]], _attempt: int) -> None:
        seen.broken.update(dict.fromkeys(pairs, f"{TORCH_FAILS} (NCCL error)"))

    monkeypatch.setattr(conductor, "_rounds", lambda _schedule: True)
    monkeypatch.setattr(conductor, "_round", fail)
    conductor._pairs()
    assert list(seen.broken) == [first]
    (verdict,) = judge(seen)
    assert verdict.kind == "messages"
    assert verdict.observation.endswith("failed. NCCL was not tried on pairs after that.")


def test_ranks_of_one_gpu_are_told_before_nccl_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = multiprocessing.Pipe()
    server = SimpleNamespace(controls=queue.SimpleQueue(), starved=threading.Event())
    job = SimpleNamespace(world_size=2)
    conductor = session.Conductor(job, server, Options(backend="nccl"), str)  # type: ignore[arg-type]
    monkeypatch.setattr(conductor, "_look_for_gpus", str)
    for hello in gpus("GPU-1", "GPU-1", nodes=[0, 0]):
        more = {"pid": 1, "address": "10.0.0.1", "interface": "eth0", "networks": [], "reached": "", "options": {}}
        server.controls.put((there, hello | more))
    with here:
        conductor.run()
        while "report" not in (message := control.receive(here)):
            assert "do" not in message
    (verdict,) = message["report"]["verdicts"]
    assert verdict["kind"] == "gpu-shared"
    assert verdict["observation"] == "a rank 0 and a rank 1 use the same GPU, which NCCL refuses."


def test_ranks_are_told_whose_options_differ_and_where_rank_0_was_reached() -> None:
    """Under torchrun rank 0's own machine sees it by loopback."""
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    with closing(control.Server(0)) as server:
        job = SimpleNamespace(world_size=3)
        conductor = session.Conductor(job, server, Options(seconds=60), str)  # type: ignore[arg-type]
        for rank, ((_, there), reached) in enumerate(zip(pipes, ("127.0.0.1", "10.0.0.1"), strict=True)):
            own = {"rank": rank, "node": rank, "address": "10.0.0.2" if rank else "127.0.0.1", "reached": reached}
            server.controls.put((there, {**HELLO, **own, "options": {"max_size": rank}}))
        control.send(pipes[1][0], {"gone": "interrupted"})
        conductor.run()
    told = []
    while "report" not in (message := control.receive(pipes[0][0])):
        told.append(message)
    assert [hello["address"] for each in told for hello in each.get("roster", ())] == ["10.0.0.1", "10.0.0.2"]
    assert "rank 0's options count; those of ranks 1 differ" in str(told)
    for pipe in pipes:
        for end in pipe:
            end.close()


def test_all_ranks_get_the_report_also_when_rank_0_knows_no_address_of_its_own() -> None:
    """Under torchrun it learns its address from the connection to its own port, for which it can lack a descriptor."""
    here, there = multiprocessing.Pipe()
    with closing(control.Server(0)) as server:
        job = SimpleNamespace(world_size=2)
        zero = {**HELLO, "rank": 0, "node": 0, "address": ""}
        conductor = session.Conductor(job, server, Options(seconds=60), str, zero)  # type: ignore[arg-type]
        server.controls.put((there, {**HELLO, "node": 1, "reached": "10.0.0.1"}))
        server.starved.set()
        conductor.run()
    while "report" not in (message := control.receive(here)):
        pass
    assert message["report"]["lost"] == {"0": control.NO_DESCRIPTOR}
    here.close()
    there.close()


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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["silent", "ended", "cut"])
def test_a_store_that_does_not_answer_is_rank_zero_s(monkeypatch: pytest.MonkeyPatch, how: str, rank: int) -> None:
    ends = threading.Event()
    monkeypatch.setattr(session, "_connect_store", lambda _seconds: ends.wait())
    monkeypatch.setattr(control, "SILENCE_SECONDS", 0.1)
    # A port of the test's own: no other process listens there once the store has ended.
    store = socket.create_server(("127.0.0.1", free_tcp_port()))
    job = job_of(rank, store, "eth0", "10.0.0")
    if how == "ended":
        store.close()
    elif how == "cut":
        job = dataclasses.replace(job, master_addr="255.255.255.255")  # to which the kernel does not connect
    with closing(control.Server(rank)) as server, store:
        report = session.take_part(job, server, Options(seconds=0.1), str)
    ends.set()
    if how == "cut":
        assert report["lost"] == {str(rank): how}
        return
    assert report["lost"] == {"0": how}
    (verdict,) = report["verdicts"]
    assert verdict["kind"] == f"rank-{how}"
    assert ("127.0.0.1" if rank else "10.0.0.1") in verdict["observation"]


@pytest.mark.slow
def test_options_that_differ_are_told_and_those_of_rank_zero_count(tmp_path: Path) -> None:
    environment = command_environment(
        free_udp_port(), PYTHONPATH=patched_path(tmp_path, PATIENT), MINGLE_WORLD_SIZE="2"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "mingle.check.command", "--json", "--timeout=100", f"--max-size={size}"],
            env={**environment, "MINGLE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, size in enumerate(("64K", "1M"))
    ]
    (answer, steps), _ = [rank.communicate(timeout=240) for rank in ranks]
    assert {rank.returncode for rank in ranks} <= {0, 1}, steps  # on a busy machine a rank has less CPU than another
    assert "warning: rank 0's options count; those of ranks 1 differ" in steps
    assert json.loads(answer)["all_reduce"][-1]["size"] == 1 << 16


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (
            {"error": "RuntimeError: [enforce fail at socket.cc:24] rv != -1. socket: Too many open files"},
            "descriptors",
        ),
        ({"result": {"fault": "no TCP connection ([Errno 24] Too many open files)"}}, "descriptors"),
        ({"gone": "descriptors"}, "descriptors"),
        ({"gone": "by magic"}, "ended"),
        ({"gone": []}, "ended"),
        ({"gone": {"a": 1}}, "ended"),
    ],
)
def test_loss_of_a_rank_is_named_by_its_answer(answer: dict[str, Any], how: str) -> None:
    here, there = multiprocessing.Pipe()
    conductor = session.Conductor(None, None, Options(seconds=60), str)  # type: ignore[arg-type]
    conductor._lines = {there: 1}
    control.send(here, {"id": 1, **answer})
    with pytest.raises(session.StopError), here:
        conductor._ask("step", {1: {"do": "add"}})
    assert conductor._seen.lost == {1: how}
    there.close()


def job_of(rank: int, store: socket.socket, interface: str = "lo", network: str = "127.0.0") -> mingle.Job:
    return mingle.Job(
        job_id="j",
        rank=rank,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        node_rank=rank,
        num_nodes=2,
        master_addr="127.0.0.1",
        master_port=store.getsockname()[1],
        interface=interface,
        address=f"{network}.{rank + 1}",
        elapsed=0.0,
    )


@contextlib.contextmanager
def sidecar(port: int) -> Iterator[int]:
    """Take a connection for this port, and make one from the address of a sidecar."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:

        def carry() -> None:
            caller = stack.enter_context(listening.accept()[0])
            inner = stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.6", 0)))
            while data := caller.recv(1 << 16):
                inner.sendall(data)

        carrying = threading.Thread(target=carry)
        carrying.start()
        yield listening.getsockname()[1]
        carrying.join(60)


def test_a_rank_behind_a_sidecar_announces_the_address_from_which_it_called() -> None:
    """As torchrun's ranks, whose job names no address."""
    with closing(control.Server(0)) as server, sidecar(server.port) as port, socket.create_server(("", 0)) as store:
        job = dataclasses.replace(job_of(1, store), address="")
        with session._call_rank_zero(job, server, port, server.token, {**HELLO, "address": ""}):
            line, hello = server.controls.get(timeout=60)
            line.close()
    assert hello["address"] == "127.0.0.1"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_descriptors_names_itself(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """It closes its own port first, so that rank 0 is told."""
    here, there = multiprocessing.Pipe()
    dialed: list[str] = []

    def dial(*_where: object, **_how: object) -> Any:
        dialed.append("")
        if len(dialed) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return there

    class Store:
        def set(self, *_pair: object) -> None: ...

        def get(self, _key: str) -> str:
            return '[4567, "t"]'

    monkeypatch.setattr(session, "_connect_store", lambda _seconds: Store())
    monkeypatch.setattr(session.Conductor, "run", str)
    monkeypatch.setattr(control, "dial", dial)
    with socket.create_server(("127.0.0.1", 0)) as store, contextlib.closing(control.Server(rank)) as server:
        report = session.take_part(job_of(rank, store), server, Options(seconds=1), str)
    assert report["lost"] == {str(rank): "descriptors"}
    (verdict,) = report["verdicts"]
    assert verdict["kind"] == "rank-descriptors"
    assert server.starved.is_set()
    if rank:
        assert control.receive(here)["hello"]["rank"] == rank
        assert control.receive(here) == {"gone": "descriptors"}
    here.close()
    there.close()


def test_rank_zero_without_descriptors_tells_the_ranks_that_it_knows() -> None:
    here, there = multiprocessing.Pipe()
    with contextlib.closing(control.Server(0)) as server:
        server.starved.set()
        server.controls.put((there, {**HELLO, "reached": ""}))
        job = SimpleNamespace(world_size=3)
        session.Conductor(job, server, Options(seconds=60), str, {**HELLO, "rank": 0}).run()  # type: ignore[arg-type]
    while "report" not in (message := control.receive(here)):
        pass
    assert message["report"]["lost"] == {"0": "descriptors"}
    assert [verdict["kind"] for verdict in message["report"]["verdicts"]] == ["rank-descriptors"]
    here.close()
    there.close()


def test_a_late_answer_to_an_earlier_step_is_none_to_this_one() -> None:
    conductor, here = waiting_for_one(Options(seconds=1000))
    conductor._asked = 1  # the step before, whose deadline has passed
    control.send(here, {"id": 1, "result": "late"})
    control.send(here, {"id": 2, "result": "in time"})
    with here:
        assert conductor._ask("step", {1: {"do": "add"}}) == {1: {"id": 2, "result": "in time"}}
