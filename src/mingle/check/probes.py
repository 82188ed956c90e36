"""What a rank does when rank 0 asks: collectives of torch, messages of a pair, and probes of the path below."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct

from mingle.check.control import CONNECT_SECONDS, dial, exchange, greet
from mingle.check.messages import Introduction, LocalNetwork, ProbedRank
from mingle.check.verdicts import LARGE, Divisor, Figure, Other
from mingle.job import Job
from mingle.network import interfaces

NO_CONNECTION = "no TCP connection"
STALL_SECONDS = 5.0
"""Policing can stall TCP for this long."""
SMALL_BYTES, LARGE_BYTES = 64, 1 << 18
PATH_SECONDS, PATH_BYTES = 0.25, 1 << 20
"""How long a path is measured, by messages that take far longer than a busy machine needs to wake a process."""
FIRST_BYTES = 1 << 16
"""The size of the first message of a pair; each further one is `GROWTH` times as large, up to the limit."""
GROWTH = 8
ROUND_TRIPS = 20
RIGHT_NUMBERS = 1 << 15
"""Per rank: large enough to fill packets of any MTU."""
TORCH_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Otherwise torch ends the process when a collective of NCCL is late, and with it the search for the fault; the last
one has it warn of each message of a pair."""
_DRIVER = Path("/dev/nvidiactl")
NO_DEVICE = 100
"""The driver's answer where no GPU is visible (CUDA_ERROR_NO_DEVICE)."""
WORK_ROUNDS = 2_000_000
"""A piece of work of some tens of milliseconds: longer than the kernel's time slices."""


def networks() -> list[LocalNetwork]:
    """Return this machine's addresses with their interface, network and MTU, but for loopback and link-local ones."""
    return [
        LocalNetwork(nic.name, str(at.ip), str(at.network), _mtu(nic.name))
        for nic in interfaces.scan()
        for at in nic.addresses
        if not at.is_loopback and not at.is_link_local
    ]


def _mtu(interface: str) -> int:
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except (OSError, ValueError):
        return 0


def load_driver() -> int:
    """Load NVIDIA's driver, if there is one that torch would use. It can take many seconds, or never end.

    torch's own calls do the same and hold the GIL meanwhile, so that this process could neither answer nor be stopped
    by Ctrl-C.

    Returns:
        The driver's error (CUresult); 0: there is none, or no driver.
    """
    if torch.backends.cuda.is_built():
        with contextlib.suppress(OSError, AttributeError):
            return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    return 0


