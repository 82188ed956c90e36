"""From a call to a :class:`~mingle.job.Job`: settings, discovery, store, environment, and what goes on afterwards."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from mingle import forksafe
from mingle._version import __version__
from mingle.config import node, settings
from mingle.config.settings import Settings
from mingle.distributed import environment, gloo, torch_threads
from mingle.distributed.environment import process_environment
from mingle.distributed.session import Entry, ForeignSession, LoneSession, RunningSession
from mingle.engine import file_limit, progress, store
from mingle.engine.discovery import Discovery
from mingle.errors import ConfigurationError, MingleError
from mingle.job import Job, Member
from mingle.protocol.machine import Formation, Identity, scoped
from mingle.wire.datagrams import clip
from mingle.wire.frames import ProcessInfo

logger = logging.getLogger("mingle")

Session: TypeAlias = RunningSession | LoneSession | ForeignSession

_caller: threading.Thread | None = None
"""Who is in a call of mingle's."""
_changing_caller = forksafe.register_lock(threading.Lock())
_active: Session | None = None
_bound_gloo: Callable[[], None] | None = None
"""Undoes what Gloo was told."""


def _hold(session: Session) -> None:
    """A session has begun: it is this process's from now on."""
    global _active
    session.on_close = functools.partial(_forget, session)
    _active = session


def _forget(session: Session) -> None:
    """A session has ended: the environment is the user's again."""
    global _active
    if _active is session:
        _active = None
        process_environment.restore()
        _unbind_gloo()


def tell_group_stands() -> None:
    """Says that the process group of the present session stands."""
    if (active := _active) is not None:
        active.group_stands()


def entry(seconds: float) -> Entry | None:
    """Returns what torch needs to make the process group of the present session, unless that is torchrun's.

    Args:
        seconds: for how long a store that does not answer is waited for.

    Raises:
        MingleError: rank 0 is lost, or its store has not answered.
    """
    return None if (active := _active) is None else active.entry(seconds)


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Lets one call at a time through.

    Raises:
        ConfigurationError: another thread is in one.
    """
    global _caller
    with _changing_caller:
        # Not a lock that is held meanwhile: Ctrl-C between its taking and the block that lets it go, and a notebook
        # could never call again. A thread that calls anew is in no call any more, whatever has ended the last one.
        if _caller not in (None, threading.current_thread()) and _caller.is_alive():
            raise ConfigurationError.explain(
                "mingle is already discovering a job in this process.",
                cause="init() or discover() was called from two threads at once",
                remedy="call it once, from one thread, and share the job.",
            )
        _caller = mine = threading.current_thread()
    try:
        yield
    finally:
        if _caller is mine:  # else this is the end of one that was interrupted, and another call has begun since
            _caller = None


def loss() -> MingleError | None:
    """Returns that rank 0 of the present session is lost, if it is."""
    return active.loss() if isinstance(active := _active, RunningSession) else None


def end_session(*, failing: bool = False) -> None:
    """End this process's session, if there is one.

    Args:
        failing: whether an exception ends the session.
    """
    if (active := _active) is not None:
        active.close(failing=failing)


def resolve(arguments: dict[str, Any]) -> Settings:
    """Returns the settings of a call; what mingle itself exported earlier does not count."""
    if sys.platform == "win32":
        raise ConfigurationError.explain(
            "mingle does not run on Windows.",
            cause="its sockets and process identities need Linux (macOS: best effort)",
            remedy="run it under WSL2 or in a Linux container.",
        )
    environ = process_environment.visible()
    progress.point_out_mistyped(environ)
    return settings.resolve(environ, **arguments)


def form(wanted: Settings, *, enters: bool = False) -> Job:
    """Carry out a call: end this process's old session, discover, export, and return the job.

    The session is registered as soon as its job has formed, so that `end_session` ends it even if the call is
    interrupted.

    Args:
        wanted: of the call.
        enters: whether `entry` makes a process group from the job.
    """
    end_session()
    _import_torch()
    started = time.monotonic()
    if wanted.pass_through:
        return _passed_through(wanted)
    try:
        formation, session = _form_alone(wanted) if wanted.world_size == 1 else _discover(wanted, enters=enters)
        _export(wanted, formation)
        _bind_gloo(formation)
    except BaseException:
        end_session(failing=True)
        raise
    logger.info(
        "job %s: rank %d of %d, rank 0 at %s:%d, own interface %s",
        wanted.job_id,
        formation.rank,
        formation.world_size,
        formation.store_address,
        formation.store_port,
        formation.interface,
    )
    return Job(
        job_id=wanted.job_id,
        rank=formation.rank,
        world_size=formation.world_size,
        local_rank=formation.local_rank,
        local_world_size=formation.local_world_size,
        node_rank=formation.node_rank,
        num_nodes=formation.num_nodes,
        master_addr=formation.store_address,
        master_port=formation.store_port,
        interface=formation.interface,
        address=formation.address,
        elapsed=time.monotonic() - started,
    )._with(session)


def _import_torch() -> None:
    """Imports torch before the first packet: its seconds must not count as waiting for the others."""
    importlib.import_module("torch.distributed")


def _discover(wanted: Settings, *, enters: bool) -> tuple[Formation, RunningSession]:
    if wanted.rank in (0, None):
        quiet = wanted.progress == "off"
        file_limit.make_room(wanted.world_size, file_limit.FILES_PER_RANK, what="ranks", quiet=quiet)
    discovery = Discovery(wanted, _identity(wanted), enters=enters)
    try:
        formation = discovery.run()
        session = RunningSession(discovery, formation)
        _hold(session)
    except BaseException:
        discovery.close("interrupted")  # unless it is closed already
        raise
    return formation, session


def _identity(wanted: Settings) -> Identity:
    torch = sys.modules["torch"]
    key = node.identity()
    return Identity(
        job=wanted.job_id,
        attempt=clip(wanted.attempt or ""),
        member=secrets.token_bytes(16),
        rank=wanted.rank,
        world_size=wanted.world_size,
        node=(f"launcher {wanted.node}" if wanted.node is not None else key)[:256],
        who=ProcessInfo(hostname=_hostname(), pid=os.getpid(), rank=wanted.rank),
        local_rank=wanted.local_rank,
        local_world_size=wanted.local_world_size,
        node_rank=wanted.node_rank,
        versions={
            "mingle": __version__,
            "torch": str(torch.__version__)[:64],
            "python": sys.version.split(maxsplit=1)[0][:64],
        },
    )


def _hostname() -> str:
    """Returns this machine's name, cut so that every datagram has room for it."""
    return clip(socket.gethostname())


