"""Judge what the check measured: which rank, machine, pair or direction is at fault. Pure functions.

A fault explains others: a rank that has stopped hangs every collective, and a busy machine makes all its links look
slow. So `judge` looks for the fundamental faults first and blames nothing on a machine that one of them explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct, field

SLOW_FACTOR = 4.0
"""A link is slow below the reference rate divided by this: smaller differences come from load as well."""
FASTER_FACTOR = 2.5
"""Another network counts as faster from this factor on, measured by the same program on both."""
BUSY_FACTOR = 3.0
"""A rank's host time counts as long from this factor over the median of the others on."""
BUSY_SECONDS = 0.02
"""A difference of host time below this is noise."""
REFERENCE_QUANTILE = 0.75
"""The share of links up to the reference rate: in a job of three, one slow machine has two thirds of all links."""

Pair = tuple[int, int]


class Place(Struct, frozen=True):
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
    rate: float
    rate_in_use: float


class Evidence(Struct, kw_only=True):
    """What was seen. Places and ranks are numbered; a rate belongs to a directed pair, a fault to either direction."""

    places: Sequence[Place]
    place_of: Mapping[int, int] = field(default_factory=dict)
    """The place of each rank."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that did not see the end: ``ended``, ``silent``, ``interrupted``, or ``cut`` (others still reach it)."""
    failed: list[str] = field(default_factory=list)
    """Collectives that did not finish or failed, in words."""
    wrong: list[str] = field(default_factory=list)
    """Collectives with a wrong result, in words."""
    broken: dict[Pair, str] = field(default_factory=dict)
    """Pairs whose test failed: ``large`` (small messages pass, large ones do not), else the failure in words."""
    rates: dict[Pair, float] = field(default_factory=dict)
    others: dict[Pair, list[Other]] = field(default_factory=dict)
    host_times: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Each rank's median wall and CPU seconds of the same piece of work."""


class Verdict(Struct, frozen=True):
    """One fault, and the names of the places it is blamed on."""

    kind: str
    where: tuple[str, ...]
    observation: str
    cause: str
    fix: str


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
    """Return the directed pairs whose rate is far below the reference."""
    limit = reference(rates) / SLOW_FACTOR
    return sorted(pair for pair, rate in rates.items() if rate < limit)


def busy_ranks(evidence: Evidence) -> dict[int, float]:
    """Return the ranks whose host time is far above the others', and by which factor."""
    found = {}
    for rank, (wall, _) in evidence.host_times.items():
        others = [other for each, (other, _) in evidence.host_times.items() if each != rank]
        if others and wall > BUSY_FACTOR * median(others) and wall - median(others) > BUSY_SECONDS:
            found[rank] = wall / median(others)
    return found


def judge(evidence: Evidence) -> list[Verdict]:
    """Return the faults; none if the job is healthy."""
    excused = {evidence.place_of[rank] for rank, how in evidence.lost.items() if how != "cut"}
    found = [_lost(evidence, rank, how) for rank, how in sorted(evidence.lost.items()) if how != "cut"]
    broken = {pair: how for pair, how in evidence.broken.items() if excused.isdisjoint(pair)}
    for rank, how in evidence.lost.items():
        if how == "cut" and (pair := _pair(evidence.place_of[0], evidence.place_of[rank])) not in broken:
            broken[pair] = "the connection between them fell silent"
    found += _broken(evidence, {pair: how for pair, how in broken.items() if how != "large"})
    found += _large(evidence, [pair for pair, how in broken.items() if how == "large"])
    busy = {} if found else busy_ranks(evidence)
    found += [_busy(evidence, rank, factor) for rank, factor in sorted(busy.items())]
    excused |= {evidence.place_of[rank] for rank in busy} | {place for pair in broken for place in pair}
    rates = {pair: rate for pair, rate in evidence.rates.items() if excused.isdisjoint(pair)}
    wrong_network = [] if found else _interface(evidence)
    found += wrong_network or _slow(evidence, rates)
    if evidence.wrong:
        found.append(_wrong(evidence))
    if evidence.failed and not found:
        found.append(_hung(evidence))
    return found


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def _lost(evidence: Evidence, rank: int, how: str) -> Verdict:
    place = evidence.places[evidence.place_of[rank]]
    observed, cause, fix = {
        "ended": (
            "its process ended before the check did",
            "it was killed, by hand or for lack of memory, or it crashed",
            f"look at its output and at `dmesg` on {place.name}.",
        ),
        "silent": (
            "its process does not answer, not even on a connection of its own",
            "it is stopped (SIGSTOP, a debugger, a frozen container), or its machine has lost power or its network",
            f"look for a process in state T on {place.name} (`ps -eo pid,stat,args`), then at the machine itself.",
        ),
        "interrupted": ("it was interrupted by Ctrl-C", "a person ended the check there", "start the check again."),
    }[how]
    return Verdict(f"rank-{how}", (place.name,), f"rank {rank} on {place}: {observed}.", cause, fix)


