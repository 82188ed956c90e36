"""Which rule drops a packet: listings as nft prints them, and the line that mends each."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from typing import get_args

import pytest
from msgspec.structs import replace

from mingle.diagnostics import firewall
from mingle.diagnostics.firewall import (
    PROTOCOLS,
    Block,
    Chain,
    Hook,
    Manager,
    Packet,
    Protocol,
    allow,
    blocked,
    opening,
    parse,
)
from tests.lab.lab import why_unavailable

MULTICAST = Packet("udp", 29499, "239.192.1.1", "eth0")
TCP = Packet("tcp", 40000, "", "eth0")
FROM_A_NEIGHBOR = Packet("tcp", 40000, "", "eth0", "10.0.0.7")


def listing(*rules: str, policy: str = "accept", family: str = "inet", more: str = "") -> str:
    body = "\n".join(f"\t\t{rule}" for rule in rules)
    head = f"\t\ttype filter hook input priority filter; policy {policy};"
    return f"table {family} filter {{\n{more}\tchain input {{\n{head}\n{body}\n\t}}\n}}\n"


UFW = """\tchain ufw-user-input {
\t\ttcp dport 22 counter packets 3 bytes 180 accept
\t}
\tchain ufw-reject {
\t\tcounter packets 9 bytes 540 reject with icmp type port-unreachable
\t}
"""


UFW_NOT_LOCAL = """\tchain ufw-not-local {
\t\tfib daddr type local counter packets 3 bytes 180 return
\t\tfib daddr type multicast counter packets 3 bytes 180 return
\t\tcounter packets 0 bytes 0 drop
\t}
"""


@pytest.mark.parametrize(
    ("text", "packet", "rule"),
    [
        ("", MULTICAST, None),
        (listing(), MULTICAST, None),
        (listing("udp dport 29499 drop"), MULTICAST, "udp dport 29499 drop"),
        (listing("udp dport 29499 drop"), TCP, None),
        (listing("udp dport { 53, 29000-30000 } counter packets 1 bytes 2 drop"), MULTICAST, "udp dport {"),
        (listing("udp dport 29498 drop"), MULTICAST, None),
        (listing("meta pkttype multicast udp dport 29499 drop"), MULTICAST, "meta pkttype multicast"),
        (listing("meta pkttype multicast drop"), Packet("udp", 29499), None),
        (listing("ip daddr 224.0.0.0/4 drop"), MULTICAST, "ip daddr"),
        (listing("ip daddr 224.0.0.0/24 drop"), MULTICAST, None),
        (listing("ip daddr 239.0.0.0-239.255.255.255 drop"), MULTICAST, "ip daddr"),
        (listing("ip daddr @groups drop"), MULTICAST, None),
        (listing("ip6 daddr ff00::/8 drop"), MULTICAST, None),
        (listing('iifname "eth0" drop'), MULTICAST, "iifname"),
        (listing('iifname "lo" accept', policy="drop"), MULTICAST, ""),
        (listing("ct state established,related accept", policy="drop"), TCP, ""),
        (listing("udp dport 29499 accept", policy="drop"), MULTICAST, None),
        (listing("udp dport 29499 accept", "drop"), MULTICAST, None),
        (listing("meta l4proto tcp reject with tcp reset"), TCP, "meta l4proto tcp"),
        (listing("meta l4proto 6 drop"), TCP, "meta l4proto 6"),
        (listing("meta l4proto { 17, 132 } drop"), MULTICAST, "meta l4proto {"),
        (listing("meta l4proto 17 drop"), TCP, None),
        (listing("ip saddr 10.0.0.9 meta l4proto tcp drop"), TCP, None),
        (listing("ip saddr 10.0.0.9 meta l4proto tcp drop"), FROM_A_NEIGHBOR, None),
        (listing("ip saddr { 10.0.0.7, 10.0.1.0/24 } tcp dport 1-65535 drop"), FROM_A_NEIGHBOR, "ip saddr {"),
        (listing("ip saddr 10.0.0.0/24 accept", "tcp dport 32768-60999 ct state new drop"), FROM_A_NEIGHBOR, None),
        (listing("ip saddr 10.0.0.0/24 meta l4proto tcp accept", policy="drop"), FROM_A_NEIGHBOR, None),
        (listing("meta l4proto { tcp, udp } drop"), TCP, "meta l4proto {"),
        (listing("meta l4proto udp numgen random mod 100 < 30 drop"), MULTICAST, "numgen"),
        (listing("jump ufw-user-input", "jump ufw-reject", more=UFW), TCP, "reject with icmp"),
        (listing("tcp flags & (syn | ack) == syn drop"), TCP, "tcp flags"),
        (listing("tcp flags syn / syn,ack drop"), TCP, "tcp flags"),
        (listing("tcp flags & (fin | rst) == rst drop"), TCP, None),
        (listing("tcp flags & (syn | ack) != syn drop"), TCP, None),
        (listing("tcp flags & (syn | ack) != syn drop"), replace(TCP, first=False), "!= syn drop"),
        (listing("tcp flags != syn / syn,ack drop"), replace(TCP, first=False), "!= syn / syn,ack drop"),
        (listing("tcp flags ! syn drop"), replace(TCP, first=False), "! syn drop"),
        (listing("tcp flags syn / syn,ack accept", "drop"), TCP, None),
        (listing("tcp flags syn / syn,ack accept", "drop"), replace(TCP, first=False), "drop"),
        (listing("ct state established drop"), replace(TCP, first=False), "ct state established"),
        (listing("ct state established,related accept", policy="drop"), replace(TCP, first=False), None),
        (listing("jump nowhere"), TCP, None),
        # What can't be read may let the packet pass, and then nothing that follows drops it.
        (listing("ip saddr @ok accept", policy="drop"), TCP, None),
        (listing("ip saddr @bad drop", "tcp dport 1-65535 drop"), TCP, "tcp dport 1-65535"),
        (listing("ip saddr @bad reject", "tcp dport 1-65535 drop"), TCP, "tcp dport 1-65535"),
        (listing("tcp dport vmap { 22 : accept, 1024-65535 : accept }", policy="drop"), TCP, None),
        (listing("jump nowhere", policy="drop"), TCP, None),
        (listing("meta mark 0x1 accept", policy="drop"), TCP, None),
        (listing("limit rate 100/second accept", "drop"), TCP, None),
        (listing("meta mark set 0x1", policy="drop"), TCP, ""),
        (listing('iifname "eth*" accept', policy="drop"), TCP, None),
        (listing('iifname != "wan0" accept', policy="drop"), TCP, None),
        (listing("ct state != new accept", policy="drop"), TCP, None),
        (listing("icmp type echo-request accept", policy="drop"), TCP, ""),
        (listing("ip saddr 10.0.0.7 return", "drop"), FROM_A_NEIGHBOR, None),
        (listing("jump checked", "drop", more="\tchain checked {\n\t\treturn\n\t}\n"), TCP, "drop"),
        (listing("goto checked", "accept", policy="drop", more="\tchain checked {\n\t\tcounter\n\t}\n"), TCP, ""),
        (listing("jump ufw-not-local", more=UFW_NOT_LOCAL), TCP, None),
        (listing("jump ufw-not-local", more=UFW_NOT_LOCAL), MULTICAST, None),
        (listing("ip protocol tcp drop"), Packet("tcp", 4000, "fd00::1"), None),
        (listing("drop").replace("chain", "flags dormant\n\tchain", 1), TCP, None),
        (listing("drop", family="ip6"), MULTICAST, None),
        (listing("drop", family="bridge"), MULTICAST, None),
    ],
)
def test_the_rule_that_drops(text: str, packet: Packet, rule: str | None) -> None:
    found = blocked(parse(text), packet)
    if rule is None:
        assert found is None
    else:
        assert found is not None
        assert rule in found.rule if rule else not found.rule
        assert (rule or "policy drop") in str(found)


def test_chains_that_jump_in_a_circle_end() -> None:
    assert blocked(parse(listing("jump a", more="\tchain a {\n\t\tjump a\n\t}\n")), TCP) is None


def test_a_rule_is_read_once_however_many_packets_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of Kubernetes has tens of thousands, and a rank has two seconds for all of its peers."""
    read = []
    monkeypatch.setattr(firewall, "without_noise", lambda text: read.append(text) or text)
    chains = parse(listing(*(f"ip saddr 10.1.0.{number} drop" for number in range(100))))
    found = {str(blocked(chains, Packet("tcp", 40000, "", "eth0", f"10.1.0.{number}"))) for number in range(100)}
    assert len(found) == len(read) == 100


