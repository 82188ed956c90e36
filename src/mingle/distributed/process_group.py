"""Torch's process group: the options of ``init``, and the group that mingle has made.

The options are checked before the first packet: torch would refuse them only after the whole wait.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from msgspec import Struct

from mingle import detached
from mingle.config import settings, values
from mingle.distributed import gloo
from mingle.errors import ConfigurationError, comes_from_a_signal_handler

logger = logging.getLogger("mingle")

DESTROY_SECONDS = 2.0
_OURS = frozenset({"init_method", "store", "rank", "world_size", "backend"})
_NCCL = frozenset({"nccl", "nccl2", "nccl-legacy", "nccl-lazy"})
"""Torch's names for NCCL; before 2.15 only the first."""


class OwnGroup(Struct, frozen=True):
    """A process group that ``init`` has made.

    Attributes:
        group: compared by identity, since another group is the user's. The reference is weak: a process group holds its
            store, and a store that outlives its group breaks the next one.
        job_id: its job.
        await_members: waits until no other rank needs this one to make its group; called before the group is destroyed.
        pid: the process that made it. A forked child has a copy without the threads: ending that would wait for them
            forever.
    """

    group: weakref.ref[Any]
    job_id: str
    await_members: Callable[[], None]
    pid: int


_own: OwnGroup | None = None
_abandoned: weakref.ref[Any] | None = None
"""A group whose end was not waited for."""


def stands() -> bool:
    """Tell whether torch's default process group exists, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not hasattr(distributed, "is_initialized"):
        return False
    return bool(distributed.is_initialized())


def current() -> Any:
    """Return torch's default process group, or None."""
    return sys.modules["torch.distributed"].group.WORLD if stands() else None


def own(job_id: str, await_members: Callable[[], None]) -> Callable[[bool], None]:
    """Note that mingle has made the present group; return what destroys it (see `destroy`). See `OwnGroup`."""
    global _own
    _own = OwnGroup(weakref.ref(current()), job_id, await_members, os.getpid())
    return partial(destroy, _own)


def end_earlier() -> str:
    """End the process group that an earlier ``init`` made, as when a notebook's cell is run again.

    Returns:
        The job whose group it was; empty: there was no group.

    Raises:
        ConfigurationError: the process group was not made by mingle.
    """
    group = current()
    if group is None:
        return ""
    if (own := _own) is not None and own.group() is group:
        if own.pid == os.getpid():
            destroy(own, False)
            return own.job_id
        raise ConfigurationError.explain(
            "this process has a process group already.",
            cause="it is a fork of the process that made the group, and a fork can neither use nor end it",
            remedy="start it with multiprocessing's spawn method, or before mingle is called.",
        )
    if _abandoned is not None and _abandoned() is group:
        raise ConfigurationError.explain(
            "the process group of an earlier mingle.init has not ended.",
            cause="an exception ended that job, and its backend still waits for the other ranks, or failed to end",
            remedy="call again in a moment; if the error stays, restart this process.",
        )
    raise ConfigurationError.explain(
        "this process has a process group already.",
        cause="torch.distributed.init_process_group, or a framework, was called before mingle",
        remedy="call mingle first, or torch.distributed.destroy_process_group() before it.",
    )


def destroy(own: OwnGroup, failing: bool) -> None:
    """Destroy a process group that ``init`` made, if it still exists.

    Args:
        own: the group to destroy. A later group is left alone, and a forked child destroys nothing.
        failing: whether an exception is in flight. The other ranks may be gone, and a backend may wait for them: then
            this waits only a moment, and leaves the rest to a detached thread.
    """
    global _own
    if own.group() is None or current() is not own.group() or own.pid != os.getpid():
        return
    if failing:
        abandon()
    else:
        own.await_members()
        _end()
        _own = None  # not before: after an interrupt the next call ends it


def abandon() -> None:
    """Destroy the process group, if there is one, in a thread; wait for it briefly, then abandon it."""
    global _own, _abandoned
    _own = None
    if (group := current()) is None:
        return
    _abandoned = weakref.ref(group)
    del group  # the last reference must go in the thread: the destructor of Gloo's group waits for its operations
    thread = detached.thread("destroy", _end_quietly)
    detached.start(thread)
    thread.join(DESTROY_SECONDS)


