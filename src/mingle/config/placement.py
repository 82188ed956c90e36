"""A process's place in its job: which rank it is, of how many, and on which node.

The order: arguments, ``MINGLE_RANK`` and ``MINGLE_WORLD_SIZE``, one launcher's row, ``RANK`` and
``WORLD_SIZE``. Arguments must not contradict the rest; ``MINGLE_*`` may, because they exist to overrule a launcher. The
place in a job beside torchrun's comes from arguments alone. A node rank follows the same order by itself: where ranks
are assigned, it is a wish (:mod:`mingle.config.order`).
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from mingle.config import launchers
from mingle.config.launchers import Placement
from mingle.config.values import check_whole, parse_whole, text_of
from mingle.errors import ConfigurationError, LauncherError
from mingle.wire.datagrams import MAX_WORLD_SIZE

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


class NodeRank(_Number, frozen=True):
    """A node rank that a process asks for, with its source.

    Attributes:
        launched: whether a launcher gave it. Two launchers, or two jobs of one, can number different nodes alike.
    """

    launched: bool = False


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


def resolve_placement(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    node_rank: NodeRank | None = None,
    beside_torchrun: bool = False,
) -> Placement:
    """Return this process's place in its job.

    Args:
        environ: the environment without what mingle itself has written into it.
        rank: the argument of that name.
        world_size: the argument of that name.
        node_rank: the argument of that name.
        beside_torchrun: whether rank and world_size, both given, are those of a job that torchrun knows nothing of.

    Raises:
        ConfigurationError: when a number can't be used, sources contradict each other, or there is no size.
        LauncherError: when a launcher's environment is incomplete or contradicts itself, and the place is not
            given by hand either.
    """
    place = _resolve_place(environ, rank, world_size, beside_torchrun=beside_torchrun)
    return place if beside_torchrun else _given_node_rank(environ, place, node_rank)


def _resolve_place(
    environ: Mapping[str, str], rank: int | None, world_size: int | None, *, beside_torchrun: bool
) -> Placement:
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
    place = Placement(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)
    if node_rank is not None:
        return with_node_rank(place, NodeRank(node_rank, f"NODE_RANK='{node_rank}'"))
    return place if group_rank is None else with_node_rank(place, NodeRank(group_rank, f"GROUP_RANK='{group_rank}'"))


def _misfit(written: str, what: str) -> ConfigurationError:
    return ConfigurationError.explain(
        f"{written} does not fit {what}",
        cause="variables that were left by another start, or counted from 1",
        remedy="make them agree, or leave the one that mingle can find by itself unset",
    )


def _no_world_size(rank: _Number | None) -> ConfigurationError:
    if rank is not None:
        return ConfigurationError.explain(
            f"{rank.source} is given without a world size",
            cause="WORLD_SIZE is not set beside RANK, or world_size= was not passed beside rank=",
            remedy="pass world_size=, or set MINGLE_WORLD_SIZE or WORLD_SIZE",
        )
    return ConfigurationError.explain(
        "the number of ranks is not known",
        cause="world_size= was not passed, MINGLE_WORLD_SIZE and WORLD_SIZE are unset, no launcher is seen",
        remedy="pass world_size= or set MINGLE_WORLD_SIZE, the same on all ranks; then ranks are assigned",
    )


# --- the node's rank --------------------------------------------------------------------------------------------

NODE_RANK = "MINGLE_NODE_RANK"
_TORCHRUNS = "PET_NODE_RANK"
"""The variable of torchrun's own option, which torch itself reads for its static rendezvous alone."""
_LARGEST = MAX_WORLD_SIZE - 1


def argued_node_rank(given: object, name: str, *, as_text: bool = False) -> NodeRank | None:
    """Return a node rank that was given as an argument, or as an option; None: it was not given.

    Args:
        given: the argument.
        name: what a reader would call it.
        as_text: whether it is written as text.

    Raises:
        ConfigurationError: it is not a whole number from 0 on.
    """
    if given is None:
        return None
    number = parse_whole(str(given), name, maximum=_LARGEST) if as_text else check_whole(given, name, maximum=_LARGEST)
    return NodeRank(number, f"{name}={number}")


