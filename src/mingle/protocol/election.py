"""A process that was given no rank: it looks for a host, and becomes one when there is none. A pure machine.

Every process runs the same command. It begins as a :class:`~mingle.protocol.member.Joiner`; one that hears no host in a
random time (the lower its member id, the sooner) opens a session as a :class:`~mingle.protocol.host.Host`. So there may
be several for a moment, and the rules that make them one are:

* Only open sessions compete, and the lower host id wins (:mod:`mingle.protocol.candidacy`).
* Multicast may reach one way only, so whoever hears of the other acts, and over TCP: the winner tells the loser's
  control port (HOST_SEEN, :mod:`mingle.protocol.telling`), members tell their host.
* The loser first joins the winner itself. Only when it has a seat there it sends its members after it (REDIRECT), and
  while it does so it confirms nothing (*yielding*).
* A member that can't reach the winner says so (UNREACHABLE) and stays. Then the loser, unless it has confirmed to the
  winner, leaves it and opens again, and that winner no longer beats it: it *stands*, and says so when it tells.

So a process is never in two sessions that can both seal: its own is held for as long as it has a seat elsewhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from msgspec import Struct, structs

from mingle.errors import MingleError
from mingle.protocol.candidacy import Candidacy
from mingle.protocol.connection_race import ClaimBudget
from mingle.protocol.host import Host
from mingle.protocol.machine import (
    Address,
    Context,
    Effect,
    Endpoints,
    Formation,
    Hangup,
    Identity,
    NetworkFacts,
    Snapshot,
    Source,
)
from mingle.protocol.member import Joiner
from mingle.protocol.registrar import Phase
from mingle.protocol.telling import Notifier
from mingle.wire.datagrams import Datagram, Offer

YIELD_SECONDS = 2.0
"""How long the loser, and each of its members, may take to reach the winner."""
EMPTY_SECONDS = 5.0
"""How long the loser waits for its members to be gone; the silent ones are then hung up on."""


class _Yield(Struct):
    """The winner we make way for."""

    session: bytes
    host: bytes
    until: float
    """By when we must have a seat there."""
    seated: bool = False
    """We have one, and have sent our members after us."""
    empty_by: float = 0.0
    """By when they must be gone."""


class Elector:
    """The machine of a process without a rank. ``outcome`` or ``failure`` ends it."""

    def __init__(
        self,
        identity: Identity,
        endpoints: Endpoints,
        context: Context,
        now: float,
        *,
        new_session: Callable[[], bytes] | None = None,
        make_joiner: Callable[..., Joiner] = Joiner,
        make_host: Callable[..., Host] = Host,
        candidacy: Candidacy | None = None,
    ) -> None:
        self.identity = identity
        self.joiner = make_joiner(identity, context, now)
        self.host: Host | None = None
        self._make_host = make_host
        self.endpoints = endpoints
        self._context = context
        self._new_session = new_session or functools.partial(os.urandom, 16)
        self._deadline = now + context.timeout
        self._failure: MingleError | None = None
        """Why our own session failed, once it is gone."""
        self._effects: list[Effect] = []
        self._candidacy = candidacy if candidacy is not None else Candidacy(identity)
        self._elect_at: float | None = now + self._candidacy.patience()
        self._yield: _Yield | None = None
        self._suspicion = ClaimBudget()
        """Of winners that have no seat for us."""
        self._telling = Notifier(
            identity,
            self._own_offer,
            key=context.key,
            new_id=context.new_id,
            effects=self._effects,
            dials=context.dials,
        )

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def acting(self) -> Host | Joiner:
        """The machine that speaks for this process: the host unless it makes way, else the joiner."""
        return self.joiner if self.host is None or self._yield is not None else self.host

    @property
    def outcome(self) -> Formation | None:
        """The place in the job, once it has formed."""
        return self.joiner.outcome or (self.host.outcome if self.host is not None else None)

    @property
    def failure(self) -> MingleError | None:
        """Why it did not."""
        hosted = self.host.failure if self.host is not None else self._failure
        return hosted or self.joiner.failure

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        done, self._effects[:] = list(self._effects), []
        if self.host is not None:
            done += self.host.effects()
        return done + self.joiner.effects()

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times: list[float | None] = [self._elect_at]
        if self.host is not None:
            times.append(self.host.next_timer())
        if self._joining:
            times.append(self.joiner.next_timer())
        if self._yield is not None:
            # While it follows the winner to another one it has no seat for a moment.
            times.append(self._yield.until if self.joiner.seat is None else self._yield.empty_by)
        times.append(self._telling.next_timer())
        if self.finished:
            return self.acting.next_timer()
        return min((time for time in (*times, self._deadline) if time is not None), default=None)

    @property
    def _joining(self) -> bool:
        """Whether the joiner is at work: there is no own session, or it makes way."""
        return self.host is None or self._yield is not None

    def stage(self) -> str:
        """How far it has come, in a word, for the log."""
        if self._yield is not None:
            return f"making way for another host, {self.joiner.stage()}"
        return self.acting.stage()

    def snapshot(self) -> Snapshot:
        """How it stands, for the progress line."""
        return self.acting.snapshot()

    def ask_status(self) -> None:
        """Asks the host how it stands."""
        self.joiner.ask_status()

    def calling(self) -> Datagram | None:
        """What to tell unicast peers now."""
        return None if self._yield is not None else self.acting.calling()

    def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
        """Our interfaces have changed: a session of ours listens at these addresses."""
        self.endpoints = structs.replace(self.endpoints, addresses=addresses)
        if self.host is not None:
            self.host.readdress(addresses, now)

    def rewired(self, now: float) -> None:
        """Likewise, as one that joins."""
        self.joiner.rewired(now)

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if isinstance(message, Offer) and message.host == self.identity.member:
            return  # our own, of this session or of one that we have given up
        if self.host is None:
            self.joiner.heard(message, source, now)
        elif self._candidacy.competes(message):
            if not self._suspicion.spent or not self._candidacy.loses_to(message, stands=False, now=now):
                self._compete(message, source, stands=False, now=now)
            # Else a winner that is there tells us so on a connection.
        elif self._yield is not None and isinstance(message, Offer):
            self.joiner.heard(message, source, now)
        else:
            self.host.heard(message, source, now)
        self._watch(now)

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong."""
        self.acting.heard_unverified(message)

    # --- competing -------------------------------------------------------------------------------------------------

    def _compete(self, offer: Offer, source: Source, *, stands: bool, now: float) -> None:
        """Another host of our job takes members: who makes way?"""
        host = self.host
        if host is None or host.finished:
            return
        if self._yield is not None:
            if offer.session == self._yield.session:
                self.joiner.heard(offer, source, now)
            return
        if host.registrar.phase is not Phase.OPEN:
            return  # it will be sealed, or open again
        if self._candidacy.loses_to(offer, stands=stands, now=now):
            self._make_way(host, offer, source, now)
        else:
            stands_against = self._candidacy.stands_against(offer.host, now)
            self._telling.tell(offer, source.interface, stands=stands_against, now=now, sender=source.address)

    def _make_way(self, host: Host, offer: Offer, source: Source, now: float) -> None:
        self._yield = _Yield(offer.session, offer.host, now + YIELD_SECONDS)
        host.step_down(now)
        self.joiner.make_for(offer, source.interface, now, sender=source.address)

    def _own_offer(self) -> Offer | None:
        """What to tell a loser: nothing any more once we have lost ourselves."""
        return None if self.host is None or self._yield is not None else self.host.offer()

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Somebody has connected to the control port."""
        if self.host is None:
            self._effects.append(Hangup(conn))
        else:
            self.host.accepted(conn, address, now)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        hosted = self.host is not None and self.host.owns(conn)
        return hosted or self.joiner.owns(conn) or self._telling.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """A connection that was dialled stands."""
        if self._telling.owns(conn):
            self._telling.connected(conn, local_address, interface)
        elif self.host is not None and self.host.owns(conn):
            self.host.connected(conn, local_address, interface, now)
        else:
            self.joiner.connected(conn, local_address, interface, now, weak=weak)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        if self._telling.owns(conn):
            self._telling.received(conn, untrusted, now)
        elif self.host is not None and self.host.owns(conn):
            self.host.received(conn, untrusted, now)
        else:
            self.joiner.received(conn, untrusted, now)
        self._watch(now)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        if self._telling.owns(conn):
            self._telling.disconnected(conn, reason, now)
        elif self.host is not None and self.host.owns(conn):
            self.host.disconnected(conn, reason, now)
        else:
            self.joiner.disconnected(conn, reason, now)
        self._watch(now)

    # --- the store -------------------------------------------------------------------------------------------------

    def store_opened(self, epoch: int, port: int, token: str, now: float) -> None:
        """The store of our own session listens."""
        if self.host is not None:
            self.host.store_opened(epoch, port, token, now)
            self._watch(now)

    def store_failed(self, epoch: int, error: MingleError, now: float) -> None:
        """It could not be opened."""
        if self.host is not None:
            self.host.store_failed(epoch, error, now)
            self._watch(now)

    def store_proved(self, epoch: int) -> None:
        """The store of the session we joined was reached."""
        self.joiner.store_proved(epoch)

    def store_unreachable(self, epoch: int, reason: str, now: float) -> None:
        """It was not."""
        self.joiner.store_unreachable(epoch, reason, now)

    # --- time ------------------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        if self.finished:
            self.acting.handle_timer(now)
            return
        self._telling.handle_timer(now)
        if self.host is not None:
            self.host.handle_timer(now)
        self._watch(now)
        if self._elect_at is not None and now >= self._elect_at:
            self._become_host(now)
        elif self._joining:
            self.joiner.handle_timer(now)
            self._watch(now)

    def _become_host(self, now: float) -> None:
        self._elect_at = None
        self.joiner.pause()
        left = structs.replace(self._context, timeout=max(0.0, self._deadline - now))
        diagnostics = self.joiner.diagnostics
        self.host = self._make_host(
            self.identity, self._new_session(), self.endpoints, left, now, diagnostics=diagnostics
        )
        self.host.timeout = self._context.timeout  # what reports name
        self.host.handle_timer(now)

    def _watch(self, now: float) -> None:
        """Looks, after everything that happened, what follows from it for the election."""
        if self.finished:
            self._telling.abandon()
            if self.joiner.finished:
                self._end_host("it has joined another host")
            return
        if self.host is not None:
            for offer, stands in self.host.take_sightings():
                if self._candidacy.competes(offer):
                    self._compete(offer, Source(interface=""), stands=stands, now=now)
        if self._yield is not None:
            self._go_on_making_way(self._yield, now)
        self._suspicion.note(now, pending=self._yield is not None and not self._yield.seated)
        if self.host is not None or self.joiner.expects_host(now) or self.joiner.blocked:
            self._elect_at = None
        elif self._elect_at is None:
            self._elect_at = now + self._candidacy.patience()

    def _go_on_making_way(self, making: _Yield, now: float) -> None:
        host, seat = self.host, self.joiner.seat
        assert host is not None
        if self.joiner.has_confirmed:
            # That job may form with us in it, and is full: whoever is still here has to look for itself.
            self._end_host("it has a place in another session")
        elif seat is None:
            if now >= making.until or not self.joiner.host_in_sight:
                self._open_again(making, now, stand=not making.seated)
        elif not making.seated or seat != making.session:
            # Also when that host has made way in its turn, and we went with it.
            winner = self.joiner.offer_of(seat)
            assert winner is not None
            making.session, making.host = seat, winner.host
            making.seated, making.empty_by = True, now + EMPTY_SECONDS
            host.redirect_members(winner)
        elif host.redirect_failed:
            self._open_again(making, now, stand=True)
        elif now >= making.empty_by or not host.has_members:
            self._end_host("its members were sent to another host")
        if seat is not None:
            making.until = now + YIELD_SECONDS

    def _open_again(self, making: _Yield, now: float, *, stand: bool) -> None:
        """The winner is gone, or not reached by all: be host again of whoever is still here."""
        assert self.host is not None
        if stand:
            self._candidacy.stand_against(making.host, now)
        self._yield = None
        self.joiner.pause("this host is not reached by everybody" if stand else "it hosts its own session again")
        for offer, targets in self.joiner.sealed():
            # Perhaps the very one that we went to: it may run without us, and then no other shall.
            self.host.conflicts.heard(offer, targets, now)
        self.host.stay_host(now)
        self.host.handle_timer(now)

    def _end_host(self, reason: str) -> None:
        if self.host is None:
            return
        self._failure = self.host.failure
        self.host.close(reason)
        self._effects += self.host.effects()
        self.host, self._yield = None, None

    def expired(self, now: float) -> bool:
        """Tells whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        if self.host is not None and self._yield is None:
            self.host.give_up(facts)
        else:
            self.joiner.give_up(facts)
            self._end_host("it gave up")

    def leave(self, reason: str) -> None:
        """Says good-bye and hangs up everywhere."""
        self._telling.abandon()
        self._end_host(reason)
        self.joiner.leave(reason)