def _end() -> None:
    gloo.settle()  # torch before 2.8 waits for its threads with the interpreter's lock, which they may want
    sys.modules["torch.distributed"].destroy_process_group()


def _end_quietly() -> None:
    try:
        _end()
    except Exception as error:
        # The exception that is on its way already is the one to be seen.
        logger.debug("destroying the process group failed: %s", error)


# --- the options of init -------------------------------------------------------------------------------------------


class GroupArguments(Struct, frozen=True, kw_only=True):
    """The arguments of :func:`mingle.init` that go to ``init_process_group``, unchecked.

    Attributes:
        backend: torch's name for it; None: torch's choice.
        options: the other options, by name.
    """

    backend: str | None
    options: Mapping[str, Any]


def check_arguments(group: GroupArguments) -> None:
    """Check, before the first packet, what ``init_process_group`` would refuse after the whole wait.

    Raises:
        ConfigurationError: a name that it does not know or that is mingle's own, or a value of the wrong type.
    """
    options = group.options
    distributed = importlib.import_module("torch.distributed")
    if options:
        _check_names(distributed, options)
    timeout = options.get("timeout")
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
        raise ConfigurationError.explain(
            f"timeout={timeout!r} is not a positive datetime.timedelta.",
            cause="timeout= is the process group's own timeout, as torch takes it",
            remedy="pass datetime.timedelta(minutes=10); mingle's own is discovery_timeout=, in seconds.",
        )
    for name, kinds in (("group_name", (str,)), ("device_id", (int, sys.modules["torch"].device))):
        value = options.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ConfigurationError.explain(
                f"{name}={value!r} has the wrong type.",
                cause=f"init_process_group takes {' or '.join(kind.__name__ for kind in kinds)} there",
                remedy=f"pass such a value, or leave {name}= out.",
            )
    if (device := options.get("device_id")) is not None:
        _check_device(device)
    check_backend(group.backend)


def _check_device(given: Any) -> None:
    """Check that a device is an accelerator of this machine, with its index, as `init_process_group` demands."""
    torch = sys.modules["torch"]
    # Where there is none, torch 2.6 raises, and a later one names what it was built for.
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind, index = (there and there.type, given) if isinstance(given, int) else (given.type, given.index)
    if there is not None and kind == there.type and index is not None and index < torch.accelerator.device_count():
        return
    raise ConfigurationError.explain(
        f"device_id={given!r} is no device of this machine with its index.",
        cause="this torch supports no accelerator, or finds none here"
        if there is None
        else f"there are {torch.accelerator.device_count()} devices of the type {there.type}, counted from 0",
        remedy='pass torch.device("cuda", local_rank), for example, or leave device_id= out.',
    )


