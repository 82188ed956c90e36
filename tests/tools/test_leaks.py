"""The check that every test passes through finds each kind of leak, and nothing else."""

# ruff: noqa: PT012 - what raises is the end of the whole block

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.leaks import LeakError, leak_check


def test_a_thread_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-running", daemon=True)
    with pytest.raises(LeakError, match="thread 'left-running'"), leak_check(grace=0.05):
        thread.start()
    stop.set()
    thread.join()


def test_a_socket_is_shown_with_its_address() -> None:
    left = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with left:
        with (
            pytest.raises(LeakError, match=r"AF_INET SOCK_DGRAM \('127\.0\.0\.1', \d+\)"),
            leak_check(grace=0.05),
        ):
            opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            opened.bind(("127.0.0.1", 0))
        opened.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are looked up in /proc")
def test_a_child_process_is_shown_with_its_command() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read(print(flush=True))"]
    with (
        pytest.raises(LeakError, match=r"child process \d+: .*import sys; sys\.stdin\.read"),
        leak_check(grace=0.05),
    ):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()  # until then it may have no command line
    child.communicate()


def test_each_change_of_the_environment_is_named_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEFT_ALONE", "1")
    monkeypatch.setenv("REMOVED", "2")
    with pytest.raises(LeakError) as caught, leak_check(grace=0.05):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        del os.environ["REMOVED"]
    assert "MASTER_ADDR: None became '127.0.0.1'" in str(caught.value)
    assert "REMOVED: '2' became None" in str(caught.value)
    assert "LEFT_ALONE" not in str(caught.value)
    assert "MASTER_ADDR" not in os.environ
    assert os.environ["REMOVED"] == "2"


def test_discovery_is_kept_on_the_loopback_interface() -> None:
    assert os.environ["MINGLE_INTERFACE"] == "lo"
