"""Rank 0's part of a check: its steps, which ranks are lost, and what the answers come to.

It is driven from outside: the ranks answer its tasks over connections of their own, and its report is read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, TypeAlias

import msgspec
import pytest

from mingle.check import conductor, control
from mingle.check.conductor import Options
from mingle.check.messages import Introduction
from mingle.check.verdicts import rounds
from tests.support.evidence import HELLO, NAMES

Record = dict[str, Any]
Reply: TypeAlias = "Record | tuple[Record | bytes, ...]"
Answer: TypeAlias = "Callable[[int, Record], Reply]"
GLOO, NCCL = Options(backend="gloo"), Options(backend="nccl")
LATE = {"error": "not finished at its deadline"}
PAIR: Record = {"rtt": 1e-4, "others": [], "rate": 1e9}
RIGHT: Record = {"gpu": ("", ""), "work": (0.02, 0.02), "group": None, "right": "", "fast": 1e-3, "pair": PAIR}
"""What the ranks of a healthy job answer to each task."""


def right(_rank: int, task: Record) -> Record:
    return {"result": RIGHT[task["do"]]}


def with_gpus(rank: int, task: Record) -> Reply:
    return {"result": (f"GPU-{rank}", "")} if task["do"] == "gpu" else right(rank, task)


def fails_at(step: str, error: Record = LATE, otherwise: Answer = right) -> Answer:
    return lambda rank, task: error if step in task["show"] else otherwise(rank, task)


def measuring(figures: Callable[[int, Record], Record], otherwise: Answer = right) -> Answer:
    """Return what ranks answer that have these figures of their pairs."""

    def answer(rank: int, task: Record) -> Reply:
        return {"result": PAIR | figures(rank, task)} if task["do"] == "pair" else otherwise(rank, task)

    return answer


def machines(count: int) -> list[Record]:
    return [HELLO | {"rank": rank, "node": rank, "host": NAMES[rank]} for rank in range(count)]


def introduction(**of_this_rank: Any) -> Introduction:
    return msgspec.convert(HELLO | of_this_rank, Introduction)


def conduct(
    roster: Sequence[Record],
    answer: Answer = right,
    options: Options = GLOO,
    *,
    heartbeat: Callable[[int], Reply] = lambda _rank: {},
    missing: int = 0,
    zero: Introduction | None = None,
    starved: bool = False,
    error: str = "",
) -> tuple[Record, list[Record]]:
    """Run rank 0's part of a check with the ranks of this roster; return its report, and all else that it has sent.

    `zero` is what rank 0 says of itself, and `error` the one with which its part ends.
    """
    server = SimpleNamespace(controls=queue.SimpleQueue(), starved=threading.Event())
    ranks: dict[Connection, int] = {}
    for hello in roster:
        here, there = multiprocessing.Pipe()
        ranks[here] = hello["rank"]
        server.controls.put((there, msgspec.convert(hello, Introduction)))
    if starved:
        server.starved.set()
    job = SimpleNamespace(world_size=len(roster) + missing, members=())
    conducts = conductor.Conductor(job, server, options, str, zero)  # type: ignore[arg-type]
    reports: list[Record] = []
    told: list[Record] = []
    with ThreadPoolExecutor(1) as pool:
        conducting = pool.submit(conducts.run)
        while ranks:
            for line in wait(list(ranks), 60) or pytest.fail(f"no report, {conducting}"):
                assert isinstance(line, Connection)
                try:
                    message = json.loads(line.recv_bytes())
                except EOFError:
                    message = None
                if message is None or "report" in message:
                    reports += [message["report"]] if message else []
                    del ranks[line]
                    line.close()
                    continue
                if message:
                    told.append(message)
                reply = answer(ranks[line], message) if "do" in message else () if message else heartbeat(ranks[line])
                for each in reply if isinstance(reply, tuple) else (reply,):
                    if not isinstance(each, bytes):
                        each = json.dumps({"id": message["id"], **each} if "do" in message else each).encode()
                    line.send_bytes(each)
        with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
            conducting.result()
    assert all(each == reports[0] for each in reports), "all get the same"
    return reports[0], told


def kinds(report: Record) -> list[str]:
    return [verdict["kind"] for verdict in report["verdicts"]]


def tasks(told: list[Record], do: str) -> list[Record]:
    return [message["with"] for message in told if message.get("do") == do]


def asked_for(told: list[Record]) -> set[str]:
    return {message["do"] for message in told if "do" in message}


# --- which ranks are lost ------------------------------------------------------------------------------------------


def test_a_rank_that_stops_is_silent_and_not_late_and_the_others_have_heartbeats_while_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    monkeypatch.setattr(control, "SILENCE_SECONDS", 1.0)
    beats = threading.Semaphore(0)

    def beat(rank: int) -> Reply:
        if rank:
            return ()
        beats.release()
        return {}

    def look(_roster: object, _own: int, lost: int, how: str) -> str:
        while beats.acquire(blocking=False):
            pass
        assert all(beats.acquire(timeout=60) for _ in range(3))
        return "cut" if (lost, how) == (1, "silent") else "?"

    monkeypatch.setattr(control, "judge_loss", look)
    report, _ = conduct(
        machines(2),
        lambda rank, task: () if rank else right(rank, task),
        Options(backend="gloo", seconds=0.1),
        heartbeat=beat,
    )
    assert report["lost"] == {"1": "cut"}


def test_the_time_in_which_rank_zero_did_not_run_makes_no_rank_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are counted: eight without an answer are less than a second here."""
    clock, beats = itertools.count(0, 10), itertools.count()
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.1)
    monkeypatch.setattr(conductor, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    report, _ = conduct(
        machines(1),
        lambda rank, task: () if task["id"] == 1 else right(rank, task),
        Options(backend="gloo", seconds=100_000.0),
        heartbeat=lambda _rank: {"id": 1, "result": RIGHT["work"]} if next(beats) == 8 else (),
    )
    assert report["healthy"]
    assert report["steps"][0]["seconds"] > control.SILENCE_SECONDS


@pytest.mark.parametrize("late", [b'{"result": "late"}', b'{"result": "\xff"}'])
def test_a_late_answer_to_an_earlier_step_is_none_to_this_one(late: bytes) -> None:
    report, _ = conduct(machines(2), lambda rank, task: (late, right(rank, task)))
    assert report["healthy"]


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (
            {"error": "RuntimeError: [enforce fail at socket.cc:24] rv != -1. socket: Too many open files"},
            "descriptors",
        ),
        ({"result": {"fault": "no TCP connection ([Errno 24] Too many open files)"}}, "descriptors"),
        ({"gone": "descriptors"}, "descriptors"),
        ({"gone": "interrupted"}, "interrupted"),
        ({"gone": "by magic"}, "ended"),
        # A message of a wrong type ends the connection, from which nothing more is read.
        ({"gone": []}, "ended"),
        ({"error": 5}, "ended"),
        ({"id": "x"}, "ended"),
    ],
)
def test_loss_of_a_rank_is_named_by_its_answer(answer: Record, how: str) -> None:
    """Also while it looks for its GPU, before anything is measured."""
    report, told = conduct(machines(2), lambda rank, task: answer if rank else right(rank, task), Options())
    assert report["lost"] == {"1": how}
    assert kinds(report) == [f"rank-{how}"]
    assert asked_for(told) == {"gpu"}


