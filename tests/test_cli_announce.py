"""``announce``: it plays a host until it is told to stop."""

from __future__ import annotations

import json
import time

import pytest
from click.testing import CliRunner

from mingle.cli import main
from mingle.cli.announce import MAX_ADDRESS_LENGTH
from mingle.config.settings import Network
from mingle.errors import DiscoveryTimeoutError
from mingle.observe.lookup import find
from tests.bystanders import announcing, free_udp_port, gathering, run_command


def test_it_prints_what_it_announces_and_ends_after_its_time() -> None:
    port = free_udp_port()
    done = run_command("announce", "timed", "--master-port", "29500", "-t", "0.2", port=port)
    assert done.stdout == "127.0.0.1:29500\n"
    assert done.stderr.startswith("announcing job 'timed'")
    done = run_command(
        *("announce", "timed", "--master-port", "29500", "--master-addr", "node7", "--world-size", "4"),
        *("-t", "0.2", "--json"),
        port=port,
    )
    record = json.loads(done.stdout)
    assert set(record) == {
        "schema",
        "command",
        "job",
        "session",
        "address",
        "port",
        "world_size",
        "control_addresses",
        "control_port",
    }
    assert (record["schema"], record["address"], record["port"], record["world_size"]) == (
        1,
        "node7",
        29500,
        4,
    )


def test_after_its_good_bye_it_is_found_no_more() -> None:
    network = Network(interfaces=("lo",), port=free_udp_port(), discovery_timeout=10)
    with announcing("passing", "--master-port", "29500", port=network.port):
        assert str(find("passing", network)[0].target()) == "127.0.0.1:29500"
    started = time.monotonic()
    with pytest.raises(DiscoveryTimeoutError):
        find("passing", Network(interfaces=("lo",), port=network.port, discovery_timeout=0.5))
    assert time.monotonic() - started < 5


def test_ranks_that_look_for_the_job_are_told_of_and_do_not_join() -> None:
    port = free_udp_port()
    with announcing("taken for a job", "--master-port", "29500", port=port) as process:
        assert process.stderr is not None
        with gathering("taken for a job", port, (1,), world_size=2):
            line = process.stderr.readline()
    assert line.startswith("warning: rank 1 on host node1")
    assert "wait for a rank 0" in line


@pytest.mark.parametrize("address", ["", "10.0.0.1:80", "fe80::1%eth0", "-x", "a b", "x" * (MAX_ADDRESS_LENGTH + 1)])
def test_what_is_no_address_is_not_announced(address: str) -> None:
    arguments = ["announce", "job", "--master-port", "29500", f"--master-addr={address}"]
    result = CliRunner().invoke(main, arguments, env={"MINGLE_PORT": str(free_udp_port())})
    assert (result.exit_code, result.stdout) == (2, "")
    assert "can't be announced" in result.stderr
