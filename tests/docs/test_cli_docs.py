"""docs/cli.md is true: its examples are run in its order, and it tells of all options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from mingle.cli import COMMANDS, main
from tests.support.bystanders import ROOT, command_environment, gathering
from tests.support.ports import free_udp_port

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


def test_the_examples_print_what_they_say(environment: dict[str, str]) -> None:
    assert len(EXAMPLES) >= 8
    port = int(environment["MINGLE_PORT"])
    with gathering("resnet", port, range(4), world_size=4), gathering("bert", port, range(2), world_size=4):
        for line, expected in EXAMPLES:
            expected = expected.replace("10.0.0.5", "127.0.0.1")  # the page's rank 0 is on another machine
            for _ in range(3):  # a busy machine loses probes
                printed = subprocess.run(
                    ["bash", "-c", line],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=60,
                    check=False,
                ).stdout
                if matches(expected, printed):
                    break
            assert matches(expected, printed), f"{line}\nexpected:\n{expected}\nprinted:\n{printed}"


def test_every_command_and_option_is_documented() -> None:
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert f"## {name}\n" in TEXT
        for parameter in command.params:
            for spelled in parameter.opts if isinstance(parameter, click.Option) else []:
                assert f"`{spelled}" in TEXT or f"{spelled} " in TEXT, f"{name} {spelled}"
