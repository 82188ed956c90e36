"""Looking whether a session that a running host has heard of really runs: then it makes way for it. Pure.

One is asked at a time, over TCP, as a probe. ``found`` is the OFFER of the one that has proved itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mingle.rules.control import HandshakeFailed
from mingle.rules.machine import Effect, Hangup, NewId
from mingle.rules.proving import Endpoint, Proving, Verdict
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer, Rejected

AGAIN_SECONDS = 1.0
"""How soon another session may be asked after one that was none to make way for."""


@dataclass(slots=True)
class Superseding:
    """The question, and its answer."""

    hello: Callable[[bytes, frames.Purpose], frames.Hello]
    key: JobKey | None
    new_id: NewId
    effects: list[Effect]
    found: Offer | None = None
    _offer: Offer | None = None
    _proving: Proving | None = None
    _again_at: float = 0.0
    _until: float = 0.0

    def heard(self, offer: Offer, endpoints: Sequence[Endpoint], now: float) -> None:
        """A datagram says that a session runs which comes before ours."""
        if self._proving is not None or self.found is not None or now < self._again_at:
            return
        self._offer, self._until = offer, now + 2 * AGAIN_SECONDS
        self._proving = Proving(
            functools.partial(self.hello, offer.session, "probe"),
            endpoints,
            offer.port,
            key=self.key,
            new_id=self.new_id,
            effects=self.effects,
            now=now,
        )

    def owns(self, conn: int) -> bool:
        """Tells whether a connection was dialled here."""
        return self._proving is not None and self._proving.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str) -> None:
        """A connection stands."""
        assert self._proving is not None
        self._proving.connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in."""
        proving = self._proving
        assert proving is not None
        try:
            received = proving.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self.effects.append(Hangup(conn))
            proving.closed(conn, str(failure), now)
            received = []
        proving.flush()
        for frame in received:
            if isinstance(frame, frames.Running):
                if frame.state == "running":
                    self.found = self._offer
                self._stop(now)
                return
        self._settle(now)

    def closed(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        assert self._proving is not None
        self._proving.closed(conn, reason, now)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if self._proving is not None and self._proving.verdict in (Verdict.DEAD, Verdict.SILENT):
            self._stop(now)

    def _stop(self, now: float) -> None:
        self._again_at = now + AGAIN_SECONDS
        self.abandon()

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        if self._proving is None:
            return None
        racing = self._proving.next_timer()
        return self._until if racing is None else min(racing, self._until)

    def handle_timer(self, now: float) -> None:
        """Lets the race go on, for some time."""
        if self._proving is None:
            return
        self._proving.handle_timer(now)
        if now >= self._until:
            self._stop(now)
        self._settle(now)

    def abandon(self) -> None:
        """Hangs up."""
        if self._proving is not None:
            self._proving.abandon()
            self._proving = None
