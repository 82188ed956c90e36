"""A process's place in its job: which rank it is, of how many, and on which node.

The order: arguments, ``MINGLE_RANK`` and ``MINGLE_WORLD_SIZE``, one launcher's row, ``RANK`` and
``WORLD_SIZE``. Arguments must not contradict the rest; ``MINGLE_*`` may, because they exist to overrule a launcher. The
place in a job beside torchrun's comes from arguments alone.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from msgspec import Struct

from mingle.config import launchers
from mingle.config.launchers import Placement
from mingle.config.values import check_whole, parse_whole, text_of
from mingle.errors import ConfigurationError, LauncherError

if TYPE_CHECKING:
    from collections.abc import Mapping

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAMESPACES = "/proc/self/ns"
_MACHINE_ID = "/etc/machine-id"
_BESIDE_TORCHRUN = (
    "drop the arguments: torchrun's ranks have met already; for a group of other ranks call init_process_group with "
    'init_method="mingle://NAME", rank= and world_size=, and another NAME than torchrun\'s id'
)


class _Number(Struct, frozen=True):
    """A number with the source of it as a reader would write it, such as ``RANK='3'``."""

    value: int
    source: str


class _Claim(Struct, frozen=True):
    """What one source says about this process."""

    rank: _Number | None
    world_size: _Number | None

    def over(self, other: _Claim) -> _Claim:
        """Return this claim, completed by another one."""
        return _Claim(self.rank or other.rank, self.world_size or other.world_size)

    def check_against(self, other: _Claim, remedy: str = "drop one of the two, or make them agree") -> None:
        """Raise ConfigurationError if both sources say something and it is not the same."""
        for ours, theirs, meaning in (
            (self.rank, other.rank, "rank"),
            (self.world_size, other.world_size, "world size"),
        ):
            if ours is not None and theirs is not None and ours.value != theirs.value:
                raise ConfigurationError.explain(
                    f"{ours.source} contradicts {theirs.source}: the {meaning} can only be one of them",
                    cause="a value in the code or the environment of an earlier job, or of another launcher",
                    remedy=remedy,
                )

    def agrees(self, rank: int | None, world_size: int) -> bool:
        """Return whether nothing here differs from the outcome."""
        return (self.rank is None or self.rank.value == rank) and (
            self.world_size is None or self.world_size.value == world_size
        )


def place(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    beside_torchrun: bool = False,
) -> Placement:
    """Return this process's place in its job.

    Args:
        environ: the environment without what mingle itself has written into it.
        rank: the argument of that name.
        world_size: the argument of that name.
        beside_torchrun: whether rank and world_size, both given, are those of a job that torchrun knows nothing of.

    Raises:
        ConfigurationError: when a number can't be used, sources contradict each other, or there is no size.
        LauncherError: when a launcher's environment is incomplete or contradicts itself, and the place is not
            given by hand either.
    """
    argued = _Claim(
        None if rank is None else _Number(check_whole(rank, "rank"), f"rank={rank!r}"),
        None
        if world_size is None
        else _Number(check_whole(world_size, "world_size", minimum=1), f"world_size={world_size!r}"),
    )
    own = _claim(environ, "MINGLE_RANK", "MINGLE_WORLD_SIZE")
    if beside_torchrun:
        argued.check_against(own)
        # Not even its count of restarts: each agent counts those of its own workers.
        own_rank, own_size = _checked(argued)
        return Placement(rank=own_rank, world_size=own_size)
    by_hand = argued.over(own)
    launched = _launched(environ, argued, by_hand)
    under_torchrun = launched is not None and launched.launcher == launchers.TORCHRUN.name
    if launched is None:
        said = _claim(environ, "RANK", "WORLD_SIZE")
    else:
        assert launched.rank is not None
        said = _Claim(
            _Number(launched.rank, f"{launched.launcher}'s {launched.rank_from}={launched.rank}"),
            _Number(launched.world_size, f"{launched.launcher}'s {launched.world_size_from}={launched.world_size}"),
        )
        if under_torchrun:
            # torchrun's ranks have found each other already: there is no other job to ask for by MINGLE_*.
            own.check_against(said)
        else:
            _refuse_to_be_alone(environ, launched, by_hand)
    environment = own.over(said)
    argued.check_against(environment, *([_BESIDE_TORCHRUN] if under_torchrun else []))
    final_rank, final_size = _checked(argued.over(environment))
    if launched is not None:
        if under_torchrun or (own.rank is None and final_size == launched.world_size):
            return launched
        # Overruled by MINGLE_*: the launcher's nodes and local ranks are those of another set of processes. Where
        # MINGLE_RANK only orders them anew, some have the launcher's rank: all must describe their nodes alike.
        return Placement(rank=final_rank, world_size=final_size, job_id=launched.job_id, launcher=launched.launcher)
    if final_rank is None or not said.agrees(final_rank, final_size):
        return Placement(rank=final_rank, world_size=final_size)
    return _told(environ, final_rank, final_size)


def _checked(claim: _Claim) -> tuple[int | None, int]:
    """Return the rank and the world size of a claim."""
    if claim.world_size is None:
        raise _no_world_size(claim.rank)
    if claim.rank is not None and claim.rank.value >= claim.world_size.value:
        raise ConfigurationError.explain(
            f"{claim.rank.source} does not fit {claim.world_size.source}",
            cause="a rank counted from 1, or a size that counts nodes where the rank counts processes",
            remedy=f"give ranks from 0 to {claim.world_size.value - 1}, or a larger world size",
        )
    return None if claim.rank is None else claim.rank.value, claim.world_size.value


def _claim(environ: Mapping[str, str], rank_variable: str, size_variable: str) -> _Claim:
    def number(name: str, minimum: int) -> _Number | None:
        text = text_of(environ, name)
        if text is None:
            return None
        return _Number(parse_whole(text, name, minimum=minimum), f"{name}={text!r}")

    return _Claim(number(rank_variable, 0), number(size_variable, 1))


def _launched(environ: Mapping[str, str], argued: _Claim, by_hand: _Claim) -> Placement | None:
    """Return the launcher's word; None also when that is incomplete and the place is given by hand."""
    row = launchers.seen(environ)
    if row is None:
        return None
    if row.size_is_the_users and by_hand.world_size is not None:
        argued.check_against(_claim(environ, "RANK", "WORLD_SIZE"))
        environ = {**environ, "WORLD_SIZE": str(by_hand.world_size.value)}
    try:
        return row.read(environ)
    except LauncherError:
        # torchrun's ranks have found each other already: no other place can be given.
        given = by_hand if row.sets_plain_pair else by_hand.over(_claim(environ, "RANK", "WORLD_SIZE"))
        if row is launchers.TORCHRUN or given.rank is None or given.world_size is None:
            raise
        return None


