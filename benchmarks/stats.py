"""``python benchmarks/stats.py [--src TREE] [--against TREE]``: how large mingle is, and what one discovery costs.

Code lines are the lines of ``src/`` that are neither blank, nor a comment, nor a docstring. The attributes of a class
are the names that its methods assign on ``self`` and the fields that its body annotates (those of a Struct, a dataclass
or a NamedTuple); its methods are the functions in its body, properties among them. Both leave out what is inherited. A
timing constant is a name in capitals, assigned in a module or a class, of which one word is a unit or a kind of time.

The files that the arguments of ``mingle.init`` pass are counted in two directions, on rank 1 of two ranks on loopback.
On the way in they are the files of mingle in which a function is called with the job id, the UDP port or the timeout of
the call, or with an object that directly holds one of them (as an attribute or an item), before the first datagram
leaves; rank 0 starts after that. On the way back they are the files in which a function is called with, or returns, the
port of the store (or an object that directly holds it), from the first function that handles SEALED until
``MASTER_PORT`` is exported.

All figures of time are medians of fresh interpreters that have imported torch before. With ``--against`` the runs of
the two trees alternate, so that their ratio holds also on a machine that is not idle.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

RANKS = 4
ROUNDS = 5
TIMEOUT = 120.0
TRACED_TIMEOUT = 119.75
"""A number that stands for nothing else in the traced process."""
CPU = "first discover, ms of CPU"
LARGEST = 10
_OF_TIME = frozenset({"SECOND", "SECONDS", "MILLISECONDS", "TIMEOUT", "INTERVAL"})
_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def main() -> int:
    """Print the figures of one tree, or of two side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=Path(__file__).parents[1], metavar="TREE", help="a checkout")
    parser.add_argument("--against", type=Path, metavar="TREE", help="a second checkout, measured in turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"fresh jobs of {RANKS} ranks (default: {ROUNDS})")
    parser.add_argument("--size", action="store_true", help="only count what the source shows")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        _be_a_rank(json.loads(chosen.rank))
        return 0
    roots = [root.resolve() for root in (chosen.src, chosen.against) if root is not None]
    for root in roots:
        _print_size(root)
    if chosen.size:
        return 0
    for root in roots:
        traced = run_job(root, world_size=2, traced=True)[1]
        ways = (
            ("the arguments of mingle.init enter", traced["in"]),
            ("the store's port comes back through", traced["back"]),
        )
        for title, names in ways:
            print(f"{root}: {title} {len(names)} files")
            print("".join(f"  {name}\n" for name in names), end="")
    _compare(roots, chosen.rounds)
    return 0


def _print_size(root: Path) -> None:
    source = root / "src"
    rooms = lines_per_room(source)
    files = sum(count for count, _ in rooms.values())
    print(f"{root}: {sum(lines for _, lines in rooms.values())} code lines in {files} files")
    for room, (count, lines) in rooms.items():
        print(f"  {room:14} {lines:6} lines  {count:3} files")
    classes = sizes_of_classes(source)
    for kind in ("attributes", "methods"):
        print(f"{root}: the {LARGEST} largest classes by {kind}")
        for size in sorted(classes, key=lambda each: (-getattr(each, kind), each.name))[:LARGEST]:
            print(f"  {size.name:24} {size.attributes:3} attributes  {size.methods:3} methods  {size.file}")
    print(f"{root}: {len(timing_constants(source))} timing constants")


def lines_per_room(source: Path) -> dict[str, tuple[int, int]]:
    """Return the files and the code lines of each sub-package; all other modules are in the room ``(top)``."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        room = inside.parts[1] if len(inside.parts) > 2 else "(top)"
        files[room] += 1
        lines[room] += code_lines(path.read_text("utf-8"))
    return {room: (files[room], lines[room]) for room in files}


def code_lines(source: str) -> int:
    """Return the number of lines that hold code: neither blank, nor a comment, nor a docstring."""
    text: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - text)


@dataclass(frozen=True)
class ClassSize:
    """How large a class is, without what it inherits."""

    name: str
    file: str
    attributes: int
    methods: int


def sizes_of_classes(source: Path) -> list[ClassSize]:
    """Return the size of each class below a folder."""
    return [
        ClassSize(node.name, str(path.relative_to(source)), len(attributes_of(node)), len(_methods_of(node)))
        for path in sorted(source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class assign on ``self``, and its annotated fields."""
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not _is_class_variable(each)
    }
    assigned = {
        inner.attr
        for method in _methods_of(node)
        for inner in ast.walk(method)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }
    return fields | assigned


