"""Judge what a check has seen: which rank, machine, pair or direction is at fault. Pure functions.

A fault explains others: a rank that has stopped hangs every collective, and a busy machine makes all its links look
slow. So `judge` looks for the fundamental faults first and blames nothing on a machine that one of them explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated

from msgspec import Meta, Struct, field

SLOW_FACTOR = 4.0
"""A link is slow below the reference rate divided by this: smaller differences come from load as well."""
GAP_FACTOR = 2.0
"""Slow links are this far below all others: load spreads the rates as widely, but without a gap."""
FASTER_FACTOR = 2.5
"""Another network counts as faster from this factor on, measured by the same program on both."""
BUSY_FACTOR = 3.0
"""A rank's host time counts as long from this factor over the median of the others on."""
BUSY_SECONDS = 0.02
"""A difference of host time below this is noise."""
REFERENCE_QUANTILE = 0.75
"""The share of links up to the reference rate: in a job of three, one slow machine has two thirds of all links."""

LARGE = "large"
"""What `Evidence.broken` says of a pair between which small messages pass and large ones do not."""
TORCH_FAILS = "torch's messages fail"
"""How the words begin for a pair between which plain TCP passes, as far as is known."""

Pair = tuple[int, int]
Figure = Annotated[float, Meta(ge=0)]
Divisor = Annotated[float, Meta(ge=1e-9)]
"""A measured figure by which another one is divided."""


class CheckedRank(Struct, frozen=True):
    """An end of the links: a machine, or a rank where all ranks are on one machine."""

    name: str
    rank: int = 0
    """The rank that speaks for the machine."""
    address: str = ""
    interface: str = ""
    mtu: int = 0

    def __str__(self) -> str:
        mtu = f", MTU {self.mtu}" if self.mtu else ""
        return f"{self.name} ({self.interface or 'unknown interface'} {self.address}{mtu})"


class Other(Struct, frozen=True):
    """A network that a pair shares besides the one in use: rates by the same plain TCP program, in bytes/s."""

    network: str
    interfaces: tuple[str, str]
    rate: Figure
    rate_in_use: Divisor


class Step(Struct, frozen=True):
    """A step of a check: its status is ``ok``, ``lost`` or an error."""

    name: str
    status: str
    seconds: float


class Bandwidth(Struct, frozen=True):
    """The figures of all_reduce at one size, by the terms of nccl-tests."""

    device: str
    size: int
    seconds: float
    algbw: float
    busbw: float


