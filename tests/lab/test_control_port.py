"""Strangers at the control port: they are refused and named, and nobody waits for them."""

from __future__ import annotations

import pytest

from tests.soak import repeated

from . import UDP, Lab
from .attacker import flood_port, locate, relay, stay_silent
from .scenarios import check, results, train, wait_for_log
from .test_timeouts import timed

DELAY_SECONDS = 5.0
SILENT_CONNECTIONS = 1_000
BOGUS_CONNECTIONS = 10_000


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=20))
def test_a_flood_of_connections_does_not_delay_go(lab: Lab, seed: int) -> None:
    """A thousand that connect and stay silent, ten thousand that come and go, and then the last real rank."""
    network = lab.network()
    enemy, *hosts = [lab.host(network) for _ in range(4)]
    job_id = f"flooded {seed}"
    found = enemy.start(locate, job_id, enemy.address())
    found.wait_for("listening")
    ranks = [hosts[rank].start(train, job_id, rank, 3, secret="s3cret") for rank in (0, 1)]
    wait_for_log(ranks[1], "seated")
    address, port = found.result()
    enemy.start(stay_silent, address, port, SILENT_CONNECTIONS).wait_for("silent")
    flood = enemy.start(flood_port, address, port, BOGUS_CONNECTIONS)
    flood.wait_for("flooding")
    ranks.append(hosts[2].start(train, job_id, 2, 3, secret="s3cret"))
    formed = results(ranks)
    check(formed, hosts, hosts[0])
    assert formed[2]["elapsed"] < DELAY_SECONDS
    print(f"the last rank waited {formed[2]['elapsed']:.3f} s")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=20))
def test_a_relay_is_refused(lab: Lab, seed: int) -> None:
    """Even without a secret: who is called at an address that is none of the host's gets no further than HELLO."""
    network = lab.network(link_local=False)
    enemy, *hosts = [lab.host(network) for _ in range(3)]
    job_id = f"relayed {seed}"
    relaying = enemy.start(relay, job_id, enemy.address())
    relaying.wait_for("listening")
    hosts[1].drop(f"ip saddr {hosts[0].address()} {UDP}")  # it hears of the host by the relay alone
    host = hosts[0].start(train, job_id, 0, 2)
    relaying.wait_for("relaying")
    member = hosts[1].start(train, job_id, 1, 2)
    said = [relaying.wait_for("relayed")["said"] for _ in range(3)]
    hosts[1].clear_rules()
    check(results([host, member]), hosts, hosts[0])
    assert {b"hello" in each for each in said} == {True}
    said += [event["said"] for event in relaying.events if event.name == "relayed"]
    assert [each for each in said if b"prove" in each] == []


def test_a_wrong_proof_is_refused_and_named(lab: Lab) -> None:
    """Who has another secret is named on both sides; who has the right one joins."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    ranks = [
        hosts[rank].start(timed, "proof", rank, 3, discovery_timeout=4, secret="right" if rank < 2 else "wrong")
        for rank in range(3)
    ]
    errors = [rank.error(12) for rank in ranks]
    assert [error.name for error in errors] == ["DiscoveryTimeoutError", "DiscoveryTimeoutError", "AuthenticationError"]
    assert "2" in errors[0].message.partition("missing")[2]
    for error in errors:
        assert "secret" in error.message
        assert "right" not in error.message.replace("right one", "")
