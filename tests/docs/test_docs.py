"""The documents: their code runs, what they quote is what is printed today, their facts are the source's.

``UPDATE_DOCS=1 python -m pytest tests/docs/test_docs.py`` writes today's output and today's graph into them.
"""

from __future__ import annotations

import configparser
import graphlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import yaml

from mingle import cli as discover
from mingle.check import command as check_command
from mingle.cli.output import SCHEMA
from mingle.config import settings
from mingle.config.settings import Arguments
from mingle.engine.progress import line
from mingle.protocol.explain.observations import Diagnostics, Situation
from mingle.run import command as run_command
from mingle.run import placeholders
from mingle.wire import datagrams
from mingle.wire.frames import Status
from tests.support import without_numpy
from tests.support.documents import _FENCE, README, ROOT, UPDATE, Block, blocks, named, read, rewrite
from tests.support.forked_ranks import Rank, run_ranks
from tests.support.ports import free_udp_port
from tests.unit.test_project import MODULES, imports
from tools import build_reference, site_hook

ARCHITECTURE = ROOT / "docs" / "architecture.md"
LIBRARY = ROOT / "docs" / "library.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
SETTINGS = ROOT / "docs" / "settings.md"
TESTS = ROOT / "tests" / "README.md"
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
# Its programs need the frameworks, so tests/frameworks runs them.
FRAMEWORKS = ROOT / "docs" / "frameworks.md"
DEADLINE = 240  # seconds; idle the demo needs a fourteenth of it
LANGUAGES = {"python", "console", "text", "mermaid", "yaml", "ini", "dockerfile"}


# --- fenced blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_says_its_language(path: Path) -> None:
    unknown = [f"{block}: {block.language!r}" for block in blocks(path) if block.language not in LANGUAGES]
    assert unknown == []


# --- ranks --------------------------------------------------------------------------------------------------


def two_ranks(block: Block) -> list[Rank]:
    place = {"WORLD_SIZE": "2", "MINGLE_TIMEOUT": "60"}
    return [Rank({"RANK": str(rank), **place}, block.text, str(block)) for rank in range(2)]


def test_python_blocks_run_on_two_ranks() -> None:
    pages = [path for path in PAGES if path != FRAMEWORKS]
    examples = [block for path in pages for block in blocks(path) if block.language == "python"]
    assert len(examples) >= 7
    results = run_ranks({str(block): two_ranks(block) for block in examples})
    for name, ranks in results.items():
        assert [status for status, _ in ranks] == [0, 0], f"{name}:\n" + "\n".join(out for _, out in ranks)


def test_the_library_prints_what_its_page_says() -> None:
    typed = re.findall(
        r"^\$ RANK=(\d) WORLD_SIZE=2 python library\.py\n(.*\n)", named(LIBRARY, "ranks").text, re.MULTILINE
    )
    script = named(LIBRARY, "library").text
    ranks = [Rank({"RANK": rank, "WORLD_SIZE": "2"}, script) for rank, _ in typed]
    assert run_ranks({"quick": ranks})["quick"] == [(0, printed) for _, printed in typed]
    assert len(typed) == 2


