"""Judge the paths between hosts by the figures of their pings: pure functions, for ``ping`` and ``doctor --check``."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mingle.diagnostics import CheckStatus, Finding
from mingle.diagnostics.diagnosis import FAIL, PASS, WARN, Facts, open_firewall
from mingle.diagnostics.firewall import LOOK_AS_ROOT
from mingle.observe.ping import Figures, PingMachine, PingPeer

ENOUGH = 2
"""The number of PINGs that must have been sent before their total loss is a verdict."""
LOSS_WARNED = 0.05
_NAMES = {"multicast": "multicast", "unicast": "unicast", "tcp": "TCP"}


def judge(
    pings: PingMachine, facts: Facts, *, closed: Collection[str] = (), named: Collection[str] = ()
) -> list[Finding]:
    """Return the verdicts on each peer, on the hosts that did not answer, and on pings about other jobs.

    Args:
        pings: the figures.
        facts: the facts about this machine.
        closed: addresses that did not answer and where no program has the UDP port open.
        named: the addresses that `MINGLE_PEERS` gives: jobs need no multicast to these hosts.
    """
    findings = [finding for peer in pings.peers.values() for finding in _of_peer(peer, facts, named)]
    findings += [
        Finding(
            "secret",
            FAIL,
            f"{stranger} pings with another secret than ours, or only one side has a secret",
            "give both the same MINGLE_SECRET or MINGLE_SECRET_FILE, or neither of them",
        )
        for stranger in pings.strangers.values()
    ]
    known = {address.partition("%")[0] for address in pings.strangers}
    for (address, port), answered in pings.asked.items():
        if not answered and address.partition("%")[0] not in known:
            findings.append(_silent(address, port, closed=address in closed))
    findings += [
        Finding(
            "job",
            WARN,
            f"{address} pings about {repr(job) if job else 'no job in particular'}, and not with us",
            "give `mingle-discover ping` the same JOB on every host",
        )
        for job, address in pings.other_jobs.items()
    ]
    # Two processes of one host have the same fault.
    return list(dict.fromkeys(findings))


def _of_peer(peer: PingPeer, facts: Facts, named: Collection[str]) -> list[Finding]:
    """Return the faults of the paths to and from a peer, else one PASS; nothing before the first figures."""
    faults = [Finding(str(peer), *fault) for fault in _faults(peer, facts, named)]
    if faults:
        return faults
    pinged = {way: figures for way, figures in peer.figures.items() if figures.sent}
    if not pinged:
        return []
    names = ", ".join(_NAMES[way] for way in pinged if way in _NAMES)
    best = min((figures.shortest for figures in pinged.values() if figures.received), default=0.0)
    text = f"{peer}: {names} pass, round trips from {best * 1000:.2f} ms"
    return [Finding(str(peer), PASS, text)]


def _faults(peer: PingPeer, facts: Facts, named: Collection[str]) -> Iterator[tuple[CheckStatus, str, str]]:
    """Yield the status, the observation and the fix of each fault."""
    multicast, link, unicast, tcp = (peer.figures[way] for way in ("multicast", "link", "unicast", "tcp"))
    used = facts.used_names
    host = peer.hostname or peer.address
    if peer.interface and peer.interface not in used:
        # Every other loss follows from this fault.
        yield (
            FAIL,
            f"{peer} is reached by {peer.interface}, but only {', '.join(used)} is used here: the hosts do not "
            "share the chosen network",
            f"MINGLE_INTERFACE={peer.interface}, or unset it to use every suitable interface",
        )
        return
    if all(_is_lost(figures) for figures in (multicast, link, tcp)) and not unicast.received:
        yield (
            FAIL,
            f"{peer} is heard and hears nothing from this host, neither by multicast nor by unicast nor by TCP",
            f"on {host} run `mingle-discover doctor`: its firewall drops what comes from {facts.hostname}, "
            "or it has no route back",
        )
        return
    if _is_lost(multicast):
        enough = unicast.received and peer.address in named
        yield WARN if enough else FAIL, *_multicast_lost(peer, facts, named)
    elif multicast.received and _pings(peer) and not multicast.arrived and not link.arrived:
        why = "" if facts.multicasts_on else ", and our own does not come back"
        yield (
            FAIL,
            f"multicast from {peer} does not arrive here, though ours arrives there{why}: this host's firewall "
            "drops it",
            open_firewall(facts),
        )
    if _is_lost(unicast) and multicast.received:
        yield (
            FAIL,
            f"unicast to UDP port {facts.port} of {peer} is lost, multicast fine: another program there "
            "holds the port as well and receives it, or a firewall drops it",
            f"on {host} run `mingle-discover doctor`, which names the program; or set MINGLE_PORT to another port "
            "on every host",
        )
    if _is_lost(tcp):
        yield (
            FAIL,
            f"TCP from {facts.hostname} to {peer} is filtered{f' ({tcp.reason})' if tcp.reason else ''}, "
            "though UDP passes",
            _look_there(host),
        )
    elif tcp.received and _pings(peer) and not tcp.arrived:
        yield (
            FAIL,
            f"TCP from {peer} to {facts.hostname} does not arrive; the other direction passes",
            open_firewall(facts),
        )
    for way, figures in peer.figures.items():
        if figures.received and figures.loss > LOSS_WARNED:
            lost = figures.sent - figures.received
            yield (
                WARN,
                f"{peer}: {figures.loss:.0%} of the {way} pings are lost ({lost} of {figures.sent})",
                "look for a full queue, a weak radio link, or a rate limit between the two hosts",
            )


def _multicast_lost(peer: PingPeer, facts: Facts, named: Collection[str]) -> tuple[str, str]:
    """Return the observation and the fix."""
    multicast, link, unicast = (peer.figures[way] for way in ("multicast", "link", "unicast"))
    host = peer.hostname or peer.address
    peers = (
        "start jobs with MINGLE_PEERS as well, the same on every host"
        if peer.address in named
        else f"use unicast: MINGLE_PEERS={peer.address},... with all hosts of the job, on every host (compose: the "
        "service's name; Kubernetes: the headless Service's)"
    )
    if link.received:
        fine = ", unicast fine" if unicast.received else ""
        return (
            f"multicast to {peer} is lost on 239.x and passes on 224.0.0.x{fine}: a switch or bridge between "
            "filters multicast (IGMP snooping that does not learn the members, or unknown multicast not flooded)",
            "enable an IGMP querier on the switch or switch snooping off (Linux bridge: ip link set dev BRIDGE "
            f"type bridge mcast_snooping 0); or {peers}",
        )
    if unicast.received:
        where = (
            f"the firewall of {host} drops it"
            if multicast.arrived
            else "the network between carries none, or a firewall drops it"
        )
        return f"multicast to {peer} is lost, unicast fine: {where}", f"{peers}; or {_look_there(host)}"
    return (
        f"multicast and unicast UDP to {peer} are lost: the firewall of {host} drops UDP port {facts.port}",
        _look_there(host),
    )


def _silent(address: str, port: int, *, closed: bool) -> Finding:
    """Return the finding on a host that was given and did not answer."""
    if closed:
        return Finding(
            address,
            FAIL,
            f"nothing serves on {address}: the host is reached, and no program there has UDP port {port} open "
            "(or its firewall rejects it)",
            f"start `mingle-discover doctor --serve` on {address}, and keep it running while this runs",
        )
    return Finding(
        address,
        FAIL,
        f"{address} did not answer on UDP port {port}: no `mingle-discover ping` (or `doctor --serve`) runs there, "
        "or a firewall or a missing route keeps them apart",
        f"start it on {address} while this runs; then {_look_there('that host')}",
    )


def _look_there(host: str) -> str:
    """Return the remedy for a firewall on another host, whose chains only that host knows."""
    return f"find the rule, and the lines that open it, on {host}:\n{LOOK_AS_ROOT}"


def _pings(peer: PingPeer) -> bool:
    """Return whether the peer is known to ping us: only then does a ping that does not arrive say anything."""
    return max(peer.figures["unicast"].arrived, peer.figures["tcp"].arrived) >= ENOUGH


def _is_lost(figures: Figures) -> bool:
    return figures.sent >= ENOUGH and figures.received == 0
