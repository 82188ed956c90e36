"""Which rule drops a packet: listings as nft prints them, and the line that mends each."""

from __future__ import annotations

import subprocess

import pytest

from mingle.diagnostics import firewall
from mingle.diagnostics.firewall import Block, Packet, allow_tcp, allow_udp, blocked, parse
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
        (listing(allow_tcp(["10.0.0.0/24"]).split("input ")[1], policy="drop"), FROM_A_NEIGHBOR, None),
        (listing("meta l4proto { tcp, udp } drop"), TCP, "meta l4proto {"),
        (listing("meta l4proto udp numgen random mod 100 < 30 drop"), MULTICAST, "numgen"),
        (listing("jump ufw-user-input", "jump ufw-reject", more=UFW), TCP, "reject with icmp"),
        (listing("tcp flags & (syn | ack) == syn drop"), TCP, "tcp flags"),
        (listing("tcp flags syn / syn,ack drop"), TCP, "tcp flags"),
        (listing("tcp flags & (fin | rst) == rst drop"), TCP, None),
        (listing("jump nowhere"), TCP, None),
        # What can't be read may let the packet pass, and then nothing that follows drops it.
        (listing("ip saddr @ok accept", policy="drop"), TCP, None),
        (listing("ip saddr @bad drop", "tcp dport 1-65535 drop"), TCP, "tcp dport 1-65535"),
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


def block() -> Block:
    found = blocked(parse(listing("udp dport 29499 drop", family="ip")), MULTICAST)
    assert found is not None
    return found


def test_fix_for_a_blocking_rule() -> None:
    assert allow_udp(29499, block=block()) == "nft insert rule ip filter input udp dport 29499 accept"
    assert allow_udp(29499, manager="ufw") == "ufw allow 29499/udp"
    assert "firewall-cmd --permanent --add-port=29499/udp" in allow_udp(29499, manager="firewalld")
    assert allow_udp(29499, manager="iptables") == "iptables -I INPUT -p udp --dport 29499 -j ACCEPT"
    assert allow_udp(29499, outgoing=True) == "nft insert rule inet filter output udp dport 29499 accept"
    assert allow_udp(29499, manager="ufw", outgoing=True) == "ufw allow out 29499/udp"
    assert "-I OUTPUT " in allow_udp(29499, manager="iptables", outgoing=True)
    assert "filter OUTPUT 0 -p udp --dport 29499" in allow_udp(29499, manager="firewalld", outgoing=True)
    assert allow_tcp(["10.0.0.0/24"]).endswith("ip saddr 10.0.0.0/24 meta l4proto tcp accept")
    assert "ip6 saddr fd00::/64" in allow_tcp(["fd00::/64"])
    assert allow_tcp(["10.0.0.0/24"], manager="ufw") == "ufw allow proto tcp from 10.0.0.0/24"
    assert "SUBNET" in allow_tcp([], manager="iptables")
    assert allow_tcp(["fd00::/64"], outgoing=True).endswith("output ip6 daddr fd00::/64 meta l4proto tcp accept")
    assert " ipv6 " in allow_tcp(["fd00::/64"], manager="firewalld", outgoing=True)
    told = {each: allow_tcp(["10.0.0.0/24"], manager="iptables", outgoing=each) for each in (False, True)}
    assert (" -s 10.0.0.0/24 " in told[False], " -d 10.0.0.0/24 " in told[True]) == (True, True)


@pytest.mark.skipif(why_unavailable() is not None, reason="nft needs root and a network namespace of its own")
def test_fix_really_opens_the_firewall() -> None:
    """What nft lists is what is parsed here, and it takes the line that it is told to type."""
    script = f"nft -f - <<'END'\n{listing('udp dport 29499 drop')}END\nLINES\nnft list ruleset"

    def chains(*lines: str) -> str:
        command = script.replace("LINES", "\n".join(lines))
        done = subprocess.run(
            ["unshare", "--net", "sh", "-ec", command], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    found = blocked(parse(chains()), MULTICAST)
    assert found is not None
    assert blocked(parse(chains(allow_udp(29499, block=found))), MULTICAST) is None
    assert blocked(parse(chains(allow_tcp(["10.0.0.0/8"], block=found))), MULTICAST) is not None
    mended = chains("nft add rule inet filter input tcp dport 40000 drop", allow_tcp(["10.0.0.0/8"], block=found))
    assert blocked(parse(mended), TCP) is not None
    assert blocked(parse(mended), FROM_A_NEIGHBOR) is None
