"""What holds for the project as a whole: its surface, its shape, and what it installs."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mingle

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mingle"
UNIT = ROOT / "tests" / "unit"

# The contract: these names are what users write, so taking one away breaks them.
CONTRACT = {
    *("AuthenticationError", "ConfigurationError", "ConflictError", "ConnectivityError", "DiscoveryTimeoutError"),
    *("InterfaceError", "Job", "LauncherError", "Member", "MingleError", "discover", "init"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def run_python(code: str) -> object:
    """Return what the code prints as JSON, run by an interpreter that has imported nothing yet."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: str, path: Path) -> Iterator[str]:
    """Yield the package's modules that this one needs when it runs, wherever in it they are imported."""
    tree = parsed(path)
    only_typing = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for statement in block.body
        for node in ast.walk(statement)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in only_typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in MODULES or source in MODULES:
                    yield inner if inner in MODULES else source


def test_the_public_names_are_those_of_the_contract() -> None:
    assert set(mingle.__all__) >= CONTRACT
    assert [name for name in mingle.__all__ if not hasattr(mingle, name)] == []
    assert len(mingle.__all__) == len(set(mingle.__all__))


def test_dir_shows_the_public_names_before_any_of_them_is_used() -> None:
    shown = run_python("import json, mingle; print(json.dumps([dir(mingle), mingle.__all__]))")
    assert isinstance(shown, list)
    assert set(shown[1]) <= set(shown[0])


SETTINGS_SIDE = ", ".join(
    ["mingle.errors", "mingle.distributed.environment"]
    + [f"mingle.config.{name}" for name in ("values", "launchers", "placement", "settings")]
)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("mingle", {"torch", "click", "rich", "numpy"}),
        (SETTINGS_SIDE, {"torch", "click", "rich", "netifaces", "multicast_expert"}),
    ],
    ids=["the package", "the settings"],
)
def test_an_import_loads_no_heavy_library(modules: str, heavy: set[str]) -> None:
    listing = "sorted({name.partition('.')[0] for name in sys.modules})"
    loaded = run_python(f"import json, sys, {modules}; print(json.dumps({listing}))")
    assert isinstance(loaded, list)
    assert "mingle" in loaded
    assert heavy.isdisjoint(loaded)


def test_rank_loads_nothing_that_only_a_failure_or_another_way_needs() -> None:
    """`import mingle` after `import torch` loads what `mingle.distributed.rendezvous` imports."""
    loaded = run_python("import json, sys, mingle.distributed.rendezvous; print(json.dumps(sorted(sys.modules)))")
    assert isinstance(loaded, list)
    assert "mingle.engine.discovery" in loaded
    rooms = ("check", "cli", "elastic", "lightning", "observe", "run")
    assert [each for each in loaded if each.startswith(tuple(f"mingle.{room}" for room in rooms))] == []
    ways = {f"mingle.network.{name}" for name in ("bucket", "bucket_helper", "directory")}
    assert {"mingle.diagnostics.diagnosis", "mingle.network.inspection", "mingle.wire.echo", *ways}.isdisjoint(loaded)


def test_modules_depend_on_each_other_one_way() -> None:
    needs = {name: set(imports(name, path)) - {name} for name, path in MODULES.items()}
    assert any(needs.values())
    # Raises CycleError, which names the modules on the cycle.
    graphlib.TopologicalSorter(needs).prepare()


def test_no_machine_explains_itself() -> None:
    """It hands out its situation; its driver asks for the cause."""
    texts = {"mingle.protocol.explain.ladder", "mingle.protocol.explain.deadline"}
    machines = [each for each in MODULES if each.startswith(("mingle.protocol.", "mingle.elastic."))]
    outside = [each for each in machines if not each.startswith("mingle.protocol.explain")]
    assert outside
    assert [each for each in outside if texts & set(imports(each, MODULES[each]))] == []


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES.keys())
def test_module_says_what_it_is_for(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}
    assert ast.get_docstring(parsed(path)), "a module opens with what it is for"