def _broken(evidence: Evidence, broken: Mapping[Pair, str]) -> Iterator[Verdict]:
    count, rest = len(evidence.places), dict(broken)
    for place in range(count):
        own = [pair for pair in rest if place in pair]
        if count > 2 and len(own) == count - 1:  # of three places, two broken pairs always have one in common
            yield Verdict(
                "machine",
                (evidence.places[place].name,),
                f"{evidence.places[place]} and every other machine do not reach each other: {rest[own[0]]}.",
                "a firewall on this machine, or its interface or cable",
                f"run `mingle-discover doctor` on {evidence.places[place].name}.",
            )
            rest = {pair: how for pair, how in rest.items() if pair not in own}
    for (one, other), how in rest.items():
        first, second = evidence.places[one], evidence.places[other]
        yield Verdict(
            "pair",
            (first.name, second.name),
            f"{first} and {second} do not reach each other: {how}. Each of them reaches other machines."
            if count > 2
            else f"{first} and {second} do not reach each other: {how}.",
            "a firewall, a security group or an access list that filters TCP between these two addresses",
            f"allow TCP between {first.address} and {second.address} on all ports; "
            f"`mingle-discover ping` on both shows which way is filtered.",
        )


def _large(evidence: Evidence, pairs: Sequence[Pair]) -> Iterator[Verdict]:
    if pairs:
        shown = "; ".join(f"{evidence.places[one]} and {evidence.places[other]}" for one, other in pairs)
        places = [evidence.places[each] for each in sorted({each for pair in pairs for each in pair})]
        largest = max(place.mtu for place in places) or 1500
        yield Verdict(
            "mtu",
            tuple(place.name for place in places),
            f"small messages pass and large ones are lost between {shown}.",
            f"the network carries smaller packets than the MTU of these interfaces ({largest}): "
            "jumbo frames that a switch, a bridge or a tunnel drops",
            f"give all machines the MTU that the network carries (`ip link set {places[0].interface} mtu 1500`), or "
            f"raise it on the switch; `ping -M do -s {largest - 28} ADDRESS` shows whether full packets pass.",
        )


def _busy(evidence: Evidence, rank: int, factor: float) -> Verdict:
    place = evidence.places[evidence.place_of[rank]]
    wall, cpu = evidence.host_times[rank]
    starved = wall > 2 * cpu
    return Verdict(
        "cpu",
        (place.name,),
        f"rank {rank} on {place} takes {wall * 1e3:.0f} ms for a piece of work that takes the others "
        f"{wall / factor * 1e3:.0f} ms; it had the CPU for {cpu * 1e3:.0f} ms of them.",
        "other processes take its cores, or its container has too small a share of them"
        if starved
        else "its CPU runs at a lower clock: power saving, heat, or an older model",
        f"look at `top` on {place.name}, and at the CPU limit of its container."
        if starved
        else f"look at `cpupower frequency-info` and the temperatures on {place.name}.",
    )


