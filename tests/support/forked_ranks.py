"""Ranks for a test: real processes on the loopback interface, forked from one that has imported torch.

Torch takes seconds to import. So a process of its own does that once, forks all the ranks a test wants, and
tells what they printed; the test's process stays free of torch and of what the ranks leave behind. There is no
numpy in it, as in the environment that docs/install.md makes.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import without_numpy
from tests.support.ports import free_udp_port

ROOT = Path(__file__).parents[2]
DEADLINE = 270  # seconds; a bound for a loaded machine, not an expectation
# IPv6 on the loopback interface is not everywhere, and would lengthen what is printed.
ON_LOOPBACK = {"MINGLE_INTERFACE": "lo", "MINGLE_FAMILY": "4"}
# Torch's store warns of this on a host that reaches no name server: it looks for the name of ::ffff:127.0.0.1.
_NO_NAME_SERVER = re.compile(r"^\[W.*The hostname of the client socket cannot be retrieved\. err=-3\n", re.MULTILINE)


@dataclass(frozen=True)
class Rank:
    """A process to be: its environment and what it runs."""

    settings: Mapping[str, str]
    code: str = 'import mingle; mingle.discover("resnet")'
    file: str = "train.py"


def run_ranks(groups: Mapping[str, Sequence[Rank]], preload: Sequence[str] = ()) -> dict[str, list[tuple[int, str]]]:
    """Run groups of ranks, all at once; return each one's exit status and what it printed.

    A group has a UDP port of its own, so none hears another, nor what runs beside this test; what is printed
    names the default port in its place. What is slow to import, beside torch, is named in ``preload``
    and has numpy.
    """
    # Not above: whether and when mingle is imported is the ranks' own affair.
    from mingle.config.settings import DEFAULT_PORT

    ports = {name: str(free_udp_port()) for name in groups}
    wanted = [
        {"settings": {**ON_LOOPBACK, "MINGLE_PORT": ports[name], **rank.settings}, "code": rank.code, "file": rank.file}
        for name, ranks in groups.items()
        for rank in ranks
    ]
    results = iter(_forker(tuple(preload)).run(wanted))
    return {
        name: [
            (status, _NO_NAME_SERVER.sub("", output).replace(f"UDP port {ports[name]}", f"UDP port {DEFAULT_PORT}"))
            for status, output in (next(results) for _ in ranks)
        ]
        for name, ranks in groups.items()
    }


class _Forker:
    """The process that forks: it has imported torch once, and lives as long as the tests do."""

    def __init__(self, preload: Sequence[str]) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable if preload else without_numpy.python(), "-m", "tests.support.forked_ranks", *preload],
            cwd=ROOT,
            env=kept | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._close)

    def run(self, wanted: list[dict[str, Any]]) -> list[tuple[int, str]]:
        """Have these ranks run, all at once; return each one's exit status and output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], DEADLINE)[0]:
            self._process.kill()
            _forker.cache_clear()
            raise TimeoutError(f"the ranks have not ended within {DEADLINE} s")
        results: list[tuple[int, str]] = json.loads(self._process.stdout.readline())
        return results

    def _close(self) -> None:
        """It ends when it reads no more."""
        with self._process:
            pass


_forker = functools.cache(_Forker)


def _serve() -> None:
    """Be the process that forks the ranks."""
    for module in ("torch.distributed", *sys.argv[1:]):
        importlib.import_module(module)  # once for all of them
    for line in sys.stdin:
        print(json.dumps(_run_all(json.loads(line))), flush=True)


def _run_all(wanted: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Fork the ranks, and wait for all of them."""
    outputs = [tempfile.TemporaryFile("w+") for _ in wanted]  # noqa: SIM115 - open until all have written
    pids = []
    for rank, output in zip(wanted, outputs, strict=True):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os._exit(_run_one(rank))
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    results = []
    for status, output in zip(statuses, outputs, strict=True):
        output.seek(0)
        results.append((status, output.read()))
        output.close()
    return results


_MAIN: dict[str, Any] = {"__name__": "__main__"}
"""The names of a rank's script, kept until its exit functions have run, as an interpreter keeps them.

DDP's reducer, freed while one of Gloo's threads still waits for the interpreter's lock, joins that thread for ever.
"""


def _run_one(rank: dict[str, Any]) -> int:
    """Run the code as an interpreter runs a script, and end as one."""
    os.environ.update(rank["settings"])
    status = 0
    try:
        exec(compile(rank["code"], rank["file"], "exec"), _MAIN)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    _serve()
