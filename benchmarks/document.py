"""docs/benchmarks.md and docs/benchmarks-method.md, made from the results: typed by hand is only the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks import table
from benchmarks.plots import PICTURES
from benchmarks.results import ROOT, Comparison
from benchmarks.samples import median, summarise

DOCUMENT = ROOT / "docs" / "benchmarks.md"
METHOD_DOCUMENT = ROOT / "docs" / "benchmarks-method.md"

Questions: TypeAlias = Sequence[tuple[str, str, str, Mapping[str, str]]]

COST: Questions = (
    ("torchrun, 3 hosts, from the start of the command to the first step", "torchrun", "mingle", {"c10d": "c10d"}),
    (
        "a script on 4 hosts, from the start of `python train.py` to the process group",
        "script",
        "mingle",
        {"known address, with torch's retries": "known address"},
    ),
    (
        "`mingle.init` on 4 hosts, started together, to the process group",
        "known_address",
        "mingle.init, 4 ranks",
        {"known address, with torch's retries": "known address, 4 ranks"},
    ),
    (
        "seven ranks wait, the eighth comes: until all have formed the job",
        "last_rank",
        "a worker, mingle",
        {
            "zeroconf, browsing, which delays its first query by 20 to 120 ms (RFC 6762)": "a worker, zeroconf, browse",
            "zeroconf, by name": "a worker, zeroconf, by name",
            "with a client of a store": "a worker, zeroconf, by name, and the store",
        },
    ),
    (
        "seven ranks wait, rank 0 comes: until all have formed the job",
        "last_rank",
        "mingle, fresh interpreters",
        {"zeroconf, mostly RFC 6762's pauses for probing": "zeroconf, fresh interpreters"},
    ),
    (
        "64 ranks on two cores",
        "scale",
        "mingle, 64 ranks",
        {"bare TCPStore, with torch's retries": "TCPStore, 64 ranks"},
    ),
    (
        "1,024 ranks on two cores",
        "scale",
        "mingle, 1024 ranks",
        {"bare TCPStore, with torch's retries": "TCPStore, 1024 ranks"},
    ),
    (
        "rank 0's CPU for 1,024 members, until GO",
        "capacity",
        "mingle, 1024 members",
        {"bare TCPStore": "TCPStore, 1024 members"},
    ),
    ("memory of a waiting rank, beside torch's", "footprint", "memory of a waiting rank, MiB", {}),
)
"""What a reader wants to know: the question, its comparison, our contender, and the others by the name to show."""
RECOVERED = (
    ("a worker crashed", "torchrun_recovery", "mingle, a worker crashes", {"c10d": "c10d, a worker crashes"}),
    (
        "the store's host died",
        "torchrun_recovery",
        "mingle, the store's host dies",
        {"c10d": "c10d, the store's host dies"},
    ),
)
"""The same for a fault of an elastic job."""
PAIR: Questions = (
    (
        "until all four ranks have an error",
        "broken_pair",
        "mingle",
        {'with `mesh="off"`': "mingle, mesh off", "known address": "known address"},
    ),
)
"""The same for two nodes that can't reach each other."""
MESH_OFF = ("known_address", "last_rank")
"""The comparisons whose contender has no proof that all nodes reach each other, which by default it has."""
GIVEN_UP = {"torchrun_recovery": 60.0, "broken_pair": 40.0}
"""When a comparison stops to wait, in seconds."""

INTRODUCTION = """\
# Benchmarks

![The node that holds the store dies: how long until the others train again](pictures/recovery.svg)

![From the start of a command to the first step, or to the process group](pictures/start.svg)

Medians, measured on one machine with two cores, where each host is a network namespace. They are mostly the CPU time of
many processes; hosts with cores of their own are faster. "With torch's retries": a client of torch that comes before
the store listens sleeps for half a second or so, and the median includes these rounds. "Mesh off": without the
[proof that all nodes reach each other](how-it-works.md#what-go-means), which is on by default; [what the proof
costs](#where-mingle-is-slower). [Method, spread and plots](benchmarks-method.md) has the rest. `make bench`, as root,
measures all of it on your machine.

## Start and overhead
"""

RECOVERY = """\
## torchrun, training again

Three hosts with one worker each and `--nnodes=2:3`, with torchrun's defaults, from the fault until all that are left
have made a step again. mingle needs up to 10 s to notice that a machine has vanished; the rest is mostly the
import of torch in the new workers. The worker that crashes is on the host of the store. The new workers of `c10d` then
often fail in Gloo, until no restarts are left;
[with one more variable](benchmarks-method.md#torchrun-training-again) they fail less often.
"""

