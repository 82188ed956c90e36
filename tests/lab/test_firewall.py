"""Hosts that drop by default: lines that a message or docs/administrators.md prints are pasted, and the job forms."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.levels import chosen

from . import Host, Lab
from .faults import run, try_rank
from .scenarios import results, start_ranks
from .test_healthy import check_hosts
from .test_run import SECONDS, start
from .torchrun_jobs import jobs

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).parents[2] / "docs" / "administrators.md"
BY_DEFAULT = """
table inet nu2 {
chain cinput { type filter hook input priority 0; policy drop; iifname lo accept; ct state established,related accept; }
}
"""
IN_AND_OUT = f"""{BY_DEFAULT}
table inet nu2 {{
chain coutput {{ type filter hook output priority 0; policy drop; oifname lo accept; ct state established accept; }}
}}
"""
TWO_TABLES = """
table inet nu2 { chain cinput { type filter hook input priority 0; udp dport 29499 ct state new drop; }; }
table ip old { chain INPUT { type filter hook input priority -5; jump guard; }; chain guard { ip protocol tcp drop; }; }
"""
HOSTS = {
    "drops what comes in": BY_DEFAULT,
    "drops what comes in and what goes out": IN_AND_OUT,
    "has two tables that drop": TWO_TABLES,
}


SERVED_AT = ("{node_rank}", "{master_addr}", "{master_port}")
SERVED = """
import socket, sys, time
node, address, port = sys.argv[1:]
if node == "0":
    with socket.create_server((address, int(port))) as server:
        for _ in range(2):
            server.accept()[0].send(b"x")
else:
    while True:
        try:
            with socket.create_connection((address, int(port)), 60) as connection:
                print("served" if connection.recv(1) else "closed", flush=True)
                break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""
"""A program of which every node but the first connects to the first one."""


def paste(host: Host, lines: list[str]) -> None:
    """Type the lines in a root shell of a host; each must succeed."""
    assert lines
    host.namespace.tool(["sh", "-ec", "\n".join(lines)])


def forms(hosts: list[Host], job: str) -> None:
    sums = {result["sum"] for result in results(start_ranks(hosts, job))}
    assert sums == {len(hosts) * (len(hosts) + 1) // 2}


def is_content(host: Host) -> bool:
    """Whether doctor finds nothing to open."""
    return not re.search(r"^(WARN|FAIL)\t(multicast|tcp)\t", run(host, "doctor"), re.MULTILINE)


def lines_of_error(host: Host, rank: int, job: str) -> list[str]:
    """Return the lines below the fix in the error of a rank that waits in vain."""
    words, *lines = try_rank(host, rank, job=job).result().partition("\n  fix: ")[2].split("\n")
    assert words.endswith(":"), words
    return lines


def lines_of_doctor(host: Host, _rank: int, _job: str) -> list[str]:
    checks = json.loads(run(host, "doctor --json"))["checks"]
    remedies = {each["remedy"] for each in checks if "firewall" in each["observation"] and each["status"] != "PASS"}
    (remedy,) = remedies  # the checks of multicast and of TCP say the same
    return list(remedy.split("\n")[1:])


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("told", "rules"),
    chosen(
        [
            (lines_of_doctor, "drops what comes in"),
            (lines_of_error, "drops what comes in and what goes out"),
            (lines_of_error, "has two tables that drop"),
        ],
        soak=[
            (lines_of_error, "drops what comes in"),
            (lines_of_doctor, "drops what comes in and what goes out"),
            (lines_of_doctor, "has two tables that drop"),
        ],
    ),
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_one_paste_opens_what_a_job_needs_to_its_hosts_alone(
    lab: Lab, rules: str, told: Callable[[Host, int, str], list[str]]
) -> None:
    hosts = lab.lan(2, link_local=False)
    for host in hosts:
        host.namespace.nft(HOSTS[rules])
    for rank, host in enumerate(hosts):
        lines = told(host, rank, "paste")
        assert not any(line.endswith(".") for line in lines), lines
        assert all("10.77.0.0/24" in line or "coutput udp dport" in line for line in lines), lines
        paste(host, lines)
    forms(hosts, "pasted")
    assert is_content(hosts[0])


def page_rules(hook: str) -> str:
    """Return the rule set of the page for a host that drops by default at a hook."""
    blocks = re.findall(r"^```text\n(table .*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if f"hook {hook} " in block and "policy drop" in block]
    return str(found)


def by_init(hosts: list[Host]) -> None:
    forms(hosts, "page")


def by_torchrun(hosts: list[Host]) -> None:
    with jobs() as make:
        job = make("page", str(len(hosts)))
        job.start(*hosts)
        job.wait_for_group(hosts)
        job.finish(*hosts)


def by_mingle_run(hosts: list[Host]) -> None:
    processes = [
        start(host, "--node-rank", str(rank), "--", sys.executable, "-c", SERVED, *SERVED_AT, count=len(hosts))
        for rank, host in enumerate(hosts)
    ]
    for process in processes[1:]:
        process.wait_for_output("served", SECONDS)


@pytest.mark.soak(3)
@pytest.mark.parametrize("door", [by_init, by_torchrun, by_mingle_run], ids=["init", "torchrun", "mingle-run"])
@pytest.mark.parametrize("hooks", chosen([("input", "output")], soak=[("input",)]), ids="-and-".join)
def test_a_job_forms_with_the_rule_set_of_the_page(
    lab: Lab, hooks: tuple[str, ...], door: Callable[[list[Host]], None]
) -> None:
    hosts = lab.lan(3, "10.0.0.0/24")
    for host in hosts:
        for hook in hooks:
            host.namespace.nft(page_rules(hook))
    door(hosts)
    assert is_content(hosts[0])


def test_nothing_is_wrong_with_the_rule_set_of_the_page(lab: Lab) -> None:
    """Not for jobs where multicast passes one way only, nor for the commands: unicast answers go to other ports."""
    hosts = lab.lan(2, "10.0.0.0/24")
    for host in hosts:
        for hook in ("input", "output"):
            host.namespace.nft(page_rules(hook))
    check_hosts(hosts)
    hosts[1].drop("ip daddr 224.0.0.0/4 meta l4proto udp")
    forms(hosts, "one way")


def test_a_job_forms_with_the_port_range_of_the_page(lab: Lab) -> None:
    ranged = re.findall(r"^ip saddr .* dport .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    replaced = re.compile(r"( *ip saddr [^\n]* meta l4proto (udp|tcp) accept[^\n]*\n){2}")
    rules, count = replaced.subn("\n".join([*ranged, ""]), page_rules("input"))
    assert (len(ranged), count) == (2, 1)
    hosts = lab.lan(3, "10.0.0.0/24")
    for host in hosts:
        host.namespace.nft(rules)
    by_torchrun(hosts)
    assert is_content(hosts[0])
