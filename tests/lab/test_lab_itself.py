"""The lab is what its scenarios take it for: networks that are apart, processes that are steered, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.loopback import until

from . import Host, Lab, LabError, Rank, RankFailedError, leak_check, report
from .namespaces import processes_in
from .sockets import listen, send
from .zygote_client import ROOT, shared_zygote

GROUP = "239.192.7.7"


def start_listener(host: Host) -> Rank[int]:
    rank = host.start(listen, GROUP, host.interface())
    rank.wait_for("listening")
    return rank


def multicast(host: Host, *texts: str) -> None:
    host.start(send, GROUP, host.interface(), texts).result()


def heard(rank: Rank[int]) -> list[str]:
    """What a listener heard until the end of its conversation."""
    rank.result()
    return [event["text"] for event in rank.events if event.name == "heard"]


def test_multicast_reaches_every_host_of_its_lab_unless_cut_off_and_none_of_another(lab: Lab) -> None:
    with Lab() as other:
        lan, lan_of_other = lab.network(), other.network()
        a, b, c = (lab.host(lan) for _ in range(3))
        stranger = other.host(lan_of_other)
        at_b, at_c, far = start_listener(b), start_listener(c), start_listener(stranger)
        c.cut(lan)
        multicast(a, "hello")
        c.heal(lan)
        multicast(a, "end")
        multicast(stranger, "end")
        assert (heard(at_b), heard(at_c), heard(far)) == (["hello"], [], [])


def test_error_in_a_lab_leaves_no_process_and_no_namespace() -> None:
    shared_zygote().wait_ready()
    named = Path("/run/netns")

    def mounts() -> list[str]:
        """Those of this machine, but not what `test_hung_directory` mounts beside."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line for line in lines if not line.startswith("hung ")]

    before = mounts(), sorted(named.iterdir()) if named.is_dir() else []
    with pytest.raises(ZeroDivisionError), Lab() as lab:  # noqa: PT012 - what is left shows at the end of the block
        lan = lab.network()
        hosts = [lab.host(lan), lab.host(lan)]
        ranks = [host.start(wait_for_ever) for host in hosts]
        inodes = [Path(host.namespace.path).stat().st_ino for host in hosts]
        assert set(processes_in(inodes)) == {rank.pid for rank in ranks}
        raise ZeroDivisionError
    assert (mounts(), sorted(named.iterdir()) if named.is_dir() else []) == before
    assert not set(processes_in(inodes))
    with pytest.raises(LabError, match="inside its `with` block"):
        hosts[0].start(wait_for_ever)


def test_lines_of_processes_with_one_output_come_whole_and_at_once(lab: Lab) -> None:
    program = """
import os, signal
parent = os.fork() and os.fork()
for _ in range(1000):
    print("a line")
if parent:
    os.wait(), os.wait()
    print("the end")
    signal.pause()
"""
    process = lab.host(lab.network()).run([sys.executable, "-c", program])
    process.wait_for_output("the end\n")
    assert process.stdout.splitlines() == ["a line"] * 3000 + ["the end"]


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_machine_without_the_tools_skips_unless_the_lab_is_required(required: str, outcome: str) -> None:
    test = f"{__file__}::test_multicast_reaches_every_host_of_its_lab_unless_cut_off_and_none_of_another"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env={**os.environ, "PATH": "/nonexistent", "MINGLE_LAB_REQUIRED": required},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome in run.stdout
    assert "apt-get install iproute2 nftables" in run.stdout


# --- processes ------------------------------------------------------------------------------------------------------


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
