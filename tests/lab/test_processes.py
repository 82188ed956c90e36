"""Ranks and commands in the hosts of a lab can be steered, asked and judged."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from . import Lab, LabError, LabTimeoutError, RankFailedError, leak_check, report


def wait_for_ever() -> None:
    report("waiting")
    threading.Event().wait()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rank_can_be_killed(lab: Lab) -> None:
    rank = lab.host().start(wait_for_ever)
    rank.wait_for("waiting")
    rank.kill()
    assert rank.exit_code == -signal.SIGKILL
    assert not Path(f"/proc/{rank.pid}").exists()
    with pytest.raises(RankFailedError, match="SIGKILL"):
        rank.result()
    with pytest.raises(LabError, match="has ended already"):
        rank.stop()


def test_a_rank_can_be_frozen(lab: Lab) -> None:
    rank = lab.host().start(wait_for_ever)
    rank.wait_for("waiting")
    rank.stop()
    assert state(rank.pid) == "T"
    rank.resume()
    rank.interrupt()
    assert rank.error().name == "KeyboardInterrupt"
    assert rank.wait() == 1


def count_to(number: int) -> int:
    for value in range(number):
        report("count", value=value)
    return number


def test_events_come_in_order_and_are_returned_once(lab: Lab) -> None:
    rank = lab.host().start(count_to, 3)
    assert [rank.wait_for("count")["value"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RankFailedError, match="returned 3 instead"):
        rank.wait_for("count")
    assert rank.result() == 3
    times = [event.time for event in rank.events]
    assert times == sorted(times)
    assert rank.wait() == 0


class QuotaError(ValueError):
    def __init__(self) -> None:
        super().__init__("too many")
        self.limit = 7
        self.lock = threading.Lock()


def fail() -> None:
    print("just before")
    raise QuotaError


def test_an_error_keeps_its_traceback_and_attributes(lab: Lab) -> None:
    rank = lab.host().start(fail)
    with pytest.raises(RankFailedError, match=r"in fail\n.*raise QuotaError"):
        rank.result()
    error = rank.error()
    assert (error.name, error.message, error.attributes["limit"]) == ("QuotaError", "too many", 7)
    assert "lock object" in error.attributes["lock"]
    assert "ValueError" in error.bases
    assert rank.stdout == "just before\n"
    assert rank.wait() == 1


def print_and_wait() -> None:
    print("written")
    threading.Event().wait()


def test_what_a_rank_prints_can_be_read_while_it_runs(lab: Lab) -> None:
    rank = lab.host().start(print_and_wait)
    rank.wait_for_output("written")
    assert rank.exit_code is None


def test_a_time_out_shows_where_the_rank_is(lab: Lab) -> None:
    rank = lab.host().start(wait_for_ever)
    with pytest.raises(LabTimeoutError, match=r"in wait_for_ever\b"):
        rank.result(timeout=0.2)


def unpicklable() -> object:
    return threading.Lock()


def test_a_result_that_cannot_travel_is_an_error(lab: Lab) -> None:
    assert "pickle" in lab.host().start(unpicklable).error().message


def environment(*wanted: str) -> list[str | None]:
    return [os.environ.get(name) for name in wanted]


def test_the_environment_of_the_tests_stays_outside(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    host = lab.host()
    rank = host.start(environment, "MINGLE_INTERFACE", "RANK", "COLOUR", "HOME", env={"COLOUR": "red", "HOME": None})
    assert os.environ["MINGLE_INTERFACE"] == "lo"
    assert rank.result() == [None, None, "red", None]
    command = host.run(["sh", "-c", "echo $COLOUR; echo $MINGLE_INTERFACE >&2; exit 3"], env={"COLOUR": "blue"})
    assert command.wait() == 3
    assert (command.stdout, command.stderr) == ("blue\n", "\n")


def test_a_fresh_interpreter_can_be_run_and_interrupted(lab: Lab) -> None:
    code = "import time, sys; print(sys.executable, flush=True); time.sleep(600)"
    process = lab.host().run(["python", "-c", code])
    process.wait_for_output(str(Path(sys.executable).parent))
    process.interrupt()
    assert process.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in process.stderr


def test_a_command_that_does_not_exist_says_so(lab: Lab) -> None:
    process = lab.host().run(["no-such-command"])
    assert process.wait() == 1
    assert "No such file" in process.stderr


def leave_a_variable() -> None:
    with leak_check():
        os.environ["MASTER_ADDR"] = "10.77.0.1"


def test_leaks_are_found_in_ranks_too(lab: Lab) -> None:
    error = lab.host().start(leave_a_variable).error()
    assert error.name == "LeakError"
    assert "MASTER_ADDR: None became '10.77.0.1'" in error.message


def test_killing_a_host_ends_what_its_processes_left_behind(lab: Lab) -> None:
    host = lab.host()
    shell = host.run(["sh", "-c", "setsid sleep 600 & echo $!"])
    assert shell.wait() == 0
    orphan = int(shell.stdout)
    assert state(orphan) in "RSD"
    host.kill()
    assert not Path(f"/proc/{orphan}").exists()
