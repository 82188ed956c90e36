"""Find the rule of this host's firewall that drops a packet, and the lines to paste that let the packet through.

It reads the listing of ``nft list ruleset`` (nft(8)), which also shows the rules of a current iptables. It does not
evaluate everything: a rule that it can't read is never named, and where such a rule may let the packet pass, nothing
that follows it is. Other modules measure whether packets are dropped; this one only names the rule.
"""

from __future__ import annotations

import fnmatch
import functools
import ipaddress
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct, field, structs

Manager = Literal["nft", "ufw", "firewalld", "iptables"]
Hook = Literal["input", "output"]
Protocol = Literal["udp", "tcp"]
PROTOCOLS: tuple[Protocol, ...] = ("udp", "tcp")

LOOK_AS_ROOT = 'sudo "$(command -v mingle-discover)" doctor'
"""The command that finds the rule on a machine whose rules were not read."""
_TABLES: dict[Manager, frozenset[str]] = {
    "nft": frozenset(),
    "ufw": frozenset({"ip filter", "ip6 filter"}),
    "iptables": frozenset({"ip filter", "ip6 filter"}),
    "firewalld": frozenset({"ip filter", "ip6 filter", "inet firewalld"}),
}
"""The tables whose rules each program keeps."""
# Compiled when they are first used: ranks that find each other read no rules.
_compiled = functools.cache(re.compile)
_CHAIN = r"chain (\S+) \{"
_TABLE = r"table (\S+) (\S+) \{"
_HOOK = r"type filter hook (\S+) priority"
_POLICY = r"policy (accept|drop);"
_JUMP = r"\b(jump|goto) (\S+)"
_VERDICT = r"\b(accept|drop|reject|return|vmap)\b"
_OTHER_PROTOCOLS = r"\b(icmp|icmpv6|ipv6-icmp|igmp|sctp|dccp|esp|ah|gre)\b"
_NOISE = (
    r'counter packets \d+ bytes \d+|comment ".*?"|# .*$|reject with \S+( type)?( \S+)?$|log .*?(?=accept|drop|reject|$)'
)
# A negation, or a set whose elements are listed elsewhere.
_UNREAD = "!=|@"
# nft prints numbers on a host without /etc/protocols, as in minimal images.
_NUMBERS = {"tcp": "6", "udp": "17"}
_MATCHES = {
    "protocol": r"(?:meta l4proto|ip protocol|ip6 nexthdr) (\{[^}]*\}|\S+)",
    "port": r"(?:(udp|tcp|th)) dport (\{[^}]*\}|\S+)",
    "destination": r"ip6? daddr (\{[^}]*\}|\S+)",
    "source": r"ip6? saddr (\{[^}]*\}|\S+)",
    "packet": r"(?:meta )?pkttype (\S+)",
    "interface": r"(?:meta )?(?:iifname|iif|oifname|oif) (\{[^}]*\}|\S+)",
    "state": r"ct state (\S+)",
    "syn": r"tcp flags (?:& \([^)]*\) == syn|syn(?: / \S+)?)(?= |$)",
    "no syn": r"tcp flags (?:& \([^)]*\) != syn|!= syn(?: / \S+)?|! syn|& syn (?:== 0x0|!= syn))(?= |$)",
    "type": r"fib daddr type (\S+)",
    "dice": r"numgen random mod \d+ < \d+",
}


class Packet(Struct, frozen=True):
    """The parts of a packet that rules match."""

    protocol: Protocol
    port: int
    """The destination port."""
    destination: str = ""
    """The destination address; empty for this host's own."""
    interface: str = ""
    source: str = ""
    """The source address; empty if it is not known, and then no rule for certain sources matches."""
    first: bool = True
    """Whether it opens a connection; else it belongs to one that is open."""

    @property
    def ipv6(self) -> bool:
        """Whether it is a packet of IPv6."""
        return ":" in self.destination or ":" in self.source

    @property
    def multicast(self) -> bool:
        """Whether the destination is a multicast group."""
        return bool(self.destination) and ipaddress.ip_address(self.destination).is_multicast


