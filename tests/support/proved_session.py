"""A session that a process is connected to: its host has proved it, and hears what it is told."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec

from mingle.protocol.effects import Dial, Write
from mingle.protocol.events import BytesReceived, Connected
from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.links.race import DialTarget
from mingle.protocol.machine import Context
from mingle.protocol.sessions import KnownSession, SessionPolicy, SessionTable
from tests.support.scripted_host import ADDRESS, IDENTITY, SESSION, offer


class ProvedSession:
    """The session with its connection, and the effects of whoever uses it.

    Args:
        addresses: those that the host names; the first one proves the session.
        address_here: the own address on that connection.
    """

    def __init__(self, *addresses: str, address_here: str = "10.0.0.2") -> None:
        addresses = addresses or (ADDRESS,)
        self.context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.links, self.effects = self.context.links, self.context.links.effects
        self.table: SessionTable[KnownSession] = SessionTable(SessionPolicy(), self.context)
        targets = [DialTarget(each, "eth0", 4000) for each in addresses]
        self.session = KnownSession(msgspec.structs.replace(offer(), addresses=addresses), targets)
        assert self.table.add(self.session)
        self._address_here = address_here
        self._hosts: dict[int, HostConversation] = {}
        self.connect(0.0)

    def connect(self, now: float) -> None:
        """Call the host, which proves the session."""
        self.session.hang_up()
        self.effects.clear()
        self.table.race(self.session, IDENTITY.call(SESSION, "join"), now)
        (dial,) = self.dials()
        self.prove(dial, now)

    def prove(self, dial: Dial, now: float) -> None:
        """Let the host answer a dialed connection."""
        self._hosts[dial.conn] = HostConversation(
            job="job", attempt="", session=SESSION, addresses=self.session.offer.addresses, port=dial.port
        )
        self.links.handle(Connected(dial.conn, self._address_here, "eth0"), now)
        self.said()
        self.links.handle(BytesReceived(dial.conn, self._hosts[dial.conn].data_to_send()), now)

    def dials(self) -> list[Dial]:
        """Return the connections that are to be made, once."""
        dials = [each for each in self.effects if isinstance(each, Dial)]
        self.effects[:] = [each for each in self.effects if not isinstance(each, Dial)]
        return dials

    def said(self) -> list[Any]:
        """Return what the host has heard since the last time."""
        self.links.flush()
        written = [each for each in self.effects if isinstance(each, Write)]
        self.effects[:] = [each for each in self.effects if not isinstance(each, Write)]
        return [frame for each in written for frame in self._hosts[each.conn].receive_data(each.data)]
