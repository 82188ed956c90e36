"""Judge this machine and its network by facts: pure functions.

``mingle-discover doctor`` prints all findings, and the library's errors quote the checks that did not pass.
:mod:`mingle.network.inspection` gathers the facts.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field, structs

from mingle.diagnostics import CheckStatus, Detour, Finding
from mingle.diagnostics.firewall import (
    LOOK_AS_ROOT,
    PROTOCOLS,
    Block,
    Chain,
    Hook,
    Manager,
    Packet,
    Protocol,
    added,
    allow,
    blocked,
    opening,
)
from mingle.errors import NO_PORT, counted, no_port
from mingle.text import few

PASS, WARN, FAIL = CheckStatus

STRICT = 1
"""``rp_filter``: a packet must come in on the interface that leads to its source (RFC 3704, section 2.2)."""
MEMBERSHIPS_NEEDED = 2
"""The groups that one IPv4 socket joins: the job's and the browse group."""
_SHOWN = 6
_NOT_NEEDED_WITH: Mapping[str, Collection[str]] = {
    "": (),
    "peers": ("multicast", "memberships"),
    "folder": ("multicast", "memberships", "port", "relay", "routes"),
}
"""The checks whose failure keeps no process out that has another way."""


class Holder(Struct, frozen=True):
    """A process that has opened the port, or a socket whose process this one can't see."""

    pid: int | None
    """None if it belongs to another user or to a container."""
    command: str = ""
    user: int | None = None
    mingle: bool = False
    """Whether the process uses mingle: such processes share the port."""
    cut_short: bool = False
    """Whether the search for the holder's process ran out of time."""

    def __str__(self) -> str:
        if self.cut_short:
            return f"a process of user {self.user} that was not found in time among those of this machine"
        if self.pid is None:
            return f"a process of user {self.user} that may not be seen from here (root may)"
        return f"pid {self.pid} ({self.command or 'unknown'})"


class Facts(Struct, frozen=True, kw_only=True):
    """What was read on this machine. A fact that could not be read is left out and not judged."""

    port: int
    group: str = ""
    """One of our IPv4 groups, to find the rule that drops it; empty if IPv4 is not used."""
    interface_problem: tuple[str, str] | None = None
    """Observation and fix, if no interface can be used."""
    used: Sequence[str] = ()
    """The interfaces in use, with their addresses."""
    used_names: Sequence[str] = ()
    addresses: Sequence[str] = ()
    """The addresses of the interfaces in use, IPv4 first."""
    networks: Sequence[str] = ()
    """The subnets of these addresses, in the same order."""
    address_names: Sequence[str] = ()
    """The interfaces of these addresses, in the same order."""
    peers: Sequence[str] = ()
    """The addresses that the user has named."""
    port_range: tuple[int, int] = (32768, 60999)
    """From which the system chooses TCP ports (net.ipv4.ip_local_port_range; this is the kernel's default)."""
    unused: Sequence[str] = ()
    """Other interfaces that are up and have a routable address, not used because the user named another one."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """What has become of each interface that led to other machines, if none of them does any more."""
    had_carrier: bool = False
    """Whether an interface in use had a carrier at any time."""
    left_out: Sequence[str] = ()
    """The interfaces for which the limit of open files has no room."""
    named_by: str = ""
    """The option or variable that named the interfaces; empty if mingle chose them."""
    only_loopback: bool = False
    multicasts_on: frozenset[str] | None = None
    """The interfaces on which multicasts came in, our own included; None if none was sent yet."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The sockets that could not be opened, each with the name of the error."""
    relay_failure: str = ""
    """Why unicast datagrams can't be relayed between the processes of this machine; empty if they can."""
    send_errors: Mapping[str, int] = field(default_factory=dict)
    unicasts_sent: int = 0
    """The datagrams to named hosts that could be sent."""
    holders: Sequence[Holder] = ()
    """The other processes that hold the UDP port."""
    default_route: bool | None = None
    memberships: int | None = None
    """net.ipv4.igmp_max_memberships."""
    rp_filter: Mapping[str, int] = field(default_factory=dict)
    rp_drops: int = 0
    """The packets that the reverse path filter has dropped during the discovery."""
    hostname: str = ""
    hostname_addresses: Sequence[str] = ()
    hostname_problem: str = ""
    silent_servers: Sequence[str] = ()
    """The name servers of this host, if they have not answered in time."""
    look_up_seconds: float = 0.0
    """How long torch then waits for them."""
    surroundings: str = ""
    """``pod``, ``container``, or the name of the cloud, as this machine shows it; empty if it does not."""
    ttl: int = 1
    """How many routers a multicast may pass, plus one; 0: it stays on this machine."""
    family: str = "auto"
    """The IP version that the user has named, if any."""
    peers_named: bool = False
    """Whether hosts or shared folders are named, so that multicast is not needed."""
    names_itself: bool = False
    """Whether hosts are named, and all of them are this machine."""
    multicast_heard: bool = False
    """Whether a multicast of another machine was heard."""
    unresolved: Mapping[str, str] = field(default_factory=dict)
    """The names among the peers that do not resolve, each with the reason."""
    folders: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The shared folders, each with what was observed and what to do; empty texts: it works."""
    seen_in_folders: Mapping[str, str] = field(default_factory=dict)
    """What lies in those that work."""
    empty_folders: Sequence[str] = ()
    """Those that work and in which no other process was seen."""
    other_way: Literal["", "peers", "folder"] = ""
    """By what other processes can meet this one without multicast, as was seen."""
    master: str = ""
    """``MASTER_ADDR=… MASTER_PORT=…`` as in the environment."""
    environment_problems: Sequence[tuple[str, str]] = ()
    """Observation and fix of each reason why a rank that is started here would not know its rank."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The other major versions of the protocol that were heard, each with an address."""
    detours: Sequence[Detour] = ()
    """The connections that were not made, and that the kernel has sent by the wrong interface."""
    chains: Sequence[Chain] = ()
    manager: Manager = "nft"


