"""What the figures of a ping mean, in words."""

from __future__ import annotations

import itertools

import pytest

from mingle.diagnostics import CheckStatus, Finding
from mingle.diagnostics.diagnosis import Facts
from mingle.diagnostics.firewall import parse
from mingle.observe import path_checks
from mingle.observe.ping import Figures, PingMachine, PingPeer
from mingle.wire.echo import WAYS, Way
from mingle.wire.frames import ProcessInfo

FINE = (8, 8, 8)


Counts = tuple[int, int, int]


def a_peer(interface: str = "eth0", **lost: Counts) -> PingPeer:
    counts = {way: lost.get(way, FINE) for way in WAYS}
    rows: dict[Way, Figures] = {
        way: Figures(sent=sent, received=got, total=0.001 * got, shortest=0.001, longest=0.001, arrived=arrived)
        for way, (sent, got, arrived) in counts.items()
    }
    return PingPeer(b"P" * 16, "node2", 2, "10.0.0.2", interface, 4000, rows)


def pings(*peers: PingPeer) -> PingMachine:
    machine = PingMachine(
        "",
        pinger=b"M" * 16,
        who=ProcessInfo(hostname="node1", pid=1),
        port=1,
        shared_port=29499,
        interval=1,
        count=1,
        new_id=itertools.count().__next__,
        now=0,
    )
    machine.peers = {bytes([number]): peer for number, peer in enumerate(peers)}
    return machine


def judge(machine: PingMachine, multicasts_on: tuple[str, ...] = ("eth0",), listing: str = "") -> list[Finding]:
    facts = Facts(
        port=29499,
        group="239.192.1.1",
        hostname="node1",
        used_names=["eth0"],
        networks=["10.0.0.0/24"],
        multicasts_on=frozenset(multicasts_on),
        chains=parse(listing),
    )
    return path_checks.judge(machine, facts)


@pytest.mark.parametrize(
    "peer",
    [
        a_peer(multicast=(0, 0, 0), link=(0, 0, 0), unicast=(0, 0, 0), tcp=(0, 0, 0)),
        a_peer(multicast=(1, 0, 0)),  # one lost ping says nothing
        a_peer(unicast=(0, 0, 0)),  # on our own host
        a_peer(multicast=(8, 8, 0), link=(8, 8, 0), unicast=(8, 8, 1), tcp=(8, 8, 0)),  # it pings less often than we do
        a_peer(multicast=(100, 97, 99)),
        a_peer(multicast=(8, 8, 0)),  # 224.0.0.x arrives: a switch filters the rest, and no firewall here
    ],
)
def test_no_wolf_is_cried(peer: PingPeer) -> None:
    assert all(finding.status is CheckStatus.PASS for finding in judge(pings(peer)))


OUT, LOST = (8, 0, 8), (8, 0, 0)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (a_peer(multicast=OUT, link=OUT), ("multicast to node2", "lost, unicast fine: the firewall of node2")),
        (
            a_peer(multicast=LOST, link=LOST),
            ("is lost, unicast fine: the network between", "MINGLE_PEERS=10.0.0.2", "Kubernetes"),
        ),
        (a_peer(multicast=LOST), ("is lost on 239.x and passes on 224.0.0.x, unicast fine", "mcast_snooping 0")),
        (a_peer(multicast=LOST, link=LOST, unicast=LOST), ("multicast and unicast UDP to node2", "UDP port 29499")),
        (a_peer(unicast=OUT), ("unicast to UDP port 29499 of node2", "another program there", "MINGLE_PORT")),
        (a_peer(tcp=LOST), ("TCP from node1 to node2 (10.0.0.2) is filtered", "on node2: sudo ")),
        (a_peer(tcp=(8, 8, 0)), ("TCP from node2 (10.0.0.2) to node1 does not arrive",)),
        (a_peer(multicast=(8, 8, 0), link=(8, 8, 0)), ("multicast from node2 (10.0.0.2) does not arrive here",)),
        (a_peer(multicast=OUT, link=OUT, unicast=OUT, tcp=OUT), ("is heard and hears nothing from this host",)),
        (a_peer(interface="eth1"), ("reached by eth1, but only eth0 is used", "MINGLE_INTERFACE=eth1")),
    ],
)
def test_a_broken_way_is_named(peer: PingPeer, words: tuple[str, ...]) -> None:
    found = judge(pings(peer))
    assert [finding.status for finding in found] == [CheckStatus.FAIL]
    for word in words:
        assert word in str(found[0])


