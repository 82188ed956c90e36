"""What `conftest.py` does for every test."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.conftest import hangup_for_commands


def test_a_command_takes_sighup_under_nohup_and_the_tests_ignore_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with hangup_for_commands(), subprocess.Popen(["sleep", "10"]) as command:
            os.kill(os.getpid(), signal.SIGHUP)
            command.send_signal(signal.SIGHUP)
            assert command.wait() == -signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
