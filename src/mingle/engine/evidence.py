"""What the sockets of a process have shown of its network: for the report of an error, and for the diagnosis."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mingle.config.settings import DEFAULT_PORT, Network
from mingle.engine.reception import Rejections
from mingle.engine.udp_endpoint import UdpEndpoint
from mingle.network.folders import Folders
from mingle.network.interface_monitor import REMEMBERED_ADDRESSES, InterfaceMonitor
from mingle.network.interfaces import hardware_address
from mingle.network.peers import HERE
from mingle.network.routes import neighbors, reverse_path_drops
from mingle.protocol.explain.observations import NetworkFacts
from mingle.wire.datagrams import BROWSE_GROUP, truncate_utf8

if TYPE_CHECKING:
    from mingle.diagnostics import Detour, Finding
    from mingle.diagnostics.diagnosis import Facts
    from mingle.network.inspection import LookUp

QUICK_SECONDS = 0.2
"""Counters that only a report shows are read after this time: a rank that finds the others sooner reports nothing."""
LOOK_SECONDS = 1.0
"""How often the kernel's table of neighbors is read: an entry changes when two machines have one address."""
REMEMBERED_NEIGHBORS = 4096
REMEMBERED_HARDWARE = 4


class Evidence:
    """What was observed, for reports.

    Args:
        network: how this process discovers.
        interfaces: of this machine.
        udp: its datagrams.
        folders: its shared folders.
        rejections: what was dropped.
        now: the time.
    """

    def __init__(
        self,
        network: Network,
        *,
        interfaces: InterfaceMonitor,
        udp: UdpEndpoint,
        folders: Folders,
        rejections: Rejections,
        now: float,
    ) -> None:
        self._network = network
        self._interfaces = interfaces
        self._udp = udp
        self._folders = folders
        self._rejections = rejections
        self._look_from = now + QUICK_SECONDS
        self._rp_drops: int | None = None
        self._neighbors: dict[str, dict[str, None]] = {}
        self._errors_said: Counter[str] = Counter()
        self._reached: set[str] = set()
        self._detours: dict[str, Detour] = {}
        """How the kernel has led connections astray that were not made, by the addresses dialed."""
        self._look_up: LookUp | None = None

    def look(self, now: float) -> None:
        """Read, when it is not quick any more, what only the kernel knows: what it drops, and who the neighbors are."""
        if now < self._look_from:
            return
        self._look_from = now + LOOK_SECONDS
        if self._rp_drops is None:
            self._rp_drops = reverse_path_drops()
        for address, hardware in neighbors().items():
            if address in self._neighbors or len(self._neighbors) < REMEMBERED_NEIGHBORS:
                known = self._neighbors.setdefault(address, {})
                if hardware and len(known) < REMEMBERED_HARDWARE:
                    known[hardware] = None

    def reached(self, address: str) -> None:
        """Take note that a TCP connection with an address stands."""
        self._detours.pop(address, None)
        self._udp.reached(address)
        if len(self._reached) < REMEMBERED_ADDRESSES:
            self._reached.add(address)

    def led_astray(self, detour: Detour) -> None:
        """Take note of the detour of a connection that was not made; another host can have chosen the address."""
        if len(self._detours) < REMEMBERED_ADDRESSES:
            self._detours[detour.address] = detour

    def _every_detour(self) -> tuple[Detour, ...]:
        heard = {each.address: each for each in self._interfaces.heard_astray(self._reached)}
        return tuple((heard | self._detours).values())

    def inspect(self, environ: Mapping[str, str] | None = None, **observed: Any) -> Facts:
        """Return the facts by which this machine can be judged; see `inspection.collect_facts` for the arguments."""
        from mingle.network import inspection  # only doctor, ping and a rank that waits or has failed need it

        return inspection.collect_facts(self._network.port, environ=environ, **self.observed() | observed)

    def _uses(self, family: Literal["4", "6"]) -> bool:
        usable = self._interfaces.usable
        return self._network.family in ("auto", family) and any(each.of_family(family) for each in usable)

    def _answers(self) -> dict[str, bool]:
        own = {str(address.ip) for each in self._interfaces.found for address in each.addresses}
        return self._udp.peers.answers(own)

    def observed(self) -> dict[str, Any]:
        """Return what the sockets have shown, as arguments of `inspection.collect_facts`."""
        network, transport, answers = self._network, self._udp.transport, self._answers()
        return {
            "group": (self._udp.group or BROWSE_GROUP).ipv4 if self._uses("4") else "",
            "used": self._interfaces.usable,
            "found": self._interfaces.found,
            "lost": self._interfaces.lost(),
            "had_carrier": self._interfaces.had_carrier,
            "left_out": [each.name for each in self._interfaces.left_out],
            "named_by": network.interfaces_from if network.interfaces else "",
            "multicasts_on": frozenset(self._udp.multicasts_on) if transport and transport.sent else None,
            "failures": dict(transport.failures) if transport else {},
            "relay_failure": self._udp.relay.failure,
            "send_errors": dict(transport.send_errors) if transport else {},
            "unicasts_sent": transport.unicasts_sent if transport else 0,
            "peers": self._udp.peers.addresses,
            "unresolved": self._udp.peers.failures,
            "ttl": network.ttl,
            "family": network.family,
            "peers_named": bool(network.peers or network.folders),
            "names_itself": bool(answers) and not network.folders and all(each.endswith(HERE) for each in answers),
            "multicast_heard": self._udp.multicast_heard,
            "folders": {folder: (each.what, each.fix) for folder, each in self._folders.problems.items()},
            "empty_folders": self._folders.empty,
            "other_way": "folder" if self._folders.works else "peers" if self._udp.peers_answer else "",
            "rp_drops_before": self._rp_drops,
            "detours": self._every_detour(),
        }

    def observed_since(self) -> dict[str, Any]:
        """Return the same for the progress line: only the errors since the last call, and nothing that takes long."""
        transport = self._udp.transport
        errors = Counter() if transport is None else transport.send_errors
        recent, self._errors_said = errors - self._errors_said, Counter(errors)
        return self.observed() | {"brief": True, "send_errors": dict(recent)}

    def diagnose(self, observed: Mapping[str, Any]) -> Sequence[Finding]:
        """Return what is wrong with this machine. This takes a moment, and any thread can do it.

        Args:
            observed: what the sockets have shown.
        """
        with contextlib.suppress(OSError, ImportError):  # EMFILE: without a descriptor no module can be loaded
            from mingle.diagnostics import diagnosis
            from mingle.network import inspection

            self._look_up = self._look_up or inspection.LookUp.near(observed["used"])
            facts = inspection.collect_facts(self._network.port, look_up=self._look_up, **observed)
            return diagnosis.troubles(facts)
        return ()

    def facts(self, findings: Sequence[Finding] = ()) -> NetworkFacts:
        """Return what a report says of the network.

        Args:
            findings: of `diagnose`.
        """
        network, transport, group = self._network, self._udp.transport, self._udp.group or BROWSE_GROUP
        groups = [group.ipv4] if self._uses("4") else []
        groups += [group.ipv6(network.ttl)] if self._uses("6") else []
        answers = self._answers()
        failures = [f"{what}: {why}" for what, why in transport.failures.items()] if transport else []
        failures += [f"local relay: {self._udp.relay.failure}"] if self._udp.relay.failure else []
        failures += [f"{host} did not resolve: {why}" for host, why in self._udp.peers.failures.items()]
        failures += [f"{folder} {problem.what}" for folder, problem in self._folders.problems.items()]
        lost = self._interfaces.lost()
        return NetworkFacts(
            interfaces=[
                f"{each} ({lost[each.name]})" if each.name in lost else str(each) for each in self._interfaces.usable
            ],
            groups=groups,
            port=network.port,
            named_port=network.port != DEFAULT_PORT,
            peers=[*answers, *network.folders],
            unanswered=[peer for peer, silent in answers.items() if silent],
            asked_ports=sorted({peer.port or network.port for peer in network.peers} - {DEFAULT_PORT}),
            sent=transport.sent if transport else 0,
            received=transport.received if transport else 0,
            rejected=self._rejections.counts,
            send_errors=transport.send_errors if transport else Counter(),
            failures=failures,
            findings=findings,
            in_folders=self._folders.seekers,
            hostname=truncate_utf8(socket.gethostname()),
            addresses={*self._interfaces.addresses()} - {"127.0.0.1", "::1"},
            neighbors={address: list(known) for address, known in self._neighbors.items()},
            hardware={hardware_address(each.name): each.name for each in self._interfaces.usable if not each.loopback},
        )