def examine(facts: Facts) -> list[Finding]:
    """Return one finding or more for each check, in reading order."""
    return [
        finding
        for check in (
            _interfaces,
            _confined,
            _routes,
            _port,
            _memberships,
            _multicast,
            _tcp,
            _reverse_path,
            _place,
            _names,
            _peers,
            _folders,
            _versions,
            _hostname,
            _environment,
        )
        for finding in check(facts)
    ]


def troubles(facts: Facts) -> list[Finding]:
    """Return the findings that can explain why other hosts are not heard, the worst first, for an error to quote."""
    checks = (
        _folders,  # what the user has named, perhaps because nothing else can work here
        _interfaces,
        _detours,
        _confined,
        _named_elsewhere,
        _routes,
        _port,
        _memberships,
        _multicast,
        _tcp,
        _reverse_path,
        _surroundings,
        _names,
        _peers,
    )
    found = [_weighed(finding, facts) for check in checks for finding in check(facts) if finding.status is not PASS]
    return sorted(found, key=lambda finding: -finding.status)


def _weighed(finding: Finding, facts: Facts) -> Finding:
    """Return a finding as no more than a remark if it concerns a way that is not needed."""
    if finding.name not in _NOT_NEEDED_WITH[facts.other_way]:
        return finding
    instead = "peers answer" if facts.other_way == "peers" else "the shared folder works"
    observation = f"{finding.observation} (not needed: {instead})"
    return structs.replace(finding, status=WARN, observation=observation, explains_silence=False)


