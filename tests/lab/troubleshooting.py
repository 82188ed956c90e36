"""Writes docs/troubleshooting.md from the lab: ``python -m tests.lab.troubleshooting`` (as root, a minute or two)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests import causes

from . import Lab
from .fault_table import FAULTS, SYMPTOMS, Fault
from .faults import Said

DOCUMENT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_VARYING = (
    (r"pid \d+ \([^)]*\)", "pid … (…)"),
    (r"pid \d+", "pid …"),
    (r"\b\d+ (sent|heard|datagrams|packets|rejected|magic|malformed|version|unsigned|signature)\b", r"… \1"),
    (r"\bwithin \d+\.?\d* s|\(\d+ of \d+\)|\d+\.\d+ ms", "…"),
    (r"\d+ of its datagrams", "… of its datagrams"),
    (r"^(\S+\t\S+\t\S+ pid …\t[^\t:]+:)\d+", r"\1…"),
    (r"(10\.77\.0\.\d+):\d{4,5}", r"\1:…"),
)
_INTRODUCTION = """# Troubleshooting

Faults by symptom, each with what the rank and the commands print for it. The test lab made every fault for real, and a
test compares the output with today's. … stands for what differs each time.

Three commands find most faults:

```text
mingle-discover list          # which jobs are there, which ranks are missing, which still look for their host
mingle-discover doctor        # what is wrong with this machine (root sees more)
mingle-discover ping          # on every host at the same time: which hosts reach each other, and over which paths
```

The likely cause in an error of the library comes from the same checks as `doctor`. Ranks that wait name it from 10 s
on, in their [progress line](settings.md#logs).
"""


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


def section(fault: Fault, told: Mapping[str, str]) -> str:
    """One fault with what is said of it."""
    parts = [f"### {fault.title[0].upper()}{fault.title[1:]}\n\n{fault.why}\n"]
    for who, text in told.items():
        title = "The rank says:" if who == "init" else f"`mingle-discover {who}` says:"
        body = "\n".join(quoted(who, text))
        parts.append(f"{title}\n\n```text\n{body}\n```\n")
    return "\n".join(parts)


def index() -> str:
    """Return the list of symptoms, each with a link to its faults."""
    lines = []
    for symptom, heading in SYMPTOMS.items():
        titles = [fault.title[0].upper() + fault.title[1:] for fault in FAULTS if fault.symptom == symptom]
        links = "\n".join(f"  - [{title}](#{anchor(title)})" for title in titles)
        lines.append(f"- **[{heading}](#{anchor(heading)})**\n{links}")
    return "## By symptom\n\n" + "\n".join(lines) + "\n"


def anchor(heading: str) -> str:
    """Return the anchor that a code host gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def document(told: Mapping[str, Said]) -> str:
    """The whole text."""
    parts = [_INTRODUCTION, index()]
    for symptom, heading in SYMPTOMS.items():
        parts.append(f"## {heading}\n")
        parts += [section(fault, told[fault.title]) for fault in FAULTS if fault.symptom == symptom]
    parts.append(causes.table())
    return "\n".join(parts)


def quotes(text: str, fault: Fault) -> dict[str, list[str]]:
    """What the document quotes of a fault, by who says it."""
    start = text.index(f"### {fault.title[0].upper()}{fault.title[1:]}\n")
    end = re.compile(r"^#{2,3} ", re.MULTILINE).search(text, start + 4)
    body = text[start : end.start() if end else None]
    said = re.compile(r"^(The rank|`mingle-discover (.*?)`) says:\n\n```text\n(.*?)\n```", re.MULTILINE | re.DOTALL)
    return {who or "init": lines.splitlines() for _, who, lines in said.findall(body)}


def main() -> None:
    """Make every fault once and write down what is said."""
    told = {}
    for fault in FAULTS:
        print(fault.title, flush=True)
        with Lab() as lab:
            told[fault.title] = fault.make(lab)
    DOCUMENT.write_text(document(told), encoding="utf-8")


if __name__ == "__main__":
    main()
