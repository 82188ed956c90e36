"""The answering side of the proof of the mesh, at a member: it greets the nodes that dial this one. Pure.

The other side is :mod:`mingle.protocol.links.prover`. A host answers the proof as well, among its other callers
(:meth:`mingle.protocol.host.Host.caller_said`); a member has no others.
"""

from __future__ import annotations

from collections.abc import Callable

from mingle.protocol.events import Accepted
from mingle.protocol.links.callers import GREETING_SECONDS, Caller, Callers
from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.links.prover import greeting
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import MAX_ADDRESSES

MAX_CALLERS = 256
"""The nodes that can prove the mesh to this one at a time."""


class Responder:
    """A member's control port.

    Args:
        identity: of this process.
        context: has the connections and limits them.
        endpoints: returns where others can connect to this process; None: they can't.
    """

    def __init__(self, identity: Identity, context: Context, endpoints: Callable[[], Endpoints | None]) -> None:
        self.callers = Callers(self, context, most=MAX_CALLERS, patience=GREETING_SECONDS)
        self._identity = identity
        self._links = context.links
        self._key = context.key
        self._endpoints = endpoints
        self._session: KnownSession | None = None
        """The session in which the callers prove the mesh."""

    @property
    def port(self) -> int:
        """Where this process answers; 0: it does not."""
        endpoints = self._endpoints()
        return 0 if endpoints is None else endpoints.port

    def accepted(self, event: Accepted, session: KnownSession | None, now: float) -> None:
        """Answer a connection, or hang up on it.

        Args:
            event: the connection.
            session: whose mesh this member is part of now; None: of none.
            now: the time.
        """
        self._session = session
        if session is None:
            self.callers.hang_up_all()
        if session is None or self._endpoints() is None:
            self._links.refuse(event.conn)
        else:
            self.callers.accepted(event.conn, event.address, now)

    # --- what the callers call -------------------------------------------------------------------------------------

    def conversation(self) -> HostConversation:
        """Begin this side of a conversation with a node that proves the mesh."""
        session, endpoints = self._session, self._endpoints()
        assert session is not None
        assert endpoints is not None
        own = (*(each.local_address for each in session.paths), *(each.address for each in endpoints.addresses))
        return HostConversation(
            job=self._identity.job,
            attempt=self._identity.attempt,
            session=session.name,
            addresses=tuple(dict.fromkeys(own))[:MAX_ADDRESSES],
            port=endpoints.port,
            key=self._key,
            purposes=("mesh",),
        )

    def caller_proved(self, caller: Caller, now: float) -> None:
        """Wait for its greeting."""

    def caller_said(self, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        """Greet a node of the mesh; anything else is said to a host."""
        if isinstance(frame, frames.Greet):
            self.callers.answer(caller.conn, "greeting", None, lambda: [greeting(self._identity.member)])
        else:
            self.callers.hang_up(caller.conn)

    def caller_lost(self, caller: Caller, reason: str, now: float) -> None:
        """It has proved its path, or will call again."""
