"""Ping other hosts on this machine's sockets: :class:`Pinger` drives a `PingMachine`."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from mingle.config.settings import Network
from mingle.network.connections import bare_address
from mingle.network.transport import Received
from mingle.observe.observer import Observer, new_name, this_process
from mingle.observe.ping import Cast, EchoHeard, PingMachine, Post, Reply
from mingle.protocol import effects
from mingle.protocol.machine import Machine, scoped
from mingle.wire import datagrams, echo
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import BROWSE_GROUP, Rejected, job_group

if TYPE_CHECKING:
    from typing_extensions import Self

    from mingle.diagnostics.diagnosis import Facts

CALL_SECONDS = 0.1
"""The interval of calls to a caller that shows something live."""
REFUSAL_TRIES = 5
REFUSAL_SECONDS = 0.5
"""The wait for each try: Linux sends one host at most one ICMP error a second (icmp(7), icmp_ratelimit)."""


class Pinger:
    """An observer that pings, on every interface that a rank would use. Use it in a ``with`` statement.

    Args:
        network: the network settings; its peers are pinged by unicast from the start.
        job: the job to ping about; empty: none.
        interval: seconds between two rounds.
        count: the number of rounds; None: no limit.
        overheard: a job whose group to join as well, to hear other versions of the protocol there.

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
        """The other major versions of the protocol that were heard, each with the address of a sender."""
        self._cast_group = echo.ping_group(job)
        groups = [self._cast_group, echo.LINK_GROUP, BROWSE_GROUP]
        if overheard:
            groups.append(job_group(overheard))
        self._observer = Observer(
            network, job or None, self._key, groups=groups, perform=self._perform, scanned=self._scanned
        )
        self.driver = driver = self._observer.driver
        driver.udp.on_datagram, driver.udp.ask_peers = self._heard, self._learn_peers
        try:
            driver.connections.listen(self._addresses())
        except BaseException:
            self._observer.close()
            raise
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
            own=[address for address, _ in self._addresses()],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._observer.close()

    def run(self, *, until: float | None = None, each: Callable[[], None] = lambda: None) -> None:
        """Ping until all rounds are over or the deadline has passed; always send GONE.

        Args:
            until: a time of ``time.monotonic()``; None: no deadline.
            each: called about ten times a second.

        Raises:
            MingleError: an unforeseen exception ended the loop; its ``__cause__`` is that exception.
        """
        call_due = 0.0

        def done() -> bool:
            nonlocal call_due
            if time.monotonic() >= call_due:
                call_due = time.monotonic() + CALL_SECONDS
                each()
            return self.pings.done

        # Its messages and effects are not those of a rank.
        self._observer.run(cast("Machine", self.pings), until=until, done=done, every=CALL_SECONDS)

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The names of the interfaces in use."""
        return tuple(each.name for each in self.driver.interfaces.usable)

    def inspect(self, environ: Mapping[str, str] | None = None, **observed: Any) -> Facts:
        """Return the facts about this machine; see `mingle.engine.evidence.Evidence.inspect`."""
        return self.driver.evidence.inspect(environ, versions=self.versions, **observed)

    def _addresses(self) -> list[tuple[str, int]]:
        """Return where to listen; on link-local addresses as well: a PING can come from one, and it is dialed then."""
        interfaces, family = self.driver.interfaces.usable, self.driver.network.family
        return [(str(address.ip), each.index) for each in interfaces for address in each.of_family(family)]

    def _scanned(self, _now: float, _changed: bool) -> None:
        """Listen on addresses that this host has got since: others dial the source of a PING."""
        own = self._addresses()
        self.driver.connections.listen_also(own)
        self.pings.own = frozenset(address for address, _ in own)

    def _learn_peers(self, _now: float) -> None:
        found = [each for each in self.driver.udp.peers.take() if each[0] not in self.pings.own]
        self.pings.learn([(_with_named_zone(address), port) for address, port in found])

    def _heard(self, received: Received, now: float) -> None:
        try:
            message = echo.decode(received.data)
        except Rejected as rejected:
            self._note_rejected(received, rejected)
            return
        host = bare_address(received.source[0])
        address = scoped(host, received.interface)
        event = EchoHeard(
            message=message,
            address=address,
            interface=received.interface,
            trusted=echo.is_trusted(received.data, self._key),
            size=len(received.data),
            handle=received,
        )
        self.pings.handle(event, now)

    def _note_rejected(self, received: Received, rejected: Rejected) -> None:
        """Count a datagram that is no echo. A rank's datagram is expected, and only its version matters here."""
        reason = rejected.reason
        if reason == "magic" and received.data[:4] == datagrams.MAGIC:
            if received.data[4:5] == bytes((datagrams.MAJOR_VERSION,)):
                return
            reason = f"version {received.data[4]}"
        self.driver.rejections.counts[reason] += 1
        if reason.startswith("version "):
            self.versions.setdefault(reason, bare_address(received.source[0]))

    def _perform(self, effect: effects.Effect | Cast | Post | Reply) -> None:
        try:
            self._send(effect)
        except Exception as error:  # another host chose the address
            self.driver.rejections.fault(error, "a ping or its answer")

    def _send(self, effect: effects.Effect | Cast | Post | Reply) -> None:
        transport = self.driver.udp.transport
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


def _with_named_zone(address: str) -> str:
    """Return an address with the name of its interface as its zone, as the source of an answer has it."""
    bare, _, zone = address.partition("%")
    if not zone.isdigit():
        return address
    try:
        return f"{bare}%{socket.if_indextoname(int(zone))}"
    except OSError:  # there is no such interface
        return address


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
