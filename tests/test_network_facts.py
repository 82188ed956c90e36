"""From what the sockets have shown to what is reported and checked."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.engine.network_facts import Seen, network_facts, observed
from mingle.network.interfaces import choose, scan
from mingle.wire.groups import job_group

LO = choose(scan(), named=["lo"]).usable
SEEN = Seen(
    network=Network(interfaces=("lo",), interfaces_from="MINGLE_INTERFACE", port=1234, peers=(Peer("head"),)),
    group=job_group("resnet"),
    found=scan(),
    usable=LO,
    transport=None,
    unresolved={"head": "not known"},
    rejected=Counter({"magic": 2}),
    multicasts_on=frozenset({"lo"}),
    rp_drops_before=0,
)


def test_what_is_reported() -> None:
    facts = network_facts(SEEN, diagnosed=False)
    assert facts.groups[0] == "239.192.180.44"
    assert facts.port == 1234
    assert facts.peers == ["head"]
    assert facts.rejected == {"magic": 2}
    assert facts.failures == ["head did not resolve: not known"]
    assert facts.findings == ()


def test_what_is_wrong_is_looked_for_when_asked() -> None:
    (finding,) = network_facts(SEEN, diagnosed=True).findings
    assert "'head' in MINGLE_PEERS does not resolve" in finding.observation


def test_what_the_checks_are_given() -> None:
    seen = observed(SEEN, {"version 2": "10.0.0.1"})
    assert seen.group == "239.192.180.44"
    assert seen.named_by == "MINGLE_INTERFACE"
    assert seen.multicasts_on is None  # nothing was sent, so nothing can have come back
    assert seen.versions == {"version 2": "10.0.0.1"}
    assert observed(replace(SEEN, network=Network(family="6"))).group == ""
    assert observed(replace(SEEN, network=Network())).named_by == ""
