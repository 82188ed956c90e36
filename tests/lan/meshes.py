"""The mesh in a simulated network: what must be true at GO, what its error may name, and random schedules."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter

from mingle.elastic.quorum import CONFIRM_SECONDS
from mingle.errors import ConnectivityError
from mingle.protocol.links.prover import DIAL_SECONDS
from mingle.protocol.member import LEFT_OUT_SECONDS
from mingle.protocol.session.mesh_proof import AGAIN_SECONDS
from mingle.protocol.session.phases import Committed
from mingle.wire.frames import PADDING_BYTES
from tests.lan.agent_schedules import AgentSchedule
from tests.lan.agents import AgentGathering, AgentProcess
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.gathering import Gathering
from tests.lan.network import Network
from tests.lan.process import Endpoint, Process
from tests.lan.schedules import Schedule
from tests.lan.strikes import Strikes, mark
from tests.lan.world import World

PROVED_SECONDS = 14.0
"""The longest time from the end of a fault to an error that names it: three proofs of one network."""
JUST_NOW_SECONDS = 4.0
"""The same for a fault of the network: it must have lasted into the last proof."""
AGENTS_JUST_NOW_SECONDS = CONFIRM_SECONDS - AGAIN_SECONDS + DIAL_SECONDS + 0.1
"""The same for agents, whose session is decided when the last of them has confirmed.

Whoever dials in vain gives up after `AGAIN_SECONDS`, and its last dial was one `DIAL_SECONDS` earlier: the fault
lasted until then. The host waits for up to `CONFIRM_SECONDS` for the others, one of which can hear of CONFIRM only when
its own fault has ended. The rest is for clocks that run at different rates, and the way of the message.
"""


class MeshInvariants:
    """Watches what passes between processes: at GO, each pair must have greeted each other in both directions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._greeted: Counter[tuple[bytes, bytes]] = Counter()
        """How many GREETs each member has written to each other one."""
        self._judged: set[int | bytes] = set()
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

    def __init__(self, network: Network, *, just_now: float = JUST_NOW_SECONDS) -> None:
        self._network = network
        self._just_now = just_now
        self._faulty: set[str] = set()
        self._ended_at: dict[str, float] = {}
        network.watchers.append(self._note)

    def _note(self) -> None:
        machines = self._network.machines.values()
        segments = self._network.segments.values()
        faulty = {name for segment in segments for pair in (*segment.parted, *segment.closed) for name in pair}
        faulty |= {each.name for each in machines if not all(nic.up for nic in each.nics)}
        faulty |= {each.name for each in machines if each.addresses != {nic.address for nic in each.nics}}
        self._ended_at.update(dict.fromkeys(self._faulty - faulty, self._network.world.now))
        self._faulty = faulty

    def without(self, text: str) -> list[str]:
        """Return the lines of an error about pairs in which no machine has a fault, nor had one just now.

        A host that was stopped until just now tells what it knew before.
        """
        _, *lines = text.partition("likely cause")[0].splitlines()
        world = self._network.world
        just_now = world.now - self._just_now
        hosts = [each for each in world.processes if each.hosts and each.continued_at >= just_now]
        since = min([world.now, *(host.stopped_at for host in hosts)]) - self._just_now
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
        rng = random.Random(f"closed pairs of {seed}")
        for _ in range(rng.choice((0, 0, 1, 3))):
            at = rng.choice((0.0, rng.uniform(0.0, self.chaos)))
            self.gathering.world.after(at, functools.partial(close_pair, self, rng))

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


def close_pair(schedule: Strikes, rng: random.Random) -> None:
    """Let no more connections be opened between two machines, in one direction or both, until the end of the chaos."""
    gathering = schedule.gathering
    machines = {each.machine.name: each.machine for each in schedule.current.values()}
    if len(machines) > 1:
        one, other = rng.sample([machines[name] for name in sorted(machines)], 2)
        gathering.network.close(gathering.lan, one, other)
        if rng.random() < 0.5:
            gathering.network.close(gathering.lan, other, one)


class MeshSchedule(_Meshed):
    """The same of ranks that are given."""


class MeshElectionSchedule(_Meshed, ElectionSchedule):
    """The same of processes that elect their host."""

    def _filter(self) -> None:
        """Let calls in everywhere: a machine that takes none is in no mesh, and its job does not form."""


def a_mesh_with_stopped_processes(seed: int) -> None:
    """Stop processes for up to 25 s, each when it is asked to dial or has said whom it reached. No path is broken."""
    rng = random.Random(seed)
    gathering = Gathering(seed, size=5, loss=rng.choice((0.0, 0.5)), secret=rng.choice((None, b"secret")), mesh="on")
    MeshInvariants(gathering.world)
    for _ in range(rng.choice((1, 1, 2))):
        stop_in_proof(gathering.world, rng)
    gathering.everybody([rng.uniform(0, 1) for _ in range(5)])
    gathering.run()
    gathering.expect_formed()