def test_ctrl_c_while_other_ranks_are_missing_ends_the_check() -> None:
    report, _ = conduct(machines(1), heartbeat=lambda _rank: {"gone": "interrupted"}, missing=2)
    assert report["lost"] == {"0": "interrupted"}
    assert kinds(report) == ["rank-interrupted"]


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SILENCE_SECONDS", 1.0)
    report, told = conduct(machines(2), options=Options(seconds=0.1), missing=1)
    assert kinds(report) == ["control"]
    assert "rank 2" in report["verdicts"][0]["observation"]
    assert not asked_for(told)


def test_rank_zero_without_descriptors_gives_the_report_to_the_ranks_that_it_knows() -> None:
    """Under torchrun it learns its address from the connection to its own port, for which it lacks a descriptor."""
    zero = introduction(rank=0, node=0, address="")
    report, _ = conduct([HELLO | {"node": 1, "reached": "10.0.0.1"}], missing=2, zero=zero, starved=True)
    assert report["lost"] == {"0": "descriptors"}
    assert kinds(report) == ["rank-descriptors"]
    assert [place["address"] for place in report["places"]] == ["10.0.0.1", "10.0.0.2"]


# --- the steps -----------------------------------------------------------------------------------------------------


def test_ranks_are_told_whose_options_differ_and_where_rank_0_was_reached() -> None:
    """Under torchrun rank 0's own machine sees it by loopback."""
    zero, one = machines(2)
    zero |= {"address": "127.0.0.1", "reached": "127.0.0.1", "options": {"max_size": 16}}
    one |= {"reached": "10.0.0.1", "options": {"max_size": 64}}
    report, told = conduct([zero, one], options=Options(backend="gloo", max_size=16))
    for message in told:
        assert [hello["address"] for hello in message.get("roster", ())] in ([], ["10.0.0.1", "10.0.0.2"])
    assert str(told).count("rank 0's options count; those of ranks 1 differ") == 2
    assert [each["size"] for each in report["all_reduce"]] == [4, 16]
    assert {task["limit"] for task in tasks(told, "pair")} == {16}


