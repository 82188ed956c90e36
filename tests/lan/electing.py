"""What must hold in every step where no ranks are given, and whether an error that ends a process is true."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mingle.errors import ConflictError, ConnectivityError, DiscoveryTimeoutError
from mingle.protocol.election import Candidacy
from mingle.protocol.host import Host
from mingle.protocol.node import Node
from mingle.protocol.sightings import SILENT_SECONDS
from mingle.wire.datagrams import Datagram, Offer, Seek
from tests.lan.gathering import Gathering
from tests.lan.invariants import Invariants
from tests.lan.process import Process
from tests.lan.world import World

NOTICED_SECONDS = 1.0
"""Within so long after every fault it is known everywhere that the job runs."""
UNDISTURBED_SECONDS = 8.0
"""After so long without a fault it is a lie that the job could not form, or that nothing was known of it."""


EARLIEST_SECONDS = 0.2
"""How long after its first question a process can become the host at the earliest."""
LATELY_SECONDS = 3.0
"""How long a process that was heard to ask counts as there, and one that was heard to host rules an early end out."""
SLACK_SECONDS = 0.05
"""How much longer than its patience a process may look for a host: its timers are late."""


class Patience:
    """What each process without a rank has heard and asked since when: it becomes the host neither too early nor late.

    It keeps its own records, so that a mistake in those of a process is seen.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: dict[Process, dict[bytes, float]] = {}
        self._offered: dict[Process, float] = {}
        self._own_question: dict[Process, float] = {}
        """When it asked first since it had a host."""
        self._alone_since: dict[Process, float] = {}
        """Since when it has had no host in sight; not there: it has one."""
        self._idle_since: dict[Process, float] = {}
        """The same; but a host that is only claimed is in sight as well."""
        world.on_heard.append(self._heard)
        world.on_multicast.append(self._sent)

    def _heard(self, process: Process, message: Datagram) -> None:
        own = process.identity
        if not isinstance(message, Seek | Offer) or (message.job, message.attempt) != (own.job, own.attempt):
            return
        if isinstance(message, Seek) and message.member != own.member and message.rank is None:
            self._asked.setdefault(process, {})[message.member] = self._world.now
        elif isinstance(message, Offer) and message.host != own.member:
            self._offered[process] = self._world.now

    def _sent(self, process: Process, message: Datagram) -> None:
        if isinstance(message, Seek):
            self._own_question.setdefault(process, self._world.now)

    def check(self, process: Process, node: Node) -> None:
        """Looks at a process after a step."""
        now, joiner = self._world.now, node.joiner
        joined, returning = joiner.session is not None, joiner.returns_to is not None
        races = any(each.races_to("join") for each in joiner.sightings)
        if node.host is not None:
            if (since := self._alone_since.get(process)) is not None:
                self._check_beginning(process, now - since)
            self._forget(process, self._own_question)
            return
        if node.finished or joined or returning or joiner.sightings.may_run():
            self._forget(process, *([self._own_question] if joined else []))
            return
        self._alone_since.setdefault(process, now)
        if races:
            self._idle_since.pop(process, None)
            return
        since = max(self._idle_since.setdefault(process, now), process.continued_at)
        longest = Candidacy(process.identity).patience()
        late = process.processor is None and not process.stopped and now - since > longest + SLACK_SECONDS
        assert not late, f"{process.name} has looked for a host for {now - since:.3f} s, and not become one"

    def _forget(self, process: Process, *more: dict[Process, float]) -> None:
        for memory in (self._alone_since, self._idle_since, *more):
            memory.pop(process, None)

    def _check_beginning(self, process: Process, waited: float) -> None:
        """Whether a process that has just become the host has waited long enough."""
        now, own = self._world.now, process.identity
        if waited >= Candidacy(own).patience() - 1e-6:
            return
        asked = self._own_question.get(process, now)
        assert now - asked >= EARLIEST_SECONDS - 1e-6, f"{process.name} hosts {now - asked:.3f} s after its question"
        there = [member for member, at in self._asked.get(process, {}).items() if now - at <= LATELY_SECONDS]
        assert len(there) >= own.world_size - 1, f"{process.name} hosts early and has heard {len(there)} others"
        assert min(there, default=b"\xff") > own.member, f"{process.name} hosts early without the lowest id"
        silence = now - self._offered.get(process, float("-inf"))
        assert silence > LATELY_SECONDS, f"{process.name} hosts early, {silence:.3f} s after an OFFER"