# The modules without a file of tests of their own, and why.
UNTESTED_ALONE = {
    "mingle": "its names are tested here, and each where it is defined",
    "mingle.__main__": "one call of mingle.cli: tests/unit/cli/test_main.py",
    "mingle._version": "one constant: test_the_version_is_written_once",
    "mingle.cli": "the command as a whole: tests/unit/cli/test_main.py",
    "mingle.diagnostics": "the record of a finding, with the two modules that make findings",
}
# The rooms whose tests drive the whole machine by events: its modules change, and the tests stay.
TESTED_AS_A_WHOLE = {"protocol"}
# The files of tests that no module has given its name, and what they test.
TESTS_OF_MORE = {
    "cli/test_commands.py": "mingle_commands, beside the package",
    "cli/test_main.py": "mingle.cli itself",
    "test_doors.py": "all entry points",
    "test_project.py": "the project",
    "wire/test_number_ranges.py": "all messages of the room",
}


def test_each_module_has_a_file_of_tests_where_its_reader_looks() -> None:
    def is_bare(path: Path) -> bool:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        return all(isinstance(each, ast.Expr) for each in body)  # a docstring

    modules = {module: path.relative_to(PACKAGE) for module, path in MODULES.items() if not is_bare(path)}
    wanted = {module: path for module, path in modules.items() if path.parts[0] not in TESTED_AS_A_WHOLE}
    missing = {module for module, path in wanted.items() if not (UNIT / path.parent / f"test_{path.name}").exists()}
    assert missing == set(UNTESTED_ALONE), "write tests/unit/ROOM/test_MODULE.py, or state here why there is none"


def test_each_file_of_unit_tests_bears_the_name_of_a_module() -> None:
    def is_named(path: Path) -> bool:
        words = path.stem.removeprefix("test_").split("_")
        names = ("_".join(words[:count]) for count in range(1, len(words) + 1))
        return any((PACKAGE / path.parent / f"{name}.py").exists() for name in names)

    every = [path.relative_to(UNIT) for path in UNIT.rglob("test_*.py")]
    files = [path for path in every if path.parts[0] not in TESTED_AS_A_WHOLE]
    assert {str(path) for path in files if not is_named(path)} == set(TESTS_OF_MORE)


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def pins() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def installed_by_make() -> list[Requirement]:
    table = project()
    extras = table["optional-dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(table["dependencies"], list)
    lines = [*table["dependencies"], *extras["examples"], *extras["s3"], *extras["dev"]]
    requirements = [Requirement(line) for line in lines]
    return [requirement for requirement in requirements if requirement.name != table["name"]]


@pytest.mark.parametrize("requirement", installed_by_make(), ids=str)
def test_requirement_of_make_is_pinned_within_the_range_of_the_package(requirement: Requirement) -> None:
    matching = pins()[canonicalize_name(requirement.name)]
    for pin in matching:
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version)


def test_the_version_is_written_once() -> None:
    assert "version" in project()["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+([.-]?\w+)*", mingle.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog or f"## [{mingle.__version__}]" in changelog


def test_nothing_names_an_index_or_a_directory_of_one_machine() -> None:
    # Put together here, so that this file does not find itself. A folder beside the reader is no other place.
    options = [f"--{kind}-url" for kind in ("index", "extra-index")]
    options.append("--find" + "-links[= ](?:https?:|file:|/)")
    domains = (("pypi", "org"), ("pythonhosted", "org"), ("pytorch", "org/whl"), ("ghcr", "io"), ("anaconda", "org"))
    hosts = [rf"{name}\.{end}" for name, end in domains]
    index_option = "|".join(options + hosts)
    home = "/(?:" + "|".join(("home/[a-z]+/", "Users/[A-Za-z]+/", "root/[.a-z]")) + ")"
    unfinished = r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b"
    pattern = re.compile(f"{index_option}|{home}|{unfinished}")
    folders = ("src", "tests", "examples", "docs", "benchmarks", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    texts = [path for path in files if path.suffix in {"", ".py", ".md", ".toml", ".txt", ".yaml", ".yml"}]
    assert ROOT / "pyproject.toml" in texts
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        if "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
