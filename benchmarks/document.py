"""docs/benchmarks.md and docs/benchmarks-method.md, made from the results: typed by hand is only the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks import table
from benchmarks.plots import PICTURES
from benchmarks.results import ROOT, Comparison
from benchmarks.samples import median

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
        "`mingle.init` on 4 hosts, all at once, to the process group",
        "known_address",
        "mingle.init, 4 ranks",
        {"known address, with torch's retries": "known address, 4 ranks"},
    ),
    (
        "seven ranks wait, the eighth comes: until all have formed the job",
        "late_rank",
        "mingle",
        {
            "zeroconf, browsing, which delays its first query by 20 to 120 ms (RFC 6762)": "zeroconf, browse",
            "zeroconf, by name": "zeroconf, by name",
            "with a client of a store": "zeroconf, by name, and the store",
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
    ("memory of a waiting rank, beside torch's", "memory", "mingle", {}),
    ("datagrams of 8 hosts, until every job is closed", "wire", "mingle", {"zeroconf": "zeroconf"}),
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
GIVEN_UP = {"torchrun_recovery": 60.0, "broken_pair": 40.0}
"""When a comparison stops to wait, in seconds."""

INTRODUCTION = """\
# Benchmarks

![The node that holds the store dies: how long until the others train again](pictures/recovery.svg)

![From the start of a command to the first step, or to the process group](pictures/start.svg)

Medians, measured on one machine with two cores, where each host is a network namespace. They are mostly the CPU time of
many processes; hosts with cores of their own are faster. "With torch's retries": a client of torch that comes before
the store listens sleeps for half a second or so, and the median includes these rounds. [Method, spread and
plots](benchmarks-method.md) has the rest. `make bench`, as root, measures all of it on your machine.

## Start and overhead
"""

RECOVERY = """\
## torchrun, training again

