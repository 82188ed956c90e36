"""preflight.py: it says what is missing before pip downloads anything, and keeps quiet where nothing is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.documents import ROOT

SCRIPT = ROOT / "tools" / "preflight.py"


def run(*arguments: str, path: str | Path = os.defpath, **variables: str) -> tuple[int, str]:
    """Run the script with nothing but these programs and variables; return its status and what it printed."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={"PATH": str(path), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    assert time.monotonic() - started < 55, "two seconds, by far, on a machine that has nothing else to do"
    return done.returncode, done.stderr


def compiler(folder: Path, script: str) -> Path:
    """Put a compiler into the folder."""
    program = folder / "cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def module() -> ModuleType:
    from tools import preflight

    return preflight


def test_an_installed_netifaces_is_enough(tmp_path: Path) -> None:
    """On a machine that has netifaces-plus in its place pip would still compile the netifaces that mingle asks for."""
    distribution = tmp_path / "site" / "netifaces-0.11.0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: netifaces\nVersion: 0.11.0\n")
    assert run(path=tmp_path, CC="nothing", PYTHONPATH=str(distribution.parent)) == (0, "")


def test_without_a_compiler_it_names_what_to_install(tmp_path: Path) -> None:
    status, text = run("--wheels", path=tmp_path, CC="nothing")
    assert status == 1
    first, *rest = text.splitlines()
    assert first == "netifaces, a dependency of mingle, comes as source only, and there is no C compiler here (nothing)"
    assert rest[0].startswith("  likely cause: ")
    assert rest[1] == "  fix, one of:"
    for command in (
        "apt-get install gcc ",
        "dnf install gcc ",
        "pacman -S gcc",
        "conda install -c conda-forge netifaces",
    ):
        assert any(command in line for line in rest[2:]), command
    assert "make wheels" in rest[-1]


def test_without_headers_it_names_the_one_that_is_missing(tmp_path: Path) -> None:
    script = "echo 'empty.c:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1"
    status, text = run("--wheels", CC=str(compiler(tmp_path, script)))
    assert status == 1
    assert text.splitlines()[0].endswith("and the header Python.h is missing")
    assert "likely cause: the headers of Python are not installed" in text
    script = script.replace("Python.h", "stdlib.h")
    assert "the headers of the C library" in run("--wheels", CC=str(compiler(tmp_path, script)))[1]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    status, text = run("--wheels", CC=str(compiler(tmp_path, "echo 'cannot execute cc1' >&2; exit 1")))
    assert status == 1
    assert "fails: cannot execute cc1" in text


def test_a_compiler_that_compiles_is_enough(tmp_path: Path) -> None:
    assert run("--wheels", CC=str(compiler(tmp_path, "exit 0"))) == (0, "")


def test_the_compiler_is_given_the_headers_of_this_python(tmp_path: Path) -> None:
    program = compiler(tmp_path, f'echo "$@" > {tmp_path}/seen')
    assert run("--wheels", CC=str(program)) == (0, "")
    assert f"-I{sysconfig.get_path('include')}" in (tmp_path / "seen").read_text().split()


PLUS = "python3 -m pip install netifaces-plus "


