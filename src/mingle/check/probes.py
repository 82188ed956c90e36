"""What a rank does when rank 0 asks: collectives of torch, messages of a pair, and probes of the path below."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mingle.check import control
from mingle.job import Job
from mingle.network import interfaces

RATE_SECONDS = 0.3
"""How long one direction of a pair is measured; a message that has begun is finished."""
PATH_SECONDS = 0.25
FIRST_BYTES = 1 << 16
RIGHT_NUMBERS = 1 << 15
"""Per rank: large enough to fill packets of any MTU."""
WORK_ROUNDS = 2_000_000
"""A piece of work of some tens of milliseconds: longer than the kernel's time slices, so that it shows a busy CPU."""


def networks() -> list[dict[str, Any]]:
    """Return this machine's addresses with their interface, network and MTU, but for loopback and link-local ones."""
    return [
        {"interface": nic.name, "address": str(at.ip), "network": str(at.network), "mtu": mtu(nic.name)}
        for nic in interfaces.scan()
        for at in nic.addresses
        if not at.is_loopback and not at.is_link_local
    ]


def mtu(interface: str) -> int:
    """Return an interface's MTU; 0 where the system does not tell."""
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except (OSError, ValueError):
        return 0


class Probes:
    """The state behind a rank's tasks: the process group, and the group of the pair being tested."""

    def __init__(self, job: Job, store: dist.Store, token: str) -> None:
        self._job, self._store, self._token = job, store, token

    def actions(self) -> dict[str, Callable[..., Any]]:
        """Return what rank 0 can ask for, by name."""
        return {
            "roster": lambda **_: None,
            "group": self.group,
            "right": self.right,
            "fast": self.fast,
            "work": lambda **_: {"work": work()},
            "path": self.path,
            "pair": self.pair,
            "alive": self.alive,
        }

    def _device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device("cpu")
        torch.cuda.set_device(self._job.local_rank)
        return torch.device("cuda", self._job.local_rank)

    def group(self, *, backend: str, seconds: float) -> None:
        """Make the process group."""
        if "nccl" in backend:
            self._device("cuda")
        dist.init_process_group(
            backend,
            store=self._store,
            rank=self._job.rank,
            world_size=self._job.world_size,
            timeout=timedelta(seconds=seconds),
        )

    def right(self, *, name: str, device: str, **_: Any) -> str:
        """Run one collective; return what is wrong with its result, empty if nothing is."""
        rank, size, at = self._job.rank, self._job.world_size, self._device(device)
        ranks = torch.arange(size, dtype=torch.float32, device=at)
        # A result of rows, one for each rank, in which each number is known.
        mine = torch.full((size, RIGHT_NUMBERS), float(rank), device=at)
        expected = ranks.sum().expand(size, RIGHT_NUMBERS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer names for the same collectives
            if name == "all_reduce":
                dist.all_reduce(mine)
            elif name == "broadcast":
                dist.broadcast(mine, size - 1)
                expected = ranks[-1].expand(size, RIGHT_NUMBERS)
            elif name == "all_gather":
                parts = [torch.empty(RIGHT_NUMBERS, device=at) for _ in range(size)]
                dist.all_gather(parts, mine[0])
                mine, expected = torch.stack(parts), ranks[:, None].expand(size, RIGHT_NUMBERS)
            elif name == "reduce_scatter":
                got = torch.empty(RIGHT_NUMBERS, device=at)
                dist.reduce_scatter(got, list((mine * ranks[:, None]).unbind()))
                mine, expected = got[None], (ranks.sum() * rank).expand(1, RIGHT_NUMBERS)
            else:
                got = torch.empty_like(mine)
                dist.all_to_all_single(got, mine + size * ranks[:, None])
                mine, expected = got, (ranks + size * rank)[:, None].expand(size, RIGHT_NUMBERS)
        different = int((mine != expected).sum().item())
        return f"{different} of {mine.numel()} numbers differ" if different else ""

    def fast(self, *, size: int, count: int, device: str, **_: Any) -> dict[str, Any]:
        """Time ``count`` all_reduces of this many bytes after one that does not count, and this host's own work."""
        at = self._device(device)
        numbers = torch.zeros(max(1, size // 4), dtype=torch.float32, device=at)
        dist.all_reduce(numbers)
        _settle(at)
        started = time.perf_counter()
        for _repeat in range(count):
            dist.all_reduce(numbers)
        _settle(at)
        return {"seconds": (time.perf_counter() - started) / count, "work": work()}

    def alive(self, *, address: str, port: int, **_: Any) -> float:
        """Return how long ago that rank heard rank 0."""
        return control.ask_alive(address, port, self._token)

    def path(self, *, peer: dict[str, Any], others: list[list[str]], seconds: float) -> dict[str, Any]:
        """Probe the path to a peer by plain TCP: small messages, large ones both ways, and the other shared networks.

        Args:
            peer: its rank, address and port.
            others: for each other network: its name, this machine's address there, and the peer's.
            seconds: the deadline.
        """
        limit = min(control.CONNECT_SECONDS, seconds / 3)
        step = "no TCP connection"
        try:
            connection, _ = control.visit(peer["address"], peer["port"], self._token, limit)
            with connection:
                step = "a small message is not answered"
                rtt = min(control.exchange(connection, control.SMALL_BYTES, control.SMALL_BYTES) for _ in range(5))
                step = "large"
                control.exchange(connection, control.LARGE_BYTES, 0)
                control.exchange(connection, 0, control.LARGE_BYTES)
        except OSError as error:
            return {"fault": step if step == "large" else f"{step} ({error})"}
        rates = {name: self._rates(peer, own, theirs) for name, own, theirs in others}
        return {"rtt": rtt, "others": {name: rate for name, rate in rates.items() if rate}}

    def _rates(self, peer: dict[str, Any], own: str, theirs: str) -> tuple[float, float] | None:
        """Return the rates to a peer by another network and by the one in use; None: the other one leads elsewhere."""
        try:
            found = []
            for source, address in ((own, theirs), ("", peer["address"])):
                connection, answer = control.visit(address, peer["port"], self._token, 1.0, source)
                with connection:
                    if answer["rank"] != peer["rank"]:
                        return None
                    took, until = list[float](), time.perf_counter() + PATH_SECONDS
                    while not took or time.perf_counter() < until:
                        took.append(control.exchange(connection, control.LARGE_BYTES, 0))
                    # The mean: a limit on traffic lets bursts pass.
                    found.append(control.LARGE_BYTES * len(took) / sum(took))
        except (OSError, ValueError):
            return None
        return found[0], found[1]

    def pair(self, *, key: str, first: bool, device: str, limit: int, seconds: float) -> dict[str, Any]:
        """Exchange messages with one other rank through a process group of the two: round trip, and rate one way.

        Both ends call this at the same time. Each returns the rate at which it sent.
        """
        at = self._device(device)
        store = dist.PrefixStore(f"mingle-check/{key}", self._store)
        rank = 0 if first else 1
        patience = timedelta(seconds=seconds)
        kind: Any = dist.ProcessGroupNCCL if at.type == "cuda" else dist.ProcessGroupGloo
        group = kind(store, rank, 2, patience)
        small = torch.zeros(1, dtype=torch.int64, device=at)
        payload = torch.zeros(limit, dtype=torch.uint8, device=at)  # here: its pages cost as much time as a message

        def send(tensor: torch.Tensor) -> None:
            group.send([tensor], 1 - rank, 0).wait()
            _settle(at)

        def receive(tensor: torch.Tensor) -> None:
            group.recv([tensor], 1 - rank, 0).wait()
            _settle(at)

        def send_for_a_while() -> float:
            size, sent, started = min(FIRST_BYTES, limit), 0, time.perf_counter()
            while time.perf_counter() < started + RATE_SECONDS:
                send(small.fill_(size))
                send(payload[:size])
                receive(small)
                sent, size = sent + size, min(8 * size, limit)
            rate = sent / (time.perf_counter() - started)
            send(small.fill_(0))
            return rate

        def receive_for_a_while() -> None:
            while True:
                receive(small)
                if not (size := int(small.item())):
                    return
                receive(payload[:size])
                send(small)

        trips = []
        for _ in range(20):
            started = time.perf_counter()
            for turn in (send, receive) if first else (receive, send):
                turn(small)
            trips.append(time.perf_counter() - started)
        if first:
            rate = send_for_a_while()
            receive_for_a_while()
        else:
            receive_for_a_while()
            rate = send_for_a_while()
        return {"rtt": median(trips), "rate": rate, "work": work()}


def work() -> tuple[float, float]:
    """Do a fixed piece of work; return its wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _round in range(WORK_ROUNDS):
        pass
    return time.perf_counter() - wall, time.thread_time() - cpu


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpus() -> int:
    """Return the number of GPUs that this process sees and NCCL can use."""
    return torch.cuda.device_count() if dist.is_nccl_available() and torch.cuda.is_available() else 0


def connect_store(seconds: float) -> dist.Store:
    """Return the job's store, by torch's own ``env://`` road."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))[0]
    return store