RICH_RULE = "firewall-cmd --permanent --add-rich-rule='rule family=ipv4 source address=10.0.0.0/24 {} accept'"
DIRECT = "firewall-cmd --permanent --direct --add-rule ipv6 filter OUTPUT 0 -p {} -j ACCEPT"
INPUT = "iptables -I INPUT -p {} -j ACCEPT"
NFT = "nft insert rule ip nat INPUT {} accept"
NETWORKS = {False: ["10.0.0.0/24"], True: ["fd00::/64"]}


@pytest.mark.parametrize(
    ("manager", "outgoing", "ipv6", "line", "udp", "tcp"),
    [
        ("nft", False, False, NFT, "ip saddr 10.0.0.0/24 udp dport 29499", "ip saddr 10.0.0.0/24 meta l4proto tcp"),
        ("nft", True, True, NFT, "udp dport 29499", "ip6 daddr fd00::/64 meta l4proto tcp"),
        ("ufw", False, False, "ufw allow proto {}", "udp from 10.0.0.0/24 to any port 29499", "tcp from 10.0.0.0/24"),
        ("ufw", True, False, "ufw allow out proto {}", "udp to any port 29499", "tcp to 10.0.0.0/24"),
        ("iptables", False, False, INPUT, "udp -s 10.0.0.0/24 --dport 29499", "tcp -s 10.0.0.0/24"),
        ("iptables", True, True, "ip6tables -I OUTPUT -p {} -j ACCEPT", "udp --dport 29499", "tcp -d fd00::/64"),
        ("firewalld", False, False, RICH_RULE, "port port=29499 protocol=udp", "protocol value=tcp"),
        ("firewalld", True, True, DIRECT, "udp --dport 29499", "tcp -d fd00::/64"),
    ],
)
def test_the_lines_that_each_program_takes(
    manager: Manager, outgoing: bool, ipv6: bool, line: str, udp: str, tcp: str
) -> None:
    foreign = Block(Chain("ip", "nat", "INPUT"), "drop") if manager == "nft" else None
    expected: dict[Protocol, str] = {"udp": udp, "tcp": tcp}
    for protocol, rule in expected.items():
        lines = allow(protocol, 29499, NETWORKS[ipv6], manager=manager, block=foreign, outgoing=outgoing)
        assert lines == [line.format(rule)] + ["firewall-cmd --reload"] * (manager == "firewalld")


