"""preflight.py: it says what is missing before pip downloads anything, and keeps quiet where nothing is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_docs import ROOT

SCRIPT = ROOT / "preflight.py"


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
    assert time.monotonic() - started < 20, "two seconds, by far, on a machine that has nothing else to do"
    return done.returncode, done.stderr


def compiler(folder: Path, script: str) -> Path:
    """Put a compiler into the folder."""
    program = folder / "cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def module() -> ModuleType:
    import preflight

    return preflight


def test_an_installed_netifaces_is_enough(tmp_path: Path) -> None:
    assert run(path=tmp_path, CC="nothing") == (0, "")


def test_without_a_compiler_it_names_what_to_install(tmp_path: Path) -> None:
    status, text = run("--venv", path=tmp_path, CC="nothing")
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
    status, text = run("--venv", CC=str(compiler(tmp_path, script)))
    assert status == 1
    assert text.splitlines()[0].endswith("and the header Python.h is missing")
    assert "likely cause: the headers of Python are not installed" in text
    script = script.replace("Python.h", "stdlib.h")
    assert "the headers of the C library" in run("--venv", CC=str(compiler(tmp_path, script)))[1]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    status, text = run("--venv", CC=str(compiler(tmp_path, "echo 'cannot execute cc1' >&2; exit 1")))
    assert status == 1
    assert "fails: cannot execute cc1" in text


def test_a_compiler_that_compiles_is_enough(tmp_path: Path) -> None:
    assert run("--venv", CC=str(compiler(tmp_path, "exit 0"))) == (0, "")


def test_the_compiler_is_given_the_headers_of_this_python(tmp_path: Path) -> None:
    program = compiler(tmp_path, f'echo "$@" > {tmp_path}/seen')
    assert run("--venv", CC=str(program)) == (0, "")
    assert f"-I{sysconfig.get_path('include')}" in (tmp_path / "seen").read_text().split()


def test_a_wheel_for_this_python_is_enough_and_one_for_another_is_not(tmp_path: Path) -> None:
    for version, status in ((f"{sys.version_info[0]}{sys.version_info[1]}", 0), ("39", 1)):
        folder = tmp_path / version
        folder.mkdir()
        (folder / f"netifaces-0.11.0-cp{version}-cp{version}-linux_x86_64.whl").touch()
        assert run("--venv", path=folder, CC="nothing", PIP_FIND_LINKS=f"/nowhere {folder}")[0] == status


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
    assert module.main([]) == 0, "the file that marks such a Python is not there"
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert module.main([]) == 1
    assert "python3 -m venv .venv && . .venv/bin/activate" in capsys.readouterr().err
    monkeypatch.setattr(module.sys, "prefix", str(tmp_path))
    assert module.main([]) == 0, "a virtual environment is no Python of the system"


def test_make_checks_before_it_makes_anything(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-C", str(ROOT), f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", f"{tmp_path}/venv/bin/pip"],
        env={"PATH": os.environ["PATH"], "CC": str(compiler(tmp_path, "echo broken; exit 1"))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "netifaces, a dependency of mingle, comes as source only" in done.stderr
    assert not (tmp_path / "venv").exists()
