"""``watch``: what is new, what is gone, what has changed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mingle.cli.watch import changes
from tests.bystanders import announcing, command_environment, free_udp_port

A, B = ("a", "1"), ("b", None)


def test_changes() -> None:
    record = {"state": "open", "seconds": 1.0}
    assert list(changes({}, {A: record})) == [("new", A)]
    assert list(changes({A: record}, {})) == [("gone", A)]
    assert list(changes({A: record}, {A: {**record, "seconds": 9.0}})) == []
    assert list(changes({A: record}, {A: {**record, "state": "sealed"}, B: record})) == [("changed", A), ("new", B)]


@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_pipe(as_json: bool) -> None:
    port = free_udp_port()
    words = ["watch", "-t", "30", *(["--json"] if as_json else [])]
    with subprocess.Popen(
        [sys.executable, "-m", "mingle", *words],
        env=command_environment(port),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        with announcing("resnet", "--master-port", "29500", port=port):
            first = watching.stdout.readline()
        last = ""
        while not last.startswith(("-", '{"schema": 1, "command": "watch", "event": "gone"')):
            last = watching.stdout.readline()
            assert last
        watching.terminate()
    if as_json:
        event = json.loads(first)
        assert (event["event"], event["job"]["job"], event["job"]["port"]) == ("new", "resnet", 29500)
    else:
        assert first.startswith("+\tresnet\tannounced\t")
        assert last.startswith("-\tresnet\t")
