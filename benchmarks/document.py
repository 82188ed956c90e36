"""docs/benchmarks.md and docs/benchmarks-method.md, made from the results: typed by hand is only the text."""

from __future__ import annotations

import contextlib
import math
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks import table
from benchmarks.plots import PICTURES
from benchmarks.results import ROOT, Comparison
from benchmarks.samples import median, ratio, summarise
from benchmarks.simulated import LATE, LOSS, NODES, ONE_NODE, SIZES, WAITING

DOCUMENT = ROOT / "docs" / "benchmarks.md"
METHOD_DOCUMENT = ROOT / "docs" / "benchmarks-method.md"
CPU = "ms of CPU of all ranks"
"""Beside the times of ``last_rank``."""

Kept: TypeAlias = tuple[Comparison, Mapping[str, str]]
Questions: TypeAlias = Sequence[tuple[str, str, str, Mapping[str, str]]]

COST: Questions = (
    ("torchrun, 3 hosts, from the start of the command to the first step", "torchrun", "mingle", {"c10d": "c10d"}),
    (
        "a script on 4 hosts, from the start of `python train.py` to the process group",
        "script",
        "mingle",
        {"known address, torch's retries included": "known address"},
    ),
    (
        "`mingle.init` on 4 hosts, started together, to the process group",
        "known_address",
        "mingle.init, 4 ranks",
        {
            "known address, if no client comes early": "known address, 4 ranks",
            "known address, if one does": "known address, a client early, 4 ranks",
        },
    ),
    (
        "seven ranks wait, the eighth comes: until it has GO",
        "last_rank",
        "a worker, mingle",
        {
            "zeroconf, browsing, which delays its first query by 20 to 120 ms (RFC 6762)": "a worker, zeroconf, browse",
            "zeroconf, by name": "a worker, zeroconf, by name",
            "with a client of a store": "a worker, zeroconf, by name, and the store",
        },
    ),
    (
        "seven ranks wait, rank 0 comes: until all have GO",
        "last_rank",
        "mingle",
        {
            "zeroconf, without probing": "zeroconf, without probing",
            "zeroconf, default registration (python-zeroconf probes three times, 500 ms apart)": (
                "zeroconf, default registration"
            ),
        },
    ),
    (
        "64 ranks on 8 hosts, started together, all on two cores",
        "scale",
        "mingle, 64 ranks",
        {"bare TCPStore, torch's retries included": "TCPStore, 64 ranks"},
    ),
    (
        "1,024 ranks on 8 hosts, started together, all on two cores",
        "scale",
        "mingle, 1024 ranks",
        {"bare TCPStore, torch's retries included": "TCPStore, 1024 ranks"},
    ),
    (
        "rank 0's CPU for 1,024 members, until GO, without the mesh",
        "capacity",
        "mingle, 1024 members",
        {"bare TCPStore": "TCPStore, 1024 members"},
    ),
    ("memory of a waiting rank, beside torch's", "footprint", "memory of a waiting rank, MiB", {}),
)
"""What a reader wants to know: the question, its comparison, our contender, and the others by the name to show."""
RECOVERED: Questions = tuple(
    (shown, "torchrun_recovery", f"mingle, {fault}", {name: f"{contender}, {fault}" for name, contender in peers})
    for shown, fault, peers in (
        (
            "the worker with rank 0 crashes",
            "a worker crashes",
            (("c10d", "c10d"), ("c10d with one more variable", "c10d, own store")),
        ),
        ("the store's node vanishes (cut off, then killed)", "the store's node vanishes", (("c10d", "c10d"),)),
        ("another node is killed", "another node is killed", (("c10d", "c10d"),)),
        ("the store's node is killed", "the store's node is killed", ()),
        (
            "of five nodes, the store's and another one are killed",
            "the store's node and another one of five are killed",
            (),
        ),
        ("a killed node is started again, and joins", "a killed node is started again", ()),
    )
)
"""The same for a fault of an elastic job."""
PAIR: Questions = (
    (
        "until all four ranks have an error",
        "broken_pair",
        "mingle",
        {"known address": "known address"},
    ),
)
"""The same for two nodes that can't reach each other."""
GIVEN_UP = {"torchrun_recovery": 60.0, "broken_pair": 40.0}
"""When a comparison stops to wait, in seconds."""