def has_gpu() -> bool:
    """Return whether this process sees a GPU that NCCL can use."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def gpu(local_rank: int) -> tuple[str, str]:
    """Return the GPU that a rank uses with NCCL, and why it uses none: both are empty where there is none.

    It is named by its UUID, and by what NCCL is told to take for its machine, if anything.
    """
    if not has_gpu():
        hidden = "sees no GPU beside its NVIDIA driver (CUDA_VISIBLE_DEVICES, or a torch without CUDA)"
        return "", hidden if _DRIVER.exists() else ""
    try:
        uuid = str(torch.cuda.get_device_properties(_gpu(local_rank)).uuid)
        return " ".join(filter(None, (os.environ.get("NCCL_HOSTID"), uuid))), ""
    except Exception as error:  # a GPU, or its driver, fails in one of many ways
        return "", f"sees a GPU that fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"


def _gpu(local_rank: int) -> torch.device:
    # A launcher can show each rank its own GPU alone.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


class PairResult(Struct, omit_defaults=True):
    """What a rank has found between itself and another one: a fault, or figures."""

    fault: str = ""
    rtt: Figure = 0.0
    rate: Figure = 0.0
    others: list[Other] = []


class Probes:
    """What rank 0 can ask of a rank: each method is a task by its name, and rank 0 reads what its return type says."""

    def __init__(self, job: Job, store: dist.Store, roster: list[Introduction]) -> None:
        self._job, self._store, self._roster = job, store, roster

    def _device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device("cpu")
        device = _gpu(self._job.local_rank)
        torch.cuda.set_device(device)
        return device

    def gpu(self) -> tuple[str, str]:
        """Return the GPU of this rank, and why it uses none."""
        error = load_driver()
        if error not in (0, NO_DEVICE) and _DRIVER.exists():
            return "", f"has a GPU whose driver fails (CUDA error {error})"  # torch would load it once more
        return gpu(self._job.local_rank)

    def group(self, *, backend: str, seconds: float) -> None:
        """Make the process group."""
        if "nccl" in backend:
            os.environ.update(TORCH_NCCL)
            dist.set_debug_level(dist.DebugLevel.OFF)  # DETAIL brings the watchdog back
            self._device("cuda")
        self._limit_store(seconds)
        rank, size = self._job.rank, self._job.world_size
        dist.init_process_group(
            backend, store=self._store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )

    def _limit_store(self, seconds: float) -> None:
        """Let no call of torch hold the store, which serves one at a time, for longer than a step takes."""
        self._store.set_timeout(timedelta(seconds=seconds))

    def right(self, *, collective: str, device: str) -> str:
        """Run one collective; return what is wrong with its result, empty if nothing is."""
        rank, size, at = self._job.rank, self._job.world_size, self._device(device)
        ranks = torch.arange(size, dtype=torch.float32, device=at)[:, None]
        mine = torch.full((size, RIGHT_NUMBERS), float(rank), device=at)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer names for the same collectives
            if collective == "all_reduce":
                dist.all_reduce(mine)
                got, expected = mine, ranks.sum()
            elif collective == "broadcast":
                dist.broadcast(mine, size - 1)
                got, expected = mine, ranks[-1]
            elif collective == "all_gather":
                parts = list(torch.empty_like(mine).unbind())
                dist.all_gather(parts, mine[0])
                got, expected = torch.stack(parts), ranks
            elif collective == "reduce_scatter":
                got, expected = torch.empty_like(mine[0]), ranks.sum() * rank
                dist.reduce_scatter(got, list((mine * ranks).unbind()))
            else:
                got, expected = torch.empty_like(mine), ranks + size * rank
                dist.all_to_all_single(got, mine + size * ranks)
        different = int((got != expected).sum().item())
        return f"{different} of {got.numel()} numbers differ" if different else ""

    def work(self, *, seconds: float) -> tuple[Figure, Figure]:
        """Repeat a fixed piece of work for this long; return its mean wall and CPU seconds."""
        wall, cpu, pieces = time.perf_counter(), time.thread_time(), 0
        while not pieces or time.perf_counter() - wall < seconds:
            for _round in range(WORK_ROUNDS):
                pass
            pieces += 1
        return (time.perf_counter() - wall) / pieces, (time.thread_time() - cpu) / pieces

    def fast(self, *, size: int, count: int, device: str) -> Divisor:
        """Return the mean seconds of ``count`` all_reduces of this many bytes, after one that does not count."""
        at = self._device(device)
        numbers = torch.zeros(max(1, size // 4), dtype=torch.float32, device=at)
        dist.all_reduce(numbers)
        _settle(at)
        started = time.perf_counter()
        for _repeat in range(count):
            dist.all_reduce(numbers)
        _settle(at)
        return (time.perf_counter() - started) / count

    def path(self, *, peer: int, seconds: float) -> str:
        """Probe the path to a rank by plain TCP: small messages, then large ones both ways; return the fault.

        Args:
            peer: the other rank.
            seconds: the limit of the connect, and of each message.
        """
        there, step = self._roster[peer], NO_CONNECTION
        try:
            with dial(there.address, there.port, seconds=seconds) as connection:
                step = "a small message is not answered"
                greet(connection, there)
                for _repeat in range(5):
                    exchange(connection, SMALL_BYTES, SMALL_BYTES)
                step = LARGE
                exchange(connection, LARGE_BYTES, 1)
                exchange(connection, 1, LARGE_BYTES)
        except (OSError, EOFError, ValueError) as error:
            reason = "timed out" if isinstance(error, BlockingIOError) else str(error) or "the connection ended"
            return step if step == LARGE else f"{step} ({reason})"
        return ""

    def pair(
        self, *, peer: int, key: str, device: str, limit: int, seconds: float, window: float, others: bool
    ) -> PairResult:
        """Probe the path to a rank, and exchange messages with it by torch. Both ranks of a pair do this at once.

        Args:
            peer: the other rank.
            key: a name for the process group of the two.
            device: ``cpu`` or ``cuda``.
            limit: the size of the largest message.
            seconds: the deadline of the step, and the patience of torch.
            window: how many seconds one direction is measured; a message that has begun is finished.
            others: whether the lower rank measures the other networks that the two share.
        """
        # An unreachable path shows before the deadline of the step, also where that is short.
        if fault := self.path(peer=peer, seconds=min(CONNECT_SECONDS, seconds / 2)):
            return PairResult(fault)
        first, stall = self._job.rank < peer, min(STALL_SECONDS, seconds / 8)
        mine, theirs = self._roster[self._job.rank], self._roster[peer]
        found = self._other_networks(mine, theirs, stall) if others and first else []
        rtt, rate = self._messages(1 if first else 0, key, self._device(device), limit, seconds, window)
        return PairResult(rtt=rtt, rate=rate, others=found)

    def _other_networks(self, mine: Introduction, theirs: Introduction, stall: float) -> list[Other]:
        """Return the networks that two machines share besides the one in use, with the rate of both.

        Networks that do not answer take this many seconds each; after twice as many seconds no further one is tried.
        """
        until = time.monotonic() + 2 * stall
        used = {each.network for each in mine.networks if each.address == mine.address}
        found = []
        for here, there in itertools.product(mine.networks, theirs.networks):
            if time.monotonic() > until:
                break
            if here.network == there.network and here.network not in used and mine.node != theirs.node:
                rate = path_rate(theirs, there.address, here.address, stall)
                in_use = path_rate(theirs, theirs.address, stall=stall)
                if rate and in_use:
                    found.append(Other(here.network, (here.interface, there.interface), rate, in_use))
        return found

    def _messages(
        self, other: int, key: str, at: torch.device, limit: int, seconds: float, window: float
    ) -> tuple[float, float]:
        """Exchange messages through a process group of two: the round trip, and the rate at which this rank sends.

        Args:
            other: the other rank's number in the group: 1 if this rank begins.
            key: a name for the group.
            at: where the messages lie.
            limit: the size of the largest message.
            seconds: the patience of torch.
            window: how many seconds one direction is measured.
        """
        self._limit_store(seconds)
        kind: Any = dist.ProcessGroupNCCL if at.type == "cuda" else dist.ProcessGroupGloo
        store = dist.PrefixStore(f"mingle-check/{key}", self._store)
        group = kind(store, 1 - other, 2, timedelta(seconds=seconds))
        if at.type == "cuda":
            group.eager_connect_single_device(at)  # else torch warns, and makes another connection for messages
        least = min(FIRST_BYTES, limit)
        small = torch.zeros(1, dtype=torch.int64, device=at)
        payload = torch.zeros(limit, dtype=torch.uint8, device=at)  # here: its pages cost as much time as a message

        def transfer(tensor: torch.Tensor, outward: bool) -> None:
            (group.send if outward else group.recv)([tensor], other, 0).wait()
            _settle(at)

        def stream(outward: bool) -> float:
            """Send or receive messages, each announced by its size and acknowledged; return the rate."""
            size, moved, elapsed, started = least, 0, 0.0, time.perf_counter()
            while True:
                transfer(small.fill_(size), outward)
                if not (size := int(small.item())):
                    return moved / elapsed
                transfer(payload[:size], outward)
                transfer(small, not outward)
                moved, elapsed = moved + size, time.perf_counter() - started
                size = max(least, min(GROWTH * size, limit, int(window * moved / elapsed))) if elapsed < window else 0

        trips = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            transfer(small, bool(other))
            transfer(small, not other)
            trips.append(time.perf_counter() - started)
        rates = [stream(outward) for outward in (bool(other), not other)]
        if at.type == "cuda":
            # Neither drops its group before both have all: NCCL resets the connections of one that goes.
            store.set(f"done/{1 - other}", "")
            with contextlib.suppress(RuntimeError):  # late: the other end has all of it, or says itself that it has not
                store.wait([f"done/{other}"], timedelta(seconds=min(max(1.0, seconds / 4), CONNECT_SECONDS)))
            # Else torch warns of a group that was not destroyed. Before 2.9 the method was a private one.
            shutdown = getattr(group, "shutdown", None) or group._shutdown
            shutdown()
        return median(trips), rates[0 if other else 1]


def path_rate(peer: ProbedRank, address: str, source: str = "", stall: float = STALL_SECONDS) -> float:
    """Return the rate to a rank by plain TCP, in bytes/s; 0 if the address is unreachable or that of another rank.

    Args:
        peer: what that rank says of itself.
        address: where to reach it.
        source: the address to connect from; empty for any.
        stall: the limit of the connect. A message that makes no progress for this long counts as having taken it.
    """
    took: list[float] = []
    try:
        with dial(address, peer.port, seconds=stall, source=source) as connection:
            greet(connection, peer)
            until = time.perf_counter() + PATH_SECONDS
            while not took or time.perf_counter() < until:
                try:
                    took.append(exchange(connection, PATH_BYTES, 1))
                except BlockingIOError:
                    took.append(stall)
                    break
    except (OSError, EOFError, ValueError):
        return 0.0
    return PATH_BYTES * len(took) / sum(took)  # the mean: a limit on traffic lets bursts pass


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
