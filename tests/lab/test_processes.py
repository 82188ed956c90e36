"""Ranks and commands in the hosts of a lab can be steered, asked and judged."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.support.loopback import until

from . import Lab, RankFailedError, leak_check, report


def wait_for_ever() -> None:
    report("waiting")
    threading.Event().wait()


def fail() -> None:
    print("just before")
    raise ValueError("too many")


def leave_a_variable() -> None:
    with leak_check():
        os.environ["MASTER_ADDR"] = "10.77.0.1"


def test_ranks_are_killed_and_frozen_and_their_errors_and_leaks_come_back(lab: Lab) -> None:
    host = lab.host()
    killed, frozen = host.start(wait_for_ever), host.start(wait_for_ever)
    killed.wait_for("waiting")
    killed.kill()
    assert killed.exit_code == -signal.SIGKILL
    frozen.wait_for("waiting")
    frozen.stop()
    assert Path(f"/proc/{frozen.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    frozen.resume()
    frozen.interrupt()
    assert frozen.error().name == "KeyboardInterrupt"
    failed = host.start(fail)
    with pytest.raises(RankFailedError, match=r"in fail\n.*raise ValueError"):
        failed.result()
    assert (failed.error().message, failed.stdout, failed.wait()) == ("too many", "just before\n", 1)
    assert "MASTER_ADDR: None became '10.77.0.1'" in host.start(leave_a_variable).error().message


def test_commands_have_an_environment_of_their_own_and_end_with_their_host(lab: Lab) -> None:
    host = lab.host()
    command = host.run(["sh", "-c", "echo $COLOR$MINGLE_INTERFACE; exit 3"], env={"COLOR": "blue"})
    assert (command.wait(), command.stdout) == (3, "blue\n")
    shell = host.run(["sh", "-c", "setsid sleep 600 & echo $!"])
    assert shell.wait() == 0
    orphan = Path("/proc", shell.stdout.strip())
    assert orphan.exists()
    host.kill()
    until(lambda: not orphan.exists())  # it is there until init reaps it
