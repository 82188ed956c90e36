"""The console scripts: Ctrl-C while the command is imported ends it without a traceback, and is the command's after."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

IMPORTING = """
import importlib, os, signal, types
import mingle_commands
def import_module(name):
    {while_it_is_imported}
    return types.SimpleNamespace(main=lambda: print(name, signal.getsignal(signal.SIGINT) is {handler}))
importlib.import_module = import_module
{before}
mingle_commands.{command}()
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


def run(
    command: str, *, before: str = "", while_it_is_imported: str = "pass", handler: str = "signal.default_int_handler"
) -> subprocess.CompletedProcess[str]:
    code = IMPORTING.format(command=command, before=before, while_it_is_imported=while_it_is_imported, handler=handler)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", ["discover", "check", "run"])
def test_ctrl_c_ends_a_command_that_is_being_imported_without_a_word(command: str) -> None:
    done = run(command, while_it_is_imported=INTERRUPT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("command", "module"),
    [("discover", "mingle.cli"), ("check", "mingle.check.command"), ("run", "mingle.run.command")],
)
def test_ctrl_c_is_the_command_s_once_it_is_imported(command: str, module: str) -> None:
    done = run(command)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{module} True\n", "")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    done = run(
        "discover",
        before="signal.signal(signal.SIGINT, signal.SIG_IGN)",
        while_it_is_imported=INTERRUPT,
        handler="signal.SIG_IGN",
    )
    assert (done.returncode, done.stdout) == (0, "mingle.cli True\n")
