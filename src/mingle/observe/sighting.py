"""What is seen of a job from outside: a session with its host, and ranks that look for one."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec import field

from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import Offer, Seek

# A frame names no more ranks than this (frames.Ranks): a longer list is cut.
_RANKS_NAMED = 4096
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")

EndpointKind: TypeAlias = Literal["store", "control", "announced"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a job is to be reached."""

    address: str
    """An address, with its zone if it is link-local; for an announcement possibly a host name."""
    port: int
    kind: EndpointKind
    """Rank 0's store; while the job gathers, rank 0's control port; or what was announced by hand."""

    def __str__(self) -> str:
        return endpoint_text(self.address, self.port)


@dataclass(frozen=True, slots=True)
class Seeking:
    """A rank that looks for its host."""

    seek: Seek
    address: str
    signed: bool
    heard_at: float = 0.0

    def __str__(self) -> str:
        rank = "a process without a rank" if self.seek.rank is None else f"rank {self.seek.rank}"
        return f"{rank} on host {self.seek.hostname or 'unknown'} ({self.address}), pid {self.seek.pid}"


class Sighting(KnownSession, eq=False, kw_only=True):
    """A session that was heard of, and what came of looking into it. ``running`` is what its host says while proved."""

    signed: bool
    probed: Offer
    """The OFFER that the last try followed."""
    verified: bool = False
    """Whether the last OFFER is signed with our secret."""
    path: frames.Path | None = None
    """The path on which it was proved."""
    failures: dict[str, str] = field(default_factory=dict)
    """For each address why it did not prove the session; of the last try."""
    heard_at: float = 0.0
    """The time of its last OFFER."""
    was_alive: bool = False
    """Whether its host has ever proved itself and answered."""
    tried: bool = False
    """Whether a first try has come to its end."""
    answer_by: float | None = None
    """By when a host that has proved its session must say how it stands."""

    @property
    def alive(self) -> bool:
        """Whether its host has proved itself and answered."""
        return self.running is not None

    @property
    def problem(self) -> str:
        """Why it is not proved, for people; empty when it is."""
        if self.running is not None:
            return ""
        failures = [f"{address}: {why}" for address, why in self.failures.items()]
        return "; ".join(failures) or "it has not answered yet"

    @property
    def joined(self) -> int:
        """How many ranks have a seat: by the proved list of them where it is whole, else as heard."""
        whole = self.running is not None and not self.probed.assigned and self.probed.kind == "ranks"
        if self.running is None or not whole or len(self.running.joined) >= _RANKS_NAMED:
            return self.offer.joined
        return len(self.running.joined)

    def host(self) -> frames.ProcessInfo:
        """Who hosts it: as proved, else as heard."""
        if self.running is not None:
            return self.running.host
        offer = self.offer
        return frames.ProcessInfo(hostname=offer.hostname, pid=offer.pid, address=offer.addresses[0])

    def target(self) -> Target:
        """Where it is to be reached: the store if there is one, else the control port that was proved.

        Must be :attr:`alive`.
        """
        assert self.running is not None
        assert self.path is not None
        control = self.control()
        if self.running.store_port == 0:
            return control
        address = self._reachable(self.running.store_address) or control.address
        kind: EndpointKind = "announced" if self.probed.kind == "announcement" else "store"
        return Target(address, self.running.store_port, kind)

    def control(self) -> Target:
        """The endpoint at which its control port was proved. Requires :attr:`alive`."""
        assert self.path is not None
        return Target(self._reachable(self.path.host_address), self.probed.port, "control")

    def _reachable(self, address: str) -> str:
        """Returns one of the host's addresses; a link-local one with its zone, which is ours to add."""
        assert self.path is not None
        link_local = address.lower().startswith("fe80:")
        return f"{address}%{self.path.interface}" if link_local else address


def is_host(text: str) -> bool:
    """Tells whether a text is empty, an address, or a host name (RFC 1123, and the underscore Docker allows).

    What comes from the network ends on a terminal or in a shell: nothing else may get there.
    """
    if not text:
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return "%" not in text


def endpoint_text(address: str, port: int) -> str:
    """Returns ``address:port``, an IPv6 address in brackets (RFC 3986, section 3.2.2)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def ranks_seeking(seekers: Sequence[Seeking], sightings: Sequence[Sighting]) -> list[Seeking]:
    """Returns the seekers of a job but for those whose rank its host has seated meanwhile."""
    seated = {rank for each in sightings if each.running is not None for rank in each.running.joined}
    return [each for each in seekers if each.seek.rank is None or each.seek.rank not in seated]