BROKEN_PAIR = """\
## Two nodes that can't reach each other

Four hosts; a firewall drops TCP between the second and the third. mingle's error names both, a likely cause and a fix.
Without the mesh, two ranks say `Timed out waiting` after torch's timeout, here 20 s in place of half an hour, and the
other two keep trying to connect.
"""

SLOWER = """\
## Where mingle is slower

- **Than `init_process_group` with a known address**: with the mesh off {init4} times as long with 4 ranks and {init8}
  times with 8, if no client comes before rank 0 listens. mingle also finds rank 0, confirms all ranks in a two-phase
  commit, and checks that each of them reaches the store. A client that comes too early waits for half a second: hence
  the median above.
- **With the proof that all nodes reach each other**, the default: compared with the rows "mesh off", `mingle.init`
  takes {mesh4} times as long on 4 hosts and {mesh8} times on 8, and {mesh_last} times as long if seven ranks wait and
  rank 0 comes last. Two cores carry all 12 or 56 connections.
- **Than a bare TCPStore with many ranks**: {scale} times as long with 1,024 ranks on two cores, torch's retries
  included. Each rank runs some ten milliseconds of Python; the store is C++. Ranks with a core each are
  [faster](#many-ranks).
- **Than zeroconf by full name**, which looks up one registered address and confirms nothing.
- **Than `mpirun`**, which gets a list of hosts: until a program runs on three of them, `mingle-run` takes {run} s, and
  `mpirun` {mpirun} s, with an ssh that costs nothing here.
- **In CPU**: a job of 8 ranks costs {ours} ms with the mesh off, zeroconf's discovery {theirs} ms.
- **At import**: `import mingle` takes {bare} ms longer than an empty Python, and all that `mingle.init` needs {all} ms.
  Most of that is already loaded where torch is.
"""

MANY_RANKS = """\
## Many ranks

Seconds until all have formed the job, simulated, mesh off: the real state machines with a virtual clock, on a fake
network that loses three tenths of all datagrams. "With work": all ranks begin at one moment; each process starts in
6 ms and handles each datagram, frame or timer in 0.3 ms, three times what was measured.

| ranks | rank 0 comes last | datagrams a minute while all wait | with work, a core each | on two cores, no loss |
|---:|---:|---:|---:|---:|
| 64 |  |  | 0.13 | 0.44 |
| 100 | 0.65 | 109 |  |  |
| 256 |  |  | 0.55 | 1.99 |
| 1,000 | 2.24 | 103 |  |  |
| 1,024 |  |  | 1.90 | 8.88 |
| 4,096 |  |  | 8.66 | 38.2 |
| 10,000 | 4.25 | 27 |  |  |

Real processes that share two cores also spend time on what is not simulated: hence the 13.8 s above.

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
"Mesh off": mingle runs with `MINGLE_MESH=off`, without the proof that all nodes reach each other. Everywhere else
mingle runs with its defaults, but where a name says so.

Figures are medians of n runs, with the 5th and the 95th percentile if there are at least five. Compare them only within
one comparison: each was measured at another time, under another load.
"""

SIMULATED = """\
## Many ranks, simulated

[The table](benchmarks.md#many-ranks) is made by `python -m tests.lan late --loss 0.3 --ranks 1000 --waiting 60`, and
with work by `python -m tests.lan crowd --ranks 1024 --cores 2` (with `PYTHONPATH=src`).
"""


