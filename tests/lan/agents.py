"""Agents in the simulated network: a process that drives one, and what must hold of all of them in every step."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

from mingle.agents.generations import Agent
from mingle.agents.hosting import AgentHost
from mingle.agents.joining import AgentJoiner
from mingle.agents.quorum import Nodes, holds
from mingle.rules.machine import Address, Formation, Identity, Means, Reach
from mingle.rules.seats import Phase
from mingle.wire.authentication import JobKey
from mingle.wire.frames import Who
from tests.lan.network import Machine, Network
from tests.lan.process import STORE_SECONDS, STORE_SILENT_SECONDS, Process
from tests.lan.tcp import Connection, End
from tests.lan.world import World

LAST_CALL_SECONDS = 5.0
TIMEOUT_SECONDS = 200.0
MINORITY_SECONDS = 15.0
"""Within so long a part of a job that has not the majority has stopped."""


class AgentProcess(Process):
    """One agent. It goes on until it is closed, killed, or has failed."""

    core: Agent | None  # type: ignore[assignment]
    died_in: bytes | None = None
    """The session that it was in when it was killed."""

    def kill(self) -> None:
        """Ends at once, without a word."""
        if self.alive and self.outcome is not None:
            self.died_in = self.outcome.session
        super().kill()

    @property
    def name(self) -> str:
        """How a trace calls it."""
        return f"{self.machine.name}#{self.identity.who.pid}"

    @property
    def agent(self) -> Agent:
        """Its machine, which it has from its start on."""
        assert self.core is not None
        return self.core

    @property
    def finished(self) -> bool:
        """Whether it is in a session, or is not going to be."""
        core = self.core
        return core is not None and (core.outcome is not None or core.failure is not None or core.ended is not None)

    @property
    def outcome(self) -> Formation | None:
        """The session that it is in."""
        return None if self.core is None else self.core.outcome

    @property
    def hosted(self) -> AgentHost | None:
        """The session that it hosts and that runs."""
        part = self.core.part if self.core is not None and self.alive else None
        return part if isinstance(part, AgentHost) and part.outcome is not None and not part.closed else None

    def start(self) -> None:
        """Begins now."""
        super().start()
        self.machine.listeners[self.agent.reach.port] = self

    def _timeout(self) -> float:
        return float("inf")

    def tcp_accepted(self, conn: int, end: tuple[Connection, End], address: str) -> None:
        """Somebody connected to the control port."""

        def accept() -> None:
            self._ends[conn] = end
            self.agent.accepted(conn, address, self.world.now)

        self._event(accept)

    def tcp_closed(self, conn: int, reason: str) -> None:
        """A connection ended."""

        def close() -> None:
            if self._ends.pop(conn, None) is None and conn not in self._dialling:
                return
            self._dialling.discard(conn)
            assert self.agent.owns(conn), "a connection that was not hung up has no owner"
            self.agent.disconnected(conn, reason, self.world.now)

        self._event(close)

    def _wake(self) -> None:
        if self.agent.deadline_passed(self.world.now):
            self.agent.give_up(self.facts(), self.world.now)
            self._flush()
            return
        due, rounds = self.agent.next_timer(), 0
        while due is not None and due <= self.world.now:
            self.agent.handle_timer(self.world.now)
            due, rounds = self.agent.next_timer(), rounds + 1
            assert rounds < 8, f"busy loop: {due} is not after {self.world.now}"
        self._flush()

    def _flush(self) -> None:
        self._carry_out()
        agent = self.agent
        if agent.outcome is not None and self.formed_at is None:
            self.formed_at = self.world.now
        if agent.failure is not None and self.failed_at is None:
            self.failed_at = self.world.now
            self.close()
        for watch in list(self.world.watchers):
            watch(self)
        if self.alive:
            self._set_alarm()

    def close(self) -> None:
        """Ends its part on purpose."""
        if self.alive:
            self.agent.close("its workers are done")
            self._carry_out()
            self._end()

    def _prepare_store(self, address: str) -> None:
        """Like the agents' loop: it is early enough when the session is sealed."""

    def _open_store(self, epoch: int, address: str) -> None:
        host = self.agent.host
        assert host is not None

        def opened() -> None:
            if host.closed:
                return
            self.store_port = 40_000 + self.world.new_id() % 20_000
            self.store_token = self.world.rng.randbytes(8).hex()
            self.machine.stores[self.store_port] = self
            self.agent.store_opened(host, epoch, self.store_port, self.store_token, self.world.now)

        assert self.machine.nic(address) is not None, "the store shall listen on an address that is not ours"
        self.world.after(self.world.rng.uniform(*STORE_SECONDS), functools.partial(self._event, opened))

    def _prove_store(self, epoch: int, address: str, port: int, token: str) -> None:
        part, agent = self.agent.part, self.agent
        route = self.network.route(self.machine, address)
        store = None if route is None else route.far.machine.stores.get(port)
        delay = self.world.rng.uniform(*STORE_SECONDS)
        if route is None or not route.alive or (store is not None and store.stopped):
            delay, problem = STORE_SILENT_SECONDS, "no answer"
        elif store is None or store.store_token != token:
            problem = "refused, or another store"
        else:
            problem = ""

        def answered() -> None:
            if problem:
                agent.store_unreachable(part, epoch, problem, self.world.now)
            else:
                agent.store_proved(part, epoch, self.world.now)

        self.world.after(delay, functools.partial(self._event, answered))