@pytest.mark.parametrize("seconds", [1.0, 5.0, 20.0])
def test_timed_measurements_end_before_the_deadline_of_their_step(seconds: float) -> None:
    def slower_again(rank: int, task: Record) -> Record:
        again = "slow pairs" in task["show"]
        return {"rtt": 2e-4 if again else 1e-4, "rate": 1e9 if rank else 1e6 if again else 2e6}

    def answer(rank: int, task: Record) -> Reply:
        return {"result": seconds} if task["do"] == "fast" else right(rank, task)

    options = Options(backend="gloo", seconds=seconds)
    report, told = conduct(machines(2), measuring(slower_again, answer), options)
    (figures,) = report["all_reduce"]
    assert figures["size"] == 4, "a larger size would take too long"
    assert figures["busbw"] == figures["algbw"], "of two ranks, the bus carries what the algorithm does: nccl-tests"
    (work,) = {task["seconds"] for task in tasks(told, "work")}
    windows = [task["window"] for task in tasks(told, "pair")]
    assert work <= seconds / 2
    assert len(windows) == 2 * (1 + conductor.CONFIRMATIONS), "a slow pair is measured again"
    # Both directions, and the last message of each can take as long as all before it.
    assert 4 * max(windows) < seconds
    measured = [(pair["rate"], pair["rtt"]) for pair in report["pairs"]]
    assert measured == [(2e6, 1e-4), (1e9, 1e-4)], "the best of several measurements counts"


def test_a_rank_that_looks_busy_is_measured_again_and_its_best_time_counts() -> None:
    times = iter((0.2, 0.02, 0.2))

    def answer(rank: int, task: Record) -> Reply:
        return {"result": (next(times), 0.02)} if rank and task["do"] == "work" else right(rank, task)

    report, _ = conduct(machines(2), answer)
    assert report["healthy"]
    assert next(times) == 0.2, "once it does not look busy, it is not measured any more"


def test_the_pairs_are_tried_also_when_the_first_step_fails() -> None:
    report, told = conduct(machines(2), fails_at("host time"))
    assert kinds(report) == ["collective"]
    assert tasks(told, "pair")