class ElectionInvariants(Invariants):
    """What must hold in addition where ranks are assigned."""

    def __init__(self, world: World) -> None:
        # Whether two sessions may run at a time depends on how many processes live: see _check_go.
        super().__init__(world, duplicates=True)
        self.world = world
        self.hosted: dict[bytes, Process] = {}
        """Every session there was, each with its host."""
        self.proved: set[tuple[Process, bytes]] = set()
        """Every host with each other session that has proved itself to it."""
        self._closing: dict[Process, Host] = {}
        """The host of each process that has one."""
        self._judged: set[int] = set()
        self._patience = Patience(world)
        self._faults_at = 0.0
        """When last, since a job runs, somebody may have had no way to hear of it."""
        self.disturbed_at = world.now
        """When the last fault struck or ended, or the last process started."""

    def check(self, process: Process) -> None:
        """Looks at what may have changed in a step of one process."""
        core = process.core
        assert core is not None
        if process.identity.rank is None and core.outcome is None:
            self._check_elector(process, core)
        if self.sessions:
            self._look_for_faults()
        if process.hosts:
            self.hosted.setdefault(process.host.session, process)
        super().check(process)
        if process.failure is not None and id(process) not in self._judged:
            self._judged.add(id(process))
            self._check_truth(process)

    def _check_elector(self, process: Process, node: Node) -> None:
        self._patience.check(process, node)
        joiner, host = node.joiner, node.host
        for session in joiner.sightings:
            asked = session.alive_since is None or session.race is not None or joiner.finished
            assert asked, f"{process.name} waits for {session.host_name}, of which it will never hear"
        assert host is None or joiner.session is None, f"{process.name} hosts a session and has asked another host"
        if host is not None:
            self._closing[process] = host
            self.proved |= {(process, each.name) for each in node.sightings if each.is_proved}
        elif (closed := self._closing.pop(process, None)) is not None:
            assert closed.closed, f"{process.name} looks for a host and has not closed its session"
            makes_for = [each for each in joiner.sightings if each.races_to("join")]
            for each in makes_for:
                proved = (process, each.name) in self.proved
                assert proved, f"{process.name} has closed for {each.host_name}, which has proved nothing"

    def _check_confirmation(self, process: Process) -> None:
        assert not process.joiner.sightings.may_run(), f"{process.name} confirms though it knows that the job runs"

    def _look_for_faults(self) -> None:
        segment = self.world.networks[0].segment()
        ways = all(nic.up for nic in segment.nics) and not (segment.parted or segment.deaf or segment.loss)
        if not ways or any(process.stopped for process in self.world.processes):
            self._faults_at = self.world.now

    def living(self, job: str) -> list[Process]:
        """The sessions of a job that run: their hosts, which live and hold their stores."""
        return [
            host
            for host in self.sessions.values()
            if host.identity.job == job and host.holds_store and not host.host.closed
        ]

    def _check_go(self, process: Process) -> None:
        super()._check_go(process)
        registrar, job = process.host.registrar, process.identity.job
        others = [each for each in self.living(job) if each is not process]
        for other in others:
            # So two jobs of W live processes each are only where 2 W processes live.
            assert not other.host.registrar.seats.keys() & registrar.seats.keys(), "a process is in two jobs"
            audible = self.world.now - self._faults_at >= NOTICED_SECONDS
            assert not audible, f"a second job has formed where {other.name} could be heard"
        assert not process.host.conflicts.any_alive, "a second job was formed knowingly"
        identities = {each.identity.member: each.identity for each in self.world.processes}
        places = registrar.state.places
        ranked = sorted((where.rank, where, identities[member].node) for member, where in places.items())
        assert ranked[0][1] == places[registrar.seats.host.member], "the host is not rank 0"
        self._check_order(process)
        nodes = list(dict.fromkeys(node for _, _, node in ranked))
        assert [node for _, _, node in ranked] == sorted((node for _, _, node in ranked), key=nodes.index)
        sizes, seen = Counter(node for _, _, node in ranked), Counter[str]()
        for _, where, node in ranked:
            assert (where.node_rank, where.num_nodes) == (nodes.index(node), len(nodes))
            assert (where.local_rank, where.local_world_size) == (seen[node], sizes[node])
            seen[node] += 1

    def _check_order(self, process: Process) -> None:
        """Whether ranks follow the orders that the processes had when they started."""
        registrar = process.host.registrar
        by_member = {each.identity.member: each for each in self.world.processes}
        orders = {member: by_member[member].identity.order for member in registrar.seats}
        for member, seat in registrar.seats.items():
            assert seat.applicant.order == orders[member], (
                f"{by_member[member].name} has another order than at its start"
            )
        host = registrar.seats.host.member
        first = min((order for order in orders.values() if order), default=orders[host])
        reached = all(orders[member] != first for member in registrar.handover.unreached if member in orders)
        assert orders[host] == first or not reached, f"{process.name} hosts, and is not the first in order"
        ranked = sorted(registrar.seats, key=lambda member: registrar.state.places[member].rank)
        others = [orders[member] for member in ranked if by_member[member].identity.node != process.identity.node]
        expected = sorted(others, key=lambda order: (not order, order))
        assert others == expected, "the nodes are not in order"

    def _check_truth(self, process: Process) -> None:
        """Whether the error that ended a process is true."""
        failure, now, job = process.failure, self.world.now, process.identity.job
        running = self.living(job)
        if isinstance(failure, ConflictError):
            named = [host for host in self.sessions.values() if f"pid {host.identity.who.pid}. " in str(failure)]
            assert named, f"nothing runs, and {process.name} says {failure}"
            ended_at = named[0].ended_at
            assert ended_at is None or now - ended_at < SILENT_SECONDS + 2.0, f"it has ended, and {failure}"
            inside = process.identity.member in named[0].host.registrar.seats
            assert not inside or named[0].closed_stores, str(failure)
            return
        if isinstance(failure, ConnectivityError):
            return  # tests.lan.meshes judges it
        assert isinstance(failure, DiscoveryTimeoutError), str(failure)
        network = self.world.networks[0]
        deaf = network.segment().deaf
        if now - max(self.disturbed_at, network.timed_out_at) < UNDISTURBED_SECONDS:
            return
        if any(connection.is_dead for connection in network.connections):
            return  # an address was lost, and its connections with it: no end knows that yet
        names = [(each.machine.name, process.machine.name) for each in running]
        if any(pair in deaf or pair[::-1] in deaf for pair in names):
            return  # its question was not heard, or the answer was not
        for each in running:
            known = each.formed_at is not None and now - each.formed_at > UNDISTURBED_SECONDS
            assert not known, f"the job runs, and {process.name} says {failure}"
        if running:
            return
        hosts = (each for each in self.sessions.values() if each.identity.job == job)
        if any(each.ended_at is not None and now - each.ended_at < UNDISTURBED_SECONDS for each in hosts):
            return  # all waited for the end of that session, and have had only the time since
        others = [
            each
            for each in self.world.processes
            if each.alive
            and each is not process
            and each.identity.job == job
            and each.outcome is None
            and now - each.started_at > UNDISTURBED_SECONDS
        ]
        assert len(others) + 1 < process.identity.world_size, f"all were there, and {process.name} says {failure}"


class ElectionGathering(Gathering):
    """A gathering in which all that must hold of elections is watched."""

    def __init__(self, seed: int, **settings: Any) -> None:
        super().__init__(seed, **settings)
        self.world.watchers.clear()
        self.election = ElectionInvariants(self.world)
        self.invariants = self.election
