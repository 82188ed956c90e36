"""Rank 0's part of a check: which steps all ranks do, and what their answers show."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
from msgspec import Struct

from mingle import detached
from mingle.check import control, verdicts
from mingle.check.messages import REPLY, Introduction, Order, Reply, decode, receive, send
from mingle.check.probes import PairResult, Probes
from mingle.check.verdicts import Bandwidth, CheckedRank, Evidence, Pair, PairReport, RankReport, Report, Step
from mingle.config.order import order_key
from mingle.job import Job

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SIZE_FACTOR = 4
REPEAT_SECONDS = 0.15
"""How long each size of all_reduce is repeated, as far as `MAX_REPEATS` allows."""
MAX_REPEATS = 20
WORK_SECONDS = 1.0
"""How long host time is measured: a process that wakes up gets the CPU at once, for longer than one piece of work."""
CONFIRMATIONS = 2
"""How often a rank or a pair that looks slow is measured again; its best figure counts."""
RATE_SECONDS, RATE_GROWTH = 0.3, 3
"""How long one direction of a pair is measured, and how many times longer the next time: ranks that wait for the CPU
spend a short time on waking up."""
END_SECONDS = 2.0
"""How long rank 0 waits for the others to take the report, and any rank for the end of its process group."""
GPU_SECONDS = 60.0
"""How long a GPU's driver has at least: without persistence mode it begins to load with the first process, which takes
seconds for each GPU of the machine."""
NO_GPU = "sees no GPU"
_LATE = "not finished at its deadline"
_STARVED = (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE))
_RESULTS: dict[str, msgspec.json.Decoder[Any]] = {
    task: msgspec.json.Decoder(typing.get_type_hints(method, include_extras=True)["return"])
    for task, method in vars(Probes).items()
    if not task.startswith("_")
}
"""What reads the result of each task."""


class Options(Struct, frozen=True, kw_only=True):
    """What the user asks for."""

    backend: str = "auto"
    max_size: int = 1 << 26
    seconds: float = 20.0
    """The deadline of each step."""

    @property
    def patience(self) -> float:
        """How many seconds the ranks have to begin the check: they leave the discovery at different times."""
        return max(self.seconds, control.SILENCE_SECONDS)


def evidence_of(roster: Sequence[Introduction], lost: Mapping[int, str] | None = None) -> Evidence:
    """Return the places of these ranks: machines by name, or, where all ranks are on one machine, the ranks."""
    speakers: dict[int, Introduction] = {}
    for hello in reversed(roster):
        speakers[hello.node] = hello  # the first rank of its machine speaks for it
    alone = len(speakers) == 1
    shown = roster if alone else sorted(speakers.values(), key=lambda each: (order_key(None, each.host, ""), each.rank))
    place_of_node = {hello.node: at for at, hello in enumerate(shown)}
    numbers = {hello.rank: at if alone else place_of_node[hello.node] for at, hello in enumerate(roster)}
    places: list[CheckedRank] = []
    for hello in shown:
        own = next((each for each in hello.networks if each.address == hello.address), None)
        name = f"{hello.host} rank {hello.rank}" if alone else hello.host
        interface, mtu = (own.interface, own.mtu) if own else (hello.interface, 0)
        places.append(CheckedRank(name, hello.rank, hello.address, interface, mtu))
    return Evidence(places=places, place_of=numbers, lost=dict(lost or {}))


def choose_backend(roster: Sequence[Introduction]) -> tuple[str, str]:
    """Return the backend by which these ranks work, and where some have GPUs that it leaves out, why."""
    if not any(hello.gpu or hello.gpu_missing for hello in roster):
        return "gloo", ""  # there is no GPU that anybody expects to be used
    if (hello := _without_gpu(roster)) is not None:
        return "gloo", f"rank {hello.rank} on {hello.host} {hello.gpu_missing or NO_GPU}"
    for ranks in ranks_of_one_gpu(roster):
        return "gloo", f"ranks {' and '.join(map(str, ranks))} on {roster[ranks[0]].host} would use the same GPU"
    return "cpu:gloo,cuda:nccl", ""


def _without_gpu(roster: Sequence[Introduction]) -> Introduction | None:
    """Return a rank without a GPU, one that says why if there is one; None: each has one."""
    without = [hello for hello in roster if not hello.gpu]
    return next((each for each in without if each.gpu_missing), without[0] if without else None)


def ranks_of_one_gpu(roster: Sequence[Introduction]) -> list[list[int]]:
    """Return the ranks of one host that would use the same GPU, which NCCL refuses ("Duplicate GPU detected").

    To NCCL a machine is its host name and boot ID. A GPU has one boot ID, and containers of a host can have its name.
    """
    users: dict[tuple[str, str], list[int]] = {}
    for hello in roster:
        users.setdefault((hello.host, hello.gpu), []).append(hello.rank)
    return [ranks for (_, gpu), ranks in users.items() if gpu and len(ranks) > 1]


def report_of(seen: Evidence, roster: Sequence[Introduction], started: float) -> Report:
    """Return the report of what was seen."""
    found = verdicts.judge(seen)
    return Report(
        healthy=not found,
        verdicts=found,
        places=seen.places,
        pairs=[
            PairReport(
                one,
                other,
                rtt=seen.trips.get(verdicts.undirected(one, other)),
                rate=seen.rates.get((one, other)),
                fault=seen.broken.get(verdicts.undirected(one, other)),
            )
            for one, other in itertools.permutations(range(len(seen.places)), 2)
        ],
        ranks=[
            RankReport(hello.rank, hello.host, hello.pid, seen.place_of[hello.rank], seen.work.get(hello.rank))
            for hello in roster
        ],
        lost=seen.lost,
        backend=seen.backend,
        why_gloo=seen.why_gloo,
        steps=seen.steps,
        all_reduce=seen.all_reduce,
        elapsed=round(time.monotonic() - started, 3),
    )


class StopError(Exception):
    """A step has shown a fault for which later steps of the same kind would wait as well."""


class Conductor:
    """Rank 0's part: has the ranks do each step within its deadline, and judges what they answer."""

    def __init__(
        self,
        job: Job,
        server: control.Server,
        options: Options,
        before: Callable[[str], None],
        hello: Introduction | None = None,
    ) -> None:
        self._job, self._server, self._options, self._before = job, server, options, before
        self._hello = hello
        self._started = time.monotonic()
        self._lines: dict[Connection, int] = {}
        self._roster: list[Introduction] = []
        self._seen = Evidence()
        self._asked, self._pulsed = 0, 0.0
        self._unanswered: Counter[int] = Counter()
        """The heartbeats that each rank has not answered: while rank 0 does not run, there are no new ones."""

    def run(self) -> None:
        """Conduct the check, and give every rank the report, whatever happens."""
        try:
            self._collect()
            if not self._seen.unreached and not self._seen.lost:
                with suppress(StopError):
                    self._choose_backend()
                    if not self._seen.same_gpu and not self._seen.without_gpu:
                        self._measure()
                self._judge_losses()
        except Exception as error:
            self._seen.defect = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end(report_of(self._seen, self._roster, self._started))

    def _measure(self) -> None:
        with suppress(StopError):
            self._host_times()
            self._collectives()
        with suppress(StopError):
            if not self._seen.lost:
                self._pairs()  # they show what is at fault, also after a collective that failed

    # --- the ranks ---

    def _collect(self) -> None:
        """Wait for the control connections of all ranks."""
        hellos: dict[int, Introduction] = {}
        lost: dict[int, str] = {}
        deadline = time.monotonic() + self._options.patience
        while len(hellos) < self._job.world_size and not lost and time.monotonic() < deadline:
            self._pulse()
            lost |= {rank: how for rank, reply in self._received(0) if (how := _departure(reply))}
            with suppress(queue.Empty):
                line, hello = self._server.controls.get(timeout=control.PULSE_SECONDS)
                if hello.rank < self._job.world_size:
                    self._lines[line], hellos[hello.rank] = hello.rank, hello
            if self._server.starved.is_set():
                lost[0] = control.NO_DESCRIPTOR
        own = {0: self._hello} if self._hello else {}  # its connection can be missing as well
        roster = [hello for _, hello in sorted((own | hellos).items())]
        # torchrun does not tell ranks their addresses, and rank 0 calls itself by loopback.
        reached = next((hello.reached for hello in roster if hello.node != roster[0].node), "")
        for hello in roster:
            # Rank 0 of torchrun, which has not reached its own port, knows no address of its own.
            if reached and (not hello.address or ip_address(hello.address).is_loopback):
                hello.address = reached
        self._seen, self._roster = evidence_of(roster, lost), roster
        differing = [str(hello.rank) for hello in roster if hello.options != roster[0].options]
        for line in self._lines:
            send(line, Order(roster=roster))
            if differing:
                ranks = ", ".join(differing)
                send(line, Order(f"warning: rank 0's options count; those of ranks {ranks} differ"))
        if len(hellos) < self._job.world_size and not lost:
            hosts = {member.rank: member.hostname for member in self._job.members}
            missing = [rank for rank in range(self._job.world_size) if rank not in hellos]
            self._seen.unreached = {rank: hosts.get(rank, f"the machine of rank {rank}") for rank in missing}

    def _pulse(self) -> bool:
        """Send the heartbeats that are due; return False, which tells a detached call to go on."""
        if time.monotonic() - self._pulsed >= control.PULSE_SECONDS:
            self._pulsed = time.monotonic()
            for line, rank in self._lines.items():
                send(line, Order())
                self._unanswered[rank] += 1
        return False

    def _judge_losses(self) -> None:
        """Find out which of the lost ranks other machines still reach; go on with the heartbeats meanwhile."""

        def judge() -> dict[int, str]:
            return {
                rank: how if rank == 0 or how in control.DEPARTURES else control.judge_loss(self._roster, 0, rank, how)
                for rank, how in self._seen.lost.items()
            }

        self._seen.lost = detached.run(judge, "check-witnesses", self._pulse)

    def _ask(
        self, name: str, do: str, tasks: Mapping[int, dict[str, Any]], least: float = 0.0
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Have ranks do a task; return the results and the errors that come before the deadline.

        At the deadline it goes on until each rank that has not answered is known to be alive or silent.

        Args:
            name: of the step.
            do: the task.
            tasks: its arguments for each rank.
            least: the seconds until the deadline, if the user has asked for fewer.

        Raises:
            StopError: a rank has ended, or is silent.
            ValueError: a result is of a wrong type.
        """
        self._before(name)
        self._asked += 1
        for line, rank in self._lines.items():
            if rank in tasks:
                send(line, Order(name, self._asked, do, tasks[rank]))
        lost: dict[int, str] = {}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        started = time.monotonic()
        while not lost and (waiting := tasks.keys() - results.keys() - errors.keys()):
            late = time.monotonic() - started > max(self._options.seconds, least)
            for rank, reply in self._received(control.PULSE_SECONDS):
                if how := _departure(reply):
                    lost[rank] = how
                elif reply.id != self._asked:
                    continue
                elif reply.error:
                    errors[rank] = reply.error
                else:
                    try:
                        results[rank] = decode(_RESULTS[do], reply.result)
                    except ValueError as error:
                        raise ValueError(f"rank {rank} answers {name!r} with a wrong type: {error}") from error
            self._pulse()
            silent = (
                rank for rank in tasks if self._unanswered[rank] * control.PULSE_SECONDS > control.SILENCE_SECONDS
            )
            lost |= dict.fromkeys(silent, "silent")
            if late and not any(self._unanswered[rank] for rank in waiting):
                errors |= dict.fromkeys(waiting, _LATE)
        status = "lost" if lost else _first_error(errors) or "ok"
        self._seen.steps.append(Step(name, status, round(time.monotonic() - started, 3)))
        if lost:
            self._seen.lost |= lost
            raise StopError
        return results, errors

    def _received(self, seconds: float) -> Iterator[tuple[int, Reply]]:
        """Wait for messages; yield them with the rank of their sender."""
        for line in wait(list(self._lines), seconds):
            assert isinstance(line, Connection)
            rank = self._lines[line]
            self._unanswered[rank] = 0
            try:
                reply = receive(line, REPLY)
            except (EOFError, OSError, ValueError):
                del self._lines[line]
                line.close()
                reply = Reply(gone="ended")
            yield rank, reply

    def _all(self, name: str, do: str, **arguments: Any) -> dict[int, Any]:
        """Have every rank do the same and return the results; a rank that fails or does not end is a StopError."""
        results, errors = self._ask(name, do, dict.fromkeys(range(len(self._roster)), arguments))
        if first := _first_error(errors):
            ranks = ", ".join(str(rank) for rank, error in sorted(errors.items()) if error == first)
            self._seen.failed.append(f"{name}: {first} (ranks {ranks})")
            raise StopError
        return results

    def _end(self, report: Report) -> None:
        for line in self._lines:
            send(line, Order(report=report))
        # A connection that is closed while something is unread is reset, and the report could be lost.
        deadline = time.monotonic() + END_SECONDS
        while self._lines and (left := deadline - time.monotonic()) > 0:
            for _ in self._received(left):
                pass

    # --- correctness and bandwidth ---

    def _host_times(self) -> None:
        """Measure each rank's CPU before a collective makes the ranks wait for each other."""
        seconds = min(WORK_SECONDS, self._options.seconds / 4)
        for attempt in range(1 + CONFIRMATIONS):
            if not attempt or verdicts.busy_ranks(self._seen):
                for rank, times in self._all("cpu: host time", "work", seconds=seconds).items():
                    self._seen.work[rank] = min(self._seen.work.get(rank, times), times)

    def _choose_backend(self) -> None:
        backend = self._options.backend
        if backend != "gloo":
            self._look_for_gpus()
        if backend == "nccl":
            self._seen.same_gpu = ranks_of_one_gpu(self._roster)
            if (hello := _without_gpu(self._roster)) is not None:
                self._seen.without_gpu = {hello.rank: hello.gpu_missing or NO_GPU}
        elif backend == "auto":
            backend, self._seen.why_gloo = choose_backend(self._roster)
            for line in self._lines if self._seen.why_gloo else ():
                send(line, Order(f"note: Gloo is used, on the CPU: {self._seen.why_gloo}"))
        self._seen.backend = backend

    def _look_for_gpus(self) -> None:
        """Ask each rank for its GPU: a driver can load for many seconds, and a rank shows meanwhile that it lives."""
        tasks: dict[int, dict[str, Any]] = {hello.rank: {} for hello in self._roster}
        results, errors = self._ask("devices: GPU of each rank", "gpu", tasks, GPU_SECONDS)
        late = f"has a GPU whose driver has not answered in {max(self._options.seconds, GPU_SECONDS):g} s"
        for hello in self._roster:
            why = errors.get(hello.rank, "")
            hello.gpu, hello.gpu_missing = results.get(hello.rank, ("", late if why == _LATE else why))

    def _collectives(self) -> None:
        backend = self._seen.backend
        self._all(f"correctness: process group of {backend}", "group", backend=backend, seconds=self._options.seconds)
        for device in self._devices():
            for name in COLLECTIVES:
                results = self._all(f"correctness: {name} on {device}", "right", collective=name, device=device)
                wrong = {rank: words for rank, words in results.items() if words}
                self._seen.wrong += [f"{name} on {device}, rank {rank}: {words}" for rank, words in wrong.items()]
            self._all_reduce(device)

    def _devices(self) -> list[str]:
        return [kind for name, kind in (("gloo", "cpu"), ("nccl", "cuda")) if name in self._seen.backend]

    def _all_reduce(self, device: str) -> None:
        size, count, world = 4, MAX_REPEATS, len(self._roster)
        while True:
            name = f"bandwidth: all_reduce on {device}: {size} B"
            results = self._all(name, "fast", size=size, count=count, device=device)
            took = max(results.values())
            busbw = size / took * 2 * (world - 1) / world
            self._seen.all_reduce.append(Bandwidth(device, size, took, size / took, busbw))
            larger = min(size * SIZE_FACTOR, self._options.max_size)
            # The next size takes so much longer at most; a slow link must not reach the deadline.
            if larger == size or took * (larger / size) * 3 > self._options.seconds / 2:
                return
            count = max(2, min(MAX_REPEATS, int(REPEAT_SECONDS / (took * larger / size))))
            size = larger

    # --- links ---

    def _pairs(self) -> None:
        schedule = list(verdicts.rounds(len(self._seen.places)))
        if not self._rounds(schedule):
            # NCCL has failed, and its rates can't be compared with Gloo's.
            self._seen.rates, self._seen.trips = {}, {}
            self._rounds(schedule)
        device = self._device_of_links()
        for attempt in range(1, CONFIRMATIONS + 1):
            doubtful = {verdicts.undirected(*pair) for pair in verdicts.slow_links(self._seen.rates)}
            for number, pairs in enumerate(schedule, 1):
                again = [pair for pair in pairs if pair in doubtful]
                if self._device_of_links() != device:
                    for pair in again:  # nothing can confirm any more what NCCL has shown
                        self._seen.rates.pop(pair, None)
                        self._seen.rates.pop(pair[::-1], None)
                elif again:
                    self._round(self._links(f"slow pairs, {attempt}: round {number}"), again, attempt)
            if self._device_of_links() != device:
                return

    def _rounds(self, schedule: Sequence[Sequence[Pair]]) -> bool:
        """Measure the pairs that are not broken; return False at once when NCCL has failed."""
        device = self._device_of_links()
        for number, pairs in enumerate(schedule, 1):
            if whole := [pair for pair in pairs if pair not in self._seen.broken]:
                self._round(self._links(f"round {number} of {len(schedule)}"), whole)
            if self._device_of_links() != device:
                return False
        return True

    def _links(self, step: str) -> str:
        """Return the name of a step that shows links."""
        by = {"cpu": " by Gloo", "cuda": " by NCCL"}[self._device_of_links()] if "nccl" in self._seen.backend else ""
        return f"links{by}: {step}"

    def _device_of_links(self) -> str:
        """Return whose messages show the links: after a failure of NCCL its kernels can block all others of the GPU."""
        failed = self._seen.failed or any(how.startswith(verdicts.TORCH_FAILS) for how in self._seen.broken.values())
        return "cpu" if failed else self._devices()[-1]

    def _round(self, name: str, pairs: Iterable[Pair], attempt: int = 0) -> None:
        """Have pairs of places that have no place in common exchange messages."""
        speakers = [place.rank for place in self._seen.places]
        shared = {
            "device": self._device_of_links(),
            "limit": self._options.max_size,
            "seconds": self._options.seconds,
            # Two directions, each with a last message that can take a whole window, end before the deadline.
            "window": min(RATE_SECONDS * RATE_GROWTH**attempt, self._options.seconds / 4.4),
            "others": not attempt,
        }
        ends = [end for pair in pairs for end in (pair, pair[::-1])]
        tasks = {
            speakers[own]: {"peer": speakers[peer], "key": f"{name}/{min(own, peer)}", **shared} for own, peer in ends
        }
        results, errors = self._ask(name, "pair", tasks)
        for own, peer in ends:
            both, error = verdicts.undirected(own, peer), errors.get(speakers[own])
            if error is not None:
                before = self._seen.broken.get(both)
                # What one end finds on the path counts before what torch says of it at the other end.
                if before is None or (before.startswith(verdicts.TORCH_FAILS) and error != _LATE):
                    self._seen.broken[both] = f"{verdicts.TORCH_FAILS} ({error})"
                continue
            result: PairResult = results[speakers[own]]
            if result.fault:
                self._seen.broken[both] = result.fault
            else:
                self._seen.rates[own, peer] = max(result.rate, self._seen.rates.get((own, peer), 0.0))
                self._seen.trips[both] = min(result.rtt, self._seen.trips.get(both, result.rtt))
                self._seen.others.setdefault(both, []).extend(result.others)


def _departure(reply: Reply) -> str:
    """Return how a rank is lost that sends this; empty if it is not."""
    words = reply.error or bytes(reply.result).decode(errors="replace")  # msgspec has not looked into it
    if any(reason in words for reason in _STARVED):
        return control.NO_DESCRIPTOR
    return reply.gone if reply.gone in ("", *control.DEPARTURES) else "ended"


def _first_error(errors: Mapping[int, str]) -> str:
    """Return an error of these, if there is one: those that wait for a rank that has failed are only late."""
    return next((error for _, error in sorted(errors.items()) if error != _LATE), _LATE if errors else "")
