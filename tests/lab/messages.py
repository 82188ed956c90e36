"""What a test process and its zygote say to each other, one pickled message per packet of a Unix socket.

Pickle is fine here: both ends are the same user's, of the same checkout, on a socket that has no name.
Functions and arguments of ranks travel as bytes that only the forked child unpickles, so that no test module
is ever imported by the zygote itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_MESSAGE = 1 << 17
"""Bytes of the largest packet. The default send buffer of a Unix socket holds one of them whole."""


@dataclass(frozen=True)
class MakeNamespace:
    """Make the namespaces of one host (network, host name, mounts); answered by `NamespaceMade`."""

    hostname: str
    files: Mapping[str, str]
    """Path of a file that the host sees → path of the file that it sees there."""
    sysctls: Mapping[str, str]
    """Path below /proc/sys → value, written before the first interface arrives."""


@dataclass(frozen=True)
class NamespaceMade:
    """The namespaces live until `DropNamespaces`, or until the zygote ends."""

    key: int
    path: str
    """A path that opens the network namespace, for `nsenter` and `ip link ... netns`."""


@dataclass(frozen=True)
class KillProcesses:
    """Kill with SIGKILL what runs in these network namespaces, whoever started it; answered by `Done`."""

    keys: Sequence[int]


@dataclass(frozen=True)
class DropNamespaces:
    """Kill what runs in these namespaces and let them go; answered by `Done`."""

    keys: Sequence[int]


@dataclass(frozen=True)
class Spawn:
    """Start a process in a host; answered by `Spawned`.

    A rank's end of its channel to the test travels with this message as a file descriptor.
    """

    namespace: int
    call: bytes | None
    """A pickled ``(function, args, kwargs)``, or None for a command."""
    command: Sequence[str]
    environment: Mapping[str, str | None]
    """Variables on top of the zygote's own; None removes one."""
    directory: str
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Spawned:
    """The process runs."""

    pid: int


@dataclass(frozen=True)
class Signal:
    """Send a signal to a spawned process; answered by `Done`.

    Only the zygote can do this without a race: the number of its child is not used again before it reaps it.
    SIGSTOP is answered once the process has stopped.
    """

    pid: int
    number: int


@dataclass(frozen=True)
class Exited:
    """A spawned process ended; sent unasked."""

    pid: int
    code: int
    """The exit status, or the negative number of the signal that ended it."""


@dataclass(frozen=True)
class Ready:
    """The zygote has imported what it preloads and takes requests."""


@dataclass(frozen=True)
class Done:
    """A request without a result was carried out."""


@dataclass(frozen=True)
class Refused:
    """A request failed and changed nothing that later requests rely on."""

    reason: str


Request = MakeNamespace | KillProcesses | DropNamespaces | Spawn | Signal
Reply = NamespaceMade | Spawned | Done | Refused | Ready
