"""Unicast peers: hosts that are asked directly, for networks that carry no multicast.

Names are resolved again and again while waiting, in threads of their own (``getaddrinfo`` blocks and knows no
deadline): a headless Service or a compose name gains addresses as machines come up, and a first failed look-up is
never final. Each address has a timer of its own, and only a few are asked per round.
"""

from __future__ import annotations

import math
import random
import socket
import threading
from collections.abc import Collection, Sequence

from msgspec import Struct

from mingle import detached, forksafe
from mingle.config.values import Peer, parse_address
from mingle.errors import lacks_descriptor
from mingle.network.connections import canonical_address, literal
from mingle.network.transport import socket_address

FIRST_INTERVAL_SECONDS = 0.1
GROWTH = 1.6
MAX_INTERVAL_SECONDS = 2.0
PER_ROUND = 8
"""How many addresses are asked at once; the others have their turn in the next round."""
ROUND_SECONDS = 0.02
RESOLVE_SECONDS = 1.0
"""How often a name is resolved at first; each time costs a question for each search domain and IP version."""
RESOLVE_SHARE = 0.1
"""Later a name is resolved only after this fraction of the time that has passed, …"""
SLOW_RESOLVE_SECONDS = 5.0
"""… and at least so often: name servers of clusters keep their answers for as long (CoreDNS)."""
SILENT_RESOLVE_SECONDS = 30.0
"""The same while the process asks no peer, because it has a host: an agent of an elastic job has one for days."""
RESOLVED_SECONDS = 0.1
"""How often newly resolved addresses are looked for."""
MAX_THREADS = 8
SHOWN = 4
"""How many addresses of a name are shown."""
HERE = ": this machine"
"""What is said of a name that has no other address than this machine's."""
# A name that resolves to more than this is no list of hosts; bounded against a hostile or broken resolver. Addresses
# are kept while the process looks for others, because a resolver can return another subset each time; all together
# cost at most PER_ROUND datagrams a round.
MAX_ADDRESSES = 4096


class _Target(Struct):
    due: float
    interval: float = FIRST_INTERVAL_SECONDS