@pytest.fixture
def bare(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on a machine that has no compiler, and no netifaces."""
    for name, value in {"CC": "nothing", "PATH": "/nowhere", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "netifaces_is_there", lambda _fresh=False: False)
    return module


def test_pip_is_given_its_lines_without_a_compiler_first(
    bare: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bare, "managed_by_the_system", lambda: None)
    assert bare.main([]) == 1
    _, _, title, first, second, *_ = capsys.readouterr().err.splitlines()
    assert title == "  fix, one of:"
    assert first.strip().startswith(f"no compiler:    {PLUS}")
    assert second.strip() == "python3 -m pip install --no-deps multicast_expert ."
    named = set(first.partition("install ")[2].split())
    assert named == names(bare.needs([])) - {"typing-extensions"}, "which torch brings"
    monkeypatch.setattr(bare, "plus_has_wheels", lambda: False)
    assert bare.main([]) == 1
    assert PLUS not in capsys.readouterr().err


def test_a_virtual_environment_that_make_fills_needs_no_compiler(
    bare: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bare.main(["--venv"]) == 0
    assert bare.main(["--wheels"]) == 1
    monkeypatch.setattr(bare, "plus_has_wheels", lambda: False)
    assert bare.main(["--venv"]) == 1


@pytest.mark.parametrize(
    ("version", "implementation", "machine", "free_threaded", "has"),
    [
        ((3, 10, 0), "CPython", "x86_64", 0, True),
        ((3, 14, 2), "CPython", "aarch64", 0, True),
        ((3, 15, 0), "CPython", "x86_64", 0, False),
        ((3, 14, 2), "CPython", "x86_64", 1, False),
        ((3, 11, 0), "PyPy", "x86_64", 0, False),
        ((3, 11, 0), "CPython", "ppc64le", 0, False),
    ],
)
def test_netifaces_plus_has_wheels_for_the_usual_pythons(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int, int],
    implementation: str,
    machine: str,
    free_threaded: int,
    has: bool,
) -> None:
    monkeypatch.setattr(module.sys, "version_info", version)
    monkeypatch.setattr(module.platform, "python_implementation", lambda: implementation)
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(module.sysconfig, "get_config_var", lambda _: free_threaded)
    assert module.plus_has_wheels() is has


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;]", line)[0] for line in requirements}


def test_extra_replaces_netifaces_only_where_it_cannot_be_compiled(
    bare: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plus = names(bare.needs(["dev", "frameworks"]))
    assert plus >= {"netifaces-plus", "torch", "pytest", "numpy", "lightning", "mlx"}
    assert not any("mingle" in name for name in plus)
    monkeypatch.setattr(bare, "plus_has_wheels", lambda: False)
    usual = names(bare.needs(["dev", "frameworks"]))
    assert usual - plus == {"netifaces", "multicast-expert"}
    assert plus - usual == {"netifaces-plus", "typing-extensions"}
    monkeypatch.setattr(bare, "plus_has_wheels", lambda: True)
    monkeypatch.setattr(bare, "netifaces_is_there", lambda: True)
    assert names(bare.needs(["dev", "frameworks"])) == usual


def test_a_wheel_for_this_python_is_enough_and_one_for_another_is_not(tmp_path: Path) -> None:
    for version, status in ((f"{sys.version_info[0]}{sys.version_info[1]}", 0), ("39", 1)):
        folder = tmp_path / version
        folder.mkdir()
        (folder / f"netifaces-0.11.0-cp{version}-cp{version}-linux_x86_64.whl").touch()
        assert run("--wheels", path=folder, CC="nothing", PIP_FIND_LINKS=f"/nowhere {folder}")[0] == status


def test_an_old_python_is_named(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "OLDEST", (99, 0))
    assert module.main([]) == 1
    assert "and mingle needs 99.0 or newer" in capsys.readouterr().err


def test_a_python_of_the_system_needs_a_virtual_environment(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(module.sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(module, "netifaces_is_installed", lambda: True)
    assert module.main([]) == 0, "the file that marks such a Python is not there"
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert module.main([]) == 1
    assert "python3 -m venv .venv && . .venv/bin/activate" in capsys.readouterr().err
    monkeypatch.setattr(module.sys, "prefix", str(tmp_path))
    assert module.main([]) == 0, "a virtual environment is no Python of the system"


def make(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-C", str(ROOT), *words],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_make_checks_before_it_makes_anything(tmp_path: Path) -> None:
    program(tmp_path / "python", f'echo "$@" >> {tmp_path}/seen; exit 1')
    done = make(f"VENV={tmp_path}/venv", f"PYTHON={tmp_path}/python", f"{tmp_path}/venv/bin/pip")
    assert done.returncode != 0
    assert (tmp_path / "seen").read_text() == "tools/preflight.py --venv\n"
    assert not (tmp_path / "venv").exists()


def test_make_wheels_checks_for_a_compiler_first(tmp_path: Path) -> None:
    program(tmp_path / "venv/bin/pip", "exit 1")
    program(tmp_path / "venv/bin/python", f'echo "$@" >> {tmp_path}/seen; exit 1')
    assert make(f"VENV={tmp_path}/venv", "wheels").returncode != 0
    assert (tmp_path / "seen").read_text() == "tools/preflight.py --wheels\n"


def test_make_wheels_has_sources_built_in_an_environment_of_their_own(tmp_path: Path) -> None:
    program(tmp_path / "venv/bin/pip", "exit 1")
    program(tmp_path / "venv/bin/python", f'echo "$PIP_USE_PEP517 $2" >> {tmp_path}/seen')
    done = make(f"VENV={tmp_path}/venv", f"WHEELHOUSE={tmp_path}/wheelhouse", "wheels")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text().splitlines()[-1] == "1 pip", "pip of Debian 12 has no `wheel` in the venv"


@pytest.mark.parametrize(
    ("needs", "installed"),
    [
        ("netifaces", ["--editable .[examples]"]),
        ("netifaces-plus", ["--requirement {venv}/needs.txt", "--no-deps multicast_expert --editable ."]),
    ],
)
def test_make_installs_netifaces_plus_where_preflight_says_so(needs: str, installed: list[str], tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    program(venv / "bin/pip", "exit 1")
    seen = (
        f'case $1 in tools/preflight.py) echo {needs};; *) echo "$@" | sed "s/.* install //" >> {tmp_path}/seen;; esac'
    )
    program(venv / "bin/python", seen)
    done = make(f"VENV={venv}", "WHEELHOUSE=none", f"{venv}/.examples-ready")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text().splitlines() == [line.format(venv=venv) for line in installed]
