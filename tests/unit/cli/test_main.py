"""The command as a whole: how fast it answers, how it ends, what it loads."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import mingle
from mingle import cli
from mingle.cli import COMMANDS, main
from tests.support.bystanders import command_environment
from tests.support.ports import free_udp_port


def test_a_shell_completes_commands_options_and_interfaces() -> None:
    completer = ShellComplete(main, {}, "mingle-discover", "_MINGLE_DISCOVER_COMPLETE")
    for words, incomplete, proposed in [
        ([], "do", ["doctor"]),
        (["list"], "--fa", ["--fail-if-empty", "--family"]),
        (["ping", "-i"], "l", ["lo"]),
        (["find"], "", []),
    ]:
        assert [item.value for item in completer.get_completions(words, incomplete)] == proposed


@pytest.mark.parametrize("command", [[], ["find"], ["list"]], ids=["main", "find", "list"])
def test_version(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--version"])
    assert (result.exit_code, result.output) == (0, f"mingle-discover {mingle.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["find"], ["find", ""], ["find", "x" * 257], ["find", "job", "--export", "--json"]],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_and_no_answer(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize(
    "module", [["-m", "mingle"], ["-c", "from mingle.cli import main; main()"]], ids=["module", "script"]
)
def test_without_arguments_it_says_what_to_type_next(module: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *module], env=command_environment(1), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{cli.FIRST_SCREEN}\n"


def test_the_commands_of_the_first_screen_are_there() -> None:
    lines = [line.split() for line in cli.FIRST_SCREEN.splitlines() if line.startswith("  ")]
    named = {words[1] for words in lines if words[0] == "mingle-discover"}
    assert {"list", "watch", "doctor"} < named <= {*COMMANDS, "--help"}
    assert {words[0] for words in lines} == {"mingle-discover", "torchrun", "mingle-run", "mingle-check"}
    assert all(len(line) <= 100 for line in cli.FIRST_SCREEN.splitlines())


@pytest.mark.parametrize(
    ("commands", "unloaded"),
    [
        pytest.param([["interfaces"], ["list", "-t", "0.2"]], ["torch", "numpy"], id="answers"),
        pytest.param([["--help"]], ["msgspec", "netifaces", "multicast_expert"], id="help"),
        pytest.param([[name, "--help"] for name in COMMANDS], ["torch", "rich"], id="help of the commands"),
    ],
)
def test_what_a_command_does_not_load(commands: list[list[str]], unloaded: list[str]) -> None:
    # standalone_mode=False returns the status of ctx.exit instead of ending the process.
    code = (
        f"import sys; from mingle.cli import main\nfor words in {commands}: main(words, standalone_mode=False)\n"
        f"loaded = {{*{unloaded}}} & {{*sys.modules}}; assert not loaded, loaded"
    )
    environment = command_environment(free_udp_port())
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60, stdout=-3)


SHARED = ("--json", "-i, --interface", "-p, --port", "-t, --timeout", "--peers", "--family", "--ttl", "--secret-file")


@pytest.mark.parametrize(("command", "summary"), [(name, summary) for name, (_, summary) in COMMANDS.items()])
def test_the_help_of_a_command_has_its_summary_an_example_and_the_shared_options(command: str, summary: str) -> None:
    text, by_letter = (CliRunner().invoke(main, [command, flag]).output for flag in ("--help", "-h"))
    assert text == by_letter
    shown = text.splitlines()
    assert shown[0].startswith(f"Usage: mingle-discover {command}")
    assert shown[2].strip() == summary
    assert shown[-1].startswith(("  Example: ", "  Documentation: "))
    assert [each for each in (*SHARED, "-v, --verbose", "-h, --help", "--version") if each not in text] == []
    assert f"  {command:10}  {summary}" in CliRunner().invoke(main, ["-h"]).output.splitlines()


def test_help_leads_to_the_documentation_where_the_distribution_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "mingle" / "cli" / "__init__.py"))
    assert "Documentation:" not in CliRunner().invoke(main, ["--help"]).output
    (tmp_path / "multinode_mingle-1.0.dist-info").mkdir()
    url = "https://example.org/mingle/blob/HEAD/docs/README.md"
    metadata = f"Name: multinode-mingle\nProject-URL: Source, https://example.org\nProject-URL: Documentation, {url}\n"
    (tmp_path / "multinode_mingle-1.0.dist-info" / "METADATA").write_text(metadata)
    assert CliRunner().invoke(main, ["--help"]).output.endswith(f"Documentation: {url}\n")


def test_help_costs_little_more_than_click() -> None:
    """As a ratio of CPU time, so that a slow or busy machine does not decide; alone on one it is about 0.1 s."""

    def seconds(*command: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *command], env=command_environment(1), check=True, stdout=-3, timeout=60)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    pairs = [(seconds("-c", "import click"), seconds("-m", "mingle", "--help")) for _ in range(5)]
    click_alone, with_mingle = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert with_mingle < 2.5 * click_alone + 0.05


@pytest.mark.parametrize("arguments", [["find", "nothing"], ["list"]], ids=" ".join)
def test_ctrl_c_ends_quietly_with_130(arguments: list[str]) -> None:
    assert ended_by(signal.SIGINT, arguments) == 130


# Not -15: a signal that ends a process by the kernel's default does not reach the first process of a container.
@pytest.mark.parametrize("arguments", [["find", "nothing"], ["list"], ["watch"]], ids=" ".join)
def test_sigterm_ends_quietly_with_143(arguments: list[str]) -> None:
    assert ended_by(signal.SIGTERM, arguments) == 143


def test_a_command_that_is_called_leaves_sigterm_as_it_was() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert CliRunner().invoke(main, ["env"]).exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def ended_by(number: signal.Signals, arguments: list[str]) -> int:
    """Send the signal to a command that listens; return its status. It prints nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mingle", *arguments, "-t", "60", "-v"],
        env=command_environment(free_udp_port()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("info: listening on lo")
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
    return process.returncode
