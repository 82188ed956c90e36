"""docs/cli.md is true: its examples are run in its order, and it tells of all options."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mingle.cli import COMMANDS, main
from tests.bystanders import ROOT, command_environment, free_udp_port

TEXT = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (.*)\n((?:.*\n)*?)```", TEXT)


def matches(expected: str, printed: str) -> bool:
    """Whether the text is the documented one; `…` stands for anything, alone on a line for any lines."""
    lines = (
        r"(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*?") + r"\n" for line in expected.splitlines()
    )
    return re.fullmatch("".join(lines), printed) is not None


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """`mingle-discover` on the path, on `lo`."""
    script = tmp_path / "mingle-discover"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mingle "$@"\n')
    script.chmod(0o755)
    environment = command_environment(free_udp_port())
    return {**environment, "PATH": f"{tmp_path}:{environment['PATH']}"}


def read_lines(process: subprocess.Popen[str], count: int) -> Iterator[str]:
    assert process.stdout is not None
    for _ in range(count):
        yield process.stdout.readline()


def test_the_examples_print_what_they_say(environment: dict[str, str]) -> None:
    assert len(EXAMPLES) >= 8
    running = []
    try:
        for line, expected in EXAMPLES:
            process = subprocess.Popen(
                # exec, so that what is ended is the command and no shell around it.
                ["bash", "-c", line if re.search("[&|=]|^eval", line) else f"exec {line}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            running.append(process)
            if "announce" in line:
                printed = "".join(read_lines(process, expected.count("\n")))
                assert process.poll() is None
            else:
                printed = process.communicate(timeout=60)[0]
            assert matches(expected, printed), f"{line}\nexpected:\n{expected}\nprinted:\n{printed}"
    finally:
        for process in running:
            process.terminate()
            process.communicate(timeout=20)


def test_every_command_and_option_is_documented() -> None:
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert f"## {name}\n" in TEXT
        for parameter in command.params:
            for spelled in parameter.opts if isinstance(parameter, click.Option) else []:
                assert f"`{spelled}" in TEXT or f"{spelled} " in TEXT, f"{name} {spelled}"