@pytest.mark.parametrize("outgoing", [False, True], ids=["in", "out"])
@pytest.mark.parametrize("block", [None, Block(Chain("inet", "own", "c"), "drop")], ids=["its table", "another's"])
@pytest.mark.parametrize("manager", get_args(Manager))
def test_no_line_trusts_a_network_in_every_protocol(manager: Manager, block: Block | None, outgoing: bool) -> None:
    if block is None and manager == "nft":
        return  # without a chain there is no line of nft
    for protocol, networks in itertools.product(PROTOCOLS, NETWORKS.values()):
        lines = allow(protocol, 29499, networks, manager=manager, block=block, outgoing=outgoing)
        assert all(protocol in line for line in lines if line != "firewall-cmd --reload"), lines


def test_firewalld_reloads_after_the_last_line() -> None:
    chains = parse(listing(policy="drop", family="inet").replace("filter {", "firewalld {", 1))
    lines = opening(chains, NEEDED, port=29499, networks=NETWORKS[False], manager="firewalld")
    assert lines == [RICH_RULE.format(each) for each in ("port port=29499 protocol=udp", "protocol value=tcp")] + [
        "firewall-cmd --reload"
    ]


@pytest.mark.parametrize("manager", ["ufw", "iptables", "firewalld"])
def test_a_program_can_not_allow_what_another_table_drops(manager: Manager) -> None:
    other = Block(Chain("inet", "nu2", "cinput"), "drop")
    (line,) = allow("tcp", 29499, NETWORKS[False], manager=manager, block=other)
    assert line == "nft insert rule inet nu2 cinput ip saddr 10.0.0.0/24 meta l4proto tcp accept"
    own = Block(Chain("ip", "filter", "INPUT"), "drop")
    assert not allow("tcp", 29499, NETWORKS[False], manager=manager, block=own)[0].startswith("nft")


