"""The record of a check."""

from __future__ import annotations

from mingle.diagnostics.findings import Finding, Status, worst

WRONG = Finding("port", Status.FAIL, "it is taken", "free it")


def test_worst() -> None:
    fine, doubtful = Finding("a", Status.PASS, "x"), Finding("b", Status.WARN, "y", "z")
    assert worst([]) is Status.PASS
    assert worst([fine, doubtful]) is Status.WARN
    assert worst([doubtful, WRONG, fine]) is Status.FAIL


def test_text() -> None:
    assert str(WRONG) == "it is taken; free it"
    assert str(Finding("a", Status.PASS, "x")) == "x"