class Evidence(Struct, kw_only=True):
    """What was seen. Places and ranks are numbered; a rate belongs to a directed pair, a fault to both directions."""

    places: Sequence[CheckedRank] = ()
    place_of: Mapping[int, int] = field(default_factory=dict)
    """The place of each rank."""
    backend: str = ""
    why_gloo: str = ""
    """Why NCCL was not chosen, although a GPU or its driver is there."""
    steps: list[Step] = field(default_factory=list)
    all_reduce: list[Bandwidth] = field(default_factory=list)
    unreached: Mapping[int, str] = field(default_factory=dict)
    """Ranks that found rank 0 and did not reach its check, with their machines."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that did not see the end: ``ended``, ``silent``, ``interrupted``, out of ``descriptors``, or ``cut`` (other
    ranks still reach it)."""
    failed: list[str] = field(default_factory=list)
    """Collectives that did not finish or failed, in words."""
    wrong: list[str] = field(default_factory=list)
    """Collectives with a wrong result, in words."""
    broken: dict[Pair, str] = field(default_factory=dict)
    """Pairs whose test failed: `LARGE`, or the failure in words."""
    rates: dict[Pair, float] = field(default_factory=dict)
    """Bytes per second."""
    trips: dict[Pair, float] = field(default_factory=dict)
    """Round trips in seconds."""
    others: dict[Pair, list[Other]] = field(default_factory=dict)
    same_gpu: Sequence[Sequence[int]] = ()
    """Ranks that NCCL was to connect and that would use the same GPU."""
    without_gpu: Mapping[int, str] = field(default_factory=dict)
    """A rank that NCCL was to connect and that has no GPU, and why."""
    work: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The wall and the CPU seconds that the same piece of work takes each rank."""
    defect: str = ""
    """An exception of the check itself."""


class Verdict(Struct, frozen=True):
    """One fault, and the names of the places it is blamed on."""

    kind: str
    where: tuple[str, ...]
    observation: str
    cause: str
    fix: str


class PairReport(Struct, frozen=True):
    """What was measured from one place to another."""

    one: int = field(name="from")
    other: int = field(name="to")
    rtt: float | None = None
    rate: float | None = None
    fault: str | None = None


class RankReport(Struct, frozen=True):
    """A rank, its place, and the wall and the CPU seconds of its work."""

    rank: int
    host: str
    pid: int | None
    place: int
    host_seconds: tuple[float, float] | None


class Report(Struct, frozen=True, kw_only=True):
    """What is printed, with the same fields whether or not the check came to its end."""

    healthy: bool = False
    verdicts: list[Verdict] = []
    places: Sequence[CheckedRank] = []
    pairs: list[PairReport] = []
    ranks: list[RankReport] = []
    lost: dict[int, str] = {}
    backend: str = ""
    why_gloo: str = ""
    steps: list[Step] = []
    all_reduce: list[Bandwidth] = []
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        """Reject a pair of places that are not there."""
        if not {end for pair in self.pairs for end in (pair.one, pair.other)} <= {*range(len(self.places))}:
            raise ValueError("a pair of no place")


_COMPARE_ROUTES = (
    "compare `ip route get {1.address}` on {0.name} with another machine's, and the counters of the ports between them."
)
# For each kind of fault: the observation, the likely cause and the fix, of the places that it is blamed on.
_FAULTS = {
    "defect": (
        "the check failed on rank 0: {error}.",
        "a defect of mingle-check, or ranks with different versions of mingle",
        "compare `mingle-check --version` on the machines, and see the traceback on rank 0's stderr.",
    ),
    "control": (
        "rank {rank} on {0.name} found rank 0 and did not reach the check's TCP port there.",
        "a firewall that lets the discovery pass and filters other TCP ports, or a process that has ended or stopped",
        "allow TCP on all ports between these machines, and look at the output on {0.name}.",
    ),
    "rank-ended": (
        "rank {rank} on {0}: its process ended before the check did.",
        "it was killed, by hand or for lack of memory, or it crashed",
        "look at its output and at `dmesg` on {0.name}.",
    ),
    "rank-silent": (
        "rank {rank} on {0}: its process does not answer, not even on a connection of its own.",
        "it is stopped (SIGSTOP, a debugger, a frozen container), or its machine has lost power or its network",
        "look for a process in state T on {0.name} (`ps -eo pid,stat,args`), then at the machine itself.",
    ),
    "rank-descriptors": (
        "rank {rank} on {0}: its process has no file descriptor left (too many open files).",
        "a limit that is too low for a job of this size, or another program or a library that holds many files",
        "compare `ulimit -n` on {0.name} with the number of files in /proc/PID/fd, and raise the limit.",
    ),
    "rank-interrupted": (
        "rank {rank} on {0}: it was interrupted by Ctrl-C or SIGTERM.",
        "a person or a job scheduler ended the check there",
        "start the check again.",
    ),
    "machine": (
        "{0} and every other machine do not reach each other: {how}.",
        "a firewall on this machine, or its interface or cable",
        "run `mingle-discover doctor` on {0.name}.",
    ),
    "pair": (
        "{0} and {1} do not reach each other: {how}.{others}",
        "a firewall, a security group or an access list that filters TCP between these two addresses",
        "allow TCP between {0.address} and {1.address} on all ports; `mingle-discover ping` on both shows which way is "
        "filtered.",
    ),
    "mtu": (
        "small messages pass and large ones are lost between {pairs}.",
        "the network carries smaller packets than the MTU of these interfaces ({mtu}): jumbo frames that a switch, a "
        "bridge or a tunnel drops",
        "give all machines the MTU that the network carries (`ip link set {0.interface} mtu 1500`), or raise it on the "
        "switch; `ping -M do -s {payload} ADDRESS` shows whether full packets pass.",
    ),
    "messages": (
        "{how} between {pairs}; no plain TCP connection between them failed.{by}",
        "the error in brackets; if it is a deadline, a --timeout that is too short for these machines, or a firewall "
        "that filters some TCP ports only",
        "start the check again with a longer --timeout, and NCCL_DEBUG=INFO for NCCL; if the pair is still named, "
        "allow TCP on all ports.",
    ),
    "gpu-shared": (
        "{ranks} use the same GPU, which NCCL refuses.",
        "more ranks than GPUs, or each rank was shown the same GPU (CUDA_VISIBLE_DEVICES)",
        "start one rank for each GPU (`--nproc-per-node`, `srun --gpus-per-task=1`), or give `--backend gloo`.",
    ),
    "gpu-missing": (
        "{rank} {why}, and `--backend nccl` needs a GPU for each rank.",
        "a machine without a GPU, a hidden or failed one, or a build of torch without CUDA",
        "compare `python -m torch.utils.collect_env` of the machines, or give `--backend gloo` on all of them.",
    ),
    "cpu-busy": (
        "rank {rank} on {0} takes {wall:.0f} ms for a piece of work that takes the others {usual:.0f} ms; it had the "
        "CPU for {cpu:.0f} ms of that time.",
        "other processes take its cores, or its container has too small a share of them",
        "look at `top` on {0.name}, and at the CPU limit of its container.",
    ),
    "cpu-slow": (
        "rank {rank} on {0} takes {wall:.0f} ms of CPU for a piece of work that takes the others {usual:.0f} ms.",
        "its CPU runs at a lower clock: power saving, heat, or an older model",
        "look at `cpupower frequency-info` and the temperatures on {0.name}.",
    ),
    "interface": (
        "the job uses {used}, and the network {network} ({interfaces}), which {hosts} share as well, is {gain:.1f} "
        "times as fast.",
        "MINGLE_INTERFACE, GLOO_SOCKET_IFNAME or --interface names the slower network, or mingle has chosen it without "
        "a name: it measures no speed",
        "set {faster} (NCCL: NCCL_SOCKET_IFNAME).",
    ),
    "slow-machine": (
        "all links {ways} {0} are slow: {rate} where the others carry {usual}.",
        "its cable, its port on the switch or its interface: a lower speed, errors, or a limit on traffic",
        "look at `ethtool {0.interface}` and `ip -s link show {0.interface}` on {0.name}, and at `tc qdisc` and the "
        "firewall there.",
    ),
    "slow-pair": (
        "the link between {0} and {1} carries {rate} where the others carry {usual}.",
        "the route between these two: another switch, an uplink that is full, or a limit on traffic",
        _COMPARE_ROUTES,
    ),
    "slow-direction": (
        "the link from {0} to {1}, in this direction only, carries {rate} where the others carry {usual}.",
        "a limit or errors on what {0.name} sends or {1.name} receives from it",
        _COMPARE_ROUTES,
    ),
    "wrong-result": (
        "wrong result: {results}.",
        "different versions of torch or of the backend, or faulty memory",
        "compare `python -m torch.utils.collect_env` of the machines.",
    ),
    "collective": (
        "{failures}; no pair of machines fails alone{by}.",
        "a fault of the backend or of a device, one that has passed meanwhile, or a --timeout that is too short",
        "start the check again, with `--backend gloo` to leave the devices out; NCCL_DEBUG=INFO says what NCCL does.",
    ),
}
KINDS = frozenset(_FAULTS)


def _verdict(kind: str, *places: CheckedRank, **words: object) -> Verdict:
    observation, cause, fix = (text.format(*places, **words) for text in _FAULTS[kind])
    return Verdict(kind, tuple(place.name for place in places), observation, cause, fix)


def rounds(count: int) -> Iterator[list[Pair]]:
    """Yield the rounds of a round-robin tournament by the circle method: no place is in two pairs of a round."""
    if count < 2:
        return
    ring: list[int] = [*range(count), *([-1] if count % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        ring[1:] = [ring[-1], *ring[1:-1]]


def reference(rates: Mapping[Pair, float]) -> float:
    """Return the rate that a healthy link of this job has: the upper quartile; 0 without any rate."""
    ordered = sorted(rates.values())
    return ordered[round(REFERENCE_QUANTILE * (len(ordered) - 1))] if ordered else 0.0


def slow_links(rates: Mapping[Pair, float]) -> list[Pair]:
    """Return the directed pairs whose rate is far below the reference, with a gap to all others."""
    ordered, limit = sorted(rates, key=lambda pair: rates[pair]), reference(rates) / SLOW_FACTOR
    slow = [pair for pair in ordered if rates[pair] < limit]
    while slow and rates[ordered[len(slow)]] < GAP_FACTOR * rates[slow[-1]]:
        slow.pop()
    return sorted(slow)


def busy_ranks(seen: Evidence) -> dict[int, float]:
    """Return the ranks whose host time is far above the others', and the usual host time."""
    found = {}
    for rank, (wall, _) in seen.work.items():
        others = [other for each, (other, _) in seen.work.items() if each != rank]
        if others and wall > max(BUSY_FACTOR * median(others), BUSY_SECONDS + median(others)):
            found[rank] = median(others)
    return found


