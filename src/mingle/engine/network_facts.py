"""From what the loop's sockets have shown to what a report says of the network, and to what the checks are given."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from mingle.config.settings import Network
from mingle.diagnostics import Finding
from mingle.network import inspection
from mingle.network.inspection import Observed
from mingle.network.interfaces import Interface
from mingle.network.transport import Transport
from mingle.protocol.machine import NetworkFacts
from mingle.wire.groups import Group


class Seen(Struct, frozen=True, kw_only=True):
    """What the loop holds."""

    network: Network
    group: Group
    """The job's, else the lobby."""
    found: Sequence[Interface]
    usable: Sequence[Interface]
    transport: Transport | None
    """None: closed already."""
    unresolved: Mapping[str, str]
    rejected: Counter[str]
    multicasts_on: frozenset[str]
    rp_drops_before: int | None


def observed(seen: Seen, versions: Mapping[str, str] | None = None) -> Observed:
    """Returns what the checks of this machine need to know of its sockets."""
    network, transport = seen.network, seen.transport
    ipv4 = any(each.of_family("4") for each in seen.usable) and network.family != "6"
    return Observed(
        port=network.port,
        group=seen.group.ipv4 if ipv4 else "",
        used=seen.usable,
        found=seen.found,
        named_by=network.interfaces_from if network.interfaces else "",
        multicasts_on=seen.multicasts_on if transport and transport.sent else None,
        failures=dict(transport.failures) if transport else {},
        send_errors=dict(transport.send_errors) if transport else {},
        unresolved=seen.unresolved,
        versions=versions or {},
        rp_drops_before=seen.rp_drops_before,
    )


def network_facts(seen: Seen, *, diagnosed: bool) -> NetworkFacts:
    """Returns what a report says; ``diagnosed``: with what is wrong with this machine."""
    network, transport = seen.network, seen.transport
    families = {network.family} if network.family != "auto" else {"4", "6"}
    groups = [seen.group.ipv4] if "4" in families else []
    if "6" in families and any(each.of_family("6") for each in seen.usable):
        groups.append(seen.group.ipv6(network.ttl))
    failures = [f"{what}: {why}" for what, why in transport.failures.items()] if transport else []
    failures += [f"{host} did not resolve: {why}" for host, why in seen.unresolved.items()]
    findings: Sequence[Finding] = ()
    if diagnosed:
        with contextlib.suppress(OSError, ImportError):  # EMFILE: modules can't be loaded, and the report has to do
            from mingle.diagnostics import diagnosis  # only who has failed needs it

            findings = diagnosis.troubles(inspection.gather(observed(seen)))
    return NetworkFacts(
        interfaces=[str(each) for each in seen.usable],
        groups=groups,
        port=network.port,
        peers=[str(peer) for peer in network.peers],
        sent=transport.sent if transport else 0,
        received=transport.received if transport else 0,
        rejected=seen.rejected,
        send_errors=transport.send_errors if transport else Counter(),
        failures=failures,
        findings=findings,
    )
