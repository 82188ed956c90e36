"""The proof of a mesh: who dials whom, and what the host hears of it until every node has confirmed. Pure.

The host picks one process of each node and gives each its targets (:func:`targets_of`). What they
could not reach comes with CONFIRMED, and shows a broken path unless the process there can be stopped.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Container, Iterable, Mapping
from typing import TypeAlias

from msgspec import Struct, field, structs

from mingle.protocol.links.prover import LOSSY
from mingle.protocol.session.seating import NodeKey, node_keys, place
from mingle.protocol.session.seats import HostSeat, Seated, machine_of
from mingle.wire.frames import MAX_SUSPECTS, Blocked, Confirm, Failure, Join, ProcessInfo, Target

FULL_MESH = 256
"""The greatest number of nodes of which each pair is proved."""
SAMPLE = 32
"""The number of targets of each node in a larger job."""

NETWORK_SECONDS = 6.0
"""How long a target that does not answer is dialed on the first network."""
NEXT_NETWORK_SECONDS = 3.0
"""The same on each further network, if the mesh does not hold on the first one, and where all dial the first in order
alone."""
AGAIN_SECONDS = 2.0
"""The same for the last try: a path that was cut for a moment must not end the job."""

_Key: TypeAlias = tuple[NodeKey, int | None]
Pair: TypeAlias = tuple[int, int]
"""The numbers of two nodes: the one that dials, and the one that is dialed."""


def sampled(nodes: int) -> bool:
    """Return whether a job of so many nodes proves a sample of its pairs."""
    return nodes > FULL_MESH


def targets_of(number: int, nodes: int) -> list[int]:
    """Return the nodes that a node dials, its successor first; each node is dialed by equally many."""
    steps: Collection[int] = range(1, nodes)
    if sampled(nodes):
        steps = dict.fromkeys(1 + each * (nodes - 1) // SAMPLE for each in range(SAMPLE))
    return [(number + step) % nodes for step in steps]


class Node(Struct, frozen=True):
    """The process that takes part in the mesh for its node."""

    member: bytes
    who: ProcessInfo
    interface: str
    """Its interface on the network."""
    address: str
    """Its address there; empty: it can't be dialed, because address translation hides it."""
    port: int
    dials: bool = True
    """Whether it has targets."""
    proxied: bool = False
    """Whether a proxy on the host's own machine has made its connection to the host."""

    @property
    def target(self) -> Target:
        """It as another node dials it; it has an address."""
        return Target(member=self.member, address=self.address, port=self.port)

    @property
    def name(self) -> str:
        """How an error names it at first."""
        rank = "" if self.who.rank is None else f"{self.who.unit} {self.who.rank} on "
        where = " on ".join(each for each in (self.address, self.interface) if each)
        return f"{rank}host {self.who.hostname or 'unknown'} ({where or self.who.address})"