@pytest.mark.slow
def test_two_terminals_print_what_the_readme_says() -> None:
    """The two lines are typed as they are, together; which of them is rank 0 differs from run to run."""
    (first, one), (second, other) = (
        re.fullmatch(r"\$ (.*)\n(.*\n)", named(README, name).text).groups()  # type: ignore[union-attr]
        for name in ("first", "second")
    )
    assert first == second
    environment = {
        **{name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ},
        "PATH": f"{Path(without_numpy.python()).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "USER": f"readme-{os.getpid()}",
        "MINGLE_PORT": str(free_udp_port()),
        "MINGLE_TIMEOUT": "60",
    }
    terminals = [
        subprocess.Popen(
            ["bash", "-c", f"exec timeout {DEADLINE} env {line}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in (first, second)
    ]
    results = [(*terminal.communicate(), terminal.returncode) for terminal in terminals]
    assert [status for _, _, status in results] == [0, 0], results
    assert sorted(out for out, _, _ in results) == sorted([one, other])


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
        (r"^  on this machine: MINGLE_INTERFACE names loopback alone.*\n", ""),
        (r"or with another MINGLE_PORT than \d+, ", ""),  # each group of ranks has its own
        (r"(?<=hosted with a secret at ).*(?=, and)", "ADDRESSES"),
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
    return Rank({"RANK": str(rank), "WORLD_SIZE": str(world_size), "MINGLE_TIMEOUT": "45"} | more, code)


LATER = {"MINGLE_TIMEOUT": "60"}  # not before rank 0
# For each quoted message the ranks that provoke it, and a text by which to know the output that is quoted.
# These ranks have loopback alone by MINGLE_INTERFACE, and shall say what those of other machines say.
ELSEWHERE = f"from mingle.network import inspection\ninspection._could_be_meant = lambda *_: False\n{Rank.code}"
MISTYPED = 'import mingle; mingle.discover("resent")'
# The ranks are forked from a process in which torch has found the entry point.
WITHOUT_ENTRY_POINT = """import sys, torch.distributed as dist
sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers.pop("mingle")
dist.init_process_group(init_method="mingle://resnet")"""
MESSAGES: dict[str, tuple[str, list[Rank]]] = {
    "missing-rank": ("joined, missing ranks: 2.\n", [at(0, 4, ELSEWHERE), *(at(rank, 4, **LATER) for rank in (1, 3))]),
    "not-found": ("rank 0 was not found", [at(1, 2, ELSEWHERE)]),
    "mistyped": ("a mistyped job id: 'resnet'", [at(0, 2), at(1, 2, MISTYPED)]),
    "rank-taken": ("is already taken by rank 1", [at(0, 3), at(1, 3), at(1, 3)]),
    "two-hosts": ("more than one rank 0", [at(0, 2), at(0, 2)]),
    "secret": ("has none", [at(0, 2, MINGLE_SECRET="correct horse"), at(1, 2)]),
    "no-interface": ("eth99", [at(0, 2, MINGLE_INTERFACE="eth99")]),
    "slurm": ("SLURM_PROCID", [Rank({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8"})]),
    "no-handler": ("No rendezvous handler", [at(0, 2, WITHOUT_ENTRY_POINT)]),
}  # fmt: skip


@pytest.mark.slow
def test_messages_are_those_that_ranks_see() -> None:
    quoted = {block.name for path in PAGES for block in blocks(path) if block.language == "text" and block.name}
    assert quoted == set(MESSAGES)
    results = run_ranks({name: ranks for name, (_, ranks) in MESSAGES.items()})
    for name, (sign, _) in MESSAGES.items():
        outputs = [output for _, output in results[name]]
        printed = next((output for output in outputs if _is_error(output, sign)), None)
        assert printed is not None, f"no rank says {sign!r}:\n" + "\n".join(outputs)
        check_quote(named(TROUBLESHOOTING, name), _message(printed))


def _is_error(output: str, sign: str) -> bool:
    return "Traceback" in output and sign in _message(output)


def _message(output: str) -> str:
    """Return what stands below a traceback; of the interfaces of this machine only the first."""
    start = re.search(r"^[\w.]+(Error|Exception): ", output, re.MULTILINE)
    message = output[start.start() :] if start else output
    return re.sub(r"(?<=the interfaces here are: )(lo \S+).*", r"\1 …", message)


def test_the_index_of_symptoms_leads_to_every_section() -> None:
    index, sections = read(TROUBLESHOOTING).split("\n## ", 2)[1:]
    headings = set(re.findall(r"^### (.+)$", "## " + sections, re.MULTILINE))
    assert len(headings) >= 30
    linked = set(re.findall(r"\(#([^)]+)\)", index))
    assert {heading for heading in headings if _anchor(heading) not in linked} == set()


@pytest.mark.slow
def test_the_demo_prints_what_its_page_says() -> None:
    # Another job's leftovers, as a shell may hold them, do not lead the demo astray.
    leftovers = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "LOCAL_RANK": "3"}
    done = subprocess.run(
        [without_numpy.python(), str(ROOT / "examples" / "demo.py")],
        cwd=ROOT,
        env={**os.environ, **leftovers, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # `make` runs it by the Python of .venv; its commands can be pasted from the root of the clone.
    typed = done.stdout.replace(f" {without_numpy.python()} ", " .venv/bin/python ")
    check_quote(named(LIBRARY, "demo"), f"$ make demo\n{typed}")
    (accuracy,) = re.findall(r"^final test accuracy: (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= 0.95
    assert len(set(re.findall(r"found rank 0 at (127\.0\.0\.1:\d+) in", done.stdout))) == 1


# --- facts --------------------------------------------------------------------------------------------------


NO_SETTING = {"MINGLE_", *settings.WRITTEN}
"""The prefix of all of them; and what torchrun's workers and the program of mingle-run are told."""


def test_every_setting_that_is_named_exists() -> None:
    text = "".join(read(path) for path in PAGES)
    named_ones = set(re.findall(r"\bMINGLE_[A-Z_]*[A-Z]\b", text)) - NO_SETTING
    # They belong to the tests, and to the example of a mistake.
    assert named_ones - set(settings.VARIABLES) <= {"MINGLE_SOAK", "MINGLE_LAB_REQUIRED", "MINGLE_JOBID"}


# Their defaults are no values: the launcher, the machine or the other machines decide.
DECIDED_ELSEWHERE = {"job_id", "rank", "world_size", "node_rank", "interface", "secret_file", "master_port"}


def test_defaults_are_those_of_the_source() -> None:
    made = settings.resolve({}, Arguments(job_id="resnet", rank=0, world_size=2))

    def default(name: str) -> str:
        value = getattr(made, name)
        return "none" if value in (None, ()) else f"{value:g}" if isinstance(value, float) else str(value)

    said = {name: each.default for name, each in settings.SETTINGS.items() if name not in DECIDED_ELSEWHERE}
    assert said == {name: default(name) for name in said}


@pytest.mark.parametrize(
    ("command", "mesh"), [(check_command.check, settings.DEFAULT_MESH), (run_command.run, run_command.MESH)]
)
def test_the_help_of_a_command_has_the_default_of_its_mesh(command: click.Command, mesh: str) -> None:
    (option,) = (each for each in command.params if each.name == "mesh")
    assert isinstance(option, click.Option)
    assert (option.help or "").endswith(f"Default: MINGLE_MESH, else {mesh}.")


def test_the_progress_line_is_that_of_the_source() -> None:
    def shown(status: Status) -> str:
        return line("ada-resnet", Situation(diagnostics=Diagnostics(), status=status, connected=True), 12)

    assert f"`{shown(Status(joined=2, world_size=3, hosts='node1, node2'))}`" in read(README)
    assert f"\n{shown(Status(joined=6, world_size=8, missing=(3, 7)))}\n" in read(SETTINGS)


def test_the_reference_is_that_of_the_docstrings() -> None:
    if UPDATE:
        build_reference.DOCUMENT.write_text(build_reference.page(), encoding="utf-8")
    assert read(build_reference.DOCUMENT) == build_reference.page(), (
        "a docstring has changed: UPDATE_DOCS=1 .venv/bin/python -m pytest -n 0 tests/docs/test_docs.py -k reference"
    )


def test_the_versions_are_those_of_the_source() -> None:
    text = read(build_reference.DOCUMENT)
    assert f"wire version {datagrams.MAJOR_VERSION}.{datagrams.MINOR_VERSION}" in text
    assert f'`"schema": {SCHEMA}`' in text
    project = read(ROOT / "pyproject.toml")
    for pattern in (r'requires-python = ">=([\d.]+)"', r'"torch>=([\d.]+)"'):
        (oldest,) = re.findall(pattern, project)
        assert f"≥ {oldest}" in text


# --- commands -----------------------------------------------------------------------------------------------

# What the reader starts and the project does not make; their arguments are theirs.
FOREIGN = {
    *("apt-get", "conda", "docker", "docker-compose", "echo", "eval", "exit", "export", "jupyter", "kubectl"),
    *("accelerate", "mpiexec", "mpirun", "pip", "sbatch", "srun", "sudo", "systemctl", "umask", "base64", "mkdir"),
    *("uv", "."),
}
SCRIPTS = {"train.py": "the reader's own", "library.py": "the library page's", ".venv/bin/python": "made by make"}


@dataclass(frozen=True)
class Command:
    """A line that a reader types: ``$ NAME=VALUE … PROGRAM ARGUMENT …``."""

    block: Block
    settings: Mapping[str, str]
    words: list[str]

    def __str__(self) -> str:
        return f"{self.block} {' '.join(self.words)}"


def commands() -> Iterator[Command]:
    for block in (block for path in PAGES for block in blocks(path) if block.language == "console"):
        for typed in re.findall(r"^ *\$ (.*)$", block.text, re.MULTILINE):
            for part in re.split(r" (?:&&|\|\|?) ", typed.strip("()")):
                words = shlex.split(part, comments=True)
                count = next((n for n, word in enumerate(words) if not re.match(r"[A-Z_0-9]+=", word)), len(words))
                given = dict(word.split("=", 1) for word in words[:count])
                if words[count:]:
                    yield Command(block, given, words[count:])


COMMANDS = list(commands())


def programs(name: str) -> list[Command]:
    return [command for command in COMMANDS if Path(command.words[0]).name == name]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_quoted_command_line_exists(command: Command) -> None:
    program, *arguments = command.words
    if program in ("python", "python3", "pythonX", ".venv/bin/python"):
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1])
        elif arguments[0] != "-c":
            assert arguments[0] in SCRIPTS or (ROOT / arguments[0]).exists() or _is_example(arguments[0])
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE)
        assert {each for each in arguments if "=" not in each} <= set(targets)
    elif program.startswith("./"):
        assert (ROOT / program).exists() or _is_example(program)
    elif program == "mingle-run":
        given = run_command.run.make_context("mingle-run", arguments).params
        for line in (given["command"], shlex.split(given["head"] or "")):
            placeholders.check(line)
    elif program == "mingle-check":
        check_command.check.make_context("mingle-check", arguments)
    elif program not in ("torchrun", "mingle-discover"):  # these have tests of their own
        assert program in FOREIGN


def _is_example(script: str) -> bool:
    return any(path.name == Path(script).name for path in (ROOT / "examples").rglob("*"))


def test_torchrun_takes_its_lines() -> None:
    from torch.distributed.run import get_args_parser  # no test before this one needs it

    lines = [command.words[1:] for command in programs("torchrun")]
    text = "".join(read(path) for path in PAGES)
    lines += [shlex.split(line) for line in re.findall(r"^ExecStart=\S*/torchrun (.*)$", text, re.MULTILINE)]
    assert len(lines) >= 4
    configurations = [get_args_parser().parse_args(line).rdzv_conf for line in lines]
    known = re.findall(r"^\| `(\w+)` \|", read(ROOT / "docs" / "torchrun.md"), re.MULTILINE)
    used = {pair.split("=")[0] for pair in re.findall(r"\w+=[^,\s]*", "\n".join(configurations))}
    assert used <= {*known, "join_timeout", "last_call_timeout"}


@pytest.mark.parametrize("command", programs("mingle-discover"), ids=str)
def test_mingle_discover_takes_its_lines(command: Command) -> None:
    name, *arguments = command.words[1:]
    # The context that main itself makes: click keeps a command's help flags as the first context names them.
    parent = discover.main.make_context("mingle-discover", [name, *arguments])
    known = discover.main.get_command(parent, name)
    assert known is not None
    known.make_context(name, arguments, parent=parent)


def test_the_commands_that_are_named_exist() -> None:
    named_ones = {name for path in PAGES for name in re.findall(r"`mingle-discover (\w+)", read(path))}
    assert {"list", "doctor"} <= named_ones <= set(discover.COMMANDS)


def test_the_targets_of_make_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    wanted = {target for path in PAGES for target in re.findall(r"`make ([a-z-]+)", read(path))}
    assert {"demo", "test"} <= wanted <= targets


def test_the_files_that_are_named_exist() -> None:
    named_ones = {
        name for path in PAGES for name in re.findall(r"`((?:tests|examples|benchmarks|docs)/[\w./-]*)`", read(path))
    }
    assert {name for name in named_ones if not (ROOT / name).exists()} == set()


def test_the_tests_that_are_named_exist() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts]
    existing = {path.name for path in files}
    existing |= {name for path in files for name in re.findall(r"^def (test_\w+)", read(path), re.MULTILINE)}
    text = read(TESTS) + "".join(read(path) for path in PAGES)
    named_ones = set(re.findall(r"`(?:\w+/)*(test_\w+(?:\.py)?)`", text)) | set(re.findall(r"`(\w+\.py)`", read(TESTS)))
    assert {"zygote.py", "test_transport.py"} <= named_ones
    assert named_ones - existing == set()


def test_the_modules_that_are_named_exist() -> None:
    named_ones = {name for path in PAGES for name in re.findall(r"`(mingle(?:\.[a-z_]+)+)`", read(path))}
    assert {name for name in named_ones if not _is_there(name)} == set()


def _is_there(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return name in MODULES or (module in MODULES and hasattr(importlib.import_module(module), attribute))


def test_the_other_languages_are_well_formed() -> None:
    by_language: dict[str, list[Block]] = {}
    for block in (block for path in PAGES for block in blocks(path)):
        by_language.setdefault(block.language, []).append(block)
    for block in by_language["yaml"]:
        for service in yaml.safe_load(block.text)["services"].values():
            given = service.get("environment", {})
            assert {name for name in given if name.startswith("MINGLE_")} <= set(settings.VARIABLES), block
    for block in by_language["dockerfile"]:
        lines = [line.split(maxsplit=1) for line in block.text.splitlines()]
        assert lines[0][0] == "FROM"
        assert {word for word, _ in lines} <= {"FROM", "COPY", "RUN", "CMD"}, block
        assert json.loads(next(rest for word, rest in lines if word == "CMD"))[0] == "python"
    for block in by_language["mermaid"]:
        assert ";" not in block.text, f"{block}: a semicolon ends a statement of mermaid, also inside a text"
    for block in by_language["ini"]:
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(block.text)
        assert unit.sections() == ["Unit", "Service", "Install"], block


def test_the_secret_of_the_unit_belongs_to_its_user() -> None:
    (unit,) = (block.text for block in blocks(ROOT / "docs" / "launchers.md") if block.language == "ini")
    (user,) = re.findall(r"^User=(.+)$", unit, re.MULTILINE)
    (secret,) = re.findall(r"^Environment=MINGLE_SECRET_FILE=(.+)$", unit, re.MULTILINE)
    (install,) = (command.words for command in programs("sudo") if "install" in command.words)
    assert install == ["sudo", "install", "-D", "-m", "600", "-o", user, "~/.mingle-secret", secret]


def test_only_its_owner_can_enter_a_directory_that_the_pages_make() -> None:
    """A user who can write to the job's directory can send its ranks to a host of their own."""
    examples = (path for path in (ROOT / "examples").rglob("*") if path.suffix in (".sh", ".sbatch"))
    lines = [line for path in (*PAGES, *examples) for line in re.findall(r"\bmkdir -.*", read(path))]
    assert len(lines) >= 5
    # That of all users has a secret for each job.
    assert {line for line in lines if not line.startswith(("mkdir -m 700 -p ", "mkdir --mode=1777 /"))} == set()


# --- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
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


def test_the_home_of_the_site_shows_the_pictures_of_the_readme() -> None:
    """It is README, one folder up: mkdocs itself finds a broken link, but not one that was dropped."""
    home = site_hook.on_page_markdown(
        read(README), SimpleNamespace(file=SimpleNamespace(src_uri=site_hook.HOME), meta={})
    )
    assert re.findall(r"!\[.*\]\((.*)\)", home) == [
        each.removeprefix("docs/") for each in re.findall(r"!\[.*\]\((.*)\)", read(README))
    ]


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", read(path)), re.MULTILINE)
    return {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- the rooms ----------------------------------------------------------------------------------------------


def rooms() -> dict[str, list[str]]:
    """Return the modules of each room, from the table in the document."""
    rows = re.findall(r"^\| \*\*(\w+)\*\* \| ([^|]+) \|", read(ARCHITECTURE), re.MULTILINE)
    return {room: re.findall(r"`([\w.]+)`", modules) for room, modules in rows}


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
        if name and path.name != "__init__.py":
            packages.setdefault(package, []).append(name)
        elif not name and path.name != "__init__.py":
            top.append(package)
    table = {room: sorted(modules) for room, modules in rooms().items()}
    for package, modules in packages.items():
        assert table.pop(package) == sorted(modules), "docs/architecture.md's table of rooms is out of date"
    assert sorted(module for modules in table.values() for module in modules) == sorted(top)


def test_each_module_that_starts_threads_is_named() -> None:
    (section,) = re.findall(r"^## Threads, forks, exit\n(.*?)^## ", read(ARCHITECTURE), re.MULTILINE | re.DOTALL)
    starts = {module.removeprefix("mingle.") for module, path in MODULES.items() if "threading.Thread(" in read(path)}
    starts.remove("detached")  # its function `run` is named
    assert {
        module for module in starts if f"`{module}`" not in section and f"`{module.split('.')[-1]}`" not in section
    } == set()


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
