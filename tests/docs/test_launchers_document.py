"""docs/launchers.md: its table is the one of the source, and what it names exists.

``UPDATE_DOCS=1 python -m pytest tests/docs/test_launchers_document.py`` writes today's table into it.
"""

from __future__ import annotations

import re

from mingle.config.launchers import LAUNCHERS, Launcher
from tests.support.documents import ROOT, UPDATE, read

DOCUMENT = ROOT / "docs" / "launchers.md"
_BEGIN, _END = "<!-- table of launchers: begin -->\n", "<!-- table of launchers: end -->"


def cell(*names: str) -> str:
    """Names of variables as code, also in the words for what is computed of them."""
    return " or ".join(re.sub(r"[A-Z][A-Z0-9_]+(\[\w+\])?", r"`\g<0>`", name) for name in names) or "-"


def row(launcher: Launcher) -> str:
    size = cell(*launcher.world_size) + (" (the user's)" if launcher.size_is_the_users else "")
    cells = [
        launcher.name,
        cell(*launcher.rank),
        size,
        cell(*launcher.local_rank),
        cell(*launcher.node_rank),
        " + ".join(cell(*names) for names in launcher.job_id) or "-",
        cell(*launcher.attempt),
    ]
    return f"| {' | '.join(cells)} |\n"


def test_the_table_is_that_of_the_source() -> None:
    head = "| launcher | rank | size | local rank | node | job id | attempt |\n|---|---|---|---|---|---|---|\n"
    table = head + "".join(map(row, LAUNCHERS))
    before, _, rest = read(DOCUMENT).partition(_BEGIN)
    written, _, after = rest.partition(_END)
    if UPDATE:
        DOCUMENT.write_text(before + _BEGIN + table + _END + after, encoding="utf-8")
        return
    assert written == table


def test_every_launcher_that_needs_a_word_has_one() -> None:
    text = read(DOCUMENT)
    for launcher in LAUNCHERS:
        if launcher.one_per_node or launcher.size_is_the_users or not launcher.job_id:
            assert launcher.name.split()[0] in text.split(_END)[1]


def test_the_examples_that_are_named_are_all_there_are() -> None:
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"}
    documents = "".join(read(path) for path in (ROOT / "docs").glob("*.md"))
    files = [path for folder in folders for path in (ROOT / "examples" / folder).iterdir() if path.is_file()]
    assert {"kubernetes", "pdsh", "slurm"} <= folders
    assert [path.name for path in files if f"../examples/{path.parent.name}/{path.name}" not in documents] == []
