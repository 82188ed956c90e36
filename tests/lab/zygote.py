"""A process that has imported torch once and forks a rank from itself whenever a test asks for one.

Importing torch costs seconds of CPU; a fork costs milliseconds. The zygote has a single thread, because only
that one would survive a fork, and because the kernel lets only a single-threaded process change its mount
namespace. It never imports a test module. A forked rank differs from a fresh interpreter in that modules are
loaded already and that all ranks share one seed of ``hash(str)``: what depends on either needs `Host.run`,
which starts a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import math
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from .errors import LabError
from .messages import (
    MAX_MESSAGE,
    Done,
    DropNamespaces,
    Exited,
    MakeNamespace,
    NamespaceMade,
    Ready,
    Refused,
    Reply,
    Request,
    Signal,
    Spawn,
    Spawned,
)
from .namespaces import Namespaces, kill_processes_in, make_namespaces
from .rank import run_rank
from .syscalls import adopt_orphans, die_with_parent

PRELOAD = ("torch", "torch.distributed", "torch.distributed.run", "pytest")
PRELOAD_IF_INSTALLED = ("mingle", "mingle.distributed.rendezvous", "mingle.torch_env")
KILL_SECONDS = 10.0
"""How long no killed process may end before something is badly wrong, such as an unkillable state."""


@dataclass(frozen=True)
class Child:
    """What a forked child needs to become a process of a host."""

    spawn: Spawn
    namespaces: Namespaces
    channel: int | None

    def run(self, zygote_pid: int) -> NoReturn:
        """Become the process, and end with it: this does not return."""
        die_with_parent(signal.SIGKILL)
        if os.getppid() != zygote_pid:
            os.kill(os.getpid(), signal.SIGKILL)  # the zygote ended before die_with_parent could tell
        os.setsid()
        for descriptor, path in ((1, self.spawn.stdout), (2, self.spawn.stderr)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.chdir(self.spawn.directory)
        self.namespaces.enter()
        _close_all_but(self.channel)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for name, value in self.spawn.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.spawn.call is None:
            # as a shell would start it: Python ignores SIGPIPE, and who started the tests may ignore SIGINT
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execvpe(self.spawn.command[0], list(self.spawn.command), os.environ)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["rank"]
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # the test may read along
        if self.channel is None:
            raise LabError("a rank was spawned without a channel to its test")
        status = run_rank(Connection(self.channel), self.spawn.call)
        # What the end of an interpreter does that others can see: non-daemon threads are waited for, exit
        # functions run. Freeing every object of torch would take ten times as long as the rest of a rank's
        # life.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Zygote:
    """The loop that serves one test process until that closes its end of ``control``."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._home = Namespaces.of_this_process()
        self._hosts: dict[int, Namespaces] = {}
        self._children: set[int] = set()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wakeup socket
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        adopt_orphans()

    def disown(self) -> None:
        """Forget the sockets in a forked child: to close them there is the child's task, and its alone."""
        for owned in (self._control, self._wakeup, self._wakeup_writer):
            owned.detach()

    def serve(self) -> Child | None:
        """Carry out requests until the test process is gone; return a `Child` in each forked child."""
        self._send(Ready())
        # Closed in a child before its descriptors are: a selector is part of a cycle, and one that were left to
        # the garbage collector would close, much later, whatever has its number by then.
        with selectors.DefaultSelector() as selector:
            return self._serve(selector)

    def _serve(self, selector: selectors.BaseSelector) -> Child | None:
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if self._wakeup in ready:
                self._reap()
            if self._control in ready:
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
                except ConnectionResetError:  # the test process left without reading all that was sent to it
                    message = b""
                if not message:
                    self._kill(list(self._hosts))
                    return None
                answer = self._carry_out(pickle.loads(message), descriptors)
                if isinstance(answer, Child):
                    return answer
                self._send(answer)

    def _send(self, message: Reply | Exited) -> None:
        with contextlib.suppress(BrokenPipeError):  # the test process is gone, which serve() is about to read
            self._control.send(pickle.dumps(message))

    def _carry_out(self, request: Request, descriptors: list[int]) -> Reply | Child:
        try:
            if isinstance(request, MakeNamespace):
                return self._make(request)
            if isinstance(request, Spawn):
                return self._spawn(request, descriptors)
            if isinstance(request, Signal):
                self._signal(request)
            else:
                self._kill(list(request.keys))
                if isinstance(request, DropNamespaces):
                    for key in request.keys:
                        self._hosts.pop(key).close()
            return Done()
        except (OSError, LabError) as error:
            return Refused(f"{type(request).__name__}: {error}")

    def _make(self, request: MakeNamespace) -> NamespaceMade:
        made = make_namespaces(request, self._home)
        self._hosts[made.net] = made
        return NamespaceMade(made.net, f"/proc/{os.getpid()}/fd/{made.net}")

    def _spawn(self, request: Spawn, descriptors: list[int]) -> Spawned | Child:
        channel = descriptors[0] if descriptors else None
        child = Child(request, self._host(request.namespace), channel)
        entered, entering = os.pipe()
        pid = os.fork()
        if pid == 0:
            return child
        os.close(entering)
        os.read(entered, 1)  # the child closes its end once it is in the host, where _kill finds it
        os.close(entered)
        if channel is not None:
            os.close(channel)
        self._children.add(pid)
        return Spawned(pid)

    def _host(self, key: int) -> Namespaces:
        if key not in self._hosts:
            raise LabError("the lab of this host is closed: use its hosts inside its `with` block only")
        return self._hosts[key]

    def _signal(self, request: Signal) -> None:
        if request.pid not in self._children:
            raise LabError(f"process {request.pid} has ended already")
        os.kill(request.pid, request.number)
        if request.number == signal.SIGSTOP:
            os.waitid(os.P_PID, request.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):  # that is: until it is empty
            while self._wakeup.recv(4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:  # the others are orphans that it adopted
                self._children.discard(pid)
                self._send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _kill(self, keys: list[int]) -> None:
        """Kill all that runs in these hosts, unknown descendants included, and wait until it is gone."""
        inodes = [self._host(key).inode for key in keys]
        kill_all(partial(kill_processes_in, inodes), self._await_an_end, time.monotonic)

    def _await_an_end(self) -> None:
        # the end of a child, or of an orphan of its own, wakes this up
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ)
            selector.select(0.01)
        self._reap()