def _interface(evidence: Evidence) -> list[Verdict]:
    """Return that the wrong network is in use if another one is faster between most pairs."""
    faster: dict[str, list[tuple[Pair, Other]]] = {}
    for pair, others in evidence.others.items():
        for other in others:
            if other.rate > FASTER_FACTOR * other.rate_in_use:
                faster.setdefault(other.network, []).append((pair, other))
    count = len(evidence.places)
    for network, cases in sorted(faster.items(), key=lambda each: -len(each[1])):
        if 2 * len(cases) > count * (count - 1) // 2:
            names = sorted({name for _, other in cases for name in other.interfaces})
            used = sorted({evidence.places[each].interface for pair, _ in cases for each in pair})
            gain = median(other.rate / other.rate_in_use for _, other in cases)
            places = sorted({evidence.places[each].name for pair, _ in cases for each in pair})
            return [
                Verdict(
                    "interface",
                    tuple(places),
                    f"the job uses {', '.join(used)}, and the network {network} ({', '.join(names)}), which "
                    f"{', '.join(places)} share as well, is {gain:.1f} times as fast.",
                    "MINGLE_INTERFACE, GLOO_SOCKET_IFNAME or --interface names the slower network",
                    f"set MINGLE_INTERFACE={names[0]} on every machine (NCCL: NCCL_SOCKET_IFNAME).",
                )
            ]
    return []


def _slow(evidence: Evidence, rates: Mapping[Pair, float]) -> Iterator[Verdict]:
    usual = reference(rates)
    rest = slow_links(rates)
    for place, at in enumerate(evidence.places):
        into = [pair for pair in rates if pair[1] == place]
        out = [pair for pair in rates if pair[0] == place]
        sides = [(side, links) for side, links in (("in", into), ("out", out)) if len(links) > 1]
        ways = [(side, links) for side, links in sides if all(pair in rest for pair in links)]
        if ways:
            links = [pair for _, each in ways for pair in each]
            way = {"in": "to", "out": "from"}[ways[0][0]] if len(ways) == 1 else "to and from"
            yield Verdict(
                "slow-machine",
                (at.name,),
                f"all links {way} {at} are slow: {_speed(median(rates[pair] for pair in links))} where the others "
                f"carry {_speed(usual)}.",
                "its cable, its port on the switch or its interface: a lower speed, errors, or a limit on traffic",
                f"look at `ethtool {at.interface}` and `ip -s link show {at.interface}` on {at.name}, and at "
                f"`tc qdisc` and the firewall there.",
            )
            rest = [pair for pair in rest if pair not in links]
    for one, other in rest:
        first, second = evidence.places[one], evidence.places[other]
        both = (other, one) in rest
        if both and one > other:
            continue
        words = f"between {first} and {second}" if both else f"from {first} to {second}, in this direction only,"
        yield Verdict(
            "slow-pair" if both else "slow-direction",
            (first.name, second.name),
            f"the link {words} carries {_speed(rates[one, other])} where the others carry {_speed(usual)}.",
            "the route between these two: another switch, an uplink that is full, or a limit on traffic"
            if both
            else f"a limit or errors on what {first.name} sends or {second.name} receives from it",
            f"compare `ip route get {second.address}` on {first.name} with another machine's, and the counters of the "
            "ports between them.",
        )


def _wrong(evidence: Evidence) -> Verdict:
    return Verdict(
        "wrong-result",
        (),
        f"wrong result: {'; '.join(evidence.wrong)}.",
        "different versions of torch or of the backend, or faulty memory",
        "compare `python -m torch.utils.collect_env` of the machines.",
    )


def _hung(evidence: Evidence) -> Verdict:
    return Verdict(
        "collective",
        (),
        f"{'; '.join(evidence.failed)}; each pair of machines alone works.",
        "a fault of the backend or of a device, or one that has passed meanwhile",
        "start the check again, with `--backend gloo` to leave the devices out; NCCL_DEBUG=INFO says what NCCL does.",
    )


def _speed(rate: float) -> str:
    return f"{rate / 1e6:,.0f} MB/s" if rate >= 1e7 else f"{rate / 1e6:.2f} MB/s"
