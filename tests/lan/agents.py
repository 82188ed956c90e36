"""Agents in the simulated network: a process that drives one, and what must hold of all of them in every step."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mingle.elastic.agent import Agent, JobEnd
from mingle.elastic.host import ElasticHost
from mingle.elastic.leases import is_fresh
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes, Policy
from mingle.network.connections import CLOSED_BY_PEER
from mingle.protocol.events import Address, TimerDue
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.machine import Context, Endpoints, Formation, Identity, Mesh
from mingle.protocol.session.seats import CLAIM_BYTES, EXPLICIT
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_ADDRESSES
from mingle.wire.frames import Begin, ProcessInfo
from tests.lan.network import Barrier, Machine, Network
from tests.lan.process import Process
from tests.lan.processor import Processor
from tests.lan.tcp import RESET
from tests.lan.world import World
from tests.support.recording import Recording

LAST_CALL_SECONDS = 5.0
TIMEOUT_SECONDS = 400.0
CLOCK_ERROR = 0.01
"""How much faster or slower than the truth a clock may run."""
STARTED_AT = 1_700_000_000
"""What wall clocks show when the world begins."""
ROUND_SECONDS = (0.1, 1.5)
"""How long after one another torch completes rounds in a session."""
SEEN_SECONDS = (0.0, 0.0, 0.05, 1.0, 3.0)
"""How late a member sees that a round is complete, at most."""
ASK_SECONDS = 1.0
"""How often an agent asks again whether its session stands."""
STOP_SECONDS = (0.0, 0.1, 0.1, 0.5, 2.0, 8.0)
"""How long the workers of an agent take to end, at most."""
NEVER = (-1, -1)
"""The first round of a torchrun that has got none."""
UNREAD = 0.15
"""How often a process that is killed has not read everything: its kernel then ends its connections by resets."""


class AgentProcess(Process):
    """One agent. It goes on until it is closed, killed, or has failed. Its clock runs at a rate of its own."""

    core: Agent | None
    settles = False
    rate: float = 1.0
    asleep: float = 0.0
    """For how long its machine has been suspended: CLOCK_BOOTTIME goes on then, CLOCK_MONOTONIC does not."""
    _suspended_at: float | None = None
    _round: tuple[bytes, float] | None = None
    """The session of a round that is forced upon this agent, and when it saw that; until torchrun gets the round."""
    first: tuple[int, int] = NEVER
    """The generation and the number of the first round that its torchrun got."""
    workers: tuple[bytes, Begin] | None = None
    """The session and the round whose workers run."""
    _stops_workers = False
    _begun: tuple[tuple[bytes, int], float] | None = None
    """The round that its torchrun waits to get, by session and number, and when it began to wait for that."""
    _says_next = False

    def __init__(self, *arguments: Any, invariants: AgentInvariants, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._invariants = invariants
        self._torchrun_dice = random.Random(f"torchrun {self.world.seed} {self.identity.who.pid}")

    @property
    def name(self) -> str:
        """How a trace calls it."""
        return f"{self.machine.name}#{self.identity.who.pid}"

    @property
    def now(self) -> float:
        """The time by its own CLOCK_BOOTTIME."""
        return self.world.now * self.rate

    def when(self, due: float) -> float:
        """When a time of its own clock comes."""
        return due / self.rate

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
    def hosted(self) -> ElasticHost | None:
        """The session that it hosts and that runs."""
        host = self.core.host if self.core is not None and self.alive else None
        return host if host is not None and host.running else None

    def _killed(self) -> str:
        return RESET if self.world.rng.random() < UNREAD else CLOSED_BY_PEER

    def suspend(self) -> None:
        """The machine sleeps: no process of it runs, and no packet comes or goes."""
        if self.alive and not self.stopped:
            self.network.cut(self.machine)
            self.stop()
            self._suspended_at = self.world.now

    def resume(self) -> None:
        """It wakes up."""
        if self._suspended_at is not None:
            self.asleep += self.world.now - self._suspended_at
            self._suspended_at = None
            self.network.heal(self.machine)
            self.cont()

    # --- its torchrun's rounds -------------------------------------------------------------------------------------

    def see_round(self, session: bytes) -> None:
        """A round of this session is forced upon it, at a time of no host's choosing."""
        if self.alive and not self.stopped and self.outcome is not None and self.outcome.session == session:
            self._round = session, self.now
            self._ask_round(self._round)

    def _ask_round(self, asked: tuple[bytes, float]) -> None:
        if self._round is asked and self.alive:
            self._event(lambda: self.agent.ask_round(self.now))
            self.world.after(ASK_SECONDS, functools.partial(self._ask_round, asked))

    def fail_workers(self) -> None:
        """A worker of this agent fails."""
        if self.workers is not None and self.alive and not self.stopped:
            self._stop_workers()

    def _look(self) -> None:
        """Torchrun's main thread looks what it can do."""
        if not self.alive or self.stopped:
            return
        if self._round is not None:
            session, made = self._round
            if self.outcome is None or self.outcome.session != session:
                self._round = None
            elif self.agent.hold.allows(made, self.now):
                self._round = None
                self._invariants.returned(self, session)
        memory, session = self.agent.memory, b"" if self.outcome is None else self.outcome.session
        if self.workers is not None:
            if self.workers[0] != session or memory.round_wanted:
                self._stop_workers()
        elif session and self.agent.job_end < JobEnd.ANNOUNCED and self._needs_round(memory):
            if not self._says_next:
                self._says_next = True
                self.world.after(0.0, functools.partial(self._event, self._say_next))
        elif session and memory.round is not None:
            self._get_round(session, memory.round)

    @staticmethod
    def _needs_round(memory: Memory) -> bool:
        return memory.asked is None and (memory.round is None or memory.round_wanted)

    def _say_next(self) -> None:
        self._says_next = False
        if self.workers is None:
            self.agent.next_round(self.first, self.now)

    def _get_round(self, session: bytes, begun: Begin) -> None:
        name = session, begun.number
        if self._begun is None or self._begun[0] != name:
            self._begun = name, self.now
            self._ask_begun(self._begun)
        elif self.agent.hold.allows(self._begun[1], self.now):
            self.workers, self._begun = (session, begun), None
            self.world.note(f"{self.name} gets round {begun.number} of {session.hex()[:4]}: {begun.rank}/{begun.size}")
            self._invariants.returned(self, session, begun.number)
            self._invariants.ranked(session, begun, self.first)
            if self.first == NEVER:
                self.first = self.agent.generation, begun.number

    def _ask_begun(self, begun: tuple[tuple[bytes, int], float]) -> None:
        if self._begun is begun and self.alive:
            self.world.after(0.0, functools.partial(self._event, lambda: self.agent.ask_round(self.now)))
            self.world.after(ASK_SECONDS, functools.partial(self._ask_begun, begun))

    def _stop_workers(self) -> None:
        if not self._stops_workers:
            self._stops_workers = True
            dice = self._torchrun_dice
            self.world.after(dice.uniform(0, dice.choice(STOP_SECONDS)), self._workers_stopped)

    def _workers_stopped(self) -> None:
        def note() -> None:
            self.workers, self._stops_workers = None, False
            self._say_next()

        self._event(note)

    def cont(self) -> None:
        """Go on; the main thread can be first, before the one that reads what has come in the meantime."""
        if self.alive and self.stopped:
            self.stopped = False
            self._look()
            self.stopped = True
        super().cont()

    # --- its driver ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self.agent.expired(self.now):
            self.agent.give_up(timeout(self.agent.situation(), self.facts()))
            self._flush()
            return
        due, rounds = self.agent.next_timer(), 0
        while due is not None and due <= self.now:
            self.agent.handle(TimerDue(), self.now)
            due, rounds = self.agent.next_timer(), rounds + 1
            assert rounds < 8, f"busy loop: {due} is not after {self.now}: {self.agent.stage()}"
        self._flush()

    def _flush(self) -> None:
        self._carry_out()
        agent = self.agent
        if agent.outcome is not None and self.formed_at is None:
            self.formed_at = self.world.now
        if agent.failure is not None and self.failed_at is None and not self.stopped:
            self.failed_at = self.world.now
            self.close()
        for watch in list(self.world.watchers):
            watch(self)
        self._look()
        if self.alive:
            self._set_alarm()

    def close(self) -> None:
        """End its part on purpose."""
        if self.alive:
            self.agent.close("its workers are done")
            self._carry_out()
            self._end()


