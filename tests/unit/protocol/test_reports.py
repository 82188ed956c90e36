"""Each report gives the observation, the likely cause and a fix, and names what is known."""

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
from mingle.text import joined_lines, ranks_text
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


def timeout(
    diagnostics: Diagnostics, *, status: Status | None = None, connected: bool = False, facts: NetworkFacts = FACTS
) -> MingleError:
    return deadline.timeout(situation(diagnostics, status=status, connected=connected), facts)


def situation(
    diagnostics: Diagnostics, me: Identity = ME, *, status: Status | None = None, connected: bool = False
) -> Situation:
    return Situation(
        diagnostics=diagnostics,
        job=me.job,
        rank=me.rank,
        unit=me.who.unit,
        status=status,
        connected=connected,
        seconds=30.0,
    )


def authentication(diagnostics: Diagnostics, facts: NetworkFacts, *, secured: bool) -> MingleError:
    here = structs.replace(situation(diagnostics), proved=False, secured=secured)
    return deadline.timeout(here, facts)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "none"),
        ((3,), "3"),
        ((3, 4), "3, 4"),
        ((1, 2, 3), "1-3"),
        ((0, 2, 3, 4, 9), "0, 2-4, 9"),
        (tuple(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_text(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


def test_a_timeout_says_what_was_tried() -> None:
    error = timeout(Diagnostics())
    assert type(error) is DiscoveryTimeoutError
    assert error.cause
    assert error.remedy
    for part in (
        "rank 0 was not found within 30 s by rank 3",
        "eth0, eth1",
        "239.192.7.7",
        "29499",
        "peers: head",
        "12 sent, 5 heard, 3 rejected (2 unsigned, 1 version 9)",
        "eth1: Network is unreachable 4 times",
        "eth1: no multicast",
    ):
        assert part in str(error)


def test_timeout_names_hosts_and_other_jobs_heard() -> None:
    quiet = NetworkFacts(port=29499)
    heard, other = Diagnostics(), Diagnostics()
    heard.hosts["host node0"] = "not reached: 10.0.0.1 no proof within 1 s"
    other.other_jobs["resnet5O"] = "host node9 (10.0.0.9), pid 4"
    assert "not reached: 10.0.0.1" in str(timeout(heard, facts=quiet))
    assert "'resnet5O' by host node9" in str(timeout(other, facts=quiet))


def test_an_incomplete_job_names_the_ranks() -> None:
    missing = timeout(Diagnostics(), status=Status(joined=6, world_size=8, missing=(2, 5)), connected=True)
    assert "6 of 8 ranks joined, missing ranks: 2, 5" in str(missing)
    assert "can no longer be reached" not in str(missing)
    hangs = timeout(Diagnostics(), status=Status(joined=8, world_size=8, phase="confirming", unconfirmed=(4,)))
    assert "no answer while confirming from ranks: 4 (as last reported by rank 0" in str(hangs)
    assert "stopped" in str(hangs.cause)
    gone = timeout(
        Diagnostics(), status=Status(joined=7, world_size=8, departed=(6,), left=("rank 6 on host x: reset",))
    )
    assert "came and went: rank 6 on host x: reset" in str(gone)
    assert "crashed" in str(gone.cause)
    both = timeout(Diagnostics(), status=Status(joined=1, world_size=4, missing=(2,), departed=(1, 3)))
    assert "1 of 4 ranks joined, missing ranks: 2, gone again: ranks 1, 3" in str(both), "the numbers add up"


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
    me = structs.replace(ME, job=job)
    for status in (None, Status(joined=1, world_size=8, missing=(1, 2))):
        error = deadline.timeout(situation(heard, me, status=status), NetworkFacts())
        assert ("mistyped" in str(error.cause)) == resembles
        assert resembles or "job id" not in f"{error.cause} {error.remedy}"
        assert f"other job ids heard on this network: {other!r} by host node9" in error.observation


def test_cause_names_several_jobs_or_attempts() -> None:
    heard = Diagnostics(other_jobs={"resent": "host node9", "resnets": "host node8"})
    assert timeout(heard, facts=NetworkFacts()).cause == "a mistyped job id: 'resent', 'resnets' are on this network"
    again = Diagnostics(other_attempts={"2": "10.0.0.3", "3": "10.0.0.4"})
    assert "the launcher's attempt differs: '2', '3' are on this network" in str(
        timeout(again, facts=NetworkFacts()).cause
    )


def test_no_rejected_datagrams_are_claimed_if_only_a_connection_failed() -> None:
    heard = Diagnostics(secret_failures={"10.0.0.2: secret: the caller did not prove the secret": None})
    error = authentication(heard, NetworkFacts(), secured=True)
    assert "job 'resnet': 10.0.0.2: secret: the caller did not prove the secret.\n" in str(error)


@pytest.mark.parametrize("field", ["refused", "left"])
def test_a_process_that_was_refused_or_left_was_heard(field: str) -> None:
    met = Status(joined=1, world_size=8, missing=(4,), **{field: ("rank 4 on host node4 (10.0.0.4), pid 9: x",)})
    assert "no process was heard" not in str(timeout(Diagnostics(), status=met, connected=True))


BLOCKED = Finding("multicast", CheckStatus.FAIL, "this host's firewall drops it", "nft insert rule x")
DOUBTFUL = Finding("interfaces", CheckStatus.WARN, "eth1 is up, too", "name it", explains_silence=True)


def test_failed_check_of_this_machine_is_the_likely_cause() -> None:
    """The same sentence that `mingle-discover doctor` says."""
    typo = Diagnostics()
    typo.other_jobs["resnet5O"] = "host node9 (10.0.0.9), pid 4"
    surely = NetworkFacts(findings=[BLOCKED, DOUBTFUL])
    for diagnostics in (Diagnostics(), typo):
        error = timeout(diagnostics, facts=surely)
        assert (error.cause, error.remedy) == (BLOCKED.observation, "nft insert rule x.")
        assert "on this machine: eth1 is up, too" in str(error)
    maybe = NetworkFacts(findings=[DOUBTFUL])
    assert timeout(Diagnostics(), facts=maybe).cause == DOUBTFUL.observation
    assert "mistyped" in str(timeout(typo, facts=maybe).cause)
    missing = Status(joined=1, world_size=8, missing=(4,))
    assert timeout(Diagnostics(), facts=surely, status=missing).cause == BLOCKED.observation
    assert timeout(Diagnostics(), facts=maybe, status=missing).cause == DOUBTFUL.observation


def test_what_is_the_cause_is_no_remark_as_well() -> None:
    error = timeout(Diagnostics(), facts=NetworkFacts(findings=[DOUBTFUL]))
    assert error.cause == DOUBTFUL.observation
    assert DOUBTFUL.observation not in error.observation


def test_what_explains_silence_is_no_remark_where_a_secret_is_the_cause() -> None:
    heard = Diagnostics(secret_failures={"10.0.0.2: secret: it has another one": None})
    error = authentication(heard, NetworkFacts(findings=[BLOCKED, DOUBTFUL]), secured=True)
    assert BLOCKED.observation in str(error)
    assert DOUBTFUL.observation not in str(error)


def test_a_rank_that_came_and_went_is_no_named_host_from_which_nothing_came() -> None:
    facts = NetworkFacts(unanswered=["10.0.0.4: no answer"])
    met = Status(joined=1, world_size=8, missing=(5,), left=("rank 4 on host node4 (10.0.0.4), pid 9: reset",))
    told = ladder.waiting(situation(Diagnostics(), status=met, connected=True), facts, 0.0)
    assert told is None


def test_a_missing_rank_that_is_heard_is_told_from_one_that_never_came() -> None:
    diagnostics = Diagnostics()
    diagnostics.seekers[b"A" * 16] = "rank 4 on host node4 (10.0.0.4), pid 9"
    quiet = NetworkFacts(port=29499)
    heard = timeout(diagnostics, facts=quiet, status=Status(joined=7, world_size=8, missing=(4,)), connected=True)
    assert "rank 4 on host node4 (10.0.0.4), pid 9: heard but not joined" in str(heard.cause)
    assert "mingle-discover ping" in str(heard.remedy)
    # Rank 4 has been heard, and has joined: it is rank 5 that never came (and rank 40 is not rank 4).
    for absent in (5, 40):
        never = timeout(diagnostics, facts=quiet, status=Status(joined=7, world_size=64, missing=(absent,)))
        assert "not started" in str(never.cause)


def test_a_host_that_hangs() -> None:
    assert "does not answer" in str(timeout(Diagnostics(), connected=True))


@pytest.mark.parametrize("secured", [True, False])
def test_authentication_needs_a_sign_of_this_very_job(secured: bool) -> None:
    assert type(authentication(Diagnostics(), FACTS, secured=secured)) is DiscoveryTimeoutError
    diagnostics = Diagnostics(secret_signs=4, signed_without_secret=4)
    error = authentication(diagnostics, FACTS, secured=secured)
    assert type(error) is AuthenticationError
    assert "MINGLE_SECRET" in str(error.remedy)


@pytest.mark.parametrize("reason", ["rank out of range", "world size", "full", "ranks mixed", "kind", "running"])
def test_a_refusal_names_who_is_in_the_way(reason: str) -> None:
    error = errors.refused(ME, Refused(reason=reason, detail="the detail", who=HOST))  # type: ignore[arg-type]
    assert type(error) is ConflictError
    assert f"{reason} (the detail)" in str(error)
    assert "rank 0 on host node0 (10.0.0.1), pid 7" in str(error)
    assert error.cause
    assert error.remedy


def test_a_taken_rank_is_named_with_its_holder() -> None:
    error = errors.refused(ME, Refused(reason="rank taken", detail="the detail", who=HOST))
    assert "is already taken by rank 0 on host node0 (10.0.0.1), pid 7" in error.observation
    assert "started twice" in str(error.cause)


@pytest.mark.parametrize(("unit", "text"), [("rank", "world size (the detail)"), ("node", "--nnodes (the detail)")])
def test_a_number_that_differs_is_named_as_it_was_typed(unit: Unit, text: str) -> None:
    me = structs.replace(ME, rank=None, who=structs.replace(ME.who, unit=unit))
    error = errors.refused(me, Refused(reason="world size", detail="the detail", who=HOST))
    assert text in str(error.observation)
    assert f"the same {'--nnodes' if unit == 'node' else 'world size'}" in str(error.remedy)


def test_nodes_that_are_there_are_named_where_no_missing_one_can_be() -> None:
    me = structs.replace(ME, rank=None, who=structs.replace(ME.who, unit="node"))
    status = Status(joined=2, world_size=3, hosts="node1, node2")
    error = deadline.timeout(situation(Diagnostics(), me, status=status, connected=True), FACTS)
    assert "2 of 3 nodes joined (node1, node2)." in str(error)


def test_command_lines_that_differ_are_not_blamed_on_a_job_id() -> None:
    me = structs.replace(ME, job=f"{LINE_JOB_ID}1f2e3d4c", rank=None, who=structs.replace(ME.who, unit="node"))
    heard = Diagnostics(other_jobs={f"{LINE_JOB_ID}9a8b7c6d": "host node9 (10.0.0.9), pid 4", "bert": "host node8"})
    error = deadline.timeout(situation(heard, me), NetworkFacts(port=29499))
    assert "the command lines differ: host node9 (10.0.0.9), pid 4 waits with another one" in str(error.cause)
    assert "the same command" in str(error.remedy)
    assert "job id" not in f"{error.cause}{error.remedy}"


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