NEEDED: list[tuple[Hook, Packet]] = [
    ("input", Packet("udp", 29499, "239.192.1.1", "eth0", "10.0.0.7")),
    ("input", Packet("tcp", 32768, "10.0.0.5", "eth0", "10.0.0.7")),
    ("input", Packet("tcp", 60999, "10.0.0.5", "eth0", "10.0.0.7")),
    ("output", Packet("udp", 29499, "239.192.1.1", "eth0", "10.0.0.5")),
    ("output", Packet("tcp", 40000, "10.0.0.7", "eth0", "10.0.0.5")),
]
ELSEWHERE = """table ip old {
\tchain guard {
\t\tip protocol tcp drop
\t}
\tchain in {
\t\ttype filter hook input priority -5; policy accept;
\t\tjump guard
\t}
\tchain out {
\t\ttype filter hook output priority 0; policy drop;
\t}
}
"""


@pytest.mark.skipif(why_unavailable() is not None, reason="nft needs root and a network namespace of its own")
@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param(listing("udp dport 29499 drop"), 1, id="one rule"),
        pytest.param(listing(policy="drop"), 2, id="a policy"),
        pytest.param(listing("tcp dport 1-40000 drop", "tcp dport 50000-65535 reject"), 1, id="two rules of one chain"),
        pytest.param(listing(policy="drop") + ELSEWHERE, 5, id="two tables, and what goes out"),
    ],
)
def test_lines_that_are_pasted_open_every_chain_that_drops(text: str, count: int) -> None:
    """What nft lists is what is parsed here, and it takes the lines that it is told to type."""

    def chains(*lines: str) -> list[Chain]:
        script = "\n".join([f"nft -f - <<'END'\n{text}END", *lines, "nft list ruleset"])
        done = subprocess.run(
            ["unshare", "--net", "sh", "-ec", script], capture_output=True, text=True, check=True, timeout=60
        )
        return parse(done.stdout)

    networks = ["10.0.0.0/24", "10.1.0.0/16"]
    lines = opening(chains(), NEEDED, port=29499, networks=networks, manager="nft")
    assert len(lines) == count
    mended = chains(*lines)
    assert [blocked(mended, packet, hook) for hook, packet in NEEDED] == [None] * len(NEEDED)
    assert opening(mended, NEEDED, port=29499, networks=networks, manager="nft") == []
    stranger = Packet("tcp", 40000, "10.0.0.5", "eth0", "192.0.2.66")
    assert (blocked(mended, stranger) is None) == (blocked(chains(), stranger) is None)


@pytest.mark.skipif(why_unavailable() is not None, reason="nft needs root and a network namespace of its own")
@pytest.mark.skipif(shutil.which("iptables-nft") is None, reason="iptables-nft is not installed")
def test_rules_that_iptables_wrote_are_read() -> None:
    """ufw's rules are such, and only the text of nft has them: `nft -j` says "xt" and the name of a match."""
    script = """
        iptables-nft -N not-local
        iptables-nft -A INPUT -i lo -j ACCEPT
        iptables-nft -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
        iptables-nft -A INPUT -m comment --comment ssh -p tcp --dport 22 -j ACCEPT
        iptables-nft -A INPUT -j not-local
        iptables-nft -A not-local -m addrtype --dst-type LOCAL -j RETURN
        iptables-nft -A not-local -m limit --limit 3/min -j LOG --log-prefix "[UFW BLOCK] "
        iptables-nft -A not-local -j DROP
        iptables-nft -A INPUT -p tcp -m multiport --dports 1024:60000,62000 -j REJECT
        nft list ruleset
    """
    done = subprocess.run(["unshare", "--net", "sh", "-ec", script], capture_output=True, text=True, check=True)
    chains = parse(done.stdout)
    found = blocked(chains, FROM_A_NEIGHBOR)
    assert found is not None
    assert "dport { 1024-60000, 62000 }" in found.rule
    assert blocked(chains, replace(FROM_A_NEIGHBOR, first=False)) is None
    assert blocked(chains, replace(FROM_A_NEIGHBOR, port=22)) is None
    assert str(blocked(chains, MULTICAST)).endswith("drop` of chain ip filter not-local")


def test_lines_that_do_not_help_are_not_repeated() -> None:
    outside: list[tuple[Hook, Packet]] = [("input", Packet("tcp", 40000, "10.0.0.5", "eth0", "192.0.2.66"))]
    assert len(opening(parse(listing("drop")), outside, port=1, networks=["10.0.0.0/24"], manager="nft")) == 1
