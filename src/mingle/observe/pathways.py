"""Verdicts on the figures of a ping, in words: pure functions of :class:`~mingle.observe.pinging.Pinging`.

``ping`` and ``doctor --check`` share these verdicts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mingle.diagnostics import CheckStatus, Finding
from mingle.diagnostics.diagnosis import ANY_TCP_PORT, Facts
from mingle.diagnostics.firewall import Packet, allow_tcp, allow_udp, blocked
from mingle.observe.figures import Peer, Row
from mingle.observe.pinging import Pinging

ENOUGH = 2
"""So many PINGs must have been sent before their total loss says anything."""
LOSS_WARNED = 0.05
_WORDS = {"multicast": "multicast", "unicast": "unicast", "tcp": "TCP"}


def judge(pinging: Pinging, facts: Facts, *, closed: Collection[str] = ()) -> list[Finding]:
    """Return the verdicts on each peer, on those that did not answer, and on other jobs' pings.

    Args:
        pinging: the figures.
        facts: the facts about this machine.
        closed: addresses that did not answer and where no program has the UDP port open.
    """
    judged = _Judge(facts)
    findings = [finding for peer in pinging.peers.values() for finding in judged.peer(peer)]
    findings += [
        Finding(
            "secret",
            CheckStatus.FAIL,
            f"{who} pings with another secret than ours, or one side has none",
            "give both the same MINGLE_SECRET or MINGLE_SECRET_FILE, or none of them any",
        )
        for who in pinging.strangers.values()
    ]
    known = {address.partition("%")[0] for address in pinging.strangers}
    for (address, asked_port), answered in pinging.asked.items():
        if not answered and address not in known:
            findings.append(judged.silent(address, asked_port, closed=address in closed))
    for job, address in pinging.other_jobs.items():
        findings.append(
            Finding(
                "job",
                CheckStatus.WARN,
                f"{address} pings about {repr(job) if job else 'no job in particular'}, and not with us",
                "give `mingle-discover ping` the same JOB on every host",
            )
        )
    # Two processes of one host have one fault in common.
    return list(dict.fromkeys(findings))


class _Judge:
    def __init__(self, facts: Facts) -> None:
        self.me = facts.hostname
        self.port = facts.port
        self.used = facts.used_names
        self.networks = facts.networks
        self.multicast_comes = bool(facts.multicasts_on)
        self.manager = facts.manager
        interface = self.used[0] if self.used else ""
        udp = Packet("udp", facts.port, facts.group, interface)
        self.udp_block = blocked(facts.chains, udp) if facts.group else None
        self.tcp_block = blocked(facts.chains, Packet("tcp", ANY_TCP_PORT, "", interface))

    def peer(self, peer: Peer) -> list[Finding]:
        """Returns what is wrong with the ways to and from a peer; one PASS if nothing is."""
        found = list(self._faults(peer))
        if found:
            return found
        judged = [row for row in peer.rows.values() if row.sent]
        if not judged:
            return []
        ways = [_WORDS[way] for way, row in peer.rows.items() if row.sent and way in _WORDS]
        best = min((row.shortest for row in judged if row.received), default=0.0)
        return [
            Finding(
                str(peer),
                CheckStatus.PASS,
                f"{peer}: {', '.join(ways)} pass, round trips from {best * 1000:.2f} ms",
            )
        ]

    def _faults(self, peer: Peer) -> Iterator[Finding]:
        multicast, link, unicast, tcp = (peer.rows[way] for way in ("multicast", "link", "unicast", "tcp"))
        if peer.interface and peer.interface not in self.used:
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"{peer} is reached by {peer.interface}, and {', '.join(self.used)} is all that is used here: "
                "the hosts do not share the network that was chosen",
                f"MINGLE_INTERFACE={peer.interface}, or unset it to use every suitable interface",
            )
            return  # whatever else does not pass follows from it
        if all(_lost(row) for row in (multicast, link, tcp)) and not unicast.received:
            yield self._deaf(peer)
            return
        yield from self._multicast(peer, multicast, link, unicast)
        yield from self._unicast(peer, multicast, unicast)
        yield from self._tcp(peer, tcp)
        for way, row in peer.rows.items():
            if row.received and row.loss > LOSS_WARNED:
                yield Finding(
                    str(peer),
                    CheckStatus.WARN,
                    f"{peer}: {row.loss:.0%} of the {way} pings are lost ({row.sent - row.received} of {row.sent})",
                    "look for a full queue, a weak radio link, or a rate limit between the two",
                )

    def _deaf(self, peer: Peer) -> Finding:
        return Finding(
            str(peer),
            CheckStatus.FAIL,
            f"{peer} is heard and hears nothing of us, neither by multicast nor by unicast nor by TCP",
            f"on {peer.hostname or peer.address} run `mingle-discover doctor`: its firewall drops what comes from "
            f"{self.me}, or it has no route back",
        )

    def _multicast(self, peer: Peer, multicast: Row, link: Row, unicast: Row) -> Iterator[Finding]:
        fine = ", unicast fine" if unicast.received else ""
        if _lost(multicast) and link.received:
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"multicast to {peer} is lost on 239.x and passes on 224.0.0.x{fine}: a switch or bridge between "
                "filters multicast (IGMP snooping that does not learn the members, or unknown multicast not flooded)",
                "enable an IGMP querier on the switch or switch snooping off (Linux bridge: ip link set dev BRIDGE "
                f"type bridge mcast_snooping 0); or {self._peers(peer)}",
            )
        elif _lost(multicast) and unicast.received:
            where = (
                f"the firewall of {peer.hostname or peer.address} drops it"
                if multicast.arrived
                else "the network between carries none, or a firewall drops it"
            )
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"multicast to {peer} is lost, unicast fine: {where}",
                f"on {peer.hostname or peer.address}: {allow_udp(self.port, manager=self.manager)}; "
                f"or {self._peers(peer)}",
            )
        elif _lost(multicast):
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"multicast and unicast UDP to {peer} are lost: the firewall of {peer.hostname or peer.address} "
                f"drops UDP port {self.port}",
                f"on {peer.hostname or peer.address}: {allow_udp(self.port, manager=self.manager)}",
            )
        elif multicast.received and _tries(peer) and not multicast.arrived and not link.arrived:
            why = "" if self.multicast_comes else ", and our own does not come back"
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"multicast from {peer} does not arrive here, though ours arrives there{why}: "
                "this host's firewall drops it",
                allow_udp(self.port, manager=self.manager, block=self.udp_block),
            )

    def _unicast(self, peer: Peer, multicast: Row, unicast: Row) -> Iterator[Finding]:
        if _lost(unicast) and multicast.received:
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"unicast to UDP port {self.port} of {peer} is lost, multicast fine: another program there holds the "
                "port as well and swallows it, or a firewall drops it",
                f"on {peer.hostname or peer.address} run `mingle-discover doctor`, which names the program; "
                "or set MINGLE_PORT to another port on every host",
            )

    def _tcp(self, peer: Peer, tcp: Row) -> Iterator[Finding]:
        if _lost(tcp):
            why = f" ({tcp.reason})" if tcp.reason else ""
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"TCP from {self.me} to {peer} is filtered{why}, though UDP passes",
                f"on {peer.hostname or peer.address}: {allow_tcp(self.networks, manager=self.manager)}",
            )
        elif tcp.received and _tries(peer) and not tcp.arrived:
            yield Finding(
                str(peer),
                CheckStatus.FAIL,
                f"TCP from {peer} to {self.me} does not arrive, the other way round it does",
                allow_tcp(self.networks, manager=self.manager, block=self.tcp_block),
            )

    def silent(self, address: str, port: int, *, closed: bool) -> Finding:
        """Returns what is to be said of a host that was given and did not answer."""
        if closed:
            return Finding(
                address,
                CheckStatus.FAIL,
                f"nobody serves on {address}: the host is reached, and no program there has UDP port {port} open "
                "(or its firewall rejects it)",
                f"start `mingle-discover doctor --serve` on {address}, and keep it running while this runs",
            )
        return Finding(
            address,
            CheckStatus.FAIL,
            f"{address} did not answer on UDP port {port}: no `mingle-discover ping` (or `doctor --serve`) runs there, "
            "or a firewall or a missing route keeps them apart",
            f"start it on {address} while this runs; there: {allow_udp(port, manager=self.manager)}",
        )

    @staticmethod
    def _peers(peer: Peer) -> str:
        return (
            f"use unicast: MINGLE_PEERS={peer.address} on every host (compose: the service's name; Kubernetes: the "
            "headless Service's)"
        )


def _tries(peer: Peer) -> bool:
    """Whether the other one is known to ping us: only then is it telling that something of its does not arrive."""
    return max(peer.rows["unicast"].arrived, peer.rows["tcp"].arrived) >= ENOUGH


def _lost(row: Row) -> bool:
    return row.sent >= ENOUGH and row.received == 0