INTRODUCTION = """\
# Benchmarks

![The node that holds the store vanishes: how long until the others train again](pictures/recovery.svg)

![From the start of a command to the first step, or to the process group](pictures/start.svg)

Medians, measured on one machine with two cores, where each host is a network namespace. They are mostly the CPU time of
many processes; hosts with cores of their own are faster. "Torch's retries": a torch client that connects before the
store is listening sleeps for 250 to 750 ms before it tries again. "Mesh off": without the
[proof that all nodes reach each other](how-it-works.md#what-go-means), which is on by default. [Method, spread and
plots](benchmarks-method.md) has the rest. `make bench`, as root, measures all of it on your machine.

Measured {when}.

## Start and overhead
"""

RECOVERY = """\
## torchrun, training again

Three nodes with one worker each and `--nnodes=2:3 --max-restarts=3` (five with `2:5`), otherwise torchrun's defaults,
from the fault until all that are left have made a step again. The store is that of the agents, with `c10d` on the node
of `--rdzv-endpoint`; without that node `c10d` does not continue. mingle needs up to 10 s to notice that a node has
vanished; the rest is mostly the import of torch in the new workers. After a crash the new workers of `c10d` often fail
in Gloo, until no restarts are left; [with one more variable](benchmarks-method.md#torchrun-training-again), which
mingle sets, they have a store of their own.
"""

BROKEN_PAIR = """\
## Two nodes that can't reach each other

Four hosts; a firewall on the second one drops TCP packets from the third, which breaks connections in both directions.
mingle's error names both hosts, a likely cause and a fix. Without the mesh, two ranks say `Timed out waiting` after
torch's timeout, here 20 s in place of half an hour, and the other two keep trying to connect.
"""

SLOWER_HEADING = """\
## Where mingle is slower
"""
SLOWER = (
    """\
- **Than `init_process_group` with a known address**{init_mesh}: {init4} times as long with 4 ranks and {init8} times
  with 8, if no client connects before rank 0 is listening. mingle also finds rank 0, confirms all ranks in a two-phase
  commit, and checks that each of them reaches the store.
""",
    """\
- **With the proof that all nodes reach each other**, the default: compared with "mesh off", `mingle.init` takes {mesh4}
  times as long on 4 hosts and {mesh8} times on 8, and `mingle.discover` {mesh_last} times if seven ranks wait for
  rank 0. Two cores carry all 12 or 56 connections.
""",
    """\
- **Than a bare TCPStore with many ranks**: {scale} times as long with 1,024 ranks on two cores, torch's retries
  included. Each rank runs some ten milliseconds of Python; the store is C++. Ranks with a core each are
  [faster](#many-ranks).
""",
    """\
- **Than zeroconf** that resolves a full name or registers one without probing, and confirms nothing.
""",
    """\
- **Than `mpirun`**, which gets a list of hosts: until a program runs on three of them, `mingle-run` takes {run} s, and
  `mpirun` {mpirun} s, with ssh replaced by a switch of namespace.
""",
    """\
- **In CPU**: a job of 8 ranks costs {ours} ms{last_mesh}, zeroconf's discovery {theirs} ms.
""",
    """\
- **At import**: `import mingle` takes {bare} ms longer than an empty Python, and all that `mingle.init` needs {all} ms.
  Most of that is already loaded where torch is.
""",
)
"""Each without a figure that was not measured is left out."""
RATIOS = {
    "init4": ("known_address", "mingle.init, 4 ranks", "known address, 4 ranks"),
    "init8": ("known_address", "mingle.init, 8 ranks", "known address, 8 ranks"),
    "mesh4": ("known_address", "mingle.init, 4 ranks", "mingle.init, mesh off, 4 ranks"),
    "mesh8": ("known_address", "mingle.init, 8 ranks", "mingle.init, mesh off, 8 ranks"),
    "mesh_last": ("last_rank", "mingle", "mingle, mesh off"),
    "scale": ("scale", "mingle, 1024 ranks", "TCPStore, 1024 ranks"),
}