def _refuse_to_be_alone(environ: Mapping[str, str], launched: Placement, by_hand: _Claim) -> None:
    """Refuse a task of one that a launcher started, if ``WORLD_SIZE`` alone says that there are more ranks.

    Ranks that are started by hand in a shell of ``srun --pty`` are such: taken at the launcher's word, each
    would be rank 0 of 1 and train by itself without a sign.
    """
    if launched.world_size > 1 or by_hand.world_size is not None:
        return
    size = _claim({"WORLD_SIZE": environ.get("WORLD_SIZE", "")}, "RANK", "WORLD_SIZE").world_size
    if size is not None and size.value > 1:
        raise LauncherError.explain(
            f"{launched.launcher} says {launched.world_size_from}={launched.world_size}, but {size.source}",
            cause=f"ranks started by hand inside a single task of {launched.launcher}",
            remedy="start the ranks with the launcher and unset WORLD_SIZE, or give each rank its place with "
            "MINGLE_RANK and MINGLE_WORLD_SIZE",
        )


def _told(environ: Mapping[str, str], rank: int, world_size: int) -> Placement:
    """Return the place with what the environment of a rank that a user started says about its node."""

    def number(name: str, minimum: int, limit: int, what: str) -> int | None:
        text = text_of(environ, name)
        if text is None:
            return None
        value = parse_whole(text, name, minimum=minimum)
        if value >= limit:
            raise _misfit(f"{name}={text!r}", what)
        return value

    local_world_size = number("LOCAL_WORLD_SIZE", 1, world_size + 1, f"a world size of {world_size}")
    local_limit = local_world_size or world_size
    local_rank = number("LOCAL_RANK", 0, local_limit, f"a local world size of {local_limit}")
    node_rank = number("NODE_RANK", 0, world_size, f"a world size of {world_size}")
    group_rank = number("GROUP_RANK", 0, world_size, f"a world size of {world_size}")
    if node_rank is not None and group_rank is not None and node_rank != group_rank:
        raise _misfit(f"NODE_RANK='{node_rank}'", f"GROUP_RANK='{group_rank}', torchrun's name for the same")
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=group_rank if node_rank is None else node_rank,
    )