def write(ordered: Sequence[tuple[Comparison, Mapping[str, str]]], folder: Path = DOCUMENT.parent) -> list[Path]:
    """Write the two documents and return them."""
    texts = {DOCUMENT.name: _figures(ordered), METHOD_DOCUMENT.name: _method(ordered)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _figures(ordered: Sequence[tuple[Comparison, Mapping[str, str]]]) -> str:
    """Return the page for users: what a job costs, how it recovers, and where mingle is slower."""
    comparisons = {comparison.name: comparison for comparison, _ in ordered}
    parts = [INTRODUCTION, _cost(comparisons)]
    if "torchrun_recovery" in comparisons:
        parts += [RECOVERY, _cost(comparisons, RECOVERED)]
    if "broken_pair" in comparisons:
        parts += [BROKEN_PAIR, _cost(comparisons, PAIR)]
    return "\n".join([*parts, *_slower(comparisons), MANY_RANKS])


def _method(ordered: Sequence[tuple[Comparison, Mapping[str, str]]]) -> str:
    """Return the page for developers: the method, and every comparison with its spread."""
    parts = [METHOD, *(f"Measured on {each}.\n" for each in dict.fromkeys(_about(about) for _, about in ordered))]
    for comparison, about in ordered:
        mesh = ", mesh off" if comparison.name in MESH_OFF else ""
        named = f"`{comparison.name}`, load {about['load']}{mesh}"
        parts += [f"## {comparison.title}\n", f"{comparison.text}\n", *_picture(comparison)]
        parts += [f"{': '.join(filter(None, (named, _spread(comparison))))}.\n"]
    return "\n".join([*parts, SIMULATED])


def _spread(comparison: Comparison) -> str:
    """Return each contender's median, its spread and the number of runs."""
    counts = {len(values) for values in comparison.samples.values()}
    shown = []
    for name, values in comparison.samples.items():
        summary = summarise(values)
        spread = f" ({table.number(summary.low)}-{table.number(summary.high)})" if len(values) >= table.FEW else ""
        runs = f", n={len(values)}" if len(counts) > 1 else ""
        named, _, unit = (name, "", "") if comparison.unit else name.rpartition(", ")
        shown.append(" ".join(filter(None, (named, f"{table.number(summary.median)}{spread}", unit))) + runs)
    return f"{'; '.join(shown)} {comparison.unit}".rstrip() + (f", n={counts.pop()}" if len(counts) == 1 else "")


def _picture(comparison: Comparison) -> list[str]:
    picture = PICTURES / f"bench-{comparison.name.replace('_', '-')}.png"
    return [f"![plot](pictures/{picture.name})\n"] if picture.exists() else []


def _cost(comparisons: Mapping[str, Comparison], questions: Questions = COST) -> str:
    lines = ["| | mingle | beside it |", "|---|---:|---|"]
    for question, name, ours, others in questions:
        if name in comparisons and ours in comparisons[name].samples:
            there = comparisons[name].samples
            shown = [
                f"{other}: {_figure(comparisons[name], contender)}"
                for other, contender in others.items()
                if contender in there
            ]
            mesh = " (mesh off)" if name in MESH_OFF else ""
            lines.append(f"| {question}{mesh} | {_figure(comparisons[name], ours)} | {'; '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _figure(comparison: Comparison, contender: str) -> str:
    """Return the median with its unit; of fewer than five runs each run, since their median would say too much."""
    samples = comparison.samples[contender]
    limit = GIVEN_UP.get(comparison.name)
    if limit is not None:
        none = f"none in {limit:.0f} s"
        if len(samples) < table.FEW:
            return " and ".join(_shown(value, "s") if value < limit else none for value in samples)
        if given_up := sum(value >= limit for value in samples):
            return f"{none} in {given_up} of {len(samples)} runs"
    unit = comparison.unit or contender.rpartition(", ")[2]
    return _shown(median(samples), unit) + (f" ({len(samples)} runs)" if len(samples) < table.FEW else "")


def _shown(value: float, unit: str) -> str:
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    return f"{table.number(value)} {unit}"


def _slower(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return the section, or nothing where one of its comparisons has not been measured."""
    try:
        init = comparisons["known_address"].ratios
        init_4, init_8 = init["4 ranks"], init["8 ranks"]  # absent where torch retried in every round
        scale = comparisons["scale"].samples
        last, start = comparisons["last_rank"], comparisons["footprint"].samples
        program = comparisons["any_program"].samples
    except KeyError:
        return []
    empty = median(start["python -c pass, ms"])
    figures = {
        "init4": init_4,
        "init8": init_8,
        "mesh4": init["the mesh, 4 ranks"],
        "mesh8": init["the mesh, 8 ranks"],
        "mesh_last": last.ratios["the mesh"],
        "scale": median(scale["mingle, 1024 ranks"]) / median(scale["TCPStore, 1024 ranks"]),
        "run": median(program["mingle-run"]),
        "mpirun": median(program["mpirun"]),
        "ours": last.extra["mingle"]["CPU"],
        "theirs": last.extra["zeroconf"]["CPU"],
        "bare": median(start["import mingle, ms"]) - empty,
        "all": median(start["import mingle, and all that init needs, ms"]) - empty,
    }
    return [SLOWER.format(**{name: table.number(value) for name, value in figures.items()})]


def _about(about: Mapping[str, str]) -> str:
    """Return the machine and the versions that all comparisons have."""
    return f"{about['cpu']}, {about['kernel']}, python {about['python']}, torch {about['torch']}"