def _form_alone(wanted: Settings) -> tuple[Formation, LoneSession]:
    """Forms a job of one rank: a store on loopback, and not a single packet."""
    session = secrets.token_bytes(16)
    server = store.open_server("127.0.0.1", wanted.master_port, session)
    local_rank = wanted.local_rank or 0
    member = Member(
        rank=0, local_rank=local_rank, node_rank=0, hostname=_hostname(), address="127.0.0.1", pid=os.getpid()
    )
    formation = Formation(
        session=session,
        rank=0,
        world_size=1,
        local_rank=local_rank,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        store_address="127.0.0.1",
        store_port=server.port,
        interface="lo" if sys.platform == "linux" else "lo0",
        address="127.0.0.1",
        roster_digest=b"",
    )
    lone = LoneSession(member, server)
    _hold(lone)
    lone.serve()
    return formation, lone


def _export(wanted: Settings, formation: Formation) -> None:
    notes = process_environment.export(
        environment.variables(
            rank=formation.rank,
            world_size=formation.world_size,
            local_rank=formation.local_rank,
            local_world_size=formation.local_world_size,
            node_rank=formation.node_rank,
            master_addr=formation.store_address,
            master_port=formation.store_port,
            interface=formation.interface,
            interface_was_named=wanted.interfaces_from in ("interface=", "MINGLE_INTERFACE"),
        )
    )
    for note in notes:
        progress.say(logging.WARNING, f"job {wanted.job_id}: {note}", quiet=wanted.progress == "off")


def _bind_gloo(formation: Formation) -> None:
    """Has Gloo use the address that was proved, where by the name of the interface it would take another one."""
    global _bound_gloo
    interface, address = formation.interface, formation.address
    if gloo.misses(interface, address, os.environ):
        _bound_gloo = gloo.bind(scoped(address, interface))


def _unbind_gloo() -> None:
    global _bound_gloo
    undo, _bound_gloo = _bound_gloo, None
    if undo is not None:
        undo()


def _passed_through(wanted: Settings) -> Job:
    """Under torchrun everybody is found already."""
    assert wanted.rank is not None
    assert wanted.master_addr is not None
    assert wanted.master_port is not None
    session = ForeignSession()
    _hold(session)
    node_rank = wanted.node_rank or 0
    if "NODE_RANK" not in os.environ:
        process_environment.export({"NODE_RANK": str(node_rank)})
    local_world_size = wanted.local_world_size or 1
    return Job(
        job_id=wanted.job_id,
        rank=wanted.rank,
        world_size=wanted.world_size,
        local_rank=wanted.local_rank or 0,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=wanted.num_nodes or max(1, wanted.world_size // local_world_size),
        master_addr=wanted.master_addr,
        master_port=wanted.master_port,
        interface="",
        address="",
        elapsed=0.0,
    )._with(session, members=())


@atexit.register
def _at_exit() -> None:
    """Says good-bye at the interpreter's exit, so that nobody takes a finished rank for a crashed one."""
    with contextlib.suppress(MingleError):
        end_session()
    torch_threads.settle()
