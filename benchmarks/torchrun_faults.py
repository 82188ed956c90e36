"""torchrun with mingle, by fault: until all that are left train again, with torch's defaults."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.lab import Host, Lab

from benchmarks.results import Comparison
from benchmarks.samples import alternate
from benchmarks.torchrun_recovery import PATIENCE_SECONDS, Run, begin, crash

TEXT = f"""\
`--nnodes=2:3` with 3 hosts, or `2:5` with 5, one worker each, `--max-restarts=3`, all else as torch has it, from the
fault until all that are left have made a step together; the waiting ended after {PATIENCE_SECONDS:.0f} s. Killed
processes end with SIGKILL, and a host that is cut off keeps them."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes four minutes."""
    with tempfile.TemporaryDirectory() as directory:
        rows = {what: partial(_once, Path(directory), *row) for what, row in ROWS.items()}
        samples = alternate(rounds, rows)
    return Comparison(
        name="torchrun_faults", title="torchrun, training again by fault", text=TEXT, unit="s", samples=samples
    )


def _once(directory: Path, size: int, fault: Callable[[Run], float], round_: int) -> float:
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(size)]
        return fault(Run("mingle", hosts, directory / f"{fault.__name__}-{round_}"))


def _until(run: Run, hosts: Sequence[Host], since: float) -> float:
    again = run.together(hosts, since, PATIENCE_SECONDS)
    return PATIENCE_SECONDS if again is None else again - since


def _without(run: Run, *lost: Host) -> list[Host]:
    return [host for host in run.hosts if host not in lost]


def _member(run: Run) -> Host:
    return _without(run, run.store_host())[0]


def _killed(run: Run, *lost: Host) -> float:
    since = time.monotonic()
    for host in lost:
        host.kill()
    return _until(run, _without(run, *lost), since)


def _host_killed(run: Run) -> float:
    begin(run)
    return _killed(run, run.store_host())


def _host_cut_off(run: Run) -> float:
    begin(run)
    lost, since = run.store_host(), time.monotonic()
    lost.cut()
    return _until(run, _without(run, lost), since)


def _member_killed(run: Run) -> float:
    begin(run)
    return _killed(run, _member(run))


def _host_and_member_killed(run: Run) -> float:
    begin(run)
    return _killed(run, run.store_host(), _member(run))


def _all_started_again(run: Run) -> float:
    begin(run)
    since = time.monotonic()
    for host in run.hosts:
        host.kill()
    run.start()
    return _until(run, run.hosts, since)


def _one_started_again(run: Run) -> float:
    begin(run)
    lost = _member(run)
    lost.kill()
    run.together(_without(run, lost), time.monotonic(), PATIENCE_SECONDS)
    since = time.monotonic()
    run.start_on(lost)
    return _until(run, run.hosts, since)


ROWS: dict[str, tuple[int, Callable[[Run], float]]] = {
    "a worker crashes": (3, crash),
    "the store's host is killed": (3, _host_killed),
    "the store's host is cut off": (3, _host_cut_off),
    "another host is killed": (3, _member_killed),
    "the store's host and another one of 2:5 are killed": (5, _host_and_member_killed),
    "all are started again": (3, _all_started_again),
    "one is started again while the others train": (3, _one_started_again),
}