MANY_RANKS = """\
## Many ranks
"""

SIMULATED = f"""\
Simulated, with the mesh off: the real state machines with a virtual clock, on a fake network. Seconds until all have
formed the job, medians of as many seeds. "{LATE}": all others wait for it, {LOSS:.0%} of the datagrams are lost, and
work takes no time. "{NODES}": all start at one moment, {LOSS:.0%} are lost, and each eight ranks share two
cores. "{ONE_NODE}": none is lost, and all ranks share two cores. There a start takes 6 ms, and each datagram, frame
or timer 0.1 ms, as measured.

| ranks | seeds | {LATE} | datagrams a minute while {WAITING} | {NODES} | {ONE_NODE} |
|---:|---:|---:|---:|---:|---:|
"""

LIMITS = """\
### What 100,000 ranks would need

The protocol's limits allow a million ranks. Rank 0's machine sets a lower limit:

- **Descriptors.** Three a rank: its control connection and two of the store's. mingle raises the soft limit to the hard
  one and warns if that is not enough; for 100,000 the hard limit (`ulimit -Hn`, `fs.nr_open`) must be above 300,000.
- **Ports and backlog.** The listener's backlog is 4,096, capped by `net.core.somaxconn`; TCP itself repeats an attempt
  that does not fit.
- **One thread.** Rank 0 proves and seats each rank in Python, in well under a millisecond. If 100,000 ranks
  arrive together, this can take minutes on a slow core.
- **The store.** Torch's own figure is about 100 s for 96,000 ranks to connect to a TCPStore (its tutorial on the libuv
  backend).

So 100,000 ranks on one flat network are unsupported.
"""

METHOD = """\
# How the benchmarks are measured

[Benchmarks](benchmarks.md) has the figures that matter to a user; this page has each comparison with its spread.

`make bench` (root; Linux) measures all of this on your machine in about an hour, and writes both pages and
`benchmarks/results/*.json`, which hold every single measurement; `make bench BENCH_ARGS=scale` measures one comparison.

Every host is a network namespace on one bridge, and every rank a process of its own, forked from one that has imported
torch if it is not a fresh interpreter. Contenders take turns, A B A B …; each is the real package or the real torch.
"Mesh off": without the proof that all nodes reach each other. mingle runs with its defaults, apart from timeouts and
lines of progress, except where a name or the text says otherwise.

Figures are medians of n runs, with the 5th and the 95th percentile if there are at least five. Compare them only within
one comparison: each was measured at another time, under another load.
"""