def _interfaces(facts: Facts) -> Iterator[Finding]:
    if facts.interface_problem is not None:
        yield Finding("interfaces", FAIL, *facts.interface_problem)
    elif facts.lost:
        yield Finding(
            "interfaces",
            FAIL if facts.had_carrier else WARN,  # a job on one machine needs no carrier
            f"this machine is offline: {', '.join(f'{name} {what}' for name, what in facts.lost.items())}",
            _bring_back(*next(iter(facts.lost.items()))),
            explains_silence=True,
        )
    elif facts.only_loopback and not facts.named_by:
        yield Finding(
            "interfaces",
            WARN,
            f"only loopback is used ({', '.join(facts.used)}): no other machine can be reached",
            "bring a network interface up (a job on one machine needs none):\nip link set dev NAME up",
            explains_silence=True,
        )
    else:
        yield Finding("interfaces", PASS, f"used: {', '.join(facts.used)}")
    starved = [what for what, why in facts.failures.items() if why.startswith(("EMFILE", "ENFILE"))]
    if starved:
        yield Finding(
            "interfaces",
            FAIL,
            f"no file descriptor is left, so {few(starved, most=_SHOWN)} could not be opened (EMFILE)",
            "raise the limit of open files (ulimit -n), or name the network that all hosts share in MINGLE_INTERFACE",
        )
    if facts.left_out:
        yield Finding(
            "interfaces",
            WARN,
            "the limit of open files has no room for "
            f"{counted(len(facts.left_out), 'interface')} ({few(facts.left_out, most=_SHOWN)}), so they are not used",
            "name the network that all hosts share in MINGLE_INTERFACE, or raise the limit (ulimit -n)",
            explains_silence=True,
        )


def _bring_back(name: str, what: str) -> str:
    """Return the fix for the first interface that leads nowhere any more."""
    match what:
        case "is down":
            return f"ip link set dev {name} up, and add the routes again that went with it"
        case "has lost its addresses":
            return f"look at the DHCP client of {name}, or add the address again: ip address add ADDRESS dev {name}"
        case "has no carrier":
            return f"look at the cable of {name}, and at the switch or the virtual network at its other end"
        case _:
            return f"look why {name} was removed, and add it again"


def _confined(facts: Facts) -> Iterator[Finding]:
    """Judge the settings by which this machine reaches only itself."""
    if facts.named_by and facts.unused and facts.only_loopback:
        yield Finding(
            "interfaces",
            WARN,
            f"{facts.named_by} names loopback alone, so no other machine can be reached, but {', '.join(facts.unused)} "
            "is up as well",
            f"for a job on several machines, unset {facts.named_by}",
            explains_silence=True,
            keeps_to_itself=True,
        )
    elif facts.ttl == 0 and not facts.only_loopback and not facts.peers_named:
        yield Finding(
            "multicast",
            WARN,
            "MINGLE_TTL is 0, so multicasts do not leave this machine",
            "for a job on several machines, unset MINGLE_TTL",
            explains_silence=True,
            keeps_to_itself=True,
        )


def _named_elsewhere(facts: Facts) -> Iterator[Finding]:
    """Judge this only if no host was heard: naming one of several networks, or an IP version, has its purpose."""
    if facts.family != "auto" and not facts.only_loopback:
        yield Finding(
            "family",
            WARN,
            f"MINGLE_FAMILY is {facts.family}, so a process that uses only IPv{'4' if facts.family == '6' else '6'} is "
            "not heard",
            "set the same MINGLE_FAMILY on every host, or on none",
            explains_silence=True,
        )
    if facts.named_by and facts.unused and not facts.only_loopback:
        yield Finding(
            "interfaces",
            WARN,
            f"{facts.named_by} names {', '.join(facts.used_names)} alone, but {', '.join(facts.unused)} is up as well: "
            "perhaps only that network is shared by all hosts",
            f"name the network that all hosts share in {facts.named_by}, or unset it to use every suitable one",
            explains_silence=True,
        )


def _routes(facts: Facts) -> Iterator[Finding]:
    # With loopback alone a route is of no use, nor is it offline: the check of the interfaces says what is.
    if facts.lost:
        return
    if facts.send_errors.get("ENETUNREACH") and not (facts.only_loopback and not facts.named_by):
        yield Finding(
            "routes",
            # A host can have several addresses, as one of IPv4 and one of IPv6, and need only be reached at one.
            WARN if facts.unicasts_sent else FAIL,
            f"{counted(facts.send_errors['ENETUNREACH'], 'datagram')} could not be sent: Network is unreachable "
            "(ENETUNREACH)",
            f"add a route:\nip route add default dev {_first(facts.used_names, 'NAME')}",
            explains_silence=True,
        )
    elif facts.default_route is False and not facts.only_loopback and facts.interface_problem is None:
        yield Finding(
            "routes",
            WARN,
            "there is no default route: hosts in other subnets are not reached, hosts in "
            f"{', '.join(facts.networks) or 'this one'} are",
            "if the job has hosts in other subnets:\nip route add default via ROUTER dev "
            f"{_first(facts.used_names, 'NAME')}",
        )
    elif facts.default_route:
        yield Finding("routes", PASS, "there is a default route")


