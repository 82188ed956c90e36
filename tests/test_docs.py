"""The documents: their code runs, what they quote is what is printed today, their facts are the source's.

``UPDATE_DOCS=1 python -m pytest tests/test_docs.py`` writes today's output and today's graph into them.
"""

from __future__ import annotations

import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import mingle
from mingle.cli import main as discover_command
from mingle.cli.output import SCHEMA
from mingle.config import settings
from mingle.engine.progress import line
from mingle.protocol.machine import Snapshot
from mingle.wire import datagrams
from tests.forked_ranks import Rank, run_ranks
from tests.test_project import MODULES, imports

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
NETWORKS = ROOT / "docs" / "networks.md"
TORCHRUN = ROOT / "docs" / "torchrun.md"
OURS = (README, ARCHITECTURE, COMPATIBILITY, NETWORKS, TORCHRUN)
# Their programs need more than the tests of this file do: see tests/frameworks and tests/launchers.
ELSEWHERE = tuple(ROOT / "docs" / f"{name}.md" for name in ("frameworks", "kubernetes", "launchers"))
UPDATE = bool(os.environ.get("UPDATE_DOCS"))
DEADLINE = 120  # seconds; idle the demo needs a seventh of it
LANGUAGES = {"python", "console", "text", "mermaid"}


# --- fenced blocks ------------------------------------------------------------------------------------------


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


_FENCE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


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


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_every_block_says_its_language(path: Path) -> None:
    unknown = [f"{block}: {block.language!r}" for block in blocks(path) if block.language not in LANGUAGES]
    assert unknown == []


# --- ranks --------------------------------------------------------------------------------------------------


def two_ranks(block: Block) -> list[Rank]:
    place = {"WORLD_SIZE": "2", "MINGLE_TIMEOUT": "60"}
    return [Rank({"RANK": str(rank), **place}, block.text, str(block)) for rank in range(2)]


def test_python_blocks_run_on_two_ranks() -> None:
    examples = [block for path in OURS for block in blocks(path) if block.language == "python"]
    assert len(examples) >= 4
    results = run_ranks({str(block): two_ranks(block) for block in examples})
    for name, ranks in results.items():
        assert [status for status, _ in ranks] == [0, 0], f"{name}:\n" + "\n".join(out for _, out in ranks)


def test_the_first_commands_print_what_the_readme_says() -> None:
    console, script = (
        named(README, "start"),
        next(each for each in blocks(README) if each.language == "python"),
    )
    commands = re.findall(r"^\$ ((?:[A-Z_]+=\S+ )+)python train\.py.*\n((?:[^$].*\n)*)", console.text, re.MULTILINE)
    places = [dict(item.split("=", 1) for item in assignments.split()) for assignments, _ in commands]
    assert len(places) == console.text.count("$") == 2
    results = run_ranks({"start": [Rank(place, script.text) for place in places]})["start"]
    assert results == [(0, printed) for _, printed in commands]


# --- quoted output ------------------------------------------------------------------------------------------

# What differs from run to run and from machine to machine, in output that is otherwise the same.
_VARYING = [
    (re.compile(pattern, re.MULTILINE), fixed)
    for pattern, fixed in (
        (r"\bdemo-[0-9a-f]{6}\b", "demo-ID"),
        (r"\bpid \d+", "pid N"),
        (r"(?<=[\d\]]):\d{2,5}\b", ":PORT"),
        (r"\b\d+(\.\d+)? s\b", "T s"),
        (r"\bhost \S+(?= \(|,)", "host NAME"),
        (r"^(rank \d+) on \S+", r"\1 on NAME"),
        (r"^(  rank \d+:) \S+", r"\1 NAME"),
        (r"(?<=accuracy: )\d\.\d+", "0.9"),
        (r"(?<=sha256 )[0-9a-f]+", "HASH"),
        (r"^  (others that look for|interfaces:|datagrams:).*\n", ""),
        (r"\d+(?= datagrams were rejected)", "N"),
    )
]


def comparable(text: str) -> list[str]:
    """Return the lines without what varies; sorted, since ranks that print at once do so in any order."""
    for pattern, fixed in _VARYING:
        text = pattern.sub(fixed, text)
    return sorted(text.splitlines())


def check_quote(block: Block, printed: str) -> None:
    if UPDATE:
        if comparable(block.text) != comparable(printed):
            rewrite(block, printed)
        return
    assert comparable(block.text) == comparable(printed), f"{block} is not what is printed: see this file's head"


