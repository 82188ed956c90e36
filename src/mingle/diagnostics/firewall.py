"""Find the rule of this host's firewall that drops a packet, and the command that lets the packet through.

It reads the listing of ``nft list ruleset`` (nft(8)), which also shows the rules of a current iptables. It does not
evaluate everything: a rule that it can't read is never named, and where such a rule may let the packet pass, nothing
that follows it is. Other modules measure whether packets are dropped; this one only names the rule.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct, field

Manager = Literal["nft", "ufw", "firewalld", "iptables"]
Verdict = Literal["accept", "drop", "reject"]

_CHAIN = re.compile(r"chain (\S+) \{")
_TABLE = re.compile(r"table (\S+) (\S+) \{")
_HOOK = re.compile(r"type filter hook (\S+) priority")
_POLICY = re.compile(r"policy (accept|drop);")
_JUMP = re.compile(r"\b(jump|goto) (\S+)")
_VERDICT = re.compile(r"\b(accept|drop|reject|return|vmap)\b")
_OTHER_PROTOCOLS = re.compile(r"\b(icmp|icmpv6|ipv6-icmp|igmp|sctp|dccp|esp|ah|gre)\b")
_NOISE = re.compile(
    r'counter packets \d+ bytes \d+|comment ".*?"|# .*$|reject with \S+( type)?( \S+)?$|log .*?(?=accept|drop|reject|$)'
)
# A negation, or a set whose elements are listed elsewhere.
_UNREAD = re.compile("!=|@")
# nft prints numbers on a host without /etc/protocols, as in minimal images.
_NUMBERS = {"tcp": "6", "udp": "17"}
_MATCHES: dict[str, re.Pattern[str]] = {
    "protocol": re.compile(r"(?:meta l4proto|ip protocol|ip6 nexthdr) (\{[^}]*\}|\S+)"),
    "port": re.compile(r"(?:(udp|tcp|th)) dport (\{[^}]*\}|\S+)"),
    "destination": re.compile(r"ip6? daddr (\{[^}]*\}|\S+)"),
    "source": re.compile(r"ip6? saddr (\{[^}]*\}|\S+)"),
    "packet": re.compile(r"(?:meta )?pkttype (\S+)"),
    "interface": re.compile(r"(?:meta )?(?:iifname|iif|oifname|oif) (\{[^}]*\}|\S+)"),
    "state": re.compile(r"ct state (\S+)"),
    "syn": re.compile(r"tcp flags (?:& \([^)]*\) == syn|syn(?: / \S+)?)(?= |$)"),
    "type": re.compile(r"fib daddr type (\S+)"),
    "dice": re.compile(r"numgen random mod \d+ < \d+"),
}


class Packet(Struct, frozen=True):
    """The parts of a packet that rules match."""

    protocol: Literal["udp", "tcp"]
    port: int
    """The destination port."""
    destination: str = ""
    """The destination address; empty for this host's own."""
    interface: str = ""
    source: str = ""
    """The source address; empty if it is not known, and then no rule for certain sources matches."""

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
        """Return whether it matches the first packet of a connection; None: it has parts that are not read here."""
        if not self.words:
            self._read()
        for met in self._conditions:
            if not met(packet):
                return False
        return True if self._whole else None

    def _read(self) -> None:
        self.words = rest = without_noise(self.text)
        if _OTHER_PROTOCOLS.search(rest):
            self._conditions = [lambda _packet: False]
            return
        if "vmap" in rest:
            return
        unread = bool(_UNREAD.search(rest))
        for name, pattern in _MATCHES.items():
            if found := list(pattern.finditer(rest)):
                self._conditions += [_condition(name, each) for each in found if not _UNREAD.search(each[0])]
                rest = pattern.sub("", rest)
        self._whole = not (unread or _JUMP.sub("", _VERDICT.sub("", rest)).split())


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
        elif found := _TABLE.match(line):
            family, table = found[1], found[2]
        elif found := _CHAIN.match(line):
            inside = Chain(family, table, found[1])
            chains.append(inside)
        elif line == "}":
            inside = None
        elif inside is not None:
            if hook := _HOOK.search(line):
                inside.hook = hook[1]
                policy = _POLICY.search(line)
                inside.policy = policy[1] if policy else "accept"
            elif line:
                inside.rules.append(Rule(line))
    return chains