def _detours(facts: Facts) -> Iterator[Finding]:
    # Only a warning: the host can be reached at another address.
    for detour in facts.detours:
        yield Finding("routes", WARN, str(detour), detour.remedy, explains_unreached=True)


def _port(facts: Facts) -> Iterator[Finding]:
    taken = [what for what, why in facts.failures.items() if why.startswith("EADDRINUSE")]
    portless = [what for what, why in facts.failures.items() if why.startswith(NO_PORT)]
    if portless:
        cause, fix = no_port(*facts.port_range)
        yield Finding("ports", FAIL, f"{cause}: {', '.join(portless)} could not be opened (EADDRINUSE)", fix)
    strangers = [holder for holder in facts.holders if not holder.mingle]
    names = few(strangers, most=_SHOWN)
    if taken:
        yield Finding(
            "port",
            FAIL,
            f"UDP port {facts.port} is held by {names or 'another program'}, which does not share it "
            f"({', '.join(taken)} could not be opened: EADDRINUSE)",
            f"end that program, or set MINGLE_PORT to another port on every host; "
            f"ss -ulpn 'sport = :{facts.port}' shows it",
        )
    elif strangers:
        if facts.interface_problem is None:  # else nothing was opened, perhaps because the program does not share it
            yield Finding(
                "port",
                WARN,
                f"UDP port {facts.port} is also held by {names}, which is not mingle: a unicast datagram to a shared "
                "port reaches only one program, so MINGLE_PEERS may not work here",
                "end that program, or set MINGLE_PORT to another port on every host",
                explains_silence=True,
            )
    else:
        shared = f", shared with {counted(len(facts.holders), 'other rank')}" if facts.holders else ""
        yield Finding("port", PASS, f"UDP port {facts.port} can be used{shared}")
    if facts.relay_failure:
        names_taken = facts.relay_failure.endswith("taken")
        yield Finding(
            "relay",
            WARN,
            f"the processes of this machine can't relay unicast datagrams to this one ({facts.relay_failure}), so "
            "MINGLE_PEERS reaches only one of the processes that share the port",
            f"end the processes that hold the names (ss -xlp | grep mingle/udp-{facts.port} shows them), or set "
            "MINGLE_PORT to another port on every host"
            if names_taken
            else "allow this process abstract Unix sockets: look at `ulimit -n` and at the rules of its sandbox "
            "(AppArmor, seccomp)",
        )


def _memberships(facts: Facts) -> Iterator[Finding]:
    refused = [what for what, why in facts.failures.items() if why.startswith("ENOBUFS")]
    if refused or (facts.memberships is not None and facts.memberships < MEMBERSHIPS_NEEDED):
        limit = "" if facts.memberships is None else f" (net.ipv4.igmp_max_memberships={facts.memberships})"
        yield Finding(
            "memberships",
            FAIL,
            f"the limit of multicast memberships is reached{limit}: mingle joins {MEMBERSHIPS_NEEDED} groups per socket"
            + (f"; {', '.join(refused)} could not be opened: ENOBUFS" if refused else ""),
            "raise the limit:\nsysctl -w net.ipv4.igmp_max_memberships=20",
        )
    elif facts.memberships is not None:
        yield Finding("memberships", PASS, f"up to {facts.memberships} multicast groups per socket")


