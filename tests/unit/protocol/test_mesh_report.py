"""The error that names the nodes that can't reach each other: which pattern it sees, and how long it is."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mingle.diagnostics import Detour
from mingle.errors import ConnectivityError
from mingle.protocol.explain import mesh_report
from mingle.protocol.explain.mesh_report import cause_of, describe
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.mesh_proof import Pair, Proof
from mingle.wire.frames import Blocked, FirewallManager, Unreached
from tests.support.mesh_proofs import member, proof

EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=100)


def both(*pairs: Pair) -> list[Pair]:
    return [*pairs, *((other, one) for one, other in pairs)]


def error(made: Proof) -> ConnectivityError:
    return mesh_report.error("resnet", *describe(made), *cause_of(made))


# --- who is left out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "pairs", "left_out"),
    [
        pytest.param(4, both((1, 2), (1, 3)), {"w1"}, id="the node that lacks more"),
        pytest.param(4, [(1, 2)], {"w2"}, id="of two the later one"),
        # Nodes 0 and 1 can't dial the others, which are left out in any case: node 1 would be one more.
        pytest.param(
            5, [*itertools.product((0, 1), (2, 3, 4))], {"w2", "w3", "w4"}, id="first those that the host lacks"
        ),
    ],
)
def test_as_few_nodes_as_possible_are_left_out(size: int, pairs: list[Pair], left_out: set[str]) -> None:
    found = mesh_report.left_out(proof(size, pairs), member(0))
    assert {each.node.who.hostname for each in found} == left_out


@pytest.mark.slow
def test_a_large_job_in_halves_does_not_keep_the_host_busy() -> None:
    """Its members give up a host that is silent for 10 s."""
    halves = both(*itertools.product(range(129), range(129, 256)))
    made = proof(256, halves)
    began = time.process_time()
    assert len(mesh_report.left_out(made, member(0))) == 127
    assert time.process_time() - began < 8.0, "it takes about 2 s"


# --- the pattern ------------------------------------------------------------------------------------------------------


def into(size: int, *others: int) -> list[Pair]:
    """From all nodes to these."""
    return [(one, other) for other in others for one in range(size) if one != other]


def out_of(size: int, one: int) -> list[Pair]:
    return [(one, other) for other in range(size) if one != other]


def across(here: Iterable[int], there: Iterable[int]) -> list[Pair]:
    return list(itertools.product(here, there))


LONE: dict[str, Callable[[int, int], list[Pair]]] = {
    "no other node reaches w1": into,
    "w1 reaches no other node": out_of,
    "w1 reaches no other node, and none reaches it": lambda size, one: both(*out_of(size, one)),
}


PATTERNS: list[tuple[int, list[Pair], list[str]]] = [
    *((size, pairs(size, 1), [line]) for line, pairs in LONE.items() for size in (3, 4, 128)),
    (8, into(8, 2, 5), ["no other node reaches w2", "no other node reaches w5"]),
    (40, into(40, *range(40)), ["no node reaches any other one"]),
    (2, both((0, 1)), ["w0 and w1 do not reach each other"]),
    (4, both((1, 3)), ["w1 and w3 do not reach each other"]),
    (4, [(3, 1)], ["w3 does not reach w1; the other way works"]),
    (4, [*into(4, 3), (3, 1)], ["no other node reaches w3", "w3 does not reach w1"]),
    (4, both(*across((0, 1), (2, 3))), ["two halves that reach only themselves: w0, w1 | w2, w3"]),
    (4, across((0, 1), (2, 3)), ["none of w0, w1 reaches any of w2, w3; the other way works"]),
    # Behind a host that reaches both groups:
    (9, both(*across(range(1, 4), range(4, 9))), ["w1, w2, w3 and w4, w5, w6, w7 and 1 more do not reach each other"]),
    (5, across((1, 2), (3, 4)), ["none of w1, w2 reaches any of w3, w4; the other way works"]),
    (
        5,
        [*into(5, 0, 1), *across((0, 1), (2, 3))],
        ["no other node reaches w0", "no other node reaches w1", "none of w0, w1 reaches any of w2, w3"],
    ),
]


@pytest.mark.parametrize(("size", "pairs", "lines"), [pytest.param(*row, id="; ".join(row[2])) for row in PATTERNS])
def test_pattern_is_named(size: int, pairs: list[Pair], lines: list[str]) -> None:
    full = r"rank \d+ on host (w\d+) \(10\.\d+\.\d+\.\d+ on eth0\)|: no answer from TCP port 4\d+"
    assert [re.sub(full, r"\1", line) for line in describe(proof(size, pairs))[1]] == lines


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no answer", "no answer from TCP port 4003"),
        ("refused", "TCP port 4003 refuses connections"),
        ("no route", "no route (a detail)"),
        ("another program", "another program answers on TCP port 4003 (a detail)"),
        ("silent", "TCP port 4003 accepts connections and does not answer"),
        ("closed", "TCP port 4003 accepts connections and closes them"),
        ("large packets", "TCP port 4003 is reached, but large packets do not pass"),
        ("no descriptor", "no file descriptor is free to connect"),
    ],
)
def test_each_kind_of_failure_has_its_words_cause_and_fix(how: Unreached, words: str) -> None:
    text = str(error(proof(4, [(1, 3)], how, detail="a detail")))
    assert f"rank 1 on host w1 (10.0.0.1 on eth0) does not reach rank 3 on host w3 (10.0.0.3 on eth0): {words}" in text
    assert "likely cause: " in text
    assert "`" in text.partition("fix: ")[2]


def blocked(
    peer: int,
    *,
    outgoing: bool = False,
    rule: str = "tcp dport 4001 drop",
    manager: FirewallManager = "nft",
    chain: str = "inet own c",
) -> Blocked:
    return Blocked(address=f"10.0.0.{peer}", outgoing=outgoing, chain=chain, rule=rule, manager=manager)


def inspected(made: Proof, finder: int, found: Blocked) -> tuple[str, str]:
    """Return cause and fix, once a machine has looked at itself."""
    made.suspects = mesh_proof.suspects(made)
    made.add(member(finder), (), found)
    return cause_of(made)


@pytest.mark.parametrize(("finder", "peer"), [(1, 3), (3, 1)])
@pytest.mark.parametrize(
    ("found", "cause", "fix"),
    [
        (
            {},
            "rule `tcp dport 4001 drop` of chain inet own c blocks TCP connections from 10.0.0.",
            "nft insert rule inet own c ip saddr 10.0.0.0/16 meta l4proto tcp accept",
        ),
        (
            {"outgoing": True, "rule": ""},
            "the policy of chain inet own c blocks TCP connections to 10.0.0.",
            "nft insert rule inet own c ip daddr 10.0.0.0/16 meta l4proto tcp accept",
        ),
        (
            {"manager": "ufw", "chain": "ip filter ufw-user-input"},
            "blocks TCP connections from",
            "ufw allow proto tcp from 10.0.0.0/16",
        ),
        # ufw can't allow what another program's table drops.
        (
            {"manager": "ufw"},
            "blocks TCP connections from",
            "nft insert rule inet own c ip saddr 10.0.0.0/16 meta l4proto tcp accept",
        ),
    ],
)
def test_rule_that_a_machine_finds_in_its_own_firewall_is_the_cause(
    finder: int, peer: int, found: dict[str, Any], cause: str, fix: str
) -> None:
    said = inspected(proof(4, both((1, 3))), finder, blocked(peer, **found))
    assert said[0].startswith(f"as w{finder} finds in its own firewall, ")
    assert cause in said[0]
    assert said[1] == f"on w{finder} (torch needs all TCP ports): `{fix}`"


def test_commands_of_the_error_stand_on_lines_of_their_own() -> None:
    made = proof(4, both((1, 3)))
    inspected(made, 3, blocked(1, manager="firewalld", chain="inet firewalld in"))
    assert str(error(made)).split("\n")[-3:] == [
        "  fix: on w3 (torch needs all TCP ports):",
        "    firewall-cmd --permanent --add-rich-rule="
        "'rule family=ipv4 source address=10.0.0.0/16 protocol value=tcp accept'",
        "    firewall-cmd --reload",
    ]


def test_a_node_behind_a_router_is_let_in_as_well() -> None:
    made = proof(4, both((1, 3)))
    made.subnet = "10.9.0.0/24"
    assert "ip saddr { 10.9.0.0/24, 10.0.0.1 } meta l4proto tcp accept" in inspected(made, 3, blocked(1))[1]


def test_silence_after_connect_is_explained_by_a_rule_that_drops_what_follows() -> None:
    made = proof(4, [(1, 3)], "silent")
    made.failures |= proof(4, [(3, 1)], "no answer").failures
    found = blocked(1, rule="tcp flags & (syn | ack) != syn drop")
    assert inspected(made, 3, found)[0].startswith("as w3 finds in its own firewall, rule `tcp flags")


def test_kernel_that_sends_by_another_interface_is_the_cause() -> None:
    made = proof(4, [(1, 3)], "no route", detail=Detour("10.0.0.3", "eth0", "eth1").brief)
    cause, fix = cause_of(made)
    assert cause.startswith("the kernel of w1 sends to 10.0.0.3 by another interface than eth0")
    assert fix.endswith("on w1 and likewise on the others: `sudo ip route add 10.0.0.3/32 dev eth0`")
    assert "no route (sent through eth1, not eth0)" in error(made).observation


def test_no_free_port_on_the_machine_that_dials_is_the_cause() -> None:
    made = proof(4, [(1, 3)], "no route", detail="Cannot assign requested address (EADDRNOTAVAIL)")
    assert cause_of(made)[0].startswith("no port is free on w1 for a connection to leave from")


@pytest.mark.parametrize(
    ("before", "after", "lossy"),
    [
        ("silent", "large packets", True),
        ("large packets", "no answer", True),
        ("large packets", "large packets", False),
        ("no answer", "no answer", False),
        ("refused", "silent", False),
    ],
)
def test_tries_that_fail_in_different_ways_blame_loss_alone(before: Unreached, after: Unreached, lossy: bool) -> None:
    made = proof(4, [(1, 3)], after)
    made.compare(proof(4, [(1, 3)], before).failures)
    assert ("the network between w1 and w3 loses many packets" in cause_of(made)[0]) is lossy
    assert ("no answer from TCP port 4003 (some packets pass" in str(error(made))) is lossy


@pytest.mark.parametrize(
    ("how", "finder", "found", "explains"),
    [
        pytest.param("no answer", 3, blocked(1), True, id="a drop is silence"),
        pytest.param("refused", 3, blocked(1, rule="reject"), True, id="a rejection is an answer of TCP"),
        pytest.param("no route", 3, blocked(1, rule="reject"), True, id="or of ICMP"),
        pytest.param("no answer", 2, blocked(1), False, id="all reach that machine"),
        pytest.param("no answer", 3, blocked(2), False, id="that one is reached"),
        pytest.param("no answer", 3, blocked(1, outgoing=True), False, id="that direction works"),
        pytest.param("no answer", 3, blocked(1, rule="reject"), False, id="a rejection is an answer"),
        pytest.param("refused", 3, blocked(1, rule=""), False, id="a drop is none"),
        pytest.param("large packets", 3, blocked(1), False, id="small packets pass"),
        pytest.param("another program", 3, blocked(1), False, id="packets pass"),
    ],
)
def test_rule_is_the_cause_only_if_it_explains_the_failure(
    how: Unreached, finder: int, found: Blocked, explains: bool
) -> None:
    assert ("its own firewall" in inspected(proof(4, [(1, 3)], how), finder, found)[0]) is explains


def test_heading_names_the_other_networks_and_a_sample() -> None:
    made = proof(4, [(1, 3)])
    made.others = ("192.168.0.1",)
    assert "on the network of 10.0.0.0, nor on those of 192.168.0.1" in describe(made)[0]
    assert "sampled" not in describe(made)[0]
    assert "(sampled: each node has dialed 32 others)" in describe(proof(1000, [(1, 2)]))[0]


@EXAMPLES
@given(st.data())
def test_each_failure_is_told_and_nothing_else_in_ten_lines(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 128))
    node = st.integers(0, size - 1)
    pairs = data.draw(st.lists(st.tuples(node, node).filter(lambda pair: pair[0] != pair[1]), min_size=1, max_size=40))
    deaf = data.draw(st.lists(node, max_size=3))
    pairs += [(one, other) for other in deaf for one in range(size) if one != other]
    made = proof(size, pairs)
    text = str(error(made))
    assert len(text.splitlines()) <= 10
    named = {number for number in range(size) if any(f"w{number}{end}" in text for end in " ,|:)`;\n")}
    at_fault = {number for pair in pairs for number in pair}
    assert named <= at_fault


def test_what_is_not_proved_is_said() -> None:
    made = proof(4, [])
    assert not mesh_report.unproved(made)
    who = structs.replace(made.nodes[2].who, address="203.0.113.7")
    made.nodes[2] = structs.replace(made.nodes[2], address="", who=who)
    said = mesh_report.unproved(made)
    assert said.startswith("that other nodes reach rank 2 on host w2 (eth0), whose connections come from 203.0.113.7,")
    assert mesh_report.unproved(proof(1000, [])).startswith("its mesh of 1000 nodes is sampled")


@pytest.mark.parametrize("how", ["closed", "refused", "no answer", "silent"])
def test_policy_of_a_sidecar_is_the_cause_where_one_takes_the_connections(how: Unreached) -> None:
    made = proof(4, both((1, 2)), how)
    who = structs.replace(made.nodes[3].who, address="127.0.0.6")
    made.nodes[3] = structs.replace(made.nodes[3], who=who, proxied=True)
    cause, fix = cause_of(made)
    assert cause.startswith("a sidecar of a service mesh takes the connections (they come from 127.0.0.6)")
    assert "AuthorizationPolicy" in fix