@dataclass(slots=True)
class Round:
    """A round of a session that had its quorum when the round began."""

    session: bytes
    number: int
    participants: set[bytes]
    told: set[bytes] = field(default_factory=set)
    """The participants that have heard of it."""
    returned: bool = False
    """Whether the torchrun of one of them has got it."""


class AgentInvariants:
    """What must hold in every step while no more than MAX agents live.

    Sessions that began small and have not had their quorum, and those of agents that allow a minority, promise nothing.
    The names in brackets are those of the promises in the model that the rules come from:

    * two hosts never hold a session at once, unless agents that one of them counts were killed ("two hosts hold");
    * from the moment on at which a session gets its quorum, the host of no earlier one can return a round, even if its
      leases, of agents that were killed, last longer [P0];
    * nor does an earlier session form or take a member from then on, so that it stays like this [P1];
    * no torchrun gets a round of a session after one of a later session [P2];
    * no two sessions have a round whose participants are all alive and in it, as far as each can know [P3];
    * in each round those that have trained come first, by their first rounds [SEN].

    That all come together in one round in the end [LIV] is up to each schedule.
    """

    def __init__(self, world: World, policy: Policy) -> None:
        self.world = world
        self.policy = policy
        self.sessions: dict[bytes, ElasticHost] = {}
        """Every session that has formed."""
        self.clocks_are_right = True
        """Whether all wall clocks are, so that the generations of sessions never go back in time."""
        self.quorate: list[bytes] = []
        """The sessions that have had their quorum, in that order."""
        self.rounds: dict[tuple[bytes, int], dict[int, tuple[int, tuple[int, int]]]] = {}
        """The size of each round that torchruns have got, and their first rounds before that, by rank."""
        self.crowded = False
        """Whether more than MAX agents have lived at a time: nothing is promised of sessions then."""
        self.latest = -1
        """The last of them that has had a round."""
        self._seated: dict[bytes, set[bytes]] = {}
        """The members of each session that has had its quorum."""
        self._begun: dict[tuple[bytes, int], Round] = {}
        """Every round that has begun in a session with a quorum."""
        self._valid: list[Round] = []
        """Those of them whose participants all are in them."""
        self._rng = random.Random(world.seed)
        world.watchers.append(self.check)
        world.after(self._rng.uniform(*ROUND_SECONDS), self._complete_rounds)

    def agents(self) -> list[AgentProcess]:
        """Those that live."""
        return [each for each in self.world.processes if isinstance(each, AgentProcess) and each.alive and each.core]

    def holders(self) -> list[AgentProcess]:
        """The hosts that believe at this moment, by their own clocks, that they hold a session with a quorum."""
        return [
            each
            for each in self.agents()
            if not each.stopped and each.hosted is not None and each.now < each.agent.hold.until
            if each.hosted.quorum.had_quorum and not self.policy.allow_minority
        ]

    def _truly_held(self, holder: AgentProcess) -> bool:
        """Whether those on whom it counts live: one that was started again is a new agent, and free."""
        assert holder.hosted is not None
        quorum, living = holder.hosted.quorum, {each.identity.member for each in self.agents()}
        counted = set(quorum.counting(holder.now))
        return counted <= living or len(counted & living) >= quorum.wanted

    def check(self, process: Process) -> None:
        """Looks at what may have changed in a step of one process."""
        assert isinstance(process, AgentProcess)
        outcome, host = process.outcome, process.agent.host
        self.crowded |= len(self.agents()) > self.policy.nodes.maximum
        assert not process.alive or not process.agent.expired(process.now - 1.0), "it waits beyond its timeout"
        # A host that was killed while it sent GO has decided it.
        is_new = host is not None and host.outcome is not None and self._check_host(process, host)
        if outcome is not None:
            assert outcome.session in self.sessions, f"{process.name} is in a session that has not formed"
        if self.crowded:
            return
        held = [each for each in self.holders() if self._truly_held(each)]
        assert len(held) < 2, f"two hosts hold: {', '.join(each.name for each in held)}"
        if not self.policy.allow_minority:
            self._check_earlier_sessions(self.agents() if is_new else [process])
            if host is not None:
                self._note_round(host)
            self._valid = [each for each in self._valid if self._may_be_in(each, process)]
            self._check_rounds()

    def _check_earlier_sessions(self, changed: Sequence[AgentProcess]) -> None:
        """No session before the last one that got its quorum can have a round, or take a member.

        Once a member has ended the job, its session has no round any more, and takes those that come back to it.
        """
        for each in changed:
            host = each.hosted
            if host is None or not host.quorum.had_quorum or host.quorum.ending:
                continue
            members = {seat.member for seat in host.registrar.seats.members()}
            if host.session != self.quorate[-1]:
                hold, now = each.agent.hold, each.now
                can_return = now < hold.until and is_fresh(hold.proved_at, now)
                assert not can_return, f"{each.name} can return a round although a later session has its quorum"
                late = members - self._seated.get(host.session, set())
                assert not late, f"{each.name} takes a member although a later session has its quorum"
            self._seated[host.session] = members

    def _note_round(self, host: ElasticHost) -> None:
        name = host.session, host.rounds.number
        if host.running and host.quorum.had_quorum and host.rounds.number >= 0 and name not in self._begun:
            self._begun[name] = Round(*name, set(host.rounds.participants))
            self._valid.append(self._begun[name])

    def _check_rounds(self) -> None:
        """No two sessions have a valid round.

        A round is valid from its first return on, until the first participant is killed, knows that the session is
        lost, has said NEXT, or its binding (the host's: its lease) has ended by its clock.
        """
        if len({each.session for each in self._valid if each.returned}) < 2:
            return
        living = {each.identity.member: each for each in self.agents()}
        self._valid = [each for each in self._valid if all(self._is_in(each, living.get(p)) for p in each.participants)]
        sessions = {each.session for each in self._valid if each.returned}
        assert len(sessions) < 2, f"two sessions have a round: {', '.join(each.hex()[:4] for each in sessions)}"

    def _may_be_in(self, begun: Round, process: AgentProcess) -> bool:
        return process.identity.member not in begun.participants or self._is_in(begun, process)

    def _is_in(self, begun: Round, process: AgentProcess | None) -> bool:
        """Whether a participant takes part in a round as far as it can know, or has yet to hear of that."""
        if process is None or not process.alive or process.outcome is None or process.outcome.session != begun.session:
            return False
        memory = process.agent.memory
        if memory.round is not None and memory.round.number == begun.number:
            begun.told.add(process.identity.member)
        elif process.identity.member in begun.told:
            return False
        return process.now < process.agent.hold.until

    def _check_host(self, process: AgentProcess, host: ElasticHost) -> bool:
        """Looks at a session that has formed; returns whether it has just got its quorum."""
        members = host.registrar.seats.members()
        if host.session not in self.sessions:
            self._check_generation(host)
            self.sessions[host.session] = host
            nodes = host.quorum.policy.nodes
            assert nodes.minimum <= len(members) <= nodes.maximum
        orders = [seat.applicant.order for seat in members]
        claims = [order for order in orders if len(order) == CLAIM_BYTES and order.startswith(EXPLICIT)]
        assert len(claims) == len(set(claims)), f"two members of {process.name}'s session have one node rank"
        is_new = host.quorum.had_quorum and host.session not in self.quorate
        if is_new:
            self.quorate.append(host.session)
        return is_new

    def _check_generation(self, formed: ElasticHost) -> None:
        """A session sorts after all earlier ones, whoever was started again in between."""
        if self.policy.allow_minority or not self.clocks_are_right or self.crowded:
            return
        earlier = [each.quorum.generation for each in self.sessions.values() if each.quorum.had_quorum]
        if formed.quorum.had_quorum and earlier:
            assert formed.quorum.generation >= max(earlier), "a session with a quorum sorts before an earlier one"

    def _complete_rounds(self) -> None:
        """Force a round upon any members of every session: what follows must not depend on when a host begins one."""
        rng = self._rng
        self.world.after(rng.uniform(*ROUND_SECONDS), self._complete_rounds)
        by_member = {each.identity.member: each for each in self.agents()}
        for holder in [each for each in self.agents() if each.hosted is not None and not each.stopped]:
            assert holder.hosted is not None
            late = rng.choice(SEEN_SECONDS)
            for member in [seat.member for seat in holder.hosted.registrar.seats.members()]:
                if member in by_member and rng.random() < 0.7:
                    see = functools.partial(by_member[member].see_round, holder.hosted.session)
                    self.world.after(0.0 if by_member[member] is holder else rng.uniform(0, late), see)

    def ranked(self, session: bytes, begun: Begin, first: tuple[int, int]) -> None:
        """A torchrun has got this round of a session, and that one was its first.

        The ranks of a round are its own alone, and those that come later come after those that have trained.
        """
        got = self.rounds.setdefault((session, begun.number), {})
        assert begun.rank not in got, f"two agents are {begun.rank} in one round"
        got[begun.rank] = begun.size, first
        assert {size for size, _ in got.values()} == {begun.size}
        assert self.policy.nodes.minimum <= begun.size <= self.policy.nodes.maximum, f"a round of {begun.size}"
        firsts = [first if first != NEVER else (2**60, 0) for _, (_, first) in sorted(got.items())]
        assert firsts == sorted(firsts), f"a newcomer precedes an agent that has trained: {firsts}"

    def returned(self, process: AgentProcess, session: bytes, number: int = -1) -> None:
        """A torchrun has got a round: of no session before the last that had one.

        A round that was forced upon it has no number.
        """
        if session not in self.quorate or self.policy.allow_minority:
            return
        if self.crowded:
            return
        if begun := self._begun.get((session, number)):
            begun.returned = True
            self._check_rounds()
        order = self.quorate.index(session)
        assert order >= self.latest, f"{process.name} gets a round although a later session has had one"
        self.latest = order


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
        mesh: Mesh = "off",
        tracing: bool = False,
    ) -> None:
        self.mesh = mesh
        self.world = World(seed, tracing=tracing)
        self.network = Network(self.world)
        self.lan = self.network.segment("lan")
        numbers = Nodes(minimum=nodes[0], maximum=nodes[1])
        self.policy = Policy(nodes=numbers, last_call=last_call, allow_minority=allow_minority)
        self.timeout = timeout
        self.secret = secret
        self.clock_errors: dict[str, float] = {}
        """By how many seconds the wall clock of a machine is ahead of the truth; any other machine's is right."""
        self.uneven_clocks = False
        """Whether clocks run up to a hundredth faster or slower than the truth."""
        self.orders: dict[str, bytes] = {}
        """The order of the nodes on a machine; any other machine's agents have none."""
        self.invariants = AgentInvariants(self.world, self.policy)
        self._pids = 100

    def resize(self, nodes: Nodes) -> None:
        """Change how many nodes the job may have, before any agent starts."""
        self.policy = self.invariants.policy = dataclasses.replace(self.policy, nodes=nodes)

    @property
    def rng(self) -> random.Random:
        """The world's dice."""
        return self.world.rng

    def start(
        self, machine: str, *, at: float = 0.0, nodes: Nodes | None = None, processor: Processor | None = None
    ) -> AgentProcess:
        """Plans the start of an agent on a machine."""
        where = self.network.machine(machine)
        self._pids += 1
        policy = self.policy if nodes is None else dataclasses.replace(self.policy, nodes=nodes)
        wanted = policy.nodes
        identity = Identity(
            job="job",
            attempt="",
            member=self.world.identifier(),
            rank=None,
            world_size=wanted.maximum,
            node=machine,
            who=ProcessInfo(hostname=machine, pid=self._pids, address=where.nics[0].address, unit="node"),
            kind="agents",
            minimum=wanted.minimum,
            order=self.orders.get(machine, b""),
        )
        key = None if self.secret is None else JobKey(self.secret, "job")
        mesh = self.mesh

        def wall_clock() -> float:
            return STARTED_AT + self.world.now + self.clock_errors.get(machine, 0.0)

        def build(recording: Recording, now: float) -> Any:
            nics = recording.draw(lambda: list(where.nics))
            addresses = tuple(Address(nic.address, nic.name, nic.prefix_length) for nic in nics)
            new_id = functools.partial(recording.draw, self.world.new_id)
            port = 20_000 + new_id() % 20_000
            dice = random.Random(recording.draw(lambda: self.world.rng.getrandbits(64)))
            return Agent(
                identity,
                Endpoints(addresses=addresses[:MAX_ADDRESSES], port=port),
                Context(key=key, new_id=new_id, rng=dice, timeout=self.timeout, mesh=mesh),
                now,
                policy=policy,
                wall_clock=functools.partial(recording.draw, wall_clock),
                new_session=functools.partial(recording.draw, self.world.identifier),
            )

        process = AgentProcess(
            self.network,
            where,
            identity,
            build,
            key=key,
            processor=processor,
            invariants=self.invariants,
        )
        if self.uneven_clocks:
            process.rate = where.rate = where.rate or self.world.rng.uniform(1 - CLOCK_ERROR / 2, 1 + CLOCK_ERROR / 2)
        self.world.at(self.world.now + at, process.start)
        return process

    def everybody(self, count: int, *, within: float = 2.0) -> list[AgentProcess]:
        """Plans the start of so many agents, each on a machine of its own."""
        return [self.start(f"m{number}", at=self.rng.uniform(0, within)) for number in range(count)]

    def split(
        self,
        left: Sequence[Machine],
        right: Sequence[Machine],
        *,
        parted: bool = True,
        barrier: Barrier = "drop",
        one_way: bool = False,
    ) -> None:
        """Let nothing pass between two groups of machines any more, or again."""
        for one in left:
            for other in right:
                self.network.part(self.lan, one, other, parted=parted, barrier=barrier, one_way=one_way)

    def together(self, processes: Sequence[AgentProcess]) -> bool:
        """Whether these are in one session."""
        sessions = {each.outcome.session if each.outcome is not None else None for each in processes}
        return len(sessions) == 1 and None not in sessions

    def in_one_round(self, processes: Sequence[AgentProcess]) -> bool:
        """Whether the workers of these, and of no other agent, run in one round."""
        running = {(session, begun.number) for session, begun in filter(None, (each.workers for each in processes))}
        sizes = [each.workers[1].size for each in processes if each.workers is not None]
        return len(running) == 1 and sizes == [len(processes)] * len(processes)

    def run_until_together(self, processes: Sequence[AgentProcess], within: float) -> None:
        """Run until these are in one session, and demand that it comes to that in time."""
        met = self.world.run(within, until=lambda: self.together(processes))
        states = {each.name: (each.agent.stage() if each.core else "not started") for each in processes}
        assert met, f"not in one session within {within:g} s: {states}"

    @staticmethod
    def host_of(processes: Sequence[AgentProcess]) -> AgentProcess:
        """The one that hosts."""
        (host,) = [each for each in processes if each.hosted is not None]
        return host
