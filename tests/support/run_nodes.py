"""Processes of `mingle-run` on this machine, each of which stands for a machine of its job."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.bystanders import command_environment
from tests.support.loopback import until
from tests.support.ports import free_udp_port

COMMAND = (sys.executable, "-m", "mingle.run.command")
SAY = "echo $$ > pid{node_rank}; "
"""What a program says for `Nodes.started`."""
WAIT = "until test -e go; do sleep 0.05; done; "
"""What a program does until `Nodes.go`."""


def one(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one `mingle-run` to its end."""
    return subprocess.run(
        [*COMMAND, *words],
        env={**command_environment(29499), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


class Nodes:
    """Several `mingle-run` of one job on `lo`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.udp = free_udp_port()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str, count: int = 3, given: Sequence[int | None] | None = None, **more: str) -> None:
        """Start as many as there are given node ranks, by default all of them; None: it is assigned."""
        for rank in range(count) if given is None else given:
            place = [] if rank is None else ["--node-rank", str(rank)]
            line = ["--nnodes", str(count), "--job-id", "test", *place, *words]
            self.processes.append(
                subprocess.Popen(
                    [*COMMAND, *line],
                    # A progress line after a long wait would be in what they have written.
                    env={**command_environment(self.udp), "MINGLE_PROGRESS": "off", **more},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=self.folder,
                )
            )

    def started(self, count: int | None = None) -> list[int]:
        """Wait until every program has written its pid to the file of its node, and return them by node rank."""
        names = [self.folder / f"pid{rank}" for rank in range(len(self.processes) if count is None else count)]
        until(lambda: all(name.exists() and name.read_text().endswith("\n") for name in names), 60)
        return [int(name.read_text()) for name in names]

    def wait_for_words(self, words: str) -> None:
        """Wait until one of them has written these words to stderr; `ended` returns what follows."""
        errors = {process.stderr: b"" for process in self.processes if process.stderr is not None}
        while not any(words.encode() in said for said in errors.values()):
            readable, _, _ = select.select(list(errors), [], [], 60)
            assert readable, errors
            for stream in readable:
                errors[stream] += os.read(stream.fileno(), 65536)

    def go(self) -> None:
        """Let the programs go on that wait."""
        (self.folder / "go").touch()

    def ended(self, seconds: float = 60) -> list[tuple[int, str, str]]:
        """Return status, output and errors of each."""
        done = []
        for process in self.processes:
            output, errors = process.communicate(timeout=seconds)
            done.append((process.returncode, output, errors))
        return done

    def statuses(self) -> list[int]:
        """Return the status of each."""
        return [status for status, _, _ in self.ended()]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; the one that adopted it need not have reaped it yet."""
    try:
        return state(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):  # reaped before it is opened, or before it is read
        return True


def state(pid: int) -> str:
    """Return the state of a process, as `ps` shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
