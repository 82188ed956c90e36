"""Torch's rendezvous backend on the agents' store, under our name, and without a second's sleep in most rounds.

Torch's rendezvous looks at its state once a second. So a node that has just taken its place in an incomplete round
would learn up to a second late that the round is complete, and one that waits for the next round, that the present one
is over, although all agents come within moments of each other: they have met before. Here a write that makes a node
wait does not return before there is something for it to do, or that second has passed. What is written, and who
concludes what from it, stays torch's.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

BACKEND = "mingle"

LINGER_SECONDS = 1.0
"""How long a write waits for the others: as long as torch would sleep, and less than its heartbeats may be apart."""
LOOK_SECONDS = 0.02
LOOK_SECONDS_PER_NODE = 0.0005
"""How often it looks meanwhile. The state holds all nodes, so what all of them read grows with their square."""


class Backend(C10dRendezvousBackend):
    """Torch's backend under our name, which the registry compares with ``--rdzv-backend``.

    Args:
        store: a client of the agents' store.
        run_id: the job's id.
        nodes: the most nodes there may be.
    """

    def __init__(self, store: Store, run_id: str, nodes: int) -> None:
        super().__init__(store, run_id)
        self.node: Any | None = None
        """The node of torch's for which it writes, whose writes wait for the others; None: for none."""
        self._look_seconds = min(LOOK_SECONDS + LOOK_SECONDS_PER_NODE * nodes, LINGER_SECONDS)

    @property
    def name(self) -> str:
        """The name of the backend."""
        return BACKEND

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """As torch's, but a node that it makes wait for others gets the state as it is a little later.

        Returns:
            The state, its token, and whether ours was written; None: there is no state.

        Raises:
            RendezvousConnectionError: the store is gone.
            RendezvousStateError: what is there is no state.
        """
        answer = super().set_state(state, token)
        until = time.monotonic() + LINGER_SECONDS
        while answer is not None and answer[2] and self._waits(answer[0]) and time.monotonic() < until:
            time.sleep(self._look_seconds)
            now = self.get_state()
            answer = None if now is None else (*now, True)
        return answer

    def _waits(self, bits: bytes) -> bool:
        try:
            # Torch reads the same bytes, in the same way, as soon as it has them.
            state = pickle.loads(bits)  # noqa: S301
        except pickle.PickleError:
            return False  # torch will say so
        # For the next round where the present one has its nodes, else for those that it lacks.
        waiting = state.wait_list if state.complete else state.participants
        return self.node in waiting and not state.closed