Three hosts with one worker each, `--nnodes=2:3` and `last_call_timeout=3`, from the fault until all that are left have
made a step again. Most of mingle's time is the import of torch in the new workers and torch's own last call. The worker
that crashes is on the host of the store. The new workers of `c10d` then often fail in Gloo, until no restarts are left;
[with one more variable](benchmarks-method.md#torchrun-training-again) they fail less often.
"""

BROKEN_PAIR = """\
## Two nodes that can't reach each other

Four hosts; a firewall drops TCP between the second and the third. mingle's error names both, a likely cause and a fix.
Otherwise two ranks say `Timed out waiting` after torch's timeout, here 20 s in place of half an hour, and the other two
go on connecting.
"""

SLOWER = """\
## Where mingle is slower

- **Than `init_process_group` with a known address**: {init4} times as long with 4 ranks and {init8} times with 8, if no
  client comes before rank 0 listens. mingle also finds rank 0, confirms all ranks in a two-phase commit, and checks
  that each of them reaches the store. A client that comes too early waits for half a second: hence the median above.
- **For the proof that all nodes reach each other**, which the rows of `mingle.init` and of seven waiting ranks leave
  out (`MINGLE_MESH=off`): `mingle.init` takes {mesh4} times as long with it on 4 hosts and {mesh8} on 8, and
  {mesh_last} times if seven ranks wait and rank 0 comes last, where two cores carry all 12 or 56 connections.
- **Than a bare TCPStore with many ranks**: {scale} times as long with 1,024 ranks on two cores, torch's retries
  included. Each rank runs some ten milliseconds of Python; the store is C++. [Scale](scale.md) has the figures for
  ranks with a core each.
- **Than zeroconf by full name**, which looks up one registered address and confirms nothing.
- **Than `mpirun`**, which is told the hosts: until a program runs on three of them, `mingle-run` takes {run} s, and
  `mpirun` {mpirun} s, with an ssh that costs nothing here.
- **In CPU**: a job of 8 ranks costs {ours} ms, zeroconf's discovery {theirs} ms.
- **At import**: `import mingle` takes {bare} ms longer than an empty Python, and all that `mingle.init` needs {all} ms.
  Most of that is already loaded where torch is.
"""

METHOD = """\
# How the benchmarks are measured

[Benchmarks](benchmarks.md) has the figures; this page has their spread, their plots and the method.

`make bench` (root; Linux) measures all of this on your machine, and writes both pages and `benchmarks/results/*.json`,
which hold every single measurement. Times from another machine mean little, so run the command on yours.
`make bench-quick` takes less than three minutes, compares the ratios with the committed ones, and names what got
slower.

Every host is a network namespace with an interface of its own on one bridge, and every rank a process of its own. Where
a comparison speaks of fresh interpreters, each rank is a new Python in each round; in the others the ranks are forked
from a process that has imported torch. All processes of a machine read the same monotonic clock. Contenders take
turns, A B A B …, and each is the real package or the real torch. All sessions of mingle are proved, confirmed and
acknowledged. The proof that all nodes reach each other is off (`MINGLE_MESH=off`), but for torchrun, a script's start,
many ranks on one machine, two nodes that can't reach each other, and the cost of the mesh.

The load average of the machine is given with each comparison. Where it says SCHED_RR, other programs were running, and
the measured processes of all contenders took precedence over them (`--realtime`). Fewer than five runs have no
percentiles here; the results hold each run.
"""

CUTS = """\
## What was cut, and what was not

Profiles of rank 0 with 1,024 members (cProfile, without the store's threads; the profiler itself makes the times about
four times as long) and of ranks that wait.

- **The store's address** is chosen from what all members have reached: 0.32 of 2.7 s, mostly the parsing of addresses.
  If only one address is left, there is nothing to compare; otherwise each address is parsed once.
- **After each write** the selector was asked what it waits for: 0.10 of 2.7 s. Each connection now remembers it.
- **After each frame** the host walked over the other sessions of its job, also when there was none: 0.11 of 2.7 s.
- With these three and the joined preface below, which was reverted, rank 0 used 8 % less CPU for each of 256 members:
  0.54 instead of 0.58 ms, medians of four runs each, in turn, on a machine that did other work.
- **A question for the unicast peers** was made in each turn of a loop, also without peers: 12 % of a waiting rank's
  calls by time. It is now made only if there are peers.
- **A full garbage collection** is due soon after the import of torch, and walks over all of torch's objects. In fresh
  interpreters it came in rank 0's call each time, and all ranks waited for it: 94 ms of rank 0's CPU in `mingle.init`
  with two ranks, of which the collection took 81. The collector now pauses during the call: 19 ms.
- **A waiting rank** woke up each second for a line that a log gets every 30 s, and always asked by both IPv4 and IPv6.
  It now wakes once before each line in a log, and at its longest interval it asks by IPv4 and IPv6 in turn: 48 turns of
  its loop a minute instead of 99, 24 datagrams instead of 48, and a third less CPU (11.2 instead of 16.7 ms a minute,
  one pair of runs side by side).
- **Questions of other ranks** each made a rank wait longer before its own: 50 questions at the start of a large job
  silenced, for seconds, the ranks that had lost the first OFFERs. Such questions now count once in half an interval.
  For 128 nodes with 8 ranks each and 30 % loss, 12 seeds, the median fell from 1.44 to 0.85 s; where all ranks share
  two cores the change costs 4 to 11 %.

Tried and left out:

- To count every question of another rank, but only up to half a second: the nodes gained a tenth, not two fifths.
- To join the host's preface with WELCOME in one packet, which saves one of seven writes for each member: in the
  simulator, if one of two rank 0s did not hear the other, they no longer both failed with the conflict.
- To let a waiting rank ask every 5 s in the end, not every 2.5 s: half as many datagrams, but an agent whose network
  had healed once needed more than 10 s to find its job, because a running job no longer announces itself.

Not tried, because the gain would be small:

- To let a waiting rank recognize its own questions before it decodes them: everything after the reading of a datagram
  was 5 % of the loop's CPU after these cuts.
- To inherit the options of each connection from the listener, for fewer calls: about 1 % by estimate.
"""

GOALS = """\
## The project's own goals

These are limits that the developers set themselves. A missed one is work to do, or was set too low.
"""

MISSED = """\
Why some are missed:

- **CPU of a first discover**, and with it `mingle.init` beside a known address, a late worker, and rank 0 last: the
  profile is flat. On rank 0 the import of 9 more modules takes 5 ms, and no function of mingle takes a twentieth of the
  rest: sockets, the scan of the interfaces, frames, proofs, the store. 8 ranks share two cores here, so each
  millisecond of a rank delays the job by up to four. If torch's clients come before its store listens, they wait for
  half a second and more; the ratio leaves such rounds out, and the medians include them.
- **Capacity**: of the 0.38 ms for a member, the store's own thread takes 0.09, because it reads and writes more for a
  member than the bare store does for a client. The rest is an accepted connection, four messages read and six
  written, and two proofs, in Python.
- **Datagrams**: each rank asks when it starts, rank 0 announces itself six times at its start, and it answers ranks
  that come later. With fewer datagrams, each lost one would cost more time.
- **A waiting rank, and rank 0 after GO**, are within a few hundredths of their goals.
- **The import of all that init needs**, without torch, consists mostly of modules that torch imports as well.
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
    return "\n".join([*parts, *_slower(comparisons)])


def _method(ordered: Sequence[tuple[Comparison, Mapping[str, str]]]) -> str:
    """Return the page for developers: the method, every comparison with its spread, and the goals."""
    parts = [METHOD]
    for comparison, about in ordered:
        parts += [f"## {comparison.title}\n", f"{comparison.text}\n", f"{table.markdown(comparison)}\n"]
        parts += [*_picture(comparison), f"`python -m benchmarks {comparison.name}`; {_about(about)}.\n"]
    return "\n".join([*parts, CUTS, GOALS, _goals(comparison for comparison, _ in ordered), MISSED])


def _picture(comparison: Comparison) -> list[str]:
    picture = PICTURES / f"bench-{comparison.name.replace('_', '-')}.png"
    return [f"![{comparison.title}](pictures/{picture.name})\n"] if picture.exists() else []


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
            lines.append(f"| {question} | {_figure(comparisons[name], ours)} | {'; '.join(shown)} |")
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
    return _shown(median(samples), comparison.unit) + (f" ({len(samples)} runs)" if len(samples) < table.FEW else "")


def _shown(value: float, unit: str) -> str:
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    return f"{table.number(value)} {'' if unit == 'datagrams' else unit}".rstrip()


def _slower(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return the section, or nothing where one of its comparisons has not been measured."""
    try:
        init = comparisons["known_address"].ratios
        init_4, init_8 = init["4 ranks"], init["8 ranks"]  # absent where torch retried in every round
        scale = comparisons["scale"].samples
        cpu, start = comparisons["last_rank"].extra, comparisons["start_up"].samples
        program = comparisons["any_program"].samples
        mesh = comparisons["mesh_cost"].ratios
    except KeyError:
        return []
    empty = median(start["python -c pass"])
    figures = {
        "init4": init_4,
        "init8": init_8,
        "mesh4": mesh["init, 4 hosts"],
        "mesh8": mesh["init, 8 hosts"],
        "mesh_last": mesh["rank 0 last"],
        "scale": median(scale["mingle, 1024 ranks"]) / median(scale["TCPStore, 1024 ranks"]),
        "run": median(program["mingle-run"]),
        "mpirun": median(program["mpirun"]),
        "ours": cpu["mingle"]["CPU"],
        "theirs": cpu["zeroconf"]["CPU"],
        "bare": median(start["import mingle"]) - empty,
        "all": median(start["import mingle, and all that init needs"]) - empty,
    }
    return [SLOWER.format(**{name: table.number(value) for name, value in figures.items()})]


def _goals(comparisons: Iterable[Comparison]) -> str:
    lines = ["| goal | limit | measured | |", "|---|---:|---:|---|"]
    lines += [
        f"| {goal.text} | {table.number(goal.limit)} {goal.unit} | {table.number(goal.value)} {goal.unit} | "
        f"{'reached' if goal.met else '**missed**'} |"
        for comparison in comparisons
        for goal in comparison.goals
    ]
    return "\n".join(lines) + "\n"


def _about(about: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name not in ("cpu", "kernel", "load"))
    return f"{about['cpu']}, {about['kernel']}, {versions}; load average before the run {about['load']}"
