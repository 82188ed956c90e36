"""The members' ranks and nodes once all have joined, and the host's address that all of them reach. Pure.

A *node* is what its members say it is (:mod:`mingle.config.placement`): the same key, the same node, unless their
addresses show different machines. The host is always the first applicant.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple, TypeAlias

from mingle.protocol.session.seats import HostSeat, machine_of
from mingle.wire.frames import Join, Path, Place

_Subnet: TypeAlias = IPv4Network | IPv6Network
NodeKey: TypeAlias = tuple[str, int]


def place(applicants: Sequence[Join], world_size: int) -> list[Place]:
    """Return every member's place, in the order of the applicants.

    Given ranks are kept. Assigned ones are contiguous per node, and otherwise follow the order of the applicants.
    What a launcher says about local ranks and about node ranks is kept where it fits what is seen on every node; a
    half of it, or one that contradicts itself, is replaced for all. Where it fits only if containers of one machine
    are one node, by the node ranks that they were told, they are.

    Args:
        applicants: the members, the host first, the others in order
            (:meth:`~mingle.protocol.session.seats.Seats.in_order`).
        world_size: of the job.
    """
    keys = node_keys(applicants)
    nodes = _grouped(keys)
    if _told_local_ranks(applicants, nodes) is None:
        told = _grouped(map(_told_node, applicants, keys))
        nodes = nodes if _told_local_ranks(applicants, told) is None else told
    given = [applicant.rank for applicant in applicants if applicant.rank is not None]
    if len(given) == len(applicants):
        ranks = dict(enumerate(given))
    else:
        ranks = {index: rank for rank, index in enumerate(itertools.chain.from_iterable(nodes))}
    by_rank = [sorted(members, key=ranks.__getitem__) for members in nodes]
    by_rank.sort(key=lambda members: ranks[members[0]])
    local_ranks = _told_local_ranks(applicants, by_rank) or {
        index: local for members in by_rank for local, index in enumerate(members)
    }
    # Where ranks are assigned, a node rank was only asked for.
    told_node_ranks = _told_node_ranks(applicants, by_rank) if len(given) == len(applicants) else None
    node_ranks = told_node_ranks or list(range(len(by_rank)))
    places: dict[int, Place] = {}
    for node_rank, members in zip(node_ranks, by_rank, strict=True):
        for index in members:
            places[index] = Place(
                rank=ranks[index],
                world_size=world_size,
                local_rank=local_ranks[index],
                local_world_size=len(members),
                node_rank=node_rank,
                num_nodes=len(by_rank),
            )
    return [places[index] for index in range(len(applicants))]


def first_free(taken: Iterable[Place], world_size: int) -> Place:
    """Return the place of a latecomer, which is a node of its own: the first that is not taken."""
    ranks = {where.rank for where in taken}
    rank = next(rank for rank in range(world_size) if rank not in ranks)
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        node_rank=rank,
        num_nodes=world_size,
    )


class _Addresses(NamedTuple):
    """What an applicant says about the addresses of its machine."""

    own: frozenset[str]
    """All of them."""
    used: frozenset[str]
    """Those by which it is connected to the host."""

    def show_another_machine(self, other: _Addresses) -> bool:
        """Return whether one of the two uses only addresses that the other one's machine does not have."""
        if not (self.own and self.used and other.own and other.used):
            return False
        return self.used.isdisjoint(other.own) or other.used.isdisjoint(self.own)


def _addresses(applicant: Join) -> _Addresses:
    used = frozenset(path.local_address for path in applicant.paths)
    # A list that is older than the connection lacks an address that is new.
    return _Addresses(used.union(applicant.addresses) if applicant.addresses else frozenset(), used)


def node_keys(applicants: Iterable[Join]) -> list[NodeKey]:
    """Return the node of each applicant: its key, and which of the machines with that key it is on.

    Boot ids and machine ids are equal on clones of a virtual machine. All processes of one machine have the same
    addresses, whatever interfaces and families each of them uses. Addresses that many machines have, such as that of
    a bridge to containers, tell nothing: so each applicant's connection must come from an address of the other.
    """
    machines: dict[str, list[_Addresses]] = {}
    keys = []
    for applicant in applicants:
        addresses, alike = _addresses(applicant), machines.setdefault(applicant.node, [])
        same = (number for number, each in enumerate(alike) if not addresses.show_another_machine(each))
        number = next(same, len(alike))
        if number == len(alike):
            alike.append(addresses)
        keys.append((applicant.node, number))
    return keys