def test_a_peer_that_hears_unicast_alone_is_not_said_to_hear_nothing() -> None:
    multicast, tcp = judge(pings(a_peer(multicast=LOST, link=LOST, tcp=LOST)))
    assert "multicast to node2 (10.0.0.2) is lost, unicast fine" in multicast.observation
    assert "TCP from node1 to node2 (10.0.0.2) is filtered, though UDP passes" in tcp.observation


@pytest.mark.parametrize(
    ("unicast", "named", "status"),
    [
        pytest.param(FINE, "10.0.0.2", CheckStatus.WARN, id="by unicast"),
        pytest.param((8, 0, 0), "10.0.0.2", CheckStatus.FAIL, id="not at all"),
        pytest.param(FINE, "10.0.0.3", CheckStatus.FAIL, id="another host was named"),
    ],
)
def test_lost_multicast_is_no_fault_where_jobs_need_none(unicast: Counts, named: str, status: CheckStatus) -> None:
    machine = pings(a_peer(multicast=(8, 0, 0), link=(8, 0, 0), unicast=unicast))
    found = path_checks.judge(machine, Facts(port=29499, used_names=("eth0",)), named={named})
    assert found[0].status is status
    works = status is CheckStatus.WARN
    assert ("start jobs with MINGLE_PEERS as well" in str(found[0].remedy)) == works
    assert "MINGLE_PEERS=" not in str(found[0].remedy) or not works


def test_unanswered_hosts_strangers_and_other_jobs_are_reported() -> None:
    machine = pings()
    machine.learn([("10.0.0.7", 29499), ("10.0.0.8", 29499), ("fe80::9%eth0", 29499)])
    machine.asked["10.0.0.8", 29499] = True
    machine.strangers["10.0.0.9"] = "node9 (10.0.0.9), pid 9"
    machine.strangers["fe80::9%eth0"] = "node9 (fe80::9%eth0), pid 9"
    machine.other_jobs["bert"] = "10.0.0.6"
    found = {finding.name: finding for finding in judge(machine)}
    assert set(found) == {"secret", "10.0.0.7", "job"}
    assert "another secret" in found["secret"].observation
    assert "doctor --serve" in found["10.0.0.7"].observation
    assert found["job"].status is CheckStatus.WARN
    assert "'bert'" in found["job"].observation


def test_the_rule_is_named_where_it_is_ours() -> None:
    listing = "table ip own {\nchain first {\ntype filter hook input priority filter; policy drop;\n}\n}\n"
    (finding,) = judge(pings(a_peer(tcp=(8, 8, 0))), listing=listing)
    udp = "nft insert rule ip own first ip saddr 10.0.0.0/24 udp dport 29499 accept"
    tcp = "nft insert rule ip own first ip saddr 10.0.0.0/24 meta l4proto tcp accept"
    assert finding.remedy.split("\n")[1:] == [udp, tcp]
    listing = listing.replace("policy drop;", "policy accept;\nudp dport 29499 drop")
    (finding,) = judge(pings(a_peer(multicast=(8, 8, 0), link=(8, 8, 0))), listing=listing)
    assert finding.remedy.split("\n")[1:] == [udp]


def test_two_processes_of_one_host_are_one_finding() -> None:
    assert len(judge(pings(a_peer(tcp=LOST), a_peer(tcp=LOST)))) == 1


@pytest.mark.parametrize(
    ("peer", "status", "words"),
    [
        (a_peer(), CheckStatus.PASS, "node2 (10.0.0.2): multicast, unicast, TCP pass, round trips from 1.00 ms"),
        (a_peer(multicast=(10, 1, 10)), CheckStatus.WARN, "90% of the multicast pings are lost (9 of 10)"),
        (a_peer(multicast=(10, 7, 10)), CheckStatus.WARN, "30% of the multicast pings are lost (3 of 10)"),
        (a_peer(multicast=(8, 8, 0), link=(8, 8, 0)), CheckStatus.FAIL, "and our own does not come back"),
    ],
)
def test_figures_in_words(peer: PingPeer, status: CheckStatus, words: str) -> None:
    (finding,) = judge(pings(peer), multicasts_on=())
    assert finding.status is status
    assert words in finding.observation
