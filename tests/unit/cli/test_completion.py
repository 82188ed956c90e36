"""What a shell proposes: commands, options and interface names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from mingle.cli import COMMANDS, main
from tests.support.bystanders import command_environment


def proposed(*words: str, incomplete: str = "") -> list[str]:
    """What click proposes for the next word."""
    completer = ShellComplete(main, {}, "mingle-discover", "_MINGLE_DISCOVER_COMPLETE")
    return [item.value for item in completer.get_completions(list(words), incomplete)]


def test_commands_options_and_interfaces() -> None:
    assert proposed() == list(COMMANDS)
    assert proposed(incomplete="do") == ["doctor"]
    assert proposed("list", incomplete="--fa") == ["--fail-if-empty", "--family"]
    assert proposed("ping", "-i", incomplete="l") == ["lo"]
    assert proposed("completion") == ["bash", "zsh", "fish"]
    assert proposed("find") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_MINGLE_DISCOVER_COMPLETE={shell}_complete" in result.stdout


def test_bash_completes_after_the_line_of_the_example(tmp_path: Path) -> None:
    script = tmp_path / "mingle-discover"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mingle "$@"\n')
    script.chmod(0o755)
    lines = (
        'eval "$(mingle-discover completion bash)"',
        "COMP_WORDS=(mingle-discover co); COMP_CWORD=1",
        '"$(complete -p mingle-discover | sed "s/.* -F \\([^ ]*\\) .*/\\1/")" mingle-discover',
        'echo "${COMPREPLY[@]}"',
    )
    environment = command_environment(1)
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={**environment, "PATH": f"{tmp_path}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("completion\n", "")
