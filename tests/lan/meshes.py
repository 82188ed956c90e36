"""The mesh in a simulated network: what must be true at GO, what its error may name, and random schedules."""

from __future__ import annotations

import re
from collections import Counter

from mingle.errors import ConnectivityError
from mingle.protocol.registrar import Committed
from mingle.wire.frames import PADDING_BYTES
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.gathering import Gathering
from tests.lan.network import Network
from tests.lan.process import Endpoint, Process
from tests.lan.schedules import Schedule
from tests.lan.strikes import mark
from tests.lan.world import World

PROVED_SECONDS = 14.0
"""The longest time from the end of a fault to an error that names it: three proofs of one network."""
JUST_NOW_SECONDS = 4.0
"""The same for a fault of the network: it must have lasted into the last proof."""


class MeshInvariants:
    """Watches what passes between processes: at GO, each pair must have greeted each other in both directions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._greeted: Counter[tuple[bytes, bytes]] = Counter()
        """How many GREETs each member has written to each other one."""
        self._judged: set[int] = set()
        world.before_write.append(self._note)
        world.watchers.append(self._check)

    def _note(self, sender: Process, receiver: Endpoint, data: bytes) -> None:
        if isinstance(receiver, Process) and len(data) > PADDING_BYTES and mark("greet") in data:
            self._greeted[sender.identity.member, receiver.identity.member] += 1

    def _check(self, process: Process) -> None:
        if id(process) in self._judged or not process.hosts:
            return
        registrar = process.host.registrar
        if isinstance(registrar.state, Committed):
            self._judged.add(id(process))
            self._check_go(process)

    def _check_go(self, process: Process) -> None:
        places = process.host.registrar.state.places
        nodes = {where.node_rank for where in places.values()}
        on_node = {member: where.node_rank for member, where in places.items()}
        met: Counter[tuple[int, int]] = Counter()
        for (one, other), count in self._greeted.items():
            if one in on_node and other in on_node:
                met[on_node[one], on_node[other]] += count
        for one in nodes:
            for other in nodes - {one}:
                # Once as the side that dials, once as the side that answers.
                assert met[one, other] >= 2, f"GO, but nodes {one} and {other} have not met in both directions"


class Faults:
    """The faults of a network, by machine."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._faulty: set[str] = set()
        self._ended_at: dict[str, float] = {}
        network.watchers.append(self._note)

    def _note(self) -> None:
        machines = self._network.machines.values()
        faulty = {name for segment in self._network.segments.values() for pair in segment.parted for name in pair}
        faulty |= {each.name for each in machines if not all(nic.up for nic in each.nics)}
        faulty |= {each.name for each in machines if each.addresses != {nic.address for nic in each.nics}}
        self._ended_at.update(dict.fromkeys(self._faulty - faulty, self._network.world.now))
        self._faulty = faulty

    def without(self, text: str) -> list[str]:
        """Return the lines of an error about pairs in which no machine has a fault, nor had one just now."""
        _, *lines = text.partition("likely cause")[0].splitlines()
        since = self._network.world.now - JUST_NOW_SECONDS
        recent = self._faulty | {name for name, ended in self._ended_at.items() if ended >= since}
        named = ((line.strip(), set(re.findall(r"\bm\d+\b", line))) for line in lines)
        return [line for line, machines in named if machines and not machines & recent]


class _Meshed(Schedule):
    """A random schedule whose job needs a mesh. Processes that a broken mesh ends are started again."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        super().__init__(seed, tracing=tracing)
        self.errors = 0
        self._ended: set[int] = set()
        MeshInvariants(self.gathering.world)
        self.faults = Faults(self.gathering.network)
        self.gathering.world.watchers.append(self._start_again)

    def _gather(self, seed: int, *, tracing: bool) -> Gathering:
        gathering = super()._gather(seed, tracing=tracing)
        gathering.mesh = "on"
        return gathering

    def _start_again(self, process: Process) -> None:
        if not isinstance(process.failure, ConnectivityError) or id(process) in self._ended:
            return
        self._ended.add(id(process))
        self.errors += 1
        innocent = self.faults.without(str(process.failure))
        assert not innocent, f"no machine has a fault in {innocent}, and {process.name} says {process.failure}"
        late = self.gathering.now - self.healed_at
        assert late < PROVED_SECONDS, (
            f"{process.name} names a fault {late:.1f} s after the end of all: {process.failure}"
        )
        for rank, each in self.current.items():
            if each is process:
                self._restart(rank, self.rng.uniform(0.1, 1.0))


class MeshSchedule(_Meshed):
    """The same of ranks that are given."""


class MeshElectionSchedule(_Meshed, ElectionSchedule):
    """The same of processes that elect their host."""

    def _filter(self) -> None:
        """Let calls in everywhere: a machine that takes none is in no mesh, and its job does not form."""
