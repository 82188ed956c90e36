"""What is known of the addresses of processes that are heard and not reached. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator

from mingle.diagnostics import CheckStatus, Detour, Finding
from mingle.protocol.explain.observations import Cause, Diagnostics, NetworkFacts, Situation
from mingle.text import few

_DETOUR: Cause = (
    "its kernel sends by another interface than the one that leads there, or by one without a carrier",
    "look at the likely cause there, which has the route to add.",
)
_NO_PORT: Cause = (
    "no port is free there for a connection to leave from (net.ipv4.ip_local_port_range)",
    "look there with `ss -tuan` at what holds them, or widen the range.",
)
_NO_ROUTE: Cause = (
    "it has no route to that address, since the netmasks or the subnets differ",
    "compare `ip address` and `ip route` on both machines, and give them addresses of one subnet or the route.",
)
_FILTERED: Cause = (
    "a firewall on one of them or between them, an address that two machines have, or one of another network",
    "allow TCP between them (`mingle-discover doctor` shows the rule), or set MINGLE_INTERFACE.",
)


def finding(facts: NetworkFacts, wanted: Callable[[Finding], bool]) -> Cause | None:
    """Return the first of the findings about this machine that is wanted, if any."""
    return next(((each.observation, each.fix) for each in facts.findings if wanted(each)), None)


def astray(facts: NetworkFacts) -> Cause | None:
    """Return the warning that can explain why a process that was heard can't be reached."""
    return finding(facts, lambda each: each.explains_unreached)


def unreached(s: Situation) -> Cause | None:
    """Return the cause if a process hears the host of a session and can't connect to it."""
    every, me = s.diagnostics.unreached, s.diagnostics.member
    pairs = sorted(every, key=lambda pair: me not in pair)
    if not pairs:
        return None
    own = me in pairs[0]
    if own and (detour := astray(s.facts)):
        return detour
    lines = dict[frozenset[bytes], str]()
    for pair in pairs:
        each = every[pair]
        if pair[::-1] in every:
            text = f"{each.caller} and {each.host} hear each other and do not reach each other over TCP"
        else:
            text = f"{each.caller} hears {each.host} and does not reach it over TCP"
        lines.setdefault(frozenset(pair), f"{text} ({each.how})" if each.how else text)
    how = "\n".join(each.how for each in every.values())
    rule = finding(s.facts, lambda each: each.name == "tcp" and each.status is not CheckStatus.PASS)
    if Detour.MARK in how:
        why = _DETOUR
    elif "EADDRNOTAVAIL" in how:
        why = _NO_PORT
    elif rule is not None and own:
        why = rule
    elif (known := known_of(lines.values(), s)) is not None:
        why = known
    else:
        why = _NO_ROUTE if "ENETUNREACH" in how else _FILTERED
    return f"{few(lines.values(), '; ')}: {why[0]}", why[1]


def known_of(processes: Iterable[str], s: Situation) -> Cause | None:
    """Return what is known of the addresses of processes that keeps connections with them from working.

    Args:
        processes: as reports name them, with their addresses.
        s: the situation.
    """
    named, heard = dict.fromkeys(_machines(processes)), s.diagnostics
    for name, address in named:
        if (source := heard.translated.get(address)) is not None:
            return (
                f"host {name} announces {address}, and its datagrams come from {source}: address translation (NAT) "
                "hides it",
                "set MINGLE_ADVERTISE there to an address that leads to it from here, and forward the ports.",
            )
    if (shared := _shared_one(named, s)) is not None:
        return shared
    for _, address in named:
        machines, hardware = heard.machines.get(address, {}), s.facts.neighbors.get(address)
        if address in heard.off_link and not _also_on_link(machines, heard):
            return (
                f"{address} is on this network and in none of the subnets here ({few(s.facts.interfaces)}), so the "
                "netmasks or the subnets differ",
                "compare `ip address` on both machines, and give them addresses and netmasks of one subnet.",
            )
        if machines and hardware is not None and not hardware:
            return (
                f"{address} is heard and does not answer ARP, so no packet from here reaches it: its link carries "
                "packets in one direction only, or another machine has its hardware address",
                "look at the switch port and at `ip link` on both machines; no rule for TCP or UDP is the reason.",
            )
    return None


def shared_address(processes: Iterable[str], s: Situation) -> Cause | None:
    """Return the cause if another machine has the address, or the hardware address, of one of these processes."""
    return _shared_one(_machines(processes), s)


def _shared_one(named: Iterable[tuple[str, str]], s: Situation) -> Cause | None:
    shared = (_shared(name, address, s.diagnostics, s.facts) for name, address in named)
    return next((each for each in shared if each is not None), None)


def _shared(name: str, address: str, diagnostics: Diagnostics, facts: NetworkFacts) -> Cause | None:
    machines, hardware = diagnostics.machines.get(address, {}), facts.neighbors.get(address, ())
    if address in facts.addresses and name != facts.hostname:
        return (
            f"the address {address} of host {name} is also an address of this one, {facts.hostname}",
            "give each an address of its own; rootless containers all have the same: use --network=host.",
        )
    what = ""
    if len(machines) > 1:
        what = f"{' and '.join(f'host {each}' for each in machines)} use the same address {address}"
    elif len(hardware) > 1:
        what = f"two machines use the address {address}: its hardware address is {' and '.join(hardware)} in turn"
    if what:
        return (
            what,
            f"give each machine an address of its own; `ip neigh show {address}` on a third one shows who answers.",
        )
    twins = [
        other
        for other, theirs in facts.neighbors.items()
        if hardware and theirs == hardware and diagnostics.machines.get(other, machines) != machines
    ]
    if not hardware or not (twins or hardware[0] in facts.hardware):
        return None
    same = twins[0] if twins else f"this machine's {facts.hardware[hardware[0]]}"
    return (
        f"{address} has the same hardware address as {same} ({hardware[0]}): a switch delivers to one of them",
        "give each machine a hardware address of its own: the clone of a virtual machine keeps the original's.",
    )


def _machines(processes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the host names and IP addresses of processes, as reports name them: STATUS carries them as text."""
    for text in processes:
        for match in re.finditer(r"host (\S+) \(([0-9a-f.:]+)(?: on [^)]*)?\)", text):
            # An IPv4 address can have a port.
            yield match[1], match[2].partition(":")[0] if "." in match[2] else match[2]


def _also_on_link(machines: Collection[str], diagnostics: Diagnostics) -> bool:
    """Return whether a machine was also heard under an address of our subnets: it has several networks."""
    return any(
        machines & names.keys()
        for address, names in diagnostics.machines.items()
        if address not in diagnostics.off_link
    )
