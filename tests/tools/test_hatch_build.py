"""hatch_build.py: a plain `pip install .` finds a netifaces with a compiler and without one."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tools import hatch_build

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")


def added(monkeypatch: pytest.MonkeyPatch, compiler: str, site_packages: Path) -> list[str]:
    """Return the requirements that the wheel has here beside those of pyproject.toml."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(site_packages)])
    build_data: dict[str, list[str]] = {"dependencies": []}
    hook = hatch_build.BuildHook(str(ROOT), {}, None, None, "", "wheel")  # type: ignore[arg-type]
    hook.initialize("standard", build_data)
    return build_data["dependencies"]


def compiler(folder: Path, script: str) -> str:
    program = folder / "cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_netifaces_is_compiled_where_a_compiler_finds_the_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert added(monkeypatch, compiler(tmp_path, f'echo "$@" > {tmp_path}/seen'), tmp_path) == []
    assert f"-I{sysconfig.get_path('include')}" in (tmp_path / "seen").read_text().split()


@pytest.mark.parametrize("script", [None, "echo 'fatal error: Python.h: No such file' >&2; exit 1"])
def test_without_a_compiler_or_headers_pip_is_given_netifaces_plus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None
) -> None:
    named = "no-such-compiler" if script is None else compiler(tmp_path, script)
    (requirement,) = added(monkeypatch, named, tmp_path)
    name, _, uri = requirement.partition(" @ ")
    assert name == "netifaces"
    assert uri.startswith("file:///")
    assert Path(uri.removeprefix("file://"), "pyproject.toml").exists()


def test_an_installed_netifaces_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    distribution = tmp_path / "netifaces-0.11.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: netifaces\nVersion: 0.11.0\n")
    assert added(monkeypatch, "no-such-compiler", tmp_path) == []


def test_the_stand_in_has_the_version_that_the_constraints_pin() -> None:
    project = tomllib.loads((ROOT / "tools" / "netifaces" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"{project['name']}=={project['version']}" in pins