def _is_class_variable(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.annotation).startswith(("ClassVar", "Final"))


def _methods_of(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]


def timing_constants(source: Path) -> list[str]:
    """Return the timing constants of all modules and classes below a folder, as ``FILE:NAME``."""
    return [
        f"{path.relative_to(source)}:{name}"
        for path in sorted(source.rglob("*.py"))
        for body in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(body, (ast.Module, ast.ClassDef))
        for name in _assigned_in(body)
        if name.isupper() and not _OF_TIME.isdisjoint(name.split("_"))
    ]


def _assigned_in(body: ast.Module | ast.ClassDef) -> Iterator[str]:
    for statement in body.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _compare(roots: list[Path], rounds: int) -> None:
    measured: dict[Path, dict[str, list[float]]] = {root: {} for root in roots}
    for turn in range(rounds):
        for root in roots if turn % 2 else reversed(roots):
            for rank, figures in run_job(root, world_size=RANKS).items():
                for name, value in figures.items():
                    kind = "" if name.startswith("import") else "rank 0's " if rank == 0 else "a member's "
                    measured[root].setdefault(f"{kind}{name}", []).append(value)
    width = max(map(len, measured[roots[0]]))
    for name in measured[roots[0]]:
        medians = [median(measured[root][name]) for root in roots]
        beside = f"  (ratio {medians[0] / medians[1]:.2f})" if len(roots) == 2 and medians[1] else ""
        print(f"{name:{width}}  {'  against  '.join(f'{each:7.1f}' for each in medians)}{beside}")


# --- one job -----------------------------------------------------------------------------------------------------