def undirected(one: int, other: int) -> Pair:
    """Return the pair of two places without a direction."""
    return min(one, other), max(one, other)


def judge(seen: Evidence) -> list[Verdict]:
    """Return the faults; none if the job is healthy."""
    found = [_verdict("control", CheckedRank(host), rank=rank) for rank, host in seen.unreached.items()]
    if seen.defect:
        found.append(_verdict("defect", error=seen.defect))
    busy = busy_ranks(seen)
    lost = {rank: how for rank, how in sorted(seen.lost.items()) if rank not in busy or how not in ("silent", "cut")}
    gone = {rank: how for rank, how in lost.items() if how != "cut"}
    found += [_verdict(f"rank-{how}", seen.places[seen.place_of[rank]], rank=rank) for rank, how in gone.items()]
    found += [_shared_gpu(seen, ranks) for ranks in seen.same_gpu]
    for rank, why in seen.without_gpu.items():
        place = seen.places[seen.place_of[rank]]
        name = place.name if place.name.endswith(f" rank {rank}") else f"rank {rank} on {place.name}"
        found.append(_verdict("gpu-missing", place, rank=name, why=why))
    found += [_busy(seen, rank, usual) for rank, usual in sorted(busy.items())]
    excused = {seen.place_of[rank] for rank in (*gone, *busy)}
    cut = [undirected(seen.place_of[0], seen.place_of[rank]) for rank in lost.keys() - gone.keys()]
    broken = dict.fromkeys(cut, "the connection between them fell silent")
    broken |= {pair: how for pair, how in seen.broken.items() if excused.isdisjoint(pair)}
    torch_fails = {pair: how for pair, how in broken.items() if how.startswith(TORCH_FAILS)}
    large = [pair for pair, how in broken.items() if how == LARGE]
    found += _broken(seen, {pair: how for pair, how in broken.items() if pair not in large and pair not in torch_fails})
    if large:
        places = _places(seen, large)
        mtu = max(place.mtu for place in places) or 1500
        headers = 48 if any(":" in place.address for place in places) else 28  # of IP and ICMP
        found.append(_verdict("mtu", *places, pairs=_named(seen, large), mtu=mtu, payload=mtu - headers))
    if torch_fails:
        how = next(iter(torch_fails.values()))
        by = " NCCL was not tried on pairs after that." if "nccl" in seen.backend and not seen.failed else ""
        found.append(_verdict("messages", *_places(seen, torch_fails), pairs=_named(seen, torch_fails), how=how, by=by))
    excused |= {place for pair in broken for place in pair}
    rates = {pair: rate for pair, rate in seen.rates.items() if excused.isdisjoint(pair)}
    wrong_network = [] if found else _interface(seen)
    found += wrong_network or _slow(seen, rates)
    if seen.wrong:
        found.append(_verdict("wrong-result", results="; ".join(seen.wrong)))
    if seen.failed and not found:
        by = " over Gloo, and NCCL's own ways were not tried after that" if "nccl" in seen.backend else ""
        found.append(_verdict("collective", failures="; ".join(seen.failed), by=by))
    return found


