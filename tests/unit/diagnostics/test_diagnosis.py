"""What facts mean: a healthy machine gives no WARN and no FAIL, and each fault the one that names it."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from mingle.diagnostics import CheckStatus, Finding, worst
from mingle.diagnostics.diagnosis import Facts, Holder, examine, job_hosts, open_firewall, troubles
from mingle.diagnostics.firewall import LOOK_AS_ROOT, parse

HEALTHY = Facts(
    port=29499,
    group="239.192.1.1",
    used=["eth0 10.0.0.5/24"],
    used_names=["eth0"],
    networks=["10.0.0.0/24"],
    multicasts_on=frozenset({"eth0"}),
    holders=[Holder(12, "python train.py", 0, mingle=True)],
    default_route=True,
    memberships=20,
    rp_filter={"eth0": 1},
    hostname="node5",
    hostname_addresses=["10.0.0.5"],
)
DROPS = parse("table inet f {\nchain i {\ntype filter hook input priority filter; policy drop;\n}\n}\n")
ALLOWS_NEIGHBORS = parse(
    "table inet f {\nchain i {\ntype filter hook input priority filter; policy drop;\n"
    "meta l4proto udp accept\nip saddr 10.0.0.0/24 accept\n}\n}\n"
)
SENDS_NOTHING = parse("table inet f {\nchain o {\ntype filter hook output priority filter; policy drop;\n}\n}\n")
STRANGER = Holder(99, "telemetry", 0)


def faults(facts: Facts) -> list[tuple[str, CheckStatus]]:
    return [(each.name, each.status) for each in examine(facts) if each.status is not CheckStatus.PASS]


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        replace(HEALTHY, unused=["eth1 10.1.0.5/24"], named_by="MINGLE_INTERFACE"),
        replace(HEALTHY, group="", networks=["fd00::/64"], hostname_addresses=["fd00::5"]),
        replace(HEALTHY, rp_filter={}, memberships=None, default_route=None, hostname_addresses=[]),
        replace(HEALTHY, multicasts_on=None),
        replace(HEALTHY, ttl=0, peers_named=True),
        replace(HEALTHY, family="6"),
        replace(HEALTHY, rp_filter={"eth0": 2}, rp_drops=5),
        replace(HEALTHY, only_loopback=True, named_by="MINGLE_INTERFACE", multicasts_on=frozenset()),
        replace(HEALTHY, chains=ALLOWS_NEIGHBORS, addresses=["10.0.0.1"]),  # a neighbor is not the first of the subnet
    ],
)
def test_a_healthy_machine(facts: Facts) -> None:
    assert faults(facts) == []
    names = [each.name for each in examine(facts)]
    assert len(names) == len(set(names))


FAIL, WARN = CheckStatus.FAIL, CheckStatus.WARN


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        (
            {"interface_problem": ("no such thing", "name another")},
            "interfaces",
            FAIL,
            ("no such thing", "name another"),
        ),
        ({"only_loopback": True}, "interfaces", WARN, ("only loopback", "ip link set")),
        (
            {"only_loopback": True, "named_by": "MINGLE_INTERFACE", "unused": ["eth0 10.0.0.5/24"]},
            "interfaces",
            WARN,
            ("names loopback alone", "unset MINGLE_INTERFACE"),
        ),
        ({"ttl": 0}, "multicast", WARN, ("do not leave this machine", "unset MINGLE_TTL")),
        *[
            ({"lost": {"eth0": what}, "had_carrier": True, "default_route": False}, "interfaces", FAIL, (what, fix))
            for what, fix in [
                ("is down", "ip link set dev eth0 up"),
                ("has lost its addresses", "ip address add ADDRESS dev eth0"),
                ("has gone", "look why eth0 was removed"),
                ("has no carrier", "the cable of eth0"),
            ]
        ],
        ({"lost": {"eth0": "has no carrier"}}, "interfaces", WARN, ("offline: eth0 has no carrier", "the cable")),
        ({"left_out": ["veth1"]}, "interfaces", WARN, ("no room for 1 interface (veth1)", "ulimit -n")),
        (
            {"failures": {"eth0 IPv4": "EMFILE: x"}},
            "interfaces",
            FAIL,
            ("no file descriptor", "eth0 IPv4", "ulimit -n"),
        ),
        ({"default_route": False}, "routes", WARN, ("no default route", "10.0.0.0/24")),
        ({"send_errors": {"ENETUNREACH": 3}}, "routes", FAIL, ("3 datagrams", "unreachable", "ip route add")),
        (
            {"send_errors": {"ENETUNREACH": 3}, "unicasts_sent": 3},
            "routes",
            WARN,
            ("3 datagrams", "unreachable", "ip route add"),
        ),
        ({"send_errors": {"ENETUNREACH": 3}, "only_loopback": True}, "interfaces", WARN, ("only loopback",)),
        ({"relay_failure": "all 64 names are taken"}, "relay", WARN, ("all 64 names are taken", "MINGLE_PORT")),
        ({"relay_failure": "no name: Permission denied"}, "relay", WARN, ("Permission denied", "AppArmor")),
        ({"holders": [STRANGER]}, "port", WARN, ("pid 99 (telemetry)", "unicast", "MINGLE_PORT")),
        (
            {"holders": [STRANGER], "failures": {"eth0 IPv4": "EADDRINUSE: in use"}},
            "port",
            FAIL,
            ("held by pid 99", "eth0 IPv4", "ss -ulpn 'sport = :29499'"),
        ),
        ({"failures": {"eth0 IPv4": "EADDRINUSE: in use"}}, "port", FAIL, ("another program",)),
        ({"memberships": 1}, "memberships", FAIL, ("igmp_max_memberships=1", "sysctl -w")),
        ({"failures": {"eth1 IPv4": "ENOBUFS: full"}}, "memberships", FAIL, ("eth1 IPv4", "ENOBUFS")),
        ({"multicasts_on": frozenset()}, "multicast", FAIL, ("this host's firewall", LOOK_AS_ROOT)),
        (
            {"multicasts_on": frozenset(), "manager": "ufw"},
            "multicast",
            FAIL,
            ("not even our own", "ufw allow proto udp from 10.0.0.0/24 to any port 29499; ufw allow proto tcp from"),
        ),
        ({"send_errors": {"EPERM": 2}}, "multicast", FAIL, ("refused to send 2", "EPERM", LOOK_AS_ROOT)),
        (
            {"send_errors": {"EPERM": 2}, "chains": SENDS_NOTHING},
            "multicast",
            FAIL,
            ("refused to send 2", "policy drop of chain inet f o", "nft insert rule inet f o udp dport 29499 accept"),
        ),
        ({"chains": DROPS}, "tcp", WARN, ("policy drop", "saddr 10.0.0.0/24 meta l4proto tcp accept")),
        ({"rp_drops": 7}, "rp_filter", FAIL, ("dropped 7", "sysctl -w net.ipv4.conf.eth0.rp_filter=2")),
        (
            {"rp_drops": 7, "rp_filter": {"eth0.100": 1}},
            "rp_filter",
            FAIL,
            ("eth0.100", "sysctl -w net.ipv4.conf.eth0/100.rp_filter=2"),
        ),
        (
            {"folders": {"dir:/shared": ("does not exist", "mount its file system")}},
            "folder",
            FAIL,
            ("dir:/shared in MINGLE_PEERS does not exist", "mount its file system"),
        ),
        ({"unresolved": {"head": "unknown"}}, "peers", FAIL, ("'head' in MINGLE_PEERS", "getent hosts head")),
        (
            {"names_itself": True, "peers_named": True},
            "peers",
            WARN,
            ("MINGLE_PEERS leads to this", "name all of them"),
        ),
        (
            {"unresolved": {"digits": "unknown"}, "surroundings": "pod", "peers_named": True},
            "peers",
            FAIL,
            ("headless Service", "selector", "`subdomain`", "getent hosts digits"),
        ),
        ({"surroundings": "pod"}, "surroundings", WARN, ("a Kubernetes pod", "MINGLE_PEERS", "headless Service")),
        ({"surroundings": "aws"}, "surroundings", WARN, ("a machine of aws", "MINGLE_PEERS")),
        (
            {"silent_servers": ["10.0.0.5"], "look_up_seconds": 10.0},
            "names",
            WARN,
            ("10.0.0.5 does not answer name queries: torch waits 10 s", "/etc/hosts"),
        ),
        ({"versions": {"version 2": "10.0.0.9"}}, "version", WARN, ("10.0.0.9 speaks version 2", "same version")),
        ({"hostname_addresses": ["127.0.1.1"]}, "hostname", WARN, ("127.0.1.1", "/etc/hosts")),
        ({"hostname_problem": "not known", "hostname_addresses": []}, "hostname", WARN, ("not known", "/etc/hosts")),
        ({"master": "MASTER_ADDR=1.2.3.4"}, "environment", WARN, ("MASTER_ADDR=1.2.3.4", "unset")),
        ({"environment_problems": [("half a rank", "give both")]}, "environment", FAIL, ("half a rank", "give both")),
    ],
)
def test_a_fault_is_named_and_no_other(
    changes: dict[str, object], name: str, status: CheckStatus, words: tuple[str, ...]
) -> None:
    facts = replace(HEALTHY, **changes)
    assert faults(facts) == [(name, status)]
    (finding,) = [each for each in examine(facts) if each.status is status]
    for word in words:
        assert word in str(finding)
    assert finding.remedy


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"surroundings": "pod", "multicast_heard": True}, True),
        ({"surroundings": "aws", "multicast_heard": True}, False),
        ({"surroundings": "pod", "peers_named": True}, False),
        ({"surroundings": "pod", "only_loopback": True}, False),
    ],
)
def test_a_pod_hears_pods_of_its_node_and_that_proves_nothing(changes: dict[str, object], named: bool) -> None:
    findings = examine(replace(HEALTHY, **changes))
    assert ("surroundings" in {finding.name for finding in findings}) is named


def test_a_container_is_in_order_by_itself_and_explains_that_no_other_is_heard() -> None:
    facts = replace(HEALTHY, surroundings="container")
    assert faults(facts) == []
    (finding,) = troubles(facts)
    assert (finding.name, finding.explains_silence) == ("surroundings", True)
    assert "MINGLE_PEERS" in finding.remedy


def test_a_peer_without_an_address_is_no_mistyped_name_where_no_name_server_answers() -> None:
    facts = replace(HEALTHY, unresolved={"head": "no answer"}, silent_servers=["10.0.0.5"], look_up_seconds=10.0)
    (finding,) = [each for each in examine(facts) if each.name == "peers"]
    assert "make 10.0.0.5 answer" in finding.remedy
    assert "correct the name" not in finding.remedy


def test_troubles_are_the_worst_first_and_no_pass() -> None:
    facts = replace(
        HEALTHY,
        multicasts_on=frozenset(),
        unused=["eth1 10.1.0.5/24"],
        named_by="MINGLE_INTERFACE",
        default_route=False,
    )
    found = troubles(facts)
    assert [each.name for each in found] == ["multicast", "interfaces", "routes"]
    assert "MINGLE_INTERFACE names eth0 alone, but eth1 10.1.0.5/24 is up as well" in found[1].observation
    assert troubles(HEALTHY) == []


@pytest.mark.parametrize(("opened", "firewall"), [("eth0", False), ("eth00", True)])
def test_an_interface_that_could_not_be_opened_is_no_firewall(opened: str, firewall: bool) -> None:
    facts = replace(HEALTHY, multicasts_on=frozenset(), failures={f"{opened} IPv4": "ENODEV: gone"})
    assert (("multicast", FAIL) in faults(facts)) is firewall


def test_no_command_of_a_fix_has_a_period_behind_it() -> None:
    facts = replace(HEALTHY, chains=DROPS, memberships=1, rp_drops=7, default_route=False, master="MASTER_ADDR=a")
    fixes = [each.fix.split("\n") for each in examine(facts) if each.remedy]
    assert len(fixes) == 5
    for words, *commands in fixes:
        assert words.endswith(":")
        assert commands
        assert not any(command.endswith((".", ";", " ")) for command in commands)


NARROW = """table inet f {
chain i {
type filter hook input priority filter; policy drop;
meta l4proto udp accept
tcp dport FIRST-LAST accept
}
}
"""


@pytest.mark.parametrize(
    ("first", "last", "drops"),
    [
        pytest.param(50000, 50100, False, id="all ports that the system chooses"),
        pytest.param(1024, 65535, False, id="more"),
        pytest.param(50001, 50100, True, id="not the first"),
        pytest.param(50000, 50099, True, id="not the last"),
        pytest.param(32768, 49999, True, id="those of another system"),
    ],
)
def test_tcp_must_pass_to_the_ports_that_the_system_chooses(first: int, last: int, drops: bool) -> None:
    rules = parse(NARROW.replace("FIRST", str(first)).replace("LAST", str(last)))
    facts = replace(HEALTHY, chains=rules, port_range=(50000, 50100))
    assert faults(facts) == ([("tcp", WARN)] if drops else [])


@pytest.mark.parametrize(
    ("changes", "hosts"),
    [
        pytest.param({}, ["10.0.0.0/24"], id="a private network"),
        pytest.param({"networks": ["93.184.216.0/24", "10.0.0.0/24"]}, ["10.0.0.0/24"], id="and a public one"),
        pytest.param({"networks": ["93.184.216.0/24"]}, ["93.184.216.0/24"], id="a public one alone"),
        pytest.param({"networks": ["10.1.0.7/32"]}, [], id="an address without a network"),
        pytest.param({"peers": ["10.0.0.7", "10.9.0.1", "10.9.0.1"]}, ["10.0.0.0/24", "10.9.0.1"], id="named hosts"),
        pytest.param({"networks": ["10.1.0.7/32"], "peers": ["fd00::7"]}, ["fd00::7"], id="a named host alone"),
    ],
)
def test_the_firewall_is_opened_to_the_hosts_of_the_job_alone(changes: dict[str, object], hosts: list[str]) -> None:
    facts = replace(HEALTHY, chains=DROPS, **changes)
    assert job_hosts(facts) == hosts
    words, *lines = open_firewall(facts).split("\n")
    assert (", ".join(hosts) in words) if hosts else not lines
    assert all(" saddr " in line and all(host in line for host in hosts) for line in lines)
    assert len(lines) == (2 if hosts else 0)


def test_one_network_that_tcp_passes_is_enough() -> None:
    other = "10.1.0.0/24"
    for networks in ([other, "10.0.0.0/24"], ["10.0.0.0/24", other]):
        facts = replace(HEALTHY, chains=ALLOWS_NEIGHBORS, networks=networks)
        assert faults(facts) == []
        (told,) = [each.observation for each in examine(facts) if each.name == "tcp"]
        assert re.findall(r"not from ([\d./]+)", told) == [other]
    assert faults(replace(HEALTHY, chains=ALLOWS_NEIGHBORS, networks=["10.2.0.0/24", other])) == [("tcp", WARN)]


def test_a_port_that_keeps_every_interface_from_being_opened_is_not_called_usable() -> None:
    facts = replace(HEALTHY, interface_problem=("nothing could be opened (EADDRINUSE)", "end it"), holders=[STRANGER])
    assert [each.name for each in examine(facts) if "port" in each.observation] == []


WRONG = Finding("port", CheckStatus.FAIL, "it is taken", "free it")


def test_the_worst_finding_counts_and_is_told_with_its_fix() -> None:
    fine, doubtful = Finding("a", CheckStatus.PASS, "x"), Finding("b", CheckStatus.WARN, "y", "z")
    assert [worst(each) for each in ([], [fine, doubtful], [doubtful, WRONG, fine])] == [CheckStatus.PASS, WARN, FAIL]
    assert (str(fine), str(WRONG)) == ("x", "it is taken; free it")
