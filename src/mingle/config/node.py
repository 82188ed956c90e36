"""Which processes share a machine: the key of a node, for when no launcher names it."""

from __future__ import annotations

import os
import socket

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAMESPACES = "/proc/self/ns"
_MACHINE_ID = "/etc/machine-id"


def identity() -> str:
    """Returns a key that is equal in the processes of one node and different in those of others.

    On Linux it is the kernel's boot id (random(4)) with the inode numbers of this process's network and pid
    namespaces (namespaces(7)): containers of one machine share its boot id, and often its host name, but have
    addresses of their own and so are nodes of their own. Elsewhere it is the host name with the machine's id.

    It is read anew with each call, because a process may enter other namespaces.
    """
    boot_id = _read(_BOOT_ID)
    return describe(
        boot_id=boot_id,
        network_namespace=_inode(f"{_NAMESPACES}/net"),
        pid_namespace=_inode(f"{_NAMESPACES}/pid"),
        hostname=socket.gethostname(),
        # getnode may run a program such as ifconfig: only where nothing better is known.
        machine_id=None if boot_id else _read(_MACHINE_ID) or _hardware_id(),
    )


def describe(
    *,
    boot_id: str | None,
    network_namespace: int | None,
    pid_namespace: int | None,
    hostname: str,
    machine_id: str | None,
) -> str:
    """Returns the key made of what is known; host name and machine id count only without a boot id."""
    machine = f"boot:{boot_id}" if boot_id else f"host:{hostname}"
    if not boot_id and machine_id:
        machine += f"/machine:{machine_id}"
    for label, inode in (("net", network_namespace), ("pid", pid_namespace)):
        if inode is not None:
            machine += f"/{label}:{inode}"
    return machine


def hardware_id(node: int) -> str | None:
    """Returns the hardware address that `uuid.getnode` found, or None when it had made up a random one.

    A made-up address differs from process to process. RFC 9562, section 6.10, marks it by the multicast bit.
    """
    return None if node >> 40 & 1 else f"{node:012x}"


def _hardware_id() -> str | None:
    import uuid  # loads half a dozen modules that are needed here only

    return hardware_id(uuid.getnode())


def _read(path: str | os.PathLike[str]) -> str | None:
    """Returns a file's text, or None where there is no such file, as outside Linux and in some sandboxes."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a third of the time, in every call
            return file.read().decode("ascii").strip() or None
    except OSError:
        return None


def _inode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - likewise
    except OSError:
        return None
