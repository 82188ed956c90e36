"""``python tools/mutants.py ROOM``: which tests notice a small mistake in a room of ``src/mingle``, and which never do.

A mutant is one change of one expression or statement of ``src/mingle/ROOM``. All tests that run its line are run, also
after the first failure, so the table says which mutants only one test kills, and which tests are never the only killer.
The seed decides the sample. A fork of a process that has imported the libraries, but nothing of mingle, tries each
mutant in a copy of the tree: module-level code is mutated as well, and commands that tests start run the mutant.
Texts are not mutated, because no test should compare wording.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

_DOORS = ["tests/unit/test_doors.py"]
BESIDES = {
    "wire": ["tests/golden", "tests/unit/test_text.py"],
    **dict.fromkeys(("config", "cli", "run", "check"), _DOORS),
    "distributed": [*_DOORS, "tests/unit/test_lightning.py"],
}
"""The quick tests of a room that are not in ``tests/unit/ROOM``."""
SECONDS_PER_TEST = 10
MOST_TIMEOUTS = 2
IMPORT = ""
"""Stands for a test's name where a line runs while tests are collected: then all tests decide about its mutants."""
_PAIRS = (
    "Lt:LtE LtE:Lt Gt:GtE GtE:Gt Eq:NotEq NotEq:Eq Is:IsNot IsNot:Is In:NotIn NotIn:In And:Or Or:And Add:Sub Sub:Add "
    "Mult:Add Div:Mult FloorDiv:Mult Mod:Add BitOr:BitAnd BitAnd:BitOr LShift:RShift RShift:LShift "
    "Break:Continue Continue:Break"
)
SWAPPED: dict[type, Any] = {getattr(ast, old): getattr(ast, new) for old, new in (p.split(":") for p in _PAIRS.split())}
OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change of one file."""

    file: Path
    lines: range
    """Those of the smallest statement around the change: the tests that run one of them decide."""
    change: str
    source: bytes

    def __str__(self) -> str:
        return f"{self.file}:{self.lines.start}: {self.change}"


def changes(node: ast.AST, *, annotation: bool, condition: bool) -> Iterator[ast.AST]:
    """Yield what replaces a node. In an annotation only numbers change, since msgspec checks their ranges."""
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case _ if annotation:
            return
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in SWAPPED:
            yield ast.Compare(left, [SWAPPED[type(op)]()], comparators)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(SWAPPED[type(op)](), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPPED:
            yield ast.BinOp(left, SWAPPED[type(op)](), right)
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in SWAPPED:
            yield ast.AugAssign(target, SWAPPED[type(op)](), value)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in OTHER_CALL:
            yield ast.Call(ast.Name(OTHER_CALL[name]), args, keywords)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(None)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "_logger")))):
            return
        case ast.Raise() | ast.Assign(targets=[ast.Attribute()]) | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Break() | ast.Continue():
            yield SWAPPED[type(node)]()
        case ast.Name() | ast.Attribute() | ast.Call() | ast.NamedExpr() if condition:
            yield ast.UnaryOp(ast.Not(), node)


def mutants_of(file: Path, source: bytes) -> Iterator[Mutant]:
    """Yield all mutants of one module, in the order of its syntax tree."""
    begins = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def visit(node: ast.AST, around: ast.stmt | None, *, annotation: bool, condition: bool) -> Iterator[Mutant]:
        # What stands in an f-string is text, and its position is not exact.
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            return
        around = node if isinstance(node, ast.stmt) else around
        if around is not None and isinstance(node, (ast.expr, ast.stmt)):
            begin = begins[node.lineno - 1] + node.col_offset
            end = begins[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            body = getattr(around, "body", None)  # a compound statement runs where its head does
            last = max(node.lineno, body[0].lineno - 1 if body else around.end_lineno or 0)
            for new in changes(node, annotation=annotation, condition=condition):
                text = ast.unparse(ast.fix_missing_locations(new))
                shown = "  ->  ".join(" ".join(code.split())[:70] for code in (ast.unparse(node), text))
                text = f"({text})" if isinstance(new, ast.expr) else text
                yield Mutant(file, range(node.lineno, last + 1), shown, source[:begin] + text.encode() + source[end:])
        for name, value in ast.iter_fields(node):
            if name == "decorator_list" or (name == "keywords" and isinstance(node, ast.ClassDef)):
                continue  # frozen=True and its like are for the type checker and for speed
            typed, tests = annotation or name in {"annotation", "returns"}, name in {"test", "ifs"}
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, around, annotation=typed, condition=tests)

    yield from visit(ast.parse(source), None, annotation=False, condition=False)


class Listener:
    """A plugin of pytest in the forked process: leaves out tests, and writes a line per event to a file."""

    def __init__(self, out: Path, left_out: Collection[str] | None, traced: Path | None) -> None:
        self._left_out, self._traced = left_out, traced
        self._out = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._lines: set[tuple[str, int]] = set()
        self._timeouts = 0
        if traced:
            sys.settrace(self._trace)
            threading.settrace(self._trace)

    def _say(self, *event: object) -> None:
        os.write(self._out, json.dumps(event).encode() + b"\n")

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(str(self._traced)):
            return None
        self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace

    def _say_lines(self, test: str) -> None:
        seen, self._lines = self._lines, set()
        self._say("lines", test, sorted(seen))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in (self._left_out or ())]
        self._say_lines(IMPORT)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say("failed", f"collection of {report.nodeid}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say("failed", report.nodeid)
            self._timeouts += "Timeout (>" in str(report.longrepr)
            if self._timeouts == MOST_TIMEOUTS and self._left_out is not None:
                os._exit(1)  # a mutant that never ends would take this long in every test
        if report.when == "teardown":
            self._say_lines(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        files = {
            name: str(getattr(module, "__file__", "")) for name, module in [*sys.modules.items()] if "." not in name
        }
        self._say("end", [name for name, file in files.items() if "site-packages" in file])


Lines = dict[tuple[str, int], set[str]]


def run_tests(
    tests: Collection[str], limit: float, left_out: Collection[str] | None = None, traced: Path | None = None
) -> tuple[list[str], set[str], Lines]:
    """Run tests in a fork, which a mutant can break or block; return which began, which failed, and who ran a line.

    Without ``left_out`` there is no mutant, and the libraries that the tests import are imported for the next forks.
    """
    ends, out = time.monotonic() + limit, Path(tempfile.gettempdir(), f"mutants-{os.getpid()}")
    child = os.fork()
    if child == 0:
        os.setsid()
        for descriptor in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not lab", "--continue-on-collection-errors"]
        options.append(f"--timeout={SECONDS_PER_TEST * (3 if traced else 1)}")
        options.append("-Wignore::pytest.PytestAssertRewriteWarning")  # of hypothesis, which is imported
        with contextlib.suppress(ImportError):
            from hypothesis import HealthCheck, settings

            # The same examples in each run, whatever the load; tests that name a number of their own keep it.
            checks = list(HealthCheck)
            same = settings(
                derandomize=True, database=None, deadline=None, max_examples=25, suppress_health_check=checks
            )
            settings.register_profile("mutants", same)
            settings.load_profile("mutants")
        try:
            pytest.main([*options, *tests], plugins=[Listener(out, left_out, traced)])
        finally:
            os._exit(0)
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < ends:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    events = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("]")]
    out.unlink()
    began = [event[1] for event in events if event[0] == "start"]
    failed = {event[1] for event in events if event[0] == "failed"}
    if not events or events[-1][0] != "end":
        failed.add(began[-1] if began else "collection")
    elif left_out is None:
        for library in events[-1][1]:
            importlib.import_module(library)
        for name in [name for name in sys.modules if name.startswith("mingle")]:  # torch imports its entry point
            del sys.modules[name]
    lines: Lines = defaultdict(set)
    for _, test, seen in (event for event in events if event[0] == "lines"):
        for file, line in seen:
            lines[file, line].add(test)
    return began, failed, lines


def try_mutants(copy: Path, room: str, seed: int, count: int, ends: float) -> Iterator[str]:
    """Yield a line for each survivor and only killer, then the table."""
    folder = Path(room).parts[0]
    tests = [name for name in (f"tests/unit/{folder}", *BESIDES.get(folder, ())) if Path(name).exists()]
    begun = time.monotonic()
    began, broken, _ = run_tests(tests, ends - begun)
    limit = 1.5 * (time.monotonic() - begun) + 20
    again, _, lines = run_tests(tests, ends - time.monotonic(), traced=copy / "src" / "mingle")
    if len(again) < len(began):
        raise SystemExit(
            f"only {len(again)} of {len(began)} tests began while their lines were noted: give more --minutes"
        )
    known = set(began) - broken
    yield from (f"left out, since it fails without a mutant: {test}" for test in sorted(broken))
    sources = sorted(Path("src/mingle", room).rglob("*.py")) or [Path("src/mingle", f"{room}.py")]
    mutants = [mutant for file in sources for mutant in mutants_of(file, file.read_bytes())]
    random.Random(seed).shuffle(mutants)
    of_room, killers = len(mutants), dict[Mutant, set[str]]()
    sys.dont_write_bytecode = True
    for number, mutant in enumerate(mutants[:count], start=2):
        if time.monotonic() > ends:
            break
        ran = set[str]().union(*(lines.get((str(copy / mutant.file), line), ()) for line in mutant.lines))
        ran = known if IMPORT in ran else ran & known
        before, at = mutant.file.read_bytes(), mutant.file.stat().st_mtime
        mutant.file.write_bytes(mutant.source)
        os.utime(mutant.file, (at + number, at + number))  # whole seconds tell the cached bytecode of another mutant
        files = sorted({test.split("::", 1)[0] for test in ran})
        failed = run_tests(files, limit, set(began) - ran)[1] - broken if files else set()
        mutant.file.write_bytes(before)
        os.utime(mutant.file, (at, at))
        killers[mutant] = {test.split("[", 1)[0] for test in failed}
        yield f"{f'survives {len(ran)} tests' if not failed else f'killed by {len(killers[mutant])}'}: {mutant}"
    yield from table(of_room, killers, {test.split("[", 1)[0] for test in known})


def table(of_room: int, killers: dict[Mutant, set[str]], functions: set[str]) -> Iterator[str]:
    """Yield what was killed, what survived, and which tests are the only killer of nothing."""
    killed = [by for by in killers.values() if by]
    only = {next(iter(by)) for by in killed if len(by) == 1}
    # The other mutants go to the test that kills the most of those that are left, until none is left.
    needed = set(only)
    while left := [by for by in killed if not by & needed]:
        needed.add(max(sorted(set().union(*left)), key=lambda test: sum(test in by for by in left)))
    yield "\nsurvivors:"
    yield from sorted(f"  {mutant}" for mutant, by in killers.items() if not by)
    yield "\nonly killers:"
    yield from sorted(f"  {next(iter(by))}  {mutant}" for mutant, by in killers.items() if len(by) == 1)
    yield "\nnever the only killer (+: one of those that kill the same must stay):"
    for test in sorted(functions - only):
        yield f"{'+' if test in needed else ' '} {test}  ({sum(test in by for by in killed)} with others)"
    yield f"\n{of_room} mutants in the room; tried {len(killers)}, killed {len(killed)}"
    yield f"{len(functions)} test functions; the only killer of something {len(only)}"


def main() -> None:
    """Try the mutants of one room, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", help="a folder of src/mingle, or one module of it: wire, config/order")
    parser.add_argument("--seed", type=int, default=1, help="decides the sample (default: 1)")
    parser.add_argument("--count", type=int, default=200, help="the most mutants (default: 200)")
    parser.add_argument("--minutes", type=float, default=30, help="the last mutant begins before this (default: 30)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for entry in chosen.root.resolve().iterdir():
            made: Any = shutil.copytree if entry.name in {"src", "tests"} else os.symlink
            made(entry, copy / entry.name)
        os.chdir(copy)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join((folder, str(copy / "src")))
        for line in try_mutants(copy, chosen.room, chosen.seed, chosen.count, time.monotonic() + 60 * chosen.minutes):
            print(line, flush=True)


if __name__ == "__main__":
    main()
