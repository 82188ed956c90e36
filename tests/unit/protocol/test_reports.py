"""The errors of a job that did not form: what was observed. The likely causes are in `tests/support/causes.py`."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from mingle.diagnostics import CheckStatus, Finding
from mingle.errors import AuthenticationError, ConflictError, DiscoveryTimeoutError, InterfaceError, MingleError
from mingle.protocol.explain import deadline, errors, ladder
from mingle.protocol.explain.ladder import LINE_JOB_ID
from mingle.protocol.explain.observations import Diagnostics, NetworkFacts, Situation
from mingle.protocol.machine import Identity
from mingle.text import joined_lines
from mingle.wire.frames import Closed, ProcessInfo, Refused, Running, Status, Unit

ME = Identity(
    job="resnet",
    attempt="",
    member=b"M" * 16,
    rank=3,
    world_size=8,
    node="n",
    who=ProcessInfo(hostname="node3", pid=33, address="10.0.0.3"),
)
HOST = ProcessInfo(hostname="node0", pid=7, address="10.0.0.1", rank=0)
FACTS = NetworkFacts(
    interfaces=["eth0", "eth1"],
    groups=["239.192.7.7"],
    port=29499,
    peers=["head"],
    sent=12,
    received=5,
    rejected=Counter({"unsigned": 2, "version 9": 1}),
    send_errors=Counter({"eth1: Network is unreachable": 4}),
    failures=["eth1: no multicast"],
)
BLOCKED = Finding("multicast", CheckStatus.FAIL, "this host's firewall drops it", "nft insert rule x")
DOUBTFUL = Finding("interfaces", CheckStatus.WARN, "eth1 is up, too", "name it", explains_silence=True)
ANOTHER_SECRET = Diagnostics(secret_failures={"10.0.0.2: secret: it has another one": None})


def situation(
    heard: Diagnostics, *, status: Status | None = None, connected: bool = False, job: str = ME.job
) -> Situation:
    return Situation(diagnostics=heard, job=job, rank=3, status=status, connected=connected, seconds=30.0)


def timeout(
    heard: Diagnostics, facts: NetworkFacts = FACTS, *, status: Status | None = None, connected: bool = False
) -> MingleError:
    return deadline.timeout(situation(heard, status=status, connected=connected), facts)


def without_proof(heard: Diagnostics, facts: NetworkFacts, *, secured: bool) -> MingleError:
    """The error of a process to which no other one has proved that it has the same secret, or none either."""
    return deadline.timeout(structs.replace(situation(heard), proved=False, secured=secured), facts)


# --- the error at the deadline ----------------------------------------------------------------------------------------


def test_a_timeout_says_what_was_heard_and_tried() -> None:
    heard = Diagnostics(
        hosts={"host node0": "not reached: 10.0.0.1 no proof within 1 s"},
        other_jobs={"resnet5O": "host node9 (10.0.0.9), pid 4"},
    )
    error = timeout(heard)
    assert type(error) is DiscoveryTimeoutError
    assert error.cause
    assert error.remedy
    for part in (
        "rank 0 was not found within 30 s by rank 3",
        "host node0: not reached: 10.0.0.1 no proof within 1 s",
        "'resnet5O' by host node9 (10.0.0.9), pid 4",
        "eth0, eth1",
        "239.192.7.7",
        "29499",
        "peers: head",
        "12 sent, 5 heard, 3 rejected (2 unsigned, 1 version 9)",
        "eth1: Network is unreachable 4 times",
        "eth1: no multicast",
    ):
        assert part in str(error)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "its host accepted the connection of rank 3 and does not answer."),
        (Status(joined=6, world_size=8, missing=(2, 5)), "6 of 8 ranks joined, missing ranks: 2, 5."),
        (
            Status(joined=8, world_size=8, phase="confirming", unconfirmed=(4,)),
            "8 of 8 ranks joined, no answer while confirming from ranks: 4.",
        ),
        (
            Status(joined=1, world_size=4, missing=(2,), departed=(1, 3)),
            "1 of 4 ranks joined, missing ranks: 2, gone again: ranks 1, 3.",
        ),
        (Status(joined=2, world_size=3, hosts="node1, node2"), "2 of 3 ranks joined (node1, node2)."),
    ],
    ids=["the host hangs", "missing", "not answering", "the numbers add up", "no missing rank has a number"],
)
def test_an_incomplete_job_names_the_ranks(status: Status | None, words: str) -> None:
    assert words in str(timeout(Diagnostics(), status=status, connected=True))


def test_a_status_of_a_host_that_is_gone_says_so() -> None:
    error = timeout(Diagnostics(), status=Status(joined=6, world_size=8, missing=(2, 5)))
    assert "(as last reported by rank 0, which can no longer be reached)" in str(error)


@pytest.mark.parametrize("field", ["refused", "left"])
def test_a_process_that_was_refused_or_left_was_heard(field: str) -> None:
    who = "rank 4 on host node4 (10.0.0.4), pid 9: x"
    met = Status(joined=1, world_size=8, missing=(4,), **{field: (who,)})
    error = str(timeout(Diagnostics(), status=met, connected=True))
    assert who in error
    assert "no process was heard" not in error


@pytest.mark.parametrize(
    ("findings", "secret", "remarks"),
    [
        pytest.param([BLOCKED, DOUBTFUL], False, [DOUBTFUL], id="a failure is the cause"),
        pytest.param([DOUBTFUL], False, [], id="a guess is the cause"),
        pytest.param([BLOCKED, DOUBTFUL], True, [BLOCKED], id="a secret explains the silence"),
    ],
)
def test_findings_that_are_not_the_cause_are_remarks(
    findings: list[Finding], secret: bool, remarks: list[Finding]
) -> None:
    facts = NetworkFacts(findings=findings)
    error = without_proof(ANOTHER_SECRET, facts, secured=True) if secret else timeout(Diagnostics(), facts)
    assert [each for each in findings if f"on this machine: {each.observation}" in error.observation] == remarks


@pytest.mark.parametrize("secured", [True, False])
def test_authentication_needs_a_sign_of_this_very_job(secured: bool) -> None:
    assert type(without_proof(Diagnostics(), FACTS, secured=secured)) is DiscoveryTimeoutError
    error = without_proof(Diagnostics(secret_signs=4, signed_without_secret=4), FACTS, secured=secured)
    assert type(error) is AuthenticationError
    assert ("4 of its datagrams were rejected" in error.observation) is secured
    error = without_proof(ANOTHER_SECRET, FACTS, secured=secured)
    assert "10.0.0.2" in error.observation
    assert "of its datagrams were rejected" not in error.observation, "only a connection failed"


# --- rungs of the ladder that have corners ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "other", "resembles"),
    [
        ("resnet", "resent", True),
        ("resnet", "Resnet", True),
        ("few", "fwe", True),
        ("resnet50", "resnet5O", True),
        ("ada-resnet", "-resnet", True),
        ("ada-resnet", "resnet", True),
        ("ada-resnet", "bob-resnet", False),
        ("ada-llama-finetune", "bob-llama-finetune", False),
        ("resnet", "bert", False),
        ("root-resnet", "ada-resnet", True),
        ("root-resnet", "ada-bert", False),
    ],
)
def test_only_an_id_that_resembles_ours_is_the_cause(job: str, other: str, resembles: bool) -> None:
    """Another one is a stranger's job: it is listed, and not blamed."""
    heard = Diagnostics(other_jobs={other: "host node9 (10.0.0.9), pid 4"})
    error = deadline.timeout(situation(heard, job=job), NetworkFacts())
    assert ("mistyped" in str(error.cause)) == resembles