class Peers:
    """The peers of one process: the addresses of their names, and when to ask each.

    Daemon threads look the names up until :meth:`stop`. A look-up that hangs (5 s and more for each server that does
    not answer: resolv.conf(5)) keeps only its own thread, which holds nothing and can be abandoned.
    """

    def __init__(self, peers: Sequence[Peer], default_port: int, family: str, rng: random.Random) -> None:
        self._family = {"4": socket.AF_INET, "6": socket.AF_INET6}.get(family, socket.AF_UNSPEC)
        self._rng = rng
        self._targets: dict[tuple[str, int], _Target] = {}
        self._hosts: set[str] = set()
        """The addresses of the targets, in canonical form and without ports."""
        self._not_before = float("-inf")
        self._silent = True
        self._rarely = False
        """Whether the names are resolved only every `SILENT_RESOLVE_SECONDS`."""
        self._stop = threading.Event()
        # The threads add to these two.
        self._lock = forksafe.register_lock(threading.Lock())
        self._failures: dict[str, str] = {}
        self._resolved: dict[str, list[str]] = {}
        """The addresses of each name, as of the last try that found any."""
        self._heard: set[str] = set()
        """The addresses of peers from which datagrams came, in canonical form."""
        self._names = {str(peer): peer.host for peer in peers}
        named = [(peer.host, peer.port or default_port) for peer in peers]
        self._found = [(host, port) for host, port in named if parse_address(host)]
        self.any = bool(named)
        """Whether there are peers."""
        names = [(host, port) for host, port in named if not parse_address(host)]
        try:
            for first in range(min(len(names), MAX_THREADS)):
                work = names[first::MAX_THREADS]
                detached.start_explained(detached.thread("resolver", self._run, work))
        except BaseException:
            self.stop()
            raise

    @property
    def failures(self) -> dict[str, str]:
        """Names that did not resolve, and why, as of the last try."""
        with self._lock:
            return dict(self._failures)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the peers that were found, in canonical form."""
        return sorted(self._hosts)

    def take(self) -> list[tuple[str, int]]:
        """Return the addresses found since the last call, for a caller with a schedule of its own."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def knows(self, address: str) -> bool:
        """Return whether an address is a peer's."""
        return address in self._hosts

    def some(self) -> list[tuple[str, int]]:
        """Return the first addresses, at most as many as are asked at once."""
        self._take_found(float("-inf"))
        return list(self._targets)[:PER_ROUND]

    def heard(self, address: str) -> None:
        """Take note of a datagram; one that is no peer's is of no interest here."""
        if address in self._hosts:
            self._heard.add(address)

    def answers(self, own: Collection[str]) -> dict[str, bool]:
        """Return the peers as people know them, each with whether it is silent; without those of this machine alone.

        Args:
            own: the addresses of this machine.
        """
        with self._lock:
            resolved = dict(self._resolved)
        found = {}
        for name, host in self._names.items():
            addresses = [host] if parse_address(host) else resolved.get(host, [])
            others = [each for each in addresses if each not in own]
            answering = [each for each in others if canonical_address(each) in self._heard]
            shown = f"{', '.join(others[:SHOWN])}{', …' if len(others) > SHOWN else ''}"
            label = name if others == [host] else f"{name} = {shown}"
            if not others:
                found[f"{name}{HERE if addresses else ': no address'}"] = False
            elif len(others) == 1:
                found[f"{label}: {'answers' if answering else 'no answer'}"] = not answering
            else:
                found[f"{label}: {len(answering)} of {len(others)} answer"] = not answering
        return found

    def turn(self, *, silent: bool, now: float) -> list[tuple[str, int]]:
        """Return the addresses to ask now, the longest overdue first; none if ``silent``.

        After a silence they are asked quickly again.
        """
        self._rarely = silent
        self._take_found(now)
        if silent != self._silent:
            self._silent = silent
            self.restart(now)
        if silent or now < self._not_before:
            return []
        due = sorted((target.due, address) for address, target in self._targets.items() if target.due <= now)
        chosen = [address for _, address in due[:PER_ROUND]]
        for address in chosen:
            target = self._targets[address]
            target.due = now + target.interval * self._rng.uniform(0.75, 1.25)
            target.interval = min(target.interval * GROWTH, MAX_INTERVAL_SECONDS)
        if chosen:
            self._not_before = now + ROUND_SECONDS
        return chosen

    def _take_found(self, now: float) -> None:
        for address in self.take():
            # Each one stays: a resolver can leave some out each time.
            if address not in self._targets and len(self._targets) < MAX_ADDRESSES:
                self._targets[address] = _Target(now)
                self._hosts.add(canonical_address(address[0]))

    def restart(self, now: float) -> None:
        """Ask every address quickly again, for example because other interfaces can reach it now."""
        for target in self._targets.values():
            target.due, target.interval = now, FIRST_INTERVAL_SECONDS

    def next_timer(self, now: float) -> float | None:
        """Return when an address is due, or when to take new addresses; None without peers."""
        if not self.any:
            return None
        look = now + RESOLVED_SECONDS
        due = min((target.due for target in self._targets.values()), default=look)
        return look if self._silent else min(look, max(due, self._not_before))

    def stop(self) -> None:
        """End each thread after its present look-up."""
        self._stop.set()

    def _run(self, names: Sequence[tuple[str, int]]) -> None:
        age, waited = math.inf, 0.0
        while not self._stop.is_set():
            waited = 0.0 if self._rarely else waited + RESOLVE_SECONDS
            pause = SILENT_RESOLVE_SECONDS if self._rarely else min(waited * RESOLVE_SHARE, SLOW_RESOLVE_SECONDS)
            if age >= pause:
                age = 0.0
                for host, port in names:
                    self._look_up(host, port)
            self._stop.wait(RESOLVE_SECONDS)
            age += RESOLVE_SECONDS

    def _look_up(self, host: str, port: int) -> None:
        try:
            answers = socket.getaddrinfo(host, port, self._family, socket.SOCK_DGRAM)
        except (OSError, ValueError) as error:  # ValueError: IDNA can't encode it, such as "a..b", or a zero byte
            with self._lock:
                self._failures[host] = getattr(error, "strerror", None) or str(error)
            return
        addresses = with_a_route([literal(answer[4]) for answer in answers])
        with self._lock:
            self._failures.pop(host, None)
            self._resolved[host] = list(dict.fromkeys(addresses))
            self._found += [(address, port) for address in addresses]


def with_a_route(addresses: list[str]) -> list[str]:
    """Return the addresses of a name without those to which no route leads; all of them if that would be all.

    A name often has addresses of both IP versions, while this host has a route for one of them only.
    """
    if len({":" in address for address in addresses}) < 2:
        return addresses
    return [address for address in addresses if has_route(address)] or addresses


def has_route(address: str) -> bool:
    """Return whether a route leads to an address. Connecting a UDP socket looks the route up and sends nothing."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(socket_address(address, 9))
    except OSError as error:
        return lacks_descriptor(error)  # then it is not known
    return True