def _broken(seen: Evidence, broken: dict[Pair, str]) -> Iterator[Verdict]:
    count = len(seen.places)
    for number, place in enumerate(seen.places):
        own = [pair for pair in broken if number in pair]
        if count > 2 and len(own) == count - 1:  # of three places, two broken pairs always have one in common
            yield _verdict("machine", place, how=broken[own[0]])
            broken = {pair: how for pair, how in broken.items() if pair not in own}
    for (one, other), how in broken.items():
        others = " Each of them reaches other machines." if count > 2 else ""
        yield _verdict("pair", seen.places[one], seen.places[other], how=how, others=others)


def _named(seen: Evidence, pairs: Iterable[Pair]) -> str:
    return "; ".join(f"{seen.places[one]} and {seen.places[other]}" for one, other in pairs)


def _places(seen: Evidence, pairs: Iterable[Sequence[int]]) -> list[CheckedRank]:
    return [seen.places[number] for number in sorted({number for pair in pairs for number in pair})]


def _shared_gpu(seen: Evidence, ranks: Sequence[int]) -> Verdict:
    places = _places(seen, [[seen.place_of[rank] for rank in ranks]])
    names = [place.name for place in places]
    told = " and ".join(names) if len(set(names)) > 1 else f"ranks {' and '.join(map(str, ranks))} on {names[0]}"
    return _verdict("gpu-shared", *places, ranks=told)


