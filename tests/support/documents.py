"""The pages of the documentation, and the fenced blocks in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
UPDATE = bool(os.environ.get("UPDATE_DOCS"))


@dataclass(frozen=True)
class Block:
    """A fenced block; ``name`` is what follows the language, as in ```` ```text missing-rank ````."""

    path: Path
    line: int
    language: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


_FENCE = re.compile(r"^ *```(\w*) ?(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)


def blocks(path: Path) -> Iterator[Block]:
    text = read(path)
    for found in _FENCE.finditer(text):
        yield Block(path, text.count("\n", 0, found.start()) + 1, found[1], found[2], found[3])


def named(path: Path, name: str) -> Block:
    (block,) = (each for each in blocks(path) if each.name == name)
    return block


def rewrite(block: Block, text: str) -> None:
    document = read(block.path)
    fence = f"```{block.language} {block.name}\n"
    assert document.count(fence + block.text) == 1
    block.path.write_text(document.replace(fence + block.text, fence + text), encoding="utf-8")
