"""A node's part in the proof of the mesh: what the host has asked it for in the present epoch, if anything. Pure.

The host and its members have the same part. CONFIRM, or the host's own registrar, begins it; its result goes into
CONFIRMED, or to the registrar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from mingle.protocol.effects import Inspect
from mingle.protocol.events import Inspected
from mingle.protocol.machine import Context, Identity
from mingle.protocol.mesh import Prover
from mingle.wire import frames
from mingle.wire.frames import Blocked, Failure, Target


class ProofResult(Struct, frozen=True):
    """What a node has proved."""

    epoch: int
    failures: tuple[Failure, ...]
    """The targets that it could not reach."""
    blocked: Blocked | None
    """What it has found out about itself."""


class Proving:
    """The proof of one node, an epoch at a time.

    Args:
        identity: of this process.
        context: what the connections need.
        port: returns where this process answers; 0: it does not.
    """

    def __init__(self, identity: Identity, context: Context, port: Callable[[], int]) -> None:
        self._identity = identity
        self._context = context
        self._port = port
        self._epoch = 0
        self._prover: Prover | None = None

    def begin(
        self,
        session: bytes,
        epoch: int,
        path: frames.Path | None,
        *,
        targets: Sequence[Target],
        suspects: tuple[Target, ...],
        seconds: float,
        now: float,
    ) -> None:
        """Open connections to the targets, in place of those of an earlier epoch.

        Args:
            session: the name of the session.
            epoch: the epoch that the result belongs to.
            path: this node's own on the network that is to be proved; None: it has none.
            targets: where to dial, the first first.
            suspects: nodes that could not reach this one, so that it has to look at itself.
            seconds: how long to dial a target that does not answer.
            now: the time.
        """
        self.stop()
        inspect = None
        if path is not None and suspects:
            number = self._context.new_id()
            inspect = Inspect(number, path.interface, path.local_address, self._port(), suspects)
        self._epoch = epoch
        self._prover = Prover(
            self._identity.call(session, "mesh"),
            targets,
            interface="" if path is None else path.interface,
            seconds=seconds,
            context=self._context,
            inspect=inspect,
            now=now,
        )

    def stop(self) -> None:
        """Hang up on the targets: their epoch is over."""
        if self._prover is not None:
            self._prover.stop()
            self._prover = None

    @property
    def under_way(self) -> bool:
        """Whether a target has neither been reached nor given up."""
        return self._prover is not None and not self._prover.done

    def take_result(self) -> ProofResult | None:
        """Return, once, what a proof that is no longer under way has shown; None: nothing was asked for."""
        prover = self._prover
        if prover is None or not prover.done:
            return None
        self._prover = None
        return ProofResult(self._epoch, tuple(prover.failures), prover.blocked)

    # --- what happens ----------------------------------------------------------------------------------------------

    def inspected(self, event: Inspected) -> None:
        """Take note of what was found out about this machine."""
        if self._prover is not None:
            self._prover.inspected(event)

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        return None if self._prover is None else self._prover.next_timer()

    def handle_timer(self, now: float) -> None:
        """Do what is due."""
        if self._prover is not None:
            self._prover.handle_timer(now)
