"""What a report says of the network, as the sockets have shown it."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path

import pytest

from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.diagnostics import Detour
from mingle.network import local_relay
from mingle.network.interface_monitor import REMEMBERED_ADDRESSES
from mingle.protocol.effects import Multicast
from mingle.protocol.events import FoldersListed
from tests.support.noting_driver import SEEK, Noting, folder_driver
from tests.support.ports import free_udp_port


def test_facts_and_inspection_describe_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    port = free_udp_port()
    network = Network(
        interfaces=("lo",), interfaces_from="MINGLE_INTERFACE", port=port, peers=(Peer("no-such-host.invalid"),)
    )
    with contextlib.ExitStack() as stack:
        driver = Noting(network, stack, job="resnet")
        deadline = time.monotonic() + 30
        while not driver.udp.peers.failures:
            assert time.monotonic() < deadline
            driver.notes.due = time.monotonic() + 0.01
            driver.turn()
        driver.rejections.counts["magic"] += 2
        facts = driver.evidence.facts()
        assert facts.groups[0] == "239.192.180.44"
        assert facts.port == port
        assert facts.peers == ["no-such-host.invalid: no address"]
        assert facts.rejected == {"magic": 2}
        (failure,) = facts.failures
        assert failure.startswith("no-such-host.invalid did not resolve: ")
        assert facts.findings == ()
        observed = driver.evidence.inspect(versions={"version 2": "10.0.0.1"})
        assert observed.group == "239.192.180.44"
        assert observed.named_by == "MINGLE_INTERFACE"
        assert observed.multicasts_on is None, "nothing was sent, so nothing can have come back"
        assert observed.versions == {"version 2": "10.0.0.1"}
        found = [finding.observation for finding in driver.evidence.diagnose(driver.evidence.observed())]
        assert any("'no-such-host.invalid' in MINGLE_PEERS does not resolve" in each for each in found)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
def test_a_process_without_a_place_in_the_relay_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can take all the names: that costs the relay of unicast datagrams, and nothing else."""
    monkeypatch.setattr(local_relay, "MAX_PROCESSES", 1)
    network = Network(interfaces=("lo",), port=free_udp_port())
    with contextlib.ExitStack() as stack:
        stack.callback(local_relay.LocalRelay(network.port).close)
        driver = Noting(network, stack)
        driver.notes.to_do.append(Multicast(SEEK))
        assert driver.hear()[0] == SEEK
        assert driver.evidence.facts().failures == ["local relay: all 1 names are taken"]
        assert driver.evidence.inspect().relay_failure == "all 1 names are taken"


def test_detours_are_bounded_and_forgotten_once_a_connection_stands() -> None:
    with contextlib.ExitStack() as stack:
        evidence = Noting(Network(interfaces=("lo",), port=free_udp_port()), stack).evidence
        for number in range(REMEMBERED_ADDRESSES + 1):  # another host chooses the addresses
            evidence.led_astray(Detour(f"10.0.{number // 256}.{number % 256}", "eth1", "eth0"))
        assert len(evidence.observed()["detours"]) == REMEMBERED_ADDRESSES
        evidence.reached("10.0.0.7")
        assert len(evidence.observed()["detours"]) == REMEMBERED_ADDRESSES - 1


def test_a_folder_that_fails_is_named_and_the_election_does_not_wait_for_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        driver = folder_driver(stack, tmp_path / "missing")
        driver.notes.shows = SEEK
        driver.turn_until(FoldersListed)
        facts = driver.evidence.facts(driver.evidence.diagnose(driver.evidence.observed()))
        assert f"dir:{tmp_path}/missing does not exist" in facts.failures
        assert facts.peers == [f"dir:{tmp_path}/missing"]
        finding = next(each for each in facts.findings if each.name == "folder")
        assert "mount" in finding.remedy


def test_a_peer_whose_connection_stands_answers_and_this_machine_is_no_other_peer() -> None:
    """A rank that has joined says nothing by UDP any more: its one question can have come before this rank's socket."""
    network = Network(interfaces=("lo",), port=free_udp_port(), peers=(Peer("192.0.2.9"), Peer("127.0.0.1")))
    with contextlib.ExitStack() as stack:
        driver = Noting(network, stack)
        driver.udp.peers.turn(silent=True, now=0.0)
        for address in ("127.0.0.1", "192.0.2.7"):
            driver.evidence.reached(address)
            assert driver.evidence.observed()["other_way"] == ""
            assert driver.evidence.facts().unanswered == ["192.0.2.9: no answer"]
        driver.evidence.reached("192.0.2.9")
        assert driver.evidence.observed()["other_way"] == "peers"
        assert driver.evidence.facts().unanswered == []