class Proof(Struct):
    """The proof of the mesh on one network, in one epoch."""

    network: str
    """The host's address on it."""
    subnet: str
    """All addresses of it, as a firewall's rule names them; the host's address, if nothing is known of the others."""
    nodes: list[Node]
    seconds: float
    """How long a target that does not answer is dialed."""
    last: bool = False
    """Whether no other network is left."""
    others: tuple[str, ...] = ()
    """Other networks on which the mesh does not hold."""
    failures: dict[Pair, Failure] = field(default_factory=dict)
    suspects: Mapping[bytes, tuple[Target, ...]] = field(default_factory=dict)
    """The members that are to find out what is wrong with their machines, each with nodes that may be blocked."""
    blocked: dict[int, Blocked] = field(default_factory=dict)
    """What they have found out."""
    unanswered: dict[Pair, Failure] = field(default_factory=dict)
    """What shows no broken path, since the process at the other end can be stopped: it is to be dialed once more."""
    stands_for: Mapping[bytes, frozenset[bytes]] = field(default_factory=dict)
    """The processes on the node of each member that takes part for its node."""
    is_mesh: bool = True
    """Whether the nodes dial each other; else all dial the leader alone."""
    leader: int | None = None
    """The number of the node of the first in order, which all dial; None: it hosts already, or can't be dialed."""

    @property
    def _numbers(self) -> dict[bytes, int]:
        return {node.member: number for number, node in enumerate(self.nodes)}

    def targets_of_node(self, number: int) -> list[int]:
        """Return the numbers of the nodes that a node dials.

        The host is one of them: that a node has joined it can be long ago, and a firewall that was enabled since lets
        that connection live.
        """
        if not self.nodes[number].dials:
            return []
        targets = targets_of(number, len(self.nodes)) if self.is_mesh else []
        if self.leader is not None and self.leader not in (number, *targets):
            targets.append(self.leader)
        return [each for each in targets if self.nodes[each].address]

    def dialers(self) -> dict[int, set[int]]:
        """Return who dials each node that is dialed."""
        dialed_by: dict[int, set[int]] = {}
        for number in range(len(self.nodes)):
            for target in self.targets_of_node(number):
                dialed_by.setdefault(target, set()).add(number)
        return dialed_by

    @property
    def hidden(self) -> list[Node]:
        """The nodes that no other one dials."""
        return [node for node in self.nodes if not node.address]

    @property
    def is_needed(self) -> bool:
        """Whether any node is to be dialed."""
        return any(self.targets_of_node(number) for number in range(len(self.nodes)))

    @property
    def sampled(self) -> bool:
        """Whether there are too many nodes to prove every pair."""
        return sampled(len(self.nodes))

    def targets(self, member: bytes) -> tuple[Target, ...]:
        """Return what a member has to dial: nothing, if another process does it for its node."""
        number = self._numbers.get(member)
        return () if number is None else tuple(self.nodes[each].target for each in self.targets_of_node(number))

    def asked_of(self, member: bytes, confirm: Confirm) -> Confirm:
        """Return CONFIRM with what this proof asks of a member.

        Args:
            member: to which it goes.
            confirm: the frame without the proof.
        """
        return structs.replace(
            confirm,
            network=self.network,
            targets=self.targets(member),
            seconds=self.seconds,
            suspects=self.suspects.get(member, ()),
        )

    def add(
        self,
        member: bytes,
        failures: Iterable[Failure],
        blocked: Blocked | None = None,
        *,
        unconfirmed: Container[bytes] = (),
    ) -> None:
        """Take note of what a member could not reach, and of what it has found out about its machine.

        Args:
            member: that has dialed.
            failures: the targets that it could not reach.
            blocked: what it has found out about its machine.
            unconfirmed: the members that have not confirmed yet.
        """
        numbers = self._numbers
        number = numbers.get(member)
        for failure in failures:
            target = numbers.get(failure.member)
            if number is None or target is None or number == target:
                continue
            if not shows_a_broken_path(failure, confirmed=failure.member not in unconfirmed):
                self.unanswered[number, target] = failure
                continue
            self.failures[number, target] = failure
            # Both have confirmed now, so neither is stopped.
            if (back := self.unanswered.pop((target, number), None)) is not None:
                self.failures[target, number] = back
        asked = {target.address for target in self.suspects.get(member, ())}
        if number is not None and blocked is not None and blocked.address in asked:
            self.blocked[number] = blocked

    def compare(self, before: Mapping[Pair, Failure]) -> None:
        """Take note of how connections failed in an earlier try: silence of one kind and then another is loss."""
        for pair, failure in self.failures.items():
            kinds = {failure.how, before.get(pair, failure).how}
            if len(kinds) > 1 and kinds <= {"silent", "large packets", "no answer"}:
                self.failures[pair] = structs.replace(failure, how="no answer", detail=LOSSY)

    def unreached(self, failures: Iterable[Failure]) -> frozenset[bytes]:
        """Return the processes on the nodes of the targets that could not be reached."""
        return frozenset().union(*(self.stands_for.get(each.member, ()) for each in failures))

    def can_lead(self, member: bytes) -> bool:
        """Return whether all nodes reach that of a member, as far as it is known."""
        if member in self.unreached(self.failures.values()):
            return False
        if self.leader is None or (self.is_mesh and not self.sampled):
            return True
        return member in self.stands_for[self.nodes[self.leader].member]


def shows_a_broken_path(failure: Failure, *, confirmed: bool) -> bool:
    """Return whether a failure shows that no path leads to its target.

    A process that is stopped is no broken path: its kernel accepts connections, on which nothing answers. Such a target
    runs if it has confirmed, and else is dialed once more when it has.
    """
    accepted = failure.how in ("silent", "large packets") or failure.detail == LOSSY
    return confirmed or not accepted


def begin(
    network: str,
    host: HostSeat,
    seats: Iterable[Seated],
    *,
    seconds: float,
    last: bool,
    is_mesh: bool = True,
    first: bytes | None = None,
) -> Proof:
    """Return the proof of the mesh on a network, with one process of each node.

    Args:
        network: the host's address on it.
        host: the host's own seat.
        seats: of all members, the host's first.
        seconds: how long a target that does not answer is dialed.
        last: whether no other network is left.
        is_mesh: whether the nodes dial each other; else all dial the first in order alone.
        first: the member id of the first in order, if it comes before the host.
    """
    everyone = list(seats)
    ranks = [where.rank for where in place(_applicants(everyone), len(everyone))]
    standing: dict[_Key, Seated] = {}
    together: dict[_Key, set[bytes]] = {}
    for _, seat, key in sorted(zip(ranks, everyone, _keys(everyone), strict=True), key=lambda each: each[0]):
        together.setdefault(key, set()).add(seat.member)
        if seat.applicant.mesh_port:
            standing.setdefault(key, seat)
    proof = _proof(network, host, standing.values(), seconds=seconds, last=last)
    proof.stands_for = {seat.member: frozenset(together[key]) for key, seat in standing.items()}
    proof.is_mesh = is_mesh
    for number, node in enumerate(proof.nodes):
        # All have joined the host, so its own node is reached.
        if first in proof.stands_for[node.member] and node.member != host.member and node.address:
            proof.leader = number
    return proof


