"""docs/containers.md tells of what is there."""

from __future__ import annotations

import re

from .project import ROOT, MakeProject

TEXT = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
COMPOSE_FILE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def test_document_lists_the_variables_of_the_compose_file_with_their_defaults() -> None:
    (table,) = re.findall(r"^\| variable .*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
    told = {name: row[-1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    defaults = dict(re.findall(r"\$\{(\w+):?-([^}]*)\}", COMPOSE_FILE))
    assert sorted(told) == sorted(defaults)
    assert [name for name, default in defaults.items() if (default or "none") not in told[name]] == []


def test_compose_takes_its_override(project: MakeProject) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    mine = project()
    assert "/app/train.py" not in mine.compose("config")
    mine.change(block)
    after = mine.compose("config")
    assert "/app/train.py" in after
    assert "MINGLE_TIMEOUT" in after
    assert "MINGLE_JOB_ID" in after