def test_command_lines_that_differ_are_not_blamed_on_a_job_id() -> None:
    other = "host node9 (10.0.0.9), pid 4"
    heard = Diagnostics(other_jobs={f"{LINE_JOB_ID}9a8b7c6d": other, "bert": "host node8"})
    error = deadline.timeout(situation(heard, job=f"{LINE_JOB_ID}1f2e3d4c"), NetworkFacts())
    assert f"the command lines differ: {other} waits" in str(error.cause)
    assert "job id" not in f"{error.cause}{error.remedy}"


@pytest.mark.parametrize(("absent", "heard"), [(4, True), (5, False), (40, False)])
def test_a_missing_rank_that_is_heard_is_told_from_one_that_never_came(absent: int, heard: bool) -> None:
    seekers = {b"A" * 16: "rank 4 on host node4 (10.0.0.4), pid 9"}
    status = Status(joined=7, world_size=64, missing=(absent,))
    error = timeout(Diagnostics(seekers=seekers), NetworkFacts(), status=status)
    assert ("heard but not joined" in str(error.cause)) is heard


def test_a_rank_that_came_and_went_is_no_named_host_from_which_nothing_came() -> None:
    facts = NetworkFacts(unanswered=["10.0.0.4: no answer"])
    met = Status(joined=1, world_size=8, missing=(5,), left=("rank 4 on host node4 (10.0.0.4), pid 9: reset",))
    assert ladder.waiting(situation(Diagnostics(), status=met, connected=True), facts, 0.0) is None