def at(rank: int, world_size: int, code: str = Rank.code, **more: str) -> Rank:
    return Rank({"RANK": str(rank), "WORLD_SIZE": str(world_size), "MINGLE_TIMEOUT": "5"} | more, code)


# For each quoted message the ranks that provoke it, and a text by which to know the output that is quoted.
MISTYPED = 'import mingle; mingle.discover("resent")'
WITHOUT_IMPORT = 'import torch.distributed as dist; dist.init_process_group(init_method="mingle://resnet")'
MESSAGES: dict[str, tuple[str, list[Rank]]] = {
    "missing-rank": ("joined, missing ranks: 2.\n", [at(0, 4, MINGLE_TIMEOUT="4"), at(1, 4), at(3, 4)]),
    "not-found": ("rank 0 was not found", [at(1, 2)]),
    "mistyped": ("a mistyped job id: 'resnet'", [at(0, 2), at(1, 2, MISTYPED)]),
    "rank-taken": ("was refused by rank 1", [at(0, 3), at(1, 3), at(1, 3)]),
    "two-hosts": ("more than one rank 0", [at(0, 2, MINGLE_TIMEOUT="8"), at(0, 2, MINGLE_TIMEOUT="8")]),
    "secret": ("has none", [at(0, 2, MINGLE_SECRET="correct horse"), at(1, 2)]),
    "no-interface": ("eth99", [at(0, 2, MINGLE_INTERFACE="eth99")]),
    "slurm": ("SLURM_PROCID", [Rank({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8"})]),
    "no-handler": ("No rendezvous handler", [at(0, 2, WITHOUT_IMPORT)]),
}  # fmt: skip


def test_messages_are_those_that_ranks_see() -> None:
    quoted = {block.name for path in OURS for block in blocks(path) if block.language == "text" and block.name}
    assert quoted == set(MESSAGES)
    results = run_ranks({name: ranks for name, (_, ranks) in MESSAGES.items()})
    for name, (sign, _) in MESSAGES.items():
        outputs = [output for _, output in results[name]]
        printed = next((output for output in outputs if _is_error(output, sign)), None)
        assert printed is not None, f"no rank says {sign!r}:\n" + "\n".join(outputs)
        check_quote(named(README, name), _message(printed))


def _is_error(output: str, sign: str) -> bool:
    return "Traceback" in output and sign in _message(output)


def _message(output: str) -> str:
    """Return what stands below a traceback; of the interfaces of this machine only the first."""
    start = re.search(r"^[\w.]+(Error|Exception): ", output, re.MULTILINE)
    message = output[start.start() :] if start else output
    return re.sub(r"(?<=the interfaces here are: )(lo \S+).*", r"\1 …", message)


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_says() -> None:
    pytest.importorskip("sklearn", reason="the demo trains on scikit-learn's digits: pip install '.[examples]'")
    # Another job's leftovers, as a shell may hold them, do not lead the demo astray.
    leftovers = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "LOCAL_RANK": "3"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        env={**os.environ, **leftovers, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_quote(named(README, "demo"), f"$ make demo\n{done.stdout}")
    (accuracy,) = re.findall(r"^final test accuracy: (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= 0.95
    assert len(set(re.findall(r"found rank 0 at (127\.0\.0\.1:\d+) in", done.stdout))) == 1


# --- facts --------------------------------------------------------------------------------------------------


def table_names(path: Path, pattern: str) -> list[str]:
    """Return the names in the first column of a document's tables that look as wanted."""
    return re.findall(rf"^\| `({pattern})`", read(path), re.MULTILINE)


@pytest.mark.parametrize("path", [README, COMPATIBILITY], ids=lambda path: path.name)
def test_every_setting_is_listed(path: Path) -> None:
    listed = set(re.findall(r"`(MINGLE_[A-Z_]+)`", read(path)))
    listed.discard("MINGLE_GENERATION")  # torchrun's workers are told it; it is no setting
    assert listed == set(settings.VARIABLES)
    if path == README:
        assert sorted(table_names(path, "MINGLE_[A-Z_]+")) == sorted(settings.VARIABLES)


def test_defaults_are_those_of_the_source() -> None:
    text = read(README)
    for name, default in (
        ("MINGLE_PORT", settings.DEFAULT_PORT),
        ("MINGLE_TIMEOUT", settings.DEFAULT_DISCOVERY_TIMEOUT),
        ("MINGLE_TTL", settings.Network().ttl),
        ("MINGLE_FAMILY", settings.Network().family),
        ("MINGLE_PROGRESS", settings.Network().progress),
    ):
        (shown,) = re.findall(rf"^\| `{name}` \|.*\| `?([^|`]+)`? \|$", text, re.MULTILINE)
        expected = f"{default:g}" if isinstance(default, float) else str(default)
        assert shown.strip() == expected, name


def test_the_progress_line_is_that_of_the_source() -> None:
    shown = line("resnet", 8, 0, Snapshot(True, 6, (3, 7)), 12)
    assert f"`{shown}`" in read(README)


def test_the_covered_names_are_the_public_ones() -> None:
    text = read(COMPATIBILITY)
    covered = set(re.findall(r"`(\w+)`", text))
    attributes = {f.name for part in (mingle.Job, mingle.Member) for f in fields(part) if not f.name.startswith("_")}
    assert covered >= set(mingle.__all__) | attributes | {
        "members",
        "close",
        "observation",
        "cause",
        "remedy",
    }


def test_the_versions_are_those_of_the_source() -> None:
    text = read(COMPATIBILITY)
    assert f"wire version {datagrams.MAJOR_VERSION}.{datagrams.MINOR_VERSION}" in text
    assert f'`"schema": {SCHEMA}`' in text
    project = read(ROOT / "pyproject.toml")
    for pattern in (r'requires-python = ">=([\d.]+)"', r'"torch>=([\d.]+)"'):
        (oldest,) = re.findall(pattern, project)
        assert f"≥ {oldest}" in text


def test_the_commands_that_are_named_exist() -> None:
    named_ones = {name for path in (*OURS, *ELSEWHERE) for name in re.findall(r"`mingle-discover (\w+)", read(path))}
    assert {"list", "find"} <= named_ones <= set(discover_command.commands)


def test_the_targets_of_make_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    wanted = {target for path in (*OURS, *ELSEWHERE) for target in re.findall(r"\bmake ([a-z-]+)`", read(path))}
    assert {"demo", "test"} <= wanted <= targets


@pytest.mark.parametrize("path", [*OURS, *ELSEWHERE], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", read(path)))
    broken = []
    for link in links:
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- the rooms ----------------------------------------------------------------------------------------------


def rooms() -> dict[str, list[str]]:
    """Return the modules of each room, from the table in the document."""
    rows = re.findall(r"^\| \*\*(\w+)\*\* \| ([^|]+) \|", read(ARCHITECTURE), re.MULTILINE)
    return {room: re.findall(r"`(\w+)`", modules) for room, modules in rows}


def room_of(module: str, table: Mapping[str, list[str]]) -> str:
    """Return the room a module is in: its package, or for one at the top what the table says."""
    package, _, inner = module.removeprefix("mingle.").partition(".")
    if inner or MODULES[module].name == "__init__.py":
        return package
    return next(room for room, modules in table.items() if package in modules)


def drawn(needs: Mapping[str, set[str]]) -> str:
    """Return the graph as mermaid, without the arrows that follow from others."""

    def reach(room: str) -> set[str]:
        return set().union(*({each} | reach(each) for each in needs[room]))

    lines = ["graph TD"]
    for room in needs:
        beyond = set().union(*(reach(each) for each in needs[room]))
        lines += [f"    {room} --> {other}" for other in needs if other in needs[room] - beyond]
    return "\n".join(lines) + "\n"


def test_every_module_has_one_room() -> None:
    packages: dict[str, list[str]] = {}
    top = []
    for module, path in MODULES.items():
        package, _, name = module.removeprefix("mingle.").partition(".")
        if name:
            packages.setdefault(package, []).append(name)
        elif path.name != "__init__.py":
            top.append(package)
    table = {room: sorted(modules) for room, modules in rooms().items()}
    for package, modules in packages.items():
        assert table.pop(package) == sorted(modules), "docs/architecture.md's table of rooms is out of date"
    assert sorted(module for modules in table.values() for module in modules) == sorted(top)


def test_the_graph_of_the_rooms_is_that_of_the_imports() -> None:
    table = rooms()
    needs: dict[str, set[str]] = {room: set() for room in table}
    for module, path in MODULES.items():
        if module != "mingle":
            room = room_of(module, table)
            others = {room_of(each, table) for each in imports(module, path) if each != "mingle"}
            needs[room] |= others - {room}
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError, which names the rooms
    block = named(ARCHITECTURE, "rooms")
    if UPDATE:
        rewrite(block, drawn(needs))
    assert named(ARCHITECTURE, "rooms").text == drawn(needs)