def _multicast(facts: Facts) -> Iterator[Finding]:
    if facts.send_errors.get("EPERM"):
        block = next(filter(None, blocks(facts, "output", "udp")), None)
        yield Finding(
            "multicast",
            FAIL,
            f"this host's firewall refused to send {counted(facts.send_errors['EPERM'], 'datagram')} (EPERM)"
            + (f": {block}" if block else ""),
            open_firewall(facts),
        )
    if facts.multicasts_on is None or facts.interface_problem is not None:
        return
    opened = [name for name in facts.used_names if not any(what.startswith(f"{name} ") for what in facts.failures)]
    if opened and not facts.multicasts_on and not facts.only_loopback:
        block = next(filter(None, blocks(facts, "input", "udp")), None)
        yield Finding(
            "multicast",
            FAIL,
            f"this host's firewall drops multicast to UDP port {facts.port}: not even our own datagrams came back"
            + (f"; {block}" if block else ""),
            open_firewall(facts),
        )
    elif not facts.send_errors.get("EPERM"):
        heard = ", ".join(sorted(facts.multicasts_on))
        yield Finding("multicast", PASS, f"our own multicasts come back on {heard or 'no interface'}")


def _tcp(facts: Facts) -> Iterator[Finding]:
    if facts.only_loopback:
        return
    found = blocks(facts, "input", "tcp")
    if (block := found[0]) is not None and all(found):  # one network that lets it pass is enough for a job
        yield Finding(
            "tcp",
            WARN,
            f"this host's firewall drops TCP from other hosts: {block}; rank 0 could be heard and not be reached",
            open_firewall(facts),
        )
    elif facts.chains:
        closed = [f"; not from {each} ({block})" for each, block in zip(job_hosts(facts), found, strict=False) if block]
        yield Finding("tcp", PASS, f"this host's firewall lets TCP pass to the ports of ranks{''.join(closed)}")


def open_firewall(facts: Facts) -> str:
    """Return the remedy for a firewall of this host that drops what a job needs: all that it drops at once."""
    hosts = job_hosts(facts)
    needed = [each for end in _ends(facts) for each in _packets(facts, *end)]
    # A multicast of IPv6 comes from a link-local address.
    networks = [*hosts, *(["fe80::/10"] if any(":" in each for each in hosts) else [])]
    port, manager = facts.port, facts.manager
    lines = opening(facts.chains, needed, port=port, networks=networks, manager=manager)
    if not facts.chains and manager != "nft":
        outgoing = bool(facts.send_errors.get("EPERM"))
        for protocol, each in itertools.product(PROTOCOLS, hosts):
            lines = added(lines, allow(protocol, port, [each], manager=manager, block=None, outgoing=outgoing))
    what = f"UDP port {port} and TCP"
    where = f"the hosts of {', '.join(hosts)}" if hosts else "the hosts of the job"
    if lines:
        return "\n".join([f"let this host and {where} reach each other:", *lines])
    if facts.chains:
        return (
            f"allow {what} between this host and {where} in the chain that drops them: `nft list ruleset` shows the "
            "chains, docs/administrators.md the rules"
        )
    return f"look for the rule as root, which prints the lines to paste ({what} must pass):\n{LOOK_AS_ROOT}"


def job_hosts(facts: Facts) -> list[str]:
    """Return the networks in which other hosts of a job can be, and the named hosts outside of them.

    A network that the whole world can reach is one of them only if this host has no other one.
    """
    every = [network for network in map(ipaddress.ip_network, facts.networks) if network.num_addresses > 1]
    networks = [each for each in every if not each.is_global] or every
    apart = [
        each
        for each in (ipaddress.ip_address(peer.partition("%")[0]) for peer in facts.peers)
        if not (each.is_link_local or each.is_loopback or str(each) in facts.addresses)
        and not any(each in one for one in networks)
    ]
    return [str(each) for each in dict.fromkeys((*networks, *apart))]