def stop_in_proof(world: World, rng: random.Random) -> None:
    """Stop the process to which one of the next CONFIRMs goes, or from which one of the next CONFIRMEDs comes."""
    asked = rng.random() < 0.7
    marked, left, seconds = mark("confirm" if asked else "confirmed"), rng.randint(1, 8), rng.uniform(1.0, 25.0)

    def watch(sender: Process, receiver: Endpoint, data: bytes) -> None:
        nonlocal left
        left -= marked in data
        process = receiver if asked else sender
        if left == 0 and isinstance(process, Process):
            world.before_write.remove(watch)
            world.after(0.0, process.stop)
            world.after(seconds, process.cont)

    world.before_write.append(watch)


class AgentMeshInvariants(MeshInvariants):
    """The same of sessions of agents. A latecomer dials the members, and they do not dial it."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._inside: dict[bytes, set[bytes]] = {}
        """The members of each session, as far as they were judged."""

    def _check(self, process: Process) -> None:
        assert isinstance(process, AgentProcess)
        hosted = process.hosted
        if hosted is None:
            return
        members = {seat.member for seat in hosted.registrar.seats.members()}
        if hosted.session not in self._inside:
            for one in members:
                for other in members - {one}:
                    assert self._greeted[one, other] >= 2, f"GO, but {self._names(one, other)} have not met both ways"
        for late in members - self._inside.get(hosted.session, members):
            for other in members - {late}:
                # One of a machine's processes can have been killed, and still counts: another one stands for it.
                there = [each for each in members if self._machine(each) == self._machine(other)]
                if late in there:
                    continue
                met = any(self._greeted[late, each] and self._greeted[each, late] for each in there)
                assert met, f"{self._names(late, other)} are in one session and have not met"
        self._inside[hosted.session] = members

    def _machine(self, member: bytes) -> str:
        return next(each.machine.name for each in self._world.processes if each.identity.member == member)

    def _names(self, *members: bytes) -> str:
        names = {each.identity.member: each.name for each in self._world.processes}
        return " and ".join(names[each] for each in members)


class AgentMeshSchedule(AgentSchedule):
    """A random schedule of agents whose sessions are meshes: who is left out must have a fault, and comes in later."""

    healed_seconds = AgentSchedule.healed_seconds + LEFT_OUT_SECONDS + PROVED_SECONDS

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.left_out = 0
        super().__init__(seed, tracing=tracing)
        AgentMeshInvariants(self.gathering.world)
        self.faults = Faults(self.gathering.network, just_now=AGENTS_JUST_NOW_SECONDS)
        self._read: dict[int, int] = {}
        self.gathering.world.watchers.append(self._judge)
        rng = random.Random(f"pairs of {seed}")
        for _ in range(rng.choice((0, 1, 1, 2, 3)) if self.count > 2 else 0):
            at = rng.choice((0.0, rng.uniform(0.0, self.chaos)))
            self.gathering.world.after(at, functools.partial(self._cut_pair, rng))
        rng = random.Random(f"closed pairs of {seed}")
        for _ in range(rng.choice((0, 0, 1, 3)) if self.count > 2 else 0):
            at = rng.choice((0.0, rng.uniform(0.0, self.chaos)))
            self.gathering.world.after(at, functools.partial(close_pair, self, rng))

    def _cut_pair(self, rng: random.Random) -> None:
        """Let two machines not reach each other until the end of the chaos."""
        one, other = rng.sample([each.machine for each in self.current.values()], 2)
        self.gathering.split([one], [other], barrier=rng.choice(("drop", "reset", "icmp")), one_way=rng.random() < 0.3)

    def _gather(self, *, tracing: bool) -> AgentGathering:
        gathering = super()._gather(tracing=tracing)
        gathering.mesh = "on"
        return gathering

    def _judge(self, process: Process) -> None:
        """Check that nobody is left out whose network has no fault."""
        read = self._read.get(id(process), 0)
        self._read[id(process)] = len(process.notices)
        for notice in process.notices[read:]:
            if "this node gets no place: " in notice:
                self.left_out += 1
                pairs = notice.partition("Likely cause")[0].partition("gets no place: ")[2]
                innocent = self.faults.without("\n" + "\n".join(pairs.split("; ")))
                assert not innocent, f"no machine has a fault in {innocent}, and {process.name} says {notice}"