def blocked(chains: Sequence[Chain], packet: Packet, hook: str = "input") -> Block | None:
    """Return what drops a packet at a hook, or None. Each base chain can drop what the others accept."""
    by_name = {(chain.family, chain.table, chain.name): chain for chain in chains}
    for chain in chains:
        if chain.hook == hook and chain.family in {"inet", "ip", "ip6"} and _meets(chain.family, packet):
            found = _walk(chain, packet, by_name, depth=0)
            if isinstance(found, Block):
                return found
            if found is None and chain.policy == "drop":
                return Block(chain, "")
    return None


def without_noise(rule: str) -> str:
    """Return a rule without its counters and comments, and without the words of a log entry or of a rejection."""
    rest = _NOISE.sub(lambda match: "reject" if match[0].startswith("reject") else "", rule)
    return " ".join(rest.split())


def _meets(family: str, packet: Packet) -> bool:
    return family == "inet" or (family == "ip6") == packet.ipv6


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
        jump, verdict = _JUMP.search(rule.words), _VERDICT.search(rule.words)
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
        new = "new" in found[1].split(",")
        return lambda _packet: new
    if name in ("type", "packet"):
        kind, unicast = found[1], "local" if name == "type" else "host"
        return lambda packet: kind == ("multicast" if packet.multicast else unicast)
    if name == "syn":
        return lambda packet: packet.protocol == "tcp"
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


def allow_udp(port: int, *, manager: Manager = "nft", block: Block | None = None, outgoing: bool = False) -> str:
    """Return the command that allows the UDP port of the discovery.

    Args:
        port: the port.
        manager: the program that keeps the rules.
        block: what drops the datagrams, if it is known.
        outgoing: whether they are dropped when they are sent.
    """
    hook, out = ("output", "out ") if outgoing else ("input", "")
    chain = _place(block, hook)
    # firewalld has ports for what comes in alone.
    rule = f"--direct --add-rule ipv4 filter OUTPUT 0 -p udp --dport {port} -j ACCEPT"
    firewalld = rule if outgoing else f"--add-port={port}/udp"
    return {
        "ufw": f"ufw allow {out}{port}/udp",
        "firewalld": f"firewall-cmd --permanent {firewalld} && firewall-cmd --reload",
        "iptables": f"iptables -I {hook.upper()} -p udp --dport {port} -j ACCEPT",
        "nft": f"nft insert rule {chain} udp dport {port} accept",
    }[manager]


def allow_tcp(
    networks: Sequence[str], *, manager: Manager = "nft", block: Block | None = None, outgoing: bool = False
) -> str:
    """Return the command that allows TCP from the hosts of a job, on all ports: the system chooses them.

    Args:
        networks: of the hosts; the first one is allowed.
        manager: the program that keeps the rules.
        block: what drops the packets, if it is known.
        outgoing: whether TCP to these hosts is to be allowed.
    """
    chain = _place(block, "output" if outgoing else "input")
    network = networks[0] if networks else "SUBNET-OF-THE-JOB"
    family = "ip6" if ":" in network else "ip"
    if outgoing:
        version = "ipv6" if family == "ip6" else "ipv4"
        return {
            "ufw": f"ufw allow out proto tcp to {network}",
            "firewalld": f"firewall-cmd --direct --add-rule {version} filter OUTPUT 0 -p tcp -d {network} -j ACCEPT",
            "iptables": f"iptables -I OUTPUT -p tcp -d {network} -j ACCEPT",
            "nft": f"nft insert rule {chain} {family} daddr {network} meta l4proto tcp accept",
        }[manager]
    return {
        "ufw": f"ufw allow proto tcp from {network}",
        "firewalld": f"firewall-cmd --permanent --zone=trusted --add-source={network} && firewall-cmd --reload",
        "iptables": f"iptables -I INPUT -p tcp -s {network} -j ACCEPT",
        "nft": f"nft insert rule {chain} {family} saddr {network} meta l4proto tcp accept",
    }[manager]


def _place(block: Block | None, hook: str) -> str:
    return f"inet filter {hook}" if block is None else f"{block.chain.family} {block.chain.table} {block.chain.name}"