@pytest.mark.parametrize(
    ("errors", "status"), [((LATE, {"error": "NCCL error"}), "NCCL error"), ((LATE,), LATE["error"])]
)
def test_an_error_counts_before_those_that_are_only_late(errors: Sequence[Record], status: str) -> None:
    def answer(rank: int, task: Record) -> Reply:
        return errors[rank] if rank < len(errors) and "broadcast" in task["show"] else right(rank, task)

    report, _ = conduct(machines(3), answer)
    assert [step["status"] for step in report["steps"] if step["status"] != "ok"] == [status]
    assert kinds(report) == ["collective"]


OTHER = {"network": "10.1.0.0/24", "interfaces": ["eth1", "eth1"], "rate": 1e9, "rate_in_use": 1e9}


@pytest.mark.parametrize(
    ("do", "result"),
    [
        ("work", [0.02]),
        ("work", [-1, 0]),
        ("right", 5),
        ("fast", 0),
        ("pair", PAIR | {"rate": "x"}),
        ("pair", PAIR | {"others": [OTHER | {"rate_in_use": 0}]}),
    ],
)
def test_a_result_of_a_wrong_type_is_a_defect_of_which_all_have_the_report(do: str, result: Any) -> None:
    """Such as that of another version: in the evidence, it would keep the report from all."""

    def answer(rank: int, task: Record) -> Reply:
        return {"result": result} if rank and task["do"] == do else right(rank, task)

    report, _ = conduct(machines(2), answer, error=r"rank 1 answers '.*' with a wrong type: (Expected|Invalid)")
    assert "defect" in kinds(report)


@pytest.mark.parametrize("finds", [0, 1])
@pytest.mark.parametrize("error", ["DistStoreError: timed out", LATE["error"]])
def test_what_one_end_finds_on_the_path_counts_before_what_torch_says_at_the_other(error: str, finds: int) -> None:
    fault = "no TCP connection (timed out)"
    found = measuring(lambda _rank, _task: {"fault": fault})

    def answer(rank: int, task: Record) -> Reply:
        return {"error": error} if rank != finds and task["do"] == "pair" else found(rank, task)

    report, _ = conduct(machines(2), answer)
    assert [pair["fault"] for pair in report["pairs"]] == [fault, fault]


def test_the_machines_are_in_the_order_of_their_names() -> None:
    """Ranks are assigned: node10 can have rank 0."""
    nodes = [(0, "node10"), (1, "node9"), (1, "node9"), (2, "node1")]
    roster = [introduction(rank=rank, node=node, host=host) for rank, (node, host) in enumerate(nodes)]
    seen = conductor.evidence_of(roster)
    assert [(place.name, place.rank) for place in seen.places] == [("node1", 3), ("node9", 1), ("node10", 0)]
    assert seen.place_of == {0: 2, 1: 1, 2: 1, 3: 0}


# --- GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "first", "later"),
    [("nothing", "cuda", "cuda"), ("correctness", "cpu", "cpu"), ("NCCL: round 1", "cuda", "cpu")],
)
def test_gloo_shows_the_links_once_nccl_has_failed(fails: str, first: str, later: str) -> None:
    """A kernel of NCCL that waits for ever blocks all later ones of its GPU, also those of other pairs."""
    report, told = conduct(machines(3), fails_at(fails, otherwise=with_gpus), NCCL)
    assert "defect" not in kinds(report)
    devices = [task["device"] for task in tasks(told, "pair")]
    assert devices[:2] == [first] * 2
    assert set(devices[2:]) == {later}


def test_rates_of_nccl_and_gloo_are_not_compared() -> None:
    """Those of the rounds before the one in which NCCL has failed are measured again; a broken pair is not."""
    answer = measuring(lambda _rank, task: {"rate": {"cuda": 20e9, "cpu": 1e9}[task["with"]["device"]]}, with_gpus)
    report, _ = conduct(machines(4), fails_at("NCCL: round 2", otherwise=answer), NCCL)
    assert kinds(report) == ["messages"]
    assert {(pair["rate"], bool(pair["fault"])) for pair in report["pairs"]} == {(1e9, False), (None, True)}


