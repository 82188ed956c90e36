"""A gathering without a network: the agents of this process share a store, and a test says what is lost.

Their rounds are those of a real session (`mingle.elastic.rounds`); only its host is missing.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mingle.config.order import order_of
from mingle.elastic.gathering import AgentState, Gathered
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Quorum
from mingle.elastic.rounds import Rounds
from mingle.elastic.settings import AgentSettings
from mingle.engine.store import StoreServer, open_server
from mingle.errors import DiscoveryTimeoutError
from mingle.protocol.machine import Formation
from mingle.protocol.session.seats import Seated
from mingle.wire import frames

LOOK_SECONDS = 0.01
"""How often an agent that waits has the host look whether a round begins."""


@dataclass
class Place:
    """What the agents of one job share."""

    generation: int = 0
    server: StoreServer | None = None
    members: dict[bytes, FixedGathering] = field(default_factory=dict)
    _rounds: Rounds | None = None
    _seated: dict[bytes, FixedGathering] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def enter(self, agent: FixedGathering) -> StoreServer:
        """Give an agent a seat in the present generation; the first one opens the store."""
        with self._lock:
            if self.server is None:
                self.server = open_server("0.0.0.0", None, secrets.token_bytes(16))
                quorum = Quorum(self.server.session, agent.memory, time.monotonic())
                quorum.had_quorum = True
                self._rounds = Rounds(quorum, agent.memory, self._send)
            self._seated[agent.member] = agent
            return self.server

    def _send(self, member: bytes, frame: frames.Begin | frames.Wanted) -> None:
        self._seated[member].memory.hear_of_round(frame)

    def said_next(self, agent: FixedGathering, said: frames.Next) -> None:
        """An agent waits for a round."""
        with self._lock:
            if self._rounds is not None and agent.member in self._seated:
                agent.memory.wait_for_round(said)
                self._rounds.said_next(agent.member, said, time.monotonic())
                self.look()

    def said_done(self, agent: FixedGathering) -> None:
        """An agent's workers are done."""
        with self._lock:
            if self._rounds is not None:
                self._rounds.said_done(agent.member)

    def look(self) -> None:
        """Have the host look whether a round begins or is wanted."""
        with self._lock:
            if self._rounds is not None:
                self._rounds.look([agent.seat for agent in self._seated.values()], time.monotonic())

    def lose_node(self, agent: FixedGathering) -> None:
        """An agent is gone, and the session continues."""
        with self._lock:
            self._seated.pop(agent.member, None)
            self.look()

    def lose(self, reason: str = "the host is gone") -> None:
        """The host dies: its store, and the gathering of all."""
        with self._lock:
            server, self.server, self._rounds = self.server, None, None
            self.generation += 1
            self._seated.clear()
            assert server is not None
            server.abort()
            for member in self.members.values():
                member.memory.wait_for_round(None)
                member.lost = reason
                member.session_lost.set()

    def end(self, reason: str = "its agent has finished") -> None:
        """The host ends the job on purpose."""
        for member in self.members.values():
            member.ended = reason
            member.session_lost.set()
        self.close()

    def ending(self) -> None:
        """A member has ended the job: no round begins any more."""
        with self._lock:
            self._rounds = None
            for member in self._seated.values():
                member.ending = True

    def close(self) -> None:
        """The store goes."""
        with self._lock:
            server, self.server = self.server, None
        if server is not None:
            server.abort()


class FixedGathering:
    """Stands in for `mingle.elastic.gathering.Gathering`."""

    def __init__(self, place: Place, wanted: AgentSettings, *, timeout: bool = False) -> None:
        self.lost: str | None = None
        self.ended: str | None = None
        self.ending = False
        self.session_lost = threading.Event()
        self.held = True
        self.gathered = 0
        self.asked: list[tuple[int, int]] = []
        """The first round of this agent, at each time that it has said NEXT."""
        self.present: tuple[frames.ProcessInfo, ...] = ()
        self.waits_long = False
        """Whether the next wait for a round takes so long that a remark is made."""
        self.done = False
        self.closed: str | None = None
        self.failed = False
        self.round_over = False
        self.member = secrets.token_bytes(16)
        self.memory = Memory(wanted.policy)
        number = len(place.members)
        # Each agent reaches the store at an address of its own: the connections of one are told apart by it.
        self._address = f"127.0.0.{2 + number}"
        applicant = frames.Join(
            world_size=wanted.policy.nodes.maximum,
            node=f"node{number}",
            kind="agents",
            order=order_of(wanted.settings.placement, f"node{number}", self._address),
            who=frames.ProcessInfo(hostname=f"node{number}", pid=1, address=self._address, unit="node"),
        )
        self.seat = Seated(self.member, None if number == 0 else number, applicant)
        self._place = place
        self._timeout = timeout
        place.members[self.member] = self

    @property
    def state(self) -> AgentState:
        """What the loop publishes."""
        return AgentState(
            round=self.memory.round,
            round_wanted=self.memory.round_wanted,
            round_over=self.round_over,
            ending=self.ending,
            present=self.present,
            lost=self.lost,
            ended=self.ended,
        )

    def gather(self) -> Gathered:
        if self._timeout:
            raise DiscoveryTimeoutError.explain("1 of 2 nodes", cause="b was not started", remedy="start it")
        self.lost = None
        self.session_lost.clear()
        self.gathered += 1
        server = self._place.enter(self)
        formation = Formation(
            session=server.session,
            place=frames.Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1),
            store_address=self._address,
            store_port=server.port,
            interface="lo",
            address="127.0.0.1",
            roster_digest=b"",
        )
        return Gathered(formation, self._place.generation)

    def next_round(self, first: tuple[int, int], seconds: float, remark: Callable[[], None]) -> frames.Begin | None:
        self.asked.append(first)
        if self.waits_long:
            remark()
        self._place.said_next(self, frames.Next(generation=first[0], number=first[1]))
        deadline = time.monotonic() + seconds
        while not (self.session_lost.is_set() or self.ending):
            if (begun := self.memory.round) is not None:
                return begun
            if time.monotonic() > deadline:
                raise TimeoutError
            self.session_lost.wait(LOOK_SECONDS)
            self._place.look()
        return None

    def await_round(self, is_over: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (self.session_lost.is_set() or is_over() or time.monotonic() > deadline):
            if self.held:
                return True
            self.session_lost.wait(LOOK_SECONDS)
        return False

    def workers_done(self) -> None:
        self.done = True
        self._place.said_done(self)

    def close(self, reason: str, *, failed: bool = False) -> None:
        if self.closed is not None:
            return
        self.closed, self.failed = reason, failed
        if failed:
            self._place.lose_node(self)
        else:
            self._place.ending()
