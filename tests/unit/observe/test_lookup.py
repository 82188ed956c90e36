"""Finding a job and looking round, on `lo`; and what is said when nothing is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from mingle.config.settings import Network
from mingle.errors import AuthenticationError, DiscoveryTimeoutError, MingleError
from mingle.observe.finder import Finder
from mingle.observe.lookup import find_job, list_jobs, not_found, several_hosts
from mingle.protocol.explain.observations import NetworkFacts
from tests.support.bystanders import Wire, a_finder, gathering
from tests.support.loopback import longer
from tests.support.ports import free_udp_port

SECRET = "correct horse battery staple"

FACTS = NetworkFacts(interfaces=["eth0 10.0.0.2/24"], groups=["239.192.0.1"], port=29499, sent=3, received=0)


@pytest.fixture
def network() -> Network:
    return Network(interfaces=("lo",), port=free_udp_port(), discovery_timeout=60)


def not_there(job: str, network: Network, words: str, kind: type[MingleError] = DiscoveryTimeoutError) -> str:
    """Look for a job until the time is up; the error, which says these words once enough has been heard."""

    def look(seconds: float) -> MingleError:
        with pytest.raises(MingleError) as caught:
            find_job(job, replace(network, discovery_timeout=seconds))
        return caught.value

    error = longer(look, lambda error: words in str(error))
    assert words in str(error)
    assert type(error) is kind
    return str(error)


def listed(network: Network, enough: Callable[[Finder], object]) -> Finder:
    return longer(lambda seconds: list_jobs(replace(network, discovery_timeout=seconds))[0], enough)


def test_a_job_that_gathers_is_waited_for_and_listed_with_its_control_port(network: Network) -> None:
    with gathering("half there", network.port, (0, 2), world_size=4):
        assert "2 of 4 ranks joined, missing ranks: 1, 3" in not_there("half there", network, "joined")
        (seen,) = listed(network, lambda finder: any(each.running for each in finder.sessions)).sessions
        assert (seen.offer.job, seen.joined, seen.running and seen.running.missing) == ("half there", 2, (1, 3))
        assert seen.target().kind == "control"


def test_a_job_with_a_secret_is_found_by_those_who_have_it(network: Network) -> None:
    with gathering("guarded", network.port, (0,), world_size=1, secret=SECRET.encode()):
        session, _ = find_job("guarded", replace(network, secret=SECRET.encode()))
        assert session.signed
        assert "another one" not in not_there("guarded", network, "--secret-file", AuthenticationError)
        not_there("guarded", replace(network, secret=b"other"), "another one", AuthenticationError)


def test_two_live_hosts_are_both_named() -> None:
    wire = Wire()
    for address, name in (("10.0.0.1", b"A"), ("10.0.0.2", b"B")):
        wire.host("twice", address, name=name)
    finder = wire.look("twice", "10.0.0.3")
    wire.run(1)
    text = str(several_hosts("twice", finder.alive))
    assert "2 live hosts: rank 0 on host node0 (10.0.0.1), pid 100 at 10.0.0.1:29500" in text
    assert "10.0.0.2:29500" in text


def test_not_found_names_what_was_tried() -> None:
    facts = replace(
        FACTS,
        peers=["node7"],
        rejected=Counter({"magic": 2}),
        send_errors=Counter({"ENETUNREACH": 4}),
        failures=["node7 did not resolve: Name or service not known"],
    )
    text = str(not_found("resnet", a_finder(Wire(), "resnet"), facts, 5.0))
    for part in (
        "no live host was found within 5 s",
        "no process was heard",
        "eth0 10.0.0.2/24; groups 239.192.0.1 and UDP port 29499",
        "3 sent, 0 heard, 2 rejected (2 magic)",
        "peers: node7",
        "ENETUNREACH 4 times",
        "node7 did not resolve",
        "a firewall drops UDP port 29499",
        "--peers",
    ):
        assert part in text