def asked_node_rank(
    environ: Mapping[str, str], argument: NodeRank | None = None, *, nodes: int | None = None, torchrun: bool = False
) -> NodeRank | None:
    """Return the node rank that a program asks for which is started once on each node; None: it asks for none.

    An argument comes first, then ``MINGLE_NODE_RANK``, torchrun's own variable, and the launcher's number of this node.

    Args:
        environ: the environment.
        argument: the node rank that was given as an argument.
        nodes: the number of nodes, if it is known. A launcher's number can be larger, because its nodes may be those of
            several jobs.
        torchrun: whether the program is torchrun.

    Raises:
        ConfigurationError: a number can't be used, or an argument contradicts the environment.
        LauncherError: the launcher's number is none.
    """
    told = _node_rank_of(environ, NODE_RANK)
    if told is None and torchrun:
        told = _node_rank_of(environ, _TORCHRUNS)
    if told is None and (row := launchers.seen(environ)) is not None and (found := row.node_number(environ)):
        told = NodeRank(*found, launched=True)
    asked = _agreed(argument, told)
    if asked is not None and not asked.launched:
        _check_fits(asked, nodes, "nodes")
    return asked


def _given_node_rank(environ: Mapping[str, str], place: Placement, argument: NodeRank | None) -> Placement:
    """Return a place with the node rank that was given by hand, if one was."""
    under_torchrun = place.launcher == launchers.TORCHRUN.name
    # Workers of torchrun inherit the variable from their agent, which may have been given another node rank.
    own = None if under_torchrun else _node_rank_of(environ, NODE_RANK)
    told = None if place.node_rank is None else NodeRank(place.node_rank, place.node_rank_from)
    asked = _agreed(argument, own or told)
    if asked is None or asked == told:
        return place
    if place.num_nodes is None:
        _check_fits(asked, place.world_size, "ranks, and there are no more nodes than ranks")
    else:
        _check_fits(asked, place.num_nodes, "nodes")
    return with_node_rank(place, asked)


def with_node_rank(place: Placement, asked: NodeRank | None) -> Placement:
    """Return a place with the node rank that its process asks for."""
    if asked is None:
        return place
    return structs.replace(place, node_rank=asked.value, node_rank_from=asked.source, node_rank_launched=asked.launched)


def _node_rank_of(environ: Mapping[str, str], variable: str) -> NodeRank | None:
    text = text_of(environ, variable)
    if text is None:
        return None
    return NodeRank(parse_whole(text, variable, maximum=_LARGEST), f"{variable}={text!r}")


def _agreed(argument: NodeRank | None, told: NodeRank | None) -> NodeRank | None:
    if argument is None or told is None or argument.value == told.value:
        return argument or told
    raise ConfigurationError.explain(
        f"{argument.source} contradicts {told.source}: the node rank can only be one of them",
        cause="a value in the code, or an environment that was copied from another node",
        remedy=f"drop one of the two, or make them agree; {NODE_RANK} alone overrules a launcher",
    )


def _check_fits(asked: NodeRank, limit: int | None, what: str) -> None:
    if limit is not None and asked.value >= limit:
        raise ConfigurationError.explain(
            f"{asked.source} does not fit a job of {limit} {what}",
            cause="node ranks that are counted from 1, or a number of nodes that is too small",
            remedy=f"give node ranks from 0 to {limit - 1}, or none: then host names decide",
        )


# --- the node ---------------------------------------------------------------------------------------------------


def this_node() -> str:
    """Return a key that is equal in the processes of one node and different in those of others.

    On Linux it is the kernel's boot id (random(4)) with the inode numbers of this process's network and pid
    namespaces (namespaces(7)): containers of one machine share its boot id, and often its host name, but have
    addresses of their own and so are nodes of their own. Elsewhere it is the host name with the machine's id.
    Clones of a virtual machine can have equal keys: :mod:`mingle.protocol.session.seating` tells them apart by
    addresses.

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
