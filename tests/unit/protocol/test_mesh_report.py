"""The error that names the nodes that can't reach each other: which pattern it sees, and how long it is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
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


def lines(size: int, pairs: Iterable[Pair]) -> list[str]:
    return describe(proof(size, pairs))[1]


def error(made: Proof) -> ConnectivityError:
    return mesh_report.error("resnet", *describe(made), *cause_of(made))


# --- who is left out --------------------------------------------------------------------------------------------------


def left_out(size: int, pairs: Iterable[Pair]) -> set[str]:
    return {each.node.who.hostname for each in mesh_report.left_out(proof(size, pairs), member(0))}


def test_the_node_that_lacks_more_is_left_out() -> None:
    assert left_out(4, both((1, 2), (1, 3))) == {"w1"}


def test_of_two_nodes_the_later_one_is_left_out() -> None:
    assert left_out(4, [(1, 2)]) == {"w2"}


def test_nodes_that_the_host_lacks_are_left_out_first() -> None:
    """Nodes 0 and 1 can't dial the others, which are left out in any case: node 1 would be one more."""
    assert left_out(5, itertools.product((0, 1), (2, 3, 4))) == {"w2", "w3", "w4"}


@pytest.mark.slow
def test_a_large_job_in_halves_does_not_keep_the_host_busy() -> None:
    """Its members give up a host that is silent for 10 s."""
    halves = both(*itertools.product(range(129), range(129, 256)))
    began = time.process_time()
    assert len(left_out(256, halves)) == 127
    assert time.process_time() - began < 8.0, "it takes about 2 s"


# --- the pattern ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 128])
def test_node_that_nobody_reaches(size: int) -> None:
    (line,) = lines(size, [(each, 1) for each in range(size) if each != 1])
    assert line == "no other node reaches rank 1 on host w1 (10.0.0.1 on eth0): no answer from TCP port 4001"


@pytest.mark.parametrize("size", [3, 4, 128])
def test_node_that_reaches_nobody(size: int) -> None:
    (line,) = lines(size, [(1, each) for each in range(size) if each != 1])
    assert line.startswith("rank 1 on host w1 (10.0.0.1 on eth0) reaches no other node: no answer")


@pytest.mark.parametrize("size", [3, 4, 128])
def test_node_that_is_cut_off_in_both_directions(size: int) -> None:
    (line,) = lines(size, both(*[(1, each) for each in range(size) if each != 1]))
    assert line.startswith("rank 1 on host w1 (10.0.0.1 on eth0) reaches no other node, and none reaches it: ")


def test_two_nodes_that_nobody_reaches() -> None:
    found = lines(8, [(one, other) for other in (2, 5) for one in range(8) if one != other])
    assert [line.partition(" (")[0] for line in found] == [
        "no other node reaches rank 2 on host w2",
        "no other node reaches rank 5 on host w5",
    ]


def test_pair_of_a_node_that_nobody_reaches_is_not_said_to_work_the_other_way() -> None:
    first, second = lines(4, [*((each, 3) for each in range(3)), (3, 1)])
    assert first.startswith("no other node reaches rank 3 on host w3 ")
    assert second == (
        "rank 3 on host w3 (10.0.0.3 on eth0) does not reach rank 1 on host w1 (10.0.0.1 on eth0): "
        "no answer from TCP port 4001"
    )


def test_block_of_nodes_that_nobody_reaches_is_not_said_to_work_the_other_way() -> None:
    deaf = [(each, other) for other in (0, 1) for each in range(5) if each != other]
    *_, last = lines(5, [*deaf, *itertools.product((0, 1), (2, 3))])
    assert last == "none of w0, w1 reaches any of w2, w3: no answer from TCP port 4002"


def test_pair_in_both_directions() -> None:
    assert lines(4, both((1, 3))) == [
        "rank 1 on host w1 (10.0.0.1 on eth0) and rank 3 on host w3 (10.0.0.3 on eth0) do not reach each other: "
        "no answer from TCP port 4003"
    ]


def test_pair_in_one_direction() -> None:
    assert lines(4, [(3, 1)]) == [
        "rank 3 on host w3 (10.0.0.3 on eth0) does not reach rank 1 on host w1 (10.0.0.1 on eth0): "
        "no answer from TCP port 4001; the other way works"
    ]


def test_pair_of_two_nodes() -> None:
    assert lines(2, both((0, 1)))[0].startswith("rank 0 on host w0 (10.0.0.0 on eth0) and rank 1 on host w1")


def test_nodes_none_of_which_reaches_another() -> None:
    every = [(one, other) for one in range(40) for other in range(40) if one != other]
    assert lines(40, every) == ["no node reaches any other one: no answer from TCP port 4001"]