def _ends(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield an interface, its address, and the address of another host, for each of the job's hosts or networks."""
    hosts = job_hosts(facts)
    if not hosts:
        yield _first(facts.used_names, ""), "", ""
    for each in hosts:
        place = facts.networks.index(each) if each in facts.networks else None
        name = facts.address_names[place] if place is not None and facts.address_names else ""
        alike = [address for address in facts.addresses if (":" in address) == (":" in each)]
        own = facts.addresses[place] if place is not None and facts.addresses else _first(alike, "")
        nearby = itertools.islice(ipaddress.ip_network(each).hosts(), len(facts.addresses) + 1)
        other = next((str(address) for address in nearby if str(address) not in facts.addresses), "")
        yield name or _first(facts.used_names, ""), own, other


def _packets(facts: Facts, interface: str, own: str, other: str) -> Iterator[tuple[Hook, Packet]]:
    """Yield what a job sends between this host and another one, multicast first."""
    group = "ff12::1" if ":" in other else facts.group
    ways: tuple[tuple[Hook, str, str], ...] = (("input", own, other), ("output", other, own))
    for hook, destination, source in ways:
        if group:
            multicaster = "fe80::1" if ":" in other and hook == "input" else source
            yield hook, Packet("udp", facts.port, group, interface, multicaster)
        yield hook, Packet("udp", facts.port, destination, interface, source)
        for port in facts.port_range:
            yield hook, Packet("tcp", port, destination, interface, source)


def blocks(facts: Facts, hook: Hook, protocol: Protocol) -> list[Block | None]:
    """Return what drops the packets of one protocol, for each of the job's hosts or networks; None: nothing does."""
    found: list[Block | None] = []
    for end in _ends(facts):
        packets = [packet for at, packet in _packets(facts, *end) if (at, packet.protocol) == (hook, protocol)]
        found.append(next((block for packet in packets if (block := blocked(facts.chains, packet, hook))), None))
    return found


def _reverse_path(facts: Facts) -> Iterator[Finding]:
    strict = [name for name, value in facts.rp_filter.items() if value == STRICT]
    if strict and facts.rp_drops:
        yield Finding(
            "rp_filter",
            FAIL,
            f"the reverse path filter of {', '.join(strict)} has dropped {counted(facts.rp_drops, 'packet')} just now: "
            "the senders' subnet is not routed by the interface on which they came",
            "add a route to that subnet (`ip route add SUBNET dev NAME`), or make the filter loose:"
            # sysctl(8) takes a dot for a slash, so the dot of a VLAN's name, as in eth0.100, is typed as one.
            + "".join(f"\nsysctl -w net.ipv4.conf.{name.replace('.', '/')}.rp_filter=2" for name in strict),
        )
    elif facts.rp_filter:
        words = "strict" if strict else "loose or off"
        yield Finding("rp_filter", PASS, f"the reverse path filter ({words}) has dropped nothing")


_WITHOUT_MULTICAST = {
    "pod": (
        "this is a Kubernetes pod, and multicast rarely passes between nodes: pods of other nodes are not heard",
        "set MINGLE_PEERS to a headless Service of the job's pods, or to dir:/PATH on a volume they share",
    ),
    "container": (
        "this is a container, and multicast does not leave its machine's bridge: other machines are not heard",
        "set MINGLE_PEERS to all hosts of the job, and run the containers in the hosts' network",
    ),
}


def _place(facts: Facts) -> Iterator[Finding]:
    """Judge where this is if nothing fails: the containers of one machine meet, as those of a compose file do."""
    for finding in _surroundings(facts):
        yield finding if facts.surroundings != "container" else structs.replace(finding, status=PASS, remedy="")


def _surroundings(facts: Facts) -> Iterator[Finding]:
    where = facts.surroundings
    within_a_machine = where in _WITHOUT_MULTICAST  # what is heard there can come from the same machine
    heard = facts.multicast_heard and not within_a_machine
    if not where or heard or facts.peers_named or facts.only_loopback or facts.interface_problem is not None:
        return
    observation, remedy = _WITHOUT_MULTICAST.get(
        where,
        (
            f"this is a machine of {where}, and networks there rarely carry multicast: other machines are not heard",
            "set MINGLE_PEERS to the names or addresses of all hosts of the job",
        ),
    )
    yield Finding("surroundings", WARN, observation, remedy, explains_silence=True, keeps_to_itself=True)


def _names(facts: Facts) -> Iterator[Finding]:
    if facts.silent_servers:
        servers = " and ".join(facts.silent_servers)
        yield Finding(
            "names",
            WARN,
            f"{servers} {'does' if len(facts.silent_servers) == 1 else 'do'} not answer name queries: torch waits "
            f"{facts.look_up_seconds:g} s for each connection",
            f"remove {servers} from /etc/resolv.conf, or add all hosts of the job to /etc/hosts",
        )


def _peers(facts: Facts) -> Iterator[Finding]:
    for host, why in facts.unresolved.items():
        found = f"`getent hosts {host}` must find it"
        if facts.silent_servers:
            fix = f"make {' or '.join(facts.silent_servers)} answer (/etc/resolv.conf), or add the name to /etc/hosts: "
        elif facts.surroundings == "pod":
            fix = (
                "make a headless Service (`clusterIP: None`, `publishNotReadyAddresses: true`) whose selector matches "
                "the job's pods, and name it in their `subdomain`: "
            )
        else:
            fix = "correct the name, or add it to the name server or /etc/hosts: "
        yield Finding("peers", FAIL, f"{host!r} in MINGLE_PEERS does not resolve: {why}", fix + found)
    if facts.names_itself:
        yield Finding(
            "peers",
            WARN,
            "MINGLE_PEERS leads to this machine alone: the other hosts are not named, or the name of a service does "
            "not lead to them yet",
            "for a job on several machines, name all of them in MINGLE_PEERS",
            explains_silence=True,
            keeps_to_itself=not facts.multicast_heard,
        )


def _folders(facts: Facts) -> Iterator[Finding]:
    for folder, (what, fix) in facts.folders.items():
        if what:
            yield Finding("folder", FAIL, f"{folder} in MINGLE_PEERS {what}", fix)
        else:
            seen = facts.seen_in_folders.get(folder, "")
            yield Finding("folder", PASS, f"this host writes in {folder}, and sees there what it has written{seen}")

    for folder in facts.empty_folders:
        yield Finding(
            "folder",
            WARN,
            f"no other process of this job is seen in {folder}: the others were not started, or have another folder, "
            "or another job id",
            "compare MINGLE_PEERS, the mount and the job id on all machines; `mingle-discover doctor` shows what "
            "each of them sees there",
            explains_silence=True,
        )


def _versions(facts: Facts) -> Iterator[Finding]:
    for version, address in facts.versions.items():
        yield Finding(
            "version",
            WARN,
            f"{address} speaks {version} of the protocol, which is incompatible with ours",
            "install the same version of multinode-mingle on every host",
        )


def _hostname(facts: Facts) -> Iterator[Finding]:
    if facts.hostname_problem and not facts.only_loopback:
        yield Finding(
            "hostname",
            WARN,
            f"this host's own name {facts.hostname!r} does not resolve: {facts.hostname_problem}",
            f"add it to /etc/hosts:\necho '{_first(facts.addresses, 'ADDRESS')} {facts.hostname}' >> /etc/hosts",
        )
    loops = [address for address in facts.hostname_addresses if address.startswith("127.") or address == "::1"]
    if loops and not facts.only_loopback:
        yield Finding(
            "hostname",
            WARN,
            f"this host's own name {facts.hostname!r} resolves to {loops[0]}, which is loopback: mingle does not "
            "use the name, but programs that do (Gloo without GLOO_SOCKET_IFNAME, MPI, Ray) announce an address that "
            "no other host can reach",
            f"in /etc/hosts give {facts.hostname!r} the host's own address in place of {loops[0]}",
        )
    elif facts.hostname_addresses:
        yield Finding("hostname", PASS, f"{facts.hostname!r} resolves to {_first(facts.hostname_addresses, '')}")


def _environment(facts: Facts) -> Iterator[Finding]:
    for observation, remedy in facts.environment_problems:
        yield Finding("environment", FAIL, observation, remedy)
    if facts.master:
        yield Finding(
            "environment",
            WARN,
            f"the environment has {facts.master} already: mingle replaces it with rank 0's real address, a program "
            "that does not use mingle connects there",
            "remove it from the environment:\nunset MASTER_ADDR MASTER_PORT",
        )
    if not facts.environment_problems and not facts.master:
        yield Finding("environment", PASS, "nothing in the environment contradicts itself")


def _first(names: Sequence[str], default: str) -> str:
    return names[0] if names else default
