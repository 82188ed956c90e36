"""All ranks but one wait, and the last one comes: until every rank has what it needs."""

from __future__ import annotations

from tests.lab import Event

from benchmarks import mingle_ranks, zeroconf_ranks
from benchmarks.document import CPU
from benchmarks.hosts import RankFunction, alone, cpu, field, until_all, until_workers
from benchmarks.results import Comparison
from benchmarks.samples import alternate, ratio

HOSTS = 8
MINGLE = "mingle"
MESH_OFF = f"mingle, {mingle_ranks.MESH_OFF}"
PROBING, NO_PROBING = "zeroconf, default registration", "zeroconf, without probing"
LATE = "a worker, "

TEXT = """\
8 hosts; their ranks are forked from a process that has imported torch, and each has made such a call once. Seven wait,
then rank 0 calls `discover`; measured until the last one has GO. 8 hosts open 56 connections for the mesh, on two
cores. zeroconf's rank 0 registers a service; measured until the last worker, which browses for it, has resolved it. By
default python-zeroconf probes three times, 500 ms apart (RFC 6762 asks for 250 ms); "without probing":
`cooperating_responders=True`. "a worker": rank 0 and six others wait; measured until the eighth has GO. zeroconf's
worker browses for a service, or asks for it by name; "and the store" also connects a TCPStore client."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes a quarter of a minute."""
    ends: dict[str, list[list[Event]]] = {name: [] for name in (MINGLE, MESH_OFF, PROBING, NO_PROBING)}
    datagrams: dict[str, list[float]] = {name: [] for name in ends}
    with field(HOSTS) as hosts:

        def last(name: str, function: RankFunction, option: str = "") -> list[Event]:
            hosts.count_udp()
            result = hosts.last(function, option=option)
            datagrams[name].append(hosts.counted_udp())
            ends[name].append(result)
            return result

        def late(function: RankFunction, option: str = "") -> float:
            return alone(hosts.late(function, option=option))

        ours, off = mingle_ranks.discover, mingle_ranks.MESH_OFF
        theirs, by_name = zeroconf_ranks.find, zeroconf_ranks.BY_NAME
        samples = alternate(
            rounds,
            {
                MINGLE: lambda _: until_all(last(MINGLE, ours)),
                MESH_OFF: lambda _: until_all(last(MESH_OFF, ours, off)),
                PROBING: lambda _: until_workers(last(PROBING, theirs, zeroconf_ranks.PROBING)),
                NO_PROBING: lambda _: until_workers(last(NO_PROBING, theirs)),
                f"{LATE}{MINGLE}": lambda _: late(ours),
                f"{LATE}{MESH_OFF}": lambda _: late(ours, off),
                f"{LATE}zeroconf, browse": lambda _: late(theirs),
                f"{LATE}zeroconf, by name": lambda _: late(theirs, by_name),
                f"{LATE}zeroconf, by name, and the store": lambda _: late(zeroconf_ranks.find_and_connect),
            },
        )
    return Comparison(
        name="last_rank",
        title="The last rank comes",
        text=TEXT,
        unit="ms",
        samples=samples,
        ratios={
            "zeroconf": ratio(samples[MINGLE], samples[PROBING]),
            "zeroconf's datagrams": ratio(datagrams[MINGLE], datagrams[PROBING]),
        },
        extra={name: {CPU: [cpu(end) for end in each], "datagrams": datagrams[name]} for name, each in ends.items()},
    )
