"""What is seen of a job, and what of it may reach a shell."""

from __future__ import annotations

import pytest

from mingle.observe.sighting import Seeking, Sighting, endpoint_text, is_host, ranks_seeking
from mingle.protocol.connection_race import DialTarget
from mingle.wire import frames
from mingle.wire.datagrams import Kind, Offer, Seek


def sighting(
    running: frames.Running | None, *, joined: int = 1, assigned: bool = False, kind: Kind = "ranks"
) -> Sighting:
    offer = Offer(
        job="j",
        session=b"S" * 16,
        host=b"H" * 16,
        addresses=("10.0.0.1",),
        port=4000,
        world_size=4,
        joined=joined,
        assigned=assigned,
        kind=kind,
        hostname="head",
        pid=7,
    )
    path = frames.Path(host_address="10.0.0.1", local_address="10.0.0.2", interface="eth0")
    return Sighting(
        offer, [DialTarget("10.0.0.1", "eth0", 4000)], signed=False, probed=offer, running=running, path=path
    )


def running(**fields: object) -> frames.Running:
    given = {"state": "open", "world_size": 4, "host": frames.ProcessInfo(hostname="head", pid=7, rank=0), **fields}
    return frames.Running(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1",
        "fd00::1",
        "trainer-0.trainer.default.svc",
        "my_service_1",
        "localhost",
        "a",
        "host.example.",
    ],
)
def test_addresses_and_names_are_hosts(text: str) -> None:
    assert is_host(text)


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "$(x)",
        "`x`",
        "-rf",
        "a;b",
        "x\n",
        "http://x",
        "fe80::1%eth0",
        "10.0.0.1:80",
        "\x1b[2J",
        "ä",
        "a'b",
        "*",
    ],
)
def test_what_a_shell_or_a_terminal_would_act_on_is_none(text: str) -> None:
    assert not is_host(text)


def test_ipv6_stands_in_brackets() -> None:
    assert endpoint_text("fd00::1", 80) == "[fd00::1]:80"
    assert endpoint_text("10.0.0.1", 80) == "10.0.0.1:80"


def test_the_target_is_the_control_port_until_there_is_a_store() -> None:
    assert str(sighting(running()).target()) == "10.0.0.1:4000"
    sealed = sighting(running(state="sealed", store_address="10.9.0.1", store_port=555)).target()
    assert (str(sealed), sealed.kind) == ("10.9.0.1:555", "store")


def test_the_proved_ranks_count_more_than_the_announced_number() -> None:
    assert sighting(None, joined=3).joined == 3
    assert sighting(running(joined=(0, 2)), joined=4).joined == 2
    assert sighting(running(), joined=3, assigned=True).joined == 3, "assigned ranks have no number yet"


def test_a_rank_that_is_seated_is_no_seeker() -> None:
    seekers = [
        Seeking(Seek(job="j", member=bytes([rank]) * 16, world_size=4, rank=rank), "10.0.0.3", False) for rank in (1, 2)
    ]
    left = ranks_seeking(seekers, [sighting(running(joined=(0, 1)))])
    assert [each.seek.rank for each in left] == [2]


def test_a_session_that_is_not_proved_says_so() -> None:
    seen = sighting(None)
    assert not seen.alive
    assert seen.problem == "it has not answered yet"
    assert str(seen.host()) == "host head (10.0.0.1), pid 7"
    seen.failures = {"10.0.0.1": "refused"}
    assert seen.problem == "10.0.0.1: refused"