class AgentInvariants:
    """What must hold in every step, whatever the network and the people do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._generations: dict[bytes, int] = {}
        self._minority_since: dict[bytes, float] = {}
        self.sessions: dict[bytes, AgentHost] = {}
        """Every session that has formed."""
        self._claims: dict[bytes, set[bytes]] = {}
        """Of each session about to form the earlier ones that it goes on with."""
        self._lineages: dict[bytes, set[bytes]] = {}
        """Of each session that has formed all earlier ones that it goes on with, and itself.

        A job that began in two halves, or anew while the last agent of its first run had not noticed that all others
        are gone, has two lineages until they meet; so has one that went on without a majority, as it may after a last
        call.
        """
        world.watchers.append(self.check)

    def agents(self) -> list[AgentProcess]:
        """Those that live."""
        return [each for each in self.world.processes if isinstance(each, AgentProcess) and each.alive and each.core]

    def running(self) -> dict[bytes, AgentHost]:
        """The sessions that run, by name."""
        hosts = [each.hosted for each in self.agents() if not each.stopped]
        return {host.session: host for host in hosts if host is not None}

    def members(self, session: bytes) -> set[bytes]:
        """Who is in a session, in truth."""
        return {
            each.identity.member
            for each in self.agents()
            if each.outcome is not None and each.outcome.session == session
        }

    def check(self, process: Process) -> None:
        """Looks at what may have changed in a step of one process."""
        assert isinstance(process, AgentProcess)
        self._check_generation(process)
        part = process.agent.part
        if isinstance(part, AgentJoiner) and part.outcome is not None:
            assert part.outcome.session in self.sessions, "a member is in a session that has not formed"
        running = self.running()
        host = process.agent.host
        if host is not None and host.registrar.phase in (Phase.SEALING, Phase.SEALED):
            unsure = host.registrar.unsure
            self._claims[host.session] = set() if unsure else {view.session for view in host.registrar.views()}
        for session, begun in running.items():
            if session not in self.sessions:
                self._begins(begun)
                self.sessions[session] = begun
        self._check_majorities(running)

    def _check_generation(self, process: AgentProcess) -> None:
        if process.outcome is None:
            return
        member, generation = process.identity.member, process.agent.generation
        assert generation >= self._generations.get(member, 0), f"{process.name} went back to generation {generation}"
        self._generations[member] = generation

    def _begins(self, host: AgentHost) -> None:
        registrar = host.registrar
        assert registrar.nodes.minimum <= len(registrar.seats) <= registrar.nodes.maximum
        earlier = (self._lineages.get(session, {session}) for session in self._claims[host.session])
        self._lineages[host.session] = {host.session}.union(*earlier)

    def _check_majorities(self, running: dict[bytes, AgentHost]) -> None:
        held = []
        for session, host in running.items():
            roll = host.roll
            assert roll is not None
            dead = {
                each.identity.member
                for each in self.world.processes
                if isinstance(each, AgentProcess) and each.died_in == session
            }
            views = [view for view in (roll.settled, roll.proposed) if view is not None]
            if all(holds(view, self.members(session), dead | host.registrar.left_on_purpose) for view in views):
                self._minority_since.pop(session, None)
                held.append(host)
                continue
            since = self._minority_since.setdefault(session, self.world.now)
            late = self.world.now - since
            assert late < MINORITY_SECONDS, f"{host.identity.who} has no majority for {late:.1f} s and goes on"
        for session in [each for each in self._minority_since if each not in running]:
            del self._minority_since[session]
        for one, other in itertools.combinations(held, 2):
            related = self._lineages[one.session] & self._lineages[other.session]
            assert not related, f"two halves have a majority: {one.identity.who} and {other.identity.who}"


class AgentGathering:
    """A world with one network and the agents of one job, started by hand."""

    def __init__(
        self,
        seed: int,
        nodes: tuple[int, int],
        *,
        timeout: float = TIMEOUT_SECONDS,
        last_call: float = LAST_CALL_SECONDS,
        allow_minority: bool = False,
        secret: bytes | None = None,
        tracing: bool = False,
    ) -> None:
        self.world = World(seed, tracing=tracing)
        self.network = Network(self.world)
        self.lan = self.network.segment("lan")
        self.nodes = Nodes(minimum=nodes[0], maximum=nodes[1])
        self.timeout = timeout
        self.last_call = last_call
        self.allow_minority = allow_minority
        self.secret = secret
        self.invariants = AgentInvariants(self.world)
        self._pids = 100

    @property
    def rng(self) -> random.Random:
        """The world's dice."""
        return self.world.rng

    def start(self, machine: str, *, at: float = 0.0, nodes: Nodes | None = None) -> AgentProcess:
        """Plans the start of an agent on a machine."""
        where = self.network.machine(machine)
        self._pids += 1
        wanted = nodes or self.nodes
        identity = Identity(
            job="job",
            attempt="",
            member=self.world.identifier(),
            rank=None,
            world_size=wanted.maximum,
            node=machine,
            who=Who(hostname=machine, pid=self._pids, address=where.nics[0].address),
            kind="agents",
            minimum=wanted.minimum,
        )
        key = None if self.secret is None else JobKey(self.secret, "job")

        def build(_: Process, now: float) -> Any:
            addresses = tuple(Address(nic.address, nic.name, nic.prefix_length) for nic in where.nics)
            port = 20_000 + self.world.new_id() % 20_000
            dice = random.Random(self.world.rng.getrandbits(64))
            return Agent(
                identity,
                Reach(addresses=addresses, port=port),
                Means(key=key, new_id=self.world.new_id, rng=dice, timeout=self.timeout),
                now,
                nodes=wanted,
                last_call=self.last_call,
                allow_minority=self.allow_minority,
                new_session=self.world.identifier,
            )

        process = AgentProcess(self.network, where, identity, build, hosting=False, electing=True, key=key)
        self.world.at(self.world.now + at, process.start)
        return process

    def everybody(self, count: int, *, within: float = 2.0) -> list[AgentProcess]:
        """Plans the start of so many agents, each on a machine of its own."""
        return [self.start(f"m{number}", at=self.rng.uniform(0, within)) for number in range(count)]

    def split(self, left: Sequence[Machine], right: Sequence[Machine], *, parted: bool = True) -> None:
        """Lets nothing pass between two groups of machines any more, or again."""
        for one in left:
            for other in right:
                self.network.part(self.lan, one, other, parted=parted)

    def together(self, processes: Sequence[AgentProcess]) -> bool:
        """Whether these are in one session."""
        sessions = {each.outcome.session if each.outcome is not None else None for each in processes}
        return len(sessions) == 1 and None not in sessions

    def run_until_together(self, processes: Sequence[AgentProcess], within: float) -> None:
        """Runs until these are in one session, and demands that it comes to that in time."""
        met = self.world.run(within, until=lambda: self.together(processes))
        states = {each.name: (each.agent.stage() if each.core else "not started") for each in processes}
        assert met, f"not in one session within {within:g} s: {states}"

    @staticmethod
    def host_of(processes: Sequence[AgentProcess]) -> AgentProcess:
        """The one that hosts."""
        (host,) = [each for each in processes if each.hosted is not None]
        return host
