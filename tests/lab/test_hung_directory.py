"""A directory whose server does not answer: it is named, everything else works beside it, and no end waits for it.

The processes are on `lo` of this machine; the mount is what these tests need root for.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.levels import soaking
from tests.support.ports import free_udp_port

from .hung_directory import HungDirectory, hung_directory
from .lab import why_unavailable
from .scenarios import least

END_SECONDS = 2.0 if soaking() else 4.0
"""What is waited for in vain costs five."""
WAITS = """
import atexit, sys, time
atexit.register(lambda: print(f"the last exit handler at {time.monotonic()}", flush=True))
import mingle
try:
    rank, timeout = int(sys.argv[2]), float(sys.argv[3])
    job = mingle.discover("hung", rank=rank, world_size=2, peers=sys.argv[1], discovery_timeout=timeout)
    print(f"formed after {job.elapsed:.2f} s", flush=True)
    job.close()
except KeyboardInterrupt:
    print("interrupted", flush=True)
except mingle.DiscoveryTimeoutError as error:
    print(error, flush=True)
print(f"returned at {time.monotonic()}", flush=True)
"""


@contextlib.contextmanager
def hung_in(directory: Path) -> Iterator[HungDirectory]:
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    path = directory / "hung"
    path.mkdir(exist_ok=True)
    with hung_directory(path) as made:
        yield made


@contextlib.contextmanager
def start(hung: HungDirectory, rank: int, port: int, timeout: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, f"dir:{hung.path}", str(rank), str(timeout)],
        env={**os.environ, "MINGLE_INTERFACE": "lo", "MINGLE_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], since: float | None = None) -> tuple[str, str, float]:
    """Return what a process wrote, and how long its end took, since a moment or since its call returned.

    What counts is the interpreter's last exit handler: torch's own end takes a second more on a machine that is busy.
    """
    out, err = process.communicate(timeout=120)
    total = time.monotonic()
    returned, last = (float(each.split()[0]) for each in out.split("at ")[-2:])
    begin = returned if since is None else since
    print(f"the last exit handler ran after {last - begin:.2f} s, the process ended after {total - begin:.2f} s")
    assert total - begin < 5 * END_SECONDS
    assert process.returncode == 0, err
    return out, err, last - begin


def test_ctrl_c_ends_a_process_although_a_directory_hangs(tmp_path: Path) -> None:
    def end() -> float:
        with hung_in(tmp_path) as hung, start(hung, 1, free_udp_port()) as process:
            assert hung.asked.wait(90)
            interrupted = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, _, took = ended(process, interrupted)
        assert "interrupted" in out
        return took

    assert least(end, END_SECONDS) < END_SECONDS


def test_a_directory_that_hangs_is_named_and_does_not_delay_the_exit(tmp_path: Path) -> None:
    def end() -> float:
        with hung_in(tmp_path) as hung, start(hung, 1, free_udp_port(), timeout=30.0) as process:
            out, err, took = ended(process)
        cause = f"dir:{hung.path} in MINGLE_PEERS has not answered for more than 3 s"
        assert re.search(rf"\d\d s · likely cause: {re.escape(cause)}", err)
        assert f"likely cause: {cause}" in out
        return took

    assert least(end, END_SECONDS) < END_SECONDS


def test_multicast_works_beside_a_directory_that_hangs(tmp_path: Path) -> None:
    def form() -> float:
        port, took = free_udp_port(), []
        with hung_in(tmp_path) as hung, start(hung, 0, port) as host, start(hung, 1, port) as member:
            for process in (member, host):
                out, _ = process.communicate(timeout=120)
                assert process.returncode == 0
                print(out)
                took.append(float(out.split("formed after ")[1].split()[0]))
        return max(took)

    assert least(form, 2.0) < 2.0
