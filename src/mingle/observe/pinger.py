"""The sockets and the clock of :class:`~mingle.observe.ping.PingMachine`: what ``ping`` and ``doctor`` run."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, cast

from mingle.config.settings import Network
from mingle.engine.driver import Driver, Machine
from mingle.network.connections import bare_address
from mingle.network.inspection import Observed
from mingle.network.transport import Received
from mingle.observe.observer import new_name, this_process
from mingle.observe.ping import Cast, PingMachine, Post, Reply
from mingle.protocol.machine import Effect
from mingle.wire import datagrams, echo
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import LOBBY, job_group

if TYPE_CHECKING:
    from typing_extensions import Self

LISTENED_SECONDS = 0.1
"""How often a caller that shows something live is called back."""
REFUSAL_TRIES = 5
REFUSAL_SECONDS = 0.5
"""How long each try waits: Linux sends one host at most one ICMP error a second (icmp(7), icmp_ratelimit)."""


class Pinger:
    """Pings on every interface that a rank would use. Use it in a ``with`` statement.

    Args:
        network: how to discover; its peers are pinged by unicast from the start.
        job: the job to ping about; empty: none.
        interval: seconds between two rounds.
        count: how many rounds; None: no end.
        overheard: a job whose group is listened to as well, to hear who speaks another version there.

    Raises:
        InterfaceError: no interface can be used.
        MingleError: no file descriptor is free.
    """

    def __init__(
        self,
        network: Network,
        job: str = "",
        *,
        interval: float = 1.0,
        count: int | None = None,
        overheard: str = "",
    ) -> None:
        self._key = None if network.secret is None else JobKey(network.secret, job)
        self.versions: dict[str, str] = {}
        """Other major versions of mingle that were heard, each with the address of a speaker."""
        self._cast_group = echo.ping_group(job)
        groups = [self._cast_group, echo.LINK_GROUP, LOBBY]
        if overheard:
            groups.append(job_group(overheard))
        with contextlib.ExitStack() as stack:
            self.driver = driver = Driver(network, job or None, self._key, stack, groups=groups, perform=self._perform)
            driver.on_datagram, driver.ask_peers = self._heard, self._learn_peers
            # On link-local addresses, too: a PING may come from one, and its source is what is dialed.
            own = [
                (str(address.ip), each.index)
                for each in driver.interfaces.usable
                for address in each.of_family(network.family)
            ]
            driver.connections.listen(own)
            self.own = frozenset(address for address, _ in own)
            self.pings = PingMachine(
                job,
                pinger=new_name(),
                who=this_process(),
                port=driver.connections.port,
                shared_port=network.port,
                interval=interval,
                count=count,
                new_id=driver.new_id,
                now=time.monotonic(),
                key=self._key,
                own=self.own,
            )
            driver.drive(cast("Machine", self.pings))  # its messages and effects are not those of a rank
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, *, until: float | None = None, each: Callable[[], None] = lambda: None) -> None:
        """Ping until all rounds are over or the deadline has passed; always send GONE.

        Args:
            until: a time of ``time.monotonic()``; None: no limit.
            each: called about ten times a second.

        Raises:
            MingleError: an unforeseen exception ended the loop; its ``__cause__`` is that exception.
        """
        driver, call_due = self.driver, time.monotonic()
        try:
            with driver.failures_explained():
                driver.carry_out()
            while not self.pings.done and (until is None or time.monotonic() < until):
                with driver.failures_explained():
                    driver.turn(call_due if until is None else min(until, call_due))
                if time.monotonic() >= call_due:
                    call_due = time.monotonic() + LISTENED_SECONDS
                    each()
        finally:
            driver.part(self.pings.close)

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The names of those that are used."""
        return tuple(each.name for each in self.driver.interfaces.usable)

    def observed(self) -> Observed:
        """Return what the checks of this machine need to know of the sockets."""
        return self.driver.observed(self.versions)

    def _learn_peers(self, _now: float) -> None:
        self.pings.learn([each for each in self.driver.peers.take() if each[0] not in self.own])

    def _heard(self, received: Received, now: float) -> None:
        try:
            message = echo.decode(received.data)
        except datagrams.Rejected as rejected:
            self._note_rejected(received, rejected)
            return
        host = bare_address(received.source[0])
        address = f"{host}%{received.interface}" if host.startswith("fe80:") else host
        self.pings.heard(
            message,
            address,
            received.interface,
            now,
            trusted=echo.is_trusted(received.data, self._key),
            size=len(received.data),
            handle=received,
        )

    def _note_rejected(self, received: Received, rejected: datagrams.Rejected) -> None:
        """Count a datagram that is no echo. A rank's datagram is expected, and only its version matters here."""
        reason = rejected.reason
        if reason == "magic" and received.data[:4] == datagrams.MAGIC:
            if received.data[4:5] == bytes((datagrams.MAJOR_VERSION,)):
                return
            reason = f"version {received.data[4]}"
        self.driver.rejected[reason] += 1
        if reason.startswith("version "):
            self.versions.setdefault(reason, bare_address(received.source[0]))

    def _perform(self, effect: Effect | Cast | Post | Reply) -> None:
        try:
            self._send(effect)
        except Exception as error:  # another host chose the address
            self.driver.note_fault(error, "a ping or its answer")

    def _send(self, effect: Effect | Cast | Post | Reply) -> None:
        transport = self.driver.transport
        if transport is None:
            return
        match effect:
            case Cast(message, link):
                data = echo.encode(message, self._key)
                for interface in transport.interfaces:
                    transport.multicast(interface.name, data, echo.LINK_GROUP if link else self._cast_group)
            case Post(address, port, message):
                transport.unicast(echo.encode(message, self._key), (address, port))
            case Reply(handle, message) if isinstance(handle, Received):
                transport.reply(handle, echo.encode(message, self._key))


def refuses(address: str, port: int) -> bool:
    """Return whether a host reports by ICMP, on a connected socket, that no program has this UDP port open."""
    good_bye = echo.encode(echo.EchoEnd(pinger=new_name()))
    try:
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.settimeout(REFUSAL_SECONDS)
            probe.connect(where)
            for _ in range(REFUSAL_TRIES):
                probe.send(good_bye)
                with contextlib.suppress(TimeoutError):
                    probe.recv(1)
    except ConnectionRefusedError:
        return True
    except OSError:  # no way there: the pings say so
        return False
    return False
