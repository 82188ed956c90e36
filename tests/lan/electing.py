"""What must hold in every step where no ranks are given, and whether an error that ends a process is true."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mingle.errors import ConflictError, DiscoveryTimeoutError
from mingle.protocol.claims import SILENT_SECONDS
from mingle.protocol.election import Elector
from mingle.protocol.host import Host
from mingle.protocol.member import Step
from mingle.wire.frames import Redirect
from tests.lan.gathering import Gathering
from tests.lan.invariants import Invariants
from tests.lan.process import Process
from tests.lan.world import World

NOTICED_SECONDS = 1.0
"""Within so long after every fault it is known everywhere that the job runs."""
UNDISTURBED_SECONDS = 8.0
"""After so long without a fault it is a lie that the job could not form, or that nothing was known of it."""


class ElectionInvariants(Invariants):
    """What must hold in addition where ranks are assigned."""

    def __init__(self, world: World) -> None:
        # Whether two sessions may run at a time depends on how many processes live: see _check_go.
        super().__init__(world, duplicates=True)
        self.world = world
        self.hosted: dict[bytes, Process] = {}
        """Every session there was, each with its host."""
        self._moved: dict[bytes, Redirect | None] = {}
        self._judged: set[int] = set()
        self._faults_at = 0.0
        """When last, since a job runs, somebody may have had no way to hear of it."""
        self.disturbed_at = world.now
        """When the last fault struck or ended, or the last process started."""

    def check(self, process: Process) -> None:
        """Looks at what may have changed in a step of one process."""
        core = process.core
        if isinstance(core, Elector):
            self._check_elector(process, core)
        if self.sessions:
            self._look_for_faults()
        if process.hosts:
            self._check_host(process, process.host)
        super().check(process)
        if process.failure is not None and id(process) not in self._judged:
            self._judged.add(id(process))
            self._check_truth(process)

    def _check_elector(self, process: Process, elector: Elector) -> None:
        joiner, host = elector.joiner, elector.host
        for session in joiner._table:
            asked = session.alive_since is None or session.race is not None or joiner.finished
            assert asked, f"{process.name} waits for {session.host_name}, of which it will never hear"
        if joiner.step is Step.CONFIRMED and joiner.seat is not None:
            assert host is None or host.closed, f"{process.name} has confirmed elsewhere and still hosts"

    def _check_confirmation(self, process: Process) -> None:
        assert not process.joiner.running_check.may_run(), f"{process.name} confirms though it knows that the job runs"

    def _check_host(self, process: Process, host: Host) -> None:
        registrar = host.registrar
        self.hosted.setdefault(registrar.session, process)
        if isinstance(process.core, Elector):
            self._epoch_never_returns(host)
        if host.redirect is not self._moved.get(registrar.session):
            self._moved[registrar.session] = host.redirect
            there = host.redirect.offer.session if host.redirect is not None else None
            assert there in (None, process.joiner.seat), f"{process.name} sends its members where it has no seat"

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
        ranked = sorted((where.rank, where, identities[member].node) for member, where in registrar.places.items())
        assert ranked[0][1] == registrar.places[registrar.host.member], "the host is not rank 0"
        nodes = list(dict.fromkeys(node for _, _, node in ranked))
        assert [node for _, _, node in ranked] == sorted((node for _, _, node in ranked), key=nodes.index)
        sizes, seen = Counter(node for _, _, node in ranked), Counter[str]()
        for _, where, node in ranked:
            assert (where.node_rank, where.num_nodes) == (nodes.index(node), len(nodes))
            assert (where.local_rank, where.local_world_size) == (seen[node], sizes[node])
            seen[node] += 1

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
        assert isinstance(failure, DiscoveryTimeoutError), str(failure)
        deaf = self.world.networks[0].segment().deaf
        if now - max(self.disturbed_at, self.world.networks[0].timed_out_at) < UNDISTURBED_SECONDS:
            return
        names = [(each.machine.name, process.machine.name) for each in running]
        if any(pair in deaf or pair[::-1] in deaf for pair in names):
            return  # its question was not heard, or the answer was not
        for each in running:
            known = each.formed_at is not None and now - each.formed_at > UNDISTURBED_SECONDS
            assert not known, f"the job runs, and {process.name} says {failure}"
        if running:
            return
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