# --- conflicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason", ["rank taken", "rank out of range", "world size", "full", "ranks mixed", "kind", "running"]
)
def test_a_refusal_names_who_is_in_the_way(reason: str) -> None:
    error = errors.refused(ME, Refused(reason=reason, detail="the detail", who=HOST))  # type: ignore[arg-type]
    assert type(error) is ConflictError
    assert "is already taken by" in str(error) if reason == "rank taken" else f"{reason} (the detail)" in str(error)
    assert "rank 0 on host node0 (10.0.0.1), pid 7" in str(error)
    assert error.cause
    assert error.remedy


@pytest.mark.parametrize(("unit", "size"), [("rank", "world size"), ("node", "--nnodes")])
def test_a_number_that_differs_is_named_as_it_was_typed(unit: Unit, size: str) -> None:
    me = structs.replace(ME, rank=None, who=structs.replace(ME.who, unit=unit))
    error = errors.refused(me, Refused(reason="world size", detail="the detail", who=HOST))
    assert f"{size} (the detail)" in str(error.observation)
    assert f"the same {size}" in str(error.remedy)


def test_a_running_job_is_named_with_its_age_and_roster() -> None:
    running = Running(state="running", world_size=8, seconds=60.0, host=HOST, roster="rank 0 on host node0")
    error = errors.running(ME, running, 30.0)
    assert "running for 90 s" in str(error)
    assert "8 ranks" in str(error)
    assert "It has: rank 0 on host node0" in str(error)
    assert "90 s" in errors.running_notice(ME, running, 30.0)


def test_the_other_conflicts() -> None:
    two = errors.two_hosts(ME, [HOST])
    assert "more than one rank 0" in str(two)
    assert "node0" in str(two)
    closed = errors.closed_by_host(ME, Closed(session=b"s" * 16, reason="two rank 0s"))
    assert "two rank 0s" in str(closed)
    split = errors.no_common_network(ME, "  rank 1: not 10.0.0.1")
    assert type(split) is InterfaceError
    assert "rank 1: not 10.0.0.1" in str(split)


def test_an_observation_goes_to_the_members_on_one_line() -> None:
    text = "job 'j': no address was reached by every rank:\n  rank 1: eth0\n  rank 2: eth1\n    and eth2"
    joined = "job 'j': no address was reached by every rank: rank 1: eth0; rank 2: eth1; and eth2"
    assert joined_lines(text) == joined
    assert joined_lines("one") == "one"
