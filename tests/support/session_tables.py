"""A table of sessions whose hosts never answer."""

from __future__ import annotations

import itertools
import random

import msgspec

from mingle.protocol.links.handshake import Call
from mingle.protocol.links.race import DialTarget
from mingle.protocol.machine import Context
from mingle.protocol.sessions import KnownSession, SessionPolicy, SessionTable
from mingle.wire import frames
from mingle.wire.datagrams import Offer, State
from tests.support import scripted_host

TARGETS = [DialTarget("10.0.0.1", "eth0", 4000)]


def offer(number: int = 0, state: State = "open") -> Offer:
    return msgspec.structs.replace(scripted_host.offer(number.to_bytes(16, "big"), state=state), hostname="h0", pid=7)


class Keeping(SessionPolicy[KnownSession]):
    """Keeps one session, whatever comes."""

    kept: KnownSession | None = None

    def keeps(self, session: KnownSession) -> bool:
        return session is self.kept


class Table:
    """A table whose races have nobody at the other end."""

    def __init__(self) -> None:
        self.policy = Keeping()
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.links, self.effects = context.links, context.links.effects
        self.sessions: SessionTable[KnownSession] = SessionTable(self.policy, context)

    def add(self, number: int = 0, state: State = "open", sender: str = "") -> KnownSession | None:
        session = KnownSession(offer(number, state), TARGETS, sender)
        return session if self.sessions.add(session) else None

    def added(self, number: int = 0, state: State = "open") -> KnownSession:
        session = self.add(number, state)
        assert session is not None
        return session

    def race(self, session: KnownSession, purpose: frames.Purpose = "join") -> None:
        call = Call(job="job", member=b"M" * 16, session=session.name, purpose=purpose)
        self.sessions.race(session, call, 0.0)
