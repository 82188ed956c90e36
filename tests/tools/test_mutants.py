"""``make mutants``: what is mutated, and what the table says of a room of a few lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT

ROOM = """
from typing import Annotated

LIMIT = 3
Short = Annotated[str, 12]

def fits(count: int, limit: int = LIMIT) -> bool:
    return count <= limit

def nobody_calls(flag):
    if flag:
        raise ValueError(f"wording {1 + 1}")
"""
TESTS = """
import pytest
from mingle.toy import fits

@pytest.mark.parametrize("count", [1, 3])
def test_up_to_the_limit_it_fits(count):
    assert fits(count)

def test_above_the_limit_it_does_not_fit():
    assert not fits(4)

def test_far_above_the_limit_it_does_not_fit():
    assert not fits(9)
"""


def run(root: Path, *options: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "mutants.py", "toy", "--root", root, *options],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture(name="root", scope="module")
def make_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for file, text in {
        "src/mingle/__init__.py": "",
        "src/mingle/toy/__init__.py": ROOM,
        "tests/unit/toy/test_toy.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\nmarkers = ["slow", "lab"]\n',
    }.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_all_killers_of_each_mutant_are_told(root: Path) -> None:
    said = run(root)
    test, room = "tests/unit/toy/test_toy.py::test", "src/mingle/toy/__init__.py"
    survivors = said[said.index("survivors:") + 1 : said.index("only killers:") - 1]
    assert survivors == [
        f"  {room}:11: flag  ->  not flag",
        f"  {room}:12: raise ValueError(f'wording {{1 + 1}}')  ->  pass",
        f"  {room}:5: 12  ->  13",
    ]
    assert f"  {test}_above_the_limit_it_does_not_fit  {room}:4: 3  ->  4" in said
    assert f"  {test}_up_to_the_limit_it_fits  {room}:8: count <= limit  ->  count < limit" in said
    assert f"  {test}_up_to_the_limit_it_fits  {room}:8: return count <= limit  ->  return" in said
    assert f"  {test}_far_above_the_limit_it_does_not_fit  (0 with others)" in said
    assert said[-2:] == ["6 mutants in the room; tried 6, killed 3", "3 test functions; the only killer of something 2"]


@pytest.mark.slow
def test_the_seed_decides_the_sample(root: Path) -> None:
    first, again, other = (run(root, "--count", "2", "--seed", seed) for seed in ("1", "1", "3"))
    assert first == again != other
    assert first[-2].startswith("6 mutants in the room; tried 2, ")