def test_two_halves() -> None:
    across = both(*itertools.product((0, 1), (2, 3)))
    assert lines(4, across) == ["two halves that reach only themselves: w0, w1 | w2, w3: no answer from TCP port 4002"]


def test_two_halves_of_which_one_direction_works() -> None:
    assert lines(4, itertools.product((0, 1), (2, 3))) == [
        "none of w0, w1 reaches any of w2, w3: no answer from TCP port 4002; the other way works"
    ]


def test_two_groups_behind_a_host_that_reaches_both() -> None:
    assert lines(9, both(*itertools.product((1, 2, 3), (4, 5, 6, 7, 8)))) == [
        "w1, w2, w3 and w4, w5, w6, w7 and 1 more do not reach each other: no answer from TCP port 4004"
    ]


def test_one_direction_between_two_groups_behind_a_host() -> None:
    assert lines(5, itertools.product((1, 2), (3, 4))) == [
        "none of w1, w2 reaches any of w3, w4: no answer from TCP port 4003; the other way works"
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refused", "TCP port 4003 refuses connections"),
        ("no route", "no route (No route to host (EHOSTUNREACH))"),
        ("another program", "another program answers on TCP port 4003 (magic)"),
        ("closed", "TCP port 4003 accepts connections and closes them"),
        ("large packets", "large packets do not pass"),
        ("no descriptor", "no file descriptor is free to connect"),
    ],
)
def test_each_kind_of_failure_has_its_words_cause_and_fix(how: Unreached, words: str) -> None:
    detail = {"no route": "No route to host (EHOSTUNREACH)", "another program": "magic"}.get(how, "")
    text = str(error(proof(4, [(1, 3)], how, detail=detail)))
    assert words in text
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
    made = proof(4, [(1, 3)], "no route")
    made.failures[1, 3] = structs.replace(made.failures[1, 3], detail=Detour("10.0.0.3", "eth0", "eth1").brief)
    cause, fix = cause_of(made)
    assert cause.startswith("the kernel of w1 sends to 10.0.0.3 by another interface than eth0")
    assert fix.endswith("on w1 and likewise on the others: `sudo ip route add 10.0.0.3/32 dev eth0`")
    assert "no route (sent through eth1, not eth0)" in error(made).observation


def test_no_free_port_on_the_machine_that_dials_is_the_cause() -> None:
    made = proof(4, [(1, 3)], "no route")
    detail = "Cannot assign requested address (EADDRNOTAVAIL)"
    made.failures[1, 3] = structs.replace(made.failures[1, 3], detail=detail)
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
    cause, remedy = cause_of(made)
    assert ("the network between w1 and w3 loses many packets" in cause) is lossy
    assert ("`mingle-discover ping` on w1 and w3 shows how many" in remedy) is lossy
    assert ("no answer from TCP port 4003 (some packets pass" in str(error(made))) is lossy


@pytest.mark.parametrize("how", ["refused", "no route"])
def test_rule_that_rejects_explains_an_answer(how: Unreached) -> None:
    found = blocked(1, rule="reject")
    assert inspected(proof(4, [(1, 3)], how), 3, found)[0].startswith("as w3 finds in its own firewall, rule `reject`")


@pytest.mark.parametrize(
    ("how", "finder", "found"),
    [
        pytest.param("no answer", 2, blocked(1), id="all reach that machine"),
        pytest.param("no answer", 3, blocked(2), id="that one is reached"),
        pytest.param("no answer", 3, blocked(1, outgoing=True), id="that direction works"),
        pytest.param("no answer", 3, blocked(1, rule="reject"), id="a rejection is an answer"),
        pytest.param("refused", 3, blocked(1, rule=""), id="a drop is none"),
        pytest.param("large packets", 3, blocked(1), id="small packets pass"),
        pytest.param("another program", 3, blocked(1), id="packets pass"),
    ],
)
def test_rule_that_does_not_explain_the_failure_is_no_cause(how: Unreached, finder: int, found: Blocked) -> None:
    assert "its own firewall" not in inspected(proof(4, [(1, 3)], how), finder, found)[0]


def test_networks_that_fail_as_well_are_named() -> None:
    made = proof(4, [(1, 3)])
    made.others = ("192.168.0.1",)
    assert "on the network of 10.0.0.0, nor on those of 192.168.0.1" in describe(made)[0]


def test_sample_is_said() -> None:
    assert "(sampled: each node has dialed 32 others)" in describe(proof(1000, [(1, 2)]))[0]
    assert "sampled" not in describe(proof(256, [(1, 3)]))[0]


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
