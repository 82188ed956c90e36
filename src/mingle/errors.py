"""The exceptions that mingle raises.

The tree::

    Exception
    └── MingleError                  everything mingle raises on purpose
        ├── DiscoveryTimeoutError    the job was not complete in time (also a TimeoutError)
        ├── ConflictError            members disagree: a size, a rank held twice, two hosts of one job
        ├── AuthenticationError      the secrets differ, or one side has none
        ├── InterfaceError           no network interface is usable, or the named one is not
        ├── ConnectivityError        nodes of the job can't open TCP connections to each other
        ├── LauncherError            a launcher's environment is incomplete or contradicts itself
        └── ConfigurationError       a wrong argument or environment variable (also a ValueError)

A message has three parts: what was observed, the likely cause and a fix (see `MingleError.explain`).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
from typing import TYPE_CHECKING

from mingle.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

__all__ = [
    "AuthenticationError",
    "ConfigurationError",
    "ConflictError",
    "ConnectivityError",
    "DiscoveryTimeoutError",
    "InterfaceError",
    "LauncherError",
    "MingleError",
]


NO_PORT = "no port is free"
NO_DESCRIPTOR = "this process, or the whole system, has no file descriptor left"
FREE_DESCRIPTORS = "look at `ulimit -n` and at what the process holds in /proc/PID/fd."


class MingleError(Exception):
    """Base of every error that mingle raises on purpose.

    The parts of the message are attributes. They survive pickling and copying.

    Attributes:
        observation: what was seen; the whole message if it has no parts.
        cause: what most likely led to it, or None.
        remedy: what to do about it, or None.
    """

    observation: str
    cause: str | None
    remedy: str | None

    def __init__(self, message: str) -> None:
        # One argument only: OSError, a base of DiscoveryTimeoutError, would take two for errno and strerror.
        super().__init__(message)
        self.observation = message
        self.cause = None
        self.remedy = None

    @classmethod
    def explain(cls, observation: str, *, cause: str, remedy: str) -> Self:
        """Return an error whose message is the observation, the likely cause and a fix, made printable."""
        observation, cause, remedy = (printable(part, keep="\n") for part in (observation, cause, remedy))
        error = cls(f"{observation}\n{_labelled('likely cause', cause)}\n{_labelled('fix', remedy)}")
        error.observation = observation
        error.cause = cause
        error.remedy = remedy
        return error

    def copied(self) -> Self:
        """Return a copy with the same cause, one for each waiting thread.

        An exception that is raised again keeps the frames of every caller, and the objects in them, alive.
        """
        copied = copy.copy(self)
        copied.__cause__ = self.__cause__
        return copied


class DiscoveryTimeoutError(MingleError, TimeoutError):
    """The job was not complete within the discovery timeout."""


class ConflictError(MingleError):
    """Members of one job disagree: two rank 0s, one rank twice, different sizes, or the job is already running."""


class AuthenticationError(MingleError):
    """The other side could not prove that it holds the job's secret."""


class InterfaceError(MingleError):
    """No network interface is usable for the job, or the one that was named is not."""


class ConnectivityError(MingleError):
    """Nodes of the job can't open TCP connections to each other; the message names them."""


class LauncherError(MingleError):
    """The environment a launcher left is incomplete, or contradicts itself."""


class ConfigurationError(MingleError, ValueError):
    """An argument or an environment variable has a value that mingle cannot use."""


def lacks_descriptor(error: OSError) -> bool:
    """Return whether the system refuses a file descriptor to this process."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def refused(observation: str, error: OSError) -> MingleError:
    """Return the error for a system that refuses to open what mingle needs."""
    if lacks_descriptor(error):
        return MingleError.explain(f"{observation}: {error.strerror}", cause=NO_DESCRIPTOR, remedy=FREE_DESCRIPTORS)
    return MingleError.explain(
        f"{observation}: {error.strerror or error}",
        cause="a sandbox or a limit of the system refuses it",
        remedy="look at the limits of this process (`ulimit -a`), and at the rules of its container.",
    )


@contextlib.contextmanager
def opening(what: str) -> Iterator[None]:
    """Explain why files or sockets can't be opened where no file descriptor is free.

    Raises:
        MingleError: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        if not lacks_descriptor(error):
            raise
        raise refused(f"{what} can't be opened", error) from error


@contextlib.contextmanager
def suppressed(*kinds: type[BaseException]) -> Iterator[None]:
    """Suppress exceptions of these kinds, except one that a signal handler raised, which is for the caller."""
    try:
        yield
    except kinds as error:
        if comes_from_a_signal_handler(error):
            raise


def cut_frames(error: BaseException) -> None:
    """Remove the frames in which an error of ours, or Ctrl-C, was raised; cause and context stay.

    The entry points raise it anew, so that the traceback has the user's own lines and the message. The log has the
    frames at DEBUG. Ctrl-C in a call of torch's keeps them, because they show which call that was.
    """
    import traceback

    logging.getLogger("mingle").debug("the frames of %s", type(error).__name__, exc_info=error)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    in_torch = any(str(frame.f_globals.get("__name__")).partition(".")[0] == "torch" for frame in frames)
    if not (in_torch and isinstance(error, KeyboardInterrupt)):
        error.__traceback__ = None


def comes_from_a_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an exception; Python runs handlers between any two lines.

    It does so in the main thread alone: only code that a caller runs needs to ask, the loop and its threads need not.
    """
    import signal
    import threading
    import traceback

    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for code in map(_code, handlers) if code is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code(handler: object) -> object:
    """Return the code object that runs when a handler (a function, a method or a callable object) is called."""
    while (inner := getattr(handler, "func", None)) is not None:  # functools.partial
        handler = inner
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = handler.__call__
    return getattr(handler, "__code__", None)


def no_port(first: int, last: int) -> tuple[str, str]:
    """Return the cause and the fix for EADDRINUSE of a port that the system was to choose, from this range (ip(7))."""
    return (
        f"no port is free among those that the system chooses from (net.ipv4.ip_local_port_range is {first} {last})",
        "look with `ss -tuan` at what holds them, or widen the range: "
        "`sysctl -w net.ipv4.ip_local_port_range='32768 60999'`",
    )


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 machine`` or ``2 machines``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _labelled(label: str, text: str) -> str:
    """Return ``  label: text`` with the further lines of the text indented below its first one."""
    first, *rest = text.split("\n")
    return "\n".join([f"  {label}: {first}", *(f"    {line}" for line in rest)])
