"""Rank 0's part in a check: which steps there are, in which order, and what the report says of them."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from mingle.check.control import Conductor, Record
from mingle.check.verdicts import Evidence, Other, Pair, Place, Verdict, busy_ranks, judge, rounds, slow_links

if TYPE_CHECKING:
    from mingle.check.session import Options

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SIZE_FACTOR = 4
REPEAT_SECONDS = 0.15
"""How long each size of all_reduce is repeated, as far as `MAX_REPEATS` allows."""
MAX_REPEATS = 20
WORK_REPEATS = 8
CONFIRMATIONS = 2
"""How often a pair that looks slow is measured again; its best rate counts."""


class StopError(Exception):
    """A step has shown a fault that later steps of the same kind would wait for as well."""


def run(conductor: Conductor, options: Options, before: Callable[[str], None]) -> None:
    """Conduct the check and give every rank the report, whatever happens."""
    failed = Verdict("defect", (), "the check failed on rank 0.", "a defect of mingle-check", "see rank 0's stderr.")
    report = report_of(Evidence(places=[]), verdicts=[failed])
    try:
        if conductor.gather(options.seconds):
            report = _Conduct(conductor, options, before).run()
        else:
            missing = ", ".join(str(rank) for rank in range(conductor.size) if rank not in conductor.hellos)
            report = report_of(
                Evidence(places=[]),
                verdicts=[
                    Verdict(
                        "control",
                        (),
                        f"rank {missing} found rank 0 and did not reach its TCP port {conductor.port}.",
                        "a firewall that lets the discovery pass and filters other TCP ports, or a stopped process",
                        "allow TCP on all ports between these machines.",
                    )
                ],
            )
    finally:
        conductor.end(report)


def without_rank_zero(hellos: Sequence[Record], rank: int, how: str) -> Record:
    """Return the report of a rank that has lost rank 0: ``cut`` if only the path between the two is broken."""
    seen = _evidence(hellos)
    seen.lost = {rank if how == "cut" else 0: how}
    return report_of(seen)


def _evidence(hellos: Sequence[Record]) -> Evidence:
    """Return the places of these ranks: machines, or, where all are on one machine, the ranks."""
    nodes = sorted({hello["node"] for hello in hellos})
    alone = len(nodes) == 1
    speakers = hellos if alone else [next(each for each in hellos if each["node"] == node) for node in nodes]
    return Evidence(
        places=[_place(hello, f" rank {hello['rank']}" if alone else "") for hello in speakers],
        place_of={hello["rank"]: speakers.index(hello) if alone else nodes.index(hello["node"]) for hello in hellos},
    )


def _place(hello: Record, suffix: str) -> Place:
    own: Record = next((each for each in hello["networks"] if each["address"] == hello["address"]), {})
    interface = str(own.get("interface", hello["interface"]))
    return Place(f"{hello['host']}{suffix}", hello["rank"], hello["address"], interface, own.get("mtu", 0))


class _Conduct:
    """One check."""

    def __init__(self, conductor: Conductor, options: Options, before: Callable[[str], None]) -> None:
        self._ranks, self._before = conductor, before
        self._max_size, self._seconds = options.max_size, options.seconds
        self._started = time.monotonic()
        self._hellos = [conductor.hellos[rank] for rank in sorted(conductor.hellos)]
        gpus = all(hello["gpus"] >= hello["local_world_size"] for hello in self._hellos)
        self._backend = {"auto": "cpu:gloo,cuda:nccl" if gpus else "gloo"}.get(options.backend, options.backend)
        self._seen = _evidence(self._hellos)
        self._speakers = [place.rank for place in self._seen.places]
        self._work: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._trips: dict[Pair, float] = {}
        self._sizes: list[Record] = []
        self._steps: list[Record] = []

    def run(self) -> Record:
        """Do all steps and return the report."""
        with suppress(StopError):
            self._all("roster", {"do": "roster", "roster": self._hellos})
            with suppress(StopError):
                self._collectives()
            if not self._ranks.lost:
                self._pairs()  # they show who is at fault, also after a collective that failed
        self._ranks.confirm_silence()
        self._seen.lost = dict(self._ranks.lost)
        return self._finished()

    def _ask(self, name: str, tasks: dict[int, Record], words: str = "") -> dict[int, Record]:
        """Have ranks do their tasks; a lost rank ends the check."""
        self._before(name)
        started = time.monotonic()
        for task in tasks.values():
            if words:
                task["say"] = words
        answers = self._ranks.ask(tasks, self._seconds)
        status = "lost" if self._ranks.lost else next(filter(None, map(_problem, answers.values())), "ok")
        self._steps.append({"name": name, "status": status, "seconds": round(time.monotonic() - started, 3)})
        if self._ranks.lost:
            raise StopError
        for rank, answer in answers.items():
            if isinstance(answer.get("result"), dict) and "work" in answer["result"]:
                self._work[rank].append(tuple(answer["result"]["work"]))
        return answers

    def _all(self, name: str, task: Record, words: str = "") -> dict[int, Any]:
        """Have every rank do the same; a rank that fails or does not end ends the collectives."""
        answers = self._ask(name, {hello["rank"]: dict(task) for hello in self._hellos}, words)
        failed = {rank: _problem(answer) for rank, answer in answers.items() if _problem(answer)}
        if failed:
            ranks = ", ".join(map(str, failed))
            self._seen.failed.append(f"{name}: {next(iter(failed.values()))} (ranks {ranks})")
            raise StopError
        return {rank: answer["result"] for rank, answer in answers.items()}

    # --- right and fast --------------------------------------------------------------------------------------------

    def _collectives(self) -> None:
        self._all("group", {"do": "group", "backend": self._backend}, f"making a process group ({self._backend})")
        for device in self._devices():
            for name in COLLECTIVES:
                results = self._all(
                    f"{name} on {device}",
                    {"do": "right", "name": name, "device": device},
                    f"right? {name} on {device}",
                )
                wrong = {rank: words for rank, words in results.items() if words}
                self._seen.wrong += [f"{name} on {device}, rank {rank}: {words}" for rank, words in wrong.items()]
            self._all_reduce(device)

    def _devices(self) -> list[str]:
        return [kind for name, kind in (("gloo", "cpu"), ("nccl", "cuda")) if name in self._backend]

    def _all_reduce(self, device: str) -> None:
        size, count, world = 4, MAX_REPEATS, len(self._hellos)
        while True:
            task = {"do": "fast", "size": size, "count": count, "device": device}
            results = self._all(
                f"all_reduce of {size} B on {device}", task, f"fast? all_reduce of {size} B on {device}"
            )
            took = max(result["seconds"] for result in results.values())
            rate = size / took
            self._sizes.append(
                {
                    "device": device,
                    "size": size,
                    "seconds": took,
                    "algbw": rate,
                    "busbw": rate * 2 * (world - 1) / world,
                }
            )
            larger = min(size * SIZE_FACTOR, self._max_size)
            # The next size takes so much longer at most; a slow link is no reason to reach the deadline.
            if larger == size or took * (larger / size) * 3 > self._seconds / 2:
                return
            count = max(2, min(MAX_REPEATS, int(REPEAT_SECONDS / (took * larger / size))))
            size = larger

    # --- who -------------------------------------------------------------------------------------------------------

    def _pairs(self) -> None:
        schedule = list(rounds(len(self._speakers)))
        for number, pairs in enumerate(schedule, 1):
            sound = self._paths(pairs, f"who? round {number} of {len(schedule)}")
            self._messages(sound, f"round {number}")
        for attempt in range(CONFIRMATIONS):
            self._note_work()
            if busy_ranks(self._seen):
                self._work.clear()
                for _ in range(WORK_REPEATS):
                    self._ask("work again", {hello["rank"]: {"do": "work"} for hello in self._hellos})
            doubtful = {(min(pair), max(pair)) for pair in slow_links(self._seen.rates)}
            for number, pairs in enumerate(schedule, 1):
                again = [pair for pair in pairs if pair in doubtful]
                if again:
                    self._messages(again, f"again {attempt + 1}, round {number}")

    def _note_work(self) -> None:
        for rank, each in self._work.items():
            self._seen.host_times[rank] = median(wall for wall, _ in each), median(cpu for _, cpu in each)

    def _paths(self, pairs: list[Pair], words: str) -> list[Pair]:
        """Probe the paths of a round, from both ends; return the pairs that are sound."""
        tasks, pair_of = {}, {}
        for one, other in pairs:
            for own, peer, measures in ((one, other, True), (other, one, False)):
                mine, theirs = self._hellos[self._speakers[own]], self._hellos[self._speakers[peer]]
                others = self._other_networks(mine, theirs) if measures else []
                peer_record = {name: theirs[name] for name in ("rank", "address", "port")}
                tasks[mine["rank"]] = {"do": "path", "peer": peer_record, "others": others}
                pair_of[mine["rank"]] = (one, other)
        answers = self._ask(f"paths, {words}", tasks, words)
        for rank, answer in answers.items():
            pair = pair_of[rank]
            result = answer.get("result") or {"fault": _problem(answer)}
            if "fault" in result:
                self._seen.broken.setdefault(pair, result["fault"])
            else:
                self._seen.others.setdefault(pair, []).extend(
                    Other(name, self._interfaces(pair, name), *found) for name, found in result["others"].items()
                )
        return [pair for pair in pairs if pair not in self._seen.broken]

    @staticmethod
    def _other_networks(mine: Record, theirs: Record) -> list[list[str]]:
        """Return each network besides the one in use that two machines seem to share, with their addresses there."""
        used = {each["network"] for each in mine["networks"] if each["address"] == mine["address"]}
        return [
            [here["network"], here["address"], there["address"]]
            for here, there in itertools.product(mine["networks"], theirs["networks"])
            if here["network"] == there["network"] and here["network"] not in used and mine["node"] != theirs["node"]
        ]

    def _interfaces(self, pair: Pair, network: str) -> tuple[str, str]:
        one, other = (
            next(
                each["interface"]
                for each in self._hellos[self._speakers[place]]["networks"]
                if each["network"] == network
            )
            for place in pair
        )
        return one, other

    def _messages(self, pairs: list[Pair], words: str) -> None:
        """Have the pairs of a round exchange messages through torch."""
        tasks = {}
        for one, other in pairs:
            for place in (one, other):
                tasks[self._speakers[place]] = {
                    "do": "pair",
                    "key": f"{words}/{one}-{other}",
                    "first": place == one,
                    "device": self._devices()[-1],
                    "limit": self._max_size,
                }
        answers = self._ask(f"messages, {words}", tasks) if tasks else {}
        for one, other in pairs:
            for own, peer in ((one, other), (other, one)):
                answer = answers[self._speakers[own]]
                if problem := _problem(answer):
                    self._seen.broken.setdefault((one, other), f"torch's messages fail ({problem})")
                    continue
                result = answer["result"]
                self._seen.rates[own, peer] = max(result["rate"], self._seen.rates.get((own, peer), 0.0))
                self._trips[one, other] = min(result["rtt"], self._trips.get((one, other), result["rtt"]))

    def _finished(self) -> Record:
        self._note_work()
        ranks = [
            {
                "rank": hello["rank"],
                "place": self._seen.place_of[hello["rank"]],
                "host": hello["host"],
                "pid": hello["pid"],
                "host_seconds": self._seen.host_times.get(hello["rank"]),
            }
            for hello in self._hellos
        ]
        return {
            **report_of(self._seen, self._trips),
            "backend": self._backend,
            "elapsed": round(time.monotonic() - self._started, 3),
            "ranks": ranks,
            "steps": self._steps,
            "all_reduce": self._sizes,
        }


def report_of(seen: Evidence, trips: Mapping[Pair, float] | None = None, verdicts: Sequence[Verdict] = ()) -> Record:
    """Return the report of what was seen: the same fields whether or not the check came to its end."""
    verdicts = [*verdicts, *judge(seen)]
    pairs = [
        {
            "from": one,
            "to": other,
            "rtt": (trips or {}).get(both := (min(one, other), max(one, other))),
            "rate": seen.rates.get((one, other)),
            "fault": seen.broken.get(both),
        }
        for one, other in itertools.permutations(range(len(seen.places)), 2)
    ]
    return {
        "healthy": not verdicts,
        "verdicts": msgspec.to_builtins(verdicts),
        "places": msgspec.to_builtins(seen.places),
        "pairs": pairs,
        "backend": None,
        "elapsed": None,
        "ranks": [],
        "steps": [],
        "all_reduce": [],
    }


def _problem(answer: Record) -> str:
    """Return why a rank has no result; empty if it has one."""
    return "not finished at its deadline" if "timeout" in answer else str(answer.get("error", ""))
