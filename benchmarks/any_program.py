"""mingle-run on three hosts, beside mpirun with a host file: until the program runs everywhere."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.compose.commands import provide
from tests.lab import Lab, Process
from tests.launchers.cluster import AS_ROOT, Cluster

from benchmarks.results import Comparison
from benchmarks.samples import alternate

HOSTS = 3
TIMEOUT = 60.0
PROGRAM = (sys.executable, "-c", "import os, time; os.write(1, b'runs at %f\\n' % time.monotonic())")
"""Hosts of the lab share the machine's clock."""

TEXT = """\
3 hosts, from the last start of a command until the program runs on all. `mpirun` (Open MPI) is told the hosts; in
place of ssh it runs a command that switches to the other host's namespace."""


def run(rounds: int) -> Comparison:
    """Measure; install Open MPI where it is missing."""
    provide(("mpirun.openmpi",))
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(lab, Path(folder), count=HOSTS)
        file = Path(folder) / "hosts"
        file.write_text("".join(f"{host.name} slots=1\n" for host in cluster.hosts))
        mpirun = ("mpirun.openmpi", "--hostfile", str(file), "-n", str(HOSTS), *PROGRAM)

        def by_mingle(round_: int) -> float:
            line = (sys.executable, "-m", "mingle.run.command", "--nnodes", str(HOSTS), "--job-id", f"run-{round_}")
            return _until_all_run([partial(host.run, [*line, "--", *PROGRAM]) for host in cluster.hosts])

        def by_mpirun(_round: int) -> float:
            return _until_all_run([partial(cluster.hosts[0].run, mpirun, env={"PATH": cluster.path, **AS_ROOT})])

        for warm_up in (by_mingle, by_mpirun):
            warm_up(-1)
        samples = alternate(rounds, {"mingle-run": by_mingle, "mpirun": by_mpirun})
    return Comparison(
        name="any_program",
        title="Any program on every machine",
        text=TEXT,
        unit="s",
        samples=samples,
    )


def _until_all_run(starts: Sequence[Callable[[], Process]]) -> float:
    processes = [start() for start in starts[:-1]]
    started = time.monotonic()
    processes.append(starts[-1]())
    for process in processes:
        assert process.wait(TIMEOUT) == 0, process.describe()
    lines = [line for process in processes for line in process.stdout.splitlines() if line.startswith("runs at")]
    assert len(lines) == HOSTS, lines
    return max(float(line.split()[-1]) for line in lines) - started