def kill_all(kill: Callable[[], int], wait: Callable[[], None], clock: Callable[[], float]) -> None:
    """Kill until nobody is left. A thousand processes end one after another, so what counts is that some do.

    Args:
        kill: kills all that are there, and returns how many that were.
        wait: waits a moment for them.
        clock: the time in seconds.

    Raises:
        LabError: for `KILL_SECONDS` their number did not fall.
    """
    fewest, deadline = math.inf, 0.0
    while left := kill():
        now = clock()
        if left < fewest:
            fewest, deadline = left, now + KILL_SECONDS
        elif now > deadline:
            raise LabError(
                f"processes in the lab's namespaces did not end within {KILL_SECONDS} s of SIGKILL: {left} are left"
            )
        wait()


def preload() -> None:
    """Import what ranks need, once for all.

    Raises:
        LabError: an import started a thread, which forked children would not have.
    """
    for name in PRELOAD:
        importlib.import_module(name)
    for name in PRELOAD_IF_INSTALLED:
        if importlib.util.find_spec(name.partition(".")[0]) and importlib.util.find_spec(name):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) != 1:
        raise LabError(
            f"an import started threads ({', '.join(threads)}); a forked rank would lack them. Take the "
            f"module that starts one out of PRELOAD in {__file__}"
        )
    gc.collect()
    gc.freeze()  # a child's collections leave the shared pages alone


def main(descriptor: int, directory: str) -> None:
    """Serve the test process at the other end of the socket ``descriptor``; then remove ``directory``."""
    pid = os.getpid()
    preload()
    zygote = Zygote(socket.socket(fileno=descriptor))
    child = zygote.serve()
    if child is not None:
        zygote.disown()
        child.run(pid)
    shutil.rmtree(directory)


def _close_all_but(kept: int | None) -> None:
    """Leave a child the standard descriptors and its channel: what else it held would outlive its owner."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        if descriptor > 2 and descriptor != kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(descriptor)