def test_a_slow_pair_that_can_not_be_confirmed_is_none() -> None:
    """NCCL has failed before the pair had its turn, and Gloo's rate says nothing of NCCL's."""
    schedule = list(rounds(6))
    first, later = schedule[0][0], next(pair for pair in schedule[1] if not {*pair} & {*schedule[0][0]})

    def figures(rank: int, task: Record) -> Record:
        return {"rate": 0.1e9 if {rank, task["with"]["peer"]} in ({*first}, {*later}) else 1e9}

    answer = fails_at("slow pairs", {"error": "NCCL error"}, measuring(figures, with_gpus))
    report, _ = conduct(machines(6), answer, NCCL)
    assert {(pair["from"], pair["to"]) for pair in report["pairs"] if pair["fault"]} == {first, first[::-1]}
    assert kinds(report) == ["messages"]
    assert "NCCL was not tried" in report["verdicts"][0]["observation"]


def gpus(*ids: str, nodes: Sequence[int], missing: str = "", host: str = "") -> list[Introduction]:
    """Return the roster of ranks that would use these GPUs; the last one has none for this reason."""
    reasons = [*[""] * (len(ids) - 1), missing]
    return [
        introduction(rank=rank, node=node, host=host or NAMES[node], gpu=uuid, gpu_missing=reason)
        for rank, (uuid, node, reason) in enumerate(zip(ids, nodes, reasons, strict=True))
    ]


@pytest.mark.parametrize(
    ("roster", "backend", "note"),
    [
        (gpus("", "", nodes=[0, 1]), "gloo", ""),
        (gpus("GPU-1", "", nodes=[0, 1]), "gloo", "rank 1 on b sees no GPU"),
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
    roster: list[Introduction], backend: str, note: str
) -> None:
    assert conductor.choose_backend(roster) == (backend, note)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"result": ("", "sees a GPU that fails")}, "sees a GPU that fails"),
        (LATE, "has a GPU whose driver has not answered in 60 s"),
        ({"error": "OSError: no"}, "OSError: no"),
    ],
)
def test_why_a_rank_uses_no_gpu_is_told_to_all(answer: Record, why: str) -> None:
    """A driver can load for longer than a step may last, or never answer."""

    def asked(rank: int, task: Record) -> Reply:
        return answer if rank and task["do"] == "gpu" else with_gpus(rank, task)

    report, told = conduct(machines(2), asked, Options(seconds=20.0))
    assert (report["backend"], report["why_gloo"]) == ("gloo", f"rank 1 on b {why}")
    assert len([message for message in told if why in message.get("show", "")]) == 2


def test_a_gpu_has_more_time_than_a_step_and_nccl_that_a_rank_has_none_for_is_not_tried() -> None:
    """Rank 0 was told to use it, and the other was not."""

    def answer(rank: int, task: Record) -> Reply:
        time.sleep(0.2)
        return right(rank, task) if rank else with_gpus(rank, task)

    report, told = conduct(machines(2), answer, Options(backend="nccl", seconds=0.01))
    assert asked_for(told) == {"gpu"}
    assert kinds(report) == ["gpu-missing"]
    assert "rank 1 on b sees no GPU" in report["verdicts"][0]["observation"]


def test_ranks_of_one_gpu_are_told_before_nccl_is_tried() -> None:
    roster = [hello | {"node": 0, "host": "a"} for hello in machines(2)]
    report, told = conduct(roster, lambda _rank, _task: {"result": ("GPU-1", "")}, NCCL)
    assert asked_for(told) == {"gpu"}
    assert kinds(report) == ["gpu-shared"]
    assert "a rank 0 and a rank 1 use" in report["verdicts"][0]["observation"]
