"""The confusion table of mingle-check, from the log of a soak: ``python -m tests.lab.check_table LOG``.

``MINGLE_SOAK=1 CHECK_LOG=LOG pytest tests/lab/test_check.py`` writes the log.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def table(lines: Iterable[str]) -> str:
    """Return the counts of each verdict (a row) under each fault, as a table of Markdown."""
    runs = [json.loads(line) for line in lines]
    said = Counter((run["fault"], _words(run["verdicts"])) for run in runs)
    rows = [f"| {fault} | {verdict} | {count} |" for (fault, verdict), count in sorted(said.items())]
    return "\n".join(["| fault | verdict | runs |", "|---|---|---|", *rows])


def _words(verdicts: Iterable[tuple[str, list[str]]]) -> str:
    return "; ".join(f"{kind} {', '.join(where)}" for kind, where in verdicts) or "healthy"


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