Condition: TypeAlias = Callable[[Packet], bool]


class Rule:
    """A rule of a chain. It is read once, and only if a packet comes to it: a listing can have tens of thousands."""

    __slots__ = ("_conditions", "_whole", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = ""
        """The text without its noise; empty as long as it is unread."""
        self._conditions: list[Condition] = []
        self._whole = False
        """Whether the conditions are all that there is."""

    def matches(self, packet: Packet) -> bool | None:
        """Return whether it matches a packet; None: it has parts that are not read here."""
        if not self.words:
            self._read()
        for met in self._conditions:
            if not met(packet):
                return False
        return True if self._whole else None

    def _read(self) -> None:
        self.words = rest = without_noise(self.text)
        if _compiled(_OTHER_PROTOCOLS).search(rest):
            self._conditions = [lambda _packet: False]
            return
        if "vmap" in rest:
            return
        is_unread = _compiled(_UNREAD).search
        unread = bool(is_unread(_compiled(_MATCHES["no syn"]).sub("", rest)))
        for name, pattern in _MATCHES.items():
            if found := list(_compiled(pattern).finditer(rest)):
                readable = found if name == "no syn" else [each for each in found if not is_unread(each[0])]
                self._conditions += [_condition(name, each) for each in readable]
                rest = _compiled(pattern).sub("", rest)
        self._whole = not (unread or _compiled(_JUMP).sub("", _compiled(_VERDICT).sub("", rest)).split())


class Chain(Struct):
    """A chain of the ruleset."""

    family: str
    table: str
    name: str
    hook: str = ""
    """``input``, ``output`` or another hook; empty for a chain that others jump to."""
    policy: str = "accept"
    rules: list[Rule] = field(default_factory=list)


class Block(Struct, frozen=True):
    """The rule or the policy that drops a packet."""

    chain: Chain
    rule: str
    """Empty for the chain's policy."""

    def __str__(self) -> str:
        where = f"chain {self.chain.family} {self.chain.table} {self.chain.name}"
        return f"rule `{self.rule}` of {where}" if self.rule else f"policy drop of {where}"


def parse(listing: str) -> list[Chain]:
    """Return the chains in the output of ``nft list ruleset``; other objects are skipped."""
    chains: list[Chain] = []
    family = table = ""
    inside: Chain | None = None
    for raw in listing.splitlines():
        line = raw.strip()
        if line == "flags dormant" and inside is None:
            family = "dormant"
        elif found := _compiled(_TABLE).match(line):
            family, table = found[1], found[2]
        elif found := _compiled(_CHAIN).match(line):
            inside = Chain(family, table, found[1])
            chains.append(inside)
        elif line == "}":
            inside = None
        elif inside is not None:
            if hook := _compiled(_HOOK).search(line):
                inside.hook = hook[1]
                policy = _compiled(_POLICY).search(line)
                inside.policy = policy[1] if policy else "accept"
            elif line:
                inside.rules.append(Rule(line))
    return chains


def blocked(chains: Sequence[Chain], packet: Packet, hook: Hook = "input") -> Block | None:
    """Return what drops a packet at a hook, or None. Each base chain can drop what the others accept."""
    by_name = {(chain.family, chain.table, chain.name): chain for chain in chains}
    for chain in chains:
        if chain.hook == hook and chain.family in ("inet", "ip6" if packet.ipv6 else "ip"):
            found = _walk(chain, packet, by_name, depth=0)
            if isinstance(found, Block):
                return found
            if found is None and chain.policy == "drop":
                return Block(chain, "")
    return None


def without_noise(rule: str) -> str:
    """Return a rule without its counters and comments, and without the words of a log entry or of a rejection."""
    rest = _compiled(_NOISE).sub(lambda match: "reject" if match[0].startswith("reject") else "", rule)
    return " ".join(rest.split())


def _walk(
    chain: Chain, packet: Packet, by_name: Mapping[tuple[str, str, str], Chain], depth: int
) -> Block | Literal["accept", "unknown"] | None:
    """Return the verdict of a chain; None if no rule has one."""
    if depth > 16:  # the kernel's own limit of jumps (NFT_JUMP_STACK_SIZE)
        return "unknown"
    for rule in chain.rules:
        matches = rule.matches(packet)
        if matches is False:
            continue
        jump, verdict = _compiled(_JUMP).search(rule.words), _compiled(_VERDICT).search(rule.words)
        if matches is None and verdict is not None and verdict[1] in ("drop", "reject"):
            continue  # a rule that may match is not the one to name, but what follows can be
        if matches is None:
            if jump is None and verdict is None:
                continue  # it counts, marks or limits
            return "unknown"  # it may let the packet pass, and with it all that follows
        if jump is not None:
            target = by_name.get((chain.family, chain.table, jump[2]))
            found = "unknown" if target is None else _walk(target, packet, by_name, depth + 1)
            if found is not None or jump[1] == "goto":
                return found
        elif verdict is not None:
            if verdict[1] == "return":
                return None
            return "accept" if verdict[1] == "accept" else Block(chain, rule.text)
    return None


def _condition(name: str, found: re.Match[str]) -> Condition:
    """Return the condition that a pattern of `_MATCHES` has found in a rule."""
    if name == "protocol":
        protocols = set(_elements(found[1]))
        ipv6 = {"ip": False, "ip6": True}.get(found[0].split()[0])
        return lambda packet: (
            ipv6 in (None, packet.ipv6) and not protocols.isdisjoint((packet.protocol, _NUMBERS[packet.protocol]))
        )
    if name == "port":
        protocol, ports = found[1], [each for each in map(_port_range, _elements(found[2])) if each]
        return lambda packet: (
            protocol in (packet.protocol, "th") and any(low <= packet.port <= high for low, high in ports)
        )
    if name in ("destination", "source"):
        networks, address_of = _elements(found[1]), operator.attrgetter(name)
        return lambda packet: any(_within(address_of(packet), each) for each in networks)
    if name == "interface":
        patterns = [each.strip('"') for each in _elements(found[1])]
        return lambda packet: any(fnmatch.fnmatchcase(packet.interface, each) for each in patterns)
    if name == "state":
        states = found[1].split(",")
        return lambda packet: ("new" if packet.first else "established") in states
    if name in ("type", "packet"):
        kind, unicast = found[1], "local" if name == "type" else "host"
        return lambda packet: kind == ("multicast" if packet.multicast else unicast)
    if name in ("syn", "no syn"):
        opens = name == "syn"
        return lambda packet: packet.protocol == "tcp" and packet.first is opens
    return lambda _packet: True  # numgen: it matches some packets


def _elements(text: str) -> list[str]:
    return [each.strip() for each in text.strip("{}").split(",") if each.strip()]


def _port_range(text: str) -> tuple[int, int] | None:
    low, _, high = text.partition("-")
    return (int(low), int(high if high.isdigit() else low)) if low.isdigit() else None


def _within(address: str, text: str) -> bool:
    low, _, high = text.partition("-")
    if not address:
        return False
    if not high and "/" not in text:  # most rules of a long list: nft prints addresses in one way
        return address.partition("%")[0] == text
    try:
        if high:
            return ipaddress.ip_address(low) <= ipaddress.ip_address(address) <= ipaddress.ip_address(high)  # type: ignore[operator]
        return ipaddress.ip_address(address) in ipaddress.ip_network(text, strict=False)
    except (ValueError, TypeError):  # the other family
        return False


def opening(
    chains: Sequence[Chain],
    needed: Iterable[tuple[Hook, Packet]],
    *,
    port: int,
    networks: Sequence[str],
    manager: Manager,
) -> list[str]:
    """Return the lines that let all of these packets pass; none if no rule that can be read drops one.

    An accept in one base chain does not override a drop in another one, so each chain that drops has a line of its own.

    Args:
        chains: of this host.
        needed: the packets, each with the hook where it comes.
        port: the UDP port of the discovery.
        networks: of the hosts of the job.
        manager: the program that keeps the rules.
    """
    opened = [structs.replace(chain, rules=list(chain.rules)) for chain in chains]
    lines = list[str]()
    for hook, packet in needed:
        allowed = [each for each in networks if (":" in each) == packet.ipv6]
        while allowed and (block := blocked(opened, packet, hook)) is not None:
            outgoing = hook == "output"
            more = allow(packet.protocol, port, allowed, manager=manager, block=block, outgoing=outgoing)
            if set(more) <= set(lines):
                break  # these lines do not let it pass
            lines = added(lines, more)
            block.chain.rules.insert(0, Rule(_accept(packet.protocol, port, allowed, outgoing=outgoing)))
    return lines


def added(lines: Iterable[str], more: Sequence[str]) -> list[str]:
    """Return the lines with some more, each once, and what ends them (firewalld's reload) at the end."""
    return [*(each for each in lines if each not in more), *more]


def allow(
    protocol: Protocol,
    port: int,
    networks: Sequence[str],
    *,
    manager: Manager,
    block: Block | None,
    outgoing: bool = False,
) -> list[str]:
    """Return the lines that let the discovery (UDP), or TCP on all ports, since the system chooses them, pass.

    Args:
        protocol: what is to pass.
        port: of the discovery.
        networks: of the hosts of the job, all of one family.
        manager: the program that keeps the rules.
        block: what drops the packets; None: the rules were not read, but their manager is known.
        outgoing: whether they are dropped when they are sent.
    """
    table = "" if block is None else f"{block.chain.family} {block.chain.table}"
    if (
        block is not None and table not in _TABLES[manager]
    ):  # what the manager accepts, another program's chain drops all the same
        rule = _accept(protocol, port, networks, outgoing=outgoing)
        return [f"nft insert rule {table} {block.chain.name} {rule}"]
    ipv6 = ":" in networks[0]
    if manager == "firewalld" and not outgoing:  # a port of a zone is open to every host, and a trusted source has all
        what = f"port port={port} protocol=udp" if protocol == "udp" else "protocol value=tcp"
        sources = (f"rule family={'ipv6' if ipv6 else 'ipv4'} source address={each}" for each in networks)
        lines = [f"firewall-cmd --permanent --add-rich-rule='{each} {what} accept'" for each in sources]
        return [*lines, "firewall-cmd --reload"]
    way, hook, flag = ("out ", "OUTPUT", "-d") if outgoing else ("", "INPUT", "-s")
    if manager == "ufw":
        to_port = f" to any port {port}" if protocol == "udp" else ""
        if protocol == "udp" and outgoing:
            return [f"ufw allow out proto udp{to_port}"]
        preposition = "to" if outgoing else "from"
        return [f"ufw allow {way}proto {protocol} {preposition} {each}{to_port}" for each in networks]
    to_port = f" --dport {port}" if protocol == "udp" else ""
    ends = [""] if protocol == "udp" and outgoing else [f" {flag} {each}" for each in networks]
    if manager == "firewalld":
        tool = f"firewall-cmd --permanent --direct --add-rule {'ipv6' if ipv6 else 'ipv4'} filter {hook} 0"
    else:
        tool = f"{'ip6tables' if ipv6 else 'iptables'} -I {hook}"
    reload = ["firewall-cmd --reload"] if manager == "firewalld" else []
    return [*(f"{tool} -p {protocol}{each}{to_port} -j ACCEPT" for each in ends), *reload]


def _accept(protocol: str, port: int, networks: Sequence[str], *, outgoing: bool) -> str:
    """Return the rule of nft(8). Datagrams that are sent go to multicast groups as well, so only their port counts."""
    what = f"udp dport {port}" if protocol == "udp" else "meta l4proto tcp"
    if protocol == "udp" and outgoing:
        return f"{what} accept"
    hosts = networks[0] if len(networks) == 1 else f"{{ {', '.join(networks)} }}"
    return f"{'ip6' if ':' in hosts else 'ip'} {'daddr' if outgoing else 'saddr'} {hosts} {what} accept"
