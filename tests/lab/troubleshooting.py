"""What docs/troubleshooting.md quotes of the lab's faults: ``python -m tests.lab.troubleshooting [TITLE …]`` prints it.

It needs root, and a minute or two for all faults.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from . import Lab
from .fault_table import FAULTS, Fault

DOCUMENT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_VARYING = (
    (r"pid \d+ \([^)]*\)", "pid … (…)"),
    (r"pid \d+", "pid …"),
    (r"\b\d+ (sent|heard|datagrams|packets|rejected|magic|malformed|version|unsigned|signature)\b", r"… \1"),
    (r"\bwithin \d+\.?\d* s|\(\d+ of \d+\)|\d+\.\d+ ms", "…"),
    (r"\d+ of its datagrams", "… of its datagrams"),
    (r"^(\S+\t\S+\t\S+ pid …\t[^\t:]+:)\d+", r"\1…"),
    (r"(10\.77\.0\.\d+):\d{4,5}", r"\1:…"),
    (r"TCP port \d+", "TCP port …"),
)


def quoted(who: str, text: str) -> list[str]:
    """The lines of an answer that matter, with … for what differs each time."""
    lines = [line for line in text.rstrip().splitlines() if _matters(who, line)]
    for pattern, replacement in _VARYING:
        lines = [re.sub(pattern, replacement, line) for line in lines]
    return [line.replace("\t", "  ") for line in lines]


def _matters(who: str, line: str) -> bool:
    if who.startswith("doctor"):
        return line.startswith(("WARN", "FAIL"))
    if who == "ping":
        return line.startswith(("=", "WARN", "FAIL"))
    if who == "env":
        return "\t" not in line  # the table
    return True


def section(text: str, fault: Fault) -> str:
    """What the document says of a fault, below its heading."""
    start = text.index(f"### {fault.title[0].upper()}{fault.title[1:]}\n")
    end = re.compile(r"^#{2,3} ", re.MULTILINE).search(text, start + 4)
    return text[start : end.start() if end else None]


def quotes(text: str, fault: Fault) -> dict[str, list[str]]:
    """What the document quotes of a fault, by who says it; what nobody is named for, the rank says."""
    said = re.compile(r"^(?:`mingle-discover (.*?)` says:\n\n)?```text\n(.*?)\n```", re.MULTILINE | re.DOTALL)
    return {who or "init": lines.splitlines() for who, lines in said.findall(section(text, fault))}


def main(titles: list[str]) -> None:
    """Make every fault once, or those of these titles, and print what is said, in the form of the document."""
    assert not set(titles) - {fault.title for fault in FAULTS}, [fault.title for fault in FAULTS]
    for fault in FAULTS:
        if not titles or fault.title in titles:
            with Lab() as lab:
                told = fault.make(lab)
            print(f"### {fault.title[0].upper()}{fault.title[1:]}\n")
            for who, text in told.items():
                title = () if who == "init" else (f"`mingle-discover {who}` says:\n",)
                print(*title, "```text", *quoted(who, text), "```", sep="\n", end="\n\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