def run_job(root: Path, *, world_size: int, traced: bool = False) -> dict[int, dict[str, Any]]:
    """Run one job on loopback, each rank in an interpreter of its own, and return what each rank measured.

    Args:
        root: the repository whose mingle the ranks import.
        world_size: how many ranks.
        traced: whether the ranks note the files on both ways, in place of the figures.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(root / "src"), "MINGLE_INTERFACE": "lo", "MINGLE_PROGRESS": "off"}
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        store, port = free.getsockname()[1], other.getsockname()[1]
    job = f"stats-{secrets.token_hex(6)}"
    about = {"job": job, "world_size": world_size, "traced": traced, "store": store, "port": port}
    ranks = []
    try:
        for rank in range(world_size):
            command = [sys.executable, __file__, "--rank", json.dumps(about | {"rank": rank})]
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
                )
            )
        for process in ranks:  # all have imported torch and mingle before the first one discovers
            _line(process)
        for process in reversed(ranks):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            if traced and process is ranks[1]:
                _line(process)  # it has asked
        figures = {rank: json.loads(_line(process)) for rank, process in enumerate(ranks)}
        for process in ranks:
            process.communicate("end\n", timeout=TIMEOUT)
        return figures
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with status {process.wait()}")
    return line


def _be_a_rank(about: Mapping[str, Any]) -> None:
    sys.path.pop(0)  # this script's own folder
    import torch.distributed  # noqa: F401

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before, started, spent = set(sys.modules), time.perf_counter(), time.process_time()
    import mingle

    figures: dict[str, Any] = {
        "import mingle, ms": (time.perf_counter() - started) * 1e3,
        "import mingle, ms of CPU": (time.process_time() - spent) * 1e3,
    }
    at_import = set(sys.modules) - before
    figures["import mingle, modules of mingle"] = _ours(at_import)
    figures["import mingle, other modules"] = len(at_import) - _ours(at_import)
    print(flush=True)
    sys.stdin.readline()
    if about["traced"]:
        print(json.dumps(_traced(about)), flush=True)
        sys.stdin.readline()
        return
    spent = time.process_time()
    with mingle.discover(about["job"], rank=about["rank"], world_size=about["world_size"]):
        figures[CPU] = (time.process_time() - spent) * 1e3
        figures["peak memory over torch's, KiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        at_discover = set(sys.modules) - before - at_import
        figures["first discover, more modules of mingle"] = _ours(at_discover)
        figures["first discover, more other modules"] = len(at_discover) - _ours(at_discover)
        print(json.dumps(figures), flush=True)
        sys.stdin.readline()


def _traced(about: Mapping[str, Any]) -> dict[str, list[str]]:
    import mingle

    rank, arguments = about["rank"], (about["job"], about["port"], TRACED_TIMEOUT)
    tracer = Tracer(Path(mingle.__file__).parent, arguments, about["store"], announces=rank == 1)
    with mingle.init(
        about["job"],
        rank=rank,
        world_size=about["world_size"],
        backend="gloo",
        discovery_timeout=TRACED_TIMEOUT,
        port=about["port"],
        master_port=None if rank else about["store"],
    ):
        return {"in": list(tracer.way_in), "back": list(tracer.way_back)}


def _ours(names: set[str]) -> int:
    return sum(name.partition(".")[0] == "mingle" for name in names)


# --- the files that a call passes ------------------------------------------------------------------------------------


class Tracer:
    """Notes which files of a package a call's arguments pass on their way in, and the store's port on its way back.

    The audit events of the interpreter mark the ends of both ways: the first datagram, and the export of the port.

    Args:
        package: the folder of the package.
        arguments: values of the call, each unlike any other value in the process.
        port: the store's.
        announces: whether a line on stdout tells of the first datagram.
    """

    def __init__(self, package: Path, arguments: Collection[Any], port: int, *, announces: bool) -> None:
        self._announces = announces
        self.way_in: dict[str, None] = {}
        self.way_back: dict[str, None] = {}
        self._package, self._wanted, self._port = str(package) + os.sep, arguments, port
        self._sent = self._sealed = self._exported = False
        sys.addaudithook(self._audit)
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"socket.sendto", "socket.sendmsg"}:
            sender = arguments[0]
            if sender.type == socket.SOCK_DGRAM and sender.family in {socket.AF_INET, socket.AF_INET6}:
                if not self._sent and self._announces:
                    print(flush=True)
                self._sent = True
        elif event == "os.putenv" and bytes(arguments[0]) == b"MASTER_PORT":
            self._exported = True
            threading.settrace(None)
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, result: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._package) or self._exported:
            return None
        if event == "call":
            self._note(code, list(_arguments(frame)))
        elif event == "return":
            self._note(code, [result], returned=True)
        frame.f_trace_lines = False
        return self._trace

    def _note(self, code: CodeType, values: list[Any], *, returned: bool = False) -> None:
        name = code.co_filename.removeprefix(self._package)
        if not self._sent and not returned and any(_holds(each, self._wanted) for each in values):
            self.way_in.setdefault(name)
        self._sealed = self._sealed or any(type(each).__name__ == "Sealed" for each in values)
        if self._sealed and any(_holds(each, (self._port, str(self._port))) for each in values):
            self.way_back.setdefault(name)


def _arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    for name in code.co_varnames[:count]:
        if name in frame.f_locals:
            yield frame.f_locals[name]


def _holds(value: Any, wanted: Collection[Any]) -> bool:
    return _is_one_of(value, wanted) or any(_is_one_of(each, wanted) for each in _parts(value))


def _is_one_of(value: Any, wanted: Collection[Any]) -> bool:
    return any(type(value) is type(each) and bool(value == each) for each in wanted)


def _parts(value: Any) -> Iterator[Any]:
    """Yield the items or attributes of a value, without running any code of its class."""
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, (tuple, list)):
        yield from value
    elif type(value).__module__.partition(".")[0] == "mingle":
        yield from list(getattr(value, "__dict__", {}).values())
        for kind in type(value).__mro__:
            slots = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(value, name, None)


if __name__ == "__main__":
    sys.exit(main())