def _busy(seen: Evidence, rank: int, usual: float) -> Verdict:
    wall, cpu = (1e3 * seconds for seconds in seen.work[rank])
    kind = "cpu-busy" if wall > 2 * cpu else "cpu-slow"
    return _verdict(kind, seen.places[seen.place_of[rank]], rank=rank, wall=wall, cpu=cpu, usual=1e3 * usual)


def _interface(seen: Evidence) -> list[Verdict]:
    """Return that the wrong network is in use if another one is faster between most pairs."""
    faster: dict[str, dict[Pair, Other]] = defaultdict(dict)
    for pair, others in seen.others.items():
        for other in others:
            if other.rate > FASTER_FACTOR * other.rate_in_use:
                faster[other.network][pair] = other
    network, cases = max(faster.items(), key=lambda each: len(each[1]), default=("", {}))
    if 4 * len(cases) <= len(seen.places) * (len(seen.places) - 1):
        return []
    places = _places(seen, cases)
    names = sorted({name for other in cases.values() for name in other.interfaces})
    return [
        _verdict(
            "interface",
            *places,
            used=", ".join(sorted({place.interface for place in places})),
            network=network,
            interfaces=", ".join(names),
            hosts=", ".join(place.name for place in places),
            gain=median(other.rate / other.rate_in_use for other in cases.values()),
            faster=f"MINGLE_INTERFACE={names[0]} on every machine"
            if len(names) == 1
            else f"MINGLE_INTERFACE on each machine to its own of {', '.join(names)}",
        )
    ]


def _slow(seen: Evidence, rates: Mapping[Pair, float]) -> Iterator[Verdict]:
    usual, slow = _speed(reference(rates)), slow_links(rates)
    for number, place in enumerate(seen.places):
        sides = {way: [pair for pair in rates if pair[end] == number] for end, way in enumerate(("from", "to"))}
        bad = {way: pairs for way, pairs in sides.items() if len(pairs) > 1 and all(pair in slow for pair in pairs)}
        if links := [pair for pairs in bad.values() for pair in pairs]:
            rate = _speed(median(rates[pair] for pair in links))
            yield _verdict("slow-machine", place, ways=" and ".join(bad), rate=rate, usual=usual)
            slow = [pair for pair in slow if pair not in links]
    for one, other in slow:
        both = (other, one) in slow
        if not both or one < other:
            kind = "slow-pair" if both else "slow-direction"
            yield _verdict(kind, seen.places[one], seen.places[other], rate=_speed(rates[one, other]), usual=usual)


def _speed(rate: float) -> str:
    return f"{rate / 1e6:,.0f} MB/s" if rate >= 1e7 else f"{rate / 1e6:.2f} MB/s"
