"""How many agents found a session of an elastic job, and how many keep it: a quorum of fixed size. Pure.

A job of MIN to MAX nodes is founded by F = max(MIN, MAX // 2 + 1) agents and kept by K = MAX - F + 1, as etcd and
ZooKeeper count over a fixed membership. F + K > MAX: while at most MAX agents of a job are alive, the agents that
found a session and those that keep another one have an agent in common, and its lease (:mod:`mingle.elastic.leases`)
allows it only one of the two. So the protocol never has to decide that an agent is dead, which no packet can prove.
"""

from __future__ import annotations

from dataclasses import dataclass

from mingle.errors import ConfigurationError
from mingle.wire import frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How many nodes a job may have: torchrun's ``--nnodes=MIN:MAX``.

    Raises:
        ConfigurationError: MIN and MAX are not 1 <= MIN <= MAX <= the limit.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= frames.MAX_NODES:
            raise ConfigurationError.explain(
                f"a job can't have {self.minimum} to {self.maximum} nodes",
                cause="the two numbers of --nnodes=MIN:MAX are mixed up, or one of them is mistyped",
                remedy=f"give 1 <= MIN <= MAX <= {frames.MAX_NODES}",
            )

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"

    @property
    def founders(self) -> int:
        """F: the number of agents that found a session. Two disjoint groups of the job's agents cannot both have F."""
        return max(self.minimum, self.maximum // 2 + 1)

    @property
    def keepers(self) -> int:
        """K: the number of agents, including the host, that keep a session that has had its quorum."""
        return self.maximum - self.founders + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers of agents on which a session's registrar relies.

    Attributes:
        nodes: how many nodes the job may have.
        last_call: seconds that a gathering below its quorum waits for another agent before it can start small.
        allow_minority: whether MIN agents can always found and keep a session; two parts of the job can then run.
    """

    nodes: Nodes
    last_call: float
    allow_minority: bool = False

    def may_start_small(self, *, experienced: bool) -> bool:
        """Return whether MIN agents can found a session after a last call.

        Args:
            experienced: whether any agent of the gathering was in a session that had its quorum.
        """
        return self.allow_minority or not experienced

    def to_keep(self, *, had_quorum: bool) -> int:
        """Return how many agents, including the host, keep a session."""
        if self.allow_minority:
            return min(self.nodes.minimum, self.nodes.keepers)
        return self.nodes.keepers if had_quorum else self.nodes.minimum