def _grouped(keys: Iterable[NodeKey]) -> list[list[int]]:
    """Return the indices of equal keys, in the order in which each key comes first."""
    groups: dict[NodeKey, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _told_node(applicant: Join, key: NodeKey) -> NodeKey:
    """Return the node by what its launcher says: containers of one machine can share it, with all devices."""
    return key if applicant.node_rank is None else (f"{machine_of(applicant)}/told:{applicant.node_rank}", 0)


def _told_local_ranks(applicants: Sequence[Join], nodes: Sequence[Sequence[int]]) -> dict[int, int] | None:
    told: dict[int, int] = {}
    for members in nodes:
        here = [applicants[index] for index in members]
        if any(each.local_world_size not in (None, len(members)) for each in here):
            return None
        local = [each.local_rank for each in here if each.local_rank is not None]
        if sorted(local) != list(range(len(members))):
            return None
        told.update(zip(members, local, strict=True))
    return told


def _told_node_ranks(applicants: Sequence[Join], nodes: Sequence[Sequence[int]]) -> list[int] | None:
    told = []
    for members in nodes:
        said = {applicants[index].node_rank for index in members}
        first = said.pop()
        if said or first is None:
            return None
        told.append(first)
    return told if sorted(told) == list(range(len(nodes))) else None


def contiguous(places: Sequence[Place]) -> bool:
    """Return whether each node holds one unbroken block of ranks, in the order of its local ranks."""
    starts: dict[int, int] = {}
    return all(
        starts.setdefault(each.node_rank, each.rank - each.local_rank) == each.rank - each.local_rank for each in places
    )


def common_address(host: HostSeat, members: Sequence[Sequence[Path]], *, without: Container[str] = ()) -> str | None:
    """Return the host's address for the store, or None where no network is common to the host and every member.

    All ranks use the network of that address among each other, and a backend needs a mesh, not a star: an
    address counts only where no member's path to it shows that this member is on another one of the host's networks
    (:func:`mingle.network.routes.reached_weakly`). If the user named the host's interfaces, their order decides
    among those. Otherwise: first one that is not on a tunnel or on a bridge inside the host, then one that is not
    link-local (those need a scope), then one whose subnet holds the most members' own addresses (no router in between),
    then the host's own order of preference.

    Args:
        host: the host's own seat.
        members: the paths that each of the other members has proved.
        without: addresses that are not to be chosen.
    """
    subnets = _subnets(host)
    reached = [{path.host_address for path in paths if _proves(path, subnets)} for paths in members]
    candidates = [
        address for address in host.addresses if address not in without and all(address in each for each in reached)
    ]
    if host.named or len(candidates) < 2:
        return next(iter(candidates), None)

    @functools.cache  # ranks of one machine share their address, and parsing one is slow
    def is_neighbor(local: str, address: str) -> bool:
        return ipaddress.ip_address(local) in subnets[address]

    def worth(address: str) -> tuple[bool, bool, int]:
        neighbors = 0
        if address in subnets:
            for paths in members:
                local = (path.local_address for path in paths if path.host_address == address)
                neighbors += any(is_neighbor(each, address) for each in local)
        return address not in host.last_resort, not ipaddress.ip_address(address).is_link_local, neighbors

    # max() returns the first of equals: the order of preference.
    return max(candidates, key=worth, default=None)


def _subnets(host: HostSeat) -> dict[str, _Subnet]:
    return {
        address: ipaddress.ip_network(f"{address}/{length}", strict=False)
        for address in host.addresses
        if (length := host.prefix_lengths.get(address))
    }


def _proves(path: Path, subnets: Mapping[str, _Subnet]) -> bool:
    """Return whether a path shows that the member is on the network of the host's address, or behind a router to it."""
    if not path.weak:
        return True
    local = ipaddress.ip_address(path.local_address)
    return not any(local in subnet for address, subnet in subnets.items() if address != path.host_address)


def reach_matrix(host: HostSeat, members: Sequence[tuple[str, Sequence[Path]]]) -> str:
    """Return which members reached which of the host's addresses, one member per line, for an error message."""
    subnets = _subnets(host)
    own = host.addresses
    lines = [f"  the host listens at {', '.join(own)}"]
    for name, paths in members:
        reached = {path.host_address: path for path in paths}
        ways = ", ".join(_way(address, reached.get(address), subnets) for address in own)
        lines.append(f"  {name}: {ways}")
    return "\n".join(lines)


def _way(address: str, path: Path | None, subnets: Mapping[str, _Subnet]) -> str:
    if path is None:
        return f"not {address}"
    if _proves(path, subnets):
        return f"{address} through {path.interface}"
    return f"not {address} but through {path.interface}, which is on another network of the host"