def begin_for(newcomer: Seated, network: str, host: HostSeat, others: Iterable[Seated]) -> Proof:
    """Return the proof of a newcomer to a running session: it dials the members, and they do not dial it.

    Args:
        newcomer: the member to be.
        network: the host's address on the network of the job.
        host: the host's own seat.
        others: the members, and other latecomers.
    """
    everyone = [*others, newcomer]
    keys = _keys(everyone)
    # Another process of a node can be one that was killed and still counts: the last to come stands for its node, and
    # the newcomer for its own.
    standing: dict[_Key, Seated] = {}
    together: dict[_Key, set[bytes]] = {}
    for key, seat in zip(keys, everyone, strict=True):
        together.setdefault(key, set()).add(seat.member)
        if seat.applicant.mesh_port and (key not in standing or standing[key].member != host.member):
            standing[key] = seat
    standing[keys[-1]] = newcomer
    proof = _proof(network, host, standing.values(), seconds=NETWORK_SECONDS, last=True)
    nodes = [structs.replace(node, dials=node.member == newcomer.member) for node in proof.nodes]
    stands_for = {seat.member: frozenset(together[key]) for key, seat in standing.items()}
    return structs.replace(proof, nodes=nodes, stands_for=stands_for)


def _applicants(seats: Iterable[Seated]) -> list[Join]:
    """Return what members have asked for, with the paths that they have proved since."""
    return [structs.replace(seat.applicant, paths=seat.paths) for seat in seats]


def _keys(seats: Iterable[Seated]) -> list[_Key]:
    """Return the node of each member, as far as connections go.

    Containers that share a network namespace are one node, and those with addresses of their own are not, whatever a
    launcher says. Its word only tells clones apart of whose addresses nothing is known.
    """
    applicants = _applicants(seats)
    networks = [structs.replace(each, node=each.node.partition("/pid:")[0]) for each in applicants]
    return [(key, each.node_rank) for key, each in zip(node_keys(networks), applicants, strict=True)]


def _proof(network: str, host: HostSeat, standing: Iterable[Seated], *, seconds: float, last: bool) -> Proof:
    nodes = [_node(seat, network, host) for seat in standing]
    length = host.prefix_lengths.get(network)
    subnet = str(ipaddress.ip_network(f"{network}/{length}", strict=False)) if length else network
    return Proof(network, subnet, nodes, seconds, last)


def _node(seat: Seated, network: str, host: HostSeat) -> Node:
    """Return the node of a member.

    Args:
        seat: of the member.
        network: the host's address on the network.
        host: the host's own seat.
    """
    applicant, dials, proxied = seat.applicant, True, False
    path = next((each for each in seat.paths if each.host_address == network), None)
    address, interface = ("", "") if path is None else (path.local_address, path.interface)
    if seat.member == host.member:
        # The members have reached it there. An address that is only advertised belongs to a router that translates: it
        # leads to the host, and the address by which the host dials is unknown.
        address, dials = network, host.prefix_lengths.get(network) != 0
    elif applicant.who.address not in {*(each.local_address for each in applicant.paths), *applicant.addresses}:
        proxied = _is_proxied(applicant, host)
        if not proxied:
            address = ""  # address translation: the connection on which it joined came from another machine's address
    who = structs.replace(applicant.who, rank=applicant.rank)
    return Node(seat.member, who, interface, address, applicant.mesh_port, dials, proxied)


def _is_proxied(applicant: Join, host: HostSeat) -> bool:
    """Return whether the source of a member's connection is the host's own machine, which says nothing of the member.

    The sidecar of a service mesh takes what comes in and connects from loopback, or from the host's address. The latter
    is also the source of a rootless container on the host's machine, whose own address leads nowhere.
    """
    source = applicant.who.address
    if source.startswith("127.") or source == "::1":
        return True
    own = {*host.addresses, *host.applicant.addresses}
    return source in own and machine_of(applicant) != machine_of(host.applicant)


def suspects(proof: Proof) -> dict[bytes, tuple[Target, ...]]:
    """Return the members at whose nodes the most connections have failed, each with nodes at the other end."""
    apart: dict[int, list[int]] = {}
    for one, other in sorted(proof.failures):
        apart.setdefault(one, []).append(other)
        apart.setdefault(other, []).append(one)
    most = sorted(apart, key=lambda number: (-len(apart[number]), number))[:MAX_SUSPECTS]
    nodes = proof.nodes
    return {
        nodes[number].member: tuple(
            nodes[other].target for other in list(dict.fromkeys(apart[number]))[:MAX_SUSPECTS] if nodes[other].address
        )
        for number in most
    }


def apart_from(proof: Proof, member: bytes) -> Proof:
    """Return the proof without the connections from and to one node."""
    number = next((number for number, node in enumerate(proof.nodes) if node.member == member), -1)
    return structs.replace(
        proof, failures={pair: failure for pair, failure in proof.failures.items() if number not in pair}
    )