def _check_names(distributed: Any, options: Mapping[str, Any]) -> None:
    own = [
        name
        for name, each in inspect.signature(sys.modules["mingle"].init).parameters.items()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    known = [name for name in inspect.signature(distributed.init_process_group).parameters if name not in _OURS]
    for name in options:
        if name in _OURS:
            raise ConfigurationError.explain(
                f"{name}= is not an option of mingle.init.",
                cause="mingle itself decides how the ranks find each other",
                remedy=f"leave {name}= out.",
            )
        if name not in known:
            public = [each for each in known if not each.startswith("_")]
            meant = values.nearest(name, [*own, *public])
            hint = "" if meant is None else f"; did you mean {meant}=?"
            raise ConfigurationError.explain(
                f"there is no option {name}={hint or '.'}",
                cause="a spelling mistake, or an option of init_process_group in another version of torch",
                remedy=f"mingle.init's own are: {', '.join(own)}; init_process_group's are: {', '.join(public)}.",
            )


def check_backend(backend: str | None) -> None:
    """Check, before the first packet, what torch would refuse only when all ranks have joined.

    Args:
        backend: as torch takes it; None: torch chooses, and Gloo is among those that it chooses.

    Raises:
        ConfigurationError: torch does not know the backend, can't parse its name, or can't use it here.
    """
    if backend is None:
        _check_gloo()
        return
    if not isinstance(backend, str):
        raise _no_backend(backend, "it is not a str")
    c10d = _c10d()
    names = [part.rpartition(":")[2].lower() for part in backend.split(",")]
    if {c10d.Backend.UNDEFINED, c10d.Backend.GLOO} & {*names}:
        _check_gloo()
    if backend.lower() == c10d.Backend.UNDEFINED or getattr(c10d, "_use_torchcomms_enabled", bool)():
        return  # torch chooses the backend, or TorchComms makes it, which has others
    # Before torch parses the whole: of a name that it does not know it would only warn.
    for name in names:
        _check_one(backend, name)
    problem = ""
    try:
        devices = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
        if not any(map(_is_third_party, names)):
            for device in devices:
                sys.modules["torch"].device(device)
    except (ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split())
    if problem:
        raise _no_backend(backend, problem)


def _check_gloo() -> None:
    if (problem := settings.gloo_problem(os.environ)) is not None:
        raise problem


def _check_one(backend: str, name: str) -> None:
    try:
        # From 2.15 on torch loads the package of a third party's backend when it is asked for.
        getattr(_c10d().Backend, "_ensure_backend_registered", bool)(name)
    except Exception as error:
        if comes_from_a_signal_handler(error):
            raise
        raise _no_backend(backend, " ".join(str(error).split()) or type(error).__name__) from error
    if _is_third_party(name):
        return
    if name not in backends():
        meant = values.nearest(name, _available())
        hint = "" if meant is None else f"; did you mean {meant!r}?"
        raise _no_backend(backend, f"torch knows no {name!r}{hint}")
    if not _is_built_in(name):
        raise _no_backend(backend, f"this build of torch has no {name}")
    if name in _NCCL and not _has_gpu():
        raise _no_backend(
            backend,
            "NCCL needs a GPU, and torch sees none",
            cause="a machine without a GPU, CUDA_VISIBLE_DEVICES, or a driver that is too old for this build of torch",
            remedy="run it where torch.cuda.is_available(), or pass backend='gloo'.",
        )


def _c10d() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")


def backends() -> list[str]:
    """Return the backends that torch knows, available or not."""
    names = _c10d().Backend.backend_list
    return [name for name in names if name != "undefined"]


def _is_third_party(name: str) -> bool:
    """Return whether a third party has registered the backend: only its own code can tell whether it works here."""
    plugin = _c10d().Backend._plugins.get(name.upper())  # from 2.15 on, torch's own are registered in the same way
    return plugin is not None and getattr(plugin.creator_fn, "__module__", None) != _c10d().__name__


def _is_built_in(name: str) -> bool:
    library = "nccl" if name in _NCCL else name
    return bool(getattr(importlib.import_module("torch.distributed"), f"is_{library}_available", lambda: True)())


def _has_gpu() -> bool:
    """Return whether torch sees a GPU. Only if NVML sees none is CUDA asked: a forked child can't use it after that."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.device_count() > 0 or cuda.is_available())


def _available() -> list[str]:
    return [
        name
        for name in backends()
        if _is_third_party(name) or (_is_built_in(name) and (name not in _NCCL or _has_gpu()))
    ]


def _no_backend(
    backend: object,
    why: str,
    *,
    cause: str = "a spelling mistake, or a build of torch without it",
    remedy: str | None = None,
) -> ConfigurationError:
    return ConfigurationError.explain(
        f"backend={backend!r} can't be used: {why}{'' if why.endswith('?') else '.'}",
        cause=cause,
        remedy=remedy or f"use one of {', '.join(_available())}, or leave backend= out.",
    )


# --- torch's own count -----------------------------------------------------------------------------------------------


def world() -> Any:
    """Return torch's own record of its groups; None: a version of torch that keeps another one."""
    found = getattr(_c10d(), "_world", None)
    return found if all(hasattr(found, name) for name in ("group_count", "pg_names", "_default_pg")) else None


def take_back_count(group_name: object) -> None:
    """Take back torch's count of a group that could not be made; nothing, if anything else has been counted since.

    Torch numbers a group before the rendezvous, and the number is in the store's keys. A rank whose call failed alone
    would wait under another number than the other ranks in the next call.

    Args:
        group_name: the name of the group, which is the count before it.
    """
    record = world()
    if record is None or stands() or group_name in record.pg_names.values():
        return
    if group_name == str(record.group_count - 1):
        record.group_count -= 1


@contextlib.contextmanager
def counted_if_made() -> Iterator[None]:
    """Take back torch's count of the group that is made in the block, if it can't be made."""
    record = world()
    group_name = None if record is None else str(record.group_count)
    try:
        yield
    except BaseException:
        take_back_count(group_name)
        raise
