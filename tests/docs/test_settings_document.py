"""The tables of settings, keys and options in the documents are those of the source.

``UPDATE_DOCS=1 python -m pytest tests/docs/test_settings_document.py`` writes today's tables into them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import pytest

import mingle
from mingle.config.settings import SETTINGS
from mingle.elastic.settings import OWN_KEYS
from tests.support.documents import ROOT, UPDATE, read


def code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def described(text: str) -> str:
    """A meaning or a default, with variables and paths as code."""
    return re.sub(r"(?<!`)\b(?:MINGLE_\w+|WORLD_SIZE|RANK|dir:/path|s3://bucket/prefix|host:port)\b", r"`\g<0>`", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    first = [*head]
    lines = [f"| {' | '.join(cells)} |" for cells in (first, *rows)]
    return "\n".join([lines[0], "|---" * len(first) + "|", *lines[1:], ""])


def settings_table() -> str:
    taken = inspect.signature(mingle.init).parameters
    rows = [
        (
            code(each.variable),
            code(f"{each.name}=") if each.name in taken else "",
            code(*each.flags),
            described(each.described),
            described(each.default),
        )
        for each in SETTINGS.values()
    ]
    return table(("variable", "argument", "option", "meaning", "default"), rows)


def options_table() -> str:
    rows = []
    for each in SETTINGS.values():
        if each.flags and each.section == "Network":
            value = each.metavar or "\\|".join(each.values)
            spelled = code(*each.flags[:-1], f"{each.flags[-1]} {value}")
            more = "; can be repeated" if each.repeated else ""
            rows.append((spelled, described(each.meaning) + more, described(each.fallback)))
    return table(("option", "meaning", "default"), rows)


@pytest.mark.parametrize(
    ("name", "subject", "made"),
    [
        ("settings.md", "settings", settings_table()),
        (
            "torchrun.md",
            "keys",
            table(("key", "meaning"), ((code(key), described(text)) for key, text in OWN_KEYS.items())),
        ),
        ("cli.md", "options", options_table()),
    ],
    ids=["settings", "keys", "options"],
)
def test_the_table_is_that_of_the_source(name: str, subject: str, made: str) -> None:
    path, begin, end = ROOT / "docs" / name, *(f"<!-- table of {subject}: {edge} -->" for edge in ("begin", "end"))
    before, _, rest = read(path).partition(f"{begin}\n")
    written, _, after = rest.partition(end)
    assert after
    if UPDATE:
        path.write_text(f"{before}{begin}\n{made}{end}{after}", encoding="utf-8")
    else:
        assert written == made, "the table of settings has changed: see the first lines of this file"
