"""What a shell proposes: commands, job ids from the network and interface names, soon, and never a message."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from mingle.cli import COMMANDS, completion, main
from mingle.config.settings import Network
from tests.bystanders import announcing, command_environment, free_udp_port, gathering, run_command


def proposed(*words: str, incomplete: str = "") -> list[str]:
    """What click proposes for the next word."""
    completer = ShellComplete(main, {}, "mingle-discover", "_MINGLE_DISCOVER_COMPLETE")
    return [item.value for item in completer.get_completions(list(words), incomplete)]


def proposed_at_last(*words: str, incomplete: str = "") -> list[str]:
    """What click proposes, asked again where a busy machine has answered too late."""
    for _ in range(10):
        if found := proposed(*words, incomplete=incomplete):
            break
    return found


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A discovery of the test's own, with time enough for a busy machine."""
    number = free_udp_port()
    monkeypatch.setenv("MINGLE_PORT", str(number))
    monkeypatch.setenv("MINGLE_INTERFACE", "lo")
    monkeypatch.setattr(completion, "SECONDS", 30.0)
    monkeypatch.setattr(completion, "ASK_SECONDS", 1.5)
    return number


def test_commands_options_and_interfaces() -> None:
    assert proposed() == list(COMMANDS)
    assert proposed(incomplete="do") == ["doctor"]
    assert proposed("list", incomplete="--fa") == ["--fail-if-empty", "--family"]
    assert proposed("ping", "-i", incomplete="l") == ["lo"]
    assert proposed("completion") == ["bash", "zsh", "fish"]


def test_jobs_are_proposed_with_their_hosts(port: int) -> None:
    assert proposed("find") == []
    with gathering("ada-resnet", port, (0,), world_size=2), announcing("bert", "--master-port", "29600", port=port):
        assert proposed_at_last("find", incomplete="ada") == ["ada-resnet"]
        assert proposed_at_last("ping", incomplete="be") == ["bert"]
        items = completion._jobs(Network(interfaces=("lo",), port=port), time.monotonic() + 60)
        assert all(item.help.startswith("hosted by ") for item in items)


def test_the_options_that_were_typed_count(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGLE_INTERFACE", "nope0")
    monkeypatch.delenv("MINGLE_PORT")
    with announcing("bert", "--master-port", "29600", port=port):
        assert proposed_at_last("find", "-i", "lo", "--port", str(port)) == ["bert"]
        assert proposed("find", "--port", str(port)) == []


def test_an_id_that_a_shell_would_run_is_not_proposed(port: int) -> None:
    """A proposal is put onto the command line as it is, and anybody on the network can announce an id."""
    ids = ["$(touch x)", "a b", "a;b", "line\nplain,forged", "--peers=elsewhere", "fine-1.0"]
    with (
        gathering(ids[0], port, (0,), world_size=2),
        gathering(ids[3], port, (0,), world_size=2),
        announcing(ids[-1], "--master-port", "29600", port=port),
    ):
        assert proposed_at_last("find") == ["fine-1.0"]
    assert [each for each in ids if completion._is_plain(each)] == ["fine-1.0"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MINGLE_PORT": "high"}, "find "),
        ({"MINGLE_INTERFACE": "nope0"}, "ping "),
        ({"MINGLE_SECRET": "weak"}, "find "),
        ({}, "find --secret-file /nonexistent "),
        ({}, "find --port many "),
    ],
)
def test_nothing_is_said_where_the_network_cannot_be_asked(variables: dict[str, str], words: str) -> None:
    done = run_command(
        port=free_udp_port(),
        _MINGLE_DISCOVER_COMPLETE="bash_complete",
        COMP_WORDS=f"mingle-discover {words}",
        COMP_CWORD=str(len(words.split()) + 1),
        **variables,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_a_network_that_does_not_answer_costs_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(completion, "_jobs", lambda *_: released.wait(60) and [])
    started = time.monotonic()
    assert proposed("find") == []
    # Not one of the sixty seconds, even on a machine that is busy.
    assert completion.SECONDS <= time.monotonic() - started < completion.SECONDS + 5
    released.set()
    assert completion.ASK_SECONDS < completion.SECONDS <= 0.5


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