def write(ordered: Sequence[Kept], folder: Path = DOCUMENT.parent) -> list[Path]:
    """Write the two documents and return them."""
    texts = {DOCUMENT.name: _figures(ordered), METHOD_DOCUMENT.name: _method(ordered)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _figures(ordered: Sequence[Kept]) -> str:
    """Return the page for users: what a job costs, how it recovers, and where mingle is slower."""
    kept = {comparison.name: (comparison, about) for comparison, about in ordered}
    parts = [INTRODUCTION.format(when=_when(ordered)), _cost(kept, COST)]
    if "torchrun_recovery" in kept:
        parts += [RECOVERY, _cost(kept, RECOVERED)]
    if "broken_pair" in kept:
        parts += [BROKEN_PAIR, _cost(kept, PAIR)]
    return "\n".join([*parts, SLOWER_HEADING, "".join(_slower(kept)), MANY_RANKS, *_simulated(kept), LIMITS])


def _when(ordered: Sequence[Kept]) -> str:
    days = sorted({about["date"] for _, about in ordered})
    commits = [f"`{each}`" for each in dict.fromkeys(about["commit"] for _, about in ordered) if each]
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    unknown = " and others that were not recorded" if any(not about["commit"] for _, about in ordered) else ""
    return f"{when}, at {', '.join(commits)}{unknown}"


def _method(ordered: Sequence[Kept]) -> str:
    """Return the page for developers: the method, and every comparison with its spread."""
    parts = [METHOD, *(f"Measured on {each}.\n" for each in dict.fromkeys(_about(about) for _, about in ordered))]
    for comparison, about in ordered:
        minutes = f"{about['minutes']} minutes" if "minutes" in about else ""
        commit = f"commit {about['commit']}" if about["commit"] else "commit not recorded"
        named = ", ".join(filter(None, (f"`{comparison.name}`", about["date"], commit, minutes, _mesh(about))))
        parts += [f"## {comparison.title}\n", f"{comparison.text}\n", *_picture(comparison)]
        parts += [f"{named}: {_spread(comparison)}.\n"]
    return "\n".join(parts)


def _spread(comparison: Comparison) -> str:
    """Return each contender's median, its spread and the number of runs."""
    counts = {len(values) for values in comparison.samples.values()}
    shown = []
    for name, values in comparison.samples.items():
        named, _, unit = (name, "", comparison.unit) if comparison.unit else name.rpartition(", ")
        given_up = max(values) >= GIVEN_UP.get(comparison.name, math.inf)
        figure = _figure(comparison, name, len(values)) if given_up else f"{_median(values)} {unit}"
        shown.append(f"{named} {figure}" + (f", n={len(values)}" if len(counts) > 1 else ""))
    spread = "; ".join(shown) + (f", n={counts.pop()}" if len(counts) == 1 else "")
    beside = [
        f"{name}, {what}: {_median(values)}"
        for name, columns in comparison.extra.items()
        for what, values in columns.items()
    ]
    return ". Beside it: ".join(filter(None, (spread, "; ".join(beside))))


def _median(values: Sequence[float]) -> str:
    summary = summarise(values)
    spread = f" ({table.number(summary.low)}-{table.number(summary.high)})" if len(values) >= table.FEW else ""
    return f"{table.number(summary.median)}{spread}"


def _picture(comparison: Comparison) -> list[str]:
    picture = PICTURES / f"bench-{comparison.name.replace('_', '-')}.png"
    return [f"![plot](pictures/{picture.name})\n"] if comparison.unit and picture.exists() else []


def _mesh(about: Mapping[str, str]) -> str:
    """Return what holds for all of a comparison that was measured under ``MINGLE_MESH=off``."""
    return "mesh off" if about.get("mesh") == "off" else ""


def _cost(kept: Mapping[str, Kept], questions: Questions) -> str:
    lines = ["| | mingle | beside it |", "|---|---:|---|"]
    for question, name, ours, others in questions:
        if name not in kept or ours not in kept[name][0].samples:
            continue
        comparison, about = kept[name]
        runs = len(comparison.samples[ours])
        mine = [_figure(comparison, ours, runs)]
        mine += [
            f"mesh off: {_figure(comparison, each, runs)}"
            for each in comparison.samples
            if each != ours and each.replace(", mesh off", "") == ours
        ]
        shown = [f"{other}: {_figure(comparison, contender, runs)}" for other, contender in others.items()]
        mesh = f" ({_mesh(about)})" if _mesh(about) else ""
        lines.append(f"| {question}{mesh} | {'; '.join(mine)} | {'; '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _figure(comparison: Comparison, contender: str, runs: int) -> str:
    """Return the median with its unit, and how many runs it is of where they are few or not as many as ``runs``.

    Where some were given up, the others are shown one by one.
    """
    samples = comparison.samples.get(contender, [])
    if not samples:
        return "not measured"
    if (limit := GIVEN_UP.get(comparison.name)) is not None:
        none = f"none in {limit:.0f} s"
        if len(samples) < table.FEW:
            return " and ".join(_shown(value, "s") if value < limit else none for value in samples)
        again = [_shown(value, "s") for value in sorted(samples) if value < limit]
        if given_up := len(samples) - len(again):
            others = f", else {' and '.join(again)}" if again else ""
            return f"{none} in {given_up} of {len(samples)} runs{others}"
    unit = comparison.unit or contender.rpartition(", ")[2]
    of = f" ({len(samples)} run{'s' * (len(samples) > 1)})" if len(samples) < table.FEW or len(samples) != runs else ""
    return _shown(median(samples), unit) + of


def _shown(value: float, unit: str) -> str:
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    return f"{table.number(value)} {unit}"


def _slower(kept: Mapping[str, Kept]) -> list[str]:
    """Return the items of which all figures have been measured."""
    samples: dict[str, Mapping[str, list[float]]] = {name: each.samples for name, (each, _) in kept.items()}
    last = kept["last_rank"][0].extra if "last_rank" in kept else {}
    sources: dict[str, Callable[[], float]] = {
        **{field: partial(_ratio, samples, *source) for field, source in RATIOS.items()},
        "run": lambda: median(samples["any_program"]["mingle-run"]),
        "mpirun": lambda: median(samples["any_program"]["mpirun"]),
        "ours": lambda: median(last["mingle"][CPU]),
        "theirs": lambda: median(last["zeroconf, default registration"][CPU]),
        "bare": lambda: _more(samples, "import mingle, ms"),
        "all": lambda: _more(samples, "import mingle, and all that init needs, ms"),
    }
    meshes = {
        field: f" with the {_mesh(kept[name][1])}" if name in kept and _mesh(kept[name][1]) else ""
        for field, name in (("init_mesh", "known_address"), ("last_mesh", "last_rank"))
    }
    items = []
    for item in SLOWER:
        with contextlib.suppress(KeyError):
            fields = [field for _, field, _, _ in string.Formatter().parse(item) if field and field not in meshes]
            items.append(item.format(**{field: table.number(sources[field]()) for field in fields}, **meshes))
    return items


def _ratio(samples: Mapping[str, Mapping[str, list[float]]], name: str, ours: str, theirs: str) -> float:
    return ratio(samples[name][ours], samples[name][theirs])


def _more(samples: Mapping[str, Mapping[str, list[float]]], what: str) -> float:
    return median(samples["footprint"][what]) - median(samples["footprint"]["python -c pass, ms"])


def _simulated(kept: Mapping[str, Kept]) -> list[str]:
    """Return the table of simulated jobs, and what real processes took."""
    if "simulated" not in kept:
        return []
    samples = kept["simulated"][0].samples
    rows = []
    for size in SIZES:
        if seeds := samples.get(f"{LATE}, {size} ranks, s"):
            columns = [f"{LATE}, {size} ranks, s", f"{WAITING}, {size} ranks, datagrams a minute"]
            columns += [f"{NODES}, {size} ranks, s", f"{ONE_NODE}, {size} ranks, s"]
            figures = [f"{size:,}", str(len(seeds)), *(table.number(median(samples[each])) for each in columns)]
            rows.append(f"| {' | '.join(figures)} |\n")
    parts = [SIMULATED + "".join(rows)]
    if "scale" in kept and (real := kept["scale"][0].samples.get("mingle, 1024 ranks")):
        mesh = _mesh(kept["scale"][1]) or "mesh on"
        took = _shown(median(real), "ms")
        parts.append(
            f"1,024 real processes on two cores took {took}, with the {mesh}: the simulation has neither a kernel nor\n"
            "memory that is copied.\n"
        )
    return parts


def _about(about: Mapping[str, str]) -> str:
    """Return the machine and the versions that all comparisons have."""
    scheduling = f", contenders under {about['scheduling']}" if about.get("scheduling") else ""
    return f"{about['cpu']}, {about['kernel']}, python {about['python']}, torch {about['torch']}{scheduling}"
