"""Tables on terminals of 80, 100 and 200 columns: words and addresses stay whole, whatever else gives way."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from mingle.cli import checks, jobs, local, output
from mingle.diagnostics import CheckStatus, Finding
from mingle.observe.ping import PingPeer
from mingle.wire.echo import WAYS

WIDTHS = pytest.mark.parametrize("width", [80, 100, 200])
LONG_IPV6 = "2001:db8:1234:5678:9abc:def0:1234:5678"


def shown(table: RenderableType, width: int) -> list[str]:
    """The lines that a terminal of this width shows."""
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=True, no_color=True, color_system=None).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert all(len(line) <= width for line in lines), lines
    return lines


def whole(lines: list[str], *pieces: str) -> None:
    """Every piece stands on one line, unbroken."""
    for piece in pieces:
        assert any(piece in line for line in lines), f"{piece!r} is broken:\n" + "\n".join(lines)


def a_job(job: str, **fields: object) -> dict[str, Any]:
    return {
        "job": job,
        "kind": "ranks",
        "state": "open",
        "session": job,
        "proved": True,
        "problem": None,
        "address": "192.168.100.117",
        "port": 45621,
        "endpoint": "control",
        "secret": False,
        "seconds": 1.0,
        "world_size": 64,
        "joined": 61,
        "missing": [],
        "seeking": [],
        "host": {"hostname": "trainer-node-0017", "pid": 2145321, "address": "", "rank": 0},
        **fields,
    }


SEEKER = {"rank": 12, "hostname": "trainer-node-0018", "pid": 2145999, "address": "192.168.100.118", "folder": None}
BUSY = [
    a_job("resnet-sweep-2026-07", missing=[3, 17, 40], seeking=[SEEKER, {**SEEKER, "rank": 40}], secret=True),
    a_job("bert", state="running", proved=False, address=LONG_IPV6),
]
CALM = [a_job("resnet", state="running", joined=64), a_job("bert", state="running", joined=64)]


@WIDTHS
def test_jobs(width: int) -> None:
    lines = shown(jobs.jobs_table(BUSY), width)
    whole(lines, "resnet-sweep-2026-07", "192.168.100.117:45621", "trainer-node-0017 pid 2145321", "61/64", "3, 17, 40")
    whole(lines, f"[{LONG_IPV6}]:45621", "running, not proved", "JOB", "ADDRESS", "MISSING", "SEEKING", "SECRET")
    words = " ".join(lines).split()
    assert words.count("trainer-node-0018") == 2


@WIDTHS
def test_columns_that_say_nothing_go_unless_they_are_wanted(width: int) -> None:
    lines = shown(jobs.jobs_table(CALM), width)
    text = "\n".join(lines)
    assert "JOINED" in text
    for column in ("MISSING", "SEEKING", "SECRET"):
        assert column not in text
    (heading,) = [line for line in lines if "JOB" in line]
    assert heading.split() == ["JOB", "STATE", "HOST", "ADDRESS", "JOINED"]
    for every in (jobs.jobs_table(CALM, wide=True), jobs.jobs_table([])):
        assert "SECRET" in "\n".join(shown(every, width))


def colored(job: dict[str, Any], *others: dict[str, Any]) -> str:
    """What a terminal with colors shows of the first job, without what belongs to the others."""
    text = io.StringIO()
    Console(file=text, width=200, force_terminal=True, color_system="standard").print(jobs.jobs_table([job, *others]))
    return text.getvalue()


def test_states_and_missing_ranks_are_in_color() -> None:
    assert "\x1b[32mrunning\x1b[0m" in colored(a_job("resnet", state="running", joined=64))
    assert "\x1b[31mrunning, not proved\x1b[0m" in colored(a_job("resnet", state="running", proved=False))
    waiting = colored(a_job("resnet", missing=[3, 17]))
    assert "\x1b[33mopen\x1b[0m" in waiting
    assert "\x1b[33m3, 17\x1b[0m" in waiting


def test_a_job_that_waits_says_which_other_id_resembles_its_own() -> None:
    resent = a_job("resent", state="seeking", host=None, address=None, proved=False, joined=0, seeking=[SEEKER])
    bert = a_job("bert", missing=[1])
    text = colored(resent, a_job("resnet", missing=[12]), bert)
    assert "\x1b[1;31mresembles resnet\x1b[0m" in text
    assert "\x1b[1;31mresembles resent\x1b[0m" in text
    assert text.count("resembles") == 2, "bert resembles none"
    # A sweep's jobs differ by a digit, and run.
    assert "resembles" not in colored(*(a_job(f"sweep-{number}", state="running", joined=64) for number in (1, 2)))


def a_peer(number: int) -> PingPeer:
    peer = PingPeer(bytes([number]) * 16, f"trainer-node-{number:04}", 7, f"192.168.100.{number}", "eth0", 4000)
    for way in WAYS:
        row = peer.figures[way]
        for ping in range(1000):
            row.pending[ping] = 0.0
            row.answered(ping, 1.23456)
    return peer


@WIDTHS
def test_pings(width: int) -> None:
    lines = shown(checks.ping_table([a_peer(17), a_peer(118)]), width)
    whole(lines, "trainer-node-0017 (192.168.100.17)", "trainer-node-0118 (192.168.100.118)", "224.0.0.x", "ANSWERED")
    whole(lines, "1234.56", "FROM PEER")
    assert " ".join(lines).split().count("unicast") == 2


OBSERVATION = "multicast to host2 (10.77.0.2) is lost, unicast fine: the firewall of trainer-node-0017 drops it"
REMEDY = "nft insert rule inet filter input udp dport 29499 accept; or use MINGLE_PEERS=192.168.100.117"


@WIDTHS
def test_findings(width: int) -> None:
    found = [
        Finding("trainer-node-0017 (192.168.100.117)", CheckStatus.FAIL, OBSERVATION, REMEDY),
        Finding("interfaces", CheckStatus.PASS, f"used: eth0 {LONG_IPV6}/64"),
    ]
    lines = shown(checks.findings_table(found), width)
    whole(lines, "trainer-node-0017 (192.168.100.117)", "FAIL", "PASS", f"{LONG_IPV6}/64")
    words = " ".join(lines).split()
    for word in f"{OBSERVATION} {REMEDY}".split():
        assert word in words


@WIDTHS
def test_interfaces(width: int) -> None:
    addresses = ["192.168.100.117/24", f"{LONG_IPV6}/64", "fe80::5054:ff:fe12:3456/64"]
    record = {
        "name": "enp129s0f0np0",
        "index": 2,
        "addresses": addresses,
        "kind": "physical",
        "used": False,
        "up": True,
        "running": False,
        "multicast": False,
        "preference": None,
        "reason": "it has no carrier: no cable is plugged in, or the other end is switched off",
    }
    lines = shown(local.interfaces_table([record]), width)
    whole(lines, *addresses, "enp129s0f0np0", "up, no carrier, no multicast flag", "physical")


@WIDTHS
def test_variables(width: int) -> None:
    value = "/mnt/shared/projects/resnet-sweep-2026-07/secrets/mingle"
    meaning = "file that holds the job's secret, the same on every rank of the job and readable by its user alone"
    rows = [("MINGLE_SECRET_FILE", value, meaning), ("RANK", "3", "this process's rank")]
    lines = shown(output.Table(("NAME", "VALUE", "MEANING"), rows, prose="MEANING"), width)
    whole(lines, "MINGLE_SECRET_FILE", value)
    assert set(meaning.split()) <= set(" ".join(lines).split())


@WIDTHS
def test_env_shows_each_section_once(width: int) -> None:
    variables = [{"name": "RANK", "value": "3", "meaning": "rank of this process"}]
    launcher = {"name": "Slurm", "variables": {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}}
    lines = shown(local.env_table({"launcher": "Slurm", "rank": 3}, variables, [launcher]), width)
    words = [line.split() for line in lines if line]
    for section in ("Launcher", "Job", "Network"):
        assert len([line for line in words if line[0] == section]) == 1
    assert not any(line[0] == "torch" for line in words), "no variable of this section is set"
    whole(lines, "SLURM_STEP_NUM_TASKS", "discovery_timeout")


def test_a_word_that_no_line_holds_is_folded_and_not_cut() -> None:
    lines = shown(jobs.jobs_table([a_job("x" * 200)]), 80)
    assert "".join(lines).count("x") >= 200


def test_markup_and_escapes_are_text() -> None:
    lines = shown(jobs.jobs_table([a_job("[bold]a[/bold]\x1b[2J")]), 100)
    whole(lines, "[bold]a[/bold]\\x1b[2J")
