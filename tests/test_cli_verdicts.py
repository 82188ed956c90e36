"""How findings and figures look."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mingle.cli import verdicts
from mingle.diagnostics.findings import Finding, Status
from mingle.observe.figures import Peer, Row

FINDINGS = [Finding("port", Status.PASS, "free"), Finding("tcp", Status.FAIL, "filtered\x1b[2J", "nft [bold] insert")]
PEER = Peer(b"P" * 16, "node2", 7, "10.0.0.2", "eth0", 4000)
PEER.rows["multicast"] = Row(sent=3, received=2, total=0.004, shortest=0.001, longest=0.003, arrived=2)


def drawn(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=120, color_system=None).print(table)
    return text.getvalue()


def test_records() -> None:
    assert verdicts.finding_record(FINDINGS[0]) == {
        "name": "port",
        "status": "PASS",
        "observation": "free",
        "remedy": None,
    }
    row = verdicts.peer_record(PEER)["ways"]["multicast"]
    assert (row["sent"], row["received"], row["loss"], row["min"], row["max"]) == (3, 2, 0.3333, 0.001, 0.003)
    assert verdicts.peer_record(PEER)["ways"]["tcp"]["avg"] is None


def test_rows_of_text() -> None:
    assert verdicts.ping_rows(PEER)[0] == (
        "node2 (10.0.0.2)", "multicast", "3", "2", "33%", "1.00", "2.00", "3.00", "2"
    )  # fmt: skip
    assert verdicts.ping_rows(PEER)[3] == ("node2 (10.0.0.2)", "TCP", "0", "0", "-", "-", "-", "-", "0")


def test_tables() -> None:
    table = drawn(verdicts.PingSheet([PEER], wide=False))
    assert "node2 (10.0.0.2)" in table
    assert table.count("node2") == 1
    table = drawn(verdicts.findings_sheet(FINDINGS))
    assert "→ nft [bold] insert" in table
    assert "\x1b" not in table


def test_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts.show_findings(FINDINGS)
    assert capsys.readouterr().out == "PASS\tport\tfree\nFAIL\ttcp\tfiltered\\x1b[2J\tnft [bold] insert\n"
