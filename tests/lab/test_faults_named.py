"""Each fault that people meet is named by what they see: the library's error, `doctor`, `ping`, `list`."""

from __future__ import annotations

import re

import pytest

from . import Lab
from .fault_table import FAULTS, Fault
from .faults import Said, tried
from .troubleshooting import DOCUMENT, quoted, quotes, section


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title.replace(" ", "-"))
def test_the_true_cause_is_named(lab: Lab, fault: Fault) -> None:
    tried(lab, lambda fresh: check_words(fault, fault.make(fresh)))


def check_words(fault: Fault, told: Said) -> None:
    """What was said names the cause, in the words of the table and of the document."""
    assert told.keys() == fault.words.keys()
    for who, words in fault.words.items():
        for word in words:
            assert word in told[who], f"{who} does not say {word!r}:\n{told[who]}"
    in_document = quotes(DOCUMENT.read_text(encoding="utf-8"), fault)
    assert in_document.keys() <= told.keys()
    for who, lines in in_document.items():
        said = quoted(who, told[who])
        # Figures of a table, and whoever else happened to be heard, differ; the words in which it is explained do not.
        for line in lines:
            if who == "init" or line.startswith(("WARN", "FAIL")):
                assert any(_same(line, each) for each in said), f"{who} does not say what is documented: {line}\n{said}"


def _same(documented: str, said: str) -> bool:
    return _bare(documented) == _bare(said)


def _bare(line: str) -> str:
    return re.sub(r"\d+(\.\d+)*|…|\s+", "", line)


@pytest.mark.quick
def test_the_document_quotes_something_of_each_fault() -> None:
    """From the lab, or in a block with a name, which `tests.docs` compares with what ranks of one machine print."""
    assert len({fault.title for fault in FAULTS}) == len(FAULTS) >= 26
    text = DOCUMENT.read_text(encoding="utf-8")
    named = re.compile(r"^```text \S", re.MULTILINE)
    assert [fault.title for fault in FAULTS if not (quotes(text, fault) or named.search(section(text, fault)))] == []
