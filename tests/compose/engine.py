"""The Docker engine that the tests run on: the one that answers, or one that lives as long as they do.

An engine of one's own runs in network, mount and process namespaces of its own, with slirp4netns(1) as its only way
out, which image builds need. So what Docker does to a machine's network (bridges, firewall rules, forwarding) and its
mounts is gone when it ends, no packet of a container reaches a network of this machine, and the kernel ends every
process of it when the first one ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .commands import provide, run
from .errors import EngineError

START_SECONDS = 60.0
STOP_SECONDS = 30.0
# What an image, its layers and the containers take is about 3 GB. On a disk half of the time goes into writing and
# removing it; so it stays in memory where that leaves enough for everybody else.
_DATA_BYTES = 8 << 30
_ENOUGH_BYTES = 16 << 30
_NAME_SERVER = "10.0.2.3"  # slirp4netns(1)


@dataclass(frozen=True)
class Engine:
    """A Docker engine that answers.

    Attributes:
        environment: the variables by which clients find it.
        own: whether it belongs to the tests, and everything in it with it.
        directory: where an engine that was started here keeps its files.
        init: the first process in the namespaces of such an engine, by its number out here.
    """

    environment: Mapping[str, str]
    own: bool
    directory: Path | None = None
    init: int = 0

    def docker(self, *arguments: str, timeout: float = 60) -> str:
        """Run docker(1) and return its answer without the last line's end."""
        return run("docker", *arguments, timeout=timeout, environment=self.environment).rstrip("\n")


def running_engine() -> Engine | None:
    """The engine that this user's `docker` talks to, if there is one."""
    try:
        run("docker", "version", timeout=20)
    except EngineError:
        return None
    return Engine({}, own=False)


@contextlib.contextmanager
def started_engine() -> Iterator[Engine]:
    """Start an engine, as root, with all its data in a temporary directory, and end it.

    Raises:
        EngineError: it did not start; with the end of its log.
    """
    provide(["docker", "docker-init", "dockerd", "iptables", "setpriv", "slirp4netns", "unshare"])
    with contextlib.ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mingle-engine-", ignore_cleanup_errors=True))
        )
        log = stack.enter_context((directory / "log").open("wb"))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
                ready.bind(str(directory / "ready"))
                daemon, init = stack.enter_context(_daemon(directory, log))
                _wait_until_ready(ready, daemon)
        except EngineError as error:
            tail = (directory / "log").read_text(errors="replace").splitlines()[-20:]
            raise EngineError("\n".join([f"no Docker engine could be started: {error}", *tail])) from error
        yield Engine({"DOCKER_HOST": f"unix://{directory}/socket"}, own=True, directory=directory, init=init)


@contextlib.contextmanager
def _daemon(directory: Path, log: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run dockerd in namespaces with a network, under an init that passes signals on and reaps the dead."""
    dockerd = [
        *("dockerd", "--host", f"unix://{directory}/socket", "--pidfile", f"{directory}/pid"),
        *("--data-root", f"{directory}/data", "--exec-root", f"{directory}/exec", "--dns", _NAME_SERVER),
    ]
    data = directory / "data"
    data.mkdir()
    in_memory = f"mount -t tmpfs -o size={_DATA_BYTES} tmpfs {data};" if _available_bytes() >= _ENOUGH_BYTES else ""
    with subprocess.Popen(
        [
            # The tests may be killed; that ends unshare, and --kill-child what it has started.
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-ec", f"{in_memory} echo; exec docker-init -- {shlex.join(dockerd)} >&2"),
        ],
        env={**os.environ, "NOTIFY_SOCKET": f"{directory}/ready"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
    ) as unshare:
        assert unshare.stdout is not None
        try:
            _wait_for_byte(unshare.stdout.fileno(), "its namespaces")
            # proc_pid_task(5): the one child of unshare, by its number out here
            child = int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text())
            with _way_out(child, log):
                try:
                    yield unshare, child
                finally:
                    if unshare.poll() is None:
                        os.kill(child, signal.SIGTERM)
                        with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
                            unshare.wait(STOP_SECONDS)
        finally:
            unshare.kill()


@contextlib.contextmanager
def _way_out(child: int, log: IO[bytes]) -> Iterator[None]:
    """Connect the namespace of a process to the networks of this machine as a mere program here would be."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as sign, os.fdopen(writer, "wb") as theirs:
        command = [
            *("setpriv", "--pdeathsig", "KILL", "slirp4netns", "--configure", "--disable-host-loopback"),
            *(f"--ready-fd={writer}", str(child), "tap0"),
        ]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[writer]) as slirp:
            theirs.close()
            try:
                _wait_for_byte(sign.fileno(), "slirp4netns")
                yield
            finally:
                slirp.kill()


def _available_bytes() -> int:
    """How much memory programs can have without others having to leave theirs: proc_meminfo(5)."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _wait_for_byte(reader: int, whose: str) -> None:
    """Wait for the sign of life that a child writes to a pipe."""
    readable, _, _ = select.select([reader], [], [], START_SECONDS)
    if not readable or not os.read(reader, 1):
        raise EngineError(f"{whose} failed to start")


def _wait_until_ready(ready: socket.socket, daemon: subprocess.Popen[bytes]) -> None:
    """Wait for what dockerd tells its service manager when it serves: see sd_notify(3)."""
    deadline = time.monotonic() + START_SECONDS
    ready.settimeout(0.5)
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            if b"READY=1" in ready.recv(4096):
                return
        if daemon.poll() is not None:
            raise EngineError(f"dockerd ended with status {daemon.returncode}")
    raise EngineError(f"dockerd did not get ready within {START_SECONDS:.0f} s")