def _misfit(written: str, what: str) -> ConfigurationError:
    return ConfigurationError.explain(
        f"{written} does not fit {what}",
        cause="variables that were left by another start, or counted from 1",
        remedy="make them agree, or leave the one that mingle can find by itself unset",
    )


def _no_world_size(rank: _Number | None) -> ConfigurationError:
    if rank is not None:
        return ConfigurationError.explain(
            f"{rank.source} is given, and no world size",
            cause="RANK without WORLD_SIZE, or one argument of the two",
            remedy="pass world_size=, or set MINGLE_WORLD_SIZE or WORLD_SIZE",
        )
    return ConfigurationError.explain(
        "the number of ranks is not known",
        cause="world_size= was not passed, MINGLE_WORLD_SIZE and WORLD_SIZE are unset, no launcher is seen",
        remedy="pass world_size= or set MINGLE_WORLD_SIZE, the same on all ranks; then ranks are assigned",
    )


# --- the node ---------------------------------------------------------------------------------------------------


def this_node() -> str:
    """Return a key that is equal in the processes of one node and different in those of others.

    On Linux it is the kernel's boot id (random(4)) with the inode numbers of this process's network and pid
    namespaces (namespaces(7)): containers of one machine share its boot id, and often its host name, but have
    addresses of their own and so are nodes of their own. Elsewhere it is the host name with the machine's id.
    Clones of a virtual machine can have equal keys: :mod:`mingle.protocol.seating` tells them apart by addresses.

    It is read anew with each call, because a process may enter other namespaces.
    """
    boot_id = _read(_BOOT_ID)
    return describe_node(
        boot_id=boot_id,
        network_namespace=_inode(f"{_NAMESPACES}/net"),
        pid_namespace=_inode(f"{_NAMESPACES}/pid"),
        hostname=socket.gethostname(),
        # getnode may run a program such as ifconfig: only where nothing better is known.
        machine_id=None if boot_id else _read(_MACHINE_ID) or _hardware_id(),
    )


def describe_node(
    *,
    boot_id: str | None,
    network_namespace: int | None,
    pid_namespace: int | None,
    hostname: str,
    machine_id: str | None,
) -> str:
    """Return the key made of what is known; host name and machine id count only without a boot id."""
    machine = f"boot:{boot_id}" if boot_id else f"host:{hostname}"
    if not boot_id and machine_id:
        machine += f"/machine:{machine_id}"
    for label, inode in (("net", network_namespace), ("pid", pid_namespace)):
        if inode is not None:
            machine += f"/{label}:{inode}"
    return machine


def hardware_id(node: int) -> str | None:
    """Return the hardware address that `uuid.getnode` found, or None when it had made up a random one.

    A made-up address differs from process to process. RFC 9562, section 6.10, marks it by the multicast bit.
    """
    return None if node >> 40 & 1 else f"{node:012x}"


def _hardware_id() -> str | None:
    import uuid  # loads half a dozen modules that are needed here only

    return hardware_id(uuid.getnode())


def _read(path: str | os.PathLike[str]) -> str | None:
    """Return a file's text, or None where there is no such file, as outside Linux and in some sandboxes."""
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
